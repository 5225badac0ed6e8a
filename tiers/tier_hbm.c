/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_hbm.c: slots in a GPU's memory, and records on their way there and back.
 */
#include "tiers/tier_hbm.h"

#include <assert.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/crc32c.h"
#include "base/fd.h"
#include "base/limits.h"
#include "base/mutant.h"
#include "base/owner.h"
#include "codec/codec.h"

struct hbm_tier;

enum move_state {
    MOVE_FREE = 0,
    MOVE_WORKING, /* a worker copies and sums */
    MOVE_COPYING, /* the port copies */
    MOVE_WAITING, /* for the port, or for a worker, to take it */
};

struct hbm_move {
    enum move_state state;
    struct hbm_tier *hbm;
    struct kvf_tier_io *io;
    bool is_store;
    uint32_t life;          /* of the port: its piece is gone with that */
    uint32_t unit, n_units; /* of the window */
    int32_t status;
    struct kvf_work work;
    struct kvf_hbm_copy copy;
};

struct hbm_tier {
    struct kvf_tier base;
    struct kvf_owner owner;
    struct kvf_hbm_config config;
    struct kvf_dram_backing backing;
    struct kvf_tier *slots;
    struct kvf_memfd window_fd;
    uint8_t *window;
    uint8_t *units; /* 1: in use */
    uint32_t n_units, n_units_used;
    struct hbm_move moves[KVF_HBM_MOVES_MAX];
    uint32_t n_moves;
    bool is_up;
    uint32_t life;        /* how often it has gone down */
    unsigned n_callbacks; /* of the running poll */
    struct kvf_tier_stat stat;
};

static struct hbm_tier *hbm_of(struct kvf_tier *tier)
{
    struct hbm_tier *hbm = (struct hbm_tier *)tier;

    assert(tier->ops == &kvf_tier_hbm_ops);
    kvf_owner_check(&hbm->owner);
    return hbm;
}

static const struct hbm_tier *hbm_of_const(const struct kvf_tier *tier)
{
    assert(tier->ops == &kvf_tier_hbm_ops);
    return (const struct hbm_tier *)tier;
}

/* ---- the window ------------------------------------------------------------------------------ */

/* Neighbouring units for so many bytes. False: there are none now. */
static bool window_take(struct hbm_tier *hbm, uint64_t bytes, uint32_t *unit_out,
                        uint32_t *n_units_out)
{
    uint32_t n_wanted = (uint32_t)((bytes + KVF_HBM_UNIT_BYTES - 1) / KVF_HBM_UNIT_BYTES);
    uint32_t n_free = 0;

    for (uint32_t i = 0; i < hbm->n_units; i++) {
        n_free = hbm->units[i] == 0 ? n_free + 1 : 0;
        if (n_free == n_wanted) {
            *unit_out = i + 1 - n_wanted;
            *n_units_out = n_wanted;
            memset(hbm->units + *unit_out, 1, n_wanted);
            hbm->n_units_used += n_wanted;
            return true;
        }
    }
    return false;
}

static void window_give(struct hbm_tier *hbm, const struct hbm_move *move)
{
    memset(hbm->units + move->unit, 0, move->n_units);
    hbm->n_units_used -= move->n_units;
}

static uint8_t *window_at(const struct hbm_move *move)
{
    return move->hbm->window + (uint64_t)move->unit * KVF_HBM_UNIT_BYTES;
}

/* ---- moves ----------------------------------------------------------------------------------- */

static struct hbm_move *move_new(struct hbm_tier *hbm, struct kvf_tier_io *io, bool is_store)
{
    struct hbm_move *move = hbm->moves;

    if (hbm->n_moves == KVF_HBM_MOVES_MAX) {
        return NULL;
    }
    while (move->state != MOVE_FREE) {
        move++;
    }
    *move = (struct hbm_move){.hbm = hbm, .io = io, .is_store = is_store, .life = hbm->life};
    if (!window_take(hbm, KVF_HBM_HEAD_BYTES + io->record_bytes, &move->unit, &move->n_units)) {
        return NULL;
    }
    move->work.owner = move;
    move->copy.owner = move;
    move->copy.is_in = is_store;
    kvf_dram_locate(hbm->slots, io->location, &move->copy.piece_id, &move->copy.piece_offset);
    move->copy.window_offset = (uint64_t)move->unit * KVF_HBM_UNIT_BYTES;
    move->copy.bytes = KVF_HBM_HEAD_BYTES + io->record_bytes;
    hbm->n_moves++;
    return move;
}

