/* SPDX-License-Identifier: Apache-2.0
 *
 * test_peers.c: several real daemons that get blocks of each other, over UCX on loopback: what one
 * has is hit on another; who joins late learns what is there; owners that die, stand still, restart
 * or lose blocks; a node with another key; bytes that are no messages.
 *
 * Each get ends as a hit with the right bytes or as a miss; kvf_test_block_get looks at every byte.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/random.h"
#include "tests/support/blocks.h"
#include "tests/support/daemon.h"

#define NODES   3
#define WAIT_MS 60000u /* a slow machine is not what these tests look for */
#define PATIENT "peers.timeout=60s"
#define STEADY  "peers.heartbeat=60s"

struct node {
    struct kvf_test_daemon daemon;
    bool is_there;
    char listen[64];
    char nodes[128];
    char key_set[KVF_TEST_PATH_BYTES + 32];
};

static struct node nodes[NODES];
static struct kvf_test_dir keys;
static uint16_t ports[NODES];

/* Node i, linked with those of the mask. key: a number that names one. Not started. */
static struct kvf_test_daemon *node_create(uint32_t i, uint32_t mask, uint32_t key)
{
    struct node *node = &nodes[i];
    char name[16];
    char path[KVF_TEST_PATH_BYTES];
    uint8_t bytes[32];
    size_t n = 0;

    memset(bytes, (int)(0x40 + key), sizeof(bytes));
    (void)snprintf(name, sizeof(name), "key%u", key);
    kvf_test_dir_path(&keys, name, path);
    kvf_test_file_write(path, bytes, sizeof(bytes));
    (void)snprintf(node->key_set, sizeof(node->key_set), "cluster_key=%s", path);
    (void)snprintf(node->listen, sizeof(node->listen), "peers.listen=127.0.0.1:%u", ports[i]);
    n = (size_t)snprintf(node->nodes, sizeof(node->nodes), "peers.nodes=");
    for (uint32_t k = 0; k < NODES; k++) {
        if ((mask >> k & 1) != 0) {
            n += (size_t)snprintf(node->nodes + n, sizeof(node->nodes) - n, "127.0.0.1:%u,",
                                  ports[k]);
        }
    }
    kvf_test_daemon_create(&node->daemon, NULL);
    node->is_there = true;
    kvf_test_daemon_set(&node->daemon, node->key_set);
    kvf_test_daemon_set(&node->daemon, node->listen);
    kvf_test_daemon_set(&node->daemon, node->nodes);
    return &node->daemon;
}

/* The same, patient, started. more: a setting more, or NULL. */
static struct kvf_test_daemon *node_start_with(uint32_t i, uint32_t mask, uint32_t key,
                                               const char *more)
{
    struct kvf_test_daemon *daemon = node_create(i, mask, key);

    kvf_test_daemon_set(daemon, PATIENT);
    kvf_test_daemon_set(daemon, STEADY);
    if (more != NULL) {
        kvf_test_daemon_set(daemon, more);
    }
    kvf_test_daemon_start(daemon);
    return daemon;
}

static struct kvf_test_daemon *node_start(uint32_t i, uint32_t mask, uint32_t key)
{
    return node_start_with(i, mask, key, NULL);
}

static void wait_metric(const struct kvf_test_daemon *daemon, const char *metric, uint64_t wanted)
{
    if (!kvf_test_daemon_wait_number(daemon, metric, wanted, WAIT_MS)) {
        fail_msg("%s is %llu, not %llu", metric,
                 (unsigned long long)kvf_test_daemon_number(daemon, metric),
                 (unsigned long long)wanted);
    }
}

static size_t bytes_of(uint64_t number)
{
    return (size_t)(1 + number * 7919 % 300000 + (number % 8 == 7 ? 2000000 : 0));
}

static void put(const struct kvf_test_daemon *daemon, uint64_t first, uint64_t n, uint32_t flags)
{
    struct kvf_client *client = kvf_test_client_open(daemon, NULL);

    for (uint64_t i = first; i < first + n; i++) {
        assert_int_equal(kvf_test_block_put(client, i, bytes_of(i), flags), KVF_OK);
    }
    kvf_close(client);
}

/* Each is a hit of this tier. */
static void get(const struct kvf_test_daemon *daemon, uint64_t first, uint64_t n, uint8_t tier)
{
    struct kvf_client *client = kvf_test_client_open(daemon, NULL);

    for (uint64_t i = first; i < first + n; i++) {
        uint8_t from;

        assert_int_equal(kvf_test_block_get(client, i, bytes_of(i), &from), KVF_OK);
        assert_int_equal(from, tier);
    }
    kvf_close(client);
}

