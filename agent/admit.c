/* SPDX-License-Identifier: Apache-2.0
 *
 * admit.c: which blocks go to a drive. A block is of no use without the blocks before it: one whose
 * parent is not on (or on its way to) a drive is never written. Of the others, a block is written
 * at first sight while the write budget's bucket is at least half full, at second sight below that,
 * and never when the bucket is empty. nvme.admission takes one of the two rules for all levels.
 *
 * The rule is applied to each block, not to the head of its chain: prompts of one application begin
 * alike, and behind one head that is written their chains differ.
 *
 * Sights are remembered in sets of tags, oldest out first. What is forgotten early costs one more
 * sight, and the blocks behind it one more, too: a table whose entries overwrite each other at
 * random would break most long chains.
 */
#include "agent/core.h"

#include <string.h>

/* How long the budget may be saved up: a burst of this many seconds of it is allowed. */
#define BUCKET_SECONDS   60
#define BUCKET_BYTES_MIN (256ll << 20)

void kvf_admit_init(struct kvf_drive *drive, uint64_t rate_bytes_s, uint64_t credit_bytes)
{
    struct kvf_bucket *bucket = &drive->bucket;
    uint64_t burst_bytes = drive->agent->ports.burst_bytes;
    int64_t least_bytes = burst_bytes != 0 ? (int64_t)burst_bytes : BUCKET_BYTES_MIN;

    bucket->rate_bytes_s = rate_bytes_s;
    bucket->capacity_bytes = (int64_t)rate_bytes_s * BUCKET_SECONDS;
    if (bucket->capacity_bytes < least_bytes) {
        bucket->capacity_bytes = least_bytes;
    }
    bucket->tokens_bytes = (int64_t)credit_bytes;
    if (bucket->tokens_bytes > bucket->capacity_bytes) {
        bucket->tokens_bytes = bucket->capacity_bytes;
    }
    bucket->updated_ns = kvf_env_now_ns(&drive->agent->env);
}

static void refill(struct kvf_drive *drive)
{
    struct kvf_bucket *bucket = &drive->bucket;
    uint64_t passed_ns = drive->agent->now_ns - bucket->updated_ns;
    uint64_t limit_ns = BUCKET_SECONDS * 2 * KVF_NS_PER_S;

    if (drive->agent->now_ns <= bucket->updated_ns) {
        return;
    }
    passed_ns = passed_ns > limit_ns ? limit_ns : passed_ns;
    /* microseconds: the product stays in range up to 100 GB/s */
    bucket->tokens_bytes += (int64_t)(bucket->rate_bytes_s * (passed_ns / KVF_NS_PER_US) /
                                      1000000u);
    if (bucket->tokens_bytes > bucket->capacity_bytes) {
        bucket->tokens_bytes = bucket->capacity_bytes;
    }
    bucket->updated_ns = drive->agent->now_ns;
}

void kvf_admit_spend(struct kvf_drive *drive, uint64_t bytes)
{
    if (drive->bucket.rate_bytes_s != 0) {
        refill(drive);
        drive->bucket.tokens_bytes -= (int64_t)bytes;
    }
}

void kvf_admit_refund(struct kvf_drive *drive, uint64_t bytes)
{
    struct kvf_bucket *bucket = &drive->bucket;

    if (bucket->rate_bytes_s != 0) {
        bucket->tokens_bytes += (int64_t)bytes;
        if (bucket->tokens_bytes > bucket->capacity_bytes) {
            bucket->tokens_bytes = bucket->capacity_bytes;
        }
    }
}

uint64_t kvf_admit_credit(struct kvf_drive *drive)
{
    return drive->bucket.tokens_bytes > 0 ? (uint64_t)drive->bucket.tokens_bytes : 0;
}

bool kvf_admit_allows_reinsertion(struct kvf_drive *drive)
{
    if (drive->bucket.rate_bytes_s == 0) {
        return true;
    }
    refill(drive);
    return drive->bucket.tokens_bytes >= drive->bucket.capacity_bytes / 2;
}

