/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_kivi_scalar.c: reference of the kivi codec's arithmetic. The format, step by step, is
 * codec_kivi.h; numbers in comments here are its steps.
 */
#include "codec/codec_fp.h"
#include "codec/codec_kivi_row.h"

static float load_element(uint8_t dtype, const uint8_t *from, uint32_t i)
{
    uint16_t half;
    float value;
    switch (dtype) {
    case KVF_DTYPE_BF16:
        memcpy(&half, from + i * sizeof(half), sizeof(half));
        return kvf_f32_from_bf16(half);
    case KVF_DTYPE_F16:
        memcpy(&half, from + i * sizeof(half), sizeof(half));
        return kvf_f32_from_f16(half);
    case KVF_DTYPE_F8E4M3:
        return kvf_f32_from_f8e4m3(from[i]);
    case KVF_DTYPE_F8E5M2:
        return kvf_f32_from_f8e5m2(from[i]);
    default:
        memcpy(&value, from + i * sizeof(value), sizeof(value));
        return value;
    }
}

static void store_element(uint8_t dtype, float value, uint8_t *to, uint32_t i)
{
    uint16_t half;
    switch (dtype) {
    case KVF_DTYPE_BF16:
        half = kvf_bf16_from_f32(value);
        memcpy(to + i * sizeof(half), &half, sizeof(half));
        break;
    case KVF_DTYPE_F16:
        half = kvf_f16_from_f32(value);
        memcpy(to + i * sizeof(half), &half, sizeof(half));
        break;
    case KVF_DTYPE_F8E4M3:
        to[i] = kvf_f8e4m3_from_f32(value);
        break;
    case KVF_DTYPE_F8E5M2:
        to[i] = kvf_f8e5m2_from_f32(value);
        break;
    default:
        memcpy(to + i * sizeof(value), &value, sizeof(value));
        break;
    }
}

static uint32_t scalar_load(uint8_t dtype, const uint8_t *from, uint32_t n, float *x)
{
    uint32_t peak = 0;
    for (uint32_t i = 0; i < n; i++) {
        x[i] = load_element(dtype, from, i);
        uint32_t magnitude = kvf_f32_bits(x[i]) & 0x7fffffff;
        peak = magnitude > peak ? magnitude : peak;
    }
    return peak;
}

static void scalar_widen_ranges(const float *x, uint32_t n, float *min, float *max)
{
    for (uint32_t i = 0; i < n; i++) {
        min[i] = x[i] < min[i] ? x[i] : min[i];
        max[i] = x[i] > max[i] ? x[i] : max[i];
    }
}

static void scalar_find_ranges(const float *x, uint32_t n, uint32_t group_size, float *min,
                               float *max)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t g = i / group_size;
        min[g] = i % group_size == 0 || x[i] < min[g] ? x[i] : min[g];
        max[g] = i % group_size == 0 || x[i] > max[g] ? x[i] : max[g];
    }
}

/* (3) */
static void scalar_choose(const float *min, const float *max, uint32_t n, uint32_t bits,
                          uint32_t *meta, float *lo, float *factor)
{
    float levels = (float)((1 << bits) - 1);
    for (uint32_t g = 0; g < n; g++) {
        uint16_t lo_half = kvf_f16_from_f32_directed(min[g] + 0.0f, 0);
        uint16_t hi_half = kvf_f16_from_f32_directed(max[g] + 0.0f, 1);
        lo[g] = kvf_f32_from_f16(lo_half);
        uint16_t scale = kvf_f16_smallest_scale(kvf_f32_from_f16(hi_half) - lo[g], levels);
        factor[g] = scale != 0 ? 1.0f / kvf_f32_from_f16(scale) : 0.0f;
        meta[g] = lo_half | (uint32_t)scale << 16;
    }
}

/* (4) In double the product of two floats is exact, and adding 1.5 2^52 rounds it to an integer in
 * the low bits, ties to even. */
static void scalar_quantize(const float *x, const float *lo, const float *factor, uint32_t shift,
                            uint32_t n, uint32_t bits, uint8_t *to)
{
    double top = (double)((1 << bits) - 1);
    uint32_t a_byte = 8 / bits;
    memset(to, 0, kvf_kivi_code_bytes(n, bits));
    for (uint32_t i = 0; i < n; i++) {
        double q = (double)(x[i] - lo[i >> shift]) * (double)factor[i >> shift];
        q = q > 0.0 ? q : 0.0;
        q = q < top ? q : top;
        q += 0x1.8p52;
        uint64_t integer;
        memcpy(&integer, &q, sizeof(integer));
        uint32_t code = (uint32_t)integer & 15;
        to[i / a_byte] = (uint8_t)(to[i / a_byte] | code << i % a_byte * bits);
    }
}

static void scalar_split(const uint32_t *meta, uint32_t n, float *lo, float *scale)
{
    for (uint32_t g = 0; g < n; g++) {
        lo[g] = kvf_f32_from_f16((uint16_t)meta[g]);
        scale[g] = kvf_f32_from_f16((uint16_t)(meta[g] >> 16));
    }
}

static void scalar_decode(const uint8_t *codes, const float *lo, const float *scale, uint32_t shift,
                          uint32_t n, uint32_t bits, uint8_t dtype, uint8_t *to)
{
    uint32_t a_byte = 8 / bits;
    uint32_t mask = (1u << bits) - 1;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t code = codes[i / a_byte] >> i % a_byte * bits & mask;
        float value = kvf_fma_f32(scale[i >> shift], (float)code, lo[i >> shift]);
        store_element(dtype, value, to, i);
    }
}

const struct kvf_kivi_kernels kvf_kivi_kernels_scalar = {
    .load = scalar_load,
    .widen_ranges = scalar_widen_ranges,
    .find_ranges = scalar_find_ranges,
    .choose = scalar_choose,
    .quantize = scalar_quantize,
    .split = scalar_split,
    .decode = scalar_decode,
};
