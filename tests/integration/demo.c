/* SPDX-License-Identifier: Apache-2.0
 *
 * demo.c: one step of `make demo`, a process of its own (see demo.sh for the order of the steps).
 *
 *   put   store K and V of two real models under two profiles, with the write to the drive awaited;
 *         keep what they decode to, for the steps that follow
 *   get   find, fetch, decode and compare; print a row of the table for each
 *
 * Whatever must be equal and is not, a block that is missing, a hit on another tier than the one
 * expected and a lost lease end the step with exit code 1.
 */
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kvferry.h"
#include "tests/support/kv_data.h"

#define WAIT_NS       (60 * UINT64_C(1000000000)) /* for a daemon that starts */
#define BUDGET_MS     60000 /* of a request: a slow machine is not what this is about */
#define OPEN_PAUSE_NS 1000000
#define PATH_BYTES    4096
#define TOKENS_A_PAGE 16 /* of the pages that engines have */
#define SINK_TOKENS   4  /* the start of a sequence is kept raw by lossy profiles */
#define CHUNKS_MAX    16
#define KEY_BYTES     32
#define N_KINDS       2 /* K, V */

/* One row: a model's tokens under a profile, cut into blocks. Lossy profiles subtract the channel
 * means of K only in blocks of 128 tokens or more: the rows of 64 show what that is worth. */
struct demo_case {
    const char *model;
    const char *profile;
    uint16_t chunk_tokens;
};

static const struct demo_case cases[] = {
    {"smollm2-135m", "exact", 256},          {"smollm2-135m", "exact", 64},
    {"smollm2-135m", "balanced", 256},       {"smollm2-135m", "balanced", 64},
    {"qwen2.5-coder-0.5b", "exact", 256},    {"qwen2.5-coder-0.5b", "exact", 64},
    {"qwen2.5-coder-0.5b", "balanced", 256}, {"qwen2.5-coder-0.5b", "balanced", 64},
};

struct demo_args {
    bool is_put;
    const char *socket;
    const char *data;    /* tests/data/kv */
    const char *work;    /* where steps leave files for the next ones */
    int tier;            /* enum kvf_tier_kind that hits must have */
    uint64_t started_ns; /* get: when the daemon was started, wall clock; 0: not asked */
};

/* What the put step leaves in a file, followed by the decoded bytes of K and of V. */
struct demo_saved {
    uint64_t incarnation; /* of the daemon that took the blocks */
    uint64_t put_ns;
    uint64_t stored_bytes;
};

/* K or V: the original, and room for what comes back, both [layer][head][token][dim]. */
struct demo_tensor {
    struct kvf_test_kv original;
    uint8_t *decoded;
};

struct demo_run {
    const struct demo_args *args;
    const struct demo_case *row;
    char folder[PATH_BYTES];
    struct demo_tensor tensors[N_KINDS];
    struct kvf_geometry geometry;
    struct kvf_client *client;
    struct kvf_info info;
    char log_line[512]; /* of the library, before there is a handle */
    uint32_t n_chunks;
    uint8_t keys[CHUNKS_MAX][KEY_BYTES];
    struct kvf_key key_list[CHUNKS_MAX];
    struct kvf_hit hits[CHUNKS_MAX];
    struct demo_saved saved;
    uint64_t get_ns;
    uint64_t decode_ns;
};

/* ----------------------------------------------------------------------------------------------
 * Help
 */
static bool fail(const struct demo_run *run, const char *what, int status)
{
    fprintf(stderr, "kvferry-demo: %s, %s, blocks of %u tokens: %s (%s)\n", run->row->model,
            run->row->profile, run->row->chunk_tokens, what, kvf_status_text(status));
    return false;
}

/* While the daemon starts, attaching fails again and again: then only the last line counts. */
static void keep_log(void *arg, int severity, const char *text)
{
    struct demo_run *run = arg;

    if (severity > 1) {
        return;
    }
    if (run->client == NULL) {
        snprintf(run->log_line, sizeof(run->log_line), "%s", text);
    } else {
        fprintf(stderr, "libkvferry: %s\n", text);
    }
}

