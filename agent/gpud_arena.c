/* SPDX-License-Identifier: Apache-2.0
 *
 * gpud_arena.c: pieces of device memory and copies in a GPU worker.
 */
#include "agent/gpud_arena.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/fd.h"
#include "base/log.h"
#include "base/status.h"
#include "gpu/piece.h"
#include "transport/gpu_proto.h"

enum {
    PIECES_MAX = 4096,
    COPIES_MAX = 64, /* in flight: twice what a daemon has */
};

struct piece {
    uint32_t id; /* 0: none */
    struct kvf_gpu_piece memory;
};

struct copy {
    uint64_t number; /* 0: none */
    void *done;      /* event */
};

/* An answer that found the socket full. */
struct answer {
    struct kvf_gpud_made made;
    int fd;
    bool is_owed;
};

struct kvf_gpud_arena {
    struct kvf_gpu_device *device;
    kvf_gpud_arena_send_fn send;
    void *send_ctx;
    uint8_t *window;
    uint64_t window_bytes;
    bool is_pinned;
    void *streams[2]; /* out, in */
    struct piece *pieces;
    struct copy copies[COPIES_MAX];
    uint32_t n_copies;
    struct answer answer;
};

/* ---- open and close -------------------------------------------------------------------------- */

struct kvf_gpud_arena *kvf_gpud_arena_open(struct kvf_gpu_device *device,
                                           kvf_gpud_arena_send_fn send, void *send_ctx)
{
    struct kvf_gpud_arena *arena = calloc(1, sizeof(*arena));

    if (arena == NULL) {
        return NULL;
    }
    arena->device = device;
    arena->send = send;
    arena->send_ctx = send_ctx;
    arena->answer.fd = -1;
    arena->pieces = calloc(PIECES_MAX, sizeof(*arena->pieces));
    if (arena->pieces == NULL) {
        free(arena);
        return NULL;
    }
    return arena;
}

struct kvf_gpud_arena *kvf_gpud_arena_close(struct kvf_gpud_arena *arena)
{
    const struct kvf_gpu_driver *driver;

    if (arena == NULL) {
        return NULL;
    }
    driver = &arena->device->driver;
    for (int i = 0; i < 2; i++) {
        if (arena->streams[i] != NULL) {
            (void)driver->cuStreamSynchronize(arena->streams[i]);
            (void)driver->cuStreamDestroy(arena->streams[i]);
        }
    }
    for (uint32_t i = 0; i < COPIES_MAX; i++) {
        if (arena->copies[i].done != NULL) {
            (void)driver->cuEventDestroy(arena->copies[i].done);
        }
    }
    for (uint32_t i = 0; i < PIECES_MAX; i++) {
        kvf_gpu_piece_close(arena->device, &arena->pieces[i].memory);
    }
    if (arena->is_pinned) {
        kvf_gpu_unpin(arena->device, arena->window);
    }
    if (arena->window != NULL) {
        (void)munmap(arena->window, arena->window_bytes);
    }
    kvf_fd_close(&arena->answer.fd);
    free(arena->pieces);
    free(arena);
    return NULL;
}

/* ---- messages -------------------------------------------------------------------------------- */

