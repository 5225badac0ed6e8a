/* SPDX-License-Identifier: Apache-2.0
 *
 * test_x.c: inputs of layers instead of K and V: what geometries and profiles go together, sizes,
 * and round trips.
 */
#include "codec/codec_fp.h"
#include "codec/codec_saw.h"
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

/* A geometry of vectors of width elements in bf16. */
static struct kvf_geometry x_geometry(int kind, uint32_t n_layers, uint32_t width,
                                      uint32_t chunk_tokens)
{
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, n_layers, 1, 1, 1,
                                                    chunk_tokens);
    assert_int_equal(kvf_x_geometry(kind, width, &geometry), KVF_OK);
    return geometry;
}

static void groups_divide_the_width(void **state)
{
    (void)state;
    static const uint32_t expected[][3] = {{4096, 32, 128}, {576, 6, 96},       {896, 7, 128},
                                           {2880, 30, 96},  {640, 5, 128},      {1600, 20, 80},
                                           {256, 2, 128},   {112, 1, 112},      {48, 1, 48},
                                           {8192, 64, 128}, {131072, 1024, 128}};
    for (size_t i = 0; i < sizeof(expected) / sizeof(expected[0]); i++) {
        struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 2, 9, 9, 9, 16);
        assert_int_equal(kvf_x_geometry(KVF_KIND_XG, expected[i][0], &geometry), KVF_OK);
        assert_int_equal(geometry.kind, KVF_KIND_XG);
        assert_int_equal(geometry.n_heads, expected[i][1]);
        assert_int_equal(geometry.dim_k, expected[i][2]);
        assert_int_equal(geometry.dim_v, 0);
        assert_int_equal(geometry.rope_state, KVF_ROPE_NONE);
    }
    /* no divisor, one that is too small to be worth a scale, too many groups, nothing */
    static const uint32_t refused[] = {577, 2 * 1009, 16, 128 * 1025, 0};
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 2, 9, 9, 9, 16);
    for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++) {
        assert_int_equal(kvf_x_geometry(KVF_KIND_X, refused[i], &geometry), KVF_ERR_UNSUPPORTED);
    }
    assert_int_equal(kvf_x_geometry(KVF_KIND_KV, 4096, &geometry), KVF_ERR_INVALID);
    assert_int_equal(kvf_x_geometry(KVF_KIND_X, 4096, NULL), KVF_ERR_INVALID);
}

/* Times that fp16 is larger, K and V of as many elements each as X has. */
static double ratio_to_kv(const char *profile, uint32_t n_layers)
{
    enum {
        WIDTH = 4096,
        TOKENS = 128
    };
    struct kvf_geometry geometry = x_geometry(KVF_KIND_X, n_layers, WIDTH, TOKENS);
    struct kvf_codec_plan plan;
    fixture_geometry_suit(&geometry, profile);
    assert_int_equal(kvf_codec_plan_init(&plan, &geometry, profile), KVF_OK);
    return 2.0 * 2.0 * n_layers * WIDTH * TOKENS /
           (double)kvf_codec_plan_payload_bytes(&plan, TOKENS);
}

/* A value takes its code, a 128th of a scale and of a zero: 7.70, 10.16 and 14.95 times less than K
 * and V in fp16 of a model with as many K as Q heads. */
static void sizes_are_those_of_the_article(void **state)
{
    (void)state;
    static const struct {
        const char *profile;
        double bits;
        double ratio;
    } expected[] = {
        {"x4", 4.0 + 16.0 / 128 + 4.0 / 128, 7.70},  {"x3", 3.0 + 16.0 / 128 + 3.0 / 128, 10.16},
        {"x2", 2.0 + 16.0 / 128 + 2.0 / 128, 14.95}, {"x4-paper", 4.0 + 32.0 / 128, 7.53},
        {"x2-lo", 2.0 + 32.0 / 128, 14.22},          {"x8", 8.0 + 16.0 / 128 + 8.0 / 128, 3.91},
        {"x6", 6.0 + 16.0 / 128 + 6.0 / 128, 5.18},
    };
    for (size_t i = 0; i < sizeof(expected) / sizeof(expected[0]); i++) {
        double ratio = ratio_to_kv(expected[i].profile, 8);
        assert_true(ratio == 32.0 / expected[i].bits);
        assert_true(fabs(ratio - expected[i].ratio) < 0.005);
    }
    /* the latent of [W_K|W_V] is as large as K and V: 3.7, 5.0 and 7.1 times less */
    assert_true(ratio_to_kv("x4", 8) / 2 > 3.7);
    assert_true(ratio_to_kv("x3", 8) / 2 > 5.0);
    assert_true(ratio_to_kv("x2", 8) / 2 > 7.1);
}