static uint64_t clock_ns(clockid_t clock)
{
    struct timespec now;

    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static double ms(uint64_t ns)
{
    return (double)ns / 1e6;
}

/* ----------------------------------------------------------------------------------------------
 * A row's tensors, geometry, keys and handle
 */
static bool run_describe(struct demo_run *run)
{
    const struct kvf_test_kv *k = &run->tensors[0].original;
    const struct kvf_test_kv *v = &run->tensors[1].original;

    snprintf(run->folder, sizeof(run->folder), "%s/%s", run->args->data, run->row->model);
    if (kvf_test_kv_find(run->folder, "k_post", 0, &run->tensors[0].original) != KVF_OK ||
        kvf_test_kv_find(run->folder, "v", 0, &run->tensors[1].original) != KVF_OK) {
        return false;
    }
    run->n_chunks = k->n_tokens / run->row->chunk_tokens;
    if (k->dtype != KVF_DTYPE_BF16 || v->dtype != KVF_DTYPE_BF16 || k->n_layers != v->n_layers ||
        k->n_heads != v->n_heads || k->n_tokens != v->n_tokens || run->n_chunks > CHUNKS_MAX ||
        run->n_chunks * run->row->chunk_tokens != k->n_tokens) {
        return fail(run, "K and V do not fit together", KVF_ERR_MISMATCH);
    }
    run->geometry = (struct kvf_geometry){
        .struct_bytes = sizeof(run->geometry),
        .kind = KVF_KIND_KV,
        .dtype = KVF_DTYPE_BF16,
        .rope_state = KVF_ROPE_POST,
        .n_layers = (uint16_t)k->n_layers,
        .n_heads = (uint16_t)k->n_heads,
        .dim_k = (uint16_t)k->dim,
        .dim_v = (uint16_t)v->dim,
        .chunk_tokens = run->row->chunk_tokens,
        .sink_tokens = SINK_TOKENS,
    };
    for (uint32_t i = 0; i < run->n_chunks; i++) {
        /* an engine gives the hash of the tokens up to the chunk's end */
        snprintf((char *)run->keys[i], KEY_BYTES, "%.20s %u", run->row->model, i);
        run->key_list[i] = (struct kvf_key){.data = run->keys[i], .bytes = KEY_BYTES};
    }
    return true;
}

static bool run_load(struct demo_run *run)
{
    for (int kind = 0; kind < N_KINDS; kind++) {
        struct demo_tensor *tensor = &run->tensors[kind];

        if (kvf_test_kv_load(run->folder, &tensor->original) != KVF_OK) {
            return false;
        }
        tensor->decoded = calloc(1, tensor->original.bytes);
        if (tensor->decoded == NULL) {
            return fail(run, "memory", KVF_ERR_NO_MEMORY);
        }
    }
    return true;
}

/* Attach; waits for a daemon that is starting. */
static bool run_attach(struct demo_run *run)
{
    struct kvf_options options;
    struct timespec pause = {.tv_nsec = OPEN_PAUSE_NS};
    uint64_t deadline_ns = clock_ns(CLOCK_MONOTONIC) + WAIT_NS;
    int status;

    kvf_options_init(&options);
    options.flags = KVF_ATTACH_ALLOW_UNCALIBRATED;
    options.socket_path = run->args->socket;
    options.client_name = run->args->is_put ? "demo-put" : "demo-get";
    options.profile = run->row->profile;
    options.geometry = &run->geometry;
    /* an engine gives the digest of the weights; the model's name is all there is here */
    snprintf((char *)options.weights_digest, sizeof(options.weights_digest), "%s", run->row->model);
    options.log = keep_log;
    options.log_arg = run;
    for (;;) {
        status = kvf_open(&options, &run->client);
        if (status != KVF_ERR_NO_DAEMON || clock_ns(CLOCK_MONOTONIC) > deadline_ns) {
            break;
        }
        nanosleep(&pause, NULL);
    }
    if (status != KVF_OK) {
        return fail(run, run->log_line, status);
    }
    run->info.struct_bytes = sizeof(run->info);
    status = kvf_client_info(run->client, &run->info);
    if (status != KVF_OK || strcmp(run->info.profile, run->row->profile) != 0) {
        return fail(run, "another profile is in force", status);
    }
    return true;
}

/* Pages of TOKENS_A_PAGE tokens for one chunk, in place in the array. */
struct demo_pages {
    struct kvf_kv_view view;
    void *layers[N_KINDS][KVF_LAYERS_MAX];
};

static void pages_init(struct demo_pages *pages, const struct demo_run *run, uint32_t chunk,
                       bool is_decoded)
{
    struct kvf_tensor_view *views[N_KINDS] = {&pages->view.k, &pages->view.v};

    pages->view = (struct kvf_kv_view){
        .struct_bytes = sizeof(pages->view),
        .tokens_a_page = TOKENS_A_PAGE,
    };
    for (int kind = 0; kind < N_KINDS; kind++) {
        const struct kvf_test_kv *kv = &run->tensors[kind].original;
        uint8_t *base = is_decoded ? run->tensors[kind].decoded : kv->data;
        size_t token_bytes = kvf_test_kv_head_bytes(kv) / kv->n_tokens;

        base += chunk * run->row->chunk_tokens * token_bytes;
        for (uint32_t layer = 0; layer < kv->n_layers; layer++) {
            pages->layers[kind][layer] = base + layer * kvf_test_kv_layer_bytes(kv);
        }
        *views[kind] = (struct kvf_tensor_view){
            .layers = pages->layers[kind],
            .page_stride_bytes = TOKENS_A_PAGE * token_bytes,
            .token_stride_bytes = token_bytes,
            .head_stride_bytes = kvf_test_kv_head_bytes(kv),
        };
    }
}

/* ----------------------------------------------------------------------------------------------
 * Put
 */
static bool run_put(struct demo_run *run)
{
    struct kvf_put_options options = {
        .struct_bytes = sizeof(options),
        .flags = KVF_PUT_DURABLE,
        .budget_ms = BUDGET_MS,
    };
    struct demo_pages *pages = calloc(run->n_chunks, sizeof(*pages));
    struct kvf_put_item items[CHUNKS_MAX];
    int32_t statuses[CHUNKS_MAX];
    uint64_t start_ns;
    int status;

    if (pages == NULL) {
        return fail(run, "memory", KVF_ERR_NO_MEMORY);
    }
    for (uint32_t i = 0; i < run->n_chunks; i++) {
        pages_init(&pages[i], run, i, false);
        items[i] = (struct kvf_put_item){
            .struct_bytes = sizeof(items[i]),
            .source = KVF_SOURCE_VIEW,
            .key = run->key_list[i],
            .token_start = i * run->row->chunk_tokens,
            .kv = &pages[i].view,
        };
    }
    start_ns = clock_ns(CLOCK_MONOTONIC);
    status = kvf_put(run->client, items, run->n_chunks, &options, statuses);
    run->saved.put_ns = clock_ns(CLOCK_MONOTONIC) - start_ns;
    run->saved.incarnation = run->info.incarnation;
    free(pages);
    for (uint32_t i = 0; i < run->n_chunks && status == KVF_OK; i++) {
        if (statuses[i] != KVF_OK) {
            return fail(run, "a block of a new store was there already", statuses[i]);
        }
    }
    return status == KVF_OK || fail(run, "put", status);
}

/* ----------------------------------------------------------------------------------------------
 * Get: find and fetch, then decode while the leases hold
 */
static bool run_find(struct demo_run *run)
{
    struct kvf_lookup_options options = {.struct_bytes = sizeof(options)};
    struct kvf_lookup_result found = {0};
    bool is_dram = run->args->tier == KVF_TIER_DRAM;
    int status = kvf_lookup(run->client, run->key_list, run->n_chunks, &options, &found);

    if (status != KVF_OK) {
        return fail(run, "lookup", status);
    }
    if (found.run_chunks != run->n_chunks) {
        return fail(run, "lookup does not find every block", KVF_MISS);
    }
    if (found.ready_chunks != (is_dram ? run->n_chunks : 0)) {
        return fail(run, "lookup finds blocks on another tier", KVF_MISS);
    }
    return true;
}

static bool run_fetch(struct demo_run *run)
{
    struct kvf_get_options options = {.struct_bytes = sizeof(options), .budget_ms = BUDGET_MS};
    uint64_t start_ns = clock_ns(CLOCK_MONOTONIC);
    int status = kvf_get(run->client, run->key_list, run->n_chunks, &options, run->hits);

    run->get_ns = clock_ns(CLOCK_MONOTONIC) - start_ns;
    if (status != KVF_OK) {
        return fail(run, "get", status);
    }
    for (uint32_t i = 0; i < run->n_chunks; i++) {
        if (run->hits[i].tier != run->args->tier) {
            return fail(run, "a hit came from another tier", run->hits[i].status);
        }
    }
    return true;
}

/* Decodes every block and gives the leases back: what was read counts only if none was lost. */
static bool run_decode(struct demo_run *run)
{
    uint64_t start_ns = clock_ns(CLOCK_MONOTONIC);
    struct demo_pages pages;
    struct kvf_stat stat = {.struct_bytes = sizeof(stat)};
    int status = KVF_OK;

    for (uint32_t i = 0; i < run->n_chunks && status == KVF_OK; i++) {
        pages_init(&pages, run, i, true);
        status = kvf_decode(run->client, run->hits[i].record, run->hits[i].record_bytes, 0, 0, 0, 0,
                            &pages.view);
    }
    run->decode_ns = clock_ns(CLOCK_MONOTONIC) - start_ns;
    if (status != KVF_OK) {
        return fail(run, "decode", status);
    }
    for (uint32_t i = 0; i < run->n_chunks; i++) {
        status = kvf_lease_release(run->client, run->hits[i].lease);
        if (status != KVF_OK) {
            return fail(run, "lease", status);
        }
    }
    status = kvf_stat(run->client, &stat);
    if (status != KVF_OK || stat.lost_leases != 0 || stat.leased_bytes != 0) {
        return fail(run, "leases are lost or left over", status);
    }
    return true;
}

static uint64_t stored_bytes(const struct demo_run *run)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < run->n_chunks; i++) {
        bytes += run->hits[i].record_bytes;
    }
    return bytes;
}

