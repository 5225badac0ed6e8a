/* SPDX-License-Identifier: Apache-2.0
 *
 * test_layers.c: blocks that are encoded layer by layer: the bytes of a whole encode, and what a
 * layer hands back is what a reader has of it.
 */
#include "tests/support/support.h"
#include "tests/unit/codec/codec_fixture.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct kvf_random_seeded random_bits;

/* The pages of one layer in memory that all layers share. */
struct one {
    struct kvf_kv_view view;
    void *k[1];
    void *v[1];
    uint8_t *memory;
};

static void one_init(struct one *one, const struct fixture_kv *kv)
{
    one->memory = malloc(kv->k_bytes + kv->v_bytes);
    assert_non_null(one->memory);
    one->k[0] = one->memory;
    one->v[0] = one->memory + kv->k_bytes;
    one->view = kv->view;
    one->view.k.layers = one->k;
    one->view.v.layers = one->v;
}

static void one_load(struct one *one, const struct fixture_kv *kv, uint32_t layer)
{
    memcpy(one->k[0], kv->k_layers[layer], kv->k_bytes);
    memcpy(one->v[0], kv->v_layers[layer], kv->v_bytes);
}

/* Layer by layer into a codec of its own; decoded: K of all layers, or NULL. */
static void encode_by_layers(struct fixture_codec *codec, const struct fixture_kv *kv,
                             float *decoded)
{
    struct kvf_block_encoder encoder;
    struct one one;
    size_t payload_bytes = 0;
    size_t n = (size_t)kv->n_tokens * kv->geometry.n_heads * kv->geometry.dim_k;
    one_init(&one, kv);
    memset(codec->page, 0xa5, codec->plan.record_bytes_max);
    memset(codec->workspace, 0x5a, codec->plan.workspace_bytes);
    assert_int_equal(kvf_block_encode_begin(&encoder, &codec->plan, 0, kv->n_tokens, codec->page,
                                            codec->payload, codec->payload_capacity,
                                            codec->workspace),
                     KVF_OK);
    for (uint32_t layer = 0; layer < kv->geometry.n_layers; layer++) {
        assert_int_equal(kvf_block_encode_end(&encoder, &payload_bytes), KVF_ERR_INVALID);
        one_load(&one, kv, layer);
        assert_int_equal(kvf_block_encode_layer(&encoder, &one.view,
                                                decoded != NULL ? decoded + layer * n : NULL),
                         KVF_OK);
    }
    assert_int_equal(kvf_block_encode_layer(&encoder, &one.view, NULL), KVF_ERR_INVALID);
    assert_int_equal(kvf_block_encode_end(&encoder, &payload_bytes), KVF_OK);
    codec->record_bytes = KVF_BLOCK_PAGE_BYTES + payload_bytes;
    free(one.memory);
}

static void assert_handed_back(const struct fixture_kv *back, const float *decoded)
{
    const struct kvf_geometry *geometry = &back->geometry;
    const float *at = decoded;
    for (uint32_t layer = 0; layer < geometry->n_layers; layer++) {
        for (uint32_t token = 0; token < back->n_tokens; token++) {
            for (uint32_t head = 0; head < geometry->n_heads; head++) {
                for (uint32_t i = 0; i < geometry->dim_k; i++, at++) {
                    float want = fixture_load(geometry->dtype,
                                              fixture_kv_vector(back, 0, layer, head, token), i);
                    /* a NaN is one, whatever its other bits */
                    assert_true(isnan(want) ? isnan(*at) : memcmp(at, &want, sizeof(want)) == 0);
                }
            }
        }
    }
}

