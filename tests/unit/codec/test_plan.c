/* SPDX-License-Identifier: Apache-2.0
 *
 * test_plan.c: profiles, the sizes they promise, and the geometries that are refused.
 */
#include "tests/unit/codec/codec_fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static int init(struct kvf_codec_plan *plan, const struct kvf_geometry *geometry,
                const char *profile)
{
    return kvf_codec_plan_init(plan, geometry, profile);
}

static void names_fit_and_are_unique(void **state)
{
    (void)state;
    int n = 0;
    for (const struct kvf_profile *profile = kvf_profiles; profile->name != NULL; profile++) {
        assert_true(strlen(profile->name) < KVF_PROFILE_NAME_BYTES);
        assert_ptr_equal(kvf_profile_find(profile->name), profile);
        n++;
    }
    assert_true(n >= 11);
    assert_null(kvf_profile_find("none"));
    assert_ptr_equal(kvf_codec_find(KVF_CODEC_SAW), kvf_codecs[2]);
    assert_null(kvf_codec_find(77));
    for (const struct kvf_codec_ops *const *codec = kvf_codecs; *codec != NULL; codec++) {
        assert_int_equal((*codec)->abi_version, KVF_CODEC_ABI);
        assert_ptr_equal(kvf_codec_find((*codec)->id), *codec);
        bool fixed = ((*codec)->capabilities & KVF_CODEC_FIXED_RATE) != 0;
        assert_true(fixed == ((*codec)->stored_sizes == NULL));
    }
}

/* codecs.md's arithmetic: 4.25 bits at dim 128 with 2 x 16 bits of metadata a vector, and 16 / 256
 * more where centred. 256 tokens fill every part exactly. */
static void sizes_are_exact(void **state)
{
    (void)state;
    static const struct {
        const char *profile;
        uint32_t dim;
        double bits; /* mean of K and V */
    } expected[] = {
        {"raw", 128, 16.0},
        {"balanced", 128, (4.25 + 0.0625 + 4.25) / 2},
        {"balanced", 64, (4.5 + 0.0625 + 4.5) / 2},
        {"balanced", 80, (4.4 + 0.0625 + 4.4) / 2},
        {"safe", 128, (8.25 + 0.0625 + 4.25) / 2},
        {"saw8", 128, 8.25},
        {"saw6", 128, (6.25 + 0.0625 + 6.25) / 2},
        {"saw5", 128, (5.25 + 0.0625 + 5.25) / 2},
        {"saw5", 80, (5.4 + 0.0625 + 5.4) / 2},
        {"saw3", 128, (3.25 + 0.0625 + 3.25) / 2},
        {"saw2", 128, (2.25 + 0.0625 + 2.25) / 2},
        {"saw4-paper", 128, 4.25},
        {"saw4-paper", 256, 4.125},
        {"naive4", 128, 4.25},
        {"naive3", 128, 3.25},
        {"naive2", 64, 2.5},
    };
    for (size_t i = 0; i < sizeof(expected) / sizeof(expected[0]); i++) {
        struct kvf_codec_plan plan;
        struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 3, 8, expected[i].dim,
                                                        expected[i].dim, 256);
        assert_int_equal(init(&plan, &geometry, expected[i].profile), KVF_OK);
        double values = 3.0 * 8.0 * 256.0 * 2.0 * expected[i].dim;
        double bits = (double)kvf_codec_plan_payload_bytes(&plan, 256) * 8.0 / values;
        assert_true(bits == expected[i].bits);
        assert_true(plan.lossless == (strcmp(expected[i].profile, "raw") == 0));
    }
}

/* Planes end at a byte each: codec_saw.h's table, by hand. */
static void planes_are_whole_bytes(void **state)
{
    (void)state;
    static const struct {
        const char *profile;
        uint16_t dim;
        uint16_t bytes;
    } expected[] = {
        {"saw6", 128, 64 + 32}, {"saw5", 128, 64 + 16}, {"balanced", 128, 64},
        {"saw3", 128, 32 + 16}, {"saw2", 128, 32},      {"saw8", 128, 128},
        {"saw6", 7, 4 + 2},     {"saw5", 7, 4 + 1},     {"balanced", 7, 4},
        {"saw3", 12, 3 + 2},    {"saw2", 9, 3},         {"saw6", 33, 17 + 9},
    };
    for (size_t i = 0; i < sizeof(expected) / sizeof(expected[0]); i++) {
        struct kvf_codec_plan plan;
        struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 1, 1, expected[i].dim, 0,
                                                        16);
        assert_int_equal(init(&plan, &geometry, expected[i].profile), KVF_OK);
        assert_int_equal(plan.kinds[0].k.code_bytes, expected[i].bytes);
    }
}

