/* SPDX-License-Identifier: Apache-2.0
 *
 * test_peer_sets.c: chunks of four shards that are at other nodes: seen when each shard is at some
 * node, leased when all of them have come, and not at all when one of them is missing or does not
 * come. Three real daemons, over UCX on loopback.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/support/blocks.h"
#include "tests/support/daemon.h"

#define NODES       3
#define RANKS       4
#define ALL         0xfu /* of the ranks */
#define BLOCK_BYTES 40000
#define CHUNKS_MAX  32
#define WAIT_MS     60000u

struct node {
    struct kvf_test_daemon daemon;
    struct kvf_client *ranks[RANKS];
    struct kvf_client *scheduler;
    bool is_there, is_open;
    char listen[64];
    char peers[128];
};

static struct node nodes[NODES];
static struct kvf_test_dir keys;
static char key_set[KVF_TEST_PATH_BYTES + 32];
static uint16_t ports[NODES];

/* ----------------------------------------------------------------------------------------------
 * Nodes
 */
static struct kvf_client *open_shard(struct node *node, uint16_t shard)
{
    struct kvf_options options;
    struct kvf_client *client;

    kvf_test_client_options(&node->daemon, &options);
    options.shard = shard;
    options.shard_count = RANKS;
    options.staging_bytes = 1 << 20;
    assert_int_equal(kvf_open(&options, &client), KVF_OK);
    return client;
}

static void open_all(struct node *node)
{
    for (uint16_t rank = 0; rank < RANKS; rank++) {
        node->ranks[rank] = open_shard(node, rank);
    }
    node->scheduler = open_shard(node, KVF_SHARD_NONE);
    node->is_open = true;
}

static void close_all(struct node *node)
{
    for (uint32_t rank = 0; rank < RANKS && node->is_open; rank++) {
        node->ranks[rank] = kvf_close(node->ranks[rank]);
    }
    node->scheduler = node->is_open ? kvf_close(node->scheduler) : NULL;
    node->is_open = false;
}

/* Node i, linked with those of the mask; set: one more setting, or NULL. */
static struct node *node_create(uint32_t i, uint32_t mask, const char *set)
{
    struct node *node = &nodes[i];
    size_t n = (size_t)snprintf(node->peers, sizeof(node->peers), "peers.nodes=");

    for (uint32_t k = 0; k < NODES; k++) {
        if ((mask >> k & 1) != 0) {
            n += (size_t)snprintf(node->peers + n, sizeof(node->peers) - n, "127.0.0.1:%u,",
                                  ports[k]);
        }
    }
    (void)snprintf(node->listen, sizeof(node->listen), "peers.listen=127.0.0.1:%u", ports[i]);
    kvf_test_daemon_create(&node->daemon, NULL);
    node->is_there = true;
    kvf_test_daemon_set(&node->daemon, key_set);
    kvf_test_daemon_set(&node->daemon, node->listen);
    kvf_test_daemon_set(&node->daemon, node->peers);
    kvf_test_daemon_set(&node->daemon, "peers.timeout=60s");
    kvf_test_daemon_set(&node->daemon, "peers.heartbeat=60s");
    kvf_test_daemon_set(&node->daemon, set != NULL ? set : "put.set_timeout=300s");
    return node;
}

static void node_run(struct node *node)
{
    kvf_test_daemon_start(&node->daemon);
    open_all(node);
}

static struct node *node_start(uint32_t i, uint32_t mask, const char *set)
{
    struct node *node = node_create(i, mask, set);

    node_run(node);
    return node;
}

static int setup(void **state)
{
    char path[KVF_TEST_PATH_BYTES];
    uint8_t key[32] = {1, 2, 3};

    (void)state;
    memset(nodes, 0, sizeof(nodes));
    kvf_test_dir_create(&keys);
    kvf_test_dir_path(&keys, "key", path);
    kvf_test_file_write(path, key, sizeof(key));
    (void)snprintf(key_set, sizeof(key_set), "cluster_key=%s", path);
    for (uint32_t i = 0; i < NODES; i++) {
        ports[i] = kvf_test_free_port();
    }
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < NODES; i++) {
        close_all(&nodes[i]);
        if (nodes[i].is_there) {
            kvf_test_daemon_destroy(&nodes[i].daemon);
        }
    }
    kvf_test_dir_remove(&keys);
    return 0;
}

