/* SPDX-License-Identifier: Apache-2.0
 *
 * place.c: records on their way: fills, loads and writes, their queues, and what becomes of an
 * entry when one of them ends. Who may be evicted and reclaimed is place_host.c; opening and
 * recovery place_open.c.
 *
 *   put:  FILLING --copied, checksum fits--> READY in dram --admitted--> QUEUED --> STORED on a
 * drive
 *   get:  READY on a drive --LOADING--> READY in dram and on the drive
 */
#include "agent/core.h"

#include <string.h>

#include "agent/flights.h"
#include "agent/peers.h"
#include "base/crc32c.h"
#include "base/failpoint.h"
#include "base/mutant.h"

#define LOAD_TRIES       64 /* queued loads looked at in one turn */
#define LOAD_PATIENCE_NS KVF_NS_PER_S
#define RETRY_NS         (2 * KVF_NS_PER_MS)
#define PROBE_NS         KVF_NS_PER_S

/* ----------------------------------------------------------------------------------------------
 * Entries, slots, flights
 */
kvf_location kvf_place_slot(const struct kvf_agent *agent, const struct kvf_entry *entry)
{
    assert(kvf_entry_in_dram(entry));
    return (kvf_location)agent->sides[entry->dram_slot].generation << 32 | entry->dram_slot;
}

struct kvf_flight *kvf_place_flight(struct kvf_agent *agent, const struct kvf_entry *entry)
{
    assert(entry->state == KVF_ENTRY_FILLING || entry->state == KVF_ENTRY_LOADING);
    return kvf_pool_at(&agent->flights, entry->dram_slot);
}

struct kvf_flight *kvf_place_writer(struct kvf_agent *agent, const struct kvf_entry *entry)
{
    if (!kvf_entry_in_dram(entry)) {
        return NULL;
    }
    return kvf_pool_at(&agent->flights, agent->sides[entry->dram_slot].writer);
}

struct kvf_flight *kvf_place_flight_new(struct kvf_agent *agent, uint8_t kind,
                                        const struct kvf_entry *entry, struct kvf_session *session)
{
    struct kvf_flight *flight = NULL;

    if (session == NULL || session->flights < KVF_FLIGHTS_A_CLIENT) {
        flight = kvf_pool_get(&agent->flights);
    }
    if (flight == NULL) {
        return NULL;
    }
    flight->kind = kind;
    flight->agent = agent;
    flight->cookie = kvf_index_cookie(&agent->index, entry);
    flight->slot = KVF_LOCATION_NONE;
    flight->hbm_slot = KVF_LOCATION_NONE;
    flight->record_bytes = entry->record_bytes;
    flight->created_ns = agent->now_ns;
    flight->started_ns = agent->now_ns;
    flight->work.owner = flight;
    flight->io.owner = flight;
    if (session != NULL) {
        flight->payer = session;
        flight->payer_id = session->connection_id;
        session->flights++;
    }
    return flight;
}

void kvf_place_flight_free(struct kvf_flight *flight)
{
    /* the payer's place may have another client by now */
    if (flight->payer != NULL && flight->payer->connection_id == flight->payer_id) {
        flight->payer->flights--;
    }
    kvf_pool_put(&flight->agent->flights, flight);
}

void kvf_place_number_free(struct kvf_flight *flight)
{
    struct kvf_agent *agent = flight->agent;

    if (flight->twin != NULL) {
        flight->twin->twin = NULL; /* that one does it */
        return;
    }
    kvf_index_free(&agent->index, kvf_index_at(&agent->index, flight->cookie));
}

/* Tell everybody who waited; entry NULL for a failure. */
static void flight_settle(struct kvf_flight *flight, int status, struct kvf_entry *entry)
{
    struct kvf_op *op = flight->waiters;

    flight->waiters = NULL;
    while (op != NULL) {
        struct kvf_op *next = op->next;

        op->next = NULL;
        op->flight = NULL;
        kvf_request_op_done(op, status, entry);
        op = next;
    }
}

/* The name under which the entry's drive keeps, or shall keep, the block. */
static void name_of(const struct kvf_agent *agent, const struct kvf_entry *entry,
                    struct kvf_block_name *name_out)
{
    const struct kvf_namespace *ns = &agent->namespaces[entry->namespace_index];
    const struct kvf_tier *store = agent->drives[entry->drive].store;

    memcpy(name_out->key_id, entry->key_id, sizeof(name_out->key_id));
    name_out->namespace_id = ns->id;
    name_out->namespace_epoch = store != NULL ? kvf_nvme_namespace_epoch(store, ns->id) : 0;
    name_out->shard = (uint16_t)entry->shard;
    name_out->shard_count = ns->shard_count;
}

static void uncharge(struct kvf_agent *agent, const struct kvf_entry *entry)
{
    kvf_room_uncharge(agent, agent->namespaces[entry->namespace_index].tenant,
                      entry->namespace_index, entry->record_bytes);
}

/* Memory for a record of this entry, counted against its owner. kvf_room_before_reserve goes
 * before, and before the entry is looked at: it may forget any set that is not whole. KVF_OK;
 * KVF_ERR_BUSY, _TOO_LARGE. */
