/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_exact_avx512.c: exact with AVX-512; see codec_exact_lanes.h.
 */
#include "codec/codec_exact_lanes.h"

const struct kvf_exact_kernels kvf_exact_kernels_avx512 = {
    .split = split,
    .join = join,
};
