/* SPDX-License-Identifier: Apache-2.0
 *
 * test_requests.c: each kind of request against a real daemon, by the blocking calls: what it
 * answers, and that the bytes are the block's.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "tests/support/blocks.h"
#include "tests/support/daemon.h"

#define BLOCK_BYTES 10000

static struct kvf_test_daemon the_daemon;
static struct kvf_client *the_client;

/* Each test counts its blocks from a number of its own. */
enum base {
    BASE_SIZES = 1000,
    BASE_EXISTS = 2000,
    BASE_STAGED = 3000,
    BASE_CHAIN = 4000,
    BASE_TAILS = 5000,
    BASE_PARTIAL = 6000,
    BASE_EVICT = 7000,
    BASE_STAT = 8000,
    BASE_TTL = 9000,
    BASE_SUPERSEDE = 10000,
    BASE_LARGE = 11000,
    BASE_LABEL = 12000,
    BASE_MANY = 100000,
};

static void keys_of(uint64_t first, uint32_t n, struct kvf_test_key *bytes_out,
                    struct kvf_key *keys_out)
{
    for (uint32_t i = 0; i < n; i++) {
        keys_out[i] = kvf_test_key(first + i, &bytes_out[i]);
    }
}

/* Puts n blocks as one chain. */
static int put_chain(struct kvf_client *client, uint64_t first, uint32_t n, size_t bytes,
                     const struct kvf_put_options *options, int32_t *statuses_out)
{
    struct kvf_put_item *items = calloc(n, sizeof(*items));
    struct kvf_test_key *keys = calloc(n, sizeof(*keys));
    uint8_t *payloads = malloc(n * bytes);
    int status;

    assert_true(items != NULL && keys != NULL && payloads != NULL);
    for (uint32_t i = 0; i < n; i++) {
        kvf_test_payload_fill(first + i, payloads + i * bytes, bytes);
        items[i] = (struct kvf_put_item){.struct_bytes = sizeof(items[i]),
                                         .source = KVF_SOURCE_BYTES,
                                         .key = kvf_test_key(first + i, &keys[i]),
                                         .data = payloads + i * bytes,
                                         .data_bytes = bytes};
    }
    status = kvf_put(client, items, n, options, statuses_out);
    free(payloads);
    free(keys);
    free(items);
    return status;
}

static struct kvf_stat stat_of(struct kvf_client *client)
{
    struct kvf_stat stat = {.struct_bytes = sizeof(stat)};

    assert_int_equal(kvf_stat(client, &stat), KVF_OK);
    return stat;
}

/* A release is a message without an answer; a stat behind it sees it done. */
static void assert_nothing_leased(void)
{
    assert_int_equal(stat_of(the_client).leased_bytes, 0);
}

/* --- the requests -------------------------------------------------------------------------------
 */

static void test_ping(void **state)
{
    uint64_t round_trip_ns = 0;

    (void)state;
    assert_int_equal(kvf_ping(the_client, 60000, &round_trip_ns), KVF_OK);
    assert_true(round_trip_ns > 0);
}

static void test_put_get_sizes(void **state)
{
    static const size_t sizes[] = {1, 7, 4095, 4096, 4097, 65536, 100001, (1 << 20) - 4096};

    (void)state;
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        uint8_t tier;

        assert_int_equal(kvf_test_block_get(the_client, BASE_SIZES + i, sizes[i], NULL), KVF_MISS);
        assert_int_equal(kvf_test_block_put(the_client, BASE_SIZES + i, sizes[i], 0), KVF_OK);
        assert_int_equal(kvf_test_block_get(the_client, BASE_SIZES + i, sizes[i], &tier), KVF_OK);
        assert_int_equal(tier, KVF_TIER_DRAM);
    }
    assert_nothing_leased();
}

