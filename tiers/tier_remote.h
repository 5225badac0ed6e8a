/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_remote.h: blocks in the daemons of other nodes.
 *
 * A location is a link (transport_ucx.h) to the node that is said to have the block; its record
 * comes as it lies there, encoded, straight into the memory of the load, and is judged: page,
 * name, length, checksum of the payload. Nothing is ever stored by this tier.
 */
#ifndef KVF_TIERS_TIER_REMOTE_H
#define KVF_TIERS_TIER_REMOTE_H

#include "base/env.h"
#include "tiers/tier.h"
#include "tiers/work.h"
#include "transport/transport_ucx.h"

struct kvf_remote_config {
    struct kvf_net *net; /* borrowed until close */
    struct kvf_env env;
    struct kvf_work_queue *work; /* borrowed until close */
    uint64_t timeout_ns;         /* a load ends after this, with KVF_MISS if with nothing */
    uint64_t inflight_bytes;     /* of loads; one is always allowed */
};

/* KVF_OK; KVF_ERR_NO_MEMORY. */
int kvf_remote_open(const struct kvf_remote_config *config, struct kvf_tier **tier_out);

/* Bytes that open takes, for --check. */
uint64_t kvf_remote_table_bytes(void);

/* A FETCH_DONE of the network that belongs to this tier: all of them do. */
void kvf_remote_fetched(struct kvf_tier *tier, struct kvf_net_fetch *fetch);

/* load: io->location is a kvf_net_link. done: KVF_OK; KVF_MISS: the peer has no such block;
 * KVF_ERR_CORRUPT; KVF_ERR_BUSY, _TIMEOUT, _DISCONNECTED: of the peer. */
extern const struct kvf_tier_ops kvf_tier_remote_ops;

#endif /* KVF_TIERS_TIER_REMOTE_H */
