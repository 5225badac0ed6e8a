/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_nvme_internal.h: what the files of the drive tier share. Nothing outside of them includes
 * it.
 *
 *   tier_nvme.c          ops table: store, load, drop, poll, figures
 *   tier_nvme_page.c     pages of nvme_format.h and record pages: build, seal, check
 *   tier_nvme_head.c     open, format, resize: superblock and state, blocking
 *   tier_nvme_pack.c     records packed before they are placed, and unpacked when they are read
 *   tier_nvme_append.c   placing, writing and acknowledging records, sync, state page
 *   tier_nvme_segment.c  the life of segments: next, header, seal, footer, reuse, reinsertion
 *   tier_nvme_recover.c  what is there at start
 *
 * Everything runs on the reactor, from poll or from the call itself, except the run functions of
 * work jobs, which say so.
 *
 * How segments move:
 *
 *   free or oldest sealed --reclaim, copy, sync--> clean --header, sync--> open
 *        ^                                                                   |full
 *        '--------------- sealed <--footer, sync-- digest <--sync-- sealing <'
 *
 * A sync that fails takes the open and the sealing segment with it (discarded), because the kernel
 * forgets what it could not write and a second sync would lie.
 */
#ifndef KVF_TIERS_TIER_NVME_INTERNAL_H
#define KVF_TIERS_TIER_NVME_INTERNAL_H

#include "base/limits.h"
#include "base/log.h"
#include "base/pool.h"
#include "codec/block_format.h"
#include "codec/entropy.h"
#include "tiers/nvme_format.h"
#include "tiers/tier_nvme.h"

/* Location: 24 bits of the generation, 20 of the segment, 20 of the page. */
enum kvf_nvme_location_bits {
    KVF_NVME_PAGE_BITS = 20,
    KVF_NVME_SEGMENT_BITS = 20,
    KVF_NVME_GENERATION_BITS = 24,
};

#define KVF_NVME_NO_SEGMENT UINT32_MAX

/* How many generations are taken from the state page at a time, and when more are. */
enum kvf_nvme_generation_limits {
    KVF_NVME_GENERATIONS_AHEAD = 64,
    KVF_NVME_GENERATIONS_LOW = 16,
};

enum kvf_nvme_record_flags {
    KVF_NVME_LIVE = 1 << 0,    /* the host refers to it, or will when its store is done */
    KVF_NVME_PENDING = 1 << 1, /* its store is not done yet */
    KVF_NVME_KEEP = 1 << 2,    /* to be copied before the segment is reused */
};

/* One record of a segment in memory; a segment's are ascending by page. */
struct kvf_nvme_record {
    uint32_t page;
    uint32_t pages_flags; /* pages << 8 | enum kvf_nvme_record_flags */
    kvf_cookie cookie;
};

enum kvf_nvme_segment_state {
    KVF_NVME_SEGMENT_FREE = 0,
    KVF_NVME_SEGMENT_RECLAIMING, /* readable */
    KVF_NVME_SEGMENT_OPENING,    /* its header is being written */
    KVF_NVME_SEGMENT_OPEN,       /* readable */
    KVF_NVME_SEGMENT_SEALING,    /* readable */
    KVF_NVME_SEGMENT_SEALED,     /* readable */
    KVF_NVME_SEGMENT_DISCARDED,  /* a sync failed; free once its writes have come back */
};

struct kvf_nvme_segment_info {
    uint64_t generation;
    struct kvf_nvme_record *records; /* sealed: exactly n_records, owned; unsealed: the slot's */
    uint32_t n_records;
    uint32_t record_pages; /* of all records, live or not */
    uint32_t next;         /* on the free or the sealed list */
    uint8_t state;         /* enum kvf_nvme_segment_state */
};

struct kvf_nvme_list {
    uint32_t first, last;
    uint32_t count;
};

struct kvf_nvme_tier;
struct kvf_nvme_io;
struct kvf_nvme_op;

typedef void (*kvf_nvme_io_fn)(struct kvf_nvme_tier *tier, struct kvf_nvme_io *nio, int status);

/* One I/O of the tier's own, with what happens then. */
struct kvf_nvme_io {
    struct kvf_io io;
    struct kvf_nvme_tier *tier;
    kvf_nvme_io_fn then;
    void (*check)(struct kvf_io *io); /* of reads, see io.h; may be NULL */
    int fault;                        /* status that a failpoint wants instead of the I/O */
    struct kvf_nvme_io *next;
};

struct kvf_nvme_io_list {
    struct kvf_nvme_io *first, **end;
};

