/* SPDX-License-Identifier: Apache-2.0
 *
 * replay.h: a daemon that stores nothing but remembers everything: the agent itself, with its
 * index, admission, eviction and both tiers, over records of a few pages that stand for larger
 * ones, a drive that keeps no payload, and a clock that the caller moves. It answers what a store
 * of some size would have hit.
 *
 *   kvferry replay, plan      a trace from a file, as fast as it goes
 *   mode: observe             what clients ask the daemon for, a sample of it
 *
 * One thread uses a replay; nothing of it is shared with another one or with a running daemon.
 */
#ifndef KVF_AGENT_REPLAY_H
#define KVF_AGENT_REPLAY_H

#include <stddef.h>
#include <stdint.h>

#include "agent/config.h"
#include "base/status.h"

enum kvf_replay_limits {
    KVF_REPLAY_SLOTS_MIN = 16,       /* blocks that memory must hold */
    KVF_REPLAY_SLOTS_MAX = 16 << 20, /* blocks that memory and drive may hold, each */
};

/* Sizes as they would be configured. */
struct kvf_replay_config {
    uint64_t record_bytes; /* of one block with its record page */
    uint64_t dram_bytes;
    uint64_t nvme_bytes;   /* 0: no drive */
    uint64_t write_budget; /* bytes a second, 0: no limit */
    uint8_t admission;     /* enum kvf_config_admission */
    uint32_t one_in;       /* only one block in so many comes, by its name; 0: all do */
};

/* In blocks, since open. */
struct kvf_replay_counts {
    uint64_t requests;
    uint64_t blocks; /* looked up */
    uint64_t hits_dram;
    uint64_t hits_nvme;
    uint64_t puts;       /* stored in memory */
    uint64_t writes;     /* to the drive, with what was kept */
    uint64_t reinserted; /* of these: kept when their segment was reused */
    uint64_t rejected;   /* not written: write budget and second sight */
    uint64_t dropped;    /* not written: too many were waiting */
    uint64_t evicted;    /* from memory */
    uint64_t reclaimed;  /* from the drive */
};

/* Of one prompt: leading blocks that were there, by the tier where they were. */
struct kvf_replay_hits {
    uint32_t dram, nvme;
};

struct kvf_replay;

/* Blocks that memory and drive of this configuration hold. */
uint64_t kvf_replay_dram_blocks(const struct kvf_replay_config *config);
uint64_t kvf_replay_nvme_blocks(const struct kvf_replay_config *config);

/* Memory that such a replay takes, about; 0: it would be refused. */
uint64_t kvf_replay_bytes(const struct kvf_replay_config *whole);

/* why_out (KVF_ERROR_TEXT_BYTES) says in one line what is wrong and the cure. KVF_OK;
 * KVF_ERR_CONFIG; KVF_ERR_NO_MEMORY; KVF_ERR_INTERNAL. */
int kvf_replay_open(const struct kvf_replay_config *whole, struct kvf_replay **replay_out,
                    char *why_out, size_t why_bytes);

/* One prompt: look its blocks up, fetch the leading ones that are there, store the others. A
 * block's number stands for all blocks before it, too. at_ns: since the beginning; a time before
 * the last request's counts as that. hits_out may be NULL. KVF_OK;
 * KVF_ERR_INTERNAL: the agent did not answer. */
int kvf_replay_request(struct kvf_replay *replay, uint64_t at_ns, const uint64_t *blocks,
                       uint32_t n_blocks, struct kvf_replay_hits *hits_out);

void kvf_replay_counts(const struct kvf_replay *replay, struct kvf_replay_counts *counts_out);

/* Accepts NULL. */
void kvf_replay_close(struct kvf_replay *replay);

#endif /* KVF_AGENT_REPLAY_H */
