/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw_tile_encode.h: the encoder of saw on tiles; see codec_saw_tile.h.
 */
#ifndef KVF_CODEC_CODEC_SAW_TILE_ENCODE_H
#define KVF_CODEC_CODEC_SAW_TILE_ENCODE_H

#include "codec/codec_saw_tile.h"

#if defined(KVF_LANES)

/* (1) The largest magnitude of each vector as bits of fp32, from what load_dwords returned or, for
 * types of other sizes, from x. */
static lanes_i find_peak(const struct tile_row *row, lanes_i words)
{
    if (row->tensor->element_bytes == 2) {
        return i_max_16(words, i_left(words, 16)) & i_set1(0xffff0000);
    }
    lanes_i peak = i_set1(0);
    for (uint32_t i = 0; i < row->n; i++) {
        peak = i_max_u32(peak, i_load(row->work->x[i]) & i_set1(0x7fffffff));
    }
    return peak;
}

/* (4) x, flipped, rotated, minus the mean, to y. */
static void rotate_tile(const struct tile_row *row, bool centred, float (*y)[LANES],
                        const struct tile_next *next, lanes_f *min_out, lanes_f *max_out)
{
    struct tile_work *work = row->work;
    switch (row->width) {
    case 6:
        rotate_k(work, 6, y);
        rotate_l(row, 6, centred, y, next, min_out, max_out);
        return;
    case 7:
        rotate_k(work, 7, y);
        rotate_l(row, 7, centred, y, next, min_out, max_out);
        return;
    case 8:
        rotate_k(work, 8, y);
        rotate_l(row, 8, centred, y, next, min_out, max_out);
        return;
    default:
        break;
    }
    for (uint32_t i = 0; i < row->n; i++) {
        i_store(y[i], i_load(work->x[i]) ^ i_set1(work->signs[i]));
    }
    for (uint32_t lane = 0; next != NULL && lane < LANES; lane++) {
        fetch_next(next, lane, row->bytes);
    }
    rotate_any(row, y, false);
    for (uint32_t i = 0; centred && i < row->n; i++) {
        f_store(y[i], f_load(y[i]) - f_set1(work->mean[i]));
    }
    find_range(y, row->n, min_out, max_out);
}

/* (3, 4) The same for bf16 from raw. */
static void rotate_tile_bf16(const struct tile_row *row, lanes_i peak, float (*y)[LANES],
                             const struct tile_next *next, lanes_f *min_out, lanes_f *max_out)
{
    struct tile_work *work = row->work;
    lanes_i exponent = i_right(peak, 23);
    lanes_i dropped = i_left(i_sub(exponent, i_set1(KVF_SAW_DROP_BINADES)), 7);
    lanes_i limit = i_keep(m_greater_i(exponent, i_set1(KVF_SAW_DROP_BINADES)), dropped);
    limit = i_low_words(limit, limit);
    switch (row->width) {
    case 6:
        rotate_k_bf16(work, 6, limit, y);
        rotate_l(row, 6, row->centred, y, next, min_out, max_out);
        return;
    case 7:
        rotate_k_bf16(work, 7, limit, y);
        if (row->centred) {
            rotate_l(row, 7, true, y, next, min_out, max_out);
        } else {
            rotate_l(row, 7, false, y, next, min_out, max_out);
        }
        return;
    case 8:
        rotate_k_bf16(work, 8, limit, y);
        rotate_l(row, 8, row->centred, y, next, min_out, max_out);
        return;
    default:
        break;
    }
    for (uint32_t j = 0; j < (row->n + 1) / 2; j++) {
        i_store(work->raw[j], i_keep_words(i_load(work->raw[j]), limit, i_set1(0)));
    }
    widen_tile(row);
    rotate_tile(row, row->centred, y, next, min_out, max_out);
}

/* (6) lo and hi are fp16, levels is 2^b - 1: the smallest fp16 scale with levels * scale >= hi -
 * lo. As in the reference, an estimate and a step to either side; the products are exact. */
