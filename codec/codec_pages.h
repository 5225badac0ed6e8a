/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_pages.h: where a vector lies in the engine's pages, and small helpers all codecs share.
 */
#ifndef KVF_CODEC_CODEC_PAGES_H
#define KVF_CODEC_CODEC_PAGES_H

#include "codec/codec.h"

#include <string.h>

static inline size_t kvf_align_up(size_t bytes, size_t align)
{
    return (bytes + align - 1) / align * align;
}

/* The bytes of a part, rounded up to what it takes in a strip. */
static inline size_t kvf_part_bytes(size_t bytes)
{
    return kvf_align_up(bytes, KVF_BLOCK_ALIGN_BYTES);
}

static inline size_t kvf_sizes_total(const struct kvf_codec_sizes *sizes)
{
    return sizes->mean_bytes + sizes->meta_bytes + sizes->codes_bytes;
}

/* Address of a row's vector for one token of the view; the formula is kvferry.h's. */
static inline uint8_t *kvf_pages_vector(const struct kvf_codec_tensor *tensor,
                                        const struct kvf_codec_job *job, uint32_t row,
                                        uint32_t token)
{
    uint32_t page = token / job->view->tokens_a_page;
    uint32_t slot = token % job->view->tokens_a_page;
    if (job->view->page_table != NULL) {
        page = job->view->page_table[page];
    }
    uint32_t rows_a_head = tensor->dim / tensor->group;
    size_t within = (size_t)(row % rows_a_head) * tensor->group * tensor->element_bytes;
    return job->base + page * job->tensor->page_stride_bytes +
           slot * job->tensor->token_stride_bytes +
           row / rows_a_head * job->tensor->head_stride_bytes + within;
}

/* Records may lie at any address, so numbers are read and written by copy. */
static inline uint32_t kvf_load_u32(const uint8_t *from)
{
    uint32_t value;
    memcpy(&value, from, sizeof(value));
    return value;
}

static inline void kvf_store_u32(uint8_t *to, uint32_t value)
{
    memcpy(to, &value, sizeof(value));
}

#endif /* KVF_CODEC_CODEC_PAGES_H */
