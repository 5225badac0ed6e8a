/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_gpu_x.c: stored X and K and V rebuilt from it, in the geometry of Llama-2-7B: 32 layers of
 * 4,096 elements, 32 heads of 128 for K and for V, bf16.
 *
 *   bench_gpu_x [--seconds N] [--pairs N] [--only NAME]
 *
 * x4_fetch, x3_fetch: 4,096 tokens by kvf_gpu_x_get, from a daemon's arena to K and V in pages,
 * beside one copy of their fp16 K and V from pinned memory: the least that fetching those takes.
 * x4_part_*: what that is made of, each alone: X from pinned memory, its decode, products, K and V
 * into pages. If all of it ran at once the longest would be left.
 * remat_gemm_N: products of N tokens with [W_K | W_V] as they are made here, beside cuBLAS's own of
 * the same shape to bf16; remat_layer_N: with bias, norm and rotation into pages, beside the same.
 */
#include "tests/bench/bench.h"
#include "tests/bench/gpu_loops.h"
#include "tests/bench/gpu_x_load.h"
#include "tests/support/daemon.h"

#include "base/clock.h"
#include "gpu/blas.h"
#include "kvferry_gpu_x.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    LAYERS = 32,
    HEADS = 32,
    DIM = 128,
    D_MODEL = 4096,
    WIDTH = 2 * HEADS * DIM,
    TOKENS = 4096,
    CHUNK_TOKENS = 128, /* of 256 a record as it is could exceed 64 MiB */
    CHUNKS = TOKENS / CHUNK_TOKENS,
    PAGES = TOKENS / GPU_PAGE_TOKENS,
    CHUNK_PAGES = CHUNK_TOKENS / GPU_PAGE_TOKENS,
    WINDOW = 1024,      /* tokens of a product in a fetch */
    TOKENS_MAX = 16384, /* of a product */
    STEPS = 8,          /* that are queued at a time */
};

#define LAYER_X_BYTES  ((uint64_t)TOKENS * D_MODEL * 2)
#define LAYER_KV_BYTES ((uint64_t)TOKENS * WIDTH * 2)
#define W_BYTES        ((uint64_t)WIDTH * D_MODEL * 2)
#define KV_BYTES       (LAYERS * LAYER_KV_BYTES)

struct bed {
    struct kvf_gpu_device *gpu;
    struct gpu_loops loops; /* for cuBLAS */
    struct kvf_gpu_blas *blas;
    void *stream;
    struct gpu_x_model model;
    uint64_t x;       /* of all layers, as an engine has it; TOKENS_MAX tokens at least */
    uint64_t pages;   /* of K and V, of all layers */
    uint64_t product; /* fp32, and bf16 of cuBLAS */
    uint8_t *host;    /* pinned: fp16 K and V */
    uint32_t ids[CHUNKS][CHUNK_PAGES];
    uint32_t n_tokens;    /* of the products that are measured */
    struct gpu_load load; /* X alone, for parts: twice as many tokens of half the width */

    struct kvf_test_daemon daemon;
    struct kvf_client *client;
    struct kvf_gpu *handle;
    struct kvf_gpu_x *rebuild;
    uint64_t next_key;
};

static void wait_for(struct bed *bed)
{
    gpu_must(bed->gpu, bed->gpu->driver.cuStreamSynchronize(bed->stream), "a stream");
}

/* --- memory ----------------------------------------------------------------------------------- */

static bool bed_init(struct bed *bed)
{
    char text[KVF_GPU_TEXT_BYTES];

    bed->gpu = gpu_open();
    bed->stream = gpu_stream(bed->gpu, KVF_GPU_PRIORITY_HIGH);
    gpu_loops_init(&bed->loops, bed->gpu, bed->stream);
    if (!bed->loops.has_blas ||
        kvf_gpu_blas_open(bed->gpu, &bed->blas, text, sizeof(text)) != KVF_OK) {
        return false;
    }
    bed->x = gpu_memory(bed->gpu, LAYERS * LAYER_X_BYTES);
    bed->pages = gpu_memory(bed->gpu, KV_BYTES);
    bed->product = gpu_memory(bed->gpu, (uint64_t)TOKENS_MAX * WIDTH * sizeof(float));
    bed->host = gpu_host_memory(bed->gpu, KV_BYTES);
    bed->model = (struct gpu_x_model){.n_layers = LAYERS,
                                      .d_model = D_MODEL,
                                      .n_heads = HEADS,
                                      .dim = DIM,
                                      .n_positions = TOKENS_MAX,
                                      .chunk_tokens = CHUNK_TOKENS,
                                      .theta = 10000.0};
    gpu_x_model_init(&bed->model, bed->gpu, bed->stream);
    gpu_x_fill(bed->gpu, bed->stream, bed->x, LAYERS * LAYER_X_BYTES, 2.0f);
    for (uint32_t i = 0; i < PAGES; i++) {
        bed->ids[i / CHUNK_PAGES][i % CHUNK_PAGES] = (i * 37) % PAGES; /* anywhere */
    }
    return true;
}

