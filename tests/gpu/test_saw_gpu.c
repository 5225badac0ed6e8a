/* SPDX-License-Identifier: Apache-2.0
 *
 * saw on a GPU: bytes equal to those of the C codecs both ways.
 */
#include "codec/codec_gpu_image.h"
#include "tests/gpu/codec_case.h"
#include "tests/gpu/codec_device.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <cmocka.h>

extern const struct kvf_gpu_image kvf_test_images[];

static struct kvf_random_seeded random_bits;

static const char *const profiles[] = {"balanced",    "safe",        "saw8",        "saw4-paper",
                                       "saw6",        "saw5",        "saw3",        "saw2",
                                       "saw3-search", "saw2-search", "saw4-search9"};

enum {
    PROFILES = sizeof(profiles) / sizeof(profiles[0])
};

static void run_case(const struct codec_case *c)
{
    assert_true(codec_case_run(c, &random_bits));
}

/* Every kernel on tensor cores, with and without mean, on ordinary values and hard ones. */
static void every_width(void **state)
{
    (void)state;
    static const uint32_t dims[] = {64, 128, 256};
    for (size_t i = 0; i < PROFILES * 3; i++) {
        struct codec_case c = codec_case_sized(profiles[i / 3], dims[i % 3], 256);
        run_case(&c);
        c.fill = CASE_NORMAL;
        c.n_tokens = 100;
        run_case(&c);
    }
}

static void every_layout(void **state)
{
    (void)state;
    for (int layout = 0; layout < CASE_LAYOUTS; layout++) {
        struct codec_case c = codec_case_sized("balanced", 128, 256);
        c.layout = (enum case_layout)layout;
        c.n_heads = layout % 2 ? 5 : 1;
        run_case(&c);
        c.profile = "saw3";
        c.dim_k = 64;
        run_case(&c);
        c.dtype = KVF_DTYPE_F16;
        c.n_tokens = 33;
        run_case(&c);
    }
}

/* Tiles of 8 vectors that are not full, rows shorter than a mean needs. */
static void every_length(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {1, 5, 7, 8, 9, 15, 63, 64, 65, 127, 128, 129, 200, 255};
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        struct codec_case c = codec_case_sized("balanced", 128, lengths[i]);
        run_case(&c);
        c = codec_case_sized("saw8", i % 2 ? 64 : 256, lengths[i]);
        run_case(&c);
        c = codec_case_sized("balanced", 96, lengths[i]);
        run_case(&c);
    }
}

static void every_sink(void **state)
{
    (void)state;
    static const uint32_t sinks[] = {1, 4, 64, 130, 200};
    for (size_t i = 0; i < sizeof(sinks) / sizeof(sinks[0]); i++) {
        struct codec_case c = codec_case_sized(i % 2 ? "safe" : "balanced", 128, 200);
        c.sink_tokens = sinks[i];
        run_case(&c);
        c.dtype = KVF_DTYPE_F32;
        run_case(&c);
    }
}

/* The generic kernels: every dtype, rotations of all kinds and none. */
static void every_type(void **state)
{
    (void)state;
    static const uint32_t dims[] = {128, 80, 96, 112, 192, 256, 24, 100, 7, 1, 28, 512, 320};
    static const int types[] = {KVF_DTYPE_F16, KVF_DTYPE_F32, KVF_DTYPE_F8E4M3, KVF_DTYPE_F8E5M2,
                                KVF_DTYPE_BF16};
    for (size_t i = 0; i < sizeof(dims) / sizeof(dims[0]) * 5; i++) {
        struct codec_case c = codec_case_sized(profiles[i % PROFILES], dims[i / 5],
                                               i % 2 ? 130 : 40);
        c.dtype = types[i % 5];
        c.dim_v = dims[(i / 5 + 1) % (sizeof(dims) / sizeof(dims[0]))];
        c.layout = (enum case_layout)(i % CASE_FAR);
        /* vectors of an element or a few are escapes too often, so the result may be false */
        (void)codec_case_run(&c, &random_bits);
        c.fill = CASE_NORMAL;
        (void)codec_case_run(&c, &random_bits);
    }
}

/* K and V of different kernels, V missing, heads that are cut into rows. */
static void unlike_tensors(void **state)
{
    (void)state;
    static const uint32_t dims[][2] = {{64, 128}, {128, 64},   {256, 96}, {128, 0},
                                       {512, 64}, {1024, 128}, {192, 0}};
    for (size_t i = 0; i < sizeof(dims) / sizeof(dims[0]); i++) {
        struct codec_case c = codec_case_sized(i % 2 ? "safe" : "balanced", dims[i][0], 144);
        c.dim_v = dims[i][1];
        c.n_heads = 1 + (uint32_t)i % 2;
        c.n_layers = 1;
        run_case(&c);
    }
}

/* Thread blocks that take row after row: means by turns, tiles asked for across the ends of rows,
 * more rows than are known at a time; rows of which some warps have no tile, of some few, blocks of
 * different lengths, pages and addresses of any kind. */
