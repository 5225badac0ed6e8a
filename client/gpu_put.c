/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_put.c: pages to the daemon, in bursts.
 *
 *              event: encoded    sizes known      event: copied     in order       all blocks
 *   ENCODING --------------> SETTLE ----------> COPYING ------> READY -----> SUBMITTED ----> OVER
 *       |                      ^ copies that were not queued
 *       +-> REDO: a block that |  behind the encode already
 *           kernels give up ----+
 *
 * A burst is a range of the device ring: payloads, scratch, lists. The encode is queued by the
 * call itself; where sizes are fixed, so are the copies behind it, and nothing has to be decided in
 * between. The range is free when the copies have ended. Bursts reach the daemon in the order in
 * which they were put, because a chain's blocks must.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/gpu_internal.h"
#include "codec/codec_layout.h"

static uint32_t tokens_of(const struct kvf_gpu *gpu, uint32_t n_tokens)
{
    return n_tokens != 0 ? n_tokens : gpu->plan.geometry.chunk_tokens;
}

/* ----------------------------------------------------------------------------------------------
 * Sizes
 */

/* Vectors of one tensor of one layer that may be in the raw area, or that surely are. */
typedef uint32_t vectors_in_area(const struct kvf_codec_plan *plan,
                                 const struct kvf_codec_tensor *tensor, uint32_t n_tokens);

static uint32_t sink_vectors(const struct kvf_codec_plan *plan,
                             const struct kvf_codec_tensor *tensor, uint32_t n_tokens)
{
    bool takes = tensor->dim != 0 && (tensor->ops->capabilities & KVF_CODEC_ESCAPES) != 0;

    return takes ? kvf_plan_sinks(plan, 0, n_tokens) * tensor->n_rows : 0;
}

/* The raw area with so many vectors in each section. */
static uint64_t raw_area_bytes(const struct kvf_codec_plan *plan, uint32_t n_tokens,
                               vectors_in_area *vectors)
{
    uint64_t sections = 0;

    for (uint32_t i = 0; i < 2u * plan->geometry.n_layers; i++) {
        const struct kvf_codec_tensor *tensor = kvf_plan_tensor(plan, i / 2, i % 2);
        uint32_t n = vectors(plan, tensor, n_tokens);

        sections += n != 0 ? kvf_raw_section_bytes(tensor, n) : 0;
    }
    return sections != 0 ? kvf_part_bytes(kvf_raw_table_bytes(plan->geometry.n_layers) + sections)
                         : 0;
}

uint64_t kvf_gpu_payload_bound(const struct kvf_codec_plan *plan, uint32_t n_tokens)
{
    if (!kvf_codec_plan_is_fixed(plan)) {
        return kvf_codec_plan_payload_bytes_max(plan, n_tokens);
    }
    return kvf_codec_plan_payload_bytes(plan, n_tokens) +
           raw_area_bytes(plan, n_tokens, kvf_plan_escapes_max);
}

/* What a block of a fixed plan has unless a vector of it cannot be coded. */
static uint64_t payload_expected(const struct kvf_codec_plan *plan, uint32_t token_start,
                                 uint32_t n_tokens)
{
    bool has_sinks = kvf_plan_sinks(plan, token_start, n_tokens) != 0;

    return kvf_codec_plan_payload_bytes(plan, n_tokens) +
           (has_sinks ? raw_area_bytes(plan, n_tokens, sink_vectors) : 0);
}

/* ----------------------------------------------------------------------------------------------
 * Memory
 */
static size_t lists_bytes(const struct kvf_gpu *gpu, uint64_t n_blocks)
{
    uint64_t part_bytes = sizeof(struct kvf_gpu_part) + sizeof(uint32_t);

    return n_blocks * (kvf_gpu_parts_a_block(gpu) * part_bytes +
                       gpu->plan.geometry.chunk_tokens * sizeof(uint32_t));
}

