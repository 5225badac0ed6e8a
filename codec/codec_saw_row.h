/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw_row.h: between codec_saw.c and the implementations of the saw codec: a row at a time.
 */
#ifndef KVF_CODEC_CODEC_SAW_ROW_H
#define KVF_CODEC_CODEC_SAW_ROW_H

#include "codec/codec_pages.h"
#include "codec/codec_saw.h"

#include <stddef.h>
#include <string.h>

/* One row at work. */
struct kvf_saw_row {
    const struct kvf_codec_tensor *tensor;
    const struct kvf_codec_job *job;
    void *work; /* aligned to KVF_CODEC_WORKSPACE_ALIGN */
    uint32_t row;
    bool has_mean;  /* encode: mean is there, do not find one */
    bool has_split; /* encode, tq: split is there, do not choose one */
};

/* mean is NULL if the row is not centred; mean, meta and codes are those of the row, or, to decode,
 * meta and codes those of the first token that is wanted. */
struct kvf_saw_kernels {
    size_t workspace_bytes;
    /* KVF_OK; KVF_ERR_NO_SPACE: too many escapes. */
    int (*encode_row)(const struct kvf_saw_row *row, uint8_t *mean, uint8_t *meta, uint8_t *codes,
                      struct kvf_codec_escapes *escapes);
    void (*decode_row)(const struct kvf_saw_row *row, const uint8_t *mean, const uint8_t *meta,
                       const uint8_t *codes);
};

extern const struct kvf_saw_kernels kvf_saw_kernels_scalar;
#if defined(__x86_64__)
extern const struct kvf_saw_kernels kvf_saw_kernels_avx2;
extern const struct kvf_saw_kernels kvf_saw_kernels_avx512;
#endif

/* Is channel i of the row flipped? */
static inline bool kvf_saw_is_flipped(const struct kvf_saw_row *row, uint32_t i)
{
    const struct kvf_codec_tensor *tensor = row->tensor;
    uint32_t channel = row->row % (tensor->dim / tensor->group) * tensor->group + i;
    return (tensor->sign_bits[channel / 8] >> (channel % 8) & 1) != 0;
}

/* Is the mean of rows one that the profile has? Then no part of the strip has it. */
static inline bool kvf_saw_has_profile_mean(const struct kvf_codec_tensor *tensor)
{
    return (tensor->descriptor.flags & KVF_TENSOR_CENTER_PROFILE) != 0;
}

/* The profile's mean of a row. */
static inline const uint8_t *kvf_saw_profile_mean(const struct kvf_saw_row *row)
{
    return row->job->mean + (size_t)row->row * row->tensor->group * sizeof(uint16_t);
}

/* (2) of codec_saw.h: token i of the tile that partial sum s is over. There is no such token if it
 * is not below n_tokens. */
static inline uint32_t kvf_saw_sampled_token(uint32_t n_tokens, uint32_t s, uint32_t i)
{
    uint32_t n_tiles = (n_tokens + KVF_SAW_TILE_TOKENS - 1) / KVF_SAW_TILE_TOKENS;
    uint32_t step = (n_tiles + KVF_SAW_PARTIAL_SUMS - 1) / KVF_SAW_PARTIAL_SUMS;
    return s * step * KVF_SAW_TILE_TOKENS + i;
}

/* Zero what the parts of a strip of such rows do not fill. The bytes are those used of what stands
 * before the meta part, of that, and of the codes. */
static inline void kvf_saw_zero_gaps(const struct kvf_codec_sizes *sizes, size_t head_bytes,
                                     size_t meta_bytes, size_t code_bytes, uint8_t *strip)
{
    uint8_t *meta = strip + sizes->mean_bytes;
    uint8_t *codes = meta + sizes->meta_bytes;
    memset(strip + head_bytes, 0, sizes->mean_bytes - head_bytes);
    memset(meta + meta_bytes, 0, sizes->meta_bytes - meta_bytes);
    memset(codes + code_bytes, 0, sizes->codes_bytes - code_bytes);
}

static inline bool kvf_saw_escape(const struct kvf_saw_row *row, uint32_t token,
                                  struct kvf_codec_escapes *escapes)
{
    if (escapes->n == escapes->max) {
        return false;
    }
    escapes->index[escapes->n++] = row->row * row->job->n_tokens + token;
    return true;
}

#endif /* KVF_CODEC_CODEC_SAW_ROW_H */
