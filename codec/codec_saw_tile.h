/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw_tile.h: the saw codec on tiles of LANES vectors, for AVX2 and AVX-512: tiles and their
 * rotation. codec_saw_tile_load.h, _planes.h and _unpack.h are what codec_tq_tile.h needs as well,
 * codec_saw_tile_encode.h and codec_saw_tile_decode.h the rest. Included by a file for each of the
 * two, empty elsewhere. The bytes are those of codec_saw_scalar.c; numbers in comments are steps of
 * codec_saw.h.
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

#include "codec/simd_convert.h"

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
    SUMMED_MAX = KVF_SAW_PARTIAL_SUMS * KVF_SAW_TILE_TOKENS,
};

struct tile_work {
    _Alignas(64) uint32_t raw[GROUP_MAX][LANES];
    float x[GROUP_MAX][LANES];    /* by element */
    float y[2][GROUP_MAX][LANES]; /* by position, or by element where the path is not special; two,
                                     for a tile to be packed while the next one is measured */
    float mean[GROUP_MAX]; /* encode: rotated, in the order of y; decode: by element, 0 if none */
    _Alignas(64) uint32_t signs[GROUP_MAX]; /* the sign bit where a channel is flipped */
    uint32_t sign_pairs[GROUP_MAX / 2];     /* the same for two bf16 or fp16 in a dword */
    _Alignas(64) float partial[GROUP_MAX][KVF_SAW_PARTIAL_SUMS];
    uint8_t *rows[TOKENS_MAX + LANES]; /* vectors of the row; the last one repeated */
    const uint8_t *summed[SUMMED_MAX]; /* vectors for the mean, sum after sum side by side: s has
                                          those at s, s + 8, ...; zeros for what is left out */
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

/* What is needed soon: vectors, ahead bytes from those at rows, and the place of codes. Addresses,
 * because nothing may be there. */
struct tile_next {
    uint8_t *const *rows;
    ptrdiff_t ahead;
    uintptr_t codes;
};

/* What the vectors of a tile are coded with. */
struct tile_scale {
    lanes_f offset; /* lo d */
    lanes_f factor; /* c (1 / scale); decode: scale c */
    lanes_f zero;   /* encode: w, where there are zeros */
    lanes_i meta;
    lanes_m escaped;
};

/* (6) lo where there are zeros. */
KVF_LANES_INLINE lanes_f lo_of_zero(lanes_f scale, lanes_f w)
{
    return f_bits(i_bits(scale * w) ^ i_set1(0x80000000));
}

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
    const struct kvf_codec_tensor *tensor = row->tensor;
    /* heads that are cut are cut at multiples of 64 */
    const uint8_t *bits = tensor->sign_bits +
                          row->at->row % (tensor->dim / tensor->group) * tensor->group / 8;
    for (uint32_t i = 0; i < row->n; i += LANES) {
        uint32_t some = bits[i / 8] | (LANES == 16 ? (uint32_t)bits[i / 8 + 1] << 8 : 0);
        i_store(&work->signs[i], i_keep(m_lanes(some), i_set1(0x80000000)));
    }
    for (uint32_t i = 0; i < row->n; i += 2) {
        work->sign_pairs[i / 2] = work->signs[i] >> 16 | work->signs[i + 1];
    }
}

static struct tile_row row_of(const struct kvf_saw_row *at, const uint8_t *mean, uint32_t n_tokens)
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
    } else if (at->job->next_base != NULL) {
        row.to_next = (intptr_t)at->job->next_base - (intptr_t)at->job->base -
                      (kvf_pages_vector(tensor, at->job, at->row, 0) -
                       kvf_pages_vector(tensor, at->job, 0, 0));
    }
    find_rows(&row, n_tokens);
    fill_signs(&row);
    return row;
}

/* -------------------------------------------------------------------------------------------------
 * In and out of a tile
 */

/* n_bytes of each of LANES vectors to raw, padded with zeros to a multiple of LANES dwords. Returns
 * the largest magnitude of all words, were they bf16 or fp16, each in its half of the lane. */