/* Of the ring, for payload and scratch of so many full blocks: scratch is a part of the payload, a
 * quarter covers it. */
static uint64_t blocks_bytes(const struct kvf_gpu *gpu, uint64_t n_blocks)
{
    uint64_t full = kvf_gpu_align(
        kvf_gpu_payload_bound(&gpu->plan, gpu->plan.geometry.chunk_tokens));

    return n_blocks * (full + full / 4);
}

static int ring_create(struct kvf_gpu *gpu)
{
    uint64_t least = blocks_bytes(gpu, 1) + kvf_gpu_align(lists_bytes(gpu, 1));
    uint64_t bytes = gpu->options.ring_bytes;

    if (bytes == 0) {
        uint64_t n = gpu->options.burst_bytes / gpu->block_bytes;

        bytes = 4 * (blocks_bytes(gpu, n != 0 ? n : 1) +
                     kvf_gpu_align(lists_bytes(gpu, gpu->burst_blocks_max)));
    }
    if (bytes < least) {
        snprintf(gpu->device->text, sizeof(gpu->device->text),
                 "ring_bytes is %llu, a block takes %llu: set it to that or more, or to 0",
                 (unsigned long long)bytes, (unsigned long long)least);
        return KVF_ERR_INVALID;
    }
    gpu->ring = (struct kvf_gpu_ring){.bytes = bytes};
    return kvf_gpu_device_result(gpu->device,
                                 gpu->device->driver.cuMemAlloc(&gpu->ring_address, bytes),
                                 "cuMemAlloc of the ring");
}

static void burst_memory_share(struct kvf_gpu *gpu)
{
    for (uint32_t i = 0; i < KVF_GPU_BURSTS_MAX; i++) {
        struct kvf_gpu_burst *burst = &gpu->bursts[i];
        uint8_t *at = gpu->burst_memory + i * gpu->burst_memory_bytes;

        burst->results = (struct kvf_gpu_result *)at;
        burst->results_address = gpu->burst_memory_address + i * gpu->burst_memory_bytes;
        burst->lists = at + kvf_gpu_align(gpu->burst_blocks_max * sizeof(struct kvf_gpu_result));
    }
}

int kvf_gpu_put_wake(struct kvf_gpu *gpu)
{
    uint64_t burst_bytes = gpu->options.burst_bytes != 0 ? gpu->options.burst_bytes
                                                         : KVF_GPU_BURST_BYTES;
    uint32_t blocks = (uint32_t)(4 * burst_bytes / gpu->block_bytes);
    uint32_t parts_blocks = KVF_GPU_PARTS_MAX / kvf_gpu_parts_a_block(gpu);
    void *memory = NULL;
    int status = KVF_OK;

    gpu->options.burst_bytes = burst_bytes;
    /* short blocks make up the same burst by being more */
    blocks = blocks < 4 ? 4 : blocks;
    blocks = blocks < KVF_GPU_BURST_BLOCKS_MAX ? blocks : KVF_GPU_BURST_BLOCKS_MAX;
    gpu->burst_blocks_max = blocks < parts_blocks ? blocks : parts_blocks;
    gpu->burst_memory_bytes = kvf_gpu_align(gpu->burst_blocks_max * sizeof(struct kvf_gpu_result)) +
                              kvf_gpu_align(lists_bytes(gpu, gpu->burst_blocks_max));
    gpu->bursts = calloc(KVF_GPU_BURSTS_MAX, sizeof(*gpu->bursts));
    if (gpu->bursts == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < KVF_GPU_BURSTS_MAX && status == KVF_OK; i++) {
        status = kvf_gpu_event_create(gpu->device, &gpu->bursts[i].uploaded);
        if (status == KVF_OK) {
            status = kvf_gpu_event_create(gpu->device, &gpu->bursts[i].encoded);
        }
        if (status == KVF_OK) {
            status = kvf_gpu_event_create(gpu->device, &gpu->bursts[i].copied);
        }
        kvf_gpu_times_make(gpu, &gpu->bursts[i].times);
    }
    if (status == KVF_OK) {
        status = kvf_gpu_host_alloc(gpu->device, KVF_GPU_BURSTS_MAX * gpu->burst_memory_bytes,
                                    &memory, &gpu->burst_memory_address);
    }
    if (status == KVF_OK) {
        gpu->burst_memory = memory;
        burst_memory_share(gpu);
        status = ring_create(gpu);
    }
    return status;
}

