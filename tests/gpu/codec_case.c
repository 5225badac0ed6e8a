/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_case.c: see codec_case.h.
 */
#include "tests/gpu/codec_case.h"

#include "base/crc32c.h"
#include "codec/codec_layout.h"
#include "tests/gpu/codec_device.h"
#include "tests/gpu/codec_fill.h"
#include "tests/support/support.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum {
    POISON = 0x77,
    GUARD_BYTES = 4096, /* before and behind the pages */
    FAR_PAGES = 1500,
    FAR_STRIDE = 3 << 20,
    BLOCKS_MAX = 8,
    GIVEN_ARRAYS = 4, /* means of K, V, lists of K, V */
};

/* The engine's pages, here and on the device. */
struct pool {
    uint8_t *memory;
    uint64_t address;
    size_t bytes;
    uint64_t ids_address;
    struct kvf_gpu_pages pages[2];
    uint32_t tokens_a_page;
    uint32_t pages_a_block;
    uint32_t n_pages;
    uint32_t *ids; /* of all blocks */
    size_t layer_bytes;
    size_t first_byte; /* of layer 0 */
    size_t v_offset;
    bool is_far;
};

struct run {
    const struct codec_case *c;
    struct kvf_random_seeded *random;
    struct fixture_codec codec;
    struct fixture_kv kv[BLOCKS_MAX];
    uint8_t *records[BLOCKS_MAX]; /* by the C codec */
    size_t record_bytes[BLOCKS_MAX];
    struct pool pool;
    size_t slot_bytes; /* of one payload on the device */
    uint64_t payloads;
    struct kvf_gpu_part *parts;
    uint32_t n_parts;
    struct kvf_gpu_kinds kinds;
    struct kvf_gpu_work work;
    uint64_t source; /* of the pages as they were encoded, on the device; 0: escapes are patched */
    uint64_t given[GIVEN_ARRAYS]; /* on the device: the profile's means and lists, layer by layer */
};

/* -------------------------------------------------------------------------------------------------
 * Cases
 */
bool codec_case_begin(struct kvf_random_seeded *random)
{
    const char *only = getenv("KVF_TEST_ONLY");

    kvf_random_seeded_init(random, kvf_test_seed());
    if (only != NULL) {
        cmocka_set_test_filter(only);
    }
    return codec_device_open();
}

struct codec_case codec_case_of(const char *profile, int dtype, enum case_layout layout,
                                enum case_fill fill)
{
    return (struct codec_case){
        .profile = profile,
        .dtype = dtype,
        .n_layers = 2,
        .n_heads = 3,
        .dim_k = 128,
        .dim_v = 128,
        .n_tokens = 53,
        .n_blocks = 2,
        .layout = layout,
        .fill = fill,
    };
}

struct codec_case codec_case_sized(const char *profile, uint32_t dim, uint32_t n_tokens)
{
    struct codec_case c = codec_case_of(profile, KVF_DTYPE_BF16, CASE_HND, CASE_HARD);

    c.dim_k = dim;
    c.dim_v = dim;
    c.n_tokens = n_tokens;
    return c;
}

bool codec_case_shape(struct codec_case *c, size_t i)
{
    static const struct {
        uint32_t n_heads;
        uint32_t dim_k;
        uint32_t dim_v;
        uint32_t n_tokens;
    } shapes[] = {
        {1, 64, 64, 1},    {5, 96, 96, 17},   {3, 80, 80, 16},    {5, 80, 96, 17},
        {2, 112, 112, 31}, {1, 192, 128, 33}, {1, 256, 256, 8},   {3, 128, 64, 256},
        {1, 1024, 0, 5},   {2, 63, 1, 29},    {1, 7, 13, 150},    {1, 576, 0, 64},
        {8, 128, 128, 16}, {8, 128, 64, 16},  {2, 1000, 514, 11}, {1, 1, 0, 256},
        {1, 512, 64, 256}, {2, 63, 9, 29},    {1, 1024, 0, 40},   {3, 100, 12, 100},
    };

    if (i >= sizeof(shapes) / sizeof(shapes[0])) {
        return false;
    }
    c->n_heads = shapes[i].n_heads;
    c->dim_k = shapes[i].dim_k;
    c->dim_v = shapes[i].dim_v;
    c->n_tokens = shapes[i].n_tokens;
    return true;
}

static uint32_t below(struct kvf_random_seeded *random, uint32_t n)
{
    return (uint32_t)(kvf_random_seeded_next(random) >> 33) % n;
}

/* -------------------------------------------------------------------------------------------------
 * Pages
 */
static void set_strides(struct pool *pool, int is_v, size_t page, size_t token, size_t head)
{
    pool->pages[is_v] = (struct kvf_gpu_pages){
        .page_stride_bytes = page,
        .token_stride_bytes = token,
        .head_stride_bytes = head,
    };
}

