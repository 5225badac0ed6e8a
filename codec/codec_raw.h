/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_raw.h: vectors as they are.
 *
 * One part, codes: the vectors of the tensor in order, head-major then token, without gaps.
 *
 *   codes   [head 0: token 0 | token 1 | ...][head 1: ...] ... zero up to 128 bytes
 */
#ifndef KVF_CODEC_CODEC_RAW_H
#define KVF_CODEC_CODEC_RAW_H

#include "codec/codec.h"

extern const struct kvf_codec_ops kvf_codec_raw;

#endif /* KVF_CODEC_CODEC_RAW_H */
