/* SPDX-License-Identifier: Apache-2.0
 *
 * test_client.c: what a well-behaved daemon and the library do together: blocking and asynchronous
 * calls, credits, staging, leases.
 */
#include "tests/unit/client/fixture.h"

#include <poll.h>

static void open_tells_facts(void **state)
{
    struct fixture *f = *state;
    struct kvf_info info = {.struct_bytes = sizeof(info)};
    uint64_t round_trip_ns = 0;

    fixture_open(f);
    assert_int_equal(kvf_client_info(f->client, &info), KVF_OK);
    assert_int_equal(info.connected, 1);
    assert_int_equal(info.lossless, 1);
    assert_string_equal(info.profile, "bytes");
    assert_int_equal(info.namespace_id, 77);
    assert_int_equal(info.incarnation, 1);
    assert_int_equal(info.credits, 2048);
    assert_int_equal(info.staging_bytes, 1 << 20);
    assert_int_equal(info.arena_bytes, 4 << 20);
    assert_int_equal(kvf_ping(f->client, 60000, &round_trip_ns), KVF_OK);
    assert_true(round_trip_ns > 0);
    info.struct_bytes--;
    assert_int_equal(kvf_client_info(f->client, &info), KVF_ERR_INVALID);
    assert_string_equal(kvf_version(), "0.1.0");
}

static void options_are_checked(void **state)
{
    struct fixture *f = *state;
    struct kvf_options good = f->options;

    fixture_serve(f);
    f->options.struct_bytes--;
    assert_int_equal(kvf_open(&f->options, &f->client), KVF_ERR_INVALID);
    f->options = good;
    f->options.shard = 1;
    assert_int_equal(kvf_open(&f->options, &f->client), KVF_ERR_INVALID);
    f->options = good;
    f->options.flags = 1u << 31;
    assert_int_equal(kvf_open(&f->options, &f->client), KVF_ERR_INVALID);
    f->options = good;
    f->options.profile = "no-such-profile";
    assert_int_equal(kvf_open(&f->options, &f->client), KVF_ERR_INVALID);
    f->options = good;
    f->options.namespace_label = "a label\nthat forges log lines";
    assert_int_equal(kvf_open(&f->options, &f->client), KVF_ERR_INVALID);
    f->options = good;
    f->options.client_name = "a name that is longer than the field of sixty-three bytes allows it";
    assert_int_equal(kvf_open(&f->options, &f->client), KVF_ERR_INVALID);
    assert_null(f->client);
}

static void put_then_get_gives_the_same_bytes(void **state)
{
    static struct key_set set;
    struct fixture *f = *state;
    struct kvf_put_item items[3];
    struct kvf_hit hits[4];
    int32_t statuses[3];
    char data[3][5000];

    fixture_open(f);
    keys_fill(&set, "round", 4);
    for (uint32_t i = 0; i < 3; i++) {
        memset(data[i], 'a' + (int)i, sizeof(data[i]));
        items[i] = item_of(&set.keys[i], data[i], sizeof(data[i]) - i);
    }
    assert_int_equal(kvf_put(f->client, items, 3, NULL, statuses), KVF_OK);
    assert_int_equal(statuses[2], KVF_OK);
    assert_int_equal(kvf_put(f->client, items, 3, NULL, statuses), KVF_OK);
    assert_int_equal(statuses[0], KVF_EXISTS);

    assert_int_equal(kvf_get(f->client, set.keys, 4, NULL, hits), KVF_PARTIAL);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(hits[i].status, KVF_OK);
        assert_int_equal(hits[i].tier, KVF_TIER_DRAM);
        assert_int_equal(hits[i].payload_bytes, sizeof(data[i]) - i);
        assert_ptr_equal(hits[i].payload, (const char *)hits[i].record + 4096);
        assert_memory_equal(hits[i].payload, data[i], hits[i].payload_bytes);
        assert_int_equal(kvf_lease_check(f->client, hits[i].lease), KVF_OK);
        assert_int_equal(kvf_lease_release(f->client, hits[i].lease), KVF_OK);
        assert_int_equal(kvf_lease_release(f->client, hits[i].lease), KVF_ERR_INVALID);
    }
    assert_int_equal(hits[3].status, KVF_MISS);
    assert_int_equal(hits[3].lease, 0);
    assert_int_equal(kvf_get(f->client, &set.keys[3], 1, NULL, hits), KVF_MISS);
    assert_int_equal(kvf_fake_daemon_facts(f->daemon).violations, 0);
}

