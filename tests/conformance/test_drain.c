/* SPDX-License-Identifier: Apache-2.0
 *
 * test_drain.c: SIGTERM ends the daemon in time and in order, whatever a client does meanwhile.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <signal.h>
#include <string.h>
#include <sys/wait.h>

#include "base/clock.h"
#include "tests/conformance/room.h"
#include "tests/fault/raw_client.h"
#include "tests/support/blocks.h"
#include "tests/support/daemon.h"

#define N_BLOCKS    160
#define BLOCK_BYTES (250 << 10) /* together more than twice the arena: always cold */
#define BATCH       8
#define BATCHES_MAX 4

static struct kvf_test_daemon the_daemon;

/* A client that hears nothing: it keeps four requests for cold blocks in flight. */
struct deaf {
    struct raw_client raw;
    uint64_t next;
    uint32_t in_flight;
};

static void deaf_turn(struct deaf *deaf)
{
    struct kvf_shm_key keys[BATCH];
    struct kvf_shm_cqe cqe;
    struct kvf_shm_sqe sqe;

    while (kvf_ring_client_take(&deaf->raw.ring, &cqe) == KVF_OK) {
        if (cqe.kind != KVF_CQE_BLOCK) {
            deaf->in_flight--;
        }
    }
    while (deaf->in_flight < BATCHES_MAX &&
           kvf_ring_client_room(&deaf->raw.ring, BATCH) == KVF_OK) {
        memset(keys, 0, sizeof(keys));
        for (uint32_t i = 0; i < BATCH; i++) {
            struct kvf_test_key bytes;

            (void)kvf_test_key(deaf->next++ % N_BLOCKS, &bytes);
            memcpy(keys[i].key, bytes.bytes, sizeof(bytes.bytes));
            keys[i].key_bytes = sizeof(bytes.bytes);
        }
        raw_sqe(&deaf->raw, &sqe, KVF_OP_PREFETCH, BATCH);
        raw_submit(&deaf->raw, &sqe, keys, BATCH);
        deaf->in_flight++;
    }
}

static void test_deaf_client(void **state)
{
    static const char *const sets[] = {"dram.bytes=16MiB", NULL};
    struct deaf deaf = {0};
    struct kvf_client *client;
    uint64_t begun_ns;
    int wait_status = 0;

    (void)state;
    kvf_test_daemon_create(&the_daemon, sets);
    kvf_test_daemon_start(&the_daemon);
    client = kvf_test_client_open(&the_daemon, NULL);
    room_put_all(client, 0, N_BLOCKS, BLOCK_BYTES, KVF_PUT_DURABLE);
    kvf_close(client);
    kvf_test_daemon_kill(&the_daemon);
    kvf_test_daemon_set(&the_daemon, "test.delay_nvme=load:20ms");
    kvf_test_daemon_start(&the_daemon);

    raw_attach(&deaf.raw, the_daemon.socket_path);
    begun_ns = kvf_now_ns();
    while (kvf_test_daemon_number(&the_daemon, "nvme.0.loads") < 2 * N_BLOCKS) { /* always cold */
        assert_true(kvf_now_ns() - begun_ns < 120 * KVF_NS_PER_S);
        deaf_turn(&deaf);
        room_sleep_ms(1);
    }
    begun_ns = kvf_now_ns();
    kvf_test_process_signal(&the_daemon.process, SIGTERM);
    while (!kvf_test_daemon_has_ended(&the_daemon, 1, &wait_status)) {
        assert_true(kvf_now_ns() - begun_ns < 120 * KVF_NS_PER_S);
        deaf_turn(&deaf);
    }
    assert_true(WIFEXITED(wait_status));
    assert_int_equal(WEXITSTATUS(wait_status), 0);
    raw_close(&deaf.raw);
}

static int end(void **state)
{
    (void)state;
    kvf_test_daemon_destroy(&the_daemon);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_deaf_client, end),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
