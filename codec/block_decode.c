/* SPDX-License-Identifier: Apache-2.0
 *
 * block_decode.c: records to pages.
 */
#include "codec/block_parts.h"
#include "codec/closed_loop.h"
#include "codec/codec.h"
#include "codec/codec_fp.h"

/* A record on its way to pages. */
struct decoder {
    struct kvf_block_reader reader;
    const struct kvf_kv_view *kv;
    uint32_t layer_first; /* wanted; the reader may begin before it */
    void *workspace;
};

static struct kvf_codec_job decode_job(const struct decoder *decoder, uint32_t layer, bool is_v)
{
    const struct kvf_block_reader *reader = &decoder->reader;
    const struct kvf_tensor_view *tensor = is_v ? &decoder->kv->v : &decoder->kv->k;
    return (struct kvf_codec_job){
        .view = decoder->kv,
        .tensor = tensor,
        .base = layer >= decoder->layer_first ? tensor->layers[layer] : NULL,
        .n_tokens = reader->page.header.n_tokens,
        .token_first = reader->ranges.token_first,
        .n_wanted = reader->ranges.n_tokens,
        .mean = kvf_plan_array_at(&reader->plan->means[is_v], layer),
    };
}

static int decode_part(const struct decoder *decoder, const struct kvf_block_part *part,
                       const struct kvf_codec_tensor *tensor, const struct kvf_codec_job *job)
{
    return tensor->ops->decode(tensor, job, decoder->reader.payload + part->offset, &part->sizes,
                               decoder->workspace);
}

/* A strip that is stored raw: to the pages as it is, and to the state. */
static int decode_raw(const struct decoder *decoder, struct kvf_loop *loop,
                      const struct kvf_block_part *part, const struct kvf_codec_job *job)
{
    const struct kvf_codec_tensor *tensor = part->tensor;
    void *layers[1] = {loop->state};
    struct kvf_kv_view view = loop->view; /* of x, which are not more bytes than the state has */
    view.k.layers = layers;
    view.k.head_stride_bytes = (size_t)tensor->dim * tensor->element_bytes;
    view.k.token_stride_bytes = tensor->n_heads * view.k.head_stride_bytes;
    struct kvf_codec_job to_state = *job;
    to_state.view = &view;
    to_state.tensor = &view.k;
    to_state.base = layers[0];
    int status = decode_part(decoder, part, tensor, &to_state);
    if (status == KVF_OK) {
        kvf_loop_load(loop, tensor, &to_state, job->n_wanted, false);
        kvf_loop_take(loop, job->n_wanted, false);
    }
    if (status == KVF_OK && job->base != NULL) {
        status = decode_part(decoder, part, tensor, job);
    }
    return status;
}

/* A layer of a plan with deltas. */
static int decode_looped(const struct decoder *decoder, const struct kvf_block_part *part,
                         const struct kvf_codec_job *job)
{
    const struct kvf_codec_plan *plan = decoder->reader.plan;
    struct kvf_loop loop;
    kvf_loop_init(&loop, plan, (uint8_t *)decoder->workspace + plan->loop_offset);
    if (part->tensor == &plan->raw_k) {
        return decode_raw(decoder, &loop, part, job);
    }
    struct kvf_codec_tensor wide = kvf_loop_tensor(part->tensor);
    struct kvf_codec_job to_delta = kvf_loop_job(&loop, job);
    int status = decode_part(decoder, part, &wide, &to_delta);
    if (status == KVF_OK) {
        kvf_loop_take(&loop, job->n_wanted, kvf_plan_is_delta(plan, part->layer));
    }
    if (status == KVF_OK && job->base != NULL) {
        kvf_loop_store(&loop, part->tensor, job, job->n_wanted);
    }
    return status;
}

