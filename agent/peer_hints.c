/* SPDX-License-Identifier: Apache-2.0
 *
 * peer_hints.c: which peers are said to have which blocks.
 */
#include "agent/peer_hints.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define SWEEP_BUCKETS 2048 /* in one go: some microseconds */

static uint32_t round_up(uint32_t capacity)
{
    uint32_t rounded = 1024;

    while (rounded < capacity && rounded < 1u << 31) {
        rounded *= 2;
    }
    return rounded;
}

uint64_t kvf_hints_bytes(uint32_t capacity)
{
    return (uint64_t)round_up(capacity) * (sizeof(struct kvf_hint) + sizeof(uint32_t));
}

int kvf_hints_open(struct kvf_hints *hints, uint32_t capacity)
{
    memset(hints, 0, sizeof(*hints));
    hints->capacity = round_up(capacity);
    hints->free_head = KVF_HINT_NONE;
    hints->hints = calloc(hints->capacity, sizeof(*hints->hints));
    hints->buckets = malloc(hints->capacity * sizeof(*hints->buckets));
    if (hints->hints == NULL || hints->buckets == NULL) {
        kvf_hints_close(hints);
        return KVF_ERR_NO_MEMORY;
    }
    memset(hints->buckets, 0xff, hints->capacity * sizeof(*hints->buckets));
    return KVF_OK;
}

void kvf_hints_close(struct kvf_hints *hints)
{
    free(hints->hints);
    free(hints->buckets);
    memset(hints, 0, sizeof(*hints));
}

/* Names are keyed hashes: any part of one spreads evenly. */
static uint64_t tag_of(const uint8_t key_id[32], uint32_t shard)
{
    uint64_t tag;

    memcpy(&tag, key_id + 8, sizeof(tag));
    return tag ^ shard * UINT64_C(0x9e3779b97f4a7c15);
}

/* The link to the hint of this tag, or to the end of its chain. */
static uint32_t *link_of(const struct kvf_hints *hints, uint64_t tag)
{
    uint32_t *link = &hints->buckets[tag & (hints->capacity - 1)];

    while (*link != KVF_HINT_NONE && hints->hints[*link].tag != tag) {
        link = &hints->hints[*link].next;
    }
    return link;
}

static void take_out(struct kvf_hints *hints, uint32_t *link)
{
    uint32_t number = *link;
    struct kvf_hint *hint = &hints->hints[number];

    *link = hint->next;
    hint->next = hints->free_head;
    hints->free_head = number;
    hints->count--;
}

uint32_t kvf_hints_source_open(struct kvf_hints *hints)
{
    uint64_t used = hints->open_sources | hints->swept_sources;

    for (uint32_t source = 0; source < KVF_HINT_SOURCES; source++) {
        if ((used >> source & 1) == 0) {
            hints->open_sources |= UINT64_C(1) << source;
            return source;
        }
    }
    return KVF_HINT_NONE;
}

void kvf_hints_source_close(struct kvf_hints *hints, uint32_t source)
{
    uint64_t bit = UINT64_C(1) << source;

    assert(source < KVF_HINT_SOURCES && (hints->open_sources & bit) != 0);
    hints->open_sources &= ~bit;
    hints->swept_sources |= bit;
}

bool kvf_hints_sweep(struct kvf_hints *hints)
{
    if (hints->sweep_sources == 0) {
        hints->sweep_sources = hints->swept_sources;
        hints->sweep = 0;
    }
    for (uint32_t i = 0; hints->sweep_sources != 0 && i < SWEEP_BUCKETS; i++) {
        uint32_t *link = &hints->buckets[hints->sweep];

        while (*link != KVF_HINT_NONE) {
            struct kvf_hint *hint = &hints->hints[*link];

            hint->sources &= ~hints->sweep_sources;
            if (hint->sources == 0) {
                take_out(hints, link);
            } else {
                link = &hint->next;
            }
        }
        if (++hints->sweep == hints->capacity) {
            hints->swept_sources &= ~hints->sweep_sources;
            hints->sweep_sources = 0;
        }
    }
    return hints->swept_sources != 0;
}

void kvf_hints_add(struct kvf_hints *hints, uint32_t source, const uint8_t key_id[32],
                   uint32_t shard, uint32_t record_bytes)
{
    uint64_t tag = tag_of(key_id, shard);
    uint32_t *link = link_of(hints, tag);
    uint32_t number = *link;

    if (number == KVF_HINT_NONE) {
        number = hints->free_head;
        if (number != KVF_HINT_NONE) {
            hints->free_head = hints->hints[number].next;
        } else if (hints->fresh < hints->capacity) {
            number = hints->fresh++;
        } else {
            hints->dropped_count++;
            return;
        }
        hints->hints[number] = (struct kvf_hint){.tag = tag, .next = KVF_HINT_NONE};
        *link = number;
        hints->count++;
    }
    hints->hints[number].sources |= UINT64_C(1) << source;
    hints->hints[number].record_bytes = record_bytes;
}

void kvf_hints_remove(struct kvf_hints *hints, uint32_t source, const uint8_t key_id[32],
                      uint32_t shard)
{
    uint32_t *link = link_of(hints, tag_of(key_id, shard));

    if (*link != KVF_HINT_NONE) {
        hints->hints[*link].sources &= ~(UINT64_C(1) << source);
        if (hints->hints[*link].sources == 0) {
            take_out(hints, link);
        }
    }
}

uint64_t kvf_hints_find(const struct kvf_hints *hints, const uint8_t key_id[32], uint32_t shard,
                        uint32_t *record_bytes_out)
{
    uint32_t number = *link_of(hints, tag_of(key_id, shard));

    if (number == KVF_HINT_NONE) {
        return 0;
    }
    *record_bytes_out = hints->hints[number].record_bytes;
    return hints->hints[number].sources & hints->open_sources;
}
