/* SPDX-License-Identifier: Apache-2.0
 *
 * request_put.c: one block of a put. Its record page is copied out of staging, judged, given its
 * name, and only then is memory reserved; the payload is copied and summed by a worker.
 */
#include "agent/core.h"

#include <string.h>

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
        return KVF_ERR_MISMATCH;
    }
    memcpy(page->header.key_id, key_id, sizeof(page->header.key_id));
    page->header.shard = session->shard;
    page->header.shard_count = session->shard_count;
    memset(&page->store, 0, sizeof(page->store));
    kvf_block_seal_header(page);
    return KVF_OK;
}

/* The block is here already, with this payload? */
static int compare(struct kvf_agent *agent, const struct kvf_entry *entry)
{
    if (!entry->is_crc_unknown && entry->payload_crc32c != agent->page.header.payload_crc32c) {
        agent->metrics.put_conflict++;
        return KVF_ERR_CONFLICT;
    }
    agent->metrics.put_exists++;
    return KVF_EXISTS;
}

/* Make a READY block in memory durable. KVF_OK: *flight_out is its write, to be waited for;
 * KVF_EXISTS: it is on a drive. */
static int make_durable(struct kvf_agent *agent, struct kvf_entry *entry,
                        struct kvf_flight **flight_out)
{
    struct kvf_flight *writer;
    uint32_t word;
    int status;

    if (entry->nvme == KVF_NVME_STORED) {
        return KVF_EXISTS;
    }
    if (agent->n_drives == 0) {
        return KVF_ERR_TIER_OFF;
    }
    writer = kvf_place_writer(agent, entry);
    if (writer == NULL) {
        memcpy(&word, entry->key_id + 16, sizeof(word));
        status = kvf_place_write(agent, entry,
                                 entry->is_admitted ? entry->drive : word % agent->n_drives, true);
        if (status != KVF_OK) {
            return status;
        }
        writer = kvf_place_writer(agent, entry);
    } else if (writer->is_started && !writer->is_durable) {
        /* written without a sync to follow: durable only once it is sealed, which nobody reports */
        return KVF_ERR_BUSY;
    }
    writer->is_durable = true;
    *flight_out = writer;
    return KVF_OK;
}

static void put_existing(struct kvf_request *request, struct kvf_entry *entry)
{
    struct kvf_agent *agent = request->session->agent;
    bool durable = (request->sqe.flags & KVF_SQE_DURABLE) != 0;
    uint32_t index = request->next_key;
    uint8_t tier = kvf_entry_in_dram(entry) ? KVF_TIER_DRAM : KVF_TIER_NVME;
    struct kvf_flight *writer = NULL;
    int status = compare(agent, entry);

    if (status == KVF_EXISTS && durable && entry->nvme != KVF_NVME_STORED) {
        status = make_durable(agent, entry, &writer);
        if (status == KVF_OK) {
            status = kvf_request_wait(request, index, KVF_WANT_DURABLE, tier, writer, NULL);
            if (status == KVF_OK) {
                return;
            }
        }
    } else if (status == KVF_EXISTS) {
        kvf_admit_consider(agent, entry, request->has_chain_key, request->chain_key_id);
    }
    kvf_request_block(request, index, status, tier);
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
        if (key->supersedes != 0) {
            op->supersedes = true;
            kvf_request_key_id(session, &session->keys[key->supersedes - 1], op->superseded_key_id);
        }
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
    entry = kvf_index_find(&agent->index, key_id, session->shard);
    if (entry == NULL) {
        put_new(request, key, key_id);
    } else if (entry->state == KVF_ENTRY_READY) {
        put_existing(request, entry);
    } else if (entry->state == KVF_ENTRY_LOADING) {
        kvf_request_block(request, request->next_key, compare(agent, entry), KVF_TIER_NVME);
    } else {
        /* another put of the same block is being copied: share its fate */
        status = compare(agent, entry);
        if (status == KVF_EXISTS) {
            status = kvf_request_wait(request, request->next_key,
                                      (request->sqe.flags & KVF_SQE_DURABLE) != 0 ? KVF_WANT_DURABLE
                                                                                  : KVF_WANT_STORED,
                                      KVF_TIER_DRAM, kvf_place_flight(agent, entry), NULL);
        }
        if (status != KVF_OK) {
            kvf_request_block(request, request->next_key, status, KVF_TIER_DRAM);
        }
    }
out:
    memcpy(request->chain_key_id, key_id, sizeof(request->chain_key_id));
    request->has_chain_key = true;
}

bool kvf_request_put_done(struct kvf_op *op, int status, struct kvf_entry *entry)
{
    struct kvf_request *request = op->request;
    struct kvf_session *session = request->session;
    struct kvf_agent *agent = session->agent;
    struct kvf_flight *writer = NULL;
    struct kvf_entry *old;

    if (status == KVF_OK && op->supersedes) {
        old = kvf_index_find(&agent->index, op->superseded_key_id, session->shard);
        op->supersedes = false;
        if (old != NULL && old != entry) {
            kvf_place_forget_set(agent, old);
        }
    }
    if (status == KVF_OK && op->want == KVF_WANT_DURABLE && entry->nvme != KVF_NVME_STORED &&
        !request->is_canceled) {
        status = make_durable(agent, entry, &writer);
        if (status == KVF_OK) {
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
