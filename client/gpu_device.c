/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_device.c: hits that lie in this GPU's own memory: the daemon's tier there, mapped for
 * reading.
 *
 *   hit -> peek: head and page to the host -> cut (gpu_get.c) -> decode from where it lies
 *
 * No payload moves. What the host must know of a block, its page and the outline before it, is
 * fetched by one small copy a hit, on a stream of its own; many are under way at once. A piece is
 * mapped when it comes, and only then the daemon answers with places in it.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/gpu_internal.h"

/* ----------------------------------------------------------------------------------------------
 * Pieces
 */
void kvf_gpu_device_tend(struct kvf_gpu *gpu)
{
    struct kvf_session *session = gpu->client->session;

    if (!kvf_session_is_live(gpu->client)) {
        return;
    }
    kvf_session_say_device(session, gpu->device->uuid);
    for (struct kvf_client_piece *piece = session->device_pieces; piece != NULL;
         piece = piece->next) {
        if (piece->fd < 0 || piece->is_dropped) {
            continue;
        }
        if (kvf_gpu_pin_device(gpu, session, piece) == KVF_OK) {
            kvf_session_say_device_mapped(session, piece->id);
        }
        (void)close(piece->fd); /* tried once: a GPU that refuses one refuses the next */
        piece->fd = -1;
    }
}

/* ----------------------------------------------------------------------------------------------
 * Peeks
 */
static size_t head_bytes(const struct kvf_gpu *gpu)
{
    return kvf_block_outline_bytes(gpu->plan.geometry.n_layers);
}

static int peeks_take(struct kvf_gpu *gpu)
{
    uint64_t address;
    void *memory = NULL;
    int status = kvf_gpu_host_alloc(gpu->device, KVF_GPU_PEEKS_MAX * KVF_GPU_PEEK_BYTES, &memory,
                                    &address);

    if (status != KVF_OK) {
        return status;
    }
    gpu->peek_memory = memory;
    status = kvf_gpu_stream_create(gpu->device, KVF_GPU_PRIORITY_HIGH, &gpu->peek_stream);
    for (uint32_t i = 0; i < KVF_GPU_PEEKS_MAX && status == KVF_OK; i++) {
        status = kvf_gpu_event_create(gpu->device, &gpu->peeks[i].copied);
    }
    return status;
}

void kvf_gpu_peeks_sleep(struct kvf_gpu *gpu)
{
    if (gpu->peek_stream != NULL) {
        (void)gpu->device->driver.cuStreamSynchronize(gpu->peek_stream);
        (void)gpu->device->driver.cuStreamDestroy(gpu->peek_stream);
        gpu->peek_stream = NULL;
    }
    for (uint32_t i = 0; i < KVF_GPU_PEEKS_MAX; i++) {
        kvf_gpu_event_drop(gpu, gpu->peeks[i].copied);
        gpu->peeks[i] = (struct kvf_gpu_peek){0};
    }
    kvf_gpu_host_free(gpu->device, gpu->peek_memory);
    gpu->peek_memory = NULL;
}

static uint8_t *peek_at(const struct kvf_gpu *gpu, uint32_t peek)
{
    return gpu->peek_memory + peek * KVF_GPU_PEEK_BYTES;
}

static uint64_t record_address(const struct kvf_gpu_item *item)
{
    return item->pin->address + item->device_offset + KVF_SHM_DEVICE_HEAD_BYTES;
}

uint64_t kvf_gpu_item_payload(const struct kvf_gpu_item *item)
{
    return record_address(item) + KVF_RECORD_PAGE_BYTES;
}

/* Queue the copy of a hit's head and page. */
static int peek_begin(struct kvf_gpu *gpu, struct kvf_gpu_item *item, uint32_t peek)
{
    uint64_t head = head_bytes(gpu);
    int status = kvf_gpu_device_result(
        gpu->device,
        gpu->device->driver.cuMemcpyDtoHAsync(peek_at(gpu, peek) + KVF_SHM_DEVICE_HEAD_BYTES - head,
                                              record_address(item) - head,
                                              head + KVF_RECORD_PAGE_BYTES, gpu->peek_stream),
        "cuMemcpyDtoHAsync");

    if (status == KVF_OK) {
        gpu->peeks[peek].is_used = true;
        item->peek = 1 + peek;
    }
    return status;
}

/* One event for all that a call has queued: it stands in the place of the last one. An event that
 * has been used again since tells of what came after, and so of this, too. */
static int peeks_mark(struct kvf_gpu *gpu, const bool *is_new, uint32_t last)
{
    for (uint32_t i = 0; i < KVF_GPU_PEEKS_MAX; i++) {
        if (is_new[i]) {
            gpu->peeks[i].marked_by = last;
        }
    }
    return kvf_gpu_record(gpu, gpu->peeks[last].copied, gpu->peek_stream);
}

int kvf_gpu_peeks_advance(struct kvf_gpu *gpu)
{
    bool is_new[KVF_GPU_PEEKS_MAX] = {false};
    uint32_t last = KVF_GPU_PEEKS_MAX;
    uint32_t peek = 0;
    int status = KVF_OK;

    for (struct kvf_gpu_item *item = gpu->hits; item != NULL && status == KVF_OK;
         item = item->next) {
        if (!item->is_device || item->peek != 0) {
            continue;
        }
        if (gpu->peek_memory == NULL) {
            status = peeks_take(gpu);
        }
        while (peek < KVF_GPU_PEEKS_MAX && gpu->peeks[peek].is_used) {
            peek++;
        }
        if (status != KVF_OK || peek == KVF_GPU_PEEKS_MAX) {
            break;
        }
        item->pin = kvf_gpu_pin_hit(gpu, item->hit.lease);
        if (item->pin == NULL) {
            item->status = KVF_ERR_LOST; /* cannot be: only what is mapped is answered with */
            continue;
        }
        item->pin->n_uses++;
        status = peek_begin(gpu, item, peek);
        is_new[peek] = true;
        last = peek;
    }
    return status == KVF_OK && last < KVF_GPU_PEEKS_MAX ? peeks_mark(gpu, is_new, last) : status;
}

int kvf_gpu_peek_query(struct kvf_gpu *gpu, const struct kvf_gpu_item *item)
{
    if (item->peek == 0) {
        return KVF_EMPTY;
    }
    if (KVF_MUTANT(gpu_peek_wait)) {
        return KVF_OK;
    }
    return kvf_gpu_event_query(gpu->device,
                               gpu->peeks[gpu->peeks[item->peek - 1].marked_by].copied);
}

int kvf_gpu_peek_open(struct kvf_gpu *gpu, const struct kvf_gpu_item *item,
                      const struct kvf_block_ranges *ranges, struct kvf_block_reader *reader)
{
    const uint8_t *page = peek_at(gpu, item->peek - 1) + KVF_SHM_DEVICE_HEAD_BYTES;

    return kvf_block_open_outlined(&gpu->plan, page, item->hit.record_bytes,
                                   (const uint32_t *)(page - head_bytes(gpu)), ranges, reader);
}

void kvf_gpu_peek_give(struct kvf_gpu *gpu, struct kvf_gpu_item *item)
{
    if (item->peek != 0) {
        /* one that is still being copied is overwritten behind that, on the same stream */
        gpu->peeks[item->peek - 1].is_used = false;
        item->peek = 0;
    }
}
