/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_rebuild.cu: K and V of a layer from its product (codec_rebuild.h).
 *
 *   kvf_rebuild_fast   a thread block a token, 8 elements of a vector a lane, all accesses of 16
 *                      bytes; the two elements that turn together come from the lane they are in
 *   kvf_rebuild        a thread block a token, a warp a vector: any layout, any number of elements
 *
 * They read 4 bytes a value and write what the pages have, 2 as a rule: what bounds them is memory.
 * Sums of the norm are fp32, in another order than on the host: results are alike within rounding.
 */
#include "codec/codec_elements.cuh"
#include "codec/codec_rebuild.h"

namespace kvf
{

constexpr uint32_t rebuild_warps = KVF_GPU_REBUILD_THREADS / warp_lanes;

/* The token of a thread block. */
struct rebuild_token {
    const struct kvf_gpu_rebuild &work;
    const float *product; /* its row; NULL: the piece is shorter */
    uint32_t position;
    uint32_t page; /* id */
    uint32_t slot; /* in it */

    __device__ __forceinline__ explicit rebuild_token(const struct kvf_gpu_rebuild &work_)
        : work(work_), product(nullptr)
    {
        uint32_t index = blockIdx.x / work.piece_tokens;
        uint32_t token = blockIdx.x - index * work.piece_tokens;
        const struct kvf_gpu_rebuild_piece &piece = work.pieces[index];
        if (token < piece.n_tokens) {
            uint32_t nth = token / work.tokens_a_page;
            product = at_address<const float>(work.product) +
                      (uint64_t)(piece.row + token) * work.width;
            position = piece.position_first + token;
            page = work.page_ids[piece.first_page + nth];
            slot = token - nth * work.tokens_a_page;
        }
    }

    __device__ __forceinline__ uint8_t *vector(bool is_v, uint32_t head) const
    {
        const struct kvf_gpu_pages &pages = work.pages[is_v];
        return at_address<uint8_t>(work.bases[is_v]) + page * pages.page_stride_bytes +
               slot * pages.token_stride_bytes + head * pages.head_stride_bytes;
    }
};

/* --- 8 elements a lane ------------------------------------------------------------------------ */

constexpr uint32_t lane_elements = 8;

static __device__ __forceinline__ void load_floats(float *to, const float *from, uint32_t n)
{
#pragma unroll
    for (uint32_t i = 0; i < n; i += 4) {
        float4 four = *reinterpret_cast<const float4 *>(from + i);
        to[i] = four.x;
        to[i + 1] = four.y;
        to[i + 2] = four.z;
        to[i + 3] = four.w;
    }
}

/* Elements of bf16 or fp16. */
static __device__ __forceinline__ void load_narrow(uint8_t dtype, const uint8_t *from,
                                                   float to[lane_elements])
{
    uint4 all = *reinterpret_cast<const uint4 *>(from);
    const uint32_t words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        bool is_bf16 = dtype == KVF_DTYPE_BF16;
        to[2 * i] = is_bf16 ? __uint_as_float(words[i] << 16) : f32_of_half_bits(words[i] & 0xffff);
        to[2 * i + 1] = is_bf16 ? __uint_as_float(words[i] & 0xffff0000)
                                : f32_of_half_bits(words[i] >> 16);
    }
}

/* The same, saturated as store_element does. */
static __device__ __forceinline__ uint32_t narrow_fp16(float value)
{
    return __half_as_ushort(__float2half_rn(fminf(fmaxf(value, -65504.0f), 65504.0f)));
}

static __device__ __forceinline__ void store_narrow(uint8_t dtype, uint8_t *to,
                                                    const float from[lane_elements])
{
    uint32_t words[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        if (dtype == KVF_DTYPE_BF16) {
            __nv_bfloat162 both = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
            memcpy(&words[i], &both, sizeof(both));
        } else {
            words[i] = narrow_fp16(from[2 * i]) | narrow_fp16(from[2 * i + 1]) << 16;
        }
    }
    store_global(to, words[0], words[1], words[2], words[3]);
}

