/* SPDX-License-Identifier: Apache-2.0
 *
 * test_tier_remote.c: what tier.h promises of a load, asked of the tier whose records lie on other
 * nodes. It cannot be asked with the others (test_tiers.c): it stores nothing. The network below it
 * is a few lines of this file: it brings right records, wrong ones, or none.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "codec/block_format.h"
#include "codec/codec.h"
#include "tests/support/support.h"
#include "tiers/tier_remote.h"
#include "tiers/work_inline.h"

enum {
    PAYLOAD_MAX = 100000,
    RECORD_MAX = KVF_RECORD_PAGE_BYTES + PAYLOAD_MAX + 4096,
    CALLS_MAX = KVF_NET_FETCHES_MAX + 8,
    LINK = 77,
};

#define TIMEOUT_NS (3 * KVF_NS_PER_S)

/* What a fetch comes to; status 0: the record, with wrong_byte changed unless it is -1. */
struct answer {
    int32_t status;
    int64_t wrong_byte;
    uint32_t number; /* of the record that comes */
    bool is_summed;  /* by the network */
};

struct call {
    struct kvf_tier_io io;
    uint32_t number;
    uint32_t n_done;
};

struct bench {
    struct kvf_tier *tier;
    struct kvf_work_queue *work;
    struct kvf_net_fetch *fetches[CALLS_MAX];
    uint32_t n_fetches;
    bool is_net_full, is_polling;
    uint64_t now_ns;
    struct call calls[CALLS_MAX];
    uint8_t *records;
};

static struct bench the_bench;

/* ---- records --------------------------------------------------------------------------------- */

static uint64_t bytes_of(uint32_t number)
{
    return KVF_RECORD_PAGE_BYTES + 1 + (uint64_t)number * 7919 % PAYLOAD_MAX;
}

static struct kvf_block_name name_of(uint32_t number)
{
    struct kvf_block_name name = {.shard = (uint16_t)(number % 3), .shard_count = 3};

    memset(name.key_id, (int)(number + 1), sizeof(name.key_id));
    memcpy(name.key_id, &number, sizeof(number));
    return name;
}

static void record_fill(uint32_t number, uint8_t *record)
{
    struct kvf_record_page *page = (void *)record;
    uint64_t payload_bytes = bytes_of(number) - KVF_RECORD_PAGE_BYTES;
    struct kvf_block_name name = name_of(number);
    struct kvf_random_seeded random;

    kvf_random_seeded_init(&random, number);
    kvf_random_seeded_ops.fill(&random, record + KVF_RECORD_PAGE_BYTES, payload_bytes);
    assert_int_equal(kvf_block_describe_bytes(page, record + KVF_RECORD_PAGE_BYTES, payload_bytes),
                     KVF_OK);
    memcpy(page->header.key_id, name.key_id, sizeof(name.key_id));
    page->header.shard = name.shard;
    page->header.shard_count = name.shard_count;
    kvf_block_seal_header(page);
    memset(&page->store, 0x5c, sizeof(page->store)); /* of the owner's drive */
}

/* ---- the network ----------------------------------------------------------------------------- */

int kvf_net_fetch(struct kvf_net *net, struct kvf_net_fetch *fetch)
{
    struct bench *bench = &the_bench;

    (void)net;
    if (bench->is_net_full) {
        return KVF_ERR_BUSY;
    }
    assert_int_equal(fetch->link, LINK);
    assert_int_equal(fetch->deadline_ns, bench->now_ns + TIMEOUT_NS);
    bench->fetches[bench->n_fetches++] = fetch;
    return KVF_OK;
}

/* The oldest fetch is over. */
static void answer(const struct answer *what)
{
    struct bench *bench = &the_bench;
    struct kvf_net_fetch *fetch = bench->fetches[0];
    uint8_t record[RECORD_MAX];

    memmove(bench->fetches, bench->fetches + 1, --bench->n_fetches * sizeof(bench->fetches[0]));
    fetch->status = what->status;
    if (what->status == KVF_OK) {
        record_fill(what->number, record);
        memcpy(fetch->record, record, fetch->record_bytes);
        if (what->wrong_byte >= 0) {
            ((uint8_t *)fetch->record)[what->wrong_byte] ^= 0x10;
        }
        fetch->is_summed = what->is_summed;
        fetch->payload_crc32c = kvf_crc32c(0, (uint8_t *)fetch->record + KVF_RECORD_PAGE_BYTES,
                                           fetch->record_bytes - KVF_RECORD_PAGE_BYTES);
    }
    kvf_remote_fetched(bench->tier, fetch);
}

/* ---- the host -------------------------------------------------------------------------------- */

static uint64_t bench_now_ns(void *arg)
{
    return ((struct bench *)arg)->now_ns;
}

static uint64_t bench_wall_s(void *arg)
{
    (void)arg;
    return 0;
}

