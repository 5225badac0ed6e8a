/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_nvme.c: the drive tier's ops table: calls in, completions out, figures.
 */
#include "tiers/tier_nvme_internal.h"

#include "base/crc32c.h"
#include "base/failpoint.h"
#include "base/fd.h"
#include "base/mutant.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define WORK_RETRY_NS KVF_NS_PER_MS

static struct kvf_nvme_tier *of(const struct kvf_tier *tier)
{
    return (struct kvf_nvme_tier *)tier;
}

/* --- ops in progress -------------------------------------------------------------------------- */

void kvf_nvme_op_push(struct kvf_nvme_op_list *list, struct kvf_nvme_op *op)
{
    op->next = NULL;
    *list->end = op;
    list->end = &op->next;
}

struct kvf_nvme_op *kvf_nvme_op_pop(struct kvf_nvme_op_list *list)
{
    struct kvf_nvme_op *op = list->first;

    list->first = op->next;
    if (list->first == NULL) {
        list->end = &list->first;
    }
    return op;
}

void kvf_nvme_op_finish(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op, int status)
{
    struct kvf_tier_io *call = op->call;

    kvf_nvme_pack_release(tier, op);
    kvf_pool_put(op->kind == KVF_NVME_OP_STORE ? &tier->store_ops : &tier->load_ops, op);
    call->status = status;
    tier->n_callbacks++;
    call->done(call);
}

void kvf_nvme_op_finish_later(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op, int status)
{
    op->verdict = status;
    kvf_nvme_op_push(&tier->finished, op);
}

/* --- records in memory ------------------------------------------------------------------------ */

/* Does the location lie in a segment that still has, or may have, its record? generation: of the
 * segment when the caller first looked, or 0. */
bool kvf_nvme_is_readable(const struct kvf_nvme_tier *tier, kvf_location location,
                          uint64_t generation)
{
    uint32_t index = kvf_nvme_location_segment(location);
    const struct kvf_nvme_segment_info *segment;

    if (index >= tier->n_segments) {
        return false;
    }
    segment = &tier->segments[index];
    if (generation != 0 && segment->generation != generation) {
        return false;
    }
    return (segment->state == KVF_NVME_SEGMENT_RECLAIMING ||
            segment->state == KVF_NVME_SEGMENT_OPEN || segment->state == KVF_NVME_SEGMENT_SEALING ||
            segment->state == KVF_NVME_SEGMENT_SEALED) &&
           location ==
               kvf_nvme_location_pack(segment->generation, index, kvf_nvme_location_page(location));
}

struct kvf_nvme_record *kvf_nvme_record_find(const struct kvf_nvme_tier *tier,
                                             kvf_location location)
{
    uint32_t page = kvf_nvme_location_page(location);
    const struct kvf_nvme_segment_info *segment;
    uint32_t low = 0, high;

    if (!kvf_nvme_is_readable(tier, location, 0)) {
        return NULL;
    }
    segment = &tier->segments[kvf_nvme_location_segment(location)];
    high = segment->n_records;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;

        if (segment->records[middle].page < page) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < segment->n_records && segment->records[low].page == page ? &segment->records[low]
                                                                          : NULL;
}

void kvf_nvme_record_kill(struct kvf_nvme_tier *tier, struct kvf_nvme_record *record)
{
    if ((record->pages_flags & KVF_NVME_LIVE) == 0) {
        return;
    }
    record->pages_flags &= ~(uint32_t)KVF_NVME_LIVE;
    tier->stat.stored_blocks--;
    tier->stat.stored_bytes -= (uint64_t)kvf_nvme_record_pages(record) * KVF_NVME_PAGE_BYTES;
}

static void nvme_drop(struct kvf_tier *base, kvf_location location)
{
    struct kvf_nvme_tier *tier = of(base);
    struct kvf_nvme_record *record = kvf_nvme_record_find(tier, location);

    if (record != NULL && (record->pages_flags & KVF_NVME_LIVE) != 0) {
        kvf_nvme_record_kill(tier, record);
        tier->stat.drops++;
    }
}

/* --- store ------------------------------------------------------------------------------------ */

