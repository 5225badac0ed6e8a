/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_rebuild_gpu.c: which kernel makes K and V of a product (codec_rebuild.h).
 */
#include "codec/codec_rebuild.h"

#include <stdbool.h>

#include "kvferry.h"

enum {
    LANE_ELEMENTS = 8, /* of a vector that the fast kernel's lanes have */
    DIM_MAX = 256,     /* of 32 lanes */
    ACCESS_BYTES = 16,
};

static bool is_two_bytes(uint8_t dtype)
{
    return dtype == KVF_DTYPE_BF16 || dtype == KVF_DTYPE_F16;
}

static bool is_dim(uint32_t dim)
{
    return dim % LANE_ELEMENTS == 0 && dim <= DIM_MAX;
}

/* Pairs of a rotation lie in one lane, or in two at the same place. */
static bool is_rotation(const struct kvf_gpu_rebuild *work)
{
    uint32_t of = work->rope_style == KVF_ROPE_STYLE_HALF ? 2 * LANE_ELEMENTS : LANE_ELEMENTS;

    return work->rope_dims % of == 0;
}

const char *kvf_gpu_rebuild_kernel(const struct kvf_gpu_rebuild *work)
{
    uint64_t addresses = work->product | work->bias_k | work->bias_v | work->gain | work->cosines |
                         work->sines;

    for (uint32_t i = 0; i < (work->dim_v != 0 ? 2u : 1u); i++) {
        addresses |= work->bases[i] | work->pages[i].page_stride_bytes |
                     work->pages[i].token_stride_bytes | work->pages[i].head_stride_bytes;
    }
    return addresses % ACCESS_BYTES == 0 && is_two_bytes(work->dtype) &&
                   is_two_bytes(work->kv_dtype) && is_dim(work->dim_k) && is_dim(work->dim_v) &&
                   is_rotation(work)
               ? "kvf_rebuild_fast"
               : "kvf_rebuild";
}
