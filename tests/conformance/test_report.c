/* SPDX-License-Identifier: Apache-2.0
 *
 * test_report.c: what engines report arrives in the daemon's metrics, also across its restarts; and
 * metrics of clients: profiles in force, leases, incomplete sets, records that do not decode.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "tests/fault/raw_client.h"
#include "tests/support/blocks.h"
#include "tests/support/daemon.h"

#define WAIT_MS     60000
#define BLOCK_BYTES 20000
#define LAYERS      2
#define HEADS       2
#define DIM         64
#define TOKENS      16
#define HANG_UP_MS  60000

static struct kvf_test_daemon the_daemon;

/* Wait until the counter has this value, with the client doing what engines do: asking again. */
static void wait_counted(struct kvf_client *client, const char *name, uint64_t wanted)
{
    uint64_t end_ns = kvf_now_ns() + WAIT_MS * KVF_NS_PER_MS;
    char path[96];

    snprintf(path, sizeof(path), "metrics.%s", name);
    while (kvf_test_daemon_number(&the_daemon, path) != wanted) {
        uint64_t round_trip_ns;

        (void)kvf_ping(client, 1000, &round_trip_ns);
        if (kvf_now_ns() >= end_ns) {
            fail_msg("%s does not become %llu but %llu", name, (unsigned long long)wanted,
                     (unsigned long long)kvf_test_daemon_number(&the_daemon, path));
        }
    }
}

static void test_every_kind_arrives(void **state)
{
    static const struct {
        int kind;
        const char *name;
        uint64_t factor;
    } kinds[] = {
        {KVF_REPORT_LOAD_FAILED, "engine_load_failures", 1},
        {KVF_REPORT_TAINT_REFUSED, "engine_taint_refusals", 1},
        {KVF_REPORT_CORRUPT, "engine_corrupt_blocks", 1},
        {KVF_REPORT_TOKENS_COMPUTED, "engine_prompt_tokens_computed", 1},
        {KVF_REPORT_TOKENS_ENGINE, "engine_prompt_tokens_cached", 1},
        {KVF_REPORT_TOKENS_LOADED, "engine_prompt_tokens_loaded", 1},
        {KVF_REPORT_SAVED_US, "engine_saved_ns", 1000},
        {KVF_REPORT_SPENT_US, "engine_spent_ns", 1000},
        {KVF_REPORT_GPU_US, "engine_gpu_ns", 1000},
        {KVF_REPORT_DRIFT_CHUNKS, "engine_drift_chunks", 1},
        {KVF_REPORT_DRIFT_PPM, "engine_drift_error_ppm", 1},
        {KVF_REPORT_GPU_DECODE_US, "engine_gpu_decode_ns", 1000},
    };
    struct kvf_client *client = kvf_test_client_open(&the_daemon, NULL);
    uint64_t n = sizeof(kinds) / sizeof(kinds[0]);

    (void)state;
    for (uint64_t i = 0; i < n; i++) {
        assert_int_equal(kvf_report(client, kinds[i].kind, 0), KVF_OK);
        for (uint64_t times = 0; times < 100; times++) { /* more than the ring has room for */
            assert_int_equal(kvf_report(client, kinds[i].kind, 1000 + i), KVF_OK);
        }
    }
    for (uint64_t i = 0; i < n; i++) {
        wait_counted(client, kinds[i].name, 100 * (1000 + i) * kinds[i].factor);
    }
    /* time of GPUs is also told by namespace, and so by tenant and profile */
    assert_int_equal(kvf_test_daemon_ask(&the_daemon, "/v1/namespaces", "namespaces.0.gpu_ns"),
                     100 * (1000 + KVF_REPORT_GPU_US - 1) * 1000);
    assert_int_equal(
        kvf_test_daemon_ask(&the_daemon, "/v1/namespaces", "namespaces.0.gpu_decode_ns"),
        100 * (1000 + KVF_REPORT_GPU_DECODE_US - 1) * 1000);
    assert_int_equal(kvf_report(client, 0, 1), KVF_ERR_INVALID);
    assert_int_equal(kvf_report(client, (int)n + 1, 1), KVF_ERR_INVALID);
    assert_int_equal(kvf_report(client, 1, UINT64_C(1) << 41), KVF_ERR_INVALID);
    assert_int_equal(kvf_report(NULL, 1, 1), KVF_ERR_INVALID);
    kvf_close(client);
}