static void pool_lay_out(struct pool *pool, const struct codec_case *c)
{
    size_t element = kvf_dtype_bytes(c->dtype);
    size_t k = c->dim_k * element;
    size_t v = c->dim_v * element;
    size_t both = k + v;
    size_t n = pool->tokens_a_page;
    size_t heads = c->n_heads;
    size_t page = n * heads * both;
    pool->v_offset = k;
    switch (c->layout) {
    case CASE_HND:
        set_strides(pool, 0, page, both, n * both);
        break;
    case CASE_SPLIT_FIRST:
        pool->v_offset = pool->n_pages * n * heads * k;
        set_strides(pool, 0, n * heads * k, heads * k, k);
        set_strides(pool, 1, n * heads * v, heads * v, v);
        break;
    case CASE_SPLIT_PAGE:
        pool->v_offset = n * heads * k;
        set_strides(pool, 0, page, heads * k, k);
        set_strides(pool, 1, page, heads * v, v);
        break;
    case CASE_PADDED:
        page = n * (heads * both + 96) + 160;
        set_strides(pool, 0, page, heads * both + 96, both);
        break;
    case CASE_ELEMENT:
        page += 3 * element;
        set_strides(pool, 0, page, heads * both, both);
        break;
    case CASE_FAR:
        page = FAR_STRIDE;
        set_strides(pool, 0, page, heads * both, both);
        break;
    default:
        set_strides(pool, 0, page, heads * both, both);
        break;
    }
    if (c->layout != CASE_SPLIT_FIRST && c->layout != CASE_SPLIT_PAGE) {
        pool->pages[1] = pool->pages[0];
    }
    pool->layer_bytes = (pool->n_pages * page + 63) / 16 * 16;
    pool->first_byte = GUARD_BYTES + (c->layout == CASE_ELEMENT ? element : 0);
}

static void shuffle(uint32_t *ids, uint32_t n, struct kvf_random_seeded *random)
{
    for (uint32_t i = 0; i < n; i++) {
        ids[i] = i;
    }
    for (uint32_t i = n; i > 1; i--) {
        uint32_t j = below(random, i);
        uint32_t other = ids[i - 1];
        ids[i - 1] = ids[j];
        ids[j] = other;
    }
}

static void pool_init(struct pool *pool, const struct codec_case *c,
                      struct kvf_random_seeded *random)
{
    pool->tokens_a_page = c->tokens_a_page != 0     ? c->tokens_a_page
                          : c->layout == CASE_SLOTS ? 1
                                                    : 16;
    pool->pages_a_block = (c->n_tokens + pool->tokens_a_page - 1) / pool->tokens_a_page;
    pool->is_far = c->layout == CASE_FAR;
    pool->n_pages = pool->is_far ? FAR_PAGES : c->n_blocks * pool->pages_a_block + 3;
    pool_lay_out(pool, c);
    pool->bytes = c->n_layers * pool->layer_bytes + 2 * GUARD_BYTES;
    pool->memory = calloc(1, pool->bytes);
    pool->ids = calloc(pool->n_pages, sizeof(*pool->ids));
    assert_non_null(pool->memory);
    assert_non_null(pool->ids);
    shuffle(pool->ids, pool->n_pages, random);
    pool->address = codec_device_alloc(pool->bytes);
    pool->ids_address = codec_device_alloc(pool->n_pages * sizeof(*pool->ids));
    codec_device_write(pool->ids_address, pool->ids, pool->n_pages * sizeof(*pool->ids));
}

static void pool_fini(struct pool *pool)
{
    codec_device_free(pool->address);
    codec_device_free(pool->ids_address);
    free(pool->memory);
    free(pool->ids);
}

/* What of a far pool is used; of others, all of it. Calls for each range. */
static void pool_each(const struct run *run, void (*f)(const struct run *run, size_t at, size_t n))
{
    const struct pool *pool = &run->pool;
    if (!pool->is_far) {
        f(run, 0, pool->bytes);
        return;
    }
    size_t used = pool->tokens_a_page * pool->pages[0].token_stride_bytes + 64;
    for (uint32_t i = 0; i < run->c->n_blocks * pool->pages_a_block * run->c->n_layers; i++) {
        uint32_t page = pool->ids[i / run->c->n_layers];
        f(run,
          pool->first_byte + i % run->c->n_layers * pool->layer_bytes + (size_t)page * FAR_STRIDE,
          used);
    }
}

static void poison_range(const struct run *run, size_t at, size_t n)
{
    memset(run->pool.memory + at, POISON, n);
}

static void write_range(const struct run *run, size_t at, size_t n)
{
    codec_device_write(run->pool.address + at, run->pool.memory + at, n);
}

