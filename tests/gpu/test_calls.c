/* SPDX-License-Identifier: Apache-2.0
 *
 * test_calls.c: kvf_gpu_* from end to end against a real daemon. What is stored equals what the C
 * codecs store, what comes back equals what they decode, and everything that can go wrong ends in
 * events.
 */
#include "tests/gpu/calls.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

static struct calls calls;
static uint64_t seed;

static const char *const profiles[] = {"raw", "exact", "safe", "balanced", "saw8"};

/* ----------------------------------------------------------------------------------------------
 * Round trips
 */
static void test_profiles_round_trip(void **state)
{
    (void)state;
    for (uint32_t p = 0; p < sizeof(profiles) / sizeof(profiles[0]); p++) {
        struct calls_chain chain;

        calls_open(&calls, profiles[p], seed + p);
        calls_chain_init(&chain, 5, 13); /* 13 tokens: two pages, the second not full */
        calls_chain_put_and_check(&calls, &chain);
        calls_chain_get_and_check(&calls, &chain);
        calls_close(&calls);
    }
}

/* A value that no codec takes, here and there: escapes in the raw area. */
static void test_escapes_round_trip(void **state)
{
    (void)state;
    for (uint32_t p = 1; p < sizeof(profiles) / sizeof(profiles[0]); p++) {
        struct calls_chain chain;
        uint16_t *values;

        calls_open(&calls, profiles[p], seed + p);
        values = (uint16_t *)calls.pages.host;
        for (size_t i = 1001; i < calls.pages.bytes / 2; i += 9973) {
            values[i] = 0x7f80; /* infinity */
        }
        calls_write(calls.pages.address, calls.pages.host, calls.pages.bytes);
        calls_chain_init(&chain, 4, 0);
        calls_chain_put_and_check(&calls, &chain);
        calls_chain_get_and_check(&calls, &chain);
        calls_close(&calls);
    }
}

/* Too many of them: the processor encodes the block, and its pages are free only then. */
static void test_blocks_that_kernels_leave_are_redone(void **state)
{
    struct calls_chain chain;
    uint16_t *values;

    (void)state;
    calls_open(&calls, "balanced", seed);
    values = (uint16_t *)calls.pages.host;
    for (size_t i = 0; i < calls.pages.bytes / 2; i += 300) {
        values[i] = 0x7fc0; /* NaN in most vectors */
    }
    calls_write(calls.pages.address, calls.pages.host, calls.pages.bytes);
    calls_chain_init(&chain, 4, 0);
    calls_chain_put_and_check(&calls, &chain);
    calls_chain_get_and_check(&calls, &chain);
    calls_close(&calls);
}

/* The same where only some blocks of a burst are left. */
static void test_some_blocks_of_a_burst_are_redone(void **state)
{
    (void)state;
    if (calls_fake.fake_cuda_redo_every == NULL) {
        skip();
    }
    calls_fake.fake_cuda_redo_every(3);
    for (uint32_t p = 1; p < sizeof(profiles) / sizeof(profiles[0]); p++) {
        struct calls_chain chain;

        calls_open(&calls, profiles[p], seed + p);
        calls_chain_init(&chain, 8, 0);
        calls_chain_put_and_check(&calls, &chain);
        calls_chain_get_and_check(&calls, &chain);
        calls_close(&calls);
    }
    calls_fake.fake_cuda_redo_every(0);
}

/* Hits straight out of the arena, and by way of a window. */
static void test_pinning_modes_round_trip(void **state)
{
    (void)state;
    for (uint32_t pinning = KVF_GPU_PIN_LAZY; pinning <= KVF_GPU_PIN_WINDOW; pinning++) {
        struct calls_chain chain;

        calls.options.pinning = pinning;
        calls_open(&calls, "balanced", seed + pinning);
        calls_chain_init(&chain, 6, 0);
        calls_chain_put_and_check(&calls, &chain);
        calls_chain_get_and_check(&calls, &chain);
        if (calls_fake.fake_cuda_counts != NULL) {
            struct fake_cuda_counts counts;

            calls_fake.fake_cuda_counts(&counts);
            assert_int_equal(counts.unpinned_copies, 0);
        }
        calls_close(&calls);
    }
}

/* A driver that pins nothing (a limit on locked memory) costs speed and one line. */
static void test_pins_that_are_refused(void **state)
{
    struct calls_chain chain;

    (void)state;
    if (calls_fake.fake_cuda_refuse_pins == NULL) {
        skip();
    }
    calls.options.pinning = KVF_GPU_PIN_LAZY;
    calls_open(&calls, "balanced", seed);
    calls_fake.fake_cuda_refuse_pins(true);
    calls.n_log_errors = 0;
    calls_chain_init(&chain, 4, 0);
    calls_chain_put_and_check(&calls, &chain);
    calls_chain_get_and_check(&calls, &chain);
    assert_int_equal(calls.n_log_errors, 1);
    calls_fake.fake_cuda_refuse_pins(false);
    calls_close(&calls);
}

