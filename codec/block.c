/* SPDX-License-Identifier: Apache-2.0
 *
 * block.c: pages of records and what they say of the payload. block_encode.c and block_decode.c
 * have the rest.
 */
#include "codec/block_parts.h"
#include "codec/codec.h"
#include "codec/codec_gpu.h"

#include "base/crc32c.h"

#include <assert.h>

static const uint64_t payload_units_max = KVF_PAYLOAD_BYTES_MAX / KVF_BLOCK_ALIGN_BYTES;

static uint64_t decoded_bytes(const struct kvf_block_header *header)
{
    return (uint64_t)header->n_layers * header->n_heads * header->n_tokens *
           ((uint64_t)header->d_k + header->d_v) * kvf_dtype_bytes(header->dst_dtype);
}

void kvf_block_fill_header(const struct kvf_codec_plan *plan, uint32_t token_start,
                           uint32_t n_tokens, struct kvf_block_header *header)
{
    const struct kvf_geometry *geometry = &plan->geometry;
    *header = (struct kvf_block_header){
        .magic = KVF_BLOCK_MAGIC,
        .version = KVF_BLOCK_VERSION,
        .header_bytes = KVF_BLOCK_HEADER_BYTES,
        .model_fp = plan->model_fp,
        .weights_fp = plan->weights_fp,
        .tensor_kind = geometry->kind,
        .src_dtype = geometry->dtype,
        .dst_dtype = geometry->dtype,
        .rope_state = geometry->rope_state,
        .token_start = token_start,
        .n_tokens = (uint16_t)n_tokens,
        .n_sink_raw = (uint16_t)kvf_plan_sinks(plan, token_start, n_tokens),
        .n_layers = geometry->n_layers,
        .n_heads = geometry->n_heads,
        .d_k = geometry->dim_k,
        .d_v = geometry->dim_v,
        .block_flags = plan->block_flags,
        .base_layer = plan->base_layer,
        .rebase_layers = plan->rebase_layers,
        .chunk_tokens = geometry->chunk_tokens,
        .profile_fp = plan->profile_fp,
        .k = kvf_block_descriptor(&plan->kinds[0].k, n_tokens),
        .v = kvf_block_descriptor(&plan->kinds[0].v, n_tokens),
    };
    header->raw_bytes = decoded_bytes(header);
}

/* -------------------------------------------------------------------------------------------------
 * Check and seal
 */
static uint32_t header_crc32c(const struct kvf_record_page *page)
{
    struct kvf_block_header header = page->header;
    header.header_crc32c = 0;
    uint32_t crc = kvf_crc32c(0, &header, sizeof(header));
    return kvf_crc32c(crc, page->layer_bits,
                      sizeof(*page) - offsetof(struct kvf_record_page, layer_bits));
}

void kvf_block_seal_header(struct kvf_record_page *page)
{
    page->header.header_crc32c = header_crc32c(page);
}

static bool is_zero(const void *data, size_t bytes)
{
    const uint8_t *at = data;
    uint8_t any = 0;
    for (size_t i = 0; i < bytes; i++) {
        any |= at[i];
    }
    return any == 0;
}

int kvf_block_describe_summed(struct kvf_record_page *page, uint32_t payload_crc32c, size_t bytes)
{
    if (bytes > KVF_PAYLOAD_BYTES_MAX) {
        return KVF_ERR_TOO_LARGE;
    }
    memset(page, 0, sizeof(*page));
    page->header = (struct kvf_block_header){
        .magic = KVF_BLOCK_MAGIC,
        .version = KVF_BLOCK_VERSION,
        .header_bytes = KVF_BLOCK_HEADER_BYTES,
        .payload_crc32c = payload_crc32c,
        .total_bytes = KVF_BLOCK_PAGE_BYTES + (uint64_t)bytes,
        .raw_bytes = bytes,
        .profile_fp = kvf_plan_bytes_fp(),
    };
    kvf_block_seal_header(page);
    return KVF_OK;
}

int kvf_block_describe_bytes(struct kvf_record_page *page, const void *payload, size_t bytes)
{
    if (bytes > KVF_PAYLOAD_BYTES_MAX) {
        return KVF_ERR_TOO_LARGE;
    }
    return kvf_block_describe_summed(page, kvf_crc32c(0, payload, bytes), bytes);
}

