/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_client.c: the GPU handle: open and close, regions, requests and their events, sleep and wake.
 *
 * Nothing here or beside it waits for the device but close, sleep and the end of the driver's own
 * calls: work is queued, and kvf_gpu_poll asks events whether it has ended.
 */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client/gpu_internal.h"
#include "codec/codec_gpu_image.h"
#include "codec/codec_layout.h"

#define POLL_PAUSE_NS (20 * KVF_NS_PER_US) /* while the GPU is at work: some 1 MiB of the link */

/* ----------------------------------------------------------------------------------------------
 * Requests and events
 */
void kvf_gpu_say(struct kvf_gpu *gpu, const struct kvf_gpu_request *request, uint8_t kind,
                 uint32_t index, int32_t status, uint8_t tier)
{
    assert(gpu->events_owed > 0 && gpu->n_events < gpu->events_size);
    gpu->events_owed--;
    gpu->events[(gpu->events_first + gpu->n_events++) % gpu->events_size] = (struct kvf_gpu_event){
        .request = request->id,
        .user = request->user,
        .kind = kind,
        .tier = tier,
        .status = status,
        .index = index,
    };
}

void kvf_gpu_item_done(struct kvf_gpu *gpu, struct kvf_gpu_item *item, int32_t status, uint8_t tier)
{
    struct kvf_gpu_request *request = item->request;
    uint32_t index = (uint32_t)(item - request->items);

    assert(!item->is_done);
    item->is_done = true;
    request->n_done++;
    if (status == KVF_OK || status == KVF_EXISTS) {
        request->n_good++;
    } else if (request->failed_status == KVF_OK) {
        request->failed_status = status;
    }
    if (index == 0) {
        request->first_status = status;
    }
    kvf_gpu_say(gpu, request, KVF_GPU_EVENT_BLOCK, index, status, tier);
}

/* Room for `more` events beside those that wait or are still to come. */
static int events_reserve(struct kvf_gpu *gpu, uint32_t more)
{
    uint32_t size = gpu->n_events + gpu->events_owed + more;
    struct kvf_gpu_event *events;

    if (size > gpu->events_size) {
        size += size / 2;
        events = calloc(size, sizeof(*events));
        if (events == NULL) {
            return KVF_ERR_NO_MEMORY;
        }
        for (uint32_t i = 0; i < gpu->n_events; i++) {
            events[i] = gpu->events[(gpu->events_first + i) % gpu->events_size];
        }
        free(gpu->events);
        gpu->events = events;
        gpu->events_size = size;
        gpu->events_first = 0;
    }
    gpu->events_owed += more;
    return KVF_OK;
}

/* Events of a request: a block each, PAGES_FREE, and the last one. */
static uint32_t events_of(uint32_t n)
{
    return n + 2;
}

struct kvf_gpu_request *kvf_gpu_request_new(struct kvf_gpu *gpu, struct kvf_gpu_region *region,
                                            uint32_t n, uint32_t n_pages, uint64_t user)
{
    struct kvf_gpu_request *request;

    if (events_reserve(gpu, events_of(n)) != KVF_OK) {
        return NULL;
    }
    request = calloc(1,
                     sizeof(*request) + n * sizeof(request->items[0]) + n_pages * sizeof(uint32_t));
    if (request == NULL) {
        gpu->events_owed -= events_of(n);
        return NULL;
    }
    request->region = region;
    request->n = n;
    request->user = user;
    request->id = ++gpu->serial;
    for (uint32_t i = 0; i < n; i++) {
        request->items[i].request = request;
    }
    region->n_requests++;
    request->next = gpu->requests;
    gpu->requests = request;
    return request;
}

static void request_free(struct kvf_gpu *gpu, struct kvf_gpu_request *request)
{
    struct kvf_gpu_request **link = &gpu->requests;

    while (*link != request) {
        link = &(*link)->next;
    }
    *link = request->next;
    request->region->n_requests--;
    free(request);
}

void kvf_gpu_request_drop(struct kvf_gpu *gpu, struct kvf_gpu_request *request)
{
    gpu->events_owed -= events_of(request->n);
    request_free(gpu, request);
}

static int32_t request_status(const struct kvf_gpu_request *request)
{
    if (request->n_good == request->n) {
        return KVF_OK;
    }
    if (request->n_good == 0 || (!request->is_put && request->first_status != KVF_OK)) {
        return request->is_put ? request->failed_status : request->first_status;
    }
    return KVF_PARTIAL;
}

