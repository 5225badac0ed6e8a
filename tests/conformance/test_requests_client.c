/* SPDX-License-Identifier: Apache-2.0
 *
 * test_requests_client.c: what a client may do to the memory it is given, what a fork of its
 * process sees, and how its handle lives through the daemon's death.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "tests/conformance/outcome.h"
#include "tests/support/blocks.h"
#include "tests/support/daemon.h"

#define BLOCK_BYTES 50000

static struct kvf_test_daemon the_daemon;
static struct kvf_client *the_client;

/* --- memory -------------------------------------------------------------------------------------
 */

/* Run touch(address) in a child. True: it was killed by a fault. */
static bool faults(void (*touch)(void *address), void *address)
{
    const struct rlimit no_core = {0};
    int wait_status;
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid == 0) {
        setrlimit(RLIMIT_CORE, &no_core);
        signal(SIGSEGV, SIG_DFL);
        signal(SIGBUS, SIG_DFL);
        touch(address);
        _exit(0);
    }
    assert_int_equal(waitpid(pid, &wait_status, 0), pid);
    return WIFSIGNALED(wait_status) &&
           (WTERMSIG(wait_status) == SIGSEGV || WTERMSIG(wait_status) == SIGBUS);
}

static void write_byte(void *address)
{
    *(volatile uint8_t *)address = 1;
}

static void read_byte(void *address)
{
    (void)*(volatile uint8_t *)address;
}

static void get_hit(uint64_t number, struct kvf_hit *hit_out)
{
    struct kvf_test_key bytes;
    struct kvf_key key = kvf_test_key(number, &bytes);

    assert_int_equal(kvf_get(the_client, &key, 1, NULL, hit_out), KVF_OK);
}

/* The arena cannot be written, and cannot be made writable: a client may harm only itself. */
static void test_arena_is_read_only(void **state)
{
    struct kvf_hit hit;
    uintptr_t page;

    (void)state;
    assert_int_equal(kvf_test_block_put(the_client, 1, BLOCK_BYTES, 0), KVF_OK);
    get_hit(1, &hit);
    page = (uintptr_t)hit.record & ~(uintptr_t)4095;
    assert_true(faults(write_byte, (void *)(uintptr_t)hit.payload));
    assert_int_not_equal(mprotect((void *)page, 4096, PROT_READ | PROT_WRITE), 0);
    assert_int_equal(kvf_test_hit_check(the_client, &hit, 1, BLOCK_BYTES), KVF_OK);
    /* a child does not inherit the mapping */
    assert_true(faults(read_byte, (void *)(uintptr_t)hit.payload));
}

/* A child that exits, or runs another program, leaves the parent's handle alone. */
static void test_fork(void **state)
{
    struct kvf_hit hit;
    int wait_status;
    pid_t pid;

    (void)state;
    assert_int_equal(kvf_test_block_put(the_client, 2, BLOCK_BYTES, 0), KVF_OK);
    get_hit(2, &hit);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        execl("/bin/true", "true", (char *)NULL);
        _exit(1);
    }
    assert_int_equal(waitpid(pid, &wait_status, 0), pid);
    assert_int_equal(wait_status, 0);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        _exit(0);
    }
    assert_int_equal(waitpid(pid, &wait_status, 0), pid);
    assert_int_equal(kvf_test_hit_check(the_client, &hit, 2, BLOCK_BYTES), KVF_OK);
    assert_int_equal(kvf_test_block_put(the_client, 3, BLOCK_BYTES, 0), KVF_OK);
    assert_int_equal(kvf_test_block_get(the_client, 3, BLOCK_BYTES, NULL), KVF_OK);
}

/* --- the daemon's death -------------------------------------------------------------------------
 */

/* Until the handle has reconnected; whatever it answers before that must be a status, in time. */
static void wait_connected(void)
{
    const struct timespec pause = {.tv_nsec = 5 * KVF_NS_PER_MS};
    uint64_t deadline_ns = kvf_now_ns() + 60 * KVF_NS_PER_S;
    uint64_t round_trip_ns;

    while (kvf_ping(the_client, 100, &round_trip_ns) != KVF_OK) {
        assert_true(kvf_now_ns() < deadline_ns);
        nanosleep(&pause, NULL);
    }
}

