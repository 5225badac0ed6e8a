/* SPDX-License-Identifier: Apache-2.0
 *
 * test_tiers.c: what tier.h promises, asked of every tier of this build and of every wrapper around
 * each of them, through the ops table alone.
 *
 * A tier is added to the suite by one entry in subjects[]: how it is opened. What it can do, its
 * flags say. Records are real ones (page and payload), named and filled after their number, so that
 * any bytes that are not a record's own are found.
 */
#include "codec/block_format.h"
#include "codec/codec.h"
#include "tests/support/support.h"
#include "tiers/tier_delay.h"
#include "tiers/tier_dram.h"
#include "tiers/tier_fault.h"
#include "tiers/tier_nvme.h"
#include "tiers/work_inline.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#define MIB (1ull << 20)

enum {
    N_ENTRIES = 8192,
    N_CALLS = 256,
    NAMESPACE_ID = 5,
    RECORD_BYTES_MAX = 1 << 20,
    PATIENCE_S = 120, /* far more than any call takes: only a hang gets there */
};

/* What the host knows of a record, by its number, which is also its cookie. */
struct entry {
    bool is_stored;
    bool is_kept; /* the host refuses to let go of it */
    kvf_location location;
    uint64_t record_bytes;
    uint64_t stored_bytes; /* of a log tier; elsewhere as record_bytes */
};

struct bench;

struct subject {
    const char *name;
    int (*open)(struct bench *bench); /* fills bench->tier, and bench->dram if it is one */
    const char *fault, *delay;        /* what goes around it; NULL: nothing */
    bool packs;                       /* keeps some records in fewer bytes */
};

struct bench {
    const struct subject *subject;
    struct kvf_test_dir dir;
    struct kvf_work_queue *work;
    struct kvf_tier_host host;
    struct kvf_env env;
    struct kvf_tier *tier; /* as the host sees it */
    struct kvf_tier *dram; /* addressable: the tier itself, for publish */
    struct entry entries[N_ENTRIES];
    bool is_polling, keeps_some;
    unsigned n_let_go, n_moved, n_recovered, n_lost;
};

/* ---- records --------------------------------------------------------------------------------- */

static struct kvf_block_name name_of(uint32_t number)
{
    struct kvf_block_name name = {
        .namespace_id = NAMESPACE_ID,
        .shard = (uint16_t)(number % 3),
        .shard_count = 3,
    };
    struct kvf_random_seeded random;

    kvf_random_seeded_init(&random, 1000 + number);
    kvf_random_seeded_ops.fill(&random, name.key_id, sizeof(name.key_id));
    return name;
}

static uint64_t bytes_of(uint32_t number)
{
    struct kvf_random_seeded random;
    uint64_t bound_bytes;

    kvf_random_seeded_init(&random, 2000 + number);
    bound_bytes = (uint64_t)KVF_RECORD_PAGE_BYTES << kvf_random_seeded_next(&random) % 5;
    return KVF_RECORD_PAGE_BYTES + 1 + kvf_random_seeded_next(&random) % (bound_bytes - 1);
}

static void record_fill(uint32_t number, uint64_t record_bytes, void *record)
{
    struct kvf_record_page *page = record;
    unsigned char *payload = (unsigned char *)record + KVF_RECORD_PAGE_BYTES;
    struct kvf_block_name name = name_of(number);
    struct kvf_random_seeded random;

    kvf_random_seeded_init(&random, number);
    kvf_random_seeded_ops.fill(&random, payload, record_bytes - KVF_RECORD_PAGE_BYTES);
    for (uint64_t i = 0; number % 2 == 0 && i < record_bytes - KVF_RECORD_PAGE_BYTES; i++) {
        payload[i] &= 3; /* for a tier that keeps records in fewer bytes */
    }
    assert_int_equal(kvf_block_describe_bytes(page, payload, record_bytes - KVF_RECORD_PAGE_BYTES),
                     KVF_OK);
    memcpy(page->header.key_id, name.key_id, sizeof(name.key_id));
    page->header.shard = name.shard;
    page->header.shard_count = name.shard_count;
    kvf_block_seal_header(page);
}

