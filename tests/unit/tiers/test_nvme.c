/* SPDX-License-Identifier: Apache-2.0
 *
 * test_nvme.c: the drive tier on a drive without faults: round trips, wrap-around, reinsertion,
 * epochs, durable stores, restarts, sizes.
 */
#include "tests/unit/tiers/test_nvme_rig.h"

#include "codec/block_format.h"
#include "tiers/nvme_format.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define SEGMENT_BYTES (64u << 10)

static struct rig rig;

static void store_keys(uint32_t first, uint32_t end, bool durable)
{
    for (uint32_t key = first; key < end; key++) {
        assert_int_equal(rig_store(&rig, key, durable), KVF_OK);
        if (key % 8 == 7) {
            rig_run(&rig);
        }
    }
    rig_run(&rig);
}

static struct kvf_nvme_info info(void)
{
    struct kvf_nvme_info value;

    kvf_nvme_info(rig.tier, &value);
    return value;
}

static struct kvf_tier_stat stat_now(void)
{
    struct kvf_tier_stat value;

    rig.tier->ops->stat(rig.tier, &value);
    return value;
}

static uint32_t stored_count(void)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < RIG_KEYS; i++) {
        n += rig.keys[i].state == RIG_STORED;
    }
    return n;
}

static void test_round_trip(void **state)
{
    (void)state;
    rig_init(&rig, 1, SEGMENT_BYTES, 8);
    assert_int_equal(rig_open(&rig), KVF_OK);
    assert_int_equal(rig.n_recovered, 0);
    store_keys(0, 10, false);
    assert_int_equal(stored_count(), 10);
    rig_check_all(&rig);
    assert_int_equal(stat_now().stores, 10);
    assert_int_equal(stat_now().loads, 10);
    assert_int_equal(stat_now().stored_blocks, 10);
    assert_int_equal(stat_now().errors_corrupt, 0);
    assert_true(info().segments_unsealed <= 2);

    /* what is not a record of ours, and calls out of range */
    assert_int_equal(rig_load_at(&rig, 0, 12345), KVF_MISS);
    assert_int_equal(rig_load_at(&rig, 0, KVF_LOCATION_NONE), KVF_MISS);
    assert_int_equal(rig_load_at(&rig, 1, rig.keys[0].location), KVF_ERR_CORRUPT);
    rig.keys[200].record[0] = 0;
    rig.keys[200].io = (struct kvf_tier_io){.record = rig.keys[200].record, .record_bytes = 8192};
    assert_int_equal(rig.tier->ops->store(rig.tier, &rig.keys[200].io), KVF_ERR_INVALID);
    ((struct kvf_record_page *)rig.keys[200].record)->header.magic = KVF_BLOCK_MAGIC;
    ((struct kvf_record_page *)rig.keys[200].record)->header.total_bytes = SEGMENT_BYTES;
    rig.keys[200].io.record_bytes = SEGMENT_BYTES;
    assert_int_equal(rig.tier->ops->store(rig.tier, &rig.keys[200].io), KVF_ERR_TOO_LARGE);
    rig_fini(&rig);
}

/* The memory behind a record is someone else's: nothing of it may be on the drive. */
static void test_padding_is_zeroed(void **state)
{
    const uint8_t *bytes;

    (void)state;
    rig_init(&rig, 2, SEGMENT_BYTES, 8);
    assert_int_equal(rig_open(&rig), KVF_OK);
    store_keys(0, 40, false);
    rig_close(&rig);
    bytes = kvf_io_sim_bytes(rig.disk);
    for (uint64_t at = 0; at + 64 <= rig.disk_config.capacity_bytes; at += 64) {
        uint32_t n = 0;

        while (n < 64 && bytes[at + n] == 0xee) {
            n++;
        }
        assert_true(n < 64); /* rig_store fills the memory behind records with 0xee */
    }
    rig_fini(&rig);
}

static void test_wrap_around(void **state)
{
    kvf_location old;

    (void)state;
    rig_init(&rig, 3, SEGMENT_BYTES, 6);
    assert_int_equal(rig_open(&rig), KVF_OK);
    store_keys(0, 4, false);
    old = rig.keys[1].location;
    for (uint32_t round = 0; round < 5; round++) {
        for (uint32_t key = 0; key < 100; key++) {
            if (rig.keys[key].state == RIG_ABSENT) {
                assert_int_equal(rig_store(&rig, key, false), KVF_OK);
                rig_run(&rig);
            }
        }
        rig_check_all(&rig);
    }
    assert_true(rig.n_reclaimed > 100);
    assert_true(stored_count() >= 9); /* three segments of six, at the least, are full */
    assert_int_equal(rig_load_at(&rig, 1, old), KVF_MISS);
    rig.tier->ops->drop(rig.tier, old); /* no effect */
    rig_check_all(&rig);
    assert_int_equal(stat_now().stored_blocks, stored_count());
    assert_true(info().segments_unsealed <= 2);
    rig_fini(&rig);
}