static int reserve(struct kvf_agent *agent, const struct kvf_entry *entry, uint16_t tenant,
                   kvf_location *slot_out)
{
    int status = kvf_room_charge(agent, tenant, entry->namespace_index, entry->record_bytes);

    if (status != KVF_OK) {
        return status;
    }
    status = agent->dram->ops->reserve(agent->dram, tenant, entry->record_bytes,
                                       kvf_index_cookie(&agent->index, entry), slot_out);
    if (status != KVF_OK) {
        kvf_room_uncharge(agent, tenant, entry->namespace_index, entry->record_bytes);
    }
    return status;
}

/* Give back what reserve gave, for a record that never became READY. */
static void unreserve(struct kvf_agent *agent, const struct kvf_entry *entry, kvf_location slot)
{
    uncharge(agent, entry);
    if (!KVF_MUTANT(slot_leaked)) {
        agent->dram->ops->drop(agent->dram, slot);
    }
}

/* The block is READY in this slot from now on. */
static void become_resident(struct kvf_agent *agent, struct kvf_entry *entry, kvf_location slot,
                            uint32_t ttl_s, uint8_t priority)
{
    struct kvf_slot_side *side = &agent->sides[(uint32_t)slot];

    assert((uint32_t)slot < agent->n_sides);
    entry->state = KVF_ENTRY_READY;
    entry->dram_slot = (uint32_t)slot;
    side->generation = (uint32_t)(slot >> 32);
    side->writer = KVF_INDEX_NONE;
    side->cookie = kvf_index_cookie(&agent->index, entry);
    side->expires_s = 0;
    if (ttl_s != 0) {
        side->expires_s = ttl_s > UINT32_MAX - kvf_agent_second(agent)
                              ? UINT32_MAX
                              : kvf_agent_second(agent) + ttl_s;
    }
    agent->ttl_slots += side->expires_s != 0;
    kvf_dram_publish(agent->dram_store, slot, priority);
    kvf_room_watch_set(agent, entry);
}

/* The entry gives its slot up; pinned memory lives on as long as it is pinned. */
void kvf_place_leave_dram(struct kvf_agent *agent, struct kvf_entry *entry)
{
    kvf_location slot = kvf_place_slot(agent, entry);
    struct kvf_slot_side *side = &agent->sides[entry->dram_slot];

    agent->ttl_slots -= side->expires_s != 0;
    side->expires_s = 0;
    side->writer = KVF_INDEX_NONE;
    entry->dram_slot = KVF_INDEX_NONE;
    uncharge(agent, entry);
    agent->dram->ops->drop(agent->dram, slot);
}

void kvf_place_leave_drive(struct kvf_agent *agent, struct kvf_entry *entry, bool drop)
{
    struct kvf_drive *drive = &agent->drives[entry->drive];

    assert(kvf_entry_on_drive(entry));
    if (drop) {
        drive->tier->ops->drop(drive->tier, kvf_entry_nvme_location(entry));
    }
    entry->nvme = KVF_NVME_NONE;
    entry->is_admitted = 0;
    kvf_entry_set_nvme(entry, KVF_LOCATION_NONE);
    agent->namespaces[entry->namespace_index].nvme_bytes -= entry->record_bytes;
}

/* ----------------------------------------------------------------------------------------------
 * Forgetting
 */
static void abandon_flight(struct kvf_agent *agent, struct kvf_entry *entry)
{
    struct kvf_flight *flight = kvf_place_flight(agent, entry);

    flight->is_abandoned = true;
    /* a put is told to try again: the block was evicted while it came */
    flight_settle(flight, flight->kind == KVF_FLIGHT_FILL ? KVF_ERR_BUSY : KVF_MISS, NULL);
}

void kvf_place_forget_block(struct kvf_agent *agent, struct kvf_entry *entry)
{
    struct kvf_flight *writer = kvf_place_writer(agent, entry);
    struct kvf_flight *promotion = kvf_hbm_forget(agent, entry);
    bool counted = entry->state == KVF_ENTRY_READY || entry->state == KVF_ENTRY_LOADING;
    bool keep_number = false;

    if (entry->state != KVF_ENTRY_READY) {
        abandon_flight(agent, entry);
        keep_number = true;
    } else if (entry->dram_slot != KVF_INDEX_NONE) {
        kvf_place_leave_dram(agent, entry);
    }
    if (writer != NULL) {
        writer->is_abandoned = true;
        flight_settle(writer, KVF_ERR_BUSY, NULL);
        keep_number = true;
    }
    if (promotion != NULL) {
        promotion->is_abandoned = true;
        promotion->twin = writer;
        keep_number = true;
    }
    if (writer != NULL) {
        writer->twin = promotion;
    }
    if (kvf_entry_on_drive(entry)) {
        kvf_place_leave_drive(agent, entry, true);
    }
    if (counted) {
        kvf_place_set_subtract(agent, entry);
        kvf_peers_removed(agent, entry);
    }
    /* A tier that still has the number in a running call must not meet it again as another block's:
     * the flight frees it when it lands. */
    kvf_index_unlink(&agent->index, entry);
    if (!keep_number) {
        kvf_index_free(&agent->index, entry);
    }
}