/* --- the engine ------------------------------------------------------------------------------- */

static void rebuild_open(struct bed *bed)
{
    static void *layers[2][LAYERS];
    struct kvf_x_weights weights = gpu_x_model_weights(&bed->model);
    struct kvf_tensor_view view = {layers[0], (uint64_t)HEADS * GPU_PAGE_TOKENS * 2 * DIM * 2,
                                   2 * DIM * 2, (uint64_t)GPU_PAGE_TOKENS * 2 * DIM * 2};
    struct kvf_gpu_x_options options = {
        .struct_bytes = sizeof(options),
        .window_tokens = 0,
        .pages = {.struct_bytes = sizeof(options.pages),
                  .n_pages = PAGES,
                  .tokens_a_page = GPU_PAGE_TOKENS,
                  .k = view,
                  .v = view},
    };

    for (uint32_t l = 0; l < LAYERS; l++) {
        layers[0][l] = (uint8_t *)(uintptr_t)bed->pages + l * LAYER_KV_BYTES;
        layers[1][l] = (uint8_t *)layers[0][l] + DIM * 2;
    }
    options.pages.v.layers = layers[1];
    gpu_x_must(kvf_gpu_x_open(bed->handle, &weights, &options, &bed->rebuild), "weights");
}

static void engine_open(struct bed *bed, const char *profile)
{
    static const char *const sets[] = {"dram.bytes=4GiB",         "dram.area_bytes=128MiB",
                                       "staging.total=2GiB",      "staging.client=1GiB",
                                       "allow_uncalibrated=true", NULL};
    struct kvf_geometry geometry = {.struct_bytes = sizeof(geometry),
                                    .dtype = KVF_DTYPE_BF16,
                                    .n_layers = LAYERS,
                                    .chunk_tokens = CHUNK_TOKENS};
    struct kvf_gpu_options gpu_options = {.struct_bytes = sizeof(gpu_options)};
    struct kvf_options options;

    kvf_test_daemon_create(&bed->daemon, sets);
    kvf_test_daemon_start(&bed->daemon);
    gpu_x_must(kvf_x_geometry(KVF_KIND_X, D_MODEL, &geometry), "geometry");
    kvf_test_client_options(&bed->daemon, &options);
    options.geometry = &geometry;
    options.profile = profile;
    options.flags = KVF_ATTACH_ALLOW_UNCALIBRATED;
    options.staging_bytes = UINT64_C(512) << 20;
    memset(options.weights_digest, GPU_X_DIGEST, sizeof(options.weights_digest));
    gpu_x_must(kvf_open(&options, &bed->client), "client");
    gpu_x_must(kvf_gpu_open(bed->client, &gpu_options, &bed->handle), "GPU");
    rebuild_open(bed);
    bed->next_key = 1;
}

static void engine_close(struct bed *bed)
{
    bed->rebuild = kvf_gpu_x_close(bed->rebuild);
    bed->handle = kvf_gpu_close(bed->handle);
    bed->client = kvf_close(bed->client);
    kvf_test_daemon_destroy(&bed->daemon);
}

struct name {
    char text[24];
};

static struct kvf_key name_of(uint64_t number, struct name *name)
{
    (void)snprintf(name->text, sizeof(name->text), "x-bench-%015llu", (unsigned long long)number);
    return (struct kvf_key){name->text, sizeof(name->text) - 1};
}

