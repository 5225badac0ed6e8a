/* SPDX-License-Identifier: Apache-2.0
 *
 * sim_audit.c: the daemon's own books, seen from inside: every number that is kept must be the sum
 * of what it counts, every bound must hold, and in the end everything must be given back.
 */
#include "agent/peers.h"
#include "tests/sim/sim.h"

#include <stdlib.h>
#include <string.h>

enum {
    SIM_GPU_SLOTS = 1 << 16,
};

struct sums {
    uint64_t blocks[KVF_INDEX_NAMESPACES_MAX];
    uint64_t dram_bytes[KVF_INDEX_NAMESPACES_MAX], nvme_bytes[KVF_INDEX_NAMESPACES_MAX];
    uint64_t tenant_dram_bytes[SIM_TENANTS];
    uint64_t tenant_leased_bytes[SIM_TENANTS];
    uint64_t stored_bytes; /* of memory */
    uint32_t entries, on_their_way, writers, abandoned;
    uint32_t pins, pinned_slots, doomed_slots;
    uint64_t leased_bytes, writeback_bytes, staging_bytes;
    uint32_t requests, ops, sessions;
    uint16_t *slot_pins; /* by slot number */
    struct {             /* of the GPU */
        uint64_t stored_bytes, leased_bytes, tenant_leased_bytes[SIM_TENANTS];
        uint32_t pinned_slots, doomed_slots, promotes, demotes;
        uint16_t slot_pins[SIM_GPU_SLOTS];
    } hbm;
};

#define CHECK(condition, ...)                                                                      \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            sim_fail(sim, "books: " #condition ": " __VA_ARGS__);                                  \
        }                                                                                          \
    } while (0)

/* ---- the index ------------------------------------------------------------------------------- */

static void audit_set(struct sim *sim, const struct kvf_entry *set)
{
    const struct kvf_agent *agent = sim->agent;
    uint16_t shard_count = agent->namespaces[set->namespace_index].shard_count;
    uint32_t n = 0;

    for (uint32_t shard = 0; shard < shard_count; shard++) {
        const struct kvf_entry *entry = kvf_index_find(&agent->index, set->key_id, shard);

        n += entry != NULL && entry->state != KVF_ENTRY_FILLING;
    }
    CHECK(set->payload_crc32c == n, "a set counts %u shards, there are %u", set->payload_crc32c, n);
    CHECK(set->is_complete == (n == shard_count), "a set of %u shards has %u", shard_count, n);
}

static void charge(const struct sim *sim, struct sums *sums, uint32_t namespace_index,
                   uint64_t bytes)
{
    sums->dram_bytes[namespace_index] += bytes;
    sums->tenant_dram_bytes[sim->agent->namespaces[namespace_index].tenant] += bytes;
}

static void audit_dram(struct sim *sim, const struct kvf_entry *entry, struct sums *sums)
{
    struct kvf_agent *agent = sim->agent;
    const struct kvf_slot_side *side = &agent->sides[entry->dram_slot];

    CHECK(side->cookie == kvf_index_cookie(&agent->index, entry), "a slot of another entry");
    CHECK(kvf_dram_state(agent->dram_store, kvf_place_slot(agent, entry)) == KVF_SLOT_READY,
          "an entry in a slot that is not ready");
    CHECK((entry->nvme == KVF_NVME_QUEUED) == (kvf_place_writer(agent, entry) != NULL),
          "nvme %u and its writer", entry->nvme);
    charge(sim, sums, entry->namespace_index, entry->record_bytes);
    sums->stored_bytes += entry->record_bytes;
}

