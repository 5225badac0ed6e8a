/* SPDX-License-Identifier: Apache-2.0
 *
 * test_client_bounds.c: what is bounded in time (kept memory, a silent heart) under a clock that
 * the test moves, and that puts and hits allocate nothing.
 */
#include "tests/unit/client/fixture.h"

#include "base/clock.h"

/* The linker sends the library's calls here (--wrap). Both counters are of this thread only: the
 * fake daemon has one of its own. */
static _Thread_local uint64_t ahead_ns;
static _Thread_local uint64_t stopped_ns; /* not 0: the clock stands, but for ahead_ns */
static _Thread_local uint32_t n_allocations;

uint64_t __real_kvf_now_ns(void);
uint64_t __wrap_kvf_now_ns(void);
void *__real_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__real_calloc(size_t n, size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes);
void *__real_realloc(void *old, size_t bytes);
void *__wrap_realloc(void *old, size_t bytes);
void *__real_aligned_alloc(size_t align, size_t bytes);
void *__wrap_aligned_alloc(size_t align, size_t bytes);

uint64_t __wrap_kvf_now_ns(void)
{
    return (stopped_ns != 0 ? stopped_ns : __real_kvf_now_ns()) + ahead_ns;
}

void *__wrap_malloc(size_t bytes)
{
    n_allocations++;
    return __real_malloc(bytes);
}

void *__wrap_calloc(size_t n, size_t bytes)
{
    n_allocations++;
    return __real_calloc(n, bytes);
}

void *__wrap_realloc(void *old, size_t bytes)
{
    n_allocations++;
    return __real_realloc(old, bytes);
}

void *__wrap_aligned_alloc(size_t align, size_t bytes)
{
    n_allocations++;
    return __real_aligned_alloc(align, bytes);
}

/* What a test does next takes no time, however slow the machine is. */
static void clock_stop(void)
{
    stopped_ns = __real_kvf_now_ns();
}

static int clock_teardown(void **state)
{
    stopped_ns = 0;
    return fixture_teardown(state);
}

static void tend(struct fixture *f)
{
    struct kvf_info info = {.struct_bytes = sizeof(info)};

    ahead_ns += 2 * KVF_NS_PER_MS; /* past the pause between two looks */
    assert_int_equal(kvf_client_info(f->client, &info), KVF_OK);
}

/* After 10 s the shared memory of a dead daemon is given up; reads see zeroes and do not fault. */
static void old_memory_is_given_up(void **state)
{
    static struct key_set set;
    struct fixture *f = *state;
    struct kvf_stage stage;
    struct kvf_event event;
    struct kvf_hit hit;
    uint32_t n;

    f->options.flags = KVF_ATTACH_NO_RECONNECT;
    fixture_open(f);
    keys_fill(&set, "keep", 1);
    assert_int_equal(put_bytes(f, &set.keys[0], "data", 4), KVF_OK);
    assert_int_equal(kvf_get(f->client, set.keys, 1, NULL, &hit), KVF_OK);
    assert_int_equal(kvf_stage_acquire(f->client, 100, &stage), KVF_OK);
    memcpy(stage.payload, "mine", 4);
    clock_stop();
    kvf_fake_daemon_command(f->daemon, KVF_FAKE_HANG_UP);
    tend(f);
    assert_int_equal(kvf_poll(f->client, &event, 1, 0, &n), KVF_ERR_DISCONNECTED);
    ahead_ns += 9 * KVF_NS_PER_S;
    tend(f);
    assert_memory_equal(hit.payload, "data", 4);
    assert_memory_equal(stage.payload, "mine", 4);
    ahead_ns += 1 * KVF_NS_PER_S;
    tend(f);
    assert_memory_equal(hit.payload, "\0\0\0\0", 4);
    assert_memory_equal(stage.payload, "\0\0\0\0", 4);
    memcpy(stage.payload, "mine", 4); /* still writable */
    assert_int_equal(kvf_lease_release(f->client, hit.lease), KVF_ERR_LOST);
    assert_int_equal(kvf_stage_release(f->client, stage.stage), KVF_OK);
}

