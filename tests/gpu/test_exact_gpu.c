/* SPDX-License-Identifier: Apache-2.0
 *
 * The lossless codec on a GPU: bytes equal to those of the C codec both ways, and records that lie.
 * The same without a GPU, where KVF_EMULATED says so.
 */
#include "tests/gpu/codec_case.h"
#include "tests/gpu/codec_device.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <cmocka.h>

/* Far pages take more memory than a machine may have. */
#ifdef KVF_EMULATED
#define LAYOUTS CASE_FAR
#else
#define LAYOUTS CASE_LAYOUTS
#endif

static struct kvf_random_seeded random_bits;

static void every_layout(void **state)
{
    (void)state;
    for (int layout = 0; layout < LAYOUTS; layout++) {
        struct codec_case c = codec_case_of("exact", KVF_DTYPE_BF16, (enum case_layout)layout,
                                            CASE_HARD);
        assert_true(codec_case_run(&c, &random_bits));
        c.dtype = KVF_DTYPE_F32;
        assert_true(codec_case_run(&c, &random_bits));
    }
}

/* Escapes, uncoded chunks, tensors that do not pay, exponents that a window does not cover. */
static void every_kind_of_values(void **state)
{
    (void)state;
    static const int dtypes[] = {KVF_DTYPE_BF16, KVF_DTYPE_F32};
    for (int i = 0; i < 2; i++) {
        for (int fill = 0; fill < CASE_BROKEN; fill++) {
            struct codec_case c = codec_case_of("exact", dtypes[i], CASE_NHD, (enum case_fill)fill);
            assert_true(codec_case_run(&c, &random_bits));
            c.layout = CASE_ELEMENT;
            assert_true(codec_case_run(&c, &random_bits));
        }
    }
}

static void every_shape(void **state)
{
    struct codec_case c = codec_case_of("exact", KVF_DTYPE_BF16, CASE_NHD, CASE_NORMAL);

    (void)state;
    for (size_t i = 0; codec_case_shape(&c, i); i++) {
        c.dtype = i % 4 == 3 ? KVF_DTYPE_F32 : KVF_DTYPE_BF16;
        c.fill = i % 2 != 0 ? CASE_WIDE : CASE_NORMAL;
        assert_true(codec_case_run(&c, &random_bits));
    }
}

/* K exact and V raw: only the device knows where the raw parts begin. */
static void mixed_with_raw(void **state)
{
    (void)state;
    struct codec_case c = codec_case_of("exact", KVF_DTYPE_BF16, CASE_NHD, CASE_NORMAL);
    c.is_mla = true;
    c.n_layers = 3;
    c.n_heads = 1;
    c.dim_k = 512;
    c.dim_v = 64;
    assert_true(codec_case_run(&c, &random_bits));
    c.fill = CASE_TORN;
    assert_true(codec_case_run(&c, &random_bits));
}

static void many_layers(void **state)
{
    (void)state;
    struct codec_case c = codec_case_of("exact", KVF_DTYPE_BF16, CASE_HND, CASE_NORMAL);
    c.n_layers = 512;
    c.n_heads = 1;
    c.dim_k = 64;
    c.dim_v = 64;
    c.n_tokens = 16;
    assert_true(codec_case_run(&c, &random_bits));
}

static void hostile_records(void **state)
{
    (void)state;
    for (int i = 0; i < 12; i++) {
        struct codec_case c = codec_case_of("exact", i % 3 == 2 ? KVF_DTYPE_F32 : KVF_DTYPE_BF16,
                                            (enum case_layout)(i % CASE_FAR),
                                            i % 2 != 0 ? CASE_TORN : CASE_HARD);
        c.n_layers = 1;
        codec_case_run_hostile(&c, &random_bits);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_layout), cmocka_unit_test(every_kind_of_values),
        cmocka_unit_test(every_shape),  cmocka_unit_test(mixed_with_raw),
        cmocka_unit_test(many_layers),  cmocka_unit_test(hostile_records),
    };
    if (!codec_case_begin(&random_bits)) {
        return CASE_SKIPPED;
    }
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    codec_device_close();
    return failures;
}
