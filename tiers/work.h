/* SPDX-License-Identifier: Apache-2.0
 *
 * work.h: CPU work off the reactor (copy with checksum, verify, MAC, prefault, recompress), run by
 * the codec workers. The real form is a fixed number of threads behind one bounded queue; the
 * simulated form runs the job at its virtual time.
 */
#ifndef KVF_TIERS_WORK_H
#define KVF_TIERS_WORK_H

#include <stdint.h>

#include "base/status.h"
#include "tiers/io.h"

/* Owned by the caller, untouched by it from submit until done. */
struct kvf_work {
    void (*run)(
        struct kvf_work *work); /* on a worker: may take time, touches only what the job owns */
    void (*done)(struct kvf_work *work); /* on the reactor, inside poll */
    void *owner;
    struct kvf_work *next; /* for the implementation */
};

struct kvf_work_queue;

struct kvf_work_ops {
    /* KVF_OK: run and then done are called once each. KVF_ERR_BUSY: the bounded queue is full. */
    int (*submit)(struct kvf_work_queue *queue, struct kvf_work *work);
    /* Run done of what has finished; returns how many. */
    unsigned (*poll)(struct kvf_work_queue *queue);
    /* Waits for jobs in flight, then frees the queue. */
    void (*close)(struct kvf_work_queue *queue);
};

struct kvf_work_queue {
    const struct kvf_work_ops *ops;
};

/* n_threads worker threads and a queue of queue_entries (power of two). KVF_OK; KVF_ERR_NO_MEMORY.
 */
int kvf_work_open(uint32_t n_threads, uint32_t queue_entries, struct kvf_waker waker,
                  struct kvf_work_queue **queue_out);

/* The same, with threads that leave the CPUs to others where these want them. */
int kvf_work_open_background(uint32_t n_threads, uint32_t queue_entries, struct kvf_waker waker,
                             struct kvf_work_queue **queue_out);

#endif /* KVF_TIERS_WORK_H */
