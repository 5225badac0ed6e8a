/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_kivi_generic.cuh: tiles of any dtype and dim, from and to addresses of an element. Numbers
 * in comments are steps of codec_kivi.h.
 */
#ifndef KVF_CODEC_CODEC_KIVI_GENERIC_CUH
#define KVF_CODEC_CODEC_KIVI_GENERIC_CUH

#include "codec/codec_kivi_device.cuh"

namespace kvf::kivi
{

struct generic_shared {
    float lo[KVF_DIM_MAX]; /* by channel: of the group */
    float factor[KVF_DIM_MAX];
    uint8_t is_escape[KIVI_TILE_TOKENS];
};

struct generic_tile {
    const struct kvf_gpu_work &work;
    const tile_row &at;
    const struct kvf_gpu_tensor &tensor;
    row_place place;
    uint32_t first; /* token of the tile */
    uint32_t end;
    float levels;
    float levels_inverse;
    generic_shared *shared;

    __device__ __forceinline__ float element(uint32_t token, uint32_t i) const
    {
        return load_element(tensor.dtype, place.pages.vector(token), i);
    }

    __device__ __forceinline__ uint8_t *codes_of(uint32_t token) const
    {
        return place.codes + token * (uint32_t)tensor.code_bytes;
    }

    /* (4) One byte of a token's codes; scale_of gives a channel's lo and factor. */
    template <typename F>
    __device__ __forceinline__ void store_byte(uint32_t token, uint32_t byte, F scale_of) const
    {
        uint32_t a_byte = 8 / tensor.bits;
        uint32_t mask = (1u << tensor.bits) - 1;
        uint32_t packed = 0;
        for (uint32_t k = 0; k < a_byte && byte * a_byte + k < tensor.dim; k++) {
            uint32_t i = byte * a_byte + k;
            const float2 scale = scale_of(i);
            packed |= (code_bits(element(token, i), scale.x, scale.y) & mask) << k * tensor.bits;
        }
        codes_of(token)[byte] = (uint8_t)packed;
    }
};

/* (1) By all threads: which tokens of the tile are escapes. */
static __device__ void find_escapes(const generic_tile &tile)
{
    for (uint32_t t = warp_id(); t < KIVI_TILE_TOKENS; t += n_warps) {
        uint32_t token = tile.first + t;
        uint32_t peak = 0;
        for (uint32_t i = lane_id(); i < tile.tensor.dim && token < tile.end; i += warp_lanes) {
            peak = max(peak, __float_as_uint(tile.element(token, i)) & 0x7fffffff);
        }
        peak = __reduce_max_sync(all_lanes, peak);
        if (lane_id() == 0) {
            tile.shared->is_escape[t] = token < tile.end &&
                                        (token < tile.at.part.n_sinks || is_escape_peak(peak));
        }
    }
    __syncthreads();
    for (uint32_t t = warp_id() * 16; t < KIVI_TILE_TOKENS; t += n_warps * 16) {
        bool is_one = lane_id() < 16 && tile.shared->is_escape[t + lane_id() % 16] != 0;
        uint32_t escapes = __ballot_sync(all_lanes, is_one);
        if (lane_id() == 0) {
            mark_escapes(tile.work, tile.at, tile.first + t, escapes);
        }
    }
}

/* (2, 3) The group of each channel from token `first` to before `end`, by all threads. */
static __device__ void choose_channels(const generic_tile &tile, uint32_t first, uint32_t end)
{
    uint32_t n = tile.tensor.dim;
    uint32_t *meta = tile.place.meta + first / tile.tensor.group_size * n;
    for (uint32_t i = threadIdx.x; i < n; i += KIVI_THREADS) {
        float min = __int_as_float(0x7f800000);
        float max = __int_as_float(0xff800000);
        for (uint32_t token = first; token < end; token++) {
            if (tile.shared->is_escape[token - tile.first] == 0) {
                float x = tile.element(token, i);
                min = fminf(min, x);
                max = fmaxf(max, x);
            }
        }
        group_scale scale = choose_scale(min, max, tile.levels, tile.levels_inverse);
        meta[i] = scale.meta;
        tile.shared->lo[i] = scale.lo;
        tile.shared->factor[i] = scale.factor;
    }
}

static __device__ void encode_channels(const generic_tile &tile)
{
    const generic_shared *shared = tile.shared;
    uint32_t code_bytes = tile.tensor.code_bytes;
    for (uint32_t first = tile.first; first < tile.end; first += tile.tensor.group_size) {
        uint32_t end = min(first + tile.tensor.group_size, tile.end);
        choose_channels(tile, first, end);
        __syncthreads();
        for (uint32_t k = threadIdx.x; k < (end - first) * code_bytes; k += KIVI_THREADS) {
            uint32_t token = first + k / code_bytes;
            uint32_t byte = k % code_bytes;
            if (shared->is_escape[token - tile.first] != 0) {
                tile.codes_of(token)[byte] = 0;
            } else {
                tile.store_byte(token, byte, [&](uint32_t i) {
                    return make_float2(shared->lo[i], shared->factor[i]);
                });
            }
        }
        __syncthreads();
    }
}

/* (2, 3, 4) One group of channels of a token, by a warp. */
static __device__ void encode_channels_of(const generic_tile &tile, uint32_t token, uint32_t group,
                                          bool is_escape)
{
    const struct kvf_gpu_tensor &tensor = tile.tensor;
    uint32_t first = group * tensor.group_size;
    uint32_t end = min(first + tensor.group_size, (uint32_t)tensor.dim);
    float min = __int_as_float(0x7f800000);
    float max = __int_as_float(0xff800000);
    for (uint32_t i = first + lane_id(); i < end && !is_escape; i += warp_lanes) {
        float x = tile.element(token, i);
        min = fminf(min, x);
        max = fmaxf(max, x);
    }
    for (uint32_t mask = 1; mask < warp_lanes; mask *= 2) {
        min = fminf(min, __shfl_xor_sync(all_lanes, min, mask));
        max = fmaxf(max, __shfl_xor_sync(all_lanes, max, mask));
    }
    group_scale scale = choose_scale(min, max, tile.levels, tile.levels_inverse);
    if (lane_id() == 0) {
        tile.place.meta[token * ceil_div(tensor.dim, tensor.group_size) + group] = scale.meta;
    }
    uint32_t a_byte = 8 / tensor.bits;
    for (uint32_t byte = first / a_byte + lane_id(); byte * a_byte < end; byte += warp_lanes) {
        if (is_escape) {
            tile.codes_of(token)[byte] = 0;
        } else {
            tile.store_byte(token, byte,
                            [&](uint32_t) { return make_float2(scale.lo, scale.factor); });
        }
    }
}

static __device__ void encode_generic(const struct kvf_gpu_work &work, uint32_t tensors)
{
    __shared__ generic_shared shared;
    const tile_row at(work, tensors);
    if (!at.is_there(work, tensors) || at.tile * KIVI_TILE_TOKENS >= at.part.n_tokens) {
        return;
    }
    const struct kvf_gpu_tensor &tensor = work.tensors[at.part.is_v];
    float levels = (float)((1 << tensor.bits) - 1);
    uint32_t first = at.tile * KIVI_TILE_TOKENS;
    const generic_tile tile = {work,   at,
                               tensor, row_place(work, at),
                               first,  min(first + KIVI_TILE_TOKENS, (uint32_t)at.part.n_tokens),
                               levels, __fdiv_rn(1.0f, levels),
                               &shared};
    if (at.row == 0 && at.tile == 0) {
        finish_part(work, at);
    }
    find_escapes(tile);
    if (is_by_channel(tensor)) {
        encode_channels(tile);
        return;
    }
    uint32_t n_groups = ceil_div(tensor.dim, tensor.group_size);
    for (uint32_t token = tile.first + warp_id(); token < tile.end; token += n_warps) {
        for (uint32_t group = 0; group < n_groups; group++) {
            encode_channels_of(tile, token, group, shared.is_escape[token - tile.first] != 0);
        }
    }
}

/* The channels that are in one byte of a token's codes. */
static __device__ void decode_byte(const struct kvf_gpu_tensor &tensor, const row_place &place,
                                   uint32_t token, uint32_t byte, uint8_t *vector)
{
    uint32_t group_size = tensor.group_size;
    uint32_t a_byte = 8 / tensor.bits;
    uint32_t codes = place.codes[token * (uint32_t)tensor.code_bytes + byte];
    for (uint32_t i = byte * a_byte; i < min((byte + 1) * a_byte, (uint32_t)tensor.dim); i++) {
        uint32_t word = is_by_channel(tensor)
                            ? token / group_size * tensor.dim + i
                            : token * ceil_div(tensor.dim, group_size) + i / group_size;
        uint32_t meta = place.meta[word];
        float code = (float)(codes & ((1u << tensor.bits) - 1));
        codes >>= tensor.bits;
        store_element(
            tensor.dtype, vector, i,
            __fmaf_rn(f32_of_half_bits(meta >> 16), code, f32_of_half_bits(meta & 0xffff)));
    }
}

static __device__ void decode_generic(const struct kvf_gpu_work &work, uint32_t tensors)
{
    const tile_row at(work, tensors);
    if (!at.is_there(work, tensors)) {
        return;
    }
    const struct kvf_gpu_tensor &tensor = work.tensors[at.part.is_v];
    const row_place place(work, at);
    uint32_t step = at.n_tiles * n_warps;
    for (uint32_t t = at.tile * n_warps + warp_id(); t < at.part.n_wanted; t += step) {
        uint8_t *vector = place.pages.vector(t);
        for (uint32_t byte = lane_id(); byte < tensor.code_bytes; byte += warp_lanes) {
            decode_byte(tensor, place, at.part.token_first + t, byte, vector);
        }
    }
}

} /* namespace kvf::kivi */

#endif /* KVF_CODEC_CODEC_KIVI_GENERIC_CUH */
