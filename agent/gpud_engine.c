/* SPDX-License-Identifier: Apache-2.0
 *
 * gpud_engine.c: one engine of a GPU worker: handshake, memory, regions, teardown.
 *
 * All that an engine says is judged before the device sees it. A descriptor or handle that is none
 * is refused by the driver; an address outside of what was opened is refused here, because a kernel
 * that touches one breaks the context of all engines.
 */
#include "agent/gpud.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>

#include "base/clock.h"
#include "base/fd.h"
#include "base/log.h"
#include "transport/segment.h"

/* ----------------------------------------------------------------------------------------------
 * Messages out
 */
void kvf_gpud_engine_break(struct kvf_gpud_engine *engine, const char *why)
{
    if (!engine->is_broken) {
        kvf_log(KVF_LOG_WARNING, "GPU worker: engine %s (connection %llu) is cut off: %s",
                engine->name, (unsigned long long)engine->connection_id, why);
        engine->gpud->counts.cut_off++;
    }
    engine->is_broken = true;
}

void kvf_gpud_engine_send(struct kvf_gpud_engine *engine, const void *data, size_t bytes,
                          const int *fds, uint32_t n_fds)
{
    int status = kvf_seqpacket_send(engine->fd, data, bytes, fds, n_fds);

    if (status == KVF_ERR_BUSY) {
        kvf_gpud_engine_break(engine, "it does not read its channel");
    }
    engine->is_broken = engine->is_broken || status != KVF_OK;
}

void kvf_gpud_engine_answer(struct kvf_gpud_engine *engine, const struct kvf_gpud_head *to,
                            int status, const char *text)
{
    struct kvf_gpud_answer answer = {.type = to->type, .status = status};

    kvf_gpud_head_init(&answer.head, KVF_GPUD_ANSWER, sizeof(answer));
    answer.head.number = to->number;
    if (status < KVF_OK) {
        (void)snprintf(answer.text, sizeof(answer.text), "%.255s", text);
        engine->gpud->counts.refused += status != KVF_ERR_BUSY;
        kvf_log(KVF_LOG_INFO, "GPU worker: engine %s: %s", engine->name, answer.text);
    }
    kvf_gpud_engine_send(engine, &answer, sizeof(answer), NULL, 0);
}

/* ----------------------------------------------------------------------------------------------
 * Handshake
 */
static int flags_make(struct kvf_gpud_engine *engine)
{
    struct kvf_memfd memfd;
    char text[KVF_ERROR_TEXT_BYTES];
    void *base = NULL;
    int status = kvf_memfd_create("kvferry-flags", KVF_GPUD_FLAG_BYTES, KVF_HUGEPAGES_OFF, &memfd);

    if (status != KVF_OK) {
        return status;
    }
    engine->flag_fd = memfd.fd;
    status = kvf_memfd_seal(memfd.fd, F_SEAL_SHRINK | F_SEAL_GROW);
    if (status == KVF_OK) {
        status = kvf_segment_map(memfd.fd, KVF_GPUD_FLAG_BYTES, false, &base, text, sizeof(text));
        engine->flags = base;
    }
    return status;
}

/* What an engine's ring and window take: on the GPU, and as much for the window on the host if it
 * is pinned there. */
static uint64_t scratch_of(const struct kvf_gpud *gpud, const struct kvf_gpud_hello *hello)
{
    uint64_t burst = gpud->burst_bytes != 0 ? gpud->burst_bytes : hello->burst_bytes;
    uint64_t ring = hello->ring_bytes != 0
                        ? hello->ring_bytes
                        : 5 * (burst != 0 ? burst
                                          : KVF_GPU_BURST_BYTES); /* 4, with what they add */

    return ring + (hello->load_window_bytes != 0 ? hello->load_window_bytes : KVF_GPU_WINDOW_BYTES);
}

static int gpu_open(struct kvf_gpud_engine *engine, const struct kvf_gpud_hello *hello)
{
    struct kvf_gpud *gpud = engine->gpud;
    struct kvf_gpu_options options = {
        .struct_bytes = sizeof(options),
        .ring_bytes = hello->ring_bytes,
        .burst_bytes = gpud->burst_bytes != 0 ? gpud->burst_bytes : hello->burst_bytes,
        .load_window_bytes = hello->load_window_bytes,
        .load_group_bytes = hello->load_group_bytes,
        .pinning = hello->pinning,
        .path = KVF_GPU_PATH_ENGINE,
    };
    struct epoll_event event = {.events = EPOLLIN};
    int status = kvf_gpu_open_on(engine->client, &options, gpud->device, &engine->gpu);

    if (status == KVF_OK &&
        epoll_ctl(gpud->epoll_fd, EPOLL_CTL_ADD, kvf_fd(engine->client), &event) != 0) {
        status = KVF_ERR_BUSY;
    }
    return status;
}