/* What the layer table of a block says whose strips are of fixed size. */
static void fixed_layers_fill(const struct kvf_codec_plan *plan, uint32_t n_tokens,
                              struct kvf_record_page *page)
{
    size_t at = 0;
    for (uint32_t layer = 0; layer < plan->geometry.n_layers; layer++) {
        const struct kvf_codec_tensor *k = kvf_plan_tensor(plan, layer, false);
        const struct kvf_codec_tensor *v = kvf_plan_tensor(plan, layer, true);
        struct kvf_codec_sizes sizes[2] = {0};
        k->ops->sizes(k, n_tokens, &sizes[0]);
        if (v->dim != 0) {
            v->ops->sizes(v, n_tokens, &sizes[1]);
        }
        page->layer_offsets[layer] = (uint32_t)(at / KVF_BLOCK_ALIGN_BYTES);
        page->layer_bits[layer] = (uint8_t)(k->descriptor.bits | v->descriptor.bits << 4);
        at += kvf_sizes_total(&sizes[0]) + kvf_sizes_total(&sizes[1]);
    }
}

int kvf_block_describe_gpu(const struct kvf_codec_plan *plan, uint32_t token_start,
                           uint32_t n_tokens, const struct kvf_gpu_result *result,
                           uint32_t payload_crc32c, struct kvf_record_page *page)
{
    if (plan->profile->opaque || n_tokens < 1 || n_tokens > plan->geometry.chunk_tokens ||
        token_start > UINT32_MAX - n_tokens) {
        return KVF_ERR_INVALID;
    }
    if (result->flags != KVF_GPU_DONE || result->raw_area_offset > payload_units_max ||
        result->raw_area_bytes > KVF_PAYLOAD_BYTES_MAX) {
        return KVF_ERR_CORRUPT;
    }
    memset(page, 0, sizeof(*page));
    kvf_block_fill_header(plan, token_start, n_tokens, &page->header);
    if (kvf_codec_plan_is_fixed(plan)) {
        fixed_layers_fill(plan, n_tokens, page);
    } else {
        memcpy(page->layer_offsets, result->layer_offsets,
               plan->geometry.n_layers * sizeof(page->layer_offsets[0]));
        memcpy(page->layer_bits, result->layer_bits, plan->geometry.n_layers);
    }
    page->header.n_escapes = result->n_escapes;
    page->header.raw_area_offset = result->raw_area_offset;
    page->header.raw_area_bytes = result->raw_area_bytes;
    page->header.total_bytes = KVF_BLOCK_PAGE_BYTES +
                               (uint64_t)result->raw_area_offset * KVF_BLOCK_ALIGN_BYTES +
                               result->raw_area_bytes;
    page->header.payload_crc32c = payload_crc32c;
    kvf_block_seal_header(page);
    /* a device that computes nonsense is found here, not by whoever reads the block */
    return kvf_block_check(page, page->header.total_bytes);
}

/* Fields that no version of this build gives another value. */
static bool constants_hold(const struct kvf_block_header *header)
{
    return header->header_bytes == KVF_BLOCK_HEADER_BYTES && header->decoded_hash == 0 &&
           (header->weights_fp == 0 || header->tensor_kind >= KVF_KIND_X) && header->rope_fp == 0 &&
           header->n_tail_raw == 0 && header->layer_first == 0 && header->head_first == 0 &&
           header->n_streams == 0 && header->entropy_id == 0 && header->plain_bytes == 0 &&
           header->plain_crc32c == 0 && header->k.reserved == 0 && header->v.reserved == 0 &&
           is_zero(header->reserved, sizeof(header->reserved));
}

