/* SPDX-License-Identifier: Apache-2.0
 *
 * dram_bed.h: what the tests of the memory tier stand on: a clock that they move, a host that keeps
 * a table of entries and drops whole sets, and a work queue that runs jobs when asked.
 */
#ifndef KVF_TESTS_DRAM_BED_H
#define KVF_TESTS_DRAM_BED_H

#include "base/limits.h"
#include "tiers/tier_dram.h"
#include "tiers/work_inline.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum {
    BED_ENTRIES_MAX = 1 << 16,
    BED_EVENTS_MAX = 4096,
};

#define BED_MIB (1ull << 20)

struct bed_entry {
    kvf_location location; /* KVF_LOCATION_NONE: not stored */
    uint32_t set;          /* dropped together with the others of this set; 0: alone */
    bool is_busy;          /* the host refuses to let go of it */
};

struct bed {
    struct kvf_dram_config config;
    struct kvf_tier *tier;
    uint64_t now_ns;
    bool memory_allows;

    struct bed_entry entries[BED_ENTRIES_MAX];
    uint32_t n_entries;
    uint32_t evicted[BED_EVENTS_MAX]; /* cookies, in order, one a call of evict */
    uint32_t n_evicted;
    uint32_t n_asked; /* calls of may_evict */

    uint32_t added[BED_EVENTS_MAX], dropped[BED_EVENTS_MAX];
    uint32_t n_added, n_dropped, n_areas_ready;
};

static inline uint64_t bed_now_ns(void *arg)
{
    return ((struct bed *)arg)->now_ns;
}

static inline uint64_t bed_wall_s(void *arg)
{
    (void)arg;
    return 0;
}

static const struct kvf_clock_ops bed_clock = {.now_ns = bed_now_ns, .wall_s = bed_wall_s};

static inline bool bed_may_evict(void *ctx, kvf_location location, kvf_cookie cookie)
{
    struct bed *bed = ctx;

    bed->n_asked++;
    assert_true(cookie < bed->n_entries);
    assert_true(bed->entries[cookie].location == location);
    assert_int_equal(kvf_dram_state(bed->tier, location), KVF_SLOT_READY);
    assert_int_equal(kvf_dram_pins(bed->tier, location), 0);
    return !bed->entries[cookie].is_busy;
}

/* Drop an entry. */
static inline void bed_forget(struct bed *bed, uint32_t cookie)
{
    kvf_location location = bed->entries[cookie].location;

    assert_true(location != KVF_LOCATION_NONE);
    bed->entries[cookie].location = KVF_LOCATION_NONE;
    bed->tier->ops->drop(bed->tier, location);
}

static inline void bed_evict(void *ctx, kvf_location location, kvf_cookie cookie)
{
    struct bed *bed = ctx;
    uint32_t set = bed->entries[cookie].set;

    assert_true(bed->entries[cookie].location == location);
    if (bed->n_evicted < BED_EVENTS_MAX) {
        bed->evicted[bed->n_evicted] = cookie;
    }
    bed->n_evicted++;
    for (uint32_t i = 0; set != 0 && i < bed->n_entries; i++) {
        if (i != cookie && bed->entries[i].set == set &&
            bed->entries[i].location != KVF_LOCATION_NONE) {
            bed_forget(bed, i);
        }
    }
    bed_forget(bed, cookie);
}

static inline void bed_area_ready(void *ctx, void *base, uint64_t bytes)
{
    struct bed *bed = ctx;

    assert_non_null(base);
    assert_true(bytes > 0);
    bed->n_areas_ready++;
}

static inline void bed_piece_added(void *ctx, uint32_t piece_id)
{
    struct bed *bed = ctx;

    bed->added[bed->n_added++ % BED_EVENTS_MAX] = piece_id;
}

static inline void bed_piece_dropped(void *ctx, uint32_t piece_id)
{
    struct bed *bed = ctx;

    bed->dropped[bed->n_dropped++ % BED_EVENTS_MAX] = piece_id;
}

static inline bool bed_memory_allows(void *ctx, uint64_t bytes)
{
    (void)bytes;
    return ((struct bed *)ctx)->memory_allows;
}

