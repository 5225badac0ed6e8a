/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw_tile_unpack.h: codes of a strip to sums of pairs, and values to pages: what decoders
 * share; see codec_saw_tile.h.
 *
 * Sums of codes are integers: they are added in whatever order and type is quickest. Below 2^15
 * that is two words in a dword, else floats, which hold integers below 2^24 exactly.
 *
 * Two codes stay together, as a pair of words, up to the last stage: their position differs in bit
 * b. 4-bit and 8-bit codes are paired with what is half a dword away, so b is 2 or 1; all others
 * have b = 3, for which the dwords of their planes are first brought into that form. Pair q stands
 * for the positions that are q with a bit b put in.
 */
#ifndef KVF_CODEC_CODEC_SAW_TILE_UNPACK_H
#define KVF_CODEC_CODEC_SAW_TILE_UNPACK_H

#include "codec/codec_saw_tile.h"

#if defined(KVF_LANES)

KVF_LANES_INLINE void stage_pairs(lanes_i *e, uint32_t n, uint32_t stride)
{
    KVF_UNROLL
    for (uint32_t i = 0; i < n; i++) {
        if ((i & stride) == 0) {
            lanes_i u = e[i];
            lanes_i v = e[i + stride];
            e[i] = i_add_16(u, v);
            e[i + stride] = i_sub_16(u, v);
        }
    }
}

KVF_LANES_INLINE void stages_pairs(lanes_i *e, uint32_t n)
{
    stage_pairs(e, n, 1);
    if (n > 2) {
        stage_pairs(e, n, 2);
    }
    if (n > 4) {
        stage_pairs(e, n, 4);
    }
    if (n > 8) {
        stage_pairs(e, n, 8);
    }
}

/* The index of the coefficient at a position. */
KVF_LANES_INLINE uint32_t index_of_position(uint32_t position, uint32_t w)
{
    uint32_t n_l = 1u << (w - 4);
    return index_of_l(position & (n_l - 1)) + index_of_k(position >> (w - 4));
}

/* Of pair q, the one with bit b clear. */
KVF_LANES_INLINE uint32_t index_of_pair(uint32_t q, uint32_t w, uint32_t b)
{
    uint32_t low = q & ((1u << b) - 1);
    return index_of_position(low | (q >> b) << (b + 1), w);
}

/* The dword in raw from which on the second plane of codes is. */
KVF_LANES_INLINE uint32_t low_plane_at(uint32_t n, uint32_t bits)
{
    return (kvf_saw_plane_bytes(n, bits - kvf_saw_low_bits(bits)) + DWORD - 1) / DWORD;
}

KVF_LANES_INLINE uint32_t pair_bit(uint32_t bits)
{
    return bits == 8 ? 1 : bits == 4 ? 2 : 3;
}

/* Pairs are kept in y, by q. The last stages are those over their upper bits: for b = 3 all from 3
 * on, else 16 pairs at a time, or 8 if bit b is one of the upper four. */
KVF_LANES_INLINE uint32_t last_pairs(uint32_t w, uint32_t b)
{
    return b == 3 ? 1u << (w - 4) : b == w - 4 ? 8 : 16;
}

/* Bits of words to the pairs' low bits: those from bit from on, of which mask says how many, to bit
 * to. */
KVF_LANES_INLINE lanes_i pair_bits(lanes_i words, uint32_t from, uint32_t to, uint32_t mask)
{
    lanes_i moved = from >= to ? i_right(words, from - to) : i_left(words, to - from);
    return moved & i_set1((mask << to) * 0x00010001U);
}

/* Eight pairs, positions 16 block + i and 16 block + i + 8, from the planes in raw. */
KVF_LANES_INLINE void unpack_block(uint32_t (*raw)[LANES], uint32_t (*low)[LANES], uint32_t block,
                                   uint32_t bits, lanes_i pairs[8])
{
    uint32_t low_bits = kvf_saw_low_bits(bits);
    uint32_t high_bits = bits - low_bits;
    if (high_bits == 4) {
        lanes_i first = i_load(raw[2 * block]);
        lanes_i second = i_load(raw[2 * block + 1]);
        lanes_i words[2] = {i_low_words(first, second), i_high_words(first, second)};
        KVF_UNROLL
        for (uint32_t i = 0; i < 8; i++) {
            pairs[i] = pair_bits(words[i / 4], i % 4 * 4, low_bits, 15);
        }
    } else {
        lanes_i words = i_load(raw[block]);
        KVF_UNROLL
        for (uint32_t i = 0; i < 8; i++) {
            pairs[i] = pair_bits(words, i * 2, low_bits, 3);
        }
    }
    if (low_bits == 2) {
        lanes_i words = i_load(low[block]);
        KVF_UNROLL
        for (uint32_t i = 0; i < 8; i++) {
            pairs[i] = pairs[i] | pair_bits(words, i * 2, 0, 3);
        }
    } else if (low_bits == 1) {
        /* the 16 bits of this block, so that a byte is at the start of either word */
        lanes_i both = i_load(low[block / 2]);
        both = block % 2 != 0 ? i_right(both, 16) : both;
        lanes_i words = (both & i_set1(0xff)) | (i_left(both, 8) & i_set1(0x00ff0000));
        KVF_UNROLL
        for (uint32_t i = 0; i < 8; i++) {
            pairs[i] = pairs[i] | pair_bits(words, i, 0, 1);
        }
    }
}