/* The handshake ends here: with all that the engine needs, or with why not. */
static void welcome_send(struct kvf_gpud_engine *engine, int status, const char *what)
{
    struct kvf_gpud_welcome welcome = {.flag_bytes = KVF_GPUD_FLAG_BYTES, .status = status};

    kvf_gpud_head_init(&welcome.head, KVF_GPUD_WELCOME, sizeof(welcome));
    if (status != KVF_OK) {
        (void)snprintf(welcome.text, sizeof(welcome.text), "the engine %s (%s)", what,
                       kvf_status_text(status));
        engine->gpud->counts.refused++;
        kvf_gpud_engine_send(engine, &welcome, sizeof(welcome), NULL, 0);
        kvf_gpud_engine_break(engine, welcome.text);
        return;
    }
    welcome.burst_bytes = engine->gpu->options.burst_bytes;
    welcome.profile_fp = engine->gpu->plan.profile_fp;
    kvf_gpud_engine_send(engine, &welcome, sizeof(welcome), &engine->flag_fd, 1);
    engine->state = KVF_GPUD_GREETED;
    engine->deadline_ns = kvf_now_ns() + engine->greet_ns;
}

static void on_hello(struct kvf_gpud_engine *engine, const struct kvf_gpud_hello *hello)
{
    (void)snprintf(engine->name, sizeof(engine->name), "%s", hello->hello.client_name);
    if (strcasecmp(hello->uuid, engine->gpud->device->uuid) != 0) {
        welcome_send(engine, KVF_ERR_MISMATCH, "is on another GPU than the worker");
        return;
    }
    engine->opening = kvf_gpud_opening_new(engine->gpud, engine->socket_path, hello);
    if (engine->opening == NULL) {
        welcome_send(engine, KVF_ERR_BUSY, "comes with too many others");
        return;
    }
    engine->state = KVF_GPUD_OPENING;
}

/* False: there is no room. */
static bool scratch_take(struct kvf_gpud_engine *engine)
{
    struct kvf_gpud *gpud = engine->gpud;
    uint64_t bytes = scratch_of(gpud, &engine->opening->hello);

    if (bytes > engine->scratch_max_bytes ||
        gpud->scratch_bytes > engine->scratch_max_bytes - bytes) {
        return false;
    }
    engine->scratch_bytes = bytes;
    gpud->scratch_bytes += bytes;
    return true;
}

/* Go on when the client is there. */
static void opening_look(struct kvf_gpud_engine *engine)
{
    const char *what = "cannot be a client of the daemon (clients.max, staging.total)";
    int status;

    if (!kvf_gpud_opening_is_done(engine->gpud, engine->opening)) {
        return;
    }
    status = engine->opening->status;
    engine->client = engine->opening->client;
    if (status == KVF_OK && !scratch_take(engine)) {
        what = "asks for a ring and a window that are more than gpu.scratch_total leaves";
        status = KVF_ERR_BUSY;
    }
    if (status == KVF_OK) {
        what = "finds no memory on the GPU, or no kernel";
        status = gpu_open(engine, &engine->opening->hello);
    }
    if (status == KVF_OK) {
        what = "finds no memory for flags";
        status = flags_make(engine);
    }
    welcome_send(engine, status, what);
}

static void on_mapped(struct kvf_gpud_engine *engine)
{
    if (engine->state != KVF_GPUD_GREETED ||
        kvf_memfd_seal(engine->flag_fd, KVF_SEGMENT_SEALS) != KVF_OK) {
        kvf_gpud_engine_break(engine, "the flags cannot be sealed");
        return;
    }
    engine->state = KVF_GPUD_SERVED;
    engine->gpud->counted_ns = 0; /* there is news */
    kvf_gpud_tell(engine->gpud, engine->connection_id, KVF_OK);
    kvf_log(KVF_LOG_INFO, "GPU worker: serves engine %s (connection %llu)", engine->name,
            (unsigned long long)engine->connection_id);
}

/* ----------------------------------------------------------------------------------------------
 * Memory
 */
