/* SPDX-License-Identifier: Apache-2.0
 *
 * test_limits.c: tables that fill up, and names that come back. A full index makes room, a watch
 * over an incomplete set is not taken for that of an older one of the same name, and what
 * concerns a set looks at all of it.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/clock.h"
#include "tests/conformance/room.h"
#include "tests/support/blocks.h"
#include "tests/support/daemon.h"

#define SHARDS      2
#define BLOCK_BYTES 20000

static struct kvf_test_daemon the_daemon;

static struct kvf_client *open_rank(uint16_t shard)
{
    return room_open(&the_daemon, NULL, NULL, shard, SHARDS, 4 << 20);
}

static void begin(const char *const *sets)
{
    kvf_test_daemon_create(&the_daemon, sets);
    kvf_test_daemon_start(&the_daemon);
}

static int end(void **state)
{
    (void)state;
    kvf_test_daemon_destroy(&the_daemon);
    return 0;
}

/* --- sets that are watched ----------------------------------------------------------------------
 */

/* Half sets of the same few names, made and evicted until the daemon has more watches to forget
 * than it keeps: those that it forgets are over, whoever has their name now. */
static void test_many_lives_of_a_name(void **state)
{
    enum {
        NAMES = 32,
        WATCHES = 1 << 16,
        ROUNDS = WATCHES / NAMES + 100
    };
    struct kvf_client *rank;

    (void)state;
    begin(NULL);
    rank = open_rank(0);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        uint32_t n_evicted = 0;

        room_put_all(rank, 0, NAMES, 8, KVF_PUT_NO_WRITE);
        assert_int_equal(kvf_evict(rank, room_keys(0, NAMES), NAMES, &n_evicted), KVF_OK);
        assert_int_equal(n_evicted, NAMES);
    }
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.evicted_sets_incomplete"), 0);
    kvf_close(rank);
}

/* A set that is put again has all of set_timeout, not what its forerunner left. */
static void test_deadline_of_a_second_life(void **state)
{
    static const char *const sets[] = {"put.set_timeout=2s", NULL};
    struct kvf_client *rank;
    uint64_t begun_ns;
    int status;

    (void)state;
    begin(sets);
    rank = open_rank(0);
    do { /* again if this process woke up only after the first life was over */
        assert_int_equal(kvf_test_block_put(rank, 1, BLOCK_BYTES, KVF_PUT_NO_WRITE), KVF_OK);
        room_sleep_ms(1300);
        status = kvf_evict(rank, room_keys(1, 1), 1, NULL);
        assert_true(status == KVF_OK || status == KVF_MISS);
    } while (status != KVF_OK);
    begun_ns = kvf_now_ns();
    assert_int_equal(kvf_test_block_put(rank, 1, BLOCK_BYTES, KVF_PUT_NO_WRITE), KVF_OK);
    while (kvf_test_block_get(rank, 1, BLOCK_BYTES, NULL) == KVF_OK) {
        assert_true(kvf_now_ns() - begun_ns < 60 * KVF_NS_PER_S);
        room_sleep_ms(20);
    }
    assert_true(kvf_now_ns() - begun_ns >= 2 * KVF_NS_PER_S);
    kvf_close(rank);
}

/* The old chunk stays until all shards of the new one are there. */
static void test_supersedes_waits_for_the_set(void **state)
{
    struct kvf_client *ranks[SHARDS];
    struct kvf_test_key old_key, new_key;
    uint8_t payload[BLOCK_BYTES];

    (void)state;
    begin(NULL);
    for (uint16_t i = 0; i < SHARDS; i++) {
        ranks[i] = open_rank(i);
        assert_int_equal(room_put(ranks[i], 1, i, BLOCK_BYTES, NULL), KVF_OK);
    }
    for (uint16_t i = 0; i < SHARDS; i++) {
        struct kvf_put_item item = {.struct_bytes = sizeof(item),
                                    .source = KVF_SOURCE_BYTES,
                                    .key = kvf_test_key(2, &new_key),
                                    .supersedes = kvf_test_key(1, &old_key),
                                    .data = payload,
                                    .data_bytes = sizeof(payload)};
        struct kvf_lookup_result result;

        kvf_test_payload_fill(10u + i, payload, sizeof(payload));
        assert_int_equal(kvf_put(ranks[i], &item, 1, NULL, NULL), KVF_OK);
        for (uint16_t rank = 0; rank < SHARDS; rank++) {
            struct kvf_hit hit;

            (void)kvf_get(ranks[rank], room_keys(1, 1), 1, NULL, &hit);
            assert_int_equal(kvf_test_hit_check(ranks[rank], &hit, rank, BLOCK_BYTES),
                             i + 1 == SHARDS ? KVF_MISS : KVF_OK);
        }
        assert_int_equal(kvf_lookup(ranks[0], room_keys(2, 1), 1, NULL, &result), KVF_OK);
        assert_int_equal(result.run_chunks, i + 1 == SHARDS);
    }
    for (uint16_t i = 0; i < SHARDS; i++) {
        kvf_close(ranks[i]);
    }
}

