/* SPDX-License-Identifier: Apache-2.0
 *
 * test_fault.c: the fault tier fails where it was told to, nowhere else, and says what is wrong
 * with a specification.
 */
#include "base/limits.h"
#include "tests/unit/tiers/dram_bed.h"
#include "tests/unit/tiers/log_bed.h"
#include "tiers/tier_fault.h"

static bool is_closed;

static struct kvf_tier *open_fault(const char *spec, struct log_tier **log_out)
{
    struct log_tier *log = log_open(&is_closed);
    char error[KVF_ERROR_TEXT_BYTES] = "";
    struct kvf_tier *tier;

    if (kvf_fault_open(&log->base, spec, &tier, error, sizeof(error)) != KVF_OK) {
        fail_msg("%s", error);
    }
    if (log_out != NULL) {
        *log_out = log;
    }
    return tier;
}

/* One call and its completion. Returns the status of whichever failed, else of the io. */
static int do_call(struct kvf_tier *tier, struct log_call *call, bool is_load)
{
    int (*op)(struct kvf_tier *, struct kvf_tier_io *) = is_load ? tier->ops->load
                                                                 : tier->ops->store;
    int status = op(tier, &call->io);

    if (status != KVF_OK) {
        assert_int_equal(tier->ops->poll(tier, 0), 0);
        assert_int_equal(call->n_done, 0);
        return status;
    }
    assert_int_equal(call->n_done, 0); /* never inside the call */
    assert_int_equal(tier->ops->poll(tier, 0), 1);
    assert_int_equal(call->n_done, 1);
    return call->io.status;
}

static int store(struct kvf_tier *tier, unsigned char fill, kvf_location *location_out)
{
    struct log_call call;
    int status;

    log_call_init(&call, fill, KVF_LOCATION_NONE);
    status = do_call(tier, &call, false);
    *location_out = call.io.location;
    return status;
}

static int load(struct kvf_tier *tier, kvf_location location, struct log_call *call)
{
    log_call_init(call, 0xee, location);
    return do_call(tier, call, true);
}

static void test_empty_changes_nothing(void **state)
{
    struct log_tier *log;
    struct kvf_tier *tier = open_fault("", &log);

    (void)state;
    assert_ptr_equal(tier, &log->base);
    tier->ops->close(tier);
}

static void test_passes_on(void **state)
{
    struct log_tier *log;
    struct kvf_tier *tier = open_fault("load:error@100", &log);
    struct log_call call;
    struct kvf_tier_stat stat;
    kvf_location location;

    (void)state;
    assert_string_equal(tier->ops->name, "log");
    assert_int_equal(tier->ops->flags, KVF_TIER_PERSISTENT);
    assert_int_equal(tier->ops->kind, KVF_TIER_NVME);
    assert_null(tier->ops->reserve);
    assert_null(tier->ops->address);
    assert_int_equal(tier->ops->recover(tier), KVF_MISS);
    log->deadline_ns = 77;
    assert_int_equal(tier->ops->deadline_ns(tier), 77);
    assert_int_equal(store(tier, 0x11, &location), KVF_OK);
    assert_int_equal(location, 0);
    assert_int_equal(load(tier, location, &call), KVF_OK);
    assert_int_equal(call.record[0], 0x11);
    assert_int_equal(call.record[LOG_RECORD_BYTES - 1], 0x11);
    tier->ops->stat(tier, &stat);
    assert_int_equal(stat.stores, 1);
    log_call_init(&call, 1, 0);
    assert_true(tier->ops->drained(tier));
    assert_int_equal(tier->ops->store(tier, &call.io), KVF_OK);
    assert_false(tier->ops->drained(tier));
    tier->ops->poll(tier, 0);
    assert_true(tier->ops->drained(tier));
    tier->ops->drop(tier, 0);
    assert_int_equal(log->records[0][0], 0);
    tier->ops->close(tier);
    assert_true(is_closed);
}

