/* SPDX-License-Identifier: Apache-2.0
 *
 * test_saw.c: the saw codec against its text (saw_model), and the error bounds that its text
 * implies.
 */
#include "codec/codec_fp.h"
#include "codec/codec_saw.h"
#include "codec/rotate.h"
#include "tests/support/support.h"
#include "tests/unit/codec/codec_fixture.h"
#include "tests/unit/codec/saw_model.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct kvf_random_seeded random_bits;

/* Where the parts of K of layer 0 are. */
struct strip {
    const uint8_t *mean;
    const uint8_t *meta;
    const uint8_t *codes;
    uint32_t n_tokens;
};

static struct strip strip_of_k(const struct fixture_codec *codec, uint32_t n_tokens)
{
    struct kvf_codec_sizes sizes;
    kvf_codec_saw.sizes(&codec->plan.kinds[0].k, n_tokens, &sizes);
    return (struct strip){
        .mean = sizes.mean_bytes != 0 ? codec->payload : NULL,
        .meta = codec->payload + sizes.mean_bytes,
        .codes = codec->payload + sizes.mean_bytes + sizes.meta_bytes,
        .n_tokens = n_tokens,
    };
}

static struct saw_model model_of(const struct kvf_codec_tensor *tensor)
{
    return (struct saw_model){
        .dtype = tensor->dtype,
        .n = tensor->group,
        .order = tensor->descriptor.rot_order,
        .bits = tensor->descriptor.bits,
        .clip_q15 = tensor->descriptor.clip_q15,
        .n_clips = tensor->n_clips,
        .clips_q15 = tensor->clips_q15,
        .sign_bits = tensor->sign_bits,
        .zero_kind = tensor->descriptor.zero_kind,
    };
}

/* Meta of one vector of a single row. */
static void assert_meta(const struct kvf_codec_tensor *tensor, const struct strip *strip,
                        uint32_t index, const struct saw_model_vector *want)
{
    if (kvf_saw_has_zeros(tensor)) {
        const uint8_t *zeros = strip->meta + 2 * strip->n_tokens;
        uint16_t scale;
        memcpy(&scale, strip->meta + 2 * index, sizeof(scale));
        assert_int_equal(scale, want->scale);
        assert_int_equal(
            fixture_stored_code(&zeros, strip->n_tokens, tensor->descriptor.bits, index),
            want->zero);
        return;
    }
    uint32_t meta;
    memcpy(&meta, strip->meta + 4 * index, sizeof(meta));
    assert_int_equal(meta & 0xffff, want->lo);
    assert_int_equal(meta >> 16, want->scale);
}

/* Meta and codes of one vector are the model's. */
static void assert_stored(const struct kvf_codec_tensor *tensor, const struct strip *strip,
                          uint32_t index, const struct saw_model_vector *want)
{
    assert_meta(tensor, strip, index, want);
    const uint8_t *codes = strip->codes + (size_t)index * tensor->code_bytes;
    for (uint32_t p = 0; p < tensor->group; p++) {
        const uint8_t *at = codes;
        uint8_t code = fixture_stored_code(&at, tensor->group, tensor->descriptor.bits, p);
        assert_int_equal(code, want->codes[tensor->order[p]]);
    }
}

/* Hard values that have too many escapes, one after the other: it is rare that any do. */
#define RAW_MAX 3

/* One head, no V: every vector of a record against the model, both ways. */
static void compare_with_model(const char *profile, int dtype, uint32_t dim, uint32_t n_tokens)
{
    struct kvf_geometry geometry = fixture_geometry(dtype, 1, 1, dim, 0, n_tokens);
    struct fixture_trip trip;
    fixture_geometry_suit(&geometry, profile);
    fixture_trip_init(&trip, &geometry, profile, n_tokens);
    fixture_fill_hard(&trip.kv, &random_bits);
    fixture_trip_run(&trip);
    for (uint32_t i = 0; trip.codec.page->layer_bits[0] == 0 && i < RAW_MAX; i++) {
        assert_memory_equal(trip.back.k_layers[0], trip.kv.k_layers[0], trip.kv.k_bytes);
        fixture_fill_hard(&trip.kv, &random_bits);
        fixture_trip_run(&trip);
    }
    assert_int_equal(trip.codec.page->layer_bits[0], trip.codec.plan.kinds[0].k.descriptor.bits);
    struct strip strip = strip_of_k(&trip.codec, n_tokens);
    struct saw_model model = model_of(&trip.codec.plan.kinds[0].k);
    float mean[MODEL_DIM_MAX];
    if (strip.mean != NULL) {
        fixture_load_means(strip.mean, dim, mean);
    }
    uint32_t escapes = 0;
    for (uint32_t token = 0; token < n_tokens; token++) {
        float input[MODEL_DIM_MAX];
        const uint8_t *vector = fixture_kv_vector(&trip.kv, 0, 0, 0, token);
        fixture_load_vector(dtype, vector, dim, input);
        struct saw_model_vector want;
        saw_model_encode(&model, input, strip.mean != NULL ? mean : NULL, &want);
        assert_stored(&trip.codec.plan.kinds[0].k, &strip, token, &want);
        const uint8_t *decoded = fixture_kv_vector(&trip.back, 0, 0, 0, token);
        escapes += want.escape;
        if (want.escape) {
            assert_memory_equal(decoded, vector, dim * kvf_dtype_bytes(dtype));
        } else {
            float value[MODEL_DIM_MAX];
            saw_model_decode(&model, &want, strip.mean != NULL ? mean : NULL, value);
            fixture_assert_vector(dtype, decoded, dim, value);
        }
    }
    assert_int_equal(trip.codec.page->header.n_escapes, escapes);
    fixture_trip_fini(&trip);
}

