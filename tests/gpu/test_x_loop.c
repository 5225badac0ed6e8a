/* SPDX-License-Identifier: Apache-2.0
 *
 * test_x_loop.c: X by profiles whose layers are differences to those before them, through the GPU:
 * the daemon has what the C codec makes of the same pages, and what comes back is what the C codec
 * decodes, however groups cut blocks.
 */
#include "kvferry_gpu_x.h"
#include "tests/gpu/calls.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

enum {
    LAYERS = 9,
    WIDTH_MAX = 384,
    CHUNK = 32,
    PAGE = 8, /* tokens */
    CHUNK_PAGES = CHUNK / PAGE,
    BLOCKS = 6,
    PAGES = BLOCKS * CHUNK_PAGES,
    POISON = 0x5a,
};

struct shape {
    const char *profile;
    uint8_t kind;
    uint8_t dtype;
    uint32_t width;
    uint32_t window_bytes; /* of loads on their way: decides where blocks are cut */
    bool has_raw;          /* a block of which strips are stored raw */
};

struct bed {
    struct kvf_client *client;
    struct kvf_gpu *gpu;
    struct kvf_gpu_region *region;
    struct kvf_geometry geometry;
    size_t token_bytes;
    size_t layer_bytes;
    uint64_t pages; /* on the device */
    void *layers[LAYERS];
    uint64_t first_key;
    void *workspace;
};

static struct calls the_daemon;
static struct kvf_random_seeded random_bits;
static uint8_t host[LAYERS * PAGES * PAGE * WIDTH_MAX * 4];
static uint8_t want[sizeof(host)];
static uint8_t have[sizeof(host)];
static uint64_t n_keys = 1;

static uint32_t below(uint32_t n)
{
    return (uint32_t)(kvf_random_seeded_next(&random_bits) >> 33) % n;
}

/* A view of a block's pages in memory that is laid out as the device's is. */
static struct kvf_kv_view view_of(const struct bed *bed, uint8_t *memory, void *layers[LAYERS],
                                  const uint32_t *ids)
{
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        layers[layer] = memory + layer * bed->layer_bytes;
    }
    return (struct kvf_kv_view){
        .struct_bytes = sizeof(struct kvf_kv_view),
        .tokens_a_page = PAGE,
        .page_table = ids,
        .k = {.layers = layers,
              .page_stride_bytes = PAGE * bed->token_bytes,
              .token_stride_bytes = bed->token_bytes,
              .head_stride_bytes = bed->geometry.dim_k * kvf_dtype_bytes(bed->geometry.dtype)},
    };
}

/* Values whose layers are like each other, some that are no numbers, and, in one block, many. */
static void fill(const struct bed *bed, bool has_raw, uint32_t raw_page)
{
    size_t element = kvf_dtype_bytes(bed->geometry.dtype);
    size_t n = bed->layer_bytes / element;

    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (size_t i = 0; i < n; i++) {
            uint8_t *at = host + layer * bed->layer_bytes + i * element;
            /* exponents of a few binades in all types; low bits as they come */
            uint32_t low = below(1 << 15);

            memset(at, (int)(low & 0xff), element);
            at[element - 1] = (uint8_t)(0x3c + (i * 7 + layer) % 5 + (low & 0x80));
            at[element - 2] = (uint8_t)(low >> 7);
        }
    }
    for (uint32_t i = 0; i < LAYERS; i++) { /* one a layer: of more, some could share a block */
        size_t token = below(PAGES * PAGE);

        memset(host + i * bed->layer_bytes + token * bed->token_bytes, 0xff, element);
    }
    for (uint32_t token = 0; has_raw && token < PAGE; token++) {
        memset(host + (4 * bed->layer_bytes) + (raw_page * PAGE + token) * bed->token_bytes, 0xff,
               bed->token_bytes);
    }
}

