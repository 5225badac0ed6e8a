/* SPDX-License-Identifier: Apache-2.0
 *
 * gpud.c: the worker's loop: descriptors, the daemon's messages, a turn for each engine.
 */
#include "agent/gpud.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fd.h"
#include "base/log.h"

#define PAUSE_NS   (20 * KVF_NS_PER_US) /* while the GPU is at work, or a flag is awaited */
#define PAUSE_LONG (100 * KVF_NS_PER_US)
#define PAUSE_MAX  KVF_NS_PER_MS /* the longer the wait the longer the pause: by 1/16 */
#define IDLE_MS    200
#define COUNT_NS   KVF_NS_PER_S
#define TOKEN_NS   (KVF_NS_PER_S / 2) /* of the rate that can be saved up */

bool kvf_gpud_spend(struct kvf_gpud *gpud, uint64_t bytes)
{
    uint64_t now_ns = kvf_now_ns();
    int64_t most = (int64_t)(gpud->rate_bytes_s / 2);

    if (gpud->rate_bytes_s == 0) {
        return true;
    }
    if (now_ns - gpud->tokens_ns >= TOKEN_NS) {
        gpud->tokens_bytes = gpud->tokens_bytes < most ? most : gpud->tokens_bytes;
    } else {
        gpud->tokens_bytes += (int64_t)((double)(now_ns - gpud->tokens_ns) *
                                        (double)gpud->rate_bytes_s / 1e9);
    }
    gpud->tokens_bytes = gpud->tokens_bytes < most ? gpud->tokens_bytes : most;
    gpud->tokens_ns = now_ns;
    if (gpud->tokens_bytes < 0) {
        return false;
    }
    gpud->tokens_bytes -= (int64_t)bytes; /* a debt is paid before the next one */
    return true;
}

/* ----------------------------------------------------------------------------------------------
 * What finds a socket full
 */
static void notes_send(struct kvf_gpud *gpud)
{
    struct kvf_gpud_untold *untold = &gpud->untold;
    uint32_t n = 0;

    while (n < untold->n_notes && kvf_seqpacket_send(gpud->fd, &untold->notes[n],
                                                     sizeof(untold->notes[n]), NULL, 0) == KVF_OK) {
        n++;
    }
    untold->n_notes -= n;
    memmove(untold->notes, untold->notes + n, untold->n_notes * sizeof(untold->notes[0]));
}

void kvf_gpud_tell(struct kvf_gpud *gpud, uint64_t connection_id, int status)
{
    struct kvf_gpud_untold *untold = &gpud->untold;
    struct kvf_gpud_note *note = &untold->notes[untold->n_notes];

    if (untold->n_notes == sizeof(untold->notes) / sizeof(untold->notes[0])) {
        kvf_log(KVF_LOG_ERROR, "GPU worker: the daemon takes no messages");
        gpud->is_over = true;
        return;
    }
    *note = (struct kvf_gpud_note){.connection_id = connection_id, .status = status};
    kvf_gpud_head_init(&note->head, KVF_GPUD_ENGINE, sizeof(*note));
    untold->n_notes++;
    notes_send(gpud);
}

/* False: the channel is full. */
static bool gone_send(int fd)
{
    struct kvf_gpud_plain gone = {0};

    kvf_gpud_head_init(&gone.head, KVF_GPUD_GONE, sizeof(gone));
    return kvf_seqpacket_send(fd, &gone, sizeof(gone), NULL, 0) != KVF_ERR_BUSY;
}

static void partings_send(struct kvf_gpud *gpud, bool is_last)
{
    struct kvf_gpud_untold *untold = &gpud->untold;

    for (uint32_t i = 0; i < untold->n_partings;) {
        if (gone_send(untold->partings[i]) || is_last) {
            kvf_fd_close(&untold->partings[i]);
            untold->partings[i] = untold->partings[--untold->n_partings];
        } else {
            i++;
        }
    }
}

