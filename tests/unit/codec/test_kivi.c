/* SPDX-License-Identifier: Apache-2.0
 *
 * test_kivi.c: the kivi codec against its text, by a plain model of it, and what the text implies:
 * bounds of the error, what escapes leave alone, sizes.
 */
#include "codec/codec_kivi.h"
#include "codec/codec_pages.h"
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

static const char *const profiles[] = {"kivi4-g32", "kivi4-g64", "kivi4-g128",
                                       "kivi2-g32", "kivi2-g64", "kivi2-g128"};
enum {
    N_PROFILES = sizeof(profiles) / sizeof(profiles[0]),
    HEADS = 2, /* of comparisons with the model */
};

/* -------------------------------------------------------------------------------------------------
 * The text once more
 */
struct group {
    double min;
    double max;
    uint16_t lo;
    uint16_t scale;
};

static bool is_escape(const float *x, uint32_t n)
{
    float peak = 0.0f;
    for (uint32_t i = 0; i < n; i++) {
        if (!(fabsf(x[i]) <= 65504.0f)) {
            return true;
        }
        peak = fmaxf(peak, fabsf(x[i]));
    }
    return peak > 0.0f && peak < 0x1p-10f;
}

static void group_finish(struct group *group, uint32_t bits)
{
    if (group->min > group->max) {
        group->scale = 0x7e00;
        return;
    }
    uint16_t hi = saw_model_f16_up(group->max);
    group->lo = saw_model_f16_down(group->min);
    float range = (float)(saw_model_f16_value(hi) - saw_model_f16_value(group->lo));
    double levels = (double)((1u << bits) - 1);
    group->scale = saw_model_f16_up((double)range / levels);
    /* the quotient was rounded: let exact products decide */
    while (group->scale > 0 &&
           levels * saw_model_f16_value((uint16_t)(group->scale - 1)) >= (double)range) {
        group->scale--;
    }
    while (levels * saw_model_f16_value(group->scale) < (double)range) {
        group->scale++;
    }
}

static uint32_t code_of(const struct group *group, float x, uint32_t bits)
{
    if (group->scale == 0) {
        return 0;
    }
    float difference = x - (float)saw_model_f16_value(group->lo);
    float reciprocal = 1.0f / (float)saw_model_f16_value(group->scale);
    double q = nearbyint((double)difference * (double)reciprocal);
    return (uint32_t)fmin(fmax(q, 0.0), (double)((1u << bits) - 1));
}

/* K (is_v 0) or V of a block, and the place of its strip's parts. */
struct tensor {
    const struct fixture_kv *kv;
    int is_v;
    uint32_t n;
    uint32_t bits;
    uint32_t group_size;
    uint32_t n_sinks;
    const uint8_t *meta;
    const uint8_t *codes;
    bool coded[HEADS][KVF_CHUNK_TOKENS_MAX]; /* no escapes */
};

static float input(const struct tensor *tensor, uint32_t head, uint32_t token, uint32_t channel)
{
    return fixture_load(tensor->kv->geometry.dtype,
                        fixture_kv_vector(tensor->kv, tensor->is_v, 0, head, token), channel);
}

/* Returns how many. */
static uint32_t find_escapes(struct tensor *tensor)
{
    uint32_t n_escapes = 0;
    for (uint32_t head = 0; head < HEADS; head++) {
        for (uint32_t token = 0; token < tensor->kv->n_tokens; token++) {
            float x[KVF_DIM_MAX];
            for (uint32_t i = 0; i < tensor->n; i++) {
                x[i] = input(tensor, head, token, i);
            }
            tensor->coded[head][token] = token >= tensor->n_sinks && !is_escape(x, tensor->n);
            n_escapes += !tensor->coded[head][token];
        }
    }
    return n_escapes;
}

