/* SPDX-License-Identifier: Apache-2.0
 *
 * test_x_latents.c: X put layer by layer from device memory as latents (kvf_gpu_x_put_*, kind XG).
 *
 * With a U that picks elements of X and changes signs every product and every sum is exact, in
 * whatever order it is taken: latents are known to the bit, and records have to be those that the C
 * codec makes of them, in a loop closed here. With a U whose columns are any orthonormal ones what
 * is left of each layer's latents is bounded, however many layers were before it.
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
    LAYERS = 7,
    D_MODEL = 256,
    RANK = 128,
    HEADS = 2,
    DIM = 32,
    CHUNK = 16,
    BLOCKS = 3,
    TAIL = 5, /* tokens of the last one */
    TOKENS = (BLOCKS - 1) * CHUNK + TAIL,
    SINKS = 2,
};

struct shape {
    const char *profile;
    uint8_t dtype;
    uint16_t n_not_numbers; /* one of each of so many tokens, in some layer */
};

struct bed {
    struct kvf_client *client;
    struct kvf_gpu *gpu;
    struct kvf_gpu_x *x;
    uint64_t matrices; /* on the device: K and V of all layers, and pages that nothing goes to */
    uint64_t first_key;
    uint8_t dtype;
    uint32_t base_layer; /* layers behind it are differences */
    char log_text[512];
};

static struct calls the_daemon;
static struct kvf_random_seeded random_bits;
static struct kvf_test_dir files;
static uint64_t n_keys = 1;
static float factors[LAYERS][D_MODEL][RANK];
static char factors_path[KVF_TEST_PATH_BYTES];
static uint32_t picked[LAYERS][RANK]; /* of X, by a U that picks */
static float signs[LAYERS][RANK];
static uint16_t x_in[LAYERS][TOKENS][D_MODEL];
static float decoded[LAYERS][TOKENS][RANK]; /* latents as a reader has them */

static float uniform(void)
{
    return (float)(int32_t)(uint32_t)kvf_random_seeded_next(&random_bits) * 0x1p-31f;
}

static uint16_t narrowed(uint8_t dtype, float value)
{
    return dtype == KVF_DTYPE_BF16 ? kvf_bf16_from_f32(value) : kvf_f16_from_f32(value);
}

static float widened(uint8_t dtype, uint16_t bits)
{
    return dtype == KVF_DTYPE_BF16 ? kvf_f32_from_bf16(bits) : kvf_f32_from_f16(bits);
}

/* --- factors ---------------------------------------------------------------------------------- */

static void factors_write(void)
{
    const struct kvf_weights_model facts = {.n_layers = LAYERS,
                                            .d_model = D_MODEL,
                                            .n_query_heads = 4,
                                            .n_heads = HEADS,
                                            .dim_k = DIM,
                                            .dim_v = DIM};
    static const float m[RANK][RANK]; /* K and V are not looked at */
    uint8_t digest[KVF_DIGEST_BYTES];
    struct kvf_svd_writer *writer;
    char why[KVF_SVD_WHY_BYTES];

    memset(digest, 7, sizeof(digest));
    kvf_test_dir_path(&files, "model.svd", factors_path);
    assert_int_equal(kvf_svd_writer_open(factors_path, &facts, RANK, digest, &writer, why), KVF_OK);
    for (uint32_t l = 0; l < LAYERS; l++) {
        assert_int_equal(kvf_svd_writer_add(writer, factors[l][0], m[0], why), KVF_OK);
    }
    assert_int_equal(kvf_svd_writer_commit(writer, why), KVF_OK);
}

/* A column each for RANK elements of X, in any order. */
static void factors_pick(void)
{
    memset(factors, 0, sizeof(factors));
    for (uint32_t l = 0; l < LAYERS; l++) {
        uint32_t order[D_MODEL];

        for (uint32_t i = 0; i < D_MODEL; i++) {
            uint32_t at = (uint32_t)(kvf_random_seeded_next(&random_bits) % (i + 1));

            order[i] = order[at];
            order[at] = i;
        }
        for (uint32_t r = 0; r < RANK; r++) {
            picked[l][r] = order[r];
            signs[l][r] = kvf_random_seeded_next(&random_bits) % 2 != 0 ? 1.0f : -1.0f;
            factors[l][order[r]][r] = signs[l][r];
        }
    }
    factors_write();
}

