/* SPDX-License-Identifier: Apache-2.0
 *
 * sim_work.h: a work queue in virtual time: each job runs at a random moment between submit and
 * done, and jobs end in any order.
 */
#ifndef KVF_TESTS_SIM_WORK_H
#define KVF_TESTS_SIM_WORK_H

#include "base/random.h"
#include "tiers/work.h"

struct sim_work_config {
    const uint64_t *now_ns; /* borrowed: the clock */
    struct kvf_random_seeded *random;
    uint64_t delay_min_ns, delay_max_ns;
    uint32_t max_jobs; /* more: KVF_ERR_BUSY */
};

/* Aborts without memory. Closing runs what has been submitted; nobody hears of it. */
struct kvf_work_queue *sim_work_open(const struct sim_work_config *config);

/* When the next job wants to run or end; UINT64_MAX: there is none. */
uint64_t sim_work_next_ns(const struct kvf_work_queue *queue);

#endif /* KVF_TESTS_SIM_WORK_H */