static void arguments_are_checked(void **state)
{
    static struct key_set set;
    struct fixture *f = *state;
    struct kvf_put_item item;
    struct kvf_put_options options = {.struct_bytes = sizeof(options)};
    struct kvf_lookup_options lookup = {.struct_bytes = sizeof(lookup)};
    struct kvf_lookup_result result;
    struct kvf_hit hit;
    struct kvf_key short_key;
    uint64_t request;

    fixture_open(f);
    keys_fill(&set, "check", 2);
    short_key = (struct kvf_key){.data = set.texts[0], .bytes = 15};
    assert_int_equal(kvf_get(f->client, &short_key, 1, NULL, &hit), KVF_ERR_INVALID);
    assert_int_equal(hit.status, KVF_ERR_INVALID);
    assert_int_equal(kvf_get(f->client, set.keys, 0, NULL, &hit), KVF_ERR_INVALID);
    assert_int_equal(kvf_get(f->client, set.keys, 1025, NULL, &hit), KVF_ERR_INVALID);

    item = item_of(&set.keys[0], "x", 1);
    item.struct_bytes--;
    assert_int_equal(kvf_put(f->client, &item, 1, NULL, NULL), KVF_ERR_INVALID);
    item = item_of(&set.keys[0], "x", 0);
    assert_int_equal(kvf_put(f->client, &item, 1, NULL, NULL), KVF_ERR_INVALID);
    item = item_of(&set.keys[0], "x", 1);
    item.source = KVF_SOURCE_VIEW; /* no geometry */
    assert_int_equal(kvf_put(f->client, &item, 1, NULL, NULL), KVF_ERR_INVALID);
    item = item_of(&set.keys[0], "x", 1);
    options.flags = KVF_PUT_DURABLE | KVF_PUT_NO_WRITE;
    assert_int_equal(kvf_put(f->client, &item, 1, &options, NULL), KVF_ERR_INVALID);
    options.flags = 0;
    options.priority = 3;
    assert_int_equal(kvf_submit_put(f->client, &item, 1, &options, 0, &request), KVF_ERR_INVALID);
    item = item_of(&set.keys[0], "x", (size_t)KVF_PAYLOAD_BYTES_MAX + 1);
    assert_int_equal(kvf_put(f->client, &item, 1, NULL, NULL), KVF_ERR_TOO_LARGE);

    lookup.n_tail_keys = 16;
    assert_int_equal(kvf_lookup(f->client, set.keys, 2, &lookup, &result), KVF_ERR_INVALID);
    lookup.n_tail_keys = 3;
    assert_int_equal(kvf_lookup(f->client, set.keys, 2, &lookup, &result), KVF_ERR_INVALID);
    assert_int_equal(kvf_cancel(f->client, 12345), KVF_ERR_INVALID);
    assert_int_equal(kvf_lease_release(f->client, 0), KVF_ERR_INVALID);
    assert_int_equal(kvf_stage_release(f->client, 0x100000001), KVF_ERR_INVALID);
    /* nothing of this reached the daemon as a breach */
    assert_int_equal(kvf_fake_daemon_facts(f->daemon).violations, 0);
}