static void records_are_those_of_the_text(void **state)
{
    (void)state;
    static const char *const profiles[] = {
        "balanced",     "safe",       "saw8",        "saw4-paper",  "saw6",         "saw5",
        "saw3",         "saw2",       "saw3-search", "saw2-search", "saw4-search9", "saw3-search9",
        "saw2-search9", "saw3-paper", "naive4",      "naive3",      "naive2",       "x4",
        "x3",           "x2",         "x8",          "x4-paper",    "x2-paper"};
    enum {
        N_FULL = 8 /* the first ones with every dim, the others each with some */
    };
    static const uint32_t dims[] = {64, 72, 80, 96, 112, 128, 192, 256, 12, 7};
    for (size_t p = 0; p < sizeof(profiles) / sizeof(profiles[0]); p++) {
        for (size_t i = 0; i < sizeof(dims) / sizeof(dims[0]); i++) {
            /* every second combination is long enough to be centred */
            if (p < N_FULL || (i + p) % 3 == 0) {
                compare_with_model(profiles[p], KVF_DTYPE_BF16, dims[i],
                                   (i + p) % 2 != 0 ? 130 : 35);
            }
        }
        compare_with_model(profiles[p], KVF_DTYPE_BF16, 128, 130);
        for (int dtype = KVF_DTYPE_F16; dtype <= KVF_DTYPE_F8E5M2; dtype++) {
            if (p < N_FULL || ((uint32_t)dtype + p) % 3 == 0) {
                compare_with_model(profiles[p], dtype, 128, 128);
                compare_with_model(profiles[p], dtype, 96, 33);
            }
        }
    }
}

/* The mean of a channel over samples, as the format has it; the token `without` is left out. */
static uint16_t mean_of_samples(const struct fixture_kv *kv, uint32_t n_tokens, uint32_t n_sinks,
                                uint32_t without, uint32_t channel)
{
    float sum[8] = {0};
    uint32_t count = 0;
    uint32_t step = ((n_tokens + 7) / 8 + 7) / 8;
    for (uint32_t token = n_sinks; token < n_tokens; token++) {
        if (token / 8 % step == 0 && token != without) {
            sum[token / 8 / step] += fixture_load(KVF_DTYPE_F32,
                                                  fixture_kv_vector(kv, 0, 0, 0, token), channel);
            count++;
        }
    }
    for (int half = 4; half > 0; half /= 2) {
        for (int s = 0; s < half; s++) {
            sum[s] += sum[s + half];
        }
    }
    return kvf_f16_from_f32(sum[0] / (float)count);
}

/* The mean: of every fourth tile of 8 tokens here, a sum each, added as a tree, one division, to
 * fp16; without sinks and without vectors that have a NaN. */
static void means_are_those_of_the_text(void **state)
{
    (void)state;
    enum {
        TOKENS = 250,
        DIM = 96,
        SINKS = 4,
        NAN_AT = 71, /* in a tile that is a sample */
    };
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_F32, 1, 1, DIM, 0, TOKENS);
    geometry.sink_tokens = SINKS;
    struct fixture_kv kv;
    struct fixture_codec codec;
    fixture_kv_init(&kv, &geometry, TOKENS);
    fixture_codec_init(&codec, &geometry, "balanced");
    for (int round = 0; round < 5; round++) {
        fixture_fill_normal(&kv, &random_bits);
        for (uint32_t token = 0; token < TOKENS; token++) {
            for (uint32_t i = 0; i < DIM; i++) {
                uint8_t *vector = fixture_kv_vector(&kv, 0, 0, 0, token);
                float value = fixture_load(KVF_DTYPE_F32, vector, i);
                /* wide enough for the order of additions to show */
                value = i % 3 == 0 ? value * value * value * value * 1e3f + 100.0f : value;
                fixture_store(KVF_DTYPE_F32, vector, i, token == NAN_AT ? NAN : value);
            }
        }
        fixture_encode(&codec, &kv, 0);
        struct strip strip = strip_of_k(&codec, TOKENS);
        for (uint32_t i = 0; i < DIM; i++) {
            uint16_t want = mean_of_samples(&kv, TOKENS, SINKS, NAN_AT, i);
            uint16_t have;
            memcpy(&have, strip.mean + 2 * i, sizeof(have));
            assert_int_equal(have, want);
        }
    }
    fixture_codec_fini(&codec);
    fixture_kv_fini(&kv);
}

