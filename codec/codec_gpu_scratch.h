/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_gpu_scratch.h: what the host side and the kernels of raw and exact must agree on: shapes of
 * launches, and what lies where in work.scratch. Read by C and by CUDA. n_parts is that of the list
 * (n_parts_all), and a part has the place of its number there.
 *
 *   struct kvf_gpu_escapes [n_parts]   of parts with codes, counted for the raw area
 *   and if K or V of any kind is of kivi, whose strips do not show what is an escape:
 *   u32 words[n_parts][escape_words]   of a part of T tokens [rows][(T + 31) / 32], bit i % 32 of
 *                                      word i / 32: the vector of token i is one
 *   and if K or V of any kind is of exact:
 *   struct kvf_exact_gpu_part [n_parts]
 *   u32 chunk[n_parts][n_chunks]       see kvf_exact_gpu_chunk
 *   u16 bins[n_parts][n_chunks][64]    how often each exponent of a window occurs in the chunk
 */
#ifndef KVF_CODEC_CODEC_GPU_SCRATCH_H
#define KVF_CODEC_CODEC_GPU_SCRATCH_H

#include "codec/codec_exact_shape.h"
#include "codec/codec_gpu.h"

enum kvf_raw_gpu_numbers {
    KVF_RAW_THREADS = 256,
    KVF_RAW_PIECE_BYTES = 16384, /* of a part, by one thread block */
    KVF_ESCAPES_THREADS = 256,
    KVF_ESCAPES_SHARE = 16, /* KVF_CODEC_ESCAPE_SHARE */
};

/* Bits of a launch's tensors, of kvf_escapes_*, where layers are encoded one at a time. */
enum kvf_escapes_bits {
    KVF_ESCAPES_LAYER = 1 << 2,   /* of one layer; the table and the result are not whole */
    KVF_ESCAPES_WRITTEN = 1 << 3, /* all sections are there */
};

enum kvf_exact_gpu_numbers {
    KVF_EXACT_WARPS = 8,         /* of a thread block; a chunk at a time each */
    KVF_EXACT_PIECE_CHUNKS = 32, /* of a part, by one thread block, at most */
    KVF_EXACT_CHOOSE_THREADS = 512,
    KVF_EXACT_CHOOSE_SHORT_THREADS = 256,
    KVF_EXACT_CHOOSE_SHORT_CHUNKS = 64, /* a part of more is not short */
    KVF_EXACT_PLACE_THREADS = 1024,     /* at least the parts of a block */
    KVF_EXACT_BINS = 64,
    KVF_EXACT_BASE_STEP = 8, /* between first exponents of windows */
};

/* What the raw area has to know of a part. */
struct kvf_gpu_escapes {
    uint32_t n;
    uint32_t section_bytes; /* KVF_ESCAPES_TOO_MANY: the part becomes raw, which the host does */
};
#define KVF_ESCAPES_TOO_MANY 0xffffffffu

/* Where a launch's tensors have the number of chunks of the largest part: kernels of exact are told
 * it, since working it out takes divisions. Thread blocks share the chunks of a part evenly. */
#define KVF_EXACT_CHUNKS_SHIFT 2

/* A chunk's word. After counting: the first exponent of its window, and KVF_EXACT_CHUNK_WIDE if the
 * chunk has others below it, zeros apart. After choosing: its entry in the directory. */
enum kvf_exact_gpu_chunk {
    KVF_EXACT_CHUNK_WIDE = 1 << 8,
};

/* What is known of a part once its exponents are chosen. */
struct kvf_exact_gpu_part {
    uint32_t bytes; /* in the strip */
    uint32_t escape_bytes;
    uint32_t is_raw; /* does not pay */
    uint32_t reserved;
    uint8_t exponent[KVF_EXACT_EXPONENTS];
    uint8_t index[256]; /* KVF_EXACT_EXPONENTS: none */
};

KVF_EXACT_INLINE struct kvf_exact_shape kvf_exact_gpu_shape(const struct kvf_gpu_tensor *tensor,
                                                            uint32_t n_tokens)
{
    return kvf_exact_shape(tensor->n_heads, tensor->dim, tensor->element_bytes, n_tokens);
}

/* Chunks of the largest part. exact_tensors: bits of K and V. */
KVF_EXACT_INLINE uint32_t kvf_exact_gpu_chunks(const struct kvf_gpu_work *work,
                                               uint32_t exact_tensors)
{
    uint32_t n_chunks = 0;
    for (int i = 0; i < 2; i++) {
        if ((exact_tensors >> i & 1) != 0) {
            uint32_t n = kvf_exact_gpu_shape(&work->tensors[i], work->tokens_max).n_chunks;
            n_chunks = n > n_chunks ? n : n_chunks;
        }
    }
    return n_chunks;
}

struct kvf_gpu_scratch {
    uint64_t words_offset;
    uint64_t exact_parts_offset;
    uint64_t chunks_offset;
    uint64_t bins_offset;
    uint64_t bytes;
};

KVF_EXACT_INLINE uint64_t kvf_gpu_scratch_align(uint64_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

/* n_chunks: 0 without parts of exact. */
KVF_EXACT_INLINE struct kvf_gpu_scratch kvf_gpu_scratch(uint32_t n_parts, uint32_t escape_words,
                                                        uint32_t n_chunks)
{
    struct kvf_gpu_scratch scratch;
    uint64_t all_chunks = (uint64_t)n_parts * n_chunks;
    uint64_t parts_bytes = n_chunks != 0 ? n_parts * sizeof(struct kvf_exact_gpu_part) : 0;
    scratch.words_offset = kvf_gpu_scratch_align(n_parts * sizeof(struct kvf_gpu_escapes));
    scratch.exact_parts_offset = scratch.words_offset +
                                 kvf_gpu_scratch_align((uint64_t)n_parts * escape_words *
                                                       sizeof(uint32_t));
    scratch.chunks_offset = scratch.exact_parts_offset + kvf_gpu_scratch_align(parts_bytes);
    scratch.bins_offset = scratch.chunks_offset +
                          kvf_gpu_scratch_align(all_chunks * sizeof(uint32_t));
    scratch.bytes = scratch.bins_offset +
                    kvf_gpu_scratch_align(all_chunks * KVF_EXACT_BINS * sizeof(uint16_t));
    return scratch;
}

#endif /* KVF_CODEC_CODEC_GPU_SCRATCH_H */
