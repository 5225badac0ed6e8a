/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_rebuild.h: what the host tells the kernels that make K and V of a layer's product
 * X [W_K | W_V]^T (part 9 of kvferry.h): bias, norm and rotation, to the engine's pages. Read by C
 * and by CUDA; device addresses are uint64_t.
 *
 * Which rows go to which pages travels with the launch: there is no list in memory that would have
 * to stay as it is until a kernel has read it, and none that kernels would read from the host.
 */
#ifndef KVF_CODEC_CODEC_REBUILD_H
#define KVF_CODEC_CODEC_REBUILD_H

#include "codec/codec_gpu.h"

#define KVF_GPU_REBUILD_THREADS    256
#define KVF_GPU_REBUILD_PIECES_MAX 48  /* of one launch */
#define KVF_GPU_REBUILD_PAGES_MAX  512 /* of all pieces of one launch */

/* Tokens that follow each other in the product and in their sequence, from the first one of a page
 * on. */
struct kvf_gpu_rebuild_piece {
    uint32_t row; /* of the product: the first token's */
    uint32_t n_tokens;
    uint32_t position_first;
    uint32_t first_page; /* index in page_ids of the page that holds the first token */
};

struct kvf_gpu_rebuild {
    uint64_t product;              /* const float *: [rows][width], K's columns first */
    uint64_t bias_k;               /* [n_heads * dim_k] of dtype; 0: none */
    uint64_t bias_v;               /* [n_heads * dim_v] of dtype; 0: none */
    uint64_t gain;                 /* [dim_k] of dtype: of K's norm; 0: there is none */
    uint64_t cosines;              /* const float *: [positions][rope_dims / 2] */
    uint64_t sines;                /* const float * */
    uint64_t bases[2];             /* of the layer's first pages: K, V */
    struct kvf_gpu_pages pages[2]; /* K, V */
    uint32_t n_heads;
    uint32_t dim_k;
    uint32_t dim_v;
    uint32_t width;
    uint32_t rope_dims; /* 0: nothing turns */
    uint32_t tokens_a_page;
    float eps;          /* of K's norm */
    uint8_t dtype;      /* of biases and gain */
    uint8_t kv_dtype;   /* of the pages */
    uint8_t rope_style; /* enum kvf_rope_style */
    uint8_t reserved;
    uint32_t n_pieces;
    uint32_t piece_tokens; /* thread blocks a piece: no piece has more tokens */
    struct kvf_gpu_rebuild_piece pieces[KVF_GPU_REBUILD_PIECES_MAX];
    uint32_t page_ids[KVF_GPU_REBUILD_PAGES_MAX];
};

#ifndef __CUDACC__
_Static_assert(sizeof(struct kvf_gpu_rebuild) <= 4000, "parameters of a kernel");

/* The kernel for what work is of: thread blocks of KVF_GPU_REBUILD_THREADS, piece_tokens of them
 * for each piece. Static storage. */
const char *kvf_gpu_rebuild_kernel(const struct kvf_gpu_rebuild *work);
#endif

#endif /* KVF_CODEC_CODEC_REBUILD_H */
