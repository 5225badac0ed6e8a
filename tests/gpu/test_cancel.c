/* SPDX-License-Identifier: Apache-2.0
 *
 * test_cancel.c: kvf_gpu_cancel at any moment of a put or get. Every event comes once, nothing is
 * kept, what is stored or loaded is whole, and no page and no slot is written behind the last
 * event.
 */
#include "client/gpu_internal.h"
#include "tests/gpu/calls.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum {
    BLOCKS = 6,
    BURST_BYTES = 160 << 10, /* two blocks */
    ROUNDS = 12,             /* of one profile or way of pinning: cancel behind so many polls */
};

static struct calls calls;
static uint64_t seed;

/* ----------------------------------------------------------------------------------------------
 * Helpers
 */
static uint64_t put_begin(const struct calls_chain *chain)
{
    uint64_t request = 0;

    assert_int_equal(kvf_gpu_put(calls.gpu, calls.pages.region, chain->puts, chain->n, NULL, NULL,
                                 NULL, 0, NULL, &request),
                     KVF_OK);
    return request;
}

static uint64_t get_begin(const struct calls_chain *chain)
{
    uint64_t request = 0;

    assert_int_equal(kvf_gpu_get(calls.gpu, calls.pages.region, chain->gets, chain->n, NULL, NULL,
                                 NULL, 0, &request),
                     KVF_OK);
    return request;
}

/* Requests that the daemon was asked to end. */
static uint32_t n_asked;

void __real_kvf_request_cancel(struct kvf_client *client, uint64_t request);
void __wrap_kvf_request_cancel(struct kvf_client *client, uint64_t request);

void __wrap_kvf_request_cancel(struct kvf_client *client, uint64_t request)
{
    n_asked++;
    __real_kvf_request_cancel(client, request);
}

/* Requests that the daemon has for this one. */
static uint32_t daemon_requests(uint64_t id)
{
    const struct kvf_gpu_request *request = calls.gpu->requests;
    uint32_t n = 0;

    while (request != NULL && request->id != id) {
        request = request->next;
    }
    for (uint32_t i = 0; i < calls.gpu->n_bursts; i++) {
        const struct kvf_gpu_burst *burst = kvf_gpu_burst_at(calls.gpu, i);

        n += burst->request == request && burst->sink.is_used;
    }
    return n + (request != NULL && request->sink.is_used);
}

static void hold(bool is_held)
{
    if (calls_fake.fake_cuda_hold != NULL) {
        calls_fake.fake_cuda_hold(is_held);
    }
}

/* Is the copy of a block that is left to the processor still to run? */
static bool is_redo_pending(void)
{
    return calls_fake.fake_cuda_is_pending != NULL && calls.gpu->redo_memory != NULL &&
           calls_fake.fake_cuda_is_pending(calls.gpu->redo_memory, calls.gpu->redo_bytes);
}

/* Cancel behind some polls, and wait. */
static void cancel_after(uint64_t request, uint32_t polls, struct calls_outcome *outcome)
{
    uint32_t n_there;
    int status;

    for (; polls > 0 && !outcome->is_over; polls--) {
        (void)calls_take(&calls, &request, outcome, 1, 0);
    }
    n_there = daemon_requests(request);
    n_asked = 0;
    hold(true);
    status = kvf_gpu_cancel(calls.gpu, request);
    assert_int_equal(status, outcome->is_over ? KVF_ERR_INVALID : KVF_OK);
    assert_int_equal(kvf_gpu_cancel(calls.gpu, request), status);
    assert_int_equal(n_asked, n_there);
    for (uint32_t i = 0; i < 4 && !outcome->is_over; i++) {
        (void)calls_take(&calls, &request, outcome, 1, 0);
        assert_false(outcome->pages_free && is_redo_pending());
    }
    hold(false);
    calls_wait(&calls, request, outcome);
    assert_int_equal(kvf_gpu_cancel(calls.gpu, request), KVF_ERR_INVALID);
}