static int decode_parts(struct decoder *decoder)
{
    struct kvf_block_part part;
    bool is_looped = (decoder->reader.plan->block_flags & KVF_BLOCK_DELTAS) != 0;
    int status = kvf_block_next_part(&decoder->reader, &part);
    while (status == KVF_OK) {
        struct kvf_codec_job job = decode_job(decoder, part.layer, part.is_v);
        status = is_looped ? decode_looped(decoder, &part, &job)
                           : decode_part(decoder, &part, part.tensor, &job);
        if (status == KVF_OK) {
            status = kvf_block_next_part(&decoder->reader, &part);
        }
    }
    return status == KVF_EMPTY ? KVF_OK : status;
}

/* Put the vectors of one section where they belong. */
static int patch_section(const struct kvf_codec_tensor *tensor, const struct kvf_codec_job *job,
                         const uint8_t *section, uint32_t count)
{
    size_t vector_bytes = (size_t)tensor->group * tensor->element_bytes;
    const uint8_t *vectors = section + (size_t)count * sizeof(uint32_t);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t index = kvf_load_u32(section + (size_t)i * sizeof(uint32_t));
        uint32_t row = index / job->n_tokens;
        uint32_t token = index % job->n_tokens;
        if (row >= tensor->n_rows) {
            return KVF_ERR_CORRUPT;
        }
        if (token >= job->token_first && token - job->token_first < job->n_wanted) {
            memcpy(kvf_pages_vector(tensor, job, row, token - job->token_first),
                   vectors + i * vector_bytes, vector_bytes);
        }
    }
    return KVF_OK;
}

static int decode_sections(struct decoder *decoder)
{
    struct kvf_block_section section;
    int status = kvf_block_next_section(&decoder->reader, &section);
    while (status == KVF_OK) {
        struct kvf_codec_job job = decode_job(decoder, section.layer, section.is_v);
        if (job.base != NULL) {
            status = patch_section(section.tensor, &job, decoder->reader.payload + section.offset,
                                   section.count);
        }
        if (status == KVF_OK) {
            status = kvf_block_next_section(&decoder->reader, &section);
        }
    }
    return status == KVF_EMPTY ? KVF_OK : status;
}

/* Open at the layer that decoding has to begin with. */
static int open_record(struct decoder *decoder, const struct kvf_codec_plan *plan,
                       const void *record, size_t record_bytes,
                       const struct kvf_block_ranges *wanted)
{
    struct kvf_block_ranges ranges = *wanted;
    uint32_t n_layers = plan->geometry.n_layers;
    if (wanted->layer_first >= n_layers || wanted->n_layers > n_layers - wanted->layer_first) {
        return KVF_ERR_INVALID;
    }
    ranges.layer_first = kvf_loop_start(plan, wanted->layer_first);
    ranges.n_layers += ranges.n_layers != 0 ? wanted->layer_first - ranges.layer_first : 0;
    return kvf_block_open(plan, record, record_bytes, &ranges, &decoder->reader);
}

int kvf_block_decode(const struct kvf_codec_plan *plan, const void *record, size_t record_bytes,
                     uint32_t layer_first, uint32_t n_layers, uint32_t token_first,
                     uint32_t n_tokens, const struct kvf_kv_view *kv, void *workspace)
{
    const struct kvf_block_ranges wanted = {layer_first, n_layers, token_first, n_tokens};
    struct decoder decoder;
    if (plan->profile->opaque || !kvf_block_view_is_valid(plan, kv)) {
        return KVF_ERR_INVALID;
    }
    decoder.kv = kv;
    decoder.layer_first = layer_first;
    decoder.workspace = workspace;
    int status = open_record(&decoder, plan, record, record_bytes, &wanted);
    if (status != KVF_OK) {
        return status;
    }
    bool computes = kvf_block_computes(plan);
    struct kvf_fp_state fp_state = {0};
    if (computes) {
        fp_state = kvf_fp_enter();
    }
    status = decode_parts(&decoder);
    if (computes) {
        kvf_fp_leave(fp_state);
    }
    return status == KVF_OK ? decode_sections(&decoder) : status;
}