/* The group that an element is in, from the input. */
static struct group group_of(const struct tensor *tensor, uint32_t head, uint32_t token,
                             uint32_t channel)
{
    struct group group = {.min = INFINITY, .max = -INFINITY};
    uint32_t first = (tensor->is_v ? channel : token) / tensor->group_size * tensor->group_size;
    for (uint32_t i = first; i < first + tensor->group_size; i++) {
        uint32_t t = tensor->is_v ? token : i;
        uint32_t c = tensor->is_v ? i : channel;
        if (t < tensor->kv->n_tokens && c < tensor->n && tensor->coded[head][t]) {
            group.min = fmin(group.min, (double)input(tensor, head, t, c));
            group.max = fmax(group.max, (double)input(tensor, head, t, c));
        }
    }
    group_finish(&group, tensor->bits);
    return group;
}

/* Word of meta of an element. */
static uint32_t stored_meta(const struct tensor *tensor, uint32_t head, uint32_t token,
                            uint32_t channel)
{
    uint32_t n_tokens = tensor->kv->n_tokens;
    uint32_t g = tensor->group_size;
    size_t at = tensor->is_v
                    ? ((size_t)head * n_tokens + token) * ((tensor->n + g - 1) / g) + channel / g
                    : ((size_t)head * ((n_tokens + g - 1) / g) + token / g) * tensor->n + channel;
    uint32_t word;
    memcpy(&word, tensor->meta + 4 * at, sizeof(word));
    return word;
}

static uint32_t stored_code(const struct tensor *tensor, uint32_t head, uint32_t token,
                            uint32_t channel)
{
    size_t vector_bytes = (tensor->n * tensor->bits + 7) / 8;
    const uint8_t *codes = tensor->codes + (head * tensor->kv->n_tokens + token) * vector_bytes;
    uint32_t at = channel * tensor->bits;
    return codes[at / 8] >> at % 8 & ((1u << tensor->bits) - 1);
}

/* Some elements of a token against the model: all groups are seen over a run, not all in each. */
static void compare_token(const struct tensor *tensor, const struct fixture_kv *back, uint32_t head,
                          uint32_t token)
{
    int dtype = back->geometry.dtype;
    const uint8_t *decoded = fixture_kv_vector(back, tensor->is_v, 0, head, token);
    bool coded = tensor->coded[head][token];
    if (!coded) {
        assert_memory_equal(decoded, fixture_kv_vector(tensor->kv, tensor->is_v, 0, head, token),
                            tensor->n * kvf_dtype_bytes(dtype));
    }
    for (uint32_t c = token % 3; c < tensor->n; c += 1 + tensor->n / 12) {
        struct group group = group_of(tensor, head, token, c);
        assert_int_equal(stored_meta(tensor, head, token, c),
                         group.lo | (uint32_t)group.scale << 16);
        float x = input(tensor, head, token, c);
        uint32_t code = coded ? code_of(&group, x, tensor->bits) : 0;
        assert_int_equal(stored_code(tensor, head, token, c), code);
        if (coded) {
            uint8_t want[4];
            fixture_store(dtype, want, 0,
                          fmaf((float)saw_model_f16_value(group.scale), (float)code,
                               (float)saw_model_f16_value(group.lo)));
            uint32_t bytes = (uint32_t)kvf_dtype_bytes(dtype);
            assert_memory_equal(decoded + c * bytes, want, bytes);
        }
    }
}