/* Somebody who waits for the next sync. */
struct kvf_nvme_waiter {
    struct kvf_nvme_waiter *next;
    void (*then)(struct kvf_nvme_tier *tier, struct kvf_nvme_waiter *waiter, int status);
};

struct kvf_nvme_waiter_list {
    struct kvf_nvme_waiter *first, **end;
};

enum kvf_nvme_slot_step {
    KVF_NVME_SLOT_UNUSED = 0,
    KVF_NVME_SLOT_OPENING,
    KVF_NVME_SLOT_OPEN,
    KVF_NVME_SLOT_DRAIN,    /* full; waits for writes in flight */
    KVF_NVME_SLOT_WAIT,     /* for something that calls back */
    KVF_NVME_SLOT_DIGEST,   /* the index can be built and hashed */
    KVF_NVME_SLOT_DISCARDED /* waits for writes in flight, and for whoever calls back */
};

/* A segment without footer: the tables that become its footer. */
struct kvf_nvme_slot {
    struct kvf_nvme_tier *tier;
    uint8_t step; /* enum kvf_nvme_slot_step */
    bool calling; /* an I/O, a sync or a job of the slot itself is on its way */
    uint32_t segment_index;
    uint32_t used_pages;
    uint32_t n_entries;
    uint32_t writes_in_flight;
    struct kvf_nvme_record *records; /* tier->slot_entries_max of them */
    uint8_t *index;                  /* footer entries in their pages, then room for the footer */
    struct kvf_nvme_segment *header; /* page 0 */
    struct kvf_nvme_io io;
    struct kvf_nvme_waiter waiter;
    struct kvf_work work;
    uint32_t index_entries; /* when built: without dead records */
    uint32_t footer_pages;  /* when built: of index and footer */
};

enum kvf_nvme_next_step {
    KVF_NVME_NEXT_NONE = 0,
    KVF_NVME_NEXT_RECLAIM, /* ask the host, a few records a poll */
    KVF_NVME_NEXT_COPY,    /* records to keep are being copied */
    KVF_NVME_NEXT_SYNC,    /* the copies are becoming stable */
    KVF_NVME_NEXT_CLEAN,   /* can be opened */
};

/* The segment that will be opened next. */
struct kvf_nvme_next {
    uint8_t step;
    uint32_t segment_index;
    uint32_t cursor;       /* record to look at */
    uint32_t keep_pages;   /* marked and not yet placed */
    uint32_t keep_records; /* marked and not yet finished */
    uint32_t kept_pages;   /* marked in all */
    bool copied;           /* at least one copy was written */
    struct kvf_nvme_waiter waiter;
};

enum kvf_nvme_op_kind {
    KVF_NVME_OP_STORE = 1,
    KVF_NVME_OP_LOAD,
    KVF_NVME_OP_COPY, /* a load into a bounce buffer, then a store from it */
};

/* What a record is packed with, and to. */
struct kvf_nvme_packing {
    struct kvf_entropy_packer *packer;
    void *buffer; /* config.pack_bytes */
};

/* Each member stays in its table once, the free ones first: close finds them all. */
struct kvf_nvme_packings {
    struct kvf_nvme_packing packings[KVF_NVME_PACK_MAX];
    struct kvf_entropy_unpacker *unpackers[KVF_NVME_PACK_MAX];
    uint32_t packings_free;
    uint32_t unpackers_free;
};

/* A call in progress, or a copy. */
struct kvf_nvme_op {
    struct kvf_nvme_io io;
    struct kvf_work work;
    struct kvf_nvme_waiter waiter;
    struct kvf_nvme_tier *tier;
    struct kvf_nvme_op *next;
    struct kvf_tier_io *call; /* not for copies */
    uint8_t kind;             /* enum kvf_nvme_op_kind */
    bool retried;
    int verdict; /* of verification, or what to finish with */
    void *record;
    uint64_t record_bytes;
    /* load, and the source of a copy */
    kvf_location from;
    uint64_t from_generation;
    kvf_cookie cookie;
    /* store, and the target of a copy */
    struct kvf_nvme_slot *slot;
    uint32_t entry; /* in the slot's tables */
    uint32_t page;
    void *bounce;
    /* packed records */
    bool is_packed;                        /* load: record is where the packed one is read to */
    struct kvf_nvme_packing packing;       /* store: in use; or nothing */
    uint64_t packed_bytes;                 /* store: by the packing */
    struct kvf_entropy_unpacker *unpacker; /* load: in use; or NULL */
};

struct kvf_nvme_op_list {
    struct kvf_nvme_op *first, **end;
};

