/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw.cu: kernels of the saw codec. Bytes are those of codec_saw_scalar.c.
 *
 *   kvf_saw_encode_<dim>_<bits>, kvf_saw_decode_<dim>_<bits>   bf16, on tensor cores
 *   kvf_saw_search_<dim>_<bits>                                the first with three clip ratios
 *   kvf_saw_encode_zeros_128_<bits>, kvf_saw_decode_zeros_128_<bits>  the same, zeros for lo
 *   kvf_saw_encode, kvf_saw_decode                             everything else
 *
 * codec_saw_gpu.c chooses, codec_saw_shape.h says how many thread blocks.
 */
#include "codec/codec_saw_decode.cuh"
#include "codec/codec_saw_encode.cuh"
#include "codec/codec_saw_encode_zeros.cuh"
#include "codec/codec_saw_generic.cuh"

/* Thread blocks a multiprocessor: what registers and shared memory have room for. */
#define KVF_SAW_FAST(dim, bits)                                                                    \
    extern "C" __global__ void __launch_bounds__(SAW_ENCODE_THREADS,                               \
                                                 saw_encode_blocks_a_processor(dim))               \
        kvf_saw_encode_##dim##_##bits(const __grid_constant__ struct kvf_gpu_work work,            \
                                      uint32_t tensors)                                            \
    {                                                                                              \
        kvf::encode_rows_fast<dim, bits>(work, tensors);                                           \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(saw_decode_threads(bits),                         \
                                                 saw_decode_blocks_a_processor(dim, bits))         \
        kvf_saw_decode_##dim##_##bits(const __grid_constant__ struct kvf_gpu_work work,            \
                                      uint32_t tensors)                                            \
    {                                                                                              \
        kvf::decode_row_fast<dim, bits>(work, tensors);                                            \
    }

KVF_SAW_FAST(64, 2)
KVF_SAW_FAST(64, 3)
KVF_SAW_FAST(64, 4)
KVF_SAW_FAST(64, 5)
KVF_SAW_FAST(64, 6)
KVF_SAW_FAST(64, 8)
KVF_SAW_FAST(128, 2)
KVF_SAW_FAST(128, 3)
KVF_SAW_FAST(128, 4)
KVF_SAW_FAST(128, 5)
KVF_SAW_FAST(128, 6)
KVF_SAW_FAST(128, 8)
KVF_SAW_FAST(256, 2)
KVF_SAW_FAST(256, 3)
KVF_SAW_FAST(256, 4)
KVF_SAW_FAST(256, 5)
KVF_SAW_FAST(256, 6)
KVF_SAW_FAST(256, 8)

#define KVF_SAW_SEARCH(dim, bits)                                                                  \
    extern "C" __global__ void __launch_bounds__(SAW_ENCODE_THREADS,                               \
                                                 saw_encode_blocks_a_processor(dim))               \
        kvf_saw_search_##dim##_##bits(const __grid_constant__ struct kvf_gpu_work work,            \
                                      uint32_t tensors)                                            \
    {                                                                                              \
        kvf::encode_rows_fast<dim, bits, kvf::encode_variant::search>(work, tensors);              \
    }

KVF_SAW_SEARCH(128, 2)
KVF_SAW_SEARCH(128, 3)

#define KVF_SAW_ZEROS(dim, bits)                                                                   \
    extern "C" __global__ void __launch_bounds__(saw_decode_threads(bits),                         \
                                                 saw_decode_blocks_a_processor(dim, bits))         \
        kvf_saw_decode_zeros_##dim##_##bits(const __grid_constant__ struct kvf_gpu_work work,      \
                                            uint32_t tensors)                                      \
    {                                                                                              \
        kvf::decode_row_zeros<dim, bits>(work, tensors);                                           \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(SAW_ZEROS_THREADS, 2)                             \
        kvf_saw_encode_zeros_##dim##_##bits(const __grid_constant__ struct kvf_gpu_work work,      \
                                            uint32_t tensors)                                      \
    {                                                                                              \
        kvf::encode_row_zeros<bits>(work, tensors);                                                \
    }

KVF_SAW_ZEROS(128, 2)
KVF_SAW_ZEROS(128, 3)
KVF_SAW_ZEROS(128, 4)

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