static double column_dot(double (*u)[RANK], uint32_t a, uint32_t b)
{
    double sum = 0;

    for (uint32_t i = 0; i < D_MODEL; i++) {
        sum += u[i][a] * u[i][b];
    }
    return sum;
}

/* Columns at random, each less what it has of those before. */
static void factors_turn(void)
{
    static double u[D_MODEL][RANK];

    for (uint32_t l = 0; l < LAYERS; l++) {
        for (uint32_t r = 0; r < RANK; r++) {
            for (uint32_t i = 0; i < D_MODEL; i++) {
                u[i][r] = (double)uniform();
            }
            for (uint32_t before = 0; before < r; before++) {
                double dot = column_dot(u, before, r);

                for (uint32_t i = 0; i < D_MODEL; i++) {
                    u[i][r] -= dot * u[i][before];
                }
            }
            double norm = sqrt(column_dot(u, r, r));

            for (uint32_t i = 0; i < D_MODEL; i++) {
                u[i][r] /= norm;
                factors[l][i][r] = (float)u[i][r];
            }
        }
    }
    factors_write();
}

/* --- the engine ------------------------------------------------------------------------------- */

static void keep_log(void *arg, int severity, const char *text)
{
    struct bed *bed = arg;

    if (severity <= 1) {
        (void)snprintf(bed->log_text, sizeof(bed->log_text), "%s", text);
    }
}

static void client_open(struct bed *bed, uint8_t kind, const char *profile)
{
    struct kvf_geometry geometry = {.struct_bytes = sizeof(geometry),
                                    .dtype = bed->dtype,
                                    .n_layers = LAYERS,
                                    .chunk_tokens = CHUNK,
                                    .sink_tokens = SINKS};
    struct kvf_gpu_options gpu_options = {.struct_bytes = sizeof(gpu_options),
                                          .load_window_bytes = 1 << 18};
    struct kvf_x_factors facts = {.struct_bytes = sizeof(facts)};
    struct kvf_options options;

    assert_int_equal(kvf_x_geometry(kind, kind == KVF_KIND_XG ? RANK : D_MODEL, &geometry), KVF_OK);
    kvf_test_client_options(&the_daemon.daemon, &options);
    options.geometry = &geometry;
    options.profile = profile;
    options.flags = KVF_ATTACH_ALLOW_UNCALIBRATED;
    options.staging_bytes = 8 << 20;
    options.log = keep_log;
    options.log_arg = bed;
    memset(options.weights_digest, 7, sizeof(options.weights_digest));
    if (kind == KVF_KIND_XG) {
        assert_int_equal(kvf_x_factors_read(factors_path, &facts, NULL, NULL), KVF_OK);
        memcpy(options.factors_digest, facts.digest, sizeof(options.factors_digest));
    }
    assert_int_equal(kvf_open(&options, &bed->client), KVF_OK);
    assert_int_equal(kvf_gpu_open(bed->client, &gpu_options, &bed->gpu), KVF_OK);
}

