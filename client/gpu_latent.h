/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_latent.h: X on the GPU from latents of it (kind KVF_KIND_XG), as client/x_internal.h says:
 * S = d U^T of a layer by itself, S += d U^T of one that is a difference; X is S, rounded to its
 * type.
 *
 * Products take U as two matrices of X's type, the second one of what rounding has left of the
 * first. So with bf16 an element of U is off by at most e = 2^-18 of itself, with fp16 by 2^-24 of
 * itself or by 2^-25. An element of S is off from its sum in exact arithmetic, by U as it is in its
 * file, by at most
 *
 *   sum over the layers added up of (8 g (|S before| + sum over r of |d_r| |U_r|) + sum of |d_r| e)
 *
 * with g of x_internal.h, which counts twice since there are two products, and four times for what
 * tensor cores cut off from their sums.
 *
 * Who puts makes latents the same way round: D = X, or X - S rounded to the type of X, and D U by
 * two products, rounded to that type. An element of D is off by at most half a unit of that type,
 * 2^-9 of itself with bf16, which is what X itself was rounded by. What rounding leaves of a layer
 * reaches the next difference, as what the codec leaves does: S of who puts is made of what has
 * been encoded, by the same calls as that of who reads.
 *
 * Owner: the thread of the GPU handle. Calls are made between kvf_gpu_device_enter and _leave.
 */
#ifndef KVF_CLIENT_GPU_LATENT_H
#define KVF_CLIENT_GPU_LATENT_H

#include "client/gpu_internal.h"
#include "gpu/blas.h"

struct kvf_gpu_latent;
struct kvf_gpu_x;

/* Read the factors that weights name, and take device memory for them and for S and X of so many
 * tokens. Refused with one line of the client's log: a file that is not for these weights or not
 * the one that the client attached with, a rank that products do not take; for memory text says how
 * much. KVF_OK; KVF_ERR_MISMATCH, _IO, _CORRUPT, _FOREIGN, _UNSUPPORTED, _NO_MEMORY. */
int kvf_gpu_latent_open(struct kvf_gpu *gpu, const struct kvf_x_weights *weights,
                        uint32_t tokens_max, struct kvf_gpu_latent **latent_out, char *text,
                        size_t text_bytes);

/* Accepts NULL. What was queued has ended. Returns NULL. */
struct kvf_gpu_latent *kvf_gpu_latent_close(struct kvf_gpu_latent *latent);

/* Queue what makes X of a layer of n tokens, [n][d_model] of the type of X, from their latents,
 * [n][rank], of which what counts as 0 is made 0. Layers come in order from 0 on, of the same
 * tokens, and X is used before the next one is queued, all on one stream or one stream behind the
 * other. KVF_OK; KVF_ERR_IO, _UNSUPPORTED. */
int kvf_gpu_latent_queue(struct kvf_gpu_latent *latent, struct kvf_gpu_blas *blas, uint32_t layer,
                         uint64_t latents, uint32_t n_tokens, void *stream, uint64_t *x_out);

/* Arrays of who puts, in device memory on 256 bytes. */
struct kvf_gpu_latent_room {
    uint64_t differences; /* [n][d_model] of the type of X */
    uint64_t product;     /* fp32 [n][rank] */
    uint64_t latents;     /* [n][rank] of the type of X */
    uint64_t sums;        /* fp32 [n][d_model] */
};

uint32_t kvf_gpu_latent_width(const struct kvf_gpu_latent *latent); /* d_model */

/* Is a layer the latent of a difference? */
bool kvf_gpu_latent_is_difference(const struct kvf_gpu_latent *latent, uint32_t layer);

/* Is it of that plan, whose profile a client may have been given later? */
bool kvf_gpu_latent_is_of(const struct kvf_gpu_latent *latent, const struct kvf_codec_plan *plan);

/* Queue room->latents of a layer's X, [n][d_model] on 16 bytes, which is read up to then. Layers in
 * order, on streams as above. KVF_OK; KVF_ERR_IO, _UNSUPPORTED. */
int kvf_gpu_latent_make(const struct kvf_gpu_latent *latent, struct kvf_gpu_blas *blas,
                        uint32_t layer, uint64_t x, uint32_t n_tokens,
                        const struct kvf_gpu_latent_room *room, void *stream);

/* Queue S of a layer from its latents as a reader has them, of which what counts as 0 is made 0. */
int kvf_gpu_latent_add(const struct kvf_gpu_latent *latent, struct kvf_gpu_blas *blas,
                       uint32_t layer, uint64_t latents, uint32_t n_tokens, uint64_t sums,
                       void *stream);

/* --- gpu_x.c ---------------------------------------------------------------------------------- */

/* What is registered for X makes latents of it for this GPU handle; else NULL. */
struct kvf_gpu_latent *kvf_gpu_x_latent(const struct kvf_gpu_x *x, const struct kvf_gpu *gpu);

#endif /* KVF_CLIENT_GPU_LATENT_H */
