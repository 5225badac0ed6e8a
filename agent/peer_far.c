/* SPDX-License-Identifier: Apache-2.0
 *
 * peer_far.c: nodes that a directory tells of.
 *
 * They are linked with like those of peers.nodes while there is room (peers.links); beyond that a
 * node is linked with when it is said to have a block that somebody wants, in place of the one that
 * nobody has wanted for longest. A node whose own stream is here is not followed by way of the
 * directory. When the directory goes down, links stay, and so do hints, until they prove wrong.
 */
#include "agent/peers.h"

#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>

#define EVENTS_A_TURN 64
#define CONNECT_NS    KVF_NS_PER_S /* between two changes of who is linked with */

/* ----------------------------------------------------------------------------------------------
 * What is known of them
 */
static struct kvf_peer_far *find(struct kvf_peers *peers, uint64_t incarnation)
{
    for (uint32_t i = 0; i < KVF_DIRECTORY_NODES_MAX; i++) {
        struct kvf_peer_far *far = &peers->far[i];

        if (far->said.link != 0 && far->said.incarnation == incarnation) {
            return far;
        }
    }
    return NULL;
}

static void write_address(const struct kvf_net_address *address, char text_out[64])
{
    const struct sockaddr_in *v4 = (const void *)&address->address;
    const struct sockaddr_in6 *v6 = (const void *)&address->address;
    char ip[INET6_ADDRSTRLEN] = "";

    if (address->address.ss_family == AF_INET6) {
        (void)inet_ntop(AF_INET6, &v6->sin6_addr, ip, sizeof(ip));
        (void)snprintf(text_out, 64, "[%s]:%u", ip, ntohs(v6->sin6_port));
    } else {
        (void)inet_ntop(AF_INET, &v4->sin_addr, ip, sizeof(ip));
        (void)snprintf(text_out, 64, "%s:%u", ip, ntohs(v4->sin_port));
    }
}

static void node_came(struct kvf_peers *peers, const struct kvf_directory_event *event)
{
    for (uint32_t i = 0; i < KVF_DIRECTORY_NODES_MAX; i++) {
        struct kvf_peer_far *far = &peers->far[i];

        if (far->said.link != 0) {
            continue;
        }
        memset(far, 0, sizeof(*far));
        far->said.link = 1;
        far->said.is_initiator = true;
        far->said.is_directory = true;
        far->said.incarnation = event->incarnation;
        far->said.since_ns = peers->agent->now_ns;
        far->said.source = KVF_HINT_NONE;
        memcpy(far->said.name, event->name, sizeof(far->said.name));
        write_address(&event->address, far->said.address);
        far->address = event->address;
        for (uint32_t k = 0; k < KVF_NET_LINKS_MAX; k++) {
            if (peers->links[k].link != 0) {
                kvf_far_link_up(peers, &peers->links[k]);
            }
        }
        peers->is_connect_due = true;
        return;
    }
}

static void node_gone(struct kvf_peers *peers, struct kvf_peer_far *far)
{
    struct kvf_peer_link *link = kvf_peer_link_find(peers, far->link);

    kvf_peers_unlearn(peers, &far->said);
    if (link != NULL) {
        link->far = NULL;
    }
    far->said.link = 0;
    peers->is_connect_due = true;
}

void kvf_far_link_up(struct kvf_peers *peers, struct kvf_peer_link *link)
{
    struct kvf_peer_far *far = link->is_initiator ? find(peers, link->incarnation) : NULL;

    if (far != NULL && far->link == 0) {
        far->link = link->link;
        link->far = far;
    }
    peers->is_far_due = true;
}

void kvf_far_link_down(struct kvf_peers *peers, struct kvf_peer_link *link)
{
    if (link->far != NULL) {
        link->far->link = 0;
        link->far = NULL;
    }
    peers->is_far_due = true;
}