static void test_put_exists_and_conflict(void **state)
{
    struct kvf_test_key key;
    uint8_t other[BLOCK_BYTES];
    struct kvf_put_item item = {.struct_bytes = sizeof(item),
                                .source = KVF_SOURCE_BYTES,
                                .key = kvf_test_key(BASE_EXISTS, &key),
                                .data = other,
                                .data_bytes = sizeof(other)};
    uint64_t conflicts = kvf_test_daemon_number(&the_daemon, "metrics.put_conflict");
    int32_t block_status;

    (void)state;
    kvf_test_payload_fill(BASE_EXISTS + 1, other, sizeof(other));
    assert_int_equal(kvf_test_block_put(the_client, BASE_EXISTS, BLOCK_BYTES, 0), KVF_OK);
    assert_int_equal(kvf_test_block_put(the_client, BASE_EXISTS, BLOCK_BYTES, 0), KVF_EXISTS);
    assert_int_equal(kvf_put(the_client, &item, 1, NULL, &block_status), KVF_ERR_CONFLICT);
    assert_int_equal(block_status, KVF_ERR_CONFLICT);
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.put_conflict"), conflicts + 1);
    assert_int_equal(kvf_test_block_get(the_client, BASE_EXISTS, BLOCK_BYTES, NULL), KVF_OK);
}

/* Twice in one request: the second may come while the first is still being copied. */
static void test_put_twice_in_one_request(void **state)
{
    struct kvf_test_key key;
    uint8_t payload[2][BLOCK_BYTES];
    struct kvf_put_item items[2];
    int32_t statuses[2];

    (void)state;
    for (int i = 0; i < 2; i++) {
        kvf_test_payload_fill(BASE_EXISTS + 10 + (uint64_t)i, payload[i], BLOCK_BYTES);
        items[i] = (struct kvf_put_item){.struct_bytes = sizeof(items[i]),
                                         .source = KVF_SOURCE_BYTES,
                                         .key = kvf_test_key(BASE_EXISTS + 10, &key),
                                         .data = payload[0],
                                         .data_bytes = BLOCK_BYTES};
    }
    assert_int_equal(kvf_put(the_client, items, 2, NULL, statuses), KVF_OK);
    assert_int_equal(statuses[0], KVF_OK);
    assert_true(statuses[1] == KVF_OK || statuses[1] == KVF_EXISTS);
    items[0].key = items[1].key = kvf_test_key(BASE_EXISTS + 11, &key);
    items[0].data = payload[1];
    assert_int_equal(kvf_put(the_client, items, 2, NULL, statuses), KVF_PARTIAL);
    assert_int_equal(statuses[0], KVF_OK);
    assert_int_equal(statuses[1], KVF_ERR_CONFLICT);
    assert_int_equal(kvf_test_block_get(the_client, BASE_EXISTS + 10, BLOCK_BYTES, NULL), KVF_OK);
    assert_int_equal(kvf_test_block_get(the_client, BASE_EXISTS + 11, BLOCK_BYTES, NULL), KVF_OK);
}

static void test_put_staged(void **state)
{
    struct kvf_test_key key;
    struct kvf_stage stage;
    struct kvf_put_item item = {.struct_bytes = sizeof(item), .source = KVF_SOURCE_STAGED};
    int32_t block_status;

    (void)state;
    assert_int_equal(kvf_stage_acquire(the_client, BLOCK_BYTES + 500, &stage), KVF_OK);
    assert_true(stage.payload_bytes >= BLOCK_BYTES + 500);
    kvf_test_payload_fill(BASE_STAGED, stage.payload, BLOCK_BYTES);
    assert_int_equal(kvf_stage_seal(the_client, &stage, BLOCK_BYTES), KVF_OK);
    item.key = kvf_test_key(BASE_STAGED, &key);
    item.stage = stage.stage;
    assert_int_equal(kvf_put(the_client, &item, 1, NULL, &block_status), KVF_OK);
    assert_int_equal(block_status, KVF_OK);
    assert_int_equal(kvf_test_block_get(the_client, BASE_STAGED, BLOCK_BYTES, NULL), KVF_OK);
    assert_int_equal(kvf_stage_release(the_client, stage.stage), KVF_ERR_INVALID);

    assert_int_equal(kvf_stage_acquire(the_client, BLOCK_BYTES, &stage), KVF_OK);
    assert_int_equal(kvf_stage_release(the_client, stage.stage), KVF_OK);
    assert_int_equal(kvf_stage_acquire(the_client, 64 << 20, &stage), KVF_ERR_TOO_LARGE);
}

