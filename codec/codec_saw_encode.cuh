/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw_encode.cuh: encode of bf16 rows whose rotation is Sylvester's of 64, 128 or 256, the
 * whole vector. Numbers in comments are steps of codec_saw.h; who has which element is in
 * codec_saw_device.cuh, who has which vector in codec_saw_encode_rows.cuh.
 *
 * There are few warps, for each has many registers, and a vector's scale is a long chain of
 * instructions that wait for one another. So two tiles are coded at a time, as far as registers go,
 * and otherwise the peaks of the next tile are found meanwhile.
 *
 * Warps meet only over a mean. The first tile that a warp has of a row is a sample, and is summed
 * before the last tiles of the row before are coded; one warp, another one each time, makes the
 * mean of the eight sums while the others code.
 *
 * What bounds the kernel now: instructions, most of them additions of the three butterfly stages
 * that are not products, and comparisons for the range; and the ends of a burst, for thread blocks
 * begin with nothing to code, and do not end at one time, since their units are dealt out
 * beforehand. So longer bursts are faster. To deal the last units out to those that come first has
 * been tried: rows whose entries have to be made at that moment cost more than the ends do.
 */
#ifndef KVF_CODEC_CODEC_SAW_ENCODE_CUH
#define KVF_CODEC_CODEC_SAW_ENCODE_CUH

#include "codec/codec_saw_encode_codes.cuh"
#include "codec/codec_saw_encode_rows.cuh"

namespace kvf
{

constexpr uint32_t escape_threshold = 0x7fff7fff; /* NaN: nothing is kept */

/* (1) The largest magnitudes of the lane's elements, 0x7fff if one is NaN, in either half. */
template <int dim>
static __device__ __forceinline__ uint32_t find_lane_peak(const uint32_t x[dim / 32][4])
{
    uint32_t peak = max_magnitudes(x[0][0], x[0][1]);
    uint32_t other = max_magnitudes(x[0][2], x[0][3]);
#pragma unroll
    for (uint32_t i = 1; i < dim / 32; i++) {
        peak = max_magnitudes(peak, x[i][0]);
        other = max_magnitudes(other, x[i][1]);
        peak = max_magnitudes(peak, x[i][2]);
        other = max_magnitudes(other, x[i][3]);
    }
    return max_magnitudes(peak, other);
}

/* The bits of the vector's largest one, the same in its four lanes. */
static __device__ __forceinline__ uint32_t find_peak(uint32_t lane_peak)
{
    uint32_t peak = max_magnitudes(lane_peak, __shfl_xor_sync(all_lanes, lane_peak, 1));
    peak = max_magnitudes(peak, __shfl_xor_sync(all_lanes, peak, 2));
    return max_magnitudes(peak, permute_bytes(peak, 0, 0x1032)) & 0xffff;
}

/* Of two vectors. */
template <int dim>
static __device__ __forceinline__ void find_peaks(const uint32_t x[2][dim / 32][4],
                                                  uint32_t peaks[2])
{
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        peaks[i] = find_lane_peak<dim>(x[i]);
    }
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        peaks[i] = find_peak(peaks[i]);
    }
}

/* (3) The smallest magnitude that is kept, twice; escape_threshold for escapes. */
static __device__ __forceinline__ uint32_t keep_threshold(uint32_t peak, bool is_coded)
{
    constexpr uint32_t escape_bits = KVF_SAW_ESCAPE_EXPONENT << 7;
    constexpr uint32_t drop_bits = KVF_SAW_DROP_BINADES << 7;
    uint32_t exponent_bits = peak & 0x7f80;
    uint32_t threshold = exponent_bits > drop_bits ? exponent_bits - drop_bits : 0;
    return is_coded && peak < escape_bits ? threshold * 0x10001 : escape_threshold;
}

/* -------------------------------------------------------------------------------------------------
 * (2) The mean
 */
enum encode_barrier { /* numbers of barriers of the thread block */
    ENCODE_SUMS = 1,  /* the eight sums are in shared memory */
    ENCODE_ROWS,      /* the entries of more rows */
    ENCODE_MEAN,      /* the mean; two, by turns: the warp that makes a mean does not wait for it,
                         and may wait for the next one while others still wait for this one */
    ENCODE_NEXT_MEAN,
};

/* compute-sanitizer's racecheck does not follow those who arrive and do not wait: it reports sums
 * and means, which lie on either side. With await in its place it has nothing to report, neither of
 * saw, with or without a search, nor of tq. */
static __device__ __forceinline__ void arrive(uint32_t barrier)
{
    arrive_at(barrier, SAW_ENCODE_THREADS);
}

static __device__ __forceinline__ void await(uint32_t barrier)
{
    await_at(barrier, SAW_ENCODE_THREADS);
}

