/* SPDX-License-Identifier: Apache-2.0
 *
 * test_leases.c: what leases hold, how much of the arena they may hold, and the ways in which a
 * lease ends against its client's will: then, and only then, release says so.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "tests/support/blocks.h"
#include "tests/support/daemon.h"

#define BLOCK_BYTES  (250 << 10) /* with its page 254 KiB: four of them in an area of 1 MiB */
#define ARENA_BYTES  (32u << 20)
#define CLIENT_SHARE (ARENA_BYTES / 4)

static struct kvf_test_daemon the_daemon;

static uint64_t leased_bytes(struct kvf_client *client)
{
    struct kvf_stat stat = {.struct_bytes = sizeof(stat)};

    assert_int_equal(kvf_stat(client, &stat), KVF_OK);
    return stat.leased_bytes;
}

static int get(struct kvf_client *client, uint64_t number, struct kvf_hit *hit_out)
{
    struct kvf_test_key bytes;
    struct kvf_key key = kvf_test_key(number, &bytes);

    (void)kvf_get(client, &key, 1, NULL, hit_out);
    return hit_out->status;
}

/* Hold blocks first .. until the daemon says busy; returns how many. */
static uint32_t hold(struct kvf_client *client, uint64_t first, struct kvf_hit *hits_out,
                     uint32_t most)
{
    uint32_t n = 0;

    while (n < most && get(client, first + n, &hits_out[n]) == KVF_OK) {
        n++;
    }
    if (n < most) {
        assert_int_equal(hits_out[n].status, KVF_ERR_BUSY);
    }
    return n;
}

/* Puts that find no room are tried again: what waits for the drive is pinned, too, for a while. */
static void put_n(struct kvf_client *client, uint64_t first, uint32_t n)
{
    uint64_t deadline_ns = kvf_now_ns() + 120 * KVF_NS_PER_S;

    for (uint32_t i = 0; i < n; i++) {
        int status;

        do {
            status = kvf_test_block_put(client, first + i, BLOCK_BYTES, 0);
        } while (status == KVF_ERR_BUSY && kvf_now_ns() < deadline_ns);
        assert_int_equal(status, KVF_OK);
    }
}

/* A client may hold a quarter of the arena; what it then asks for is busy, not lost. */
static void test_share_of_a_client(void **state)
{
    struct kvf_client *client = kvf_test_client_open(&the_daemon, NULL);
    struct kvf_lookup_options options = {.struct_bytes = sizeof(options),
                                         .flags = KVF_LOOKUP_LEASE};
    struct kvf_lookup_result result;
    struct kvf_test_key bytes[40];
    struct kvf_key keys[40];
    struct kvf_hit hits[60];
    uint32_t n;

    (void)state;
    put_n(client, 0, 40);
    n = hold(client, 0, hits, 40);
    assert_true(n >= 28 && n <= 32);
    assert_true(leased_bytes(client) <= CLIENT_SHARE);
    for (uint32_t i = 0; i < n; i++) {
        assert_int_equal(kvf_test_hit_check(client, &hits[i], i, BLOCK_BYTES), KVF_OK);
    }
    assert_int_equal(leased_bytes(client), 0);
    /* a lookup's lease stops where the share does */
    for (uint32_t i = 0; i < 40; i++) {
        keys[i] = kvf_test_key(i, &bytes[i]);
    }
    assert_int_equal(kvf_lookup(client, keys, 40, &options, &result), KVF_OK);
    assert_true(result.ready_chunks >= 28 && result.ready_chunks <= 32);
    assert_int_equal(kvf_lease_release(client, result.lease), KVF_OK);
    assert_int_equal(leased_bytes(client), 0);
    kvf_close(client);
}