static void compare_range(const struct run *run, size_t at, size_t n)
{
    uint8_t *have = malloc(n);
    assert_non_null(have);
    codec_device_read(have, run->pool.address + at, n);
    for (size_t i = 0; i < n; i++) {
        if (have[i] != run->pool.memory[at + i]) {
            fail_msg("byte %zu of the pages is %02x, not %02x", at + i, have[i],
                     run->pool.memory[at + i]);
        }
    }
    free(have);
}

/* Where the vector of a block's token lies in the pool; token counts from the view's first. */
static uint8_t *pool_vector(const struct run *run, uint32_t block, int is_v, uint32_t layer,
                            uint32_t head, uint32_t token)
{
    const struct pool *pool = &run->pool;
    uint32_t page = pool->ids[block * pool->pages_a_block + token / pool->tokens_a_page];
    return pool->memory + pool->first_byte + layer * pool->layer_bytes +
           (is_v ? pool->v_offset : 0) + page * pool->pages[is_v].page_stride_bytes +
           token % pool->tokens_a_page * pool->pages[is_v].token_stride_bytes +
           head * pool->pages[is_v].head_stride_bytes;
}

/* Tokens [first, first + n) of a block to where the view has its token 0. */
static void pool_put(const struct run *run, const struct fixture_kv *kv, uint32_t block,
                     uint32_t first, uint32_t n)
{
    for (uint32_t layer = 0; layer < run->c->n_layers; layer++) {
        for (int is_v = 0; is_v < 2; is_v++) {
            size_t bytes = (is_v ? run->c->dim_v : run->c->dim_k) * kvf_dtype_bytes(run->c->dtype);
            for (uint32_t i = 0; i < run->c->n_heads * n; i++) {
                memcpy(pool_vector(run, block, is_v, layer, i / n, i % n),
                       fixture_kv_vector(kv, is_v, layer, i / n, first + i % n), bytes);
            }
        }
    }
}

static uint32_t block_tokens(const struct codec_case *c, uint32_t block)
{
    return block % 2 != 0 && c->n_tokens_odd != 0 ? c->n_tokens_odd : c->n_tokens;
}

/* -------------------------------------------------------------------------------------------------
 * Work
 */
static uint32_t block_start(const struct codec_case *c, uint32_t block)
{
    return block == 0 ? c->token_start : c->token_start + block * 4096;
}

/* Bytes of one layer of what a profile has. */
static size_t given_bytes(const struct run *run, uint32_t i)
{
    size_t dim = i % 2 != 0 ? run->c->dim_v : run->c->dim_k;
    return run->c->n_heads * (i < 2 ? dim * sizeof(uint16_t) : (dim + 7) / 8);
}

/* Lies on an odd multiple of the element, as a shard's may. */
static uint64_t given_at(const struct run *run, uint32_t i, uint32_t layer)
{
    return run->given[i] != 0 ? run->given[i] + (i < 2 ? 2 : 1) + layer * given_bytes(run, i) : 0;
}

static void upload_given(struct run *run)
{
    for (uint32_t i = 0; i < GIVEN_ARRAYS; i++) {
        const struct kvf_plan_array *array = i < 2 ? &run->codec.plan.means[i]
                                                   : &run->codec.plan.splits[i - 2];
        size_t bytes = given_bytes(run, i);
        if (array->first == NULL) {
            continue;
        }
        run->given[i] = codec_device_alloc(run->c->n_layers * bytes + 2);
        for (uint32_t layer = 0; layer < run->c->n_layers; layer++) {
            codec_device_write(given_at(run, i, layer), kvf_plan_array_at(array, layer), bytes);
        }
    }
}

