/* SPDX-License-Identifier: Apache-2.0
 *
 * test_fp.c: conversions by integer arithmetic, against what their formats are defined to be, and
 * the fused operation against the machine's.
 */
#include "codec/codec_fp.h"

#include "tests/support/support.h"

#include <fenv.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

static struct kvf_random_seeded random_bits;

/* A narrow float by its definition. */
static double defined_value(uint32_t bits, int exponent_bits, int mantissa_bits)
{
    int bias = (1 << (exponent_bits - 1)) - 1;
    uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
    int exponent = (int)(bits >> mantissa_bits & ((1u << exponent_bits) - 1));
    double sign = bits >> (exponent_bits + mantissa_bits) & 1 ? -1.0 : 1.0;
    if (exponent == 0) {
        return sign * ldexp(mantissa, 1 - bias - mantissa_bits);
    }
    return sign *
           ldexp((double)(mantissa + (1u << mantissa_bits)), exponent - bias - mantissa_bits);
}

static void every_narrow_value_widens_to_its_definition(void **state)
{
    (void)state;
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        float from_f16 = kvf_f32_from_f16((uint16_t)bits);
        if ((bits & 0x7c00) == 0x7c00) {
            assert_true((bits & 0x3ff) != 0 ? isnan(from_f16) : isinf(from_f16));
        } else {
            assert_true((double)from_f16 == defined_value(bits, 5, 10));
            assert_int_equal(kvf_f16_from_f32(from_f16), bits);
        }
        float from_bf16 = kvf_f32_from_bf16((uint16_t)bits);
        if ((bits & 0x7f80) != 0x7f80) {
            assert_true((double)from_bf16 == defined_value(bits, 8, 7));
            assert_int_equal(kvf_bf16_from_f32(from_bf16), bits);
        }
    }
    for (uint32_t bits = 0; bits < 256; bits++) {
        float e4m3 = kvf_f32_from_f8e4m3((uint8_t)bits);
        if ((bits & 0x7f) == 0x7f) {
            assert_true(isnan(e4m3));
        } else {
            assert_true((double)e4m3 == defined_value(bits, 4, 3));
            assert_int_equal(kvf_f8e4m3_from_f32(e4m3), bits);
        }
        float e5m2 = kvf_f32_from_f8e5m2((uint8_t)bits);
        if ((bits & 0x7c) != 0x7c) {
            assert_true((double)e5m2 == defined_value(bits, 5, 2));
            assert_int_equal(kvf_f8e5m2_from_f32(e5m2), bits);
        }
    }
}

/* Between neighbours: the midpoint goes to the even one, what is beside it to the nearer one. */
static void narrowing_is_to_nearest_even(void **state)
{
    (void)state;
    for (uint32_t bits = 0; bits < 0x7bff; bits++) {
        float low = kvf_f32_from_f16((uint16_t)bits);
        float high = kvf_f32_from_f16((uint16_t)(bits + 1));
        float middle = 0.5f * (low + high);
        assert_int_equal(kvf_f16_from_f32(middle), bits + (bits & 1));
        assert_int_equal(kvf_f16_from_f32(nextafterf(middle, 0.0f)), bits);
        assert_int_equal(kvf_f16_from_f32(-nextafterf(middle, 1e9f)), 0x8000 | (bits + 1));
    }
    for (uint32_t bits = 0; bits < 0x7e; bits++) {
        float middle = 0.5f * (kvf_f32_from_f8e4m3((uint8_t)bits) +
                               kvf_f32_from_f8e4m3((uint8_t)(bits + 1)));
        assert_int_equal(kvf_f8e4m3_from_f32(middle), bits + (bits & 1));
    }
    for (uint32_t bits = 0; bits < 0x7b; bits++) {
        float middle = 0.5f * (kvf_f32_from_f8e5m2((uint8_t)bits) +
                               kvf_f32_from_f8e5m2((uint8_t)(bits + 1)));
        assert_int_equal(kvf_f8e5m2_from_f32(middle), bits + (bits & 1));
    }
}

static void finite_values_saturate(void **state)
{
    (void)state;
    assert_int_equal(kvf_f16_from_f32(1e30f), 0x7bff);
    assert_int_equal(kvf_f16_from_f32(-65520.0f), 0xfbff);
    assert_int_equal(kvf_f8e4m3_from_f32(500.0f), 0x7e);
    assert_int_equal(kvf_f8e5m2_from_f32(-1e9f), 0xfb);
}

