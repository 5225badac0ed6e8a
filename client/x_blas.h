/* SPDX-License-Identifier: Apache-2.0
 *
 * x_blas.h: BLAS and LAPACK, opened at run time.
 *
 * Few engines need them, and OpenBLAS is 35 MB that starts threads, so nothing of ours links it: it
 * is opened at the first use, as CUDA's driver is, and stays. The Fortran names are used, which
 * every BLAS has (32-bit integers). Any thread; the table is read-only once it is filled.
 */
#ifndef KVF_CLIENT_X_BLAS_H
#define KVF_CLIENT_X_BLAS_H

#include <stddef.h>

enum {
    KVF_BLAS_TEXT_BYTES = 256
};

/* C = alpha op(A) op(B) + beta C, by columns; lengths of the two texts come last. */
typedef void (*kvf_sgemm_fn)(const char *trans_a, const char *trans_b, const int *m, const int *n,
                             const int *k, const float *alpha, const float *a, const int *lda,
                             const float *b, const int *ldb, const float *beta, float *c,
                             const int *ldc, size_t trans_a_bytes, size_t trans_b_bytes);

/* A = U diag(s) V^T, by columns. */
typedef void (*kvf_dgesdd_fn)(const char *job, const int *m, const int *n, double *a,
                              const int *lda, double *s, double *u, const int *ldu, double *vt,
                              const int *ldvt, double *work, const int *lwork, int *iwork,
                              int *info, size_t job_bytes);

struct kvf_blas {
    kvf_sgemm_fn sgemm;
    kvf_dgesdd_fn dgesdd;
};

/* Open $KVFERRY_BLAS if it is set, else OpenBLAS. KVF_OK; KVF_ERR_UNSUPPORTED: text says what is
 * missing and what installs it. */
int kvf_blas_open(struct kvf_blas *blas, char text[KVF_BLAS_TEXT_BYTES]);

#endif /* KVF_CLIENT_X_BLAS_H */
