/* SPDX-License-Identifier: Apache-2.0
 *
 * test_nvme_rig.h: a drive tier on a simulated drive, and a host that remembers what it was told:
 * the shadow model that the drive tier's tests compare with.
 *
 * A key is a number; its record (size, content) follows from the number and a version, so that any
 * record that comes back can be checked byte for byte.
 */
#ifndef KVF_TEST_NVME_RIG_H
#define KVF_TEST_NVME_RIG_H

#include "base/env.h"
#include "codec/block_format.h"
#include "tiers/io_sim.h"
#include "tiers/tier_nvme.h"

#define RIG_KEYS             256
#define RIG_RECORD_PAGES_MAX 24
#define RIG_NAMESPACES       4

enum rig_state {
    RIG_ABSENT = 0,
    RIG_STORING,
    RIG_STORED,
};

struct rig_key {
    uint8_t state; /* enum rig_state */
    bool durable;  /* acknowledged as being on stable storage, and not given up since */
    bool hot;      /* reclaim shall keep it */
    bool purged;   /* must never come back */
    bool found;    /* by the last recovery */
    kvf_location location;
    uint64_t sequence; /* by recovered */
    struct kvf_tier_io io;
    uint8_t *record;
};

struct rig {
    struct kvf_io_sim_config disk_config;
    struct kvf_io_sim_disk *disk; /* NULL: a real file */
    struct kvf_nvme_config config;
    struct kvf_tier *tier;
    struct kvf_work_queue *work;
    struct kvf_random_seeded random;
    struct rig_key keys[RIG_KEYS];
    uint8_t *load_buffer;
    char why[256];
    int journal_fd; /* -1, or where a process that may be killed writes what the model learns */
    /* what the host was told */
    uint32_t n_reclaimed, n_moved, n_lost, n_recovered, n_done;
    uint64_t credit_bytes;
    uint64_t reinsert_budget_bytes;
};

/* The same over a real file (which need not exist), with real time and the threads of engine. */
void rig_init_file(struct rig *rig, const char *path, uint64_t segment_bytes, uint32_t n_segments,
                   enum kvf_io_engine engine);

/* A drive with n_segments segments of segment_bytes and a formatted store on it; not open. */
void rig_init(struct rig *rig, uint64_t seed, uint64_t segment_bytes, uint32_t n_segments);
void rig_fini(struct rig *rig);

/* One line of the journal: a key has become durable ('+'), or need not be any more ('-'). */
struct rig_journal_entry {
    uint32_t key;
    uint32_t what;
};

/* Open and recover. What the model holds is kept; found says what was recovered. */
int rig_open(struct rig *rig);
/* As a kill: calls in progress are forgotten, what was written stays. */
void rig_close(struct rig *rig);
/* As a loss of power, then rig_close; model: what was not durable is absent. */
void rig_crash(struct rig *rig);

/* One moment: move time to the next completion, poll everything. False: nothing was in flight. */
bool rig_step(struct rig *rig);
void rig_run(struct rig *rig); /* until nothing moves any more */

/* From now on the content of records is noise (as it is at first), or can be packed: opaque bytes
 * that say little. One in seven is noise all the same. */
void rig_records_soft(bool soft);

uint32_t rig_namespace(uint32_t key);
uint64_t rig_record_bytes(uint32_t key);
void rig_record_fill(uint32_t key, uint8_t *record);
void rig_name_fill(const struct rig *rig, uint32_t key, struct kvf_block_name *name_out);

/* Purge the namespace here and in the model. The status that done got, or that of the call. */
int rig_purge(struct rig *rig, uint32_t namespace_id);

/* Start a store; the status of the call. */
int rig_store(struct rig *rig, uint32_t key, bool durable);
/* Load and compare. KVF_OK only for right bytes; asserts that no wrong ones come. */
int rig_load(struct rig *rig, uint32_t key);
int rig_load_at(struct rig *rig, uint32_t key, kvf_location location);
void rig_drop(struct rig *rig, uint32_t key);

/* Every stored key loads, and every key that must be there is. */
void rig_check_all(struct rig *rig);

#endif /* KVF_TEST_NVME_RIG_H */