static void lookup_counts_the_run(void **state)
{
    static struct key_set set;
    struct fixture *f = *state;
    struct kvf_lookup_options options = {.struct_bytes = sizeof(options), .n_tail_keys = 2};
    struct kvf_lookup_result result;
    struct kvf_key keys[5];

    fixture_open(f);
    keys_fill(&set, "look", 6);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(put_bytes(f, &set.keys[i], "data", 4), KVF_OK);
    }
    assert_int_equal(put_bytes(f, &set.keys[5], "tail", 4), KVF_OK);
    assert_int_equal(kvf_lookup(f->client, set.keys, 5, NULL, &result), KVF_OK);
    assert_int_equal(result.run_chunks, 3);
    assert_int_equal(result.tail_index, -1);
    assert_int_equal(result.lease, 0);

    for (uint32_t i = 0; i < 3; i++) {
        keys[i] = set.keys[i];
    }
    keys[3] = set.keys[4]; /* a longer tail that is not there */
    keys[4] = set.keys[5];
    options.flags = KVF_LOOKUP_LEASE;
    assert_int_equal(kvf_lookup(f->client, keys, 5, &options, &result), KVF_OK);
    assert_int_equal(result.run_chunks, 4);
    assert_int_equal(result.ready_chunks, 4);
    assert_int_equal(result.tail_index, 1);
    assert_int_not_equal(result.lease, 0);
    assert_int_equal(kvf_lease_release(f->client, result.lease), KVF_OK);
}

static void evict_prefetch_and_stat_count(void **state)
{
    static struct key_set set;
    struct fixture *f = *state;
    struct kvf_stat stat = {.struct_bytes = sizeof(stat)};
    uint32_t count = 99;

    fixture_open(f);
    keys_fill(&set, "evict", 3);
    assert_int_equal(put_bytes(f, &set.keys[0], "data", 4), KVF_OK);
    assert_int_equal(kvf_prefetch(f->client, set.keys, 3, &count), KVF_OK);
    assert_int_equal(count, 1);
    assert_int_equal(kvf_evict(f->client, set.keys, 3, &count), KVF_OK);
    assert_int_equal(count, 1);
    assert_int_equal(kvf_evict(f->client, set.keys, 3, &count), KVF_MISS);
    assert_int_equal(count, 0);
    assert_int_equal(kvf_stat(f->client, &stat), KVF_OK);
    assert_int_equal(stat.namespace_blocks, 100);
    assert_int_equal(stat.lost_leases, 109);
}

static void supersedes_names_another_key(void **state)
{
    static struct key_set set;
    struct fixture *f = *state;
    struct kvf_put_item items[2];
    struct kvf_put_options options = {.struct_bytes = sizeof(options), .depth = 1};
    struct kvf_hit hit;

    fixture_open(f);
    keys_fill(&set, "tail", 4);
    assert_int_equal(put_bytes(f, &set.keys[0], "old", 3), KVF_OK);
    items[0] = item_of(&set.keys[1], "new", 3);
    items[0].supersedes = set.keys[0];
    items[1] = item_of(&set.keys[2], "more", 4);
    options.parent = set.keys[3];
    assert_int_equal(kvf_put(f->client, items, 2, &options, NULL), KVF_OK);
    assert_int_equal(kvf_get(f->client, &set.keys[0], 1, NULL, &hit), KVF_MISS);
    assert_int_equal(kvf_get(f->client, &set.keys[1], 1, NULL, &hit), KVF_OK);
    assert_int_equal(kvf_fake_daemon_facts(f->daemon).violations, 0);
}

/* 30 blocks of 100 KiB through 1 MiB of staging: several requests, all memory back at the end. */
static void put_larger_than_staging_goes_in_batches(void **state)
{
    static struct key_set set;
    static uint8_t data[100 << 10];
    struct fixture *f = *state;
    struct kvf_put_item items[30];
    struct kvf_stage stage;
    int32_t statuses[30];

    fixture_open(f);
    keys_fill(&set, "batch", 33);
    for (uint32_t i = 0; i < 30; i++) {
        items[i] = item_of(&set.keys[i], data, sizeof(data));
    }
    assert_int_equal(kvf_put(f->client, items, 30, NULL, statuses), KVF_OK);
    for (uint32_t i = 0; i < 30; i++) {
        assert_int_equal(statuses[i], KVF_OK);
    }
    assert_true(kvf_fake_daemon_facts(f->daemon).puts >= 6);
    assert_int_equal(kvf_stage_acquire(f->client, (1 << 20) - 4096, &stage), KVF_OK);
    assert_int_equal(kvf_stage_release(f->client, stage.stage), KVF_OK);

    /* a block that can never fit ends the chain there; what was before it is stored */
    for (uint32_t i = 0; i < 3; i++) {
        items[i].key = set.keys[30 + i];
    }
    items[1].data_bytes = 2 << 20;
    assert_int_equal(kvf_put(f->client, items, 3, NULL, statuses), KVF_PARTIAL);
    assert_int_equal(statuses[0], KVF_OK);
    assert_int_equal(statuses[1], KVF_ERR_TOO_LARGE);
    assert_int_equal(statuses[2], KVF_ERR_TOO_LARGE);
}