/* An engine that has the first tokens of a chunk wants the others. */
static void test_first_tokens_are_left_alone(void **state)
{
    struct calls_chain chain;

    (void)state;
    calls_open(&calls, "balanced", seed);
    calls_chain_init(&chain, 2, 0);
    calls_chain_put_and_check(&calls, &chain);
    chain.gets[0].token_first = 2 * CALLS_PAGE_TOKENS;
    chain.gets[0].n_pages = CALLS_CHUNK_PAGES - 2;
    chain.gets[0].pages += 2;
    calls_chain_get_and_check(&calls, &chain);
    calls_close(&calls);
}

static void test_one_page_of_a_block(void **state)
{
    struct calls_outcome outcome = {0};
    struct calls_chain chain;
    struct kvf_hit hit;

    (void)state;
    calls_open(&calls, "balanced", seed);
    calls_chain_init(&chain, 1, 0);
    calls_chain_put_and_check(&calls, &chain);
    chain.gets[0].token_first = CALLS_PAGE_TOKENS;
    chain.gets[0].n_tokens = CALLS_PAGE_TOKENS;
    chain.gets[0].n_pages = 1;
    calls_fill(&calls);
    assert_int_equal(kvf_get(calls.client, &chain.gets[0].key, 1, NULL, &hit), KVF_OK);
    calls_decode(&calls, hit.record, hit.record_bytes, CALLS_PAGE_TOKENS, CALLS_PAGE_TOKENS,
                 chain.ids[0]);
    assert_int_equal(kvf_lease_release(calls.client, hit.lease), KVF_OK);
    calls_chain_get(&calls, &chain, &outcome);
    assert_int_equal(outcome.status, KVF_OK);
    calls_assert_pages_equal(&calls);
    calls_close(&calls);
}

/* Kernels on tensor cores want more shared memory than some devices have. */
static void test_a_device_with_little_shared_memory(void **state)
{
    (void)state;
    if (calls_fake.fake_cuda_shared_bytes == NULL) {
        skip();
    }
    calls_fake.fake_cuda_shared_bytes(4 << 10);
    for (uint32_t p = 0; p < sizeof(profiles) / sizeof(profiles[0]); p++) {
        struct calls_chain chain;

        calls_open(&calls, profiles[p], seed + p);
        calls_chain_init(&chain, 3, 13);
        calls_chain_put_and_check(&calls, &chain);
        calls_chain_get_and_check(&calls, &chain);
        calls_close(&calls);
    }
    calls_fake.fake_cuda_shared_bytes(227 << 10);
}

/* ----------------------------------------------------------------------------------------------
 * Statuses
 */
static void test_misses_and_mismatches(void **state)
{
    struct calls_outcome outcome = {0};
    struct calls_chain chain;

    (void)state;
    calls_open(&calls, "balanced", seed);
    calls_chain_init(&chain, 3, 20);
    calls_chain_put_and_check(&calls, &chain);
    chain.gets[2].n_tokens = 24; /* of 20 */
    calls_chain_rename(&chain, 1);
    calls_chain_get(&calls, &chain, &outcome);
    assert_int_equal(outcome.status, KVF_PARTIAL);
    assert_int_equal(outcome.blocks[0], KVF_OK);
    assert_int_equal(outcome.blocks[1], KVF_MISS);
    assert_true(outcome.blocks[2] == KVF_ERR_MISMATCH || outcome.blocks[2] == KVF_MISS);

    memset(&outcome, 0, sizeof(outcome));
    chain.gets[0] = chain.gets[2];
    chain.n = 1;
    calls_chain_get(&calls, &chain, &outcome);
    assert_int_equal(outcome.blocks[0], KVF_ERR_MISMATCH);
    assert_int_equal(outcome.status, KVF_ERR_MISMATCH);
    calls_close(&calls);
}

static void test_present_keys_exist(void **state)
{
    struct calls_outcome outcome = {0};
    struct calls_chain chain;

    (void)state;
    calls_open(&calls, "balanced", seed);
    calls_chain_init(&chain, 3, 0);
    calls_chain_put_and_check(&calls, &chain);
    calls_chain_put(&calls, &chain, &outcome);
    assert_int_equal(outcome.status, KVF_OK);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(outcome.blocks[i], KVF_EXISTS);
    }
    calls_close(&calls);
}

