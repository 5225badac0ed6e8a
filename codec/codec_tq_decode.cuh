/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_tq_decode.cuh: decode by tq to bf16 of rows whose rotation is Sylvester's of 64, 128 or
 * 256, the whole vector, by the warps of codec_saw_decode.cuh.
 */
#ifndef KVF_CODEC_CODEC_TQ_DECODE_CUH
#define KVF_CODEC_CODEC_TQ_DECODE_CUH

#include "codec/codec_saw_decode.cuh"
#include "codec/codec_tq_device.cuh"
#include "codec/codec_tq_shape.h"

namespace kvf
{

template <int dim, int bits>
static __device__ __forceinline__ void tq_decode_row_fast(const struct kvf_gpu_work &work,
                                                          uint32_t tensors)
{
    __shared__ uint32_t pairs[KVF_TQ_TABLE_WORDS]; /* levels of two codes, as fp16 */
    constexpr uint32_t mask = (1 << bits) - 1;
    for (uint32_t i = threadIdx.x; i < KVF_TQ_TABLE_WORDS; i += blockDim.x) {
        float low = (float)tq_level(bits, i & mask);
        float high = (float)tq_level(bits, i >> 4 & mask);
        pairs[i] = __half_as_ushort(__float2half_rn(low)) |
                   (uint32_t)__half_as_ushort(__float2half_rn(high)) << 16;
    }
    decode_row_of<dim, bits, decode_codec::tq>(work, tensors, pairs, nullptr);
}

} /* namespace kvf */

#endif /* KVF_CODEC_CODEC_TQ_DECODE_CUH */