static void x_open(struct bed *bed)
{
    const size_t matrix_bytes = (size_t)HEADS * DIM * D_MODEL * 2;
    const void *lists[2][LAYERS];
    void *layers[LAYERS];
    struct kvf_x_weights weights = {.struct_bytes = sizeof(weights),
                                    .d_model = D_MODEL,
                                    .stored_width = RANK,
                                    .svd_file = factors_path,
                                    .n_layers = LAYERS,
                                    .n_heads = HEADS,
                                    .dim_k = DIM,
                                    .dim_v = DIM,
                                    .dtype = bed->dtype,
                                    .kv_dtype = bed->dtype,
                                    .rope_style = KVF_ROPE_STYLE_NONE,
                                    .w_k = lists[0],
                                    .w_v = lists[1]};
    struct kvf_gpu_x_options options = {
        .struct_bytes = sizeof(options),
        .window_tokens = CHUNK,
        .pages = {.struct_bytes = sizeof(options.pages),
                  .n_pages = 1,
                  .tokens_a_page = CHUNK,
                  .k = {layers, CHUNK * 256, 256, 64},
                  .v = {layers, CHUNK * 256, 256, 64}},
    };

    memset(weights.weights_digest, 7, sizeof(weights.weights_digest));
    for (uint32_t l = 0; l < LAYERS; l++) {
        lists[0][l] = (const uint8_t *)(uintptr_t)bed->matrices + 2 * l * matrix_bytes;
        lists[1][l] = (const uint8_t *)lists[0][l] + matrix_bytes;
        layers[l] = (uint8_t *)(uintptr_t)bed->matrices;
    }
    assert_int_equal(kvf_gpu_x_open(bed->gpu, &weights, &options, &bed->x), KVF_OK);
}

static void bed_open(struct bed *bed, const struct shape *shape)
{
    *bed = (struct bed){.dtype = shape->dtype};
    client_open(bed, KVF_KIND_XG, shape->profile);
    bed->base_layer = bed->client->plan.base_layer;
    bed->matrices = calls_alloc((size_t)2 * LAYERS * HEADS * DIM * D_MODEL * 2);
    bed->first_key = n_keys;
    n_keys += BLOCKS;
    x_open(bed);
}

static void bed_close(struct bed *bed)
{
    bed->x = kvf_gpu_x_close(bed->x);
    bed->gpu = kvf_gpu_close(bed->gpu);
    bed->client = kvf_close(bed->client);
    calls_free(bed->matrices);
}

static uint32_t block_tokens(uint32_t block)
{
    return block == BLOCKS - 1 ? TAIL : CHUNK;
}

/* Layers that are like each other, and some numbers that are none. */
static void x_fill(const struct shape *shape)
{
    for (uint32_t l = 0; l < LAYERS; l++) {
        for (uint32_t i = 0; i < TOKENS * D_MODEL; i++) {
            uint32_t token = i / D_MODEL;
            uint32_t at = i % D_MODEL;
            float before = l > 0 ? widened(shape->dtype, x_in[l - 1][token][at]) : 0;

            x_in[l][token][at] = narrowed(shape->dtype,
                                          0.9f * before + (l > 0 ? 0.5f : 1.0f) * uniform());
        }
    }
    for (uint32_t i = 0; i < shape->n_not_numbers; i++) {
        uint64_t bits = kvf_random_seeded_next(&random_bits);

        x_in[bits % LAYERS][i * TOKENS / shape->n_not_numbers][bits >> 8 & (D_MODEL - 1)] =
            shape->dtype == KVF_DTYPE_BF16 ? 0x7fc0 : 0x7e00;
    }
}

/* All layers through one piece of device memory, each overwritten by the next one on its stream. */
static void put_all(struct bed *bed)
{
    struct kvf_gpu_x_put_options options = {
        .struct_bytes = sizeof(options), .n_tokens = TOKENS, .x = bed->x};
    uint64_t x = calls_alloc(sizeof(x_in[0]));
    struct kvf_gpu_x_put *put;
    struct kvf_key keys[BLOCKS];
    char texts[BLOCKS][24];
    int32_t statuses[BLOCKS];
    void *stream = calls_stream();

    assert_int_equal(kvf_gpu_x_put_begin(bed->gpu, &options, &put), KVF_OK);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        calls_check(
            calls_device->driver.cuMemcpyHtoDAsync(x, x_in[layer], sizeof(x_in[0]), stream));
        assert_int_equal(kvf_gpu_x_put_layer(put, layer, (const void *)(uintptr_t)x, stream),
                         KVF_OK);
    }
    for (uint32_t b = 0; b < BLOCKS; b++) {
        keys[b] = calls_key(bed->first_key + b, texts[b]);
    }
    assert_int_equal(kvf_gpu_x_put_end(put, keys, BLOCKS, NULL, statuses), KVF_OK);
    calls_check(calls_device->driver.cuStreamDestroy(stream));
    calls_free(x);
}