static void audit_entry(struct sim *sim, const struct kvf_entry *entry, struct sums *sums)
{
    struct kvf_agent *agent = sim->agent;

    CHECK(entry->state != KVF_ENTRY_FREE, "a free entry in a chain");
    if (entry->is_set) {
        audit_set(sim, entry);
        return;
    }
    sums->blocks[entry->namespace_index] += entry->state != KVF_ENTRY_FILLING;
    if (entry->state == KVF_ENTRY_READY) {
        CHECK(entry->dram_slot != KVF_INDEX_NONE || kvf_entry_on_drive(entry) ||
                  kvf_entry_in_hbm(agent, entry),
              "an entry that is nowhere");
        if (entry->dram_slot != KVF_INDEX_NONE) {
            audit_dram(sim, entry, sums);
        }
    } else {
        const struct kvf_flight *flight = kvf_pool_at(&agent->flights, entry->dram_slot);

        sums->on_their_way++;
        CHECK(flight != NULL && flight->cookie == kvf_index_cookie(&agent->index, entry) &&
                  !flight->is_abandoned,
              "an entry on its way without a flight");
    }
    if (kvf_entry_in_hbm(agent, entry)) {
        const struct kvf_hbm_place *place = kvf_hbm_place(agent, entry);

        CHECK(kvf_dram_state(agent->hbm[place->device].slots, place->slot) == KVF_SLOT_READY,
              "an entry in a slot of the GPU that is not ready");
        sums->hbm.stored_bytes += KVF_HBM_HEAD_BYTES + entry->record_bytes;
    }
    if (kvf_entry_on_drive(entry)) {
        sums->nvme_bytes[entry->namespace_index] += entry->record_bytes;
    }
}

static void audit_index(struct sim *sim, struct sums *sums)
{
    const struct kvf_index *index = &sim->agent->index;

    for (uint32_t bucket = 0; bucket <= index->bucket_mask; bucket++) {
        for (uint32_t at = index->buckets[bucket]; at != KVF_INDEX_NONE;
             at = index->entries[at].next) {
            sums->entries++;
            CHECK(sums->entries <= index->count, "more entries in chains than counted");
            audit_entry(sim, &index->entries[at], sums);
        }
    }
    CHECK(sums->entries == index->count, "%u entries in chains, %u counted", sums->entries,
          index->count);
}

/* ---- sessions, leases, flights --------------------------------------------------------------- */

static void audit_pin(struct sim *sim, struct sums *sums, kvf_location slot, uint64_t bytes)
{
    uint32_t number = (uint32_t)slot;
    enum kvf_slot_state state = kvf_dram_state(sim->agent->dram_store, slot);

    CHECK(state == KVF_SLOT_READY || state == KVF_SLOT_DOOMED, "a pin of a slot in state %d",
          state);
    if (sums->slot_pins[number]++ == 0) {
        sums->pinned_slots++;
        if (state == KVF_SLOT_DOOMED) {
            sums->doomed_slots++;
            sums->stored_bytes += bytes;
        }
    }
}

/* A socket that is not looked at yet: its own client has offended, and it does
 * not wait for ever. */
static void audit_held(struct sim *sim, const struct kvf_session *held)
{
    const struct kvf_agent *agent = sim->agent;
    bool is_known = false;
    uint32_t n_own = 0;

    for (uint32_t i = 0; i < KVF_OFFENDERS_MAX; i++) {
        is_known |= agent->offenders.offenders[i].peer == held->peer;
    }
    CHECK(held->peer != 0 && is_known, "client %llu waits for the offence of another",
          (unsigned long long)held->peer - 1);
    CHECK(held->held_until_ns <= agent->now_ns + agent->offenders.delay_max_ns, "too long a wait");
    for (uint32_t i = 0; i < agent->sessions_high; i++) {
        const struct kvf_session *other = &agent->sessions[i];

        n_own += other->state == KVF_SESSION_HELLO && other->held_until_ns != 0 &&
                 other->peer == held->peer;
    }
    CHECK(n_own <= 4, "%u sockets of an offender wait", n_own);
}

static void audit_pin_hbm(struct sim *sim, struct sums *sums, uint32_t device, kvf_location slot,
                          uint64_t bytes)
{
    uint32_t number = (uint32_t)slot;
    enum kvf_slot_state state = kvf_dram_state(sim->agent->hbm[device].slots, slot);

    CHECK(state == KVF_SLOT_READY || state == KVF_SLOT_DOOMED, "a pin of a GPU's slot in state %d",
          state);
    CHECK(number < SIM_GPU_SLOTS, "slot %u", number);
    if (sums->hbm.slot_pins[number]++ == 0) {
        sums->hbm.pinned_slots++;
        if (state == KVF_SLOT_DOOMED) {
            sums->hbm.doomed_slots++;
            sums->hbm.stored_bytes += KVF_HBM_HEAD_BYTES + bytes;
        }
    }
}

