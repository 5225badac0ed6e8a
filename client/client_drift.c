/* SPDX-License-Identifier: Apache-2.0
 *
 * client_drift.c: a chunk that has been computed again, beside what is stored of it. Both are
 * compared decoded by the same profile, so that its loss counts for nothing: what is stored, and
 * what would be stored now.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "client/client_internal.h"
#include "codec/convert.h"

#define DRIFT_GET_MS 100 /* nobody waits longer for a figure */
#define DRIFT_ROW    256 /* elements that are compared at a time */

/* A chunk in memory of its own: all layers of K, then of V, tokens side by side. */
struct chunk {
    uint8_t *memory;
    size_t bytes;
    void **layers; /* of K, then of V */
    struct kvf_kv_view view;
};

static int chunk_make(const struct kvf_geometry *geometry, uint32_t n_tokens, struct chunk *chunk)
{
    size_t element = kvf_dtype_bytes(geometry->dtype);
    size_t k_bytes = (size_t)n_tokens * geometry->n_heads * geometry->dim_k * element;
    size_t v_bytes = (size_t)n_tokens * geometry->n_heads * geometry->dim_v * element;

    memset(chunk, 0, sizeof(*chunk));
    chunk->bytes = (k_bytes + v_bytes) * geometry->n_layers;
    chunk->memory = malloc(chunk->bytes);
    chunk->layers = calloc(2 * (size_t)geometry->n_layers, sizeof(*chunk->layers));
    if (chunk->memory == NULL || chunk->layers == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < geometry->n_layers; i++) {
        chunk->layers[i] = chunk->memory + i * k_bytes;
        chunk->layers[geometry->n_layers + i] = chunk->memory + geometry->n_layers * k_bytes +
                                                i * v_bytes;
    }
    chunk->view = (struct kvf_kv_view){
        .struct_bytes = sizeof(chunk->view),
        .tokens_a_page = n_tokens,
        .k = {.layers = chunk->layers,
              .token_stride_bytes = geometry->n_heads * geometry->dim_k * element,
              .head_stride_bytes = geometry->dim_k * element},
        .v = {.layers = chunk->layers + geometry->n_layers,
              .token_stride_bytes = geometry->n_heads * geometry->dim_v * element,
              .head_stride_bytes = geometry->dim_v * element},
    };
    return KVF_OK;
}

static void chunk_free(struct chunk *chunk)
{
    free(chunk->memory);
    free(chunk->layers);
}

/* A square root to some digits; engines load no library of mathematics for it. */
static double root_of(double square)
{
    double root = square > 1 ? square : 1;

    for (int i = 0; i < 64 && root * root > square * 1.000001; i++) {
        root = (root + square / root) / 2;
    }
    return root;
}

/* Root of the squared differences over that of the squares. What is no number differs wholly, and
 * so do opaque bytes, which are no numbers to us. */
static double relative_error(uint8_t dtype, const struct chunk *now, const struct chunk *stored)
{
    size_t element = kvf_dtype_bytes(dtype);
    double difference = 0;
    double square = 0;

    if (dtype == KVF_DTYPE_U8) {
        return memcmp(now->memory, stored->memory, now->bytes) == 0 ? 0 : 1;
    }
    for (size_t at = 0; at < now->bytes; at += DRIFT_ROW * element) {
        size_t left = (now->bytes - at) / element;
        uint32_t n = left < DRIFT_ROW ? (uint32_t)left : DRIFT_ROW;
        float a[DRIFT_ROW], b[DRIFT_ROW];

        kvf_convert_widen(dtype, now->memory + at, n, a);
        kvf_convert_widen(dtype, stored->memory + at, n, b);
        for (uint32_t i = 0; i < n; i++) {
            difference += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
            square += (double)a[i] * a[i];
        }
    }
    if (difference == 0) {
        return 0;
    }
    return isfinite(difference / square) ? root_of(difference / square) : 1;
}

/* What would be stored now, and back. */
static int encode_again(struct kvf_client *client, const struct kvf_put_item *item,
                        uint32_t n_tokens, struct chunk *chunk)
{
    size_t bytes = client->plan.record_bytes_max;
    uint8_t *record = aligned_alloc(KVF_RECORD_PAGE_BYTES, (bytes + KVF_RECORD_PAGE_BYTES - 1) /
                                                               KVF_RECORD_PAGE_BYTES *
                                                               KVF_RECORD_PAGE_BYTES);
    size_t payload_bytes = 0;
    int status = KVF_ERR_NO_MEMORY;

    if (record != NULL) {
        status = kvf_block_encode(&client->plan, item->kv, item->token_start, n_tokens,
                                  (void *)record, record + KVF_RECORD_PAGE_BYTES,
                                  bytes - KVF_RECORD_PAGE_BYTES, client->workspace, &payload_bytes);
    }
    if (status == KVF_OK) {
        status = kvf_block_decode(&client->plan, record, KVF_RECORD_PAGE_BYTES + payload_bytes, 0,
                                  0, 0, 0, &chunk->view, client->workspace);
    }
    free(record);
    return status;
}

int kvf_drift(struct kvf_client *client, const struct kvf_put_item *item, double *error_out)
{
    const struct kvf_get_options options = {.struct_bytes = sizeof(options),
                                            .budget_ms = DRIFT_GET_MS};
    struct chunk now = {0}, stored = {0};
    struct kvf_hit hit;
    uint32_t n_tokens;
    int status;

    if (client == NULL || item == NULL || item->struct_bytes != sizeof(*item) ||
        item->source != KVF_SOURCE_VIEW || item->kv == NULL || error_out == NULL ||
        !client->has_geometry || item->n_tokens > client->geometry.chunk_tokens) {
        return KVF_ERR_INVALID;
    }
    n_tokens = item->n_tokens != 0 ? item->n_tokens : client->geometry.chunk_tokens;
    status = kvf_get(client, &item->key, 1, &options, &hit);
    if (status != KVF_OK) {
        return status;
    }
    kvf_client_enter(client);
    status = chunk_make(&client->geometry, n_tokens, &now);
    status = status == KVF_OK ? chunk_make(&client->geometry, n_tokens, &stored) : status;
    if (status == KVF_OK) {
        status = kvf_block_decode(&client->plan, hit.record, hit.record_bytes, 0, 0, 0, n_tokens,
                                  &stored.view, client->workspace);
    }
    status = status == KVF_OK ? encode_again(client, item, n_tokens, &now) : status;
    kvf_client_leave(client);
    if (kvf_lease_release(client, hit.lease) != KVF_OK) {
        status = KVF_MISS; /* gone while it was read */
    }
    if (status == KVF_OK) {
        *error_out = relative_error(client->geometry.dtype, &now, &stored);
        (void)kvf_report(client, KVF_REPORT_DRIFT_CHUNKS, 1);
        (void)kvf_report(client, KVF_REPORT_DRIFT_PPM,
                         (uint64_t)((*error_out < 1e3 ? *error_out : 1e3) * 1e6));
    }
    chunk_free(&now);
    chunk_free(&stored);
    return status;
}

void kvf_drift_look(struct kvf_client *client, const struct kvf_put_item *item)
{
    double error;

    if (client->n_conflicts++ % KVF_CLIENT_DRIFT_ONE_IN == 0) {
        (void)kvf_drift(client, item, &error);
    }
}
