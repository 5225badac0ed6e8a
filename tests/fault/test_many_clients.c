/* SPDX-License-Identifier: Apache-2.0
 *
 * test_many_clients.c: 64 processes put and get through an arena that holds a tenth of their
 * blocks; a reader holds a lease all the while; processes are killed in the middle of a put and of
 * a read; and one puts a block under more names than its tenant may have.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "tests/support/blocks.h"
#include "tests/support/daemon.h"

#define N_CLIENTS   64
#define N_EACH      84 /* blocks: 64 * 84 * 64 KiB are 10.5 times the arena */
#define BLOCK_BYTES (60 << 10)
#define N_HELD      16
#define HELD_FIRST  1000000
#define KILL_ROUNDS 10
#define N_NAMES     3

static struct kvf_test_daemon the_daemon;

/* Written by the children, read by their parent. */
struct shared {
    _Atomic uint64_t n_put, n_hits, n_hits_nvme, n_misses, n_busy, n_bad;
    _Atomic uint32_t n_at_work;
};

static struct shared *the_shared;

static struct kvf_client *open_small(void)
{
    struct kvf_options options;
    struct kvf_client *client;

    kvf_test_client_options(&the_daemon, &options);
    options.ring_entries = 64;
    options.staging_bytes = 1 << 20;
    return kvf_open(&options, &client) == KVF_OK ? client : NULL;
}

/* --- 64 clients ---------------------------------------------------------------------------------
 */

static void count_get(int status, uint8_t tier)
{
    atomic_fetch_add(&the_shared->n_hits, status == KVF_OK);
    atomic_fetch_add(&the_shared->n_hits_nvme, status == KVF_OK && tier == KVF_TIER_NVME);
    atomic_fetch_add(&the_shared->n_misses, status == KVF_MISS);
    atomic_fetch_add(&the_shared->n_busy, status == KVF_ERR_BUSY);
    atomic_fetch_add(&the_shared->n_bad,
                     status != KVF_OK && status != KVF_MISS && status != KVF_ERR_BUSY);
}

/* A client: puts its own blocks, gets its own and those of others. Returns its exit code. */
static int client_run(uint64_t me, uint64_t seed)
{
    struct kvf_client *client = open_small();
    struct kvf_random_seeded random;

    if (client == NULL) {
        return 1;
    }
    kvf_random_seeded_init(&random, seed + me);
    for (uint64_t i = 0; i < N_EACH; i++) {
        int status = kvf_test_block_put(client, me * N_EACH + i, BLOCK_BYTES, 0);
        uint8_t tier;

        atomic_fetch_add(&the_shared->n_put, status == KVF_OK);
        atomic_fetch_add(&the_shared->n_busy, status == KVF_ERR_BUSY);
        atomic_fetch_add(&the_shared->n_bad, status != KVF_OK && status != KVF_ERR_BUSY);
        for (int gets = 0; gets < 2; gets++) {
            uint64_t number = kvf_random_seeded_next(&random) % ((uint64_t)N_CLIENTS * N_EACH);

            status = kvf_test_block_get(client, number, BLOCK_BYTES, &tier);
            count_get(status, tier);
        }
        status = kvf_test_block_get(client, me * N_EACH + i, BLOCK_BYTES, &tier);
        count_get(status, tier);
    }
    kvf_close(client);
    return 0;
}

static void test_64_clients(void **state)
{
    struct kvf_client *reader = kvf_test_client_open(&the_daemon, NULL);
    struct kvf_test_key bytes[N_HELD];
    struct kvf_key keys[N_HELD];
    struct kvf_hit hits[N_HELD];
    uint64_t seed = kvf_test_seed();
    pid_t pids[N_CLIENTS];

    (void)state;
    for (uint64_t i = 0; i < N_HELD; i++) {
        keys[i] = kvf_test_key(HELD_FIRST + i, &bytes[i]);
        assert_int_equal(kvf_test_block_put(reader, HELD_FIRST + i, BLOCK_BYTES, 0), KVF_OK);
    }
    assert_int_equal(kvf_get(reader, keys, N_HELD, NULL, hits), KVF_OK);
    for (uint64_t i = 0; i < N_CLIENTS; i++) {
        pids[i] = fork();
        assert_true(pids[i] >= 0);
        if (pids[i] == 0) {
            _exit(client_run(i, seed));
        }
    }
    for (uint64_t i = 0; i < N_CLIENTS; i++) {
        int wait_status;

        assert_int_equal(waitpid(pids[i], &wait_status, 0), pids[i]);
        assert_int_equal(wait_status, 0);
    }
    print_message("puts %llu, hits %llu (%llu from the drive), misses %llu, busy %llu\n",
                  (unsigned long long)the_shared->n_put, (unsigned long long)the_shared->n_hits,
                  (unsigned long long)the_shared->n_hits_nvme,
                  (unsigned long long)the_shared->n_misses, (unsigned long long)the_shared->n_busy);
    assert_int_equal(the_shared->n_bad, 0);
    /* nobody was starved, and the arena did turn over */
    assert_true(the_shared->n_put >= (uint64_t)N_CLIENTS * N_EACH * 95 / 100);
    assert_true(the_shared->n_hits >= the_shared->n_put);
    assert_true(kvf_test_daemon_number(&the_daemon, "metrics.evicted_blocks") * BLOCK_BYTES >
                UINT64_C(8) * (32 << 20));
    /* what was leased before all of it is as it was */
    for (uint64_t i = 0; i < N_HELD; i++) {
        assert_int_equal(kvf_test_hit_check(reader, &hits[i], HELD_FIRST + i, BLOCK_BYTES), KVF_OK);
    }
    kvf_close(reader);
    assert_true(kvf_test_daemon_wait_number(&the_daemon, "clients", 0, 60000));
}