static void audit_lease_pin(struct sim *sim, const struct kvf_session *session, struct sums *sums,
                            const struct kvf_pin *pin, uint64_t leased_bytes[2])
{
    sums->pins++;
    leased_bytes[pin->device != 0] += pin->bytes;
    if (pin->device == 0) {
        audit_pin(sim, sums, pin->slot, pin->bytes);
        return;
    }
    sums->hbm.leased_bytes += pin->bytes;
    sums->hbm.tenant_leased_bytes[session->tenant] += pin->bytes;
    audit_pin_hbm(sim, sums, pin->device - 1, pin->slot, pin->bytes);
}

static void audit_session(struct sim *sim, const struct kvf_session *session, struct sums *sums)
{
    uint64_t leased_bytes[2] = {0};

    if (session->state == KVF_SESSION_FREE) {
        return;
    }
    sums->sessions++;
    sums->staging_bytes += session->charged_bytes;
    if (session->state == KVF_SESSION_HELLO && session->held_until_ns != 0) {
        audit_held(sim, session);
    }
    for (const struct kvf_request *r = session->requests; r != NULL; r = r->next) {
        uint32_t waiting = 0;

        sums->requests++;
        for (const struct kvf_op *op = r->ops; op != NULL; op = op->request_next) {
            waiting++;
        }
        CHECK(waiting == r->waiting, "%u ops, %u counted", waiting, r->waiting);
        sums->ops += waiting;
    }
    if (session->state != KVF_SESSION_READY) {
        return;
    }
    for (uint32_t i = session->lease_oldest; i != KVF_INDEX_NONE; i = session->leases[i].newer) {
        for (const struct kvf_pin *pin = session->leases[i].pins; pin != NULL; pin = pin->next) {
            audit_lease_pin(sim, session, sums, pin, leased_bytes);
        }
    }
    CHECK(leased_bytes[0] == session->leased_bytes && leased_bytes[1] == session->hbm_leased_bytes,
          "%llu bytes leased, %llu counted; on the GPU %llu and %llu",
          (unsigned long long)leased_bytes[0], (unsigned long long)session->leased_bytes,
          (unsigned long long)leased_bytes[1], (unsigned long long)session->hbm_leased_bytes);
    sums->leased_bytes += leased_bytes[0];
    sums->tenant_leased_bytes[session->tenant] += leased_bytes[0];
}

static void audit_flights(struct sim *sim, struct sums *sums)
{
    struct kvf_agent *agent = sim->agent;
    uint32_t taken = kvf_pool_taken_count(&agent->flights);

    for (uint32_t i = 0; i < agent->flights.count && taken > 0; i++) {
        const struct kvf_flight *flight = kvf_pool_at(&agent->flights, i);

        if (flight == NULL) {
            continue;
        }
        taken--;
        if (flight->kind == KVF_FLIGHT_WRITE) {
            sums->writers++;
            sums->writeback_bytes += flight->record_bytes;
            audit_pin(sim, sums, flight->slot, flight->record_bytes);
        } else if (flight->kind == KVF_FLIGHT_PROMOTE) {
            sums->hbm.promotes++;
            sums->hbm.stored_bytes += KVF_HBM_HEAD_BYTES + flight->record_bytes;
            audit_pin(sim, sums, flight->slot, flight->record_bytes);
        } else {
            const struct kvf_entry *entry = kvf_index_at(&agent->index, flight->cookie);

            sums->abandoned += flight->is_abandoned;
            sums->hbm.demotes += flight->is_demotion;
            if (flight->hbm_slot != KVF_LOCATION_NONE) {
                audit_pin_hbm(sim, sums, 0, flight->hbm_slot, flight->record_bytes);
            }
            if (flight->slot != KVF_LOCATION_NONE) {
                sums->stored_bytes += flight->record_bytes;
                charge(sim, sums, entry->namespace_index, flight->record_bytes);
            }
        }
    }
}

/* Records that other nodes are given. */
static void audit_serves(struct sim *sim, struct sums *sums)
{
    const struct kvf_peers *peers = sim->agent->peers;

    for (uint32_t i = 0; peers != NULL && i < peers->serves.count; i++) {
        const struct kvf_peer_serve *serve = kvf_pool_at(&peers->serves, i);

        if (serve != NULL && serve->slot != KVF_LOCATION_NONE) {
            audit_pin(sim, sums, serve->slot, serve->record_bytes);
        }
    }
}

