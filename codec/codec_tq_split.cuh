/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_tq_split.cuh: encode by tq of bf16 rows of 128 channels of which 32 have a rotation of
 * their own: 32 by Sylvester's order 32, 96 by order 96 = 12 x 8. Numbers in comments are steps of
 * codec_tq.h.
 *
 * A lane has a vector, and a warp a tile of 32, which comes to shared memory in the order of the
 * rotations. Rows of a tile are a word longer than they need be, so that lanes read from 32 banks.
 * Coefficients are in registers; stored positions are numbers that the compiler knows.
 */
#ifndef KVF_CODEC_CODEC_TQ_SPLIT_CUH
#define KVF_CODEC_CODEC_TQ_SPLIT_CUH

#include "codec/codec_tq_encode.cuh"
#include "codec/codec_tq_generic.cuh"

namespace kvf
{

constexpr uint32_t split_dim = 128;
constexpr uint32_t split_first = 32; /* channels of the first rotation */
constexpr uint32_t tile_words = split_dim / 2 + 1;
constexpr uint32_t split_warps = SAW_GENERIC_THREADS / warp_lanes;

constexpr uint32_t split_samples = KVF_SAW_PARTIAL_SUMS * KVF_SAW_TILE_TOKENS;

struct split_shared {
    /* of a channel: where it is among those that are rotated, in bytes; coefficients of the mean */
    uint32_t places[split_dim];
    float means[split_dim];
    uint32_t signs[split_dim / 2];                                /* masks, two channels each */
    uint32_t tables[2][KVF_TQ_TABLE_WORDS * KVF_TQ_SPLIT_COPIES]; /* by m */
    uint4 list;
    float numbers[split_dim]; /* sums of magnitudes by channel, then a mean on its way */
    uint4 is_left_out[split_samples / 16];                /* bytes */
    uint32_t tiles[split_warps][warp_lanes * tile_words]; /* samples first */
};

static_assert(sizeof(split_shared) <= KVF_TQ_SPLIT_SHARED_BYTES, "the host asks for it");
static_assert(SAW_GENERIC_THREADS == split_dim, "a thread has one channel");

/* A row of a thread block. */
struct split_row {
    const struct kvf_gpu_tensor &tensor;
    const struct kvf_gpu_part &part;
    tq_parts parts;
    row_pages pages;
    uint32_t row;

    __device__ __forceinline__ split_row(const struct kvf_gpu_work &work,
                                         const struct kvf_gpu_part &part_, uint32_t row_)
        : tensor(work.tensors[part_.is_v]), part(part_), parts(tensor, part_),
          pages(work, part_, tensor, row_), row(row_)
    {
    }

    __device__ __forceinline__ bool is_centred() const
    {
        return parts.saw.mean != nullptr;
    }

    /* Stored, or the profile's. */
    __device__ __forceinline__ uint16_t *mean() const
    {
        return reinterpret_cast<uint16_t *>(parts.saw.mean) + row * split_dim;
    }

    __device__ __forceinline__ uint8_t *list() const
    {
        return parts.lists + row * (split_dim / 8);
    }
};

/* Where the rotations take a channel. A list that is wrong gives places that are some. */
struct split_place {
    bool is_first;
    uint32_t index; /* in its rotation */

