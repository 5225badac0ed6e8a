/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw_tile.h: the saw codec on tiles of LANES vectors, for AVX2 and AVX-512. Included once by
 * a file that is compiled for one of them; empty elsewhere. The bytes are those of
 * codec_saw_scalar.c; numbers in comments are steps of codec_saw.h.
 *
 * A tile has a vector a lane: x[i] holds element i of LANES vectors. So butterflies, minima and
 * packing need no shuffles, and the choice of a scale is done for LANES vectors at once; only the
 * way in and out of a tile transposes, on dwords, whatever their content: raw[j] holds dword j of
 * LANES vectors as they are in pages, or of their codes.
 *
 * Vectors of 64, 128 and 256 elements (w = 6, 7, 8 bits of index) have a path of their own, which
 * works in the stored order: position p = k 2^(w-4) + l, where the four bits of k are, from the
 * top, bits 4, 3, 0, 1 of the coefficient's index, and the bits of l, from the bottom, its bits 2,
 * 5, 6, 7. The stages that come first (rotate.h) are then those over k, for each l, and the others
 * those over l, for each k; either fits in registers.
 */
#ifndef KVF_CODEC_CODEC_SAW_TILE_H
#define KVF_CODEC_CODEC_SAW_TILE_H

#include "codec/simd_lanes.h"

#if defined(KVF_LANES)

#include "codec/codec_fp.h"
#include "codec/codec_saw_row.h"
#include "codec/rotate.h"

enum {
    GROUP_MAX = KVF_CODEC_GROUP_MAX,
    TOKENS_MAX = KVF_CHUNK_TOKENS_MAX,
    FACTOR_MAX = KVF_ROTATE_FACTOR_MAX,
    DWORD = sizeof(uint32_t),
    COEFFICIENTS_A_K = 16, /* values of k above */
    CACHE_LINE = 64,
};

struct tile_work {
    _Alignas(64) uint32_t raw[GROUP_MAX][LANES];
    float x[GROUP_MAX][LANES]; /* by element */
    float y[GROUP_MAX][LANES]; /* by position, or by element where the path is not special */
    float mean[GROUP_MAX]; /* encode: rotated, in the order of y; decode: by element, 0 if none */
    uint32_t signs[GROUP_MAX];             /* the sign bit where a channel is flipped */
    uint32_t sign_pairs[GROUP_MAX / 2];    /* the same for two bf16 or fp16 in a dword */
    float factor[FACTOR_MAX * FACTOR_MAX]; /* the signs of rotate.h's order m, row by row */
    _Alignas(64) float partial[GROUP_MAX][KVF_SAW_PARTIAL_SUMS];
    uint8_t *rows[TOKENS_MAX + LANES]; /* vectors of the row; the last one repeated */
    const uint8_t *summed[TOKENS_MAX + KVF_SAW_PARTIAL_SUMS]; /* for sums: zeros for what is left
                                                                 out */
    _Alignas(64) uint8_t tail[LANES][LANES * DWORD];
};

/* A row, as kvf_saw_row has it, and what is known about it here. */
struct tile_row {
    const struct kvf_saw_row *at;
    const struct kvf_codec_tensor *tensor;
    struct tile_work *work;
    uint32_t n;        /* elements */
    uint32_t bytes;    /* of a vector in pages */
    uint32_t width;    /* w, or 0: not a special one */
    ptrdiff_t to_next; /* from a vector of this row to the same token's in the next row */
    bool centred;
};

/* What the vectors of a tile are coded with. */
struct tile_scale {
    lanes_f offset; /* lo d */
    lanes_f factor; /* c (1 / scale); decode: scale c */
    lanes_i meta;
    lanes_m escaped;
};

/* -------------------------------------------------------------------------------------------------
 * Rows
 */

/* Addresses of the vectors of n tokens of the view, and of LANES more, the last one again: tiles
 * are always full. */
static void find_rows(const struct tile_row *row, uint32_t n)
{
    const struct kvf_codec_job *job = row->at->job;
    uint8_t **rows = row->work->rows;
    uint32_t token = 0;
    while (token < n) {
        uint8_t *vector = kvf_pages_vector(row->tensor, job, row->at->row, token);
        for (uint32_t slot = 0; slot < job->view->tokens_a_page && token < n; slot++) {
            rows[token++] = vector;
            vector += job->tensor->token_stride_bytes;
        }
    }
    for (uint32_t lane = 0; lane < LANES; lane++) {
        rows[n + lane] = rows[n - 1];
    }
}

static void fill_signs(const struct tile_row *row)
{
    struct tile_work *work = row->work;
    for (uint32_t i = 0; i < row->n; i++) {
        work->signs[i] = kvf_saw_is_flipped(row->at, i) ? 0x80000000 : 0;
    }
    for (uint32_t i = 0; i < row->n; i += 2) {
        uint32_t odd = i + 1 < row->n ? work->signs[i + 1] : 0;
        work->sign_pairs[i / 2] = work->signs[i] >> 16 | odd;
    }
}

