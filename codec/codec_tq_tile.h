/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_tq_tile.h: the tq codec on tiles of LANES vectors, for AVX2 and AVX-512, on what saw has
 * for its own: see codec_saw_tile.h. Included by a file for each of the two, empty elsewhere. The
 * bytes are those of codec_tq_scalar.c; numbers in comments are steps of codec_tq.h.
 *
 * Codes and levels of four positions are the bytes of a dword of every lane
 * (codec_saw_tile_planes.h), so thresholds are compared with, and levels looked up for, four times
 * LANES elements at once.
 */
#ifndef KVF_CODEC_CODEC_TQ_TILE_H
#define KVF_CODEC_CODEC_TQ_TILE_H

#include "codec/codec_saw_tile_load.h"
#include "codec/codec_saw_tile_planes.h"
#include "codec/codec_saw_tile_unpack.h"

#if defined(KVF_LANES)

#include "codec/codec_tq_row.h"

struct tq_work {
    struct tile_work tile;                       /* first: the functions of saw's find it */
    _Alignas(64) float levels[GROUP_MAX][LANES]; /* by position */
    _Alignas(64) float sums[KVF_TQ_PARTIAL_SUMS][LANES];
};

/* A row, and one of its rotations. */
struct tq_row {
    struct tile_row tiles;
    struct tq_work *work;
    const uint8_t *channels;
    const struct kvf_codec_rotation *rotation;
    const struct kvf_tq_codebook *codebook;
    const uint8_t *order; /* NULL: y is in the stored order */
    uint32_t first;       /* element of y where the rotation begins */
    bool is_split;
};

static struct tq_row tq_row_of(const struct kvf_saw_row *at, const uint8_t *mean,
                               const uint8_t *channels, uint32_t n_tokens)
{
    return (struct tq_row){
        .tiles = row_of(at, mean, n_tokens),
        .work = at->work,
        .channels = channels,
        .is_split = at->tensor->n_rotations > 1,
    };
}

static void use_rotation(struct tq_row *row, uint32_t r)
{
    const struct kvf_codec_tensor *tensor = row->tiles.tensor;
    row->rotation = &tensor->rotations[r];
    row->codebook = kvf_tq_codebook(row->rotation->bits);
    row->first = r == 0 ? 0 : tensor->rotations[0].n;
    row->order = row->tiles.width != 0 && !row->is_split ? NULL : tensor->order + row->first;
}

/* -------------------------------------------------------------------------------------------------
 * Encode
 */

/* Sums of magnitudes of each channel about the mean, from tiles. */
static void find_energy(const struct tq_row *row, const uint8_t *mean, float *energy_out)
{
    struct tile_work *work = &row->work->tile;
    const struct tile_row *tiles = &row->tiles;
    (void)choose_summed(tiles, false);
    memset(work->partial, 0, tiles->n * sizeof(work->partial[0]));
    for (uint32_t first = 0; first < SUMMED_MAX; first += LANES) {
        lanes_i peak = load_dwords(work->raw, work->summed + first, tiles->bytes);
        uint32_t there = 0;
        for (uint32_t lane = 0; lane < LANES; lane++) {
            there |= (uint32_t)(work->summed[first + lane] != no_vector) << lane;
        }
        widen_tile(tiles);
        lanes_m counted = m_and(m_lanes(there),
                                m_not(find_too_large(tiles, find_peak(tiles, peak))));
        for (uint32_t i = 0; i < tiles->n; i++) {
            uint16_t half = 0;
            if (mean != NULL) {
                memcpy(&half, mean + i * sizeof(half), sizeof(half));
            }
            lanes_f x = f_load(work->x[i]) - f_set1(kvf_f32_from_f16(half));
            lanes_i magnitude = i_keep(counted, i_bits(x) & i_set1(0x7fffffff));
            f_add_eights(work->partial[i], f_bits(magnitude));
        }
    }
    for (uint32_t i = 0; i < tiles->n; i++) {
        const float *p = work->partial[i];
        energy_out[i] = ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]));
    }
}

