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

/* What the lower half of an entry has of a code: fields of a plane, all alike, so that where fields
 * of several codes are put together each is there already. Of 3 bits the lower byte has the first
 * plane's two bits four times, the upper one the second plane's eight times. */
template <int bits> static constexpr __device__ uint32_t fields_of_code(uint32_t code)
{
    return bits == 4   ? code * 0x1111
           : bits == 2 ? code * 0x5555
                       : (code >> 1) * 0x55 | (code & 1) * 0xff00;
}

/* (6) An entry of a table by m: the level as bf16 in the upper half, which makes all of it a float
 * once the lower half is gone, and the fields of the code. */
template <int bits> static __device__ __forceinline__ uint32_t level_entry(uint32_t m)
{
    uint32_t code = tq_code(bits, m);
    return __float_as_uint((float)tq_level(bits, code)) | fields_of_code<bits>(code);
}

/* By all threads, of which each has one m; each lane has a copy in a bank of its own. */
template <int bits> static __device__ __forceinline__ void fill_level_table(uint32_t *table)
{
    static_assert(SAW_ENCODE_THREADS == (int)KVF_TQ_TABLE_WORDS, "a thread has one m");
    uint32_t m = threadIdx.x;
    uint32_t entry = level_entry<bits>(m);
#pragma unroll 4
    for (uint32_t k = 0; k < warp_lanes; k++) {
        table[m * warp_lanes + (m + k) % warp_lanes] = entry;
    }
}

/* Four codes, in the lowest fields. */
template <int bits> static __device__ __forceinline__ uint32_t join_four(const uint32_t *entries)
{
    constexpr uint32_t pairs = bits == 4 ? 0x0f0f : bits == 2 ? 0x3333 : 0x5533;
    constexpr uint32_t fours = bits == 4 ? 0x00ff : bits == 2 ? 0x0f0f : 0x330f;
    return choose_bits(choose_bits(entries[0], entries[1], pairs),
                       choose_bits(entries[2], entries[3], pairs), fours);
}

/* The same byte of each of four words. */
template <uint32_t byte>
static __device__ __forceinline__ uint32_t join_bytes(const uint32_t *words)
{
    constexpr uint32_t selector = byte | (byte + 4) << 4;
    return permute_bytes(permute_bytes(words[0], words[1], selector),
                         permute_bytes(words[2], words[3], selector), 0x5410);
}