static void run_init(struct run *run, const struct codec_case *c, struct kvf_random_seeded *random)
{
    assert_true(c->n_blocks <= BLOCKS_MAX);
    *run = (struct run){.c = c, .random = random};
    struct kvf_geometry geometry = fixture_geometry(c->dtype, c->n_layers, c->n_heads, c->dim_k,
                                                    c->dim_v, c->n_tokens);
    geometry.sink_tokens = (uint16_t)c->sink_tokens;
    geometry.kind = c->is_mla ? KVF_KIND_MLA : c->kind != 0 ? c->kind : KVF_KIND_KV;
    if (geometry.kind >= KVF_KIND_X) {
        geometry.rope_state = KVF_ROPE_NONE;
    }
    if (c->table != NULL) {
        fixture_codec_init_table(&run->codec, &geometry, c->table, c->head_first);
    } else {
        fixture_codec_init(&run->codec, &geometry, c->profile);
    }
    upload_given(run);
    pool_init(&run->pool, c, random);
    pool_each(run, poison_range);
    for (uint32_t i = 0; i < c->n_blocks; i++) {
        fixture_kv_init(&run->kv[i], &geometry, block_tokens(c, i));
        codec_case_fill(&run->kv[i], c->fill, &run->codec.plan, random);
        pool_put(run, &run->kv[i], i, 0, block_tokens(c, i));
        fixture_encode(&run->codec, &run->kv[i], block_start(c, i));
        run->record_bytes[i] = run->codec.record_bytes;
        run->records[i] = malloc(run->codec.record_bytes);
        assert_non_null(run->records[i]);
        memcpy(run->records[i], run->codec.page, run->codec.record_bytes);
    }
    pool_each(run, write_range);
    run->slot_bytes = (run->codec.payload_capacity + 255) / 256 * 256 + 256;
    run->payloads = codec_device_alloc(c->n_blocks * run->slot_bytes);
    run->parts = calloc((size_t)c->n_blocks * c->n_layers * 2, sizeof(*run->parts));
    assert_non_null(run->parts);
    run->work = (struct kvf_gpu_work){
        .pages = {run->pool.pages[0], run->pool.pages[1]},
        .page_ids = run->pool.ids_address,
        .n_blocks = c->n_blocks,
        .n_layers = c->n_layers,
        .tokens_a_page = run->pool.tokens_a_page,
        .has_v = c->dim_v != 0,
        .shared_bytes_max = codec_device_shared_bytes(),
    };
    kvf_gpu_kinds_fill(&run->codec.plan, &run->kinds);
}

static void run_fini(struct run *run)
{
    for (uint32_t i = 0; i < run->c->n_blocks; i++) {
        fixture_kv_fini(&run->kv[i]);
        free(run->records[i]);
    }
    for (uint32_t i = 0; i < GIVEN_ARRAYS; i++) {
        if (run->given[i] != 0) {
            codec_device_free(run->given[i]);
        }
    }
    codec_device_free(run->payloads);
    pool_fini(&run->pool);
    fixture_codec_fini(&run->codec);
    free(run->parts);
}

static struct kvf_gpu_part *add_part(struct run *run, uint32_t block, uint32_t layer, int is_v)
{
    struct kvf_gpu_part *part = &run->parts[run->n_parts++];
    *part = (struct kvf_gpu_part){
        .mean = given_at(run, (uint32_t)is_v, layer),
        .split = given_at(run, 2 + (uint32_t)is_v, layer),
        .base = run->pool.address + run->pool.first_byte + layer * run->pool.layer_bytes +
                (is_v ? run->pool.v_offset : 0),
        .first_page = block * run->pool.pages_a_block,
        .block = block,
        .n_tokens = (uint16_t)block_tokens(run->c, block),
        .layer = (uint16_t)layer,
        .is_v = (uint8_t)is_v,
    };
    if (run->source != 0) {
        part->source = part->base - run->pool.address + run->source;
    }
    return part;
}

/* Launch over the list as it is now: a decode. */
static void run_launches(struct run *run, const struct kvf_gpu_launch *launches, uint32_t n)
{
    assert_in_range(n, 1, KVF_GPU_LAUNCHES_MAX);
    codec_device_launch(&run->work, launches, n);
    codec_device_wait();
}

static void upload_parts(struct run *run)
{
    run->work.n_parts = run->n_parts;
    run->work.parts = codec_device_alloc(run->n_parts * sizeof(*run->parts));
    codec_device_write(run->work.parts, run->parts, run->n_parts * sizeof(*run->parts));
}

/* Numbers of the list's parts, kind by kind; 0 instead if there is one kind. */
static void upload_numbers(struct run *run)
{
    uint32_t *numbers = calloc(run->n_parts, sizeof(*numbers));
    assert_non_null(numbers);
    kvf_gpu_number_parts(&run->work, &run->kinds, numbers);
    run->work.numbers = 0;
    if (run->kinds.n > 1) {
        run->work.numbers = codec_device_alloc(run->n_parts * sizeof(*numbers));
        codec_device_write(run->work.numbers, numbers, run->n_parts * sizeof(*numbers));
    }
    free(numbers);
}

/* -------------------------------------------------------------------------------------------------
 * Encode
 */
static void list_encode(struct run *run, bool is_fixed)
{
    run->n_parts = 0;
    for (uint32_t block = 0; block < run->c->n_blocks; block++) {
        uint64_t at = run->payloads + block * run->slot_bytes;
        for (uint32_t i = 0; i < 2 * run->c->n_layers; i++) {
            const struct kvf_codec_tensor *tensor = kvf_plan_tensor(&run->codec.plan, i / 2, i % 2);
            if (tensor->dim == 0) {
                continue;
            }
            struct kvf_gpu_part *part = add_part(run, block, i / 2, i % 2);
            part->n_sinks = kvf_plan_sinks(&run->codec.plan, block_start(run->c, block),
                                           part->n_tokens);
            part->stored = is_fixed || i == 0 ? at : 1; /* misaligned: whoever uses it, faults */
            part->loop = kvf_gpu_part_loop(&run->codec.plan, i / 2, tensor);
            kvf_gpu_part_fill(tensor, part);
            at += part->fixed_bytes;
        }
    }
    upload_parts(run);
    upload_numbers(run);
}

