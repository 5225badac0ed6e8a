/* SPDX-License-Identifier: Apache-2.0
 *
 * test_nvme_crash.c: the drive tier loses power at every I/O in turn, and has every I/O fail in
 * turn, until a run is through before it happens.
 *
 * After each crash: the store opens; what was acknowledged as durable and not given up since is
 * back byte for byte; whatever comes back is right; what was purged does not; and it works on.
 */
#include "tests/support/support.h"
#include "tests/unit/tiers/test_nvme_rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define SEGMENT_BYTES (64u << 10)
#define SEGMENTS      6
#define STORES        70

static struct rig rig;

static bool is_down(void)
{
    struct kvf_tier_stat stat;

    rig.tier->ops->stat(rig.tier, &stat);
    return kvf_io_sim_is_crashed(rig.disk) || stat.off || stat.writes_off;
}

/* Stores with and without waiting, hot and cold, drops, a purge, loads: several times around the
 * store. The same for every n, up to the fault. */
static void work_load(uint32_t first_key)
{
    for (uint32_t i = 0; i < STORES && !is_down(); i++) {
        uint32_t key = first_key + i;

        rig.keys[key].hot = i % 7 == 0;
        if (rig.keys[key].state == RIG_ABSENT) {
            rig_store(&rig, key, i % 3 == 0);
        }
        if (i % 4 == 3) {
            rig_run(&rig);
        } else {
            rig_step(&rig);
        }
        if (i % 9 == 8) {
            rig_drop(&rig, key - 4);
        }
        if (i == STORES / 2) {
            rig_run(&rig);
            rig_purge(&rig, 3);
        }
        if (i % 5 == 4) {
            rig_load(&rig, key - 3);
        }
    }
    rig_run(&rig);
}

static void check_after_crash(void)
{
    int status = rig_open(&rig);

    if (status != KVF_OK) {
        print_message("%s\n", rig.why);
    }
    assert_int_equal(status, KVF_OK);
    rig_check_all(&rig);
    work_load(STORES);
    rig_check_all(&rig);
}

static void test_crash_at_every_io(void **state)
{
    uint32_t crashes = 0;
    bool crashed = true;

    (void)state;
    for (uint64_t n = 1; crashed; n++) {
        rig_init(&rig, n, SEGMENT_BYTES, SEGMENTS);
        kvf_io_sim_crash_at(rig.disk, n);
        if (rig_open(&rig) == KVF_OK) {
            work_load(0);
        }
        crashed = kvf_io_sim_is_crashed(rig.disk);
        rig_crash(&rig);
        crashes += crashed;
        check_after_crash();
        rig_fini(&rig);
    }
    print_message("%u crashes\n", crashes);
    assert_true(crashes > 100);
}

/* Power fails again while the store comes back from the first time. */
static void test_crash_during_recovery(void **state)
{
    (void)state;
    for (uint64_t n = 10; n < 200; n += 7) {
        bool crashed = true;

        for (uint64_t again = 1; crashed; again += 3) {
            rig_init(&rig, n, SEGMENT_BYTES, SEGMENTS);
            kvf_io_sim_crash_at(rig.disk, n);
            if (rig_open(&rig) == KVF_OK) {
                work_load(0);
            }
            rig_crash(&rig);
            kvf_io_sim_crash_at(rig.disk, again);
            rig_open(&rig);
            crashed = kvf_io_sim_is_crashed(rig.disk);
            rig_crash(&rig);
            check_after_crash();
            rig_fini(&rig);
        }
    }
}

static void ignore_purge(void *ctx, uint64_t namespace_id, int status)
{
    (void)ctx;
    (void)namespace_id;
    (void)status;
}

/* Power fails while the state page is written again: what an earlier purge said must hold. */
static void test_crash_in_state_write(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed < 150; seed++) {
        rig_init(&rig, seed, SEGMENT_BYTES, SEGMENTS);
        assert_int_equal(rig_open(&rig), KVF_OK);
        for (uint32_t key = 0; key < 8; key++) {
            assert_int_equal(rig_store(&rig, key, true), KVF_OK);
            rig_run(&rig);
        }
        assert_int_equal(rig_purge(&rig, 3), KVF_OK);
        /* so many that the next entry is not in the sector that holds the checksum: only then can
         * a page be torn */
        for (uint32_t i = 0; i < 20 + seed % 3; i++) {
            assert_int_equal(rig_purge(&rig, 1000 + i), KVF_OK);
        }
        assert_int_equal(kvf_nvme_namespace_purge(rig.tier, 2000, ignore_purge, NULL), KVF_OK);
        for (uint32_t steps = 0; steps < 1 + seed % 5; steps++) {
            rig_step(&rig);
        }
        rig_crash(&rig);
        assert_int_equal(rig_open(&rig), KVF_OK); /* asserts that nothing purged comes back */
        rig_check_all(&rig);
        rig_fini(&rig);
    }
}

