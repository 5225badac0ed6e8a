/* SPDX-License-Identifier: Apache-2.0
 *
 * test_restart.c: a daemon goes and the next one comes, with 8 client processes at work: they
 * attach again by themselves, find on the drive what was there, and the node never holds two
 * arenas, even where a client stands still with the old one mapped. And daemon and clients of
 * releases that do not speak the same protocol.
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
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "tests/fault/raw_client.h"
#include "tests/fault/shared_bytes.h"
#include "tests/support/blocks.h"
#include "tests/support/daemon.h"

#define MIB           (UINT64_C(1) << 20)
#define N_CLIENTS     8
#define BLOCK_BYTES   (60 << 10)
#define N_DURABLE     64  /* on the drive before the daemon goes */
#define N_EACH        160 /* blocks of each client: all of them are 1.2 times the arena */
#define ARENA_BYTES   (64 * MIB)
#define STAGING_BYTES (32 * MIB)
#define LIMIT_BYTES   ((ARENA_BYTES + STAGING_BYTES) * 105 / 100)
#define WAIT_MS       120000

static struct kvf_test_daemon the_daemon;
static struct shared_objects the_memory;

/* Written by one client each, read by the parent. */
static struct progress {
    _Atomic uint64_t incarnation; /* 0: not attached */
    _Atomic uint64_t n_right;     /* hits since that changed */
    _Atomic uint64_t n_nvme;      /* of these, from the drive */
    _Atomic uint64_t n_wrong;
    _Atomic uint64_t n_reconnects;
} * the_progress;

static pid_t the_clients[N_CLIENTS];

/* --- clients ------------------------------------------------------------------------------------
 */
static struct kvf_client *open_small(void)
{
    struct kvf_options options;
    struct kvf_client *client;

    kvf_test_client_options(&the_daemon, &options);
    options.ring_entries = 64;
    options.staging_bytes = 1 * MIB;
    return kvf_open(&options, &client) == KVF_OK ? client : NULL;
}

static void note_daemon(struct kvf_client *client, struct progress *progress)
{
    struct kvf_info info = {.struct_bytes = sizeof(info)};
    uint64_t incarnation = 0;

    if (kvf_client_info(client, &info) == KVF_OK && info.connected) {
        incarnation = info.incarnation;
    }
    if (incarnation != atomic_load(&progress->incarnation)) {
        atomic_store(&progress->n_right, 0);
        atomic_store(&progress->n_nvme, 0);
        atomic_store(&progress->n_reconnects, info.reconnects);
        atomic_store(&progress->incarnation, incarnation);
    }
}

static void client_run(uint32_t me, uint64_t seed)
{
    struct progress *progress = &the_progress[me];
    struct kvf_random_seeded random;
    struct kvf_client *client;

    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    kvf_random_seeded_init(&random, seed + me);
    client = open_small();
    if (client == NULL) {
        _exit(1);
    }
    for (;;) {
        uint64_t own = N_DURABLE + me * N_EACH + kvf_random_seeded_next(&random) % N_EACH;
        uint64_t any = kvf_random_seeded_next(&random) % N_DURABLE;
        uint8_t tier = 0;
        int status;

        note_daemon(client, progress);
        status = kvf_test_block_put(client, own, BLOCK_BYTES, KVF_PUT_NO_WRITE);
        atomic_fetch_add(&progress->n_wrong, status == KVF_ERR_CONFLICT);
        status = kvf_test_block_get(client, any, BLOCK_BYTES, &tier);
        atomic_fetch_add(&progress->n_right, status == KVF_OK);
        atomic_fetch_add(&progress->n_nvme, status == KVF_OK && tier == KVF_TIER_NVME);
        atomic_fetch_add(&progress->n_wrong, status == KVF_ERR_INTERNAL);
        if (status < 0) {
            const struct timespec pause = {.tv_nsec = 1000000};

            nanosleep(&pause, NULL);
        }
    }
}

/* --- what the parent sees ----------------------------------------------------------------------
 */
static void look(void)
{
    const struct timespec pause = {.tv_nsec = 2000000};
    pid_t pids[1 + N_CLIENTS] = {the_daemon.process.pid};

    memcpy(pids + 1, the_clients, sizeof(the_clients));
    (void)shared_bytes_look(&the_memory, pids, 1 + N_CLIENTS);
    nanosleep(&pause, NULL);
}

