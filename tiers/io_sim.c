/* SPDX-License-Identifier: Apache-2.0
 *
 * io_sim.c: the drive in memory.
 *
 *   image     what reads see
 *   stable    what a crash cannot take away
 *   writes    what is in image and not yet in stable, in the order it was completed
 */
#include "tiers/io_sim.h"

#include "base/limits.h"
#include "base/random.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define SECTOR_BYTES 512

/* kvf_io.private_word */
enum word {
    WORD_DUE_NS = 0,
    WORD_SERIAL = 1, /* of the last write completed before a sync was submitted */
    WORD_FAIL = 2,   /* by kvf_io_sim_fail_at or after a crash */
};

struct sim_write {
    struct sim_write *next;
    uint64_t serial;
    uint64_t offset;
    uint64_t bytes;
    bool doomed; /* a sync has failed over it: no later one makes it stable */
    uint8_t data[];
};

struct sim_queue {
    struct kvf_io_queue base;
    struct kvf_io_sim_disk *disk;
    struct kvf_io *first; /* by time due */
    uint32_t n;
};

struct kvf_io_sim_disk {
    struct kvf_io_sim_config config;
    uint8_t *image;
    uint8_t *stable;
    struct kvf_random_seeded random;
    uint64_t now_ns;
    struct sim_write *writes, **writes_end;
    uint64_t serial;
    uint64_t io_count, fault_count;
    uint64_t crash_at, fail_first, fail_end; /* in terms of io_count */
    bool crashed;
    bool exposed; /* the owner may have changed image */
    struct sim_queue *queue;
};

void kvf_io_sim_config_init(struct kvf_io_sim_config *config)
{
    *config = (struct kvf_io_sim_config){
        .capacity_bytes = 64u << 20,
        .seed = 1,
        .latency_min_ns = 10000,
        .latency_max_ns = 100000,
        .queue_entries = 256,
    };
}

static uint64_t below(struct kvf_io_sim_disk *disk, uint64_t end)
{
    return end == 0 ? 0 : kvf_random_seeded_next(&disk->random) % end;
}

static bool strikes(struct kvf_io_sim_disk *disk, uint32_t one_in)
{
    if (one_in == 0 || below(disk, one_in) != 0) {
        return false;
    }
    disk->fault_count++;
    return true;
}

int kvf_io_sim_disk_create(const struct kvf_io_sim_config *config,
                           struct kvf_io_sim_disk **disk_out)
{
    struct kvf_io_sim_disk *disk;

    if (config->capacity_bytes == 0 || config->capacity_bytes % KVF_PAGE_BYTES != 0 ||
        config->latency_max_ns < config->latency_min_ns || config->queue_entries == 0) {
        return KVF_ERR_INVALID;
    }
    disk = calloc(1, sizeof(*disk));
    if (disk == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    disk->config = *config;
    disk->writes_end = &disk->writes;
    disk->image = calloc(1, config->capacity_bytes);
    disk->stable = calloc(1, config->capacity_bytes);
    if (disk->image == NULL || disk->stable == NULL) {
        kvf_io_sim_disk_destroy(disk);
        return KVF_ERR_NO_MEMORY;
    }
    kvf_random_seeded_init(&disk->random, config->seed);
    *disk_out = disk;
    return KVF_OK;
}

static void forget_writes(struct kvf_io_sim_disk *disk)
{
    while (disk->writes != NULL) {
        struct sim_write *write = disk->writes;

        disk->writes = write->next;
        free(write);
    }
    disk->writes_end = &disk->writes;
}

void kvf_io_sim_disk_destroy(struct kvf_io_sim_disk *disk)
{
    if (disk == NULL) {
        return;
    }
    assert(disk->queue == NULL);
    forget_writes(disk);
    free(disk->image);
    free(disk->stable);
    free(disk);
}

/* Change the image, where data may lie, and remember the write until it is stable. Out of memory:
 * at once stable. */
static void apply_write(struct kvf_io_sim_disk *disk, uint64_t offset, const void *data,
                        uint64_t bytes)
{
    struct sim_write *write = malloc(sizeof(*write) + bytes);

    disk->serial++;
    memmove(disk->image + offset, data, bytes);
    if (write == NULL) {
        memcpy(disk->stable + offset, data, bytes);
        return;
    }
    *write = (struct sim_write){.serial = disk->serial, .offset = offset, .bytes = bytes};
    memcpy(write->data, data, bytes);
    *disk->writes_end = write;
    disk->writes_end = &write->next;
}

/* Some sectors of data at offset, chosen at random, others as they are in to. */
static void tear(struct kvf_io_sim_disk *disk, uint8_t *to, uint64_t offset, const uint8_t *data,
                 uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i += SECTOR_BYTES) {
        if (below(disk, 2) == 0) {
            memcpy(to + offset + i, data + i, SECTOR_BYTES);
        }
    }
}