static bool opaque_is_valid(const struct kvf_record_page *page)
{
    /* Everything between the checksums' fields and the profile's fingerprint describes geometry. */
    const struct kvf_block_header *header = &page->header;
    const struct kvf_block_tensor none = {0};
    return header->raw_bytes == header->total_bytes - KVF_BLOCK_PAGE_BYTES &&
           header->src_dtype == 0 && header->dst_dtype == 0 && header->rope_state == 0 &&
           header->token_start == 0 && header->n_tokens == 0 && header->n_sink_raw == 0 &&
           header->n_layers == 0 && header->n_heads == 0 && header->d_k == 0 && header->d_v == 0 &&
           header->chunk_tokens == 0 && header->block_flags == 0 && header->base_layer == 0 &&
           header->rebase_layers == 0 && header->n_escapes == 0 && header->raw_area_offset == 0 &&
           header->raw_area_bytes == 0 && memcmp(&header->k, &none, sizeof(none)) == 0 &&
           memcmp(&header->v, &none, sizeof(none)) == 0 &&
           is_zero(page->layer_bits, sizeof(page->layer_bits)) &&
           is_zero(page->layer_offsets, sizeof(page->layer_offsets));
}

/* Only what is X has layers that are deltas. */
static bool deltas_are_valid(const struct kvf_block_header *header)
{
    const uint8_t flags = KVF_BLOCK_KINDS | KVF_BLOCK_DELTAS;
    if (header->tensor_kind < KVF_KIND_X) {
        return header->block_flags <= KVF_BLOCK_KINDS && header->base_layer == 0 &&
               header->rebase_layers == 0;
    }
    return header->block_flags <= flags &&
           ((header->block_flags & KVF_BLOCK_DELTAS) == 0 || header->tensor_kind == KVF_KIND_X);
}

static bool shape_is_valid(const struct kvf_block_header *header)
{
    return header->tensor_kind <= KVF_KIND_XG && kvf_dtype_bytes(header->src_dtype) != 0 &&
           header->dst_dtype == header->src_dtype && header->rope_state <= KVF_ROPE_PRE_UNBIASED &&
           header->n_layers >= 1 && header->n_layers <= KVF_LAYERS_MAX && header->n_heads >= 1 &&
           header->n_heads <= KVF_HEADS_MAX && header->d_k >= 1 && header->d_k <= KVF_DIM_MAX &&
           header->d_v <= KVF_DIM_MAX && deltas_are_valid(header) &&
           (header->tensor_kind < KVF_KIND_X ||
            (header->d_v == 0 && header->rope_state == KVF_ROPE_NONE)) &&
           header->chunk_tokens <= KVF_CHUNK_TOKENS_MAX && header->n_tokens >= 1 &&
           header->n_tokens <= header->chunk_tokens && header->n_sink_raw <= header->n_tokens &&
           header->token_start <= UINT32_MAX - header->n_tokens &&
           header->raw_bytes == decoded_bytes(header);
}

/* How a layer is stored: raw, as the descriptor says, or, where layers differ, as edges are or in
 * any way. */
static bool bits_are_valid(const struct kvf_block_header *header,
                           const struct kvf_block_tensor *descriptor, uint8_t bits)
{
    if ((header->block_flags & KVF_BLOCK_KINDS) != 0 && descriptor->codec != KVF_CODEC_NONE) {
        return bits <= KVF_BITS_EDGE || bits == KVF_BITS_EXACT;
    }
    return bits == KVF_BITS_RAW || bits == descriptor->bits ||
           ((descriptor->flags & KVF_TENSOR_EDGES) != 0 && bits == KVF_BITS_EDGE);
}

/* Offsets rise from 0 to the raw area, which ends the payload. */
static bool layers_are_valid(const struct kvf_record_page *page)
{
    const struct kvf_block_header *header = &page->header;
    uint32_t n = header->n_layers;
    uint64_t payload_bytes = header->total_bytes - KVF_BLOCK_PAGE_BYTES;
    if (header->raw_area_offset > payload_units_max ||
        (uint64_t)header->raw_area_offset * KVF_BLOCK_ALIGN_BYTES + header->raw_area_bytes !=
            payload_bytes ||
        header->raw_area_bytes % KVF_BLOCK_ALIGN_BYTES != 0 ||
        (header->raw_area_bytes == 0) != (header->n_escapes == 0) || page->layer_offsets[0] != 0) {
        return false;
    }
    for (uint32_t layer = 0; layer < n; layer++) {
        uint32_t end = layer + 1 < n ? page->layer_offsets[layer + 1] : header->raw_area_offset;
        uint8_t bits_k = page->layer_bits[layer] & 15;
        uint8_t bits_v = page->layer_bits[layer] >> 4;
        if (end <= page->layer_offsets[layer] || !bits_are_valid(header, &header->k, bits_k) ||
            !bits_are_valid(header, &header->v, bits_v)) {
            return false;
        }
    }
    return is_zero(page->layer_bits + n, KVF_BLOCK_LAYERS - n) &&
           is_zero(page->layer_offsets + n, (KVF_BLOCK_LAYERS - n) * sizeof(uint32_t));
}