/* A hit, within a budget. */
static void get_in(const struct kvf_test_daemon *daemon, uint64_t number, uint32_t budget_ms)
{
    struct kvf_client *client = kvf_test_client_open(daemon, NULL);
    struct kvf_get_options options = {.struct_bytes = sizeof(options), .budget_ms = budget_ms};
    struct kvf_test_key bytes;
    struct kvf_key key = kvf_test_key(number, &bytes);
    struct kvf_hit hit;

    assert_int_equal(kvf_get(client, &key, 1, &options, &hit), KVF_OK);
    assert_int_equal(kvf_test_hit_check(client, &hit, number, bytes_of(number)), KVF_OK);
    kvf_close(client);
}

static void get_miss(const struct kvf_test_daemon *daemon, uint64_t number)
{
    struct kvf_client *client = kvf_test_client_open(daemon, NULL);

    assert_int_equal(kvf_test_block_get(client, number, bytes_of(number), NULL), KVF_MISS);
    kvf_close(client);
}

static int setup(void **state)
{
    (void)state;
    memset(nodes, 0, sizeof(nodes));
    kvf_test_dir_create(&keys);
    for (uint32_t i = 0; i < NODES; i++) {
        ports[i] = kvf_test_free_port();
    }
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < NODES; i++) {
        if (nodes[i].is_there) {
            kvf_test_daemon_destroy(&nodes[i].daemon);
        }
    }
    kvf_test_dir_remove(&keys);
    return 0;
}

/* ----------------------------------------------------------------------------------------------
 * Blocks of others
 */
static void test_hits(void **state)
{
    struct kvf_test_daemon *a = node_start(0, 0, 1);
    struct kvf_test_daemon *b = node_start_with(1, 1, 1, "peers.endpoints=3");
    struct kvf_client *client;
    struct kvf_lookup_options options = {.struct_bytes = sizeof(options)};
    struct kvf_lookup_result result;
    struct kvf_test_key bytes[5];
    struct kvf_key chain[5];

    (void)state;
    wait_metric(b, "metrics.peers", 1);
    wait_metric(b, "metrics.peer_endpoints", 3);
    wait_metric(a, "metrics.peer_endpoints", 3); /* it has asked for none itself */
    put(a, 0, 25, 0);
    wait_metric(b, "metrics.peer_hints", 25);
    get(b, 0, 20, KVF_TIER_REMOTE);
    get(b, 0, 20, KVF_TIER_DRAM);
    get_miss(b, 99);
    wait_metric(b, "metrics.get_hits_remote", 20);
    wait_metric(a, "metrics.peer_served_blocks", 20);

    /* a chain is counted wherever it is, and comes if somebody waits */
    client = kvf_test_client_open(b, NULL);
    for (uint64_t i = 0; i < 5; i++) {
        chain[i] = kvf_test_key(20 + i, &bytes[i]);
    }
    assert_int_equal(kvf_lookup(client, chain, 5, &options, &result), KVF_OK);
    assert_int_equal(result.run_chunks, 5);
    assert_int_equal(result.ready_chunks, 0);
    options.budget_ms = WAIT_MS;
    assert_int_equal(kvf_lookup(client, chain, 5, &options, &result), KVF_OK);
    assert_int_equal(result.run_chunks, 5);
    assert_int_equal(result.ready_chunks, 5);
    kvf_close(client);
    get(b, 20, 5, KVF_TIER_DRAM);
    wait_metric(b, "metrics.peer_fetched_blocks", 25);
    assert_int_equal(kvf_test_daemon_number(b, "metrics.peer_stale_hints"), 0);
    assert_int_equal(kvf_test_daemon_stop(a), 0);
    wait_metric(b, "metrics.peers", 0);
    wait_metric(b, "metrics.peer_endpoints", 0);
    assert_int_equal(kvf_test_daemon_stop(b), 0);
}

/* What is there is told to who comes late, and what goes later, too. */
static void test_late(void **state)
{
    struct kvf_test_daemon *a = node_start(0, 0, 1);
    struct kvf_test_daemon *b = node_start(1, 1, 1);
    struct kvf_test_daemon *c;
    struct kvf_client *client;
    struct kvf_test_key bytes;
    struct kvf_key key = kvf_test_key(3, &bytes);

    (void)state;
    put(a, 0, 10, 0);
    put(b, 10, 10, 0);
    c = node_start(2, 3, 1);
    wait_metric(c, "metrics.peers", 2);
    wait_metric(c, "metrics.peer_hints", 20);
    wait_metric(c, "metrics.peer_snapshots", 2);
    client = kvf_test_client_open(a, NULL);
    assert_int_equal(kvf_evict(client, &key, 1, NULL), KVF_OK);
    kvf_close(client);
    wait_metric(c, "metrics.peer_hints", 19);
    get_miss(c, 3);
    get(c, 0, 3, KVF_TIER_REMOTE);
    get(c, 10, 10, KVF_TIER_REMOTE);
}

