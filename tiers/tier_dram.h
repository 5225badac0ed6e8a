/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_dram.h: the memory tier: sealed pieces of shared memory, cut into slots that clients read in
 * place.
 *
 *   arena   one range of addresses, reserved at open and never moved
 *   piece   one memfd inside it, at most piece_bytes; belongs to one tenant at a time and is what a
 *           client receives, sealed and read-only
 *   area    the unit of population and of slot classes: area_bytes of one piece
 *   run     one area, or neighbours in one piece, cut into slots of one class
 *   slot    record page and payload, 4 KiB-aligned; never crosses a piece
 *
 *   piece 0                                   piece 1
 *   +---------+---------+---------+---------+ +---------+---------+--
 *   | area 0  | area 1  | area 2  | area 3  | | area 4  | area 5  |
 *   +---------+---------+---------+---------+ +---------+---------+--
 *   |s|s|s|s|s|s|s|s|s|t| slot    | slot  |t| | (free)  | (not populated)
 *   '-- a run of one ---'---- a run of two -' t: the unused tail, at most 1/16 where it can be
 *
 * Classes: eight an octave, and one for each registered format of a fixed size. A small arena gets
 * areas smaller than configured (at least 32 of them), so that it can serve several classes.
 *
 * Slots: FREE -> FILLING (reserve) -> READY (publish) -> FREE or DOOMED (drop) -> FREE (last
 * unpin). Pins, counts and states live in private memory; nothing here is read back from memory
 * that is shared.
 *
 * Owner of everything: the reactor. Nothing here allocates, locks or blocks after open, except that
 * a piece that changes tenant costs a few system calls. Population runs as jobs of the work queue.
 * Close the work queue (which waits for its jobs) before the tier.
 */
#ifndef KVF_TIERS_TIER_DRAM_H
#define KVF_TIERS_TIER_DRAM_H

#include "base/env.h"
#include "base/fd.h"
#include "tiers/tier.h"
#include "tiers/work.h"

enum kvf_dram_limits {
    KVF_DRAM_SLOT_BYTES_MIN = 8192, /* a record page and the smallest payload */
    KVF_DRAM_AREA_BYTES_MIN = 1 << 20,
    KVF_DRAM_PIECES_MAX = 4096,
    KVF_DRAM_TENANTS_MAX = 64,
    KVF_DRAM_FORMATS_MAX = 128, /* exact classes */
    KVF_DRAM_SCAN_MAX = 64,     /* candidates that one reserve looks at from the cold end */
    KVF_DRAM_DRAIN_MAX = 256,   /* slots that one call evicts to empty a run or a piece */
    KVF_DRAM_PRIORITY_MAX = 3,  /* times that a slot may be spared at the cold end */
};

/* What the tier tells the agent about its memory. All members are optional and called on the
 * reactor, from inside open, reserve, poll or the work queue's poll. */
struct kvf_dram_events {
    void *ctx;
    /* Memory that from now on holds records, for the drives' register_memory. The same range comes
     * again after its piece has been replaced; a registration made before then is void. */
    void (*area_ready)(void *ctx, void *base, uint64_t bytes);
    /* A piece has been given to a tenant: send it to the tenant's clients. */
    void (*piece_added)(void *ctx, uint32_t piece_id);
    /* A piece is being taken back: nothing in it is leased or stored any more; clients shall unmap
     * it. Its descriptor is closed after this returns. */
    void (*piece_dropped)(void *ctx, uint32_t piece_id);
};

/* Memory that this process does not have itself: a device's. Pieces come and go whole, nothing of
 * it has an address here, and the tier keeps nothing but the account of its slots. */
struct kvf_dram_backing {
    void *ctx;
    /* Begin to make a piece of so many bytes: kvf_dram_piece_made follows, from inside the owner's
     * poll, unless pieces_lost does. KVF_OK; KVF_ERR_BUSY: not now, to be asked again. */
    int (*make)(void *ctx, uint32_t piece_id, uint64_t bytes);
    /* Nothing of the piece is in use any more. */
    void (*drop)(void *ctx, uint32_t piece_id);
};

