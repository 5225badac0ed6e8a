/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_kivi_avx512.c: the kivi codec with AVX-512; see codec_kivi_lanes.h.
 */
#include "codec/codec_kivi_lanes.h"

const struct kvf_kivi_kernels kvf_kivi_kernels_avx512 = KIVI_KERNELS;
