/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_kivi.h: uniform codes with a scale a group, where the groups of a tensor go along its
 * tokens or along its channels ("kivi"; after KIVI, arXiv:2402.02750, which has K by channel and V
 * by token).
 *
 * This header is the format: codec_kivi_scalar.c is its reference, and every other implementation
 * gives the same bytes. A row is a head; n = dim, the elements of its vectors; T = tokens of the
 * block; G = group_size; b = bits, 4 or 2. Nothing is rotated or centred.
 *
 *   meta    u32: fp16 lo in bits 0-15, fp16 scale in bits 16-31
 *             group_axis channel: [rows][(T + G - 1) / G][n]; a group is one channel of G tokens
 *             group_axis token:   [rows][T][(n + G - 1) / G]; a group is G channels of one token
 *   codes   [rows][T][code_bytes]; the code of channel i lies in the b bits from bit b (i mod (8 /
 *           b)) on of byte i / (8 / b), and bits that no channel has are 0
 *
 * The last group of a channel, or of a token, is shorter if G does not divide T, or n.
 *
 * Encode of a row (x: input as fp32; every operation below is one fp32 operation rounded to nearest
 * even, unless stated):
 *   1. A vector with a NaN or an element beyond +-65504, one that has something other than zeros
 *      and no magnitude of 2^-10 or more, and every vector of a sink token, is an escape. So it
 *      depends on the vector alone, not on its group, and what is left has ranges that fp16 holds.
 *   2. min and max of each group, over the elements of vectors that are no escapes.
 *   3. lo = (min + 0) and hi = (max + 0), rounded down and up to fp16. scale = the smallest fp16
 *      with (2^b - 1) scale >= hi - lo. A group without elements has lo 0 and scale NaN (0x7e00).
 *   4. q = (x - lo) * (1 / scale), the product exact and rounded to an integer, ties to even,
 *      clamped to 0 .. 2^b - 1; 0 if scale is 0, and in escapes.
 * The input of escapes is in the raw area. If more than 1/16 of the vectors, sinks apart, are
 * escapes, the tensor of this layer is stored by codec raw; so it is if its tokens are so few that
 * raw is no larger.
 *
 * Decode: x = fma(scale, q, lo), then one rounding to the target type, to nearest even; fp16 and
 * fp8 saturate at their largest finite value.
 *
 * What differs from KIVI's code: lo and scale are rounded so that no value is clipped (there both
 * are rounded to nearest); a constant group gives its value back (there 0 / 0); the tokens that
 * fill no group are coded (there they stay as they are, and so do the newest ones).
 */
#ifndef KVF_CODEC_CODEC_KIVI_H
#define KVF_CODEC_CODEC_KIVI_H

#include "codec/codec.h"

enum kvf_kivi_layout {
    KVF_KIVI_META_BYTES = 4,
    KVF_KIVI_EMPTY_SCALE = 0x7e00,
    KVF_KIVI_GROUP_MIN = 32,
    KVF_KIVI_GROUP_MAX = 128,
};

#define KVF_KIVI_MAGNITUDE_MAX 65504.0f
#define KVF_KIVI_PEAK_MIN      0x1p-10f

/* Bytes of the codes of a vector of n elements: the code_bytes of codec.h. */
static inline uint32_t kvf_kivi_code_bytes(uint32_t n, uint32_t bits)
{
    return (n * bits + 7) / 8;
}

/* Groups along n elements or tokens. */
static inline uint32_t kvf_kivi_groups(uint32_t n, uint32_t group_size)
{
    return (n + group_size - 1) / group_size;
}

extern const struct kvf_codec_ops kvf_codec_kivi;

#endif /* KVF_CODEC_CODEC_KIVI_H */
