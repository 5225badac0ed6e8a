/* SPDX-License-Identifier: Apache-2.0
 *
 * test_delay.c: the delay tier holds completions back for as long as it was told to, by the clock
 * that it was given, and says when it wants to be polled.
 */
#include "tiers/tier_delay.h"

#include "base/limits.h"
#include "tests/unit/tiers/log_bed.h"

static uint64_t now_ns;
static bool is_closed;

static uint64_t clock_now_ns(void *arg)
{
    (void)arg;
    return now_ns;
}

static uint64_t clock_wall_s(void *arg)
{
    (void)arg;
    return 0;
}

static const struct kvf_clock_ops test_clock = {.now_ns = clock_now_ns, .wall_s = clock_wall_s};
static const struct kvf_env test_env = {.clock = &test_clock};

static struct kvf_tier *open_delay(const char *spec, struct log_tier **log_out)
{
    struct log_tier *log = log_open(&is_closed);
    char error[KVF_ERROR_TEXT_BYTES] = "";
    struct kvf_tier *tier;

    now_ns = 1000 * KVF_NS_PER_S;
    log_n_done = 0;
    if (kvf_delay_open(&log->base, spec, &test_env, &tier, error, sizeof(error)) != KVF_OK) {
        fail_msg("%s", error);
    }
    *log_out = log;
    return tier;
}

static void test_empty_changes_nothing(void **state)
{
    struct log_tier *log;
    struct kvf_tier *tier = open_delay("", &log);

    (void)state;
    assert_ptr_equal(tier, &log->base);
    tier->ops->close(tier);
}

static void test_fixed_delay(void **state)
{
    struct log_tier *log;
    struct kvf_tier *tier = open_delay("load:2ms", &log);
    uint64_t start_ns = now_ns;
    struct log_call put, get;

    (void)state;
    log_call_init(&put, 0x66, 0);
    assert_int_equal(tier->ops->store(tier, &put.io), KVF_OK);
    assert_int_equal(tier->ops->poll(tier, now_ns), 1); /* stores are not delayed here */
    assert_int_equal(put.io.status, KVF_OK);

    log_call_init(&get, 0, put.io.location);
    assert_int_equal(tier->ops->load(tier, &get.io), KVF_OK);
    assert_int_equal(tier->ops->poll(tier, now_ns), 0);
    assert_int_equal(tier->ops->deadline_ns(tier), start_ns + 2 * KVF_NS_PER_MS);
    assert_false(tier->ops->drained(tier));
    log->deadline_ns = 5; /* the inner tier's own comes first */
    assert_int_equal(tier->ops->deadline_ns(tier), 5);
    log->deadline_ns = UINT64_MAX;
    now_ns = start_ns + 2 * KVF_NS_PER_MS - 1;
    assert_int_equal(tier->ops->poll(tier, now_ns), 0);
    assert_int_equal(get.n_done, 0);
    now_ns++;
    assert_int_equal(tier->ops->poll(tier, now_ns), 1);
    assert_int_equal(get.n_done, 1);
    assert_int_equal(get.io.status, KVF_OK);
    assert_int_equal(get.record[100], 0x66);
    assert_true(tier->ops->deadline_ns(tier) == UINT64_MAX);
    assert_true(tier->ops->drained(tier));
    assert_true(log->n_polls >= 4);
    tier->ops->close(tier);
    assert_true(is_closed);
}

enum {
    N_CALLS = 50,
};