/* An end that is closed with messages in it is an error to the other one. */
static void unread_drop(int fd)
{
    static union kvf_gpud_message message;
    struct kvf_seqpacket_message received;

    while (kvf_seqpacket_recv(fd, message.bytes, sizeof(message.bytes), &received) == KVF_OK) {
        kvf_seqpacket_message_close(&received);
    }
}

void kvf_gpud_part_from(struct kvf_gpud *gpud, int fd)
{
    struct kvf_gpud_untold *untold = &gpud->untold;

    (void)epoll_ctl(gpud->epoll_fd, EPOLL_CTL_DEL, fd, NULL);
    (void)shutdown(fd, SHUT_RD); /* an engine that still sends learns that nobody reads */
    unread_drop(fd);
    if (gone_send(fd)) {
        kvf_fd_close(&fd);
        return;
    }
    if (untold->n_partings == KVF_GPUD_ENGINES_MAX) { /* of the one that reads least */
        kvf_fd_close(&untold->partings[0]);
        memmove(untold->partings, untold->partings + 1,
                --untold->n_partings * sizeof(untold->partings[0]));
    }
    untold->partings[untold->n_partings++] = fd;
}

/* ----------------------------------------------------------------------------------------------
 * The daemon
 */

/* A place for an engine. One that has a channel and does not greet gives its own to one that comes.
 */
static uint32_t place_find(struct kvf_gpud *gpud)
{
    uint32_t silent = KVF_GPUD_ENGINES_MAX;

    for (uint32_t i = 0; i < KVF_GPUD_ENGINES_MAX; i++) {
        const struct kvf_gpud_engine *engine = gpud->engines[i];

        if (engine == NULL) {
            return i;
        }
        if (engine->state == KVF_GPUD_NEW &&
            (silent == KVF_GPUD_ENGINES_MAX ||
             engine->connection_id < gpud->engines[silent]->connection_id)) {
            silent = i;
        }
    }
    if (silent < KVF_GPUD_ENGINES_MAX) {
        kvf_gpud_engine_break(gpud->engines[silent], "it does not greet, and others come");
        gpud->engines[silent] = kvf_gpud_engine_end(gpud->engines[silent]);
    }
    return silent;
}

static void on_attach(struct kvf_gpud *gpud, const struct kvf_gpud_attach *attach, int *fd)
{
    struct epoll_event event = {.events = EPOLLIN};
    uint32_t i = place_find(gpud);

    if (i == KVF_GPUD_ENGINES_MAX) {
        kvf_log(KVF_LOG_WARNING, "GPU worker: no room for one more engine");
        gpud->counts.refused++;
        return; /* closing the channel says so */
    }
    gpud->engines[i] = kvf_gpud_engine_new(gpud, *fd, attach);
    *fd = -1;
    if (gpud->engines[i] != NULL &&
        epoll_ctl(gpud->epoll_fd, EPOLL_CTL_ADD, gpud->engines[i]->fd, &event) != 0) {
        gpud->engines[i]->is_broken = true;
    }
}

static void on_detach(struct kvf_gpud *gpud, uint64_t connection_id)
{
    for (uint32_t i = 0; i < KVF_GPUD_ENGINES_MAX; i++) {
        if (gpud->engines[i] != NULL && gpud->engines[i]->connection_id == connection_id) {
            gpud->engines[i]->is_broken = true;
        }
    }
}

static int arena_send(void *ctx, const void *data, size_t bytes, const int *fds, uint32_t n_fds)
{
    struct kvf_gpud *gpud = ctx;

    return kvf_seqpacket_send(gpud->fd, data, bytes, fds, n_fds);
}

