/* SPDX-License-Identifier: Apache-2.0
 *
 * tq on a GPU, and plans of layers of several kinds: bytes equal to those of the C codecs both
 * ways. The same without a GPU, where KVF_EMULATED says so, on fewer rows.
 */
#include "tests/gpu/codec_case.h"
#include "tests/gpu/codec_device.h"
#include "tests/unit/codec/profile_fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#ifdef KVF_EMULATED
#define IS_EMULATED true
#else
#define IS_EMULATED false
#endif

static struct kvf_random_seeded random_bits;

/* Every width and choice of scales, lists of channels, residuals. */
static const char *const profiles[] = {
    "tq4",       "tq3",       "tq2",          "tq3.5",   "tq2.5",   "tq4-paper",
    "tq3-paper", "tq2-paper", "tq3-unbiased", "tq4-qjl", "tq3-qjl", "tq2-qjl",
};

enum {
    PROFILES = sizeof(profiles) / sizeof(profiles[0])
};

static struct codec_case tq_case(const char *profile, uint32_t dim, uint32_t n_tokens)
{
    struct codec_case c = codec_case_sized(profile, dim, n_tokens);

    c.n_layers = 1;
    c.n_heads = IS_EMULATED ? 2 : 5;
    c.n_blocks = IS_EMULATED ? 1 : 2;
    return c;
}

static void run_case(const struct codec_case *c)
{
    assert_true(codec_case_run(c, &random_bits));
}

/* With and without mean, on ordinary values and hard ones. Projecting a residual takes long where
 * kernels are emulated. */
static void every_profile(void **state)
{
    (void)state;
    static const uint32_t dims[] = {128, 64, 256};
    for (size_t i = 0; i < PROFILES * sizeof(dims) / sizeof(dims[0]); i++) {
        const char *profile = profiles[i % PROFILES];
        bool is_slow = IS_EMULATED && strstr(profile, "qjl") != NULL;
        struct codec_case c = tq_case(profile, dims[i / PROFILES], is_slow ? 3 : 150);
        if (is_slow && c.dim_k == 256) {
            continue;
        }
        run_case(&c);
        c.fill = CASE_NORMAL;
        c.n_tokens = is_slow ? 2 : 40;
        run_case(&c);
    }
}

static void every_layout(void **state)
{
    (void)state;
    for (int layout = 0; layout < (IS_EMULATED ? CASE_FAR : CASE_LAYOUTS); layout++) {
        struct codec_case c = tq_case(profiles[layout % 5], 128, IS_EMULATED ? 135 : 256);
        c.layout = (enum case_layout)layout;
        c.n_heads = layout % 2 ? 3 : 1;
        c.tokens_a_page = layout == CASE_NHD ? 3 : 0;
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
    static const uint32_t lengths[] = {1, 7, 8, 9, 63, 65, 127, 128, 129, 200, 255};
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        struct codec_case c = tq_case(profiles[i % 3], 128, lengths[i]);
        c.n_heads = 1;
        c.n_layers = 2;
        run_case(&c);
        c = tq_case(profiles[i % 5], 96, lengths[i]);
        c.n_heads = 1;
        run_case(&c);
    }
}

static void every_sink(void **state)
{
    (void)state;
    static const uint32_t sinks[] = {1, 4, 64, 130};
    for (size_t i = 0; i < sizeof(sinks) / sizeof(sinks[0]); i++) {
        struct codec_case c = tq_case(profiles[i], 128, 150);
        c.sink_tokens = sinks[i];
        run_case(&c);
        c.dtype = KVF_DTYPE_F32;
        c.n_heads = 1;
        run_case(&c);
    }
}

/* Every dtype, rotations of all kinds and none, split or not as the dims let them. */
static void every_type(void **state)
{
    (void)state;
    static const uint32_t dims[] = {80, 96, 112, 192, 100, 7, 28, 512};
    static const char *const whole[] = {"tq4", "tq3-unbiased", "tq2", "tq2-qjl"};
    static const int types[] = {KVF_DTYPE_F16, KVF_DTYPE_F32, KVF_DTYPE_F8E4M3, KVF_DTYPE_F8E5M2,
                                KVF_DTYPE_BF16};
    for (size_t i = 0; i < sizeof(dims) / sizeof(dims[0]) * 5; i++) {
        struct codec_case c = tq_case(whole[i % 4], dims[i / 5], i % 2 ? 130 : 20);
        c.n_tokens = IS_EMULATED && i % 4 == 3 ? 2 : c.n_tokens;
        c.dtype = types[i % 5];
        c.n_heads = 1;
        c.dim_v = dims[(i / 5 + 1) % (sizeof(dims) / sizeof(dims[0]))];
        c.layout = (enum case_layout)(i % CASE_FAR);
        /* vectors of an element or a few are escapes too often, so the result may be false */
        (void)codec_case_run(&c, &random_bits);
        if (dims[i / 5] == 80 || dims[i / 5] == 96) {
            c.profile = i % 2 ? "tq3.5" : "tq2.5";
            c.dim_v = 256;
            c.fill = CASE_NORMAL;
            run_case(&c);
        }
    }
}

/* K and V of different kernels, V missing, heads that are cut into rows. */
static void unlike_tensors(void **state)
{
    (void)state;
    static const uint32_t dims[][2] = {{64, 128}, {128, 64}, {128, 96}, {128, 0}, {512, 128}};
    for (size_t i = 0; i < sizeof(dims) / sizeof(dims[0]); i++) {
        struct codec_case c = tq_case(profiles[i % 3], dims[i][0], 144);
        c.dim_v = dims[i][1];
        c.n_heads = 1 + (uint32_t)i % 2;
        run_case(&c);
    }
}