void kvf_gpu_requests_end(struct kvf_gpu *gpu)
{
    struct kvf_gpu_request *request = gpu->requests;

    while (request != NULL) {
        struct kvf_gpu_request *next = request->next;

        if (request->is_put && request->n_encoding == 0 && !request->is_freed) {
            request->is_freed = true;
            kvf_gpu_say(gpu, request, KVF_GPU_EVENT_PAGES_FREE, request->n, request->free_status,
                        0);
        }
        if (request->n_done == request->n && request->n_bursts == 0 && !request->sink.is_used &&
            (request->is_freed || !request->is_put)) {
            kvf_gpu_say(gpu, request, KVF_GPU_EVENT_REQUEST, request->n_good,
                        request_status(request), 0);
            gpu->events_owed -= !request->is_put; /* a get frees no pages */
            request_free(gpu, request);
        }
        request = next;
    }
}

static void events_take(struct kvf_gpu *gpu, struct kvf_gpu_event *events_out, uint32_t max,
                        uint32_t *n_out)
{
    for (*n_out = 0; *n_out < max && gpu->n_events > 0; gpu->n_events--) {
        events_out[(*n_out)++] = gpu->events[gpu->events_first];
        gpu->events_first = (gpu->events_first + 1) % gpu->events_size;
    }
}

bool kvf_gpu_key_ok(const struct kvf_key *key)
{
    return key->data != NULL && key->bytes >= KVF_KEY_BYTES_MIN && key->bytes <= KVF_KEY_BYTES_MAX;
}

/* ----------------------------------------------------------------------------------------------
 * The GPU's failure
 */
int kvf_gpu_break(struct kvf_gpu *gpu, int status)
{
    if (!gpu->is_broken) {
        gpu->is_broken = true;
        gpu->is_break_unreported = true;
        kvf_client_log(gpu->client, 0, "%s has failed: %s", gpu->device->name, gpu->device->text);
    }
    return status == KVF_ERR_NO_MEMORY ? status : KVF_ERR_IO;
}

int kvf_gpu_launch_all(struct kvf_gpu *gpu, const struct kvf_gpu_work *work,
                       const struct kvf_gpu_kinds *kinds, const struct kvf_gpu_launch *launches,
                       uint32_t n, void *stream)
{
    int status = KVF_OK;

    for (uint32_t i = 0; i < n && status == KVF_OK; i++) {
        struct kvf_gpu_work one = kinds != NULL ? kvf_gpu_launch_work(work, kinds, launches[i].kind)
                                                : *work;
        uint32_t tensors = launches[i].tensors;
        void *parameters[2] = {&one, &tensors};
        struct kvf_gpu_shape shape = {launches[i].kernel, launches[i].n_blocks,
                                      launches[i].blocks_a_processor, launches[i].n_threads,
                                      launches[i].shared_bytes};

        status = kvf_gpu_device_launch(gpu->device, &shape, parameters, stream);
    }
    return status;
}

/* ----------------------------------------------------------------------------------------------
 * Moving along
 */
static void advance(struct kvf_gpu *gpu)
{
    struct kvf_client *client = gpu->client;
    int status = KVF_OK;

    kvf_client_enter(client);
    kvf_session_tend(client, false);
    kvf_requests_drain(client, true);
    kvf_client_leave(client);
    if (gpu->agent != NULL) {
        kvf_gpu_remote_advance(gpu);
        kvf_gpu_requests_end(gpu);
        return;
    }
    if (gpu->is_awake && !gpu->is_broken) {
        status = kvf_gpu_get_advance(gpu);
        if (status == KVF_OK) {
            status = kvf_gpu_put_advance(gpu);
        }
        kvf_gpu_pins_tend(gpu);
    }
    if (status != KVF_OK) {
        (void)kvf_gpu_break(gpu, status);
    }
    if (gpu->is_broken) {
        kvf_gpu_get_fail(gpu, KVF_ERR_IO);
        kvf_gpu_put_fail(gpu, KVF_ERR_IO);
        (void)kvf_gpu_put_advance(gpu); /* what the daemon has runs to its end */
    }
    kvf_gpu_requests_end(gpu);
}

