/* SPDX-License-Identifier: Apache-2.0
 *
 * request_read.c: one key of a get, lookup, prefetch or evict.
 */
#include "agent/core.h"

#include <string.h>

#include "agent/peers.h"

/* ----------------------------------------------------------------------------------------------
 * Get
 */

/* On a drive, or on a GPU that the client does not read: fetch it, unless that would take longer
 * than the caller can wait. */
static int get_from_tier(struct kvf_request *request, struct kvf_entry *entry, uint8_t tier)
{
    struct kvf_session *session = request->session;
    struct kvf_agent *agent = session->agent;
    struct kvf_flight *flight;
    int status;

    if (request->deadline_ns != UINT64_MAX &&
        agent->now_ns + kvf_place_load_estimate_ns(agent, entry, true) > request->deadline_ns) {
        agent->metrics.get_too_slow++;
        agent->metrics.get_too_slow_queue += agent->now_ns +
                                                 kvf_place_load_estimate_ns(agent, entry, false) <=
                                             request->deadline_ns;
        return KVF_TOO_SLOW;
    }
    if (agent->ops.free_count == 0) {
        return KVF_ERR_BUSY;
    }
    status = kvf_place_load(agent, entry, session, &flight);
    if (status == KVF_OK) {
        status = kvf_request_wait(request, request->next_key, KVF_WANT_LEASE, tier, flight, NULL);
        assert(status == KVF_OK);
    }
    return status;
}

/* What a client of a namespace that is out of service finds: nothing. */
static bool is_off(const struct kvf_session *session)
{
    return session->agent->namespaces[session->namespace_index].is_off;
}

/* Not here: a peer may have it. */
static int get_from_peer(struct kvf_request *request, const uint8_t key_id[32])
{
    struct kvf_session *session = request->session;
    struct kvf_agent *agent = session->agent;
    struct kvf_flight *flight;
    int status;

    if (!kvf_peers_have(agent, key_id, session->shard)) {
        return KVF_MISS;
    }
    if (kvf_peers_too_slow(agent, key_id, session->shard, request->deadline_ns)) {
        agent->metrics.get_too_slow++;
        agent->metrics.get_too_slow_remote++;
        return KVF_TOO_SLOW;
    }
    status = kvf_peers_load(session, key_id, session->shard, &flight);
    if (status == KVF_OK) {
        status = kvf_request_wait(request, request->next_key, KVF_WANT_LEASE, KVF_TIER_REMOTE,
                                  flight, NULL);
    }
    return status == KVF_OK ? KVF_OK : KVF_MISS;
}

void kvf_request_start_get(struct kvf_request *request, const struct kvf_shm_key *key)
{
    struct kvf_session *session = request->session;
    struct kvf_agent *agent = session->agent;
    struct kvf_entry *entry;
    uint8_t key_id[32];
    uint8_t tier = KVF_TIER_NONE;
    int status = KVF_MISS;

    session->gets++;
    kvf_request_key_id(session, key, key_id);
    entry = is_off(session) ? NULL : kvf_room_find(agent, key_id, session->shard);
    if (entry != NULL && (request->sqe.flags & KVF_SQE_DEVICE) != 0 &&
        kvf_hbm_serves(session, entry) &&
        kvf_request_block_hit_hbm(request, request->next_key, entry)) {
        status = KVF_OK;
    } else if (entry != NULL && kvf_entry_in_dram(entry)) {
        kvf_admit_consider(agent, entry, request->has_chain_key, request->chain_key_id);
        session->touched[session->n_touched++] = kvf_place_slot(agent, entry);
        kvf_request_block_hit(request, request->next_key, KVF_TIER_DRAM, entry);
        if ((request->sqe.flags & KVF_SQE_DEVICE) != 0) {
            kvf_hbm_consider(session, entry);
        }
        status = KVF_OK;
    } else if (entry != NULL && entry->state == KVF_ENTRY_READY) {
        tier = kvf_entry_in_hbm(agent, entry) ? KVF_TIER_HBM : KVF_TIER_NVME;
        status = get_from_tier(request, entry, tier);
    } else if (entry != NULL) {
        tier = entry->state == KVF_ENTRY_LOADING ? kvf_place_loading_tier(agent, entry)
                                                 : KVF_TIER_DRAM;
        status = kvf_request_wait(request, request->next_key, KVF_WANT_LEASE, tier,
                                  kvf_place_flight(agent, entry), NULL);
    } else if (!is_off(session)) {
        status = get_from_peer(request, key_id);
    }
    if (status != KVF_OK) {
        session->misses++;
        agent->metrics.get_misses += status == KVF_MISS;
        kvf_request_block(request, request->next_key, status, tier);
    }
    memcpy(request->chain_key_id, key_id, sizeof(request->chain_key_id));
    request->has_chain_key = true;
}