static void test_reports_wait_for_the_daemon(void **state)
{
    struct kvf_client *client = kvf_test_client_open(&the_daemon, NULL);

    (void)state;
    kvf_test_daemon_kill(&the_daemon);
    for (int i = 0; i < 100; i++) {
        assert_int_equal(kvf_report(client, KVF_REPORT_TOKENS_COMPUTED, 7), KVF_OK);
        (void)kvf_ping(client, 1, &(uint64_t){0}); /* it notices */
    }
    kvf_test_daemon_start(&the_daemon);
    assert_int_equal(kvf_report(client, KVF_REPORT_TOKENS_COMPUTED, 1), KVF_OK);
    /* what went into the ring of a daemon that had gone already is lost: the first ones at most */
    while (kvf_test_daemon_number(&the_daemon, "metrics.engine_prompt_tokens_computed") < 7 + 1) {
        (void)kvf_ping(client, 100, &(uint64_t){0});
    }
    kvf_close(client);
}

/* A client that has agreed on the version before, and reports all the same, breaks the protocol. */
static void test_older_versions_have_no_reports(void **state)
{
    uint64_t before = kvf_test_daemon_number(&the_daemon, "metrics.protocol_errors");

    (void)state;
    for (uint16_t version = KVF_WIRE_VERSION_MIN; version <= KVF_WIRE_VERSION_REPORT; version++) {
        struct kvf_wire_hello hello;
        struct kvf_shm_sqe sqe;
        struct raw_client raw;

        raw_hello(&hello);
        hello.version_max = version;
        raw_connect(&raw, the_daemon.socket_path);
        assert_true(raw_begin(&raw, &hello));
        assert_true(raw_mapped(&raw));
        assert_int_equal(raw.welcome.version, version);
        raw_sqe(&raw, &sqe, KVF_OP_REPORT, 0);
        sqe.request = 0;
        sqe.arg = UINT64_C(1) << KVF_REPORT_KIND_BITS | KVF_REPORT_TAINT_REFUSED;
        raw_submit(&raw, &sqe, NULL, 0);
        raw_wake(&raw);
        if (version < KVF_WIRE_VERSION_REPORT) {
            assert_true(raw_is_hung_up(&raw, HANG_UP_MS));
        } else {
            assert_true(kvf_test_daemon_wait_number(&the_daemon, "metrics.engine_taint_refusals", 1,
                                                    WAIT_MS));
        }
        raw_close(&raw);
    }
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.protocol_errors"),
                     before + KVF_WIRE_VERSION_REPORT - KVF_WIRE_VERSION_MIN);
}

/* The twelfth kind came with a version of its own. */
static void test_version_5_has_eleven_kinds(void **state)
{
    (void)state;
    for (uint64_t kind = KVF_REPORT_DRIFT_PPM; kind <= KVF_REPORT_GPU_DECODE_US; kind++) {
        struct kvf_wire_hello hello;
        struct kvf_shm_sqe sqe;
        struct raw_client raw;
        uint64_t before = kvf_test_daemon_number(&the_daemon, "metrics.protocol_errors");

        raw_hello(&hello);
        hello.version_max = KVF_WIRE_VERSION_REPORT;
        raw_connect(&raw, the_daemon.socket_path);
        assert_true(raw_begin(&raw, &hello));
        assert_true(raw_mapped(&raw));
        raw_sqe(&raw, &sqe, KVF_OP_REPORT, 0);
        sqe.request = 0;
        sqe.arg = UINT64_C(1) << KVF_REPORT_KIND_BITS | kind;
        raw_submit(&raw, &sqe, NULL, 0);
        raw_wake(&raw);
        if (kind == KVF_REPORT_GPU_DECODE_US) {
            assert_true(raw_is_hung_up(&raw, HANG_UP_MS));
            assert_true(kvf_test_daemon_wait_number(&the_daemon, "metrics.protocol_errors",
                                                    before + 1, WAIT_MS));
        }
        raw_close(&raw);
    }
}