/* Is this the record with this number, whatever the store part says? */
static bool record_is(uint32_t number, uint64_t record_bytes, const void *record)
{
    static unsigned char *expected;
    size_t store_end = offsetof(struct kvf_record_page, store) + sizeof(struct kvf_block_store);

    if (expected == NULL) {
        expected = aligned_alloc(KVF_RECORD_PAGE_BYTES, RECORD_BYTES_MAX);
        assert_non_null(expected);
    }
    record_fill(number, record_bytes, expected);
    return memcmp(record, expected, offsetof(struct kvf_record_page, store)) == 0 &&
           memcmp((const unsigned char *)record + store_end, expected + store_end,
                  record_bytes - store_end) == 0;
}

/* ---- the host -------------------------------------------------------------------------------- */

static bool host_may_evict(void *ctx, kvf_location location, kvf_cookie cookie)
{
    struct bench *bench = ctx;

    assert_true(bench->entries[cookie].is_stored);
    assert_true(bench->entries[cookie].location == location);
    return !bench->entries[cookie].is_kept;
}

static void host_evict(void *ctx, kvf_location location, kvf_cookie cookie)
{
    struct bench *bench = ctx;

    assert_true(bench->entries[cookie].is_stored);
    bench->entries[cookie].is_stored = false;
    bench->n_let_go++;
    bench->tier->ops->drop(bench->tier, location);
}

static bool host_reclaim(void *ctx, kvf_location location, kvf_cookie cookie)
{
    struct bench *bench = ctx;

    assert_true(bench->is_polling);
    assert_true(bench->entries[cookie].is_stored);
    assert_true(bench->entries[cookie].location == location);
    if (bench->keeps_some && cookie % 4 == 0) {
        return true;
    }
    bench->entries[cookie].is_stored = false;
    bench->n_let_go++;
    return false;
}

static void host_moved(void *ctx, kvf_location from, kvf_location to, kvf_cookie cookie)
{
    struct bench *bench = ctx;

    assert_true(bench->is_polling);
    assert_true(bench->entries[cookie].is_stored);
    assert_true(bench->entries[cookie].location == from);
    bench->entries[cookie].location = to;
    bench->entries[cookie].is_stored = to != KVF_LOCATION_NONE;
    bench->n_moved += to != KVF_LOCATION_NONE;
}

static kvf_cookie host_recovered(void *ctx, const struct kvf_block_name *name,
                                 kvf_location location, uint64_t record_bytes, uint64_t sequence)
{
    struct bench *bench = ctx;

    (void)sequence;
    for (uint32_t number = 0; number < N_ENTRIES; number++) {
        struct kvf_block_name expected = name_of(number);

        if (memcmp(expected.key_id, name->key_id, sizeof(expected.key_id)) == 0) {
            assert_int_equal(name->shard, expected.shard);
            assert_int_equal(name->shard_count, expected.shard_count);
            assert_int_equal(name->namespace_id, NAMESPACE_ID);
            bench->entries[number] = (struct entry){
                .is_stored = true,
                .location = location,
                .record_bytes = record_bytes,
            };
            bench->n_recovered++;
            return number;
        }
    }
    fail_msg("a record that was never stored");
    return KVF_COOKIE_NONE;
}

static void host_lost(void *ctx, kvf_location location, kvf_cookie cookie, int status)
{
    struct bench *bench = ctx;

    assert_true(status < 0);
    assert_true(bench->entries[cookie].location == location);
    bench->entries[cookie].is_stored = false;
    bench->n_lost++;
}

/* ---- subjects -------------------------------------------------------------------------------- */

static int open_dram(struct bench *bench)
{
    struct kvf_dram_config config;
    char why[256];
    int status;

    kvf_dram_config_init(&config);
    config.arena_bytes = 32 * MIB;
    config.area_bytes = MIB;
    config.work = bench->work;
    config.host = bench->host;
    status = kvf_dram_open(&config, &bench->tier, why, sizeof(why));
    bench->dram = bench->tier;
    return status;
}