static uint64_t number_of(const struct node *node, const char *metric)
{
    return kvf_test_daemon_number(&node->daemon, metric);
}

static void wait_metric(const struct node *node, const char *metric, uint64_t wanted)
{
    if (!kvf_test_daemon_wait_number(&node->daemon, metric, wanted, WAIT_MS)) {
        fail_msg("%s is %llu, not %llu", metric, (unsigned long long)number_of(node, metric),
                 (unsigned long long)wanted);
    }
}

/* ----------------------------------------------------------------------------------------------
 * Sets
 */

/* All ranks use the same key, and each its own bytes. */
static uint64_t content(uint64_t number, uint32_t rank)
{
    return number * 16 + rank;
}

static void put_shard(struct node *node, uint32_t rank, uint64_t number, uint32_t flags)
{
    struct kvf_put_options options = {.struct_bytes = sizeof(options), .flags = flags};
    uint8_t payload[BLOCK_BYTES];
    struct kvf_test_key bytes;
    struct kvf_put_item item = {.struct_bytes = sizeof(item),
                                .source = KVF_SOURCE_BYTES,
                                .key = kvf_test_key(number, &bytes),
                                .data = payload,
                                .data_bytes = sizeof(payload)};

    kvf_test_payload_fill(content(number, rank), payload, sizeof(payload));
    assert_int_equal(kvf_put(node->ranks[rank], &item, 1, &options, NULL), KVF_OK);
}

/* The shards of the mask, of each of these chunks. */
static void put(struct node *node, uint64_t first, uint64_t n, uint32_t ranks, uint32_t flags)
{
    for (uint64_t number = first; number < first + n; number++) {
        for (uint32_t rank = 0; rank < RANKS; rank++) {
            if ((ranks >> rank & 1) != 0) {
                put_shard(node, rank, number, flags);
            }
        }
    }
}

static int get_shard(struct node *node, uint32_t rank, uint64_t number, uint8_t *tier_out)
{
    struct kvf_test_key bytes;
    struct kvf_key key = kvf_test_key(number, &bytes);
    struct kvf_get_options options = {.struct_bytes = sizeof(options), .budget_ms = WAIT_MS};
    struct kvf_hit hit;

    (void)kvf_get(node->ranks[rank], &key, 1, &options, &hit);
    *tier_out = hit.tier;
    return kvf_test_hit_check(node->ranks[rank], &hit, content(number, rank), BLOCK_BYTES);
}

/* Every rank has its shard of each of these, in memory. */
static void get_all(struct node *node, uint64_t first, uint64_t n)
{
    for (uint64_t number = first; number < first + n; number++) {
        for (uint32_t rank = 0; rank < RANKS; rank++) {
            uint8_t tier;

            assert_int_equal(get_shard(node, rank, number, &tier), KVF_OK);
            assert_int_equal(tier, KVF_TIER_DRAM);
        }
    }
}

/* budget_ms 0: what is where; else bring it here, wait and lease it. */
static int lookup(struct node *node, uint64_t first, uint32_t n, uint32_t budget_ms,
                  struct kvf_lookup_result *result_out)
{
    struct kvf_lookup_options options = {.struct_bytes = sizeof(options),
                                         .flags = budget_ms != 0 ? KVF_LOOKUP_LEASE : 0,
                                         .budget_ms = budget_ms};
    struct kvf_test_key bytes[CHUNKS_MAX];
    struct kvf_key chain[CHUNKS_MAX];

    for (uint32_t i = 0; i < n; i++) {
        chain[i] = kvf_test_key(first + i, &bytes[i]);
    }
    return kvf_lookup(node->scheduler, chain, n, &options, result_out);
}

