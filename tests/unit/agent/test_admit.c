/* SPDX-License-Identifier: Apache-2.0
 *
 * test_admit.c: which blocks go to a drive: behind those before them, by the write budget.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "base/random.h"
#include "tests/unit/agent/core_bed.h"

#define RATE (100u << 20) /* bytes a second: a bucket of 60 seconds of it */

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

/* Show a block to admission, as a put or a hit does. True: it is on its way to the drive. */
static bool consider(struct core_bed *bed, struct kvf_entry *entry, const struct kvf_entry *parent)
{
    uint8_t none[32] = {0};

    kvf_admit_consider(&bed->agent, entry, parent != NULL, parent != NULL ? parent->key_id : none);
    return entry->nvme == KVF_NVME_QUEUED;
}

static struct kvf_entry *head(struct core_bed *bed)
{
    struct kvf_entry *entry = core_bed_block(bed);

    entry->is_head = 1;
    return entry;
}

static void budget(struct core_bed *bed, uint64_t rate_bytes_s, int64_t tokens_bytes)
{
    kvf_admit_init(&bed->agent.drives[0], rate_bytes_s, 0);
    bed->agent.drives[0].bucket.tokens_bytes = tokens_bytes;
    bed->agent.drives[0].bucket.updated_ns = bed->agent.now_ns;
}

static void test_no_limit(void **state)
{
    struct core_bed *bed = *state;

    budget(bed, 0, 0);
    for (int i = 0; i < 10; i++) {
        assert_true(consider(bed, head(bed), NULL));
    }
    assert_int_equal(bed->agent.metrics.nvme_admitted_blocks, 10);
    assert_int_equal(bed->agent.writeback_bytes, 10 * BED_RECORD_BYTES);
}

/* Half full or more: at first sight. Below: at second. Empty: never. */
static void test_sights(void **state)
{
    struct core_bed *bed = *state;
    struct kvf_entry *entry;
    int64_t capacity;

    budget(bed, RATE, 0);
    capacity = bed->agent.drives[0].bucket.capacity_bytes;
    assert_int_equal(capacity, 60ll * RATE);
    budget(bed, RATE, capacity / 2);
    assert_true(consider(bed, head(bed), NULL));

    budget(bed, RATE, capacity / 2 - 1);
    entry = head(bed);
    assert_false(consider(bed, entry, NULL));
    assert_true(consider(bed, entry, NULL));

    budget(bed, RATE, 0);
    entry = head(bed);
    assert_false(consider(bed, entry, NULL));
    assert_false(consider(bed, entry, NULL));
    assert_true(bed->agent.metrics.nvme_rejected_blocks >= 3);
}

/* A block is of no use without those before it. */
static void test_prefix_closed(void **state)
{
    struct core_bed *bed = *state;
    struct kvf_entry *first, *second, *third;

    budget(bed, 0, 0);
    first = head(bed);
    second = core_bed_block(bed);
    third = core_bed_block(bed);
    assert_false(consider(bed, third, second)); /* its parent is in memory only */
    assert_false(consider(bed, second, NULL));  /* no head, and no parent known */
    assert_true(consider(bed, first, NULL));
    assert_true(consider(bed, second, first));
    assert_true(consider(bed, third, second));
    /* a parent that is not here at all */
    first = core_bed_block(bed);
    second = core_bed_block(bed);
    kvf_index_unlink(&bed->agent.index, first);
    assert_false(consider(bed, second, first));
}

/* The rule is for each block: what is new behind a head that is written waits for its second sight
 * too, while the bucket is low. All of it is seen at once, not one block more with each look. */
static void test_branches(void **state)
{
    struct core_bed *bed = *state;
    struct kvf_entry *chain[4];

    budget(bed, RATE, 60ll * RATE);
    chain[0] = head(bed);
    assert_true(consider(bed, chain[0], NULL));
    for (int i = 1; i < 4; i++) {
        chain[i] = core_bed_block(bed);
    }
    budget(bed, RATE, 10ll * RATE);
    for (int i = 1; i < 4; i++) {
        assert_false(consider(bed, chain[i], chain[i - 1]));
    }
    for (int i = 1; i < 4; i++) {
        assert_true(consider(bed, chain[i], chain[i - 1]));
    }
}

static void test_empty_bucket_ends_a_chain(void **state)
{
    struct core_bed *bed = *state;
    struct kvf_entry *first, *second, *third;

    first = head(bed);
    second = core_bed_block(bed);
    third = core_bed_block(bed);
    budget(bed, RATE, 60ll * RATE);
    bed->config.nvme[0].admission = KVF_ADMISSION_ALL;
    assert_true(consider(bed, first, NULL));
    budget(bed, RATE, 1);
    assert_true(consider(bed, second, first)); /* which uses it up */
    assert_false(consider(bed, third, second));
    assert_false(consider(bed, third, second));
}