/* ----------------------------------------------------------------------------------------------
 * Lookup
 */

/* May a lookup bring what it finds into memory? */
static bool may_fetch(const struct kvf_request *request)
{
    return ((request->sqe.flags & KVF_SQE_PREFETCH) != 0 || request->sqe.budget_ms != 0) &&
           request->session->agent->ops.free_count > 0;
}

/* It comes with this flight, NULL: with none. */
static void lookup_wait(struct kvf_request *request, struct kvf_flight *flight, uint32_t chunk)
{
    if (flight == NULL ||
        kvf_request_wait(request, chunk, KVF_WANT_LOADED, KVF_TIER_NVME, flight, NULL) != KVF_OK) {
        request->cut_at = chunk < request->cut_at ? chunk : request->cut_at;
    }
}

/* Lease, count or fetch one shard of a chunk that is whole. False: the run ends here. */
static bool lookup_block(struct kvf_request *request, struct kvf_entry *entry, uint32_t chunk)
{
    struct kvf_session *session = request->session;
    struct kvf_agent *agent = session->agent;
    struct kvf_flight *flight = NULL;

    if (kvf_entry_in_dram(entry)) {
        entry->is_hit = 1;
        if (session->n_touched < KVF_REQUEST_KEYS_MAX) {
            session->touched[session->n_touched++] = kvf_place_slot(agent, entry);
        }
        return request->lease == 0 ||
               kvf_lease_add(session, request->lease, kvf_place_slot(agent, entry),
                             entry->record_bytes, chunk) == KVF_OK;
    }
    if (kvf_hbm_promises(session, entry)) {
        const struct kvf_hbm_place *place = kvf_hbm_place(agent, entry);

        return request->lease == 0 ||
               kvf_lease_add_hbm(session, request->lease, place->device, place->slot,
                                 entry->record_bytes, chunk) == KVF_OK;
    }
    if (may_fetch(request)) {
        if (entry->state == KVF_ENTRY_LOADING) {
            flight = kvf_place_flight(agent, entry);
        } else {
            (void)kvf_place_load(agent, entry, session, &flight);
        }
    }
    lookup_wait(request, flight, chunk);
    return true;
}

/* Only a drive that is off has it. */
static bool is_gone(const struct kvf_agent *agent, const struct kvf_entry *entry)
{
    return entry->state == KVF_ENTRY_READY && entry->dram_slot == KVF_INDEX_NONE &&
           !kvf_entry_in_hbm(agent, entry) && agent->drives[entry->drive].is_off;
}

/* Is all of the set here, or at peers as far as it is not? */
static bool is_whole(struct kvf_session *session, const uint8_t key_id[32])
{
    struct kvf_agent *agent = session->agent;
    const struct kvf_entry *set = kvf_place_set(agent, key_id, session->shard_count);

    if ((set != NULL && kvf_place_set_is_whole(agent, set)) || agent->peers == NULL) {
        return set != NULL && kvf_place_set_is_whole(agent, set);
    }
    for (uint32_t shard = 0; shard < session->shard_count; shard++) {
        const struct kvf_entry *entry = kvf_index_find(&agent->index, key_id, shard);

        if (entry == NULL ? !kvf_peers_have(agent, key_id, shard)
                          : entry->state == KVF_ENTRY_FILLING) {
            return false;
        }
    }
    return true;
}

/* One shard of a whole set that is not here. False: the run ends here. */
static bool lookup_at_peer(struct kvf_request *request, const uint8_t key_id[32], uint32_t shard,
                           uint32_t chunk)
{
    struct kvf_session *session = request->session;
    struct kvf_flight *flight = NULL;

    if (!kvf_peers_have(session->agent, key_id, shard)) {
        return false;
    }
    if (may_fetch(request)) {
        (void)kvf_peers_load(session, key_id, shard, &flight);
    }
    lookup_wait(request, flight, chunk);
    return true;
}

/* The chunk's whole set. False: not here, or not whole. */
static bool lookup_chunk(struct kvf_request *request, const struct kvf_shm_key *key, uint32_t chunk)
{
    struct kvf_session *session = request->session;
    struct kvf_agent *agent = session->agent;
    uint8_t key_id[32];

    kvf_request_key_id(session, key, key_id);
    if (is_off(session) || !is_whole(session, key_id)) {
        return false;
    }
    for (uint32_t shard = 0; shard < session->shard_count; shard++) {
        struct kvf_entry *entry = kvf_room_find(agent, key_id, shard);

        if (entry == NULL && lookup_at_peer(request, key_id, shard, chunk)) {
            continue;
        }
        if (entry == NULL || entry->state == KVF_ENTRY_FILLING || is_gone(agent, entry) ||
            !lookup_block(request, entry, chunk)) {
            return false;
        }
    }
    return true;
}