/* Lossy profiles are for K and V or for X; lossless ones for all. */
static void profiles_are_refused_elsewhere(void **state)
{
    (void)state;
    static const uint8_t kinds[] = {KVF_KIND_KV, KVF_KIND_MLA, KVF_KIND_STATE, KVF_KIND_X,
                                    KVF_KIND_XG};
    uint32_t refused = 0;
    for (const struct kvf_profile *profile = kvf_profiles; profile->name != NULL; profile++) {
        for (size_t i = 0; i < sizeof(kinds) && !profile->opaque; i++) {
            struct kvf_geometry geometry = x_geometry(KVF_KIND_X, 4, 256, 32);
            struct kvf_codec_plan plan;
            geometry.kind = kinds[i];
            bool takes = kvf_profile_takes(profile, kinds[i]);
            assert_int_equal(kvf_codec_plan_init(&plan, &geometry, profile->name),
                             takes ? KVF_OK : KVF_ERR_REFUSED);
            assert_true(takes || !profile->lossless);
            bool is_x = kinds[i] == KVF_KIND_X || kinds[i] == KVF_KIND_XG;
            bool for_x = profile->x_kinds != 0;
            assert_true(profile->lossless || !takes || is_x == for_x);
            refused += !takes;
        }
    }
    assert_true(refused > 100);
    struct kvf_geometry geometry = x_geometry(KVF_KIND_X, 4, 256, 32);
    struct kvf_codec_plan plan;
    geometry.dim_v = 128;
    assert_int_equal(kvf_codec_plan_init(&plan, &geometry, "x4"), KVF_ERR_INVALID);
    geometry.dim_v = 0;
    geometry.rope_state = KVF_ROPE_POST;
    assert_int_equal(kvf_codec_plan_init(&plan, &geometry, "exact"), KVF_ERR_INVALID);
    geometry.rope_state = KVF_ROPE_NONE;
    geometry.dtype = KVF_DTYPE_U8;
    assert_int_equal(kvf_codec_plan_init(&plan, &geometry, "x8"), KVF_ERR_REFUSED);
}

static void lossless_keeps_every_bit(void **state)
{
    (void)state;
    static const char *const profiles[] = {"raw", "exact"};
    for (int i = 0; i < 2; i++) {
        struct kvf_geometry geometry = x_geometry(KVF_KIND_XG - i, 3, 576, 40);
        struct fixture_trip trip;
        fixture_trip_init(&trip, &geometry, profiles[i], 40);
        fixture_fill_hard(&trip.kv, &random_bits);
        fixture_trip_run(&trip);
        assert_memory_equal(trip.back.memory, trip.kv.memory, trip.kv.memory_bytes);
        fixture_trip_fini(&trip);
    }
}

/* Error over signal of normal data: that of codec_saw.h's ratios; unrotated and unclipped it is
 * that of the whole range. */
static void distortion_is_that_of_theory(void **state)
{
    (void)state;
    static const struct {
        const char *profile;
        double most;
    } expected[] = {{"x8", .00004},      {"x6", .0006},     {"x4", .0095},
                    {"x3", .0364},       {"x2", .1245},     {"x2-lo", .1235},
                    {"x4-paper", .0104}, {"x3-paper", .05}, {"x2-paper", .27}};
    for (size_t i = 0; i < sizeof(expected) / sizeof(expected[0]); i++) {
        struct kvf_geometry geometry = x_geometry(KVF_KIND_X, 1, 256, 256);
        struct fixture_trip trip;
        fixture_trip_init(&trip, &geometry, expected[i].profile, 256);
        fixture_fill_normal(&trip.kv, &random_bits);
        fixture_trip_run(&trip);
        double error = fixture_distortion(&trip.kv, &trip.back, 0, 0);
        print_message("%s: distortion %.5f\n", expected[i].profile, error);
        assert_true(error < expected[i].most && error > 0.5 * expected[i].most);
        fixture_trip_fini(&trip);
    }
}

