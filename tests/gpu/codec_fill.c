/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_fill.c: what is in the pages of codec_case.h.
 */
#include "tests/gpu/codec_fill.h"

#include "codec/codec_fp.h"
#include "codec/codec_layout.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static uint32_t below(struct kvf_random_seeded *random, uint32_t n)
{
    return (uint32_t)(kvf_random_seeded_next(random) >> 33) % n;
}

/* Put the exponent of bf16 or fp32 in place. */
static void set_exponent(int dtype, uint8_t *element, uint32_t exponent)
{
    uint8_t *top = element + kvf_dtype_bytes(dtype) - 2;
    top[0] = (uint8_t)((top[0] & 0x7f) | exponent << 7);
    top[1] = (uint8_t)((top[1] & 0x80) | exponent >> 1);
}

static uint32_t exponent_for(enum case_fill fill, uint32_t number, bool is_torn,
                             struct kvf_random_seeded *random)
{
    switch (fill) {
    case CASE_TORN:
        return is_torn ? below(random, 200) + 20 : 120 + below(random, 4);
    case CASE_WIDE:
        return below(random, 50) == 0 ? below(random, 256) : 120 + below(random, 20);
    default:
        return 100 + number % 17;
    }
}

static void fill_exponents(struct fixture_kv *kv, enum case_fill fill,
                           struct kvf_random_seeded *random)
{
    size_t element_bytes = kvf_dtype_bytes(kv->geometry.dtype);
    bool is_torn = false;
    fixture_fill_bits(kv, random);
    for (size_t at = 0, i = 0; at < kv->memory_bytes; at += element_bytes, i++) {
        if (i % 2000 == 0) {
            is_torn = below(random, 12) == 0;
        }
        set_exponent(kv->geometry.dtype, kv->memory + at,
                     exponent_for(fill, (uint32_t)i, is_torn, random));
    }
}

/* All channels of K but every 16th have one magnitude, with the signs that the encoder undoes, so
 * that they meet in one coefficient; there the small channels' last bits are rounded away, by each
 * order of additions in its own way. What is large goes with the mean, what was rounded stays. */
static void fill_aligned(struct fixture_kv *kv, const struct kvf_codec_tensor *tensor,
                         struct kvf_random_seeded *random)
{
    for (uint32_t i = 0; i < kv->geometry.n_layers * kv->geometry.n_heads * kv->n_tokens; i++) {
        uint32_t row = i / kv->n_tokens;
        uint8_t *vector = fixture_kv_vector(kv, 0, row / kv->geometry.n_heads,
                                            row % kv->geometry.n_heads, i % kv->n_tokens);
        for (uint32_t c = 0; c < tensor->dim; c++) {
            uint32_t flipped = tensor->sign_bits[c / 8] >> (c % 8) & 1;
            uint32_t small = 0x3d80 | below(random, 128) | below(random, 2) << 15;
            uint32_t value = c % 16 == 5 ? small : 0x43ff | flipped << 15;
            vector[2 * c] = (uint8_t)value;
            vector[2 * c + 1] = (uint8_t)(value >> 8);
        }
    }
}

/* A vector for which two ratios have nearly the same error, so that the last places of the sums
 * decide. Found by halving the distance of two that take different ratios, along one element, then
 * along small ones, then along the smallest that are not dropped: each stage moves the error by
 * less than the last place of the stage before. */
struct near_tie {
    struct fixture_codec codec; /* of one vector */
    struct fixture_kv kv;
    int dtype;
    uint32_t dim;
    float vector[KVF_DIM_MAX];
};

enum near_tie_numbers {
    NEAR_TIE_ELEMENT = 4,
    NEAR_TIE_STEPS = 30,
};

static bool is_of_stage(uint32_t i, int stage)
{
    return stage == 0 ? i == NEAR_TIE_ELEMENT : i % 4 == (stage == 1 ? 1 : 3);
}

