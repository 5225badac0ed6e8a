/* SPDX-License-Identifier: Apache-2.0
 *
 * test_simd.c: every level of instructions gives the bytes of the reference, both ways. Run by a
 * machine that has them; levels that this one lacks are left out and named.
 */
#include "codec/codec_fp.h"
#include "codec/simd.h"
#include "tests/support/support.h"
#include "tests/unit/codec/codec_fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <cmocka.h>

static struct kvf_random_seeded random_bits;

/* Encode and decode at the level of the reference and at each other one: the same record, the same
 * pages. */
static void compare_levels(const struct fixture_kv *kv, const char *profile)
{
    struct kvf_codec_plan plan;
    struct kvf_geometry geometry = kv->geometry;
    struct fixture_codec want;
    struct fixture_codec have;
    struct fixture_kv want_back;
    struct fixture_kv have_back;
    fixture_geometry_suit(&geometry, profile);
    if (kvf_codec_plan_init(&plan, &geometry, profile) == KVF_ERR_UNSUPPORTED) {
        /* channels cannot be split where no parts can be rotated: few dims, and odd ones */
        assert_true(kv->geometry.dim_k % 16 != 0 || kv->geometry.dim_v % 16 != 0);
        return;
    }
    fixture_codec_init(&want, &geometry, profile);
    fixture_codec_init(&have, &geometry, profile);
    fixture_kv_init(&want_back, &geometry, kv->n_tokens);
    fixture_kv_init(&have_back, &geometry, kv->n_tokens);
    assert_int_equal(kvf_codec_simd_set(KVF_SIMD_SCALAR), KVF_OK);
    fixture_encode(&want, kv, 0);
    fixture_decode(&want, &want_back);
    for (int level = KVF_SIMD_SCALAR + 1; level < KVF_SIMD_LEVELS; level++) {
        if (kvf_codec_simd_set((enum kvf_simd_level)level) != KVF_OK) {
            continue;
        }
        fixture_encode(&have, kv, 0);
        assert_int_equal(have.record_bytes, want.record_bytes);
        assert_memory_equal(have.page, want.page, want.record_bytes);
        fixture_decode(&have, &have_back);
        assert_memory_equal(have_back.memory, want_back.memory, want_back.memory_bytes);
    }
    fixture_kv_fini(&want_back);
    fixture_kv_fini(&have_back);
    fixture_codec_fini(&want);
    fixture_codec_fini(&have);
}

static const char *const profiles[] = {
    "balanced", "safe",      "saw8",        "saw4-paper",   "exact",        "saw6",
    "saw5",     "saw3",      "saw2",        "kivi4-g32",    "kivi2-g128",   "tq4",
    "tq3",      "tq2",       "tq3.5",       "tq2.5",        "tq3-unbiased", "tq4-paper",
    "dense",    "max-edges", "saw3-search", "saw2-search9", "saw4-search9", "naive4",
    "x4",       "x3",        "x2",          "x8",           "x6",           "x4-paper",
    "x2-paper"};
enum {
    N_PROFILES = sizeof(profiles) / sizeof(profiles[0])
};

/* Where there are many rounds, some of the profiles take part in each, in turn. */
static bool has_turn(uint32_t p, uint32_t round, uint32_t n_turns)
{
    return (p + round) % n_turns == 0;
}

/* A few vectors of everything, at each dim: the special ones, each factor, blocks, odd dims, pieces
 * shorter than a dword, heads that are cut. */
static void every_dim_and_type(void **state)
{
    (void)state;
    static const uint32_t dims[] = {64,  80,  128, 256, 96, 112, 192, 224, 160, 72,  144,
                                    48,  32,  16,  12,  20, 28,  36,  8,   7,   1,   2,
                                    100, 132, 76,  33,  66, 90,  250, 512, 320, 1024};
    for (uint32_t i = 0; i < sizeof(dims) / sizeof(dims[0]); i++) {
        for (int dtype = KVF_DTYPE_BF16; dtype <= KVF_DTYPE_F8E5M2; dtype++) {
            uint32_t n_tokens = (i + (uint32_t)dtype) % 2 ? 133 : 37;
            struct kvf_geometry geometry = fixture_geometry(dtype, 1, 1, dims[i], dims[i], 140);
            struct fixture_kv kv;
            fixture_kv_init(&kv, &geometry, n_tokens);
            fixture_fill_hard(&kv, &random_bits);
            for (uint32_t p = 0; p < N_PROFILES; p++) {
                /* the common dims with many, the others each with some profile */
                if ((i < 4 && has_turn(p, i + (uint32_t)dtype, 4)) ||
                    p == (i / 2 + (uint32_t)dtype) % N_PROFILES) {
                    compare_levels(&kv, profiles[p]);
                }
            }
            fixture_kv_fini(&kv);
        }
    }
}

