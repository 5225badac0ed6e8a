/* SPDX-License-Identifier: Apache-2.0
 *
 * test_tenants.c: what one client, namespace or tenant takes is not taken from another one.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "tests/conformance/outcome.h"
#include "tests/conformance/room.h"
#include "tests/support/blocks.h"
#include "tests/support/daemon.h"

static struct kvf_test_daemon the_daemon;
static char the_second_path[KVF_TEST_PATH_BYTES];

/* A daemon with a socket for each of two tenants. */
static void create_two(const char *const *sets)
{
    static char first_set[KVF_TEST_PATH_BYTES + 32], second_set[KVF_TEST_PATH_BYTES + 32];

    kvf_test_daemon_create(&the_daemon, sets);
    kvf_test_dir_path(&the_daemon.dir, "second.sock", the_second_path);
    snprintf(first_set, sizeof(first_set), "sockets.0.path=%s", the_daemon.socket_path);
    snprintf(second_set, sizeof(second_set), "sockets.1.path=%s", the_second_path);
    kvf_test_daemon_set(&the_daemon, first_set);
    kvf_test_daemon_set(&the_daemon, "sockets.0.tenant=first");
    kvf_test_daemon_set(&the_daemon, second_set);
    kvf_test_daemon_set(&the_daemon, "sockets.1.tenant=second");
}

static struct kvf_client *open_first(void)
{
    return room_open(&the_daemon, NULL, NULL, 0, 1, 4 << 20);
}

static struct kvf_client *open_second(void)
{
    return room_open(&the_daemon, the_second_path, NULL, 0, 1, 4 << 20);
}

static int end(void **state)
{
    (void)state;
    kvf_test_daemon_destroy(&the_daemon);
    return 0;
}

/* --- clients ------------------------------------------------------------------------------------
 */

#define N_KEYS 1000

/* Requests for N_KEYS blocks each, until all are submitted or the daemon takes no more of them:
 * then the client's own rings are full. */
static void ask_for(struct kvf_client *client, uint64_t first, uint32_t n_requests, bool wait)
{
    struct kvf_get_options options = {.struct_bytes = sizeof(options), .budget_ms = 3600000};
    uint32_t patience = 100;
    uint32_t n = 0;

    while (n < n_requests && patience > 0) {
        const struct kvf_key *keys = room_keys(first + (uint64_t)n * N_KEYS, N_KEYS);
        uint64_t request;
        int status = wait ? kvf_submit_get(client, keys, N_KEYS, &options, 0, &request)
                          : kvf_submit_prefetch(client, keys, N_KEYS, 0, &request);

        assert_true(status == KVF_OK || status == KVF_ERR_BUSY);
        n += status == KVF_OK;
        patience -= status == KVF_ERR_BUSY;
        if (status == KVF_ERR_BUSY) {
            struct kvf_event events[64];
            uint32_t n_events;

            /* what is over gives credits back */
            (void)kvf_poll(client, events, 64, 2, &n_events);
            patience = n_events > 0 ? 100 : patience;
        }
    }
    assert_true(n > 0);
}

/* Thousands of blocks that one client waits for, or has asked to be fetched, are no other client's
 * burden. */
static void test_shares_of_a_client(void **state)
{
    static const char *const sets[] = {"clients.max=2", "nvme.0.bytes=128MiB",
                                       "prefetch.inflight=1", NULL};
    enum {
        N_WAITING = 2,
        N_PREFETCHES = 9,
        BYTES = 100
    };
    struct kvf_client *greedy, *other;
    uint64_t round_trip_ns;

    (void)state;
    kvf_test_daemon_create(&the_daemon, sets);
    kvf_test_daemon_start(&the_daemon);
    greedy = kvf_test_client_open(&the_daemon, NULL);
    room_put_all(greedy, 0, (N_WAITING + N_PREFETCHES) * N_KEYS, BYTES, KVF_PUT_DURABLE);
    kvf_close(greedy);
    kvf_test_daemon_kill(&the_daemon);
    kvf_test_daemon_set(&the_daemon, "test.delay_nvme=load:20s");
    kvf_test_daemon_start(&the_daemon);

    for (int pass = 0; pass < 2; pass++) {
        struct kvf_options options;

        kvf_test_client_options(&the_daemon, &options);
        options.ring_entries = 16384;
        assert_int_equal(kvf_open(&options, &greedy), KVF_OK);
        other = kvf_test_client_open(&the_daemon, "other");
        if (pass == 0) {
            ask_for(greedy, 0, N_WAITING, true);
        } else {
            ask_for(greedy, N_WAITING * N_KEYS, N_PREFETCHES, false);
        }
        for (uint64_t i = 0; i < 50; i++) {
            assert_int_equal(kvf_ping(other, 60000, &round_trip_ns), KVF_OK);
            assert_int_equal(
                kvf_test_block_put(other, (uint64_t)pass << 32 | i, BYTES, KVF_PUT_NO_WRITE),
                KVF_OK);
            room_sleep_ms(2);
        }
        assert_int_equal(room_count(other, (uint64_t)pass << 32, 50, BYTES), 50);
        kvf_close(greedy);
        kvf_close(other);
    }
}

