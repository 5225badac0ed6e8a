/* SPDX-License-Identifier: Apache-2.0
 *
 * place_set.c: sets, the shards of one chunk: how many of them are here.
 */
#include "agent/core.h"

#include <string.h>

#include "base/mutant.h"

struct kvf_entry *kvf_place_set(struct kvf_agent *agent, const uint8_t key_id[32],
                                uint16_t shard_count)
{
    return kvf_index_find(&agent->index, key_id, shard_count > 1 ? KVF_INDEX_SHARD_SET : 0);
}

bool kvf_place_set_is_whole(const struct kvf_agent *agent, const struct kvf_entry *set)
{
    (void)agent;
    return set->is_set ? set->is_complete
                       : set->state == KVF_ENTRY_READY || set->state == KVF_ENTRY_LOADING;
}

/* One more shard is READY. KVF_OK; KVF_ERR_BUSY: no room for the set's entry. */
int kvf_place_set_add(struct kvf_agent *agent, struct kvf_entry *entry, uint16_t shard_count)
{
    struct kvf_entry *set;

    agent->namespaces[entry->namespace_index].blocks++;
    if (shard_count <= 1) {
        return KVF_OK;
    }
    set = kvf_index_find(&agent->index, entry->key_id, KVF_INDEX_SHARD_SET);
    if (set == NULL) {
        set = kvf_index_insert(&agent->index, entry->key_id, KVF_INDEX_SHARD_SET,
                               entry->namespace_index);
        if (set == NULL) {
            agent->namespaces[entry->namespace_index].blocks--;
            return KVF_ERR_BUSY;
        }
        set->is_set = 1;
        set->state = KVF_ENTRY_READY;
        kvf_entry_set_nvme(set, 0); /* not watched, see room.c */
    }
    set->payload_crc32c++;
    set->is_complete = set->payload_crc32c + KVF_MUTANT(set_early) >= shard_count;
    return KVF_OK;
}

void kvf_place_set_subtract(struct kvf_agent *agent, struct kvf_entry *entry)
{
    struct kvf_entry *set;

    agent->namespaces[entry->namespace_index].blocks--;
    if (agent->namespaces[entry->namespace_index].shard_count <= 1) {
        return;
    }
    set = kvf_index_find(&agent->index, entry->key_id, KVF_INDEX_SHARD_SET);
    assert(set != NULL && set->payload_crc32c > 0);
    set->payload_crc32c--;
    set->is_complete = 0;
    if (set->payload_crc32c == 0) {
        kvf_index_remove(&agent->index, set);
    }
}

void kvf_place_forget_set(struct kvf_agent *agent, struct kvf_entry *entry)
{
    uint16_t shard_count = agent->namespaces[entry->namespace_index].shard_count;
    uint8_t key_id[32];

    if (shard_count <= 1) {
        kvf_place_forget_block(agent, entry);
        return;
    }
    memcpy(key_id, entry->key_id, sizeof(key_id));
    for (uint32_t shard = 0; shard < shard_count; shard++) {
        struct kvf_entry *block = kvf_index_find(&agent->index, key_id, shard);

        if (block != NULL) {
            kvf_place_forget_block(agent, block);
        }
    }
}
