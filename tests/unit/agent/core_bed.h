/* SPDX-License-Identifier: Apache-2.0
 *
 * core_bed.h: an agent of which only what leases and admission need is there: an index, memory, one
 * drive that is never asked, pools, and a clock that the test moves.
 */
#ifndef KVF_TESTS_UNIT_AGENT_CORE_BED_H
#define KVF_TESTS_UNIT_AGENT_CORE_BED_H

#include "agent/core.h"

#define BED_ARENA_BYTES  (32u << 20)
#define BED_RECORD_BYTES 65536u
#define BED_LEASES       8

struct core_bed {
    struct kvf_agent agent;
    struct kvf_config config;
    struct kvf_session sessions[2];
    uint64_t words[2][BED_LEASES]; /* the lease tables that clients would see */
    uint8_t next_key;
};

/* Fails the test if anything is missing. */
struct core_bed *core_bed_create(void);
void core_bed_destroy(struct core_bed *bed);

/* A READY block in memory of BED_RECORD_BYTES under a key of its own. */
struct kvf_entry *core_bed_block(struct core_bed *bed);

#endif /* KVF_TESTS_UNIT_AGENT_CORE_BED_H */
