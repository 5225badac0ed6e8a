/* SPDX-License-Identifier: Apache-2.0
 *
 * import.h: device memory of one process, opened in another.
 *
 * Memory of cuMemAlloc has a handle, which names a whole allocation: an engine's layers usually lie
 * in one. Memory of cuMemCreate has a descriptor for each piece, and pieces lie side by side; they
 * are mapped in the same order, so that whatever crosses them still is in one piece.
 *
 *   exporter   | allocation ............. |        | piece | piece | piece |
 *                handle                              fd      fd      fd
 *   importer   | the same bytes ......... |        | piece | piece | piece |
 *
 * Owner: one thread at a time. Calls are made between enter and leave of the device. A failure
 * leaves a line in device->text: what was refused, and what to do.
 */
#ifndef KVF_GPU_IMPORT_H
#define KVF_GPU_IMPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gpu/device.h"

#define KVF_GPU_EXPORT_PIECES_MAX 1024

struct kvf_gpu_export_piece {
    uint64_t bytes;
    int fd; /* close-on-exec */
};

/* A run of device addresses, as others can open it. */
struct kvf_gpu_export {
    uint64_t base;
    uint64_t bytes;
    bool is_fd;
    struct kvf_cuda_ipc_handle handle;   /* !is_fd */
    struct kvf_gpu_export_piece *pieces; /* is_fd */
    uint32_t n_pieces;                   /* 1 without descriptors */
};

/* Describe the allocation, or the pieces, that hold [address, address + bytes). KVF_OK;
 * KVF_ERR_UNSUPPORTED: memory of a kind that cannot be given away; KVF_ERR_INVALID: not all of it
 * is device memory; KVF_ERR_TOO_LARGE: too many pieces; KVF_ERR_NO_MEMORY, _BUSY (no descriptor
 * left). */
int kvf_gpu_export_open(struct kvf_gpu_device *device, uint64_t address, uint64_t bytes,
                        struct kvf_gpu_export *export_out);

/* Close descriptors. Accepts a zeroed one. */
void kvf_gpu_export_close(struct kvf_gpu_export *export);

/* Memory of another process, or on its way to be. */
struct kvf_gpu_import {
    uint64_t address;
    uint64_t bytes;
    uint64_t mapped_bytes; /* pieces so far */
    bool is_fd;
    bool is_open; /* all of it can be used */
};

/* Open the allocation of a handle, which must have so many bytes. KVF_OK; KVF_ERR_MISMATCH: it has
 * others; KVF_ERR_UNSUPPORTED: the driver refuses. */
int kvf_gpu_import_handle(struct kvf_gpu_device *device, const struct kvf_cuda_ipc_handle *handle,
                          uint64_t bytes, struct kvf_gpu_import *import_out);

/* Reserve addresses for pieces that follow. KVF_OK; KVF_ERR_INVALID: bytes is no multiple of what
 * the device maps; KVF_ERR_NO_MEMORY. */
int kvf_gpu_import_begin(struct kvf_gpu_device *device, uint64_t bytes,
                         struct kvf_gpu_import *import_out);

/* Map the next piece; fd stays the caller's. The last one opens it all. KVF_OK; KVF_ERR_INVALID:
 * more than was reserved; KVF_ERR_MISMATCH: on another GPU; KVF_ERR_UNSUPPORTED: the driver refuses
 * it. */
int kvf_gpu_import_piece(struct kvf_gpu_device *device, struct kvf_gpu_import *import, int fd,
                         uint64_t bytes);

/* Unmap. Nothing that is queued uses it. Accepts a zeroed one, and one on its way. */
void kvf_gpu_import_close(struct kvf_gpu_device *device, struct kvf_gpu_import *import);

#endif /* KVF_GPU_IMPORT_H */