/* The token range [first, first + n) alone is what the whole decode has there. */
static void assert_part(struct fixture_trip *trip, uint32_t layer_first, uint32_t n_layers,
                        uint32_t first, uint32_t n)
{
    struct fixture_kv part;
    size_t vector_bytes = trip->kv.geometry.dim_k * kvf_dtype_bytes(trip->kv.geometry.dtype);
    fixture_kv_init(&part, &trip->kv.geometry, trip->kv.n_tokens);
    memset(part.memory, 0xa5, part.memory_bytes);
    assert_int_equal(kvf_block_decode(&trip->codec.plan, trip->codec.page, trip->codec.record_bytes,
                                      layer_first, n_layers, first, n, &part.view,
                                      trip->codec.workspace),
                     KVF_OK);
    for (uint32_t layer = 0; layer < trip->kv.geometry.n_layers; layer++) {
        bool wanted = layer >= layer_first && layer - layer_first < n_layers;
        for (uint32_t token = 0; token < trip->kv.n_tokens; token++) {
            for (uint32_t head = 0; head < trip->kv.geometry.n_heads; head++) {
                const uint8_t *have = fixture_kv_vector(&part, 0, layer, head, token);
                if (wanted && token < n) {
                    assert_memory_equal(
                        have, fixture_kv_vector(&trip->back, 0, layer, head, first + token),
                        vector_bytes);
                } else {
                    assert_int_equal(have[0], 0xa5);
                    assert_int_equal(have[vector_bytes - 1], 0xa5);
                }
            }
        }
    }
    fixture_kv_fini(&part);
}

/* Sinks, NaNs and vectors that are too small come back bit by bit; any part of a record is what the
 * whole has there. */
static void escapes_and_parts(void **state)
{
    (void)state;
    static const char *const profiles[] = {"x4", "x3", "x2-paper"};
    enum {
        TOKENS = 75,
        LAYERS = 5
    };
    for (size_t p = 0; p < sizeof(profiles) / sizeof(profiles[0]); p++) {
        struct kvf_geometry geometry = x_geometry(KVF_KIND_X, LAYERS, 384, TOKENS);
        struct fixture_trip trip;
        geometry.sink_tokens = 2;
        fixture_trip_init(&trip, &geometry, profiles[p], TOKENS);
        fixture_fill_normal(&trip.kv, &random_bits);
        uint8_t *bad = fixture_kv_vector(&trip.kv, 0, 1, 2, 33);
        uint8_t *small = fixture_kv_vector(&trip.kv, 0, 2, 0, 74);
        memset(bad + 6, 0xff, 2);
        for (uint32_t i = 0; i < 128; i++) {
            fixture_store(KVF_DTYPE_BF16, small, i, i % 2 ? 1e-7f : -1e-7f);
        }
        fixture_trip_run(&trip);
        assert_int_equal(trip.codec.page->header.n_escapes, LAYERS * 3 * 2 + 2);
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            assert_memory_equal(trip.back.k_layers[layer], trip.kv.k_layers[layer], 2 * 768);
        }
        assert_memory_equal(fixture_kv_vector(&trip.back, 0, 1, 2, 33), bad, 256);
        assert_memory_equal(fixture_kv_vector(&trip.back, 0, 2, 0, 74), small, 256);
        assert_part(&trip, 0, LAYERS, 0, 1);
        assert_part(&trip, 0, 3, 33, 42);
        assert_part(&trip, 1, 3, 1, 40);
        assert_part(&trip, LAYERS - 1, 1, 74, 1);
        fixture_trip_fini(&trip);
    }
}

/* Zeros come back as +0. So does a vector on one side of 0 within its step, and nothing of it lies
 * beyond the codes. */