/* Layers of two kinds: K and V of saw at the ends of the model, of tq or both between them. */
static void unlike_layers(void **state)
{
    (void)state;
    static const uint32_t layers[] = {5, 7, 4, 9};
    for (size_t i = 0; i < 4 * sizeof(layers) / sizeof(layers[0]); i++) {
        struct codec_case c = tq_case(i % 2 ? "max-edges" : "dense", 128, i % 4 < 2 ? 140 : 19);
        c.n_layers = layers[i / 4];
        c.n_heads = 1;
        c.n_blocks = 2;
        c.n_tokens_odd = i % 3 == 0 ? 17 : 0;
        c.sink_tokens = i % 4 == 3 ? 4 : 0;
        c.fill = i % 3 == 1 ? CASE_NORMAL : CASE_HARD;
        run_case(&c);
    }
    struct codec_case c = tq_case("max-edges", 512, 20); /* whose V is raw in every layer */
    c.dim_v = 64;
    c.is_mla = true;
    c.n_heads = 1;
    c.n_layers = 5;
    run_case(&c);
}

/* By a table: kinds of all codecs in any order, means and lists that the table has, in blocks with
 * room for a mean of their own and without. */
static void own_profiles(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {150, 40, 256, 127};
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        struct kvf_profile_table *table = profile_fixture_rich(&random_bits);
        struct codec_case c = tq_case("own", 128, lengths[i]);
        c.table = table;
        c.n_layers = 6;
        c.n_heads = i % 2 ? 1 : 2;
        c.head_first = i == 1;
        c.dim_v = 64;
        c.n_blocks = 2;
        c.n_tokens_odd = i == 2 ? 33 : 0;
        c.token_start = i == 3 ? 4096 : 0;
        c.fill = i % 2 ? CASE_NORMAL : CASE_HARD;
        run_case(&c);
        c.fill = CASE_BROKEN;
        (void)codec_case_run(&c, &random_bits);
        kvf_profile_table_destroy(table);
    }
}

/* One kind, K and V by the fast kernels, about means of the profile. */
static void given_means(void **state)
{
    (void)state;
    static const uint8_t bits[] = {4, 3, 2, 8};
    for (size_t i = 0; i < 2 * sizeof(bits); i++) {
        struct kvf_profile_table *table = profile_fixture_create(2, 2, 128, 128);
        char why[KVF_PROFILE_WHY_BYTES];
        uint8_t b = bits[i / 2];
        uint8_t v_flags = i % 2 ? 0 : KVF_TENSOR_CENTER_PROFILE;
        if (b == 8) {
            profile_fixture_add(table, profile_fixture_saw(b, KVF_TENSOR_CENTER_PROFILE),
                                profile_fixture_saw(b, v_flags));
        } else {
            profile_fixture_add(table,
                                profile_fixture_tq(b, KVF_TENSOR_CENTER_PROFILE | KVF_TENSOR_SIGNS),
                                profile_fixture_tq(b, v_flags | KVF_TENSOR_SCALE_UNBIASED));
        }
        profile_fixture_fill(table, &random_bits);
        assert_int_equal(kvf_profile_table_validate(table, why), KVF_OK);
        struct codec_case c = tq_case("own", 128, i % 2 ? 200 : 60);
        c.table = table;
        c.n_layers = 2;
        c.n_heads = 2;
        c.n_tokens_odd = i % 4 == 3 ? 9 : 0;
        c.n_blocks = 2;
        c.fill = CASE_NORMAL;
        run_case(&c);
        kvf_profile_table_destroy(table);
    }
}

/* Too many escapes, in layers of one kind and of several. */
static void host_has_to(void **state)
{
    (void)state;
    struct codec_case c = tq_case("tq4", 128, 64);
    c.fill = CASE_BROKEN;
    assert_false(codec_case_run(&c, &random_bits));
    c.profile = "max-edges";
    c.n_layers = 5;
    assert_false(codec_case_run(&c, &random_bits));
}

/* Changed bytes of a record do not lead the decoders out of the pages. */
static void hostile_records(void **state)
{
    (void)state;
    for (size_t i = 0; i < PROFILES; i++) {
        bool is_slow = IS_EMULATED && strstr(profiles[i], "qjl") != NULL;
        struct codec_case c = tq_case(profiles[i], i % 2 ? 128 : 96, is_slow ? 4 : 130);
        c.n_heads = 1;
        c.sink_tokens = 2;
        codec_case_run_hostile(&c, &random_bits);
    }
}

static void order_of_additions(void **state)
{
    (void)state;
    for (size_t i = 0; i < 6; i++) {
        struct codec_case c = tq_case(profiles[i % 3], 128, i < 3 ? 136 : 64);
        c.fill = CASE_ALIGNED;
        run_case(&c);
        c.fill = CASE_TIES;
        run_case(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_profile),   cmocka_unit_test(every_layout),
        cmocka_unit_test(every_length),    cmocka_unit_test(every_sink),
        cmocka_unit_test(every_type),      cmocka_unit_test(unlike_tensors),
        cmocka_unit_test(unlike_layers),   cmocka_unit_test(own_profiles),
        cmocka_unit_test(given_means),     cmocka_unit_test(host_has_to),
        cmocka_unit_test(hostile_records), cmocka_unit_test(order_of_additions),
    };
    if (!codec_case_begin(&random_bits)) {
        return CASE_SKIPPED;
    }
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    codec_device_close();
    return failures;
}
