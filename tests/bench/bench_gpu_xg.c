/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_gpu_xg.c: 4,096 tokens of Llama-3.1-8B (32 layers of 4,096 elements, 8 K/V heads of 128)
 * to K and V in pages on the GPU: from latents of differences of X (xgcl3) beside K and V at 4 bits
 * (balanced), both from one daemon's memory.
 *
 *   bench_gpu_xg [--seconds N] [--pairs N] [--only NAME] [--window TOKENS]
 *
 * --window: tokens of a window of a fetch; else the library's choice.
 *
 * fetch: the whole, from the call on; gpu: kernels alone, latents decoded at 3 bits in all layers,
 * though the first three have 4; bytes: of a token's record. hook: latents of X made and encoded
 * layer by layer (kvf_gpu_x_put_layer), beside the products by which an engine makes K and V of the
 * same X.
 *
 * Factors are random numbers: products do not care. Their file has 1.6 GB.
 */
#include "tests/bench/bench.h"
#include "tests/bench/gpu_x_load.h"

#include "kvferry_gpu_x.h"
#include "tests/support/daemon.h"

#include "base/clock.h"
#include "base/random.h"
#include "client/gpu_latent.h"
#include "client/x_svd.h"
#include "gpu/blas.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    LAYERS = 32,
    HEADS = 8,
    DIM = 128,
    D_MODEL = 4096,
    WIDTH = 2 * HEADS * DIM, /* of K and V, and of a latent */
    TOKENS = 4096,
    CHUNKS = TOKENS / GPU_CHUNK_TOKENS,
    CHUNK_PAGES = GPU_CHUNK_TOKENS / GPU_PAGE_TOKENS,
    WINDOW = 1024,
};

#define W_BYTES ((uint64_t)WIDTH * D_MODEL * 2)

/* What is stored in one way. */
struct side {
    struct gpu_load load; /* pages, and the kernels that decode into them */
    struct kvf_client *client;
    struct kvf_gpu *handle;
    struct kvf_gpu_region *region;
};

struct bed {
    struct kvf_gpu_device *gpu;
    struct kvf_gpu_blas *blas;
    struct kvf_gpu_latent *latent;
    struct kvf_gpu_x *rebuild;
    void *stream;
    struct kvf_test_daemon daemon;
    struct side kv;
    struct side latents;
    struct gpu_x_model model;
    struct kvf_x_weights weights;
    uint64_t payloads;
    uint64_t product;
    uint64_t x;             /* of a layer, for the hook */
    uint64_t of_hook;       /* products of all of it */
    uint32_t window_tokens; /* 0: the library's choice */
    char factors[KVF_TEST_PATH_BYTES];
};

static void wait_for(struct bed *bed)
{
    gpu_must(bed->gpu, bed->gpu->driver.cuStreamSynchronize(bed->stream), "a stream");
}

/* --- the model -------------------------------------------------------------------------------- */

static void factors_write(struct bed *bed)
{
    const struct kvf_weights_model facts = {.n_layers = LAYERS,
                                            .d_model = D_MODEL,
                                            .n_query_heads = 32,
                                            .n_heads = HEADS,
                                            .dim_k = DIM,
                                            .dim_v = DIM};
    uint8_t digest[KVF_DIGEST_BYTES];
    char why[KVF_SVD_WHY_BYTES];
    struct kvf_svd_writer *writer;
    struct kvf_random_seeded random;
    float *u = malloc((size_t)D_MODEL * WIDTH * sizeof(*u));

    if (u == NULL) {
        bench_die("no memory");
    }
    kvf_random_seeded_init(&random, 6);
    for (size_t i = 0; i < (size_t)D_MODEL * WIDTH; i++) {
        u[i] = (float)(int32_t)(uint32_t)kvf_random_seeded_next(&random) * 0x1p-37f;
    }
    memset(digest, GPU_X_DIGEST, sizeof(digest));
    kvf_test_dir_path(&bed->daemon.dir, "model.svd", bed->factors);
    gpu_x_must(kvf_svd_writer_open(bed->factors, &facts, WIDTH, digest, &writer, why), "factors");
    for (uint32_t l = 0; l < LAYERS; l++) {
        gpu_x_must(kvf_svd_writer_add(writer, u, u, why), "factors");
    }
    gpu_x_must(kvf_svd_writer_commit(writer, why), "factors");
    free(u);
}