/* The scale that the vector takes with a stage's elements so many times as large. */
static float scale_if(struct near_tie *tie, int stage, float by)
{
    uint8_t *vector = fixture_kv_vector(&tie->kv, 0, 0, 0, 0);
    for (uint32_t i = 0; i < tie->dim; i++) {
        fixture_store(tie->dtype, vector, i, tie->vector[i] * (is_of_stage(i, stage) ? by : 1.0f));
    }
    fixture_encode(&tie->codec, &tie->kv, 0);
    return kvf_f32_from_f16((uint16_t)(kvf_load_u32(tie->codec.payload) >> 16));
}

static void find_near_tie(struct near_tie *tie, int stage, float low, float high)
{
    float low_scale = scale_if(tie, stage, low);
    for (int step = 0; step < NEAR_TIE_STEPS; step++) {
        float middle = 0.5f * (low + high);
        /* scales of one ratio change slowly; those of two differ by a tenth */
        float scale = scale_if(tie, stage, middle);
        bool is_same = scale > 0.97f * low_scale && scale < 1.03f * low_scale;
        low = is_same ? middle : low;
        low_scale = is_same ? scale : low_scale;
        high = is_same ? high : middle;
    }
    (void)scale_if(tie, stage, low);
    for (uint32_t i = 0; i < tie->dim; i++) {
        tie->vector[i] *= is_of_stage(i, stage) ? low : 1.0f;
    }
}

static void fill_near_ties(struct fixture_kv *kv, const char *profile,
                           struct kvf_random_seeded *random)
{
    const struct kvf_geometry *geometry = &kv->geometry;
    struct kvf_geometry one = fixture_geometry(geometry->dtype, 1, 1, geometry->dim_k, 0, 1);
    struct near_tie tie = {.dtype = geometry->dtype, .dim = geometry->dim_k};
    fixture_kv_init(&tie.kv, &one, 1);
    fixture_codec_init(&tie.codec, &one, profile);
    for (uint32_t i = 0; i < geometry->n_layers * geometry->n_heads * kv->n_tokens; i++) {
        uint32_t row = i / kv->n_tokens;
        for (uint32_t c = 0; c < tie.dim; c++) {
            float size = is_of_stage(c, 1) ? 0x1p-3f : is_of_stage(c, 2) ? 0x1p-8f : 1.0f;
            tie.vector[c] = fixture_normal_like(random) * size;
        }
        find_near_tie(&tie, 0, 1.0f, 4.0f);
        find_near_tie(&tie, 1, 0.5f, 1.5f);
        find_near_tie(&tie, 2, 0.5f, 1.5f);
        memcpy(fixture_kv_vector(kv, 0, row / geometry->n_heads, row % geometry->n_heads,
                                 i % kv->n_tokens),
               fixture_kv_vector(&tie.kv, 0, 0, 0, 0), tie.dim * kvf_dtype_bytes(tie.dtype));
    }
    fixture_codec_fini(&tie.codec);
    fixture_kv_fini(&tie.kv);
}

void codec_case_fill(struct fixture_kv *kv, enum case_fill fill, const struct kvf_codec_plan *plan,
                     struct kvf_random_seeded *random)
{
    switch (fill) {
    case CASE_NORMAL:
    case CASE_BROKEN:
        fixture_fill_normal(kv, random);
        break;
    case CASE_ALIGNED:
        fixture_fill_normal(kv, random);
        fill_aligned(kv, &plan->kinds[0].k, random);
        break;
    case CASE_NEAR_TIES:
        fixture_fill_normal(kv, random);
        fill_near_ties(kv, plan->profile->name, random);
        break;
    case CASE_HARD:
        fixture_fill_hard(kv, random);
        break;
    case CASE_BITS:
        fixture_fill_bits(kv, random);
        break;
    default:
        fill_exponents(kv, fill, random);
        break;
    }
    if (fill == CASE_BROKEN) {
        for (uint32_t i = 0; i < kv->n_tokens * kv->geometry.n_heads; i += 4) {
            uint8_t *vector = fixture_kv_vector(kv, 0, 0, i % kv->geometry.n_heads,
                                                i / kv->geometry.n_heads);
            memset(vector, 0xff, kvf_dtype_bytes(kv->geometry.dtype));
        }
    }
}