static int on_start(struct kvf_gpud_arena *arena, const struct kvf_gpud_arena_message *message,
                    int fd)
{
    void *window;
    int status = KVF_OK;

    if (arena->window != NULL || message->bytes == 0 || message->bytes > KVF_GPUD_WINDOW_MAX) {
        return KVF_ERR_PROTOCOL;
    }
    window = mmap(NULL, message->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (window == MAP_FAILED) {
        return KVF_ERR_NO_MEMORY;
    }
    arena->window = window;
    arena->window_bytes = message->bytes;
    arena->is_pinned = kvf_gpu_pin(arena->device, window, message->bytes, false) == KVF_OK;
    if (!arena->is_pinned) {
        kvf_log(KVF_LOG_WARNING, "the window is not pinned, copies will be slower: %s",
                arena->device->text);
    }
    for (int i = 0; i < 2 && status == KVF_OK; i++) {
        status = kvf_gpu_stream_create(arena->device, KVF_GPU_PRIORITY_LOW, &arena->streams[i]);
    }
    for (uint32_t i = 0; i < COPIES_MAX && status == KVF_OK; i++) {
        status = kvf_gpu_event_create(arena->device, &arena->copies[i].done);
    }
    return status;
}

static struct piece *piece_find(struct kvf_gpud_arena *arena, uint32_t id)
{
    struct piece *piece = &arena->pieces[id % PIECES_MAX];

    return id != 0 && piece->id == id ? piece : NULL;
}

/* The answer to MAKE, now or when there is room. */
static int answer_send(struct kvf_gpud_arena *arena)
{
    struct answer *answer = &arena->answer;
    int status = arena->send(arena->send_ctx, &answer->made, sizeof(answer->made), &answer->fd,
                             answer->fd >= 0 ? 1 : 0);

    if (status == KVF_ERR_BUSY) {
        return KVF_EMPTY;
    }
    answer->is_owed = false;
    kvf_fd_close(&answer->fd);
    return status;
}

static int on_make(struct kvf_gpud_arena *arena, const struct kvf_gpud_arena_message *message)
{
    struct piece *piece = &arena->pieces[message->head.number % PIECES_MAX];
    struct answer *answer = &arena->answer;
    int status;

    if (arena->window == NULL || message->head.number == 0 || piece->id != 0 || answer->is_owed) {
        return KVF_ERR_PROTOCOL;
    }
    status = kvf_gpu_piece_make(arena->device, message->bytes, &piece->memory, &answer->fd);
    if (status == KVF_OK) {
        piece->id = message->head.number;
    } else {
        kvf_log(KVF_LOG_WARNING, "no piece of %llu MiB of device memory: %s",
                (unsigned long long)(message->bytes >> 20), arena->device->text);
    }
    answer->is_owed = true;
    answer->made = (struct kvf_gpud_made){.status = status};
    kvf_gpud_head_init(&answer->made.head, KVF_GPUD_ARENA_MADE, sizeof(answer->made));
    answer->made.head.number = message->head.number;
    status = answer_send(arena);
    return status == KVF_EMPTY ? KVF_OK : status;
}

static int on_drop(struct kvf_gpud_arena *arena, const struct kvf_gpud_arena_message *message)
{
    struct piece *piece = piece_find(arena, message->head.number);
    int result = KVF_CUDA_SUCCESS;

    if (piece == NULL) {
        return KVF_ERR_PROTOCOL;
    }
    /* no copy of it is under way, but a driver may have its own ideas of when one has ended */
    for (int i = 0; i < 2 && result == KVF_CUDA_SUCCESS; i++) {
        result = arena->device->driver.cuStreamSynchronize(arena->streams[i]);
    }
    kvf_gpu_piece_close(arena->device, &piece->memory);
    piece->id = 0;
    return kvf_gpu_device_result(arena->device, result, "cuStreamSynchronize");
}

static bool range_ok(uint64_t offset, uint64_t bytes, uint64_t end)
{
    return bytes != 0 && offset <= end && bytes <= end - offset;
}

static int on_copy(struct kvf_gpud_arena *arena, const struct kvf_gpud_copy *message)
{
    const struct kvf_gpu_driver *driver = &arena->device->driver;
    struct piece *piece = piece_find(arena, message->head.number);
    struct copy *copy = arena->copies;
    void *stream = arena->streams[message->is_in != 0];
    int result;

    if (piece == NULL || message->copy == 0 || message->is_in > 1 ||
        arena->n_copies == COPIES_MAX ||
        !range_ok(message->piece_offset, message->bytes, piece->memory.bytes) ||
        !range_ok(message->window_offset, message->bytes, arena->window_bytes)) {
        return KVF_ERR_PROTOCOL;
    }
    while (copy->number != 0) {
        copy++;
    }
    if (message->is_in != 0) {
        result = driver->cuMemcpyHtoDAsync(piece->memory.address + message->piece_offset,
                                           arena->window + message->window_offset, message->bytes,
                                           stream);
    } else {
        result = driver->cuMemcpyDtoHAsync(arena->window + message->window_offset,
                                           piece->memory.address + message->piece_offset,
                                           message->bytes, stream);
    }
    if (result == KVF_CUDA_SUCCESS) {
        result = driver->cuEventRecord(copy->done, stream);
    }
    if (result == KVF_CUDA_SUCCESS) {
        copy->number = message->copy;
        arena->n_copies++;
    }
    return kvf_gpu_device_result(arena->device, result, "a copy of the tier");
}

int kvf_gpud_arena_message(struct kvf_gpud_arena *arena, const void *data, size_t bytes,
                           const int *fds, uint32_t n_fds)
{
    struct kvf_gpud_arena_message message;
    struct kvf_gpud_copy copy;
    struct kvf_gpud_head head;

    if (bytes < sizeof(head)) {
        return KVF_ERR_PROTOCOL;
    }
    memcpy(&head, data, sizeof(head));
    if (head.magic != KVF_GPUD_MAGIC || head.bytes != bytes || head.reserved != 0 ||
        n_fds != (head.type == KVF_GPUD_ARENA_START ? 1u : 0u)) {
        return KVF_ERR_PROTOCOL;
    }
    if (head.type == KVF_GPUD_COPY && bytes == sizeof(copy)) {
        memcpy(&copy, data, sizeof(copy));
        return on_copy(arena, &copy);
    }
    if (bytes != sizeof(message)) {
        return KVF_ERR_PROTOCOL;
    }
    memcpy(&message, data, sizeof(message));
    switch (head.type) {
    case KVF_GPUD_ARENA_START:
        return on_start(arena, &message, fds[0]);
    case KVF_GPUD_ARENA_MAKE:
        return on_make(arena, &message);
    case KVF_GPUD_ARENA_DROP:
        return on_drop(arena, &message);
    default:
        return KVF_ERR_PROTOCOL;
    }
}

/* ---- the turn -------------------------------------------------------------------------------- */

int kvf_gpud_arena_poll(struct kvf_gpud_arena *arena)
{
    int status = arena->answer.is_owed ? answer_send(arena) : KVF_OK;

    for (uint32_t i = 0; i < COPIES_MAX && arena->n_copies > 0 && status >= 0; i++) {
        struct copy *copy = &arena->copies[i];
        struct kvf_gpud_copied message = {.copy = copy->number};
        int sent;

        if (copy->number == 0) {
            continue;
        }
        status = kvf_gpu_event_query(arena->device, copy->done);
        if (status != KVF_OK) {
            continue; /* not yet, or the GPU has failed */
        }
        kvf_gpud_head_init(&message.head, KVF_GPUD_COPIED, sizeof(message));
        sent = arena->send(arena->send_ctx, &message, sizeof(message), NULL, 0);
        if (sent == KVF_OK) {
            copy->number = 0;
            arena->n_copies--;
        } else if (sent != KVF_ERR_BUSY) {
            return sent;
        }
    }
    if (status < 0) {
        return status;
    }
    return arena->n_copies > 0 || arena->answer.is_owed ? KVF_EMPTY : KVF_OK;
}