static void move_end(struct hbm_move *move, int status)
{
    struct hbm_tier *hbm = move->hbm;
    struct kvf_tier_io *io = move->io;

    window_give(hbm, move);
    move->state = MOVE_FREE;
    hbm->n_moves--;
    hbm->n_callbacks++;
    io->status = status;
    if (status == KVF_OK) {
        *(move->is_store ? &hbm->stat.bytes_written : &hbm->stat.bytes_read) += io->record_bytes;
    }
    hbm->stat.errors_corrupt += status == KVF_ERR_CORRUPT;
    hbm->stat.errors_io += status == KVF_ERR_IO;
    io->done(io);
}

/* On a worker: what goes into the device is summed as it has arrived in the window. */
static void store_run(struct kvf_work *work)
{
    struct hbm_move *move = work->owner;
    const struct kvf_record_page *page = move->io->record;
    uint8_t *to = window_at(move) + KVF_HBM_HEAD_BYTES;
    uint64_t bytes = move->io->record_bytes - KVF_RECORD_PAGE_BYTES;
    uint32_t crc;

    memcpy(to, page, sizeof(*page));
    crc = kvf_crc32c_copy(to + KVF_RECORD_PAGE_BYTES,
                          (const uint8_t *)move->io->record + KVF_RECORD_PAGE_BYTES, bytes, 0);
    move->status = crc == page->header.payload_crc32c ? KVF_OK : KVF_ERR_CORRUPT;
}

/* Is this page, a private copy, the one that was stored? */
static int page_judge(const struct kvf_record_page *page, const struct kvf_tier_io *io)
{
    if (kvf_block_check(page, io->record_bytes) != KVF_OK ||
        page->header.total_bytes != io->record_bytes ||
        memcmp(page->header.key_id, io->name.key_id, sizeof(page->header.key_id)) != 0 ||
        page->header.shard != io->name.shard || page->header.shard_count != io->name.shard_count) {
        return KVF_ERR_CORRUPT;
    }
    return KVF_OK;
}

/* On a worker: the window belongs to another process, too, so that only the copy is judged. */
static void load_run(struct kvf_work *work)
{
    struct hbm_move *move = work->owner;
    struct kvf_tier_io *io = move->io;
    const uint8_t *from = window_at(move) + KVF_HBM_HEAD_BYTES;
    struct kvf_record_page *page = io->record;
    uint8_t *to = (uint8_t *)io->record + KVF_RECORD_PAGE_BYTES;
    uint64_t bytes = io->record_bytes - KVF_RECORD_PAGE_BYTES;
    uint32_t crc;

    memcpy(page, from, sizeof(*page));
    crc = kvf_crc32c_copy(to, from + KVF_RECORD_PAGE_BYTES, bytes, 0);
    memset(to + bytes, 0, ((bytes + 4095) & ~UINT64_C(4095)) - bytes);
    move->status = page_judge(page, io);
    if (move->status == KVF_OK && crc != page->header.payload_crc32c &&
        !KVF_MUTANT(hbm_unchecked)) {
        move->status = KVF_ERR_CORRUPT;
    }
}

static void copy_done(struct kvf_hbm_copy *copy);

/* Give a stored record that lies in the window, or one to be loaded, to the port. */
static void move_copy(struct hbm_move *move)
{
    struct hbm_tier *hbm = move->hbm;
    int status = hbm->is_up && move->life == hbm->life ? KVF_OK : KVF_ERR_TIER_OFF;

    if (status == KVF_OK) {
        move->copy.done = copy_done;
        status = hbm->config.port->ops->copy(hbm->config.port, &move->copy);
    }
    if (status == KVF_OK || status == KVF_ERR_BUSY) {
        move->state = status == KVF_OK ? MOVE_COPYING : MOVE_WAITING;
    } else {
        move_end(move, status);
    }
}

static void worked(struct kvf_work *work)
{
    struct hbm_move *move = work->owner;

    if (move->is_store && move->status == KVF_OK) {
        move_copy(move);
    } else {
        move_end(move, move->status);
    }
}

static int move_work(struct hbm_move *move)
{
    struct kvf_work_queue *queue = move->hbm->config.work;
    int status;

    move->work.run = move->is_store ? store_run : load_run;
    move->work.done = worked;
    status = queue->ops->submit(queue, &move->work);
    move->state = status == KVF_OK ? MOVE_WORKING : MOVE_WAITING;
    return status;
}

