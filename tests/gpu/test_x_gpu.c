/* SPDX-License-Identifier: Apache-2.0
 *
 * Layer inputs on a GPU: saw with zeros in place of lo, bytes equal to those of the C codecs both
 * ways. The same without a GPU, where KVF_EMULATED says so.
 */
#include "tests/gpu/codec_case.h"
#include "tests/gpu/codec_device.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static struct kvf_random_seeded random_bits;

static struct codec_case x_case(const char *profile, uint32_t group, uint32_t n_tokens)
{
    struct codec_case c = codec_case_of(profile, KVF_DTYPE_BF16, CASE_NHD, CASE_NORMAL);

    c.kind = KVF_KIND_X;
    c.dim_k = group;
    c.dim_v = 0;
    c.n_tokens = n_tokens;
    c.n_blocks = 1;
    return c;
}

static void run_case(const struct codec_case *c)
{
    assert_true(codec_case_run(c, &random_bits));
}

/* Zeros of every width and kind; lengths that end within a byte of them. */
static void every_width(void **state)
{
    (void)state;
    static const char *const profiles[] = {"x2",    "x3",       "x4",       "x6",      "x8",
                                           "x2-lo", "x2-paper", "x3-paper", "x4-paper"};
    static const uint32_t lengths[] = {53, 8, 1, 130, 27, 64};
    for (size_t i = 0; i < 2 * sizeof(profiles) / sizeof(profiles[0]); i++) {
        struct codec_case c = x_case(profiles[i / 2], 128, lengths[i % 6]);
        c.fill = i % 2 ? CASE_HARD : CASE_NORMAL;
        run_case(&c);
    }
}

/* Rows that end anywhere, where the decoders are those of bf16 groups of 128. */
static void every_length(void **state)
{
    (void)state;
    static const char *const profiles[] = {"x4", "x3", "x2"};
    static const uint32_t lengths[] = {256, 65, 127, 201, 12};
    static const enum case_layout layouts[] = {CASE_NHD, CASE_SLOTS, CASE_ELEMENT, CASE_PADDED};
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        struct codec_case c = x_case(profiles[i % 3], 128, lengths[i]);
        c.layout = layouts[i % 4];
        c.n_blocks = 2;
        c.n_tokens_odd = i % 2 ? lengths[i] / 2 : 0;
        c.tokens_a_page = i == 3 ? 3 : 0;
        c.sink_tokens = i % 3 == 1 ? 4 : 0;
        c.n_layers = 1;
        run_case(&c);
    }
}

/* What the kernels of 128 do not take: other groups, other types. */
static void every_type(void **state)
{
    (void)state;
    static const struct {
        int dtype;
        uint32_t group;
    } rows[] = {{KVF_DTYPE_F16, 128},
                {KVF_DTYPE_F32, 96},
                {KVF_DTYPE_BF16, 64},
                {KVF_DTYPE_BF16, 96},
                {KVF_DTYPE_F32, 128}};
    static const char *const profiles[] = {"x4", "x3", "x2"};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct codec_case c = x_case(profiles[i % 3], rows[i].group, 41);
        c.dtype = rows[i].dtype;
        c.fill = CASE_HARD;
        run_case(&c);
    }
}

/* Layers that are deltas, by every profile that has such: states in registers and not, blocks at
 * once and cut anywhere. */
static void every_loop(void **state)
{
    (void)state;
    static const char *const profiles[] = {
        "xcl4",    "xcl3",    "xcl2",    "xcl2-lo", "xcl4-paper", "xcl3-paper", "xcl2-paper",
        "xcl3-g8", "xcl3-g4", "xcl3-g2", "xcl2-g8", "xcl2-g4",    "xcl2-g2"};
    static const uint32_t lengths[] = {11, 1, 8, 23, 16};
    for (size_t i = 0; i < sizeof(profiles) / sizeof(profiles[0]); i++) {
        struct codec_case c = x_case(profiles[i], 128, lengths[i % 5]);
        c.n_layers = i % 6 == 0 ? 1 : 4 + (uint32_t)i % 9;
        c.n_heads = 2;
        c.n_blocks = 1 + i % 2;
        c.n_tokens_odd = i % 5 == 3 ? 5 : 0;
        c.sink_tokens = i % 3 == 2 && c.n_tokens > 3 ? 3 : 0;
        c.fill = i % 4 == 3 ? CASE_HARD : CASE_NORMAL;
        run_case(&c);
    }
}

