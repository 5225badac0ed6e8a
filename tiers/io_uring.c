/* SPDX-License-Identifier: Apache-2.0
 *
 * io_uring.c: the two io_uring forms of io.h, with and without fixed buffers.
 *
 *   reactor --submit ring--> I/O thread --sqe--> kernel
 *           <--done ring----            <--cqe--
 *
 * One thread owns one kernel ring, because that lets the kernel skip its locks (SINGLE_ISSUER) and
 * do completion work when we ask for it (DEFER_TASKRUN). While it has nothing to do it waits inside
 * the kernel; a read of an eventfd that is always in flight ends that wait when the reactor has
 * pushed something. Kernels without those flags get a ring without them.
 *
 * A read is checked on this thread, too: handing it to another one costs both of them about as much
 * as the check. Large ones, and the rest of several that have come together, are left to whoever
 * asked for them.
 *
 * Reads go first, and pieces of writes are limited to writes_max, so that a read is not queued
 * behind many MiB of writes.
 */
#include "tiers/io_engine.h"

#include "base/clock.h"
#include "base/fd.h"
#include "base/log.h"
#include "base/ring.h"

#include <assert.h>
#include <errno.h>
#include <liburing.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* An op of our own on the submit ring: buffer and bytes are memory to register. Freed in poll. */
#define OP_REGISTER 255

/* Reads that may wait for their check, and how large they may be: what else is to be issued waits
 * that long, some 100 us a read. The rest is left unchecked. */
#define CHECKS_MAX      2
#define CHECK_BYTES_MAX (2u << 20)

/* Registrations that may be on the rings beside I/Os. */
#define REGISTERS_MAX 64

struct io_list {
    struct kvf_io *first;
    struct kvf_io *last;
};

struct memory_range {
    uint64_t base;
    uint64_t bytes;
    uint32_t slot; /* in the kernel's table */
};

struct io_uring_queue {
    struct kvf_io_queue base;
    struct kvf_io_config config; /* constant */
    bool fixed;                  /* constant */

    /* between the threads */
    struct kvf_ring jobs;
    struct kvf_ring dones;
    int wake_fd;
    _Atomic bool sleeping; /* set by the I/O thread; whoever clears it writes wake_fd */
    _Atomic bool stopping;
    pthread_t thread;
    bool started;
    sem_t ready; /* posted once: the I/O thread has its ring, or ready_error says why not */
    int ready_error;

    /* Owner: the reactor. */
    uint32_t outstanding;
    uint32_t registers_outstanding;

    /* Owner: the I/O thread. */
    struct io_uring ring;
    bool ring_open;
    struct io_list reads, writes, syncs;
    struct kvf_io_piece *pieces; /* config.depth of them */
    struct kvf_io_piece *free_pieces;
    struct kvf_io_piece *again_first, **again_end; /* to be issued again */
    struct io_list checks;                         /* read, not yet checked */
    uint32_t n_checks;
    uint32_t in_flight, writes_in_flight;
    uint64_t wake_value;
    bool wake_armed;
    bool register_failed; /* logged once */
    uint32_t n_ranges, n_free_slots;
    struct memory_range ranges[KVF_IO_RANGES_MAX]; /* by address; none overlap */
    uint32_t free_slots[KVF_IO_RANGES_MAX];
};

static void list_push(struct io_list *list, struct kvf_io *io)
{
    io->next = NULL;
    if (list->first == NULL) {
        list->first = io;
    } else {
        list->last->next = io;
    }
    list->last = io;
}

static void list_pop(struct io_list *list)
{
    list->first = list->first->next;
}

/* --- registered memory (I/O thread) ----------------------------------------------------------- */

/* Into or out of the kernel's table. 0 or an errno. */
static int set_slot(struct io_uring_queue *self, uint32_t slot, void *base, uint64_t bytes)
{
    struct iovec vector = {.iov_base = base, .iov_len = bytes};
    __u64 tag = 0;
    int result = io_uring_register_buffers_update_tag(&self->ring, slot, &vector, &tag, 1);

    return result == 1 ? 0 : result < 0 ? -result : EINVAL;
}

