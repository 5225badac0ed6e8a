/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_nvme.c: a drive that someone else has written to, who may know the store's keys.
 *
 * Input: edits of a small store, each
 *   u8 what (enum target), u8 repair, u16 offset in the page, u8 n, n bytes
 * With repair, checksums and MACs are made right again after the edit, so that what is behind them
 * is reached. Then the store is opened, recovered, every record loaded, one stored, one namespace
 * purged, and all of it once more. Nothing may crash, and a load that succeeds gives a record of
 * the name that was asked for with the right checksum.
 */
#include "tests/fuzz/fuzz.h"

#include "base/crc32c.h"
#include "base/hash.h"
#include "tiers/io_sim.h"
#include "tiers/work_inline.h"

#include "tiers/tier_nvme_page.c" /* repairs need what computes MACs */

#include <stdio.h>
#include <stdlib.h>

enum {
    SEGMENTS = 4,
    SEGMENT_BYTES = 64 << 10,
    STORE_BYTES = (1 << 20) + SEGMENTS * SEGMENT_BYTES,
    RECORDS = 10,
    FOUND_MAX = 256,
    RECORD_BYTES_MAX = 1 << 20,
};

enum target {
    TARGET_SUPER = 0, /* one copy */
    TARGET_SUPERS,    /* both */
    TARGET_STATES,
    TARGET_SEGMENT, /* and 3 more: of segment 0 to 3 */
    TARGET_FOOTER = TARGET_SEGMENT + SEGMENTS,
    TARGET_INDEX = TARGET_FOOTER + SEGMENTS, /* the page before the footer */
    TARGET_RECORD = TARGET_INDEX + SEGMENTS, /* page 1 */
    TARGET_COUNT = TARGET_RECORD + SEGMENTS,
};

struct found {
    struct kvf_block_name name;
    kvf_location location;
    uint64_t record_bytes;
};

struct world {
    struct kvf_io_sim_disk *disk;
    struct kvf_work_queue *work;
    struct kvf_tier *tier;
    struct kvf_random_seeded random;
    struct found found[FOUND_MAX];
    uint32_t n_found;
    bool done;
};

static struct world world;
static uint8_t *base_image;
static uint8_t *record_memory;

static void require(bool condition, const char *what)
{
    if (!condition) {
        fprintf(stderr, "%s\n", what);
        abort();
    }
}

/* --- the host --------------------------------------------------------------------------------- */

static bool host_reclaim(void *ctx, kvf_location location, kvf_cookie cookie)
{
    (void)ctx;
    (void)location;
    return cookie % 2 == 0;
}

static void host_moved(void *ctx, kvf_location from, kvf_location to, kvf_cookie cookie)
{
    (void)ctx;
    (void)from;
    if (cookie < FOUND_MAX) {
        world.found[cookie].location = to;
    }
}

static kvf_cookie host_recovered(void *ctx, const struct kvf_block_name *name,
                                 kvf_location location, uint64_t record_bytes, uint64_t sequence)
{
    (void)ctx;
    (void)sequence;
    if (world.n_found == FOUND_MAX) {
        return KVF_COOKIE_NONE;
    }
    world.found[world.n_found] = (struct found){
        .name = *name, .location = location, .record_bytes = record_bytes};
    return world.n_found++;
}

static void host_lost(void *ctx, kvf_location location, kvf_cookie cookie, int status)
{
    (void)ctx;
    (void)location;
    (void)cookie;
    (void)status;
}

/* --- time ------------------------------------------------------------------------------------- */

static uint64_t clock_now(void *arg)
{
    (void)arg;
    return kvf_io_sim_now_ns(world.disk);
}

static const struct kvf_clock_ops world_clock = {.now_ns = clock_now, .wall_s = clock_now};

static void wait_for_disk(void *ctx)
{
    uint64_t next_ns = kvf_io_sim_next_ns(world.disk);

    (void)ctx;
    require(next_ns != UINT64_MAX, "waits for nothing");
    if (next_ns > kvf_io_sim_now_ns(world.disk)) {
        kvf_io_sim_advance(world.disk, next_ns);
    }
}

static void step(void)
{
    uint64_t next_ns = kvf_io_sim_next_ns(world.disk);

    if (next_ns != UINT64_MAX && next_ns > kvf_io_sim_now_ns(world.disk)) {
        kvf_io_sim_advance(world.disk, next_ns);
    }
    world.tier->ops->poll(world.tier, kvf_io_sim_now_ns(world.disk));
    world.work->ops->poll(world.work);
}

/* --- calls ------------------------------------------------------------------------------------ */