void kvf_gpu_event_drop(struct kvf_gpu *gpu, void *event)
{
    if (event != NULL) {
        (void)gpu->device->driver.cuEventDestroy(event);
    }
}

void kvf_gpu_put_sleep(struct kvf_gpu *gpu)
{
    for (uint32_t i = 0; gpu->bursts != NULL && i < KVF_GPU_BURSTS_MAX; i++) {
        kvf_gpu_event_drop(gpu, gpu->bursts[i].uploaded);
        kvf_gpu_event_drop(gpu, gpu->bursts[i].encoded);
        kvf_gpu_event_drop(gpu, gpu->bursts[i].copied);
        kvf_gpu_times_drop(gpu, &gpu->bursts[i].times);
    }
    for (uint32_t i = 0; i < gpu->n_bursts; i++) {
        struct kvf_gpu_burst *burst = &gpu->bursts[(gpu->burst_first + i) % KVF_GPU_BURSTS_MAX];

        if (burst->sink.is_used) {
            kvf_client_enter(gpu->client);
            kvf_request_abandon(gpu->client, burst->daemon_request);
            kvf_client_leave(gpu->client);
        }
    }
    gpu->n_bursts = gpu->burst_first = 0;
    free(gpu->bursts);
    gpu->bursts = NULL;
    kvf_gpu_host_free(gpu->device, gpu->burst_memory);
    gpu->burst_memory = NULL;
    kvf_gpu_host_free(gpu->device, gpu->redo_memory);
    gpu->redo_memory = NULL;
    gpu->redo_burst = NULL;
    (void)gpu->device->driver.cuMemFree(gpu->ring_address);
    (void)gpu->device->driver.cuMemFree(gpu->redo_address);
    gpu->ring_address = gpu->redo_address = 0;
    gpu->redo_bytes = 0;
}

void kvf_gpu_burst_ring_return(struct kvf_gpu *gpu, struct kvf_gpu_burst *burst)
{
    burst->range_bytes = 0; /* given back once all older ones are */
    for (uint32_t i = 0; i < gpu->n_bursts && kvf_gpu_burst_at(gpu, i)->range_bytes == 0; i++) {
        kvf_gpu_ring_give(&gpu->ring, kvf_gpu_burst_at(gpu, i)->taken);
        kvf_gpu_burst_at(gpu, i)->taken = 0;
    }
}

void kvf_gpu_burst_release(struct kvf_gpu *gpu, struct kvf_gpu_burst *burst)
{
    for (uint32_t i = 0; i < burst->n; i++) {
        if (burst->blocks[i].has_stage) {
            burst->blocks[i].has_stage = false;
            (void)kvf_stage_release(gpu->client, burst->blocks[i].stage.stage);
        }
    }
}

/* How many items from `first` on make one burst. */
static uint32_t burst_items(const struct kvf_gpu *gpu, const struct kvf_gpu_request *request,
                            uint32_t first)
{
    uint64_t chunk_tokens = gpu->plan.geometry.chunk_tokens;
    uint64_t bytes = 0;
    uint32_t n = 0;

    while (first + n < request->n && n < gpu->burst_blocks_max) {
        bytes += gpu->block_bytes / chunk_tokens * request->items[first + n].n_tokens;
        if (n > 0 && bytes > gpu->options.burst_bytes) {
            break;
        }
        n++;
    }
    return n;
}

