/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_nohit.c: what kvferry costs an engine when nothing hits.
 *
 *   bench_nohit --socket PATH [--d-model N] [--seconds N] [--pairs N]
 *
 * A loop of prompts of 256 tokens, each new: the products of one layer of Llama-3.1-8B by the BLAS,
 * on one thread. With kvferry, each prompt is looked up before (a miss) and its K and V, exact, are
 * put after, as a connector does; the daemon stores them meanwhile and pushes old ones out. One
 * layer is the hard case: the lookup of a whole model's prompt is one, too.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "client/x_blas.h"
#include "kvferry.h"
#include "tests/bench/bench.h"

enum {
    DIM = 128,
    TOKENS = 256,
    PAGE_TOKENS = 16,
    ELEMENT_BYTES = 2,
    QUERIES_A_HEAD = 4,
    EVENTS = 64,
};

struct nohit {
    struct bench_run run;
    struct kvf_blas blas;
    const char *socket_path;
    struct kvf_client *client;
    uint32_t d_model;
    uint32_t d_kv;
    uint32_t d_ffn;
    float *weights; /* of the largest product; smaller ones use a part */
    float *input;   /* [tokens][the widest] */
    float *output;
    void *k_layer;
    void *v_layer;
    uint64_t n_prompts;
    uint64_t in_calls_ns; /* of the loop with kvferry */
    uint64_t loop_ns;
};

static size_t weights_numbers(const struct nohit *b)
{
    return (size_t)b->d_model * b->d_ffn;
}

static size_t kv_bytes(const struct nohit *b)
{
    return (size_t)TOKENS * b->d_kv * ELEMENT_BYTES;
}

/* --- a prefill -------------------------------------------------------------------------------- */

static void product(struct nohit *b, uint32_t from, uint32_t to)
{
    const int m = (int)to;
    const int n = TOKENS;
    const int k = (int)from;
    const float one = 1;
    const float beta = 0;

    b->blas.sgemm("T", "N", &m, &n, &k, &one, b->weights, &k, b->input, &k, &beta, b->output, &m, 1,
                  1);
}

/* Queries, keys, values, output, and the three of the network behind them. */
static void prefill(struct nohit *b)
{
    product(b, b->d_model, b->d_model);
    product(b, b->d_model, b->d_kv);
    product(b, b->d_model, b->d_kv);
    product(b, b->d_model, b->d_model);
    product(b, b->d_model, b->d_ffn);
    product(b, b->d_model, b->d_ffn);
    product(b, b->d_ffn, b->d_model);
}

/* --- with kvferry ----------------------------------------------------------------------------- */

static struct kvf_key prompt_key(const struct nohit *b, uint64_t words[4])
{
    words[0] = b->n_prompts;
    words[1] = ~b->n_prompts;
    words[2] = 0x6e6f686974;
    words[3] = 1;
    return (struct kvf_key){.data = words, .bytes = 4 * sizeof(words[0])};
}

static void look_up(struct nohit *b)
{
    struct kvf_lookup_options options = {.struct_bytes = sizeof(options),
                                         .flags = KVF_LOOKUP_LEASE | KVF_LOOKUP_PREFETCH};
    struct kvf_lookup_result result;
    uint64_t words[4];
    struct kvf_key key = prompt_key(b, words);
    int status = kvf_lookup(b->client, &key, 1, &options, &result);

    if (status != KVF_OK || result.run_chunks != 0) {
        bench_die("a prompt that is new: %s, %u chunks", kvf_status_text(status),
                  (unsigned)result.run_chunks);
    }
}

static void take_events(struct nohit *b)
{
    struct kvf_event events[EVENTS];
    uint32_t n;
    int status;

    while ((status = kvf_poll(b->client, events, EVENTS, 0, &n)) == KVF_OK) {
        for (uint32_t i = 0; i < n; i++) {
            if (events[i].hit.status != KVF_OK) {
                bench_die("put: %s", kvf_status_text(events[i].hit.status));
            }
        }
    }
    if (status != KVF_EMPTY) {
        bench_die("poll: %s", kvf_status_text(status));
    }
}

