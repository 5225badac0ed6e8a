/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_load.h: what the GPU benches share: a device, KV of a model in an engine's pages, and the
 * work of encoding or decoding a burst of it.
 */
#ifndef KVF_TESTS_BENCH_GPU_LOAD_H
#define KVF_TESTS_BENCH_GPU_LOAD_H

#include "codec/codec.h"
#include "codec/codec_gpu_host.h"
#include "codec/codec_gpu_image.h"
#include "gpu/device.h"

#define GPU_PAGE_TOKENS  16
#define GPU_CHUNK_TOKENS 256

/* Open the first device with our kernels, its context current from here on. Prints why and ends
 * the process with 77 if there is no GPU, or no kernels in this build. */
struct kvf_gpu_device *gpu_open(void);

/* End the process with the driver's text unless result is 0. */
void gpu_must(const struct kvf_gpu_device *gpu, int result, const char *what);

uint64_t gpu_memory(struct kvf_gpu_device *gpu, size_t bytes);
void *gpu_stream(struct kvf_gpu_device *gpu, enum kvf_gpu_priority priority);
void *gpu_timer(struct kvf_gpu_device *gpu);                          /* an event with timing */
double gpu_timer_s(struct kvf_gpu_device *gpu, void *from, void *to); /* waits for `to` */

/* Pinned memory of this process, touched; the device sees it at the same address. */
uint8_t *gpu_host_memory(struct kvf_gpu_device *gpu, size_t bytes);

/* Shapes of KV that the benches use. */
enum gpu_model {
    GPU_LLAMA_8B, /* 32 layers, 8 heads of 128; pages (B, H, N, 2D) */
    GPU_MLA,      /* 61 layers, one latent of 512 and 64 rotary elements; pages (B, N, 576) */
    GPU_X_2048,   /* X of 32 layers of 2,048 elements; pages (B, 16, N, 128) */
};

/* A burst of whole chunks of one model: pages, and payloads that it is encoded to. */
struct gpu_load {
    struct kvf_codec_plan plan;
    uint32_t n_chunks;
    uint32_t n_pages;
    uint32_t parts_a_chunk;
    uint64_t kv_bytes;          /* in pages: what the burst is before encoding */
    uint64_t payload_bytes;     /* of one chunk */
    uint64_t pages;             /* device memory, layer after layer */
    uint64_t layer_bytes;       /* from one layer's pages to the next one's */
    uint64_t page_bytes;        /* of one layer */
    uint32_t *page_ids;         /* of the host; the pages of a chunk lie anywhere */
    struct kvf_gpu_kinds kinds; /* one: the benches' profiles have layers that are alike, or
                                   differences, whose kernels take all kinds at once */
    struct kvf_gpu_work work;
    struct kvf_gpu_part *parts; /* of the host */
    uint64_t device_parts;
    struct kvf_gpu_result *results;
    struct kvf_gpu_launch encode[KVF_GPU_LAUNCHES_MAX];
    uint32_t n_encode;
};

/* Lay out n_chunks in new device memory and fill it with values. Payloads follow each other from
 * `payloads` (device memory, or pinned memory's device address) on. The memory is the process's
 * until its end. */
void gpu_load_init(struct gpu_load *load, struct kvf_gpu_device *gpu, enum gpu_model model,
                   const char *profile, uint32_t n_chunks, uint64_t payloads);

/* The same pages and plan with payloads elsewhere: shares the pages of `of`. */
void gpu_load_clone(struct gpu_load *load, struct kvf_gpu_device *gpu, const struct gpu_load *of,
                    uint64_t payloads);

/* Bytes of payloads that a load of this shape has, all chunks. */
uint64_t gpu_load_payloads_bytes(const struct gpu_load *load);

/* Queue the encode of the whole burst, or the decode of layers [first, first + n) of one chunk,
 * or of everything with chunk UINT32_MAX. */
void gpu_load_encode(const struct gpu_load *load, struct kvf_gpu_device *gpu, void *stream);
void gpu_load_decode(const struct gpu_load *load, struct kvf_gpu_device *gpu, uint32_t chunk,
                     uint32_t layer_first, uint32_t n_layers, void *stream);

/* Where layer's strip begins in a chunk's payload. */
uint64_t gpu_load_layer_offset(const struct gpu_load *load, uint32_t layer);

#endif /* KVF_TESTS_BENCH_GPU_LOAD_H */