static void staged_slots_are_put_without_a_copy(void **state)
{
    static struct key_set set;
    struct fixture *f = *state;
    struct kvf_put_item item;
    struct kvf_stage stage;
    struct kvf_stage other;
    struct kvf_hit hit;
    uint64_t request;

    fixture_open(f);
    keys_fill(&set, "stage", 2);
    assert_int_equal(kvf_stage_acquire(f->client, 5000, &stage), KVF_OK);
    assert_int_equal((uintptr_t)stage.record % 4096, 0);
    assert_int_equal(stage.payload_bytes, 8192);
    memset(stage.payload, 'z', 5000);
    item = (struct kvf_put_item){
        .struct_bytes = sizeof(item),
        .source = KVF_SOURCE_STAGED,
        .key = set.keys[0],
        .stage = stage.stage,
    };
    /* nothing has described it so far */
    assert_int_equal(kvf_submit_put(f->client, &item, 1, NULL, 0, &request), KVF_ERR_INVALID);
    assert_int_equal(kvf_stage_seal(f->client, &stage, 8193), KVF_ERR_TOO_LARGE);
    assert_int_equal(kvf_stage_seal(f->client, &stage, 5000), KVF_OK);
    assert_int_equal(kvf_put(f->client, &item, 1, NULL, NULL), KVF_OK);
    assert_int_equal(kvf_stage_release(f->client, stage.stage), KVF_ERR_INVALID);
    assert_int_equal(kvf_get(f->client, &set.keys[0], 1, NULL, &hit), KVF_OK);
    assert_int_equal(hit.payload_bytes, 5000);
    assert_int_equal(((const char *)hit.payload)[4999], 'z');

    assert_int_equal(kvf_stage_acquire(f->client, 1 << 20, &other), KVF_ERR_TOO_LARGE);
    assert_int_equal(kvf_stage_acquire(f->client, (1 << 20) - 4096, &other), KVF_OK);
    assert_int_equal(kvf_stage_acquire(f->client, 1, &stage), KVF_ERR_BUSY);
    assert_int_equal(put_bytes(f, &set.keys[1], "no room", 7), KVF_ERR_BUSY);
    assert_int_equal(kvf_stage_release(f->client, other.stage), KVF_OK);
}

static void events_come_for_every_block_and_request(void **state)
{
    static struct key_set set;
    struct fixture *f = *state;
    struct kvf_event events[8];
    uint64_t request;
    uint64_t lookup;
    uint32_t seen = 0;
    uint32_t n;

    fixture_open(f);
    keys_fill(&set, "event", 3);
    assert_int_equal(put_bytes(f, &set.keys[0], "data", 4), KVF_OK);
    assert_int_equal(kvf_poll(f->client, events, 8, 0, &n), KVF_EMPTY);
    assert_int_equal(kvf_submit_get(f->client, set.keys, 3, NULL, 42, &request), KVF_OK);
    for (uint32_t left = 4; left > 0; left -= n) {
        assert_int_equal(kvf_poll(f->client, events, 1, 60000, &n), KVF_OK);
        assert_int_equal(n, 1);
        assert_int_equal(events[0].request, request);
        assert_int_equal(events[0].user, 42);
        if (left == 1) {
            assert_int_equal(events[0].kind, KVF_EVENT_REQUEST);
            assert_int_equal(events[0].index, 1);
            assert_int_equal(events[0].hit.status, KVF_PARTIAL);
        } else {
            assert_int_equal(events[0].kind, KVF_EVENT_BLOCK);
            seen |= 1u << events[0].index;
            assert_int_equal(events[0].hit.status, events[0].index == 0 ? KVF_OK : KVF_MISS);
        }
    }
    assert_int_equal(seen, 7);
    assert_int_equal(kvf_submit_lookup(f->client, set.keys, 3, NULL, 7, &lookup), KVF_OK);
    assert_int_not_equal(lookup, request);
    assert_int_equal(kvf_poll(f->client, events, 8, 60000, &n), KVF_OK);
    assert_int_equal(n, 1);
    assert_int_equal(events[0].kind, KVF_EVENT_REQUEST);
    assert_int_equal(events[0].lookup.run_chunks, 1);
    assert_int_equal(events[0].lookup.tail_index, -1);
}

