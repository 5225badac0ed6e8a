/* SPDX-License-Identifier: Apache-2.0
 *
 * test_ring.c: order and bounds on one thread, around the wrap of positions, and between two
 * threads.
 */
#include "base/ring.h"

#include "tests/support/support.h"

#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define TRANSFERS 300000u

struct entry {
    uint64_t sequence;
    uint64_t check;
    uint32_t extra;
};

static uint64_t seed;

static struct entry make_entry(uint64_t sequence)
{
    return (struct entry){.sequence = sequence,
                          .check = sequence * 0x9e3779b97f4a7c15ull,
                          .extra = (uint32_t)sequence ^ 0xabcdu};
}

static void assert_entry(const struct entry *entry, uint64_t sequence)
{
    const struct entry expected = make_entry(sequence);

    assert_int_equal(entry->sequence, expected.sequence);
    assert_int_equal(entry->check, expected.check);
    assert_int_equal(entry->extra, expected.extra);
}

static void full_and_empty(void **state)
{
    struct kvf_ring ring;
    struct entry entry;

    (void)state;
    assert_int_equal(kvf_ring_init(&ring, sizeof(entry), 5), KVF_OK);
    assert_int_equal(kvf_ring_capacity(&ring), 8);
    assert_true(kvf_ring_is_empty(&ring));
    assert_false(kvf_ring_pop(&ring, &entry));
    for (uint64_t i = 0; i < 8; i++) {
        entry = make_entry(i);
        assert_true(kvf_ring_push(&ring, &entry));
        assert_int_equal(kvf_ring_count(&ring), i + 1);
    }
    assert_false(kvf_ring_push(&ring, &entry));
    for (uint64_t i = 0; i < 8; i++) {
        assert_false(kvf_ring_is_empty(&ring));
        assert_true(kvf_ring_pop(&ring, &entry));
        assert_entry(&entry, i);
    }
    assert_true(kvf_ring_is_empty(&ring));
    kvf_ring_fini(&ring);
}

/* Random batches against a plain count, from positions where the 32-bit counters wrap. */
static void batches_wrap(void **state)
{
    struct kvf_random_seeded random;
    struct kvf_ring ring;
    struct entry batch[12];
    uint64_t pushed = 0;
    uint64_t popped = 0;

    (void)state;
    kvf_random_seeded_init(&random, seed);
    assert_int_equal(kvf_ring_init(&ring, sizeof(batch[0]), 8), KVF_OK);
    atomic_store(&ring.head, UINT32_MAX - 100);
    atomic_store(&ring.tail, UINT32_MAX - 100);
    ring.head_seen = ring.tail_seen = UINT32_MAX - 100;
    for (int round = 0; round < 5000; round++) {
        uint32_t want = (uint32_t)(kvf_random_seeded_next(&random) % 13);
        uint32_t room = 8 - (uint32_t)(pushed - popped);
        uint32_t got;

        for (uint32_t i = 0; i < want; i++) {
            batch[i] = make_entry(pushed + i);
        }
        got = kvf_ring_push_batch(&ring, batch, want);
        assert_int_equal(got, want < room ? want : room);
        pushed += got;
        assert_int_equal(kvf_ring_count(&ring), pushed - popped);

        want = (uint32_t)(kvf_random_seeded_next(&random) % 13);
        got = kvf_ring_pop_batch(&ring, batch, want);
        assert_int_equal(got, want < pushed - popped ? want : pushed - popped);
        for (uint32_t i = 0; i < got; i++) {
            assert_entry(&batch[i], popped + i);
        }
        popped += got;
    }
    kvf_ring_fini(&ring);
}

struct transfer {
    struct kvf_ring ring;
    uint64_t n;
};

static void *produce(void *arg)
{
    struct transfer *transfer = arg;
    struct kvf_ring *ring = &transfer->ring;

    kvf_ring_bind_producer(ring);
    for (uint64_t sequence = 0; sequence < transfer->n;) {
        struct entry batch[3] = {make_entry(sequence), make_entry(sequence + 1),
                                 make_entry(sequence + 2)};
        uint32_t want = sequence % 5 == 0 ? 3 : 1;
        uint32_t got;

        if (sequence + want > transfer->n) {
            want = 1;
        }
        got = kvf_ring_push_batch(ring, batch, want);
        sequence += got;
        if (got == 0) {
            sched_yield();
        }
    }
    return NULL;
}

static void transfer(uint32_t entries, uint64_t n)
{
    struct transfer transfer = {.n = n};
    struct entry batch[4];
    pthread_t producer;

    assert_int_equal(kvf_ring_init(&transfer.ring, sizeof(batch[0]), entries), KVF_OK);
    kvf_ring_bind_consumer(&transfer.ring);
    assert_int_equal(pthread_create(&producer, NULL, produce, &transfer), 0);
    for (uint64_t sequence = 0; sequence < n;) {
        uint32_t got = kvf_ring_pop_batch(&transfer.ring, batch, 1 + sequence % 4);

        for (uint32_t i = 0; i < got; i++) {
            assert_entry(&batch[i], sequence + i);
        }
        sequence += got;
        if (got == 0) {
            sched_yield();
        }
    }
    assert_int_equal(pthread_join(producer, NULL), 0);
    assert_true(kvf_ring_is_empty(&transfer.ring));
    kvf_ring_fini(&transfer.ring);
}

/* Where both threads share a core with others, each ringful costs turns of all of them: a small
 * ring, which is full and empty more often, gets fewer entries to carry. */
static void two_threads_keep_order(void **state)
{
    (void)state;
    transfer(16, TRANSFERS / 50);
    transfer(2048, TRANSFERS);
}

static void refusals(void **state)
{
    volatile size_t impossible_bytes = (size_t)1 << 40; /* not for the compiler to warn about */
    struct kvf_ring ring;

    (void)state;
    assert_int_equal(kvf_ring_init(&ring, 0, 8), KVF_ERR_INVALID);
    assert_int_equal(kvf_ring_init(&ring, 8, 0), KVF_ERR_INVALID);
    assert_int_equal(kvf_ring_init(&ring, 8, (1u << 30) + 1), KVF_ERR_INVALID);
    assert_int_equal(kvf_ring_init(&ring, impossible_bytes, 1u << 30), KVF_ERR_NO_MEMORY);
    kvf_ring_fini(&ring);
}

static void owners_do_not_share_lines(void **state)
{
    (void)state;
    assert_true(offsetof(struct kvf_ring, head) - offsetof(struct kvf_ring, tail) >=
                KVF_CACHE_LINE_BYTES);
    assert_int_equal(offsetof(struct kvf_ring, tail) % KVF_CACHE_LINE_BYTES, 0);
    assert_int_equal(offsetof(struct kvf_ring, head) % KVF_CACHE_LINE_BYTES, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(full_and_empty),
        cmocka_unit_test(batches_wrap),
        cmocka_unit_test(two_threads_keep_order),
        cmocka_unit_test(refusals),
        cmocka_unit_test(owners_do_not_share_lines),
    };

    seed = kvf_test_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
