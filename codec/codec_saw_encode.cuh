/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw_encode.cuh: encode of bf16 rows whose rotation is Sylvester's of 64, 128 or 256, the
 * whole vector. Numbers in comments are steps of codec_saw.h; who has which element is in
 * codec_saw_device.cuh.
 *
 * A thread block has one row if the tensor is centred, so that the row is read once, else a piece
 * of a row. Vectors come to shared memory by asynchronous copies; each lane copies what it will
 * work on, and only the mean needs all of it. Within a vector 64 bytes and the 64 after them change
 * places if the token is odd: then 8 lanes read from 32 banks.
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

/* What lies in shared memory behind the vectors. */
template <int dim> struct encode_shared {
    uint32_t threshold[kept_row_tokens]; /* smallest magnitude that is kept, twice; centred only */
    float partial[KVF_SAW_PARTIAL_SUMS][dim];
    float mean[dim];         /* rotated, in the order of the lanes' registers */
    uint32_t signs[dim / 2]; /* masks of two elements each */
    uint32_t n_escapes;
};

/* A thread block's row, or piece of one. */
template <int dim> struct encode_row {
    const struct kvf_gpu_tensor &tensor;
    const struct kvf_gpu_part &part;
    saw_parts parts;
    row_pages pages;
    uint32_t row;
    uint32_t token_first; /* of the piece */
    uint32_t n_tokens;    /* of the piece */
    uint8_t *vectors;     /* in shared memory */
    encode_shared<dim> *shared;
};

/* Where a lane's 16 bytes i of a vector lie in shared memory. */
template <int dim>
static __device__ __forceinline__ uint8_t *kept_bytes(uint8_t *vectors, uint32_t token, uint32_t i,
                                                      uint32_t t)
{
    return vectors + token * (dim * 2) + (i ^ (token & 1)) * 64 + t * 16;
}

static __device__ __forceinline__ void copy_16(uint8_t *to, const uint8_t *from, bool is_aligned)
{
    if (is_aligned) {
        uint32_t address = (uint32_t)__cvta_generic_to_shared(to);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from));
        return;
    }
    for (uint32_t k = 0; k < 8; k++) {
        reinterpret_cast<uint16_t *>(to)[k] = reinterpret_cast<const uint16_t *>(from)[k];
    }
}

/* Ask for the 8 vectors of a tile, numbered within the piece. */
template <int dim>
static __device__ __forceinline__ void fetch_tile(const encode_row<dim> &at, uint32_t tile)
{
    uint32_t lane = threadIdx.x % warp_lanes;
    uint32_t token = tile * 8 + lane / 4;
    if (token < at.n_tokens) {
        const uint8_t *from = at.pages.vector(at.token_first + token) + lane % 4 * 16;
        bool is_aligned = at.pages.is_aligned();
#pragma unroll
        for (uint32_t i = 0; i < dim / 32; i++) {
            copy_16(kept_bytes<dim>(at.vectors, token, i, lane % 4), from + i * 64, is_aligned);
        }
    }
    asm volatile("cp.async.commit_group;");
}

/* Wait until no more than so many tiles of this lane are on their way. */
template <int tiles> static __device__ __forceinline__ void await_tiles()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(tiles) : "memory");
}