static struct tile_row row_of(const struct kvf_saw_row *at, const uint8_t *mean, uint32_t n_tokens,
                              bool inverse)
{
    const struct kvf_codec_tensor *tensor = at->tensor;
    struct tile_row row = {
        .at = at,
        .tensor = tensor,
        .work = at->work,
        .n = tensor->group,
        .bytes = (uint32_t)tensor->group * tensor->element_bytes,
        .centred = mean != NULL,
    };
    if (row.n == tensor->rot_order) {
        row.width = row.n == 64 ? 6 : row.n == 128 ? 7 : row.n == 256 ? 8 : 0;
    }
    if (at->row + 1u < tensor->n_rows) {
        row.to_next = kvf_pages_vector(tensor, at->job, at->row + 1, 0) -
                      kvf_pages_vector(tensor, at->job, at->row, 0);
    }
    find_rows(&row, n_tokens);
    fill_signs(&row);
    if (row.width == 0) {
        kvf_rotate_factor(tensor->rot_order, inverse, row.work->factor);
    }
    return row;
}

/* -------------------------------------------------------------------------------------------------
 * In and out of a tile
 */

/* n_bytes of each of LANES vectors to raw, padded with zeros to a multiple of LANES dwords. */
static void load_dwords(struct tile_work *work, const uint8_t *const *rows, uint32_t n_bytes)
{
    for (uint32_t at = 0; at < n_bytes; at += LANES * DWORD) {
        lanes_i r[LANES];
        if (n_bytes - at >= LANES * DWORD) {
            KVF_UNROLL
            for (int lane = 0; lane < LANES; lane++) {
                r[lane] = i_loadu(rows[lane] + at);
            }
        } else {
            memset(work->tail, 0, sizeof(work->tail));
            for (int lane = 0; lane < LANES; lane++) {
                memcpy(work->tail[lane], rows[lane] + at, n_bytes - at);
                r[lane] = i_load(work->tail[lane]);
            }
        }
        i_transpose(r);
        KVF_UNROLL
        for (int j = 0; j < LANES; j++) {
            i_store(work->raw[at / DWORD + (uint32_t)j], r[j]);
        }
    }
}

/* LANES dwords of each of n_lanes vectors, of which n_bytes count, to rows + at. */
KVF_LANES_INLINE void store_dwords(struct tile_work *work, lanes_i r[LANES], uint8_t *const *rows,
                                   uint32_t n_lanes, uint32_t at, uint32_t n_bytes)
{
    i_transpose(r);
    if (n_lanes == LANES && n_bytes >= LANES * DWORD) {
        KVF_UNROLL
        for (int lane = 0; lane < LANES; lane++) {
            i_storeu(rows[lane] + at, r[lane]);
        }
        return;
    }
    n_bytes = n_bytes < LANES * DWORD ? n_bytes : LANES * DWORD;
    KVF_UNROLL
    for (int lane = 0; lane < LANES; lane++) {
        i_store(work->tail[lane], r[lane]);
    }
    for (uint32_t lane = 0; lane < n_lanes; lane++) {
        memcpy(rows[lane] + at, work->tail[lane], n_bytes);
    }
}

/* Bits of the largest magnitude of each vector, as fp32; of a 16-bit type in the high word. */
static lanes_i find_peak(const struct tile_row *row)
{
    lanes_i peak = i_set1(0);
    uint32_t n_dwords = (row->bytes + DWORD - 1) / DWORD;
    if (row->tensor->element_bytes == 2) {
        for (uint32_t j = 0; j < n_dwords; j++) {
            peak = i_max_16(peak, i_load(row->work->raw[j]) & i_set1(0x7fff7fff));
        }
        return i_max_16(peak, i_left(peak, 16)) & i_set1(0xffff0000);
    }
    for (uint32_t i = 0; i < row->n; i++) {
        peak = i_max_u32(peak, i_load(row->work->x[i]) & i_set1(0x7fffffff));
    }
    return peak;
}

/* raw to fp32 in x, not flipped. The loops over lanes are for the compiler to vectorize. */
static void widen_tile(const struct tile_row *row)
{
    struct tile_work *work = row->work;
    for (uint32_t i = 0; i < row->n; i++) {
        const uint32_t *raw = work->raw[i * row->tensor->element_bytes / DWORD];
        float *x = work->x[i];
        switch (row->tensor->dtype) {
        case KVF_DTYPE_BF16:
            i_store(x, i_left(i_load(raw), i % 2 == 0 ? 16 : 0) & i_set1(0xffff0000));
            break;
        case KVF_DTYPE_F16:
            f_store(x, f_from_half(i % 2 == 0 ? i_load(raw) : i_right(i_load(raw), 16)));
            break;
        case KVF_DTYPE_F8E4M3:
            for (int lane = 0; lane < LANES; lane++) {
                x[lane] = kvf_f32_from_f8e4m3((uint8_t)(raw[lane] >> (i % 4 * 8)));
            }
            break;
        case KVF_DTYPE_F8E5M2:
            for (int lane = 0; lane < LANES; lane++) {
                x[lane] = kvf_f32_from_f8e5m2((uint8_t)(raw[lane] >> (i % 4 * 8)));
            }
            break;
        default:
            i_store(x, i_load(raw));
            break;
        }
    }
}

/* -------------------------------------------------------------------------------------------------
 * Rotation
 */
