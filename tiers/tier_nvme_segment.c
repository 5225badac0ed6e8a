/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_nvme_segment.c: the life of a segment: chosen, emptied, given a header, filled, sealed.
 *
 * While the open segment fills up, the next one is prepared: the host is asked about each record
 * that is still live in it, those that it keeps are copied into the open segment, and a sync makes
 * the copies stable. Only then may its header be overwritten, and only after a sync of the header
 * may records follow; so at every moment each kept record is whole in one place.
 */
#include "tiers/tier_nvme_internal.h"

#include "base/failpoint.h"
#include "base/mutant.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define RECLAIMS_A_POLL 512 /* questions to the host */

/* --- lists ------------------------------------------------------------------------------------ */

void kvf_nvme_list_push(struct kvf_nvme_tier *tier, struct kvf_nvme_list *list, uint32_t segment)
{
    tier->segments[segment].next = KVF_NVME_NO_SEGMENT;
    if (list->count == 0) {
        list->first = segment;
    } else {
        tier->segments[list->last].next = segment;
    }
    list->last = segment;
    list->count++;
}

uint32_t kvf_nvme_list_pop(struct kvf_nvme_tier *tier, struct kvf_nvme_list *list)
{
    uint32_t segment = list->first;

    if (list->count == 0) {
        return KVF_NVME_NO_SEGMENT;
    }
    list->first = tier->segments[segment].next;
    list->count--;
    return segment;
}

/* Nothing in it counts any more. */
static void segment_free(struct kvf_nvme_tier *tier, uint32_t segment_index)
{
    struct kvf_nvme_segment_info *segment = &tier->segments[segment_index];

    segment->state = KVF_NVME_SEGMENT_FREE;
    segment->records = NULL;
    segment->n_records = 0;
    segment->record_pages = 0;
    kvf_nvme_list_push(tier, &tier->free_list, segment_index);
}

/* --- reuse ------------------------------------------------------------------------------------ */

static void next_choose(struct kvf_nvme_tier *tier)
{
    struct kvf_nvme_next *next = &tier->next;
    uint32_t segment = kvf_nvme_list_pop(tier, &tier->free_list);

    *next = (struct kvf_nvme_next){.segment_index = segment};
    if (segment != KVF_NVME_NO_SEGMENT) {
        next->step = KVF_NVME_NEXT_CLEAN;
        return;
    }
    segment = kvf_nvme_list_pop(tier, &tier->sealed_list);
    if (segment == KVF_NVME_NO_SEGMENT) {
        return; /* two are unsealed and no other is usable: wait */
    }
    next->segment_index = segment;
    next->step = KVF_NVME_NEXT_RECLAIM;
    tier->segments[segment].state = KVF_NVME_SEGMENT_RECLAIMING;
    tier->stat.area_bytes -= tier->super.segment_bytes;
    tier->stat.area_stored_bytes -= (uint64_t)tier->segments[segment].record_pages *
                                    KVF_NVME_PAGE_BYTES;
}

/* May this record be copied? */
static bool may_keep(const struct kvf_nvme_tier *tier, uint32_t pages)
{
    const struct kvf_nvme_next *next = &tier->next;
    uint64_t bytes = (uint64_t)pages * KVF_NVME_PAGE_BYTES;
    uint64_t keep_max = tier->super.segment_bytes / 100 * tier->config.reinsert_percent;
    uint32_t room = kvf_nvme_open_room(tier);

    /* one page for what its entry may add to the index */
    return (uint64_t)next->kept_pages * KVF_NVME_PAGE_BYTES + bytes <= keep_max &&
           bytes <= tier->config.bounce_bytes && room > pages &&
           (tier->config.budget.may_reinsert == NULL ||
            tier->config.budget.may_reinsert(tier->config.budget.ctx, bytes));
}

static void tell_moved(struct kvf_nvme_tier *tier, kvf_location from, kvf_location to,
                       kvf_cookie cookie)
{
    tier->n_callbacks++;
    tier->base.host.moved(tier->base.host.ctx, from, to, cookie);
}