static void test_reinsertion_keeps_what_is_hot(void **state)
{
    (void)state;
    rig_init(&rig, 4, 4 * SEGMENT_BYTES, 5);
    assert_int_equal(rig_open(&rig), KVF_OK);
    store_keys(0, 1, true);
    rig.keys[0].hot = true;
    for (uint32_t round = 0; round < 3; round++) {
        for (uint32_t key = 1; key < RIG_KEYS; key++) {
            if (rig.keys[key].state == RIG_ABSENT) {
                assert_int_equal(rig_store(&rig, key, false), KVF_OK);
                rig_run(&rig);
            }
        }
    }
    assert_int_equal(rig.keys[0].state, RIG_STORED);
    assert_true(stat_now().reinsertions >= 3);
    assert_int_equal(rig_load(&rig, 0), KVF_OK);
    rig_crash(&rig);
    assert_int_equal(rig_open(&rig), KVF_OK);
    rig_check_all(&rig); /* it was acknowledged as durable, wherever it is now */
    rig_fini(&rig);
}

static void test_reinsertion_is_bounded(void **state)
{
    struct kvf_tier_stat stat;

    (void)state;
    rig_init(&rig, 5, 4 * SEGMENT_BYTES, 5);
    assert_int_equal(rig_open(&rig), KVF_OK);
    for (uint32_t key = 0; key < RIG_KEYS; key++) {
        rig.keys[key].hot = true; /* all cannot be kept */
        assert_int_equal(rig_store(&rig, key, false), KVF_OK);
        rig_run(&rig);
        rig.keys[key].hot = true;
    }
    stat = stat_now();
    assert_true(stat.reinsertions > 0);
    assert_true(info().reinserted_bytes <= stat.bytes_written / 4);
    assert_true(stat.evictions > 100);
    rig_check_all(&rig);

    /* without budget none is kept */
    rig.reinsert_budget_bytes = 0;
    for (uint32_t key = 0; key < RIG_KEYS; key++) {
        if (rig.keys[key].state == RIG_ABSENT) {
            assert_int_equal(rig_store(&rig, key, false), KVF_OK);
            rig_run(&rig);
        }
    }
    assert_int_equal(stat_now().reinsertions, stat.reinsertions);
    rig_fini(&rig);
}

/* The host may drop a record at any moment of its copy. */
static void test_drop_during_reinsertion(void **state)
{
    (void)state;
    for (uint32_t delay = 0; delay < 12; delay++) {
        uint32_t reclaimed;

        rig_init(&rig, 6, SEGMENT_BYTES, 6);
        assert_int_equal(rig_open(&rig), KVF_OK);
        store_keys(0, 1, false);
        rig.keys[0].hot = true;
        for (uint32_t key = 1; rig.n_reclaimed == 0; key++) {
            reclaimed = rig.n_reclaimed;
            assert_int_equal(rig_store(&rig, key, false), KVF_OK);
            while (rig.n_reclaimed == reclaimed && rig_step(&rig)) {
            }
        }
        for (uint32_t i = 0; i < delay; i++) {
            rig_step(&rig);
        }
        rig_drop(&rig, 0);
        rig_run(&rig);
        rig_check_all(&rig);
        assert_int_equal(stat_now().stored_blocks, stored_count());
        rig_fini(&rig);
    }
}

static void test_restart(void **state)
{
    uint32_t before;

    (void)state;
    rig_init(&rig, 7, SEGMENT_BYTES, 12);
    assert_int_equal(rig_open(&rig), KVF_OK);
    store_keys(0, 30, false);
    rig_drop(&rig, 29);
    rig.credit_bytes = 987654321;
    while (!rig.tier->ops->drained(rig.tier)) {
        rig_step(&rig);
    }
    assert_int_equal(rig_store(&rig, 100, false), KVF_ERR_TIER_OFF);
    before = stored_count();
    rig_close(&rig);

    assert_int_equal(rig_open(&rig), KVF_OK);
    assert_int_equal(stored_count(), before);
    assert_int_equal(info().recovered_scanned, 0); /* all footers were there */
    assert_int_equal(info().credit_bytes, 987654321);
    assert_int_equal(rig.keys[29].state, RIG_ABSENT); /* left out of the footer */
    rig_check_all(&rig);
    store_keys(100, 120, false);
    rig_check_all(&rig);
    rig_fini(&rig);
}

