/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_tq_gpu.h: which kernels of codec_tq.cu encode or decode the tensors of tq. What they do and
 * leave to others is said in codec_gpu.c.
 */
#ifndef KVF_CODEC_CODEC_TQ_GPU_H
#define KVF_CODEC_CODEC_TQ_GPU_H

#include "codec/codec_gpu_host.h"

enum {
    KVF_TQ_GPU_LAUNCHES_MAX = 2, /* K and V by different kernels */
};

uint32_t kvf_tq_gpu_encode(const struct kvf_gpu_work *work,
                           struct kvf_gpu_launch launches_out[KVF_TQ_GPU_LAUNCHES_MAX]);

uint32_t kvf_tq_gpu_decode(const struct kvf_gpu_work *work,
                           struct kvf_gpu_launch launches_out[KVF_TQ_GPU_LAUNCHES_MAX]);

#endif /* KVF_CODEC_CODEC_TQ_GPU_H */
