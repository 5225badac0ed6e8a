/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_share.c: what a worker has of this process: allocations, and pages in them. An allocation is
 * given away once, whatever lies in it, and taken back with the last region that does.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/gpu_remote.h"

/* ----------------------------------------------------------------------------------------------
 * Memory and regions
 */
enum {
    PIECES_ASKED_MAX = 16, /* answers awaited at a time */
};

void kvf_gpu_remote_share_stop(struct kvf_gpu *gpu)
{
    struct sharing *sharing = &gpu->agent->sharing;

    if (sharing->is_giving) {
        kvf_gpu_export_close(&sharing->export);
    }
    *sharing = (struct sharing){0};
}

/* Send the next piece of the memory. False: there is no room. */
static bool piece_send(struct kvf_gpu *gpu)
{
    struct sharing *sharing = &gpu->agent->sharing;
    const struct kvf_gpu_export *export = &sharing->export;
    struct kvf_gpud_memory *message = &gpu->agent->message.memory;

    *message = (struct kvf_gpud_memory){
        .kind = export->is_fd ? KVF_GPUD_MEMORY_FD : KVF_GPUD_MEMORY_HANDLE,
        .n_pieces = export->n_pieces,
        .piece_index = sharing->n_sent,
        .bytes = export->bytes,
        .piece_bytes = export->is_fd ? export->pieces[sharing->n_sent].bytes : export->bytes,
    };
    kvf_gpud_head_init(&message->head, KVF_GPUD_MEMORY, sizeof(*message));
    message->head.number = sharing->number;
    if (!export->is_fd) {
        memcpy(message->handle, export->handle.bytes, sizeof(message->handle));
    }
    if (!kvf_gpu_remote_ask(gpu, export->is_fd ? export->pieces[sharing->n_sent].fd : -1)) {
        return false;
    }
    sharing->n_sent++;
    return true;
}

/* The shared memory that holds a tensor; NULL: none does. */
static struct shared_memory *memory_find(struct kvf_gpu_remote *remote, uint64_t address,
                                         uint64_t bytes)
{
    for (uint32_t i = 0; i < remote->n_memories; i++) {
        struct shared_memory *memory = &remote->memories[i];

        if (address >= memory->base && address + bytes <= memory->base + memory->bytes) {
            return memory;
        }
    }
    return NULL;
}

/* Begin to give the memory that holds a tensor. */
static int memory_begin(struct kvf_gpu *gpu, uint64_t address, uint64_t bytes)
{
    struct kvf_gpu_remote *remote = gpu->agent;
    int status;

    if (remote->n_memories == KVF_GPUD_MEMORIES_MAX) {
        (void)snprintf(remote->text, sizeof(remote->text), "pages lie in too many allocations");
        return KVF_ERR_TOO_LARGE;
    }
    status = kvf_gpu_export_open(gpu->device, address, bytes, &remote->sharing.export);
    if (status != KVF_OK) {
        (void)snprintf(remote->text, sizeof(remote->text), "%s", gpu->device->text);
        return status;
    }
    remote->sharing.is_giving = true;
    remote->sharing.number = ++remote->next_number;
    remote->sharing.n_sent = 0;
    return KVF_OK;
}

/* The worker has all of it. */
static void memory_end(struct kvf_gpu_remote *remote)
{
    struct sharing *sharing = &remote->sharing;

    remote->memories[remote->n_memories++] = (struct shared_memory){
        sharing->number, 0, sharing->export.base, sharing->export.bytes};
    kvf_gpu_export_close(&sharing->export);
    sharing->is_giving = false;
}

/* Bytes from the first to the last that pages of one tensor of one layer can have. */
static uint64_t tensor_bytes(const struct kvf_gpu *gpu, const struct kvf_gpu_region *region,
                             uint32_t is_v)
{
    const struct kvf_geometry *geometry = &gpu->client->geometry;
    const struct kvf_gpu_pages *strides = &region->strides[is_v];
    uint64_t dim = is_v ? geometry->dim_v : geometry->dim_k;

    return (region->n_pages - 1) * strides->page_stride_bytes +
           (region->tokens_a_page - 1) * strides->token_stride_bytes +
           (geometry->n_heads - 1u) * strides->head_stride_bytes +
           dim * gpu->plan.kinds[0].k.element_bytes;
}

