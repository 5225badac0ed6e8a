/* SPDX-License-Identifier: Apache-2.0
 *
 * block_parts.h: what block.c (pages of records), block_encode.c and block_decode.c share.
 */
#ifndef KVF_CODEC_BLOCK_PARTS_H
#define KVF_CODEC_BLOCK_PARTS_H

#include "codec/codec_layout.h"

/* The header of a block but for what its content decides. */
void kvf_block_fill_header(const struct kvf_codec_plan *plan, uint32_t token_start,
                           uint32_t n_tokens, struct kvf_block_header *header);

static inline bool kvf_block_tensor_computes(const struct kvf_codec_tensor *tensor)
{
    return tensor->dim != 0 && (tensor->ops->capabilities & KVF_CODEC_FLOAT) != 0;
}

/* Does any codec of a plan compute in floating point? */
static inline bool kvf_block_computes(const struct kvf_codec_plan *plan)
{
    bool computes = false;
    for (uint32_t i = 0; i < plan->n_kinds; i++) {
        computes = computes || kvf_block_tensor_computes(&plan->kinds[i].k) ||
                   kvf_block_tensor_computes(&plan->kinds[i].v);
    }
    return computes;
}

static inline bool kvf_block_view_is_valid(const struct kvf_codec_plan *plan,
                                           const struct kvf_kv_view *kv)
{
    return kv != NULL && kv->struct_bytes >= sizeof(*kv) && kv->tokens_a_page >= 1 &&
           kv->k.layers != NULL && (!kvf_plan_has_v(plan) || kv->v.layers != NULL);
}

#endif /* KVF_CODEC_BLOCK_PARTS_H */
