/* SPDX-License-Identifier: Apache-2.0
 *
 * test_nvme_rig.c: the drive tier's rig.
 */
#include "tests/unit/tiers/test_nvme_rig.h"

#include "base/clock.h"
#include "base/crc32c.h"
#include "base/hash.h"
#include "tiers/work_inline.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

/* --- records ---------------------------------------------------------------------------------- */

uint32_t rig_namespace(uint32_t key)
{
    return key % RIG_NAMESPACES;
}

/* 2 to RIG_RECORD_PAGES_MAX pages, most of them small, seldom a whole number of them. */
uint64_t rig_record_bytes(uint32_t key)
{
    uint64_t pages = 2 + key % 4;

    if (key % 16 == 15) {
        pages = 8;
    }
    return pages * 4096 - (key % 5) * 700;
}

static void key_id_fill(uint32_t key, uint8_t key_id_out[32])
{
    memset(key_id_out, 0x5a, 32);
    memcpy(key_id_out, &key, sizeof(key));
}

static void seal_page(struct kvf_record_page *page)
{
    const uint8_t *bytes = (const uint8_t *)page;
    uint32_t crc;

    page->header.header_crc32c = 0;
    crc = kvf_crc32c(0, bytes, 256);
    page->header.header_crc32c = kvf_crc32c(crc, bytes + 384, 4096 - 384);
}

static bool soft_records;

void rig_records_soft(bool soft)
{
    soft_records = soft;
}

void rig_record_fill(uint32_t key, uint8_t *record)
{
    uint64_t record_bytes = rig_record_bytes(key);
    struct kvf_record_page *page = (struct kvf_record_page *)record;
    struct kvf_random_seeded random;

    kvf_random_seeded_init(&random, key + 1);
    for (uint64_t i = 4096; i < record_bytes; i += sizeof(uint64_t)) {
        uint64_t value = kvf_random_seeded_next(&random);

        value &= soft_records && key % 7 != 3 ? 0x0303030303030303u : UINT64_MAX;
        memcpy(record + i, &value, sizeof(value)); /* the memory extends to the next page */
    }
    memset(page, 0, sizeof(*page));
    page->header.magic = KVF_BLOCK_MAGIC;
    page->header.version = KVF_BLOCK_VERSION;
    page->header.header_bytes = KVF_BLOCK_HEADER_BYTES;
    page->header.total_bytes = record_bytes;
    page->header.tensor_kind = soft_records ? KVF_KIND_BYTES : KVF_KIND_KV;
    page->header.shard = (uint16_t)(key % 3);
    page->header.shard_count = 3;
    page->header.payload_crc32c = kvf_crc32c(0, record + 4096, record_bytes - 4096);
    key_id_fill(key, page->header.key_id);
    seal_page(page);
}

void rig_name_fill(const struct rig *rig, uint32_t key, struct kvf_block_name *name_out)
{
    *name_out = (struct kvf_block_name){
        .namespace_id = rig_namespace(key), .shard = (uint16_t)(key % 3), .shard_count = 3};
    name_out->namespace_epoch = kvf_nvme_namespace_epoch(rig->tier, rig_namespace(key));
    key_id_fill(key, name_out->key_id);
}

static void check_record(uint32_t key, const uint8_t *record)
{
    static uint8_t expected[RIG_RECORD_PAGES_MAX * 4096];
    uint64_t record_bytes = rig_record_bytes(key);

    rig_record_fill(key, expected);
    assert_memory_equal(record, expected, 256);
    assert_memory_equal(record + 384, expected + 384, record_bytes - 384);
}

/* --- the model -------------------------------------------------------------------------------- */

static void set_durable(struct rig *rig, uint32_t key, bool durable)
{
    struct rig_journal_entry entry = {.key = key, .what = durable ? '+' : '-'};

    if (rig->journal_fd >= 0) {
        assert_int_equal(write(rig->journal_fd, &entry, sizeof(entry)), sizeof(entry));
    }
    rig->keys[key].durable = durable;
}

/* --- the host --------------------------------------------------------------------------------- */

static bool host_reclaim(void *ctx, kvf_location location, kvf_cookie cookie)
{
    struct rig *rig = ctx;
    struct rig_key *key = &rig->keys[cookie];

    assert_true(cookie < RIG_KEYS && key->state == RIG_STORED && key->location == location);
    rig->n_reclaimed++;
    if (!key->hot) {
        key->state = RIG_ABSENT;
        set_durable(rig, cookie, false);
    }
    return key->hot;
}

static void host_moved(void *ctx, kvf_location from, kvf_location to, kvf_cookie cookie)
{
    struct rig *rig = ctx;
    struct rig_key *key = &rig->keys[cookie];

    assert_true(cookie < RIG_KEYS && key->state == RIG_STORED && key->location == from);
    rig->n_moved++;
    key->location = to;
    if (to == KVF_LOCATION_NONE) {
        key->state = RIG_ABSENT;
        set_durable(rig, cookie, false);
    }
}

