/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_kivi_fast.cuh: tiles of bf16 heads of 128. Numbers in comments are steps of codec_kivi.h.
 *
 * A warp has 16 tokens, which lie in one group by channel whatever the group's size; a lane has 8
 * channels, 16 bytes, of every second one of them: lane l those from 8 (l mod 16) on of tokens l /
 * 16, l / 16 + 2, ... All of them are asked for before anything is done, and stay in registers.
 */
#ifndef KVF_CODEC_CODEC_KIVI_FAST_CUH
#define KVF_CODEC_CODEC_KIVI_FAST_CUH

#include "codec/codec_kivi_device.cuh"

namespace kvf::kivi
{

constexpr uint32_t warp_tokens = 16;
constexpr uint32_t lane_channels = 8;

static_assert(n_warps * warp_tokens == KIVI_TILE_TOKENS, "a tile is a thread block's");

/* Where a lane is in its tile. */
template <int dim> struct tile_lane {
    static constexpr uint32_t vector_lanes = dim / lane_channels;
    static constexpr uint32_t n_side = warp_lanes / vector_lanes; /* tokens side by side */
    static constexpr uint32_t n = warp_tokens / n_side;           /* tokens of a lane */

    uint32_t warp_first; /* token */
    uint32_t first;      /* the lane's first token, n_side before its next one */
    uint32_t channel;
    uint64_t from; /* lane k: token k of the warp, in the pages; 0: not there */

    /* n_shown: of the tokens that the view has, from view_first on; no others are there. */
    __device__ __forceinline__ tile_lane(const row_pages &pages, uint32_t tile, uint32_t view_first,
                                         uint32_t n_shown)
    {
        warp_first = tile * KIVI_TILE_TOKENS + uniform_warp() * warp_tokens;
        first = warp_first + lane_id() / vector_lanes;
        channel = lane_id() % vector_lanes * lane_channels;
        uint32_t shown = warp_first + lane_id() % warp_tokens - view_first; /* wraps */
        from = shown < n_shown ? reinterpret_cast<uint64_t>(pages.vector(shown)) : 0;
    }

    __device__ __forceinline__ uint32_t token(uint32_t j) const
    {
        return first + j * n_side;
    }

    /* The lane's bytes of its j-th token; NULL: it is not there. */
    __device__ __forceinline__ uint8_t *bytes(uint32_t j) const
    {
        uint32_t k = token(j) - warp_first;
        uint64_t vector = __shfl_sync(all_lanes, (uint32_t)from, k) |
                          (uint64_t)__shfl_sync(all_lanes, (uint32_t)(from >> 32), k) << 32;
        return vector != 0 ? at_address<uint8_t>(vector) + channel * 2 : nullptr;
    }
};

static __device__ __forceinline__ float2 floats_of(uint32_t word)
{
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000));
}

/* The smaller one, and the larger one, of each half as bf16. */
static __device__ __forceinline__ uint32_t min_halves(uint32_t a, uint32_t b)
{
    __nv_bfloat162 min = __hmin2(*reinterpret_cast<__nv_bfloat162 *>(&a),
                                 *reinterpret_cast<__nv_bfloat162 *>(&b));
    return *reinterpret_cast<uint32_t *>(&min);
}

static __device__ __forceinline__ uint32_t max_halves(uint32_t a, uint32_t b)
{
    __nv_bfloat162 max = __hmax2(*reinterpret_cast<__nv_bfloat162 *>(&a),
                                 *reinterpret_cast<__nv_bfloat162 *>(&b));
    return *reinterpret_cast<uint32_t *>(&max);
}

/* Eight elements from any address of one; the rare case. */
static __device__ __noinline__ uint4 load_halves(const uint8_t *from)
{
    const uint16_t *half = reinterpret_cast<const uint16_t *>(from);
    return make_uint4(half[0] | (uint32_t)half[1] << 16, half[2] | (uint32_t)half[3] << 16,
                      half[4] | (uint32_t)half[5] << 16, half[6] | (uint32_t)half[7] << 16);
}

static __device__ __noinline__ void store_halves(uint8_t *to, uint4 value)
{
    const uint32_t words[4] = {value.x, value.y, value.z, value.w};
    uint16_t *half = reinterpret_cast<uint16_t *>(to);
    for (uint32_t i = 0; i < 8; i++) {
        half[i] = (uint16_t)(words[i / 2] >> i % 2 * 16);
    }
}

/* -------------------------------------------------------------------------------------------------
 * Encode
 */
