/* SPDX-License-Identifier: Apache-2.0
 *
 * test_profiles.c: which profile a client is given by a daemon with a calibration.dir: one that has
 * passed for its model, be it of the build or of a file, and "exact" with a reason otherwise.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <signal.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/random.h"
#include "codec/profile_file.h"
#include "tests/fault/raw_client.h"
#include "tests/support/blocks.h"
#include "tests/support/daemon.h"

enum {
    LAYERS = 3,
    HEADS = 2,
    DIM = 64,
    TOKENS = 16
};

struct pages {
    uint16_t k[LAYERS][TOKENS][HEADS][DIM];
    uint16_t v[LAYERS][TOKENS][HEADS][DIM];
};

static const struct kvf_geometry geometry = {.struct_bytes = sizeof(geometry),
                                             .kind = KVF_KIND_KV,
                                             .dtype = KVF_DTYPE_BF16,
                                             .rope_state = KVF_ROPE_POST,
                                             .n_layers = LAYERS,
                                             .n_heads = HEADS,
                                             .dim_k = DIM,
                                             .dim_v = DIM,
                                             .chunk_tokens = TOKENS};

static struct kvf_test_daemon the_daemon;
static struct kvf_test_dir the_files;
static char the_setting[KVF_TEST_PATH_BYTES + 32];
static struct pages in, out;

/* --- files ------------------------------------------------------------------------------------ */

static void file_write(const char *name, const char *text)
{
    char path[KVF_TEST_PATH_BYTES];

    kvf_test_dir_path(&the_files, name, path);
    kvf_test_file_write(path, text, strlen(text));
}

static void file_remove(const char *name)
{
    char path[KVF_TEST_PATH_BYTES];

    kvf_test_dir_path(&the_files, name, path);
    assert_int_equal(unlink(path), 0);
}

static struct kvf_profile_tensor saw(uint8_t bits, uint8_t flags)
{
    return (struct kvf_profile_tensor){.codec = KVF_CODEC_SAW,
                                       .bits = bits,
                                       .flags = KVF_TENSOR_SIGNS | flags,
                                       .rotate = 1,
                                       .clip = KVF_CLIP_FIXED,
                                       .rot_seed = KVF_PROFILE_ROTATION_SEED};
}

/* A profile for the model whose digest is all `model`: three kinds, K centred by given means in the
 * middle layer, V split by a given list in the last one. */
static struct kvf_profile_table *table_create(const char *name, uint8_t model, uint8_t bits)
{
    struct kvf_profile_table *table = kvf_profile_table_create();
    char why[KVF_PROFILE_WHY_BYTES];

    assert_non_null(table);
    memcpy(table->name, name, strlen(name));
    memset(table->weights_digest, model, sizeof(table->weights_digest));
    table->workloads = KVF_WORKLOAD_CODE | KVF_WORKLOAD_TOOL_CALLS;
    table->n_layers = LAYERS;
    table->n_heads = HEADS;
    table->dim_k = table->dim_v = DIM;
    table->rope_state = KVF_ROPE_POST;
    table->sink_tokens = 1;
    table->n_kinds = 3;
    table->kinds[0] = (struct kvf_profile_kind){saw(8, KVF_TENSOR_CENTER), saw(bits, 0)};
    table->kinds[1] = (struct kvf_profile_kind){saw(4, KVF_TENSOR_CENTER_PROFILE), saw(4, 0)};
    table->kinds[2] = (struct kvf_profile_kind){saw(6, 0), saw(0, KVF_TENSOR_SPLIT)};
    table->kinds[2].v.codec = KVF_CODEC_TQ;
    table->kinds[2].v.bits = 3;
    table->kinds[2].v.clip = 0;
    table->layer_kinds[1] = 1;
    table->layer_kinds[2] = 2;
    assert_int_equal(kvf_profile_table_add_array(table, KVF_PROFILE_MEANS_K), KVF_OK);
    assert_int_equal(kvf_profile_table_add_array(table, KVF_PROFILE_SPLITS_V), KVF_OK);
    for (uint32_t i = 0; i < HEADS * DIM; i++) {
        uint16_t half = (uint16_t)(0x3800 + 8 * i); /* .5 to 1.5 */

        memcpy(table->arrays[KVF_PROFILE_MEANS_K] + (HEADS * DIM + i) * sizeof(half), &half,
               sizeof(half));
    }
    for (uint32_t head = 0; head < HEADS; head++) {
        uint8_t *list = table->arrays[KVF_PROFILE_SPLITS_V] + (2 * HEADS + head) * DIM / 8;

        list[head] = list[head + 4] = 0xff;
    }
    assert_int_equal(kvf_profile_table_validate(table, why), KVF_OK);
    return table;
}

