/* SPDX-License-Identifier: Apache-2.0
 *
 * hostile_load.h: the neighbour of bench_hostile's honest client: a process that is well-behaved or
 * breaks every rule, and takes the same share of a CPU either way.
 */
#ifndef KVF_TESTS_BENCH_HOSTILE_LOAD_H
#define KVF_TESTS_BENCH_HOSTILE_LOAD_H

#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

enum hostile_mode {
    HOSTILE_IDLE = 0, /* detached */
    HOSTILE_GOOD,     /* keeps the rules; spins while it waits */
    HOSTILE_CALM,     /* keeps the rules; sleeps while it waits */
    HOSTILE_BAD,
};

/* Shared with the process. */
struct hostile_control {
    _Atomic uint32_t wanted;  /* enum hostile_mode */
    _Atomic uint32_t current; /* what it does, wanted or still before */
};

/* Fork it; it ends with its parent. Ends the process if that fails. */
pid_t hostile_load_start(const char *socket_path, struct hostile_control *control);

/* Have it do this, and wait until it does. */
void hostile_load_set(struct hostile_control *control, enum hostile_mode mode);

#endif /* KVF_TESTS_BENCH_HOSTILE_LOAD_H */