int kvf_block_check(const struct kvf_record_page *page, uint64_t record_bytes_available)
{
    const struct kvf_block_header *header = &page->header;
    if (record_bytes_available < KVF_BLOCK_PAGE_BYTES || header->magic != KVF_BLOCK_MAGIC) {
        return KVF_ERR_CORRUPT;
    }
    if (header->version != KVF_BLOCK_VERSION) {
        return KVF_ERR_MISMATCH;
    }
    if (header->header_crc32c != header_crc32c(page) ||
        header->total_bytes < KVF_BLOCK_PAGE_BYTES ||
        header->total_bytes > KVF_BLOCK_PAGE_BYTES + (uint64_t)KVF_PAYLOAD_BYTES_MAX ||
        header->total_bytes > record_bytes_available || !constants_hold(header) ||
        !is_zero(page->reserved, sizeof(page->reserved)) || header->shard_count > KVF_SHARDS_MAX ||
        (header->shard >= header->shard_count && header->shard != 0)) {
        return KVF_ERR_CORRUPT;
    }
    if (header->tensor_kind == KVF_KIND_BYTES) {
        return opaque_is_valid(page) ? KVF_OK : KVF_ERR_CORRUPT;
    }
    if (!shape_is_valid(header) || (header->d_v == 0) != (header->v.codec == KVF_CODEC_NONE)) {
        return KVF_ERR_CORRUPT;
    }
    if (kvf_codec_find(header->k.codec) == NULL ||
        (header->d_v != 0 && kvf_codec_find(header->v.codec) == NULL)) {
        return KVF_ERR_MISMATCH;
    }
    return layers_are_valid(page) ? KVF_OK : KVF_ERR_CORRUPT;
}

int kvf_block_check_payload(const struct kvf_record_page *page, const void *payload)
{
    size_t bytes = (size_t)(page->header.total_bytes - KVF_BLOCK_PAGE_BYTES);
    return kvf_crc32c(0, payload, bytes) == page->header.payload_crc32c ? KVF_OK : KVF_ERR_CORRUPT;
}

int kvf_block_matches_plan(const struct kvf_record_page *page, const struct kvf_codec_plan *plan)
{
    /* Build the header that this plan would have written and compare field by field, so that a
     * field added to kvf_block_fill_header is compared here as well. What differs from block to
     * block is taken over. */
    const struct kvf_block_header *have = &page->header;
    struct kvf_block_header want;
    kvf_block_fill_header(plan, have->token_start, have->n_tokens, &want);
    want.header_crc32c = have->header_crc32c;
    want.payload_crc32c = have->payload_crc32c;
    want.total_bytes = have->total_bytes;
    memcpy(want.key_id, have->key_id, sizeof(want.key_id));
    want.shard = have->shard;
    want.shard_count = have->shard_count;
    want.n_escapes = have->n_escapes;
    want.raw_area_offset = have->raw_area_offset;
    want.raw_area_bytes = have->raw_area_bytes;
    if (plan->profile->opaque) {
        want.raw_bytes = have->raw_bytes;
    }
    return memcmp(&want, have, sizeof(want)) == 0 ? KVF_OK : KVF_ERR_MISMATCH;
}

/* -------------------------------------------------------------------------------------------------
 * Open
 */
static bool ranges_hold(const struct kvf_block_header *header,
                        const struct kvf_block_ranges *ranges)
{
    return ranges->layer_first < header->n_layers &&
           ranges->n_layers <= header->n_layers - ranges->layer_first &&
           ranges->token_first < header->n_tokens &&
           ranges->n_tokens <= header->n_tokens - ranges->token_first;
}

