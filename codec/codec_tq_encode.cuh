/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_tq_encode.cuh: encode by tq of bf16 rows whose rotation is Sylvester's of 64, 128 or 256,
 * the whole vector, by the warps of codec_saw_encode.cuh. Numbers in comments are steps of
 * codec_tq.h.
 *
 * A lane has n / 4 consecutive stored positions, so four of the 16 partial sums of (5), and the
 * other lanes of the vector have those that these are added to first.
 */
#ifndef KVF_CODEC_CODEC_TQ_ENCODE_CUH
#define KVF_CODEC_CODEC_TQ_ENCODE_CUH

#include "codec/codec_saw_encode.cuh"
#include "codec/codec_tq_device.cuh"
#include "codec/codec_tq_shape.h"

namespace kvf
{

/* (6) By m: the level as bf16 in the upper half, which makes all of it a float once the lower half
 * is gone, and the code. By all threads. */
template <int bits> static __device__ __forceinline__ void fill_level_table(uint32_t *table)
{
    for (uint32_t m = threadIdx.x; m < KVF_TQ_TABLE_WORDS; m += blockDim.x) {
        uint32_t code = tq_code(bits, m);
        table[m] = __float_as_uint((float)tq_level(bits, code)) | code;
    }
}

/* (5) Four of a lane's partial sums, to that of the vector in each of its lanes. */
static __device__ __forceinline__ float add_lane_sums(float sums[4])
{
#pragma unroll
    for (uint32_t mask = 2; mask > 0; mask /= 2) {
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            sums[j] += __shfl_xor_sync(all_lanes, sums[j], mask);
        }
    }
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

/* How tq codes a tile. */
template <int dim, int bits> struct tq_coder {
    static constexpr uint32_t meta_bytes = KVF_TQ_SCALE_BYTES;
    static constexpr uint32_t run = dim / KVF_TQ_PARTIAL_SUMS;

    /* What is stored of the lane's elements; entries are those of the table. */
    static __device__ __forceinline__ void
    store_entries(const encode_target &at, const uint32_t entries[dim / 4], bool is_there)
    {
        constexpr uint32_t low_bits = saw_low_bits(bits);
        constexpr uint32_t mask = (1 << bits) - 1;
        store_plane<dim, bits - low_bits>(at.codes, at.t, is_there, [&](uint32_t i) {
            return (int32_t)((entries[i] & mask) >> low_bits);
        });
        if constexpr (low_bits != 0) {
            store_plane<dim, low_bits>(
                at.codes + dim / 8 * (bits - low_bits), at.t, is_there,
                [&](uint32_t i) { return (int32_t)(entries[i] & ((1 << low_bits) - 1)); });
        }
    }

    /* (7) P and Q of the vector. */
    static __device__ __forceinline__ float sum_products(float y[dim / 32][2][4],
                                                         const float levels[dim / 4])
    {
        float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (uint32_t i = 0; i < dim / 4; i++) {
            sums[i / run] = __fmaf_rn(element_at<dim>(y, i), levels[i], sums[i / run]);
        }
        return add_lane_sums(sums);
    }

    static __device__ __forceinline__ float sum_powers(const float levels[dim / 4])
    {
        float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (uint32_t i = 0; i < dim / 4; i++) {
            sums[i / run] = __fmaf_rn(levels[i], levels[i], sums[i / run]);
        }
        float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]); /* exact in any order */
        sum += __shfl_xor_sync(all_lanes, sum, 1);
        return sum + __shfl_xor_sync(all_lanes, sum, 2);
    }

    /* As saw's. */
    static __device__ __forceinline__ bool encode_tile(encode_target &at,
                                                       const encode_ring<dim> &ring, uint32_t k,
                                                       bool is_there, const hadamard_pair &h16,
                                                       uint32_t *peak)
    {
        const struct kvf_gpu_rotation &rotation = at.tensor->rotations[0];
        uint32_t x[dim / 32][4];
        ring.load(k, x);
        uint32_t threshold = keep_threshold(*peak, at.n_sinks <= 0);
        float y[dim / 32][2][4];
        rotate_words<dim, encode_variant::normal>(at, h16, threshold, x, y);
        if (at.mean != nullptr) {
            subtract_mean<dim>(at, y);
        }
        ring.load(k + 1, x);
        uint32_t lane_peak = find_lane_peak<dim>(x);
        float squares[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (uint32_t i = 0; i < dim / 4; i++) {
            float value = element_at<dim>(y, i);
            squares[i / run] = __fmaf_rn(value, value, squares[i / run]);
        }
        float square = add_lane_sums(squares);
        float root = __fsqrt_rn(square);
        *peak = find_peak(lane_peak);
        bool is_escape = (threshold == escape_threshold) | !tq_fits(rotation, root);
        float f = tq_quantizer(rotation, root);
        f = is_escape ? 0.0f : f; /* then codes are 0 */
        float middle = is_escape ? 0.0f : 0.5f;
        uint32_t entries[dim / 4];
#pragma unroll
        for (uint32_t i = 0; i < dim / 4; i++) {
            entries[i] = at.table[tq_step(element_at<dim>(y, i), f, middle)];
        }
        store_entries(at, entries, is_there);
        float levels[dim / 4];
#pragma unroll
        for (uint32_t i = 0; i < dim / 4; i++) {
            levels[i] = __uint_as_float(entries[i] & 0xffff0000);
        }
        float product = tq_takes_product(*at.tensor) ? sum_products(y, levels) : 0.0f;
        float power = tq_takes_power(*at.tensor) ? sum_powers(levels) : 0.0f;
        uint32_t scale = tq_choose_scale(*at.tensor, rotation, square, product, power);
        bool is_first = is_there && at.t == 0;
        if (is_first) {
            *reinterpret_cast<uint16_t *>(at.meta) = is_escape ? (uint16_t)KVF_SAW_ESCAPE_SCALE
                                                               : (uint16_t)scale;
        }
        at.codes += KVF_SAW_TILE_TOKENS * (dim / 8 * bits);
        at.meta += KVF_SAW_TILE_TOKENS * meta_bytes;
        at.n_sinks -= KVF_SAW_TILE_TOKENS;
        return is_first && is_escape;
    }
};

template <int dim, int bits>
static __device__ __forceinline__ void tq_encode_rows_fast(const struct kvf_gpu_work &work,
                                                           uint32_t tensors)
{
    KVF_SHARED_BYTES(shared_bytes);
    fill_signs(work, reinterpret_cast<uint32_t *>(shared_bytes + sizeof(encode_shared<dim>)));
    fill_level_table<bits>(
        reinterpret_cast<uint32_t *>(shared_bytes + saw_encode_shared_bytes(&work, dim)));
    encode_warp<dim, bits, encode_variant::normal, tq_coder<dim, bits>>(work, tensors, shared_bytes)
        .run();
}

} /* namespace kvf */

#endif /* KVF_CODEC_CODEC_TQ_ENCODE_CUH */
