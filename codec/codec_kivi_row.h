/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_kivi_row.h: between codec_kivi.c, which walks over rows, tokens and groups, and the
 * implementations of what is done to a vector. Numbers in comments are steps of codec_kivi.h.
 */
#ifndef KVF_CODEC_CODEC_KIVI_ROW_H
#define KVF_CODEC_CODEC_KIVI_ROW_H

#include "codec/codec_kivi.h"
#include "codec/codec_pages.h"

enum {
    /* Elements that may be written behind the last one of an array. */
    KVF_KIVI_PAD = 128,
    KVF_KIVI_ARRAY = KVF_DIM_MAX + KVF_KIVI_PAD,
};

/* Arrays are those of struct kvf_kivi_work: n elements count, some more may be read and written.
 * bits is 4 or 2. */
struct kvf_kivi_kernels {
    /* n elements of dtype at from, of any alignment, to x. Returns the bits of the largest
     * magnitude, a NaN's being larger than any other. */
    uint32_t (*load)(uint8_t dtype, const uint8_t *from, uint32_t n, float *x);

    /* (2) By channel: let min and max take in another vector. */
    void (*widen_ranges)(const float *x, uint32_t n, float *min, float *max);

    /* (2) By token: min and max of each group_size elements of a vector. */
    void (*find_ranges)(const float *x, uint32_t n, uint32_t group_size, float *min, float *max);

    /* (3) For n groups: the words of meta, lo, and 1 / scale or 0. */
    void (*choose)(const float *min, const float *max, uint32_t n, uint32_t bits, uint32_t *meta,
                   float *lo, float *factor);

    /* (4) The codes of a vector, to code_bytes at to. Element i has the numbers of group i >>
     * shift: shift is 0 by channel, else the logarithm of group_size. */
    void (*quantize)(const float *x, const float *lo, const float *factor, uint32_t shift,
                     uint32_t n, uint32_t bits, uint8_t *to);

    /* Words of meta as lo and scale. */
    void (*split)(const uint32_t *meta, uint32_t n, float *lo, float *scale);

    /* A vector back from its codes, to n elements of dtype at to, of any alignment. */
    void (*decode)(const uint8_t *codes, const float *lo, const float *scale, uint32_t shift,
                   uint32_t n, uint32_t bits, uint8_t dtype, uint8_t *to);
};

extern const struct kvf_kivi_kernels kvf_kivi_kernels_scalar;
#if defined(__x86_64__)
extern const struct kvf_kivi_kernels kvf_kivi_kernels_avx2;
extern const struct kvf_kivi_kernels kvf_kivi_kernels_avx512;
#endif

struct kvf_kivi_work {
    _Alignas(64) float x[KVF_KIVI_ARRAY];
    float min[KVF_KIVI_ARRAY];
    float max[KVF_KIVI_ARRAY];
    uint32_t meta[KVF_KIVI_ARRAY];
    float lo[KVF_KIVI_ARRAY];         /* of a group */
    float scale[KVF_KIVI_ARRAY];      /* the same; encode: 1 / scale, or 0 */
    bool escaped[KVF_KIVI_GROUP_MAX]; /* by channel: tokens of the group */
};

#endif /* KVF_CODEC_CODEC_KIVI_ROW_H */
