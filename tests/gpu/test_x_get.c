/* SPDX-License-Identifier: Apache-2.0
 *
 * test_x_get.c: K and V from stored X on a GPU (kvf_gpu_x_*), beside a reference in double: from
 * what the C codec decodes, |error| <= 2 bf16 ulp of max(|reference|, 2^-6 of the vector's root
 * mean square), which is the error of fp32 sums of some hundred terms and of one rounding.
 */
#include "client/x_svd.h"
#include "kvferry_gpu_x.h"
#include "tests/gpu/calls.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codec/codec_fp.h"

enum {
    LAYERS = 3,
    WIDTH = 256, /* of X */
    RANK = 128,  /* of its latents */
    HEADS = 2,
    DIM_K = 96,
    DIM_V = 64,
    K_WIDTH = HEADS * DIM_K,
    KV_WIDTH = HEADS * (DIM_K + DIM_V),
    CHUNK = 32,
    PAGE = 8, /* tokens */
    CHUNK_PAGES = CHUNK / PAGE,
    BLOCKS = 7,
    PAGES = BLOCKS * CHUNK_PAGES,
    POSITIONS = 4096,
    ROPE = 64,   /* of 96: the last ones do not turn */
    KEPT = 0x5a, /* bytes of pages that nothing is written to */
};

/* Pages of a layer: (B, N, H, K and V). */
#define TOKEN_BYTES (HEADS * (DIM_K + DIM_V) * 2u)
#define PAGE_BYTES  (PAGE * TOKEN_BYTES)

struct model {
    uint16_t w[LAYERS][KV_WIDTH][WIDTH]; /* W_K, then W_V */
    uint16_t bias[LAYERS][KV_WIDTH];
    uint16_t gain[LAYERS][DIM_K];
    float cosines[POSITIONS][ROPE / 2];
    float sines[POSITIONS][ROPE / 2];
};

struct bed {
    struct kvf_client *client;
    struct kvf_gpu *gpu;
    struct kvf_gpu_x *x;
    uint64_t model; /* on the device */
    uint64_t pages;
    void *layers[2][LAYERS];
    struct kvf_x_weights weights;
    const void *lists[5][LAYERS];
    uint64_t first_key;
    char log_text[512];
};

static struct calls the_daemon;
static struct kvf_random_seeded random_bits;
static struct model model;
static uint16_t x_in[BLOCKS][LAYERS][CHUNK][WIDTH];
static uint16_t x_stored[BLOCKS][LAYERS][CHUNK][WIDTH]; /* as it comes back */
static uint16_t out[LAYERS][PAGES][PAGE][HEADS][DIM_K + DIM_V];
static uint64_t n_keys = 1;
static float factors[LAYERS][WIDTH][RANK]; /* U */
static char factors_path[KVF_TEST_PATH_BYTES];

static float uniform(void)
{
    return (float)(int32_t)(uint32_t)kvf_random_seeded_next(&random_bits) * 0x1p-31f;
}

static void fill(uint16_t *to, size_t n, float scale)
{
    for (size_t i = 0; i < n; i++) {
        to[i] = kvf_bf16_from_f32(uniform() * scale);
    }
}

static void model_fill(void)
{
    fill((uint16_t *)model.w, sizeof(model.w) / 2, 0.1f);
    fill((uint16_t *)model.bias, sizeof(model.bias) / 2, 0.5f);
    fill((uint16_t *)model.gain, sizeof(model.gain) / 2, 2.0f);
    for (uint32_t p = 0; p < POSITIONS; p++) {
        for (uint32_t i = 0; i < ROPE / 2; i++) {
            double angle = p * pow(10000.0, -2.0 * i / ROPE);

            model.cosines[p][i] = (float)cos(angle);
            model.sines[p][i] = (float)sin(angle);
        }
    }
}

/* --- reference -------------------------------------------------------------------------------- */

struct shape {
    uint8_t rope_style;
    bool has_bias;
    bool has_norm;
    bool is_apart; /* W_V does not follow W_K */
    const char *profile;
    uint32_t window_tokens;
    bool has_latents; /* kind XG, differences from layer 1 on */
};

