/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_fp.h: the floating-point environment of codecs, and conversions by integer arithmetic.
 *
 * Codecs promise the same bytes everywhere, so they compute with ties to even and with subnormals.
 * The calling process may have set anything (engines often flush subnormals): enter saves and sets,
 * leave restores. Between the two only calls through the ops table compute, which keeps the
 * compiler from moving arithmetic across.
 */
#ifndef KVF_CODEC_CODEC_FP_H
#define KVF_CODEC_CODEC_FP_H

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

struct kvf_fp_state {
    uint64_t control;
};

static inline struct kvf_fp_state kvf_fp_enter(void)
{
    struct kvf_fp_state state;
#if defined(__x86_64__)
    state.control = _mm_getcsr();
    _mm_setcsr(0x1f80); /* all exceptions masked, nearest even, neither FTZ nor DAZ */
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(state.control)::"memory");
    __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)0) : "memory");
#else
#error "say how to save and set the floating-point environment on this machine"
#endif
    return state;
}

static inline void kvf_fp_leave(struct kvf_fp_state state)
{
#if defined(__x86_64__)
    _mm_setcsr((unsigned int)state.control);
#else
    __asm__ volatile("msr fpcr, %0" ::"r"(state.control) : "memory");
#endif
}

static inline float kvf_f32_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline uint32_t kvf_f32_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

/* To fp32, exact. The product moves the exponent's bias and normalizes subnormals. */
static inline float kvf_f32_from_bf16(uint16_t half)
{
    return kvf_f32_from_bits((uint32_t)half << 16);
}

static inline float kvf_f32_from_f16(uint16_t half)
{
    uint32_t rest = (uint32_t)(half & 0x7fff) << 13;
    uint32_t bits = kvf_f32_bits(kvf_f32_from_bits(rest) * 0x1p112f);
    bits |= rest >= 0x0f800000 ? 0x7f800000 : 0; /* infinity and NaN */
    return kvf_f32_from_bits(bits | (uint32_t)(half & 0x8000) << 16);
}

static inline float kvf_f32_from_f8e4m3(uint8_t byte)
{
    uint32_t rest = (uint32_t)(byte & 0x7f) << 20;
    uint32_t bits = kvf_f32_bits(kvf_f32_from_bits(rest) * 0x1p120f);
    bits |= rest == 0x07f00000 ? 0x7fc00000 : 0; /* NaN; there is no infinity */
    return kvf_f32_from_bits(bits | (uint32_t)(byte & 0x80) << 24);
}

static inline float kvf_f32_from_f8e5m2(uint8_t byte)
{
    return kvf_f32_from_f16((uint16_t)(byte << 8));
}

/* From fp32, to nearest even. A NaN gives something unspecified. */
static inline uint16_t kvf_bf16_from_f32(float value)
{
    uint32_t bits = kvf_f32_bits(value);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* The magnitude bits of a narrower float with mantissa_bits and exponent bias, saturated at max.
 * Adding a power of two rounds a subnormal to its unit; adding to the bits rounds the others. */
static inline uint32_t kvf_narrow(float value, uint32_t mantissa_bits, uint32_t bias, float max)
{
    uint32_t bits = kvf_f32_bits(value) & 0x7fffffff;
    bits = bits > kvf_f32_bits(max) ? kvf_f32_bits(max) : bits;
    uint32_t shift = 23 - mantissa_bits;
    uint32_t rebias = (127 - bias) << 23;
    uint32_t normal = (bits + (1u << (shift - 1)) - 1 + (bits >> shift & 1) - rebias) >> shift;
    /* the last place of this power of two is the subnormals' unit, 2^(1 - bias - mantissa_bits) */
    uint32_t magic_bits = (127 + 23 + 1 - bias - mantissa_bits) << 23;
    float magic = kvf_f32_from_bits(magic_bits);
    uint32_t subnormal = kvf_f32_bits(kvf_f32_from_bits(bits) + magic) - magic_bits;
    return bits < (127 + 1 - bias) << 23 ? subnormal : normal;
}

static inline uint16_t kvf_f16_from_f32(float value)
{
    uint32_t sign = kvf_f32_bits(value) >> 16 & 0x8000;
    return (uint16_t)(sign | kvf_narrow(value, 10, 15, 65504.0f));
}

static inline uint8_t kvf_f8e4m3_from_f32(float value)
{
    uint32_t sign = kvf_f32_bits(value) >> 24 & 0x80;
    return (uint8_t)(sign | kvf_narrow(value, 3, 7, 448.0f));
}

static inline uint8_t kvf_f8e5m2_from_f32(float value)
{
    uint32_t sign = kvf_f32_bits(value) >> 24 & 0x80;
    return (uint8_t)(sign | kvf_narrow(value, 2, 15, 57344.0f));
}

/* To fp16 downwards, or upwards: the neighbour on that side of the nearest if the nearest is on the
 * other. 0x7c00 or 0xfc00 if the result is not finite. value is not NaN. */
static inline uint16_t kvf_f16_from_f32_directed(float value, int up)
{
    uint16_t half = kvf_f16_from_f32(value);
    float back = kvf_f32_from_f16(half);
    int wrong = up ? back < value : back > value;
    if (!wrong) {
        /* saturation gave the largest finite value for what lies beyond it */
        return half;
    }
    int away = up ? half < 0x8000 : half >= 0x8000; /* from zero */
    if (half == (up ? 0x8000 : 0x0000)) {
        return up ? 0x0001 : 0x8001;
    }
    return (uint16_t)(away ? half + 1 : half - 1);
}

/* The smallest fp16 scale with levels * scale >= range, levels being an integer. The estimate may
 * be one step off on either side; the products that decide are exact. */
static inline uint16_t kvf_f16_smallest_scale(float range, float levels)
{
    uint16_t scale = kvf_f16_from_f32_directed(range * (1.0f / levels), 1);
    if (scale > 0 && levels * kvf_f32_from_f16((uint16_t)(scale - 1)) >= range) {
        scale--;
    } else if (levels * kvf_f32_from_f16(scale) < range) {
        scale++;
    }
    return scale;
}

/* Correctly rounded, by the machine's instruction. */
static inline float kvf_sqrt_f32(float value)
{
#if defined(__x86_64__)
    return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(value)));
#else
    float root;
    __asm__("fsqrt %s0, %s1" : "=w"(root) : "w"(value));
    return root;
#endif
}

/* The fused operation, one rounding, also where the machine has no instruction for it: the product
 * is exact in double, the sum is rounded to odd, and rounding that to fp32 is then right. */
static inline float kvf_fma_f32(float a, float b, float c)
{
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    double product = (double)a * (double)b;
    double sum = product + (double)c;
    double part = sum - product;
    double error = (product - (sum - part)) + ((double)c - part);
    uint64_t sum_bits;
    uint64_t error_bits;
    memcpy(&sum_bits, &sum, sizeof(sum_bits));
    memcpy(&error_bits, &error, sizeof(error_bits));
    /* 1 if error is not 0; in arithmetic, because SSE2 has no comparison of 64 bits */
    uint64_t magnitude = error_bits << 1;
    uint64_t inexact = (magnitude | (0 - magnitude)) >> 63;
    uint64_t step = inexact & ~sum_bits;
    uint64_t inwards = (sum_bits ^ error_bits) >> 63;
    sum_bits += step - 2 * (step & inwards);
    memcpy(&sum, &sum_bits, sizeof(sum));
    return (float)sum;
#endif
}

#endif /* KVF_CODEC_CODEC_FP_H */
