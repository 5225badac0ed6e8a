/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_dram_piece.c: the memory itself: memfds, their seals, their population and their tenants.
 *
 * A memfd costs nothing until its pages are touched, so all are made at open, which also tells at
 * once whether huge pages can be had. Pages are populated an area at a time by a job: allocated
 * through the file, which fails cleanly where a touch would be a fatal signal, then mapped.
 *
 * The seals forbid every later writable mapping; ours is older, and stays.
 */
#include "tiers/tier_dram_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#define PIECE_SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL)

#define MEMORY_RETRY_NS (250 * KVF_NS_PER_MS)
#define FAILED_RETRY_NS (1 * KVF_NS_PER_S)
#define BUSY_RETRY_NS   (10 * KVF_NS_PER_MS)

static unsigned char *piece_memory(const struct dram_tier *dram, const struct dram_piece *piece)
{
    return dram->arena + piece->first_area * dram->plan.area_bytes;
}

static uint64_t piece_bytes(const struct dram_tier *dram, const struct dram_piece *piece)
{
    return piece->n_areas * dram->plan.area_bytes;
}

/* ---- memfds ---------------------------------------------------------------------------------- */

/* Map the piece's range to nothing again; the address stays ours. */
static void piece_unmap(const struct dram_tier *dram, const struct dram_piece *piece)
{
    void *memory = mmap(piece_memory(dram, piece), piece_bytes(dram, piece), PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);

    /* replacing a mapping by one without memory behind it has nothing to run out of */
    assert(memory != MAP_FAILED);
    (void)memory;
}

