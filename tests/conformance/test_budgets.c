/* SPDX-License-Identifier: Apache-2.0
 *
 * test_budgets.c: budgets of time and of writing, and what "durable" promises. The drive is made
 * slow, or broken, by the tiers that are there for that, so that nothing depends on this
 * machine's speed.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/clock.h"
#include "tests/conformance/outcome.h"
#include "tests/conformance/room.h"
#include "tests/support/blocks.h"
#include "tests/support/daemon.h"

#define BLOCK_BYTES 20000

static struct kvf_test_daemon the_daemon;

static struct kvf_client *begin(const char *const *sets)
{
    kvf_test_daemon_create(&the_daemon, sets);
    kvf_test_daemon_start(&the_daemon);
    return kvf_test_client_open(&the_daemon, NULL);
}

static struct kvf_client *restart(struct kvf_client *client, const char *set)
{
    kvf_close(client);
    kvf_test_daemon_kill(&the_daemon);
    if (set != NULL) {
        kvf_test_daemon_set(&the_daemon, set);
    }
    kvf_test_daemon_start(&the_daemon);
    return kvf_test_client_open(&the_daemon, NULL);
}

static int end(void **state)
{
    (void)state;
    kvf_test_daemon_destroy(&the_daemon);
    return 0;
}

/* Blocks that the drive has taken since the start. */
static uint64_t n_stores(void)
{
    return kvf_test_daemon_number(&the_daemon, "nvme.0.stores");
}

/* --- the budget of writes -----------------------------------------------------------------------
 */

/* After more has been written than the budget has, a chain that is on the drive goes on once the
 * budget has been filled up: no new head has to come for that. */
static void test_chains_go_on_after_refill(void **state)
{
    static const char *const sets[] = {"nvme.0.write_budget=2MiB", "nvme.0.admission=all", NULL};
    struct kvf_test_key head;
    struct kvf_put_options options = {.struct_bytes = sizeof(options), .depth = 1};
    struct kvf_client *client = begin(sets);
    uint64_t deadline_ns, number = 100, before;

    (void)state;
    assert_int_equal(kvf_test_block_put(client, 1, BLOCK_BYTES, KVF_PUT_DURABLE), KVF_OK);
    /* a store that is new begins with a full budget, one that was killed with what it had saved */
    client = restart(client, NULL);
    room_put_all(client, 10, 3, 1 << 20, KVF_PUT_DURABLE);
    before = room_stat(client).namespace_nvme_bytes;
    deadline_ns = kvf_now_ns() + 60 * KVF_NS_PER_S;
    options.parent = kvf_test_key(1, &head);
    do {
        assert_true(kvf_now_ns() < deadline_ns);
        assert_int_equal(room_put(client, number, number, BLOCK_BYTES, &options), KVF_OK);
        number++;
        room_sleep_ms(100);
    } while (room_stat(client).namespace_nvme_bytes == before);
    kvf_close(client);
}

/* --- the budget of a get ------------------------------------------------------------------------
 */

/* A burst makes each of its reads slow; that says nothing about a single read later on. */
static void test_gets_after_a_burst(void **state)
{
    enum {
        N = 240,
        N_LATER = 40,
        BYTES = 120 << 10
    };
    struct kvf_get_options options = {.struct_bytes = sizeof(options), .budget_ms = 200};
    struct kvf_client *client = begin(NULL);
    uint64_t deadline_ns;
    bool is_ok = false;

    (void)state;
    room_put_all(client, 0, N + N_LATER, BYTES, KVF_PUT_DURABLE);
    kvf_test_daemon_set(&the_daemon, "prefetch.inflight=4");
    client = restart(client, "test.delay_nvme=load:10ms");
    assert_int_equal(kvf_prefetch(client, room_keys(0, N), N, NULL), KVF_OK);
    deadline_ns = kvf_now_ns() + 60 * KVF_NS_PER_S;
    while (room_stat(client).namespace_dram_bytes < (uint64_t)N * BYTES) {
        assert_true(kvf_now_ns() < deadline_ns);
        room_sleep_ms(10);
    }
    /* each is tried in any case, for nothing was read for a while; a machine that is busy with
     * something else may need more time for some of them than they have */
    for (uint32_t i = 0; i < N_LATER && !is_ok; i++) {
        struct kvf_hit hit;

        room_sleep_ms(1200);
        (void)kvf_get(client, room_keys(N + i, 1), 1, &options, &hit);
        assert_true(i > 0 || hit.status != KVF_TOO_SLOW);
        is_ok = kvf_test_hit_check(client, &hit, N + i, BYTES) == KVF_OK;
    }
    assert_true(is_ok);
    kvf_close(client);
}