static void test_lookup(void **state)
{
    enum {
        N = 8
    };
    struct kvf_test_key bytes[N];
    struct kvf_key keys[N];
    struct kvf_lookup_options options = {.struct_bytes = sizeof(options)};
    struct kvf_lookup_result result;

    (void)state;
    keys_of(BASE_CHAIN, N, bytes, keys);
    assert_int_equal(kvf_lookup(the_client, keys, N, NULL, &result), KVF_OK);
    assert_int_equal(result.run_chunks, 0);
    assert_int_equal(put_chain(the_client, BASE_CHAIN, N, BLOCK_BYTES, NULL, NULL), KVF_OK);
    assert_int_equal(kvf_lookup(the_client, keys, N, NULL, &result), KVF_OK);
    assert_int_equal(result.run_chunks, N);
    assert_int_equal(result.ready_chunks, N);
    assert_int_equal(result.tail_index, -1);
    assert_int_equal(result.coming_chunks, 0);
    assert_int_equal(result.lease, 0);

    options.flags = KVF_LOOKUP_LEASE;
    assert_int_equal(kvf_lookup(the_client, keys, N, &options, &result), KVF_OK);
    assert_int_equal(result.ready_chunks, N);
    assert_true(result.lease != 0);
    assert_true(stat_of(the_client).leased_bytes >= N * BLOCK_BYTES);
    assert_int_equal(kvf_lease_check(the_client, result.lease), KVF_OK);
    assert_int_equal(kvf_lease_release(the_client, result.lease), KVF_OK);
    assert_int_equal(kvf_lease_release(the_client, result.lease), KVF_ERR_INVALID);
    assert_nothing_leased();

    /* a hole ends the run, whatever follows */
    assert_int_equal(kvf_evict(the_client, &keys[3], 1, NULL), KVF_OK);
    options.flags = KVF_LOOKUP_LEASE | KVF_LOOKUP_PREFETCH;
    assert_int_equal(kvf_lookup(the_client, keys, N, &options, &result), KVF_OK);
    assert_int_equal(result.run_chunks, 3);
    assert_int_equal(result.ready_chunks, 3);
    assert_int_equal(kvf_lease_release(the_client, result.lease), KVF_OK);
    /* nothing found: no lease to give back */
    assert_int_equal(kvf_lookup(the_client, &keys[3], 2, &options, &result), KVF_OK);
    assert_int_equal(result.run_chunks, 0);
    assert_int_equal(result.lease, 0);
    assert_nothing_leased();
}

static void test_lookup_tails(void **state)
{
    struct kvf_test_key bytes[7];
    struct kvf_key keys[7];
    struct kvf_lookup_options options = {
        .struct_bytes = sizeof(options), .flags = KVF_LOOKUP_LEASE, .n_tail_keys = 3};
    struct kvf_lookup_result result;

    (void)state;
    keys_of(BASE_TAILS, 7, bytes, keys);
    assert_int_equal(put_chain(the_client, BASE_TAILS, 4, BLOCK_BYTES, NULL, NULL), KVF_OK);
    /* tails are keys 4, 5, 6, longest first; only 5 and 6 are here: 5 is taken */
    assert_int_equal(kvf_lookup(the_client, keys, 7, &options, &result), KVF_OK);
    assert_int_equal(result.run_chunks, 4);
    assert_int_equal(result.tail_index, -1);
    assert_int_equal(kvf_lease_release(the_client, result.lease), KVF_OK);
    assert_int_equal(kvf_test_block_put(the_client, BASE_TAILS + 5, BLOCK_BYTES, 0), KVF_OK);
    assert_int_equal(kvf_test_block_put(the_client, BASE_TAILS + 6, BLOCK_BYTES, 0), KVF_OK);
    assert_int_equal(kvf_lookup(the_client, keys, 7, &options, &result), KVF_OK);
    assert_int_equal(result.tail_index, 1);
    assert_int_equal(result.run_chunks, 5);
    assert_int_equal(result.ready_chunks, 5);
    assert_true(stat_of(the_client).leased_bytes >= 5 * BLOCK_BYTES);
    assert_int_equal(kvf_lease_release(the_client, result.lease), KVF_OK);
    /* a run that ends before the tails cannot be extended by one */
    assert_int_equal(kvf_evict(the_client, &keys[2], 1, NULL), KVF_OK);
    assert_int_equal(kvf_lookup(the_client, keys, 7, &options, &result), KVF_OK);
    assert_int_equal(result.run_chunks, 2);
    assert_int_equal(result.tail_index, -1);
    assert_int_equal(kvf_lease_release(the_client, result.lease), KVF_OK);
    /* only tails */
    assert_int_equal(kvf_lookup(the_client, keys + 4, 3, &options, &result), KVF_OK);
    assert_int_equal(result.tail_index, 1);
    assert_int_equal(kvf_lease_release(the_client, result.lease), KVF_OK);
    assert_nothing_leased();
}