/* x, flipped, channel after channel through the rotations, to y. */
static void rotate_split(struct tq_row *row, float (*y)[LANES])
{
    const struct tile_work *work = &row->work->tile;
    for (uint32_t j = 0; j < row->tiles.n; j++) {
        uint32_t channel = row->channels[j];
        i_store(y[j], i_load(work->x[channel]) ^ i_set1(work->signs[channel]));
    }
    for (uint32_t r = 0; r < 2; r++) {
        use_rotation(row, r);
        rotate_any(y + row->first, row->rotation->n, row->rotation->order, false);
    }
}

/* (4) The mean through the rotations, to work->mean. */
static void rotate_split_mean(struct tq_row *row, const uint8_t *mean)
{
    struct tile_work *work = &row->work->tile;
    for (uint32_t i = 0; i < row->tiles.n; i++) {
        uint16_t half;
        memcpy(&half, mean + i * sizeof(half), sizeof(half));
        f_store(work->x[i], f_set1(kvf_f32_from_f16(half)));
    }
    rotate_split(row, work->y[1]);
    for (uint32_t j = 0; j < row->tiles.n; j++) {
        work->mean[j] = work->y[1][j][0];
    }
}

/* (1, 3, 4) A tile of a split row to y, and which vectors are escapes. */
static lanes_m load_split(struct tq_row *row, uint32_t token, float (*y)[LANES])
{
    struct tile_work *work = &row->work->tile;
    const struct tile_row *tiles = &row->tiles;
    lanes_i peak = load_dwords(work->raw, (const uint8_t *const *)(work->rows + token),
                               tiles->bytes);
    if (tiles->tensor->dtype == KVF_DTYPE_BF16) {
        peak = find_peak(tiles, peak);
        drop_words(tiles, smallest_words(peak));
        widen_tile(tiles);
    } else {
        widen_tile(tiles);
        peak = find_peak(tiles, peak);
    }
    rotate_split(row, y);
    for (uint32_t j = 0; j < tiles->n && tiles->centred; j++) {
        f_store(y[j], f_load(y[j]) - f_set1(work->mean[j]));
    }
    return find_escapes(tiles, peak, token, lanes_from(tiles, token));
}

/* (5) Of n positions; b is by position, or NULL for squares. All runs side by side, eight of them
 * at a time: that many chains of additions hide each other's latency. */
KVF_LANES_INLINE lanes_f sum_products(const uint8_t *order, float (*a)[LANES], float (*b)[LANES],
                                      uint32_t n, float (*sums)[LANES])
{
    enum {
        AT_ONCE = 8
    };
    uint32_t run = (n + KVF_TQ_PARTIAL_SUMS - 1) / KVF_TQ_PARTIAL_SUMS;
    KVF_UNROLL
    for (uint32_t first = 0; first < KVF_TQ_PARTIAL_SUMS; first += AT_ONCE) {
        lanes_f sum[AT_ONCE];
        KVF_UNROLL
        for (uint32_t s = 0; s < AT_ONCE; s++) {
            sum[s] = f_set1(0.0f);
        }
        for (uint32_t step = 0; step < run; step++) {
            KVF_UNROLL
            for (uint32_t s = 0; s < AT_ONCE; s++) {
                uint32_t position = (first + s) * run + step;
                if (order == NULL || position < n) {
                    lanes_f y = f_load(a[order == NULL ? position : order[position]]);
                    sum[s] = f_fma(y, b == NULL ? y : f_load(b[position]), sum[s]);
                }
            }
        }
        KVF_UNROLL
        for (uint32_t s = 0; s < AT_ONCE; s++) {
            f_store(sums[first + s], sum[s]);
        }
    }
    KVF_UNROLL
    for (uint32_t half = KVF_TQ_PARTIAL_SUMS / 2; half > 0; half /= 2) {
        KVF_UNROLL
        for (uint32_t s = 0; s < half; s++) {
            f_store(sums[s], f_load(sums[s]) + f_load(sums[s + half]));
        }
    }
    return f_load(sums[0]);
}

static lanes_f sum_of_products(const struct tq_row *row, float (*a)[LANES], float (*b)[LANES])
{
    float(*sums)[LANES] = row->work->sums;
    if (row->order == NULL) {
        return sum_products(NULL, a, b, row->rotation->n, sums);
    }
    return sum_products(row->order, a, b, row->rotation->n, sums);
}