/* The stored order is that of tensor-core fragments, piece by piece, and names each coefficient
 * once. */
static void order_is_that_of_fragments(void **state)
{
    (void)state;
    static const uint32_t dims[] = {64, 128, 256};
    for (int i = 0; i < 3; i++) {
        struct kvf_codec_plan plan;
        struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 1, 1, dims[i], 192, 16);
        assert_int_equal(kvf_codec_plan_init(&plan, &geometry, "balanced"), KVF_OK);
        for (uint32_t e = 0; e < dims[i]; e++) {
            assert_int_equal(plan.kinds[0].k.order[saw_model_position(dims[i], e)], e);
        }
        for (uint32_t e = 0; e < 64; e++) { /* 192 = 128 + 64 */
            assert_int_equal(plan.kinds[0].v.order[128 + saw_model_position(64, e)], 128 + e);
        }
    }
    for (uint32_t dim = 1; dim <= 256; dim++) {
        struct kvf_codec_plan plan;
        struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 1, 1, dim, 0, 16);
        assert_int_equal(kvf_codec_plan_init(&plan, &geometry, "saw8"), KVF_OK);
        uint8_t seen[256] = {0};
        for (uint32_t p = 0; p < dim; p++) {
            assert_true(plan.kinds[0].k.order[p] < dim);
            assert_int_equal(seen[plan.kinds[0].k.order[p]]++, 0);
        }
    }
}

/* Swap any two butterfly stages, and nearly every one of these vectors comes out different, so the
 * golden bytes and the comparisons above would fail. Gaussian vectors could not tell; a small
 * signal beside a large mean can, because what additions round away is as large as the signal. */
static void swapped_stages_are_seen(void **state)
{
    (void)state;
    enum {
        DIM = 128,
        STAGES = 7,
        VECTORS = 40
    };
    static const uint8_t documented[8] = {0, 1, 3, 4, 2, 5, 6, 7};
    struct kvf_codec_plan plan;
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_F32, 1, 1, DIM, 0, 16);
    assert_int_equal(kvf_codec_plan_init(&plan, &geometry, "balanced"), KVF_OK);
    struct saw_model model = model_of(&plan.kinds[0].k);
    for (int a = 0; a < STAGES; a++) {
        for (int b = a + 1; b < STAGES; b++) {
            uint8_t stages[8];
            memcpy(stages, documented, sizeof(stages));
            stages[a] = documented[b];
            stages[b] = documented[a];
            int seen = 0;
            for (int v = 0; v < VECTORS; v++) {
                float mean[DIM];
                float input[DIM];
                for (uint32_t i = 0; i < DIM; i++) {
                    float wide = 30000.0f * fixture_normal_like(&random_bits) / 6.0f;
                    mean[i] = kvf_f32_from_f16(kvf_f16_from_f32(wide));
                    input[i] = mean[i] + 0.02f * fixture_normal_like(&random_bits);
                }
                struct saw_model_vector right;
                struct saw_model_vector wrong;
                model.stages = NULL;
                saw_model_encode(&model, input, mean, &right);
                model.stages = stages;
                saw_model_encode(&model, input, mean, &wrong);
                seen += memcmp(&right, &wrong, sizeof(right)) != 0;
            }
            assert_true(seen > VECTORS / 2);
        }
    }
}

/* Distortion on Gaussian data against theory (min/max of n normal values, 2^b levels, clipped as
 * codec_saw.h says): within 2 %. fp32, so that nothing else rounds. */
static void distortion_is_that_of_theory(void **state)
{
    (void)state;
    static const struct {
        const char *profile;
        uint32_t dim;
        double expected;
    } cases[] = {
        {"saw4-paper", 128, 0.00996}, {"saw4-paper", 64, 0.00804}, {"balanced", 128, 0.00914},
        {"balanced", 64, 0.00771},    {"saw6", 128, 0.000562},     {"saw6", 64, 0.000456},
        {"saw5", 128, 0.00233},       {"saw5", 64, 0.00189},       {"saw3", 128, 0.0346},
        {"saw3", 64, 0.0308},         {"saw2", 128, 0.1212},       {"saw2", 64, 0.1147},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_F32, 2, 8, 1, cases[i].dim, 256);
        struct fixture_trip trip;
        fixture_trip_init(&trip, &geometry, cases[i].profile, 256);
        fixture_fill_normal(&trip.kv, &random_bits);
        fixture_trip_run(&trip);
        double distortion = fixture_distortion(&trip.kv, &trip.back, 1, 0);
        assert_true(fabs(distortion / cases[i].expected - 1.0) < 0.02);
        fixture_trip_fini(&trip);
    }
}

/* No other ratio has a distortion that is much less than the one that codec_saw.h has for a width,
 * and below 5 bits the whole range has more. */