void kvf_request_start_lookup(struct kvf_request *request, const struct kvf_shm_key *key)
{
    uint32_t n_chunks = (uint32_t)request->sqe.n_keys - request->sqe.n_tails;
    uint32_t index = request->next_key;

    if (request->tail != 0 || request->run_ended) {
        return; /* one tail may extend a run, and only one that is whole */
    }
    if (lookup_chunk(request, key, request->run)) {
        request->tail = index >= n_chunks ? 1 + index - n_chunks : 0;
        request->run++;
        return;
    }
    if (request->lease != 0) {
        kvf_lease_trim(request->session, request->lease, request->run);
    }
    request->run_ended = index < n_chunks;
}

void kvf_request_settle_lookup(struct kvf_request *request)
{
    struct kvf_session *session = request->session;
    uint32_t n_chunks = (uint32_t)request->sqe.n_keys - request->sqe.n_tails;
    bool fetch = (request->sqe.flags & KVF_SQE_PREFETCH) != 0 || request->sqe.budget_ms != 0;

    if (request->run <= n_chunks) {
        request->tail = 0; /* the tail, counted as one more chunk, was lost again */
    }
    request->ready = request->cut_at < request->run ? request->cut_at : request->run;
    request->coming = fetch ? request->run - request->ready : 0;
    session->agent->metrics.lookup_hit_chunks += request->run;
    if (request->lease == 0) {
        return;
    }
    kvf_lease_trim(session, request->lease, request->ready);
    if (request->ready > 0 && !request->is_canceled && kvf_lease_publish(session, request->lease)) {
        return;
    }
    /* lost to a purge while it waited: nothing is promised */
    (void)kvf_lease_end(session, request->lease);
    request->lease = 0;
    request->ready = 0;
}

/* ----------------------------------------------------------------------------------------------
 * Prefetch and evict: whole sets
 */

/* Is there a shard that neither this node nor a peer has? */
static bool lacks_shard(const struct kvf_session *session, const uint8_t key_id[32])
{
    struct kvf_agent *agent = session->agent;

    for (uint32_t shard = 0; shard < session->shard_count; shard++) {
        if (kvf_index_find(&agent->index, key_id, shard) == NULL &&
            !kvf_peers_have(agent, key_id, shard)) {
            return true;
        }
    }
    return false;
}

void kvf_request_start_prefetch(struct kvf_request *request, const struct kvf_shm_key *key)
{
    struct kvf_session *session = request->session;
    struct kvf_agent *agent = session->agent;
    int status = KVF_MISS;
    uint8_t key_id[32];

    kvf_request_key_id(session, key, key_id);
    if (session->shard == KVF_SHARD_NONE && lacks_shard(session, key_id)) {
        /* nothing is fetched for a set that no lookup would find */
        kvf_request_block(request, request->next_key, KVF_MISS, KVF_TIER_NONE);
        return;
    }
    for (uint32_t shard = 0; shard < session->shard_count; shard++) {
        struct kvf_entry *entry = is_off(session) ? NULL
                                                  : kvf_index_find(&agent->index, key_id, shard);
        struct kvf_flight *flight;

        if (session->shard != KVF_SHARD_NONE && shard != session->shard) {
            continue; /* a rank fetches what it will read, a scheduler for all of them */
        }
        if (entry == NULL && kvf_peers_load(session, key_id, shard, &flight) == KVF_OK) {
            status = KVF_COMING;
            continue;
        }
        if (entry == NULL) {
            status = KVF_MISS;
            break;
        }
        if (kvf_entry_in_dram(entry) || kvf_hbm_promises(session, entry)) {
            status = status == KVF_MISS ? KVF_OK : status;
            continue;
        }
        status = KVF_COMING;
        if (entry->state == KVF_ENTRY_READY &&
            kvf_place_load(agent, entry, session, &flight) != KVF_OK) {
            status = KVF_ERR_BUSY;
            break;
        }
    }
    kvf_request_block(request, request->next_key, status, KVF_TIER_NONE);
}

void kvf_request_start_evict(struct kvf_request *request, const struct kvf_shm_key *key)
{
    struct kvf_session *session = request->session;
    struct kvf_agent *agent = session->agent;
    struct kvf_entry *entry = NULL;
    uint8_t key_id[32];

    kvf_request_key_id(session, key, key_id);
    for (uint32_t shard = 0; entry == NULL && shard < session->shard_count; shard++) {
        entry = kvf_index_find(&agent->index, key_id, shard);
    }
    if (entry != NULL) {
        agent->metrics.purged_blocks++;
        kvf_place_forget_set(agent, entry);
    }
    kvf_request_block(request, request->next_key, entry != NULL ? KVF_OK : KVF_MISS, KVF_TIER_NONE);
}