/* (6) m of an element, as an integer in the low word, not clamped. */
KVF_LANES_INLINE lanes_i place(const float *y, lanes_f f)
{
    lanes_f p = f_fma(f_load(y), f, f_set1(0.5f));
    return i_bits(f_fma(p, f_set1((float)KVF_TQ_GRID), f_set1(0x1.8p23f)));
}

/* (6) Codes of four elements, as quantize_four of codec_saw_tile_encode.h has them. limits:
 * thresholds less 1. */
KVF_LANES_INLINE lanes_i quantize_four(const float *const e[4], lanes_f f, uint32_t bits,
                                       const lanes_i *limits)
{
    uint8_t half = (uint8_t)(1u << (bits - 1));
    lanes_i m = i_pack_words(i_low_words(place(e[0], f), place(e[1], f)),
                             i_low_words(place(e[2], f), place(e[3], f)));
    lanes_i lower = i_lower_half_8(m);
    lanes_i a = (m ^ lower) & i_set1_8(0x7f);
    lanes_i code = i_set1_8(half);
    KVF_UNROLL
    for (uint32_t t = 0; t + 1 < half; t++) {
        code = i_count_above_8(code, a, limits[t]);
    }
    return code ^ (lower & i_set1_8((uint8_t)(2 * half - 1)));
}

/* Levels of four positions to memory, those of position and the ones 8, 16 and 24 behind. */
KVF_LANES_INLINE void store_levels(lanes_i codes, lanes_i table, uint32_t position, uint32_t n,
                                   float (*levels)[LANES])
{
    lanes_i dword = i_interleave_words(i_look_up_8(table, codes));
    KVF_UNROLL
    for (uint32_t j = 0; j < 4; j++) {
        lanes_i level = i_right(dword, 8 * j) & i_set1(0xff);
        if (position + 8 * j < n) {
            f_store(levels[position + 8 * j], f_from_i(level) - f_set1((float)KVF_TQ_LEVEL_BIAS));
        }
    }
}

/* Squares of four levels of each lane, added. */
KVF_LANES_INLINE lanes_i add_power(lanes_i power, lanes_i codes, lanes_i magnitudes)
{
    lanes_i magnitude = i_look_up_8(magnitudes, codes);
    lanes_i squares = i_interleave_words(i_multiply_add_8(magnitude, magnitude));
    return i_add(power, i_multiply_add_16(squares, i_set1(0x00010001)));
}

/* What is wanted beside codes: levels of every position, in memory, for P; Q. */
enum tq_wanted {
    WANTS_LEVELS = 1 << 0,
    WANTS_POWER = 1 << 1,
};

/* (6) Codes of n positions to raw, as pack_blocks of saw. Returns Q if that is wanted. */
KVF_LANES_INLINE lanes_i code_blocks(const struct tq_row *row, uint32_t n, uint32_t bits,
                                     const uint8_t *order, float (*y)[LANES], lanes_f f,
                                     uint32_t wanted, uint32_t low_at)
{
    uint32_t(*raw)[LANES] = row->work->tile.raw;
    lanes_i table = i_load_16_bytes(row->codebook->levels);
    lanes_i magnitudes = i_magnitude_8(table ^ i_set1_8(KVF_TQ_LEVEL_BIAS));
    lanes_i power = i_set1(0);
    lanes_i limits[KVF_TQ_THRESHOLDS_MAX];
    KVF_UNROLL
    for (uint32_t t = 0; t < KVF_TQ_THRESHOLDS_MAX; t++) {
        limits[t] = i_set1_8((uint8_t)(row->codebook->thresholds[t] - 1));
    }
    for (uint32_t first = 0; first < n; first += BLOCK_CODES) {
        lanes_i q[BLOCK_QUADS];
        KVF_UNROLL
        for (uint32_t s = 0; s < BLOCK_QUADS; s++) {
            const float *const e[4] = {
                at_position(y, order, n, first + s), at_position(y, order, n, first + s + 8),
                at_position(y, order, n, first + s + 16), at_position(y, order, n, first + s + 24)};
            q[s] = quantize_four(e, f, bits, limits);
            if ((wanted & WANTS_LEVELS) != 0) {
                store_levels(q[s], table, first + s, n, row->work->levels);
            }
            if ((wanted & WANTS_POWER) != 0) {
                power = add_power(power, q[s], magnitudes);
            }
        }
        if (bits == 4) {
            pack_plane_4(q, 0, raw + first / 8);
        } else {
            pack_plane_2(q, bits == 3, raw + first / 16);
        }
        if (bits == 3) {
            pack_plane_1(q, raw + low_at + first / 32);
        }
    }
    return power;
}

