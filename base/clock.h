/* SPDX-License-Identifier: Apache-2.0
 *
 * clock.h: time, behind a table, so that tests and simulations can have their own.
 */
#ifndef KVF_BASE_CLOCK_H
#define KVF_BASE_CLOCK_H

#include <stdint.h>

#define KVF_NS_PER_US 1000ull
#define KVF_NS_PER_MS 1000000ull
#define KVF_NS_PER_S  1000000000ull

/* Both members are required, may be called by any thread and do not block. */
struct kvf_clock_ops {
    uint64_t (*now_ns)(void *arg); /* never goes back; only differences mean something */
    uint64_t (*wall_s)(void *arg); /* seconds since 1970, may step */
};

/* CLOCK_MONOTONIC and CLOCK_REALTIME; arg is ignored. */
extern const struct kvf_clock_ops kvf_clock_system;

/* The system's monotonic clock, for code that never runs in a simulation. */
uint64_t kvf_now_ns(void);

#endif /* KVF_BASE_CLOCK_H */