/* The encode of the list as it is now. */
static void launch_encode(struct run *run)
{
    struct kvf_gpu_launch launches[KVF_GPU_LAUNCHES_MAX];
    uint32_t n = kvf_gpu_encode(&run->work, &run->kinds, launches);
    assert_in_range(n, 1, KVF_GPU_LAUNCHES_MAX);
    for (uint32_t i = 0; i < n; i++) {
        struct kvf_gpu_work one = kvf_gpu_launch_work(&run->work, &run->kinds, launches[i].kind);
        codec_device_launch(&one, &launches[i], 1);
    }
    codec_device_wait();
}

/* Did the C codec store a strip of a codec that has escapes raw? */
static bool needs_redo(const struct run *run, uint32_t block)
{
    const struct kvf_record_page *page = (const void *)run->records[block];
    bool redo = false;
    for (uint32_t i = 0; i < 2 * run->c->n_layers; i++) {
        const struct kvf_codec_tensor *tensor = kvf_plan_tensor(&run->codec.plan, i / 2, i % 2);
        uint8_t bits = page->layer_bits[i / 2] >> i % 2 * 4 & 15;
        redo |= tensor->dim != 0 && (tensor->ops->capabilities & KVF_CODEC_ESCAPES) != 0 &&
                bits == KVF_BITS_RAW;
    }
    return redo;
}

/* One block: the page that follows from its result, and the payload with what follows it. */
static bool compare_block(const struct run *run, uint32_t block,
                          const struct kvf_gpu_result *result)
{
    bool redo = needs_redo(run, block);
    if (!run->c->is_wrong) {
        assert_int_equal(result->flags, KVF_GPU_DONE | (redo ? KVF_GPU_REDO : 0));
    }
    if (redo) {
        return false;
    }
    uint8_t *payload = malloc(run->slot_bytes);
    assert_non_null(payload);
    codec_device_read(payload, run->payloads + block * run->slot_bytes, run->slot_bytes);
    const uint8_t *want = run->records[block] + KVF_BLOCK_PAGE_BYTES;
    size_t want_bytes = run->record_bytes[block] - KVF_BLOCK_PAGE_BYTES;
    if (run->c->is_wrong) {
        bool is_seen = memcmp(payload, want, want_bytes) != 0;
        free(payload);
        return is_seen;
    }
    for (size_t i = 0; i < run->slot_bytes; i++) {
        uint8_t byte = i < want_bytes ? want[i] : POISON;
        if (payload[i] != byte) {
            fail_msg("byte %zu of %zu of block %u is %02x, not %02x", i, want_bytes, block,
                     payload[i], byte);
        }
    }
    struct kvf_record_page page;
    assert_int_equal(kvf_block_describe_gpu(&run->codec.plan, block_start(run->c, block),
                                            block_tokens(run->c, block), result,
                                            kvf_crc32c(0, payload, want_bytes), &page),
                     KVF_OK);
    assert_memory_equal(&page, run->records[block], sizeof(page));
    free(payload);
    return true;
}

/* The same layer by layer, with sums of differences, if there are such, in memory in between. */
static void launch_layers(struct run *run)
{
    struct kvf_gpu_launch launches[KVF_GPU_LAUNCHES_MAX];
    uint32_t n_blocks = run->c->n_blocks;
    uint32_t n_layers = run->c->n_layers;
    size_t sums_bytes = (size_t)run->c->n_tokens * run->c->n_heads * run->c->dim_k * sizeof(float);
    uint64_t sums = codec_device_alloc(n_blocks * sums_bytes);
    uint32_t *numbers = calloc(run->n_parts, sizeof(*numbers));
    assert_non_null(numbers);
    for (uint32_t i = 0; i < run->n_parts; i++) { /* of one tensor each */
        numbers[i] = i % n_blocks * n_layers + i / n_blocks;
        run->parts[i].sums = run->kinds.tensors[0][0].is_looped ? sums + i / n_layers * sums_bytes
                                                                : run->parts[i].sums;
    }
    codec_device_write(run->work.parts, run->parts, run->n_parts * sizeof(*run->parts));
    if (run->work.numbers != 0) {
        codec_device_free(run->work.numbers);
    }
    run->work.numbers = codec_device_alloc(run->n_parts * sizeof(*numbers));
    codec_device_write(run->work.numbers, numbers, run->n_parts * sizeof(*numbers));
    for (uint32_t layer = 0; layer <= n_layers; layer++) {
        uint32_t n = 1;
        launches[0] = kvf_gpu_encode_finish(&run->work);
        if (layer < n_layers) {
            n = kvf_gpu_encode_layer(&run->work, &run->kinds, layer, launches);
        }
        assert_in_range(n, 1, KVF_GPU_LAUNCHES_MAX);
        for (uint32_t i = 0; i < n; i++) {
            uint32_t kind = launches[i].kind;
            struct kvf_gpu_work one = layer < n_layers
                                          ? kvf_gpu_layer_work(&run->work, &run->kinds, layer, kind)
                                          : kvf_gpu_launch_work(&run->work, &run->kinds, kind);
            codec_device_launch(&one, &launches[i], 1);
        }
    }
    codec_device_wait();
    codec_device_free(sums);
    free(numbers);
}

