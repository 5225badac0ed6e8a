/* SPDX-License-Identifier: Apache-2.0
 *
 * x_rebuild.c: K and V of a layer from its input X (part 9 of kvferry.h).
 *
 * Per layer: [W_K | W_V] is widened to fp32 once, then pieces of KVF_X_PIECE_TOKENS tokens go
 * through one product each, and from its result, which is still in the cache, through bias, norm
 * and rotation into the pages. Latents become sums of X first (x_internal.h), or, where a profile
 * stores no differences, go through the other factor, U M = [W_K | W_V].
 */
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "client/client_internal.h"
#include "client/x_internal.h"
#include "client/x_weights.h"
#include "codec/codec_fp.h"

enum {
    D_MODEL_MAX = 1 << 16, /* elements of X */
    NO_LAYER = KVF_LAYERS_MAX,
};

void kvf_x_say(kvf_log_fn log, void *arg, const char *format, ...)
{
    char text[320];
    va_list args;

    if (log == NULL) {
        return;
    }
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    log(arg, 0, text);
}

/* --- elements --------------------------------------------------------------------------------- */

static bool dtype_is_known(uint8_t dtype)
{
    return dtype == KVF_DTYPE_BF16 || dtype == KVF_DTYPE_F16 || dtype == KVF_DTYPE_F32;
}

/* n elements at any address to fp32. */
static void widen(const void *from, uint8_t dtype, size_t n, float *to)
{
    const uint8_t *bytes = from;
    uint16_t half;

    if (dtype == KVF_DTYPE_F32) {
        memcpy(to, from, n * sizeof(*to));
    } else if (dtype == KVF_DTYPE_BF16) {
        for (size_t i = 0; i < n; i++) {
            memcpy(&half, bytes + 2 * i, sizeof(half));
            to[i] = kvf_f32_from_bf16(half);
        }
    } else {
        for (size_t i = 0; i < n; i++) {
            memcpy(&half, bytes + 2 * i, sizeof(half));
            to[i] = kvf_f32_from_f16(half);
        }
    }
}

/* n values to elements at any address. */
static void narrow(const float *from, size_t n, uint8_t dtype, uint8_t *to)
{
    if (dtype == KVF_DTYPE_F32) {
        memcpy(to, from, n * sizeof(*from));
        return;
    }
    for (size_t i = 0; i < n; i++) {
        uint16_t half = dtype == KVF_DTYPE_BF16 ? kvf_bf16_from_f32(from[i])
                                                : kvf_f16_from_f32(from[i]);

        memcpy(to + 2 * i, &half, sizeof(half));
    }
}

/* --- registration ----------------------------------------------------------------------------- */

static bool is_zero(const uint8_t *bytes, size_t n)
{
    uint8_t any = 0;

    for (size_t i = 0; i < n; i++) {
        any |= bytes[i];
    }
    return any == 0;
}

static bool layers_are_there(const void *const *layers, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        if (layers[i] == NULL) {
            return false;
        }
    }
    return true;
}

static uint32_t rope_dims(const struct kvf_x_weights *w)
{
    return w->rope_dims != 0 ? w->rope_dims : w->dim_k;
}

/* What is wrong with the weights' shape, or NULL. */
static const char *shape_fault(const struct kvf_x_weights *w)
{
    if (w->d_model < 1 || w->d_model > D_MODEL_MAX) {
        return "d_model is not in 1..65536";
    }
    if (w->n_layers < 1 || w->n_layers > KVF_LAYERS_MAX) {
        return "n_layers is not in 1..512";
    }
    if (w->n_heads < 1 || w->n_heads > KVF_HEADS_MAX ||
        (w->model_heads != 0 && w->model_heads < w->n_heads)) {
        return "n_heads is not in 1..1024, or more than model_heads";
    }
    if (w->dim_k < 1 || w->dim_k > KVF_DIM_MAX || w->dim_v > KVF_DIM_MAX) {
        return "dim_k is not in 1..1024, or dim_v not in 0..1024";
    }
    if (!dtype_is_known(w->dtype) || !dtype_is_known(w->kv_dtype) || w->reserved != 0) {
        return "dtype and kv_dtype are each one of bf16, f16, f32";
    }
    if (w->w_k == NULL || !layers_are_there(w->w_k, w->n_layers)) {
        return "W_K is missing, of some layer or of all";
    }
    if (w->dim_v != 0 && (w->w_v == NULL || !layers_are_there(w->w_v, w->n_layers))) {
        return "W_V is missing, of some layer or of all";
    }
    if ((w->b_k != NULL && !layers_are_there(w->b_k, w->n_layers)) ||
        (w->b_v != NULL && !layers_are_there(w->b_v, w->n_layers)) ||
        (w->k_norm != NULL && !layers_are_there(w->k_norm, w->n_layers))) {
        return "a bias or the gain of K's norm is missing of some layer";
    }
    if (w->k_norm != NULL && !(w->k_norm_eps >= 0 && w->k_norm_eps < 1)) {
        return "k_norm_eps is not in 0..1";
    }
    return NULL;
}