bool kvf_gpu_is_busy(const struct kvf_gpu *gpu)
{
    for (uint32_t i = 0; i < gpu->n_bursts; i++) {
        if (gpu->bursts[(gpu->burst_first + i) % KVF_GPU_BURSTS_MAX].state <
            KVF_GPU_BURST_SUBMITTED) {
            return true;
        }
    }
    return gpu->groups_in_flight > 0 || gpu->hits != NULL || gpu->cut.item != NULL;
}

static void poll_sleep(struct kvf_gpu *gpu, uint64_t deadline_ns)
{
    struct kvf_client *client = gpu->client;

    if (gpu->agent != NULL) {
        kvf_gpu_remote_sleep(gpu, deadline_ns);
        return;
    }
    if (kvf_gpu_is_busy(gpu)) {
        const struct timespec pause = {.tv_nsec = POLL_PAUSE_NS};

        (void)nanosleep(&pause, NULL);
        return;
    }
    kvf_client_enter(client);
    kvf_session_sleep(client, deadline_ns);
    kvf_client_leave(client);
}

int kvf_gpu_poll(struct kvf_gpu *gpu, struct kvf_gpu_event *events_out, uint32_t max,
                 uint32_t timeout_ms, uint32_t *n_out)
{
    uint64_t deadline_ns = kvf_now_ns() + timeout_ms * KVF_NS_PER_MS;
    int status = KVF_EMPTY;

    if (gpu == NULL) {
        return KVF_ERR_UNSUPPORTED;
    }
    if (events_out == NULL || max == 0 || n_out == NULL) {
        return KVF_ERR_INVALID;
    }
    *n_out = 0;
    if (kvf_gpu_device_enter(gpu->device) != KVF_OK) {
        return KVF_ERR_IO;
    }
    for (;;) {
        advance(gpu);
        events_take(gpu, events_out, max, n_out);
        if (*n_out > 0) {
            status = KVF_OK;
        } else if (gpu->is_break_unreported) {
            gpu->is_break_unreported = false;
            status = KVF_ERR_IO;
        }
        if (status != KVF_EMPTY || kvf_now_ns() >= deadline_ns) {
            break;
        }
        poll_sleep(gpu, deadline_ns);
    }
    kvf_gpu_device_leave(gpu->device);
    kvf_client_enter(gpu->client);
    kvf_session_arm(gpu->client);
    kvf_client_leave(gpu->client);
    return status;
}

int kvf_gpu_cancel(struct kvf_gpu *gpu, uint64_t request)
{
    struct kvf_gpu_request *found;

    if (gpu == NULL) {
        return KVF_ERR_UNSUPPORTED;
    }
    for (found = gpu->requests; found != NULL && found->id != request; found = found->next) {
    }
    if (found == NULL) {
        return KVF_ERR_INVALID;
    }
    if (!found->is_canceled) {
        found->is_canceled = true;
        if (gpu->agent != NULL) {
            kvf_gpu_remote_cancel(gpu, found);
        } else if (found->is_put) {
            kvf_gpu_put_cancel(gpu, found);
        } else {
            kvf_gpu_get_cancel(gpu, found);
        }
    }
    return KVF_OK;
}

/* ----------------------------------------------------------------------------------------------
 * Sleep and wake
 */
static void memory_free(struct kvf_gpu *gpu)
{
    kvf_gpu_put_sleep(gpu);
    kvf_gpu_get_sleep(gpu);
    kvf_gpu_pins_drop(gpu, false);
    (void)gpu->device->driver.cuMemFree(gpu->given_address);
    gpu->given_address = 0;
    gpu->is_awake = false;
}

/* Is there a kernel for what layers of this kind decode by? */
static bool kind_decodes(const struct kvf_gpu *gpu, struct kvf_gpu_work work, uint32_t kind)
{
    struct kvf_gpu_launch launches[KVF_GPU_LAUNCHES_MAX];

    memcpy(work.tensors, gpu->kinds.tensors[kind], sizeof(work.tensors));
    return kvf_gpu_decode(&work, work.tensors[0].codec, launches) != 0 &&
           (work.has_v == 0 || kvf_gpu_decode(&work, work.tensors[1].codec, launches) != 0);
}

/* Is all that the plan takes there? Where no kernel decodes there is no use for this library; what
 * none encodes the processor does, from copied pages. */
