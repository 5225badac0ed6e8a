/* SPDX-License-Identifier: Apache-2.0
 *
 * test_sets.c: a chunk of four shards is one thing: seen, leased, fetched and dropped as a whole.
 * Four handles play the ranks, a fifth one the scheduler.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "tests/support/blocks.h"
#include "tests/support/daemon.h"

#define RANKS       4
#define BLOCK_BYTES 40000
#define KEYS_MAX    64

static struct kvf_test_daemon the_daemon;
static struct kvf_client *the_ranks[RANKS];
static struct kvf_client *the_scheduler;

static struct kvf_client *open_shard(uint16_t shard)
{
    struct kvf_options options;
    struct kvf_client *client;

    kvf_test_client_options(&the_daemon, &options);
    options.shard = shard;
    options.shard_count = RANKS;
    options.staging_bytes = 1 << 20;
    assert_int_equal(kvf_open(&options, &client), KVF_OK);
    return client;
}

static void open_all(void)
{
    for (uint16_t i = 0; i < RANKS; i++) {
        the_ranks[i] = open_shard(i);
    }
    the_scheduler = open_shard(KVF_SHARD_NONE);
}

static void close_all(void)
{
    for (int i = 0; i < RANKS; i++) {
        the_ranks[i] = kvf_close(the_ranks[i]);
    }
    the_scheduler = kvf_close(the_scheduler);
}

/* All ranks use the same key, and each its own bytes. */
static uint64_t content(uint64_t number, int rank)
{
    return number * 16 + (uint64_t)rank;
}

static int put_shard(int rank, uint64_t number, uint32_t flags)
{
    struct kvf_put_options options = {.struct_bytes = sizeof(options), .flags = flags};
    uint8_t payload[BLOCK_BYTES];
    struct kvf_test_key bytes;
    struct kvf_put_item item = {.struct_bytes = sizeof(item),
                                .source = KVF_SOURCE_BYTES,
                                .key = kvf_test_key(number, &bytes),
                                .data = payload,
                                .data_bytes = sizeof(payload)};
    int32_t status = KVF_ERR_INTERNAL;

    kvf_test_payload_fill(content(number, rank), payload, sizeof(payload));
    (void)kvf_put(the_ranks[rank], &item, 1, &options, &status);
    return status;
}

static void put_set(uint64_t number, uint32_t flags)
{
    for (int rank = 0; rank < RANKS; rank++) {
        assert_int_equal(put_shard(rank, number, flags), KVF_OK);
    }
}

static int get_shard(int rank, uint64_t number, uint8_t *tier_out)
{
    struct kvf_test_key bytes;
    struct kvf_key key = kvf_test_key(number, &bytes);
    struct kvf_get_options options = {.struct_bytes = sizeof(options), .budget_ms = 60000};
    struct kvf_hit hit;

    (void)kvf_get(the_ranks[rank], &key, 1, &options, &hit);
    if (tier_out != NULL) {
        *tier_out = hit.tier;
    }
    return kvf_test_hit_check(the_ranks[rank], &hit, content(number, rank), BLOCK_BYTES);
}

static void assert_set_is(uint64_t number, int status)
{
    for (int rank = 0; rank < RANKS; rank++) {
        assert_int_equal(get_shard(rank, number, NULL), status);
    }
}

static int lookup(struct kvf_client *client, uint64_t first, uint32_t n, uint32_t flags,
                  uint32_t budget_ms, struct kvf_lookup_result *result_out)
{
    struct kvf_lookup_options options = {
        .struct_bytes = sizeof(options), .flags = flags, .budget_ms = budget_ms};
    struct kvf_test_key bytes[KEYS_MAX];
    struct kvf_key keys[KEYS_MAX];

    assert_true(n <= KEYS_MAX);
    for (uint32_t i = 0; i < n; i++) {
        keys[i] = kvf_test_key(first + i, &bytes[i]);
    }
    return kvf_lookup(client, keys, n, &options, result_out);
}

static uint32_t run_of(struct kvf_client *client, uint64_t first, uint32_t n)
{
    struct kvf_lookup_result result;

    assert_int_equal(lookup(client, first, n, 0, 0, &result), KVF_OK);
    return result.run_chunks;
}

static uint64_t leased_bytes(struct kvf_client *client)
{
    struct kvf_stat stat = {.struct_bytes = sizeof(stat)};

    assert_int_equal(kvf_stat(client, &stat), KVF_OK);
    return stat.leased_bytes;
}

