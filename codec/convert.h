/* SPDX-License-Identifier: Apache-2.0
 *
 * convert.h: n elements of a type to fp32 and back, in memory of any alignment.
 */
#ifndef KVF_CODEC_CONVERT_H
#define KVF_CODEC_CONVERT_H

#include <stdint.h>

void kvf_convert_widen(uint8_t dtype, const uint8_t *from, uint32_t n, float *to);

/* One rounding, to nearest even; fp16 and fp8 saturate at their largest finite value. */
void kvf_convert_narrow(uint8_t dtype, const float *from, uint32_t n, uint8_t *to);

#endif /* KVF_CODEC_CONVERT_H */
