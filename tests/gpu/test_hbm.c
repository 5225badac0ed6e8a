/* SPDX-License-Identifier: Apache-2.0
 *
 * test_hbm.c: blocks in the GPU's own memory: they get there by being hit, are decoded from where
 * they lie, come back when somebody else wants them or room is short, and go with their worker. The
 * bytes are those of the C codecs each time.
 */
#include "client/gpu_internal.h"
#include "tests/gpu/calls.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#define PATIENCE_NS (60 * KVF_NS_PER_S)

static struct calls calls;
static uint64_t seed;

static uint32_t n_of_tier(const struct calls_outcome *outcome, uint32_t n, uint8_t tier)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < n; i++) {
        count += outcome->blocks[i] == KVF_OK && outcome->tiers[i] == tier;
    }
    return count;
}

/* Get the chain until all of it is answered on the GPU. */
static void warm_up_of(struct calls *engine, const struct calls_chain *chain)
{
    uint64_t deadline_ns = kvf_now_ns() + PATIENCE_NS;
    struct calls_outcome outcome = {0};

    do {
        assert_true(kvf_now_ns() < deadline_ns);
        outcome = (struct calls_outcome){0};
        calls_chain_get(engine, chain, &outcome);
    } while (n_of_tier(&outcome, chain->n, KVF_TIER_HBM) < chain->n);
}

static void warm_up(const struct calls_chain *chain)
{
    warm_up_of(&calls, chain);
}

static void test_hits_are_decoded_where_they_lie(void **state)
{
    static const char *const profiles[] = {"exact", "balanced", "raw"};
    struct calls_chain chain;

    (void)state;
    for (size_t i = 0; i < sizeof(profiles) / sizeof(profiles[0]); i++) {
        uint64_t hits;

        calls_open(&calls, profiles[i], seed + i);
        calls_chain_init(&chain, 8, 19);
        calls_chain_put_and_check(&calls, &chain);
        warm_up(&chain);
        hits = kvf_test_daemon_number(&calls.daemon, "metrics.get_hits_hbm");
        calls_chain_get_and_check(&calls, &chain); /* also as a host reads them, from DRAM */
        assert_int_equal(kvf_test_daemon_number(&calls.daemon, "metrics.get_hits_hbm"), hits + 8);
        /* a part of each block */
        for (uint32_t b = 0; b + 1 < chain.n; b++) {
            chain.gets[b].token_first = 1 + b;
        }
        calls_chain_get_and_check(&calls, &chain);
        calls_close(&calls);
    }
}

/* A piece was another tenant's memory before, perhaps: where no block has been written it is zero.
 */
static void test_pieces_come_empty(void **state)
{
    enum {
        TAIL_BYTES = 64 << 10
    };
    static uint8_t tail[TAIL_BYTES];
    struct calls_chain chain;
    uint32_t n = 0;

    (void)state;
    calls_open(&calls, "exact", seed + 5);
    calls_chain_init(&chain, 4, 0);
    calls_chain_put_and_check(&calls, &chain);
    warm_up(&chain);
    for (const struct kvf_gpu_pin *pin = calls.gpu->pins; pin != NULL; pin = pin->next) {
        if (pin->address != 0) {
            calls_read(tail, pin->address + pin->piece->bytes - TAIL_BYTES, TAIL_BYTES);
            for (uint32_t i = 0; i < TAIL_BYTES; i++) {
                assert_int_equal(tail[i], 0);
            }
            n++;
        }
    }
    assert_true(n > 0);
    calls_close(&calls);
}

/* Other blocks of that size, as many as DRAM holds in all: it forgets what the GPU has. */
static void press(uint64_t first, size_t payload_bytes)
{
    uint32_t n = (uint32_t)((24 << 20) / payload_bytes);
    struct kvf_client *client = kvf_test_client_open(&calls.daemon, "press");
    uint8_t *payload = calloc(1, payload_bytes);

    assert_non_null(payload);
    for (uint32_t i = 0; i < n; i++) {
        char text[24];
        struct kvf_put_item item = {.struct_bytes = sizeof(item),
                                    .source = KVF_SOURCE_BYTES,
                                    .key = calls_key(first + i, text),
                                    .data = payload,
                                    .data_bytes = payload_bytes};
        int32_t status = KVF_ERR_BUSY;

        payload[0] = (uint8_t)i;
        while (status != KVF_OK) { /* on a slow machine there is no room at once */
            (void)kvf_put(client, &item, 1, NULL, &status);
        }
    }
    free(payload);
    kvf_close(client);
}

