/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_x.c: K and V from stored X on the GPU (end of part 9 of kvferry.h).
 *
 * Blocks are fetched by kvf_gpu_get into one of two windows, which hold X of some blocks, all
 * layers, side by side. When a window is whole its layers go through a product and a kernel each,
 * on the caller's stream, while the other window is filled:
 *
 *   copies in         window 0 | window 1 | window 2 | ...
 *   decodes                  0 |        1 |        2 (behind the layers of window 0) | ...
 *   caller's stream            | layers of window 0 | layers of window 1 | ...
 *
 * Each window is decoded on a stream of its own: what waits for one window's layers does not hold
 * up the other. The first window is smaller, so that the first product is there early.
 *
 * Who waits for whom (each arrow is named in the code where it is made, and can be taken out by a
 * mutant of that name: tests/gpu/test_x_order.c sees all of them):
 *
 *   window's blocks are there -> its layers                 x_blocks_wait
 *   a window's layers -> it is written again                x_window_wait
 *   product of a layer -> of the same layer K and V         one stream
 *   K and V of a layer -> product of the next one           one stream; x_product_wait, of another
 *                                                           call on another stream
 *   last reader of the pages -> K and V                     x_reader_wait
 *   K and V -> return, where the stream is the library's    x_return_wait
 */
#include "client/gpu_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/gpu_latent.h"
#include "client/x_weights.h"
#include "codec/codec_rebuild.h"
#include "gpu/blas.h"
#include "kvferry_gpu_x.h"

enum {
    WINDOWS = 2,
    WINDOW_TOKENS = 1024, /* by default: products of that many rows reach their rate */
    FIRST_SHARE = 4,      /* the first window has that part of one */
    EVENTS = 64,
    POLL_MS = 1000,
};

/* X of some blocks on their way. */
struct window {
    struct kvf_gpu_region *region; /* a page a block */
    uint64_t address;              /* [layers][blocks][chunk_tokens][stored] */
    void *stream;                  /* of decodes into it */
    void *rebuilt;                 /* event */
    uint32_t first;                /* of its blocks among the call's */
    uint32_t n;
    bool is_pending; /* a request is in flight */
};

/* Tokens of one block that a product has, and where they go. */
struct rows {
    uint32_t first; /* row */
    uint32_t n;
    uint32_t position;
    const uint32_t *pages; /* ids, the caller's */
};

struct kvf_gpu_x {
    struct kvf_gpu *gpu;
    struct kvf_x_weights weights; /* lists of pointers are copies */
    struct kvf_gpu_region pages;  /* strides and layers alone */
    struct kvf_gpu_blas *blas;
    struct kvf_gpu_latent *latent; /* what makes X of latents; NULL: X is stored */
    void *stream;                  /* for callers without one */
    uint32_t chunk_tokens;
    uint32_t blocks_a_window;
    uint32_t piece_tokens; /* that a kernel is told of at once */
    uint32_t stored;       /* elements a token of a window: of X, or of its latent */
    uint32_t k_width;
    uint32_t width;
    uint64_t product;   /* fp32 [window tokens][width] */
    uint64_t memory;    /* of both windows */
    uint64_t *lists[5]; /* copies: w_k, w_v, b_k, b_v, k_norm; NULL: none */
    struct window windows[WINDOWS];
    void *single;      /* event, behind the last kvf_gpu_x_rebuild */
    struct rows *rows; /* of the window that is being queued */
    uint32_t n_rows;
};

/* --- open and close --------------------------------------------------------------------------- */

