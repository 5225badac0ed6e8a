/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw_tile_load.h: vectors and means into tiles, rotated: what encoders do first; see
 * codec_saw_tile.h.
 */
#ifndef KVF_CODEC_CODEC_SAW_TILE_LOAD_H
#define KVF_CODEC_CODEC_SAW_TILE_LOAD_H

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
    rotate_any(y, row->n, row->tensor->rot_order, false);
    for (uint32_t i = 0; centred && i < row->n; i++) {
        f_store(y[i], f_load(y[i]) - f_set1(work->mean[i]));
    }
    find_range(y, row->n, min_out, max_out);
}

/* (3) What words of bf16 must have at least to be kept, twice a lane. */
static lanes_i smallest_words(lanes_i peak)
{
    lanes_i exponent = i_right(peak, 23);
    lanes_i dropped = i_left(i_sub(exponent, i_set1(KVF_SAW_DROP_BINADES)), 7);
    lanes_i limit = i_keep(m_greater_i(exponent, i_set1(KVF_SAW_DROP_BINADES)), dropped);
    return i_low_words(limit, limit);
}

/* (3) raw without the others. */
static void drop_words(const struct tile_row *row, lanes_i limit)
{
    uint32_t(*raw)[LANES] = row->work->raw;
    for (uint32_t j = 0; j < (row->n + 1) / 2; j++) {
        i_store(raw[j], i_keep_words(i_load(raw[j]), limit, i_set1(0)));
    }
}

/* (3, 4) The same for bf16 from raw. */
static void rotate_tile_bf16(const struct tile_row *row, lanes_i peak, float (*y)[LANES],
                             const struct tile_next *next, lanes_f *min_out, lanes_f *max_out)
{
    struct tile_work *work = row->work;
    lanes_i limit = smallest_words(peak);
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
    drop_words(row, limit);
    widen_tile(row);
    rotate_tile(row, row->centred, y, next, min_out, max_out);
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

/* (1, 3, 4) A tile to y, what its range is, and which vectors are escapes. codes: where those of
 * the tile's vectors will go. */
static lanes_m load_rotated(const struct tile_row *row, uint32_t token, float (*y)[LANES],
                            const uint8_t *codes, lanes_f *min_out, lanes_f *max_out)
{
    struct tile_work *work = row->work;
    struct tile_next next = {
        .rows = work->rows + token,
        .ahead = row->to_next,
        .codes = (uintptr_t)codes + (size_t)LANES * row->tensor->code_bytes,
    };
    lanes_i peak = load_dwords(work->raw, (const uint8_t *const *)(work->rows + token), row->bytes);
    if (row->tensor->dtype == KVF_DTYPE_BF16) {
        peak = find_peak(row, peak);
        rotate_tile_bf16(row, peak, y, &next, min_out, max_out);
    } else {
        widen_tile(row);
        peak = find_peak(row, peak);
        rotate_tile(row, row->centred, y, &next, min_out, max_out);
    }
    return find_escapes(row, peak, token, lanes_from(row, token));
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

/* (2) */
static void take_mean(const struct tile_row *row, uint8_t *mean_out)
{
    if (row->at->has_mean) {
        return;
    }
    if (row->tensor->dtype == KVF_DTYPE_BF16 && row->n % (2 * LANES) == 0) {
        make_mean_bf16(row, mean_out);
    } else {
        make_mean(row, mean_out);
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

#endif /* KVF_LANES */

#endif /* KVF_CODEC_CODEC_SAW_TILE_LOAD_H */