static void model_init(struct bed *bed)
{
    bed->model = (struct gpu_x_model){.n_layers = LAYERS,
                                      .d_model = D_MODEL,
                                      .n_heads = HEADS,
                                      .dim = DIM,
                                      .n_positions = TOKENS,
                                      .chunk_tokens = GPU_CHUNK_TOKENS,
                                      .theta = 500000.0};
    gpu_x_model_init(&bed->model, bed->gpu, bed->stream);
}

/* --- the engine ------------------------------------------------------------------------------- */

static struct kvf_gpu_region_options pages_of(const struct gpu_load *load, void *layers[2][LAYERS])
{
    struct kvf_gpu_region_options options = {.struct_bytes = sizeof(options),
                                             .n_pages = load->n_pages,
                                             .tokens_a_page = GPU_PAGE_TOKENS};

    for (uint32_t l = 0; l < LAYERS; l++) {
        layers[0][l] = (void *)(uintptr_t)(load->pages + l * load->layer_bytes);
        layers[1][l] = (uint8_t *)layers[0][l] + DIM * sizeof(uint16_t);
    }
    options.k = (struct kvf_tensor_view){layers[0], load->work.pages[0].page_stride_bytes,
                                         load->work.pages[0].token_stride_bytes,
                                         load->work.pages[0].head_stride_bytes};
    if (load->plan.geometry.dim_v != 0) {
        options.v = options.k;
        options.v.layers = layers[1];
    }
    return options;
}

static void side_open(struct bed *bed, struct side *side, const char *profile)
{
    bool is_x = side == &bed->latents;
    struct kvf_geometry geometry = side->load.plan.geometry;
    struct kvf_gpu_options gpu_options = {.struct_bytes = sizeof(gpu_options)};
    struct kvf_gpu_region_options region;
    struct kvf_options options;
    void *layers[2][LAYERS];

    kvf_test_client_options(&bed->daemon, &options);
    options.geometry = &geometry;
    options.profile = profile;
    options.flags = KVF_ATTACH_ALLOW_UNCALIBRATED;
    options.staging_bytes = UINT64_C(256) << 20;
    memset(options.weights_digest, GPU_X_DIGEST, sizeof(options.weights_digest));
    if (is_x) {
        struct kvf_x_factors facts = {.struct_bytes = sizeof(facts)};

        gpu_x_must(kvf_x_geometry(KVF_KIND_XG, WIDTH, &geometry), "geometry");
        gpu_x_must(kvf_x_factors_read(bed->factors, &facts, NULL, NULL), "factors");
        memcpy(options.factors_digest, facts.digest, sizeof(options.factors_digest));
    }
    gpu_x_must(kvf_open(&options, &side->client), "client");
    gpu_x_must(kvf_gpu_open(side->client, &gpu_options, &side->handle), "GPU");
    region = pages_of(&side->load, layers);
    gpu_x_must(kvf_gpu_register(side->handle, &region, &side->region), "pages");
}