/* What kernels are told, but for addresses in the ring. */
static void work_fill(struct kvf_gpu *gpu, struct kvf_gpu_burst *burst)
{
    const struct kvf_gpu_region *region = burst->request->region;

    burst->work = (struct kvf_gpu_work){
        .pages = {region->strides[0], region->strides[1]},
        .results = burst->results_address,
        .n_parts = burst->n * kvf_gpu_parts_a_block(gpu),
        .n_blocks = burst->n,
        .n_layers = gpu->plan.geometry.n_layers,
        .tokens_a_page = region->tokens_a_page,
        .has_v = kvf_plan_has_v(&gpu->plan),
        .shared_bytes_max = gpu->device->shared_bytes_max,
    };
    for (uint32_t i = 0; i < burst->n; i++) {
        uint32_t n_tokens = kvf_gpu_burst_item(burst, i)->n_tokens;

        burst->work.tokens_max = n_tokens > burst->work.tokens_max ? n_tokens
                                                                   : burst->work.tokens_max;
    }
}

/* Are there numbers of parts among a burst's lists? */
static uint32_t numbers_of(const struct kvf_gpu_burst *burst)
{
    return burst->gpu->kinds.n > 1 ? burst->work.n_parts : 0;
}

uint64_t kvf_gpu_burst_lists_bytes(const struct kvf_gpu_burst *burst)
{
    uint64_t bytes = burst->work.n_parts * sizeof(struct kvf_gpu_part) +
                     numbers_of(burst) * sizeof(uint32_t);

    for (uint32_t i = 0; i < burst->n; i++) {
        bytes += burst->request->items[burst->first + i].n_pages * sizeof(uint32_t);
    }
    return bytes;
}

/* Slots for blocks whose size is known before they are encoded. */
static int stages_take(struct kvf_gpu *gpu, struct kvf_gpu_burst *burst)
{
    for (uint32_t i = 0; gpu->is_fixed && i < burst->n; i++) {
        const struct kvf_gpu_item *item = kvf_gpu_burst_item(burst, i);
        struct kvf_gpu_out *block = &burst->blocks[i];
        int status = kvf_stage_acquire(
            gpu->client, payload_expected(&gpu->plan, item->token_start, item->n_tokens),
            &block->stage);

        if (status != KVF_OK) {
            kvf_gpu_burst_release(gpu, burst);
            return status;
        }
        block->has_stage = true;
    }
    return KVF_OK;
}

/* A burst of items [first, first + n) with all that it needs, nothing queued so far. */
static int burst_reserve(struct kvf_gpu *gpu, struct kvf_gpu_request *request, uint32_t first,
                         uint32_t n)
{
    struct kvf_gpu_burst *burst = kvf_gpu_burst_at(gpu, gpu->n_bursts);
    struct kvf_gpu_burst kept;
    uint64_t payload_bytes = 0;
    uint64_t scratch_bytes;
    uint64_t offset = 0;
    int status;

    if (gpu->n_bursts == KVF_GPU_BURSTS_MAX) {
        return KVF_ERR_BUSY;
    }
    kept = *burst;
    *burst = (struct kvf_gpu_burst){
        .lists = kept.lists,
        .results = kept.results,
        .results_address = kept.results_address,
        .uploaded = kept.uploaded,
        .encoded = kept.encoded,
        .copied = kept.copied,
        .times = {.begin = kept.times.begin, .end = kept.times.end},
        .gpu = gpu,
        .request = request,
        .first = first,
        .n = n,
    };
    work_fill(gpu, burst);
    for (uint32_t i = 0; i < n; i++) {
        burst->blocks[i].bound = kvf_gpu_payload_bound(&gpu->plan,
                                                       kvf_gpu_burst_item(burst, i)->n_tokens);
        burst->blocks[i].payload = payload_bytes; /* an offset for the moment */
        payload_bytes += kvf_gpu_align(burst->blocks[i].bound);
    }
    scratch_bytes = kvf_gpu_align(kvf_gpu_encode_scratch_bytes(&burst->work, &gpu->kinds));
    burst->range_bytes = payload_bytes + scratch_bytes +
                         kvf_gpu_align(kvf_gpu_burst_lists_bytes(burst));
    status = kvf_gpu_ring_take(&gpu->ring, burst->range_bytes, &offset, &burst->taken);
    if (status != KVF_OK) {
        return status;
    }
    status = stages_take(gpu, burst);
    if (status != KVF_OK) {
        kvf_gpu_ring_undo(&gpu->ring, burst->range_bytes, burst->taken);
        return status;
    }
    burst->range = gpu->ring_address + offset;
    burst->work.scratch = burst->range + payload_bytes;
    burst->work.parts = burst->work.scratch + scratch_bytes;
    burst->work.page_ids = burst->work.parts + burst->work.n_parts * sizeof(struct kvf_gpu_part);
    if (numbers_of(burst) != 0) {
        burst->work.numbers = burst->work.page_ids;
        burst->work.page_ids += numbers_of(burst) * sizeof(uint32_t);
    }
    for (uint32_t i = 0; i < n; i++) {
        burst->blocks[i].payload += burst->range;
    }
    gpu->n_bursts++;
    return KVF_OK;
}

