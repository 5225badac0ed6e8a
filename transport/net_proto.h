/* SPDX-License-Identifier: Apache-2.0
 *
 * net_proto.h: what may stand in a message between nodes, who may send it, and the keys and MACs of
 * a link. The layouts are net_wire.h. Nothing here trusts a length, a number or a reserved field.
 *
 * All functions: any thread, never block, no allocation. Checks return KVF_OK or a failure and then
 * set *why_out to one static line.
 */
#ifndef KVF_TRANSPORT_NET_PROTO_H
#define KVF_TRANSPORT_NET_PROTO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "transport/net_wire.h"
#include "transport/proto.h"

/* A submission and all its keys. */
#define KVF_NET_SUBMIT_BYTES_MAX                                                                   \
    (sizeof(struct kvf_shm_sqe) + KVF_SHM_REQUEST_ENTRIES_MAX * sizeof(struct kvf_shm_key))

#define KVF_NET_REPLAY_WORDS 16 /* 64 times as many messages may overtake one */

/* Sequence numbers that have come on one direction of a link. */
struct kvf_net_replay {
    uint64_t highest;
    uint64_t seen[KVF_NET_REPLAY_WORDS]; /* ring of bits, bit n % size for number n */
};

/* Of what records and messages look like here: two builds that differ refuse each other. */
uint64_t kvf_net_layout_fp(void);

/* The key of HELLO and WELCOME, from the cluster's. */
void kvf_net_peer_key(const uint8_t cluster_key[32], uint8_t key_out[32]);

/* The key of a tenant's clients on other nodes, from the cluster's: it opens no other tenant and
 * makes no peer. */
void kvf_net_client_key(const uint8_t cluster_key[32], const char *tenant, uint8_t key_out[32]);

/* The key of one link, from that of its HELLO, the nonces and incarnations of both sides. */
void kvf_net_session_key(const uint8_t greet_key[32], const uint8_t initiator_nonce[32],
                         const uint8_t acceptor_nonce[32], uint64_t initiator_incarnation,
                         uint64_t acceptor_incarnation, uint8_t key_out[32]);

/* Write head->mac. */
void kvf_net_seal(const uint8_t key[32], struct kvf_net_head *head, const void *body);
/* Is it right? In constant time. */
bool kvf_net_is_sealed(const uint8_t key[32], const struct kvf_net_head *head, const void *body);

/* Judge the private copy of a head by itself: magic, type, direction, sizes. from_acceptor: where
 * it comes from. KVF_OK; KVF_ERR_PROTOCOL. */
int kvf_net_head_check(const struct kvf_net_head *head, size_t data_bytes, bool from_acceptor,
                       const char **why_out);

/* Judge a body of head->type and head->body_bytes: enums, reserved fields, texts, counts. KVF_OK;
 * KVF_ERR_PROTOCOL. */
int kvf_net_body_check(const struct kvf_net_head *head, const void *body, const char **why_out);

/* Has this number come for the first time, and not long ago? Takes note of it. */
bool kvf_net_replay_accept(struct kvf_net_replay *replay, uint64_t sequence);

#endif /* KVF_TRANSPORT_NET_PROTO_H */
