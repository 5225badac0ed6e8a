/* SPDX-License-Identifier: Apache-2.0
 *
 * fake_kernels.c: what the codecs' kernels do, by the C codecs. An encode is several kernels; the
 * last one does all of it here.
 */
#include "tests/support/fake_cuda.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codec/closed_loop.h"
#include "codec/codec.h"
#include "codec/codec_fp.h"
#include "codec/codec_gpu_scratch.h"
#include "codec/codec_layout.h"

uint32_t fake_kernel_redo_every;

static uint32_t n_encoded;

static void rotations_of(const struct kvf_gpu_tensor *from, struct kvf_codec_tensor *tensor)
{
    tensor->descriptor.rot_seed = from->rot_seed;
    tensor->n_rotations = from->n_rotations;
    tensor->n_scales = from->n_scales;
    for (uint32_t r = 0; r < from->n_rotations; r++) {
        const struct kvf_gpu_rotation *rotation = &from->rotations[r];

        tensor->rotations[r] = (struct kvf_codec_rotation){
            .n = rotation->n,
            .order = rotation->order,
            .code_bytes = rotation->code_bytes,
            .bits = rotation->bits,
            .root_mean_square = rotation->root_mean_square,
            .quantize = rotation->quantize,
            .scale = rotation->scale,
            .factor = rotation->factor,
            .residual = rotation->residual,
            .residual_factor = rotation->residual_factor,
        };
    }
}

/* The C codec's tensor of a kernel's. */
static struct kvf_codec_tensor tensor_of(const struct kvf_gpu_tensor *from)
{
    struct kvf_codec_tensor tensor = {
        .ops = kvf_codec_find(from->codec),
        .n_heads = from->n_heads,
        .dim = from->dim,
        .group = from->group,
        .n_rows = from->n_rows,
        .dtype = from->dtype,
        .element_bytes = from->element_bytes,
        .code_bytes = from->code_bytes,
        .rot_order = from->rot_order,
        .sqrt_order = from->sqrt_order,
        .rsqrt_order = from->rsqrt_order,
    };

    tensor.descriptor.codec = from->codec;
    tensor.descriptor.bits = from->bits;
    tensor.descriptor.flags = from->flags;
    tensor.descriptor.clip_q15 = (uint16_t)(from->clip_ratio * KVF_BLOCK_CLIP_ONE + 0.5f);
    tensor.descriptor.group_axis = from->group_axis;
    tensor.descriptor.group_size = from->group_size;
    tensor.descriptor.zero_kind = from->zero_kind;
    tensor.n_clips = from->n_clips;
    for (uint32_t i = 0; i < from->n_clips; i++) {
        tensor.clips_q15[i] = (uint16_t)(from->clip_ratios[i] * KVF_BLOCK_CLIP_ONE + 0.5f);
    }
    memcpy(tensor.order, from->order, sizeof(tensor.order));
    memcpy(tensor.sign_bits, from->sign_bits, sizeof(tensor.sign_bits));
    rotations_of(from, &tensor);
    return tensor;
}

/* How a part is stored whose codec gave up. */
static struct kvf_codec_tensor raw_of(const struct kvf_codec_tensor *tensor)
{
    static const struct kvf_profile_tensor settings = {.codec = KVF_CODEC_RAW};
    struct kvf_codec_tensor raw = {
        .ops = kvf_codec_find(KVF_CODEC_RAW),
        .n_heads = tensor->n_heads,
        .dim = tensor->dim,
        .dtype = tensor->dtype,
        .element_bytes = tensor->element_bytes,
    };

    (void)raw.ops->resolve(&raw, &settings);
    return raw;
}

struct pages {
    struct kvf_kv_view view;
    struct kvf_tensor_view tensor;
    struct kvf_codec_job job;
};

/* A part's pages. */
static void pages_of(const struct kvf_gpu_work *work, const struct kvf_gpu_part *part,
                     struct pages *pages)
{
    const struct kvf_gpu_pages *strides = &work->pages[part->is_v];