static void zeros_and_one_sided_vectors(void **state)
{
    (void)state;
    static const char *const profiles[] = {"x4-paper", "x3-paper", "x2-paper", "x8", "x4", "x2"};
    for (size_t p = 0; p < sizeof(profiles) / sizeof(profiles[0]); p++) {
        struct kvf_geometry geometry = x_geometry(KVF_KIND_X, 1, 128, 32);
        struct fixture_trip trip;
        fixture_trip_init(&trip, &geometry, profiles[p], 32);
        memset(trip.back.memory, 0xff, trip.back.memory_bytes);
        fixture_trip_run(&trip);
        assert_memory_equal(trip.back.memory, trip.kv.memory, trip.kv.memory_bytes);
        for (uint32_t token = 0; token < 32; token++) {
            float sign = token % 2 ? 1.0f : -1.0f;
            for (uint32_t i = 0; i < 128; i++) {
                fixture_store(KVF_DTYPE_BF16, fixture_kv_vector(&trip.kv, 0, 0, 0, token), i,
                              sign * (1.0f + (float)(i % 16) / 16.0f));
            }
        }
        fixture_trip_run(&trip);
        if (trip.codec.plan.kinds[0].k.rot_order == 1) {
            /* at most a step, of which 2^b - 1 are the range of 1.94, and what bf16 rounds */
            float step = 1.9375f / (float)((1 << trip.codec.plan.kinds[0].k.descriptor.bits) - 1);
            for (uint32_t i = 0; i < 32 * 128; i++) {
                float x = fixture_load(KVF_DTYPE_BF16, trip.kv.k_layers[0], i);
                float back = fixture_load(KVF_DTYPE_BF16, trip.back.k_layers[0], i);
                assert_true(fabsf(x - back) <= step * 1.01f + 0x1p-7f);
            }
        }
        fixture_trip_fini(&trip);
    }
}

/* Differences of 3 and 2 bits, 3 layers of 32 at 4 bits and those of a re-base. */
static void sizes_with_differences(void **state)
{
    (void)state;
    const double four = 4.0 + 20.0 / 128;
    const double three = 3.0 + 19.0 / 128;
    const double two = 2.0 + 18.0 / 128;
    static const struct {
        const char *profile;
        uint32_t by_itself; /* layers of 32 */
    } expected[] = {{"xcl3", 3}, {"xcl3-g8", 6}, {"xcl3-g4", 10}, {"xcl3-g2", 17}};
    for (size_t i = 0; i < sizeof(expected) / sizeof(expected[0]); i++) {
        double n = expected[i].by_itself;
        double bits = (n * four + (32 - n) * three) / 32;
        assert_true(fabs(ratio_to_kv(expected[i].profile, 32) - 32.0 / bits) < 1e-9);
    }
    assert_true(fabs(ratio_to_kv("xcl2", 32) - 32.0 / ((3 * four + 29 * two) / 32)) < 1e-9);
    assert_true(ratio_to_kv("xcl4", 32) == 32.0 / four);
    assert_true(ratio_to_kv("xcl3", 32) >= 9.6);
    assert_true(ratio_to_kv("xcl2", 32) >= 13.1);
    assert_true(ratio_to_kv("xcl2-lo", 32) >= 13.1);
    assert_true(ratio_to_kv("xgcl3", 32) / 2 > 4.8);
    assert_true(ratio_to_kv("xgcl2", 32) / 2 > 6.5);
}

/* X as models have it: a layer's input is the one before and a little more, with some large
 * channels. */
static void fill_residual(struct fixture_kv *kv)
{
    const struct kvf_geometry *geometry = &kv->geometry;
    for (uint32_t layer = 0; layer < geometry->n_layers; layer++) {
        for (uint32_t token = 0; token < kv->n_tokens; token++) {
            for (uint32_t head = 0; head < geometry->n_heads; head++) {
                for (uint32_t i = 0; i < geometry->dim_k; i++) {
                    float size = i % 61 == 7 ? 20.0f : 1.0f;
                    float value = size * fixture_normal_like(&random_bits);
                    if (layer != 0) {
                        value = 0.3f * value +
                                fixture_load(geometry->dtype,
                                             fixture_kv_vector(kv, 0, layer - 1, head, token), i);
                    }
                    fixture_store(geometry->dtype, fixture_kv_vector(kv, 0, layer, head, token), i,
                                  value);
                }
            }
        }
    }
}

