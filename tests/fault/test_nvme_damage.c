/* SPDX-License-Identifier: Apache-2.0
 *
 * test_nvme_damage.c: stores with wrong bits, missing parts, foreign content and forged records.
 * Never a crash, never wrong bytes, never a reformat: with the damage undone, all is there again.
 */
#include "tests/support/support.h"
#include "tests/unit/tiers/test_nvme_rig.h"

#include "base/crc32c.h"
#include "codec/block_format.h"
#include "tiers/nvme_format.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define SEGMENT_BYTES (64u << 10)
#define SEGMENTS      6
#define RECORDS       16

static struct rig rig;
static uint8_t *image; /* of the undamaged store */
static uint64_t image_bytes;
static uint32_t image_records;

/* Sealed and open segments, a purge, several generations. */
static void make_store(void)
{
    rig_init(&rig, 77, SEGMENT_BYTES, SEGMENTS);
    assert_int_equal(rig_open(&rig), KVF_OK);
    for (uint32_t key = 0; key < RECORDS + 20; key++) {
        assert_int_equal(rig_store(&rig, key, false), KVF_OK);
        rig_run(&rig);
    }
    assert_int_equal(rig_purge(&rig, 1), KVF_OK);
    rig_close(&rig);
    image_bytes = rig.disk_config.capacity_bytes;
    image = malloc(image_bytes);
    assert_non_null(image);
    memcpy(image, kvf_io_sim_bytes(rig.disk), image_bytes);
    rig.n_recovered = 0;
    assert_int_equal(rig_open(&rig), KVF_OK);
    image_records = rig.n_recovered;
    assert_true(image_records > 6);
    rig_close(&rig);
}

static void restore(void)
{
    if (rig.disk_config.capacity_bytes != image_bytes) {
        assert_int_equal(kvf_io_sim_resize(rig.disk, image_bytes), KVF_OK);
        rig.disk_config.capacity_bytes = image_bytes;
    }
    memcpy(kvf_io_sim_bytes(rig.disk), image, image_bytes);
}

static void drop_store(void)
{
    restore();
    rig.n_recovered = 0;
    assert_int_equal(rig_open(&rig), KVF_OK);
    assert_int_equal(rig.n_recovered, image_records);
    rig_check_all(&rig);
    rig_fini(&rig);
    free(image);
}

/* Whatever can be had is right. Returns whether the store opened. */
static bool look_at_it(void)
{
    int status = rig_open(&rig);

    if (status != KVF_OK) {
        assert_true(status == KVF_ERR_FOREIGN || status == KVF_ERR_CORRUPT ||
                    status == KVF_ERR_CONFIG);
        assert_true(strlen(rig.why) > 20);
        rig_close(&rig);
        return false;
    }
    for (uint32_t key = 0; key < RIG_KEYS; key++) {
        rig_load(&rig, key);
    }
    rig_close(&rig);
    return true;
}

static void test_flipped_bits(void **state)
{
    struct kvf_random_seeded random;
    uint32_t opened = 0, rounds = 0;

    (void)state;
    kvf_random_seeded_init(&random, kvf_test_seed());
    make_store();
    for (; rounds < 600; rounds++) {
        uint64_t where = kvf_random_seeded_next(&random) % 4;
        uint64_t at;

        restore();
        if (where == 0) { /* superblock and state, both copies */
            at = kvf_random_seeded_next(&random) % 8192 +
                 kvf_random_seeded_next(&random) % 2 * KVF_NVME_COPY_BYTES;
        } else if (where == 1) { /* a segment's first or last page */
            uint64_t segment = kvf_random_seeded_next(&random) % SEGMENTS;

            at = KVF_NVME_SEGMENT_OFFSET + segment * SEGMENT_BYTES +
                 kvf_random_seeded_next(&random) % 2 * (SEGMENT_BYTES - 4096) +
                 kvf_random_seeded_next(&random) % 200;
        } else if (where == 2) { /* the start of any page */
            at = kvf_random_seeded_next(&random) % (image_bytes / 4096) * 4096 +
                 kvf_random_seeded_next(&random) % 400;
        } else {
            at = kvf_random_seeded_next(&random) % image_bytes;
        }
        kvf_io_sim_bytes(rig.disk)[at] ^= (uint8_t)(1u << kvf_random_seeded_next(&random) % 8);
        opened += look_at_it();
    }
    assert_int_equal(opened, rounds); /* one copy of everything is enough */
    drop_store();
}

static void test_whole_pages(void **state)
{
    struct kvf_random_seeded random;

    (void)state;
    kvf_random_seeded_init(&random, kvf_test_seed());
    make_store();
    for (uint64_t page = 0; page < image_bytes / 4096; page++) {
        uint8_t *bytes;

        if (page > 3 && page < 128) {
            continue; /* nothing is there */
        }
        if (page > 130 && page < 256) {
            continue;
        }
        restore();
        bytes = kvf_io_sim_bytes(rig.disk) + page * 4096;
        if (page % 2 == 0) {
            memset(bytes, 0, 4096);
        } else {
            random.state[0] ^= page;
            for (uint32_t i = 0; i < 4096; i += 8) {
                uint64_t value = kvf_random_seeded_next(&random);

                memcpy(bytes + i, &value, 8);
            }
        }
        assert_true(look_at_it());
    }
    drop_store();
}

