/* SPDX-License-Identifier: Apache-2.0
 *
 * thread.c: advice to the scheduler (thread.h).
 */
#include "base/thread.h"

#include <sched.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SHORT_SLICE_NS  100000 /* the shortest that Linux gives */
#define BACKGROUND_NICE 10     /* a tenth of the weight */

/* struct sched_attr as the kernel has had it first; not every C library knows it. */
struct scheduling {
    uint32_t bytes, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime_ns, deadline_ns, period_ns;
};

/* As it is, with short slices. What is set on purpose (a real-time policy) stays. */
static int scheduling_read(struct scheduling *scheduling_out)
{
    *scheduling_out = (struct scheduling){0};
    if (syscall(SYS_sched_getattr, 0, scheduling_out, sizeof(*scheduling_out), 0) != 0 ||
        scheduling_out->policy != SCHED_OTHER) {
        return -1;
    }
    scheduling_out->bytes = sizeof(*scheduling_out);
    scheduling_out->runtime_ns = SHORT_SLICE_NS;
    return 0;
}

void kvf_thread_run_soon(void)
{
    struct scheduling scheduling;

    if (scheduling_read(&scheduling) == 0) {
        (void)syscall(SYS_sched_setattr, 0, &scheduling, 0);
    }
}

void kvf_thread_step_back(void)
{
    struct scheduling scheduling;

    if (scheduling_read(&scheduling) == 0) {
        scheduling.policy = SCHED_BATCH;
        if (scheduling.nice < BACKGROUND_NICE) {
            scheduling.nice = BACKGROUND_NICE;
        }
        (void)syscall(SYS_sched_setattr, 0, &scheduling, 0);
    }
}