constexpr uint32_t inf_halves = 0x7f807f80;
constexpr uint32_t minus_inf_halves = 0xff80ff80;

template <int dim> struct __align__(16) fast_shared
{
    uint32_t min[n_warps][dim / 2]; /* two channels each */
    uint32_t max[n_warps][dim / 2];
    float lo[n_warps / 2][dim]; /* of groups of 32 tokens, the smallest there are */
    float factor[n_warps / 2][dim];
};

/* All of a lane's tokens; zeroes where there is none. */
template <int dim>
static __device__ __forceinline__ void load_vectors(const tile_lane<dim> &lane, bool is_aligned,
                                                    uint4 x[tile_lane<dim>::n])
{
    const uint8_t *from[lane.n];
#pragma unroll
    for (uint32_t j = 0; j < lane.n; j++) {
        from[j] = lane.bytes(j);
        x[j] = make_uint4(0, 0, 0, 0);
        if (from[j] != nullptr && is_aligned) {
            x[j] = *reinterpret_cast<const uint4 *>(from[j]);
        }
    }
    if (!is_aligned) {
#pragma unroll
        for (uint32_t j = 0; j < lane.n; j++) {
            if (from[j] != nullptr) {
                x[j] = load_halves(from[j]);
            }
        }
    }
}

/* (1) The largest magnitude of a lane's elements, in both halves; 0x7fff if one is NaN. */
static __device__ __forceinline__ uint32_t lane_peak_of(const uint4 &x)
{
    uint32_t peak = max_half_magnitudes(max_half_magnitudes(x.x, x.y),
                                        max_half_magnitudes(x.z, x.w));
    return max_half_magnitudes(peak, permute_bytes(peak, 0, 0x1032));
}

/* (1) Bit j: the lane's j-th token is there and not an escape. Two tokens at a time, each in its
 * half of a word. */
template <int dim>
static __device__ __forceinline__ uint32_t find_coded(const tile_lane<dim> &lane,
                                                      const struct kvf_gpu_part &part,
                                                      const uint4 x[tile_lane<dim>::n])
{
    uint32_t coded = 0;
#pragma unroll
    for (uint32_t j = 0; j < lane.n; j += 2) {
        uint32_t peaks = permute_bytes(lane_peak_of(x[j]), lane_peak_of(x[j + 1]), 0x5410);
#pragma unroll
        for (uint32_t mask = 1; mask < lane.vector_lanes; mask *= 2) {
            peaks = max_half_magnitudes(peaks, __shfl_xor_sync(all_lanes, peaks, mask));
        }
#pragma unroll
        for (uint32_t k = 0; k < 2; k++) {
            uint32_t token = lane.token(j + k);
            uint32_t peak = k == 0 ? peaks << 16 : peaks & 0xffff0000;
            bool is_coded = token >= part.n_sinks && token < part.n_tokens && !is_escape_peak(peak);
            coded |= is_coded ? 1u << (j + k) : 0;
        }
    }
    return coded;
}

/* Marks of the warp's tokens. */
template <int dim>
static __device__ __forceinline__ void mark_warp(const struct kvf_gpu_work &work,
                                                 const tile_row &at, const tile_lane<dim> &lane,
                                                 uint32_t coded)
{
    uint32_t k = lane_id() % warp_tokens;
    uint32_t others = __shfl_sync(all_lanes, coded, k % lane.n_side * lane.vector_lanes);
    bool is_escape = lane_id() < warp_tokens && lane.warp_first + k < at.part.n_tokens &&
                     (others >> k / lane.n_side & 1) == 0;
    uint32_t escapes = __ballot_sync(all_lanes, is_escape);
    if (lane_id() == 0) {
        mark_escapes(work, at, lane.warp_first, escapes);
    }
}

/* (4) Eight codes, the first one in the lowest bits. */
template <int bits>
static __device__ __forceinline__ uint32_t eight_codes(const uint4 &x,
                                                       const float lo[lane_channels],
                                                       const float factor[lane_channels])
{
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
    uint32_t codes = 0;
    uint32_t magic = 0; /* what the sums of codes have too much */
#pragma unroll
    for (uint32_t w = 4; w-- > 0;) {
        const float2 pair = floats_of(words[w]);
        codes = (codes << bits) + code_bits(pair.y, lo[2 * w + 1], factor[2 * w + 1]);
        codes = (codes << bits) + code_bits(pair.x, lo[2 * w], factor[2 * w]);
        magic = (((magic << bits) + 0x4b400000) << bits) + 0x4b400000;
    }
    return codes - magic;
}