/* One lane's channels of a vector: dim / 32 in a row. */
template <int dim>
static __device__ __forceinline__ void add_channels(float sum[dim / 32], const uint8_t *from)
{
    uint32_t words[dim / 64];
    if constexpr (dim == 64) {
        words[0] = *reinterpret_cast<const uint32_t *>(from);
    } else if constexpr (dim == 128) {
        const uint2 pair = *reinterpret_cast<const uint2 *>(from);
        words[0] = pair.x;
        words[1] = pair.y;
    } else {
        const uint4 four = *reinterpret_cast<const uint4 *>(from);
        words[0] = four.x;
        words[1] = four.y;
        words[2] = four.z;
        words[3] = four.w;
    }
#pragma unroll
    for (uint32_t w = 0; w < dim / 64; w++) {
        sum[2 * w] += __uint_as_float(words[w] << 16);
        sum[2 * w + 1] += __uint_as_float(words[w] & 0xffff0000);
    }
}

/* The warp's partial sum and its number of vectors, to shared memory. The first tile has come. */
template <int dim>
static __device__ __forceinline__ void sum_sample(const encode_team &team,
                                                  const encode_ring<dim> &ring,
                                                  const encode_row &row, encode_shared<dim> *shared)
{
    constexpr uint32_t per = dim / 32;
    float sum[per] = {0.0f};
    uint32_t left_out = all_lanes; /* four bits a vector */
    uint32_t token = team.seat * row.seat_tiles * KVF_SAW_TILE_TOKENS;
    __syncwarp(); /* other lanes' copies are there too */
    if (token < row.n_tokens) {
        uint32_t x[dim / 32][4];
        ring.load(0, x);
        token += team.lane / 4;
        bool is_coded = token >= row.n_sinks && token < row.n_tokens;
        uint32_t threshold = keep_threshold(find_peak(find_lane_peak<dim>(x)), is_coded);
        left_out = __ballot_sync(all_lanes, threshold == escape_threshold);
        uint32_t at = team.lane * (per * 2);
        const uint8_t *even = ring.slot(0) + at;
        const uint8_t *odd = ring.slot(0) + (at ^ swap_bytes);
        if (left_out == 0) {
#pragma unroll
            for (uint32_t i = 0; i < KVF_SAW_TILE_TOKENS; i++) {
                add_channels<dim>(sum, (i % 2 == 0 ? even : odd) + i * (dim * 2));
            }
        } else {
#pragma unroll 1
            for (uint32_t i = 0; i < KVF_SAW_TILE_TOKENS; i++) {
                if ((left_out >> (4 * i) & 1) == 0) {
                    add_channels<dim>(sum, (i % 2 == 0 ? even : odd) + i * (dim * 2));
                }
            }
        }
    }
#pragma unroll
    for (uint32_t r = 0; r < per; r++) {
        shared->partial[team.warp][team.lane * per + r] = sum[r];
    }
    if (team.lane == 0) {
        shared->counts[team.warp] = KVF_SAW_TILE_TOKENS - __popc(left_out & 0x11111111);
    }
    __syncwarp(); /* then the slot may be filled again */
}

/* One butterfly of a vector that lies in a warp, per elements a lane, along index bit `bit`. */
template <int per, int bit> static __device__ __forceinline__ void rotate_bit(float y[per])
{
    constexpr int lane_bit = (1 << bit) / per;
    if constexpr (lane_bit == 0) {
#pragma unroll
        for (int r = 0; r < per; r++) {
            if ((r >> bit & 1) == 0) {
                butterfly(y[r], y[r | 1 << bit]);
            }
        }
    } else {
#pragma unroll
        for (int r = 0; r < per; r++) {
            float other = __shfl_xor_sync(all_lanes, y[r], lane_bit);
            y[r] = (threadIdx.x & lane_bit) != 0 ? other - y[r] : y[r] + other;
        }
    }
}

/* n floats, or as many words, in a row. */
template <int n, typename T> static __device__ __forceinline__ void load_row(const T *from, T to[n])
{
    if constexpr (n == 2) {
        const float2 pair = *reinterpret_cast<const float2 *>(from);
        to[0] = pair.x;
        to[1] = pair.y;
    } else {
#pragma unroll
        for (int i = 0; i < n; i += 4) {
            const float4 four = *reinterpret_cast<const float4 *>(from + i);
            to[i] = four.x;
            to[i + 1] = four.y;
            to[i + 2] = four.z;
            to[i + 3] = four.w;
        }
    }
}

/* The lane's share of the sums over all warps. */
template <int dim>
static __device__ __forceinline__ void
add_samples(const encode_team &team, const encode_shared<dim> *shared, float sums[dim / 32])
{
    constexpr int per = dim / 32;
    float parts[encode_warps][per];
#pragma unroll
    for (uint32_t s = 0; s < encode_warps; s++) {
        load_row<per>(&shared->partial[s][team.lane * per], parts[s]);
    }
#pragma unroll
    for (int r = 0; r < per; r++) {
        sums[r] = ((parts[0][r] + parts[4][r]) + (parts[2][r] + parts[6][r])) +
                  ((parts[1][r] + parts[5][r]) + (parts[3][r] + parts[7][r]));
    }
}

/* By one warp, while others may wait for it: the mean to `stored`, and rotated to shared memory.
 * given: it is there already. */
