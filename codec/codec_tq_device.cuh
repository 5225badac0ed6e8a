/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_tq_device.cuh: what the kernels of tq share: where parts lie, codebooks, scales. Numbers in
 * comments are steps of codec_tq.h.
 */
#ifndef KVF_CODEC_CODEC_TQ_DEVICE_CUH
#define KVF_CODEC_CODEC_TQ_DEVICE_CUH

#include "codec/codec_saw_device.cuh"
#include "codec/codec_tq.h"

namespace kvf
{

/* By width. */
static __constant__ uint8_t tq_thresholds[5][KVF_TQ_THRESHOLDS_MAX] = {
    {}, {}, {KVF_TQ_THRESHOLDS_2}, {KVF_TQ_THRESHOLDS_3}, {KVF_TQ_THRESHOLDS_4}};
static __constant__ uint8_t tq_levels[5][KVF_TQ_LEVELS_MAX] = {
    {}, {KVF_TQ_LEVELS_1}, {KVF_TQ_LEVELS_2}, {KVF_TQ_LEVELS_3}, {KVF_TQ_LEVELS_4}};

static __device__ __forceinline__ int32_t tq_level(uint32_t bits, uint32_t code)
{
    return (int32_t)tq_levels[bits][code] - KVF_TQ_LEVEL_BIAS;
}

/* (6) The code of m. */
static __device__ __forceinline__ uint32_t tq_code(uint32_t bits, uint32_t m)
{
    uint32_t half = 1u << (bits - 1);
    uint32_t a = m >= 128 ? m - 128 : 127 - m;
    uint32_t above = 0;
    for (uint32_t t = 0; t + 1 < half; t++) {
        above += tq_thresholds[bits][t] <= a;
    }
    return m >= 128 ? half + above : half - 1 - above;
}

/* (6) m: the bits of a subnormal number, in which the exact product is rounded once. With f and
 * middle 0 it is 0, whose code is 0; else middle is a half. */
static __device__ __forceinline__ uint32_t tq_step(float y, float f, float middle)
{
    constexpr float grid = (float)KVF_TQ_GRID * 0x1p-149f;
    return __float_as_uint(__fmul_rn(fma_saturated(y, f, middle), grid));
}

/* Roots, reciprocals and quotients, rounded as the compiler's are, by the steps that it takes where
 * numbers are not near the ends of the range, without its branches for those: a vector with such a
 * number is an escape or 0, whatever comes out here. */
static __device__ __forceinline__ float tq_root(float square)
{
    float estimate = estimate_reciprocal_root(square);
    float root = square * estimate;
    root = __fmaf_rn(__fmaf_rn(-root, root, square), 0.5f * estimate, root);
    return square != 0.0f ? root : 0.0f;
}

static __device__ __forceinline__ float tq_reciprocal(float x)
{
    float estimate = estimate_reciprocal(x);
    return __fmaf_rn(estimate, -__fmaf_rn(estimate, x, -1.0f), estimate);
}

static __device__ __forceinline__ float tq_quotient(float a, float b)
{
    float estimate = estimate_reciprocal(b);
    estimate = __fmaf_rn(estimate, __fmaf_rn(-estimate, b, 1.0f), estimate);
    float quotient = a * estimate;
    return __fmaf_rn(estimate, __fmaf_rn(-quotient, b, a), quotient);
}

/* (6) root: of S. */
static __device__ __forceinline__ float tq_quantizer(const struct kvf_gpu_rotation &rotation,
                                                     float root)
{
    float f = rotation.quantize * tq_reciprocal(root);
    return root != 0.0f ? f : 0.0f;
}

static __device__ __forceinline__ uint32_t tq_scale_bits(float scale)
{
    float limited = scale < KVF_TQ_SCALE_MAX ? scale : KVF_TQ_SCALE_MAX;
    return __half_as_ushort(__float2half_rn(limited));
}

/* (5) False: the root of the mean square makes the vector an escape. */
static __device__ __forceinline__ bool tq_fits(const struct kvf_gpu_rotation &rotation, float root)
{
    float mean = root * rotation.root_mean_square;
    return (root == 0.0f) | ((mean >= KVF_TQ_RMS_MIN) & (mean < KVF_TQ_RMS_MAX));
}

/* (7) Do scales depend on P, or on Q? */
static __device__ __forceinline__ bool tq_takes_product(const struct kvf_gpu_tensor &tensor)
{
    uint32_t choice = tensor.flags & KVF_TENSOR_SCALE_MASK;
    return choice == KVF_TENSOR_SCALE_LEAST_SQUARES || choice == KVF_TENSOR_SCALE_UNBIASED;
}

static __device__ __forceinline__ bool tq_takes_power(const struct kvf_gpu_tensor &tensor)
{
    uint32_t choice = tensor.flags & KVF_TENSOR_SCALE_MASK;
    return choice == KVF_TENSOR_SCALE_LEAST_SQUARES || choice == KVF_TENSOR_SCALE_MATCHED;
}

/* (7) square: S, product: P, power: Q. */
static __device__ __forceinline__ uint32_t tq_choose_scale(const struct kvf_gpu_tensor &tensor,
                                                           const struct kvf_gpu_rotation &rotation,
                                                           float square, float product, float power)
{
    float scale;
    switch (tensor.flags & KVF_TENSOR_SCALE_MASK) {
    case KVF_TENSOR_SCALE_MATCHED:
        scale = tq_root(tq_quotient(square, power)) * rotation.scale;
        break;
    case KVF_TENSOR_SCALE_LEAST_SQUARES:
        scale = tq_quotient(product, power) * rotation.scale;
        break;
    case KVF_TENSOR_SCALE_UNBIASED:
        scale = tq_quotient(square, product) * rotation.scale;
        break;
    default:
        scale = tq_root(square) * rotation.root_mean_square;
        break;
    }
    return square != 0.0f ? tq_scale_bits(scale) : 0;
}

/* Parts of one tensor of one layer: as those of saw, but for lists of channels behind the means,
 * and for what there is of a vector in the meta part. */
struct tq_parts {
    saw_parts saw;
    uint8_t *lists; /* NULL: not split */
    uint8_t *meta;
    uint32_t meta_bytes; /* of a vector */