template <int bits>
static __device__ __forceinline__ void store_eight_codes(uint8_t *to, uint32_t codes)
{
    if constexpr (bits == 4) {
        *reinterpret_cast<uint32_t *>(to) = codes;
    } else {
        *reinterpret_cast<uint16_t *>(to) = (uint16_t)codes;
    }
}

/* (2, 3) By all threads: the groups of the tile, from the warps' ranges. */
template <int dim, int bits>
static __device__ __forceinline__ void choose_groups(const struct kvf_gpu_tensor &tensor,
                                                     const tile_row &at, const row_place &place,
                                                     fast_shared<dim> *shared)
{
    constexpr float levels = (float)((1 << bits) - 1);
    uint32_t first = at.tile * KIVI_TILE_TOKENS;
    uint32_t group_warps = tensor.group_size / warp_tokens;
    uint32_t n_groups = ceil_div(min(at.part.n_tokens - first, (uint32_t)KIVI_TILE_TOKENS),
                                 tensor.group_size);
    uint32_t *meta = place.meta + first / tensor.group_size * dim;
    for (uint32_t i = threadIdx.x; i < n_groups * dim; i += KIVI_THREADS) {
        uint32_t group = i / dim;
        uint32_t channel = i % dim;
        uint32_t least = inf_halves;
        uint32_t most = minus_inf_halves;
        for (uint32_t w = group * group_warps; w < (group + 1) * group_warps; w++) {
            least = min_halves(least, shared->min[w][channel / 2]);
            most = max_halves(most, shared->max[w][channel / 2]);
        }
        float min = channel % 2 == 0 ? floats_of(least).x : floats_of(least).y;
        float max = channel % 2 == 0 ? floats_of(most).x : floats_of(most).y;
        group_scale scale = choose_scale(min, max, levels, 1.0f / levels);
        meta[i] = scale.meta;
        shared->lo[group][channel] = scale.lo;
        shared->factor[group][channel] = scale.factor;
    }
}

static __device__ __forceinline__ uint4 min_of(const uint4 &a, const uint4 &b)
{
    return make_uint4(min_halves(a.x, b.x), min_halves(a.y, b.y), min_halves(a.z, b.z),
                      min_halves(a.w, b.w));
}

static __device__ __forceinline__ uint4 max_of(const uint4 &a, const uint4 &b)
{
    return make_uint4(max_halves(a.x, b.x), max_halves(a.y, b.y), max_halves(a.z, b.z),
                      max_halves(a.w, b.w));
}

static __device__ __forceinline__ uint4 of_lane(const uint4 &a, uint32_t mask)
{
    return make_uint4(__shfl_xor_sync(all_lanes, a.x, mask), __shfl_xor_sync(all_lanes, a.y, mask),
                      __shfl_xor_sync(all_lanes, a.z, mask), __shfl_xor_sync(all_lanes, a.w, mask));
}

/* By all threads. coded: of find_coded. */
template <int dim, int bits>
static __device__ __forceinline__ void
encode_tile_channels(const struct kvf_gpu_tensor &tensor, const tile_row &at,
                     const row_place &place, const tile_lane<dim> &lane,
                     const uint4 x[tile_lane<dim>::n], uint32_t coded, fast_shared<dim> *shared)
{
    uint4 min = make_uint4(inf_halves, inf_halves, inf_halves, inf_halves);
    uint4 max = make_uint4(minus_inf_halves, minus_inf_halves, minus_inf_halves, minus_inf_halves);
#pragma unroll
    for (uint32_t j = 0; j < lane.n; j++) {
        if ((coded >> j & 1) != 0) {
            min = min_of(min, x[j]);
            max = max_of(max, x[j]);
        }
    }
    for (uint32_t mask = lane.vector_lanes; mask < warp_lanes; mask *= 2) {
        min = min_of(min, of_lane(min, mask));
        max = max_of(max, of_lane(max, mask));
    }
    uint32_t warp = uniform_warp();
    if (lane_id() < lane.vector_lanes) {
        *reinterpret_cast<uint4 *>(&shared->min[warp][lane.channel / 2]) = min;
        *reinterpret_cast<uint4 *>(&shared->max[warp][lane.channel / 2]) = max;
    }
    __syncthreads();
    choose_groups<dim, bits>(tensor, at, place, shared);
    __syncthreads();
    uint32_t group = warp * warp_tokens / tensor.group_size;
    float lo[lane_channels];
    float factor[lane_channels];
#pragma unroll
    for (uint32_t i = 0; i < lane_channels; i++) {
        lo[i] = shared->lo[group][lane.channel + i];
        factor[i] = shared->factor[group][lane.channel + i];
    }
#pragma unroll
    for (uint32_t j = 0; j < lane.n; j++) {
        if (lane.token(j) < at.part.n_tokens) {
            uint32_t codes = eight_codes<bits>(x[j], lo, factor);
            store_eight_codes<bits>(place.codes + lane.token(j) * (dim * bits / 8) +
                                        lane.channel * bits / 8,
                                    (coded >> j & 1) != 0 ? codes : 0);
        }
    }
}