static void next_reclaim(struct kvf_nvme_tier *tier)
{
    struct kvf_nvme_next *next = &tier->next;
    struct kvf_nvme_segment_info *segment = &tier->segments[next->segment_index];

    for (uint32_t n = 0; n < RECLAIMS_A_POLL && next->cursor < segment->n_records; next->cursor++) {
        struct kvf_nvme_record *record = &segment->records[next->cursor];
        uint32_t pages = kvf_nvme_record_pages(record);
        kvf_location location = kvf_nvme_location_pack(segment->generation, next->segment_index,
                                                       record->page);
        kvf_cookie cookie = record->cookie;
        bool wanted;

        if ((record->pages_flags & KVF_NVME_LIVE) == 0) {
            continue;
        }
        n++;
        tier->n_callbacks++;
        wanted = tier->base.host.reclaim(tier->base.host.ctx, location, cookie);
        if (wanted && may_keep(tier, pages)) {
            record->pages_flags |= KVF_NVME_KEEP;
            next->keep_pages += pages;
            next->kept_pages += pages;
            next->keep_records++;
            continue;
        }
        kvf_nvme_record_kill(tier, record);
        tier->stat.evictions++;
        if (wanted) {
            tell_moved(tier, location, KVF_LOCATION_NONE, cookie);
        }
    }
    if (next->cursor == segment->n_records) {
        next->cursor = 0;
        next->step = KVF_NVME_NEXT_COPY;
    }
}

/* A record that was to be kept has been, or will not be. */
static void keep_finished(struct kvf_nvme_tier *tier)
{
    assert(tier->next.keep_records > 0);
    tier->next.keep_records--;
}

static void copy_start(struct kvf_nvme_tier *tier, struct kvf_nvme_record *record)
{
    struct kvf_nvme_next *next = &tier->next;
    struct kvf_nvme_segment_info *segment = &tier->segments[next->segment_index];
    struct kvf_nvme_op *op = kvf_pool_get(&tier->copy_ops);

    assert(op != NULL && tier->bounces_free > 0); /* as many as bounce buffers, checked by caller */
    op->tier = tier;
    op->kind = KVF_NVME_OP_COPY;
    op->bounce = tier->bounces[--tier->bounces_free];
    op->record = op->bounce;
    op->record_bytes = (uint64_t)kvf_nvme_record_pages(record) * KVF_NVME_PAGE_BYTES;
    op->cookie = record->cookie;
    op->from = kvf_nvme_location_pack(segment->generation, next->segment_index, record->page);
    op->from_generation = segment->generation;
    kvf_nvme_op_read(tier, op);
}

static void next_copy(struct kvf_nvme_tier *tier)
{
    struct kvf_nvme_next *next = &tier->next;
    struct kvf_nvme_segment_info *segment = &tier->segments[next->segment_index];

    while (next->cursor < segment->n_records && tier->bounces_free > 0) {
        struct kvf_nvme_record *record = &segment->records[next->cursor++];

        if ((record->pages_flags & KVF_NVME_KEEP) == 0) {
            continue;
        }
        if ((record->pages_flags & KVF_NVME_LIVE) != 0) {
            copy_start(tier, record);
        } else { /* dropped meanwhile */
            next->keep_pages -= kvf_nvme_record_pages(record);
            keep_finished(tier);
        }
    }
    if (next->cursor < segment->n_records || next->keep_records > 0) {
        return;
    }
    assert(next->keep_pages == 0);
    next->step = next->copied && !KVF_MUTANT(copy_unsynced) ? KVF_NVME_NEXT_SYNC
                                                            : KVF_NVME_NEXT_CLEAN;
}

/* The copy ends here without a new place. */
static void copy_give_up(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op)
{
    struct kvf_nvme_record *record = kvf_nvme_record_find(tier, op->from);

    if (record != NULL && (record->pages_flags & KVF_NVME_LIVE) != 0) {
        kvf_nvme_record_kill(tier, record);
        tier->stat.evictions++;
        tell_moved(tier, op->from, KVF_LOCATION_NONE, op->cookie);
    }
}

/* Each buffer stays in the table once, the free ones first: close finds them all. */
static void bounce_release(struct kvf_nvme_tier *tier, void *bounce)
{
    uint32_t at = tier->bounces_free;

    while (tier->bounces[at] != bounce) {
        at++;
    }
    tier->bounces[at] = tier->bounces[tier->bounces_free];
    tier->bounces[tier->bounces_free++] = bounce;
}

static void copy_release(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op)
{
    bounce_release(tier, op->bounce);
    kvf_pool_put(&tier->copy_ops, op);
    keep_finished(tier);
}

