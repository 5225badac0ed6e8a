/* SPDX-License-Identifier: Apache-2.0
 *
 * test_requests_async.c: submit, poll and cancel against a real daemon whose drive is slow on
 * purpose: order of completions, credits, budgets, and blocks on their way from the drive.
 *
 * Blocks get to the drive by durable puts and out of memory by a restart of the daemon. What must
 * happen before the drive has answered is tested with a drive that never does, so that a busy
 * machine cannot be too late for it.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "tests/conformance/outcome.h"
#include "tests/support/blocks.h"
#include "tests/support/daemon.h"

#define BLOCK_BYTES 20000
#define N_STORED    64 /* blocks 0 .. are on the drive at the start of each test, and only there */
#define PATIENT_MS  60000
#define NEVER_MS    3600000

static struct kvf_test_daemon the_daemon;
static struct kvf_client *the_client;
static struct kvf_hit the_hits[8][KVF_REQUEST_KEYS_MAX];

static void keys_of(uint64_t first, uint32_t n, struct kvf_test_key *bytes_out,
                    struct kvf_key *keys_out)
{
    for (uint32_t i = 0; i < n; i++) {
        keys_out[i] = kvf_test_key(first + i, &bytes_out[i]);
    }
}

static uint64_t leased_bytes(void)
{
    struct kvf_stat stat = {.struct_bytes = sizeof(stat)};

    assert_int_equal(kvf_stat(the_client, &stat), KVF_OK);
    return stat.leased_bytes;
}

static void outcome_init(struct outcome *outcome, uint32_t number, uint32_t n_blocks)
{
    memset(outcome, 0, sizeof(*outcome));
    outcome->n_blocks = n_blocks;
    outcome->hits = the_hits[number];
}

static void submit_get(struct outcome *outcome, uint32_t number, uint64_t first, uint32_t n)
{
    struct kvf_test_key bytes[KVF_TEST_KEY_BYTES * 4];
    struct kvf_key keys[KVF_TEST_KEY_BYTES * 4];
    struct kvf_get_options options = {.struct_bytes = sizeof(options), .budget_ms = NEVER_MS};

    assert_true(n <= sizeof(keys) / sizeof(keys[0]));
    keys_of(first, n, bytes, keys);
    outcome_init(outcome, number, n);
    assert_int_equal(kvf_submit_get(the_client, keys, n, &options, number, &outcome->request),
                     KVF_OK);
    assert_true(outcome->request != 0);
}

static void check_hits(struct outcome *outcome, uint64_t first)
{
    for (uint32_t i = 0; i < outcome->n_blocks; i++) {
        assert_int_equal(kvf_test_hit_check(the_client, &outcome->hits[i], first + i, BLOCK_BYTES),
                         KVF_OK);
    }
}

static void test_several_in_flight(void **state)
{
    struct outcome outcomes[4];

    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        submit_get(&outcomes[i], i, (uint64_t)i * 8, 8);
    }
    outcomes_wait(the_client, outcomes, 4);
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(outcomes[i].status, KVF_OK);
        assert_int_equal(outcomes[i].succeeded, 8);
        assert_int_equal(outcomes[i].hits[0].tier, KVF_TIER_NVME);
        check_hits(&outcomes[i], (uint64_t)i * 8);
    }
    assert_int_equal(leased_bytes(), 0);
}

/* Two gets of one block join one read. */
static void test_gets_join(void **state)
{
    uint64_t loads = kvf_test_daemon_number(&the_daemon, "nvme.0.loads");
    struct outcome outcomes[3];

    (void)state;
    for (uint32_t i = 0; i < 3; i++) {
        submit_get(&outcomes[i], i, 5, 1);
    }
    outcomes_wait(the_client, outcomes, 3);
    for (uint32_t i = 0; i < 3; i++) {
        check_hits(&outcomes[i], 5);
    }
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "nvme.0.loads"), loads + 1);
}