/* False: the run was through before its nth I/O. */
static bool fail_from(uint64_t n, uint64_t count)
{
    bool is_open;
    bool failed;

    rig_init(&rig, n, SEGMENT_BYTES, SEGMENTS);
    kvf_io_sim_fail_at(rig.disk, n, count);
    is_open = rig_open(&rig) == KVF_OK;
    if (is_open) {
        work_load(0);
    }
    failed = kvf_io_sim_count(rig.disk) >= n;
    kvf_io_sim_fail_at(rig.disk, 0, 0);
    if (is_open && !is_down()) {
        rig_check_all(&rig);
    }
    rig_crash(&rig);
    check_after_crash();
    rig_fini(&rig);
    return failed;
}

static void test_fail_every_io_once(void **state)
{
    uint64_t n = 1;

    (void)state;
    while (fail_from(n, 1)) {
        n++;
    }
    print_message("clean at %u\n", (unsigned)n);
    assert_true(n > 100);
}

static void test_fail_every_io_some_times(void **state)
{
    (void)state;
    for (uint64_t n = 1; fail_from(n, 3); n += 3) {
    }
}

static void test_drive_dies(void **state)
{
    (void)state;
    for (uint64_t n = 1; fail_from(n, UINT64_MAX / 2); n += 11) {
    }
}

/* A drive that lies: whatever it does, no wrong bytes and no crash. */
static void test_lying_drive(void **state)
{
    const struct kvf_io_sim_faults lies = {.read_error = 200,
                                           .write_error = 300,
                                           .write_no_space = 400,
                                           .sync_error = 60,
                                           .read_flip = 50,
                                           .write_flip = 60,
                                           .write_lost = 60,
                                           .write_misdirected = 90,
                                           .write_torn = 60};
    uint64_t seed = kvf_test_seed();
    uint64_t faults = 0;

    (void)state;
    for (uint32_t round = 0; round < 60; round++) {
        rig_init(&rig, seed + round, SEGMENT_BYTES, SEGMENTS);
        rig.config.errors_writes_off = 1000000;
        rig.config.errors_off = 1000000;
        kvf_io_sim_set_faults(rig.disk, &lies);
        for (uint32_t restart = 0; restart < 4; restart++) {
            if (rig_open(&rig) == KVF_OK) {
                work_load(restart % 2 * STORES);
                for (uint32_t key = 0; key < RIG_KEYS; key++) {
                    rig_load(&rig, key); /* asserts that what comes is right */
                }
            }
            for (uint32_t key = 0; key < RIG_KEYS; key++) {
                rig.keys[key].durable = false; /* no promise holds on such a drive, */
                rig.keys[key].purged = false;  /* not even that a state page was written */
            }
            if (restart % 2 == 0) {
                rig_crash(&rig);
            } else {
                rig_close(&rig);
            }
        }
        faults += kvf_io_sim_fault_count(rig.disk);
        rig_fini(&rig);
    }
    assert_true(faults > 1000);
}

