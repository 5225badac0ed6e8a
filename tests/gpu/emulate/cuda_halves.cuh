/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda_halves.cuh: of CUDA's cuda_fp16.h and cuda_bf16.h, what the emulated kernels use; fp16 by
 * the processor's conversions (F16C), which round in the same ways.
 */
#ifndef KVF_TESTS_GPU_EMULATE_CUDA_HALVES_CUH
#define KVF_TESTS_GPU_EMULATE_CUDA_HALVES_CUH

#include "tests/gpu/emulate/cuda_builtins.cuh"

#include <immintrin.h>
#include <stdint.h>

struct __half {
    uint16_t bits;
};

struct __half2 {
    uint32_t bits;
};

template <int rounding> static inline __half emulate_half_of(float x)
{
    return {(uint16_t)_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(x), rounding), 0)};
}

static inline __half __float2half_rn(float x)
{
    return emulate_half_of<_MM_FROUND_TO_NEAREST_INT>(x);
}

static inline __half __float2half_rd(float x)
{
    return emulate_half_of<_MM_FROUND_TO_NEG_INF>(x);
}

static inline __half __float2half_ru(float x)
{
    return emulate_half_of<_MM_FROUND_TO_POS_INF>(x);
}

static inline float __half2float(__half x)
{
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(x.bits)));
}

static inline unsigned short __half_as_ushort(__half x)
{
    return x.bits;
}

static inline __half __ushort_as_half(unsigned short bits)
{
    return {bits};
}

static inline __half2 __habs2(__half2 x)
{
    return {x.bits & 0x7fff7fff};
}

static inline uint32_t __hge2_mask(__half2 a, __half2 b)
{
    uint32_t mask = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        float x = __half2float({(uint16_t)(a.bits >> shift)});
        float y = __half2float({(uint16_t)(b.bits >> shift)});
        mask |= x >= y ? 0xffffu << shift : 0;
    }
    return mask;
}

struct __nv_bfloat162 {
    uint32_t bits;
};

/* To nearest even; all NaN are one. */
static inline uint32_t emulate_bf16_bits(float x)
{
    uint32_t bits = __float_as_uint(x);
    return isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high)
{
    return {emulate_bf16_bits(low) | emulate_bf16_bits(high) << 16};
}

/* Of each half that which is less, or greater; not a NaN if the other is a number. */
static inline __nv_bfloat162 emulate_choose_bf16(__nv_bfloat162 a, __nv_bfloat162 b, bool is_min)
{
    uint32_t bits = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        float x = __uint_as_float(a.bits >> shift << 16);
        float y = __uint_as_float(b.bits >> shift << 16);
        bool is_a = isnan(y) || (is_min ? x < y : x > y);
        bits |= (is_a ? a.bits : b.bits) & 0xffffu << shift;
    }
    return {bits};
}

static inline __nv_bfloat162 __hmin2(__nv_bfloat162 a, __nv_bfloat162 b)
{
    return emulate_choose_bf16(a, b, true);
}

static inline __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b)
{
    return emulate_choose_bf16(a, b, false);
}

#endif /* KVF_TESTS_GPU_EMULATE_CUDA_HALVES_CUH */