/* One layer's strip, by itself by the plain profile, from fp32 or from the pages' type. */
static void encode_alone(const char *profile, const struct kvf_geometry *geometry, int dtype,
                         uint32_t n_tokens, const float *values, struct fixture_codec *codec,
                         float *decoded_out)
{
    struct kvf_geometry alone = *geometry;
    struct fixture_kv kv;
    struct fixture_kv back;
    alone.n_layers = 1;
    alone.dtype = (uint8_t)dtype;
    fixture_kv_init(&kv, &alone, n_tokens);
    uint32_t n = (uint32_t)geometry->n_heads * geometry->dim_k * n_tokens;
    for (uint32_t i = 0; i < n; i++) {
        fixture_store(dtype, kv.k_layers[0], i, values[i]);
    }
    fixture_codec_init(codec, &alone, profile);
    fixture_encode(codec, &kv, 0);
    /* to fp32, whatever it was made from */
    alone.dtype = KVF_DTYPE_F32;
    fixture_kv_init(&back, &alone, n_tokens);
    struct kvf_codec_plan wide;
    assert_int_equal(kvf_codec_plan_init(&wide, &alone, profile), KVF_OK);
    codec->page->header.src_dtype = codec->page->header.dst_dtype = KVF_DTYPE_F32;
    codec->page->header.raw_bytes = (uint64_t)n * sizeof(float);
    kvf_block_seal_header(codec->page);
    assert_int_equal(kvf_block_decode(&wide, codec->page, codec->record_bytes, 0, 0, 0, 0,
                                      &back.view, codec->workspace),
                     KVF_OK);
    memcpy(decoded_out, back.memory, (size_t)n * sizeof(float));
    fixture_kv_fini(&back);
    fixture_kv_fini(&kv);
}

/* The text of closed_loop.h with plain codecs: each strip has the bytes of the difference coded
 * alone, each layer decodes to the state, and is as far from its input as the codec of its own
 * difference leaves it: errors do not add up. */
static void check_loop(const char *profile, const char *own, const char *delta, uint32_t rebase,
                       int dtype)
{
    enum {
        LAYERS = 8,
        TOKENS = 36,
        WIDTH = 96,
        N = TOKENS * WIDTH
    };
    struct kvf_geometry geometry = x_geometry(KVF_KIND_X, LAYERS, WIDTH, TOKENS);
    struct fixture_trip trip;
    geometry.dtype = (uint8_t)dtype;
    fixture_trip_init(&trip, &geometry, profile, TOKENS);
    fill_residual(&trip.kv);
    fixture_trip_run(&trip);
    float *state = calloc(N, sizeof(float));
    float *input = malloc(N * sizeof(float));
    float *decoded = malloc(N * sizeof(float));
    assert_true(state != NULL && input != NULL && decoded != NULL);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        bool is_delta = layer > 2 && (rebase == 0 || (layer - 2) % rebase != 0);
        struct fixture_codec alone;
        for (uint32_t i = 0; i < N; i++) {
            input[i] = fixture_load(dtype, trip.kv.k_layers[layer], i);
            input[i] = is_delta ? input[i] - state[i] : input[i];
        }
        encode_alone(is_delta ? delta : own, &geometry, is_delta ? KVF_DTYPE_F32 : dtype, TOKENS,
                     input, &alone, decoded);
        assert_memory_equal(trip.codec.payload + trip.codec.page->layer_offsets[layer] *
                                                     (size_t)KVF_BLOCK_ALIGN_BYTES,
                            alone.payload, alone.record_bytes - KVF_BLOCK_PAGE_BYTES);
        for (uint32_t i = 0; i < N; i++) {
            float x = fixture_load(dtype, trip.kv.k_layers[layer], i);
            state[i] = is_delta ? state[i] + decoded[i] : decoded[i];
            uint8_t want[4];
            fixture_store(dtype, want, 0, state[i]);
            assert_memory_equal((uint8_t *)trip.back.k_layers[layer] + i * kvf_dtype_bytes(dtype),
                                want, kvf_dtype_bytes(dtype));
            /* two sums, each rounded once, and the two differences here */
            float size = fabsf(x) + fabsf(state[i]) + fabsf(input[i]) + fabsf(decoded[i]);
            float left = input[i] - decoded[i];
            assert_true(fabsf((x - state[i]) - left) <= 0x1p-23f * size);
        }
        fixture_codec_fini(&alone);
    }
    free(decoded);
    free(input);
    free(state);
    fixture_trip_fini(&trip);
}

