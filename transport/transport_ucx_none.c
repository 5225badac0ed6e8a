/* SPDX-License-Identifier: Apache-2.0
 *
 * transport_ucx_none.c: a build without UCX has no links. kvf_net_open says so; nothing else can be
 * called then.
 */
#include "transport/transport_ucx.h"

#include <stdio.h>
#include <stdlib.h>

int kvf_net_open(const struct kvf_net_config *config, struct kvf_net **net_out, char *why,
                 size_t why_bytes)
{
    (void)config;
    (void)net_out;
    (void)snprintf(why, why_bytes, "this build has no UCX; build with libucx-dev and KVF_UCX=ON");
    return KVF_ERR_UNSUPPORTED;
}

void kvf_net_close(struct kvf_net *net)
{
    if (net != NULL) {
        abort();
    }
}

void kvf_net_close_later(struct kvf_net *net, void (*closed)(void *ctx), void *closed_ctx)
{
    (void)net;
    (void)closed;
    (void)closed_ctx;
    abort();
}

uint16_t kvf_net_port(const struct kvf_net *net)
{
    (void)net;
    abort();
}

const char *kvf_net_about(const struct kvf_net *net)
{
    (void)net;
    abort();
}

void kvf_net_stat(const struct kvf_net *net, struct kvf_net_stat *stat_out)
{
    (void)net;
    (void)stat_out;
    abort();
}

int kvf_net_connect(struct kvf_net *net, const struct kvf_net_address *addresses, uint32_t n)
{
    (void)net;
    (void)addresses;
    (void)n;
    abort();
}

int kvf_net_fetch(struct kvf_net *net, struct kvf_net_fetch *fetch)
{
    (void)net;
    (void)fetch;
    abort();
}

int kvf_net_serve(struct kvf_net *net, struct kvf_net_serve *serve)
{
    (void)net;
    (void)serve;
    abort();
}

int kvf_net_send(struct kvf_net *net, kvf_net_link link, enum kvf_net_type type, const void *body,
                 uint32_t body_bytes)
{
    (void)net;
    (void)link;
    (void)type;
    (void)body;
    (void)body_bytes;
    abort();
}

int kvf_net_hang_up(struct kvf_net *net, kvf_net_link link)
{
    (void)net;
    (void)link;
    abort();
}

bool kvf_net_poll(struct kvf_net *net, struct kvf_net_event *event_out)
{
    (void)net;
    (void)event_out;
    abort();
}

bool kvf_net_tunnel_send(struct kvf_net *net, enum kvf_net_type type, uint64_t request,
                         uint32_t offset, const void *body, uint32_t body_bytes, bool is_kept)
{
    (void)net;
    (void)type;
    (void)request;
    (void)offset;
    (void)body;
    (void)body_bytes;
    (void)is_kept;
    abort();
}

bool kvf_net_tunnel_room(const struct kvf_net *net)
{
    (void)net;
    abort();
}

void kvf_net_tunnel_break(struct kvf_net *net, int status, const char *why)
{
    (void)net;
    (void)status;
    (void)why;
    abort();
}

int kvf_net_watch(struct kvf_net *net, int fd, bool is_edge_triggered)
{
    (void)net;
    (void)fd;
    (void)is_edge_triggered;
    abort();
}

void kvf_net_unwatch(struct kvf_net *net, int fd)
{
    (void)net;
    (void)fd;
    abort();
}
