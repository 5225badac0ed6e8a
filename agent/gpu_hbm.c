/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_hbm.c: the port of a tier in device memory (tiers/tier_hbm.h) to the worker of that GPU: each
 * call is a message, each answer an event. What a worker says is looked up, never believed: it can
 * end copies and pieces that it was asked for, and nothing else.
 */
#include "agent/core.h"

#include <stdlib.h>
#include <string.h>

#include "agent/gpu_host.h"
#include "transport/gpu_proto.h"

struct port {
    struct kvf_hbm_port base;
    struct kvf_agent *agent;
    uint32_t device; /* of the host */
    bool is_up;
    char uuid[KVF_GPUD_UUID_BYTES];
    struct kvf_hbm_port_events events;
    int window_fd;
    uint64_t window_bytes;
    uint64_t n_copies; /* numbers given out */
    struct kvf_hbm_copy *copies;
};

static struct port *port_of(struct kvf_hbm_port *base)
{
    return (struct port *)base;
}

static int tell(const struct port *port, const void *message, size_t bytes, const int *fd)
{
    return kvf_gpu_host_send(port->agent->gpu_host, port->device, message, bytes, fd,
                             fd != NULL ? 1 : 0);
}

/* ---- calls ----------------------------------------------------------------------------------- */

static void port_start(struct kvf_hbm_port *base, const struct kvf_hbm_port_events *events,
                       int window_fd, void *window, uint64_t window_bytes)
{
    struct port *port = port_of(base);

    (void)window;
    port->events = *events;
    port->window_fd = window_fd;
    port->window_bytes = window_bytes;
}

static int port_make(struct kvf_hbm_port *base, uint32_t piece_id, uint64_t bytes)
{
    struct port *port = port_of(base);
    struct kvf_gpud_arena_message message = {.bytes = bytes};

    if (!port->is_up) {
        return KVF_ERR_BUSY;
    }
    kvf_gpud_head_init(&message.head, KVF_GPUD_ARENA_MAKE, sizeof(message));
    message.head.number = piece_id;
    return tell(port, &message, sizeof(message), NULL) == KVF_OK ? KVF_OK : KVF_ERR_BUSY;
}

static void port_drop(struct kvf_hbm_port *base, uint32_t piece_id)
{
    struct port *port = port_of(base);
    struct kvf_gpud_arena_message message = {0};

    if (!port->is_up) {
        return;
    }
    kvf_gpud_head_init(&message.head, KVF_GPUD_ARENA_DROP, sizeof(message));
    message.head.number = piece_id;
    if (tell(port, &message, sizeof(message), NULL) != KVF_OK) {
        /* it reads nothing any more: a worker like that is of no use, and the next one has all of
         * the memory */
        kvf_gpu_host_restart(port->agent->gpu_host, port->device);
    }
}

static int port_copy(struct kvf_hbm_port *base, struct kvf_hbm_copy *copy)
{
    struct port *port = port_of(base);
    struct kvf_gpud_copy message = {.copy = port->n_copies + 1,
                                    .piece_offset = copy->piece_offset,
                                    .window_offset = copy->window_offset,
                                    .bytes = copy->bytes,
                                    .is_in = copy->is_in};
    int status;

    if (!port->is_up) {
        return KVF_ERR_TIER_OFF;
    }
    kvf_gpud_head_init(&message.head, KVF_GPUD_COPY, sizeof(message));
    message.head.number = copy->piece_id;
    status = tell(port, &message, sizeof(message), NULL);
    if (status == KVF_OK) {
        copy->number = ++port->n_copies;
        copy->next = port->copies;
        port->copies = copy;
    }
    return status;
}

static unsigned port_poll(struct kvf_hbm_port *base, uint64_t now_ns)
{
    (void)base;
    (void)now_ns;
    return 0; /* messages come by the loop */
}

static uint64_t port_deadline_ns(const struct kvf_hbm_port *base)
{
    (void)base;
    return UINT64_MAX;
}

static const char *port_uuid(const struct kvf_hbm_port *base)
{
    return ((const struct port *)base)->uuid;
}

static void port_close(struct kvf_hbm_port *base)
{
    free(base);
}

