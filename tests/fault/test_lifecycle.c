/* SPDX-License-Identifier: Apache-2.0
 *
 * test_lifecycle.c: starting where something else is already, or was, or lies broken; and ending.
 * What is refused is refused by name, with exit code 2, and left as it was, byte for byte.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/crc32c.h"
#include "tests/support/blocks.h"
#include "tests/support/daemon.h"
#include "tiers/nvme_format.h"

#define BLOCK_BYTES 20000
#define STORE_BYTES (16 << 20)
#define REFUSED     2

static struct kvf_test_daemon the_daemon;

static void put_some(uint32_t flags)
{
    struct kvf_client *client = kvf_test_client_open(&the_daemon, NULL);

    for (uint64_t i = 0; i < 10; i++) {
        assert_int_equal(kvf_test_block_put(client, i, BLOCK_BYTES, flags), KVF_OK);
    }
    kvf_close(client);
}

static void get_some(int status)
{
    struct kvf_client *client = kvf_test_client_open(&the_daemon, NULL);

    for (uint64_t i = 0; i < 10; i++) {
        assert_int_equal(kvf_test_block_get(client, i, BLOCK_BYTES, NULL), status);
    }
    kvf_close(client);
}

/* --- somebody is there already ------------------------------------------------------------------
 */

static void test_second_on_socket(void **state)
{
    struct kvf_test_daemon second;
    char set[KVF_TEST_PATH_BYTES + 32];

    (void)state;
    kvf_test_daemon_start(&the_daemon);
    kvf_test_daemon_create(&second, NULL);
    snprintf(set, sizeof(set), "sockets.0.path=%s", the_daemon.socket_path);
    kvf_test_daemon_set(&second, set);
    assert_int_equal(kvf_test_daemon_run_to_end(&second), REFUSED);
    assert_true(kvf_test_daemon_log_has(&second, the_daemon.socket_path));
    put_some(0);
    get_some(KVF_OK);
    kvf_test_daemon_destroy(&second);
}

static void test_second_on_store(void **state)
{
    struct kvf_test_daemon second;

    (void)state;
    kvf_test_daemon_start(&the_daemon);
    put_some(KVF_PUT_DURABLE);
    kvf_test_daemon_create(&second, NULL);
    memcpy(second.store_path, the_daemon.store_path, sizeof(second.store_path));
    kvf_test_daemon_set(&second, "nvme.0.bytes=16MiB");
    kvf_test_daemon_set(&second, "nvme.0.segment_bytes=1MiB");
    assert_int_equal(kvf_test_daemon_run_to_end(&second), REFUSED);
    assert_true(kvf_test_daemon_log_has(&second, the_daemon.store_path));
    assert_int_not_equal(access(second.socket_path, F_OK), 0); /* it has left nothing behind */
    get_some(KVF_OK);
    kvf_test_daemon_kill(&the_daemon);
    kvf_test_daemon_start(&the_daemon);
    get_some(KVF_OK);
    kvf_test_daemon_destroy(&second);
}

static void test_stale_socket(void **state)
{
    struct stat before, after;

    (void)state;
    kvf_test_daemon_start(&the_daemon);
    kvf_test_daemon_kill(&the_daemon);
    assert_int_equal(stat(the_daemon.socket_path, &before), 0); /* nobody cleaned up */
    assert_true(S_ISSOCK(before.st_mode));
    kvf_test_daemon_start(&the_daemon);
    assert_int_equal(stat(the_daemon.socket_path, &after), 0);
    put_some(0);
    get_some(KVF_OK);
    assert_int_equal(kvf_test_daemon_stop(&the_daemon), 0);
    assert_int_not_equal(access(the_daemon.socket_path, F_OK), 0);
}

static void test_something_else_at_socket(void **state)
{
    struct stat st;
    char *text;

    (void)state;
    assert_int_equal(mkdir(the_daemon.socket_path, 0700), 0);
    assert_int_equal(kvf_test_daemon_run_to_end(&the_daemon), REFUSED);
    assert_true(kvf_test_daemon_log_has(&the_daemon, the_daemon.socket_path));
    assert_int_equal(stat(the_daemon.socket_path, &st), 0);
    assert_true(S_ISDIR(st.st_mode));
    assert_int_equal(rmdir(the_daemon.socket_path), 0);

    kvf_test_file_write(the_daemon.socket_path, "mine", 4);
    assert_int_equal(kvf_test_daemon_run_to_end(&the_daemon), REFUSED);
    text = kvf_test_file_read(the_daemon.socket_path, NULL);
    assert_string_equal(text, "mine");
    free(text);
    assert_int_equal(unlink(the_daemon.socket_path), 0);
    kvf_test_daemon_start(&the_daemon);
}

/* --- the end ------------------------------------------------------------------------------------
 */

