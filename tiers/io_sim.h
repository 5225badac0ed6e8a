/* SPDX-License-Identifier: Apache-2.0
 *
 * io_sim.h: a drive in memory with virtual time, for the simulator and for tests: the same seed
 * gives the same order of completions, the same faults and the same loss at a crash.
 *
 *   disk    what is on the drive; outlives queues, crashes and restarts
 *   queue   one opening of it, an io.h queue
 *
 * A write changes what later reads see when it completes, and becomes stable when a sync that was
 * submitted after that completes. A crash keeps what is stable; of each other write it keeps all,
 * nothing, or any part in sectors of 512 bytes.
 *
 * Owner of everything: one thread.
 */
#ifndef KVF_TIERS_IO_SIM_H
#define KVF_TIERS_IO_SIM_H

#include "tiers/io.h"

#include <stddef.h>

/* One in n; 0: never. */
struct kvf_io_sim_faults {
    uint32_t read_error; /* EIO */
    uint32_t write_error;
    uint32_t write_no_space;    /* ENOSPC */
    uint32_t sync_error;        /* nothing becomes stable, and nothing that was to will later */
    uint32_t read_flip;         /* a bit is wrong in what is read, not on the drive */
    uint32_t write_flip;        /* a bit is wrong on the drive */
    uint32_t write_lost;        /* reported as done, never written */
    uint32_t write_misdirected; /* reported as done, written to another page-aligned offset */
    uint32_t write_torn;        /* reported as done, some sectors keep what they had */
};

struct kvf_io_sim_config {
    uint64_t capacity_bytes; /* multiple of 4 KiB; all zeroes at first */
    uint64_t seed;
    uint64_t latency_min_ns; /* of each I/O, even between the two */
    uint64_t latency_max_ns;
    uint32_t queue_entries; /* I/Os in flight; more: KVF_ERR_BUSY */
    struct kvf_io_sim_faults faults;
};

struct kvf_io_sim_disk;

/* 64 MiB, seed 1, 10..100 us, 256 entries, no faults. */
void kvf_io_sim_config_init(struct kvf_io_sim_config *config);

/* KVF_OK; KVF_ERR_INVALID, _NO_MEMORY. */
int kvf_io_sim_disk_create(const struct kvf_io_sim_config *config,
                           struct kvf_io_sim_disk **disk_out);

/* Accepts NULL. No queue of it may be open. */
void kvf_io_sim_disk_destroy(struct kvf_io_sim_disk *disk);

/* A queue on the disk; at most one is open. Closing it drops what is in flight (done is not called;
 * the writes among it may have happened in part or not). KVF_OK; KVF_ERR_BUSY, _NO_MEMORY. */
int kvf_io_sim_open(struct kvf_io_sim_disk *disk, struct kvf_io_queue **queue_out);

/* Virtual time. Poll completes what is due; it does not move time. */
uint64_t kvf_io_sim_now_ns(const struct kvf_io_sim_disk *disk);
void kvf_io_sim_advance(struct kvf_io_sim_disk *disk, uint64_t now_ns);

/* When the next I/O is due; UINT64_MAX: nothing is in flight. */
uint64_t kvf_io_sim_next_ns(const struct kvf_io_sim_disk *disk);

/* Power fails now: I/Os in flight and all later ones of the open queue end with KVF_ERR_IO. After
 * the queue has been closed the disk can be opened again. */
void kvf_io_sim_crash(struct kvf_io_sim_disk *disk);

/* Crash by itself when the n-th I/O from now (1 is the next) is submitted, instead of it. 0:
 * not. */
void kvf_io_sim_crash_at(struct kvf_io_sim_disk *disk, uint64_t n);
bool kvf_io_sim_is_crashed(const struct kvf_io_sim_disk *disk);

/* Let the n-th I/O from now, and the count - 1 after it, end with an error. 0: none. */
void kvf_io_sim_fail_at(struct kvf_io_sim_disk *disk, uint64_t n, uint64_t count);

/* Change the faults from now on. */
void kvf_io_sim_set_faults(struct kvf_io_sim_disk *disk, const struct kvf_io_sim_faults *faults);

/* I/Os submitted since the disk was made, and faults injected into them. */
uint64_t kvf_io_sim_count(const struct kvf_io_sim_disk *disk);
uint64_t kvf_io_sim_fault_count(const struct kvf_io_sim_disk *disk);

/* What is on the drive, to look at or to damage while no queue is open. What is changed through it
 * is stable. */
uint8_t *kvf_io_sim_bytes(struct kvf_io_sim_disk *disk);

/* Make the drive larger (zeroes) or smaller while no queue is open. KVF_OK; KVF_ERR_INVALID,
 * _NO_MEMORY. */
int kvf_io_sim_resize(struct kvf_io_sim_disk *disk, uint64_t capacity_bytes);

#endif /* KVF_TIERS_IO_SIM_H */
