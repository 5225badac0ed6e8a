/* SPDX-License-Identifier: Apache-2.0
 *
 * kv_roundtrip.c: see kv_roundtrip.h.
 */
#include "client/kv_roundtrip.h"

#include <stdlib.h>
#include <string.h>

struct kvf_geometry kvf_roundtrip_geometry(const struct kvf_capture *capture, uint32_t n_layers,
                                           enum kvf_capture_kind kind, uint32_t chunk_tokens)
{
    const struct kvf_capture_tensor *k = &capture->tensors[kind];

    return (struct kvf_geometry){
        .struct_bytes = sizeof(struct kvf_geometry),
        .kind = KVF_KIND_KV,
        .dtype = k->dtype,
        .rope_state = kind == KVF_CAPTURE_K_PRE ? KVF_ROPE_PRE : KVF_ROPE_POST,
        .n_layers = (uint16_t)n_layers,
        .n_heads = (uint16_t)k->n_heads,
        .dim_k = (uint16_t)k->dim,
        .dim_v = (uint16_t)capture->tensors[KVF_CAPTURE_V].dim,
        .chunk_tokens = (uint16_t)chunk_tokens,
    };
}

int kvf_roundtrip_plan(const struct kvf_capture *capture, enum kvf_capture_kind kind,
                       const struct kvf_profile_table *table, const char *name,
                       uint16_t sink_tokens, struct kvf_codec_plan *plan_out)
{
    int status = KVF_ERR_TOO_LARGE;

    for (uint32_t tokens = KVF_CHUNK_TOKENS_MAX; status == KVF_ERR_TOO_LARGE && tokens > 0;
         tokens /= 2) {
        struct kvf_geometry geometry = kvf_roundtrip_geometry(capture, capture->n_layers, kind,
                                                              tokens);

        geometry.sink_tokens = sink_tokens < tokens ? sink_tokens : (uint16_t)tokens;
        status = table != NULL ? kvf_codec_plan_init_table(plan_out, &geometry, table, 0)
                               : kvf_codec_plan_init(plan_out, &geometry, name);
    }
    return status;
}

/* Bytes of one layer of a tensor. */
static size_t layer_bytes(const struct kvf_capture *capture, enum kvf_capture_kind kind)
{
    const struct kvf_capture_tensor *tensor = &capture->tensors[kind];

    return (size_t)tensor->n_heads * capture->n_tokens * tensor->dim *
           kvf_dtype_bytes(tensor->dtype);
}

int kvf_roundtrip_init(struct kvf_roundtrip *trip, const struct kvf_codec_plan *plan,
                       const struct kvf_capture *capture)
{
    uint32_t chunk_tokens = plan->geometry.chunk_tokens;

    *trip = (struct kvf_roundtrip){.plan = plan, .capture = capture};
    trip->payload_room = kvf_codec_plan_payload_bytes_max(plan, chunk_tokens);
    trip->record = aligned_alloc(KVF_RECORD_PAGE_BYTES,
                                 KVF_RECORD_PAGE_BYTES *
                                     (2 + trip->payload_room / KVF_RECORD_PAGE_BYTES));
    trip->workspace = aligned_alloc(KVF_CODEC_WORKSPACE_ALIGN,
                                    plan->workspace_bytes + KVF_CODEC_WORKSPACE_ALIGN -
                                        plan->workspace_bytes % KVF_CODEC_WORKSPACE_ALIGN);
    trip->k = malloc(plan->geometry.n_layers * layer_bytes(capture, KVF_CAPTURE_K_POST));
    trip->v = malloc(plan->geometry.n_layers * layer_bytes(capture, KVF_CAPTURE_V));
    if (trip->record == NULL || trip->workspace == NULL || trip->k == NULL || trip->v == NULL) {
        kvf_roundtrip_fini(trip);
        return KVF_ERR_NO_MEMORY;
    }
    return KVF_OK;
}

void kvf_roundtrip_fini(struct kvf_roundtrip *trip)
{
    free(trip->record);
    free(trip->workspace);
    free(trip->k);
    free(trip->v);
    *trip = (struct kvf_roundtrip){0};
}

/* Where K and V of each layer are, in the capture or in what came back. */
struct pages {
    void *k_layers[KVF_LAYERS_MAX];
    void *v_layers[KVF_LAYERS_MAX];
    struct kvf_kv_view view;
};

static struct kvf_tensor_view tensor_view(const struct kvf_capture *capture,
                                          enum kvf_capture_kind kind, void *const *layers)
{
    const struct kvf_capture_tensor *tensor = &capture->tensors[kind];
    size_t token_bytes = tensor->dim * kvf_dtype_bytes(tensor->dtype);

    return (struct kvf_tensor_view){
        .layers = layers,
        .page_stride_bytes = capture->n_tokens * token_bytes,
        .token_stride_bytes = token_bytes,
        .head_stride_bytes = capture->n_tokens * token_bytes,
    };
}