    __device__ __forceinline__ split_place(const uint4 &list, uint32_t channel)
    {
        uint32_t word = channel < 32   ? list.x
                        : channel < 64 ? list.y
                        : channel < 96 ? list.z
                                       : list.w;
        uint32_t listed = __popc(word & ((1u << channel % 32) - 1));
        listed += channel >= 32 ? __popc(list.x) : 0;
        listed += channel >= 64 ? __popc(list.y) : 0;
        listed += channel >= 96 ? __popc(list.z) : 0;
        is_first = (word >> channel % 32 & 1) != 0;
        index = is_first ? min(listed, split_first - 1)
                         : min(channel - listed, split_dim - split_first - 1);
    }
};

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

/* y = H y */
template <uint32_t n> static __device__ __forceinline__ void rotate_split(float y[n])
{
    rotate_registers<n, 0>(y);
    rotate_registers<n, 1>(y);
    if constexpr (n == split_first) {
        rotate_registers<n, 3>(y);
        rotate_registers<n, 4>(y);
    }
    rotate_registers<n, 2>(y);
    if constexpr (n != split_first) {
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

/* A lane's share of a vector, to a tile: channels as they are, or to their places (in bytes). */
template <bool placed>
static __device__ __forceinline__ void put_piece(uint32_t *vector, const uint4 &piece,
                                                 const uint32_t places[8])
{
    const uint32_t pairs[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (uint32_t w = 0; w < 4; w++) {
        if constexpr (placed) {
            uint8_t *bytes = reinterpret_cast<uint8_t *>(vector);
            *reinterpret_cast<uint16_t *>(bytes + places[2 * w]) = (uint16_t)pairs[w];
            *reinterpret_cast<uint16_t *>(bytes + places[2 * w + 1]) = (uint16_t)(pairs[w] >> 16);
        } else {
            vector[lane_id() % 16 * 4 + w] = pairs[w];
        }
    }
}

/* From pages to a tile of n tokens, at most 32, from `token` on, by a warp. placed: channels to the
 * places that a row has for them. */
template <bool placed>
static __device__ __forceinline__ void load_tile(const row_pages &pages, const uint32_t *row_places,
                                                 uint32_t *tile, uint32_t token, uint32_t n)
{
    constexpr uint32_t batch = 4;
    uint32_t lane = lane_id();
    uint64_t from = 0; /* of the vector with the lane's number */
    if (lane < n) {
        from = reinterpret_cast<uint64_t>(pages.vector(token + lane));
    }
    if (pages.is_aligned()) {
        uint32_t places[8] = {};
#pragma unroll
        for (uint32_t i = 0; i < 8 && placed; i++) {
            places[i] = row_places[lane % 16 * 8 + i];
        }
#pragma unroll 1
        for (uint32_t first = 0; first < n; first += 2 * batch) {
            uint4 pieces[batch];
#pragma unroll
            for (uint32_t k = 0; k < batch; k++) {
                uint32_t v = first + 2 * k + lane / 16;
                uint64_t vector = of_lane(from, v);
                if (v < n) {
                    pieces[k] = *at_address<const uint4>(vector + lane % 16 * 16);
                }
            }
#pragma unroll
            for (uint32_t k = 0; k < batch; k++) {
                uint32_t v = first + 2 * k + lane / 16;
                if (v < n) {
                    put_piece<placed>(tile + v * tile_words, pieces[k], places);
                }
            }
        }
    } else {
#pragma unroll 1
        for (uint32_t v = 0; v < n; v++) {
            const uint16_t *vector = at_address<const uint16_t>(of_lane(from, v));
            uint16_t *halves = reinterpret_cast<uint16_t *>(tile + v * tile_words);
            for (uint32_t i = lane; i < split_dim; i += warp_lanes) {
                halves[placed ? row_places[i] / 2 : i] = vector[i];
            }
        }
    }
    __syncwarp();
}

/* n_words words of each lane, as they follow each other in memory, from shared memory. */
template <uint32_t n_words>
static __device__ __forceinline__ void store_words(uint32_t *memory, const uint32_t *tile,
                                                   uint32_t n)
{
    for (uint32_t i = lane_id(); i < n * n_words; i += warp_lanes) {
        memory[i] = tile[i];
    }
    __syncwarp();
}

/* -------------------------------------------------------------------------------------------------
 * Rows
 */

/* (2) By all threads: the samples to shared memory, and which of them are left out. */
static __device__ __forceinline__ void load_samples(const split_row &at, split_shared *shared)
{
    uint32_t n_tokens = at.part.n_tokens;
    uint32_t *samples = shared->tiles[0];
    uint8_t *left_out = reinterpret_cast<uint8_t *>(shared->is_left_out);
    for (uint32_t s = warp_id(); s < KVF_SAW_PARTIAL_SUMS; s += split_warps) {
        uint32_t token = sampled_token(n_tokens, s * KVF_SAW_TILE_TOKENS);
        uint32_t n = token < n_tokens ? min((uint32_t)KVF_SAW_TILE_TOKENS, n_tokens - token) : 0;
        uint32_t *tile = samples + s * KVF_SAW_TILE_TOKENS * tile_words;
        load_tile<false>(at.pages, nullptr, tile, token, n);
        uint32_t g = lane_id() / 4;
        uint32_t peak = 0;
#pragma unroll
        for (uint32_t w = 0; w < split_dim / 8 && g < n; w++) {
            peak = max_magnitudes(peak, tile[g * tile_words + lane_id() % 4 * (split_dim / 8) + w]);
        }
        uint32_t threshold = keep_threshold(find_peak(peak), token + g >= at.part.n_sinks);
        if (lane_id() % 4 == 0) {
            left_out[s * KVF_SAW_TILE_TOKENS + g] = g >= n || threshold == escape_threshold;
        }
    }
    __syncthreads();
}

/* (2) Over the samples that are not left out, of the thread's channel: partial sums of f(x), added.
 */
template <typename F>
static __device__ __forceinline__ float sum_split_samples(const split_shared *shared,
                                                          uint32_t *count_out, F f)
{
    const uint16_t *halves = reinterpret_cast<const uint16_t *>(shared->tiles[0]) + threadIdx.x;
    float sums[KVF_SAW_PARTIAL_SUMS] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    uint32_t count = split_samples;
    uint32_t any = 0;
#pragma unroll
    for (uint32_t i = 0; i < split_samples / 16; i++) {
        const uint4 flags = shared->is_left_out[i];
        any |= flags.x | flags.y | flags.z | flags.w;
    }
    if (any == 0) {
#pragma unroll
        for (uint32_t i = 0; i < split_samples; i++) {
            uint32_t half = halves[i * (2 * tile_words)];
            sums[i / KVF_SAW_TILE_TOKENS] += f(__uint_as_float(half << 16));
        }
    } else {
        const uint8_t *left_out = reinterpret_cast<const uint8_t *>(shared->is_left_out);
        count = 0;
#pragma unroll
        for (uint32_t s = 0; s < KVF_SAW_PARTIAL_SUMS; s++) {
#pragma unroll 1
            for (uint32_t k = 0; k < KVF_SAW_TILE_TOKENS; k++) {
                uint32_t i = s * KVF_SAW_TILE_TOKENS + k;
                uint32_t half = halves[i * (2 * tile_words)];
                if (left_out[i] == 0) {
                    sums[s] += f(__uint_as_float(half << 16));
                    count++;
                }
            }
        }
    }
    *count_out = count;
    return ((sums[0] + sums[4]) + (sums[2] + sums[6])) +
           ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

/* How many of 32 numbers are not less than the lane's; in_order: than those before it, of those
 * alike. */
template <bool in_order>
static __device__ __forceinline__ uint32_t count_larger(const float *numbers, uint32_t least)
{
    uint32_t larger = 0;
#pragma unroll
    for (uint32_t i = 0; i < warp_lanes; i += 4) {
        const uint4 four = *reinterpret_cast<const uint4 *>(numbers + i);
        const uint32_t others[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            larger += others[k] >= least + (in_order && i + k >= lane_id() ? 1 : 0);
        }
    }
    return larger;
}

/* By all threads: the channels with the largest magnitudes about the mean, of which each has its
 * own, to the list. Numbers that are not negative are in the order of their bits; of those alike
 * the lower channel is first. */
static __device__ __forceinline__ void choose_channels(float mean, split_shared *shared)
{
    uint32_t count;
    float energy = sum_split_samples(shared, &count, [&](float x) { return fabsf(x - mean); });
    shared->numbers[threadIdx.x] = energy;
    __syncthreads();
    uint32_t least = __float_as_uint(energy);
    uint32_t larger = count_larger<true>(&shared->numbers[warp_id() * warp_lanes], least);
#pragma unroll 1
    for (uint32_t i = 1; i < split_warps; i++) {
        uint32_t warp = (warp_id() + i) % split_warps;
        larger += count_larger<false>(&shared->numbers[warp * warp_lanes],
                                      least + (warp > warp_id() ? 1 : 0));
    }
    uint32_t word = __ballot_sync(all_lanes, larger < split_first);
    if (lane_id() == 0) {
        reinterpret_cast<uint32_t *>(&shared->list)[warp_id()] = word;
    }
    __syncthreads();
}

/* (4) By all threads: the mean through the rotations, to the places of the channels. */
static __device__ __forceinline__ void rotate_split_mean(const split_row &at, split_shared *shared,
                                                         const split_place &place, float mean)
{
    uint32_t i = threadIdx.x;
    uint32_t to = place.is_first ? place.index : split_first + place.index;
    shared->numbers[to] = is_flipped(at.tensor, at.row, i) ? -mean : mean;
    __syncthreads();
    float y[1] = {shared->numbers[i]};
    rotate_bit<1, 0>(y);
    rotate_bit<1, 1>(y);
    if (i < split_first) {
        rotate_bit<1, 3>(y);
        rotate_bit<1, 4>(y);
    }
    rotate_bit<1, 2>(y);
    if (i >= split_first) {
        shared->numbers[i] = y[0];
    }
    __syncthreads();
    if (i >= split_first) {
        const float *column = &shared->numbers[split_first + i % 8];
        uint32_t minus = rotate_rows_12[(i - split_first) / 8];
        y[0] = column[0];
#pragma unroll
        for (uint32_t a = 1; a < 12; a++) {
            y[0] = (minus >> a & 1) != 0 ? y[0] - column[a * 8] : y[0] + column[a * 8];
        }
    }
    shared->means[i] = y[0];
}

/* By all threads: gaps, mean and list of the row, and what lanes need to know of it. */
static __device__ __forceinline__ void prepare_split(const split_row &at, split_shared *shared)
{
    uint32_t i = threadIdx.x;
    bool is_given = at.part.split != 0;
    bool makes_mean = at.parts.saw.mean_bytes != 0;
    if (at.row == 0) {
        tq_zero_gaps(at.tensor, at.parts, at.part.stored, i, SAW_GENERIC_THREADS);
    }
    if (makes_mean || !is_given) {
        load_samples(at, shared);
    }
    float mean = 0.0f;
    if (makes_mean) {
        uint32_t count;
        float sum = sum_split_samples(shared, &count, [](float x) { return x; });
        uint32_t half = mean_half_bits(sum, count);
        at.mean()[i] = (uint16_t)half;
        mean = f32_of_half_bits(half);
    } else if (at.is_centred()) {
        mean = f32_of_half_bits(at.mean()[i]);
    }
    if (!is_given) {
        choose_channels(mean, shared);
    } else if (i < split_dim / 8) {
        reinterpret_cast<uint8_t *>(&shared->list)[i] = at_address<const uint8_t>(
            at.part.split)[at.row * (split_dim / 8) + i];
    }
    __syncthreads();
    if (i < split_dim / 8) {
        at.list()[i] = reinterpret_cast<const uint8_t *>(&shared->list)[i];
    }
    const split_place place(shared->list, i);
    uint32_t to = place.is_first ? place.index : split_first + place.index;
    shared->places[i] = to * 2;
    reinterpret_cast<uint16_t *>(shared->signs)[to] = is_flipped(at.tensor, at.row, i) ? 0x8000 : 0;
    if (at.is_centred()) {
        rotate_split_mean(at, shared, place, mean);
    }
    __syncthreads();
}

/* -------------------------------------------------------------------------------------------------
 * Encode
 */

/* (6) By all threads; some lanes share a copy of the table. */
template <int bits> static __device__ __forceinline__ void fill_split_table(uint32_t *table)
{
    constexpr uint32_t copies = KVF_TQ_SPLIT_COPIES;
    for (uint32_t m = threadIdx.x; m < KVF_TQ_TABLE_WORDS; m += SAW_GENERIC_THREADS) {
        uint32_t entry = level_entry<bits>(m);
#pragma unroll 4
        for (uint32_t k = 0; k < copies; k++) {
            table[m * copies + (m / (warp_lanes / copies) + k) % copies] = entry;
        }
    }
}

/* (4 to 7) One rotation: planes to `words`; returns its scale. *is_escape is set if it does not
 * fit; if it is set before, codes are 0. */
template <uint32_t n, uint32_t bits>
static __device__ __forceinline__ uint32_t encode_split(const struct kvf_gpu_tensor &tensor,
                                                        const struct kvf_gpu_rotation &rotation,
                                                        const float *means, const uint32_t *table,
                                                        const uint32_t *pairs, bool is_centred,
                                                        bool *is_escape, uint32_t *words)
{
    constexpr uint32_t low_bits = saw_low_bits(bits);
    constexpr uint32_t high_bits = bits - low_bits;
    constexpr uint32_t run = n / KVF_TQ_PARTIAL_SUMS;
    float y[n];
#pragma unroll
    for (uint32_t i = 0; i < n; i += 2) {
        y[i] = __uint_as_float(pairs[i / 2] << 16);
        y[i + 1] = __uint_as_float(pairs[i / 2] & 0xffff0000);
    }
    rotate_split<n>(y);
    if (is_centred) {
#pragma unroll
        for (uint32_t i = 0; i < n; i++) {
            y[i] -= means[i];
        }
    }
    float sums[KVF_TQ_PARTIAL_SUMS];
#pragma unroll
    for (uint32_t p = 0; p < n; p++) {
        float value = y[split_coefficient(n, p)];
        sums[p / run] = __fmaf_rn(value, value, p % run == 0 ? 0.0f : sums[p / run]);
    }
    float square = add_split_sums(sums);
    float root = tq_root(square);
    *is_escape = *is_escape | !tq_fits(rotation, root);
    float f = tq_quantizer(rotation, root);
    f = *is_escape ? 0.0f : f;
    float middle = *is_escape ? 0.0f : 0.5f;
    float power = 0.0f;
    uint32_t lane_at = shared_address(table) + lane_id() % KVF_TQ_SPLIT_COPIES * 4;
#pragma unroll
    for (uint32_t first = 0; first < n; first += 32) {
        uint32_t entries[32];
#pragma unroll
        for (uint32_t i = 0; i < 32; i++) {
            uint32_t p = first + i;
            float value = y[split_coefficient(n, p)];
            entries[i] = load_shared(lane_at +
                                     tq_step(value, f, middle) * (KVF_TQ_SPLIT_COPIES * 4));
            float level = __uint_as_float(entries[i] & 0xffff0000);
            sums[p / run] = __fmaf_rn(value, level, p % run == 0 ? 0.0f : sums[p / run]);
            power = __fmaf_rn(level, level, power); /* exact in any order */
        }
        uint32_t joined[bits];
        join_codes<bits>(entries, joined);
#pragma unroll
        for (uint32_t w = 0; w < high_bits; w++) {
            words[first / 32 * high_bits + w] = joined[w];
        }
        if constexpr (low_bits != 0) {
            words[n / 32 * high_bits + first / 32] = joined[high_bits];
        }
    }
    return tq_choose_scale(tensor, rotation, square, add_split_sums(sums), power);
}

/* (1, 3) The lane's vector, flipped. False: it is an escape. */
static __device__ __forceinline__ bool take_vector(const split_shared &shared,
                                                   const uint32_t *vector, bool is_coded,
                                                   uint32_t pairs[split_dim / 2])
{
    uint32_t peak = 0;
    uint32_t other = 0;
#pragma unroll
    for (uint32_t w = 0; w < split_dim / 2; w += 2) {
        pairs[w] = vector[w];
        pairs[w + 1] = vector[w + 1];
        peak = max_magnitudes(peak, pairs[w]);
        other = max_magnitudes(other, pairs[w + 1]);
    }
    peak = max_magnitudes(peak, other);
    peak = max_magnitudes(peak, permute_bytes(peak, 0, 0x1032)) & 0xffff;
    uint32_t threshold = keep_threshold(peak, is_coded);
#pragma unroll
    for (uint32_t w = 0; w < split_dim / 2; w++) {
        pairs[w] = (pairs[w] & not_below(pairs[w], threshold)) ^ shared.signs[w];
    }
    return threshold != escape_threshold;
}

/* A lane's vector of a tile to come: a warp has no registers to load it ahead. */
static __device__ __forceinline__ void prefetch_vector(const split_row &at, uint32_t token)
{
    if (token < at.part.n_tokens) {
        const uint8_t *vector = at.pages.vector(token);
        prefetch(vector);
        prefetch(vector + split_dim);
    }
}

/* A warp's tile. */
template <uint32_t bits>
static __device__ __forceinline__ void encode_split_tile(const struct kvf_gpu_work &work,
                                                         const split_row &at, split_shared *shared,
                                                         uint32_t token)
{
    constexpr uint32_t first_words = split_first * (bits + 1) / 32;
    constexpr uint32_t n_words = first_words + (split_dim - split_first) * bits / 32;
    const struct kvf_gpu_tensor &tensor = at.tensor;
    uint32_t n = min(warp_lanes, at.part.n_tokens - token);
    uint32_t lane = lane_id();
    uint32_t *tile = shared->tiles[warp_id()];
    load_tile<true>(at.pages, shared->places, tile, token, n);
    bool is_centred = at.is_centred();
    uint32_t pairs[split_dim / 2];
    bool is_escape = !take_vector(*shared, tile + lane * tile_words,
                                  token + lane >= at.part.n_sinks, pairs);
    uint32_t words[n_words];
    uint32_t first = encode_split<split_first, bits + 1>(tensor, tensor.rotations[0], shared->means,
                                                         shared->tables[0], pairs, is_centred,
                                                         &is_escape, words);
    uint32_t second = encode_split<split_dim - split_first, bits>(
        tensor, tensor.rotations[1], shared->means + split_first, shared->tables[1],
        pairs + split_first / 2, is_centred, &is_escape, words + first_words);
    __syncwarp(); /* then the tile is for codes */
#pragma unroll
    for (uint32_t w = 0; w < n_words; w++) {
        tile[lane * n_words + w] = is_escape ? 0 : words[w];
    }
    __syncwarp();
    uint32_t number = at.row * at.part.n_tokens + token;
    store_words<n_words>(reinterpret_cast<uint32_t *>(at.parts.saw.codes) + number * n_words, tile,
                         n);
    if (lane < n) {
        uint32_t meta = is_escape ? (uint32_t)KVF_SAW_ESCAPE_SCALE : first | second << 16;
        reinterpret_cast<uint32_t *>(at.parts.meta)[number + lane] = meta;
    }
    count_escapes(work, at.part, is_escape && lane < n);
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
    const split_row at(work, part, row);
    prefetch_vector(at, threadIdx.x);
    fill_split_table<bits + 1>(shared->tables[0]);
    fill_split_table<bits>(shared->tables[1]);
    prepare_split(at, shared);
#pragma unroll 1
    for (uint32_t token = warp_id() * warp_lanes; token < part.n_tokens;
         token += split_warps * warp_lanes) {
        prefetch_vector(at, token + split_warps * warp_lanes + lane_id());
        encode_split_tile<bits>(work, at, shared, token);
        __syncwarp();
    }
}

} /* namespace kvf */

#endif /* KVF_CODEC_CODEC_TQ_SPLIT_CUH */