static bool sizes_fit(const struct kvf_nvme_tier *tier, const struct kvf_tier_io *io)
{
    return io->record_bytes <= tier->info.record_bytes_max;
}

static int nvme_store(struct kvf_tier *base, struct kvf_tier_io *io)
{
    struct kvf_nvme_tier *tier = of(base);
    const struct kvf_record_page *page = io->record;
    struct kvf_nvme_op *op;

    if (tier->off || tier->writes_off || tier->draining) {
        return KVF_ERR_TIER_OFF;
    }
    if (io->record_bytes <= KVF_NVME_PAGE_BYTES || (uintptr_t)io->record % KVF_NVME_PAGE_BYTES ||
        page->header.magic != KVF_BLOCK_MAGIC || page->header.total_bytes != io->record_bytes) {
        return KVF_ERR_INVALID;
    }
    if (!sizes_fit(tier, io)) {
        return KVF_ERR_TOO_LARGE;
    }
    op = kvf_nvme_pack_has_room(tier, io->record_bytes) ? kvf_pool_get(&tier->store_ops) : NULL;
    if (op == NULL) {
        tier->stat.busy++;
        return KVF_ERR_BUSY;
    }
    op->tier = tier;
    op->kind = KVF_NVME_OP_STORE;
    op->call = io;
    op->record = io->record;
    op->record_bytes = io->record_bytes;
    op->cookie = io->cookie;
    if (!kvf_nvme_pack_start(tier, op)) {
        kvf_nvme_store_begin(tier, op);
    }
    return KVF_OK;
}

/* --- load ------------------------------------------------------------------------------------- */

/* On the I/O thread or a worker: touches the record, and what is constant in the tier. */
static void verify(struct kvf_nvme_op *op)
{
    const struct kvf_record_page *page = op->record;
    struct kvf_nvme_identity identity = kvf_nvme_identity(op->tier);
    uint64_t record_bytes = page->store.record_bytes;

    op->verdict = kvf_nvme_record_check(page, &identity, op->from_generation,
                                        kvf_nvme_location_page(op->from));
    if (op->verdict != KVF_OK) {
        return;
    }
    if (op->call == NULL
            ? kvf_nvme_pages(record_bytes) * (uint64_t)KVF_NVME_PAGE_BYTES != op->record_bytes
            : !kvf_nvme_record_matches(page, &op->call->name, op->record_bytes) ||
                  kvf_entropy_is_packed(page) != op->is_packed) {
        op->verdict = KVF_ERR_CORRUPT;
        return;
    }
    if (kvf_crc32c(0, page + 1, record_bytes - KVF_NVME_PAGE_BYTES) !=
            page->header.payload_crc32c &&
        !KVF_MUTANT(load_unchecked)) {
        op->verdict = KVF_ERR_CORRUPT;
        return;
    }
    if (op->is_packed) {
        op->verdict = kvf_nvme_unpack(op);
    }
}

static struct kvf_nvme_op *op_of(struct kvf_nvme_io *nio)
{
    return (struct kvf_nvme_op *)((char *)nio - offsetof(struct kvf_nvme_op, io));
}

static void verify_check(struct kvf_io *io)
{
    verify(op_of(io->owner));
}

static void verify_run(struct kvf_work *work)
{
    verify(work->owner);
}

static void read_finish(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op, int status)
{
    if (op->kind == KVF_NVME_OP_COPY) {
        kvf_nvme_copy_loaded(tier, op, status);
        return;
    }
    tier->stat.loads += status == KVF_OK;
    tier->info.unpacked_records += op->is_packed && status == KVF_OK;
    kvf_nvme_op_finish(tier, op, status);
}

/* The bytes cannot be had, or are not the record. Once more, then never again. */
static void read_failed(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op, int status)
{
    struct kvf_nvme_record *record;

    if (!kvf_nvme_is_readable(tier, op->from, op->from_generation)) {
        read_finish(tier, op, KVF_MISS); /* reused meanwhile */
        return;
    }
    if (!op->retried && !tier->off) {
        op->retried = true;
        tier->info.retries_read++;
        kvf_nvme_op_read(tier, op);
        return;
    }
    record = kvf_nvme_record_find(tier, op->from);
    if (op->kind == KVF_NVME_OP_LOAD && record != NULL &&
        (record->pages_flags & KVF_NVME_LIVE) != 0) {
        kvf_nvme_record_kill(tier, record);
        tier->n_callbacks++;
        tier->base.host.lost(tier->base.host.ctx, op->from, record->cookie, status);
    }
    read_finish(tier, op, status);
}

