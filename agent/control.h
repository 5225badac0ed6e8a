/* SPDX-License-Identifier: Apache-2.0
 *
 * control.h: questions of the admin thread to the reactor. The admin thread allocates a request
 * with room
 * for the answer, posts it and waits; the reactor fills it between two turns of its loop. Nothing
 * else of
 * the reactor's state is visible to the admin thread.
 */
#ifndef KVF_AGENT_CONTROL_H
#define KVF_AGENT_CONTROL_H

#include <stdbool.h>
#include <stdint.h>

#include "agent/metrics.h"
#include "kvferry.h"
#include "tiers/tier.h"

#define KVF_CONTROL_DRIVES_MAX   8
#define KVF_CONTROL_HBM_MAX      16
#define KVF_CONTROL_CLASSES_MAX  128
#define KVF_CONTROL_PROFILES_MAX 32

enum kvf_control_op {
    KVF_CONTROL_STAT = 1,       /* fills stat */
    KVF_CONTROL_CLIENTS = 2,    /* fills rows with struct kvf_control_client */
    KVF_CONTROL_BLOCKS = 3,     /* fills rows with struct kvf_control_block, from cursor on */
    KVF_CONTROL_NAMESPACES = 4, /* fills rows with struct kvf_control_namespace */
    KVF_CONTROL_VERIFY =
        5, /* checks up to max_rows blocks from cursor on; counts in verified, bad */
    KVF_CONTROL_EVICT = 6,        /* key_id, or all of namespace_id that are in no lease */
    KVF_CONTROL_PURGE = 7,        /* namespace_id: forget for good, persisted before the answer */
    KVF_CONTROL_DRAIN = 8,        /* begin to stop, as SIGTERM does */
    KVF_CONTROL_CALIBRATIONS = 9, /* fills calibrations */
    KVF_CONTROL_RELOAD = 10,      /* read calibration.dir again, as SIGHUP does; fills text */
    KVF_CONTROL_DISABLE = 11,     /* namespace_id, 0: all: misses only; fills text */
    KVF_CONTROL_ENABLE = 12,      /* the opposite; fills text */
    KVF_CONTROL_PEERS = 13,       /* fills rows with struct kvf_control_peer */
    KVF_CONTROL_EVENTS = 15, /* fills rows with struct kvf_control_event: from event `number` on;
                                number 0: of what is here, from cursor on */
    KVF_CONTROL_TRACE = 14,  /* fills rows with u64: prompts as agent/observe.h has them; bad: how
                               many were left out */
};

struct kvf_control_client {
    uint64_t connection_id;
    uint64_t namespace_id;
    char name[64];
    char profile[16];
    char profile_text[256]; /* where it comes from */
    char tenant[64];
    char state[16];    /* "attaching", "ready", "draining" */
    char gpu_path[8];  /* "agent", "engine"; "": it uses no GPU, or has not said so */
    char gpu_uuid[48]; /* which it asked for */
    int32_t pid;       /* from peer credentials: for people only, 0 across containers */
    uint32_t uid;
    uint16_t shard, shard_count;
    uint16_t protocol_version;
    uint32_t inflight_requests;
    uint64_t leased_bytes, staging_bytes;
    uint64_t puts, gets, hits, misses;
    uint64_t attached_s; /* seconds since attach */
};

struct kvf_control_peer {
    char name[64];
    char address[64]; /* "": it has made the link */
    char state[16];   /* made by this node: "waiting", "snapshot", "ready", "resting";
                         by the other one: "telling", "told" */
    bool is_asked;    /* made by this node: it is asked for blocks */
    uint64_t incarnation;
    uint64_t linked_s; /* seconds since it came up */
    uint64_t blocks;   /* it is said to have */
    uint64_t fetched_blocks, fetched_bytes, failed_blocks;
    uint64_t served_blocks, served_bytes;
};