/* nvme.admission takes one rule, whatever is saved up. */
static void test_one_rule(void **state)
{
    struct core_bed *bed = *state;
    struct kvf_entry *entry;

    bed->config.nvme[0].admission = KVF_ADMISSION_ALL;
    budget(bed, RATE, RATE);
    assert_true(consider(bed, head(bed), NULL));
    bed->config.nvme[0].admission = KVF_ADMISSION_SECOND_SIGHT;
    for (int limited = 0; limited < 2; limited++) {
        budget(bed, limited ? RATE : 0, limited ? 60ll * RATE : 0);
        entry = head(bed);
        assert_false(consider(bed, entry, NULL));
        assert_true(consider(bed, entry, NULL));
    }
}

/* As many blocks may come between two sights as half of the table holds. */
static void test_memory_of_sights(void **state)
{
    struct core_bed *bed = *state;
    struct kvf_entry *entry = head(bed);
    struct kvf_random_seeded random;
    uint8_t kept[32];

    bed->config.nvme[0].admission = KVF_ADMISSION_SECOND_SIGHT;
    budget(bed, 0, 0);
    kvf_random_seeded_init(&random, 7);
    assert_false(consider(bed, entry, NULL));
    memcpy(kept, entry->key_id, sizeof(kept));
    for (uint32_t i = 0; i < KVF_GHOST_ENTRIES / 2; i++) {
        struct kvf_entry other = *entry; /* judged by its name only */

        kvf_random_seeded_ops.fill(&random, other.key_id, sizeof(other.key_id));
        kvf_admit_decide(&bed->agent, &other, false, kept, false);
        assert_false(other.is_admitted);
    }
    assert_true(consider(bed, entry, NULL));
}

static void test_bucket(void **state)
{
    struct core_bed *bed = *state;
    struct kvf_drive *drive = &bed->agent.drives[0];

    budget(bed, RATE, 0);
    bed->agent.now_ns += KVF_NS_PER_S;
    kvf_admit_spend(drive, 0);
    assert_int_equal(kvf_admit_credit(drive), RATE);
    kvf_admit_spend(drive, 3 * (uint64_t)RATE);
    assert_int_equal(kvf_admit_credit(drive), 0); /* below zero, and told as none */
    bed->agent.now_ns += 3 * KVF_NS_PER_S;
    kvf_admit_spend(drive, 0);
    assert_int_equal(kvf_admit_credit(drive), RATE);
    bed->agent.now_ns += 3600 * KVF_NS_PER_S;
    kvf_admit_spend(drive, 0);
    assert_int_equal(kvf_admit_credit(drive), 60 * (uint64_t)RATE); /* no more than it holds */
    /* what was kept over a restart counts, up to that */
    kvf_admit_init(drive, RATE, 5 * (uint64_t)RATE);
    assert_int_equal(kvf_admit_credit(drive), 5 * (uint64_t)RATE);
    kvf_admit_init(drive, RATE, UINT64_C(1) << 60);
    assert_int_equal(kvf_admit_credit(drive), 60 * (uint64_t)RATE);
    /* a small budget still pays for a burst */
    kvf_admit_init(drive, 1000, 0);
    assert_true(drive->bucket.capacity_bytes >= 64 << 20);
}

static void test_reinsertion(void **state)
{
    struct core_bed *bed = *state;
    struct kvf_drive *drive = &bed->agent.drives[0];

    budget(bed, 0, 0);
    assert_true(kvf_admit_allows_reinsertion(drive));
    budget(bed, RATE, 30ll * RATE);
    assert_true(kvf_admit_allows_reinsertion(drive));
    budget(bed, RATE, 30ll * RATE - 1);
    assert_false(kvf_admit_allows_reinsertion(drive));
}

static void test_never(void **state)
{
    struct core_bed *bed = *state;
    struct kvf_entry *entry;

    budget(bed, 0, 0);
    entry = head(bed);
    entry->is_no_write = 1;
    assert_false(consider(bed, entry, NULL));
    entry = head(bed);
    assert_true(consider(bed, entry, NULL));
    assert_int_equal(bed->agent.metrics.nvme_admitted_blocks, 1);
    assert_true(consider(bed, entry, NULL)); /* queued already: not twice */
    assert_int_equal(bed->agent.metrics.nvme_admitted_blocks, 1);
    /* the backlog is bounded: what does not fit is dropped, and counted */
    bed->agent.writeback_max_bytes = bed->agent.writeback_bytes;
    assert_false(consider(bed, head(bed), NULL));
    assert_int_equal(bed->agent.metrics.nvme_dropped_blocks, 1);
    bed->agent.n_drives = 0;
    assert_false(consider(bed, head(bed), NULL));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_no_limit),    TEST(test_sights),           TEST(test_prefix_closed),
        TEST(test_branches),    TEST(test_one_rule),         TEST(test_empty_bucket_ends_a_chain),
        TEST(test_bucket),      TEST(test_memory_of_sights), TEST(test_never),
        TEST(test_reinsertion),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
