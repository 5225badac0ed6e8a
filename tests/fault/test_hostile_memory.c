/* SPDX-License-Identifier: Apache-2.0
 *
 * test_hostile_memory.c: what a client can do to the memory that it shares with the daemon: cut it,
 * punch holes into it, keep it from being sealed, and write into it while the daemon reads. The
 * daemon lives and its other client never notices.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/random.h"
#include "tests/fault/neighbour.h"
#include "tests/fault/raw_client.h"

#define HANG_UP_MS 60000

/* --- shared memory ------------------------------------------------------------------------------
 */

/* Before the seals are on: cut the memory that the daemon will read. */
static void test_truncate_before_seal(void **state)
{
    (void)state;
    for (int which = 0; which < 2; which++) {
        struct kvf_wire_hello hello;
        struct raw_client raw;
        struct kvf_shm_sqe sqe;
        struct kvf_shm_key key;
        int cut;

        raw_hello(&hello);
        raw_connect(&raw, the_daemon.socket_path);
        assert_true(raw_begin(&raw, &hello));
        cut = ftruncate(which == 0 ? raw.ring_fd : raw.staging_fd, 0);
        if (raw_mapped(&raw) && cut != 0) { /* it was sealed against that: all is well */
            raw_sqe(&raw, &sqe, KVF_OP_PUT, 1);
            raw_key(&key, 1);
            key.record_bytes = 8192;
            raw_submit(&raw, &sqe, &key, 1);
            assert_nobody_noticed();
        }
        assert_nobody_noticed();
        raw_close(&raw);
    }
}

/* Holes in what was handed out, a single one too: the daemon sees them and hangs up. */
static void test_holes_before_mapped(void **state)
{
    (void)state;
    for (int which = 0; which < 3; which++) {
        struct kvf_wire_hello hello;
        struct raw_client raw;

        raw_hello(&hello);
        hello.staging_bytes = 16 << 20;
        raw_connect(&raw, the_daemon.socket_path);
        assert_true(raw_begin(&raw, &hello));
        if (which != 1) {
            off_t bytes = which == 0 ? 4096 : (off_t)raw.welcome.staging_bytes;

            assert_int_equal(
                fallocate(raw.staging_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 4096, bytes),
                0);
        }
        if (which != 0) {
            assert_int_equal(fallocate(raw.ring_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                                       (off_t)raw.welcome.ring_bytes),
                             0);
        }
        assert_false(raw_mapped(&raw));
        assert_nobody_noticed();
        raw_close(&raw);
    }
}

/* Sealed against further seals by the client: the daemon cannot protect itself, so it hangs up. */
static void test_sealed_by_client(void **state)
{
    struct kvf_wire_hello hello;
    struct raw_client raw;

    (void)state;
    raw_hello(&hello);
    raw_connect(&raw, the_daemon.socket_path);
    assert_true(raw_begin(&raw, &hello));
    assert_int_equal(fcntl(raw.staging_fd, F_ADD_SEALS, F_SEAL_SEAL), 0);
    assert_false(raw_mapped(&raw));
    raw_close(&raw);
    assert_nobody_noticed();
}

static void test_sealed(void **state)
{
    struct raw_client raw;
    int fds[3];

    (void)state;
    raw_attach(&raw, the_daemon.socket_path);
    fds[0] = raw.ring_fd;
    fds[1] = raw.staging_fd;
    fds[2] = raw.piece_fd;
    for (int i = 0; i < 3; i++) {
        assert_int_not_equal(ftruncate(fds[i], 0), 0);
        assert_int_not_equal(ftruncate(fds[i], 1 << 30), 0);
        assert_int_not_equal(fallocate(fds[i], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096),
                             0);
        assert_int_not_equal(pwrite(fds[i], "x", 1, 0), 1);
        assert_true(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fds[i], 0) == MAP_FAILED);
        assert_int_not_equal(fcntl(fds[i], F_ADD_SEALS, F_SEAL_WRITE), 0);
    }
    /* the same with what the handshake left mapped: holes through the mapping */
    (void)madvise(raw.ring_base, 4096, MADV_REMOVE);
    (void)madvise(raw.staging, 4096, MADV_REMOVE);
    assert_nobody_noticed();
    raw_close(&raw);
}

/* --- memory that changes while it is read -------------------------------------------------------
 */

struct scribbler {
    struct raw_client *raw;
    uint64_t seed;
    _Atomic bool is_stopping;
};

/* Words of the key area, the submissions and staging, at random. */
static void *scribble(void *arg)
{
    struct scribbler *scribbler = arg;
    struct raw_client *raw = scribbler->raw;
    struct kvf_random_seeded random;

    kvf_random_seeded_init(&random, scribbler->seed);
    while (!atomic_load(&scribbler->is_stopping)) {
        uint64_t word = kvf_random_seeded_next(&random);
        uint64_t *keys = (uint64_t *)(void *)(raw->ring_base + raw->header.keys_offset);
        uint64_t *staging = (uint64_t *)(void *)raw->staging;
        size_t n_key_words = raw->header.key_entries * sizeof(struct kvf_shm_key) / sizeof(word);

        __atomic_store_n(&staging[word % (16 * 1024)], word, __ATOMIC_RELAXED);
        if (word % 4 == 0) {
            __atomic_store_n(&keys[word / 8 % n_key_words], word >> 40, __ATOMIC_RELAXED);
        }
    }
    return NULL;
}

