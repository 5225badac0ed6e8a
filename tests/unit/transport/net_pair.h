/* SPDX-License-Identifier: Apache-2.0
 *
 * net_pair.h: the networks of two daemons in the process of a test, over UCX on loopback, and what
 * they have said. The test polls both. Whatever goes wrong fails the test that is running.
 */
#ifndef KVF_TESTS_UNIT_TRANSPORT_NET_PAIR_H
#define KVF_TESTS_UNIT_TRANSPORT_NET_PAIR_H

#include <stdbool.h>
#include <stdint.h>

#include "transport/transport_ucx.h"

#define WAIT_MS 60000u /* for whatever a test waits for */

/* One daemon's network, and what it has said. */
struct node {
    struct kvf_net *net;
    struct kvf_net_address at;
    kvf_net_link link; /* the last that came up; 0: it is down */
    bool is_initiator;
    uint64_t peer_incarnation;
    uint32_t ups, downs;
    struct kvf_net_event serves[8]; /* not answered yet */
    uint32_t n_serves;
    uint32_t fetches_done, serves_done;
    int client_fd; /* of the last client, -1: none came */
    char tenant[KVF_NET_NAME_BYTES];
    uint32_t offences;            /* of clients */
    struct kvf_net_event message; /* the last */
    uint8_t message_body[KVF_NET_BODY_BYTES_MAX];
};

/* Both nodes of a test, and what it waits for. */
struct pair {
    struct node a, b; /* a listens, b connects */
    bool (*is_so)(struct pair *pair);
};

/* Ends with node_close. key: each byte of the cluster's. */
void node_open_with(struct node *node, uint64_t incarnation, uint8_t key, bool listens,
                    uint32_t endpoints);
void node_open(struct node *node, uint64_t incarnation, uint8_t key, bool listens);
void node_close(struct node *node);
/* Take all that it has said. */
void node_poll(struct node *node);

/* Poll both once. arg: the pair. Is it so by now? */
bool pair_look(void *arg);
/* Poll both until it is so, for a minute at most. */
void wait_for(struct pair *pair, bool (*is_so)(struct pair *pair));
bool are_linked(struct pair *pair);
bool is_asked(struct pair *pair);
bool has_fetched(struct pair *pair);
bool has_served(struct pair *pair);

/* Both, linked. */
void pair_open(struct pair *pair);
void pair_close(struct pair *pair);

#endif /* KVF_TESTS_UNIT_TRANSPORT_NET_PAIR_H */
