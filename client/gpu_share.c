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
static int memory_send(struct kvf_gpu *gpu, uint32_t number, const struct kvf_gpu_export *export)
{
    struct kvf_gpud_memory *message = &gpu->agent->message.memory;
    int status = KVF_OK;

    for (uint32_t i = 0; i < export->n_pieces && status == KVF_OK; i++) {
        *message = (struct kvf_gpud_memory){
            .kind = export->is_fd ? KVF_GPUD_MEMORY_FD : KVF_GPUD_MEMORY_HANDLE,
            .n_pieces = export->n_pieces,
            .piece_index = i,
            .bytes = export->bytes,
            .piece_bytes = export->is_fd ? export->pieces[i].bytes : export->bytes,
        };
        kvf_gpud_head_init(&message->head, KVF_GPUD_MEMORY, sizeof(*message));
        message->head.number = number;
        if (!export->is_fd) {
            memcpy(message->handle, export->handle.bytes, sizeof(message->handle));
        }
        status = kvf_gpu_remote_call(gpu, export->is_fd ? export->pieces[i].fd : -1);
    }
    return status;
}

/* The shared memory that holds a tensor; shared now if it is not. */
static int memory_of(struct kvf_gpu *gpu, uint64_t address, uint64_t bytes,
                     struct shared_memory **memory_out)
{
    struct kvf_gpu_remote *remote = gpu->agent;
    struct kvf_gpu_export export;
    int status;

    for (uint32_t i = 0; i < remote->n_memories; i++) {
        struct shared_memory *memory = &remote->memories[i];

        if (address >= memory->base && address + bytes <= memory->base + memory->bytes) {
            *memory_out = memory;
            return KVF_OK;
        }
    }
    if (remote->n_memories == KVF_GPUD_MEMORIES_MAX) {
        (void)snprintf(remote->text, sizeof(remote->text), "pages lie in too many allocations");
        return KVF_ERR_TOO_LARGE;
    }
    status = kvf_gpu_export_open(gpu->device, address, bytes, &export);
    if (status != KVF_OK) {
        (void)snprintf(remote->text, sizeof(remote->text), "%s", gpu->device->text);
        return status;
    }
    status = memory_send(gpu, ++remote->next_number, &export);
    if (status == KVF_OK) {
        remote->memories[remote->n_memories] = (struct shared_memory){remote->next_number, 0,
                                                                      export.base, export.bytes};
        *memory_out = &remote->memories[remote->n_memories++];
    }
    kvf_gpu_export_close(&export);
    return status;
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

int kvf_gpu_remote_register(struct kvf_gpu *gpu, struct kvf_gpu_region *region)
{
    struct kvf_gpu_remote *remote = gpu->agent;
    uint32_t n_layers = gpu->client->geometry.n_layers;
    uint32_t n = region->layers[1] != NULL ? 2 * n_layers : n_layers;
    struct kvf_gpud_place *places = calloc(n, sizeof(*places));
    struct kvf_gpud_register *message = &remote->message.region;
    int status = places == NULL ? KVF_ERR_NO_MEMORY : KVF_OK;

    if (remote->state != LINK_UP) {
        free(places);
        return KVF_OK; /* when the link is there */
    }
    for (uint32_t i = 0; i < n && status == KVF_OK; i++) {
        uint64_t address = region->layers[i / n_layers][i % n_layers];
        struct shared_memory *memory = NULL;

        status = memory_of(gpu, address, tensor_bytes(gpu, region, i / n_layers), &memory);
        if (status == KVF_OK) {
            places[i] = (struct kvf_gpud_place){.memory = memory->number,
                                                .offset = address - memory->base};
        }
    }
    if (status == KVF_OK) {
        size_t bytes = sizeof(*message) + n * sizeof(*places);

        *message = (struct kvf_gpud_register){
            .n_pages = region->n_pages, .tokens_a_page = region->tokens_a_page, .n_places = n};
        for (uint32_t t = 0; t < 2; t++) {
            message->page_stride_bytes[t] = region->strides[t].page_stride_bytes;
            message->token_stride_bytes[t] = region->strides[t].token_stride_bytes;
            message->head_stride_bytes[t] = region->strides[t].head_stride_bytes;
        }
        memcpy(message->places, places, n * sizeof(*places));
        kvf_gpud_head_init(&message->head, KVF_GPUD_REGISTER, bytes);
        region->number = ++remote->next_number;
        message->head.number = region->number;
        status = kvf_gpu_remote_call(gpu, -1);
    }
    free(places);
    if (status == KVF_OK) {
        uses_count(gpu, region, true);
        region->is_shared = true;
    } else if (remote->state == LINK_UP) {
        kvf_client_log(gpu->client, 0, "pages cannot be shared with the daemon's worker: %s",
                       remote->text);
        memories_trim(gpu);
    }
    return status;
}

int kvf_gpu_remote_unregister(struct kvf_gpu *gpu, struct kvf_gpu_region *region)
{
    int status = KVF_OK;

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

/* All regions, after the link has come up or at a wake. */
int kvf_gpu_remote_share_all(struct kvf_gpu *gpu)
{
    int status = KVF_OK;

    for (struct kvf_gpu_region *region = gpu->regions; region != NULL && gpu->is_awake;
         region = region->next) {
        region->is_shared = false;
        status = status == KVF_OK ? kvf_gpu_remote_register(gpu, region) : status;
    }
    return status;
}
