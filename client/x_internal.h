/* SPDX-License-Identifier: Apache-2.0
 *
 * x_internal.h: what is registered for X, and latents of it (x_latent.c).
 *
 * With U of a layer, columns orthonormal, X U is its latent. Where a profile stores differences, S
 * is the sum that a reader has of the layer before, fp32[tokens][d_model], and the latent is that
 * of X - S:
 *
 *   encoder   d = coded((X - S) U)   S += d U^T   of a layer by itself: d = coded(X U), S = d U^T
 *   decoder   d from the block       the same     K and V from S
 *
 * so what is left of X U of a layer is what the codec has left of its own latent, and what of X
 * lies outside of the columns of U reaches the next layer's difference. Products are the BLAS's:
 * encoder and decoder have the same d, bit by bit, and sums that differ by roundings only. An
 * element of S is off from its sum in exact arithmetic by at most
 *
 *   sum over the layers added up of g (|S before| + sum over r of |d_r| |U_r|),
 *   g = (rank + 2) 2^-24 / (1 - (rank + 2) 2^-24)
 *
 * in whatever order a BLAS adds; encoder and decoder by twice that from each other. An element of d
 * that is NaN, or 2^64 or more, counts as 0, as in codec/closed_loop.h.
 */
#ifndef KVF_CLIENT_X_INTERNAL_H
#define KVF_CLIENT_X_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>

#include "client/x_blas.h"
#include "client/x_svd_read.h"
#include "kvferry.h"

enum {
    KVF_X_PIECE_TOKENS = 512, /* of one product: enough for its full rate */
};

/* Factors of one layer at a time. */
struct kvf_latent {
    struct kvf_svd_file file;
    bool is_open;
    bool is_whole;  /* K and V of the file are those of the weights, not of more heads */
    uint32_t layer; /* whose factors are there; KVF_LAYERS_MAX: none */
    float *u;       /* [d_model][rank] */
    float *m;       /* [rank][kv_width] */
};

struct kvf_x {
    struct kvf_x_weights weights;
    struct kvf_blas blas;
    kvf_log_fn log;
    void *log_arg;
    char profile[KVF_PROFILE_NAME_BYTES]; /* of the client; "": none was given */
    uint8_t kind;                         /* likewise; 0 */
    bool has_differences;                 /* of latents: layers after base_layer are */
    uint16_t base_layer;
    uint64_t model_fp; /* of the client's plan */
    uint64_t profile_fp;
    struct kvf_latent latent; /* of kind XG */
    uint32_t k_width;         /* n_heads * dim_k */
    uint32_t v_width;
    uint32_t layer; /* whose matrix is in w; KVF_LAYERS_MAX: none */
    float *w;       /* [k_width + v_width][d_model] */
    float *in;      /* [KVF_X_PIECE_TOKENS][d_model] */
    float *out;     /* [KVF_X_PIECE_TOKENS][k_width + v_width] */
    float *bias_k;  /* [k_width], zeroes if there is none */
    float *bias_v;  /* [v_width] */
    float *gain;    /* [dim_k] */
};

/* Put a block that is in a slot of staging, settled unless status says what went wrong before; the
 * slot is released where the put does not take it. What kvf_put says of the block. */
KVF_API int kvf_x_put_staged(struct kvf_client *client, const struct kvf_stage *stage, int status,
                             const struct kvf_key *key, const struct kvf_put_options *options);

/* Put blocks of a chain one after the other, each as the child of the one before, by put_one, whose
 * status it keeps (statuses_out may be NULL). options (may be NULL): of the first one. KVF_OK,
 * KVF_PARTIAL, or what the first block failed with. */
KVF_API int kvf_x_put_chain(int (*put_one)(void *arg, uint32_t i, const struct kvf_key *key,
                                           const struct kvf_put_options *options),
                            void *arg, const struct kvf_key *keys, uint32_t n,
                            const struct kvf_put_options *options, int32_t *statuses_out);

/* Floating-point operations a second of products as in kvf_x_rebuild: the best of some. */
double kvf_x_product_rate(struct kvf_x *x);

/* One line to the log of what is registered. */
void kvf_x_say(kvf_log_fn log, void *arg, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Open the file that the weights name, and compare it with them and with the digest that the client
 * attached with. KVF_OK; KVF_ERR_MISMATCH, _IO, _CORRUPT, _FOREIGN, _NO_MEMORY: the log says
 * why. */
KVF_API int kvf_latent_open(struct kvf_x *x, const uint8_t factors_digest[KVF_DIGEST_BYTES]);

/* Accepts one that is not open. */
KVF_API void kvf_latent_close(struct kvf_latent *latent);

/* Read a layer's factors, unless they are there. KVF_OK; KVF_ERR_IO, _CORRUPT, _NO_MEMORY: the log
 * says why. */
KVF_API int kvf_latent_load(struct kvf_x *x, uint32_t layer);

/* Is a layer stored as the latent of a difference? */
bool kvf_latent_is_difference(const struct kvf_x *x, uint32_t layer);

/* latents_out[n][rank] = x_values[n][d_model] U of the layer that is loaded. */
void kvf_latent_make(const struct kvf_x *x, const float *x_values, uint32_t n_tokens,
                     float *latents_out);

/* sums[n][d_model] = latents[n][rank] U^T, and, of a difference, what was there. What of latents
 * counts as 0 is made 0. */
void kvf_latent_add(const struct kvf_x *x, float *latents, uint32_t n_tokens, bool is_difference,
                    float *sums);

#endif /* KVF_CLIENT_X_INTERNAL_H */