/* (2) Of a lane's elements: the least in the lower half, minus the greatest in the upper one. */
static __device__ __forceinline__ uint32_t range_of(const uint4 &x)
{
    uint32_t min = min_halves(min_halves(x.x, x.y), min_halves(x.z, x.w));
    uint32_t max = max_halves(max_halves(x.x, x.y), max_halves(x.z, x.w)) ^ 0x80008000;
    return min_halves(permute_bytes(min, max, 0x5410), permute_bytes(min, max, 0x7632));
}

/* By each warp alone. */
template <int dim, int bits>
static __device__ __forceinline__ void
encode_tile_tokens(const struct kvf_gpu_tensor &tensor, const tile_row &at, const row_place &place,
                   const tile_lane<dim> &lane, const uint4 x[tile_lane<dim>::n], uint32_t coded)
{
    constexpr float levels = (float)((1 << bits) - 1);
    uint32_t group_lanes = tensor.group_size / lane_channels;
    uint32_t n_groups = ceil_div(dim, tensor.group_size);
    bool is_first = lane_id() % group_lanes == 0;
    uint32_t *meta = place.meta + lane.channel / tensor.group_size;
#pragma unroll
    for (uint32_t j = 0; j < lane.n; j++) {
        bool is_coded = (coded >> j & 1) != 0;
        uint32_t range = range_of(x[j]);
#pragma unroll
        for (uint32_t mask = 1; mask < lane.vector_lanes; mask *= 2) {
            uint32_t other = __shfl_xor_sync(all_lanes, range, mask);
            range = mask < group_lanes ? min_halves(range, other) : range;
        }
        const float2 both = floats_of(range);
        float least = is_coded ? both.x : __int_as_float(0x7f800000);
        float most = is_coded ? -both.y : __int_as_float(0xff800000);
        const group_scale scale = choose_scale(least, most, levels, 1.0f / levels);
        float lo[lane_channels];
        float factor[lane_channels];
#pragma unroll
        for (uint32_t i = 0; i < lane_channels; i++) {
            lo[i] = scale.lo;
            factor[i] = scale.factor;
        }
        if (lane.token(j) < at.part.n_tokens) {
            uint32_t codes = eight_codes<bits>(x[j], lo, factor);
            store_eight_codes<bits>(place.codes + lane.token(j) * (dim * bits / 8) +
                                        lane.channel * bits / 8,
                                    is_coded ? codes : 0);
            if (is_first) {
                meta[lane.token(j) * n_groups] = scale.meta;
            }
        }
    }
}

template <int dim, int bits>
static __device__ __forceinline__ void encode_fast(const struct kvf_gpu_work &work,
                                                   uint32_t tensors)
{
    __shared__ fast_shared<dim> shared;
    const tile_row at(work, tensors);
    if (!at.is_there(work, tensors) || at.tile * KIVI_TILE_TOKENS >= at.part.n_tokens) {
        return;
    }
    const struct kvf_gpu_tensor &tensor = work.tensors[at.part.is_v];
    const row_place place(work, at);
    const tile_lane<dim> lane(place.pages, at.tile, 0, at.part.n_tokens);
    uint4 x[lane.n];
    load_vectors(lane, place.pages.is_aligned(), x);
    if (at.row == 0 && at.tile == 0) {
        finish_part(work, at);
    }
    uint32_t coded = find_coded<dim>(lane, at.part, x);
    mark_warp<dim>(work, at, lane, coded);
    if (is_by_channel(tensor)) {
        encode_tile_channels<dim, bits>(tensor, at, place, lane, x, coded, &shared);
    } else {
        encode_tile_tokens<dim, bits>(tensor, at, place, lane, x, coded);
    }
}

/* -------------------------------------------------------------------------------------------------
 * Decode
 */
static __device__ __forceinline__ uint32_t bf16_pair(float a, float b)
{
    __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<uint32_t *>(&both);
}

