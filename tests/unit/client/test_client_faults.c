/* SPDX-License-Identifier: Apache-2.0
 *
 * test_client_faults.c: daemons that die, come back, refuse and lie. Whatever they do, the library
 * answers with a status, keeps pointers readable and never points outside of a mapped piece.
 */
#include "tests/unit/client/fixture.h"

#include <sys/socket.h>
#include <unistd.h>

/* ----------------------------------------------------------------------------------------------
 * Attach
 */
static void no_daemon_is_told_apart(void **state)
{
    struct fixture *f = *state;

    assert_int_equal(kvf_open(&f->options, &f->client), KVF_ERR_NO_DAEMON);
    assert_non_null(strstr(f->log, f->path));
    /* a stale socket file looks different to the system and is the same to callers */
    fixture_serve(f);
    kvf_fake_daemon_stop(f->daemon);
    f->daemon = NULL;
    assert_int_equal(kvf_open(&f->options, &f->client), KVF_ERR_NO_DAEMON);
    assert_null(f->client);
}

static void refusals_reach_the_caller(void **state)
{
    static const int statuses[] = {KVF_ERR_BUSY, KVF_ERR_TOO_LARGE, KVF_ERR_REFUSED,
                                   KVF_ERR_VERSION};
    struct fixture *f = *state;

    for (size_t i = 0; i < sizeof(statuses) / sizeof(statuses[0]); i++) {
        f->script.refuse_status = statuses[i];
        f->script.refuse_text = "staging.total is used up: raise it or attach fewer engines";
        fixture_serve(f);
        assert_int_equal(kvf_open(&f->options, &f->client), statuses[i]);
        assert_non_null(strstr(f->log, "staging.total is used up"));
        kvf_fake_daemon_stop(f->daemon);
        f->daemon = NULL;
    }
}

static void silent_daemons_time_out(void **state)
{
    struct fixture *f = *state;

    f->script.fault = KVF_FAKE_SILENT;
    f->options.connect_timeout_ms = 50;
    fixture_serve(f);
    assert_int_equal(kvf_open(&f->options, &f->client), KVF_ERR_TIMEOUT);
}

/* The profile the daemon has in force differs from the one asked for: the handle follows. */
static void lossy_falls_back_to_exact(void **state)
{
    struct fixture *f = *state;
    struct kvf_info info = {.struct_bytes = sizeof(info)};
    struct kvf_geometry geometry = {
        .struct_bytes = sizeof(geometry),
        .kind = KVF_KIND_KV,
        .dtype = KVF_DTYPE_BF16,
        .n_layers = 2,
        .n_heads = 2,
        .dim_k = 128,
        .dim_v = 128,
        .chunk_tokens = 16,
    };

    f->options.geometry = &geometry;
    f->options.profile = "balanced";
    f->script.profile = "exact";
    fixture_open(f);
    assert_int_equal(kvf_client_info(f->client, &info), KVF_OK);
    assert_string_equal(info.profile, "exact");
    assert_int_equal(info.lossless, 1);
    f->client = kvf_close(f->client);
}