    pages->view = (struct kvf_kv_view){
        .struct_bytes = sizeof(pages->view),
        .tokens_a_page = work->tokens_a_page,
        .page_table = (const uint32_t *)(uintptr_t)work->page_ids + part->first_page,
    };
    pages->tensor = (struct kvf_tensor_view){
        .page_stride_bytes = strides->page_stride_bytes,
        .token_stride_bytes = strides->token_stride_bytes,
        .head_stride_bytes = strides->head_stride_bytes,
    };
    pages->job = (struct kvf_codec_job){
        .view = &pages->view,
        .tensor = &pages->tensor,
        .base = (uint8_t *)(uintptr_t)part->base,
        .n_tokens = part->n_tokens,
        .token_first = part->token_first,
        .n_wanted = part->n_wanted,
        .mean = (const uint8_t *)(uintptr_t)part->mean,
        .split = (const uint8_t *)(uintptr_t)part->split,
    };
}

static void *workspace_of(const struct kvf_codec_tensor *tensor)
{
    size_t bytes = tensor->ops->workspace_bytes(tensor);

    return aligned_alloc(KVF_CODEC_WORKSPACE_ALIGN,
                         kvf_align_up(bytes + 1, KVF_CODEC_WORKSPACE_ALIGN));
}

/* What is carried from layer to layer of a block whose layers are deltas. */
struct looped {
    struct kvf_codec_plan plan; /* what closed_loop.c reads of one */
    struct kvf_loop loop;
    void *arrays;
};

static struct looped *looped_new(const struct kvf_gpu_tensor *facts, uint32_t n_tokens)
{
    struct looped *looped = calloc(1, sizeof(*looped));

    looped->plan.block_flags = KVF_BLOCK_DELTAS;
    looped->plan.geometry.n_heads = facts->n_heads;
    looped->plan.geometry.dim_k = facts->dim;
    looped->plan.geometry.chunk_tokens = (uint16_t)n_tokens;
    looped->arrays = aligned_alloc(KVF_CODEC_WORKSPACE_ALIGN, kvf_loop_bytes(&looped->plan));
    kvf_loop_init(&looped->loop, &looped->plan, looped->arrays);
    return looped;
}

static void looped_drop(struct looped *looped)
{
    if (looped != NULL) {
        free(looped->arrays);
        free(looped);
    }
}

/* The state after a strip. */
static void looped_take(struct looped *looped, const struct kvf_codec_tensor *tensor,
                        const struct kvf_codec_job *job, const uint8_t *stored, bool is_delta,
                        void *workspace)
{
    struct kvf_codec_tensor wide = kvf_loop_tensor(tensor);
    struct kvf_codec_job to_delta = kvf_loop_job(&looped->loop, job);
    struct kvf_codec_sizes sizes;

    wide.ops->sizes(&wide, job->n_tokens, &sizes);
    (void)wide.ops->decode(&wide, &to_delta, stored, &sizes, workspace);
    kvf_loop_take(&looped->loop, job->n_wanted, is_delta);
}

/* What is known of a list of parts: a launch knows the tensors of its kind of layers, and a block
 * may have parts of several. */
struct known {
    struct known *next;
    uint64_t parts;                  /* the list's address */
    uint32_t n;                      /* parts whose tensors are known */
    struct kvf_gpu_tensor tensors[]; /* by number; dim 0: not known */
};

static struct known *known_lists;

/* The list of a launch, with the launch's tensors. */
static struct known *known_add(const struct kvf_gpu_work *work)
{
    const struct kvf_gpu_part *parts = (const struct kvf_gpu_part *)(uintptr_t)work->parts;
    const uint32_t *numbers = (const uint32_t *)(uintptr_t)work->numbers;
    size_t tensors_bytes = work->n_parts_all * sizeof(struct kvf_gpu_tensor);
    struct known *known = known_lists;

    while (known != NULL && known->parts != work->parts) {
        known = known->next;
    }
    if (known == NULL) {
        known = calloc(1, sizeof(*known) + tensors_bytes);
        known->parts = work->parts;
        known->next = known_lists;
        known_lists = known;
    }
    if (known->tensors[numbers != NULL ? numbers[0] : 0].dim != 0) {
        memset(known->tensors, 0, tensors_bytes); /* of a list that was not encoded to its end */
        known->n = 0;
    }
    for (uint32_t i = 0; i < work->n_parts; i++) {
        uint32_t number = numbers != NULL ? numbers[i] : i;

        known->tensors[number] = work->tensors[parts[number].is_v];
    }
    known->n += work->n_parts;
    return known;
}