/* A blocking call meets completions of other requests: they wait for the next poll. */
static void blocking_calls_keep_events_of_others(void **state)
{
    static struct key_set set;
    struct fixture *f = *state;
    struct kvf_event events[8];
    uint64_t request;
    uint32_t n;

    fixture_open(f);
    keys_fill(&set, "mixed", 2);
    assert_int_equal(kvf_submit_prefetch(f->client, set.keys, 2, 9, &request), KVF_OK);
    assert_int_equal(put_bytes(f, &set.keys[0], "data", 4), KVF_OK);
    assert_int_equal(kvf_poll(f->client, events, 8, 0, &n), KVF_OK);
    assert_int_equal(n, 3);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(events[i].user, 9);
    }
    assert_int_equal(kvf_submit_evict(f->client, set.keys, 2, 10, &request), KVF_OK);
    assert_int_equal(kvf_poll(f->client, events, 8, 60000, &n), KVF_OK);
}

static void credits_bound_what_is_in_flight(void **state)
{
    static struct key_set set;
    struct fixture *f = *state;
    struct kvf_event events[32];
    struct kvf_hit hits[16];
    uint64_t request;
    uint32_t n;
    uint32_t taken = 0;

    f->options.ring_entries = 8; /* 16 credits */
    fixture_open(f);
    keys_fill(&set, "credit", 16);
    assert_int_equal(kvf_submit_get(f->client, set.keys, 16, NULL, 0, &request), KVF_ERR_TOO_LARGE);
    assert_int_equal(kvf_submit_get(f->client, set.keys, 7, NULL, 1, &request), KVF_OK);
    assert_int_equal(kvf_submit_get(f->client, set.keys, 7, NULL, 2, &request), KVF_OK);
    assert_int_equal(kvf_submit_lookup(f->client, set.keys, 1, NULL, 3, &request), KVF_ERR_BUSY);
    /* completed is not enough: the events have to be taken */
    assert_int_equal(kvf_get(f->client, set.keys, 1, NULL, hits), KVF_ERR_BUSY);
    while (taken < 16) {
        assert_int_equal(kvf_poll(f->client, events, 5, 60000, &n), KVF_OK);
        taken += n;
    }
    assert_int_equal(taken, 16);
    assert_int_equal(kvf_get(f->client, set.keys, 15, NULL, hits), KVF_MISS);
}

static void the_largest_request_fits_default_rings(void **state)
{
    static struct key_set set;
    static struct kvf_put_item items[1024];
    static int32_t statuses[1024];
    static struct kvf_hit hits[1024];
    struct fixture *f = *state;

    f->options.staging_bytes = 9 << 20;
    fixture_open(f);
    keys_fill(&set, "largest", 1024);
    for (uint32_t i = 0; i < 1024; i++) {
        items[i] = item_of(&set.keys[i], &set.texts[i], KEY_BYTES);
        items[i].supersedes = set.keys[(i + 1) % 1024];
    }
    /* the fake's arena has room for 512 blocks of two pages */
    assert_int_equal(kvf_put(f->client, items, 1024, NULL, statuses), KVF_PARTIAL);
    assert_int_equal(kvf_get(f->client, set.keys, 1024, NULL, hits), KVF_MISS);
    assert_int_equal(kvf_fake_daemon_facts(f->daemon).violations, 0);
}

