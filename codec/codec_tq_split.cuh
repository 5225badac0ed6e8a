/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_tq_split.cuh: tq of bf16 rows of 128 channels of which 32 have a rotation of their own: 32
 * by Sylvester's order 32, 96 by order 96 = 12 x 8. Numbers in comments are steps of codec_tq.h.
 *
 * A lane has a vector, and a warp a tile of 32, which lies in shared memory: which channels a
 * rotation takes is known at run time only, but the same for all lanes. Rows of a tile are a word
 * longer than they need be, so that lanes read from 32 banks. Coefficients are in registers; stored
 * positions are numbers that the compiler knows.
 */
#ifndef KVF_CODEC_CODEC_TQ_SPLIT_CUH
#define KVF_CODEC_CODEC_TQ_SPLIT_CUH

#include "codec/codec_tq_decode.cuh"
#include "codec/codec_tq_encode.cuh"
#include "codec/codec_tq_generic.cuh"

namespace kvf
{

constexpr uint32_t split_dim = 128;
constexpr uint32_t split_first = 32; /* channels of the first rotation */
constexpr uint32_t tile_words = split_dim / 2 + 1;
constexpr uint32_t split_warps = SAW_GENERIC_THREADS / warp_lanes;

/* A rotated channel: where it is in a vector, and what is done to it. */
struct __align__(16) split_channel
{
    uint32_t offset; /* bytes */
    float sign;
    float mean; /* encode: of the coefficient with this index; decode: of the channel */
    uint32_t reserved;
};

struct split_shared {
    tq_shared row; /* what the generic kernels prepare a row by */
    split_channel channels[split_dim];
    uint32_t signs[split_dim / 2];      /* masks, two channels each */
    uint32_t table[2][256];             /* encode: by m, as in codec_tq_encode.cuh */
    float levels[2][KVF_TQ_LEVELS_MAX]; /* decode: by code */
    uint32_t tiles[split_warps][warp_lanes * tile_words];
};

static_assert(sizeof(split_shared) <= KVF_TQ_SPLIT_SHARED_BYTES, "the host asks for it");

/* The coefficient at a stored position of n, 32 or 96: bits of the position, most significant
 * first, are bits 4, 3, 0, 1, 5, 2 of it, or without the 5; pieces are of 64 and 32. */
static constexpr __device__ uint32_t split_coefficient(uint32_t n, uint32_t position)
{
    if (n > 64 && position < 64) {
        return (position >> 5 & 1) << 4 | (position >> 4 & 1) << 3 | (position >> 3 & 1) |
               (position >> 2 & 1) << 1 | (position >> 1 & 1) << 5 | (position & 1) << 2;
    }
    uint32_t p = position % 32;
    return (n > 64 ? 64 : 0) + ((p >> 4 & 1) << 4 | (p >> 3 & 1) << 3 | (p >> 2 & 1) |
                                (p >> 1 & 1) << 1 | (p & 1) << 2);
}

static constexpr __device__ bool split_is_minus(uint32_t row, uint32_t column)
{
    constexpr uint32_t rows[12] = KVF_HADAMARD_12;
    return (rows[row] >> column & 1) != 0;
}

/* The butterflies along one bit of the index. */
template <uint32_t n, uint32_t bit>
static __device__ __forceinline__ void rotate_registers(float y[n])
{
#pragma unroll
    for (uint32_t i = 0; i < n; i++) {
        if ((i >> bit & 1) == 0) {
            butterfly(y[i], y[i + (1u << bit)]);
        }
    }
}

/* By 12, in ascending order. */
static __device__ __forceinline__ void rotate_12(float y[96])
{
#pragma unroll
    for (uint32_t b = 0; b < 8; b++) {
        float x[12];
#pragma unroll
        for (uint32_t a = 0; a < 12; a++) {
            x[a] = y[a * 8 + b];
        }
#pragma unroll
        for (uint32_t r = 0; r < 12; r++) {
            float sum = x[0];
#pragma unroll
            for (uint32_t a = 1; a < 12; a++) {
                sum = split_is_minus(r, a) ? sum - x[a] : sum + x[a];
            }
            y[r * 8 + b] = sum;
        }
    }
}

/* The transposed of it, over integers: exact in any order, so sums and differences of pairs are
 * made once for all. */
static __device__ __forceinline__ void rotate_12_back(float z[96])
{
#pragma unroll
    for (uint32_t b = 0; b < 8; b++) {
        float sums[6];
        float differences[6];
#pragma unroll
        for (uint32_t i = 0; i < 6; i++) {
            sums[i] = z[2 * i * 8 + b] + z[(2 * i + 1) * 8 + b];
            differences[i] = z[2 * i * 8 + b] - z[(2 * i + 1) * 8 + b];
        }
#pragma unroll
        for (uint32_t r = 0; r < 12; r++) {
            /* row 0 has no minus */
            float sum = split_is_minus(1, r) ? differences[0] : sums[0];
#pragma unroll
            for (uint32_t i = 1; i < 6; i++) {
                bool minus = split_is_minus(2 * i, r);
                float pair = minus == split_is_minus(2 * i + 1, r) ? sums[i] : differences[i];
                sum = minus ? sum - pair : sum + pair;
            }
            z[r * 8 + b] = sum;
        }
    }
}

/* y = H y and z = H^T z */
template <uint32_t n, bool inverse> static __device__ __forceinline__ void rotate_split(float y[n])
{
    rotate_registers<n, 0>(y);
    rotate_registers<n, 1>(y);
    if constexpr (n == split_first) {
        rotate_registers<n, 3>(y);
        rotate_registers<n, 4>(y);
    }
    rotate_registers<n, 2>(y);
    if constexpr (n != split_first && inverse) {
        rotate_12_back(y);
    } else if constexpr (n != split_first) {
        rotate_12(y);
    }
}

/* (5) The tree over 16 partial sums. */
static __device__ __forceinline__ float add_split_sums(float sums[KVF_TQ_PARTIAL_SUMS])
{
#pragma unroll
    for (uint32_t half = KVF_TQ_PARTIAL_SUMS / 2; half > 0; half /= 2) {
#pragma unroll
        for (uint32_t s = 0; s < half; s++) {
            sums[s] += sums[s + half];
        }
    }
    return sums[0];
}

/* -------------------------------------------------------------------------------------------------
 * Tiles
 */

/* Between pages and a tile of n tokens from `token` on, by a warp. */
template <bool to_pages>
static __device__ __forceinline__ void move_tile(const row_pages &pages, uint32_t *tile,
                                                 uint32_t token, uint32_t n)
{
    constexpr uint32_t batch = 4;
    uint32_t lane = lane_id();
    if (pages.is_aligned()) {
        for (uint32_t first = lane / 16; first < n; first += 2 * batch) {
            uint4 pieces[batch];
            if constexpr (!to_pages) {
#pragma unroll
                for (uint32_t k = 0; k < batch; k++) {
                    if (first + 2 * k < n) {
                        pieces[k] = *reinterpret_cast<const uint4 *>(
                            pages.vector(token + first + 2 * k) + lane % 16 * 16);
                    }
                }
            }
#pragma unroll
            for (uint32_t k = 0; k < batch; k++) {
                uint32_t *words = tile + (first + 2 * k) * tile_words + lane % 16 * 4;
                if (first + 2 * k < n && to_pages) {
                    __stcs(reinterpret_cast<uint4 *>(pages.vector(token + first + 2 * k) +
                                                     lane % 16 * 16),
                           make_uint4(words[0], words[1], words[2], words[3]));
                } else if (first + 2 * k < n) {
                    words[0] = pieces[k].x;
                    words[1] = pieces[k].y;
                    words[2] = pieces[k].z;
                    words[3] = pieces[k].w;
                }
            }
        }
    } else {
        for (uint32_t i = lane; i < n * split_dim; i += warp_lanes) {
            uint32_t v = i / split_dim;
            uint16_t *paged = reinterpret_cast<uint16_t *>(pages.vector(token + v)) + i % split_dim;
            uint16_t *half = reinterpret_cast<uint16_t *>(tile + v * tile_words) + i % split_dim;
            *(to_pages ? paged : half) = *(to_pages ? half : paged);
        }
    }
    __syncwarp();
}

/* Between n_words words of each lane, as they follow each other in memory, and shared memory. */
template <uint32_t n_words, bool to_memory>
static __device__ __forceinline__ void move_codes(uint32_t *memory, uint32_t *tile, uint32_t n)
{
    for (uint32_t i = lane_id(); i < n * n_words; i += warp_lanes) {
        *(to_memory ? memory + i : tile + i) = *(to_memory ? tile + i : memory + i);
    }
    __syncwarp();
}

/* -------------------------------------------------------------------------------------------------
 * Encode
 */

/* (6) By m: the level as bf16 in the upper half, and the code. By all threads. */
template <int bits> static __device__ __forceinline__ void fill_split_table(uint32_t *table)
{
    for (uint32_t m = threadIdx.x; m < KVF_TQ_TABLE_WORDS; m += blockDim.x) {
        uint32_t code = tq_code(bits, m);
        table[m] = __float_as_uint((float)tq_level(bits, code)) | code;
    }
}

/* (4) The channels of a rotation, y before it. */
template <uint32_t n>
static __device__ __forceinline__ void gather(const split_channel *channels, const uint32_t *vector,
                                              float y[n])
{
    const uint8_t *bytes = reinterpret_cast<const uint8_t *>(vector);
#pragma unroll
    for (uint32_t i = 0; i < n; i++) {
        uint32_t half = *reinterpret_cast<const uint16_t *>(bytes + channels[i].offset);
        y[i] = __uint_as_float(half << 16);
    }
}

/* (4 to 7) One rotation: planes to `words`; returns its scale. *is_escape is set if it does not
 * fit; if it is set before, codes are 0. */
template <uint32_t n, uint32_t bits>
static __device__ __forceinline__ uint32_t encode_split(const struct kvf_gpu_tensor &tensor,
                                                        const struct kvf_gpu_rotation &rotation,
                                                        const split_channel *channels,
                                                        const uint32_t *table,
                                                        const uint32_t *vector, bool is_centred,
                                                        bool *is_escape, uint32_t *words)
{
    constexpr uint32_t low_bits = saw_low_bits(bits);
    constexpr uint32_t high_bits = bits - low_bits;
    constexpr uint32_t run = n / KVF_TQ_PARTIAL_SUMS;
    float y[n];
    gather<n>(channels, vector, y);
    rotate_split<n, false>(y);
    if (is_centred) {
#pragma unroll
        for (uint32_t i = 0; i < n; i++) {
            y[i] -= channels[i].mean;
        }
    }
    float sums[KVF_TQ_PARTIAL_SUMS];
#pragma unroll
    for (uint32_t p = 0; p < n; p++) {
        float value = y[split_coefficient(n, p)];
        sums[p / run] = __fmaf_rn(value, value, p % run == 0 ? 0.0f : sums[p / run]);
    }
    float square = add_split_sums(sums);
    float root = __fsqrt_rn(square);
    *is_escape = *is_escape | !tq_fits(rotation, root);
    float f = tq_quantizer(rotation, root);
    f = *is_escape ? 0.0f : f;
    float middle = *is_escape ? 0.0f : 0.5f;
    float power = 0.0f;
#pragma unroll
    for (uint32_t p = 0; p < n; p++) {
        float value = y[split_coefficient(n, p)];
        uint32_t entry = table[tq_step(value, f, middle)];
        float level = __uint_as_float(entry & 0xffff0000);
        sums[p / run] = __fmaf_rn(value, level, p % run == 0 ? 0.0f : sums[p / run]);
        power = __fmaf_rn(level, level, power); /* exact in any order */
        uint32_t high = entry >> low_bits & ((1 << high_bits) - 1);
        uint32_t at = p * high_bits;
        words[at / 32] = (at % 32 == 0 ? 0 : words[at / 32]) | high << at % 32;
        if constexpr (low_bits != 0) {
            uint32_t *plane = words + n * high_bits / 32;
            plane[p / 32] = (p % 32 == 0 ? 0 : plane[p / 32]) | (entry & 1) << p % 32;
        }
    }
    return tq_choose_scale(tensor, rotation, square, add_split_sums(sums), power);
}

/* (1, 3) The lane's vector, flipped, in place. False: it is an escape. */
static __device__ __forceinline__ bool prepare_vector(const split_shared &shared, uint32_t *vector,
                                                      bool is_coded)
{
    uint32_t peak = 0;
#pragma unroll 16
    for (uint32_t w = 0; w < split_dim / 2; w++) {
        peak = max_magnitudes(peak, vector[w]);
    }
    peak = max_magnitudes(peak, permute_bytes(peak, 0, 0x1032)) & 0xffff;
    uint32_t threshold = keep_threshold(peak, is_coded);
#pragma unroll 16
    for (uint32_t w = 0; w < split_dim / 2; w++) {
        vector[w] = (vector[w] & not_below(vector[w], threshold)) ^ shared.signs[w];
    }
    return threshold != escape_threshold;
}

/* By all threads: what the lanes need to know of the row. */
static __device__ __forceinline__ void fill_split(const tq_row &at, split_shared *shared,
                                                  bool is_encode)
{
    const uint16_t *mean = reinterpret_cast<const uint16_t *>(at.saw.parts.mean) +
                           at.saw.row * split_dim;
    for (uint32_t i = threadIdx.x; i < split_dim; i += blockDim.x) {
        uint32_t channel = at.shared->channels[i];
        split_channel *to = &shared->channels[i];
        to->offset = channel * 2;
        to->sign = is_flipped(at.tensor(), at.saw.row, channel) ? -1.0f : 1.0f;
        to->mean = 0.0f;
        if (at.saw.parts.mean != nullptr) {
            to->mean = is_encode ? at.shared->saw.mean[i] : f32_of_half_bits(mean[channel]);
        }
        if (i < split_dim / 2) {
            shared->signs[i] = (is_flipped(at.tensor(), at.saw.row, 2 * i) ? 0x8000u : 0) |
                               (is_flipped(at.tensor(), at.saw.row, 2 * i + 1) ? 0x80000000u : 0);
        }
    }
    __syncthreads();
}

/* A warp's tile. */
template <uint32_t bits>
static __device__ __forceinline__ void encode_split_tile(const struct kvf_gpu_work &work,
                                                         const tq_row &at, split_shared *shared,
                                                         uint32_t token)
{
    constexpr uint32_t first_words = split_first * (bits + 1) / 32;
    constexpr uint32_t n_words = first_words + (split_dim - split_first) * bits / 32;
    const struct kvf_gpu_tensor &tensor = at.tensor();
    uint32_t n = min(warp_lanes, at.saw.part.n_tokens - token);
    uint32_t lane = lane_id();
    uint32_t *tile = shared->tiles[warp_id()];
    uint32_t *vector = tile + lane * tile_words;
    move_tile<false>(at.saw.pages, tile, token, n);
    bool is_centred = at.saw.parts.mean != nullptr;
    bool is_escape = !prepare_vector(*shared, vector, token + lane >= at.saw.part.n_sinks);
    uint32_t words[n_words];
    uint32_t first = encode_split<split_first, bits + 1>(tensor, tensor.rotations[0],
                                                         shared->channels, shared->table[0], vector,
                                                         is_centred, &is_escape, words);
    uint32_t second = encode_split<split_dim - split_first, bits>(
        tensor, tensor.rotations[1], shared->channels + split_first, shared->table[1], vector,
        is_centred, &is_escape, words + first_words);
    __syncwarp(); /* then the tile is for codes */
#pragma unroll
    for (uint32_t w = 0; w < n_words; w++) {
        tile[lane * n_words + w] = is_escape ? 0 : words[w];
    }
    __syncwarp();
    uint32_t number = at.saw.row * at.saw.part.n_tokens + token;
    move_codes<n_words, true>(reinterpret_cast<uint32_t *>(at.parts.saw.codes) + number * n_words,
                              tile, n);
    if (lane < n) {
        uint32_t meta = is_escape ? (uint32_t)KVF_SAW_ESCAPE_SCALE : first | second << 16;
        reinterpret_cast<uint32_t *>(at.parts.meta)[number + lane] = meta;
    }
    count_escapes(work, at.saw.part, is_escape && lane < n);
}

template <uint32_t bits>
static __device__ __forceinline__ void tq_encode_row_split(const struct kvf_gpu_work &work,
                                                           uint32_t tensors)
{
    KVF_SHARED_BYTES(shared_bytes);
    split_shared *shared = reinterpret_cast<split_shared *>(shared_bytes);
    uint32_t n_rows = saw_rows_max(&work, tensors);
    uint32_t row = blockIdx.x % n_rows;
    const struct kvf_gpu_part part = part_of(work, blockIdx.x / n_rows);
    if (!tq_has_row(work, tensors, part, row)) {
        return;
    }
    const tq_row at = tq_row_of(work, part, row, &shared->row);
    fill_split_table<bits + 1>(shared->table[0]);
    fill_split_table<bits>(shared->table[1]);
    tq_prepare_row(at);
    fill_split(at, shared, true);
#pragma unroll 1
    for (uint32_t token = warp_id() * warp_lanes; token < part.n_tokens;
         token += split_warps * warp_lanes) {
        encode_split_tile<bits>(work, at, shared, token);
        __syncwarp();
    }
}

/* -------------------------------------------------------------------------------------------------
 * Decode
 */

/* One rotation of the lane's vector: from planes to halves of the tile. */
template <uint32_t n, uint32_t bits>
static __device__ __forceinline__ void decode_split(const split_channel *channels,
                                                    const float *levels, const uint32_t *words,
                                                    float factor, uint32_t *vector)
{
    constexpr uint32_t low_bits = saw_low_bits(bits);
    constexpr uint32_t high_bits = bits - low_bits;
    uint8_t *bytes = reinterpret_cast<uint8_t *>(vector);
    float z[n];
#pragma unroll
    for (uint32_t p = 0; p < n; p++) {
        uint32_t at = p * high_bits;
        uint32_t code = words[at / 32] >> at % 32 & ((1 << high_bits) - 1);
        if constexpr (low_bits != 0) {
            code = code << 1 | (words[n * high_bits / 32 + p / 32] >> p % 32 & 1);
        }
        z[split_coefficient(n, p)] = levels[code];
    }
    rotate_split<n, true>(z);
#pragma unroll
    for (uint32_t i = 0; i < n; i += 2) {
        const split_channel a = channels[i];
        const split_channel b = channels[i + 1];
        uint32_t both = pack_bf16(__fmaf_rn(a.sign * factor, z[i], a.mean),
                                  __fmaf_rn(b.sign * factor, z[i + 1], b.mean));
        *reinterpret_cast<uint16_t *>(bytes + a.offset) = (uint16_t)both;
        *reinterpret_cast<uint16_t *>(bytes + b.offset) = (uint16_t)(both >> 16);
    }
}

template <uint32_t bits>
static __device__ __forceinline__ void decode_split_tile(const tq_row &at, split_shared *shared,
                                                         uint32_t token)
{
    constexpr uint32_t first_words = split_first * (bits + 1) / 32;
    constexpr uint32_t n_words = first_words + (split_dim - split_first) * bits / 32;
    const struct kvf_gpu_tensor &tensor = at.tensor();
    uint32_t n = min(warp_lanes, at.saw.part.n_wanted - token);
    uint32_t lane = lane_id();
    uint32_t *tile = shared->tiles[warp_id()];
    uint32_t number = at.saw.row * at.saw.part.n_tokens + at.saw.part.token_first + token;
    move_codes<n_words, false>(reinterpret_cast<uint32_t *>(at.parts.saw.codes) + number * n_words,
                               tile, n);
    uint32_t words[n_words];
#pragma unroll
    for (uint32_t w = 0; w < n_words; w++) {
        words[w] = tile[lane * n_words + w];
    }
    uint32_t meta = lane < n ? reinterpret_cast<uint32_t *>(at.parts.meta)[number + lane] : 0;
    __syncwarp(); /* then the tile is for values */
    uint32_t *vector = tile + lane * tile_words;
    decode_split<split_first, bits + 1>(
        shared->channels, shared->levels[0], words,
        f32_of_half_bits(meta & 0xffff) * tensor.rotations[0].factor, vector);
    decode_split<split_dim - split_first, bits>(
        shared->channels + split_first, shared->levels[1], words + first_words,
        f32_of_half_bits(meta >> 16) * tensor.rotations[1].factor, vector);
    __syncwarp();
    move_tile<true>(at.saw.pages, tile, token, n);
}

template <uint32_t bits>
static __device__ __forceinline__ void tq_decode_row_split(const struct kvf_gpu_work &work,
                                                           uint32_t tensors)
{
    KVF_SHARED_BYTES(shared_bytes);
    split_shared *shared = reinterpret_cast<split_shared *>(shared_bytes);
    uint32_t n_rows = saw_rows_max(&work, tensors);
    uint32_t row = blockIdx.x % n_rows;
    const struct kvf_gpu_part part = parts_of(work)[blockIdx.x / n_rows];
    if (!tq_has_row(work, tensors, part, row)) {
        return;
    }
    const tq_row at = tq_row_of(work, part, row, &shared->row);
    for (uint32_t i = threadIdx.x; i < 2 * KVF_TQ_LEVELS_MAX; i += blockDim.x) {
        uint32_t width = i < KVF_TQ_LEVELS_MAX ? bits + 1 : bits;
        shared->levels[i / KVF_TQ_LEVELS_MAX][i % KVF_TQ_LEVELS_MAX] = (float)tq_level(
            width, i % KVF_TQ_LEVELS_MAX);
    }
    read_channels(at);
    fill_split(at, shared, false);
#pragma unroll 1
    for (uint32_t token = warp_id() * warp_lanes; token < part.n_wanted;
         token += split_warps * warp_lanes) {
        decode_split_tile<bits>(at, shared, token);
        __syncwarp();
    }
}

} /* namespace kvf */

#endif /* KVF_CODEC_CODEC_TQ_SPLIT_CUH */