static int open_nvme_as(struct bench *bench, bool packs)
{
    char path[KVF_TEST_PATH_BYTES], why[512];
    struct kvf_nvme_config config;
    int status;

    kvf_test_dir_path(&bench->dir, "store", path);
    kvf_nvme_config_init(&config);
    config.path = path;
    config.bytes = 17 * MIB;
    config.segment_bytes = 2 * MIB;
    config.work = bench->work;
    config.host = bench->host;
    config.packs = packs;
    config.pack_count = KVF_NVME_PACK_MAX;
    config.pack_bytes = RECORD_BYTES_MAX;
    status = kvf_nvme_open(&config, &bench->tier, why, sizeof(why));
    if (status != KVF_OK) {
        print_message("nvme: %s\n", why);
    }
    return status;
}

static int open_nvme(struct bench *bench)
{
    return open_nvme_as(bench, false);
}

static int open_nvme_packing(struct bench *bench)
{
    return open_nvme_as(bench, true);
}

/* The wrappers' rules never come true here: what they do when they act is in their own tests. */
static const struct subject subjects[] = {
    {"dram", open_dram, NULL, NULL, false},
    {"dram in fault", open_dram, "reserve:error@1000000000", NULL, false},
    {"dram in delay", open_dram, NULL, "load:1ms", false},
    {"nvme", open_nvme, NULL, NULL, false},
    {"nvme that packs in delay", open_nvme_packing, NULL, "load:200us+300us,seed=6", true},
    {"nvme in fault", open_nvme, "load:error@1000000000,store:busy@1000000000", NULL, false},
    {"nvme in delay", open_nvme, NULL, "load:200us+300us,store:100us+200us,seed=5", false},
    {"nvme in fault in delay", open_nvme, "load:busy@1000000000", "load:100us,store:100us", false},
};

enum {
    N_SUBJECTS = sizeof(subjects) / sizeof(subjects[0]),
};

static unsigned bench_pump(struct bench *bench)
{
    const struct timespec pause = {.tv_nsec = 50000};
    unsigned n_done;

    bench->is_polling = true;
    n_done = bench->tier->ops->poll(bench->tier, kvf_now_ns());
    n_done += bench->work->ops->poll(bench->work);
    bench->is_polling = false;
    if (n_done == 0) {
        nanosleep(&pause, NULL);
    }
    return n_done;
}

static void bench_open_tier(struct bench *bench)
{
    const struct subject *subject = bench->subject;
    char error[256];

    assert_int_equal(kvf_work_inline_open(KVF_WORK_AT_POLL, 1024, &bench->work), KVF_OK);
    assert_int_equal(subject->open(bench), KVF_OK);
    if (subject->fault != NULL &&
        kvf_fault_open(bench->tier, subject->fault, &bench->tier, error, sizeof(error)) != KVF_OK) {
        fail_msg("%s", error);
    }
    if (subject->delay != NULL && kvf_delay_open(bench->tier, subject->delay, &bench->env,
                                                 &bench->tier, error, sizeof(error)) != KVF_OK) {
        fail_msg("%s", error);
    }
    if (bench->tier->ops->recover != NULL) {
        bench->is_polling = true;
        assert_int_equal(bench->tier->ops->recover(bench->tier), KVF_OK);
        bench->is_polling = false;
    }
    while (bench_pump(bench) > 0) { /* memory is populated one area at a time */
    }
}

static void bench_close_tier(struct bench *bench)
{
    bench->work->ops->close(bench->work);
    bench->tier->ops->close(bench->tier);
    bench->tier = NULL;
}

static int bench_setup(void **state)
{
    struct bench *bench = calloc(1, sizeof(*bench));

    if (bench == NULL) {
        return -1;
    }
    bench->subject = *state;
    bench->env = kvf_env_system();
    bench->host = (struct kvf_tier_host){
        .ctx = bench,
        .may_evict = host_may_evict,
        .evict = host_evict,
        .reclaim = host_reclaim,
        .moved = host_moved,
        .recovered = host_recovered,
        .lost = host_lost,
    };
    kvf_test_dir_create(&bench->dir);
    bench_open_tier(bench);
    *state = bench;
    return 0;
}

static int bench_teardown(void **state)
{
    struct bench *bench = *state;

    if (bench->tier != NULL) {
        bench_close_tier(bench);
    }
    kvf_test_dir_remove(&bench->dir);
    free(bench);
    return 0;
}

static bool is_addressable(const struct bench *bench)
{
    return (bench->tier->ops->flags & KVF_TIER_ADDRESSABLE) != 0;
}