static void errors_do_not_add_up(void **state)
{
    (void)state;
    check_loop("xcl3", "x4", "x3", 0, KVF_DTYPE_BF16);
    check_loop("xcl2", "x4", "x2", 0, KVF_DTYPE_F32);
    check_loop("xcl4", "x4", "x4", 0, KVF_DTYPE_F16);
    check_loop("xcl3-paper", "x4-paper", "x3-paper", 0, KVF_DTYPE_BF16);
    check_loop("xcl3-g2", "x4", "x3", 2, KVF_DTYPE_BF16);
    check_loop("xcl2-g4", "x4", "x2", 4, KVF_DTYPE_BF16);
}

/* Differences are small beside what they are differences of: at equal bits a layer loses much less
 * by them. */
static void differences_lose_less(void **state)
{
    (void)state;
    static const char *const profiles[] = {"x3", "xcl3-g2", "xcl3-g8", "xcl3"};
    double errors[4];
    for (int p = 0; p < 4; p++) {
        struct kvf_geometry geometry = x_geometry(KVF_KIND_X, 12, 256, 32);
        struct fixture_trip trip;
        fixture_trip_init(&trip, &geometry, profiles[p], 32);
        fill_residual(&trip.kv);
        fixture_trip_run(&trip);
        errors[p] = fixture_distortion(&trip.kv, &trip.back, 0, 0);
        fixture_trip_fini(&trip);
    }
    assert_true(errors[1] < 0.6 * errors[0]);
    assert_true(errors[3] < 0.3 * errors[0]);
    assert_true(errors[2] < 0.4 * errors[0]);
}

/* A vector that is an escape in one layer only leaves its neighbours and the layers after it as
 * good as they were; a layer of escapes is stored raw and carries on. */
static void escapes_between_differences(void **state)
{
    (void)state;
    enum {
        TOKENS = 70,
        LAYERS = 8,
        WIDTH = 256
    };
    struct kvf_geometry geometry = x_geometry(KVF_KIND_X, LAYERS, WIDTH, TOKENS);
    struct fixture_trip trip;
    geometry.sink_tokens = 3;
    fixture_trip_init(&trip, &geometry, "xcl3", TOKENS);
    fill_residual(&trip.kv);
    uint8_t *in_delta = fixture_kv_vector(&trip.kv, 0, 4, 1, 40);
    uint8_t *in_base = fixture_kv_vector(&trip.kv, 0, 2, 0, 50);
    memset(in_delta + 8, 0xff, 2);
    memset(in_base, 0xff, 2);
    for (uint32_t token = 10; token < 30; token++) {
        fixture_store(KVF_DTYPE_BF16, fixture_kv_vector(&trip.kv, 0, 5, 0, token), 9,
                      token % 2 ? INFINITY : 1e30f);
    }
    fixture_trip_run(&trip);
    assert_int_equal(trip.codec.page->layer_bits[2], 4);
    assert_int_equal(trip.codec.page->layer_bits[4], 3);
    assert_int_equal(trip.codec.page->layer_bits[5], KVF_BITS_RAW);
    assert_int_equal(trip.codec.page->layer_bits[6], 3);
    assert_int_equal(trip.codec.page->header.n_escapes, (LAYERS - 1) * 2 * 3 + 2);
    assert_memory_equal(fixture_kv_vector(&trip.back, 0, 4, 1, 40), in_delta, WIDTH);
    assert_memory_equal(fixture_kv_vector(&trip.back, 0, 2, 0, 50), in_base, WIDTH);
    assert_memory_equal(trip.back.k_layers[5], trip.kv.k_layers[5], TOKENS * WIDTH * 2);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        assert_memory_equal(trip.back.k_layers[layer], trip.kv.k_layers[layer], 3 * WIDTH * 2);
        double error = 0.0;
        double power = 0.0;
        for (uint32_t i = 3 * WIDTH; i < TOKENS * WIDTH; i++) {
            double x = fixture_load(KVF_DTYPE_BF16, trip.kv.k_layers[layer], i);
            double y = fixture_load(KVF_DTYPE_BF16, trip.back.k_layers[layer], i);
            bool counts = fabs(x) < 1e6;
            error += counts ? (x - y) * (x - y) : 0.0;
            power += counts ? x * x : 0.0;
        }
        assert_true(error < 0.02 * power);
    }
    assert_part(&trip, 6, 2, 9, 30);
    assert_part(&trip, 5, 1, 0, TOKENS);
    assert_part(&trip, 4, 1, 40, 1);
    fixture_trip_fini(&trip);
}

