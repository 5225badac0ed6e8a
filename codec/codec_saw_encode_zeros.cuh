/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw_encode_zeros.cuh: encode of bf16 rows of 128 elements, rotated as a whole, with zeros
 * in place of lo and as many clip ratios as there may be: layer inputs. Numbers in comments are
 * steps of codec_saw.h; who has which element is in codec_saw_device.cuh.
 *
 * A thread block has a row of a block, a warp a tile of 8 of its vectors at a time. What bounds it
 * is the search: six or seven operations an element and ratio, against two bytes that are read and
 * half a byte that is written. The scales of four ratios are made at a time, one by each of a
 * vector's lanes.
 */
#ifndef KVF_CODEC_CODEC_SAW_ENCODE_ZEROS_CUH
#define KVF_CODEC_CODEC_SAW_ENCODE_ZEROS_CUH

#include "codec/codec_saw_encode.cuh"
#include "codec/codec_saw_generic.cuh"

namespace kvf
{

constexpr uint32_t zeros_dim = 128;
constexpr uint32_t zeros_warps = SAW_ZEROS_THREADS / warp_lanes;
constexpr uint32_t vector_lanes = 4;
constexpr uint32_t zeros_rounds = (KVF_GPU_CLIPS_MAX + vector_lanes - 1) / vector_lanes;

struct zeros_shared {
    __align__(16) uint32_t signs[zeros_dim / 2]; /* masks of pairs of channels */
    float2 costs[KVF_GPU_CLIPS_MAX];             /* of each ratio */
    uint8_t zeros[KVF_CHUNK_TOKENS_MAX];         /* u of each token */
};

struct zeros_row {
    const struct kvf_gpu_tensor &tensor;
    const struct kvf_gpu_part &part;
    saw_parts parts;
    row_pages pages;
    uint32_t row;
    bool is_aligned;
    zeros_shared *shared;
};

/* (S) a over the number of levels, and s: see lane_cost. */
static __device__ __forceinline__ float2 ratio_costs(const struct kvf_gpu_tensor &tensor,
                                                     uint32_t k)
{
    const saw_costs costs(tensor.clip_ratios[0], tensor.clip_ratios[k], tensor.bits);
    return make_float2(__fdiv_rn(costs.a, (float)((1 << tensor.bits) - 1)), costs.step);
}

/* By all threads: what all vectors need. */
static __device__ void fill_zeros_shared(const zeros_row &at)
{
    const struct kvf_gpu_tensor &tensor = at.tensor;
    for (uint32_t i = threadIdx.x; i < zeros_dim / 2; i += SAW_ZEROS_THREADS) {
        at.shared->signs[i] = (is_flipped(tensor, at.row, 2 * i) ? 0x8000u : 0) |
                              (is_flipped(tensor, at.row, 2 * i + 1) ? 0x80000000u : 0);
    }
    for (uint32_t i = threadIdx.x; i < tensor.n_clips; i += SAW_ZEROS_THREADS) {
        at.shared->costs[i] = ratio_costs(tensor, i);
    }
    __syncthreads();
}

/* A lane's 16 bytes at each 64 of a vector. */
static __device__ __forceinline__ void load_lane(bool is_aligned, const uint8_t *vector, uint32_t t,
                                                 uint32_t x[4][4])
{
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        const uint8_t *from = vector + 64 * i + 16 * t;
        if (is_aligned) {
            const uint4 words = *reinterpret_cast<const uint4 *>(from);
            x[i][0] = words.x;
            x[i][1] = words.y;
            x[i][2] = words.z;
            x[i][3] = words.w;
        } else {
            const uint16_t *halves = reinterpret_cast<const uint16_t *>(from);
#pragma unroll
            for (uint32_t k = 0; k < 4; k++) {
                x[i][k] = halves[2 * k] | (uint32_t)halves[2 * k + 1] << 16;
            }
        }
    }
}

/* (5) */
static __device__ __forceinline__ void find_range(float y[4][2][4], generic_range *range)
{
    float min = 0.0f;
    float max = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < zeros_dim / 4; i++) {
        min = fminf(min, y[i / 8][i / 4 % 2][i % 4]);
        max = fmaxf(max, y[i / 8][i / 4 % 2][i % 4]);
    }