static int put_one(const struct kvf_gpu_put_item *item, struct kvf_gpu_region *region)
{
    uint64_t request;

    return kvf_gpu_put(calls.gpu, region, item, 1, NULL, NULL, NULL, 0, NULL, &request);
}

static void test_wrong_arguments_are_refused(void **state)
{
    struct kvf_gpu_region *region;
    struct kvf_gpu_put_item put;
    struct kvf_gpu_get_item get;
    struct calls_chain chain;
    uint64_t request;

    (void)state;
    calls_open(&calls, "balanced", seed);
    region = calls.pages.region;
    calls_chain_init(&chain, 2, 0);

    chain.ids[0][3] = CALLS_PAGES; /* out of range */
    assert_int_equal(put_one(&chain.puts[0], region), KVF_ERR_INVALID);
    chain.ids[0][3] = chain.ids[0][0]; /* twice in a block */
    assert_int_equal(put_one(&chain.puts[0], region), KVF_ERR_INVALID);
    assert_int_equal(kvf_gpu_get(calls.gpu, region, chain.gets, 1, NULL, NULL, NULL, 0, &request),
                     KVF_ERR_INVALID);
    chain.ids[0][3] = chain.ids[1][1]; /* in two blocks of a call */
    assert_int_equal(
        kvf_gpu_put(calls.gpu, region, chain.puts, 2, NULL, NULL, NULL, 0, NULL, &request),
        KVF_ERR_INVALID);
    assert_int_equal(kvf_gpu_get(calls.gpu, region, chain.gets, 2, NULL, NULL, NULL, 0, &request),
                     KVF_ERR_INVALID);
    calls_chain_ids(0, chain.ids[0]); /* and right again: nothing was kept */

    put = chain.puts[0];
    put.n_pages = CALLS_CHUNK_PAGES - 1;
    assert_int_equal(put_one(&put, region), KVF_ERR_INVALID);
    put = chain.puts[0];
    put.n_tokens = CALLS_CHUNK_TOKENS + 1;
    assert_int_equal(put_one(&put, region), KVF_ERR_INVALID);
    put = chain.puts[0];
    put.key.bytes = 15;
    assert_int_equal(put_one(&put, region), KVF_ERR_INVALID);
    put = chain.puts[0];
    put.struct_bytes = 0;
    assert_int_equal(put_one(&put, region), KVF_ERR_INVALID);
    assert_int_equal(put_one(&chain.puts[0], NULL), KVF_ERR_INVALID);
    get = chain.gets[0];
    get.token_first = CALLS_CHUNK_TOKENS;
    assert_int_equal(kvf_gpu_get(calls.gpu, region, &get, 1, NULL, NULL, NULL, 0, &request),
                     KVF_ERR_INVALID);
    calls_chain_put_and_check(&calls, &chain);
    calls_close(&calls);
}

/* ----------------------------------------------------------------------------------------------
 * Bounds
 */
static void test_a_full_ring_is_busy(void **state)
{
    struct calls_outcome outcomes[2] = {{0}};
    struct calls_chain chain;
    uint64_t requests[2];
    uint32_t taken = 0;

    (void)state;
    calls.options.burst_bytes = 1 << 17; /* two blocks */
    calls.options.ring_bytes = 200 << 10;
    calls_open(&calls, "raw", seed);
    calls_chain_init(&chain, 16, 0);
    assert_int_equal(kvf_gpu_put(calls.gpu, calls.pages.region, chain.puts, 16, NULL, NULL, NULL, 0,
                                 NULL, &requests[0]),
                     KVF_ERR_TOO_LARGE);
    assert_int_equal(kvf_gpu_put(calls.gpu, calls.pages.region, chain.puts, 16, NULL, NULL, NULL, 0,
                                 &taken, &requests[0]),
                     KVF_OK);
    assert_in_range(taken, 1, 15);
    assert_int_equal(kvf_gpu_put(calls.gpu, calls.pages.region, chain.puts + taken, 16 - taken,
                                 NULL, NULL, NULL, 0, NULL, &requests[1]),
                     KVF_ERR_BUSY);
    calls_wait(&calls, requests[0], &outcomes[0]);
    assert_int_equal(outcomes[0].status, KVF_OK);
    assert_int_equal(outcomes[0].n_good, taken);
    /* and on and on, until all of the chain is there */
    for (uint32_t at = taken; at < 16; at += taken) {
        struct kvf_put_options options = {
            .struct_bytes = sizeof(options), .parent = chain.puts[at - 1].key, .depth = at};

        assert_int_equal(kvf_gpu_put(calls.gpu, calls.pages.region, chain.puts + at, 16 - at,
                                     &options, NULL, NULL, 0, &taken, &requests[1]),
                         KVF_OK);
        memset(&outcomes[1], 0, sizeof(outcomes[1]));
        calls_wait(&calls, requests[1], &outcomes[1]);
        assert_int_equal(outcomes[1].status, KVF_OK);
    }
    calls_chain_get_and_check(&calls, &chain);
    calls_close(&calls);
}

