/* SPDX-License-Identifier: Apache-2.0
 *
 * test_requests_store.c: what of a put survives the daemon, what of it is coded how, and what a
 * client is given that asks for a profile it may not have.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "tests/support/blocks.h"
#include "tests/support/daemon.h"

#define BLOCK_BYTES 30000

static struct kvf_test_daemon the_daemon;
static struct kvf_client *the_client;

/* Blocks first .. first + n - 1 as one chain. */
static int put_chain(uint64_t first, uint32_t n, uint32_t flags)
{
    struct kvf_put_options options = {.struct_bytes = sizeof(options), .flags = flags};
    struct kvf_put_item *items = calloc(n, sizeof(*items));
    struct kvf_test_key *keys = calloc(n, sizeof(*keys));
    uint8_t *payloads = malloc((size_t)n * BLOCK_BYTES);
    int status;

    assert_true(items != NULL && keys != NULL && payloads != NULL);
    for (uint32_t i = 0; i < n; i++) {
        kvf_test_payload_fill(first + i, payloads + (size_t)i * BLOCK_BYTES, BLOCK_BYTES);
        items[i] = (struct kvf_put_item){.struct_bytes = sizeof(items[i]),
                                         .source = KVF_SOURCE_BYTES,
                                         .key = kvf_test_key(first + i, &keys[i]),
                                         .data = payloads + (size_t)i * BLOCK_BYTES,
                                         .data_bytes = BLOCK_BYTES};
    }
    status = kvf_put(the_client, items, n, &options, NULL);
    free(payloads);
    free(keys);
    free(items);
    return status;
}

static void restart(bool gently)
{
    kvf_close(the_client);
    if (gently) {
        assert_int_equal(kvf_test_daemon_stop(&the_daemon), 0);
    } else {
        kvf_test_daemon_kill(&the_daemon);
    }
    kvf_test_daemon_start(&the_daemon);
    the_client = kvf_test_client_open(&the_daemon, NULL);
}

static void test_durable_survives_kill(void **state)
{
    uint8_t tier;
    int status;

    (void)state;
    assert_int_equal(put_chain(100, 20, KVF_PUT_DURABLE), KVF_OK);
    /* durable from then on for one that was in memory only */
    assert_int_equal(kvf_test_block_put(the_client, 200, BLOCK_BYTES, KVF_PUT_NO_WRITE), KVF_OK);
    assert_int_equal(kvf_test_block_put(the_client, 201, BLOCK_BYTES, 0), KVF_OK);
    do {
        status = kvf_test_block_put(the_client, 201, BLOCK_BYTES, KVF_PUT_DURABLE);
    } while (status == KVF_ERR_BUSY); /* while it is being written without */
    assert_true(status == KVF_OK || status == KVF_EXISTS);
    assert_int_equal(kvf_test_block_put(the_client, 100, BLOCK_BYTES, KVF_PUT_DURABLE), KVF_EXISTS);
    restart(false);
    for (uint64_t i = 0; i < 20; i++) {
        assert_int_equal(kvf_test_block_get(the_client, 100 + i, BLOCK_BYTES, &tier), KVF_OK);
        assert_int_equal(tier, KVF_TIER_NVME);
    }
    assert_int_equal(kvf_test_block_get(the_client, 201, BLOCK_BYTES, NULL), KVF_OK);
    assert_int_equal(kvf_test_block_get(the_client, 100, BLOCK_BYTES, &tier), KVF_OK);
    assert_int_equal(tier, KVF_TIER_DRAM);
    /* first put wins, also over a restart, and also when its bytes have not been read since */
    assert_int_equal(kvf_test_block_put(the_client, 105, BLOCK_BYTES, 0), KVF_EXISTS);
    assert_int_equal(kvf_test_block_put(the_client, 105, BLOCK_BYTES + 1, 0), KVF_ERR_CONFLICT);
}

