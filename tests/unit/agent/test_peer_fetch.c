/* SPDX-License-Identifier: Apache-2.0
 *
 * test_peer_fetch.c: how long a block is asked for from peers: peers.timeout from the first fetch
 * that has started, whoever is asked after that and however long its turn takes to come. The clock
 * is the test's.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "agent/peers.h"
#include "base/clock.h"

#define TIMEOUT_S  4
#define TIMEOUT_NS (TIMEOUT_S * KVF_NS_PER_S)
#define START_NS   (1000 * KVF_NS_PER_S)
#define BYTES      8192

static struct kvf_config config;
static struct kvf_agent *agent;
static struct kvf_flight flight;

/* Some nodes are linked, and have the block. The first one is chosen. */
static void open_with(uint32_t holders)
{
    memset(&flight, 0, sizeof(flight));
    config.peers_timeout = TIMEOUT_S;
    agent = calloc(1, sizeof(*agent));
    assert_non_null(agent);
    agent->config = &config;
    agent->now_ns = START_NS;
    agent->peers = calloc(1, sizeof(*agent->peers));
    assert_non_null(agent->peers);
    agent->peers->agent = agent;
    assert_int_equal(kvf_hints_open(&agent->peers->hints, 64), KVF_OK);
    flight.record_bytes = BYTES;
    for (uint32_t i = 0; i < holders; i++) {
        struct kvf_peer_link *link = &agent->peers->links[i];

        link->link = i + 1;
        link->is_initiator = true;
        link->source = kvf_hints_source_open(&agent->peers->hints);
        kvf_hints_add(&agent->peers->hints, link->source, flight.io.name.key_id, 0, BYTES);
    }
    flight.io.location = 1;
    agent->peers->links[0].inflight = 1;
}

static int teardown(void **state)
{
    (void)state;
    kvf_hints_close(&agent->peers->hints);
    free(agent->peers);
    free(agent);
    return 0;
}

static int begin(void)
{
    flight.started_ns = agent->now_ns; /* as each attempt does */
    return kvf_peers_fetch_begin(agent, &flight);
}

/* What the network has no room for has not begun. */
static void test_busy_takes_no_time(void **state)
{
    (void)state;
    open_with(1);
    for (int i = 0; i < 10; i++) {
        assert_int_equal(begin(), KVF_OK);
        assert_int_equal(flight.io.deadline_ns, agent->now_ns + TIMEOUT_NS);
        agent->now_ns += TIMEOUT_NS;
    }
}

static void test_others_take_the_rest(void **state)
{
    (void)state;
    open_with(2);
    assert_int_equal(begin(), KVF_OK);
    assert_int_equal(flight.io.deadline_ns, START_NS + TIMEOUT_NS / 2);
    agent->now_ns = flight.io.deadline_ns;
    assert_true(kvf_peers_other(agent, &flight));
    assert_int_equal(flight.io.location, 2);
    assert_int_equal(begin(), KVF_OK);
    assert_int_equal(flight.io.deadline_ns, START_NS + TIMEOUT_NS);
    agent->now_ns = flight.io.deadline_ns;
    assert_false(kvf_peers_other(agent, &flight));
}

/* Its turn comes too late: nobody is asked, with another one left or without. */
static void test_turn_comes_too_late(void **state)
{
    (void)state;
    for (uint32_t holders = 2; holders <= 3; holders++) {
        open_with(holders);
        assert_int_equal(begin(), KVF_OK);
        agent->now_ns += TIMEOUT_NS / 2;
        assert_true(kvf_peers_other(agent, &flight));
        flight.io.deadline_ns = 0;
        agent->now_ns = START_NS + TIMEOUT_NS - 1;
        assert_int_equal(begin(), KVF_OK);
        assert_in_range(flight.io.deadline_ns, START_NS + TIMEOUT_NS - 1, START_NS + TIMEOUT_NS);
        flight.io.deadline_ns = 0;
        for (int i = 0; i < 3; i++) {
            agent->now_ns = START_NS + TIMEOUT_NS + (uint64_t)i * KVF_NS_PER_S;
            assert_int_equal(begin(), KVF_MISS);
            assert_int_equal(flight.io.deadline_ns, 0);
        }
        for (uint32_t i = 0; i < holders; i++) {
            assert_int_equal(agent->peers->links[i].failures, 0);
        }
        if (holders == 2) {
            (void)teardown(NULL);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_busy_takes_no_time, teardown),
        cmocka_unit_test_teardown(test_others_take_the_rest, teardown),
        cmocka_unit_test_teardown(test_turn_comes_too_late, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
