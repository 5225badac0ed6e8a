/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_rebuild.h: what the host tells the kernel that makes K and V of a layer's product
 * X [W_K | W_V]^T (part 9 of kvferry.h): bias, norm and rotation, to the engine's pages. Read by C
 * and by CUDA; device addresses are uint64_t.
 */
#ifndef KVF_CODEC_CODEC_REBUILD_H
#define KVF_CODEC_CODEC_REBUILD_H

#include "codec/codec_gpu.h"

#define KVF_GPU_REBUILD_THREADS 256

/* A block's tokens, which follow each other in the product and in their sequence. */
struct kvf_gpu_rebuild_item {
    uint32_t n_tokens; /* 0: of none is anything wanted */
    uint32_t position_first;
    uint32_t first_page; /* index in page_ids of the page that holds the first token */
    uint32_t reserved;
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
    uint64_t items;                /* const struct kvf_gpu_rebuild_item * */
    uint64_t page_ids;             /* const uint32_t * */
    uint32_t item_tokens;          /* rows of the product from one item to the next */
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
    uint8_t reserved[5];
};

#endif /* KVF_CODEC_CODEC_REBUILD_H */