KVF_LANES_INLINE void stage(lanes_f *e, int n, int stride)
{
    KVF_UNROLL
    for (int i = 0; i < n; i++) {
        if ((i & stride) == 0) {
            lanes_f u = e[i];
            lanes_f v = e[i + stride];
            e[i] = u + v;
            e[i + stride] = u - v;
        }
    }
}

/* The stages over k: bits 0, 1, 3, 4 of the index are bits 1, 0, 2, 3 of k. */
KVF_LANES_INLINE void stages_k(lanes_f e[COEFFICIENTS_A_K])
{
    stage(e, COEFFICIENTS_A_K, 2);
    stage(e, COEFFICIENTS_A_K, 1);
    stage(e, COEFFICIENTS_A_K, 4);
    stage(e, COEFFICIENTS_A_K, 8);
}

/* The stages over l, of which there are 2^(w-4): bits 2, 5, 6, 7. */
KVF_LANES_INLINE void stages_l(lanes_f *e, uint32_t w)
{
    stage(e, 1 << (w - 4), 1);
    stage(e, 1 << (w - 4), 2);
    if (w > 6) {
        stage(e, 1 << (w - 4), 4);
    }
    if (w > 7) {
        stage(e, 1 << (w - 4), 8);
    }
}

/* The bits of the index that l has. */
KVF_LANES_INLINE uint32_t index_of_l(uint32_t l)
{
    return (l & 1) << 2 | l >> 1 << 5;
}

/* And k. */
KVF_LANES_INLINE uint32_t index_of_k(uint32_t k)
{
    return (k & 1) << 1 | (k >> 1 & 1) | (k >> 2) << 3;
}

/* x, flipped, to y through the stages over k. */
KVF_LANES_INLINE void rotate_k(struct tile_work *work, uint32_t w)
{
    uint32_t n_l = 1u << (w - 4);
    for (uint32_t l = 0; l < n_l; l++) {
        lanes_f e[COEFFICIENTS_A_K];
        KVF_UNROLL
        for (uint32_t k = 0; k < COEFFICIENTS_A_K; k++) {
            uint32_t i = index_of_l(l) + index_of_k(k);
            e[k] = f_bits(i_load(work->x[i]) ^ i_set1(work->signs[i]));
        }
        stages_k(e);
        KVF_UNROLL
        for (uint32_t k = 0; k < COEFFICIENTS_A_K; k++) {
            f_store(work->y[k * n_l + l], e[k]);
        }
    }
}

/* The same from bf16 in raw; (3): words below limit become 0. */
KVF_LANES_INLINE void rotate_k_bf16(struct tile_work *work, uint32_t w, lanes_i limit)
{
    uint32_t n_l = 1u << (w - 4);
    for (uint32_t l = 0; l < n_l; l++) {
        lanes_f e[COEFFICIENTS_A_K];
        KVF_UNROLL
        for (uint32_t k = 0; k < COEFFICIENTS_A_K; k++) {
            if ((k & 2) == 0) {
                uint32_t pair = (index_of_l(l) + index_of_k(k)) / 2;
                lanes_i words = i_keep_words(i_load(work->raw[pair]), limit) ^
                                i_set1(work->sign_pairs[pair]);
                e[k] = f_bits(i_left(words, 16));
                e[k | 2] = f_bits(words & i_set1(0xffff0000));
            }
        }
        stages_k(e);
        KVF_UNROLL
        for (uint32_t k = 0; k < COEFFICIENTS_A_K; k++) {
            f_store(work->y[k * n_l + l], e[k]);
        }
    }
}

/* y through the stages over l, minus the mean, and min and max over all. */
KVF_LANES_INLINE void rotate_l(struct tile_work *work, uint32_t w, bool centred, lanes_f *min_out,
                               lanes_f *max_out)
{
    uint32_t n_l = 1u << (w - 4);
    lanes_f min = f_set1(__builtin_inff());
    lanes_f max = f_set1(-__builtin_inff());
    for (uint32_t k = 0; k < COEFFICIENTS_A_K; k++) {
        lanes_f e[COEFFICIENTS_A_K];
        KVF_UNROLL
        for (uint32_t l = 0; l < n_l; l++) {
            e[l] = f_load(work->y[k * n_l + l]);
        }
        stages_l(e, w);
        KVF_UNROLL
        for (uint32_t l = 0; l < n_l; l++) {
            if (centred) {
                e[l] = e[l] - f_set1(work->mean[k * n_l + l]);
            }
            f_store(work->y[k * n_l + l], e[l]);
            min = f_min(e[l], min);
            max = f_max(e[l], max);
        }
    }
    *min_out = min;
    *max_out = max;
}

/* y_r = x_0 +- x_1 +- ... over the m vectors of x that are stride apart. A product with +-1 is
 * exact, so each step of the sum rounds as an addition does. */
static void factor_step(float (*x)[LANES], uint32_t m, uint32_t stride, const float *signs)
{
    lanes_f in[FACTOR_MAX];
    for (uint32_t a = 0; a < m; a++) {
        in[a] = f_load(x[a * stride]);
    }
    for (uint32_t r = 0; r < m; r += 4) {
        lanes_f sum[4] = {f_set1(0), f_set1(0), f_set1(0), f_set1(0)};
        for (uint32_t a = 0; a < m; a++) {
            KVF_UNROLL
            for (uint32_t j = 0; j < 4; j++) {
                sum[j] = f_fma(in[a], f_set1(signs[(r + j) * m + a]), sum[j]);
            }
        }
        KVF_UNROLL
        for (uint32_t j = 0; j < 4; j++) {
            f_store(x[(r + j) * stride], sum[j]);
        }
    }
}