static void table_write(const char *file, const struct kvf_profile_table *table)
{
    char path[KVF_TEST_PATH_BYTES];
    char why[KVF_PROFILE_FILE_WHY_BYTES];

    kvf_test_dir_path(&the_files, file, path);
    assert_int_equal(kvf_profile_file_write(path, table, NULL, why), KVF_OK);
}

/* "balanced" has passed for model 1. */
static void write_passed(void)
{
    struct kvf_profile_table *table = kvf_profile_table_create();
    char why[KVF_PROFILE_WHY_BYTES];

    assert_non_null(table);
    memcpy(table->name, "balanced", 9);
    memset(table->weights_digest, 1, sizeof(table->weights_digest));
    table->workloads = KVF_WORKLOAD_CHAT;
    table->n_layers = LAYERS;
    table->n_heads = HEADS;
    table->dim_k = table->dim_v = DIM;
    table->rope_state = KVF_ROPE_POST;
    assert_int_equal(kvf_profile_table_validate(table, why), KVF_OK);
    table_write("passed.json", table);
    kvf_profile_table_destroy(table);
}

/* --- clients ---------------------------------------------------------------------------------- */

static char last_log[512];

static void keep_log(void *arg, int severity, const char *text)
{
    (void)arg;
    if (severity <= 1) {
        (void)snprintf(last_log, sizeof(last_log), "%s", text);
    }
}

static int open_profile(const char *profile, uint8_t model, struct kvf_client **client_out)
{
    struct kvf_options options;

    kvf_test_client_options(&the_daemon, &options);
    options.geometry = &geometry;
    options.profile = profile;
    options.log = keep_log;
    memset(options.weights_digest, model, sizeof(options.weights_digest));
    options.staging_bytes = 1 << 20;
    last_log[0] = '\0';
    return kvf_open(&options, client_out);
}

/* Attach; the profile in force and a part of what is said about it. */
static struct kvf_client *expect(const char *profile, uint8_t model, const char *in_force,
                                 const char *text)
{
    struct kvf_info info = {.struct_bytes = sizeof(info)};
    struct kvf_client *client;

    assert_int_equal(open_profile(profile, model, &client), KVF_OK);
    assert_int_equal(kvf_client_info(client, &info), KVF_OK);
    assert_string_equal(info.profile, in_force);
    assert_int_equal(info.lossless, strcmp(in_force, "exact") == 0);
    if (strstr(info.profile_text, text) == NULL) {
        print_error("%s\n", info.profile_text);
    }
    assert_non_null(strstr(info.profile_text, text));
    /* only a profile that was not asked for is worth a warning */
    assert_int_equal(strcmp(profile, in_force) != 0, last_log[0] != '\0');
    return client;
}

/* bf16 numbers around 1 */
static void pages_fill(struct pages *pages, uint64_t seed)
{
    struct kvf_random_seeded random;
    uint16_t *words = &pages->k[0][0][0][0];

    kvf_random_seeded_init(&random, seed);
    for (size_t i = 0; i < sizeof(*pages) / sizeof(*words); i++) {
        uint64_t word = kvf_random_seeded_next(&random);

        words[i] = (uint16_t)((word & 0x8000) | (0x3f00 + (word >> 16) % 0x100));
    }
}

static struct kvf_kv_view view_of(struct pages *pages, void *layers[2][LAYERS])
{
    struct kvf_kv_view view = {.struct_bytes = sizeof(view), .tokens_a_page = TOKENS};

    for (int l = 0; l < LAYERS; l++) {
        layers[0][l] = pages->k[l];
        layers[1][l] = pages->v[l];
    }
    view.k.layers = layers[0];
    view.k.token_stride_bytes = sizeof(pages->k[0][0]);
    view.k.head_stride_bytes = sizeof(pages->k[0][0][0]);
    view.k.page_stride_bytes = sizeof(pages->k[0]);
    view.v = view.k;
    view.v.layers = layers[1];
    return view;
}

/* The payload that a plan makes of `in`, and what it decodes to, are what the client puts and
 * gets. */
