/* SPDX-License-Identifier: Apache-2.0
 *
 * transport_ucx_lane.c: more endpoints of a link between nodes (lanes): one TCP connection may be
 * held to less than what the wire has, by a cloud's limit on a flow or by one queue of a device.
 *
 * A lane is a link of its own, with a handshake, a key, credit and a heartbeat, over which only
 * records are asked for and come. It belongs to a link that is up and ends with it; when it breaks
 * alone, what it carried fails and it is made again. Whoever has made the link makes its lanes:
 * how many there are is his to say, and the two sides need not say the same.
 */
#include "transport/transport_ucx_internal.h"

#include <assert.h>
#include <string.h>

#define FIRST_NS    (50 * KVF_NS_PER_MS) /* for the link's CONFIRM to be there before */
#define RETRY_SHIFT 4                    /* the pause doubles so often */

static bool is_alive(const struct kvf_link *link)
{
    return link->state != KVF_LINK_FREE && link->state != KVF_LINK_CLOSING && !link->is_broken;
}

/* Lanes of a link, in whatever state that may become UP. */
static uint32_t count_lanes(const struct kvf_link *link)
{
    const struct kvf_net *net = link->net;
    uint32_t n = 0;

    for (uint32_t i = KVF_NET_LINKS_MAX; i < net->links_end; i++) {
        n += net->links[i].of == kvf_link_id(link) && is_alive(&net->links[i]);
    }
    return n;
}

struct kvf_link *kvf_lane_take(struct kvf_link *link, uint64_t incarnation)
{
    struct kvf_net *net = link->net;
    struct kvf_link *lane;
    uint32_t generation;
    uint32_t i = 0;

    while (i < KVF_NET_LINKS_MAX &&
           (net->links[i].state != KVF_LINK_UP || net->links[i].is_broken ||
            net->links[i].is_refused || net->links[i].is_initiator || net->links[i].is_client ||
            net->links[i].incarnation != incarnation)) {
        i++;
    }
    if (i == KVF_NET_LINKS_MAX || count_lanes(&net->links[i]) >= KVF_NET_ENDPOINTS_MAX - 1) {
        return NULL;
    }
    lane = kvf_link_new(net, true);
    if (lane == NULL) {
        return NULL;
    }
    assert(link->sends == 0 && link->relay == NULL); /* nobody knows it by its place */
    generation = lane->generation;
    *lane = *link;
    lane->generation = generation;
    lane->of = kvf_link_id(&net->links[i]);
    link->ep = NULL;
    link->state = KVF_LINK_FREE;
    return lane;
}

void kvf_lane_up(struct kvf_link *lane)
{
    struct kvf_link *link = kvf_link_find(lane->net, lane->of);

    if (link == NULL || link->incarnation != lane->incarnation) {
        kvf_link_break(lane, KVF_ERR_DISCONNECTED, "its link is another one's by now");
        return;
    }
    link->lane_failures = 0;
}

void kvf_lane_closed(const struct kvf_link *lane)
{
    struct kvf_net *net = lane->net;
    struct kvf_link *link = kvf_link_find(net, lane->of);

    if (link != NULL && link->is_initiator) {
        link->lane_try_ns = net->now_ns + (net->config.retry_ns << link->lane_failures);
        link->lane_failures += link->lane_failures < RETRY_SHIFT;
    }
}

void kvf_lane_end(const struct kvf_link *link)
{
    struct kvf_net *net = link->net;

    for (uint32_t i = KVF_NET_LINKS_MAX; i < net->links_end; i++) {
        if (net->links[i].of == kvf_link_id(link) && is_alive(&net->links[i])) {
            kvf_link_break(&net->links[i], KVF_ERR_CANCELED, "its link has ended");
        }
    }
}

struct kvf_link *kvf_lane_choose(struct kvf_link *link, uint64_t request)
{
    struct kvf_net *net = link->net;
    struct kvf_link *up[KVF_NET_ENDPOINTS_MAX] = {link};
    uint32_t n = 1;

    for (uint32_t i = KVF_NET_LINKS_MAX; i < net->links_end && n < KVF_NET_ENDPOINTS_MAX; i++) {
        struct kvf_link *lane = &net->links[i];

        if (lane->of == kvf_link_id(link) && lane->state == KVF_LINK_UP && !lane->is_broken) {
            up[n++] = lane;
        }
    }
    return up[request % n];
}

/* One more, if there is room for it. */
static void open_lane(struct kvf_link *link)
{
    struct kvf_net *net = link->net;
    struct kvf_link *lane = kvf_link_new(net, true);

    link->lane_try_ns = net->now_ns + FIRST_NS;
    if (lane != NULL) {
        lane->is_initiator = true;
        lane->of = kvf_link_id(link);
        lane->peer = link->peer;
        kvf_link_begin(lane);
    }
}

unsigned kvf_lane_turn(struct kvf_net *net)
{
    unsigned n = 0;

    if (net->config.endpoints <= 1 || net->now_ns < net->lane_look_ns) {
        return 0;
    }
    net->lane_look_ns = net->now_ns + FIRST_NS / 5;
    for (uint32_t i = 0; i < KVF_NET_LINKS_MAX; i++) {
        struct kvf_link *link = &net->links[i];

        if (link->state != KVF_LINK_UP || !link->is_initiator || link->is_client ||
            link->is_broken || link->is_refused) {
            continue;
        }
        if (link->lane_try_ns == 0) {
            link->lane_try_ns = net->now_ns + FIRST_NS;
        } else if (net->now_ns >= link->lane_try_ns &&
                   count_lanes(link) < net->config.endpoints - 1) {
            open_lane(link);
            n++;
        }
    }
    return n;
}