/* A ring that no block ever fits is refused, and what is said to be enough is. */
static void test_a_ring_without_room_for_a_block(void **state)
{
    static const char said[] = "a block takes ";

    (void)state;
    for (size_t i = 0; i < sizeof(profiles) / sizeof(profiles[0]); i++) {
        struct kvf_gpu *gpu = NULL;
        struct calls_chain chain;
        uint64_t least;
        const char *at;

        calls_client_open(&calls, profiles[i], seed);
        calls.options.ring_bytes = 1;
        calls.n_log_errors = 0;
        assert_int_equal(kvf_gpu_open(calls.client, &calls.options, &gpu), KVF_ERR_INVALID);
        assert_null(gpu);
        assert_int_equal(calls.n_log_errors, 1);
        at = strstr(calls.log_text, said);
        assert_non_null(at);
        least = strtoull(at + strlen(said), NULL, 10);
        calls.options.ring_bytes = least - 1;
        assert_int_equal(kvf_gpu_open(calls.client, &calls.options, &gpu), KVF_ERR_INVALID);
        calls.client = kvf_close(calls.client);
        calls.options.ring_bytes = least;
        calls_open(&calls, profiles[i], seed);
        calls_chain_init(&chain, 1, 0);
        calls_chain_put_and_check(&calls, &chain);
        calls_chain_get_and_check(&calls, &chain);
        calls_close(&calls);
    }
}

static void test_full_staging_is_busy(void **state)
{
    struct calls_outcome outcome = {0};
    struct calls_chain chain;
    uint64_t request;
    uint32_t taken = 0;

    (void)state;
    calls.staging_bytes = 256 << 10;
    calls_open(&calls, "raw", seed);
    calls_chain_init(&chain, 16, 0);
    assert_int_equal(kvf_gpu_put(calls.gpu, calls.pages.region, chain.puts, 16, NULL, NULL, NULL, 0,
                                 &taken, &request),
                     KVF_OK);
    assert_in_range(taken, 1, 15);
    calls_wait(&calls, request, &outcome);
    assert_int_equal(outcome.status, KVF_OK);
    calls_close(&calls);
}

/* Windows of a few groups, and parts as large as a group. */
static void test_small_windows(void **state)
{
    (void)state;
    for (uint32_t p = 0; p < sizeof(profiles) / sizeof(profiles[0]); p++) {
        struct calls_chain chain;

        calls.options.load_window_bytes = 1;
        calls_open(&calls, profiles[p], seed + p);
        calls_chain_init(&chain, 12, 9);
        calls_chain_put_and_check(&calls, &chain);
        calls_chain_get_and_check(&calls, &chain);
        calls_close(&calls);
    }
}

/* ----------------------------------------------------------------------------------------------
 * Life
 */
static void test_sleep_gives_memory_back(void **state)
{
    struct fake_cuda_counts before = {0};
    struct fake_cuda_counts counts = {0};
    struct calls_outcome outcome = {0};
    struct calls_chain chain;
    uint64_t request;

    (void)state;
    if (calls_fake.fake_cuda_counts != NULL) {
        calls_fake.fake_cuda_counts(&before);
    }
    calls_open(&calls, "balanced", seed);
    calls_chain_init(&chain, 4, 0);
    assert_int_equal(kvf_gpu_put(calls.gpu, calls.pages.region, chain.puts, 4, NULL, NULL, NULL, 0,
                                 NULL, &request),
                     KVF_OK);
    assert_int_equal(kvf_gpu_sleep(calls.gpu), KVF_ERR_BUSY);
    assert_int_equal(kvf_gpu_unregister(calls.gpu, calls.pages.region), KVF_ERR_BUSY);
    calls_wait(&calls, request, &outcome);
    assert_int_equal(outcome.status, KVF_OK);
    assert_int_equal(kvf_gpu_sleep(calls.gpu), KVF_OK);
    assert_int_equal(kvf_gpu_sleep(calls.gpu), KVF_OK);
    if (calls_fake.fake_cuda_counts != NULL) {
        calls_fake.fake_cuda_counts(&counts);
        assert_int_equal(counts.device_bytes, before.device_bytes + calls.pages.bytes);
        assert_int_equal(counts.pinned_bytes, before.pinned_bytes + calls.pages.bytes);
    }
    assert_int_equal(put_one(&chain.puts[0], calls.pages.region), KVF_ERR_BUSY);
    assert_int_equal(kvf_gpu_wake(calls.gpu), KVF_OK);
    calls_chain_get_and_check(&calls, &chain);
    assert_int_equal(kvf_gpu_unregister(calls.gpu, calls.pages.region), KVF_OK);
    assert_int_equal(kvf_gpu_unregister(calls.gpu, calls.pages.region), KVF_ERR_INVALID);
    calls_close(&calls);
}