/* Codes from raw to pairs in y, through all stages but the last ones. levels: NULL, or codes stand
 * for the bytes of this table, less 128. */
KVF_LANES_INLINE void unpack_pairs(struct tile_work *work, uint32_t w, uint32_t bits,
                                   const lanes_i *levels)
{
    uint32_t b = pair_bit(bits);
    uint32_t n_last = last_pairs(w, b);
    uint32_t n = (1u << (w - 1)) / n_last;
    lanes_i mask = i_set1(bits == 4 ? 0x000f000f : 0x00ff00ff);
    for (uint32_t k = 0; k < n_last; k++) {
        lanes_i e[8];
        if (b == 3) {
            unpack_block(work->raw, work->raw + low_plane_at(1u << w, bits), k, bits, e);
        } else {
            KVF_UNROLL
            for (uint32_t l = 0; l < n; l++) {
                lanes_i dword = i_load(work->raw[(k * n + l) >> b]);
                e[l] = i_right(dword, (l & ((1u << b) - 1)) * bits) & mask;
            }
        }
        if (levels != NULL) {
            KVF_UNROLL
            for (uint32_t l = 0; l < n; l++) {
                lanes_i level = i_look_up_8(*levels, e[l]) & i_set1(0x00ff00ff);
                e[l] = i_sub_16(level, i_set1(0x00800080));
            }
        }
        stages_pairs(e, n);
        KVF_UNROLL
        for (uint32_t l = 0; l < n; l++) {
            i_store(work->y[0][k * n + l], e[l]);
        }
    }
}

/* The value of element i from its sum. */
KVF_LANES_INLINE lanes_f value_of(const struct tile_work *work, const struct tile_scale *scale,
                                  uint32_t i, lanes_f sum, bool has_offset)
{
    lanes_i sign = i_set1(work->signs[i]);
    lanes_f mean = f_set1(work->mean[i]);
    if (has_offset) {
        mean = mean + f_bits(i_bits(scale->offset) ^ sign);
    }
    return f_fma(f_bits(i_bits(scale->factor) ^ sign), sum, mean);
}

KVF_LANES_INLINE lanes_i pair_bf16(lanes_f even, lanes_f odd)
{
    return i_high_words(i_round_bf16(even), i_round_bf16(odd));
}

/* To nearest even; saturated. */
KVF_LANES_INLINE lanes_i pair_f16(lanes_f even, lanes_f odd)
{
    return i_low_words(i_half_saturated(even), i_half_saturated(odd));
}

/* Pairs from y through the last stages, to values in bf16 or fp16, to raw. Elements 2 j and 2 j + 1
 * share a dword: their positions differ in bit w - 3, which is a bit of q, or bit b. */
KVF_LANES_INLINE void finish_pairs(struct tile_work *work, uint32_t w, uint32_t bits, bool is_bf16,
                                   const struct tile_scale *scale, bool has_offset)
{
    uint32_t b = pair_bit(bits);
    uint32_t n_last = last_pairs(w, b);
    uint32_t n = (1u << (w - 1)) / n_last;
    bool pairs_share = b == w - 3;
    uint32_t odd = pairs_share ? 0 : (1u << (w - 4)) / n; /* that bit of k */
    lanes_i sum = i_set1(0x00010001);
    lanes_i difference = i_set1(0xffff0001);
    for (uint32_t l = 0; l < n; l++) {
        uint32_t first = index_of_pair(l, w, b);
        lanes_i e[16];
        KVF_UNROLL
        for (uint32_t k = 0; k < n_last; k++) {
            e[k] = i_load(work->y[0][k * n + l]);
        }
        stages_pairs(e, n_last);
        KVF_UNROLL
        for (uint32_t at = 0; at < 2 * n_last; at++) {
            uint32_t k = at / 2;
            uint32_t half = at % 2;
            if ((k & odd) != 0 || (pairs_share && half != 0)) {
                continue;
            }
            uint32_t i = first + index_of_pair(k * n, w, b) + index_of_position(half << b, w);
            lanes_i stage = half ? difference : sum;
            lanes_f even = f_from_i(i_multiply_add_16(e[k], stage));
            even = value_of(work, scale, i, even, has_offset && at == 0 && l == 0);
            lanes_f next = f_from_i(
                i_multiply_add_16(e[k | odd], pairs_share ? difference : stage));
            next = value_of(work, scale, i + 1, next, false);
            i_store(work->raw[i / 2], is_bf16 ? pair_bf16(even, next) : pair_f16(even, next));
        }
    }
}

/* raw to the pages. Lines of a cache that are written as a whole need not be read before, and what
 * is decoded is more than a cache holds. */
