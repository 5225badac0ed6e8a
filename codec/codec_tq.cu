/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_tq.cu: kernels of the tq codec. Bytes are those of codec_tq_scalar.c. codec_tq_gpu.c
 * chooses.
 */
#include "codec/codec_tq_generic.cuh"

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
