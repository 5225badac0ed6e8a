/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_tq_split_decode.cuh: decode by tq of bf16 rows of 128 channels of which 32 have a rotation
 * of their own, on tensor cores: 32 by Sylvester's order 32, 96 by order 96 = 12 x 8. Numbers in
 * comments are steps of codec_tq.h.
 *
 * Both rotations and the order of the channels are one matrix of 128 x 128 signs and zeroes, which
 * a thread block makes for its row: x = L W, levels L of a vector by stored position, columns of W
 * by channel. Levels are signed bytes, so are those of W, and sums are exact. They are added to an
 * integer that has the bits of round_magic, which makes the sum a float as it is.
 *
 * A warp has 32 vectors, as two times mma's 16 rows. Lane 4 g + t has the levels of vectors g and
 * g + 8, of those the positions that it reads: 8 of the first rotation, 16 and 8 of the second one,
 * all beginning at a multiple of t; they are words 0 and 1, 2 to 5, 6 and 7 of it. What comes out
 * is the 16 bytes at 64 i + 16 t of the same vectors, for each i.
 */
#ifndef KVF_CODEC_CODEC_TQ_SPLIT_DECODE_CUH
#define KVF_CODEC_CODEC_TQ_SPLIT_DECODE_CUH

#include "codec/codec_saw_decode.cuh"
#include "codec/codec_tq_split.cuh"

namespace kvf
{

constexpr uint32_t lane_words = 8;   /* of levels of a vector, or of a column of W */
constexpr uint32_t lane_vectors = 4; /* of a lane: g, g + 8, g + 16, g + 24 of the tile */
constexpr uint32_t all_ones = 0x01010101;

/* What is done to the sums of a channel. */
struct __align__(8) split_column
{
    float mean;
    uint32_t flags; /* the sign's bit if flipped; 1: of the first rotation */
};

struct split_decode_shared {
    uint4 matrix[16][2][warp_lanes]; /* by mma's eight columns, half of the rows, lane */
    split_column columns[split_dim];
};

/* -------------------------------------------------------------------------------------------------
 * W
 */

/* Ones, minus where the bit is set that a byte of `bits` selects. */
static __device__ __forceinline__ uint32_t minus_where(bool bit, uint32_t bytes)
{
    return bit ? bytes & 0xfefefefe : 0;
}

/* A lane's words of the column of the first rotation's coefficient j. Bits of an index: see
 * split_coefficient. */
template <uint32_t bits>
static __device__ __forceinline__ void first_column(uint32_t j, uint32_t t, uint32_t words[8])
{
    bool j0 = (j & 1) != 0;
    bool j1 = (j & 2) != 0;
    bool j2 = (j & 4) != 0;
    uint32_t all = all_ones ^ minus_where((__popc(t & j >> 3) & 1) != 0, ~0u);
    if constexpr (bits + 1 == 4) { /* bytes are positions in ascending order */
        words[0] = all ^ minus_where(j2, 0xff00ff00) ^ minus_where(j1, 0xffff0000);
        words[1] = words[0] ^ minus_where(j0, ~0u);
    } else { /* every other one */
        words[0] = all ^ minus_where(j1, 0xff00ff00) ^ minus_where(j0, 0xffff0000);
        words[1] = words[0] ^ minus_where(j2, ~0u);
    }
#pragma unroll
    for (uint32_t w = 2; w < lane_words; w++) {
        words[w] = 0;
    }
}

/* The same of the second rotation's. hadamard: rows t, t + 4 and t + 8 of order 12. */
static __device__ __forceinline__ void second_column(uint32_t j, const uint32_t hadamard[3],
                                                     uint32_t words[8])
{
    bool j0 = (j & 1) != 0;
    bool j1 = (j & 2) != 0;
    bool j2 = (j & 4) != 0;
    uint32_t a = j >> 3;
    words[0] = 0;
    words[1] = 0;
    words[2] = all_ones ^ minus_where((hadamard[0] >> a & 1) != 0, 0x00ff00ff) ^
               minus_where((hadamard[1] >> a & 1) != 0, 0xff00ff00) ^ minus_where(j1, 0xffff0000);
    words[3] = words[2] ^ minus_where(j0, ~0u);
    words[4] = words[2] ^ minus_where(j2, ~0u);
    words[5] = words[3] ^ minus_where(j2, ~0u);
    words[6] = all_ones ^ minus_where((hadamard[2] >> a & 1) != 0, ~0u) ^
               minus_where(j1, 0xff00ff00) ^ minus_where(j0, 0xffff0000);
    words[7] = words[6] ^ minus_where(j2, ~0u);
}

/* By all threads: what the lanes need to know of the row. */
template <uint32_t bits>
static __device__ __forceinline__ void fill_columns(const struct kvf_gpu_tensor &tensor,
                                                    const tq_parts &parts, uint32_t row,
                                                    split_decode_shared *shared)
{
    const uint4 list = *reinterpret_cast<const uint4 *>(parts.lists + row * (split_dim / 8));
    const uint16_t *mean = reinterpret_cast<const uint16_t *>(parts.saw.mean) + row * split_dim;
    uint32_t t = threadIdx.x % 4;
    const uint32_t hadamard[3] = {rotate_rows_12[t], rotate_rows_12[t + 4], rotate_rows_12[t + 8]};
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < split_dim * 4; i += SAW_GENERIC_THREADS) {
        uint32_t channel = i / 4;
        const split_place place(list, channel);
        uint32_t words[lane_words];
        if (place.is_first) {
            first_column<bits>(place.index, t, words);
        } else {
            second_column(place.index, hadamard, words);
        }
        /* channel: 32 i + 8 t + 2 product + column of the pair; of lane t and the product's */
        uint32_t product = channel / 32 * 4 + channel / 2 % 4;
        uint32_t lane = (channel / 8 % 4 * 2 + channel % 2) * 4 + t;
        shared->matrix[product][0][lane] = make_uint4(words[0], words[1], words[2], words[3]);
        shared->matrix[product][1][lane] = make_uint4(words[4], words[5], words[6], words[7]);
        if (t == 0) {
            split_column *column = &shared->columns[channel];
            column->mean = parts.saw.mean != nullptr ? f32_of_half_bits(mean[channel]) : 0.0f;
            column->flags = (is_flipped(tensor, row, channel) ? 0x80000000 : 0) | place.is_first;
        }
    }
    __syncthreads();
}