/* All clients of a tenant together hold at most three quarters, so that puts always find room. */
static void test_share_of_a_tenant(void **state)
{
    struct kvf_client *clients[5];
    struct kvf_hit hits[5][40];
    uint32_t n[5];
    uint32_t n_all = 0;

    (void)state;
    for (int c = 0; c < 5; c++) {
        clients[c] = kvf_test_client_open(&the_daemon, NULL);
    }
    for (int c = 0; c < 4; c++) {
        put_n(clients[c], (uint64_t)c * 100, 32);
        n[c] = hold(clients[c], (uint64_t)c * 100, hits[c], 32);
        n_all += n[c];
    }
    assert_true(n_all <= 3 * 32 && n_all >= 3 * 28);
    put_n(clients[4], 1000, 200);
    assert_int_equal(kvf_test_block_get(clients[4], 1199, BLOCK_BYTES, NULL), KVF_ERR_BUSY);
    for (int c = 0; c < 4; c++) {
        for (uint32_t i = 0; i < n[c]; i++) {
            assert_int_equal(
                kvf_test_hit_check(clients[c], &hits[c][i], (uint64_t)c * 100 + i, BLOCK_BYTES),
                KVF_OK);
        }
    }
    assert_int_equal(kvf_test_block_get(clients[4], 1199, BLOCK_BYTES, NULL), KVF_OK);
    for (int c = 0; c < 5; c++) {
        kvf_close(clients[c]);
    }
}

/* A lease over an arena that turns over ten times. */
static void test_turn_over(void **state)
{
    struct kvf_client *reader = kvf_test_client_open(&the_daemon, NULL);
    struct kvf_client *writer = kvf_test_client_open(&the_daemon, NULL);
    struct kvf_hit hits[20];
    uint32_t n_blocks = 10 * ARENA_BYTES / BLOCK_BYTES;

    (void)state;
    put_n(writer, 0, 20);
    assert_int_equal(hold(reader, 0, hits, 20), 20);
    for (uint32_t i = 0; i < n_blocks; i++) {
        assert_int_equal(kvf_test_block_put(writer, 1000 + i, BLOCK_BYTES, KVF_PUT_NO_WRITE),
                         KVF_OK);
        if (i % 100 == 0) {
            assert_true(kvf_test_payload_ok(i / 100 % 20, hits[i / 100 % 20].payload, BLOCK_BYTES));
            assert_int_equal(kvf_lease_check(reader, hits[i / 100 % 20].lease), KVF_OK);
        }
    }
    assert_true(kvf_test_daemon_number(&the_daemon, "metrics.evicted_blocks") >
                (uint64_t)n_blocks * 8 / 10);
    for (uint32_t i = 0; i < 20; i++) {
        assert_int_equal(kvf_test_hit_check(reader, &hits[i], i, BLOCK_BYTES), KVF_OK);
    }
    kvf_close(writer);
    kvf_close(reader);
}

/* More leases than the table of a small client has words. */
static void test_table_is_full(void **state)
{
    struct kvf_client *client;
    struct kvf_options options;
    static struct kvf_hit hits[1000];
    uint32_t n = 0;
    int status;

    (void)state;
    kvf_test_client_options(&the_daemon, &options);
    options.ring_entries = 64;
    options.staging_bytes = 1 << 20;
    assert_int_equal(kvf_open(&options, &client), KVF_OK);
    assert_int_equal(kvf_test_block_put(client, 1, 100, 0), KVF_OK);
    while (n < 1000 && get(client, 1, &hits[n]) == KVF_OK) {
        n++;
    }
    assert_true(n >= 64 && n < 1000);
    assert_int_equal(hits[n].status, KVF_ERR_BUSY);
    while (n > 0) {
        n--;
        assert_int_equal(kvf_test_hit_check(client, &hits[n], 1, 100), KVF_OK);
    }
    do { /* busy while releases wait for room in the ring */
        status = kvf_test_block_get(client, 1, 100, NULL);
    } while (status == KVF_ERR_BUSY);
    assert_int_equal(status, KVF_OK);
    assert_int_equal(leased_bytes(client), 0);
    kvf_close(client);
}

