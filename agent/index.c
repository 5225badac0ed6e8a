/* SPDX-License-Identifier: Apache-2.0
 *
 * index.c: chained hash table over a fixed array of entries. Chains, and not open addressing,
 * because an entry's number is handed to the tiers and must not change while the block lives.
 */
#include "agent/index.h"

#include <stdlib.h>
#include <string.h>

static uint32_t bucket_of(const struct kvf_index *index, const uint8_t key_id[32], uint32_t shard)
{
    uint64_t word;

    memcpy(&word, key_id, sizeof(word));
    /* shards of one key spread too: an odd multiplier keeps neighbours apart */
    return (uint32_t)(word + (uint64_t)shard * 0x9e3779b97f4a7c15ull) & index->bucket_mask;
}

static uint32_t round_up_to_power(uint32_t value)
{
    uint32_t power = 1;

    while (power < value) {
        power *= 2;
    }
    return power;
}

uint64_t kvf_index_bytes(uint32_t capacity)
{
    uint64_t rounded = capacity > 1u << 31 ? 1ull << 31 : round_up_to_power(capacity);

    return rounded * (sizeof(struct kvf_entry) + sizeof(uint32_t));
}

int kvf_index_open(struct kvf_index *index, uint32_t capacity)
{
    memset(index, 0, sizeof(*index));
    if (capacity == 0 || capacity > 1u << 31) {
        return KVF_ERR_INVALID;
    }
    index->capacity = round_up_to_power(capacity);
    index->bucket_mask = index->capacity - 1;
    index->free_head = KVF_INDEX_NONE;
    index->entries = calloc(index->capacity, sizeof(*index->entries));
    index->buckets = malloc((size_t)index->capacity * sizeof(*index->buckets));
    if (index->entries == NULL || index->buckets == NULL) {
        kvf_index_close(index);
        return KVF_ERR_NO_MEMORY;
    }
    memset(index->buckets, 0xff, (size_t)index->capacity * sizeof(*index->buckets));
    return KVF_OK;
}

void kvf_index_close(struct kvf_index *index)
{
    free(index->entries);
    free(index->buckets);
    memset(index, 0, sizeof(*index));
}

struct kvf_entry *kvf_index_find(const struct kvf_index *index, const uint8_t key_id[32],
                                 uint32_t shard)
{
    uint32_t at = index->buckets[bucket_of(index, key_id, shard)];

    while (at != KVF_INDEX_NONE) {
        struct kvf_entry *entry = &index->entries[at];

        if (entry->shard == shard && memcmp(entry->key_id, key_id, 32) == 0) {
            return entry;
        }
        at = entry->next;
    }
    return NULL;
}

struct kvf_entry *kvf_index_insert(struct kvf_index *index, const uint8_t key_id[32],
                                   uint32_t shard, uint32_t namespace_index)
{
    uint32_t *bucket = &index->buckets[bucket_of(index, key_id, shard)];
    struct kvf_entry *entry;
    uint32_t at;

    if (index->free_head != KVF_INDEX_NONE) {
        at = index->free_head;
        index->free_head = index->entries[at].next;
    } else if (index->fresh < index->capacity) {
        at = index->fresh++;
    } else {
        return NULL;
    }
    entry = &index->entries[at];
    memset(entry, 0, sizeof(*entry));
    memcpy(entry->key_id, key_id, 32);
    entry->shard = shard & 0xfffu;
    entry->namespace_index = namespace_index & 0x3ffu;
    entry->state = KVF_ENTRY_FILLING;
    entry->is_fresh = 1;
    entry->dram_slot = KVF_INDEX_NONE;
    kvf_entry_set_nvme(entry, KVF_LOCATION_NONE);
    entry->next = *bucket;
    *bucket = at;
    index->count++;
    return entry;
}

void kvf_index_unlink(struct kvf_index *index, struct kvf_entry *entry)
{
    uint32_t at = kvf_index_cookie(index, entry);
    uint32_t *link = &index->buckets[bucket_of(index, entry->key_id, entry->shard)];

    assert(entry->state != KVF_ENTRY_FREE);
    while (*link != at) {
        assert(*link != KVF_INDEX_NONE);
        link = &index->entries[*link].next;
    }
    *link = entry->next;
    entry->state = KVF_ENTRY_FREE;
    index->count--;
}

void kvf_index_free(struct kvf_index *index, struct kvf_entry *entry)
{
    assert(entry->state == KVF_ENTRY_FREE);
    entry->next = index->free_head;
    index->free_head = kvf_index_cookie(index, entry);
}