/* What was only acknowledged from memory goes to the drive before the daemon ends. */
static void test_drain_keeps_chains(void **state)
{
    (void)state;
    for (uint64_t chain = 0; chain < 4; chain++) {
        assert_int_equal(put_chain(1000 + 100 * chain, 24, 0), KVF_OK);
    }
    restart(true);
    for (uint64_t chain = 0; chain < 4; chain++) {
        for (uint64_t i = 0; i < 24; i++) {
            uint8_t tier;

            assert_int_equal(
                kvf_test_block_get(the_client, 1000 + 100 * chain + i, BLOCK_BYTES, &tier), KVF_OK);
            assert_int_equal(tier, KVF_TIER_NVME);
        }
    }
}

static void test_no_write(void **state)
{
    (void)state;
    assert_int_equal(put_chain(2000, 4, KVF_PUT_NO_WRITE), KVF_OK);
    assert_int_equal(put_chain(2100, 4, 0), KVF_OK);
    assert_int_equal(kvf_test_block_get(the_client, 2001, BLOCK_BYTES, NULL), KVF_OK);
    restart(true);
    assert_int_equal(kvf_test_block_get(the_client, 2001, BLOCK_BYTES, NULL), KVF_MISS);
    assert_int_equal(kvf_test_block_get(the_client, 2101, BLOCK_BYTES, NULL), KVF_OK);
    assert_int_equal(
        kvf_test_block_put(the_client, 2200, BLOCK_BYTES, KVF_PUT_NO_WRITE | KVF_PUT_DURABLE),
        KVF_ERR_INVALID);
}

static void test_evict_on_drive(void **state)
{
    struct kvf_test_key bytes;
    struct kvf_key key = kvf_test_key(3001, &bytes);

    (void)state;
    assert_int_equal(put_chain(3000, 3, KVF_PUT_DURABLE), KVF_OK);
    restart(false);
    assert_int_equal(kvf_evict(the_client, &key, 1, NULL), KVF_OK);
    assert_int_equal(kvf_test_block_get(the_client, 3001, BLOCK_BYTES, NULL), KVF_MISS);
    assert_int_equal(kvf_test_block_get(the_client, 3002, BLOCK_BYTES, NULL), KVF_OK);
}

/* --- KV of a geometry
 * --------------------------------------------------------------------------- */

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

/* bf16 numbers around 1, so that every profile takes them */
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

static struct kvf_client *open_profile(const char *profile, uint32_t flags)
{
    struct kvf_options options;
    struct kvf_client *client;

    kvf_test_client_options(&the_daemon, &options);
    options.geometry = &geometry;
    options.profile = profile;
    options.flags = flags;
    options.staging_bytes = 1 << 20;
    assert_int_equal(kvf_open(&options, &client), KVF_OK);
    return client;
}

/* Put pages, get them, decode them. */
static void round_trip(struct kvf_client *client, uint64_t number, struct pages *in,
                       struct pages *out)
{
    void *layers[2][LAYERS];
    struct kvf_kv_view view = view_of(in, layers);
    struct kvf_test_key bytes;
    struct kvf_put_item item = {.struct_bytes = sizeof(item),
                                .source = KVF_SOURCE_VIEW,
                                .key = kvf_test_key(number, &bytes),
                                .token_start = TOKENS,
                                .kv = &view};
    struct kvf_hit hit;

    assert_int_equal(kvf_put(client, &item, 1, NULL, NULL), KVF_OK);
    assert_int_equal(kvf_get(client, &item.key, 1, NULL, &hit), KVF_OK);
    memset(out, 0xff, sizeof(*out));
    view = view_of(out, layers);
    assert_int_equal(kvf_decode(client, hit.record, hit.record_bytes, 0, 0, 0, 0, &view), KVF_OK);
    assert_int_equal(kvf_lease_release(client, hit.lease), KVF_OK);
}

static void test_views(void **state)
{
    static const char *const profiles[] = {"raw", "exact", NULL};
    static struct pages in, out;

    (void)state;
    pages_fill(&in, 1);
    for (size_t i = 0; i < sizeof(profiles) / sizeof(profiles[0]); i++) {
        struct kvf_info info = {.struct_bytes = sizeof(info)};
        struct kvf_client *client = open_profile(profiles[i], 0);

        assert_int_equal(kvf_client_info(client, &info), KVF_OK);
        assert_int_equal(info.lossless, 1);
        assert_string_equal(info.profile, profiles[i] != NULL ? profiles[i] : "exact");
        round_trip(client, 4000 + i, &in, &out);
        assert_memory_equal(&in, &out, sizeof(in));
        kvf_close(client);
    }
}

