/* SPDX-License-Identifier: Apache-2.0
 *
 * test_dram_evict.c: who goes when memory is short: the order inside a class against a plain
 * model, pins, whole sets, what is spared, areas taken from colder classes, and the bound on
 * searching.
 */
#include "tests/unit/tiers/dram_bed.h"

/* ---- the order inside a class ---------------------------------------------------------------- */

enum {
    MODEL_SLOTS = 32, /* of 32 KiB in an arena of 1 MiB */
    MODEL_STEPS = 20000,
};

#define MODEL_RECORD_BYTES 30000

/* Two arrays of cookies, the coldest first: slow and easy to believe. */
struct model {
    uint32_t lists[2][MODEL_SLOTS + 1];
    uint32_t counts[2];
};

static void model_remove(struct model *model, uint32_t cookie)
{
    for (int l = 0; l < 2; l++) {
        uint32_t kept = 0;

        for (uint32_t i = 0; i < model->counts[l]; i++) {
            if (model->lists[l][i] != cookie) {
                model->lists[l][kept++] = model->lists[l][i];
            }
        }
        model->counts[l] = kept;
    }
}

static void model_add(struct model *model, int list, uint32_t cookie)
{
    model->lists[list][model->counts[list]++] = cookie;
    while (list == 1 && model->counts[1] > (model->counts[0] + model->counts[1] + 4) / 5) {
        uint32_t demoted = model->lists[1][0];

        model_remove(model, demoted);
        model->lists[0][model->counts[0]++] = demoted;
    }
}

static uint32_t model_victim(const struct model *model)
{
    return model->counts[0] > 0 ? model->lists[0][0] : model->lists[1][0];
}

static uint32_t random_below(struct kvf_random_seeded *random, uint32_t bound)
{
    return (uint32_t)(kvf_random_seeded_next(random) % bound);
}

/* Puts and touches at random: each eviction is the one that the model names. */
static void test_order_is_segmented_lru(void **state)
{
    struct bed *bed = bed_new(1, 1);
    struct model model = {0};
    struct kvf_random_seeded random;
    uint64_t seed = 3;
    uint32_t present[MODEL_SLOTS], n_present = 0, n_evicted = 0;

    (void)state;
    print_message("seed %llu\n", (unsigned long long)seed);
    kvf_random_seeded_init(&random, seed);
    bed_open(bed);
    for (int step = 0; step < MODEL_STEPS; step++) {
        if (n_present > 0 && random_below(&random, 3) > 0) {
            uint32_t cookie = present[random_below(&random, n_present)];

            kvf_dram_touch(bed->tier, bed->entries[cookie].location);
            model_remove(&model, cookie);
            model_add(&model, 1, cookie);
        } else {
            uint32_t victim = n_present == MODEL_SLOTS ? model_victim(&model) : UINT32_MAX;
            uint32_t cookie;

            bed->n_evicted = 0;
            cookie = bed_put(bed, 0, MODEL_RECORD_BYTES);
            assert_int_equal(bed->n_evicted, victim != UINT32_MAX);
            if (victim != UINT32_MAX) {
                n_evicted++;
                assert_int_equal(bed->evicted[0], victim);
                model_remove(&model, victim);
                for (uint32_t i = 0; i < n_present; i++) {
                    if (present[i] == victim) {
                        present[i] = present[--n_present];
                    }
                }
            }
            present[n_present++] = cookie;
            model_add(&model, 0, cookie);
        }
    }
    assert_true(n_evicted > MODEL_STEPS / 4);
    assert_int_equal(bed_stat(bed).evictions, n_evicted);
    bed_free(bed);
}

/* A scan of new records does not push out what has been used again. */
static void test_scan_spares_the_used(void **state)
{
    struct bed *bed = bed_new(1, 1);
    uint32_t used[6];

    (void)state;
    bed_open(bed);
    for (int i = 0; i < 6; i++) {
        used[i] = bed_put(bed, 0, MODEL_RECORD_BYTES);
    }
    for (int i = 0; i < MODEL_SLOTS - 6; i++) {
        bed_put(bed, 0, MODEL_RECORD_BYTES);
    }
    for (int i = 0; i < 6; i++) {
        kvf_dram_touch(bed->tier, bed->entries[used[i]].location);
    }
    for (int i = 0; i < 1000; i++) {
        bed_put(bed, 0, MODEL_RECORD_BYTES);
    }
    for (int i = 0; i < 6; i++) {
        assert_true(bed_has(bed, used[i]));
    }
    bed_free(bed);
}