static int check_open(const struct kvf_gpu *gpu, const struct kvf_x_weights *weights)
{
    const struct kvf_geometry *geometry = &gpu->plan.geometry;
    uint32_t stored = weights->stored_width != 0 ? weights->stored_width : weights->d_model;

    if (gpu->agent != NULL) {
        kvf_client_log(gpu->client, 0,
                       "K and V are rebuilt from X in the engine's process: open "
                       "the GPU with path ENGINE");
        return KVF_ERR_UNSUPPORTED;
    }
    if (geometry->kind < KVF_KIND_X || weights->n_layers != geometry->n_layers ||
        stored != (uint32_t)geometry->n_heads * geometry->dim_k ||
        weights->dtype != geometry->dtype ||
        (weights->dtype != KVF_DTYPE_BF16 && weights->dtype != KVF_DTYPE_F16) ||
        weights->d_model % 8 != 0) {
        kvf_client_log(gpu->client, 0,
                       "weights for X: %u layers of %u elements are not what the client's X has "
                       "(kind X, %u layers of %u), or X and matrices are not both bf16, or fp16",
                       weights->n_layers, stored, geometry->n_layers,
                       (uint32_t)geometry->n_heads * geometry->dim_k);
        return KVF_ERR_INVALID;
    }
    return KVF_OK;
}

/* Copy a list of device pointers. */
static int list_copy(const void *const *from, uint32_t n, uint64_t **to)
{
    if (from == NULL) {
        return KVF_OK;
    }
    *to = malloc(n * sizeof(**to));
    if (*to == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < n; i++) {
        (*to)[i] = (uint64_t)(uintptr_t)from[i];
    }
    return KVF_OK;
}

static int lists_copy(struct kvf_gpu_x *x)
{
    const struct kvf_x_weights *w = &x->weights;
    const void *const *from[] = {w->w_k, w->dim_v != 0 ? w->w_v : NULL, w->b_k,
                                 w->dim_v != 0 ? w->b_v : NULL, w->k_norm};
    int status = KVF_OK;

    for (size_t i = 0; i < sizeof(from) / sizeof(from[0]) && status == KVF_OK; i++) {
        status = list_copy(from[i], w->n_layers, &x->lists[i]);
    }
    return status;
}

/* Where K and V go. */
static int pages_take(struct kvf_gpu_x *x, const struct kvf_gpu_region_options *options)
{
    const struct kvf_tensor_view *views[2] = {&options->k, &options->v};

    if (options->struct_bytes != sizeof(*options) || options->n_pages == 0 ||
        options->tokens_a_page == 0) {
        return KVF_ERR_INVALID;
    }
    x->pages.n_pages = options->n_pages;
    x->pages.tokens_a_page = options->tokens_a_page;
    for (uint32_t i = 0; i < (x->weights.dim_v != 0 ? 2u : 1u); i++) {
        int status = KVF_ERR_INVALID;

        if (views[i]->layers != NULL) {
            status = list_copy((const void *const *)views[i]->layers, x->weights.n_layers,
                               &x->pages.layers[i]);
        }
        if (status != KVF_OK) {
            return status;
        }
        x->pages.strides[i] = (struct kvf_gpu_pages){
            views[i]->page_stride_bytes, views[i]->token_stride_bytes, views[i]->head_stride_bytes};
    }
    return KVF_OK;
}

static int window_region(struct kvf_gpu_x *x, struct window *window)
{
    const struct kvf_geometry *geometry = &x->gpu->plan.geometry;
    uint64_t token_bytes = (uint64_t)x->stored * kvf_dtype_bytes(x->weights.dtype);
    uint64_t page_bytes = token_bytes * x->chunk_tokens;
    void **layers = malloc(x->weights.n_layers * sizeof(*layers));
    struct kvf_gpu_region_options options = {
        .struct_bytes = sizeof(options),
        .n_pages = x->blocks_a_window,
        .tokens_a_page = x->chunk_tokens,
        .k = {.layers = layers,
              .page_stride_bytes = page_bytes,
              .token_stride_bytes = token_bytes,
              .head_stride_bytes = geometry->dim_k * kvf_dtype_bytes(x->weights.dtype)},
    };
    int status = layers != NULL ? KVF_OK : KVF_ERR_NO_MEMORY;

    for (uint32_t i = 0; status == KVF_OK && i < x->weights.n_layers; i++) {
        uint64_t address = window->address + i * page_bytes * x->blocks_a_window;

        memcpy(&layers[i], &address, sizeof(layers[i]));
    }
    if (status == KVF_OK) {
        status = kvf_gpu_register(x->gpu, &options, &window->region);
    }
    free(layers);
    return status;
}