/* The first range that ends behind an address. */
static uint32_t find_range(const struct io_uring_queue *self, uint64_t address)
{
    uint32_t low = 0, high = self->n_ranges;

    while (low < high) {
        uint32_t middle = low + (high - low) / 2;

        if (self->ranges[middle].base + self->ranges[middle].bytes <= address) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static void forget_range(struct io_uring_queue *self, uint32_t i)
{
    set_slot(self, self->ranges[i].slot, NULL, 0);
    self->free_slots[self->n_free_slots++] = self->ranges[i].slot;
    self->n_ranges--;
    memmove(&self->ranges[i], &self->ranges[i + 1], (self->n_ranges - i) * sizeof(self->ranges[0]));
}

static void refuse_range(struct io_uring_queue *self, uint64_t bytes, int error)
{
    if (!self->register_failed) {
        self->register_failed = true;
        kvf_log(
            KVF_LOG_WARNING,
            "io_uring: cannot register %llu KiB of memory (%s): I/O there takes the slower way; "
            "raise the limit of locked memory (memlock)",
            (unsigned long long)(bytes >> 10), strerror(error));
    }
}

/* Registrations that overlap the new one belong to memory that is no longer mapped there. */
static void register_range(struct io_uring_queue *self, const struct kvf_io *io)
{
    uint64_t base = (uint64_t)(uintptr_t)io->buffer;
    uint64_t end = base + (io->bytes == 0 ? 1 : io->bytes);
    uint32_t i = find_range(self, base);
    int error;

    while (i < self->n_ranges && self->ranges[i].base < end) {
        forget_range(self, i);
    }
    if (io->bytes == 0) {
        return;
    }
    error = self->n_free_slots == 0
                ? ENOSPC
                : set_slot(self, self->free_slots[self->n_free_slots - 1], io->buffer, io->bytes);
    if (error != 0) {
        refuse_range(self, io->bytes, error);
        return;
    }
    memmove(&self->ranges[i + 1], &self->ranges[i], (self->n_ranges - i) * sizeof(self->ranges[0]));
    self->n_ranges++;
    self->ranges[i] = (struct memory_range){
        .base = base, .bytes = io->bytes, .slot = self->free_slots[--self->n_free_slots]};
}

/* The slot that holds all of a buffer, or -1. */
static int find_slot(const struct io_uring_queue *self, const void *buffer, uint64_t bytes)
{
    uint64_t base = (uint64_t)(uintptr_t)buffer;
    uint32_t i = find_range(self, base);
    const struct memory_range *range = &self->ranges[i];

    if (i == self->n_ranges || base < range->base || bytes > range->bytes - (base - range->base)) {
        return -1;
    }
    return (int)range->slot;
}

/* --- issue (I/O thread) ----------------------------------------------------------------------- */

static void push_done(struct io_uring_queue *self, struct kvf_io *io)
{
    bool pushed = kvf_ring_push(&self->dones, &io);

    assert(pushed); /* the ring has room for everything outstanding */
    (void)pushed;
    if (self->config.waker.wake != NULL) {
        self->config.waker.wake(self->config.waker.ctx);
    }
}

static struct io_list *list_of(struct io_uring_queue *self, const struct kvf_io *io)
{
    switch (io->op) {
    case KVF_IO_READ:
        return &self->reads;
    case KVF_IO_WRITE:
        return &self->writes;
    default:
        return &self->syncs;
    }
}

static void piece_result(struct io_uring_queue *self, struct kvf_io_piece *piece, int result)
{
    struct kvf_io *io = piece->io;

    if (!kvf_io_piece_step(piece, result)) {
        piece->next = NULL;
        *self->again_end = piece;
        self->again_end = &piece->next;
        return;
    }
    self->in_flight--;
    self->writes_in_flight -= io->op == KVF_IO_WRITE;
    if (kvf_io_piece_finish(piece)) {
        /* one that failed before it was cut up is still the first of its list */
        struct io_list *list = list_of(self, io);

        if (list->first == io) {
            list_pop(list);
        }
        if (kvf_io_wants_check(io) && io->bytes <= CHECK_BYTES_MAX && self->n_checks < CHECKS_MAX) {
            self->n_checks++;
            list_push(&self->checks, io);
        } else {
            push_done(self, io);
        }
    }
    piece->next = self->free_pieces;
    self->free_pieces = piece;
}

static void prepare_sqe(struct io_uring_queue *self, struct io_uring_sqe *sqe,
                        const struct kvf_io_piece *piece)
{
    struct kvf_io *io = piece->io;
    char *buffer = kvf_io_piece_buffer(piece);
    uint64_t offset = io->offset + piece->offset;
    unsigned bytes = (unsigned)piece->bytes;
    int slot = self->fixed && io->op != KVF_IO_SYNC ? find_slot(self, buffer, bytes) : -1;

    if (io->op == KVF_IO_SYNC) {
        io_uring_prep_fsync(sqe, self->config.fd, IORING_FSYNC_DATASYNC);
    } else if (io->op == KVF_IO_READ && slot >= 0) {
        io_uring_prep_read_fixed(sqe, self->config.fd, buffer, bytes, offset, slot);
    } else if (io->op == KVF_IO_READ) {
        io_uring_prep_read(sqe, self->config.fd, buffer, bytes, offset);
    } else if (slot >= 0) {
        io_uring_prep_write_fixed(sqe, self->config.fd, buffer, bytes, offset, slot);
    } else {
        io_uring_prep_write(sqe, self->config.fd, buffer, bytes, offset);
    }
}

/* The kernel's queue has room for every piece and the wake-up, so a free entry is always there once
 * what is in it has been submitted. */
static struct io_uring_sqe *next_sqe(struct io_uring_queue *self)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&self->ring);

    while (sqe == NULL) {
        io_uring_submit(&self->ring);
        sqe = io_uring_get_sqe(&self->ring);
    }
    return sqe;
}

