/* SPDX-License-Identifier: Apache-2.0
 *
 * piece.h: device memory in pieces that other processes may map.
 *
 * One process makes a piece and hands its descriptor out; the others map it for reading. That they
 * do no more is their own doing: CUDA knows no descriptor that allows only that. A piece that is
 * closed here lives on as long as somebody else has it.
 *
 * Owner: one thread at a time, between enter and leave of the device.
 */
#ifndef KVF_GPU_PIECE_H
#define KVF_GPU_PIECE_H

#include "gpu/device.h"

struct kvf_gpu_piece {
    uint64_t address; /* 0: none */
    uint64_t bytes;
};

/* Make a piece, all zero, and its descriptor, which is the caller's. KVF_OK; KVF_ERR_NO_MEMORY,
 * _UNSUPPORTED: this GPU has no such memory; KVF_ERR_IO: device->text says more. */
int kvf_gpu_piece_make(struct kvf_gpu_device *device, uint64_t bytes,
                       struct kvf_gpu_piece *piece_out, int *fd_out);

/* Map another process's piece for reading; fd stays the caller's. KVF_OK; failures as above. */
int kvf_gpu_piece_open(struct kvf_gpu_device *device, int fd, uint64_t bytes,
                       struct kvf_gpu_piece *piece_out);

/* Nothing that is queued uses it. Accepts a zeroed one. */
void kvf_gpu_piece_close(struct kvf_gpu_device *device, struct kvf_gpu_piece *piece);

#endif /* KVF_GPU_PIECE_H */