/* ----------------------------------------------------------------------------------------------
 * Fill: staging to slot
 */
static void fill_run(struct kvf_work *work)
{
    struct kvf_flight *flight = work->owner;
    uint8_t *payload = (uint8_t *)flight->record + KVF_RECORD_PAGE_BYTES;
    uint64_t bytes = flight->record_bytes - KVF_RECORD_PAGE_BYTES;
    uint64_t padded = (bytes + 4095) & ~UINT64_C(4095);
    uint32_t crc;

    flight->status = KVF_FAILPOINT(agent_fill);
    if (flight->status != KVF_OK) {
        return;
    }
    /* what was summed is what arrived: the client can still write to the source */
    crc = kvf_crc32c_copy(payload, flight->source, bytes, 0);
    if (flight->is_unsummed) {
        struct kvf_record_page *page = flight->record;

        flight->payload_crc32c = page->header.payload_crc32c = crc;
        kvf_block_seal_header(page);
    } else if (crc != flight->payload_crc32c) {
        flight->status = KVF_MUTANT(fill_unchecked) ? KVF_OK : KVF_ERR_CORRUPT;
    }
    memset(payload + bytes, 0, padded - bytes);
}

static void fill_fail(struct kvf_flight *flight, int status)
{
    struct kvf_agent *agent = flight->agent;
    struct kvf_entry *entry = kvf_index_at(&agent->index, flight->cookie);

    agent->metrics.put_corrupt += status == KVF_ERR_CORRUPT;
    unreserve(agent, entry, flight->slot);
    if (!flight->is_abandoned) {
        kvf_index_unlink(&agent->index, entry);
    }
    kvf_index_free(&agent->index, entry);
    flight_settle(flight, status, NULL);
}

static void fill_done(struct kvf_work *work)
{
    struct kvf_flight *flight = work->owner;
    struct kvf_agent *agent = flight->agent;
    struct kvf_session *session = flight->session;
    struct kvf_entry *entry = kvf_index_at(&agent->index, flight->cookie);
    uint16_t shard_count = agent->namespaces[entry->namespace_index].shard_count;
    kvf_cookie cookie = flight->cookie;
    int status = flight->status;

    if (status == KVF_OK && !flight->is_abandoned) {
        if (shard_count > 1) {
            kvf_room_for_entry(agent); /* for the set's */
        }
        status = kvf_place_set_add(agent, entry, shard_count);
    }
    if (status != KVF_OK || flight->is_abandoned) {
        fill_fail(flight, status);
        goto out;
    }
    agent->metrics.put_blocks++;
    agent->metrics.put_bytes += flight->record_bytes;
    kvf_histogram_add(&agent->metrics.put_ns, agent->now_ns - flight->started_ns);
    entry->payload_crc32c = flight->payload_crc32c;
    entry->is_crc_unknown = 0;
    become_resident(agent, entry, flight->slot, flight->ttl_s, flight->priority);
    kvf_peers_added(agent, entry);
    if (entry->is_admitted && !flight->is_durable) {
        kvf_admit_write(agent, entry);
    }
    flight_settle(flight, KVF_OK, entry);
    /* a durable put that was canceled has begun no write: the chain behind it is closed */
    entry = kvf_index_at(&agent->index, cookie);
    if (entry->state == KVF_ENTRY_READY && entry->nvme == KVF_NVME_NONE) {
        entry->is_admitted = 0;
    }
out:
    kvf_place_flight_free(flight);
    kvf_session_job_done(session);
}

/* A FILLING entry and its slot. */
static int fill_reserve(struct kvf_request *request, const struct kvf_shm_key *key,
                        const uint8_t key_id[32], struct kvf_flight **flight_out)
{
    struct kvf_session *session = request->session;
    struct kvf_agent *agent = session->agent;
    struct kvf_flight *flight = NULL;
    struct kvf_entry *entry;
    int status;

    entry = kvf_room_insert(agent, key_id, session->shard, session->namespace_index);
    if (entry == NULL) {
        return KVF_ERR_BUSY;
    }
    entry->record_bytes = (uint32_t)key->record_bytes & 0x7ffffffu;
    flight = kvf_place_flight_new(agent, KVF_FLIGHT_FILL, entry, session);
    if (flight == NULL) {
        status = KVF_ERR_BUSY;
        goto undo_entry;
    }
    entry->dram_slot = kvf_pool_index(&agent->flights, flight);
    status = reserve(agent, entry, session->tenant, &flight->slot);
    if (status != KVF_OK) {
        goto undo_flight;
    }
    flight->record = agent->dram->ops->address(agent->dram, flight->slot);
    *flight_out = flight;
    return KVF_OK;

undo_flight:
    kvf_place_flight_free(flight);
undo_entry:
    kvf_index_remove(&agent->index, entry);
    return status;
}