/* --- records ---------------------------------------------------------------------------------- */

/* Blocks on their way through the C codec, and the loop around it. */
struct reference {
    struct kvf_block_encoder encoders[BLOCKS];
    uint8_t *records[BLOCKS];
    void *workspaces[BLOCKS];
    float sums[TOKENS][D_MODEL];
    uint16_t latents[TOKENS][RANK];
};

static struct reference *reference_new(const struct bed *bed)
{
    const struct kvf_codec_plan *plan = &bed->client->plan;
    struct reference *reference = calloc(1, sizeof(*reference));

    assert_non_null(reference);
    for (uint32_t b = 0; b < BLOCKS; b++) {
        reference->records[b] = calloc(1, plan->record_bytes_max);
        reference->workspaces[b] = aligned_alloc(
            KVF_CODEC_WORKSPACE_ALIGN,
            (plan->workspace_bytes / KVF_CODEC_WORKSPACE_ALIGN + 1) * KVF_CODEC_WORKSPACE_ALIGN);
        assert_non_null(reference->records[b]);
        assert_int_equal(kvf_block_encode_begin(&reference->encoders[b], plan, b * CHUNK,
                                                block_tokens(b), (void *)reference->records[b],
                                                reference->records[b] + KVF_RECORD_PAGE_BYTES,
                                                plan->record_bytes_max - KVF_RECORD_PAGE_BYTES,
                                                reference->workspaces[b]),
                         KVF_OK);
    }
    return reference;
}

static void reference_drop(struct reference *reference)
{
    for (uint32_t b = 0; b < BLOCKS; b++) {
        free(reference->records[b]);
        free(reference->workspaces[b]);
    }
    free(reference);
}

/* Latents of a token: of one element that is no number none is. */
static void reference_token(const struct bed *bed, struct reference *reference, uint32_t layer,
                            uint32_t token)
{
    bool is_difference = layer > bed->base_layer;
    float x[D_MODEL];
    float all = 0;

    for (uint32_t i = 0; i < D_MODEL; i++) {
        x[i] = widened(bed->dtype, x_in[layer][token][i]);
        if (is_difference && !isnan(x[i])) {
            x[i] = widened(bed->dtype, narrowed(bed->dtype, x[i] - reference->sums[token][i]));
        }
        all += 0.0f * x[i];
    }
    for (uint32_t r = 0; r < RANK; r++) {
        float latent = 0.0f + signs[layer][r] * x[picked[layer][r]];

        reference->latents[token][r] = !isnan(all)                    ? narrowed(bed->dtype, latent)
                                       : bed->dtype == KVF_DTYPE_BF16 ? 0x7fc0
                                                                      : 0x7e00;
    }
}

static void reference_layer(const struct bed *bed, struct reference *reference, uint32_t layer)
{
    bool is_difference = layer > bed->base_layer;

    for (uint32_t token = 0; token < TOKENS; token++) {
        reference_token(bed, reference, layer, token);
    }
    for (uint32_t b = 0; b < BLOCKS; b++) {
        void *layers[1] = {reference->latents[b * CHUNK]};
        struct kvf_kv_view view = {.struct_bytes = sizeof(view),
                                   .tokens_a_page = KVF_CHUNK_TOKENS_MAX,
                                   .k = {.layers = layers,
                                         .token_stride_bytes = RANK * 2,
                                         .head_stride_bytes = bed->client->geometry.dim_k * 2u}};

        assert_int_equal(
            kvf_block_encode_layer(&reference->encoders[b], &view, decoded[layer][b * CHUNK]),
            KVF_OK);
    }
    for (uint32_t token = 0; token < TOKENS; token++) {
        float *sums = reference->sums[token];

        for (uint32_t i = 0; i < D_MODEL && !is_difference; i++) {
            sums[i] = 0;
        }
        for (uint32_t r = 0; r < RANK; r++) {
            float d = decoded[layer][token][r];

            sums[picked[layer][r]] += fabsf(d) < 0x1p64f ? signs[layer][r] * d : 0;
        }
    }
}

