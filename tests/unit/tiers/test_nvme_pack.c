/* SPDX-License-Identifier: Apache-2.0
 *
 * test_nvme_pack.c: the drive tier where it packs records: the host sees plain ones, whatever is on
 * the drive and whatever the tier was told before or is told now.
 */
#include "tests/unit/tiers/test_nvme_rig.h"

#include "base/crc32c.h"
#include "base/failpoint.h"
#include "codec/codec.h"
#include "codec/entropy.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define SEGMENT_BYTES (256u << 10)

static struct rig rig;

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

static void open_rig(bool packs)
{
    rig.config.packs = packs;
    assert_int_equal(rig_open(&rig), KVF_OK);
}

/* One packing: a store at a time. */
static void store_keys(uint32_t first, uint32_t end, bool durable)
{
    for (uint32_t key = first; key < end; key++) {
        assert_int_equal(rig_store(&rig, key, durable), KVF_OK);
        rig_run(&rig);
        assert_int_equal(rig.keys[key].state, RIG_STORED);
    }
}

static uint64_t padded(uint64_t bytes)
{
    return (bytes + 4095) / 4096 * 4096;
}

/* What a host is told of what its records take adds up to what the tier says. */
static void check_sizes(uint32_t first, uint32_t end, uint32_t packed_min)
{
    uint64_t taken = 0;
    uint32_t packed = 0;

    for (uint32_t key = first; key < end; key++) {
        const struct kvf_tier_io *io = &rig.keys[key].io;
        uint64_t plain = rig_record_bytes(key);
        uint64_t stored = kvf_nvme_stored_bytes(rig.tier, rig.keys[key].location);

        assert_int_equal(stored, padded(io->stored_bytes));
        assert_true(io->stored_bytes == plain || stored + 4096 <= padded(plain));
        packed += io->stored_bytes < plain;
        taken += stored;
    }
    assert_true(packed >= packed_min);
    assert_int_equal(info().packed_records, packed);
    assert_int_equal(stat_now().stored_bytes, taken);
    assert_int_equal(kvf_nvme_stored_bytes(rig.tier, KVF_LOCATION_NONE), 0);
}

static void packed_records_come_back(void **state)
{
    (void)state;
    rig_init(&rig, 1, SEGMENT_BYTES, 8);
    open_rig(true);
    store_keys(0, 40, false);
    check_sizes(0, 40, 12);
    assert_true(info().packed_saved_bytes > 12 * 4096);
    rig_check_all(&rig);
    assert_int_equal(info().unpacked_records, info().packed_records);
    assert_int_equal(stat_now().errors_corrupt, 0);
    /* a name and a size that are not the record's */
    assert_int_equal(rig_load_at(&rig, 6, rig.keys[2].location), KVF_ERR_CORRUPT);
    rig_fini(&rig);
}

static bool drained(void)
{
    for (uint32_t steps = 0; !rig.tier->ops->drained(rig.tier); steps++) {
        (void)rig_step(&rig);
        assert_true(steps < 100000);
    }
    return true;
}

/* A store is one store, packed or not: after a clean end its footers say the plain sizes, after a
 * loss of power the records themselves. */
static void the_option_may_come_and_go(void **state)
{
    (void)state;
    for (int crash = 0; crash < 2; crash++) {
        rig_init(&rig, 2, SEGMENT_BYTES, 8);
        for (uint32_t round = 0; round < 4; round++) {
            open_rig(round % 2 == 0);
            assert_int_equal(rig.n_recovered, 20 * round);
            rig_check_all(&rig);
            store_keys(20 * round, 20 * (round + 1), true);
            assert_true((info().packed_records >= 6) == (round % 2 == 0));
            rig_check_all(&rig);
            if (crash) {
                rig_crash(&rig);
            } else {
                assert_true(drained());
                rig_close(&rig);
            }
            rig.n_recovered = 0;
        }
        open_rig(false);
        assert_int_equal(rig.n_recovered, 80);
        rig_check_all(&rig);
        assert_true(info().unpacked_records >= 12);
        rig_fini(&rig);
    }
}

/* Copies of packed records are packed, and found again. */
static void reuse_keeps_packed_records(void **state)
{
    (void)state;
    rig_init(&rig, 3, SEGMENT_BYTES, 6);
    rig.config.reinsert_percent = 100;
    open_rig(true);
    store_keys(0, 8, true);
    for (uint32_t key = 0; key < 8; key++) {
        rig.keys[key].hot = true;
    }
    for (uint32_t round = 0; round < 6; round++) {
        for (uint32_t key = 8; key < 200; key++) {
            if (rig.keys[key].state == RIG_ABSENT) {
                store_keys(key, key + 1, false);
            }
        }
    }
    assert_true(rig.n_moved >= 8);
    rig_check_all(&rig);
    rig_crash(&rig);
    open_rig(false);
    for (uint32_t key = 0; key < 8; key++) {
        assert_int_equal(rig_load(&rig, key), KVF_OK);
    }
    rig_fini(&rig);
}

