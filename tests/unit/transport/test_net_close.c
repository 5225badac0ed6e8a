/* SPDX-License-Identifier: Apache-2.0
 *
 * test_net_close.c: a network that is closed while its thread is held up: whoever closes it does
 * not wait, and its thread frees it when it can.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/hash.h"
#include "tests/support/support.h"
#include "transport/transport_ucx.h"

#define WAIT_MS 60000u

/* A client's end whose thread is held in a call of its own. */
struct held {
    sem_t is_held, may_go;
    bool in_begin; /* there, or in a turn */
    _Atomic uint32_t n_closed;
};

static void hold(struct held *held)
{
    assert_int_equal(sem_post(&held->is_held), 0);
    while (sem_wait(&held->may_go) != 0) {
    }
}

static void held_begin(void *ctx, struct kvf_net *net)
{
    (void)net;
    if (((struct held *)ctx)->in_begin) {
        hold(ctx);
    }
}

static unsigned held_turn(void *ctx, uint64_t now_ns, bool has_slept)
{
    (void)now_ns;
    (void)has_slept;
    if (!((struct held *)ctx)->in_begin) {
        hold(ctx);
    }
    return 0;
}

static void held_up(void *ctx)
{
    (void)ctx;
}

static void held_message(void *ctx, const struct kvf_net_head *head, const void *body)
{
    (void)ctx;
    (void)head;
    (void)body;
}

static void held_down(void *ctx, int status, const char *why)
{
    (void)ctx;
    (void)status;
    (void)why;
}

static bool held_sleep(void *ctx)
{
    (void)ctx;
    return true;
}

static const struct kvf_net_tunnel_ops held_ops = {
    .begin = held_begin,
    .up = held_up,
    .message = held_message,
    .down = held_down,
    .turn = held_turn,
    .sleep = held_sleep,
    .awake = held_up,
};

static void on_closed(void *ctx)
{
    atomic_fetch_add(&((struct held *)ctx)->n_closed, 1);
}

static bool is_closed(void *arg)
{
    return atomic_load(&((struct held *)arg)->n_closed) == 1;
}

static void test_close_while_held(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        struct held held = {.in_begin = i % 2 == 0};
        struct kvf_net_config config = {.tenant = "some",
                                        .tunnel = &held_ops,
                                        .tunnel_ctx = &held,
                                        .incarnation = 5,
                                        .name = "held",
                                        .heartbeat_ns = KVF_NS_PER_S,
                                        .silence_ns = KVF_NS_PER_S,
                                        .retry_ns = KVF_NS_PER_S};
        struct kvf_net *net;
        char why[256];

        assert_int_equal(sem_init(&held.is_held, 0, 0), 0);
        assert_int_equal(sem_init(&held.may_go, 0, 0), 0);
        if (kvf_net_open(&config, &net, why, sizeof(why)) != KVF_OK) {
            fail_msg("%s", why);
        }
        while (sem_wait(&held.is_held) != 0) {
        }
        kvf_net_close_later(net, on_closed, &held); /* comes back, or this test does not end */
        assert_int_equal(atomic_load(&held.n_closed), 0);
        assert_int_equal(sem_post(&held.may_go), 0);
        assert_true(kvf_test_wait_until(is_closed, &held, WAIT_MS));
        (void)sem_destroy(&held.is_held);
        (void)sem_destroy(&held.may_go);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_close_while_held),
    };

    if (kvf_hash_init_library() != KVF_OK) {
        return 1;
    }
    (void)setenv("UCX_TLS", "tcp", 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