static void store(struct nohit *b)
{
    const size_t token_bytes = (size_t)b->d_kv * ELEMENT_BYTES;
    const struct kvf_tensor_view tensor = {.page_stride_bytes = PAGE_TOKENS * token_bytes,
                                           .token_stride_bytes = token_bytes,
                                           .head_stride_bytes = DIM * ELEMENT_BYTES};
    struct kvf_kv_view view = {
        .struct_bytes = sizeof(view), .tokens_a_page = PAGE_TOKENS, .k = tensor, .v = tensor};
    struct kvf_put_item item = {
        .struct_bytes = sizeof(item), .source = KVF_SOURCE_VIEW, .kv = &view};
    uint64_t words[4];
    uint64_t request;
    int status;

    view.k.layers = &b->k_layer;
    view.v.layers = &b->v_layer;
    item.key = prompt_key(b, words);
    status = kvf_submit_put(b->client, &item, 1, NULL, 0, &request);
    if (status != KVF_OK) {
        bench_die("put: %s", kvf_status_text(status));
    }
}

/* Seconds a prompt. */
static double with_kvferry(void *ctx, double seconds)
{
    struct nohit *b = ctx;
    uint64_t start_ns = kvf_now_ns();
    uint64_t first = b->n_prompts;
    uint64_t now_ns;

    do {
        uint64_t before_ns = kvf_now_ns();
        uint64_t computed_ns;

        take_events(b);
        look_up(b);
        b->in_calls_ns += kvf_now_ns() - before_ns;
        prefill(b);
        computed_ns = kvf_now_ns();
        store(b);
        b->n_prompts++;
        now_ns = kvf_now_ns();
        b->in_calls_ns += now_ns - computed_ns;
    } while ((double)(now_ns - start_ns) < seconds * 1e9);
    b->loop_ns += now_ns - start_ns;
    return (double)(now_ns - start_ns) / 1e9 / (double)(b->n_prompts - first);
}

static double without(void *ctx, double seconds)
{
    struct nohit *b = ctx;
    uint64_t start_ns = kvf_now_ns();
    uint64_t n = 0;

    do {
        prefill(b);
        n++;
    } while ((double)(kvf_now_ns() - start_ns) < seconds * 1e9);
    return (double)(kvf_now_ns() - start_ns) / 1e9 / (double)n;
}

/* Percent of the loop that was spent inside the library's calls. */
static double calls_share(void *ctx, double seconds)
{
    struct nohit *b = ctx;

    b->in_calls_ns = 0;
    b->loop_ns = 0;
    with_kvferry(b, seconds);
    return 100 * (double)b->in_calls_ns / (double)b->loop_ns;
}

/* --- all of it -------------------------------------------------------------------------------- */

static float *numbers(size_t n, uint64_t seed)
{
    float *values = bench_memory(n * sizeof(*values), seed);
    const uint32_t *words = (const uint32_t *)(const void *)values;

    for (size_t i = 0; i < n; i++) {
        values[i] = ((float)(words[i] >> 8) * 0x1p-24f - 0.5f) / 8;
    }
    return values;
}

/* bf16, of what an engine's product gives: the exact profile packs exponents. */
static void *kv_numbers(const struct nohit *b, uint64_t seed)
{
    size_t n = kv_bytes(b) / ELEMENT_BYTES;
    float *values = numbers(n, seed);
    uint16_t *halves = bench_memory(kv_bytes(b), 0);

    for (size_t i = 0; i < n; i++) {
        uint32_t bits;

        memcpy(&bits, &values[i], sizeof(bits));
        halves[i] = (uint16_t)(bits >> 16);
    }
    bench_memory_free(values, n * sizeof(*values));
    return halves;
}

