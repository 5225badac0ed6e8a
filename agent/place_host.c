/* SPDX-License-Identifier: Apache-2.0
 *
 * place_host.c: what the tiers ask the index: may this slot be taken, forget it, keep this record
 * when its segment is reused, and whom does this recovered record belong to.
 */
#include "agent/core.h"

#include <string.h>

#include "agent/notify.h"
#include "base/mutant.h"
/* ----------------------------------------------------------------------------------------------
 * Memory
 */

/* A set leaves memory as one, so one block that is pinned or on its way keeps it all. */
static bool block_may_leave(struct kvf_agent *agent, const struct kvf_entry *block)
{
    if (block->state != KVF_ENTRY_READY || !kvf_hbm_is_idle(agent, block)) {
        return false;
    }
    return block->dram_slot == KVF_INDEX_NONE ||
           kvf_dram_pins(agent->dram_store, kvf_place_slot(agent, block)) == 0;
}

bool kvf_place_may_leave(struct kvf_agent *agent, const struct kvf_entry *entry)
{
    uint16_t shard_count = agent->namespaces[entry->namespace_index].shard_count;

    if (shard_count <= 1) {
        return block_may_leave(agent, entry);
    }
    for (uint32_t shard = 0; shard < shard_count; shard++) {
        const struct kvf_entry *block = kvf_index_find(&agent->index, entry->key_id, shard);

        if (block != NULL && !block_may_leave(agent, block)) {
            return false;
        }
    }
    return true;
}

static bool may_evict(void *ctx, kvf_location location, kvf_cookie cookie)
{
    struct kvf_agent *agent = ctx;

    (void)location;
    return kvf_place_may_leave(agent, kvf_index_at(&agent->index, cookie));
}

static void evict(void *ctx, kvf_location location, kvf_cookie cookie)
{
    struct kvf_agent *agent = ctx;
    struct kvf_entry *entry = kvf_index_at(&agent->index, cookie);
    uint16_t shard_count = agent->namespaces[entry->namespace_index].shard_count;
    struct kvf_entry *block;
    bool all_stored = true;

    (void)location;
    agent->pressure_ns = agent->now_ns;
    for (uint32_t shard = 0; shard < shard_count; shard++) {
        block = shard_count <= 1 ? entry : kvf_index_find(&agent->index, entry->key_id, shard);
        if (block != NULL) {
            agent->metrics.evicted_blocks += block->dram_slot != KVF_INDEX_NONE;
            all_stored &= kvf_entry_on_drive(block) || kvf_entry_in_hbm(agent, block);
        }
    }
    if (!all_stored || KVF_MUTANT(stored_forgotten)) {
        kvf_place_forget_set(agent, entry);
        return;
    }
    for (uint32_t shard = 0; shard < shard_count; shard++) {
        block = shard_count <= 1 ? entry : kvf_index_find(&agent->index, entry->key_id, shard);
        if (block != NULL && block->dram_slot != KVF_INDEX_NONE) {
            kvf_place_leave_dram(agent, block);
        }
    }
}

struct kvf_tier_host kvf_place_dram_host(struct kvf_agent *agent)
{
    return (struct kvf_tier_host){.ctx = agent, .may_evict = may_evict, .evict = evict};
}

/* ----------------------------------------------------------------------------------------------
 * Drives
 */

/* The record is gone; with it the block, unless memory has it. */
static void leave_drive(struct kvf_agent *agent, struct kvf_entry *entry)
{
    kvf_place_leave_drive(agent, entry, false);
    if (entry->state == KVF_ENTRY_READY && entry->dram_slot == KVF_INDEX_NONE &&
        !kvf_entry_in_hbm(agent, entry)) {
        kvf_place_forget_set(agent, entry);
    }
}

static bool is_stored_at(const struct kvf_entry *entry, kvf_location location)
{
    return entry->state != KVF_ENTRY_FREE && kvf_entry_on_drive(entry) &&
           kvf_entry_nvme_location(entry) == location;
}

