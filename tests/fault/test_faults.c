/* SPDX-License-Identifier: Apache-2.0
 *
 * test_faults.c: tiers that fail now and then, failpoints, and a drive whose bytes have changed
 * while nobody looked. A block may be gone; it may never be another one.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "tests/support/blocks.h"
#include "tests/support/daemon.h"
#include "tiers/nvme_format.h"

#define N_BLOCKS    200
#define STORE_BYTES (64u << 20)

static struct kvf_test_daemon the_daemon;

struct tally {
    uint32_t n_ok, n_missing, n_failed;
};

static size_t bytes_of(uint64_t number)
{
    return 1000 + number * 7919 % 100000;
}

static void put_all(struct kvf_client *client, uint32_t flags, struct tally *tally_out)
{
    memset(tally_out, 0, sizeof(*tally_out));
    for (uint64_t i = 0; i < N_BLOCKS; i++) {
        int status = kvf_test_block_put(client, i, bytes_of(i), flags);

        assert_true(status == KVF_OK || status == KVF_EXISTS || status == KVF_ERR_BUSY ||
                    status == KVF_ERR_IO || status == KVF_ERR_TIER_OFF);
        tally_out->n_ok += status >= 0;
        tally_out->n_failed += status < 0;
    }
}

/* Right, or not there. */
static void get_all(struct kvf_client *client, struct tally *tally_out)
{
    memset(tally_out, 0, sizeof(*tally_out));
    for (uint64_t i = 0; i < N_BLOCKS; i++) {
        int status = kvf_test_block_get(client, i, bytes_of(i), NULL);

        assert_int_not_equal(status, KVF_ERR_INTERNAL);
        assert_true(status == KVF_OK || status == KVF_MISS || status == KVF_ERR_BUSY);
        tally_out->n_ok += status == KVF_OK;
        tally_out->n_missing += status != KVF_OK;
    }
}

static struct kvf_client *restart(struct kvf_client *client)
{
    kvf_close(client);
    kvf_test_daemon_kill(&the_daemon);
    kvf_test_daemon_start(&the_daemon);
    return kvf_test_client_open(&the_daemon, NULL);
}

/* --- faults by configuration --------------------------------------------------------------------
 */

static void test_drive_fails(void **state)
{
    struct kvf_client *client;
    struct tally puts, gets;

    (void)state;
    kvf_test_daemon_set(&the_daemon, "test.fault_nvme=store:error%10,store:busy%2,load:error%10,"
                                     "load:busy%2,seed=3");
    kvf_test_daemon_start(&the_daemon);
    client = kvf_test_client_open(&the_daemon, NULL);
    put_all(client, KVF_PUT_DURABLE, &puts);
    assert_true(puts.n_ok > N_BLOCKS / 2);
    assert_true(puts.n_failed > 0);
    client = restart(client);
    get_all(client, &gets);
    assert_true(gets.n_ok > puts.n_ok / 2);
    assert_true(gets.n_missing > 0);
    assert_true(kvf_test_daemon_number(&the_daemon, "metrics.nvme_io_errors") > 0);
    kvf_close(client);
}

static void test_memory_is_busy(void **state)
{
    struct kvf_client *client;
    struct tally puts, gets;

    (void)state;
    kvf_test_daemon_set(&the_daemon, "test.fault_dram=reserve:error%25,seed=5");
    kvf_test_daemon_start(&the_daemon);
    client = kvf_test_client_open(&the_daemon, NULL);
    put_all(client, KVF_PUT_DURABLE, &puts);
    assert_true(puts.n_failed > N_BLOCKS / 10);
    assert_true(puts.n_ok > N_BLOCKS / 2);
    get_all(client, &gets);
    assert_int_equal(gets.n_ok, puts.n_ok);
    client = restart(client);
    get_all(client, &gets);
    assert_true(gets.n_ok > puts.n_ok / 4);
    kvf_close(client);
}

/* The first write fails, and every read: puts into memory go on. */
static void test_drive_is_dead(void **state)
{
    struct kvf_client *client;
    struct tally puts, gets;

    (void)state;
    kvf_test_daemon_set(&the_daemon, "test.fault_nvme=store:error,load:error");
    kvf_test_daemon_start(&the_daemon);
    client = kvf_test_client_open(&the_daemon, NULL);
    put_all(client, 0, &puts);
    assert_int_equal(puts.n_ok, N_BLOCKS);
    get_all(client, &gets);
    assert_int_equal(gets.n_ok, N_BLOCKS);
    client = restart(client);
    get_all(client, &gets);
    assert_int_equal(gets.n_ok, 0);
    kvf_close(client);
}

/* --- failpoints: one call goes wrong, or takes long --------------------------------------- */

static void test_failpoints(void **state)
{
    static const char *const points[] = {
        "agent.fill=error@3",       "agent.fill=delay:20ms@5",  "nvme.record_write=error@4",
        "nvme.record_done=error@4", "nvme.record_read=error@4", "nvme.segment_header=error@2",
        "nvme.footer=error@1",      "nvme.seal=error@1",        "nvme.reuse_before=error@2",
        "nvme.reuse_after=error@2", "io.read=error@9",          "io.write=error@9",
        "io.sync=error@3",          "io.write=delay:2ms@7+",
    };
    uint32_t n_points = sizeof(points) / sizeof(points[0]);

    (void)state;
    for (uint32_t p = 0; p < n_points; p++) {
        struct kvf_client *client;
        struct tally puts, gets;

        if (kvf_test_is_sanitized() && p % 3 != 0) {
            continue;
        }
        kvf_test_daemon_create(&the_daemon, NULL);
        the_daemon.failpoints = points[p];
        kvf_test_daemon_start(&the_daemon);
        client = kvf_test_client_open(&the_daemon, NULL);
        memset(&puts, 0, sizeof(puts));
        for (uint64_t i = 0; i < N_BLOCKS; i++) {
            int status = kvf_test_block_put(client, i, bytes_of(i), i % 10 ? 0 : KVF_PUT_DURABLE);

            puts.n_ok += status >= 0;
            puts.n_failed += status < 0;
        }
        assert_true(puts.n_failed <= 40);
        get_all(client, &gets);
        the_daemon.failpoints = NULL;
        client = restart(client);
        get_all(client, &gets);
        assert_true(gets.n_ok > 0);
        assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.nvme_corrupt_blocks"), 0);
        kvf_close(client);
        kvf_test_daemon_destroy(&the_daemon);
    }
    kvf_test_daemon_create(&the_daemon, NULL); /* for the teardown */
}

