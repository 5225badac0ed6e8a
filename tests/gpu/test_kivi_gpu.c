/* SPDX-License-Identifier: Apache-2.0
 *
 * kivi on a GPU: bytes equal to those of the C codecs both ways. The same without a GPU, where
 * KVF_EMULATED says so.
 */
#include "tests/gpu/codec_case.h"
#include "tests/gpu/codec_device.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static struct kvf_random_seeded random_bits;

static const char *const profiles[] = {"kivi4-g32", "kivi2-g64", "kivi4-g128",
                                       "kivi2-g32", "kivi4-g64", "kivi2-g128"};

enum {
    PROFILES = sizeof(profiles) / sizeof(profiles[0])
};

static void run_case(const struct codec_case *c)
{
    assert_true(codec_case_run(c, &random_bits));
}

/* Groups of every size that the last tokens fill, or do not, in tiles that they fill or do not. */
static void every_group(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {256, 129, 143, 100, 64, 225};
    for (size_t i = 0; i < PROFILES * sizeof(lengths) / sizeof(lengths[0]); i++) {
        struct codec_case c = codec_case_sized(profiles[i % PROFILES], 128, lengths[i / PROFILES]);
        c.n_tokens_odd = i % 4 == 3 ? lengths[i / PROFILES] - 37 : 0;
        c.fill = i % 3 == 0 ? CASE_NORMAL : CASE_HARD;
        c.n_layers = 1;
        run_case(&c);
    }
}

static void every_layout(void **state)
{
    (void)state;
    for (int layout = 0; layout < CASE_FAR; layout++) {
        struct codec_case c = codec_case_sized(profiles[layout % PROFILES], 128, 150);
        c.layout = (enum case_layout)layout;
        c.n_heads = layout % 2 ? 5 : 1;
        c.tokens_a_page = layout == CASE_NHD ? 3 : 0;
        run_case(&c);
        c.dtype = KVF_DTYPE_F16;
        c.n_blocks = 1;
        run_case(&c);
    }
}

#ifndef KVF_EMULATED
/* It takes more memory than a machine may have. */
static void far_pages(void **state)
{
    (void)state;
    struct codec_case c = codec_case_sized("kivi4-g32", 128, 150);
    c.layout = CASE_FAR;
    run_case(&c);
    c.dtype = KVF_DTYPE_F16;
    run_case(&c);
}
#endif

static void every_sink(void **state)
{
    (void)state;
    static const uint32_t sinks[] = {1, 4, 32, 70, 130};
    for (size_t i = 0; i < sizeof(sinks) / sizeof(sinks[0]); i++) {
        struct codec_case c = codec_case_sized(profiles[i], 128, 150);
        c.sink_tokens = sinks[i];
        run_case(&c);
        c.dtype = KVF_DTYPE_F32;
        c.n_blocks = 1;
        run_case(&c);
    }
}

/* The generic kernels. */
static void every_type(void **state)
{
    (void)state;
    static const uint32_t dims[] = {96, 64, 200, 28, 256, 33};
    static const int types[] = {KVF_DTYPE_F16, KVF_DTYPE_F32, KVF_DTYPE_F8E4M3, KVF_DTYPE_F8E5M2,
                                KVF_DTYPE_BF16};
    for (size_t i = 0; i < sizeof(dims) / sizeof(dims[0]) * 5; i++) {
        struct codec_case c = codec_case_sized(profiles[i % PROFILES], dims[i / 5],
                                               i % 2 ? 130 : 80);
        c.dtype = types[i % 5];
        c.dim_v = dims[(i / 5 + 1) % (sizeof(dims) / sizeof(dims[0]))];
        c.layout = (enum case_layout)(i % CASE_FAR);
        c.n_layers = 1;
        c.n_blocks = 1;
        /* fp8 with a word for four bytes or so may be no smaller than raw */
        (void)codec_case_run(&c, &random_bits);
        c.fill = CASE_NORMAL;
        (void)codec_case_run(&c, &random_bits);
    }
}

/* K and V of different kernels, V missing, heads of as many elements as there can be. */
static void unlike_tensors(void **state)
{
    (void)state;
    static const uint32_t dims[][2] = {{64, 128}, {128, 64}, {128, 0}, {1024, 128}, {576, 0}};
    for (size_t i = 0; i < sizeof(dims) / sizeof(dims[0]); i++) {
        struct codec_case c = codec_case_sized(profiles[i], dims[i][0], 144);
        c.dim_v = dims[i][1];
        c.n_heads = 1 + (uint32_t)i % 2;
        c.n_layers = 1;
        c.is_mla = c.dim_v == 0;
        run_case(&c);
    }
}

/* Tokens so few that raw is no larger, and not quite so few; too many escapes. */
static void host_has_to(void **state)
{
    (void)state;
    struct codec_case c = codec_case_sized("kivi4-g32", 128, 1);
    assert_false(codec_case_run(&c, &random_bits));
    c.n_tokens = 3;
    c.fill = CASE_NORMAL;
    run_case(&c);
    c.n_tokens = 200;
    c.n_tokens_odd = 1;
    assert_false(codec_case_run(&c, &random_bits));
    c.n_tokens_odd = 0;
    c.fill = CASE_BROKEN;
    assert_false(codec_case_run(&c, &random_bits));
}

/* Changed bytes of a record do not lead the decoders out of the pages. */
static void hostile_records(void **state)
{
    (void)state;
    for (size_t i = 0; i < PROFILES; i++) {
        struct codec_case c = codec_case_sized(profiles[i], i % 2 ? 128 : 96, 130);
        c.sink_tokens = 2;
        codec_case_run_hostile(&c, &random_bits);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#ifndef KVF_EMULATED
        cmocka_unit_test(far_pages),
#endif
        cmocka_unit_test(every_group),     cmocka_unit_test(every_layout),
        cmocka_unit_test(every_sink),      cmocka_unit_test(every_type),
        cmocka_unit_test(unlike_tensors),  cmocka_unit_test(host_has_to),
        cmocka_unit_test(hostile_records),
    };
    if (!codec_case_begin(&random_bits)) {
        return CASE_SKIPPED;
    }
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    codec_device_close();
    return failures;
}