static void copy_done(struct kvf_hbm_copy *copy)
{
    struct hbm_move *move = copy->owner;

    move->copy.done = NULL; /* it waits for a worker, if it waits */
    if (move->is_store || copy->status != KVF_OK) {
        move_end(move, copy->status);
    } else {
        (void)move_work(move);
    }
}

/* What could not be handed on. */
static void moves_retry(struct hbm_tier *hbm)
{
    for (uint32_t i = 0; i < KVF_HBM_MOVES_MAX; i++) {
        struct hbm_move *move = &hbm->moves[i];

        if (move->state != MOVE_WAITING) {
            continue;
        }
        if (move->copy.done != NULL) {
            move_copy(move);
        } else {
            (void)move_work(move);
        }
    }
}

/* ---- the port's events ----------------------------------------------------------------------- */

static void on_up(void *ctx)
{
    struct hbm_tier *hbm = ctx;

    hbm->is_up = true;
    hbm->n_callbacks++;
    (void)hbm->slots->ops->poll(hbm->slots, kvf_env_now_ns(&hbm->config.env));
}

static void on_down(void *ctx)
{
    struct hbm_tier *hbm = ctx;

    hbm->is_up = false;
    hbm->life++;
    hbm->n_callbacks++;
    hbm->config.events.lost(hbm->config.events.ctx);
    kvf_dram_pieces_lost(hbm->slots);
}

static void on_made(void *ctx, uint32_t piece_id, int fd, int status)
{
    struct hbm_tier *hbm = ctx;

    hbm->n_callbacks++;
    kvf_dram_piece_made(hbm->slots, piece_id, fd, status);
}

static int piece_make(void *ctx, uint32_t piece_id, uint64_t bytes)
{
    struct hbm_tier *hbm = ctx;

    return hbm->is_up ? hbm->config.port->ops->make(hbm->config.port, piece_id, bytes)
                      : KVF_ERR_BUSY;
}

static void piece_drop(void *ctx, uint32_t piece_id)
{
    struct hbm_tier *hbm = ctx;

    if (hbm->config.port != NULL) {
        hbm->config.port->ops->drop(hbm->config.port, piece_id);
    }
}

/* ---- open and close -------------------------------------------------------------------------- */

void kvf_hbm_config_init(struct kvf_hbm_config *config, uint64_t bytes)
{
    uint64_t window_bytes = bytes / 4 / KVF_HBM_UNIT_BYTES * KVF_HBM_UNIT_BYTES;

    *config = (struct kvf_hbm_config){
        .bytes = bytes,
        .piece_bytes = KVF_HBM_PIECE_BYTES,
        .window_bytes = window_bytes < KVF_HBM_WINDOW_BYTES ? window_bytes : KVF_HBM_WINDOW_BYTES,
        .n_tenants = 1,
        .env = kvf_env_system(),
    };
}

static void slots_config(const struct kvf_hbm_config *config,
                         const struct kvf_dram_backing *backing, struct kvf_dram_config *slots)
{
    kvf_dram_config_init(slots);
    slots->arena_bytes = config->bytes;
    slots->piece_bytes = config->piece_bytes;
    slots->n_tenants = config->n_tenants;
    slots->env = config->env;
    slots->host = config->host;
    slots->events = (struct kvf_dram_events){.ctx = config->events.ctx,
                                             .piece_added = config->events.piece_added,
                                             .piece_dropped = config->events.piece_dropped};
    slots->backing = backing;
}

uint64_t kvf_hbm_metadata_bytes(const struct kvf_hbm_config *config)
{
    const struct kvf_dram_backing backing = {0};
    struct kvf_dram_config slots;

    slots_config(config, &backing, &slots);
    return sizeof(struct hbm_tier) + kvf_dram_metadata_bytes(&slots) + config->window_bytes;
}

static int window_open(struct hbm_tier *hbm)
{
    uint64_t bytes = hbm->config.window_bytes;
    void *window;
    int status = kvf_memfd_create("kvferry-window", bytes, KVF_HUGEPAGES_OFF, &hbm->window_fd);

    if (status != KVF_OK) {
        hbm->window_fd.fd = -1;
        return status;
    }
    status = kvf_memfd_seal(hbm->window_fd.fd, F_SEAL_SHRINK | F_SEAL_GROW);
    window = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, hbm->window_fd.fd, 0);
    if (status != KVF_OK || window == MAP_FAILED) {
        return status != KVF_OK ? status : KVF_ERR_NO_MEMORY;
    }
    hbm->window = window;
    (void)madvise(window, bytes, MADV_DONTDUMP);
    (void)madvise(window, bytes, MADV_DONTFORK);
    hbm->n_units = (uint32_t)(bytes / KVF_HBM_UNIT_BYTES);
    hbm->units = calloc(hbm->n_units, 1);
    return hbm->units != NULL ? KVF_OK : KVF_ERR_NO_MEMORY;
}