static void verified(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op)
{
    const struct kvf_block_store *store = &((const struct kvf_record_page *)op->record)->store;

    if (op->verdict != KVF_OK) {
        if (op->verdict == KVF_ERR_MISMATCH) {
            tier->stat.errors_mac++;
        }
        if (kvf_nvme_is_readable(tier, op->from, op->from_generation)) {
            tier->stat.errors_corrupt++;
            kvf_nvme_error_note(tier, "read", op->io.io.offset, 0);
        }
        read_failed(tier, op, KVF_ERR_CORRUPT);
        return;
    }
    if (store->namespace_epoch < kvf_nvme_epoch_find(&tier->state, store->namespace_id)) {
        read_finish(tier, op, KVF_MISS); /* purged meanwhile */
        return;
    }
    read_finish(tier, op, KVF_OK);
}

static void verify_done(struct kvf_work *work)
{
    struct kvf_nvme_op *op = work->owner;

    op->tier->jobs_outstanding--;
    kvf_nvme_unpacker_give(op->tier, op);
    verified(op->tier, op);
}

static bool verify_submit(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op)
{
    if (op->is_packed && !kvf_nvme_unpacker_take(tier, op)) {
        return false;
    }
    op->work = (struct kvf_work){.run = verify_run, .done = verify_done, .owner = op};
    if (tier->config.work->ops->submit(tier->config.work, &op->work) != KVF_OK) {
        kvf_nvme_unpacker_give(tier, op);
        return false;
    }
    tier->jobs_outstanding++;
    return true;
}

static void record_read(struct kvf_nvme_tier *tier, struct kvf_nvme_io *nio, int status)
{
    struct kvf_nvme_op *op = op_of(nio);

    if (status != KVF_OK) {
        read_failed(tier, op, KVF_ERR_IO);
        return;
    }
    tier->stat.bytes_read += nio->io.bytes;
    if (!kvf_nvme_is_readable(tier, op->from, op->from_generation)) {
        read_finish(tier, op, KVF_MISS); /* what has been read may be half old, half new */
        return;
    }
    if (nio->io.is_checked) {
        verified(tier, op);
    } else if (tier->verify_wait.first != NULL || !verify_submit(tier, op)) {
        kvf_nvme_op_push(&tier->verify_wait, op);
    }
}

void kvf_nvme_op_read(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op)
{
    uint64_t offset = kvf_nvme_segment_offset(tier->super.segment_bytes,
                                              kvf_nvme_location_segment(op->from)) +
                      (uint64_t)kvf_nvme_location_page(op->from) * KVF_NVME_PAGE_BYTES;

    op->io.check = op->is_packed ? NULL : verify_check; /* unpacking is not for an I/O thread */
    kvf_nvme_io_submit(tier, &op->io, KVF_IO_READ, op->record, offset,
                       (uint64_t)kvf_nvme_pages(op->record_bytes) * KVF_NVME_PAGE_BYTES,
                       KVF_FAILPOINT(nvme_record_read), record_read);
}