int kvf_block_open(const struct kvf_codec_plan *plan, const void *record, size_t record_bytes,
                   const struct kvf_block_ranges *ranges, struct kvf_block_reader *reader)
{
    if (plan->profile->opaque) {
        return KVF_ERR_INVALID;
    }
    if (record_bytes < KVF_BLOCK_PAGE_BYTES) {
        return KVF_ERR_CORRUPT;
    }
    *reader = (struct kvf_block_reader){
        .plan = plan,
        .payload = (const uint8_t *)record + KVF_BLOCK_PAGE_BYTES,
        .ranges = *ranges,
    };
    memcpy(&reader->page, record, sizeof(reader->page));
    const struct kvf_block_header *header = &reader->page.header;
    int status = kvf_block_check(&reader->page, record_bytes);
    if (status == KVF_OK) {
        status = kvf_block_matches_plan(&reader->page, plan);
    }
    if (status != KVF_OK) {
        return status;
    }
    if (!ranges_hold(header, ranges)) {
        return KVF_ERR_INVALID;
    }
    if (ranges->n_layers == 0) {
        reader->ranges.n_layers = header->n_layers - ranges->layer_first;
    }
    if (ranges->n_tokens == 0) {
        reader->ranges.n_tokens = header->n_tokens - ranges->token_first;
    }
    reader->layer = reader->ranges.layer_first;
    reader->at = (size_t)reader->page.layer_offsets[reader->layer] * KVF_BLOCK_ALIGN_BYTES;
    reader->section_at = kvf_raw_table_bytes(header->n_layers);
    return KVF_OK;
}

int kvf_block_outline(const struct kvf_codec_plan *plan, const void *record, size_t record_bytes,
                      uint32_t outline_out[KVF_BLOCK_OUTLINE_WORDS])
{
    const struct kvf_block_ranges all = {0};
    struct kvf_block_reader reader;
    struct kvf_block_part part;
    uint32_t *words = outline_out + 1;
    int status = kvf_block_open(plan, record, record_bytes, &all, &reader);
    if (status != KVF_OK) {
        return status;
    }
    uint32_t n_layers = reader.page.header.n_layers;
    memset(outline_out, 0, kvf_block_outline_bytes(n_layers));
    status = kvf_block_next_part(&reader, &part);
    for (; status == KVF_OK; status = kvf_block_next_part(&reader, &part)) {
        if (!part.is_v) {
            words[part.layer] = (uint32_t)(part.bytes / KVF_BLOCK_ALIGN_BYTES);
        }
    }
    if (status != KVF_EMPTY) {
        return status;
    }
    if (reader.page.header.n_escapes != 0) {
        if (kvf_raw_table_bytes(n_layers) > reader.page.header.raw_area_bytes) {
            return KVF_ERR_CORRUPT;
        }
        memcpy(words + n_layers,
               reader.payload + (size_t)reader.page.header.raw_area_offset * KVF_BLOCK_ALIGN_BYTES,
               2 * (size_t)n_layers * sizeof(uint32_t));
    }
    outline_out[0] = kvf_crc32c(0, words, kvf_block_outline_bytes(n_layers) - sizeof(uint32_t));
    return KVF_OK;
}

int kvf_block_open_outlined(const struct kvf_codec_plan *plan, const void *page,
                            size_t record_bytes, const uint32_t *outline,
                            const struct kvf_block_ranges *ranges, struct kvf_block_reader *reader)
{
    size_t bytes = kvf_block_outline_bytes(plan->geometry.n_layers);
    int status = kvf_block_open(plan, page, record_bytes, ranges, reader);
    if (status == KVF_OK && kvf_crc32c(0, outline + 1, bytes - sizeof(uint32_t)) != outline[0]) {
        status = KVF_ERR_CORRUPT;
    }
    reader->payload = NULL;
    reader->outline = outline + 1;
    return status;
}

/* Where a layer's strip ends in the payload. */
static size_t strip_end(const struct kvf_record_page *page, uint32_t layer)
{
    uint32_t units = layer + 1 < page->header.n_layers ? page->layer_offsets[layer + 1]
                                                       : page->header.raw_area_offset;

    return (size_t)units * KVF_BLOCK_ALIGN_BYTES;
}

