/* SPDX-License-Identifier: Apache-2.0
 *
 * test_client_profile.c: profiles that the daemon sends: used if they are right and fit, and
 * refused with a reason otherwise.
 */
#include "codec/codec.h"
#include "tests/unit/client/fixture.h"

#include <unistd.h>

static const struct kvf_geometry geometry = {
    .struct_bytes = sizeof(geometry),
    .kind = KVF_KIND_KV,
    .dtype = KVF_DTYPE_BF16,
    .n_layers = 3,
    .n_heads = 1,
    .dim_k = 64,
    .dim_v = 64,
    .chunk_tokens = 16,
};

/* K of the middle layer at other bits than the others. */
static struct kvf_profile_table *table_create(uint8_t bits)
{
    const struct kvf_profile_tensor saw = {.codec = KVF_CODEC_SAW,
                                           .bits = 4,
                                           .flags = KVF_TENSOR_SIGNS,
                                           .rotate = 1,
                                           .clip = KVF_CLIP_FIXED,
                                           .rot_seed = KVF_PROFILE_ROTATION_SEED};
    struct kvf_profile_table *table = kvf_profile_table_create();
    char why[KVF_PROFILE_WHY_BYTES];

    assert_non_null(table);
    memcpy(table->name, "own", 4);
    memset(table->weights_digest, 7, sizeof(table->weights_digest));
    table->workloads = KVF_WORKLOAD_CODE;
    table->n_layers = 3;
    table->n_heads = 1;
    table->dim_k = 64;
    table->dim_v = 64;
    table->n_kinds = 2;
    table->kinds[0].k = table->kinds[0].v = table->kinds[1].k = table->kinds[1].v = saw;
    table->kinds[1].k.bits = bits;
    table->layer_kinds[1] = 1;
    assert_int_equal(kvf_profile_table_validate(table, why), KVF_OK);
    return table;
}

static void script_own(struct fixture *f, struct kvf_profile_table *table)
{
    f->options.geometry = &geometry;
    f->options.profile = "own";
    memset(f->options.weights_digest, 7, sizeof(f->options.weights_digest));
    f->script.table = table;
    f->script.welcome_text = "profile own has passed calibration for this model on code: own.json";
}

/* Encode something and look at what its middle layer takes. */
static uint8_t middle_bits(struct fixture *f)
{
    static uint16_t pages[3][2][16 * 64];
    void *layers[2][3];
    struct kvf_kv_view view = {.struct_bytes = sizeof(view), .tokens_a_page = 16};
    struct kvf_stage stage;
    const struct kvf_record_page *page;
    size_t record_bytes;
    uint8_t bits;

    for (int l = 0; l < 3; l++) {
        layers[0][l] = pages[l][0];
        layers[1][l] = pages[l][1];
    }
    view.k = (struct kvf_tensor_view){.layers = layers[0],
                                      .token_stride_bytes = 128,
                                      .head_stride_bytes = 128,
                                      .page_stride_bytes = 2048};
    view.v = view.k;
    view.v.layers = layers[1];
    assert_int_equal(kvf_stage_acquire(f->client, 16384, &stage), KVF_OK);
    assert_int_equal(kvf_encode(f->client, &stage, 0, 16, &view, &record_bytes), KVF_OK);
    page = stage.record;
    bits = page->layer_bits[1] & 15;
    assert_int_equal(page->layer_bits[0], 0x44);
    assert_int_equal(kvf_stage_release(f->client, stage.stage), KVF_OK);
    return bits;
}

static void sent_profiles_are_used(void **state)
{
    struct fixture *f = *state;
    struct kvf_profile_table *table = table_create(6);
    struct kvf_info info = {.struct_bytes = sizeof(info)};

    script_own(f, table);
    fixture_open(f);
    assert_int_equal(kvf_client_info(f->client, &info), KVF_OK);
    assert_string_equal(info.profile, "own");
    assert_int_equal(info.lossless, 0);
    assert_string_equal(info.profile_text, f->script.welcome_text);
    assert_int_equal(middle_bits(f), 6);
    /* who was built before knows nothing of the text */
    memset(&info, 0xa5, sizeof(info));
    info.struct_bytes = 80;
    assert_int_equal(kvf_client_info(f->client, &info), KVF_OK);
    assert_string_equal(info.profile, "own");
    assert_int_equal(info.profile_text[0], (char)0xa5);
    f->client = kvf_close(f->client);
    kvf_profile_table_destroy(table);
}

