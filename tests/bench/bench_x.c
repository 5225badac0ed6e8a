/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_x.c: K and V rebuilt from X and from latents by kvf_x_rebuild, on one core, beside the
 * BLAS's own products of the same shapes.
 *
 *   bench_x [--d-model N] [--seconds N] [--pairs N]
 *
 * Layers take turns, as they do in a request: ours widens each layer's weights from bf16, reads its
 * factors from their file, and writes K and V, rotated, to bf16 pages of 16 tokens. The limit has
 * fp32 matrices of its own for each layer. Both count the products' operations, by CPU time.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/x_blas.h"
#include "client/x_svd.h"
#include "kvferry.h"
#include "tests/bench/bench.h"
#include "tests/support/daemon.h"

enum {
    LAYERS = 2,
    DIM = 128,
    TOKENS_MAX = 1024,
    PAGE_TOKENS = 16,
    ELEMENT_BYTES = 2,
};

struct x_bench {
    struct bench_run run;
    struct kvf_blas blas;
    struct kvf_test_daemon daemon;
    struct kvf_client *client; /* of latents */
    uint32_t d_model;
    uint32_t n_tokens;
    bool is_latent;
    uint32_t rank; /* of latents; else d_model */
    uint32_t width;
    uint16_t n_heads;
    struct kvf_x *x;
    uint32_t layer; /* whose turn it is */
    uint16_t *w[LAYERS];
    const void *w_k[LAYERS];
    const void *w_v[LAYERS];
    float *cosines;
    float *sines;
    float *input; /* [tokens][rank], of X or latents */
    float *sums;  /* [tokens][d_model] */
    void *k_layers[LAYERS];
    void *v_layers[LAYERS];
    float *wide[LAYERS];    /* of the limit: [width][d_model] */
    float *factors[LAYERS]; /* of the limit: [d_model][rank] */
    float *out;             /* of the limit: [tokens][width] */
};

/* Small numbers, none of them a denormal one. */
static void *numbers(size_t n, uint64_t seed)
{
    float *values = bench_memory(n * sizeof(*values), seed);
    const uint32_t *words = (const uint32_t *)(const void *)values;

    for (size_t i = 0; i < n; i++) {
        values[i] = ((float)(words[i] >> 8) * 0x1p-24f - 0.5f) / 8;
    }
    return values;
}

static uint16_t *bf16_numbers(size_t n, uint64_t seed)
{
    float *values = numbers(n, seed);
    uint16_t *halves = bench_memory(n * sizeof(*halves), 0);

    for (size_t i = 0; i < n; i++) {
        uint32_t bits;

        memcpy(&bits, &values[i], sizeof(bits));
        halves[i] = (uint16_t)(bits >> 16);
    }
    bench_memory_free(values, n * sizeof(*values));
    return halves;
}

/* --- both sides ------------------------------------------------------------------------------- */

static double flop(const struct x_bench *b)
{
    double of_token = 2.0 * b->d_model * (b->width + (b->is_latent ? b->rank : 0));

    return of_token * b->n_tokens;
}

static void rebuild_layer(struct x_bench *b)
{
    const size_t token_bytes = (size_t)b->n_heads * DIM * ELEMENT_BYTES;
    const struct kvf_x_input input = {.struct_bytes = sizeof(input),
                                      .n_tokens = b->n_tokens,
                                      .dtype = KVF_DTYPE_F32,
                                      .data = b->input,
                                      .sums = b->is_latent ? b->sums : NULL};
    const struct kvf_tensor_view tensor = {.page_stride_bytes = PAGE_TOKENS * token_bytes,
                                           .token_stride_bytes = token_bytes,
                                           .head_stride_bytes = DIM * ELEMENT_BYTES};
    struct kvf_kv_view view = {
        .struct_bytes = sizeof(view), .tokens_a_page = PAGE_TOKENS, .k = tensor, .v = tensor};
    int status;

    view.k.layers = b->k_layers;
    view.v.layers = b->v_layers;
    status = kvf_x_rebuild(b->x, b->layer, &input, &view);
    if (status != KVF_OK) {
        bench_die("kvf_x_rebuild: %s", kvf_status_text(status));
    }
}

static void multiply_layer(struct x_bench *b)
{
    const int d_model = (int)b->d_model;
    const int rank = (int)b->rank;
    const int width = (int)b->width;
    const int n = (int)b->n_tokens;
    const float one = 1.0f;
    const float zero = 0.0f;
    const float *from = b->input;

    if (b->is_latent) {
        b->blas.sgemm("T", "N", &d_model, &n, &rank, &one, b->factors[b->layer], &rank, b->input,
                      &rank, &one, b->sums, &d_model, 1, 1);
        from = b->sums;
    }
    b->blas.sgemm("T", "N", &width, &n, &d_model, &one, b->wide[b->layer], &d_model, from, &d_model,
                  &zero, b->out, &width, 1, 1);
}

