/* SPDX-License-Identifier: Apache-2.0
 *
 * test_unsummed.c: puts whose payload nobody but a device has seen: the daemon sums them.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "base/crc32c.h"
#include "client/client_internal.h"
#include "tests/fault/raw_client.h"
#include "tests/support/daemon.h"

#define PAYLOAD_BYTES 70001

static struct kvf_test_daemon the_daemon;
static struct kvf_client *the_client;

static struct kvf_key key_of(const char text[16])
{
    return (struct kvf_key){text, 16};
}

static void payload_fill(uint8_t *payload, uint8_t seed)
{
    for (uint32_t i = 0; i < PAYLOAD_BYTES; i++) {
        payload[i] = (uint8_t)(i * 7 + i / 256 + seed);
    }
}

static void on_block(struct kvf_client_sink *sink, const struct kvf_event *event, uint64_t value)
{
    (void)value;
    *(int32_t *)sink->arg = event->hit.status;
}

/* A put on its way, and what became of it. */
struct staged_put {
    struct kvf_client_sink sink;
    int32_t block_status;
};

/* Begin to put a slot; wrong_sum is added to the sum in its page. */
static void put_begin(struct staged_put *put, const char *key, uint8_t seed, bool is_unsummed,
                      uint32_t wrong_sum)
{
    struct kvf_put_item item = {
        .struct_bytes = sizeof(item), .source = KVF_SOURCE_STAGED, .key = key_of(key)};
    struct kvf_stage stage;
    struct kvf_record_page *page;
    uint64_t request;

    *put = (struct staged_put){.block_status = KVF_ERR_TIMEOUT};
    put->sink.on_block = on_block;
    put->sink.arg = &put->block_status;
    put->sink.is_unsummed = is_unsummed;
    assert_int_equal(kvf_stage_acquire(the_client, PAYLOAD_BYTES, &stage), KVF_OK);
    payload_fill(stage.payload, seed);
    assert_int_equal(kvf_stage_seal(the_client, &stage, PAYLOAD_BYTES), KVF_OK);
    page = stage.record;
    page->header.payload_crc32c += wrong_sum;
    kvf_block_seal_header(page);
    item.stage = stage.stage;
    kvf_client_enter(the_client);
    assert_int_equal(kvf_request_put(the_client, &item, 1, NULL, &put->sink, 0, NULL, &request),
                     KVF_OK);
    kvf_client_leave(the_client);
}

/* Returns the block's status. */
static int32_t put_end(struct staged_put *put)
{
    kvf_client_enter(the_client);
    while (!put->sink.is_done) {
        kvf_session_sleep(the_client, kvf_now_ns() + KVF_NS_PER_S);
        kvf_requests_drain(the_client, true);
    }
    kvf_client_leave(the_client);
    return put->block_status;
}

static int32_t put_staged(const char *key, uint8_t seed, bool is_unsummed)
{
    struct staged_put put;

    put_begin(&put, key, seed, is_unsummed, is_unsummed ? 77 : 0);
    return put_end(&put);
}

static void get_and_check(const char *key, uint8_t seed)
{
    static uint8_t want[PAYLOAD_BYTES];
    struct kvf_key k = key_of(key);
    struct kvf_record_page page;
    struct kvf_hit hit;

    payload_fill(want, seed);
    assert_int_equal(kvf_get(the_client, &k, 1, NULL, &hit), KVF_OK);
    assert_int_equal(hit.payload_bytes, PAYLOAD_BYTES);
    memcpy(&page, hit.record, sizeof(page));
    assert_int_equal(kvf_block_check(&page, hit.record_bytes), KVF_OK);
    assert_int_equal(page.header.payload_crc32c, kvf_crc32c(0, want, PAYLOAD_BYTES));
    assert_memory_equal(hit.payload, want, PAYLOAD_BYTES);
    assert_int_equal(kvf_lease_release(the_client, hit.lease), KVF_OK);
}

static void test_the_daemon_writes_the_sum(void **state)
{
    (void)state;
    assert_int_equal(put_staged("unsummed-block-1", 1, true), KVF_OK);
    get_and_check("unsummed-block-1", 1);
}

static void test_a_present_key_exists_whatever_the_payload(void **state)
{
    (void)state;
    assert_int_equal(put_staged("unsummed-block-2", 2, true), KVF_OK);
    assert_int_equal(put_staged("unsummed-block-2", 2, true), KVF_EXISTS);
    assert_int_equal(put_staged("unsummed-block-2", 3, true), KVF_EXISTS);
    get_and_check("unsummed-block-2", 2);
    /* whoever brings a sum is compared with the one that the daemon found */
    assert_int_equal(put_staged("unsummed-block-2", 2, false), KVF_EXISTS);
    assert_int_equal(put_staged("unsummed-block-2", 3, false), KVF_ERR_CONFLICT);
}

static void restart(const char *failpoints)
{
    the_client = kvf_close(the_client);
    assert_int_equal(kvf_test_daemon_stop(&the_daemon), 0);
    the_daemon.failpoints = failpoints;
    kvf_test_daemon_start(&the_daemon);
    the_client = kvf_test_client_open(&the_daemon, NULL);
}

/* Puts that come before the daemon has found the sum share the fate of the one that it sums, or
 * not, when it has. */
static void test_sums_are_compared_when_they_are_known(void **state)
{
    struct staged_put first, same, other;

    (void)state;
    restart("agent.fill=delay:300ms");
    put_begin(&first, "unsummed-block-5", 6, true, 77);
    put_begin(&same, "unsummed-block-5", 6, false, 0);
    put_begin(&other, "unsummed-block-5", 7, false, 0);
    assert_int_equal(put_end(&first), KVF_OK);
    assert_in_range(put_end(&same), KVF_OK, KVF_EXISTS);
    assert_int_equal(put_end(&other), KVF_ERR_CONFLICT);
    get_and_check("unsummed-block-5", 6);
    restart(NULL);
}