/* X of all chunks, from the engine's memory. */
static void put_all(struct bed *bed)
{
    void *layers[LAYERS];
    struct kvf_gpu_region *region;
    struct kvf_gpu_region_options options = {
        .struct_bytes = sizeof(options),
        .n_pages = CHUNKS,
        .tokens_a_page = CHUNK_TOKENS,
        .k = {layers, LAYER_X_BYTES / CHUNKS, D_MODEL * 2, DIM * 2},
    };

    for (uint32_t l = 0; l < LAYERS; l++) {
        layers[l] = (uint8_t *)(uintptr_t)bed->x + l * LAYER_X_BYTES;
    }
    gpu_x_must(kvf_gpu_register(bed->handle, &options, &region), "X");
    for (uint32_t i = 0; i < CHUNKS; i++) {
        struct name name;
        struct kvf_gpu_put_item item = {.struct_bytes = sizeof(item),
                                        .n_pages = 1,
                                        .key = name_of(i, &name),
                                        .token_start = i * CHUNK_TOKENS,
                                        .pages = &i};
        struct kvf_put_options put = {.struct_bytes = sizeof(put), .flags = KVF_PUT_NO_WRITE};
        struct kvf_gpu_event event = {0};
        uint64_t request;
        uint32_t n;

        gpu_x_must(kvf_gpu_put(bed->handle, region, &item, 1, &put, NULL, NULL, 0, NULL, &request),
                   "put");
        while (event.kind != KVF_GPU_EVENT_REQUEST) {
            gpu_x_must(kvf_gpu_poll(bed->handle, &event, 1, 20000, &n), "poll");
            gpu_x_must(event.status, "a put");
        }
    }
    gpu_x_must(kvf_gpu_unregister(bed->handle, region), "X");
}

static void get_all(struct bed *bed)
{
    struct kvf_gpu_x_item items[CHUNKS];
    struct name names[CHUNKS];
    int32_t statuses[CHUNKS];

    for (uint32_t i = 0; i < CHUNKS; i++) {
        items[i] = (struct kvf_gpu_x_item){.struct_bytes = sizeof(items[i]),
                                           .n_pages = CHUNK_PAGES,
                                           .key = name_of(i, &names[i]),
                                           .token_start = i * CHUNK_TOKENS,
                                           .pages = bed->ids[i]};
    }
    gpu_x_must(kvf_gpu_x_get(bed->rebuild, items, CHUNKS, NULL, NULL, bed->stream, statuses),
               "get");
    wait_for(bed);
}

static void copy_kv(struct bed *bed)
{
    gpu_must(bed->gpu,
             bed->gpu->driver.cuMemcpyHtoDAsync(bed->pages, bed->host, KV_BYTES, bed->stream),
             "copy");
    wait_for(bed);
}

/* --- products --------------------------------------------------------------------------------- */

static const struct kvf_gpu_product *product_of(const struct bed *bed)
{
    static struct kvf_gpu_product product;

    product = (struct kvf_gpu_product){
        .m = bed->n_tokens, .n = WIDTH, .k = D_MODEL, .c_stride = WIDTH, .dtype = KVF_DTYPE_BF16};
    return &product;
}

static void multiply(struct bed *bed)
{
    for (uint32_t i = 0; i < STEPS; i++) {
        gpu_x_must(kvf_gpu_blas_multiply(bed->blas, product_of(bed), bed->x,
                                         bed->model.matrices + i * W_BYTES, bed->product,
                                         bed->stream),
                   "a product");
    }
    wait_for(bed);
}

/* The same by cublasGemmEx, to bf16. */
static void plain(struct bed *bed, uint64_t x, uint64_t weights)
{
    const float one = 1.0f;
    const float zero = 0.0f;
    int status = bed->loops.blas.gemm(bed->loops.blas.handle, 1, 0, WIDTH, (int)bed->n_tokens,
                                      D_MODEL, &one, (const void *)(uintptr_t)weights, 14, D_MODEL,
                                      (const void *)(uintptr_t)x, 14, D_MODEL, &zero,
                                      (void *)(uintptr_t)bed->product, 14, WIDTH, 68, -1);

    if (status != 0) {
        bench_die("a product failed: cuBLAS status %d", status);
    }
}

static void multiply_plain(struct bed *bed)
{
    for (uint32_t i = 0; i < STEPS; i++) {
        plain(bed, bed->x, bed->model.matrices + i * W_BYTES);
    }
    wait_for(bed);
}

static void rebuild_layers(struct bed *bed)
{
    for (uint32_t i = 0; i < STEPS; i++) {
        gpu_x_must(kvf_gpu_x_rebuild(bed->rebuild, i, (const void *)(uintptr_t)bed->x,
                                     bed->n_tokens, 0, &bed->ids[0][0],
                                     (bed->n_tokens + GPU_PAGE_TOKENS - 1) / GPU_PAGE_TOKENS,
                                     bed->stream),
                   "a layer");
    }
    wait_for(bed);
}

/* --- parts of a fetch ------------------------------------------------------------------------- */

