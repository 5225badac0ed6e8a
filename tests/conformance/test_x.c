/* SPDX-License-Identifier: Apache-2.0
 *
 * test_x.c: inputs of layers through a daemon: put, got from memory and, packed, from the drive;
 * profiles that are for something else are refused, by the library and by the daemon.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "codec/codec.h"
#include "codec/codec_fp.h"
#include "tests/fault/raw_client.h"
#include "tests/support/blocks.h"
#include "tests/support/daemon.h"

enum {
    LAYERS = 6,
    WIDTH = 576,
    TOKENS = 48
};

struct inputs {
    uint16_t x[LAYERS][TOKENS][WIDTH];
};

static struct kvf_test_daemon the_daemon;
static struct inputs in, out, want;
static char last_log[512];

/* bf16: a layer's input is the one before and a little more. */
static void inputs_fill(struct inputs *inputs, uint64_t seed)
{
    struct kvf_random_seeded random;

    kvf_random_seeded_init(&random, seed);
    for (int layer = 0; layer < LAYERS; layer++) {
        for (int i = 0; i < TOKENS * WIDTH; i++) {
            uint64_t word = kvf_random_seeded_next(&random);
            float more = (float)((int32_t)(word & 0xffff) + (int32_t)(word >> 16 & 0xffff) -
                                 (int32_t)(word >> 32 & 0xffff) - (int32_t)(word >> 48)) /
                         65536;
            float before = layer != 0 ? kvf_f32_from_bf16((&inputs->x[layer - 1][0][0])[i]) : 0.0f;

            (&inputs->x[layer][0][0])[i] = kvf_bf16_from_f32(layer != 0 ? before + 0.3f * more
                                                                        : more);
        }
    }
}

static struct kvf_kv_view view_of(const struct kvf_geometry *geometry, struct inputs *inputs,
                                  void *layers[LAYERS])
{
    for (int layer = 0; layer < LAYERS; layer++) {
        layers[layer] = inputs->x[layer];
    }
    return (struct kvf_kv_view){
        .struct_bytes = sizeof(struct kvf_kv_view),
        .tokens_a_page = TOKENS,
        .k = {.layers = layers,
              .page_stride_bytes = sizeof(inputs->x[0]),
              .token_stride_bytes = sizeof(inputs->x[0][0]),
              .head_stride_bytes = geometry->dim_k * sizeof(uint16_t)},
    };
}

static struct kvf_geometry geometry_of(int kind)
{
    struct kvf_geometry geometry = {.struct_bytes = sizeof(geometry),
                                    .dtype = KVF_DTYPE_BF16,
                                    .n_layers = LAYERS,
                                    .chunk_tokens = TOKENS};

    assert_int_equal(kvf_x_geometry(kind, WIDTH, &geometry), KVF_OK);
    return geometry;
}

static void keep_log(void *arg, int severity, const char *text)
{
    (void)arg;
    if (severity <= 1) {
        (void)snprintf(last_log, sizeof(last_log), "%s", text);
    }
}

/* weights, factors: the bytes of the digests; 0: none. */
static int open_made_of(const struct kvf_geometry *geometry, const char *profile, uint8_t weights,
                        uint8_t factors, struct kvf_client **client_out)
{
    struct kvf_options options;

    kvf_test_client_options(&the_daemon, &options);
    options.geometry = geometry;
    options.profile = profile;
    options.flags = KVF_ATTACH_ALLOW_UNCALIBRATED;
    options.staging_bytes = 4 << 20;
    options.log = keep_log;
    memset(options.weights_digest, weights, sizeof(options.weights_digest));
    memset(options.factors_digest, factors, sizeof(options.factors_digest));
    last_log[0] = '\0';
    return kvf_open(&options, client_out);
}

static int open_client(const struct kvf_geometry *geometry, const char *profile,
                       struct kvf_client **client_out)
{
    return open_made_of(geometry, profile, 1, geometry->kind == KVF_KIND_XG, client_out);
}

/* What a plan of these makes of `in`, to `want`. */
static void make_want(const struct kvf_geometry *geometry, const char *profile)
{
    static struct kvf_codec_plan plan;
    void *layers[LAYERS];
    struct kvf_kv_view view = view_of(geometry, &in, layers);
    size_t payload_bytes;

    assert_int_equal(kvf_codec_plan_init(&plan, geometry, profile), KVF_OK);
    size_t workspace_bytes = (plan.workspace_bytes + 63) / 64 * 64;
    uint8_t *record = malloc(plan.record_bytes_max);
    void *workspace = aligned_alloc(64, workspace_bytes);
    assert_true(record != NULL && workspace != NULL);
    assert_int_equal(
        kvf_block_encode(&plan, &view, 0, TOKENS, (struct kvf_record_page *)(void *)record,
                         record + KVF_RECORD_PAGE_BYTES,
                         plan.record_bytes_max - KVF_RECORD_PAGE_BYTES, workspace, &payload_bytes),
        KVF_OK);
    view = view_of(geometry, &want, layers);
    assert_int_equal(kvf_block_decode(&plan, record, KVF_RECORD_PAGE_BYTES + payload_bytes, 0, 0, 0,
                                      0, &view, workspace),
                     KVF_OK);
    free(workspace);
    free(record);
}