static void test_get_partial(void **state)
{
    struct kvf_test_key bytes[3];
    struct kvf_key keys[3];
    struct kvf_hit hits[3];

    (void)state;
    keys_of(BASE_PARTIAL, 3, bytes, keys);
    assert_int_equal(kvf_get(the_client, keys, 3, NULL, hits), KVF_MISS);
    assert_int_equal(put_chain(the_client, BASE_PARTIAL, 2, BLOCK_BYTES, NULL, NULL), KVF_OK);
    assert_int_equal(kvf_get(the_client, keys, 3, NULL, hits), KVF_PARTIAL);
    assert_int_equal(kvf_test_hit_check(the_client, &hits[0], BASE_PARTIAL, BLOCK_BYTES), KVF_OK);
    assert_int_equal(kvf_test_hit_check(the_client, &hits[1], BASE_PARTIAL + 1, BLOCK_BYTES),
                     KVF_OK);
    assert_int_equal(hits[2].status, KVF_MISS);
    assert_int_equal(kvf_get(the_client, keys + 1, 2, NULL, hits), KVF_PARTIAL);
    assert_int_equal(kvf_lease_release(the_client, hits[0].lease), KVF_OK);
    assert_int_equal(kvf_get(the_client, keys + 2, 1, NULL, hits), KVF_MISS);
}

static void test_prefetch_and_evict(void **state)
{
    struct kvf_test_key bytes[3];
    struct kvf_key keys[3];
    uint32_t n = 77;

    (void)state;
    keys_of(BASE_EVICT, 3, bytes, keys);
    assert_int_equal(kvf_prefetch(the_client, keys, 3, &n), KVF_MISS);
    assert_int_equal(kvf_evict(the_client, keys, 3, &n), KVF_MISS);
    assert_int_equal(n, 0);
    assert_int_equal(put_chain(the_client, BASE_EVICT, 2, BLOCK_BYTES, NULL, NULL), KVF_OK);
    assert_int_equal(kvf_prefetch(the_client, keys, 3, &n), KVF_OK);
    assert_int_equal(n, 2);
    assert_int_equal(kvf_evict(the_client, keys, 3, &n), KVF_OK);
    assert_int_equal(n, 2);
    assert_int_equal(kvf_evict(the_client, keys, 3, NULL), KVF_MISS);
    assert_int_equal(kvf_test_block_get(the_client, BASE_EVICT, BLOCK_BYTES, NULL), KVF_MISS);
    /* and it can be put again, with other bytes even: nothing remembers the first */
    assert_int_equal(kvf_test_block_put(the_client, BASE_EVICT, BLOCK_BYTES + 1, 0), KVF_OK);
    assert_int_equal(kvf_test_block_get(the_client, BASE_EVICT, BLOCK_BYTES + 1, NULL), KVF_OK);
}

/* Evicted under a lease: no new hit, and the bytes stay until the release. */
static void test_evict_leased(void **state)
{
    struct kvf_test_key bytes;
    struct kvf_key key = kvf_test_key(BASE_EVICT + 10, &bytes);
    struct kvf_hit hit;

    (void)state;
    assert_int_equal(kvf_test_block_put(the_client, BASE_EVICT + 10, BLOCK_BYTES, 0), KVF_OK);
    assert_int_equal(kvf_get(the_client, &key, 1, NULL, &hit), KVF_OK);
    assert_int_equal(kvf_evict(the_client, &key, 1, NULL), KVF_OK);
    assert_int_equal(kvf_test_block_get(the_client, BASE_EVICT + 10, BLOCK_BYTES, NULL), KVF_MISS);
    for (uint64_t i = 0; i < 16; i++) { /* of the same slot class, so that its slot is wanted */
        assert_int_equal(kvf_test_block_put(the_client, BASE_EVICT + 20 + i, BLOCK_BYTES, 0),
                         KVF_OK);
    }
    assert_int_equal(kvf_test_hit_check(the_client, &hit, BASE_EVICT + 10, BLOCK_BYTES), KVF_OK);
    assert_nothing_leased();
}

