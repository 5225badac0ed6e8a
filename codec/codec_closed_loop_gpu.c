/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_closed_loop_gpu.c: see codec_closed_loop_gpu.h.
 */
#include "codec/codec_closed_loop_gpu.h"

#include "codec/codec_closed_loop_shape.h"

#include "kvferry.h"

enum {
    KINDS_MAX = 2, /* layers by themselves, deltas */
};

static bool takes_tensor(const struct kvf_gpu_tensor *tensor, const struct kvf_gpu_tensor *first)
{
    return tensor->is_looped != 0 && tensor->codec == KVF_CODEC_SAW && tensor->bits <= 8 &&
           (tensor->flags & (KVF_TENSOR_CENTER | KVF_TENSOR_CENTER_PROFILE)) == 0 &&
           tensor->dtype == first->dtype && tensor->n_heads == first->n_heads &&
           tensor->dim == first->dim && tensor->group == first->group;
}

bool kvf_loop_gpu_takes(const struct kvf_gpu_kinds *kinds)
{
    const struct kvf_gpu_tensor *first = &kinds->tensors[0][0];
    bool takes = kinds->n >= 1 && kinds->n <= KINDS_MAX;
    for (uint32_t kind = 0; takes && kind < kinds->n; kind++) {
        takes = takes_tensor(&kinds->tensors[kind][0], first);
    }
    return takes;
}

static bool stays_in_registers(const struct kvf_gpu_work *work)
{
    bool stays = true;
    for (uint32_t i = 0; i < KINDS_MAX; i++) {
        const struct kvf_gpu_tensor *tensor = &work->tensors[i];
        stays = stays && tensor->group == LOOP_FAST_GROUP &&
                (tensor->rot_order == 1 || tensor->rot_order == LOOP_FAST_GROUP);
    }
    return stays;
}

static uint32_t one_launch(const struct kvf_gpu_work *work, const char *kernel,
                           struct kvf_gpu_launch *launch_out)
{
    uint32_t n_tiles = (work->tokens_max + LOOP_TILE_TOKENS - 1) / LOOP_TILE_TOKENS;
    if (work->n_blocks == 0 || work->n_parts % work->n_blocks != 0 || work->has_v != 0) {
        return 0;
    }
    *launch_out = (struct kvf_gpu_launch){
        .kernel = kernel,
        .n_blocks = work->n_blocks * work->tensors[0].n_rows * n_tiles,
        .n_threads = LOOP_THREADS,
        .tensors = 1,
        .kind = KVF_GPU_WHOLE,
    };
    return 1;
}

uint32_t kvf_loop_gpu_encode(const struct kvf_gpu_work *work, struct kvf_gpu_launch *launch_out)
{
    return one_launch(work, stays_in_registers(work) ? "kvf_loop_encode_128" : "kvf_loop_encode",
                      launch_out);
}

uint32_t kvf_loop_gpu_decode(const struct kvf_gpu_work *work, struct kvf_gpu_launch *launch_out)
{
    if (work->tensors[0].codec != KVF_CODEC_SAW) {
        return 0;
    }
    return one_launch(work, stays_in_registers(work) ? "kvf_loop_decode_128" : "kvf_loop_decode",
                      launch_out);
}