static bool encode_all(struct run *run, void (*launch)(struct run *run))
{
    uint32_t n_blocks = run->c->n_blocks;
    bool is_fixed = kvf_codec_plan_is_fixed(&run->codec.plan);
    uint8_t *poison = malloc(n_blocks * run->slot_bytes);
    struct kvf_gpu_result *results = calloc(n_blocks, sizeof(*results));
    assert_non_null(poison);
    assert_non_null(results);
    memset(poison, POISON, n_blocks * run->slot_bytes);
    codec_device_write(run->payloads, poison, n_blocks * run->slot_bytes);
    run->work.results = codec_device_alloc(n_blocks * sizeof(*results));
    codec_device_write(run->work.results, results, n_blocks * sizeof(*results));
    list_encode(run, is_fixed);
    run->work.tokens_max = run->c->n_tokens;
    size_t scratch_bytes = (size_t)kvf_gpu_encode_scratch_bytes(&run->work, &run->kinds);
    uint8_t *zeroes = calloc(1, scratch_bytes + 1);
    assert_non_null(zeroes);
    run->work.scratch = codec_device_alloc(scratch_bytes);
    codec_device_write(run->work.scratch, zeroes, scratch_bytes);
    free(zeroes);
    launch(run);
    codec_device_read(results, run->work.results, n_blocks * sizeof(*results));
    bool all = true;
    for (uint32_t block = 0; block < n_blocks; block++) {
        all &= compare_block(run, block, &results[block]);
    }
    codec_device_free(run->work.parts);
    if (run->work.numbers != 0) {
        codec_device_free(run->work.numbers);
        run->work.numbers = 0;
    }
    codec_device_free(run->work.results);
    codec_device_free(run->work.scratch);
    free(poison);
    free(results);
    return all;
}

/* -------------------------------------------------------------------------------------------------
 * Decode
 */

/* Parts of all blocks that are stored by this codec, or, for KVF_CODEC_NONE, sections; of layers of
 * one kind. */
static void list_decode(struct run *run, const struct kvf_block_ranges *ranges, uint8_t codec,
                        uint32_t kind)
{
    const uint8_t *kinds = run->kinds.layer_kinds;
    run->n_parts = 0;
    for (uint32_t block = 0; block < run->c->n_blocks; block++) {
        uint64_t payload = run->payloads + block * run->slot_bytes;
        struct kvf_block_reader reader;
        struct kvf_block_part stored;
        struct kvf_block_section section;
        assert_int_equal(kvf_block_open(&run->codec.plan, run->records[block],
                                        run->record_bytes[block], ranges, &reader),
                         KVF_OK);
        while (kvf_block_next_part(&reader, &stored) == KVF_OK) {
            if (stored.tensor->ops->id == codec && kinds[stored.layer] == kind) {
                struct kvf_gpu_part *part = add_part(run, block, stored.layer, stored.is_v);
                part->stored = payload + stored.offset;
                part->part_bytes = (uint32_t)stored.bytes;
                part->token_first = (uint16_t)ranges->token_first;
                part->n_wanted = (uint16_t)ranges->n_tokens;
            }
        }
        while (codec == KVF_CODEC_NONE && kvf_block_next_section(&reader, &section) == KVF_OK) {
            if (kinds[section.layer] != kind) {
                continue;
            }
            struct kvf_gpu_part *part = add_part(run, block, section.layer, section.is_v);
            part->stored = payload + section.offset;
            part->n_vectors = section.count;
            part->token_first = (uint16_t)ranges->token_first;
            part->n_wanted = (uint16_t)ranges->n_tokens;
        }
    }
}