static void test_stop_keeps_puts(void **state)
{
    (void)state;
    kvf_test_daemon_start(&the_daemon);
    put_some(0);
    assert_int_equal(kvf_test_daemon_stop(&the_daemon), 0);
    kvf_test_daemon_start(&the_daemon);
    get_some(KVF_OK);
}

/* With a client that never goes: it is told, and the daemon ends all the same. */
static void test_stop_with_clients(void **state)
{
    struct kvf_client *client;

    (void)state;
    kvf_test_daemon_start(&the_daemon);
    client = kvf_test_client_open(&the_daemon, NULL);
    put_some(0);
    assert_int_equal(kvf_test_daemon_stop(&the_daemon), 0); /* not 0 once drain.timeout is over */
    assert_true(kvf_test_block_get(client, 1, BLOCK_BYTES, NULL) < 0);
    kvf_close(client);
}

/* SIGTERM at any moment of the start. */
static void test_stop_at_any_time(void **state)
{
    uint32_t rounds = kvf_test_scaled(30);

    (void)state;
    kvf_test_daemon_start(&the_daemon);
    put_some(KVF_PUT_DURABLE);
    assert_int_equal(kvf_test_daemon_stop(&the_daemon), 0);
    for (uint32_t round = 0; round < rounds; round++) {
        const struct timespec pause = {.tv_nsec = (long)round * 1000 * 1000};
        int wait_status;

        kvf_test_daemon_spawn(&the_daemon);
        nanosleep(&pause, NULL);
        kvf_test_process_signal(&the_daemon.process, SIGTERM);
        assert_true(kvf_test_daemon_has_ended(&the_daemon, 60000, &wait_status));
        /* before its handler is there the signal ends it, which is fine, too */
        assert_true(wait_status == 0 || (wait_status & 0x7f) == SIGTERM);
    }
    kvf_test_daemon_start(&the_daemon);
    get_some(KVF_OK);
}

/* --- stores -------------------------------------------------------------------------------------
 */

/* It must not start on this store, and must not touch it. */
static void assert_store_is_refused(void)
{
    size_t before_bytes, after_bytes;
    char *before = kvf_test_file_read(the_daemon.store_path, &before_bytes);
    char *after;

    assert_non_null(before);
    assert_int_not_equal(kvf_test_daemon_run_to_end(&the_daemon), 0);
    assert_true(kvf_test_daemon_log_has(&the_daemon, the_daemon.store_path));
    after = kvf_test_file_read(the_daemon.store_path, &after_bytes);
    assert_int_equal(before_bytes, after_bytes);
    assert_memory_equal(before, after, after_bytes);
    free(before);
    free(after);
}

static void poke(uint64_t offset, const void *data, size_t bytes)
{
    int fd = open(the_daemon.store_path, O_WRONLY | O_CLOEXEC);

    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, data, bytes, (off_t)offset), bytes);
    close(fd);
}

static void make_store(void)
{
    kvf_test_daemon_start(&the_daemon);
    put_some(KVF_PUT_DURABLE);
    kvf_test_daemon_kill(&the_daemon);
}

static void test_foreign_file(void **state)
{
    char *text = malloc(STORE_BYTES);

    (void)state;
    assert_non_null(text);
    kvf_test_payload_fill(1, text, STORE_BYTES);
    kvf_test_file_write(the_daemon.store_path, text, STORE_BYTES);
    assert_store_is_refused();
    kvf_test_file_write(the_daemon.store_path, text, 100);
    assert_store_is_refused();
    memset(text, 0, STORE_BYTES); /* zeroes are somebody's, too: only an empty file is nobody's */
    kvf_test_file_write(the_daemon.store_path, text, 2 << 20);
    assert_store_is_refused();
    free(text);
}

/* Both copies of the superblock broken: not reformatted. One: the other one counts. */
static void test_broken_superblock(void **state)
{
    uint8_t byte = 0xa5;

    (void)state;
    make_store();
    poke(KVF_NVME_SUPER_OFFSET + 64, &byte, 1);
    kvf_test_daemon_start(&the_daemon);
    get_some(KVF_OK);
    kvf_test_daemon_kill(&the_daemon);
    poke(KVF_NVME_SUPER_OFFSET + 64, &byte, 1);
    poke(KVF_NVME_SUPER_OFFSET + KVF_NVME_COPY_BYTES + 64, &byte, 1);
    assert_store_is_refused();
}

/* A store that a later release has made. */
static void test_newer_store(void **state)
{
    (void)state;
    make_store();
    for (uint64_t copy = 0; copy < KVF_NVME_COPIES; copy++) {
        uint64_t offset = KVF_NVME_SUPER_OFFSET + copy * KVF_NVME_COPY_BYTES;
        struct kvf_nvme_super super;
        int fd = open(the_daemon.store_path, O_RDONLY | O_CLOEXEC);

        assert_int_equal(pread(fd, &super, sizeof(super), (off_t)offset), sizeof(super));
        close(fd);
        super.major++;
        super.crc32c = 0;
        super.crc32c = kvf_crc32c(0, &super, sizeof(super));
        poke(offset, &super, sizeof(super));
    }
    assert_store_is_refused();
    assert_true(kvf_test_daemon_log_has(&the_daemon, "was written by a newer kvferryd: upgrade, or "
                                                     "give it up with kvferryd --format"));
}

