/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_rebuild.cu: K and V of a layer from its product (codec_rebuild.h).
 *
 *   kvf_rebuild   a thread block a row of the product, a warp a vector
 *
 * It reads 4 bytes a value and writes what the pages have, 2 as a rule: what bounds it is memory.
 * Sums of the norm are fp32, in another order than on the host: results are alike within rounding.
 */
#include "codec/codec_elements.cuh"
#include "codec/codec_rebuild.h"

namespace kvf
{

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

} /* namespace kvf */

extern "C" __global__ void __launch_bounds__(KVF_GPU_REBUILD_THREADS)
    kvf_rebuild(const __grid_constant__ struct kvf_gpu_rebuild work)
{
    using namespace kvf;
    uint32_t index = blockIdx.x / work.item_tokens;
    uint32_t token = blockIdx.x - index * work.item_tokens;
    const struct kvf_gpu_rebuild_item item = at_address<const struct kvf_gpu_rebuild_item>(
        work.items)[index];
    if (token >= item.n_tokens) {
        return;
    }
    const float *row = at_address<const float>(work.product) + (uint64_t)blockIdx.x * work.width;
    uint32_t page = token / work.tokens_a_page;
    uint32_t slot = token - page * work.tokens_a_page;
    uint32_t id = at_address<const uint32_t>(work.page_ids)[item.first_page + page];
    uint32_t n_vectors = work.n_heads * (work.dim_v != 0 ? 2 : 1);
    for (uint32_t v = warp_id(); v < n_vectors; v += KVF_GPU_REBUILD_THREADS / warp_lanes) {
        uint32_t is_v = v >= work.n_heads ? 1 : 0;
        uint32_t head = v - is_v * work.n_heads;
        uint32_t dim = is_v != 0 ? work.dim_v : work.dim_k;
        const struct kvf_gpu_pages &pages = work.pages[is_v];
        uint64_t bias = is_v != 0 ? work.bias_v : work.bias_k;
        uint32_t element_bytes = work.dtype == KVF_DTYPE_F32 ? 4 : 2;
        const rebuild_vector at = {
            work,
            row + is_v * work.n_heads * work.dim_k + head * dim,
            bias != 0 ? at_address<const uint8_t>(bias) + head * dim * element_bytes : nullptr,
            at_address<uint8_t>(work.bases[is_v]) + id * pages.page_stride_bytes +
                slot * pages.token_stride_bytes + head * pages.head_stride_bytes,
            dim,
            item.position_first + token,
        };
        float norm = is_v == 0 && work.gain != 0 ? norm_of(at) : 1.0f;
        for (uint32_t i = lane_id(); i < dim; i += warp_lanes) {
            float value = is_v != 0 ? at.biased(i) : turned(at, norm, i);
            store_element(work.kv_dtype, at.to, i, value);
        }
    }
}