int kvf_block_next_part(struct kvf_block_reader *reader, struct kvf_block_part *part_out)
{
    const struct kvf_codec_plan *plan = reader->plan;
    uint32_t layer = reader->layer;
    if (layer == reader->ranges.layer_first + reader->ranges.n_layers) {
        return KVF_EMPTY;
    }
    bool is_v = reader->is_v;
    uint8_t bits = reader->page.layer_bits[layer];
    bits = is_v ? bits >> 4 : bits & 15;
    const struct kvf_codec_tensor *tensor = kvf_plan_tensor(plan, layer, is_v);
    if (bits == KVF_BITS_RAW) {
        tensor = is_v ? &plan->raw_v : &plan->raw_k;
    } else if (bits != tensor->descriptor.bits) {
        return KVF_ERR_CORRUPT; /* an edge where the plan has none, or the other way round */
    }
    uint32_t n_tokens = reader->page.header.n_tokens;
    size_t end = strip_end(&reader->page, layer);
    int status = KVF_OK;
    *part_out = (struct kvf_block_part){
        .tensor = tensor, .layer = (uint16_t)layer, .is_v = is_v, .offset = reader->at};
    bool is_last = is_v || !kvf_plan_has_v(plan);
    if (tensor->ops->stored_sizes != NULL && reader->outline != NULL) {
        part_out->sizes.codes_bytes = is_last
                                          ? end - reader->at
                                          : (size_t)reader->outline[layer] * KVF_BLOCK_ALIGN_BYTES;
    } else if (tensor->ops->stored_sizes != NULL) {
        status = tensor->ops->stored_sizes(tensor, n_tokens, reader->payload + reader->at,
                                           end - reader->at, &part_out->sizes);
    } else {
        tensor->ops->sizes(tensor, n_tokens, &part_out->sizes);
    }
    if (status != KVF_OK) {
        return status;
    }
    part_out->bytes = kvf_sizes_total(&part_out->sizes);
    if (part_out->bytes > end - reader->at || (is_last && part_out->bytes != end - reader->at)) {
        return KVF_ERR_CORRUPT;
    }
    reader->at += part_out->bytes;
    reader->is_v = !is_last;
    reader->layer += is_last;
    return KVF_OK;
}

int kvf_block_next_section(struct kvf_block_reader *reader, struct kvf_block_section *section_out)
{
    const struct kvf_codec_plan *plan = reader->plan;
    const struct kvf_block_header *header = &reader->page.header;
    size_t area_at = (size_t)header->raw_area_offset * KVF_BLOCK_ALIGN_BYTES;
    uint32_t layer_end = reader->ranges.layer_first + reader->ranges.n_layers;
    if (header->n_escapes == 0) {
        return KVF_EMPTY;
    }
    if (reader->section_at > header->raw_area_bytes) {
        return KVF_ERR_CORRUPT;
    }
    while (reader->section < 2 * layer_end) {
        uint32_t i = reader->section++;
        const struct kvf_codec_tensor *tensor = kvf_plan_tensor(plan, i / 2, i % 2);
        uint32_t count = reader->outline != NULL ? reader->outline[header->n_layers + i]
                                                 : kvf_load_u32(reader->payload + area_at +
                                                                (size_t)i * sizeof(uint32_t));
        if (count == 0) {
            continue;
        }
        /* dim 0 has no rows, so a count for a missing V fails here as well. */
        if (count > (uint32_t)tensor->n_rows * header->n_tokens ||
            kvf_raw_section_bytes(tensor, count) > header->raw_area_bytes - reader->section_at) {
            return KVF_ERR_CORRUPT;
        }
        *section_out = (struct kvf_block_section){
            .tensor = tensor,
            .layer = (uint16_t)(i / 2),
            .is_v = i % 2 != 0,
            .count = count,
            .offset = area_at + reader->section_at,
            .bytes = kvf_raw_section_bytes(tensor, count),
        };
        reader->section_at += section_out->bytes;
        if (i / 2 >= reader->ranges.layer_first) {
            return KVF_OK;
        }
    }
    return KVF_EMPTY;
}
