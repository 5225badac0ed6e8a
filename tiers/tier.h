/* SPDX-License-Identifier: Apache-2.0
 *
 * tier.h: what a tier is. A tier keeps records (record page and payload, codec/block_format.h) and
 * gives them back. There are two shapes behind one table:
 *   addressable   dram (and hbm): reserve a slot, fill it, read it in place; locations are slots
 *   log           nvme, remote: store a record from memory, load it into memory
 * The fault and delay tiers wrap another one and change nothing else.
 *
 * Rules for all members:
 * - One thread, the reactor, calls everything and receives every callback, from inside poll. Work
 *   that can block runs behind io.h (drives) and work.h (CPU), whose real forms are threads and
 *   whose simulated forms are not.
 * - A call that cannot start now answers KVF_ERR_BUSY and has no effect. Nothing blocks after open.
 * - A tier never decides who may be evicted: it asks its host (the index and placement of the
 *   agent).
 * - Integrity is the tier's: load completes with KVF_OK only for bytes whose header, key_id,
 *   generation and payload checksum fit.
 */
#ifndef KVF_TIERS_TIER_H
#define KVF_TIERS_TIER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

#define KVF_TIER_ABI 1

/* Where a record is inside a tier. Opaque outside of it; KVF_LOCATION_NONE is never a record. */
typedef uint64_t kvf_location;
#define KVF_LOCATION_NONE UINT64_MAX

/* The index entry a record belongs to; chosen by the host, given back in callbacks. */
typedef uint32_t kvf_cookie;
#define KVF_COOKIE_NONE UINT32_MAX

enum kvf_tier_flags {
    KVF_TIER_ADDRESSABLE = 1 << 0, /* reserve and address are present */
    KVF_TIER_PERSISTENT = 1 << 1,  /* records survive the process; recover is present */
};

/* What a tier must know of a record besides its bytes. */
struct kvf_block_name {
    uint8_t key_id[32];
    uint64_t namespace_id;
    uint64_t namespace_epoch; /* records under an older epoch are dead */
    uint16_t shard;
    uint16_t shard_count;
};

/* One store or load. Owned by the caller, untouched by it from the call until done has been called.
 */
struct kvf_tier_io {
    struct kvf_block_name name;
    kvf_cookie cookie;
    void *record;          /* store: source, 4 KiB-aligned; load: destination, 4 KiB-aligned */
    uint64_t record_bytes; /* page and payload, not padded; the memory extends to the next 4 KiB */
    kvf_location location; /* load: in; store: out, valid in done if status is KVF_OK */
    uint64_t deadline_ns;  /* remote load: when it has to be over; 0: after the tier's own time */
    uint64_t stored_bytes; /* store: out, as location: what the tier has written, not padded; less
                              than record_bytes if it keeps the record in a smaller form */
    bool durable;          /* store: done only after the bytes are on stable storage */
    int32_t status;
    void (*done)(struct kvf_tier_io *io); /* on the reactor, inside poll */
    void *owner;                          /* for the caller */
    struct kvf_tier_io *next;             /* for the tier */
    void *tier_private;
};

/* What a tier asks and tells its host. ctx is the host's. All on the reactor. */
struct kvf_tier_host {
    void *ctx;

    /* addressable: may this READY slot be taken now (not pinned, not loading)? Called for
     * candidates from the cold end. */
    bool (*may_evict)(void *ctx, kvf_location location, kvf_cookie cookie);
    /* addressable: forget this slot. The host drops every slot of the set, this one included,
     * through drop before it returns. */
    void (*evict)(void *ctx, kvf_location location, kvf_cookie cookie);

