/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_dram_internal.h: the memory tier's own state, shared by the tier_dram_*.c files.
 *
 *   tier_dram.c         open, close, the ops table, transitions of slots, figures
 *   tier_dram_class.c   slot classes, how many areas make a run
 *   tier_dram_run.c     areas into runs, slots out of runs, the lists that order them
 *   tier_dram_evict.c   who has to go: one slot, a run for another class, a piece for another
 *                       tenant
 *   tier_dram_piece.c   memfds, population, tenants
 *   tier_dram_backed.c  pieces that another process has
 *   tier_dram_memory.c  how much memory the node has left
 */
#ifndef KVF_TIERS_TIER_DRAM_INTERNAL_H
#define KVF_TIERS_TIER_DRAM_INTERNAL_H

#include <assert.h>

#include "base/limits.h"
#include "base/log.h"
#include "base/owner.h"
#include "tiers/tier_dram.h"

#define DRAM_NONE UINT32_MAX

enum dram_internal_limits {
    DRAM_OCTAVES = 13,   /* 8 KiB .. 64 MiB */
    DRAM_STEPS = 8,      /* classes an octave */
    DRAM_AREAS_MIN = 32, /* a small arena halves its areas until it has so many */
    DRAM_CLASSES_MAX = DRAM_OCTAVES * DRAM_STEPS + 2 + KVF_DRAM_FORMATS_MAX,
    DRAM_TENANT_NONE = UINT16_MAX,
};

static_assert(DRAM_CLASSES_MAX < UINT16_MAX, "a class index fits its field");

/* Times at the cold end are compared over minutes, so 2^24 ns (17 ms) is fine enough, and 32 bits
 * of it last for two years. */
#define DRAM_STAMP_SHIFT 24

enum dram_segment {
    DRAM_PROBATION = 0,
    DRAM_PROTECTED = 1,
};

/* All zero is a FREE slot that was never used: metadata is touched as slots are. */
struct dram_slot {
    uint32_t generation; /* of the record that is, or was last, in it; 0: none was */
    kvf_cookie cookie;
    uint32_t record_bytes;
    uint32_t next, previous; /* READY and not pinned: its segment; FREE: its run's free list */
    uint32_t pins;
    uint32_t stamp;  /* of the last use */
    uint8_t state;   /* enum kvf_slot_state */
    uint8_t segment; /* enum dram_segment, kept while it is pinned and in no list */
    uint8_t priority;
    uint8_t lives; /* times that it will still be spared */
};
static_assert(sizeof(struct dram_slot) == 32, "counted in docs and --check");

enum dram_area_state {
    DRAM_AREA_ABSENT = 0, /* not populated */
    DRAM_AREA_FREE = 1,
    DRAM_AREA_HEAD = 2, /* the first of a run; holds the run's state */
    DRAM_AREA_MEMBER = 3,
};

struct dram_area {
    uint8_t state; /* enum dram_area_state */
    bool is_draining;
    bool is_partial; /* in its pool's list of runs with a free slot */
    uint16_t class_index;
    uint32_t piece_index; /* fixed at open */
    uint32_t head;        /* HEAD and MEMBER */

    /* HEAD only */
    uint32_t run_areas;
    uint32_t n_slots;
    uint32_t n_begun; /* slots from here on have not been used since the run was made */
    uint32_t n_used;  /* not FREE */
    uint32_t n_held;  /* FILLING, DOOMED or pinned: what eviction cannot touch */
    uint32_t free_first;
    uint32_t next, previous; /* partial list */
    uint32_t stamp;          /* of the last use of any slot */
    uint32_t refused_by;     /* number of the claim that found it in use */
    uint64_t stored_bytes;
};

struct dram_list {
    uint32_t first, last; /* hottest, coldest */
    uint32_t count;
};

struct dram_class {
    uint64_t slot_bytes;
    bool is_exact;
    bool fits; /* into every piece */
};

/* The slots of one class that one tenant has. */
struct dram_pool {
    struct dram_list segments[2]; /* enum dram_segment */
    uint32_t partial_first;
    uint32_t n_runs;
    uint32_t n_evictions; /* since another class's areas were last considered */
};

struct dram_piece {
    uint32_t id; /* 0: it has no memfd */
    uint32_t incarnation;
    int fd;
    uint16_t tenant;
    uint16_t next_tenant; /* backed: whose it becomes when it is made */
    bool is_huge;
    bool is_lost; /* backed memory that is gone; slots are held still */
    uint32_t first_area, n_areas;
    uint32_t next; /* of the same tenant */
};

