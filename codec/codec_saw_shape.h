/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw_shape.h: what the host side and the kernels of saw must agree on: how a piece of work
 * is cut into thread blocks. Read by C and by CUDA.
 */
#ifndef KVF_CODEC_CODEC_SAW_SHAPE_H
#define KVF_CODEC_CODEC_SAW_SHAPE_H

#include "codec/block_format.h"
#include "codec/codec_gpu.h"

#ifdef __CUDACC__
#define KVF_SAW_SHAPE static constexpr __host__ __device__ inline
#else
#define KVF_SAW_SHAPE static inline
#endif

enum saw_shape {
    SAW_GENERIC_THREADS = 128, /* a warp has one vector at a time */
    SAW_DECODE_THREADS = 256,
};

/* Fast kernels, encode: a thread block has a row, of 8 sums of all channels, 4 channels a thread. A
 * warp has every n-th tile of 8 tokens. */
KVF_SAW_SHAPE uint32_t saw_encode_threads(uint32_t dim)
{
    return 2 * dim;
}

KVF_SAW_SHAPE uint32_t saw_encode_warps(uint32_t dim)
{
    return dim / 16;
}

KVF_SAW_SHAPE uint32_t saw_encode_tiles(uint32_t dim)
{
    return 256 / 8 / saw_encode_warps(dim); /* KVF_CHUNK_TOKENS_MAX */
}

KVF_SAW_SHAPE uint32_t saw_encode_blocks(const struct kvf_gpu_work *work, uint32_t tensors)
{
    uint32_t n_rows = ((tensors & 1) != 0 ? work->tensors[0].n_rows : 0u) +
                      ((tensors & 2) != 0 ? work->tensors[1].n_rows : 0u);
    return (work->has_v != 0 ? work->n_parts / 2 : work->n_parts) * n_rows;
}

/* Shared memory before the vectors: a threshold a token, sums, mean, signs, and a little. */
KVF_SAW_SHAPE uint32_t saw_encode_more_bytes(uint32_t dim)
{
    return 256 * 4 + 8 * dim * 4 + dim * 4 + dim / 2 * 4 + 128;
}

KVF_SAW_SHAPE uint32_t saw_encode_shared_bytes(const struct kvf_gpu_work *work, uint32_t dim)
{
    return saw_encode_more_bytes(dim) + (work->tokens_max + 7) / 8 * 8 * dim * 2; /* whole tiles */
}

/* Rows of the tensor that has more; thread blocks beyond a tensor's rows do nothing. */
KVF_SAW_SHAPE uint32_t saw_rows_max(const struct kvf_gpu_work *work, uint32_t tensors)
{
    uint32_t k = (tensors & 1) != 0 ? work->tensors[0].n_rows : 0;
    uint32_t v = (tensors & 2) != 0 ? work->tensors[1].n_rows : 0;
    return k > v ? k : v;
}

#endif /* KVF_CODEC_CODEC_SAW_SHAPE_H */