/* Puts of records whose bytes, names and places change all the time. Whatever the daemon makes of
 * them: it goes on, and what it stores is what it has summed. */
static void test_scribbled_puts(void **state)
{
    uint64_t end_ns = kvf_now_ns() + kvf_test_scaled(3000) * KVF_NS_PER_MS;
    uint64_t seed = kvf_test_seed();
    uint32_t n_answered = 0;
    uint32_t n_connections = 0;

    (void)state;
    while (kvf_now_ns() < end_ns) {
        struct raw_client raw;
        struct scribbler scribbler = {.raw = &raw, .seed = seed + n_connections};
        pthread_t thread;
        bool hung_up = false;

        n_connections++;
        raw_attach(&raw, the_daemon.socket_path);
        assert_int_equal(pthread_create(&thread, NULL, scribble, &scribbler), 0);
        for (uint64_t i = 0; i < 500 && !hung_up && kvf_now_ns() < end_ns; i++) {
            struct kvf_shm_sqe sqe;
            struct kvf_shm_key keys[8];
            struct kvf_shm_cqe cqe;

            raw_sqe(&raw, &sqe, KVF_OP_PUT, 8);
            for (uint32_t k = 0; k < 8; k++) {
                raw_key(&keys[k], i * 8 + k);
                keys[k].stage_offset = k * 8192;
                keys[k].record_bytes = 8192;
            }
            raw_submit(&raw, &sqe, keys, 8);
            while (kvf_ring_client_take(&raw.ring, &cqe) == KVF_OK) {
                n_answered++;
            }
            hung_up = raw_is_hung_up(&raw, 1);
        }
        atomic_store(&scribbler.is_stopping, true);
        pthread_join(thread, NULL);
        raw_close(&raw);
    }
    print_message("%u completions in %u connections\n", n_answered, n_connections);
    assert_nobody_noticed();
}

/* Everything that is shared, while it is in use: entries, indices of both sides, completions. */
static void *scribble_all(void *arg)
{
    struct scribbler *scribbler = arg;
    struct raw_client *raw = scribbler->raw;
    uint64_t *ring = (uint64_t *)(void *)raw->ring_base;
    uint64_t *staging = (uint64_t *)(void *)raw->staging;
    size_t first = sizeof(struct kvf_shm_header) / sizeof(*ring);
    size_t n = raw->welcome.ring_bytes / sizeof(*ring) - first;
    struct kvf_random_seeded random;

    kvf_random_seeded_init(&random, scribbler->seed);
    while (!atomic_load(&scribbler->is_stopping)) {
        uint64_t word = kvf_random_seeded_next(&random);

        __atomic_store_n(&ring[first + word % n], word >> (word % 64), __ATOMIC_RELAXED);
        __atomic_store_n(&staging[word % (16 * 1024)], word, __ATOMIC_RELAXED);
    }
    return NULL;
}

static void test_scribbled_rings(void **state)
{
    uint64_t seed = kvf_test_seed();
    uint32_t rounds = kvf_test_scaled(60);

    (void)state;
    for (uint32_t round = 0; round < rounds; round++) {
        struct raw_client raw;
        struct scribbler scribbler = {.raw = &raw, .seed = seed + round};
        pthread_t thread;

        raw_attach(&raw, the_daemon.socket_path);
        assert_int_equal(pthread_create(&thread, NULL, scribble_all, &scribbler), 0);
        for (int i = 0; i < 200 && !raw_is_hung_up(&raw, 1); i++) {
            raw_wake(&raw);
        }
        atomic_store(&scribbler.is_stopping, true);
        pthread_join(thread, NULL);
        raw_close(&raw);
    }
    assert_nobody_noticed();
}

/* All of the segment at random, again and again. */
static void test_segment_at_random(void **state)
{
    uint32_t rounds = kvf_test_scaled(100);
    struct kvf_random_seeded random;

    (void)state;
    kvf_random_seeded_init(&random, kvf_test_seed());
    for (uint32_t round = 0; round < rounds; round++) {
        struct raw_client raw;

        raw_attach(&raw, the_daemon.socket_path);
        for (size_t i = sizeof(struct kvf_shm_header); i < raw.welcome.ring_bytes; i += 8) {
            uint64_t word = kvf_random_seeded_next(&random);

            memcpy(raw.ring_base + i, &word, sizeof(word));
        }
        /* an index that is possible, so that the entries are looked at */
        __atomic_store_n(&raw.ring.indices->sq_tail.value, 8, __ATOMIC_RELEASE);
        raw_wake(&raw);
        assert_true(raw_is_hung_up(&raw, HANG_UP_MS));
        raw_close(&raw);
    }
    assert_nobody_noticed();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_truncate_before_seal), cmocka_unit_test(test_holes_before_mapped),
        cmocka_unit_test(test_sealed_by_client),     cmocka_unit_test(test_sealed),
        cmocka_unit_test(test_scribbled_puts),       cmocka_unit_test(test_scribbled_rings),
        cmocka_unit_test(test_segment_at_random),
    };

    return cmocka_run_group_tests(tests, neighbour_setup, neighbour_teardown);
}