/* Copies in flight are waited for, and nothing is left behind. */
static void test_close_with_work_in_flight(void **state)
{
    struct fake_cuda_counts before = {0};
    struct fake_cuda_counts after = {0};

    (void)state;
    if (calls_fake.fake_cuda_counts != NULL) {
        calls_fake.fake_cuda_counts(&before);
    }
    for (uint32_t i = 0; i < 20; i++) {
        struct calls_chain chain;
        struct calls_chain more;
        uint64_t request;

        calls.options.pinning = i % 3;
        calls_open(&calls, i % 2 != 0 ? "exact" : "balanced", seed + i);
        calls_chain_init(&chain, 6, 0);
        calls_chain_put_and_check(&calls, &chain);
        calls_chain_init(&more, 6, 0);
        assert_int_equal(kvf_gpu_put(calls.gpu, calls.pages.region, more.puts, 6, NULL, NULL, NULL,
                                     0, NULL, &request),
                         KVF_OK);
        assert_int_equal(kvf_gpu_get(calls.gpu, calls.pages.region, chain.gets, 6, NULL, NULL, NULL,
                                     0, &request),
                         KVF_OK);
        for (uint32_t polls = 0; polls < i; polls++) {
            struct kvf_gpu_event event;
            uint32_t n;

            (void)kvf_gpu_poll(calls.gpu, &event, 1, 0, &n);
        }
        calls_close(&calls);
    }
    if (calls_fake.fake_cuda_counts != NULL) {
        calls_fake.fake_cuda_counts(&after);
        assert_int_equal(after.device_bytes, before.device_bytes);
        assert_int_equal(after.pinned_bytes, before.pinned_bytes);
        assert_int_equal(after.streams, before.streams);
        assert_int_equal(after.events, before.events);
    }
}

/* The daemon dies with puts and gets in flight: all of them end, the handle lives. */
static void test_the_daemon_dies(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 6; i++) {
        struct calls_outcome outcome = {0};
        struct calls_chain chain;
        struct calls_chain more;
        uint64_t request;
        uint64_t ns;

        calls.options.pinning = i % 3;
        calls_open(&calls, "balanced", seed + i);
        calls_chain_init(&chain, 8, 0);
        calls_chain_put_and_check(&calls, &chain);
        calls_chain_init(&more, 8, 0);
        if (i % 2 == 0) {
            assert_int_equal(kvf_gpu_get(calls.gpu, calls.pages.region, chain.gets, 8, NULL, NULL,
                                         NULL, 0, &request),
                             KVF_OK);
        } else {
            assert_int_equal(kvf_gpu_put(calls.gpu, calls.pages.region, more.puts, 8, NULL, NULL,
                                         NULL, 0, NULL, &request),
                             KVF_OK);
        }
        kvf_test_daemon_kill(&calls.daemon);
        calls_wait(&calls, request, &outcome);
        for (uint32_t b = 0; b < 8; b++) {
            assert_true(outcome.blocks[b] == KVF_ERR_DISCONNECTED ||
                        outcome.blocks[b] == KVF_ERR_LOST || outcome.blocks[b] == KVF_OK);
        }
        assert_true(i % 2 == 0 || outcome.pages_free);
        kvf_test_daemon_start(&calls.daemon);
        assert_int_equal(kvf_ping(calls.client, 10000, &ns), KVF_OK);
        calls_chain_init(&more, 4, 0);
        calls_fill(&calls);
        calls_chain_put_and_check(&calls, &more);
        calls_chain_get_and_check(&calls, &more);
        calls_close(&calls);
    }
}