/* -------------------------------------------------------------------------------------------------
 * L
 */

/* Four levels of a codebook, the signed bytes of a word. */
template <uint32_t bits> static constexpr __device__ uint32_t level_word(uint32_t first)
{
    constexpr uint8_t levels[3][KVF_TQ_LEVELS_MAX] = {
        {KVF_TQ_LEVELS_2}, {KVF_TQ_LEVELS_3}, {KVF_TQ_LEVELS_4}};
    const uint8_t *four = &levels[bits - 2][first];
    return (four[0] | four[1] << 8 | four[2] << 16 | (uint32_t)four[3] << 24) ^ 0x80808080;
}

/* Levels of the codes in the four lowest nibbles. */
template <uint32_t bits> static __device__ __forceinline__ uint32_t levels_of(uint32_t nibbles)
{
    if constexpr (bits == 2) {
        return permute_bytes(level_word<bits>(0), 0, nibbles);
    } else if constexpr (bits == 3) {
        return permute_bytes(level_word<bits>(0), level_word<bits>(4), nibbles);
    } else {
        uint32_t low = nibbles & 0x7777;
        uint32_t upper = permute_bytes(0, 0xffffffff, nibbles >> 1 & 0x4444);
        return choose_bits(permute_bytes(level_word<bits>(8), level_word<bits>(12), low),
                           permute_bytes(level_word<bits>(0), level_word<bits>(4), low), upper);
    }
}

/* 16 bits to every other one. */
static __device__ __forceinline__ uint32_t spread(uint32_t x)
{
    x = (x | x << 8) & 0x00ff00ff;
    x = (x | x << 4) & 0x0f0f0f0f;
    x = (x | x << 2) & 0x33333333;
    return (x | x << 1) & 0x55555555;
}

/* Codes in fields of 2 bits, and the lowest bits of 3 if they have so many: those of even positions
 * to nibbles, and those of odd ones. */
template <uint32_t bits>
static __device__ __forceinline__ void codes_of(uint32_t high, uint32_t low, uint32_t *even_out,
                                                uint32_t *odd_out)
{
    *even_out = high & 0x33333333;
    *odd_out = high >> 2 & 0x33333333;
    if constexpr (bits == 3) {
        uint32_t bit = spread(low);
        *even_out = *even_out << 1 | (bit & 0x11111111);
        *odd_out = *odd_out << 1 | (bit >> 2 & 0x11111111);
    }
}

