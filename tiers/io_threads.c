/* SPDX-License-Identifier: Apache-2.0
 *
 * io_threads.c: the form of io.h that works everywhere: threads that call preadv2 and pwritev2.
 *
 *   reactor --ring--> thread 0..W-1   writes and syncs
 *           --ring--> thread W..T-1   reads
 *           <--ring-- each
 *
 * Each thread has a pair of rings of its own, so that nobody locks; the reactor gives an I/O to the
 * thread of its kind that has the fewest bytes to do. Reads have threads of their own: behind a
 * write of some MiB they would wait for milliseconds.
 */
#include "tiers/io_engine.h"

#include "base/clock.h"
#include "base/fd.h"
#include "base/log.h"
#include "base/ring.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

struct io_threads;

struct io_thread {
    struct io_threads *pool;
    struct kvf_ring jobs;  /* struct kvf_io *, from the reactor */
    struct kvf_ring dones; /* struct kvf_io *, to the reactor */
    int wake_fd;
    _Atomic bool sleeping; /* set by the thread; whoever clears it writes wake_fd */
    pthread_t thread;
    bool started;
    uint64_t queued_bytes; /* owner: the reactor */
};

/* Owner: the reactor, but for config (constant) and stopping. */
struct io_threads {
    struct kvf_io_queue base;
    struct kvf_io_config config;
    uint32_t n_threads, n_writers;
    uint32_t outstanding;
    _Atomic bool stopping;
    struct io_thread threads[KVF_IO_THREADS_MAX];
};

static int64_t run_piece(const struct io_threads *self, const struct kvf_io_piece *piece)
{
    const struct kvf_io *io = piece->io;
    struct iovec vector = {.iov_base = kvf_io_piece_buffer(piece), .iov_len = piece->bytes};
    off_t offset = (off_t)(io->offset + piece->offset);
    int fault = kvf_io_piece_fault(piece);
    ssize_t result;

    if (fault != 0) {
        return -fault;
    }
    switch (io->op) {
    case KVF_IO_READ:
        result = preadv2(self->config.fd, &vector, 1, offset, 0);
        break;
    case KVF_IO_WRITE:
        result = pwritev2(self->config.fd, &vector, 1, offset, 0);
        break;
    default:
        result = fdatasync(self->config.fd);
        break;
    }
    return result < 0 ? -errno : result;
}

static void run_io(struct io_threads *self, struct kvf_io *io)
{
    struct kvf_io_piece piece;
    bool finished = false;

    while (!finished) {
        kvf_io_cut_piece(io, self->config.write_bytes_max, &piece);
        while (!kvf_io_piece_step(&piece, run_piece(self, &piece))) {
        }
        finished = kvf_io_piece_finish(&piece);
    }
}

/* Sleep until the reactor has pushed something or wants the thread to end. */
static void wait_for_jobs(struct io_thread *thread)
{
    uint64_t value;

    /* seq_cst, with the exchange in wake_thread: either the reactor sees the flag, or we see what
     * it pushed before it looked. */
    atomic_store(&thread->sleeping, true);
    if (!kvf_ring_is_empty(&thread->jobs) || atomic_load(&thread->pool->stopping)) {
        if (atomic_exchange(&thread->sleeping, false)) {
            return;
        }
        /* the reactor took the flag: its wake-up is on the way and must not be left over */
    }
    while (read(thread->wake_fd, &value, sizeof(value)) < 0 && errno == EINTR) {
    }
}

static void *thread_main(void *arg)
{
    struct io_thread *thread = arg;
    struct io_threads *self = thread->pool;
    struct kvf_io *io;

    kvf_ring_bind_consumer(&thread->jobs);
    kvf_ring_bind_producer(&thread->dones);
    while (true) {
        if (kvf_ring_pop(&thread->jobs, &io)) {
            bool pushed;

            run_io(self, io);
            if (kvf_io_wants_check(io)) {
                io->check(io);
                io->is_checked = true;
            }
            pushed = kvf_ring_push(&thread->dones, &io);
            assert(pushed); /* the ring has room for everything outstanding */
            (void)pushed;
            if (self->config.waker.wake != NULL) {
                self->config.waker.wake(self->config.waker.ctx);
            }
        } else if (atomic_load(&self->stopping)) {
            return NULL;
        } else {
            wait_for_jobs(thread);
        }
    }
}

static void wake_thread(struct io_thread *thread)
{
    uint64_t one = 1;

    /* seq_cst: see wait_for_jobs */
    if (atomic_exchange(&thread->sleeping, false)) {
        ssize_t written = write(thread->wake_fd, &one, sizeof(one));

        assert(written == (ssize_t)sizeof(one));
        (void)written;
    }
}