/* How a lane's elements of K turn: the same for all heads of a token. */
template <int style> struct lane_turn {
    static constexpr bool is_half = style == KVF_ROPE_STYLE_HALF;
    static constexpr uint32_t n = style == KVF_ROPE_STYLE_NONE ? 1 : is_half ? 8 : 4;

    bool is_turned;
    uint32_t other; /* is_half: the lane of those that turn with these */
    float cosines[n];
    float sines[n]; /* of what is added */

    /* element: the first one's index in the vector. */
    __device__ __forceinline__ lane_turn(const rebuild_token &token, uint32_t element)
    {
        const struct kvf_gpu_rebuild &work = token.work;
        uint32_t half = work.rope_dims / 2;
        uint32_t first = !is_half ? element / 2 : element < half ? element : element - half;
        is_turned = style != KVF_ROPE_STYLE_NONE && element < work.rope_dims;
        other = lane_id();
        if constexpr (style != KVF_ROPE_STYLE_NONE) {
            if (is_turned) {
                uint64_t entry = (uint64_t)token.position * half + first;
                load_floats(cosines, at_address<const float>(work.cosines) + entry, n);
                load_floats(sines, at_address<const float>(work.sines) + entry, n);
            }
            if (is_half && is_turned) {
                bool is_first = element < half;
                other = is_first ? other + half / lane_elements : other - half / lane_elements;
                for (uint32_t i = 0; i < n; i++) {
                    sines[i] = is_first ? -sines[i] : sines[i];
                }
            }
        }
    }

    /* All lanes of the warp. */
    __device__ __forceinline__ void turn(float x[lane_elements]) const
    {
        if constexpr (is_half) {
#pragma unroll
            for (uint32_t i = 0; i < lane_elements; i++) {
                float y = __shfl_sync(all_lanes, x[i], other);
                x[i] = is_turned ? __fmaf_rn(x[i], cosines[i], y * sines[i]) : x[i];
            }
        } else if constexpr (style != KVF_ROPE_STYLE_NONE) {
#pragma unroll
            for (uint32_t i = 0; i < n; i++) {
                float a = x[2 * i];
                float b = x[2 * i + 1];
                x[2 * i] = is_turned ? __fmaf_rn(a, cosines[i], -(b * sines[i])) : a;
                x[2 * i + 1] = is_turned ? __fmaf_rn(b, cosines[i], a * sines[i]) : b;
            }
        }
    }
};

/* A head's elements that a lane has, of n_lanes. */
struct lane_vector {
    const struct kvf_gpu_rebuild &work;
    uint64_t bias; /* of K or V; 0: none */
    uint32_t dim;
    uint32_t n_lanes;
    uint32_t element; /* the lane's first */

    __device__ __forceinline__ void add_bias(float x[lane_elements], uint32_t head) const
    {
        float b[lane_elements];
        load_narrow(work.dtype, at_address<const uint8_t>(bias) + 2 * (head * dim + element), b);
#pragma unroll
        for (uint32_t i = 0; i < lane_elements; i++) {
            x[i] += b[i];
        }
    }

    /* All lanes of the warp; those without elements have zeroes. */
    __device__ __forceinline__ void normalize(float x[lane_elements]) const
    {
        float gain[lane_elements];
        float sum = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < lane_elements; i++) {
            sum = __fmaf_rn(x[i], x[i], sum);
        }
        for (uint32_t mask = 1; mask < n_lanes; mask *= 2) {
            sum += __shfl_xor_sync(all_lanes, sum, mask);
        }
        float norm = __fdiv_rn(1.0f, __fsqrt_rn(__fdiv_rn(sum, (float)dim) + work.eps));
        if (element < dim) {
            load_narrow(work.dtype, at_address<const uint8_t>(work.gain) + 2 * element, gain);
#pragma unroll
            for (uint32_t i = 0; i < lane_elements; i++) {
                x[i] = x[i] * norm * gain[i];
            }
        }
    }
};

/* All heads of K or V, two of each lane at a time so that twice as much is on its way. */
template <int style>
static __device__ __forceinline__ void rebuild_heads(const rebuild_token &token, bool is_v,
                                                     uint32_t warp)
{
    const struct kvf_gpu_rebuild &work = token.work;
    uint32_t dim = is_v ? work.dim_v : work.dim_k;
    uint32_t n_lanes = dim <= 64 ? 8 : dim <= 128 ? 16 : 32;
    const lane_vector vector = {work, is_v ? work.bias_v : work.bias_k, dim, n_lanes,
                                lane_id() % n_lanes * lane_elements};
    const lane_turn<style> turn(token, vector.element);
    const float *from = token.product + (is_v ? work.n_heads * work.dim_k : 0) + vector.element;
    uint32_t step = rebuild_warps * warp_lanes / n_lanes;
    uint32_t first = warp * (warp_lanes / n_lanes);
    for (; first < work.n_heads; first += 2 * step) {
        float x[2][lane_elements] = {};
        uint32_t heads[2];
        bool is_there[2];
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            heads[i] = first + i * step + lane_id() / n_lanes;
            is_there[i] = vector.element < dim && heads[i] < work.n_heads;
            if (is_there[i]) {
                load_floats(x[i], from + heads[i] * dim, lane_elements);
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            if (vector.bias != 0 && is_there[i]) {
                vector.add_bias(x[i], heads[i]);
            }
            if (!is_v && work.gain != 0) {
                vector.normalize(x[i]);
            }
            turn.turn(x[i]);
            if (is_there[i]) {
                store_narrow(work.kv_dtype, token.vector(is_v, heads[i]) + 2 * vector.element,
                             x[i]);
            }
        }
    }
}

/* K by all warps; V by those first that K has less for. */
template <int style> static __device__ __forceinline__ void rebuild_fast(const rebuild_token &token)
{
    const struct kvf_gpu_rebuild &work = token.work;
    uint32_t heads_a_warp = work.dim_k <= 64 ? 4 : work.dim_k <= 128 ? 2 : 1;
    uint32_t n_warps = ceil_div(work.n_heads, heads_a_warp) % rebuild_warps;
    rebuild_heads<style>(token, false, warp_id());
    if (work.dim_v != 0) {
        rebuild_heads<KVF_ROPE_STYLE_NONE>(token, true,
                                           (warp_id() + rebuild_warps - n_warps) % rebuild_warps);
    }
}

