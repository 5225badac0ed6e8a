/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_nvme_append.c: what the drive tier writes while it runs: records, syncs and the state page;
 * and the budget of errors.
 */
#include "tiers/tier_nvme_internal.h"

#include "base/failpoint.h"
#include "base/mutant.h"

#include <assert.h>
#include <string.h>

/* --- I/O -------------------------------------------------------------------------------------- */

static void io_list_push(struct kvf_nvme_io_list *list, struct kvf_nvme_io *nio)
{
    nio->next = NULL;
    *list->end = nio;
    list->end = &nio->next;
}

static struct kvf_nvme_io *io_list_pop(struct kvf_nvme_io_list *list)
{
    struct kvf_nvme_io *nio = list->first;

    list->first = nio->next;
    if (list->first == NULL) {
        list->end = &list->first;
    }
    return nio;
}

static void io_done(struct kvf_io *io)
{
    struct kvf_nvme_io *nio = io->owner;
    struct kvf_nvme_tier *tier = nio->tier;

    tier->ios_outstanding--;
    if (tier->closing) {
        return;
    }
    if (io->status != KVF_OK) {
        static const char *const names[] = {"", "read", "write", "sync"};

        tier->stat.errors_io++;
        kvf_nvme_error_note(tier, names[io->op], io->offset, io->error);
    }
    nio->then(tier, nio, io->status);
}

void kvf_nvme_io_submit(struct kvf_nvme_tier *tier, struct kvf_nvme_io *nio, enum kvf_io_op op,
                        void *buffer, uint64_t offset, uint64_t bytes, int fault,
                        kvf_nvme_io_fn then)
{
    nio->io = (struct kvf_io){.op = (uint8_t)op,
                              .buffer = buffer,
                              .offset = offset,
                              .bytes = bytes,
                              .done = io_done,
                              .check = nio->check,
                              .owner = nio};
    nio->tier = tier;
    nio->then = then;
    tier->ios_outstanding++;
    if (fault != KVF_OK) {
        nio->io.status = fault;
        io_list_push(&tier->io_faults, nio);
    } else if (tier->io_wait.first != NULL || tier->io->ops->submit(tier->io, &nio->io) != KVF_OK) {
        io_list_push(&tier->io_wait, nio); /* the order of submission is kept */
    }
}

/* What the queue had no room for, and what failpoints have failed. */
void kvf_nvme_io_retry(struct kvf_nvme_tier *tier)
{
    while (tier->io_wait.first != NULL &&
           tier->io->ops->submit(tier->io, &tier->io_wait.first->io) == KVF_OK) {
        io_list_pop(&tier->io_wait);
    }
    while (tier->io_faults.first != NULL) {
        io_done(&io_list_pop(&tier->io_faults)->io);
    }
}

/* --- errors ----------------------------------------------------------------------------------- */

void kvf_nvme_error_note(struct kvf_nvme_tier *tier, const char *what, uint64_t offset, int error)
{
    uint64_t suppressed;

    if (tier->error_score == 0) {
        tier->error_forgiven_ns = tier->now_ns;
    }
    tier->error_score++;
    if (kvf_log_limit_allow(&tier->log_limit, tier->now_ns, &suppressed)) {
        kvf_log(KVF_LOG_WARNING, "nvme %s: %s at offset %llu failed: %s (%llu more since)",
                tier->path, what, (unsigned long long)offset,
                error == 0 ? "wrong content" : strerror(error), (unsigned long long)suppressed);
    }
    if (!tier->writes_off && tier->error_score >= tier->config.errors_writes_off) {
        tier->writes_off = true;
        kvf_log(KVF_LOG_ERROR,
                "nvme %s: %u errors: nothing more is written; look at the drive, then restart",
                tier->path, tier->error_score);
    }
    if (!tier->off && tier->error_score >= tier->config.errors_off) {
        tier->off = true;
        kvf_log(KVF_LOG_ERROR,
                "nvme %s: %u errors: the tier is off; look at the drive, then restart", tier->path,
                tier->error_score);
    }
}

/* --- sync ------------------------------------------------------------------------------------- */

void kvf_nvme_sync_want(struct kvf_nvme_tier *tier, struct kvf_nvme_waiter *waiter)
{
    waiter->next = NULL;
    *tier->sync_wait.end = waiter;
    tier->sync_wait.end = &waiter->next;
}