/* ----------------------------------------------------------------------------------------------
 * What must be equal
 */
static FILE *open_saved(const struct demo_run *run, const char *mode)
{
    char path[PATH_BYTES];
    FILE *file;

    snprintf(path, sizeof(path), "%s/%s.%s.%u", run->args->work, run->row->model, run->row->profile,
             run->row->chunk_tokens);
    file = fopen(path, mode);
    if (file == NULL) {
        fprintf(stderr, "kvferry-demo: %s: %s\n", path, strerror(errno));
    }
    return file;
}

static bool run_save(struct demo_run *run)
{
    FILE *file = open_saved(run, "wbe");
    bool is_written;

    if (file == NULL) {
        return false;
    }
    run->saved.stored_bytes = stored_bytes(run);
    is_written = fwrite(&run->saved, sizeof(run->saved), 1, file) == 1;
    for (int kind = 0; kind < N_KINDS && is_written; kind++) {
        const struct demo_tensor *tensor = &run->tensors[kind];

        is_written = fwrite(tensor->decoded, tensor->original.bytes, 1, file) == 1;
    }
    is_written = fclose(file) == 0 && is_written;
    return is_written || fail(run, "the decoded bytes cannot be kept", KVF_ERR_IO);
}

static bool equals_saved(struct demo_run *run, FILE *file)
{
    bool is_equal = fread(&run->saved, sizeof(run->saved), 1, file) == 1;

    for (int kind = 0; kind < N_KINDS && is_equal; kind++) {
        const struct demo_tensor *tensor = &run->tensors[kind];
        uint8_t *before = malloc(tensor->original.bytes);

        is_equal = before != NULL && fread(before, tensor->original.bytes, 1, file) == 1 &&
                   memcmp(before, tensor->decoded, tensor->original.bytes) == 0;
        free(before);
    }
    return is_equal;
}