static void bed_open(struct bed *bed, const struct shape *shape)
{
    struct kvf_gpu_options gpu_options = {.struct_bytes = sizeof(gpu_options),
                                          .load_window_bytes = shape->window_bytes};
    struct kvf_gpu_region_options region = {
        .struct_bytes = sizeof(region), .n_pages = PAGES, .tokens_a_page = PAGE};
    struct kvf_options options;

    *bed = (struct bed){.geometry = {.struct_bytes = sizeof(bed->geometry),
                                     .dtype = shape->dtype,
                                     .n_layers = LAYERS,
                                     .chunk_tokens = CHUNK,
                                     .sink_tokens = 2}};
    assert_int_equal(kvf_x_geometry(shape->kind, shape->width, &bed->geometry), KVF_OK);
    bed->token_bytes = shape->width * kvf_dtype_bytes(shape->dtype);
    bed->layer_bytes = PAGES * PAGE * bed->token_bytes;
    kvf_test_client_options(&the_daemon.daemon, &options);
    options.geometry = &bed->geometry;
    options.profile = shape->profile;
    options.flags = KVF_ATTACH_ALLOW_UNCALIBRATED;
    options.staging_bytes = 16 << 20;
    memset(options.weights_digest, 7, sizeof(options.weights_digest));
    if (shape->kind == KVF_KIND_XG) {
        memset(options.factors_digest, 9, sizeof(options.factors_digest));
    }
    assert_int_equal(kvf_open(&options, &bed->client), KVF_OK);
    assert_int_equal(kvf_gpu_open(bed->client, &gpu_options, &bed->gpu), KVF_OK);
    bed->pages = calls_alloc(LAYERS * bed->layer_bytes);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        bed->layers[layer] = (uint8_t *)(uintptr_t)bed->pages + layer * bed->layer_bytes;
    }
    region.k = view_of(bed, (uint8_t *)(uintptr_t)bed->pages, bed->layers, NULL).k;
    assert_int_equal(kvf_gpu_register(bed->gpu, &region, &bed->region), KVF_OK);
    bed->workspace = aligned_alloc(
        KVF_CODEC_WORKSPACE_ALIGN,
        (bed->client->plan.workspace_bytes / KVF_CODEC_WORKSPACE_ALIGN + 1) *
            KVF_CODEC_WORKSPACE_ALIGN);
    assert_non_null(bed->workspace);
    bed->first_key = n_keys;
    n_keys += BLOCKS;
    the_daemon.gpu = bed->gpu; /* of which calls_wait takes events */
}

static void bed_close(struct bed *bed)
{
    the_daemon.gpu = NULL;
    bed->gpu = kvf_gpu_close(bed->gpu);
    bed->client = kvf_close(bed->client);
    calls_free(bed->pages);
    free(bed->workspace);
}

static uint32_t block_tokens(uint32_t block)
{
    return block == BLOCKS - 1 ? 13 : CHUNK;
}

/* Pages of a block, in no order. */
static void ids_of(uint32_t block, uint32_t ids[CHUNK_PAGES])
{
    for (uint32_t p = 0; p < CHUNK_PAGES; p++) {
        ids[p] = (block * CHUNK_PAGES + p) * 7 % PAGES;
    }
}

static void put_all(struct bed *bed)
{
    struct kvf_gpu_put_item items[BLOCKS];
    uint32_t ids[BLOCKS][CHUNK_PAGES];
    char keys[BLOCKS][24];
    struct calls_outcome outcome = {0};
    uint64_t request;

    for (uint32_t b = 0; b < BLOCKS; b++) {
        ids_of(b, ids[b]);
        items[b] = (struct kvf_gpu_put_item){.struct_bytes = sizeof(items[b]),
                                             .n_pages = (block_tokens(b) + PAGE - 1) / PAGE,
                                             .key = calls_key(bed->first_key + b, keys[b]),
                                             .token_start = b * CHUNK,
                                             .n_tokens = block_tokens(b),
                                             .pages = ids[b]};
    }
    assert_int_equal(
        kvf_gpu_put(bed->gpu, bed->region, items, BLOCKS, NULL, NULL, NULL, 0, NULL, &request),
        KVF_OK);
    calls_wait(&the_daemon, request, &outcome);
    assert_int_equal(outcome.status, KVF_OK);
    assert_int_equal(outcome.n_good, BLOCKS);
}

/* Of a block: the daemon has the C codec's record; what a get of n tokens from first on is to leave
 * is put into `want`. */
static void check_record(struct bed *bed, uint32_t block, uint32_t first, uint32_t n)
{
    const struct kvf_codec_plan *plan = &bed->client->plan;
    uint8_t *record = calloc(1, plan->record_bytes_max);
    uint32_t ids[CHUNK_PAGES];
    void *layers[LAYERS];
    struct kvf_kv_view view;
    size_t payload_bytes;
    struct kvf_hit hit;
    char text[24];
    struct kvf_key key = calls_key(bed->first_key + block, text);

    assert_non_null(record);
    ids_of(block, ids);
    view = view_of(bed, host, layers, ids);
    assert_int_equal(kvf_block_encode(plan, &view, block * CHUNK, block_tokens(block),
                                      (void *)record, record + KVF_RECORD_PAGE_BYTES,
                                      plan->record_bytes_max - KVF_RECORD_PAGE_BYTES,
                                      bed->workspace, &payload_bytes),
                     KVF_OK);
    assert_int_equal(kvf_get(bed->client, &key, 1, NULL, &hit), KVF_OK);
    assert_int_equal(hit.record_bytes, KVF_RECORD_PAGE_BYTES + payload_bytes);
    assert_memory_equal((const uint8_t *)hit.record + KVF_RECORD_PAGE_BYTES,
                        record + KVF_RECORD_PAGE_BYTES, payload_bytes);
    view = view_of(bed, want, layers, ids);
    assert_int_equal(kvf_decode(bed->client, hit.record, hit.record_bytes, 0, 0, first, n, &view),
                     KVF_OK);
    assert_int_equal(kvf_lease_release(bed->client, hit.lease), KVF_OK);
    free(record);
}

