/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_kivi_lanes.h: the kivi codec with a channel a lane. Included by a file for each of AVX2 and
 * AVX-512, empty elsewhere. The bytes are those of codec_kivi_scalar.c; numbers in comments are
 * steps of codec_kivi.h.
 *
 * Arrays have room behind their last element (KVF_KIVI_PAD), so loops over them have no tails; what
 * they leave there does not matter.
 */
#ifndef KVF_CODEC_CODEC_KIVI_LANES_H
#define KVF_CODEC_CODEC_KIVI_LANES_H

#include "codec/simd_convert.h"

#if defined(KVF_LANES)

#include "codec/codec_kivi_row.h"

enum {
    VECTOR_BYTES = LANES * sizeof(uint32_t),
};

_Static_assert((int)KVF_KIVI_PAD >= (int)VECTOR_BYTES, "a vector of bytes is the longest step");

/* -------------------------------------------------------------------------------------------------
 * Elements of pages and lanes
 */
KVF_LANES_INLINE lanes_f load_lanes(uint8_t dtype, const uint8_t *from)
{
    switch (dtype) {
    case KVF_DTYPE_BF16:
        return f_bits(i_left(i_load_words(from), 16));
    case KVF_DTYPE_F16:
        return f_from_half(i_load_words(from));
    case KVF_DTYPE_F8E4M3:
        return f_from_f8e4m3(i_load_bytes(from));
    case KVF_DTYPE_F8E5M2:
        return f_from_f8e5m2(i_load_bytes(from));
    default:
        return f_bits(i_loadu(from));
    }
}

KVF_LANES_INLINE void store_lanes(uint8_t dtype, uint8_t *to, lanes_f value)
{
    switch (dtype) {
    case KVF_DTYPE_BF16:
        i_store_words(to, i_right(i_round_bf16(value), 16));
        break;
    case KVF_DTYPE_F16:
        i_store_words(to, i_half_saturated(value));
        break;
    case KVF_DTYPE_F8E4M3:
        i_store_bytes(to, i_f8e4m3(value));
        break;
    case KVF_DTYPE_F8E5M2:
        i_store_bytes(to, i_f8e5m2(value));
        break;
    default:
        i_storeu(to, i_bits(value));
        break;
    }
}

KVF_LANES_INLINE uint32_t element_bytes(uint8_t dtype)
{
    return dtype == KVF_DTYPE_F32 ? 4 : dtype == KVF_DTYPE_BF16 || dtype == KVF_DTYPE_F16 ? 2 : 1;
}

/* -------------------------------------------------------------------------------------------------
 * Encode
 */
KVF_LANES_INLINE uint32_t load_as(uint8_t dtype, const uint8_t *from, uint32_t n, float *x)
{
    lanes_i peak = i_set1(0);
    uint32_t bytes = element_bytes(dtype);
    for (uint32_t i = 0; i < n; i += LANES) {
        _Alignas(64) uint8_t part[VECTOR_BYTES];
        const uint8_t *at = from + i * bytes;
        if (n - i < LANES) {
            memset(part, 0, sizeof(part));
            memcpy(part, at, (n - i) * bytes);
            at = part;
        }
        lanes_f value = load_lanes(dtype, at);
        f_store(x + i, value);
        peak = i_max_u32(peak, i_bits(value) & i_set1(0x7fffffff));
    }
    return i_reduce_max_u32(peak);
}

static uint32_t lanes_load(uint8_t dtype, const uint8_t *from, uint32_t n, float *x)
{
    switch (dtype) {
    case KVF_DTYPE_BF16:
        return load_as(KVF_DTYPE_BF16, from, n, x);
    case KVF_DTYPE_F16:
        return load_as(KVF_DTYPE_F16, from, n, x);
    case KVF_DTYPE_F8E4M3:
        return load_as(KVF_DTYPE_F8E4M3, from, n, x);
    case KVF_DTYPE_F8E5M2:
        return load_as(KVF_DTYPE_F8E5M2, from, n, x);
    default:
        return load_as(KVF_DTYPE_F32, from, n, x);
    }
}

/* (2) */
static void lanes_widen_ranges(const float *x, uint32_t n, float *min, float *max)
{
    for (uint32_t i = 0; i < n; i += LANES) {
        lanes_f value = f_load(x + i);
        f_store(min + i, f_min(value, f_load(min + i)));
        f_store(max + i, f_max(value, f_load(max + i)));
    }
}

/* (2) Groups begin at multiples of LANES. Where the last one ends within a vector, the vector is
 * filled up with the group's first element. */