static void sync_then(struct kvf_nvme_tier *tier, struct kvf_nvme_io *nio, int status)
{
    struct kvf_nvme_waiter *waiter = tier->sync_running.first;

    (void)nio;
    tier->sync_in_flight = false;
    tier->sync_running.first = NULL;
    if (status != KVF_OK) {
        tier->info.sync_failures++;
        kvf_log(KVF_LOG_ERROR,
                "nvme %s: sync failed (%s): the segments being written are discarded", tier->path,
                strerror(nio->io.error));
        kvf_nvme_unsealed_discard(tier);
    }
    while (waiter != NULL) {
        struct kvf_nvme_waiter *next = waiter->next;

        waiter->then(tier, waiter, status);
        waiter = next;
    }
}

/* One sync at a time, for all who wait when it starts: the group commit of durable stores. Their
 * writes had completed before, so it covers them. */
void kvf_nvme_sync_start(struct kvf_nvme_tier *tier)
{
    if (tier->sync_in_flight || tier->sync_wait.first == NULL) {
        return;
    }
    tier->sync_running.first = tier->sync_wait.first;
    tier->sync_wait.first = NULL;
    tier->sync_wait.end = &tier->sync_wait.first;
    tier->sync_in_flight = true;
    tier->info.syncs++;
    kvf_nvme_io_submit(tier, &tier->sync_io, KVF_IO_SYNC, NULL, 0, 0, KVF_OK, sync_then);
}

/* --- state page ------------------------------------------------------------------------------- */

uint64_t kvf_nvme_epoch_find(const struct kvf_nvme_state *state, uint64_t namespace_id)
{
    for (uint32_t i = 0; i < KVF_NVME_EPOCHS; i++) {
        if (state->epochs[i].epoch != 0 && state->epochs[i].namespace_id == namespace_id) {
            return state->epochs[i].epoch;
        }
    }
    return 0;
}

static void state_finish(struct kvf_nvme_tier *tier, int status)
{
    struct kvf_nvme_state_writer *writer = &tier->state_writer;
    struct kvf_nvme_purge *purge = writer->writing;

    writer->step = KVF_NVME_STATE_IDLE;
    writer->writing = NULL;
    if (status == KVF_OK) {
        tier->generation_limit = writer->limit_writing;
    } else if (!tier->writes_off) {
        writer->dirty = true;
    }
    while (purge != NULL) {
        struct kvf_nvme_purge *next = purge->next;
        struct kvf_nvme_purge told = *purge;

        kvf_pool_put(&tier->purges, purge);
        tier->n_callbacks++;
        told.done(told.ctx, told.namespace_id, status == KVF_OK ? KVF_OK : KVF_ERR_IO);
        purge = next;
    }
}

static void state_written(struct kvf_nvme_tier *tier, struct kvf_nvme_io *nio, int status);

static void state_write_copy(struct kvf_nvme_tier *tier, uint32_t copy)
{
    struct kvf_nvme_state_writer *writer = &tier->state_writer;

    kvf_nvme_state_seal(writer->page, copy);
    kvf_nvme_io_submit(tier, &writer->io, KVF_IO_WRITE, writer->page,
                       KVF_NVME_STATE_OFFSET + (uint64_t)copy * KVF_NVME_COPY_BYTES,
                       KVF_NVME_PAGE_BYTES, KVF_FAILPOINT(nvme_epoch_write), state_written);
}

/* The copy that holds the last good state is touched only after the other one is stable: whatever
 * happens, one of the two is whole. */
static void state_synced(struct kvf_nvme_tier *tier, struct kvf_nvme_waiter *waiter, int status)
{
    struct kvf_nvme_state_writer *writer = &tier->state_writer;

    (void)waiter;
    if (status == KVF_OK && writer->step == KVF_NVME_STATE_FIRST) {
        uint32_t stale_copy = writer->good_copy;

        writer->good_copy = 1 - stale_copy;
        writer->step = KVF_NVME_STATE_SECOND;
        state_write_copy(tier, stale_copy);
        return;
    }
    state_finish(tier, status);
}

static void state_written(struct kvf_nvme_tier *tier, struct kvf_nvme_io *nio, int status)
{
    struct kvf_nvme_state_writer *writer = &tier->state_writer;

    (void)nio;
    if (status != KVF_OK) {
        state_finish(tier, status);
        return;
    }
    writer->waiter.then = state_synced;
    kvf_nvme_sync_want(tier, &writer->waiter);
}

