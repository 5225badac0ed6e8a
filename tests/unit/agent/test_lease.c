/* SPDX-License-Identifier: Apache-2.0
 *
 * test_lease.c: what a lease pins, what its word says to the client, and that the word says LOST
 * before the memory may go.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/unit/agent/core_bed.h"
#include "transport/shm_lease.h"

static int setup(void **state)
{
    *state = core_bed_create();
    return 0;
}

static int teardown(void **state)
{
    core_bed_destroy(*state);
    return 0;
}

static uint32_t pins_of(struct core_bed *bed, const struct kvf_entry *entry)
{
    return kvf_dram_pins(bed->agent.dram_store, kvf_place_slot(&bed->agent, entry));
}

static int add(struct kvf_session *session, uint64_t lease, const struct kvf_entry *entry,
               uint32_t order)
{
    return kvf_lease_add(session, lease, kvf_place_slot(session->agent, entry), entry->record_bytes,
                         order);
}

static uint32_t word_state(struct core_bed *bed, uint64_t lease)
{
    uint64_t word = bed->words[0][kvf_lease_id_index(lease)];

    assert_true(kvf_lease_word_generation(word) == kvf_lease_id_generation(lease));
    return kvf_lease_word_state(word);
}

static void assert_nothing_held(struct core_bed *bed)
{
    assert_int_equal(bed->agent.leased_bytes, 0);
    assert_int_equal(bed->agent.tenants[0].leased_bytes, 0);
    assert_int_equal(bed->sessions[0].leased_bytes, 0);
    assert_int_equal(kvf_pool_taken_count(&bed->agent.pins), 0);
}

static void test_life(void **state)
{
    struct core_bed *bed = *state;
    struct kvf_session *session = &bed->sessions[0];
    struct kvf_entry *entry = core_bed_block(bed);
    uint64_t lease;

    assert_int_equal(kvf_lease_begin(session, &lease), KVF_OK);
    assert_int_equal(add(session, lease, entry, 0), KVF_OK);
    assert_int_equal(pins_of(bed, entry), 1);
    assert_int_equal(session->leased_bytes, BED_RECORD_BYTES);
    assert_int_equal(bed->words[0][kvf_lease_id_index(lease)], 0); /* not shown yet */
    (void)kvf_lease_publish(session, lease);
    assert_int_equal(word_state(bed, lease), KVF_LEASE_LIVE);
    assert_true(kvf_lease_word_live(&bed->words[0][kvf_lease_id_index(lease)],
                                    kvf_lease_id_generation(lease)));
    assert_true(kvf_lease_end(session, lease));
    assert_int_equal(word_state(bed, lease), KVF_LEASE_FREE);
    assert_int_equal(pins_of(bed, entry), 0);
    assert_false(kvf_lease_end(session, lease));
    assert_nothing_held(bed);
}

/* Ids that are not, or not any more, or another session's. */
static void test_wrong_ids(void **state)
{
    struct core_bed *bed = *state;
    struct kvf_entry *entry = core_bed_block(bed);
    uint64_t first, second;

    assert_false(kvf_lease_end(&bed->sessions[0], kvf_lease_id_pack(1, 0)));
    assert_false(kvf_lease_end(&bed->sessions[0], kvf_lease_id_pack(1, KVF_LEASE_INDEX_MAX)));
    assert_int_equal(kvf_lease_begin(&bed->sessions[0], &first), KVF_OK);
    assert_int_equal(add(&bed->sessions[0], first, entry, 0), KVF_OK);
    assert_false(kvf_lease_end(&bed->sessions[1], first));
    assert_int_equal(pins_of(bed, entry), 1);
    assert_true(kvf_lease_end(&bed->sessions[0], first));
    /* the index comes back with another generation: the old id stays dead */
    for (int i = 0; i < 2 * BED_LEASES; i++) {
        assert_int_equal(kvf_lease_begin(&bed->sessions[0], &second), KVF_OK);
        assert_true(second != first);
        assert_false(kvf_lease_end(&bed->sessions[0], first));
        assert_true(kvf_lease_end(&bed->sessions[0], second));
    }
    assert_nothing_held(bed);
}

static void test_table_is_full(void **state)
{
    struct core_bed *bed = *state;
    uint64_t leases[BED_LEASES], more;

    for (int i = 0; i < BED_LEASES; i++) {
        assert_int_equal(kvf_lease_begin(&bed->sessions[0], &leases[i]), KVF_OK);
    }
    assert_int_equal(kvf_lease_begin(&bed->sessions[0], &more), KVF_ERR_BUSY);
    assert_int_equal(kvf_lease_begin(&bed->sessions[1], &more), KVF_OK);
    assert_true(kvf_lease_end(&bed->sessions[1], more));
    assert_true(kvf_lease_end(&bed->sessions[0], leases[3]));
    assert_int_equal(kvf_lease_begin(&bed->sessions[0], &more), KVF_OK);
    kvf_lease_end_all(&bed->sessions[0]);
    assert_nothing_held(bed);
}

/* A quarter of the arena a client, three quarters a tenant; nothing is held of what is refused. */
static void test_shares(void **state)
{
    struct core_bed *bed = *state;
    uint64_t client_blocks = BED_ARENA_BYTES / 100 * 25 / BED_RECORD_BYTES;
    struct kvf_entry *entry = core_bed_block(bed);
    uint64_t lease;
    uint64_t n = 0;

    assert_int_equal(kvf_lease_begin(&bed->sessions[0], &lease), KVF_OK);
    while (add(&bed->sessions[0], lease, entry, 0) == KVF_OK) {
        n++;
    }
    assert_int_equal(n, client_blocks);
    assert_int_equal(pins_of(bed, entry), client_blocks);
    kvf_lease_end_all(&bed->sessions[0]);
    bed->agent.tenants[0].leased_bytes = BED_ARENA_BYTES / 100 * 75 - BED_RECORD_BYTES;
    assert_int_equal(kvf_lease_begin(&bed->sessions[0], &lease), KVF_OK);
    assert_int_equal(add(&bed->sessions[0], lease, entry, 0), KVF_OK);
    assert_int_equal(add(&bed->sessions[0], lease, entry, 0), KVF_ERR_BUSY);
    kvf_lease_end_all(&bed->sessions[0]);
    assert_int_equal(pins_of(bed, entry), 0);
}