/* GFLOP a second of CPU, of so many layers as take that long: one thread does all of it, and who
 * else wants the CPU meanwhile does not count. */
static double run_layers(struct x_bench *b, double seconds, void (*step)(struct x_bench *b))
{
    double begun_s = bench_cpu_s();
    double done = 0;

    if (b->is_latent) {
        memset(b->sums, 0, (size_t)b->n_tokens * b->d_model * sizeof(*b->sums));
    }
    do {
        step(b);
        b->layer = (b->layer + 1) % LAYERS;
        done += flop(b);
    } while (bench_cpu_s() - begun_s < seconds || b->layer != 0);
    return done * 1e-9 / (bench_cpu_s() - begun_s);
}

static double ours(void *ctx, double seconds)
{
    return run_layers(ctx, seconds, rebuild_layer);
}

static double limit(void *ctx, double seconds)
{
    return run_layers(ctx, seconds, multiply_layer);
}

/* --- a model ---------------------------------------------------------------------------------- */

static void write_factors(const struct x_bench *b, const char *path)
{
    static const uint8_t digest[KVF_DIGEST_BYTES] = {1};
    const struct kvf_weights_model model = {.n_layers = LAYERS,
                                            .d_model = b->d_model,
                                            .n_query_heads = b->n_heads,
                                            .n_heads = b->n_heads,
                                            .dim_k = DIM,
                                            .dim_v = DIM};
    float *m = numbers((size_t)b->rank * b->width, 8);
    struct kvf_svd_writer *writer;
    char why[KVF_SVD_WHY_BYTES];
    int status = kvf_svd_writer_open(path, &model, b->rank, digest, &writer, why);

    for (int i = 0; status == KVF_OK && i < LAYERS; i++) {
        status = kvf_svd_writer_add(writer, b->factors[i], m, why);
    }
    if (status == KVF_OK) {
        status = kvf_svd_writer_commit(writer, why);
    }
    if (status != KVF_OK) {
        bench_die("factors: %s", why);
    }
    bench_memory_free(m, (size_t)b->rank * b->width * sizeof(*m));
}

static void say(void *arg, int severity, const char *text)
{
    (void)arg;
    if (severity <= 1) {
        fprintf(stderr, "libkvferry: %s\n", text);
    }
}

/* A client of latents of that file; nothing is put. */
static void attach(struct x_bench *b, const char *svd_file)
{
    struct kvf_geometry geometry = {.struct_bytes = sizeof(geometry),
                                    .dtype = KVF_DTYPE_BF16,
                                    .n_layers = LAYERS,
                                    .chunk_tokens = 256};
    struct kvf_x_factors factors = {.struct_bytes = sizeof(factors)};
    struct kvf_options options;
    int status;

    kvf_test_daemon_set(&b->daemon, "allow_uncalibrated=true");
    kvf_test_daemon_start(&b->daemon);
    kvf_test_client_options(&b->daemon, &options);
    if (kvf_x_factors_read(svd_file, &factors, say, NULL) != KVF_OK ||
        kvf_x_geometry(KVF_KIND_XG, factors.rank, &geometry) != KVF_OK) {
        bench_die("no factors");
    }
    options.geometry = &geometry;
    options.profile = "xgcl3";
    options.flags = KVF_ATTACH_ALLOW_UNCALIBRATED;
    options.log = say;
    memcpy(options.weights_digest, factors.weights_digest, KVF_DIGEST_BYTES);
    memcpy(options.factors_digest, factors.digest, KVF_DIGEST_BYTES);
    status = kvf_open(&options, &b->client);
    if (status != KVF_OK) {
        bench_die("kvf_open: %s", kvf_status_text(status));
    }
}

static void register_weights(struct x_bench *b, const char *svd_file)
{
    const struct kvf_x_weights weights = {
        .struct_bytes = sizeof(weights),
        .d_model = b->d_model,
        .stored_width = b->rank,
        .n_layers = LAYERS,
        .n_heads = b->n_heads,
        .dim_k = DIM,
        .dim_v = DIM,
        .dtype = KVF_DTYPE_BF16,
        .kv_dtype = KVF_DTYPE_BF16,
        .rope_style = KVF_ROPE_STYLE_HALF,
        .rope_positions = TOKENS_MAX,
        .w_k = b->w_k,
        .w_v = b->w_v,
        .rope_cos = b->cosines,
        .rope_sin = b->sines,
        .weights_digest = {1},
        .log = say,
        .svd_file = svd_file,
    };
    int status = kvf_x_open(b->client, &weights, &b->x);

    if (status != KVF_OK) {
        bench_die("kvf_x_open: %s", kvf_status_text(status));
    }
}

