/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_kivi.cu: kernels of the kivi codec. Bytes are those of codec_kivi_scalar.c.
 *
 *   kvf_kivi_encode_128_<bits>, kvf_kivi_decode_128_<bits>   bf16, heads of 128
 *   kvf_kivi_encode, kvf_kivi_decode                         everything else
 *
 * All take groups along tokens and along channels. codec_kivi_gpu.c chooses, codec_kivi_shape.h
 * says how many thread blocks.
 */
#include "codec/codec_kivi_fast.cuh"
#include "codec/codec_kivi_generic.cuh"

#define KVF_KIVI_FAST(bits)                                                                        \
    extern "C" __global__ void __launch_bounds__(KIVI_THREADS, KIVI_FAST_BLOCKS_A_PROCESSOR)       \
        kvf_kivi_encode_128_##bits(const __grid_constant__ struct kvf_gpu_work work,               \
                                   uint32_t tensors)                                               \
    {                                                                                              \
        kvf::kivi::encode_fast<128, bits>(work, tensors);                                          \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(KIVI_THREADS, KIVI_FAST_BLOCKS_A_PROCESSOR)       \
        kvf_kivi_decode_128_##bits(const __grid_constant__ struct kvf_gpu_work work,               \
                                   uint32_t tensors)                                               \
    {                                                                                              \
        kvf::kivi::decode_fast<128, bits>(work, tensors);                                          \
    }

KVF_KIVI_FAST(2)
KVF_KIVI_FAST(4)

extern "C" __global__ void __launch_bounds__(KIVI_THREADS)
    kvf_kivi_encode(const __grid_constant__ struct kvf_gpu_work work, uint32_t tensors)
{
    kvf::kivi::encode_generic(work, tensors);
}

extern "C" __global__ void __launch_bounds__(KIVI_THREADS)
    kvf_kivi_decode(const __grid_constant__ struct kvf_gpu_work work, uint32_t tensors)
{
    kvf::kivi::decode_generic(work, tensors);
}