/* A block that its owner has on a drive only, after it was killed. */
static void test_restart(void **state)
{
    struct kvf_test_daemon *a = node_start(0, 0, 1);
    struct kvf_test_daemon *b = node_start(1, 1, 1);

    (void)state;
    put(a, 0, 6, KVF_PUT_DURABLE);
    wait_metric(b, "metrics.peer_hints", 6);
    kvf_test_daemon_kill(a);
    wait_metric(b, "metrics.peers", 0);
    get_miss(b, 0);
    kvf_test_daemon_start(a);
    wait_metric(b, "metrics.peers", 1);
    wait_metric(b, "metrics.peer_hints", 6);
    get(b, 0, 6, KVF_TIER_REMOTE);
}

/* ----------------------------------------------------------------------------------------------
 * Owners that fail
 */
struct reader {
    pthread_t thread;
    const struct kvf_test_daemon *daemon;
    uint64_t first, n;
    uint32_t hits, misses, others;
};

static void *read_all(void *arg)
{
    struct reader *reader = arg;
    struct kvf_client *client = kvf_test_client_open(reader->daemon, NULL);

    for (uint64_t i = reader->first; i < reader->first + reader->n; i++) {
        int status = kvf_test_block_get(client, i, bytes_of(i), NULL);

        reader->hits += status == KVF_OK;
        reader->misses += status == KVF_MISS;
        reader->others += status != KVF_OK && status != KVF_MISS;
    }
    kvf_close(client);
    return NULL;
}

static void test_kill(void **state)
{
    struct kvf_test_daemon *a = node_start(0, 0, 1);
    struct kvf_test_daemon *b = node_start(1, 1, 1);
    struct reader readers[2] = {{.daemon = b, .first = 0, .n = 24},
                                {.daemon = b, .first = 8, .n = 24}};

    (void)state;
    put(a, 0, 32, 0);
    wait_metric(b, "metrics.peer_hints", 32);
    for (uint32_t i = 0; i < 2; i++) {
        assert_int_equal(pthread_create(&readers[i].thread, NULL, read_all, &readers[i]), 0);
    }
    nanosleep(&(struct timespec){.tv_nsec = 3000000}, NULL);
    kvf_test_daemon_kill(a);
    for (uint32_t i = 0; i < 2; i++) {
        assert_int_equal(pthread_join(readers[i].thread, NULL), 0);
        assert_int_equal(readers[i].others, 0);
        assert_int_equal(readers[i].hits + readers[i].misses, readers[i].n);
    }
    wait_metric(b, "metrics.peer_hints", 0);
    /* nothing is held for those that never came */
    wait_metric(b, "metrics.peers", 0);
    put(b, 100, 3, 0);
    get(b, 100, 3, KVF_TIER_DRAM);
    kvf_test_daemon_start(a);
    wait_metric(b, "metrics.peers", 1);
    put(a, 200, 3, 0);
    wait_metric(a, "metrics.put_blocks", 3);
    get(a, 200, 3, KVF_TIER_DRAM);
    assert_int_equal(kvf_test_daemon_stop(b), 0); /* with all flights landed */
}

struct retry {
    const struct kvf_test_daemon *daemon;
    uint64_t number;
};

static bool is_hit(void *arg)
{
    const struct retry *retry = arg;
    struct kvf_client *client = kvf_test_client_open(retry->daemon, NULL);
    int status = kvf_test_block_get(client, retry->number, bytes_of(retry->number), NULL);

    kvf_close(client);
    assert_true(status == KVF_OK || status == KVF_MISS);
    return status == KVF_OK;
}

/* One that does not answer costs its timeout, and a miss; it is asked again when it does. */
static void test_standstill(void **state)
{
    struct kvf_test_daemon *a = node_create(0, 0, 1);
    struct kvf_test_daemon *b = node_create(1, 1, 1);
    struct retry retry = {.daemon = b, .number = 1};

    (void)state;
    kvf_test_daemon_set(b, "peers.timeout=1s");
    kvf_test_daemon_start(a);
    kvf_test_daemon_start(b);
    put(a, 0, 4, 0);
    assert_true(kvf_test_wait_until(is_hit, &(struct retry){.daemon = b, .number = 0}, WAIT_MS));
    kvf_test_process_signal(&a->process, SIGSTOP);
    get_miss(b, 1);
    get_miss(b, 2);
    kvf_test_process_signal(&a->process, SIGCONT);
    assert_true(kvf_test_wait_until(is_hit, &retry, WAIT_MS));
}