/* After a failed sync nothing of the segments being written may be believed to be stable. */
static void test_failed_sync_discards(void **state)
{
    struct kvf_io_sim_faults faults = {.sync_error = 1};
    struct kvf_nvme_info info;

    (void)state;
    rig_init(&rig, 5, SEGMENT_BYTES, SEGMENTS);
    rig.config.errors_writes_off = 1000;
    rig.config.errors_off = 1000;
    assert_int_equal(rig_open(&rig), KVF_OK);
    for (uint32_t key = 0; key < 2; key++) {
        assert_int_equal(rig_store(&rig, key, false), KVF_OK);
        rig_run(&rig);
        assert_int_equal(rig.keys[key].state, RIG_STORED);
    }
    kvf_io_sim_set_faults(rig.disk, &faults);
    assert_int_equal(rig_store(&rig, 4, true), KVF_OK);
    while (rig.keys[4].state == RIG_STORING) {
        rig_step(&rig);
    }
    assert_int_equal(rig.keys[4].io.status, KVF_ERR_IO);
    assert_int_equal(rig.keys[0].state, RIG_ABSENT); /* told by lost */
    assert_int_equal(rig.keys[1].state, RIG_ABSENT);
    kvf_nvme_info(rig.tier, &info);
    assert_int_equal(info.sync_failures, 1);
    assert_int_equal(info.discarded_records, 2);
    memset(&faults, 0, sizeof(faults));
    kvf_io_sim_set_faults(rig.disk, &faults);
    assert_int_equal(rig_store(&rig, 0, true), KVF_OK);
    rig_run(&rig);
    assert_true(rig.keys[0].durable);
    rig_crash(&rig);
    assert_int_equal(rig_open(&rig), KVF_OK);
    rig_check_all(&rig);
    rig_fini(&rig);
}

static void test_error_budget(void **state)
{
    struct kvf_io_sim_faults faults = {.write_error = 1};
    struct kvf_tier_stat stat;
    int status;

    (void)state;
    rig_init(&rig, 6, SEGMENT_BYTES, SEGMENTS);
    assert_int_equal(rig_open(&rig), KVF_OK);
    assert_int_equal(rig_store(&rig, 0, true), KVF_OK);
    rig_run(&rig);
    kvf_io_sim_set_faults(rig.disk, &faults);
    for (uint32_t key = 1; key < 40; key++) {
        rig_store(&rig, key, false);
        rig_run(&rig);
    }
    rig.tier->ops->stat(rig.tier, &stat);
    assert_true(stat.writes_off);
    assert_false(stat.off);
    assert_int_equal(rig_store(&rig, 50, false), KVF_ERR_TIER_OFF);
    assert_int_equal(rig_purge(&rig, 0), KVF_ERR_TIER_OFF);
    assert_int_equal(rig_load(&rig, 0), KVF_OK); /* reads go on */

    faults = (struct kvf_io_sim_faults){.read_error = 1};
    kvf_io_sim_set_faults(rig.disk, &faults);
    for (uint32_t i = 0; i < 64 && !stat.off; i++) {
        status = rig_load_at(&rig, 0, rig.keys[0].location);
        assert_true(status == KVF_ERR_IO);
        rig.tier->ops->stat(rig.tier, &stat);
    }
    assert_true(stat.off);
    assert_int_equal(rig_load_at(&rig, 0, rig.keys[0].location), KVF_ERR_TIER_OFF);
    rig.keys[0].durable = true; /* the drive has kept it all the same */
    memset(&faults, 0, sizeof(faults));
    kvf_io_sim_set_faults(rig.disk, &faults);
    rig_crash(&rig);
    assert_int_equal(rig_open(&rig), KVF_OK);
    rig_check_all(&rig);
    rig_fini(&rig);
}

/* One wrong read is not the end of a record. */
static void test_one_reread(void **state)
{
    struct kvf_nvme_info info;

    (void)state;
    rig_init(&rig, 7, SEGMENT_BYTES, SEGMENTS);
    assert_int_equal(rig_open(&rig), KVF_OK);
    assert_int_equal(rig_store(&rig, 0, false), KVF_OK);
    rig_run(&rig);
    kvf_io_sim_fail_at(rig.disk, 1, 1);
    assert_int_equal(rig_load(&rig, 0), KVF_OK);
    kvf_nvme_info(rig.tier, &info);
    assert_int_equal(info.retries_read, 1);
    kvf_io_sim_fail_at(rig.disk, 1, 2);
    assert_int_equal(rig_load(&rig, 0), KVF_ERR_IO);
    assert_int_equal(rig.keys[0].state, RIG_ABSENT); /* told by lost */
    rig_fini(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_crash_at_every_io),
        cmocka_unit_test(test_crash_during_recovery),
        cmocka_unit_test(test_crash_in_state_write),
        cmocka_unit_test(test_fail_every_io_once),
        cmocka_unit_test(test_fail_every_io_some_times),
        cmocka_unit_test(test_drive_dies),
        cmocka_unit_test(test_lying_drive),
        cmocka_unit_test(test_failed_sync_discards),
        cmocka_unit_test(test_error_budget),
        cmocka_unit_test(test_one_reread),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