static void survive_or_not(struct kvf_io_sim_disk *disk, uint64_t offset, const uint8_t *data,
                           uint64_t bytes)
{
    switch (below(disk, 3)) {
    case 0:
        memcpy(disk->image + offset, data, bytes);
        break;
    case 1:
        tear(disk, disk->image, offset, data, bytes);
        break;
    default:
        break;
    }
}

void kvf_io_sim_crash(struct kvf_io_sim_disk *disk)
{
    if (disk->crashed) {
        return;
    }
    disk->crashed = true;
    disk->crash_at = 0;
    memcpy(disk->image, disk->stable, disk->config.capacity_bytes);
    for (struct sim_write *write = disk->writes; write != NULL; write = write->next) {
        survive_or_not(disk, write->offset, write->data, write->bytes);
    }
    for (struct kvf_io *io = disk->queue == NULL ? NULL : disk->queue->first; io != NULL;
         io = io->next) {
        if (io->op == KVF_IO_WRITE && io->private_word[WORD_FAIL] == 0) {
            survive_or_not(disk, io->offset, io->buffer, io->bytes);
        }
        io->private_word[WORD_FAIL] = 1;
    }
    forget_writes(disk);
    memcpy(disk->stable, disk->image, disk->config.capacity_bytes);
}

static void do_read(struct kvf_io_sim_disk *disk, struct kvf_io *io)
{
    if (strikes(disk, disk->config.faults.read_error)) {
        io->error = EIO;
        return;
    }
    memcpy(io->buffer, disk->image + io->offset, io->bytes);
    if (strikes(disk, disk->config.faults.read_flip)) {
        ((uint8_t *)io->buffer)[below(disk, io->bytes)] ^= (uint8_t)(1u << below(disk, 8));
    }
}

static void do_write(struct kvf_io_sim_disk *disk, struct kvf_io *io)
{
    const struct kvf_io_sim_faults *faults = &disk->config.faults;
    uint64_t offset = io->offset;

    if (strikes(disk, faults->write_error)) {
        io->error = EIO;
        return;
    }
    if (strikes(disk, faults->write_no_space)) {
        io->error = ENOSPC;
        return;
    }
    if (strikes(disk, faults->write_lost)) {
        return;
    }
    if (strikes(disk, faults->write_misdirected)) {
        offset = below(disk, (disk->config.capacity_bytes - io->bytes) / KVF_PAGE_BYTES + 1) *
                 KVF_PAGE_BYTES;
    }
    if (strikes(disk, faults->write_torn)) {
        tear(disk, disk->image, offset, io->buffer, io->bytes);
        apply_write(disk, offset, disk->image + offset, io->bytes);
        return;
    }
    apply_write(disk, offset, io->buffer, io->bytes);
    if (strikes(disk, faults->write_flip)) {
        uint64_t at = offset + below(disk, io->bytes);
        uint64_t sector = at - at % SECTOR_BYTES;

        disk->image[at] ^= (uint8_t)(1u << below(disk, 8));
        apply_write(disk, sector, disk->image + sector, SECTOR_BYTES);
    }
}

/* What is stable cannot be undone by what was written there before: older writes that may still
 * reach the drive (or not) bring the newer bytes along. */