/* Get block number from a tier: all of it, then a layer and some tokens of it alone. */
static void check_block(struct kvf_client *client, const struct kvf_geometry *geometry,
                        uint64_t number, uint8_t tier)
{
    void *layers[LAYERS];
    struct kvf_kv_view view = view_of(geometry, &out, layers);
    struct kvf_test_key bytes;
    struct kvf_key key = kvf_test_key(number, &bytes);
    struct kvf_hit hit;

    assert_int_equal(kvf_get(client, &key, 1, NULL, &hit), KVF_OK);
    assert_int_equal(hit.tier, tier);
    memset(&out, 0xa5, sizeof(out));
    assert_int_equal(kvf_decode(client, hit.record, hit.record_bytes, 0, 0, 0, 0, &view), KVF_OK);
    assert_memory_equal(&out, &want, sizeof(out));
    memset(&out, 0xa5, sizeof(out));
    assert_int_equal(kvf_decode(client, hit.record, hit.record_bytes, 4, 1, 7, 20, &view), KVF_OK);
    assert_memory_equal(out.x[4], want.x[4][7], 20 * sizeof(want.x[0][0]));
    assert_int_equal(out.x[3][0][0], 0xa5a5);
    assert_int_equal(out.x[4][20][0], 0xa5a5);
    assert_int_equal(kvf_lease_release(client, hit.lease), KVF_OK);
}

static const struct {
    const char *profile;
    int kind;
} cases[] = {{"x4", KVF_KIND_X},      {"x2", KVF_KIND_XG},    {"xcl3", KVF_KIND_X},
             {"xcl2-g2", KVF_KIND_X}, {"xgcl3", KVF_KIND_XG}, {"exact", KVF_KIND_X},
             {"raw", KVF_KIND_XG}};
enum {
    N_CASES = sizeof(cases) / sizeof(cases[0])
};

static void start(void)
{
    kvf_test_daemon_set_only(&the_daemon, "allow_uncalibrated=true");
    kvf_test_daemon_set(&the_daemon, "nvme.0.recompress=entropy");
    kvf_test_daemon_start(&the_daemon);
}

/* Memory, and after a restart the drive, give back what the codec makes of it. */
static void blocks_come_back_from_every_tier(void **state)
{
    struct kvf_client *client;

    (void)state;
    start();
    for (uint32_t life = 0; life < 2; life++) {
        for (uint32_t i = 0; i < N_CASES; i++) {
            struct kvf_geometry geometry = geometry_of(cases[i].kind);
            struct kvf_put_options options = {.struct_bytes = sizeof(options),
                                              .flags = KVF_PUT_DURABLE};
            void *layers[LAYERS];
            struct kvf_kv_view view = view_of(&geometry, &in, layers);
            struct kvf_test_key bytes;
            struct kvf_put_item item = {.struct_bytes = sizeof(item),
                                        .source = KVF_SOURCE_VIEW,
                                        .key = kvf_test_key(i, &bytes),
                                        .kv = &view};

            assert_int_equal(open_client(&geometry, cases[i].profile, &client), KVF_OK);
            inputs_fill(&in, 70 + i);
            make_want(&geometry, cases[i].profile);
            if (life == 0) {
                assert_int_equal(kvf_put(client, &item, 1, &options, NULL), KVF_OK);
            } else {
                check_block(client, &geometry, i, KVF_TIER_NVME);
            }
            check_block(client, &geometry, i, KVF_TIER_DRAM);
            kvf_close(client);
        }
        assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.nvme_corrupt_blocks"), 0);
        assert_int_equal(kvf_test_daemon_stop(&the_daemon), 0);
        if (life == 0) {
            start();
        }
    }
}

enum {
    N_CHUNKS = 3,
    N_TOKENS = 2 * TOKENS + 11, /* the last chunk is short */
};