/* --- settings -----------------------------------------------------------------------------------
 */

static void test_wrong_settings(void **state)
{
    static const char *const wrong[] = {
        "dram.byte=1GiB",     "dram.bytes=much",        "dram.bytes=1",    "workers=0",
        "log.level=loud",     "nvme.0.write_budget=-1", "no_such_key=1",   "lease.max_age=1 year",
        "dram.area_bytes=3x", "nvme.0.segment_bytes=1", "sockets.0.path=",
    };

    (void)state;
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        kvf_test_daemon_set(&the_daemon, wrong[i]);
        if (kvf_test_daemon_run_to_end(&the_daemon) != REFUSED) {
            fail_msg("%s was taken", wrong[i]);
        }
        the_daemon.n_sets--;
    }
    the_daemon.failpoints = "nvme.record_write=explode";
    assert_int_equal(kvf_test_daemon_run_to_end(&the_daemon), REFUSED);
    assert_int_not_equal(access(the_daemon.store_path, F_OK), 0); /* nothing was made yet */
}

/* --- a start that takes long --------------------------------------------------------------------
 */

/* A client that was attached before finds misses at once, and is back by itself in the end. */
static void test_client_over_a_long_recovery(void **state)
{
    struct kvf_client *client;
    struct kvf_info info = {.struct_bytes = sizeof(info)};
    uint32_t n_busy = 0;
    uint64_t end_ns;

    (void)state;
    kvf_test_daemon_start(&the_daemon);
    put_some(KVF_PUT_DURABLE);
    client = kvf_test_client_open(&the_daemon, NULL);
    assert_int_equal(kvf_test_block_get(client, 0, BLOCK_BYTES, NULL), KVF_OK);
    kvf_test_daemon_kill(&the_daemon); /* so that a segment is scanned */
    the_daemon.failpoints = "nvme.recover_scan=delay:2s";
    kvf_test_daemon_spawn(&the_daemon);
    end_ns = kvf_now_ns() + 120 * KVF_NS_PER_S;
    do {
        int status = kvf_test_block_get(client, 0, BLOCK_BYTES, NULL);

        if (status != KVF_OK) {
            assert_true(status == KVF_ERR_DISCONNECTED || status == KVF_ERR_NO_DAEMON);
            n_busy++;
        }
        assert_true(kvf_now_ns() < end_ns);
        assert_int_equal(kvf_client_info(client, &info), KVF_OK);
    } while (info.connected == 0);
    assert_true(n_busy > 0);
    assert_int_equal(info.reconnects, 1);
    assert_int_equal(kvf_test_block_get(client, 0, BLOCK_BYTES, NULL), KVF_OK);
    kvf_close(client);
}

/* --- beside others who want the CPU -------------------------------------------------------------
 */

/* As sched_getattr fills it: 100 us, where the kernel keeps slices at all. */
static void test_the_reactor_asks_for_short_slices(void **state)
{
    struct {
        uint32_t bytes, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime_ns, deadline_ns, period_ns;
    } ours, reactors;

    (void)state;
    kvf_test_daemon_start(&the_daemon);
    if (syscall(SYS_sched_getattr, 0, &ours, sizeof(ours), 0) != 0 || ours.runtime_ns == 0 ||
        ours.policy != SCHED_OTHER) {
        skip();
    }
    assert_int_equal(
        syscall(SYS_sched_getattr, the_daemon.process.pid, &reactors, sizeof(reactors), 0), 0);
    assert_int_equal(reactors.runtime_ns, 100000);
    assert_int_equal(reactors.policy, SCHED_OTHER);
    assert_int_equal(reactors.nice, ours.nice);
}

static int setup(void **state)
{
    static const char *const sets[] = {"dram.bytes=16MiB", "nvme.0.bytes=16MiB",
                                       "nvme.0.segment_bytes=1MiB", NULL};

    (void)state;
    kvf_test_daemon_create(&the_daemon, sets);
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
        TEST(test_second_on_socket),
        TEST(test_second_on_store),
        TEST(test_stale_socket),
        TEST(test_something_else_at_socket),
        TEST(test_stop_keeps_puts),
        TEST(test_stop_with_clients),
        TEST(test_stop_at_any_time),
        TEST(test_foreign_file),
        TEST(test_broken_superblock),
        TEST(test_newer_store),
        TEST(test_wrong_settings),
        TEST(test_client_over_a_long_recovery),
        TEST(test_the_reactor_asks_for_short_slices),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