static void test_stat(void **state)
{
    struct kvf_client *client = kvf_test_client_open(&the_daemon, "stat");
    struct kvf_stat stat = stat_of(client);

    (void)state;
    assert_int_equal(stat.namespace_blocks, 0);
    assert_int_equal(stat.arena_bytes, 64 << 20);
    assert_int_equal(put_chain(client, BASE_STAT, 4, BLOCK_BYTES, NULL, NULL), KVF_OK);
    assert_int_equal(kvf_test_block_get(client, BASE_STAT, BLOCK_BYTES, NULL), KVF_OK);
    assert_int_equal(kvf_test_block_get(client, BASE_STAT + 4, BLOCK_BYTES, NULL), KVF_MISS);
    stat = stat_of(client);
    assert_int_equal(stat.namespace_blocks, 4);
    assert_true(stat.namespace_dram_bytes >= 4 * BLOCK_BYTES);
    assert_true(stat.arena_stored_bytes >= stat.namespace_dram_bytes);
    assert_int_equal(stat.puts, 4);
    assert_int_equal(stat.hits, 1);
    assert_int_equal(stat.misses, 1);
    assert_int_equal(stat.leased_bytes, 0);
    assert_int_equal(stat.lost_leases, 0);
    kvf_close(client);
}

static void test_many_keys(void **state)
{
    enum {
        N = KVF_REQUEST_KEYS_MAX,
        BYTES = 3000
    };
    static struct kvf_test_key bytes[N];
    static struct kvf_key keys[N];
    static struct kvf_hit hits[N];
    static int32_t statuses[N];
    struct kvf_lookup_options options = {.struct_bytes = sizeof(options),
                                         .flags = KVF_LOOKUP_LEASE};
    struct kvf_lookup_result result;
    uint32_t n;

    (void)state;
    keys_of(BASE_MANY, N, bytes, keys);
    assert_int_equal(put_chain(the_client, BASE_MANY, N, BYTES, NULL, statuses), KVF_OK);
    for (uint32_t i = 0; i < N; i++) {
        assert_int_equal(statuses[i], KVF_OK);
    }
    assert_int_equal(put_chain(the_client, BASE_MANY, N, BYTES, NULL, statuses), KVF_OK);
    assert_int_equal(statuses[N - 1], KVF_EXISTS);
    assert_int_equal(kvf_get(the_client, keys, N, NULL, hits), KVF_OK);
    for (uint32_t i = 0; i < N; i++) {
        assert_int_equal(kvf_test_hit_check(the_client, &hits[i], BASE_MANY + i, BYTES), KVF_OK);
    }
    assert_int_equal(kvf_lookup(the_client, keys, N, &options, &result), KVF_OK);
    assert_int_equal(result.ready_chunks, N);
    assert_int_equal(kvf_lease_release(the_client, result.lease), KVF_OK);
    assert_int_equal(kvf_evict(the_client, keys, N, &n), KVF_OK);
    assert_int_equal(n, N);
    assert_int_equal(kvf_get(the_client, keys, N, NULL, hits), KVF_MISS);
    assert_nothing_leased();
}

static void test_ttl(void **state)
{
    const struct timespec pause = {.tv_nsec = 50 * KVF_NS_PER_MS};
    struct kvf_put_options options = {.struct_bytes = sizeof(options), .ttl_s = 2};
    uint64_t start_ns = kvf_now_ns();
    int32_t status;

    (void)state;
    assert_int_equal(put_chain(the_client, BASE_TTL, 1, BLOCK_BYTES, &options, NULL), KVF_OK);
    assert_int_equal(kvf_test_block_put(the_client, BASE_TTL + 1, BLOCK_BYTES, 0), KVF_OK);
    while (kvf_test_block_get(the_client, BASE_TTL, BLOCK_BYTES, NULL) == KVF_OK) {
        assert_true(kvf_now_ns() - start_ns < 60 * KVF_NS_PER_S);
        nanosleep(&pause, NULL);
    }
    assert_true(kvf_now_ns() - start_ns >= KVF_NS_PER_S); /* the daemon counts in whole seconds */
    assert_int_equal(kvf_test_block_get(the_client, BASE_TTL, BLOCK_BYTES, NULL), KVF_MISS);
    assert_int_equal(kvf_test_block_get(the_client, BASE_TTL + 1, BLOCK_BYTES, NULL), KVF_OK);
    options.flags = KVF_PUT_DURABLE; /* drives keep no times to live */
    assert_int_equal(put_chain(the_client, BASE_TTL + 2, 1, BLOCK_BYTES, &options, &status),
                     KVF_ERR_INVALID);
    assert_int_equal(status, KVF_ERR_INVALID);
    assert_int_equal(kvf_test_block_get(the_client, BASE_TTL + 2, BLOCK_BYTES, NULL), KVF_MISS);
}