static lanes_i smallest_scale(lanes_f range, float levels)
{
    lanes_i scale = i_half_up(range * f_set1(1.0f / levels));
    lanes_f below = f_from_half(i_sub(scale, i_set1(1)));
    lanes_m too_large = m_and(m_greater_i(scale, i_set1(0)),
                              m_at_least(f_set1(levels) * below, range));
    lanes_m too_small = m_and(m_not(too_large), m_less(f_set1(levels) * f_from_half(scale), range));
    scale = i_sub(scale, i_keep(too_large, i_set1(1)));
    return i_add(scale, i_keep(too_small, i_set1(1)));
}

static lanes_m is_not_finite(lanes_i half)
{
    return m_equal_i(half & i_set1(0x7c00), i_set1(0x7c00));
}

/* (5, 6) */
static struct tile_scale choose_scale(const struct kvf_codec_tensor *tensor, lanes_f min,
                                      lanes_f max, lanes_m escaped)
{
    if (tensor->descriptor.clip_q15 != KVF_BLOCK_CLIP_ONE) {
        float ratio = (float)tensor->descriptor.clip_q15 * 0x1p-15f;
        lanes_f middle = f_set1(0.5f) * (min + max);
        lanes_f half = f_set1(0.5f) * (max - min) * f_set1(ratio);
        min = middle - half;
        max = middle + half;
    }
    lanes_f c = f_set1(tensor->rsqrt_order);
    lanes_i lo = i_half_down(min * c + f_set1(0.0f));
    lanes_i hi = i_half_up(max * c + f_set1(0.0f));
    lanes_f lo_value = f_from_half(lo);
    float levels = (float)((1 << tensor->descriptor.bits) - 1);
    lanes_i scale = smallest_scale(f_from_half(hi) - lo_value, levels);
    lanes_f scale_value = f_from_half(scale);
    lanes_m constant = m_equal_i(scale, i_set1(0));
    escaped = m_or(escaped, m_or(is_not_finite(lo), is_not_finite(hi)));
    escaped = m_or(escaped, m_and(m_not(constant), m_less(scale_value, f_set1(KVF_SAW_SCALE_MIN))));
    lanes_m coded = m_not(escaped);
    return (struct tile_scale){
        .offset = f_bits(i_keep(coded, i_bits(lo_value * f_set1(tensor->sqrt_order)))),
        .factor = f_bits(
            i_keep(m_and(coded, m_not(constant)), i_bits(c * (f_set1(1.0f) / scale_value)))),
        .meta = i_select(escaped, i_set1((uint32_t)KVF_SAW_ESCAPE_SCALE << 16),
                         i_low_words(lo, scale)),
        .escaped = escaped,
    };
}

/* (7) As an integer in the low word, not clamped. The product is exact in the fused operation, and
 * adding 1.5 2^23 rounds it to an integer in the low bits, ties to even. Codes lie within a step or
 * two of 0 .. 2^b - 1, because min and max are those of the vector. */
KVF_LANES_INLINE lanes_i quantize(const float *y, const struct tile_scale *scale)
{
    return i_bits(f_fma(f_load(y) - scale->offset, scale->factor, f_set1(0x1.8p23f)));
}

/* Codes of four vectors as the bytes of a dword, but that bytes 0 and 1 of lanes 0 to 3 come first
 * and then their bytes 2 and 3, and so for each four lanes. */
KVF_LANES_INLINE lanes_i quantize_four(const float *a, const float *b, const float *c,
                                       const float *d, const struct tile_scale *scale)
{
    return i_pack_words(i_low_words(quantize(a, scale), quantize(b, scale)),
                        i_low_words(quantize(c, scale), quantize(d, scale)));
}

/* Codes of the vectors at e, as a dword: 8 of 4 bits, or 4 of 8. */
KVF_LANES_INLINE lanes_i pack_dword(const float *const *e, uint32_t bits,
                                    const struct tile_scale *scale)
{
    if (bits == 8) {
        return i_interleave_words(quantize_four(e[0], e[1], e[2], e[3], scale));
    }
    lanes_i top = i_set1(0x0f0f0f0f);
    lanes_i low = i_min_u8(quantize_four(e[0], e[2], e[4], e[6], scale), top);
    lanes_i high = i_min_u8(quantize_four(e[1], e[3], e[5], e[7], scale), top);
    return i_interleave_words(low | i_left(high, 4));
}

