/* SPDX-License-Identifier: Apache-2.0
 *
 * block_encode.c: layers to strips, their escapes to the raw area.
 */
#include "codec/block_parts.h"
#include "codec/closed_loop.h"
#include "codec/codec.h"
#include "codec/codec_fp.h"
#include "codec/convert.h"

#include "base/crc32c.h"

/* A layer at work. */
struct layer {
    struct kvf_block_encoder *encoder;
    const struct kvf_kv_view *view; /* entry 0 of layers is the layer */
    const uint8_t *k_next;          /* K of the layer after it, or NULL */
    float *decoded;                 /* of K; may be NULL */
};

/* One tensor of it. */
struct piece {
    const struct kvf_codec_tensor *tensor; /* of the plan */
    const struct kvf_codec_tensor *stored; /* by which it is stored in the end */
    struct kvf_codec_job job;
    uint8_t *strip;
    struct kvf_codec_sizes sizes;
    struct kvf_codec_escapes escapes;
    bool is_v;
};

static uint32_t *counts_of(const struct kvf_block_encoder *encoder)
{
    return (uint32_t *)(void *)((uint8_t *)encoder->workspace + encoder->plan->escapes_offset);
}

static uint8_t *sections_of(const struct kvf_block_encoder *encoder)
{
    return (uint8_t *)encoder->workspace + encoder->plan->sections_offset;
}

static struct kvf_codec_job encode_job(const struct layer *layer, bool is_v)
{
    const struct kvf_block_encoder *encoder = layer->encoder;
    const struct kvf_tensor_view *tensor = is_v ? &layer->view->v : &layer->view->k;
    bool v_follows = !is_v && kvf_plan_has_v(encoder->plan);
    return (struct kvf_codec_job){
        .view = layer->view,
        .tensor = tensor,
        .base = tensor->layers[0],
        .next_base = v_follows ? layer->view->v.layers[0] : layer->k_next,
        .n_tokens = encoder->n_tokens,
        .n_sinks = encoder->n_sinks,
        .n_wanted = encoder->n_tokens,
        .mean = kvf_plan_array_at(&encoder->plan->means[is_v], encoder->layer),
        .split = kvf_plan_array_at(&encoder->plan->splits[is_v], encoder->layer),
    };
}

/* -------------------------------------------------------------------------------------------------
 * Strips
 */

/* From where job says by tensor, or raw from the pages if the codec gives up. */
static int encode_strip(struct kvf_block_encoder *encoder, struct piece *piece,
                        const struct kvf_codec_tensor *tensor, const struct kvf_codec_job *job)
{
    const struct kvf_codec_tensor *raw = piece->is_v ? &encoder->plan->raw_v
                                                     : &encoder->plan->raw_k;
    size_t room = encoder->capacity - encoder->at;
    tensor->ops->sizes(tensor, encoder->n_tokens, &piece->sizes);
    if (kvf_sizes_total(&piece->sizes) > room) {
        return KVF_ERR_TOO_LARGE;
    }
    int status = tensor->ops->encode(tensor, job, piece->strip, &piece->escapes, encoder->workspace,
                                     &piece->sizes);
    if (status == KVF_ERR_NO_SPACE) {
        raw->ops->sizes(raw, encoder->n_tokens, &piece->sizes);
        if (kvf_sizes_total(&piece->sizes) > room) {
            return KVF_ERR_TOO_LARGE;
        }
        piece->escapes.n = 0;
        piece->stored = raw;
        status = raw->ops->encode(raw, &piece->job, piece->strip, NULL, NULL, &piece->sizes);
    }
    return status;
}

/* Is the state after this layer used? */
static bool wants_state(const struct layer *layer)
{
    const struct kvf_codec_plan *plan = layer->encoder->plan;
    uint32_t next = layer->encoder->layer + 1;
    return layer->decoded != NULL ||
           (next < plan->geometry.n_layers && kvf_plan_is_delta(plan, next));
}