/* Widths that have no planes are refused. */
static void other_widths_are_refused(void **state)
{
    (void)state;
    for (uint32_t bits = 0; bits <= 16; bits++) {
        struct kvf_codec_tensor tensor = {
            .n_heads = 1, .dim = 64, .dtype = KVF_DTYPE_BF16, .element_bytes = 2};
        struct kvf_profile_tensor settings = {
            .codec = KVF_CODEC_SAW, .bits = (uint8_t)bits, .rotate = 1};
        bool there = bits == 8 || (bits >= 2 && bits <= 6);
        assert_int_equal(kvf_codec_find(KVF_CODEC_SAW)->resolve(&tensor, &settings),
                         there ? KVF_OK : KVF_ERR_UNSUPPORTED);
    }
}

static void mla_keeps_the_rotary_part_raw(void **state)
{
    (void)state;
    struct kvf_codec_plan plan;
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 2, 1, 512, 64, 256);
    geometry.kind = KVF_KIND_MLA;
    assert_int_equal(init(&plan, &geometry, "balanced"), KVF_OK);
    assert_int_equal(plan.kinds[0].k.group, 128);
    assert_int_equal(plan.kinds[0].k.n_rows, 4);
    assert_int_equal(plan.kinds[0].v.descriptor.codec, KVF_CODEC_RAW);
    /* a token: 4 groups of 64 + 4 bytes, 2 x 512 / 256 bytes of mean, 128 bytes of rotary part */
    assert_int_equal(kvf_codec_plan_payload_bytes(&plan, 256), 2 * 256 * (4 * 68 + 4 + 128));
}

static void groups_divide_wide_heads(void **state)
{
    (void)state;
    static const uint16_t expected[][2] = {
        {256, 256}, {384, 128}, {320, 64}, {576, 64}, {200, 200}};
    struct kvf_codec_plan plan;
    for (size_t i = 0; i < sizeof(expected) / sizeof(expected[0]); i++) {
        struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 1, 1, expected[i][0], 0,
                                                        128);
        assert_int_equal(init(&plan, &geometry, "balanced"), KVF_OK);
        assert_int_equal(plan.kinds[0].k.group, expected[i][1]);
    }
    struct kvf_geometry odd = fixture_geometry(KVF_DTYPE_BF16, 1, 1, 300, 0, 128);
    assert_int_equal(init(&plan, &odd, "balanced"), KVF_ERR_UNSUPPORTED);
    assert_int_equal(init(&plan, &odd, "exact"), KVF_OK);
}