static void test_the_only_copy_comes_back(void **state)
{
    struct calls_chain chain;
    uint64_t copied;

    (void)state;
    calls_open(&calls, "exact", seed + 10);
    calls_chain_init(&chain, 8, 0);
    calls_chain_put_and_check(&calls, &chain);
    warm_up(&chain);
    press(1000000, calls.record_bytes - KVF_RECORD_PAGE_BYTES);
    copied = kvf_test_daemon_number(&calls.daemon, "metrics.get_hits_hbm_copied");
    /* a host reads them, which has no way to the GPU: down they come, as they were */
    calls_chain_get_and_check(&calls, &chain);
    assert_true(kvf_test_daemon_number(&calls.daemon, "metrics.get_hits_hbm_copied") > copied);
    assert_int_equal(kvf_test_daemon_number(&calls.daemon, "metrics.hbm_corrupt_blocks"), 0);
    calls_close(&calls);
}

/* Sleep gives back what is the engine's; the daemon's memory is none of it. */
static void test_sleep_and_wake(void **state)
{
    struct calls_chain chain;

    (void)state;
    calls_open(&calls, "balanced", seed + 20);
    calls_chain_init(&chain, 4, 0);
    calls_chain_put_and_check(&calls, &chain);
    warm_up(&chain);
    assert_int_equal(kvf_gpu_sleep(calls.gpu), KVF_OK);
    assert_int_equal(kvf_gpu_wake(calls.gpu), KVF_OK);
    calls_chain_get_and_check(&calls, &chain);
    warm_up(&chain);
    calls_close(&calls);
}

static void pause_briefly(void)
{
    const struct timespec pause = {.tv_nsec = 10 * KVF_NS_PER_MS};

    (void)nanosleep(&pause, NULL);
}

/* The daemon's only child. */
static pid_t worker_pid(void)
{
    uint64_t deadline_ns = kvf_now_ns() + PATIENCE_NS;

    while (kvf_now_ns() < deadline_ns) {
        char path[64];
        FILE *file;
        int pid = 0;

        (void)snprintf(path, sizeof(path), "/proc/%d/task/%d/children", calls.daemon.process.pid,
                       calls.daemon.process.pid);
        file = fopen(path, "r");
        assert_non_null(file);
        if (fscanf(file, "%d", &pid) != 1) {
            pid = 0;
        }
        fclose(file);
        if (pid > 0) {
            return pid;
        }
        pause_briefly();
    }
    fail_msg("no worker");
    return 0;
}

static void test_worker_dies(void **state)
{
    struct calls_chain chain;
    struct calls_outcome outcome = {0};
    uint64_t lost;

    (void)state;
    calls_open(&calls, "exact", seed + 30);
    calls_chain_init(&chain, 8, 0);
    calls_chain_put_and_check(&calls, &chain);
    warm_up(&chain);
    lost = kvf_test_daemon_number(&calls.daemon, "metrics.hbm_lost_blocks");
    assert_int_equal(kill(worker_pid(), SIGKILL), 0);
    while (kvf_test_daemon_number(&calls.daemon, "metrics.hbm_lost_blocks") < lost + chain.n) {
        pause_briefly();
    }
    /* DRAM has them still: answered from there, right, and put on the next worker's GPU */
    calls_chain_get_and_check(&calls, &chain);
    calls_chain_get(&calls, &chain, &outcome);
    assert_int_equal(outcome.status, KVF_OK);
    warm_up(&chain);
    calls_chain_get_and_check(&calls, &chain);
    assert_true(kvf_test_daemon_is_alive(&calls.daemon));
    calls_close(&calls);
}

static void test_client_of_a_new_daemon(void **state)
{
    struct calls_chain chain;

    (void)state;
    calls_open(&calls, "exact", seed + 40);
    calls_chain_init(&chain, 4, 0);
    calls_chain_put_and_check(&calls, &chain);
    warm_up(&chain);
    kvf_test_daemon_kill(&calls.daemon);
    kvf_test_daemon_start(&calls.daemon);
    while (kvf_ping(calls.client, 1000, &(uint64_t){0}) != KVF_OK) {
    }
    calls_chain_put_and_check(&calls, &chain);
    warm_up(&chain);
    calls_chain_get_and_check(&calls, &chain);
    calls_close(&calls);
}