static void copy_x(struct bed *bed)
{
    gpu_must(bed->gpu,
             bed->gpu->driver.cuMemcpyHtoDAsync(bed->x, bed->host,
                                                gpu_load_payloads_bytes(&bed->load), bed->stream),
             "copy");
    wait_for(bed);
}

static void decode_x(struct bed *bed)
{
    gpu_load_decode(&bed->load, bed->gpu, UINT32_MAX, 0, LAYERS, bed->stream);
    wait_for(bed);
}

static void encode_x(struct bed *bed)
{
    gpu_load_encode(&bed->load, bed->gpu, bed->stream);
    wait_for(bed);
}

/* Copies within the device that move as many bytes, in n of them. */
static void move(struct bed *bed, uint64_t from, uint64_t bytes, uint32_t n)
{
    uint64_t one = bytes / n / 2;

    for (uint32_t i = 0; i < n; i++) {
        gpu_must(bed->gpu,
                 bed->gpu->driver.cuMemcpyDtoDAsync(bed->pages + i % LAYERS * LAYER_KV_BYTES, from,
                                                    one, bed->stream),
                 "copy");
    }
    wait_for(bed);
}

static void move_as_decode(struct bed *bed)
{
    move(bed, bed->x, LAYERS * LAYER_X_BYTES + gpu_load_payloads_bytes(&bed->load), LAYERS);
}

/* The product is fp32. */
static void move_as_pages(struct bed *bed)
{
    move(bed, bed->product, KV_BYTES / 2 * 6, LAYERS * (TOKENS / WINDOW));
}

static void products(struct bed *bed)
{
    const struct kvf_gpu_product product = {
        .m = WINDOW, .n = WIDTH, .k = D_MODEL, .c_stride = WIDTH, .dtype = KVF_DTYPE_BF16};

    for (uint32_t i = 0; i < LAYERS * (TOKENS / WINDOW); i++) {
        gpu_x_must(kvf_gpu_blas_multiply(bed->blas, &product, bed->x + i % LAYERS * LAYER_X_BYTES,
                                         bed->model.matrices + i % LAYERS * W_BYTES, bed->product,
                                         bed->stream),
                   "a product");
    }
    wait_for(bed);
}

static void products_plain(struct bed *bed)
{
    bed->n_tokens = TOKENS;
    for (uint32_t i = 0; i < LAYERS; i++) {
        plain(bed, bed->x + i * LAYER_X_BYTES, bed->model.matrices + i * W_BYTES);
    }
    wait_for(bed);
}

/* K and V of a window and layer from a product, as kvf_gpu_x_get queues it. */
static void pages_work(const struct bed *bed, struct kvf_gpu_rebuild *work)
{
    uint64_t vectors = (uint64_t)HEADS * GPU_PAGE_TOKENS * 2 * DIM * 2;

    *work = gpu_x_model_rebuild(&bed->model, bed->product, 0, WINDOW);
    for (uint32_t i = 0; i < 2; i++) {
        work->pages[i] = (struct kvf_gpu_pages){vectors, 2 * DIM * 2,
                                                (uint64_t)GPU_PAGE_TOKENS * 2 * DIM * 2};
    }
}

static void pages(struct bed *bed)
{
    struct kvf_gpu_rebuild work;
    void *parameters[] = {&work};

    pages_work(bed, &work);
    for (uint32_t i = 0; i < LAYERS * (TOKENS / WINDOW); i++) {
        const struct kvf_gpu_shape shape = {.kernel = kvf_gpu_rebuild_kernel(&work),
                                            .n_blocks = WINDOW,
                                            .n_threads = KVF_GPU_REBUILD_THREADS};

        memcpy(work.page_ids, bed->ids[i / LAYERS * work.n_pieces],
               WINDOW / GPU_PAGE_TOKENS * sizeof(work.page_ids[0]));
        work.bases[0] = bed->pages + i % LAYERS * LAYER_KV_BYTES;
        work.bases[1] = work.bases[0] + DIM * 2;
        gpu_x_must(kvf_gpu_device_launch(bed->gpu, &shape, parameters, bed->stream), "K and V");
    }
    wait_for(bed);
}

/* --- sides ------------------------------------------------------------------------------------ */

/* Milliseconds of one. */
static double repeat(struct bed *bed, double seconds, void (*once)(struct bed *bed))
{
    uint64_t begun_ns = kvf_now_ns();
    uint64_t n = 0;
    uint64_t ns;

    do {
        once(bed);
        n++;
        ns = kvf_now_ns() - begun_ns;
    } while ((double)ns < seconds * 1e9);
    return (double)ns / 1e6 / (double)n;
}