static int find_kernels(const struct kvf_gpu *gpu)
{
    struct kvf_gpu_launch launches[KVF_GPU_LAUNCHES_MAX];
    const char *profile = gpu->plan.profile->name;
    const struct kvf_gpu_work work = {
        .n_parts = kvf_gpu_parts_a_block(gpu),
        .n_blocks = 1,
        .n_layers = gpu->plan.geometry.n_layers,
        .tokens_a_page = 1,
        .has_v = kvf_plan_has_v(&gpu->plan),
        .tokens_max = gpu->plan.geometry.chunk_tokens,
    };

    for (uint32_t kind = 0; kind < gpu->kinds.n; kind++) {
        if (!kind_decodes(gpu, work, kind)) {
            kvf_client_log(gpu->client, 0, "no kernel decodes profile \"%s\" in this geometry",
                           profile);
            return KVF_ERR_UNSUPPORTED;
        }
    }
    if (kvf_gpu_encode(&work, &gpu->kinds, launches) == 0) {
        kvf_client_log(gpu->client, 1,
                       "no kernel encodes profile \"%s\" in this geometry: the processor does, "
                       "which is slower",
                       profile);
    }
    return KVF_OK;
}

/* ----------------------------------------------------------------------------------------------
 * What a profile has measured
 */
enum {
    GIVEN_ARRAYS = 4, /* means of K, V, lists of K, V */
};

static const struct kvf_plan_array *given_array(const struct kvf_gpu *gpu, uint32_t i)
{
    return i < 2 ? &gpu->plan.means[i] : &gpu->plan.splits[i - 2];
}

/* Of one layer of an array. */
static uint64_t given_bytes(const struct kvf_gpu *gpu, uint32_t i)
{
    const struct kvf_geometry *geometry = &gpu->plan.geometry;
    uint64_t dim = i % 2 != 0 ? geometry->dim_v : geometry->dim_k;

    return geometry->n_heads * (i < 2 ? dim * sizeof(uint16_t) : (dim + 7) / 8);
}

void kvf_gpu_part_given(const struct kvf_gpu *gpu, struct kvf_gpu_part *part)
{
    for (uint32_t i = part->is_v; i < GIVEN_ARRAYS; i += 2) {
        uint64_t *to = i < 2 ? &part->mean : &part->split;

        if (gpu->given_layer_bytes[i] != 0) {
            *to = gpu->given_address + gpu->given_offsets[i] +
                  part->layer * gpu->given_layer_bytes[i];
        }
    }
}

/* Copies that are waited for: the engine's streams know nothing of them. */
static int given_copy(struct kvf_gpu *gpu)
{
    int result = 0;

    for (uint32_t i = 0; i < GIVEN_ARRAYS; i++) {
        for (uint32_t layer = 0;
             gpu->given_layer_bytes[i] != 0 && layer < gpu->plan.geometry.n_layers && result == 0;
             layer++) {
            result = gpu->device->driver.cuMemcpyHtoDAsync(
                gpu->given_address + gpu->given_offsets[i] + layer * gpu->given_layer_bytes[i],
                kvf_plan_array_at(given_array(gpu, i), layer), given_bytes(gpu, i),
                gpu->put_stream);
        }
    }
    if (result == 0) {
        result = gpu->device->driver.cuStreamSynchronize(gpu->put_stream);
    }
    return kvf_gpu_device_result(gpu->device, result, "copies of a profile");
}

/* The profile's arrays to the device. */
static int given_take(struct kvf_gpu *gpu)
{
    uint64_t bytes = 0;
    int status;

    for (uint32_t i = 0; i < GIVEN_ARRAYS; i++) {
        bool is_given = given_array(gpu, i)->first != NULL;

        gpu->given_offsets[i] = bytes;
        gpu->given_layer_bytes[i] = is_given ? kvf_gpu_align(given_bytes(gpu, i)) : 0;
        bytes += gpu->plan.geometry.n_layers * gpu->given_layer_bytes[i];
    }
    if (bytes == 0) {
        return KVF_OK;
    }
    status = kvf_gpu_device_result(gpu->device,
                                   gpu->device->driver.cuMemAlloc(&gpu->given_address, bytes),
                                   "cuMemAlloc for a profile");
    return status == KVF_OK ? given_copy(gpu) : status;
}

