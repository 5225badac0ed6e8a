/* SPDX-License-Identifier: Apache-2.0
 *
 * x_svd.h: the singular value decomposition of [W_K | W_V], and its file (x_svd_format.h).
 *
 * X U has as many elements as the rank, at most as many as K and V, and K and V without bias follow
 * from it by the second factor: it is what a model with fewer K/V heads than query heads can store
 * in place of X. One thread at a time; LAPACK has its own.
 */
#ifndef KVF_CLIENT_X_SVD_H
#define KVF_CLIENT_X_SVD_H

#include "client/weights_file.h"
#include "client/x_blas.h"
#include "client/x_svd_read.h"

/* One layer's matrix w, [kv_width][d_model], as checkpoints have it, into
 * u [d_model][rank] and m [rank][kv_width], rank at most the lesser of both widths. KVF_OK;
 * KVF_ERR_NO_MEMORY; KVF_ERR_INVALID: w holds something that is no number, or the iteration does
 * not end. */
int kvf_svd_layer(const struct kvf_blas *blas, const float *w, uint32_t d_model, uint32_t kv_width,
                  uint32_t rank, float *u_out, float *m_out, char why[KVF_SVD_WHY_BYTES]);

/* How far two factors are from what they should be. */
struct kvf_svd_error {
    double orthogonality; /* largest |U^T U - I| */
    double residual;      /* ||U M - W|| / ||W||, root of sums of squares */
};

/* KVF_OK; KVF_ERR_NO_MEMORY. */
int kvf_svd_check(const struct kvf_blas *blas, const float *w, uint32_t d_model, uint32_t kv_width,
                  uint32_t rank, const float *u, const float *m, struct kvf_svd_error *error_out);

/* --- the file --------------------------------------------------------------------------------- */

struct kvf_svd_writer;

/* Begin a file beside path, which takes its place when all is well. rank: of all layers. KVF_OK;
 * KVF_ERR_NO_MEMORY, _IO. */
int kvf_svd_writer_open(const char *path, const struct kvf_weights_model *model, uint32_t rank,
                        const uint8_t weights_digest[KVF_DIGEST_BYTES],
                        struct kvf_svd_writer **writer_out, char why[KVF_SVD_WHY_BYTES]);

/* The next layer. KVF_OK; KVF_ERR_IO. */
int kvf_svd_writer_add(struct kvf_svd_writer *writer, const float *u, const float *m,
                       char why[KVF_SVD_WHY_BYTES]);

/* All layers are there: put the file in its place, on stable storage. The writer is gone whatever
 * comes of it. KVF_OK; KVF_ERR_IO. */
int kvf_svd_writer_commit(struct kvf_svd_writer *writer, char why[KVF_SVD_WHY_BYTES]);

/* Give up; nothing is left. Accepts NULL. */
void kvf_svd_writer_destroy(struct kvf_svd_writer *writer);

#endif /* KVF_CLIENT_X_SVD_H */