/* Has this block been seen before? It has from now on. */
static bool seen_before(struct kvf_agent *agent, const uint8_t key_id[32])
{
    uint32_t word, tag;
    uint32_t *set;

    memcpy(&word, key_id, sizeof(word));
    memcpy(&tag, key_id + 8, sizeof(tag));
    set = agent->ghosts + word % (KVF_GHOST_ENTRIES / KVF_GHOST_WAYS) * KVF_GHOST_WAYS;
    for (uint32_t i = 0; i < KVF_GHOST_WAYS; i++) {
        if (set[i] == tag) {
            return true;
        }
    }
    memmove(set + 1, set, (KVF_GHOST_WAYS - 1) * sizeof(*set));
    set[0] = tag;
    return false;
}

static bool budget_allows(struct kvf_drive *drive, bool is_seen)
{
    struct kvf_bucket *bucket = &drive->bucket;
    bool is_limited = bucket->rate_bytes_s != 0;

    if (is_limited) {
        refill(drive);
        if (bucket->tokens_bytes <= 0) {
            return false;
        }
    }
    switch ((enum kvf_config_admission)drive->config->admission) {
    case KVF_ADMISSION_ALL:
        return true;
    case KVF_ADMISSION_SECOND_SIGHT:
        return is_seen;
    case KVF_ADMISSION_AUTO:
        break;
    }
    return is_seen || !is_limited || bucket->tokens_bytes >= bucket->capacity_bytes / 2;
}

/* Shall the next block of this chain be written, and where? *drive_out comes with the place of
 * heads, and is changed to the parent's. */
static bool choose_drive(struct kvf_agent *agent, const struct kvf_entry *entry, bool has_parent,
                         const uint8_t parent_key_id[32], uint32_t *drive_out)
{
    bool is_seen = seen_before(agent, entry->key_id);
    const struct kvf_entry *parent;

    if (has_parent) {
        parent = kvf_index_find(&agent->index, parent_key_id, entry->shard);
        if (parent == NULL || (parent->nvme == KVF_NVME_NONE && !parent->is_admitted)) {
            return false;
        }
        *drive_out = parent->drive; /* a chain lives and dies with one drive */
    } else if (!entry->is_head) {
        return false; /* a reader that begins amid a chain does not say what is before */
    }
    return budget_allows(&agent->drives[*drive_out], is_seen);
}

void kvf_admit_decide(struct kvf_agent *agent, struct kvf_entry *entry, bool has_parent,
                      const uint8_t parent_key_id[32], bool is_durable)
{
    uint32_t drive;
    uint32_t word;

    if (agent->n_drives == 0 || entry->is_no_write || agent->is_draining) {
        return;
    }
    memcpy(&word, entry->key_id + 16, sizeof(word));
    drive = word % agent->n_drives;
    if (choose_drive(agent, entry, has_parent, parent_key_id, &drive) || is_durable) {
        entry->is_admitted = 1;
        entry->drive = drive & 7u;
    } else {
        agent->metrics.nvme_rejected_blocks += !entry->is_hit; /* once a block, not once a hit */
    }
}

void kvf_admit_write(struct kvf_agent *agent, struct kvf_entry *entry)
{
    if (kvf_place_write(agent, entry, entry->drive, false) != KVF_OK) {
        agent->metrics.nvme_dropped_blocks++;
        entry->is_admitted = 0; /* closes the chain: what follows would be of no use */
    }
}

void kvf_admit_consider(struct kvf_agent *agent, struct kvf_entry *entry, bool has_parent,
                        const uint8_t parent_key_id[32])
{
    if (entry->nvme != KVF_NVME_NONE || !kvf_entry_in_dram(entry)) {
        return;
    }
    kvf_admit_decide(agent, entry, has_parent, parent_key_id, false);
    if (entry->is_admitted) {
        kvf_admit_write(agent, entry);
    }
}