/* A daemon with a socket for each of two tenants, the second one's at a path of its own. */
static void daemon_start_for_two(char second_path[KVF_TEST_PATH_BYTES])
{
    static const char *const sets[] = {"gpu.devices=all",
                                       "gpu.worker=" KVF_TEST_WORKER,
                                       "gpu.hbm_bytes=32MiB",
                                       "allow_uncalibrated=true",
                                       "sockets.0.tenant=first",
                                       "sockets.1.tenant=second",
                                       NULL};
    static char paths[2][KVF_TEST_PATH_BYTES + 32];

    kvf_test_daemon_create(&calls.daemon, sets);
    kvf_test_dir_path(&calls.daemon.dir, "second.sock", second_path);
    (void)snprintf(paths[0], sizeof(paths[0]), "sockets.0.path=%s", calls.daemon.socket_path);
    (void)snprintf(paths[1], sizeof(paths[1]), "sockets.1.path=%s", second_path);
    kvf_test_daemon_set(&calls.daemon, paths[0]);
    kvf_test_daemon_set(&calls.daemon, paths[1]);
    kvf_test_daemon_start(&calls.daemon);
}

/* The one piece that an engine has mapped. */
static const struct kvf_gpu_pin *piece_of(const struct calls *engine)
{
    const struct kvf_gpu_pin *found = NULL;

    for (const struct kvf_gpu_pin *pin = engine->gpu->pins; pin != NULL; pin = pin->next) {
        if (pin->address != 0) {
            assert_null(found);
            found = pin;
        }
    }
    assert_non_null(found);
    return found;
}

static uint8_t *piece_read(const struct kvf_gpu_pin *pin)
{
    uint8_t *bytes = malloc(pin->piece->bytes);

    assert_non_null(bytes);
    calls_read(bytes, pin->address, pin->piece->bytes);
    return bytes;
}

/* Room goes from one tenant to another: what one has mapped never holds the other's blocks, before
 * and after. */
static void test_a_piece_changes_tenant(void **state)
{
    struct kvf_test_daemon kept = calls.daemon;
    struct calls other = {0};
    struct calls_chain chains[2];
    const struct kvf_gpu_pin *pin;
    uint8_t *before;
    uint8_t *bytes;
    size_t n;

    (void)state;
    daemon_start_for_two(other.daemon.socket_path);
    calls_open(&calls, "exact", seed + 50);
    calls_chain_init(&chains[0], 4, 0);
    calls_chain_put_and_check(&calls, &chains[0]);
    warm_up(&chains[0]);
    pin = piece_of(&calls);
    n = pin->piece->bytes;
    before = piece_read(pin);

    calls_open(&other, "exact", seed + 51);
    calls_chain_init(&chains[1], 4, 0);
    calls_chain_put_and_check(&other, &chains[1]);
    warm_up_of(&other,
               &chains[1]); /* while the first one looks at nothing, and so unmaps nothing */
    bytes = piece_read(pin);
    assert_memory_equal(bytes, before, n);
    free(bytes);
    bytes = piece_read(piece_of(&other));
    calls_encode(&calls, chains[0].ids[0], 0, CALLS_CHUNK_TOKENS);
    assert_non_null(memmem(before, n, calls.record + KVF_RECORD_PAGE_BYTES, 256));
    assert_null(memmem(bytes, n, calls.record + KVF_RECORD_PAGE_BYTES, 256));
    free(bytes);
    free(before);

    calls_chain_get_and_check(&calls, &chains[0]);
    calls_close(&other);
    calls_close(&calls);
    calls_daemon_stop(&calls);
    calls.daemon = kept;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hits_are_decoded_where_they_lie),
        cmocka_unit_test(test_pieces_come_empty),
        cmocka_unit_test(test_the_only_copy_comes_back),
        cmocka_unit_test(test_sleep_and_wake),
        cmocka_unit_test(test_worker_dies),
        cmocka_unit_test(test_client_of_a_new_daemon),
        cmocka_unit_test(test_a_piece_changes_tenant),
    };
    static const char *const sets[] = {"gpu.devices=all", "gpu.worker=" KVF_TEST_WORKER,
                                       "gpu.hbm_bytes=32MiB", "dram.bytes=16MiB", NULL};
    int failed;

    if (!calls_begin(&seed)) {
        return 77;
    }
    calls_daemon_start(&calls, sets);
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    calls_daemon_stop(&calls);
    return failed;
}