/* --- durable ------------------------------------------------------------------------------------
 */

/* What was written without a sync is written again for one who asks for more. */
static void test_durable_after_plain(void **state)
{
    static const char *const sets[] = {"test.delay_nvme=store:300ms", NULL};
    struct kvf_client *client = begin(sets);
    uint64_t begun_ns = kvf_now_ns();
    int status;

    (void)state;
    /* while the plain write is under way */
    assert_int_equal(kvf_test_block_put(client, 1, BLOCK_BYTES, 0), KVF_OK);
    status = kvf_test_block_put(client, 1, BLOCK_BYTES, KVF_PUT_DURABLE);
    assert_true(status == KVF_OK || status == KVF_EXISTS);
    assert_true(kvf_now_ns() - begun_ns >= 600 * KVF_NS_PER_MS);
    assert_int_equal(n_stores(), 2);
    /* after it */
    assert_int_equal(kvf_test_block_put(client, 2, BLOCK_BYTES, 0), KVF_OK);
    while (room_stat(client).namespace_nvme_bytes < (uint64_t)2 * BLOCK_BYTES) {
        assert_true(kvf_now_ns() - begun_ns < 60 * KVF_NS_PER_S);
        room_sleep_ms(20);
    }
    assert_int_equal(n_stores(), 3);
    begun_ns = kvf_now_ns();
    status = kvf_test_block_put(client, 2, BLOCK_BYTES, KVF_PUT_DURABLE);
    assert_true(status == KVF_OK || status == KVF_EXISTS);
    assert_true(kvf_now_ns() - begun_ns >= 300 * KVF_NS_PER_MS);
    assert_int_equal(n_stores(), 4);
    /* and once is enough */
    for (uint64_t number = 1; number <= 2; number++) {
        assert_int_equal(kvf_test_block_put(client, number, BLOCK_BYTES, KVF_PUT_DURABLE),
                         KVF_EXISTS);
    }
    assert_int_equal(n_stores(), 4);
    kvf_close(client);
}

/* One block that its drive alone has, written without a sync. Puts of others have taken its memory.
 */
static void put_on_drive_only(struct kvf_client *client, uint64_t number, size_t bytes)
{
    uint64_t before = room_stat(client).namespace_nvme_bytes;
    uint64_t deadline_ns = kvf_now_ns() + 60 * KVF_NS_PER_S;

    assert_int_equal(kvf_test_block_put(client, number, bytes, 0), KVF_OK);
    while (room_stat(client).namespace_nvme_bytes == before) {
        assert_true(kvf_now_ns() < deadline_ns);
        room_sleep_ms(10);
    }
    room_put_all(client, 1000 * number, 80, bytes, KVF_PUT_NO_WRITE);
}