/* More stores than packings: busy, and later not. */
static void packings_are_bounded(void **state)
{
    (void)state;
    rig_init(&rig, 4, SEGMENT_BYTES, 8);
    rig.config.pack_count = 2;
    open_rig(true);
    assert_int_equal(rig_store(&rig, 1, false), KVF_OK);
    assert_int_equal(rig_store(&rig, 2, false), KVF_OK);
    assert_int_equal(rig_store(&rig, 5, false), KVF_ERR_BUSY);
    assert_int_equal(rig_store(&rig, 0, false), KVF_OK); /* two pages cannot become fewer */
    rig_run(&rig);
    assert_int_equal(rig_store(&rig, 5, false), KVF_OK);
    rig_run(&rig);
    rig_check_all(&rig);
    assert_int_equal(stat_now().stored_blocks, 4);
    rig_close(&rig); /* with what is under way: nothing is left behind */
    open_rig(true);
    assert_int_equal(rig_store(&rig, 6, false), KVF_OK);
    rig_fini(&rig);
}

static void what_cannot_be_unpacked_is_lost(void **state)
{
    char why[128];

    (void)state;
    rig_init(&rig, 5, SEGMENT_BYTES, 8);
    open_rig(true);
    store_keys(0, 12, false);
    assert_int_equal(kvf_failpoint_arm("nvme.unpack=error@1", why, sizeof(why)), KVF_OK);
    assert_int_equal(rig_load(&rig, 2), KVF_OK); /* at the second try */
    assert_int_equal(stat_now().errors_corrupt, 1);
    assert_int_equal(rig.n_lost, 0);
    assert_int_equal(kvf_failpoint_arm("nvme.unpack=error", why, sizeof(why)), KVF_OK);
    assert_int_equal(rig_load(&rig, 2), KVF_ERR_CORRUPT);
    assert_int_equal(stat_now().errors_corrupt, 3);
    assert_int_equal(rig.n_lost, 1);
    assert_int_equal(rig.keys[2].state, RIG_ABSENT);
    assert_int_equal(kvf_failpoint_arm("", why, sizeof(why)), KVF_OK);
    rig_check_all(&rig);
    rig_fini(&rig);
}

static void store_done(struct kvf_tier_io *io)
{
    assert_int_equal(io->status, KVF_OK);
    rig.keys[io->cookie].state = RIG_STORED;
    rig.keys[io->cookie].location = io->location;
}

/* A packed record with right checksums and a right MAC, whose streams are not what an encoder
 * makes: what a packer with a fault would leave behind. */
static void wrong_streams_are_lost(void **state)
{
    struct kvf_entropy_packer *packer = kvf_entropy_packer_create();

    (void)state;
    assert_non_null(packer);
    for (uint32_t round = 0; round < 8; round++) {
        struct rig_key *key = &rig.keys[30];
        struct kvf_record_page *page;
        uint64_t packed_bytes;

        rig_init(&rig, 6, SEGMENT_BYTES, 8);
        open_rig(false);
        page = (struct kvf_record_page *)(void *)key->record;
        rig_record_fill(30, rig.keys[200].record);
        assert_int_equal(kvf_entropy_pack(packer, rig.keys[200].record, page, &packed_bytes),
                         KVF_OK);
        key->record[packed_bytes - 1 - 300 * round] ^= 1;
        page->header.payload_crc32c = kvf_crc32c(0, page + 1, packed_bytes - 4096);
        kvf_block_seal_header(page);
        key->io = (struct kvf_tier_io){
            .cookie = 30, .record = page, .record_bytes = packed_bytes, .done = store_done};
        rig_name_fill(&rig, 30, &key->io.name);
        assert_int_equal(rig.tier->ops->store(rig.tier, &key->io), KVF_OK);
        rig_run(&rig);
        assert_int_equal(rig_load(&rig, 30), KVF_ERR_CORRUPT);
        assert_int_equal(rig.n_lost, 1);
        assert_int_equal(stat_now().errors_corrupt, 2); /* it was read once more */
        assert_int_equal(stat_now().errors_mac, 0);
        rig_fini(&rig);
    }
    kvf_entropy_packer_destroy(packer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(packed_records_come_back),
        cmocka_unit_test(the_option_may_come_and_go),
        cmocka_unit_test(reuse_keeps_packed_records),
        cmocka_unit_test(packings_are_bounded),
        cmocka_unit_test(what_cannot_be_unpacked_is_lost),
        cmocka_unit_test(wrong_streams_are_lost),
    };

    rig_records_soft(true);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