/* The same bytes as the process decoded that put them, out of the daemon expected. */
static bool run_check_saved(struct demo_run *run)
{
    FILE *file = open_saved(run, "rbe");
    bool is_equal;
    bool is_same_daemon;

    if (file == NULL) {
        return false;
    }
    is_equal = equals_saved(run, file);
    fclose(file);
    if (!is_equal) {
        return fail(run, "decodes to other bytes than after the put", KVF_ERR_CORRUPT);
    }
    if (run->saved.stored_bytes != stored_bytes(run)) {
        return fail(run, "records have another size than after the put", KVF_ERR_CORRUPT);
    }
    is_same_daemon = run->saved.incarnation == run->info.incarnation;
    if (is_same_daemon != (run->args->started_ns == 0)) {
        return fail(run, "the daemon has not been restarted when it should", KVF_ERR_INTERNAL);
    }
    return true;
}

static bool run_check_lossless(const struct demo_run *run)
{
    for (int kind = 0; kind < N_KINDS && run->info.lossless; kind++) {
        const struct demo_tensor *tensor = &run->tensors[kind];

        if (memcmp(tensor->original.data, tensor->decoded, tensor->original.bytes) != 0) {
            return fail(run, "lossless, but not the original's bytes", KVF_ERR_CORRUPT);
        }
    }
    return true;
}