/* Areas being emptied: a window for a class that has none (a claim), or a piece for another tenant
 * (a handover). At most one of each. */
struct dram_drain {
    bool is_active;
    uint16_t tenant, class_index;
    uint32_t piece_index;
    uint32_t first_area, n_areas;
    uint32_t area, slot; /* where the next call goes on */
    uint64_t give_up_ns;
};

struct dram_population {
    struct kvf_work work;
    bool is_running;
    uint32_t area_index;
    void *memory;
    uint64_t bytes;
    int fd;
    uint64_t offset;
    int status, error;
};

struct dram_plan {
    uint64_t arena_bytes, piece_bytes, area_bytes;
    uint32_t n_areas, areas_a_piece, n_pieces;
    uint32_t slots_an_area; /* of the smallest class: metadata reserved for an area */
    uint32_t n_pools;
    uint64_t metadata_bytes;
};

struct dram_tier {
    struct kvf_tier base;
    struct kvf_owner owner;
    struct kvf_dram_config config;
    struct dram_plan plan;
    unsigned char *arena;

    struct dram_slot *slots;
    struct dram_area *areas;
    struct dram_piece *pieces;
    struct dram_pool *pools; /* [tenant][class] */
    uint32_t tenant_pieces[KVF_DRAM_TENANTS_MAX];
    uint32_t n_tenant_pieces[KVF_DRAM_TENANTS_MAX];

    struct dram_class classes[DRAM_CLASSES_MAX];
    uint16_t classes_by_size[DRAM_CLASSES_MAX];
    uint32_t n_classes, n_formats;

    uint32_t n_assigned_pieces;
    void *reservation; /* what arena was aligned inside */
    uint64_t reservation_bytes;

    uint32_t making; /* backed: the piece that is being made, DRAM_NONE: none */
    uint32_t n_lost_pieces;
    struct dram_drain claim, handover;
    uint32_t n_claims; /* attempts, for refused_by */
    struct dram_population population;
    uint64_t population_retry_ns; /* UINT64_MAX: nothing to wait for */
    uint64_t drain_retry_ns;
    uint32_t n_absent_areas, n_free_areas;
    bool is_evicting; /* inside host->evict: reserve must not be called */

    struct kvf_tier_stat stat;
    uint64_t pinned_slots, doomed_slots;
    uint64_t population_failures, memory_refusals, areas_taken, pieces_reassigned;
    struct kvf_log_limit population_log;
};

static inline struct dram_tier *dram_of(struct kvf_tier *tier)
{
    struct dram_tier *dram = (struct dram_tier *)tier;

    assert(tier->ops == &kvf_tier_dram_ops);
    kvf_owner_check(&dram->owner);
    return dram;
}

static inline const struct dram_tier *dram_of_const(const struct kvf_tier *tier)
{
    assert(tier->ops == &kvf_tier_dram_ops);
    return (const struct dram_tier *)tier;
}

static inline uint64_t dram_now_ns(const struct dram_tier *dram)
{
    return kvf_env_now_ns(&dram->config.env);
}

static inline uint32_t dram_stamp(const struct dram_tier *dram)
{
    return (uint32_t)(dram_now_ns(dram) >> DRAM_STAMP_SHIFT);
}

static inline struct dram_pool *dram_pool_at(struct dram_tier *dram, uint16_t tenant,
                                             uint16_t class_index)
{
    return &dram->pools[(size_t)tenant * DRAM_CLASSES_MAX + class_index];
}

static inline struct dram_area *dram_head_of_slot(struct dram_tier *dram, uint32_t slot_index)
{
    return &dram->areas[dram->areas[slot_index / dram->plan.slots_an_area].head];
}

static inline uint16_t dram_tenant_of(const struct dram_tier *dram, const struct dram_area *area)
{
    return dram->pieces[area->piece_index].tenant;
}

static inline struct dram_pool *dram_pool_of(struct dram_tier *dram, const struct dram_area *head)
{
    return dram_pool_at(dram, dram_tenant_of(dram, head), head->class_index);
}

static inline uint32_t dram_area_index(const struct dram_tier *dram, const struct dram_area *area)
{
    return (uint32_t)(area - dram->areas);
}