/* ---- what is kept ---------------------------------------------------------------------------- */

static void test_pinned_is_never_evicted(void **state)
{
    struct bed *bed = bed_new(1, 1);
    uint32_t pinned[MODEL_SLOTS], other;

    (void)state;
    bed_open(bed);
    for (int i = 0; i < MODEL_SLOTS; i++) {
        pinned[i] = bed_put(bed, 0, MODEL_RECORD_BYTES);
        if (i != 7) {
            kvf_dram_pin(bed->tier, bed->entries[pinned[i]].location);
        }
    }
    /* one is not pinned, and all new ones share its place */
    for (int i = 0; i < 100; i++) {
        bed_put(bed, 0, MODEL_RECORD_BYTES);
    }
    for (int i = 0; i < MODEL_SLOTS; i++) {
        assert_int_equal(bed_has(bed, pinned[i]), i != 7);
    }
    kvf_dram_pin(bed->tier, bed->entries[bed->n_entries - 1].location);
    assert_int_equal(bed_reserve(bed, 0, MODEL_RECORD_BYTES, &other), KVF_ERR_BUSY);
    assert_true(bed_stat(bed).busy == 1);
    /* the last unpin makes it evictable, as the most recent one */
    kvf_dram_unpin(bed->tier, bed->entries[pinned[3]].location);
    bed_put(bed, 0, MODEL_RECORD_BYTES);
    assert_false(bed_has(bed, pinned[3]));
    bed_free(bed);
}

/* A hit is pinned while it is read: it counts as used all the same. */
static void test_touched_while_pinned(void **state)
{
    struct bed *bed = bed_new(1, 1);
    uint32_t read, other;

    (void)state;
    bed_open(bed);
    read = bed_put(bed, 0, MODEL_RECORD_BYTES);
    other = bed_put(bed, 0, MODEL_RECORD_BYTES);
    kvf_dram_pin(bed->tier, bed->entries[read].location);
    kvf_dram_pin(bed->tier, bed->entries[other].location);
    kvf_dram_touch(bed->tier, bed->entries[read].location);
    kvf_dram_unpin(bed->tier, bed->entries[read].location);
    kvf_dram_unpin(bed->tier, bed->entries[other].location);
    for (int i = 0; i < 2 * MODEL_SLOTS; i++) {
        bed_put(bed, 0, MODEL_RECORD_BYTES);
    }
    assert_true(bed_has(bed, read));
    assert_false(bed_has(bed, other));
    bed_free(bed);
}

static void test_filling_is_never_evicted(void **state)
{
    struct bed *bed = bed_new(1, 1);
    uint32_t filling, other;

    (void)state;
    bed_open(bed);
    assert_int_equal(bed_reserve(bed, 0, 900000, &filling), KVF_OK);
    assert_int_equal(bed_reserve(bed, 0, 900000, &other), KVF_ERR_BUSY);
    assert_int_equal(bed_reserve(bed, 0, 9000, &other), KVF_ERR_BUSY);
    kvf_dram_publish(bed->tier, bed->entries[filling].location, 0);
    assert_int_equal(bed_reserve(bed, 0, 9000, &other), KVF_OK);
    assert_false(bed_has(bed, filling));
    bed_free(bed);
}

static void test_host_refuses(void **state)
{
    struct bed *bed = bed_new(1, 1);
    uint32_t kept = 0, other;

    (void)state;
    bed_open(bed);
    for (int i = 0; i < MODEL_SLOTS; i++) {
        uint32_t cookie = bed_put(bed, 0, MODEL_RECORD_BYTES);

        bed->entries[cookie].is_busy = i % 2 == 0;
    }
    for (int i = 0; i < 50; i++) {
        bed_put(bed, 0, MODEL_RECORD_BYTES);
    }
    for (uint32_t i = 0; i < MODEL_SLOTS; i++) {
        kept += bed_has(bed, i);
        assert_int_equal(bed_has(bed, i), i % 2 == 0);
    }
    assert_int_equal(kept, MODEL_SLOTS / 2);
    for (uint32_t i = 0; i < bed->n_entries; i++) {
        bed->entries[i].is_busy = true;
    }
    assert_int_equal(bed_reserve(bed, 0, MODEL_RECORD_BYTES, &other), KVF_ERR_BUSY);
    bed_free(bed);
}