static void compare_with_model(const char *profile, int dtype, uint32_t dim, uint32_t n_tokens,
                               uint32_t n_sinks)
{
    struct kvf_geometry geometry = fixture_geometry(dtype, 1, HEADS, dim, dim, n_tokens);
    geometry.sink_tokens = (uint16_t)n_sinks;
    struct fixture_trip trip;
    fixture_trip_init(&trip, &geometry, profile, n_tokens);
    fixture_fill_hard(&trip.kv, &random_bits);
    fixture_trip_run(&trip);
    uint32_t bits = trip.codec.plan.kinds[0].k.descriptor.bits;
    uint32_t escapes = 0;
    const uint8_t *strip = trip.codec.payload;
    for (int is_v = 0; is_v < 2; is_v++) {
        struct kvf_codec_sizes sizes;
        const struct kvf_codec_tensor *plan = is_v ? &trip.codec.plan.kinds[0].v
                                                   : &trip.codec.plan.kinds[0].k;
        kvf_codec_kivi.sizes(plan, n_tokens, &sizes);
        struct tensor tensor = {.kv = &trip.kv,
                                .is_v = is_v,
                                .n = dim,
                                .bits = bits,
                                .group_size = plan->descriptor.group_size,
                                .n_sinks = n_sinks,
                                .meta = strip,
                                .codes = strip + sizes.meta_bytes};
        uint32_t n_escapes = find_escapes(&tensor);
        bool is_raw = n_escapes > HEADS * n_sinks + (HEADS * n_tokens + 15) / 16;
        assert_int_equal(trip.codec.page->layer_bits[0] >> 4 * is_v & 15, is_raw ? 0 : bits);
        if (is_raw) {
            strip += kvf_part_bytes(HEADS * n_tokens * dim * kvf_dtype_bytes(dtype));
            continue;
        }
        escapes += n_escapes;
        for (uint32_t head = 0; head < HEADS; head++) {
            for (uint32_t token = 0; token < n_tokens; token++) {
                compare_token(&tensor, &trip.back, head, token);
            }
        }
        strip += sizes.meta_bytes + sizes.codes_bytes;
    }
    assert_int_equal(trip.codec.page->header.n_escapes, escapes);
    fixture_trip_fini(&trip);
}

/* Numbers of tokens and dims that G divides and that it does not, also by one. */
static void records_are_those_of_the_text(void **state)
{
    (void)state;
    static const struct {
        uint32_t dim;
        uint32_t n_tokens;
    } shapes[] = {{128, 64}, {64, 33}, {80, 65}, {96, 129}, {7, 40}, {33, 31}, {112, 100}};
    for (uint32_t p = 0; p < N_PROFILES; p++) {
        for (uint32_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
            /* short heads of fp8 do not pay for metadata */
            uint32_t n_types = shapes[i].dim < 16 ? 3 : 5;
            int dtype = (int)(KVF_DTYPE_BF16 + (p + i) % n_types);
            compare_with_model(profiles[p], dtype, shapes[i].dim, shapes[i].n_tokens, i % 3);
        }
    }
    compare_with_model("kivi4-g128", KVF_DTYPE_BF16, 320, 40, 1);
    compare_with_model("kivi2-g32", KVF_DTYPE_BF16, 1024, 34, 0);
}

/* -------------------------------------------------------------------------------------------------
 * What follows from it
 */
static void trip_init(struct fixture_trip *trip, const char *profile, int dtype, uint32_t dim,
                      uint32_t n_tokens)
{
    struct kvf_geometry geometry = fixture_geometry(dtype, 1, 1, dim, dim, n_tokens);
    fixture_trip_init(trip, &geometry, profile, n_tokens);
}

static float element(const struct fixture_kv *kv, int is_v, uint32_t token, uint32_t channel)
{
    return fixture_load(kv->geometry.dtype, fixture_kv_vector(kv, is_v, 0, 0, token), channel);
}

static void set_element(struct fixture_kv *kv, int is_v, uint32_t token, uint32_t channel,
                        float value)
{
    fixture_store(kv->geometry.dtype, fixture_kv_vector(kv, is_v, 0, 0, token), channel, value);
}

/* Zeros and groups of one value that fp16 holds come back as they are. */
static void constants_come_back(void **state)
{
    (void)state;
    for (int p = 0; p < N_PROFILES; p++) {
        struct fixture_trip trip;
        trip_init(&trip, profiles[p], KVF_DTYPE_BF16, 96, 70);
        fixture_trip_run(&trip);
        assert_memory_equal(trip.back.memory, trip.kv.memory, trip.kv.memory_bytes);
        for (uint32_t token = 0; token < 70; token++) {
            for (uint32_t i = 0; i < 96; i++) {
                set_element(&trip.kv, 0, token, i, (float)(i * 3) - 100.0f);
                set_element(&trip.kv, 1, token, i, (float)token * 0.25f - 5.0f);
            }
        }
        fixture_trip_run(&trip);
        assert_int_equal(trip.codec.page->header.n_escapes, 0);
        assert_memory_equal(trip.back.memory, trip.kv.memory, trip.kv.memory_bytes);
        fixture_trip_fini(&trip);
    }
}