/* A configuration of arena_mib MiB in areas of area_mib MiB, all in one piece, for bed_open. */
static inline struct bed *bed_new(uint64_t arena_mib, uint64_t area_mib)
{
    struct bed *bed = calloc(1, sizeof(*bed));

    assert_non_null(bed);
    bed->now_ns = 1000 * KVF_NS_PER_S;
    bed->memory_allows = true;
    kvf_dram_config_init(&bed->config);
    bed->config.arena_bytes = arena_mib * BED_MIB;
    bed->config.area_bytes = area_mib * BED_MIB;
    bed->config.env.clock = &bed_clock;
    bed->config.env.clock_arg = bed;
    bed->config.host = (struct kvf_tier_host){
        .ctx = bed,
        .may_evict = bed_may_evict,
        .evict = bed_evict,
    };
    bed->config.events = (struct kvf_dram_events){
        .ctx = bed,
        .area_ready = bed_area_ready,
        .piece_added = bed_piece_added,
        .piece_dropped = bed_piece_dropped,
    };
    bed->config.memory_allows = bed_memory_allows;
    bed->config.memory_ctx = bed;
    assert_int_equal(kvf_work_inline_open(KVF_WORK_AT_POLL, 4, &bed->config.work), KVF_OK);
    return bed;
}

static inline void bed_work(struct bed *bed)
{
    while (bed->config.work->ops->poll(bed->config.work) > 0) {
    }
}

/* Let deadlines pass until there is none within the next seconds. */
static inline void bed_settle(struct bed *bed, uint64_t seconds)
{
    uint64_t end_ns = bed->now_ns + seconds * KVF_NS_PER_S;

    bed_work(bed);
    while (bed->tier->ops->deadline_ns(bed->tier) <= end_ns) {
        uint64_t deadline_ns = bed->tier->ops->deadline_ns(bed->tier);

        bed->now_ns = deadline_ns > bed->now_ns ? deadline_ns : bed->now_ns;
        bed->tier->ops->poll(bed->tier, bed->now_ns);
        bed_work(bed);
    }
}

/* Open, with the whole arena populated. */
static inline void bed_open(struct bed *bed)
{
    char why[KVF_ERROR_TEXT_BYTES];

    if (kvf_dram_open(&bed->config, &bed->tier, why, sizeof(why)) != KVF_OK) {
        fail_msg("%s", why);
    }
    bed_work(bed);
}

static inline void bed_free(struct bed *bed)
{
    bed->config.work->ops->close(bed->config.work);
    if (bed->tier != NULL) {
        bed->tier->ops->close(bed->tier);
    }
    free(bed);
}

/* Reserve for a new entry. *cookie_out is its number, which is used only on KVF_OK. */
static inline int bed_reserve(struct bed *bed, uint16_t tenant, uint64_t record_bytes,
                              uint32_t *cookie_out)
{
    uint32_t cookie = bed->n_entries;
    kvf_location location;
    int status;

    assert_true(cookie < BED_ENTRIES_MAX);
    *cookie_out = cookie;
    bed->entries[cookie] = (struct bed_entry){.location = KVF_LOCATION_NONE};
    bed->n_entries++;
    status = bed->tier->ops->reserve(bed->tier, tenant, record_bytes, cookie, &location);
    if (status == KVF_OK) {
        assert_true(location != KVF_LOCATION_NONE);
        assert_int_equal(kvf_dram_state(bed->tier, location), KVF_SLOT_FILLING);
        bed->entries[cookie].location = location;
    } else {
        bed->n_entries--;
    }
    return status;
}

/* Reserve and publish; fails the test if it cannot. Returns the entry. */
static inline uint32_t bed_put(struct bed *bed, uint16_t tenant, uint64_t record_bytes)
{
    uint32_t cookie = 0;

    assert_int_equal(bed_reserve(bed, tenant, record_bytes, &cookie), KVF_OK);
    kvf_dram_publish(bed->tier, bed->entries[cookie].location, 0);
    return cookie;
}

static inline bool bed_has(const struct bed *bed, uint32_t cookie)
{
    return bed->entries[cookie].location != KVF_LOCATION_NONE;
}

/* A number of bytes from 1 on, each octave up to 8 KiB << (n_octaves - 1) as likely as another. */
static inline uint64_t bed_draw_bytes(struct kvf_random_seeded *random, uint32_t n_octaves)
{
    uint64_t bound_bytes = 8192ull << kvf_random_seeded_next(random) % n_octaves;

    return 1 + kvf_random_seeded_next(random) % bound_bytes;
}

static inline struct kvf_tier_stat bed_stat(const struct bed *bed)
{
    struct kvf_tier_stat stat;

    bed->tier->ops->stat(bed->tier, &stat);
    return stat;
}

static inline struct kvf_dram_info bed_info(const struct bed *bed)
{
    struct kvf_dram_info info;

    kvf_dram_info(bed->tier, &info);
    return info;
}

#endif /* KVF_TESTS_DRAM_BED_H */
