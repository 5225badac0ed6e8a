/* SPDX-License-Identifier: Apache-2.0
 *
 * request_put.c: one block of a put. Its record page is copied out of staging, judged, given its
 * name, and only then is memory reserved; the payload is copied and summed by a worker.
 */
#include "agent/core.h"
#include "agent/observe.h"

#include <string.h>

#include "base/mutant.h"
/* Copy and judge the record page; on success agent->page names this block. */
static int judge_page(struct kvf_session *session, const struct kvf_shm_key *key,
                      const uint8_t key_id[32])
{
    struct kvf_agent *agent = session->agent;
    struct kvf_record_page *page = &agent->page;
    int status;

    memcpy(page, session->staging_map + key->stage_offset, sizeof(*page));
    status = kvf_block_check(page, key->record_bytes);
    if (status == KVF_OK && page->header.total_bytes != key->record_bytes) {
        status = KVF_ERR_CORRUPT;
    }
    if (status != KVF_OK) {
        agent->metrics.put_corrupt++;
        return KVF_ERR_CORRUPT;
    }
    if (kvf_block_matches_plan(page, &session->plan) != KVF_OK) {
        agent->metrics.put_mismatch++;
        agent->metrics.x_refused += page->header.weights_fp != session->plan.weights_fp;
        return KVF_ERR_MISMATCH;
    }
    memcpy(page->header.key_id, key_id, sizeof(page->header.key_id));
    page->header.shard = session->shard;
    page->header.shard_count = session->shard_count;
    memset(&page->store, 0, sizeof(page->store));
    kvf_block_seal_header(page);
    return KVF_OK;
}

static bool is_summed(const struct kvf_request *request)
{
    return (request->sqe.flags & KVF_SQE_UNSUMMED) == 0;
}

/* Has the block another payload than this put? One whose sum nobody knows counts as the same: it is
 * not worth copying to find out. */
static bool has_other_payload(const struct kvf_request *request, const struct kvf_entry *entry)
{
    bool is_known = !entry->is_crc_unknown && is_summed(request);

    return is_known && !KVF_MUTANT(conflict_missed) &&
           entry->payload_crc32c != request->session->agent->page.header.payload_crc32c;
}

/* The block is stored already: with this payload? */
static int compare(const struct kvf_request *request, const struct kvf_entry *entry)
{
    struct kvf_agent *agent = request->session->agent;

    if (has_other_payload(request, entry)) {
        agent->metrics.put_conflict++;
        return KVF_ERR_CONFLICT;
    }
    agent->metrics.put_exists++;
    return KVF_EXISTS;
}

/* Make a READY block in memory durable. KVF_OK: *flight_out is its write, to be waited for;
 * KVF_EXISTS: it is on stable storage. */
static int make_durable(struct kvf_agent *agent, struct kvf_entry *entry,
                        struct kvf_flight **flight_out)
{
    struct kvf_flight *writer = kvf_place_writer(agent, entry);
    uint32_t drive = entry->drive;
    uint32_t word;
    int status;

    if (entry->nvme == KVF_NVME_SYNCED) {
        return KVF_EXISTS;
    }
    if (agent->n_drives == 0) {
        return KVF_ERR_TIER_OFF;
    }
    if (kvf_entry_on_drive(entry)) {
        kvf_place_leave_drive(agent, entry, true); /* written once more, with a sync behind it */
    } else if (!entry->is_admitted) {
        memcpy(&word, entry->key_id + 16, sizeof(word));
        drive = word % agent->n_drives;
    }
    if (writer == NULL) {
        status = kvf_place_write(agent, entry, drive, true);
        if (status != KVF_OK) {
            return status;
        }
        writer = kvf_place_writer(agent, entry);
    } else if (!writer->is_started) {
        writer->is_durable = true; /* one that has started is waited for, and then done again */
    }
    *flight_out = writer;
    return KVF_OK;
}

/* Let the op judge the block when the flight that it waits for has brought it. */
static void compare_later(struct kvf_op *op)
{
    op->is_compared = is_summed(op->request);
    op->payload_crc32c = op->request->session->agent->page.header.payload_crc32c;
}

/* Is this on a drive alone, where a loss of power may take it, and is that not enough? */
static bool needs_reload(const struct kvf_request *request, const struct kvf_entry *entry)
{
    return (request->sqe.flags & KVF_SQE_DURABLE) != 0 && !kvf_entry_in_dram(entry) &&
           entry->nvme != KVF_NVME_SYNCED;
}