static struct io_thread *choose_thread(struct io_threads *self, const struct kvf_io *io)
{
    bool is_read = io->op == KVF_IO_READ;
    uint32_t first = is_read && self->n_threads > self->n_writers ? self->n_writers : 0;
    uint32_t end = is_read ? self->n_threads : self->n_writers;
    struct io_thread *best = &self->threads[first];

    for (uint32_t i = first + 1; i < end; i++) {
        if (self->threads[i].queued_bytes < best->queued_bytes) {
            best = &self->threads[i];
        }
    }
    return best;
}

/* What a job weighs when threads are compared; a sync is about as slow as a large write. */
static uint64_t job_weight(const struct kvf_io *io)
{
    return io->op == KVF_IO_SYNC ? 1u << 20 : io->bytes;
}

static int threads_submit(struct kvf_io_queue *queue, struct kvf_io *io)
{
    struct io_threads *self = (struct io_threads *)queue;
    struct io_thread *thread = choose_thread(self, io);

    if (self->outstanding == self->config.queue_entries) {
        return KVF_ERR_BUSY;
    }
    kvf_io_begin(io);
    if (!kvf_ring_push(&thread->jobs, &io)) {
        return KVF_ERR_BUSY;
    }
    self->outstanding++;
    thread->queued_bytes += job_weight(io);
    wake_thread(thread);
    return KVF_OK;
}

static unsigned threads_poll(struct kvf_io_queue *queue)
{
    struct io_threads *self = (struct io_threads *)queue;
    unsigned n_done = 0;

    for (uint32_t i = 0; i < self->n_threads; i++) {
        struct io_thread *thread = &self->threads[i];
        struct kvf_io *io;

        while (kvf_ring_pop(&thread->dones, &io)) {
            self->outstanding--;
            thread->queued_bytes -= job_weight(io);
            n_done++;
            io->done(io);
        }
    }
    return n_done;
}

static int threads_register_memory(struct kvf_io_queue *queue, void *base, uint64_t bytes)
{
    (void)queue;
    (void)base;
    (void)bytes;
    return KVF_OK;
}

static void threads_close(struct kvf_io_queue *queue)
{
    struct io_threads *self = (struct io_threads *)queue;

    if (self == NULL) {
        return;
    }
    atomic_store(&self->stopping, true);
    for (uint32_t i = 0; i < self->n_threads; i++) {
        struct io_thread *thread = &self->threads[i];

        if (thread->started) {
            wake_thread(thread);
            pthread_join(thread->thread, NULL);
        }
        kvf_fd_close(&thread->wake_fd);
        kvf_ring_fini(&thread->jobs);
        kvf_ring_fini(&thread->dones);
    }
    free(self);
}

static const struct kvf_io_ops threads_ops = {
    .name = "threads",
    .submit = threads_submit,
    .poll = threads_poll,
    .register_memory = threads_register_memory,
    .close = threads_close,
};

static int start_thread(struct io_threads *self, struct io_thread *thread)
{
    sigset_t all, before;
    int error;

    thread->pool = self;
    thread->wake_fd = eventfd(0, EFD_CLOEXEC);
    if (thread->wake_fd < 0 ||
        kvf_ring_init(&thread->jobs, sizeof(struct kvf_io *), self->config.queue_entries) ||
        kvf_ring_init(&thread->dones, sizeof(struct kvf_io *), self->config.queue_entries)) {
        return KVF_ERR_NO_MEMORY;
    }
    /* signals are the main thread's business */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(&thread->thread, NULL, thread_main, thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0) {
        return KVF_ERR_NO_MEMORY;
    }
    thread->started = true;
    pthread_setname_np(thread->thread, "kvf-io");
    return KVF_OK;
}

int kvf_io_threads_open(const struct kvf_io_config *config, struct kvf_io_queue **queue_out,
                        char *why_out, size_t why_bytes)
{
    struct io_threads *self = aligned_alloc(KVF_CACHE_LINE_BYTES, sizeof(*self));
    int status = KVF_ERR_NO_MEMORY;

    if (self == NULL) {
        goto fail;
    }
    memset(self, 0, sizeof(*self));
    self->base.ops = &threads_ops;
    self->config = *config;
    self->n_threads = config->threads;
    self->n_writers = config->threads > 4 ? config->threads / 4 : 1;
    if (self->n_writers > config->writes_max) {
        self->n_writers = config->writes_max;
    }
    for (uint32_t i = 0; i < self->n_threads; i++) {
        self->threads[i].wake_fd = -1;
    }
    for (uint32_t i = 0; i < self->n_threads; i++) {
        status = start_thread(self, &self->threads[i]);
        if (status != KVF_OK) {
            goto fail;
        }
    }
    *queue_out = &self->base;
    return KVF_OK;

fail:
    snprintf(why_out, why_bytes, "threads: %s", kvf_status_text(status));
    threads_close(self == NULL ? NULL : &self->base);
    return status;
}