/* Parts of one block of a plan with deltas, by whatever they are stored. */
static void list_looped(struct run *run, const struct kvf_block_ranges *ranges, uint32_t block)
{
    uint64_t payload = run->payloads + block * run->slot_bytes;
    struct kvf_block_reader reader;
    struct kvf_block_part stored;
    assert_int_equal(kvf_block_open(&run->codec.plan, run->records[block], run->record_bytes[block],
                                    ranges, &reader),
                     KVF_OK);
    while (kvf_block_next_part(&reader, &stored) == KVF_OK) {
        struct kvf_gpu_part *part = add_part(run, block, stored.layer, false);
        part->stored = payload + stored.offset;
        part->token_first = (uint16_t)ranges->token_first;
        part->n_wanted = (uint16_t)ranges->n_tokens;
        part->loop = kvf_gpu_part_loop(&run->codec.plan, stored.layer, stored.tensor);
    }
}

/* A launch of layers of n_blocks blocks. */
static void launch_looped(struct run *run, uint64_t parts, uint32_t n_parts, uint32_t n_blocks)
{
    struct kvf_gpu_launch launches[KVF_GPU_LAUNCHES_MAX];
    run->work.parts = parts;
    run->work.n_parts = n_parts;
    run->work.n_blocks = n_blocks;
    run_launches(run, launches, kvf_gpu_decode(&run->work, KVF_CODEC_SAW, launches));
}

/* All blocks at once, or one after the other, cut into launches anywhere. */
static void decode_looped(struct run *run, const struct kvf_block_ranges *ranges, bool is_cut)
{
    const struct codec_case *c = run->c;
    kvf_gpu_loop_tensors(&run->kinds, run->work.tensors);
    run->n_parts = 0;
    for (uint32_t block = 0; block < c->n_blocks; block++) {
        list_looped(run, ranges, block);
    }
    upload_parts(run);
    uint64_t parts = run->work.parts;
    if (!is_cut) {
        run->work.scratch = 0;
        launch_looped(run, parts, run->n_parts, c->n_blocks);
    } else {
        run->work.scratch = codec_device_alloc((size_t)c->n_tokens * c->n_heads * c->dim_k *
                                               sizeof(float));
        for (uint32_t first = 0, n; first < run->n_parts; first += n) {
            n = 1 + below(run->random, c->n_layers - first % c->n_layers);
            launch_looped(run, parts + first * sizeof(*run->parts), n, 1);
        }
        codec_device_free(run->work.scratch);
    }
    run->work.n_blocks = c->n_blocks;
    codec_device_free(parts);
}

/* All blocks from their payloads on the device. */
static void decode_device(struct run *run, uint32_t token_first, uint32_t n_tokens)
{
    static const uint8_t codecs[] = {KVF_CODEC_RAW, KVF_CODEC_EXACT, KVF_CODEC_SAW,
                                     KVF_CODEC_TQ,  KVF_CODEC_KIVI,  KVF_CODEC_NONE};
    struct kvf_block_ranges ranges = {.token_first = token_first, .n_tokens = n_tokens};
    bool is_looped = run->kinds.tensors[0][0].is_looped != 0;
    run->work.tokens_max = n_tokens;
    if (is_looped) {
        decode_looped(run, &ranges, token_first != 0);
    }
    for (size_t i = 0; i < sizeof(codecs) * run->kinds.n; i++) {
        uint8_t codec = codecs[i / run->kinds.n];
        uint32_t kind = (uint32_t)(i % run->kinds.n);
        if (is_looped && codec != KVF_CODEC_NONE) {
            continue;
        }
        bool restores = codec == KVF_CODEC_NONE && run->source != 0;
        list_decode(run, &ranges, restores ? KVF_CODEC_SAW : codec, kind);
        memcpy(run->work.tensors, run->kinds.tensors[kind], sizeof(run->work.tensors));
        if (run->n_parts != 0) {
            struct kvf_gpu_launch launches[KVF_GPU_LAUNCHES_MAX];
            upload_parts(run);
            uint32_t n = restores                  ? kvf_gpu_restore(&run->work, launches)
                         : codec == KVF_CODEC_NONE ? kvf_gpu_patch(&run->work, launches)
                                                   : kvf_gpu_decode(&run->work, codec, launches);
            run_launches(run, launches, n);
            codec_device_free(run->work.parts);
        }
    }
}

static void upload_records(struct run *run)
{
    for (uint32_t block = 0; block < run->c->n_blocks; block++) {
        codec_device_write(run->payloads + block * run->slot_bytes,
                           run->records[block] + KVF_BLOCK_PAGE_BYTES,
                           run->record_bytes[block] - KVF_BLOCK_PAGE_BYTES);
    }
}

static void poison_pages(struct run *run)
{
    pool_each(run, poison_range);
    pool_each(run, write_range);
}