static void reference_k(const struct shape *shape, uint32_t layer, uint32_t position, double *x)
{
    double sum = 0;

    for (uint32_t i = 0; i < DIM_K; i++) {
        sum += x[i] * x[i];
    }
    for (uint32_t i = 0; shape->has_norm && i < DIM_K; i++) {
        x[i] = x[i] / sqrt(sum / DIM_K + 1e-6) * (double)kvf_f32_from_bf16(model.gain[layer][i]);
    }
    for (uint32_t i = 0; shape->rope_style != KVF_ROPE_STYLE_NONE && i < ROPE / 2; i++) {
        bool is_half = shape->rope_style == KVF_ROPE_STYLE_HALF;
        double *a = &x[is_half ? i : 2 * i];
        double *b = &x[is_half ? i + ROPE / 2 : 2 * i + 1];
        double first = *a;

        *a = first * (double)model.cosines[position][i] - *b * (double)model.sines[position][i];
        *b = *b * (double)model.cosines[position][i] + first * (double)model.sines[position][i];
    }
}

/* One head of K or V of a token. */
static void reference(const struct shape *shape, const uint16_t *x, uint32_t layer,
                      uint32_t position, uint32_t head, bool is_v, double *to)
{
    uint32_t dim = is_v ? DIM_V : DIM_K;
    uint32_t first = is_v ? K_WIDTH + head * DIM_V : head * DIM_K;

    for (uint32_t i = 0; i < dim; i++) {
        double sum = shape->has_bias ? (double)kvf_f32_from_bf16(model.bias[layer][first + i]) : 0;

        for (uint32_t c = 0; c < WIDTH; c++) {
            sum += (double)kvf_f32_from_bf16(x[c]) *
                   (double)kvf_f32_from_bf16(model.w[layer][first + i][c]);
        }
        to[i] = sum;
    }
    if (!is_v) {
        reference_k(shape, layer, position, to);
    }
}

/* more: what an element may be off by besides, in the vector's root mean square. */
static void assert_vector(const double *want, const uint16_t *have, uint32_t dim, double more)
{
    double square = 0;

    for (uint32_t i = 0; i < dim; i++) {
        square += want[i] * want[i];
    }
    for (uint32_t i = 0; i < dim; i++) {
        double mean = sqrt(square / dim);
        double least = mean * 0x1p-6;
        double about = fabs(want[i]) > least ? fabs(want[i]) : least;
        double ulp = ldexp(1.0, ilogb(about) - 7);
        double error = fabs((double)kvf_f32_from_bf16(have[i]) - want[i]);

        if (!(error <= 2 * ulp + more * mean)) {
            print_error("element %u is %.9g, not %.9g\n", i, (double)kvf_f32_from_bf16(have[i]),
                        want[i]);
        }
        assert_true(error <= 2 * ulp + more * mean);
    }
}

/* X of a token as it is stored, or as the sum of its latents. */
static const uint16_t *x_of(const struct shape *shape, uint32_t block, uint32_t layer,
                            uint32_t token, uint16_t to[WIDTH])
{
    if (!shape->has_latents) {
        return x_stored[block][layer][token];
    }
    for (uint32_t i = 0; i < WIDTH; i++) {
        double sum = 0;

        for (uint32_t l = 0; l <= layer; l++) {
            for (uint32_t r = 0; r < RANK; r++) {
                sum += (double)kvf_f32_from_bf16(x_stored[block][l][token][r]) *
                       (double)factors[l][i][r];
            }
        }
        to[i] = kvf_bf16_from_f32((float)sum);
    }
    return to;
}

/* All that a token's page slot has, of a layer. */
static void assert_token(const struct shape *shape, const uint16_t *x, uint32_t layer,
                         uint32_t position, uint16_t slot[HEADS][DIM_K + DIM_V])
{
    double want[DIM_K];
    /* Sums of latents are rounded to X, some of them the other way: elements of X are off by up to
     * 2^-8 of themselves, in no order, and K and V by some 2^-9 of what they are in the mean. Eight
     * times that does not happen. */
    double more = shape->has_latents ? 0x1p-6 : 0;

    for (uint32_t head = 0; head < HEADS; head++) {
        reference(shape, x, layer, position, head, false, want);
        assert_vector(want, slot[head], DIM_K, more);
        reference(shape, x, layer, position, head, true, want);
        assert_vector(want, slot[head] + DIM_K, DIM_V, more);
    }
}

/* --- the engine ------------------------------------------------------------------------------- */

static void keep_log(void *arg, int severity, const char *text)
{
    struct bed *bed = arg;

    if (severity <= 1) {
        (void)snprintf(bed->log_text, sizeof(bed->log_text), "%s", text);
    }
}

static struct kvf_key key_of(const struct bed *bed, uint32_t block, char text[24])
{
    return calls_key(bed->first_key + block, text);
}