static void call_done(struct kvf_tier_io *io)
{
    (void)io;
    world.done = true;
}

static void purge_done(void *ctx, uint64_t namespace_id, int status)
{
    (void)ctx;
    (void)namespace_id;
    (void)status;
    world.done = true;
}

static void wait_for_call(void)
{
    for (uint32_t i = 0; !world.done; i++) {
        step();
        require(i < 100000, "a call does not end");
    }
}

static void store_record(uint32_t number)
{
    struct kvf_record_page *page = (struct kvf_record_page *)record_memory;
    uint64_t record_bytes = 4096 * (2 + number % 3) - 100 * (number % 4);
    struct kvf_tier_io io = {.record = record_memory,
                             .record_bytes = record_bytes,
                             .cookie = KVF_COOKIE_NONE - 1,
                             .done = call_done};

    memset(record_memory, (int)number, record_bytes);
    memset(page, 0, sizeof(*page));
    page->header.magic = KVF_BLOCK_MAGIC;
    page->header.total_bytes = record_bytes;
    page->header.shard_count = 1;
    page->header.payload_crc32c = kvf_crc32c(0, page + 1, record_bytes - 4096);
    memcpy(page->header.key_id, &number, sizeof(number));
    page->header.header_crc32c = header_crc(page);
    memcpy(io.name.key_id, page->header.key_id, sizeof(io.name.key_id));
    io.name.shard_count = 1;
    io.name.namespace_id = number % 2;
    io.name.namespace_epoch = kvf_nvme_namespace_epoch(world.tier, number % 2);
    world.done = false;
    if (world.tier->ops->store(world.tier, &io) == KVF_OK) {
        wait_for_call();
    }
}

static void load_record(const struct found *found)
{
    const struct kvf_record_page *page = (const struct kvf_record_page *)record_memory;
    struct kvf_tier_io io = {.name = found->name,
                             .record = record_memory,
                             .record_bytes = found->record_bytes,
                             .location = found->location,
                             .done = call_done};

    world.done = false;
    if (found->record_bytes > RECORD_BYTES_MAX ||
        world.tier->ops->load(world.tier, &io) != KVF_OK) {
        return;
    }
    wait_for_call();
    if (io.status == KVF_OK) {
        require(memcmp(page->header.key_id, found->name.key_id, 32) == 0, "wrong record");
        require(kvf_crc32c(0, page + 1, found->record_bytes - 4096) == page->header.payload_crc32c,
                "wrong bytes");
    }
}

/* --- a store ---------------------------------------------------------------------------------- */

static bool open_store(bool format)
{
    struct kvf_nvme_config config;
    char why[256];
    int status;

    kvf_nvme_config_init(&config);
    config.segment_bytes = SEGMENT_BYTES;
    config.env = (struct kvf_env){
        .clock = &world_clock, .random = &kvf_random_seeded_ops, .random_arg = &world.random};
    config.host = (struct kvf_tier_host){.reclaim = host_reclaim,
                                         .moved = host_moved,
                                         .recovered = host_recovered,
                                         .lost = host_lost};
    config.bounce_bytes = SEGMENT_BYTES;
    config.wait = wait_for_disk;
    require(kvf_io_sim_open(world.disk, &config.io) == KVF_OK, "no queue");
    require(kvf_work_inline_open(KVF_WORK_AT_SUBMIT, 64, &world.work) == KVF_OK, "no workers");
    config.work = world.work;
    if (format) {
        require(kvf_nvme_format(&config, why, sizeof(why)) == KVF_OK, "cannot format");
    }
    world.n_found = 0;
    status = kvf_nvme_open(&config, &world.tier, why, sizeof(why));
    if (status != KVF_OK) {
        require(strlen(why) > 10, "no reason given");
        config.io->ops->close(config.io);
        world.work->ops->close(world.work);
        return false;
    }
    require(world.tier->ops->recover(world.tier) == KVF_OK, "cannot recover");
    return true;
}

static void close_store(void)
{
    world.work->ops->close(world.work);
    world.tier->ops->close(world.tier);
}

static void make_base(void)
{
    struct kvf_io_sim_config config;

    require(kvf_hash_init_library() == KVF_OK, "no hash");
    kvf_io_sim_config_init(&config);
    config.capacity_bytes = STORE_BYTES;
    require(kvf_io_sim_disk_create(&config, &world.disk) == KVF_OK, "no disk");
    kvf_random_seeded_init(&world.random, 1);
    base_image = malloc(STORE_BYTES);
    record_memory = aligned_alloc(4096, RECORD_BYTES_MAX);
    require(base_image != NULL && record_memory != NULL, "no memory");
    require(open_store(true), "no store");
    for (uint32_t i = 0; i < RECORDS; i++) {
        store_record(i);
    }
    close_store();
    memcpy(base_image, kvf_io_sim_bytes(world.disk), STORE_BYTES);
}

