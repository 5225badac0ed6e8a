/* SPDX-License-Identifier: Apache-2.0
 *
 * convert.c: elements of every type to fp32 and back; see convert.h.
 */
#include "codec/convert.h"

#include "codec/codec_fp.h"

#include "kvferry.h"

void kvf_convert_widen(uint8_t dtype, const uint8_t *from, uint32_t n, float *to)
{
    uint16_t half;
    switch (dtype) {
    case KVF_DTYPE_BF16:
        for (uint32_t i = 0; i < n; i++) {
            memcpy(&half, from + i * sizeof(half), sizeof(half));
            to[i] = kvf_f32_from_bf16(half);
        }
        break;
    case KVF_DTYPE_F16:
        for (uint32_t i = 0; i < n; i++) {
            memcpy(&half, from + i * sizeof(half), sizeof(half));
            to[i] = kvf_f32_from_f16(half);
        }
        break;
    case KVF_DTYPE_F8E4M3:
        for (uint32_t i = 0; i < n; i++) {
            to[i] = kvf_f32_from_f8e4m3(from[i]);
        }
        break;
    case KVF_DTYPE_F8E5M2:
        for (uint32_t i = 0; i < n; i++) {
            to[i] = kvf_f32_from_f8e5m2(from[i]);
        }
        break;
    default:
        memcpy(to, from, n * sizeof(float));
        break;
    }
}

void kvf_convert_narrow(uint8_t dtype, const float *from, uint32_t n, uint8_t *to)
{
    uint16_t half;
    switch (dtype) {
    case KVF_DTYPE_BF16:
        for (uint32_t i = 0; i < n; i++) {
            half = kvf_bf16_from_f32(from[i]);
            memcpy(to + i * sizeof(half), &half, sizeof(half));
        }
        break;
    case KVF_DTYPE_F16:
        for (uint32_t i = 0; i < n; i++) {
            half = kvf_f16_from_f32(from[i]);
            memcpy(to + i * sizeof(half), &half, sizeof(half));
        }
        break;
    case KVF_DTYPE_F8E4M3:
        for (uint32_t i = 0; i < n; i++) {
            to[i] = kvf_f8e4m3_from_f32(from[i]);
        }
        break;
    case KVF_DTYPE_F8E5M2:
        for (uint32_t i = 0; i < n; i++) {
            to[i] = kvf_f8e5m2_from_f32(from[i]);
        }
        break;
    default:
        memcpy(to, from, n * sizeof(float));
        break;
    }
}