static void clip_and_rotation_are_in_the_descriptor(void **state)
{
    (void)state;
    struct kvf_codec_plan plan;
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 1, 1, 128, 64, 128);
    assert_int_equal(init(&plan, &geometry, "balanced"), KVF_OK);
    assert_int_equal(plan.kinds[0].k.descriptor.clip_q15, 30802); /* .94 */
    assert_int_equal(plan.kinds[0].v.descriptor.clip_q15, 31457); /* .96 */
    assert_int_equal(plan.kinds[0].k.descriptor.flags, KVF_TENSOR_CENTER | KVF_TENSOR_SIGNS);
    assert_int_equal(plan.kinds[0].v.descriptor.flags, KVF_TENSOR_SIGNS);
    assert_int_equal(plan.kinds[0].k.descriptor.rot_kind, KVF_ROT_SYLVESTER);
    assert_int_equal(init(&plan, &geometry, "saw3"), KVF_OK);
    assert_int_equal(plan.kinds[0].k.descriptor.clip_q15, 26214); /* .80 */
    assert_int_equal(plan.kinds[0].v.descriptor.clip_q15, 28180); /* .86 */
    assert_int_equal(init(&plan, &geometry, "saw2"), KVF_OK);
    assert_int_equal(plan.kinds[0].k.descriptor.clip_q15, 19661); /* .60 */
    assert_int_equal(plan.kinds[0].v.descriptor.clip_q15, 21627); /* .66 */
    assert_int_equal(init(&plan, &geometry, "saw5"), KVF_OK);
    assert_int_equal(plan.kinds[0].k.descriptor.clip_q15, KVF_BLOCK_CLIP_ONE);
    assert_int_equal(init(&plan, &geometry, "saw4-paper"), KVF_OK);
    assert_int_equal(plan.kinds[0].k.descriptor.clip_q15, KVF_BLOCK_CLIP_ONE);
    assert_int_equal(plan.kinds[0].k.descriptor.flags, 0);
    assert_int_equal(plan.kinds[0].k.descriptor.rot_order, 128);
    geometry.dim_k = 96;
    geometry.dim_v = 72;
    assert_int_equal(init(&plan, &geometry, "saw8"), KVF_OK);
    assert_int_equal(plan.kinds[0].k.descriptor.rot_kind, KVF_ROT_KRONECKER);
    assert_int_equal(plan.kinds[0].k.descriptor.clip_q15, KVF_BLOCK_CLIP_ONE);
    assert_int_equal(plan.kinds[0].v.descriptor.rot_kind, KVF_ROT_BLOCKS);
    assert_int_equal(plan.kinds[0].v.descriptor.rot_order, 8);
}

/* Profiles that store different bytes have different fingerprints; geometry alone is not in
 * them. */
static void fingerprints_tell_profiles_apart(void **state)
{
    (void)state;
    uint64_t seen[128];
    int n = 0;
    struct kvf_codec_plan plan;
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 4, 2, 128, 128, 256);
    for (const struct kvf_profile *profile = kvf_profiles; profile->name != NULL; profile++) {
        struct kvf_geometry suited = geometry;
        if (!profile->opaque) {
            fixture_geometry_suit(&suited, profile->name);
        }
        assert_int_equal(init(&plan, profile->opaque ? NULL : &suited, profile->name), KVF_OK);
        assert_true(plan.profile_fp != 0);
        for (int i = 0; i < n; i++) {
            assert_true(seen[i] != plan.profile_fp);
        }
        assert_true(n < (int)(sizeof(seen) / sizeof(seen[0])));
        seen[n++] = plan.profile_fp;
    }
    geometry.n_layers = 5;
    assert_int_equal(init(&plan, &geometry, "raw"), KVF_OK);
    assert_true(plan.profile_fp == seen[1]);
}

static void fixed_sizes_are_those_of_records(void **state)
{
    (void)state;
    uint64_t sizes[KVF_CODEC_FIXED_SIZES_MAX];
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 3, 2, 128, 128, 160);
    geometry.sink_tokens = 4;
    struct kvf_random_seeded random;
    kvf_random_seeded_init(&random, 7);
    struct fixture_kv kv;
    fixture_kv_init(&kv, &geometry, 160);
    fixture_fill_normal(&kv, &random);
    struct fixture_codec codec;
    fixture_codec_init(&codec, &geometry, "balanced");
    assert_int_equal(kvf_codec_plan_fixed_sizes(&codec.plan, sizes), 2);
    fixture_encode(&codec, &kv, 160);
    assert_int_equal(codec.record_bytes, sizes[0]);
    assert_int_equal(codec.record_bytes,
                     KVF_BLOCK_PAGE_BYTES + kvf_codec_plan_payload_bytes(&codec.plan, 160));
    fixture_encode(&codec, &kv, 0);
    assert_int_equal(codec.record_bytes, sizes[1]);
    fixture_codec_fini(&codec);
    fixture_codec_init(&codec, &geometry, "raw");
    assert_int_equal(kvf_codec_plan_fixed_sizes(&codec.plan, sizes), 1);
    fixture_codec_fini(&codec);
    fixture_codec_init(&codec, &geometry, "exact");
    assert_int_equal(kvf_codec_plan_fixed_sizes(&codec.plan, sizes), 0);
    fixture_codec_fini(&codec);
    fixture_kv_fini(&kv);
}