template <int dim>
static __device__ __forceinline__ void
finish_mean(const encode_team &team, const encode_shared<dim> *shared, const uint32_t *signs,
            uint16_t *stored, bool given, float *rotated)
{
    constexpr int per = dim / 32;
    uint32_t halves[per];
    stored += team.lane * per;
    if (given) {
#pragma unroll
        for (int r = 0; r < per; r++) {
            halves[r] = stored[r];
        }
    } else {
        uint32_t count = 0;
#pragma unroll
        for (uint32_t s = 0; s < encode_warps; s++) {
            count += shared->counts[s];
        }
        float sums[per];
        add_samples<dim>(team, shared, sums);
        mean_half_bits<per>(sums, count, halves);
#pragma unroll
        for (int r = 0; r < per; r += 2) {
            *reinterpret_cast<uint32_t *>(stored + r) = halves[r] | halves[r + 1] << 16;
        }
    }
    float y[per];
#pragma unroll
    for (int r = 0; r < per; r++) {
        uint32_t sign = signs[(team.lane * per + r) / 2] << (r % 2 != 0 ? 0 : 16) & 0x80000000;
        y[r] = __uint_as_float(__float_as_uint(f32_of_half_bits(halves[r])) ^ sign);
    }
    rotate_bit<per, 0>(y);
    rotate_bit<per, 1>(y);
    rotate_bit<per, 3>(y);
    rotate_bit<per, 4>(y);
    rotate_bit<per, 2>(y);
    rotate_bit<per, 5>(y);
    if constexpr (dim >= 128) {
        rotate_bit<per, 6>(y);
    }
    if constexpr (dim >= 256) {
        rotate_bit<per, 7>(y);
    }
#pragma unroll
    for (int r = 0; r < per; r++) {
        uint32_t e = team.lane * per + r;
        uint32_t group = e / 32 * 2 + (e >> 1 & 1);
        rotated[(group * 4 + (e >> 3 & 3)) * 4 + (e >> 2 & 1) * 2 + (e & 1)] = y[r];
    }
}

/* -------------------------------------------------------------------------------------------------
 * Where codes go
 */

/* A row, as a lane codes its vectors; what changes from tile to tile is that of the next one. */
struct encode_target {
    const uint32_t *signs; /* masks of the row's channels, the lane's first ones */
    const float *mean;     /* NULL: not centred; the lane's first ones */
    uint8_t *codes;        /* of the lane's vector */
    uint8_t *meta;
    int32_t n_sinks; /* before the tile, plus the lane's g: its vector is one if positive */
    uint32_t t;
    float clip_ratio; /* search: that which the lane is to try */
    const struct kvf_gpu_tensor *tensor;
    const uint32_t *table; /* of a search or of tq */
};

/* -------------------------------------------------------------------------------------------------
 * (4) Rotation
 */
/* One butterfly of all of a lane's elements, along a bit above 4. */
template <int dim, uint32_t stride>
static __device__ __forceinline__ void rotate_high_bit(float y[dim / 32][2][4])
{
#pragma unroll
    for (uint32_t i = 0; i < dim / 32; i++) {
        if ((i & stride) == 0) {
#pragma unroll
            for (uint32_t k = 0; k < 8; k++) {
                butterfly(y[i][k / 4][k % 4], y[i | stride][k / 4][k % 4]);
            }
        }
    }
}

template <int dim> static __device__ __forceinline__ void rotate_bit_2(float y[dim / 32][2][4])
{
#pragma unroll
    for (uint32_t i = 0; i < dim / 32; i++) {
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            butterfly(y[i][k / 2][k % 2], y[i][k / 2][k % 2 + 2]);
        }
    }
}

template <int dim, encode_variant variant>
static __device__ __forceinline__ void
rotate_words(const encode_target &at, const hadamard_pair &h16, uint32_t threshold,
             const uint32_t x[dim / 32][4], float y[dim / 32][2][4])
{
#pragma unroll
    for (uint32_t i = 0; i < dim / 32; i++) {
        if constexpr (variant == encode_variant::unrotated) {
#pragma unroll
            for (uint32_t k = 0; k < 8; k++) {
                uint32_t word = x[i][k / 2];
                y[i][k / 2 % 2][k / 4 * 2 + k % 2] = __uint_as_float(k % 2 ? word & 0xffff0000
                                                                           : word << 16);
            }
            continue;
        }
        const uint4 sign = *reinterpret_cast<const uint4 *>(&at.signs[i * 16]);
        uint32_t a0 = (x[i][0] & not_below(x[i][0], threshold)) ^ sign.x;
        uint32_t a1 = (x[i][2] & not_below(x[i][2], threshold)) ^ sign.z;
        uint32_t a2 = (x[i][1] & not_below(x[i][1], threshold)) ^ sign.y;
        uint32_t a3 = (x[i][3] & not_below(x[i][3], threshold)) ^ sign.w;
        mma_bf16(y[i][0], a0, a1, a2, a3, h16.b[0], h16.b[1]);
        mma_bf16(y[i][1], a0, a1, a2, a3, h16.b[2], h16.b[3]);
    }
    if constexpr (variant == encode_variant::swapped) {
        rotate_high_bit<dim, 1>(y);
        rotate_bit_2<dim>(y);
    } else if constexpr (variant != encode_variant::unrotated) {
        rotate_bit_2<dim>(y);
        rotate_high_bit<dim, 1>(y);
    }
    if constexpr (variant != encode_variant::unrotated && dim >= 128) {
        rotate_high_bit<dim, 2>(y);
    }
    if constexpr (variant != encode_variant::unrotated && dim >= 256) {
        rotate_high_bit<dim, 4>(y);
    }
}