static void known_drop(struct known *known)
{
    struct known **link = &known_lists;

    while (*link != known) {
        link = &(*link)->next;
    }
    *link = known->next;
    free(known);
}

/* Escapes of one part, kept until the strips are written. */
struct escapes {
    uint32_t *index;
    uint32_t n;
};

/* One part at stored. Returns its bytes; 0: the block is to be done by the processor. */
static size_t encode_part(const struct kvf_gpu_work *work, const struct kvf_gpu_part *part,
                          const struct kvf_gpu_tensor *facts, struct looped *looped,
                          uint8_t *stored, struct escapes *escapes_out, uint8_t *bits_out)
{
    bool is_delta = looped != NULL && (part->loop & KVF_GPU_LOOP_DELTA) != 0;
    struct kvf_codec_tensor tensor = tensor_of(facts);
    uint32_t n_vectors = (uint32_t)tensor.n_rows * part->n_tokens;
    struct kvf_codec_escapes escapes = {
        .index = malloc(n_vectors * sizeof(uint32_t)),
        .max = part->n_sinks * tensor.n_rows +
               (n_vectors + KVF_CODEC_ESCAPE_SHARE - 1) / KVF_CODEC_ESCAPE_SHARE,
    };
    struct kvf_codec_sizes sizes;
    struct pages pages;
    void *workspace = workspace_of(&tensor);
    int status;

    pages_of(work, part, &pages);
    pages.job.n_sinks = part->n_sinks;
    if (is_delta) {
        struct kvf_codec_tensor wide = kvf_loop_tensor(&tensor);
        struct kvf_codec_job job = kvf_loop_job(&looped->loop, &pages.job);

        kvf_loop_load(&looped->loop, &tensor, &pages.job, part->n_tokens, true);
        status = wide.ops->encode(&wide, &job, stored, &escapes, workspace, &sizes);
    } else {
        status = tensor.ops->encode(&tensor, &pages.job, stored, &escapes, workspace, &sizes);
    }
    if (looped != NULL && status == KVF_OK) {
        looped_take(looped, &tensor, &pages.job, stored, is_delta, workspace);
    }
    *bits_out = tensor.descriptor.bits;
    if (status == KVF_ERR_NO_SPACE && tensor.ops->id == KVF_CODEC_EXACT) {
        struct kvf_codec_tensor raw = raw_of(&tensor);

        escapes.n = 0;
        status = raw.ops->encode(&raw, &pages.job, stored, NULL, NULL, &sizes);
        *bits_out = KVF_BITS_RAW;
    }
    free(workspace);
    escapes_out->index = escapes.index;
    escapes_out->n = escapes.n;
    return status == KVF_OK ? kvf_sizes_total(&sizes) : 0;
}

static uint8_t *section_write(const struct kvf_gpu_work *work, const struct kvf_gpu_part *part,
                              const struct kvf_gpu_tensor *facts, const struct escapes *escapes,
                              uint8_t *section)
{
    struct kvf_codec_tensor tensor = tensor_of(facts);
    size_t vector_bytes = (size_t)tensor.group * tensor.element_bytes;
    size_t bytes = kvf_raw_section_bytes(&tensor, escapes->n);
    struct pages pages;
    uint8_t *to = section + escapes->n * sizeof(uint32_t);

    pages_of(work, part, &pages);
    memset(section, 0, bytes);
    memcpy(section, escapes->index, escapes->n * sizeof(uint32_t));
    for (uint32_t i = 0; i < escapes->n; i++) {
        memcpy(to,
               kvf_pages_vector(&tensor, &pages.job, escapes->index[i] / part->n_tokens,
                                escapes->index[i] % part->n_tokens),
               vector_bytes);
        to += vector_bytes;
    }
    return section + bytes;
}