void kvf_nvme_state_start(struct kvf_nvme_tier *tier)
{
    struct kvf_nvme_state_writer *writer = &tier->state_writer;

    if (tier->generation_limit - tier->generation_next < KVF_NVME_GENERATIONS_LOW &&
        tier->state.generation_limit == tier->generation_limit) {
        tier->state.generation_limit += KVF_NVME_GENERATIONS_AHEAD;
        writer->dirty = true;
    }
    if (writer->step != KVF_NVME_STATE_IDLE || !writer->dirty) {
        return;
    }
    writer->dirty = false;
    writer->writing = writer->wanted;
    writer->wanted = NULL;
    writer->wanted_last = NULL;
    if (tier->writes_off) {
        state_finish(tier, KVF_ERR_TIER_OFF);
        return;
    }
    if (tier->config.budget.credit_bytes != NULL) {
        tier->state.credit_bytes = tier->config.budget.credit_bytes(tier->config.budget.ctx);
    }
    tier->state.sequence++;
    memcpy(writer->page, &tier->state, sizeof(*writer->page));
    writer->limit_writing = tier->state.generation_limit;
    writer->step = KVF_NVME_STATE_FIRST;
    state_write_copy(tier, 1 - writer->good_copy);
}

/* --- records ---------------------------------------------------------------------------------- */

/* Room in pages, with what the footer will need after one more record taken off. */
uint32_t kvf_nvme_open_room_raw(const struct kvf_nvme_tier *tier)
{
    const struct kvf_nvme_slot *slot = tier->open;
    uint32_t taken;

    if (slot == NULL || slot->n_entries == tier->slot_entries_max) {
        return 0;
    }
    taken = slot->used_pages + kvf_nvme_index_pages(slot->n_entries + 1) + 1;
    return taken >= tier->segment_pages ? 0 : tier->segment_pages - taken;
}

/* The same, but for what copies of kept records and their entries still need. */
uint32_t kvf_nvme_open_room(const struct kvf_nvme_tier *tier)
{
    uint32_t room = kvf_nvme_open_room_raw(tier);
    uint32_t kept = tier->next.keep_pages;

    if (kept > 0) {
        kept += kvf_nvme_index_pages(tier->next.keep_records) + 1;
    }
    return room > kept ? room - kept : 0;
}

static void record_written(struct kvf_nvme_tier *tier, struct kvf_nvme_io *nio, int status);

/* The bytes behind the record are written with it: they must be nobody's. */
static void zero_padding(void *record, uint64_t record_bytes)
{
    uint64_t padded = (uint64_t)kvf_nvme_pages(record_bytes) * KVF_NVME_PAGE_BYTES;

    memset((uint8_t *)record + record_bytes, 0, padded - record_bytes);
}

static void fill_entry(struct kvf_nvme_slot *slot, const struct kvf_record_page *page,
                       uint32_t page_index)
{
    struct kvf_nvme_entry *entry = kvf_nvme_index_entry(slot->index, slot->n_entries);

    memset(entry, 0, sizeof(*entry));
    memcpy(entry->key_id, page->header.key_id, sizeof(entry->key_id));
    entry->namespace_id = page->store.namespace_id;
    entry->namespace_epoch = page->store.namespace_epoch;
    entry->record_bytes = page->store.record_bytes;
    entry->sequence = page->store.sequence;
    entry->page_index = page_index;
    entry->payload_crc32c = page->header.payload_crc32c;
    entry->shard = page->header.shard;
    entry->shard_count = page->header.shard_count;
    entry->plain_bytes = page->header.plain_bytes;
}

bool kvf_nvme_op_place(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op, uint64_t namespace_id,
                       uint64_t namespace_epoch)
{
    uint32_t pages = kvf_nvme_pages(op->record_bytes);
    uint32_t room = op->kind == KVF_NVME_OP_COPY ? kvf_nvme_open_room_raw(tier)
                                                 : kvf_nvme_open_room(tier);
    struct kvf_nvme_slot *slot = tier->open;
    struct kvf_nvme_segment_info *segment;
    struct kvf_nvme_identity identity = kvf_nvme_identity(tier);
    uint64_t sequence;

    if (pages > room) {
        return false;
    }
    segment = &tier->segments[slot->segment_index];
    op->slot = slot;
    op->entry = slot->n_entries;
    op->page = slot->used_pages;
    sequence = kvf_nvme_sequence(segment->generation, op->page);
    zero_padding(op->record, op->record_bytes);
    kvf_nvme_record_stamp(op->record, &identity, segment->generation, sequence, op->record_bytes,
                          namespace_id, namespace_epoch);
    fill_entry(slot, op->record, op->page);
    slot->records[op->entry] = (struct kvf_nvme_record){.page = op->page,
                                                        .pages_flags = pages << 8 | KVF_NVME_LIVE |
                                                                       KVF_NVME_PENDING,
                                                        .cookie = op->cookie};
    slot->n_entries++;
    slot->used_pages += pages;
    slot->writes_in_flight++;
    segment->n_records = slot->n_entries;
    segment->record_pages += pages;
    tier->stat.stored_bytes += (uint64_t)pages * KVF_NVME_PAGE_BYTES;
    tier->stat.stored_blocks++;
    kvf_nvme_io_submit(tier, &op->io, KVF_IO_WRITE, op->record,
                       kvf_nvme_segment_offset(tier->super.segment_bytes, slot->segment_index) +
                           (uint64_t)op->page * KVF_NVME_PAGE_BYTES,
                       (uint64_t)pages * KVF_NVME_PAGE_BYTES, KVF_FAILPOINT(nvme_record_write),
                       record_written);
    return true;
}