static void check_records(const struct bed *bed, struct reference *reference)
{
    for (uint32_t b = 0; b < BLOCKS; b++) {
        struct kvf_hit hit;
        char text[24];
        struct kvf_key key = calls_key(bed->first_key + b, text);
        size_t payload_bytes;

        assert_int_equal(kvf_block_encode_end(&reference->encoders[b], &payload_bytes), KVF_OK);
        assert_int_equal(kvf_get(bed->client, &key, 1, NULL, &hit), KVF_OK);
        assert_int_equal(hit.record_bytes, KVF_RECORD_PAGE_BYTES + payload_bytes);
        assert_memory_equal((const uint8_t *)hit.record + KVF_RECORD_PAGE_BYTES,
                            reference->records[b] + KVF_RECORD_PAGE_BYTES, payload_bytes);
        assert_int_equal(kvf_lease_release(bed->client, hit.lease), KVF_OK);
    }
}

static void records_are_those_of_c(void **state)
{
    static const struct shape shapes[] = {
        {"xgcl3", KVF_DTYPE_BF16, 3},   {"xgcl2", KVF_DTYPE_F16, 0},
        {"xgcl4", KVF_DTYPE_BF16, 0},   {"xgcl3-d1", KVF_DTYPE_BF16, 2},
        {"xgcl2-d1", KVF_DTYPE_F16, 2}, {"xgcl3-paper", KVF_DTYPE_BF16, 0},
    };

    (void)state;
    factors_pick();
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        struct reference *reference;
        struct bed bed;

        print_message("%s\n", shapes[i].profile);
        bed_open(&bed, &shapes[i]);
        x_fill(&shapes[i]);
        put_all(&bed);
        reference = reference_new(&bed);
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            reference_layer(&bed, reference, layer);
        }
        check_records(&bed, reference);
        reference_drop(reference);
        bed_close(&bed);
    }
}

/* --- any factors ------------------------------------------------------------------------------ */

/* Latents of all layers from the cache. */
static void read_latents(const struct bed *bed)
{
    for (uint32_t b = 0; b < BLOCKS; b++) {
        uint16_t bits[LAYERS][CHUNK][RANK];
        void *layers[LAYERS];
        struct kvf_kv_view view = {.struct_bytes = sizeof(view),
                                   .tokens_a_page = CHUNK,
                                   .k = {.layers = layers,
                                         .page_stride_bytes = sizeof(bits[0]),
                                         .token_stride_bytes = RANK * 2,
                                         .head_stride_bytes = bed->client->geometry.dim_k * 2u}};
        struct kvf_hit hit;
        char text[24];
        struct kvf_key key = calls_key(bed->first_key + b, text);

        for (uint32_t l = 0; l < LAYERS; l++) {
            layers[l] = bits[l];
        }
        assert_int_equal(kvf_get(bed->client, &key, 1, NULL, &hit), KVF_OK);
        assert_int_equal(
            kvf_decode(bed->client, hit.record, hit.record_bytes, 0, 0, 0, block_tokens(b), &view),
            KVF_OK);
        assert_int_equal(kvf_lease_release(bed->client, hit.lease), KVF_OK);
        for (uint32_t i = 0; i < LAYERS * block_tokens(b) * RANK; i++) {
            uint32_t l = i / (block_tokens(b) * RANK);
            uint32_t t = i / RANK % block_tokens(b);

            decoded[l][b * CHUNK + t][i % RANK] = widened(bed->dtype, bits[l][t][i % RANK]);
        }
    }
}