/* A lease that ends while its bytes are on their way: a failed load. */
static void test_a_lost_lease_is_a_failed_load(void **state)
{
    static const char *const sets[] = {"lease.max_age=1s", NULL};
    const struct timespec pause = {.tv_sec = 2, .tv_nsec = 500000000};
    struct calls_outcome outcome = {0};
    struct kvf_stat stat = {.struct_bytes = sizeof(stat)};
    struct calls old = {.daemon = calls.daemon};
    struct kvf_gpu_event event;
    struct calls_chain chain;
    uint64_t request;
    uint32_t n;

    (void)state;
    if (calls_fake.fake_cuda_hold == NULL) {
        skip(); /* a GPU does not wait for the test */
    }
    calls_daemon_start(&calls, sets);
    calls.options.pinning = KVF_GPU_PIN_LAZY;
    calls_open(&calls, "balanced", seed);
    calls_chain_init(&chain, 3, 0);
    calls_chain_put_and_check(&calls, &chain);
    calls_fake.fake_cuda_hold(true);
    assert_int_equal(
        kvf_gpu_get(calls.gpu, calls.pages.region, chain.gets, 3, NULL, NULL, NULL, 0, &request),
        KVF_OK);
    /* the copies are queued once all blocks are leased, and do not run */
    while (stat.leased_bytes < 3 * KVF_RECORD_PAGE_BYTES) {
        assert_int_equal(kvf_stat(calls.client, &stat), KVF_OK);
    }
    assert_int_equal(kvf_gpu_poll(calls.gpu, &event, 1, 0, &n), KVF_EMPTY);
    (void)nanosleep(&pause, NULL);
    calls_fake.fake_cuda_hold(false);
    calls_wait(&calls, request, &outcome);
    for (uint32_t b = 0; b < 3; b++) {
        assert_true(outcome.blocks[b] == KVF_ERR_LOST || outcome.blocks[b] == KVF_ERR_DISCONNECTED);
    }
    calls_close(&calls);
    calls_daemon_stop(&calls);
    calls.daemon = old.daemon;
}

/* A kernel that faults ends every request, and every later call. */
static void test_the_gpu_fails(void **state)
{
    (void)state;
    if (calls_fake.fake_cuda_fail_after == NULL) {
        skip();
    }
    for (uint32_t i = 0; i < 40; i += 3) {
        struct calls_outcome outcome = {0};
        struct calls_chain chain;
        struct calls_chain more;
        uint64_t request;
        int status;

        calls.options.pinning = i % 3;
        calls_open(&calls, "balanced", seed + i);
        calls_chain_init(&chain, 4, 0);
        calls_chain_put_and_check(&calls, &chain);
        calls_chain_init(&more, 4, 0);
        calls_fake.fake_cuda_fail_after(i);
        if (i % 2 == 0) {
            status = kvf_gpu_put(calls.gpu, calls.pages.region, more.puts, 4, NULL, NULL, NULL, 0,
                                 NULL, &request);
        } else {
            status = kvf_gpu_get(calls.gpu, calls.pages.region, chain.gets, 4, NULL, NULL, NULL, 0,
                                 &request);
        }
        assert_true(status == KVF_OK || status == KVF_ERR_IO);
        if (status == KVF_OK) {
            calls_wait(&calls, request, &outcome);
            assert_true(outcome.status == KVF_OK || outcome.status == KVF_ERR_IO ||
                        outcome.status == KVF_PARTIAL);
        }
        while (kvf_gpu_sleep(calls.gpu) != KVF_OK) {
        }
        calls_fake.fake_cuda_fail_after(UINT64_MAX >> 1);
        calls_close(&calls);
    }
}

/* Kernels for other codecs than the rest of the tests have: nothing is left to the processor. */
static void test_other_codecs(void **state)
{
    static const char *const others[] = {"saw3-search", "saw4-search9", "kivi4-g32", "kivi2-g128",
                                         "tq4",         "tq2.5",        "dense",     "max"};
    struct calls_chain chain;

    (void)state;
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        calls.n_log_errors = 0;
        calls_open(&calls, others[i], seed + i);
        assert_int_equal(calls.n_log_errors, 0);
        calls_chain_init(&chain, 3, 0);
        calls_chain_put_and_check(&calls, &chain);
        calls_chain_get_and_check(&calls, &chain);
        calls_close(&calls);
    }
}