static void lies_end_the_attach(void **state)
{
    static const struct {
        enum kvf_fake_fault fault;
        int status;
    } cases[] = {
        {KVF_FAKE_WELCOME_MAGIC, KVF_ERR_PROTOCOL},
        {KVF_FAKE_WELCOME_SHORT, KVF_ERR_PROTOCOL},
        {KVF_FAKE_WELCOME_TWO_FDS, KVF_ERR_PROTOCOL},
        {KVF_FAKE_WELCOME_FOUR_FDS, KVF_ERR_PROTOCOL},
        {KVF_FAKE_WELCOME_TWICE, KVF_ERR_PROTOCOL},
        {KVF_FAKE_WELCOME_LOSSY, KVF_ERR_PROTOCOL},
        {KVF_FAKE_WELCOME_PRINT, KVF_ERR_MISMATCH},
        {KVF_FAKE_RING_SMALL, KVF_ERR_PROTOCOL},
        {KVF_FAKE_RING_UNSEALED, KVF_ERR_PROTOCOL},
        {KVF_FAKE_STAGING_SMALL, KVF_ERR_PROTOCOL},
        {KVF_FAKE_PIECE_SMALL, KVF_ERR_PROTOCOL},
        {KVF_FAKE_PIECE_UNSEALED, KVF_ERR_PROTOCOL},
        {KVF_FAKE_PIECE_PIPE, KVF_ERR_PROTOCOL},
        {KVF_FAKE_PIECE_TWICE, KVF_ERR_PROTOCOL},
        {KVF_FAKE_READY_EARLY, KVF_ERR_PROTOCOL},
        {KVF_FAKE_HEADER_MAGIC, KVF_ERR_PROTOCOL},
        {KVF_FAKE_HEADER_ENTRIES, KVF_ERR_PROTOCOL},
        {KVF_FAKE_HEADER_OFFSET, KVF_ERR_PROTOCOL},
        {KVF_FAKE_HEADER_OVERLAP, KVF_ERR_PROTOCOL},
        {KVF_FAKE_HEADER_CONNECTION, KVF_ERR_PROTOCOL},
    };
    struct fixture *f = *state;
    struct kvf_geometry geometry = {
        .struct_bytes = sizeof(geometry),
        .kind = KVF_KIND_KV,
        .dtype = KVF_DTYPE_BF16,
        .n_layers = 1,
        .n_heads = 1,
        .dim_k = 128,
        .dim_v = 128,
        .chunk_tokens = 16,
    };
    int fds_before;
    int fds_after;

    /* all but "none" and "silent", which has a test of its own */
    assert_int_equal(sizeof(cases) / sizeof(cases[0]), KVF_FAKE_FAULTS - 2);
    f->options.geometry = &geometry;
    fds_before = dup(0);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        int status;

        f->script.fault = cases[i].fault;
        f->script.profile = cases[i].fault == KVF_FAKE_WELCOME_LOSSY ? "balanced" : NULL;
        fixture_serve(f);
        status = kvf_open(&f->options, &f->client);
        if (status != cases[i].status) {
            print_error("fault %d: %s\n", (int)cases[i].fault, f->log);
        }
        assert_int_equal(status, cases[i].status);
        assert_null(f->client);
        kvf_fake_daemon_stop(f->daemon);
        f->daemon = NULL;
    }
    fds_after = dup(0);
    assert_int_equal(fds_before + 1, fds_after); /* what came with the lies is closed */
    close(fds_before);
    close(fds_after);
}

/* ----------------------------------------------------------------------------------------------
 * Completions that cannot be
 */
struct lie {
    void (*tell)(struct kvf_shm_cqe *cqe);
    bool told;
};

static void lie_once(void *arg, struct kvf_shm_cqe *cqe)
{
    struct lie *lie = arg;

    if (!lie->told && cqe->kind == KVF_CQE_BLOCK && cqe->lease != 0) {
        lie->told = true;
        lie->tell(cqe);
    }
}

static void tell_piece(struct kvf_shm_cqe *cqe)
{
    cqe->piece = 1;
}

static void tell_far_piece(struct kvf_shm_cqe *cqe)
{
    cqe->piece = UINT32_MAX;
}

static void tell_offset(struct kvf_shm_cqe *cqe)
{
    cqe->offset = 4 << 20;
}

static void tell_wild_offset(struct kvf_shm_cqe *cqe)
{
    cqe->offset = UINT64_MAX - 4095;
}

static void tell_odd_offset(struct kvf_shm_cqe *cqe)
{
    cqe->offset += 8;
}

static void tell_long(struct kvf_shm_cqe *cqe)
{
    cqe->record_bytes = (4 << 20) + 1;
}

static void tell_wild_length(struct kvf_shm_cqe *cqe)
{
    cqe->record_bytes = UINT64_MAX;
}

static void tell_short(struct kvf_shm_cqe *cqe)
{
    cqe->record_bytes = 4096;
}

static void tell_no_lease(struct kvf_shm_cqe *cqe)
{
    cqe->lease = 0;
}

static void tell_lease(struct kvf_shm_cqe *cqe)
{
    cqe->lease |= 0xffff;
}

static void tell_index(struct kvf_shm_cqe *cqe)
{
    cqe->index = 2;
}

static void tell_request(struct kvf_shm_cqe *cqe)
{
    cqe->request += 1;
}