/* A purge takes leased blocks from their readers, who are told. */
static void test_purge(void **state)
{
    struct kvf_client *client = kvf_test_client_open(&the_daemon, "purged");
    struct kvf_client *other = kvf_test_client_open(&the_daemon, "other");
    struct kvf_info info = {.struct_bytes = sizeof(info)};
    struct kvf_stat stat = {.struct_bytes = sizeof(stat)};
    struct kvf_hit hit, other_hit;
    char path[64];

    (void)state;
    put_n(client, 0, 3);
    put_n(other, 0, 3);
    assert_int_equal(get(client, 1, &hit), KVF_OK);
    assert_int_equal(get(other, 1, &other_hit), KVF_OK);
    assert_int_equal(kvf_client_info(client, &info), KVF_OK);
    snprintf(path, sizeof(path), "/v1/purge?namespace=%016llx",
             (unsigned long long)info.namespace_id);
    assert_int_equal(kvf_test_daemon_command(&the_daemon, path, "evicted"), 3);
    assert_int_equal(kvf_lease_check(client, hit.lease), KVF_ERR_LOST);
    assert_int_equal(kvf_lease_release(client, hit.lease), KVF_ERR_LOST);
    assert_int_equal(kvf_test_block_get(client, 1, BLOCK_BYTES, NULL), KVF_MISS);
    assert_int_equal(kvf_stat(client, &stat), KVF_OK);
    assert_int_equal(stat.lost_leases, 1);
    assert_int_equal(stat.leased_bytes, 0);
    assert_int_equal(kvf_test_hit_check(other, &other_hit, 1, BLOCK_BYTES), KVF_OK);
    /* purged blocks do not come back, new ones of the same names do */
    assert_int_equal(kvf_test_block_put(client, 1, BLOCK_BYTES, KVF_PUT_DURABLE), KVF_OK);
    kvf_close(client);
    kvf_close(other);
    kvf_test_daemon_kill(&the_daemon);
    kvf_test_daemon_start(&the_daemon);
    client = kvf_test_client_open(&the_daemon, "purged");
    assert_int_equal(kvf_test_block_get(client, 0, BLOCK_BYTES, NULL), KVF_MISS);
    assert_int_equal(kvf_test_block_get(client, 1, BLOCK_BYTES, NULL), KVF_OK);
    assert_int_equal(kvf_test_block_get(client, 2, BLOCK_BYTES, NULL), KVF_MISS);
    kvf_close(client);
}

/* Held for longer than lease.max_age: the client is disconnected and its lease is lost; the handle
 * comes back. */
static void test_max_age(void **state)
{
    const struct timespec pause = {.tv_nsec = 20 * KVF_NS_PER_MS};
    struct kvf_client *client = kvf_test_client_open(&the_daemon, NULL);
    uint64_t start_ns = kvf_now_ns();
    uint64_t n_tries = 0;
    struct kvf_hit hit;

    (void)state;
    assert_int_equal(kvf_test_block_put(client, 1, BLOCK_BYTES, 0), KVF_OK);
    assert_int_equal(get(client, 1, &hit), KVF_OK);
    while (kvf_lease_check(client, hit.lease) == KVF_OK) {
        assert_true(kvf_now_ns() - start_ns < 60 * KVF_NS_PER_S);
        nanosleep(&pause, NULL);
    }
    assert_true(kvf_now_ns() - start_ns >= KVF_NS_PER_S);
    assert_int_equal(kvf_lease_release(client, hit.lease), KVF_ERR_LOST);
    while (kvf_test_block_get(client, 1, BLOCK_BYTES, NULL) != KVF_OK) { /* until it is back */
        assert_true(kvf_now_ns() - start_ns < 60 * KVF_NS_PER_S);
        nanosleep(&pause, NULL);
        n_tries++;
    }
    assert_true(kvf_test_daemon_wait_number(&the_daemon, "metrics.leased_bytes", 0, 60000));
    /* each try may have been stopped for longer than a lease lasts */
    assert_in_range(kvf_test_daemon_number(&the_daemon, "metrics.leases_lost"), 1, 1 + n_tries);
    kvf_close(client);
}

static int start_with(const char *max_age)
{
    const char *const sets[] = {"dram.bytes=32MiB", max_age, NULL};

    kvf_test_daemon_create(&the_daemon, sets);
    kvf_test_daemon_start(&the_daemon);
    return 0;
}

static int setup(void **state)
{
    (void)state;
    return start_with("lease.max_age=3600s");
}

static int setup_short(void **state)
{
    (void)state;
    return start_with("lease.max_age=1s");
}

static int teardown(void **state)
{
    (void)state;
    assert_int_equal(kvf_test_daemon_stop(&the_daemon), 0);
    kvf_test_daemon_destroy(&the_daemon);
    return 0;
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_share_of_a_client),
        TEST(test_share_of_a_tenant),
        TEST(test_turn_over),
        TEST(test_table_is_full),
        TEST(test_purge),
        cmocka_unit_test_setup_teardown(test_max_age, setup_short, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