static void lanes_find_ranges(const float *x, uint32_t n, uint32_t group_size, float *min,
                              float *max)
{
    for (uint32_t first = 0; first < n; first += group_size) {
        uint32_t end = n - first < group_size ? n : first + group_size;
        lanes_f least = f_load(x + first);
        if (end - first < LANES) {
            least = f_set1(x[first]);
        }
        lanes_f greatest = least;
        for (uint32_t i = first; i < end; i += LANES) {
            lanes_f value = f_load(x + i);
            if (end - i < LANES) {
                lanes_m inside = m_lanes((1u << (end - i)) - 1u);
                value = f_bits(i_select(inside, i_bits(value), i_bits(f_set1(x[first]))));
            }
            least = f_min(value, least);
            greatest = f_max(value, greatest);
        }
        min[first / group_size] = f_reduce_min(least);
        max[first / group_size] = f_reduce_max(greatest);
    }
}

/* (3) */
static void lanes_choose(const float *min, const float *max, uint32_t n, uint32_t bits,
                         uint32_t *meta, float *lo, float *factor)
{
    float levels = (float)((1 << bits) - 1);
    for (uint32_t g = 0; g < n; g += LANES) {
        lanes_i lo_half = i_half_down(f_load(min + g) + f_set1(0.0f));
        lanes_i hi_half = i_half_up(f_load(max + g) + f_set1(0.0f));
        lanes_f lo_value = f_from_half(lo_half);
        lanes_i scale = i_smallest_scale(f_from_half(hi_half) - lo_value, levels);
        lanes_m constant = m_equal_i(scale, i_set1(0));
        lanes_f reciprocal = f_set1(1.0f) / f_from_half(scale);
        f_store(lo + g, lo_value);
        i_store(factor + g, i_keep(m_not(constant), i_bits(reciprocal)));
        i_store(meta + g, i_low_words(lo_half, scale));
    }
}

/* Codes, a byte each, clamped, to the bits of bytes: VECTOR_BYTES of them, of which so many are
 * written as codes have, or more. */
KVF_LANES_INLINE void pack_bytes(lanes_i codes, uint32_t bits, uint8_t *to)
{
    codes = i_min_u8(codes, i_set1_8((uint8_t)((1 << bits) - 1)));
    if (bits == 4) {
        lanes_i words = i_multiply_add_8(codes, i_set1(0x10011001));
        i_storeu(to, i_order_packed(i_pack_words(words, words)));
    } else {
        lanes_i words = i_multiply_add_8(codes, i_set1(0x04010401));
        i_store_bytes(to, i_multiply_add_16(words, i_set1(0x00100001)));
    }
}

/* What elements i .. i + LANES - 1 have: groups are longer than vectors. */
KVF_LANES_INLINE lanes_f of_groups(const float *numbers, uint32_t i, uint32_t shift,
                                   bool by_channel)
{
    return by_channel ? f_load(numbers + i) : f_set1(numbers[i >> shift]);
}

/* (4) The product is exact in the fused operation, and adding 1.5 2^23 rounds it to an integer in
 * the low bits, ties to even. It lies within 0 .. 2^b, because lo is no larger than any element of
 * the group. */
KVF_LANES_INLINE void quantize_as(const float *x, const float *lo, const float *factor,
                                  uint32_t shift, bool by_channel, uint32_t n, uint32_t bits,
                                  uint8_t *packed)
{
    for (uint32_t first = 0; first < n; first += VECTOR_BYTES) {
        lanes_i q[4];
        KVF_UNROLL
        for (uint32_t j = 0; j < 4; j++) {
            uint32_t i = first + j * LANES;
            lanes_f offset = of_groups(lo, i, shift, by_channel);
            lanes_f integer = f_fma(f_load(x + i) - offset, of_groups(factor, i, shift, by_channel),
                                    f_set1(0x1.8p23f));
            q[j] = i_bits(integer) & i_set1(0xff);
        }
        pack_bytes(i_pack_bytes(q[0], q[1], q[2], q[3]), bits, packed + first * bits / 8);
    }
}

static void lanes_quantize(const float *x, const float *lo, const float *factor, uint32_t shift,
                           uint32_t n, uint32_t bits, uint8_t *to)
{
    _Alignas(64) uint8_t packed[KVF_KIVI_ARRAY];
    uint32_t bytes = kvf_kivi_code_bytes(n, bits);
    if (shift == 0) {
        quantize_as(x, lo, factor, 0, true, n, bits, packed);
    } else {
        quantize_as(x, lo, factor, shift, false, n, bits, packed);
    }
    uint32_t used = n * bits % 8;
    if (used != 0) {
        packed[bytes - 1] &= (uint8_t)((1u << used) - 1);
    }
    memcpy(to, packed, bytes);
}

/* -------------------------------------------------------------------------------------------------
 * Decode
 */