/* Undo the reservation of the newest burst. */
static void burst_unreserve(struct kvf_gpu *gpu)
{
    struct kvf_gpu_burst *burst = kvf_gpu_burst_at(gpu, --gpu->n_bursts);

    kvf_gpu_burst_release(gpu, burst);
    kvf_gpu_ring_undo(&gpu->ring, burst->range_bytes, burst->taken);
}

/* Parts of all blocks, K before V, their numbers and their pages. */
static void lists_fill(struct kvf_gpu *gpu, struct kvf_gpu_burst *burst)
{
    const struct kvf_gpu_region *region = burst->request->region;
    struct kvf_gpu_part *part = (struct kvf_gpu_part *)burst->lists;
    uint32_t *numbers = (uint32_t *)(part + burst->work.n_parts);
    uint32_t *ids = numbers + numbers_of(burst);
    uint32_t n_ids = 0;
    uint32_t n_tensors = kvf_plan_has_v(&gpu->plan) ? 2 : 1;

    for (uint32_t i = 0; i < burst->n; i++) {
        const struct kvf_gpu_item *item = kvf_gpu_burst_item(burst, i);
        uint64_t stored = burst->blocks[i].payload;

        for (uint32_t p = 0; p < kvf_gpu_parts_a_block(gpu); p++) {
            uint32_t is_v = n_tensors == 2 ? p % 2 : 0;
            const struct kvf_codec_tensor *tensor;

            *part = (struct kvf_gpu_part){
                .base = region->layers[is_v][p / n_tensors],
                .stored = stored,
                .first_page = n_ids,
                .block = i,
                .n_sinks = kvf_plan_sinks(&gpu->plan, item->token_start, item->n_tokens),
                .n_tokens = (uint16_t)item->n_tokens,
                .n_wanted = (uint16_t)item->n_tokens,
                .layer = (uint16_t)(p / n_tensors),
                .is_v = (uint8_t)is_v,
            };
            tensor = kvf_plan_tensor(&gpu->plan, part->layer, is_v != 0);
            part->loop = kvf_gpu_part_loop(&gpu->plan, part->layer, tensor);
            kvf_gpu_part_fill(tensor, part);
            kvf_gpu_part_given(gpu, part);
            stored += part->fixed_bytes;
            part++;
        }
        memcpy(ids + n_ids, item->pages, item->n_pages * sizeof(*ids));
        n_ids += item->n_pages;
    }
    if (numbers_of(burst) != 0) {
        kvf_gpu_number_parts(&burst->work, &gpu->kinds, numbers);
    }
    memset(burst->results, 0, burst->n * sizeof(*burst->results));
}