void kvf_nvme_copy_loaded(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op, int status)
{
    struct kvf_nvme_record *record = kvf_nvme_record_find(tier, op->from);
    const struct kvf_block_store *store = &((struct kvf_record_page *)op->record)->store;
    uint64_t namespace_id = store->namespace_id;
    uint64_t namespace_epoch = store->namespace_epoch;

    tier->next.keep_pages -= kvf_nvme_pages(op->record_bytes);
    if (record == NULL || (record->pages_flags & KVF_NVME_LIVE) == 0) {
        copy_release(tier, op); /* the host has dropped it */
        return;
    }
    if (status == KVF_OK) {
        op->record_bytes = store->record_bytes;
    }
    if (tier->writes_off) {
        copy_release(tier, op); /* nothing is reused any more: it stays where it is */
        return;
    }
    if (status != KVF_OK || !kvf_nvme_op_place(tier, op, namespace_id, namespace_epoch)) {
        copy_give_up(tier, op);
        copy_release(tier, op);
    }
}

void kvf_nvme_copy_written(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op, int status)
{
    struct kvf_nvme_record *from = kvf_nvme_record_find(tier, op->from);
    struct kvf_nvme_record *to = &op->slot->records[op->entry];

    if (status != KVF_OK) {
        copy_give_up(tier, op);
    } else if (from == NULL || (from->pages_flags & KVF_NVME_LIVE) == 0) {
        kvf_nvme_record_kill(tier, to); /* the host has dropped it */
    } else {
        kvf_location location = kvf_nvme_location_pack(
            tier->segments[op->slot->segment_index].generation, op->slot->segment_index, op->page);

        kvf_nvme_record_kill(tier, from);
        tier->next.copied = true;
        tier->stat.reinsertions++;
        tier->info.reinserted_bytes += (uint64_t)kvf_nvme_record_pages(to) * KVF_NVME_PAGE_BYTES;
        tell_moved(tier, op->from, location, op->cookie);
    }
    copy_release(tier, op);
}

static void next_synced(struct kvf_nvme_tier *tier, struct kvf_nvme_waiter *waiter, int status)
{
    (void)waiter;
    /* A failed sync has discarded the copies, and told the host. What is left in the segment is
     * dead either way. */
    (void)status;
    tier->next.step = KVF_NVME_NEXT_CLEAN;
}

static bool is_opening(const struct kvf_nvme_tier *tier)
{
    return tier->slots[0].step == KVF_NVME_SLOT_OPENING ||
           tier->slots[1].step == KVF_NVME_SLOT_OPENING;
}

/* Early, so that stores need not wait; but not before there is a segment that copies can go to. */
static bool next_is_wanted(const struct kvf_nvme_tier *tier)
{
    return (tier->waiting.first != NULL && !is_opening(tier)) ||
           (tier->open != NULL && tier->open->used_pages >= tier->segment_pages / 2);
}

static void next_advance(struct kvf_nvme_tier *tier)
{
    struct kvf_nvme_next *next = &tier->next;

    if (tier->writes_off || (tier->draining && tier->waiting.first == NULL)) {
        return; /* what is in the segment stays readable, now and after a restart */
    }
    if (next->step == KVF_NVME_NEXT_NONE && next_is_wanted(tier)) {
        next_choose(tier);
    }
    if (next->step == KVF_NVME_NEXT_RECLAIM) {
        next_reclaim(tier);
    }
    if (next->step == KVF_NVME_NEXT_COPY) {
        next_copy(tier);
        if (next->step == KVF_NVME_NEXT_SYNC) {
            next->waiter.then = next_synced;
            kvf_nvme_sync_want(tier, &next->waiter);
        }
    }
}

/* --- opening ---------------------------------------------------------------------------------- */

static struct kvf_nvme_slot *slot_of_waiter(struct kvf_nvme_waiter *waiter)
{
    return (struct kvf_nvme_slot *)((char *)waiter - offsetof(struct kvf_nvme_slot, waiter));
}

static struct kvf_nvme_slot *slot_of_io(struct kvf_nvme_io *nio)
{
    return (struct kvf_nvme_slot *)((char *)nio - offsetof(struct kvf_nvme_slot, io));
}

static void header_synced(struct kvf_nvme_tier *tier, struct kvf_nvme_waiter *waiter, int status)
{
    struct kvf_nvme_slot *slot = slot_of_waiter(waiter);

    slot->calling = false;
    if (status != KVF_OK || slot->step == KVF_NVME_SLOT_DISCARDED) {
        slot->step = KVF_NVME_SLOT_DISCARDED;
        return;
    }
    slot->step = KVF_NVME_SLOT_OPEN;
    tier->segments[slot->segment_index].state = KVF_NVME_SEGMENT_OPEN;
    tier->open = slot;
}

