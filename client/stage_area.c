/* SPDX-License-Identifier: Apache-2.0
 *
 * stage_area.c: take, shrink and give back staging pages, next fit (layout: stage_area.h).
 */
#include "client/stage_area.h"

#include <assert.h>
#include <stdlib.h>

#include "base/debug.h"
#include "kvferry.h"

#define GENERATION_MASK 0xffffffu

/* Describe an extent at both of its ends; generation 0: it is free. */
static void extent_set(struct kvf_stage_area *area, uint32_t page, uint32_t pages,
                       uint32_t generation)
{
    struct kvf_stage_entry end = {.pages = pages, .is_taken = generation != 0};

    area->entries[page + pages - 1] = end;
    area->entries[page] = end;
    area->entries[page].generation = generation;
}

/* The ends of an extent that is about to become part of another one. */
static void extent_clear(struct kvf_stage_area *area, uint32_t page, uint32_t pages)
{
    area->entries[page] = (struct kvf_stage_entry){0};
    area->entries[page + pages - 1] = (struct kvf_stage_entry){0};
}

int kvf_stage_area_init(struct kvf_stage_area *area, uint64_t bytes)
{
    uint64_t pages = bytes / KVF_STAGE_PAGE_BYTES;

    *area = (struct kvf_stage_area){0};
    if (pages == 0 || pages > KVF_STAGE_PAGES_MAX) {
        return KVF_ERR_INVALID;
    }
    area->entries = calloc(pages, sizeof(*area->entries));
    if (area->entries == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    area->n_pages = (uint32_t)pages;
    area->free_pages = area->n_pages;
    extent_set(area, 0, area->n_pages, 0);
    return KVF_OK;
}

void kvf_stage_area_fini(struct kvf_stage_area *area)
{
    free(area->entries);
    *area = (struct kvf_stage_area){0};
}

int kvf_stage_area_take(struct kvf_stage_area *area, uint32_t pages, uint32_t *page_out)
{
    uint32_t page = area->rover;
    uint32_t seen = 0;
    uint32_t length;

    assert(pages > 0);
    if (pages > area->n_pages) {
        return KVF_ERR_TOO_LARGE;
    }
    if (pages > area->free_pages) {
        return KVF_ERR_BUSY;
    }
    for (;;) {
        length = area->entries[page].pages;
        if (!area->entries[page].is_taken && length >= pages) {
            break;
        }
        seen += length;
        if (seen >= area->n_pages) {
            return KVF_ERR_BUSY;
        }
        page = page + length == area->n_pages ? 0 : page + length;
    }
    area->generation = (area->generation + 1) & GENERATION_MASK;
    if (area->generation == 0) {
        area->generation = 1;
    }
    if (length > pages) {
        extent_set(area, page + pages, length - pages, 0);
    }
    extent_set(area, page, pages, area->generation);
    area->free_pages -= pages;
    area->rover = page + pages == area->n_pages ? 0 : page + pages;
    *page_out = page;
    return KVF_OK;
}

/* Make [page, page + pages), which has no ends set, free and join it with free neighbours. */
static void make_free(struct kvf_stage_area *area, uint32_t page, uint32_t pages)
{
    uint32_t next = page + pages;

    area->free_pages += pages;
    if (next < area->n_pages && !area->entries[next].is_taken) {
        uint32_t behind = area->entries[next].pages;

        extent_clear(area, next, behind);
        pages += behind;
    }
    if (page > 0 && !area->entries[page - 1].is_taken) {
        uint32_t before = area->entries[page - 1].pages;

        extent_clear(area, page - before, before);
        page -= before;
        pages += before;
    }
    if (area->rover > page && area->rover < page + pages) {
        area->rover = page; /* it must stay the first page of an extent */
    }
    extent_set(area, page, pages, 0);
}

void kvf_stage_area_shrink(struct kvf_stage_area *area, uint32_t page, uint32_t pages)
{
    struct kvf_stage_entry kept = area->entries[page];

    kvf_debug_assert(kept.generation != 0 && pages > 0 && pages <= kept.pages);
    if (pages == kept.pages) {
        return;
    }
    extent_clear(area, page, kept.pages);
    extent_set(area, page, pages, kept.generation);
    area->entries[page].record_bytes = kept.record_bytes;
    area->entries[page].is_in_flight = kept.is_in_flight;
    make_free(area, page + pages, kept.pages - pages);
}

void kvf_stage_area_give(struct kvf_stage_area *area, uint32_t page)
{
    uint32_t pages = area->entries[page].pages;

    kvf_debug_assert(area->entries[page].generation != 0);
    extent_clear(area, page, pages);
    make_free(area, page, pages);
}

struct kvf_stage_entry *kvf_stage_area_find(const struct kvf_stage_area *area, uint32_t page,
                                            uint32_t generation)
{
    if (page >= area->n_pages || generation == 0 || area->entries[page].generation != generation) {
        return NULL;
    }
    return &area->entries[page];
}