struct kvf_nvme_purge {
    struct kvf_nvme_purge *next;
    uint64_t namespace_id;
    void (*done)(void *ctx, uint64_t namespace_id, int status);
    void *ctx;
};

enum kvf_nvme_state_step {
    KVF_NVME_STATE_IDLE = 0,
    KVF_NVME_STATE_FIRST, /* the copy that may be broken is being written and synced */
    KVF_NVME_STATE_SECOND,
};

/* The state page on its way to both copies. */
struct kvf_nvme_state_writer {
    uint8_t step;
    uint32_t good_copy; /* holds the last state for certain: written last */
    bool dirty;
    uint64_t limit_writing;        /* generation_limit in the page being written */
    struct kvf_nvme_state *page;   /* what is being written */
    struct kvf_nvme_purge *wanted; /* for the next write */
    struct kvf_nvme_purge *wanted_last;
    struct kvf_nvme_purge *writing;
    struct kvf_nvme_io io;
    struct kvf_nvme_waiter waiter;
};

/* A drive before there is a queue, or a queue: blocking access for open and recover. */
struct kvf_nvme_device {
    int fd; /* -1: io */
    struct kvf_io_queue *io;
    uint64_t capacity_bytes;
    bool is_device;
    void (*wait)(void *ctx);
    void *wait_ctx;
};

struct kvf_nvme_tier {
    struct kvf_tier base;
    struct kvf_nvme_config config;
    char path[256]; /* for messages */
    int fd;
    struct kvf_io_queue *io;
    bool is_direct;

    /* constant after open */
    struct kvf_nvme_super super;
    uint8_t id_key[32];
    uint8_t mac_key[32];
    uint32_t segment_pages;
    uint32_t n_segments;
    uint32_t slot_entries_max;

    struct kvf_nvme_state state; /* as it shall be; state_writer brings it to the drive */
    struct kvf_nvme_state_writer state_writer;
    uint64_t generation_next;
    uint64_t generation_limit; /* stable */

    struct kvf_nvme_segment_info *segments;
    struct kvf_nvme_list free_list, sealed_list; /* sealed: oldest first */
    struct kvf_nvme_slot slots[2];
    struct kvf_nvme_slot *open; /* the slot that is OPEN, or NULL */
    struct kvf_nvme_next next;

    struct kvf_pool store_ops, load_ops, copy_ops, purges;
    struct kvf_nvme_op_list waiting;     /* stores without a place */
    struct kvf_nvme_op_list verify_wait; /* the work queue was full */
    struct kvf_nvme_op_list finished;    /* to be told in poll */
    struct kvf_nvme_io_list io_wait;     /* the I/O queue was full */
    struct kvf_nvme_io_list io_faults;   /* failed by a failpoint */
    struct kvf_nvme_waiter_list sync_wait, sync_running;
    struct kvf_nvme_io sync_io;
    bool sync_in_flight;
    void **bounces; /* config.bounce_count */
    uint32_t bounces_free;
    struct kvf_nvme_packings packings;

    uint32_t ios_outstanding;
    uint32_t jobs_outstanding;
    unsigned n_callbacks; /* since poll began */
    bool draining, drain_state_written, closing, recovered;
    uint64_t now_ns, error_forgiven_ns;
    uint32_t error_score;
    bool writes_off, off;
    struct kvf_log_limit log_limit;
    struct kvf_tier_stat stat;
    struct kvf_nvme_info info;
};

/* --- locations, lists ------------------------------------------------------------------------- */

static inline kvf_location kvf_nvme_location_pack(uint64_t generation, uint32_t segment,
                                                  uint32_t page)
{
    return generation << (KVF_NVME_SEGMENT_BITS + KVF_NVME_PAGE_BITS) |
           (uint64_t)segment << KVF_NVME_PAGE_BITS | page;
}

static inline uint32_t kvf_nvme_location_page(kvf_location location)
{
    return (uint32_t)location & ((1u << KVF_NVME_PAGE_BITS) - 1);
}

static inline uint32_t kvf_nvme_location_segment(kvf_location location)
{
    return (uint32_t)(location >> KVF_NVME_PAGE_BITS) & ((1u << KVF_NVME_SEGMENT_BITS) - 1);
}

static inline uint32_t kvf_nvme_pages(uint64_t record_bytes)
{
    return (uint32_t)((record_bytes + KVF_NVME_PAGE_BYTES - 1) / KVF_NVME_PAGE_BYTES);
}

static inline uint32_t kvf_nvme_record_pages(const struct kvf_nvme_record *record)
{
    return record->pages_flags >> 8;
}