/* Any order, in place. Forward if the row's factor is, else the inverse: the stages are their own
 * inverse, and over integers that floats hold exactly their order does not matter. */
static void rotate_any(const struct tile_row *row, float (*x)[LANES])
{
    static const uint8_t bits[] = KVF_ROTATE_STAGES;
    uint32_t m = kvf_rotate_factor_order(row->tensor->rot_order);
    uint32_t power = row->tensor->rot_order / m;
    for (uint32_t i = 0; i < sizeof(bits); i++) {
        uint32_t stride = 1u << bits[i];
        for (uint32_t base = 0; stride < power && base < row->n; base += 2 * stride) {
            for (uint32_t at = base; at < base + stride; at++) {
                lanes_f u = f_load(x[at]);
                lanes_f v = f_load(x[at + stride]);
                f_store(x[at], u + v);
                f_store(x[at + stride], u - v);
            }
        }
    }
    for (uint32_t base = 0; m > 1 && base < row->n; base += row->tensor->rot_order) {
        for (uint32_t b = 0; b < power; b++) {
            factor_step(x + base + b, m, power, row->work->factor);
        }
    }
}

/* -------------------------------------------------------------------------------------------------
 * Encode
 */

/* (4) x, flipped, rotated, minus the mean: in y, or in x if the path is not special. */
static void rotate_tile(const struct tile_row *row, bool centred, lanes_f *min_out,
                        lanes_f *max_out)
{
    struct tile_work *work = row->work;
    switch (row->width) {
    case 6:
        rotate_k(work, 6);
        rotate_l(work, 6, centred, min_out, max_out);
        return;
    case 7:
        rotate_k(work, 7);
        rotate_l(work, 7, centred, min_out, max_out);
        return;
    case 8:
        rotate_k(work, 8);
        rotate_l(work, 8, centred, min_out, max_out);
        return;
    default:
        break;
    }
    for (uint32_t i = 0; i < row->n; i++) {
        i_store(work->x[i], i_load(work->x[i]) ^ i_set1(work->signs[i]));
    }
    rotate_any(row, work->x);
    lanes_f min = f_set1(__builtin_inff());
    lanes_f max = f_set1(-__builtin_inff());
    for (uint32_t i = 0; i < row->n; i++) {
        lanes_f y = f_load(work->x[i]);
        if (centred) {
            y = y - f_set1(work->mean[i]);
            f_store(work->x[i], y);
        }
        min = f_min(y, min);
        max = f_max(y, max);
    }
    *min_out = min;
    *max_out = max;
}

/* (3, 4) The same for bf16 from raw. */
static void rotate_tile_bf16(const struct tile_row *row, lanes_i peak, lanes_f *min_out,
                             lanes_f *max_out)
{
    struct tile_work *work = row->work;
    lanes_i exponent = i_right(peak, 23);
    lanes_i dropped = i_left(i_sub(exponent, i_set1(KVF_SAW_DROP_BINADES)), 7);
    lanes_i limit = i_keep(m_greater_i(exponent, i_set1(KVF_SAW_DROP_BINADES)), dropped);
    limit = i_low_words(limit, limit);
    switch (row->width) {
    case 6:
        rotate_k_bf16(work, 6, limit);
        rotate_l(work, 6, row->centred, min_out, max_out);
        return;
    case 7:
        rotate_k_bf16(work, 7, limit);
        if (row->centred) {
            rotate_l(work, 7, true, min_out, max_out);
        } else {
            rotate_l(work, 7, false, min_out, max_out);
        }
        return;
    case 8:
        rotate_k_bf16(work, 8, limit);
        rotate_l(work, 8, row->centred, min_out, max_out);
        return;
    default:
        break;
    }
    for (uint32_t j = 0; j < (row->n + 1) / 2; j++) {
        i_store(work->raw[j], i_keep_words(i_load(work->raw[j]), limit));
    }
    widen_tile(row);
    rotate_tile(row, row->centred, min_out, max_out);
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

KVF_LANES_INLINE lanes_i clamp(lanes_i words, uint32_t top)
{
    return i_min_16(i_max_16(words, i_set1(0)), i_set1(top << 16 | top));
}

/* Codes of the vectors at e, as a dword: 8 of 4 bits, or 4 of 8. */
KVF_LANES_INLINE lanes_i pack_dword(const float *const *e, uint32_t bits,
                                    const struct tile_scale *scale)
{
    if (bits == 8) {
        lanes_i a = clamp(i_low_words(quantize(e[0], scale), quantize(e[2], scale)), 255);
        lanes_i b = clamp(i_low_words(quantize(e[1], scale), quantize(e[3], scale)), 255);
        return a | i_left(b, 8);
    }
    lanes_i a = clamp(i_low_words(quantize(e[0], scale), quantize(e[4], scale)), 15);
    lanes_i b = clamp(i_low_words(quantize(e[1], scale), quantize(e[5], scale)), 15);
    lanes_i c = clamp(i_low_words(quantize(e[2], scale), quantize(e[6], scale)), 15);
    lanes_i d = clamp(i_low_words(quantize(e[3], scale), quantize(e[7], scale)), 15);
    return (a | i_left(b, 4)) | (i_left(c, 8) | i_left(d, 12));
}

/* Codes of a tile from y in the stored order, n of them, to the rows. */
KVF_LANES_INLINE void pack_special(const struct tile_row *row, uint32_t n, uint32_t bits,
                                   const struct tile_scale *scale, uint8_t *const *rows,
                                   uint32_t n_lanes)
{
    struct tile_work *work = row->work;
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
                    e[i] = work->y[(first + j) * a_dword + i];
                }
                r[j] = i_keep(m_not(scale->escaped), pack_dword(e, bits, scale));
            }
        }
        store_dwords(work, r, rows, n_lanes, first * DWORD, n_dwords * DWORD - first * DWORD);
    }
}

