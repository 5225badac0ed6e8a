/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw_tile_decode.h: the decoder of saw on tiles; see codec_saw_tile.h.
 */
#ifndef KVF_CODEC_CODEC_SAW_TILE_DECODE_H
#define KVF_CODEC_CODEC_SAW_TILE_DECODE_H

#include "codec/codec_saw_tile_unpack.h"

#if defined(KVF_LANES)

/* Codes from raw through the stages over l, to y; for sums that are too large for words. */
KVF_LANES_INLINE void unpack_special(struct tile_work *work, uint32_t w, uint32_t bits)
{
    uint32_t n_l = 1u << (w - 4);
    for (uint32_t k = 0; k < COEFFICIENTS_A_K; k++) {
        lanes_f e[COEFFICIENTS_A_K];
        KVF_UNROLL
        for (uint32_t l = 0; l < n_l; l++) {
            e[l] = f_from_i(code_at(work->raw, k * n_l + l, bits, low_plane_at(1u << w, bits)));
        }
        stages_l(e, w);
        KVF_UNROLL
        for (uint32_t l = 0; l < n_l; l++) {
            f_store(work->y[0][k * n_l + l], e[l]);
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
            e[k] = f_load(work->y[0][k * n_l + l]);
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
    uint32_t low_at = low_plane_at(row->n, bits);
    for (uint32_t position = 0; position < row->n; position++) {
        lanes_i code = code_at(work->raw, position, bits, low_at);
        f_store(work->x[tensor->order[position]], f_from_i(code));
    }
    rotate_any(work->x, row->n, tensor->rot_order, true);
    for (uint32_t i = 0; i < row->n; i++) {
        lanes_f sum = f_load(work->x[i]);
        f_store(work->x[i], value_of(work, scale, i, sum, i % tensor->rot_order == 0));
    }
}

/* The paths of w. */
#define DECODE_SPECIAL(name, w, bits)                                                              \
    static void name(const struct tile_row *row, const struct tile_scale *scale,                   \
                     uint8_t *const *rows, uint32_t n_lanes)                                       \
    {                                                                                              \
        if (row->tensor->element_bytes == 2 && ((w) < 8 || (bits) < 8)) {                          \
            unpack_pairs(row->work, w, bits, NULL);                                                \
            if (row->tensor->dtype == KVF_DTYPE_BF16) {                                            \
                finish_pairs(row->work, w, bits, true, scale, true);                               \
            } else {                                                                               \
                finish_pairs(row->work, w, bits, false, scale, true);                              \
            }                                                                                      \
            store_raw(row->work, (1u << (w)) / 2, rows, n_lanes);                                  \
        } else {                                                                                   \
            unpack_special(row->work, w, bits);                                                    \
            finish_special(row->work, w, scale);                                                   \
            store_tile(row, rows, n_lanes);                                                        \
        }                                                                                          \
    }

DECODE_SPECIAL(decode_64_2, 6, 2)
DECODE_SPECIAL(decode_64_3, 6, 3)
DECODE_SPECIAL(decode_64_4, 6, 4)
DECODE_SPECIAL(decode_64_5, 6, 5)
DECODE_SPECIAL(decode_64_6, 6, 6)
DECODE_SPECIAL(decode_64_8, 6, 8)
DECODE_SPECIAL(decode_128_2, 7, 2)
DECODE_SPECIAL(decode_128_3, 7, 3)
DECODE_SPECIAL(decode_128_4, 7, 4)
DECODE_SPECIAL(decode_128_5, 7, 5)
DECODE_SPECIAL(decode_128_6, 7, 6)
DECODE_SPECIAL(decode_128_8, 7, 8)
DECODE_SPECIAL(decode_256_2, 8, 2)
DECODE_SPECIAL(decode_256_3, 8, 3)
DECODE_SPECIAL(decode_256_4, 8, 4)
DECODE_SPECIAL(decode_256_5, 8, 5)
DECODE_SPECIAL(decode_256_6, 8, 6)
DECODE_SPECIAL(decode_256_8, 8, 8)

static void decode_other(const struct tile_row *row, const struct tile_scale *scale,
                         uint8_t *const *rows, uint32_t n_lanes)
{
    decode_any(row, scale);
    store_tile(row, rows, n_lanes);
}

typedef void decode_path(const struct tile_row *row, const struct tile_scale *scale,
                         uint8_t *const *rows, uint32_t n_lanes);

/* By w - 5, or 0, and by the width of codes. */
static decode_path *const decode_paths[4][9] = {
    {NULL, NULL, decode_other, decode_other, decode_other, decode_other, decode_other, NULL,
     decode_other},
    {NULL, NULL, decode_64_2, decode_64_3, decode_64_4, decode_64_5, decode_64_6, NULL,
     decode_64_8},
    {NULL, NULL, decode_128_2, decode_128_3, decode_128_4, decode_128_5, decode_128_6, NULL,
     decode_128_8},
    {NULL, NULL, decode_256_2, decode_256_3, decode_256_4, decode_256_5, decode_256_6, NULL,
     decode_256_8},
};

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
    load_codes(row->work->raw, row->n, tensor->descriptor.bits, code_rows);
    lanes_i words = i_load(meta_of);
    lanes_f scale_value = f_from_half(i_right(words, 16));
    lanes_f lo = f_from_half(words);
    if (kvf_saw_has_zeros(tensor)) {
        lanes_f zero = f_from_i(words & i_set1(0xff)) + f_set1(kvf_saw_zero_shift(tensor));
        lo = lo_of_zero(scale_value, zero);
    }
    struct tile_scale scale = {
        .offset = lo * f_set1(tensor->sqrt_order),
        .factor = scale_value * f_set1(tensor->rsqrt_order),
    };
    decode_path *decode =
        decode_paths[row->width != 0 ? row->width - 5 : 0][tensor->descriptor.bits];
    decode(row, &scale, row->work->rows + token, n_lanes);
}

static void decode_row(const struct kvf_saw_row *at, const uint8_t *mean, const uint8_t *meta,
                       const uint8_t *codes)
{
    struct tile_row row = row_of(at, mean, at->job->n_wanted);
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
    _mm_sfence(); /* store_raw's stores before those that tell others of them */
}

#endif /* KVF_LANES */

#endif /* KVF_CODEC_CODEC_SAW_TILE_DECODE_H */