/* From n vectors. */
template <int dim, uint32_t n>
static __device__ __forceinline__ void subtract_means(const encode_target &at,
                                                      float (*y)[dim / 32][2][4])
{
#pragma unroll
    for (uint32_t group = 0; group < dim / 16; group++) {
        const float4 mean = *reinterpret_cast<const float4 *>(&at.mean[group * 16]);
#pragma unroll
        for (uint32_t i = 0; i < n; i++) {
            float *to = y[i][group / 2][group % 2];
            to[0] -= mean.x;
            to[1] -= mean.y;
            to[2] -= mean.z;
            to[3] -= mean.w;
        }
    }
}

template <int dim>
static __device__ __forceinline__ void subtract_mean(const encode_target &at,
                                                     float (&y)[dim / 32][2][4])
{
    subtract_means<dim, 1>(at, &y);
}

/* -------------------------------------------------------------------------------------------------
 * (5) Range
 */

/* The rare case: all coefficients of a vector have the same sign. */
template <int dim> static __device__ __noinline__ float2 measure_floats(const float *y)
{
    float min = y[0];
    float max = y[0];
    for (uint32_t k = 1; k < dim / 4; k++) {
        min = fminf(min, y[k]);
        max = fmaxf(max, y[k]);
    }
    for (uint32_t mask = 1; mask < 4; mask *= 2) {
        min = fminf(min, __shfl_xor_sync(all_lanes, min, mask));
        max = fmaxf(max, __shfl_xor_sync(all_lanes, max, mask));
    }
    return make_float2(min, max);
}

/* As integers the bits of positive numbers are in order, and those of negative ones, unsigned, are
 * above them in reversed order; integers can be compared three at a time. So of numbers of both
 * signs these are the largest and the least one. */
struct number_range {
    int32_t top;
    uint32_t bottom;

    __device__ __forceinline__ bool has_both_signs() const
    {
        return top >= 0 && (int32_t)bottom < 0;
    }

    __device__ __forceinline__ float min() const
    {
        return __uint_as_float(bottom);
    }

    __device__ __forceinline__ float max() const
    {
        return __int_as_float(top);
    }

    /* Of these and those that another lane has. */
    __device__ __forceinline__ number_range with(const number_range &others, uint32_t mask) const
    {
        return {::max(top, __shfl_xor_sync(all_lanes, others.top, mask)),
                ::max(bottom, __shfl_xor_sync(all_lanes, others.bottom, mask))};
    }
};

/* Of the lane's elements. */
template <int dim>
static __device__ __forceinline__ number_range measure_lane(float y[dim / 32][2][4])
{
    const float *all = &y[0][0][0];
    constexpr uint32_t half = dim / 8;
    number_range a = {__float_as_int(all[0]), __float_as_uint(all[0])};
    number_range b = {__float_as_int(all[half]), __float_as_uint(all[half])};
#pragma unroll
    for (uint32_t k = 1; k + 1 < half; k += 2) {
        a.top = __vimax3_s32(a.top, __float_as_int(all[k]), __float_as_int(all[k + 1]));
        a.bottom = __vimax3_u32(a.bottom, __float_as_uint(all[k]), __float_as_uint(all[k + 1]));
        b.top = __vimax3_s32(b.top, __float_as_int(all[half + k]),
                             __float_as_int(all[half + k + 1]));
        b.bottom = __vimax3_u32(b.bottom, __float_as_uint(all[half + k]),
                                __float_as_uint(all[half + k + 1]));
    }
    a.top = __vimax3_s32(a.top, b.top, __float_as_int(all[half - 1]));
    a.bottom = __vimax3_u32(a.bottom, b.bottom, __float_as_uint(all[half - 1]));
    a.top = max(a.top, __float_as_int(all[2 * half - 1]));
    a.bottom = max(a.bottom, __float_as_uint(all[2 * half - 1]));
    return a;
}

template <int dim>
static __device__ __forceinline__ float2 measure_slowly(const float y[dim / 32][2][4])
{
    float copy[dim / 4];
#pragma unroll
    for (uint32_t k = 0; k < dim / 4; k++) {
        copy[k] = (&y[0][0][0])[k];
    }
    return measure_floats<dim>(copy);
}

/* Of a vector, in each of its four lanes: the least number and the largest one. */
template <int dim> static __device__ __forceinline__ float2 measure(float y[dim / 32][2][4])
{
    number_range range = measure_lane<dim>(y);
    range = range.with(range, 1);
    range = range.with(range, 2);
    if (__any_sync(all_lanes, !range.has_both_signs())) {
        return measure_slowly<dim>(y);
    }
    return make_float2(range.min(), range.max());
}