static uint16_t the_pages[2][LAYERS][TOKENS][HEADS][DIM];

/* A rank of two with pages of its own, profile exact. */
static struct kvf_client *open_rank(uint16_t shard, uint8_t dtype, struct kvf_geometry *geometry)
{
    struct kvf_options options;
    struct kvf_client *client;

    *geometry = (struct kvf_geometry){
        .struct_bytes = sizeof(*geometry),
        .kind = KVF_KIND_KV,
        .dtype = dtype,
        .rope_state = KVF_ROPE_POST,
        .n_layers = LAYERS,
        .n_heads = HEADS,
        .dim_k = (uint16_t)(sizeof(the_pages[0][0][0][0]) / kvf_dtype_bytes(dtype)),
        .dim_v = (uint16_t)(sizeof(the_pages[0][0][0][0]) / kvf_dtype_bytes(dtype)),
        .chunk_tokens = TOKENS,
    };
    kvf_test_client_options(&the_daemon, &options);
    options.geometry = geometry;
    options.profile = "exact";
    options.shard = shard;
    options.shard_count = 2;
    options.staging_bytes = 1 << 20;
    assert_int_equal(kvf_open(&options, &client), KVF_OK);
    return client;
}

static void view_of(struct kvf_kv_view *view, void *layers[2][LAYERS])
{
    struct kvf_tensor_view *const sides[2] = {&view->k, &view->v};

    memset(view, 0, sizeof(*view));
    view->struct_bytes = sizeof(*view);
    view->tokens_a_page = TOKENS;
    for (int side = 0; side < 2; side++) {
        for (int layer = 0; layer < LAYERS; layer++) {
            layers[side][layer] = the_pages[side][layer];
        }
        sides[side]->layers = layers[side];
        sides[side]->token_stride_bytes = sizeof(the_pages[0][0][0]);
        sides[side]->head_stride_bytes = sizeof(the_pages[0][0][0][0]);
    }
}

static void test_clients_and_their_records(void **state)
{
    struct kvf_geometry geometry;
    struct kvf_client *client = open_rank(0, KVF_DTYPE_BF16, &geometry);
    struct kvf_client *other = open_rank(1, KVF_DTYPE_BF16, &geometry);
    void *layers[2][LAYERS];
    struct kvf_kv_view view;
    struct kvf_test_key bytes;
    struct kvf_put_item item = {
        .struct_bytes = sizeof(item), .key = kvf_test_key(1, &bytes), .kv = &view};
    struct kvf_hit hit;
    uint8_t *spoiled;

    (void)state;
    view_of(&view, layers);
    assert_int_equal(kvf_put(client, &item, 1, NULL, NULL), KVF_OK);
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.incomplete_sets"), 1);
    assert_int_equal(kvf_put(other, &item, 1, NULL, NULL), KVF_OK);
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.incomplete_sets"), 0);

    assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.lease_oldest_ns"), 0);
    assert_int_equal(kvf_get(client, &item.key, 1, NULL, &hit), KVF_OK);
    assert_true(kvf_test_daemon_number(&the_daemon, "metrics.lease_oldest_ns") > 0);

    spoiled = malloc(hit.record_bytes);
    assert_non_null(spoiled);
    memcpy(spoiled, hit.record, hit.record_bytes);
    assert_int_equal(kvf_decode(client, spoiled, hit.record_bytes, 0, 0, 0, 0, &view), KVF_OK);
    spoiled[100] ^= 1; /* of its header */
    assert_int_equal(kvf_decode(client, spoiled, hit.record_bytes, 0, 0, 0, 0, &view),
                     KVF_ERR_CORRUPT);
    free(spoiled);
    wait_counted(client, "engine_corrupt_blocks", 1);
    assert_int_equal(kvf_lease_release(client, hit.lease), KVF_OK);
    wait_counted(client, "lease_oldest_ns", 0);
    kvf_close(client);
    kvf_close(other);
}