static void clip_ratios_are_near_the_best(void **state)
{
    (void)state;
    static const char *const profiles[] = {"saw8", "saw6", "saw5", "balanced", "saw3", "saw2"};
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_F32, 1, 4, 64, 128, 256);
    struct fixture_kv kv;
    struct fixture_kv back;
    fixture_kv_init(&kv, &geometry, 256);
    fixture_kv_init(&back, &geometry, 256);
    fixture_fill_normal(&kv, &random_bits);
    for (size_t p = 0; p < sizeof(profiles) / sizeof(profiles[0]); p++) {
        struct fixture_codec codec;
        fixture_codec_init(&codec, &geometry, profiles[p]);
        struct kvf_codec_tensor *tensors[2] = {&codec.plan.kinds[0].k, &codec.plan.kinds[0].v};
        double own[2];
        fixture_encode(&codec, &kv, 0);
        fixture_decode(&codec, &back);
        for (int is_v = 0; is_v < 2; is_v++) {
            own[is_v] = fixture_distortion(&kv, &back, is_v, 0);
        }
        bool clips = codec.plan.kinds[0].v.descriptor.clip_q15 != KVF_BLOCK_CLIP_ONE;
        for (uint32_t percent = 46; percent <= 100; percent += 6) {
            for (int is_v = 0; is_v < 2; is_v++) {
                tensors[is_v]->descriptor.clip_q15 = (uint16_t)(percent * 32768 / 100);
            }
            fixture_encode(&codec, &kv, 0);
            fixture_decode(&codec, &back);
            for (int is_v = 0; is_v < 2; is_v++) {
                double distortion = fixture_distortion(&kv, &back, is_v, 0);
                assert_true(own[is_v] < 1.03 * distortion);
                assert_true(!clips || percent != 100 || distortion > 1.04 * own[is_v]);
            }
        }
        fixture_codec_fini(&codec);
    }
    fixture_kv_fini(&back);
    fixture_kv_fini(&kv);
}

/* A search has less error than each of its ratios has by itself, and it has used several of them:
 * were it to take always the same one, it would be no better. */
static void search_is_closer_than_any_ratio(void **state)
{
    (void)state;
    static const char *const profiles[] = {"saw3-search", "saw2-search", "saw4-search9",
                                           "saw3-search9", "saw2-search9"};
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_F32, 1, 2, 64, 128, 256);
    struct fixture_kv kv;
    struct fixture_kv back;
    fixture_kv_init(&kv, &geometry, 256);
    fixture_kv_init(&back, &geometry, 256);
    fixture_fill_normal(&kv, &random_bits);
    for (size_t p = 0; p < sizeof(profiles) / sizeof(profiles[0]); p++) {
        struct fixture_codec codec;
        fixture_codec_init(&codec, &geometry, profiles[p]);
        struct kvf_codec_tensor *tensors[2] = {&codec.plan.kinds[0].k, &codec.plan.kinds[0].v};
        uint32_t n_clips = tensors[0]->n_clips;
        double own[2];
        assert_int_equal(n_clips, p < 2 ? 3 : 9);
        assert_int_equal(tensors[1]->descriptor.clip_q15, n_clips);
        fixture_encode(&codec, &kv, 0);
        fixture_decode(&codec, &back);
        for (int is_v = 0; is_v < 2; is_v++) {
            own[is_v] = fixture_distortion(&kv, &back, is_v, 0);
        }
        for (uint32_t i = 0; i < n_clips; i++) {
            for (int is_v = 0; is_v < 2; is_v++) {
                tensors[is_v]->n_clips = 0;
                tensors[is_v]->descriptor.clip_q15 = tensors[is_v]->clips_q15[i];
                assert_true(i == 0 ||
                            tensors[is_v]->clips_q15[i] < tensors[is_v]->clips_q15[i - 1]);
            }
            fixture_encode(&codec, &kv, 0);
            fixture_decode(&codec, &back);
            for (int is_v = 0; is_v < 2; is_v++) {
                assert_true(own[is_v] < 0.995 * fixture_distortion(&kv, &back, is_v, 0));
            }
        }
        fixture_codec_fini(&codec);
    }
    fixture_kv_fini(&back);
    fixture_kv_fini(&kv);
}

/* What the model makes of a vector with one channel stretched, by the ratio that it takes. */
static uint16_t scale_if_stretched(const struct saw_model *model, const float *vector, float by,
                                   float *stretched)
{
    struct saw_model_vector coded;
    memcpy(stretched, vector, model->n * sizeof(float));
    stretched[3] *= by;
    saw_model_encode(model, stretched, NULL, &coded);
    return coded.scale;
}