/* One leased shard is enough for an evict to leave the whole set, and a purge takes the lease. */
static void test_commands_look_at_whole_sets(void **state)
{
    struct kvf_client *ranks[SHARDS];
    struct kvf_hit hit;

    (void)state;
    begin(NULL);
    for (uint64_t number = 1; number <= 2; number++) {
        for (uint16_t i = 0; i < SHARDS; i++) {
            ranks[i] = number == 1 ? open_rank(i) : ranks[i];
            assert_int_equal(kvf_test_block_put(ranks[i], number, BLOCK_BYTES, KVF_PUT_NO_WRITE),
                             KVF_OK);
        }
    }
    assert_int_equal(kvf_get(ranks[1], room_keys(1, 1), 1, NULL, &hit), KVF_OK);
    (void)room_command(&the_daemon, ranks[0], "/v1/evict");
    assert_int_equal(kvf_test_block_get(ranks[0], 1, BLOCK_BYTES, NULL), KVF_OK);
    assert_int_equal(kvf_test_block_get(ranks[1], 1, BLOCK_BYTES, NULL), KVF_OK);
    assert_int_equal(kvf_test_block_get(ranks[0], 2, BLOCK_BYTES, NULL), KVF_MISS);
    assert_int_equal(kvf_test_block_get(ranks[1], 2, BLOCK_BYTES, NULL), KVF_MISS);
    assert_int_equal(kvf_lease_check(ranks[1], hit.lease), KVF_OK);

    (void)room_command(&the_daemon, ranks[0], "/v1/purge");
    assert_int_equal(kvf_lease_release(ranks[1], hit.lease), KVF_ERR_LOST);
    assert_int_equal(kvf_test_block_get(ranks[0], 1, BLOCK_BYTES, NULL), KVF_MISS);
    assert_int_equal(kvf_test_block_get(ranks[1], 1, BLOCK_BYTES, NULL), KVF_MISS);
    for (uint16_t i = 0; i < SHARDS; i++) {
        kvf_close(ranks[i]);
    }
}

/* --- the index ----------------------------------------------------------------------------------
 */
#define INDEX_ENTRIES 256

static const char *const small_index[] = {"index.entries=256", NULL};

static void test_full_index(void **state)
{
    struct kvf_client *client;

    (void)state;
    begin(small_index);
    client = kvf_test_client_open(&the_daemon, NULL);
    room_put_all(client, 0, 4000, 100, KVF_PUT_NO_WRITE);
    assert_int_equal(room_count(client, 0, 1000, 100), 0);
    assert_in_range(room_count(client, 4000 - INDEX_ENTRIES, INDEX_ENTRIES, 100), INDEX_ENTRIES / 4,
                    INDEX_ENTRIES);
    assert_true(kvf_test_daemon_number(&the_daemon, "index_entries") <= INDEX_ENTRIES);
    /* what is leased stays */
    for (int i = 0; i < 2; i++) {
        struct kvf_hit hit;

        assert_int_equal(kvf_get(client, room_keys(3999, 1), 1, NULL, &hit), KVF_OK);
        room_put_all(client, 5000, 1000, 100, KVF_PUT_NO_WRITE);
        assert_int_equal(kvf_test_block_get(client, 3999, 100, NULL), KVF_OK);
        assert_int_equal(kvf_lease_release(client, hit.lease), KVF_OK);
        (void)room_command(&the_daemon, client, "/v1/evict");
        assert_int_equal(kvf_test_block_put(client, 3999, 100, KVF_PUT_NO_WRITE), KVF_OK);
    }
    kvf_close(client);
}

/* A new block may get the entry that is the next to be taken: it is spared once. */
static void test_full_index_spares_the_new(void **state)
{
    struct kvf_client *client;

    (void)state;
    begin(small_index);
    client = kvf_test_client_open(&the_daemon, NULL);
    /* one more than there are: no old one is new any longer, and block 0 has left its place */
    room_put_all(client, 0, INDEX_ENTRIES + 1, 100, KVF_PUT_NO_WRITE);
    assert_int_equal(kvf_test_block_get(client, 0, 100, NULL), KVF_MISS);
    assert_int_equal(kvf_evict(client, room_keys(1, 1), 1, NULL), KVF_OK);
    room_put_all(client, 1000, 1, 100, KVF_PUT_NO_WRITE); /* in the place of 1 */
    room_put_all(client, 1001, 1, 100, KVF_PUT_NO_WRITE);
    assert_int_equal(kvf_test_block_get(client, 2, 100, NULL), KVF_MISS);
    assert_int_equal(room_count(client, 1000, 2, 100), 2);
    kvf_close(client);
}

/* Entries whose blocks are on the drive only are given up as well: the drive has room for all of
 * these, memory and index do not. */