static kvf_cookie host_recovered(void *ctx, const struct kvf_block_name *name,
                                 kvf_location location, uint64_t record_bytes, uint64_t sequence)
{
    struct rig *rig = ctx;
    struct rig_key *key;
    uint32_t number;
    uint8_t key_id[32];

    memcpy(&number, name->key_id, sizeof(number));
    assert_true(number < RIG_KEYS);
    key_id_fill(number, key_id);
    assert_memory_equal(name->key_id, key_id, 32);
    assert_int_equal(name->namespace_id, rig_namespace(number));
    assert_int_equal(record_bytes, rig_record_bytes(number));
    assert_int_equal(name->shard, number % 3);
    assert_int_equal(name->shard_count, 3);
    key = &rig->keys[number];
    assert_false(key->purged);
    rig->n_recovered++;
    if (key->found) {
        assert_true(sequence < key->sequence); /* newest first */
        return KVF_COOKIE_NONE;
    }
    key->found = true;
    key->state = RIG_STORED;
    key->location = location;
    key->sequence = sequence;
    return number;
}

static void host_lost(void *ctx, kvf_location location, kvf_cookie cookie, int status)
{
    struct rig *rig = ctx;
    struct rig_key *key = &rig->keys[cookie];

    assert_true(status < 0);
    assert_true(cookie < RIG_KEYS && key->state == RIG_STORED && key->location == location);
    rig->n_lost++;
    key->state = RIG_ABSENT;
    /* without power every I/O fails, which says nothing about what is on the drive */
    if (rig->disk == NULL || !kvf_io_sim_is_crashed(rig->disk)) {
        set_durable(rig, cookie, false);
    }
}

static bool budget_may_reinsert(void *ctx, uint64_t bytes)
{
    struct rig *rig = ctx;

    if (bytes > rig->reinsert_budget_bytes) {
        return false;
    }
    rig->reinsert_budget_bytes -= bytes;
    return true;
}

static int64_t budget_credit(void *ctx)
{
    return (int64_t)((struct rig *)ctx)->credit_bytes;
}

/* --- time ------------------------------------------------------------------------------------- */

static uint64_t clock_now(void *arg)
{
    return kvf_io_sim_now_ns(((struct rig *)arg)->disk);
}

static uint64_t clock_wall(void *arg)
{
    (void)arg;
    return 1800000000;
}

static const struct kvf_clock_ops rig_clock = {.now_ns = clock_now, .wall_s = clock_wall};

/* What open, recover and close call while they wait. */
static void wait_for_disk(void *ctx)
{
    struct rig *rig = ctx;
    uint64_t next_ns = kvf_io_sim_next_ns(rig->disk);

    assert_true(next_ns != UINT64_MAX);
    if (next_ns > kvf_io_sim_now_ns(rig->disk)) {
        kvf_io_sim_advance(rig->disk, next_ns);
    }
}

/* Real time: poll, and sleep a little if there was nothing. */
static bool step_file(struct rig *rig)
{
    struct timespec nap = {.tv_nsec = 20000};
    struct kvf_tier_stat stat;
    unsigned n = rig->tier->ops->poll(rig->tier, kvf_now_ns());

    n += rig->work->ops->poll(rig->work);
    rig->tier->ops->stat(rig->tier, &stat);
    if (n == 0) {
        nanosleep(&nap, NULL);
    }
    return n > 0 || stat.queue_depth > 0 || rig->tier->ops->deadline_ns(rig->tier) != UINT64_MAX;
}

static bool step_disk(struct rig *rig)
{
    uint64_t next_ns = kvf_io_sim_next_ns(rig->disk);
    uint64_t deadline_ns = rig->tier->ops->deadline_ns(rig->tier);
    unsigned n = 0;

    if (deadline_ns < next_ns) {
        next_ns = deadline_ns;
    }
    if (next_ns != UINT64_MAX && next_ns > kvf_io_sim_now_ns(rig->disk)) {
        kvf_io_sim_advance(rig->disk, next_ns);
    }
    n += rig->tier->ops->poll(rig->tier, kvf_io_sim_now_ns(rig->disk));
    n += rig->work->ops->poll(rig->work);
    return n > 0 || next_ns != UINT64_MAX;
}

bool rig_step(struct rig *rig)
{
    return rig->disk == NULL ? step_file(rig) : step_disk(rig);
}

void rig_run(struct rig *rig)
{
    for (uint32_t quiet = 0, steps = 0; quiet < 3; steps++) {
        quiet = rig_step(rig) ? 0 : quiet + 1;
        assert_true(steps < 1000000); /* it must come to rest */
    }
}

