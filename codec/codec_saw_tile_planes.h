/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw_tile_planes.h: codes of tiles to planes; see codec_saw_tile.h.
 */
#ifndef KVF_CODEC_CODEC_SAW_TILE_PLANES_H
#define KVF_CODEC_CODEC_SAW_TILE_PLANES_H

#include "codec/codec_saw_tile.h"

#if defined(KVF_LANES)

/* -------------------------------------------------------------------------------------------------
 * Codes in two planes, and of 2 bits: 32 positions at a time
 */
enum {
    BLOCK_CODES = 32,
    BLOCK_QUADS = BLOCK_CODES / 4,
};

/* Bits of each byte to their place, others cleared. */
KVF_LANES_INLINE lanes_i place_bits(lanes_i q, int by, uint8_t mask)
{
    lanes_i moved = by < 0 ? i_right(q, (unsigned int)-by) : i_left(q, (unsigned int)by);
    return moved & i_set1(mask * 0x01010101U);
}

/* Below, byte j of q[s] is the code at position s + 8 j of a block; bytes are in the order of
 * quantize_four. That is the order in which i_unpack_low_8 gives the dwords with bytes 0 and 1, and
 * i_unpack_high_8 those with bytes 2 and 3, of every lane. */

/* Bits 4 in a byte from bit shift on: four dwords. */
KVF_LANES_INLINE void pack_plane_4(const lanes_i *q, int shift, uint32_t (*to)[LANES])
{
    lanes_i bytes[4]; /* u + 4 j of the plane */
    KVF_UNROLL
    for (int u = 0; u < 4; u++) {
        bytes[u] = place_bits(q[2 * u], -shift, 0x0f) | place_bits(q[2 * u + 1], 4 - shift, 0xf0);
    }
    lanes_i first = i_unpack_low_8(bytes[0], bytes[1]);
    lanes_i second = i_unpack_low_8(bytes[2], bytes[3]);
    i_store(to[0], i_low_words(first, second));
    i_store(to[1], i_high_words(first, second));
    first = i_unpack_high_8(bytes[0], bytes[1]);
    second = i_unpack_high_8(bytes[2], bytes[3]);
    i_store(to[2], i_low_words(first, second));
    i_store(to[3], i_high_words(first, second));
}

/* Two bits: two dwords. */
KVF_LANES_INLINE void pack_plane_2(const lanes_i *q, int shift, uint32_t (*to)[LANES])
{
    lanes_i bytes[2]; /* u + 2 j of the plane */
    KVF_UNROLL
    for (int u = 0; u < 2; u++) {
        bytes[u] = place_bits(q[4 * u], -shift, 0x03) | place_bits(q[4 * u + 1], 2 - shift, 0x0c) |
                   place_bits(q[4 * u + 2], 4 - shift, 0x30) |
                   place_bits(q[4 * u + 3], 6 - shift, 0xc0);
    }
    i_store(to[0], i_unpack_low_8(bytes[0], bytes[1]));
    i_store(to[1], i_unpack_high_8(bytes[0], bytes[1]));
}

/* The lowest bit: a dword. */
KVF_LANES_INLINE void pack_plane_1(const lanes_i *q, uint32_t (*to)[LANES])
{
    lanes_i bytes = i_set1(0);
    KVF_UNROLL
    for (int s = 0; s < BLOCK_QUADS; s++) {
        bytes = bytes | place_bits(q[s], s, (uint8_t)(1 << s));
    }
    i_store(to[0], i_interleave_words(bytes));
}

/* The vector with the coefficient of a position; beyond the last one, any. */
KVF_LANES_INLINE const float *at_position(float (*y)[LANES], const uint8_t *order, uint32_t n,
                                          uint32_t position)
{
    return order == NULL ? y[position] : y[order[position < n ? position : n - 1]];
}

/* n_bytes from the dwords of raw on to the rows, from offset on. */
static void store_codes(uint32_t (*raw)[LANES], uint8_t *const *rows, uint32_t offset,
                        uint32_t n_bytes, uint32_t n_lanes)
{
    for (uint32_t at = 0; at < n_bytes; at += LANES * DWORD) {
        lanes_i r[LANES];
        KVF_UNROLL
        for (uint32_t j = 0; j < LANES; j++) {
            r[j] = i_load(raw[at / DWORD + j]);
        }
        store_dwords(r, rows, n_lanes, offset + at, n_bytes - at);
    }
}

/* Bits that no position has are 0. */
static void clear_tail(uint32_t (*raw)[LANES], uint32_t n, uint32_t plane_bits)
{
    uint32_t used = n * plane_bits % 32;
    if (used != 0) {
        uint32_t *last = raw[n * plane_bits / 32];
        i_store(last, i_load(last) & i_set1((1u << used) - 1));
    }
}

#endif /* KVF_LANES */

#endif /* KVF_CODEC_CODEC_SAW_TILE_PLANES_H */