static const struct kvf_clock_ops bench_clock = {.now_ns = bench_now_ns, .wall_s = bench_wall_s};

static void call_done(struct kvf_tier_io *io)
{
    struct call *call = io->owner;

    assert_true(the_bench.is_polling); /* never from inside load, or when the network says so */
    call->n_done++;
}

static int load(uint32_t slot, uint32_t number, uint64_t bytes)
{
    struct call *call = &the_bench.calls[slot];

    memset(call, 0, sizeof(*call));
    call->number = number;
    call->io.name = name_of(number);
    call->io.record = the_bench.records + (size_t)(slot % 8) * RECORD_MAX;
    call->io.record_bytes = bytes;
    call->io.location = LINK;
    call->io.status = KVF_ERR_INTERNAL;
    call->io.done = call_done;
    call->io.owner = call;
    memset(call->io.record, 0xa5, RECORD_MAX);
    return the_bench.tier->ops->load(the_bench.tier, &call->io);
}

/* As the reactor does: workers, then the tier, as long as it wants to. */
static void pump(void)
{
    struct bench *bench = &the_bench;

    for (int i = 0; i < 4; i++) {
        (void)bench->work->ops->poll(bench->work);
        bench->is_polling = true;
        (void)bench->tier->ops->poll(bench->tier, bench->now_ns);
        bench->is_polling = false;
    }
}

static uint64_t busy(void)
{
    struct kvf_tier_stat stat;

    the_bench.tier->ops->stat(the_bench.tier, &stat);
    return stat.busy;
}

static void bench_open(uint64_t inflight_bytes, uint32_t max_jobs)
{
    struct kvf_remote_config config = {.env = {.clock = &bench_clock, .clock_arg = &the_bench},
                                       .timeout_ns = TIMEOUT_NS,
                                       .inflight_bytes = inflight_bytes};

    memset(&the_bench, 0, sizeof(the_bench));
    the_bench.now_ns = KVF_NS_PER_S;
    the_bench.records = aligned_alloc(4096, (size_t)8 * RECORD_MAX / 4096 * 4096 + 4096);
    assert_non_null(the_bench.records);
    assert_int_equal(kvf_work_inline_open(KVF_WORK_AT_POLL, max_jobs, &the_bench.work), KVF_OK);
    config.work = the_bench.work;
    assert_int_equal(kvf_remote_open(&config, &the_bench.tier), KVF_OK);
}

static int teardown(void **state)
{
    (void)state;
    the_bench.work->ops->close(the_bench.work);
    the_bench.tier->ops->close(the_bench.tier);
    free(the_bench.records);
    return 0;
}

/* ---- what is promised ------------------------------------------------------------------------ */

static void test_table(void **state)
{
    const struct kvf_tier_ops *ops = &kvf_tier_remote_ops;
    struct kvf_tier_io io = {.record_bytes = 8192};

    (void)state;
    bench_open(1 << 20, 64);
    assert_int_equal(ops->abi, KVF_TIER_ABI);
    assert_int_equal(ops->kind, KVF_TIER_REMOTE);
    assert_null(ops->reserve);
    assert_null(ops->address);
    assert_null(ops->recover);
    assert_int_equal(ops->flags & (KVF_TIER_ADDRESSABLE | KVF_TIER_PERSISTENT), 0);
    assert_int_equal(the_bench.tier->ops->store(the_bench.tier, &io), KVF_ERR_TIER_OFF);
    ops->drop(the_bench.tier, LINK);
    ops->close(NULL); /* what a failed open left */
    assert_int_equal(load(0, 1, KVF_RECORD_PAGE_BYTES), KVF_ERR_TOO_LARGE);
    assert_int_equal(load(0, 1, KVF_RECORD_PAGE_BYTES + KVF_PAYLOAD_BYTES_MAX + 1ull),
                     KVF_ERR_TOO_LARGE);
    assert_int_equal(the_bench.n_fetches, 0);
}

/* The record, with nothing in it that is the other node's own, and nothing behind it. */
static void test_right(void **state)
{
    uint8_t record[RECORD_MAX];

    (void)state;
    bench_open(1 << 20, 64);
    for (uint32_t number = 0; number < 40; number++) {
        struct call *call = &the_bench.calls[0];
        struct kvf_record_page *page = (void *)record;
        uint64_t bytes = bytes_of(number);

        assert_int_equal(load(0, number, bytes), KVF_OK);
        pump();
        assert_int_equal(call->n_done, 0);
        answer(&(struct answer){.wrong_byte = -1, .number = number, .is_summed = number % 2 == 1});
        assert_int_equal(call->n_done, 0);
        pump();
        assert_int_equal(call->n_done, 1);
        assert_int_equal(call->io.status, KVF_OK);
        record_fill(number, record);
        memset(&page->store, 0, sizeof(page->store));
        assert_memory_equal(call->io.record, record, bytes);
        for (uint64_t i = bytes; i % 4096 != 0; i++) {
            assert_int_equal(((uint8_t *)call->io.record)[i], 0);
        }
    }
}

