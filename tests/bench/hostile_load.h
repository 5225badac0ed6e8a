/* SPDX-License-Identifier: Apache-2.0
 *
 * hostile_load.h: the neighbours of bench_hostile's honest client: a process that is
 * well-behaved and one that breaks every rule. One at a time works, and the first takes as much of
 * the CPUs, at the same times, as the second would.
 */
#ifndef KVF_TESTS_BENCH_HOSTILE_LOAD_H
#define KVF_TESTS_BENCH_HOSTILE_LOAD_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

enum hostile_mode {
    HOSTILE_IDLE = 0, /* both are detached */
    HOSTILE_GOOD,
    HOSTILE_BAD,
    HOSTILE_GONE, /* the processes end */
};

/* What a neighbour's first thread has used over all times that it worked. */
struct hostile_account {
    _Atomic uint64_t elapsed_ns, cpu_ns;
};

/* Shared with the processes. */
struct hostile_control {
    _Atomic uint32_t wanted;            /* enum hostile_mode */
    _Atomic bool is_busy[HOSTILE_GONE]; /* each as its neighbour */
    _Atomic uint64_t n_attacks;         /* begun so far */
    struct hostile_account accounts[HOSTILE_GONE];
};

/* Fork a neighbour; it ends with its parent. Ends the process if that fails. */
pid_t hostile_load_start(const char *socket_path, struct hostile_control *control,
                         enum hostile_mode mode);

/* Have that one work and no other, and wait until it is so. */
void hostile_load_set(struct hostile_control *control, enum hostile_mode mode);

/* End a neighbour and wait for that, so that its CPU time counts as ours. */
void hostile_load_end(pid_t pid, struct hostile_control *control);

#endif /* KVF_TESTS_BENCH_HOSTILE_LOAD_H */