/* TFLOP/s of products. */
static double rate(struct bed *bed, double seconds, void (*once)(struct bed *bed))
{
    double ms = repeat(bed, seconds, once) / STEPS;

    return 2e-12 * bed->n_tokens * WIDTH * D_MODEL / (ms / 1e3);
}

static double fetch_ms(void *ctx, double seconds)
{
    return repeat(ctx, seconds, get_all);
}

static double copy_ms(void *ctx, double seconds)
{
    return repeat(ctx, seconds, copy_kv);
}

static double multiply_rate(void *ctx, double seconds)
{
    return rate(ctx, seconds, multiply);
}

static double plain_rate(void *ctx, double seconds)
{
    return rate(ctx, seconds, multiply_plain);
}

static double layer_rate(void *ctx, double seconds)
{
    return rate(ctx, seconds, rebuild_layers);
}

#define SIDE(once)                                                                                 \
    static double once##_ms(void *ctx, double seconds)                                             \
    {                                                                                              \
        return repeat(ctx, seconds, once);                                                         \
    }

SIDE(copy_x)
SIDE(decode_x)
SIDE(encode_x)
SIDE(move_as_decode)
SIDE(products)
SIDE(products_plain)
SIDE(pages)
SIDE(move_as_pages)

static void measure_parts(struct bench_run *run, struct bed *bed)
{
    /* payloads lie where products go later: decodes come first */
    gpu_load_init(&bed->load, bed->gpu, GPU_X_2048, "x4", 2 * TOKENS / GPU_CHUNK_TOKENS,
                  bed->product);
    encode_x(bed);
    bench_pairs(run, "x4_part_copy", copy_x_ms, copy_ms, bed);
    bench_pairs(run, "x4_part_decode", decode_x_ms, move_as_decode_ms, bed);
    bench_pairs(run, "x4_part_products", products_ms, products_plain_ms, bed);
    bench_pairs(run, "x4_part_pages", pages_ms, move_as_pages_ms, bed);
    bench_pairs(run, "x4_encode", encode_x_ms, move_as_decode_ms, bed);
}

static void measure_fetch(struct bench_run *run, struct bed *bed, const char *profile,
                          const char *name)
{
    if (run->only != NULL && strcmp(run->only, name) != 0) {
        return;
    }
    engine_open(bed, profile);
    put_all(bed);
    get_all(bed); /* pins, and finds products */
    bench_pairs(run, name, fetch_ms, copy_ms, bed);
    engine_close(bed);
}

/* Is a figure of this group asked for? */
static bool has_group(const struct bench_run *run, const char *group)
{
    return run->only == NULL || strncmp(run->only, group, strlen(group)) == 0;
}

static void measure_products(struct bench_run *run, struct bed *bed)
{
    static const uint32_t tokens[] = {256, 1024, 4096, 16384};
    char name[64];

    engine_open(bed, "x4");
    for (size_t i = 0; i < sizeof(tokens) / sizeof(tokens[0]); i++) {
        bed->n_tokens = tokens[i];
        (void)snprintf(name, sizeof(name), "remat_gemm_%u", tokens[i]);
        multiply(bed);
        multiply_plain(bed);
        bench_pairs(run, name, multiply_rate, plain_rate, bed);
        if (tokens[i] > TOKENS) {
            continue; /* more than there are pages for */
        }
        (void)snprintf(name, sizeof(name), "remat_layer_%u", tokens[i]);
        rebuild_layers(bed);
        bench_pairs(run, name, layer_rate, plain_rate, bed);
    }
    engine_close(bed);
}

int main(int argc, char **argv)
{
    static struct bed bed;
    struct bench_run run;

    bench_init(&run, argc, argv);
    if (!bed_init(&bed)) {
        bench_print_skip("x4_fetch_vs_fp16_kv", "no cuBLAS here");
        return 0;
    }
    measure_fetch(&run, &bed, "x4", "x4_fetch_vs_fp16_kv");
    measure_fetch(&run, &bed, "x3", "x3_fetch_vs_fp16_kv");
    if (has_group(&run, "x4_part_") || has_group(&run, "x4_encode")) {
        measure_parts(&run, &bed);
    }
    if (has_group(&run, "remat_")) {
        measure_products(&run, &bed);
    }
    (void)kvf_gpu_blas_close(bed.blas);
    return 0;
}