static bool reclaim(void *ctx, kvf_location location, kvf_cookie cookie)
{
    struct kvf_drive *drive = ctx;
    struct kvf_agent *agent = drive->agent;
    struct kvf_entry *entry = kvf_index_at(&agent->index, cookie);

    if (!is_stored_at(entry, location)) {
        return false;
    }
    if (entry->state == KVF_ENTRY_LOADING || entry->is_hit) {
        entry->is_hit = 0; /* one more round for one use */
        agent->metrics.nvme_reinserted_blocks++;
        return true;
    }
    agent->metrics.nvme_reclaimed_blocks++;
    leave_drive(agent, entry);
    return false;
}

static void moved(void *ctx, kvf_location from, kvf_location to, kvf_cookie cookie)
{
    struct kvf_drive *drive = ctx;
    struct kvf_entry *entry = kvf_index_at(&drive->agent->index, cookie);

    if (!is_stored_at(entry, from)) {
        return;
    }
    if (to == KVF_LOCATION_NONE) {
        drive->agent->metrics.nvme_reclaimed_blocks++;
        leave_drive(drive->agent, entry);
        return;
    }
    kvf_entry_set_nvme(entry, to);
    kvf_admit_spend(drive, kvf_nvme_stored_bytes(drive->store, to));
}

static void lost(void *ctx, kvf_location location, kvf_cookie cookie, int status)
{
    struct kvf_drive *drive = ctx;
    struct kvf_entry *entry;

    (void)status;
    if (cookie == KVF_COOKIE_NONE) {
        return;
    }
    entry = kvf_index_at(&drive->agent->index, cookie);
    if (is_stored_at(entry, location)) {
        leave_drive(drive->agent, entry);
    }
}

static kvf_cookie recovered(void *ctx, const struct kvf_block_name *name, kvf_location location,
                            uint64_t record_bytes, uint64_t sequence)
{
    struct kvf_drive *drive = ctx;
    struct kvf_agent *agent = drive->agent;
    struct kvf_entry *entry;
    uint16_t ns;

    (void)sequence;
    if (name->shard_count == 0 || name->shard >= name->shard_count ||
        name->shard_count > KVF_SHARDS_MAX || record_bytes > KVF_PROTO_RECORD_MAX ||
        kvf_index_find(&agent->index, name->key_id, name->shard) != NULL ||
        kvf_namespace_get(agent, name->namespace_id, name->shard_count, &ns) != KVF_OK ||
        agent->namespaces[ns].shard_count != name->shard_count) {
        return KVF_COOKIE_NONE;
    }
    entry = kvf_index_insert(&agent->index, name->key_id, name->shard, ns);
    if (entry == NULL) {
        return KVF_COOKIE_NONE;
    }
    if (kvf_place_set_add(agent, entry, name->shard_count) != KVF_OK) {
        kvf_index_remove(&agent->index, entry);
        return KVF_COOKIE_NONE;
    }
    entry->state = KVF_ENTRY_READY;
    entry->nvme = KVF_NVME_SYNCED; /* recovery has sealed what was open */
    entry->drive = (uint32_t)(drive - agent->drives) & 7u;
    entry->record_bytes = (uint32_t)record_bytes & 0x7ffffffu;
    entry->is_crc_unknown = 1;
    entry->is_admitted = 1;
    kvf_entry_set_nvme(entry, location);
    if (agent->incomplete_tail - agent->incomplete_head < KVF_INCOMPLETE_MAX) {
        kvf_room_watch_set(agent, entry); /* without room for it: until its segment is reused */
    }
    agent->namespaces[ns].nvme_bytes += record_bytes;
    agent->metrics.nvme_recovered_blocks++;
    kvf_start_found(agent, agent->metrics.nvme_recovered_blocks);
    return kvf_index_cookie(&agent->index, entry);
}

static void looked(void *ctx, uint64_t looked_bytes, uint64_t total_bytes)
{
    struct kvf_drive *drive = ctx;

    kvf_start_looked(drive->agent, looked_bytes, total_bytes);
}

struct kvf_tier_host kvf_place_drive_host(struct kvf_drive *drive)
{
    return (struct kvf_tier_host){.ctx = drive,
                                  .reclaim = reclaim,
                                  .moved = moved,
                                  .looked = looked,
                                  .recovered = recovered,
                                  .lost = lost};
}