/* What is on a drive without a sync is brought back and written again, and stays the first put. */
static void test_durable_from_the_drive(void **state)
{
    enum {
        BYTES = 1 << 20,
        DELAY_MS = 500
    };
    static const char *const sets[] = {"test.delay_nvme=load:500ms", NULL};
    struct kvf_put_options options = {.struct_bytes = sizeof(options), .flags = KVF_PUT_DURABLE};
    struct kvf_client *client = begin(sets);
    uint64_t begun_ns;
    uint8_t tier;
    int status;

    (void)state;
    put_on_drive_only(client, 1, BYTES);
    assert_int_equal(n_stores(), 1);
    assert_int_equal(room_put(client, 1, 2, BYTES, &options), KVF_ERR_CONFLICT);
    begun_ns = kvf_now_ns();
    assert_int_equal(room_put(client, 1, 1, BYTES, &options), KVF_OK);
    assert_true(kvf_now_ns() - begun_ns >= DELAY_MS * KVF_NS_PER_MS);
    assert_int_equal(n_stores(), 2);
    assert_int_equal(kvf_test_block_get(client, 1, BYTES, NULL), KVF_OK);
    /* while somebody else brings it back */
    put_on_drive_only(client, 2, BYTES);
    assert_int_equal(n_stores(), 3);
    assert_int_equal(kvf_prefetch(client, room_keys(2, 1), 1, NULL), KVF_OK);
    status = room_put(client, 2, 2, BYTES, &options);
    assert_true(status == KVF_OK || status == KVF_EXISTS);
    assert_int_equal(n_stores(), 4);
    client = restart(client, NULL);
    for (uint64_t number = 1; number <= 2; number++) {
        assert_int_equal(kvf_test_block_get(client, number, BYTES, &tier), KVF_OK);
        assert_int_equal(tier, KVF_TIER_NVME);
    }
    kvf_close(client);
}

/* Submit a durable put of one block. */
static void submit_durable(struct kvf_client *client, uint64_t number, uint32_t budget_ms,
                           struct outcome *outcome_out)
{
    static struct kvf_hit hit;
    struct kvf_put_options options = {
        .struct_bytes = sizeof(options), .flags = KVF_PUT_DURABLE, .budget_ms = budget_ms};
    uint8_t payload[BLOCK_BYTES];
    struct kvf_put_item item = {.struct_bytes = sizeof(item),
                                .source = KVF_SOURCE_BYTES,
                                .key = room_keys(number, 1)[0],
                                .data = payload,
                                .data_bytes = sizeof(payload)};

    kvf_test_payload_fill(number, payload, sizeof(payload));
    *outcome_out = (struct outcome){.n_blocks = 1, .hits = &hit};
    assert_int_equal(kvf_submit_put(client, &item, 1, &options, 0, &outcome_out->request), KVF_OK);
}

/* A durable put ends when it is canceled or its time is over, also while its bytes are being
 * copied; it does not claim what has not been done. */
static void test_durable_ends_early(void **state)
{
    static const char *const sets[] = {"test.delay_nvme=store:1h", NULL};
    struct kvf_client *client;
    struct outcome outcome;

    (void)state;
    kvf_test_daemon_create(&the_daemon, sets);
    the_daemon.failpoints = "agent.fill=delay:60ms";
    kvf_test_daemon_start(&the_daemon);
    client = kvf_test_client_open(&the_daemon, NULL);

    submit_durable(client, 1, 0, &outcome); /* canceled while it is copied */
    assert_int_equal(kvf_cancel(client, outcome.request), KVF_OK);
    outcomes_wait(client, &outcome, 1);
    assert_int_equal(outcome.hits[0].status, KVF_ERR_CANCELED);
    submit_durable(client, 2, 0, &outcome); /* while it is written */
    room_sleep_ms(200);
    assert_int_equal(kvf_cancel(client, outcome.request), KVF_OK);
    outcomes_wait(client, &outcome, 1);
    assert_int_equal(outcome.hits[0].status, KVF_ERR_CANCELED);
    submit_durable(client, 3, 20, &outcome); /* its time ends while it is copied */
    outcomes_wait(client, &outcome, 1);
    assert_int_equal(outcome.hits[0].status, KVF_ERR_TIMEOUT);
    submit_durable(client, 4, 200, &outcome); /* while it is written */
    outcomes_wait(client, &outcome, 1);
    assert_int_equal(outcome.hits[0].status, KVF_ERR_TIMEOUT);
    /* memory has them all the same */
    assert_int_equal(room_count(client, 1, 4, BLOCK_BYTES), 4);
    kvf_close(client);
}

