/* SPDX-License-Identifier: Apache-2.0
 *
 * outcome.c: what became of asynchronous requests.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/clock.h"
#include "tests/conformance/outcome.h"

#define EVENTS_MAX 64

static void take(struct outcome *outcome, const struct kvf_event *event)
{
    assert_int_equal(event->request, outcome->request);
    assert_false(outcome->is_over);
    if (event->kind == KVF_EVENT_BLOCK) {
        assert_true(event->index < outcome->n_blocks);
        assert_false(outcome->seen[event->index]);
        outcome->seen[event->index] = true;
        outcome->n_seen++;
        outcome->hits[event->index] = event->hit;
        return;
    }
    assert_int_equal(event->kind, KVF_EVENT_REQUEST);
    assert_int_equal(outcome->n_seen, outcome->n_blocks);
    outcome->is_over = true;
    outcome->status = event->hit.status;
    outcome->succeeded = event->index;
    outcome->lookup = event->lookup;
}

void outcomes_wait(struct kvf_client *client, struct outcome *outcomes, uint32_t n)
{
    uint64_t deadline_ns = kvf_now_ns() + 60 * KVF_NS_PER_S;
    uint32_t n_over = 0;

    for (uint32_t i = 0; i < n; i++) {
        n_over += outcomes[i].is_over;
    }
    while (n_over < n) {
        struct kvf_event events[EVENTS_MAX];
        uint32_t n_events = 0;
        int status = kvf_poll(client, events, EVENTS_MAX, 1000, &n_events);

        assert_true(status == KVF_OK || status == KVF_EMPTY);
        assert_true(kvf_now_ns() < deadline_ns);
        for (uint32_t i = 0; i < n_events; i++) {
            assert_true(events[i].user < n);
            take(&outcomes[events[i].user], &events[i]);
            n_over += outcomes[events[i].user].is_over;
        }
    }
}

void outcome_release(struct kvf_client *client, struct outcome *outcome)
{
    for (uint32_t i = 0; i < outcome->n_blocks; i++) {
        if (outcome->hits[i].status == KVF_OK) {
            assert_int_equal(kvf_lease_release(client, outcome->hits[i].lease), KVF_OK);
        }
    }
}
