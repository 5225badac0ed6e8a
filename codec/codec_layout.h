/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_layout.h: the raw area, which plan.c sizes and block.c writes and reads.
 *
 * It follows the last strip if any vector of the block could not, or should not, be coded:
 *
 *   u32 count[n_layers][2]     vectors of (layer, K) and (layer, V); zero up to a multiple of 16
 *   then for each pair with count > 0, in that order, a section:
 *     u32 index[count]         numbers of the vectors (codec.h), ascending
 *     the vectors              as in the engine's pages, without gaps; zero up to a multiple of 16
 *   zero up to a multiple of 128
 */
#ifndef KVF_CODEC_CODEC_LAYOUT_H
#define KVF_CODEC_CODEC_LAYOUT_H

#include "codec/codec_pages.h"

#define KVF_RAW_AREA_ALIGN_BYTES 16

/* Bytes of the table of counts. */
static inline size_t kvf_raw_table_bytes(uint32_t n_layers)
{
    return kvf_align_up((size_t)n_layers * 2 * sizeof(uint32_t), KVF_RAW_AREA_ALIGN_BYTES);
}

/* Bytes of the section of one tensor of one layer. */
static inline size_t kvf_raw_section_bytes(const struct kvf_codec_tensor *tensor, size_t count)
{
    size_t vector_bytes = (size_t)tensor->group * tensor->element_bytes;
    return kvf_align_up(count * (sizeof(uint32_t) + vector_bytes), KVF_RAW_AREA_ALIGN_BYTES);
}

/* Have blocks of this plan a V? Opaque bytes have none. */
static inline bool kvf_plan_has_v(const struct kvf_codec_plan *plan)
{
    return plan->geometry.dim_v != 0;
}

/* How K or V of a layer is coded. */
static inline const struct kvf_codec_tensor *kvf_plan_tensor(const struct kvf_codec_plan *plan,
                                                             uint32_t layer, bool is_v)
{
    const struct kvf_codec_kind *kind = &plan->kinds[plan->layer_kinds[layer]];
    return is_v ? &kind->v : &kind->k;
}

/* Is a layer stored as its difference to the one before (closed_loop.h)? */
static inline bool kvf_plan_is_delta(const struct kvf_codec_plan *plan, uint32_t layer)
{
    return (plan->block_flags & KVF_BLOCK_DELTAS) != 0 && layer > plan->base_layer &&
           (plan->rebase_layers == 0 || (layer - plan->base_layer) % plan->rebase_layers != 0);
}

/* What a profile has for a layer in one of its arrays, or NULL. */
static inline const uint8_t *kvf_plan_array_at(const struct kvf_plan_array *array, uint32_t layer)
{
    return array->first != NULL ? array->first + layer * array->layer_bytes : NULL;
}

/* Leading tokens of a block that plan keeps raw. Chunks start at multiples of chunk_tokens, so
 * sinks are in the first one. */
static inline uint32_t kvf_plan_sinks(const struct kvf_codec_plan *plan, uint32_t token_start,
                                      uint32_t n_tokens)
{
    if (plan->lossless || token_start != 0) {
        return 0;
    }
    uint32_t sinks = plan->geometry.sink_tokens;
    sinks = sinks > plan->profile->sink_tokens ? sinks : plan->profile->sink_tokens;
    return sinks < n_tokens ? sinks : n_tokens;
}

/* Vectors of one tensor of one layer that may be escapes. */
static inline uint32_t kvf_plan_escapes_max(const struct kvf_codec_plan *plan,
                                            const struct kvf_codec_tensor *tensor,
                                            uint32_t n_tokens)
{
    if (tensor->dim == 0 || (tensor->ops->capabilities & KVF_CODEC_ESCAPES) == 0) {
        return 0;
    }
    uint32_t sinks = kvf_plan_sinks(plan, 0, n_tokens) * tensor->n_rows;
    uint32_t vectors = tensor->n_rows * n_tokens;
    return sinks + (vectors + KVF_CODEC_ESCAPE_SHARE - 1) / KVF_CODEC_ESCAPE_SHARE;
}

/* The fingerprint of profile "bytes". */
uint64_t kvf_plan_bytes_fp(void);

/* The descriptor that a block of n_tokens has. */
static inline struct kvf_block_tensor kvf_block_descriptor(const struct kvf_codec_tensor *tensor,
                                                           uint32_t n_tokens)
{
    struct kvf_block_tensor descriptor = tensor->descriptor;
    if (n_tokens < KVF_CODEC_CENTER_TOKENS_MIN) {
        descriptor.flags &= (uint8_t)~KVF_TENSOR_CENTER;
    }
    return descriptor;
}

#endif /* KVF_CODEC_CODEC_LAYOUT_H */