static void test_both_copies(void **state)
{
    static const uint64_t offsets[] = {KVF_NVME_SUPER_OFFSET, KVF_NVME_STATE_OFFSET};

    (void)state;
    make_store();
    for (uint32_t i = 0; i < 2; i++) {
        uint8_t *bytes;

        restore();
        bytes = kvf_io_sim_bytes(rig.disk);
        bytes[offsets[i] + 100] ^= 1;
        bytes[offsets[i] + KVF_NVME_COPY_BYTES + 100] ^= 1;
        assert_int_equal(rig_open(&rig), KVF_ERR_CORRUPT);
        assert_non_null(strstr(rig.why, "--format"));
        /* nothing has been written to it */
        bytes = kvf_io_sim_bytes(rig.disk);
        bytes[offsets[i] + 100] ^= 1;
        bytes[offsets[i] + KVF_NVME_COPY_BYTES + 100] ^= 1;
        assert_memory_equal(bytes, image, image_bytes);
    }
    drop_store();
}

/* Copies that have been exchanged, or written to each other's place. */
static void test_misplaced_pages(void **state)
{
    uint8_t *bytes;

    (void)state;
    make_store();
    restore();
    bytes = kvf_io_sim_bytes(rig.disk);
    memcpy(bytes, bytes + KVF_NVME_COPY_BYTES, 4096); /* copy 1 in place of copy 0 */
    assert_true(look_at_it());
    restore();
    bytes = kvf_io_sim_bytes(rig.disk) + KVF_NVME_SEGMENT_OFFSET;
    memcpy(bytes, bytes + SEGMENT_BYTES, SEGMENT_BYTES); /* segment 1 also in place of segment 0 */
    assert_true(look_at_it());
    restore();
    bytes = kvf_io_sim_bytes(rig.disk) + KVF_NVME_SEGMENT_OFFSET;
    memcpy(bytes + SEGMENT_BYTES - 4096, bytes + 2 * SEGMENT_BYTES - 4096, 4096); /* a footer */
    assert_true(look_at_it());
    drop_store();
}

static void expect_foreign(const char *what)
{
    uint8_t *copy = malloc(rig.disk_config.capacity_bytes);

    memcpy(copy, kvf_io_sim_bytes(rig.disk), rig.disk_config.capacity_bytes);
    assert_int_equal(rig_open(&rig), KVF_ERR_FOREIGN);
    assert_non_null(strstr(rig.why, what));
    assert_non_null(strstr(rig.why, "--format"));
    assert_memory_equal(kvf_io_sim_bytes(rig.disk), copy, rig.disk_config.capacity_bytes);
    free(copy);
}

static void test_foreign_drives(void **state)
{
    struct kvf_random_seeded random;
    uint8_t *bytes;

    (void)state;
    kvf_random_seeded_init(&random, kvf_test_seed());
    make_store();
    memset(kvf_io_sim_bytes(rig.disk), 0, image_bytes);
    expect_foreign("not a kvferry store");
    bytes = kvf_io_sim_bytes(rig.disk);
    for (uint64_t i = 0; i < image_bytes; i += 8) {
        uint64_t value = kvf_random_seeded_next(&random);

        memcpy(bytes + i, &value, 8);
    }
    expect_foreign("not a kvferry store");

    restore();
    bytes = kvf_io_sim_bytes(rig.disk);
    for (uint32_t copy = 0; copy < 2; copy++) {
        struct kvf_nvme_super *super = (struct kvf_nvme_super *)(bytes + (uint64_t)copy *
                                                                             KVF_NVME_COPY_BYTES);

        super->major = KVF_NVME_MAJOR + 1;
        super->crc32c = 0;
        super->crc32c = kvf_crc32c(0, super, sizeof(*super));
    }
    expect_foreign("newer");

    /* a newer minor version is fine */
    restore();
    bytes = kvf_io_sim_bytes(rig.disk);
    for (uint32_t copy = 0; copy < 2; copy++) {
        struct kvf_nvme_super *super = (struct kvf_nvme_super *)(bytes + (uint64_t)copy *
                                                                             KVF_NVME_COPY_BYTES);

        super->minor = KVF_NVME_MINOR + 1;
        super->crc32c = 0;
        super->crc32c = kvf_crc32c(0, super, sizeof(*super));
    }
    assert_true(look_at_it());
    drop_store();
}

static void test_truncated(void **state)
{
    (void)state;
    make_store();
    for (uint64_t bytes = 4096; bytes < image_bytes; bytes += 13 * 4096) {
        restore();
        assert_int_equal(kvf_io_sim_resize(rig.disk, bytes), KVF_OK);
        rig.disk_config.capacity_bytes = bytes;
        look_at_it();
    }
    drop_store();
}

