/* SPDX-License-Identifier: Apache-2.0
 *
 * test_recompress.c: nvme.recompress through a real daemon: clients see the records that were put,
 * whatever the drive has, and whatever the daemon is told before or after.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "tests/support/blocks.h"
#include "tests/support/daemon.h"

enum {
    LAYERS = 8,
    HEADS = 2,
    DIM = 64,
    TOKENS = 256,
    N_BLOCKS = 4,
    NOISE_BYTES = 30000,
};

#define PACKS "nvme.0.recompress=entropy"

struct pages {
    uint16_t k[LAYERS][TOKENS][HEADS][DIM];
    uint16_t v[LAYERS][TOKENS][HEADS][DIM];
};

static struct kvf_test_daemon the_daemon;
static struct kvf_client *the_client;
static uint8_t *records[N_BLOCKS]; /* as they were in memory */
static uint64_t record_bytes[N_BLOCKS];

static const struct kvf_geometry geometry = {.struct_bytes = sizeof(geometry),
                                             .kind = KVF_KIND_KV,
                                             .dtype = KVF_DTYPE_BF16,
                                             .rope_state = KVF_ROPE_POST,
                                             .n_layers = LAYERS,
                                             .n_heads = HEADS,
                                             .dim_k = DIM,
                                             .dim_v = DIM,
                                             .chunk_tokens = TOKENS};

/* Sums of four uniform numbers, as bf16: codes and exponents of some shape. */
static void pages_fill(struct pages *pages, uint64_t seed)
{
    struct kvf_random_seeded random;
    uint16_t *words = &pages->k[0][0][0][0];

    kvf_random_seeded_init(&random, seed);
    for (size_t i = 0; i < sizeof(*pages) / sizeof(*words); i++) {
        uint64_t word = kvf_random_seeded_next(&random);
        float value = (float)((int32_t)(word & 0xffff) + (int32_t)(word >> 16 & 0xffff) -
                              (int32_t)(word >> 32 & 0xffff) - (int32_t)(word >> 48)) /
                      65536;
        uint32_t bits;

        memcpy(&bits, &value, sizeof(bits));
        words[i] = (uint16_t)(bits >> 16);
    }
}

static struct kvf_client *open_client(const char *profile)
{
    struct kvf_options options;
    struct kvf_client *client;

    kvf_test_client_options(&the_daemon, &options);
    options.geometry = &geometry;
    options.profile = profile;
    options.flags = KVF_ATTACH_ALLOW_UNCALIBRATED;
    options.staging_bytes = 4 << 20;
    assert_int_equal(kvf_open(&options, &client), KVF_OK);
    return client;
}

static void start(const char *set)
{
    kvf_test_daemon_set_only(&the_daemon, "allow_uncalibrated=true");
    if (set != NULL) {
        kvf_test_daemon_set(&the_daemon, set);
    }
    kvf_test_daemon_start(&the_daemon);
    the_client = open_client("balanced");
}

static void stop(bool gently)
{
    kvf_close(the_client);
    if (gently) {
        assert_int_equal(kvf_test_daemon_stop(&the_daemon), 0);
    } else {
        kvf_test_daemon_kill(&the_daemon);
    }
}

static uint64_t metric(const char *path)
{
    return kvf_test_daemon_number(&the_daemon, path);
}

/* Put block i, durable, and keep what memory has of it. */
static void put(uint32_t i)
{
    static struct pages pages;
    struct kvf_put_options options = {.struct_bytes = sizeof(options), .flags = KVF_PUT_DURABLE};
    void *layers[2][LAYERS];
    struct kvf_kv_view view = {.struct_bytes = sizeof(view), .tokens_a_page = TOKENS};
    struct kvf_test_key bytes;
    struct kvf_put_item item = {.struct_bytes = sizeof(item),
                                .source = KVF_SOURCE_VIEW,
                                .key = kvf_test_key(i, &bytes),
                                .token_start = TOKENS,
                                .kv = &view};
    struct kvf_hit hit;

    pages_fill(&pages, 100 + i);
    for (int l = 0; l < LAYERS; l++) {
        layers[0][l] = pages.k[l];
        layers[1][l] = pages.v[l];
    }
    view.k.layers = layers[0];
    view.k.token_stride_bytes = sizeof(pages.k[0][0]);
    view.k.head_stride_bytes = sizeof(pages.k[0][0][0]);
    view.k.page_stride_bytes = sizeof(pages.k[0]);
    view.v = view.k;
    view.v.layers = layers[1];
    assert_int_equal(kvf_put(the_client, &item, 1, &options, NULL), KVF_OK);
    assert_int_equal(kvf_get(the_client, &item.key, 1, NULL, &hit), KVF_OK);
    record_bytes[i] = hit.record_bytes;
    records[i] = realloc(records[i], hit.record_bytes);
    assert_non_null(records[i]);
    memcpy(records[i], hit.record, hit.record_bytes);
    assert_int_equal(kvf_lease_release(the_client, hit.lease), KVF_OK);
}