/* --- edits ------------------------------------------------------------------------------------ */

static uint8_t *target_page(uint8_t *image, uint32_t target)
{
    uint32_t segment = (target - TARGET_SEGMENT) % SEGMENTS;
    uint8_t *start = image + KVF_NVME_SEGMENT_OFFSET + (size_t)segment * SEGMENT_BYTES;

    if (target <= TARGET_SUPERS) {
        return image;
    }
    if (target == TARGET_STATES) {
        return image + KVF_NVME_STATE_OFFSET;
    }
    if (target < TARGET_FOOTER) {
        return start;
    }
    if (target < TARGET_INDEX) {
        return start + SEGMENT_BYTES - 4096;
    }
    return target < TARGET_RECORD ? start + SEGMENT_BYTES - 8192 : start + 4096;
}

static void repair(uint8_t *image, uint32_t target, uint8_t *page)
{
    const struct kvf_nvme_super *super = (const struct kvf_nvme_super *)base_image;
    uint8_t mac_key[32], check[32];
    struct kvf_nvme_identity identity = {
        .uuid = super->uuid, .mac_key = mac_key, .segment_bytes = SEGMENT_BYTES};

    kvf_nvme_keys_derive(super->id_key, super->uuid, mac_key, check);
    if (target <= TARGET_SUPERS) {
        kvf_nvme_super_seal((struct kvf_nvme_super *)page, page == image ? 0 : 1);
    } else if (target == TARGET_STATES) {
        kvf_nvme_state_seal((struct kvf_nvme_state *)page,
                            page == image + KVF_NVME_STATE_OFFSET ? 0 : 1);
    } else if (target < TARGET_FOOTER) {
        struct kvf_nvme_segment *segment = (struct kvf_nvme_segment *)page;

        segment_mac(segment, &identity, segment->mac);
        segment->crc32c = kvf_nvme_page_crc(page, offsetof(struct kvf_nvme_segment, crc32c));
    } else if (target < TARGET_RECORD) {
        struct kvf_nvme_footer *footer =
            (struct kvf_nvme_footer *)(target < TARGET_INDEX ? page : page + 4096);
        uint8_t *index = (uint8_t *)footer - 4096;

        if (footer->index_pages == 1) {
            index_hash(index, 1, footer->index_hash);
        }
        footer_mac(footer, &identity, footer->mac);
        footer->crc32c = kvf_nvme_page_crc(footer, offsetof(struct kvf_nvme_footer, crc32c));
    } else {
        struct kvf_record_page *record = (struct kvf_record_page *)page;

        record->header.header_crc32c = header_crc(record);
        record_mac(record, &identity, record->store.mac);
    }
}

/* One edit; returns the bytes used. */
static size_t edit(uint8_t *image, const uint8_t *data, size_t bytes)
{
    uint32_t target = data[0] % TARGET_COUNT;
    uint32_t offset = (data[2] | (uint32_t)data[3] << 8) % 4096;
    size_t n = data[4];
    uint8_t *page = target_page(image, target);
    uint32_t copies = target == TARGET_SUPERS || target == TARGET_STATES ? 2 : 1;

    if (n > bytes - 5) {
        n = bytes - 5;
    }
    if (n > 4096 - offset) {
        n = 4096 - offset;
    }
    for (uint32_t copy = 0; copy < copies; copy++) {
        memcpy(page + (size_t)copy * KVF_NVME_COPY_BYTES + offset, data + 5, n);
        if (data[1] % 2 == 1) {
            repair(image, target, page + (size_t)copy * KVF_NVME_COPY_BYTES);
        }
    }
    return 5 + n;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    uint8_t *image;

    if (base_image == NULL) {
        make_base();
    }
    image = kvf_io_sim_bytes(world.disk);
    memcpy(image, base_image, STORE_BYTES);
    for (size_t at = 0; bytes - at >= 5;) {
        at += edit(image, data + at, bytes - at);
    }
    for (uint32_t round = 0; round < 2 && open_store(false); round++) {
        for (uint32_t i = 0; i < world.n_found; i++) {
            load_record(&world.found[i]);
        }
        store_record(100 + round);
        world.done = false;
        if (kvf_nvme_namespace_purge(world.tier, 1, purge_done, NULL) == KVF_OK) {
            wait_for_call();
        }
        close_store();
    }
    return 0;
}
