/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_x.c: K and V from stored X on the GPU (end of part 9 of kvferry.h).
 *
 * Blocks are fetched by kvf_gpu_get into one of two windows, which hold X of some blocks, all
 * layers, side by side. When a window is whole its layers go through a product and a kernel each,
 * on the caller's stream, while the other window is filled:
 *
 *   in, get streams   window 0 | window 1 | window 2 (behind the layers of window 0) | ...
 *   caller's stream            | layers of window 0 | layers of window 1 | ...
 *
 * Who waits for whom: kvf_gpu_get says that a window's blocks have been written before their
 * layers are queued; a window is fetched again behind `rebuilt`, which is recorded behind its
 * layers; lists of a window, in pinned memory, are written again when that event has come.
 */
#include "client/gpu_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/x_weights.h"
#include "codec/codec_rebuild.h"
#include "gpu/blas.h"

enum {
    WINDOWS = 2,
    WINDOW_TOKENS = 1024, /* by default: products of that many rows reach their rate */
    EVENTS = 64,
    POLL_MS = 1000,
};

/* X of some blocks on their way. */
struct window {
    struct kvf_gpu_region *region;      /* a page a block */
    uint64_t address;                   /* [layers][blocks][chunk_tokens][d_model] */
    struct kvf_gpu_rebuild_item *items; /* pinned; page ids follow */
    uint64_t items_address;
    void *rebuilt;  /* event */
    uint32_t first; /* of its blocks among the call's */
    uint32_t n;
    bool is_pending; /* a request is in flight */
};

struct kvf_gpu_x {
    struct kvf_gpu *gpu;
    struct kvf_x_weights weights; /* lists of pointers are copies */
    struct kvf_gpu_region pages;  /* strides and layers alone */
    struct kvf_gpu_blas *blas;
    void *stream; /* for callers without one */
    uint32_t chunk_tokens;
    uint32_t blocks_a_window;
    uint32_t pages_a_block; /* ids that an item can have */
    uint32_t k_width;
    uint32_t width;
    uint64_t product;   /* fp32 [window tokens][width] */
    uint64_t memory;    /* of both windows */
    uint64_t *lists[5]; /* copies: w_k, w_v, b_k, b_v, k_norm; NULL: none */
    struct window windows[WINDOWS];
    struct window single; /* kvf_gpu_x_rebuild: a list of its own */
};

/* --- open and close --------------------------------------------------------------------------- */

