/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw_tile_encode.h: the encoder of saw on tiles; see codec_saw_tile.h.
 */
#ifndef KVF_CODEC_CODEC_SAW_TILE_ENCODE_H
#define KVF_CODEC_CODEC_SAW_TILE_ENCODE_H

#include "codec/codec_saw_tile_load.h"
#include "codec/codec_saw_tile_planes.h"
#include "codec/simd_convert.h"

#if defined(KVF_LANES)

static lanes_m is_not_finite(lanes_i half)
{
    return m_equal_i(half & i_set1(0x7c00), i_set1(0x7c00));
}

/* (6) u, as a number. A vector of zeros has 0 / 0 here, of which f_max makes 0. */
static lanes_f choose_zero(const struct kvf_codec_tensor *tensor, lanes_f lo, lanes_f scale)
{
    lanes_f top = f_set1((float)((1 << tensor->descriptor.bits) - 1));
    lanes_f zero = (f_set1(0.0f) - lo) / scale - f_set1(kvf_saw_zero_shift(tensor));
    zero = f_min(f_max(zero, f_set1(0.0f)), top);
    return zero + f_set1(0x1.8p23f) - f_set1(0x1.8p23f);
}

/* (5, 6) */
static struct tile_scale choose_scale(const struct kvf_codec_tensor *tensor, uint16_t clip_q15,
                                      lanes_f min, lanes_f max, lanes_m escaped)
{
    if (clip_q15 != KVF_BLOCK_CLIP_ONE) {
        float ratio = (float)clip_q15 * 0x1p-15f;
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
    lanes_i scale = i_smallest_scale(f_from_half(hi) - lo_value, levels);
    lanes_f scale_value = f_from_half(scale);
    lanes_m constant = m_equal_i(scale, i_set1(0));
    escaped = m_or(escaped, m_or(is_not_finite(lo), is_not_finite(hi)));
    escaped = m_or(escaped, m_and(m_not(constant), m_less(scale_value, f_set1(KVF_SAW_SCALE_MIN))));
    lanes_m coded = m_not(escaped);
    lanes_f zero = f_set1(0.0f);
    if (kvf_saw_has_zeros(tensor)) {
        zero = choose_zero(tensor, lo_value, scale_value);
        lo = i_bits(zero + f_set1(0x1.8p23f)); /* in the low word */
        zero = zero + f_set1(kvf_saw_zero_shift(tensor));
        lo_value = lo_of_zero(scale_value, zero);
    }
    return (struct tile_scale){
        .zero = zero,
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

/* (S) i of each element, from the first ratio's scale. */
static void find_steps(uint32_t n, float (*y)[LANES], lanes_f min, lanes_f max,
                       const struct tile_scale *first, float (*steps)[LANES])
{
    lanes_f zero = f_set1(0x1.8p23f);
    lanes_f middle = f_set1(0.5f) * (min + max);
    lanes_f factor = f_set1(16.0f) * first->factor;
    lanes_i magnitude = i_set1(0x7fffffff);
    for (uint32_t i = 0; i < n; i++) {
        lanes_f distance = f_bits(i_bits(f_load(y[i]) - middle) & magnitude);
        f_store(steps[i], f_fma(distance, factor, zero) - zero);
    }
}

/* (S) The cost of each vector with a ratio. What rounds to integers leaves them in the low bits. */
static lanes_i find_cost(uint32_t n, float (*steps)[LANES], uint32_t bits, float first_ratio,
                         float ratio)
{
    lanes_f zero = f_set1(0x1.8p23f);
    lanes_f half = f_set1(0.5f);
    lanes_f last = f_set1((float)((1 << (bits - 1)) - 1));
    lanes_f a = f_set1(first_ratio / (16.0f * ratio));
    lanes_f step = f_set1(-(16.0f * ratio / first_ratio));
    lanes_i cost = i_set1(0u - n * 0x4b400000u);
    for (uint32_t i = 0; i < n; i++) {
        lanes_f at = f_load(steps[i]);
        lanes_f level = f_min(f_fma(at, a, f_set1(0.0f) - half), last) + zero - zero;
        lanes_f error = f_fma(level + half, step, at);
        cost = i_add(cost, i_bits(f_fma(error, error, zero)));
    }
    return cost;
}

/* (S) i of each element, from the first ratio's scale, where there are zeros. */
static void find_zero_steps(uint32_t n, float (*y)[LANES], const struct tile_scale *first,
                            float (*steps)[LANES])
{
    lanes_f magic = f_set1(0x1.8p23f);
    lanes_f factor = f_set1(16.0f) * first->factor;
    for (uint32_t i = 0; i < n; i++) {
        f_store(steps[i], f_fma(f_load(y[i]), factor, magic) - magic);
    }
}

/* (S) The cost of each vector with a ratio where there are zeros. */
static lanes_i find_zero_cost(uint32_t n, float (*steps)[LANES], uint32_t bits, float first_ratio,
                              float ratio, lanes_f zero)
{
    lanes_f magic = f_set1(0x1.8p23f);
    lanes_f none = f_set1(0.0f);
    lanes_f top = f_set1((float)((1 << bits) - 1));
    lanes_f a = f_set1(first_ratio / (16.0f * ratio));
    lanes_f step = f_set1(-(16.0f * ratio / first_ratio));
    lanes_i cost = i_set1(0u - n * 0x4b400000u);
    for (uint32_t i = 0; i < n; i++) {
        lanes_f at = f_load(steps[i]);
        lanes_f level = f_fma(at, a, zero) + magic - magic;
        level = f_min(f_max(level, none), top);
        lanes_f error = f_fma(level - zero, step, at);
        cost = i_add(cost, i_bits(f_fma(error, error, magic)));
    }
    return cost;
}

/* (S) */
static struct tile_scale search_scale(const struct tile_row *row, float (*y)[LANES], lanes_f min,
                                      lanes_f max, lanes_m escaped)
{
    const struct kvf_codec_tensor *tensor = row->tensor;
    const uint16_t *clips = tensor->clips_q15;
    _Alignas(64) float steps[GROUP_MAX][LANES];
    lanes_i best = i_set1(0x7fffffff);
    struct tile_scale found = {
        .offset = f_set1(0.0f),
        .factor = f_set1(0.0f),
        .meta = i_set1((uint32_t)KVF_SAW_ESCAPE_SCALE << 16),
        .escaped = m_lanes(0xffffffff),
    };
    for (uint32_t i = 0; i < tensor->n_clips; i++) {
        struct tile_scale tried = choose_scale(tensor, clips[i], min, max, escaped);
        lanes_i cost;
        if (kvf_saw_has_zeros(tensor)) {
            if (i == 0) {
                find_zero_steps(row->n, y, &tried, steps);
            }
            cost = find_zero_cost(row->n, steps, tensor->descriptor.bits, clips[0], clips[i],
                                  tried.zero);
        } else {
            if (i == 0) {
                find_steps(row->n, y, min, max, &tried, steps);
            }
            cost = find_cost(row->n, steps, tensor->descriptor.bits, clips[0], clips[i]);
        }
        lanes_m better = m_and(m_not(tried.escaped), m_greater_i(best, cost));
        best = i_select(better, cost, best);
        found.offset = f_bits(i_select(better, i_bits(tried.offset), i_bits(found.offset)));
        found.factor = f_bits(i_select(better, i_bits(tried.factor), i_bits(found.factor)));
        found.meta = i_select(better, tried.meta, found.meta);
        found.escaped = m_and(found.escaped, m_not(better));
    }
    return found;
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

/* (1, 3 to 6) A tile to y, and what to code it with. codes: of the row. */
static struct tile_scale measure_tile(const struct tile_row *row, uint32_t token, float (*y)[LANES],
                                      const uint8_t *codes)
{
    lanes_f min;
    lanes_f max;
    lanes_m escaped = load_rotated(row, token, y, codes + (size_t)token * row->tensor->code_bytes,
                                   &min, &max);
    const struct kvf_codec_tensor *tensor = row->tensor;
    if (kvf_saw_has_zeros(tensor)) {
        min = f_min(min, f_set1(0.0f));
        max = f_max(max, f_set1(0.0f));
    }
    return tensor->n_clips != 0
               ? search_scale(row, y, min, max, escaped)
               : choose_scale(tensor, tensor->descriptor.clip_q15, min, max, escaped);
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

static int encode_row(const struct kvf_saw_row *at, uint8_t *mean, uint8_t *meta, uint8_t *codes,
                      struct kvf_codec_escapes *escapes)
{
    struct tile_row row = row_of(at, mean, at->job->n_tokens);
    if (mean != NULL) {
        take_mean(&row, mean);
        rotate_mean(&row, mean);
    }
    return encode_tiles(&row, meta, codes, escapes);
}

#endif /* KVF_LANES */

#endif /* KVF_CODEC_CODEC_SAW_TILE_ENCODE_H */