    __device__ __forceinline__ tq_parts(const struct kvf_gpu_tensor &tensor,
                                        const struct kvf_gpu_part &part)
        : saw(tensor, part), meta_bytes(tensor.n_scales * (uint32_t)KVF_TQ_SCALE_BYTES)
    {
        uint8_t *at = at_address<uint8_t>(part.stored);
        uint32_t means_bytes = saw.mean_bytes != 0 ? 2u * tensor.n_heads * tensor.dim : 0;
        lists = (tensor.flags & KVF_TENSOR_SPLIT) != 0 ? at + means_bytes : nullptr;
        meta = at + tq_mean_bytes(tensor, part.n_tokens);
        saw.codes = meta + part_bytes(saw.n_vectors * meta_bytes);
    }
};

/* What the parts do not fill, by n_threads threads, of which the caller is the given one. */
static __device__ __forceinline__ void tq_zero_gaps(const struct kvf_gpu_tensor &tensor,
                                                    const tq_parts &parts, uint64_t stored,
                                                    uint32_t thread, uint32_t n_threads)
{
    uint8_t *at = at_address<uint8_t>(stored);
    uint32_t means_bytes = parts.saw.mean_bytes != 0 ? 2u * tensor.n_heads * tensor.dim : 0;
    uint32_t bytes = means_bytes + tensor.n_rows * tq_list_bytes(tensor);
    zero_bytes(at + bytes, part_bytes(bytes) - bytes, thread, n_threads);
    bytes = parts.saw.n_vectors * parts.meta_bytes;
    zero_bytes(parts.meta + bytes, part_bytes(bytes) - bytes, thread, n_threads);
    bytes = parts.saw.n_vectors * tensor.code_bytes;
    zero_bytes(parts.saw.codes + bytes, part_bytes(bytes) - bytes, thread, n_threads);
}

} /* namespace kvf */

#endif /* KVF_CODEC_CODEC_TQ_DEVICE_CUH */