/* From a token on. The address of an array of tokens that begin later is that of a later token. */
static void pages_init(struct pages *pages, const struct kvf_roundtrip *trip,
                       enum kvf_capture_kind kind, uint32_t layer_first, bool is_decoded,
                       uint32_t token)
{
    const struct kvf_capture *capture = trip->capture;
    size_t k_bytes = layer_bytes(capture, kind);
    size_t v_bytes = layer_bytes(capture, KVF_CAPTURE_V);

    pages->view = (struct kvf_kv_view){
        .struct_bytes = sizeof(pages->view),
        .tokens_a_page = capture->n_tokens,
        .k = tensor_view(capture, kind, pages->k_layers),
        .v = tensor_view(capture, KVF_CAPTURE_V, pages->v_layers),
    };
    for (uint32_t layer = 0; layer < trip->plan->geometry.n_layers; layer++) {
        const uint8_t *k = capture->tensors[kind].layers[layer_first + layer];
        const uint8_t *v = capture->tensors[KVF_CAPTURE_V].layers[layer_first + layer];

        if (is_decoded) {
            k = trip->k + layer * k_bytes;
            v = trip->v + layer * v_bytes;
        }
        /* a view has pointers to what may be written; encode only reads */
        pages->k_layers[layer] = (void *)(uintptr_t)(k + token * pages->view.k.token_stride_bytes);
        pages->v_layers[layer] = (void *)(uintptr_t)(v + token * pages->view.v.token_stride_bytes);
    }
}

static void copy_all(struct kvf_roundtrip *trip, enum kvf_capture_kind kind, uint32_t layer_first)
{
    const struct kvf_capture *capture = trip->capture;
    size_t k_bytes = layer_bytes(capture, kind);
    size_t v_bytes = layer_bytes(capture, KVF_CAPTURE_V);

    for (uint32_t layer = 0; layer < trip->plan->geometry.n_layers; layer++) {
        memcpy(trip->k + layer * k_bytes, capture->tensors[kind].layers[layer_first + layer],
               k_bytes);
        memcpy(trip->v + layer * v_bytes,
               capture->tensors[KVF_CAPTURE_V].layers[layer_first + layer], v_bytes);
    }
}

static int run_block(struct kvf_roundtrip *trip, enum kvf_capture_kind kind, uint32_t layer_first,
                     uint32_t token, uint32_t n_tokens)
{
    struct kvf_record_page *page = (struct kvf_record_page *)trip->record;
    struct pages from;
    struct pages to;
    size_t payload_bytes = 0;
    int status;

    pages_init(&from, trip, kind, layer_first, false, token);
    pages_init(&to, trip, kind, layer_first, true, token);
    status = kvf_block_encode(trip->plan, &from.view, trip->capture->first_position + token,
                              n_tokens, page, trip->record + KVF_RECORD_PAGE_BYTES,
                              trip->payload_room, trip->workspace, &payload_bytes);
    if (status == KVF_OK) {
        status = kvf_block_decode(trip->plan, trip->record, KVF_RECORD_PAGE_BYTES + payload_bytes,
                                  0, 0, 0, 0, &to.view, trip->workspace);
    }
    if (status == KVF_OK) {
        trip->payload_bytes += payload_bytes;
        trip->escapes += page->header.n_escapes;
    }
    return status;
}

int kvf_roundtrip_run(struct kvf_roundtrip *trip, enum kvf_capture_kind kind, uint32_t layer_first)
{
    uint32_t chunk_tokens = trip->plan->geometry.chunk_tokens;
    int status = KVF_OK;

    trip->payload_bytes = 0;
    trip->escapes = 0;
    copy_all(trip, kind, layer_first);
    for (uint32_t token = 0; status == KVF_OK && token + chunk_tokens <= trip->capture->n_tokens;
         token += chunk_tokens) {
        status = run_block(trip, kind, layer_first, token, chunk_tokens);
    }
    return status;
}

int kvf_roundtrip_run_tail(struct kvf_roundtrip *trip, enum kvf_capture_kind kind,
                           uint32_t layer_first, uint32_t n_tokens)
{
    trip->payload_bytes = 0;
    trip->escapes = 0;
    copy_all(trip, kind, layer_first);
    return run_block(trip, kind, layer_first, trip->capture->n_tokens - n_tokens, n_tokens);
}

void kvf_roundtrip_head(const struct kvf_roundtrip *trip, bool is_v, uint32_t layer, uint32_t head,
                        float *out)
{
    const struct kvf_capture *capture = trip->capture;
    const struct kvf_capture_tensor *tensor =
        &capture->tensors[is_v ? KVF_CAPTURE_V : KVF_CAPTURE_K_POST];
    size_t n = (size_t)capture->n_tokens * tensor->dim;
    const uint8_t *data = is_v ? trip->v : trip->k;

    data += ((size_t)layer * tensor->n_heads + head) * n * kvf_dtype_bytes(tensor->dtype);
    kvf_floats_from(tensor->dtype, data, n, out);
}