int kvf_place_fill(struct kvf_request *request, const struct kvf_shm_key *key,
                   const uint8_t key_id[32], struct kvf_flight **flight_out)
{
    struct kvf_session *session = request->session;
    struct kvf_agent *agent = session->agent;
    struct kvf_flight *flight;
    struct kvf_entry *entry;
    int status;

    kvf_room_before_reserve(agent);
    status = fill_reserve(request, key, key_id, &flight);
    if (status != KVF_OK) {
        return status;
    }
    entry = kvf_index_at(&agent->index, flight->cookie);
    entry->payload_crc32c = agent->page.header.payload_crc32c;
    flight->is_unsummed = (request->sqe.flags & KVF_SQE_UNSUMMED) != 0;
    entry->is_crc_unknown = flight->is_unsummed;
    entry->is_no_write = (request->sqe.flags & KVF_SQE_NO_WRITE) != 0 || request->sqe.ttl_s != 0;
    entry->is_head = !request->has_chain_key && request->sqe.depth == 0;
    flight->is_durable = (request->sqe.flags & KVF_SQE_DURABLE) != 0;
    /* decided now, in the order of the chain: workers finish in any order */
    kvf_admit_decide(agent, entry, request->has_chain_key, request->chain_key_id,
                     flight->is_durable);
    flight->payload_crc32c = entry->payload_crc32c;
    flight->session = session;
    flight->source = session->staging_map + key->stage_offset + KVF_RECORD_PAGE_BYTES;
    flight->ttl_s = request->sqe.ttl_s;
    flight->priority = request->sqe.priority;
    memcpy(flight->record, &agent->page, sizeof(agent->page));
    flight->work.run = fill_run;
    flight->work.done = fill_done;
    status = agent->work->ops->submit(agent->work, &flight->work);
    if (status != KVF_OK) {
        unreserve(agent, entry, flight->slot);
        kvf_place_flight_free(flight);
        kvf_index_remove(&agent->index, entry);
        return status;
    }
    session->jobs++;
    *flight_out = flight;
    return KVF_OK;
}

/* ----------------------------------------------------------------------------------------------
 * Load: drive, a GPU's memory or another node to slot
 */
static bool is_hbm(const struct kvf_drive *drive)
{
    return drive->store->ops == &kvf_tier_hbm_ops;
}

static bool is_remote(const struct kvf_drive *drive)
{
    return drive->store->ops == &kvf_tier_remote_ops;
}

static struct kvf_hbm_device *device_of(struct kvf_drive *drive)
{
    return (struct kvf_hbm_device *)((char *)drive - offsetof(struct kvf_hbm_device, source));
}

/* Where the entry is loaded from; it is there. */
static struct kvf_drive *source_of(struct kvf_agent *agent, const struct kvf_entry *entry)
{
    return kvf_entry_in_hbm(agent, entry) ? &agent->hbm[kvf_hbm_place(agent, entry)->device].source
                                          : &agent->drives[entry->drive];
}

/* The entry's record in the tier of a load; KVF_LOCATION_NONE: not there any more. */
static kvf_location location_in(struct kvf_agent *agent, const struct kvf_entry *entry,
                                const struct kvf_flight *flight)
{
    const struct kvf_drive *drive = flight->from;

    if (is_remote(drive)) {
        return flight->io.location; /* whoever was chosen; the entry has no other place */
    }
    if (is_hbm(drive)) {
        const struct kvf_hbm_place *place = kvf_hbm_place(agent, entry);

        return place->slot != 0 && &agent->hbm[place->device].source == drive ? place->slot
                                                                              : KVF_LOCATION_NONE;
    }
    return kvf_entry_on_drive(entry) ? kvf_entry_nvme_location(entry) : KVF_LOCATION_NONE;
}

/* Nothing of the load holds the GPU's slot any more, or counts at the peer. */
static void load_unpin(struct kvf_flight *flight)
{
    if (is_remote(flight->from)) {
        kvf_peers_left(flight->agent, flight->io.location);
    }
    if (flight->hbm_slot != KVF_LOCATION_NONE) {
        kvf_dram_unpin(device_of(flight->from)->slots, flight->hbm_slot);
        flight->hbm_slot = KVF_LOCATION_NONE;
    }
    if (flight->is_demotion) {
        device_of(flight->from)->demotes--;
        flight->is_demotion = false;
    }
}

/* A record that could not be read is given up there. */
static void leave_source(struct kvf_agent *agent, struct kvf_entry *entry,
                         const struct kvf_flight *flight, int status)
{
    if (is_remote(flight->from)) {
        return; /* it is the peer's, and was never the entry's */
    }
    if (is_hbm(flight->from)) {
        if (status == KVF_ERR_CORRUPT && kvf_entry_in_hbm(agent, entry)) {
            kvf_hbm_leave(agent, entry);
        }
        return;
    }
    if (kvf_entry_on_drive(entry) &&
        (status == KVF_ERR_TIER_OFF || /* nothing comes back from there */
         ((status == KVF_MISS || status == KVF_ERR_IO) &&
          kvf_entry_nvme_location(entry) == flight->io.location))) {
        kvf_place_leave_drive(agent, entry, true);
    }
}