static void assert_no_event(void)
{
    struct kvf_event event;
    uint32_t n;

    assert_int_equal(kvf_poll(the_client, &event, 1, 0, &n), KVF_EMPTY);
}

static void cancel_and_wait(struct outcome *outcome)
{
    assert_int_equal(kvf_cancel(the_client, outcome->request), KVF_OK);
    outcomes_wait(the_client, outcome, 1);
    assert_int_equal(outcome->status, KVF_ERR_CANCELED);
}

/* Blocking calls go on while something else is in flight ... */
static void test_blocking_between(void **state)
{
    struct outcome outcome;
    uint64_t round_trip_ns;

    (void)state;
    submit_get(&outcome, 0, 0, 4);
    assert_int_equal(kvf_ping(the_client, PATIENT_MS, &round_trip_ns), KVF_OK);
    assert_int_equal(kvf_test_block_put(the_client, 1000, BLOCK_BYTES, 0), KVF_OK);
    assert_int_equal(kvf_test_block_get(the_client, 1000, BLOCK_BYTES, NULL), KVF_OK);
    assert_no_event();
    cancel_and_wait(&outcome);
}

/* ... and do not eat its events. */
static void test_blocking_for_the_same(void **state)
{
    struct outcome outcome;

    (void)state;
    submit_get(&outcome, 0, 0, 4);
    assert_int_equal(kvf_test_block_get(the_client, 1, BLOCK_BYTES, NULL), KVF_OK);
    outcomes_wait(the_client, &outcome, 1);
    check_hits(&outcome, 0);
}

static void test_put_async(void **state)
{
    enum {
        N = 16
    };
    static uint8_t payloads[N][BLOCK_BYTES];
    struct kvf_put_item items[N];
    struct kvf_test_key keys[N];
    struct outcome outcomes[2];

    (void)state;
    for (uint32_t i = 0; i < N; i++) {
        kvf_test_payload_fill(2000 + i, payloads[i], BLOCK_BYTES);
        items[i] = (struct kvf_put_item){.struct_bytes = sizeof(items[i]),
                                         .source = KVF_SOURCE_BYTES,
                                         .key = kvf_test_key(2000 + i, &keys[i]),
                                         .data = payloads[i],
                                         .data_bytes = BLOCK_BYTES};
    }
    outcome_init(&outcomes[0], 0, N);
    outcome_init(&outcomes[1], 1, N);
    assert_int_equal(kvf_submit_put(the_client, items, N, NULL, 0, &outcomes[0].request), KVF_OK);
    memset(payloads, 0, sizeof(payloads)); /* they were copied */
    outcomes_wait(the_client, &outcomes[0], 1);
    assert_int_equal(outcomes[0].status, KVF_OK);
    assert_int_equal(outcomes[0].succeeded, N);
    for (uint32_t i = 0; i < N; i++) {
        kvf_test_payload_fill(2000 + i, payloads[i], BLOCK_BYTES);
    }
    outcomes[0].is_over = true;
    assert_int_equal(kvf_submit_put(the_client, items, N, NULL, 1, &outcomes[1].request), KVF_OK);
    outcomes_wait(the_client, outcomes, 2);
    assert_int_equal(outcomes[1].status, KVF_OK);
    assert_int_equal(outcomes[1].hits[3].status, KVF_EXISTS);
    for (uint32_t i = 0; i < N; i++) {
        assert_int_equal(kvf_test_block_get(the_client, 2000 + i, BLOCK_BYTES, NULL), KVF_OK);
    }
}

static void test_cancel_get(void **state)
{
    struct outcome outcomes[2];
    uint64_t canceled = kvf_test_daemon_number(&the_daemon, "metrics.requests_canceled");

    (void)state;
    submit_get(&outcomes[0], 0, 0, 32);
    submit_get(&outcomes[1], 1, 16, 4); /* of blocks that the first one waits for, too */
    cancel_and_wait(&outcomes[0]);
    assert_int_equal(outcomes[0].hits[0].status, KVF_ERR_CANCELED);
    assert_int_equal(kvf_cancel(the_client, outcomes[0].request), KVF_ERR_INVALID);
    assert_no_event(); /* the other one goes on */
    assert_int_equal(leased_bytes(), 0);
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.requests_canceled"),
                     canceled + 1);
}