/* Blocks, of some of them a part, into pages with other content. */
static void get_all(struct bed *bed)
{
    struct kvf_gpu_get_item items[BLOCKS];
    uint32_t ids[BLOCKS][CHUNK_PAGES];
    char keys[BLOCKS][24];
    struct calls_outcome outcome = {0};
    uint64_t request;

    memset(want, POISON, sizeof(want));
    calls_write(bed->pages, want, LAYERS * bed->layer_bytes);
    for (uint32_t b = 0; b < BLOCKS; b++) {
        uint32_t first = b % 2 ? below(block_tokens(b)) : 0;
        uint32_t n = block_tokens(b) - first;

        n = b % 3 == 2 ? 1 + below(n) : n;
        ids_of(b, ids[b]);
        items[b] = (struct kvf_gpu_get_item){.struct_bytes = sizeof(items[b]),
                                             .n_pages = (n + PAGE - 1) / PAGE,
                                             .key = calls_key(bed->first_key + b, keys[b]),
                                             .token_first = first,
                                             .n_tokens = n,
                                             .pages = ids[b]};
        check_record(bed, b, first, n);
    }
    assert_int_equal(
        kvf_gpu_get(bed->gpu, bed->region, items, BLOCKS, NULL, NULL, NULL, 0, &request), KVF_OK);
    calls_wait(&the_daemon, request, &outcome);
    assert_int_equal(outcome.status, KVF_OK);
    assert_int_equal(outcome.n_good, BLOCKS);
    calls_read(have, bed->pages, LAYERS * bed->layer_bytes);
    assert_memory_equal(have, want, LAYERS * bed->layer_bytes);
}

/* The same layer by layer: each layer is overwritten when the next one comes, on one stream. */
static void put_by_layers(struct bed *bed, bool is_redo)
{
    struct kvf_gpu_x_put_options options = {.struct_bytes = sizeof(options),
                                            .n_tokens = (BLOCKS - 1) * CHUNK +
                                                        block_tokens(BLOCKS - 1)};
    uint8_t *dense = calloc(1, options.n_tokens * bed->token_bytes);
    uint64_t x = calls_alloc(options.n_tokens * bed->token_bytes);
    struct kvf_gpu_x_put *put;
    struct kvf_key keys[BLOCKS];
    char texts[BLOCKS][24];
    int32_t statuses[BLOCKS];
    void *stream = calls_stream();
    uint32_t ids[CHUNK_PAGES];

    assert_non_null(dense);
    bed->first_key = n_keys;
    n_keys += BLOCKS;
    assert_int_equal(kvf_gpu_x_put_begin(bed->gpu, &options, &put), KVF_OK);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (uint32_t token = 0; token < options.n_tokens; token++) {
            ids_of(token / CHUNK, ids);
            memcpy(dense + token * bed->token_bytes,
                   host + layer * bed->layer_bytes +
                       (ids[token % CHUNK / PAGE] * PAGE + token % PAGE) * bed->token_bytes,
                   bed->token_bytes);
        }
        calls_check(calls_device->driver.cuMemcpyHtoDAsync(
            x, dense, options.n_tokens * bed->token_bytes, stream));
        assert_int_equal(kvf_gpu_x_put_layer(put, layer, (const void *)(uintptr_t)x, stream),
                         KVF_OK);
        calls_check(calls_device->driver.cuStreamSynchronize(stream)); /* of `dense` */
    }
    assert_int_equal(kvf_gpu_x_put_layer(put, LAYERS, (const void *)(uintptr_t)x, stream),
                     KVF_ERR_INVALID);
    for (uint32_t b = 0; b < BLOCKS; b++) {
        keys[b] = calls_key(bed->first_key + b, texts[b]);
    }
    assert_int_equal(kvf_gpu_x_put_end(put, keys, BLOCKS, NULL, statuses),
                     is_redo ? KVF_PARTIAL : KVF_OK);
    for (uint32_t b = 0; b < BLOCKS; b++) {
        assert_int_equal(statuses[b], is_redo && b == 1 ? KVF_ERR_UNSUPPORTED : KVF_OK);
        if (statuses[b] == KVF_OK) {
            check_record(bed, b, 0, block_tokens(b));
        }
    }
    calls_check(calls_device->driver.cuStreamDestroy(stream));
    calls_free(x);
    free(dense);
}

