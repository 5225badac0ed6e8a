/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_nvme_recover.c: what is on the drive at start.
 *
 *   1  page 0 of every segment, many reads at a time: which segments count, in which order
 *   2  newest first: the footer of a sealed segment, or a scan of an open one, record by record
 *   3  a scanned segment gets its footer, so that the next start need not scan it again
 *
 * Newest first, because the host keeps the first record that it hears of under a name and has room
 * for so many. Records whose namespace was purged are left out here.
 *
 * A scan looks at every page of the segment, because writes complete in any order and a record may
 * lie behind a hole that a crash has left. Only a page with this store's MAC and this segment's
 * generation is a record; it is then as long as it says and nothing inside of it is looked at, so a
 * payload may contain whatever it likes. Its payload's checksum is verified too: without a sync,
 * the page may be there and the rest not.
 */
#include "tiers/tier_nvme_internal.h"

#include "base/crc32c.h"
#include "base/failpoint.h"
#include "base/mutant.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define WINDOW_READS       32 /* in flight at a time */
#define SCAN_READS         8
#define TAIL_BYTES         (64u << 10) /* what is read first of the end of a segment */
#define SCAN_BYTES         (1u << 20)
#define UNKNOWN_GENERATION 1 /* of a segment whose page 0 cannot be read or believed */

/* One read of the window. */
struct window_read {
    struct kvf_io io;
    struct recovery *recovery;
    uint8_t *buffer;
    uint32_t segment_index;
    bool in_flight;
};

/* A segment that counts. */
struct candidate {
    uint64_t generation;
    uint32_t segment_index;
};

struct recovery {
    struct kvf_nvme_tier *tier;
    struct kvf_nvme_identity identity;
    struct window_read reads[WINDOW_READS];
    struct window_read scan_reads[SCAN_READS]; /* their buffers come with the first scan */
    struct candidate *candidates;
    uint32_t n_candidates;
    uint32_t n_looked; /* segments that are done with */
    uint8_t *index;    /* of one segment: entries and footer */
    uint64_t index_bytes;
    struct kvf_nvme_device device;
};

static void wait_for_io(struct recovery *recovery)
{
    struct kvf_nvme_tier *tier = recovery->tier;
    struct timespec nap = {.tv_nsec = 20000};

    if (tier->io->ops->poll(tier->io) > 0) {
        return;
    }
    if (tier->config.wait != NULL) {
        tier->config.wait(tier->config.wait_ctx);
    } else {
        nanosleep(&nap, NULL);
    }
}

static void window_done(struct kvf_io *io)
{
    struct window_read *read = io->owner;

    read->in_flight = false;
}

/* Start a read; the window's reads are at most as many as the queue takes. */
static void window_submit(struct window_read *read, uint64_t offset, uint64_t bytes)
{
    struct kvf_nvme_tier *tier = read->recovery->tier;
    int status = KVF_FAILPOINT(nvme_recover_read);

    read->io = (struct kvf_io){.op = KVF_IO_READ,
                               .buffer = read->buffer,
                               .offset = offset,
                               .bytes = bytes,
                               .done = window_done,
                               .owner = read};
    if (status != KVF_OK) {
        read->io.status = status;
        return;
    }
    read->in_flight = true;
    while (tier->io->ops->submit(tier->io, &read->io) != KVF_OK) {
        wait_for_io(read->recovery);
    }
}

static void window_wait(struct window_read *read)
{
    while (read->in_flight) {
        wait_for_io(read->recovery);
    }
    if (read->io.status != KVF_OK) {
        read->recovery->tier->stat.errors_io++;
    }
}

static uint64_t segment_offset(const struct recovery *recovery, uint32_t segment_index)
{
    return kvf_nvme_segment_offset(recovery->identity.segment_bytes, segment_index);
}

/* One more segment is done with: tell how much of the store that makes. */
static void segment_looked(struct recovery *recovery)
{
    const struct kvf_tier_host *host = &recovery->tier->base.host;
    uint64_t segment_bytes = recovery->identity.segment_bytes;

    recovery->n_looked++;
    if (host->looked != NULL) {
        host->looked(host->ctx, recovery->n_looked * segment_bytes,
                     recovery->tier->n_segments * segment_bytes);
    }
}