static void attach(struct nohit *b)
{
    struct kvf_geometry geometry = {.struct_bytes = sizeof(geometry),
                                    .kind = KVF_KIND_KV,
                                    .dtype = KVF_DTYPE_BF16,
                                    .rope_state = KVF_ROPE_POST,
                                    .n_layers = 1,
                                    .n_heads = (uint16_t)(b->d_kv / DIM),
                                    .dim_k = DIM,
                                    .dim_v = DIM,
                                    .chunk_tokens = TOKENS};
    struct kvf_options options;
    int status;

    kvf_options_init(&options);
    options.socket_path = b->socket_path;
    options.client_name = "bench_nohit";
    options.profile = "exact";
    options.geometry = &geometry;
    options.staging_bytes = 8 * (2 * kv_bytes(b) + 2 * KVF_RECORD_PAGE_BYTES);
    status = kvf_open(&options, &b->client);
    if (status != KVF_OK) {
        bench_die("cannot attach: %s", kvf_status_text(status));
    }
}

/* Until the arena has been written once and blocks are pushed out. */
static void fill_arena(struct nohit *b)
{
    struct kvf_info info = {.struct_bytes = sizeof(info)};

    if (kvf_client_info(b->client, &info) != KVF_OK) {
        bench_die("no facts about the connection");
    }
    for (uint64_t bytes = 0; bytes < info.arena_bytes; bytes += kv_bytes(b)) {
        struct kvf_event events[EVENTS];
        uint32_t n;

        store(b);
        b->n_prompts++;
        for (uint32_t n_done = 0; n_done < 2; n_done += n) {
            if (kvf_poll(b->client, events, EVENTS, 60000, &n) != KVF_OK) {
                bench_die("the arena does not fill");
            }
        }
    }
}

int main(int argc, char **argv)
{
    struct nohit bench = {0};
    char text[KVF_BLAS_TEXT_BYTES];

    /* before the library is opened, which reads it */
    setenv("OPENBLAS_NUM_THREADS", "1", 1);
    bench_init(&bench.run, argc, argv);
    bench.socket_path = bench_text(&bench.run, "--socket");
    bench.d_model = (uint32_t)bench_number(&bench.run, "--d-model", 4096);
    if (bench.socket_path == NULL || bench.d_model == 0 ||
        bench.d_model % (QUERIES_A_HEAD * DIM) != 0 || bench.d_model > 32768) {
        bench_die(
            "usage: bench_nohit --socket PATH [--d-model N], a multiple of 512, at most 32768");
    }
    if (kvf_blas_open(&bench.blas, text) != KVF_OK) {
        bench_print_skip("nohit_cost", text);
        bench_print_skip("nohit_calls", text);
        return 0;
    }
    bench.d_kv = bench.d_model / QUERIES_A_HEAD;
    bench.d_ffn = bench.d_model / 2 * 7;
    bench.weights = numbers(weights_numbers(&bench), 1);
    bench.input = numbers((size_t)TOKENS * bench.d_ffn, 2);
    bench.output = numbers((size_t)TOKENS * bench.d_ffn, 3);
    bench.k_layer = kv_numbers(&bench, 4);
    bench.v_layer = kv_numbers(&bench, 5);
    attach(&bench);
    fill_arena(&bench);
    bench_pairs(&bench.run, "nohit_cost", with_kvferry, without, &bench);
    bench_values(&bench.run, "nohit_calls", calls_share, &bench);
    kvf_close(bench.client);
    bench_memory_free(bench.k_layer, kv_bytes(&bench));
    bench_memory_free(bench.v_layer, kv_bytes(&bench));
    bench_memory_free(bench.output, (size_t)TOKENS * bench.d_ffn * sizeof(float));
    bench_memory_free(bench.input, (size_t)TOKENS * bench.d_ffn * sizeof(float));
    bench_memory_free(bench.weights, weights_numbers(&bench) * sizeof(float));
    return 0;
}