static void tell_slot(struct kvf_shm_cqe *cqe)
{
    cqe->request |= 0xffff;
}

static void tell_kind(struct kvf_shm_cqe *cqe)
{
    cqe->kind = 3;
}

static void tell_end(struct kvf_shm_cqe *cqe)
{
    cqe->kind = KVF_CQE_REQUEST; /* before the blocks */
}

static void tell_status(struct kvf_shm_cqe *cqe)
{
    cqe->status = -500;
}

static void tell_tier(struct kvf_shm_cqe *cqe)
{
    cqe->tier = 200;
}

static void impossible_completions_end_the_session(void **state)
{
    static void (*const tells[])(struct kvf_shm_cqe *) = {
        tell_piece, tell_far_piece,   tell_offset, tell_wild_offset, tell_odd_offset, tell_long,
        tell_short, tell_wild_length, tell_lease,  tell_no_lease,    tell_index,      tell_request,
        tell_slot,  tell_kind,        tell_end,    tell_status,      tell_tier};
    static struct key_set set;
    struct fixture *f = *state;

    keys_fill(&set, "lie", 2);
    for (size_t i = 0; i < sizeof(tells) / sizeof(tells[0]); i++) {
        struct lie lie = {.tell = tells[i]};
        struct kvf_hit hits[2];
        uint64_t round_trip_ns;

        f->script.on_complete = lie_once;
        f->script.arg = &lie;
        fixture_open(f);
        assert_int_equal(put_bytes(f, &set.keys[0], "data", 4), KVF_OK);
        assert_int_equal(kvf_get(f->client, set.keys, 2, NULL, hits), KVF_ERR_DISCONNECTED);
        assert_null(hits[0].record);
        assert_non_null(strstr(f->log, "lost"));
        /* and the handle comes back by itself */
        assert_int_equal(kvf_ping(f->client, 60000, &round_trip_ns), KVF_OK);
        assert_int_equal(kvf_get(f->client, set.keys, 1, NULL, hits), KVF_OK);
        f->client = kvf_close(f->client);
        kvf_fake_daemon_stop(f->daemon);
        f->daemon = NULL;
        assert_true(lie.told);
    }
}

/* A run longer than what was asked for. */
static void lengthen_run(void *arg, struct kvf_shm_cqe *cqe)
{
    (void)arg;
    cqe->values[0] += 1;
}

static void impossible_runs_end_the_session(void **state)
{
    static struct key_set set;
    struct fixture *f = *state;
    struct kvf_lookup_result result;

    f->script.on_complete = lengthen_run;
    fixture_open(f);
    keys_fill(&set, "run", 2);
    assert_int_equal(put_bytes(f, &set.keys[0], "data", 4), KVF_OK);
    assert_int_equal(kvf_lookup(f->client, set.keys, 1, NULL, &result), KVF_ERR_DISCONNECTED);
}

/* A block that completes twice. */
static void repeat_index(void *arg, struct kvf_shm_cqe *cqe)
{
    (void)arg;
    if (cqe->kind == KVF_CQE_BLOCK) {
        cqe->index = 0;
    }
}

static void repeated_blocks_end_the_session(void **state)
{
    static struct key_set set;
    struct fixture *f = *state;
    struct kvf_put_item items[2];
    int32_t statuses[2];

    f->script.on_complete = repeat_index;
    fixture_open(f);
    keys_fill(&set, "twice", 2);
    items[0] = item_of(&set.keys[0], "data", 4);
    items[1] = item_of(&set.keys[1], "data", 4);
    assert_int_equal(kvf_put(f->client, items, 2, NULL, statuses), KVF_PARTIAL);
    assert_int_equal(statuses[0], KVF_OK);
    assert_int_equal(statuses[1], KVF_ERR_DISCONNECTED);
}

/* ----------------------------------------------------------------------------------------------
 * Death and return
 */