/* Of a layer: what the codec has left of (X - S) U, beside what that is in the mean; then S. */
static double left_of(const struct bed *bed, uint32_t layer, double (*sums)[D_MODEL])
{
    double left = 0;
    double whole = 0;

    for (uint32_t t = 0; t < TOKENS; t++) {
        double x[D_MODEL];

        for (uint32_t i = 0; i < D_MODEL; i++) {
            sums[t][i] = layer > bed->base_layer ? sums[t][i] : 0;
            x[i] = (double)widened(bed->dtype, x_in[layer][t][i]) - sums[t][i];
        }
        for (uint32_t r = 0; r < RANK; r++) {
            double latent = 0;
            double d = (double)decoded[layer][t][r];

            for (uint32_t i = 0; i < D_MODEL; i++) {
                latent += x[i] * (double)factors[layer][i][r];
            }
            left += (latent - d) * (latent - d);
            whole += latent * latent;
            for (uint32_t i = 0; i < D_MODEL; i++) {
                sums[t][i] += d * (double)factors[layer][i][r];
            }
        }
    }
    return sqrt(left / whole);
}

static void errors_do_not_add_up(void **state)
{
    static const struct shape shape = {"xgcl3", KVF_DTYPE_BF16, 0};
    static double sums[TOKENS][D_MODEL];
    struct bed bed;

    (void)state;
    factors_turn();
    bed_open(&bed, &shape);
    x_fill(&shape);
    put_all(&bed);
    read_latents(&bed);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        double left = left_of(&bed, layer, sums);

        print_message("layer %u: %.4f of its latents are left\n", layer, left);
        /* of Gaussian numbers 4 bits leave some .09, 3 bits .18 */
        assert_true(left < (layer < 3 ? 0.13 : 0.25));
    }
    bed_close(&bed);
}

/* What cannot be begun, and what a layer has to be. */
static void refusals(void **state)
{
    static const struct shape shape = {"xgcl3", KVF_DTYPE_BF16, 0};
    struct kvf_gpu_x_put_options options = {
        .struct_bytes = sizeof(options), .n_tokens = TOKENS, .memory_bytes = 1 << 20};
    struct bed others = {.dtype = KVF_DTYPE_BF16};
    struct kvf_gpu_x_put *put;
    struct bed bed;

    (void)state;
    bed_open(&bed, &shape);
    assert_int_equal(kvf_gpu_x_put_begin(bed.gpu, &options, &put), KVF_ERR_REFUSED);
    assert_null(put);
    assert_non_null(strstr(bed.log_text, "kvf_gpu_x_open"));
    options.x = bed.x;
    assert_int_equal(kvf_gpu_x_put_begin(bed.gpu, &options, &put), KVF_ERR_TOO_LARGE);
    options.memory_bytes = 0;
    assert_int_equal(kvf_gpu_x_put_begin(bed.gpu, &options, &put), KVF_OK);
    assert_int_equal(kvf_gpu_x_put_layer(put, 0, (const void *)(uintptr_t)(bed.matrices + 2), NULL),
                     KVF_ERR_INVALID);
    assert_int_equal(kvf_gpu_x_put_layer(put, 0, (const void *)(uintptr_t)bed.matrices, NULL),
                     KVF_OK);
    assert_null(kvf_gpu_x_put_cancel(put));

    client_open(&others, KVF_KIND_X, "x3");
    assert_int_equal(kvf_gpu_x_put_begin(others.gpu, &options, &put), KVF_ERR_INVALID);
    others.gpu = kvf_gpu_close(others.gpu);
    others.client = kvf_close(others.client);
    client_open(&others, KVF_KIND_XG, "xgcl3");
    assert_int_equal(kvf_gpu_x_put_begin(others.gpu, &options, &put), KVF_ERR_REFUSED);
    others.gpu = kvf_gpu_close(others.gpu);
    others.client = kvf_close(others.client);
    bed_close(&bed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(records_are_those_of_c),
        cmocka_unit_test(errors_do_not_add_up),
        cmocka_unit_test(refusals),
    };
    uint64_t seed;
    int failed;

    if (!calls_begin(&seed)) {
        return 77;
    }
    kvf_random_seeded_init(&random_bits, seed);
    kvf_test_dir_create(&files);
    failed = calls_run(&the_daemon, tests);
    kvf_test_dir_remove(&files);
    calls_device_close();
    return failed;
}