/* All but one (N_CLIENTS: none) have attached to a daemon other than `before` and hit. */
static bool are_all_served(uint64_t before, uint32_t but)
{
    for (uint32_t i = 0; i < N_CLIENTS; i++) {
        uint64_t incarnation = atomic_load(&the_progress[i].incarnation);

        if (i != but && (incarnation == 0 || incarnation == before ||
                         atomic_load(&the_progress[i].n_right) < N_DURABLE)) {
            return false;
        }
    }
    return true;
}

static void wait_served(uint64_t before, uint32_t but)
{
    uint64_t end_ns = kvf_now_ns() + WAIT_MS * KVF_NS_PER_MS;

    while (!are_all_served(before, but)) {
        look();
        if (kvf_now_ns() >= end_ns) {
            fail_msg("clients have not come back");
        }
    }
}

static void wait_populated(void)
{
    uint64_t end_ns = kvf_now_ns() + WAIT_MS * KVF_NS_PER_MS;

    while (kvf_test_daemon_number(&the_daemon, "dram.populated_bytes") != ARENA_BYTES) {
        look();
        if (kvf_now_ns() >= end_ns) {
            fail_msg("the arena does not become whole");
        }
    }
}

/* The figure of this file, for people too. */
static void assert_memory(const char *what)
{
    look();
    print_message("%s: %.1f MiB of shared memory at most, %.1f are allowed\n", what,
                  (double)the_memory.most_bytes / MIB, (double)LIMIT_BYTES / MIB);
    assert_true(the_memory.most_bytes >= ARENA_BYTES); /* it is counted at all */
    assert_true(the_memory.most_bytes <= LIMIT_BYTES);
}

static void assert_clients(void)
{
    uint64_t n_nvme = 0;

    for (uint32_t i = 0; i < N_CLIENTS; i++) {
        assert_int_equal(waitpid(the_clients[i], NULL, WNOHANG), 0); /* it lives */
        assert_int_equal(the_progress[i].n_wrong, 0);
        n_nvme += the_progress[i].n_nvme;
    }
    assert_true(n_nvme > 0);
}

static uint64_t incarnation_now(void)
{
    return atomic_load(&the_progress[0].incarnation);
}

static void begin(const char *set)
{
    uint64_t seed = kvf_test_seed();
    struct kvf_client *client;

    kvf_test_daemon_set(&the_daemon, set);
    kvf_test_daemon_start(&the_daemon);
    for (uint32_t i = 0; i < N_CLIENTS; i++) {
        the_clients[i] = fork();
        assert_true(the_clients[i] >= 0);
        if (the_clients[i] == 0) {
            client_run(i, seed);
        }
    }
    client = open_small();
    assert_non_null(client);
    for (uint64_t i = 0; i < N_DURABLE; i++) {
        int status;

        do { /* beside the others' puts */
            status = kvf_test_block_put(client, i, BLOCK_BYTES, KVF_PUT_DURABLE);
        } while (status == KVF_ERR_BUSY);
        assert_true(status == KVF_OK || status == KVF_EXISTS);
    }
    kvf_close(client);
    wait_served(0, N_CLIENTS);
    look();
}

static void end_clients(void)
{
    for (uint32_t i = 0; i < N_CLIENTS; i++) {
        if (the_clients[i] > 0) {
            kill(the_clients[i], SIGKILL);
            waitpid(the_clients[i], NULL, 0);
            the_clients[i] = 0;
        }
    }
}

/* --- restarts ---------------------------------------------------------------------------------
 */

/* As a service manager does it for an upgrade: SIGTERM, and the next one. */
static void test_upgrade(void **state)
{
    uint64_t before;
    int wait_status;

    (void)state;
    begin("dram.restart_wait=1h");
    before = incarnation_now();
    kvf_test_process_signal(&the_daemon.process, SIGTERM);
    while (!kvf_test_daemon_has_ended(&the_daemon, 1, &wait_status)) {
        look();
    }
    assert_int_equal(wait_status, 0);
    kvf_test_daemon_spawn(&the_daemon);
    wait_served(before, N_CLIENTS);
    wait_populated();
    assert_memory("upgrade");
    assert_clients();
}

/* Killed again and again: nobody says goodbye. */
static void test_restarts(void **state)
{
    uint32_t rounds = kvf_test_scaled(5);

    (void)state;
    begin("dram.restart_wait=1h");
    for (uint32_t round = 0; round < rounds; round++) {
        uint64_t before = incarnation_now();

        kvf_test_daemon_kill(&the_daemon);
        kvf_test_daemon_spawn(&the_daemon);
        wait_served(before, N_CLIENTS);
        wait_populated();
        assert_clients();
    }
    assert_memory("restarts");
    for (uint32_t i = 0; i < N_CLIENTS; i++) {
        assert_true(the_progress[i].n_reconnects >= 1);
    }
}