/* Memory and facts for the plan in force. */
static int memory_take(struct kvf_gpu *gpu)
{
    int status;

    gpu->plan = gpu->client->plan;
    gpu->is_fixed = kvf_codec_plan_is_fixed(&gpu->plan);
    gpu->block_bytes = (uint64_t)gpu->plan.geometry.n_layers * gpu->plan.geometry.n_heads *
                       ((uint64_t)gpu->plan.kinds[0].k.dim + gpu->plan.kinds[0].v.dim) *
                       gpu->plan.kinds[0].k.element_bytes * gpu->plan.geometry.chunk_tokens;
    kvf_gpu_kinds_fill(&gpu->plan, &gpu->kinds);
    kvf_gpu_kinds_fill_raw(&gpu->plan, &gpu->raw_kinds);
    status = find_kernels(gpu);
    if (status != KVF_OK) {
        return status;
    }
    status = kvf_gpu_put_wake(gpu);
    if (status == KVF_OK) {
        status = kvf_gpu_get_wake(gpu);
    }
    if (status == KVF_OK) {
        status = given_take(gpu);
    }
    gpu->is_awake = true;
    if (status != KVF_OK) {
        kvf_client_log(gpu->client, 1, "no room for blocks on the GPU: %s", gpu->device->text);
        memory_free(gpu);
    }
    return status;
}

int kvf_gpu_begin(struct kvf_gpu *gpu)
{
    advance(gpu);
    if (gpu->is_broken) {
        return KVF_ERR_IO;
    }
    if (!kvf_session_is_live(gpu->client)) {
        return kvf_session_down_status(gpu->client);
    }
    if (!gpu->is_awake) {
        return KVF_ERR_BUSY;
    }
    if (gpu->agent != NULL) {
        return kvf_gpu_remote_is_up(gpu) ? KVF_OK : KVF_ERR_DISCONNECTED;
    }
    if (gpu->plan.profile_fp != gpu->client->plan.profile_fp) {
        /* the daemon that came back allows another profile than the one before */
        if (gpu->requests != NULL) {
            return KVF_ERR_BUSY;
        }
        memory_free(gpu);
        return memory_take(gpu);
    }
    return KVF_OK;
}

int kvf_gpu_sleep(struct kvf_gpu *gpu)
{
    int status = KVF_OK;

    if (gpu == NULL) {
        return KVF_ERR_UNSUPPORTED;
    }
    if (kvf_gpu_device_enter(gpu->device) != KVF_OK) {
        return KVF_ERR_IO;
    }
    advance(gpu);
    if (gpu->requests != NULL) {
        status = KVF_ERR_BUSY;
    } else if (gpu->is_awake && gpu->agent != NULL) {
        kvf_gpu_remote_sleep_memory(gpu);
    } else if (gpu->is_awake) {
        memory_free(gpu);
    }
    kvf_gpu_device_leave(gpu->device);
    return status;
}

int kvf_gpu_wake(struct kvf_gpu *gpu)
{
    int status = KVF_OK;

    if (gpu == NULL) {
        return KVF_ERR_UNSUPPORTED;
    }
    if (gpu->is_broken || kvf_gpu_device_enter(gpu->device) != KVF_OK) {
        return KVF_ERR_IO;
    }
    if (!gpu->is_awake) {
        status = gpu->agent != NULL ? kvf_gpu_remote_wake_memory(gpu) : memory_take(gpu);
    }
    kvf_gpu_device_leave(gpu->device);
    return status;
}

/* ----------------------------------------------------------------------------------------------
 * Regions
 */
static bool layers_copy(uint64_t **layers_out, const struct kvf_tensor_view *view,
                        uint32_t n_layers)
{
    *layers_out = calloc(n_layers, sizeof(**layers_out));
    for (uint32_t i = 0; *layers_out != NULL && i < n_layers; i++) {
        (*layers_out)[i] = (uint64_t)(uintptr_t)view->layers[i];
    }
    return *layers_out != NULL;
}

static struct kvf_gpu_pages strides_of(const struct kvf_tensor_view *view)
{
    return (struct kvf_gpu_pages){view->page_stride_bytes, view->token_stride_bytes,
                                  view->head_stride_bytes};
}

static struct kvf_gpu_region *region_free(struct kvf_gpu_region *region)
{
    if (region != NULL) {
        free(region->layers[0]);
        free(region->layers[1]);
        free(region->seen);
        free(region);
    }
    return NULL;
}