/* ----------------------------------------------------------------------------------------------
 * The table
 */
#define HEAD_FORMAT "%-18s %-8s %-7s %5s %6s %5s %7s %7s %7s %7s %7s %6s %5s %6s %s\n"
#define ROW_FORMAT                                                                                 \
    "%-18s %-8s %-7s %5.0f %6.0f %5.2f %7.5f %7.5f %7.5f %7.4f %7.4f %6s %5.2f %6.1f %s\n"

static void print_head(void)
{
    printf(HEAD_FORMAT, "", "", "block x", "raw", "stored", "", "K", "worst K", "V", "max rel",
           "worst K", "put", "get", "decode", "from");
    printf(HEAD_FORMAT, "model", "profile", "blocks", "KiB", "KiB", "ratio", "cosine", "layer",
           "cosine", "error", "noise", "ms", "ms", "ms", "tier");
}

struct demo_figures {
    double cosine[N_KINDS];
    double k_cosine_worst; /* of all layers */
    double k_noise_worst;  /* of all heads */
    double error_max;
};

static void figures_compute(const struct demo_run *run, struct demo_figures *figures)
{
    *figures = (struct demo_figures){.k_cosine_worst = 1};
    for (int kind = 0; kind < N_KINDS; kind++) {
        const struct demo_tensor *tensor = &run->tensors[kind];
        struct kvf_test_kv_sums all = {0};

        for (uint32_t layer = 0; layer < tensor->original.n_layers; layer++) {
            struct kvf_test_kv_sums of_layer = {0};

            for (uint32_t head = 0; head < tensor->original.n_heads; head++) {
                struct kvf_test_kv_sums of_head = {0};

                kvf_test_kv_compare(&tensor->original, tensor->decoded, layer, head, &of_head);
                kvf_test_kv_sums_add(&of_layer, &of_head);
                if (kind == 0 && kvf_test_kv_noise(&of_head) > figures->k_noise_worst) {
                    figures->k_noise_worst = kvf_test_kv_noise(&of_head);
                }
            }
            kvf_test_kv_sums_add(&all, &of_layer);
            if (kind == 0 && kvf_test_kv_cosine(&of_layer) < figures->k_cosine_worst) {
                figures->k_cosine_worst = kvf_test_kv_cosine(&of_layer);
            }
        }
        figures->cosine[kind] = kvf_test_kv_cosine(&all);
        if (all.vector_error_max > figures->error_max) {
            figures->error_max = all.vector_error_max;
        }
    }
}