/* Another base or re-base, flags that only X has, and widths elsewhere are refused. */
static void lies_about_differences_are_refused(void **state)
{
    (void)state;
    static const struct {
        uint16_t base_layer;
        uint16_t rebase_layers;
        uint8_t block_flags;
        uint8_t kind;
        int status; /* of the check alone, then of the plan */
    } lies[] = {
        {1, 0, 3, KVF_KIND_X, KVF_ERR_MISMATCH},  {2, 2, 3, KVF_KIND_X, KVF_ERR_MISMATCH},
        {2, 0, 1, KVF_KIND_X, KVF_ERR_MISMATCH},  {2, 0, 3, KVF_KIND_XG, KVF_ERR_CORRUPT},
        {2, 0, 4, KVF_KIND_X, KVF_ERR_CORRUPT},   {2, 0, 7, KVF_KIND_X, KVF_ERR_CORRUPT},
        {2, 0, 3, KVF_KIND_KV, KVF_ERR_CORRUPT},  {2, 0, 1, KVF_KIND_KV, KVF_ERR_CORRUPT},
        {0, 4, 1, KVF_KIND_MLA, KVF_ERR_CORRUPT}, {2, 0, 1, KVF_KIND_XG, KVF_ERR_MISMATCH},
    };
    struct kvf_geometry geometry = x_geometry(KVF_KIND_X, 6, 256, 20);
    struct fixture_trip trip;
    fixture_trip_init(&trip, &geometry, "xcl3", 20);
    fill_residual(&trip.kv);
    fixture_trip_run(&trip);
    struct kvf_record_page good = *trip.codec.page;
    assert_int_equal(good.header.base_layer, 2);
    assert_int_equal(good.header.rebase_layers, 0);
    assert_int_equal(good.header.block_flags, KVF_BLOCK_KINDS | KVF_BLOCK_DELTAS);
    for (size_t i = 0; i < sizeof(lies) / sizeof(lies[0]); i++) {
        struct kvf_record_page *page = trip.codec.page;
        *page = good;
        page->header.base_layer = lies[i].base_layer;
        page->header.rebase_layers = lies[i].rebase_layers;
        page->header.block_flags = lies[i].block_flags;
        page->header.tensor_kind = lies[i].kind;
        kvf_block_seal_header(page);
        assert_int_equal(kvf_block_decode(&trip.codec.plan, page, trip.codec.record_bytes, 0, 0, 0,
                                          0, &trip.back.view, trip.codec.workspace),
                         lies[i].status);
    }
    *trip.codec.page = good;
    trip.codec.page->layer_bits[4] = 4; /* as layers by themselves have it */
    kvf_block_seal_header(trip.codec.page);
    assert_int_equal(kvf_block_decode(&trip.codec.plan, trip.codec.page, trip.codec.record_bytes, 0,
                                      0, 0, 0, &trip.back.view, trip.codec.workspace),
                     KVF_ERR_CORRUPT);
    fixture_trip_fini(&trip);
}

/* Any layers and tokens of a block with differences are what the whole has there. */
static void parts_of_differences(void **state)
{
    (void)state;
    static const char *const profiles[] = {"xcl3-paper", "xcl2-g2", "xcl3-g4"};
    enum {
        LAYERS = 11,
        TOKENS = 29
    };
    for (size_t p = 0; p < sizeof(profiles) / sizeof(profiles[0]); p++) {
        struct kvf_geometry geometry = x_geometry(KVF_KIND_X, LAYERS, 192, TOKENS);
        struct fixture_trip trip;
        geometry.sink_tokens = 1;
        fixture_trip_init(&trip, &geometry, profiles[p], TOKENS);
        fill_residual(&trip.kv);
        fixture_trip_run(&trip);
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            assert_part(&trip, layer, 1 + layer % 3 < LAYERS - layer ? 1 + layer % 3 : 1, layer,
                        TOKENS - 2 * layer);
        }
        fixture_kv_fini(&trip.back);
        fixture_kv_init(&trip.back, &geometry, TOKENS);
        assert_int_equal(kvf_block_decode(&trip.codec.plan, trip.codec.page,
                                          trip.codec.record_bytes, LAYERS, 0, 0, 0, &trip.back.view,
                                          trip.codec.workspace),
                         KVF_ERR_INVALID);
        assert_int_equal(kvf_block_decode(&trip.codec.plan, trip.codec.page,
                                          trip.codec.record_bytes, 5, UINT32_MAX, 0, 0,
                                          &trip.back.view, trip.codec.workspace),
                         KVF_ERR_INVALID);
        fixture_trip_fini(&trip);
    }
}