/* --- tenants ------------------------------------------------------------------------------------
 */

/* The first tenant has leased all memory that it can get and asks for more: its loads cannot
 * start. Those of the second one can. */
static void test_loads_of_another_tenant(void **state)
{
    static const char *const sets[] = {"dram.bytes=32MiB",      "dram.piece_bytes=8MiB",
                                       "nvme.0.bytes=128MiB",   "lease.client_share=75",
                                       "put.writeback_share=5", NULL};
    enum {
        N_FIRST = 40,
        N_SECOND = 6,
        BYTES = 1000 << 10
    };
    struct kvf_get_options options = {.struct_bytes = sizeof(options), .budget_ms = 60000};
    static struct kvf_hit hits[N_FIRST];
    struct outcome outcome = {.n_blocks = N_FIRST, .hits = hits};
    struct kvf_client *first, *second;
    uint64_t deadline_ns;

    (void)state;
    create_two(sets);
    kvf_test_daemon_start(&the_daemon);
    first = open_first();
    second = open_second();
    room_put_all(second, 0, N_SECOND, BYTES, KVF_PUT_DURABLE); /* before the other has all memory */
    room_put_all(first, 0, N_FIRST, BYTES, KVF_PUT_DURABLE);
    kvf_close(first);
    kvf_close(second);
    kvf_test_daemon_kill(&the_daemon);
    kvf_test_daemon_set(&the_daemon, "test.delay_nvme=store:60s");
    kvf_test_daemon_start(&the_daemon);

    first = open_first();
    second = open_second();
    /* the second one has memory of its own, and a write that will take long */
    assert_int_equal(kvf_test_block_get(second, 0, BYTES, NULL), KVF_OK);
    assert_int_equal(kvf_test_block_put(second, 1000, 1000, 0), KVF_OK);
    assert_int_equal(
        kvf_submit_get(first, room_keys(0, N_FIRST), N_FIRST, &options, 0, &outcome.request),
        KVF_OK);
    deadline_ns = kvf_now_ns() + 60 * KVF_NS_PER_S;
    while (room_stat(first).leased_bytes < (uint64_t)20 * BYTES) {
        assert_true(kvf_now_ns() < deadline_ns);
        room_sleep_ms(5);
    }
    for (uint64_t i = 1; i < N_SECOND; i++) {
        struct kvf_hit hit;

        (void)kvf_get(second, room_keys(i, 1), 1, &options, &hit);
        assert_int_equal(hit.tier, KVF_TIER_NVME);
        assert_int_equal(kvf_test_hit_check(second, &hit, i, BYTES), KVF_OK);
    }
    /* and those that find no memory do not wait for ever */
    outcomes_wait(first, &outcome, 1);
    assert_in_range(outcome.succeeded, 20, N_FIRST - 1);
    outcome_release(first, &outcome);
    kvf_close(first);
    kvf_close(second);
}

/* A tenant that comes when the other one has all memory gets its share of it: whole pieces,
 * which the clients of the one drop and those of the other map, new ones as well. */
static void test_pieces_change_hands(void **state)
{
    static const char *const sets[] = {"dram.bytes=24MiB", "dram.piece_bytes=8MiB", NULL};
    enum {
        ROUNDS = 4,
        N = 120,
        BYTES = 250 << 10
    };
    struct kvf_client *clients[2];

    (void)state;
    create_two(sets);
    kvf_test_daemon_start(&the_daemon);
    clients[0] = open_first();
    clients[1] = open_second();
    for (uint32_t round = 0; round < ROUNDS; round++) {
        struct kvf_client *client = clients[round % 2];
        uint64_t first = (uint64_t)round * N;
        struct kvf_client *late;

        for (uint32_t i = 0; i < N; i++) {
            int status = KVF_ERR_BUSY;

            /* a tenant that has no memory at first gets some in a moment */
            for (int tries = 0; tries < 10000 && status == KVF_ERR_BUSY; tries++) {
                status = kvf_test_block_put(client, first + i, BYTES, KVF_PUT_NO_WRITE);
                if (status == KVF_ERR_BUSY) {
                    room_sleep_ms(1);
                }
            }
            assert_int_equal(status, KVF_OK);
        }
        late = round % 2 == 0 ? open_first() : open_second();
        assert_int_equal(room_count(client, first + N - 8, 8, BYTES), 8);
        assert_int_equal(room_count(late, first + N - 8, 8, BYTES), 8);
        kvf_close(late);
    }
    kvf_close(clients[0]);
    kvf_close(clients[1]);
}