static void header_written(struct kvf_nvme_tier *tier, struct kvf_nvme_io *nio, int status)
{
    struct kvf_nvme_slot *slot = slot_of_io(nio);

    if (status == KVF_OK) {
        status = KVF_FAILPOINT(nvme_reuse_after);
    }
    if (status != KVF_OK || slot->step == KVF_NVME_SLOT_DISCARDED) {
        slot->calling = false;
        slot->step = KVF_NVME_SLOT_DISCARDED;
        return;
    }
    slot->waiter.then = header_synced;
    kvf_nvme_sync_want(tier, &slot->waiter);
}

static void open_start(struct kvf_nvme_tier *tier, struct kvf_nvme_slot *slot)
{
    struct kvf_nvme_identity identity = kvf_nvme_identity(tier);
    uint32_t segment_index = tier->next.segment_index;
    struct kvf_nvme_segment_info *segment = &tier->segments[segment_index];
    int fault = KVF_FAILPOINT(nvme_reuse_before);

    assert(segment->state == KVF_NVME_SEGMENT_FREE ||
           segment->state == KVF_NVME_SEGMENT_RECLAIMING);
    if (segment->state == KVF_NVME_SEGMENT_RECLAIMING) {
        free(segment->records);
    }
    tier->next.step = KVF_NVME_NEXT_NONE;
    segment->generation = tier->generation_next++;
    segment->state = KVF_NVME_SEGMENT_OPENING;
    segment->records = slot->records;
    segment->n_records = 0;
    segment->record_pages = 0;
    slot->step = KVF_NVME_SLOT_OPENING;
    slot->calling = true;
    slot->segment_index = segment_index;
    slot->used_pages = 1;
    slot->n_entries = 0;
    slot->writes_in_flight = 0;
    tier->info.generation = segment->generation;
    kvf_nvme_segment_seal(slot->header, &identity, segment->generation, segment_index);
    if (fault == KVF_OK) {
        fault = KVF_FAILPOINT(nvme_segment_header);
    }
    kvf_nvme_io_submit(tier, &slot->io, KVF_IO_WRITE, slot->header,
                       kvf_nvme_segment_offset(tier->super.segment_bytes, segment_index),
                       KVF_NVME_PAGE_BYTES, fault, header_written);
}

static void open_advance(struct kvf_nvme_tier *tier)
{
    if (tier->open != NULL || tier->next.step != KVF_NVME_NEXT_CLEAN || tier->writes_off ||
        tier->waiting.first == NULL || tier->generation_next >= tier->generation_limit ||
        is_opening(tier)) {
        return;
    }
    for (int i = 0; i < 2; i++) {
        if (tier->slots[i].step == KVF_NVME_SLOT_UNUSED) {
            open_start(tier, &tier->slots[i]);
            return;
        }
    }
}

/* --- sealing ---------------------------------------------------------------------------------- */

/* The tables shrink to what is live. */
static void seal_finish(struct kvf_nvme_tier *tier, struct kvf_nvme_slot *slot)
{
    struct kvf_nvme_segment_info *segment = &tier->segments[slot->segment_index];
    struct kvf_nvme_record *records;
    uint32_t n = 0;

    for (uint32_t i = 0; i < slot->n_entries; i++) {
        if ((slot->records[i].pages_flags & KVF_NVME_LIVE) != 0) {
            slot->records[n++] = slot->records[i];
        }
    }
    records = malloc((n == 0 ? 1 : n) * sizeof(*records));
    if (records == NULL) {
        segment->n_records = n;
        for (uint32_t i = 0; i < n; i++) {
            kvf_cookie cookie = slot->records[i].cookie;

            kvf_nvme_record_kill(tier, &slot->records[i]);
            tier->n_callbacks++;
            tier->base.host.lost(tier->base.host.ctx,
                                 kvf_nvme_location_pack(segment->generation, slot->segment_index,
                                                        slot->records[i].page),
                                 cookie, KVF_ERR_NO_MEMORY);
        }
        segment_free(tier, slot->segment_index);
        slot->step = KVF_NVME_SLOT_UNUSED;
        return;
    }
    memcpy(records, slot->records, n * sizeof(*records));
    segment->records = records;
    segment->n_records = n;
    segment->state = KVF_NVME_SEGMENT_SEALED;
    kvf_nvme_list_push(tier, &tier->sealed_list, slot->segment_index);
    tier->stat.area_bytes += tier->super.segment_bytes;
    tier->stat.area_stored_bytes += (uint64_t)segment->record_pages * KVF_NVME_PAGE_BYTES;
    tier->info.seals++;
    tier->state_writer.dirty = true; /* the credit is kept at each seal */
    slot->step = KVF_NVME_SLOT_UNUSED;
}