/* A layer of a plan with deltas. */
static int encode_looped(struct layer *layer, struct piece *piece)
{
    struct kvf_block_encoder *encoder = layer->encoder;
    const struct kvf_codec_plan *plan = encoder->plan;
    bool is_delta = kvf_plan_is_delta(plan, encoder->layer);
    struct kvf_codec_tensor wide = kvf_loop_tensor(piece->tensor);
    struct kvf_loop loop;
    kvf_loop_init(&loop, plan, (uint8_t *)encoder->workspace + plan->loop_offset);
    struct kvf_codec_job job = kvf_loop_job(&loop, &piece->job);
    int status;
    if (is_delta) {
        kvf_loop_load(&loop, piece->tensor, &piece->job, encoder->n_tokens, true);
        status = encode_strip(encoder, piece, &wide, &job);
    } else {
        status = encode_strip(encoder, piece, piece->tensor, &piece->job);
    }
    if (status != KVF_OK || !wants_state(layer)) {
        return status;
    }
    if (piece->stored != piece->tensor) {
        kvf_loop_load(&loop, piece->tensor, &piece->job, encoder->n_tokens, false);
        is_delta = false;
    } else {
        status = wide.ops->decode(&wide, &job, piece->strip, &piece->sizes, encoder->workspace);
    }
    kvf_loop_take(&loop, encoder->n_tokens, is_delta);
    return status;
}

/* -------------------------------------------------------------------------------------------------
 * What a reader will have
 */

/* Where a vector of K is in an array of fp32[tokens][heads * dim]. */
static float *decoded_vector(const struct layer *layer, const struct kvf_codec_tensor *tensor,
                             uint32_t row, uint32_t token)
{
    size_t width = (size_t)tensor->n_heads * tensor->dim;
    return layer->decoded + width * token + (size_t)row * tensor->group;
}

/* Coded vectors in fp32, not rounded: the state, or from the strip. */
static int decode_piece(const struct layer *layer, const struct piece *piece)
{
    const struct kvf_block_encoder *encoder = layer->encoder;
    const struct kvf_codec_plan *plan = encoder->plan;
    struct kvf_codec_tensor wide = kvf_loop_tensor(piece->tensor);
    size_t width = (size_t)wide.n_heads * wide.dim;
    void *layers[1] = {layer->decoded};
    struct kvf_kv_view view = {
        .struct_bytes = sizeof(view),
        .tokens_a_page = KVF_CHUNK_TOKENS_MAX,
        .k = {.layers = layers,
              .token_stride_bytes = width * sizeof(float),
              .head_stride_bytes = wide.dim * sizeof(float)},
    };
    struct kvf_codec_job job = piece->job;
    job.view = &view;
    job.tensor = &view.k;
    job.base = layers[0];
    if ((plan->block_flags & KVF_BLOCK_DELTAS) == 0) {
        return wide.ops->decode(&wide, &job, piece->strip, &piece->sizes, encoder->workspace);
    }
    struct kvf_loop loop;
    kvf_loop_init(&loop, plan, (uint8_t *)encoder->workspace + plan->loop_offset);
    kvf_loop_store(&loop, &wide, &job, encoder->n_tokens);
    return KVF_OK;
}

static void widen_vector(const struct layer *layer, const struct piece *piece, uint32_t row,
                         uint32_t token)
{
    const struct kvf_codec_tensor *tensor = piece->tensor;
    kvf_convert_widen(tensor->dtype, kvf_pages_vector(tensor, &piece->job, row, token),
                      tensor->group, decoded_vector(layer, tensor, row, token));
}

/* K as a reader will have it, to layer->decoded. */
static int hand_back(const struct layer *layer, const struct piece *piece)
{
    const struct kvf_codec_tensor *tensor = piece->tensor;
    bool is_lossless = (piece->stored->ops->capabilities & KVF_CODEC_LOSSLESS) != 0;
    uint8_t rounded[KVF_DIM_MAX * sizeof(float)];
    uint32_t n_tokens = layer->encoder->n_tokens;
    int status = is_lossless ? KVF_OK : decode_piece(layer, piece);
    for (uint32_t row = 0; row < tensor->n_rows; row++) {
        for (uint32_t token = 0; token < n_tokens; token++) {
            float *vector = decoded_vector(layer, tensor, row, token);
            if (is_lossless) {
                widen_vector(layer, piece, row, token);
            } else {
                kvf_convert_narrow(tensor->dtype, vector, tensor->group, rounded);
                kvf_convert_widen(tensor->dtype, rounded, tensor->group, vector);
            }
        }
    }
    for (uint32_t i = 0; i < piece->escapes.n; i++) {
        uint32_t index = piece->escapes.index[i];
        widen_vector(layer, piece, index / n_tokens, index % n_tokens);
    }
    return status;
}

/* -------------------------------------------------------------------------------------------------
 * Escapes
 */