/* A lane's share of the codes of a vector, as it lies in memory, and of its scales. */
template <uint32_t bits> struct lane_share {
    static constexpr uint32_t second_at = split_first * (bits + 1) / 8;
    static constexpr uint32_t bytes = second_at + (split_dim - split_first) * bits / 8;

    uint32_t first;
    uint32_t first_low;
    uint32_t second;
    uint32_t second_low;
    uint32_t last;
    uint32_t last_low;
    uint32_t meta;

    __device__ __forceinline__ void load(const uint8_t *codes, const uint32_t *scales, uint32_t t)
    {
        const uint8_t *at = codes + second_at;
        if constexpr (bits + 1 == 4) {
            first = *reinterpret_cast<const uint32_t *>(codes + t * 4);
        } else {
            first = *reinterpret_cast<const uint16_t *>(codes + t * 2);
            first_low = codes[8 + t];
        }
        second = *reinterpret_cast<const uint32_t *>(at + t * 4);
        last = *reinterpret_cast<const uint16_t *>(at + 16 + t * 2);
        if constexpr (bits == 3) {
            second_low = *reinterpret_cast<const uint16_t *>(at + 24 + t * 2);
            last_low = at[32 + t];
        }
        meta = *scales;
    }

    __device__ __forceinline__ void find_levels(uint32_t words[lane_words]) const
    {
        uint32_t even;
        uint32_t odd;
        if constexpr (bits + 1 == 4) {
            words[0] = levels_of<4>(first);
            words[1] = levels_of<4>(first >> 16);
        } else {
            codes_of<3>(first, first_low, &even, &odd);
            words[0] = levels_of<3>(even);
            words[1] = levels_of<3>(odd);
        }
        codes_of<bits>(second, second_low, &even, &odd);
        words[2] = levels_of<bits>(even);
        words[3] = levels_of<bits>(even >> 16);
        words[4] = levels_of<bits>(odd);
        words[5] = levels_of<bits>(odd >> 16);
        codes_of<bits>(last, last_low, &even, &odd);
        words[6] = levels_of<bits>(even);
        words[7] = levels_of<bits>(odd);
    }
};

/* -------------------------------------------------------------------------------------------------
 * Tiles
 */