static void test_supersedes(void **state)
{
    struct kvf_test_key bytes[2];
    uint8_t payload[BLOCK_BYTES];
    struct kvf_put_item item = {.struct_bytes = sizeof(item),
                                .source = KVF_SOURCE_BYTES,
                                .key = kvf_test_key(BASE_SUPERSEDE + 1, &bytes[1]),
                                .supersedes = kvf_test_key(BASE_SUPERSEDE, &bytes[0]),
                                .data = payload,
                                .data_bytes = sizeof(payload)};

    (void)state;
    kvf_test_payload_fill(BASE_SUPERSEDE + 1, payload, sizeof(payload));
    assert_int_equal(kvf_test_block_put(the_client, BASE_SUPERSEDE, BLOCK_BYTES, 0), KVF_OK);
    assert_int_equal(kvf_put(the_client, &item, 1, NULL, NULL), KVF_OK);
    assert_int_equal(kvf_test_block_get(the_client, BASE_SUPERSEDE, BLOCK_BYTES, NULL), KVF_MISS);
    assert_int_equal(kvf_test_block_get(the_client, BASE_SUPERSEDE + 1, BLOCK_BYTES, NULL), KVF_OK);
    /* naming a block that is not here, or itself, is no error */
    item.key = kvf_test_key(BASE_SUPERSEDE + 2, &bytes[1]);
    kvf_test_payload_fill(BASE_SUPERSEDE + 2, payload, sizeof(payload));
    assert_int_equal(kvf_put(the_client, &item, 1, NULL, NULL), KVF_OK);
    item.key = kvf_test_key(BASE_SUPERSEDE + 3, &bytes[1]);
    item.supersedes = item.key;
    kvf_test_payload_fill(BASE_SUPERSEDE + 3, payload, sizeof(payload));
    assert_int_equal(kvf_put(the_client, &item, 1, NULL, NULL), KVF_OK);
    assert_int_equal(kvf_test_block_get(the_client, BASE_SUPERSEDE + 3, BLOCK_BYTES, NULL), KVF_OK);
}

/* --- names and limits ---------------------------------------------------------------------------
 */

static void test_namespaces_do_not_cross(void **state)
{
    struct kvf_options options;
    struct kvf_client *others[4];

    (void)state;
    kvf_test_client_options(&the_daemon, &options);
    options.staging_bytes = 1 << 20;
    options.namespace_label = "other";
    assert_int_equal(kvf_open(&options, &others[0]), KVF_OK);
    options.namespace_label = NULL;
    options.weights_digest[31] = 1;
    assert_int_equal(kvf_open(&options, &others[1]), KVF_OK);
    options.weights_digest[31] = 0;
    options.adapter_digest[0] = 1;
    assert_int_equal(kvf_open(&options, &others[2]), KVF_OK);
    options.adapter_digest[0] = 0;
    options.shard_count = 2;
    assert_int_equal(kvf_open(&options, &others[3]), KVF_OK);
    assert_int_equal(kvf_test_block_put(the_client, BASE_LABEL, BLOCK_BYTES, 0), KVF_OK);
    for (int i = 0; i < 4; i++) {
        struct kvf_test_key bytes;
        struct kvf_key key = kvf_test_key(BASE_LABEL, &bytes);
        struct kvf_lookup_result result;

        assert_int_equal(kvf_test_block_get(others[i], BASE_LABEL, BLOCK_BYTES, NULL), KVF_MISS);
        assert_int_equal(kvf_lookup(others[i], &key, 1, NULL, &result), KVF_OK);
        assert_int_equal(result.run_chunks, 0);
        assert_int_equal(kvf_evict(others[i], &key, 1, NULL), KVF_MISS);
        /* the same key holds another block here */
        assert_int_equal(kvf_test_block_put(others[i], BASE_LABEL, BLOCK_BYTES + 1, 0), KVF_OK);
        kvf_close(others[i]);
    }
    assert_int_equal(kvf_test_block_get(the_client, BASE_LABEL, BLOCK_BYTES, NULL), KVF_OK);
}