/* The codes of 32 positions: words of the first plane, then those of the second one. */
template <int bits>
static __device__ __forceinline__ void join_codes(const uint32_t entries[32], uint32_t words[bits])
{
    uint32_t fours[8];
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
        fours[i] = join_four<bits>(&entries[4 * i]);
    }
    if constexpr (bits == 4) {
#pragma unroll
        for (uint32_t w = 0; w < 4; w++) {
            words[w] = permute_bytes(fours[2 * w], fours[2 * w + 1], 0x5410);
        }
    } else {
        uint32_t eights[4];
        constexpr uint32_t mask = bits == 2 ? 0x00ff : 0x0f00;
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            eights[i] = choose_bits(fours[2 * i], fours[2 * i + 1], mask);
        }
        if constexpr (bits == 2) {
            words[0] = permute_bytes(eights[0], eights[1], 0x5410);
            words[1] = permute_bytes(eights[2], eights[3], 0x5410);
        } else {
            words[0] = join_bytes<0>(&fours[0]);
            words[1] = join_bytes<0>(&fours[4]);
            words[2] = join_bytes<1>(eights);
        }
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

    static_assert(dim == 128, "a lane has 32 codes");

    /* What is stored of the lane's elements. */
    static __device__ __forceinline__ void store_words(const encode_target &at,
                                                       const uint32_t words[bits], bool is_there)
    {
        if (!is_there) {
            return;
        }
        if constexpr (bits == 4) {
            store_global(at.codes + at.t * 16, words[0], words[1], words[2], words[3]);
        } else {
            store_global(at.codes + at.t * 8, words[0], words[1]);
        }
        if constexpr (bits == 3) {
            store_global(at.codes + dim / 4 + at.t * 4, words[2]);
        }
    }

    /* (7) P and Q of the vector. */
    static __device__ __forceinline__ float sum_products(float y[dim / 32][2][4],
                                                         const uint32_t entries[dim / 4])
    {
        float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (uint32_t i = 0; i < dim / 4; i++) {
            float level = __uint_as_float(entries[i] & 0xffff0000);
            sums[i / run] = __fmaf_rn(element_at<dim>(y, i), level, sums[i / run]);
        }
        return add_lane_sums(sums);
    }

    /* The product of the levels, a half of those of eight vectors as rows and the other half as
     * eight more, with either half as columns: Q is where a half of a vector meets itself, in
     * register g % 2 or 2 + g % 2 of lane 4 g + g / 2. Exact in any order. */
    static __device__ __forceinline__ float sum_powers(const uint32_t entries[dim / 4])
    {
        float upper[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        float lower[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (uint32_t i = 0; i < dim / 4; i += 4) {
            uint32_t first = permute_bytes(entries[i], entries[i + 1], 0x7632);
            uint32_t second = permute_bytes(entries[i + 2], entries[i + 3], 0x7632);
            add_mma_bf16(upper, first, second, first);
            add_mma_bf16(lower, first, second, second);
        }
        uint32_t lane = threadIdx.x % warp_lanes;
        float sum = (lane & 4) != 0 ? upper[1] + lower[3] : upper[0] + lower[2];
        return __shfl_sync(all_lanes, sum, (lane & 28) | lane >> 3);
    }

    /* The same of two bits by the words of codes: two levels have one magnitude, two another one,
     * and the bits of those of the smaller one are unlike. */
    static __device__ __forceinline__ float sum_powers_of_twos(const uint32_t words[bits])
    {
        constexpr int32_t levels[] = {KVF_TQ_LEVELS_2};
        constexpr int32_t small = levels[2] - KVF_TQ_LEVEL_BIAS;
        constexpr int32_t large = levels[3] - KVF_TQ_LEVEL_BIAS;
        uint32_t unlike = ((words[0] ^ words[0] >> 1) & 0x55555555) |
                          ((words[1] ^ words[1] << 1) & 0xaaaaaaaa);
        int32_t n_small = __popc(unlike);
        n_small += __shfl_xor_sync(all_lanes, n_small, 1);
        n_small += __shfl_xor_sync(all_lanes, n_small, 2);
        return (float)(dim * large * large - n_small * (large * large - small * small));
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
        float root = tq_root(square);
        *peak = find_peak(lane_peak);
        bool is_escape = (threshold == escape_threshold) | !tq_fits(rotation, root);
        float f = tq_quantizer(rotation, root);
        f = is_escape ? 0.0f : f; /* then codes are 0 */
        float middle = is_escape ? 0.0f : 0.5f;
        KVF_SHARED_BYTES(table);
        uint32_t lane_at = shared_address(table) + threadIdx.x % warp_lanes * 4;
        uint32_t entries[dim / 4];
#pragma unroll
        for (uint32_t i = 0; i < dim / 4; i++) {
            uint32_t step = tq_step(element_at<dim>(y, i), f, middle);
            entries[i] = load_shared(lane_at + step * (warp_lanes * 4));
        }
        uint32_t words[bits];
        join_codes<bits>(entries, words);
        store_words(at, words, is_there);
        float product = tq_takes_product(*at.tensor) ? sum_products(y, entries) : 0.0f;
        float power = 0.0f;
        if (tq_takes_power(*at.tensor)) {
            if constexpr (bits == 2) {
                power = sum_powers_of_twos(words);
            } else {
                power = sum_powers(entries);
            }
        }
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
    KVF_SHARED_BYTES(table);
    uint8_t *shared_bytes = table + KVF_TQ_ENCODE_TABLE_BYTES;
    fill_signs(work, reinterpret_cast<uint32_t *>(shared_bytes + sizeof(encode_shared<dim>)));
    fill_level_table<bits>(reinterpret_cast<uint32_t *>(table));
    encode_warp<dim, bits, encode_variant::normal, tq_coder<dim, bits>>(work, tensors, shared_bytes)
        .run();
}

} /* namespace kvf */

#endif /* KVF_CODEC_CODEC_TQ_ENCODE_CUH */