#define CODE_BLOCKS(name, bits)                                                                    \
    static lanes_i name(const struct tq_row *row, float(*y)[LANES], lanes_f f, uint32_t wanted,    \
                        uint32_t low_at)                                                           \
    {                                                                                              \
        uint32_t n = row->rotation->n;                                                             \
        if (row->order != NULL) {                                                                  \
            return code_blocks(row, n, bits, row->order, y, f, wanted, low_at);                    \
        }                                                                                          \
        switch (wanted) {                                                                          \
        case 0:                                                                                    \
            return code_blocks(row, n, bits, NULL, y, f, 0, low_at);                               \
        case WANTS_POWER:                                                                          \
            return code_blocks(row, n, bits, NULL, y, f, WANTS_POWER, low_at);                     \
        default:                                                                                   \
            return code_blocks(row, n, bits, NULL, y, f, WANTS_LEVELS | WANTS_POWER, low_at);      \
        }                                                                                          \
    }

CODE_BLOCKS(code_blocks_4, 4)
CODE_BLOCKS(code_blocks_3, 3)
CODE_BLOCKS(code_blocks_2, 2)

/* (6) Codes of a rotation to the rows, from their byte on. Returns Q if that is wanted. */
static lanes_i code_rotation(const struct tq_row *row, float (*y)[LANES], lanes_f f,
                             uint32_t wanted, uint8_t *const *rows, uint32_t at, uint32_t n_lanes)
{
    const struct kvf_codec_rotation *rotation = row->rotation;
    uint32_t low_bits = kvf_saw_low_bits(rotation->bits);
    uint32_t high_bytes = kvf_saw_plane_bytes(rotation->n, rotation->bits - low_bits);
    /* whole blocks: the planes are one piece, in raw as in the strip */
    bool whole = rotation->n % BLOCK_CODES == 0;
    uint32_t low_at = whole ? high_bytes / DWORD : GROUP_MAX / 8;
    uint32_t(*raw)[LANES] = row->work->tile.raw;
    lanes_i power = rotation->bits == 4   ? code_blocks_4(row, y, f, wanted, low_at)
                    : rotation->bits == 3 ? code_blocks_3(row, y, f, wanted, low_at)
                                          : code_blocks_2(row, y, f, wanted, low_at);
    if (whole) {
        store_codes(raw, rows, at, rotation->code_bytes, n_lanes);
        return power;
    }
    clear_tail(raw, rotation->n, rotation->bits - low_bits);
    store_codes(raw, rows, at, high_bytes, n_lanes);
    if (low_bits != 0) {
        clear_tail(raw + low_at, rotation->n, low_bits);
        store_codes(raw + low_at, rows, at + high_bytes, rotation->code_bytes - high_bytes,
                    n_lanes);
    }
    return power;
}

/* (7) Q by levels, where blocks are not whole: sums of integers that fp32 holds. */
static lanes_f power_of_levels(const struct tq_row *row)
{
    lanes_f power = f_set1(0.0f);
    for (uint32_t position = 0; position < row->rotation->n; position++) {
        lanes_f level = f_load(row->work->levels[position]);
        power = f_fma(level, level, power);
    }
    return power;
}

/* (7) */
static lanes_f choose_scale(const struct tq_row *row, float (*y)[LANES], lanes_f square,
                            lanes_f power)
{
    const struct kvf_codec_rotation *rotation = row->rotation;
    lanes_f c = f_set1(rotation->scale);
    switch (kvf_tq_policy(row->tiles.tensor)) {
    case KVF_TENSOR_SCALE_MATCHED:
        return f_sqrt(square / power) * c;
    case KVF_TENSOR_SCALE_LEAST_SQUARES:
        return sum_of_products(row, y, row->work->levels) / power * c;
    case KVF_TENSOR_SCALE_UNBIASED:
        return square / sum_of_products(row, y, row->work->levels) * c;
    default:
        return f_sqrt(square) * f_set1(rotation->root_mean_square);
    }
}