/* The same for a piece that a living daemon takes away while it is leased. */
static void dropped_pieces_are_given_up(void **state)
{
    static struct key_set set;
    struct fixture *f = *state;
    struct kvf_hit hit;

    fixture_open(f);
    keys_fill(&set, "drop", 1);
    assert_int_equal(put_bytes(f, &set.keys[0], "data", 4), KVF_OK);
    assert_int_equal(kvf_get(f->client, set.keys, 1, NULL, &hit), KVF_OK);
    kvf_fake_daemon_command(f->daemon, KVF_FAKE_SWAP_PIECE);
    tend(f);
    assert_memory_equal(hit.payload, "data", 4);
    /* 3 s at a time, with a look at the heartbeat each: the daemon lives */
    for (uint32_t i = 0; i < 4; i++) {
        uint64_t round_trip_ns;

        ahead_ns += 3 * KVF_NS_PER_S;
        assert_int_equal(kvf_ping(f->client, 60000, &round_trip_ns), KVF_OK);
        tend(f);
    }
    assert_memory_equal(hit.payload, "\0\0\0\0", 4);
    assert_int_equal(kvf_lease_release(f->client, hit.lease), KVF_OK);
}

/* A daemon that hangs without hanging up: its heart stands still. */
static void a_silent_heart_ends_the_session(void **state)
{
    struct fixture *f = *state;
    struct kvf_event event;
    uint32_t n;

    f->script.is_heartless = true;
    f->options.flags = KVF_ATTACH_NO_RECONNECT;
    clock_stop();
    fixture_open(f);
    ahead_ns += 4 * KVF_NS_PER_S;
    tend(f);
    assert_int_equal(kvf_poll(f->client, &event, 1, 0, &n), KVF_EMPTY);
    /* one look after a long time is no proof: this process may have been the one that slept */
    ahead_ns += 60 * KVF_NS_PER_S;
    tend(f);
    assert_int_equal(kvf_poll(f->client, &event, 1, 0, &n), KVF_EMPTY);
    ahead_ns += 1 * KVF_NS_PER_S;
    tend(f);
    assert_int_equal(kvf_poll(f->client, &event, 1, 0, &n), KVF_ERR_DISCONNECTED);
    assert_non_null(strstr(f->log, "heartbeat"));
}

/* Tries to connect get rarer up to 2 s, and no try takes place in between. */
static void pauses_between_tries_are_bounded(void **state)
{
    struct fixture *f = *state;
    uint64_t round_trip_ns;
    uint32_t logs;

    fixture_open(f);
    kvf_fake_daemon_stop(f->daemon);
    f->daemon = NULL;
    for (uint32_t i = 0; i < 40; i++) {
        ahead_ns += KVF_NS_PER_S;
        tend(f);
    }
    logs = f->n_logs;
    assert_in_range(logs, 2, 4); /* not one a try */
    fixture_serve(f);
    ahead_ns += 2 * KVF_NS_PER_S;
    assert_int_equal(kvf_ping(f->client, 60000, &round_trip_ns), KVF_OK);
}

static void put_get_and_release_allocate_nothing(void **state)
{
    static struct key_set set;
    static struct kvf_put_item items[200];
    static struct kvf_event events[64];
    struct fixture *f = *state;
    struct kvf_hit hits[8];
    uint32_t before;
    uint64_t request;
    uint32_t n;

    fixture_open(f);
    keys_fill(&set, "alloc", 200);
    for (uint32_t i = 0; i < 200; i++) {
        items[i] = item_of(&set.keys[i], set.texts[i], KEY_BYTES);
    }
    before = n_allocations;
    assert_true(before > 0); /* opening does allocate: the count counts */
    for (uint32_t i = 0; i + 8 <= 200; i += 8) {
        struct kvf_lookup_result lookup;

        assert_int_equal(kvf_put(f->client, &items[i], 8, NULL, NULL), KVF_OK);
        assert_int_equal(kvf_get(f->client, &set.keys[i], 8, NULL, hits), KVF_OK);
        assert_int_equal(kvf_lookup(f->client, &set.keys[i], 8, NULL, &lookup), KVF_OK);
        for (uint32_t k = 0; k < 8; k++) {
            assert_int_equal(kvf_lease_release(f->client, hits[k].lease), KVF_OK);
        }
        assert_int_equal(kvf_submit_prefetch(f->client, &set.keys[i], 8, 0, &request), KVF_OK);
        for (uint32_t taken = 0; taken < 9; taken += n) {
            assert_int_equal(kvf_poll(f->client, events, 64, 60000, &n), KVF_OK);
        }
    }
    assert_int_equal(n_allocations, before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(old_memory_is_given_up, fixture_setup, clock_teardown),
        FIXTURE_TEST(dropped_pieces_are_given_up),
        cmocka_unit_test_setup_teardown(a_silent_heart_ends_the_session, fixture_setup,
                                        clock_teardown),
        FIXTURE_TEST(pauses_between_tries_are_bounded),
        FIXTURE_TEST(put_get_and_release_allocate_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