static void test_full_index_of_a_drive(void **state)
{
    static const char *const sets[] = {"index.entries=256", "dram.bytes=16MiB",
                                       "nvme.0.bytes=192MiB", NULL};
    enum {
        N = 600,
        BYTES = 200 << 10
    };
    struct kvf_client *client;

    (void)state;
    begin(sets);
    client = kvf_test_client_open(&the_daemon, NULL);
    room_put_all(client, 0, N, BYTES, KVF_PUT_DURABLE);
    assert_true(kvf_test_daemon_number(&the_daemon, "index_entries") <= INDEX_ENTRIES);
    assert_int_equal(kvf_test_block_get(client, N - 1, BYTES, NULL), KVF_OK);
    assert_in_range(room_count(client, 0, N, BYTES), INDEX_ENTRIES / 4, INDEX_ENTRIES);
    kvf_close(client);
}

/* Sets need an entry of their own: many half ones at a time find it, too. */
static void test_full_index_of_sets(void **state)
{
    struct kvf_client *ranks[SHARDS];

    (void)state;
    begin(small_index);
    for (uint16_t i = 0; i < SHARDS; i++) {
        ranks[i] = open_rank(i);
    }
    for (uint64_t first = 0; first < 4000; first += 20) {
        room_put_all(ranks[0], first, 20, 100, KVF_PUT_NO_WRITE);
        room_put_all(ranks[1], first, 20, 100, KVF_PUT_NO_WRITE);
    }
    for (uint16_t i = 0; i < SHARDS; i++) {
        assert_int_equal(kvf_test_block_get(ranks[i], 3999, 100, NULL), KVF_OK);
        kvf_close(ranks[i]);
    }
}

/* --- time to live, depth ------------------------------------------------------------------------
 */
static void test_ttl(void **state)
{
    struct kvf_put_options options = {.struct_bytes = sizeof(options), .ttl_s = UINT32_MAX};
    struct kvf_client *client;
    uint64_t begun_ns;

    (void)state;
    begin(NULL);
    client = kvf_test_client_open(&the_daemon, NULL);
    while (kvf_test_daemon_number(&the_daemon, "uptime_s") < 2) {
        room_sleep_ms(50); /* later than the moment whose sum just fits */
    }
    assert_int_equal(room_put(client, 1, 1, BLOCK_BYTES, &options), KVF_OK);
    options.ttl_s = 1;
    begun_ns = kvf_now_ns();
    assert_int_equal(room_put(client, 2, 2, BLOCK_BYTES, &options), KVF_OK);
    while (kvf_test_block_get(client, 2, BLOCK_BYTES, NULL) == KVF_OK) {
        assert_true(kvf_now_ns() - begun_ns < 60 * KVF_NS_PER_S);
        room_sleep_ms(10);
    }
    assert_true(kvf_now_ns() - begun_ns >= KVF_NS_PER_S);
    room_sleep_ms(600); /* expiry runs twice a second */
    assert_int_equal(kvf_test_block_get(client, 1, BLOCK_BYTES, NULL), KVF_OK);
    kvf_close(client);
}

/* A put into the middle of a chain whose beginning nobody named is no head: nothing would ever
 * find it on the drive. */
static void test_depth_without_parent(void **state)
{
    struct kvf_put_options options = {.struct_bytes = sizeof(options), .depth = 5};
    struct kvf_client *client;

    (void)state;
    begin(NULL);
    client = kvf_test_client_open(&the_daemon, NULL);
    assert_int_equal(room_put(client, 1, 1, BLOCK_BYTES, &options), KVF_OK);
    assert_int_equal(kvf_test_block_put(client, 2, 2 * BLOCK_BYTES, KVF_PUT_DURABLE), KVF_OK);
    assert_in_range(room_stat(client).namespace_nvme_bytes, 2 * BLOCK_BYTES,
                    2 * BLOCK_BYTES + 2 * KVF_RECORD_PAGE_BYTES);
    kvf_close(client);
    kvf_test_daemon_kill(&the_daemon);
    kvf_test_daemon_start(&the_daemon);
    client = kvf_test_client_open(&the_daemon, NULL);
    assert_int_equal(kvf_test_block_get(client, 1, BLOCK_BYTES, NULL), KVF_MISS);
    assert_int_equal(kvf_test_block_get(client, 2, 2 * BLOCK_BYTES, NULL), KVF_OK);
    kvf_close(client);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_many_lives_of_a_name, end),
        cmocka_unit_test_teardown(test_deadline_of_a_second_life, end),
        cmocka_unit_test_teardown(test_supersedes_waits_for_the_set, end),
        cmocka_unit_test_teardown(test_commands_look_at_whole_sets, end),
        cmocka_unit_test_teardown(test_full_index, end),
        cmocka_unit_test_teardown(test_full_index_spares_the_new, end),
        cmocka_unit_test_teardown(test_full_index_of_a_drive, end),
        cmocka_unit_test_teardown(test_full_index_of_sets, end),
        cmocka_unit_test_teardown(test_ttl, end),
        cmocka_unit_test_teardown(test_depth_without_parent, end),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