/* -------------------------------------------------------------------------------------------------
 * Costs
 */

/* A sum or product that the compiler does not take together with others. */
static float alone(float value)
{
    volatile float kept = value;
    return kept;
}

static float to_integer(float value)
{
    const float magic = 12582912.0f; /* 1.5 2^23 */
    return alone(alone(value + magic) - magic);
}

/* (S) of codec_saw.h, and as the kernels find it (lane_cost of codec_saw_encode_zeros.cuh). */
static float cost_of(float i, float a, float step, float w, float levels)
{
    float q = to_integer(fmaf(i, a, w));
    q = q < 0.0f ? 0.0f : q > levels ? levels : q;
    float error = fmaf(-alone(q - w), step, i);
    return alone(fmaf(error, error, 12582912.0f)) - 12582912.0f;
}

static float short_cost_of(float i, float a, float step, float w, float levels)
{
    float share = fmaf(i, a / levels, alone(w * (1.0f / levels)));
    share = share < 0.0f ? 0.0f : share > 1.0f ? 1.0f : share;
    float q = alone(alone(fmaf(share, levels, 12582912.0f)) - 12582912.0f);
    float error = fmaf(-alone(q - w), step, i);
    return alone(fmaf(error, error, 12582912.0f)) - 12582912.0f;
}

/* Kernels clamp q before it is rounded, and round it another time: no cost of a ratio of the
 * built-in profiles is another one for it, of no i and no w that there are. */
static void short_costs_are_the_costs(void **state)
{
    (void)state;
    static const uint16_t lists[][9] = {KVF_SAW_WIDE_4, KVF_SAW_WIDE_2};
    for (uint32_t n = 0; n < 2 * 9 * 3 * 2; n++) {
        const uint16_t *list = lists[n % 2];
        float ratio = (float)list[n / 2 % 9] / KVF_BLOCK_CLIP_ONE;
        float first = (float)list[0] / KVF_BLOCK_CLIP_ONE;
        int levels = (1 << (2 + n / 18 % 3)) - 1;
        int most = 16 * levels * KVF_BLOCK_CLIP_ONE / list[0] + 16;
        float a = first / (16.0f * ratio);
        float step = 16.0f * ratio / first;
        for (int zero = 0; zero <= levels; zero++) {
            float w = (float)zero + (n / 54 != 0 ? 0.5f : 0.0f);
            for (int i = -most; i <= most; i++) {
                float cost = cost_of((float)i, a, step, w, (float)levels);
                assert_true(cost == short_cost_of((float)i, a, step, w, (float)levels));
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(groups_divide_the_width),
        cmocka_unit_test(sizes_are_those_of_the_article),
        cmocka_unit_test(profiles_are_refused_elsewhere),
        cmocka_unit_test(lossless_keeps_every_bit),
        cmocka_unit_test(distortion_is_that_of_theory),
        cmocka_unit_test(escapes_and_parts),
        cmocka_unit_test(zeros_and_one_sided_vectors),
        cmocka_unit_test(sizes_with_differences),
        cmocka_unit_test(errors_do_not_add_up),
        cmocka_unit_test(differences_lose_less),
        cmocka_unit_test(escapes_between_differences),
        cmocka_unit_test(lies_about_differences_are_refused),
        cmocka_unit_test(parts_of_differences),
        cmocka_unit_test(short_costs_are_the_costs),
    };
    kvf_random_seeded_init(&random_bits, kvf_test_seed());
    int failures = 0;
    for (int level = 0; fixture_use_level(level); level++) {
        failures += cmocka_run_group_tests(tests, NULL, NULL);
    }
    return failures;
}