/* The raw area behind the strips. Returns its bytes. */
static size_t area_write(const struct kvf_gpu_work *work, const struct kvf_gpu_part *parts,
                         const struct kvf_gpu_tensor *facts, uint32_t n_parts,
                         const struct escapes *escapes, uint8_t *area)
{
    uint8_t *at = area + kvf_raw_table_bytes(work->n_layers);
    size_t bytes;

    memset(area, 0, kvf_raw_table_bytes(work->n_layers));
    for (uint32_t i = 0; i < n_parts; i++) {
        kvf_store_u32(area + (2u * parts[i].layer + parts[i].is_v) * sizeof(uint32_t),
                      escapes[i].n);
        if (escapes[i].n != 0) {
            at = section_write(work, &parts[i], &facts[i], &escapes[i], at);
        }
    }
    bytes = kvf_part_bytes((size_t)(at - area));
    memset(at, 0, bytes - (size_t)(at - area));
    return bytes;
}

static void encode_block(const struct kvf_gpu_work *work, struct kvf_gpu_part *parts,
                         const struct kvf_gpu_tensor *facts, uint32_t n_parts, bool is_fixed)
{
    struct kvf_gpu_result *result = (struct kvf_gpu_result *)(uintptr_t)work->results +
                                    parts[0].block;
    struct escapes *escapes = calloc(n_parts, sizeof(*escapes));
    uint8_t *payload = (uint8_t *)(uintptr_t)parts[0].stored;
    uint8_t *at = payload;
    bool is_raw = facts[0].codec == KVF_CODEC_RAW;
    struct looped *looped = facts[0].is_looped ? looped_new(facts, parts[0].n_tokens) : NULL;

    result->flags = KVF_GPU_DONE;
    n_encoded += !is_raw;
    if (!is_raw && fake_kernel_redo_every != 0 && n_encoded % fake_kernel_redo_every == 0) {
        result->flags |= KVF_GPU_REDO;
    }
    result->n_escapes = 0;
    for (uint32_t i = 0; i < n_parts; i++) {
        uint8_t bits = 0;
        size_t bytes;

        if (is_fixed) {
            at = (uint8_t *)(uintptr_t)parts[i].stored;
        }
        if (!parts[i].is_v) {
            result->layer_offsets[parts[i].layer] = (uint32_t)((size_t)(at - payload) /
                                                               KVF_BLOCK_ALIGN_BYTES);
            result->layer_bits[parts[i].layer] = 0;
        }
        parts[i].stored = (uint64_t)(uintptr_t)at;
        bytes = encode_part(work, &parts[i], &facts[i], looped, at, &escapes[i], &bits);
        result->flags |= bytes == 0 ? KVF_GPU_REDO : 0;
        result->layer_bits[parts[i].layer] |= (uint8_t)(parts[i].is_v ? bits << 4 : bits);
        result->n_escapes += escapes[i].n;
        at += bytes;
    }
    result->raw_area_offset = (uint32_t)((size_t)(at - payload) / KVF_BLOCK_ALIGN_BYTES);
    result->raw_area_bytes = 0;
    if (result->n_escapes != 0 && (result->flags & KVF_GPU_REDO) == 0) {
        result->raw_area_bytes = (uint32_t)area_write(work, parts, facts, n_parts, escapes, at);
    }
    for (uint32_t i = 0; i < n_parts; i++) {
        free(escapes[i].index);
    }
    free(escapes);
    looped_drop(looped);
}

static void encode(const struct kvf_gpu_work *work, bool is_fixed)
{
    struct kvf_gpu_part *parts = (struct kvf_gpu_part *)(uintptr_t)work->parts;
    struct known *known = known_add(work);
    uint32_t first = 0;

    if (known->n < work->n_parts_all) {
        return;
    }
    while (first < work->n_parts_all) {
        uint32_t n = 1;

        while (first + n < work->n_parts_all && parts[first + n].block == parts[first].block) {
            n++;
        }
        encode_block(work, parts + first, known->tensors + first, n, is_fixed);
        first += n;
    }
    known_drop(known);
}

/* Where the raw area of a block of fixed strips begins; parts: of the block. */
static uint8_t *area_of(const struct kvf_gpu_work *work, const struct kvf_gpu_part *parts)
{
    const struct kvf_gpu_part *last = &parts[work->n_layers - 1];

    return (uint8_t *)(uintptr_t)(last->stored + last->fixed_bytes);
}

