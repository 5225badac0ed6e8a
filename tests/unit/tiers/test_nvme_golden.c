/* SPDX-License-Identifier: Apache-2.0
 *
 * test_nvme_golden.c: a store written by the first build of format 1.0 is read by this one, and the
 * builders of this one give the same bytes for each of its pages.
 *
 * The store: 4 segments of 64 KiB. Segment 0 is sealed with 3 records, segment 1 is open with 2;
 * namespace 7 has been purged once, before the record of key 4 was stored under it. With the
 * argument --write FILE the program makes such a store anew, for a new version of the format.
 */
#include "tests/support/support.h"

#include "base/crc32c.h"
#include "base/hash.h"
#include "tiers/io_sim.h"
#include "tiers/tier_nvme_internal.h"
#include "tiers/work_inline.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>

#include <cmocka.h>

#define SEGMENT_BYTES (64u << 10)
#define STORE_BYTES   ((1u << 20) + 4 * SEGMENT_BYTES)
#define KEYS          5

struct golden {
    struct kvf_io_sim_disk *disk;
    struct kvf_work_queue *work;
    struct kvf_nvme_config config;
    struct kvf_tier *tier;
    struct kvf_random_seeded random;
    struct kvf_test_clock clock;
    kvf_location locations[KEYS];
    uint64_t sequences[KEYS];
    uint8_t *record;
    bool done;
    char why[256];
};

static struct golden golden;

static const uint8_t golden_id_key[32] = {'t', 'h', 'e', ' ', 'i', 'd', ' ', 'k', 'e', 'y'};

static uint64_t record_bytes(uint32_t key)
{
    return 4096 * (uint64_t)(key + 2) - 1000 * (key % 2);
}

static uint64_t namespace_of(uint32_t key)
{
    return key == 4 ? 7 : 1;
}

static void fill_record(uint32_t key, uint8_t *record)
{
    struct kvf_record_page *page = (struct kvf_record_page *)record;
    const uint8_t *bytes = record;
    uint32_t crc;

    for (uint64_t i = 4096; i < record_bytes(key); i++) {
        record[i] = (uint8_t)(key * 50 + i / 97);
    }
    memset(page, 0, sizeof(*page));
    page->header.magic = KVF_BLOCK_MAGIC;
    page->header.version = KVF_BLOCK_VERSION;
    page->header.header_bytes = KVF_BLOCK_HEADER_BYTES;
    page->header.total_bytes = record_bytes(key);
    page->header.shard = (uint16_t)key;
    page->header.shard_count = KEYS;
    page->header.payload_crc32c = kvf_crc32c(0, record + 4096, record_bytes(key) - 4096);
    memset(page->header.key_id, (int)(0xa0 + key), 32);
    crc = kvf_crc32c(0, bytes, 256);
    page->header.header_crc32c = kvf_crc32c(crc, bytes + 384, 4096 - 384);
}

static void fill_name(uint32_t key, struct kvf_block_name *name_out)
{
    *name_out = (struct kvf_block_name){
        .namespace_id = namespace_of(key), .shard = (uint16_t)key, .shard_count = KEYS};
    name_out->namespace_epoch = kvf_nvme_namespace_epoch(golden.tier, namespace_of(key));
    memset(name_out->key_id, (int)(0xa0 + key), 32);
}

/* --- the host --------------------------------------------------------------------------------- */

static bool host_reclaim(void *ctx, kvf_location location, kvf_cookie cookie)
{
    (void)ctx;
    (void)location;
    (void)cookie;
    return false;
}

static void host_moved(void *ctx, kvf_location from, kvf_location to, kvf_cookie cookie)
{
    (void)ctx;
    (void)from;
    (void)to;
    (void)cookie;
}

static kvf_cookie host_recovered(void *ctx, const struct kvf_block_name *name,
                                 kvf_location location, uint64_t bytes, uint64_t sequence)
{
    uint32_t key = name->shard;

    (void)ctx;
    assert_true(key < KEYS);
    assert_int_equal(name->key_id[0], 0xa0 + key);
    assert_int_equal(name->key_id[31], 0xa0 + key);
    assert_int_equal(name->shard_count, KEYS);
    assert_int_equal(name->namespace_id, namespace_of(key));
    assert_int_equal(name->namespace_epoch, key == 4 ? 1 : 0);
    assert_int_equal(bytes, record_bytes(key));
    assert_int_equal(golden.locations[key], 0);
    golden.locations[key] = location;
    golden.sequences[key] = sequence;
    return key;
}

static void host_lost(void *ctx, kvf_location location, kvf_cookie cookie, int status)
{
    (void)ctx;
    (void)location;
    (void)cookie;
    (void)status;
}

/* --- driving it ------------------------------------------------------------------------------- */

