/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_closed_loop_encode.cuh: layers of X to codes of differences to what a reader has. Numbers
 * in comments are steps of codec_saw.h.
 */
#ifndef KVF_CODEC_CODEC_CLOSED_LOOP_ENCODE_CUH
#define KVF_CODEC_CODEC_CLOSED_LOOP_ENCODE_CUH

#include "codec/codec_closed_loop_device.cuh"

namespace kvf
{

/* (S) of one ratio. */
struct loop_cost {
    float a;
    float step;
};

template <bool fast> struct loop_encode_shared {
    loop_room<fast> rooms[loop_warps];
    loop_cost costs[2][KVF_GPU_CLIPS_MAX]; /* of layers by themselves, of deltas */
    uint8_t zeros[2][LOOP_TILE_TOKENS];    /* of this layer, and of the one before it */
};

/* One vector of a layer that is being encoded. */
template <bool fast> struct loop_vector {
    const struct kvf_gpu_tensor &tensor;
    const loop_cost *costs; /* in shared memory */
    float y[loop_lanes<fast>::n];
    generic_range range;
};

template <typename T, typename F> static __device__ __forceinline__ T over_lanes(T value, F f)
{
#pragma unroll
    for (uint32_t by = 1; by < warp_lanes; by *= 2) {
        value = f(value, __shfl_xor_sync(all_lanes, value, by));
    }
    return value;
}

/* (1, 3) x becomes what is coded, not flipped; zeroes if it is an escape, which is returned. */
template <bool fast>
static __device__ __forceinline__ bool
loop_prepare(const struct kvf_gpu_tensor &tensor, bool is_sink, bool is_delta,
             const float state[loop_lanes<fast>::n], float x[loop_lanes<fast>::n])
{
    uint32_t peak = 0;
#pragma unroll
    for (uint32_t j = 0; j < loop_lanes<fast>::n; j++) {
        x[j] = is_delta ? x[j] - state[j] : x[j];
        uint32_t bits = __float_as_uint(x[j]) & 0x7fffffff;
        peak = bits > peak ? bits : peak;
    }
    peak = __reduce_max_sync(all_lanes, peak);
    bool is_escape = is_sink || peak >= (uint32_t)KVF_SAW_ESCAPE_EXPONENT << 23;
    uint32_t exponent = peak >> 23;
    uint32_t smallest = 0;
    if (tensor.dtype == KVF_DTYPE_BF16 && !is_delta && exponent > KVF_SAW_DROP_BINADES) {
        smallest = (exponent - KVF_SAW_DROP_BINADES) << 23;
    }
#pragma unroll
    for (uint32_t j = 0; j < loop_lanes<fast>::n; j++) {
        bool kept = !is_escape && (__float_as_uint(x[j]) & 0x7fffffff) >= smallest;
        x[j] = kept ? x[j] : 0.0f;
    }
    return is_escape;
}

/* (4, 5) */
template <bool fast>
static __device__ __forceinline__ void loop_measure(loop_vector<fast> &at, loop_room<fast> &room,
                                                    uint32_t flips)
{
#pragma unroll
    for (uint32_t j = 0; j < loop_lanes<fast>::n; j++) {
        at.y[j] = (flips >> j & 1) != 0 ? -at.y[j] : at.y[j];
    }
    loop_forward<fast>(at.tensor, room, at.y);
    float min = has_zeros(at.tensor) ? 0.0f : __int_as_float(0x7f800000);
    float max = has_zeros(at.tensor) ? 0.0f : __int_as_float(0xff800000);
#pragma unroll
    for (uint32_t j = 0; j < loop_lanes<fast>::n; j++) {
        if (loop_lanes<fast>::has(at.tensor, j)) {
            min = fminf(min, at.y[j]);
            max = fmaxf(max, at.y[j]);
        }
    }
    at.range.min = over_lanes(min, [](float a, float b) { return fminf(a, b); });
    at.range.max = over_lanes(max, [](float a, float b) { return fmaxf(a, b); });
}

/* (S) What the vector costs with ratio k; factor: of the first one, times 16. */
template <bool fast>
static __device__ __forceinline__ uint32_t loop_cost_of(const loop_vector<fast> &at, uint32_t k,
                                                        float factor, float w)
{
    const loop_cost by = at.costs[k];
    float middle = 0.5f * (at.range.min + at.range.max);
    float last = (float)((1 << (at.tensor.bits - 1)) - 1);
    uint32_t cost = 0;
#pragma unroll
    for (uint32_t j = 0; j < loop_lanes<fast>::n; j++) {
        float level;
        float error;
        if (has_zeros(at.tensor)) {
            float steps = __fmaf_rn(at.y[j], factor, round_magic) - round_magic;
            level = __fmaf_rn(steps, by.a, w) + round_magic - round_magic;
            level = fminf(fmaxf(level, 0.0f), at.range.levels);
            error = __fmaf_rn(-(level - w), by.step, steps);
        } else {
            float steps = __fmaf_rn(fabsf(at.y[j] - middle), factor, round_magic) - round_magic;
            level = fminf(__fmaf_rn(steps, by.a, -0.5f) + round_magic - round_magic, last);
            error = __fmaf_rn(-(level + 0.5f), by.step, steps);
        }
        uint32_t one = __float_as_uint(__fmaf_rn(error, error, round_magic)) -
                       __float_as_uint(round_magic);
        cost += loop_lanes<fast>::has(at.tensor, j) ? one : 0;
    }
    return __reduce_add_sync(all_lanes, cost);
}

/* (S) Lanes try a ratio each; of those that make no escape the best one's scale, in every lane. */
template <bool fast>
static __device__ __forceinline__ saw_scale loop_choose(const loop_vector<fast> &at)
{
    constexpr uint32_t escape_meta = (uint32_t)KVF_SAW_ESCAPE_SCALE << 16;
    uint32_t n_clips = at.tensor.n_clips;
    if (n_clips == 0) {
        return scale_of(at.tensor, at.range, at.tensor.clip_ratio).scale;
    }
    uint32_t own = lane_id() < n_clips ? lane_id() : n_clips - 1;
    const generic_scale tried = scale_of(at.tensor, at.range, at.tensor.clip_ratios[own]);
    uint32_t coded = __ballot_sync(all_lanes, tried.scale.meta != escape_meta);
    float factor = 16.0f * __shfl_sync(all_lanes, tried.scale.factor, 0);
    uint32_t least = 0xffffffff;
    uint32_t best = 0;
    for (uint32_t k = 0; k < n_clips; k++) {
        uint32_t cost = loop_cost_of<fast>(at, k, factor, __shfl_sync(all_lanes, tried.w, k));
        if ((coded >> k & 1) != 0 && cost < least) {
            least = cost;
            best = k;
        }
    }
    saw_scale scale = {__shfl_sync(all_lanes, tried.scale.meta, best),
                       __shfl_sync(all_lanes, tried.scale.offset, best),
                       __shfl_sync(all_lanes, tried.scale.factor, best)};
    if (least == 0xffffffff) {
        scale = {escape_meta, 0.0f, 0.0f};
    }
    return scale;
}

/* (7) The lane's codes, which go to the strip. */
template <bool fast>
static __device__ __forceinline__ void
loop_store_codes(const loop_vector<fast> &at, const saw_scale &scale, loop_room<fast> &room,
                 int32_t codes[loop_lanes<fast>::n], uint8_t *to)
{
#pragma unroll
    for (uint32_t j = 0; j < loop_lanes<fast>::n; j++) {
        codes[j] = (int32_t)(__float_as_uint(code_of(scale, at.y[j], at.range.levels)) & 0xff);
    }
    if constexpr (fast) {
        loop_store_codes_fast(at.tensor.bits, room, codes, to);
    } else {
        for (uint32_t j = 0; j < loop_lanes<fast>::n; j++) {
            if (loop_lanes<fast>::has(at.tensor, j)) {
                room.codes[loop_lanes<fast>::index(j)] = (uint8_t)codes[j];
            }
        }
        __syncwarp();
        pack_codes(room.codes, at.tensor.order, at.tensor.group, at.tensor.bits, to);
        __syncwarp();
    }
}

/* Zeros of a tile, by one warp: the bytes that its tokens have in a plane. */
static __device__ void loop_pack_zeros(const uint8_t *zeros, uint32_t n_tokens, uint32_t tile,
                                       uint32_t plane_bits, uint32_t shift, uint8_t *to)
{
    uint32_t byte = tile * plane_bits + lane_id();
    uint32_t a_byte = 8 / plane_bits;
    if (lane_id() < plane_bits && byte < (n_tokens * plane_bits + 7) / 8) {
        uint32_t packed = 0;
        for (uint32_t i = 0; i < a_byte; i++) {
            uint32_t at = lane_id() * a_byte + i;
            bool is_there = tile * LOOP_TILE_TOKENS + at < n_tokens;
            uint32_t zero = is_there ? zeros[at] : 0;
            packed |= (zero >> shift & ((1u << plane_bits) - 1)) << i * plane_bits;
        }
        to[byte] = (uint8_t)packed;
    }
}

/* (S) By all threads. */
template <bool fast>
static __device__ void loop_fill_costs(const struct kvf_gpu_work &work,
                                       loop_encode_shared<fast> &shared)
{
    for (uint32_t i = threadIdx.x; i < 2 * KVF_GPU_CLIPS_MAX; i += LOOP_THREADS) {
        const struct kvf_gpu_tensor &tensor = work.tensors[i / KVF_GPU_CLIPS_MAX];
        uint32_t k = i % KVF_GPU_CLIPS_MAX;
        if (k < tensor.n_clips) {
            const saw_costs of(tensor.clip_ratios[0], tensor.clip_ratios[k], tensor.bits);
            shared.costs[i / KVF_GPU_CLIPS_MAX][k] = {of.a, of.step};
        }
    }
    __syncthreads();
}

/* What a thread block works on. */
struct loop_place {
    uint32_t block;
    uint32_t row;
    uint32_t tile;
    uint32_t n_layers; /* of each block */