static void geometry_out_of_range_is_refused(void **state)
{
    (void)state;
    struct kvf_codec_plan plan;
    struct kvf_geometry good = fixture_geometry(KVF_DTYPE_BF16, 2, 2, 64, 64, 64);
    assert_int_equal(init(&plan, &good, "exact"), KVF_OK);
    assert_int_equal(init(&plan, &good, "no such"), KVF_ERR_INVALID);
    assert_int_equal(init(&plan, &good, NULL), KVF_ERR_INVALID);
    assert_int_equal(init(&plan, &good, "bytes"), KVF_ERR_INVALID);
    assert_int_equal(init(&plan, NULL, "exact"), KVF_ERR_INVALID);
    struct kvf_geometry bad[12];
    for (int i = 0; i < 12; i++) {
        bad[i] = good;
    }
    bad[0].struct_bytes = 4;
    bad[1].kind = 9;
    bad[2].dtype = 0;
    bad[3].rope_state = 4;
    bad[4].n_layers = 0;
    bad[5].n_layers = KVF_LAYERS_MAX + 1;
    bad[6].n_heads = 0;
    bad[7].n_heads = KVF_HEADS_MAX + 1;
    bad[8].dim_k = 0;
    bad[9].dim_v = KVF_DIM_MAX + 1;
    bad[10].chunk_tokens = KVF_CHUNK_TOKENS_MAX + 1;
    bad[11].sink_tokens = 65;
    for (int i = 0; i < 12; i++) {
        assert_int_equal(init(&plan, &bad[i], "exact"), KVF_ERR_INVALID);
    }
}

static void state_and_bytes_are_never_lossy(void **state)
{
    (void)state;
    struct kvf_codec_plan plan;
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_F32, 2, 2, 64, 0, 1);
    geometry.kind = KVF_KIND_STATE;
    assert_int_equal(init(&plan, &geometry, "balanced"), KVF_ERR_REFUSED);
    assert_int_equal(init(&plan, &geometry, "exact"), KVF_OK);
    geometry.kind = KVF_KIND_KV;
    geometry.dtype = KVF_DTYPE_U8;
    assert_int_equal(init(&plan, &geometry, "saw8"), KVF_ERR_REFUSED);
    assert_int_equal(init(&plan, &geometry, "exact"), KVF_OK);
    assert_int_equal(plan.kinds[0].k.descriptor.codec, KVF_CODEC_RAW);
}

static void too_large_names_the_chunk_that_fits(void **state)
{
    (void)state;
    struct kvf_codec_plan plan;
    /* 80 layers x 8 heads x 2 x 128 x 2 bytes: 320 KiB a token raw, so 204 tokens in 64 MiB */
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 80, 8, 128, 128, 256);
    assert_int_equal(init(&plan, &geometry, "raw"), KVF_ERR_TOO_LARGE);
    assert_int_equal(kvf_codec_fitting_tokens(&geometry, "raw"), 204);
    geometry.chunk_tokens = 204;
    assert_int_equal(init(&plan, &geometry, "raw"), KVF_OK);
    assert_true(plan.record_bytes_max <= KVF_RECORD_PAGE_BYTES + KVF_PAYLOAD_BYTES_MAX);
    geometry = fixture_geometry(KVF_DTYPE_F32, 512, 1024, 1024, 1024, 1);
    assert_int_equal(kvf_codec_fitting_tokens(&geometry, "exact"), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_fit_and_are_unique),
        cmocka_unit_test(sizes_are_exact),
        cmocka_unit_test(planes_are_whole_bytes),
        cmocka_unit_test(other_widths_are_refused),
        cmocka_unit_test(mla_keeps_the_rotary_part_raw),
        cmocka_unit_test(groups_divide_wide_heads),
        cmocka_unit_test(clip_and_rotation_are_in_the_descriptor),
        cmocka_unit_test(fingerprints_tell_profiles_apart),
        cmocka_unit_test(fixed_sizes_are_those_of_records),
        cmocka_unit_test(geometry_out_of_range_is_refused),
        cmocka_unit_test(state_and_bytes_are_never_lossy),
        cmocka_unit_test(too_large_names_the_chunk_that_fits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
