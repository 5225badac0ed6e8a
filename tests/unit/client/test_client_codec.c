/* SPDX-License-Identifier: Apache-2.0
 *
 * test_client_codec.c: blocks from KV pages into the daemon and back, through the library.
 */
#include "tests/unit/client/fixture.h"

#include "codec/block_format.h"

enum {
    LAYERS = 3,
    HEADS = 2,
    DIM = 128,
    CHUNK = 64,
    PAGE = 16, /* tokens of one engine page */
    PAGES = CHUNK / PAGE,
};

/* Engine memory of the shape (layer, page, token, head, dim), bf16, K and V. */
struct engine {
    uint16_t k[LAYERS][PAGES][PAGE][HEADS][DIM];
    uint16_t v[LAYERS][PAGES][PAGE][HEADS][DIM];
    void *k_layers[LAYERS];
    void *v_layers[LAYERS];
    uint32_t table[PAGES];
    struct kvf_kv_view view;
};

static void engine_init(struct engine *engine)
{
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        engine->k_layers[layer] = engine->k[layer];
        engine->v_layers[layer] = engine->v[layer];
    }
    for (uint32_t i = 0; i < PAGES; i++) {
        engine->table[i] = PAGES - 1 - i;
    }
    engine->view = (struct kvf_kv_view){
        .struct_bytes = sizeof(engine->view),
        .tokens_a_page = PAGE,
        .page_table = engine->table,
        .k = {.layers = engine->k_layers,
              .page_stride_bytes = sizeof(engine->k[0][0]),
              .token_stride_bytes = sizeof(engine->k[0][0][0]),
              .head_stride_bytes = sizeof(engine->k[0][0][0][0])},
        .v = {.layers = engine->v_layers,
              .page_stride_bytes = sizeof(engine->v[0][0]),
              .token_stride_bytes = sizeof(engine->v[0][0][0]),
              .head_stride_bytes = sizeof(engine->v[0][0][0][0])},
    };
}

/* bf16 values with magnitudes of one binade, so that every codec can take them. */
static void engine_fill(struct engine *engine, struct kvf_random_seeded *random)
{
    uint16_t *values = &engine->k[0][0][0][0][0];

    for (size_t i = 0; i < sizeof(engine->k) / 2 * 2; i++) {
        uint64_t r = kvf_random_seeded_next(random);

        values[i] = (uint16_t)((r & 0x8000) | 0x3f80 | (r & 0x7f));
    }
}

static const struct kvf_geometry geometry = {
    .struct_bytes = sizeof(geometry),
    .kind = KVF_KIND_KV,
    .dtype = KVF_DTYPE_BF16,
    .rope_state = KVF_ROPE_POST,
    .n_layers = LAYERS,
    .n_heads = HEADS,
    .dim_k = DIM,
    .dim_v = DIM,
    .chunk_tokens = CHUNK,
};

static struct kvf_put_item view_item(const struct kvf_key *key, const struct engine *engine)
{
    return (struct kvf_put_item){
        .struct_bytes = sizeof(struct kvf_put_item),
        .source = KVF_SOURCE_VIEW,
        .key = *key,
        .kv = &engine->view,
    };
}