/* Header, layer tables and payload are those of before; the store part is the drive's. */
static void get(uint32_t i, uint8_t tier)
{
    struct kvf_test_key bytes;
    struct kvf_key key = kvf_test_key(i, &bytes);
    struct kvf_hit hit;

    assert_int_equal(kvf_get(the_client, &key, 1, NULL, &hit), KVF_OK);
    assert_int_equal(hit.tier, tier);
    assert_int_equal(hit.record_bytes, record_bytes[i]);
    assert_memory_equal(hit.record, records[i], 256);
    assert_memory_equal((const uint8_t *)hit.record + 384, records[i] + 384, record_bytes[i] - 384);
    assert_int_equal(kvf_lease_release(the_client, hit.lease), KVF_OK);
}

static void blocks_outlive_the_daemon_and_the_option(void **state)
{
    static const char *const sets[] = {PACKS, NULL, PACKS};

    (void)state;
    start(PACKS);
    for (uint32_t i = 0; i < N_BLOCKS / 2; i++) {
        put(i);
    }
    assert_int_equal(metric("metrics.nvme_recompressed_blocks"), N_BLOCKS / 2);
    assert_true(metric("metrics.nvme_saved_bytes") > N_BLOCKS / 2 * record_bytes[0] / 32);
    for (int life = 0; life < 3; life++) {
        stop(life % 2 == 0);
        start(sets[(life + 1) % 3]); /* NULL, PACKS, PACKS */
        for (uint32_t i = 0; i < (life == 0 ? N_BLOCKS / 2 : N_BLOCKS); i++) {
            get(i, KVF_TIER_NVME);
            get(i, KVF_TIER_DRAM);
        }
        if (life == 0) {
            for (uint32_t i = N_BLOCKS / 2; i < N_BLOCKS; i++) {
                put(i);
            }
            assert_int_equal(metric("metrics.nvme_recompressed_blocks"), 0);
            assert_int_equal(metric("metrics.nvme_saved_bytes"), 0);
        }
        assert_int_equal(metric("metrics.nvme_corrupt_blocks"), 0);
    }
    stop(true);
}

/* What cannot be packed is written all the same. */
static void noise_is_stored_as_it_is(void **state)
{
    struct kvf_client *client;
    uint8_t tier;

    (void)state;
    start(PACKS);
    client = kvf_test_client_open(&the_daemon, NULL);
    assert_int_equal(kvf_test_block_put(client, 77, NOISE_BYTES, KVF_PUT_DURABLE), KVF_OK);
    assert_int_equal(metric("metrics.nvme_recompressed_blocks"), 0);
    kvf_close(client);
    stop(false);
    start(PACKS);
    client = kvf_test_client_open(&the_daemon, NULL);
    assert_int_equal(kvf_test_block_get(client, 77, NOISE_BYTES, &tier), KVF_OK);
    assert_int_equal(tier, KVF_TIER_NVME);
    kvf_close(client);
    stop(true);
}

/* A packed record that cannot be unpacked is a miss, counted, and forgotten. */
static void what_cannot_be_unpacked_is_a_miss(void **state)
{
    struct kvf_test_key bytes;
    struct kvf_key key = kvf_test_key(0, &bytes);
    struct kvf_hit hit;

    (void)state;
    the_daemon.failpoints = "nvme.unpack=error";
    start(NULL);
    assert_int_equal(kvf_get(the_client, &key, 1, NULL, &hit), KVF_MISS);
    assert_int_equal(metric("metrics.nvme_corrupt_blocks"), 1);
    assert_int_equal(kvf_get(the_client, &key, 1, NULL, &hit), KVF_MISS);
    assert_int_equal(metric("metrics.nvme_corrupt_blocks"), 1); /* nobody asks the drive again */
    stop(false);
    the_daemon.failpoints = NULL;
    start(NULL);
    get(1, KVF_TIER_NVME);
    stop(true);
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
    for (int i = 0; i < N_BLOCKS; i++) {
        free(records[i]);
    }
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_outlive_the_daemon_and_the_option),
        cmocka_unit_test(noise_is_stored_as_it_is),
        cmocka_unit_test(what_cannot_be_unpacked_is_a_miss),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
