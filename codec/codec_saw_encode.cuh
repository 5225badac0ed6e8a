/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw_encode.cuh: encode of bf16 rows whose rotation is Sylvester's of 64, 128 or 256, the
 * whole vector. Numbers in comments are steps of codec_saw.h; who has which element is in
 * codec_saw_device.cuh.
 *
 * A thread block has one row, which it reads once. Vectors come to shared memory by asynchronous
 * copies; each lane copies what it will work on, and only the mean needs all of it. Within a vector
 * 64 bytes and the 64 after them change places if the token is odd: so 8 lanes read from 32 banks.
 */
#ifndef KVF_CODEC_CODEC_SAW_ENCODE_CUH
#define KVF_CODEC_CODEC_SAW_ENCODE_CUH

#include "codec/codec_saw_device.cuh"
#include "codec/codec_saw_shape.h"

namespace kvf
{

constexpr uint32_t escape_threshold = 0x7fff7fff; /* NaN: nothing is kept */
constexpr uint32_t kept_row_tokens = 256;         /* KVF_CHUNK_TOKENS_MAX */
template <int dim> constexpr uint32_t saw_encode_threads_of = saw_encode_threads(dim);

/* A test and a bench have encoders that are wrong on purpose. */
enum class encode_variant {
    normal,
    swapped, /* two stages of the rotation change places */
    unrotated,
};

/* What lies in shared memory before the vectors. */
template <int dim> struct encode_shared {
    uint32_t threshold[kept_row_tokens]; /* smallest magnitude that is kept, twice; centred only */
    float partial[KVF_SAW_PARTIAL_SUMS][dim];
    float mean[dim];         /* rotated, in the order of the lanes' registers */
    uint32_t signs[dim / 2]; /* masks of two elements each */
    uint32_t n_escapes;
};

/* A thread block's row, as one lane has it. A lane's vectors are those of its g in
 * every tile: tokens 8 tile + g. */
template <int dim> struct encode_row {
    const struct kvf_gpu_tensor &tensor;
    const struct kvf_gpu_part &part;
    saw_parts parts;
    row_pages pages;
    uint32_t row;
    uint32_t n_tokens;
    uint32_t g;
    uint32_t t;
    uint8_t *vectors; /* in shared memory: where the lane's first 16 bytes of tile 0 lie */
    encode_shared<dim> *shared;
};

constexpr uint32_t swap_bytes = 64; /* see above */

/* Where the lane's 16 bytes i of a tile lie in shared memory. */
template <int dim>
static __device__ __forceinline__ uint8_t *kept_bytes(const encode_row<dim> &at, uint32_t tile,
                                                      uint32_t i)
{
    uint8_t *even = at.vectors + tile * (8 * dim * 2) + i / 2 * 128;
    return i % 2 == 0 ? even : even + swap_bytes - (at.g & 1) * (2 * swap_bytes);
}

template <int dim>
static __device__ __forceinline__ void copy_16(uint8_t *even, uint8_t *odd, const uint8_t *from)
{
    uint32_t address[2] = {(uint32_t)__cvta_generic_to_shared(even),
                           (uint32_t)__cvta_generic_to_shared(odd)};
#pragma unroll
    for (uint32_t i = 0; i < dim / 32; i++) {
        asm volatile(
            "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address[i % 2] + i / 2 * 128),
            "l"(from + i * 64));
    }
}

/* From any address of an element, at once. */
template <int dim>
static __device__ __noinline__ void copy_slowly(uint8_t *even, uint8_t *odd, const uint8_t *from)
{
    for (uint32_t i = 0; i < dim / 32; i++) {
        uint8_t *to = (i % 2 == 0 ? even : odd) + i / 2 * 128;
        for (uint32_t k = 0; k < 16; k += 2) {
            *reinterpret_cast<uint16_t *>(to + k) = *reinterpret_cast<const uint16_t *>(from +
                                                                                        i * 64 + k);
        }
    }
}

/* Pages of any size, vectors on any address of an element. */
template <int dim>
static __device__ __forceinline__ void fetch_tiles_slowly(const encode_row<dim> &at, uint32_t warp)
{
    bool is_aligned = at.pages.is_aligned();
#pragma unroll 1
    for (uint32_t k = 0; k < saw_encode_tiles(dim); k++) {
        uint32_t tile = warp + k * saw_encode_warps(dim);
        if (tile * 8 + at.g < at.n_tokens) {
            const uint8_t *from = at.pages.vector(tile * 8 + at.g) + at.t * 16;
            uint8_t *even = kept_bytes<dim>(at, tile, 0);
            uint8_t *odd = kept_bytes<dim>(at, tile, 1);
            if (is_aligned) {
                copy_16<dim>(even, odd, from);
            } else {
                copy_slowly<dim>(even, odd, from);
            }
        }
        asm volatile("cp.async.commit_group;");
    }
}

/* Ask for the lane's part of a warp's tiles, in a group of copies each. */
template <int dim>
static __device__ __forceinline__ void fetch_tiles(const encode_row<dim> &at, uint32_t warp)
{
    if (!at.pages.has_whole_tiles() || !at.pages.is_aligned()) {
        fetch_tiles_slowly<dim>(at, warp);
        return;
    }
    const uint8_t *base = at.pages.base + at.g * at.pages.token_stride_bytes + at.t * 16;
    uint32_t page_ids[saw_encode_tiles(dim)];
#pragma unroll
    for (uint32_t k = 0; k < saw_encode_tiles(dim); k++) {
        uint32_t token = (warp + k * saw_encode_warps(dim)) * 8;
        page_ids[k] = token < at.n_tokens ? at.pages.page_ids[token >> at.pages.page_shift] : 0;
    }
#pragma unroll
    for (uint32_t k = 0; k < saw_encode_tiles(dim); k++) {
        uint32_t tile = warp + k * saw_encode_warps(dim);
        uint32_t slot = tile * 8 & (at.pages.tokens_a_page - 1);
        if (tile * 8 + at.g < at.n_tokens) {
            copy_16<dim>(kept_bytes<dim>(at, tile, 0), kept_bytes<dim>(at, tile, 1),
                         base + page_ids[k] * at.pages.page_stride_bytes +
                             slot * at.pages.token_stride_bytes);
        }
        asm volatile("cp.async.commit_group;");
    }
}

/* Wait until all tiles of this lane are there but for the last `behind`. */
static __device__ __forceinline__ void await_tile(uint32_t behind)
{
    if (behind >= 3) {
        asm volatile("cp.async.wait_group 3;" ::: "memory");
    } else if (behind == 2) {
        asm volatile("cp.async.wait_group 2;" ::: "memory");
    } else if (behind == 1) {
        asm volatile("cp.async.wait_group 1;" ::: "memory");
    } else {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
}

template <int dim>
static __device__ __forceinline__ void load_words(const encode_row<dim> &at, uint32_t tile,
                                                  uint32_t x[dim / 32][4])
{
#pragma unroll
    for (uint32_t i = 0; i < dim / 32; i++) {
        const uint4 word = *reinterpret_cast<const uint4 *>(kept_bytes<dim>(at, tile, i));
        x[i][0] = word.x;
        x[i][1] = word.y;
        x[i][2] = word.z;
        x[i][3] = word.w;
    }
}

/* (1, 3) The smallest magnitude that is kept, twice; escape_threshold for escapes. The same in the
 * four lanes of a vector. */
template <int dim>
static __device__ __forceinline__ uint32_t keep_threshold(const uint32_t x[dim / 32][4],
                                                          bool is_coded)
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
    peak = max_magnitudes(peak, other);
    peak = max_magnitudes(peak, __shfl_xor_sync(all_lanes, peak, 1));
    peak = max_magnitudes(peak, __shfl_xor_sync(all_lanes, peak, 2));
    peak = max_magnitudes(peak, permute_bytes(peak, 0, 0x1032)) & 0xffff;
    constexpr uint32_t escape_bits = KVF_SAW_ESCAPE_EXPONENT << 7;
    constexpr uint32_t drop_bits = KVF_SAW_DROP_BINADES << 7;
    uint32_t exponent_bits = peak & 0x7f80;
    uint32_t threshold = exponent_bits > drop_bits ? exponent_bits - drop_bits : 0;
    return is_coded && peak < escape_bits ? threshold * 0x10001 : escape_threshold;
}

/* -------------------------------------------------------------------------------------------------
 * (2) The mean
 */

/* Escapes are known by their thresholds, which the lanes of the row leave in shared memory. */
template <int dim>
static __device__ __forceinline__ void find_threshold(const encode_row<dim> &at, uint32_t tile)
{
    uint32_t token = tile * 8 + at.g;
    uint32_t x[dim / 32][4];
    load_words<dim>(at, tile, x);
    uint32_t threshold = keep_threshold<dim>(x, token >= at.part.n_sinks);
    if (at.t == 0) {
        at.shared->threshold[token] = threshold;
        if (threshold == escape_threshold && token < at.n_tokens) {
            atomicAdd(&at.shared->n_escapes, 1u);
        }
    }
}

static __device__ __forceinline__ void add_channels(float4 &sum, const uint8_t *from)
{
    uint2 word = *reinterpret_cast<const uint2 *>(from);
    sum.x += __uint_as_float(word.x << 16);
    sum.y += __uint_as_float(word.x & 0xffff0000);
    sum.z += __uint_as_float(word.y << 16);
    sum.w += __uint_as_float(word.y & 0xffff0000);
}

/* Partial sums of four channels over every eighth token, by one thread. */
template <int dim> static __device__ __forceinline__ void sum_tokens(const encode_row<dim> &at)
{
    uint32_t residue = threadIdx.x / (dim / 4);
    uint32_t place = threadIdx.x % (dim / 4);
    uint32_t swap = (residue & 1) * swap_bytes;
    const uint8_t *from = at.vectors - at.g * (dim * 2) - (at.g & 1) * swap_bytes - at.t * 16 +
                          residue * (dim * 2) + (place * 8 ^ swap);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    uint32_t n = (at.n_tokens - residue + KVF_SAW_PARTIAL_SUMS - 1) / KVF_SAW_PARTIAL_SUMS;
    if (at.shared->n_escapes == 0) {
#pragma unroll 8
        for (uint32_t i = 0; i < n; i++) {
            add_channels(sum, from + i * (KVF_SAW_PARTIAL_SUMS * dim * 2));
        }
    } else {
#pragma unroll 1
        for (uint32_t i = 0; i < n; i++) {
            if (at.shared->threshold[residue + i * KVF_SAW_PARTIAL_SUMS] != escape_threshold) {
                add_channels(sum, from + i * (KVF_SAW_PARTIAL_SUMS * dim * 2));
            }
        }
    }
    *reinterpret_cast<float4 *>(&at.shared->partial[residue][place * 4]) = sum;
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

/* By one warp: the mean to its part, and rotated to shared memory. */
template <int dim> static __device__ __forceinline__ void finish_mean(const encode_row<dim> &at)
{
    constexpr int per = dim / 32;
    uint32_t lane = threadIdx.x % warp_lanes;
    float y[per];
    uint32_t count = at.n_tokens - at.shared->n_escapes;
    uint16_t *mean = reinterpret_cast<uint16_t *>(at.parts.mean) + at.row * dim;
#pragma unroll
    for (int r = 0; r < per; r++) {
        uint32_t element = lane * per + r;
        const float(*p)[dim] = at.shared->partial;
        float sum04 = p[0][element] + p[4][element];
        float sum15 = p[1][element] + p[5][element];
        float sum26 = p[2][element] + p[6][element];
        float sum37 = p[3][element] + p[7][element];
        uint32_t half = mean_half_bits((sum04 + sum26) + (sum15 + sum37), count);
        mean[element] = (uint16_t)half;
        uint32_t sign = at.shared->signs[element / 2] << (element % 2 != 0 ? 0 : 16) & 0x80000000;
        y[r] = __uint_as_float(__float_as_uint(f32_of_half_bits(half)) ^ sign);
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
        uint32_t e = lane * per + r;
        uint32_t group = e / 32 * 2 + (e >> 1 & 1);
        at.shared->mean[(group * 4 + (e >> 3 & 3)) * 4 + (e >> 2 & 1) * 2 + (e & 1)] = y[r];
    }
}

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
rotate_words(const encode_row<dim> &at, const hadamard_pair &h16, uint32_t threshold,
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
        const uint4 sign = *reinterpret_cast<const uint4 *>(&at.shared->signs[i * 16 + at.t * 4]);
        uint32_t a0 = (x[i][0] & not_below(x[i][0], threshold)) ^ sign.x;
        uint32_t a1 = (x[i][2] & not_below(x[i][2], threshold)) ^ sign.z;
        uint32_t a2 = (x[i][1] & not_below(x[i][1], threshold)) ^ sign.y;
        uint32_t a3 = (x[i][3] & not_below(x[i][3], threshold)) ^ sign.w;
        mma_bf16(y[i][0], a0, a1, a2, a3, h16.b[0], h16.b[1]);
        mma_bf16(y[i][1], a0, a1, a2, a3, h16.b[2], h16.b[3]);
    }
    if constexpr (variant == encode_variant::normal) {
        rotate_bit_2<dim>(y);
        rotate_high_bit<dim, 1>(y);
    } else if constexpr (variant == encode_variant::swapped) {
        rotate_high_bit<dim, 1>(y);
        rotate_bit_2<dim>(y);
    }
    if constexpr (variant != encode_variant::unrotated && dim >= 128) {
        rotate_high_bit<dim, 2>(y);
    }
    if constexpr (variant != encode_variant::unrotated && dim >= 256) {
        rotate_high_bit<dim, 4>(y);
    }
}

template <int dim>
static __device__ __forceinline__ void subtract_mean(const encode_row<dim> &at,
                                                     float y[dim / 32][2][4])
{
#pragma unroll
    for (uint32_t group = 0; group < dim / 16; group++) {
        const float4 mean = *reinterpret_cast<const float4 *>(
            &at.shared->mean[(group * 4 + at.t) * 4]);
        float *to = y[group / 2][group % 2];
        to[0] -= mean.x;
        to[1] -= mean.y;
        to[2] -= mean.z;
        to[3] -= mean.w;
    }
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

/* Of a vector, in each of its four lanes. As integers the bits of positive numbers are in order,
 * and those of negative ones, unsigned, are above them in reversed order; integers can be compared
 * three at a time. */
template <int dim>
static __device__ __forceinline__ void measure(float y[dim / 32][2][4], float *min_out,
                                               float *max_out)
{
    const float *all = &y[0][0][0];
    constexpr uint32_t half = dim / 8;
    int32_t top = __float_as_int(all[0]);
    int32_t top_2 = __float_as_int(all[half]);
    uint32_t bottom = __float_as_uint(all[0]);
    uint32_t bottom_2 = __float_as_uint(all[half]);
#pragma unroll
    for (uint32_t k = 1; k + 1 < half; k += 2) {
        top = __vimax3_s32(top, __float_as_int(all[k]), __float_as_int(all[k + 1]));
        bottom = __vimax3_u32(bottom, __float_as_uint(all[k]), __float_as_uint(all[k + 1]));
        top_2 = __vimax3_s32(top_2, __float_as_int(all[half + k]),
                             __float_as_int(all[half + k + 1]));
        bottom_2 = __vimax3_u32(bottom_2, __float_as_uint(all[half + k]),
                                __float_as_uint(all[half + k + 1]));
    }
    top = __vimax3_s32(top, top_2, __float_as_int(all[half - 1]));
    bottom = __vimax3_u32(bottom, bottom_2, __float_as_uint(all[half - 1]));
    top = max(top, __float_as_int(all[2 * half - 1]));
    bottom = max(bottom, __float_as_uint(all[2 * half - 1]));
#pragma unroll
    for (uint32_t mask = 1; mask < 4; mask *= 2) {
        top = max(top, __shfl_xor_sync(all_lanes, top, mask));
        bottom = max(bottom, __shfl_xor_sync(all_lanes, bottom, mask));
    }
    *min_out = __uint_as_float(bottom);
    *max_out = __int_as_float(top);
    if (__any_sync(all_lanes, top < 0 || (int32_t)bottom >= 0)) {
        float copy[dim / 4];
#pragma unroll
        for (uint32_t k = 0; k < dim / 4; k++) {
            copy[k] = all[k];
        }
        float2 range = measure_floats<dim>(copy);
        *min_out = range.x;
        *max_out = range.y;
    }
}

/* -------------------------------------------------------------------------------------------------
 * (7) Codes
 */

/* The lane's element at an index of the stored order. */
template <int dim>
static __device__ __forceinline__ float &element_at(float y[dim / 32][2][4], uint32_t index)
{
    constexpr uint32_t products = dim / 16;
    uint32_t product = index % products;
    return y[product / 2][index / products % 2][product % 2 * 2 + index / (2 * products)];
}

/* A code, not yet clamped: sign and magnitude if it is negative. The product is a subnormal number,
 * whose bits are an integer; so the machine rounds the exact product to one, once. */
struct quantizer {
    float offset;
    float factor;

    __device__ __forceinline__ quantizer(const saw_scale &scale)
        : offset(scale.offset * -0x1p-43f), factor(scale.factor * 0x1p-106f)
    {
    }

    __device__ __forceinline__ int32_t code(float y) const
    {
        return __float_as_int(__fmul_rn(__fmaf_rn(y, 0x1p-43f, offset), factor));
    }
};

/* (c, a, b) with a and b clamped to 0 .. 15, or 255. */
static __device__ __forceinline__ uint32_t pack_nibbles(int32_t a, int32_t b, uint32_t c)
{
    uint32_t d;
    asm("cvt.pack.sat.u4.s32.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

static __device__ __forceinline__ uint32_t pack_bytes(int32_t a, int32_t b, uint32_t c)
{
    uint32_t d;
    asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

/* (c, a, b) with a and b clamped to 0 .. 3. */
static __device__ __forceinline__ uint32_t pack_twos(int32_t a, int32_t b, uint32_t c)
{
    uint32_t d;
    asm("cvt.pack.sat.u2.s32.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

/* Eight nibbles of 0 or 1 to bits. */
static __device__ __forceinline__ uint32_t squeeze_to_1(uint32_t nibbles)
{
    nibbles = (nibbles | nibbles >> 3) & 0x03030303;
    nibbles = (nibbles | nibbles >> 6) & 0x000f000f;
    return (nibbles | nibbles >> 12) & 0xff;
}

/* The lane's n / 4 codes, in stored order, as fields of a plane; code(index) gives one, which is
 * clamped to the plane's range. The plane begins at `to`. */
template <int dim, uint32_t plane_bits, typename F>
static __device__ __forceinline__ void store_plane(uint8_t *to, uint32_t t, bool is_there, F code)
{
    constexpr uint32_t a_word = plane_bits == 2 ? 16 : 8; /* bits are packed as nibbles first */
    constexpr uint32_t n_words = dim / 4 / a_word;
    uint32_t words[n_words];
#pragma unroll
    for (uint32_t w = 0; w < n_words; w++) {
        words[w] = 0;
#pragma unroll
        for (uint32_t k = a_word; k > 0; k -= 2) {
            uint32_t index = w * a_word + k;
            words[w] = plane_bits == 2 ? pack_twos(code(index - 1), code(index - 2), words[w])
                                       : pack_nibbles(code(index - 1), code(index - 2), words[w]);
        }
    }
    if (!is_there) {
        return;
    }
    to += t * (dim / 32 * plane_bits);
    if constexpr (plane_bits == 1) {
#pragma unroll
        for (uint32_t w = 0; w < n_words; w += 2) {
            *reinterpret_cast<uint16_t *>(to + w) = (uint16_t)(squeeze_to_1(words[w]) |
                                                               squeeze_to_1(words[w + 1]) << 8);
        }
    } else if constexpr (n_words % 4 == 0 && plane_bits == 4) {
#pragma unroll
        for (uint32_t w = 0; w < n_words; w += 4) {
            store_global(to + w * 4, words[w], words[w + 1], words[w + 2], words[w + 3]);
        }
    } else if constexpr (n_words % 2 == 0) {
#pragma unroll
        for (uint32_t w = 0; w < n_words; w += 2) {
            store_global(to + w * 4, words[w], words[w + 1]);
        }
    } else {
        store_global(to, words[0]);
    }
}

template <int dim>
static __device__ __forceinline__ void store_bytes(uint8_t *to, float y[dim / 32][2][4],
                                                   const quantizer &by, uint32_t t)
{
    to += t * (dim / 4);
#pragma unroll
    for (uint32_t w = 0; w < dim / 16; w += 4) {
        uint32_t word[4];
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            uint32_t first = (w + k) * 4;
            word[k] = pack_bytes(by.code(element_at<dim>(y, first + 3)),
                                 by.code(element_at<dim>(y, first + 2)), 0);
            word[k] = pack_bytes(by.code(element_at<dim>(y, first + 1)),
                                 by.code(element_at<dim>(y, first)), word[k]);
        }
        store_global(to + w * 4, word[0], word[1], word[2], word[3]);
    }
}

template <int dim, int bits>
static __device__ __forceinline__ void store_codes(const encode_row<dim> &at, uint32_t vector,
                                                   float y[dim / 32][2][4], const saw_scale &scale,
                                                   bool is_there)
{
    constexpr uint32_t low_bits = saw_low_bits(bits);
    uint8_t *to = at.parts.codes + vector * (uint32_t)(dim / 8 * bits);
    const quantizer by(scale);
    if constexpr (bits == 8) {
        if (is_there) {
            store_bytes<dim>(to, y, by, at.t);
        }
    } else if constexpr (low_bits == 0) {
        store_plane<dim, bits>(to, at.t, is_there,
                               [&](uint32_t i) { return by.code(element_at<dim>(y, i)); });
    } else {
        int32_t codes[dim / 4];
#pragma unroll
        for (uint32_t i = 0; i < dim / 4; i++) {
            codes[i] = __vimin_s32_relu(by.code(element_at<dim>(y, i)), (1 << bits) - 1);
        }
        store_plane<dim, bits - low_bits>(to, at.t, is_there,
                                          [&](uint32_t i) { return codes[i] >> low_bits; });
        store_plane<dim, low_bits>(to + dim / 8 * (bits - low_bits), at.t, is_there,
                                   [&](uint32_t i) { return codes[i] & ((1 << low_bits) - 1); });
    }
}

/* -------------------------------------------------------------------------------------------------
 * Tiles and rows
 */
/* Is the lane the first one of a vector that is an escape? */
template <int dim, int bits, encode_variant variant, bool centred>
static __device__ __forceinline__ bool encode_tile(const encode_row<dim> &at, uint32_t tile,
                                                   const hadamard_pair &h16)
{
    uint32_t token = tile * 8 + at.g;
    bool is_there = token < at.n_tokens; /* else all of what follows is garbage */
    uint32_t x[dim / 32][4];
    load_words<dim>(at, tile, x);
    uint32_t threshold;
    if constexpr (centred) {
        threshold = at.shared->threshold[token];
    } else {
        threshold = keep_threshold<dim>(x, token >= at.part.n_sinks);
    }
    float y[dim / 32][2][4];
    rotate_words<dim, variant>(at, h16, threshold, x, y);
    if constexpr (centred) {
        subtract_mean<dim>(at, y);
    }
    float min;
    float max;
    measure<dim>(y, &min, &max);
    constexpr float levels = (float)((1 << bits) - 1);
    saw_scale scale = choose_scale(at.tensor, min, max, levels, 1.0f / levels,
                                   threshold == escape_threshold);
    uint32_t vector = at.row * at.n_tokens + token;
    store_codes<dim, bits>(at, vector, y, scale, is_there);
    bool is_first = is_there && at.t == 0;
    if (is_first) {
        store_global(reinterpret_cast<uint8_t *>(at.parts.meta + vector), scale.meta);
    }
    return is_first && scale.meta == (uint32_t)KVF_SAW_ESCAPE_SCALE << 16;
}

/* Elements of the row that are flipped, as masks of words. */
template <int dim> static __device__ __forceinline__ void fill_signs(const encode_row<dim> &at)
{
    uint32_t word = threadIdx.x;
    if (word < dim / 2) {
        uint32_t channel = at.row % (at.tensor.dim / at.tensor.group) * dim + 2 * word;
        uint32_t flipped = at.tensor.sign_bits[channel / 8] >> (channel % 8);
        at.shared->signs[word] = (flipped & 1) << 15 | (flipped & 2) << 30;
    }
}

/* The mean of the row, and thresholds. */
template <int dim>
static __device__ __forceinline__ void prepare_mean(const encode_row<dim> &at, uint32_t warp)
{
#pragma unroll 1
    for (uint32_t k = 0; k < saw_encode_tiles(dim); k++) {
        uint32_t tile = warp + k * saw_encode_warps(dim);
        await_tile(saw_encode_tiles(dim) - 1 - k);
        if (tile * 8 < at.n_tokens) {
            find_threshold<dim>(at, tile);
        }
    }
    __syncthreads();
    sum_tokens<dim>(at);
    __syncthreads();
    if (warp == 0) {
        finish_mean<dim>(at);
    }
    __syncthreads();
}

template <int dim, int bits, encode_variant variant, bool centred>
static __device__ __forceinline__ void encode_tiles(const struct kvf_gpu_work &work,
                                                    const encode_row<dim> &at, uint32_t tensors,
                                                    uint32_t warp)
{
    const hadamard_pair h16(0x3f80, tensors >> 2);
    uint32_t n_escapes = 0;
#pragma unroll 1
    for (uint32_t k = 0; k < saw_encode_tiles(dim); k++) {
        uint32_t tile = warp + k * saw_encode_warps(dim);
        if constexpr (!centred) {
            await_tile(saw_encode_tiles(dim) - 1 - k);
        }
        if (tile * 8 < at.n_tokens) {
            bool is_escape = encode_tile<dim, bits, variant, centred>(at, tile, h16);
            n_escapes += __popc(__ballot_sync(all_lanes, is_escape));
        }
    }
    if (n_escapes != 0 && threadIdx.x % warp_lanes == 0) {
        atomicAdd(&results_of(work)[at.part.block].n_escapes, n_escapes);
    }
}

/* Which row is this thread block's? */
struct encode_place {
    uint32_t part;
    uint32_t row;
};

static __device__ __forceinline__ encode_place find_place(const struct kvf_gpu_work &work,
                                                          uint32_t tensors)
{
    uint32_t index = blockIdx.x;
    uint32_t is_v = tensors == 2 ? 1 : 0;
    if (tensors == 3 && work.tensors[0].n_rows == work.tensors[1].n_rows) {
        is_v = index % 2; /* side by side: one waits for a mean while the other one computes */
        index = index / 2;
    } else if (tensors == 3) {
        uint32_t n_blocks = saw_encode_blocks(&work, 1);
        is_v = index >= n_blocks;
        index = is_v ? index - n_blocks : index;
    }
    encode_place place;
    place.part = index / work.tensors[is_v].n_rows;
    place.row = index - place.part * work.tensors[is_v].n_rows;
    place.part = work.has_v != 0 ? 2 * place.part + is_v : place.part;
    return place;
}

template <int dim, int bits, encode_variant variant = encode_variant::normal>
static __device__ __forceinline__ void encode_row_fast(const struct kvf_gpu_work &work,
                                                       uint32_t tensors)
{
    extern __shared__ __align__(128) uint8_t shared_bytes[];
    static_assert(sizeof(encode_shared<dim>) <= saw_encode_more_bytes(dim), "the host asks for it");
    const encode_place place = find_place(work, tensors);
    const struct kvf_gpu_part part = parts_of(work)[place.part];
    const struct kvf_gpu_tensor &tensor = work.tensors[part.is_v];
    uint32_t g = threadIdx.x % warp_lanes / 4;
    uint32_t t = threadIdx.x % 4;
    uint8_t *vectors = shared_bytes + saw_encode_more_bytes(dim);
    const encode_row<dim> at = {tensor,
                                part,
                                saw_parts(tensor, part),
                                row_pages(work, part, tensor, place.row),
                                place.row,
                                part.n_tokens,
                                g,
                                t,
                                vectors + g * (dim * 2) + (g & 1) * swap_bytes + t * 16,
                                reinterpret_cast<encode_shared<dim> *>(shared_bytes)};
    uint32_t warp = uniform_warp();
    fetch_tiles<dim>(at, warp);
    fill_signs<dim>(at);
    if (threadIdx.x == 0) {
        at.shared->n_escapes = 0;
    }
    __syncthreads();
    if (at.parts.mean != nullptr) {
        prepare_mean<dim>(at, warp);
        encode_tiles<dim, bits, variant, true>(work, at, tensors, warp);
    } else {
        encode_tiles<dim, bits, variant, false>(work, at, tensors, warp);
    }
    if (place.row == 0) {
        zero_gaps(tensor, at.parts);
    }
}

} /* namespace kvf */

#endif /* KVF_CODEC_CODEC_SAW_ENCODE_CUH */