static void audit_namespaces(struct sim *sim, const struct sums *sums)
{
    for (uint32_t i = 0; i < KVF_INDEX_NAMESPACES_MAX; i++) {
        const struct kvf_namespace *ns = &sim->agent->namespaces[i];

        CHECK(ns->blocks == sums->blocks[i] && ns->dram_bytes == sums->dram_bytes[i] &&
                  ns->nvme_bytes == sums->nvme_bytes[i],
              "namespace %u: %llu blocks, %llu and %llu bytes counted; %llu, %llu and %llu there",
              i, (unsigned long long)ns->blocks, (unsigned long long)ns->dram_bytes,
              (unsigned long long)ns->nvme_bytes, (unsigned long long)sums->blocks[i],
              (unsigned long long)sums->dram_bytes[i], (unsigned long long)sums->nvme_bytes[i]);
    }
}

static void audit_sums(struct sim *sim, const struct sums *sums)
{
    struct kvf_agent *agent = sim->agent;
    struct kvf_tier_stat stat;
    struct kvf_dram_info info;

    agent->dram_store->ops->stat(agent->dram_store, &stat);
    kvf_dram_info(agent->dram_store, &info);
    for (uint32_t i = 0; i < agent->n_tenants; i++) {
        CHECK(agent->tenants[i].dram_bytes == sums->tenant_dram_bytes[i], "tenant %u", i);
        CHECK(agent->tenants[i].leased_bytes == sums->tenant_leased_bytes[i], "tenant %u", i);
    }
    CHECK(agent->leased_bytes == sums->leased_bytes, "%llu, %llu",
          (unsigned long long)agent->leased_bytes, (unsigned long long)sums->leased_bytes);
    CHECK(agent->writeback_bytes == sums->writeback_bytes, "%llu, %llu",
          (unsigned long long)agent->writeback_bytes, (unsigned long long)sums->writeback_bytes);
    CHECK(agent->staging_used_bytes == sums->staging_bytes, "%llu, %llu",
          (unsigned long long)agent->staging_used_bytes, (unsigned long long)sums->staging_bytes);
    CHECK(agent->sessions_count == sums->sessions, "%u, %u", agent->sessions_count, sums->sessions);
    CHECK(kvf_pool_taken_count(&agent->pins) == sums->pins, "%u, %u",
          kvf_pool_taken_count(&agent->pins), sums->pins);
    CHECK(kvf_pool_taken_count(&agent->requests) == sums->requests, "%u, %u",
          kvf_pool_taken_count(&agent->requests), sums->requests);
    CHECK(kvf_pool_taken_count(&agent->ops) == sums->ops, "%u, %u",
          kvf_pool_taken_count(&agent->ops), sums->ops);
    CHECK(kvf_pool_taken_count(&agent->flights) ==
              sums->on_their_way + sums->abandoned + sums->writers + sums->hbm.promotes,
          "%u; %u + %u + %u + %u", kvf_pool_taken_count(&agent->flights), sums->on_their_way,
          sums->abandoned, sums->writers, sums->hbm.promotes);
    if (agent->verify == NULL) { /* it pins one slot that only itself knows */
        CHECK(info.pinned_slots == sums->pinned_slots, "%llu, %u",
              (unsigned long long)info.pinned_slots, sums->pinned_slots);
        CHECK(info.doomed_slots == sums->doomed_slots, "%llu, %u",
              (unsigned long long)info.doomed_slots, sums->doomed_slots);
        CHECK(stat.stored_bytes == sums->stored_bytes, "%llu, %llu",
              (unsigned long long)stat.stored_bytes, (unsigned long long)sums->stored_bytes);
    }
}