/* Tokens of three chunks, layer by layer in one array that the next layer overwrites. */
static struct kvf_x_put *put_layers(struct kvf_client *client, uint32_t n_layers, float *decoded)
{
    static uint16_t now[N_TOKENS][WIDTH + 8]; /* a stride of its own */
    struct kvf_x_put_options options = {
        .struct_bytes = sizeof(options), .token_start = 0, .n_tokens = N_TOKENS};
    struct kvf_x_put *put;

    assert_int_equal(kvf_x_put_begin(client, &options, &put), KVF_OK);
    for (uint32_t layer = 0; layer < n_layers; layer++) {
        for (uint32_t chunk = 0; chunk < N_CHUNKS; chunk++) {
            inputs_fill(&in, 900 + chunk);
            for (uint32_t token = chunk * TOKENS; token < (chunk + 1) * TOKENS && token < N_TOKENS;
                 token++) {
                memcpy(now[token], in.x[layer][token % TOKENS], sizeof(in.x[0][0]));
            }
        }
        assert_int_equal(kvf_x_put_layer(put, layer + 1, now, sizeof(now[0]), NULL),
                         KVF_ERR_INVALID);
        assert_int_equal(
            kvf_x_put_layer(put, layer, now, sizeof(now[0]), layer == LAYERS - 1 ? decoded : NULL),
            KVF_OK);
        memset(now, 0xee, sizeof(now));
    }
    return put;
}

/* Layers put one after the other are the blocks that a put of the whole would have made. */
static void layers_are_put_one_by_one(void **state)
{
    static const char *const profiles[] = {"xcl3", "x4"};
    static float decoded[N_TOKENS][WIDTH];
    struct kvf_client *client;

    (void)state;
    start();
    for (uint32_t p = 0; p < 2; p++) {
        struct kvf_geometry geometry = geometry_of(KVF_KIND_X);
        struct kvf_test_key bytes[N_CHUNKS];
        struct kvf_key keys[N_CHUNKS];
        int32_t statuses[N_CHUNKS];
        struct kvf_x_put *put;

        assert_int_equal(open_client(&geometry, profiles[p], &client), KVF_OK);
        for (uint32_t i = 0; i < N_CHUNKS; i++) {
            keys[i] = kvf_test_key(1000 + i, &bytes[i]);
        }
        put = put_layers(client, LAYERS, &decoded[0][0]);
        assert_int_equal(kvf_x_put_layer(put, LAYERS, decoded, 0, NULL), KVF_ERR_INVALID);
        assert_int_equal(kvf_x_put_end(put, keys, N_CHUNKS - 1, NULL, NULL), KVF_ERR_INVALID);
        assert_int_equal(kvf_x_put_end(put, keys, N_CHUNKS, NULL, statuses), KVF_OK);
        for (uint32_t i = 0; i < N_CHUNKS; i++) {
            assert_int_equal(statuses[i], KVF_OK);
        }
        for (uint32_t i = 0; i < N_CHUNKS - 1; i++) {
            inputs_fill(&in, 900 + i);
            make_want(&geometry, profiles[p]);
            check_block(client, &geometry, 1000 + i, KVF_TIER_DRAM);
            for (uint32_t at = 0; at < TOKENS * WIDTH; at++) {
                assert_true((&decoded[i * TOKENS][0])[at] ==
                            kvf_f32_from_bf16((&want.x[LAYERS - 1][0][0])[at]));
            }
        }
        /* again: they are there */
        put = put_layers(client, LAYERS, NULL);
        assert_int_equal(kvf_x_put_end(put, keys, N_CHUNKS, NULL, statuses), KVF_OK);
        assert_int_equal(statuses[2], KVF_EXISTS);
        kvf_close(client);
    }
    assert_int_equal(kvf_test_daemon_stop(&the_daemon), 0);
}