static void engine_open(struct bed *bed)
{
    static const char *const sets[] = {"dram.bytes=2GiB",         "dram.area_bytes=128MiB",
                                       "staging.total=1GiB",      "staging.client=256MiB",
                                       "allow_uncalibrated=true", NULL};
    struct kvf_gpu_x_options options = {.struct_bytes = sizeof(options),
                                        .window_tokens = bed->window_tokens};
    char text[KVF_GPU_TEXT_BYTES] = "";
    void *layers[2][LAYERS];

    kvf_test_daemon_create(&bed->daemon, sets);
    kvf_test_daemon_start(&bed->daemon);
    factors_write(bed);
    bed->weights = gpu_x_model_weights(&bed->model);
    bed->weights.stored_width = WIDTH;
    bed->weights.svd_file = bed->factors;
    side_open(bed, &bed->kv, "balanced");
    side_open(bed, &bed->latents, "xgcl3");
    options.pages = pages_of(&bed->kv.load, layers);
    gpu_x_must(kvf_gpu_x_open(bed->latents.handle, &bed->weights, &options, &bed->rebuild),
               "weights");
    if (kvf_gpu_latent_open(bed->latents.handle, &bed->weights, WINDOW, &bed->latent, text,
                            sizeof(text)) != KVF_OK) {
        bench_die("factors: %s", text);
    }
}

static void engine_close(struct bed *bed)
{
    (void)kvf_gpu_latent_close(bed->latent);
    (void)kvf_gpu_x_close(bed->rebuild);
    for (uint32_t i = 0; i < 2; i++) {
        struct side *side = i != 0 ? &bed->latents : &bed->kv;

        (void)kvf_gpu_close(side->handle);
        (void)kvf_close(side->client);
    }
    kvf_test_daemon_destroy(&bed->daemon);
}

struct name {
    char text[24];
};

static struct kvf_key name_of(uint64_t number, struct name *name)
{
    (void)snprintf(name->text, sizeof(name->text), "xg-bench-%014llu", (unsigned long long)number);
    return (struct kvf_key){name->text, sizeof(name->text) - 1};
}

static const uint32_t *ids_of(const struct side *side, uint32_t chunk)
{
    return side->load.page_ids + (size_t)chunk * CHUNK_PAGES;
}

/* Until the request has ended. */
static void take_events(struct side *side)
{
    struct kvf_gpu_event event = {0};
    uint32_t n;

    while (event.kind != KVF_GPU_EVENT_REQUEST) {
        gpu_x_must(kvf_gpu_poll(side->handle, &event, 1, 20000, &n), "poll");
        gpu_x_must(event.status, "a request");
    }
}

static void put_all(struct side *side)
{
    for (uint32_t i = 0; i < CHUNKS; i++) {
        struct name name;
        struct kvf_gpu_put_item item = {.struct_bytes = sizeof(item),
                                        .n_pages = CHUNK_PAGES,
                                        .key = name_of(i, &name),
                                        .token_start = i * GPU_CHUNK_TOKENS,
                                        .pages = ids_of(side, i)};
        struct kvf_put_options put = {.struct_bytes = sizeof(put), .flags = KVF_PUT_NO_WRITE};
        uint64_t request;

        gpu_x_must(
            kvf_gpu_put(side->handle, side->region, &item, 1, &put, NULL, NULL, 0, NULL, &request),
            "put");
        take_events(side);
    }
}

/* --- what is measured ------------------------------------------------------------------------- */

static void fetch_latents(struct bed *bed)
{
    struct kvf_gpu_x_item items[CHUNKS];
    struct name names[CHUNKS];
    int32_t statuses[CHUNKS];

    for (uint32_t i = 0; i < CHUNKS; i++) {
        items[i] = (struct kvf_gpu_x_item){.struct_bytes = sizeof(items[i]),
                                           .n_pages = CHUNK_PAGES,
                                           .key = name_of(i, &names[i]),
                                           .token_start = i * GPU_CHUNK_TOKENS,
                                           .pages = ids_of(&bed->kv, i)};
    }
    gpu_x_must(kvf_gpu_x_get(bed->rebuild, items, CHUNKS, NULL, NULL, bed->stream, statuses),
               "get");
    wait_for(bed);
}