static void test_handle_survives_restart(void **state)
{
    struct kvf_info before = {.struct_bytes = sizeof(before)};
    struct kvf_info after = {.struct_bytes = sizeof(after)};
    struct kvf_hit hit;

    (void)state;
    assert_int_equal(kvf_client_info(the_client, &before), KVF_OK);
    assert_int_equal(kvf_test_block_put(the_client, 10, BLOCK_BYTES, KVF_PUT_DURABLE), KVF_OK);
    assert_int_equal(kvf_test_block_put(the_client, 11, BLOCK_BYTES, KVF_PUT_NO_WRITE), KVF_OK);
    get_hit(10, &hit);
    kvf_test_daemon_kill(&the_daemon);
    /* the memory stays readable, but nobody vouches for it any more */
    (void)*(const volatile uint8_t *)hit.payload;
    assert_true(kvf_test_block_get(the_client, 10, BLOCK_BYTES, NULL) < 0);
    assert_int_equal(kvf_lease_release(the_client, hit.lease), KVF_ERR_LOST);
    kvf_test_daemon_start(&the_daemon);
    wait_connected();
    assert_int_equal(kvf_client_info(the_client, &after), KVF_OK);
    assert_int_equal(after.connected, 1);
    assert_int_equal(after.reconnects, before.reconnects + 1);
    assert_int_equal(after.namespace_id, before.namespace_id);
    assert_true(after.incarnation != before.incarnation);
    assert_int_equal(kvf_test_block_get(the_client, 10, BLOCK_BYTES, NULL), KVF_OK);
    assert_int_equal(kvf_test_block_get(the_client, 11, BLOCK_BYTES, NULL), KVF_MISS);
    assert_int_equal(kvf_test_block_put(the_client, 11, BLOCK_BYTES, 0), KVF_OK);
}

static void test_requests_in_flight_are_ended(void **state)
{
    static struct kvf_hit hits[64];
    static struct outcome outcome;
    struct kvf_test_key bytes[64];
    struct kvf_key keys[64];

    (void)state;
    for (uint32_t i = 0; i < 64; i++) {
        keys[i] = kvf_test_key(1000 + i, &bytes[i]);
    }
    kvf_test_process_signal(&the_daemon.process, SIGSTOP); /* so that it cannot answer */
    memset(&outcome, 0, sizeof(outcome));
    outcome.n_blocks = 64;
    outcome.hits = hits;
    assert_int_equal(kvf_submit_get(the_client, keys, 64, NULL, 0, &outcome.request), KVF_OK);
    kvf_test_daemon_kill(&the_daemon);
    while (!outcome.is_over) {
        struct kvf_event event;
        uint32_t n = 0;
        int status = kvf_poll(the_client, &event, 1, 1000, &n);

        assert_true(status == KVF_OK || status == KVF_EMPTY || status == KVF_ERR_DISCONNECTED);
        if (n == 1) {
            assert_int_equal(event.hit.status, KVF_ERR_DISCONNECTED);
            outcome.is_over = event.kind == KVF_EVENT_REQUEST;
            outcome.n_seen += event.kind == KVF_EVENT_BLOCK;
        }
    }
    assert_int_equal(outcome.n_seen, 64);
    kvf_test_daemon_start(&the_daemon);
    wait_connected();
}

static void test_no_reconnect(void **state)
{
    struct kvf_options options;
    struct kvf_client *client;
    uint64_t round_trip_ns;

    (void)state;
    kvf_test_client_options(&the_daemon, &options);
    options.flags = KVF_ATTACH_NO_RECONNECT;
    options.staging_bytes = 1 << 20;
    assert_int_equal(kvf_open(&options, &client), KVF_OK);
    kvf_test_daemon_kill(&the_daemon);
    kvf_test_daemon_start(&the_daemon);
    assert_int_equal(kvf_test_block_get(client, 1, BLOCK_BYTES, NULL), KVF_ERR_DISCONNECTED);
    assert_true(kvf_ping(client, 200, &round_trip_ns) < 0);
    kvf_close(client);
    wait_connected();
}

/* SIGTERM while a lease is held: it is lost, not left hanging. What came from another node is the
 * client's own. */