bool kvf_far_says(const struct kvf_peer_link *link, uint64_t sources)
{
    return link->far != NULL && link->far->said.source != KVF_HINT_NONE &&
           (sources >> link->far->said.source & 1) != 0;
}

void kvf_far_want(struct kvf_peers *peers, uint64_t sources)
{
    for (uint32_t i = 0; i < KVF_DIRECTORY_NODES_MAX; i++) {
        struct kvf_peer_far *far = &peers->far[i];

        if (far->said.link != 0 && far->link == 0 && far->said.source != KVF_HINT_NONE &&
            (sources >> far->said.source & 1) != 0) {
            far->wanted_ns = peers->agent->now_ns;
            peers->is_connect_due = true;
        }
    }
}

/* ----------------------------------------------------------------------------------------------
 * Who is linked with
 */
static bool is_same(const struct kvf_net_address *a, const struct kvf_net_address *b)
{
    return a->bytes == b->bytes && memcmp(&a->address, &b->address, a->bytes) == 0;
}

/* Is it to be linked with before the other one? Links that carry something stay. */
static bool goes_before(const struct kvf_peers *peers, const struct kvf_peer_far *a,
                        const struct kvf_peer_far *b)
{
    const struct kvf_peer_link *with_a = NULL;
    const struct kvf_peer_link *with_b = NULL;

    for (uint32_t i = 0; i < KVF_NET_LINKS_MAX; i++) {
        const struct kvf_peer_link *link = &peers->links[i];

        with_a = link->link != 0 && link->far == a ? link : with_a;
        with_b = link->link != 0 && link->far == b ? link : with_b;
    }
    if ((with_a != NULL && with_a->inflight > 0) != (with_b != NULL && with_b->inflight > 0)) {
        return with_a != NULL && with_a->inflight > 0;
    }
    if (a->wanted_ns != b->wanted_ns) {
        return a->wanted_ns > b->wanted_ns;
    }
    return (with_a != NULL) > (with_b != NULL);
}

void kvf_far_connect(struct kvf_peers *peers)
{
    struct kvf_net_address addresses[KVF_NET_PEERS_MAX];
    bool is_taken[KVF_DIRECTORY_NODES_MAX] = {false};
    uint32_t n = peers->n_named;
    uint32_t max = (uint32_t)peers->agent->config->peers_links;

    memcpy(addresses, peers->named, n * sizeof(addresses[0]));
    while (n < max) {
        uint32_t best = KVF_DIRECTORY_NODES_MAX;
        bool is_there = false;

        for (uint32_t i = 0; i < KVF_DIRECTORY_NODES_MAX; i++) {
            if (peers->far[i].said.link != 0 && !is_taken[i] &&
                (best == KVF_DIRECTORY_NODES_MAX ||
                 goes_before(peers, &peers->far[i], &peers->far[best]))) {
                best = i;
            }
        }
        if (best == KVF_DIRECTORY_NODES_MAX) {
            break;
        }
        is_taken[best] = true;
        for (uint32_t i = 0; i < n; i++) {
            is_there |= is_same(&addresses[i], &peers->far[best].address);
        }
        if (!is_there) {
            addresses[n++] = peers->far[best].address;
        }
    }
    peers->is_connect_due = kvf_net_connect(peers->net, addresses, n) != KVF_OK;
    peers->connect_ns = peers->agent->now_ns + CONNECT_NS;
}

/* ----------------------------------------------------------------------------------------------
 * The turn
 */

/* Each is followed by way of the directory unless its own stream is here. */
static void follow(struct kvf_peers *peers)
{
    peers->is_far_due = false;
    for (uint32_t i = 0; i < KVF_DIRECTORY_NODES_MAX; i++) {
        struct kvf_peer_far *far = &peers->far[i];
        const struct kvf_peer_link *link = kvf_peer_link_find(peers, far->link);
        bool is_followed = link == NULL || link->learn != KVF_LEARN_LIVE;

        if (far->said.link == 0 || far->is_followed == is_followed) {
            continue;
        }
        if (kvf_directory_follow(peers->directory, far->said.incarnation, is_followed) != KVF_OK) {
            peers->is_far_due = true; /* once more in the next turn */
            continue;
        }
        far->is_followed = is_followed;
        if (!is_followed) {
            kvf_peers_unlearn(peers, &far->said);
        }
    }
}