static void fetch_kv(struct bed *bed)
{
    struct kvf_gpu_get_item items[CHUNKS];
    struct name names[CHUNKS];
    uint64_t request;

    for (uint32_t i = 0; i < CHUNKS; i++) {
        items[i] = (struct kvf_gpu_get_item){.struct_bytes = sizeof(items[i]),
                                             .n_pages = CHUNK_PAGES,
                                             .key = name_of(i, &names[i]),
                                             .pages = ids_of(&bed->kv, i)};
    }
    gpu_x_must(
        kvf_gpu_get(bed->kv.handle, bed->kv.region, items, CHUNKS, NULL, NULL, NULL, 0, &request),
        "get");
    take_events(&bed->kv);
}

/* K and V of a window from its product. */
static void scatter(struct bed *bed, uint32_t window, uint32_t layer)
{
    const struct gpu_load *load = &bed->kv.load;
    struct kvf_gpu_rebuild work = gpu_x_model_rebuild(&bed->model, bed->product, window * WINDOW,
                                                      WINDOW);
    struct kvf_gpu_shape shape = {.n_blocks = WINDOW, .n_threads = KVF_GPU_REBUILD_THREADS};
    void *parameters[] = {&work};

    for (uint32_t i = 0; i < 2; i++) {
        work.bases[i] = load->pages + layer * load->layer_bytes + i * DIM * sizeof(uint16_t);
        work.pages[i] = load->work.pages[i];
    }
    shape.kernel = kvf_gpu_rebuild_kernel(&work);
    memcpy(work.page_ids, ids_of(&bed->kv, window * work.n_pieces),
           WINDOW / GPU_PAGE_TOKENS * sizeof(work.page_ids[0]));
    gpu_x_must(kvf_gpu_device_launch(bed->gpu, &shape, parameters, bed->stream), "K and V");
}

/* All kernels of a fetch, from latents that are in the GPU's memory. */
static void kernels_latents(struct bed *bed)
{
    const struct kvf_gpu_product product = {
        .m = WINDOW, .n = WIDTH, .k = D_MODEL, .c_stride = WIDTH, .dtype = KVF_DTYPE_BF16};
    const struct gpu_load *load = &bed->latents.load;

    gpu_load_decode(load, bed->gpu, UINT32_MAX, 0, LAYERS, bed->stream);
    for (uint32_t w = 0; w < TOKENS / WINDOW; w++) {
        for (uint32_t l = 0; l < LAYERS; l++) {
            uint64_t x = 0;

            gpu_x_must(kvf_gpu_latent_queue(bed->latent, bed->blas, l,
                                            load->pages + l * load->layer_bytes +
                                                w * (WINDOW / GPU_PAGE_TOKENS) * load->page_bytes,
                                            WINDOW, bed->stream, &x),
                       "X");
            gpu_x_must(kvf_gpu_blas_multiply(bed->blas, &product, x,
                                             bed->model.matrices + l * W_BYTES, bed->product,
                                             bed->stream),
                       "a product");
            scatter(bed, w, l);
        }
    }
    wait_for(bed);
}

static void kernels_kv(struct bed *bed)
{
    gpu_load_decode(&bed->kv.load, bed->gpu, UINT32_MAX, 0, LAYERS, bed->stream);
    wait_for(bed);
}

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

#define SIDE(once)                                                                                 \
    static double once##_ms(void *ctx, double seconds)                                             \
    {                                                                                              \
        return repeat(ctx, seconds, once);                                                         \
    }

SIDE(fetch_latents)
SIDE(fetch_kv)
SIDE(kernels_latents)
SIDE(kernels_kv)

/* All layers of a request by the hook, without what comes before the first and behind the last. */
static double hook_ms(void *ctx, double seconds)
{
    struct bed *bed = ctx;
    struct kvf_gpu_x_put_options options = {
        .struct_bytes = sizeof(options), .n_tokens = TOKENS, .x = bed->rebuild};
    uint64_t ns = 0;
    uint64_t n = 0;

    do {
        struct kvf_gpu_x_put *put;
        uint64_t begun_ns;

        gpu_x_must(kvf_gpu_x_put_begin(bed->latents.handle, &options, &put), "a put");
        begun_ns = kvf_now_ns();
        for (uint32_t l = 0; l < LAYERS; l++) {
            gpu_x_must(kvf_gpu_x_put_layer(put, l, (const void *)(uintptr_t)bed->x, bed->stream),
                       "a layer");
        }
        wait_for(bed);
        ns += kvf_now_ns() - begun_ns;
        n++;
        (void)kvf_gpu_x_put_cancel(put);
    } while ((double)ns < seconds * 1e9);
    return (double)ns / 1e6 / (double)n;
}