static void advance(void)
{
    uint64_t next_ns = kvf_io_sim_next_ns(golden.disk);

    if (next_ns != UINT64_MAX && next_ns > kvf_io_sim_now_ns(golden.disk)) {
        kvf_io_sim_advance(golden.disk, next_ns);
    }
}

static void wait_for_disk(void *ctx)
{
    (void)ctx;
    advance();
}

static void run(void)
{
    golden.done = false;
    while (!golden.done) {
        advance();
        golden.tier->ops->poll(golden.tier, kvf_io_sim_now_ns(golden.disk));
        golden.work->ops->poll(golden.work);
    }
}

static void call_done(struct kvf_tier_io *io)
{
    (void)io;
    golden.done = true;
}

static void purge_done(void *ctx, uint64_t namespace_id, int status)
{
    (void)ctx;
    (void)namespace_id;
    assert_int_equal(status, KVF_OK);
    golden.done = true;
}

static void make_world(void)
{
    struct kvf_io_sim_config config;
    struct kvf_nvme_config *nvme = &golden.config;

    memset(&golden, 0, sizeof(golden));
    assert_int_equal(kvf_hash_init_library(), KVF_OK);
    kvf_io_sim_config_init(&config);
    config.capacity_bytes = STORE_BYTES;
    assert_int_equal(kvf_io_sim_disk_create(&config, &golden.disk), KVF_OK);
    kvf_random_seeded_init(&golden.random, 4711);
    golden.clock = (struct kvf_test_clock){.wall_s = 1785542400};
    golden.record = aligned_alloc(4096, SEGMENT_BYTES);
    assert_non_null(golden.record);
    kvf_nvme_config_init(nvme);
    nvme->segment_bytes = SEGMENT_BYTES;
    nvme->env = kvf_test_env(&golden.clock, &golden.random);
    nvme->id_key = golden_id_key;
    nvme->host = (struct kvf_tier_host){.reclaim = host_reclaim,
                                        .moved = host_moved,
                                        .recovered = host_recovered,
                                        .lost = host_lost};
    nvme->bounce_bytes = SEGMENT_BYTES;
    nvme->wait = wait_for_disk;
}

static void open_store(void)
{
    assert_int_equal(kvf_work_inline_open(KVF_WORK_AT_SUBMIT, 64, &golden.work), KVF_OK);
    golden.config.work = golden.work;
    assert_int_equal(kvf_nvme_open(&golden.config, &golden.tier, golden.why, sizeof(golden.why)),
                     KVF_OK);
    golden.config.io = NULL;
    assert_int_equal(golden.tier->ops->recover(golden.tier), KVF_OK);
}

static void close_store(void)
{
    golden.work->ops->close(golden.work);
    golden.tier->ops->close(golden.tier);
}

static void drop_world(void)
{
    kvf_io_sim_disk_destroy(golden.disk);
    free(golden.record);
}

/* --- writing it ------------------------------------------------------------------------------- */

static void store_key(uint32_t key)
{
    struct kvf_tier_io io = {.record = golden.record,
                             .record_bytes = record_bytes(key),
                             .cookie = key,
                             .done = call_done};

    fill_record(key, golden.record);
    fill_name(key, &io.name);
    assert_int_equal(golden.tier->ops->store(golden.tier, &io), KVF_OK);
    run();
    assert_int_equal(io.status, KVF_OK);
}

static int write_golden(const char *path)
{
    size_t room = ZSTD_compressBound(STORE_BYTES);
    uint8_t *packed = malloc(room);
    size_t bytes;

    make_world();
    assert_int_equal(kvf_io_sim_open(golden.disk, &golden.config.io), KVF_OK);
    assert_int_equal(kvf_nvme_format(&golden.config, golden.why, sizeof(golden.why)), KVF_OK);
    open_store();
    for (uint32_t key = 0; key < 4; key++) {
        store_key(key);
    }
    assert_int_equal(kvf_nvme_namespace_purge(golden.tier, 7, purge_done, NULL), KVF_OK);
    run();
    store_key(4);
    for (uint32_t i = 0; i < 100; i++) { /* what goes on behind */
        advance();
        golden.tier->ops->poll(golden.tier, kvf_io_sim_now_ns(golden.disk));
        golden.work->ops->poll(golden.work);
    }
    close_store();
    bytes = ZSTD_compress(packed, room, kvf_io_sim_bytes(golden.disk), STORE_BYTES, 19);
    assert_false(ZSTD_isError(bytes));
    kvf_test_file_write(path, packed, bytes);
    free(packed);
    drop_world();
    return 0;
}

/* --- reading it ------------------------------------------------------------------------------- */

