/* SPDX-License-Identifier: Apache-2.0
 *
 * sweep.h: what the scenarios of the sweeps share. A scenario is run again and again; in run N the
 * Nth call of a class fails, until a run ends without having come so far.
 *
 *   begin   once                      what all runs need
 *   run     for N = 1, 2, ...         arm, work, disarm; nothing may be wrong, lost or left over,
 *                                     and a second attempt must work
 *   end     once
 */
#ifndef KVF_TESTS_FAULT_SWEEP_H
#define KVF_TESTS_FAULT_SWEEP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvferry.h"
#include "tests/fault/sweep_calls.h"

/* One run. */
struct sweep_case {
    const char *scenario;
    enum sweep_class class;
    uint64_t n;
    struct sweep_page *page; /* where it was armed */
    bool is_hit;             /* the call failed: N was reached */
    bool is_wrong;           /* something was found that may not be */
    bool is_ended;           /* the daemon did not start, and said why */
    uint32_t n_failed;       /* calls of the client that did not work and said so */
    uint32_t n_missed;       /* blocks that were not there later */
};

struct sweep_scenario {
    const char *name;
    uint32_t classes; /* a bit an enum sweep_class */
    void (*begin)(void);
    void (*run)(struct sweep_case *run);
    void (*end)(void);
};

/* The pages of this process and of the daemon. */
extern struct sweep_page sweep_own_page;
extern struct sweep_page *sweep_daemon_page;

/* Count and fail calls from here on. */
void sweep_arm(struct sweep_case *run, struct sweep_page *page);

/* And no more. */
void sweep_disarm(struct sweep_case *run);

/* This may not be. */
__attribute__((format(printf, 2, 3))) void sweep_wrong(struct sweep_case *run, const char *format,
                                                       ...);

/* Judge what a call answered while something failed: done, or a failure that says what it is. */
void sweep_judge(struct sweep_case *run, const char *call, int status);

/* "KVF_SWEEP_PAGE=...", for the daemon. */
const char *sweep_page_env(void);

/* --- blocks without allocations --- */

/* Put or get and check block `number`, waiting at most two seconds; sweep.c owns the buffer. */
int sweep_put(struct kvf_client *client, uint64_t number, size_t bytes, uint32_t flags);
int sweep_get(struct kvf_client *client, uint64_t number, size_t bytes, uint8_t *tier_out);

/* --- what a process holds --- */

struct sweep_holdings {
    uint32_t n_fds;
    uint32_t n_maps; /* of memory files of ours */
    int64_t n_live;  /* allocations */
};

void sweep_holdings_read(int pid, const struct sweep_page *page,
                         struct sweep_holdings *holdings_out);

extern const struct sweep_scenario sweep_client_scenarios[];
extern const size_t sweep_client_scenarios_count;
extern const struct sweep_scenario sweep_daemon_scenarios[];
extern const size_t sweep_daemon_scenarios_count;

#define SWEEP_BIT(class) (1u << (class))

#endif /* KVF_TESTS_FAULT_SWEEP_H */