/* A vector stretched until it is about to take another ratio. True: two ratios cost alike. */
static bool near_tie(struct saw_model *model, float stretched[128])
{
    float vector[128];
    for (uint32_t i = 0; i < 128; i++) {
        vector[i] = fixture_normal_like(&random_bits);
    }
    float low = 1.0f;
    float high = 9.0f;
    uint16_t low_scale = scale_if_stretched(model, vector, low, stretched);
    for (int step = 0; step < 30; step++) {
        float middle = 0.5f * (low + high);
        /* scales of one ratio change slowly; those of two differ by a tenth */
        uint16_t scale = scale_if_stretched(model, vector, middle, stretched);
        float change = kvf_f32_from_f16(scale) / kvf_f32_from_f16(low_scale);
        bool same = change > 0.97f && change < 1.03f;
        low = same ? middle : low;
        low_scale = same ? scale : low_scale;
        high = same ? high : middle;
    }
    model->takes_last = true;
    uint16_t other = scale_if_stretched(model, vector, low, stretched);
    model->takes_last = false;
    return other != scale_if_stretched(model, vector, low, stretched);
}

/* Vectors for which two ratios cost nearly or just the same. Found by halving the distance of two
 * stretches with different answers. The encoder takes what the model takes; were the smaller one of
 * two that are alike taken, some would come out differently. */
static void near_ties_are_decided_by_the_text(void **state)
{
    (void)state;
    enum {
        DIM = 128,
        TOKENS = 200
    };
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_F32, 1, 1, DIM, 0, TOKENS);
    struct fixture_kv kv;
    struct fixture_codec codec;
    fixture_kv_init(&kv, &geometry, TOKENS);
    fixture_codec_init(&codec, &geometry, "saw3-search");
    codec.plan.kinds[0].k.descriptor.flags &= (uint8_t)~KVF_TENSOR_CENTER;
    struct saw_model model = model_of(&codec.plan.kinds[0].k);
    uint32_t seen = 0;
    for (uint32_t token = 0; token < TOKENS; token++) {
        float stretched[DIM];
        bool is_tie = near_tie(&model, stretched);
        /* one in a hundred or so has two that cost alike: the first one always has */
        for (uint32_t tries = 0; token == 0 && !is_tie && tries < 10000; tries++) {
            is_tie = near_tie(&model, stretched);
        }
        seen += is_tie;
        memcpy(fixture_kv_vector(&kv, 0, 0, 0, token), stretched, sizeof(stretched));
    }
    assert_true(seen > 0);
    fixture_encode(&codec, &kv, 0);
    struct strip strip = strip_of_k(&codec, TOKENS);
    for (uint32_t token = 0; token < TOKENS; token++) {
        float input[DIM];
        struct saw_model_vector want;
        memcpy(input, fixture_kv_vector(&kv, 0, 0, 0, token), sizeof(input));
        saw_model_encode(&model, input, NULL, &want);
        assert_stored(&codec.plan.kinds[0].k, &strip, token, &want);
    }
    print_message("%u of %d vectors have two ratios that cost alike\n", seen, TOKENS);
    fixture_codec_fini(&codec);
    fixture_kv_fini(&kv);
}

/* One large channel a vector: without the rotation the range would be its, and the others' error
 * 100 times larger. */
static void rotation_spreads_an_outlier(void **state)
{
    (void)state;
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_F32, 1, 4, 128, 0, 256);
    struct fixture_trip trip;
    fixture_trip_init(&trip, &geometry, "saw4-paper", 256);
    fixture_fill_normal(&trip.kv, &random_bits);
    for (uint32_t head = 0; head < 4; head++) {
        for (uint32_t token = 0; token < 256; token++) {
            fixture_store(KVF_DTYPE_F32, fixture_kv_vector(&trip.kv, 0, 0, head, token), 5, 100.0f);
        }
    }
    fixture_trip_run(&trip);
    /* y is 100 / sqrt(128) = 8.8 in magnitude and normal around it: range near 2 x (8.8 + 2.5),
     * step 1.5, error power 1.5^2 / 12 = .19 a value; unrotated it is (104 / 15)^2 / 12 = 4, or 1
     * and more where all values fall on one level */
    double error = fixture_distortion(&trip.kv, &trip.back, 0, 0) * (10000.0 + 127.0) / 128.0;
    assert_true(error < 0.25);
    fixture_trip_fini(&trip);
}

/* A bias that is the same for all tokens costs nothing once centred. */
static void centring_removes_a_bias(void **state)
{
    (void)state;
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_F32, 1, 2, 128, 128, 256);
    struct fixture_trip trip;
    fixture_trip_init(&trip, &geometry, "balanced", 256);
    fixture_fill_normal(&trip.kv, &random_bits);
    for (int is_v = 0; is_v < 2; is_v++) {
        for (uint32_t head = 0; head < 2; head++) {
            for (uint32_t token = 0; token < 256; token++) {
                uint8_t *vector = fixture_kv_vector(&trip.kv, is_v, 0, head, token);
                for (uint32_t i = 0; i < 8; i++) {
                    float value = fixture_load(KVF_DTYPE_F32, vector, i);
                    fixture_store(KVF_DTYPE_F32, vector, i, value + 64.0f);
                }
            }
        }
    }
    fixture_trip_run(&trip);
    double signal = (8.0 * 4096.0 + 128.0) / 128.0;
    double error_k = fixture_distortion(&trip.kv, &trip.back, 0, 0) * signal;
    double error_v = fixture_distortion(&trip.kv, &trip.back, 1, 0) * signal;
    assert_true(error_k < 0.0095); /* as without bias */
    assert_true(error_v > 20.0 * error_k);
    fixture_trip_fini(&trip);
}