/* --- seen when whole ----------------------------------------------------------------------------
 */

static void test_late_shard(void **state)
{
    (void)state;
    for (int rank = 0; rank < RANKS; rank++) {
        assert_int_equal(run_of(the_scheduler, 1, 1), 0);
        assert_int_equal(run_of(the_ranks[rank], 1, 1), 0);
        assert_int_equal(put_shard(rank, 1, 0), KVF_OK);
        assert_int_equal(get_shard(rank, 1, NULL), KVF_OK); /* its own is there at once */
    }
    assert_int_equal(run_of(the_scheduler, 1, 1), 1);
    assert_int_equal(run_of(the_ranks[2], 1, 1), 1);
    /* a chain is as long as its first hole */
    for (uint64_t number = 10; number < 16; number++) {
        for (int rank = 0; rank < RANKS; rank++) {
            if (number != 13 || rank != 2) {
                assert_int_equal(put_shard(rank, number, 0), KVF_OK);
            }
        }
    }
    assert_int_equal(run_of(the_scheduler, 10, 6), 3);
    assert_int_equal(put_shard(2, 13, 0), KVF_OK);
    assert_int_equal(run_of(the_scheduler, 10, 6), 6);
    assert_int_equal(put_shard(2, 13, 0), KVF_EXISTS);
}

/* A put of staged bytes that are not what their page says. where: offset in the record. */
static int put_broken(int rank, uint64_t number, size_t where)
{
    struct kvf_test_key bytes;
    struct kvf_put_item item = {.struct_bytes = sizeof(item),
                                .source = KVF_SOURCE_STAGED,
                                .key = kvf_test_key(number, &bytes)};
    struct kvf_stage stage;
    int32_t status = KVF_ERR_INTERNAL;

    assert_int_equal(kvf_stage_acquire(the_ranks[rank], BLOCK_BYTES, &stage), KVF_OK);
    kvf_test_payload_fill(content(number, rank), stage.payload, BLOCK_BYTES);
    assert_int_equal(kvf_stage_seal(the_ranks[rank], &stage, BLOCK_BYTES), KVF_OK);
    ((uint8_t *)stage.record)[where] ^= 1;
    item.stage = stage.stage;
    (void)kvf_put(the_ranks[rank], &item, 1, NULL, &status);
    return status;
}

static void test_failing_shard(void **state)
{
    enum {
        N_PLACES = 5
    };
    static const size_t places[N_PLACES] = {0, 40, 100, 4096, 4096 + BLOCK_BYTES - 1};
    uint64_t corrupt = kvf_test_daemon_number(&the_daemon, "metrics.put_corrupt");
    uint64_t number = 100;

    (void)state;
    for (size_t i = 0; i < N_PLACES; i++, number++) {
        assert_int_equal(put_shard(0, number, 0), KVF_OK);
        assert_int_equal(put_shard(1, number, 0), KVF_OK);
        assert_int_equal(put_shard(3, number, 0), KVF_OK);
        assert_int_equal(put_broken(2, number, places[i]), KVF_ERR_CORRUPT);
        assert_int_equal(run_of(the_scheduler, number, 1), 0);
        assert_int_equal(get_shard(2, number, NULL), KVF_MISS);
        assert_int_equal(put_shard(2, number, 0), KVF_OK);
        assert_int_equal(run_of(the_scheduler, number, 1), 1);
        assert_set_is(number, KVF_OK);
    }
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.put_corrupt"),
                     corrupt + N_PLACES);
}

static void test_evicted_as_one(void **state)
{
    struct kvf_test_key bytes;
    struct kvf_key key = kvf_test_key(201, &bytes);
    uint32_t n = 0;

    (void)state;
    for (uint64_t number = 200; number < 204; number++) {
        put_set(number, 0);
    }
    assert_int_equal(kvf_evict(the_scheduler, &key, 1, &n), KVF_OK);
    assert_int_equal(n, 1);
    assert_int_equal(run_of(the_scheduler, 200, 4), 1);
    assert_set_is(201, KVF_MISS);
    assert_set_is(202, KVF_OK);
    /* by a rank, too, and when it is not whole */
    key = kvf_test_key(202, &bytes);
    assert_int_equal(kvf_evict(the_ranks[3], &key, 1, NULL), KVF_OK);
    assert_set_is(202, KVF_MISS);
    assert_int_equal(put_shard(1, 202, 0), KVF_OK);
    assert_int_equal(kvf_evict(the_scheduler, &key, 1, NULL), KVF_OK);
    assert_int_equal(get_shard(1, 202, NULL), KVF_MISS);
    assert_int_equal(kvf_evict(the_scheduler, &key, 1, NULL), KVF_MISS);
    put_set(202, 0);
    assert_int_equal(run_of(the_scheduler, 202, 2), 2);
}