static inline uint32_t kvf_nvme_index_pages(uint32_t n_entries)
{
    return (n_entries + KVF_NVME_ENTRIES_A_PAGE - 1) / KVF_NVME_ENTRIES_A_PAGE;
}

static inline struct kvf_nvme_entry *kvf_nvme_index_entry(uint8_t *index, uint32_t i)
{
    return (struct kvf_nvme_entry *)(index +
                                     (size_t)(i / KVF_NVME_ENTRIES_A_PAGE) * KVF_NVME_PAGE_BYTES) +
           i % KVF_NVME_ENTRIES_A_PAGE;
}

static inline uint64_t kvf_nvme_segment_offset(uint64_t segment_bytes, uint32_t segment)
{
    return KVF_NVME_SEGMENT_OFFSET + segment_bytes * segment;
}

void kvf_nvme_list_push(struct kvf_nvme_tier *tier, struct kvf_nvme_list *list, uint32_t segment);
uint32_t kvf_nvme_list_pop(struct kvf_nvme_tier *tier, struct kvf_nvme_list *list);
void kvf_nvme_op_push(struct kvf_nvme_op_list *list, struct kvf_nvme_op *op);
struct kvf_nvme_op *kvf_nvme_op_pop(struct kvf_nvme_op_list *list);

/* --- pages (tier_nvme_page.c); all check functions are for bytes of any origin ---------------- */

/* The checksum of a page whose own checksum is the u32 at crc_offset. */
uint32_t kvf_nvme_page_crc(const void *page, size_t crc_offset);

void kvf_nvme_super_seal(struct kvf_nvme_super *super, uint32_t copy);
/* KVF_OK; KVF_ERR_FOREIGN: no store of ours, or of another major version; KVF_ERR_CORRUPT. */
int kvf_nvme_super_check(const struct kvf_nvme_super *super, uint32_t copy);

void kvf_nvme_state_seal(struct kvf_nvme_state *state, uint32_t copy);
bool kvf_nvme_state_check(const struct kvf_nvme_state *state, const uint8_t uuid[16],
                          uint32_t copy);

/* What a store's pages are checked against. */
struct kvf_nvme_identity {
    const uint8_t *uuid;
    const uint8_t *mac_key;
    uint64_t segment_bytes;
};

void kvf_nvme_keys_derive(const uint8_t id_key[32], const uint8_t uuid[16], uint8_t mac_key_out[32],
                          uint8_t key_check_out[32]);

void kvf_nvme_segment_seal(struct kvf_nvme_segment *page, const struct kvf_nvme_identity *identity,
                           uint64_t generation, uint32_t segment_index);
bool kvf_nvme_segment_check(const struct kvf_nvme_segment *page,
                            const struct kvf_nvme_identity *identity, uint32_t segment_index);

/* index holds n entries; the footer page is written behind their pages. Returns the pages of
 * both. */
uint32_t kvf_nvme_footer_seal(uint8_t *index, uint32_t n_entries, uint32_t data_pages,
                              const struct kvf_nvme_identity *identity, uint64_t generation,
                              uint32_t segment_index);
/* The footer page alone: its numbers can then be trusted to lie inside the segment. */
bool kvf_nvme_footer_check(const struct kvf_nvme_footer *footer,
                           const struct kvf_nvme_identity *identity, uint64_t generation,
                           uint32_t segment_index);
/* The index of a checked footer. */
bool kvf_nvme_index_check(uint8_t *index, const struct kvf_nvme_footer *footer);

/* Fill the store part of a record page. */
void kvf_nvme_record_stamp(struct kvf_record_page *page, const struct kvf_nvme_identity *identity,
                           uint64_t generation, uint64_t sequence, uint64_t record_bytes,
                           uint64_t namespace_id, uint64_t namespace_epoch);
static inline uint64_t kvf_nvme_sequence(uint64_t generation, uint32_t page_index)
{
    return (generation << KVF_NVME_SEQUENCE_BITS) + page_index;
}

/* The record page alone. KVF_OK; KVF_MISS: no record page, or of another generation or place;
 * KVF_ERR_CORRUPT: the header's checksum or a length; KVF_ERR_MISMATCH: the MAC. */
int kvf_nvme_record_check(const struct kvf_record_page *page,
                          const struct kvf_nvme_identity *identity, uint64_t generation,
                          uint32_t page_index);
/* Is it the record of this name? */
bool kvf_nvme_record_matches(const struct kvf_record_page *page, const struct kvf_block_name *name,
                             uint64_t record_bytes);

/* --- head (tier_nvme_head.c), blocking -------------------------------------------------------- */

