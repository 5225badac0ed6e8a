/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_exact.h: lossless; the exponent of a float shrinks from 8 bits to 4 ("exp16").
 *
 * Sign and mantissa of KV values are noise, but 16 exponents cover nearly all values of a tensor of
 * one layer. So a strip has a table of its 16 most frequent exponents, each element keeps a 4-bit
 * index into it and its sign and mantissa as they are; elements with another exponent are escapes.
 * For bf16 that is 12 bits and a little; for fp32 it is 28. fp16 would save at most 1 bit in 16 and
 * fp8 none: they are stored raw, as is every strip that would not become smaller.
 *
 * Elements are cut into chunks of whole vectors, so that a range of tokens decodes alone: a chunk
 * is tokens_a_chunk = max(1, 1024 / dim) consecutive tokens of one head, fewer at the end of the
 * head.
 *
 *   meta    u8  exponent[16]            unused entries are 0
 *           u32 directory[chunks + 1]   bits 0-30: where the chunk's escapes begin, in bytes
 *                                       from the start of the escapes; the last entry is where
 *                                       they end. bit 31: the escapes are the exponents of all
 *                                       elements instead
 *   codes   rest      head-major, token, element: bf16: 1 byte, sign << 7 | mantissa
 *                                                 fp32: 3 bytes, sign << 23 | mantissa
 *           indices   chunk by chunk, each from a new byte: element 2 i in the low nibble of
 *                     byte i, 2 i + 1 in the high one; 0 for escapes
 *           escapes   3 bytes each: u16 position in the chunk, ascending, and u8 exponent;
 *                     or 1 byte an element, the exponents of the whole chunk
 */
#ifndef KVF_CODEC_CODEC_EXACT_H
#define KVF_CODEC_CODEC_EXACT_H

#include "codec/codec.h"
#include "codec/codec_exact_shape.h"

_Static_assert((int)KVF_EXACT_PART_ALIGN == KVF_BLOCK_ALIGN_BYTES,
               "parts begin on this many bytes");

extern const struct kvf_codec_ops kvf_codec_exact;

#endif /* KVF_CODEC_CODEC_EXACT_H */