/* A row, as a warp decodes its tiles. */
template <uint32_t bits> struct split_decoder {
    const struct kvf_gpu_tensor &tensor;
    const split_decode_shared &shared;
    const row_pages pages;
    const uint8_t *codes; /* of the first wanted vector */
    const uint32_t *meta;
    uint32_t n_wanted;
    bool is_aligned;
    lane_share<bits> shares[lane_vectors]; /* of the next tile */

    __device__ __forceinline__ uint32_t token_of(uint32_t first, uint32_t k) const
    {
        return first + k * 8 + lane_id() / 4;
    }

    __device__ __forceinline__ void load(uint32_t first)
    {
        if (first >= n_wanted) {
            return;
        }
#pragma unroll
        for (uint32_t k = 0; k < lane_vectors; k++) {
            uint32_t token = min(token_of(first, k), n_wanted - 1);
            shares[k].load(codes + token * lane_share<bits>::bytes, meta + token, lane_id() % 4);
        }
    }

    /* 16 bytes of the lane's vector k. */
    __device__ __forceinline__ void store(uint8_t *to, const uint32_t words[4]) const
    {
        if (is_aligned) {
            __stcs(reinterpret_cast<uint4 *>(to),
                   make_uint4(words[0], words[1], words[2], words[3]));
        } else {
            uint16_t *halves = reinterpret_cast<uint16_t *>(to);
#pragma unroll
            for (uint32_t w = 0; w < 4; w++) {
                halves[2 * w] = (uint16_t)words[w];
                halves[2 * w + 1] = (uint16_t)(words[w] >> 16);
            }
        }
    }

    /* Sums of eight channels, as they come from mma, to values of the lane's two. */
    __device__ __forceinline__ uint32_t finish(const int32_t sums[2], const uint4 &columns,
                                               const float factors[2]) const
    {
        float x[2];
#pragma unroll
        for (uint32_t e = 0; e < 2; e++) {
            uint32_t flags = e == 0 ? columns.y : columns.w;
            float factor = (flags & 1) != 0 ? factors[0] : factors[1];
            factor = __uint_as_float(__float_as_uint(factor) ^ (flags & 0x80000000));
            x[e] = __fmaf_rn(factor, __int_as_float(sums[e]) - round_magic,
                             __uint_as_float(e == 0 ? columns.x : columns.z));
        }
        return pack_bf16(x[0], x[1]);
    }

    /* A quarter of the channels of the tile. */
    __device__ __forceinline__ void decode_quarter(uint32_t i,
                                                   const uint32_t levels[lane_vectors][lane_words],
                                                   const float factors[lane_vectors][2],
                                                   uint8_t *const to[lane_vectors]) const
    {
        uint32_t t = lane_id() % 4;
        uint32_t words[lane_vectors][4];
#pragma unroll
        for (uint32_t product = 0; product < 4; product++) {
            int32_t sums[2][4];
#pragma unroll
            for (uint32_t k = 0; k < 8; k++) {
                sums[k / 4][k % 4] = __float_as_int(round_magic);
            }
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                const uint4 w = shared.matrix[i * 4 + product][half][lane_id()];
#pragma unroll
                for (uint32_t m = 0; m < 2; m++) {
                    const uint32_t *a = &levels[2 * m][4 * half];
                    const uint32_t *b = &levels[2 * m + 1][4 * half];
                    mma_s8(sums[m], a[0], b[0], a[1], b[1], w.x, w.y);
                    mma_s8(sums[m], a[2], b[2], a[3], b[3], w.z, w.w);
                }
            }
            const uint4 columns = *reinterpret_cast<const uint4 *>(
                &shared.columns[i * 32 + t * 8 + product * 2]);
#pragma unroll
            for (uint32_t k = 0; k < lane_vectors; k++) {
                words[k][product] = finish(&sums[k / 2][k % 2 * 2], columns, factors[k]);
            }
        }
#pragma unroll
        for (uint32_t k = 0; k < lane_vectors; k++) {
            if (to[k] != nullptr) {
                store(to[k] + i * 64 + t * 16, words[k]);
            }
        }
    }

    /* The tile that was loaded; asks for the next one. */
    __device__ __forceinline__ void decode_tile(uint32_t first, uint32_t next)
    {
        uint32_t levels[lane_vectors][lane_words];
        float factors[lane_vectors][2];
        uint8_t *to[lane_vectors];
#pragma unroll
        for (uint32_t k = 0; k < lane_vectors; k++) {
            shares[k].find_levels(levels[k]);
            uint32_t meta_word = shares[k].meta;
            factors[k][0] = f32_of_half_bits(meta_word & 0xffff) * tensor.rotations[0].factor;
            factors[k][1] = f32_of_half_bits(meta_word >> 16) * tensor.rotations[1].factor;
            uint32_t token = token_of(first, k);
            to[k] = token < n_wanted ? pages.vector(token) : nullptr;
        }
        load(next);
#pragma unroll 1
        for (uint32_t i = 0; i < 4; i++) {
            decode_quarter(i, levels, factors, to);
        }
    }
};

template <uint32_t bits>
static __device__ __forceinline__ void tq_decode_row_split(const struct kvf_gpu_work &work,
                                                           uint32_t tensors)
{
    __shared__ split_decode_shared shared;
    uint32_t n_rows = saw_rows_max(&work, tensors);
    uint32_t row = blockIdx.x % n_rows;
    const struct kvf_gpu_part part = parts_of(work)[blockIdx.x / n_rows];
    if (!tq_has_row(work, tensors, part, row)) {
        return;
    }
    const struct kvf_gpu_tensor &tensor = work.tensors[part.is_v];
    const tq_parts parts(tensor, part);
    const row_pages pages(work, part, tensor, row);
    uint32_t number = row * part.n_tokens + part.token_first;
    split_decoder<bits> decoder = {tensor,
                                   shared,
                                   pages,
                                   parts.saw.codes + number * lane_share<bits>::bytes,
                                   reinterpret_cast<const uint32_t *>(parts.meta) + number,
                                   part.n_wanted,
                                   pages.is_aligned(),
                                   {}};
    uint32_t first = warp_id() * warp_lanes;
    decoder.load(first);
    fill_columns<bits>(tensor, parts, row, &shared);
#pragma unroll 1
    for (; first < part.n_wanted; first += SAW_GENERIC_THREADS) {
        decoder.decode_tile(first, first + SAW_GENERIC_THREADS);
    }
}

} /* namespace kvf */

#endif /* KVF_CODEC_CODEC_TQ_SPLIT_DECODE_CUH */