/* --- forgery ---------------------------------------------------------------------------------- */

/* A payload that holds record pages: a true one of this store with its MAC, and true ones with one
 * field changed. Their record's own page is then destroyed, as by a torn write, so that a scan does
 * look at the payload. */
static void test_forged_records_in_payloads(void **state)
{
    const uint32_t victim = 4, forger = 31; /* the forger's record has 8 pages */
    uint8_t *stolen = aligned_alloc(4096, 4 * 4096);
    kvf_location location;
    uint64_t at;

    (void)state;
    rig_init(&rig, 5, 4 * SEGMENT_BYTES, SEGMENTS);
    assert_int_equal(rig_open(&rig), KVF_OK);
    assert_int_equal(rig_store(&rig, victim, false), KVF_OK);
    rig_run(&rig);
    assert_int_equal(rig_load(&rig, victim), KVF_OK);
    memcpy(stolen, rig.load_buffer, 8192); /* as a client that has a lease can */

    assert_int_equal(rig_store(&rig, forger, false), KVF_OK);
    rig_run(&rig);
    location = rig.keys[forger].location;
    rig_close(&rig);

    at = KVF_NVME_SEGMENT_OFFSET + (location & 0xfffff) * 4096 +
         (location >> 20 & 0xfffff) * 4 * SEGMENT_BYTES;
    for (uint32_t variant = 0; variant < 7; variant++) {
        uint8_t *bytes = kvf_io_sim_bytes(rig.disk);
        struct kvf_record_page *forged = (struct kvf_record_page *)(bytes + at + 4096);

        /* what would be on the drive had the forger put this payload, and had its first page been
         * lost */
        memset(bytes + at, 0, 4096);
        memcpy(forged, stolen, 8192);
        switch (variant) {
        case 1: /* another key, for which the host would take it */
            forged->header.key_id[0] = 9;
            break;
        case 2:
            forged->store.sequence += 100;
            break;
        case 3:
            forged->store.namespace_epoch = 99;
            break;
        case 4:
            forged->store.namespace_id ^= 1;
            break;
        case 5:
            forged->header.payload_crc32c ^= 1;
            break;
        case 6:
            forged->store.record_bytes = forged->header.total_bytes = 4 * 4096;
            break;
        default:
            break;
        }
        forged->header.header_crc32c = 0;
        forged->header.header_crc32c = kvf_crc32c(kvf_crc32c(0, forged, 256),
                                                  (uint8_t *)forged + 384, 4096 - 384);
        /* the footer of the first restart must not spare the scan */
        memset(bytes + KVF_NVME_SEGMENT_OFFSET + 4 * SEGMENT_BYTES - 4096, 0, 4096);
        rig.n_recovered = 0;
        assert_int_equal(rig_open(&rig), KVF_OK);
        /* not even the true copy, because it is not where it says */
        assert_int_equal(rig.n_recovered, 1);
        assert_int_equal(rig.keys[9].state, RIG_ABSENT);
        assert_int_equal(rig_load(&rig, victim), KVF_OK);
        rig_close(&rig);
    }
    free(stolen);
    rig_fini(&rig);
}

static uint32_t count_in_segment(kvf_location location)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < RIG_KEYS; i++) {
        n += rig.keys[i].state == RIG_STORED &&
             (rig.keys[i].location >> 20 & 0xfffff) == (location >> 20 & 0xfffff);
    }
    return n;
}

/* Records of an earlier generation that lie behind the records of the present one are dead, though
 * every byte of them is right. */
static void test_nothing_old_revives(void **state)
{
    kvf_location location = KVF_LOCATION_NONE;
    uint32_t key = 0;

    (void)state;
    rig_init(&rig, 6, 4 * SEGMENT_BYTES, 4);
    assert_int_equal(rig_open(&rig), KVF_OK);
    /* until a segment that was full has been opened again and has one record */
    while (rig.n_reclaimed == 0 || (location & 0xfffff) != 1) {
        key = (key + 1) % RIG_KEYS;
        if (rig.keys[key].state == RIG_ABSENT) {
            assert_int_equal(rig_store(&rig, key, false), KVF_OK);
            rig_run(&rig);
            location = rig.keys[key].location;
        }
    }
    assert_int_equal(count_in_segment(location), 1);
    rig_close(&rig);
    assert_int_equal(rig_open(&rig), KVF_OK);
    assert_int_equal(rig.keys[key].location, location);
    assert_int_equal(count_in_segment(location), 1);
    rig_check_all(&rig);
    rig_fini(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_flipped_bits),
        cmocka_unit_test(test_whole_pages),
        cmocka_unit_test(test_both_copies),
        cmocka_unit_test(test_misplaced_pages),
        cmocka_unit_test(test_foreign_drives),
        cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_forged_records_in_payloads),
        cmocka_unit_test(test_nothing_old_revives),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
