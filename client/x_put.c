/* SPDX-License-Identifier: Apache-2.0
 *
 * x_put.c: X of a request, put layer by layer (part 9 of kvferry.h).
 *
 * A block has all layers of its tokens, and an engine computes one layer of all tokens after the
 * other. So each chunk has an encoder of its own, with memory of its own, from the first layer to
 * the last one; staging is taken only at the end, one block at a time. Latents of all tokens are
 * made a layer at a time, and what a reader has of them is added up (x_internal.h).
 */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "client/client_internal.h"
#include "client/x_internal.h"
#include "codec/convert.h"

/* One chunk on its way. */
struct chunk {
    struct kvf_block_encoder encoder;
    uint8_t *record; /* of record_bytes_max: pages that are not written cost nothing */
    void *workspace;
};

struct kvf_x_put {
    struct kvf_client *client;
    struct kvf_codec_plan plan; /* a client may be given another one meanwhile */
    uint32_t n_tokens;
    uint32_t n_chunks;
    uint32_t layer; /* the next one */

    /* kind XG; else NULL */
    struct kvf_x *x;
    uint8_t *latents; /* [n_tokens][rank], of the geometry's dtype */
    float *decoded;   /* [n_tokens][rank] */
    float *sums;      /* [n_tokens][d_model] */
    float *piece;     /* [KVF_X_PIECE_TOKENS][d_model + rank] */

    struct chunk chunks[];
};

static uint32_t chunk_tokens(const struct kvf_x_put *put, uint32_t i)
{
    uint32_t full = put->plan.geometry.chunk_tokens;
    uint32_t left = put->n_tokens - i * full;

    return left < full ? left : full;
}

static size_t workspace_bytes(const struct kvf_codec_plan *plan)
{
    size_t align = KVF_CODEC_WORKSPACE_ALIGN;

    return (plan->workspace_bytes + align - 1) / align * align;
}

/* What a chunk can take in all. */
static uint64_t chunk_bytes(const struct kvf_codec_plan *plan)
{
    return plan->record_bytes_max + workspace_bytes(plan);
}