/* --- anything --------------------------------------------------------------------------------- */

struct rebuild_vector {
    const struct kvf_gpu_rebuild &work;
    const float *product;
    const uint8_t *bias; /* NULL: none */
    uint8_t *to;
    uint32_t dim;
    uint32_t position;

    __device__ __forceinline__ float biased(uint32_t i) const
    {
        return bias != nullptr ? product[i] + load_element(work.dtype, bias, i) : product[i];
    }
};

/* What an element is multiplied with beside its gain. */
static __device__ float norm_of(const rebuild_vector &at)
{
    float sum = 0.0f;
    for (uint32_t i = lane_id(); i < at.dim; i += warp_lanes) {
        float x = at.biased(i);
        sum = __fmaf_rn(x, x, sum);
    }
    for (uint32_t mask = 1; mask < warp_lanes; mask *= 2) {
        sum += __shfl_xor_sync(all_lanes, sum, mask);
    }
    return __fdiv_rn(1.0f, __fsqrt_rn(__fdiv_rn(sum, (float)at.dim) + at.work.eps));
}

static __device__ __forceinline__ float normed(const rebuild_vector &at, float norm, uint32_t i)
{
    float x = at.biased(i);
    if (at.work.gain == 0) {
        return x;
    }
    return x * norm * load_element(at.work.dtype, at_address<const uint8_t>(at.work.gain), i);
}

/* An element of K, turned. */
static __device__ __forceinline__ float turned(const rebuild_vector &at, float norm, uint32_t i)
{
    uint32_t half = at.work.rope_dims / 2;
    if (i >= 2 * half) {
        return normed(at, norm, i);
    }
    bool is_half = at.work.rope_style == KVF_ROPE_STYLE_HALF;
    uint32_t pair = is_half ? (i < half ? i : i - half) : i / 2;
    bool is_second = is_half ? i >= half : i % 2 != 0;
    float a = normed(at, norm, is_half ? pair : 2 * pair);
    float b = normed(at, norm, is_half ? pair + half : 2 * pair + 1);
    uint64_t entry = (uint64_t)at.position * half + pair;
    float cosine = at_address<const float>(at.work.cosines)[entry];
    float sine = at_address<const float>(at.work.sines)[entry];
    return is_second ? b * cosine + a * sine : a * cosine - b * sine;
}

static __device__ __forceinline__ void rebuild_any(const rebuild_token &token, uint32_t v)
{
    const struct kvf_gpu_rebuild &work = token.work;
    bool is_v = v >= work.n_heads;
    uint32_t head = is_v ? v - work.n_heads : v;
    uint32_t dim = is_v ? work.dim_v : work.dim_k;
    uint64_t bias = is_v ? work.bias_v : work.bias_k;
    uint32_t element_bytes = work.dtype == KVF_DTYPE_F32 ? 4 : 2;
    const rebuild_vector at = {
        work,
        token.product + (is_v ? work.n_heads * work.dim_k : 0) + head * dim,
        bias != 0 ? at_address<const uint8_t>(bias) + head * dim * element_bytes : nullptr,
        token.vector(is_v, head),
        dim,
        token.position,
    };
    float norm = !is_v && work.gain != 0 ? norm_of(at) : 1.0f;
    for (uint32_t i = lane_id(); i < dim; i += warp_lanes) {
        float value = is_v ? at.biased(i) : turned(at, norm, i);
        store_element(work.kv_dtype, at.to, i, value);
    }
}

} /* namespace kvf */

extern "C" __global__ void __launch_bounds__(KVF_GPU_REBUILD_THREADS)
    kvf_rebuild_fast(const __grid_constant__ struct kvf_gpu_rebuild work)
{
    const kvf::rebuild_token token(work);
    if (token.product == nullptr) {
        return;
    }
    if (work.rope_dims == 0) {
        kvf::rebuild_fast<KVF_ROPE_STYLE_NONE>(token);
    } else if (work.rope_style == KVF_ROPE_STYLE_HALF) {
        kvf::rebuild_fast<KVF_ROPE_STYLE_HALF>(token);
    } else {
        kvf::rebuild_fast<KVF_ROPE_STYLE_INTERLEAVED>(token);
    }
}

extern "C" __global__ void __launch_bounds__(KVF_GPU_REBUILD_THREADS)
    kvf_rebuild(const __grid_constant__ struct kvf_gpu_rebuild work)
{
    const kvf::rebuild_token token(work);
    uint32_t n_vectors = work.n_heads * (work.dim_v != 0 ? 2 : 1);
    for (uint32_t v = kvf::warp_id(); token.product != nullptr && v < n_vectors;
         v += kvf::rebuild_warps) {
        kvf::rebuild_any(token, v);
    }
}