/* Bring such a block back, to write it once more. It is not put anew: the first put stands. */
static void put_reloading(struct kvf_request *request, struct kvf_entry *entry)
{
    struct kvf_agent *agent = request->session->agent;
    struct kvf_flight *flight = NULL;
    struct kvf_op *op;
    int status = compare(request, entry);

    if (status == KVF_EXISTS) {
        status = KVF_OK;
        if (entry->state == KVF_ENTRY_LOADING) {
            flight = kvf_place_flight(agent, entry);
        } else {
            status = kvf_place_load(agent, entry, request->session, &flight);
        }
    }
    if (status == KVF_OK) {
        status = kvf_request_wait(request, request->next_key, KVF_WANT_RELOAD, KVF_TIER_NVME,
                                  flight, &op);
    }
    if (status != KVF_OK) {
        kvf_request_block(request, request->next_key, status, KVF_TIER_NVME);
        return;
    }
    compare_later(op);
}

/* A block that this put finds READY. False: it is not worth keeping, put it anew. */
static bool put_existing(struct kvf_request *request, struct kvf_entry *entry)
{
    struct kvf_agent *agent = request->session->agent;
    bool durable = (request->sqe.flags & KVF_SQE_DURABLE) != 0;
    bool in_dram = kvf_entry_in_dram(entry);
    uint32_t index = request->next_key;
    bool in_hbm = kvf_entry_in_hbm(agent, entry);
    uint8_t tier = in_dram ? KVF_TIER_DRAM : in_hbm ? KVF_TIER_HBM : KVF_TIER_NVME;
    struct kvf_flight *writer = NULL;
    int status;

    if (!in_dram && !in_hbm && agent->drives[entry->drive].is_off) {
        kvf_place_forget_set(agent, entry);
        return false;
    }
    if (!request->has_chain_key && request->sqe.depth == 0) {
        entry->is_head = 1; /* recovery does not know */
    }
    if (needs_reload(request, entry)) {
        put_reloading(request, entry);
        return true;
    }
    status = compare(request, entry);
    if (status == KVF_EXISTS && durable) {
        status = entry->is_no_write ? KVF_ERR_REFUSED : make_durable(agent, entry, &writer);
        if (status == KVF_OK) {
            status = kvf_request_wait(request, index, KVF_WANT_DURABLE, tier, writer, NULL);
            if (status == KVF_OK) {
                return true;
            }
        }
    } else if (status == KVF_EXISTS) {
        kvf_admit_consider(agent, entry, request->has_chain_key, request->chain_key_id);
    }
    kvf_request_block(request, index, status, tier);
    return true;
}

/* Let the op of this key supersede what the key says. */
static void set_superseded(struct kvf_op *op, const struct kvf_shm_key *key)
{
    struct kvf_session *session = op->request->session;

    if (key->supersedes != 0) {
        op->supersedes = true;
        kvf_request_key_id(session, &session->keys[key->supersedes - 1], op->superseded_key_id);
    }
}

/* Another put of the same block is being copied: share its fate. One of another payload waits as
 * well: there is no conflict with a put that may yet fail. */
static void put_joining(struct kvf_request *request, const struct kvf_shm_key *key,
                        struct kvf_entry *entry)
{
    struct kvf_agent *agent = request->session->agent;
    bool durable = (request->sqe.flags & KVF_SQE_DURABLE) != 0;
    bool is_other = has_other_payload(request, entry);
    struct kvf_op *op;
    int status;

    agent->metrics.put_exists += !is_other;
    if (!is_other && durable && entry->is_no_write) {
        status = KVF_ERR_REFUSED;
    } else {
        status = kvf_request_wait(request, request->next_key,
                                  durable ? KVF_WANT_DURABLE : KVF_WANT_STORED, KVF_TIER_DRAM,
                                  kvf_place_flight(agent, entry), &op);
    }
    if (status != KVF_OK) {
        kvf_request_block(request, request->next_key, status, KVF_TIER_DRAM);
        return;
    }
    op->is_joined = true;
    compare_later(op);
    set_superseded(op, key);
}

static void put_new(struct kvf_request *request, const struct kvf_shm_key *key,
                    const uint8_t key_id[32])
{
    struct kvf_session *session = request->session;
    bool durable = (request->sqe.flags & KVF_SQE_DURABLE) != 0;
    struct kvf_flight *flight;
    struct kvf_op *op;
    int status = KVF_OK;

    if (durable && session->agent->n_drives == 0) {
        status = KVF_ERR_TIER_OFF;
    }
    if (status == KVF_OK) {
        status = kvf_place_fill(request, key, key_id, &flight);
    }
    if (status == KVF_OK) {
        /* cannot fail after the fill has begun: ops were counted before it */
        status = kvf_request_wait(request, request->next_key,
                                  durable ? KVF_WANT_DURABLE : KVF_WANT_STORED, KVF_TIER_DRAM,
                                  flight, &op);
        assert(status == KVF_OK);
        set_superseded(op, key);
        return;
    }
    kvf_request_block(request, request->next_key, status, KVF_TIER_NONE);
}

