/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_closed_loop.cu: kernels for layers that are deltas (closed_loop.h). Bytes, and what is
 * decoded of them, are those of the C codecs.
 *
 *   kvf_loop_encode_tile_2 to _4, kvf_loop_decode_tile_2 to _4   bf16 groups of 128, rotated, with
 *                                                                zeros: differences of so many bits
 *   kvf_loop_encode_128, kvf_loop_decode_128                     other groups of 128, in registers
 *   kvf_loop_encode, kvf_loop_decode                             everything else
 *
 * codec_closed_loop_gpu.h says what a launch is of.
 */
#include "codec/codec_closed_loop_tile.cuh"

extern "C" __global__ void __launch_bounds__(LOOP_THREADS, LOOP_FAST_BLOCKS)
    kvf_loop_encode_128(const __grid_constant__ struct kvf_gpu_work work, uint32_t)
{
    kvf::loop_encode<true>(work);
}

extern "C" __global__ void __launch_bounds__(LOOP_THREADS)
    kvf_loop_encode(const __grid_constant__ struct kvf_gpu_work work, uint32_t)
{
    kvf::loop_encode<false>(work);
}

extern "C" __global__ void __launch_bounds__(LOOP_THREADS, LOOP_FAST_BLOCKS)
    kvf_loop_decode_128(const __grid_constant__ struct kvf_gpu_work work, uint32_t)
{
    kvf::loop_decode<true>(work);
}

extern "C" __global__ void __launch_bounds__(LOOP_THREADS)
    kvf_loop_decode(const __grid_constant__ struct kvf_gpu_work work, uint32_t)
{
    kvf::loop_decode<false>(work);
}

#define TILE(bits)                                                                                 \
    extern "C" __global__ void __launch_bounds__(LOOP_TILE_THREADS, LOOP_TILE_BLOCKS)              \
        kvf_loop_encode_tile_##bits(const __grid_constant__ struct kvf_gpu_work work, uint32_t)    \
    {                                                                                              \
        kvf::loop_encode_tile<bits>(work);                                                         \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(LOOP_TILE_THREADS, LOOP_TILE_BLOCKS)              \
        kvf_loop_decode_tile_##bits(const __grid_constant__ struct kvf_gpu_work work, uint32_t)    \
    {                                                                                              \
        kvf::loop_decode_tile<bits>(work);                                                         \
    }

TILE(2)
TILE(3)
TILE(4)
