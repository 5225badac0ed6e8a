/* SPDX-License-Identifier: Apache-2.0
 *
 * test_peer_hints.c: who is said to have what, against a plain table that knows it too: adding,
 * removing, sources that close and are swept while others go on, a table that is full.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "agent/peer_hints.h"
#include "base/random.h"
#include "tests/support/support.h"

#define BLOCKS  3000
#define SOURCES 5
#define STEPS   60000

static uint64_t model[BLOCKS]; /* sources, by block */

static void name_of(uint32_t block, uint8_t key_id[32])
{
    for (uint32_t i = 0; i < 32; i++) {
        key_id[i] = (uint8_t)((block * 2654435761u + i * 40503u) >> (i % 4 * 8));
    }
    memcpy(key_id + 8, &block, sizeof(block)); /* no two have the same tag */
}

static uint64_t find(const struct kvf_hints *hints, uint32_t block)
{
    uint32_t record_bytes = 0;
    uint8_t key_id[32];
    uint64_t sources;

    name_of(block, key_id);
    sources = kvf_hints_find(hints, key_id, block % 7, &record_bytes);
    if (sources != 0) {
        assert_int_equal(record_bytes, 5000 + block);
    }
    assert_int_equal(kvf_hints_find(hints, key_id, block % 7 + 1, &record_bytes), 0);
    return sources;
}

static void check_all(const struct kvf_hints *hints)
{
    for (uint32_t block = 0; block < BLOCKS; block++) {
        assert_int_equal(find(hints, block), model[block]);
    }
}

static void test_model(void **state)
{
    struct kvf_random_seeded random;
    struct kvf_hints hints;
    uint32_t sources[SOURCES];
    uint8_t key_id[32];

    (void)state;
    kvf_random_seeded_init(&random, kvf_test_seed());
    memset(model, 0, sizeof(model));
    assert_int_equal(kvf_hints_open(&hints, BLOCKS), KVF_OK);
    for (uint32_t i = 0; i < SOURCES; i++) {
        sources[i] = kvf_hints_source_open(&hints);
        assert_int_not_equal(sources[i], KVF_HINT_NONE);
    }
    for (uint32_t step = 0; step < STEPS; step++) {
        uint64_t lot = kvf_random_seeded_next(&random);
        uint32_t block = (uint32_t)(lot % BLOCKS);
        uint32_t *source = &sources[(lot >> 20) % SOURCES];

        name_of(block, key_id);
        if ((lot >> 32) % 2000 == 0) { /* its link ends, and another comes */
            kvf_hints_source_close(&hints, *source);
            for (uint32_t i = 0; i < BLOCKS; i++) {
                model[i] &= ~(UINT64_C(1) << *source);
            }
            do {
                *source = kvf_hints_source_open(&hints);
                (void)kvf_hints_sweep(&hints);
            } while (*source == KVF_HINT_NONE);
        } else if ((lot >> 32) % 3 == 0) {
            kvf_hints_remove(&hints, *source, key_id, block % 7);
            model[block] &= ~(UINT64_C(1) << *source);
        } else {
            kvf_hints_add(&hints, *source, key_id, block % 7, 5000 + block);
            model[block] |= UINT64_C(1) << *source;
        }
        assert_int_equal(find(&hints, block), model[block]);
    }
    check_all(&hints);
    for (uint32_t i = 0; i < SOURCES; i++) {
        kvf_hints_source_close(&hints, sources[i]);
    }
    memset(model, 0, sizeof(model));
    check_all(&hints);
    while (kvf_hints_sweep(&hints)) {
    }
    assert_int_equal(hints.count, 0);
    assert_int_equal(hints.dropped_count, 0);
    kvf_hints_close(&hints);
}

static void test_full(void **state)
{
    struct kvf_hints hints;
    uint8_t key_id[32];
    uint32_t first;
    uint32_t n = 0;

    (void)state;
    assert_int_equal(kvf_hints_open(&hints, 1024), KVF_OK);
    first = kvf_hints_source_open(&hints);
    for (uint32_t block = 0; block < 1500; block++) {
        name_of(block, key_id);
        kvf_hints_add(&hints, first, key_id, block % 7, 5000 + block);
    }
    assert_int_equal(hints.count, 1024);
    assert_int_equal(hints.dropped_count, 1500 - 1024);
    for (uint32_t block = 0; block < 1500; block++) {
        n += find(&hints, block) != 0;
    }
    assert_int_equal(n, 1024);
    /* all sources: a closed one is not given out before its hints are out of the table */
    for (uint32_t i = 1; i < KVF_HINT_SOURCES; i++) {
        assert_int_not_equal(kvf_hints_source_open(&hints), KVF_HINT_NONE);
    }
    assert_int_equal(kvf_hints_source_open(&hints), KVF_HINT_NONE);
    kvf_hints_source_close(&hints, first);
    assert_int_equal(kvf_hints_source_open(&hints), KVF_HINT_NONE);
    while (kvf_hints_sweep(&hints)) {
    }
    assert_int_equal(hints.count, 0);
    assert_int_equal(kvf_hints_source_open(&hints), first);
    kvf_hints_close(&hints);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model),
        cmocka_unit_test(test_full),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