static int chunk_begin(struct kvf_x_put *put, uint32_t i, uint32_t token_start)
{
    struct chunk *chunk = &put->chunks[i];
    const struct kvf_codec_plan *plan = &put->plan;

    chunk->record = malloc(plan->record_bytes_max);
    chunk->workspace = aligned_alloc(KVF_CODEC_WORKSPACE_ALIGN, workspace_bytes(plan));
    if (chunk->record == NULL || chunk->workspace == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    return kvf_block_encode_begin(
        &chunk->encoder, plan, token_start + i * plan->geometry.chunk_tokens, chunk_tokens(put, i),
        (void *)chunk->record, chunk->record + KVF_RECORD_PAGE_BYTES,
        plan->record_bytes_max - KVF_RECORD_PAGE_BYTES, chunk->workspace);
}

static bool options_ok(const struct kvf_client *client, const struct kvf_x_put_options *options)
{
    const struct kvf_geometry *geometry = &client->plan.geometry;

    return client->has_geometry && geometry->kind >= KVF_KIND_X && options != NULL &&
           options->struct_bytes == sizeof(*options) && options->reserved == 0 &&
           options->n_tokens != 0 && options->token_start % geometry->chunk_tokens == 0 &&
           options->n_tokens <= UINT32_MAX - options->token_start &&
           options->n_tokens <= (uint32_t)KVF_REQUEST_KEYS_MAX * geometry->chunk_tokens;
}

/* Is what is registered for X that of the client, and of the profile that it has now? */
static int check_x(struct kvf_client *client, const struct kvf_x *x)
{
    const struct kvf_codec_plan *plan = &client->plan;

    if (x == NULL && plan->geometry.kind == KVF_KIND_XG) {
        kvf_client_log(client, 0,
                       "latents are made of X by the factors that kvf_x_open has registered: "
                       "give it in x");
        return KVF_ERR_REFUSED;
    }
    if (x != NULL && (x->kind != plan->geometry.kind || x->model_fp != plan->model_fp ||
                      x->profile_fp != plan->profile_fp)) {
        kvf_client_log(client, 0,
                       "what is registered for X is of another client, or of a profile that this "
                       "one had before: kvf_x_open again");
        return KVF_ERR_MISMATCH;
    }
    return KVF_OK;
}

/* What latents take beside the chunks. */
static uint64_t latent_bytes(const struct kvf_client *client, const struct kvf_x *x,
                             uint32_t n_tokens)
{
    const struct kvf_geometry *geometry = &client->plan.geometry;
    uint64_t rank = (uint64_t)geometry->n_heads * geometry->dim_k;
    uint64_t d_model;

    if (geometry->kind != KVF_KIND_XG) {
        return 0;
    }
    d_model = x->weights.d_model;
    return n_tokens * (rank * (kvf_dtype_bytes(geometry->dtype) + sizeof(float)) +
                       d_model * sizeof(float)) +
           KVF_X_PIECE_TOKENS * (d_model + rank) * sizeof(float);
}

static int latents_init(struct kvf_x_put *put, struct kvf_x *x)
{
    const struct kvf_geometry *geometry = &put->plan.geometry;
    size_t rank = (size_t)geometry->n_heads * geometry->dim_k;
    size_t d_model;

    if (geometry->kind != KVF_KIND_XG) {
        return KVF_OK;
    }
    d_model = x->weights.d_model;
    put->x = x;
    put->latents = calloc(put->n_tokens * rank, kvf_dtype_bytes(geometry->dtype));
    put->decoded = calloc(put->n_tokens * rank, sizeof(*put->decoded));
    put->sums = calloc(put->n_tokens * d_model, sizeof(*put->sums));
    put->piece = calloc(KVF_X_PIECE_TOKENS * (d_model + rank), sizeof(*put->piece));
    return put->latents != NULL && put->decoded != NULL && put->sums != NULL && put->piece != NULL
               ? KVF_OK
               : KVF_ERR_NO_MEMORY;
}

/* Is it within the bound that the caller has set? */
static int check_memory(struct kvf_client *client, const struct kvf_x_put_options *options,
                        uint32_t n_chunks)
{
    uint64_t bytes = n_chunks * chunk_bytes(&client->plan) +
                     latent_bytes(client, options->x, options->n_tokens);

    if (options->memory_bytes != 0 && bytes > options->memory_bytes) {
        kvf_client_log(client, 1,
                       "%u chunks of X on their way can take %llu bytes: put fewer tokens at a "
                       "time, or allow more in memory_bytes",
                       n_chunks, (unsigned long long)bytes);
        return KVF_ERR_TOO_LARGE;
    }
    return KVF_OK;
}

int kvf_x_put_begin(struct kvf_client *client, const struct kvf_x_put_options *options,
                    struct kvf_x_put **put_out)
{
    struct kvf_x_put *put = NULL;
    uint32_t n_chunks;
    int status;

    if (client == NULL || put_out == NULL || !options_ok(client, options)) {
        return KVF_ERR_INVALID;
    }
    kvf_client_enter(client);
    n_chunks = (options->n_tokens + client->plan.geometry.chunk_tokens - 1) /
               client->plan.geometry.chunk_tokens;
    status = check_x(client, options->x);
    client->x_refused += status != KVF_OK;
    if (status == KVF_OK) {
        status = check_memory(client, options, n_chunks);
    }
    if (status == KVF_OK) {
        put = calloc(1, sizeof(*put) + n_chunks * sizeof(put->chunks[0]));
        status = put != NULL ? KVF_OK : KVF_ERR_NO_MEMORY;
    }
    if (put != NULL) {
        put->client = client;
        put->plan = client->plan;
        put->n_tokens = options->n_tokens;
        put->n_chunks = n_chunks;
        status = latents_init(put, options->x);
    }
    for (uint32_t i = 0; status == KVF_OK && i < n_chunks; i++) {
        status = chunk_begin(put, i, options->token_start);
    }
    kvf_client_leave(client);
    if (status != KVF_OK) {
        (void)kvf_x_put_cancel(put);
        return status;
    }
    *put_out = put;
    return KVF_OK;
}

struct kvf_x_put *kvf_x_put_cancel(struct kvf_x_put *put)
{
    if (put == NULL) {
        return NULL;
    }
    for (uint32_t i = 0; i < put->n_chunks; i++) {
        free(put->chunks[i].record);
        free(put->chunks[i].workspace);
    }
    free(put->latents);
    free(put->decoded);
    free(put->sums);
    free(put->piece);
    free(put);
    return NULL;
}

/* The next layer of each chunk, from data of the geometry's width and dtype. */
static void encode_chunks(struct kvf_x_put *put, const void *data, size_t token_stride_bytes,
                          float *decoded_out)
{
    const struct kvf_geometry *geometry = &put->plan.geometry;
    size_t width = (size_t)geometry->n_heads * geometry->dim_k;
    size_t head_bytes = geometry->dim_k * kvf_dtype_bytes(geometry->dtype);

    for (uint32_t i = 0; i < put->n_chunks; i++) {
        struct chunk *chunk = &put->chunks[i];
        size_t token = (size_t)i * geometry->chunk_tokens;
        /* only read */
        void *layers[1] = {(uint8_t *)(uintptr_t)data + token * token_stride_bytes};
        struct kvf_kv_view view = {.struct_bytes = sizeof(view),
                                   .tokens_a_page = KVF_CHUNK_TOKENS_MAX,
                                   .k = {.layers = layers,
                                         .token_stride_bytes = token_stride_bytes,
                                         .head_stride_bytes = head_bytes}};

        (void)kvf_block_encode_layer(&chunk->encoder, &view,
                                     decoded_out != NULL ? decoded_out + token * width : NULL);
    }
}

/* Latents of n tokens from first on, of X or of its difference to the sums. */
static void make_latents(struct kvf_x_put *put, const uint8_t *data, size_t token_stride_bytes,
                         uint32_t first, uint32_t n)
{
    const struct kvf_geometry *geometry = &put->plan.geometry;
    bool is_difference = kvf_latent_is_difference(put->x, put->layer);
    uint32_t d_model = put->x->weights.d_model;
    uint32_t rank = (uint32_t)geometry->n_heads * geometry->dim_k;
    size_t latent_stride_bytes = rank * kvf_dtype_bytes(geometry->dtype);
    float *values = put->piece;
    float *latents = put->piece + (size_t)KVF_X_PIECE_TOKENS * d_model;

    for (uint32_t i = 0; i < n; i++) {
        float *x = values + (size_t)i * d_model;
        const float *sum = put->sums + (size_t)(first + i) * d_model;

        kvf_convert_widen(geometry->dtype, data + (first + i) * token_stride_bytes, d_model, x);
        for (uint32_t k = 0; is_difference && k < d_model; k++) {
            x[k] -= sum[k];
        }
    }
    kvf_latent_make(put->x, values, n, latents);
    for (uint32_t i = 0; i < n; i++) {
        kvf_convert_narrow(geometry->dtype, latents + (size_t)i * rank, rank,
                           put->latents + (first + i) * latent_stride_bytes);
    }
}

/* X of the next layer, as a latent. */
static int put_latents(struct kvf_x_put *put, const void *data, size_t token_stride_bytes,
                       float *decoded_out)
{
    const struct kvf_geometry *geometry = &put->plan.geometry;
    bool is_difference = kvf_latent_is_difference(put->x, put->layer);
    size_t element_bytes = kvf_dtype_bytes(geometry->dtype);
    size_t rank = (size_t)geometry->n_heads * geometry->dim_k;
    size_t d_model = put->x->weights.d_model;
    int status = kvf_latent_load(put->x, put->layer);

    if (status != KVF_OK) {
        return status;
    }
    if (token_stride_bytes == 0) {
        token_stride_bytes = d_model * element_bytes;
    }
    for (uint32_t first = 0; first < put->n_tokens; first += KVF_X_PIECE_TOKENS) {
        uint32_t left = put->n_tokens - first;

        make_latents(put, data, token_stride_bytes, first,
                     left < KVF_X_PIECE_TOKENS ? left : KVF_X_PIECE_TOKENS);
    }
    encode_chunks(put, put->latents, rank * element_bytes, put->decoded);
    for (uint32_t first = 0; first < put->n_tokens; first += KVF_X_PIECE_TOKENS) {
        uint32_t left = put->n_tokens - first;

        kvf_latent_add(put->x, put->decoded + first * rank,
                       left < KVF_X_PIECE_TOKENS ? left : KVF_X_PIECE_TOKENS, is_difference,
                       put->sums + first * d_model);
    }
    if (decoded_out != NULL) {
        memcpy(decoded_out, put->sums, put->n_tokens * d_model * sizeof(*decoded_out));
    }
    return KVF_OK;
}

int kvf_x_put_layer(struct kvf_x_put *put, uint32_t layer, const void *data,
                    size_t token_stride_bytes, float *decoded_out)
{
    int status = KVF_OK;

    if (put == NULL || data == NULL || layer != put->layer ||
        layer == put->plan.geometry.n_layers) {
        return KVF_ERR_INVALID;
    }
    if (put->x != NULL) {
        status = put_latents(put, data, token_stride_bytes, decoded_out);
    } else {
        const struct kvf_geometry *geometry = &put->plan.geometry;

        if (token_stride_bytes == 0) {
            token_stride_bytes = (size_t)geometry->n_heads * geometry->dim_k *
                                 kvf_dtype_bytes(geometry->dtype);
        }
        encode_chunks(put, data, token_stride_bytes, decoded_out);
    }
    put->layer += status == KVF_OK;
    return status;
}

/* --- the end ---------------------------------------------------------------------------------- */

int kvf_x_put_staged(struct kvf_client *client, const struct kvf_stage *stage, int status,
                     const struct kvf_key *key, const struct kvf_put_options *options)
{
    struct kvf_put_item item = {.struct_bytes = sizeof(item),
                                .source = KVF_SOURCE_STAGED,
                                .key = *key,
                                .stage = stage->stage};

    if (status == KVF_OK) {
        int32_t of_block = KVF_OK;

        status = kvf_put(client, &item, 1, options, &of_block);
        status = status < KVF_OK ? status : of_block;
    }
    if (status < KVF_OK) {
        (void)kvf_stage_release(client, stage->stage); /* invalid where the put took it */
    }
    return status;
}

int kvf_x_put_chain(int (*put_one)(void *arg, uint32_t i, const struct kvf_key *key,
                                   const struct kvf_put_options *options),
                    void *arg, const struct kvf_key *keys, uint32_t n,
                    const struct kvf_put_options *options, int32_t *statuses_out)
{
    struct kvf_put_options one = {.struct_bytes = sizeof(one)};
    int failed = KVF_OK;
    uint32_t n_good = 0;

    if (options != NULL) {
        one = *options;
    }
    for (uint32_t i = 0; i < n; i++) {
        int status = put_one(arg, i, &keys[i], &one);

        n_good += status >= KVF_OK;
        failed = status < KVF_OK && failed == KVF_OK ? status : failed;
        if (statuses_out != NULL) {
            statuses_out[i] = status;
        }
        one.parent = keys[i];
        one.depth++;
    }
    return n_good == n ? KVF_OK : n_good > 0 ? KVF_PARTIAL : failed;
}

/* One block that is encoded, through staging. */
static int put_block(void *arg, uint32_t i, const struct kvf_key *key,
                     const struct kvf_put_options *options)
{
    struct kvf_x_put *put = arg;
    struct chunk *chunk = &put->chunks[i];
    struct kvf_stage stage;
    size_t payload_bytes;
    int status = kvf_block_encode_end(&chunk->encoder, &payload_bytes);

    if (status != KVF_OK) {
        return status;
    }
    /* a record of another plan would be refused by every reader */
    if (put->client->plan.profile_fp != put->plan.profile_fp ||
        put->client->plan.model_fp != put->plan.model_fp) {
        return KVF_ERR_MISMATCH;
    }
    status = kvf_stage_acquire(put->client, payload_bytes, &stage);
    if (status != KVF_OK) {
        return status;
    }
    memcpy(stage.record, chunk->record, KVF_RECORD_PAGE_BYTES + payload_bytes);
    kvf_client_enter(put->client);
    status = kvf_stage_settle(put->client, stage.stage,
                              (uint32_t)(KVF_RECORD_PAGE_BYTES + payload_bytes));
    kvf_client_leave(put->client);
    return kvf_x_put_staged(put->client, &stage, status, key, options);
}

int kvf_x_put_end(struct kvf_x_put *put, const struct kvf_key *keys, uint32_t n,
                  const struct kvf_put_options *options, int32_t *statuses_out)
{
    int status;

    if (put == NULL || keys == NULL || n != put->n_chunks ||
        put->layer != put->plan.geometry.n_layers ||
        (options != NULL && options->struct_bytes != sizeof(*options))) {
        return KVF_ERR_INVALID;
    }
    status = kvf_x_put_chain(put_block, put, keys, n, options, statuses_out);
    (void)kvf_x_put_cancel(put);
    return status;
}