static int memory_take(struct kvf_gpu_x *x)
{
    struct kvf_gpu_device *device = x->gpu->device;
    const struct kvf_gpu_driver *driver = &device->driver;
    uint64_t tokens = (uint64_t)x->blocks_a_window * x->chunk_tokens;
    uint64_t window_bytes = tokens * x->stored * kvf_dtype_bytes(x->weights.dtype) *
                            x->weights.n_layers;
    int status = kvf_gpu_device_result(device,
                                       driver->cuMemAlloc(&x->memory, WINDOWS * window_bytes),
                                       "cuMemAlloc for windows of X");

    if (status == KVF_OK) {
        status = kvf_gpu_device_result(
            device, driver->cuMemAlloc(&x->product, tokens * x->width * sizeof(float)),
            "cuMemAlloc for products of X");
    }
    for (uint32_t i = 0; i < WINDOWS && status == KVF_OK; i++) {
        x->windows[i].address = x->memory + i * window_bytes;
        status = kvf_gpu_event_create(device, &x->windows[i].rebuilt);
        if (status == KVF_OK) {
            status = kvf_gpu_stream_create(device, KVF_GPU_PRIORITY_HIGH, &x->windows[i].stream);
        }
        if (status == KVF_OK) {
            status = window_region(x, &x->windows[i]);
        }
    }
    return status == KVF_OK ? kvf_gpu_event_create(device, &x->single) : status;
}

static int x_start(struct kvf_gpu_x *x, char *text, size_t text_bytes)
{
    struct kvf_gpu_device *device = x->gpu->device;
    int status = kvf_gpu_blas_open(device, &x->blas, text, text_bytes);

    if (status != KVF_OK) {
        return status;
    }
    status = kvf_gpu_stream_create(device, KVF_GPU_PRIORITY_HIGH, &x->stream);
    if (status == KVF_OK) {
        status = memory_take(x);
    }
    if (status != KVF_OK) {
        snprintf(text, text_bytes, "%s", device->text);
        return status;
    }
    return x->gpu->plan.geometry.kind == KVF_KIND_XG
               ? kvf_gpu_latent_open(x->gpu, &x->weights, x->blocks_a_window * x->chunk_tokens,
                                     &x->latent, text, text_bytes)
               : KVF_OK;
}

