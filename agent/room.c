/* SPDX-License-Identifier: Apache-2.0
 *
 * room.c: what is forgotten so that something else can be kept, beside the memory tier's own
 * eviction: blocks of a namespace or tenant at its quota, entries of a full index, sets that never
 * became whole, blocks whose time is up.
 *
 * Quotas and the index have no order of use of their own. They share a clock hand over the entries:
 * an entry that was put or used since the hand came by last is spared once, the next one is taken.
 * New entries need it as much as used ones: they take the places of what was forgotten, and such a
 * place may lie right before the hand.
 */
#include "agent/core.h"

#include <string.h>

#include "base/mutant.h"
/* Entries that one search spares at most, and as many more that it looks at: beyond the first, what
 * was used is taken as well, so that a large index full of used entries refuses nobody. */
#define STEPS_MAX 4096
/* Watches that are looked at to count what is incomplete; of more one in so many. */
#define COUNTED_MAX 4096

/* Under pressure, sets that have been incomplete for longer than this go before whole ones. */
#define INCOMPLETE_GRACE_S 1
/* Slots looked at for an ended time to live, twice a second; reads do not depend on it. */
#define EXPIRE_STEPS 65536

/* ----------------------------------------------------------------------------------------------
 * The clock hand
 */
struct room {
    bool by_namespace; /* only blocks of this namespace */
    bool by_tenant;    /* only blocks in memory of this tenant */
    bool in_dram;      /* memory must be given back, not only an entry */
    uint32_t namespace_index;
    uint16_t tenant;
};

static bool matches(const struct kvf_agent *agent, const struct kvf_entry *entry,
                    const struct room *room)
{
    if (entry->state != KVF_ENTRY_READY || entry->is_set ||
        (room->in_dram && entry->dram_slot == KVF_INDEX_NONE)) {
        return false;
    }
    if (room->by_namespace && entry->namespace_index != room->namespace_index) {
        return false;
    }
    return !room->by_tenant || agent->namespaces[entry->namespace_index].tenant == room->tenant;
}

/* Forget one set that matches. False: none that may leave was found. */
static bool take_one(struct kvf_agent *agent, const struct room *room)
{
    uint32_t spares = agent->index.fresh < STEPS_MAX ? agent->index.fresh : STEPS_MAX;

    for (uint32_t i = 0; i < 2 * spares; i++) {
        struct kvf_entry *entry;

        if (agent->hand >= agent->index.fresh) {
            agent->hand = 0;
        }
        entry = &agent->index.entries[agent->hand++];
        if (!matches(agent, entry, room) || !kvf_place_may_leave(agent, entry)) {
            continue;
        }
        if (i < spares && (entry->is_hit || entry->is_fresh)) {
            entry->is_hit = 0;
            entry->is_fresh = 0;
            continue;
        }
        agent->metrics.evicted_blocks += entry->dram_slot != KVF_INDEX_NONE;
        if (room->in_dram && (kvf_entry_on_drive(entry) || kvf_entry_in_hbm(agent, entry)) &&
            agent->namespaces[entry->namespace_index].shard_count <= 1) {
            kvf_place_leave_dram(agent, entry); /* a drive or a GPU still has it */
        } else {
            kvf_place_forget_set(agent, entry);
        }
        return true;
    }
    return false;
}

void kvf_room_for_entry(struct kvf_agent *agent)
{
    struct room room = {0};

    if (agent->index.free_head == KVF_INDEX_NONE && agent->index.fresh == agent->index.capacity) {
        (void)take_one(agent, &room);
    }
}

struct kvf_entry *kvf_room_insert(struct kvf_agent *agent, const uint8_t key_id[32], uint32_t shard,
                                  uint32_t namespace_index)
{
    kvf_room_for_entry(agent);
    return kvf_index_insert(&agent->index, key_id, shard, namespace_index);
}

int kvf_room_charge(struct kvf_agent *agent, uint16_t tenant, uint32_t namespace_index,
                    uint64_t bytes)
{
    const struct kvf_config *config = agent->config;
    uint64_t percent = agent->arena_bytes / 100;
    uint64_t tenant_max = config->quota_tenant_share * percent;
    uint64_t namespace_max = config->quota_namespace_share * percent;
    struct room of_namespace = {
        .by_namespace = true, .in_dram = true, .namespace_index = namespace_index};
    struct room of_tenant = {.by_tenant = true, .in_dram = true, .tenant = tenant};
    struct kvf_namespace *ns = &agent->namespaces[namespace_index];

    while (config->quota_namespace_share < 100 && ns->dram_bytes + bytes > namespace_max) {
        if (!take_one(agent, &of_namespace)) {
            return KVF_ERR_BUSY;
        }
    }
    while (config->quota_tenant_share < 100 &&
           agent->tenants[tenant].dram_bytes + bytes > tenant_max) {
        if (!take_one(agent, &of_tenant)) {
            return KVF_ERR_BUSY;
        }
    }
    ns->dram_bytes += bytes;
    agent->tenants[tenant].dram_bytes += bytes;
    return KVF_OK;
}

void kvf_room_uncharge(struct kvf_agent *agent, uint16_t tenant, uint32_t namespace_index,
                       uint64_t bytes)
{
    assert(agent->namespaces[namespace_index].dram_bytes >= bytes);
    agent->namespaces[namespace_index].dram_bytes -= bytes;
    agent->tenants[tenant].dram_bytes -= bytes;
}