/* What was canceled is still got by others, and can be got again. */
static void test_cancel_one_of_two(void **state)
{
    struct outcome outcomes[2];

    (void)state;
    submit_get(&outcomes[0], 0, 0, 32);
    submit_get(&outcomes[1], 1, 16, 4);
    assert_int_equal(kvf_cancel(the_client, outcomes[0].request), KVF_OK);
    outcomes_wait(the_client, outcomes, 2);
    assert_int_equal(outcomes[1].status, KVF_OK);
    check_hits(&outcomes[1], 16);
    outcome_release(the_client, &outcomes[0]); /* a slow machine may have been too late */
    assert_int_equal(leased_bytes(), 0);
    assert_int_equal(kvf_test_block_get(the_client, 3, BLOCK_BYTES, NULL), KVF_OK);
}

/* A cancel that comes at any moment: before, in the middle of, or after the request's work. */
static void test_cancel_any_time(void **state)
{
    uint32_t rounds = kvf_test_scaled(200);

    (void)state;
    for (uint32_t round = 0; round < rounds; round++) {
        const struct timespec pause = {.tv_nsec = (long)(round % 20) * 5000};
        struct outcome outcome;
        uint32_t ok = 0;
        int status;

        assert_int_equal(kvf_test_block_put(the_client, 3000, BLOCK_BYTES, 0),
                         round == 0 ? KVF_OK : KVF_EXISTS);
        submit_get(&outcome, 0, 2999, 100); /* most of them are not here */
        nanosleep(&pause, NULL);
        status = kvf_cancel(the_client, outcome.request);
        assert_true(status == KVF_OK || status == KVF_ERR_INVALID);
        outcomes_wait(the_client, &outcome, 1);
        for (uint32_t i = 0; i < outcome.n_blocks; i++) {
            int got = outcome.hits[i].status;

            assert_true(got == KVF_MISS || got == KVF_ERR_CANCELED || (got == KVF_OK && i == 1));
            ok += got == KVF_OK;
        }
        assert_int_equal(outcome.succeeded, ok);
        outcome_release(the_client, &outcome);
    }
    assert_int_equal(leased_bytes(), 0);
}

static void test_cancel_durable_put(void **state)
{
    static uint8_t payload[BLOCK_BYTES];
    struct kvf_put_options options = {.struct_bytes = sizeof(options), .flags = KVF_PUT_DURABLE};
    struct kvf_test_key key;
    struct kvf_put_item item = {.struct_bytes = sizeof(item),
                                .source = KVF_SOURCE_BYTES,
                                .key = kvf_test_key(4000, &key),
                                .data = payload,
                                .data_bytes = BLOCK_BYTES};
    struct outcome outcome;

    (void)state;
    kvf_test_payload_fill(4000, payload, BLOCK_BYTES);
    outcome_init(&outcome, 0, 1);
    assert_int_equal(kvf_submit_put(the_client, &item, 1, &options, 0, &outcome.request), KVF_OK);
    cancel_and_wait(&outcome);
    /* READY or not, never wrong */
    assert_true(kvf_test_block_get(the_client, 4000, BLOCK_BYTES, NULL) != KVF_ERR_INTERNAL);
}