static void issue_piece(struct io_uring_queue *self, struct kvf_io_piece *piece)
{
    int fault = kvf_io_piece_fault(piece);
    struct io_uring_sqe *sqe;

    if (fault != 0) {
        piece_result(self, piece, -fault);
        return;
    }
    sqe = next_sqe(self);
    prepare_sqe(self, sqe, piece);
    io_uring_sqe_set_data(sqe, piece);
}

static void issue_again(struct io_uring_queue *self)
{
    struct kvf_io_piece *piece = self->again_first;

    self->again_first = NULL;
    self->again_end = &self->again_first;
    while (piece != NULL) {
        struct kvf_io_piece *next = piece->next;

        issue_piece(self, piece);
        piece = next;
    }
}

/* Cut pieces off the first I/O of a list while there are free ones. */
static void issue_list(struct io_uring_queue *self, struct io_list *list, uint32_t writes_max)
{
    while (list->first != NULL && self->free_pieces != NULL) {
        struct kvf_io *io = list->first;
        struct kvf_io_piece *piece = self->free_pieces;

        if (io->op == KVF_IO_WRITE && self->writes_in_flight >= writes_max) {
            return;
        }
        if (!kvf_io_has_piece(io)) {
            /* failed meanwhile: the last piece in flight finishes it */
            list_pop(list);
            continue;
        }
        self->free_pieces = piece->next;
        kvf_io_cut_piece(io, self->config.write_bytes_max, piece);
        self->in_flight++;
        self->writes_in_flight += io->op == KVF_IO_WRITE;
        if (!kvf_io_has_piece(io)) {
            list_pop(list);
        }
        issue_piece(self, piece);
    }
}

static void take_jobs(struct io_uring_queue *self)
{
    struct kvf_io *io;

    while (kvf_ring_pop(&self->jobs, &io)) {
        if (io->op == OP_REGISTER) {
            register_range(self, io);
            push_done(self, io);
        } else {
            list_push(list_of(self, io), io);
        }
    }
}

/* --- the I/O thread --------------------------------------------------------------------------- */

static unsigned reap(struct io_uring_queue *self)
{
    struct io_uring_cqe *cqe;
    unsigned head, n = 0;

    io_uring_for_each_cqe(&self->ring, head, cqe)
    {
        struct kvf_io_piece *piece = io_uring_cqe_get_data(cqe);

        n++;
        if (piece == NULL) {
            self->wake_armed = false;
        } else {
            piece_result(self, piece, cqe->res);
        }
    }
    io_uring_cq_advance(&self->ring, n);
    return n;
}

static void arm_wake(struct io_uring_queue *self)
{
    struct io_uring_sqe *sqe;

    if (self->wake_armed) {
        return;
    }
    sqe = next_sqe(self);
    io_uring_prep_read(sqe, self->wake_fd, &self->wake_value, sizeof(self->wake_value), 0);
    io_uring_sqe_set_data(sqe, NULL);
    self->wake_armed = true;
}

/* Give the kernel what is prepared and wait for a completion, unless there is something to do. */
static void submit_and_wait(struct io_uring_queue *self)
{
    bool sleep;

    if (self->checks.first != NULL) {
        io_uring_submit(&self->ring); /* the drive works while the check does */
        return;
    }
    arm_wake(self);
    /* seq_cst, with the exchange in wake_thread: either the reactor sees the flag, or we see what
     * it pushed before it looked. If it took the flag, its wake-up ends the next wait. */
    atomic_store(&self->sleeping, true);
    sleep = kvf_ring_is_empty(&self->jobs) && !atomic_load(&self->stopping) &&
            self->again_first == NULL;
    io_uring_submit_and_wait(&self->ring, sleep ? 1 : 0);
    atomic_store(&self->sleeping, false);
    if (!sleep) {
        io_uring_get_events(&self->ring); /* completion work is done when asked for */
    }
}