static void test_trim(void **state)
{
    struct core_bed *bed = *state;
    struct kvf_session *session = &bed->sessions[0];
    struct kvf_entry *entries[6];
    uint64_t lease;

    assert_int_equal(kvf_lease_begin(session, &lease), KVF_OK);
    for (uint32_t i = 0; i < 6; i++) {
        entries[i] = core_bed_block(bed);
        assert_int_equal(add(session, lease, entries[i], i / 2), KVF_OK); /* chunks of two shards */
    }
    kvf_lease_trim(session, lease, 2);
    for (uint32_t i = 0; i < 6; i++) {
        assert_int_equal(pins_of(bed, entries[i]), i < 4);
    }
    assert_int_equal(session->leased_bytes, 4 * BED_RECORD_BYTES);
    kvf_lease_trim(session, lease, 0);
    assert_nothing_held(bed);
    assert_true(kvf_lease_end(session, lease));
}

/* Taken away: the word says LOST, the memory is free, and the client's release is still fine. */
static void test_lose_slot(void **state)
{
    struct core_bed *bed = *state;
    struct kvf_entry *shared = core_bed_block(bed);
    struct kvf_entry *own = core_bed_block(bed);
    uint64_t first, second, other;

    assert_int_equal(kvf_lease_begin(&bed->sessions[0], &first), KVF_OK);
    assert_int_equal(kvf_lease_begin(&bed->sessions[0], &second), KVF_OK);
    assert_int_equal(kvf_lease_begin(&bed->sessions[1], &other), KVF_OK);
    assert_int_equal(add(&bed->sessions[0], first, shared, 0), KVF_OK);
    assert_int_equal(add(&bed->sessions[0], first, own, 1), KVF_OK);
    assert_int_equal(add(&bed->sessions[0], second, own, 0), KVF_OK);
    assert_int_equal(add(&bed->sessions[1], other, shared, 0), KVF_OK);
    (void)kvf_lease_publish(&bed->sessions[0], first);
    (void)kvf_lease_publish(&bed->sessions[0], second);
    (void)kvf_lease_publish(&bed->sessions[1], other);
    kvf_lease_lose_slot(&bed->agent, kvf_place_slot(&bed->agent, shared));
    assert_int_equal(pins_of(bed, shared), 0);
    assert_int_equal(word_state(bed, first), KVF_LEASE_LOST);
    assert_int_equal(word_state(bed, second), KVF_LEASE_LIVE);
    assert_int_equal(kvf_lease_word_state(bed->words[1][kvf_lease_id_index(other)]),
                     KVF_LEASE_LOST);
    assert_int_equal(pins_of(bed, own), 1); /* the second lease's */
    assert_int_equal(bed->sessions[0].lost_leases, 1);
    assert_int_equal(bed->agent.metrics.leases_lost, 2);
    assert_true(kvf_lease_end(&bed->sessions[0], first));
    assert_true(kvf_lease_end(&bed->sessions[0], second));
    assert_true(kvf_lease_end(&bed->sessions[1], other));
    assert_nothing_held(bed);
}

static void test_age(void **state)
{
    struct core_bed *bed = *state;
    struct kvf_session *session = &bed->sessions[0];
    uint64_t leases[3];

    assert_int_equal(kvf_lease_oldest_age_ns(session), 0);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(kvf_lease_begin(session, &leases[i]), KVF_OK);
        bed->agent.now_ns += KVF_NS_PER_S;
    }
    assert_int_equal(kvf_lease_oldest_age_ns(session), 3 * KVF_NS_PER_S);
    assert_true(kvf_lease_end(session, leases[1])); /* out of the middle */
    assert_int_equal(kvf_lease_oldest_age_ns(session), 3 * KVF_NS_PER_S);
    assert_true(kvf_lease_end(session, leases[0]));
    assert_int_equal(kvf_lease_oldest_age_ns(session), KVF_NS_PER_S);
    assert_true(kvf_lease_end(session, leases[2]));
    assert_int_equal(kvf_lease_oldest_age_ns(session), 0);
}

/* A leased block is not evicted, however short memory is; once it is free it is. */
static void test_pinned_stays(void **state)
{
    struct core_bed *bed = *state;
    struct kvf_tier_host host = kvf_place_dram_host(&bed->agent);
    struct kvf_entry *entry = core_bed_block(bed);
    kvf_cookie cookie = kvf_index_cookie(&bed->agent.index, entry);
    kvf_location slot = kvf_place_slot(&bed->agent, entry);
    uint64_t lease;

    assert_true(host.may_evict(host.ctx, slot, cookie));
    assert_int_equal(kvf_lease_begin(&bed->sessions[0], &lease), KVF_OK);
    assert_int_equal(add(&bed->sessions[0], lease, entry, 0), KVF_OK);
    assert_false(host.may_evict(host.ctx, slot, cookie));
    assert_true(kvf_lease_end(&bed->sessions[0], lease));
    assert_true(host.may_evict(host.ctx, slot, cookie));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_life), TEST(test_wrong_ids), TEST(test_table_is_full), TEST(test_shares),
        TEST(test_trim), TEST(test_lose_slot), TEST(test_age),           TEST(test_pinned_stays),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