static void views_come_back_bit_for_bit(void **state)
{
    static struct key_set set;
    static struct engine from[2];
    static struct engine to;
    struct fixture *f = *state;
    struct kvf_random_seeded random;
    struct kvf_put_item items[2];
    struct kvf_hit hits[2];

    f->options.geometry = &geometry;
    f->options.profile = "exact";
    f->options.weights_digest[0] = 1;
    kvf_random_seeded_init(&random, kvf_test_seed());
    fixture_open(f);
    keys_fill(&set, "view", 2);
    for (uint32_t i = 0; i < 2; i++) {
        engine_init(&from[i]);
        engine_fill(&from[i], &random);
        items[i] = view_item(&set.keys[i], &from[i]);
        items[i].token_start = i * CHUNK;
    }
    items[1].n_tokens = 17; /* a tail that ends inside a page */
    assert_int_equal(kvf_put(f->client, items, 2, NULL, NULL), KVF_OK);
    assert_int_equal(kvf_get(f->client, set.keys, 2, NULL, hits), KVF_OK);
    assert_true(hits[0].record_bytes < 4096 + sizeof(from[0].k) * 2);

    engine_init(&to);
    assert_int_equal(
        kvf_decode(f->client, hits[0].record, hits[0].record_bytes, 0, 0, 0, 0, &to.view), KVF_OK);
    assert_memory_equal(to.k, from[0].k, sizeof(to.k));
    assert_memory_equal(to.v, from[0].v, sizeof(to.v));

    /* layer 1, tokens 3 to 12 of the tail, into the view's tokens from 0 on */
    memset(to.k, 0, sizeof(to.k));
    assert_int_equal(
        kvf_decode(f->client, hits[1].record, hits[1].record_bytes, 1, 1, 3, 10, &to.view), KVF_OK);
    for (uint32_t t = 0; t < 10; t++) {
        uint32_t source = t + 3;

        assert_memory_equal(to.k[1][to.table[0]][t],
                            from[1].k[1][from[1].table[source / PAGE]][source % PAGE],
                            sizeof(to.k[0][0][0]));
    }
    assert_int_equal(to.k[0][to.table[0]][0][0][0], 0); /* layer 0 was not asked for */
    assert_int_equal(kvf_decode(f->client, hits[1].record, 4000, 0, 0, 0, 0, &to.view),
                     KVF_ERR_CORRUPT);
    assert_int_equal(kvf_fake_daemon_facts(f->daemon).violations, 0);
}

/* The parts of a put one by one: slot, encode, staged put. */
static void slots_are_encoded_by_hand(void **state)
{
    static struct key_set set;
    static struct engine from;
    static struct engine to;
    struct fixture *f = *state;
    struct kvf_info info = {.struct_bytes = sizeof(info)};
    struct kvf_random_seeded random;
    struct kvf_put_item item;
    struct kvf_stage stage;
    struct kvf_stage small;
    struct kvf_hit hit;
    size_t record_bytes = 0;

    f->options.geometry = &geometry;
    kvf_random_seeded_init(&random, kvf_test_seed());
    fixture_open(f);
    keys_fill(&set, "hand", 1);
    engine_init(&from);
    engine_fill(&from, &random);
    assert_int_equal(kvf_client_info(f->client, &info), KVF_OK);
    assert_int_equal(kvf_stage_acquire(f->client, info.record_bytes_max - 4096, &stage), KVF_OK);
    assert_int_equal(kvf_stage_acquire(f->client, 1, &small), KVF_OK);
    assert_int_equal(kvf_stage_seal(f->client, &small, 1), KVF_ERR_INVALID);
    assert_int_equal(kvf_encode(f->client, &small, 0, 0, &from.view, &record_bytes),
                     KVF_ERR_TOO_LARGE);
    assert_int_equal(kvf_encode(f->client, &stage, 0, CHUNK + 1, &from.view, &record_bytes),
                     KVF_ERR_INVALID);
    assert_int_equal(kvf_encode(f->client, &stage, 0, 0, &from.view, &record_bytes), KVF_OK);
    assert_in_range(record_bytes, 4097, info.record_bytes_max);
    item = (struct kvf_put_item){
        .struct_bytes = sizeof(item),
        .source = KVF_SOURCE_STAGED,
        .key = set.keys[0],
        .stage = stage.stage,
    };
    assert_int_equal(kvf_put(f->client, &item, 1, NULL, NULL), KVF_OK);
    assert_int_equal(kvf_get(f->client, set.keys, 1, NULL, &hit), KVF_OK);
    assert_int_equal(hit.record_bytes, record_bytes);
    engine_init(&to);
    assert_int_equal(kvf_decode(f->client, hit.record, hit.record_bytes, 0, 0, 0, 0, &to.view),
                     KVF_OK);
    assert_memory_equal(to.k, from.k, sizeof(to.k));
}