static void footer_synced(struct kvf_nvme_tier *tier, struct kvf_nvme_waiter *waiter, int status)
{
    struct kvf_nvme_slot *slot = slot_of_waiter(waiter);

    (void)status; /* a failure has discarded the slot */
    slot->calling = false;
    if (slot->step != KVF_NVME_SLOT_DISCARDED) {
        seal_finish(tier, slot);
    }
}

static void footer_written(struct kvf_nvme_tier *tier, struct kvf_nvme_io *nio, int status)
{
    struct kvf_nvme_slot *slot = slot_of_io(nio);

    slot->calling = false;
    if (slot->step == KVF_NVME_SLOT_DISCARDED) {
        return;
    }
    if (status != KVF_OK) {
        /* The records are stable. Without a footer the next start reads them one by one. */
        seal_finish(tier, slot);
        return;
    }
    slot->calling = true;
    slot->waiter.then = footer_synced;
    kvf_nvme_sync_want(tier, &slot->waiter);
}

/* On a worker. The slot's tables are the job's until digest_done. */
static void digest_run(struct kvf_work *work)
{
    struct kvf_nvme_slot *slot = work->owner;
    const struct kvf_nvme_tier *tier = slot->tier;
    struct kvf_nvme_identity identity = kvf_nvme_identity(tier);

    slot->footer_pages = kvf_nvme_footer_seal(slot->index, slot->index_entries, slot->used_pages,
                                              &identity, slot->header->generation,
                                              slot->segment_index);
}

static void digest_done(struct kvf_work *work)
{
    struct kvf_nvme_slot *slot = work->owner;
    struct kvf_nvme_tier *tier = slot->tier;
    uint64_t bytes = (uint64_t)slot->footer_pages * KVF_NVME_PAGE_BYTES;

    tier->jobs_outstanding--;
    slot->calling = false;
    if (slot->step == KVF_NVME_SLOT_DISCARDED) {
        return;
    }
    slot->calling = true;
    kvf_nvme_io_submit(tier, &slot->io, KVF_IO_WRITE, slot->index,
                       kvf_nvme_segment_offset(tier->super.segment_bytes, slot->segment_index + 1) -
                           bytes,
                       bytes, KVF_FAILPOINT(nvme_footer), footer_written);
}

/* The index that goes to the drive: without dead records, whose entries in the table of records
 * stay, and without what lay in its pages before. */
static void index_build(struct kvf_nvme_slot *slot)
{
    const size_t used_bytes = KVF_NVME_ENTRIES_A_PAGE * sizeof(struct kvf_nvme_entry);
    uint32_t n = 0;
    uint32_t rest;

    for (uint32_t i = 0; i < slot->n_entries; i++) {
        if ((slot->records[i].pages_flags & KVF_NVME_LIVE) != 0) {
            if (n != i) {
                *kvf_nvme_index_entry(slot->index, n) = *kvf_nvme_index_entry(slot->index, i);
            }
            n++;
        }
    }
    rest = n % KVF_NVME_ENTRIES_A_PAGE;
    if (rest != 0) {
        memset(kvf_nvme_index_entry(slot->index, n), 0,
               (KVF_NVME_ENTRIES_A_PAGE - rest) * sizeof(struct kvf_nvme_entry));
    }
    for (uint32_t page = 0; page < kvf_nvme_index_pages(n); page++) {
        memset(slot->index + (size_t)page * KVF_NVME_PAGE_BYTES + used_bytes, 0,
               KVF_NVME_PAGE_BYTES - used_bytes);
    }
    slot->index_entries = n;
}