static void test_nth_call(void **state)
{
    struct log_tier *log;
    struct kvf_tier *tier = open_fault("load:error@3,store:error@2+", &log);
    struct log_call call;
    struct kvf_tier_stat stat;
    kvf_location location, other;

    (void)state;
    assert_int_equal(store(tier, 0x22, &location), KVF_OK);
    for (int n = 1; n <= 6; n++) {
        assert_int_equal(load(tier, location, &call), n == 3 ? KVF_ERR_IO : KVF_OK);
        assert_int_equal(call.record[0], n == 3 ? 0xee : 0x22);
    }
    for (int n = 2; n <= 5; n++) {
        assert_int_equal(store(tier, 0x33, &other), KVF_ERR_IO);
    }
    assert_int_equal(log->n_stores, 1); /* the inner tier has not seen the others */
    assert_int_equal(log->n_loads, 5);
    tier->ops->stat(tier, &stat);
    assert_int_equal(stat.errors_io, 5);
    tier->ops->close(tier);
}

static void test_failures_wake_the_reactor(void **state)
{
    struct kvf_tier *tier = open_fault("store:error", NULL);
    struct log_call calls[3];

    (void)state;
    for (unsigned i = 0; i < 3; i++) {
        log_call_init(&calls[i], 0, 0);
        assert_int_equal(tier->ops->store(tier, &calls[i].io), KVF_OK);
    }
    assert_int_equal(tier->ops->deadline_ns(tier), 0);
    log_n_done = 0;
    assert_int_equal(tier->ops->poll(tier, 0), 3);
    for (unsigned i = 0; i < 3; i++) {
        assert_int_equal(calls[i].order, i);
        assert_int_equal(calls[i].io.status, KVF_ERR_IO);
    }
    assert_true(tier->ops->deadline_ns(tier) == UINT64_MAX);
    tier->ops->close(tier);
}

static void test_busy(void **state)
{
    struct kvf_tier *tier = open_fault("store:busy@1,load:busy@2", NULL);
    struct log_call call;
    kvf_location location;

    (void)state;
    assert_int_equal(store(tier, 1, &location), KVF_ERR_BUSY);
    assert_int_equal(store(tier, 1, &location), KVF_OK);
    assert_int_equal(load(tier, location, &call), KVF_OK);
    assert_int_equal(load(tier, location, &call), KVF_ERR_BUSY);
    assert_int_equal(load(tier, location, &call), KVF_OK);
    tier->ops->close(tier);
}

static void test_too_many_at_once(void **state)
{
    struct kvf_tier *tier = open_fault("load:error@1000000", NULL);
    static struct log_call calls[LOG_RECORDS];
    struct log_call extra;
    unsigned n_started = 0;

    (void)state;
    /* the inner tier's own limit comes through, and leaves nothing behind in the wrapper */
    for (int round = 0; round < 40; round++) {
        for (unsigned i = 0; i < LOG_RECORDS; i++) {
            log_call_init(&calls[i], (unsigned char)i, i);
            n_started += tier->ops->store(tier, &calls[i].io) == KVF_OK;
        }
        log_call_init(&extra, 0, 0);
        assert_int_equal(tier->ops->store(tier, &extra.io), KVF_ERR_BUSY);
        tier->ops->poll(tier, 0);
    }
    assert_int_equal(n_started, LOG_RECORDS);
    assert_true(tier->ops->drained(tier));
    tier->ops->close(tier);
}

static void corrupted(uint64_t seed, unsigned *n_out, uint32_t positions[64])
{
    char spec[64];
    struct kvf_tier *tier;
    kvf_location location;

    snprintf(spec, sizeof(spec), "load:corrupt%%20,seed=%llu", (unsigned long long)seed);
    tier = open_fault(spec, NULL);
    assert_int_equal(store(tier, 0x44, &location), KVF_OK);
    *n_out = 0;
    for (int i = 0; i < 200; i++) {
        struct log_call call;
        unsigned n_wrong = 0;

        assert_int_equal(load(tier, location, &call), KVF_OK);
        for (uint32_t at = 0; at < LOG_RECORD_BYTES; at++) {
            if (call.record[at] != 0x44) {
                n_wrong++;
                positions[*n_out % 64] = at;
            }
        }
        assert_true(n_wrong <= 1);
        *n_out += n_wrong;
    }
    tier->ops->close(tier);
}