/* However many are refused or pinned, a reserve looks at a bounded number of them. */
static void test_search_is_bounded(void **state)
{
    struct bed *bed = bed_new(8, 1);
    uint32_t other;

    (void)state;
    bed_open(bed);
    while (bed_info(bed).free_area_bytes > 0 || bed_stat(bed).area_bytes < 8 * BED_MIB) {
        bed->entries[bed_put(bed, 0, 8192)].is_busy = true;
    }
    assert_int_equal(bed_stat(bed).stored_blocks, 1024);
    bed->n_asked = 0;
    assert_int_equal(bed_reserve(bed, 0, 8192, &other), KVF_ERR_BUSY);
    assert_int_equal(bed->n_asked, KVF_DRAM_SCAN_MAX);
    /* those looked at go to the hot end, so that the search gets past any number of them */
    bed->entries[1000].is_busy = false;
    for (int i = 0; i < 1024 / KVF_DRAM_SCAN_MAX && bed_has(bed, 1000); i++) {
        bed_reserve(bed, 0, 8192, &other);
    }
    assert_false(bed_has(bed, 1000));
    /* pinned ones are not even looked at */
    for (uint32_t i = 0; i < bed->n_entries; i++) {
        bed->entries[i].is_busy = false;
        if (bed_has(bed, i) && i != 999 &&
            kvf_dram_state(bed->tier, bed->entries[i].location) == KVF_SLOT_READY) {
            kvf_dram_pin(bed->tier, bed->entries[i].location);
        }
    }
    bed->n_asked = 0;
    assert_int_equal(bed_reserve(bed, 0, 8192, &other), KVF_OK);
    assert_int_equal(bed->n_asked, 1);
    assert_false(bed_has(bed, 999));
    bed_free(bed);
}

static void test_priority_spares(void **state)
{
    struct bed *bed = bed_new(1, 1);
    uint32_t plain, dear;

    (void)state;
    bed_open(bed);
    assert_int_equal(bed_reserve(bed, 0, MODEL_RECORD_BYTES, &dear), KVF_OK);
    kvf_dram_publish(bed->tier, bed->entries[dear].location, 200); /* taken as the most */
    plain = bed_put(bed, 0, MODEL_RECORD_BYTES);
    for (int i = 0; i < MODEL_SLOTS - 2; i++) {
        bed_put(bed, 0, MODEL_RECORD_BYTES);
    }
    bed_put(bed, 0, MODEL_RECORD_BYTES);
    assert_false(bed_has(bed, plain));
    assert_true(bed_has(bed, dear));
    assert_int_equal(bed_stat(bed).reinsertions, 1);
    for (int i = 0; i < KVF_DRAM_PRIORITY_MAX * (MODEL_SLOTS - 1) - 2; i++) {
        bed_put(bed, 0, MODEL_RECORD_BYTES);
        assert_true(bed_has(bed, dear));
    }
    for (int i = 0; i < MODEL_SLOTS; i++) {
        bed_put(bed, 0, MODEL_RECORD_BYTES);
    }
    assert_false(bed_has(bed, dear));
    assert_int_equal(bed_stat(bed).reinsertions, KVF_DRAM_PRIORITY_MAX);
    bed_free(bed);
}

/* evict drops the whole set: other slots, other classes and whole areas go while we look. */
static void test_sets_go_as_one(void **state)
{
    struct bed *bed = bed_new(8, 1);
    const uint64_t sizes[4] = {20000, 60000, 200000, 500000};

    (void)state;
    bed_open(bed);
    for (uint32_t i = 0; i < 2000; i++) {
        uint32_t cookie = bed_put(bed, 0, sizes[i % 4]);

        bed->entries[cookie].set = 1 + i / 4;
    }
    assert_true(bed->n_evicted > 100);
    for (uint32_t set = 0; set < bed->n_entries / 4; set++) {
        uint32_t n_left = 0;

        for (uint32_t i = 0; i < 4; i++) {
            n_left += bed_has(bed, set * 4 + i);
        }
        assert_true(n_left == 0 || n_left == 4 || set == bed->n_entries / 4 - 1);
    }
    bed_free(bed);
}