/* Does a client store what these weights take? */
static bool client_fits(const struct kvf_client *client, const struct kvf_x_weights *w)
{
    const struct kvf_geometry *g = &client->geometry;
    uint32_t stored = w->stored_width != 0 ? w->stored_width : w->d_model;
    bool is_x = g->kind == KVF_KIND_X && stored == w->d_model;
    bool is_latent = g->kind == KVF_KIND_XG;

    return client->has_geometry && (is_x || is_latent) && g->n_layers == w->n_layers &&
           (uint32_t)g->n_heads * g->dim_k == stored;
}

/* What is wrong with the rotation, or NULL. */
static const char *rope_fault(const struct kvf_x_weights *w)
{
    if (w->rope_style > KVF_ROPE_STYLE_INTERLEAVED) {
        return "rope_style is none of enum kvf_rope_style";
    }
    if (w->rope_style == KVF_ROPE_STYLE_NONE) {
        return NULL;
    }
    if (rope_dims(w) % 2 != 0 || rope_dims(w) > w->dim_k) {
        return "rope_dims is odd or more than dim_k";
    }
    if (w->rope_cos == NULL || w->rope_sin == NULL || w->rope_positions == 0) {
        return "the tables of the rotary embedding are missing";
    }
    return NULL;
}

int kvf_x_weights_check(const struct kvf_client *client, const struct kvf_x_weights *w,
                        kvf_log_fn log, void *arg)
{
    uint32_t heads = w->model_heads != 0 ? w->model_heads : w->n_heads;
    uint32_t stored = w->stored_width != 0 ? w->stored_width : w->d_model;
    uint32_t kv_width = heads * ((uint32_t)w->dim_k + w->dim_v);
    const char *fault = shape_fault(w);

    if (fault == NULL) {
        fault = rope_fault(w);
    }
    if (fault != NULL) {
        kvf_x_say(log, arg, "weights for X: %s", fault);
        return KVF_ERR_INVALID;
    }
    if (is_zero(w->weights_digest, sizeof(w->weights_digest))) {
        kvf_x_say(log, arg,
                  "weights for X: no digest: K and V of another model could come of them");
        return KVF_ERR_REFUSED;
    }
    if (stored > kv_width) {
        kvf_x_say(
            log, arg,
            "weights for X: %u elements a token and layer would be stored in place of K and V, "
            "which are %u (%u heads of %u + %u): store K and V, or latents (kvferry svd)",
            stored, kv_width, heads, w->dim_k, w->dim_v);
        return KVF_ERR_REFUSED;
    }
    if (w->svd_file == NULL && client != NULL && client->geometry.kind == KVF_KIND_XG) {
        kvf_x_say(log, arg,
                  "weights for X: latents mean nothing without the factors they were made by: name "
                  "the file of kvferry svd in svd_file");
        return KVF_ERR_REFUSED;
    }
    if (w->svd_file != NULL && (client == NULL || client->geometry.kind != KVF_KIND_XG)) {
        kvf_x_say(
            log, arg,
            "weights for X: svd_file is for a client of latents (kind XG), and none is given");
        return KVF_ERR_INVALID;
    }
    if (client != NULL && !client_fits(client, w)) {
        kvf_x_say(
            log, arg,
            "weights for X: %u layers of %u elements would be read, and the client stores %u of "
            "%u, kind %u",
            w->n_layers, stored, client->geometry.n_layers,
            (uint32_t)client->geometry.n_heads * client->geometry.dim_k, client->geometry.kind);
        return KVF_ERR_MISMATCH;
    }
    if (client != NULL &&
        (memcmp(w->weights_digest, client->weights_digest, KVF_DIGEST_BYTES) != 0 ||
         memcmp(w->adapter_digest, client->hello.adapter_digest, KVF_DIGEST_BYTES) != 0)) {
        kvf_x_say(log, arg,
                  "weights for X: their digests are not those that the client attached with");
        return KVF_ERR_MISMATCH;
    }
    return KVF_OK;
}

