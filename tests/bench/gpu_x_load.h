/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_x_load.h: what the benches of X share: a model's matrices and rotary tables on the GPU.
 */
#ifndef KVF_TESTS_BENCH_GPU_X_LOAD_H
#define KVF_TESTS_BENCH_GPU_X_LOAD_H

#include "codec/codec_rebuild.h"
#include "kvferry.h"
#include "tests/bench/gpu_load.h"

enum {
    GPU_X_DIGEST = 1, /* all bytes of the weights' */
    GPU_X_LAYERS_MAX = 64,
};

/* Fill in the first part; W_V follows W_K, K and V have heads of one size. */
struct gpu_x_model {
    uint32_t n_layers;
    uint32_t d_model;
    uint32_t n_heads;
    uint32_t dim;
    uint32_t n_positions;
    uint32_t chunk_tokens;
    double theta;

    uint64_t matrices; /* one layer's after the other */
    uint64_t tables;   /* cosines, then sines */
    const void *w_k[GPU_X_LAYERS_MAX];
    const void *w_v[GPU_X_LAYERS_MAX];
};

/* End the process unless status is KVF_OK. */
void gpu_x_must(int status, const char *what);

/* Random bf16 numbers up to `scale`, of which some are made and repeated. Waits. */
void gpu_x_fill(struct kvf_gpu_device *gpu, void *stream, uint64_t to, uint64_t bytes, float scale);

/* Matrices and tables in new device memory. Waits. */
void gpu_x_model_init(struct gpu_x_model *model, struct kvf_gpu_device *gpu, void *stream);

/* Bytes of one layer's matrices. */
uint64_t gpu_x_model_layer_bytes(const struct gpu_x_model *model);

/* As they are registered for X; lists are the model's. */
struct kvf_x_weights gpu_x_model_weights(const struct gpu_x_model *model);

/* What makes K and V of a product, without pages; rows of chunks from a token on, of pages in the
 * order of work.page_ids. */
struct kvf_gpu_rebuild gpu_x_model_rebuild(const struct gpu_x_model *model, uint64_t product,
                                           uint32_t token_first, uint32_t n_tokens);

#endif /* KVF_TESTS_BENCH_GPU_X_LOAD_H */