static void digest_start(struct kvf_nvme_tier *tier, struct kvf_nvme_slot *slot)
{
    slot->work = (struct kvf_work){.run = digest_run, .done = digest_done, .owner = slot};
    if (tier->config.work->ops->submit(tier->config.work, &slot->work) != KVF_OK) {
        return; /* the step stays: tried again in the next poll */
    }
    tier->jobs_outstanding++;
    slot->calling = true;
    slot->step = KVF_NVME_SLOT_WAIT;
}

static void records_synced(struct kvf_nvme_tier *tier, struct kvf_nvme_waiter *waiter, int status)
{
    struct kvf_nvme_slot *slot = slot_of_waiter(waiter);

    (void)tier;
    (void)status; /* a failure has discarded the slot */
    slot->calling = false;
    if (slot->step != KVF_NVME_SLOT_DISCARDED) {
        index_build(slot);
        slot->step = KVF_NVME_SLOT_DIGEST;
    }
}

static void slot_advance(struct kvf_nvme_tier *tier, struct kvf_nvme_slot *slot)
{
    if (slot->step == KVF_NVME_SLOT_DRAIN && slot->writes_in_flight == 0 && !tier->writes_off) {
        slot->step = KVF_NVME_SLOT_WAIT;
        slot->calling = true;
        slot->waiter.then = records_synced;
        kvf_nvme_sync_want(tier, &slot->waiter);
    }
    if (slot->step == KVF_NVME_SLOT_DIGEST && !tier->writes_off) {
        digest_start(tier, slot);
    }
    if (slot->step == KVF_NVME_SLOT_DISCARDED && slot->writes_in_flight == 0 && !slot->calling) {
        segment_free(tier, slot->segment_index);
        slot->step = KVF_NVME_SLOT_UNUSED;
    }
}

/* Close the open segment for records when the first waiting store does not fit, once its successor
 * is ready (until then copies may need the room). */
static void seal_advance(struct kvf_nvme_tier *tier)
{
    struct kvf_nvme_slot *slot = tier->open;
    bool is_full = tier->waiting.first != NULL && tier->next.step == KVF_NVME_NEXT_CLEAN;
    bool is_drained = tier->draining && tier->waiting.first == NULL &&
                      kvf_pool_taken_count(&tier->copy_ops) == 0 && slot != NULL &&
                      slot->writes_in_flight == 0;

    if (slot == NULL || tier->writes_off || (!is_full && !is_drained)) {
        return;
    }
    for (int i = 0; i < 2; i++) {
        struct kvf_nvme_slot *other = &tier->slots[i];

        if (other != slot && other->step != KVF_NVME_SLOT_UNUSED && !is_drained) {
            return; /* at most two segments without footer */
        }
    }
    if (KVF_FAILPOINT(nvme_seal) != KVF_OK) {
        return;
    }
    tier->open = NULL;
    slot->step = KVF_NVME_SLOT_DRAIN;
    tier->segments[slot->segment_index].state = KVF_NVME_SEGMENT_SEALING;
}

void kvf_nvme_unsealed_discard(struct kvf_nvme_tier *tier)
{
    tier->open = NULL;
    for (int i = 0; i < 2; i++) {
        struct kvf_nvme_slot *slot = &tier->slots[i];
        struct kvf_nvme_segment_info *segment = &tier->segments[slot->segment_index];

        if (slot->step == KVF_NVME_SLOT_UNUSED || slot->step == KVF_NVME_SLOT_DISCARDED) {
            continue;
        }
        slot->step = KVF_NVME_SLOT_DISCARDED;
        segment->state = KVF_NVME_SEGMENT_DISCARDED;
        for (uint32_t k = 0; k < slot->n_entries; k++) {
            struct kvf_nvme_record *record = &slot->records[k];

            if ((record->pages_flags & (KVF_NVME_LIVE | KVF_NVME_PENDING)) != KVF_NVME_LIVE) {
                continue;
            }
            kvf_nvme_record_kill(tier, record);
            tier->info.discarded_records++;
            tier->n_callbacks++;
            tier->base.host.lost(
                tier->base.host.ctx,
                kvf_nvme_location_pack(segment->generation, slot->segment_index, record->page),
                record->cookie, KVF_ERR_IO);
        }
    }
}

void kvf_nvme_segments_advance(struct kvf_nvme_tier *tier)
{
    kvf_nvme_stores_place(tier);
    next_advance(tier);
    seal_advance(tier);
    slot_advance(tier, &tier->slots[0]);
    slot_advance(tier, &tier->slots[1]);
    open_advance(tier);
}