/* Two have a block, and one of them does not answer: the other one is asked in time. */
static void test_second_peer(void **state)
{
    struct kvf_test_daemon *owners[2];
    struct kvf_test_daemon *c = node_create(2, 3, 1);

    (void)state;
    for (uint32_t i = 0; i < 2; i++) {
        owners[i] = node_start(i, 0, 1);
        put(owners[i], 0, 4, 0);
    }
    kvf_test_daemon_set(c, "peers.timeout=4s");
    kvf_test_daemon_set(c, STEADY);
    kvf_test_daemon_start(c);
    wait_metric(c, "metrics.peers", 2);
    wait_metric(c, "metrics.peer_snapshots", 2);
    wait_metric(c, "metrics.peer_hints", 4);
    /* whichever is asked first, it stands still once */
    for (uint32_t i = 0; i < 2; i++) {
        kvf_test_process_signal(&owners[i]->process, SIGSTOP);
        get_in(c, i, 60000);
        kvf_test_process_signal(&owners[i]->process, SIGCONT);
    }
    assert_true(kvf_test_daemon_number(c, "metrics.peer_second_asks") >= 1);
    assert_int_equal(kvf_test_daemon_number(c, "metrics.peer_fetched_blocks"), 2);
    /* and if it has ended */
    kvf_test_daemon_kill(owners[0]);
    get_in(c, 2, 60000);
}

/* ----------------------------------------------------------------------------------------------
 * Strangers
 */
static bool is_refused(void *arg)
{
    const struct kvf_test_daemon *daemon = arg;

    return kvf_test_daemon_log_has(daemon, "it has another cluster key");
}

static void test_strangers(void **state)
{
    struct kvf_test_daemon *a = node_start(0, 0, 1);
    struct kvf_test_daemon *b = node_start(1, 1, 1);
    struct kvf_test_daemon *other = node_start(2, 1, 2);
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                             .sin_port = htons(ports[0])};
    struct kvf_random_seeded random;
    uint8_t noise[2000];

    (void)state;
    kvf_random_seeded_init(&random, kvf_test_seed());
    put(a, 0, 5, 0);
    assert_true(kvf_test_wait_until(is_refused, a, WAIT_MS));
    assert_true(kvf_test_wait_until(is_refused, other, WAIT_MS));
    get_miss(other, 0);
    for (uint32_t i = 0; i < 40; i++) {
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

        for (size_t k = 0; k < sizeof(noise); k++) {
            noise[k] = (uint8_t)kvf_random_seeded_next(&random);
        }
        if (connect(fd, (const struct sockaddr *)&to, sizeof(to)) == 0) {
            (void)send(fd, noise, i * 50, MSG_NOSIGNAL);
        }
        close(fd);
    }
    wait_metric(b, "metrics.peer_hints", 5);
    get(b, 0, 5, KVF_TIER_REMOTE);
    assert_int_equal(kvf_test_daemon_number(other, "metrics.peers"), 0);
    assert_int_equal(kvf_test_daemon_number(b, "metrics.peer_snapshots"),
                     1); /* one link, all the time */
}

/* Has a process this socket? */
static bool has_socket(int pid, unsigned long inode)
{
    char wanted[64];
    bool found = false;

    (void)snprintf(wanted, sizeof(wanted), "socket:[%lu]", inode);
    for (int fd = 0; fd < 256 && !found; fd++) {
        char path[64];
        char target[64] = "";

        (void)snprintf(path, sizeof(path), "/proc/%d/fd/%d", pid, fd);
        found = readlink(path, target, sizeof(target) - 1) > 0 && strcmp(target, wanted) == 0;
    }
    return found;
}

/* The port of loopback, but for this one, on which a process listens: UCX's for data. */
static uint16_t data_port(int pid, uint16_t except)
{
    FILE *file = fopen("/proc/net/tcp", "re");
    uint16_t found = 0;
    char line[256];

    assert_non_null(file);
    while (found == 0 && fgets(line, sizeof(line), file) != NULL) {
        unsigned address, port, state;
        unsigned long inode;

        if (sscanf(line, " %*d: %8x:%4x %*8x:%*4x %2x %*s %*s %*s %*d %*d %lu", &address, &port,
                   &state, &inode) == 4 &&
            address == htonl(INADDR_LOOPBACK) && state == 0x0a && port != except &&
            has_socket(pid, inode)) {
            found = (uint16_t)port;
        }
    }
    (void)fclose(file);
    assert_int_not_equal(found, 0);
    return found;
}