/* (5 to 7) A rotation of a tile in y: its codes, and fp16 scales in the low words. */
static lanes_i encode_rotation(const struct tq_row *row, float (*y)[LANES], uint8_t *const *rows,
                               uint32_t at, uint32_t n_lanes, lanes_m *escaped)
{
    const struct kvf_codec_rotation *rotation = row->rotation;
    uint32_t policy = kvf_tq_policy(row->tiles.tensor);
    bool whole = rotation->n % BLOCK_CODES == 0;
    uint32_t wanted = policy == KVF_TENSOR_SCALE_MATCHED ? (whole ? WANTS_POWER : WANTS_LEVELS)
                      : policy != 0                      ? WANTS_LEVELS | WANTS_POWER
                                                         : 0;
    lanes_f square = sum_of_products(row, y, NULL);
    lanes_f root = f_sqrt(square);
    lanes_m is_zero = m_equal_i(i_bits(square), i_set1(0));
    lanes_f mean = root * f_set1(rotation->root_mean_square);
    lanes_m fits = m_and(m_at_least(mean, f_set1(KVF_TQ_RMS_MIN)),
                         m_less(mean, f_set1(KVF_TQ_RMS_MAX)));
    *escaped = m_or(*escaped, m_not(m_or(fits, is_zero)));
    lanes_f f = f_bits(
        i_keep(m_not(is_zero), i_bits(f_set1(rotation->quantize) * (f_set1(1.0f) / root))));
    lanes_f power = f_from_i(code_rotation(row, y, f, wanted, rows, at, n_lanes));
    if ((wanted & WANTS_LEVELS) != 0 && !whole) {
        power = power_of_levels(row);
    }
    lanes_f scale = f_min(choose_scale(row, y, square, power), f_set1(KVF_TQ_SCALE_MAX));
    return i_keep(m_not(is_zero), i_half_nearest(scale));
}

/* Scales and escapes of a tile; codes of escapes are 0. False if there are too many. */
static bool finish_tile(const struct tq_row *row, uint32_t token, const lanes_i scales[2],
                        lanes_m escaped, uint8_t *const *rows, uint8_t *meta,
                        struct kvf_codec_escapes *escapes)
{
    const struct kvf_codec_tensor *tensor = row->tiles.tensor;
    uint32_t n_lanes = lanes_from(&row->tiles, token);
    size_t meta_bytes = (size_t)tensor->n_scales * KVF_TQ_SCALE_BYTES;
    lanes_i first = i_select(escaped, i_set1(KVF_SAW_ESCAPE_SCALE), scales[0]);
    lanes_i second = i_keep(m_not(escaped), scales[1]);
    _Alignas(64) uint8_t meta_of[LANES * DWORD];
    if (tensor->n_scales == 1) {
        i_store_words(meta_of, first);
    } else {
        i_store(meta_of, i_low_words(first, second));
    }
    memcpy(meta + token * meta_bytes, meta_of, n_lanes * meta_bytes);
    uint32_t bits = m_bits(escaped) & ((1u << n_lanes) - 1u);
    for (; bits != 0; bits &= bits - 1) {
        uint32_t lane = (uint32_t)__builtin_ctz(bits);
        memset(rows[lane], 0, tensor->code_bytes);
        if (!kvf_saw_escape(row->tiles.at, token + lane, escapes)) {
            return false;
        }
    }
    return true;
}

