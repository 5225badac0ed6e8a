/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw_avx2.c: the saw codec with AVX2; see codec_saw_tile.h.
 */
#include "codec/codec_saw_tile_decode.h"
#include "codec/codec_saw_tile_encode.h"

const struct kvf_saw_kernels kvf_saw_kernels_avx2 = {
    .workspace_bytes = sizeof(struct tile_work),
    .encode_row = encode_row,
    .decode_row = decode_row,
};