static void layers_make_the_same_record(void **state)
{
    (void)state;
    static const struct {
        const char *profile;
        int dtype;
        uint32_t dim;
        uint32_t n_tokens;
    } cases[] = {
        {"raw", KVF_DTYPE_BF16, 320, 21},      {"exact", KVF_DTYPE_BF16, 64, 40},
        {"exact", KVF_DTYPE_F16, 64, 40},      {"balanced", KVF_DTYPE_BF16, 128, 140},
        {"balanced", KVF_DTYPE_F16, 384, 33},  {"saw3", KVF_DTYPE_F8E4M3, 64, 33},
        {"tq3.5", KVF_DTYPE_BF16, 64, 130},    {"tq4", KVF_DTYPE_F32, 128, 50},
        {"kivi4-g32", KVF_DTYPE_BF16, 64, 70}, {"kivi2-g64", KVF_DTYPE_F16, 96, 130},
        {"max-edges", KVF_DTYPE_BF16, 64, 20}, {"x4", KVF_DTYPE_BF16, 128, 33},
        {"xcl3", KVF_DTYPE_BF16, 128, 65},     {"xcl3", KVF_DTYPE_BF16, 128, 40},
        {"xcl2-g2", KVF_DTYPE_F16, 96, 40},    {"xcl2-g2", KVF_DTYPE_F32, 96, 20},
        {"xcl2-lo", KVF_DTYPE_F32, 64, 17},    {"xgcl3", KVF_DTYPE_F32, 128, 33},
    };
    enum {
        LAYERS = 6
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct kvf_geometry geometry = fixture_geometry(cases[i].dtype, LAYERS, 2, cases[i].dim,
                                                        cases[i].dim, cases[i].n_tokens);
        struct fixture_trip trip;
        struct fixture_codec codec;
        fixture_geometry_suit(&geometry, cases[i].profile);
        geometry.sink_tokens = 2;
        fixture_trip_init(&trip, &geometry, cases[i].profile, cases[i].n_tokens);
        fixture_codec_init(&codec, &geometry, cases[i].profile);
        size_t n = (size_t)cases[i].n_tokens * geometry.n_heads * geometry.dim_k * LAYERS;
        float *decoded = malloc(n * sizeof(float));
        assert_non_null(decoded);
        if (i % 2 != 0) {
            fixture_fill_hard(&trip.kv, &random_bits);
        } else {
            fixture_fill_normal(&trip.kv, &random_bits);
        }
        fixture_trip_run(&trip);
        encode_by_layers(&codec, &trip.kv, NULL);
        assert_int_equal(codec.record_bytes, trip.codec.record_bytes);
        assert_memory_equal(codec.page, trip.codec.page, codec.record_bytes);
        encode_by_layers(&codec, &trip.kv, decoded);
        assert_int_equal(codec.record_bytes, trip.codec.record_bytes);
        assert_memory_equal(codec.page, trip.codec.page, codec.record_bytes);
        assert_handed_back(&trip.back, decoded);
        free(decoded);
        fixture_codec_fini(&codec);
        fixture_trip_fini(&trip);
    }
}

/* A payload that is too small for a layer, or for the raw area, ends in a status and no write
 * behind it. */
static void payloads_that_are_too_small(void **state)
{
    (void)state;
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 5, 2, 64, 0, 40);
    struct fixture_kv kv;
    struct fixture_codec codec;
    struct kvf_block_encoder encoder;
    struct one one;
    fixture_geometry_suit(&geometry, "xcl3");
    geometry.sink_tokens = 4;
    fixture_kv_init(&kv, &geometry, 40);
    fixture_fill_normal(&kv, &random_bits);
    fixture_codec_init(&codec, &geometry, "xcl3");
    one_init(&one, &kv);
    size_t least = kvf_codec_plan_payload_bytes(&codec.plan, 40);
    size_t payload_bytes;
    assert_int_equal(kvf_block_encode_begin(&encoder, &codec.plan, 0, 40, codec.page, codec.payload,
                                            least - 1, codec.workspace),
                     KVF_ERR_TOO_LARGE);
    for (int is_raw = 0; is_raw < 2; is_raw++) {
        int want = KVF_OK;
        memset(codec.payload, 0xa5, codec.payload_capacity);
        assert_int_equal(kvf_block_encode_begin(&encoder, &codec.plan, 0, 40, codec.page,
                                                codec.payload, least, codec.workspace),
                         KVF_OK);
        for (uint32_t layer = 0; layer < geometry.n_layers; layer++) {
            one_load(&one, &kv, layer);
            if (is_raw && layer == 3) {
                /* nothing but escapes: raw strips are larger than what is left */
                memset(one.memory, 0xff, kv.k_bytes);
                want = KVF_ERR_TOO_LARGE;
            }
            assert_int_equal(kvf_block_encode_layer(&encoder, &one.view, NULL), want);
        }
        assert_int_equal(kvf_block_encode_end(&encoder, &payload_bytes), KVF_ERR_TOO_LARGE);
        for (size_t i = least; i < codec.payload_capacity; i++) {
            assert_int_equal(codec.payload[i], 0xa5);
        }
    }
    free(one.memory);
    fixture_codec_fini(&codec);
    fixture_kv_fini(&kv);
}