/* Codes of a tile from y in the stored order, n of them, to the rows. */
KVF_LANES_INLINE void pack_special(uint32_t n, uint32_t bits, float (*y)[LANES],
                                   const struct tile_scale *scale, uint8_t *const *rows,
                                   uint32_t n_lanes)
{
    uint32_t a_dword = 32 / bits;
    uint32_t n_dwords = n / a_dword;
    for (uint32_t first = 0; first < n_dwords; first += LANES) {
        lanes_i r[LANES];
        KVF_UNROLL
        for (uint32_t j = 0; j < LANES; j++) {
            r[j] = i_set1(0);
            if (first + j < n_dwords) {
                const float *e[8];
                KVF_UNROLL
                for (uint32_t i = 0; i < a_dword; i++) {
                    e[i] = y[(first + j) * a_dword + i];
                }
                r[j] = pack_dword(e, bits, scale);
            }
        }
        store_dwords(r, rows, n_lanes, first * DWORD, n_dwords * DWORD - first * DWORD);
    }
}

/* The same by the order of the tensor. */
static void pack_any(const struct tile_row *row, float (*y)[LANES], const struct tile_scale *scale,
                     uint8_t *const *rows, uint32_t n_lanes)
{
    const struct kvf_codec_tensor *tensor = row->tensor;
    uint32_t bits = tensor->descriptor.bits;
    uint32_t a_dword = 32 / bits;
    for (uint32_t at = 0; at < tensor->code_bytes; at += LANES * DWORD) {
        lanes_i r[LANES];
        for (uint32_t j = 0; j < LANES; j++) {
            uint32_t position = (at / DWORD + j) * a_dword;
            uint32_t left = position < row->n ? row->n - position : 0;
            r[j] = i_set1(0);
            if (left == 0) {
                continue;
            }
            const float *e[8];
            for (uint32_t i = 0; i < a_dword; i++) {
                e[i] = y[tensor->order[position + (i < left ? i : 0)]];
            }
            r[j] = bits == 4 ? pack_dword(e, 4, scale) : pack_dword(e, 8, scale);
            if (left < a_dword) {
                r[j] = r[j] & i_set1((1u << left * bits) - 1);
            }
        }
        store_dwords(r, rows, n_lanes, at, tensor->code_bytes - at);
    }
}

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

/* Codes of n positions to raw: the first plane from dword 0 on, the second one from low_at on.
 * order NULL: y is in the stored order. */