static void products(struct bed *bed)
{
    const struct kvf_gpu_product product = {
        .m = TOKENS, .n = WIDTH, .k = D_MODEL, .c_stride = WIDTH, .dtype = KVF_DTYPE_BF16};

    for (uint32_t l = 0; l < LAYERS; l++) {
        gpu_x_must(kvf_gpu_blas_multiply(bed->blas, &product, bed->x,
                                         bed->model.matrices + l * W_BYTES, bed->of_hook,
                                         bed->stream),
                   "a product");
    }
    wait_for(bed);
}

SIDE(products)

/* KiB a token. */
static double token_kib(const struct side *side)
{
    return (double)kvf_codec_plan_payload_bytes(&side->client->plan, GPU_CHUNK_TOKENS) /
           GPU_CHUNK_TOKENS / 1024;
}

int main(int argc, char **argv)
{
    static struct bed bed;
    struct bench_run run;
    char text[KVF_GPU_TEXT_BYTES];

    bench_init(&run, argc, argv);
    bed.window_tokens = (uint32_t)bench_number(&run, "--window", 0);
    bed.gpu = gpu_open();
    bed.stream = gpu_stream(bed.gpu, KVF_GPU_PRIORITY_HIGH);
    if (kvf_gpu_blas_open(bed.gpu, &bed.blas, text, sizeof(text)) != KVF_OK) {
        bench_print_skip("xgcl3_fetch_vs_saw4", "no cuBLAS here");
        return 0;
    }
    bed.product = gpu_memory(bed.gpu, (uint64_t)WINDOW * WIDTH * sizeof(float));
    bed.payloads = gpu_memory(bed.gpu, UINT64_C(512) << 20);
    gpu_load_init(&bed.kv.load, bed.gpu, GPU_LLAMA_8B, "balanced", CHUNKS, bed.payloads);
    gpu_load_init(&bed.latents.load, bed.gpu, GPU_X_2048, "x3", CHUNKS,
                  bed.payloads + gpu_load_payloads_bytes(&bed.kv.load));
    gpu_load_encode(&bed.kv.load, bed.gpu, bed.stream);
    gpu_load_encode(&bed.latents.load, bed.gpu, bed.stream);
    model_init(&bed);
    bed.x = gpu_memory(bed.gpu, (uint64_t)TOKENS * D_MODEL * sizeof(uint16_t));
    gpu_x_fill(bed.gpu, bed.stream, bed.x, (uint64_t)TOKENS * D_MODEL * sizeof(uint16_t), 2.0f);
    bed.of_hook = gpu_memory(bed.gpu, (uint64_t)TOKENS * WIDTH * sizeof(float));
    engine_open(&bed);
    put_all(&bed.kv);
    put_all(&bed.latents);
    fetch_latents(&bed); /* pins, and finds products */
    fetch_kv(&bed);
    bench_pairs(&run, "xgcl3_fetch_vs_saw4", fetch_latents_ms, fetch_kv_ms, &bed);
    bench_pairs(&run, "xgcl3_gpu_vs_saw4", kernels_latents_ms, kernels_kv_ms, &bed);
    bench_pairs(&run, "xgcl3_hook_vs_products", hook_ms, products_ms, &bed);
    bench_print_pair("xgcl3_bytes_vs_saw4", token_kib(&bed.latents), token_kib(&bed.kv));
    engine_close(&bed);
    (void)kvf_gpu_blas_close(bed.blas);
    return 0;
}