/* Let the worker have a region, in the device's context. */
static int region_share(struct kvf_gpu *gpu, struct kvf_gpu_region *region)
{
    int status = kvf_gpu_device_enter(gpu->device);

    if (status == KVF_OK) {
        status = kvf_gpu_remote_register(gpu, region);
        kvf_gpu_device_leave(gpu->device);
    }
    return status;
}

int kvf_gpu_register(struct kvf_gpu *gpu, const struct kvf_gpu_region_options *options,
                     struct kvf_gpu_region **region_out)
{
    struct kvf_gpu_region *region;
    uint32_t n_layers;
    bool has_v;

    if (gpu == NULL) {
        return KVF_ERR_UNSUPPORTED;
    }
    n_layers = gpu->client->geometry.n_layers;
    has_v = gpu->client->geometry.dim_v != 0;
    if (options == NULL || options->struct_bytes != sizeof(*options) || options->n_pages == 0 ||
        options->tokens_a_page == 0 || options->reserved != 0 || options->k.layers == NULL ||
        (has_v && options->v.layers == NULL) || region_out == NULL) {
        return KVF_ERR_INVALID;
    }
    region = calloc(1, sizeof(*region));
    if (region == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    region->n_pages = options->n_pages;
    region->tokens_a_page = options->tokens_a_page;
    region->seen = calloc((options->n_pages + 63u) / 64, sizeof(*region->seen));
    region->strides[0] = strides_of(&options->k);
    if (region->seen == NULL || !layers_copy(&region->layers[0], &options->k, n_layers) ||
        (has_v && !layers_copy(&region->layers[1], &options->v, n_layers))) {
        region_free(region);
        return KVF_ERR_NO_MEMORY;
    }
    if (has_v) {
        region->strides[1] = strides_of(&options->v);
    }
    if (gpu->agent != NULL && gpu->is_awake) {
        int status = region_share(gpu, region);

        if (status != KVF_OK) {
            region_free(region);
            return status;
        }
    }
    region->next = gpu->regions;
    gpu->regions = region;
    *region_out = region;
    return KVF_OK;
}

int kvf_gpu_unregister(struct kvf_gpu *gpu, struct kvf_gpu_region *region)
{
    struct kvf_gpu_region **link;

    if (gpu == NULL) {
        return KVF_ERR_UNSUPPORTED;
    }
    for (link = &gpu->regions; *link != NULL && *link != region; link = &(*link)->next) {
    }
    if (*link == NULL) {
        return KVF_ERR_INVALID;
    }
    if (region->n_requests > 0) {
        return KVF_ERR_BUSY;
    }
    if (gpu->agent != NULL && kvf_gpu_device_enter(gpu->device) == KVF_OK) {
        int status = kvf_gpu_remote_unregister(gpu, region);

        kvf_gpu_device_leave(gpu->device);
        if (status != KVF_OK) {
            return status;
        }
    }
    *link = region->next;
    region_free(region);
    return KVF_OK;
}

bool kvf_gpu_pages_mark(struct kvf_gpu_region *region, const uint32_t *pages, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        uint64_t bit = UINT64_C(1) << pages[i] % 64;

        if (pages[i] >= region->n_pages || (region->seen[pages[i] / 64] & bit) != 0) {
            kvf_gpu_pages_unmark(region, pages, i);
            return false;
        }
        region->seen[pages[i] / 64] |= bit;
    }
    return true;
}

void kvf_gpu_pages_unmark(struct kvf_gpu_region *region, const uint32_t *pages, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        region->seen[pages[i] / 64] &= ~(UINT64_C(1) << pages[i] % 64);
    }
}

/* ----------------------------------------------------------------------------------------------
 * Open and close
 */
static bool options_ok(const struct kvf_client *client, const struct kvf_gpu_options *options)
{
    return client != NULL && options != NULL && options->struct_bytes == sizeof(*options) &&
           (options->flags & ~KVF_GPU_NO_TIMES) == 0 && options->reserved == 0 &&
           options->path <= KVF_GPU_PATH_AGENT && options->pinning <= KVF_GPU_PIN_WINDOW &&
           client->has_geometry && client->hello.shard != KVF_SHARD_NONE;
}