KVF_LANES_INLINE void pack_blocks(uint32_t n, uint32_t bits, const uint8_t *order,
                                  float (*y)[LANES], const struct tile_scale *scale,
                                  uint32_t (*raw)[LANES], uint32_t low_at)
{
    uint32_t low_bits = kvf_saw_low_bits(bits);
    lanes_i top = i_set1(((1u << bits) - 1) * 0x01010101U);
    for (uint32_t first = 0; first < n; first += BLOCK_CODES) {
        lanes_i q[BLOCK_QUADS];
        KVF_UNROLL
        for (uint32_t s = 0; s < BLOCK_QUADS; s++) {
            lanes_i quad = quantize_four(at_position(y, order, n, first + s),
                                         at_position(y, order, n, first + s + 8),
                                         at_position(y, order, n, first + s + 16),
                                         at_position(y, order, n, first + s + 24), scale);
            q[s] = i_min_u8(quad, top);
        }
        if (bits - low_bits == 4) {
            pack_plane_4(q, (int)low_bits, raw + first / 8);
        } else {
            pack_plane_2(q, (int)low_bits, raw + first / 16);
        }
        if (low_bits == 2) {
            pack_plane_2(q, 0, raw + low_at + first / 16);
        } else if (low_bits == 1) {
            pack_plane_1(q, raw + low_at + first / 32);
        }
    }
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

#define PACK_PLANES(name, bits)                                                                    \
    static void name(const struct tile_row *row, float(*y)[LANES], const struct tile_scale *scale, \
                     uint32_t low_at)                                                              \
    {                                                                                              \
        if (row->width != 0) {                                                                     \
            pack_blocks(row->n, bits, NULL, y, scale, row->work->raw, low_at);                     \
        } else {                                                                                   \
            pack_blocks(row->n, bits, row->tensor->order, y, scale, row->work->raw, low_at);       \
        }                                                                                          \
    }

PACK_PLANES(pack_planes_6, 6)
PACK_PLANES(pack_planes_5, 5)
PACK_PLANES(pack_planes_3, 3)
PACK_PLANES(pack_planes_2, 2)

static void pack_planes(const struct tile_row *row, float (*y)[LANES],
                        const struct tile_scale *scale, uint8_t *const *rows, uint32_t n_lanes)
{
    uint32_t bits = row->tensor->descriptor.bits;
    uint32_t low_bits = kvf_saw_low_bits(bits);
    uint32_t high_bytes = kvf_saw_plane_bytes(row->n, bits - low_bits);
    uint32_t code_bytes = row->tensor->code_bytes;
    /* whole blocks: the planes are one piece, in raw as in the strip */
    bool whole = row->n % BLOCK_CODES == 0;
    uint32_t low_at = whole ? high_bytes / DWORD : GROUP_MAX / 8;
    uint32_t(*raw)[LANES] = row->work->raw;
    switch (bits) {
    case 6:
        pack_planes_6(row, y, scale, low_at);
        break;
    case 5:
        pack_planes_5(row, y, scale, low_at);
        break;
    case 3:
        pack_planes_3(row, y, scale, low_at);
        break;
    default:
        pack_planes_2(row, y, scale, low_at);
        break;
    }
    if (whole) {
        store_codes(raw, rows, 0, code_bytes, n_lanes);
        return;
    }
    clear_tail(raw, row->n, bits - low_bits);
    store_codes(raw, rows, 0, high_bytes, n_lanes);
    if (low_bits != 0) {
        clear_tail(raw + low_at, row->n, low_bits);
        store_codes(raw + low_at, rows, high_bytes, code_bytes - high_bytes, n_lanes);
    }
}

/* Codes of escapes are 0, whatever came out for them. */
static void pack_tile(const struct tile_row *row, float (*y)[LANES], const struct tile_scale *scale,
                      uint8_t *codes, uint32_t n_lanes)
{
    uint8_t *rows[LANES];
    for (uint32_t lane = 0; lane < LANES; lane++) {
        rows[lane] = codes + (size_t)lane * row->tensor->code_bytes;
    }
    switch (row->width * 16 + row->tensor->descriptor.bits) {
    case 6 * 16 + 4:
        pack_special(64, 4, y, scale, rows, n_lanes);
        break;
    case 6 * 16 + 8:
        pack_special(64, 8, y, scale, rows, n_lanes);
        break;
    case 7 * 16 + 4:
        pack_special(128, 4, y, scale, rows, n_lanes);
        break;
    case 7 * 16 + 8:
        pack_special(128, 8, y, scale, rows, n_lanes);
        break;
    case 8 * 16 + 4:
        pack_special(256, 4, y, scale, rows, n_lanes);
        break;
    case 8 * 16 + 8:
        pack_special(256, 8, y, scale, rows, n_lanes);
        break;
    default:
        if (row->tensor->descriptor.bits % 4 == 0) {
            pack_any(row, y, scale, rows, n_lanes);
        } else {
            pack_planes(row, y, scale, rows, n_lanes);
        }
        break;
    }
    uint32_t escaped = m_bits(scale->escaped) & ((1u << n_lanes) - 1u);
    for (; escaped != 0; escaped &= escaped - 1) {
        memset(rows[__builtin_ctz(escaped)], 0, row->tensor->code_bytes);
    }
}

/* (1) */
static lanes_m find_too_large(const struct tile_row *row, lanes_i peak)
{
    uint32_t limit = row->tensor->dtype == KVF_DTYPE_F16 ? 0x7c000000
                                                         : (uint32_t)KVF_SAW_ESCAPE_EXPONENT << 23;
    return m_greater_i(peak, i_set1(limit - 1));
}

/* (1) Lanes from n_lanes on and sinks count as escapes. */
static lanes_m find_escapes(const struct tile_row *row, lanes_i peak, uint32_t token,
                            uint32_t n_lanes)
{
    uint32_t n_sinks = row->at->job->n_sinks;
    uint32_t n_left_out = n_sinks <= token            ? 0
                          : n_sinks - token < n_lanes ? n_sinks - token
                                                      : n_lanes;
    uint32_t bits = ~((1u << n_lanes) - 1u) | ((1u << n_left_out) - 1u);
    return m_or(m_lanes(bits), find_too_large(row, peak));
}

static uint32_t lanes_from(const struct tile_row *row, uint32_t token)
{
    uint32_t left = row->at->job->n_tokens - token;
    return left < LANES ? left : LANES;
}

/* (1, 3 to 6) A tile to y, and what to code it with. codes: of the row. */
static struct tile_scale measure_tile(const struct tile_row *row, uint32_t token, float (*y)[LANES],
                                      const uint8_t *codes)
{
    struct tile_work *work = row->work;
    struct tile_next next = {
        .rows = work->rows + token,
        .ahead = row->to_next,
        .codes = (uintptr_t)codes + (size_t)(token + LANES) * row->tensor->code_bytes,
    };
    lanes_f min;
    lanes_f max;
    lanes_i peak = load_dwords(work->raw, (const uint8_t *const *)(work->rows + token), row->bytes);
    if (row->tensor->dtype == KVF_DTYPE_BF16) {
        peak = find_peak(row, peak);
        rotate_tile_bf16(row, peak, y, &next, &min, &max);
    } else {
        widen_tile(row);
        peak = find_peak(row, peak);
        rotate_tile(row, row->centred, y, &next, &min, &max);
    }
    lanes_m escaped = find_escapes(row, peak, token, lanes_from(row, token));
    return choose_scale(row->tensor, min, max, escaped);
}

/* Meta and escapes of a tile. False if there are too many. */
static bool write_meta(const struct tile_row *row, uint32_t token, const struct tile_scale *scale,
                       uint8_t *meta, struct kvf_codec_escapes *escapes)
{
    uint32_t n_lanes = lanes_from(row, token);
    _Alignas(64) uint32_t meta_of[LANES];
    i_store(meta_of, scale->meta);
    memcpy(meta + (size_t)token * KVF_SAW_META_BYTES, meta_of, n_lanes * KVF_SAW_META_BYTES);
    uint32_t bits = m_bits(scale->escaped) & ((1u << n_lanes) - 1u);
    for (; bits != 0; bits &= bits - 1) {
        if (!kvf_saw_escape(row->at, token + (uint32_t)__builtin_ctz(bits), escapes)) {
            return false;
        }
    }
    return true;
}

/* A tile is packed after the next one has been measured: its scales are a long chain of
 * operations, and packing another tile is what the processor can do meanwhile. */
static int encode_tiles(const struct tile_row *row, uint8_t *meta, uint8_t *codes,
                        struct kvf_codec_escapes *escapes)
{
    float(*y)[GROUP_MAX][LANES] = row->work->y;
    uint32_t n_tokens = row->at->job->n_tokens;
    uint32_t token = 0;
    struct tile_scale scale = measure_tile(row, 0, y[0], codes);
    while (write_meta(row, token, &scale, meta, escapes)) {
        uint32_t next = token + LANES;
        uint32_t parity = token / LANES % 2;
        struct tile_scale next_scale = scale;
        if (next < n_tokens) {
            next_scale = measure_tile(row, next, y[1 - parity], codes);
        }
        pack_tile(row, y[parity], &scale, codes + (size_t)token * row->tensor->code_bytes,
                  lanes_from(row, token));
        if (next >= n_tokens) {
            return KVF_OK;
        }
        token = next;
        scale = next_scale;
    }
    return KVF_ERR_NO_SPACE;
}

/* (2) From the sums of n channels: sums + s has partial sum s, 8 apart. */
static void finish_means(float (*partial)[KVF_SAW_PARTIAL_SUMS], uint32_t n, uint32_t count,
                         uint8_t *mean_out)
{
    for (uint32_t i = 0; i < n; i++) {
        const float *p = partial[i];
        float sum = ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]));
        float mean = count != 0 ? sum / (float)count : 0.0f;
        bool fits = mean > -65520.0f && mean < 65520.0f;
        uint16_t half = fits ? kvf_f16_from_f32(mean) : 0;
        memcpy(mean_out + i * sizeof(half), &half, sizeof(half));
    }
}