/* Stores that were accepted before a drain are done before it ends, also those that wait for a
 * segment that must first be emptied. */
static void test_drain_waits_for_stores(void **state)
{
    uint32_t done_before;

    (void)state;
    rig_init(&rig, 17, SEGMENT_BYTES, 5);
    assert_int_equal(rig_open(&rig), KVF_OK);
    store_keys(0, 24, false);
    done_before = rig.n_done;
    for (uint32_t key = 100; key < 120; key++) {
        assert_int_equal(rig_store(&rig, key, key % 2 == 0), KVF_OK);
    }
    for (uint32_t steps = 0; !rig.tier->ops->drained(rig.tier); steps++) {
        rig_step(&rig);
        assert_true(steps < 10000);
    }
    assert_int_equal(rig.n_done - done_before, 20);
    assert_int_equal(rig.tier->ops->deadline_ns(rig.tier), UINT64_MAX);
    rig_crash(&rig); /* what is drained is stable */
    rig.keys[119].durable = true;
    rig.keys[118].durable = true;
    assert_int_equal(rig_open(&rig), KVF_OK);
    assert_int_equal(info().recovered_scanned, 0);
    rig_check_all(&rig);
    rig_fini(&rig);
}

/* A killed process: everything that was written comes back, from open segments too. */
static void test_restart_after_kill(void **state)
{
    uint32_t before;

    (void)state;
    rig_init(&rig, 8, SEGMENT_BYTES, 12);
    assert_int_equal(rig_open(&rig), KVF_OK);
    store_keys(0, 25, false);
    before = stored_count();
    for (uint32_t restarts = 0; restarts < 3; restarts++) {
        rig_close(&rig);
        assert_int_equal(rig_open(&rig), KVF_OK);
        assert_int_equal(stored_count(), before);
        assert_true(restarts > 0 ? info().recovered_scanned == 0 : info().recovered_scanned > 0);
        rig_check_all(&rig);
    }
    rig_fini(&rig);
}

static void test_durable_is_durable(void **state)
{
    (void)state;
    for (uint32_t seed = 0; seed < 20; seed++) {
        rig_init(&rig, 100 + seed, SEGMENT_BYTES, 8);
        assert_int_equal(rig_open(&rig), KVF_OK);
        for (uint32_t key = 0; key < 20; key++) {
            assert_int_equal(rig_store(&rig, key, key % 3 == 0), KVF_OK);
            for (uint32_t i = 0; i < seed % 4; i++) {
                rig_step(&rig);
            }
        }
        rig_crash(&rig);
        assert_int_equal(rig_open(&rig), KVF_OK);
        rig_check_all(&rig);
        rig_fini(&rig);
    }
}

static void test_group_commit(void **state)
{
    uint64_t syncs;

    (void)state;
    rig_init(&rig, 9, 256u << 10, 6);
    assert_int_equal(rig_open(&rig), KVF_OK);
    store_keys(0, 1, true);
    syncs = info().syncs;
    for (uint32_t key = 1; key < 13; key++) {
        assert_int_equal(rig_store(&rig, key, true), KVF_OK);
    }
    rig_run(&rig);
    for (uint32_t key = 0; key < 13; key++) {
        assert_true(rig.keys[key].durable);
    }
    assert_true(info().syncs - syncs < 12); /* several stores shared one */
    rig_fini(&rig);
}

static void purge_done(void *ctx, uint64_t namespace_id, int status)
{
    (void)namespace_id;
    *(int *)ctx = status;
}