/* When memory is short sets leave it as one: no set is ever partly here. */
static void test_room_takes_whole_sets(void **state)
{
    enum {
        N = 500
    }; /* 80 MiB, more than the arena */
    uint32_t n_here = 0;

    (void)state;
    for (uint64_t number = 1000; number < 1000 + N; number++) {
        put_set(number, KVF_PUT_NO_WRITE);
    }
    for (uint64_t number = 1000; number < 1000 + N; number++) {
        bool is_here = run_of(the_scheduler, number, 1) == 1;

        n_here += is_here;
        assert_set_is(number, is_here ? KVF_OK : KVF_MISS);
    }
    assert_true(n_here > N / 4 && n_here < N);
    assert_int_equal(run_of(the_scheduler, 1000 + N - 1, 1), 1); /* the newest stays */
}

/* --- the scheduler ------------------------------------------------------------------------------
 */

static void test_scheduler_may_not_read_or_write(void **state)
{
    struct kvf_test_key bytes;
    struct kvf_key key = kvf_test_key(300, &bytes);
    struct kvf_put_item item = {.struct_bytes = sizeof(item),
                                .source = KVF_SOURCE_BYTES,
                                .key = key,
                                .data = "x",
                                .data_bytes = 1};
    struct kvf_hit hit;

    (void)state;
    assert_int_equal(kvf_get(the_scheduler, &key, 1, NULL, &hit), KVF_ERR_INVALID);
    assert_int_equal(kvf_put(the_scheduler, &item, 1, NULL, NULL), KVF_ERR_INVALID);
}

static void test_scheduler_leases_sets(void **state)
{
    enum {
        N = 8
    };
    struct kvf_lookup_result result;
    uint64_t record;

    (void)state;
    for (uint64_t number = 400; number < 400 + N; number++) {
        put_set(number, KVF_PUT_NO_WRITE);
    }
    assert_int_equal(lookup(the_scheduler, 400, N, KVF_LOOKUP_LEASE, 0, &result), KVF_OK);
    assert_int_equal(result.ready_chunks, N);
    record = leased_bytes(the_scheduler) / N / RANKS;
    assert_true(record >= BLOCK_BYTES && record < BLOCK_BYTES * 2);
    /* everything else goes, these stay */
    for (uint64_t number = 2000; number < 2500; number++) {
        put_set(number, KVF_PUT_NO_WRITE);
    }
    assert_int_equal(run_of(the_scheduler, 2000, 1), 0);
    assert_int_equal(run_of(the_scheduler, 400, N), N);
    for (uint64_t number = 400; number < 400 + N; number++) {
        assert_set_is(number, KVF_OK);
    }
    assert_int_equal(kvf_lease_release(the_scheduler, result.lease), KVF_OK);
    assert_int_equal(leased_bytes(the_scheduler), 0);
}

/* --- sets on the drive --------------------------------------------------------------------------
 */

static void restart(void)
{
    close_all();
    kvf_test_daemon_kill(&the_daemon);
    kvf_test_daemon_start(&the_daemon);
    open_all();
}

static void test_prefetch_after_restart(void **state)
{
    enum {
        N = 6
    };
    struct kvf_lookup_result result;
    struct kvf_test_key bytes[N];
    struct kvf_key keys[N];
    uint32_t n = 0;

    (void)state;
    for (uint64_t number = 500; number < 500 + N; number++) {
        put_set(number, KVF_PUT_DURABLE);
    }
    restart();
    assert_int_equal(lookup(the_scheduler, 500, N, 0, 0, &result), KVF_OK);
    assert_int_equal(result.run_chunks, N);
    assert_int_equal(result.ready_chunks, 0);
    for (uint64_t i = 0; i < 3; i++) {
        keys[i] = kvf_test_key(500 + i, &bytes[i]);
    }
    assert_int_equal(kvf_prefetch(the_scheduler, keys, 3, &n), KVF_OK);
    assert_int_equal(n, 3);
    assert_int_equal(lookup(the_scheduler, 500, N, KVF_LOOKUP_LEASE, 60000, &result), KVF_OK);
    assert_int_equal(result.ready_chunks, N);
    for (uint64_t number = 500; number < 500 + N; number++) {
        for (int rank = 0; rank < RANKS; rank++) {
            uint8_t tier;

            assert_int_equal(get_shard(rank, number, &tier), KVF_OK);
            assert_int_equal(tier, KVF_TIER_DRAM);
        }
    }
    assert_int_equal(kvf_lease_release(the_scheduler, result.lease), KVF_OK);
}

