/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_hbm.h: the tier in a GPU's memory: slots like those of dram (tier_dram.h), in pieces that
 * another process has, and copies between them and memory of this process.
 *
 *   store   record in DRAM --worker: copy, sum--> window --port--> slot
 *   load    slot --port--> window --worker: copy, sum, judge--> record in DRAM
 *
 *   slot   [head, right-aligned][record page][payload]
 *
 * The window is memory shared with whoever copies. That process sees nothing else of this one, and
 * nothing that comes from it is believed before its sum and its name fit. A head is what a reader
 * on a processor would have to read in the payload; it goes in with the record, and never out.
 *
 * A port is one device: it makes pieces and copies ranges, and checks nothing but bounds. The
 * daemon's talks to a worker process; simulations have memory of their own.
 *
 * Owner of everything: the reactor. Nothing blocks after open.
 */
#ifndef KVF_TIERS_TIER_HBM_H
#define KVF_TIERS_TIER_HBM_H

#include "tiers/tier_dram.h"

enum kvf_hbm_limits {
    KVF_HBM_HEAD_BYTES = 8192,  /* before the record page, in each slot */
    KVF_HBM_MOVES_MAX = 32,     /* copies on their way, of one device */
    KVF_HBM_UNIT_BYTES = 65536, /* of the window */
};

#define KVF_HBM_PIECE_BYTES  (UINT64_C(256) << 20)
#define KVF_HBM_WINDOW_BYTES (UINT64_C(72) << 20) /* the largest record fits */

/* One copy. Owned by the caller, untouched by it until done. */
struct kvf_hbm_copy {
    uint32_t piece_id;
    bool is_in; /* into the device */
    uint64_t piece_offset;
    uint64_t window_offset;
    uint64_t bytes;
    int32_t status;
    void (*done)(struct kvf_hbm_copy *copy); /* on the reactor */
    void *owner;
    struct kvf_hbm_copy *next; /* for the port */
    uint64_t number;           /* for the port */
};

/* What a port tells its tier: from inside poll, or while nothing else runs on the reactor. So for
 * done of its copies. */
struct kvf_hbm_port_events {
    void *ctx;
    void (*up)(void *ctx); /* pieces can be made */
    /* Every piece is gone. Copies have been completed before, with KVF_ERR_TIER_OFF. */
    void (*down)(void *ctx);
    /* fd goes to the tier; -1 with a failure. */
    void (*made)(void *ctx, uint32_t piece_id, int fd, int status);
};

struct kvf_hbm_port;

struct kvf_hbm_port_ops {
    /* Once, before everything else. The window stays the tier's. */
    void (*start)(struct kvf_hbm_port *port, const struct kvf_hbm_port_events *events,
                  int window_fd, void *window, uint64_t window_bytes);
    /* KVF_OK: made follows, or down; KVF_ERR_BUSY: not now, or down. */
    int (*make)(struct kvf_hbm_port *port, uint32_t piece_id, uint64_t bytes);
    void (*drop)(struct kvf_hbm_port *port, uint32_t piece_id);
    /* KVF_OK: done will be called once; KVF_ERR_BUSY; KVF_ERR_TIER_OFF. */
    int (*copy)(struct kvf_hbm_port *port, struct kvf_hbm_copy *copy);
    unsigned (*poll)(struct kvf_hbm_port *port, uint64_t now_ns);
    uint64_t (*deadline_ns)(const struct kvf_hbm_port *port);
    /* Which GPU; "": not known so far. */
    const char *(*uuid)(const struct kvf_hbm_port *port);
    /* Copies that have not ended are forgotten. */
    void (*close)(struct kvf_hbm_port *port);
};

struct kvf_hbm_port {
    const struct kvf_hbm_port_ops *ops;
};

struct kvf_hbm_events {
    void *ctx;
    void (*piece_added)(void *ctx, uint32_t piece_id);
    void (*piece_dropped)(void *ctx, uint32_t piece_id);
    /* All slots are gone: drop those that are READY before this returns. */
    void (*lost)(void *ctx);
};

struct kvf_hbm_config {
    uint64_t bytes; /* of device memory; rounded down to whole areas */
    uint64_t piece_bytes;
    uint64_t window_bytes;
    uint16_t n_tenants;
    struct kvf_env env;
    struct kvf_work_queue *work; /* borrowed until close */
    struct kvf_hbm_port *port;   /* taken over by open, also if it fails */
    struct kvf_tier_host host;   /* may_evict and evict; one block a call, not its set */
    struct kvf_hbm_events events;
};

/* Window and piece sizes for a budget. */
void kvf_hbm_config_init(struct kvf_hbm_config *config, uint64_t bytes);

/* Private memory that open takes, for --check: tables, and the window. */
uint64_t kvf_hbm_metadata_bytes(const struct kvf_hbm_config *config);

/* KVF_OK; KVF_ERR_INVALID, _NO_MEMORY: why_out says why. */
int kvf_hbm_open(const struct kvf_hbm_config *config, struct kvf_tier **tier_out, char *why_out,
                 size_t why_bytes);

/* The account of slots: for pin, unpin, touch, publish, state, locate, pieces of tier_dram.h. */
struct kvf_tier *kvf_hbm_slots(struct kvf_tier *tier);

/* As it was given to open. */
struct kvf_hbm_port *kvf_hbm_port_of(const struct kvf_tier *tier);

/* Which GPU; "" before it has been there. */
const char *kvf_hbm_uuid(const struct kvf_tier *tier);

/* Is the device there? */
bool kvf_hbm_is_up(const struct kvf_tier *tier);

/* Can a record of this size be kept here? */
bool kvf_hbm_fits(const struct kvf_tier *tier, uint64_t record_bytes);

/* Copy io->record, which the caller keeps as it is until done, and the head before it into the
 * FILLING slot io->location. done: KVF_OK; KVF_ERR_CORRUPT: not the record that its page names;
 * KVF_ERR_IO, _TIER_OFF. KVF_OK; KVF_ERR_BUSY; KVF_ERR_TIER_OFF. */
int kvf_hbm_store(struct kvf_tier *tier, struct kvf_tier_io *io, const void *head,
                  size_t head_bytes);

extern const struct kvf_tier_ops kvf_tier_hbm_ops;

#endif /* KVF_TIERS_TIER_HBM_H */