/* A tile: vectors to codes and scales. False if there are too many escapes. */
static bool encode_tile(struct tq_row *row, uint32_t token, const struct kvf_tq_strip *strip,
                        struct kvf_codec_escapes *escapes)
{
    const struct kvf_codec_tensor *tensor = row->tiles.tensor;
    uint8_t *codes = strip->codes + (size_t)token * tensor->code_bytes;
    float(*y)[LANES] = row->work->tile.y[0];
    uint32_t n_lanes = lanes_from(&row->tiles, token);
    uint8_t *rows[LANES];
    lanes_i scales[2] = {i_set1(0), i_set1(0)};
    lanes_m escaped;
    lanes_f min;
    lanes_f max;
    for (uint32_t lane = 0; lane < LANES; lane++) {
        rows[lane] = codes + (size_t)lane * tensor->code_bytes;
    }
    if (row->is_split) {
        escaped = load_split(row, token, y);
    } else {
        escaped = load_rotated(&row->tiles, token, y, codes, &min, &max);
    }
    uint32_t at = 0;
    for (uint32_t r = 0; r < tensor->n_rotations; r++) {
        use_rotation(row, r);
        scales[r] = encode_rotation(row, y + row->first, rows, at, n_lanes, &escaped);
        at += row->rotation->code_bytes;
    }
    return finish_tile(row, token, scales, escaped, rows, strip->meta, escapes);
}

static int tq_encode_row(const struct kvf_saw_row *at, const struct kvf_tq_strip *strip,
                         struct kvf_codec_escapes *escapes)
{
    uint8_t channels[GROUP_MAX];
    kvf_tq_all_channels(at->tensor, channels);
    struct tq_row row = tq_row_of(at, strip->mean, channels, at->job->n_tokens);
    if (strip->mean != NULL) {
        take_mean(&row.tiles, strip->mean);
    }
    if (at->has_split) {
        kvf_tq_read_channels(at->tensor, strip->split, channels);
    } else if (row.is_split) {
        float energy[GROUP_MAX];
        find_energy(&row, strip->mean, energy);
        kvf_tq_split_channels(at->tensor, energy, strip->split, channels);
    }
    if (strip->mean != NULL && row.is_split) {
        rotate_split_mean(&row, strip->mean);
    } else if (strip->mean != NULL) {
        rotate_mean(&row.tiles, strip->mean);
    }
    for (uint32_t token = 0; token < at->job->n_tokens; token += LANES) {
        if (!encode_tile(&row, token, strip, escapes)) {
            return KVF_ERR_NO_SPACE;
        }
    }
    return KVF_OK;
}

/* -------------------------------------------------------------------------------------------------
 * Decode
 */

/* The paths of w: sums of levels stay below 2^15. */
#define DECODE_PAIRS(name, w, bits)                                                                \
    static void name(struct tile_work *work, lanes_i table, const struct tile_scale *scale,        \
                     bool is_bf16)                                                                 \
    {                                                                                              \
        unpack_pairs(work, w, bits, &table);                                                       \
        if (is_bf16) {                                                                             \
            finish_pairs(work, w, bits, true, scale, false);                                       \
        } else {                                                                                   \
            finish_pairs(work, w, bits, false, scale, false);                                      \
        }                                                                                          \
    }

DECODE_PAIRS(decode_64_2, 6, 2)
DECODE_PAIRS(decode_64_3, 6, 3)
DECODE_PAIRS(decode_64_4, 6, 4)
DECODE_PAIRS(decode_128_2, 7, 2)
DECODE_PAIRS(decode_128_3, 7, 3)
DECODE_PAIRS(decode_128_4, 7, 4)
DECODE_PAIRS(decode_256_2, 8, 2)
DECODE_PAIRS(decode_256_3, 8, 3)
DECODE_PAIRS(decode_256_4, 8, 4)

typedef void decode_pairs(struct tile_work *work, lanes_i table, const struct tile_scale *scale,
                          bool is_bf16);

/* By w - 6 and by the width of codes less 2. */
static decode_pairs *const pair_paths[3][3] = {
    {decode_64_2, decode_64_3, decode_64_4},
    {decode_128_2, decode_128_3, decode_128_4},
    {decode_256_2, decode_256_3, decode_256_4},
};

