/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_closed_loop_gpu.c: see codec_closed_loop_gpu.h.
 */
#include "codec/codec_closed_loop_gpu.h"

#include "codec/codec_closed_loop_shape.h"
#include "codec/codec_saw_gpu.h"

#include "kvferry.h"

#include <string.h>

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

/* Can a warp have eight vectors? */
static bool takes_tiles(const struct kvf_gpu_work *work)
{
    const struct kvf_gpu_tensor *own = &work->tensors[0];
    const struct kvf_gpu_tensor *delta = &work->tensors[1];
    bool takes = stays_in_registers(work) && own->bits == LOOP_TILE_OWN_BITS && delta->bits >= 2 &&
                 delta->bits <= 4 &&
                 memcmp(own->sign_bits, delta->sign_bits, sizeof(own->sign_bits)) == 0;
    for (uint32_t i = 0; i < KINDS_MAX; i++) {
        const struct kvf_gpu_tensor *tensor = &work->tensors[i];
        takes = takes && tensor->rot_order == LOOP_FAST_GROUP && tensor->dtype == KVF_DTYPE_BF16 &&
                tensor->zero_kind > KVF_ZERO_F16_LO && kvf_saw_gpu_knows_ratios(tensor) &&
                tensor->clip_ratio == 1.0f;
    }
    return takes;
}

/* Kernels by the bits of differences; those of vectors in registers, and all others. */
struct loop_kernels {
    const char *tile[5];
    const char *fast;
    const char *any;
};

static uint32_t one_launch(const struct kvf_gpu_work *work, const struct loop_kernels *kernels,
                           struct kvf_gpu_launch *launch_out)
{
    bool has_tiles = takes_tiles(work);
    uint32_t a_block = has_tiles ? LOOP_TILE_THREADS / 4 : LOOP_TILE_TOKENS; /* tokens */
    if (work->n_blocks == 0 || work->n_parts % work->n_blocks != 0 || work->has_v != 0) {
        return 0;
    }
    *launch_out = (struct kvf_gpu_launch){
        .kernel = has_tiles                  ? kernels->tile[work->tensors[1].bits]
                  : stays_in_registers(work) ? kernels->fast
                                             : kernels->any,
        .n_blocks = work->n_blocks * work->tensors[0].n_rows *
                    ((work->tokens_max + a_block - 1) / a_block),
        .n_threads = has_tiles ? LOOP_TILE_THREADS : LOOP_THREADS,
        .tensors = 1,
        .kind = KVF_GPU_WHOLE,
    };
    return 1;
}

uint32_t kvf_loop_gpu_encode(const struct kvf_gpu_work *work, struct kvf_gpu_launch *launch_out)
{
    static const struct loop_kernels kernels = {
        {[2] = "kvf_loop_encode_tile_2",
         [3] = "kvf_loop_encode_tile_3",
         [4] = "kvf_loop_encode_tile_4"},
        "kvf_loop_encode_128",
        "kvf_loop_encode",
    };
    return one_launch(work, &kernels, launch_out);
}

uint32_t kvf_loop_gpu_decode(const struct kvf_gpu_work *work, struct kvf_gpu_launch *launch_out)
{
    static const struct loop_kernels kernels = {
        {[2] = "kvf_loop_decode_tile_2",
         [3] = "kvf_loop_decode_tile_3",
         [4] = "kvf_loop_decode_tile_4"},
        "kvf_loop_decode_128",
        "kvf_loop_decode",
    };
    return work->tensors[0].codec == KVF_CODEC_SAW ? one_launch(work, &kernels, launch_out) : 0;
}