static void load_fail(struct kvf_flight *flight, int status)
{
    struct kvf_agent *agent = flight->agent;
    struct kvf_entry *entry = kvf_index_at(&agent->index, flight->cookie);

    load_unpin(flight);
    if (flight->slot != KVF_LOCATION_NONE) {
        unreserve(agent, entry, flight->slot);
    }
    if (is_remote(flight->from)) {
        status = KVF_MISS; /* whatever became of a peer, it is no error of this node */
    }
    if (flight->is_abandoned) {
        kvf_index_free(&agent->index, entry);
    } else {
        entry->state = KVF_ENTRY_READY;
        entry->dram_slot = KVF_INDEX_NONE;
        leave_source(agent, entry, flight, status);
        if (is_remote(flight->from)) {
            kvf_place_forget_block(agent, entry); /* its set may have others that are here */
        } else if (entry->nvme == KVF_NVME_NONE && !kvf_entry_in_hbm(agent, entry)) {
            kvf_place_forget_set(agent, entry);
        }
        flight_settle(flight, status, NULL);
    }
    kvf_place_flight_free(flight);
}

static uint64_t transfer_ns(const struct kvf_drive *drive, uint64_t bytes)
{
    return bytes / 1024 * drive->read_ns_per_mib / 1024;
}

/* Two moving averages: what the drive needs for each MiB while it is busy (many reads in flight
 * share the time between completions), and how much longer a read takes than the bytes before it
 * explain. */
static void learn_speed(struct kvf_drive *drive, const struct kvf_flight *flight)
{
    uint64_t now_ns = drive->agent->now_ns;
    uint64_t busy_from_ns = flight->started_ns > drive->last_read_ns ? flight->started_ns
                                                                     : drive->last_read_ns;
    uint64_t took_ns = now_ns - flight->started_ns;
    uint64_t explained_ns = transfer_ns(drive, flight->ahead_bytes);

    drive->read_ns_per_mib = (drive->read_ns_per_mib * 7 +
                              (now_ns - busy_from_ns) * 1024 / (flight->record_bytes / 1024)) /
                             8;
    drive->read_latency_ns =
        (drive->read_latency_ns * 7 + (took_ns > explained_ns ? took_ns - explained_ns : 0)) / 8;
    drive->last_read_ns = now_ns;
}

static void load_done(struct kvf_tier_io *io)
{
    struct kvf_flight *flight = io->owner;
    struct kvf_agent *agent = flight->agent;
    struct kvf_entry *entry = kvf_index_at(&agent->index, flight->cookie);
    struct kvf_drive *drive = flight->from;

    drive->loads_inflight--;
    drive->reading_bytes -= flight->record_bytes;
    learn_speed(drive, flight);
    if (is_remote(drive)) {
        kvf_histogram_add(&agent->metrics.peer_fetch_ns, agent->now_ns - flight->started_ns);
        kvf_peers_loaded(agent, io);
    } else if (is_hbm(drive)) {
        agent->metrics.hbm_corrupt_blocks += io->status == KVF_ERR_CORRUPT;
        agent->metrics.hbm_demoted_blocks += io->status == KVF_OK;
    } else {
        kvf_histogram_add(&agent->metrics.nvme_read_ns, agent->now_ns - flight->started_ns);
        agent->metrics.nvme_corrupt_blocks += io->status == KVF_ERR_CORRUPT;
        agent->metrics.nvme_io_errors += io->status == KVF_ERR_IO;
    }
    if (is_remote(drive) && io->status != KVF_OK && !flight->is_abandoned &&
        kvf_peers_other(agent, flight)) {
        flight->is_started = false;
        kvf_flights_push(&drive->loads, flight);
        return;
    }
    if (io->status != KVF_OK || flight->is_abandoned) {
        load_fail(flight, io->status == KVF_OK ? KVF_MISS : io->status);
        return;
    }
    load_unpin(flight);
    become_resident(agent, entry, flight->slot, 0, 0);
    entry->payload_crc32c = ((const struct kvf_record_page *)flight->record)->header.payload_crc32c;
    entry->is_crc_unknown = 0;
    if (is_remote(drive)) {
        kvf_peers_added(agent, entry);
    }
    flight_settle(flight, KVF_OK, entry);
    kvf_place_flight_free(flight);
}

/* What became of an attempt to start a load. */
enum load_outcome {
    LOAD_STARTED,
    LOAD_OVER,       /* it has failed and is gone */
    LOAD_NO_MEMORY,  /* no slot now; another one may find one */
    LOAD_DRIVE_FULL, /* the drive takes no more now */
};

static enum load_outcome load_start(struct kvf_drive *drive, struct kvf_flight *flight)
{
    struct kvf_agent *agent = flight->agent;
    struct kvf_entry *entry = kvf_index_at(&agent->index, flight->cookie);
    int status = KVF_OK;