int kvf_gpu_x_open(struct kvf_gpu *gpu, const struct kvf_x_weights *weights,
                   const struct kvf_gpu_x_options *options, struct kvf_gpu_x **x_out)
{
    char text[KVF_GPU_TEXT_BYTES] = "";
    struct kvf_gpu_x *x;
    int status;

    if (gpu == NULL || weights == NULL || weights->struct_bytes != sizeof(*weights) ||
        options == NULL || options->struct_bytes != sizeof(*options) || x_out == NULL) {
        return KVF_ERR_INVALID;
    }
    status = kvf_x_weights_check(gpu->client, weights, gpu->client->log, gpu->client->log_arg);
    if (status == KVF_OK) {
        status = check_open(gpu, weights);
    }
    if (status != KVF_OK) {
        return status;
    }
    x = calloc(1, sizeof(*x));
    if (x == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    x->gpu = gpu;
    x->weights = *weights;
    x->chunk_tokens = gpu->plan.geometry.chunk_tokens;
    x->blocks_a_window = (options->window_tokens != 0 ? options->window_tokens : WINDOW_TOKENS) /
                         x->chunk_tokens;
    x->blocks_a_window = x->blocks_a_window != 0 ? x->blocks_a_window : 1;
    x->stored = weights->stored_width != 0 ? weights->stored_width : weights->d_model;
    x->k_width = (uint32_t)weights->n_heads * weights->dim_k;
    x->width = x->k_width + (uint32_t)weights->n_heads * weights->dim_v;
    status = pages_take(x, &options->pages);
    if (status == KVF_OK) {
        uint64_t tokens_max = (uint64_t)KVF_GPU_REBUILD_PAGES_MAX * x->pages.tokens_a_page;

        x->piece_tokens = x->chunk_tokens < tokens_max ? x->chunk_tokens : (uint32_t)tokens_max;
        x->rows = calloc(x->blocks_a_window, sizeof(*x->rows));
        status = x->rows != NULL ? lists_copy(x) : KVF_ERR_NO_MEMORY;
    }
    if (status == KVF_OK && kvf_gpu_device_enter(gpu->device) == KVF_OK) {
        status = x_start(x, text, sizeof(text));
        kvf_gpu_device_leave(gpu->device);
    }
    if (status != KVF_OK) {
        kvf_client_log(gpu->client, 0, "K and V cannot be rebuilt from X on the GPU: %s",
                       text[0] != 0 ? text : kvf_status_text(status));
        x = kvf_gpu_x_close(x);
    }
    *x_out = x;
    return status;
}

struct kvf_gpu_latent *kvf_gpu_x_latent(const struct kvf_gpu_x *x, const struct kvf_gpu *gpu)
{
    return x != NULL && x->gpu == gpu ? x->latent : NULL;
}

static void stream_drop(struct kvf_gpu_x *x, void *stream)
{
    if (stream != NULL) {
        (void)x->gpu->device->driver.cuStreamDestroy(stream);
    }
}

static void window_drop(struct kvf_gpu_x *x, struct window *window)
{
    kvf_gpu_event_drop(x->gpu, window->rebuilt);
    stream_drop(x, window->stream);
    if (window->region != NULL) {
        (void)kvf_gpu_unregister(x->gpu, window->region);
    }
}

struct kvf_gpu_x *kvf_gpu_x_close(struct kvf_gpu_x *x)
{
    if (x == NULL) {
        return NULL;
    }
    if (kvf_gpu_device_enter(x->gpu->device) == KVF_OK) {
        const struct kvf_gpu_driver *driver = &x->gpu->device->driver;

        (void)driver->cuCtxSynchronize();
        for (uint32_t i = 0; i < WINDOWS; i++) {
            window_drop(x, &x->windows[i]);
        }
        kvf_gpu_event_drop(x->gpu, x->single);
        (void)kvf_gpu_latent_close(x->latent);
        (void)kvf_gpu_blas_close(x->blas);
        (void)driver->cuMemFree(x->memory);
        (void)driver->cuMemFree(x->product);
        stream_drop(x, x->stream);
        kvf_gpu_device_leave(x->gpu->device);
    }
    for (size_t i = 0; i < sizeof(x->lists) / sizeof(x->lists[0]); i++) {
        free(x->lists[i]);
    }
    free(x->pages.layers[0]);
    free(x->pages.layers[1]);
    free(x->rows);
    free(x);
    return NULL;
}

/* --- layers ----------------------------------------------------------------------------------- */

static uint64_t list_at(const uint64_t *list, uint32_t layer)
{
    return list != NULL ? list[layer] : 0;
}

/* X [W_K | W_V]^T of a layer: one product if the matrices lie one behind the other. */
static int multiply(struct kvf_gpu_x *x, uint32_t layer, uint64_t from, uint32_t rows, void *stream)
{
    const struct kvf_x_weights *w = &x->weights;
    uint64_t w_k = x->lists[0][layer];
    uint64_t w_v = list_at(x->lists[1], layer);
    uint64_t k_bytes = (uint64_t)x->k_width * w->d_model * kvf_dtype_bytes(w->dtype);
    struct kvf_gpu_product product = {.m = rows,
                                      .n = w_v == w_k + k_bytes ? x->width : x->k_width,
                                      .k = w->d_model,
                                      .c_stride = x->width,
                                      .dtype = w->dtype};
    int status = kvf_gpu_blas_multiply(x->blas, &product, from, w_k, x->product, stream);

    if (status == KVF_OK && product.n < x->width) {
        product.n = x->width - x->k_width;
        status = kvf_gpu_blas_multiply(x->blas, &product, from, w_v,
                                       x->product + x->k_width * sizeof(float), stream);
    }
    return status;
}

/* All that a kernel is told of a layer but for rows and pages. */
static void layer_fill(const struct kvf_gpu_x *x, uint32_t layer, struct kvf_gpu_rebuild *work)
{
    const struct kvf_x_weights *w = &x->weights;

    work->product = x->product;
    work->bias_k = list_at(x->lists[2], layer);
    work->bias_v = list_at(x->lists[3], layer);
    work->gain = list_at(x->lists[4], layer);
    work->cosines = (uint64_t)(uintptr_t)w->rope_cos;
    work->sines = (uint64_t)(uintptr_t)w->rope_sin;
    for (uint32_t i = 0; i < 2; i++) {
        work->bases[i] = list_at(x->pages.layers[i], layer);
        work->pages[i] = x->pages.strides[i];
    }
    work->n_heads = w->n_heads;
    work->dim_k = w->dim_k;
    work->dim_v = w->dim_v;
    work->width = x->width;
    work->rope_dims = w->rope_style == KVF_ROPE_STYLE_NONE ? 0
                      : w->rope_dims != 0                  ? w->rope_dims
                                                           : w->dim_k;
    work->tokens_a_page = x->pages.tokens_a_page;
    work->eps = w->k_norm_eps;
    work->dtype = w->dtype;
    work->kv_dtype = w->kv_dtype;
    work->rope_style = w->rope_style;
    work->piece_tokens = x->piece_tokens;
    work->n_pieces = 0;
}

static int launch(struct kvf_gpu_x *x, struct kvf_gpu_rebuild *work, void *stream)
{
    const struct kvf_gpu_shape shape = {.kernel = kvf_gpu_rebuild_kernel(work),
                                        .n_blocks = work->n_pieces * work->piece_tokens,
                                        .n_threads = KVF_GPU_REBUILD_THREADS};
    void *parameters[] = {work};

    return work->n_pieces != 0 ? kvf_gpu_device_launch(x->gpu->device, &shape, parameters, stream)
                               : KVF_OK;
}

/* K and V of a layer from its product: all rows, by as few kernels as can be told of them. */
static int layer_scatter(struct kvf_gpu_x *x, uint32_t layer, void *stream)
{
    struct kvf_gpu_rebuild work = {0};
    uint32_t a_page = x->pages.tokens_a_page;
    uint32_t n_ids = 0;
    int status = KVF_OK;

    layer_fill(x, layer, &work);
    for (uint32_t i = 0; i < x->n_rows; i++) {
        const struct rows *rows = &x->rows[i];

        for (uint32_t at = 0; at < rows->n && status == KVF_OK; at += x->piece_tokens) {
            uint32_t n = rows->n - at < x->piece_tokens ? rows->n - at : x->piece_tokens;
            uint32_t n_pages = (n + a_page - 1) / a_page;

            if (work.n_pieces == KVF_GPU_REBUILD_PIECES_MAX ||
                n_ids + n_pages > KVF_GPU_REBUILD_PAGES_MAX) {
                status = launch(x, &work, stream);
                work.n_pieces = n_ids = 0;
            }
            work.pieces[work.n_pieces++] = (struct kvf_gpu_rebuild_piece){
                rows->first + at, n, rows->position + at, n_ids};
            memcpy(work.page_ids + n_ids, rows->pages + at / a_page, n_pages * sizeof(uint32_t));
            n_ids += n_pages;
        }
    }
    return status == KVF_OK ? launch(x, &work, stream) : status;
}

/* K and V of a layer from X of n tokens at an address. */
static int layer_queue(struct kvf_gpu_x *x, uint32_t layer, uint64_t from, uint32_t n, void *stream)
{
    int status = multiply(x, layer, from, n, stream);

    return status == KVF_OK ? layer_scatter(x, layer, stream) : status;
}

static int wait_for(struct kvf_gpu_x *x, void *stream, void *event)
{
    return event != NULL ? kvf_gpu_wait(x->gpu, stream, event) : KVF_OK;
}

/* The buffer of products is one for all streams. */
static int behind_others(struct kvf_gpu_x *x, void *stream)
{
    int status = wait_for(x, stream, x->single);

    for (uint32_t i = 0; i < WINDOWS && status == KVF_OK; i++) {
        status = wait_for(x, stream, x->windows[i].rebuilt);
    }
    return status;
}

static bool has_positions(const struct kvf_gpu_x *x, uint32_t first, uint32_t n)
{
    if (x->weights.rope_style == KVF_ROPE_STYLE_NONE ||
        (first < x->weights.rope_positions && n <= x->weights.rope_positions - first)) {
        return true;
    }
    kvf_client_log(x->gpu->client, 0,
                   "K and V cannot be rebuilt from X: tokens %u to %u of a sequence, and the "
                   "rotary tables have %u",
                   first, first + n - 1, x->weights.rope_positions);
    return false;
}

static bool has_pages(const struct kvf_gpu_x *x, const uint32_t *pages, uint32_t n_pages,
                      uint32_t n_tokens)
{
    uint32_t a_page = x->pages.tokens_a_page;

    if (pages == NULL || n_pages != (n_tokens + a_page - 1) / a_page) {
        return false;
    }
    for (uint32_t i = 0; i < n_pages; i++) {
        if (pages[i] >= x->pages.n_pages) {
            return false;
        }
    }
    return true;
}

int kvf_gpu_x_rebuild(struct kvf_gpu_x *x, uint32_t layer, const void *data, uint32_t n_tokens,
                      uint32_t position_first, const uint32_t *pages, uint32_t n_pages,
                      void *stream)
{
    uint32_t tokens_max;
    uint32_t done = 0;
    int recorded;
    int status;

    if (x == NULL || layer >= x->weights.n_layers || data == NULL || n_tokens == 0 ||
        !has_pages(x, pages, n_pages, n_tokens) || x->chunk_tokens % x->pages.tokens_a_page != 0) {
        return KVF_ERR_INVALID;
    }
    if (!has_positions(x, position_first, n_tokens)) {
        return KVF_ERR_MISMATCH;
    }
    status = kvf_gpu_device_enter(x->gpu->device);
    if (status != KVF_OK) {
        return status;
    }
    status = KVF_MUTANT(x_product_wait) ? KVF_OK : behind_others(x, stream);
    tokens_max = x->blocks_a_window * x->chunk_tokens;
    while (done < n_tokens && status == KVF_OK) {
        uint32_t n = n_tokens - done < tokens_max ? n_tokens - done : tokens_max;
        uint64_t row_bytes = (uint64_t)x->weights.d_model * kvf_dtype_bytes(x->weights.dtype);

        x->n_rows = 0;
        for (uint32_t at = 0; at < n; at += x->chunk_tokens) {
            x->rows[x->n_rows++] = (struct rows){
                at, n - at < x->chunk_tokens ? n - at : x->chunk_tokens, position_first + done + at,
                pages + (done + at) / x->pages.tokens_a_page};
        }
        status = layer_queue(x, layer, (uint64_t)(uintptr_t)data + done * row_bytes, n, stream);
        done += n;
    }
    recorded = kvf_gpu_record(x->gpu, x->single, stream);
    kvf_gpu_device_leave(x->gpu->device);
    return status == KVF_OK ? recorded : status;
}

/* --- requests --------------------------------------------------------------------------------- */

static uint32_t item_tokens(const struct kvf_gpu_x *x, const struct kvf_gpu_x_item *item)
{
    return item->n_tokens != 0 ? item->n_tokens : x->chunk_tokens;
}

static int check_items(const struct kvf_gpu_x *x, const struct kvf_gpu_x_item *items, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t n_tokens = item_tokens(x, &items[i]);

        if (items[i].struct_bytes != sizeof(items[i]) || n_tokens > x->chunk_tokens ||
            !has_pages(x, items[i].pages, items[i].n_pages, n_tokens)) {
            return KVF_ERR_INVALID;
        }
        if (!has_positions(x, items[i].token_start, n_tokens)) {
            return KVF_ERR_MISMATCH;
        }
    }
    return KVF_OK;
}