static void test_drain_takes_leases(void **state)
{
    struct kvf_hit hit;

    (void)state;
    assert_int_equal(kvf_test_block_put(the_client, 20, BLOCK_BYTES, 0), KVF_OK);
    get_hit(20, &hit);
    assert_int_equal(kvf_test_daemon_stop(&the_daemon), 0);
    assert_int_equal(kvf_lease_release(the_client, hit.lease),
                     kvf_test_is_remote() ? KVF_OK : KVF_ERR_LOST);
    kvf_test_daemon_start(&the_daemon);
    wait_connected();
    assert_int_equal(kvf_test_block_get(the_client, 20, BLOCK_BYTES, NULL), KVF_OK);
}

static void test_nobody_listens(void **state)
{
    struct kvf_options options;
    struct kvf_client *client = NULL;
    char path[KVF_TEST_PATH_BYTES];

    (void)state;
    kvf_test_client_options(&the_daemon, &options);
    kvf_test_dir_path(&the_daemon.dir, "nobody", path);
    options.socket_path = path;
    options.log = NULL;
    assert_int_equal(kvf_open(&options, &client), KVF_ERR_NO_DAEMON);
    assert_null(client);
}

/* --- room ---------------------------------------------------------------------------------------
 */

static void test_attach_limits(void **state)
{
    struct kvf_client *clients[4] = {NULL};
    struct kvf_client *one_more = NULL;
    struct kvf_options options;

    (void)state;
    kvf_test_client_options(&the_daemon, &options);
    options.log = NULL;
    /* staging.total is 24 MiB; one client has 4 MiB of it */
    options.staging_bytes = 23 << 20;
    assert_int_equal(kvf_open(&options, &one_more), KVF_ERR_BUSY);
    /* clients.max is 5 */
    options.staging_bytes = 1 << 20;
    for (int i = 0; i < 4; i++) {
        assert_int_equal(kvf_open(&options, &clients[i]), KVF_OK);
    }
    assert_int_equal(kvf_open(&options, &one_more), KVF_ERR_BUSY);
    clients[0] = kvf_close(clients[0]);
    while (kvf_open(&options, &clients[0]) == KVF_ERR_BUSY) {
    }
    assert_non_null(clients[0]);
    for (int i = 0; i < 4; i++) {
        kvf_close(clients[i]);
    }
    assert_true(kvf_test_daemon_wait_number(&the_daemon, "clients", 1, 60000));
}

/* A geometry whose blocks can be too large is refused with the size that would do. */
static void test_geometry_too_large(void **state)
{
    struct kvf_geometry geometry = {.struct_bytes = sizeof(geometry),
                                    .kind = KVF_KIND_KV,
                                    .dtype = KVF_DTYPE_BF16,
                                    .n_layers = 80,
                                    .n_heads = 64,
                                    .dim_k = 128,
                                    .dim_v = 128,
                                    .chunk_tokens = 256};
    struct kvf_client *client = NULL;
    struct kvf_options options;

    (void)state;
    kvf_test_client_options(&the_daemon, &options);
    options.log = NULL;
    options.geometry = &geometry;
    options.profile = "raw";
    assert_int_equal(kvf_open(&options, &client), KVF_ERR_TOO_LARGE);
    assert_null(client);
}

static int group_setup(void **state)
{
    static const char *const sets[] = {"clients.max=5", "staging.total=24MiB",
                                       "staging.client=4MiB", NULL};

    (void)state;
    kvf_test_daemon_create(&the_daemon, sets);
    kvf_test_daemon_start(&the_daemon);
    the_client = kvf_test_client_open(&the_daemon, NULL);
    return 0;
}

static int group_teardown(void **state)
{
    (void)state;
    kvf_close(the_client);
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.protocol_errors"), 0);
    assert_int_equal(kvf_test_daemon_stop(&the_daemon), 0);
    kvf_test_daemon_destroy(&the_daemon);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_arena_is_read_only),
        cmocka_unit_test(test_fork),
        cmocka_unit_test(test_handle_survives_restart),
        cmocka_unit_test(test_requests_in_flight_are_ended),
        cmocka_unit_test(test_no_reconnect),
        cmocka_unit_test(test_drain_takes_leases),
        cmocka_unit_test(test_nobody_listens),
        cmocka_unit_test(test_attach_limits),
        cmocka_unit_test(test_geometry_too_large),
    };

    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