/* Every number of tokens that fills tiles differently, with sinks and without. */
static void numbers_of_tokens(void **state)
{
    (void)state;
    for (uint32_t n_tokens = 1; n_tokens <= KVF_CHUNK_TOKENS_MAX;
         n_tokens += n_tokens < 34 || n_tokens % 16 < 2 || n_tokens % 16 == 15 ? 1 : 7) {
        struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 1, 1, 64, 128,
                                                        KVF_CHUNK_TOKENS_MAX);
        geometry.sink_tokens = (uint16_t)(n_tokens % 7 * (n_tokens % 3));
        struct fixture_kv kv;
        fixture_kv_init(&kv, &geometry, n_tokens);
        fixture_fill_hard(&kv, &random_bits);
        compare_levels(&kv, n_tokens % 2 ? "balanced" : "safe");
        compare_levels(&kv, "exact");
        fixture_kv_fini(&kv);
    }
}

/* 2^exponent times something in [1, 2), of either sign. */
static float random_float(int exponent)
{
    uint32_t bits = (uint32_t)kvf_random_seeded_next(&random_bits);
    float value = kvf_f32_from_bits((bits & 0x807fffff) | 127u << 23);
    for (; exponent > 0; exponent--) {
        value *= 2.0f;
    }
    for (; exponent < 0; exponent++) {
        value *= 0.5f;
    }
    return value;
}

enum {
    KINDS = 8
};

/* An element of a tensor of a kind: what decides bytes at the edges of formats. */
static float element_of_kind(uint32_t kind, uint32_t token, uint32_t channel)
{
    uint64_t random = kvf_random_seeded_next(&random_bits);
    switch (kind) {
    case 0: /* 24 binades in every vector */
        return random_float((int)(random % 24) - 16);
    case 1: /* all ranges, vector by vector: fp16 metadata under- and overflows */
        return random_float((int)(token * 7 % 60) - 44);
    case 2: /* a narrow range far from zero: rounding outward matters */
        return 1000.0f + 0.25f * random_float(-(int)(token % 9));
    case 3: /* midpoints */
        return (float)(random % 31) * 0.5f;
    case 4: /* one channel 300 times the others */
        return random_float(0) * (channel == 5 ? 300.0f : 1.0f);
    case 5: /* exact ties of integers */
        return (float)((int)(random % 9) - 4);
    case 6: /* a bias a channel; the means are large */
        return (float)((int)(channel * 37 % 101) - 50) * 64.0f + random_float(-1);
    default: /* near what fp16 holds */
        return random_float(14 + (int)(token % 4));
    }
}

static void edges_of_formats(void **state)
{
    (void)state;
    static const uint32_t dims[] = {128, 64, 256, 96};
    static const int dtypes[] = {KVF_DTYPE_BF16, KVF_DTYPE_F16, KVF_DTYPE_F32};
    enum {
        TOKENS = 150
    };
    for (uint32_t round = 0; round < KINDS * 12; round++) {
        uint32_t dim = dims[round / KINDS % 4];
        int dtype = dtypes[round / KINDS / 4];
        struct kvf_geometry geometry = fixture_geometry(dtype, 1, 1, dim, dim, TOKENS);
        struct fixture_kv kv;
        fixture_kv_init(&kv, &geometry, TOKENS);
        for (int is_v = 0; is_v < 2; is_v++) {
            for (uint32_t token = 0; token < TOKENS; token++) {
                for (uint32_t i = 0; i < dim; i++) {
                    fixture_store(dtype, fixture_kv_vector(&kv, is_v, 0, 0, token), i,
                                  element_of_kind(round % KINDS, token, i));
                }
            }
        }
        for (uint32_t p = 0; p < N_PROFILES; p++) {
            /* other ones for each kind and for each dim and type */
            if (has_turn(p, round + round / KINDS, 7)) {
                compare_levels(&kv, profiles[p]);
            }
        }
        fixture_kv_fini(&kv);
    }
}

/* Any bits at all: mostly escapes in bf16 and fp32, so strips are stored raw, and none in fp8. */
static void any_bits(void **state)
{
    (void)state;
    for (int dtype = KVF_DTYPE_BF16; dtype <= KVF_DTYPE_F8E5M2; dtype++) {
        for (uint32_t dim = 32; dim <= 256; dim *= 2) {
            struct kvf_geometry geometry = fixture_geometry(dtype, 2, 1, dim, dim, 160);
            struct fixture_kv kv;
            fixture_kv_init(&kv, &geometry, 160);
            fixture_fill_bits(&kv, &random_bits);
            for (uint32_t p = 0; p < N_PROFILES; p++) {
                if (has_turn(p, (uint32_t)dtype + (uint32_t)__builtin_ctz(dim), 5)) {
                    compare_levels(&kv, profiles[p]);
                }
            }
            fixture_kv_fini(&kv);
        }
    }
}

/* A few escapes of each kind in a vector of zeros, or at its end; too few for the strip to be
 * stored raw. */