bool kvf_room_allows_write(const struct kvf_agent *agent, uint32_t namespace_index, uint64_t bytes)
{
    const struct kvf_config *config = agent->config;
    const struct kvf_namespace *ns = &agent->namespaces[namespace_index];
    const struct kvf_tenant *tenant = &agent->tenants[ns->tenant];
    uint64_t percent = agent->arena_bytes / 100;

    return (config->quota_namespace_share == 100 ||
            ns->writeback_bytes + bytes <= config->quota_namespace_share * percent / 8 * 7) &&
           (config->quota_tenant_share == 100 ||
            tenant->leased_bytes + tenant->writeback_bytes + bytes <=
                config->quota_tenant_share * percent / 8 * 7);
}

/* ----------------------------------------------------------------------------------------------
 * Sets that are not whole
 */
void kvf_room_watch_set(struct kvf_agent *agent, const struct kvf_entry *entry)
{
    struct kvf_entry *set;
    struct kvf_incomplete *watch;

    if (agent->namespaces[entry->namespace_index].shard_count <= 1) {
        return;
    }
    set = kvf_index_find(&agent->index, entry->key_id, KVF_INDEX_SHARD_SET);
    if (set == NULL || set->is_complete || set->nvme_high != 0) {
        return;
    }
    if (agent->incomplete_tail - agent->incomplete_head == KVF_INCOMPLETE_MAX) {
        kvf_room_drop_incomplete(agent); /* the oldest one makes room */
    }
    watch = &agent->incomplete[agent->incomplete_tail & (KVF_INCOMPLETE_MAX - 1)];
    watch->cookie = kvf_index_cookie(&agent->index, set);
    watch->created_s = kvf_agent_second(agent);
    watch->serial = ++agent->watch_serial;
    agent->incomplete_tail++;
    /* A set's entry has no place on a drive: it keeps the watch there. A number that is used again
     * for the same key is another set, and has another watch. */
    set->nvme_low = watch->serial;
    set->nvme_high = 1;
}

/* The set of this watch, if it is not whole yet. NULL: it is, or has gone. */
static struct kvf_entry *incomplete_set(struct kvf_agent *agent, uint32_t number)
{
    const struct kvf_incomplete *watch = &agent->incomplete[number & (KVF_INCOMPLETE_MAX - 1)];
    struct kvf_entry *set = kvf_index_at(&agent->index, watch->cookie);

    return set->state == KVF_ENTRY_READY && set->is_set && !set->is_complete &&
                   set->nvme_high == 1 && set->nvme_low == watch->serial
               ? set
               : NULL;
}

uint64_t kvf_room_count_incomplete(struct kvf_agent *agent)
{
    uint32_t step = 1 + (agent->incomplete_tail - agent->incomplete_head) / COUNTED_MAX;
    uint64_t n = 0;

    for (uint32_t i = agent->incomplete_head; agent->incomplete_tail - i >= step; i += step) {
        n += incomplete_set(agent, i) != NULL ? step : 0;
    }
    return n;
}

void kvf_room_drop_incomplete(struct kvf_agent *agent)
{
    struct kvf_entry *set = incomplete_set(agent, agent->incomplete_head);

    agent->incomplete_head++;
    if (set != NULL) {
        agent->metrics.evicted_sets_incomplete++;
        kvf_place_forget_set(agent, set);
    }
}

static bool drop_older_than(struct kvf_agent *agent, uint32_t seconds)
{
    struct kvf_incomplete *watch;

    if (agent->incomplete_head == agent->incomplete_tail) {
        return false;
    }
    watch = &agent->incomplete[agent->incomplete_head & (KVF_INCOMPLETE_MAX - 1)];
    if (kvf_agent_second(agent) - watch->created_s <= seconds) {
        return false;
    }
    kvf_room_drop_incomplete(agent);
    return true;
}

void kvf_room_before_reserve(struct kvf_agent *agent)
{
    /* incomplete sets first, once memory has been short within the last second */
    if (agent->now_ns < agent->pressure_ns + KVF_NS_PER_S) {
        (void)drop_older_than(agent, INCOMPLETE_GRACE_S);
    }
}

/* ----------------------------------------------------------------------------------------------
 * Time
 */
bool kvf_room_is_expired(const struct kvf_agent *agent, const struct kvf_entry *entry)
{
    const struct kvf_slot_side *side;

    if (agent->ttl_slots == 0 || !kvf_entry_in_dram(entry) || KVF_MUTANT(ttl_ignored)) {
        return false;
    }
    side = &agent->sides[entry->dram_slot];
    return side->expires_s != 0 && side->expires_s < kvf_agent_second(agent);
}

struct kvf_entry *kvf_room_find(struct kvf_agent *agent, const uint8_t key_id[32], uint32_t shard)
{
    struct kvf_entry *entry = kvf_index_find(&agent->index, key_id, shard);

    if (entry != NULL && kvf_room_is_expired(agent, entry)) {
        agent->metrics.expired_blocks++;
        kvf_place_forget_set(agent, entry);
        return NULL;
    }
    return entry;
}

void kvf_room_tick(struct kvf_agent *agent)
{
    uint64_t steps = agent->n_sides < EXPIRE_STEPS ? agent->n_sides : EXPIRE_STEPS;

    while (agent->ttl_slots > 0 && steps-- > 0 && !KVF_MUTANT(ttl_ignored)) {
        const struct kvf_slot_side *side = &agent->sides[agent->expiry_cursor];

        if (side->expires_s != 0 && side->expires_s < kvf_agent_second(agent)) {
            agent->metrics.expired_blocks++;
            kvf_place_forget_set(agent, kvf_index_at(&agent->index, side->cookie));
        }
        agent->expiry_cursor = (agent->expiry_cursor + 1) % agent->n_sides;
    }
    while (drop_older_than(agent, (uint32_t)agent->config->put_set_timeout)) {
    }
}
