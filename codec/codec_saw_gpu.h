/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw_gpu.h: which kernels of codec_saw.cu encode or decode the tensors of saw.
 */
#ifndef KVF_CODEC_CODEC_SAW_GPU_H
#define KVF_CODEC_CODEC_SAW_GPU_H

#include "codec/codec_gpu_host.h"

enum {
    KVF_SAW_GPU_LAUNCHES_MAX = 2, /* K and V by different kernels */
};

/* For the tensors of the work that are of saw. Their parts are written whole, gaps included.
 * result->n_escapes of a block is added to for each escape and sink, and not touched if there is
 * none; the raw area, the other fields of the result, and parts with too many escapes (they become
 * raw) are the business of later launches. Returns how many launches. */
uint32_t kvf_saw_gpu_encode(const struct kvf_gpu_work *work,
                            struct kvf_gpu_launch launches_out[KVF_SAW_GPU_LAUNCHES_MAX]);

/* All parts of the work that are of these tensors are stored as saw. Escaped vectors are written
 * with anything; patch them afterwards. */
uint32_t kvf_saw_gpu_decode(const struct kvf_gpu_work *work,
                            struct kvf_gpu_launch launches_out[KVF_SAW_GPU_LAUNCHES_MAX]);

/* (S) of codec_saw.h: may costs with zeros be found in a shorter way? The ratios that are tried are
 * those of the built-in profiles, or there are none. */
bool kvf_saw_gpu_knows_ratios(const struct kvf_gpu_tensor *tensor);

#endif /* KVF_CODEC_CODEC_SAW_GPU_H */