/* Tokens of several tiles, warps and thread blocks, which end anywhere in one. */
static void every_loop_length(void **state)
{
    (void)state;
    static const char *const profiles[] = {"xcl3", "xcl2", "xcl4", "xcl3-g4"};
    static const uint32_t lengths[] = {70, 33, 64, 41, 97};
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        struct codec_case c = x_case(profiles[i % 4], 128, lengths[i]);
        c.n_layers = 5;
        c.n_heads = 1;
        c.n_blocks = 1 + i % 2;
        c.n_tokens_odd = i % 2 ? lengths[i] / 3 : 0;
        c.sink_tokens = i == 2 ? 9 : 0;
        c.fill = i % 3 == 1 ? CASE_HARD : CASE_NORMAL;
        run_case(&c);
    }
}

/* The same in other groups and types, and where vectors lie anywhere. */
static void every_loop_type(void **state)
{
    (void)state;
    static const struct {
        const char *profile;
        int dtype;
        uint32_t group;
        enum case_layout layout;
        enum case_fill fill;
    } rows[] = {{"xcl3", KVF_DTYPE_F16, 128, CASE_NHD, CASE_HARD},
                {"xcl2", KVF_DTYPE_F32, 128, CASE_PADDED, CASE_HARD},
                {"xcl3-g4", KVF_DTYPE_BF16, 128, CASE_ELEMENT, CASE_NORMAL},
                {"xcl2", KVF_DTYPE_BF16, 128, CASE_SLOTS, CASE_HARD},
                {"xcl4", KVF_DTYPE_BF16, 64, CASE_SLOTS, CASE_HARD},
                {"xcl3", KVF_DTYPE_BF16, 96, CASE_PADDED, CASE_HARD},
                {"xcl2-lo", KVF_DTYPE_F16, 112, CASE_ELEMENT, CASE_NORMAL},
                {"xcl3-g2", KVF_DTYPE_F32, 256, CASE_NHD, CASE_HARD},
                {"xcl3-paper", KVF_DTYPE_BF16, 80, CASE_NHD, CASE_HARD}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct codec_case c = x_case(rows[i].profile, rows[i].group, 13);
        c.dtype = rows[i].dtype;
        c.layout = rows[i].layout;
        c.fill = rows[i].fill;
        c.n_layers = 6;
        c.n_heads = 2;
        c.tokens_a_page = i % 3 == 0 ? 3 : 0;
        run_case(&c);
    }
}

/* Sums that are not numbers, and strips that are stored raw. */
static void broken_loops(void **state)
{
    (void)state;
    struct codec_case c = x_case("xcl3", 128, 32);
    c.n_layers = 5;
    c.fill = CASE_BROKEN;
    assert_false(codec_case_run(&c, &random_bits)); /* left to the processor */
    c.dim_k = 96;
    c.profile = "xcl2-g2";
    assert_false(codec_case_run(&c, &random_bits));
    c.fill = CASE_BITS;
    (void)codec_case_run(&c, &random_bits);
}

/* Latents of differences that a caller has made: layers are no deltas for kernels. */
static void every_latent(void **state)
{
    (void)state;
    static const char *const profiles[] = {"xgcl4", "xgcl3", "xgcl2", "xgcl3-d1", "xgcl2-d1"};
    for (size_t i = 0; i < sizeof(profiles) / sizeof(profiles[0]); i++) {
        struct codec_case c = x_case(profiles[i], i % 2 ? 64 : 128, 19);
        c.kind = KVF_KIND_XG;
        c.n_layers = 5;
        c.n_blocks = 2;
        c.fill = i % 2 ? CASE_HARD : CASE_NORMAL;
        run_case(&c);
    }
}

/* Changed bytes of a record do not lead the decoders out of the pages. */
static void hostile_records(void **state)
{
    (void)state;
    static const char *const profiles[] = {"x4", "x3", "x2", "x8", "x4-paper"};
    static const char *const looped[] = {"xcl3", "xcl2-lo", "xcl4", "xcl3-paper"};
    for (size_t i = 0; i < sizeof(profiles) / sizeof(profiles[0]); i++) {
        struct codec_case c = x_case(profiles[i], 128, 130);
        c.sink_tokens = 2;
        codec_case_run_hostile(&c, &random_bits);
    }
    for (size_t i = 0; i < sizeof(looped) / sizeof(looped[0]); i++) {
        struct codec_case c = x_case(looped[i], i % 2 ? 96 : 128, 19);
        c.n_layers = 5;
        c.sink_tokens = 2;
        codec_case_run_hostile(&c, &random_bits);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_width),       cmocka_unit_test(every_length),
        cmocka_unit_test(every_type),        cmocka_unit_test(every_loop),
        cmocka_unit_test(every_loop_length), cmocka_unit_test(every_loop_type),
        cmocka_unit_test(broken_loops),      cmocka_unit_test(every_latent),
        cmocka_unit_test(hostile_records),
    };
    if (!codec_case_begin(&random_bits)) {
        return CASE_SKIPPED;
    }
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    codec_device_close();
    return failures;
}