/* Credits: what is in flight or not polled yet counts; then the library says busy by itself. */
static void test_credits(void **state)
{
    struct kvf_info info = {.struct_bytes = sizeof(info)};
    struct outcome outcomes[8];
    struct kvf_test_key bytes[100];
    struct kvf_key keys[100];
    struct kvf_client *small;
    struct kvf_options options;
    uint64_t request;
    uint32_t n = 0;
    int status;

    (void)state;
    kvf_test_client_options(&the_daemon, &options);
    options.ring_entries = 64;
    options.staging_bytes = 1 << 20;
    assert_int_equal(kvf_open(&options, &small), KVF_OK);
    assert_int_equal(kvf_client_info(small, &info), KVF_OK);
    assert_true(info.credits >= 64 && info.credits <= 300);
    keys_of(5000, 20, bytes, keys);
    do {
        outcome_init(&outcomes[n], n, 20);
        status = kvf_submit_get(small, keys, 20, NULL, n, &outcomes[n].request);
        n += status == KVF_OK;
    } while (status == KVF_OK && n < 8);
    assert_int_equal(status, KVF_ERR_BUSY);
    assert_int_equal(n, info.credits / 21);
    outcomes_wait(small, outcomes, n);
    outcome_init(&outcomes[0], 0, 20);
    assert_int_equal(kvf_submit_get(small, keys, 20, NULL, 0, &outcomes[0].request), KVF_OK);
    outcomes_wait(small, outcomes, 1);
    /* more than there ever are */
    keys_of(5000, 100, bytes, keys);
    if (info.credits < 101) {
        assert_int_equal(kvf_submit_get(small, keys, 100, NULL, 0, &request), KVF_ERR_TOO_LARGE);
    }
    kvf_close(small);
}

/* kvf_fd tells when to poll. */
static void test_fd(void **state)
{
    struct outcome outcome;
    struct pollfd fd = {.fd = kvf_fd(the_client), .events = POLLIN};
    struct kvf_event event;
    uint32_t n;

    (void)state;
    while (kvf_poll(the_client, &event, 1, 0, &n) != KVF_EMPTY) {
    }
    assert_int_equal(poll(&fd, 1, 0), 0);
    submit_get(&outcome, 0, 0, 1);
    assert_no_event();
    assert_int_equal(kvf_cancel(the_client, outcome.request), KVF_OK);
    assert_int_equal(poll(&fd, 1, PATIENT_MS), 1);
    outcomes_wait(the_client, &outcome, 1);
}

/* The daemon has seen no read yet and hopes; the budget ends it. */
static void test_get_budget_ends(void **state)
{
    struct kvf_get_options options = {.struct_bytes = sizeof(options), .budget_ms = 20};
    struct kvf_test_key bytes;
    struct kvf_key key = kvf_test_key(40, &bytes);
    struct kvf_hit hit;
    uint64_t start_ns = kvf_now_ns();

    (void)state;
    assert_int_equal(kvf_get(the_client, &key, 1, &options, &hit), KVF_MISS);
    assert_int_equal(hit.status, KVF_MISS);
    assert_true(kvf_now_ns() - start_ns >= 15 * KVF_NS_PER_MS);
}

/* After reads that were seen to be slow it says so at once. */
static void test_get_too_slow(void **state)
{
    enum {
        TRIES = 20
    };
    struct kvf_get_options options = {.struct_bytes = sizeof(options), .budget_ms = 20};
    struct kvf_hit hit = {.status = KVF_MISS};
    struct kvf_test_key bytes;
    uint32_t tries = 0;
    struct kvf_key key;

    (void)state;
    /* a second without a read makes it hope again: a slow machine takes several tries */
    while (hit.status != KVF_TOO_SLOW) {
        struct outcome outcome;

        assert_true(tries < TRIES);
        submit_get(&outcome, 0, tries, 1);
        outcomes_wait(the_client, &outcome, 1);
        check_hits(&outcome, tries);
        key = kvf_test_key(TRIES + tries, &bytes);
        assert_int_equal(kvf_get(the_client, &key, 1, &options, &hit), KVF_MISS);
        assert_true(hit.status == KVF_TOO_SLOW || hit.status == KVF_MISS);
        tries++;
    }
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.get_too_slow"), 1);
    options.budget_ms = PATIENT_MS;
    assert_int_equal(kvf_get(the_client, &key, 1, &options, &hit), KVF_OK);
    assert_int_equal(kvf_test_hit_check(the_client, &hit, TRIES + tries - 1, BLOCK_BYTES), KVF_OK);
}