/* Codes of a rotation from raw to values of its channels in x. */
static void decode_rotation(const struct tq_row *row, const struct tile_scale *scale)
{
    struct tile_work *work = &row->work->tile;
    const struct kvf_codec_rotation *rotation = row->rotation;
    const uint8_t *order = row->tiles.tensor->order + row->first;
    float(*y)[LANES] = work->y[0];
    lanes_i table = i_load_16_bytes(row->codebook->levels);
    uint32_t low_at = low_plane_at(rotation->n, rotation->bits);
    for (uint32_t position = 0; position < rotation->n; position++) {
        lanes_i code = code_at(work->raw, position, rotation->bits, low_at);
        lanes_i level = i_look_up_8(table, code) & i_set1(0xff);
        f_store(y[order[position]], f_from_i(level) - f_set1((float)KVF_TQ_LEVEL_BIAS));
    }
    rotate_any(y, rotation->n, rotation->order, true);
    for (uint32_t j = 0; j < rotation->n; j++) {
        uint32_t channel = row->channels[row->first + j];
        f_store(work->x[channel], value_of(work, scale, channel, f_load(y[j]), false));
    }
}

/* Scales of a tile: of each rotation in the low words. */
static void load_scales(const struct tq_row *row, const uint8_t *meta, uint32_t n_lanes,
                        lanes_i scales_out[2])
{
    const struct kvf_codec_tensor *tensor = row->tiles.tensor;
    _Alignas(64) uint8_t meta_of[LANES * DWORD] = {0};
    memcpy(meta_of, meta, (size_t)n_lanes * tensor->n_scales * KVF_TQ_SCALE_BYTES);
    if (tensor->n_scales == 1) {
        scales_out[0] = i_load_words(meta_of);
        scales_out[1] = i_set1(0);
    } else {
        scales_out[0] = i_load(meta_of);
        scales_out[1] = i_right(scales_out[0], 16);
    }
}

static void decode_tile(struct tq_row *row, uint32_t token, const struct kvf_tq_stored *stored)
{
    const struct kvf_codec_tensor *tensor = row->tiles.tensor;
    struct tile_work *work = &row->work->tile;
    uint32_t left = row->tiles.at->job->n_wanted - token;
    uint32_t n_lanes = left < LANES ? left : LANES;
    uint8_t *const *rows = work->rows + token;
    lanes_i scales[2];
    uint32_t at = 0;
    load_scales(row, stored->meta + (size_t)token * tensor->n_scales * KVF_TQ_SCALE_BYTES, n_lanes,
                scales);
    for (uint32_t r = 0; r < tensor->n_rotations; r++) {
        use_rotation(row, r);
        const uint8_t *code_rows[LANES];
        for (uint32_t lane = 0; lane < LANES; lane++) {
            uint32_t within = lane < n_lanes ? lane : n_lanes - 1;
            code_rows[lane] = stored->codes + (size_t)(token + within) * tensor->code_bytes + at;
        }
        load_codes(work->raw, row->rotation->n, row->rotation->bits, code_rows);
        struct tile_scale scale = {
            .factor = f_from_half(scales[r]) * f_set1(row->rotation->factor),
        };
        if (row->order == NULL && tensor->element_bytes == 2) {
            lanes_i table = i_load_16_bytes(row->codebook->levels);
            decode_pairs *decode = pair_paths[row->tiles.width - 6][row->rotation->bits - 2];
            decode(work, table, &scale, tensor->dtype == KVF_DTYPE_BF16);
            store_raw(work, row->rotation->n / 2, rows, n_lanes);
            return;
        }
        decode_rotation(row, &scale);
        at += row->rotation->code_bytes;
    }
    store_tile(&row->tiles, rows, n_lanes);
}

static void tq_decode_row(const struct kvf_saw_row *at, const struct kvf_tq_stored *stored,
                          const uint8_t channels[KVF_CODEC_GROUP_MAX])
{
    struct tq_row row = tq_row_of(at, stored->mean, channels, at->job->n_wanted);
    for (uint32_t i = 0; i < row.tiles.n; i++) {
        uint16_t half = 0;
        if (stored->mean != NULL) {
            memcpy(&half, stored->mean + i * sizeof(half), sizeof(half));
        }
        row.work->tile.mean[i] = kvf_f32_from_f16(half);
    }
    for (uint32_t token = 0; token < at->job->n_wanted; token += LANES) {
        decode_tile(&row, token, stored);
    }
    _mm_sfence(); /* store_raw's stores before those that tell others of them */
}

#endif /* KVF_LANES */

#endif /* KVF_CODEC_CODEC_TQ_TILE_H */