/* A chunk that has been computed again, a little and wholly different from what is stored. */
static void test_drift(void **state)
{
    struct kvf_geometry geometry;
    struct kvf_client *client = open_rank(0, KVF_DTYPE_BF16, &geometry);
    void *layers[2][LAYERS];
    struct kvf_kv_view view;
    struct kvf_test_key bytes;
    struct kvf_put_item item = {
        .struct_bytes = sizeof(item), .key = kvf_test_key(7, &bytes), .kv = &view};
    uint16_t *values = &the_pages[0][0][0][0][0];
    size_t n = sizeof(the_pages) / sizeof(uint16_t);
    double error;

    (void)state;
    for (size_t i = 0; i < n; i++) {
        values[i] = 0x3f80; /* 1.0 */
    }
    view_of(&view, layers);
    assert_int_equal(kvf_drift(client, &item, &error), KVF_MISS);
    assert_int_equal(kvf_put(client, &item, 1, NULL, NULL), KVF_OK);
    assert_int_equal(kvf_drift(client, &item, &error), KVF_OK);
    assert_true(error == 0);
    wait_counted(client, "engine_drift_chunks", 1);
    wait_counted(client, "engine_drift_error_ppm", 0);

    values[n / 2] = 0x4000; /* one of them is 2.0 */
    assert_int_equal(kvf_drift(client, &item, &error), KVF_OK);
    assert_true(error > 0.99 / sqrt((double)n + 3) && error < 1.01 / sqrt((double)n + 3));

    /* a put finds out by itself, the first time and then once in 16 */
    for (int i = 0; i < 17; i++) {
        assert_int_equal(kvf_put(client, &item, 1, NULL, NULL), KVF_ERR_CONFLICT);
    }
    wait_counted(client, "engine_drift_chunks", 4);
    wait_counted(client, "engine_drift_error_ppm", 3 * (uint64_t)(error * 1e6));
    for (size_t i = 0; i < n; i++) {
        values[i] = 0;
    }
    assert_int_equal(kvf_drift(client, &item, &error), KVF_OK);
    assert_true(error == 1); /* beside nothing, all of it */
    item.source = KVF_SOURCE_BYTES;
    assert_int_equal(kvf_drift(client, &item, &error), KVF_ERR_INVALID);
    kvf_close(client);
}

/* Bytes that are no numbers: the same, or not. */
static void test_drift_of_opaque_bytes(void **state)
{
    struct kvf_geometry geometry;
    struct kvf_client *client = open_rank(0, KVF_DTYPE_U8, &geometry);
    void *layers[2][LAYERS];
    struct kvf_kv_view view;
    struct kvf_test_key bytes;
    struct kvf_put_item item = {
        .struct_bytes = sizeof(item), .key = kvf_test_key(8, &bytes), .kv = &view};
    uint8_t *last = (uint8_t *)(&the_pages + 1) - 1;
    double error;

    (void)state;
    memset(the_pages, 0x3f, sizeof(the_pages));
    view_of(&view, layers);
    assert_int_equal(kvf_put(client, &item, 1, NULL, NULL), KVF_OK);
    assert_int_equal(kvf_drift(client, &item, &error), KVF_OK);
    assert_true(error == 0);
    *last ^= 1;
    assert_int_equal(kvf_drift(client, &item, &error), KVF_OK);
    assert_true(error == 1);
    *last ^= 1;
    assert_int_equal(kvf_drift(client, &item, &error), KVF_OK);
    assert_true(error == 0);
    wait_counted(client, "engine_drift_chunks", 3);
    wait_counted(client, "engine_drift_error_ppm", 1000000);
    kvf_close(client);
}

static int setup(void **state)
{
    static const char *const sets[] = {"staging.total=64MiB", "clients.offence_delay=0", NULL};

    (void)state;
    kvf_test_daemon_create(&the_daemon, sets);
    kvf_test_daemon_start(&the_daemon);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    kvf_test_daemon_destroy(&the_daemon);
    return 0;
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_every_kind_arrives),
        TEST(test_reports_wait_for_the_daemon),
        TEST(test_older_versions_have_no_reports),
        TEST(test_version_5_has_eleven_kinds),
        TEST(test_clients_and_their_records),
        TEST(test_drift),
        TEST(test_drift_of_opaque_bytes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