/* KVF_OK, or a failure with errno set and *step_out naming the call. */
static int piece_create_kind(struct dram_tier *dram, struct dram_piece *piece, bool is_huge,
                             const char **step_out)
{
    unsigned int flags = MFD_CLOEXEC | MFD_ALLOW_SEALING |
                         (is_huge ? MFD_HUGETLB | MFD_HUGE_2MB : 0);
    uint64_t bytes = piece_bytes(dram, piece);
    void *memory = piece_memory(dram, piece);
    int fd = memfd_create("kvferry-arena", flags);
    int status;

    *step_out = "memfd_create";
    if (fd < 0) {
        return kvf_status_from_errno(errno);
    }
    *step_out = "ftruncate";
    if (ftruncate(fd, (off_t)bytes) != 0) {
        goto fail;
    }
    *step_out = "mmap"; /* of huge pages: also reserves them */
    if (mmap(memory, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        goto fail;
    }
    *step_out = "F_ADD_SEALS";
    if (kvf_memfd_seal(fd, PIECE_SEALS) != KVF_OK) {
        goto fail_unmap;
    }
    *step_out = "madvise";
    if (madvise(memory, bytes, MADV_DONTDUMP) != 0 || madvise(memory, bytes, MADV_DONTFORK) != 0) {
        goto fail_unmap;
    }
    if (!is_huge) {
        /* large long-term pins fail on transparent huge pages; kernels without them refuse this */
        madvise(memory, bytes, MADV_NOHUGEPAGE);
    }
    piece->fd = fd;
    piece->is_huge = is_huge;
    piece->incarnation++;
    piece->id = piece->incarnation * KVF_DRAM_PIECES_MAX + (uint32_t)(piece - dram->pieces);
    return KVF_OK;

fail_unmap:
    status = errno;
    piece_unmap(dram, piece);
    errno = status;
fail:
    status = kvf_status_from_errno(errno);
    kvf_fd_close(&fd);
    return status;
}

/* Make the piece's memfd by the configured kind of pages. why_out gets the reason of a failure, or
 * of not having huge pages; it is untouched otherwise. */
static int piece_create(struct dram_tier *dram, struct dram_piece *piece, char *why_out,
                        size_t why_bytes)
{
    const char *step;
    int status;

    if (dram->config.hugepages != KVF_HUGEPAGES_OFF) {
        status = piece_create_kind(dram, piece, true, &step);
        if (status == KVF_OK) {
            return KVF_OK;
        }
        snprintf(why_out, why_bytes, "%s of 2 MiB pages: %s (see vm.nr_hugepages)", step,
                 strerror(errno));
        if (dram->config.hugepages == KVF_HUGEPAGES_REQUIRE) {
            return KVF_ERR_UNSUPPORTED;
        }
    }
    status = piece_create_kind(dram, piece, false, &step);
    if (status != KVF_OK) {
        snprintf(why_out, why_bytes, "%s: %s", step, strerror(errno));
    }
    return status;
}

static int arena_reserve(struct dram_tier *dram)
{
    uintptr_t address;

    dram->reservation_bytes = dram->plan.arena_bytes + KVF_HUGE_PAGE_BYTES;
    dram->reservation = mmap(NULL, dram->reservation_bytes, PROT_NONE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (dram->reservation == MAP_FAILED) {
        dram->reservation = NULL;
        return KVF_ERR_NO_MEMORY;
    }
    address = (uintptr_t)dram->reservation;
    dram->arena = (unsigned char *)dram->reservation +
                  (KVF_HUGE_PAGE_BYTES - address % KVF_HUGE_PAGE_BYTES) % KVF_HUGE_PAGE_BYTES;
    return KVF_OK;
}

int dram_pieces_open(struct dram_tier *dram, char *why_out, size_t why_bytes)
{
    char reason[KVF_ERROR_TEXT_BYTES] = "";
    uint32_t n_huge = 0, n_pieces = dram->plan.n_pieces;

    if (dram->config.backing != NULL) {
        snprintf(why_out, why_bytes, "pieces of %llu MiB",
                 (unsigned long long)(dram->plan.piece_bytes >> 20));
        return KVF_OK;
    }
    if (arena_reserve(dram) != KVF_OK) {
        snprintf(why_out, why_bytes, "no %llu MiB of addresses for the arena: %s",
                 (unsigned long long)(dram->plan.arena_bytes >> 20), strerror(errno));
        return KVF_ERR_NO_MEMORY;
    }
    for (uint32_t index = 0; index < n_pieces; index++) {
        int status = piece_create(dram, &dram->pieces[index], reason, sizeof(reason));

        if (status != KVF_OK) {
            snprintf(why_out, why_bytes, "arena piece %u of %u: %s", index + 1, n_pieces, reason);
            return status;
        }
        n_huge += dram->pieces[index].is_huge;
    }
    if (dram->config.hugepages == KVF_HUGEPAGES_OFF || n_huge == n_pieces) {
        snprintf(why_out, why_bytes, "arena on %s pages", n_huge > 0 ? "2 MiB" : "4 KiB");
    } else {
        snprintf(why_out, why_bytes, "only %u of %u arena pieces on 2 MiB pages: %s", n_huge,
                 n_pieces, reason);
        kvf_log(KVF_LOG_WARNING, "dram: %s", why_out);
    }
    return KVF_OK;
}

void dram_pieces_close(struct dram_tier *dram)
{
    for (uint32_t index = 0; dram->pieces != NULL && index < dram->plan.n_pieces; index++) {
        kvf_fd_close(&dram->pieces[index].fd);
    }
    if (dram->reservation != NULL) {
        munmap(dram->reservation, dram->reservation_bytes);
    }
}

/* ---- population ------------------------------------------------------------------------------ */

/* On a worker (or inside open). Nobody else looks at this memory yet. */
static void population_run(struct kvf_work *work)
{
    struct dram_population *job = work->owner;

    job->status = kvf_fd_reserve(job->fd, job->offset, job->bytes);
    if (job->status != KVF_OK) {
        job->error = errno;
        return;
    }
    if (madvise(job->memory, job->bytes, MADV_POPULATE_WRITE) == 0) {
        return;
    }
    if (errno != EINVAL) {
        job->error = errno;
        job->status = kvf_status_from_errno(errno);
        return;
    }
    /* kernels before 5.14: the pages exist, so that touching them can no longer fail */
    for (uint64_t offset = 0; offset < job->bytes; offset += KVF_PAGE_BYTES) {
        *((volatile unsigned char *)job->memory + offset) = 0;
    }
}

static void population_finish(struct dram_tier *dram)
{
    struct dram_population *job = &dram->population;
    struct dram_area *area = &dram->areas[job->area_index];
    uint64_t now_ns = dram_now_ns(dram);
    uint64_t suppressed;

    job->is_running = false;
    if (job->status == KVF_OK) {
        assert(area->state == DRAM_AREA_ABSENT);
        area->state = DRAM_AREA_FREE;
        dram->n_absent_areas--;
        dram->n_free_areas++;
        if (dram->config.events.area_ready != NULL) {
            dram->config.events.area_ready(dram->config.events.ctx, job->memory, job->bytes);
        }
        return;
    }
    dram->population_failures++;
    dram->population_retry_ns = now_ns + FAILED_RETRY_NS;
    if (kvf_log_limit_allow(&dram->population_log, now_ns, &suppressed)) {
        kvf_log(KVF_LOG_WARNING,
                "dram: %llu MiB of the arena could not be populated: %s; trying again",
                (unsigned long long)(job->bytes >> 20), strerror(job->error));
    }
}

static void population_done(struct kvf_work *work)
{
    struct dram_population *job = work->owner;
    struct dram_tier *dram = (struct dram_tier *)((char *)job -
                                                  offsetof(struct dram_tier, population));

    population_finish(dram);
    if (job->status == KVF_OK) {
        dram_populate_next(dram, dram_now_ns(dram));
    }
}

uint32_t dram_area_absent(const struct dram_tier *dram)
{
    if (dram->n_absent_areas == 0) {
        return DRAM_NONE;
    }
    for (uint32_t index = 0; index < dram->plan.n_areas; index++) {
        const struct dram_area *area = &dram->areas[index];

        if (area->state == DRAM_AREA_ABSENT && !dram->pieces[area->piece_index].is_lost &&
            !(dram->handover.is_active && dram->handover.piece_index == area->piece_index)) {
            return index;
        }
    }
    return DRAM_NONE;
}

/* Describe the job for the next area. KVF_OK; KVF_MISS: nothing to do; KVF_ERR_BUSY: not now. */
static int population_prepare(struct dram_tier *dram, uint64_t now_ns)
{
    struct dram_population *job = &dram->population;
    uint32_t area_index = dram_area_absent(dram);
    struct dram_piece *piece;

    dram->population_retry_ns = UINT64_MAX;
    if (area_index == DRAM_NONE) {
        return KVF_MISS;
    }
    piece = &dram->pieces[dram->areas[area_index].piece_index];
    if (piece->id == 0) {
        char reason[KVF_ERROR_TEXT_BYTES] = "";
        uint64_t suppressed;

        if (piece_create(dram, piece, reason, sizeof(reason)) != KVF_OK) {
            dram->population_failures++;
            dram->population_retry_ns = now_ns + FAILED_RETRY_NS;
            if (kvf_log_limit_allow(&dram->population_log, now_ns, &suppressed)) {
                kvf_log(KVF_LOG_WARNING, "dram: arena piece not made: %s; trying again", reason);
            }
            return KVF_ERR_BUSY;
        }
    }
    /* huge pages were set aside when the piece was made */
    if (!piece->is_huge &&
        !dram->config.memory_allows(dram->config.memory_ctx, dram->plan.area_bytes)) {
        dram->memory_refusals++;
        dram->population_retry_ns = now_ns + MEMORY_RETRY_NS;
        return KVF_ERR_BUSY;
    }
    *job = (struct dram_population){
        .work = {.run = population_run, .done = population_done, .owner = job},
        .area_index = area_index,
        .memory = dram->arena + area_index * dram->plan.area_bytes,
        .bytes = dram->plan.area_bytes,
        .fd = piece->fd,
        .offset = (area_index - piece->first_area) * dram->plan.area_bytes,
    };
    return KVF_OK;
}

void dram_populate_next(struct dram_tier *dram, uint64_t now_ns)
{
    struct kvf_work_queue *work = dram->config.work;

    if (dram->config.backing != NULL) {
        (void)dram_backed_make(dram, now_ns);
        return;
    }
    if (dram->population.is_running || population_prepare(dram, now_ns) != KVF_OK) {
        return;
    }
    dram->population.is_running = true;
    if (work->ops->submit(work, &dram->population.work) != KVF_OK) {
        dram->population.is_running = false;
        dram->population_retry_ns = now_ns + BUSY_RETRY_NS;
    }
}

int dram_populate_first(struct dram_tier *dram)
{
    int status = dram->config.backing != NULL ? dram_backed_make(dram, dram_now_ns(dram))
                                              : population_prepare(dram, dram_now_ns(dram));

    if (status != KVF_OK || dram->config.backing != NULL) {
        return status;
    }
    population_run(&dram->population.work);
    population_finish(dram);
    return dram->population.status;
}

/* ---- tenants --------------------------------------------------------------------------------- */

void dram_piece_assign(struct dram_tier *dram, struct dram_piece *piece, uint16_t tenant)
{
    assert(piece->id != 0 && piece->tenant == DRAM_TENANT_NONE);
    piece->tenant = tenant;
    piece->next = dram->tenant_pieces[tenant];
    dram->tenant_pieces[tenant] = (uint32_t)(piece - dram->pieces);
    dram->n_tenant_pieces[tenant]++;
    dram->n_assigned_pieces++;
    if (dram->config.events.piece_added != NULL) {
        dram->config.events.piece_added(dram->config.events.ctx, piece->id);
    }
}

static void piece_unassign(struct dram_tier *dram, struct dram_piece *piece)
{
    uint32_t *link = &dram->tenant_pieces[piece->tenant];

    while (*link != (uint32_t)(piece - dram->pieces)) {
        link = &dram->pieces[*link].next;
    }
    *link = piece->next;
    dram->n_tenant_pieces[piece->tenant]--;
    dram->n_assigned_pieces--;
    piece->tenant = DRAM_TENANT_NONE;
}

void dram_piece_forget(struct dram_tier *dram, struct dram_piece *piece)
{
    for (uint32_t i = 0; i < piece->n_areas; i++) {
        struct dram_area *area = &dram->areas[piece->first_area + i];

        assert(area->state == DRAM_AREA_FREE || area->state == DRAM_AREA_ABSENT);
        if (area->state == DRAM_AREA_FREE) {
            area->state = DRAM_AREA_ABSENT;
            dram->n_free_areas--;
            dram->n_absent_areas++;
        }
    }
    if (piece->tenant != DRAM_TENANT_NONE) {
        if (dram->config.events.piece_dropped != NULL) {
            dram->config.events.piece_dropped(dram->config.events.ctx, piece->id);
        }
        piece_unassign(dram, piece);
    }
    kvf_fd_close(&piece->fd);
    if (dram->config.backing == NULL) {
        piece_unmap(dram, piece);
    } else if (!piece->is_lost) {
        dram->config.backing->drop(dram->config.backing->ctx, piece->id);
    }
    piece->id = 0;
}

void dram_piece_replace(struct dram_tier *dram, struct dram_piece *piece, uint16_t tenant)
{
    char reason[KVF_ERROR_TEXT_BYTES] = "";

    dram_piece_forget(dram, piece);
    dram->pieces_reassigned++;
    if (dram->config.backing != NULL) {
        piece->next_tenant = tenant; /* has it once it is made */
    } else if (piece_create(dram, piece, reason, sizeof(reason)) == KVF_OK) {
        dram_piece_assign(dram, piece, tenant);
    } else {
        /* population makes it later, for the tenant that then asks first */
        kvf_log(KVF_LOG_WARNING, "dram: arena piece not made: %s; trying again", reason);
    }
    dram_populate_next(dram, dram_now_ns(dram));
}

static const struct dram_piece *piece_of_id(const struct dram_tier *dram, uint32_t piece_id)
{
    uint32_t index = piece_id % KVF_DRAM_PIECES_MAX;

    if (piece_id == 0 || index >= dram->plan.n_pieces || dram->pieces[index].id != piece_id) {
        return NULL;
    }
    return &dram->pieces[index];
}

uint32_t kvf_dram_piece_next(const struct kvf_tier *tier, uint16_t tenant, uint32_t piece_id)
{
    const struct dram_tier *dram = dram_of_const(tier);
    const struct dram_piece *piece = piece_of_id(dram, piece_id);
    uint32_t next;

    if (tenant >= dram->config.n_tenants || (piece_id != 0 && piece == NULL)) {
        return 0;
    }
    next = piece != NULL ? piece->next : dram->tenant_pieces[tenant];
    return next != DRAM_NONE ? dram->pieces[next].id : 0;
}

int kvf_dram_piece_get(const struct kvf_tier *tier, uint32_t piece_id,
                       struct kvf_dram_piece *piece_out)
{
    const struct dram_tier *dram = dram_of_const(tier);
    const struct dram_piece *piece = piece_of_id(dram, piece_id);

    if (piece == NULL || piece->tenant == DRAM_TENANT_NONE) {
        return KVF_MISS;
    }
    *piece_out = (struct kvf_dram_piece){
        .id = piece->id,
        .tenant = piece->tenant,
        .is_huge = piece->is_huge,
        .fd = piece->fd,
        .bytes = piece_bytes(dram, piece),
    };
    return KVF_OK;
}

int kvf_dram_piece_reassign(struct kvf_tier *tier, uint16_t tenant)
{
    struct dram_tier *dram = dram_of(tier);

    if (tenant >= dram->config.n_tenants) {
        return KVF_ERR_INVALID;
    }
    return dram_handover_begin(dram, tenant);
}
