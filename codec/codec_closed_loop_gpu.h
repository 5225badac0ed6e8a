/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_closed_loop_gpu.h: launches of codec_closed_loop.cu, for plans with deltas
 * (closed_loop.h). Such a plan has no V, and one or two kinds of layers: those by themselves, and
 * deltas; both of saw.
 *
 * work.tensors are those of layers by themselves and of deltas, in place of K and V; parts say in
 * `loop` which layer is which. Encode: all layers of all blocks. Decode: consecutive layers of
 * work.n_blocks blocks, of each as many; tokens as parts say. What a decoder carries from layer to
 * layer stays in registers; where a block is decoded by several launches, it is in work.scratch in
 * between: fp32[n_wanted][n_heads * dim] of one block. A launch whose first layer is a delta begins
 * with what is there, and one whose last layer is not the plan's last leaves it there. Launches
 * that begin with a layer by itself and end with the plan's last one need none.
 */
#ifndef KVF_CODEC_CODEC_CLOSED_LOOP_GPU_H
#define KVF_CODEC_CODEC_CLOSED_LOOP_GPU_H

#include "codec/codec_gpu_host.h"

#include <stdbool.h>

/* Are there kernels for all of these kinds? */
bool kvf_loop_gpu_takes(const struct kvf_gpu_kinds *kinds);

/* Write one launch and return 1; 0: there is no kernel. */
uint32_t kvf_loop_gpu_encode(const struct kvf_gpu_work *work, struct kvf_gpu_launch *launch_out);
uint32_t kvf_loop_gpu_decode(const struct kvf_gpu_work *work, struct kvf_gpu_launch *launch_out);

#endif /* KVF_CODEC_CODEC_CLOSED_LOOP_GPU_H */