/* What of the client decides how latents are read. */
static void client_take(struct kvf_x *x, const struct kvf_client *client)
{
    const struct kvf_codec_plan *plan = &client->plan;

    snprintf(x->profile, sizeof(x->profile), "%s", plan->profile->name);
    x->kind = plan->geometry.kind;
    x->has_differences = x->kind == KVF_KIND_XG && plan->profile->first_layers != 0;
    x->base_layer = plan->base_layer;
    x->model_fp = plan->model_fp;
    x->profile_fp = plan->profile_fp;
}

static int arrays_init(struct kvf_x *x)
{
    const struct kvf_x_weights *w = &x->weights;
    size_t width = x->k_width + x->v_width;

    x->w = calloc(width * w->d_model, sizeof(*x->w));
    x->in = calloc((size_t)KVF_X_PIECE_TOKENS * w->d_model, sizeof(*x->in));
    x->out = calloc(KVF_X_PIECE_TOKENS * width, sizeof(*x->out));
    x->bias_k = calloc(width, sizeof(*x->bias_k));
    x->gain = calloc(w->dim_k, sizeof(*x->gain));
    if (x->w == NULL || x->in == NULL || x->out == NULL || x->bias_k == NULL || x->gain == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    x->bias_v = x->bias_k + x->k_width;
    return KVF_OK;
}

static int x_open(struct kvf_client *client, const struct kvf_x_weights *weights,
                  struct kvf_x **x_out)
{
    char text[KVF_BLAS_TEXT_BYTES];
    struct kvf_x *x;
    kvf_log_fn log;
    void *arg;
    int status;

    log = weights->log == NULL && client != NULL ? client->log : weights->log;
    arg = weights->log == NULL && client != NULL ? client->log_arg : weights->log_arg;
    status = kvf_x_weights_check(client, weights, log, arg);
    if (status != KVF_OK) {
        return status;
    }
    x = calloc(1, sizeof(*x));
    if (x == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    x->weights = *weights;
    x->log = log;
    x->log_arg = arg;
    x->layer = NO_LAYER;
    x->k_width = (uint32_t)weights->n_heads * weights->dim_k;
    x->v_width = (uint32_t)weights->n_heads * weights->dim_v;
    if (client != NULL) {
        client_take(x, client);
    }
    if (weights->svd_file != NULL) {
        status = kvf_latent_open(x, client->factors_digest);
    }
    if (status == KVF_OK) {
        status = kvf_blas_open(&x->blas, text);
        if (status != KVF_OK) {
            kvf_x_say(log, arg, "K and V cannot be rebuilt from X: %s", text);
        }
    }
    if (status == KVF_OK) {
        status = arrays_init(x);
    }
    if (status != KVF_OK) {
        kvf_x_close(x);
        return status;
    }
    *x_out = x;
    return KVF_OK;
}

int kvf_x_open(struct kvf_client *client, const struct kvf_x_weights *weights, struct kvf_x **x_out)
{
    int status;

    if (weights == NULL || weights->struct_bytes != sizeof(*weights) || x_out == NULL) {
        return KVF_ERR_INVALID;
    }
    status = x_open(client, weights, x_out);
    if (status != KVF_OK && client != NULL) {
        client->x_refused++;
    }
    return status;
}

struct kvf_x *kvf_x_close(struct kvf_x *x)
{
    if (x != NULL) {
        kvf_latent_close(&x->latent);
        free(x->w);
        free(x->in);
        free(x->out);
        free(x->bias_k);
        free(x->gain);
        free(x);
    }
    return NULL;
}

/* --- one layer -------------------------------------------------------------------------------- */

/* Its matrices and vectors, as fp32. */
static void layer_load(struct kvf_x *x, uint32_t layer)
{
    const struct kvf_x_weights *w = &x->weights;

    if (x->layer == layer) {
        return;
    }
    widen(w->w_k[layer], w->dtype, (size_t)x->k_width * w->d_model, x->w);
    if (x->v_width != 0) {
        widen(w->w_v[layer], w->dtype, (size_t)x->v_width * w->d_model,
              x->w + (size_t)x->k_width * w->d_model);
    }
    if (w->b_k != NULL) {
        widen(w->b_k[layer], w->dtype, x->k_width, x->bias_k);
    }
    if (w->b_v != NULL && x->v_width != 0) {
        widen(w->b_v[layer], w->dtype, x->v_width, x->bias_v);
    }
    if (w->k_norm != NULL) {
        widen(w->k_norm[layer], w->dtype, w->dim_k, x->gain);
    }
    x->layer = layer;
}

/* out = from [W_K | W_V]^T, all by rows; BLAS counts by columns, so it sees each transposed. */
static void product(struct kvf_x *x, const float *from, uint32_t n_tokens)
{
    const int width = (int)(x->k_width + x->v_width);
    const int d_model = (int)x->weights.d_model;
    const int n = (int)n_tokens;
    const float one = 1.0f;
    const float zero = 0.0f;

    x->blas.sgemm("T", "N", &width, &n, &d_model, &one, x->w, &d_model, from, &d_model, &zero,
                  x->out, &width, 1, 1);
}

/* out = latents M, likewise. */
static void latent_product(struct kvf_x *x, const float *latents, uint32_t n_tokens)
{
    const int width = (int)(x->k_width + x->v_width);
    const int rank = (int)x->latent.file.header.rank;
    const int n = (int)n_tokens;
    const float one = 1.0f;
    const float zero = 0.0f;

    x->blas.sgemm("N", "N", &width, &n, &rank, &one, x->latent.m, &width, latents, &rank, &zero,
                  x->out, &width, 1, 1);
}

double kvf_x_product_rate(struct kvf_x *x)
{
    const double flop_max = 1e9; /* of one: some 10 ms */
    double of_token = 2.0 * x->weights.d_model * (x->k_width + x->v_width);
    uint32_t n_tokens = of_token * KVF_X_PIECE_TOKENS <= flop_max ? KVF_X_PIECE_TOKENS
                                                                  : (uint32_t)(flop_max / of_token);
    uint64_t best_ns = UINT64_MAX;

    n_tokens = n_tokens < 16 ? 16 : n_tokens;
    layer_load(x, 0);
    for (int i = 0; i < 4; i++) {
        uint64_t begun_ns = kvf_now_ns();
        uint64_t took_ns;

        product(x, x->in, n_tokens);
        took_ns = kvf_now_ns() - begun_ns;
        best_ns = took_ns < best_ns ? took_ns : best_ns;
    }
    return of_token * n_tokens * 1e9 / (double)(best_ns != 0 ? best_ns : 1);
}

static void norm(const struct kvf_x *x, float *vector)
{
    uint32_t dim = x->weights.dim_k;
    float sum = 0.0f;
    float scale;

    for (uint32_t i = 0; i < dim; i++) {
        sum += vector[i] * vector[i];
    }
    scale = 1.0f / kvf_sqrt_f32(sum / (float)dim + x->weights.k_norm_eps);
    for (uint32_t i = 0; i < dim; i++) {
        vector[i] = vector[i] * scale * x->gain[i];
    }
}

static void rotate(const struct kvf_x *x, uint32_t position, float *vector)
{
    const struct kvf_x_weights *w = &x->weights;
    uint32_t half = rope_dims(w) / 2;
    const float *cosines = w->rope_cos + (size_t)position * half;
    const float *sines = w->rope_sin + (size_t)position * half;
    uint32_t step = w->rope_style == KVF_ROPE_STYLE_HALF ? 1 : 2;
    uint32_t apart = w->rope_style == KVF_ROPE_STYLE_HALF ? half : 1;

    for (uint32_t i = 0; i < half; i++) {
        float a = vector[i * step];
        float b = vector[i * step + apart];

        vector[i * step] = a * cosines[i] - b * sines[i];
        vector[i * step + apart] = b * cosines[i] + a * sines[i];
    }
}

/* Where the view has a token of the layer; the formula is kvferry.h's. */
static uint8_t *token_address(const struct kvf_kv_view *kv, const struct kvf_tensor_view *tensor,
                              uint32_t layer, uint32_t token)
{
    uint32_t page = token / kv->tokens_a_page;

    if (kv->page_table != NULL) {
        page = kv->page_table[page];
    }
    return (uint8_t *)tensor->layers[layer] + page * tensor->page_stride_bytes +
           token % kv->tokens_a_page * tensor->token_stride_bytes;
}

static uint32_t position_of(const struct kvf_x_input *input, uint32_t token)
{
    return input->positions != NULL ? input->positions[token] : input->position_first + token;
}

/* One token's product to its K and V in the pages. */
static void finish_token(const struct kvf_x *x, uint32_t layer, const struct kvf_x_input *input,
                         uint32_t token, float *values, const struct kvf_kv_view *kv)
{
    const struct kvf_x_weights *w = &x->weights;
    uint8_t *k = token_address(kv, &kv->k, layer, token);
    float *v_values = values + x->k_width;

    for (uint32_t i = 0; w->b_k != NULL && i < x->k_width; i++) {
        values[i] += x->bias_k[i];
    }
    for (uint32_t head = 0; head < w->n_heads; head++) {
        float *vector = values + (size_t)head * w->dim_k;

        if (w->k_norm != NULL) {
            norm(x, vector);
        }
        if (w->rope_style != KVF_ROPE_STYLE_NONE) {
            rotate(x, position_of(input, token), vector);
        }
        narrow(vector, w->dim_k, w->kv_dtype, k + head * kv->k.head_stride_bytes);
    }
    if (x->v_width == 0) {
        return;
    }
    for (uint32_t i = 0; w->b_v != NULL && i < x->v_width; i++) {
        v_values[i] += x->bias_v[i];
    }
    for (uint32_t head = 0; head < w->n_heads; head++) {
        narrow(v_values + (size_t)head * w->dim_v, w->dim_v, w->kv_dtype,
               token_address(kv, &kv->v, layer, token) + head * kv->v.head_stride_bytes);
    }
}

static int check_rebuild(const struct kvf_x *x, uint32_t layer, const struct kvf_x_input *input,
                         const struct kvf_kv_view *kv)
{
    if (layer >= x->weights.n_layers || input == NULL || input->struct_bytes != sizeof(*input) ||
        !dtype_is_known(input->dtype) || input->data == NULL || input->n_tokens == 0 ||
        kv == NULL || kv->struct_bytes != sizeof(*kv) || kv->tokens_a_page == 0 ||
        kv->k.layers == NULL || kv->k.layers[layer] == NULL ||
        (x->v_width != 0 && (kv->v.layers == NULL || kv->v.layers[layer] == NULL))) {
        return KVF_ERR_INVALID;
    }
    if (x->latent.is_open && input->sums == NULL && (x->has_differences || !x->latent.is_whole)) {
        kvf_x_say(x->log, x->log_arg,
                  "K and V cannot be rebuilt from X: its latents are added up, or rebuilt by some "
                  "heads alone, and there is no memory for that: give %u fp32 numbers a token in "
                  "sums",
                  x->weights.d_model);
        return KVF_ERR_INVALID;
    }
    if (x->weights.rope_style == KVF_ROPE_STYLE_NONE) {
        return KVF_OK;
    }
    for (uint32_t token = 0; token < input->n_tokens; token++) {
        uint32_t position = position_of(input, token);

        if (position >= x->weights.rope_positions ||
            (input->positions == NULL && position < input->position_first)) {
            kvf_x_say(
                x->log, x->log_arg,
                "K and V cannot be rebuilt from X: token %u is at position %u of its sequence, and "
                "the rotary tables have %u",
                token, position, x->weights.rope_positions);
            return KVF_ERR_MISMATCH;
        }
    }
    return KVF_OK;
}

/* Tokens of the input from first on, through the product, to out. */
static void piece_multiply(struct kvf_x *x, uint32_t layer, const struct kvf_x_input *input,
                           uint32_t first, uint32_t n)
{
    bool is_latent = x->latent.is_open;
    uint32_t d_model = x->weights.d_model;
    uint32_t width = is_latent ? x->latent.file.header.rank : d_model;
    size_t stride_bytes = input->token_stride_bytes != 0 ? input->token_stride_bytes
                                                         : width * kvf_dtype_bytes(input->dtype);

    for (uint32_t i = 0; i < n; i++) {
        widen((const uint8_t *)input->data + (first + i) * stride_bytes, input->dtype, width,
              x->in + (size_t)i * width);
    }
    if (!is_latent) {
        product(x, x->in, n);
    } else if (input->sums == NULL) {
        latent_product(x, x->in, n);
    } else {
        float *sums = input->sums + (size_t)first * d_model;

        kvf_latent_add(x, x->in, n, kvf_latent_is_difference(x, layer), sums);
        product(x, sums, n);
    }
}

int kvf_x_rebuild(struct kvf_x *x, uint32_t layer, const struct kvf_x_input *input,
                  const struct kvf_kv_view *kv)
{
    size_t width;
    int status;

    if (x == NULL) {
        return KVF_ERR_INVALID;
    }
    status = check_rebuild(x, layer, input, kv);
    if (status == KVF_OK && x->latent.is_open) {
        status = kvf_latent_load(x, layer);
    }
    if (status != KVF_OK) {
        return status;
    }
    width = x->k_width + x->v_width;
    layer_load(x, layer);
    for (uint32_t first = 0; first < input->n_tokens; first += KVF_X_PIECE_TOKENS) {
        uint32_t left = input->n_tokens - first;
        uint32_t n = left < KVF_X_PIECE_TOKENS ? left : KVF_X_PIECE_TOKENS;

        piece_multiply(x, layer, input, first, n);
        for (uint32_t i = 0; i < n; i++) {
            finish_token(x, layer, input, first + i, x->out + i * width, kv);
        }
    }
    return KVF_OK;
}