#pragma unroll
    for (uint32_t mask = 1; mask < vector_lanes; mask *= 2) {
        min = fminf(min, __shfl_xor_sync(all_lanes, min, mask));
        max = fmaxf(max, __shfl_xor_sync(all_lanes, max, mask));
    }
    range->min = min;
    range->max = max;
}

/* (S) What a ratio costs the lane's elements, whose i are steps. As a share of the levels q is
 * clamped by the operation that makes it, before it is rounded: the cost is the same for the ratios
 * of kvf_saw_gpu_knows_ratios, all i that there are and all w (tests/unit/codec/test_x.c). */
template <bool is_int>
static __device__ __forceinline__ uint32_t lane_cost(const float steps[zeros_dim / 4],
                                                     const float2 &costs, float w,
                                                     const generic_range &range)
{
    float share = w * range.levels_inverse;
    float from = round_magic + w; /* exact if w is an integer */
    uint32_t cost = 0;
#pragma unroll
    for (uint32_t i = 0; i < zeros_dim / 4; i++) {
        float level = __fmaf_rn(fma_saturated(steps[i], costs.x, share), range.levels, round_magic);
        float above = is_int ? level - from : level - round_magic - w;
        float error = __fmaf_rn(-above, costs.y, steps[i]);
        cost += __float_as_uint(__fmaf_rn(error, error, round_magic));
    }
    return cost - zeros_dim / 4 * __float_as_uint(round_magic);
}

/* Of the scales that a vector's lanes have, four ratios a round: that of ratio k, in every lane. */
static __device__ __forceinline__ generic_scale scale_at(const generic_scale tried[zeros_rounds],
                                                         uint32_t k)
{
    uint32_t lane = lane_id() / vector_lanes * vector_lanes + k % vector_lanes;
    generic_scale mine = tried[0];
#pragma unroll
    for (uint32_t round = 1; round < zeros_rounds; round++) {
        mine = k / vector_lanes == round ? tried[round] : mine;
    }
    return {{__shfl_sync(all_lanes, mine.scale.meta, lane),
             __shfl_sync(all_lanes, mine.scale.offset, lane),
             __shfl_sync(all_lanes, mine.scale.factor, lane)},
            __shfl_sync(all_lanes, mine.w, lane)};
}

/* (S) The best of the scales. is_int: w is an integer. */
template <bool is_int>
static __device__ __forceinline__ saw_scale search_steps(uint32_t n_clips, const float2 *costs,
                                                         const generic_range &range,
                                                         const generic_scale tried[zeros_rounds],
                                                         const float steps[zeros_dim / 4])
{
    constexpr uint32_t escape_meta = (uint32_t)KVF_SAW_ESCAPE_SCALE << 16;
    saw_scale best = {escape_meta, 0.0f, 0.0f};
    uint32_t least = 0xffffffff;
#pragma unroll 1
    for (uint32_t k = 0; k < n_clips; k++) {
        const generic_scale scale = scale_at(tried, k);
        uint32_t cost = lane_cost<is_int>(steps, costs[k], scale.w, range);
        cost += __shfl_xor_sync(all_lanes, cost, 1);
        cost += __shfl_xor_sync(all_lanes, cost, 2);
        bool is_better = scale.scale.meta != escape_meta && cost < least;
        least = is_better ? cost : least;
        best = is_better ? scale.scale : best;
    }
    return best;
}

/* (S) */
static __device__ __forceinline__ saw_scale search_zeros(const struct kvf_gpu_tensor &tensor,
                                                         const float2 *costs,
                                                         const generic_range &range,
                                                         const float y[4][2][4])
{
    generic_scale tried[zeros_rounds] = {};
    float steps[zeros_dim / 4];
#pragma unroll
    for (uint32_t round = 0; round < zeros_rounds; round++) {
        uint32_t k = round * vector_lanes + lane_id() % vector_lanes;
        if (k < tensor.n_clips) {
            tried[round] = scale_of(tensor, range, tensor.clip_ratios[k]);
        }
    }
    float factor = 16.0f * scale_at(tried, 0).scale.factor;
#pragma unroll
    for (uint32_t i = 0; i < zeros_dim / 4; i++) {
        steps[i] = __fmaf_rn(y[i / 8][i / 4 % 2][i % 4], factor, round_magic) - round_magic;
    }
    return saw_zero_shift(tensor) == 0.0f
               ? search_steps<true>(tensor.n_clips, costs, range, tried, steps)
               : search_steps<false>(tensor.n_clips, costs, range, tried, steps);
}

