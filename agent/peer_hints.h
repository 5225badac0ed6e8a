/* SPDX-License-Identifier: Apache-2.0
 *
 * peer_hints.h: which peers are said to have which blocks. Hints only: the owner confirms.
 *
 * A hint is named by 64 bits of the block's name; two names that share them cost a fetch that ends
 * as a miss. Who has it is a set of sources, of which there are 64; each connection's stream is one
 * source, so that all it said can be forgotten at once: its source is closed, counts for nothing
 * from then on, and is swept out of the table a few hints at a time.
 *
 * Owner: the reactor. Nothing blocks; nothing allocates after open.
 */
#ifndef KVF_AGENT_PEER_HINTS_H
#define KVF_AGENT_PEER_HINTS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

#define KVF_HINT_SOURCES 64
#define KVF_HINT_NONE    UINT32_MAX

struct kvf_hint {
    uint64_t tag;
    uint64_t sources; /* a bit for each */
    uint32_t record_bytes;
    uint32_t next;
};

struct kvf_hints {
    struct kvf_hint *hints;
    uint32_t *buckets;
    uint32_t capacity; /* a power of two */
    uint32_t free_head;
    uint32_t fresh; /* hints from here on were never used */
    uint32_t count;
    uint64_t open_sources;
    uint64_t swept_sources; /* closed, and not yet out of the table */
    uint32_t sweep;         /* bucket that is next */
    uint64_t sweep_sources; /* those that this round takes out */
    uint64_t dropped_count; /* hints that found no place */
};

/* Bytes that open takes. */
uint64_t kvf_hints_bytes(uint32_t capacity);
/* capacity is rounded up to a power of two. KVF_OK; KVF_ERR_NO_MEMORY. */
int kvf_hints_open(struct kvf_hints *hints, uint32_t capacity);
void kvf_hints_close(struct kvf_hints *hints);

/* A source without hints; KVF_HINT_NONE: all are in use, or not yet swept. */
uint32_t kvf_hints_source_open(struct kvf_hints *hints);
void kvf_hints_source_close(struct kvf_hints *hints, uint32_t source);
/* Take some hints of closed sources out. True: there is more to do. */
bool kvf_hints_sweep(struct kvf_hints *hints);

void kvf_hints_add(struct kvf_hints *hints, uint32_t source, const uint8_t key_id[32],
                   uint32_t shard, uint32_t record_bytes);
void kvf_hints_remove(struct kvf_hints *hints, uint32_t source, const uint8_t key_id[32],
                      uint32_t shard);
/* Open sources that are said to have the block, 0: none. */
uint64_t kvf_hints_find(const struct kvf_hints *hints, const uint8_t key_id[32], uint32_t shard,
                        uint32_t *record_bytes_out);

#endif /* KVF_AGENT_PEER_HINTS_H */