static void cancel_completes_what_is_left(void **state)
{
    static struct key_set set;
    struct fixture *f = *state;
    struct kvf_event events[8];
    uint64_t request;
    uint32_t taken = 0;
    uint32_t n;

    fixture_open(f);
    keys_fill(&set, "cancel", 2);
    kvf_fake_daemon_command(f->daemon, KVF_FAKE_HOLD);
    assert_int_equal(kvf_submit_get(f->client, set.keys, 2, NULL, 5, &request), KVF_OK);
    assert_int_equal(kvf_poll(f->client, events, 8, 5, &n), KVF_EMPTY);
    assert_int_equal(n, 0);
    assert_int_equal(kvf_cancel(f->client, request), KVF_OK);
    assert_int_equal(kvf_cancel(f->client, request), KVF_OK);
    while (taken < 3) {
        assert_int_equal(kvf_poll(f->client, events + taken, 8 - taken, 60000, &n), KVF_OK);
        taken += n;
    }
    assert_int_equal(taken, 3);
    assert_int_equal(events[0].hit.status, KVF_ERR_CANCELED);
    assert_int_equal(events[2].kind, KVF_EVENT_REQUEST);
    assert_int_equal(events[2].hit.status, KVF_ERR_CANCELED);
    assert_int_equal(kvf_cancel(f->client, request), KVF_ERR_INVALID);
    assert_int_equal(kvf_fake_daemon_facts(f->daemon).cancels, 1);
}

static bool has_no_leases(void *arg)
{
    return kvf_fake_daemon_facts(arg).leases == 0;
}

/* The budget of a get ends while the daemon still works on it: misses, and what comes later is
 * given back without anyone asking. */
static void late_hits_are_released(void **state)
{
    static struct key_set set;
    struct fixture *f = *state;
    struct kvf_get_options options = {.struct_bytes = sizeof(options), .budget_ms = 1};
    struct kvf_hit hits[2];
    uint64_t round_trip_ns;

    fixture_open(f);
    keys_fill(&set, "late", 2);
    assert_int_equal(put_bytes(f, &set.keys[0], "data", 4), KVF_OK);
    kvf_fake_daemon_command(f->daemon, KVF_FAKE_HOLD);
    kvf_fake_daemon_command(f->daemon, KVF_FAKE_STOP_TAKING);
    assert_int_equal(kvf_get(f->client, set.keys, 2, &options, hits), KVF_MISS);
    assert_int_equal(hits[0].status, KVF_MISS);
    /* the daemon answers with a hit before it sees the cancel */
    kvf_fake_daemon_command(f->daemon, KVF_FAKE_LET_GO);
    kvf_fake_daemon_command(f->daemon, KVF_FAKE_TAKE_AGAIN);
    assert_int_equal(kvf_ping(f->client, 60000, &round_trip_ns), KVF_OK);
    assert_true(kvf_test_wait_until(has_no_leases, f->daemon, 60000));
    assert_int_equal(kvf_fake_daemon_facts(f->daemon).releases, 1);
}

static void lost_leases_say_so(void **state)
{
    static struct key_set set;
    struct fixture *f = *state;
    struct kvf_hit hit;

    fixture_open(f);
    keys_fill(&set, "lost", 1);
    assert_int_equal(put_bytes(f, &set.keys[0], "data", 4), KVF_OK);
    assert_int_equal(kvf_get(f->client, set.keys, 1, NULL, &hit), KVF_OK);
    assert_int_equal(kvf_lease_check(f->client, hit.lease), KVF_OK);
    kvf_fake_daemon_command(f->daemon, KVF_FAKE_LOSE_LEASES);
    assert_int_equal(kvf_lease_check(f->client, hit.lease), KVF_ERR_LOST);
    assert_int_equal(kvf_lease_release(f->client, hit.lease), KVF_ERR_LOST);
    assert_true(kvf_test_wait_until(has_no_leases, f->daemon, 60000));
}