static inline kvf_location dram_location(const struct dram_tier *dram, uint32_t slot_index)
{
    return (kvf_location)dram->slots[slot_index].generation << 32 | slot_index;
}

/* tier_dram_class.c */
void dram_classes_init(struct dram_tier *dram);
/* The class of the smallest slots that hold record_bytes; DRAM_NONE: it fits nowhere. */
uint32_t dram_class_for(const struct dram_tier *dram, uint64_t record_bytes);
/* How many of at most max_areas neighbours make a good run, the first of its pool or another; 0:
 * not even one slot fits. */
uint32_t dram_run_areas(const struct dram_tier *dram, const struct dram_class *class,
                        uint32_t max_areas, bool is_first);
uint64_t dram_run_tail_bytes(const struct dram_tier *dram, const struct dram_class *class,
                             uint32_t n_areas);

/* tier_dram_run.c */
/* Make a run for the tenant's class out of free areas, in its own pieces or in one that has no
 * tenant. False: there is no room. */
bool dram_run_open(struct dram_tier *dram, uint16_t tenant, uint16_t class_index);
/* Make exactly these areas a run. */
void dram_run_make(struct dram_tier *dram, uint32_t first_area, uint32_t n_areas,
                   uint16_t class_index);
/* Withdraw a run's free slots, or offer them again. */
void dram_run_set_draining(struct dram_tier *dram, struct dram_area *head, bool is_draining);
/* A FREE slot of the pool; DRAM_NONE: there is none. */
uint32_t dram_slot_take(struct dram_tier *dram, struct dram_pool *pool);
/* Back to FREE; an emptied run gives its areas back. */
void dram_slot_free(struct dram_tier *dram, uint32_t slot_index);
/* Order of eviction. A slot is in a list while it is READY and not pinned. */
void dram_list_add(struct dram_tier *dram, uint32_t slot_index, uint8_t segment);
void dram_list_remove(struct dram_tier *dram, uint32_t slot_index);

/* tier_dram_evict.c */
/* Evict from the cold end of the pool, looking at no more than *scan_left candidates. False: no
 * slot was evicted. */
bool dram_evict_one(struct dram_tier *dram, struct dram_pool *pool, uint32_t *scan_left);
/* Is another class so much colder that its areas are better used by this one? */
bool dram_wants_areas(struct dram_tier *dram, uint16_t tenant, uint16_t class_index);
/* Take areas from another class of the tenant. False: none can be had, or not at once. */
bool dram_claim_areas(struct dram_tier *dram, uint16_t tenant, uint16_t class_index);
/* Is this area, even if it is free by now, part of a window that is being emptied? */
bool dram_area_is_claimed(const struct dram_tier *dram, uint32_t area_index);
/* Claim and handover are off. */
void dram_drains_stop(struct dram_tier *dram);
int dram_handover_begin(struct dram_tier *dram, uint16_t tenant);
void dram_drain_poll(struct dram_tier *dram, uint64_t now_ns);

/* tier_dram_backed.c */
/* Begin to make a piece for the next area that has no memory. KVF_OK; KVF_MISS: nothing to do;
 * KVF_ERR_BUSY: not now. */
int dram_backed_make(struct dram_tier *dram, uint64_t now_ns);
/* Bury lost pieces of which nothing is held any more. */
void dram_backed_poll(struct dram_tier *dram);

/* tier_dram_piece.c */
/* An area that has no memory so far; DRAM_NONE: there is none. */
uint32_t dram_area_absent(const struct dram_tier *dram);
/* The piece's memory, all of whose areas are free, is no longer its tenant's. */
void dram_piece_forget(struct dram_tier *dram, struct dram_piece *piece);
int dram_pieces_open(struct dram_tier *dram, char *why_out, size_t why_bytes);
void dram_pieces_close(struct dram_tier *dram);
/* Give a piece that has no tenant to one. */
void dram_piece_assign(struct dram_tier *dram, struct dram_piece *piece, uint16_t tenant);
/* Replace the memfd of an empty piece and give it to another tenant. */
void dram_piece_replace(struct dram_tier *dram, struct dram_piece *piece, uint16_t tenant);
/* Begin to populate the next area, if there is one, memory allows it and none is under way. */
void dram_populate_next(struct dram_tier *dram, uint64_t now_ns);
/* Populate the first area before returning. */
int dram_populate_first(struct dram_tier *dram);

#endif /* KVF_TIERS_TIER_DRAM_INTERNAL_H */