/* --- killed clients -----------------------------------------------------------------------------
 */

/* Puts for ever, all staging in flight. */
static void put_for_ever(struct kvf_client *client, uint64_t first)
{
    enum {
        N = 12
    };
    static uint8_t payload[BLOCK_BYTES];
    struct kvf_event events[4 * N];

    for (;;) {
        struct kvf_test_key keys[N];
        struct kvf_put_item items[N];
        uint64_t request;
        uint32_t n;

        for (int i = 0; i < N; i++) {
            items[i] = (struct kvf_put_item){.struct_bytes = sizeof(items[i]),
                                             .source = KVF_SOURCE_BYTES,
                                             .key = kvf_test_key(first++, &keys[i]),
                                             .data = payload,
                                             .data_bytes = BLOCK_BYTES};
        }
        (void)kvf_submit_put(client, items, N, NULL, 0, &request);
        atomic_store(&the_shared->n_at_work, 1);
        (void)kvf_poll(client, events, 4 * N, 0, &n);
    }
}

/* Reads for ever under leases that it never gives back. */
static void read_for_ever(struct kvf_client *client)
{
    struct kvf_test_key bytes[N_HELD];
    struct kvf_key keys[N_HELD];
    struct kvf_hit hits[N_HELD];
    volatile uint64_t sum = 0;

    for (uint64_t i = 0; i < N_HELD; i++) {
        keys[i] = kvf_test_key(HELD_FIRST + i, &bytes[i]);
    }
    if (kvf_get(client, keys, N_HELD, NULL, hits) != KVF_OK) {
        _exit(1);
    }
    atomic_store(&the_shared->n_at_work, 1);
    for (uint64_t i = 0;; i++) {
        sum += ((const uint8_t *)hits[i % N_HELD].payload)[i % BLOCK_BYTES];
    }
}

static bool is_at_work(void *arg)
{
    (void)arg;
    return atomic_load(&the_shared->n_at_work) != 0;
}

struct freed {
    uint64_t staging_bytes;
};

static bool is_freed(void *arg)
{
    const struct freed *freed = arg;

    return kvf_test_daemon_number(&the_daemon, "metrics.leased_bytes") == 0 &&
           kvf_test_daemon_number(&the_daemon, "staging_used_bytes") == freed->staging_bytes &&
           kvf_test_daemon_number(&the_daemon, "clients") == 1;
}

static int by_size(const void *a, const void *b)
{
    const uint64_t *x = a;
    const uint64_t *y = b;

    return (*x > *y) - (*x < *y);
}

/* Kill a client at its work; how long until all it had is free again? */
static uint64_t kill_one(bool reads, uint64_t first, uint64_t staging_bytes)
{
    struct freed freed = {.staging_bytes = staging_bytes};
    uint64_t start_ns;
    pid_t pid;

    atomic_store(&the_shared->n_at_work, 0);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct kvf_client *client = open_small();

        if (client == NULL) {
            _exit(1);
        }
        if (reads) {
            read_for_ever(client);
        }
        put_for_ever(client, first);
    }
    assert_true(kvf_test_wait_until(is_at_work, NULL, 60000));
    if (reads) {
        assert_true(kvf_test_daemon_number(&the_daemon, "metrics.leased_bytes") >=
                    N_HELD * BLOCK_BYTES);
    }
    assert_true(kvf_test_daemon_number(&the_daemon, "staging_used_bytes") > staging_bytes);
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    start_ns = kvf_now_ns();
    assert_true(kvf_test_wait_until(is_freed, &freed, 60000));
    return kvf_now_ns() - start_ns;
}