static void death_completes_what_is_in_flight(void **state)
{
    static struct key_set set;
    struct fixture *f = *state;
    struct kvf_event events[8];
    struct kvf_put_item item;
    uint64_t get;
    uint64_t put;
    uint64_t lookup;
    uint64_t round_trip_ns;
    uint32_t n;
    uint32_t ends = 0;
    uint32_t blocks = 0;

    fixture_open(f);
    keys_fill(&set, "death", 3);
    item = item_of(&set.keys[0], "data", 4);
    kvf_fake_daemon_command(f->daemon, KVF_FAKE_HOLD);
    assert_int_equal(kvf_submit_put(f->client, &item, 1, NULL, 1, &put), KVF_OK);
    assert_int_equal(kvf_submit_get(f->client, set.keys, 3, NULL, 2, &get), KVF_OK);
    assert_int_equal(kvf_submit_lookup(f->client, set.keys, 3, NULL, 3, &lookup), KVF_OK);
    kvf_fake_daemon_stop(f->daemon);
    f->daemon = NULL;
    while (kvf_poll(f->client, events, 3, 60000, &n) == KVF_OK) {
        for (uint32_t i = 0; i < n; i++) {
            assert_int_equal(events[i].hit.status, KVF_ERR_DISCONNECTED);
            ends += events[i].kind == KVF_EVENT_REQUEST;
            blocks += events[i].kind == KVF_EVENT_BLOCK;
        }
    }
    assert_int_equal(ends, 3);
    assert_int_equal(blocks, 4);
    /* the break has been told by the status that ended the loop; from here on it is just empty */
    assert_int_equal(kvf_poll(f->client, events, 3, 0, &n), KVF_EMPTY);
    assert_int_equal(kvf_ping(f->client, 100, &round_trip_ns), KVF_ERR_NO_DAEMON);
    assert_int_equal(kvf_lookup(f->client, set.keys, 3, NULL, &events[0].lookup),
                     KVF_ERR_NO_DAEMON);
}

static void leases_of_a_dead_daemon_are_lost_but_readable(void **state)
{
    static struct key_set set;
    struct fixture *f = *state;
    struct kvf_info info = {.struct_bytes = sizeof(info)};
    struct kvf_hit old;
    struct kvf_hit new;
    struct kvf_stage stage;
    struct kvf_put_item item;
    uint64_t round_trip_ns;

    fixture_open(f);
    keys_fill(&set, "again", 2);
    assert_int_equal(put_bytes(f, &set.keys[0], "data", 4), KVF_OK);
    assert_int_equal(kvf_get(f->client, set.keys, 1, NULL, &old), KVF_OK);
    assert_int_equal(kvf_stage_acquire(f->client, 100, &stage), KVF_OK);
    assert_int_equal(kvf_stage_seal(f->client, &stage, 100), KVF_OK);
    kvf_fake_daemon_stop(f->daemon);
    assert_int_equal(kvf_get(f->client, set.keys, 1, NULL, &new), KVF_ERR_DISCONNECTED);
    assert_int_equal(kvf_client_info(f->client, &info), KVF_OK);
    assert_int_equal(info.connected, 0);

    f->script.incarnation = 2;
    fixture_serve(f);
    assert_int_equal(kvf_ping(f->client, 60000, &round_trip_ns), KVF_OK);
    assert_int_equal(kvf_client_info(f->client, &info), KVF_OK);
    assert_int_equal(info.incarnation, 2);
    assert_int_equal(info.reconnects, 1);
    /* the new daemon's first lease has the same id as the old one's, and its first slot, too */
    assert_int_equal(put_bytes(f, &set.keys[0], "more", 4), KVF_OK);
    assert_int_equal(kvf_get(f->client, set.keys, 1, NULL, &new), KVF_OK);
    assert_int_not_equal(new.lease, old.lease);
    assert_memory_equal(old.payload, "data", 4);
    assert_memory_equal(new.payload, "more", 4);
    assert_int_equal(kvf_lease_check(f->client, old.lease), KVF_ERR_LOST);
    assert_int_equal(kvf_lease_release(f->client, old.lease), KVF_ERR_LOST);
    assert_int_equal(kvf_lease_release(f->client, old.lease), KVF_ERR_INVALID);
    assert_int_equal(kvf_lease_release(f->client, new.lease), KVF_OK);
    memset(stage.payload, 1, 100); /* still ours to write */
    item = (struct kvf_put_item){
        .struct_bytes = sizeof(item),
        .source = KVF_SOURCE_STAGED,
        .key = set.keys[1],
        .stage = stage.stage,
    };
    assert_int_equal(kvf_put(f->client, &item, 1, NULL, NULL), KVF_ERR_DISCONNECTED);
    assert_int_equal(kvf_stage_release(f->client, stage.stage), KVF_ERR_INVALID);
}