/* ---- calls ----------------------------------------------------------------------------------- */

struct call {
    struct kvf_tier_io io;
    struct bench *bench;
    uint32_t number;
    unsigned char *record;
    bool is_free, is_done;
};

static struct call calls[N_CALLS];

static struct call *call_take(struct bench *bench, uint32_t number, uint64_t record_bytes)
{
    for (unsigned i = 0; i < N_CALLS; i++) {
        struct call *call = &calls[i];

        if (call->record == NULL) {
            call->record = aligned_alloc(KVF_RECORD_PAGE_BYTES, RECORD_BYTES_MAX);
            assert_non_null(call->record);
            call->is_free = true;
        }
        if (call->is_free) {
            call->is_free = false;
            call->is_done = false;
            call->bench = bench;
            call->number = number;
            memset(&call->io, 0, sizeof(call->io));
            call->io.name = name_of(number);
            call->io.cookie = number;
            call->io.record = call->record;
            call->io.record_bytes = record_bytes;
            call->io.status = KVF_ERR_INTERNAL;
            call->io.owner = call;
            return call;
        }
    }
    fail_msg("more calls at once than the suite makes");
    return NULL;
}

static void call_done(struct kvf_tier_io *io)
{
    struct call *call = io->owner;

    assert_true(call->bench->is_polling); /* never from inside store or load */
    assert_false(call->is_done);
    call->is_done = true;
}

static void store_done(struct kvf_tier_io *io)
{
    struct call *call = io->owner;
    struct entry *entry = &call->bench->entries[call->number];

    call_done(io);
    if (io->status == KVF_OK) {
        assert_true(io->location != KVF_LOCATION_NONE);
        *entry = (struct entry){
            .is_stored = true,
            .location = io->location,
            .record_bytes = io->record_bytes,
            .stored_bytes = io->stored_bytes,
        };
        assert_true(io->stored_bytes <= io->record_bytes);
    }
}

static void wait_for(struct bench *bench, struct call *call)
{
    uint64_t end_ns = kvf_now_ns() + PATIENCE_S * KVF_NS_PER_S;

    while (!call->is_done) {
        bench_pump(bench);
        assert_true(kvf_now_ns() < end_ns);
    }
    call->is_free = true;
}

/* Begin to store a record of a log tier. */
static int store_begin(struct bench *bench, uint32_t number, uint64_t record_bytes, bool durable,
                       struct call **call_out)
{
    struct call *call = call_take(bench, number, record_bytes);
    int status;

    record_fill(number, record_bytes, call->record);
    call->io.durable = durable;
    call->io.done = store_done;
    status = bench->tier->ops->store(bench->tier, &call->io);
    call->is_free = status != KVF_OK;
    *call_out = call;
    return status;
}

static int put_bytes(struct bench *bench, uint32_t number, uint64_t record_bytes, bool durable)
{
    struct entry *entry = &bench->entries[number];
    struct call *call;
    int status;

    assert_false(entry->is_stored);
    if (is_addressable(bench)) {
        kvf_location location;

        status = bench->tier->ops->reserve(bench->tier, 0, record_bytes, number, &location);
        if (status == KVF_OK) {
            unsigned char *memory = bench->tier->ops->address(bench->tier, location);

            assert_int_equal((uintptr_t)memory % KVF_RECORD_PAGE_BYTES, 0);
            record_fill(number, record_bytes, memory);
            *entry = (struct entry){
                .is_stored = true,
                .location = location,
                .record_bytes = record_bytes,
                .stored_bytes = record_bytes,
            };
            kvf_dram_publish(bench->dram, location, 0);
        }
        return status;
    }
    status = store_begin(bench, number, record_bytes, durable, &call);
    if (status != KVF_OK) {
        return status;
    }
    wait_for(bench, call);
    return call->io.status;
}

static int put(struct bench *bench, uint32_t number)
{
    return put_bytes(bench, number, bytes_of(number), false);
}