/* The section of one tensor of one layer, behind those before it. */
static void keep_section(struct kvf_block_encoder *encoder, const struct piece *piece)
{
    const struct kvf_codec_tensor *tensor = piece->tensor;
    uint32_t count = piece->escapes.n;
    size_t vector_bytes = (size_t)tensor->group * tensor->element_bytes;
    size_t bytes = count != 0 ? kvf_raw_section_bytes(tensor, count) : 0;
    uint8_t *section = sections_of(encoder) + encoder->sections_bytes;
    uint8_t *to = section + count * sizeof(uint32_t);
    memcpy(section, piece->escapes.index, count * sizeof(uint32_t));
    for (uint32_t i = 0; i < count; i++) {
        uint32_t index = piece->escapes.index[i];
        memcpy(to,
               kvf_pages_vector(tensor, &piece->job, index / encoder->n_tokens,
                                index % encoder->n_tokens),
               vector_bytes);
        to += vector_bytes;
    }
    memset(to, 0, bytes - (size_t)(to - section));
    counts_of(encoder)[2 * encoder->layer + (piece->is_v ? 1 : 0)] = count;
    encoder->n_escapes += count;
    encoder->sections_bytes += bytes;
}

/* The raw area behind the last strip; nothing if there are no escapes. */
static int write_raw_area(struct kvf_block_encoder *encoder, size_t *raw_area_bytes_out)
{
    *raw_area_bytes_out = 0;
    if (encoder->n_escapes == 0) {
        return KVF_OK;
    }
    uint32_t n_layers = encoder->plan->geometry.n_layers;
    size_t counts_bytes = (size_t)n_layers * 2 * sizeof(uint32_t);
    size_t table_bytes = kvf_raw_table_bytes(n_layers);
    size_t bytes = table_bytes + encoder->sections_bytes;
    size_t padded = kvf_part_bytes(bytes);
    if (padded > encoder->capacity - encoder->at) {
        return KVF_ERR_TOO_LARGE;
    }
    uint8_t *area = encoder->payload + encoder->at;
    memcpy(area, counts_of(encoder), counts_bytes);
    memset(area + counts_bytes, 0, table_bytes - counts_bytes);
    memcpy(area + table_bytes, sections_of(encoder), encoder->sections_bytes);
    memset(area + bytes, 0, padded - bytes);
    *raw_area_bytes_out = padded;
    return KVF_OK;
}

/* -------------------------------------------------------------------------------------------------
 * Layers
 */

/* One tensor at the end of the payload. */
static int encode_tensor(struct layer *layer, bool is_v, uint8_t *bits_out)
{
    struct kvf_block_encoder *encoder = layer->encoder;
    const struct kvf_codec_plan *plan = encoder->plan;
    const struct kvf_codec_tensor *tensor = kvf_plan_tensor(plan, encoder->layer, is_v);
    struct piece piece = {
        .tensor = tensor,
        .stored = tensor,
        .job = encode_job(layer, is_v),
        .strip = encoder->payload + encoder->at,
        .escapes = {.index = counts_of(encoder) + 2 * plan->geometry.n_layers,
                    .max = kvf_plan_escapes_max(plan, tensor, encoder->n_tokens)},
        .is_v = is_v,
    };
    int status = (plan->block_flags & KVF_BLOCK_DELTAS) != 0
                     ? encode_looped(layer, &piece)
                     : encode_strip(encoder, &piece, tensor, &piece.job);
    if (status == KVF_OK && !is_v && layer->decoded != NULL) {
        status = hand_back(layer, &piece);
    }
    if (status != KVF_OK) {
        return status;
    }
    keep_section(encoder, &piece);
    *bits_out = piece.stored == tensor ? tensor->descriptor.bits : (uint8_t)KVF_BITS_RAW;
    size_t bytes = kvf_sizes_total(&piece.sizes);
    encoder->at += bytes;
    /* while the strip is in the cache */
    encoder->crc = kvf_crc32c(encoder->crc, piece.strip, bytes);
    return KVF_OK;
}

static int encode_layer(struct layer *layer)
{
    struct kvf_block_encoder *encoder = layer->encoder;
    struct kvf_record_page *page = encoder->page;
    bool computes = kvf_block_computes(encoder->plan);
    struct kvf_fp_state fp_state = {0};
    uint8_t bits_k = 0;
    uint8_t bits_v = 0;
    page->layer_offsets[encoder->layer] = (uint32_t)(encoder->at / KVF_BLOCK_ALIGN_BYTES);
    if (computes) {
        fp_state = kvf_fp_enter();
    }
    int status = encode_tensor(layer, false, &bits_k);
    if (status == KVF_OK && kvf_plan_has_v(encoder->plan)) {
        status = encode_tensor(layer, true, &bits_v);
    }
    if (computes) {
        kvf_fp_leave(fp_state);
    }
    page->layer_bits[encoder->layer] = (uint8_t)(bits_k | bits_v << 4);
    encoder->status = status;
    encoder->layer++;
    return status;
}