/* --- 1: page 0 -------------------------------------------------------------------------------- */

static bool is_zero_page(const uint8_t *page)
{
    for (size_t i = 0; i < KVF_NVME_PAGE_BYTES; i++) {
        if (page[i] != 0) {
            return false;
        }
    }
    return true;
}

static void judge_header(struct recovery *recovery, struct window_read *read)
{
    struct kvf_nvme_tier *tier = recovery->tier;
    struct kvf_nvme_segment_info *segment = &tier->segments[read->segment_index];
    const struct kvf_nvme_segment *page = (const struct kvf_nvme_segment *)read->buffer;

    window_wait(read);
    if ((read->io.status != KVF_OK ||
         !kvf_nvme_segment_check(page, &recovery->identity, read->segment_index)) &&
        (read->io.status != KVF_OK || !is_zero_page(read->buffer))) {
        /* once more: a wrong bit may have come from the way */
        window_submit(read, segment_offset(recovery, read->segment_index), KVF_NVME_PAGE_BYTES);
        window_wait(read);
    }
    if (read->io.status == KVF_OK &&
        kvf_nvme_segment_check(page, &recovery->identity, read->segment_index) &&
        page->generation < tier->generation_next) {
        segment->generation = page->generation;
        recovery->candidates[recovery->n_candidates++] = (struct candidate){
            .generation = page->generation, .segment_index = read->segment_index};
        return;
    }
    if (read->io.status != KVF_OK || !is_zero_page(read->buffer)) {
        segment->generation = UNKNOWN_GENERATION;
    }
    segment_looked(recovery); /* there is nothing else in it that counts */
}

static void read_headers(struct recovery *recovery)
{
    struct kvf_nvme_tier *tier = recovery->tier;

    for (uint32_t i = 0; i < tier->n_segments + WINDOW_READS; i++) {
        struct window_read *read = &recovery->reads[i % WINDOW_READS];

        if (i >= WINDOW_READS && i - WINDOW_READS < tier->n_segments) {
            judge_header(recovery, read);
        }
        if (i < tier->n_segments) {
            read->segment_index = i;
            window_submit(read, segment_offset(recovery, i), KVF_NVME_PAGE_BYTES);
        }
    }
}

static int newest_first(const void *a, const void *b)
{
    const struct candidate *left = a, *right = b;

    return left->generation < right->generation ? 1 : left->generation > right->generation ? -1 : 0;
}

/* --- 2: records ------------------------------------------------------------------------------- */