static lanes_i load_dwords(uint32_t (*raw)[LANES], const uint8_t *const *rows, uint32_t n_bytes)
{
    lanes_i peak = i_set1(0);
    for (uint32_t at = 0; at < n_bytes; at += LANES * DWORD) {
        lanes_i r[LANES];
        if (n_bytes - at >= LANES * DWORD) {
            KVF_UNROLL
            for (int lane = 0; lane < LANES; lane++) {
                r[lane] = i_loadu(rows[lane] + at);
            }
        } else {
            KVF_UNROLL
            for (int lane = 0; lane < LANES; lane++) {
                r[lane] = i_load_part(rows[lane] + at, n_bytes - at);
            }
        }
        i_transpose(r);
        KVF_UNROLL
        for (int j = 0; j < LANES; j++) {
            i_store(raw[at / DWORD + (uint32_t)j], r[j]);
            peak = i_max_16(peak, r[j] & i_set1(0x7fff7fff));
        }
    }
    return peak;
}

/* LANES dwords of each of n_lanes vectors, of which n_bytes count, to rows + at. */
KVF_LANES_INLINE void store_dwords(lanes_i r[LANES], uint8_t *const *rows, uint32_t n_lanes,
                                   uint32_t at, uint32_t n_bytes)
{
    i_transpose(r);
    KVF_UNROLL
    for (uint32_t lane = 0; lane < LANES; lane++) {
        if (lane >= n_lanes) {
            break;
        }
        if (n_bytes >= LANES * DWORD) {
            i_storeu(rows[lane] + at, r[lane]);
        } else {
            i_store_part(rows[lane] + at, r[lane], n_bytes);
        }
    }
}

/* Element e of those that share a dword, as fp32. */
KVF_LANES_INLINE lanes_f widen(lanes_i dword, uint8_t dtype, uint32_t e)
{
    lanes_i element = i_right(dword, e * (dtype == KVF_DTYPE_F16 ? 16 : 8));
    switch (dtype) {
    case KVF_DTYPE_BF16:
        return f_bits(i_left(dword, e == 0 ? 16 : 0) & i_set1(0xffff0000));
    case KVF_DTYPE_F16:
        return f_from_half(element);
    case KVF_DTYPE_F8E4M3:
        return f_from_f8e4m3(element);
    case KVF_DTYPE_F8E5M2:
        return f_from_f8e5m2(element);
    default:
        return f_bits(dword);
    }
}

KVF_LANES_INLINE void widen_all(struct tile_work *work, uint32_t n, uint8_t dtype, uint32_t a_dword)
{
    for (uint32_t i = 0; i < n; i += a_dword) {
        lanes_i dword = i_load(work->raw[i / a_dword]);
        KVF_UNROLL
        for (uint32_t e = 0; e < a_dword; e++) {
            f_store(work->x[i + e], widen(dword, dtype, e));
        }
    }
}

/* raw to fp32 in x, not flipped. */
static void widen_tile(const struct tile_row *row)
{
    switch (row->tensor->dtype) {
    case KVF_DTYPE_BF16:
        widen_all(row->work, row->n, KVF_DTYPE_BF16, 2);
        break;
    case KVF_DTYPE_F16:
        widen_all(row->work, row->n, KVF_DTYPE_F16, 2);
        break;
    case KVF_DTYPE_F8E4M3:
        widen_all(row->work, row->n, KVF_DTYPE_F8E4M3, 4);
        break;
    case KVF_DTYPE_F8E5M2:
        widen_all(row->work, row->n, KVF_DTYPE_F8E5M2, 4);
        break;
    default:
        widen_all(row->work, row->n, KVF_DTYPE_F32, 1);
        break;
    }
}

/* -------------------------------------------------------------------------------------------------
 * Rotation
 */
/* The difference is a fused operation, -1 v + u, which rounds as a subtraction does: additions and
 * products have units of their own, and so both are busy. */
KVF_LANES_INLINE void stage(lanes_f *e, int n, int stride)
{
    lanes_f minus_one = f_hidden(-1.0f);
    KVF_UNROLL
    for (int i = 0; i < n; i++) {
        if ((i & stride) == 0) {
            lanes_f u = e[i];
            lanes_f v = e[i + stride];
            e[i] = u + v;
            e[i + stride] = f_fma(v, minus_one, u);
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
KVF_LANES_INLINE void rotate_k(struct tile_work *work, uint32_t w, float (*y)[LANES])
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
            f_store(y[k * n_l + l], e[k]);
        }
    }
}