int kvf_hbm_open(const struct kvf_hbm_config *config, struct kvf_tier **tier_out, char *why_out,
                 size_t why_bytes)
{
    struct hbm_tier *hbm = calloc(1, sizeof(*hbm));
    struct kvf_dram_config slots;
    struct kvf_hbm_port_events events;
    int status;

    if (hbm == NULL) {
        config->port->ops->close(config->port);
        snprintf(why_out, why_bytes, "no memory");
        return KVF_ERR_NO_MEMORY;
    }
    hbm->base.ops = &kvf_tier_hbm_ops;
    hbm->base.host = config->host;
    hbm->config = *config;
    hbm->window_fd.fd = -1;
    hbm->backing = (struct kvf_dram_backing){.ctx = hbm, .make = piece_make, .drop = piece_drop};
    slots_config(config, &hbm->backing, &slots);
    status = kvf_dram_open(&slots, &hbm->slots, why_out, why_bytes);
    if (status == KVF_OK) {
        status = window_open(hbm);
        if (status != KVF_OK) {
            snprintf(why_out, why_bytes, "no memory for a window of %llu MiB",
                     (unsigned long long)(config->window_bytes >> 20));
        }
    }
    if (status != KVF_OK) {
        kvf_tier_hbm_ops.close(&hbm->base);
        return status;
    }
    events = (struct kvf_hbm_port_events){
        .ctx = hbm, .up = on_up, .down = on_down, .made = on_made};
    config->port->ops->start(config->port, &events, hbm->window_fd.fd, hbm->window,
                             config->window_bytes);
    *tier_out = &hbm->base;
    return KVF_OK;
}

static void hbm_close(struct kvf_tier *tier)
{
    struct hbm_tier *hbm = (struct hbm_tier *)tier;

    if (hbm == NULL) {
        return;
    }
    hbm->config.port->ops->close(hbm->config.port);
    hbm->config.port = NULL;
    if (hbm->slots != NULL) {
        hbm->slots->ops->close(hbm->slots);
    }
    if (hbm->window != NULL) {
        (void)munmap(hbm->window, hbm->config.window_bytes);
    }
    kvf_fd_close(&hbm->window_fd.fd);
    free(hbm->units);
    free(hbm);
}

/* ---- calls ----------------------------------------------------------------------------------- */

struct kvf_tier *kvf_hbm_slots(struct kvf_tier *tier)
{
    return hbm_of(tier)->slots;
}

struct kvf_hbm_port *kvf_hbm_port_of(const struct kvf_tier *tier)
{
    return hbm_of_const(tier)->config.port;
}

const char *kvf_hbm_uuid(const struct kvf_tier *tier)
{
    const struct hbm_tier *hbm = hbm_of_const(tier);

    return hbm->config.port->ops->uuid(hbm->config.port);
}

bool kvf_hbm_is_up(const struct kvf_tier *tier)
{
    return hbm_of_const(tier)->is_up;
}

bool kvf_hbm_fits(const struct kvf_tier *tier, uint64_t record_bytes)
{
    const struct hbm_tier *hbm = hbm_of_const(tier);
    uint64_t bytes = KVF_HBM_HEAD_BYTES + record_bytes;

    return bytes <= hbm->config.window_bytes && kvf_dram_fits(hbm->slots, bytes);
}

static int hbm_reserve(struct kvf_tier *tier, uint16_t tenant, uint64_t record_bytes,
                       kvf_cookie cookie, kvf_location *location_out)
{
    struct hbm_tier *hbm = hbm_of(tier);

    if (!hbm->is_up) {
        return KVF_ERR_BUSY;
    }
    if (!kvf_hbm_fits(tier, record_bytes)) {
        return KVF_ERR_TOO_LARGE;
    }
    return hbm->slots->ops->reserve(hbm->slots, tenant, KVF_HBM_HEAD_BYTES + record_bytes, cookie,
                                    location_out);
}

/* Nothing of a device has an address here. */
static void *hbm_address(struct kvf_tier *tier, kvf_location location)
{
    (void)tier;
    (void)location;
    return NULL;
}

