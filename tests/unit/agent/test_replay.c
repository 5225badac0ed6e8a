/* SPDX-License-Identifier: Apache-2.0
 *
 * test_replay.c: replay answers as a store of its size does. Beside the agent stands a cache that
 * is simple enough to be right where both must agree; where they need not, bounds hold.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>

#include "agent/replay.h"
#include "base/clock.h"
#include "base/limits.h"
#include "base/random.h"

#define RECORD_BYTES (1ull << 20)
#define MS           KVF_NS_PER_MS

static struct kvf_replay *open_replay(const struct kvf_replay_config *config)
{
    struct kvf_replay *replay = NULL;
    char why[KVF_ERROR_TEXT_BYTES] = "";

    if (kvf_replay_open(config, &replay, why, sizeof(why)) != KVF_OK) {
        fail_msg("%s", why);
    }
    return replay;
}

static struct kvf_replay_config memory_of(uint64_t blocks)
{
    return (struct kvf_replay_config){.record_bytes = RECORD_BYTES,
                                      .dram_bytes = blocks * RECORD_BYTES};
}

/* The chain of a prompt: blocks first, first + 1, ... */
static uint32_t ask(struct kvf_replay *replay, uint64_t at_ns, uint64_t first, uint32_t n)
{
    uint64_t blocks[4096];
    struct kvf_replay_hits hits = {.dram = UINT32_MAX};

    assert_true(n <= 4096);
    for (uint32_t i = 0; i < n; i++) {
        blocks[i] = first + i;
    }
    assert_int_equal(kvf_replay_request(replay, at_ns, blocks, n, &hits), KVF_OK);
    return hits.dram + hits.nvme;
}

static void test_what_fits_is_hit(void **state)
{
    struct kvf_replay_config config = memory_of(1000);
    struct kvf_replay *replay = open_replay(&config);
    struct kvf_replay_counts counts;

    (void)state;
    assert_int_equal(ask(replay, 0, 100, 300), 0);
    assert_int_equal(ask(replay, MS, 100, 300), 300);
    assert_int_equal(ask(replay, 2 * MS, 100, 400), 300); /* the same prompt goes on */
    assert_int_equal(ask(replay, 3 * MS, 100, 400), 400);
    assert_int_equal(ask(replay, 4 * MS, 5000, 1), 0);
    assert_int_equal(ask(replay, 4 * MS, 5000, 0), 0);
    kvf_replay_counts(replay, &counts);
    assert_int_equal(counts.requests, 6);
    assert_int_equal(counts.blocks, 300 + 300 + 400 + 400 + 1);
    assert_int_equal(counts.hits_dram, 1000);
    assert_int_equal(counts.hits_nvme, 0);
    assert_int_equal(counts.puts, 401);
    assert_int_equal(counts.writes, 0);
    kvf_replay_close(replay);
}

/* Prompts longer than a request may be, and than a batch. */
static void test_long_prompts(void **state)
{
    struct kvf_replay_config config = memory_of(4000);
    struct kvf_replay *replay = open_replay(&config);

    (void)state;
    assert_int_equal(ask(replay, 0, 1, 2500), 0);
    assert_int_equal(ask(replay, MS, 1, 2600), 2500);
    assert_int_equal(ask(replay, 2 * MS, 1, 2600), 2600);
    kvf_replay_close(replay);
}

/* As many blocks stay as memory holds, within a class's share of areas; the first of a chain last
 * to go. */
static void test_capacity(void **state)
{
    static const uint64_t sizes[] = {16, 100, 777, 2500};

    (void)state;
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct kvf_replay_config config = memory_of(sizes[i]);
        struct kvf_replay *replay = open_replay(&config);
        struct kvf_replay_counts counts;

        assert_int_equal(kvf_replay_dram_blocks(&config), sizes[i]);
        for (uint64_t block = 0; block < 3 * sizes[i]; block++) {
            (void)ask(replay, block * MS, block * 10, 1);
        }
        kvf_replay_counts(replay, &counts);
        assert_int_equal(counts.puts, 3 * sizes[i]);
        assert_in_range(counts.puts - counts.evicted, sizes[i] - sizes[i] / 16,
                        sizes[i] + sizes[i] / 16);
        kvf_replay_close(replay);
    }
}