/* UCX's own framing, forged: what its connections begin with, and a header that none of them has.
 * UCX 1.13 ends the process for it. Whatever becomes of that daemon, the other one does not notice
 * more than the end of a link, and what was on a drive is a hit again. */
static void test_forged_framing(void **state)
{
    static const uint8_t headers[3][5] = {
        {3, 0, 0xff, 0xff, 0xff}, /* longer than any */
        {200, 16, 0, 0, 0},       /* of no kind */
        {10, 64, 0, 0, 0},        /* of UCX's own, with nothing right in it */
    };
    static const uint64_t magic = 0xcafebabe12345678;
    struct kvf_test_daemon *a = node_start(0, 0, 1);
    struct kvf_test_daemon *b = node_start(1, 1, 1);

    (void)state;
    put(a, 0, 4, KVF_PUT_DURABLE);
    put(b, 100, 2, 0);
    for (uint64_t i = 0; i < 3; i++) {
        struct sockaddr_in to = {.sin_family = AF_INET,
                                 .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                                 .sin_port = htons(data_port(a->process.pid, ports[0]))};
        uint8_t forged[sizeof(magic) + 5 + 4096] = {0};
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        struct timeval patience = {.tv_sec = 60};
        uint8_t answer;

        memcpy(forged, &magic, sizeof(magic));
        memcpy(forged + sizeof(magic), headers[i], sizeof(headers[i]));
        assert_int_equal(connect(fd, (const struct sockaddr *)&to, sizeof(to)), 0);
        assert_int_equal(send(fd, forged, sizeof(forged), MSG_NOSIGNAL), sizeof(forged));
        (void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
        (void)recv(fd, &answer, 1, 0); /* until it is hung up on */
        close(fd);
        if (kvf_test_daemon_has_ended(a, 10000, NULL)) {
            kvf_test_daemon_start(a);
        }
        wait_metric(b, "metrics.peers", 1);
        wait_metric(b, "metrics.peer_hints", 4);
        get(b, i, 1, KVF_TIER_REMOTE);
    }
    get(b, 100, 2, KVF_TIER_DRAM);
    get_in(a, 3, WAIT_MS);
    assert_int_equal(kvf_test_daemon_stop(b), 0);
}

/* Signals are the daemon's, whatever UCX would do with them. */
static bool is_reloaded(void *arg)
{
    return kvf_test_daemon_log_has(arg, "nothing to read again");
}

static void test_signals(void **state)
{
    struct kvf_test_daemon *a = node_start(0, 0, 1);

    (void)state;
    kvf_test_process_signal(&a->process, SIGHUP);
    assert_true(kvf_test_wait_until(is_reloaded, a, WAIT_MS));
    assert_int_equal(kvf_test_daemon_stop(a), 0);
}

static void refuses(const char *set, const char *text)
{
    struct kvf_test_daemon daemon;

    kvf_test_daemon_create(&daemon, NULL);
    kvf_test_daemon_set(&daemon, set);
    assert_int_equal(kvf_test_daemon_run_to_end(&daemon), 2);
    assert_true(kvf_test_daemon_log_has(&daemon, text));
    kvf_test_daemon_destroy(&daemon);
}

static void test_refused_config(void **state)
{
    (void)state;
    refuses("peers.listen=127.0.0.1:17171", "nodes know each other by cluster_key");
    refuses("peers.nodes=host:17171", "nodes know each other by cluster_key");
    refuses("peers.listen=0.0.0.0:17171", "no private address");
    refuses("peers.listen=8.8.8.8:17171", "no private address");
    refuses("peers.listen=host:17171", "no numeric address");
    refuses("peers.nodes=host", "no list of host:port");
    refuses("peers.nodes=host:17171,fd00::7:1", "no list of host:port");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_hits, setup, teardown),
        cmocka_unit_test_setup_teardown(test_late, setup, teardown),
        cmocka_unit_test_setup_teardown(test_restart, setup, teardown),
        cmocka_unit_test_setup_teardown(test_kill, setup, teardown),
        cmocka_unit_test_setup_teardown(test_standstill, setup, teardown),
        cmocka_unit_test_setup_teardown(test_second_peer, setup, teardown),
        cmocka_unit_test_setup_teardown(test_strangers, setup, teardown),
        cmocka_unit_test_setup_teardown(test_forged_framing, setup, teardown),
        cmocka_unit_test_setup_teardown(test_signals, setup, teardown),
        cmocka_unit_test(test_refused_config),
    };

    (void)setenv("UCX_TLS", "tcp", 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