#ifdef KVF_TEST_SMALL_SOCKET
/* More pieces than a socket can announce at once: who attaches gets to know them all. */
static void test_more_pieces_than_a_socket_holds(void **state)
{
    static const char *const sets[] = {"dram.bytes=256MiB", "dram.piece_bytes=8MiB", NULL};
    enum {
        N = 232,
        BYTES = 1000 << 10
    };
    struct kvf_client *writer, *reader;

    (void)state;
    kvf_test_daemon_create(&the_daemon, sets);
    the_daemon.preload = KVF_TEST_SMALL_SOCKET;
    kvf_test_daemon_start(&the_daemon);
    writer = kvf_test_client_open(&the_daemon, NULL);
    room_put_all(writer, 0, N, BYTES, KVF_PUT_NO_WRITE);
    reader = kvf_test_client_open(&the_daemon, NULL);
    assert_int_equal(room_count(reader, 0, N, BYTES), N);
    assert_int_equal(room_count(writer, 0, N, BYTES), N);
    kvf_close(reader);
    kvf_close(writer);
}
#endif

/* --- quotas -------------------------------------------------------------------------------------
 */
enum {
    QUOTA_BYTES = (64 << 20) / 4,
    N_QUIET = 12,
    N_LOUD = 200,
    QUOTA_BLOCK_BYTES = 250 << 10,
};

/* At its quota whoever writes loses blocks of its own. */
static void assert_quota(struct kvf_client *loud, struct kvf_client *quiet)
{
    uint64_t n_cold;

    room_put_all(quiet, 0, N_QUIET, QUOTA_BLOCK_BYTES, KVF_PUT_DURABLE);
    for (uint64_t i = 0; i < N_LOUD; i++) {
        /* half of them as fast as they come, so that some of those are not written */
        uint32_t flags = i < N_LOUD / 2 ? KVF_PUT_DURABLE : 0;

        assert_int_equal(kvf_test_block_put(loud, i, QUOTA_BLOCK_BYTES, flags), KVF_OK);
        assert_true(room_stat(loud).namespace_dram_bytes <= QUOTA_BYTES);
    }
    assert_true(room_stat(loud).namespace_dram_bytes > QUOTA_BYTES / 2);
    assert_int_equal(kvf_test_block_get(loud, N_LOUD - 1, QUOTA_BLOCK_BYTES, NULL), KVF_OK);
    /* reading back what is on the drive only counts as well */
    n_cold = room_count(loud, 0, N_LOUD, QUOTA_BLOCK_BYTES);
    assert_true(n_cold * QUOTA_BLOCK_BYTES > QUOTA_BYTES);
    assert_true(room_stat(loud).namespace_dram_bytes <= QUOTA_BYTES);
    for (uint64_t i = 0; i < N_QUIET; i++) {
        uint8_t tier;

        assert_int_equal(kvf_test_block_get(quiet, i, QUOTA_BLOCK_BYTES, &tier), KVF_OK);
        assert_int_equal(tier, KVF_TIER_DRAM);
    }
}

static void test_namespace_quota(void **state)
{
    static const char *const sets[] = {"quota.namespace_share=25", NULL};
    struct kvf_client *loud, *quiet;

    (void)state;
    kvf_test_daemon_create(&the_daemon, sets);
    kvf_test_daemon_start(&the_daemon);
    loud = kvf_test_client_open(&the_daemon, "loud");
    quiet = kvf_test_client_open(&the_daemon, "quiet");
    assert_quota(loud, quiet);
    kvf_close(loud);
    kvf_close(quiet);
}

static void test_tenant_quota(void **state)
{
    static const char *const sets[] = {"quota.tenant_share=25", "quota.namespace_share=25",
                                       "dram.piece_bytes=8MiB", NULL};
    struct kvf_client *loud, *quiet;

    (void)state;
    create_two(sets);
    kvf_test_daemon_start(&the_daemon);
    loud = open_first();
    quiet = open_second();
    assert_quota(loud, quiet);
    kvf_close(loud);
    kvf_close(quiet);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_shares_of_a_client, end),
        cmocka_unit_test_teardown(test_loads_of_another_tenant, end),
        cmocka_unit_test_teardown(test_pieces_change_hands, end),
#ifdef KVF_TEST_SMALL_SOCKET
        cmocka_unit_test_teardown(test_more_pieces_than_a_socket_holds, end),
#endif
        cmocka_unit_test_teardown(test_namespace_quota, end),
        cmocka_unit_test_teardown(test_tenant_quota, end),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