static void test_purged_namespaces_stay_away(void **state)
{
    kvf_location old;

    (void)state;
    rig_init(&rig, 10, SEGMENT_BYTES, 12);
    assert_int_equal(rig_open(&rig), KVF_OK);
    store_keys(0, 24, false);
    old = rig.keys[2].location;
    assert_int_equal(kvf_nvme_namespace_epoch(rig.tier, 2), 0);
    assert_int_equal(rig_purge(&rig, 2), KVF_OK);
    assert_true(kvf_nvme_namespace_epoch(rig.tier, 2) > 0);
    assert_int_equal(rig_load_at(&rig, 2, old), KVF_MISS);
    rig_crash(&rig);
    assert_int_equal(rig_open(&rig), KVF_OK); /* host_recovered asserts that none is back */
    assert_true(kvf_nvme_namespace_epoch(rig.tier, 2) > 0);
    for (uint32_t key = 0; key < 24; key++) {
        assert_int_equal(rig.keys[key].state,
                         rig_namespace(key) == 2 ? RIG_ABSENT : rig.keys[key].state);
    }
    /* new records of the namespace live */
    assert_int_equal(rig_store(&rig, 2, true), KVF_OK);
    rig_run(&rig);
    assert_int_equal(rig_load(&rig, 2), KVF_OK);
    rig_close(&rig);
    assert_int_equal(rig_open(&rig), KVF_OK);
    assert_int_equal(rig_load(&rig, 2), KVF_OK);
    rig_fini(&rig);
}

static void test_store_under_an_old_epoch_is_refused(void **state)
{
    struct rig_key *key = &rig.keys[6];

    (void)state;
    rig_init(&rig, 11, SEGMENT_BYTES, 8);
    assert_int_equal(rig_open(&rig), KVF_OK);
    assert_int_equal(rig_store(&rig, 6, false), KVF_OK); /* waits for its segment to open */
    assert_int_equal(rig_purge(&rig, 2), KVF_OK);
    rig_run(&rig);
    assert_int_equal(key->io.status, KVF_ERR_REFUSED);
    assert_int_equal(key->state, RIG_ABSENT);
    rig_fini(&rig);
}

static void test_purge_table_fills_and_empties(void **state)
{
    int status = -1000;

    (void)state;
    rig_init(&rig, 12, SEGMENT_BYTES, 6);
    assert_int_equal(rig_open(&rig), KVF_OK);
    store_keys(0, 8, false);
    for (uint64_t i = 0; i < KVF_NVME_EPOCHS; i++) {
        status = -1000;
        assert_int_equal(kvf_nvme_namespace_purge(rig.tier, 1000 + i, purge_done, &status), KVF_OK);
        rig_run(&rig);
        assert_int_equal(status, KVF_OK);
    }
    assert_int_equal(info().purged_namespaces, KVF_NVME_EPOCHS);
    assert_int_equal(kvf_nvme_namespace_purge(rig.tier, 5, purge_done, &status), KVF_ERR_BUSY);
    /* an entry that is there can always be raised */
    assert_int_equal(kvf_nvme_namespace_purge(rig.tier, 1003, purge_done, &status), KVF_OK);
    rig_run(&rig);
    for (uint32_t key = 8; key < 120; key++) { /* every old segment is overwritten */
        assert_int_equal(rig_store(&rig, key, false), KVF_OK);
        rig_run(&rig);
    }
    assert_int_equal(kvf_nvme_namespace_purge(rig.tier, 5, purge_done, &status), KVF_OK);
    rig_run(&rig);
    assert_true(kvf_nvme_namespace_epoch(rig.tier, 5) > kvf_nvme_namespace_epoch(rig.tier, 1003));
    rig_fini(&rig);
}

static void test_grow_and_shrink(void **state)
{
    uint32_t before;

    (void)state;
    rig_init(&rig, 13, SEGMENT_BYTES, 8);
    assert_int_equal(rig_open(&rig), KVF_OK);
    store_keys(0, 30, false);
    before = stored_count();
    rig_close(&rig);
    assert_int_equal(kvf_io_sim_resize(rig.disk, (1u << 20) + 16 * SEGMENT_BYTES), KVF_OK);
    rig.disk_config.capacity_bytes = (1u << 20) + 16 * SEGMENT_BYTES;
    assert_int_equal(rig_open(&rig), KVF_OK);
    assert_int_equal(info().segments, 16);
    assert_true(stored_count() >= before); /* what had been given up may still be there */
    before = stored_count();
    rig_check_all(&rig);
    store_keys(100, 120, false);
    assert_true(stored_count() >= before + 20); /* nothing had to go */
    rig_close(&rig);

    /* smaller again: segments at the end are gone, the others are not */
    assert_int_equal(kvf_io_sim_resize(rig.disk, (1u << 20) + 5 * SEGMENT_BYTES), KVF_OK);
    assert_int_equal(rig_open(&rig), KVF_OK);
    assert_int_equal(info().segments, 5);
    assert_true(stored_count() > 0);
    rig_check_all(&rig);
    rig_close(&rig);

    /* too small to be a store: refused, and whole again afterwards */
    assert_int_equal(kvf_io_sim_resize(rig.disk, (1u << 20) + 3 * SEGMENT_BYTES), KVF_OK);
    assert_int_equal(rig_open(&rig), KVF_ERR_CONFIG);
    assert_int_equal(kvf_io_sim_resize(rig.disk, (1u << 20) + 8 * SEGMENT_BYTES), KVF_OK);
    assert_int_equal(rig_open(&rig), KVF_OK);
    rig_check_all(&rig);
    rig_fini(&rig);
}