/* Get what the host believes to be there, and check it. KVF_OK, or what a load answered. */
static int get(struct bench *bench, uint32_t number)
{
    struct entry entry = bench->entries[number];
    struct call *call;

    assert_true(entry.is_stored);
    if (is_addressable(bench)) {
        const void *memory = bench->tier->ops->address(bench->tier, entry.location);

        assert_true(record_is(number, entry.record_bytes, memory));
        return KVF_OK;
    }
    call = call_take(bench, number, entry.record_bytes);
    call->io.location = entry.location;
    call->io.done = call_done;
    if (bench->tier->ops->load(bench->tier, &call->io) != KVF_OK) {
        fail_msg("a single load did not start");
    }
    wait_for(bench, call);
    if (call->io.status == KVF_OK) {
        assert_true(record_is(number, entry.record_bytes, call->record));
    }
    return call->io.status;
}

static uint32_t check_all(struct bench *bench)
{
    uint32_t n_stored = 0;

    for (uint32_t number = 0; number < N_ENTRIES; number++) {
        if (bench->entries[number].is_stored) {
            assert_int_equal(get(bench, number), KVF_OK);
            n_stored++;
        }
    }
    return n_stored;
}

static struct kvf_tier_stat stat_of(struct bench *bench)
{
    struct kvf_tier_stat stat;

    bench->tier->ops->stat(bench->tier, &stat);
    return stat;
}

/* ---- the suite ------------------------------------------------------------------------------- */

static void check_table(void **state)
{
    struct bench *bench = *state;
    const struct kvf_tier_ops *ops = bench->tier->ops;
    bool is_listed = false;

    assert_int_equal(ops->abi, KVF_TIER_ABI);
    assert_non_null(ops->drop);
    assert_non_null(ops->poll);
    assert_non_null(ops->deadline_ns);
    assert_non_null(ops->stat);
    assert_non_null(ops->close);
    assert_int_equal(ops->reserve != NULL, is_addressable(bench));
    assert_int_equal(ops->address != NULL, is_addressable(bench));
    assert_int_equal(ops->store != NULL, !is_addressable(bench));
    assert_int_equal(ops->load != NULL, !is_addressable(bench));
    assert_int_equal(ops->recover != NULL, (ops->flags & KVF_TIER_PERSISTENT) != 0);
    for (unsigned i = 0; kvf_tiers[i] != NULL; i++) {
        is_listed |= strcmp(kvf_tiers[i]->name, ops->name) == 0 && kvf_tiers[i]->kind == ops->kind;
        /* the fastest comes first */
        assert_true(i == 0 || kvf_tiers[i - 1]->kind < kvf_tiers[i]->kind);
    }
    assert_true(is_listed);
    ops->close(NULL); /* what a failed open left */
}

static void check_keeps(void **state)
{
    struct bench *bench = *state;
    struct kvf_tier_stat stat;
    uint64_t record_bytes = 0;
    uint64_t stored_bytes = 0;

    for (uint32_t number = 0; number < 60; number++) {
        assert_int_equal(put(bench, number), KVF_OK);
        record_bytes += bench->entries[number].record_bytes;
        stored_bytes += bench->entries[number].stored_bytes;
    }
    assert_true((stored_bytes < record_bytes) == bench->subject->packs);
    assert_int_equal(check_all(bench), 60);
    stat = stat_of(bench);
    assert_int_equal(stat.stored_blocks, 60);
    /* with or without what pads records to whole pages */
    assert_true(stat.stored_bytes >= stored_bytes &&
                stat.stored_bytes < stored_bytes + 60 * KVF_RECORD_PAGE_BYTES);
    assert_int_equal(stat.stores, 60);
    assert_true(stat.capacity_bytes >= 8 * MIB);
    assert_false(stat.off || stat.writes_off);
    assert_true(stat.area_stored_bytes <= stat.area_bytes);
}

static void check_sizes(void **state)
{
    struct bench *bench = *state;
    static const uint64_t sizes[] = {4097, 8191, 8192, 8193, 12288, 65536, 65537, 1 << 20};

    for (uint32_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        assert_int_equal(put_bytes(bench, i, sizes[i], false), KVF_OK);
    }
    check_all(bench);
}