    if (flight->slot == KVF_LOCATION_NONE) {
        kvf_room_before_reserve(agent);
    }
    if (flight->is_abandoned || location_in(agent, entry, flight) == KVF_LOCATION_NONE) {
        load_fail(flight, KVF_MISS);
        return LOAD_OVER;
    }
    if (flight->slot == KVF_LOCATION_NONE) {
        status = reserve(agent, entry, flight->tenant, &flight->slot);
        if (status == KVF_ERR_BUSY) {
            return LOAD_NO_MEMORY;
        }
    }
    if (status == KVF_OK) {
        flight->record = agent->dram->ops->address(agent->dram, flight->slot);
        flight->io.record = flight->record;
        flight->io.record_bytes = flight->record_bytes;
        flight->io.cookie = flight->cookie;
        flight->io.location = location_in(agent, entry, flight);
        flight->io.done = load_done;
        name_of(agent, entry, &flight->io.name);
        flight->started_ns = agent->now_ns;
        if (is_remote(drive)) {
            status = kvf_peers_fetch_begin(agent, flight);
        }
        status = status != KVF_OK ? status : drive->tier->ops->load(drive->tier, &flight->io);
    }
    if (status == KVF_OK) {
        flight->is_started = true;
        if (is_hbm(drive)) {
            flight->hbm_slot = flight->io.location;
            kvf_dram_pin(device_of(drive)->slots, flight->hbm_slot);
        }
        drive->loads_inflight++;
        flight->ahead_bytes = drive->reading_bytes;
        drive->reading_bytes += flight->record_bytes;
        return LOAD_STARTED;
    }
    if (status == KVF_ERR_BUSY) {
        return LOAD_DRIVE_FULL;
    }
    drive->is_off |= status == KVF_ERR_TIER_OFF;
    load_fail(flight, status);
    return LOAD_OVER;
}

static int load_begin(struct kvf_agent *agent, struct kvf_entry *entry, struct kvf_drive *from,
                      struct kvf_session *session, struct kvf_flight **flight_out)
{
    struct kvf_flight *flight = kvf_place_flight_new(agent, KVF_FLIGHT_LOAD, entry, session);

    if (flight == NULL) {
        return KVF_ERR_BUSY;
    }
    flight->tenant = agent->namespaces[entry->namespace_index].tenant;
    flight->from = from;
    entry->state = KVF_ENTRY_LOADING;
    entry->dram_slot = kvf_pool_index(&agent->flights, flight);
    kvf_flights_push(&flight->from->loads, flight);
    agent->metrics.prefetch_blocks += session != NULL;
    *flight_out = flight;
    return KVF_OK;
}

int kvf_place_load(struct kvf_agent *agent, struct kvf_entry *entry, struct kvf_session *session,
                   struct kvf_flight **flight_out)
{
    int status;

    assert(entry->state == KVF_ENTRY_READY &&
           (kvf_entry_on_drive(entry) || kvf_entry_in_hbm(agent, entry)));
    status = load_begin(agent, entry, source_of(agent, entry), session, flight_out);
    if (status == KVF_OK) {
        (*flight_out)->is_demotion = session == NULL;
    }
    return status;
}

int kvf_place_load_for_peer(struct kvf_agent *agent, struct kvf_entry *entry)
{
    struct kvf_flight *flight;

    assert(entry->state == KVF_ENTRY_READY &&
           (kvf_entry_on_drive(entry) || kvf_entry_in_hbm(agent, entry)));
    return load_begin(agent, entry, source_of(agent, entry), NULL, &flight);
}

int kvf_place_load_remote(struct kvf_agent *agent, struct kvf_entry *entry,
                          struct kvf_session *session, kvf_location link,
                          struct kvf_flight **flight_out)
{
    int status = load_begin(agent, entry, &agent->peers->source, session, flight_out);

    if (status == KVF_OK) {
        (*flight_out)->io.location = link;
    }
    return status;
}

uint8_t kvf_place_loading_tier(struct kvf_agent *agent, const struct kvf_entry *entry)
{
    return is_remote(kvf_place_flight(agent, entry)->from) ? KVF_TIER_REMOTE : KVF_TIER_NVME;
}

/* Start what can be started. A load without memory goes to the back, so that one tenant whose
 * memory is all leased does not hold up the others, and fails when it has waited long enough. */
static bool loads_pump(struct kvf_drive *drive)
{
    struct kvf_agent *agent = drive->agent;
    uint32_t tries = drive->loads.count < LOAD_TRIES ? drive->loads.count : LOAD_TRIES;
    bool any = false;

    while (tries-- > 0 && drive->loads_inflight < agent->config->prefetch_inflight) {
        struct kvf_flight *flight = kvf_flights_pop(&drive->loads);

        switch (load_start(drive, flight)) {
        case LOAD_STARTED:
        case LOAD_OVER:
            any = true;
            break;
        case LOAD_NO_MEMORY:
            if (agent->now_ns - flight->created_ns > LOAD_PATIENCE_NS) {
                load_fail(flight, KVF_ERR_BUSY);
                any = true;
            } else {
                kvf_flights_push(&drive->loads, flight);
            }
            break;
        case LOAD_DRIVE_FULL:
            kvf_flights_unpop(&drive->loads, flight);
            return any;
        }
    }
    return any;
}