static void client_open(struct bed *bed, const struct shape *shape)
{
    struct kvf_geometry geometry = {.struct_bytes = sizeof(geometry),
                                    .dtype = KVF_DTYPE_BF16,
                                    .n_layers = LAYERS,
                                    .chunk_tokens = CHUNK};
    struct kvf_gpu_options gpu_options = {.struct_bytes = sizeof(gpu_options),
                                          .load_window_bytes = 1 << 18};
    struct kvf_options options;

    assert_int_equal(kvf_x_geometry(shape->has_latents ? KVF_KIND_XG : KVF_KIND_X,
                                    shape->has_latents ? RANK : WIDTH, &geometry),
                     KVF_OK);
    kvf_test_client_options(&the_daemon.daemon, &options);
    options.geometry = &geometry;
    options.profile = shape->profile;
    options.flags = KVF_ATTACH_ALLOW_UNCALIBRATED;
    options.staging_bytes = 8 << 20;
    options.log = keep_log;
    options.log_arg = bed;
    memset(options.weights_digest, 7, sizeof(options.weights_digest));
    if (shape->has_latents) {
        struct kvf_x_factors facts = {.struct_bytes = sizeof(facts)};

        assert_int_equal(kvf_x_factors_read(factors_path, &facts, NULL, NULL), KVF_OK);
        memcpy(options.factors_digest, facts.digest, sizeof(options.factors_digest));
    }
    assert_int_equal(kvf_open(&options, &bed->client), KVF_OK);
    assert_int_equal(kvf_gpu_open(bed->client, &gpu_options, &bed->gpu), KVF_OK);
}

static struct kvf_kv_view view_of(uint16_t (*block)[CHUNK][WIDTH], void *layers[LAYERS],
                                  const struct kvf_geometry *geometry)
{
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        layers[layer] = block[layer];
    }
    return (struct kvf_kv_view){.struct_bytes = sizeof(struct kvf_kv_view),
                                .tokens_a_page = CHUNK,
                                .k = {.layers = layers,
                                      .page_stride_bytes = CHUNK * WIDTH * 2,
                                      .token_stride_bytes = WIDTH * 2,
                                      .head_stride_bytes = geometry->dim_k * 2u}};
}

/* Store blocks, and what comes back of them. */
static void blocks_put(struct bed *bed)
{
    const struct kvf_geometry *geometry = &bed->client->geometry;
    void *layers[LAYERS];
    char text[24];
    struct kvf_hit hit;

    bed->first_key = n_keys;
    n_keys += BLOCKS + 1;
    fill((uint16_t *)x_in, sizeof(x_in) / 2, 3.0f);
    for (uint32_t block = 0; block < BLOCKS; block++) {
        struct kvf_kv_view view = view_of(x_in[block], layers, geometry);
        struct kvf_put_item item = {.struct_bytes = sizeof(item),
                                    .source = KVF_SOURCE_VIEW,
                                    .key = key_of(bed, block, text),
                                    .token_start = block * CHUNK,
                                    .kv = &view};

        assert_int_equal(kvf_put(bed->client, &item, 1, NULL, NULL), KVF_OK);
        view = view_of(x_stored[block], layers, geometry);
        assert_int_equal(kvf_get(bed->client, &item.key, 1, NULL, &hit), KVF_OK);
        assert_int_equal(
            kvf_decode(bed->client, hit.record, hit.record_bytes, 0, 0, 0, CHUNK, &view), KVF_OK);
        assert_int_equal(kvf_lease_release(bed->client, hit.lease), KVF_OK);
    }
}