static void take(struct kvf_peers *peers, struct kvf_directory_event *event)
{
    struct kvf_peer_far *far = find(peers, event->incarnation);

    switch ((enum kvf_directory_event_kind)event->kind) {
    case KVF_DIRECTORY_UP:
        peers->written = (struct kvf_peer_link){.link = 1, .is_directory = true};
        break;
    case KVF_DIRECTORY_DOWN:
        peers->written.link = 0; /* what is known stays */
        break;
    case KVF_DIRECTORY_NODE:
        if (far == NULL) {
            node_came(peers, event);
        }
        break;
    case KVF_DIRECTORY_GONE:
        if (far != NULL) {
            node_gone(peers, far);
        }
        break;
    case KVF_DIRECTORY_MESSAGE:
        if (far != NULL && far->is_followed) {
            kvf_peers_told(peers, &far->said, event->type, event->body);
        }
        free(event->body);
        break;
    }
    peers->is_far_due = true;
}

unsigned kvf_far_poll(struct kvf_peers *peers)
{
    struct kvf_directory_event event;
    unsigned n = 0;

    if (peers->directory == NULL) {
        return 0;
    }
    while (n < EVENTS_A_TURN && kvf_directory_poll(peers->directory, &event)) {
        take(peers, &event);
        n++;
    }
    if (peers->is_far_due) {
        follow(peers);
    }
    if (peers->is_connect_due && peers->agent->now_ns >= peers->connect_ns) {
        kvf_far_connect(peers);
    }
    return n;
}

void kvf_far_metrics(const struct kvf_peers *peers)
{
    struct kvf_metrics *metrics = &peers->agent->metrics;
    struct kvf_directory_stat stat;

    if (peers->directory == NULL) {
        return;
    }
    kvf_directory_stat(peers->directory, &stat);
    metrics->directory_up = stat.is_up;
    metrics->directory_failures = stat.failures;
    metrics->directory_refused = stat.refused;
    metrics->directory_nodes = 0;
    for (uint32_t i = 0; i < KVF_DIRECTORY_NODES_MAX; i++) {
        metrics->directory_nodes += peers->far[i].said.link != 0;
    }
}

/* ----------------------------------------------------------------------------------------------
 * Open and close
 */

int kvf_far_open(struct kvf_peers *peers, const struct kvf_net_config *net)
{
    const struct kvf_config *config = peers->agent->config;
    struct kvf_directory_config directory = {.incarnation = net->incarnation,
                                             .listen = net->listen,
                                             .lease_s = (uint32_t)config->directory_lease,
                                             .wake = net->wake,
                                             .wake_ctx = net->wake_ctx};
    char why[KVF_ERROR_TEXT_BYTES];
    int status;

    if (config->directory_address[0] == '\0') {
        return KVF_OK;
    }
    (void)snprintf(directory.address, sizeof(directory.address), "%s", config->directory_address);
    (void)snprintf(directory.user, sizeof(directory.user), "%s", config->directory_user);
    (void)snprintf(directory.password_file, sizeof(directory.password_file), "%s",
                   config->directory_password_file);
    memcpy(directory.cluster_key, net->cluster_key, sizeof(directory.cluster_key));
    memcpy(directory.name, net->name, sizeof(directory.name));
    status = kvf_directory_open(&directory, &peers->directory, why, sizeof(why));
    if (status != KVF_OK) {
        kvf_log(KVF_LOG_ERROR, "directory: %s", why);
    }
    return status;
}

void kvf_far_close(struct kvf_peers *peers)
{
    kvf_directory_close(peers->directory);
    peers->directory = NULL;
}
