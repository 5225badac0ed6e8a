/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_burst.c: a burst's way from the end of its encode to the daemon (gpu_put.c has a drawing).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "client/gpu_internal.h"
#include "codec/codec_layout.h"

/* ----------------------------------------------------------------------------------------------
 * Blocks that kernels leave to the processor
 */

/* Bytes of a part as raw. */
static uint64_t raw_bytes(const struct kvf_codec_tensor *raw, uint32_t n_tokens)
{
    struct kvf_codec_sizes sizes;

    if (raw->dim == 0) {
        return 0;
    }
    raw->ops->sizes(raw, n_tokens, &sizes);
    return kvf_sizes_total(&sizes);
}

static uint64_t raw_strip_bytes(const struct kvf_gpu *gpu, uint32_t n_tokens)
{
    return raw_bytes(&gpu->plan.raw_k, n_tokens) + raw_bytes(&gpu->plan.raw_v, n_tokens);
}

/* Memory for one block, kept once it has been needed. */
static int redo_take(struct kvf_gpu *gpu)
{
    uint64_t bytes = gpu->plan.geometry.n_layers *
                     raw_strip_bytes(gpu, gpu->plan.geometry.chunk_tokens);
    uint64_t address;
    void *memory = NULL;
    int status = KVF_OK;

    if (gpu->redo_memory == NULL) {
        status = kvf_gpu_host_alloc(gpu->device, bytes, &memory, &address);
        gpu->redo_memory = memory;
    }
    if (status == KVF_OK && gpu->redo_address == 0) {
        status = kvf_gpu_device_result(gpu->device,
                                       gpu->device->driver.cuMemAlloc(&gpu->redo_address, bytes),
                                       "cuMemAlloc for a block");
    }
    gpu->redo_bytes = bytes;
    return status;
}

/* The block's vectors into redo_memory, as raw parts. */
static int redo_queue(struct kvf_gpu *gpu, struct kvf_gpu_burst *burst, uint32_t i)
{
    struct kvf_gpu_launch launches[KVF_GPU_LAUNCHES_MAX];
    struct kvf_gpu_work work = burst->work;
    uint32_t n_parts = kvf_gpu_parts_a_block(gpu);
    uint32_t n_tokens = kvf_gpu_burst_item(burst, i)->n_tokens;
    struct kvf_gpu_part *parts = (struct kvf_gpu_part *)burst->lists + i * n_parts;
    const struct kvf_gpu_driver *driver = &gpu->device->driver;
    uint64_t stored = gpu->redo_address;
    uint32_t n;
    int status;

    for (uint32_t p = 0; p < n_parts; p++) {
        parts[p].stored = stored;
        parts[p].block = 0;
        parts[p].n_sinks = 0;
        kvf_gpu_part_fill(parts[p].is_v ? &gpu->plan.raw_v : &gpu->plan.raw_k, &parts[p]);
        stored += parts[p].fixed_bytes;
    }
    work.parts += i * n_parts * sizeof(*parts);
    work.results += i * sizeof(struct kvf_gpu_result);
    work.n_parts = n_parts;
    work.n_blocks = 1;
    work.tokens_max = n_tokens;
    n = kvf_gpu_encode(&work, &gpu->raw_kinds, launches);
    if (n == 0) {
        snprintf(gpu->device->text, sizeof(gpu->device->text), "no kernel copies such pages");
        return KVF_ERR_UNSUPPORTED;
    }
    /* page ids as well: nothing was uploaded if no kernel encodes this plan */
    status = kvf_gpu_device_result(gpu->device,
                                   driver->cuMemcpyHtoDAsync(burst->work.parts, burst->lists,
                                                             kvf_gpu_burst_lists_bytes(burst),
                                                             gpu->put_stream),
                                   "cuMemcpyHtoDAsync");
    if (status == KVF_OK) {
        status = kvf_gpu_launch_all(gpu, &work, &gpu->raw_kinds, launches, n, gpu->put_stream);
    }
    if (status == KVF_OK) {
        status = kvf_gpu_device_result(
            gpu->device,
            driver->cuMemcpyDtoHAsync(gpu->redo_memory, gpu->redo_address,
                                      stored - gpu->redo_address, gpu->put_stream),
            "cuMemcpyDtoHAsync");
    }
    return status == KVF_OK ? kvf_gpu_record(gpu, burst->encoded, gpu->put_stream) : status;
}

/* A slot of so many bytes instead of the one that the block has. KVF_EMPTY: copies to that one have
 * not ended; KVF_ERR_BUSY. */