/* A caller closes a loop by what he is handed back, as is done with latents: layer i is stored as
 * what is left of x_i by all before it. Who adds up what he reads is as far from x_i as the last
 * layer's codec has left it. */
static void a_caller_closes_a_loop(void **state)
{
    (void)state;
    enum {
        LAYERS = 10,
        TOKENS = 32,
        WIDTH = 128,
        N = TOKENS * WIDTH
    };
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_F32, LAYERS, 1, WIDTH, 0, TOKENS);
    static float x[LAYERS][N];
    static float sum[N];
    static float left[N];
    static float decoded[LAYERS][N];
    double power[LAYERS] = {0.0}; /* of what is handed to the codec */
    struct fixture_codec codec;
    struct fixture_kv back;
    struct kvf_block_encoder encoder;
    size_t payload_bytes;
    fixture_geometry_suit(&geometry, "xgcl3");
    assert_int_equal(geometry.kind, KVF_KIND_XG);
    fixture_codec_init(&codec, &geometry, "xgcl3");
    fixture_kv_init(&back, &geometry, TOKENS);
    memset(sum, 0, sizeof(sum));
    assert_int_equal(kvf_block_encode_begin(&encoder, &codec.plan, 0, TOKENS, codec.page,
                                            codec.payload, codec.payload_capacity, codec.workspace),
                     KVF_OK);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        void *layers[1] = {left};
        struct kvf_kv_view view = back.view;
        view.k.layers = layers;
        for (uint32_t i = 0; i < N; i++) {
            float more = fixture_normal_like(&random_bits);
            x[layer][i] = layer == 0 ? more : x[layer - 1][i] + 0.3f * more;
            left[i] = layer > 2 ? x[layer][i] - sum[i] : x[layer][i];
            power[layer] += (double)left[i] * (double)left[i];
        }
        assert_int_equal(kvf_block_encode_layer(&encoder, &view, decoded[layer]), KVF_OK);
        for (uint32_t i = 0; i < N; i++) {
            sum[i] = layer > 2 ? sum[i] + decoded[layer][i] : decoded[layer][i];
        }
    }
    assert_int_equal(kvf_block_encode_end(&encoder, &payload_bytes), KVF_OK);
    codec.record_bytes = KVF_BLOCK_PAGE_BYTES + payload_bytes;
    assert_int_equal(codec.page->header.base_layer, 2);
    assert_int_equal(codec.page->header.block_flags, KVF_BLOCK_KINDS);
    fixture_decode(&codec, &back);
    memset(sum, 0, sizeof(sum));
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        double error = 0.0;
        const float *read = back.k_layers[layer];
        assert_memory_equal(read, decoded[layer], sizeof(decoded[layer]));
        for (uint32_t i = 0; i < N; i++) {
            sum[i] = layer > 2 ? sum[i] + read[i] : read[i];
            error += (double)(sum[i] - x[layer][i]) * (double)(sum[i] - x[layer][i]);
        }
        /* 4 bits leave .0091 of it, 3 bits .035, with deviations of .0003 and .0012 */
        assert_true(error < (layer <= 2 ? 0.0110 : 0.042) * power[layer]);
    }
    fixture_kv_fini(&back);
    fixture_codec_fini(&codec);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layers_make_the_same_record),
        cmocka_unit_test(payloads_that_are_too_small),
        cmocka_unit_test(a_caller_closes_a_loop),
    };
    kvf_random_seeded_init(&random_bits, kvf_test_seed());
    int failures = 0;
    for (int level = 0; fixture_use_level(level); level++) {
        failures += cmocka_run_group_tests(tests, NULL, NULL);
    }
    return failures;
}