/* One shard was never written: after a restart the set is not whole until it is put again. */
static void test_partly_on_drive(void **state)
{
    (void)state;
    for (int rank = 0; rank < RANKS; rank++) {
        assert_int_equal(put_shard(rank, 600, rank == 1 ? KVF_PUT_NO_WRITE : KVF_PUT_DURABLE),
                         KVF_OK);
    }
    assert_int_equal(run_of(the_scheduler, 600, 1), 1);
    restart();
    assert_int_equal(run_of(the_scheduler, 600, 1), 0);
    assert_int_equal(get_shard(1, 600, NULL), KVF_MISS);
    assert_int_equal(put_shard(1, 600, 0), KVF_OK);
    assert_int_equal(put_shard(0, 600, 0), KVF_EXISTS);
    assert_int_equal(run_of(the_scheduler, 600, 1), 1);
    assert_set_is(600, KVF_OK);
}

static int setup_with(const char *timeout)
{
    const char *const sets[] = {timeout, NULL};

    kvf_test_daemon_create(&the_daemon, sets);
    kvf_test_daemon_start(&the_daemon);
    open_all();
    return 0;
}

/* --- sets that stay incomplete ------------------------------------------------------------------
 */

static void test_set_timeout(void **state)
{
    const struct timespec pause = {.tv_nsec = 50 * KVF_NS_PER_MS};
    uint64_t number = 700, start_ns, n_timed_out;

    (void)state;
    do { /* again if it took so long that the first shards may have timed out before the last */
        n_timed_out = kvf_test_daemon_number(&the_daemon, "metrics.evicted_sets_incomplete");
        number += 10;
        start_ns = kvf_now_ns();
        put_set(number, 0);
        for (int rank = 0; rank < RANKS - 1; rank++) {
            assert_int_equal(put_shard(rank, number + 1, rank == 0 ? KVF_PUT_DURABLE : 0), KVF_OK);
        }
    } while (kvf_now_ns() - start_ns > KVF_NS_PER_S);
    while (get_shard(0, number + 1, NULL) == KVF_OK) {
        assert_true(kvf_now_ns() - start_ns < 60 * KVF_NS_PER_S);
        nanosleep(&pause, NULL);
    }
    assert_true(kvf_now_ns() - start_ns >= KVF_NS_PER_S);
    assert_set_is(number + 1, KVF_MISS);
    assert_set_is(number, KVF_OK);
    n_timed_out = kvf_test_daemon_number(&the_daemon, "metrics.evicted_sets_incomplete") -
                  n_timed_out;
    assert_true(number == 710 ? n_timed_out == 1 : n_timed_out >= 1);
    do { /* as above */
        for (int rank = 0; rank < RANKS; rank++) {
            int status = put_shard(rank, number + 1, 0);

            assert_true(status == KVF_OK || status == KVF_EXISTS);
        }
        assert_true(kvf_now_ns() - start_ns < 120 * KVF_NS_PER_S);
    } while (run_of(the_scheduler, number, 2) != 2);
}

static int setup(void **state)
{
    (void)state;
    return setup_with("put.set_timeout=60s");
}

static int setup_short(void **state)
{
    (void)state;
    return setup_with("put.set_timeout=2s");
}

static int teardown(void **state)
{
    (void)state;
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.protocol_errors"), 0);
    close_all();
    assert_int_equal(kvf_test_daemon_stop(&the_daemon), 0);
    kvf_test_daemon_destroy(&the_daemon);
    return 0;
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_late_shard),
        TEST(test_failing_shard),
        TEST(test_evicted_as_one),
        TEST(test_room_takes_whole_sets),
        TEST(test_scheduler_may_not_read_or_write),
        TEST(test_scheduler_leases_sets),
        TEST(test_prefetch_after_restart),
        TEST(test_partly_on_drive),
        cmocka_unit_test_setup_teardown(test_set_timeout, setup_short, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