static struct kvf_gpud_mapped *memory_find(struct kvf_gpud_engine *engine, uint32_t number)
{
    for (uint32_t i = 0; i < KVF_GPUD_MEMORIES_MAX; i++) {
        if (engine->memories[i].is_used && engine->memories[i].number == number) {
            return &engine->memories[i];
        }
    }
    return NULL;
}

static struct kvf_gpud_mapped *memory_new(struct kvf_gpud_engine *engine, uint32_t number)
{
    for (uint32_t i = 0; i < KVF_GPUD_MEMORIES_MAX; i++) {
        if (!engine->memories[i].is_used) {
            engine->memories[i] = (struct kvf_gpud_mapped){.number = number, .is_used = true};
            return &engine->memories[i];
        }
    }
    return NULL;
}

static void memory_drop(struct kvf_gpud_engine *engine, struct kvf_gpud_mapped *memory)
{
    kvf_gpu_import_close(engine->gpud->device, &memory->import);
    engine->memory_bytes -= memory->bytes;
    memory->is_used = false;
}

/* The first message about a memory. */
static int memory_begin(struct kvf_gpud_engine *engine, const struct kvf_gpud_memory *message,
                        struct kvf_gpud_mapped **memory_out)
{
    struct kvf_gpu_device *device = engine->gpud->device;
    struct kvf_gpud_mapped *memory;
    struct kvf_cuda_ipc_handle handle;
    int status;

    if (message->kind == KVF_GPUD_MEMORY_HANDLE && !engine->has_handles) {
        (void)snprintf(device->text, sizeof(device->text),
                       "the daemon has several tenants, and a handle does not say whose memory it "
                       "opens: allocate pages with cuMemCreate and a POSIX descriptor as handle "
                       "type, or use path ENGINE");
        return KVF_ERR_REFUSED;
    }
    memory = memory_new(engine, message->head.number);
    if (memory == NULL) {
        (void)snprintf(device->text, sizeof(device->text),
                       "the pages lie in more than %d allocations: use path ENGINE",
                       KVF_GPUD_MEMORIES_MAX);
        return KVF_ERR_TOO_LARGE;
    }
    if (message->bytes > engine->gpud->device_bytes - engine->memory_bytes) {
        memory->is_used = false; /* addresses are everybody's, and can be used up */
        (void)snprintf(device->text, sizeof(device->text),
                       "the pages lie in more memory than the GPU has: register what is mapped");
        return KVF_ERR_TOO_LARGE;
    }
    memory->n_pieces = message->n_pieces;
    memory->bytes = message->bytes;
    if (message->kind == KVF_GPUD_MEMORY_HANDLE) {
        memcpy(handle.bytes, message->handle, sizeof(handle.bytes));
        status = kvf_gpu_import_handle(device, &handle, message->bytes, &memory->import);
    } else {
        status = kvf_gpu_import_begin(device, message->bytes, &memory->import);
    }
    if (status == KVF_OK) {
        engine->memory_bytes += memory->bytes;
    } else {
        memory->is_used = false;
    }
    *memory_out = memory;
    return status;
}

static void on_memory(struct kvf_gpud_engine *engine, const struct kvf_gpud_memory *message, int fd)
{
    struct kvf_gpu_device *device = engine->gpud->device;
    struct kvf_gpud_mapped *memory = memory_find(engine, message->head.number);
    int status = KVF_OK;

    /* a memory that is whole stays as it is: regions may lie in it */
    if ((memory != NULL) != (message->piece_index != 0) ||
        (memory != NULL && (memory->import.is_open || memory->next_piece != message->piece_index ||
                            memory->n_pieces != message->n_pieces))) {
        kvf_gpud_engine_break(engine, "pieces of memory out of order");
        return;
    }
    if (memory == NULL) {
        status = memory_begin(engine, message, &memory);
    }
    if (status == KVF_OK && message->kind == KVF_GPUD_MEMORY_FD) {
        status = kvf_gpu_import_piece(device, &memory->import, fd, message->piece_bytes);
        if (status != KVF_OK) {
            memory_drop(engine, memory);
        }
    }
    if (status == KVF_OK) {
        memory->next_piece++;
    }
    kvf_gpud_engine_answer(engine, &message->head, status, device->text);
}

