/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_loop.c: decodes of blocks whose layers are differences to those before them
 * (closed_loop.h).
 *
 * Groups cut blocks between any two layers, and what a decoder carries from layer to layer, an fp32
 * number a token and channel, would be lost there. So a block that a group does not hold as a whole
 * has a place of its own in device memory for these sums, from the first group to the last one that
 * has layers of it. All groups of a block are of one request, and decode on one stream in order; a
 * place is given to another block once the last one has ended. Larger groups instead, of whole
 * blocks, would take more memory: a block of 32 layers of X has three times the bytes of its sums.
 */
#include <assert.h>

#include "client/gpu_internal.h"

bool kvf_gpu_is_looped(const struct kvf_gpu *gpu)
{
    return gpu->kinds.tensors[0][0].is_looped != 0;
}

/* A block's sums. */
static uint64_t place_bytes(const struct kvf_gpu *gpu)
{
    const struct kvf_geometry *geometry = &gpu->plan.geometry;

    return kvf_gpu_align((uint64_t)geometry->chunk_tokens * geometry->n_heads * geometry->dim_k *
                         sizeof(float));
}

int kvf_gpu_loop_wake(struct kvf_gpu *gpu)
{
    /* each group on its way holds the end of a block, or none, and one is being cut */
    uint64_t bytes = place_bytes(gpu) * (gpu->n_groups + 1);

    if (!kvf_gpu_is_looped(gpu)) {
        return KVF_OK;
    }
    return kvf_gpu_device_result(gpu->device,
                                 gpu->device->driver.cuMemAlloc(&gpu->loop_memory, bytes),
                                 "cuMemAlloc for sums of layers that are differences");
}

void kvf_gpu_loop_sleep(struct kvf_gpu *gpu)
{
    (void)gpu->device->driver.cuMemFree(gpu->loop_memory);
    gpu->loop_memory = 0;
    memset(gpu->loop_used, 0, sizeof(gpu->loop_used));
}

void kvf_gpu_loop_give(struct kvf_gpu *gpu, struct kvf_gpu_item *item)
{
    if (item->loop_place != 0) {
        gpu->loop_used[item->loop_place - 1] = false;
        item->loop_place = 0;
    }
}

static uint64_t place_of(struct kvf_gpu *gpu, struct kvf_gpu_item *item)
{
    if (item->loop_place == 0) {
        uint32_t i = 0;

        while (gpu->loop_used[i]) {
            i++;
        }
        assert(i <= gpu->n_groups);
        gpu->loop_used[i] = true;
        item->loop_place = i + 1;
    }
    return gpu->loop_memory + (item->loop_place - 1) * place_bytes(gpu);
}

/* How many of the parts are layers of the same block as the first one. */
static uint32_t run_length(const struct kvf_gpu_part *parts, uint32_t n)
{
    uint32_t length = 1;

    while (length < n && parts[length].block == parts[0].block) {
        length++;
    }
    return length;
}

/* How many whole blocks the parts begin with. */
static uint32_t whole_blocks(const struct kvf_gpu *gpu, const struct kvf_gpu_part *parts,
                             uint32_t n)
{
    uint32_t n_layers = gpu->plan.geometry.n_layers;
    uint32_t at = 0;

    while (at < n && run_length(parts + at, n - at) == n_layers) {
        at += n_layers;
    }
    return at / n_layers;
}

/* Where the sums of a block are that is not whole here; 0: none come, and none are wanted. */
static uint64_t sums_of(struct kvf_gpu *gpu, const struct kvf_gpu_group *group,
                        const struct kvf_gpu_part *parts)
{
    struct kvf_gpu_item *item = parts[0].block + 1 == group->n_items ? group->last_item
                                                                     : group->first_item;
    bool comes = parts[0].layer != 0;
    bool goes_on = item == gpu->cut.item;

    assert(!comes || parts[0].block == 0 || item == group->last_item);
    return comes || goes_on ? place_of(gpu, item) : 0;
}

int kvf_gpu_loop_decode(struct kvf_gpu *gpu, const struct kvf_gpu_group *group,
                        const struct kvf_gpu_work *work, uint32_t first, void *stream)
{
    const struct kvf_gpu_part *parts = (const struct kvf_gpu_part *)group->lists + first;
    struct kvf_gpu_launch launches[KVF_GPU_LAUNCHES_MAX];
    struct kvf_gpu_work one = *work;
    int status = KVF_OK;

    kvf_gpu_loop_tensors(&gpu->kinds, one.tensors);
    for (uint32_t at = 0; at < work->n_parts && status == KVF_OK; at += one.n_parts) {
        uint32_t n;

        one.parts = work->parts + at * sizeof(*parts);
        one.n_blocks = whole_blocks(gpu, parts + at, work->n_parts - at);
        one.n_parts = one.n_blocks * gpu->plan.geometry.n_layers;
        one.scratch = 0;
        if (one.n_blocks == 0) {
            one.n_blocks = 1;
            one.n_parts = run_length(parts + at, work->n_parts - at);
            one.scratch = sums_of(gpu, group, parts + at);
        }
        n = kvf_gpu_decode(&one, KVF_CODEC_SAW, launches);
        assert(n != 0);
        status = kvf_gpu_launch_all(gpu, &one, NULL, launches, n, stream);
    }
    return status;
}