static int nvme_load(struct kvf_tier *base, struct kvf_tier_io *io)
{
    struct kvf_nvme_tier *tier = of(base);
    const struct kvf_nvme_record *record;
    struct kvf_nvme_op *op;

    if (tier->off) {
        return KVF_ERR_TIER_OFF;
    }
    if (io->record_bytes <= KVF_NVME_PAGE_BYTES || (uintptr_t)io->record % KVF_NVME_PAGE_BYTES) {
        return KVF_ERR_INVALID;
    }
    if (!sizes_fit(tier, io)) {
        return KVF_ERR_TOO_LARGE;
    }
    op = kvf_pool_get(&tier->load_ops);
    if (op == NULL) {
        tier->stat.busy++;
        return KVF_ERR_BUSY;
    }
    op->tier = tier;
    op->kind = KVF_NVME_OP_LOAD;
    op->call = io;
    op->record = io->record;
    op->record_bytes = io->record_bytes;
    op->from = io->location;
    record = kvf_nvme_record_find(tier, io->location);
    if (record != NULL) {
        kvf_nvme_unpack_prepare(op, kvf_nvme_record_pages(record));
    }
    if (!kvf_nvme_is_readable(tier, io->location, 0) || kvf_nvme_location_page(io->location) == 0 ||
        kvf_nvme_location_page(io->location) + kvf_nvme_pages(op->record_bytes) >=
            tier->segment_pages) {
        kvf_nvme_op_finish_later(tier, op, KVF_MISS);
        return KVF_OK;
    }
    op->from_generation = tier->segments[kvf_nvme_location_segment(op->from)].generation;
    kvf_nvme_op_read(tier, op);
    return KVF_OK;
}

/* --- poll ------------------------------------------------------------------------------------- */

static void forgive_errors(struct kvf_nvme_tier *tier)
{
    uint64_t decay_ns = tier->config.error_decay_ns;

    while (tier->error_score > 0 && tier->now_ns - tier->error_forgiven_ns >= decay_ns) {
        tier->error_score--;
        tier->error_forgiven_ns += decay_ns;
    }
}

static unsigned nvme_poll(struct kvf_tier *base, uint64_t now_ns)
{
    struct kvf_nvme_tier *tier = of(base);

    tier->now_ns = now_ns;
    tier->n_callbacks = 0;
    forgive_errors(tier);
    tier->io->ops->poll(tier->io);
    kvf_nvme_io_retry(tier);
    while (tier->verify_wait.first != NULL && verify_submit(tier, tier->verify_wait.first)) {
        kvf_nvme_op_pop(&tier->verify_wait);
    }
    while (tier->finished.first != NULL) {
        struct kvf_nvme_op *op = kvf_nvme_op_pop(&tier->finished);

        kvf_nvme_op_finish(tier, op, op->verdict);
    }
    kvf_nvme_segments_advance(tier);
    kvf_nvme_state_start(tier);
    kvf_nvme_sync_start(tier);
    return tier->n_callbacks;
}

/* Completions wake the reactor by themselves. What is listed here makes progress by poll alone. */
static uint64_t nvme_deadline_ns(const struct kvf_tier *base)
{
    const struct kvf_nvme_tier *tier = of(base);
    bool may_reuse = !tier->writes_off && (!tier->draining || tier->waiting.first != NULL);
    bool at_once = tier->finished.first != NULL || tier->io_faults.first != NULL ||
                   (tier->next.step == KVF_NVME_NEXT_RECLAIM && may_reuse) ||
                   (tier->sync_wait.first != NULL && !tier->sync_in_flight) ||
                   (tier->state_writer.dirty && tier->state_writer.step == KVF_NVME_STATE_IDLE);

    if (at_once) {
        return tier->now_ns;
    }
    if (tier->verify_wait.first != NULL || tier->slots[0].step == KVF_NVME_SLOT_DIGEST ||
        tier->slots[1].step == KVF_NVME_SLOT_DIGEST) {
        return tier->now_ns + WORK_RETRY_NS; /* the work queue was full of others' jobs */
    }
    if (tier->ios_outstanding == 0 && tier->jobs_outstanding == 0 &&
        (tier->waiting.first != NULL ||
         (tier->draining && tier->open != NULL && !tier->writes_off))) {
        return tier->now_ns; /* nothing will wake us, and a segment can be opened or sealed */
    }
    return UINT64_MAX;
}

static bool nvme_drained(struct kvf_tier *base)
{
    struct kvf_nvme_tier *tier = of(base);
    bool quiet;

    if (!tier->draining) {
        tier->draining = true;
        tier->state_writer.dirty = true; /* the credit */
    }
    if (tier->writes_off || tier->off) {
        return tier->ios_outstanding == 0 && tier->jobs_outstanding == 0;
    }
    quiet = tier->waiting.first == NULL && tier->open == NULL &&
            tier->slots[0].step == KVF_NVME_SLOT_UNUSED &&
            tier->slots[1].step == KVF_NVME_SLOT_UNUSED && tier->ios_outstanding == 0 &&
            tier->jobs_outstanding == 0 && tier->sync_wait.first == NULL;
    return quiet && !tier->state_writer.dirty && tier->state_writer.step == KVF_NVME_STATE_IDLE;
}