static void assert_as_reference(struct kvf_client *client, const struct kvf_codec_plan *plan,
                                uint64_t number)
{
    static struct pages want;
    void *layers[2][LAYERS];
    struct kvf_kv_view view = view_of(&in, layers);
    struct kvf_test_key bytes;
    struct kvf_put_item item = {.struct_bytes = sizeof(item),
                                .source = KVF_SOURCE_VIEW,
                                .key = kvf_test_key(number, &bytes),
                                .n_tokens = TOKENS,
                                .kv = &view};
    size_t record_bytes = plan->record_bytes_max;
    size_t workspace_bytes = (plan->workspace_bytes + 63) / 64 * 64;
    uint8_t *record = malloc(record_bytes);
    void *workspace = aligned_alloc(64, workspace_bytes);
    struct kvf_hit hit;
    size_t payload_bytes;

    assert_true(record != NULL && workspace != NULL);
    assert_int_equal(
        kvf_block_encode(plan, &view, 0, TOKENS, (struct kvf_record_page *)(void *)record,
                         record + KVF_RECORD_PAGE_BYTES, record_bytes - KVF_RECORD_PAGE_BYTES,
                         workspace, &payload_bytes),
        KVF_OK);
    assert_int_equal(kvf_put(client, &item, 1, NULL, NULL), KVF_OK);
    assert_int_equal(kvf_get(client, &item.key, 1, NULL, &hit), KVF_OK);
    assert_int_equal(hit.payload_bytes, payload_bytes);
    assert_memory_equal(hit.payload, record + KVF_RECORD_PAGE_BYTES, payload_bytes);
    view = view_of(&want, layers);
    assert_int_equal(kvf_block_decode(plan, record, KVF_RECORD_PAGE_BYTES + payload_bytes, 0, 0, 0,
                                      0, &view, workspace),
                     KVF_OK);
    view = view_of(&out, layers);
    assert_int_equal(kvf_decode(client, hit.record, hit.record_bytes, 0, 0, 0, 0, &view), KVF_OK);
    assert_memory_equal(&out, &want, sizeof(out));
    assert_int_equal(kvf_lease_release(client, hit.lease), KVF_OK);
    free(workspace);
    free(record);
}

static int has_block(struct kvf_client *client, uint64_t number)
{
    struct kvf_test_key bytes;
    struct kvf_key key = kvf_test_key(number, &bytes);
    struct kvf_hit hit;

    return kvf_get(client, &key, 1, NULL, &hit);
}

/* --- tests ------------------------------------------------------------------------------------ */

static void start(void)
{
    (void)snprintf(the_setting, sizeof(the_setting), "calibration.dir=%s", the_files.path);
    kvf_test_daemon_set(&the_daemon, the_setting);
    kvf_test_daemon_start(&the_daemon);
}

static void test_profiles_of_the_build_must_pass(void **state)
{
    static struct kvf_codec_plan plan;
    struct kvf_client *client;

    (void)state;
    write_passed();
    start();
    pages_fill(&in, 1);
    client = expect("balanced", 1, "balanced",
                    "has passed calibration for this model on chat: passed.json");
    assert_int_equal(kvf_codec_plan_init(&plan, &geometry, "balanced"), KVF_OK);
    assert_as_reference(client, &plan, 100);
    kvf_close(client);
    kvf_close(
        expect("balanced", 2, "exact", "calibration.dir has no file of it for these weights"));
    kvf_close(expect("balanced", 0, "exact", "the client says no weights_digest"));
    kvf_close(expect("safe", 1, "exact", "run kvferry calibrate, or allow it"));
    kvf_close(expect("exact", 1, "exact", ""));
}

static void test_profiles_of_files(void **state)
{
    static struct kvf_codec_plan plan;
    struct kvf_profile_table *own = table_create("own", 1, 5);
    struct kvf_profile_table *other = table_create("other", 2, 5);
    struct kvf_client *client;
    struct kvf_client *second;

    (void)state;
    write_passed();
    table_write("own.json", own);
    table_write("other.json", other);
    start();
    pages_fill(&in, 2);
    client = expect("own", 1, "own",
                    "has passed calibration for this model on tool-calls, code: own.json");
    assert_int_equal(kvf_codec_plan_init_table(&plan, &geometry, own, 0), KVF_OK);
    assert_as_reference(client, &plan, 200);
    second = expect("own", 1, "own", "own.json");
    assert_int_equal(has_block(second, 200), KVF_OK);
    kvf_close(second);
    second = expect("balanced", 1, "balanced", "passed.json");
    assert_int_equal(has_block(second, 200), KVF_MISS);
    kvf_close(second);
    kvf_close(expect("other", 1, "exact", "no file of it for these weights"));
    kvf_close(expect("own", 3, "exact", "run kvferry calibrate"));
    kvf_close(expect("none", 1, "exact", "neither the build (kvferry profiles) nor calibration"));
    assert_int_equal(open_profile("No One", 1, &second), KVF_ERR_INVALID);
    assert_non_null(strstr(last_log, "there is no profile \"No One\""));
    assert_as_reference(client, &plan, 201);
    kvf_close(client);
    kvf_profile_table_destroy(own);
    kvf_profile_table_destroy(other);
}