/* The record of a store or copy is where it was put, or will never be. */
static void record_settle(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op, int status)
{
    struct kvf_nvme_record *record = &op->slot->records[op->entry];
    bool discarded = op->slot->step == KVF_NVME_SLOT_DISCARDED;

    if (discarded && status == KVF_OK) {
        status = KVF_ERR_IO;
    }
    record->pages_flags &= ~(uint32_t)KVF_NVME_PENDING;
    if (status != KVF_OK) {
        kvf_nvme_record_kill(tier, record);
    } else if (op->call != NULL) {
        op->call->location = kvf_nvme_location_pack(
            tier->segments[op->slot->segment_index].generation, op->slot->segment_index, op->page);
        op->call->stored_bytes = op->record_bytes;
    }
    if (op->kind == KVF_NVME_OP_COPY) {
        kvf_nvme_copy_written(tier, op, status);
        return;
    }
    tier->stat.stores += status == KVF_OK;
    kvf_nvme_op_finish(tier, op, status);
}

static void record_synced(struct kvf_nvme_tier *tier, struct kvf_nvme_waiter *waiter, int status)
{
    struct kvf_nvme_op *op = (struct kvf_nvme_op *)((char *)waiter -
                                                    offsetof(struct kvf_nvme_op, waiter));

    op->slot->writes_in_flight--;
    record_settle(tier, op, status);
}

static void record_written(struct kvf_nvme_tier *tier, struct kvf_nvme_io *nio, int status)
{
    struct kvf_nvme_op *op = (struct kvf_nvme_op *)((char *)nio - offsetof(struct kvf_nvme_op, io));

    if (status == KVF_OK) {
        tier->stat.bytes_written += nio->io.bytes;
        status = KVF_FAILPOINT(nvme_record_done);
    }
    if (status == KVF_OK && op->call != NULL && op->call->durable && !KVF_MUTANT(sync_skipped) &&
        op->slot->step != KVF_NVME_SLOT_DISCARDED) {
        /* it counts as in flight until then, so that its slot is not used again under it */
        op->waiter.then = record_synced;
        kvf_nvme_sync_want(tier, &op->waiter);
        return;
    }
    op->slot->writes_in_flight--;
    record_settle(tier, op, status);
}

void kvf_nvme_store_begin(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op)
{
    const struct kvf_block_name *name = &op->call->name;

    /* At once if nothing stands before it and no callback can come of it; else in poll. */
    if (tier->waiting.first != NULL || tier->writes_off || tier->off ||
        name->namespace_epoch < kvf_nvme_epoch_find(&tier->state, name->namespace_id) ||
        !kvf_nvme_op_place(tier, op, name->namespace_id, name->namespace_epoch)) {
        kvf_nvme_op_push(&tier->waiting, op);
    }
}

/* Give waiting stores their places, first come first served. */
void kvf_nvme_stores_place(struct kvf_nvme_tier *tier)
{
    while (tier->waiting.first != NULL) {
        struct kvf_nvme_op *op = tier->waiting.first;
        const struct kvf_block_name *name = &op->call->name;

        if (tier->writes_off || tier->off) {
            kvf_nvme_op_finish(tier, kvf_nvme_op_pop(&tier->waiting), KVF_ERR_TIER_OFF);
        } else if (name->namespace_epoch < kvf_nvme_epoch_find(&tier->state, name->namespace_id)) {
            kvf_nvme_op_finish(tier, kvf_nvme_op_pop(&tier->waiting), KVF_ERR_REFUSED);
        } else if (kvf_nvme_op_place(tier, op, name->namespace_id, name->namespace_epoch)) {
            kvf_nvme_op_pop(&tier->waiting);
        } else {
            return;
        }
    }
}