/* --- figures ---------------------------------------------------------------------------------- */

static void nvme_stat(const struct kvf_tier *base, struct kvf_tier_stat *stat_out)
{
    const struct kvf_nvme_tier *tier = of(base);

    *stat_out = tier->stat;
    stat_out->capacity_bytes = tier->super.segment_bytes * tier->n_segments;
    stat_out->queue_depth = tier->ios_outstanding + tier->jobs_outstanding;
    stat_out->writes_off = tier->writes_off;
    stat_out->off = tier->off;
}

void kvf_nvme_info(const struct kvf_tier *tier, struct kvf_nvme_info *info_out)
{
    const struct kvf_nvme_tier *self = of(tier);

    *info_out = self->info;
    info_out->segments = self->n_segments;
    info_out->segments_sealed = self->sealed_list.count;
    info_out->segments_free = self->free_list.count;
    info_out->segments_unsealed = (self->slots[0].step != KVF_NVME_SLOT_UNUSED) +
                                  (self->slots[1].step != KVF_NVME_SLOT_UNUSED);
    for (uint32_t i = 0; i < KVF_NVME_EPOCHS; i++) {
        info_out->purged_namespaces += self->state.epochs[i].epoch != 0;
    }
}

uint64_t kvf_nvme_stored_bytes(const struct kvf_tier *tier, kvf_location location)
{
    const struct kvf_nvme_record *record = kvf_nvme_record_find(of(tier), location);

    return record == NULL ? 0 : (uint64_t)kvf_nvme_record_pages(record) * KVF_NVME_PAGE_BYTES;
}

int kvf_nvme_register_memory(struct kvf_tier *tier, void *base, uint64_t bytes)
{
    struct kvf_nvme_tier *self = of(tier);

    return self->io->ops->register_memory(self->io, base, bytes);
}

/* --- namespaces ------------------------------------------------------------------------------- */

uint64_t kvf_nvme_namespace_epoch(const struct kvf_tier *tier, uint64_t namespace_id)
{
    return kvf_nvme_epoch_find(&of(tier)->state, namespace_id);
}

/* Is there still a segment that may hold records from before this purge? */
static bool epoch_is_needed(const struct kvf_nvme_tier *tier, const struct kvf_nvme_epoch *epoch)
{
    for (uint32_t i = 0; i < tier->n_segments; i++) {
        uint64_t generation = tier->segments[i].generation; /* 0: it has never been written */

        if (generation != 0 && generation <= epoch->generation) {
            return true;
        }
    }
    return false;
}

static struct kvf_nvme_epoch *epoch_slot(struct kvf_nvme_tier *tier, uint64_t namespace_id)
{
    struct kvf_nvme_epoch *epochs = tier->state.epochs;

    for (uint32_t i = 0; i < KVF_NVME_EPOCHS; i++) {
        if (epochs[i].epoch != 0 && epochs[i].namespace_id == namespace_id) {
            return &epochs[i];
        }
    }
    for (uint32_t i = 0; i < KVF_NVME_EPOCHS; i++) {
        if (epochs[i].epoch == 0) {
            return &epochs[i];
        }
    }
    /* Epochs count over all namespaces, so an entry whose records are overwritten can go: the next
     * purge of that namespace gets a higher number than any record has. */
    for (uint32_t i = 0; i < KVF_NVME_EPOCHS; i++) {
        if (!epoch_is_needed(tier, &epochs[i])) {
            return &epochs[i];
        }
    }
    return NULL;
}

