/* SPDX-License-Identifier: Apache-2.0
 *
 * device.h: one GPU as this process uses it: context, kernels, streams, memory, pinning.
 *
 * The context is the one that is current in the calling thread when the device is opened, if it
 * belongs to that GPU, else the primary one, which is what CUDA's runtime and torch use: pointers,
 * streams and events of the host program are then ours as well. Calls are made between enter and
 * leave unless they say otherwise.
 *
 * Owner: one thread at a time. Calls that can wait for the device say so.
 */
#ifndef KVF_GPU_DEVICE_H
#define KVF_GPU_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gpu/driver.h"

enum kvf_gpu_device_bounds {
    KVF_GPU_KERNELS_MAX = 64, /* different ones that one device has launched */
    KVF_GPU_MODULES_MAX = 12,
    KVF_GPU_TEXT_BYTES = 256,
};

/* Which GPU. The first of uuid, ordinal that is given; else that of the current context, else the
 * first one. */
struct kvf_gpu_choice {
    const char *uuid; /* "GPU-8-4-4-4-12" hexadecimal digits, as nvidia-smi says; NULL: not given */
    int ordinal;      /* -1: not given */
};

struct kvf_gpu_kernel {
    const char *name;
    void *function;
    uint32_t shared_bytes; /* dynamic: what it may use so far */
};

struct kvf_gpu_device {
    struct kvf_gpu_driver driver;
    int device;
    int ordinal;
    char name[64];
    char uuid[48];
    int processors;
    int compute; /* 10 * major + minor */
    uint32_t shared_bytes_max;
    bool can_pin_read_only;
    bool is_mps; /* contexts of several processes are at work side by side */
    void *context;
    bool is_primary; /* retained by us */
    void *modules[KVF_GPU_MODULES_MAX];
    uint32_t n_modules;
    struct kvf_gpu_kernel kernels[KVF_GPU_KERNELS_MAX];
    uint32_t n_kernels;
    char text[KVF_GPU_TEXT_BYTES]; /* what failed last */
};

/* A kernel's launch: one dimension of blocks and of threads. */
struct kvf_gpu_shape {
    const char *kernel; /* static storage */
    uint32_t n_blocks;
    uint32_t blocks_a_processor; /* if not 0: n_blocks is at most that for each multiprocessor */
    uint32_t n_threads;
    uint32_t shared_bytes; /* dynamic */
};

enum kvf_gpu_priority {
    KVF_GPU_PRIORITY_LOW,
    KVF_GPU_PRIORITY_HIGH,
};

/* Open the driver and find the GPU. text says why not. KVF_OK; KVF_ERR_UNSUPPORTED: no driver, or
 * no such GPU; KVF_ERR_NO_MEMORY, _IO. */
int kvf_gpu_device_open(const struct kvf_gpu_choice *choice, struct kvf_gpu_device **device_out,
                        char *text, size_t text_bytes);

/* Load an image of kernels (a fatbin or cubin), whose names are unique over all images. Enters by
 * itself. Blocks, and for long if the driver has to compile. KVF_OK; KVF_ERR_UNSUPPORTED: no code
 * for this GPU in it; KVF_ERR_NO_MEMORY, _IO. */
int kvf_gpu_device_load(struct kvf_gpu_device *device, const void *image);

/* Accepts NULL. All streams, events and memory have been given back before. Returns NULL. */
struct kvf_gpu_device *kvf_gpu_device_close(struct kvf_gpu_device *device);

/* Make the context current, and put back what was. KVF_OK; KVF_ERR_IO. */
int kvf_gpu_device_enter(struct kvf_gpu_device *device);
void kvf_gpu_device_leave(struct kvf_gpu_device *device);

/* The status of a driver call's result; a failure other than "not ready" is kept in text, behind
 * what was tried. */
int kvf_gpu_device_result(struct kvf_gpu_device *device, int result, const char *what);

/* Queue a kernel. KVF_OK; KVF_ERR_UNSUPPORTED: the image has no such kernel; KVF_ERR_INVALID, _IO.
 */
int kvf_gpu_device_launch(struct kvf_gpu_device *device, const struct kvf_gpu_shape *shape,
                          void **parameters, void *stream);

/* A stream that does not wait for the legacy default stream. */
int kvf_gpu_stream_create(struct kvf_gpu_device *device, enum kvf_gpu_priority priority,
                          void **stream_out);

/* An event without timing. */
int kvf_gpu_event_create(struct kvf_gpu_device *device, void **event_out);

/* One for cuEventElapsedTime: it costs the device a time stamp. */
int kvf_gpu_timed_event_create(struct kvf_gpu_device *device, void **event_out);

/* Has all before the event's last record ended? KVF_OK; KVF_EMPTY: not so far; KVF_ERR_IO. */
int kvf_gpu_event_query(struct kvf_gpu_device *device, void *event);

/* Pin host memory for copies by the device; read-only mappings need is_read_only. May take 0.1 s a
 * GiB. Memory stays mapped until unpin, and one copy lies within one pinned range.
 * KVF_OK; KVF_ERR_NO_MEMORY: a limit on locked memory, perhaps; KVF_ERR_UNSUPPORTED, _IO. */
int kvf_gpu_pin(struct kvf_gpu_device *device, void *memory, size_t bytes, bool is_read_only);

/* No copy from or to the memory is in flight. */
void kvf_gpu_unpin(struct kvf_gpu_device *device, void *memory);

/* Pinned memory of our own, which kernels reach at *address_out. */
int kvf_gpu_host_alloc(struct kvf_gpu_device *device, size_t bytes, void **memory_out,
                       uint64_t *address_out);
void kvf_gpu_host_free(struct kvf_gpu_device *device, void *memory);

#endif /* KVF_GPU_DEVICE_H */