    __device__ __forceinline__ explicit loop_place(const struct kvf_gpu_work &work)
    {
        uint32_t n_tiles = ceil_div(work.tokens_max, LOOP_TILE_TOKENS);
        uint32_t n_rows = work.tensors[0].n_rows;
        tile = blockIdx.x % n_tiles;
        row = blockIdx.x / n_tiles % n_rows;
        block = blockIdx.x / n_tiles / n_rows;
        n_layers = work.n_parts / work.n_blocks;
    }
};

/* Where a vector lies in the pages of any layer, from their beginning on. */
static __device__ __forceinline__ uint64_t loop_offset(const struct kvf_gpu_work &work,
                                                       const struct kvf_gpu_part &part,
                                                       uint32_t row, uint32_t token)
{
    const row_pages pages(work, part, work.tensors[0], row);
    return (uint64_t)(pages.vector(token) - at_address<uint8_t>(part.base));
}

/* One layer of a warp's vector. Returns its zero, or 0. */
template <bool fast>
static __device__ __forceinline__ uint32_t loop_encode_layer(const struct kvf_gpu_work &work,
                                                             const struct kvf_gpu_part &part,
                                                             loop_encode_shared<fast> &shared,
                                                             uint32_t row, uint32_t token,
                                                             uint64_t offset, uint32_t flips,
                                                             float state[loop_lanes<fast>::n])
{
    bool is_delta = (part.loop & KVF_GPU_LOOP_DELTA) != 0;
    const struct kvf_gpu_tensor &tensor = work.tensors[is_delta];
    const saw_parts parts(tensor, part);
    loop_room<fast> &room = shared.rooms[warp_id()];
    uint32_t vector = row * part.n_tokens + token;
    loop_vector<fast> at = {tensor, shared.costs[is_delta], {0.0f}, {}};
    int32_t codes[loop_lanes<fast>::n];
    loop_load<fast>(tensor, at_address<const uint8_t>(part.base + offset), at.y);
    at.range.levels = (float)((1 << tensor.bits) - 1);
    at.range.levels_inverse = __fdiv_rn(1.0f, at.range.levels);
    at.range.is_escape = loop_prepare<fast>(tensor, token < part.n_sinks, is_delta, state, at.y);
    loop_measure<fast>(at, room, flips);
    const saw_scale scale = loop_choose<fast>(at);
    loop_store_codes<fast>(at, scale, room, codes,
                           parts.codes + vector * (uint32_t)tensor.code_bytes);
    if (lane_id() == 0) {
        if (has_zeros(tensor)) {
            parts.scales()[vector] = (uint16_t)(scale.meta >> 16);
        } else {
            parts.meta[vector] = scale.meta;
        }
    }
    bool is_escape = scale.meta == (uint32_t)KVF_SAW_ESCAPE_SCALE << 16;
    count_escapes(work, part, is_escape && lane_id() == 0);
    loop_inverse<fast>(tensor, room, codes);
    loop_take<fast>(tensor, loop_stored(tensor, scale.meta >> 16, scale.meta & 0xffff), flips,
                    is_delta, codes, state);
    return scale.meta & 0xff;
}

/* By one warp, when all of the tile have been there. */
static __device__ void loop_zeros_of(const struct kvf_gpu_work &work,
                                     const struct kvf_gpu_part &part, const uint8_t *zeros,
                                     uint32_t row, uint32_t tile)
{
    const struct kvf_gpu_tensor &tensor = work.tensors[(part.loop & KVF_GPU_LOOP_DELTA) != 0];
    if (!has_zeros(tensor)) {
        return;
    }
    const saw_parts parts(tensor, part);
    uint32_t n = part.n_tokens;
    uint32_t low_bits = saw_low_bits(tensor.bits);
    uint32_t plane_bits = tensor.bits - low_bits;
    uint8_t *to = parts.zeros(tensor, row, n);
    loop_pack_zeros(zeros, n, tile, plane_bits, low_bits, to);
    if (low_bits != 0) {
        loop_pack_zeros(zeros, n, tile, low_bits, 0, to + (n * plane_bits + 7) / 8);
    }
}

template <bool fast> static __device__ void loop_encode(const struct kvf_gpu_work &work)
{
    __shared__ loop_encode_shared<fast> shared;
    const loop_place place(work);
    const struct kvf_gpu_part first = part_of(work, place.block * place.n_layers);
    uint32_t n_tokens = first.n_tokens;
    uint32_t token = place.tile * LOOP_TILE_TOKENS + warp_id();
    if (place.tile * LOOP_TILE_TOKENS >= n_tokens) {
        return;
    }
    loop_fill_costs<fast>(work, shared);
    bool is_there = token < n_tokens;
    uint64_t offset = loop_offset(work, first, place.row, is_there ? token : 0);
    uint32_t flips[2] = {loop_flips<fast>(work.tensors[0], place.row),
                         loop_flips<fast>(work.tensors[1], place.row)};
    float state[loop_lanes<fast>::n] = {0.0f};
    if (is_there && first.sums != 0 && (first.loop & KVF_GPU_LOOP_DELTA) != 0) {
        loop_get<fast>(work.tensors[0], first.sums, place.row, token, state);
    }
    for (uint32_t layer = 0; layer < place.n_layers; layer++) {
        const struct kvf_gpu_part part = part_of(work, place.block * place.n_layers + layer);
        bool is_delta = (part.loop & KVF_GPU_LOOP_DELTA) != 0;
        if (is_there) {
            uint32_t zero = loop_encode_layer<fast>(work, part, shared, place.row, token, offset,
                                                    is_delta ? flips[1] : flips[0], state);
            if (lane_id() == 0) {
                shared.zeros[layer % 2][warp_id()] = (uint8_t)zero;
            }
        }
        /* the other layer's zeros may be read until all have been here again */
        __syncthreads();
        if (warp_id() == layer % loop_warps) {
            loop_zeros_of(work, part, shared.zeros[layer % 2], place.row, place.tile);
        }
        if (place.row == 0 && place.tile == 0) {
            const struct kvf_gpu_tensor &tensor = work.tensors[is_delta];
            zero_gaps(tensor, saw_parts(tensor, part), threadIdx.x, LOOP_THREADS);
        }
    }
    if (is_there && first.sums != 0) {
        loop_keep<fast>(work.tensors[0], first.sums, place.row, token, state);
    }
}

} /* namespace kvf */

#endif /* KVF_CODEC_CODEC_CLOSED_LOOP_ENCODE_CUH */
