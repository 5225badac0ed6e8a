/* SPDX-License-Identifier: Apache-2.0
 *
 * clock.c: the system's clocks.
 */
#include "base/clock.h"

#include <time.h>

uint64_t kvf_now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * KVF_NS_PER_S + (uint64_t)now.tv_nsec;
}

static uint64_t system_now_ns(void *arg)
{
    (void)arg;
    return kvf_now_ns();
}

static uint64_t system_wall_s(void *arg)
{
    struct timespec now;

    (void)arg;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec;
}

const struct kvf_clock_ops kvf_clock_system = {.now_ns = system_now_ns, .wall_s = system_wall_s};