/* How long a load of so many bytes from there would take now. */
static uint64_t estimate_ns(const struct kvf_drive *drive, uint64_t bytes, bool with_queue)
{
    const struct kvf_agent *agent = drive->agent;
    uint64_t ahead_bytes = with_queue ? drive->reading_bytes + drive->loads.bytes : 0;

    if (with_queue && ahead_bytes == 0 && agent->now_ns - drive->last_read_ns > PROBE_NS) {
        return 0; /* tried from time to time: else a bad estimate would never be corrected */
    }
    return drive->read_latency_ns + transfer_ns(drive, ahead_bytes + bytes);
}

uint64_t kvf_place_load_estimate_ns(struct kvf_agent *agent, const struct kvf_entry *entry,
                                    bool with_queue)
{
    return estimate_ns(source_of(agent, entry), entry->record_bytes, with_queue);
}

uint64_t kvf_place_remote_estimate_ns(const struct kvf_agent *agent, uint64_t bytes)
{
    return estimate_ns(&agent->peers->source, bytes, true);
}

/* ----------------------------------------------------------------------------------------------
 * Write: slot to drive
 */
static void count_writeback(struct kvf_agent *agent, const struct kvf_entry *entry, int64_t bytes)
{
    struct kvf_namespace *ns = &agent->namespaces[entry->namespace_index];

    agent->writeback_bytes += (uint64_t)bytes;
    ns->writeback_bytes += (uint64_t)bytes;
    agent->tenants[ns->tenant].writeback_bytes += (uint64_t)bytes;
}

static void write_finish(struct kvf_flight *flight, int status)
{
    struct kvf_agent *agent = flight->agent;
    struct kvf_entry *entry = kvf_index_at(&agent->index, flight->cookie);

    count_writeback(agent, entry, -(int64_t)flight->record_bytes);
    agent->writes--;
    kvf_dram_unpin(agent->dram_store, flight->slot);
    if (flight->is_abandoned) {
        kvf_place_number_free(flight);
    } else {
        agent->sides[(uint32_t)flight->slot].writer = KVF_INDEX_NONE;
        flight_settle(flight, status, status == KVF_OK ? entry : NULL);
    }
    kvf_place_flight_free(flight);
}

/* The tier has packed the record: the budget has paid for the plain one. */
static void count_saved(struct kvf_drive *drive, uint64_t saved_bytes)
{
    if (saved_bytes != 0) {
        kvf_admit_refund(drive, saved_bytes);
        drive->agent->metrics.nvme_recompressed_blocks++;
        drive->agent->metrics.nvme_saved_bytes += saved_bytes;
    }
}

static void write_done(struct kvf_tier_io *io)
{
    struct kvf_flight *flight = io->owner;
    struct kvf_agent *agent = flight->agent;
    struct kvf_entry *entry = kvf_index_at(&agent->index, flight->cookie);
    struct kvf_drive *drive = &agent->drives[entry->drive];

    kvf_histogram_add(&agent->metrics.nvme_write_ns, agent->now_ns - flight->started_ns);
    agent->metrics.nvme_io_errors += io->status == KVF_ERR_IO;
    if (io->status == KVF_OK && flight->is_abandoned) {
        drive->tier->ops->drop(drive->tier, io->location);
    } else if (!flight->is_abandoned) {
        entry->nvme = KVF_NVME_NONE;
        entry->is_admitted = io->status == KVF_OK;
        if (io->status == KVF_OK) {
            entry->nvme = flight->io.durable ? KVF_NVME_SYNCED : KVF_NVME_STORED;
            kvf_entry_set_nvme(entry, io->location);
            agent->namespaces[entry->namespace_index].nvme_bytes += entry->record_bytes;
            count_saved(drive, flight->record_bytes - io->stored_bytes);
        }
    }
    write_finish(flight, io->status);
}

static int write_start(struct kvf_flight *flight)
{
    struct kvf_agent *agent = flight->agent;
    struct kvf_entry *entry = kvf_index_at(&agent->index, flight->cookie);
    struct kvf_drive *drive = &agent->drives[entry->drive];
    int status;

    if (flight->is_abandoned) {
        write_finish(flight, KVF_ERR_BUSY);
        return KVF_OK;
    }
    flight->io.record = flight->record;
    flight->io.record_bytes = flight->record_bytes;
    flight->io.cookie = flight->cookie;
    flight->io.durable = flight->is_durable;
    flight->io.done = write_done;
    name_of(agent, entry, &flight->io.name);
    status = drive->tier->ops->store(drive->tier, &flight->io);
    if (status == KVF_OK) {
        flight->is_started = true;
        flight->started_ns = agent->now_ns;
    } else if (status != KVF_ERR_BUSY) {
        entry->nvme = KVF_NVME_NONE;
        entry->is_admitted = 0;
        write_finish(flight, status);
    }
    return status;
}

/* A write pins its slot. Beside leases it must leave an eighth of the arena to be evicted, or puts
 * find no memory at all; a write that a client waits for may take that too. */