static void few_thread_blocks(void **state)
{
    (void)state;
    static const struct {
        const char *profile;
        uint32_t dim;
        uint32_t n_tokens;
        uint32_t n_tokens_odd;
        enum case_layout layout;
    } rows[] = {
        {"safe", 128, 200, 0, CASE_HND},         {"balanced", 128, 256, 130, CASE_HND},
        {"balanced", 128, 200, 56, CASE_NHD},    {"balanced", 64, 224, 0, CASE_ELEMENT},
        {"saw5", 256, 200, 0, CASE_HND},         {"balanced", 256, 256, 144, CASE_ELEMENT},
        {"saw8", 256, 255, 3, CASE_ELEMENT},     {"saw8", 128, 100, 33, CASE_SLOTS},
        {"balanced", 256, 60, 9, CASE_ELEMENT},  {"saw3", 64, 31, 8, CASE_PADDED},
        {"saw3-search", 128, 200, 56, CASE_HND}, {"saw2-search", 128, 256, 0, CASE_ELEMENT},
    };
    for (size_t i = 0; i < 3 * sizeof(rows) / sizeof(rows[0]); i++) {
        struct codec_case c = codec_case_sized(rows[i / 3].profile, rows[i / 3].dim,
                                               rows[i / 3].n_tokens);
        c.n_tokens_odd = rows[i / 3].n_tokens_odd;
        c.layout = rows[i / 3].layout;
        c.n_layers = 5;
        c.n_heads = 9;
        c.sink_tokens = i % 2 ? 4 : 0;
        c.fill = i % 3 == 0 ? CASE_HARD : CASE_NORMAL;
        codec_device_limit(1 + (uint32_t)(i + i / 3) % 3); /* each fill with each limit */
        run_case(&c);
    }
    codec_device_limit(0);
}

static void hostile_records(void **state)
{
    (void)state;
    for (size_t i = 0; i < PROFILES; i++) {
        struct codec_case c = codec_case_sized(profiles[i], i % 2 ? 128 : 96, 130);
        c.sink_tokens = 2;
        codec_case_run_hostile(&c, &random_bits);
    }
}

static void order_of_additions(void **state)
{
    (void)state;
    for (uint32_t dim = 64; dim <= 256; dim *= 2) {
        struct codec_case c = codec_case_sized("safe", dim, 256);
        c.fill = CASE_ALIGNED;
        run_case(&c);
        c.profile = "balanced";
        run_case(&c);
        c.profile = "saw8";
        c.fill = CASE_TIES;
        run_case(&c);
    }
}

/* Two ratios are nearly alike: the order of the sums that are compared. */
static void near_ties(void **state)
{
    (void)state;
    static const char *const searches[] = {"saw3-search", "saw2-search", "saw4-search9"};
    for (size_t i = 0; i < sizeof(searches) / sizeof(searches[0]); i++) {
        struct codec_case c = codec_case_sized(searches[i], 128, 120);
        c.fill = CASE_NEAR_TIES;
        c.n_blocks = 1;
        run_case(&c);
        c.dtype = KVF_DTYPE_F32;
        run_case(&c);
    }
}

/* Would the input of order_of_additions show a wrong one? */
static void swapped_stages(void **state)
{
    (void)state;
    struct codec_case c = codec_case_sized("safe", 128, 256);
    c.fill = CASE_ALIGNED;
    c.is_wrong = true;
    codec_device_replace(kvf_test_images[0].fatbin, "kvf_saw_encode_128_8",
                         "kvf_test_saw_encode_swapped");
    run_case(&c);
    codec_device_restore();
}

/* The kernels' reciprocal of a scale (reciprocal_of_half in codec_saw_device.cuh): one step from an
 * estimate that may be off by two units in the last place is the rounded quotient. */
static void reciprocal_is_rounded(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 1024; i++) {
        float x = 1.0f + (float)i / 1024.0f; /* other exponents scale all of it */
        for (int off = -2; off <= 2; off++) {
            float estimate = 1.0f / x * (1.0f + (float)off * 0x1p-24f);
            float step = fmaf(estimate, fmaf(-x, estimate, 1.0f), estimate);
            assert_true(step == 1.0f / x);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_width),     cmocka_unit_test(every_layout),
        cmocka_unit_test(every_length),    cmocka_unit_test(every_sink),
        cmocka_unit_test(every_type),      cmocka_unit_test(unlike_tensors),
        cmocka_unit_test(hostile_records), cmocka_unit_test(order_of_additions),
        cmocka_unit_test(near_ties),       cmocka_unit_test(few_thread_blocks),
        cmocka_unit_test(swapped_stages),  cmocka_unit_test(reciprocal_is_rounded),
    };
    if (!codec_case_begin(&random_bits)) {
        return CASE_SKIPPED;
    }
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    codec_device_close();
    return failures;
}
