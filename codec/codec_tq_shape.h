/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_tq_shape.h: what the host side and the kernels of tq must agree on beside
 * codec_saw_shape.h. Read by C and by CUDA.
 */
#ifndef KVF_CODEC_CODEC_TQ_SHAPE_H
#define KVF_CODEC_CODEC_TQ_SHAPE_H

#include "codec/codec_saw_shape.h"

enum tq_shape {
    KVF_TQ_TABLE_WORDS = 256,          /* by m, or by two codes */
    KVF_TQ_ENCODE_TABLE_BYTES = 32768, /* by m, 32 copies, one a bank */
    KVF_TQ_SPLIT_COPIES = 8,           /* of two tables in the encoders of split rows */
    KVF_TQ_SPLIT_SHARED_BYTES = 52736, /* of these */
};

/* Fast kernels, encode: the table, then as saw's. */
KVF_SAW_SHAPE uint32_t tq_encode_shared_bytes(const struct kvf_gpu_work *work, uint32_t dim)
{
    return KVF_TQ_ENCODE_TABLE_BYTES + saw_encode_shared_bytes(work, dim);
}

#endif /* KVF_CODEC_CODEC_TQ_SHAPE_H */
