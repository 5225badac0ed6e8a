/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw_generic.cuh: encode and decode of rows of any dtype, dim, width, rotation and alignment
 * of the element. A warp has one vector at a time, in shared memory. Numbers in comments are steps
 * of codec_saw.h.
 */
#ifndef KVF_CODEC_CODEC_SAW_GENERIC_CUH
#define KVF_CODEC_CODEC_SAW_GENERIC_CUH

#include "codec/codec_elements.cuh"
#include "codec/codec_rotate.cuh"
#include "codec/codec_saw_device.cuh"
#include "codec/codec_saw_shape.h"

namespace kvf
{

constexpr float round_magic = 12582912.0f; /* 1.5 2^23: adding it rounds to an integer */
constexpr uint32_t generic_warps = SAW_GENERIC_THREADS / warp_lanes;

struct generic_shared {
    union {
        vector_pair<float> floats[generic_warps];
        vector_pair<int32_t> integers[generic_warps];
    };
    float mean[group_max]; /* encode: rotated; decode: as stored */
    uint8_t codes[generic_warps][group_max];
    uint8_t is_escape[KVF_SAW_PARTIAL_SUMS * KVF_SAW_TILE_TOKENS]; /* samples, by rule 1 */
    uint8_t zeros[KVF_CHUNK_TOKENS_MAX]; /* encode: z of each token, where there are zeros */
};

struct generic_row {
    const struct kvf_gpu_tensor &tensor;
    const struct kvf_gpu_part &part;
    saw_parts parts;
    row_pages pages;
    uint32_t row;
    generic_shared *shared;
};

/* -------------------------------------------------------------------------------------------------
 * Encode
 */

/* (1) Bits of the largest magnitude, in every lane. */
static __device__ uint32_t peak_of(const generic_row &at, const uint8_t *vector)
{
    uint32_t peak = 0;
    for (uint32_t i = lane_id(); i < at.tensor.group; i += warp_lanes) {
        uint32_t bits = __float_as_uint(load_element(at.tensor.dtype, vector, i)) & 0x7fffffff;
        peak = bits > peak ? bits : peak;
    }
    return __reduce_max_sync(all_lanes, peak);
}

static __device__ bool is_escape(const generic_row &at, uint32_t token, uint32_t peak)
{
    return token < at.part.n_sinks || peak >= (uint32_t)KVF_SAW_ESCAPE_EXPONENT << 23;
}

/* (2) The token of a sample; not one if it is not below n_tokens. */
static __device__ __forceinline__ uint32_t sampled_token(uint32_t n_tokens, uint32_t sample)
{
    return sample / KVF_SAW_TILE_TOKENS * saw_tile_step(n_tokens) * KVF_SAW_TILE_TOKENS +
           sample % KVF_SAW_TILE_TOKENS;
}

/* (2) By all threads: which samples are no vectors, or escapes. */
static __device__ void find_samples(const generic_row &at)
{
    generic_shared *shared = at.shared;
    uint32_t n_tokens = at.part.n_tokens;
    for (uint32_t i = warp_id(); i < sizeof(shared->is_escape); i += generic_warps) {
        uint32_t token = sampled_token(n_tokens, i);
        bool escape = token >= n_tokens ||
                      is_escape(at, token, peak_of(at, at.pages.vector(token)));
        if (lane_id() == 0) {
            shared->is_escape[i] = escape;
        }
    }
    __syncthreads();
}

/* (2) Over the samples that are vectors, of one channel: partial sums of f(x), added. */
template <typename F>
static __device__ float sum_samples(const generic_row &at, uint32_t channel, uint32_t *count_out,
                                    F f)
{
    float sum[KVF_SAW_PARTIAL_SUMS] = {0.0f};
    uint32_t count = 0;
#pragma unroll
    for (uint32_t s = 0; s < KVF_SAW_PARTIAL_SUMS; s++) {
#pragma unroll 1
        for (uint32_t k = 0; k < KVF_SAW_TILE_TOKENS; k++) {
            uint32_t sample = s * KVF_SAW_TILE_TOKENS + k;
            if (at.shared->is_escape[sample] == 0) {
                uint32_t token = sampled_token(at.part.n_tokens, sample);
                sum[s] += f(load_element(at.tensor.dtype, at.pages.vector(token), channel));
                count++;
            }
        }
    }
    *count_out = count;
    return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

/* (2) By all threads, after find_samples: the mean to its part. */
static __device__ void make_mean(const generic_row &at)
{
    uint32_t n = at.tensor.group;
    uint16_t *mean = reinterpret_cast<uint16_t *>(at.parts.mean) + at.row * n;
    for (uint32_t i = threadIdx.x; i < n; i += SAW_GENERIC_THREADS) {
        uint32_t count;
        float sum = sum_samples(at, i, &count, [](float x) { return x; });
        mean[i] = (uint16_t)mean_half_bits(sum, count);
    }
    __syncthreads();
}

/* (4) By all threads: the mean, flipped and rotated, to shared memory. */
static __device__ void rotate_mean(const generic_row &at)
{
    generic_shared *shared = at.shared;
    uint32_t n = at.tensor.group;
    const uint16_t *mean = reinterpret_cast<const uint16_t *>(at.parts.mean) + at.row * n;
    if (warp_id() == 0) {
        for (uint32_t i = lane_id(); i < n; i += warp_lanes) {
            float value = f32_of_half_bits(mean[i]);
            shared->floats[0].now[i] = is_flipped(at.tensor, at.row, i) ? -value : value;
        }
        __syncwarp();
        rotate(shared->floats[0], n, at.tensor.rot_order, false);
        for (uint32_t i = lane_id(); i < n; i += warp_lanes) {
            shared->mean[i] = shared->floats[0].now[i];
        }
    }
    __syncthreads();
}

/* (1, 3) By a warp: one vector, flipped; zeroes if it is an escape, which is what is returned. */
static __device__ bool load_flipped(const generic_row &at, uint32_t token, float *to)
{
    const uint8_t *vector = at.pages.vector(token);
    uint32_t n = at.tensor.group;
    uint32_t peak = peak_of(at, vector);
    bool escape = is_escape(at, token, peak);
    uint32_t exponent = peak >> 23;
    uint32_t smallest = 0;
    if (at.tensor.dtype == KVF_DTYPE_BF16 && exponent > KVF_SAW_DROP_BINADES) {
        smallest = (exponent - KVF_SAW_DROP_BINADES) << 23;
    }
    for (uint32_t i = lane_id(); i < n; i += warp_lanes) {
        float x = load_element(at.tensor.dtype, vector, i);
        bool kept = !escape && (__float_as_uint(x) & 0x7fffffff) >= smallest;
        x = is_flipped(at.tensor, at.row, i) ? -x : x;
        to[i] = kept ? x : 0.0f;
    }
    __syncwarp();
    return escape;
}

/* (1, 3, 4) y of one vector; zeroes, minus the mean, of an escape. */
static __device__ bool load_rotated(const generic_row &at, uint32_t token, float *min_out,
                                    float *max_out)
{
    vector_pair<float> &work = at.shared->floats[warp_id()];
    uint32_t n = at.tensor.group;
    bool escape = load_flipped(at, token, work.now);
    rotate(work, n, at.tensor.rot_order, false);
    float min = has_zeros(at.tensor) ? 0.0f : __int_as_float(0x7f800000);
    float max = has_zeros(at.tensor) ? 0.0f : __int_as_float(0xff800000);
    for (uint32_t i = lane_id(); i < n; i += warp_lanes) {
        float y = work.now[i];
        if (at.parts.mean != nullptr) {
            y -= at.shared->mean[i];
            work.now[i] = y;
        }
        min = fminf(min, y);
        max = fmaxf(max, y);
    }
    for (uint32_t mask = 1; mask < warp_lanes; mask *= 2) {
        min = fminf(min, __shfl_xor_sync(all_lanes, min, mask));
        max = fmaxf(max, __shfl_xor_sync(all_lanes, max, mask));
    }
    *min_out = min;
    *max_out = max;
    return escape;
}

/* What choosing a scale takes. */
struct generic_range {
    float min;
    float max;
    float levels;
    float levels_inverse;
    bool is_escape;
};

/* What a vector is coded with. Where there are zeros, z is in the place of lo. */
struct generic_scale {
    saw_scale scale;
    float w;
};

/* (5, 6) */
static __device__ generic_scale scale_of(const struct kvf_gpu_tensor &tensor,
                                         const generic_range &range, float ratio)
{
    generic_scale chosen = {choose_scale(ratio, tensor.sqrt_order, tensor.rsqrt_order, range.min,
                                         range.max, range.levels, range.levels_inverse,
                                         range.is_escape),
                            0.0f};
    uint32_t meta = chosen.scale.meta;
    if (has_zeros(tensor) && meta != (uint32_t)KVF_SAW_ESCAPE_SCALE << 16) {
        float value = f32_of_half_bits(meta >> 16);
        float shift = saw_zero_shift(tensor);
        float zero = __fdiv_rn(-f32_of_half_bits(meta & 0xffff), value) - shift;
        zero = fminf(fmaxf(zero, 0.0f), range.levels); /* 0 for 0 / 0 */
        zero = zero + round_magic - round_magic;
        chosen.w = zero + shift;
        chosen.scale.offset = lo_of_zero(value, chosen.w) * tensor.sqrt_order;
        chosen.scale.meta = (meta & 0xffff0000) | (uint32_t)zero;
    }
    return chosen;
}

/* (7) The code of y, as round_magic and it. */
static __device__ __forceinline__ float code_of(const saw_scale &scale, float y, float levels)
{
    float q = __fmaf_rn(y - scale.offset, scale.factor, round_magic);
    return fminf(fmaxf(q, round_magic), round_magic + levels);
}

/* (S) By a warp: the cost with a ratio; factor: c (1 / scale) of the first one. */
static __device__ uint32_t cost_of(const generic_row &at, const generic_range &range, float factor,
                                   float ratio)
{
    const float *y = at.shared->floats[warp_id()].now;
    const saw_costs costs(at.tensor.clip_ratios[0], ratio, at.tensor.bits);
    float middle = 0.5f * (range.min + range.max);
    uint32_t cost = 0;
    for (uint32_t i = lane_id(); i < at.tensor.group; i += warp_lanes) {
        float steps = __fmaf_rn(fabsf(y[i] - middle), 16.0f * factor, round_magic);
        cost += costs.of(steps - round_magic);
    }
    return __reduce_add_sync(all_lanes, cost);
}

/* (S) The same where there are zeros; w: of the ratio. */
static __device__ uint32_t zero_cost_of(const generic_row &at, const generic_range &range,
                                        float factor, float ratio, float w)
{
    const float *y = at.shared->floats[warp_id()].now;
    const saw_costs costs(at.tensor.clip_ratios[0], ratio, at.tensor.bits);
    uint32_t cost = 0;
    for (uint32_t i = lane_id(); i < at.tensor.group; i += warp_lanes) {
        float steps = __fmaf_rn(y[i], 16.0f * factor, round_magic) - round_magic;
        float level = __fmaf_rn(steps, costs.a, w) + round_magic - round_magic;
        level = fminf(fmaxf(level, 0.0f), range.levels);
        float error = __fmaf_rn(-(level - w), costs.step, steps);
        cost += (uint32_t)(__fmaf_rn(error, error, round_magic) - round_magic);
    }
    return __reduce_add_sync(all_lanes, cost);
}

/* (S) */
static __device__ saw_scale search_scale(const generic_row &at, const generic_range &range)
{
    constexpr uint32_t escape_meta = (uint32_t)KVF_SAW_ESCAPE_SCALE << 16;
    const float *ratios = at.tensor.clip_ratios;
    saw_scale best = {escape_meta, 0.0f, 0.0f};
    float factor = scale_of(at.tensor, range, ratios[0]).scale.factor;
    uint32_t least = 0xffffffff;
    for (uint32_t k = 0; k < at.tensor.n_clips; k++) {
        const generic_scale tried = scale_of(at.tensor, range, ratios[k]);
        uint32_t cost = has_zeros(at.tensor) ? zero_cost_of(at, range, factor, ratios[k], tried.w)
                                             : cost_of(at, range, factor, ratios[k]);
        if (tried.scale.meta != escape_meta && cost < least) {
            least = cost;
            best = tried.scale;
        }
    }
    return best;
}

/* One plane of n codes: their fields of plane_bits bits from bit `shift` on, in stored order. */
static __device__ void pack_plane(const uint8_t *codes, const uint8_t *order, uint32_t n,
                                  uint32_t plane_bits, uint32_t shift, uint8_t *to)
{
    uint32_t a_byte = 8 / plane_bits;
    uint32_t mask = (1u << plane_bits) - 1;
    for (uint32_t byte = lane_id(); byte * a_byte < n; byte += warp_lanes) {
        uint32_t packed = 0;
        for (uint32_t i = 0; i < a_byte && byte * a_byte + i < n; i++) {
            uint32_t code = codes[order[byte * a_byte + i]];
            packed |= (code >> shift & mask) << i * plane_bits;
        }
        to[byte] = (uint8_t)packed;
    }
}

/* All planes of n codes, by a warp. */
static __device__ void pack_codes(const uint8_t *codes, const uint8_t *order, uint32_t n,
                                  uint32_t bits, uint8_t *to)
{
    uint32_t low_bits = saw_low_bits(bits);
    pack_plane(codes, order, n, bits - low_bits, low_bits, to);
    if (low_bits != 0) {
        pack_plane(codes, order, n, low_bits, 0, to + (n * (bits - low_bits) + 7) / 8);
    }
}

/* (7) */
static __device__ void store_codes_of(const generic_row &at, const saw_scale &scale, uint8_t *to)
{
    const float *y = at.shared->floats[warp_id()].now;
    uint8_t *codes = at.shared->codes[warp_id()];
    uint32_t n = at.tensor.group;
    uint32_t bits = at.tensor.bits;
    float levels = (float)((1 << bits) - 1);
    for (uint32_t i = lane_id(); i < n; i += warp_lanes) {
        codes[i] = (uint8_t)(__float_as_uint(code_of(scale, y[i], levels)) & 0xff);
    }
    __syncwarp();
    pack_codes(codes, at.tensor.order, n, bits, to);
    __syncwarp();
}

/* The scale of a vector, and where there are zeros its z, to be packed when all are there. */
static __device__ void store_meta(const generic_row &at, uint32_t token, uint32_t meta)
{
    uint32_t vector = at.row * at.part.n_tokens + token;
    if (has_zeros(at.tensor)) {
        at.parts.scales()[vector] = (uint16_t)(meta >> 16);
        at.shared->zeros[token] = (uint8_t)(meta & 0xff);
    } else {
        at.parts.meta[vector] = meta;
    }
}

/* One plane of n zeros, by all threads. */
static __device__ void pack_zeros_plane(const uint8_t *zeros, uint32_t n, uint32_t plane_bits,
                                        uint32_t shift, uint8_t *to)
{
    uint32_t a_byte = 8 / plane_bits;
    for (uint32_t byte = threadIdx.x; byte * a_byte < n; byte += blockDim.x) {
        uint32_t packed = 0;
        for (uint32_t i = 0; i < a_byte && byte * a_byte + i < n; i++) {
            uint32_t zero = zeros[byte * a_byte + i];
            packed |= (zero >> shift & ((1u << plane_bits) - 1)) << i * plane_bits;
        }
        to[byte] = (uint8_t)packed;
    }
}

/* Those of a row, in shared memory, by all threads when every vector has been stored. */
static __device__ void pack_zeros(const uint8_t *zeros, uint32_t n, uint32_t bits, uint8_t *to)
{
    uint32_t low_bits = saw_low_bits(bits);
    __syncthreads();
    pack_zeros_plane(zeros, n, bits - low_bits, low_bits, to);
    if (low_bits != 0) {
        pack_zeros_plane(zeros, n, low_bits, 0, to + (n * (bits - low_bits) + 7) / 8);
    }
}

static __device__ void encode_row_generic(const struct kvf_gpu_work &work, uint32_t tensors)
{
    __shared__ generic_shared shared;
    uint32_t n_rows = saw_rows_max(&work, tensors);
    uint32_t row = blockIdx.x % n_rows;
    const struct kvf_gpu_part part = part_of(work, blockIdx.x / n_rows);
    const struct kvf_gpu_tensor &tensor = work.tensors[part.is_v];
    if ((tensors >> part.is_v & 1) == 0 || row >= tensor.n_rows) {
        return;
    }
    const generic_row at = {
        tensor, part, saw_parts(tensor, part), row_pages(work, part, tensor, row), row, &shared};
    if (row == 0) {
        zero_gaps(tensor, at.parts, threadIdx.x, blockDim.x);
    }
    if (at.parts.mean_bytes != 0) {
        find_samples(at);
        make_mean(at);
    }
    if (at.parts.mean != nullptr) {
        rotate_mean(at);
    }
    generic_range range;
    range.levels = (float)((1 << tensor.bits) - 1);
    range.levels_inverse = __fdiv_rn(1.0f, range.levels);
    for (uint32_t token = warp_id(); token < part.n_tokens; token += generic_warps) {
        range.is_escape = load_rotated(at, token, &range.min, &range.max);
        saw_scale scale = tensor.n_clips != 0 ? search_scale(at, range)
                                              : scale_of(tensor, range, tensor.clip_ratio).scale;
        uint32_t vector = row * part.n_tokens + token;
        store_codes_of(at, scale, at.parts.codes + vector * (uint32_t)tensor.code_bytes);
        if (lane_id() == 0) {
            store_meta(at, token, scale.meta);
        }
        bool is_escape = scale.meta == (uint32_t)KVF_SAW_ESCAPE_SCALE << 16;
        count_escapes(work, part, is_escape && lane_id() == 0);
    }
    if (has_zeros(tensor)) {
        pack_zeros(shared.zeros, part.n_tokens, tensor.bits,
                   at.parts.zeros(tensor, row, part.n_tokens));
    }
}

/* -------------------------------------------------------------------------------------------------
 * Decode
 */
/* n codes from their planes, by a warp. */
static __device__ void unpack_codes(const uint8_t *from, const uint8_t *order, uint32_t n,
                                    uint32_t bits, int32_t *codes)
{
    uint32_t low_bits = saw_low_bits(bits);
    uint32_t high_bits = bits - low_bits;
    const uint8_t *low = from + (n * high_bits + 7) / 8;
    for (uint32_t position = lane_id(); position < n; position += warp_lanes) {
        uint32_t code = field_of(from, high_bits, position);
        if (low_bits != 0) {
            code = code << low_bits | field_of(low, low_bits, position);
        }
        codes[order[position]] = (int32_t)code;
    }
    __syncwarp();
}

/* What a stored vector begins with and its scale. */
struct generic_stored {
    float lo;
    float scale;
};

static __device__ generic_stored stored_at(const generic_row &at, uint32_t token)
{
    const struct kvf_gpu_tensor &tensor = at.tensor;
    uint32_t n = at.part.n_tokens;
    uint32_t vector = at.row * n + token;
    if (!has_zeros(tensor)) {
        uint32_t meta = at.parts.meta[vector];
        return {f32_of_half_bits(meta & 0xffff), f32_of_half_bits(meta >> 16)};
    }
    float scale = f32_of_half_bits(at.parts.scales()[vector]);
    uint32_t zero = zero_at(at.parts.zeros(tensor, at.row, n), n, tensor.bits, token);
    return {lo_of_zero(scale, (float)zero + saw_zero_shift(tensor)), scale};
}

static __device__ void store_values_of(const generic_row &at, const int32_t *z,
                                       const generic_stored &stored, uint8_t *to)
{
    const struct kvf_gpu_tensor &tensor = at.tensor;
    float offset = stored.lo * tensor.sqrt_order;
    float factor = stored.scale * tensor.rsqrt_order;
    for (uint32_t i = lane_id(); i < tensor.group; i += warp_lanes) {
        float sign = is_flipped(tensor, at.row, i) ? -1.0f : 1.0f;
        float add = at.shared->mean[i];
        if (i % tensor.rot_order == 0) {
            add = add + offset * sign;
        }
        store_element(tensor.dtype, to, i, __fmaf_rn(factor * sign, (float)z[i], add));
    }
    __syncwarp();
}

static __device__ void decode_row_generic(const struct kvf_gpu_work &work, uint32_t tensors)
{
    __shared__ generic_shared shared;
    uint32_t n_rows = saw_rows_max(&work, tensors);
    uint32_t row = blockIdx.x % n_rows;
    const struct kvf_gpu_part part = parts_of(work)[blockIdx.x / n_rows];
    const struct kvf_gpu_tensor &tensor = work.tensors[part.is_v];
    if ((tensors >> part.is_v & 1) == 0 || row >= tensor.n_rows) {
        return;
    }
    const generic_row at = {
        tensor, part, saw_parts(tensor, part), row_pages(work, part, tensor, row), row, &shared};
    for (uint32_t i = threadIdx.x; i < tensor.group; i += SAW_GENERIC_THREADS) {
        uint32_t half = 0;
        if (at.parts.mean != nullptr) {
            half = reinterpret_cast<const uint16_t *>(at.parts.mean)[row * tensor.group + i];
        }
        shared.mean[i] = f32_of_half_bits(half);
    }
    __syncthreads();
    for (uint32_t token = warp_id(); token < part.n_wanted; token += generic_warps) {
        uint32_t vector = row * part.n_tokens + part.token_first + token;
        vector_pair<int32_t> &codes = shared.integers[warp_id()];
        unpack_codes(at.parts.codes + vector * (uint32_t)tensor.code_bytes, tensor.order,
                     tensor.group, tensor.bits, codes.now);
        rotate(codes, tensor.group, tensor.rot_order, true);
        store_values_of(at, codes.now, stored_at(at, part.token_first + token),
                        at.pages.vector(token));
    }
}

} /* namespace kvf */

#endif /* KVF_CODEC_CODEC_SAW_GENERIC_CUH */