static void test_too_large(void **state)
{
    struct kvf_client *client;
    struct kvf_options options;

    (void)state;
    /* more than this client's staging */
    assert_int_equal(kvf_test_block_put(the_client, BASE_LARGE, 5 << 20, 0), KVF_ERR_TOO_LARGE);
    assert_int_equal(kvf_test_block_get(the_client, BASE_LARGE, 5 << 20, NULL), KVF_MISS);
    /* it takes several areas in a row */
    kvf_test_client_options(&the_daemon, &options);
    options.staging_bytes = 16 << 20;
    assert_int_equal(kvf_open(&options, &client), KVF_OK);
    assert_int_equal(kvf_test_block_put(client, BASE_LARGE, 3 << 20, 0), KVF_OK);
    assert_int_equal(kvf_test_block_get(client, BASE_LARGE, 3 << 20, NULL), KVF_OK);
    kvf_close(client);
}

static void test_invalid_arguments(void **state)
{
    struct kvf_test_key bytes;
    struct kvf_key key = kvf_test_key(1, &bytes);
    struct kvf_key short_key = {.data = bytes.bytes, .bytes = KVF_KEY_BYTES_MIN - 1};
    struct kvf_key long_key = {.data = bytes.bytes, .bytes = KVF_KEY_BYTES_MAX + 1};
    struct kvf_put_item item = {.struct_bytes = sizeof(item), .key = key};
    struct kvf_lookup_options lookup = {.struct_bytes = sizeof(lookup), .n_tail_keys = 16};
    struct kvf_lookup_result result;
    struct kvf_hit hits[1];

    (void)state;
    assert_int_equal(kvf_get(the_client, &short_key, 1, NULL, hits), KVF_ERR_INVALID);
    assert_int_equal(kvf_get(the_client, &long_key, 1, NULL, hits), KVF_ERR_INVALID);
    assert_int_equal(kvf_get(the_client, &key, 0, NULL, hits), KVF_ERR_INVALID);
    assert_int_equal(kvf_get(the_client, &key, KVF_REQUEST_KEYS_MAX + 1, NULL, hits),
                     KVF_ERR_INVALID);
    assert_int_equal(kvf_lookup(the_client, &key, 1, &lookup, &result), KVF_ERR_INVALID);
    item.source = KVF_SOURCE_VIEW; /* of a handle without geometry */
    assert_int_equal(kvf_put(the_client, &item, 1, NULL, NULL), KVF_ERR_INVALID);
    assert_int_equal(kvf_lease_release(the_client, 0), KVF_ERR_INVALID);
    assert_int_equal(kvf_lease_release(the_client, UINT64_MAX), KVF_ERR_INVALID);
    assert_int_equal(kvf_cancel(the_client, 12345), KVF_ERR_INVALID);
}

static int group_setup(void **state)
{
    (void)state;
    kvf_test_daemon_create(&the_daemon, NULL);
    kvf_test_daemon_start(&the_daemon);
    the_client = kvf_test_client_open(&the_daemon, NULL);
    return 0;
}

static int group_teardown(void **state)
{
    (void)state;
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.protocol_errors"), 0);
    assert_true(kvf_test_daemon_is_alive(&the_daemon));
    kvf_close(the_client);
    assert_int_equal(kvf_test_daemon_stop(&the_daemon), 0);
    kvf_test_daemon_destroy(&the_daemon);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ping),
        cmocka_unit_test(test_put_get_sizes),
        cmocka_unit_test(test_put_exists_and_conflict),
        cmocka_unit_test(test_put_twice_in_one_request),
        cmocka_unit_test(test_put_staged),
        cmocka_unit_test(test_lookup),
        cmocka_unit_test(test_lookup_tails),
        cmocka_unit_test(test_get_partial),
        cmocka_unit_test(test_prefetch_and_evict),
        cmocka_unit_test(test_evict_leased),
        cmocka_unit_test(test_stat),
        cmocka_unit_test(test_many_keys),
        cmocka_unit_test(test_ttl),
        cmocka_unit_test(test_supersedes),
        cmocka_unit_test(test_namespaces_do_not_cross),
        cmocka_unit_test(test_too_large),
        cmocka_unit_test(test_invalid_arguments),
    };

    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