static void overlay(struct sim_write *older, const struct sim_write *write)
{
    for (; older != write; older = older->next) {
        uint64_t begin = older->offset > write->offset ? older->offset : write->offset;
        uint64_t older_end = older->offset + older->bytes;
        uint64_t end = write->offset + write->bytes;

        end = end < older_end ? end : older_end;
        if (begin < end) {
            memcpy(older->data + (begin - older->offset), write->data + (begin - write->offset),
                   end - begin);
        }
    }
}

static void do_sync(struct kvf_io_sim_disk *disk, struct kvf_io *io)
{
    struct sim_write **link = &disk->writes;
    bool failed = strikes(disk, disk->config.faults.sync_error);

    while (*link != NULL && (*link)->serial <= io->private_word[WORD_SERIAL]) {
        struct sim_write *write = *link;

        if (failed) {
            write->doomed = true;
        }
        if (write->doomed) {
            link = &write->next;
            continue;
        }
        memcpy(disk->stable + write->offset, write->data, write->bytes);
        overlay(disk->writes, write);
        *link = write->next;
        free(write);
    }
    disk->writes_end = &disk->writes;
    while (*disk->writes_end != NULL) {
        disk->writes_end = &(*disk->writes_end)->next;
    }
    io->error = failed ? EIO : 0;
}

static void complete(struct kvf_io_sim_disk *disk, struct kvf_io *io)
{
    io->error = 0;
    if (io->private_word[WORD_FAIL] != 0) {
        io->error = EIO;
    } else if (io->op == KVF_IO_READ) {
        do_read(disk, io);
    } else if (io->op == KVF_IO_WRITE) {
        do_write(disk, io);
    } else {
        do_sync(disk, io);
    }
    io->status = io->error == 0 ? KVF_OK : io->error == ENOSPC ? KVF_ERR_NO_SPACE : KVF_ERR_IO;
}

static int sim_submit(struct kvf_io_queue *queue, struct kvf_io *io)
{
    struct sim_queue *self = (struct sim_queue *)queue;
    struct kvf_io_sim_disk *disk = self->disk;
    const struct kvf_io_sim_config *config = &disk->config;
    struct kvf_io **link = &self->first;

    assert(
        io->op == KVF_IO_SYNC ||
        (io->bytes > 0 && (io->bytes | io->offset | (uintptr_t)io->buffer) % KVF_PAGE_BYTES == 0 &&
         io->offset <= config->capacity_bytes && io->bytes <= config->capacity_bytes - io->offset));
    if (self->n == config->queue_entries) {
        return KVF_ERR_BUSY;
    }
    disk->io_count++;
    if (disk->io_count == disk->crash_at) {
        kvf_io_sim_crash(disk);
    }
    io->latency_ns = config->latency_min_ns +
                     below(disk, config->latency_max_ns - config->latency_min_ns + 1);
    io->private_word[WORD_DUE_NS] = disk->now_ns + io->latency_ns;
    io->private_word[WORD_SERIAL] = disk->serial;
    io->private_word[WORD_FAIL] = disk->crashed || (disk->io_count >= disk->fail_first &&
                                                    disk->io_count < disk->fail_end);
    while (*link != NULL && (*link)->private_word[WORD_DUE_NS] <= io->private_word[WORD_DUE_NS]) {
        link = &(*link)->next;
    }
    io->next = *link;
    *link = io;
    self->n++;
    return KVF_OK;
}

static unsigned sim_poll(struct kvf_io_queue *queue)
{
    struct sim_queue *self = (struct sim_queue *)queue;
    unsigned n_done = 0;

    while (self->first != NULL && self->first->private_word[WORD_DUE_NS] <= self->disk->now_ns) {
        struct kvf_io *io = self->first;

        self->first = io->next;
        self->n--;
        n_done++;
        complete(self->disk, io);
        io->done(io);
    }
    return n_done;
}

static int sim_register_memory(struct kvf_io_queue *queue, void *base, uint64_t bytes)
{
    (void)queue;
    (void)base;
    (void)bytes;
    return KVF_OK;
}

