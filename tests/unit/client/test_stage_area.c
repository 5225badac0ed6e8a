/* SPDX-License-Identifier: Apache-2.0
 *
 * test_stage_area.c: the allocator of staging slots, by examples and against a naive model.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "client/stage_area.h"
#include "kvferry.h"
#include "tests/support/support.h"

static void slots_are_taken_and_joined(void **state)
{
    struct kvf_stage_area area;
    uint32_t pages[4];

    (void)state;
    assert_int_equal(kvf_stage_area_init(&area, 0), KVF_ERR_INVALID);
    assert_int_equal(kvf_stage_area_init(&area, 16 * 4096), KVF_OK);
    assert_int_equal(kvf_stage_area_take(&area, 17, &pages[0]), KVF_ERR_TOO_LARGE);
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(kvf_stage_area_take(&area, 4, &pages[i]), KVF_OK);
        assert_int_equal(pages[i], i * 4);
    }
    assert_int_equal(kvf_stage_area_take(&area, 1, &pages[0]), KVF_ERR_BUSY);
    kvf_stage_area_give(&area, 0);
    kvf_stage_area_give(&area, 8);
    /* 8 pages are free, but not in one piece */
    assert_int_equal(area.free_pages, 8);
    assert_int_equal(kvf_stage_area_take(&area, 5, &pages[0]), KVF_ERR_BUSY);
    kvf_stage_area_give(&area, 4);
    assert_int_equal(kvf_stage_area_take(&area, 12, &pages[0]), KVF_OK);
    assert_int_equal(pages[0], 0);
    kvf_stage_area_give(&area, 12);
    kvf_stage_area_give(&area, 0);
    assert_int_equal(kvf_stage_area_take(&area, 16, &pages[0]), KVF_OK);
    kvf_stage_area_fini(&area);
    kvf_stage_area_fini(&area);
}

static void handles_of_other_uses_are_not_found(void **state)
{
    struct kvf_stage_area area;
    uint32_t page;
    uint32_t generation;

    (void)state;
    assert_int_equal(kvf_stage_area_init(&area, 8 * 4096), KVF_OK);
    assert_int_equal(kvf_stage_area_take(&area, 4, &page), KVF_OK);
    generation = area.entries[page].generation;
    assert_non_null(kvf_stage_area_find(&area, page, generation));
    assert_null(kvf_stage_area_find(&area, page, generation + 1));
    assert_null(kvf_stage_area_find(&area, page + 3, generation)); /* its last page */
    assert_null(kvf_stage_area_find(&area, page, 0));
    assert_null(kvf_stage_area_find(&area, 8, generation));
    kvf_stage_area_give(&area, page);
    assert_null(kvf_stage_area_find(&area, page, generation));
    assert_int_equal(kvf_stage_area_take(&area, 8, &page), KVF_OK);
    assert_null(kvf_stage_area_find(&area, 0, generation));
    kvf_stage_area_fini(&area);
}

/* The model: which slot owns each page. */
#define MODEL_PAGES 97

static void model_check(const struct kvf_stage_area *area, const uint8_t owner[MODEL_PAGES])
{
    uint32_t page = 0;
    uint32_t free_pages = 0;
    bool was_free = false;

    while (page < MODEL_PAGES) {
        const struct kvf_stage_entry *entry = &area->entries[page];

        assert_in_range(entry->pages, 1, MODEL_PAGES - page);
        assert_int_equal(area->entries[page + entry->pages - 1].pages, entry->pages);
        assert_int_equal(entry->is_taken, owner[page] != 0);
        assert_int_equal(entry->is_taken, entry->generation != 0);
        assert_false(was_free && !entry->is_taken); /* neighbours are joined */
        was_free = !entry->is_taken;
        for (uint32_t i = 0; i < entry->pages; i++) {
            assert_int_equal(owner[page + i], owner[page]);
        }
        free_pages += entry->is_taken ? 0 : entry->pages;
        page += entry->pages;
    }
    assert_int_equal(area->free_pages, free_pages);
    assert_int_not_equal(area->entries[area->rover].pages, 0);
}

/* Would it fit anywhere? */
static bool model_fits(const uint8_t owner[MODEL_PAGES], uint32_t pages)
{
    uint32_t run = 0;

    for (uint32_t i = 0; i < MODEL_PAGES; i++) {
        run = owner[i] == 0 ? run + 1 : 0;
        if (run == pages) {
            return true;
        }
    }
    return false;
}

static void random_use_agrees_with_a_model(void **state)
{
    uint8_t owner[MODEL_PAGES] = {0};
    uint32_t first[20] = {0};
    uint32_t length[20] = {0}; /* 0: this slot is not taken */
    struct kvf_random_seeded random;
    struct kvf_stage_area area;

    (void)state;
    kvf_random_seeded_init(&random, kvf_test_seed());
    assert_int_equal(kvf_stage_area_init(&area, MODEL_PAGES * 4096), KVF_OK);
    for (uint32_t step = 0; step < 20000; step++) {
        uint32_t slot = (uint32_t)(kvf_random_seeded_next(&random) % 20);
        uint32_t pages = 1 + (uint32_t)(kvf_random_seeded_next(&random) % 30);

        if (length[slot] == 0) {
            int status = kvf_stage_area_take(&area, pages, &first[slot]);

            assert_int_equal(status, model_fits(owner, pages) ? KVF_OK : KVF_ERR_BUSY);
            if (status == KVF_OK) {
                length[slot] = pages;
                memset(owner + first[slot], (int)slot + 1, pages);
            }
        } else if (pages < length[slot]) {
            kvf_stage_area_shrink(&area, first[slot], pages);
            memset(owner + first[slot] + pages, 0, length[slot] - pages);
            length[slot] = pages;
        } else {
            kvf_stage_area_give(&area, first[slot]);
            memset(owner + first[slot], 0, length[slot]);
            length[slot] = 0;
        }
        model_check(&area, owner);
    }
    kvf_stage_area_fini(&area);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slots_are_taken_and_joined),
        cmocka_unit_test(handles_of_other_uses_are_not_found),
        cmocka_unit_test(random_use_agrees_with_a_model),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
