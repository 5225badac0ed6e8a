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
    SAW_DECODE_TOKENS = 128, /* of one thread block, fast kernels */
    SAW_SHARED_MORE_BYTES = 256,
};

/* Fast kernels, encode: 8 sums of all channels, 4 channels a thread. */
KVF_SAW_SHAPE uint32_t saw_encode_threads(uint32_t dim)
{
    return 2 * dim;
}

/* Tokens of one thread block: the whole row where all of it is needed for the mean. */
KVF_SAW_SHAPE uint32_t saw_encode_piece_tokens(const struct kvf_gpu_work *work, uint32_t is_v,
                                               uint32_t dim)
{
    if ((work->tensors[is_v].flags & KVF_TENSOR_CENTER) != 0) {
        return work->tokens_max;
    }
    return dim < 128 ? dim : 128;
}

KVF_SAW_SHAPE uint32_t saw_encode_pieces(const struct kvf_gpu_work *work, uint32_t is_v,
                                         uint32_t dim)
{
    uint32_t tokens = saw_encode_piece_tokens(work, is_v, dim);
    return (work->tokens_max + tokens - 1) / tokens;
}

/* Thread blocks of one tensor. Those of K come first: they are the longer ones if K is centred. */
KVF_SAW_SHAPE uint32_t saw_encode_blocks(const struct kvf_gpu_work *work, uint32_t is_v,
                                         uint32_t dim)
{
    uint32_t n_parts = work->has_v != 0 ? work->n_parts / 2 : work->n_parts;
    return n_parts * work->tensors[is_v].n_rows * saw_encode_pieces(work, is_v, dim);
}

/* Tokens that shared memory has room for. */
KVF_SAW_SHAPE uint32_t saw_encode_kept_tokens(const struct kvf_gpu_work *work, uint32_t tensors,
                                              uint32_t dim)
{
    uint32_t tokens = 0;
    for (uint32_t is_v = 0; is_v < 2; is_v++) {
        if ((tensors >> is_v & 1) != 0) {
            uint32_t piece = saw_encode_piece_tokens(work, is_v, dim);
            tokens = piece > tokens ? piece : tokens;
        }
    }
    return tokens;
}

KVF_SAW_SHAPE uint32_t saw_encode_shared_bytes(const struct kvf_gpu_work *work, uint32_t tensors,
                                               uint32_t dim)
{
    /* thresholds, sums, mean, signs, and what is left of struct encode_shared */
    uint32_t more = 256 * 4 + 8 * dim * 4 + dim * 4 + dim * 2 + SAW_SHARED_MORE_BYTES;
    return saw_encode_kept_tokens(work, tensors, dim) * dim * 2 + more;
}

/* Rows of the tensor that has more; thread blocks beyond a tensor's rows do nothing. */
KVF_SAW_SHAPE uint32_t saw_rows_max(const struct kvf_gpu_work *work, uint32_t tensors)
{
    uint32_t k = (tensors & 1) != 0 ? work->tensors[0].n_rows : 0;
    uint32_t v = (tensors & 2) != 0 ? work->tensors[1].n_rows : 0;
    return k > v ? k : v;
}

KVF_SAW_SHAPE uint32_t saw_decode_pieces(const struct kvf_gpu_work *work)
{
    return (work->tokens_max + SAW_DECODE_TOKENS - 1) / SAW_DECODE_TOKENS;
}

#endif /* KVF_CODEC_CODEC_SAW_SHAPE_H */