/* A copy from the ring to a slot, behind the encode. */
int kvf_gpu_burst_copy(struct kvf_gpu *gpu, struct kvf_gpu_out *block, uint64_t bytes)
{
    uint8_t *to = (uint8_t *)block->stage.payload + block->copied;
    uint64_t from = block->payload + block->copied;
    int result = gpu->device->driver.cuMemcpyDtoHAsync(to, from, bytes - block->copied,
                                                       gpu->out_stream);

    block->copied = bytes;
    return kvf_gpu_device_result(gpu->device, result, "cuMemcpyDtoHAsync");
}

int kvf_gpu_wait(struct kvf_gpu *gpu, void *stream, void *event)
{
    return kvf_gpu_device_result(
        gpu->device, gpu->device->driver.cuStreamWaitEvent(stream, event, 0), "cuStreamWaitEvent");
}

int kvf_gpu_record(struct kvf_gpu *gpu, void *event, void *stream)
{
    return kvf_gpu_device_result(gpu->device, gpu->device->driver.cuEventRecord(event, stream),
                                 "cuEventRecord");
}

static int encode_queue(struct kvf_gpu *gpu, struct kvf_gpu_burst *burst, void *stream)
{
    struct kvf_gpu_launch launches[KVF_GPU_LAUNCHES_MAX];
    uint32_t n = kvf_gpu_encode(&burst->work, &gpu->kinds, launches);
    int status = KVF_OK;

    if (n == 0) {
        /* no kernel for this: everything is the processor's */
        for (uint32_t i = 0; i < burst->n; i++) {
            burst->results[i].flags = KVF_GPU_DONE | KVF_GPU_REDO;
        }
    } else {
        status = kvf_gpu_device_result(
            gpu->device,
            gpu->device->driver.cuMemcpyHtoDAsync(burst->work.parts, burst->lists,
                                                  kvf_gpu_burst_lists_bytes(burst), gpu->up_stream),
            "cuMemcpyHtoDAsync");
        if (status == KVF_OK) {
            status = kvf_gpu_record(gpu, burst->uploaded, gpu->up_stream);
        }
        if (status == KVF_OK && !KVF_MUTANT(gpu_upload_wait)) {
            status = kvf_gpu_wait(gpu, stream, burst->uploaded);
        }
        if (status == KVF_OK) {
            kvf_gpu_times_begin(gpu, &burst->times, stream);
            status = kvf_gpu_launch_all(gpu, &burst->work, &gpu->kinds, launches, n, stream);
            if (status == KVF_OK) {
                kvf_gpu_times_end(gpu, &burst->times, stream);
            } else {
                burst->times.is_begun = false; /* what has failed is what is to be told */
            }
        }
    }
    return status == KVF_OK ? kvf_gpu_record(gpu, burst->encoded, stream) : status;
}

/* Queue all that can be queued of a burst. */
static int burst_queue(struct kvf_gpu *gpu, struct kvf_gpu_burst *burst, void *stream)
{
    int status;

    lists_fill(gpu, burst);
    burst->pin = kvf_gpu_pin_staging(gpu);
    if (burst->pin != NULL) {
        burst->pin->n_uses++;
    }
    status = encode_queue(gpu, burst, stream);
    if (status == KVF_OK && !KVF_MUTANT(gpu_encode_wait)) {
        status = kvf_gpu_wait(gpu, gpu->out_stream, burst->encoded);
    }
    for (uint32_t i = 0; gpu->is_fixed && i < burst->n && status == KVF_OK; i++) {
        const struct kvf_gpu_item *item = kvf_gpu_burst_item(burst, i);

        status = kvf_gpu_burst_copy(
            gpu, &burst->blocks[i],
            payload_expected(&gpu->plan, item->token_start, item->n_tokens));
    }
    return status == KVF_OK ? kvf_gpu_record(gpu, burst->copied, gpu->out_stream) : status;
}