static void rare_escapes(void **state)
{
    (void)state;
    static const uint16_t escapes[] = {0x7f80, 0xff80, 0x7fc1, 0x5f80, 0xdf80, 0x5f7f, 0xffff};
    enum {
        TOKENS = 200,
        DIM = 128
    };
    for (uint32_t round = 0; round < sizeof(escapes) / sizeof(escapes[0]); round++) {
        struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 1, 2, DIM, DIM, TOKENS);
        struct fixture_kv kv;
        fixture_kv_init(&kv, &geometry, TOKENS);
        fixture_fill_normal(&kv, &random_bits);
        for (uint32_t n = 0; n < 4; n++) {
            uint64_t random = kvf_random_seeded_next(&random_bits);
            uint8_t *vector = fixture_kv_vector(&kv, n % 2, 0, n / 2, (uint32_t)random % TOKENS);
            uint32_t i = n == 0 ? 0 : n == 1 ? DIM - 1 : (uint32_t)(random >> 32) % DIM;
            if (random >> 63 != 0) {
                memset(vector, 0, 2 * DIM);
            }
            memcpy(vector + 2 * i, &escapes[round], sizeof(escapes[round]));
        }
        for (uint32_t p = 0; p < N_PROFILES; p++) {
            if (has_turn(p, round, 4)) {
                compare_levels(&kv, profiles[p]);
            }
        }
        fixture_kv_fini(&kv);
    }
}

/* Ranges that are a multiple of an fp16 number, or a last place more: the estimate of the scale is
 * then one step off. An odd dim is not rotated, so the range is that of the input. */
static void scales_at_the_edge(void **state)
{
    (void)state;
    enum {
        TOKENS = 120,
        DIM = 7
    };
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_F32, 1, 1, DIM, DIM, TOKENS);
    struct fixture_kv kv;
    fixture_kv_init(&kv, &geometry, TOKENS);
    for (uint32_t token = 0; token < TOKENS; token++) {
        for (int is_v = 0; is_v < 2; is_v++) {
            uint8_t *vector = fixture_kv_vector(&kv, is_v, 0, 0, token);
            float levels = token % 2 ? 15.0f : 255.0f;
            float scale = kvf_f32_from_f16((uint16_t)(0x3000 + token * 17));
            fixture_store(KVF_DTYPE_F32, vector, 0, levels * scale);
            fixture_store(KVF_DTYPE_F32, vector, 1, -kvf_f32_from_bits((127 - token % 25) << 23));
        }
    }
    for (int p = 0; p < N_PROFILES; p++) {
        compare_levels(&kv, profiles[p]);
    }
    fixture_kv_fini(&kv);
}

#if defined(__x86_64__)
static void floating_point_modes_do_not_matter(void **state)
{
    (void)state;
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 1, 2, 128, 64, 130);
    struct fixture_kv kv;
    fixture_kv_init(&kv, &geometry, 130);
    fixture_fill_hard(&kv, &random_bits);
    unsigned int before = _mm_getcsr();
    for (unsigned int mode = 0; mode < 16; mode++) {
        /* rounding in bits 13 and 14, FTZ bit 15, DAZ bit 6 */
        _mm_setcsr(0x1f80 | (mode & 3) << 13 | (mode & 4) << 13 | (mode & 8) << 3);
        for (uint32_t p = 0; p < N_PROFILES; p++) {
            if (has_turn(p, mode, 5)) {
                compare_levels(&kv, profiles[p]);
            }
        }
    }
    _mm_setcsr(before);
    fixture_kv_fini(&kv);
}
#endif

/* A level that is set is in force; one that this machine lacks is refused. */
static void levels_can_be_chosen(void **state)
{
    (void)state;
    enum kvf_simd_level last = KVF_SIMD_SCALAR;
    for (int level = 0; level < KVF_SIMD_LEVELS; level++) {
        if (kvf_codec_simd_set((enum kvf_simd_level)level) == KVF_OK) {
            last = (enum kvf_simd_level)level;
        }
        assert_int_equal(kvf_codec_simd_level(), last);
        printf("%s: %s\n", kvf_codec_simd_name((enum kvf_simd_level)level),
               last == (enum kvf_simd_level)level ? "tested" : "not on this machine");
    }
    assert_int_equal(kvf_codec_simd_set(KVF_SIMD_LEVELS), KVF_ERR_UNSUPPORTED);
    assert_int_equal(kvf_codec_simd_level(), last);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(levels_can_be_chosen),
        cmocka_unit_test(every_dim_and_type),
        cmocka_unit_test(numbers_of_tokens),
        cmocka_unit_test(edges_of_formats),
        cmocka_unit_test(any_bits),
        cmocka_unit_test(rare_escapes),
        cmocka_unit_test(scales_at_the_edge),
#if defined(__x86_64__)
        cmocka_unit_test(floating_point_modes_do_not_matter),
#endif
    };
    kvf_random_seeded_init(&random_bits, kvf_test_seed());
    return cmocka_run_group_tests(tests, NULL, NULL);
}
