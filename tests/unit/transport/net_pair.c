/* SPDX-License-Identifier: Apache-2.0
 *
 * net_pair.c: two networks of a test (net_pair.h).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "tests/support/support.h"
#include "tests/unit/transport/net_pair.h"

static void nobody(void *ctx)
{
    (void)ctx; /* the test polls */
}

void node_open_with(struct node *node, uint64_t incarnation, uint8_t key, bool listens,
                    uint32_t endpoints)
{
    struct kvf_net_config config = {.incarnation = incarnation,
                                    .endpoints = endpoints,
                                    .heartbeat_ns = 100 * KVF_NS_PER_MS,
                                    .silence_ns = 60 * KVF_NS_PER_S,
                                    .retry_ns = 50 * KVF_NS_PER_MS,
                                    .wake = nobody};
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    char why[256];

    memset(node, 0, sizeof(*node));
    node->client_fd = -1;
    memset(config.cluster_key, key, sizeof(config.cluster_key));
    (void)snprintf(config.name, sizeof(config.name), "node-%u", (unsigned)incarnation);
    if (listens) {
        memcpy(&config.listen.address, &address, sizeof(address));
        config.listen.bytes = sizeof(address);
    }
    if (kvf_net_open(&config, &node->net, why, sizeof(why)) != KVF_OK) {
        fail_msg("%s", why);
    }
    address.sin_port = htons(kvf_net_port(node->net));
    memcpy(&node->at.address, &address, sizeof(address));
    node->at.bytes = sizeof(address);
}

void node_open(struct node *node, uint64_t incarnation, uint8_t key, bool listens)
{
    node_open_with(node, incarnation, key, listens, 1);
}

void node_close(struct node *node)
{
    kvf_net_close(node->net);
    node->net = NULL;
    if (node->client_fd >= 0) {
        close(node->client_fd);
    }
}

void node_poll(struct node *node)
{
    static const uint8_t loopback[KVF_NET_FROM_BYTES] = {127, 0, 0, 1};
    struct kvf_net_event event;

    while (node->net != NULL && kvf_net_poll(node->net, &event)) {
        switch ((enum kvf_net_event_kind)event.kind) {
        case KVF_NET_EVENT_LINK_UP:
            node->ups++;
            node->link = event.link;
            node->is_initiator = event.is_initiator;
            node->peer_incarnation = event.incarnation;
            break;
        case KVF_NET_EVENT_LINK_DOWN:
            node->downs++;
            node->link = node->link == event.link ? 0 : node->link;
            break;
        case KVF_NET_EVENT_FETCH_DONE:
            node->fetches_done++;
            break;
        case KVF_NET_EVENT_SERVE:
            assert_true(node->n_serves < 8);
            node->serves[node->n_serves++] = event;
            break;
        case KVF_NET_EVENT_SERVE_DONE:
            node->serves_done++;
            break;
        case KVF_NET_EVENT_MESSAGE:
            node->message = event;
            memcpy(node->message_body, event.body, event.body_bytes);
            free(event.body);
            break;
        case KVF_NET_EVENT_CLIENT:
            if (node->client_fd >= 0) {
                close(node->client_fd);
            }
            node->client_fd = event.fd;
            memcpy(node->tenant, event.name, sizeof(node->tenant));
            assert_memory_equal(event.from, loopback, sizeof(event.from));
            break;
        case KVF_NET_EVENT_OFFENCE:
            node->offences++;
            assert_string_equal(event.name, node->tenant);
            assert_memory_equal(event.from, loopback, sizeof(event.from));
            break;
        }
    }
}

bool pair_look(void *arg)
{
    struct pair *pair = arg;

    node_poll(&pair->a);
    node_poll(&pair->b);
    return pair->is_so(pair);
}

void wait_for(struct pair *pair, bool (*is_so)(struct pair *pair))
{
    pair->is_so = is_so;
    assert_true(kvf_test_wait_until(pair_look, pair, WAIT_MS));
}

bool are_linked(struct pair *pair)
{
    return pair->a.link != 0 && pair->b.link != 0;
}

bool is_asked(struct pair *pair)
{
    return pair->a.n_serves > 0;
}

bool has_fetched(struct pair *pair)
{
    return pair->b.fetches_done > 0;
}

bool has_served(struct pair *pair)
{
    return pair->a.serves_done > 0;
}

void pair_open(struct pair *pair)
{
    memset(pair, 0, sizeof(*pair));
    node_open(&pair->a, 1, 7, true);
    node_open(&pair->b, 2, 7, false);
    assert_int_equal(kvf_net_connect(pair->b.net, &pair->a.at, 1), KVF_OK);
    wait_for(pair, are_linked);
}

void pair_close(struct pair *pair)
{
    node_close(&pair->b);
    node_close(&pair->a);
}
