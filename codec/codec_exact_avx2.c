/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_exact_avx2.c: exact with AVX2; see codec_exact_lanes.h.
 */
#include "codec/codec_exact_lanes.h"

const struct kvf_exact_kernels kvf_exact_kernels_avx2 = {
    .split = split,
    .join = join,
};
