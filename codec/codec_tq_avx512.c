/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_tq_avx512.c: the tq codec with AVX-512; see codec_tq_tile.h.
 */
#include "codec/codec_tq_tile.h"

const struct kvf_tq_kernels kvf_tq_kernels_avx512 = {
    .workspace_bytes = sizeof(struct tq_work),
    .encode_row = tq_encode_row,
    .decode_row = tq_decode_row,
};