static int stage_replace(struct kvf_gpu *gpu, struct kvf_gpu_burst *burst, uint32_t i,
                         uint64_t bytes)
{
    struct kvf_gpu_out *block = &burst->blocks[i];
    int status;

    if (block->has_stage) {
        status = kvf_gpu_event_query(gpu->device, burst->copied);
        if (status != KVF_OK) {
            return status;
        }
        (void)kvf_stage_release(gpu->client, block->stage.stage);
        block->has_stage = false;
        block->copied = 0;
    }
    status = kvf_stage_acquire(gpu->client, bytes, &block->stage);
    block->has_stage = status == KVF_OK;
    if (status == KVF_ERR_BUSY && burst == kvf_gpu_burst_at(gpu, 0) &&
        gpu->client->credits_in_use == 0) {
        return KVF_ERR_TOO_LARGE; /* nothing is going to give any back */
    }
    return status;
}

/* Encode what has been gathered. KVF_EMPTY, KVF_ERR_BUSY: try again. */
static int redo_encode(struct kvf_gpu *gpu, struct kvf_gpu_burst *burst, uint32_t i)
{
    const struct kvf_gpu_item *item = kvf_gpu_burst_item(burst, i);
    struct kvf_gpu_out *block = &burst->blocks[i];
    uint32_t n_layers = gpu->plan.geometry.n_layers;
    uint64_t room = kvf_codec_plan_payload_bytes_max(&gpu->plan, item->n_tokens);
    uint64_t bytes[2] = {raw_bytes(&gpu->plan.raw_k, item->n_tokens),
                         raw_bytes(&gpu->plan.raw_v, item->n_tokens)};
    struct kvf_kv_view view = {.struct_bytes = sizeof(view), .tokens_a_page = item->n_tokens};
    struct kvf_tensor_view *tensors[2] = {&view.k, &view.v};
    void *layers[2][KVF_LAYERS_MAX];
    uint8_t *record;
    size_t payload_bytes = 0;
    int status;

    for (uint32_t t = 0; t < 2; t++) {
        size_t vector_bytes = (size_t)(t != 0 ? gpu->plan.kinds[0].v.dim
                                              : gpu->plan.kinds[0].k.dim) *
                              gpu->plan.kinds[0].k.element_bytes;

        for (uint32_t layer = 0; layer < n_layers; layer++) {
            layers[t][layer] = gpu->redo_memory + layer * (bytes[0] + bytes[1]) + t * bytes[0];
        }
        *tensors[t] = (struct kvf_tensor_view){.layers = layers[t],
                                               .token_stride_bytes = vector_bytes,
                                               .head_stride_bytes = vector_bytes * item->n_tokens};
    }
    record = aligned_alloc(KVF_CODEC_WORKSPACE_ALIGN,
                           kvf_align_up(KVF_RECORD_PAGE_BYTES + room, KVF_CODEC_WORKSPACE_ALIGN));
    if (record == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    status = kvf_block_encode(&gpu->plan, &view, item->token_start, item->n_tokens, (void *)record,
                              record + KVF_RECORD_PAGE_BYTES, room, gpu->client->workspace,
                              &payload_bytes);
    if (status == KVF_OK) {
        status = stage_replace(gpu, burst, i, payload_bytes);
    }
    if (status == KVF_OK) {
        memcpy(block->stage.record, record, KVF_RECORD_PAGE_BYTES + payload_bytes);
        status = kvf_stage_settle(gpu->client, block->stage.stage,
                                  (uint32_t)(KVF_RECORD_PAGE_BYTES + payload_bytes));
        block->is_encoded = true;
    }
    free(record);
    return status;
}

/* ----------------------------------------------------------------------------------------------
 * Moving along: each step says KVF_OK when it is done, KVF_EMPTY when it has to be tried again, or
 * why the burst fails
 */
static void pages_free(struct kvf_gpu_burst *burst, int32_t status)
{
    if (burst->is_encoding) {
        burst->is_encoding = false;
        burst->request->n_encoding--;
        if (status != KVF_OK && burst->request->free_status == KVF_OK) {
            burst->request->free_status = status;
        }
    }
}

/* The burst cannot or must not go on; what is being copied for it has to end first. */
static void give_up(struct kvf_gpu *gpu, struct kvf_gpu_burst *burst, int status)
{
    burst->status = burst->status == KVF_OK ? status : burst->status;
    pages_free(burst, status);
    if (gpu->redo_burst == burst) {
        gpu->redo_burst = NULL;
    }
    burst->state = burst->state == KVF_GPU_BURST_READY ? KVF_GPU_BURST_READY
                                                       : KVF_GPU_BURST_COPYING;
}

static int step_encoding(struct kvf_gpu *gpu, struct kvf_gpu_burst *burst)
{
    int status = kvf_gpu_event_query(gpu->device, burst->encoded);
    uint32_t n_redo = 0;

    if (status != KVF_OK) {
        return status;
    }
    kvf_gpu_times_take(gpu, &burst->times, false);
    if (burst->status != KVF_OK) {
        give_up(gpu, burst, burst->status);
        return KVF_OK;
    }
    for (uint32_t i = 0; i < burst->n; i++) {
        const struct kvf_gpu_result *result = &burst->results[i];

        burst->blocks[i].is_redo = (result->flags & KVF_GPU_REDO) != 0;
        n_redo += burst->blocks[i].is_redo;
        if ((result->flags & KVF_GPU_DONE) == 0 ||
            (!burst->blocks[i].is_redo && kvf_gpu_payload_bytes(result) > burst->blocks[i].bound)) {
            snprintf(gpu->device->text, sizeof(gpu->device->text),
                     "an encode ended with an impossible result");
            return KVF_ERR_IO;
        }
    }
    if (n_redo == 0) {
        pages_free(burst, KVF_OK);
    }
    if (KVF_MUTANT(gpu_ring_wait)) {
        kvf_gpu_burst_ring_return(gpu, burst);
    }
    burst->state = n_redo != 0 ? KVF_GPU_BURST_REDO : KVF_GPU_BURST_SETTLE;
    return KVF_OK;
}

static int step_redo(struct kvf_gpu *gpu, struct kvf_gpu_burst *burst)
{
    int status = KVF_OK;

    if (burst->status != KVF_OK) {
        /* pages, lists and the memory of one block are used until then */
        status = burst->is_redo_queued ? kvf_gpu_event_query(gpu->device, burst->encoded) : KVF_OK;
        return status == KVF_OK ? burst->status : status;
    }
    while (burst->n_redone < burst->n && !burst->blocks[burst->n_redone].is_redo) {
        burst->n_redone++;
    }
    if (burst->n_redone == burst->n) {
        pages_free(burst, KVF_OK);
        gpu->redo_burst = NULL;
        burst->state = KVF_GPU_BURST_SETTLE;
        return KVF_OK;
    }
    if (gpu->redo_burst != NULL && gpu->redo_burst != burst) {
        return KVF_EMPTY;
    }
    if (!burst->is_redo_queued) {
        gpu->redo_burst = burst;
        status = redo_take(gpu);
        if (status == KVF_OK) {
            status = redo_queue(gpu, burst, burst->n_redone);
        }
        burst->is_redo_queued = true;
    }
    if (status == KVF_OK) {
        status = kvf_gpu_event_query(gpu->device, burst->encoded);
    }
    if (status == KVF_OK) {
        status = redo_encode(gpu, burst, burst->n_redone);
    }
    if (status == KVF_OK) {
        burst->is_redo_queued = false;
        burst->n_redone++;
    }
    return status;
}

/* Queue the copies whose size was not known before. */
static int step_settle(struct kvf_gpu *gpu, struct kvf_gpu_burst *burst)
{
    bool is_queued = false;
    int status = burst->status;

    for (uint32_t i = 0; i < burst->n && status == KVF_OK; i++) {
        struct kvf_gpu_out *block = &burst->blocks[i];
        uint64_t bytes = kvf_gpu_payload_bytes(&burst->results[i]);

        if (block->is_encoded || (block->has_stage && block->copied >= bytes)) {
            continue;
        }
        if (!block->has_stage || block->stage.payload_bytes < bytes) {
            status = stage_replace(gpu, burst, i, bytes);
        }
        if (status == KVF_OK) {
            status = kvf_gpu_burst_copy(gpu, block, bytes);
            is_queued = true;
        }
    }
    if (is_queued) {
        int recorded = kvf_gpu_record(gpu, burst->copied, gpu->out_stream);

        status = status == KVF_OK ? recorded : status;
    }
    if (status == KVF_OK) {
        burst->state = KVF_GPU_BURST_COPYING;
    }
    return status;
}

/* Pages of records whose payload is in its slot. */
static int describe(struct kvf_gpu *gpu, struct kvf_gpu_burst *burst)
{
    bool is_summed = gpu->client->facts.version < KVF_WIRE_VERSION_UNSUMMED;
    int status = KVF_OK;

    for (uint32_t i = 0; i < burst->n && status == KVF_OK; i++) {
        const struct kvf_gpu_item *item = kvf_gpu_burst_item(burst, i);
        const struct kvf_gpu_result *result = &burst->results[i];
        struct kvf_gpu_out *block = &burst->blocks[i];
        struct kvf_record_page page;
        uint32_t crc = 0;

        if (block->is_encoded) {
            continue;
        }
        if (is_summed) {
            crc = kvf_crc32c(0, block->stage.payload, kvf_gpu_payload_bytes(result));
        }
        status = kvf_block_describe_gpu(&gpu->plan, item->token_start, item->n_tokens, result, crc,
                                        &page);
        if (status != KVF_OK) {
            snprintf(gpu->device->text, sizeof(gpu->device->text),
                     "kernels wrote a block that is none");
            return KVF_ERR_IO;
        }
        status = kvf_stage_settle(gpu->client, block->stage.stage,
                                  (uint32_t)page.header.total_bytes);
        if (status == KVF_OK) {
            memcpy(block->stage.record, &page, sizeof(page));
        }
    }
    return status;
}

static int step_copying(struct kvf_gpu *gpu, struct kvf_gpu_burst *burst)
{
    int status = KVF_MUTANT(gpu_submit_wait) ? KVF_OK
                                             : kvf_gpu_event_query(gpu->device, burst->copied);

    if (status != KVF_OK) {
        return status;
    }
    if (burst->range_bytes != 0) {
        kvf_gpu_burst_ring_return(gpu, burst);
    }
    if (burst->pin != NULL) {
        burst->pin->n_uses--;
        burst->pin = NULL;
    }
    burst->state = KVF_GPU_BURST_READY;
    return burst->status == KVF_OK ? describe(gpu, burst) : KVF_OK;
}

static void on_block(struct kvf_client_sink *sink, const struct kvf_event *event, uint64_t value)
{
    struct kvf_gpu_burst *burst = sink->arg;

    (void)value;
    kvf_gpu_item_done(burst->gpu, kvf_gpu_burst_item(burst, event->index), event->hit.status,
                      event->hit.tier);
}

/* Hand a burst to the daemon. */
static int submit(struct kvf_gpu *gpu, struct kvf_gpu_burst *burst)
{
    struct kvf_put_item items[KVF_GPU_BURST_BLOCKS_MAX];
    struct kvf_gpu_request *request = burst->request;
    struct kvf_put_options options = request->options;
    int status;

    for (uint32_t i = 0; i < burst->n; i++) {
        const struct kvf_gpu_item *item = kvf_gpu_burst_item(burst, i);

        items[i] = (struct kvf_put_item){
            .struct_bytes = sizeof(items[i]),
            .source = KVF_SOURCE_STAGED,
            .key = {item->key, item->key_bytes},
            .supersedes = {item->supersedes_bytes != 0 ? item->supersedes : NULL,
                           item->supersedes_bytes},
            .token_start = item->token_start,
            .n_tokens = item->n_tokens,
            .stage = burst->blocks[i].stage.stage,
        };
    }
    options.struct_bytes = sizeof(options);
    options.depth += burst->first;
    if (burst->first > 0) {
        const struct kvf_gpu_item *before = kvf_gpu_burst_item(burst, 0) - 1;

        options.parent = (struct kvf_key){before->key, before->key_bytes};
    } else if (options.parent.data != NULL) {
        options.parent.data = request->parent;
    }
    burst->sink = (struct kvf_client_sink){
        .on_block = on_block,
        .arg = burst,
        .is_unsummed = gpu->client->facts.version >= KVF_WIRE_VERSION_UNSUMMED,
    };
    kvf_client_enter(gpu->client);
    status = kvf_request_put(gpu->client, items, burst->n, &options, &burst->sink, 0, NULL,
                             &burst->daemon_request);
    kvf_client_leave(gpu->client);
    return status == KVF_ERR_BUSY ? KVF_EMPTY : status;
}

/* The burst ends without the daemon. */
static void burst_end(struct kvf_gpu *gpu, struct kvf_gpu_burst *burst, int32_t status)
{
    pages_free(burst, status);
    if (burst->range_bytes != 0) {
        kvf_gpu_burst_ring_return(gpu, burst);
    }
    if (burst->pin != NULL) {
        burst->pin->n_uses--;
        burst->pin = NULL;
    }
    if (gpu->redo_burst == burst) {
        gpu->redo_burst = NULL;
    }
    kvf_gpu_burst_release(gpu, burst);
    if (burst->request->local_status == KVF_OK) {
        burst->request->local_status = status;
    }
    for (uint32_t i = 0; i < burst->n; i++) {
        kvf_gpu_item_done(gpu, kvf_gpu_burst_item(burst, i), status, KVF_TIER_NONE);
    }
    burst->request->n_bursts--;
    burst->state = KVF_GPU_BURST_OVER;
}

static int step_ready(struct kvf_gpu *gpu, struct kvf_gpu_burst *burst)
{
    int status = burst->status != KVF_OK ? burst->status : burst->request->local_status;

    if (status == KVF_OK) {
        status = submit(gpu, burst);
    }
    if (status == KVF_EMPTY) {
        return KVF_EMPTY;
    }
    if (status != KVF_OK) {
        burst_end(gpu, burst, status);
        return KVF_OK;
    }
    for (uint32_t i = 0; i < burst->n; i++) {
        burst->blocks[i].has_stage = false; /* the put's now */
    }
    burst->state = KVF_GPU_BURST_SUBMITTED;
    return KVF_OK;
}

/* One step of one burst. KVF_OK; KVF_EMPTY: it waits; else the GPU has failed. */
static int burst_step(struct kvf_gpu *gpu, struct kvf_gpu_burst *burst, bool is_first)
{
    int status = KVF_EMPTY;

    switch (burst->state) {
    case KVF_GPU_BURST_ENCODING:
        return step_encoding(gpu, burst);
    case KVF_GPU_BURST_REDO:
        status = step_redo(gpu, burst);
        break;
    case KVF_GPU_BURST_SETTLE:
        status = step_settle(gpu, burst);
        break;
    case KVF_GPU_BURST_COPYING:
        status = step_copying(gpu, burst);
        break;
    case KVF_GPU_BURST_READY:
        return is_first ? step_ready(gpu, burst) : KVF_EMPTY;
    case KVF_GPU_BURST_SUBMITTED:
        if (burst->sink.is_done) {
            burst->request->n_bursts--;
            burst->state = KVF_GPU_BURST_OVER;
        }
        return KVF_EMPTY;
    case KVF_GPU_BURST_OVER:
        return KVF_EMPTY;
    }
    if (status == KVF_ERR_BUSY) {
        return KVF_EMPTY;
    }
    if (status < KVF_OK && status != KVF_ERR_IO) {
        give_up(gpu, burst, status);
        return KVF_OK;
    }
    return status;
}

int kvf_gpu_put_advance(struct kvf_gpu *gpu)
{
    bool is_first = true; /* of those that the daemon does not have */

    for (uint32_t i = 0; i < gpu->n_bursts; i++) {
        struct kvf_gpu_burst *burst = kvf_gpu_burst_at(gpu, i);
        int status;

        do {
            status = burst_step(gpu, burst, is_first);
        } while (status == KVF_OK);
        if (status != KVF_EMPTY) {
            return status;
        }
        is_first = is_first && burst->state >= KVF_GPU_BURST_SUBMITTED;
    }
    while (gpu->n_bursts > 0 && kvf_gpu_burst_at(gpu, 0)->state == KVF_GPU_BURST_OVER) {
        gpu->burst_first = (gpu->burst_first + 1) % KVF_GPU_BURSTS_MAX;
        gpu->n_bursts--;
    }
    return KVF_OK;
}

void kvf_gpu_put_fail(struct kvf_gpu *gpu, int status)
{
    for (uint32_t i = 0; i < gpu->n_bursts; i++) {
        if (kvf_gpu_burst_at(gpu, i)->state < KVF_GPU_BURST_SUBMITTED) {
            burst_end(gpu, kvf_gpu_burst_at(gpu, i), status);
        }
    }
}

void kvf_gpu_put_cancel(struct kvf_gpu *gpu, struct kvf_gpu_request *request)
{
    for (uint32_t i = 0; i < gpu->n_bursts; i++) {
        struct kvf_gpu_burst *burst = kvf_gpu_burst_at(gpu, i);

        if (burst->request != request) {
            continue;
        }
        if (burst->state < KVF_GPU_BURST_SUBMITTED) {
            burst->status = burst->status == KVF_OK ? KVF_ERR_CANCELED : burst->status;
        } else if (burst->state == KVF_GPU_BURST_SUBMITTED && burst->sink.is_used) {
            kvf_client_enter(gpu->client);
            kvf_request_cancel(gpu->client, burst->daemon_request);
            kvf_client_leave(gpu->client);
        }
    }
}