/* Forget memory that no region lies in. */
static void memories_trim(struct kvf_gpu *gpu)
{
    struct kvf_gpu_remote *remote = gpu->agent;

    for (uint32_t i = 0; i < remote->n_memories;) {
        if (remote->memories[i].n_uses == 0 &&
            kvf_gpu_remote_call_plain(gpu, KVF_GPUD_FORGET, remote->memories[i].number) == KVF_OK) {
            remote->memories[i] = remote->memories[--remote->n_memories];
        } else {
            i++;
        }
    }
}

static void uses_count(struct kvf_gpu *gpu, const struct kvf_gpu_region *region, bool more)
{
    struct kvf_gpu_remote *remote = gpu->agent;

    for (uint32_t i = 0; i < remote->n_memories; i++) {
        struct shared_memory *memory = &remote->memories[i];

        for (uint32_t t = 0; t < 2; t++) {
            for (uint32_t l = 0; region->layers[t] != NULL && l < gpu->client->geometry.n_layers;
                 l++) {
                bool is_in = region->layers[t][l] >= memory->base &&
                             region->layers[t][l] < memory->base + memory->bytes;

                memory->n_uses += is_in && more;
                memory->n_uses -= is_in && !more;
            }
        }
    }
}

/* What the region's tensors lie in: KVF_OK: the worker has it; KVF_EMPTY: it is being given. */
static int memories_give(struct kvf_gpu *gpu, uint32_t n_places)
{
    struct kvf_gpu_remote *remote = gpu->agent;
    const struct kvf_gpu_region *region = remote->sharing.region;
    uint32_t n_layers = gpu->client->geometry.n_layers;
    uint32_t at_a_time = remote->state == LINK_UP ? 1 : PIECES_ASKED_MAX;

    for (uint32_t i = 0; i < n_places;) {
        uint64_t address = region->layers[i / n_layers][i % n_layers];
        uint64_t bytes = tensor_bytes(gpu, region, i / n_layers);
        int status = KVF_OK;

        if (!remote->sharing.is_giving && memory_find(remote, address, bytes) != NULL) {
            i++;
            continue;
        }
        if (!remote->sharing.is_giving) {
            status = memory_begin(gpu, address, bytes);
        }
        if (status != KVF_OK) {
            return status;
        }
        while (remote->sharing.n_sent < remote->sharing.export.n_pieces) {
            /* one by one where a refusal is no end of the link: the others would come to nothing */
            if (remote->n_awaited >= at_a_time || !piece_send(gpu)) {
                return KVF_EMPTY;
            }
        }
        if (remote->n_awaited > 0) {
            return KVF_EMPTY;
        }
        memory_end(remote);
    }
    return KVF_OK;
}

/* Name the region, whose memory the worker has. False: there is no room. */
static bool region_send(struct kvf_gpu *gpu, uint32_t n_places)
{
    struct kvf_gpu_remote *remote = gpu->agent;
    struct kvf_gpu_region *region = remote->sharing.region;
    struct kvf_gpud_register *message = &remote->message.region;
    uint32_t n_layers = gpu->client->geometry.n_layers;

    *message = (struct kvf_gpud_register){
        .n_pages = region->n_pages, .tokens_a_page = region->tokens_a_page, .n_places = n_places};
    for (uint32_t t = 0; t < 2; t++) {
        message->page_stride_bytes[t] = region->strides[t].page_stride_bytes;
        message->token_stride_bytes[t] = region->strides[t].token_stride_bytes;
        message->head_stride_bytes[t] = region->strides[t].head_stride_bytes;
    }
    for (uint32_t i = 0; i < n_places; i++) {
        uint64_t address = region->layers[i / n_layers][i % n_layers];
        const struct shared_memory *memory = memory_find(remote, address,
                                                         tensor_bytes(gpu, region, i / n_layers));

        message->places[i] = (struct kvf_gpud_place){.memory = memory->number,
                                                     .offset = address - memory->base};
    }
    kvf_gpud_head_init(&message->head, KVF_GPUD_REGISTER,
                       sizeof(*message) + n_places * sizeof(message->places[0]));
    region->number = ++remote->next_number;
    message->head.number = region->number;
    remote->sharing.is_named = kvf_gpu_remote_ask(gpu, -1);
    return remote->sharing.is_named;
}