static void weights_make(struct bed *bed, const struct shape *shape)
{
    const uint8_t *base = (const uint8_t *)(uintptr_t)bed->model;
    size_t w_v = shape->is_apart ? sizeof(model.w[0]) : 0; /* of another layer, then */

    bed->weights = (struct kvf_x_weights){
        .struct_bytes = sizeof(bed->weights),
        .d_model = WIDTH,
        .stored_width = shape->has_latents ? RANK : 0,
        .svd_file = shape->has_latents ? factors_path : NULL,
        .n_layers = LAYERS,
        .n_heads = HEADS,
        .dim_k = DIM_K,
        .dim_v = DIM_V,
        .rope_dims = ROPE,
        .dtype = KVF_DTYPE_BF16,
        .kv_dtype = KVF_DTYPE_BF16,
        .rope_style = shape->rope_style,
        .rope_positions = POSITIONS,
        .k_norm_eps = shape->has_norm ? 1e-6f : 0,
        .w_k = bed->lists[0],
        .w_v = bed->lists[1],
        .b_k = shape->has_bias ? bed->lists[2] : NULL,
        .b_v = shape->has_bias ? bed->lists[3] : NULL,
        .k_norm = shape->has_norm ? bed->lists[4] : NULL,
        .rope_cos = (const float *)(base + offsetof(struct model, cosines)),
        .rope_sin = (const float *)(base + offsetof(struct model, sines)),
    };
    memset(bed->weights.weights_digest, 7, sizeof(bed->weights.weights_digest));
    for (uint32_t l = 0; l < LAYERS; l++) {
        const uint8_t *w = base + offsetof(struct model, w) + l * sizeof(model.w[0]);
        const uint8_t *bias = base + offsetof(struct model, bias) + l * sizeof(model.bias[0]);

        bed->lists[0][l] = w;
        bed->lists[1][l] = w + sizeof(model.w[0][0]) * K_WIDTH + w_v;
        bed->lists[2][l] = bias;
        bed->lists[3][l] = bias + 2 * K_WIDTH;
        bed->lists[4][l] = base + offsetof(struct model, gain) + l * sizeof(model.gain[0]);
    }
}

static int x_open(struct bed *bed, uint32_t window_tokens)
{
    struct kvf_gpu_x_options options = {
        .struct_bytes = sizeof(options),
        .window_tokens = window_tokens,
        .pages = {.struct_bytes = sizeof(options.pages),
                  .n_pages = PAGES,
                  .tokens_a_page = PAGE,
                  .k = {bed->layers[0], PAGE_BYTES, TOKEN_BYTES, (DIM_K + DIM_V) * 2},
                  .v = {bed->layers[1], PAGE_BYTES, TOKEN_BYTES, (DIM_K + DIM_V) * 2}},
    };

    return kvf_gpu_x_open(bed->gpu, &bed->weights, &options, &bed->x);
}

static void bed_open(struct bed *bed, const struct shape *shape)
{
    *bed = (struct bed){0};
    client_open(bed, shape);
    model_fill();
    bed->model = calls_alloc(sizeof(model) + sizeof(model.w[0]));
    calls_write(bed->model, &model, sizeof(model));
    bed->pages = calls_alloc(sizeof(out));
    for (uint32_t l = 0; l < LAYERS; l++) {
        bed->layers[0][l] = (uint8_t *)(uintptr_t)bed->pages + l * sizeof(out[0]);
        bed->layers[1][l] = (uint8_t *)bed->layers[0][l] + DIM_K * 2;
    }
    weights_make(bed, shape);
    blocks_put(bed);
}

static void bed_close(struct bed *bed)
{
    bed->x = kvf_gpu_x_close(bed->x);
    bed->gpu = kvf_gpu_close(bed->gpu);
    bed->client = kvf_close(bed->client);
    calls_free(bed->model);
    calls_free(bed->pages);
}

static void pages_mark(const struct bed *bed)
{
    memset(out, KEPT, sizeof(out));
    calls_write(bed->pages, out, sizeof(out));
}

static void assert_kept(const void *memory, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        assert_int_equal(((const uint8_t *)memory)[i], KEPT);
    }
}

/* What items ask for; block b goes to pages of its own, last ones first. */
static void items_make(const struct bed *bed, struct kvf_gpu_x_item items[BLOCKS],
                       uint32_t ids[BLOCKS][CHUNK_PAGES], char keys[BLOCKS][24])
{
    for (uint32_t b = 0; b < BLOCKS; b++) {
        for (uint32_t p = 0; p < CHUNK_PAGES; p++) {
            ids[b][p] = PAGES - 1 - (b * CHUNK_PAGES + p);
        }
        items[b] = (struct kvf_gpu_x_item){.struct_bytes = sizeof(items[b]),
                                           .n_pages = CHUNK_PAGES,
                                           .key = key_of(bed, b, keys[b]),
                                           .token_start = b * CHUNK,
                                           .pages = ids[b]};
    }
}

/* --- tests ------------------------------------------------------------------------------------ */

/* Every shape: a missing block among others, a block of which less is wanted, more windows than
 * there are, on the caller's stream or one of the library's. */
