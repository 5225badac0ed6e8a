/* SPDX-License-Identifier: Apache-2.0
 *
 * saw's fast kernels without a GPU: bytes equal to those of the C codecs both ways, whatever order
 * warps run in and copies come in.
 */
#include "tests/gpu/codec_case.h"
#include "tests/gpu/codec_device.h"
#include "tests/gpu/emulate/kernels.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <cmocka.h>

static struct kvf_random_seeded random_bits;

static struct codec_case saw_case(const char *profile, uint32_t dim, uint32_t n_tokens)
{
    struct codec_case c = codec_case_sized(profile, dim, n_tokens);

    c.n_blocks = 1;
    c.fill = CASE_NORMAL;
    return c;
}

static void run_case(const struct codec_case *c)
{
    assert_true(codec_case_run(c, &random_bits));
}

/* Thread blocks that take row after row, as in test_saw_gpu.c: of 18 rows and more one or two have
 * all. */
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
        {"safe", 128, 200, 0, CASE_HND},        {"balanced", 128, 256, 130, CASE_HND},
        {"balanced", 128, 200, 56, CASE_NHD},   {"balanced", 64, 224, 0, CASE_ELEMENT},
        {"saw5", 256, 200, 0, CASE_HND},        {"balanced", 256, 256, 144, CASE_ELEMENT},
        {"saw8", 256, 255, 3, CASE_ELEMENT},    {"saw8", 128, 100, 33, CASE_SLOTS},
        {"balanced", 256, 60, 9, CASE_ELEMENT}, {"saw3", 64, 31, 8, CASE_PADDED},
    };
    for (size_t i = 0; i < 2 * sizeof(rows) / sizeof(rows[0]); i++) {
        struct codec_case c = saw_case(rows[i / 2].profile, rows[i / 2].dim, rows[i / 2].n_tokens);
        c.n_tokens_odd = rows[i / 2].n_tokens_odd;
        c.layout = rows[i / 2].layout;
        c.n_layers = 3;
        c.n_blocks = 2;
        c.sink_tokens = i % 2 ? 4 : 0;
        c.fill = i % 2 ? CASE_HARD : CASE_NORMAL;
        codec_device_limit(1 + (uint32_t)i % 2);
        run_case(&c);
    }
    codec_device_limit(0);
}

/* Rows that end anywhere; from 193 to 224 tokens on the last warps have no tile of a row that has a
 * mean. Pages of one token and of three, vectors on no more than an element. */
static void every_length(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {1, 8, 9, 33, 65, 127, 128, 129, 193, 200, 216, 224};
    static const enum case_layout layouts[] = {CASE_HND, CASE_ELEMENT, CASE_PADDED};
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        struct codec_case c = saw_case("balanced", 128, lengths[i]);
        c.layout = layouts[i % 3];
        c.tokens_a_page = i % 4 == 0 ? 3 : i % 4 == 1 ? 1 : 0;
        c.sink_tokens = i % 5 == 3 ? 4 : 0;
        codec_device_limit(1);
        run_case(&c);
    }
    codec_device_limit(0);
}

/* Kernels of K alone and of V alone, no V, and K of more rows than V by one kernel. */
static void unlike_tensors(void **state)
{
    (void)state;
    static const uint32_t dims[][2] = {{64, 128}, {128, 64}, {256, 128}, {128, 0}, {512, 256}};
    for (size_t i = 0; i < sizeof(dims) / sizeof(dims[0]); i++) {
        struct codec_case c = saw_case("balanced", dims[i][0], 208);
        c.dim_v = dims[i][1];
        codec_device_limit(1 + (uint32_t)i % 3);
        run_case(&c);
    }
    codec_device_limit(0);
}

static void every_width(void **state)
{
    (void)state;
    static const char *const profiles[] = {"saw2", "saw6", "saw8"};
    for (size_t i = 0; i < sizeof(profiles) / sizeof(profiles[0]); i++) {
        struct codec_case c = saw_case(profiles[i], 128, 150);
        c.fill = CASE_HARD;
        codec_device_limit(2);
        run_case(&c);
    }
    for (uint32_t dim = 64; dim <= 256; dim *= 2) {
        struct codec_case c = saw_case("saw3", dim, 150);
        c.fill = CASE_HARD;
        run_case(&c);
    }
    codec_device_limit(0);
}

/* Ratios that are tried, three and nine. The fast kernels; the generic ones: dtypes, rows of fewer
 * positions than there are partial sums, vectors of an odd number of them. */