/* Ask for a window's blocks, behind what read it last. */
static int window_fetch(struct kvf_gpu_x *x, uint32_t w, const struct kvf_gpu_x_item *items,
                        const struct kvf_get_options *options)
{
    struct window *window = &x->windows[w];
    struct kvf_gpu_get_item *wanted = calloc(window->n, sizeof(*wanted));
    uint32_t *slots = calloc(window->n, sizeof(*slots));
    int status = wanted != NULL && slots != NULL ? KVF_OK : KVF_ERR_NO_MEMORY;
    uint64_t request;

    for (uint32_t i = 0; status == KVF_OK && i < window->n; i++) {
        slots[i] = i;
        wanted[i] = (struct kvf_gpu_get_item){.struct_bytes = sizeof(wanted[i]),
                                              .n_pages = 1,
                                              .key = items[window->first + i].key,
                                              .n_tokens = item_tokens(x, &items[window->first + i]),
                                              .pages = &slots[i]};
    }
    if (status == KVF_OK) {
        status = kvf_gpu_get(x->gpu, window->region, wanted, window->n, options,
                             KVF_MUTANT(x_window_wait) ? NULL : window->rebuilt, window->stream, w,
                             &request);
    }
    window->is_pending = status == KVF_OK;
    free(wanted);
    free(slots);
    return status;
}