/* Every value lies within half a step of its group, and a step is the group's range over the
 * levels, but for what fp16 adds: nothing is clipped. In fp32, so that nothing else rounds. */
static void errors_are_half_a_step(void **state)
{
    (void)state;
    enum {
        DIM = 96,
        TOKENS = 200
    };
    for (int p = 0; p < N_PROFILES; p++) {
        struct fixture_trip trip;
        trip_init(&trip, profiles[p], KVF_DTYPE_F32, DIM, TOKENS);
        fixture_fill_normal(&trip.kv, &random_bits);
        for (uint32_t token = 0; token < TOKENS; token++) {
            set_element(&trip.kv, 0, token, 9, 100.0f + element(&trip.kv, 0, token, 9));
            set_element(&trip.kv, 0, token, 10, 0x1p-19f * element(&trip.kv, 0, token, 10));
        }
        fixture_trip_run(&trip);
        uint32_t g = trip.codec.plan.kinds[0].k.descriptor.group_size;
        float levels = trip.codec.plan.kinds[0].k.descriptor.bits == 4 ? 15.0f : 3.0f;
        for (int is_v = 0; is_v < 2; is_v++) {
            for (uint32_t token = 0; token < TOKENS; token++) {
                for (uint32_t i = 0; i < DIM; i++) {
                    uint32_t first = (is_v ? i : token) / g * g;
                    float min = INFINITY;
                    float max = -INFINITY;
                    for (uint32_t j = first; j < first + g; j++) {
                        if (j < (is_v ? DIM : TOKENS)) {
                            float x = element(&trip.kv, is_v, is_v ? token : j, is_v ? j : i);
                            min = fminf(min, x);
                            max = fmaxf(max, x);
                        }
                    }
                    /* lo and hi are a place of fp16 off, the step one of its own */
                    float place = 0x1p-10f * fmaxf(fabsf(min), fabsf(max)) + 0x1p-23f;
                    float step = (max - min + 2 * place) / levels;
                    step = step * (1 + 0x1p-10f) + 0x1p-24f;
                    float error = fabsf(element(&trip.kv, is_v, token, i) -
                                        element(&trip.back, is_v, token, i));
                    assert_true(error <= 0.5f * step * (1 + 0x1p-18f));
                }
            }
        }
        fixture_trip_fini(&trip);
    }
}

/* D of min and max over n normal values with 2^b levels, by either axis: within 2 %. */
static void distortion_is_that_of_theory(void **state)
{
    (void)state;
    static const struct {
        const char *profile;
        double expected;
    } cases[] = {{"kivi4-g64", 0.00804},
                 {"kivi4-g128", 0.00996},
                 {"kivi2-g64", 0.2025},
                 {"kivi2-g128", 0.2504}};
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_F32, 2, 8, 128, 128, 256);
        struct fixture_trip trip;
        fixture_trip_init(&trip, &geometry, cases[c].profile, 256);
        fixture_fill_normal(&trip.kv, &random_bits);
        fixture_trip_run(&trip);
        for (int is_v = 0; is_v < 2; is_v++) {
            double distortion = fixture_distortion(&trip.kv, &trip.back, is_v, 0);
            assert_true(fabs(distortion / cases[c].expected - 1.0) < 0.02);
        }
        fixture_trip_fini(&trip);
    }
}

/* By channel, a channel 300 times the others costs the others nothing: they decode to the bits that
 * they have without it. By token it would take their levels. */