static int streams_create(struct kvf_gpu *gpu)
{
    struct {
        void **stream;
        enum kvf_gpu_priority priority;
    } streams[] = {{&gpu->put_stream, KVF_GPU_PRIORITY_LOW},
                   {&gpu->up_stream, KVF_GPU_PRIORITY_HIGH},
                   {&gpu->out_stream, KVF_GPU_PRIORITY_LOW},
                   {&gpu->in_stream, KVF_GPU_PRIORITY_HIGH},
                   {&gpu->get_stream, KVF_GPU_PRIORITY_HIGH}};
    int status = KVF_OK;

    for (size_t i = 0; i < sizeof(streams) / sizeof(streams[0]) && status == KVF_OK; i++) {
        status = kvf_gpu_stream_create(gpu->device, streams[i].priority, streams[i].stream);
    }
    return status;
}

/* Everything but memory. */
static int device_start(struct kvf_gpu *gpu, char *text, size_t text_bytes)
{
    struct kvf_gpu_choice choice = {.uuid = gpu->options.device_uuid,
                                    .ordinal = (int)gpu->options.device_number - 1};
    bool is_agent = gpu->options.path == KVF_GPU_PATH_AGENT;
    int status = KVF_OK;

    if (kvf_gpu_images[0].name == NULL && !is_agent) {
        snprintf(text, text_bytes, "this build has no kernels (it was made without nvcc)");
        return KVF_ERR_UNSUPPORTED;
    }
    if (gpu->device == NULL) {
        status = kvf_gpu_device_open(&choice, &gpu->device, text, text_bytes);
    }
    if (status != KVF_OK) {
        return status;
    }
    for (const struct kvf_gpu_image *image = kvf_gpu_images;
         status == KVF_OK && image->name != NULL && !gpu->is_device_lent && !is_agent; image++) {
        status = kvf_gpu_device_load(gpu->device, image->fatbin);
    }
    if (status != KVF_OK || kvf_gpu_device_enter(gpu->device) != KVF_OK) {
        snprintf(text, text_bytes, "%s", gpu->device->text);
        return status != KVF_OK ? status : KVF_ERR_IO;
    }
    if (status == KVF_OK) {
        status = streams_create(gpu);
    }
    if (status != KVF_OK) {
        snprintf(text, text_bytes, "%s", gpu->device->text);
    } else if (is_agent) {
        status = kvf_gpu_remote_open(gpu, text, text_bytes);
    }
    kvf_gpu_device_leave(gpu->device);
    return status;
}

/* Under MPS streams of a context share so few ways to the device that what is queued on one of ours
 * stands behind steps of the engine's, unless CUDA was told to have more before it began. */
static void mps_warn(const struct kvf_gpu *gpu)
{
    if (gpu->device->is_mps && getenv("CUDA_DEVICE_MAX_CONNECTIONS") == NULL) {
        kvf_client_log(gpu->client, 1,
                       "MPS is at work and CUDA_DEVICE_MAX_CONNECTIONS is not set: blocks may wait "
                       "behind all that the engine has queued; set it to 32 before the engine "
                       "starts");
    }
}

/* Say which path is taken, to people and to the daemon. */
static void path_say(struct kvf_gpu *gpu)
{
    static const char *const pinnings[] = {"window", "lazy", "eager"};
    struct kvf_client *client = gpu->client;

    if (!gpu->is_device_lent) {
        mps_warn(gpu);
    }
    if (gpu->agent != NULL) {
        kvf_client_log(client, 2,
                       "GPU %s %s: path AGENT, as asked: the daemon's worker encodes, bursts of "
                       "%llu MiB of KV",
                       gpu->device->name, gpu->device->uuid,
                       (unsigned long long)(gpu->options.burst_bytes >> 20));
        return;
    }
    kvf_client_log(client, 2,
                   "GPU %s %s: path ENGINE%s: encodes in this process, bursts of %llu MiB of KV, "
                   "pinning \"%s\"",
                   gpu->device->name, gpu->device->uuid,
                   gpu->options.path == KVF_GPU_PATH_AUTO ? ", the default" : ", as asked",
                   (unsigned long long)(gpu->options.burst_bytes >> 20),
                   pinnings[gpu->options.pinning]);
    if (!gpu->is_device_lent) {
        (void)kvf_session_say_gpu(client, KVF_GPU_PATH_ENGINE, gpu->device->uuid);
    }
}