/* A lossy profile that nobody has calibrated: the client gets "exact", and is told. */
static void test_uncalibrated_is_refused(void **state)
{
    static const uint32_t flags[] = {0, KVF_ATTACH_ALLOW_UNCALIBRATED};
    static struct pages in, out;

    (void)state;
    pages_fill(&in, 2);
    for (size_t i = 0; i < 2; i++) {
        struct kvf_info info = {.struct_bytes = sizeof(info)};
        struct kvf_client *client = open_profile("balanced", flags[i]);

        assert_int_equal(kvf_client_info(client, &info), KVF_OK);
        assert_string_equal(info.profile, "exact");
        assert_int_equal(info.lossless, 1);
        round_trip(client, 5000 + i, &in, &out);
        assert_memory_equal(&in, &out, sizeof(in));
        kvf_close(client);
    }
}

static double relative_error(const struct pages *a, const struct pages *b)
{
    const uint16_t *x = &a->k[0][0][0][0];
    const uint16_t *y = &b->k[0][0][0][0];
    double error = 0;
    double power = 0;

    for (size_t i = 0; i < sizeof(*a) / sizeof(*x); i++) {
        uint32_t bits[2] = {(uint32_t)x[i] << 16, (uint32_t)y[i] << 16};
        float value[2];

        memcpy(value, bits, sizeof(value));
        error += ((double)value[0] - (double)value[1]) * ((double)value[0] - (double)value[1]);
        power += (double)value[0] * (double)value[0];
    }
    return error / power;
}

/* Where the operator allows it, only a client that asks for it gets it; what the two store is kept
 * apart. */
static void test_uncalibrated_is_allowed(void **state)
{
    /* at most: of max, whose levels leave .035 of K at 3 bits and .118 of V at 2, a mean of .076 */
    static const struct {
        const char *name;
        double error;
    } profiles[] = {{"balanced", 0.05}, {"tq4", 0.05},       {"dense", 0.05},
                    {"max", 0.1},       {"kivi4-g32", 0.05}, {"saw3-search", 0.05}};
    static struct pages in, out;
    struct kvf_info info = {.struct_bytes = sizeof(info)};
    struct kvf_test_key bytes;
    struct kvf_key key = kvf_test_key(6000, &bytes);
    struct kvf_client *client;
    struct kvf_hit hit;

    (void)state;
    kvf_test_daemon_set(&the_daemon, "allow_uncalibrated=true");
    restart(true);
    pages_fill(&in, 3);
    for (size_t i = 0; i < sizeof(profiles) / sizeof(profiles[0]); i++) {
        client = open_profile(profiles[i].name, KVF_ATTACH_ALLOW_UNCALIBRATED);
        assert_int_equal(kvf_client_info(client, &info), KVF_OK);
        assert_string_equal(info.profile, profiles[i].name);
        assert_int_equal(info.lossless, 0);
        round_trip(client, 6000 + i, &in, &out);
        assert_true(relative_error(&in, &out) < profiles[i].error);
        assert_true(relative_error(&in, &out) > 0);
        kvf_close(client);
    }
    client = open_profile("balanced", 0);
    assert_int_equal(kvf_client_info(client, &info), KVF_OK);
    assert_string_equal(info.profile, "exact");
    assert_int_equal(kvf_get(client, &key, 1, NULL, &hit), KVF_MISS);
    kvf_close(client);
    the_daemon.n_sets--;
}

static int setup(void **state)
{
    (void)state;
    kvf_test_daemon_create(&the_daemon, NULL);
    kvf_test_daemon_start(&the_daemon);
    the_client = kvf_test_client_open(&the_daemon, NULL);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.protocol_errors"), 0);
    kvf_close(the_client);
    kvf_test_daemon_destroy(&the_daemon);
    return 0;
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_durable_survives_kill),
        TEST(test_drain_keeps_chains),
        TEST(test_no_write),
        TEST(test_evict_on_drive),
        TEST(test_views),
        TEST(test_uncalibrated_is_refused),
        TEST(test_uncalibrated_is_allowed),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