static void audit_hbm(struct sim *sim, const struct sums *sums)
{
    struct kvf_agent *agent = sim->agent;
    const struct kvf_hbm_device *device = agent->hbm;
    struct kvf_tier_stat stat;
    struct kvf_dram_info info;

    if (agent->n_hbm == 0) {
        return;
    }
    kvf_dram_info(device->slots, &info);
    device->source.tier->ops->stat(device->source.tier, &stat);
    CHECK(device->promotes == sums->hbm.promotes && device->promotes <= KVF_PROMOTES_MAX, "%u, %u",
          device->promotes, sums->hbm.promotes);
    CHECK(device->demotes == sums->hbm.demotes && device->demotes <= KVF_DEMOTES_MAX, "%u, %u",
          device->demotes, sums->hbm.demotes);
    CHECK(info.pinned_slots == sums->hbm.pinned_slots, "%llu, %u",
          (unsigned long long)info.pinned_slots, sums->hbm.pinned_slots);
    CHECK(info.doomed_slots == sums->hbm.doomed_slots, "%llu, %u",
          (unsigned long long)info.doomed_slots, sums->hbm.doomed_slots);
    CHECK(stat.stored_bytes == sums->hbm.stored_bytes, "%llu, %llu",
          (unsigned long long)stat.stored_bytes, (unsigned long long)sums->hbm.stored_bytes);
    for (uint32_t i = 0; i < agent->n_tenants; i++) {
        CHECK(agent->tenants[i].hbm_leased_bytes == sums->hbm.tenant_leased_bytes[i], "tenant %u",
              i);
    }
}

void sim_audit(struct sim *sim)
{
    struct sums *sums = calloc(1, sizeof(*sums));

    if (sums == NULL) {
        abort();
    }
    sums->slot_pins = calloc(sim->agent->n_sides, sizeof(*sums->slot_pins));
    if (sums->slot_pins == NULL) {
        abort();
    }
    audit_index(sim, sums);
    for (uint32_t i = 0; i < sim->agent->sessions_capacity; i++) {
        audit_session(sim, &sim->agent->sessions[i], sums);
    }
    audit_flights(sim, sums);
    audit_serves(sim, sums);
    audit_namespaces(sim, sums);
    audit_sums(sim, sums);
    audit_hbm(sim, sums);
    sim_durable_audit(sim);
    free(sums->slot_pins);
    free(sums);
}

void sim_audit_abandoned(struct sim *sim)
{
    const struct kvf_pool *flights = &sim->agent->flights;
    uint32_t taken = kvf_pool_taken_count(flights);

    for (uint32_t i = 0; i < flights->count && taken > 0; i++) {
        const struct kvf_flight *flight = kvf_pool_at(flights, i);

        taken -= flight != NULL;
        sim->cover[SIM_COVER_evicted_on_its_way] += flight != NULL && flight->is_abandoned;
    }
}

/* ---- every turn: what is bounded ------------------------------------------------------------- */

void sim_audit_turn(struct sim *sim)
{
    const struct kvf_agent *agent = sim->agent;
    const struct kvf_config *config = &sim->config;
    uint64_t percent = agent->arena_bytes / 100;

    sim->was_index_full |= agent->index.count + 16 >= agent->index.capacity;
    CHECK(agent->writeback_bytes <= agent->writeback_max_bytes, "%llu, %llu",
          (unsigned long long)agent->writeback_bytes,
          (unsigned long long)agent->writeback_max_bytes);
    CHECK(agent->staging_used_bytes <= config->staging_total, "%llu",
          (unsigned long long)agent->staging_used_bytes);
    for (uint32_t i = 0; i < agent->n_drives; i++) {
        CHECK(agent->drives[i].loads_inflight <= config->prefetch_inflight, "drive %u", i);
    }
    for (uint32_t i = 0; i < agent->n_tenants; i++) {
        CHECK(agent->tenants[i].leased_bytes <= percent * config->lease_tenant_share, "tenant %u",
              i);
        CHECK(config->quota_tenant_share == 100 ||
                  agent->tenants[i].dram_bytes <= percent * config->quota_tenant_share,
              "tenant %u", i);
    }
    for (uint32_t i = 0; i < agent->sessions_capacity; i++) {
        const struct kvf_session *session = &agent->sessions[i];

        if (session->state == KVF_SESSION_READY) {
            CHECK(session->requests_count <= KVF_REQUESTS_A_CLIENT &&
                      session->ops_count <= KVF_OPS_A_CLIENT &&
                      session->flights <= KVF_FLIGHTS_A_CLIENT &&
                      session->pins_count <= KVF_PINS_A_CLIENT,
                  "session %u", i);
            CHECK(session->leased_bytes <= percent * config->lease_client_share, "session %u", i);
            CHECK(session->ring.reserved <= session->ring.cq_entries, "session %u", i);
        }
    }
}

/* ---- the end --------------------------------------------------------------------------------- */