/* More releases than the submission ring has slots, while the daemon takes none: none gets lost. */
static void releases_outlive_a_full_ring(void **state)
{
    static struct key_set set;
    struct fixture *f = *state;
    struct kvf_hit hits[30];
    uint64_t round_trip_ns;
    uint64_t request;

    f->script.sq_entries = 4;
    f->options.ring_entries = 4;
    fixture_open(f);
    keys_fill(&set, "full", 1);
    assert_int_equal(put_bytes(f, &set.keys[0], "data", 4), KVF_OK);
    for (uint32_t i = 0; i < 30; i++) {
        assert_int_equal(kvf_get(f->client, set.keys, 1, NULL, &hits[i]), KVF_OK);
    }
    assert_int_equal(kvf_fake_daemon_facts(f->daemon).leases, 30);
    kvf_fake_daemon_command(f->daemon, KVF_FAKE_STOP_TAKING);
    for (uint32_t i = 0; i < 30; i++) {
        assert_int_equal(kvf_lease_release(f->client, hits[i].lease), KVF_OK);
    }
    /* requests wait behind them, so that they get their turn */
    assert_int_equal(kvf_submit_get(f->client, set.keys, 1, NULL, 0, &request), KVF_ERR_BUSY);
    kvf_fake_daemon_command(f->daemon, KVF_FAKE_TAKE_AGAIN);
    while (kvf_fake_daemon_facts(f->daemon).leases != 0) {
        (void)kvf_ping(f->client, 10, &round_trip_ns);
    }
    assert_int_equal(kvf_fake_daemon_facts(f->daemon).releases, 30);
}

static void dropped_pieces_stay_readable(void **state)
{
    static struct key_set set;
    struct fixture *f = *state;
    struct kvf_hit old;
    struct kvf_hit new;
    uint64_t round_trip_ns;
    struct kvf_info info = {.struct_bytes = sizeof(info)};

    fixture_open(f);
    keys_fill(&set, "swap", 2);
    assert_int_equal(put_bytes(f, &set.keys[0], "old", 3), KVF_OK);
    assert_int_equal(kvf_get(f->client, set.keys, 1, NULL, &old), KVF_OK);
    kvf_fake_daemon_command(f->daemon, KVF_FAKE_SWAP_PIECE);
    /* its message waits in the socket when the hit in it arrives */
    assert_int_equal(put_bytes(f, &set.keys[1], "new", 3), KVF_OK);
    assert_int_equal(kvf_get(f->client, &set.keys[1], 1, NULL, &new), KVF_OK);
    assert_memory_equal(new.payload, "new", 3);
    assert_memory_equal(old.payload, "old", 3);
    assert_int_equal(kvf_lease_release(f->client, old.lease), KVF_OK);
    assert_int_equal(kvf_lease_release(f->client, new.lease), KVF_OK);
    assert_int_equal(kvf_ping(f->client, 60000, &round_trip_ns), KVF_OK);
    assert_int_equal(kvf_client_info(f->client, &info), KVF_OK);
    assert_int_equal(info.arena_bytes, 4 << 20);
}

static bool is_readable(int fd, int timeout_ms)
{
    struct pollfd one = {.fd = fd, .events = POLLIN};

    return poll(&one, 1, timeout_ms) == 1;
}

/* kvf_fd is readable exactly while kvf_poll has something to do. */
static void descriptor_tells_of_events(void **state)
{
    static struct key_set set;
    struct fixture *f = *state;
    struct kvf_event event;
    uint64_t request;
    uint32_t n;
    int fd;

    fixture_open(f);
    keys_fill(&set, "fd", 2);
    fd = kvf_fd(f->client);
    assert_false(is_readable(fd, 0));
    for (uint32_t round = 0; round < 20; round++) {
        uint32_t taken = 0;

        assert_int_equal(kvf_submit_get(f->client, set.keys, 2, NULL, 0, &request), KVF_OK);
        while (taken < 3) {
            assert_true(is_readable(fd, 60000));
            assert_in_range(kvf_poll(f->client, &event, 1, 0, &n), KVF_OK, KVF_EMPTY);
            taken += n;
        }
        assert_int_equal(kvf_poll(f->client, &event, 1, 0, &n), KVF_EMPTY);
        assert_false(is_readable(fd, 0));
    }
    /* events that a blocking call has put aside */
    assert_int_equal(kvf_submit_get(f->client, set.keys, 1, NULL, 0, &request), KVF_OK);
    assert_int_equal(put_bytes(f, &set.keys[1], "data", 4), KVF_OK);
    assert_true(is_readable(fd, 0));
    assert_int_equal(kvf_poll(f->client, &event, 1, 0, &n), KVF_OK);
    assert_true(is_readable(fd, 0));
    assert_int_equal(kvf_poll(f->client, &event, 1, 0, &n), KVF_OK);
    assert_false(is_readable(fd, 0));
}