static void test_without_a_driver(void **state)
{
    const char *driver = getenv("KVFERRY_CUDA_DRIVER");
    char *kept = driver != NULL ? strdup(driver) : NULL;
    struct kvf_gpu *gpu = NULL;
    struct kvf_gpu_event event;
    uint64_t request;
    uint32_t n;

    (void)state;
    calls_open(&calls, "balanced", seed);
    assert_int_equal(setenv("KVFERRY_CUDA_DRIVER", "/nonexistent/libcuda.so", 1), 0);
    calls.n_log_errors = 0;
    assert_int_equal(kvf_gpu_open(calls.client, &calls.options, &gpu), KVF_ERR_UNSUPPORTED);
    assert_null(gpu);
    assert_int_equal(calls.n_log_errors, 1);
    assert_non_null(strstr(calls.log_text, "no CUDA driver"));
    assert_int_equal(kvf_gpu_poll(NULL, &event, 1, 0, &n), KVF_ERR_UNSUPPORTED);
    assert_int_equal(kvf_gpu_put(NULL, NULL, NULL, 0, NULL, NULL, NULL, 0, NULL, &request),
                     KVF_ERR_UNSUPPORTED);
    assert_int_equal(kvf_gpu_get(NULL, NULL, NULL, 0, NULL, NULL, NULL, 0, &request),
                     KVF_ERR_UNSUPPORTED);
    assert_int_equal(kvf_gpu_register(NULL, NULL, NULL), KVF_ERR_UNSUPPORTED);
    assert_int_equal(kvf_gpu_unregister(NULL, NULL), KVF_ERR_UNSUPPORTED);
    assert_int_equal(kvf_gpu_sleep(NULL), KVF_ERR_UNSUPPORTED);
    assert_int_equal(kvf_gpu_wake(NULL), KVF_ERR_UNSUPPORTED);
    assert_null(kvf_gpu_close(NULL));
    if (kept != NULL) {
        assert_int_equal(setenv("KVFERRY_CUDA_DRIVER", kept, 1), 0);
    } else {
        assert_int_equal(unsetenv("KVFERRY_CUDA_DRIVER"), 0);
    }
    free(kept);
    calls.options.device_uuid = "GPU-00000000-0000-0000-0000-000000000000";
    calls.n_log_errors = 0;
    assert_int_equal(kvf_gpu_open(calls.client, &calls.options, &gpu), KVF_ERR_UNSUPPORTED);
    assert_int_equal(calls.n_log_errors, 1);
    calls.options.device_uuid = calls_device->uuid;
    assert_int_equal(kvf_gpu_open(calls.client, &calls.options, &gpu), KVF_OK);
    assert_null(kvf_gpu_close(gpu));
    calls_close(&calls);
}

/* What stands in the way of streams under MPS is said where the cure can be had. */
static void test_mps_is_warned_of(void **state)
{
    static const struct {
        bool is_mps;
        const char *connections;
        uint32_t n_warnings;
    } cases[] = {{false, NULL, 0}, {true, "32", 0}, {true, NULL, 1}};

    (void)state;
    if (calls_fake.fake_cuda_seed == NULL) {
        return;
    }
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        (void)(cases[i].is_mps ? setenv("FAKE_CUDA_MPS", "1", 1) : unsetenv("FAKE_CUDA_MPS"));
        (void)(cases[i].connections != NULL
                   ? setenv("CUDA_DEVICE_MAX_CONNECTIONS", cases[i].connections, 1)
                   : unsetenv("CUDA_DEVICE_MAX_CONNECTIONS"));
        calls.n_log_errors = 0;
        calls_open(&calls, "balanced", seed);
        assert_int_equal(calls.n_log_errors, cases[i].n_warnings);
        calls_close(&calls);
    }
    assert_non_null(strstr(calls.log_text, "CUDA_DEVICE_MAX_CONNECTIONS"));
    (void)unsetenv("FAKE_CUDA_MPS");
}

/* ----------------------------------------------------------------------------------------------
 * Time
 */
static uint64_t gpu_ns(const struct calls *c)
{
    return kvf_test_daemon_number(&c->daemon, "metrics.engine_gpu_ns");
}

static bool has_counted(void *arg)
{
    uint64_t *wanted_ns = arg;
    struct kvf_gpu_event event;
    uint32_t n;

    (void)kvf_gpu_poll(calls.gpu, &event, 1, 0, &n); /* what is kept is sent in here */
    return gpu_ns(&calls) == *wanted_ns;
}

/* Some blocks there and back; how often somebody has waited for the device. */
static uint64_t put_and_get(struct fake_cuda_counts *counts_out)
{
    struct fake_cuda_counts before = {0};

    if (calls_fake.fake_cuda_counts != NULL) {
        calls_fake.fake_cuda_counts(&before);
    }
    for (uint32_t n = 3; n <= 5; n++) {
        struct calls_chain chain;

        calls_chain_init(&chain, n, 0);
        calls_chain_put_and_check(&calls, &chain);
        calls_chain_get_and_check(&calls, &chain);
    }
    *counts_out = before;
    if (calls_fake.fake_cuda_counts != NULL) {
        calls_fake.fake_cuda_counts(counts_out);
    }
    return counts_out->synchronizes - before.synchronizes;
}