static void directed_rounding_is_the_neighbour_on_that_side(void **state)
{
    (void)state;
    for (int i = 0; i < 300000; i++) {
        float value = kvf_f32_from_bits((uint32_t)kvf_random_seeded_next(&random_bits));
        if (i % 2 != 0) {
            value = fmodf(value, 70000.0f); /* most random bits are far out of range */
        }
        if (isnan(value)) {
            continue;
        }
        uint16_t down = kvf_f16_from_f32_directed(value, 0);
        uint16_t up = kvf_f16_from_f32_directed(value, 1);
        float low = kvf_f32_from_f16(down);
        float high = kvf_f32_from_f16(up);
        assert_true(low <= value || (isinf(value) && value > 0));
        assert_true(high >= value || (isinf(value) && value < 0));
        if (isfinite(value) && low != high) {
            /* adjacent: stepping one bit from the inner one gives the outer one */
            float between = 0.5f * (low + high);
            if (isfinite(between)) {
                assert_true(kvf_f16_from_f32(between) == down || kvf_f16_from_f32(between) == up);
            }
        }
    }
    assert_int_equal(kvf_f16_from_f32_directed(70000.0f, 1), 0x7c00);
    assert_int_equal(kvf_f16_from_f32_directed(70000.0f, 0), 0x7bff);
    assert_int_equal(kvf_f16_from_f32_directed(-70000.0f, 0), 0xfc00);
    assert_int_equal(kvf_f16_from_f32_directed(1e-30f, 1), 0x0001);
    assert_int_equal(kvf_f16_from_f32_directed(-1e-30f, 0), 0x8001);
    assert_int_equal(kvf_f16_from_f32_directed(1e-30f, 0), 0x0000);
}

static void assert_fused(float a, float b, float c)
{
    float want = fmaf(a, b, c);
    float have = kvf_fma_f32(a, b, c);
    if (!isnan(want)) {
        assert_int_equal(kvf_f32_bits(have), kvf_f32_bits(want));
    }
}

static void fused_operation_rounds_once(void **state)
{
    (void)state;
    for (int i = 0; i < 400000; i++) {
        uint64_t bits = kvf_random_seeded_next(&random_bits);
        /* values as in a decode: a factor of any size, an integer, an offset of similar size */
        float a = kvf_f32_from_bits((uint32_t)bits);
        float b = (float)((int32_t)(bits >> 32) >> 14);
        a = fabsf(a) > 1e30f ? 1.0f : a;
        float c = a * b * kvf_f32_from_bits(0x3f800000 ^ (uint32_t)(bits >> 20 & 0x7fffff));
        assert_fused(a, b, c);
        assert_fused(a, b, -c);
        /* a sum a hair off the middle between two floats, which two roundings get wrong */
        float one = 1.0f + (float)(bits & 0x3ff) * 0x1p-23f;
        assert_fused(0x1.000002p-12f, 0x1p-12f * (bits & 1 ? 1.0f : -1.0f), one);
        assert_fused(0x1.fffffep-13f, 0x1p-12f, one);
        assert_fused(0x1.000002p-24f, 1.0f, one);
    }
    assert_fused(0.0f, 5.0f, -0.0f);
    assert_fused(-0.0f, 5.0f, 0.0f);
    assert_fused(-0.0f, 5.0f, -0.0f);
}

/* -1/3 as the current rounding direction gives it. Not inlined: a compiler would be free to divide
 * after the direction has changed again. */
static __attribute__((noinline)) float minus_third(void)
{
    volatile float one = -1.0f;
    volatile float three = 3.0f;
    return one / three;
}

static void environment_is_set_and_restored(void **state)
{
    (void)state;
    assert_int_equal(fesetround(FE_UPWARD), 0);
    struct kvf_fp_state saved = kvf_fp_enter();
    float inside = minus_third();
    kvf_fp_leave(saved);
    float after = minus_third();
    assert_int_equal(fesetround(FE_TONEAREST), 0);
    assert_true(inside == -0x1.555556p-2f);
    assert_true(after == -0x1.555554p-2f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_narrow_value_widens_to_its_definition),
        cmocka_unit_test(narrowing_is_to_nearest_even),
        cmocka_unit_test(finite_values_saturate),
        cmocka_unit_test(directed_rounding_is_the_neighbour_on_that_side),
        cmocka_unit_test(fused_operation_rounds_once),
        cmocka_unit_test(environment_is_set_and_restored),
    };
    kvf_random_seeded_init(&random_bits, kvf_test_seed());
    return cmocka_run_group_tests(tests, NULL, NULL);
}