static void print_row(const struct demo_run *run)
{
    double raw_bytes = (double)(run->tensors[0].original.bytes + run->tensors[1].original.bytes);
    double stored = (double)run->saved.stored_bytes;
    bool is_first = run->args->started_ns == 0;
    struct demo_figures figures;
    char tokens[32];
    char put[32];

    figures_compute(run, &figures);
    snprintf(tokens, sizeof(tokens), "%u x %u", run->row->chunk_tokens, run->n_chunks);
    snprintf(put, sizeof(put), is_first ? "%.1f" : "-", ms(run->saved.put_ns));
    printf(ROW_FORMAT, run->row->model, run->row->profile, tokens, raw_bytes / 1024, stored / 1024,
           raw_bytes / stored, figures.cosine[0], figures.k_cosine_worst, figures.cosine[1],
           figures.error_max, figures.k_noise_worst, put, ms(run->get_ns), ms(run->decode_ns),
           run->args->tier == KVF_TIER_NVME ? "nvme" : "dram");
}

/* ----------------------------------------------------------------------------------------------
 * Steps
 */
static bool step_put(struct demo_run *run)
{
    return run_describe(run) && run_attach(run) && run_load(run) && run_put(run) && run_find(run) &&
           run_fetch(run) && run_decode(run) && run_check_lossless(run) && run_save(run);
}

/* The originals are loaded after the fetch: not part of the time to the first hit. */
static bool step_get(struct demo_run *run, uint64_t *first_hit_ns)
{
    if (!run_describe(run) || !run_attach(run) || !run_find(run) || !run_fetch(run)) {
        return false;
    }
    if (*first_hit_ns == 0) {
        *first_hit_ns = clock_ns(CLOCK_REALTIME);
    }
    if (!run_load(run) || !run_decode(run) || !run_check_lossless(run) || !run_check_saved(run)) {
        return false;
    }
    print_row(run);
    return true;
}

static void run_fini(struct demo_run *run)
{
    kvf_close(run->client);
    for (int kind = 0; kind < N_KINDS; kind++) {
        kvf_test_kv_free(&run->tensors[kind].original);
        free(run->tensors[kind].decoded);
    }
}

static bool run_all(const struct demo_args *args)
{
    uint64_t first_hit_ns = 0;
    bool is_ok = true;
    bool has_daemon = true;

    if (!args->is_put && args->started_ns == 0) {
        print_head();
    }
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]) && has_daemon; i++) {
        struct demo_run run = {.args = args, .row = &cases[i]};

        is_ok = (args->is_put ? step_put(&run) : step_get(&run, &first_hit_ns)) && is_ok;
        has_daemon = run.client != NULL;
        run_fini(&run);
    }
    if (is_ok && args->started_ns != 0) {
        printf("\nFrom the start of the killed daemon's successor to its first hit: %.0f ms.\n",
               ms(first_hit_ns - args->started_ns));
    }
    return is_ok;
}

static bool parse_args(int argc, char **argv, struct demo_args *args)
{
    static const struct option options[] = {
        {"socket", required_argument, NULL, 's'},  {"data", required_argument, NULL, 'd'},
        {"work", required_argument, NULL, 'w'},    {"tier", required_argument, NULL, 't'},
        {"started", required_argument, NULL, 'S'}, {NULL, 0, NULL, 0},
    };
    char *end = NULL;
    int option;

    *args = (struct demo_args){.tier = KVF_TIER_DRAM};
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (option) {
        case 's':
            args->socket = optarg;
            break;
        case 'd':
            args->data = optarg;
            break;
        case 'w':
            args->work = optarg;
            break;
        case 't':
            args->tier = strcmp(optarg, "nvme") == 0 ? KVF_TIER_NVME : KVF_TIER_DRAM;
            break;
        case 'S':
            args->started_ns = strtoull(optarg, &end, 10);
            if (end == optarg || *end != '\0') {
                return false;
            }
            break;
        default:
            return false;
        }
    }
    if (optind + 1 != argc || args->socket == NULL || args->data == NULL || args->work == NULL) {
        return false;
    }
    args->is_put = strcmp(argv[optind], "put") == 0;
    return args->is_put || strcmp(argv[optind], "get") == 0;
}

int main(int argc, char **argv)
{
    struct demo_args args;

    if (!parse_args(argc, argv, &args)) {
        fprintf(stderr,
                "usage: kvferry-demo --socket PATH --data DIR --work DIR [--tier dram|nvme] "
                "[--started NANOSECONDS] put|get\n");
        return 2;
    }
    return run_all(&args) ? 0 : 1;
}
