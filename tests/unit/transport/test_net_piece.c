/* SPDX-License-Identifier: Apache-2.0
 *
 * test_net_piece.c: pieces of a record in any order and of any size, twice or out of bounds: the
 * bytes that are there, and the sum, which is right or not claimed.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "base/crc32c.h"
#include "base/random.h"
#include "tests/support/support.h"
#include "transport/net_piece.h"
#include "transport/proto.h"

#define RECORD_MAX 40000u
#define CUTS_MAX   32u

static uint8_t source[RECORD_MAX];
static uint8_t record[RECORD_MAX + 1]; /* one more: nothing is written there */

static void begin(struct kvf_net_fetch *fetch, uint32_t bytes)
{
    memset(record, 0xa5, sizeof(record));
    *fetch = (struct kvf_net_fetch){.record = record, .record_bytes = bytes, .come_bytes = 77};
    kvf_net_piece_begin(fetch);
}

static int take(struct kvf_net_fetch *fetch, uint32_t from, uint32_t to)
{
    return kvf_net_piece_take(fetch, from, source + from, to - from);
}

static void check_whole(const struct kvf_net_fetch *fetch)
{
    uint32_t bytes = fetch->record_bytes;

    assert_int_equal(fetch->come_bytes, bytes);
    assert_memory_equal(record, source, bytes);
    assert_int_equal(record[bytes], 0xa5);
    if (fetch->is_summed) {
        assert_int_equal(fetch->payload_crc32c, kvf_crc32c(0, source + KVF_RECORD_PAGE_BYTES,
                                                           bytes - KVF_RECORD_PAGE_BYTES));
    }
}

/* Cut at random places, also inside of the page: in order, and with two pieces exchanged. */
static void test_orders(void **state)
{
    struct kvf_random_seeded dice;

    (void)state;
    kvf_random_seeded_init(&dice, kvf_test_seed());
    kvf_random_seeded_ops.fill(&dice, source, sizeof(source));
    for (uint32_t round = 0; round < 500; round++) {
        uint32_t bytes = KVF_RECORD_PAGE_BYTES + 1 +
                         (uint32_t)(kvf_random_seeded_next(&dice) %
                                    (RECORD_MAX - KVF_RECORD_PAGE_BYTES - 1));
        uint32_t n = 2 + (uint32_t)(kvf_random_seeded_next(&dice) % (CUTS_MAX - 2));
        uint32_t early = round % 2 == 0 ? n : (uint32_t)(kvf_random_seeded_next(&dice) % (n - 1));
        uint32_t cuts[CUTS_MAX + 1] = {0};
        struct kvf_net_fetch fetch;

        for (uint32_t i = 1; i < n; i++) { /* n pieces of one byte or more */
            uint32_t room = bytes - cuts[i - 1] - (n - i);

            cuts[i] = cuts[i - 1] + 1 +
                      (uint32_t)(kvf_random_seeded_next(&dice) % (round % 3 == 0 ? 300 : room)) %
                          room;
        }
        cuts[n] = bytes;
        begin(&fetch, bytes);
        for (uint32_t i = 0; i < n; i++) {
            uint32_t piece = i == early ? i + 1 : i == early + 1 ? i - 1 : i;

            assert_int_equal(take(&fetch, cuts[piece], cuts[piece + 1]), KVF_OK);
        }
        assert_int_equal(fetch.is_summed, early == n);
        check_whole(&fetch);
    }
}

/* The same bytes twice in the place of others: as many as there should be, and no sum of them. */
static void test_twice(void **state)
{
    struct kvf_net_fetch fetch;

    (void)state;
    begin(&fetch, 30000);
    assert_int_equal(take(&fetch, 0, 10000), KVF_OK);
    assert_int_equal(take(&fetch, 10000, 20000), KVF_OK);
    assert_true(fetch.is_summed);
    assert_int_equal(take(&fetch, 10000, 20000), KVF_OK);
    assert_int_equal(fetch.come_bytes, 30000);
    assert_false(fetch.is_summed);
}

static void test_bounds(void **state)
{
    struct kvf_net_fetch fetch;

    (void)state;
    begin(&fetch, 20000);
    assert_int_equal(take(&fetch, 0, 20001), KVF_ERR_PROTOCOL);
    assert_int_equal(take(&fetch, 20000, 20001), KVF_ERR_PROTOCOL);
    assert_int_equal(take(&fetch, 30000, 30001), KVF_ERR_PROTOCOL);
    assert_int_equal(kvf_net_piece_take(&fetch, UINT32_MAX, source, 2), KVF_ERR_PROTOCOL);
    assert_int_equal(record[0], 0xa5);
    assert_int_equal(take(&fetch, 0, 12000), KVF_OK);
    assert_int_equal(take(&fetch, 8000, 18000), KVF_ERR_PROTOCOL); /* more than is missing */
    assert_true(fetch.is_summed);
    assert_int_equal(take(&fetch, 12000, 20000), KVF_OK);
    assert_true(fetch.is_summed);
    check_whole(&fetch);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_orders),
        cmocka_unit_test(test_twice),
        cmocka_unit_test(test_bounds),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
