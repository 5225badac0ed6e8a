/* SPDX-License-Identifier: Apache-2.0
 *
 * blas.h: products on the GPU by cuBLASLt, opened at run time as the driver is.
 *
 * A product is C = A B^T, or C += A B^T, all by rows: A [m][k] and B [n][k] of bf16 or fp16, C
 * [m][n] of fp32, and sums in fp32; or with B as [k][n], C = A B. What it takes for one shape is
 * found once and kept.
 *
 * Owner: one thread at a time. Calls are made between kvf_gpu_device_enter and _leave.
 */
#ifndef KVF_GPU_BLAS_H
#define KVF_GPU_BLAS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gpu/device.h"

enum kvf_gpu_blas_bounds {
    KVF_GPU_BLAS_SHAPES_MAX = 32,
    KVF_GPU_BLAS_WORKSPACE_BYTES = 32 << 20, /* what cuBLAS advises for Hopper */
};

struct kvf_gpu_blas;

struct kvf_gpu_product {
    uint32_t m;
    uint32_t n;
    uint32_t k;
    uint32_t c_stride;  /* elements from row to row of C */
    uint8_t dtype;      /* of A and B: KVF_DTYPE_BF16, KVF_DTYPE_F16 */
    bool adds;          /* to what C has */
    bool is_by_columns; /* B is [k][n] */
};

/* Open libcublasLt.so.13 or .12, or what KVFERRY_CUBLASLT names, and take a workspace. device stays
 * the caller's. text: what is wrong and the cure. Blocks (the library loads its kernels).
 * KVF_OK; KVF_ERR_UNSUPPORTED: there is none; KVF_ERR_NO_MEMORY, _IO. */
int kvf_gpu_blas_open(struct kvf_gpu_device *device, struct kvf_gpu_blas **blas_out, char *text,
                      size_t text_bytes);

/* Accepts NULL. Products that were queued have ended. Returns NULL. */
struct kvf_gpu_blas *kvf_gpu_blas_close(struct kvf_gpu_blas *blas);

/* Queue a product; addresses on 16 bytes, k a multiple of 8, and n where B is by columns. KVF_OK;
 * KVF_ERR_UNSUPPORTED: the library has no way for this shape; KVF_ERR_IO. */
int kvf_gpu_blas_multiply(struct kvf_gpu_blas *blas, const struct kvf_gpu_product *product,
                          uint64_t a, uint64_t b, uint64_t c, void *stream);

#endif /* KVF_GPU_BLAS_H */