/* Take events until a window's request has ended. */
static int window_wait(struct kvf_gpu_x *x, uint32_t w, int32_t *statuses)
{
    struct kvf_gpu_event events[EVENTS];
    int status = KVF_OK;

    while (x->windows[w].is_pending && (status == KVF_OK || status == KVF_EMPTY)) {
        uint32_t n = 0;

        status = kvf_gpu_poll(x->gpu, events, EVENTS, POLL_MS, &n);
        for (uint32_t i = 0; i < n; i++) {
            struct window *window = &x->windows[events[i].user % WINDOWS];

            if (events[i].kind == KVF_GPU_EVENT_BLOCK) {
                statuses[window->first + events[i].index] = events[i].status;
            } else if (events[i].kind == KVF_GPU_EVENT_REQUEST) {
                window->is_pending = false;
            }
        }
    }
    return status == KVF_EMPTY ? KVF_OK : status;
}

/* Queue all layers of what has come of a window. */
static int window_rebuild(struct kvf_gpu_x *x, struct window *window,
                          const struct kvf_gpu_x_item *items, const int32_t *statuses, void *stream)
{
    uint64_t layer_bytes = (uint64_t)x->blocks_a_window * x->chunk_tokens * x->stored *
                           kvf_dtype_bytes(x->weights.dtype);
    uint32_t n = 0; /* whole chunks: products of few numbers of rows */
    int recorded;
    int status = KVF_OK;

    x->n_rows = 0;
    for (uint32_t i = 0; i < window->n; i++) {
        const struct kvf_gpu_x_item *item = &items[window->first + i];

        if (statuses[window->first + i] == KVF_OK) {
            x->rows[x->n_rows++] = (struct rows){i * x->chunk_tokens, item_tokens(x, item),
                                                 item->token_start, item->pages};
            n = (i + 1) * x->chunk_tokens;
        }
    }
    for (uint32_t layer = 0; n != 0 && layer < x->weights.n_layers && status == KVF_OK; layer++) {
        uint64_t from = window->address + layer * layer_bytes;

        if (x->latent != NULL) {
            status = kvf_gpu_latent_queue(x->latent, x->blas, layer, from, n, stream, &from);
        }
        if (status == KVF_OK) {
            status = layer_queue(x, layer, from, n, stream);
        }
    }
    recorded = kvf_gpu_record(x->gpu, window->rebuilt, stream);
    return status == KVF_OK ? recorded : status;
}

