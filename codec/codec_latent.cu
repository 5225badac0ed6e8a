/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_latent.cu: see codec_latent.h. Thread blocks: as many as the elements take.
 */
#include "codec/codec_elements.cuh"
#include "codec/codec_latent.h"

static __device__ __forceinline__ uint64_t first_of_thread()
{
    return ((uint64_t)blockIdx.x * KVF_GPU_LATENT_THREADS + threadIdx.x) * KVF_GPU_LATENT_UNIT;
}

/* Rounded; what is no number stays none, whatever its bits. */
static __device__ __forceinline__ void store_rounded(uint32_t dtype, uint8_t *to, uint32_t i,
                                                     float value)
{
    if (value != value) {
        reinterpret_cast<uint16_t *>(to)[i] = dtype == KVF_DTYPE_BF16 ? 0x7fc0 : 0x7e00;
    } else {
        kvf::store_element((uint8_t)dtype, to, i, value);
    }
}

extern "C" __global__ void __launch_bounds__(KVF_GPU_LATENT_THREADS)
    kvf_latent_clean(const __grid_constant__ struct kvf_gpu_latent_work work)
{
    constexpr uint32_t limit_bits = (127 + 64) << 23; /* of fp32: 2^64 */
    uint64_t first = first_of_thread();
    if (first >= work.n) {
        return;
    }
    uint16_t *at = kvf::at_address<uint16_t>(work.from) + first;
    const uint8_t *bytes = reinterpret_cast<const uint8_t *>(at);
    for (uint32_t i = 0; i < KVF_GPU_LATENT_UNIT; i++) {
        float value = kvf::load_element((uint8_t)work.dtype, bytes, i);
        if ((__float_as_uint(value) & 0x7fffffff) >= limit_bits) {
            at[i] = 0;
        }
    }
}

extern "C" __global__ void __launch_bounds__(KVF_GPU_LATENT_THREADS)
    kvf_latent_narrow(const __grid_constant__ struct kvf_gpu_latent_work work)
{
    uint64_t first = first_of_thread();
    if (first >= work.n) {
        return;
    }
    const float *from = kvf::at_address<const float>(work.from) + first;
    uint8_t *to = kvf::at_address<uint8_t>(work.to) + first * sizeof(uint16_t);
    for (uint32_t i = 0; i < KVF_GPU_LATENT_UNIT; i++) {
        store_rounded(work.dtype, to, i, from[i]);
    }
}

extern "C" __global__ void __launch_bounds__(KVF_GPU_LATENT_THREADS)
    kvf_latent_subtract(const __grid_constant__ struct kvf_gpu_latent_work work)
{
    uint64_t first = first_of_thread();
    if (first >= work.n) {
        return;
    }
    const uint8_t *from = kvf::at_address<const uint8_t>(work.from) + first * sizeof(uint16_t);
    const float *less = kvf::at_address<const float>(work.less) + first;
    uint8_t *to = kvf::at_address<uint8_t>(work.to) + first * sizeof(uint16_t);
    for (uint32_t i = 0; i < KVF_GPU_LATENT_UNIT; i++) {
        store_rounded(work.dtype, to, i, kvf::load_element((uint8_t)work.dtype, from, i) - less[i]);
    }
}