static void a_large_channel_is_alone(void **state)
{
    (void)state;
    struct fixture_trip with;
    struct fixture_trip without;
    trip_init(&with, "kivi2-g32", KVF_DTYPE_BF16, 64, 100);
    trip_init(&without, "kivi2-g32", KVF_DTYPE_BF16, 64, 100);
    fixture_fill_normal(&without.kv, &random_bits);
    memcpy(with.kv.memory, without.kv.memory, with.kv.memory_bytes);
    for (uint32_t token = 0; token < 100; token++) {
        set_element(&with.kv, 0, token, 5, 300.0f * element(&with.kv, 0, token, 5));
        set_element(&with.kv, 1, token, 5, 300.0f * element(&with.kv, 1, token, 5));
    }
    fixture_trip_run(&with);
    fixture_trip_run(&without);
    uint32_t changed = 0;
    for (uint32_t token = 0; token < 100; token++) {
        for (uint32_t i = 0; i < 64; i++) {
            if (i != 5) {
                assert_true(element(&with.back, 0, token, i) ==
                            element(&without.back, 0, token, i));
                changed += element(&with.back, 1, token, i) != element(&without.back, 1, token, i);
            }
        }
    }
    assert_true(changed > 1000);
    fixture_trip_fini(&with);
    fixture_trip_fini(&without);
}

/* A vector that cannot be coded comes back bit for bit and changes nothing of the others in its
 * groups, whatever is wrong with it: they are coded as if it were a copy of a neighbour. */
static void escapes_leave_others_alone(void **state)
{
    (void)state;
    static const float wrong[] = {NAN, INFINITY, -INFINITY, 65536.0f, -70000.0f, 1e30f};
    enum {
        DIM = 64,
        TOKENS = 70,
        AT = 40
    };
    for (uint32_t w = 0; w <= sizeof(wrong) / sizeof(wrong[0]); w++) {
        struct fixture_trip with;
        struct fixture_trip without;
        trip_init(&with, profiles[w % N_PROFILES], KVF_DTYPE_F32, DIM, TOKENS);
        trip_init(&without, profiles[w % N_PROFILES], KVF_DTYPE_F32, DIM, TOKENS);
        fixture_fill_normal(&without.kv, &random_bits);
        for (int is_v = 0; is_v < 2; is_v++) {
            memcpy(fixture_kv_vector(&without.kv, is_v, 0, 0, AT),
                   fixture_kv_vector(&without.kv, is_v, 0, 0, AT + 1), DIM * sizeof(float));
        }
        memcpy(with.kv.memory, without.kv.memory, with.kv.memory_bytes);
        for (int is_v = 0; is_v < 2; is_v++) {
            for (uint32_t i = 0; i < DIM; i++) {
                if (w == sizeof(wrong) / sizeof(wrong[0])) { /* too small for fp16 metadata */
                    set_element(&with.kv, is_v, AT, i, 0x1p-11f * (float)(i % 7) / 7.0f);
                } else if (i == 11 * w) {
                    set_element(&with.kv, is_v, AT, i, wrong[w]);
                }
            }
        }
        fixture_trip_run(&with);
        fixture_trip_run(&without);
        assert_int_equal(with.codec.page->header.n_escapes, 2);
        assert_int_equal(without.codec.page->header.n_escapes, 0);
        for (int is_v = 0; is_v < 2; is_v++) {
            for (uint32_t token = 0; token < TOKENS; token++) {
                const struct fixture_kv *want = token == AT ? &with.kv : &without.back;
                assert_memory_equal(fixture_kv_vector(&with.back, is_v, 0, 0, token),
                                    fixture_kv_vector(want, is_v, 0, 0, token),
                                    DIM * sizeof(float));
            }
        }
        fixture_trip_fini(&with);
        fixture_trip_fini(&without);
    }
}

