/* SPDX-License-Identifier: Apache-2.0
 *
 * x_latent.c: latents of X and sums of them; x_internal.h says what is computed.
 */
#include <stdlib.h>
#include <string.h>

#include "client/x_internal.h"
#include "codec/codec_fp.h"

enum {
    LIMIT_BITS = (127 + 64) << 23, /* of fp32: 2^64 */
};

/* What of the file does not fit the weights, or NULL. */
static const char *fault_of(const struct kvf_x_weights *w, const struct kvf_svd_header *h)
{
    uint32_t heads = w->model_heads != 0 ? w->model_heads : w->n_heads;

    if (h->n_layers != w->n_layers || h->d_model != w->d_model) {
        return "other layers, or another width of X";
    }
    if (h->rank != w->stored_width) {
        return "stored_width is not its rank";
    }
    if (h->n_heads != heads || h->dim_k != w->dim_k || h->dim_v != w->dim_v) {
        return "other heads of K and V";
    }
    if (memcmp(h->weights_digest, w->weights_digest, KVF_DIGEST_BYTES) != 0) {
        return "made of weights with another digest";
    }
    return NULL;
}

int kvf_x_factors_read(const char *path, struct kvf_x_factors *factors_out, kvf_log_fn log,
                       void *log_arg)
{
    struct kvf_svd_file file;
    const struct kvf_svd_header *h = &file.header;
    char why[KVF_SVD_WHY_BYTES];
    int status;

    if (path == NULL || factors_out == NULL || factors_out->struct_bytes != sizeof(*factors_out)) {
        return KVF_ERR_INVALID;
    }
    status = kvf_svd_file_open(path, &file, why);
    if (status != KVF_OK) {
        kvf_x_say(log, log_arg, "factors of X: %s", why);
        return status;
    }
    *factors_out = (struct kvf_x_factors){.struct_bytes = sizeof(*factors_out),
                                          .d_model = h->d_model,
                                          .rank = h->rank,
                                          .n_layers = (uint16_t)h->n_layers,
                                          .n_heads = h->n_heads,
                                          .dim_k = h->dim_k,
                                          .dim_v = h->dim_v};
    memcpy(factors_out->weights_digest, h->weights_digest, KVF_DIGEST_BYTES);
    memcpy(factors_out->digest, h->factors_digest, KVF_DIGEST_BYTES);
    kvf_svd_file_close(&file);
    return KVF_OK;
}

int kvf_latent_open(struct kvf_x *x, const uint8_t factors_digest[KVF_DIGEST_BYTES])
{
    const struct kvf_x_weights *w = &x->weights;
    struct kvf_latent *latent = &x->latent;
    char why[KVF_SVD_WHY_BYTES];
    const struct kvf_svd_header *h = &latent->file.header;
    int status = kvf_svd_file_open(w->svd_file, &latent->file, why);
    const char *fault;

    if (status != KVF_OK) {
        kvf_x_say(x->log, x->log_arg, "factors of X: %s", why);
        return status;
    }
    latent->is_open = true;
    latent->is_whole = h->n_heads == w->n_heads;
    latent->layer = KVF_LAYERS_MAX;
    fault = fault_of(w, h);
    if (fault == NULL && memcmp(h->factors_digest, factors_digest, KVF_DIGEST_BYTES) != 0) {
        kvf_x_say(x->log, x->log_arg,
                  "factors of X: %.160s is not the file whose factors_digest the client attached "
                  "with: blocks of others would be read by it",
                  w->svd_file);
        return KVF_ERR_MISMATCH;
    }
    if (fault != NULL) {
        kvf_x_say(x->log, x->log_arg,
                  "factors of X: %.160s is not for these weights: %s; run kvferry svd on them",
                  w->svd_file, fault);
        return KVF_ERR_MISMATCH;
    }
    latent->u = calloc((size_t)h->d_model * h->rank, sizeof(*latent->u));
    latent->m = calloc((size_t)h->rank * h->kv_width, sizeof(*latent->m));
    return latent->u != NULL && latent->m != NULL ? KVF_OK : KVF_ERR_NO_MEMORY;
}

void kvf_latent_close(struct kvf_latent *latent)
{
    if (latent->is_open) {
        kvf_svd_file_close(&latent->file);
    }
    free(latent->u);
    free(latent->m);
    *latent = (struct kvf_latent){0};
}

int kvf_latent_load(struct kvf_x *x, uint32_t layer)
{
    struct kvf_latent *latent = &x->latent;
    char why[KVF_SVD_WHY_BYTES];
    int status;

    if (latent->layer == layer) {
        return KVF_OK;
    }
    latent->layer = KVF_LAYERS_MAX;
    status = kvf_svd_file_layer(&latent->file, layer, latent->u, latent->m, why);
    if (status != KVF_OK) {
        kvf_x_say(x->log, x->log_arg, "factors of X: %.160s: %s", x->weights.svd_file, why);
        return status;
    }
    latent->layer = layer;
    return KVF_OK;
}

bool kvf_latent_is_difference(const struct kvf_x *x, uint32_t layer)
{
    return x->has_differences && layer > x->base_layer;
}

/* All by rows; BLAS counts by columns, so it sees each matrix transposed. */
void kvf_latent_make(const struct kvf_x *x, const float *x_values, uint32_t n_tokens,
                     float *latents_out)
{
    const int d_model = (int)x->weights.d_model;
    const int rank = (int)x->latent.file.header.rank;
    const int n = (int)n_tokens;
    const float one = 1.0f;
    const float zero = 0.0f;

    x->blas.sgemm("N", "N", &rank, &n, &d_model, &one, x->latent.u, &rank, x_values, &d_model,
                  &zero, latents_out, &rank, 1, 1);
}

void kvf_latent_add(const struct kvf_x *x, float *latents, uint32_t n_tokens, bool is_difference,
                    float *sums)
{
    const int d_model = (int)x->weights.d_model;
    const int rank = (int)x->latent.file.header.rank;
    const int n = (int)n_tokens;
    const float one = 1.0f;
    const float beta = is_difference ? 1.0f : 0.0f;

    for (size_t i = 0; i < (size_t)n_tokens * x->latent.file.header.rank; i++) {
        uint32_t bits = kvf_f32_bits(latents[i]) & 0x7fffffff;

        latents[i] = bits < LIMIT_BITS ? latents[i] : 0.0f;
    }
    x->blas.sgemm("T", "N", &d_model, &n, &rank, &one, x->latent.u, &rank, latents, &rank, &beta,
                  sums, &d_model, 1, 1);
}
