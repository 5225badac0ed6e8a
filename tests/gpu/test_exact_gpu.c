/* SPDX-License-Identifier: Apache-2.0
 *
 * The lossless codec on a GPU: bytes equal to those of the C codec both ways, and records that lie.
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

static struct codec_case exact_case(int dtype, enum case_layout layout, enum case_fill fill)
{
    return (struct codec_case){
        .profile = "exact",
        .dtype = dtype,
        .n_layers = 2,
        .n_heads = 3,
        .dim_k = 128,
        .dim_v = 128,
        .n_tokens = 53,
        .n_blocks = 2,
        .layout = layout,
        .fill = fill,
    };
}

static void every_layout(void **state)
{
    (void)state;
    for (int layout = 0; layout < CASE_LAYOUTS; layout++) {
        struct codec_case c = exact_case(KVF_DTYPE_BF16, (enum case_layout)layout, CASE_HARD);
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
            struct codec_case c = exact_case(dtypes[i], CASE_NHD, (enum case_fill)fill);
            assert_true(codec_case_run(&c, &random_bits));
            c.layout = CASE_ELEMENT;
            assert_true(codec_case_run(&c, &random_bits));
        }
    }
}

/* Chunks of all lengths: odd dims, one vector a chunk, ends of rows. */
static void every_shape(void **state)
{
    (void)state;
    static const struct {
        uint32_t n_heads;
        uint32_t dim_k;
        uint32_t dim_v;
        uint32_t n_tokens;
    } shapes[] = {
        {1, 64, 64, 1},     {5, 96, 96, 17},  {3, 80, 80, 16},   {2, 112, 112, 31},
        {1, 192, 128, 33},  {1, 256, 256, 8}, {3, 128, 64, 256}, {1, 1024, 0, 5},
        {2, 63, 1, 29},     {1, 7, 13, 150},  {1, 576, 0, 64},   {8, 128, 128, 16},
        {2, 1000, 514, 11}, {1, 1, 0, 256},
    };
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        struct codec_case c = exact_case(i % 4 == 3 ? KVF_DTYPE_F32 : KVF_DTYPE_BF16, CASE_NHD,
                                         i % 2 != 0 ? CASE_WIDE : CASE_NORMAL);
        c.n_heads = shapes[i].n_heads;
        c.dim_k = shapes[i].dim_k;
        c.dim_v = shapes[i].dim_v;
        c.n_tokens = shapes[i].n_tokens;
        assert_true(codec_case_run(&c, &random_bits));
    }
}

/* K exact and V raw: only the device knows where the raw parts begin. */
static void mixed_with_raw(void **state)
{
    (void)state;
    struct codec_case c = exact_case(KVF_DTYPE_BF16, CASE_NHD, CASE_NORMAL);
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
    struct codec_case c = exact_case(KVF_DTYPE_BF16, CASE_HND, CASE_NORMAL);
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
        struct codec_case c = exact_case(i % 3 == 2 ? KVF_DTYPE_F32 : KVF_DTYPE_BF16,
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
    kvf_random_seeded_init(&random_bits, kvf_test_seed());
    if (!codec_device_open()) {
        return SKIPPED;
    }
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    codec_device_close();
    return failures;
}