/* So many sets are at some node, and so many come when they are waited for. */
static void assert_run(struct node *node, uint64_t first, uint32_t n, uint32_t run, uint32_t ready)
{
    struct kvf_lookup_result result;

    assert_int_equal(lookup(node, first, n, 0, &result), KVF_OK);
    assert_int_equal(result.run_chunks, run);
    assert_int_equal(lookup(node, first, n, WAIT_MS, &result), KVF_OK);
    assert_int_equal(result.ready_chunks, ready);
    assert_int_equal(result.coming_chunks, 0);
    assert_true((result.lease != 0) == (ready != 0));
    if (ready != 0) {
        get_all(node, first, ready);
        assert_int_equal(kvf_lease_release(node->scheduler, result.lease), KVF_OK);
    }
}

/* Nothing is leased or half there. */
static void assert_nothing_held(const struct node *node)
{
    wait_metric(node, "metrics.leased_bytes", 0);
    wait_metric(node, "metrics.incomplete_sets", 0);
}

/* ----------------------------------------------------------------------------------------------
 * Whole ones
 */
static void test_whole(void **state)
{
    struct node *a = node_start(0, 0, NULL);
    struct node *b = node_start(1, 1, NULL);

    (void)state;
    put(a, 0, 6, ALL, 0);
    wait_metric(b, "metrics.peer_hints", 6 * RANKS);
    assert_run(b, 0, 8, 6, 6);
    wait_metric(b, "metrics.peer_fetched_blocks", 6 * RANKS);
    assert_nothing_held(b);
    assert_int_equal(number_of(b, "metrics.peer_stale_hints"), 0);
    wait_metric(b, "index_entries", 6 * (RANKS + 1));
}

/* What one node has not, another one has: a chunk is whole all the same. */
static void test_spread(void **state)
{
    struct node *a = node_start(0, 0, NULL);
    struct node *b = node_start(1, 0, NULL);
    struct node *c;

    (void)state;
    put(a, 0, 4, 0x3, 0);
    put(b, 0, 4, 0xc, 0);
    c = node_start(2, 3, NULL);
    wait_metric(c, "metrics.peer_hints", 4 * RANKS);
    /* of one more, this node has a shard by itself */
    put(a, 4, 1, 0x1, 0);
    put(b, 4, 1, 0xa, 0);
    put(c, 4, 1, 0x4, 0);
    wait_metric(c, "metrics.peer_hints", 4 * RANKS + 3);
    assert_run(a, 0, 4, 0, 0);
    assert_run(b, 0, 4, 0, 0);
    assert_run(c, 0, 5, 5, 5);
    wait_metric(c, "metrics.peer_fetched_blocks", 4 * RANKS + 3);
    assert_nothing_held(c);
}

/* ----------------------------------------------------------------------------------------------
 * One shard is missing
 */
static void test_missing(void **state)
{
    struct node *a = node_start(0, 0, NULL);
    struct node *b = node_start(1, 1, NULL);
    struct kvf_test_key bytes;
    struct kvf_key key = kvf_test_key(0, &bytes);
    uint32_t accepted = 77;

    (void)state;
    put(a, 0, 1, ALL & ~0x4u, 0);
    put(a, 1, 2, ALL, 0);
    wait_metric(b, "metrics.peer_hints", 3 * RANKS - 1);
    assert_run(b, 0, 3, 0, 0);
    assert_int_equal(kvf_prefetch(b->scheduler, &key, 1, &accepted), KVF_MISS);
    assert_int_equal(accepted, 0);
    /* no shard of it has been asked for in vain */
    assert_int_equal(number_of(b, "metrics.peer_fetched_blocks"), 0);
    assert_nothing_held(b);
    put(a, 0, 1, 0x4, 0);
    wait_metric(b, "metrics.peer_hints", 3 * RANKS);
    assert_run(b, 0, 3, 3, 3);
    assert_nothing_held(b);
}

/* Shards that cannot be read where they are: of their set nothing is promised and nothing stays,
 * the set before it is a hit as before, and the owner can be asked again once it has been put. */