/* Load at once and note in which order, and when, they complete. */
static void jittered(const char *spec, unsigned orders[N_CALLS], uint64_t times_ns[N_CALLS])
{
    static struct log_call calls[N_CALLS];
    struct log_tier *log;
    struct kvf_tier *tier = open_delay(spec, &log);
    uint64_t start_ns = now_ns;

    for (unsigned i = 0; i < N_CALLS; i++) {
        log_call_init(&calls[i], 0, i);
        assert_int_equal(tier->ops->load(tier, &calls[i].io), KVF_OK);
    }
    for (unsigned n_seen = 0; n_seen < N_CALLS;) {
        unsigned n_done = tier->ops->poll(tier, now_ns);

        for (unsigned i = 0; i < N_CALLS; i++) {
            if (calls[i].n_done == 1 && calls[i].order >= n_seen) {
                orders[i] = calls[i].order;
                times_ns[i] = now_ns - start_ns;
            }
        }
        n_seen += n_done;
        if (n_seen < N_CALLS) {
            assert_true(tier->ops->deadline_ns(tier) > now_ns);
            now_ns = tier->ops->deadline_ns(tier);
        }
    }
    tier->ops->close(tier);
}

static void test_jitter(void **state)
{
    unsigned orders[N_CALLS], again[N_CALLS], other[N_CALLS], n_moved = 0;
    uint64_t times_ns[N_CALLS], times_again_ns[N_CALLS];

    (void)state;
    jittered("load:500us+1ms,seed=3", orders, times_ns);
    jittered("seed=3,load:500us+1ms", again, times_again_ns);
    assert_memory_equal(orders, again, sizeof(orders));
    assert_memory_equal(times_ns, times_again_ns, sizeof(times_ns));
    jittered("load:500us+1ms,seed=4", other, times_again_ns);
    assert_memory_not_equal(orders, other, sizeof(orders));
    for (unsigned i = 0; i < N_CALLS; i++) {
        assert_true(times_ns[i] >= 500 * KVF_NS_PER_US && times_ns[i] <= 1500 * KVF_NS_PER_US);
        n_moved += orders[i] != i;
    }
    assert_true(n_moved > N_CALLS / 2);
    /* without jitter the order stays */
    jittered("load:1ms,store:1s", orders, times_ns);
    for (unsigned i = 0; i < N_CALLS; i++) {
        assert_int_equal(orders[i], i);
        assert_int_equal(times_ns[i], KVF_NS_PER_MS);
    }
}

static void test_close_with_calls_under_way(void **state)
{
    struct log_tier *log;
    struct kvf_tier *tier = open_delay("store:1s", &log);
    struct log_call call;

    (void)state;
    log_call_init(&call, 0, 0);
    assert_int_equal(tier->ops->store(tier, &call.io), KVF_OK);
    tier->ops->poll(tier, now_ns);
    tier->ops->close(tier);
    assert_true(is_closed);
    assert_int_equal(call.n_done, 0);
}

static void test_wrong_specifications(void **state)
{
    static const struct {
        const char *spec, *word;
    } cases[] = {
        {"load", "delay \"load\": use store:TIME"},
        {"reserve:1ms", "delay \"reserve\": use"},
        {"load:", "delay of \"load\""},
        {"load:2", "delay of \"load\""},
        {"load:2ms+", "delay of \"load\""},
        {"load:2ms+x", "delay of \"load\""},
        {"seed=", "delay of \"seed=\""},
        {"load:1ms,", "delay \"\": use"},
    };
    struct log_tier *log = log_open(&is_closed);
    char error[KVF_ERROR_TEXT_BYTES], spec[400];
    struct kvf_tier *tier = NULL;

    (void)state;
    for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_int_equal(
            kvf_delay_open(&log->base, cases[i].spec, &test_env, &tier, error, sizeof(error)),
            KVF_ERR_INVALID);
        if (strstr(error, cases[i].word) == NULL) {
            fail_msg("%s gave: %s", cases[i].spec, error);
        }
        assert_null(tier);
    }
    memset(spec, 'x', sizeof(spec) - 1);
    spec[sizeof(spec) - 1] = '\0';
    assert_int_equal(kvf_delay_open(&log->base, spec, &test_env, &tier, error, sizeof(error)),
                     KVF_ERR_INVALID);
    assert_false(is_closed);
    log->base.ops->close(&log->base);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_empty_changes_nothing),
        cmocka_unit_test(test_fixed_delay),
        cmocka_unit_test(test_jitter),
        cmocka_unit_test(test_close_with_calls_under_way),
        cmocka_unit_test(test_wrong_specifications),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