static void test_durable_is_refused(void **state)
{
    struct kvf_put_options options = {
        .struct_bytes = sizeof(options), .flags = KVF_PUT_DURABLE, .ttl_s = 100};
    struct kvf_client *client = begin(NULL);

    (void)state;
    assert_int_equal(room_put(client, 1, 1, BLOCK_BYTES, &options), KVF_ERR_INVALID);
    assert_int_equal(kvf_test_block_get(client, 1, BLOCK_BYTES, NULL), KVF_MISS);
    /* a block that may not go to a drive does not go there by a second put */
    options.flags = KVF_PUT_NO_WRITE;
    options.ttl_s = 0;
    assert_int_equal(room_put(client, 2, 2, BLOCK_BYTES, &options), KVF_OK);
    assert_int_equal(kvf_test_block_put(client, 2, BLOCK_BYTES, KVF_PUT_DURABLE), KVF_ERR_REFUSED);
    options.flags = 0;
    options.ttl_s = 100;
    assert_int_equal(room_put(client, 3, 3, BLOCK_BYTES, &options), KVF_OK);
    assert_int_equal(kvf_test_block_put(client, 3, BLOCK_BYTES, KVF_PUT_DURABLE), KVF_ERR_REFUSED);
    assert_int_equal(n_stores(), 0);
    kvf_close(client);
}

/* --- lookup -------------------------------------------------------------------------------------
 */

/* One of two chunks in memory and leased, the other one on its way; both are purged before it
 * comes, whichever of them the purge meets first. */
static void test_purge_under_a_lookup(void **state)
{
    static const char *const labels[] = {"first", "second"};
    struct kvf_lookup_options options = {
        .struct_bytes = sizeof(options), .flags = KVF_LOOKUP_LEASE, .budget_ms = 60000};
    struct kvf_client *client = begin(NULL);
    uint64_t round_trip_ns;

    (void)state;
    for (int i = 0; i < 2; i++) {
        kvf_close(client);
        client = kvf_test_client_open(&the_daemon, labels[i]);
        room_put_all(client, 0, 2, BLOCK_BYTES, KVF_PUT_DURABLE);
    }
    client = restart(client, "test.delay_nvme=load:500ms");
    for (int i = 0; i < 2; i++) {
        struct kvf_key keys[2];
        struct outcome outcome = {0};
        const struct kvf_lookup_result *result = &outcome.lookup;

        kvf_close(client);
        client = kvf_test_client_open(&the_daemon, labels[i]);
        assert_int_equal(kvf_test_block_get(client, (uint64_t)i, BLOCK_BYTES, NULL), KVF_OK);
        keys[0] = room_keys(0, 2)[i];
        keys[1] = room_keys(0, 2)[1 - i];
        assert_int_equal(kvf_submit_lookup(client, keys, 2, &options, 0, &outcome.request), KVF_OK);
        assert_int_equal(kvf_ping(client, 60000, &round_trip_ns), KVF_OK); /* it waits now */
        assert_int_equal(room_command(&the_daemon, client, "/v1/purge"), 2);
        outcomes_wait(client, &outcome, 1);
        if (result->lease == 0) {
            assert_int_equal(result->ready_chunks, 0);
        } else {
            assert_int_equal(kvf_lease_check(client, result->lease), KVF_ERR_LOST);
            assert_int_equal(kvf_lease_release(client, result->lease), KVF_ERR_LOST);
        }
        assert_int_equal(room_stat(client).leased_bytes, 0);
    }
    kvf_close(client);
}

/* --- drives that fail ---------------------------------------------------------------------------
 */