static void key_copy(uint8_t *to, uint8_t *bytes_out, const struct kvf_key *key)
{
    memcpy(to, key->data, key->bytes);
    *bytes_out = (uint8_t)key->bytes;
}

/* Copies items into the request's memory; page ids are marked. */
static int items_take(struct kvf_gpu *gpu, struct kvf_gpu_request *request,
                      const struct kvf_gpu_put_item *items)
{
    uint32_t *ids = (uint32_t *)(request->items + request->n);
    uint32_t *next = ids;
    bool is_ok;

    for (uint32_t i = 0; i < request->n; i++) {
        struct kvf_gpu_item *item = &request->items[i];

        item->token_start = items[i].token_start;
        item->n_tokens = tokens_of(gpu, items[i].n_tokens);
        item->n_pages = (item->n_tokens + request->region->tokens_a_page - 1) /
                        request->region->tokens_a_page;
        item->pages = next;
        memcpy(next, items[i].pages, item->n_pages * sizeof(*next));
        next += item->n_pages;
        key_copy(item->key, &item->key_bytes, &items[i].key);
        if (items[i].supersedes.data != NULL) {
            key_copy(item->supersedes, &item->supersedes_bytes, &items[i].supersedes);
        }
    }
    is_ok = kvf_gpu_pages_mark(request->region, ids, (uint32_t)(next - ids));
    if (is_ok) {
        kvf_gpu_pages_unmark(request->region, ids, (uint32_t)(next - ids));
    }
    return is_ok ? KVF_OK : KVF_ERR_INVALID;
}

static bool put_options_ok(const struct kvf_put_options *options)
{
    const uint32_t either = KVF_PUT_DURABLE | KVF_PUT_NO_WRITE;

    return options == NULL ||
           (options->struct_bytes == sizeof(*options) && (options->flags & ~either) == 0 &&
            options->flags != either && options->priority <= 2 &&
            (options->parent.data == NULL || kvf_gpu_key_ok(&options->parent)));
}

/* Pages of all items; 0: an item is wrong. */
static uint32_t put_pages(const struct kvf_gpu *gpu, const struct kvf_gpu_region *region,
                          const struct kvf_gpu_put_item *items, uint32_t n)
{
    uint32_t n_pages = 0;

    for (uint32_t i = 0; i < n; i++) {
        uint32_t n_tokens = tokens_of(gpu, items[i].n_tokens);
        uint32_t wanted = (n_tokens + region->tokens_a_page - 1) / region->tokens_a_page;

        if (items[i].struct_bytes != sizeof(items[i]) || !kvf_gpu_key_ok(&items[i].key) ||
            (items[i].supersedes.data != NULL && !kvf_gpu_key_ok(&items[i].supersedes)) ||
            n_tokens > gpu->plan.geometry.chunk_tokens || items[i].pages == NULL ||
            items[i].n_pages < wanted || items[i].token_start > UINT32_MAX - n_tokens) {
            return 0;
        }
        n_pages += wanted;
    }
    return n_pages;
}

/* Reserve bursts for as many items as there is room for. Returns how many; *status_out says why not
 * more. */
static uint32_t put_reserve(struct kvf_gpu *gpu, struct kvf_gpu_request *request, int *status_out)
{
    uint32_t taken = 0;

    *status_out = KVF_OK;
    while (taken < request->n) {
        uint32_t n = burst_items(gpu, request, taken);

        *status_out = burst_reserve(gpu, request, taken, n);
        while ((*status_out == KVF_ERR_TOO_LARGE || *status_out == KVF_ERR_BUSY) && n > 1) {
            n /= 2; /* what room there is takes a smaller burst */
            *status_out = burst_reserve(gpu, request, taken, n);
        }
        if (*status_out != KVF_OK) {
            break;
        }
        taken += n;
    }
    return taken;
}

