/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_tq.cu: kernels of the tq codec. Bytes are those of codec_tq_scalar.c.
 *
 *   kvf_tq_encode_<dim>_<bits>, kvf_tq_decode_<dim>_<bits>   bf16, on tensor cores
 *   kvf_tq_encode_split_<bits>, kvf_tq_decode_split_<bits>   bf16 of 128 channels, split
 *   kvf_tq_encode, kvf_tq_decode                             everything else
 *
 * codec_tq_gpu.c chooses.
 */
#include "codec/codec_tq_decode.cuh"
#include "codec/codec_tq_encode.cuh"
#include "codec/codec_tq_generic.cuh"
#include "codec/codec_tq_split.cuh"
#include "codec/codec_tq_split_decode.cuh"

#define KVF_TQ_FAST(dim, bits)                                                                     \
    extern "C" __global__ void __launch_bounds__(SAW_ENCODE_THREADS,                               \
                                                 saw_encode_blocks_a_processor(dim))               \
        kvf_tq_encode_##dim##_##bits(const __grid_constant__ struct kvf_gpu_work work,             \
                                     uint32_t tensors)                                             \
    {                                                                                              \
        kvf::tq_encode_rows_fast<dim, bits>(work, tensors);                                        \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(saw_decode_threads(bits),                         \
                                                 saw_decode_blocks_a_processor(dim, bits))         \
        kvf_tq_decode_##dim##_##bits(const __grid_constant__ struct kvf_gpu_work work,             \
                                     uint32_t tensors)                                             \
    {                                                                                              \
        kvf::tq_decode_row_fast<dim, bits>(work, tensors);                                         \
    }

KVF_TQ_FAST(128, 2)
KVF_TQ_FAST(128, 3)
KVF_TQ_FAST(128, 4)

#define KVF_TQ_SPLIT(bits)                                                                         \
    extern "C" __global__ void __launch_bounds__(SAW_GENERIC_THREADS, 4)                           \
        kvf_tq_encode_split_##bits(const __grid_constant__ struct kvf_gpu_work work,               \
                                   uint32_t tensors)                                               \
    {                                                                                              \
        kvf::tq_encode_row_split<bits>(work, tensors);                                             \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(SAW_GENERIC_THREADS, 4)                           \
        kvf_tq_decode_split_##bits(const __grid_constant__ struct kvf_gpu_work work,               \
                                   uint32_t tensors)                                               \
    {                                                                                              \
        kvf::tq_decode_row_split<bits>(work, tensors);                                             \
    }

KVF_TQ_SPLIT(2)
KVF_TQ_SPLIT(3)

extern "C" __global__ void __launch_bounds__(SAW_GENERIC_THREADS)
    kvf_tq_encode(const __grid_constant__ struct kvf_gpu_work work, uint32_t tensors)
{
    kvf::tq_encode_row_generic(work, tensors);
}

extern "C" __global__ void __launch_bounds__(SAW_GENERIC_THREADS)
    kvf_tq_decode(const __grid_constant__ struct kvf_gpu_work work, uint32_t tensors)
{
    kvf::tq_decode_row_generic(work, tensors);
}
