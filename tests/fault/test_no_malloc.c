/* SPDX-License-Identifier: Apache-2.0
 *
 * test_no_malloc.c: once the daemon is ready, hits cost no allocation: counted in the daemon's own
 * process over ten thousand lookups, gets and releases.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/support/blocks.h"
#include "tests/support/daemon.h"

#define BLOCK_BYTES 20000
#define N_BLOCKS    64
#define CHAIN       8

static struct kvf_test_daemon the_daemon;
static const volatile uint64_t *the_count;

static void one_round(struct kvf_client *client, uint64_t first)
{
    struct kvf_lookup_options options = {.struct_bytes = sizeof(options),
                                         .flags = KVF_LOOKUP_LEASE | KVF_LOOKUP_PREFETCH};
    struct kvf_lookup_result result;
    struct kvf_test_key bytes[CHAIN];
    struct kvf_key keys[CHAIN];
    struct kvf_hit hits[CHAIN];

    for (uint32_t i = 0; i < CHAIN; i++) {
        keys[i] = kvf_test_key(first + i, &bytes[i]);
    }
    assert_int_equal(kvf_lookup(client, keys, CHAIN, &options, &result), KVF_OK);
    assert_int_equal(result.ready_chunks, CHAIN);
    assert_int_equal(kvf_get(client, keys, CHAIN, NULL, hits), KVF_OK);
    for (uint32_t i = 0; i < CHAIN; i++) {
        assert_int_equal(kvf_test_hit_check(client, &hits[i], first + i, BLOCK_BYTES), KVF_OK);
    }
    assert_int_equal(kvf_lease_release(client, result.lease), KVF_OK);
}

static void test_hits_do_not_allocate(void **state)
{
    struct kvf_client *client = kvf_test_client_open(&the_daemon, NULL);
    struct kvf_stat stat = {.struct_bytes = sizeof(stat)};
    uint64_t before;

    (void)state;
    for (uint64_t i = 0; i < N_BLOCKS; i++) {
        assert_int_equal(kvf_test_block_put(client, i, BLOCK_BYTES, KVF_PUT_DURABLE), KVF_OK);
    }
    one_round(client, 0);
    assert_int_equal(kvf_stat(client, &stat), KVF_OK);
    before = *the_count;
    assert_true(before > 0); /* it counts at all */
    for (uint64_t i = 0; i < 10000 / CHAIN; i++) {
        one_round(client, i * CHAIN % N_BLOCKS);
    }
    assert_int_equal(kvf_stat(client, &stat), KVF_OK);
    assert_int_equal(*the_count - before, 0);
    assert_true(stat.hits >= 10000);
    /* puts into memory neither */
    for (uint64_t i = 0; i < 500; i++) {
        assert_int_equal(kvf_test_block_put(client, N_BLOCKS + i, BLOCK_BYTES, KVF_PUT_NO_WRITE),
                         KVF_OK);
    }
    assert_int_equal(*the_count - before, 0);
    kvf_close(client);
    /* and the question that an operator asks does: the counter still counts */
    (void)kvf_test_daemon_number(&the_daemon, "clients");
    assert_true(*the_count > before);
}

static int group_setup(void **state)
{
    static char env[KVF_TEST_PATH_BYTES + 32];
    static const uint64_t zero;
    char path[KVF_TEST_PATH_BYTES];
    void *base;
    int fd;

    (void)state;
    kvf_test_daemon_create(&the_daemon, NULL);
    kvf_test_dir_path(&the_daemon.dir, "count", path);
    kvf_test_file_write(path, &zero, sizeof(zero));
    fd = open(path, O_RDWR | O_CLOEXEC);
    base = mmap(NULL, sizeof(zero), PROT_READ, MAP_SHARED, fd, 0);
    if (fd < 0 || base == MAP_FAILED) {
        return -1;
    }
    close(fd);
    the_count = base;
    snprintf(env, sizeof(env), "KVF_MALLOC_COUNT=%s", path);
    the_daemon.extra_env = env;
    the_daemon.preload = KVF_TEST_MALLOC_COUNT;
    kvf_test_daemon_start(&the_daemon);
    return 0;
}

static int group_teardown(void **state)
{
    (void)state;
    assert_int_equal(kvf_test_daemon_stop(&the_daemon), 0);
    kvf_test_daemon_destroy(&the_daemon);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hits_do_not_allocate),
    };

    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