static void check_get(const struct shape *shape, bool has_stream)
{
    struct bed bed;
    struct kvf_gpu_x_item items[BLOCKS];
    uint32_t ids[BLOCKS][CHUNK_PAGES];
    char keys[BLOCKS][24];
    int32_t statuses[BLOCKS];
    uint32_t missing = (uint32_t)(kvf_random_seeded_next(&random_bits) % BLOCKS);
    uint32_t shorter = (missing + 2) % BLOCKS;
    void *stream = has_stream ? calls_stream() : NULL;

    bed_open(&bed, shape);
    assert_int_equal(x_open(&bed, shape->window_tokens), KVF_OK);
    pages_mark(&bed);
    items_make(&bed, items, ids, keys);
    items[missing].key = calls_key(n_keys - 1, keys[missing]);
    items[shorter].n_tokens = 11;
    items[shorter].n_pages = 2;
    for (int round = 0; round < 2; round++) { /* what one left behind does not matter */
        assert_int_equal(kvf_gpu_x_get(bed.x, items, BLOCKS, NULL, NULL, stream, statuses),
                         KVF_PARTIAL);
    }
    if (stream != NULL) {
        calls_check(calls_device->driver.cuStreamSynchronize(stream));
        calls_check(calls_device->driver.cuStreamDestroy(stream));
    }
    calls_read(out, bed.pages, sizeof(out));
    for (uint32_t b = 0; b < BLOCKS; b++) {
        assert_int_equal(statuses[b], b == missing ? KVF_MISS : KVF_OK);
        for (uint32_t l = 0; l < LAYERS; l++) {
            for (uint32_t t = 0; t < CHUNK; t++) {
                uint16_t(*slot)[DIM_K + DIM_V] = out[l][ids[b][t / PAGE]][t % PAGE];

                if (b == missing || (b == shorter && t >= 11)) {
                    assert_kept(slot, TOKEN_BYTES);
                } else if ((b + l + t) % 9 == 0) {
                    uint16_t x[WIDTH];

                    assert_token(shape, x_of(shape, b, l, t, x), l, b * CHUNK + t, slot);
                }
            }
        }
    }
    bed_close(&bed);
}

static void every_shape(void **state)
{
    static const struct shape shapes[] = {
        {KVF_ROPE_STYLE_HALF, false, false, false, "x4", 64, false},
        {KVF_ROPE_STYLE_INTERLEAVED, true, false, false, "x3", 0, false},
        {KVF_ROPE_STYLE_HALF, true, true, false, "x2", 96, false},
        {KVF_ROPE_STYLE_NONE, false, true, false, "exact", 32, false},
        {KVF_ROPE_STYLE_HALF, true, false, false, "raw", 1, false},
        {KVF_ROPE_STYLE_HALF, false, false, false, "xcl3", 64, false},
        {KVF_ROPE_STYLE_HALF, true, true, false, "xgcl3-d1", 96, true},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        check_get(&shapes[i], i % 2 == 0);
    }
}

/* The same X by one call a layer, with W_V elsewhere than behind W_K. */
static void single_layers(void **state)
{
    static const struct shape shape = {KVF_ROPE_STYLE_HALF, true, false, true, "raw", 32, false};
    struct bed bed;
    uint32_t ids[2 * CHUNK_PAGES];
    const uint32_t n_tokens = CHUNK + 13;
    uint64_t x;

    (void)state;
    bed_open(&bed, &shape);
    assert_int_equal(x_open(&bed, shape.window_tokens), KVF_OK);
    x = calls_alloc(n_tokens * sizeof(x_in[0][0][0]));
    for (uint32_t p = 0; p < 2 * CHUNK_PAGES; p++) {
        ids[p] = 2 * p + 1;
    }
    calls_write(x, x_in[0][0], CHUNK * sizeof(x_in[0][0][0]));
    calls_write(x + CHUNK * sizeof(x_in[0][0][0]), x_in[1][0], 13 * sizeof(x_in[0][0][0]));
    /* layer 0, whose W_V is taken from where layer 1 has it */
    memcpy(model.w[0][K_WIDTH], model.w[1][K_WIDTH], HEADS * DIM_V * sizeof(model.w[0][0]));
    assert_int_equal(kvf_gpu_x_rebuild(bed.x, 0, (void *)(uintptr_t)x, n_tokens, 100, ids,
                                       (n_tokens + PAGE - 1) / PAGE, NULL),
                     KVF_OK);
    calls_check(calls_device->driver.cuCtxSynchronize());
    calls_read(out, bed.pages, sizeof(out));
    for (uint32_t t = 0; t < n_tokens; t++) {
        assert_token(&shape, x_in[t / CHUNK][0][t % CHUNK], 0, 100 + t,
                     out[0][ids[t / PAGE]][t % PAGE]);
    }
    calls_free(x);
    bed_close(&bed);
}