template <int dim>
static __device__ __forceinline__ void load_words(const encode_row<dim> &at, uint32_t token,
                                                  uint32_t x[dim / 32][4])
{
#pragma unroll
    for (uint32_t i = 0; i < dim / 32; i++) {
        const uint4 word = *reinterpret_cast<const uint4 *>(
            kept_bytes<dim>(at.vectors, token, i, threadIdx.x % 4));
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
    uint32_t peak = max_magnitude_bf16x2(x[0][0], x[0][1]);
    uint32_t other = max_magnitude_bf16x2(x[0][2], x[0][3]);
#pragma unroll
    for (uint32_t i = 1; i < dim / 32; i++) {
        peak = max_magnitude_bf16x2(peak, x[i][0]);
        other = max_magnitude_bf16x2(other, x[i][1]);
        peak = max_magnitude_bf16x2(peak, x[i][2]);
        other = max_magnitude_bf16x2(other, x[i][3]);
    }
    peak = max_magnitude_bf16x2(peak, other);
    peak = max_magnitude_bf16x2(peak, __shfl_xor_sync(all_lanes, peak, 1));
    peak = max_magnitude_bf16x2(peak, __shfl_xor_sync(all_lanes, peak, 2));
    peak = max_magnitude_bf16x2(peak, permute_bytes(peak, 0, 0x1032)) & 0xffff;
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
static __device__ __forceinline__ void find_thresholds(const encode_row<dim> &at, uint32_t tile)
{
    uint32_t lane = threadIdx.x % warp_lanes;
    uint32_t token = tile * 8 + lane / 4;
    uint32_t x[dim / 32][4];
    bool is_there = token < at.n_tokens;
    load_words<dim>(at, is_there ? token : tile * 8, x);
    uint32_t threshold = keep_threshold<dim>(x, token >= at.part.n_sinks);
    if (is_there && lane % 4 == 0) {
        at.shared->threshold[token] = threshold;
        if (threshold == escape_threshold) {
            atomicAdd(&at.shared->n_escapes, 1u);
        }
    }
}

/* Partial sums of four channels over every eighth token, by one thread. */
template <int dim> static __device__ __forceinline__ void sum_tokens(const encode_row<dim> &at)
{
    uint32_t residue = threadIdx.x / (dim / 4);
    uint32_t place = threadIdx.x % (dim / 4);
    const uint8_t *from = kept_bytes<dim>(at.vectors, residue, place / 8, place / 2 % 4) +
                          place % 2 * 8;
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    bool has_escapes = at.shared->n_escapes != 0;
#pragma unroll 8
    for (uint32_t token = residue; token < at.n_tokens; token += KVF_SAW_PARTIAL_SUMS) {
        uint2 word = *reinterpret_cast<const uint2 *>(from);
        from += KVF_SAW_PARTIAL_SUMS * dim * 2;
        if (!has_escapes || at.shared->threshold[token] != escape_threshold) {
            sum[0] += __uint_as_float(word.x << 16);
            sum[1] += __uint_as_float(word.x & 0xffff0000);
            sum[2] += __uint_as_float(word.y << 16);
            sum[3] += __uint_as_float(word.y & 0xffff0000);
        }
    }
    *reinterpret_cast<float4 *>(&at.shared->partial[residue][place * 4]) = make_float4(
        sum[0], sum[1], sum[2], sum[3]);
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
template <int dim>
static __device__ __forceinline__ void
rotate_words(const encode_row<dim> &at, uint32_t h16, uint32_t threshold,
             const uint32_t x[dim / 32][4], float y[dim / 32][2][4])
{
#pragma unroll
    for (uint32_t i = 0; i < dim / 32; i++) {
        const uint4 sign = *reinterpret_cast<const uint4 *>(
            &at.shared->signs[i * 16 + threadIdx.x % 4 * 4]);
        uint32_t a0 = (x[i][0] & not_below_bf16x2(x[i][0], threshold)) ^ sign.x;
        uint32_t a1 = (x[i][2] & not_below_bf16x2(x[i][2], threshold)) ^ sign.z;
        uint32_t a2 = (x[i][1] & not_below_bf16x2(x[i][1], threshold)) ^ sign.y;
        uint32_t a3 = (x[i][3] & not_below_bf16x2(x[i][3], threshold)) ^ sign.w;
        mma_bf16(y[i][0], a0, a1, a2, a3, h16, h16);
        mma_bf16(y[i][1], a0, a1, a2, a3, h16, h16 ^ 0x80008000);
    }
#pragma unroll
    for (uint32_t i = 0; i < dim / 32; i++) {
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            butterfly(y[i][k / 2][k % 2], y[i][k / 2][k % 2 + 2]); /* bit 2 */
        }
    }
#pragma unroll
    for (uint32_t stride = 1; stride < dim / 32; stride *= 2) { /* bits 5, 6, 7 */
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
}

template <int dim>
static __device__ __forceinline__ void subtract_mean(const encode_row<dim> &at,
                                                     float y[dim / 32][2][4])
{
#pragma unroll
    for (uint32_t group = 0; group < dim / 16; group++) {
        const float4 mean = *reinterpret_cast<const float4 *>(
            &at.shared->mean[(group * 4 + threadIdx.x % 4) * 4]);
        float *to = y[group / 2][group % 2];
        to[0] -= mean.x;
        to[1] -= mean.y;
        to[2] -= mean.z;
        to[3] -= mean.w;
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

/* Two codes, one in each half. A fused multiply and add rounds the product to an integer, once. */
static __device__ __forceinline__ uint32_t quantize_pair(float a, float b, const saw_scale &scale,
                                                         uint32_t top)
{
    float q_a = __fmaf_rn(a - scale.offset, scale.factor, round_magic);
    float q_b = __fmaf_rn(b - scale.offset, scale.factor, round_magic);
    uint32_t pair = permute_bytes(__float_as_uint(q_a), __float_as_uint(q_b), 0x5410);
    return __vimin_s16x2_relu(pair, top);
}

/* Eight nibbles to half, or a quarter, as many bits: fields of 2 bits, or 1. */
static __device__ __forceinline__ uint32_t squeeze_to_2(uint32_t nibbles)
{
    nibbles = (nibbles | nibbles >> 2) & 0x0f0f0f0f;
    nibbles = (nibbles | nibbles >> 4) & 0x00ff00ff;
    return (nibbles | nibbles >> 8) & 0xffff;
}

static __device__ __forceinline__ uint32_t squeeze_to_1(uint32_t nibbles)
{
    nibbles = (nibbles | nibbles >> 3) & 0x03030303;
    nibbles = (nibbles | nibbles >> 6) & 0x000f000f;
    return (nibbles | nibbles >> 12) & 0xff;
}

/* A lane's n / 4 fields of a plane, that of lane 0 begins at `to`; from words of eight nibbles. */
template <int dim>
static __device__ __forceinline__ void store_plane(uint8_t *to, const uint32_t *nibbles,
                                                   uint32_t plane_bits)
{
    constexpr uint32_t n_words = dim / 32;
    to += threadIdx.x % 4 * (dim / 32 * plane_bits);
    if (plane_bits == 4) {
        if constexpr (n_words == 2) {
            *reinterpret_cast<uint2 *>(to) = make_uint2(nibbles[0], nibbles[1]);
        } else {
#pragma unroll
            for (uint32_t w = 0; w < n_words; w += 4) {
                /* only whole words reach here at 4 bits alone, so 16 bytes are aligned */
                *reinterpret_cast<uint4 *>(to + w * 4) = make_uint4(nibbles[w], nibbles[w + 1],
                                                                    nibbles[w + 2], nibbles[w + 3]);
            }
        }
    } else if (plane_bits == 2) {
#pragma unroll
        for (uint32_t w = 0; w < n_words; w += 2) {
            *reinterpret_cast<uint32_t *>(to + w * 2) = squeeze_to_2(nibbles[w]) |
                                                        squeeze_to_2(nibbles[w + 1]) << 16;
        }
    } else {
#pragma unroll
        for (uint32_t w = 0; w < n_words; w += 2) {
            *reinterpret_cast<uint16_t *>(to + w) = (uint16_t)(squeeze_to_1(nibbles[w]) |
                                                               squeeze_to_1(nibbles[w + 1]) << 8);
        }
    }
}

template <int dim>
static __device__ __forceinline__ void store_bytes(uint8_t *to, float y[dim / 32][2][4],
                                                   const saw_scale &scale)
{
    to += threadIdx.x % 4 * (dim / 4);
#pragma unroll
    for (uint32_t w = 0; w < dim / 16; w += 4) {
        uint32_t word[4];
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            uint32_t first = (w + k) * 4;
            uint32_t even = quantize_pair(element_at<dim>(y, first), element_at<dim>(y, first + 2),
                                          scale, 0x00ff00ff);
            uint32_t odd = quantize_pair(element_at<dim>(y, first + 1),
                                         element_at<dim>(y, first + 3), scale, 0x00ff00ff);
            word[k] = even + odd * 0x100;
        }
        *reinterpret_cast<uint4 *>(to + w * 4) = make_uint4(word[0], word[1], word[2], word[3]);
    }
}

/* bits 0: those of the tensor, any but 4 and 8. */
template <int dim, int bits>
static __device__ __forceinline__ void store_codes(const encode_row<dim> &at, uint32_t vector,
                                                   float y[dim / 32][2][4], const saw_scale &scale,
                                                   bool is_there)
{
    uint8_t *to = at.parts.codes + vector * (uint32_t)at.tensor.code_bytes;
    if constexpr (bits == 8) {
        if (is_there) {
            store_bytes<dim>(to, y, scale);
        }
        return;
    }
    uint32_t width = bits != 0 ? bits : at.tensor.bits;
    uint32_t low_bits = bits != 0 ? 0 : width == 6 ? 2 : width == 5 || width == 3 ? 1 : 0;
    uint32_t top = ((1u << width) - 1) * 0x10001;
    uint32_t low_mask = ((1u << low_bits) - 1) * 0x10001;
    uint32_t high[dim / 32];
    uint32_t low[dim / 32];
#pragma unroll
    for (uint32_t w = 0; w < dim / 32; w++) {
        uint32_t upper[4];
        uint32_t lower[4];
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            upper[k] = quantize_pair(element_at<dim>(y, w * 8 + k),
                                     element_at<dim>(y, w * 8 + k + 4), scale, top);
            lower[k] = upper[k] & low_mask;
            if constexpr (bits == 0) {
                upper[k] = upper[k] >> low_bits & 0x000f000f;
            }
        }
        high[w] = upper[0] + upper[1] * 0x10 + (upper[2] + upper[3] * 0x10) * 0x100;
        low[w] = lower[0] + lower[1] * 0x10 + (lower[2] + lower[3] * 0x10) * 0x100;
    }
    if (is_there) {
        store_plane<dim>(to, high, bits != 0 ? 4 : width - low_bits);
        if (low_bits != 0) {
            store_plane<dim>(to + dim / 8 * (width - low_bits), low, low_bits);
        }
    }
}

/* -------------------------------------------------------------------------------------------------
 * Tiles and rows
 */
template <int dim, int bits, bool centred>
static __device__ __forceinline__ void
encode_tile(const struct kvf_gpu_work &work, const encode_row<dim> &at, uint32_t tile, uint32_t h16)
{
    uint32_t lane = threadIdx.x % warp_lanes;
    uint32_t token = tile * 8 + lane / 4;
    bool is_there = token < at.n_tokens;
    uint32_t x[dim / 32][4];
    load_words<dim>(at, is_there ? token : tile * 8, x);
    uint32_t threshold;
    if constexpr (centred) {
        threshold = at.shared->threshold[is_there ? token : tile * 8];
    } else {
        threshold = keep_threshold<dim>(x, at.token_first + token >= at.part.n_sinks);
    }
    float y[dim / 32][2][4];
    rotate_words<dim>(at, h16, threshold, x, y);
    if constexpr (centred) {
        subtract_mean<dim>(at, y);
    }
    float min = y[0][0][0];
    float max = y[0][0][0];
#pragma unroll
    for (uint32_t k = 1; k < dim / 4; k++) {
        min = fminf(min, y[k / 8][k / 4 % 2][k % 4]);
        max = fmaxf(max, y[k / 8][k / 4 % 2][k % 4]);
    }
#pragma unroll
    for (uint32_t mask = 1; mask < 4; mask *= 2) {
        min = fminf(min, __shfl_xor_sync(all_lanes, min, mask));
        max = fmaxf(max, __shfl_xor_sync(all_lanes, max, mask));
    }
    float levels = (float)((1 << (bits != 0 ? bits : at.tensor.bits)) - 1);
    float levels_inverse = bits != 0 ? 1.0f / (float)((1 << bits) - 1) : __fdiv_rn(1.0f, levels);
    saw_scale scale = choose_scale(at.tensor, min, max, levels, levels_inverse,
                                   threshold == escape_threshold);
    uint32_t vector = at.row * at.part.n_tokens + at.token_first + token;
    store_codes<dim, bits>(at, vector, y, scale, is_there);
    if (is_there && lane % 4 == 0) {
        at.parts.meta[vector] = scale.meta;
    }
    bool is_escape = scale.meta == (uint32_t)KVF_SAW_ESCAPE_SCALE << 16;
    count_escapes(work, at.part, is_escape && is_there && lane % 4 == 0);
}

/* Elements of the row that are flipped, as masks of words. */
template <int dim> static __device__ __forceinline__ void fill_signs(const encode_row<dim> &at)
{
    for (uint32_t word = threadIdx.x; word < dim / 2; word += blockDim.x) {
        uint32_t low = is_flipped(at.tensor, at.row, 2 * word);
        uint32_t high = is_flipped(at.tensor, at.row, 2 * word + 1);
        at.shared->signs[word] = low << 15 | high << 31;
    }
}

template <int dim, int bits>
static __device__ __forceinline__ void encode_centred(const struct kvf_gpu_work &work,
                                                      const encode_row<dim> &at)
{
    constexpr uint32_t n_warps = saw_encode_threads(dim) / warp_lanes;
    constexpr uint32_t tiles = kept_row_tokens / 8 / n_warps;
    uint32_t warp = threadIdx.x / warp_lanes;
    uint32_t n_tiles = ceil_div(at.n_tokens, 8);
    for (uint32_t k = 0; k < tiles; k++) {
        fetch_tile<dim>(at, warp + k * n_warps);
    }
    fill_signs<dim>(at);
    if (threadIdx.x == 0) {
        at.shared->n_escapes = 0;
    }
    __syncthreads();
    await_tiles<0>();
    for (uint32_t tile = warp; tile < n_tiles; tile += n_warps) {
        find_thresholds<dim>(at, tile);
    }
    __syncthreads();
    sum_tokens<dim>(at);
    __syncthreads();
    if (warp == 0) {
        finish_mean<dim>(at);
    }
    __syncthreads();
    uint32_t h16 = hadamard_fragment(0x3f80);
    for (uint32_t tile = warp; tile < n_tiles; tile += n_warps) {
        encode_tile<dim, bits, true>(work, at, tile, h16);
    }
}

template <int dim, int bits>
static __device__ __forceinline__ void encode_plain(const struct kvf_gpu_work &work,
                                                    const encode_row<dim> &at)
{
    constexpr uint32_t n_warps = saw_encode_threads(dim) / warp_lanes;
    uint32_t warp = threadIdx.x / warp_lanes;
    uint32_t n_tiles = ceil_div(at.n_tokens, 8);
    for (uint32_t tile = warp; tile < n_tiles; tile += n_warps) {
        fetch_tile<dim>(at, tile);
    }
    fill_signs<dim>(at);
    __syncthreads();
    await_tiles<0>();
    uint32_t h16 = hadamard_fragment(0x3f80);
    for (uint32_t tile = warp; tile < n_tiles; tile += n_warps) {
        encode_tile<dim, bits, false>(work, at, tile, h16);
    }
}

/* Which row, or piece of one, is this thread block's? See saw_encode_blocks. */
struct encode_place {
    uint32_t part;
    uint32_t row;
    uint32_t piece;
};

static __device__ __forceinline__ encode_place find_place(const struct kvf_gpu_work &work,
                                                          uint32_t tensors, uint32_t dim)
{
    uint32_t index = blockIdx.x;
    uint32_t is_v = tensors == 2 ? 1 : 0;
    uint32_t n_blocks = saw_encode_blocks(&work, is_v, dim);
    if (tensors == 3 && index >= n_blocks) {
        index -= n_blocks;
        is_v = 1;
    }
    uint32_t n_pieces = saw_encode_pieces(&work, is_v, dim);
    uint32_t n_rows = work.tensors[is_v].n_rows;
    encode_place place;
    place.piece = index % n_pieces;
    place.row = index / n_pieces % n_rows;
    place.part = index / n_pieces / n_rows * (work.has_v != 0 ? 2 : 1) + is_v;
    return place;
}

template <int dim, int bits>
static __device__ __forceinline__ void encode_row_fast(const struct kvf_gpu_work &work,
                                                       uint32_t tensors)
{
    extern __shared__ __align__(128) uint8_t shared_bytes[];
    const encode_place place = find_place(work, tensors, dim);
    const struct kvf_gpu_part part = parts_of(work)[place.part];
    const struct kvf_gpu_tensor &tensor = work.tensors[part.is_v];
    const uint32_t piece_tokens = saw_encode_piece_tokens(&work, part.is_v, dim);
    const saw_parts parts(tensor, part);
    uint32_t token_first = place.piece * piece_tokens;
    if (token_first >= part.n_tokens) {
        return;
    }
    uint32_t n_tokens = min(part.n_tokens - token_first, piece_tokens);
    const encode_row<dim> at = {
        tensor,
        part,
        parts,
        row_pages(work, part, tensor, place.row),
        place.row,
        token_first,
        n_tokens,
        shared_bytes,
        reinterpret_cast<encode_shared<dim> *>(
            shared_bytes + saw_encode_kept_tokens(&work, tensors, dim) * dim * 2)};
    if (place.row == 0 && place.piece == 0) {
        zero_gaps(tensor, parts);
    }
    if (parts.mean != nullptr) {
        encode_centred<dim, bits>(work, at);
    } else {
        encode_plain<dim, bits>(work, at);
    }
}

} // namespace kvf

#endif /* KVF_CODEC_CODEC_SAW_ENCODE_CUH */