static uint32_t assert_outcome(const struct calls_outcome *outcome, uint32_t n)
{
    uint32_t n_good = 0;

    for (uint32_t i = 0; i < n; i++) {
        assert_true(outcome->has_block[i]);
        assert_true(outcome->blocks[i] == KVF_OK || outcome->blocks[i] == KVF_ERR_CANCELED);
        n_good += outcome->blocks[i] == KVF_OK;
    }
    assert_int_equal(outcome->n_good, n_good);
    assert_int_equal(outcome->status == KVF_OK, n_good == n);
    return n_good;
}

/* No credit, lease, slot or memory is left with what has ended. */
static void assert_nothing_is_kept(void)
{
    struct kvf_stat stat = {.struct_bytes = sizeof(stat)};

    assert_int_equal(calls.client->credits_in_use, 0);
    do { /* releases are on their way */
        assert_int_equal(kvf_stat(calls.client, &stat), KVF_OK);
    } while (stat.leased_bytes != 0);
    assert_int_equal(kvf_gpu_sleep(calls.gpu), KVF_OK);
    assert_int_equal(calls.client->session->n_slots, 0);
    assert_int_equal(calls.client->session->n_leases, 0);
    assert_int_equal(kvf_gpu_wake(calls.gpu), KVF_OK);
}

static void assert_missing(const struct kvf_key *key)
{
    struct kvf_hit hit;

    assert_int_equal(kvf_get(calls.client, key, 1, NULL, &hit), KVF_MISS);
}

static bool is_in(const uint8_t *pages, uint32_t id)
{
    for (uint32_t layer = 0; layer < CALLS_LAYERS; layer++) {
        size_t at = ((size_t)layer * CALLS_PAGES + id) * calls.pages.page_bytes;

        if (memcmp(pages + at, calls.pages.host + at, calls.pages.page_bytes) != 0) {
            return false;
        }
    }
    return true;
}

/* Blocks that said KVF_OK are in their pages, as the C codecs decode them. */
static void assert_loaded(const struct calls_chain *chain, const struct calls_outcome *outcome)
{
    uint8_t *pages = calls_pinned(calls.pages.bytes);

    calls_read(pages, calls.pages.address, calls.pages.bytes);
    for (uint32_t i = 0; i < chain->n; i++) {
        struct kvf_hit hit;

        if (outcome->blocks[i] != KVF_OK) {
            continue;
        }
        assert_int_equal(kvf_get(calls.client, &chain->gets[i].key, 1, NULL, &hit), KVF_OK);
        calls_decode(&calls, hit.record, hit.record_bytes, 0, 0, chain->ids[i]);
        assert_int_equal(kvf_lease_release(calls.client, hit.lease), KVF_OK);
        for (uint32_t p = 0; p < CALLS_CHUNK_PAGES; p++) {
            assert_true(is_in(pages, chain->ids[i][p]));
        }
    }
    kvf_gpu_host_free(calls_device, pages);
}

/* ----------------------------------------------------------------------------------------------
 * Puts
 */
static void put_round(uint32_t polls)
{
    struct calls_outcome outcome = {0};
    struct calls_chain chain;
    struct calls_chain next;

    calls_fill(&calls);
    calls_chain_init(&chain, BLOCKS, 0);
    calls_chain_init(&next, 2, 0);
    cancel_after(put_begin(&chain), polls, &outcome);
    (void)assert_outcome(&outcome, BLOCKS);
    assert_true(outcome.pages_free);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        if (outcome.blocks[i] == KVF_OK) {
            calls_encode(&calls, chain.ids[i], chain.puts[i].token_start, CALLS_CHUNK_TOKENS);
            calls_assert_stored(&calls, &chain.puts[i].key);
        } else {
            assert_missing(&chain.puts[i].key);
        }
    }
    /* slots and ring have other content now, which a late copy would spoil */
    calls_fill(&calls);
    calls_chain_put_and_check(&calls, &next);
}