static void there_and_back(const struct shape *shape)
{
    struct bed bed;
    uint32_t ids[CHUNK_PAGES];

    print_message("%s, %u elements, groups of %u bytes\n", shape->profile, shape->width,
                  shape->window_bytes / 8);
    bed_open(&bed, shape);
    ids_of(1, ids);
    fill(&bed, shape->has_raw, ids[1]);
    calls_write(bed.pages, host, LAYERS * bed.layer_bytes);
    put_all(&bed);
    get_all(&bed);
    assert_int_equal(kvf_gpu_sleep(bed.gpu), KVF_OK);
    assert_int_equal(kvf_gpu_wake(bed.gpu), KVF_OK);
    get_all(&bed);
    if (shape->kind == KVF_KIND_X) {
        put_by_layers(&bed, shape->has_raw);
    }
    bed_close(&bed);
}

/* Groups as small as they can be, so that all blocks are cut, and larger ones, of blocks' ends,
 * whole blocks and beginnings. */
static void every_profile(void **state)
{
    static const struct shape shapes[] = {
        {"xcl3", KVF_KIND_X, KVF_DTYPE_BF16, 256, 1, false},
        {"xcl3", KVF_KIND_X, KVF_DTYPE_BF16, 256, 0, true},
        {"xcl2", KVF_KIND_X, KVF_DTYPE_F16, 384, 600000, true},
        {"xcl4", KVF_KIND_X, KVF_DTYPE_BF16, 256, 400000, false},
        {"xcl3-g2", KVF_KIND_X, KVF_DTYPE_BF16, 128, 1, true},
        {"xcl2-g4", KVF_KIND_X, KVF_DTYPE_BF16, 256, 300000, false},
        {"xcl3-g8", KVF_KIND_X, KVF_DTYPE_BF16, 192, 1, false},
        {"xcl2-lo", KVF_KIND_X, KVF_DTYPE_F32, 256, 500000, false},
        {"xcl3-paper", KVF_KIND_X, KVF_DTYPE_BF16, 256, 1, false},
        {"x4", KVF_KIND_X, KVF_DTYPE_BF16, 256, 300000, false},
        {"xgcl3", KVF_KIND_XG, KVF_DTYPE_BF16, 256, 1, false},
        {"xgcl2-d1", KVF_KIND_XG, KVF_DTYPE_F16, 128, 400000, false},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        there_and_back(&shapes[i]);
    }
}

/* What the device is not to be asked for, and begun puts that are given up. */
static void put_refusals(void **state)
{
    static const struct shape shape = {"xcl3", KVF_KIND_X, KVF_DTYPE_BF16, 256, 0, false};
    struct kvf_gpu_x_put_options options = {
        .struct_bytes = sizeof(options), .n_tokens = 5 * CHUNK, .memory_bytes = 1 << 16};
    struct kvf_gpu_x_put *put;
    struct kvf_key key = {"k", 1};
    struct bed bed;

    (void)state;
    bed_open(&bed, &shape);
    assert_int_equal(kvf_gpu_x_put_begin(bed.gpu, &options, &put), KVF_ERR_TOO_LARGE);
    assert_null(put);
    options.memory_bytes = 0;
    options.token_start = 1;
    assert_int_equal(kvf_gpu_x_put_begin(bed.gpu, &options, &put), KVF_ERR_INVALID);
    options.token_start = 0;
    assert_int_equal(kvf_gpu_x_put_begin(bed.gpu, &options, &put), KVF_OK);
    assert_int_equal(kvf_gpu_x_put_layer(put, 1, bed.layers[1], NULL), KVF_ERR_INVALID);
    assert_int_equal(kvf_gpu_x_put_layer(put, 0, bed.layers[0], NULL), KVF_OK);
    assert_int_equal(kvf_gpu_x_put_end(put, &key, 1, NULL, NULL), KVF_ERR_INVALID);
    assert_null(kvf_gpu_x_put_cancel(put));
    bed_close(&bed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_profile),
        cmocka_unit_test(put_refusals),
    };
    uint64_t seed;
    int failed;

    if (!calls_begin(&seed)) {
        return 77;
    }
    kvf_random_seeded_init(&random_bits, seed);
    failed = calls_run(&the_daemon, tests);
    calls_device_close();
    return failed;
}