static void spinning_handles_work_the_same(void **state)
{
    static struct key_set set;
    struct fixture *f = *state;
    struct kvf_hit hit;

    f->options.flags = KVF_ATTACH_SPIN;
    fixture_open(f);
    keys_fill(&set, "spin", 1);
    assert_int_equal(put_bytes(f, &set.keys[0], "data", 4), KVF_OK);
    assert_int_equal(kvf_get(f->client, set.keys, 1, NULL, &hit), KVF_OK);
    assert_int_equal(kvf_lease_release(f->client, hit.lease), KVF_OK);
}

static void schedulers_do_not_carry_blocks(void **state)
{
    static struct key_set set;
    struct fixture *f = *state;
    struct kvf_lookup_result result;
    struct kvf_hit hit;

    f->options.shard = KVF_SHARD_NONE;
    fixture_open(f);
    keys_fill(&set, "sched", 1);
    assert_int_equal(put_bytes(f, &set.keys[0], "data", 4), KVF_ERR_INVALID);
    assert_int_equal(kvf_get(f->client, set.keys, 1, NULL, &hit), KVF_ERR_INVALID);
    assert_int_equal(kvf_lookup(f->client, set.keys, 1, NULL, &result), KVF_OK);
    assert_int_equal(kvf_fake_daemon_facts(f->daemon).violations, 0);
}

static void close_says_goodbye(void **state)
{
    static struct key_set set;
    struct fixture *f = *state;
    struct kvf_hit hit;

    fixture_open(f);
    keys_fill(&set, "bye", 1);
    assert_int_equal(put_bytes(f, &set.keys[0], "data", 4), KVF_OK);
    assert_int_equal(kvf_get(f->client, set.keys, 1, NULL, &hit), KVF_OK);
    f->client = kvf_close(f->client);
    assert_null(f->client);
    assert_true(kvf_test_wait_until(has_no_leases, f->daemon, 60000));
    assert_int_equal(kvf_fake_daemon_facts(f->daemon).byes, 1);
    assert_null(kvf_close(NULL));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FIXTURE_TEST(open_tells_facts),
        FIXTURE_TEST(options_are_checked),
        FIXTURE_TEST(put_then_get_gives_the_same_bytes),
        FIXTURE_TEST(arguments_are_checked),
        FIXTURE_TEST(lookup_counts_the_run),
        FIXTURE_TEST(evict_prefetch_and_stat_count),
        FIXTURE_TEST(supersedes_names_another_key),
        FIXTURE_TEST(put_larger_than_staging_goes_in_batches),
        FIXTURE_TEST(staged_slots_are_put_without_a_copy),
        FIXTURE_TEST(events_come_for_every_block_and_request),
        FIXTURE_TEST(blocking_calls_keep_events_of_others),
        FIXTURE_TEST(credits_bound_what_is_in_flight),
        FIXTURE_TEST(the_largest_request_fits_default_rings),
        FIXTURE_TEST(cancel_completes_what_is_left),
        FIXTURE_TEST(late_hits_are_released),
        FIXTURE_TEST(lost_leases_say_so),
        FIXTURE_TEST(releases_outlive_a_full_ring),
        FIXTURE_TEST(dropped_pieces_stay_readable),
        FIXTURE_TEST(descriptor_tells_of_events),
        FIXTURE_TEST(spinning_handles_work_the_same),
        FIXTURE_TEST(schedulers_do_not_carry_blocks),
        FIXTURE_TEST(close_says_goodbye),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