static void test_puts_are_canceled_anywhere(void **state)
{
    static const char *const profiles[] = {"balanced", "exact", "raw"};

    (void)state;
    for (uint32_t p = 0; p < 3; p++) {
        calls.options.burst_bytes = BURST_BYTES;
        calls_open(&calls, profiles[p], seed + p);
        for (uint32_t polls = 0; polls < ROUNDS; polls++) {
            put_round(polls);
        }
        assert_nothing_is_kept();
        calls_close(&calls);
    }
}

/* Blocks that kernels leave to the processor use memory of which there is one. */
static void test_puts_that_are_redone_are_canceled(void **state)
{
    (void)state;
    if (calls_fake.fake_cuda_redo_every == NULL) {
        skip();
    }
    calls_fake.fake_cuda_redo_every(2);
    calls.options.burst_bytes = BURST_BYTES;
    calls_open(&calls, "balanced", seed);
    for (uint32_t polls = 0; polls < 2 * ROUNDS; polls++) {
        put_round(polls);
    }
    assert_nothing_is_kept();
    calls_close(&calls);
    calls_fake.fake_cuda_redo_every(0);
}

/* Pages are not free before the kernels that are queued have read them. */
static void test_pages_of_a_canceled_put(void **state)
{
    struct calls_outcome outcome = {0};
    struct calls_chain chain;
    uint64_t request;

    (void)state;
    if (calls_fake.fake_cuda_hold == NULL) {
        skip(); /* a GPU does not wait for the test */
    }
    calls_open(&calls, "balanced", seed);
    calls_chain_init(&chain, BLOCKS, 0);
    calls_fake.fake_cuda_hold(true);
    request = put_begin(&chain);
    assert_int_equal(kvf_gpu_cancel(calls.gpu, request), KVF_OK);
    for (uint32_t i = 0; i < 100; i++) {
        assert_int_equal(calls_take(&calls, &request, &outcome, 1, 0), 0);
    }
    calls_fake.fake_cuda_hold(false);
    calls_wait(&calls, request, &outcome);
    assert_int_equal(assert_outcome(&outcome, BLOCKS), 0);
    assert_int_equal(outcome.status, KVF_ERR_CANCELED);
    assert_int_equal(outcome.free_status, KVF_ERR_CANCELED);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        assert_missing(&chain.puts[i].key);
    }
    assert_nothing_is_kept();
    calls_chain_put_and_check(&calls, &chain);
    calls_close(&calls);
}

/* ----------------------------------------------------------------------------------------------
 * Gets
 */
static void test_gets_are_canceled_anywhere(void **state)
{
    (void)state;
    for (uint32_t pinning = KVF_GPU_PIN_LAZY; pinning <= KVF_GPU_PIN_WINDOW; pinning++) {
        struct calls_chain chain;

        calls.options.pinning = pinning;
        calls.options.load_window_bytes = 1 << 18;
        calls.options.load_group_bytes = 20 << 10; /* some parts of a block, and many of them */
        calls_open(&calls, pinning == KVF_GPU_PIN_EAGER ? "raw" : "balanced", seed + pinning);
        calls_chain_init(&chain, BLOCKS, 0);
        calls_chain_put_and_check(&calls, &chain);
        for (uint32_t polls = 0; polls < ROUNDS; polls++) {
            struct calls_outcome outcome = {0};

            calls_fill(&calls);
            cancel_after(get_begin(&chain), polls, &outcome);
            (void)assert_outcome(&outcome, BLOCKS);
            assert_loaded(&chain, &outcome);
            /* whatever would still be decoded comes behind this */
            calls_fill(&calls);
            calls_check(calls_device->driver.cuCtxSynchronize());
            calls_assert_pages_equal(&calls);
        }
        calls_chain_get_and_check(&calls, &chain);
        assert_nothing_is_kept();
        calls_close(&calls);
    }
}

