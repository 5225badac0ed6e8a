/* SPDX-License-Identifier: Apache-2.0
 *
 * transport_ucx_tunnel.c: what the network does for a client in this process that speaks with the
 * daemon of another node: the only link, without logs, whose messages go to the tunnel's calls
 * (client/tunnel.c).
 */
#include "transport/transport_ucx_internal.h"

#include <assert.h>
#include <sys/epoll.h>

/* The client's link; it has one at most. NULL: it is not up. */
static struct kvf_link *own_link(const struct kvf_net *net)
{
    struct kvf_link *link = (struct kvf_link *)&net->links[0];

    return link->state == KVF_LINK_UP && !link->is_broken ? link : NULL;
}

bool kvf_net_tunnel_room(const struct kvf_net *net)
{
    const struct kvf_link *link = own_link(net);

    return link != NULL && link->sends < KVF_NET_LINK_SENDS_MAX;
}

bool kvf_net_tunnel_send(struct kvf_net *net, enum kvf_net_type type, uint64_t request,
                         uint32_t offset, const void *body, uint32_t body_bytes, bool is_kept)
{
    struct kvf_link *link = own_link(net);
    struct kvf_link_send *send;

    if (link == NULL) {
        return false;
    }
    if (!is_kept) {
        return kvf_link_send_copy(link, type, request, offset, body, body_bytes);
    }
    send = kvf_link_send_new(link);
    if (send == NULL) {
        kvf_link_break(link, KVF_ERR_BUSY, "too many messages wait to be sent");
        return false;
    }
    return kvf_link_send_body(link, send, type, request, offset, body, body_bytes);
}

void kvf_net_tunnel_break(struct kvf_net *net, int status, const char *why)
{
    struct kvf_link *link = own_link(net);

    if (link != NULL) {
        kvf_link_break(link, status, "%s", why);
    }
}

int kvf_net_watch(struct kvf_net *net, int fd, bool is_edge_triggered)
{
    struct epoll_event event = {.events = EPOLLIN | (is_edge_triggered ? (uint32_t)EPOLLET : 0)};

    return epoll_ctl(net->epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0 ? KVF_OK : KVF_ERR_NO_MEMORY;
}

void kvf_net_unwatch(struct kvf_net *net, int fd)
{
    (void)epoll_ctl(net->epoll_fd, EPOLL_CTL_DEL, fd, NULL);
}