/* Of two vectors: of the first one in lanes 0 and 1, of the second one in lanes 2 and 3. */
template <int dim>
static __device__ __forceinline__ float2 measure_pair(float y[2][dim / 32][2][4], bool is_upper)
{
    const number_range first = measure_lane<dim>(y[0]);
    const number_range second = measure_lane<dim>(y[1]);
    const number_range mine = {is_upper ? second.top : first.top,
                               is_upper ? second.bottom : first.bottom};
    const number_range other = {is_upper ? first.top : second.top,
                                is_upper ? first.bottom : second.bottom};
    number_range range = mine.with(other, 2);
    range = range.with(range, 1);
    if (__any_sync(all_lanes, !range.has_both_signs())) {
        float2 both[2] = {measure_slowly<dim>(y[0]), measure_slowly<dim>(y[1])};
        return make_float2(is_upper ? both[1].x : both[0].x, is_upper ? both[1].y : both[0].y);
    }
    return make_float2(range.min(), range.max());
}

/* -------------------------------------------------------------------------------------------------
 * Tiles and rows
 */
/* How the tiles of saw are coded; codec_tq_encode.cuh has another coder. */
template <int dim, int bits, encode_variant variant> struct saw_coder {
    static constexpr uint32_t meta_bytes = KVF_SAW_META_BYTES;

    /* See below. */
    static __device__ __forceinline__ bool encode_tile(encode_target &at,
                                                       const encode_ring<dim> &ring, uint32_t k,
                                                       bool is_there, const hadamard_pair &h16,
                                                       uint32_t *peak);
    static __device__ __forceinline__ uint32_t encode_pair(encode_target &at,
                                                           const uint32_t x[2][dim / 32][4],
                                                           const uint32_t peaks[2],
                                                           const bool is_there[2],
                                                           const hadamard_pair &h16);
};

template <int bits> constexpr float saw_levels = (float)((1 << bits) - 1);
template <int dim>
constexpr float saw_sqrt_order = dim == 64    ? 8.0f
                                 : dim == 128 ? 0x1.6a09e6p3f
                                              : 16.0f;

/* Code the lane's vector of tile k, if it exists, and go on to the next tile. *peak is that of tile
 * k, and becomes that of tile k + 1 (behind the last one: of the next row's first): what it takes
 * to find it fills the gaps that the long way to a scale leaves. Is the lane the first one of a
 * vector that is an escape? */
template <int dim, int bits, encode_variant variant>
__device__ __forceinline__ bool
saw_coder<dim, bits, variant>::encode_tile(encode_target &at, const encode_ring<dim> &ring,
                                           uint32_t k, bool is_there, const hadamard_pair &h16,
                                           uint32_t *peak)
{
    uint32_t x[dim / 32][4];
    ring.load(k, x);
    uint32_t threshold = keep_threshold(*peak, at.n_sinks <= 0);
    float y[dim / 32][2][4];
    rotate_words<dim, variant>(at, h16, threshold, x, y);
    if (at.mean != nullptr) {
        subtract_mean<dim>(at, y);
    }
    ring.load(k + 1, x);
    uint32_t lane_peak = find_lane_peak<dim>(x);
    const float2 range = measure<dim>(y);
    saw_scale scale = choose_scale(at.clip_ratio, saw_sqrt_order<dim>, saw_sqrt_order<dim> / dim,
                                   range.x, range.y, saw_levels<bits>, 1.0f / saw_levels<bits>,
                                   threshold == escape_threshold);
    *peak = find_peak(lane_peak);
    if constexpr (has_search(variant)) {
        scale = choose_best<dim, variant>(y, scale, range.x, range.y, at.table);
    }
    store_codes<dim, bits>(at.codes, y, scale, at.t, is_there);
    bool is_first = is_there && at.t == 0;
    if (is_first) {
        store_global(at.meta, scale.meta);
    }
    at.codes += KVF_SAW_TILE_TOKENS * (dim / 8 * bits);
    at.meta += KVF_SAW_TILE_TOKENS * meta_bytes;
    at.n_sinks -= KVF_SAW_TILE_TOKENS;
    return is_first && scale.meta == (uint32_t)KVF_SAW_ESCAPE_SCALE << 16;
}

/* Scales of two vectors, in all their lanes but for the meta words, of which each lane has one: two
 * lanes of four find the scale of the first vector, the others that of the second one. */
template <int dim, int bits>
static __device__ __forceinline__ void choose_pair(const encode_target &at,
                                                   float y[2][dim / 32][2][4],
                                                   const bool is_escape[2], saw_scale scales[2])
{
    constexpr float levels = saw_levels<bits>;
    constexpr float sqrt_order = saw_sqrt_order<dim>;
    bool is_upper = at.t >= 2;
    const float2 range = measure_pair<dim>(y, is_upper);
    const saw_scale mine = choose_scale(at.clip_ratio, sqrt_order, sqrt_order / dim, range.x,
                                        range.y, levels, 1.0f / levels,
                                        is_upper ? is_escape[1] : is_escape[0]);
    float offset = __shfl_xor_sync(all_lanes, mine.offset, 2);
    float factor = __shfl_xor_sync(all_lanes, mine.factor, 2);
    scales[0] = {mine.meta, is_upper ? offset : mine.offset, is_upper ? factor : mine.factor};
    scales[1] = {mine.meta, is_upper ? mine.offset : offset, is_upper ? mine.factor : factor};
}