/* The tier in device memory. */
static void on_tier_message(struct kvf_gpud *gpud, const union kvf_gpud_message *message,
                            size_t bytes, const struct kvf_seqpacket_message *received)
{
    int status = kvf_gpu_device_enter(gpud->device);

    if (status == KVF_OK && gpud->arena == NULL) {
        gpud->arena = kvf_gpud_arena_open(gpud->device, arena_send, gpud);
        status = gpud->arena != NULL ? KVF_OK : KVF_ERR_NO_MEMORY;
    }
    if (status == KVF_OK) {
        status = kvf_gpud_arena_message(gpud->arena, message, bytes, received->fds,
                                        received->n_fds);
    }
    kvf_gpu_device_leave(gpud->device);
    if (status != KVF_OK) {
        kvf_log(KVF_LOG_ERROR, "GPU worker: the tier's message %u: %s (%s)", message->head.type,
                kvf_status_text(status), gpud->device->text);
        gpud->status = status;
    }
}

static int arena_turn(struct kvf_gpud *gpud, bool *is_busy)
{
    int status;

    if (gpud->arena == NULL || kvf_gpu_device_enter(gpud->device) != KVF_OK) {
        return KVF_OK;
    }
    status = kvf_gpud_arena_poll(gpud->arena);
    kvf_gpu_device_leave(gpud->device);
    *is_busy = *is_busy || status == KVF_EMPTY;
    return status < 0 ? status : KVF_OK;
}

static void on_message(struct kvf_gpud *gpud, const union kvf_gpud_message *message, size_t bytes,
                       struct kvf_seqpacket_message *received)
{
    const char *why = "";

    if (bytes >= sizeof(message->head) && message->head.type >= KVF_GPUD_TIER_FIRST) {
        on_tier_message(gpud, message, bytes, received);
        return;
    }
    if (kvf_gpud_check(KVF_GPUD_FROM_DAEMON, message, bytes, received->n_fds, &why) != KVF_OK) {
        kvf_log(KVF_LOG_ERROR, "GPU worker: the daemon's %s", why);
        gpud->status = KVF_ERR_PROTOCOL;
        return;
    }
    switch (message->head.type) {
    case KVF_GPUD_ATTACH:
        on_attach(gpud, &message->attach, &received->fds[0]);
        break;
    case KVF_GPUD_DETACH:
        on_detach(gpud, message->note.connection_id);
        break;
    default: /* QUIT */
        gpud->is_over = true;
        break;
    }
}

static void daemon_receive(struct kvf_gpud *gpud)
{
    static union kvf_gpud_message message;
    struct kvf_seqpacket_message received;
    int status;

    while ((status = kvf_seqpacket_recv(gpud->fd, message.bytes, sizeof(message.bytes),
                                        &received)) == KVF_OK) {
        on_message(gpud, &message, received.bytes, &received);
        for (uint32_t i = 0; i < received.n_fds; i++) {
            kvf_fd_close(&received.fds[i]);
        }
    }
    gpud->is_over = gpud->is_over || status != KVF_EMPTY;
}

static void send_counts(struct kvf_gpud *gpud)
{
    struct kvf_gpud_counts *counts = &gpud->counts;
    uint64_t now_ns = kvf_now_ns();
    size_t free_bytes = 0;
    size_t total_bytes = 0;

    if (now_ns < gpud->counted_ns + COUNT_NS) {
        return;
    }
    gpud->counted_ns = now_ns;
    kvf_gpud_head_init(&counts->head, KVF_GPUD_COUNTS, sizeof(*counts));
    (void)gpud->device->driver.cuMemGetInfo(&free_bytes, &total_bytes);
    counts->free_bytes = free_bytes;
    counts->engines = 0;
    for (uint32_t i = 0; i < KVF_GPUD_ENGINES_MAX; i++) {
        counts->engines += gpud->engines[i] != NULL;
    }
    /* a full socket: the next ones say it all again */
    (void)kvf_seqpacket_send(gpud->fd, counts, sizeof(*counts), NULL, 0);
}

/* ----------------------------------------------------------------------------------------------
 * Turns
 */
