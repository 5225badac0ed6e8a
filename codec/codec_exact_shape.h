/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_exact_shape.h: numbers of codec_exact.h's format, and where things are in the parts of one
 * tensor of one strip. Read by C and by CUDA.
 */
#ifndef KVF_CODEC_CODEC_EXACT_SHAPE_H
#define KVF_CODEC_CODEC_EXACT_SHAPE_H

#include <stdint.h>

#ifdef __CUDACC__
#define KVF_EXACT_INLINE static __host__ __device__ __forceinline__
#else
#define KVF_EXACT_INLINE static inline
#endif

enum kvf_exact_layout {
    KVF_EXACT_CHUNK_ELEMENTS = 1024, /* at most; positions are u16 */
    KVF_EXACT_EXPONENTS = 16,
    KVF_EXACT_ESCAPE_BYTES = 3,
    KVF_EXACT_PART_ALIGN = 128, /* KVF_BLOCK_ALIGN_BYTES */
};

#define KVF_EXACT_CHUNK_UNCODED 0x80000000U /* directory: bit 31 */

/* All fit 32 bits: a tensor of one layer has at most 2^28 elements. */
struct kvf_exact_shape {
    uint32_t tokens_a_chunk;
    uint32_t chunks_a_row;
    uint32_t n_chunks;
    uint32_t rest_bytes;      /* of one element */
    uint32_t chunk_bytes;     /* indices of a full chunk */
    uint32_t row_index_bytes; /* indices of a row */
    uint32_t meta_bytes;      /* padded */
    uint32_t index_offset;    /* in codes */
    uint32_t escape_offset;   /* in codes */
    uint32_t raw_bytes;       /* padded: what codec raw would take */
};

KVF_EXACT_INLINE uint32_t kvf_exact_part_bytes(uint32_t bytes)
{
    return (bytes + KVF_EXACT_PART_ALIGN - 1) / KVF_EXACT_PART_ALIGN * KVF_EXACT_PART_ALIGN;
}

KVF_EXACT_INLINE struct kvf_exact_shape kvf_exact_shape(uint32_t n_rows, uint32_t dim,
                                                        uint32_t element_bytes, uint32_t n_tokens)
{
    struct kvf_exact_shape shape;
    shape.tokens_a_chunk = KVF_EXACT_CHUNK_ELEMENTS / dim;
    shape.chunks_a_row = (n_tokens + shape.tokens_a_chunk - 1) / shape.tokens_a_chunk;
    shape.n_chunks = shape.chunks_a_row * n_rows;
    shape.rest_bytes = element_bytes - 1u;
    shape.chunk_bytes = (shape.tokens_a_chunk * dim + 1) / 2;
    uint32_t last_tokens = n_tokens - (shape.chunks_a_row - 1) * shape.tokens_a_chunk;
    shape.row_index_bytes = (shape.chunks_a_row - 1) * shape.chunk_bytes +
                            (last_tokens * dim + 1) / 2;
    shape.meta_bytes = kvf_exact_part_bytes(KVF_EXACT_EXPONENTS +
                                            (shape.n_chunks + 1) * (uint32_t)sizeof(uint32_t));
    uint32_t n_elements = n_rows * n_tokens * dim;
    shape.index_offset = n_elements * shape.rest_bytes;
    shape.escape_offset = shape.index_offset + n_rows * shape.row_index_bytes;
    shape.raw_bytes = kvf_exact_part_bytes(n_elements * element_bytes);
    return shape;
}

KVF_EXACT_INLINE uint32_t kvf_exact_chunk_tokens(const struct kvf_exact_shape *shape,
                                                 uint32_t n_tokens, uint32_t chunk)
{
    uint32_t left = n_tokens - chunk * shape->tokens_a_chunk;
    return left < shape->tokens_a_chunk ? left : shape->tokens_a_chunk;
}

/* Bytes of escapes up to which a strip is still smaller than raw; -1: it never is. */
KVF_EXACT_INLINE int64_t kvf_exact_escape_bytes_max(const struct kvf_exact_shape *shape)
{
    int64_t left = (int64_t)shape->raw_bytes - KVF_EXACT_PART_ALIGN - shape->meta_bytes -
                   shape->escape_offset;
    return left >= 0 ? left : -1;
}

#endif /* KVF_CODEC_CODEC_EXACT_SHAPE_H */