/* Code the lane's vectors of two tiles, those that exist, and go on to the next two: the one fills
 * the gaps of the other, and what is read of the row is read once. Returns how many vectors are
 * escapes. */
template <int dim, int bits, encode_variant variant>
__device__ __forceinline__ uint32_t saw_coder<dim, bits, variant>::encode_pair(
    encode_target &at, const uint32_t x[2][dim / 32][4], const uint32_t peaks[2],
    const bool is_there[2], const hadamard_pair &h16)
{
    constexpr int32_t tile_tokens = KVF_SAW_TILE_TOKENS;
    constexpr uint32_t escape_meta = (uint32_t)KVF_SAW_ESCAPE_SCALE << 16;
    float y[2][dim / 32][2][4];
    bool is_escape[2];
#pragma unroll
    for (int32_t i = 0; i < 2; i++) {
        uint32_t threshold = keep_threshold(peaks[i], at.n_sinks <= i * tile_tokens);
        is_escape[i] = threshold == escape_threshold;
        rotate_words<dim, variant>(at, h16, threshold, x[i], y[i]);
    }
    if (at.mean != nullptr) {
        subtract_means<dim, 2>(at, y);
    }
    saw_scale scales[2];
    choose_pair<dim, bits>(at, y, is_escape, scales);
    bool is_upper = at.t >= 2; /* then meta is that of the second one */
    uint32_t meta = scales[0].meta;
    bool is_first = at.t % 2 == 0 && (is_upper ? is_there[1] : is_there[0]);
    if (is_first) {
        store_global(at.meta, meta);
    }
#pragma unroll
    for (int32_t i = 0; i < 2; i++) {
        store_codes<dim, bits>(at.codes + i * tile_tokens * (dim / 8 * bits), y[i], scales[i], at.t,
                               is_there[i]);
    }
    at.codes += 2 * tile_tokens * (dim / 8 * bits);
    at.meta += 2 * tile_tokens * meta_bytes;
    at.n_sinks -= 2 * tile_tokens;
    return __popc(__ballot_sync(all_lanes, is_first && meta == escape_meta));
}

/* Masks of the channels that are flipped: K's, then V's. */
static __device__ __forceinline__ void fill_signs(const struct kvf_gpu_work &work, uint32_t *signs)
{
    uint32_t n_k = saw_encode_sign_words(work.tensors[0].dim);
    uint32_t n = n_k + saw_encode_sign_words(work.tensors[1].dim);
    for (uint32_t i = threadIdx.x; i < n; i += SAW_ENCODE_THREADS) {
        uint32_t is_v = i >= n_k;
        uint32_t channel = 2 * (i - (is_v ? n_k : 0));
        uint32_t flipped = work.tensors[is_v].sign_bits[channel / 8] >> (channel % 8);
        signs[i] = (flipped & 1) << 15 | (flipped & 2) << 30;
    }
}

/* What a warp does: prepare means, code tiles, one or two at a time, ask for others. */
template <int dim, int bits, encode_variant variant, typename coder = saw_coder<dim, bits, variant>,
          bool in_pairs = false>
struct encode_warp {
    static constexpr uint32_t n_slots = encode_ring<dim>::n_slots;

    const struct kvf_gpu_work &work;
    uint32_t tensors;
    encode_team team;
    encode_ring<dim> ring;
    encode_shared<dim> *shared;
    const uint32_t *signs;
    const uint32_t *table;     /* of a search or of the coder, behind the rings */
    encode_source<dim> source; /* of the row whose tiles are asked for */
    hadamard_pair h16;
    uint32_t peak; /* of the lane's vector of the tile that is next */
    uint32_t turn; /* of the two means: that of the latest row that has one */

    __device__ __forceinline__ encode_warp(const struct kvf_gpu_work &work_, uint32_t tensors_,
                                           uint8_t *shared_bytes)
        : work(work_), tensors(tensors_), team(work_),
          ring(shared_bytes + saw_encode_more_bytes(&work_, dim), team),
          shared(reinterpret_cast<encode_shared<dim> *>(shared_bytes)),
          signs(reinterpret_cast<const uint32_t *>(shared_bytes + sizeof(encode_shared<dim>))),
          table(reinterpret_cast<const uint32_t *>(shared_bytes +
                                                   saw_encode_shared_bytes(&work_, dim))),
          h16(0x3f80, tensors_ >> 2), turn(0)
    {
        pin(h16.b[0]);
        pin(h16.b[1]);
        pin(h16.b[2]);
        pin(h16.b[3]);
    }

    __device__ __forceinline__ uint32_t mean_barrier() const
    {
        return ENCODE_MEAN + (variant == encode_variant::one_mean_barrier ? 0 : turn);
    }