/* One layer of a block, whose pages are another layer's afterwards. */
static void encode_layer_part(const struct kvf_gpu_work *work, uint32_t number)
{
    struct kvf_gpu_part *part = (struct kvf_gpu_part *)(uintptr_t)work->parts + number;
    const struct kvf_gpu_tensor *facts = &work->tensors[0];
    struct kvf_gpu_escapes *counts = (struct kvf_gpu_escapes *)(uintptr_t)work->scratch + number;
    struct kvf_gpu_result *result = (struct kvf_gpu_result *)(uintptr_t)work->results + part->block;
    struct looped *looped = facts->is_looped ? looped_new(facts, part->n_tokens) : NULL;
    size_t sums_bytes = (size_t)part->n_tokens * facts->n_heads * facts->dim * sizeof(float);
    struct kvf_codec_tensor tensor = tensor_of(facts);
    uint8_t *section = area_of(work, part - part->layer) + kvf_raw_table_bytes(work->n_layers);
    struct escapes escapes;
    uint8_t bits;

    if (looped != NULL && (part->loop & KVF_GPU_LOOP_DELTA) != 0) {
        memcpy(looped->loop.state, (void *)(uintptr_t)part->sums, sums_bytes);
    }
    if (encode_part(work, part, facts, looped, (uint8_t *)(uintptr_t)part->stored, &escapes,
                    &bits) == 0) {
        result->flags |= KVF_GPU_REDO;
        escapes.n = 0;
    }
    if (looped != NULL) {
        memcpy((void *)(uintptr_t)part->sums, looped->loop.state, sums_bytes);
    }
    for (uint32_t layer = 0; layer < part->layer; layer++) {
        section += (counts - part->layer + layer)->section_bytes;
    }
    if (escapes.n != 0) {
        counts->n = escapes.n;
        counts->section_bytes = (uint32_t)kvf_raw_section_bytes(&tensor, escapes.n);
        result->n_escapes += escapes.n;
        (void)section_write(work, part, facts, &escapes, section);
    }
    free(escapes.index);
    looped_drop(looped);
}

static void encode_layer(const struct kvf_gpu_work *work)
{
    for (uint32_t i = 0; i < work->n_parts; i++) {
        encode_layer_part(work, ((const uint32_t *)(uintptr_t)work->numbers)[i]);
    }
}

/* Behind the last layer: tables and results. */
static void encode_finish(const struct kvf_gpu_work *work)
{
    const struct kvf_gpu_part *parts = (const struct kvf_gpu_part *)(uintptr_t)work->parts;
    const struct kvf_gpu_escapes *counts = (const void *)(uintptr_t)work->scratch;

    for (uint32_t block = 0; block < work->n_blocks; block++) {
        struct kvf_gpu_result *result = (struct kvf_gpu_result *)(uintptr_t)work->results + block;
        uint8_t *area = area_of(work, parts);
        size_t bytes = kvf_raw_table_bytes(work->n_layers);

        result->flags |= KVF_GPU_DONE;
        result->raw_area_offset = (uint32_t)((size_t)(area - (uint8_t *)(uintptr_t)parts->stored) /
                                             KVF_BLOCK_ALIGN_BYTES);
        for (uint32_t layer = 0; result->n_escapes != 0 && layer < work->n_layers; layer++) {
            kvf_store_u32(area + 2u * layer * sizeof(uint32_t), counts[layer].n);
            kvf_store_u32(area + (2u * layer + 1) * sizeof(uint32_t), 0);
            bytes += counts[layer].section_bytes;
        }
        if (result->n_escapes != 0) {
            memset(area + 2u * work->n_layers * sizeof(uint32_t), 0,
                   kvf_raw_table_bytes(work->n_layers) - 2u * work->n_layers * sizeof(uint32_t));
            memset(area + bytes, 0, kvf_part_bytes(bytes) - bytes);
            result->raw_area_bytes = (uint32_t)kvf_part_bytes(bytes);
        }
        parts += work->n_layers;
        counts += work->n_layers;
    }
}