static void check_next(struct io_uring_queue *self)
{
    struct kvf_io *io = self->checks.first;

    if (io != NULL) {
        list_pop(&self->checks);
        self->n_checks--;
        io->check(io);
        io->is_checked = true;
        push_done(self, io);
    }
}

static bool is_idle(const struct io_uring_queue *self)
{
    return self->in_flight == 0 && self->n_checks == 0 && self->reads.first == NULL &&
           self->writes.first == NULL && self->syncs.first == NULL &&
           kvf_ring_is_empty(&self->jobs);
}

static int open_ring(struct io_uring_queue *self)
{
    static const unsigned flags[] = {
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_SUBMIT_ALL,
        IORING_SETUP_COOP_TASKRUN | IORING_SETUP_SUBMIT_ALL,
        0,
    };
    int result = -EINVAL;

    for (size_t i = 0; i < sizeof(flags) / sizeof(flags[0]) && result == -EINVAL; i++) {
        /* one entry for the wake-up and one to spare */
        result = io_uring_queue_init(self->config.depth + 2, &self->ring, flags[i]);
    }
    if (result != 0) {
        return -result;
    }
    self->ring_open = true;
    result = self->fixed ? io_uring_register_buffers_sparse(&self->ring, KVF_IO_RANGES_MAX) : 0;
    return result < 0 ? -result : 0;
}

static void *uring_main(void *arg)
{
    struct io_uring_queue *self = arg;

    kvf_ring_bind_consumer(&self->jobs);
    kvf_ring_bind_producer(&self->dones);
    self->ready_error = open_ring(self);
    sem_post(&self->ready);
    while (self->ready_error == 0) {
        take_jobs(self);
        issue_again(self);
        issue_list(self, &self->reads, 0);
        issue_list(self, &self->syncs, 0);
        issue_list(self, &self->writes, self->config.writes_max);
        if (atomic_load(&self->stopping) && is_idle(self)) {
            break;
        }
        submit_and_wait(self);
        check_next(self);
        reap(self);
    }
    if (self->ring_open) {
        io_uring_queue_exit(&self->ring);
    }
    return NULL;
}

/* --- the reactor's side ----------------------------------------------------------------------- */

static void wake_uring(struct io_uring_queue *self)
{
    uint64_t one = 1;

    /* seq_cst: see submit_and_wait */
    if (atomic_exchange(&self->sleeping, false)) {
        ssize_t written = write(self->wake_fd, &one, sizeof(one));

        assert(written == (ssize_t)sizeof(one));
        (void)written;
    }
}

static int uring_submit(struct kvf_io_queue *queue, struct kvf_io *io)
{
    struct io_uring_queue *self = (struct io_uring_queue *)queue;

    if (self->outstanding == self->config.queue_entries) {
        return KVF_ERR_BUSY;
    }
    kvf_io_begin(io);
    if (!kvf_ring_push(&self->jobs, &io)) {
        return KVF_ERR_BUSY;
    }
    self->outstanding++;
    wake_uring(self);
    return KVF_OK;
}

static unsigned uring_poll(struct kvf_io_queue *queue)
{
    struct io_uring_queue *self = (struct io_uring_queue *)queue;
    struct kvf_io *io;
    unsigned n_done = 0;

    while (kvf_ring_pop(&self->dones, &io)) {
        if (io->op == OP_REGISTER) {
            self->registers_outstanding--;
            free(io);
            continue;
        }
        self->outstanding--;
        n_done++;
        io->done(io);
    }
    return n_done;
}