static const uint8_t no_vector[GROUP_MAX * sizeof(float)];

/* Let sums see zeros instead of sinks, of tokens that do not exist and, if escapes, of vectors of
 * bf16 that are escapes by rule 1. Returns how many are left. */
static uint32_t choose_summed(const struct tile_row *row, bool escapes)
{
    struct tile_work *work = row->work;
    const struct kvf_codec_job *job = row->at->job;
    uint32_t count = 0;
    for (uint32_t i = 0; i < SUMMED_MAX; i++) {
        uint32_t token = kvf_saw_sampled_token(job->n_tokens, i % KVF_SAW_PARTIAL_SUMS,
                                               i / KVF_SAW_PARTIAL_SUMS);
        bool left_out = token < job->n_sinks || token >= job->n_tokens;
        for (uint32_t at = 0; escapes && !left_out && at < row->bytes; at += sizeof(uint16_t)) {
            uint16_t half;
            memcpy(&half, work->rows[token] + at, sizeof(half));
            left_out = (half & 0x7fff) >= KVF_SAW_ESCAPE_EXPONENT << 7;
        }
        work->summed[i] = left_out ? no_vector : work->rows[token];
        count += !left_out;
    }
    return count;
}

/* (2) The mean of each channel to mean_out, from tiles. */
static void make_mean(const struct tile_row *row, uint8_t *mean_out)
{
    struct tile_work *work = row->work;
    uint32_t count = choose_summed(row, false);
    memset(work->partial, 0, row->n * sizeof(work->partial[0]));
    for (uint32_t first = 0; first < SUMMED_MAX; first += LANES) {
        lanes_i peak = load_dwords(work->raw, work->summed + first, row->bytes);
        widen_tile(row);
        lanes_m too_large = find_too_large(row, find_peak(row, peak));
        count -= (uint32_t)__builtin_popcount(m_bits(too_large));
        for (uint32_t i = 0; i < row->n; i++) {
            /* a sum that began as +0 is never -0, so adding +0 leaves it as it is */
            f_add_eights(work->partial[i], f_bits(i_keep(m_not(too_large), i_load(work->x[i]))));
        }
    }
    finish_means(work->partial, row->n, count, mean_out);
}

