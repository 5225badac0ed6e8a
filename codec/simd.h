/* SPDX-License-Identifier: Apache-2.0
 *
 * simd.h: which instructions the codecs use.
 *
 * The best that this machine has is found at the first use. Every level gives the same bytes, so
 * the choice is one for the whole process and may change at any time, between two strips of a block
 * as well. Any thread.
 */
#ifndef KVF_CODEC_SIMD_H
#define KVF_CODEC_SIMD_H

enum kvf_simd_level {
    KVF_SIMD_SCALAR = 0, /* the reference: what the compiler makes of plain C */
    KVF_SIMD_AVX2,       /* with FMA and F16C */
    KVF_SIMD_AVX512,     /* F, BW, DQ and VL */
    KVF_SIMD_LEVELS,
};

/* "scalar", "avx2", "avx512". */
const char *kvf_codec_simd_name(enum kvf_simd_level level);

/* The level in force. */
enum kvf_simd_level kvf_codec_simd_level(void);

/* Use this level from now on; for tests and measurements. KVF_OK; KVF_ERR_UNSUPPORTED: this machine
 * or build does not have it, and nothing changes. */
int kvf_codec_simd_set(enum kvf_simd_level level);

#endif /* KVF_CODEC_SIMD_H */