/* Queue what has been reserved. */
static int put_queue(struct kvf_gpu *gpu, struct kvf_gpu_request *request, uint32_t first_burst)
{
    int status = KVF_OK;

    for (uint32_t b = first_burst; b < gpu->n_bursts && status == KVF_OK; b++) {
        status = burst_queue(gpu, kvf_gpu_burst_at(gpu, b), request->stream);
    }
    return status;
}

static int put_begin(struct kvf_gpu *gpu, struct kvf_gpu_request *request, void *wait_event,
                     void *stream, uint32_t *taken_out)
{
    uint32_t first_burst = gpu->n_bursts;
    int status;
    uint32_t taken = put_reserve(gpu, request, &status);

    if (taken > 0 && taken_out == NULL && taken < request->n) {
        /* all at once is too much for good if nothing stood in the way */
        status = status == KVF_ERR_BUSY && first_burst == 0 ? KVF_ERR_TOO_LARGE : status;
        taken = 0;
    }
    request->stream = stream != NULL ? stream : gpu->put_stream;
    if (taken > 0 && wait_event != NULL && !KVF_MUTANT(gpu_writer_wait)) {
        status = kvf_gpu_wait(gpu, request->stream, wait_event);
        taken = status == KVF_OK ? taken : 0;
    }
    if (taken == 0) {
        while (gpu->n_bursts > first_burst) {
            burst_unreserve(gpu);
        }
        return status;
    }
    gpu->events_owed -= request->n - taken;
    request->n = taken;
    request->n_bursts = gpu->n_bursts - first_burst;
    for (uint32_t b = first_burst; b < gpu->n_bursts && !KVF_MUTANT(gpu_free_wait); b++) {
        kvf_gpu_burst_at(gpu, b)->is_encoding = true;
        request->n_encoding++;
    }
    status = put_queue(gpu, request, first_burst);
    if (status != KVF_OK) {
        /* the request is there, and ends with the GPU: its events say so */
        (void)kvf_gpu_break(gpu, status);
    }
    if (taken_out != NULL) {
        *taken_out = taken;
    }
    return KVF_OK;
}

int kvf_gpu_put(struct kvf_gpu *gpu, struct kvf_gpu_region *region,
                const struct kvf_gpu_put_item *items, uint32_t n,
                const struct kvf_put_options *options, void *wait_event, void *stream,
                uint64_t user, uint32_t *taken_out, uint64_t *request_out)
{
    struct kvf_gpu_request *request;
    uint32_t n_pages = 0;
    int status;

    if (gpu == NULL) {
        return KVF_ERR_UNSUPPORTED;
    }
    if (region == NULL || items == NULL || n == 0 || n > KVF_REQUEST_KEYS_MAX ||
        request_out == NULL || !put_options_ok(options)) {
        return KVF_ERR_INVALID;
    }
    if (kvf_gpu_device_enter(gpu->device) != KVF_OK) {
        return KVF_ERR_IO;
    }
    status = kvf_gpu_begin(gpu);
    if (status == KVF_OK) {
        n_pages = put_pages(gpu, region, items, n);
        status = n_pages != 0 ? KVF_OK : KVF_ERR_INVALID;
    }
    request = status == KVF_OK ? kvf_gpu_request_new(gpu, region, n, n_pages, user) : NULL;
    if (request != NULL) {
        request->is_put = true;
        if (options != NULL) {
            request->options = *options;
            if (options->parent.data != NULL) {
                memcpy(request->parent, options->parent.data, options->parent.bytes);
            }
        }
        *request_out = request->id;
        status = items_take(gpu, request, items);
        if (status == KVF_OK) {
            status = gpu->agent != NULL
                         ? kvf_gpu_remote_put(gpu, request, wait_event, stream, taken_out)
                         : put_begin(gpu, request, wait_event, stream, taken_out);
        }
        if (status != KVF_OK) {
            kvf_gpu_request_drop(gpu, request);
        }
    } else if (status == KVF_OK) {
        status = KVF_ERR_NO_MEMORY;
    }
    kvf_gpu_device_leave(gpu->device);
    return status;
}