/* At ratio 1.0 no coefficient lies further than half a step outside the levels, whatever fp16
 * rounding did to lo and scale: rounding outwards guarantees it. */
static void nothing_is_clipped_at_full_range(void **state)
{
    (void)state;
    enum {
        TOKENS = 120 /* too few to be centred */
    };
    static const char *const profiles[] = {"saw4-paper", "saw5", "saw6", "saw8"};
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_F32, 1, 1, 128, 0, TOKENS);
    struct fixture_kv kv;
    fixture_kv_init(&kv, &geometry, TOKENS);
    for (size_t p = 0; p < sizeof(profiles) / sizeof(profiles[0]); p++) {
        struct fixture_codec codec;
        fixture_codec_init(&codec, &geometry, profiles[p]);
        fixture_fill_hard(&kv, &random_bits);
        fixture_encode(&codec, &kv, 0);
        struct strip strip = strip_of_k(&codec, TOKENS);
        struct saw_model model = model_of(&codec.plan.kinds[0].k);
        double levels = (double)((1 << model.bits) - 1);
        for (uint32_t token = 0; token < TOKENS; token++) {
            float y[MODEL_DIM_MAX];
            uint32_t meta;
            memcpy(&meta, strip.meta + 4 * token, sizeof(meta));
            double lo = kvf_f32_from_f16((uint16_t)meta);
            double scale = kvf_f32_from_f16((uint16_t)(meta >> 16));
            for (uint32_t i = 0; i < 128; i++) {
                float sign = model.sign_bits[i / 8] >> (i % 8) & 1 ? -1.0f : 1.0f;
                y[i] = sign *
                       fixture_load(KVF_DTYPE_F32, fixture_kv_vector(&kv, 0, 0, 0, token), i);
            }
            saw_model_rotate(&model, y);
            for (uint32_t i = 0; i < 128 && !isnan(scale) && scale != 0; i++) {
                double level = ((double)y[i] / sqrt(128.0) - lo) / scale;
                assert_true(level > -0.5 && level < levels + 0.5);
            }
        }
        fixture_codec_fini(&codec);
    }
    fixture_kv_fini(&kv);
}

/* A coefficient's error is at most half a step, or, where the range is clipped, the distance from
 * the end of the whole range to that of the clipped one: (1 - r) / 2 of the former, and (2^b - 1)
 * steps are at least r of it. To that comes what bf16 drops and rounds. */
static void errors_are_within_the_bound_of_their_width(void **state)
{
    (void)state;
    enum {
        TOKENS = 120
    };
    static const char *const profiles[] = {"saw4-paper", "saw8", "saw6", "saw5",
                                           "balanced",   "saw3", "saw2"};
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 1, 1, 128, 0, TOKENS);
    struct fixture_kv kv;
    struct fixture_kv back;
    fixture_kv_init(&kv, &geometry, TOKENS);
    fixture_kv_init(&back, &geometry, TOKENS);
    for (size_t p = 0; p < sizeof(profiles) / sizeof(profiles[0]); p++) {
        struct fixture_codec codec;
        fixture_codec_init(&codec, &geometry, profiles[p]);
        fixture_fill_hard(&kv, &random_bits);
        fixture_encode(&codec, &kv, 0);
        fixture_decode(&codec, &back);
        struct strip strip = strip_of_k(&codec, TOKENS);
        double ratio = codec.plan.kinds[0].k.descriptor.clip_q15 / 32768.0;
        double levels = (double)((1 << codec.plan.kinds[0].k.descriptor.bits) - 1);
        double steps = fmax(0.5, (1.0 - ratio) / (2.0 * ratio) * levels);
        for (uint32_t token = 0; token < TOKENS; token++) {
            const uint8_t *a = fixture_kv_vector(&kv, 0, 0, 0, token);
            const uint8_t *b = fixture_kv_vector(&back, 0, 0, 0, token);
            uint32_t meta;
            memcpy(&meta, strip.meta + 4 * token, sizeof(meta));
            double scale = kvf_f32_from_f16((uint16_t)(meta >> 16));
            if (isnan(scale)) {
                assert_memory_equal(a, b, 256);
                continue;
            }
            double error = 0.0;
            double peak = 0.0;
            double rounding = 0.0;
            for (uint32_t i = 0; i < 128; i++) {
                double x = fixture_load(KVF_DTYPE_BF16, a, i);
                double y = fixture_load(KVF_DTYPE_BF16, b, i);
                error += (x - y) * (x - y);
                peak = fmax(peak, fabs(x));
                rounding += (y * 0x1p-8) * (y * 0x1p-8);
            }
            double bound = sqrt(128.0) * (scale * steps) * 1.001 + sqrt(128.0) * peak * 0x1p-12 +
                           sqrt(rounding) + 1e-30;
            assert_true(sqrt(error) <= bound);
        }
        fixture_codec_fini(&codec);
    }
    fixture_kv_fini(&back);
    fixture_kv_fini(&kv);
}

