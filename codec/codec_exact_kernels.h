/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_exact_kernels.h: between codec_exact.c and what exact does to the bf16 elements of a chunk,
 * which other instructions do faster.
 */
#ifndef KVF_CODEC_CODEC_EXACT_KERNELS_H
#define KVF_CODEC_CODEC_EXACT_KERNELS_H

#include "codec/codec_exact.h"

#include <string.h>

enum kvf_exact_kernel_limits {
    KVF_EXACT_MASK_BITS = 64,
    KVF_EXACT_MASKS = KVF_EXACT_CHUNK_ELEMENTS / KVF_EXACT_MASK_BITS,
};

/* The exponents that have an index. */
struct kvf_exact_table {
    uint8_t exponent[KVF_EXACT_EXPONENTS];
    uint8_t index[256]; /* KVF_EXACT_EXPONENTS: none */

    /* The same for instructions that look up 16 bytes at a time: of the exponents with the upper
     * four bits upper[g], the one with the lower four bits i has the index lookup[g][i], with bit 4
     * set, or none if that is 0. */
    uint32_t n_uppers;
    uint8_t upper[KVF_EXACT_EXPONENTS];
    uint8_t lookup[KVF_EXACT_EXPONENTS][16];
};

struct kvf_exact_kernels {
    /* n bf16 (at most KVF_EXACT_CHUNK_ELEMENTS) from to sign and mantissa, a byte each, and indices
     * of the exponents, half a byte each, 0 where there is none: there a bit of the masks is set.
     * Bits from n on are 0. Returns how many are set. */
    uint32_t (*split)(const struct kvf_exact_table *table, const uint8_t *from, uint32_t n,
                      uint8_t *rest, uint8_t *indices, uint64_t masks[KVF_EXACT_MASKS]);
    /* And back; escapes get the exponent of index 0. */
    void (*join)(const uint8_t exponent[KVF_EXACT_EXPONENTS], const uint8_t *rest,
                 const uint8_t *indices, uint32_t n, uint8_t *to);
};

#if defined(__x86_64__)
extern const struct kvf_exact_kernels kvf_exact_kernels_avx2;
extern const struct kvf_exact_kernels kvf_exact_kernels_avx512;
#endif

/* The reference; first and n are even, but for an n at the end. Also for what is left over of
 * vectors. Returns the number of escapes. */
static inline uint32_t kvf_exact_split_from(const struct kvf_exact_table *table,
                                            const uint8_t *from, uint32_t first, uint32_t n,
                                            uint8_t *rest, uint8_t *indices, uint64_t *masks)
{
    uint32_t escapes = 0;
    for (uint32_t i = first; i < n; i++) {
        uint16_t bits;
        memcpy(&bits, from + 2 * i, sizeof(bits));
        uint32_t index = table->index[bits >> 7 & 0xff];
        uint64_t escape = index / KVF_EXACT_EXPONENTS;
        rest[i] = (uint8_t)((bits >> 8 & 0x80) | (bits & 0x7f));
        index %= KVF_EXACT_EXPONENTS;
        indices[i / 2] = (uint8_t)(i % 2 != 0 ? indices[i / 2] | index << 4 : index);
        masks[i / KVF_EXACT_MASK_BITS] |= escape << i % KVF_EXACT_MASK_BITS;
        escapes += (uint32_t)escape;
    }
    return escapes;
}

static inline void kvf_exact_join_from(const uint8_t *exponent, const uint8_t *rest,
                                       const uint8_t *indices, uint32_t first, uint32_t n,
                                       uint8_t *to)
{
    for (uint32_t i = first; i < n; i++) {
        uint32_t index = indices[i / 2] >> (i % 2 * 4) & 15;
        uint16_t bits = (uint16_t)((rest[i] & 0x80) << 8 | exponent[index] << 7 | (rest[i] & 0x7f));
        memcpy(to + 2 * i, &bits, sizeof(bits));
    }
}

#endif /* KVF_CODEC_CODEC_EXACT_KERNELS_H */