/* Partial sums of 2 LANES channels of bf16, from the byte at on; even channels and odd ones apart.
 * Returns the largest magnitudes. */
KVF_LANES_INLINE lanes_i sum_channels(const struct tile_row *row, uint32_t at,
                                      lanes_f even[KVF_SAW_PARTIAL_SUMS],
                                      lanes_f odd[KVF_SAW_PARTIAL_SUMS])
{
    /* as many sums at a time as there are registers for */
    enum {
        AT_ONCE = LANES / 2
    };
    lanes_i peak = i_set1(0);
    lanes_f one = f_hidden(1.0f);
    KVF_UNROLL
    for (uint32_t first = 0; first < KVF_SAW_PARTIAL_SUMS; first += AT_ONCE) {
        lanes_f sum[2 * AT_ONCE];
        KVF_UNROLL
        for (uint32_t s = 0; s < 2 * AT_ONCE; s++) {
            sum[s] = f_set1(0.0f);
        }
        for (uint32_t i = first; i < SUMMED_MAX; i += KVF_SAW_PARTIAL_SUMS) {
            KVF_UNROLL
            for (uint32_t s = 0; s < AT_ONCE; s++) {
                lanes_i words = i_loadu(row->work->summed[i + s] + at);
                peak = i_max_16(peak, words & i_set1(0x7fff7fff));
                sum[2 * s] = sum[2 * s] + f_bits(i_left(words, 16));
                sum[2 * s + 1] = f_fma(f_bits(words & i_set1(0xffff0000)), one, sum[2 * s + 1]);
            }
        }
        KVF_UNROLL
        for (uint32_t s = 0; s < AT_ONCE; s++) {
            even[first + s] = sum[2 * s];
            odd[first + s] = sum[2 * s + 1];
        }
    }
    return peak;
}