/* What is no X, no chunk or no memory is refused; what is given up leaves nothing. */
static void puts_that_cannot_be(void **state)
{
    struct kvf_geometry geometry = geometry_of(KVF_KIND_X);
    struct kvf_geometry kv = geometry;
    struct kvf_x_put_options good = {
        .struct_bytes = sizeof(good), .token_start = TOKENS, .n_tokens = 2 * TOKENS};
    struct kvf_x_put_options bad[5] = {good, good, good, good, good};
    struct kvf_test_key bytes[N_CHUNKS];
    struct kvf_key keys[N_CHUNKS];
    struct kvf_client *client;
    struct kvf_x_put *put;
    struct kvf_hit hit;

    (void)state;
    start();
    kv.kind = KVF_KIND_KV;
    assert_int_equal(open_client(&kv, "exact", &client), KVF_OK);
    assert_int_equal(kvf_x_put_begin(client, &good, &put), KVF_ERR_INVALID);
    kvf_close(client);
    assert_int_equal(open_client(&geometry, "xcl3", &client), KVF_OK);
    bad[0].struct_bytes = 4;
    bad[1].token_start = TOKENS + 1;
    bad[2].n_tokens = 0;
    bad[3].n_tokens = UINT32_MAX;
    bad[4].reserved = 1;
    for (int i = 0; i < 5; i++) {
        assert_int_equal(kvf_x_put_begin(client, &bad[i], &put), KVF_ERR_INVALID);
    }
    good.memory_bytes = 1 << 16;
    assert_int_equal(kvf_x_put_begin(client, &good, &put), KVF_ERR_TOO_LARGE);
    assert_non_null(strstr(last_log, "2 chunks of X on their way can take"));
    good.memory_bytes = 1 << 30;
    assert_int_equal(kvf_x_put_begin(client, &good, &put), KVF_OK);
    assert_null(kvf_x_put_cancel(put));
    assert_null(kvf_x_put_cancel(NULL));
    for (uint32_t i = 0; i < N_CHUNKS; i++) {
        keys[i] = kvf_test_key(1100 + i, &bytes[i]);
    }
    put = put_layers(client, LAYERS - 1, NULL);
    assert_int_equal(kvf_x_put_end(put, keys, N_CHUNKS, NULL, NULL), KVF_ERR_INVALID);
    (void)kvf_x_put_cancel(put);
    assert_int_equal(kvf_get(client, keys, 1, NULL, &hit), KVF_MISS);
    /* a daemon that goes away takes what is put with it, and no memory */
    put = put_layers(client, LAYERS, NULL);
    assert_int_equal(kvf_test_daemon_stop(&the_daemon), 0);
    assert_true(kvf_x_put_end(put, keys, N_CHUNKS, NULL, NULL) < 0);
    kvf_close(client);
}

/* The library says what a profile is for; so does the daemon to one that asks all the same. */
static void profiles_for_something_else_are_refused(void **state)
{
    static const struct {
        const char *profile;
        uint8_t kind;
        const char *text;
    } refused[] = {
        {"balanced", KVF_KIND_X, "but for KV and MLA"},
        {"x4", KVF_KIND_KV, "but for X and XG"},
        {"xcl3", KVF_KIND_XG, "but for X"},
        {"xgcl3", KVF_KIND_X, "but for XG"},
    };
    struct kvf_client *client;

    (void)state;
    start();
    for (uint32_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++) {
        struct kvf_geometry geometry = geometry_of(KVF_KIND_X);
        struct kvf_wire_hello hello;
        struct raw_client raw;

        geometry.kind = refused[i].kind;
        assert_int_equal(open_client(&geometry, refused[i].profile, &client), KVF_ERR_REFUSED);
        assert_non_null(strstr(last_log, refused[i].text));
        raw_connect(&raw, the_daemon.socket_path);
        raw_hello(&hello);
        hello.flags = KVF_ATTACH_ALLOW_UNCALIBRATED;
        hello.geometry = (struct kvf_wire_geometry){.kind = geometry.kind,
                                                    .dtype = geometry.dtype,
                                                    .n_layers = LAYERS,
                                                    .n_heads = geometry.n_heads,
                                                    .dim_k = geometry.dim_k,
                                                    .chunk_tokens = TOKENS};
        hello.record_bytes_max = 4 << 20;
        memset(hello.profile, 0, sizeof(hello.profile));
        memcpy(hello.profile, refused[i].profile, strlen(refused[i].profile));
        assert_false(raw_begin(&raw, &hello));
        assert_int_equal(raw.welcome.status, KVF_ERR_REFUSED);
        assert_non_null(strstr(raw.welcome.text, refused[i].text));
        raw_close(&raw);
    }
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.protocol_errors"), 0);
    assert_int_equal(kvf_test_daemon_stop(&the_daemon), 0);
}

/* Put the block number of a kind, by what it is made of. */
static void put_made_of(const struct kvf_geometry *geometry, const char *profile, uint64_t number)
{
    struct kvf_client *client;
    void *layers[LAYERS];
    struct kvf_kv_view view = view_of(geometry, &in, layers);
    struct kvf_test_key bytes;
    struct kvf_put_item item = {.struct_bytes = sizeof(item),
                                .source = KVF_SOURCE_VIEW,
                                .key = kvf_test_key(number, &bytes),
                                .kv = &view};

    assert_int_equal(open_client(geometry, profile, &client), KVF_OK);
    assert_int_equal(kvf_put(client, &item, 1, NULL, NULL), KVF_OK);
    make_want(geometry, profile);
    check_block(client, geometry, number, KVF_TIER_DRAM);
    kvf_close(client);
}