static void searches(void **state)
{
    (void)state;
    static const struct {
        const char *profile;
        int dtype;
        uint32_t dim;
        uint32_t n_tokens;
        bool is_fast;
    } rows[] = {
        {"saw3-search", KVF_DTYPE_BF16, 128, 200, true},
        {"saw2-search", KVF_DTYPE_BF16, 128, 130, true},
        {"saw3-search", KVF_DTYPE_BF16, 128, 60, true},
        {"saw3-search", KVF_DTYPE_BF16, 64, 40, false},
        {"saw4-search9", KVF_DTYPE_BF16, 128, 40, false},
        {"saw3-search9", KVF_DTYPE_F16, 96, 33, false},
        {"saw2-search9", KVF_DTYPE_F32, 256, 20, false},
        {"saw3-search", KVF_DTYPE_F8E4M3, 28, 130, false},
        {"saw2-search", KVF_DTYPE_F8E5M2, 7, 40, false},
        {"saw4-search9", KVF_DTYPE_F32, 100, 24, false},
    };
    for (size_t i = 0; i < 2 * sizeof(rows) / sizeof(rows[0]); i++) {
        struct codec_case c = saw_case(rows[i / 2].profile, rows[i / 2].dim, rows[i / 2].n_tokens);
        c.dtype = rows[i / 2].dtype;
        c.fill = i % 2 ? CASE_HARD : CASE_NORMAL;
        c.layout = i % 3 == 0 ? CASE_ELEMENT : CASE_HND;
        c.n_layers = rows[i / 2].is_fast ? 4 : 1;
        c.sink_tokens = i % 4 == 3 ? 4 : 0;
        codec_device_limit(1 + (uint32_t)i % 2);
        run_case(&c);
    }
    codec_device_limit(0);
}

/* Ratios that cost alike, or one more or less. */
static void near_ties(void **state)
{
    (void)state;
    struct codec_case c = saw_case("saw3-search", 128, 120);
    c.fill = CASE_NEAR_TIES;
    run_case(&c);
    c.n_layers = 1;
    c.dtype = KVF_DTYPE_F32;
    run_case(&c);
    c.profile = "saw4-search9";
    run_case(&c);
}

/* Would it be seen if the smaller one of two that cost alike were taken? */
static void last_of_alike(void **state)
{
    (void)state;
    struct codec_case c = saw_case("saw3-search", 128, 120);
    c.fill = CASE_NEAR_TIES;
    c.is_wrong = true;
    codec_device_replace(NULL, "kvf_saw_search_128_3", "kvf_test_saw_search_last");
    bool is_seen = false;
    for (int i = 0; i < 60 && !is_seen; i++) {
        is_seen = codec_case_run(&c, &random_bits);
    }
    codec_device_restore();
    assert_true(is_seen);
}

/* Changed bytes of a record do not lead the decoders out of the pages. */
static void hostile_records(void **state)
{
    (void)state;
    static const char *const profiles[] = {"balanced", "saw2", "saw6", "saw8"};
    for (size_t i = 0; i < sizeof(profiles) / sizeof(profiles[0]); i++) {
        struct codec_case c = saw_case(profiles[i], 128, 130);
        c.sink_tokens = 2;
        codec_case_run_hostile(&c, &random_bits);
    }
}

/* The lengths at which warps are furthest apart, again and again. */
static void many_orders(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 16; i++) {
        struct codec_case c = saw_case("balanced", 128, 193 + 7 * i % 32);
        c.n_layers = 6; /* more rows than are known at a time */
        c.layout = i % 4 == 0 ? CASE_ELEMENT : CASE_HND;
        codec_device_limit(1);
        run_case(&c);
    }
    codec_device_limit(0);
}

/* Would that show a warp that comes to a barrier before another one has left it? An encoder with
 * one barrier for all means has such a one, in rows whose mean is made by a warp without a tile. */
static void one_barrier(void **state)
{
    (void)state;
    struct codec_case c = saw_case("balanced", 128, 200);
    c.n_layers = 3;
    codec_device_limit(1);
    emulate_before("kvf_saw_encode_128_4", "kvf_test_saw_encode_one_barrier", 32);
    run_case(&c);
    uint32_t n_stuck;
    uint32_t n;
    emulate_before_counts(&n_stuck, &n);
    printf("stuck: %u of %u\n", n_stuck, n);
    assert_int_not_equal(n_stuck, 0);
    emulate_before(NULL, NULL, 0);
    codec_device_limit(0);
}

/* Would a copy that is read before it has come be seen? */
static void late_copies(void **state)
{
    (void)state;
    struct codec_case c = saw_case("balanced", 128, 200);
    c.is_wrong = true;
    emulate_late_copies(1);
    run_case(&c);
    emulate_late_copies(0);
}

/* Would a wrong byte be seen? */
static void swapped_stages(void **state)
{
    (void)state;
    struct codec_case c = saw_case("safe", 128, 256);
    c.fill = CASE_ALIGNED;
    run_case(&c);
    c.is_wrong = true;
    codec_device_replace(NULL, "kvf_saw_encode_128_8", "kvf_test_saw_encode_swapped");
    run_case(&c);
    codec_device_restore();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(few_thread_blocks), cmocka_unit_test(every_length),
        cmocka_unit_test(unlike_tensors),    cmocka_unit_test(every_width),
        cmocka_unit_test(hostile_records),   cmocka_unit_test(many_orders),
        cmocka_unit_test(one_barrier),       cmocka_unit_test(late_copies),
        cmocka_unit_test(swapped_stages),    cmocka_unit_test(searches),
        cmocka_unit_test(near_ties),         cmocka_unit_test(last_of_alike),
    };
    if (!codec_case_begin(&random_bits)) {
        return CASE_SKIPPED;
    }
    emulate_seed(kvf_random_seeded_next(&random_bits));
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    codec_device_close();
    return failures;
}
