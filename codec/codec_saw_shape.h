/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw_shape.h: what the host side and the kernels of saw must agree on: how a piece of work
 * is cut into thread blocks. Read by C and by CUDA.
 */
#ifndef KVF_CODEC_CODEC_SAW_SHAPE_H
#define KVF_CODEC_CODEC_SAW_SHAPE_H

#include "codec/block_format.h"
#include "codec/codec_gpu.h"

#include <stdbool.h>

#ifdef __CUDACC__
#define KVF_SAW_SHAPE static constexpr __host__ __device__ inline
#else
#define KVF_SAW_SHAPE static inline
#endif

enum saw_shape {
    SAW_GENERIC_THREADS = 128, /* a warp has one vector at a time */
    SAW_ENCODE_THREADS = 256,
    SAW_ZEROS_THREADS = 256, /* encode with zeros */
    SAW_SEARCH_RATIOS = 3,   /* that the fast encoders try, by a table of so many steps */
    SAW_SEARCH_STEPS = 64,
};

/* Fast kernels, encode. A warp has a share of a row, up to 4 tiles of 8 tokens; eight warps share a
 * row of 128 tokens or more, whose mean is over eight samples. */
KVF_SAW_SHAPE uint32_t saw_encode_row_warps(const struct kvf_gpu_work *work)
{
    return work->tokens_max >= 128 ? 8 : work->tokens_max > 64 ? 4 : work->tokens_max > 32 ? 2 : 1;
}

KVF_SAW_SHAPE uint32_t saw_encode_rows(const struct kvf_gpu_work *work, uint32_t tensors)
{
    uint32_t n_rows = ((tensors & 1) != 0 ? work->tensors[0].n_rows : 0u) +
                      ((tensors & 2) != 0 ? work->tensors[1].n_rows : 0u);
    return (work->has_v != 0 ? work->n_parts / 2 : work->n_parts) * n_rows;
}

/* Rows that a thread block works on at a time are a unit. */
KVF_SAW_SHAPE uint32_t saw_encode_units(const struct kvf_gpu_work *work, uint32_t tensors)
{
    uint32_t a_unit = SAW_ENCODE_THREADS / 32 / saw_encode_row_warps(work);
    return (saw_encode_rows(work, tensors) + a_unit - 1) / a_unit;
}

/* Is the mean made by the block, if there is one, or do all eight warps share it? Where they have
 * rows of their own there is room for no mean. */
KVF_SAW_SHAPE bool saw_encode_takes_mean(const struct kvf_gpu_work *work,
                                         const struct kvf_gpu_tensor *tensor)
{
    return (tensor->flags & KVF_TENSOR_CENTER_PROFILE) == 0 || saw_encode_row_warps(work) == 8;
}

/* Thread blocks that a multiprocessor has room for. */
KVF_SAW_SHAPE uint32_t saw_encode_blocks_a_processor(uint32_t dim)
{
    return dim <= 64 ? 3 : 2;
}

/* Tiles of a warp in shared memory. */
KVF_SAW_SHAPE uint32_t saw_encode_slots(uint32_t dim)
{
    return dim <= 128 ? 4 : 2;
}

KVF_SAW_SHAPE uint32_t saw_encode_sign_words(uint32_t dim)
{
    return (dim + 7) / 8 * 4; /* two channels each; 16 bytes at a time are read */
}

/* What is known about rows; means, sums and their counts. */
KVF_SAW_SHAPE uint32_t saw_encode_sums_bytes(uint32_t dim)
{
    return 64 * 80 + 2 * dim * 4 + 8 * dim * 4 + 8 * 4;
}

/* Shared memory before the rings: the above, signs of K and of V. */
KVF_SAW_SHAPE uint32_t saw_encode_more_bytes(const struct kvf_gpu_work *work, uint32_t dim)
{
    uint32_t n_words = saw_encode_sign_words(work->tensors[0].dim) +
                       saw_encode_sign_words(work->tensors[1].dim);
    return (saw_encode_sums_bytes(dim) + n_words * 4 + 127) / 128 * 128;
}

KVF_SAW_SHAPE uint32_t saw_encode_shared_bytes(const struct kvf_gpu_work *work, uint32_t dim)
{
    uint32_t ring = saw_encode_slots(dim) * 8 * dim * 2;
    return saw_encode_more_bytes(work, dim) + SAW_ENCODE_THREADS / 32 * ring;
}

/* With a search: its table is behind the rings. */
KVF_SAW_SHAPE uint32_t saw_search_shared_bytes(const struct kvf_gpu_work *work, uint32_t dim)
{
    return saw_encode_shared_bytes(work, dim) + SAW_SEARCH_STEPS * 4;
}

/* Fast kernels, decode: a thread block has a row. Few bits want more tiles of a warp on their way.
 */
KVF_SAW_SHAPE uint32_t saw_decode_threads(uint32_t bits)
{
    return bits < 4 ? 128 : 256;
}

/* Thread blocks that a multiprocessor has room for. */
KVF_SAW_SHAPE uint32_t saw_decode_blocks_a_processor(uint32_t dim, uint32_t bits)
{
    return (dim <= 128 ? 1024u : 512u) / saw_decode_threads(bits);
}

/* Rows of the tensor that has more; thread blocks beyond a tensor's rows do nothing. */
KVF_SAW_SHAPE uint32_t saw_rows_max(const struct kvf_gpu_work *work, uint32_t tensors)
{
    uint32_t k = (tensors & 1) != 0 ? work->tensors[0].n_rows : 0;
    uint32_t v = (tensors & 2) != 0 ? work->tensors[1].n_rows : 0;
    return k > v ? k : v;
}

#endif /* KVF_CODEC_CODEC_SAW_SHAPE_H */