static void on_forget(struct kvf_gpud_engine *engine, const struct kvf_gpud_plain *message)
{
    struct kvf_gpud_mapped *memory = memory_find(engine, message->head.number);
    int status = memory == NULL ? KVF_ERR_INVALID : KVF_OK;

    if (memory != NULL && memory->n_regions > 0) {
        status = KVF_ERR_BUSY;
    } else if (memory != NULL) {
        memory_drop(engine, memory);
    }
    kvf_gpud_engine_answer(engine, &message->head, status, "memory that is not there, or in use");
}

/* ----------------------------------------------------------------------------------------------
 * Regions
 */
struct extent {
    uint64_t page_stride, token_stride, head_stride; /* bytes */
    uint64_t n_heads, dim_bytes;
    uint32_t element_bytes;
};

/* Is all that pages name inside of the memory, and aligned as elements are? */
static bool extent_fits(const struct kvf_gpud_register *region, const struct extent *extent,
                        uint64_t offset, uint64_t bytes)
{
    const uint64_t counts[3] = {region->n_pages - 1u, region->tokens_a_page - 1u,
                                extent->n_heads - 1};
    const uint64_t strides[3] = {extent->page_stride, extent->token_stride, extent->head_stride};
    uint64_t last = 0;
    bool fits = offset % extent->element_bytes == 0 &&
                !__builtin_add_overflow(offset, extent->dim_bytes, &last);

    for (uint32_t i = 0; i < 3; i++) {
        uint64_t reach;

        fits = fits && strides[i] % extent->element_bytes == 0 &&
               !__builtin_mul_overflow(counts[i], strides[i], &reach) &&
               !__builtin_add_overflow(last, reach, &last);
    }
    return fits && last <= bytes;
}

static struct extent extent_of(const struct kvf_gpud_engine *engine,
                               const struct kvf_gpud_register *region, uint32_t is_v)
{
    const struct kvf_geometry *geometry = &engine->client->geometry;
    uint32_t element_bytes = engine->gpu->plan.kinds[0].k.element_bytes;

    return (struct extent){
        .page_stride = region->page_stride_bytes[is_v],
        .token_stride = region->token_stride_bytes[is_v],
        .head_stride = region->head_stride_bytes[is_v],
        .n_heads = geometry->n_heads,
        .dim_bytes = (uint64_t)(is_v ? geometry->dim_v : geometry->dim_k) * element_bytes,
        .element_bytes = element_bytes,
    };
}

/* Addresses of all layers here. KVF_OK; KVF_ERR_INVALID. */
static int places_resolve(struct kvf_gpud_engine *engine, const struct kvf_gpud_register *region,
                          struct kvf_gpud_pages *pages, void **layers)
{
    uint32_t n_layers = engine->client->geometry.n_layers;
    uint32_t n_tensors = engine->client->geometry.dim_v != 0 ? 2 : 1;

    if (region->n_places != n_layers * n_tensors || region->n_pages > KVF_GPUD_REGION_PAGES_MAX ||
        (region->n_pages > 1 && region->page_stride_bytes[0] == 0)) {
        return KVF_ERR_INVALID;
    }
    for (uint32_t i = 0; i < region->n_places; i++) {
        struct extent extent = extent_of(engine, region, i >= n_layers);
        struct kvf_gpud_mapped *memory = memory_find(engine, region->places[i].memory);

        if (memory == NULL || !memory->import.is_open ||
            !extent_fits(region, &extent, region->places[i].offset, memory->import.bytes)) {
            return KVF_ERR_INVALID;
        }
        pages->is_in[memory - engine->memories] = true;
        layers[i] = (void *)(uintptr_t)(memory->import.address + region->places[i].offset);
    }
    return KVF_OK;
}

static struct kvf_gpud_pages *region_find(struct kvf_gpud_engine *engine, bool is_used,
                                          uint32_t number)
{
    for (uint32_t i = 0; i < KVF_GPUD_REGIONS_MAX; i++) {
        if (engine->regions[i].is_used == is_used &&
            (!is_used || engine->regions[i].number == number)) {
            return &engine->regions[i];
        }
    }
    return NULL;
}

static struct kvf_tensor_view view_of(const struct kvf_gpud_register *region, uint32_t is_v,
                                      void *const *layers)
{
    return (struct kvf_tensor_view){
        .layers = layers,
        .page_stride_bytes = region->page_stride_bytes[is_v],
        .token_stride_bytes = region->token_stride_bytes[is_v],
        .head_stride_bytes = region->head_stride_bytes[is_v],
    };
}