/* --- life ------------------------------------------------------------------------------------- */

static void no_wake(void *ctx)
{
    (void)ctx;
}

/* Real threads beside a real file. */
static void open_workers(struct rig *rig)
{
    struct kvf_waker waker = {.wake = no_wake};

    if (rig->disk == NULL) {
        assert_int_equal(kvf_work_open(2, 64, waker, &rig->work), KVF_OK);
    } else {
        assert_int_equal(kvf_work_inline_open(KVF_WORK_AT_POLL, 64, &rig->work), KVF_OK);
    }
    rig->config.work = rig->work;
}

static void init_common(struct rig *rig, uint64_t seed, uint64_t segment_bytes)
{
    struct kvf_nvme_config *config = &rig->config;

    memset(rig, 0, sizeof(*rig));
    rig->journal_fd = -1;
    assert_int_equal(kvf_hash_init_library(), KVF_OK);
    kvf_random_seeded_init(&rig->random, seed);
    for (uint32_t i = 0; i < RIG_KEYS; i++) {
        rig->keys[i].record = aligned_alloc(4096, RIG_RECORD_PAGES_MAX * 4096);
        assert_non_null(rig->keys[i].record);
    }
    rig->load_buffer = aligned_alloc(4096, RIG_RECORD_PAGES_MAX * 4096);
    rig->reinsert_budget_bytes = UINT64_MAX;
    kvf_nvme_config_init(config);
    config->segment_bytes = segment_bytes;
    config->host = (struct kvf_tier_host){.ctx = rig,
                                          .reclaim = host_reclaim,
                                          .moved = host_moved,
                                          .recovered = host_recovered,
                                          .lost = host_lost};
    config->budget = (struct kvf_nvme_budget){
        .ctx = rig, .may_reinsert = budget_may_reinsert, .credit_bytes = budget_credit};
    config->bounce_bytes = RIG_RECORD_PAGES_MAX * 4096;
    config->pack_bytes = RIG_RECORD_PAGES_MAX * 4096;
}

void rig_init(struct rig *rig, uint64_t seed, uint64_t segment_bytes, uint32_t n_segments)
{
    struct kvf_nvme_config *config = &rig->config;

    init_common(rig, seed, segment_bytes);
    kvf_io_sim_config_init(&rig->disk_config);
    rig->disk_config.seed = seed;
    rig->disk_config.capacity_bytes = (1u << 20) + n_segments * segment_bytes;
    assert_int_equal(kvf_io_sim_disk_create(&rig->disk_config, &rig->disk), KVF_OK);
    open_workers(rig);
    config->env = (struct kvf_env){.clock = &rig_clock,
                                   .clock_arg = rig,
                                   .random = &kvf_random_seeded_ops,
                                   .random_arg = &rig->random};
    config->wait = wait_for_disk;
    config->wait_ctx = rig;
    assert_int_equal(kvf_io_sim_open(rig->disk, &config->io), KVF_OK);
    assert_int_equal(kvf_nvme_format(config, rig->why, sizeof(rig->why)), KVF_OK);
    config->io->ops->close(config->io);
    config->io = NULL;
}

void rig_init_file(struct rig *rig, const char *path, uint64_t segment_bytes, uint32_t n_segments,
                   enum kvf_io_engine engine)
{
    init_common(rig, 1, segment_bytes);
    open_workers(rig);
    rig->config.path = path;
    rig->config.bytes = (1u << 20) + n_segments * segment_bytes;
    rig->config.io_config.engine = (uint8_t)engine;
}

void rig_close(struct rig *rig)
{
    if (rig->tier == NULL) {
        return;
    }
    rig->work->ops->close(rig->work);
    rig->tier->ops->close(rig->tier);
    rig->tier = NULL;
    open_workers(rig);
    for (uint32_t i = 0; i < RIG_KEYS; i++) {
        if (rig->keys[i].state == RIG_STORING) {
            rig->keys[i].state = RIG_ABSENT;
        }
    }
}

void rig_crash(struct rig *rig)
{
    kvf_io_sim_crash(rig->disk);
    rig_close(rig);
}

void rig_fini(struct rig *rig)
{
    rig_close(rig);
    rig->work->ops->close(rig->work);
    kvf_io_sim_disk_destroy(rig->disk); /* NULL for a file */
    for (uint32_t i = 0; i < RIG_KEYS; i++) {
        free(rig->keys[i].record);
    }
    free(rig->load_buffer);
}