/* What is queued holds its blocks, and no others. */
static void test_blocks_of_a_canceled_get(void **state)
{
    struct kvf_stat stat = {.struct_bytes = sizeof(stat)};
    struct calls_outcome outcome = {0};
    struct calls_chain chain;
    uint64_t deadline_ns = kvf_now_ns() + 20 * KVF_NS_PER_S;
    bool is_held[BLOCKS];
    uint32_t n_early = 0;
    uint32_t n_held = 0;
    uint64_t request;

    (void)state;
    if (calls_fake.fake_cuda_hold == NULL) {
        skip();
    }
    calls.options.pinning = KVF_GPU_PIN_LAZY;
    calls.options.load_window_bytes = 1; /* four groups with room for a block each */
    calls_open(&calls, "balanced", seed);
    calls_chain_init(&chain, BLOCKS, 0);
    calls_chain_put_and_check(&calls, &chain);
    calls_fake.fake_cuda_hold(true);
    request = get_begin(&chain);
    while (stat.leased_bytes < BLOCKS * KVF_RECORD_PAGE_BYTES) {
        assert_int_equal(kvf_stat(calls.client, &stat), KVF_OK);
    }
    assert_int_equal(calls_take(&calls, &request, &outcome, 1, 0), 0);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        /* whose parts are in a group, or next: the piece is pinned for them */
        is_held[i] = calls.gpu->requests->items[i].pin != NULL;
        n_held += is_held[i];
    }
    assert_in_range(n_held, 2, BLOCKS - 1);
    assert_int_equal(kvf_gpu_cancel(calls.gpu, request), KVF_OK);
    while (n_early < BLOCKS - n_held) {
        n_early += calls_take(&calls, &request, &outcome, 1, 1000);
        assert_true(kvf_now_ns() < deadline_ns);
    }
    for (uint32_t i = 0; i < 20; i++) {
        assert_int_equal(calls_take(&calls, &request, &outcome, 1, 0), 0);
    }
    for (uint32_t i = 0; i < BLOCKS; i++) {
        assert_int_equal(outcome.has_block[i], !is_held[i]);
    }
    assert_false(outcome.is_over);
    calls_fake.fake_cuda_hold(false);
    calls_wait(&calls, request, &outcome);
    assert_int_equal(assert_outcome(&outcome, BLOCKS), 0);
    assert_int_equal(outcome.status, KVF_ERR_CANCELED);
    assert_nothing_is_kept();
    calls_chain_get_and_check(&calls, &chain);
    calls_close(&calls);
}

/* The daemon answers the get before it hears of the cancel: those hits are given back as well. */
static void test_hits_behind_a_cancel(void **state)
{
    struct calls_chain chain;

    (void)state;
    calls_open(&calls, "balanced", seed);
    calls_chain_init(&chain, BLOCKS, 0);
    calls_chain_put_and_check(&calls, &chain);
    for (uint32_t i = 0; i < 3; i++) {
        struct calls_outcome outcome = {0};
        uint64_t request;

        assert_int_equal(kill(calls.daemon.process.pid, SIGSTOP), 0);
        request = get_begin(&chain);
        assert_int_equal(kvf_gpu_cancel(calls.gpu, request), KVF_OK);
        assert_int_equal(calls_take(&calls, &request, &outcome, 1, 0), 0);
        assert_int_equal(kill(calls.daemon.process.pid, SIGCONT), 0);
        calls_wait(&calls, request, &outcome);
        assert_int_equal(assert_outcome(&outcome, BLOCKS), 0);
        calls_assert_pages_equal(&calls);
    }
    assert_nothing_is_kept();
    calls_close(&calls);
}

/* ----------------------------------------------------------------------------------------------
 * Others
 */