static void decode(const struct kvf_gpu_work *work, uint8_t codec, uint32_t tensors)
{
    const struct kvf_gpu_part *parts = (const struct kvf_gpu_part *)(uintptr_t)work->parts;

    for (uint32_t i = 0; i < work->n_parts; i++) {
        struct kvf_codec_tensor tensor = tensor_of(&work->tensors[parts[i].is_v]);
        const uint8_t *stored = (const uint8_t *)(uintptr_t)parts[i].stored;
        struct kvf_codec_sizes sizes;
        struct pages pages;
        void *workspace;
        int status = KVF_OK;

        if ((tensors >> parts[i].is_v & 1) == 0) {
            continue;
        }
        assert(tensor.ops->id == codec);
        pages_of(work, &parts[i], &pages);
        workspace = workspace_of(&tensor);
        if (tensor.ops->stored_sizes != NULL) {
            status = tensor.ops->stored_sizes(&tensor, parts[i].n_tokens, stored,
                                              parts[i].part_bytes, &sizes);
        } else {
            tensor.ops->sizes(&tensor, parts[i].n_tokens, &sizes);
        }
        if (status == KVF_OK) {
            (void)tensor.ops->decode(&tensor, &pages.job, stored, &sizes, workspace);
        }
        free(workspace);
    }
}

/* One layer of those that are deltas, or not, of one block. */
static void decode_looped_part(const struct kvf_gpu_work *work, const struct kvf_gpu_part *part,
                               struct looped *looped)
{
    bool is_delta = (part->loop & KVF_GPU_LOOP_DELTA) != 0;
    struct kvf_codec_tensor tensor = tensor_of(&work->tensors[is_delta]);
    const uint8_t *stored = (const uint8_t *)(uintptr_t)part->stored;
    void *workspace = workspace_of(&tensor);
    struct pages pages;

    pages_of(work, part, &pages);
    if ((part->loop & KVF_GPU_LOOP_RAW) != 0) {
        struct kvf_codec_tensor raw = raw_of(&tensor);
        struct kvf_codec_sizes sizes;

        raw.ops->sizes(&raw, part->n_tokens, &sizes);
        (void)raw.ops->decode(&raw, &pages.job, stored, &sizes, NULL);
        kvf_loop_load(&looped->loop, &tensor, &pages.job, part->n_wanted, false);
        kvf_loop_take(&looped->loop, part->n_wanted, false);
    } else {
        looped_take(looped, &tensor, &pages.job, stored, is_delta, workspace);
        kvf_loop_store(&looped->loop, &tensor, &pages.job, part->n_wanted);
    }
    free(workspace);
}

static void decode_looped(const struct kvf_gpu_work *work)
{
    const struct kvf_gpu_part *parts = (const struct kvf_gpu_part *)(uintptr_t)work->parts;
    const struct kvf_gpu_tensor *facts = &work->tensors[0];
    void *kept = (void *)(uintptr_t)work->scratch;
    uint32_t n_layers = work->n_parts / work->n_blocks;

    for (uint32_t block = 0; block < work->n_blocks; block++, parts += n_layers) {
        struct looped *looped = looped_new(facts, parts[0].n_tokens);
        size_t bytes = (size_t)parts[0].n_wanted * facts->n_heads * facts->dim * sizeof(float);

        if ((parts[0].loop & KVF_GPU_LOOP_DELTA) != 0) {
            memcpy(looped->loop.state, kept, bytes);
        }
        for (uint32_t i = 0; i < n_layers; i++) {
            decode_looped_part(work, &parts[i], looped);
        }
        if (kept != NULL && parts[0].layer + n_layers < work->n_layers) {
            memcpy(kept, looped->loop.state, bytes);
        }
        looped_drop(looped);
    }
}

static void patch(const struct kvf_gpu_work *work, uint32_t tensors)
{
    const struct kvf_gpu_part *parts = (const struct kvf_gpu_part *)(uintptr_t)work->parts;

    for (uint32_t p = 0; p < work->n_parts; p++) {
        const struct kvf_gpu_part *part = &parts[p];
        struct kvf_codec_tensor tensor = tensor_of(&work->tensors[part->is_v]);
        size_t vector_bytes = (size_t)tensor.group * tensor.element_bytes;
        const uint8_t *section = (const uint8_t *)(uintptr_t)part->stored;
        struct pages pages;

        if ((tensors >> part->is_v & 1) == 0) {
            continue;
        }
        pages_of(work, part, &pages);
        for (uint32_t i = 0; i < part->n_vectors; i++) {
            uint32_t index = kvf_load_u32(section + i * sizeof(uint32_t));
            uint32_t token = index % part->n_tokens;

            if (index / part->n_tokens < tensor.n_rows && token >= part->token_first &&
                token - part->token_first < part->n_wanted) {
                memcpy(kvf_pages_vector(&tensor, &pages.job, index / part->n_tokens,
                                        token - part->token_first),
                       section + part->n_vectors * sizeof(uint32_t) + i * vector_bytes,
                       vector_bytes);
            }
        }
    }
}

