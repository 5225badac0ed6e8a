/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_kivi_shape.h: what the host side and the kernels of kivi must agree on: how a piece of work
 * is cut into thread blocks. Read by C and by CUDA.
 *
 * A thread block has a tile: up to 128 tokens of a row, so that groups of tokens are whole in one.
 */
#ifndef KVF_CODEC_CODEC_KIVI_SHAPE_H
#define KVF_CODEC_CODEC_KIVI_SHAPE_H

#include "codec/codec_gpu.h"

#ifdef __CUDACC__
#define KVF_KIVI_SHAPE static constexpr __host__ __device__ inline
#else
#define KVF_KIVI_SHAPE static inline
#endif

enum kivi_shape {
    KIVI_THREADS = 256,
    KIVI_TILE_TOKENS = 128,
    KIVI_FAST_BLOCKS_A_PROCESSOR = 3, /* that a multiprocessor has room for */
};

/* Thread blocks of a row. In a decode they may have a tile more than that, since the tokens wanted
 * may begin anywhere. */
KVF_KIVI_SHAPE uint32_t kivi_tiles(const struct kvf_gpu_work *work)
{
    return (work->tokens_max + KIVI_TILE_TOKENS - 1) / KIVI_TILE_TOKENS;
}

/* Rows of the tensor that has more; thread blocks beyond a tensor's rows do nothing. */
KVF_KIVI_SHAPE uint32_t kivi_rows_max(const struct kvf_gpu_work *work, uint32_t tensors)
{
    uint32_t k = (tensors & 1) != 0 ? work->tensors[0].n_rows : 0;
    uint32_t v = (tensors & 2) != 0 ? work->tensors[1].n_rows : 0;
    return k > v ? k : v;
}

#endif /* KVF_CODEC_CODEC_KIVI_SHAPE_H */