static void zeros_and_constants_are_exact(void **state)
{
    (void)state;
    /* dim 7 has no rotation, so that a constant vector has scale 0 */
    static const uint32_t dims[] = {7, 64, 80, 128};
    static const char *const profiles[] = {"balanced", "saw8", "saw4-paper", "saw6",
                                           "saw5",     "saw3", "saw2"};
    for (size_t p = 0; p < sizeof(profiles) / sizeof(profiles[0]); p++) {
        for (int d = 0; d < 4; d++) {
            struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_F32, 1, 1, dims[d], dims[d],
                                                            32);
            struct fixture_trip trip;
            fixture_trip_init(&trip, &geometry, profiles[p], 32);
            memset(trip.back.memory, 0xff, trip.back.memory_bytes);
            fixture_trip_run(&trip);
            assert_memory_equal(trip.back.memory, trip.kv.memory,
                                trip.kv.memory_bytes); /* +0, not -0 */
            for (uint32_t token = 0; token < 32; token++) {
                float value = kvf_f32_from_f16((uint16_t)(0x3000 + 37 * token));
                for (uint32_t i = 0; i < dims[d]; i++) {
                    fixture_store(KVF_DTYPE_F32, fixture_kv_vector(&trip.kv, 0, 0, 0, token), i,
                                  value);
                }
            }
            fixture_trip_run(&trip);
            if (dims[d] == 7) {
                assert_memory_equal(trip.back.memory, trip.kv.memory, trip.kv.memory_bytes);
            } else if (strcmp(profiles[p], "saw4-paper") == 0 && dims[d] != 80) {
                /* plain Sylvester: one coefficient, at level 15 of a scale rounded up to fp16: at
                 * most half a step of the scale's rounding, 2^-11 each for hi and for scale */
                assert_true(fixture_distortion(&trip.kv, &trip.back, 0, 0) < 0x1p-20);
            }
            fixture_trip_fini(&trip);
        }
    }
}

/* Any NaN payload, infinities, and what is too large or too small for fp16 scales, comes back bit
 * by bit through the raw area. A centred vector is never too small: it is as far from the mean as 0
 * is. */
static void escapes_keep_every_bit(void **state)
{
    (void)state;
    static const uint32_t patterns[] = {0x7f800001, 0xffc12345, 0x7f800000, 0xff800000,
                                        0x7e967699, 0x00000001, 0x807fffff};
    for (size_t p = 0; p < sizeof(patterns) / sizeof(patterns[0]); p++) {
        struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_F32, 2, 2, 96, 64, 160);
        struct fixture_trip trip;
        fixture_trip_init(&trip, &geometry, "balanced", 160);
        fixture_fill_normal(&trip.kv, &random_bits);
        for (int i = 0; i < 8; i++) {
            uint8_t *vector = fixture_kv_vector(&trip.kv, i % 2, i / 4, i / 2 % 2, 19 * i + 3);
            uint32_t n = i % 2 ? 64 : 96;
            bool tiny = (patterns[p] & 0x7f800000) == 0;
            for (uint32_t e = 0; e < n; e++) {
                if (tiny || e == 11) {
                    memcpy(vector + 4 * e, &patterns[p], 4);
                }
            }
        }
        fixture_encode(&trip.codec, &trip.kv, 320);
        bool tiny_k_is_coded = (patterns[p] & 0x7f800000) == 0;
        assert_int_equal(trip.codec.page->header.n_escapes, tiny_k_is_coded ? 4 : 8);
        fixture_decode(&trip.codec, &trip.back);
        for (int i = tiny_k_is_coded; i < 8; i += 1 + tiny_k_is_coded) {
            assert_memory_equal(fixture_kv_vector(&trip.back, i % 2, i / 4, i / 2 % 2, 19 * i + 3),
                                fixture_kv_vector(&trip.kv, i % 2, i / 4, i / 2 % 2, 19 * i + 3),
                                i % 2 ? 256 : 384);
        }
        fixture_trip_fini(&trip);
    }
}

/* More than 1/16 escapes: that tensor of that layer is stored raw, the others are not. */
static void too_many_escapes_make_a_strip_raw(void **state)
{
    (void)state;
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 2, 1, 64, 64, 32);
    struct fixture_trip trip;
    fixture_trip_init(&trip, &geometry, "saw8", 32);
    fixture_fill_normal(&trip.kv, &random_bits);
    for (uint32_t token = 0; token < 3; token++) {
        memset(fixture_kv_vector(&trip.kv, 1, 0, 0, token), 0xff, 2);
    }
    fixture_encode(&trip.codec, &trip.kv, 0);
    assert_int_equal(trip.codec.page->layer_bits[0], 0x08);
    assert_int_equal(trip.codec.page->layer_bits[1], 0x88);
    assert_int_equal(trip.codec.page->header.n_escapes, 0);
    fixture_decode(&trip.codec, &trip.back);
    assert_memory_equal(trip.back.v_layers[0], trip.kv.v_layers[0], trip.kv.v_bytes);
    assert_true(fixture_distortion(&trip.kv, &trip.back, 0, 0) < 1e-4);
    fixture_trip_fini(&trip);
}