static void decode_and_compare(struct run *run, uint32_t token_first, uint32_t n_tokens)
{
    poison_pages(run);
    decode_device(run, token_first, n_tokens);
    for (uint32_t block = 0; block < run->c->n_blocks; block++) {
        struct fixture_kv whole;
        fixture_kv_init(&whole, &run->kv[block].geometry, block_tokens(run->c, block));
        memcpy(run->codec.page, run->records[block], run->record_bytes[block]);
        run->codec.record_bytes = run->record_bytes[block];
        fixture_decode(&run->codec, &whole);
        pool_put(run, &whole, block, token_first, n_tokens);
        fixture_kv_fini(&whole);
    }
    pool_each(run, compare_range);
}

/* The same as who has encoded decodes it: escapes from where they were encoded from. */
static void restore_and_compare(struct run *run)
{
    static const struct kvf_gpu_result some = {.n_escapes = 1};
    run->work.results = codec_device_alloc(run->c->n_blocks * sizeof(some));
    for (uint32_t block = 0; block < run->c->n_blocks; block++) {
        pool_put(run, &run->kv[block], block, 0, run->c->n_tokens);
        codec_device_write(run->work.results + block * sizeof(some), &some, sizeof(some));
    }
    run->source = codec_device_alloc(run->pool.bytes);
    codec_device_write(run->source, run->pool.memory, run->pool.bytes);
    decode_and_compare(run, 0, run->c->n_tokens);
    codec_device_free(run->work.results);
    codec_device_free(run->source);
}

static void print_case(const struct codec_case *c)
{
    printf("%s, dtype %d, %u x %u heads of %u and %u, %u x %u tokens (%u in odd ones) from %u, %u "
           "sinks, "
           "layout %d, fill %d\n",
           c->table != NULL ? c->table->name : c->profile, c->dtype, c->n_layers, c->n_heads,
           c->dim_k, c->dim_v, c->n_blocks, c->n_tokens, block_tokens(c, 1), c->token_start,
           c->sink_tokens, (int)c->layout, (int)c->fill);
}

bool codec_case_run(const struct codec_case *c, struct kvf_random_seeded *random)
{
    struct run run;
    print_case(c);
    run_init(&run, c, random);
    bool all = encode_all(&run, launch_encode);
    if (!c->is_wrong && c->kind >= KVF_KIND_X && kvf_codec_plan_is_fixed(&run.codec.plan)) {
        assert_int_equal(encode_all(&run, launch_layers), all);
    }
    if (c->is_wrong) {
        run_fini(&run);
        return all;
    }
    upload_records(&run);
    uint32_t n_tokens = c->n_tokens_odd != 0 ? c->n_tokens_odd : c->n_tokens; /* of all blocks */
    decode_and_compare(&run, 0, n_tokens);
    for (int i = 0; i < 2; i++) {
        uint32_t token_first = below(random, n_tokens);
        decode_and_compare(&run, token_first, 1 + below(random, n_tokens - token_first));
    }
    if (c->kind == KVF_KIND_XG && c->n_tokens_odd == 0) {
        restore_and_compare(&run);
    }
    run_fini(&run);
    return all;
}

/* -------------------------------------------------------------------------------------------------
 * Hostile records
 */

/* What the pages do not cover is as it was. */
static void compare_guards(const struct run *run)
{
    const struct pool *pool = &run->pool;
    uint8_t *have = malloc(pool->bytes);
    assert_non_null(have);
    codec_device_read(have, pool->address, pool->bytes);
    for (size_t i = 0; i < GUARD_BYTES; i++) {
        assert_int_equal(have[i], POISON);
        assert_int_equal(have[pool->bytes - 1 - i], POISON);
    }
    free(have);
}

void codec_case_run_hostile(const struct codec_case *c, struct kvf_random_seeded *random)
{
    struct run run;
    print_case(c);
    run_init(&run, c, random);
    assert_false(run.pool.is_far);
    upload_records(&run);
    poison_pages(&run);
    for (uint32_t block = 0; block < c->n_blocks; block++) {
        size_t bytes = run.record_bytes[block] - KVF_BLOCK_PAGE_BYTES;
        uint8_t *payload = malloc(bytes);
        assert_non_null(payload);
        memcpy(payload, run.records[block] + KVF_BLOCK_PAGE_BYTES, bytes);
        uint32_t n_changes = 1 + below(random, (uint32_t)bytes / 8);
        for (uint32_t i = 0; i < n_changes; i++) {
            payload[below(random, (uint32_t)bytes)] = (uint8_t)below(random, 256);
        }
        if (below(random, 2) == 0) {
            memset(payload, (int)below(random, 256), bytes);
        }
        codec_device_write(run.payloads + block * run.slot_bytes, payload, bytes);
        free(payload);
    }
    decode_device(&run, 0, c->n_tokens);
    decode_device(&run, c->n_tokens / 3, c->n_tokens - c->n_tokens / 3);
    compare_guards(&run);
    run_fini(&run);
}