static void on_register(struct kvf_gpud_engine *engine, const struct kvf_gpud_register *message)
{
    struct kvf_gpud_pages *pages = region_find(engine, false, 0);
    struct kvf_gpu_region_options options = {
        .struct_bytes = sizeof(options),
        .n_pages = message->n_pages,
        .tokens_a_page = message->tokens_a_page,
    };
    void *layers[KVF_GPUD_TENSORS_MAX];
    int status = KVF_ERR_BUSY;

    if (pages != NULL && region_find(engine, true, message->head.number) == NULL) {
        *pages = (struct kvf_gpud_pages){.number = message->head.number,
                                         .tokens_a_page = message->tokens_a_page};
        status = places_resolve(engine, message, pages, layers);
    }
    if (status == KVF_OK) {
        options.k = view_of(message, 0, layers);
        options.v = view_of(message, 1, layers + engine->client->geometry.n_layers);
        status = kvf_gpu_register(engine->gpu, &options, &pages->region);
    }
    if (status == KVF_OK) {
        pages->is_used = true;
        for (uint32_t i = 0; i < KVF_GPUD_MEMORIES_MAX; i++) {
            engine->memories[i].n_regions += pages->is_in[i];
        }
    }
    kvf_gpud_engine_answer(engine, &message->head, status,
                           "pages that reach beyond their memory, that are not aligned, or too "
                           "many regions");
}

static void on_unregister(struct kvf_gpud_engine *engine, const struct kvf_gpud_plain *message)
{
    struct kvf_gpud_pages *pages = region_find(engine, true, message->head.number);
    int status = KVF_ERR_INVALID;

    if (pages != NULL) {
        status = kvf_gpu_unregister(engine->gpu, pages->region);
        for (const struct kvf_gpud_job *job = engine->jobs; job != NULL; job = job->next) {
            assert(status != KVF_OK || job->is_over || job->region != pages->region);
        }
    }
    if (status == KVF_OK) {
        pages->is_used = false;
        for (uint32_t i = 0; i < KVF_GPUD_MEMORIES_MAX; i++) {
            engine->memories[i].n_regions -= pages->is_in[i];
        }
    }
    kvf_gpud_engine_answer(engine, &message->head, status, "no such region, or it is in use");
}

/* ----------------------------------------------------------------------------------------------
 * Messages in
 */
static void on_served(struct kvf_gpud_engine *engine, const union kvf_gpud_message *message,
                      const struct kvf_seqpacket_message *received)
{
    switch (message->head.type) {
    case KVF_GPUD_MEMORY:
        on_memory(engine, &message->memory, received->n_fds != 0 ? received->fds[0] : -1);
        break;
    case KVF_GPUD_FORGET:
        on_forget(engine, &message->plain);
        break;
    case KVF_GPUD_REGISTER:
        on_register(engine, &message->region);
        break;
    case KVF_GPUD_UNREGISTER:
        on_unregister(engine, &message->plain);
        break;
    case KVF_GPUD_SLEEP:
        kvf_gpud_engine_answer(engine, &message->head, kvf_gpu_sleep(engine->gpu), "not asleep");
        break;
    case KVF_GPUD_WAKE:
        kvf_gpud_engine_answer(engine, &message->head, kvf_gpu_wake(engine->gpu), "still asleep");
        break;
    case KVF_GPUD_ITEMS:
        kvf_gpud_job_items(engine, &message->items);
        break;
    case KVF_GPUD_CANCEL:
        kvf_gpud_job_cancel(engine, message->plain.request);
        break;
    case KVF_GPUD_PUT:
    case KVF_GPUD_GET:
        kvf_gpud_job_begin(engine, &message->request);
        break;
    default:
        kvf_gpud_engine_break(engine, "a handshake in the middle");
        break;
    }
}

/* Calls of the driver that take a while, or may: one a turn, and the others have theirs. */
static bool takes_long(uint16_t type)
{
    return type >= KVF_GPUD_MEMORY && type <= KVF_GPUD_WAKE;
}

/* Has it taken too long for its part of the handshake? */
static void greeting_look(struct kvf_gpud_engine *engine)
{
    if ((engine->state == KVF_GPUD_NEW || engine->state == KVF_GPUD_GREETED) &&
        kvf_now_ns() >= engine->deadline_ns) {
        kvf_gpud_engine_break(engine, "it did not greet in time (gpu.timeout)");
    }
}