KVF_LANES_INLINE void store_raw(struct tile_work *work, uint32_t n_dwords, uint8_t *const *rows,
                                uint32_t n_lanes)
{
    uintptr_t any = 0;
    for (uint32_t lane = 0; lane < LANES; lane++) {
        any |= (uintptr_t)rows[lane];
    }
    bool streams = n_lanes == LANES && any % CACHE_LINE == 0;
    for (uint32_t at = 0; at < n_dwords; at += LANES) {
        lanes_i r[LANES];
        KVF_UNROLL
        for (uint32_t j = 0; j < LANES; j++) {
            r[j] = i_load(work->raw[at + j]);
        }
        if (streams) {
            i_transpose(r);
            KVF_UNROLL
            for (uint32_t lane = 0; lane < LANES; lane++) {
                i_stream(rows[lane] + at * DWORD, r[lane]);
            }
        } else {
            store_dwords(r, rows, n_lanes, at * DWORD, LANES * DWORD);
        }
    }
}

/* The code at a position, of the planes in raw. */
KVF_LANES_INLINE lanes_i code_at(uint32_t (*raw)[LANES], uint32_t position, uint32_t bits,
                                 uint32_t low_at)
{
    uint32_t low_bits = kvf_saw_low_bits(bits);
    uint32_t high_bits = bits - low_bits;
    uint32_t bit = position * high_bits;
    lanes_i code = i_right(i_load(raw[bit / 32]), bit % 32) & i_set1((1u << high_bits) - 1);
    if (low_bits != 0) {
        bit = position * low_bits;
        lanes_i low = i_right(i_load(raw[low_at + bit / 32]), bit % 32);
        code = i_left(code, low_bits) | (low & i_set1((1u << low_bits) - 1));
    }
    return code;
}

/* Elements that share a dword. */
KVF_LANES_INLINE lanes_i narrow(float (*x)[LANES], uint8_t dtype)
{
    lanes_i dword = i_load(x[0]);
    if (dtype == KVF_DTYPE_BF16) {
        return pair_bf16(f_load(x[0]), f_load(x[1]));
    }
    if (dtype == KVF_DTYPE_F16) {
        return pair_f16(f_load(x[0]), f_load(x[1]));
    }
    if (dtype == KVF_DTYPE_F8E4M3 || dtype == KVF_DTYPE_F8E5M2) {
        dword = i_set1(0);
        KVF_UNROLL
        for (uint32_t e = 0; e < 4; e++) {
            lanes_i byte = dtype == KVF_DTYPE_F8E4M3 ? i_f8e4m3(f_load(x[e]))
                                                     : i_f8e5m2(f_load(x[e]));
            dword = dword | i_left(byte, 8 * e);
        }
    }
    return dword;
}

/* x to the pages. What x has behind the last element does not matter. */
KVF_LANES_INLINE void store_all(const struct tile_row *row, uint8_t dtype, uint32_t a_dword,
                                uint8_t *const *rows, uint32_t n_lanes)
{
    for (uint32_t at = 0; at < row->bytes; at += LANES * DWORD) {
        lanes_i r[LANES];
        for (uint32_t j = 0; j < LANES; j++) {
            uint32_t i = (at / DWORD + j) * a_dword;
            r[j] = i < row->n ? narrow(row->work->x + i, dtype) : i_set1(0);
        }
        store_dwords(r, rows, n_lanes, at, row->bytes - at);
    }
}

static void store_tile(const struct tile_row *row, uint8_t *const *rows, uint32_t n_lanes)
{
    switch (row->tensor->dtype) {
    case KVF_DTYPE_BF16:
        store_all(row, KVF_DTYPE_BF16, 2, rows, n_lanes);
        break;
    case KVF_DTYPE_F16:
        store_all(row, KVF_DTYPE_F16, 2, rows, n_lanes);
        break;
    case KVF_DTYPE_F8E4M3:
        store_all(row, KVF_DTYPE_F8E4M3, 4, rows, n_lanes);
        break;
    case KVF_DTYPE_F8E5M2:
        store_all(row, KVF_DTYPE_F8E5M2, 4, rows, n_lanes);
        break;
    default:
        store_all(row, KVF_DTYPE_F32, 1, rows, n_lanes);
        break;
    }
}

/* Codes of n elements of each vector to raw: planes from whole dwords on, as low_plane_at says.
 * code_rows may be left anywhere. */
static void load_codes(uint32_t (*raw)[LANES], uint32_t n, uint32_t bits, const uint8_t **code_rows)
{
    uint32_t code_bytes = kvf_saw_code_bytes(n, bits);
    uint32_t high_bytes = kvf_saw_plane_bytes(n, bits - kvf_saw_low_bits(bits));
    if (high_bytes % DWORD == 0 || high_bytes == code_bytes) {
        load_dwords(raw, code_rows, code_bytes);
        return;
    }
    load_dwords(raw, code_rows, high_bytes);
    for (uint32_t lane = 0; lane < LANES; lane++) {
        code_rows[lane] += high_bytes;
    }
    load_dwords(raw + low_plane_at(n, bits), code_rows, code_bytes - high_bytes);
}

#endif /* KVF_LANES */

#endif /* KVF_CODEC_CODEC_SAW_TILE_UNPACK_H */
