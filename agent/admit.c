/* SPDX-License-Identifier: Apache-2.0
 *
 * admit.c: which blocks go to a drive. The decision is made for chains, at their head, because a
 * block is of no use without the blocks before it: a block whose parent is not on (or on its way
 * to) a drive is never written. A head is written at first sight while the write budget's bucket is
 * at least half full, at second sight below that, and never when the bucket is empty.
 *
 * Second sight is remembered in a table of 64-bit tags that overwrite each other: forgetting a head
 * early costs one more sight, and nothing else.
 */
#include "agent/core.h"

#include <string.h>

/* How long the budget may be saved up: a burst of this many seconds of it is allowed. */
#define BUCKET_SECONDS   60
#define BUCKET_BYTES_MIN (256ll << 20)

void kvf_admit_init(struct kvf_drive *drive, uint64_t rate_bytes_s, uint64_t credit_bytes)
{
    struct kvf_bucket *bucket = &drive->bucket;

    bucket->rate_bytes_s = rate_bytes_s;
    bucket->capacity_bytes = (int64_t)rate_bytes_s * BUCKET_SECONDS;
    if (bucket->capacity_bytes < BUCKET_BYTES_MIN) {
        bucket->capacity_bytes = BUCKET_BYTES_MIN;
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

/* Has this head been seen before? It has from now on. */
static bool seen_before(struct kvf_agent *agent, const uint8_t key_id[32])
{
    uint64_t tag, word;

    memcpy(&word, key_id, sizeof(word));
    memcpy(&tag, key_id + 8, sizeof(tag));
    word &= KVF_GHOST_ENTRIES - 1;
    if (agent->ghosts[word] == tag) {
        return true;
    }
    agent->ghosts[word] = tag;
    return false;
}

static bool head_is_admitted(struct kvf_drive *drive, const struct kvf_entry *entry)
{
    struct kvf_bucket *bucket = &drive->bucket;
    bool again = seen_before(drive->agent, entry->key_id);

    if (bucket->rate_bytes_s == 0) {
        return true;
    }
    refill(drive);
    if (bucket->tokens_bytes >= bucket->capacity_bytes / 2) {
        return true;
    }
    return again && bucket->tokens_bytes > 0;
}

/* Shall the next block of this chain be written, and where? *drive_out comes with the place of
 * heads, and is changed to the parent's. */
static bool choose_drive(struct kvf_agent *agent, const struct kvf_entry *entry, bool has_parent,
                         const uint8_t parent_key_id[32], uint32_t *drive_out)
{
    const struct kvf_entry *parent;

    if (!has_parent) {
        /* a reader that begins in the middle of a chain does not say what is before */
        if (!entry->is_head) {
            return false;
        }
        return head_is_admitted(&agent->drives[*drive_out], entry);
    }
    parent = kvf_index_find(&agent->index, parent_key_id, entry->shard);
    if (parent == NULL || (parent->nvme == KVF_NVME_NONE && !parent->is_admitted)) {
        return false;
    }
    *drive_out = parent->drive; /* a chain lives and dies with one drive */
    refill(&agent->drives[parent->drive]);
    return agent->drives[parent->drive].bucket.rate_bytes_s == 0 ||
           agent->drives[parent->drive].bucket.tokens_bytes > 0;
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
