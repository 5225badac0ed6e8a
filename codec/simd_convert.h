/* SPDX-License-Identifier: Apache-2.0
 *
 * simd_convert.h: conversions of codec_fp.h that processors have no instructions for, a number a
 * lane. Empty in files that are compiled for neither AVX2 nor AVX-512.
 */
#ifndef KVF_CODEC_SIMD_CONVERT_H
#define KVF_CODEC_SIMD_CONVERT_H

#include "codec/simd_lanes.h"

#if defined(KVF_LANES)

#include "codec/codec_fp.h"

/* As kvf_f32_from_f8e4m3; upper bits of a lane do not matter. */
KVF_LANES_INLINE lanes_f f_from_f8e4m3(lanes_i byte)
{
    lanes_i rest = i_left(byte & i_set1(0x7f), 20);
    lanes_i sign = i_left(byte & i_set1(0x80), 24);
    return f_bits(sign | i_bits(f_bits(rest) * f_set1(0x1p120f)) |
                  i_keep(m_equal_i(rest, i_set1(0x07f00000)), i_set1(0x7fc00000)));
}

KVF_LANES_INLINE lanes_f f_from_f8e5m2(lanes_i byte)
{
    return f_from_half(i_left(byte, 8));
}

/* As kvf_narrow, with the sign bit above. */
KVF_LANES_INLINE lanes_i i_narrow_f8(lanes_f value, uint32_t mantissa_bits, uint32_t bias,
                                     float max)
{
    uint32_t shift = 23 - mantissa_bits;
    uint32_t magic_bits = (127 + 23 + 1 - bias - mantissa_bits) << 23;
    lanes_i sign = i_right(i_bits(value), 24) & i_set1(0x80);
    lanes_i bits = i_min_u32(i_bits(value) & i_set1(0x7fffffff), i_set1(kvf_f32_bits(max)));
    lanes_i odd = i_right(bits, shift) & i_set1(1);
    lanes_i rounding = i_set1((1u << (shift - 1)) - 1 - ((127 - bias) << 23));
    lanes_i normal = i_right(i_add(bits, i_add(odd, rounding)), shift);
    lanes_f magic = f_set1(kvf_f32_from_bits(magic_bits));
    lanes_i subnormal = i_sub(i_bits(f_bits(bits) + magic), i_set1(magic_bits));
    lanes_m is_small = m_greater_i(i_set1((127 + 1 - bias) << 23), bits);
    return sign | i_select(is_small, subnormal, normal);
}

KVF_LANES_INLINE lanes_i i_f8e4m3(lanes_f value)
{
    return i_narrow_f8(value, 3, 7, 448.0f);
}

KVF_LANES_INLINE lanes_i i_f8e5m2(lanes_f value)
{
    return i_narrow_f8(value, 2, 15, 57344.0f);
}

/* As kvf_f16_smallest_scale. */
KVF_LANES_INLINE lanes_i i_smallest_scale(lanes_f range, float levels)
{
    lanes_i scale = i_half_up(range * f_set1(1.0f / levels));
    lanes_f below = f_from_half(i_sub(scale, i_set1(1)));
    lanes_m too_large = m_and(m_greater_i(scale, i_set1(0)),
                              m_at_least(f_set1(levels) * below, range));
    lanes_m too_small = m_and(m_not(too_large), m_less(f_set1(levels) * f_from_half(scale), range));
    scale = i_sub(scale, i_keep(too_large, i_set1(1)));
    return i_add(scale, i_keep(too_small, i_set1(1)));
}

/* To fp16 in the low word, to nearest even, saturated. */
KVF_LANES_INLINE lanes_i i_half_saturated(lanes_f value)
{
    return i_half_nearest(f_max(f_min(value, f_set1(65504.0f)), f_set1(-65504.0f)));
}

#endif /* KVF_LANES */

#endif /* KVF_CODEC_SIMD_CONVERT_H */
