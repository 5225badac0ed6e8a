/* SPDX-License-Identifier: Apache-2.0
 *
 * index.h: from block name to where the block is. One entry a block (key_id, shard), and one more a
 * set for sets of several shards. 60 bytes an entry and 4 a hash bucket, all reserved at open.
 *
 *   buckets   u32 [capacity]          first entry of each chain
 *   entries   60 bytes [capacity]     stable: their number is the cookie that tiers know
 *
 * key_id is a keyed hash, so its first bytes spread evenly and clients cannot aim at a bucket.
 * Owner: the reactor. Nothing blocks; nothing allocates after open.
 */
#ifndef KVF_AGENT_INDEX_H
#define KVF_AGENT_INDEX_H

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "tiers/tier.h"

#define KVF_INDEX_NONE           UINT32_MAX
#define KVF_INDEX_SHARD_SET      0xfffu /* the entry that counts a set's shards */
#define KVF_INDEX_NAMESPACES_MAX 1024

enum kvf_entry_state {
    KVF_ENTRY_FREE = 0,
    KVF_ENTRY_FILLING = 1, /* a put copies into its slot */
    KVF_ENTRY_LOADING = 2, /* a read from a drive fills its slot */
    KVF_ENTRY_READY = 3,   /* on at least one tier */
};

enum kvf_entry_nvme {
    KVF_NVME_NONE = 0,
    KVF_NVME_QUEUED = 1, /* its write is queued or running */
    KVF_NVME_STORED = 2, /* its record outlives a kill of the daemon */
    KVF_NVME_SYNCED = 3, /* and a loss of power */
};

struct kvf_entry {
    uint8_t key_id[32];
    uint32_t nvme_low, nvme_high; /* kvf_location on its drive; two words keep the size at 60 */
    uint32_t dram_slot;           /* slot number, KVF_INDEX_NONE: not in memory */
    uint32_t next;
    uint32_t payload_crc32c; /* set entry: shards that are READY */
    uint32_t record_bytes : 27;
    uint32_t drive : 3;
    uint32_t is_set : 1;
    uint32_t is_complete : 1; /* set entry: all shards are READY */
    uint32_t namespace_index : 10;
    uint32_t shard : 12;
    uint32_t state : 2;          /* enum kvf_entry_state */
    uint32_t nvme : 2;           /* enum kvf_entry_nvme */
    uint32_t is_hit : 1;         /* used since it was written: a segment's reuse keeps it once */
    uint32_t is_no_write : 1;    /* never goes to a drive */
    uint32_t is_head : 1;        /* begins a chain */
    uint32_t is_crc_unknown : 1; /* recovered and not read, or not summed: payload_crc32c is not
                                    known yet */
    uint32_t is_admitted : 1;    /* goes, or went, to its drive: the chain behind it may follow */
    uint32_t is_fresh : 1;       /* put since the clock hand (room.c) came by last */
};
static_assert(sizeof(struct kvf_entry) == 60, "entry and bucket take 64 bytes");

struct kvf_index {
    struct kvf_entry *entries;
    uint32_t *buckets;
    uint32_t capacity;
    uint32_t bucket_mask;
    uint32_t free_head;
    uint32_t fresh; /* entries from here on were never used */
    uint32_t count;
};

/* Bytes that open reserves for so many entries. */
uint64_t kvf_index_bytes(uint32_t capacity);

/* capacity is rounded up to a power of two. KVF_OK; KVF_ERR_INVALID, _NO_MEMORY. */
int kvf_index_open(struct kvf_index *index, uint32_t capacity);
void kvf_index_close(struct kvf_index *index);

/* The entry of this name, or NULL. */
struct kvf_entry *kvf_index_find(const struct kvf_index *index, const uint8_t key_id[32],
                                 uint32_t shard);

/* A new entry, FILLING, without places. The name must not be in the index. NULL: the index is
 * full. */
struct kvf_entry *kvf_index_insert(struct kvf_index *index, const uint8_t key_id[32],
                                   uint32_t shard, uint32_t namespace_index);

/* Take an entry out of the index. Its number stays its own until free: tiers may still name it. */
void kvf_index_unlink(struct kvf_index *index, struct kvf_entry *entry);
void kvf_index_free(struct kvf_index *index, struct kvf_entry *entry);

static inline void kvf_index_remove(struct kvf_index *index, struct kvf_entry *entry)
{
    kvf_index_unlink(index, entry);
    kvf_index_free(index, entry);
}

static inline kvf_cookie kvf_index_cookie(const struct kvf_index *index,
                                          const struct kvf_entry *entry)
{
    return (kvf_cookie)(entry - index->entries);
}

static inline struct kvf_entry *kvf_index_at(const struct kvf_index *index, kvf_cookie cookie)
{
    assert(cookie < index->fresh);
    return &index->entries[cookie];
}

static inline kvf_location kvf_entry_nvme_location(const struct kvf_entry *entry)
{
    return (kvf_location)entry->nvme_high << 32 | entry->nvme_low;
}

static inline void kvf_entry_set_nvme(struct kvf_entry *entry, kvf_location location)
{
    entry->nvme_low = (uint32_t)location;
    entry->nvme_high = (uint32_t)(location >> 32);
}

static inline bool kvf_entry_in_dram(const struct kvf_entry *entry)
{
    return entry->state == KVF_ENTRY_READY && entry->dram_slot != KVF_INDEX_NONE;
}

static inline bool kvf_entry_on_drive(const struct kvf_entry *entry)
{
    return entry->nvme == KVF_NVME_STORED || entry->nvme == KVF_NVME_SYNCED;
}

#endif /* KVF_AGENT_INDEX_H */