static void goodbye_is_a_break_and_no_reconnect_is_kept(void **state)
{
    static struct key_set set;
    struct fixture *f = *state;
    struct kvf_event event;
    struct kvf_hit hit;
    uint64_t round_trip_ns;
    uint32_t n;

    f->options.flags = KVF_ATTACH_NO_RECONNECT;
    fixture_open(f);
    keys_fill(&set, "bye", 1);
    kvf_fake_daemon_command(f->daemon, KVF_FAKE_BYE);
    assert_int_equal(kvf_poll(f->client, &event, 1, 60000, &n), KVF_ERR_DISCONNECTED);
    assert_non_null(strstr(f->log, "goodbye"));
    assert_int_equal(kvf_poll(f->client, &event, 1, 0, &n), KVF_ERR_DISCONNECTED);
    assert_int_equal(kvf_get(f->client, set.keys, 1, NULL, &hit), KVF_ERR_DISCONNECTED);
    assert_int_equal(kvf_ping(f->client, 50, &round_trip_ns), KVF_ERR_DISCONNECTED);
    assert_int_equal(kvf_fake_daemon_facts(f->daemon).attaches, 1);
}

/* Break after break while the caller keeps a lease of each connection: memory and addresses are
 * bounded, the handle waits instead, and releasing one lets it go on. */
static void kept_leases_bound_reconnects(void **state)
{
    static struct key_set set;
    struct fixture *f = *state;
    struct kvf_hit hits[17];
    uint64_t round_trip_ns;
    uint32_t n = 0;

    fixture_open(f);
    keys_fill(&set, "bound", 1);
    assert_int_equal(put_bytes(f, &set.keys[0], "data", 4), KVF_OK);
    while (n < 17 && kvf_ping(f->client, n < 16 ? 60000 : 100, &round_trip_ns) == KVF_OK) {
        assert_int_equal(kvf_get(f->client, set.keys, 1, NULL, &hits[n++]), KVF_OK);
        kvf_fake_daemon_command(f->daemon, KVF_FAKE_HANG_UP);
        (void)kvf_ping(f->client, 0, &round_trip_ns); /* notices */
    }
    assert_int_equal(n, 16);
    for (uint32_t i = 0; i < n; i++) {
        assert_memory_equal(hits[i].payload, "data", 4);
    }
    assert_int_equal(kvf_lease_release(f->client, hits[3].lease), KVF_ERR_LOST);
    assert_int_equal(kvf_ping(f->client, 60000, &round_trip_ns), KVF_OK);
}

static void descriptor_tells_of_a_break(void **state)
{
    struct fixture *f = *state;
    struct kvf_event event;
    uint32_t n;

    fixture_open(f);
    assert_true(kvf_fd(f->client) >= 0);
    kvf_fake_daemon_command(f->daemon, KVF_FAKE_HANG_UP);
    while (kvf_poll(f->client, &event, 1, 60000, &n) != KVF_ERR_DISCONNECTED) {
    }
    while (kvf_fake_daemon_facts(f->daemon).attaches < 2) {
        assert_int_equal(kvf_poll(f->client, &event, 1, 20, &n), KVF_EMPTY);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FIXTURE_TEST(no_daemon_is_told_apart),
        FIXTURE_TEST(refusals_reach_the_caller),
        FIXTURE_TEST(silent_daemons_time_out),
        FIXTURE_TEST(lossy_falls_back_to_exact),
        FIXTURE_TEST(lies_end_the_attach),
        FIXTURE_TEST(impossible_completions_end_the_session),
        FIXTURE_TEST(impossible_runs_end_the_session),
        FIXTURE_TEST(repeated_blocks_end_the_session),
        FIXTURE_TEST(death_completes_what_is_in_flight),
        FIXTURE_TEST(leases_of_a_dead_daemon_are_lost_but_readable),
        FIXTURE_TEST(goodbye_is_a_break_and_no_reconnect_is_kept),
        FIXTURE_TEST(kept_leases_bound_reconnects),
        FIXTURE_TEST(descriptor_tells_of_a_break),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
