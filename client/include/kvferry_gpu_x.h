/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry_gpu_x.h: K and V from stored X on a GPU, by libkvferry_gpu: what part 9 of kvferry.h is
 * on a processor. That header's rules hold here, too.
 */
#ifndef KVFERRY_GPU_X_H
#define KVFERRY_GPU_X_H

#include "kvferry.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Blocks of kind KVF_KIND_X or KVF_KIND_XG are fetched, decoded and rebuilt into pages in device
 * memory, some blocks at a time, while the next ones are on their way. */
struct kvf_gpu_x;

struct kvf_gpu_x_options {
    uint32_t struct_bytes;
    uint32_t window_tokens; /* of the blocks that are rebuilt by one product a layer; two such
                               windows of X, all layers, are held in device memory; 0: 1024 */
    struct kvf_gpu_region_options pages; /* for K and V; all is copied */
};

/* Register weights. gpu has a client of kind KVF_KIND_X or KVF_KIND_XG whose geometry is that of
 * the weights, and stays the caller's, open for longer than *x_out. All arrays of the weights are
 * in device memory, but for the lists of a layer's pointers, which are in host memory and copied.
 * svd_file is read here: factors of all layers go to device memory. X, latents and the matrices
 * have one dtype, BF16 or F16; a product takes W_K and W_V at once where W_V follows W_K in memory,
 * as in the fused matrices of serving engines. Needs cuBLASLt of CUDA 12 or 13 (opened at run time;
 * $KVFERRY_CUBLASLT names another file). Blocks. Statuses as of kvf_x_open, and
 * KVF_ERR_UNSUPPORTED: no cuBLASLt, or path AGENT; KVF_ERR_NO_MEMORY: no room for the windows or
 * the factors. */
KVF_API int kvf_gpu_x_open(struct kvf_gpu *gpu, const struct kvf_x_weights *weights,
                           const struct kvf_gpu_x_options *options, struct kvf_gpu_x **x_out);

/* Waits for what is queued. Accepts NULL. Returns NULL. */
KVF_API struct kvf_gpu_x *kvf_gpu_x_close(struct kvf_gpu_x *x);

struct kvf_gpu_x_item {
    uint32_t struct_bytes;
    uint32_t n_pages;
    struct kvf_key key;
    uint32_t token_start;  /* position of the block's first token in its sequence */
    uint32_t n_tokens;     /* wanted, from the first one; 0: a full chunk */
    const uint32_t *pages; /* ids; token t goes to pages[t / tokens_a_page] */
};

/* Fetch blocks of X, keys in chain order, and write K and V of all layers. Blocks until all that is
 * there is queued on stream (NULL: one of the library's, which is waited for), behind wait_event
 * (NULL: nothing): the last step that read the target pages. No other request of gpu is in flight.
 * statuses_out[i], of each block: KVF_OK, its K and V will have been written when the stream comes
 * there; else as of the BLOCK event of kvf_gpu_get, and its pages hold nothing. options may be
 * NULL. KVF_OK; KVF_PARTIAL: not of all; KVF_ERR_BUSY: requests are in flight, or asleep;
 * KVF_ERR_MISMATCH: the rotary tables have no row for a position; KVF_ERR_INVALID: as of
 * kvf_gpu_get; KVF_ERR_DISCONNECTED, _NO_DAEMON, _NO_MEMORY, _IO. */
KVF_API int kvf_gpu_x_get(struct kvf_gpu_x *x, const struct kvf_gpu_x_item *items, uint32_t n,
                          const struct kvf_get_options *options, void *wait_event, void *stream,
                          int32_t *statuses_out);

/* Queue K and V of one layer from an X that is in device memory: [n_tokens][d_model], tokens of one
 * sequence from position_first on, to pages[t / tokens_a_page]. data stays as it is until the
 * stream has come there. Does not wait for the device. Statuses as of kvf_x_rebuild; KVF_ERR_IO. */
KVF_API int kvf_gpu_x_rebuild(struct kvf_gpu_x *x, uint32_t layer, const void *data,
                              uint32_t n_tokens, uint32_t position_first, const uint32_t *pages,
                              uint32_t n_pages, void *stream);

/* X of a request put layer by layer, as kvf_x_put_*, from device memory: each layer is encoded on
 * the engine's stream when it is there, and may be overwritten behind that. Of the request what is
 * encoded stays in device memory until the end, with an fp32 sum a token and element where layers
 * are differences. For path ENGINE and profiles of fixed size (x8 to x2, xcl4 to xcl2). Of kind
 * KVF_KIND_XG (xgcl4 to xgcl2) each layer is handed over as X, of which latents are made by the
 * factors of x; what is encoded is decoded again, so that the next difference is that to what a
 * reader will have. */
struct kvf_gpu_x_put;

struct kvf_gpu_x_put_options {
    uint32_t struct_bytes;
    uint32_t n_tokens;     /* of the request, all at once */
    uint32_t token_start;  /* of the first one; a multiple of chunk_tokens */
    uint32_t reserved;     /* 0 */
    uint64_t memory_bytes; /* of the device, at most; 0: as much as there is */
    struct kvf_gpu_x *x;   /* kind KVF_KIND_XG: of the same gpu, open until the end; else NULL */
};

/* Begin, one at a time or several. gpu stays open and awake until the end. Blocks (memory). KVF_OK;
 * KVF_ERR_TOO_LARGE: takes more than memory_bytes; KVF_ERR_NO_MEMORY: more than the device has; the
 * log has the figures; KVF_ERR_UNSUPPORTED: no kernels for this profile, path AGENT, another kind,
 * no cuBLASLt for latents; KVF_ERR_REFUSED: latents without x; KVF_ERR_MISMATCH: x is of a profile
 * that the client had before; KVF_ERR_INVALID, _IO, _BUSY, _DISCONNECTED, _NO_DAEMON. */
KVF_API int kvf_gpu_x_put_begin(struct kvf_gpu *gpu, const struct kvf_gpu_x_put_options *options,
                                struct kvf_gpu_x_put **put_out);

/* Queue the encode of the next layer, all tokens of it: X, [n_tokens][d_model] of its type, without
 * gaps, in device memory, for latents on 16 bytes. All layers on one stream, or on streams of which
 * each waits for the one before. Does not wait for the device. KVF_OK; KVF_ERR_INVALID: not the
 * next layer; KVF_ERR_UNSUPPORTED: no product of this shape; KVF_ERR_IO. */
KVF_API int kvf_gpu_x_put_layer(struct kvf_gpu_x_put *put, uint32_t layer, const void *data,
                                void *stream);

/* Put the blocks, all layers of which have been queued; n keys, one a chunk, in chain order. Waits
 * for the device and the daemon. The put is gone, whatever comes of it but KVF_ERR_INVALID.
 * statuses_out[i] (may be NULL), of each block, as of kvf_put, and KVF_ERR_UNSUPPORTED: of one of
 * its layers more than 1/16 of the groups are not coded (not numbers, or too large), and the layer
 * is gone. Statuses as of kvf_x_put_end; KVF_ERR_IO. */
KVF_API int kvf_gpu_x_put_end(struct kvf_gpu_x_put *put, const struct kvf_key *keys, uint32_t n,
                              const struct kvf_put_options *options, int32_t *statuses_out);

/* Give up. Waits for what is queued. Accepts NULL. Returns NULL. */
KVF_API struct kvf_gpu_x_put *kvf_gpu_x_put_cancel(struct kvf_gpu_x_put *put);

#ifdef __cplusplus
}
#endif

#endif /* KVFERRY_GPU_X_H */