/* --- bytes that change on the drive -------------------------------------------------------------
 */

/* Change n places behind the head. */
static void rot(struct kvf_random_seeded *random, uint32_t n)
{
    int fd = open(the_daemon.store_path, O_WRONLY | O_CLOEXEC);

    assert_true(fd >= 0);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t word = kvf_random_seeded_next(random);
        uint64_t offset = KVF_NVME_SEGMENT_OFFSET +
                          kvf_random_seeded_next(random) % (STORE_BYTES - KVF_NVME_SEGMENT_OFFSET);

        assert_true(pwrite(fd, &word, sizeof(word), (off_t)offset) > 0);
    }
    close(fd);
}

static void test_drive_rots(void **state)
{
    uint32_t rounds = kvf_test_scaled(12);
    struct kvf_random_seeded random;
    uint64_t n_corrupt = 0;

    (void)state;
    kvf_random_seeded_init(&random, kvf_test_seed());
    kvf_test_daemon_start(&the_daemon);
    for (uint32_t round = 0; round < rounds; round++) {
        struct kvf_client *client = kvf_test_client_open(&the_daemon, NULL);
        struct tally puts, gets;

        put_all(client, KVF_PUT_DURABLE, &puts);
        kvf_close(client);
        kvf_test_daemon_kill(&the_daemon);
        /* enough to meet a record surely, too few for heads of all segments */
        rot(&random, 64u << round % 3);
        kvf_test_daemon_start(&the_daemon);
        client = kvf_test_client_open(&the_daemon, NULL);
        get_all(client, &gets);
        n_corrupt += kvf_test_daemon_number(&the_daemon, "metrics.nvme_corrupt_blocks");
        kvf_close(client);
    }
    assert_true(n_corrupt > 0);
}

/* While it runs: whoever asks next gets a miss, and the block can be put again. */
static void test_drive_rots_while_running(void **state)
{
    struct kvf_random_seeded random;
    struct kvf_client *client;
    struct tally puts, gets;

    (void)state;
    kvf_random_seeded_init(&random, kvf_test_seed());
    kvf_test_daemon_start(&the_daemon);
    client = kvf_test_client_open(&the_daemon, NULL);
    put_all(client, KVF_PUT_DURABLE, &puts);
    client = restart(client); /* out of memory */
    rot(&random, 2000);
    get_all(client, &gets);
    assert_true(gets.n_missing > 0);
    assert_true(kvf_test_daemon_number(&the_daemon, "metrics.nvme_corrupt_blocks") > 0);
    for (uint64_t i = 0; i < N_BLOCKS; i++) {
        int status = kvf_test_block_put(client, i, bytes_of(i), 0);

        assert_true(status == KVF_OK || status == KVF_EXISTS);
    }
    get_all(client, &gets);
    assert_int_equal(gets.n_ok, N_BLOCKS);
    kvf_close(client);
}

/* All of every segment overwritten: an empty store, not a broken one. */
static void test_drive_is_garbage(void **state)
{
    char *garbage = malloc(STORE_BYTES);
    struct kvf_client *client;
    struct tally puts, gets;
    int fd;

    (void)state;
    assert_non_null(garbage);
    kvf_test_payload_fill(99, garbage, STORE_BYTES);
    kvf_test_daemon_start(&the_daemon);
    client = kvf_test_client_open(&the_daemon, NULL);
    put_all(client, KVF_PUT_DURABLE, &puts);
    kvf_close(client);
    kvf_test_daemon_kill(&the_daemon);
    fd = open(the_daemon.store_path, O_WRONLY | O_CLOEXEC);
    assert_true(
        pwrite(fd, garbage, STORE_BYTES - KVF_NVME_SEGMENT_OFFSET, KVF_NVME_SEGMENT_OFFSET) > 0);
    close(fd);
    free(garbage);
    kvf_test_daemon_start(&the_daemon);
    client = kvf_test_client_open(&the_daemon, NULL);
    get_all(client, &gets);
    assert_int_equal(gets.n_ok, 0);
    put_all(client, KVF_PUT_DURABLE, &puts);
    assert_int_equal(puts.n_ok, N_BLOCKS);
    client = restart(client);
    get_all(client, &gets);
    assert_int_equal(gets.n_ok, N_BLOCKS);
    kvf_close(client);
}

static int setup(void **state)
{
    (void)state;
    kvf_test_daemon_create(&the_daemon, NULL);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    kvf_test_daemon_destroy(&the_daemon);
    return 0;
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_drive_fails),
        TEST(test_memory_is_busy),
        TEST(test_drive_is_dead),
        cmocka_unit_test_setup_teardown(test_failpoints, NULL, teardown),
        TEST(test_drive_rots),
        TEST(test_drive_rots_while_running),
        TEST(test_drive_is_garbage),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