/* A block that came or went, or is here. */
struct kvf_control_event {
    uint8_t key_id[32];
    uint32_t record_bytes; /* removed: 0 */
    uint16_t shard;
    bool is_removed;
    uint8_t tier; /* enum kvf_tier_kind, where it is now; 0: it is not here any more */
};

struct kvf_control_block {
    uint8_t key_id[32];
    uint64_t namespace_id;
    uint64_t record_bytes;
    uint16_t shard, shard_count;
    uint8_t in_hbm, in_dram, in_nvme; /* 0 or 1; in_nvme 2: its write is queued */
    uint8_t drive;
    uint8_t pinned;
    uint32_t depth;
    char state[12]; /* "ready", "filling", "loading" */
};

struct kvf_control_namespace {
    uint64_t namespace_id;
    uint64_t epoch;
    char tenant[64];
    char label[64];
    char profile[16];
    bool lossless;
    bool disabled;
    uint32_t clients;
    uint64_t blocks, dram_bytes, nvme_bytes;
    uint64_t gpu_ns, gpu_decode_ns; /* of its clients' kernels; the second is a part of the first */
};

struct kvf_control_drive {
    char path[256];
    char engine[16];
    char why[192];
    struct kvf_tier_stat tier;
};

struct kvf_control_class {
    uint64_t slot_bytes;
    uint32_t areas, slots, used_slots;
    bool exact;
};

struct kvf_control_hbm {
    char uuid[48]; /* "": the GPU has not been there yet */
    struct kvf_tier_stat tier;
};

struct kvf_control_profile {
    char name[16];
    bool is_calibrated; /* a file of calibration.dir has passed it, or brought it */
    uint32_t clients;
};

struct kvf_control_stat {
    uint64_t incarnation;
    uint64_t uptime_s;
    char version[32];
    bool ready, draining;
    bool disabled; /* all namespaces are */
    uint32_t clients, clients_max;
    uint64_t index_entries, index_capacity;
    uint64_t staging_used_bytes, staging_total_bytes;
    struct kvf_tier_stat dram;
    uint64_t dram_arena_bytes, dram_populated_bytes, dram_huge_bytes;
    uint64_t dram_memory_refusals;
    double dram_fill; /* stored bytes over area bytes of full areas; 0 without full areas */
    uint32_t n_drives, n_classes, n_hbm, n_profiles;
    struct kvf_control_profile profiles[KVF_CONTROL_PROFILES_MAX]; /* in force, of clients */
    struct kvf_control_hbm hbm[KVF_CONTROL_HBM_MAX];
    struct kvf_control_drive drives[KVF_CONTROL_DRIVES_MAX];
    struct kvf_control_class classes[KVF_CONTROL_CLASSES_MAX];
    struct kvf_metrics metrics;
};

struct kvf_calibrations;

struct kvf_control {
    uint8_t op; /* enum kvf_control_op */
    uint8_t key_id[32];
    bool has_key_id;
    uint64_t namespace_id; /* 0: all */
    uint64_t cursor;       /* 0: from the start */
    uint64_t number;       /* of an event; in the answer: of the next one */
    uint32_t max_rows;
    void *rows; /* array of max_rows of the op's row type; owned by the asker */
    struct kvf_control_stat *stat;

    /* the answer */
    int32_t status;
    uint32_t n_rows;
    uint64_t next_cursor; /* 0: that was all */
    uint64_t incarnation; /* events: of this daemon, which counts from 1 */
    uint64_t verified, bad, evicted;
    uint64_t places;                       /* verify: where next_cursor ends */
    struct kvf_calibrations *calibrations; /* NULL: none are configured; the asker holds it */
    char text[256];                        /* cause, if status < 0 */

    /* On the reactor thread, once; the asker owns the struct again afterwards. */
    void (*done)(struct kvf_control *control);
    void *owner;
};

struct kvf_agent;

/* Post a question. Any thread. KVF_OK: done will be called; KVF_ERR_BUSY: too many questions
 * waiting. */
int kvf_agent_post(struct kvf_agent *agent, struct kvf_control *control);

#endif /* KVF_AGENT_CONTROL_H */