int kvf_block_encode_begin(struct kvf_block_encoder *encoder, const struct kvf_codec_plan *plan,
                           uint32_t token_start, uint32_t n_tokens, struct kvf_record_page *page,
                           void *payload, size_t payload_capacity, void *workspace)
{
    if (plan->profile->opaque || n_tokens < 1 || n_tokens > plan->geometry.chunk_tokens ||
        token_start > UINT32_MAX - n_tokens) {
        return KVF_ERR_INVALID;
    }
    if (payload_capacity < kvf_codec_plan_payload_bytes(plan, n_tokens)) {
        return KVF_ERR_TOO_LARGE;
    }
    *encoder = (struct kvf_block_encoder){
        .plan = plan,
        .page = page,
        .payload = payload,
        .capacity = payload_capacity,
        .workspace = workspace,
        .n_tokens = n_tokens,
        .n_sinks = kvf_plan_sinks(plan, token_start, n_tokens),
    };
    memset(counts_of(encoder), 0, 2 * plan->geometry.n_layers * sizeof(uint32_t));
    memset(page, 0, sizeof(*page));
    kvf_block_fill_header(plan, token_start, n_tokens, &page->header);
    return KVF_OK;
}

int kvf_block_encode_layer(struct kvf_block_encoder *encoder, const struct kvf_kv_view *kv,
                           float *decoded_out)
{
    if (!kvf_block_view_is_valid(encoder->plan, kv) ||
        encoder->layer == encoder->plan->geometry.n_layers) {
        return KVF_ERR_INVALID;
    }
    if (encoder->status != KVF_OK) {
        return encoder->status;
    }
    struct layer layer = {.encoder = encoder, .view = kv, .decoded = decoded_out};
    return encode_layer(&layer);
}

int kvf_block_encode_end(struct kvf_block_encoder *encoder, size_t *payload_bytes_out)
{
    struct kvf_record_page *page = encoder->page;
    size_t raw_area_bytes = 0;
    if (encoder->status != KVF_OK) {
        return encoder->status;
    }
    if (encoder->layer != encoder->plan->geometry.n_layers) {
        return KVF_ERR_INVALID;
    }
    int status = write_raw_area(encoder, &raw_area_bytes);
    if (status != KVF_OK) {
        return status;
    }
    size_t payload_bytes = encoder->at + raw_area_bytes;
    page->header.n_escapes = encoder->n_escapes;
    page->header.raw_area_offset = (uint32_t)(encoder->at / KVF_BLOCK_ALIGN_BYTES);
    page->header.raw_area_bytes = (uint32_t)raw_area_bytes;
    page->header.total_bytes = KVF_BLOCK_PAGE_BYTES + (uint64_t)payload_bytes;
    page->header.payload_crc32c = kvf_crc32c(encoder->crc, encoder->payload + encoder->at,
                                             raw_area_bytes);
    kvf_block_seal_header(page);
    *payload_bytes_out = payload_bytes;
    return KVF_OK;
}

int kvf_block_encode(const struct kvf_codec_plan *plan, const struct kvf_kv_view *kv,
                     uint32_t token_start, uint32_t n_tokens, struct kvf_record_page *page,
                     void *payload, size_t payload_capacity, void *workspace,
                     size_t *payload_bytes_out)
{
    struct kvf_block_encoder encoder;
    if (!plan->profile->opaque && !kvf_block_view_is_valid(plan, kv)) {
        return KVF_ERR_INVALID;
    }
    int status = kvf_block_encode_begin(&encoder, plan, token_start, n_tokens, page, payload,
                                        payload_capacity, workspace);
    if (status != KVF_OK) {
        return status;
    }
    bool has_v = kvf_plan_has_v(plan);
    uint32_t n_layers = plan->geometry.n_layers;
    for (uint32_t i = 0; status == KVF_OK && i < n_layers; i++) {
        struct kvf_kv_view one = *kv;
        one.k.layers = kv->k.layers + i;
        one.v.layers = has_v ? kv->v.layers + i : NULL;
        struct layer layer = {.encoder = &encoder, .view = &one};
        layer.k_next = i + 1 < n_layers ? kv->k.layers[i + 1] : NULL;
        status = encode_layer(&layer);
    }
    return kvf_block_encode_end(&encoder, payload_bytes_out);
}