/* A client with other weights or factors: block number is a miss, and its record, that somebody
 * hands over, neither decoded nor taken for a put. */
static void check_other(const struct kvf_geometry *geometry, const char *profile, uint64_t number,
                        uint8_t weights, uint8_t factors)
{
    void *layers[LAYERS];
    struct kvf_kv_view view = view_of(geometry, &out, layers);
    struct kvf_stat stat = {.struct_bytes = sizeof(stat)};
    struct kvf_test_key bytes;
    struct kvf_put_item item = {.struct_bytes = sizeof(item),
                                .source = KVF_SOURCE_STAGED,
                                .key = kvf_test_key(number, &bytes)};
    uint64_t before = kvf_test_daemon_number(&the_daemon, "metrics.x_refused");
    struct kvf_client *owner;
    struct kvf_client *other;
    struct kvf_hit miss;
    struct kvf_hit hit;
    struct kvf_stage stage;
    size_t record_bytes;

    assert_int_equal(open_client(geometry, profile, &owner), KVF_OK);
    assert_int_equal(open_made_of(geometry, profile, weights, factors, &other), KVF_OK);
    assert_int_equal(kvf_get(owner, &item.key, 1, NULL, &hit), KVF_OK);
    assert_int_equal(kvf_get(other, &item.key, 1, NULL, &miss), KVF_MISS);
    assert_int_equal(miss.status, KVF_MISS);
    memset(&out, 0xa5, sizeof(out));
    assert_int_equal(kvf_decode(other, hit.record, hit.record_bytes, 0, 0, 0, 0, &view),
                     KVF_ERR_MISMATCH);
    assert_int_equal(out.x[0][0][0], 0xa5a5);
    assert_int_equal(kvf_stat(other, &stat), KVF_OK);
    assert_int_equal(stat.x_refused, 1);
    assert_int_equal(kvf_stage_acquire(other, 2 * sizeof(in), &stage), KVF_OK);
    view = view_of(geometry, &in, layers);
    assert_int_equal(kvf_encode(other, &stage, 0, 0, &view, &record_bytes), KVF_OK);
    assert_int_equal(record_bytes, hit.record_bytes);
    memcpy(stage.record, hit.record, record_bytes);
    item.stage = stage.stage;
    assert_int_equal(kvf_put(other, &item, 1, NULL, NULL), KVF_ERR_MISMATCH);
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.x_refused"), before + 1);
    assert_int_equal(kvf_lease_release(owner, hit.lease), KVF_OK);
    kvf_close(other);
    kvf_close(owner);
}

/* Two models under one label, two decompositions of one model: K and V of the wrong one never come
 * of a block. */
static void other_weights_and_factors_are_misses(void **state)
{
    struct kvf_geometry x = geometry_of(KVF_KIND_X);
    struct kvf_geometry latent = geometry_of(KVF_KIND_XG);
    struct kvf_client *client;

    (void)state;
    start();
    inputs_fill(&in, 40);
    put_made_of(&x, "xcl3", 50);
    put_made_of(&latent, "xgcl3", 51);
    check_other(&x, "xcl3", 50, 2, 0);
    check_other(&latent, "xgcl3", 51, 2, 1);
    check_other(&latent, "xgcl3", 51, 1, 2);
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.x_refused"), 3);
    assert_int_equal(open_made_of(&x, "xcl3", 0, 0, &client), KVF_ERR_REFUSED);
    assert_non_null(strstr(last_log, "give a weights_digest"));
    assert_int_equal(open_made_of(&latent, "xgcl3", 0, 1, &client), KVF_ERR_REFUSED);
    assert_int_equal(open_made_of(&latent, "exact", 1, 0, &client), KVF_ERR_REFUSED);
    assert_non_null(strstr(last_log, "and the factors_digest of its latents"));
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.x_refused"), 6);
    assert_int_equal(open_made_of(&x, "xcl3", 1, 1, &client), KVF_ERR_INVALID);
    assert_int_equal(kvf_test_daemon_stop(&the_daemon), 0);
}

static int setup(void **state)
{
    (void)state;
    kvf_test_daemon_create(&the_daemon, NULL);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    kvf_test_daemon_destroy(&the_daemon);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(blocks_come_back_from_every_tier, setup, teardown),
        cmocka_unit_test_setup_teardown(layers_are_put_one_by_one, setup, teardown),
        cmocka_unit_test_setup_teardown(puts_that_cannot_be, setup, teardown),
        cmocka_unit_test_setup_teardown(profiles_for_something_else_are_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(other_weights_and_factors_are_misses, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