void kvf_request_start_put(struct kvf_request *request, const struct kvf_shm_key *key)
{
    struct kvf_session *session = request->session;
    struct kvf_agent *agent = session->agent;
    struct kvf_entry *entry;
    uint8_t key_id[32];
    int status;

    session->puts++;
    kvf_request_key_id(session, key, key_id);
    status = judge_page(session, key, key_id);
    if (status == KVF_OK && request->sqe.ttl_s != 0 &&
        (request->sqe.flags & KVF_SQE_DURABLE) != 0) {
        status = KVF_ERR_INVALID; /* a time to live is kept in memory only */
    }
    if (status == KVF_OK && agent->namespaces[session->namespace_index].is_off) {
        agent->metrics.put_disabled++;
        status = KVF_ERR_REFUSED;
    }
    if (status == KVF_OK && agent->is_draining) {
        status = KVF_ERR_BUSY;
    }
    if (status == KVF_OK && agent->ops.free_count == 0) {
        status = KVF_ERR_BUSY;
    }
    if (status != KVF_OK) {
        kvf_request_block(request, request->next_key, status, KVF_TIER_NONE);
        goto out;
    }
    if (kvf_observe_answers_nothing(session)) {
        kvf_observe_put(request, key);
        goto out;
    }
    entry = kvf_room_find(agent, key_id, session->shard);
    if (entry != NULL && entry->state == KVF_ENTRY_FILLING) {
        put_joining(request, key, entry);
    } else if (entry != NULL && entry->state == KVF_ENTRY_LOADING && needs_reload(request, entry)) {
        put_reloading(request, entry);
    } else if (entry != NULL && entry->state == KVF_ENTRY_LOADING) {
        kvf_request_block(request, request->next_key, compare(request, entry), KVF_TIER_NVME);
    } else if (entry == NULL || !put_existing(request, entry)) {
        put_new(request, key, key_id);
    }
out:
    memcpy(request->chain_key_id, key_id, sizeof(request->chain_key_id));
    request->has_chain_key = true;
}

/* The old chunk goes when the new one is whole: not before all of its shards are READY. */
static void supersede(struct kvf_op *op, struct kvf_entry *entry)
{
    struct kvf_session *session = op->request->session;
    struct kvf_agent *agent = session->agent;
    const struct kvf_entry *set = kvf_place_set(agent, entry->key_id, session->shard_count);
    struct kvf_entry *old;

    op->supersedes = false;
    if (set == NULL || !kvf_place_set_is_whole(agent, set)) {
        return;
    }
    old = kvf_index_find(&agent->index, op->superseded_key_id, session->shard);
    if (old != NULL && old != entry) {
        kvf_place_forget_set(agent, old);
    }
}

bool kvf_request_put_done(struct kvf_op *op, int status, struct kvf_entry *entry)
{
    struct kvf_request *request = op->request;
    struct kvf_agent *agent = request->session->agent;
    struct kvf_flight *writer = NULL;

    if (op->want == KVF_WANT_RELOAD) {
        op->want = KVF_WANT_DURABLE;
        /* it could not be read, and is gone, or memory is short: to be tried again */
        status = status == KVF_OK ? KVF_OK : KVF_ERR_BUSY;
    }
    if (status == KVF_ERR_CORRUPT && op->is_joined && !KVF_MUTANT(corrupt_shared)) {
        status = KVF_ERR_BUSY; /* the other one was wrong: nobody has looked at this one yet */
    }
    if (status == KVF_OK && op->is_compared && op->payload_crc32c != entry->payload_crc32c &&
        !KVF_MUTANT(join_unjudged)) {
        agent->metrics.put_conflict++;
        status = KVF_ERR_CONFLICT;
    }
    if (status == KVF_OK && op->supersedes) {
        supersede(op, entry);
    }
    if (status == KVF_OK && op->want == KVF_WANT_DURABLE) {
        if (request->is_canceled || request->is_expired) {
            status = request->is_canceled ? KVF_ERR_CANCELED : KVF_ERR_TIMEOUT;
        } else {
            status = make_durable(agent, entry, &writer);
        }
        if (writer != NULL) {
            op->flight = writer;
            op->next = writer->waiters;
            writer->waiters = op;
            return true;
        }
        status = status == KVF_EXISTS ? KVF_OK : status;
    }
    kvf_request_block(request, op->index, status, KVF_TIER_DRAM);
    return false;
}