void kvf_gpud_engine_receive(struct kvf_gpud_engine *engine)
{
    static union kvf_gpud_message message;
    struct kvf_seqpacket_message received;
    const char *why = "";
    bool has_turn = true;

    if (engine->state == KVF_GPUD_OPENING) {
        opening_look(engine);
    }
    for (uint32_t n = 0; n < 256 && has_turn && !engine->is_broken; n++) {
        int status = kvf_seqpacket_recv(engine->fd, message.bytes, sizeof(message.bytes),
                                        &received);
        if (status == KVF_EMPTY) {
            greeting_look(engine); /* now: what came while this process stood still has been read */
            return;
        }
        if (status != KVF_OK) {
            engine->is_broken = true;
            return;
        }
        if (kvf_gpud_check(KVF_GPUD_FROM_ENGINE, &message, received.bytes, received.n_fds, &why) !=
            KVF_OK) {
            kvf_gpud_engine_break(engine, why);
        } else if (message.head.type == KVF_GPUD_HELLO && engine->state == KVF_GPUD_NEW) {
            on_hello(engine, &message.hello);
        } else if (message.head.type == KVF_GPUD_MAPPED) {
            on_mapped(engine);
        } else if (engine->state == KVF_GPUD_SERVED) {
            on_served(engine, &message, &received);
        } else {
            kvf_gpud_engine_break(engine, "it did not wait for the handshake");
        }
        has_turn = !takes_long(message.head.type);
        kvf_seqpacket_message_close(&received);
    }
}

/* ----------------------------------------------------------------------------------------------
 * Birth and death
 */
struct kvf_gpud_engine *kvf_gpud_engine_new(struct kvf_gpud *gpud, int fd,
                                            const struct kvf_gpud_attach *attach)
{
    struct kvf_gpud_engine *engine = calloc(1, sizeof(*engine));

    if (engine == NULL) {
        kvf_fd_close(&fd);
        return NULL;
    }
    engine->gpud = gpud;
    engine->fd = fd;
    engine->flag_fd = -1;
    engine->connection_id = attach->connection_id;
    engine->greet_ns = attach->greet_ms * KVF_NS_PER_MS;
    engine->scratch_max_bytes = attach->scratch_bytes;
    engine->deadline_ns = kvf_now_ns() + engine->greet_ns;
    engine->has_handles = (attach->flags & KVF_GPUD_ATTACH_NO_HANDLES) == 0;
    memcpy(engine->socket_path, attach->socket_path, sizeof(engine->socket_path));
    (void)snprintf(engine->name, sizeof(engine->name), "unnamed");
    return engine;
}

struct kvf_gpud_engine *kvf_gpud_engine_end(struct kvf_gpud_engine *engine)
{
    uint64_t began_ns = kvf_now_ns();
    uint64_t drained_ns;
    uint64_t unmapped_ns;
    uint64_t bytes = 0;

    if (engine->gpu != NULL) {
        kvf_gpu_drain(engine->gpu);
    }
    drained_ns = kvf_now_ns();
    for (uint32_t i = 0; i < KVF_GPUD_MEMORIES_MAX; i++) {
        if (engine->memories[i].is_used) {
            bytes += engine->memories[i].import.bytes;
            memory_drop(engine, &engine->memories[i]);
        }
    }
    unmapped_ns = kvf_now_ns();
    /* the engine's memory is free; what the worker had for it takes longer */
    engine->gpu = kvf_gpu_close(engine->gpu);
    engine->gpud->scratch_bytes -= engine->scratch_bytes;
    kvf_gpud_jobs_free(engine);
    engine->opening = kvf_gpud_opening_drop(engine->gpud, engine->opening);
    kvf_segment_unmap(engine->flags, KVF_GPUD_FLAG_BYTES);
    kvf_fd_close(&engine->flag_fd);
    kvf_gpud_part_from(engine->gpud, engine->fd);
    kvf_gpud_tell(engine->gpud, engine->connection_id, KVF_ERR_DISCONNECTED);
    engine->gpud->counted_ns = 0; /* there is news */
    kvf_log(KVF_LOG_INFO,
            "GPU worker: engine %s has gone: drained in %llu us, %llu MiB unmapped in %llu us, "
            "the rest in %llu us",
            engine->name, (unsigned long long)((drained_ns - began_ns) / KVF_NS_PER_US),
            (unsigned long long)(bytes >> 20),
            (unsigned long long)((unmapped_ns - drained_ns) / KVF_NS_PER_US),
            (unsigned long long)((kvf_now_ns() - unmapped_ns) / KVF_NS_PER_US));
    free(engine);
    return NULL;
}
