/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw.cu: kernels of the saw codec. Bytes are those of codec_saw_scalar.c.
 *
 *   kvf_saw_encode_<dim>_<bits>, kvf_saw_decode_<dim>_<bits>   bf16, on tensor cores
 *   kvf_saw_encode, kvf_saw_decode                             everything else
 *
 * codec_saw_gpu.c chooses, codec_saw_shape.h says how many thread blocks.
 */
#include "codec/codec_saw_decode.cuh"
#include "codec/codec_saw_encode.cuh"
#include "codec/codec_saw_generic.cuh"

/* Thread blocks a multiprocessor: what registers and shared memory have room for. */
#define KVF_SAW_FAST(dim, bits, encode_blocks, decode_blocks)                                      \
    extern "C" __global__ void __launch_bounds__(kvf::saw_encode_threads_of<dim>, encode_blocks)   \
        kvf_saw_encode_##dim##_##bits(const __grid_constant__ struct kvf_gpu_work work,            \
                                      uint32_t tensors)                                            \
    {                                                                                              \
        kvf::encode_row_fast<dim, bits>(work, tensors);                                            \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(SAW_DECODE_THREADS, decode_blocks)                \
        kvf_saw_decode_##dim##_##bits(const __grid_constant__ struct kvf_gpu_work work,            \
                                      uint32_t tensors)                                            \
    {                                                                                              \
        kvf::decode_row_fast<dim, bits>(work, tensors);                                            \
    }

KVF_SAW_FAST(64, 2, 6, 3)
KVF_SAW_FAST(64, 3, 6, 3)
KVF_SAW_FAST(64, 4, 6, 3)
KVF_SAW_FAST(64, 5, 6, 3)
KVF_SAW_FAST(64, 6, 6, 3)
KVF_SAW_FAST(64, 8, 6, 3)
KVF_SAW_FAST(128, 2, 3, 3)
KVF_SAW_FAST(128, 3, 3, 3)
KVF_SAW_FAST(128, 4, 3, 3)
KVF_SAW_FAST(128, 5, 3, 3)
KVF_SAW_FAST(128, 6, 3, 3)
KVF_SAW_FAST(128, 8, 3, 3)
KVF_SAW_FAST(256, 2, 1, 2)
KVF_SAW_FAST(256, 3, 1, 2)
KVF_SAW_FAST(256, 4, 1, 2)
KVF_SAW_FAST(256, 5, 1, 2)
KVF_SAW_FAST(256, 6, 1, 2)
KVF_SAW_FAST(256, 8, 1, 2)

extern "C" __global__ void __launch_bounds__(SAW_GENERIC_THREADS)
    kvf_saw_encode(const __grid_constant__ struct kvf_gpu_work work, uint32_t tensors)
{
    kvf::encode_row_generic(work, tensors);
}

extern "C" __global__ void __launch_bounds__(SAW_GENERIC_THREADS)
    kvf_saw_decode(const __grid_constant__ struct kvf_gpu_work work, uint32_t tensors)
{
    kvf::decode_row_generic(work, tensors);
}