/* A record of another model, or of bytes, is refused before a page is touched. */
static void foreign_records_are_refused(void **state)
{
    static struct key_set set;
    static struct engine from;
    static struct engine to;
    static const struct engine zero;
    struct fixture *f = *state;
    struct kvf_client *other = NULL;
    struct kvf_put_item item;
    struct kvf_hit hit;
    void *copy;
    size_t bytes;

    f->options.geometry = &geometry;
    f->options.weights_digest[0] = 1;
    fixture_open(f);
    keys_fill(&set, "foreign", 1);
    engine_init(&from);
    item = view_item(&set.keys[0], &from);
    assert_int_equal(kvf_put(f->client, &item, 1, NULL, NULL), KVF_OK);
    assert_int_equal(kvf_get(f->client, set.keys, 1, NULL, &hit), KVF_OK);
    bytes = hit.record_bytes;
    copy = malloc(bytes);
    assert_non_null(copy);
    memcpy(copy, hit.record, bytes);
    f->client = kvf_close(f->client);

    f->options.weights_digest[0] = 2;
    assert_int_equal(kvf_open(&f->options, &other), KVF_OK);
    engine_init(&to);
    assert_int_equal(kvf_decode(other, copy, bytes, 0, 0, 0, 0, &to.view), KVF_ERR_MISMATCH);
    assert_memory_equal(to.k, zero.k, sizeof(to.k));
    ((uint8_t *)copy)[100] ^= 1;
    assert_int_equal(kvf_decode(other, copy, bytes, 0, 0, 0, 0, &to.view), KVF_ERR_CORRUPT);
    kvf_close(other);
    free(copy);
}

/* A put in more batches than staging has room for, from views. */
static void many_views_go_through_little_staging(void **state)
{
    static struct key_set set;
    static struct engine from;
    static struct engine to;
    struct fixture *f = *state;
    struct kvf_random_seeded random;
    struct kvf_put_item items[24];
    struct kvf_hit hits[24];
    int32_t statuses[24];

    f->options.geometry = &geometry;
    f->script.staging_bytes = 256 << 10; /* two records and a bit */
    kvf_random_seeded_init(&random, kvf_test_seed());
    fixture_open(f);
    keys_fill(&set, "little", 24);
    engine_init(&from);
    engine_fill(&from, &random);
    for (uint32_t i = 0; i < 24; i++) {
        items[i] = view_item(&set.keys[i], &from);
        items[i].token_start = i * CHUNK;
    }
    assert_int_equal(kvf_put(f->client, items, 24, NULL, statuses), KVF_OK);
    assert_true(kvf_fake_daemon_facts(f->daemon).puts >= 12);
    assert_int_equal(kvf_get(f->client, set.keys, 24, NULL, hits), KVF_OK);
    engine_init(&to);
    assert_int_equal(
        kvf_decode(f->client, hits[23].record, hits[23].record_bytes, 0, 0, 0, 0, &to.view),
        KVF_OK);
    assert_memory_equal(to.v, from.v, sizeof(to.v));
}

static void sizes_that_cannot_fit_name_one_that_can(void **state)
{
    struct fixture *f = *state;
    struct kvf_geometry large = geometry;

    large.n_layers = 512;
    large.n_heads = 64;
    large.chunk_tokens = 256;
    f->options.geometry = &large;
    fixture_serve(f);
    assert_int_equal(kvf_open(&f->options, &f->client), KVF_ERR_TOO_LARGE);
    assert_non_null(strstr(f->log, "would fit"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FIXTURE_TEST(views_come_back_bit_for_bit),
        FIXTURE_TEST(slots_are_encoded_by_hand),
        FIXTURE_TEST(foreign_records_are_refused),
        FIXTURE_TEST(many_views_go_through_little_staging),
        FIXTURE_TEST(sizes_that_cannot_fit_name_one_that_can),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