    /* The warp's row in the thread block's unit. */
    __device__ __forceinline__ const encode_row *row_of(uint32_t unit) const
    {
        return &shared->rows[(unit * team.unit_rows() + (team.warp >> team.row_shift)) % rows_kept];
    }

    /* Of the first tile of a row. */
    __device__ __forceinline__ uint32_t first_peak() const
    {
        uint32_t x[dim / 32][4];
        ring.load(0, x);
        return find_peak(find_lane_peak<dim>(x));
    }

    /* The mean of the row, in the given unit, whose first tiles have been asked for; this warp's
     * has come. */
    __device__ __forceinline__ void prepare_mean(const encode_row &row, uint32_t unit)
    {
        turn = 1 - turn;
        sum_sample<dim>(team, ring, row, shared);
        if (team.warp != unit % encode_warps) {
            arrive(ENCODE_SUMS);
            return;
        }
        await(ENCODE_SUMS);
        uint64_t stored = row.meta - row.row * row.n_tokens * coder::meta_bytes -
                          saw_mean_bytes(work.tensors[row.is_v], row.n_tokens) + row.row * dim * 2;
        finish_mean<dim>(team, shared, signs + row.signs,
                         at_address<uint16_t>(row.mean != 0 ? row.mean : stored), row.mean != 0,
                         shared->mean[turn]);
        __syncwarp();
        if (mean_barrier() == ENCODE_MEAN) { /* numbers that vary would reserve all barriers */
            arrive(ENCODE_MEAN);
        } else {
            arrive(ENCODE_NEXT_MEAN);
        }
    }

    __device__ __forceinline__ encode_target target_of(const encode_row &row,
                                                       const lane_tiles &tiles) const
    {
        uint32_t g = team.lane / 4;
        uint32_t token = tiles.first * KVF_SAW_TILE_TOKENS + g;
        uint32_t meta_token = token + (in_pairs && team.lane % 4 >= 2 ? KVF_SAW_TILE_TOKENS : 0);
        encode_target at;
        at.tensor = &work.tensors[row.is_v];
        at.t = team.lane % 4;
        at.signs = signs + row.signs + at.t * 4;
        at.mean = row.is_centred ? shared->mean[turn] + at.t * 4 : nullptr;
        at.meta = at_address<uint8_t>(row.meta) + meta_token * coder::meta_bytes;
        at.codes = at_address<uint8_t>(row.codes) + token * (dim / 8 * bits);
        at.n_sinks = (int32_t)(row.n_sinks - token);
        at.table = table;
        at.clip_ratio = at.tensor->clip_ratio;
        if constexpr (has_search(variant)) {
            at.clip_ratio = at.tensor->clip_ratios[min(at.t, SAW_SEARCH_RATIOS - 1u)];
        }
        return at;
    }

    /* By the warp that has a part's first tokens. */
    __device__ __noinline__ static void zero_gaps_of(const struct kvf_gpu_work &work,
                                                     const encode_row &row)
    {
        const struct kvf_gpu_tensor &tensor = work.tensors[row.is_v];
        uint64_t stored = row.meta - saw_mean_bytes(tensor, row.n_tokens);
        zero_gaps(tensor, saw_parts(tensor, stored, row.n_tokens), threadIdx.x % warp_lanes,
                  warp_lanes);
    }

    /* Make the entries of rows to come: those of the units from 0, n, 2 n, ... on, n so that it is
     * 32 rows. Half of the time before they are needed, by one warp, when no warp needs those
     * before the present ones; all meet before the first one is needed. */
    __device__ __forceinline__ void look_ahead(uint32_t unit) const
    {
        uint32_t n_units = warp_lanes / encode_warps * team.row_warps; /* 32 / unit_rows() */
        uint32_t at = unit & (n_units - 1);
        if (at == n_units / 2 && team.warp == 0) {
            fill_rows(work, tensors, (unit + n_units / 2) * team.unit_rows(), shared->rows);
            __syncwarp();
        }
        if (at == n_units - 1) {
            await(ENCODE_ROWS);
        }
    }

    /* Code the tiles of the unit, one by one, and ask for those of the next one. Returns how many
     * vectors are escapes. */
    __device__ __forceinline__ uint32_t run_tiles(uint32_t unit, const lane_tiles &tiles,
                                                  encode_target &at, const encode_row &next,
                                                  uint32_t page_id)
    {
        uint32_t n_escapes = 0;
#pragma unroll 1
        for (uint32_t k = 0; k < unit_tiles; k++) {
            await_copies<n_slots - 2>(); /* of tile k + 1 */
            if (k == unit_tiles - 1 && next.is_centred) {
                prepare_mean(next, unit + 1);
            }
            if (k < tiles.n) {
                bool is_escape = coder::encode_tile(at, ring, k, k < tiles.lane_n, h16, &peak);
                n_escapes += __popc(__ballot_sync(all_lanes, is_escape));
            }
            if (k == unit_tiles - 1 && tiles.n < unit_tiles) {
                peak = first_peak();
            }
            if (k == unit_tiles - n_slots) {
                source.point_at(work, team, next, page_id);
            }
            source.fetch(work, team, ring, (k + n_slots) % unit_tiles);
        }
        return n_escapes;
    }