static void sinks_of_the_first_chunk_are_raw(void **state)
{
    (void)state;
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 2, 2, 64, 64, 64);
    geometry.sink_tokens = 4;
    struct fixture_trip trip;
    fixture_trip_init(&trip, &geometry, "balanced", 64);
    fixture_fill_normal(&trip.kv, &random_bits);
    fixture_encode(&trip.codec, &trip.kv, 0);
    assert_int_equal(trip.codec.page->header.n_sink_raw, 4);
    assert_int_equal(trip.codec.page->header.n_escapes, 2 * 2 * 2 * 4);
    fixture_decode(&trip.codec, &trip.back);
    for (uint32_t layer = 0; layer < 2; layer++) {
        assert_memory_equal(trip.back.k_layers[layer], trip.kv.k_layers[layer], 4 * 2 * 128);
        assert_memory_equal(trip.back.v_layers[layer], trip.kv.v_layers[layer], 4 * 2 * 128);
        assert_memory_not_equal(trip.back.k_layers[layer], trip.kv.k_layers[layer],
                                trip.kv.k_bytes);
    }
    fixture_encode(&trip.codec, &trip.kv, 64);
    assert_int_equal(trip.codec.page->header.n_sink_raw, 0);
    assert_int_equal(trip.codec.page->header.n_escapes, 0);
    fixture_trip_fini(&trip);
}

#if defined(__x86_64__)
/* An engine may flush subnormals and round as it likes; the bytes are the same, and its setting
 * stays. */
static void the_callers_float_environment_does_not_matter(void **state)
{
    (void)state;
    enum {
        FTZ_DAZ_UP_MASKED = 0x1f80 | 0x8000 | 0x0040 | 0x4000
    };
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_F16, 1, 2, 128, 80, 130);
    struct fixture_kv kv;
    struct fixture_kv plain;
    struct fixture_kv flushed;
    struct fixture_codec codec;
    struct fixture_codec other;
    fixture_kv_init(&kv, &geometry, 130);
    fixture_kv_init(&plain, &geometry, 130);
    fixture_kv_init(&flushed, &geometry, 130);
    fixture_codec_init(&codec, &geometry, "balanced");
    fixture_codec_init(&other, &geometry, "balanced");
    fixture_fill_hard(&kv, &random_bits);
    fixture_encode(&codec, &kv, 0);
    fixture_decode(&codec, &plain);
    unsigned int before = _mm_getcsr();
    _mm_setcsr(FTZ_DAZ_UP_MASKED);
    fixture_encode(&other, &kv, 0);
    unsigned int between = _mm_getcsr();
    fixture_decode(&other, &flushed);
    unsigned int after = _mm_getcsr();
    _mm_setcsr(before);
    assert_int_equal(between & ~0x3fu, FTZ_DAZ_UP_MASKED); /* but for sticky flags */
    assert_int_equal(after & ~0x3fu, FTZ_DAZ_UP_MASKED);
    assert_int_equal(other.record_bytes, codec.record_bytes);
    assert_memory_equal(other.page, codec.page, codec.record_bytes);
    assert_memory_equal(flushed.memory, plain.memory, plain.memory_bytes);
    fixture_codec_fini(&codec);
    fixture_codec_fini(&other);
    fixture_kv_fini(&flushed);
    fixture_kv_fini(&plain);
    fixture_kv_fini(&kv);
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(records_are_those_of_the_text),
        cmocka_unit_test(means_are_those_of_the_text),
        cmocka_unit_test(order_is_that_of_fragments),
        cmocka_unit_test(swapped_stages_are_seen),
        cmocka_unit_test(distortion_is_that_of_theory),
        cmocka_unit_test(clip_ratios_are_near_the_best),
        cmocka_unit_test(search_is_closer_than_any_ratio),
        cmocka_unit_test(near_ties_are_decided_by_the_text),
        cmocka_unit_test(rotation_spreads_an_outlier),
        cmocka_unit_test(centring_removes_a_bias),
        cmocka_unit_test(nothing_is_clipped_at_full_range),
        cmocka_unit_test(errors_are_within_the_bound_of_their_width),
        cmocka_unit_test(zeros_and_constants_are_exact),
        cmocka_unit_test(escapes_keep_every_bit),
        cmocka_unit_test(too_many_escapes_make_a_strip_raw),
        cmocka_unit_test(sinks_of_the_first_chunk_are_raw),
#if defined(__x86_64__)
        cmocka_unit_test(the_callers_float_environment_does_not_matter),
#endif
    };
    kvf_random_seeded_init(&random_bits, kvf_test_seed());
    int failures = 0;
    for (int level = 0; fixture_use_level(level); level++) {
        failures += cmocka_run_group_tests(tests, NULL, NULL);
    }
    return failures;
}