static const struct kvf_hbm_port_ops port_ops = {
    .start = port_start,
    .make = port_make,
    .drop = port_drop,
    .copy = port_copy,
    .poll = port_poll,
    .deadline_ns = port_deadline_ns,
    .uuid = port_uuid,
    .close = port_close,
};

/* ---- the worker ------------------------------------------------------------------------------ */

static struct port *find(const struct kvf_agent *agent, uint32_t device)
{
    for (uint32_t i = 0; i < agent->n_hbm; i++) {
        struct port *port = (struct port *)kvf_hbm_port_of(agent->hbm[i].source.store);

        if (port->device == device) {
            return port;
        }
    }
    return NULL;
}

static void on_up(void *ctx, uint32_t device, const struct kvf_gpud_ready *ready)
{
    struct kvf_agent *agent = ctx;
    struct port *port = find(agent, device);
    struct kvf_gpud_arena_message message = {0};

    if (port == NULL) {
        port = calloc(1, sizeof(*port));
        if (port == NULL) {
            return;
        }
        port->base.ops = &port_ops;
        port->agent = agent;
        port->device = device;
        memcpy(port->uuid, ready->uuid, sizeof(port->uuid));
        if (kvf_hbm_open_device(agent, &port->base) != KVF_OK) {
            return; /* it has said why, and goes without */
        }
    }
    message.bytes = port->window_bytes;
    kvf_gpud_head_init(&message.head, KVF_GPUD_ARENA_START, sizeof(message));
    if (tell(port, &message, sizeof(message), &port->window_fd) == KVF_OK) {
        port->is_up = true;
        port->events.up(port->events.ctx);
    }
}

static void on_down(void *ctx, uint32_t device)
{
    struct port *port = find(ctx, device);

    if (port == NULL || !port->is_up) {
        return;
    }
    port->is_up = false;
    while (port->copies != NULL) {
        struct kvf_hbm_copy *copy = port->copies;

        port->copies = copy->next;
        copy->status = KVF_ERR_TIER_OFF;
        copy->done(copy);
    }
    port->events.down(port->events.ctx);
}

static void on_copied(struct port *port, const struct kvf_gpud_copied *message)
{
    struct kvf_hbm_copy **link = &port->copies;
    struct kvf_hbm_copy *copy;

    while (*link != NULL && (*link)->number != message->copy) {
        link = &(*link)->next;
    }
    copy = *link;
    if (copy != NULL) {
        *link = copy->next;
        copy->status = message->status == KVF_OK ? KVF_OK : KVF_ERR_IO;
        copy->done(copy);
    }
}

static void on_message(void *ctx, uint32_t device, const void *data, size_t bytes, int *fds,
                       uint32_t n_fds)
{
    struct port *port = find(ctx, device);
    struct kvf_gpud_copied copied;
    struct kvf_gpud_head head;
    struct kvf_gpud_made made;

    if (port == NULL || !port->is_up) {
        return;
    }
    memcpy(&head, data, sizeof(head));
    if (head.magic != KVF_GPUD_MAGIC || head.bytes != bytes) {
        return;
    }
    if (head.type == KVF_GPUD_COPIED && bytes == sizeof(copied)) {
        memcpy(&copied, data, sizeof(copied));
        on_copied(port, &copied);
    } else if (head.type == KVF_GPUD_ARENA_MADE && bytes == sizeof(made)) {
        int fd = n_fds == 1 ? fds[0] : -1;

        memcpy(&made, data, sizeof(made));
        if (fd >= 0) {
            fds[0] = -1; /* the tier's now */
        } else if (made.status == KVF_OK) {
            made.status = KVF_ERR_IO;
        }
        port->events.made(port->events.ctx, made.head.number, fd, made.status);
    }
}

void kvf_gpu_hbm_listen(struct kvf_agent *agent)
{
    struct kvf_gpu_host_listener listener = {
        .ctx = agent, .up = on_up, .down = on_down, .message = on_message};

    if (agent->hbm != NULL && agent->ports.open_hbm == NULL) {
        kvf_gpu_host_listen(agent->gpu_host, &listener);
    }
}