static int run_windows(struct kvf_gpu_x *x, const struct kvf_gpu_x_item *items, uint32_t n,
                       const struct kvf_get_options *options, void *stream, int32_t *statuses)
{
    uint32_t n_first = x->blocks_a_window / FIRST_SHARE;
    uint32_t n_fetched = 0; /* windows */
    uint32_t n_rebuilt = 0;
    uint32_t asked = 0; /* blocks */
    int status = KVF_OK;

    while ((asked < n || n_rebuilt < n_fetched) && status == KVF_OK) {
        if (asked < n && n_fetched < n_rebuilt + WINDOWS) {
            struct window *next = &x->windows[n_fetched % WINDOWS];
            uint32_t most = asked == 0 && n_first != 0 ? n_first : x->blocks_a_window;

            next->first = asked;
            next->n = n - asked < most ? n - asked : most;
            status = window_fetch(x, n_fetched++ % WINDOWS, items, options);
            asked += next->n;
            continue;
        }
        if (!KVF_MUTANT(x_blocks_wait)) {
            status = window_wait(x, n_rebuilt % WINDOWS, statuses);
        }
        if (status == KVF_OK) {
            status = window_rebuild(x, &x->windows[n_rebuilt++ % WINDOWS], items, statuses, stream);
        }
    }
    return status;
}

