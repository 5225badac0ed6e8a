/* SPDX-License-Identifier: Apache-2.0
 *
 * Raw parts and the raw area on a GPU: bytes equal to those of the C codecs both ways.
 */
#include "tests/gpu/codec_case.h"
#include "tests/gpu/codec_device.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <cmocka.h>

static struct kvf_random_seeded random_bits;

static void every_layout(void **state)
{
    (void)state;
    for (int layout = 0; layout < CASE_LAYOUTS; layout++) {
        for (int dtype = KVF_DTYPE_BF16; dtype <= KVF_DTYPE_U8; dtype++) {
            struct codec_case c = codec_case_of("raw", dtype, (enum case_layout)layout, CASE_BITS);
            assert_true(codec_case_run(&c, &random_bits));
        }
    }
}

static void every_shape(void **state)
{
    struct codec_case c = codec_case_of("raw", KVF_DTYPE_F16, CASE_NHD, CASE_BITS);

    (void)state;
    for (size_t i = 0; codec_case_shape(&c, i); i++) {
        c.dtype = i % 3 == 2 ? KVF_DTYPE_F8E4M3 : KVF_DTYPE_F16;
        assert_true(codec_case_run(&c, &random_bits));
    }
}

/* fp16 and fp8 have no form of exact: the plan is of raw tensors. */
static void exact_of_other_types(void **state)
{
    (void)state;
    struct codec_case c = codec_case_of("exact", KVF_DTYPE_F16, CASE_HND, CASE_BITS);
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
            struct codec_case c = codec_case_of(profiles[i], KVF_DTYPE_BF16,
                                                (enum case_layout)((4 * i + j) % CASE_ELEMENT),
                                                CASE_BITS);
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
    struct codec_case c = codec_case_of("balanced", KVF_DTYPE_BF16, CASE_NHD, CASE_BITS);
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
    struct codec_case c = codec_case_of("balanced", KVF_DTYPE_BF16, CASE_NHD, CASE_BITS);
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
    if (!codec_case_begin(&random_bits)) {
        return CASE_SKIPPED;
    }
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    codec_device_close();
    return failures;
}
