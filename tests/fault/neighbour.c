/* SPDX-License-Identifier: Apache-2.0
 *
 * neighbour.c: a daemon and its well-behaved client.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/fault/neighbour.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "base/clock.h"
#include "tests/support/blocks.h"

/* How long a caller who names no budget waits (kvferry.h). */
#define PUT_BUDGET_NS (30 * KVF_NS_PER_S)
#define GET_BUDGET_NS (10 * KVF_NS_PER_S)

struct kvf_test_daemon the_daemon;

static struct {
    pthread_t thread;
    _Atomic bool is_stopping;
    _Atomic uint64_t n_good;
    _Atomic int failure; /* the first status that it should not have got */
    _Atomic uint32_t n_late;
} good;

/* Was it answered in time? */
static void note_time(uint64_t began_ns, uint64_t budget_ns)
{
    atomic_fetch_add(&good.n_late, kvf_now_ns() - began_ns > budget_ns);
}

static void *good_run(void *arg)
{
    struct kvf_client *client = kvf_test_client_open(&the_daemon, "good");

    (void)arg;
    for (uint64_t i = 0; !atomic_load(&good.is_stopping); i++) {
        size_t bytes = 100 + i * 977 % 60000;
        uint64_t began_ns = kvf_now_ns();
        int status = kvf_test_block_put(client, i, bytes, i % 50 == 0 ? KVF_PUT_DURABLE : 0);

        note_time(began_ns, PUT_BUDGET_NS);
        if (status == KVF_OK) {
            began_ns = kvf_now_ns();
            status = kvf_test_block_get(client, i, bytes, NULL);
            note_time(began_ns, GET_BUDGET_NS);
        }
        if (status != KVF_OK && atomic_load(&good.failure) == KVF_OK) {
            atomic_store(&good.failure, status);
        }
        atomic_fetch_add(&good.n_good, status == KVF_OK);
    }
    kvf_close(client);
    return NULL;
}

void assert_nobody_noticed(void)
{
    const struct timespec pause = {.tv_nsec = KVF_NS_PER_MS};
    uint64_t before = atomic_load(&good.n_good);
    uint64_t deadline_ns = kvf_now_ns() + 60 * KVF_NS_PER_S;

    while (atomic_load(&good.n_good) < before + 2 && kvf_now_ns() < deadline_ns) {
        nanosleep(&pause, NULL);
    }
    assert_int_equal(atomic_load(&good.failure), KVF_OK);
    assert_int_equal(atomic_load(&good.n_late), 0);
    assert_true(atomic_load(&good.n_good) >= before + 2);
    assert_true(kvf_test_daemon_is_alive(&the_daemon));
}

uint64_t protocol_errors(void)
{
    return kvf_test_daemon_number(&the_daemon, "metrics.protocol_errors");
}

int neighbour_setup(void **state)
{
    /* those that follow are all of this process, and would wait for each other */
    static const char *const sets[] = {"clients.offence_delay=0", NULL};

    (void)state;
    kvf_test_daemon_create(&the_daemon, sets);
    kvf_test_daemon_start(&the_daemon);
    return pthread_create(&good.thread, NULL, good_run, NULL);
}

int neighbour_teardown(void **state)
{
    (void)state;
    atomic_store(&good.is_stopping, true);
    pthread_join(good.thread, NULL);
    assert_int_equal(atomic_load(&good.failure), KVF_OK);
    assert_int_equal(atomic_load(&good.n_late), 0);
    /* everything that they were given has come back */
    assert_true(kvf_test_daemon_wait_number(&the_daemon, "clients", 0, 60000));
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "staging_used_bytes"), 0);
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.leased_bytes"), 0);
    assert_int_equal(kvf_test_daemon_stop(&the_daemon), 0);
    kvf_test_daemon_destroy(&the_daemon);
    return 0;
}