static void load_golden(void)
{
    size_t bytes;
    char *packed = kvf_test_file_read(KVF_GOLDEN_DIR "/store-1.0.zst", &bytes);

    assert_non_null(packed);
    make_world();
    assert_int_equal(ZSTD_decompress(kvf_io_sim_bytes(golden.disk), STORE_BYTES, packed, bytes),
                     STORE_BYTES);
    free(packed);
}

static void test_golden_store_is_read(void **state)
{
    struct kvf_nvme_info info;
    uint8_t *expected = aligned_alloc(4096, SEGMENT_BYTES);

    (void)state;
    load_golden();
    assert_int_equal(kvf_io_sim_open(golden.disk, &golden.config.io), KVF_OK);
    open_store();
    kvf_nvme_info(golden.tier, &info);
    assert_int_equal(info.recovered_records, KEYS);
    assert_int_equal(info.recovered_scanned, 2);
    assert_int_equal(info.created_wall_s, 1785542400);
    assert_int_equal(info.purged_namespaces, 1);
    assert_memory_equal(info.id_key, golden_id_key, 32);
    assert_int_equal(kvf_nvme_namespace_epoch(golden.tier, 7), 1);
    for (uint32_t key = 0; key < KEYS; key++) {
        struct kvf_tier_io io = {.record = golden.record,
                                 .record_bytes = record_bytes(key),
                                 .location = golden.locations[key],
                                 .done = call_done};

        fill_name(key, &io.name);
        assert_int_equal(golden.tier->ops->load(golden.tier, &io), KVF_OK);
        run();
        assert_int_equal(io.status, KVF_OK);
        fill_record(key, expected);
        assert_memory_equal(golden.record, expected, 256);
        assert_memory_equal(golden.record + 384, expected + 384, record_bytes(key) - 384);
    }
    close_store();
    free(expected);
    drop_world();
}

static void test_builders_give_golden_bytes(void **state)
{
    static uint8_t mac_key[32], key_check[32];
    static uint8_t page[4096];
    static uint8_t footer_pages[8192];
    const struct kvf_nvme_super *super;
    const struct kvf_nvme_segment *segment;
    const struct kvf_nvme_footer *footer;
    const uint8_t *bytes, *start;
    struct kvf_nvme_identity identity;

    (void)state;
    load_golden();
    bytes = kvf_io_sim_bytes(golden.disk);
    super = (const struct kvf_nvme_super *)bytes;
    start = bytes + KVF_NVME_SEGMENT_OFFSET;
    segment = (const struct kvf_nvme_segment *)start;
    footer = (const struct kvf_nvme_footer *)(start + SEGMENT_BYTES - 4096);
    kvf_nvme_keys_derive(golden_id_key, super->uuid, mac_key, key_check);
    assert_memory_equal(super->key_check, key_check, 32);
    identity = (struct kvf_nvme_identity){
        .uuid = super->uuid, .mac_key = mac_key, .segment_bytes = SEGMENT_BYTES};
    for (uint32_t copy = 0; copy < 2; copy++) {
        const uint8_t *at = bytes + (size_t)copy * KVF_NVME_COPY_BYTES;

        memcpy(page, at, 4096);
        ((struct kvf_nvme_super *)page)->crc32c = 0;
        kvf_nvme_super_seal((struct kvf_nvme_super *)page, copy);
        assert_memory_equal(page, at, 4096);
        memcpy(page, at + KVF_NVME_STATE_OFFSET, 4096);
        ((struct kvf_nvme_state *)page)->crc32c = 0;
        kvf_nvme_state_seal((struct kvf_nvme_state *)page, copy);
        assert_memory_equal(page, at + KVF_NVME_STATE_OFFSET, 4096);
    }
    kvf_nvme_segment_seal((struct kvf_nvme_segment *)page, &identity, segment->generation, 0);
    assert_memory_equal(page, segment, 4096);
    memcpy(footer_pages, start + SEGMENT_BYTES - 8192, 4096);
    assert_int_equal(kvf_nvme_footer_seal(footer_pages, footer->entry_count, footer->data_pages,
                                          &identity, segment->generation, 0),
                     2);
    assert_memory_equal(footer_pages, start + SEGMENT_BYTES - 8192, 8192);
    assert_int_equal(footer->entry_count, 3);

    fill_record(0, golden.record);
    kvf_nvme_record_stamp((struct kvf_record_page *)golden.record, &identity, segment->generation,
                          kvf_nvme_sequence(segment->generation, 1), record_bytes(0), 1, 0);
    assert_memory_equal(golden.record, start + 4096, record_bytes(0));
    drop_world();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden_store_is_read),
        cmocka_unit_test(test_builders_give_golden_bytes),
    };

    if (argc == 3 && strcmp(argv[1], "--write") == 0) {
        return write_golden(argv[2]);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