static bool backlog_allows(const struct kvf_agent *agent, const struct kvf_entry *entry,
                           bool durable)
{
    uint64_t waiting = agent->writeback_bytes + entry->record_bytes;

    return (waiting <= agent->writeback_max_bytes || KVF_MUTANT(backlog_unbounded)) &&
           agent->writes < KVF_WRITES_MAX &&
           (durable || (agent->leased_bytes + waiting <= agent->arena_bytes / 8 * 7 &&
                        kvf_room_allows_write(agent, entry->namespace_index, entry->record_bytes)));
}

int kvf_place_write(struct kvf_agent *agent, struct kvf_entry *entry, uint32_t drive_index,
                    bool durable)
{
    struct kvf_drive *drive = &agent->drives[drive_index];
    struct kvf_flight *flight;

    assert(kvf_entry_in_dram(entry) && entry->nvme == KVF_NVME_NONE);
    if (drive_index >= agent->n_drives) {
        return KVF_ERR_TIER_OFF;
    }
    if (!backlog_allows(agent, entry, durable)) {
        return KVF_ERR_BUSY;
    }
    flight = kvf_place_flight_new(agent, KVF_FLIGHT_WRITE, entry, NULL);
    if (flight == NULL) {
        return KVF_ERR_BUSY;
    }
    flight->slot = kvf_place_slot(agent, entry);
    flight->record = agent->dram->ops->address(agent->dram, flight->slot);
    flight->is_durable = durable;
    kvf_dram_pin(agent->dram_store, flight->slot);
    count_writeback(agent, entry, (int64_t)flight->record_bytes);
    agent->writes++;
    agent->sides[entry->dram_slot].writer = kvf_pool_index(&agent->flights, flight);
    entry->nvme = KVF_NVME_QUEUED;
    entry->drive = drive_index & 7u;
    entry->is_admitted = 1;
    kvf_admit_spend(drive, flight->record_bytes);
    agent->metrics.nvme_admitted_blocks++;
    kvf_flights_push(&drive->writes, flight);
    return KVF_OK;
}

static bool writes_pump(struct kvf_drive *drive)
{
    bool any = false;

    while (drive->writes.head != NULL && !drive->is_full) {
        struct kvf_flight *flight = kvf_flights_pop(&drive->writes);

        if (write_start(flight) == KVF_ERR_BUSY) {
            kvf_flights_unpop(&drive->writes, flight);
            drive->is_full = true;
            break;
        }
        any = true;
    }
    return any;
}

/* ----------------------------------------------------------------------------------------------
 * The turn
 */
bool kvf_place_poll(struct kvf_agent *agent)
{
    unsigned events = agent->work->ops->poll(agent->work);
    bool any;

    if (agent->setup != agent->work) {
        events += agent->setup->ops->poll(agent->setup);
    }
    events += agent->dram->ops->poll(agent->dram, agent->now_ns);
    for (uint32_t i = 0; i < agent->n_drives; i++) {
        events += agent->drives[i].tier->ops->poll(agent->drives[i].tier, agent->now_ns);
    }
    for (uint32_t i = 0; i < agent->n_hbm; i++) {
        struct kvf_drive *source = &agent->hbm[i].source;

        events += source->tier->ops->poll(source->tier, agent->now_ns);
        events += loads_pump(source);
    }
    if (agent->peers != NULL) {
        events += kvf_peers_poll(agent);
        events += loads_pump(&agent->peers->source);
    }
    any = events != 0;
    for (uint32_t i = 0; i < agent->n_drives; i++) {
        if (any || agent->now_ns >= agent->second_ns) {
            agent->drives[i].is_full = false;
        }
        any |= loads_pump(&agent->drives[i]);
        any |= writes_pump(&agent->drives[i]);
    }
    return any;
}

uint64_t kvf_place_deadline_ns(const struct kvf_agent *agent)
{
    uint64_t deadline_ns = agent->dram->ops->deadline_ns(agent->dram);

    for (uint32_t i = 0; i < agent->n_drives; i++) {
        const struct kvf_drive *drive = &agent->drives[i];
        uint64_t drive_ns = drive->tier->ops->deadline_ns(drive->tier);

        if (drive->loads.head != NULL || drive->is_full) {
            drive_ns = agent->now_ns + RETRY_NS; /* memory may be freed by a release */
        }
        deadline_ns = drive_ns < deadline_ns ? drive_ns : deadline_ns;
    }
    for (uint32_t i = 0; i < agent->n_hbm; i++) {
        const struct kvf_drive *source = &agent->hbm[i].source;
        uint64_t source_ns = source->tier->ops->deadline_ns(source->tier);

        if (source->loads.head != NULL || source_ns == 0) {
            source_ns = agent->now_ns + RETRY_NS;
        }
        deadline_ns = source_ns < deadline_ns ? source_ns : deadline_ns;
    }
    if (kvf_peers_deadline_ns(agent) < deadline_ns) {
        deadline_ns = kvf_peers_deadline_ns(agent);
    }
    return deadline_ns;
}

bool kvf_place_is_quiet(const struct kvf_agent *agent)
{
    return kvf_pool_taken_count(&agent->flights) == 0 && agent->verify == NULL;
}