static int uring_register_memory(struct kvf_io_queue *queue, void *base, uint64_t bytes)
{
    struct io_uring_queue *self = (struct io_uring_queue *)queue;
    struct kvf_io *io;

    if (!self->fixed) {
        return KVF_OK;
    }
    if (self->registers_outstanding == REGISTERS_MAX) {
        return KVF_ERR_BUSY;
    }
    io = calloc(1, sizeof(*io));
    if (io == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    io->op = OP_REGISTER;
    io->buffer = base;
    io->bytes = bytes;
    if (!kvf_ring_push(&self->jobs, &io)) {
        free(io);
        return KVF_ERR_BUSY;
    }
    self->registers_outstanding++;
    wake_uring(self);
    return KVF_OK;
}

bool kvf_io_uring_register_failed(const struct kvf_io_queue *queue)
{
    const struct io_uring_queue *self = (const struct io_uring_queue *)queue;

    return self->register_failed;
}

static void uring_close(struct kvf_io_queue *queue)
{
    struct io_uring_queue *self = (struct io_uring_queue *)queue;
    struct kvf_io *io;

    if (self == NULL) {
        return;
    }
    if (self->started) {
        atomic_store(&self->stopping, true);
        wake_uring(self);
        pthread_join(self->thread, NULL);
    }
    while (self->dones.entries != NULL && kvf_ring_pop(&self->dones, &io)) {
        if (io->op == OP_REGISTER) {
            free(io);
        }
    }
    kvf_fd_close(&self->wake_fd);
    kvf_ring_fini(&self->jobs);
    kvf_ring_fini(&self->dones);
    sem_destroy(&self->ready);
    free(self->pieces);
    free(self);
}

static const struct kvf_io_ops uring_ops = {
    .name = "io_uring",
    .submit = uring_submit,
    .poll = uring_poll,
    .register_memory = uring_register_memory,
    .close = uring_close,
};

static const struct kvf_io_ops uring_fixed_ops = {
    .name = "io_uring-fixed",
    .submit = uring_submit,
    .poll = uring_poll,
    .register_memory = uring_register_memory,
    .close = uring_close,
};

static int init_queue(struct io_uring_queue *self, const struct kvf_io_config *config, bool fixed)
{
    uint32_t entries = config->queue_entries + REGISTERS_MAX;

    self->base.ops = fixed ? &uring_fixed_ops : &uring_ops;
    self->config = *config;
    self->fixed = fixed;
    self->again_end = &self->again_first;
    while (self->n_free_slots < KVF_IO_RANGES_MAX) {
        self->free_slots[self->n_free_slots] = KVF_IO_RANGES_MAX - 1 - self->n_free_slots;
        self->n_free_slots++;
    }
    sem_init(&self->ready, 0, 0);
    self->wake_fd = eventfd(0, EFD_CLOEXEC);
    self->pieces = calloc(config->depth, sizeof(*self->pieces));
    if (self->wake_fd < 0 || self->pieces == NULL ||
        kvf_ring_init(&self->jobs, sizeof(struct kvf_io *), entries) ||
        kvf_ring_init(&self->dones, sizeof(struct kvf_io *), entries)) {
        return KVF_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < config->depth; i++) {
        self->pieces[i].next = self->free_pieces;
        self->free_pieces = &self->pieces[i];
    }
    return KVF_OK;
}

static int start_uring(struct io_uring_queue *self)
{
    sigset_t all, before;
    int error;

    /* signals are the main thread's business */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(&self->thread, NULL, uring_main, self);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0) {
        return error;
    }
    self->started = true;
    pthread_setname_np(self->thread, "kvf-io-uring");
    while (sem_wait(&self->ready) != 0) {
    }
    return self->ready_error;
}

int kvf_io_uring_open(const struct kvf_io_config *config, bool fixed,
                      struct kvf_io_queue **queue_out, char *why_out, size_t why_bytes)
{
    struct io_uring_queue *self = aligned_alloc(KVF_CACHE_LINE_BYTES, sizeof(*self));
    const char *name = fixed ? uring_fixed_ops.name : uring_ops.name;
    int status = KVF_ERR_NO_MEMORY;
    int error;

    if (self == NULL) {
        snprintf(why_out, why_bytes, "%s: %s", name, kvf_status_text(status));
        return status;
    }
    memset(self, 0, sizeof(*self));
    status = init_queue(self, config, fixed);
    if (status != KVF_OK) {
        snprintf(why_out, why_bytes, "%s: %s", name, kvf_status_text(status));
        goto fail;
    }
    error = start_uring(self);
    if (error != 0) {
        status = KVF_ERR_UNSUPPORTED;
        snprintf(why_out, why_bytes, "%s: %s%s", name, strerror(error),
                 error == EPERM || error == ENOSYS
                     ? " (blocked by a seccomp profile or kernel.io_uring_disabled)"
                     : "");
        goto fail;
    }
    *queue_out = &self->base;
    return KVF_OK;

fail:
    uring_close(&self->base);
    return status;
}