/* The same from bf16 in raw; (3): words below limit become 0. */
KVF_LANES_INLINE void rotate_k_bf16(struct tile_work *work, uint32_t w, lanes_i limit,
                                    float (*y)[LANES])
{
    uint32_t n_l = 1u << (w - 4);
    for (uint32_t l = 0; l < n_l; l++) {
        lanes_f e[COEFFICIENTS_A_K];
        KVF_UNROLL
        for (uint32_t k = 0; k < COEFFICIENTS_A_K; k++) {
            if ((k & 2) == 0) {
                uint32_t pair = (index_of_l(l) + index_of_k(k)) / 2;
                lanes_i words = i_keep_words(i_load(work->raw[pair]), limit,
                                             i_set1(work->sign_pairs[pair]));
                e[k] = f_bits(i_left(words, 16));
                e[k | 2] = f_bits(words & i_set1(0xffff0000));
            }
        }
        stages_k(e);
        KVF_UNROLL
        for (uint32_t k = 0; k < COEFFICIENTS_A_K; k++) {
            f_store(y[k * n_l + l], e[k]);
        }
    }
}

/* Least and greatest of n vectors. */
static void find_range(float (*y)[LANES], uint32_t n, lanes_f *min_out, lanes_f *max_out)
{
    *min_out = f_load(y[0]);
    *max_out = f_load(y[0]);
    for (uint32_t i = 1; i < n; i++) {
        *min_out = f_min(f_load(y[i]), *min_out);
        *max_out = f_max(f_load(y[i]), *max_out);
    }
}

/* Have one of the vectors and one line of the codes come into the cache. Pages have all heads of a
 * token side by side, which is not an order that processors foresee. */
KVF_LANES_INLINE void fetch_next(const struct tile_next *next, uint32_t lane, uint32_t n_bytes)
{
    uintptr_t vector = (uintptr_t)next->rows[lane] + (uintptr_t)next->ahead;
    for (uint32_t at = 0; at < n_bytes; at += CACHE_LINE) {
        __builtin_prefetch((const void *)(vector + at), 0, 2);
    }
    __builtin_prefetch((const void *)(next->codes + lane * CACHE_LINE), 1, 2);
}

/* y through the stages over l, minus the mean, and min and max over all. As integers, the greatest
 * number of a vector is that of its floats if any is not negative, and, unsigned, the least float
 * if any is negative. Both are nearly always so, and integers are compared twice as fast. On the
 * way, what next (may be NULL) says is fetched, a little at a time: a processor waits for a few
 * lines only. */
KVF_LANES_INLINE void rotate_l(const struct tile_row *row, uint32_t w, bool centred,
                               float (*y)[LANES], const struct tile_next *next, lanes_f *min_out,
                               lanes_f *max_out)
{
    const struct tile_work *work = row->work;
    uint32_t n_l = 1u << (w - 4);
    lanes_i greatest = i_set1(0x80000000);
    lanes_i least = i_set1(0);
    for (uint32_t k = 0; k < COEFFICIENTS_A_K; k++) {
        lanes_f e[COEFFICIENTS_A_K];
        KVF_UNROLL
        for (uint32_t l = 0; l < n_l; l++) {
            e[l] = f_load(y[k * n_l + l]);
        }
        stages_l(e, w);
        if (next != NULL && k < LANES) {
            fetch_next(next, k, row->bytes);
        }
        KVF_UNROLL
        for (uint32_t l = 0; l < n_l; l++) {
            if (centred) {
                e[l] = e[l] - f_set1(work->mean[k * n_l + l]);
            }
            f_store(y[k * n_l + l], e[l]);
            greatest = i_max_i32(greatest, i_bits(e[l]));
            least = i_max_u32(least, i_bits(e[l]));
        }
    }
    *min_out = f_bits(least);
    *max_out = f_bits(greatest);
    if (m_bits(m_or(m_greater_i(i_set1(0), greatest), m_greater_i(least, i_set1(0xffffffff)))) !=
        0) {
        find_range(y, 1u << w, min_out, max_out);
    }
}

/* y_r = x_0 +- x_1 +- ... over the m vectors of x that are stride apart, signs by row, or by column
 * if transposed. All of it is known to the compiler, so that nothing but sums is left; half of the
 * rows at a time have registers. */