static int check_open(const struct kvf_gpu *gpu, const struct kvf_x_weights *weights)
{
    const struct kvf_geometry *geometry = &gpu->plan.geometry;

    if (gpu->agent != NULL) {
        kvf_client_log(gpu->client, 0,
                       "K and V are rebuilt from X in the engine's process: open "
                       "the GPU with path ENGINE");
        return KVF_ERR_UNSUPPORTED;
    }
    if (geometry->kind != KVF_KIND_X || weights->n_layers != geometry->n_layers ||
        weights->d_model != (uint32_t)geometry->n_heads * geometry->dim_k ||
        weights->dtype != geometry->dtype ||
        (weights->dtype != KVF_DTYPE_BF16 && weights->dtype != KVF_DTYPE_F16) ||
        weights->d_model % 8 != 0) {
        kvf_client_log(gpu->client, 0,
                       "weights for X: %u layers of %u elements are not what the client's X has "
                       "(kind X, %u layers of %u), or X and matrices are not both bf16, or fp16",
                       weights->n_layers, weights->d_model, geometry->n_layers,
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

/* Items and page ids of a window in pinned memory, and the event that says when they were read. */
static int window_lists(struct kvf_gpu_x *x, struct window *window, uint32_t n_blocks)
{
    struct kvf_gpu_device *device = x->gpu->device;
    size_t bytes = n_blocks * sizeof(*window->items) +
                   (size_t)n_blocks * x->pages_a_block * sizeof(uint32_t);
    void *memory = NULL;
    int status = kvf_gpu_event_create(device, &window->rebuilt);

    if (status == KVF_OK) {
        status = kvf_gpu_host_alloc(device, bytes, &memory, &window->items_address);
        window->items = memory;
    }
    return status;
}

static int window_region(struct kvf_gpu_x *x, struct window *window)
{
    const struct kvf_geometry *geometry = &x->gpu->plan.geometry;
    uint64_t token_bytes = (uint64_t)x->weights.d_model * kvf_dtype_bytes(x->weights.dtype);
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
    uint64_t window_bytes = tokens * x->weights.d_model * kvf_dtype_bytes(x->weights.dtype) *
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
        status = window_lists(x, &x->windows[i], x->blocks_a_window);
        if (status == KVF_OK) {
            status = window_region(x, &x->windows[i]);
        }
    }
    return status == KVF_OK ? window_lists(x, &x->single, x->blocks_a_window) : status;
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
    }
    return status;
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
    x->k_width = (uint32_t)weights->n_heads * weights->dim_k;
    x->width = x->k_width + (uint32_t)weights->n_heads * weights->dim_v;
    status = pages_take(x, &options->pages);
    if (status == KVF_OK) {
        x->pages_a_block = (x->chunk_tokens + x->pages.tokens_a_page - 1) / x->pages.tokens_a_page;
        status = lists_copy(x);
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

static void window_drop(struct kvf_gpu_x *x, struct window *window)
{
    kvf_gpu_event_drop(x->gpu, window->rebuilt);
    kvf_gpu_host_free(x->gpu->device, window->items);
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
        window_drop(x, &x->single);
        (void)kvf_gpu_blas_close(x->blas);
        (void)driver->cuMemFree(x->memory);
        (void)driver->cuMemFree(x->product);
        if (x->stream != NULL) {
            (void)driver->cuStreamDestroy(x->stream);
        }
        kvf_gpu_device_leave(x->gpu->device);
    }
    for (size_t i = 0; i < sizeof(x->lists) / sizeof(x->lists[0]); i++) {
        free(x->lists[i]);
    }
    free(x->pages.layers[0]);
    free(x->pages.layers[1]);
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

/* K and V of a layer of `rows` rows from an address on, of the items of a window's lists. */
static int layer_queue(struct kvf_gpu_x *x, uint32_t layer, const struct window *window,
                       uint32_t n_lists, uint64_t from, uint32_t rows, void *stream)
{
    const struct kvf_x_weights *w = &x->weights;
    struct kvf_gpu_rebuild work = {
        .product = x->product,
        .bias_k = list_at(x->lists[2], layer),
        .bias_v = list_at(x->lists[3], layer),
        .gain = list_at(x->lists[4], layer),
        .cosines = (uint64_t)(uintptr_t)w->rope_cos,
        .sines = (uint64_t)(uintptr_t)w->rope_sin,
        .bases = {x->pages.layers[0][layer], list_at(x->pages.layers[1], layer)},
        .pages = {x->pages.strides[0], x->pages.strides[1]},
        .items = window->items_address,
        .page_ids = window->items_address + n_lists * sizeof(*window->items),
        .item_tokens = x->chunk_tokens,
        .n_heads = w->n_heads,
        .dim_k = w->dim_k,
        .dim_v = w->dim_v,
        .width = x->width,
        .rope_dims = w->rope_style == KVF_ROPE_STYLE_NONE ? 0
                     : w->rope_dims != 0                  ? w->rope_dims
                                                          : w->dim_k,
        .tokens_a_page = x->pages.tokens_a_page,
        .eps = w->k_norm_eps,
        .dtype = w->dtype,
        .kv_dtype = w->kv_dtype,
        .rope_style = w->rope_style,
    };
    const struct kvf_gpu_shape shape = {
        .kernel = "kvf_rebuild", .n_blocks = rows, .n_threads = KVF_GPU_REBUILD_THREADS};
    void *parameters[] = {&work};
    int status = multiply(x, layer, from, rows, stream);

    return status == KVF_OK ? kvf_gpu_device_launch(x->gpu->device, &shape, parameters, stream)
                            : status;
}

/* The buffer of products and the lists are one for all streams. */
static int behind_all(struct kvf_gpu_x *x, void *wait_event, void *stream)
{
    void *const events[] = {x->windows[0].rebuilt, x->windows[1].rebuilt, x->single.rebuilt,
                            wait_event};
    int status = KVF_OK;

    for (size_t i = 0; i < sizeof(events) / sizeof(events[0]) && status == KVF_OK; i++) {
        if (events[i] != NULL) {
            status = kvf_gpu_device_result(
                x->gpu->device, x->gpu->device->driver.cuStreamWaitEvent(stream, events[i], 0),
                "cuStreamWaitEvent");
        }
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

/* Wait until the device has read a window's lists. */
static int lists_wait(struct kvf_gpu_x *x, const struct window *window)
{
    return kvf_gpu_device_result(x->gpu->device,
                                 x->gpu->device->driver.cuEventSynchronize(window->rebuilt),
                                 "cuEventSynchronize");
}

static void list_set(struct kvf_gpu_x *x, struct window *window, uint32_t n_lists, uint32_t i,
                     const struct kvf_gpu_rebuild_item *item, const uint32_t *pages,
                     uint32_t n_pages)
{
    uint32_t *ids = (uint32_t *)(window->items + n_lists);

    window->items[i] = *item;
    window->items[i].first_page = i * x->pages_a_block;
    memcpy(ids + (size_t)i * x->pages_a_block, pages, n_pages * sizeof(*pages));
}

int kvf_gpu_x_rebuild(struct kvf_gpu_x *x, uint32_t layer, const void *data, uint32_t n_tokens,
                      uint32_t position_first, const uint32_t *pages, uint32_t n_pages,
                      void *stream)
{
    uint32_t tokens_max;
    uint32_t done = 0;
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
    status = behind_all(x, NULL, stream);
    tokens_max = x->blocks_a_window * x->chunk_tokens;
    while (done < n_tokens && status == KVF_OK) {
        uint32_t rows = n_tokens - done < tokens_max ? n_tokens - done : tokens_max;
        uint64_t row_bytes = (uint64_t)x->weights.d_model * kvf_dtype_bytes(x->weights.dtype);

        status = lists_wait(x, &x->single);
        for (uint32_t at = 0, i = 0; at < rows; at += x->chunk_tokens, i++) {
            uint32_t first = (done + at) / x->pages.tokens_a_page;
            struct kvf_gpu_rebuild_item item = {
                .n_tokens = rows - at < x->chunk_tokens ? rows - at : x->chunk_tokens,
                .position_first = position_first + done + at};
            uint32_t n_ids = (item.n_tokens + x->pages.tokens_a_page - 1) / x->pages.tokens_a_page;

            list_set(x, &x->single, x->blocks_a_window, i, &item, pages + first, n_ids);
        }
        if (status == KVF_OK) {
            status = layer_queue(x, layer, &x->single, x->blocks_a_window,
                                 (uint64_t)(uintptr_t)data + done * row_bytes, rows, stream);
        }
        if (status == KVF_OK) {
            status = kvf_gpu_record(x->gpu, x->single.rebuilt, stream);
        }
        done += rows;
    }
    kvf_gpu_device_leave(x->gpu->device);
    return status;
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
        status = kvf_gpu_get(x->gpu, window->region, wanted, window->n, options, window->rebuilt,
                             NULL, w, &request);
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
    uint64_t layer_bytes = (uint64_t)x->blocks_a_window * x->chunk_tokens * x->weights.d_model *
                           kvf_dtype_bytes(x->weights.dtype);
    uint32_t rows = 0;
    int status = lists_wait(x, window);

    for (uint32_t i = 0; i < window->n; i++) {
        const struct kvf_gpu_x_item *item = &items[window->first + i];
        struct kvf_gpu_rebuild_item listed = {.position_first = item->token_start};

        if (statuses[window->first + i] == KVF_OK) {
            listed.n_tokens = item_tokens(x, item);
            rows = i * x->chunk_tokens + listed.n_tokens;
        }
        list_set(x, window, x->blocks_a_window, i, &listed, item->pages, item->n_pages);
    }
    for (uint32_t layer = 0; rows != 0 && layer < x->weights.n_layers && status == KVF_OK;
         layer++) {
        status = layer_queue(x, layer, window, x->blocks_a_window,
                             window->address + layer * layer_bytes, rows, stream);
    }
    return status == KVF_OK ? kvf_gpu_record(x->gpu, window->rebuilt, stream) : status;
}

static int run_windows(struct kvf_gpu_x *x, const struct kvf_gpu_x_item *items, uint32_t n,
                       const struct kvf_get_options *options, void *stream, int32_t *statuses)
{
    uint32_t asked = 0;
    int status = KVF_OK;

    for (uint32_t first = 0, w = 0; first < n && status == KVF_OK;
         first += x->windows[w].n, w = (w + 1) % WINDOWS) {
        /* one window ahead of the one that is rebuilt */
        for (uint32_t ahead = 0; ahead < WINDOWS && asked < n && status == KVF_OK; ahead++) {
            struct window *next = &x->windows[asked / x->blocks_a_window % WINDOWS];

            if (asked > first + x->blocks_a_window) {
                break;
            }
            next->first = asked;
            next->n = n - asked < x->blocks_a_window ? n - asked : x->blocks_a_window;
            status = window_fetch(x, asked / x->blocks_a_window % WINDOWS, items, options);
            asked += next->n;
        }
        if (status == KVF_OK) {
            status = window_wait(x, w, statuses);
        }
        if (status == KVF_OK) {
            status = window_rebuild(x, &x->windows[w], items, statuses, stream);
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
    status = behind_all(x, wait_event, on);
    for (uint32_t i = 0; i < n; i++) {
        statuses_out[i] = KVF_MISS;
    }
    if (status == KVF_OK) {
        status = run_windows(x, items, n, options, on, statuses_out);
    }
    for (uint32_t w = 0; w < WINDOWS; w++) { /* what was asked for before a failure */
        (void)window_wait(x, w, statuses_out);
    }
    if (status == KVF_OK && stream == NULL) {
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