static void lanes_split(const uint32_t *meta, uint32_t n, float *lo, float *scale)
{
    for (uint32_t g = 0; g < n; g += LANES) {
        lanes_i words = i_load(meta + g);
        f_store(lo + g, f_from_half(words));
        f_store(scale + g, f_from_half(i_right(words, 16)));
    }
}

/* The lower half of each byte's bits and the upper one as bytes of their own, in order. */
KVF_LANES_INLINE void halve_bytes(lanes_i bytes, uint32_t bits, lanes_i halves[2])
{
    lanes_i mask = i_set1_8((uint8_t)((1 << bits) - 1));
    lanes_i ordered = i_order_unpacked(bytes);
    lanes_i low = ordered & mask;
    lanes_i high = i_right_16(ordered, bits) & mask;
    halves[0] = i_unpack_low_8(low, high);
    halves[1] = i_unpack_high_8(low, high);
}

/* Codes of n_bytes as a byte each. */
static void unpack(const uint8_t *packed, uint32_t n_bytes, uint32_t bits, uint8_t *codes)
{
    for (uint32_t at = 0; at < n_bytes; at += VECTOR_BYTES) {
        lanes_i halves[2];
        halve_bytes(i_load(packed + at), 4, halves);
        for (uint32_t h = 0; h < 2; h++) {
            if (bits == 4) {
                i_store(codes, halves[h]);
                codes += VECTOR_BYTES;
                continue;
            }
            lanes_i quarters[2];
            halve_bytes(halves[h], 2, quarters);
            i_store(codes, quarters[0]);
            i_store(codes + VECTOR_BYTES, quarters[1]);
            codes += 2 * VECTOR_BYTES;
        }
    }
}

KVF_LANES_INLINE void store_values(uint8_t dtype, const uint8_t *codes, const float *lo,
                                   const float *scale, uint32_t shift, bool by_channel, uint32_t n,
                                   uint8_t *to)
{
    uint32_t bytes = element_bytes(dtype);
    for (uint32_t i = 0; i < n; i += LANES) {
        lanes_f value = f_fma(of_groups(scale, i, shift, by_channel),
                              f_from_i(i_load_bytes(codes + i)),
                              of_groups(lo, i, shift, by_channel));
        if (n - i >= LANES) {
            store_lanes(dtype, to + i * bytes, value);
        } else {
            _Alignas(64) uint8_t part[VECTOR_BYTES];
            store_lanes(dtype, part, value);
            memcpy(to + i * bytes, part, (n - i) * bytes);
        }
    }
}

KVF_LANES_INLINE void store_as(uint8_t dtype, const uint8_t *codes, const float *lo,
                               const float *scale, uint32_t shift, uint32_t n, uint8_t *to)
{
    if (shift == 0) {
        store_values(dtype, codes, lo, scale, 0, true, n, to);
    } else {
        store_values(dtype, codes, lo, scale, shift, false, n, to);
    }
}

static void lanes_decode(const uint8_t *codes, const float *lo, const float *scale, uint32_t shift,
                         uint32_t n, uint32_t bits, uint8_t dtype, uint8_t *to)
{
    enum {
        /* whole vectors of packed codes, of four codes a byte */
        CODES = 4 * VECTOR_BYTES * (KVF_DIM_MAX / 4 / VECTOR_BYTES + 1)
    };
    _Alignas(64) uint8_t packed[KVF_KIVI_ARRAY];
    _Alignas(64) uint8_t unpacked[CODES];
    uint32_t n_bytes = kvf_kivi_code_bytes(n, bits);
    memcpy(packed, codes, n_bytes);
    unpack(packed, n_bytes, bits, unpacked);
    switch (dtype) {
    case KVF_DTYPE_BF16:
        store_as(KVF_DTYPE_BF16, unpacked, lo, scale, shift, n, to);
        break;
    case KVF_DTYPE_F16:
        store_as(KVF_DTYPE_F16, unpacked, lo, scale, shift, n, to);
        break;
    case KVF_DTYPE_F8E4M3:
        store_as(KVF_DTYPE_F8E4M3, unpacked, lo, scale, shift, n, to);
        break;
    case KVF_DTYPE_F8E5M2:
        store_as(KVF_DTYPE_F8E5M2, unpacked, lo, scale, shift, n, to);
        break;
    default:
        store_as(KVF_DTYPE_F32, unpacked, lo, scale, shift, n, to);
        break;
    }
}

#define KIVI_KERNELS                                                                               \
    {                                                                                              \
        .load = lanes_load, .widen_ranges = lanes_widen_ranges, .find_ranges = lanes_find_ranges,  \
        .choose = lanes_choose, .quantize = lanes_quantize, .split = lanes_split,                  \
        .decode = lanes_decode                                                                     \
    }

#endif /* KVF_LANES */

#endif /* KVF_CODEC_CODEC_KIVI_LANES_H */