/* As fp16 in the low word. */
KVF_LANES_INLINE lanes_i mean_of_sums(const lanes_f p[KVF_SAW_PARTIAL_SUMS], lanes_f count)
{
    lanes_f sum = ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]));
    lanes_f mean = sum / count;
    lanes_m fits = m_and(m_less(f_set1(-65520.0f), mean), m_less(mean, f_set1(65520.0f)));
    return i_keep(fits, i_half_nearest(mean));
}

/* (2) For bf16 and a multiple of 2 LANES channels. It looks for escapes on the way and starts again
 * if there are any, which is rare. */
static void make_mean_bf16(const struct tile_row *row, uint8_t *mean_out)
{
    lanes_i limit = i_set1(((uint32_t)KVF_SAW_ESCAPE_EXPONENT << 23) - 1);
    bool escapes = false;
    uint32_t count = choose_summed(row, false);
    for (uint32_t at = 0; at < row->bytes;) {
        lanes_f even[KVF_SAW_PARTIAL_SUMS];
        lanes_f odd[KVF_SAW_PARTIAL_SUMS];
        lanes_i peak = sum_channels(row, at, even, odd);
        lanes_i highest = i_max_16(peak, i_left(peak, 16)) & i_set1(0xffff0000);
        if (!escapes && m_bits(m_greater_i(highest, limit)) != 0) {
            escapes = true;
            count = choose_summed(row, true);
            at = 0;
            continue;
        }
        /* of no vectors the sum is 0, and so is the mean */
        lanes_f divisor = f_set1(count != 0 ? (float)count : 1.0f);
        i_storeu(mean_out + at,
                 i_low_words(mean_of_sums(even, divisor), mean_of_sums(odd, divisor)));
        at += LANES * DWORD;
    }
}

/* (4) The mean as it comes out of the rotation, in the order of y, to work->mean. A tile that has
 * it in every lane is rotated as any other. */
static void rotate_mean(const struct tile_row *row, const uint8_t *mean)
{
    struct tile_work *work = row->work;
    for (uint32_t i = 0; i < row->n; i++) {
        uint16_t half;
        memcpy(&half, mean + i * sizeof(half), sizeof(half));
        f_store(work->x[i], f_set1(kvf_f32_from_f16(half)));
    }
    lanes_f min;
    lanes_f max;
    float(*y)[LANES] = work->y[0];
    rotate_tile(row, false, y, NULL, &min, &max);
    for (uint32_t i = 0; i < row->n; i++) {
        work->mean[i] = y[i][0];
    }
}

static int encode_row(const struct kvf_saw_row *at, uint8_t *mean, uint8_t *meta, uint8_t *codes,
                      struct kvf_codec_escapes *escapes)
{
    struct tile_row row = row_of(at, mean, at->job->n_tokens);
    if (mean != NULL) {
        if (row.tensor->dtype == KVF_DTYPE_BF16 && row.n % (2 * LANES) == 0) {
            make_mean_bf16(&row, mean);
        } else {
            make_mean(&row, mean);
        }
        rotate_mean(&row, mean);
    }
    return encode_tiles(&row, meta, codes, escapes);
}

#endif /* KVF_LANES */

#endif /* KVF_CODEC_CODEC_SAW_TILE_ENCODE_H */