int kvf_nvme_namespace_purge(struct kvf_tier *tier, uint64_t namespace_id,
                             void (*done)(void *ctx, uint64_t namespace_id, int status), void *ctx)
{
    struct kvf_nvme_tier *self = of(tier);
    struct kvf_nvme_state_writer *writer = &self->state_writer;
    struct kvf_nvme_epoch *epoch;
    struct kvf_nvme_purge *purge;

    if (self->off || self->writes_off) {
        return KVF_ERR_TIER_OFF;
    }
    epoch = epoch_slot(self, namespace_id);
    purge = epoch == NULL ? NULL : kvf_pool_get(&self->purges);
    if (purge == NULL) {
        kvf_log(KVF_LOG_ERROR,
                "nvme %s: cannot purge namespace %016llx: %s; try again later, or reformat",
                self->path, (unsigned long long)namespace_id,
                epoch == NULL ? "the table of 64 purged namespaces is full until old records are "
                                "overwritten"
                              : "too many purges are waiting");
        return KVF_ERR_BUSY;
    }
    *epoch = (struct kvf_nvme_epoch){.namespace_id = namespace_id,
                                     .epoch = ++self->state.epoch_last,
                                     .generation = self->generation_next - 1};
    *purge = (struct kvf_nvme_purge){.namespace_id = namespace_id, .done = done, .ctx = ctx};
    if (writer->wanted == NULL) {
        writer->wanted = purge;
    } else {
        writer->wanted_last->next = purge;
    }
    writer->wanted_last = purge;
    writer->dirty = true;
    return KVF_OK;
}

/* --- close ------------------------------------------------------------------------------------ */

static void wait_a_little(const struct kvf_nvme_tier *tier)
{
    struct timespec nap = {.tv_nsec = 20000};

    if (tier->config.wait != NULL) {
        tier->config.wait(tier->config.wait_ctx);
    } else {
        nanosleep(&nap, NULL);
    }
}

static void free_tables(struct kvf_nvme_tier *tier)
{
    for (uint32_t i = 0; tier->segments != NULL && i < tier->n_segments; i++) {
        struct kvf_nvme_segment_info *segment = &tier->segments[i];

        if (segment->records != tier->slots[0].records &&
            segment->records != tier->slots[1].records) {
            free(segment->records);
        }
    }
    free(tier->segments);
    for (int i = 0; i < 2; i++) {
        free(tier->slots[i].records);
        free(tier->slots[i].index);
        free(tier->slots[i].header);
    }
    for (uint32_t i = 0; tier->bounces != NULL && i < tier->config.bounce_count; i++) {
        free(tier->bounces[i]);
    }
    free(tier->bounces);
    kvf_nvme_packings_fini(tier);
    free(tier->state_writer.page);
}

/* Calls in progress are forgotten; their memory is no longer touched once this returns. */
static void nvme_close(struct kvf_tier *base)
{
    struct kvf_nvme_tier *tier = of(base);

    if (tier == NULL) {
        return;
    }
    tier->closing = true;
    for (struct kvf_nvme_io *nio = tier->io_wait.first; nio != NULL; nio = nio->next) {
        tier->ios_outstanding--; /* never got into the queue */
    }
    for (struct kvf_nvme_io *nio = tier->io_faults.first; nio != NULL; nio = nio->next) {
        tier->ios_outstanding--;
    }
    while (tier->ios_outstanding > 0) {
        if (tier->io->ops->poll(tier->io) == 0) {
            wait_a_little(tier);
        }
    }
    if (tier->io != NULL) {
        tier->io->ops->close(tier->io);
    }
    kvf_fd_close(&tier->fd);
    free_tables(tier);
    /* what is still taken belongs to calls that are forgotten: no news */
    kvf_pool_fini(&tier->store_ops, NULL);
    kvf_pool_fini(&tier->load_ops, NULL);
    kvf_pool_fini(&tier->copy_ops, NULL);
    kvf_pool_fini(&tier->purges, NULL);
    free(tier);
}

const struct kvf_tier_ops kvf_tier_nvme_ops = {
    .abi = KVF_TIER_ABI,
    .flags = KVF_TIER_PERSISTENT,
    .name = "nvme",
    .kind = KVF_TIER_NVME,
    .store = nvme_store,
    .load = nvme_load,
    .drop = nvme_drop,
    .poll = nvme_poll,
    .deadline_ns = nvme_deadline_ns,
    .recover = kvf_nvme_recover,
    .drained = nvme_drained,
    .stat = nvme_stat,
    .close = nvme_close,
};