KVF_LANES_INLINE void factor_step(float (*x)[LANES], uint32_t m, uint32_t stride,
                                  const uint32_t *signs, bool transposed)
{
    lanes_f minus_one = f_hidden(-1.0f);
    float in[FACTOR_MAX][LANES] __attribute__((aligned(64)));
    for (uint32_t a = 0; a < m; a++) {
        f_store(in[a], f_load(x[a * stride]));
    }
    KVF_UNROLL
    for (uint32_t half = 0; half < 2; half++) {
        lanes_f sum[FACTOR_MAX / 2];
        KVF_UNROLL
        for (uint32_t j = 0; j < m / 2; j++) {
            sum[j] = f_set1(0.0f);
        }
        KVF_UNROLL
        for (uint32_t half_a = 0; half_a < 2; half_a++) {
            KVF_UNROLL
            for (uint32_t i = 0; i < m / 2; i++) {
                uint32_t a = half_a * (m / 2) + i;
                lanes_f term = f_load(in[a]);
                KVF_UNROLL
                for (uint32_t j = 0; j < m / 2; j++) {
                    uint32_t r = half * (m / 2) + j;
                    bool minus = (transposed ? signs[a] >> r : signs[r] >> a) & 1;
                    if (minus) {
                        sum[j] = f_fma(term, minus_one, sum[j]);
                    } else {
                        sum[j] = sum[j] + term;
                    }
                }
            }
        }
        KVF_UNROLL
        for (uint32_t j = 0; j < m / 2; j++) {
            f_store(x[(half * (m / 2) + j) * stride], sum[j]);
        }
    }
}

/* The same for each of the m vectors that an order has side by side, along all of x. */
#define FACTOR_STEPS(name, m, table)                                                               \
    static void name(float(*x)[LANES], uint32_t n, uint32_t power, bool transposed)                \
    {                                                                                              \
        static const uint32_t signs[m] = table;                                                    \
        for (uint32_t at = 0; at < n; at += (m - 1) * power) {                                     \
            for (uint32_t b = 0; b < power; b++, at++) {                                           \
                if (transposed) {                                                                  \
                    factor_step(x + at, m, power, signs, true);                                    \
                } else {                                                                           \
                    factor_step(x + at, m, power, signs, false);                                   \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
    }

FACTOR_STEPS(factor_steps_12, 12, KVF_HADAMARD_12)
FACTOR_STEPS(factor_steps_20, 20, KVF_HADAMARD_20)
FACTOR_STEPS(factor_steps_28, 28, KVF_HADAMARD_28)

/* Stages over the lowest bits, of which there are p, up to 4, in their order: 0, 1, 3, 2. */
KVF_LANES_INLINE void rotate_low(float (*x)[LANES], uint32_t n, uint32_t p)
{
    uint32_t n_low = 1u << p;
    for (uint32_t base = 0; base < n; base += n_low) {
        lanes_f e[16];
        KVF_UNROLL
        for (uint32_t i = 0; i < n_low; i++) {
            e[i] = f_load(x[base + i]);
        }
        stage(e, (int)n_low, 1);
        stage(e, (int)n_low, 2);
        if (p > 3) {
            stage(e, (int)n_low, 8);
        }
        if (p > 2) {
            stage(e, (int)n_low, 4);
        }
        KVF_UNROLL
        for (uint32_t i = 0; i < n_low; i++) {
            f_store(x[base + i], e[i]);
        }
    }
}

/* All stages of orders with any number of bits. */
static void rotate_stages(float (*x)[LANES], uint32_t n, uint32_t power)
{
    static const uint8_t bits[] = KVF_ROTATE_STAGES;
    for (uint32_t i = 0; i < sizeof(bits); i++) {
        uint32_t stride = 1u << bits[i];
        for (uint32_t base = 0; stride < power && base < n; base += 2 * stride) {
            for (uint32_t at = base; at < base + stride; at++) {
                lanes_f u = f_load(x[at]);
                lanes_f v = f_load(x[at + stride]);
                f_store(x[at], u + v);
                f_store(x[at + stride], u - v);
            }
        }
    }
}

/* Any order, in place. The stages are their own inverse, and over integers that floats hold exactly
 * their order does not matter. */
static void rotate_any(float (*x)[LANES], uint32_t n, uint32_t order, bool inverse)
{
    uint32_t m = kvf_rotate_factor_order(order);
    uint32_t power = order / m;
    switch (power) {
    case 4:
        rotate_low(x, n, 2);
        break;
    case 8:
        rotate_low(x, n, 3);
        break;
    case 16:
        rotate_low(x, n, 4);
        break;
    default:
        rotate_stages(x, n, power);
        break;
    }
    switch (m) {
    case 12:
        factor_steps_12(x, n, power, inverse);
        break;
    case 20:
        factor_steps_20(x, n, power, inverse);
        break;
    case 28:
        factor_steps_28(x, n, power, inverse);
        break;
    default:
        break;
    }
}

#endif /* KVF_LANES */

#endif /* KVF_CODEC_CODEC_SAW_TILE_H */