struct kvf_dram_config {
    uint64_t arena_bytes; /* rounded down to whole areas */
    uint64_t piece_bytes; /* at most this a piece; several tenants: smaller, two pieces a tenant */
    uint64_t area_bytes;  /* at most this an area; a small arena gets smaller ones */
    enum kvf_hugepage_mode hugepages;
    uint16_t n_tenants;          /* tenants are 0..n_tenants-1 */
    struct kvf_env env;          /* clock */
    struct kvf_work_queue *work; /* populates memory; borrowed until close */
    struct kvf_tier_host host;   /* may_evict and evict are required */
    struct kvf_dram_events events;
    /* May bytes more be populated now? Asked before each area. Default (by init):
     * kvf_dram_memory_allows. */
    bool (*memory_allows)(void *memory_ctx, uint64_t bytes);
    void *memory_ctx;
    /* Where pieces come from; NULL: memfds of this process. Of a piece with backing, neither work
     * nor memory_allows is asked, area_ready is never called, and address is NULL. */
    const struct kvf_dram_backing *backing;
};

/* Defaults: 1 GiB arena, pieces of 1 GiB, areas of 128 MiB, one tenant, the system's clock. */
void kvf_dram_config_init(struct kvf_dram_config *config);

/* Bytes of private memory that open reserves for this configuration, for --check. They are touched
 * as slots are used. 0 if the configuration is out of range. */
uint64_t kvf_dram_metadata_bytes(const struct kvf_dram_config *config);

/* The size of the areas that open makes: at most what is asked for, less in a small arena. The same
 * again for a configuration that asks for just this. 0 if the configuration is out of range. */
uint64_t kvf_dram_area_bytes(const struct kvf_dram_config *config);

/* Reserve addresses and metadata and populate the first area, so that the tier can serve when this
 * returns; the other areas follow by poll, one at a time. If memory is short, no area is populated
 * and poll tries again. why_out says what pages are used and why not better ones, or what failed.
 * Blocks. KVF_OK; KVF_ERR_INVALID, _NO_MEMORY, _UNSUPPORTED (hugepages: require). */
int kvf_dram_open(const struct kvf_dram_config *config, struct kvf_tier **tier_out, char *why_out,
                  size_t why_bytes);

/* Is there room for bytes more beside a reserve, by MemAvailable and by the memory limits of this
 * process's cgroups (version 2)? Unreadable files count as no limit. ctx: NULL, or a path put
 * before /proc and /sys. Blocks for a few reads of kernel files. */
bool kvf_dram_memory_allows(void *ctx, uint64_t bytes);

/* Give records of exactly this size a class of their own. Registering twice is fine; there is no
 * way back. KVF_OK; KVF_ERR_BUSY: the table is full (such records go to the octave classes);
 * KVF_ERR_TOO_LARGE. */
int kvf_dram_register_format(struct kvf_tier *tier, uint64_t record_bytes);

/* Can a record of this size ever be stored here? For attach. */
bool kvf_dram_fits(const struct kvf_tier *tier, uint64_t record_bytes);

/* The largest record that fits. */
uint64_t kvf_dram_record_bytes_max(const struct kvf_tier *tier);

/* ----------------------------------------------------------------------------------------------
 * Slots. A location is (generation << 32 | slot number), so that one that was dropped is never
 * taken for the slot's next record. Calls assert that the location is live and in a state that the
 * transition allows.
 */
enum kvf_slot_state {
    KVF_SLOT_FREE = 0,
    KVF_SLOT_FILLING = 1,
    KVF_SLOT_READY = 2,
    KVF_SLOT_DOOMED = 3, /* dropped while pinned */
};

/* FREE also for a location that is no longer (or never was) valid. */
enum kvf_slot_state kvf_dram_state(const struct kvf_tier *tier, kvf_location location);

/* FILLING -> READY: from now on it may be evicted. priority 0..KVF_DRAM_PRIORITY_MAX (more is
 * taken as the most): so many times it is spared when it is the coldest. */
void kvf_dram_publish(struct kvf_tier *tier, kvf_location location, uint8_t priority);

/* Used again since it came: move it to the hot end and protect it, as far as a fifth of the class
 * can be protected. READY. */
void kvf_dram_touch(struct kvf_tier *tier, kvf_location location);