/* A file that is changed between two starts makes another profile, whose clients find nothing of
 * what the first one stored; a client that was attached follows. */
static void test_changed_files(void **state)
{
    static struct kvf_codec_plan plans[2];
    struct kvf_profile_table *tables[2] = {table_create("own", 1, 5), table_create("own", 1, 4)};
    struct kvf_info info = {.struct_bytes = sizeof(info)};
    struct kvf_client *client;
    uint64_t round_trip_ns;

    (void)state;
    table_write("own.json", tables[0]);
    start();
    pages_fill(&in, 3);
    client = expect("own", 1, "own", "own.json");
    for (int i = 0; i < 2; i++) {
        assert_int_equal(kvf_codec_plan_init_table(&plans[i], &geometry, tables[i], 0), KVF_OK);
    }
    assert_as_reference(client, &plans[0], 300);
    assert_int_equal(kvf_test_daemon_stop(&the_daemon), 0);
    table_write("own.json", tables[1]);
    kvf_test_daemon_start(&the_daemon);
    while (kvf_ping(client, 60000, &round_trip_ns) != KVF_OK) {
    }
    assert_int_equal(has_block(client, 300), KVF_MISS);
    assert_as_reference(client, &plans[1], 301);
    /* and back: what was stored by it is there */
    assert_int_equal(kvf_test_daemon_stop(&the_daemon), 0);
    table_write("own.json", tables[0]);
    kvf_test_daemon_start(&the_daemon);
    while (kvf_ping(client, 60000, &round_trip_ns) != KVF_OK) {
    }
    assert_int_equal(has_block(client, 300), KVF_OK);
    assert_int_equal(has_block(client, 301), KVF_MISS);
    /* without the file: "exact" */
    assert_int_equal(kvf_test_daemon_stop(&the_daemon), 0);
    file_remove("own.json");
    kvf_test_daemon_start(&the_daemon);
    while (kvf_ping(client, 60000, &round_trip_ns) != KVF_OK) {
    }
    assert_int_equal(kvf_client_info(client, &info), KVF_OK);
    assert_string_equal(info.profile, "exact");
    assert_int_equal(info.lossless, 1);
    assert_int_equal(has_block(client, 300), KVF_MISS);
    assert_int_equal(kvf_codec_plan_init(&plans[0], &geometry, "exact"), KVF_OK);
    assert_as_reference(client, &plans[0], 302);
    kvf_close(client);
    for (int i = 0; i < 2; i++) {
        kvf_profile_table_destroy(tables[i]);
    }
}

/* Files that are wrong are named in the log, and the others hold. */
static void test_wrong_files(void **state)
{
    struct kvf_profile_table *own = table_create("own", 1, 5);
    char path[KVF_TEST_PATH_BYTES];

    (void)state;
    write_passed();
    file_write("a-bad.json", "{\"kvferry_profile\": 1, \"name\": \"own\"");
    file_write("b-empty.json", "");
    file_write("c-old.txt", "not looked at");
    kvf_test_dir_path(&the_files, "d-folder.json", path);
    assert_int_equal(mkdir(path, 0755), 0);
    table_write("own.json", own);
    table_write("second.json", own);
    table_write("0\t.json", own);
    start();
    kvf_close(expect("balanced", 1, "balanced", "passed.json"));
    kvf_close(expect("own", 1, "own", "own.json"));
    assert_true(kvf_test_daemon_log_has(&the_daemon, "a-bad.json: line 1: is not JSON"));
    assert_true(kvf_test_daemon_log_has(&the_daemon, "b-empty.json: line"));
    assert_true(kvf_test_daemon_log_has(&the_daemon, "d-folder.json: is not a regular file"));
    assert_true(kvf_test_daemon_log_has(&the_daemon, "second.json: has the profile own for the"));
    assert_true(kvf_test_daemon_log_has(&the_daemon, "a file with control characters in its name"));
    assert_false(kvf_test_daemon_log_has(&the_daemon, "c-old"));
    assert_int_equal(rmdir(path), 0);
    kvf_profile_table_destroy(own);
}