/* Code k of eight, as a number. */
template <int bits> static __device__ __forceinline__ float code_number(uint32_t codes, uint32_t k)
{
    uint32_t code = codes >> k * bits & ((1u << bits) - 1);
    return __uint_as_float(code | 0x4b000000) - 8388608.0f;
}

template <int bits>
static __device__ __forceinline__ uint4 eight_values(uint32_t codes, const float lo[lane_channels],
                                                     const float scale[lane_channels])
{
    uint32_t words[4];
#pragma unroll
    for (uint32_t w = 0; w < 4; w++) {
        uint32_t i = 2 * w;
        words[w] = bf16_pair(__fmaf_rn(scale[i], code_number<bits>(codes, i), lo[i]),
                             __fmaf_rn(scale[i + 1], code_number<bits>(codes, i + 1), lo[i + 1]));
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

/* NULL: the token is not there. */
static __device__ __forceinline__ void store_eight(uint8_t *to, const uint4 &values,
                                                   bool is_aligned)
{
    if (to == nullptr) {
        return;
    }
    if (is_aligned) {
        *reinterpret_cast<uint4 *>(to) = values;
    } else {
        store_halves(to, values);
    }
}

template <int dim, int bits>
static __device__ __forceinline__ void decode_tile(const struct kvf_gpu_tensor &tensor,
                                                   const tile_row &at, const row_place &place,
                                                   uint32_t tile, bool is_aligned)
{
    const struct kvf_gpu_part &part = at.part;
    const tile_lane<dim> lane(place.pages, tile, part.token_first, part.n_wanted);
    bool by_channel = is_by_channel(tensor);
    uint32_t n_groups = ceil_div(dim, tensor.group_size);
    const uint32_t *token_meta = place.meta + lane.channel / tensor.group_size;
    uint32_t codes[lane.n];
    uint32_t meta[lane.n]; /* by token */
    uint8_t *to[lane.n];
#pragma unroll
    for (uint32_t j = 0; j < lane.n; j++) {
        to[j] = lane.bytes(j);
        codes[j] = 0;
        meta[j] = 0;
        if (to[j] != nullptr) {
            const uint8_t *from = place.codes + lane.token(j) * (dim * bits / 8) +
                                  lane.channel * bits / 8;
            codes[j] = bits == 4 ? *reinterpret_cast<const uint32_t *>(from)
                                 : *reinterpret_cast<const uint16_t *>(from);
            if (!by_channel) {
                meta[j] = token_meta[lane.token(j) * n_groups];
            }
        }
    }
    float lo[lane_channels];
    float scale[lane_channels];
    if (by_channel && lane.warp_first < part.n_tokens) {
        const uint32_t *from = place.meta + lane.warp_first / tensor.group_size * dim +
                               lane.channel;
#pragma unroll
        for (uint32_t i = 0; i < lane_channels; i++) {
            lo[i] = f32_of_half_bits(from[i] & 0xffff);
            scale[i] = f32_of_half_bits(from[i] >> 16);
        }
#pragma unroll
        for (uint32_t j = 0; j < lane.n; j++) {
            store_eight(to[j], eight_values<bits>(codes[j], lo, scale), is_aligned);
        }
    } else if (!by_channel) {
#pragma unroll
        for (uint32_t j = 0; j < lane.n; j++) {
#pragma unroll
            for (uint32_t i = 0; i < lane_channels; i++) {
                lo[i] = f32_of_half_bits(meta[j] & 0xffff);
                scale[i] = f32_of_half_bits(meta[j] >> 16);
            }
            store_eight(to[j], eight_values<bits>(codes[j], lo, scale), is_aligned);
        }
    }
}

template <int dim, int bits>
static __device__ __forceinline__ void decode_fast(const struct kvf_gpu_work &work,
                                                   uint32_t tensors)
{
    const tile_row at(work, tensors);
    if (!at.is_there(work, tensors)) {
        return;
    }
    const struct kvf_gpu_tensor &tensor = work.tensors[at.part.is_v];
    const row_place place(work, at);
    bool is_aligned = place.pages.is_aligned();
    uint32_t first = at.part.token_first;
    uint32_t end = ceil_div(first + at.part.n_wanted, KIVI_TILE_TOKENS);
    for (uint32_t tile = first / KIVI_TILE_TOKENS + at.tile; tile < end; tile += at.n_tiles) {
        decode_tile<dim, bits>(tensor, at, place, tile, is_aligned);
    }
}

} /* namespace kvf::kivi */

#endif /* KVF_CODEC_CODEC_KIVI_FAST_CUH */