/* Keep the memory as it is until unpin; a pinned slot is never evicted, and dropping it only dooms
 * it. Counted. FILLING or READY. */
void kvf_dram_pin(struct kvf_tier *tier, kvf_location location);

/* FILLING, READY or DOOMED; the last unpin of a DOOMED slot frees it. */
void kvf_dram_unpin(struct kvf_tier *tier, kvf_location location);

uint32_t kvf_dram_pins(const struct kvf_tier *tier, kvf_location location);

/* Where clients find the slot. Not FREE. */
void kvf_dram_locate(const struct kvf_tier *tier, kvf_location location, uint32_t *piece_id_out,
                     uint64_t *offset_out);

/* FILLING or READY -> FREE, or DOOMED if pinned: the same as the ops table's drop. */
void kvf_dram_drop(struct kvf_tier *tier, kvf_location location);

/* ----------------------------------------------------------------------------------------------
 * Pieces. An id names one memfd and is never used again; 0 is no piece.
 */
struct kvf_dram_piece {
    uint32_t id;
    uint16_t tenant;
    bool is_huge;
    int fd; /* read-only for whoever receives it, by seals; owned by the tier */
    uint64_t bytes;
};

/* The tenant's piece after the one with this id (0: the first), in no particular order; 0: none.
 * A piece that comes later is told by piece_added. */
uint32_t kvf_dram_piece_next(const struct kvf_tier *tier, uint16_t tenant, uint32_t piece_id);

/* KVF_OK; KVF_MISS: no such piece any more. */
int kvf_dram_piece_get(const struct kvf_tier *tier, uint32_t piece_id,
                       struct kvf_dram_piece *piece_out);

/* With backing: the piece that make began is there, behind this descriptor, which the tier takes;
 * or it is not, and will be asked for again in a while. A piece that is not awaited is ignored. */
void kvf_dram_piece_made(struct kvf_tier *tier, uint32_t piece_id, int fd, int status);

/* With backing: all pieces are gone, at once. The host has dropped every slot that is READY; those
 * that are held still end as ever. New ones are refused until pieces can be made again. */
void kvf_dram_pieces_lost(struct kvf_tier *tier);

/* Call visit for the cookie of every READY slot. Each may be dropped in there. */
void kvf_dram_visit(struct kvf_tier *tier,
                    void (*visit)(void *ctx, kvf_location location, kvf_cookie cookie), void *ctx);

/* Begin to take the idlest piece of a tenant that has more than its share and give it to this one:
 * its records are evicted a few at a time by poll, and once the last pin is gone the memfd is
 * replaced. Reserve does this by itself for a tenant below its share that finds no free area.
 * KVF_OK: begun; KVF_ERR_BUSY: one is being taken already, or nobody has more than its share. */
int kvf_dram_piece_reassign(struct kvf_tier *tier, uint16_t tenant);

/* ----------------------------------------------------------------------------------------------
 * Figures
 */
struct kvf_dram_info {
    uint64_t arena_bytes, piece_bytes, area_bytes; /* as planned from the configuration */
    uint64_t metadata_bytes;
    uint64_t populated_bytes, huge_bytes;
    uint64_t free_area_bytes; /* populated and in no class */
    uint32_t areas, pieces, pieces_assigned;
    uint64_t pinned_slots, doomed_slots;
    uint64_t population_failures, memory_refusals; /* areas that had to wait */
    uint64_t areas_taken;                          /* from one class for another */
    uint64_t pieces_reassigned;
};

void kvf_dram_info(const struct kvf_tier *tier, struct kvf_dram_info *info_out);

struct kvf_dram_class {
    uint64_t slot_bytes;
    bool is_exact;
    uint32_t areas, slots;
    uint32_t used; /* slots that are not FREE */
    uint64_t stored_bytes;
};

/* The classes that have areas, smallest slots first, over all tenants. Returns how many there are,
 * which may be more than max. */
unsigned kvf_dram_classes(const struct kvf_tier *tier, struct kvf_dram_class *classes_out,
                          unsigned max);

extern const struct kvf_tier_ops kvf_tier_dram_ops;

#endif /* KVF_TIERS_TIER_DRAM_H */