static void check_too_large(void **state)
{
    struct bench *bench = *state;
    kvf_location location;
    struct call *call;

    assert_int_equal(put(bench, 0), KVF_OK);
    if (is_addressable(bench)) {
        assert_int_equal(bench->tier->ops->reserve(bench->tier, 0, 65 * MIB, 1, &location),
                         KVF_ERR_TOO_LARGE);
    } else {
        call = call_take(bench, 1, 8192);
        record_fill(1, 8192, call->record);
        ((struct kvf_record_page *)call->record)->header.total_bytes = 65 * MIB;
        call->io.record_bytes = 65 * MIB; /* refused by its length, before it is read */
        call->io.done = call_done;
        assert_int_equal(bench->tier->ops->store(bench->tier, &call->io), KVF_ERR_TOO_LARGE);
        call->is_free = true;
    }
    assert_int_equal(check_all(bench), 1);
    assert_int_equal(stat_of(bench).stored_blocks, 1);
}

static void check_drop(void **state)
{
    struct bench *bench = *state;

    for (uint32_t number = 0; number < 40; number++) {
        assert_int_equal(put(bench, number), KVF_OK);
    }
    for (uint32_t number = 0; number < 40; number += 2) {
        assert_true(bench->entries[number].is_stored);
        bench->entries[number].is_stored = false;
        bench->tier->ops->drop(bench->tier, bench->entries[number].location);
    }
    for (uint32_t number = 100; number < 120; number++) {
        assert_int_equal(put(bench, number), KVF_OK);
    }
    assert_int_equal(check_all(bench), 40);
    assert_int_equal(stat_of(bench).stored_blocks, 40);
    assert_int_equal(stat_of(bench).drops, 20);
}

/* More than fits at once: each call that did not start had no effect, each other one ends once. */
static void check_busy(void **state)
{
    struct bench *bench = *state;
    static struct call *started[N_CALLS];
    uint32_t n_started = 0, n_busy = 0, number = 0;

    if (is_addressable(bench)) {
        int status = KVF_OK;

        for (; status == KVF_OK && number < N_ENTRIES; number++) {
            status = put_bytes(bench, number, 100000, false);
            if (status == KVF_OK) {
                bench->entries[number].is_kept = true;
            }
        }
        assert_int_equal(status, KVF_ERR_BUSY);
        assert_int_equal(check_all(bench), number - 1);
        assert_int_equal(stat_of(bench).stored_blocks, number - 1);
        assert_int_equal(stat_of(bench).busy, 1);
        /* a search may be bounded, so that it takes several to find the one that can go */
        bench->entries[0].is_kept = false;
        for (int i = 0; i < 100 && status == KVF_ERR_BUSY; i++) {
            status = put_bytes(bench, number, 100000, false);
        }
        assert_int_equal(status, KVF_OK);
        assert_false(bench->entries[0].is_stored);
        return;
    }
    while (n_busy < 5 && n_started < N_CALLS - 1) {
        int status = store_begin(bench, number, 8192, false, &started[n_started]);

        assert_true(status == KVF_OK || status == KVF_ERR_BUSY);
        n_busy += status == KVF_ERR_BUSY;
        n_started += status == KVF_OK;
        number++;
    }
    assert_int_equal(n_busy, 5);
    for (uint32_t i = 0; i < n_started; i++) {
        wait_for(bench, started[i]);
        assert_int_equal(started[i]->io.status, KVF_OK);
    }
    assert_int_equal(check_all(bench), n_started);
    assert_int_equal(stat_of(bench).stored_blocks, n_started);
    assert_true(stat_of(bench).busy >= 5);
}

/* Three times what fits: what the host has not let go of is still right. */
static void check_turnover(void **state)
{
    struct bench *bench = *state;
    uint64_t capacity_bytes = stat_of(bench).capacity_bytes, put_bytes_sum = 0;
    uint32_t number = 0, n_stored;

    bench->keeps_some = true;
    for (; put_bytes_sum < 3 * capacity_bytes && number < N_ENTRIES; number++) {
        uint64_t record_bytes = 4 * bytes_of(number);
        int status = put_bytes(bench, number, record_bytes, false);

        assert_true(status == KVF_OK || status == KVF_ERR_BUSY);
        put_bytes_sum += record_bytes;
        if (number % 100 == 0) {
            for (uint32_t other = number >= 50 ? number - 50 : 0; other <= number; other++) {
                if (bench->entries[other].is_stored) {
                    assert_int_equal(get(bench, other), KVF_OK);
                }
            }
        }
    }
    assert_true(put_bytes_sum >= 3 * capacity_bytes);
    assert_true(bench->n_let_go > number / 3);
    assert_int_equal(bench->n_lost, 0);
    n_stored = check_all(bench);
    assert_int_equal(stat_of(bench).stored_blocks, n_stored);
    assert_true(n_stored > 20);
    if (!is_addressable(bench)) {
        assert_true(bench->n_moved > 0);
    }
}

