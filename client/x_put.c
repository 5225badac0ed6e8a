/* SPDX-License-Identifier: Apache-2.0
 *
 * x_put.c: X of a request, put layer by layer (part 9 of kvferry.h).
 *
 * A block has all layers of its tokens, and an engine computes one layer of all tokens after the
 * other. So each chunk has an encoder of its own, with memory of its own, from the first layer to
 * the last one; staging is taken only at the end, one block at a time.
 */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "client/client_internal.h"

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

int kvf_x_put_begin(struct kvf_client *client, const struct kvf_x_put_options *options,
                    struct kvf_x_put **put_out)
{
    struct kvf_x_put *put = NULL;
    uint32_t n_chunks;
    int status = KVF_OK;

    if (client == NULL || put_out == NULL || !options_ok(client, options)) {
        return KVF_ERR_INVALID;
    }
    kvf_client_enter(client);
    n_chunks = (options->n_tokens + client->plan.geometry.chunk_tokens - 1) /
               client->plan.geometry.chunk_tokens;
    if (options->memory_bytes != 0 &&
        n_chunks * chunk_bytes(&client->plan) > options->memory_bytes) {
        kvf_client_log(
            client, 1,
            "%u chunks of X on their way can take %llu bytes: put fewer tokens at a time, or "
            "allow more in memory_bytes",
            n_chunks, (unsigned long long)(n_chunks * chunk_bytes(&client->plan)));
        status = KVF_ERR_TOO_LARGE;
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
    for (uint32_t i = 0; put != NULL && i < put->n_chunks; i++) {
        free(put->chunks[i].record);
        free(put->chunks[i].workspace);
    }
    free(put);
    return NULL;
}

int kvf_x_put_layer(struct kvf_x_put *put, uint32_t layer, const void *data,
                    size_t token_stride_bytes, float *decoded_out)
{
    const struct kvf_geometry *geometry;
    size_t head_bytes;
    size_t width;

    if (put == NULL || data == NULL || layer != put->layer ||
        layer == put->plan.geometry.n_layers) {
        return KVF_ERR_INVALID;
    }
    geometry = &put->plan.geometry;
    width = (size_t)geometry->n_heads * geometry->dim_k;
    head_bytes = geometry->dim_k * kvf_dtype_bytes(geometry->dtype);
    if (token_stride_bytes == 0) {
        token_stride_bytes = geometry->n_heads * head_bytes;
    }
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
    put->layer++;
    return KVF_OK;
}

/* One block that is encoded, through staging. */
static int put_block(struct kvf_x_put *put, uint32_t i, const struct kvf_key *key,
                     const struct kvf_put_options *options)
{
    struct chunk *chunk = &put->chunks[i];
    struct kvf_put_item item = {
        .struct_bytes = sizeof(item), .source = KVF_SOURCE_STAGED, .key = *key};
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
    item.stage = stage.stage;
    if (status == KVF_OK) {
        int32_t of_block = KVF_OK;

        status = kvf_put(put->client, &item, 1, options, &of_block);
        status = status < KVF_OK ? status : of_block;
    }
    if (status < KVF_OK) {
        (void)kvf_stage_release(put->client, stage.stage); /* invalid where the put took it */
    }
    return status;
}

int kvf_x_put_end(struct kvf_x_put *put, const struct kvf_key *keys, uint32_t n,
                  const struct kvf_put_options *options, int32_t *statuses_out)
{
    struct kvf_put_options one = {.struct_bytes = sizeof(one)};
    int failed = KVF_OK;
    uint32_t n_good = 0;

    if (put == NULL || keys == NULL || n != put->n_chunks ||
        put->layer != put->plan.geometry.n_layers ||
        (options != NULL && options->struct_bytes != sizeof(*options))) {
        return KVF_ERR_INVALID;
    }
    if (options != NULL) {
        one = *options;
    }
    for (uint32_t i = 0; i < n; i++) {
        int status = put_block(put, i, &keys[i], &one);

        n_good += status >= KVF_OK;
        failed = status < KVF_OK && failed == KVF_OK ? status : failed;
        if (statuses_out != NULL) {
            statuses_out[i] = status;
        }
        one.parent = keys[i];
        one.depth++;
    }
    (void)kvf_x_put_cancel(put);
    return n_good == n ? KVF_OK : n_good > 0 ? KVF_PARTIAL : failed;
}