static void test_other_requests_go_on(void **state)
{
    (void)state;
    calls.options.burst_bytes = BURST_BYTES;
    calls.options.ring_bytes = 2 << 20; /* all blocks of both */
    calls.options.load_window_bytes = 1 << 17;
    calls_open(&calls, "balanced", seed);
    for (uint32_t polls = 0; polls < ROUNDS; polls++) {
        struct calls_outcome outcomes[2] = {{0}};
        struct calls_chain chains[2];
        uint64_t requests[2];
        uint32_t which = polls % 2;

        calls_fill(&calls);
        for (uint32_t i = 0; i < 2; i++) {
            calls_chain_init(&chains[i], BLOCKS, 0);
            requests[i] = put_begin(&chains[i]);
        }
        for (uint32_t i = 0; i < polls; i++) {
            (void)calls_take(&calls, requests, outcomes, 2, 0);
        }
        (void)kvf_gpu_cancel(calls.gpu, requests[which]);
        while (!outcomes[0].is_over || !outcomes[1].is_over) {
            (void)calls_take(&calls, requests, outcomes, 2, 1000);
        }
        assert_int_equal(outcomes[1 - which].status, KVF_OK);
        (void)assert_outcome(&outcomes[which], BLOCKS);

        memset(outcomes, 0, sizeof(outcomes));
        calls_chain_put(&calls, &chains[1 - which], &outcomes[0]);
        assert_int_equal(outcomes[0].blocks[0], KVF_EXISTS);
        calls_chain_get_and_check(&calls, &chains[1 - which]);
    }
    assert_nothing_is_kept();
    calls_close(&calls);
}

static void test_the_daemon_dies_behind_a_cancel(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        struct calls_outcome outcome = {0};
        struct calls_chain chain;
        struct calls_chain more;
        uint64_t request;

        calls_open(&calls, "balanced", seed + i);
        calls_chain_init(&chain, BLOCKS, 0);
        calls_chain_init(&more, BLOCKS, 0);
        calls_chain_put_and_check(&calls, &chain);
        request = i % 2 == 0 ? get_begin(&chain) : put_begin(&more);
        if (i >= 2) {
            (void)calls_take(&calls, &request, &outcome, 1, 0);
        }
        assert_int_equal(kvf_gpu_cancel(calls.gpu, request),
                         outcome.is_over ? KVF_ERR_INVALID : KVF_OK);
        kvf_test_daemon_kill(&calls.daemon);
        calls_wait(&calls, request, &outcome);
        assert_int_equal(kvf_gpu_unregister(calls.gpu, calls.pages.region), KVF_OK);
        assert_int_equal(kvf_gpu_sleep(calls.gpu), KVF_OK);
        calls_close(&calls);
        kvf_test_daemon_start(&calls.daemon);
    }
}

static void test_what_is_not_in_flight(void **state)
{
    struct calls_outcome outcome = {0};
    struct calls_chain chain;
    uint64_t request;

    (void)state;
    calls_open(&calls, "balanced", seed);
    calls_chain_init(&chain, 1, 0);
    assert_int_equal(kvf_gpu_cancel(NULL, 1), KVF_ERR_UNSUPPORTED);
    assert_int_equal(kvf_gpu_cancel(calls.gpu, 0), KVF_ERR_INVALID);
    assert_int_equal(kvf_gpu_cancel(calls.gpu, 1), KVF_ERR_INVALID);
    request = put_begin(&chain);
    calls_wait(&calls, request, &outcome);
    assert_int_equal(outcome.status, KVF_OK);
    assert_int_equal(kvf_gpu_cancel(calls.gpu, request), KVF_ERR_INVALID);
    calls_close(&calls);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_puts_are_canceled_anywhere),
        cmocka_unit_test(test_puts_that_are_redone_are_canceled),
        cmocka_unit_test(test_pages_of_a_canceled_put),
        cmocka_unit_test(test_gets_are_canceled_anywhere),
        cmocka_unit_test(test_blocks_of_a_canceled_get),
        cmocka_unit_test(test_hits_behind_a_cancel),
        cmocka_unit_test(test_other_requests_go_on),
        cmocka_unit_test(test_the_daemon_dies_behind_a_cancel),
        cmocka_unit_test(test_what_is_not_in_flight),
    };

    if (!calls_begin(&seed)) {
        return 77;
    }
    return calls_run(&calls, tests);
}