/* One of them stands still with the old arena mapped. The others are served meanwhile. */
static void test_a_client_stands_still(void **state)
{
    uint64_t before;

    (void)state;
    begin("dram.restart_wait=1h");
    before = incarnation_now();
    kill(the_clients[N_CLIENTS - 1], SIGSTOP);
    kvf_test_daemon_kill(&the_daemon);
    kvf_test_daemon_spawn(&the_daemon);
    wait_served(before, N_CLIENTS - 1);
    assert_true(kvf_test_daemon_number(&the_daemon, "dram.populated_bytes") < ARENA_BYTES / 20);
    assert_true(kvf_test_daemon_log_has(&the_daemon, "still map memory of the daemon before"));
    kill(the_clients[N_CLIENTS - 1], SIGCONT);
    wait_served(before, N_CLIENTS);
    wait_populated();
    assert_memory("a client stood still");
    assert_clients();
    assert_true(kvf_test_daemon_log_has(&the_daemon, "clients have left the daemon before"));
}

/* It is not waited for for ever. */
static void test_a_client_never_comes_back(void **state)
{
    (void)state;
    begin("dram.restart_wait=1s");
    kill(the_clients[0], SIGSTOP);
    kvf_test_daemon_kill(&the_daemon);
    kvf_test_daemon_spawn(&the_daemon);
    assert_true(kvf_test_daemon_wait_ready(&the_daemon, NULL));
    wait_populated();
    assert_true(kvf_test_daemon_log_has(&the_daemon, "after dram.restart_wait"));
}

/* --- versions -----------------------------------------------------------------------------------
 */

/* Clients of fabricated releases. */
static void test_versions(void **state)
{
    static const struct {
        uint16_t min, max;
        const char *cure; /* NULL: it is served */
    } clients[] = {
        {KVF_WIRE_VERSION_MAX + 1, KVF_WIRE_VERSION_MAX + 3, "upgrade kvferryd"},
        {65535, 65535, "upgrade kvferryd"},
        {KVF_WIRE_VERSION_MIN, 65535, NULL},
        {KVF_WIRE_VERSION_MAX, KVF_WIRE_VERSION_MAX, NULL},
        {KVF_WIRE_VERSION_MIN, KVF_WIRE_VERSION_MIN, NULL},
    };

    (void)state;
    kvf_test_daemon_start(&the_daemon);
    for (size_t i = 0; i < sizeof(clients) / sizeof(clients[0]); i++) {
        struct kvf_wire_hello hello;
        struct raw_client raw;

        raw_hello(&hello);
        hello.head.version = hello.version_min = clients[i].min;
        hello.version_max = clients[i].max;
        raw_connect(&raw, the_daemon.socket_path);
        assert_true(raw_begin(&raw, &hello) == (clients[i].cure == NULL));
        if (clients[i].cure != NULL) {
            assert_int_equal(raw.welcome.status, KVF_ERR_VERSION);
            if (strstr(raw.welcome.text, clients[i].cure) == NULL) {
                fail_msg("\"%s\" does not say: %s", raw.welcome.text, clients[i].cure);
            }
        } else {
            assert_true(raw.welcome.version <= clients[i].max);
            assert_true(raw.welcome.version <= KVF_WIRE_VERSION_MAX);
        }
        raw_close(&raw);
    }
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.attach_refused"), 2);
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.protocol_errors"), 0);
}

static int setup(void **state)
{
    static const char *const sets[] = {"dram.bytes=64MiB",        "dram.area_bytes=1MiB",
                                       "staging.total=32MiB",     "staging.client=1MiB",
                                       "nvme.0.bytes=64MiB",      "nvme.0.segment_bytes=4MiB",
                                       "clients.max=16",          "clients.ring_entries=64",
                                       "clients.offence_delay=0", NULL};

    (void)state;
    memset(&the_memory, 0, sizeof(the_memory));
    memset(the_progress, 0, N_CLIENTS * sizeof(*the_progress));
    kvf_test_daemon_create(&the_daemon, sets);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    end_clients();
    kvf_test_daemon_destroy(&the_daemon);
    return 0;
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_upgrade),
        TEST(test_restarts),
        TEST(test_a_client_stands_still),
        TEST(test_a_client_never_comes_back),
        TEST(test_versions),
    };

    the_progress = mmap(NULL, N_CLIENTS * sizeof(*the_progress), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (the_progress == MAP_FAILED) {
        return 1;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
