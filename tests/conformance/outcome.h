/* SPDX-License-Identifier: Apache-2.0
 *
 * outcome.h: what became of asynchronous requests, checked against the order that the protocol
 * promises: each block once, then the request once, and nothing after that.
 */
#ifndef KVF_TESTS_CONFORMANCE_OUTCOME_H
#define KVF_TESTS_CONFORMANCE_OUTCOME_H

#include <stdbool.h>
#include <stdint.h>

#include "kvferry.h"

/* One request. The caller fills the first three members and submits with `user` = its number in an
 * array of outcomes. */
struct outcome {
    uint64_t request;
    uint32_t n_blocks;    /* block events that must come */
    struct kvf_hit *hits; /* n_blocks */
    bool seen[KVF_REQUEST_KEYS_MAX];
    uint32_t n_seen;
    bool is_over;
    int32_t status;
    uint32_t succeeded;
    struct kvf_lookup_result lookup;
};

/* Poll until all n requests are over; fails the test on a broken order, or if it takes a minute. */
void outcomes_wait(struct kvf_client *client, struct outcome *outcomes, uint32_t n);

/* Release what the hits of a get have leased. */
void outcome_release(struct kvf_client *client, struct outcome *outcome);

#endif /* KVF_TESTS_CONFORMANCE_OUTCOME_H */