static void share_begin(struct kvf_gpu_remote *remote, struct kvf_gpu_region *region)
{
    remote->sharing = (struct sharing){.region = region};
    remote->answer_status = KVF_OK;
}

/* Go on with the region on its way. KVF_OK: it is shared; KVF_EMPTY; or why it cannot be. */
static int share_step(struct kvf_gpu *gpu)
{
    struct kvf_gpu_remote *remote = gpu->agent;
    struct kvf_gpu_region *region = remote->sharing.region;
    uint32_t n_layers = gpu->client->geometry.n_layers;
    uint32_t n_places = region->layers[1] != NULL ? 2 * n_layers : n_layers;
    int status = remote->answer_status;

    if (status == KVF_OK && !remote->sharing.is_named) {
        status = memories_give(gpu, n_places);
    }
    if (status == KVF_OK && !remote->sharing.is_named && !region_send(gpu, n_places)) {
        status = KVF_EMPTY;
    }
    if (status == KVF_OK && remote->n_awaited > 0) {
        status = KVF_EMPTY;
    }
    if (status == KVF_OK) {
        uses_count(gpu, region, true);
        region->is_shared = true;
    }
    if (status != KVF_EMPTY) {
        kvf_gpu_remote_share_stop(gpu);
    }
    return status;
}

int kvf_gpu_remote_share_on(struct kvf_gpu *gpu)
{
    struct kvf_gpu_remote *remote = gpu->agent;
    int status = KVF_OK;

    while (status == KVF_OK) {
        struct kvf_gpu_region *region = gpu->is_awake ? gpu->regions : NULL;

        while (region != NULL && region->is_shared) {
            region = region->next;
        }
        if (region == NULL) {
            break;
        }
        if (remote->sharing.region == NULL) {
            share_begin(remote, region);
        }
        status = share_step(gpu);
    }
    return status;
}

int kvf_gpu_remote_register(struct kvf_gpu *gpu, struct kvf_gpu_region *region)
{
    struct kvf_gpu_remote *remote = gpu->agent;
    int status;

    if (remote->state != LINK_UP) {
        return KVF_OK; /* when the link is there */
    }
    share_begin(remote, region);
    remote->deadline_ns = kvf_now_ns() + CALL_NS;
    do {
        status = share_step(gpu);
    } while (status == KVF_EMPTY && kvf_gpu_remote_listen(gpu));
    if (remote->state != LINK_UP) {
        return KVF_ERR_DISCONNECTED;
    }
    if (status != KVF_OK) {
        kvf_client_log(gpu->client, 0, "pages cannot be shared with the daemon's worker: %s",
                       remote->text);
        memories_trim(gpu);
    }
    return status;
}

int kvf_gpu_remote_unregister(struct kvf_gpu *gpu, struct kvf_gpu_region *region)
{
    int status = KVF_OK;

    kvf_gpu_remote_share_wait(gpu); /* it may be on its way */
    if (region->is_shared && gpu->agent->state == LINK_UP) {
        status = kvf_gpu_remote_call_plain(gpu, KVF_GPUD_UNREGISTER, region->number);
        if (status == KVF_OK) {
            uses_count(gpu, region, false);
            memories_trim(gpu);
        }
    }
    if (status == KVF_OK || gpu->agent->state != LINK_UP) {
        region->is_shared = false;
        status = KVF_OK;
    }
    return status;
}