/* What kernels take is told to the daemon, and nobody waits for that who would not wait without. */
static void test_time_of_kernels_is_reported(void **state)
{
    struct fake_cuda_counts before = {0};
    struct fake_cuda_counts after = {0};
    uint64_t before_ns = gpu_ns(&calls);
    uint64_t decode_ns = kvf_test_daemon_number(&calls.daemon, "metrics.engine_gpu_decode_ns");
    uint64_t begin_ns, ns, waits;

    (void)state;
    calls.options.flags = KVF_GPU_NO_TIMES;
    calls_open(&calls, "balanced", seed);
    waits = put_and_get(&before);
    calls_close(&calls);
    assert_int_equal(gpu_ns(&calls), before_ns);
    calls_open(&calls, "balanced", seed); /* options are those of a new handle again */
    begin_ns = kvf_now_ns();
    assert_int_equal(put_and_get(&after), waits);
    if (calls_fake.fake_cuda_counts != NULL) {
        uint64_t wanted_ns = before_ns + (after.times_ms - before.times_ms) * 1000000;

        assert_true(after.times - before.times >= 6); /* a burst and a group of each chain */
        assert_true(after.times_ms - before.times_ms >= after.times - before.times);
        if (!kvf_test_wait_until(has_counted, &wanted_ns, 60000)) {
            fail_msg("%llu ns are counted, not %llu", (unsigned long long)gpu_ns(&calls),
                     (unsigned long long)wanted_ns);
        }
    }
    ns = gpu_ns(&calls) - before_ns;
    decode_ns = kvf_test_daemon_number(&calls.daemon, "metrics.engine_gpu_decode_ns") - decode_ns;
    assert_true(decode_ns > 0 && decode_ns < ns);
    if (calls_fake.fake_cuda_counts == NULL) {
        printf("kernels of 12 blocks: encode %.1f us, decode %.1f us\n",
               (double)(ns - decode_ns) / 1e3, (double)decode_ns / 1e3);
        assert_true(ns > 0 && ns < kvf_now_ns() - begin_ns);
    }
    calls_close(&calls);
}

/* With a driver that cannot measure it blocks are the same, and the log says so once. */
static void test_time_is_not_needed(void **state)
{
    struct fake_cuda_counts before = {0};
    struct fake_cuda_counts after = {0};
    uint64_t before_ns = gpu_ns(&calls);

    (void)state;
    if (calls_fake.fake_cuda_refuse_times == NULL) {
        skip();
    }
    calls_fake.fake_cuda_counts(&before);
    calls_fake.fake_cuda_refuse_times(true);
    calls.n_log_errors = 0;
    calls_open(&calls, "balanced", seed);
    assert_int_equal(calls.n_log_errors, 1);
    assert_non_null(strstr(calls.log_text, "time of the GPU is not measured"));
    (void)put_and_get(&after);
    assert_int_equal(after.times, before.times);
    assert_int_equal(calls.n_log_errors, 1);
    calls_close(&calls);
    calls_fake.fake_cuda_refuse_times(false);
    assert_int_equal(gpu_ns(&calls), before_ns);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_profiles_round_trip),
        cmocka_unit_test(test_escapes_round_trip),
        cmocka_unit_test(test_blocks_that_kernels_leave_are_redone),
        cmocka_unit_test(test_some_blocks_of_a_burst_are_redone),
        cmocka_unit_test(test_pinning_modes_round_trip),
        cmocka_unit_test(test_pins_that_are_refused),
        cmocka_unit_test(test_first_tokens_are_left_alone),
        cmocka_unit_test(test_one_page_of_a_block),
        cmocka_unit_test(test_a_device_with_little_shared_memory),
        cmocka_unit_test(test_misses_and_mismatches),
        cmocka_unit_test(test_present_keys_exist),
        cmocka_unit_test(test_wrong_arguments_are_refused),
        cmocka_unit_test(test_a_full_ring_is_busy),
        cmocka_unit_test(test_a_ring_without_room_for_a_block),
        cmocka_unit_test(test_full_staging_is_busy),
        cmocka_unit_test(test_small_windows),
        cmocka_unit_test(test_sleep_gives_memory_back),
        cmocka_unit_test(test_close_with_work_in_flight),
        cmocka_unit_test(test_the_daemon_dies),
        cmocka_unit_test(test_a_lost_lease_is_a_failed_load),
        cmocka_unit_test(test_other_codecs),
        cmocka_unit_test(test_mps_is_warned_of),
        cmocka_unit_test(test_time_of_kernels_is_reported),
        cmocka_unit_test(test_time_is_not_needed),
        cmocka_unit_test(test_without_a_driver),
        cmocka_unit_test(test_the_gpu_fails),
    };

    if (!calls_begin(&seed)) {
        return 77;
    }
    return calls_run(&calls, tests);
}