/* What of a part was not coded, which the C decoder makes NaN, from where it was encoded from. */
static void restore_part(const struct kvf_gpu_work *work, const struct kvf_gpu_part *part)
{
    struct kvf_codec_tensor tensor = tensor_of(&work->tensors[0]);
    struct kvf_codec_tensor wide = kvf_loop_tensor(&tensor);
    struct looped *looped = looped_new(&work->tensors[0], part->n_tokens);
    struct kvf_gpu_part encoded = *part;
    void *workspace = workspace_of(&wide);
    struct kvf_codec_sizes sizes;
    struct kvf_codec_job job;
    struct pages to;
    struct pages from;

    encoded.base = encoded.source;
    pages_of(work, part, &to);
    pages_of(work, &encoded, &from);
    job = kvf_loop_job(&looped->loop, &to.job);
    wide.ops->sizes(&wide, part->n_tokens, &sizes);
    (void)wide.ops->decode(&wide, &job, (const uint8_t *)(uintptr_t)part->stored, &sizes,
                           workspace);
    for (uint32_t i = 0; i < (uint32_t)tensor.n_rows * part->n_tokens; i++) {
        uint32_t row = i / part->n_tokens;
        uint32_t token = i % part->n_tokens;
        float first;

        memcpy(&first, kvf_pages_vector(&wide, &job, row, token), sizeof(first));
        if (isnan(first)) {
            memcpy(kvf_pages_vector(&tensor, &to.job, row, token),
                   kvf_pages_vector(&tensor, &from.job, row, token),
                   (size_t)tensor.group * tensor.element_bytes);
        }
    }
    free(workspace);
    looped_drop(looped);
}

static void restore(const struct kvf_gpu_work *work)
{
    const struct kvf_gpu_part *parts = (const struct kvf_gpu_part *)(uintptr_t)work->parts;

    for (uint32_t i = 0; i < work->n_parts; i++) {
        restore_part(work, &parts[i]);
    }
}

static bool begins(const char *name, const char *with)
{
    return strncmp(name, with, strlen(with)) == 0;
}

bool fake_kernel_exists(const char *name)
{
    return begins(name, "kvf_raw_") || begins(name, "kvf_exact_") || begins(name, "kvf_saw_") ||
           begins(name, "kvf_tq_") || begins(name, "kvf_kivi_") || begins(name, "kvf_escapes_") ||
           begins(name, "kvf_rebuild") || begins(name, "kvf_loop_") || begins(name, "kvf_latent_");
}

void fake_kernel_run(const char *name, const struct kvf_gpu_work *work, uint32_t tensors)
{
    struct kvf_fp_state state = kvf_fp_enter();

    if (begins(name, "kvf_escapes_write_fixed") && (tensors & KVF_ESCAPES_LAYER) != 0) {
        encode_layer(work);
    } else if (begins(name, "kvf_escapes_write_fixed") && (tensors & KVF_ESCAPES_WRITTEN) != 0) {
        encode_finish(work);
    } else if (begins(name, "kvf_escapes_write")) {
        encode(work, begins(name, "kvf_escapes_write_fixed"));
    } else if (begins(name, "kvf_escapes_patch")) {
        patch(work, tensors);
    } else if (begins(name, "kvf_escapes_restore")) {
        restore(work);
    } else if (begins(name, "kvf_raw_decode")) {
        decode(work, KVF_CODEC_RAW, tensors);
    } else if (begins(name, "kvf_exact_decode")) {
        decode(work, KVF_CODEC_EXACT, tensors);
    } else if (begins(name, "kvf_saw_decode")) {
        decode(work, KVF_CODEC_SAW, tensors);
    } else if (begins(name, "kvf_tq_decode")) {
        decode(work, KVF_CODEC_TQ, tensors);
    } else if (begins(name, "kvf_kivi_decode")) {
        decode(work, KVF_CODEC_KIVI, tensors);
    } else if (begins(name, "kvf_loop_decode")) {
        decode_looped(work);
    }
    kvf_fp_leave(state);
}