static void reload_and_wait(const char *log)
{
    const struct timespec moment = {.tv_nsec = 1000000};

    assert_int_equal(kill(the_daemon.process.pid, SIGHUP), 0);
    while (!kvf_test_daemon_log_has(&the_daemon, log)) {
        nanosleep(&moment, NULL);
    }
}

/* Files that come and go while the daemon serves: for clients that attach later; who is attached
 * keeps what it has. */
static void test_reload(void **state)
{
    static struct kvf_codec_plan plan;
    struct kvf_profile_table *own = table_create("own", 1, 5);
    struct kvf_client *before;
    struct kvf_client *client;

    (void)state;
    start();
    pages_fill(&in, 4);
    before = expect("own", 1, "exact", "neither the build (kvferry profiles) nor calibration");
    table_write("own.json", own);
    reload_and_wait("read again: 1 profiles have passed, 0 before; 1 clients have another profile");
    client = expect("own", 1, "own", "own.json");
    assert_int_equal(kvf_codec_plan_init_table(&plan, &geometry, own, 0), KVF_OK);
    assert_as_reference(client, &plan, 400);
    assert_int_equal(has_block(before, 400), KVF_MISS);
    file_remove("own.json");
    reload_and_wait("read again: 0 profiles have passed, 1 before; 0 clients have another profile");
    kvf_close(expect("own", 1, "exact", "neither the build (kvferry profiles) nor calibration"));
    assert_as_reference(client, &plan, 401);
    kvf_close(client);
    kvf_close(before);
    kvf_profile_table_destroy(own);
}

/* A file of a model of another shape does not count, whatever its digest. */
static void test_other_shapes(void **state)
{
    struct kvf_profile_table *own = table_create("own", 1, 5);
    char why[KVF_PROFILE_WHY_BYTES];

    (void)state;
    own->rope_state = KVF_ROPE_PRE;
    assert_int_equal(kvf_profile_table_validate(own, why), KVF_OK);
    table_write("own.json", own);
    start();
    kvf_close(expect("own", 1, "exact", "own.json does not fit: it was calibrated with 1 as rope"));
    kvf_profile_table_destroy(own);
}

/* Who speaks a protocol without PROFILE is told. */
static void test_older_clients(void **state)
{
    struct kvf_profile_table *own = table_create("own", 1, 5);
    struct kvf_wire_hello hello;
    struct raw_client raw;

    (void)state;
    table_write("own.json", own);
    start();
    for (uint16_t version = 1; version < KVF_WIRE_VERSION_PROFILES; version++) {
        raw_connect(&raw, the_daemon.socket_path);
        raw_hello(&hello);
        hello.version_max = version;
        hello.geometry = (struct kvf_wire_geometry){.kind = geometry.kind,
                                                    .dtype = geometry.dtype,
                                                    .rope_state = geometry.rope_state,
                                                    .n_layers = LAYERS,
                                                    .n_heads = HEADS,
                                                    .dim_k = DIM,
                                                    .dim_v = DIM,
                                                    .chunk_tokens = TOKENS};
        hello.record_bytes_max = 1 << 20;
        memset(hello.profile, 0, sizeof(hello.profile));
        memcpy(hello.profile, "own", 3);
        memset(hello.weights_digest, 1, sizeof(hello.weights_digest));
        assert_false(raw_begin(&raw, &hello));
        assert_int_equal(raw.welcome.status, KVF_ERR_VERSION);
        assert_non_null(strstr(raw.welcome.text, "takes protocol 3; the client speaks"));
        raw_close(&raw);
    }
    kvf_profile_table_destroy(own);
}

static int setup(void **state)
{
    (void)state;
    kvf_test_daemon_create(&the_daemon, NULL);
    kvf_test_dir_create(&the_files);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.protocol_errors"), 0);
    kvf_test_daemon_destroy(&the_daemon);
    kvf_test_dir_remove(&the_files);
    return 0;
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_profiles_of_the_build_must_pass),
        TEST(test_profiles_of_files),
        TEST(test_changed_files),
        TEST(test_wrong_files),
        TEST(test_reload),
        TEST(test_other_shapes),
        TEST(test_older_clients),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