    /* log: the space of this record is about to be reused. true: keep it, the tier stores it again
     * and calls moved; false: the host has forgotten it. */
    bool (*reclaim)(void *ctx, kvf_location location, kvf_cookie cookie);
    /* log: the record has a new location (after reclaim said true), or is gone (KVF_LOCATION_NONE).
     */
    void (*moved)(void *ctx, kvf_location from, kvf_location to, kvf_cookie cookie);
    /* persistent, during recover: so much of the store has been looked at. NULL: nobody asks. */
    void (*looked)(void *ctx, uint64_t looked_bytes, uint64_t total_bytes);
    /* persistent, during recover: a live record. The host answers with its index entry, or
     * KVF_COOKIE_NONE to let it be forgotten (older duplicate, dead epoch, full index). */
    kvf_cookie (*recovered)(void *ctx, const struct kvf_block_name *name, kvf_location location,
                            uint64_t record_bytes, uint64_t sequence);
    /* persistent, during recover and on reads: this location turned out to be unusable. */
    void (*lost)(void *ctx, kvf_location location, kvf_cookie cookie, int status);
};

struct kvf_tier_stat {
    uint64_t capacity_bytes;
    uint64_t stored_bytes; /* of live records */
    uint64_t stored_blocks;
    uint64_t area_bytes;        /* dram: of areas that are full; log: of sealed segments */
    uint64_t area_stored_bytes; /* live or dead record bytes inside area_bytes */
    uint64_t stores, loads, drops, evictions, reinsertions;
    uint64_t busy; /* calls answered KVF_ERR_BUSY */
    uint64_t errors_io, errors_corrupt, errors_mac;
    uint64_t bytes_written, bytes_read;
    uint32_t queue_depth;
    bool writes_off, off; /* error budget used up */
};

struct kvf_tier;

struct kvf_tier_ops {
    uint32_t abi; /* KVF_TIER_ABI */
    uint32_t flags;
    const char *name; /* "dram", "nvme", ... */
    uint8_t kind;     /* enum kvf_tier_kind of kvferry.h */

    /* Addressable only. A FILLING slot for record_bytes on behalf of an index entry, in memory that
     * only clients of this tenant can see; may call host->may_evict and host->evict. KVF_OK;
     * KVF_ERR_BUSY: nothing free and nothing evictable; KVF_ERR_TOO_LARGE. */
    int (*reserve)(struct kvf_tier *tier, uint16_t tenant, uint64_t record_bytes, kvf_cookie cookie,
                   kvf_location *location_out);
    /* Addressable only. The slot's memory, 4 KiB-aligned, valid until drop. */
    void *(*address)(struct kvf_tier *tier, kvf_location location);

    /* Log only. KVF_OK: done will be called once; KVF_ERR_BUSY; KVF_ERR_TIER_OFF;
     * KVF_ERR_TOO_LARGE. */
    int (*store)(struct kvf_tier *tier, struct kvf_tier_io *io);
    /* Log only. As store. done: KVF_OK, KVF_MISS (reused meanwhile), KVF_ERR_CORRUPT, KVF_ERR_IO.
     */
    int (*load)(struct kvf_tier *tier, struct kvf_tier_io *io);

    /* Required. The host no longer refers to this location. Never fails, no callback. */
    void (*drop)(struct kvf_tier *tier, kvf_location location);
    /* Required. Take completions, run timers. Returns how many callbacks ran. */
    unsigned (*poll)(struct kvf_tier *tier, uint64_t now_ns);
    /* Required. When poll wants to run without a completion, UINT64_MAX: never. */
    uint64_t (*deadline_ns)(const struct kvf_tier *tier);
    /* Persistent only. Enumerate what is there by host->recovered; blocks: called once, after open.
     */
    int (*recover)(struct kvf_tier *tier);
    /* Optional. Stop accepting stores; poll until it answers true: all is on stable storage. */
    bool (*drained)(struct kvf_tier *tier);
    /* Required. */
    void (*stat)(const struct kvf_tier *tier, struct kvf_tier_stat *stat_out);
    /* Required. Accepts a tier that failed to open half-way; frees it. */
    void (*close)(struct kvf_tier *tier);
};

/* A tier's own struct begins with this. */
struct kvf_tier {
    const struct kvf_tier_ops *ops;
    struct kvf_tier_host host;
};

/* Every tier of this build, in the order fastest to slowest, NULL at the end (tiers.c). */
extern const struct kvf_tier_ops *const kvf_tiers[];

#endif /* KVF_TIERS_TIER_H */
