/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_exact_lanes.h: exact on vectors of bytes, for AVX2 and AVX-512. Included by a file for each
 * of the two, empty elsewhere. The bytes are those of codec_exact_kernels.h.
 */
#ifndef KVF_CODEC_CODEC_EXACT_LANES_H
#define KVF_CODEC_CODEC_EXACT_LANES_H

#include "codec/simd_lanes.h"

#if defined(KVF_LANES)

#include "codec/codec_exact_kernels.h"

enum {
    VECTOR_BYTES = LANES * sizeof(uint32_t),
    STEP = 2 * VECTOR_BYTES, /* elements: as many as there are indices in a vector */
};

/* Words that are bytes already, as bytes in order. */
KVF_LANES_INLINE lanes_i narrow_words(lanes_i a, lanes_i b)
{
    return i_order_packed(i_pack_words(a, b));
}

/* The index of each exponent, with bit 4 set; 0 if it has none. Exponents with other upper bits are
 * pushed above 127, where a look-up gives 0. */
KVF_LANES_INLINE lanes_i look_up(const struct kvf_exact_table *table, lanes_i exponents)
{
    lanes_i found = i_set1(0);
    for (uint32_t g = 0; g < table->n_uppers; g++) {
        lanes_i lower = exponents ^ i_set1_8((uint8_t)(table->upper[g] << 4));
        lower = i_add_saturated_u8(lower, i_set1_8(0x70));
        found = found | i_look_up_8(i_load_16_bytes(table->lookup[g]), lower);
    }
    return found;
}

/* One vector of bytes: rest to memory, indices returned. */
KVF_LANES_INLINE lanes_i split_vector(const struct kvf_exact_table *table, const uint8_t *from,
                                      uint8_t *rest)
{
    lanes_i a = i_loadu(from);
    lanes_i b = i_loadu(from + VECTOR_BYTES);
    lanes_i low = i_set1(0x007f007f);
    lanes_i sign = i_set1(0x00800080);
    lanes_i byte = i_set1(0x00ff00ff);
    i_storeu(rest, narrow_words((a & low) | (i_right_16(a, 8) & sign),
                                (b & low) | (i_right_16(b, 8) & sign)));
    return look_up(table, narrow_words(i_right_16(a, 7) & byte, i_right_16(b, 7) & byte));
}

static uint32_t split(const struct kvf_exact_table *table, const uint8_t *from, uint32_t n,
                      uint8_t *rest, uint8_t *indices, uint64_t masks[KVF_EXACT_MASKS])
{
    uint32_t escapes = 0;
    uint32_t i = 0;
    /* the second byte of a pair counts sixteenfold */
    lanes_i weights = i_set1(0x10011001);
    lanes_i index = i_set1(0x0f0f0f0f);
    memset(masks, 0, KVF_EXACT_MASKS * sizeof(masks[0]));
    for (; n - i >= STEP; i += STEP) {
        lanes_i a = split_vector(table, from + 2 * i, rest + i);
        lanes_i b = split_vector(table, from + 2 * i + 2 * VECTOR_BYTES, rest + i + VECTOR_BYTES);
        uint64_t none_a = i_zero_bytes(a);
        uint64_t none_b = i_zero_bytes(b);
        memcpy((uint8_t *)masks + i / 8, &none_a, VECTOR_BYTES / 8);
        memcpy((uint8_t *)masks + (i + VECTOR_BYTES) / 8, &none_b, VECTOR_BYTES / 8);
        escapes += (uint32_t)(__builtin_popcountll(none_a) + __builtin_popcountll(none_b));
        i_storeu(indices + i / 2, narrow_words(i_multiply_add_8(a & index, weights),
                                               i_multiply_add_8(b & index, weights)));
    }
    return escapes + kvf_exact_split_from(table, from, i, n, rest, indices, masks);
}

/* Exponent and the rest of each element, to bf16. */
KVF_LANES_INLINE lanes_i join_words(lanes_i words)
{
    return (i_right_16(words, 1) & i_set1(0x7f807f80)) |
           ((words & i_set1(0x007f007f)) | i_left_16(words & i_set1(0x00800080), 8));
}

/* One vector of bytes of rest, with their exponents, to two of bf16. */
KVF_LANES_INLINE void join_vector(lanes_i rest, lanes_i exponents, uint8_t *to)
{
    rest = i_order_unpacked(rest);
    exponents = i_order_unpacked(exponents);
    i_storeu(to, join_words(i_unpack_low_8(rest, exponents)));
    i_storeu(to + VECTOR_BYTES, join_words(i_unpack_high_8(rest, exponents)));
}

static void join(const uint8_t exponent[KVF_EXACT_EXPONENTS], const uint8_t *rest,
                 const uint8_t *indices, uint32_t n, uint8_t *to)
{
    lanes_i table = i_load_16_bytes(exponent);
    lanes_i nibble = i_set1(0x0f0f0f0f);
    uint32_t i = 0;
    for (; n - i >= STEP; i += STEP) {
        lanes_i pairs = i_order_unpacked(i_loadu(indices + i / 2));
        lanes_i even = i_look_up_8(table, pairs & nibble);
        lanes_i odd = i_look_up_8(table, i_right_16(pairs, 4) & nibble);
        join_vector(i_loadu(rest + i), i_unpack_low_8(even, odd), to + 2 * i);
        join_vector(i_loadu(rest + i + VECTOR_BYTES), i_unpack_high_8(even, odd),
                    to + 2 * i + 2 * VECTOR_BYTES);
    }
    kvf_exact_join_from(exponent, rest, indices, i, n, to);
}

#endif /* KVF_LANES */

#endif /* KVF_CODEC_CODEC_EXACT_LANES_H */