/* ---- areas taken from other classes ---------------------------------------------------------- */

static void advance(struct bed *bed, uint64_t seconds)
{
    bed->now_ns += seconds * KVF_NS_PER_S;
    bed->tier->ops->poll(bed->tier, bed->now_ns);
}

static void test_starved_class_takes_the_coldest_area(void **state)
{
    struct bed *bed = bed_new(4, 1);
    uint32_t cookies[4][2];

    (void)state;
    bed_open(bed);
    for (int area = 0; area < 4; area++) {
        for (int i = 0; i < 2; i++) {
            cookies[area][i] = bed_put(bed, 0, 500000);
        }
        advance(bed, 1);
    }
    /* the first area came first, but the second is the one that is not used any more */
    kvf_dram_touch(bed->tier, bed->entries[cookies[0][1]].location);
    bed_put(bed, 0, 9000);
    assert_true(bed_has(bed, cookies[0][0]) && bed_has(bed, cookies[0][1]));
    assert_false(bed_has(bed, cookies[1][0]) || bed_has(bed, cookies[1][1]));
    assert_true(bed_has(bed, cookies[2][0]) && bed_has(bed, cookies[3][1]));
    assert_int_equal(bed_info(bed).areas_taken, 1);
    bed_free(bed);
}

static void test_areas_in_use_are_not_taken(void **state)
{
    struct bed *bed = bed_new(4, 1);
    uint32_t cookies[4][2], other;

    (void)state;
    bed_open(bed);
    for (int area = 0; area < 4; area++) {
        for (int i = 0; i < 2; i++) {
            cookies[area][i] = bed_put(bed, 0, 500000);
        }
        advance(bed, 1);
    }
    kvf_dram_pin(bed->tier, bed->entries[cookies[0][1]].location);
    bed->entries[cookies[1][0]].is_busy = true;
    bed_put(bed, 0, 9000);
    assert_true(bed_has(bed, cookies[0][0]) && bed_has(bed, cookies[1][1]));
    assert_false(bed_has(bed, cookies[2][0]) || bed_has(bed, cookies[2][1]));
    /* nothing left that could be had whole */
    kvf_dram_pin(bed->tier, bed->entries[cookies[3][0]].location);
    assert_int_equal(bed_reserve(bed, 0, 200000, &other), KVF_OK); /* the area of the 9000 */
    assert_int_equal(bed_reserve(bed, 0, 9000, &other), KVF_ERR_BUSY);
    bed_free(bed);
}

static void test_large_run_is_made_of_cold_areas(void **state)
{
    struct bed *bed = bed_new(16, 1);
    uint32_t cookies[32];

    (void)state;
    bed_open(bed);
    for (int i = 0; i < 32; i++) {
        cookies[i] = bed_put(bed, 0, 500000);
    }
    advance(bed, 100);
    for (int i = 0; i < 32; i++) {
        if (i < 10 || i >= 18) {
            kvf_dram_touch(bed->tier, bed->entries[cookies[i]].location);
        }
    }
    bed_put(bed, 0, 4 * BED_MIB); /* the areas 5 to 8 */
    for (int i = 0; i < 32; i++) {
        assert_int_equal(bed_has(bed, cookies[i]), i < 10 || i >= 18);
    }
    bed_free(bed);
}

/* A class that evicts what is fresh gets the areas of one that nobody uses, and not the other way
 * round. */
static void test_hot_class_grows_at_the_cost_of_a_cold_one(void **state)
{
    struct bed *bed = bed_new(4, 1);
    struct kvf_dram_class classes[2];

    (void)state;
    bed_open(bed);
    for (int i = 0; i < 6; i++) {
        bed_put(bed, 0, 500000); /* three areas */
    }
    for (int i = 0; i < 400; i++) {
        bed_put(bed, 0, 30000); /* the last one, over and over */
    }
    assert_int_equal(bed_info(bed).areas_taken, 0); /* as fresh as its own */
    advance(bed, 600);
    for (int i = 0; i < 2000; i++) {
        bed_put(bed, 0, 30000);
        advance(bed, 0);
    }
    assert_int_equal(bed_info(bed).areas_taken, 3);
    assert_int_equal(kvf_dram_classes(bed->tier, classes, 2), 1);
    assert_int_equal(classes[0].areas, 4);
    bed_free(bed);
}

