/* SPDX-License-Identifier: Apache-2.0
 *
 * Raw parts and the raw area on a GPU: bytes equal to those of the C codecs both ways.
 */
#include "tests/gpu/codec_case.h"
#include "tests/gpu/codec_device.h"
#include "tests/support/support.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <cmocka.h>

enum {
    SKIPPED = 77
};

static struct kvf_random_seeded random_bits;

static struct codec_case raw_case(const char *profile, int dtype, enum case_layout layout)
{
    return (struct codec_case){
        .profile = profile,
        .dtype = dtype,
        .n_layers = 2,
        .n_heads = 3,
        .dim_k = 128,
        .dim_v = 128,
        .n_tokens = 53,
        .n_blocks = 2,
        .layout = layout,
        .fill = CASE_BITS,
    };
}

static void every_layout(void **state)
{
    (void)state;
    for (int layout = 0; layout < CASE_LAYOUTS; layout++) {
        for (int dtype = KVF_DTYPE_BF16; dtype <= KVF_DTYPE_U8; dtype++) {
            struct codec_case c = raw_case("raw", dtype, (enum case_layout)layout);
            assert_true(codec_case_run(&c, &random_bits));
        }
    }
}

static void every_shape(void **state)
{
    (void)state;
    static const struct {
        uint32_t n_heads;
        uint32_t dim_k;
        uint32_t dim_v;
        uint32_t n_tokens;
    } shapes[] = {
        {1, 64, 64, 1}, {5, 80, 96, 17},  {1, 512, 64, 256}, {1, 1, 0, 256},
        {2, 63, 9, 29}, {8, 128, 64, 16}, {1, 1024, 0, 40},  {3, 100, 12, 100},
    };
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        struct codec_case c = raw_case("raw", i % 3 == 2 ? KVF_DTYPE_F8E4M3 : KVF_DTYPE_F16,
                                       CASE_NHD);
        c.n_heads = shapes[i].n_heads;
        c.dim_k = shapes[i].dim_k;
        c.dim_v = shapes[i].dim_v;
        c.n_tokens = shapes[i].n_tokens;
        assert_true(codec_case_run(&c, &random_bits));
    }
}

/* fp16 and fp8 have no form of exact: the plan is of raw tensors. */
static void exact_of_other_types(void **state)
{
    (void)state;
    struct codec_case c = raw_case("exact", KVF_DTYPE_F16, CASE_HND);
    assert_true(codec_case_run(&c, &random_bits));
    c.dtype = KVF_DTYPE_F8E5M2;
    assert_true(codec_case_run(&c, &random_bits));
}

/* Sinks, escapes, both, none: the raw area of coded blocks. */
static void raw_areas(void **state)
{
    (void)state;
    static const char *const profiles[] = {"balanced", "safe", "saw8", "saw4-paper"};
    static const uint32_t sinks[] = {0, 4, 53, 1};
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < 4; j++) {
            struct codec_case c = raw_case(profiles[i], KVF_DTYPE_BF16,
                                           (enum case_layout)((4 * i + j) % CASE_ELEMENT));
            c.fill = j == 3 ? CASE_NORMAL : CASE_HARD;
            c.sink_tokens = sinks[j];
            assert_true(codec_case_run(&c, &random_bits));
            c.n_tokens = 160;
            c.n_layers = 1;
            assert_true(codec_case_run(&c, &random_bits));
        }
    }
}

/* Rows of a wide head, and a raw tensor beside a coded one. */
static void raw_areas_of_mla(void **state)
{
    (void)state;
    struct codec_case c = raw_case("balanced", KVF_DTYPE_BF16, CASE_NHD);
    c.is_mla = true;
    c.n_layers = 3;
    c.n_heads = 1;
    c.dim_k = 512;
    c.dim_v = 64;
    c.fill = CASE_HARD;
    c.sink_tokens = 2;
    assert_true(codec_case_run(&c, &random_bits));
    c.dim_v = 0;
    c.is_mla = false;
    assert_true(codec_case_run(&c, &random_bits));
}

/* More escapes than the format has room for: the host has to encode this block, and no other. */
static void too_many_escapes(void **state)
{
    (void)state;
    struct codec_case c = raw_case("balanced", KVF_DTYPE_BF16, CASE_NHD);
    c.fill = CASE_BROKEN;
    assert_false(codec_case_run(&c, &random_bits));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_layout),         cmocka_unit_test(every_shape),
        cmocka_unit_test(exact_of_other_types), cmocka_unit_test(raw_areas),
        cmocka_unit_test(raw_areas_of_mla),     cmocka_unit_test(too_many_escapes),
    };
    kvf_random_seeded_init(&random_bits, kvf_test_seed());
    if (!codec_device_open()) {
        return SKIPPED;
    }
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    codec_device_close();
    return failures;
}