/* There is no conflict with a put that fails, and its fault is not that of others: a right put that
 * comes while a wrong one is being copied is told to try again. */
static void test_a_wrong_put_takes_nobody_along(void **state)
{
    static uint8_t payload[PAYLOAD_BYTES];
    struct staged_put wrong, other, same;
    uint32_t sum;

    (void)state;
    payload_fill(payload, 9);
    sum = kvf_crc32c(0, payload, PAYLOAD_BYTES);
    payload_fill(payload, 8);
    sum -= kvf_crc32c(0, payload, PAYLOAD_BYTES);
    restart("agent.fill=delay:300ms");
    put_begin(&wrong, "unsummed-block-7", 8, false, sum);
    put_begin(&other, "unsummed-block-7", 7, false, 0);
    put_begin(&same, "unsummed-block-7", 9, false, 0);
    assert_int_equal(put_end(&wrong), KVF_ERR_CORRUPT);
    put_end(&other);
    put_end(&same);
    if (other.block_status == KVF_OK) { /* the machine stood still, the wrong one was over */
        assert_int_equal(same.block_status, KVF_ERR_CONFLICT);
    } else {
        assert_int_equal(other.block_status, KVF_ERR_BUSY);
        assert_true(same.block_status == KVF_OK || same.block_status == KVF_ERR_BUSY);
    }
    if (other.block_status == KVF_ERR_BUSY && same.block_status == KVF_ERR_BUSY) {
        assert_int_equal(put_staged("unsummed-block-7", 7, false), KVF_OK);
        get_and_check("unsummed-block-7", 7);
    }
    restart(NULL);
}

static int evict(const char *key)
{
    struct kvf_key k = key_of(key);

    return kvf_evict(the_client, &k, 1, NULL);
}

/* Nor with one whose block is evicted before it is there. */
static void test_no_conflict_with_an_evicted_put(void **state)
{
    struct staged_put first, other;

    (void)state;
    restart("agent.fill=delay:300ms");
    put_begin(&first, "unsummed-block-8", 8, false, 0);
    put_begin(&other, "unsummed-block-8", 9, false, 0);
    assert_int_equal(evict("unsummed-block-8"), KVF_OK);
    put_end(&first);
    put_end(&other);
    if (first.block_status == KVF_OK) { /* the machine stood still */
        assert_int_equal(other.block_status, KVF_ERR_CONFLICT);
    } else {
        assert_int_equal(first.block_status, KVF_ERR_BUSY);
        assert_int_equal(other.block_status, KVF_ERR_BUSY);
    }
    restart(NULL);
}

/* What is written to a drive and read back carries the sum as well. */
static void test_the_sum_is_durable(void **state)
{
    (void)state;
    assert_int_equal(put_staged("unsummed-block-3", 4, true), KVF_OK);
    restart(NULL);
    get_and_check("unsummed-block-3", 4);
}

/* A wrong sum is still found where one is given. */
static void test_a_given_sum_is_checked(void **state)
{
    struct staged_put put;

    (void)state;
    assert_int_equal(put_staged("unsummed-block-4", 5, false), KVF_OK);
    get_and_check("unsummed-block-4", 5);
    put_begin(&put, "unsummed-block-6", 5, false, 77);
    assert_int_equal(put_end(&put), KVF_ERR_CORRUPT);
}

static void test_version_1_has_no_such_flag(void **state)
{
    struct kvf_wire_hello hello;
    struct raw_client raw;
    struct kvf_shm_sqe sqe;
    struct kvf_shm_key key;

    (void)state;
    for (uint16_t version = 1; version <= KVF_WIRE_VERSION_MAX; version++) {
        raw_connect(&raw, the_daemon.socket_path);
        raw_hello(&hello);
        hello.version_max = version;
        assert_true(raw_begin(&raw, &hello));
        assert_int_equal(raw.welcome.version, version);
        assert_true(raw_mapped(&raw));
        raw_key(&key, 77);
        key.record_bytes = KVF_RECORD_PAGE_BYTES + 100;
        raw_sqe(&raw, &sqe, KVF_OP_PUT, 1);
        sqe.flags = KVF_SQE_UNSUMMED;
        raw_submit(&raw, &sqe, &key, 1);
        if (version < KVF_WIRE_VERSION_UNSUMMED) {
            assert_true(raw_is_hung_up(&raw, 2000));
        } else {
            struct kvf_shm_cqe cqe;

            assert_true(raw_take(&raw, &cqe)); /* no record is staged there */
            assert_int_equal(cqe.status, KVF_ERR_CORRUPT);
        }
        raw_close(&raw);
    }
}

static int setup(void **state)
{
    (void)state;
    kvf_test_daemon_create(&the_daemon, NULL);
    kvf_test_daemon_start(&the_daemon);
    the_client = kvf_test_client_open(&the_daemon, NULL);
    return the_client != NULL ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    kvf_close(the_client);
    kvf_test_daemon_destroy(&the_daemon);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_daemon_writes_the_sum),
        cmocka_unit_test(test_a_present_key_exists_whatever_the_payload),
        cmocka_unit_test(test_a_given_sum_is_checked),
        cmocka_unit_test(test_version_1_has_no_such_flag),
        cmocka_unit_test(test_sums_are_compared_when_they_are_known),
        cmocka_unit_test(test_a_wrong_put_takes_nobody_along),
        cmocka_unit_test(test_no_conflict_with_an_evicted_put),
        cmocka_unit_test(test_the_sum_is_durable),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