/* An area of many slots is emptied in portions; others do not get in between. */
static void test_claim_goes_on_in_poll(void **state)
{
    struct bed *bed = bed_new(16, 8);
    uint32_t n_slots, other;

    (void)state;
    bed->config.arena_bytes = 16 * BED_MIB;
    bed_open(bed);
    assert_int_equal(bed_info(bed).area_bytes, BED_MIB);
    while (bed_stat(bed).evictions == 0) {
        bed_put(bed, 0, 8192);
    }
    n_slots = 16 * 128;
    assert_int_equal(bed_stat(bed).stored_blocks, n_slots);
    bed->n_evicted = 0;
    /* 15 MiB are 1920 slots: not within one call */
    assert_int_equal(bed_reserve(bed, 0, 15 * BED_MIB, &other), KVF_ERR_BUSY);
    assert_int_equal(bed->n_evicted, KVF_DRAM_DRAIN_MAX);
    assert_true(bed->tier->ops->deadline_ns(bed->tier) <= bed->now_ns);
    bed->tier->ops->poll(bed->tier, bed->now_ns);
    assert_int_equal(bed->n_evicted, 2 * KVF_DRAM_DRAIN_MAX);
    /* small ones are refused or use the area that is left to them, never one that is emptied */
    for (int i = 0; i < 200; i++) {
        if (bed_reserve(bed, 0, 8192, &other) == KVF_OK) {
            kvf_dram_publish(bed->tier, bed->entries[other].location, 0);
        }
    }
    bed_settle(bed, 0);
    assert_int_equal(bed_info(bed).areas_taken, 15);
    assert_int_equal(bed_reserve(bed, 0, 15 * BED_MIB, &other), KVF_OK);
    bed_free(bed);
}

static void test_claim_is_given_up(void **state)
{
    struct bed *bed = bed_new(16, 1);
    uint32_t held = UINT32_MAX, other;

    (void)state;
    bed_open(bed);
    while (bed_stat(bed).evictions == 0) {
        bed_put(bed, 0, 8192);
    }
    assert_int_equal(bed_reserve(bed, 0, 15 * BED_MIB, &other), KVF_ERR_BUSY);
    for (uint32_t i = 0; i < bed->n_entries; i++) {
        if (bed_has(bed, i) && i % 100 == 0) {
            kvf_dram_pin(bed->tier, bed->entries[i].location);
            held = i;
        }
    }
    assert_true(held != UINT32_MAX);
    bed_settle(bed, 0);
    advance(bed, 2);
    assert_int_equal(bed_info(bed).areas_taken, 0);
    assert_true(bed->tier->ops->deadline_ns(bed->tier) == UINT64_MAX);
    assert_int_equal(bed_reserve(bed, 0, 15 * BED_MIB, &other), KVF_ERR_BUSY);
    /* the areas do useful work again */
    for (int i = 0; i < 1500; i++) {
        bed_put(bed, 0, 8192);
    }
    assert_true(bed_stat(bed).stored_blocks > 1500);
    bed_free(bed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order_is_segmented_lru),
        cmocka_unit_test(test_scan_spares_the_used),
        cmocka_unit_test(test_pinned_is_never_evicted),
        cmocka_unit_test(test_touched_while_pinned),
        cmocka_unit_test(test_filling_is_never_evicted),
        cmocka_unit_test(test_host_refuses),
        cmocka_unit_test(test_search_is_bounded),
        cmocka_unit_test(test_priority_spares),
        cmocka_unit_test(test_sets_go_as_one),
        cmocka_unit_test(test_starved_class_takes_the_coldest_area),
        cmocka_unit_test(test_areas_in_use_are_not_taken),
        cmocka_unit_test(test_large_run_is_made_of_cold_areas),
        cmocka_unit_test(test_hot_class_grows_at_the_cost_of_a_cold_one),
        cmocka_unit_test(test_claim_goes_on_in_poll),
        cmocka_unit_test(test_claim_is_given_up),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