int kvf_gpu_open_on(struct kvf_client *client, const struct kvf_gpu_options *options,
                    struct kvf_gpu_device *device, struct kvf_gpu **gpu_out)
{
    char text[KVF_GPU_TEXT_BYTES] = "";
    struct kvf_gpu *gpu;
    int status;

    if (gpu_out == NULL || !options_ok(client, options)) {
        return KVF_ERR_INVALID;
    }
    gpu = calloc(1, sizeof(*gpu));
    if (gpu == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    gpu->client = client;
    gpu->options = *options;
    gpu->device = device;
    gpu->is_timed = (options->flags & KVF_GPU_NO_TIMES) == 0;
    gpu->is_device_lent = device != NULL;
    gpu->hits_tail = &gpu->hits;
    if (strcmp(kvf_version(), KVF_GPU_CLIENT_VERSION) != 0) {
        snprintf(text, sizeof(text), "libkvferry %s does not fit libkvferry_gpu %s", kvf_version(),
                 KVF_GPU_CLIENT_VERSION);
        status = KVF_ERR_VERSION;
    } else {
        status = device_start(gpu, text, sizeof(text));
    }
    if (status != KVF_OK) {
        kvf_client_log(client, 0, "no GPU: %s", text);
    } else if (gpu->agent == NULL) {
        status = kvf_gpu_wake(gpu);
    }
    if (status != KVF_OK) {
        kvf_gpu_close(gpu);
        return status;
    }
    path_say(gpu);
    *gpu_out = gpu;
    return KVF_OK;
}

int kvf_gpu_open(struct kvf_client *client, const struct kvf_gpu_options *options,
                 struct kvf_gpu **gpu_out)
{
    return kvf_gpu_open_on(client, options, NULL, gpu_out);
}

static void streams_do(const struct kvf_gpu *gpu, int (*what)(void *stream))
{
    void *streams[] = {gpu->put_stream, gpu->up_stream, gpu->out_stream, gpu->in_stream,
                       gpu->get_stream};

    for (size_t i = 0; i < sizeof(streams) / sizeof(streams[0]); i++) {
        if (streams[i] != NULL) {
            (void)what(streams[i]);
        }
    }
}

void kvf_gpu_drain(struct kvf_gpu *gpu)
{
    const struct kvf_gpu_driver *driver = &gpu->device->driver;

    for (uint32_t i = 0; i < gpu->n_bursts; i++) {
        struct kvf_gpu_burst *burst = &gpu->bursts[(gpu->burst_first + i) % KVF_GPU_BURSTS_MAX];

        (void)driver->cuEventSynchronize(burst->encoded);
        (void)driver->cuEventSynchronize(burst->copied);
    }
    for (uint32_t i = 0; i < gpu->groups_in_flight; i++) {
        uint32_t at = (gpu->group_first + i) % gpu->n_groups;

        (void)driver->cuEventSynchronize(gpu->groups[at].decoded);
    }
    streams_do(gpu, driver->cuStreamSynchronize);
}

struct kvf_gpu *kvf_gpu_close(struct kvf_gpu *gpu)
{
    if (gpu == NULL) {
        return NULL;
    }
    if (gpu->device != NULL) {
        (void)kvf_gpu_device_enter(gpu->device);
        if (gpu->agent != NULL) {
            kvf_gpu_remote_close(gpu);
        } else {
            kvf_gpu_drain(gpu);
        }
        streams_do(gpu, gpu->device->driver.cuStreamSynchronize);
        streams_do(gpu, gpu->device->driver.cuStreamDestroy);
        kvf_gpu_get_fail(gpu, KVF_ERR_CANCELED);
        kvf_gpu_put_fail(gpu, KVF_ERR_CANCELED);
        memory_free(gpu);
        kvf_gpu_pins_drop(gpu, true);
        if (gpu->client->session != NULL) {
            gpu->client->session->is_device_asked = false;
            gpu->client->session->is_device_over = true;
        }
        kvf_gpu_device_leave(gpu->device);
        if (!gpu->is_device_lent) {
            kvf_gpu_device_close(gpu->device);
        }
    }
    while (gpu->requests != NULL) {
        request_free(gpu, gpu->requests);
    }
    while (gpu->regions != NULL) {
        struct kvf_gpu_region *region = gpu->regions;

        gpu->regions = region->next;
        region_free(region);
    }
    free(gpu->events);
    free(gpu);
    return NULL;
}
