/* SPDX-License-Identifier: Apache-2.0
 *
 * test_thread.c: what a thread asks of the kernel is what the kernel says of it afterwards, and of
 * no other thread.
 */
#include "base/thread.h"

#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmocka.h>

/* As sched_getattr fills it. */
struct scheduling {
    uint32_t bytes, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime_ns, deadline_ns, period_ns;
};

struct asker {
    void (*ask)(void);
    struct scheduling after;
};

static int scheduling_read(struct scheduling *scheduling_out)
{
    return (int)syscall(SYS_sched_getattr, 0, scheduling_out, sizeof(*scheduling_out), 0);
}

static void *asker_main(void *arg)
{
    struct asker *asker = arg;

    asker->ask();
    (void)scheduling_read(&asker->after);
    return NULL;
}

/* In a thread of its own. Skips where the kernel says nothing about this one that can change. */
static struct scheduling after(void (*ask)(void))
{
    struct asker asker = {.ask = ask};
    struct scheduling before, still;
    pthread_t thread;

    if (scheduling_read(&before) != 0 || before.policy != SCHED_OTHER) {
        skip();
    }
    assert_int_equal(pthread_create(&thread, NULL, asker_main, &asker), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(scheduling_read(&still), 0);
    assert_memory_equal(&still, &before, sizeof(still));
    if (before.runtime_ns != 0) { /* 0: a kernel without slices of a thread's own */
        assert_int_equal(asker.after.runtime_ns, 100000);
    }
    return asker.after;
}

static void test_run_soon(void **state)
{
    struct scheduling ours, result;

    (void)state;
    result = after(kvf_thread_run_soon);
    assert_int_equal(scheduling_read(&ours), 0);
    assert_int_equal(result.policy, SCHED_OTHER);
    assert_int_equal(result.nice, ours.nice);
}

static void test_step_back(void **state)
{
    struct scheduling ours, result;

    (void)state;
    result = after(kvf_thread_step_back);
    assert_int_equal(scheduling_read(&ours), 0);
    assert_int_equal(result.policy, SCHED_BATCH);
    assert_int_equal(result.nice, ours.nice < 10 ? 10 : ours.nice);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_run_soon),
        cmocka_unit_test(test_step_back),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