static void check_wrong_name(void **state)
{
    struct bench *bench = *state;
    struct call *call;

    if (is_addressable(bench)) {
        skip(); /* reads in place: whoever reads compares the name */
    }
    assert_int_equal(put(bench, 1), KVF_OK);
    assert_int_equal(put(bench, 2), KVF_OK);
    call = call_take(bench, 1, bench->entries[1].record_bytes);
    call->io.name = name_of(2);
    call->io.location = bench->entries[1].location;
    call->io.done = call_done;
    assert_int_equal(bench->tier->ops->load(bench->tier, &call->io), KVF_OK);
    wait_for(bench, call);
    assert_true(call->io.status == KVF_ERR_CORRUPT || call->io.status == KVF_MISS);
    assert_int_equal(get(bench, 2), KVF_OK);
}

static void check_persistence(void **state)
{
    struct bench *bench = *state;
    uint64_t end_ns;

    if ((bench->tier->ops->flags & KVF_TIER_PERSISTENT) == 0) {
        skip();
    }
    for (uint32_t number = 0; number < 50; number++) {
        assert_int_equal(put_bytes(bench, number, bytes_of(number), number % 2 == 0), KVF_OK);
    }
    if (bench->tier->ops->drained != NULL) {
        end_ns = kvf_now_ns() + PATIENCE_S * KVF_NS_PER_S;
        while (!bench->tier->ops->drained(bench->tier)) {
            bench_pump(bench);
            assert_true(kvf_now_ns() < end_ns);
        }
    }
    bench_close_tier(bench);
    memset(bench->entries, 0, sizeof(bench->entries));
    bench_open_tier(bench);
    assert_int_equal(bench->n_recovered, 50);
    assert_int_equal(check_all(bench), 50);
    assert_int_equal(stat_of(bench).stored_blocks, 50);
    assert_int_equal(put(bench, 50), KVF_OK);
    assert_int_equal(check_all(bench), 51);
}

/* Once all is done, a tier asks to be polled only for good reasons. */
static void check_rests(void **state)
{
    struct bench *bench = *state;
    uint64_t end_ns = kvf_now_ns() + PATIENCE_S * KVF_NS_PER_S;

    assert_int_equal(put(bench, 0), KVF_OK);
    for (int i = 0; i < 100 || bench->tier->ops->deadline_ns(bench->tier) != UINT64_MAX; i++) {
        bench_pump(bench);
        assert_true(kvf_now_ns() < end_ns);
    }
    assert_int_equal(bench->tier->ops->poll(bench->tier, kvf_now_ns()), 0);
}

static const struct {
    const char *name;
    void (*run)(void **state);
} checks[] = {
    {"table", check_table},
    {"keeps", check_keeps},
    {"sizes", check_sizes},
    {"too large", check_too_large},
    {"drop", check_drop},
    {"busy", check_busy},
    {"turnover", check_turnover},
    {"wrong name", check_wrong_name},
    {"persistence", check_persistence},
    {"rests", check_rests},
};

enum {
    N_CHECKS = sizeof(checks) / sizeof(checks[0]),
};

int main(void)
{
    static struct CMUnitTest tests[N_SUBJECTS * N_CHECKS];
    static char names[N_SUBJECTS * N_CHECKS][80];

    for (unsigned i = 0; i < N_SUBJECTS * N_CHECKS; i++) {
        const struct subject *subject = &subjects[i / N_CHECKS];

        snprintf(names[i], sizeof(names[i]), "%s: %s", subject->name, checks[i % N_CHECKS].name);
        tests[i] = (struct CMUnitTest){
            .name = names[i],
            .test_func = checks[i % N_CHECKS].run,
            .setup_func = bench_setup,
            .teardown_func = bench_teardown,
            .initial_state = (void *)(uintptr_t)subject,
        };
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