/* Whatever is wrong with it: corrupt, once, and what was in the way is free again. */
static void test_wrong(void **state)
{
    struct kvf_random_seeded dice;

    (void)state;
    kvf_random_seeded_init(&dice, kvf_test_seed());
    bench_open(1 << 20, 64);
    for (uint32_t round = 0; round < 300; round++) {
        uint32_t number = round % 20 * 3;
        uint64_t bytes = bytes_of(number);
        int64_t at = (int64_t)(kvf_random_seeded_next(&dice) % bytes);
        struct answer wrong = {.number = number, .wrong_byte = at, .is_summed = round % 2 == 1};

        if (at >= (int64_t)offsetof(struct kvf_record_page, store) &&
            at < (int64_t)(offsetof(struct kvf_record_page, store) +
                           sizeof(struct kvf_block_store))) {
            continue; /* means nothing to others */
        }
        assert_int_equal(load(0, number, bytes), KVF_OK);
        answer(&wrong);
        pump();
        assert_int_equal(the_bench.calls[0].n_done, 1);
        assert_int_equal(the_bench.calls[0].io.status, KVF_ERR_CORRUPT);
    }
    /* another record of the same size, right in itself */
    assert_int_equal(load(0, 5, bytes_of(5 + PAYLOAD_MAX)), KVF_OK);
    answer(&(struct answer){.wrong_byte = -1, .number = 5 + PAYLOAD_MAX});
    pump();
    assert_int_equal(the_bench.calls[0].io.status, KVF_ERR_CORRUPT);
}

static void test_none(void **state)
{
    static const int32_t statuses[] = {KVF_MISS, KVF_ERR_BUSY, KVF_ERR_TIMEOUT,
                                       KVF_ERR_DISCONNECTED};

    (void)state;
    bench_open(1 << 20, 64);
    for (size_t i = 0; i < sizeof(statuses) / sizeof(statuses[0]); i++) {
        assert_int_equal(load(0, 1, bytes_of(1)), KVF_OK);
        answer(&(struct answer){.status = statuses[i]});
        pump();
        assert_int_equal(the_bench.calls[0].n_done, 1);
        assert_int_equal(the_bench.calls[0].io.status, statuses[i]);
    }
}

/* Limits answer busy before anything has happened, and one load is always allowed. */
static void test_busy(void **state)
{
    (void)state;
    bench_open(2 * bytes_of(1), 1);
    the_bench.is_net_full = true;
    assert_int_equal(load(0, 1, bytes_of(1)), KVF_ERR_BUSY);
    the_bench.is_net_full = false;
    assert_int_equal(load(0, 1, bytes_of(1)), KVF_OK);
    assert_int_equal(load(1, 1, bytes_of(1)), KVF_OK);
    assert_int_equal(load(2, 1, bytes_of(1)), KVF_ERR_BUSY);
    assert_int_equal(busy(), 2);
    /* a queue of workers that is full is no loss: later */
    answer(&(struct answer){.wrong_byte = -1, .number = 1});
    answer(&(struct answer){.wrong_byte = -1, .number = 1});
    assert_int_equal(the_bench.tier->ops->deadline_ns(the_bench.tier), 0);
    pump();
    pump();
    assert_int_equal(the_bench.tier->ops->deadline_ns(the_bench.tier), UINT64_MAX);
    for (uint32_t i = 0; i < 2; i++) {
        assert_int_equal(the_bench.calls[i].n_done, 1);
        assert_int_equal(the_bench.calls[i].io.status, KVF_OK);
        assert_int_equal(the_bench.calls[2].n_done, 0);
    }
    /* more than is allowed at all, alone */
    assert_int_equal(load(0, 12, 4 * bytes_of(1)), KVF_OK);
    answer(&(struct answer){.status = KVF_MISS});
    pump();
    assert_int_equal(the_bench.calls[0].n_done, 1);
}

/* A close forgets what is under way: nobody is told. */
static void test_close(void **state)
{
    (void)state;
    bench_open(1 << 30, 64);
    for (uint32_t i = 0; i < KVF_NET_FETCHES_MAX; i++) {
        assert_int_equal(load(i, 1, bytes_of(1)), KVF_OK);
    }
    assert_int_equal(load(KVF_NET_FETCHES_MAX, 1, bytes_of(1)), KVF_ERR_BUSY);
    answer(&(struct answer){.wrong_byte = -1, .number = 1});
    assert_int_equal(the_bench.calls[0].n_done, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_table, teardown),
        cmocka_unit_test_teardown(test_right, teardown),
        cmocka_unit_test_teardown(test_wrong, teardown),
        cmocka_unit_test_teardown(test_none, teardown),
        cmocka_unit_test_teardown(test_busy, teardown),
        cmocka_unit_test_teardown(test_close, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
