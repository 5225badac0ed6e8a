/* SPDX-License-Identifier: Apache-2.0
 *
 * io.h: reads and writes of one drive (a file or a block device), asynchronous, seen from the
 * reactor. Real forms run a thread of their own: io_uring with fixed buffers, plain io_uring, or a
 * pool of preadv2/pwritev2 threads, chosen by a probe that really reads and writes. A simulated
 * form is a table in memory with virtual time. The forms complete in any order.
 */
#ifndef KVF_TIERS_IO_H
#define KVF_TIERS_IO_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

enum kvf_io_op {
    KVF_IO_READ = 1,
    KVF_IO_WRITE = 2,
    KVF_IO_SYNC = 3, /* everything completed before it was submitted becomes durable */
};

/* Owned by the caller, untouched by it from submit until done. buffer, offset and bytes are
 * multiples of 4 KiB. Short transfers, EAGAIN and EINTR are handled inside; done sees all or
 * nothing. */
struct kvf_io {
    uint8_t op; /* enum kvf_io_op */
    void *buffer;
    uint64_t offset;
    uint64_t bytes;
    int32_t status;                  /* KVF_OK, KVF_ERR_IO, KVF_ERR_NO_SPACE */
    int32_t error;                   /* errno behind it, for the log */
    uint64_t latency_ns;             /* submit to completion on the I/O thread */
    void (*done)(struct kvf_io *io); /* on the reactor, inside poll */
    /* Of a read, or NULL: looks at what has been read, on the I/O thread between transfer and done.
     * A form may leave it out; is_checked says whether it ran. */
    void (*check)(struct kvf_io *io);
    bool is_checked;
    void *owner;
    struct kvf_io *next; /* for the implementation */
    uint64_t private_word[4];
};

struct kvf_io_queue;

struct kvf_io_ops {
    const char *name; /* "io_uring-fixed", "io_uring", "threads", "sim" */
    /* KVF_OK: done will run once. KVF_ERR_BUSY: the bounded queue is full. */
    int (*submit)(struct kvf_io_queue *queue, struct kvf_io *io);
    /* Run done of what has completed; returns how many. */
    unsigned (*poll)(struct kvf_io_queue *queue);
    /* Memory that will be used often (arena pieces, at most 1 GiB each); optional speed-up, may be
     * called at any time before or after the first I/O. KVF_OK also where it has no effect. */
    int (*register_memory)(struct kvf_io_queue *queue, void *base, uint64_t bytes);
    /* Waits for what is in flight, then frees the queue. */
    void (*close)(struct kvf_io_queue *queue);
};

struct kvf_io_queue {
    const struct kvf_io_ops *ops;
    uint64_t capacity_bytes; /* of the file or device */
    bool is_device;
};

/* How a completion reaches the reactor: called on the I/O or worker thread after something was
 * queued for poll. Must be callable from any thread and must not block. */
struct kvf_waker {
    void (*wake)(void *ctx);
    void *ctx;
};

enum kvf_io_engine {
    KVF_IO_AUTO = 0,
    KVF_IO_URING_FIXED = 1,
    KVF_IO_URING = 2,
    KVF_IO_THREADS = 3,
};

struct kvf_io_config {
    int fd; /* open read-write, O_DIRECT if the file system has it; borrowed for the queue's life */
    uint8_t engine;           /* enum kvf_io_engine */
    uint32_t depth;           /* I/Os in flight in the kernel, default 64 */
    uint32_t queue_entries;   /* bounded queue between reactor and thread, power of two */
    uint32_t write_bytes_max; /* a write is cut into pieces of at most this, default 1 MiB */
    uint32_t writes_max; /* pieces of writes in flight, so that reads are not stuck behind them */
    uint32_t threads;    /* of the thread-pool form */
    struct kvf_waker waker;
};

void kvf_io_config_init(struct kvf_io_config *config);

/* Probe and start. why_out (at least 160 bytes) says which form was chosen and why not a better
 * one. KVF_OK; KVF_ERR_IO; KVF_ERR_UNSUPPORTED (an explicitly chosen engine does not work here). */
int kvf_io_open(const struct kvf_io_config *config, struct kvf_io_queue **queue_out, char *why_out,
                size_t why_bytes);

#endif /* KVF_TIERS_IO_H */