static void test_failing(void **state)
{
    struct node *a = node_start(0, 0, NULL);
    struct node *b = node_create(1, 1, "put.set_timeout=2s");

    (void)state;
    put(a, 0, 2, ALL, KVF_PUT_DURABLE);
    close_all(a);
    kvf_test_daemon_kill(&a->daemon);
    a->daemon.failpoints = "nvme.record_read=error@6+";
    node_run(a); /* all are on its drive only, and from the second set one shard can be read */
    node_run(b);
    wait_metric(b, "metrics.peer_hints", 2 * RANKS);
    assert_run(b, 0, 1, 1, 1);
    assert_int_equal(number_of(b, "metrics.peer_fetched_blocks"), RANKS);
    assert_run(b, 1, 1, 1, 0);
    assert_in_range(number_of(b, "metrics.peer_fetched_blocks"), RANKS, RANKS + 1);
    assert_true(number_of(b, "metrics.peer_stale_hints") >= RANKS - 1);
    assert_nothing_held(b);
    wait_metric(b, "index_entries", RANKS + 1);
    assert_run(b, 0, 1, 1, 1);
    put(a, 1, 1, ALL, 0);
    wait_metric(b, "metrics.peer_hints", 2 * RANKS);
    assert_run(b, 0, 2, 2, 2);
    assert_nothing_held(b);
    wait_metric(b, "index_entries", 2 * (RANKS + 1));
}

/* ----------------------------------------------------------------------------------------------
 * The owner dies meanwhile
 */
struct reader {
    pthread_t thread;
    struct node *node;
    uint64_t first;
    uint32_t n_ready;
    _Atomic bool is_begun;
};

/* Chunk by chunk: what is leased, each rank can read. */
static void *read_sets(void *arg)
{
    struct reader *reader = arg;

    for (uint64_t number = reader->first; number < reader->first + CHUNKS_MAX; number++) {
        struct kvf_lookup_result result;
        int status = lookup(reader->node, number, 1, WAIT_MS, &result);

        reader->is_begun = true;
        assert_int_equal(status, KVF_OK);
        assert_int_equal(result.coming_chunks, 0);
        if (result.ready_chunks == 1) {
            get_all(reader->node, number, 1);
            assert_int_equal(kvf_lease_release(reader->node->scheduler, result.lease), KVF_OK);
        }
        reader->n_ready += result.ready_chunks;
    }
    return NULL;
}

static void test_killed_owner(void **state)
{
    struct node *a = node_start(0, 0, NULL);
    struct node *b = node_start(1, 1, "put.set_timeout=2s");
    struct reader reader = {.node = b};

    (void)state;
    put(a, 0, CHUNKS_MAX, ALL, 0);
    wait_metric(b, "metrics.peer_hints", CHUNKS_MAX * RANKS);
    assert_int_equal(pthread_create(&reader.thread, NULL, read_sets, &reader), 0);
    while (!reader.is_begun) {
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
    close_all(a);
    kvf_test_daemon_kill(&a->daemon);
    assert_int_equal(pthread_join(reader.thread, NULL), 0);
    assert_true(reader.n_ready >= 1);
    wait_metric(b, "metrics.peers", 0);
    wait_metric(b, "metrics.peer_hints", 0);
    assert_nothing_held(b);
    /* what has come whole is still here */
    for (uint64_t number = 0; number < CHUNKS_MAX; number++) {
        struct kvf_lookup_result result;

        assert_int_equal(lookup(b, number, 1, 0, &result), KVF_OK);
        reader.n_ready -= result.ready_chunks;
        assert_int_equal(result.ready_chunks, result.run_chunks);
    }
    assert_int_equal(reader.n_ready, 0);
    close_all(b);
    assert_int_equal(kvf_test_daemon_stop(&b->daemon), 0); /* with all flights landed */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_whole, setup, teardown),
        cmocka_unit_test_setup_teardown(test_spread, setup, teardown),
        cmocka_unit_test_setup_teardown(test_missing, setup, teardown),
        cmocka_unit_test_setup_teardown(test_failing, setup, teardown),
        cmocka_unit_test_setup_teardown(test_killed_owner, setup, teardown),
    };

    (void)setenv("UCX_TLS", "tcp", 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