static void check_drives(struct sim *sim)
{
    for (uint32_t i = 0; i < sim->agent->n_drives; i++) {
        const struct kvf_tier *store = sim->agent->drives[i].store;
        struct kvf_tier_stat stat;
        uint64_t stored = 0;

        store->ops->stat(store, &stat);
        for (uint32_t k = 0; k < sim->agent->index.fresh; k++) {
            const struct kvf_entry *entry = &sim->agent->index.entries[k];

            stored += entry->state != KVF_ENTRY_FREE && !entry->is_set &&
                      kvf_entry_on_drive(entry) && entry->drive == i;
        }
        if (stat.queue_depth == 0) {
            CHECK(stat.stored_blocks == stored, "drive %u: %llu, %llu", i,
                  (unsigned long long)stat.stored_blocks, (unsigned long long)stored);
        }
    }
}

static void check_peers(struct sim *sim)
{
    const struct kvf_peers *peers = sim->agent->peers;
    struct kvf_tier_stat stat;

    if (peers == NULL) {
        return;
    }
    peers->source.tier->ops->stat(peers->source.tier, &stat);
    CHECK(stat.queue_depth == 0, "%u fetches", stat.queue_depth);
    CHECK(peers->source.loads.count == 0 && peers->source.loads_inflight == 0 &&
              peers->source.reading_bytes == 0,
          "peers: %u, %u, %llu", peers->source.loads.count, peers->source.loads_inflight,
          (unsigned long long)peers->source.reading_bytes);
    CHECK(kvf_pool_taken_count(&peers->serves) == 0, "%u serves",
          kvf_pool_taken_count(&peers->serves));
    for (uint32_t i = 0; i < KVF_NET_LINKS_MAX; i++) {
        CHECK(peers->links[i].link == 0 || peers->links[i].inflight == 0, "link %u: %u", i,
              peers->links[i].inflight);
    }
}

/* Nobody is there and nothing is on its way: what is stored is in the index, and that is all. */
void sim_audit_empty(struct sim *sim)
{
    struct kvf_agent *agent = sim->agent;
    struct kvf_dram_info info;

    sim_audit(sim);
    kvf_dram_info(agent->dram_store, &info);
    CHECK(agent->sessions_count == 0, "%u", agent->sessions_count);
    CHECK(agent->leased_bytes == 0, "%llu", (unsigned long long)agent->leased_bytes);
    CHECK(agent->staging_used_bytes == 0, "%llu", (unsigned long long)agent->staging_used_bytes);
    CHECK(kvf_pool_taken_count(&agent->flights) == 0, "%u", kvf_pool_taken_count(&agent->flights));
    CHECK(kvf_pool_taken_count(&agent->requests) == 0, "%u",
          kvf_pool_taken_count(&agent->requests));
    CHECK(kvf_pool_taken_count(&agent->ops) == 0, "%u", kvf_pool_taken_count(&agent->ops));
    CHECK(kvf_pool_taken_count(&agent->pins) == 0, "%u", kvf_pool_taken_count(&agent->pins));
    CHECK(info.pinned_slots == 0 && info.doomed_slots == 0, "%llu, %llu",
          (unsigned long long)info.pinned_slots, (unsigned long long)info.doomed_slots);
    CHECK(agent->writes == 0, "%u", agent->writes);
    for (uint32_t i = 0; i < agent->n_drives; i++) {
        const struct kvf_drive *drive = &agent->drives[i];

        CHECK(drive->loads.count == 0 && drive->loads_inflight == 0 && drive->reading_bytes == 0,
              "drive %u: %u, %u, %llu", i, drive->loads.count, drive->loads_inflight,
              (unsigned long long)drive->reading_bytes);
    }
    for (uint32_t i = 0; i < agent->n_hbm; i++) {
        const struct kvf_hbm_device *device = &agent->hbm[i];

        kvf_dram_info(device->slots, &info);
        CHECK(info.pinned_slots == 0 && info.doomed_slots == 0, "%llu, %llu",
              (unsigned long long)info.pinned_slots, (unsigned long long)info.doomed_slots);
        CHECK(device->source.loads.count == 0 && device->source.loads_inflight == 0 &&
                  device->source.reading_bytes == 0 && device->promotes == 0 &&
                  device->demotes == 0,
              "GPU %u", i);
    }
    check_drives(sim);
    check_peers(sim);
}
