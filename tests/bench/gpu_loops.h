/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_loops.h: work that an engine has for a GPU, for benches of what is taken from it: products by
 * cuBLAS, which is opened at run time, and passes over memory.
 */
#ifndef KVF_TESTS_BENCH_GPU_LOOPS_H
#define KVF_TESTS_BENCH_GPU_LOOPS_H

#include <stdbool.h>

#include "tests/bench/gpu_load.h"

#define LOOP_BYTES (4ull << 30) /* what the memory-bound loop reads */

enum gpu_loop {
    LOOP_GEMM_4096,
    LOOP_GEMM_8192,
    LOOP_MEMBOUND,
    LOOP_PREFILL, /* products as of a layer's prefill, with passes over memory between them */
    LOOPS,
};

extern const char *const gpu_loop_names[LOOPS];

struct blas {
    void *handle;
    int (*create)(void **handle);
    int (*set_stream)(void *handle, void *stream);
    int (*gemm)(void *handle, int transa, int transb, int m, int n, int k, const void *alpha,
                const void *a, int a_type, int lda, const void *b, int b_type, int ldb,
                const void *beta, void *c, int c_type, int ldc, int compute, int algorithm);
};

struct gpu_loops {
    struct kvf_gpu_device *gpu;
    struct blas blas;
    bool has_blas;
    uint64_t memory; /* of the loops */
    void *pass;      /* the kernel of memory-bound work */
    void *stream;    /* the engine's */
};

/* Memory, kernels, and cuBLAS if it is there, on a stream of the caller's. */
void gpu_loops_init(struct gpu_loops *loops, struct kvf_gpu_device *gpu, void *stream);

/* Queue one step of a loop. */
void gpu_loops_step(struct gpu_loops *loops, enum gpu_loop loop);

#endif /* KVF_TESTS_BENCH_GPU_LOOPS_H */