static void test_lookup_on_drive(void **state)
{
    enum {
        N = 8
    };
    struct kvf_test_key bytes[N];
    struct kvf_key keys[N];
    struct kvf_lookup_options options = {.struct_bytes = sizeof(options),
                                         .flags = KVF_LOOKUP_LEASE};
    struct kvf_lookup_result result;
    uint32_t n;

    (void)state;
    keys_of(0, N, bytes, keys);
    /* without a budget or a prefetch: only counted */
    assert_int_equal(kvf_lookup(the_client, keys, N, &options, &result), KVF_OK);
    assert_int_equal(result.run_chunks, N);
    assert_int_equal(result.ready_chunks, 0);
    assert_int_equal(result.coming_chunks, 0);
    assert_int_equal(result.lease, 0);
    /* a prefetch, then nothing of it is here yet */
    options.flags |= KVF_LOOKUP_PREFETCH;
    assert_int_equal(kvf_lookup(the_client, keys, 4, &options, &result), KVF_COMING);
    assert_int_equal(result.run_chunks, 4);
    assert_int_equal(result.ready_chunks, 0);
    assert_int_equal(result.coming_chunks, 4);
    assert_int_equal(result.lease, 0);
    /* with a budget that is enough it waits, and for what was on its way already, too */
    options.budget_ms = PATIENT_MS;
    assert_int_equal(kvf_lookup(the_client, keys, N, &options, &result), KVF_OK);
    assert_int_equal(result.run_chunks, N);
    assert_int_equal(result.ready_chunks, N);
    assert_true(leased_bytes() >= (uint64_t)N * BLOCK_BYTES);
    assert_int_equal(kvf_lease_release(the_client, result.lease), KVF_OK);
    keys_of(30, N, bytes, keys);
    assert_int_equal(kvf_prefetch(the_client, keys, N, &n), KVF_OK);
    assert_int_equal(n, N);
    options.budget_ms = PATIENT_MS;
    assert_int_equal(kvf_lookup(the_client, keys, N, &options, &result), KVF_OK);
    assert_int_equal(result.ready_chunks, N);
    assert_int_equal(kvf_lease_release(the_client, result.lease), KVF_OK);
    assert_int_equal(leased_bytes(), 0);
}

/* A budget that is too short ends the wait, not what is coming. */
static void test_lookup_budget_ends(void **state)
{
    enum {
        N = 8
    };
    struct kvf_test_key bytes[N];
    struct kvf_key keys[N];
    struct kvf_lookup_options options = {.struct_bytes = sizeof(options),
                                         .flags = KVF_LOOKUP_LEASE | KVF_LOOKUP_PREFETCH,
                                         .budget_ms = 20};
    struct kvf_lookup_result result;

    (void)state;
    keys_of(20, N, bytes, keys);
    assert_int_equal(kvf_lookup(the_client, keys, N, &options, &result), KVF_COMING);
    assert_int_equal(result.run_chunks, N);
    assert_int_equal(result.ready_chunks, 0);
    assert_int_equal(result.coming_chunks, N);
    assert_int_equal(result.lease, 0);
}

static void submit_lookup(struct outcome *outcome, uint32_t number)
{
    struct kvf_test_key bytes[8];
    struct kvf_key keys[8];
    struct kvf_lookup_options options = {
        .struct_bytes = sizeof(options), .flags = KVF_LOOKUP_LEASE, .budget_ms = NEVER_MS};

    keys_of(0, 8, bytes, keys);
    outcome_init(outcome, number, 0);
    assert_int_equal(kvf_submit_lookup(the_client, keys, 8, &options, number, &outcome->request),
                     KVF_OK);
}

static void test_lookup_async(void **state)
{
    struct outcome outcome;

    (void)state;
    submit_lookup(&outcome, 0);
    outcomes_wait(the_client, &outcome, 1);
    assert_int_equal(outcome.status, KVF_OK);
    assert_int_equal(outcome.lookup.ready_chunks, 8);
    assert_int_equal(kvf_lease_release(the_client, outcome.lookup.lease), KVF_OK);
    assert_int_equal(leased_bytes(), 0);
}