/* A daemon that comes back may have another profile of that name, or none. */
static void profiles_change_with_the_daemon(void **state)
{
    struct fixture *f = *state;
    struct kvf_profile_table *tables[3] = {table_create(6), table_create(6), table_create(3)};
    struct kvf_info info = {.struct_bytes = sizeof(info)};
    uint64_t round_trip_ns;

    script_own(f, tables[0]);
    fixture_open(f);
    for (uint32_t i = 1; i < 3; i++) {
        assert_int_equal(middle_bits(f), 6);
        kvf_fake_daemon_stop(f->daemon);
        f->script.incarnation = i + 1;
        f->script.table = tables[i];
        fixture_serve(f);
        while (kvf_ping(f->client, 60000, &round_trip_ns) != KVF_OK) {
        }
    }
    assert_int_equal(middle_bits(f), 3);
    kvf_fake_daemon_stop(f->daemon);
    f->script.incarnation = 9;
    f->script.table = NULL;
    f->script.profile = "exact";
    f->script.welcome_text = "profile own has not passed";
    fixture_serve(f);
    while (kvf_ping(f->client, 60000, &round_trip_ns) != KVF_OK) {
    }
    assert_int_equal(kvf_client_info(f->client, &info), KVF_OK);
    assert_string_equal(info.profile, "exact");
    assert_string_equal(info.profile_text, "profile own has not passed");
    f->client = kvf_close(f->client);
    for (uint32_t i = 0; i < 3; i++) {
        kvf_profile_table_destroy(tables[i]);
    }
}

static void wrong_profiles_are_refused(void **state)
{
    static const struct {
        int status;
        const char *text;
    } cases[KVF_FAKE_PROFILE_FAULTS] = {
        [KVF_FAKE_PROFILE_UNSEALED] = {KVF_ERR_PROTOCOL, "seal"},
        [KVF_FAKE_PROFILE_PIPE] = {KVF_ERR_PROTOCOL, "memory"},
        [KVF_FAKE_PROFILE_CORRUPT] = {KVF_ERR_PROTOCOL, "sent has a wrong checksum"},
        [KVF_FAKE_PROFILE_LONG] = {KVF_ERR_PROTOCOL, "sent has an impossible length"},
        [KVF_FAKE_PROFILE_TWICE] = {KVF_ERR_PROTOCOL, "out of order"},
        [KVF_FAKE_PROFILE_LATE] = {KVF_ERR_MISMATCH, "does not work here"},
        [KVF_FAKE_PROFILE_OTHER] = {KVF_ERR_PROTOCOL, "sent profile \"own\" and chose \"xwn\""},
        [KVF_FAKE_PROFILE_PRINT] = {KVF_ERR_MISMATCH, "is not the same here"},
        [KVF_FAKE_PROFILE_MISSING] = {KVF_ERR_MISMATCH, "does not work here"},
    };
    struct fixture *f = *state;
    struct kvf_profile_table *table = table_create(6);
    int fds_before = dup(0);
    int fds_after;

    script_own(f, table);
    for (int fault = 1; fault < KVF_FAKE_PROFILE_FAULTS; fault++) {
        int status;

        f->script.profile_fault = (enum kvf_fake_profile_fault)fault;
        f->log[0] = '\0';
        fixture_serve(f);
        status = kvf_open(&f->options, &f->client);
        if (status != cases[fault].status || strstr(f->log, cases[fault].text) == NULL) {
            print_error("fault %d: %d %s\n", fault, status, f->log);
        }
        assert_int_equal(status, cases[fault].status);
        assert_non_null(strstr(f->log, cases[fault].text));
        assert_null(f->client);
        kvf_fake_daemon_stop(f->daemon);
        f->daemon = NULL;
    }
    fds_after = dup(0);
    assert_int_equal(fds_before + 1, fds_after);
    close(fds_before);
    close(fds_after);
    kvf_profile_table_destroy(table);
}

/* Right in itself, and not for this client. */
static void profiles_of_other_shapes_are_refused(void **state)
{
    struct fixture *f = *state;
    struct kvf_profile_table *table = table_create(6);
    struct kvf_geometry other = geometry;

    other.n_layers = 2;
    script_own(f, table);
    f->options.geometry = &other;
    fixture_serve(f);
    assert_int_equal(kvf_open(&f->options, &f->client), KVF_ERR_MISMATCH);
    assert_non_null(strstr(f->log, "does not fit: it was calibrated with 3 layers"));
    kvf_fake_daemon_stop(f->daemon);
    /* nor for one who asked for a lossless profile, or for opaque bytes */
    f->options.geometry = &geometry;
    f->options.profile = "exact";
    fixture_serve(f);
    assert_int_equal(kvf_open(&f->options, &f->client), KVF_ERR_PROTOCOL);
    assert_non_null(strstr(f->log, "lossy profile \"own\""));
    kvf_fake_daemon_stop(f->daemon);
    f->options.geometry = NULL;
    f->options.profile = NULL;
    fixture_serve(f);
    assert_int_equal(kvf_open(&f->options, &f->client), KVF_ERR_PROTOCOL);
    assert_non_null(strstr(f->log, "out of order"));
    kvf_profile_table_destroy(table);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(sent_profiles_are_used, fixture_setup, fixture_teardown),
        cmocka_unit_test_setup_teardown(profiles_change_with_the_daemon, fixture_setup,
                                        fixture_teardown),
        cmocka_unit_test_setup_teardown(wrong_profiles_are_refused, fixture_setup,
                                        fixture_teardown),
        cmocka_unit_test_setup_teardown(profiles_of_other_shapes_are_refused, fixture_setup,
                                        fixture_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