int kvf_gpu_x_get(struct kvf_gpu_x *x, const struct kvf_gpu_x_item *items, uint32_t n,
                  const struct kvf_get_options *options, void *wait_event, void *stream,
                  int32_t *statuses_out)
{
    void *on = stream;
    uint32_t n_good = 0;
    int status;

    if (x == NULL || items == NULL || n == 0 || statuses_out == NULL) {
        return KVF_ERR_INVALID;
    }
    status = check_items(x, items, n);
    if (status != KVF_OK) {
        return status;
    }
    if (x->gpu->requests != NULL || !x->gpu->is_awake) {
        return KVF_ERR_BUSY;
    }
    status = kvf_gpu_device_enter(x->gpu->device);
    if (status != KVF_OK) {
        return status;
    }
    if (on == NULL) {
        on = x->stream;
    }
    status = KVF_MUTANT(x_product_wait) ? KVF_OK : behind_others(x, on);
    if (status == KVF_OK && !KVF_MUTANT(x_reader_wait)) {
        status = wait_for(x, on, wait_event);
    }
    for (uint32_t i = 0; i < n; i++) {
        statuses_out[i] = KVF_MISS;
    }
    if (status == KVF_OK) {
        status = run_windows(x, items, n, options, on, statuses_out);
    }
    for (uint32_t w = 0; w < WINDOWS; w++) { /* what was asked for before a failure */
        (void)window_wait(x, w, statuses_out);
    }
    if (status == KVF_OK && stream == NULL && !KVF_MUTANT(x_return_wait)) {
        status = kvf_gpu_device_result(
            x->gpu->device, x->gpu->device->driver.cuStreamSynchronize(on), "cuStreamSynchronize");
    }
    kvf_gpu_device_leave(x->gpu->device);
    for (uint32_t i = 0; i < n; i++) {
        if (status != KVF_OK && statuses_out[i] == KVF_OK) {
            statuses_out[i] = status; /* X of it has come, K and V perhaps have not */
        }
        n_good += statuses_out[i] == KVF_OK;
    }
    return status != KVF_OK ? status : n_good == n ? KVF_OK : KVF_PARTIAL;
}