int kvf_hbm_store(struct kvf_tier *tier, struct kvf_tier_io *io, const void *head,
                  size_t head_bytes)
{
    struct hbm_tier *hbm = hbm_of(tier);
    struct hbm_move *move;

    assert(head_bytes <= KVF_HBM_HEAD_BYTES);
    if (!hbm->is_up) {
        return KVF_ERR_TIER_OFF;
    }
    /* half of everything is for what somebody waits for */
    move = hbm->n_moves < KVF_HBM_MOVES_MAX / 2 &&
                   (hbm->n_units_used == 0 || 2 * hbm->n_units_used < hbm->n_units)
               ? move_new(hbm, io, true)
               : NULL;
    if (move == NULL) {
        hbm->stat.busy++;
        return KVF_ERR_BUSY;
    }
    memset(window_at(move), 0, KVF_HBM_HEAD_BYTES - head_bytes);
    memcpy(window_at(move) + KVF_HBM_HEAD_BYTES - head_bytes, head, head_bytes);
    if (move_work(move) != KVF_OK) {
        window_give(hbm, move);
        move->state = MOVE_FREE;
        hbm->n_moves--;
        return KVF_ERR_BUSY;
    }
    hbm->stat.stores++;
    return KVF_OK;
}

static int hbm_load(struct kvf_tier *tier, struct kvf_tier_io *io)
{
    struct hbm_tier *hbm = hbm_of(tier);
    struct hbm_move *move;

    if (!hbm->is_up) {
        return KVF_ERR_TIER_OFF;
    }
    move = move_new(hbm, io, false);
    if (move == NULL) {
        hbm->stat.busy++;
        return KVF_ERR_BUSY;
    }
    hbm->stat.loads++;
    move->copy.done = copy_done;
    move->state = hbm->config.port->ops->copy(hbm->config.port, &move->copy) == KVF_OK
                      ? MOVE_COPYING
                      : MOVE_WAITING;
    return KVF_OK;
}

static void hbm_drop(struct kvf_tier *tier, kvf_location location)
{
    kvf_dram_drop(hbm_of(tier)->slots, location);
}

static unsigned hbm_poll(struct kvf_tier *tier, uint64_t now_ns)
{
    struct hbm_tier *hbm = hbm_of(tier);
    unsigned n;

    hbm->n_callbacks = 0;
    (void)hbm->config.port->ops->poll(hbm->config.port, now_ns);
    moves_retry(hbm);
    n = hbm->slots->ops->poll(hbm->slots, now_ns);
    return n + hbm->n_callbacks;
}

static uint64_t hbm_deadline_ns(const struct kvf_tier *tier)
{
    const struct hbm_tier *hbm = hbm_of_const(tier);
    uint64_t deadline_ns = hbm->slots->ops->deadline_ns(hbm->slots);
    uint64_t port_ns = hbm->config.port->ops->deadline_ns(hbm->config.port);

    for (uint32_t i = 0; hbm->n_moves > 0 && i < KVF_HBM_MOVES_MAX; i++) {
        if (hbm->moves[i].state == MOVE_WAITING) {
            port_ns = 0;
        }
    }
    return port_ns < deadline_ns ? port_ns : deadline_ns;
}

static void hbm_stat(const struct kvf_tier *tier, struct kvf_tier_stat *stat_out)
{
    const struct hbm_tier *hbm = hbm_of_const(tier);
    struct kvf_tier_stat slots;

    hbm->slots->ops->stat(hbm->slots, &slots);
    *stat_out = hbm->stat;
    stat_out->capacity_bytes = slots.capacity_bytes;
    stat_out->stored_bytes = slots.stored_bytes;
    stat_out->stored_blocks = slots.stored_blocks;
    stat_out->area_bytes = slots.area_bytes;
    stat_out->area_stored_bytes = slots.area_stored_bytes;
    stat_out->drops = slots.drops;
    stat_out->evictions = slots.evictions;
    stat_out->queue_depth = hbm->n_moves;
    stat_out->off = !hbm->is_up;
}

const struct kvf_tier_ops kvf_tier_hbm_ops = {
    .abi = KVF_TIER_ABI,
    .flags = KVF_TIER_ADDRESSABLE,
    .name = "hbm",
    .kind = KVF_TIER_HBM,
    .reserve = hbm_reserve,
    .address = hbm_address,
    .load = hbm_load,
    .drop = hbm_drop,
    .poll = hbm_poll,
    .deadline_ns = hbm_deadline_ns,
    .stat = hbm_stat,
    .close = hbm_close,
};
