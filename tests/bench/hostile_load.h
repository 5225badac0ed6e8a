/* SPDX-License-Identifier: Apache-2.0
 *
 * hostile_load.h: the neighbour of bench_hostile's honest client: a process that is well-behaved or
 * breaks every rule, and takes as much of the CPUs, at the same times, either way.
 */
#ifndef KVF_TESTS_BENCH_HOSTILE_LOAD_H
#define KVF_TESTS_BENCH_HOSTILE_LOAD_H

#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

enum hostile_mode {
    HOSTILE_IDLE = 0, /* detached */
    HOSTILE_GOOD,
    HOSTILE_BAD,
    HOSTILE_GONE, /* the process ends */
};

/* Shared with the process. */
struct hostile_control {
    _Atomic uint32_t wanted;    /* enum hostile_mode */
    _Atomic uint32_t current;   /* what it does, wanted or still before */
    _Atomic uint64_t n_attacks; /* begun so far */
};

/* Fork it; it ends with its parent. Ends the process if that fails. */
pid_t hostile_load_start(const char *socket_path, struct hostile_control *control);

/* Have it do this, and wait until it does. */
void hostile_load_set(struct hostile_control *control, enum hostile_mode mode);

/* End it and wait for that, so that its CPU time counts as ours. */
void hostile_load_end(pid_t pid, struct hostile_control *control);

#endif /* KVF_TESTS_BENCH_HOSTILE_LOAD_H */