static void test_killed_clients(void **state)
{
    struct kvf_client *other = kvf_test_client_open(&the_daemon, NULL);
    uint64_t staging_bytes = kvf_test_daemon_number(&the_daemon, "staging_used_bytes");
    uint64_t took_ns[2 * KILL_ROUNDS];

    (void)state;
    for (uint64_t round = 0; round < 2 * KILL_ROUNDS; round++) {
        /* the writers may have pushed out those of the rounds before */
        for (uint64_t i = 0; i < N_HELD; i++) {
            int status = kvf_test_block_put(other, HELD_FIRST + i, BLOCK_BYTES, KVF_PUT_DURABLE);

            assert_true(status == KVF_OK || status == KVF_EXISTS);
        }
        took_ns[round] = kill_one(round % 2 == 0, 2000000 + round * 100000, staging_bytes);
        assert_int_equal(kvf_test_block_put(other, 3000000 + round, BLOCK_BYTES, 0), KVF_OK);
        assert_int_equal(kvf_test_block_get(other, 3000000 + round, BLOCK_BYTES, NULL), KVF_OK);
    }
    qsort(took_ns, 2 * KILL_ROUNDS, sizeof(took_ns[0]), by_size);
    print_message("freed after %.1f ms (median), %.1f ms (most)\n",
                  (double)took_ns[KILL_ROUNDS] / 1e6, (double)took_ns[2 * KILL_ROUNDS - 1] / 1e6);
    /* The promise is 100 ms, which a machine that does other things may not keep. On any it shows
     * that the daemon sees the death: what it would wait for otherwise, the age of a lease, never
     * comes here. */
    assert_true(took_ns[KILL_ROUNDS] < 2 * KVF_NS_PER_S);
    kvf_close(other);
}

/* --- one that invents names ---------------------------------------------------------------------
 */

struct name {
    uint64_t number;
    struct kvf_client *client;
    int status; /* of the last try */
};

static bool opens(void *arg)
{
    struct name *name = arg;
    struct kvf_options options;
    char label[32];

    kvf_test_client_options(&the_daemon, &options);
    snprintf(label, sizeof(label), "name %" PRIu64, name->number);
    options.namespace_label = label;
    name->status = kvf_open(&options, &name->client);
    return name->status == KVF_OK;
}

/* Whoever was there before may still be on its way out. */
static struct kvf_client *open_name(uint64_t number)
{
    struct name name = {.number = number};

    assert_true(kvf_test_wait_until(opens, &name, 60000));
    return name.client;
}

static void assert_refused(uint64_t number)
{
    struct name name = {.number = number};
    uint64_t before = kvf_test_daemon_number(&the_daemon, "metrics.namespaces_refused");

    assert_false(opens(&name));
    assert_int_equal(name.status, KVF_ERR_REFUSED);
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.namespaces_refused"), before + 1);
}

/* A tiny block under each of many names: it gets as many as its tenant may have, the others are
 * told, and one that has become empty makes room. */
static void test_namespaces_have_a_quota(void **state)
{
    struct kvf_info info = {.struct_bytes = sizeof(info)};
    struct kvf_client *client;
    char question[128];

    (void)state;
    for (uint64_t i = 0; i < N_NAMES; i++) {
        client = open_name(i);
        assert_int_equal(kvf_test_block_put(client, i, 100, 0), KVF_OK);
        kvf_close(client);
    }
    assert_refused(N_NAMES);
    assert_refused(N_NAMES + 1);
    assert_true(kvf_test_daemon_log_has(&the_daemon, "quota.namespaces"));

    client = open_name(1);
    assert_int_equal(kvf_test_block_get(client, 1, 100, NULL), KVF_OK);
    assert_int_equal(kvf_client_info(client, &info), KVF_OK);
    kvf_close(client);
    snprintf(question, sizeof(question), "/v1/evict?namespace=%016" PRIx64, info.namespace_id);
    assert_int_equal(kvf_test_daemon_command(&the_daemon, question, "evicted"), 1);
    kvf_close(open_name(N_NAMES));
}

static int setup_names(void **state)
{
    static const char *const sets[] = {"dram.bytes=16MiB", "quota.namespaces=3", NULL};

    (void)state;
    kvf_test_daemon_create(&the_daemon, sets);
    kvf_test_daemon_start(&the_daemon);
    return 0;
}

static int setup(void **state)
{
    static const char *const sets[] = {"dram.bytes=32MiB", "nvme.0.bytes=256MiB",
                                       "lease.max_age=3600s", "clients.max=70", NULL};

    (void)state;
    kvf_test_daemon_create(&the_daemon, sets);
    kvf_test_daemon_start(&the_daemon);
    memset(the_shared, 0, sizeof(*the_shared));
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.protocol_errors"), 0);
    assert_true(kvf_test_daemon_wait_number(&the_daemon, "staging_used_bytes", 0, 60000));
    assert_int_equal(kvf_test_daemon_stop(&the_daemon), 0);
    kvf_test_daemon_destroy(&the_daemon);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_64_clients, setup, teardown),
        cmocka_unit_test_setup_teardown(test_killed_clients, setup, teardown),
        cmocka_unit_test_setup_teardown(test_namespaces_have_a_quota, setup_names, teardown),
    };

    the_shared = mmap(NULL, sizeof(*the_shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                      -1, 0);
    if (the_shared == MAP_FAILED) {
        return 1;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
