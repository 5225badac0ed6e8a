/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_tq_row.h: between codec_tq.c and the implementations of the tq codec: a row at a time.
 */
#ifndef KVF_CODEC_CODEC_TQ_ROW_H
#define KVF_CODEC_CODEC_TQ_ROW_H

#include "codec/codec_saw_row.h"
#include "codec/codec_tq.h"

/* Where a row's parts are: mean is NULL if it is not centred, split if it is not split. To decode,
 * meta and codes are those of the first token that is wanted. */
struct kvf_tq_strip {
    uint8_t *mean;
    uint8_t *split;
    uint8_t *meta;
    uint8_t *codes;
};

struct kvf_tq_stored {
    const uint8_t *mean;
    const uint8_t *meta;
    const uint8_t *codes;
};

/* channels: those of the first rotation, then those of the second one, each in ascending order. */
struct kvf_tq_kernels {
    size_t workspace_bytes;
    /* KVF_OK; KVF_ERR_NO_SPACE: too many escapes. */
    int (*encode_row)(const struct kvf_saw_row *row, const struct kvf_tq_strip *strip,
                      struct kvf_codec_escapes *escapes);
    void (*decode_row)(const struct kvf_saw_row *row, const struct kvf_tq_stored *stored,
                       const uint8_t channels[KVF_CODEC_GROUP_MAX]);
};

extern const struct kvf_tq_kernels kvf_tq_kernels_scalar;
#if defined(__x86_64__)
extern const struct kvf_tq_kernels kvf_tq_kernels_avx2;
extern const struct kvf_tq_kernels kvf_tq_kernels_avx512;
#endif

/* The channels of a row that is not split. */
void kvf_tq_all_channels(const struct kvf_codec_tensor *tensor,
                         uint8_t channels_out[KVF_CODEC_GROUP_MAX]);

/* The channels by a stored list. False: it has not as many as the first rotation takes. */
bool kvf_tq_read_channels(const struct kvf_codec_tensor *tensor, const uint8_t *split,
                          uint8_t channels_out[KVF_CODEC_GROUP_MAX]);

/* The channels by sums of magnitudes, and the list to the strip. energy is overwritten. */
void kvf_tq_split_channels(const struct kvf_codec_tensor *tensor, float *energy, uint8_t *split,
                           uint8_t channels_out[KVF_CODEC_GROUP_MAX]);

/* How the scale is chosen: one of KVF_TENSOR_SCALE_..., or 0. */
static inline uint32_t kvf_tq_policy(const struct kvf_codec_tensor *tensor)
{
    return tensor->descriptor.flags & KVF_TENSOR_SCALE_MASK;
}

#endif /* KVF_CODEC_CODEC_TQ_ROW_H */
