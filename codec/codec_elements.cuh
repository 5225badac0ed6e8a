/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_elements.cuh: elements of any dtype in kernels that take any, from and to addresses of an
 * element.
 */
#ifndef KVF_CODEC_CODEC_ELEMENTS_CUH
#define KVF_CODEC_CODEC_ELEMENTS_CUH

#include "codec/codec_saw_device.cuh"

namespace kvf
{

static __device__ __forceinline__ uint32_t lane_id()
{
    return threadIdx.x % warp_lanes;
}

static __device__ __forceinline__ uint32_t warp_id()
{
    return threadIdx.x / warp_lanes;
}

/* A narrower float to fp32; exact. The product moves the bias and normalizes subnormals. */
static __device__ float widen_f8e4m3(uint32_t byte)
{
    uint32_t rest = (byte & 0x7f) << 20;
    uint32_t bits = __float_as_uint(__uint_as_float(rest) * 0x1p120f);
    bits |= rest == 0x07f00000 ? 0x7fc00000 : 0; /* NaN; there is no infinity */
    return __uint_as_float(bits | (byte & 0x80) << 24);
}

static __device__ float load_element(uint8_t dtype, const uint8_t *vector, uint32_t i)
{
    switch (dtype) {
    case KVF_DTYPE_BF16:
        return __uint_as_float((uint32_t) reinterpret_cast<const uint16_t *>(vector)[i] << 16);
    case KVF_DTYPE_F16:
        return f32_of_half_bits(reinterpret_cast<const uint16_t *>(vector)[i]);
    case KVF_DTYPE_F8E4M3:
        return widen_f8e4m3(vector[i]);
    case KVF_DTYPE_F8E5M2:
        return f32_of_half_bits((uint32_t)vector[i] << 8);
    default: {
        const uint16_t *halves = reinterpret_cast<const uint16_t *>(vector) + 2 * i;
        return __uint_as_float(halves[0] | (uint32_t)halves[1] << 16);
    }
    }
}

/* Magnitude bits of a narrower float, to nearest even, saturated: kvf_narrow of codec_fp.h. */
static __device__ uint32_t narrow(float value, uint32_t mantissa_bits, uint32_t bias, float max)
{
    uint32_t bits = __float_as_uint(value) & 0x7fffffff;
    bits = bits > __float_as_uint(max) ? __float_as_uint(max) : bits;
    uint32_t shift = 23 - mantissa_bits;
    uint32_t rebias = (127 - bias) << 23;
    uint32_t normal = (bits + (1u << (shift - 1)) - 1 + (bits >> shift & 1) - rebias) >> shift;
    uint32_t magic_bits = (127 + 23 + 1 - bias - mantissa_bits) << 23;
    float sum = __uint_as_float(bits) + __uint_as_float(magic_bits);
    uint32_t subnormal = __float_as_uint(sum) - magic_bits;
    return bits < (127 + 1 - bias) << 23 ? subnormal : normal;
}

static __device__ void store_element(uint8_t dtype, uint8_t *vector, uint32_t i, float value)
{
    uint32_t bits = __float_as_uint(value);
    uint32_t sign = bits >> 31;
    uint16_t *halves = reinterpret_cast<uint16_t *>(vector);
    switch (dtype) {
    case KVF_DTYPE_BF16:
        halves[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
        break;
    case KVF_DTYPE_F16:
        halves[i] = (uint16_t)(sign << 15 | narrow(value, 10, 15, 65504.0f));
        break;
    case KVF_DTYPE_F8E4M3:
        vector[i] = (uint8_t)(sign << 7 | narrow(value, 3, 7, 448.0f));
        break;
    case KVF_DTYPE_F8E5M2:
        vector[i] = (uint8_t)(sign << 7 | narrow(value, 2, 15, 57344.0f));
        break;
    default:
        halves[2 * i] = (uint16_t)bits;
        halves[2 * i + 1] = (uint16_t)(bits >> 16);
        break;
    }
}

} /* namespace kvf */

#endif /* KVF_CODEC_CODEC_ELEMENTS_CUH */