static void model_init(struct x_bench *b, uint16_t n_heads, bool is_latent)
{
    const size_t kv_bytes = (size_t)TOKENS_MAX * n_heads * DIM * ELEMENT_BYTES;

    b->n_heads = n_heads;
    b->is_latent = is_latent;
    b->width = 2u * n_heads * DIM;
    b->rank = is_latent ? b->width : b->d_model;
    b->layer = 0;
    b->input = numbers((size_t)TOKENS_MAX * b->rank, 3);
    b->sums = numbers((size_t)TOKENS_MAX * b->d_model, 4);
    b->out = numbers((size_t)TOKENS_MAX * b->width, 5);
    b->cosines = numbers((size_t)TOKENS_MAX * DIM / 2, 6);
    b->sines = numbers((size_t)TOKENS_MAX * DIM / 2, 7);
    for (uint32_t i = 0; i < LAYERS; i++) {
        b->w[i] = bf16_numbers((size_t)b->width * b->d_model, 10 + i);
        b->w_k[i] = b->w[i];
        b->w_v[i] = b->w[i] + (size_t)b->width / 2 * b->d_model;
        b->wide[i] = numbers((size_t)b->width * b->d_model, 10 + i);
        b->factors[i] = numbers((size_t)b->d_model * b->rank, 20 + i);
        b->k_layers[i] = bench_memory(kv_bytes, 0);
        b->v_layers[i] = bench_memory(kv_bytes, 0);
    }
}

static void model_fini(struct x_bench *b)
{
    const size_t kv_bytes = (size_t)TOKENS_MAX * b->n_heads * DIM * ELEMENT_BYTES;
    const size_t w_numbers = (size_t)b->width * b->d_model;

    b->x = kvf_x_close(b->x);
    bench_memory_free(b->input, (size_t)TOKENS_MAX * b->rank * sizeof(float));
    bench_memory_free(b->sums, (size_t)TOKENS_MAX * b->d_model * sizeof(float));
    bench_memory_free(b->out, (size_t)TOKENS_MAX * b->width * sizeof(float));
    bench_memory_free(b->cosines, (size_t)TOKENS_MAX * DIM / 2 * sizeof(float));
    bench_memory_free(b->sines, (size_t)TOKENS_MAX * DIM / 2 * sizeof(float));
    for (uint32_t i = 0; i < LAYERS; i++) {
        bench_memory_free(b->w[i], w_numbers * ELEMENT_BYTES);
        bench_memory_free(b->wide[i], w_numbers * sizeof(float));
        bench_memory_free(b->factors[i], (size_t)b->d_model * b->rank * sizeof(float));
        bench_memory_free(b->k_layers[i], kv_bytes);
        bench_memory_free(b->v_layers[i], kv_bytes);
    }
}

static void measure(struct x_bench *b, const char *what)
{
    static const uint32_t counts[] = {64, 256, 1024};

    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        char name[64];

        b->n_tokens = counts[i];
        snprintf(name, sizeof(name), "x_rebuild%s_%u", what, counts[i]);
        bench_pairs(&b->run, name, ours, limit, b);
    }
}

int main(int argc, char **argv)
{
    struct x_bench bench = {0};
    char text[KVF_BLAS_TEXT_BYTES];
    char svd_file[KVF_TEST_PATH_BYTES];
    uint16_t n_heads;

    /* before the library is opened, which reads it */
    setenv("OPENBLAS_NUM_THREADS", "1", 1);
    bench_init(&bench.run, argc, argv);
    bench.d_model = (uint32_t)bench_number(&bench.run, "--d-model", 2048);
    n_heads = (uint16_t)(bench.d_model / DIM);
    if (n_heads < 4 || n_heads % 4 != 0 || bench.d_model % DIM != 0 || n_heads > KVF_HEADS_MAX) {
        bench_die("--d-model: a multiple of 512, at most 131072");
    }
    if (kvf_blas_open(&bench.blas, text) != KVF_OK) {
        for (int i = 0; i < 6; i++) {
            char name[64];

            snprintf(name, sizeof(name), "x_rebuild%s_%d", i < 3 ? "" : "_latent",
                     64 << 2 * (i % 3));
            bench_print_skip(name, text);
        }
        return 0;
    }
    model_init(&bench, n_heads, false); /* every query head has a K/V head */
    register_weights(&bench, NULL);
    measure(&bench, "");
    model_fini(&bench);
    model_init(&bench, n_heads / 4, true); /* four query heads share one */
    kvf_test_daemon_create(&bench.daemon, NULL);
    kvf_test_dir_path(&bench.daemon.dir, "factors.svd", svd_file);
    write_factors(&bench, svd_file);
    attach(&bench, svd_file);
    register_weights(&bench, svd_file);
    measure(&bench, "_latent");
    model_fini(&bench);
    kvf_close(bench.client);
    kvf_test_daemon_destroy(&bench.daemon);
    return 0;
}
