/* SPDX-License-Identifier: Apache-2.0
 *
 * gpud.c: the worker's loop: descriptors, the daemon's messages, a turn for each engine.
 */
#include "agent/gpud.h"

#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>

#include "base/clock.h"
#include "base/fd.h"
#include "base/log.h"

#define EVENTS_MAX 64
#define PAUSE_NS   (20 * KVF_NS_PER_US) /* while the GPU is at work, or a flag is awaited */
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
 * The daemon
 */
static void on_attach(struct kvf_gpud *gpud, const struct kvf_gpud_attach *attach, int *fd)
{
    struct epoll_event event = {.events = EPOLLIN};
    uint32_t i = 0;

    while (i < KVF_GPUD_ENGINES_MAX && gpud->engines[i] != NULL) {
        i++;
    }
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
        gpud->is_over = true;
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
        gpud->is_over = true;
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

int kvf_gpud_run(struct kvf_gpud *gpud)
{
    struct epoll_event event = {.events = EPOLLIN};
    struct epoll_event events[EVENTS_MAX];
    int status = KVF_OK;
    bool is_busy = false;

    if (epoll_ctl(gpud->epoll_fd, EPOLL_CTL_ADD, gpud->fd, &event) != 0) {
        return KVF_ERR_BUSY;
    }
    while (!gpud->is_over && status == KVF_OK) {
        const struct timespec pause = {.tv_nsec = PAUSE_NS};

        if (is_busy) {
            (void)nanosleep(&pause, NULL);
        } else {
            (void)epoll_wait(gpud->epoll_fd, events, EVENTS_MAX, IDLE_MS);
        }
        /* which of them are ready is of no use: all are looked at, and there are few */
        daemon_receive(gpud);
        status = engines_turn(gpud, &is_busy);
        if (status == KVF_OK) {
            status = arena_turn(gpud, &is_busy);
        }
        send_counts(gpud);
    }
    if (status != KVF_OK) {
        kvf_log(KVF_LOG_ERROR, "GPU worker: the GPU has failed: %s", gpud->device->text);
        return status; /* nothing can be given back to a context that is broken */
    }
    for (uint32_t i = 0; i < KVF_GPUD_ENGINES_MAX; i++) {
        if (gpud->engines[i] != NULL) {
            gpud->engines[i] = kvf_gpud_engine_end(gpud->engines[i]);
        }
    }
    if (gpud->arena != NULL && kvf_gpu_device_enter(gpud->device) == KVF_OK) {
        gpud->arena = kvf_gpud_arena_close(gpud->arena);
        kvf_gpu_device_leave(gpud->device);
    }
    return KVF_OK;
}