int rig_open(struct rig *rig)
{
    struct kvf_io_queue *io = NULL;
    int status;

    if (rig->disk != NULL) {
        assert_int_equal(kvf_io_sim_open(rig->disk, &io), KVF_OK);
    }
    rig->config.io = io;
    status = kvf_nvme_open(&rig->config, &rig->tier, rig->why, sizeof(rig->why));
    rig->config.io = NULL;
    if (status != KVF_OK) {
        if (io != NULL) {
            io->ops->close(io);
        }
        return status;
    }
    for (uint32_t i = 0; i < RIG_KEYS; i++) {
        rig->keys[i].found = false;
        rig->keys[i].state = RIG_ABSENT;
    }
    return rig->tier->ops->recover(rig->tier);
}

/* --- calls ------------------------------------------------------------------------------------ */

static void store_done(struct kvf_tier_io *io)
{
    struct rig *rig = io->owner;
    struct rig_key *key = &rig->keys[io->cookie];

    assert_int_equal(key->state, RIG_STORING);
    rig->n_done++;
    if (io->status == KVF_OK) {
        key->state = RIG_STORED;
        key->location = io->location;
        set_durable(rig, io->cookie, io->durable);
    } else {
        key->state = RIG_ABSENT;
    }
}

int rig_store(struct rig *rig, uint32_t key, bool durable)
{
    struct rig_key *entry = &rig->keys[key];
    uint64_t record_bytes = rig_record_bytes(key);
    int status;

    assert_int_equal(entry->state, RIG_ABSENT);
    rig_record_fill(key, entry->record);
    memset(entry->record + record_bytes, 0xee, (4096 - record_bytes % 4096) % 4096);
    entry->io = (struct kvf_tier_io){.cookie = key,
                                     .record = entry->record,
                                     .record_bytes = record_bytes,
                                     .durable = durable,
                                     .done = store_done,
                                     .owner = rig};
    rig_name_fill(rig, key, &entry->io.name);
    entry->state = RIG_STORING;
    entry->durable = false;
    status = rig->tier->ops->store(rig->tier, &entry->io);
    if (status != KVF_OK) {
        entry->state = RIG_ABSENT;
    } else {
        entry->purged = false;
    }
    return status;
}

static void purge_done(void *ctx, uint64_t namespace_id, int status)
{
    (void)namespace_id;
    *(int *)ctx = status;
}

int rig_purge(struct rig *rig, uint32_t namespace_id)
{
    int result = 1000;
    uint32_t steps = 0;
    int status = kvf_nvme_namespace_purge(rig->tier, namespace_id, purge_done, &result);

    if (status != KVF_OK) {
        return status;
    }
    for (uint32_t key = 0; key < RIG_KEYS; key++) {
        if (rig_namespace(key) == namespace_id) {
            rig_drop(rig, key);
        }
    }
    while (result == 1000) {
        rig_step(rig);
        assert_true(++steps < 1000000);
    }
    for (uint32_t key = 0; key < RIG_KEYS && result == KVF_OK; key++) {
        if (rig_namespace(key) == namespace_id) {
            rig->keys[key].purged = true;
        }
    }
    return result;
}

static void load_done(struct kvf_tier_io *io)
{
    *(bool *)io->owner = true;
}

int rig_load_at(struct rig *rig, uint32_t key, kvf_location location)
{
    bool finished = false;
    uint32_t steps = 0;
    struct kvf_tier_io io = {.cookie = key,
                             .record = rig->load_buffer,
                             .record_bytes = rig_record_bytes(key),
                             .location = location,
                             .done = load_done,
                             .owner = &finished};
    int status;

    rig_name_fill(rig, key, &io.name);
    memset(rig->load_buffer, 0xcc, RIG_RECORD_PAGES_MAX * 4096);
    status = rig->tier->ops->load(rig->tier, &io);
    if (status != KVF_OK) {
        return status;
    }
    while (!finished) {
        rig_step(rig);
        assert_true(++steps < 1000000);
    }
    if (io.status == KVF_OK) {
        check_record(key, rig->load_buffer);
    }
    return io.status;
}

int rig_load(struct rig *rig, uint32_t key)
{
    return rig->keys[key].state == RIG_STORED ? rig_load_at(rig, key, rig->keys[key].location)
                                              : KVF_MISS;
}

void rig_drop(struct rig *rig, uint32_t key)
{
    struct rig_key *entry = &rig->keys[key];

    if (entry->state == RIG_STORED) {
        set_durable(rig, key, false);
        rig->tier->ops->drop(rig->tier, entry->location);
        entry->state = RIG_ABSENT;
    }
}

void rig_check_all(struct rig *rig)
{
    for (uint32_t i = 0; i < RIG_KEYS; i++) {
        struct rig_key *key = &rig->keys[i];

        if (key->durable) {
            assert_int_equal(key->state, RIG_STORED);
        }
        if (key->state == RIG_STORED) {
            assert_int_equal(rig_load(rig, i), KVF_OK);
        }
    }
}