    /* The same, two by two. Their words are in registers when they are coded, so that their slots
     * are filled meanwhile. */
    __device__ __forceinline__ uint32_t run_pairs(uint32_t unit, const lane_tiles &tiles,
                                                  encode_target &at, const encode_row &next,
                                                  uint32_t page_id)
    {
        static_assert(!in_pairs || n_slots == unit_tiles, "a tile of the next row has its slot");
        uint32_t n_escapes = 0;
#pragma unroll 1
        for (uint32_t k = 0; k < unit_tiles; k += 2) {
            if (k == unit_tiles - 2 && next.is_centred) {
                await_copies<0>(); /* of the next row's first tiles, too */
                prepare_mean(next, unit + 1);
            } else {
                await_copies<1>();
            }
            uint32_t x[2][dim / 32][4];
            uint32_t peaks[2];
            ring.load(k, x[0]);
            ring.load(k + 1, x[1]);
            find_peaks<dim>(x, peaks);
            if (k == 0) {
                source.point_at(work, team, next, page_id);
            }
            source.fetch_pair(work, team, ring, k);
            if (k < tiles.n) {
                const bool is_there[2] = {k < tiles.lane_n, k + 1 < tiles.lane_n};
                n_escapes += coder::encode_pair(at, x, peaks, is_there, h16);
            }
        }
        return n_escapes;
    }

    /* Code the row of the unit, and ask for the tiles of the next one. */
    __device__ __forceinline__ void run_unit(uint32_t unit)
    {
        const encode_row &row = *row_of(unit);
        const lane_tiles tiles(team, row);
        uint32_t block = row.block;
        encode_target at = target_of(row, tiles);
        if (row.row == 0 && team.seat == 0 && tiles.n != 0) {
            zero_gaps_of(work, row);
            __syncwarp();
        }
        look_ahead(unit);
        const encode_row *next = row_of(unit + 1);
        uint32_t page_id = source.ask_page(work, team, *next);
        if (at.mean != nullptr && team.warp != unit % encode_warps) {
            if (mean_barrier() == ENCODE_MEAN) {
                await(ENCODE_MEAN);
            } else {
                await(ENCODE_NEXT_MEAN);
            }
        }
        uint32_t n_escapes;
        if constexpr (in_pairs) {
            n_escapes = run_pairs(unit, tiles, at, *next, page_id);
        } else {
            n_escapes = run_tiles(unit, tiles, at, *next, page_id);
        }
        if (n_escapes != 0 && team.lane == 0) {
            atomicAdd(&results_of(work)[block].n_escapes, n_escapes);
        }
    }

    /* All units of the thread block. */
    __device__ __forceinline__ void run()
    {
        if (team.warp == 0) {
            fill_rows(work, tensors, 0, shared->rows);
        }
        __syncthreads();
        const encode_row *row = row_of(0);
        source.point_at(work, team, *row, source.ask_page(work, team, *row));
        if constexpr (in_pairs) {
            source.fetch_pair(work, team, ring, 0);
            source.fetch_pair(work, team, ring, 2);
            await_copies<1>();
        } else {
#pragma unroll 1
            for (uint32_t k = 0; k < n_slots; k++) {
                source.fetch(work, team, ring, k);
            }
            await_copies<n_slots - 1>();
            peak = first_peak();
        }
        if (row->is_centred) {
            prepare_mean(*row, 0);
        }
        uint32_t n_units = saw_encode_units(&work, tensors);
#pragma unroll 1
        for (uint32_t unit = 0; blockIdx.x + unit * gridDim.x < n_units; unit++) {
            run_unit(unit);
        }
    }
};

/* Two tiles at a time? Two vectors of 256 have no room in registers, nor have two of 64 in those of
 * three thread blocks; a search takes all four lanes for one vector; and with 8 bits there is so
 * much to move that it gains nothing. */
static constexpr __device__ bool saw_in_pairs(int dim, int bits, encode_variant variant)
{
    return dim == 128 && bits < 8 && !has_search(variant);
}

template <int dim, int bits, encode_variant variant = encode_variant::normal>
static __device__ __forceinline__ void encode_rows_fast(const struct kvf_gpu_work &work,
                                                        uint32_t tensors)
{
    KVF_SHARED_BYTES(shared_bytes);
    static_assert(sizeof(encode_shared<dim>) == saw_encode_sums_bytes(dim), "the host asks for it");
    fill_signs(work, reinterpret_cast<uint32_t *>(shared_bytes + sizeof(encode_shared<dim>)));
    if constexpr (has_search(variant)) {
        fill_cost_table(
            work.tensors[tensors == 2 ? 1 : 0],
            reinterpret_cast<uint32_t *>(shared_bytes + saw_encode_shared_bytes(&work, dim)));
    }
    encode_warp<dim, bits, variant, saw_coder<dim, bits, variant>,
                saw_in_pairs(dim, bits, variant)>(work, tensors, shared_bytes)
        .run();
}

} /* namespace kvf */

#endif /* KVF_CODEC_CODEC_SAW_ENCODE_CUH */