/* The same from x, by the order of the tensor. */
static void pack_any(const struct tile_row *row, const struct tile_scale *scale,
                     uint8_t *const *rows, uint32_t n_lanes)
{
    struct tile_work *work = row->work;
    const struct kvf_codec_tensor *tensor = row->tensor;
    uint32_t bits = tensor->descriptor.bits;
    uint32_t a_dword = 32 / bits;
    lanes_m coded = m_not(scale->escaped);
    for (uint32_t at = 0; at < tensor->code_bytes; at += LANES * DWORD) {
        lanes_i r[LANES];
        for (uint32_t j = 0; j < LANES; j++) {
            uint32_t position = (at / DWORD + j) * a_dword;
            r[j] = i_set1(0);
            for (uint32_t i = 0; i < a_dword && position + i < row->n; i++) {
                lanes_i q = quantize(work->x[tensor->order[position + i]], scale);
                q = clamp(i_low_words(q, i_set1(0)), (1u << bits) - 1);
                r[j] = r[j] | i_left(q, i * bits);
            }
            r[j] = i_keep(coded, r[j]);
        }
        store_dwords(work, r, rows, n_lanes, at, tensor->code_bytes - at);
    }
}

static void pack_tile(const struct tile_row *row, const struct tile_scale *scale, uint8_t *codes,
                      uint32_t n_lanes)
{
    uint8_t *rows[LANES];
    for (uint32_t lane = 0; lane < LANES; lane++) {
        rows[lane] = codes + (size_t)lane * row->tensor->code_bytes;
    }
    switch (row->width * 16 + row->tensor->descriptor.bits) {
    case 6 * 16 + 4:
        pack_special(row, 64, 4, scale, rows, n_lanes);
        break;
    case 6 * 16 + 8:
        pack_special(row, 64, 8, scale, rows, n_lanes);
        break;
    case 7 * 16 + 4:
        pack_special(row, 128, 4, scale, rows, n_lanes);
        break;
    case 7 * 16 + 8:
        pack_special(row, 128, 8, scale, rows, n_lanes);
        break;
    case 8 * 16 + 4:
        pack_special(row, 256, 4, scale, rows, n_lanes);
        break;
    case 8 * 16 + 8:
        pack_special(row, 256, 8, scale, rows, n_lanes);
        break;
    default:
        pack_any(row, scale, rows, n_lanes);
        break;
    }
}

/* Have the same tokens of the next row come into the cache while this tile is coded: pages have all
 * heads of a token side by side, which is not an order that processors foresee. */
static void prefetch_next(const struct tile_row *row, uint32_t token)
{
    if (row->to_next == 0) {
        return;
    }
    for (uint32_t lane = 0; lane < LANES; lane++) {
        const uint8_t *vector = row->work->rows[token + lane] + row->to_next;
        for (uint32_t at = 0; at < row->bytes; at += CACHE_LINE) {
            __builtin_prefetch(vector + at, 0, 2);
        }
    }
}

/* (1) Lanes from n_lanes on and sinks count as escapes. */
static lanes_m find_escapes(const struct tile_row *row, lanes_i peak, uint32_t token,
                            uint32_t n_lanes)
{
    uint32_t limit = row->tensor->dtype == KVF_DTYPE_F16 ? 0x7c000000
                                                         : (uint32_t)KVF_SAW_ESCAPE_EXPONENT << 23;
    uint32_t n_sinks = row->at->job->n_sinks;
    uint32_t n_left_out = n_sinks <= token            ? 0
                          : n_sinks - token < n_lanes ? n_sinks - token
                                                      : n_lanes;
    uint32_t bits = ~((1u << n_lanes) - 1u) | ((1u << n_left_out) - 1u);
    return m_or(m_lanes(bits), m_greater_i(peak, i_set1(limit - 1)));
}

