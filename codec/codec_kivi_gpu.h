/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_kivi_gpu.h: which kernels of codec_kivi.cu encode or decode the tensors of kivi. What the
 * calls have in common with those of other codecs is in codec_gpu.c.
 */
#ifndef KVF_CODEC_CODEC_KIVI_GPU_H
#define KVF_CODEC_CODEC_KIVI_GPU_H

#include "codec/codec_gpu_host.h"

enum {
    KVF_KIVI_GPU_LAUNCHES_MAX = 2, /* K and V by different kernels */
};

/* Escapes are marked in scratch (codec_gpu_scratch.h). A block with a part that is no smaller than
 * raw gets KVF_GPU_REDO. */
uint32_t kvf_kivi_gpu_encode(const struct kvf_gpu_work *work,
                             struct kvf_gpu_launch launches_out[KVF_KIVI_GPU_LAUNCHES_MAX]);

uint32_t kvf_kivi_gpu_decode(const struct kvf_gpu_work *work,
                             struct kvf_gpu_launch launches_out[KVF_KIVI_GPU_LAUNCHES_MAX]);

#endif /* KVF_CODEC_CODEC_KIVI_GPU_H */