/* KVF_OK; KVF_ERR_IO; KVF_ERR_NO_SPACE; KVF_ERR_CORRUPT: read beyond the end. */
int kvf_nvme_device_io(struct kvf_nvme_device *device, enum kvf_io_op op, void *buffer,
                       uint64_t offset, uint64_t bytes);

struct kvf_nvme_identity kvf_nvme_identity(const struct kvf_nvme_tier *tier);

/* --- I/O, sync, state (tier_nvme_append.c) ---------------------------------------------------- */

void kvf_nvme_io_submit(struct kvf_nvme_tier *tier, struct kvf_nvme_io *nio, enum kvf_io_op op,
                        void *buffer, uint64_t offset, uint64_t bytes, int fault,
                        kvf_nvme_io_fn then);
void kvf_nvme_io_retry(struct kvf_nvme_tier *tier);
void kvf_nvme_sync_want(struct kvf_nvme_tier *tier, struct kvf_nvme_waiter *waiter);
void kvf_nvme_sync_start(struct kvf_nvme_tier *tier);
void kvf_nvme_state_start(struct kvf_nvme_tier *tier);
void kvf_nvme_error_note(struct kvf_nvme_tier *tier, const char *what, uint64_t offset, int error);
uint64_t kvf_nvme_epoch_find(const struct kvf_nvme_state *state, uint64_t namespace_id);

/* Place the op's record in the open segment and start its write. False: no room. */
bool kvf_nvme_op_place(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op, uint64_t namespace_id,
                       uint64_t namespace_epoch);
void kvf_nvme_stores_place(struct kvf_nvme_tier *tier);
/* The same for the record of a store: at once, or in poll. */
void kvf_nvme_store_begin(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op);
void kvf_nvme_op_finish(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op, int status);
void kvf_nvme_op_finish_later(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op, int status);

/* --- packed records (tier_nvme_pack.c) -------------------------------------------------------- */

/* KVF_OK; KVF_ERR_NO_MEMORY. */
int kvf_nvme_packings_init(struct kvf_nvme_tier *tier);
void kvf_nvme_packings_fini(struct kvf_nvme_tier *tier);
/* May a store begin now, if its record is to be packed first? */
bool kvf_nvme_pack_has_room(const struct kvf_nvme_tier *tier, uint64_t record_bytes);
/* Have the op's record packed, then placed. False: it is to be placed as it is. */
bool kvf_nvme_pack_start(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op);
/* The op of a store is over. */
void kvf_nvme_pack_release(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op);
/* Where a load reads a record to that takes so many pages. */
void kvf_nvme_unpack_prepare(struct kvf_nvme_op *op, uint32_t pages);
/* For a verification by a job. False: all are in use. */
bool kvf_nvme_unpacker_take(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op);
void kvf_nvme_unpacker_give(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op);
/* On a worker: the record that has been read and verified to what it stands for; op->record is then
 * the plain one. KVF_OK; KVF_ERR_CORRUPT. */
int kvf_nvme_unpack(struct kvf_nvme_op *op);

/* --- loads (tier_nvme.c) ---------------------------------------------------------------------- */

/* Read op->record_bytes at op->from into op->record and verify; then kvf_nvme_op_finish for loads,
 * kvf_nvme_copy_loaded for copies. */
void kvf_nvme_op_read(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op);
bool kvf_nvme_is_readable(const struct kvf_nvme_tier *tier, kvf_location location,
                          uint64_t generation);
struct kvf_nvme_record *kvf_nvme_record_find(const struct kvf_nvme_tier *tier,
                                             kvf_location location);
/* The record is no longer live; the figures follow. */
void kvf_nvme_record_kill(struct kvf_nvme_tier *tier, struct kvf_nvme_record *record);

/* --- segments (tier_nvme_segment.c) ----------------------------------------------------------- */

void kvf_nvme_segments_advance(struct kvf_nvme_tier *tier);
/* After a failed sync. */
void kvf_nvme_unsealed_discard(struct kvf_nvme_tier *tier);
void kvf_nvme_copy_loaded(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op, int status);
void kvf_nvme_copy_written(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op, int status);
/* Pages of the open segment that a record of a store may still use. */
uint32_t kvf_nvme_open_room(const struct kvf_nvme_tier *tier);
uint32_t kvf_nvme_open_room_raw(const struct kvf_nvme_tier *tier);

/* --- ops -------------------------------------------------------------------------------------- */

int kvf_nvme_recover(struct kvf_tier *tier);

#endif /* KVF_TIERS_TIER_NVME_INTERNAL_H */