/* Segments that come back after the store was smaller in between hold nothing. */
static void test_grown_space_is_empty(void **state)
{
    (void)state;
    rig_init(&rig, 14, SEGMENT_BYTES, 12);
    assert_int_equal(rig_open(&rig), KVF_OK);
    store_keys(0, 40, false);
    rig_close(&rig);
    rig.config.bytes = (1u << 20) + 4 * SEGMENT_BYTES;
    assert_int_equal(rig_open(&rig), KVF_OK);
    assert_int_equal(info().segments, 4);
    rig_close(&rig);
    rig.config.bytes = 0;
    rig.n_recovered = 0;
    assert_int_equal(rig_open(&rig), KVF_OK);
    assert_int_equal(info().segments, 12);
    assert_true(rig.n_recovered < 20); /* what four segments hold */
    rig_fini(&rig);
}

static void test_other_key_is_refused(void **state)
{
    uint8_t key[32] = {1, 2, 3};

    (void)state;
    rig_init(&rig, 15, SEGMENT_BYTES, 8);
    rig.config.id_key = key;
    assert_int_equal(rig_open(&rig), KVF_ERR_FOREIGN);
    assert_non_null(strstr(rig.why, "cluster_key"));
    rig.config.id_key = NULL;
    assert_int_equal(rig_open(&rig), KVF_OK);
    rig_close(&rig);

    /* a store under a cluster.key does not open without it, and keeps no copy of it */
    rig.config.id_key = key;
    assert_int_equal(kvf_io_sim_open(rig.disk, &rig.config.io), KVF_OK);
    assert_int_equal(kvf_nvme_format(&rig.config, rig.why, sizeof(rig.why)), KVF_OK);
    rig.config.io->ops->close(rig.config.io);
    assert_int_equal(rig_open(&rig), KVF_OK);
    assert_memory_equal(info().id_key, key, 32);
    rig_close(&rig);
    rig.config.id_key = NULL;
    assert_int_equal(rig_open(&rig), KVF_ERR_FOREIGN);
    for (uint32_t i = 0; i < 32; i++) {
        assert_int_equal(((struct kvf_nvme_super *)kvf_io_sim_bytes(rig.disk))->id_key[i], 0);
    }
    rig_fini(&rig);
}

static void test_busy(void **state)
{
    uint32_t stored = 0;

    (void)state;
    rig_init(&rig, 16, SEGMENT_BYTES, 8);
    rig.config.stores_max = 4;
    assert_int_equal(rig_open(&rig), KVF_OK);
    for (uint32_t key = 0; key < 6; key++) {
        int status = rig_store(&rig, key, false);

        assert_int_equal(status, key < 4 ? KVF_OK : KVF_ERR_BUSY);
        stored += status == KVF_OK;
    }
    assert_int_equal(stat_now().busy, 2);
    rig_run(&rig);
    assert_int_equal(stored_count(), stored);
    rig_check_all(&rig);
    rig_fini(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_padding_is_zeroed),
        cmocka_unit_test(test_wrap_around),
        cmocka_unit_test(test_reinsertion_keeps_what_is_hot),
        cmocka_unit_test(test_reinsertion_is_bounded),
        cmocka_unit_test(test_drop_during_reinsertion),
        cmocka_unit_test(test_restart),
        cmocka_unit_test(test_drain_waits_for_stores),
        cmocka_unit_test(test_restart_after_kill),
        cmocka_unit_test(test_durable_is_durable),
        cmocka_unit_test(test_group_commit),
        cmocka_unit_test(test_purged_namespaces_stay_away),
        cmocka_unit_test(test_store_under_an_old_epoch_is_refused),
        cmocka_unit_test(test_purge_table_fills_and_empties),
        cmocka_unit_test(test_grow_and_shrink),
        cmocka_unit_test(test_grown_space_is_empty),
        cmocka_unit_test(test_other_key_is_refused),
        cmocka_unit_test(test_busy),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