static int encode_tile(const struct tile_row *row, uint32_t token, uint8_t *meta, uint8_t *codes,
                       struct kvf_codec_escapes *escapes)
{
    struct tile_work *work = row->work;
    uint32_t left = row->at->job->n_tokens - token;
    uint32_t n_lanes = left < LANES ? left : LANES;
    prefetch_next(row, token);
    load_dwords(work, (const uint8_t *const *)(work->rows + token), row->bytes);
    lanes_f min;
    lanes_f max;
    lanes_i peak;
    if (row->tensor->dtype == KVF_DTYPE_BF16) {
        peak = find_peak(row);
        rotate_tile_bf16(row, peak, &min, &max);
    } else {
        widen_tile(row);
        peak = find_peak(row);
        rotate_tile(row, row->centred, &min, &max);
    }
    lanes_m escaped = find_escapes(row, peak, token, n_lanes);
    struct tile_scale scale = choose_scale(row->tensor, min, max, escaped);
    pack_tile(row, &scale, codes + (size_t)token * row->tensor->code_bytes, n_lanes);
    _Alignas(64) uint32_t meta_of[LANES];
    i_store(meta_of, scale.meta);
    memcpy(meta + (size_t)token * KVF_SAW_META_BYTES, meta_of, n_lanes * KVF_SAW_META_BYTES);
    uint32_t bits = m_bits(scale.escaped) & ((1u << n_lanes) - 1u);
    for (; bits != 0; bits &= bits - 1) {
        if (!kvf_saw_escape(row->at, token + (uint32_t)__builtin_ctz(bits), escapes)) {
            return KVF_ERR_NO_SPACE;
        }
    }
    return KVF_OK;
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

/* (2) The mean of each channel to mean_out, from tiles. Lane l of a tile is token l mod 8. */
static void make_mean(const struct tile_row *row, uint8_t *mean_out)
{
    struct tile_work *work = row->work;
    uint32_t n_tokens = row->at->job->n_tokens;
    uint32_t count = 0;
    memset(work->partial, 0, row->n * sizeof(work->partial[0]));
    for (uint32_t token = 0; token < n_tokens; token += LANES) {
        uint32_t n_lanes = n_tokens - token < LANES ? n_tokens - token : LANES;
        load_dwords(work, (const uint8_t *const *)(work->rows + token), row->bytes);
        widen_tile(row);
        lanes_m coded = m_not(find_escapes(row, find_peak(row), token, n_lanes));
        count += (uint32_t)__builtin_popcount(m_bits(coded));
        for (uint32_t i = 0; i < row->n; i++) {
            /* a sum that began as +0 is never -0, so adding +0 leaves it as it is */
            f_add_eights(work->partial[i], f_bits(i_keep(coded, i_load(work->x[i]))));
        }
    }
    finish_means(work->partial, row->n, count, mean_out);
}

/* Let sums see zeros instead of sinks, of tokens beyond the last, and, if escapes, of vectors that
 * are escapes by rule 1. Returns how many are left. */
static uint32_t choose_summed(const struct tile_row *row, bool escapes)
{
    static const uint8_t zeros[GROUP_MAX * sizeof(uint16_t)];
    struct tile_work *work = row->work;
    const struct kvf_codec_job *job = row->at->job;
    uint32_t count = 0;
    for (uint32_t token = 0; token < job->n_tokens; token++) {
        bool escaped = token < job->n_sinks;
        for (uint32_t at = 0; escapes && at < row->bytes; at += sizeof(uint16_t)) {
            uint16_t half;
            memcpy(&half, work->rows[token] + at, sizeof(half));
            escaped = escaped || (half & 0x7fff) >= KVF_SAW_ESCAPE_EXPONENT << 7;
        }
        work->summed[token] = escaped ? zeros : work->rows[token];
        count += !escaped;
    }
    for (uint32_t i = 0; i < KVF_SAW_PARTIAL_SUMS; i++) {
        work->summed[job->n_tokens + i] = zeros;
    }
    return count;
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
    KVF_UNROLL
    for (uint32_t first = 0; first < KVF_SAW_PARTIAL_SUMS; first += AT_ONCE) {
        lanes_f sum[2 * AT_ONCE];
        KVF_UNROLL
        for (uint32_t s = 0; s < 2 * AT_ONCE; s++) {
            sum[s] = f_set1(0.0f);
        }
        for (uint32_t token = first; token < row->at->job->n_tokens + first;
             token += KVF_SAW_PARTIAL_SUMS) {
            KVF_UNROLL
            for (uint32_t s = 0; s < AT_ONCE; s++) {
                lanes_i words = i_loadu(row->work->summed[token + s] + at);
                peak = i_max_16(peak, words & i_set1(0x7fff7fff));
                sum[2 * s] = sum[2 * s] + f_bits(i_left(words, 16));
                sum[2 * s + 1] = sum[2 * s + 1] + f_bits(words & i_set1(0xffff0000));
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

/* (4) The mean as it comes out of the rotation, in the order of y, to work->mean. A tile that has it
 * in every lane is rotated as any other. */
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
    rotate_tile(row, false, &min, &max);
    float(*y)[LANES] = row->width != 0 ? work->y : work->x;
    for (uint32_t i = 0; i < row->n; i++) {
        work->mean[i] = y[i][0];
    }
}

static int encode_row(const struct kvf_saw_row *at, uint8_t *mean, uint8_t *meta, uint8_t *codes,
                      struct kvf_codec_escapes *escapes)
{
    struct tile_row row = row_of(at, mean, at->job->n_tokens, false);
    if (mean != NULL) {
        if (row.tensor->dtype == KVF_DTYPE_BF16 && row.n % (2 * LANES) == 0) {
            make_mean_bf16(&row, mean);
        } else {
            make_mean(&row, mean);
        }
        rotate_mean(&row, mean);
    }
    for (uint32_t token = 0; token < at->job->n_tokens; token += LANES) {
        int status = encode_tile(&row, token, meta, codes, escapes);
        if (status != KVF_OK) {
            return status;
        }
    }
    return KVF_OK;
}

/* -------------------------------------------------------------------------------------------------
 * Decode
 *
 * Sums of codes are integers below 2^24, which floats hold exactly: they are added as floats, in
 * whatever order is quickest.
 */

/* The code in the low bits. */
KVF_LANES_INLINE lanes_f float_of_code(lanes_i dword, uint32_t bits)
{
    return bits == 4 ? f_from_nibble(dword) : f_from_i(dword & i_set1(255));
}

/* Codes from raw through the stages over l, to y. */
KVF_LANES_INLINE void unpack_special(struct tile_work *work, uint32_t w, uint32_t bits)
{
    uint32_t n_l = 1u << (w - 4);
    for (uint32_t k = 0; k < COEFFICIENTS_A_K; k++) {
        uint32_t bit = k * n_l * bits;
        lanes_f e[COEFFICIENTS_A_K];
        KVF_UNROLL
        for (uint32_t l = 0; l < n_l; l++) {
            lanes_i dword = i_load(work->raw[bit / 32 + l * bits / 32]);
            e[l] = float_of_code(i_right(dword, bit % 32 + l * bits % 32), bits);
        }
        stages_l(e, w);
        KVF_UNROLL
        for (uint32_t l = 0; l < n_l; l++) {
            f_store(work->y[k * n_l + l], e[l]);
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

/* y through the stages over k, to values in bf16, to the pages. */
KVF_LANES_INLINE void finish_bf16(struct tile_work *work, uint32_t w,
                                  const struct tile_scale *scale, uint8_t *const *rows,
                                  uint32_t n_lanes)
{
    uint32_t n_l = 1u << (w - 4);
    for (uint32_t line = 0; line < n_l / 2; line++) {
        /* 32 elements, all that differ in bits 0 to 4: two of l and all k */
        lanes_i pairs[16];
        KVF_UNROLL
        for (uint32_t bit2 = 0; bit2 < 2; bit2++) {
            uint32_t l = 2 * line + bit2;
            lanes_f e[COEFFICIENTS_A_K];
            KVF_UNROLL
            for (uint32_t k = 0; k < COEFFICIENTS_A_K; k++) {
                e[k] = f_load(work->y[k * n_l + l]);
            }
            stages_k(e);
            KVF_UNROLL
            for (uint32_t k = 0; k < COEFFICIENTS_A_K; k++) {
                if ((k & 2) == 0) {
                    uint32_t i = index_of_l(l) + index_of_k(k);
                    pairs[i / 2 % 16] = pair_bf16(value_of(work, scale, i, e[k], k == 0 && l == 0),
                                                  value_of(work, scale, i + 1, e[k | 2], false));
                }
            }
        }
        KVF_UNROLL
        for (uint32_t j = 0; j < 16; j += LANES) {
            store_dwords(work, pairs + j, rows, n_lanes, (line * 16 + j) * DWORD, LANES * DWORD);
        }
    }
}

/* y through the stages over k, to values in x. */
KVF_LANES_INLINE void finish_special(struct tile_work *work, uint32_t w,
                                     const struct tile_scale *scale)
{
    uint32_t n_l = 1u << (w - 4);
    for (uint32_t l = 0; l < n_l; l++) {
        lanes_f e[COEFFICIENTS_A_K];
        KVF_UNROLL
        for (uint32_t k = 0; k < COEFFICIENTS_A_K; k++) {
            e[k] = f_load(work->y[k * n_l + l]);
        }
        stages_k(e);
        KVF_UNROLL
        for (uint32_t k = 0; k < COEFFICIENTS_A_K; k++) {
            uint32_t i = index_of_l(l) + index_of_k(k);
            f_store(work->x[i], value_of(work, scale, i, e[k], i == 0));
        }
    }
}

/* Codes from raw to values in x, for any group. */
static void decode_any(const struct tile_row *row, const struct tile_scale *scale)
{
    struct tile_work *work = row->work;
    const struct kvf_codec_tensor *tensor = row->tensor;
    uint32_t bits = tensor->descriptor.bits;
    for (uint32_t position = 0; position < row->n; position++) {
        uint32_t bit = position * bits;
        lanes_i dword = i_right(i_load(work->raw[bit / 32]), bit % 32);
        f_store(work->x[tensor->order[position]], float_of_code(dword, bits));
    }
    rotate_any(row, work->x);
    for (uint32_t i = 0; i < row->n; i++) {
        lanes_f sum = f_load(work->x[i]);
        f_store(work->x[i], value_of(work, scale, i, sum, i % tensor->rot_order == 0));
    }
}

/* The elements that share dword j of a vector, from x. The loops over lanes are for the compiler to
 * vectorize. */
static lanes_i narrow_dword(const struct tile_row *row, uint32_t j)
{
    float(*x)[LANES] = row->work->x;
    uint32_t elements = DWORD / row->tensor->element_bytes;
    uint32_t i = j * elements;
    _Alignas(64) uint32_t dword[LANES] = {0};
    if (i >= row->n) {
        return i_set1(0);
    }
    switch (row->tensor->dtype) {
    case KVF_DTYPE_BF16:
        return pair_bf16(f_load(x[i]), i + 1 < row->n ? f_load(x[i + 1]) : f_set1(0.0f));
    case KVF_DTYPE_F16:
    case KVF_DTYPE_F8E4M3:
    case KVF_DTYPE_F8E5M2:
        break;
    default:
        return i_load(x[i]);
    }
    for (uint32_t e = 0; e < elements && i + e < row->n; e++) {
        const float *from = x[i + e];
        for (int lane = 0; lane < LANES && row->tensor->dtype == KVF_DTYPE_F16; lane++) {
            dword[lane] |= (uint32_t)kvf_f16_from_f32(from[lane]) << 16 * e;
        }
        for (int lane = 0; lane < LANES && row->tensor->dtype == KVF_DTYPE_F8E4M3; lane++) {
            dword[lane] |= (uint32_t)kvf_f8e4m3_from_f32(from[lane]) << 8 * e;
        }
        for (int lane = 0; lane < LANES && row->tensor->dtype == KVF_DTYPE_F8E5M2; lane++) {
            dword[lane] |= (uint32_t)kvf_f8e5m2_from_f32(from[lane]) << 8 * e;
        }
    }
    return i_load(dword);
}

static void store_tile(const struct tile_row *row, uint8_t *const *rows, uint32_t n_lanes)
{
    for (uint32_t at = 0; at < row->bytes; at += LANES * DWORD) {
        lanes_i r[LANES];
        for (uint32_t j = 0; j < LANES; j++) {
            r[j] = narrow_dword(row, at / DWORD + j);
        }
        store_dwords(row->work, r, rows, n_lanes, at, row->bytes - at);
    }
}

/* The paths of w, for 4 and 8 bits, bf16 and others. */
#define DECODE_SPECIAL(name, w)                                                                    \
    static void name(const struct tile_row *row, const struct tile_scale *scale,                   \
                     uint8_t *const *rows, uint32_t n_lanes)                                       \
    {                                                                                              \
        if (row->tensor->descriptor.bits == 4) {                                                   \
            unpack_special(row->work, w, 4);                                                       \
        } else {                                                                                   \
            unpack_special(row->work, w, 8);                                                       \
        }                                                                                          \
        if (row->tensor->dtype == KVF_DTYPE_BF16) {                                                \
            finish_bf16(row->work, w, scale, rows, n_lanes);                                       \
        } else {                                                                                   \
            finish_special(row->work, w, scale);                                                   \
            store_tile(row, rows, n_lanes);                                                        \
        }                                                                                          \
    }

DECODE_SPECIAL(decode_64, 6)
DECODE_SPECIAL(decode_128, 7)
DECODE_SPECIAL(decode_256, 8)

static void decode_tile(const struct tile_row *row, uint32_t token, const uint8_t *meta,
                        const uint8_t *codes)
{
    const struct kvf_codec_tensor *tensor = row->tensor;
    uint32_t left = row->at->job->n_wanted - token;
    uint32_t n_lanes = left < LANES ? left : LANES;
    _Alignas(64) uint32_t meta_of[LANES] = {0};
    const uint8_t *code_rows[LANES];
    memcpy(meta_of, meta + (size_t)token * KVF_SAW_META_BYTES, n_lanes * KVF_SAW_META_BYTES);
    for (uint32_t lane = 0; lane < LANES; lane++) {
        uint32_t within = lane < n_lanes ? lane : n_lanes - 1;
        code_rows[lane] = codes + (size_t)(token + within) * tensor->code_bytes;
    }
    load_dwords(row->work, code_rows, tensor->code_bytes);
    lanes_i words = i_load(meta_of);
    struct tile_scale scale = {
        .offset = f_from_half(words) * f_set1(tensor->sqrt_order),
        .factor = f_from_half(i_right(words, 16)) * f_set1(tensor->rsqrt_order),
    };
    uint8_t *const *rows = row->work->rows + token;
    switch (row->width) {
    case 6:
        decode_64(row, &scale, rows, n_lanes);
        break;
    case 7:
        decode_128(row, &scale, rows, n_lanes);
        break;
    case 8:
        decode_256(row, &scale, rows, n_lanes);
        break;
    default:
        decode_any(row, &scale);
        store_tile(row, rows, n_lanes);
        break;
    }
}

static void decode_row(const struct kvf_saw_row *at, const uint8_t *mean, const uint8_t *meta,
                       const uint8_t *codes)
{
    struct tile_row row = row_of(at, mean, at->job->n_wanted, true);
    for (uint32_t i = 0; i < row.n; i++) {
        uint16_t half = 0;
        if (mean != NULL) {
            memcpy(&half, mean + i * sizeof(half), sizeof(half));
        }
        row.work->mean[i] = kvf_f32_from_f16(half);
    }
    for (uint32_t token = 0; token < at->job->n_wanted; token += LANES) {
        decode_tile(&row, token, meta, codes);
    }
}

#endif /* KVF_LANES */

#endif /* KVF_CODEC_CODEC_SAW_TILE_H */