static void test_corruption_repeats_from_its_seed(void **state)
{
    uint32_t first[64] = {0}, again[64] = {0}, other[64] = {0};
    unsigned n_first, n_again, n_other;

    (void)state;
    corrupted(7, &n_first, first);
    corrupted(7, &n_again, again);
    corrupted(8, &n_other, other);
    assert_true(n_first > 15 && n_first < 64); /* 40 expected */
    assert_int_equal(n_first, n_again);
    assert_memory_equal(first, again, sizeof(first));
    assert_memory_not_equal(first, other, sizeof(first));
}

/* Around the memory tier, whose own calls still take the inner one. */
static void test_reserve(void **state)
{
    struct bed *bed = bed_new(4, 1);
    char error[KVF_ERROR_TEXT_BYTES];
    struct kvf_tier *tier;
    struct kvf_tier_stat stat;
    kvf_location location;

    (void)state;
    bed_open(bed);
    bed->n_entries = 4;
    assert_int_equal(kvf_fault_open(bed->tier, "reserve:error@2", &tier, error, sizeof(error)),
                     KVF_OK);
    assert_null(tier->ops->store);
    assert_null(tier->ops->load);
    assert_null(tier->ops->recover);
    assert_int_equal(tier->ops->reserve(tier, 0, 9000, 0, &location), KVF_OK);
    assert_int_equal(tier->ops->reserve(tier, 0, 9000, 1, &location), KVF_ERR_BUSY);
    assert_int_equal(tier->ops->reserve(tier, 0, 9000, 2, &location), KVF_OK);
    assert_non_null(tier->ops->address(tier, location));
    kvf_dram_publish(bed->tier, location, 0);
    tier->ops->drop(tier, location);
    assert_int_equal(kvf_dram_state(bed->tier, location), KVF_SLOT_FREE);
    tier->ops->stat(tier, &stat);
    assert_int_equal(stat.busy, 1);
    bed->config.work->ops->close(bed->config.work);
    tier->ops->close(tier);
    free(bed);
}

static void test_wrong_specifications(void **state)
{
    static const struct {
        const char *spec, *word;
    } cases[] = {
        {"load", "fault \"load\": use OP:ACTION"},
        {"fetch:error", "fault \"fetch:error\": reserve, store or load"},
        {"load:explode", "fault \"load:explode\": use reserve:error"},
        {"load:", "fault \"load:\": use reserve:error"},
        {"store:corrupt", "fault \"store:corrupt\": use reserve:error"},
        {"reserve:busy", "fault \"reserve:busy\": use reserve:error"},
        {"load:error@", "fault \"load:error@\""},
        {"load:error@0", "counted from 1"},
        {"load:error@3x", "fault \"load:error@3x\""},
        {"load:error%0", "1 to 100"},
        {"load:error%101", "1 to 100"},
        {"load:error%5+", "fault \"load:error%5+\""},
        {"seed=x", "fault \"seed=x\""},
        {"load:error,,seed=1", "fault \"\""},
        {"load:error,load:error,load:error,load:error,load:error,load:error,load:error,load:error,"
         "load:error,load:error,load:error,load:error,load:error,load:error,load:error,load:error,"
         "load:error",
         "at most 16 rules"},
    };
    struct log_tier *log = log_open(&is_closed);

    (void)state;
    for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char error[KVF_ERROR_TEXT_BYTES] = "";
        struct kvf_tier *tier = NULL;

        assert_int_equal(kvf_fault_open(&log->base, cases[i].spec, &tier, error, sizeof(error)),
                         KVF_ERR_INVALID);
        assert_null(tier);
        if (strstr(error, cases[i].word) == NULL) {
            fail_msg("%s gave: %s", cases[i].spec, error);
        }
        assert_null(strchr(error, '\n'));
        assert_false(is_closed);
    }
    log->base.ops->close(&log->base);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_empty_changes_nothing),
        cmocka_unit_test(test_passes_on),
        cmocka_unit_test(test_nth_call),
        cmocka_unit_test(test_failures_wake_the_reactor),
        cmocka_unit_test(test_busy),
        cmocka_unit_test(test_too_many_at_once),
        cmocka_unit_test(test_corruption_repeats_from_its_seed),
        cmocka_unit_test(test_reserve),
        cmocka_unit_test(test_wrong_specifications),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