#define N_LOST 100

/* What cannot be read any more is not here: a miss, and put again it is stored, not "there". */
static void assert_lost_and_found(struct kvf_client *client)
{
    assert_int_equal(room_count(client, 0, N_LOST, BLOCK_BYTES), 0);
    room_put_all(client, 0, N_LOST, BLOCK_BYTES, 0);
    assert_int_equal(room_count(client, 0, N_LOST, BLOCK_BYTES), N_LOST);
}

static void test_tier_fails(void **state)
{
    struct kvf_client *client = begin(NULL);

    (void)state;
    room_put_all(client, 0, N_LOST, BLOCK_BYTES, KVF_PUT_DURABLE);
    client = restart(client, "test.fault_nvme=load:error,store:error");
    assert_lost_and_found(client);
    kvf_close(client);
}

/* The drive itself fails until its tier gives up and is off. */
static void test_tier_is_off(void **state)
{
    struct kvf_client *client = begin(NULL);
    struct kvf_lookup_result result;

    (void)state;
    room_put_all(client, 0, 2 * N_LOST, BLOCK_BYTES, KVF_PUT_DURABLE);
    the_daemon.failpoints = "nvme.record_read=error";
    client = restart(client, NULL);
    assert_lost_and_found(client);
    assert_true(kvf_test_daemon_log_has(&the_daemon, "the tier is off"));
    /* those that nobody asked for while it was on are no longer promised, and are stored as well */
    assert_int_equal(kvf_lookup(client, room_keys(N_LOST, 5), 5, NULL, &result), KVF_OK);
    assert_int_equal(result.run_chunks, 0);
    room_put_all(client, N_LOST, N_LOST, BLOCK_BYTES, 0);
    assert_int_equal(room_count(client, N_LOST, N_LOST, BLOCK_BYTES), N_LOST);
    kvf_close(client);
}

/* Too many errors of writing end the writing. What the drive has can still be read. */
static void test_writes_are_off(void **state)
{
    struct kvf_lookup_options options = {.struct_bytes = sizeof(options), .budget_ms = 60000};
    struct kvf_client *client = begin(NULL);
    struct kvf_lookup_result result;

    (void)state;
    room_put_all(client, 0, N_LOST, BLOCK_BYTES, KVF_PUT_DURABLE);
    the_daemon.failpoints = "nvme.record_write=error";
    client = restart(client, NULL);
    for (uint64_t i = 0; !kvf_test_daemon_log_has(&the_daemon, "nothing more is written"); i++) {
        assert_true(i < 1000);
        assert_true(kvf_test_block_put(client, 1000 + i, BLOCK_BYTES, KVF_PUT_DURABLE) < 0);
    }
    assert_int_equal(kvf_test_block_put(client, 2000, BLOCK_BYTES, KVF_PUT_DURABLE),
                     KVF_ERR_TIER_OFF);
    assert_int_equal(kvf_lookup(client, room_keys(0, N_LOST), N_LOST, &options, &result), KVF_OK);
    assert_int_equal(result.ready_chunks, N_LOST);
    assert_int_equal(room_count(client, 0, N_LOST, BLOCK_BYTES), N_LOST);
    kvf_close(client);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_chains_go_on_after_refill, end),
        cmocka_unit_test_teardown(test_gets_after_a_burst, end),
        cmocka_unit_test_teardown(test_durable_after_plain, end),
        cmocka_unit_test_teardown(test_durable_from_the_drive, end),
        cmocka_unit_test_teardown(test_durable_ends_early, end),
        cmocka_unit_test_teardown(test_durable_is_refused, end),
        cmocka_unit_test_teardown(test_purge_under_a_lookup, end),
        cmocka_unit_test_teardown(test_tier_fails, end),
        cmocka_unit_test_teardown(test_tier_is_off, end),
        cmocka_unit_test_teardown(test_writes_are_off, end),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