/* Ask the host about entries of one segment, the last first, and build the segment's table. */
static int adopt(struct recovery *recovery, uint32_t segment_index, uint8_t *index,
                 uint32_t n_entries)
{
    struct kvf_nvme_tier *tier = recovery->tier;
    struct kvf_nvme_segment_info *segment = &tier->segments[segment_index];
    struct kvf_nvme_record *records = calloc(n_entries == 0 ? 1 : n_entries, sizeof(*records));
    struct kvf_nvme_record *shrunk;
    uint32_t at = n_entries;

    if (records == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    for (uint32_t i = n_entries; i-- > 0;) {
        const struct kvf_nvme_entry *entry = kvf_nvme_index_entry(index, i);
        uint32_t pages = kvf_nvme_pages(entry->record_bytes);
        kvf_location location = kvf_nvme_location_pack(segment->generation, segment_index,
                                                       entry->page_index);
        struct kvf_block_name name = {.namespace_id = entry->namespace_id,
                                      .namespace_epoch = entry->namespace_epoch,
                                      .shard = entry->shard,
                                      .shard_count = entry->shard_count};
        bool is_packed = entry->plain_bytes != 0 && !KVF_MUTANT(plain_size_forgotten);
        uint64_t plain_bytes = is_packed ? entry->plain_bytes : entry->record_bytes;
        kvf_cookie cookie;

        segment->record_pages += pages;
        if (entry->namespace_epoch > tier->state.epoch_last) {
            /* of a purge that a loss of power kept from the state page: the next one of this
             * namespace must not get the same number, or it would spare this record */
            tier->state.epoch_last = entry->namespace_epoch;
        }
        if (entry->namespace_epoch < kvf_nvme_epoch_find(&tier->state, entry->namespace_id) &&
            !KVF_MUTANT(purge_forgotten)) {
            continue;
        }
        memcpy(name.key_id, entry->key_id, sizeof(name.key_id));
        cookie = tier->base.host.recovered(tier->base.host.ctx, &name, location, plain_bytes,
                                           entry->sequence);
        if (cookie == KVF_COOKIE_NONE) {
            continue;
        }
        records[--at] = (struct kvf_nvme_record){
            .page = entry->page_index, .pages_flags = pages << 8 | KVF_NVME_LIVE, .cookie = cookie};
        tier->stat.stored_blocks++;
        tier->stat.stored_bytes += (uint64_t)pages * KVF_NVME_PAGE_BYTES;
    }
    segment->n_records = n_entries - at;
    memmove(records, records + at, segment->n_records * sizeof(*records));
    segment->records = records;
    shrunk = realloc(records, (segment->n_records + 1) * sizeof(*records));
    if (shrunk != NULL) {
        segment->records = shrunk;
    }
    segment->state = KVF_NVME_SEGMENT_SEALED;
    tier->stat.area_bytes += recovery->identity.segment_bytes;
    tier->stat.area_stored_bytes += (uint64_t)segment->record_pages * KVF_NVME_PAGE_BYTES;
    tier->info.recovered_records += segment->n_records;
    return KVF_OK;
}

static uint64_t tail_bytes(const struct recovery *recovery)
{
    uint64_t most = recovery->identity.segment_bytes - KVF_NVME_PAGE_BYTES;

    return most < TAIL_BYTES ? most : TAIL_BYTES;
}

/* The whole index of a footer whose page is good, in the buffer that is large enough for any.
 * False: it cannot be had, so the segment is scanned. */
static bool fetch_index(struct recovery *recovery, const struct window_read *read,
                        const struct kvf_nvme_footer *footer)
{
    uint64_t have = tail_bytes(recovery);
    uint64_t want = ((uint64_t)footer->index_pages + 1) * KVF_NVME_PAGE_BYTES;
    uint64_t end = segment_offset(recovery, read->segment_index + 1);

    if (want > recovery->index_bytes) {
        return false;
    }
    if (want <= have) {
        memcpy(recovery->index, read->buffer + have - want, want);
        return true;
    }
    return kvf_nvme_device_io(&recovery->device, KVF_IO_READ, recovery->index, end - want, want) ==
           KVF_OK;
}

/* KVF_OK: the segment is known; KVF_MISS: no footer counts; KVF_ERR_NO_MEMORY. */
static int read_sealed(struct recovery *recovery, struct window_read *read)
{
    uint64_t have = tail_bytes(recovery);
    const struct kvf_nvme_footer *footer = (const struct kvf_nvme_footer *)(read->buffer + have -
                                                                            KVF_NVME_PAGE_BYTES);
    uint64_t generation = recovery->tier->segments[read->segment_index].generation;
    struct kvf_nvme_footer copy;

    window_wait(read);
    if (read->io.status != KVF_OK ||
        !kvf_nvme_footer_check(footer, &recovery->identity, generation, read->segment_index)) {
        return KVF_MISS;
    }
    copy = *footer;
    if (!fetch_index(recovery, read, &copy) || !kvf_nvme_index_check(recovery->index, &copy)) {
        return KVF_MISS;
    }
    return adopt(recovery, read->segment_index, recovery->index, copy.entry_count);
}

/* --- 2: scan of a segment without footer ------------------------------------------------------ */

struct scan {
    struct recovery *recovery;
    uint32_t segment_index;
    uint64_t generation;
    uint32_t n_entries;
    uint32_t end_page; /* behind the last record */
    /* the record that is being read */
    uint64_t left_bytes; /* of its payload; 0: none */
    uint32_t skip_pages; /* of it, with padding, still to pass */
    uint32_t crc, crc_wanted;
};

static void scan_accept(struct scan *scan, bool good)
{
    struct recovery *recovery = scan->recovery;

    /* The entry was filled in when the page was seen; it counts only now. */
    if (good) {
        scan->n_entries++;
        return;
    }
    memset(kvf_nvme_index_entry(recovery->index, scan->n_entries), 0,
           sizeof(struct kvf_nvme_entry));
    recovery->tier->stat.errors_corrupt++;
}

/* A page where a record may begin. */
static void scan_page(struct scan *scan, const struct kvf_record_page *page, uint32_t page_index)
{
    struct recovery *recovery = scan->recovery;
    uint32_t pages;
    struct kvf_nvme_entry *entry;
    int status;

    if (page->header.magic != KVF_BLOCK_MAGIC) {
        return;
    }
    status = kvf_nvme_record_check(page, &recovery->identity, scan->generation, page_index);
    if (status != KVF_OK) {
        recovery->tier->stat.errors_mac += status == KVF_ERR_MISMATCH;
        return;
    }
    pages = kvf_nvme_pages(page->store.record_bytes);
    if (page_index + pages >= recovery->tier->segment_pages ||
        scan->n_entries == recovery->tier->slot_entries_max) {
        return;
    }
    entry = kvf_nvme_index_entry(recovery->index, scan->n_entries);
    *entry = (struct kvf_nvme_entry){.namespace_id = page->store.namespace_id,
                                     .namespace_epoch = page->store.namespace_epoch,
                                     .record_bytes = page->store.record_bytes,
                                     .sequence = page->store.sequence,
                                     .page_index = page_index,
                                     .payload_crc32c = page->header.payload_crc32c,
                                     .shard = page->header.shard,
                                     .shard_count = page->header.shard_count,
                                     .plain_bytes = page->header.plain_bytes};
    memcpy(entry->key_id, page->header.key_id, sizeof(entry->key_id));
    scan->crc = 0;
    scan->crc_wanted = page->header.payload_crc32c;
    scan->left_bytes = page->store.record_bytes - KVF_NVME_PAGE_BYTES;
    scan->skip_pages = pages - 1;
    scan->end_page = page_index + pages;
}

/* bytes is what was read from page_index on; NULL: that part cannot be read. */
static void scan_piece(struct scan *scan, const uint8_t *bytes, uint32_t page_index,
                       uint32_t n_pages)
{
    for (uint32_t i = 0; i < n_pages;) {
        const uint8_t *at = bytes == NULL ? NULL : bytes + (size_t)i * KVF_NVME_PAGE_BYTES;

        if (scan->skip_pages > 0) {
            uint32_t pages = n_pages - i < scan->skip_pages ? n_pages - i : scan->skip_pages;
            uint64_t count = (uint64_t)pages * KVF_NVME_PAGE_BYTES;

            if (count > scan->left_bytes) {
                count = scan->left_bytes;
            }
            if (at == NULL) {
                scan->crc_wanted = ~scan->crc; /* cannot be right any more */
            } else {
                scan->crc = kvf_crc32c(scan->crc, at, count);
            }
            scan->left_bytes -= count;
            scan->skip_pages -= pages;
            i += pages;
            if (scan->skip_pages == 0) {
                scan_accept(scan, at != NULL && scan->crc == scan->crc_wanted);
            }
            continue;
        }
        if (at != NULL) {
            scan_page(scan, (const struct kvf_record_page *)at, page_index + i);
        }
        i++;
    }
}

/* Read the segment in order, several pieces ahead. */
static void scan_read(struct scan *scan)
{
    struct recovery *recovery = scan->recovery;
    uint64_t base = segment_offset(recovery, scan->segment_index);
    uint32_t pages = recovery->tier->segment_pages;
    const uint32_t piece_pages = SCAN_BYTES / KVF_NVME_PAGE_BYTES;
    uint32_t n_pieces = (pages - 1 + piece_pages - 1) / piece_pages;

    for (uint32_t i = 0; i < n_pieces + SCAN_READS; i++) {
        struct window_read *read = &recovery->scan_reads[i % SCAN_READS];

        if (i >= SCAN_READS && i - SCAN_READS < n_pieces) {
            uint32_t first = 1 + (i - SCAN_READS) * piece_pages;
            uint32_t n = pages - first < piece_pages ? pages - first : piece_pages;

            window_wait(read);
            scan_piece(scan, read->io.status == KVF_OK ? read->buffer : NULL, first, n);
        }
        if (i < n_pieces) {
            uint32_t first = 1 + i * piece_pages;
            uint32_t n = pages - first < piece_pages ? pages - first : piece_pages;

            window_submit(read, base + (uint64_t)first * KVF_NVME_PAGE_BYTES,
                          (uint64_t)n * KVF_NVME_PAGE_BYTES);
        }
    }
}

/* --- 3: footer -------------------------------------------------------------------------------- */

/* What was found is made stable, then listed. Without a footer the next start scans again. */
static void seal_scanned(struct scan *scan)
{
    struct recovery *recovery = scan->recovery;
    uint32_t index_pages = kvf_nvme_index_pages(scan->n_entries);
    uint32_t data_pages = scan->end_page == 0 ? 1 : scan->end_page;
    uint64_t bytes = ((uint64_t)index_pages + 1) * KVF_NVME_PAGE_BYTES;
    int status = KVF_FAILPOINT(nvme_recover_seal);

    if (data_pages + index_pages + 1 > recovery->tier->segment_pages) {
        return; /* a torn record at the end reaches into where the footer belongs */
    }
    kvf_nvme_footer_seal(recovery->index, scan->n_entries, data_pages, &recovery->identity,
                         scan->generation, scan->segment_index);
    if (status == KVF_OK) {
        status = kvf_nvme_device_io(&recovery->device, KVF_IO_SYNC, NULL, 0, 0);
    }
    if (status == KVF_OK) {
        status = kvf_nvme_device_io(&recovery->device, KVF_IO_WRITE, recovery->index,
                                    segment_offset(recovery, scan->segment_index + 1) - bytes,
                                    bytes);
    }
    if (status == KVF_OK) {
        status = kvf_nvme_device_io(&recovery->device, KVF_IO_SYNC, NULL, 0, 0);
    }
    if (status != KVF_OK) {
        kvf_log(KVF_LOG_WARNING, "nvme %s: segment %u could not be sealed: %s",
                recovery->tier->path, scan->segment_index, kvf_status_text(status));
    }
}

static int make_scan_buffers(struct recovery *recovery)
{
    for (uint32_t i = 0; i < SCAN_READS; i++) {
        struct window_read *read = &recovery->scan_reads[i];

        read->recovery = recovery;
        if (read->buffer == NULL) {
            read->buffer = aligned_alloc(KVF_NVME_PAGE_BYTES, SCAN_BYTES);
        }
        if (read->buffer == NULL) {
            return KVF_ERR_NO_MEMORY;
        }
    }
    return KVF_OK;
}

static int scan_segment(struct recovery *recovery, uint32_t segment_index)
{
    struct kvf_nvme_tier *tier = recovery->tier;
    struct scan scan = {.recovery = recovery,
                        .segment_index = segment_index,
                        .generation = tier->segments[segment_index].generation};
    int status = KVF_FAILPOINT(nvme_recover_scan);

    if (make_scan_buffers(recovery) != KVF_OK) {
        return KVF_ERR_NO_MEMORY;
    }
    if (status == KVF_OK) {
        memset(recovery->index, 0, recovery->index_bytes);
        scan_read(&scan);
        seal_scanned(&scan);
    }
    tier->info.recovered_scanned += scan.n_entries;
    return adopt(recovery, segment_index, recovery->index, scan.n_entries);
}

/* --- all -------------------------------------------------------------------------------------- */

static int read_segments(struct recovery *recovery)
{
    uint64_t have = tail_bytes(recovery);
    uint32_t n = recovery->n_candidates;
    int result = KVF_OK;

    for (uint32_t i = 0; i < n + WINDOW_READS; i++) {
        struct window_read *read = &recovery->reads[i % WINDOW_READS];

        if (i >= WINDOW_READS && i - WINDOW_READS < n) {
            int status = read_sealed(recovery, read); /* waits, also after a failure */

            if (status == KVF_MISS) {
                status = scan_segment(recovery, read->segment_index);
            }
            result = result == KVF_OK ? status : result;
            segment_looked(recovery);
        }
        if (i < n && result == KVF_OK) {
            read->segment_index = recovery->candidates[i].segment_index;
            window_submit(read, segment_offset(recovery, read->segment_index + 1) - have, have);
        }
    }
    return result;
}

/* Free segments as they lie, sealed ones oldest first. */
static void build_lists(struct recovery *recovery)
{
    struct kvf_nvme_tier *tier = recovery->tier;

    for (uint32_t i = 0; i < tier->n_segments; i++) {
        if (tier->segments[i].state == KVF_NVME_SEGMENT_FREE) {
            kvf_nvme_list_push(tier, &tier->free_list, i);
        }
    }
    for (uint32_t i = recovery->n_candidates; i-- > 0;) {
        uint32_t segment_index = recovery->candidates[i].segment_index;

        if (tier->segments[segment_index].state == KVF_NVME_SEGMENT_SEALED) {
            kvf_nvme_list_push(tier, &tier->sealed_list, segment_index);
        }
    }
}

static int make_buffers(struct recovery *recovery)
{
    struct kvf_nvme_tier *tier = recovery->tier;
    uint32_t index_pages = kvf_nvme_index_pages(tier->slot_entries_max);

    recovery->index_bytes = ((uint64_t)index_pages + 1) * KVF_NVME_PAGE_BYTES;
    recovery->index = aligned_alloc(KVF_NVME_PAGE_BYTES, recovery->index_bytes);
    recovery->candidates = calloc(tier->n_segments, sizeof(*recovery->candidates));
    if (recovery->index == NULL || recovery->candidates == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < WINDOW_READS; i++) {
        recovery->reads[i].recovery = recovery;
        recovery->reads[i].buffer = aligned_alloc(KVF_NVME_PAGE_BYTES, TAIL_BYTES);
        if (recovery->reads[i].buffer == NULL) {
            return KVF_ERR_NO_MEMORY;
        }
    }
    return KVF_OK;
}

static void free_buffers(struct recovery *recovery)
{
    for (uint32_t i = 0; i < WINDOW_READS; i++) {
        free(recovery->reads[i].buffer);
    }
    for (uint32_t i = 0; i < SCAN_READS; i++) {
        free(recovery->scan_reads[i].buffer);
    }
    free(recovery->index);
    free(recovery->candidates);
    free(recovery);
}

int kvf_nvme_recover(struct kvf_tier *tier)
{
    struct kvf_nvme_tier *self = (struct kvf_nvme_tier *)tier;
    struct recovery *recovery = calloc(1, sizeof(*recovery));
    uint64_t start_ns = kvf_env_now_ns(&self->config.env);
    int status;

    assert(!self->recovered);
    self->recovered = true;
    if (recovery == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    recovery->tier = self;
    recovery->identity = kvf_nvme_identity(self);
    recovery->device = (struct kvf_nvme_device){.fd = -1,
                                                .io = self->io,
                                                .capacity_bytes = self->io->capacity_bytes,
                                                .wait = self->config.wait,
                                                .wait_ctx = self->config.wait_ctx};
    status = make_buffers(recovery);
    if (status == KVF_OK) {
        read_headers(recovery);
        qsort(recovery->candidates, recovery->n_candidates, sizeof(struct candidate), newest_first);
        status = read_segments(recovery);
        build_lists(recovery);
    }
    self->now_ns = kvf_env_now_ns(&self->config.env);
    self->info.recovery_ns = self->now_ns - start_ns;
    free_buffers(recovery);
    return status;
}