static void sim_close(struct kvf_io_queue *queue)
{
    struct sim_queue *self = (struct sim_queue *)queue;

    if (self == NULL) {
        return;
    }
    for (struct kvf_io *io = self->first; io != NULL; io = io->next) {
        if (io->op == KVF_IO_WRITE && io->private_word[WORD_FAIL] == 0 &&
            below(self->disk, 2) == 0) {
            apply_write(self->disk, io->offset, io->buffer, io->bytes);
        }
    }
    self->disk->queue = NULL;
    free(self);
}

static const struct kvf_io_ops sim_ops = {
    .name = "sim",
    .submit = sim_submit,
    .poll = sim_poll,
    .register_memory = sim_register_memory,
    .close = sim_close,
};

int kvf_io_sim_open(struct kvf_io_sim_disk *disk, struct kvf_io_queue **queue_out)
{
    struct sim_queue *self;

    if (disk->queue != NULL) {
        return KVF_ERR_BUSY;
    }
    self = calloc(1, sizeof(*self));
    if (self == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    if (disk->exposed) {
        memcpy(disk->stable, disk->image, disk->config.capacity_bytes);
        disk->exposed = false;
    }
    self->base.ops = &sim_ops;
    self->base.capacity_bytes = disk->config.capacity_bytes;
    self->base.is_device = true;
    self->disk = disk;
    disk->queue = self;
    disk->crashed = false;
    *queue_out = &self->base;
    return KVF_OK;
}

uint64_t kvf_io_sim_now_ns(const struct kvf_io_sim_disk *disk)
{
    return disk->now_ns;
}

void kvf_io_sim_advance(struct kvf_io_sim_disk *disk, uint64_t now_ns)
{
    assert(now_ns >= disk->now_ns);
    disk->now_ns = now_ns;
}

uint64_t kvf_io_sim_next_ns(const struct kvf_io_sim_disk *disk)
{
    return disk->queue == NULL || disk->queue->first == NULL
               ? UINT64_MAX
               : disk->queue->first->private_word[WORD_DUE_NS];
}

void kvf_io_sim_crash_at(struct kvf_io_sim_disk *disk, uint64_t n)
{
    disk->crash_at = n == 0 ? 0 : disk->io_count + n;
}

bool kvf_io_sim_is_crashed(const struct kvf_io_sim_disk *disk)
{
    return disk->crashed;
}

void kvf_io_sim_fail_at(struct kvf_io_sim_disk *disk, uint64_t n, uint64_t count)
{
    disk->fail_first = n == 0 ? 0 : disk->io_count + n;
    disk->fail_end = n == 0 ? 0 : disk->fail_first + count;
}

void kvf_io_sim_set_faults(struct kvf_io_sim_disk *disk, const struct kvf_io_sim_faults *faults)
{
    disk->config.faults = *faults;
}

uint64_t kvf_io_sim_count(const struct kvf_io_sim_disk *disk)
{
    return disk->io_count;
}

uint64_t kvf_io_sim_fault_count(const struct kvf_io_sim_disk *disk)
{
    return disk->fault_count;
}

uint8_t *kvf_io_sim_bytes(struct kvf_io_sim_disk *disk)
{
    assert(disk->queue == NULL);
    forget_writes(disk);
    disk->exposed = true;
    return disk->image;
}

int kvf_io_sim_resize(struct kvf_io_sim_disk *disk, uint64_t capacity_bytes)
{
    uint64_t shared_bytes = disk->config.capacity_bytes;
    uint8_t *image, *stable;

    assert(disk->queue == NULL);
    if (capacity_bytes == 0 || capacity_bytes % KVF_PAGE_BYTES != 0) {
        return KVF_ERR_INVALID;
    }
    image = calloc(1, capacity_bytes);
    stable = calloc(1, capacity_bytes);
    if (image == NULL || stable == NULL) {
        free(image);
        free(stable);
        return KVF_ERR_NO_MEMORY;
    }
    if (capacity_bytes < shared_bytes) {
        shared_bytes = capacity_bytes;
    }
    memcpy(image, kvf_io_sim_bytes(disk), shared_bytes);
    free(disk->image);
    free(disk->stable);
    disk->image = image;
    disk->stable = stable;
    disk->config.capacity_bytes = capacity_bytes;
    return KVF_OK;
}