/* More escapes than 1/16, or too few tokens to pay for metadata: raw, every bit. */
static void what_does_not_pay_is_raw(void **state)
{
    (void)state;
    for (uint32_t n_tokens = 1; n_tokens <= 12; n_tokens++) {
        for (int p = 0; p < N_PROFILES; p++) {
            struct fixture_trip trip;
            trip_init(&trip, profiles[p], KVF_DTYPE_BF16, 64, n_tokens);
            fixture_fill_normal(&trip.kv, &random_bits);
            fixture_trip_run(&trip);
            size_t raw_bytes = n_tokens * 64 * 2 * 2;
            assert_true(trip.codec.record_bytes - KVF_BLOCK_PAGE_BYTES <= raw_bytes + 2 * 127);
            if ((trip.codec.page->layer_bits[0] & 15) == KVF_BITS_RAW) {
                assert_memory_equal(fixture_kv_vector(&trip.back, 0, 0, 0, 0),
                                    fixture_kv_vector(&trip.kv, 0, 0, 0, 0), n_tokens * 64 * 2);
            }
            assert_true((trip.codec.page->layer_bits[0] & 15) == KVF_BITS_RAW || n_tokens > 2);
            assert_true(trip.codec.page->layer_bits[0] >> 4 != KVF_BITS_RAW || n_tokens < 3);
            fixture_trip_fini(&trip);
        }
    }
    struct fixture_trip trip;
    trip_init(&trip, "kivi4-g32", KVF_DTYPE_BF16, 64, 64);
    fixture_fill_normal(&trip.kv, &random_bits);
    for (uint32_t token = 0; token < 5; token++) {
        set_element(&trip.kv, 0, 10 * token, token, NAN);
    }
    fixture_trip_run(&trip);
    assert_int_equal(trip.codec.page->layer_bits[0], KVF_BITS_RAW | 4 << 4);
    assert_memory_equal(trip.back.k_layers[0], trip.kv.k_layers[0], trip.kv.k_bytes);
    fixture_trip_fini(&trip);
}

/* b + 32 / G bits a value where G divides tokens and dim. */
static void sizes_are_those_of_arithmetic(void **state)
{
    (void)state;
    static const double expected[N_PROFILES] = {5.0, 4.5, 4.25, 3.0, 2.5, 2.25};
    for (int p = 0; p < N_PROFILES; p++) {
        struct kvf_codec_plan plan;
        struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 3, 8, 128, 128, 256);
        assert_int_equal(kvf_codec_plan_init(&plan, &geometry, profiles[p]), KVF_OK);
        double values = 3.0 * 8.0 * 256.0 * 2.0 * 128.0;
        assert_true((double)kvf_codec_plan_payload_bytes(&plan, 256) * 8.0 / values == expected[p]);
        assert_true(kvf_codec_plan_is_fixed(&plan) && !plan.lossless);
        assert_int_equal(plan.kinds[0].k.descriptor.group_axis, KVF_AXIS_CHANNEL);
        assert_int_equal(plan.kinds[0].v.descriptor.group_axis, KVF_AXIS_TOKEN);
    }
}

static void other_settings_are_refused(void **state)
{
    (void)state;
    for (uint32_t bits = 0; bits < 9; bits++) {
        for (uint32_t group = 0; group <= 256; group += 16) {
            struct kvf_codec_tensor tensor = {
                .n_heads = 1, .dim = 64, .dtype = KVF_DTYPE_BF16, .element_bytes = 2};
            struct kvf_profile_tensor settings = {.codec = KVF_CODEC_KIVI,
                                                  .bits = (uint8_t)bits,
                                                  .group_size = (uint16_t)group,
                                                  .group_axis = KVF_AXIS_TOKEN};
            bool there = (bits == 4 || bits == 2) && (group == 32 || group == 64 || group == 128);
            assert_int_equal(kvf_codec_kivi.resolve(&tensor, &settings),
                             there ? KVF_OK : KVF_ERR_UNSUPPORTED);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(records_are_those_of_the_text),
        cmocka_unit_test(constants_come_back),
        cmocka_unit_test(errors_are_half_a_step),
        cmocka_unit_test(distortion_is_that_of_theory),
        cmocka_unit_test(a_large_channel_is_alone),
        cmocka_unit_test(escapes_leave_others_alone),
        cmocka_unit_test(what_does_not_pay_is_raw),
        cmocka_unit_test(sizes_are_those_of_arithmetic),
        cmocka_unit_test(other_settings_are_refused),
    };
    kvf_random_seeded_init(&random_bits, kvf_test_seed());
    int failures = 0;
    for (int level = 0; fixture_use_level(level); level++) {
        failures += cmocka_run_group_tests(tests, NULL, NULL);
    }
    return failures;
}
