/* SPDX-License-Identifier: Apache-2.0
 *
 * saw_swapped.cu: the encoder with two stages of its rotation swapped: its bytes must not pass for
 * the right ones.
 */
#include "codec/codec_saw_encode.cuh"

extern "C" __global__ void __launch_bounds__(SAW_ENCODE_THREADS)
    kvf_test_saw_encode_swapped(const __grid_constant__ struct kvf_gpu_work work, uint32_t tensors)
{
    kvf::encode_rows_fast<128, 8, kvf::encode_variant::swapped>(work, tensors);
}