/* What is wrong is said, and nothing happens. */
static void refusals(void **state)
{
    static const struct shape shape = {KVF_ROPE_STYLE_HALF, false, false, false, "x4", 64, false};
    struct bed bed;
    struct kvf_gpu_x_item items[BLOCKS];
    uint32_t ids[BLOCKS][CHUNK_PAGES];
    char keys[BLOCKS][24];
    int32_t statuses[BLOCKS];

    (void)state;
    bed_open(&bed, &shape);
    bed.weights.weights_digest[0] = 8;
    assert_int_equal(x_open(&bed, 0), KVF_ERR_MISMATCH);
    memset(bed.weights.weights_digest, 0, sizeof(bed.weights.weights_digest));
    assert_int_equal(x_open(&bed, 0), KVF_ERR_REFUSED);
    memset(bed.weights.weights_digest, 7, sizeof(bed.weights.weights_digest));
    bed.weights.n_layers = LAYERS - 1;
    assert_int_equal(x_open(&bed, 0), KVF_ERR_MISMATCH);
    assert_non_null(strstr(bed.log_text, "2 layers of 256"));
    bed.weights.n_layers = LAYERS;
    bed.weights.n_heads = 1;
    assert_int_equal(x_open(&bed, 0), KVF_ERR_REFUSED); /* X is larger than K and V */
    bed.weights.n_heads = HEADS;
    assert_int_equal(x_open(&bed, 0), KVF_OK);
    pages_mark(&bed);
    items_make(&bed, items, ids, keys);
    items[3].token_start = POSITIONS - CHUNK + 1;
    assert_int_equal(kvf_gpu_x_get(bed.x, items, BLOCKS, NULL, NULL, NULL, statuses),
                     KVF_ERR_MISMATCH);
    assert_non_null(strstr(bed.log_text, "the rotary tables have 4096"));
    items[3].token_start = 0;
    ids[2][1] = PAGES;
    assert_int_equal(kvf_gpu_x_get(bed.x, items, BLOCKS, NULL, NULL, NULL, statuses),
                     KVF_ERR_INVALID);
    ids[2][1] = 0;
    items[1].n_tokens = CHUNK + 1;
    assert_int_equal(kvf_gpu_x_get(bed.x, items, BLOCKS, NULL, NULL, NULL, statuses),
                     KVF_ERR_INVALID);
    calls_read(out, bed.pages, sizeof(out));
    assert_kept(out, sizeof(out));
    bed_close(&bed);
}

/* Factors that only have to be numbers: what is stored is latents, not X. */
static void factors_write(const struct kvf_test_dir *dir)
{
    const struct kvf_weights_model facts = {.n_layers = LAYERS,
                                            .d_model = WIDTH,
                                            .n_query_heads = HEADS,
                                            .n_heads = HEADS,
                                            .dim_k = DIM_K,
                                            .dim_v = DIM_V};
    static const float m[RANK][KV_WIDTH];
    uint8_t digest[KVF_DIGEST_BYTES];
    struct kvf_svd_writer *writer;
    char why[KVF_SVD_WHY_BYTES];

    memset(digest, 7, sizeof(digest));
    kvf_test_dir_path(dir, "model.svd", factors_path);
    assert_int_equal(kvf_svd_writer_open(factors_path, &facts, RANK, digest, &writer, why), KVF_OK);
    for (uint32_t l = 0; l < LAYERS; l++) {
        for (uint32_t i = 0; i < WIDTH * RANK; i++) {
            factors[l][i / RANK][i % RANK] = uniform() / 16;
        }
        assert_int_equal(kvf_svd_writer_add(writer, factors[l][0], m[0], why), KVF_OK);
    }
    assert_int_equal(kvf_svd_writer_commit(writer, why), KVF_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_shape),
        cmocka_unit_test(single_layers),
        cmocka_unit_test(refusals),
    };
    struct kvf_test_dir files;
    uint64_t seed;
    int failed;

    if (!calls_begin(&seed)) {
        return 77;
    }
    kvf_random_seeded_init(&random_bits, seed);
    kvf_test_dir_create(&files);
    factors_write(&files);
    failed = calls_run(&the_daemon, tests);
    kvf_test_dir_remove(&files);
    calls_device_close();
    return failed;
}