static int engines_turn(struct kvf_gpud *gpud, bool *is_busy_out)
{
    int status = KVF_OK;

    *is_busy_out = false;
    for (uint32_t i = 0; i < KVF_GPUD_ENGINES_MAX && status == KVF_OK; i++) {
        struct kvf_gpud_engine *engine = gpud->engines[i];
        bool is_busy = false;

        if (engine == NULL) {
            continue;
        }
        kvf_gpud_engine_receive(engine);
        if (!engine->is_broken && engine->state == KVF_GPUD_SERVED) {
            status = kvf_gpud_jobs_turn(engine, &is_busy);
        }
        if (engine->is_broken) {
            gpud->engines[i] = kvf_gpud_engine_end(engine);
        }
        *is_busy_out = *is_busy_out || is_busy;
    }
    return status;
}

/* What others have not taken so far, and clients that come too late. */
static void leftovers_turn(struct kvf_gpud *gpud)
{
    uint64_t count;

    (void)!read(gpud->wake_fd, &count, sizeof(count));
    kvf_gpud_openings_tend(gpud, false);
    notes_send(gpud);
    partings_send(gpud, false);
    send_counts(gpud);
}

static void end_all(struct kvf_gpud *gpud)
{
    for (uint32_t i = 0; i < KVF_GPUD_ENGINES_MAX; i++) {
        if (gpud->engines[i] != NULL) {
            gpud->engines[i] = kvf_gpud_engine_end(gpud->engines[i]);
        }
    }
    if (gpud->arena != NULL && kvf_gpu_device_enter(gpud->device) == KVF_OK) {
        gpud->arena = kvf_gpud_arena_close(gpud->arena);
        kvf_gpu_device_leave(gpud->device);
    }
    partings_send(gpud, true);
    kvf_gpud_openings_tend(gpud, true);
}

/* Until there may be something to do. Messages end a long pause: none waits for another's flag. */
static void turn_wait(const struct kvf_gpud *gpud, bool is_busy, const struct timespec *pause)
{
    struct pollfd any = {.fd = gpud->epoll_fd, .events = POLLIN};

    if (is_busy && pause->tv_nsec < (long)PAUSE_LONG) {
        (void)nanosleep(pause, NULL);
    } else if (is_busy) {
        (void)ppoll(&any, 1, pause, NULL);
    } else {
        (void)poll(&any, 1, IDLE_MS);
    }
}

int kvf_gpud_run(struct kvf_gpud *gpud)
{
    struct epoll_event event = {.events = EPOLLIN};
    struct timespec pause = {.tv_nsec = PAUSE_NS};
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    uint64_t n_steps = 0;
    bool is_busy = false;

    if (epoll_ctl(gpud->epoll_fd, EPOLL_CTL_ADD, gpud->fd, &event) != 0 ||
        epoll_ctl(gpud->epoll_fd, EPOLL_CTL_ADD, gpud->wake_fd, &event) != 0) {
        return KVF_ERR_BUSY;
    }
    (void)gpud->device->driver.cuMemGetInfo(&free_bytes, &total_bytes);
    gpud->device_bytes = total_bytes;
    while (!gpud->is_over && gpud->status == KVF_OK) {
        pause.tv_nsec += pause.tv_nsec / 16;
        pause.tv_nsec = pause.tv_nsec < (long)PAUSE_MAX ? pause.tv_nsec : (long)PAUSE_MAX;
        if (!is_busy || n_steps != gpud->n_steps) {
            pause.tv_nsec = PAUSE_NS;
        }
        n_steps = gpud->n_steps;
        turn_wait(gpud, is_busy, &pause);
        /* which of them are ready is of no use: all are looked at, and there are few */
        daemon_receive(gpud);
        if (gpud->status == KVF_OK) {
            gpud->status = engines_turn(gpud, &is_busy);
        }
        if (gpud->status == KVF_OK) {
            gpud->status = arena_turn(gpud, &is_busy);
        }
        leftovers_turn(gpud);
    }
    if (gpud->status != KVF_OK) {
        kvf_log(KVF_LOG_ERROR, "GPU worker: it has failed (%s): %s", kvf_status_text(gpud->status),
                gpud->device->text);
        return gpud->status; /* nothing can be given back to a context that is broken */
    }
    end_all(gpud);
    return KVF_OK;
}
