/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_latent.h: what the host tells the kernels between a layer's latents and its X (part 9 of
 * kvferry.h): passes over arrays, around the products of client/gpu_x_latent.c. Read by C and by
 * CUDA.
 *
 *   kvf_latent_clean      elements that are NaN, or 2^64 or more, become 0
 *   kvf_latent_narrow     fp32 numbers, rounded to nearest, to even, once to the type of X
 *   kvf_latent_subtract   X less fp32 numbers, in fp32, rounded likewise
 */
#ifndef KVF_CODEC_CODEC_LATENT_H
#define KVF_CODEC_CODEC_LATENT_H

#include <stdint.h>

#define KVF_GPU_LATENT_THREADS 256
#define KVF_GPU_LATENT_UNIT    4 /* elements of a thread */

struct kvf_gpu_latent_work {
    uint64_t from;  /* clean: what is changed; narrow: const float *; subtract: X, on 2 bytes */
    uint64_t less;  /* subtract: const float * */
    uint64_t to;    /* narrow, subtract */
    uint64_t n;     /* elements, a multiple of KVF_GPU_LATENT_UNIT; addresses on 16 bytes */
    uint32_t dtype; /* of latents and X: KVF_DTYPE_BF16 or KVF_DTYPE_F16 */
    uint32_t reserved;
};

/* Thread blocks of n elements. */
static inline uint32_t kvf_gpu_latent_blocks(uint64_t n)
{
    const uint32_t a_block = KVF_GPU_LATENT_THREADS * KVF_GPU_LATENT_UNIT;

    return (uint32_t)((n + a_block - 1) / a_block);
}

#endif /* KVF_CODEC_CODEC_LATENT_H */