static void test_cancel_lookup(void **state)
{
    struct outcome outcomes[2];

    (void)state;
    submit_lookup(&outcomes[0], 0);
    submit_lookup(&outcomes[1], 1);
    cancel_and_wait(&outcomes[0]);
    assert_int_equal(outcomes[0].lookup.lease, 0);
    assert_no_event(); /* the other one goes on */
    assert_int_equal(leased_bytes(), 0);
}

/* Evicted while it is being read: a miss, at once. */
static void test_evict_while_loading(void **state)
{
    struct kvf_test_key bytes;
    struct kvf_key key = kvf_test_key(50, &bytes);
    struct outcome outcome;

    (void)state;
    submit_get(&outcome, 0, 50, 1);
    assert_int_equal(kvf_evict(the_client, &key, 1, NULL), KVF_OK);
    outcomes_wait(the_client, &outcome, 1);
    assert_int_equal(outcome.hits[0].status, KVF_MISS);
    assert_int_equal(kvf_test_block_get(the_client, 50, BLOCK_BYTES, NULL), KVF_MISS);
    assert_int_equal(kvf_test_block_put(the_client, 50, BLOCK_BYTES, 0), KVF_OK);
    assert_int_equal(kvf_test_block_get(the_client, 50, BLOCK_BYTES, NULL), KVF_OK);
}

/* --- set-up -------------------------------------------------------------------------------------
 */

static int group_setup(void **state)
{
    static const char *const sets[] = {"test.delay_nvme=load:300ms", NULL};

    (void)state;
    kvf_test_daemon_create(&the_daemon, sets);
    kvf_test_daemon_start(&the_daemon);
    the_client = kvf_test_client_open(&the_daemon, NULL);
    for (uint64_t i = 0; i < N_STORED; i++) {
        assert_int_equal(kvf_test_block_put(the_client, i, BLOCK_BYTES, KVF_PUT_DURABLE), KVF_OK);
    }
    kvf_close(the_client);
    return 0;
}

static int setup(void **state)
{
    (void)state;
    kvf_test_daemon_kill(&the_daemon);
    kvf_test_daemon_start(&the_daemon);
    the_client = kvf_test_client_open(&the_daemon, NULL);
    return 0;
}

/* With a drive that does not answer. The daemon is killed in the end, and waits for nothing. */
static int setup_stuck(void **state)
{
    int status;

    kvf_test_daemon_set(&the_daemon, "test.delay_nvme=load:1h,store:1h");
    status = setup(state);
    the_daemon.n_sets--;
    return status;
}

static int teardown(void **state)
{
    (void)state;
    assert_true(kvf_test_daemon_is_alive(&the_daemon));
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.protocol_errors"), 0);
    kvf_close(the_client);
    return 0;
}

static int group_teardown(void **state)
{
    (void)state;
    kvf_test_daemon_destroy(&the_daemon);
    return 0;
}

#define TEST(name)  cmocka_unit_test_setup_teardown(name, setup, teardown)
#define STUCK(name) cmocka_unit_test_setup_teardown(name, setup_stuck, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_several_in_flight),
        TEST(test_gets_join),
        STUCK(test_blocking_between),
        TEST(test_blocking_for_the_same),
        TEST(test_put_async),
        STUCK(test_cancel_get),
        TEST(test_cancel_one_of_two),
        TEST(test_cancel_any_time),
        STUCK(test_cancel_durable_put),
        TEST(test_credits),
        STUCK(test_fd),
        STUCK(test_get_budget_ends),
        TEST(test_get_too_slow),
        TEST(test_lookup_on_drive),
        STUCK(test_lookup_budget_ends),
        TEST(test_lookup_async),
        STUCK(test_cancel_lookup),
        STUCK(test_evict_while_loading),
    };

    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