/* Eight vectors from a token on. */
template <int bits>
static __device__ __forceinline__ void
encode_zeros_tile(const struct kvf_gpu_work &work, const zeros_row &at, const hadamard_pair &h16,
                  generic_range *range, uint32_t first)
{
    uint32_t t = lane_id() % vector_lanes;
    uint32_t token = first + lane_id() / vector_lanes;
    bool is_there = token < at.part.n_tokens;
    uint32_t x[4][4];
    float y[4][2][4];
    encode_target target = {};
    target.signs = at.shared->signs + 4 * t;
    token = is_there ? token : at.part.n_tokens - 1;
    load_lane(at.is_aligned, at.pages.vector(token), t, x);
    uint32_t threshold = keep_threshold(find_peak(find_lane_peak<zeros_dim>(x)),
                                        is_there && token >= at.part.n_sinks);
    rotate_words<zeros_dim, encode_variant::normal>(target, h16, threshold, x, y);
    range->is_escape = threshold == escape_threshold;
    find_range(y, range);
    const saw_scale scale = at.tensor.n_clips != 0
                                ? search_zeros(at.tensor, at.shared->costs, *range, y)
                                : scale_of(at.tensor, *range, at.tensor.clip_ratio).scale;
    uint32_t vector = at.row * at.part.n_tokens + token;
    store_codes<zeros_dim, bits>(at.parts.codes + vector * (uint32_t)at.tensor.code_bytes, y,
                                 quantizer(scale), t, is_there);
    bool is_escape = scale.meta == (uint32_t)KVF_SAW_ESCAPE_SCALE << 16;
    if (t == 0 && is_there) {
        at.parts.scales()[vector] = (uint16_t)(scale.meta >> 16);
        at.shared->zeros[token] = (uint8_t)(scale.meta & 0xff);
    }
    count_escapes(work, at.part, is_escape && t == 0 && is_there);
}

template <int bits>
static __device__ __forceinline__ void encode_row_zeros(const struct kvf_gpu_work &work,
                                                        uint32_t tensors)
{
    __shared__ zeros_shared shared;
    uint32_t n_rows = saw_rows_max(&work, tensors);
    uint32_t row = blockIdx.x % n_rows;
    const struct kvf_gpu_part part = part_of(work, blockIdx.x / n_rows);
    const struct kvf_gpu_tensor &tensor = work.tensors[part.is_v];
    if ((tensors >> part.is_v & 1) == 0 || row >= tensor.n_rows) {
        return;
    }
    const row_pages pages(work, part, tensor, row);
    const zeros_row at = {tensor, part, saw_parts(tensor, part), pages, row, pages.is_aligned(),
                          &shared};
    const hadamard_pair h16(0x3f80, tensors >> 2);
    if (row == 0) {
        zero_gaps(tensor, at.parts, threadIdx.x, SAW_ZEROS_THREADS);
    }
    fill_zeros_shared(at);
    generic_range range;
    range.levels = (float)((1 << bits) - 1);
    range.levels_inverse = __fdiv_rn(1.0f, range.levels);
#pragma unroll 1
    for (uint32_t first = uniform_warp() * KVF_SAW_TILE_TOKENS; first < part.n_tokens;
         first += zeros_warps * KVF_SAW_TILE_TOKENS) {
        encode_zeros_tile<bits>(work, at, h16, &range, first);
    }
    pack_zeros(shared.zeros, part.n_tokens, bits, at.parts.zeros(tensor, row, part.n_tokens));
}

} /* namespace kvf */

#endif /* KVF_CODEC_CODEC_SAW_ENCODE_ZEROS_CUH */