static void test_drive_holds_what_memory_does_not(void **state)
{
    struct kvf_replay_config config = memory_of(64);
    struct kvf_replay *replay;
    struct kvf_replay_counts counts;

    (void)state;
    config.nvme_bytes = 4ull << 30;
    replay = open_replay(&config);
    for (uint64_t chain = 0; chain < 40; chain++) {
        assert_int_equal(ask(replay, chain * MS, chain * 100, 16), 0);
    }
    for (uint64_t chain = 0; chain < 40; chain++) {
        assert_int_equal(ask(replay, (100 + chain) * MS, chain * 100, 16), 16);
    }
    kvf_replay_counts(replay, &counts);
    assert_int_equal(counts.hits_dram + counts.hits_nvme, 640);
    assert_true(counts.hits_nvme >= 576);
    assert_int_equal(counts.writes, 640);
    kvf_replay_close(replay);
}

/* No more is written than the budget gives and a burst has saved up. */
static void test_budget(void **state)
{
    struct kvf_replay_config config = memory_of(256);
    uint64_t budget_blocks = 2, seconds = 400, burst_blocks = 256;
    struct kvf_replay *replay;
    struct kvf_replay_counts counts;

    (void)state;
    config.nvme_bytes = 64ull << 30;
    config.write_budget = budget_blocks * RECORD_BYTES;
    config.admission = KVF_ADMISSION_ALL;
    replay = open_replay(&config);
    for (uint64_t i = 0; i < seconds; i++) {
        (void)ask(replay, i * KVF_NS_PER_S, i * 100, 8);
    }
    kvf_replay_counts(replay, &counts);
    assert_in_range(counts.writes, budget_blocks * seconds,
                    budget_blocks * seconds + burst_blocks + 1);
    assert_true(counts.rejected > 0);
    kvf_replay_close(replay);
}

/* Two runs of one trace are the same run. */
static void run_random(struct kvf_replay_counts *counts)
{
    struct kvf_replay_config config = memory_of(500);
    struct kvf_random_seeded random;
    struct kvf_replay *replay;

    config.nvme_bytes = 2ull << 30;
    replay = open_replay(&config);
    kvf_random_seeded_init(&random, 11);
    for (uint64_t i = 0; i < 500; i++) {
        uint64_t chain = kvf_random_seeded_next(&random) % 100;
        uint32_t n = 1 + (uint32_t)(kvf_random_seeded_next(&random) % 40);

        (void)ask(replay, i * 100 * MS, chain * 1000, n);
    }
    kvf_replay_counts(replay, counts);
    kvf_replay_close(replay);
}

static void test_repeats(void **state)
{
    struct kvf_replay_counts first, second;

    (void)state;
    run_random(&first);
    run_random(&second);
    assert_memory_equal(&first, &second, sizeof(first));
    assert_true(first.hits_nvme > 0 && first.reclaimed > 0);
}

static void refuse(const struct kvf_replay_config *config, const char *word)
{
    struct kvf_replay *replay = NULL;
    char why[KVF_ERROR_TEXT_BYTES] = "";

    assert_int_equal(kvf_replay_open(config, &replay, why, sizeof(why)), KVF_ERR_CONFIG);
    assert_null(replay);
    assert_non_null(strstr(why, word));
}

static void test_refused(void **state)
{
    struct kvf_replay_config config = memory_of(15);

    (void)state;
    refuse(&config, "16 to ");
    config = memory_of(100);
    config.record_bytes = 4096;
    refuse(&config, "payload");
    config = memory_of(100);
    config.nvme_bytes = 1ull << 60;
    refuse(&config, "at most as many of a drive");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_fits_is_hit),
        cmocka_unit_test(test_long_prompts),
        cmocka_unit_test(test_capacity),
        cmocka_unit_test(test_drive_holds_what_memory_does_not),
        cmocka_unit_test(test_budget),
        cmocka_unit_test(test_repeats),
        cmocka_unit_test(test_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
