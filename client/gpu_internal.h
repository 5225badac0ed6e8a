/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_internal.h: what the files of libkvferry_gpu share.
 *
 *   kvf_gpu
 *     +- device, streams            encode and copy out; copy in and decode
 *     +- put side (gpu_put.c)       bursts, each a range of the device ring
 *     +- get side (gpu_get.c)       hits in order, cut into groups, each a place in device memory
 *     +- pins (gpu_pin.c)           staging and arena pieces that the device may copy from and to
 *     +- requests, events           what the caller waits for
 *
 * Who waits for whom (each arrow is named in the code where it is made, and can be taken out by a
 * mutant of that name: tests/gpu/test_order.c sees all of them, the last one between processes):
 *
 *   writer's event -> encode -> pages free           gpu_writer_wait, gpu_free_wait
 *   descriptors -> encode -> D2H -> put, ring reuse  gpu_upload_wait, gpu_encode_wait,
 *                                                    gpu_submit_wait, gpu_ring_wait
 *   lease -> H2D -> decode -> completion, reuse      gpu_release_wait, gpu_copy_wait,
 *   lists -> decode                                  gpu_complete_wait, gpu_lists_wait
 *   reader's event -> decode                         gpu_reader_wait
 *   page of a hit on the device -> its cut           gpu_peek_wait
 *
 * Owner: the thread that uses the client handle.
 */
#ifndef KVF_CLIENT_GPU_INTERNAL_H
#define KVF_CLIENT_GPU_INTERNAL_H

#include "base/mutant.h"
#include "client/client_internal.h"
#include "codec/codec_gpu.h"
#include "codec/codec_gpu_host.h"
#include "codec/codec_layout.h"
#include "gpu/device.h"
#include "gpu/ranges.h"
#include "kvferry.h"

enum kvf_gpu_bounds {
    KVF_GPU_BURSTS_MAX = 32,       /* on their way to the daemon */
    KVF_GPU_BURST_BLOCKS_MAX = 64, /* of one burst */
    KVF_GPU_GROUPS_MAX = 64,       /* on their way to pages */
    KVF_GPU_GROUPS_MIN = 4,        /* copied, decoded, ended, filled */
    KVF_GPU_GROUPS_A_CALL = 4,     /* queued at once: in mode WINDOW this thread copies them */
    KVF_GPU_GROUP_PARTS = 1024,
    KVF_GPU_GROUP_ITEMS = 64,
    KVF_GPU_GROUP_SPANS = 3 * KVF_GPU_GROUP_ITEMS,
    KVF_GPU_ALIGN_BYTES = 256, /* of ranges in device memory */
    KVF_GPU_PEEKS_MAX = 64,    /* heads and pages of hits in device memory, on their way */
    KVF_GPU_PEEK_BYTES = KVF_SHM_DEVICE_HEAD_BYTES + KVF_RECORD_PAGE_BYTES,
};

#define KVF_GPU_TEXT_OF(number)  KVF_GPU_TEXT_OF_(number)
#define KVF_GPU_TEXT_OF_(number) #number
#define KVF_GPU_CLIENT_VERSION                                                                     \
    KVF_GPU_TEXT_OF(KVF_VERSION_MAJOR)                                                             \
    "." KVF_GPU_TEXT_OF(KVF_VERSION_MINOR) "." KVF_GPU_TEXT_OF(KVF_VERSION_PATCH)

#define KVF_GPU_BURST_BYTES       (UINT64_C(64) << 20)
#define KVF_GPU_WINDOW_BYTES      (UINT64_C(64) << 20)
#define KVF_GPU_GROUP_BYTES       (UINT64_C(8) << 20) /* a copy that reaches the link's rate */
#define KVF_GPU_FIRST_GROUP_BYTES (UINT64_C(1) << 20) /* so that the first layer is there early */

struct kvf_gpu_region {
    struct kvf_gpu_region *next;
    uint32_t n_pages;
    uint32_t tokens_a_page;
    uint32_t n_requests; /* that use it */
    struct kvf_gpu_pages strides[2];
    uint64_t *layers[2]; /* device addresses */
    uint32_t number;     /* path AGENT: the worker's name for it */
    bool is_shared;      /* path AGENT: the worker has it */
    uint64_t *seen;      /* a bit a page: occurs in the call that is being checked */
};

/* Memory that the device may copy from or to; keeps the mapping alive. */
struct kvf_gpu_pin {
    struct kvf_gpu_pin *next;
    struct kvf_session *session;
    struct kvf_client_piece *piece; /* NULL: staging */
    void *base;
    uint64_t address; /* of a piece of the GPU's own memory; else 0 */
    uint32_t n_uses;  /* by copies that are queued */
    bool is_pinned;   /* false: the driver refused; copies go through memory of its own, slowly */
};

struct kvf_gpu_request;

/* One block of a request. */
struct kvf_gpu_item {
    struct kvf_gpu_request *request;
    struct kvf_gpu_item *next; /* get: in the queue of hits */
    uint8_t key[KVF_KEY_BYTES_MAX];
    uint8_t supersedes[KVF_KEY_BYTES_MAX];
    uint8_t key_bytes;
    uint8_t supersedes_bytes; /* 0: none */
    bool is_done;
    bool is_leased;
    uint32_t token_start;
    uint32_t token_first;
    uint32_t n_tokens;
    const uint32_t *pages; /* in the request's memory */
    uint32_t n_pages;
    int32_t status; /* get: KVF_OK so far, or why it fails */
    struct kvf_hit hit;
    struct kvf_gpu_pin *pin; /* get: of the hit's piece, NULL in mode WINDOW */
    bool is_device;          /* get: lies in the GPU's memory, at device_offset of the piece */
    uint64_t device_offset;
    uint32_t peek;       /* 1 + index; 0: none */
    uint32_t loop_place; /* get: 1 + index of the place of its sums; 0: none */
};

/* What the host sees of a hit in the GPU's memory. */
struct kvf_gpu_peek {
    void *copied;       /* event, of a batch */
    uint32_t marked_by; /* whose event it is */
    bool is_used;
};

struct kvf_gpu_request {
    struct kvf_gpu_request *next;
    struct kvf_gpu_region *region;
    uint64_t id;
    uint64_t user;
    bool is_put;
    bool is_freed; /* put: PAGES_FREE has been said */
    bool is_canceled;
    uint32_t n;
    uint32_t n_done;
    uint32_t n_good;
    uint32_t n_encoding;   /* put: bursts that still read pages */
    uint32_t n_bursts;     /* put: that refer to this */
    int32_t failed_status; /* of the first block that failed; KVF_OK: none */
    int32_t first_status;  /* get: of block 0 */
    int32_t free_status;   /* put: what PAGES_FREE says */
    int32_t
        local_status; /* put: why a burst did not reach the daemon: those behind do not either */
    void *stream;
    struct kvf_put_options options; /* put; the parent's key is below */
    uint8_t parent[KVF_KEY_BYTES_MAX];
    struct kvf_client_sink sink; /* get */
    uint64_t daemon_request;     /* get */
    struct kvf_gpu_item items[]; /* n, then the page ids */
};

/* Around kernels that follow one another on one stream. */
struct kvf_gpu_times {
    void *begin; /* events with times; NULL: time is not measured */
    void *end;
    bool is_begun; /* and not read */
};

enum kvf_gpu_burst_state {
    KVF_GPU_BURST_ENCODING, /* kernels are queued */
    KVF_GPU_BURST_REDO,     /* some blocks are left to the processor */
    KVF_GPU_BURST_SETTLE,   /* sizes are known; copies are to be queued */
    KVF_GPU_BURST_COPYING,
    KVF_GPU_BURST_READY,     /* in staging */
    KVF_GPU_BURST_SUBMITTED, /* the daemon has it */
    KVF_GPU_BURST_OVER,
};

/* A block of a burst. */
struct kvf_gpu_out {
    uint64_t payload; /* device address */
    uint64_t bound;   /* bytes there at most */
    uint64_t copied;  /* bytes whose copy to the slot is queued */
    bool has_stage;
    bool is_redo;
    bool is_encoded; /* by the processor: page and payload are in the slot */
    struct kvf_stage stage;
};

struct kvf_gpu_burst {
    enum kvf_gpu_burst_state state;
    struct kvf_gpu *gpu;
    struct kvf_gpu_request *request;
    uint32_t first; /* of the request's items */
    uint32_t n;
    int32_t status; /* why its blocks fail */
    uint64_t range; /* device address */
    uint64_t range_bytes;
    uint64_t taken; /* of the ring; 0: given back */
    bool is_redo_queued;
    bool is_encoding; /* counted by the request as reading pages */
    uint32_t n_redone;
    struct kvf_gpu_work work;
    struct kvf_gpu_pin *pin; /* of staging */
    uint8_t *lists;          /* pinned: parts, their numbers kind by kind, page ids */
    struct kvf_gpu_result *results;
    uint64_t results_address;
    void *uploaded; /* events */
    void *encoded;
    void *copied;
    struct kvf_gpu_times times; /* of the encode; over when encoded is */
    struct kvf_gpu_out blocks[KVF_GPU_BURST_BLOCKS_MAX];
    struct kvf_client_sink sink;
    uint64_t daemon_request;
};

/* Parts that one call of kvf_gpu_decode or kvf_gpu_patch may be of: a list for each codec and kind
 * of layers. Strips that are stored raw are alike in all layers. */
struct kvf_gpu_list {
    uint8_t codec; /* enum kvf_block_codec; KVF_CODEC_NONE: sections of raw areas */
    uint8_t kind;
};

struct kvf_gpu_span {
    const uint8_t *from;
    uint64_t offset; /* in the group's memory */
    uint64_t bytes;
    struct kvf_gpu_pin *pin;
};

/* Parts of blocks, copied and decoded together. */
struct kvf_gpu_group {
    uint64_t address;
    uint8_t *window; /* NULL: copied from where it lies */
    uint8_t *lists;  /* pinned: parts, page ids */
    uint64_t lists_address;
    void *uploaded; /* events */
    void *copied;
    void *decoded;
    struct kvf_gpu_times times;      /* of the decode; over when decoded is */
    struct kvf_gpu_request *request; /* of the first part: region and stream */
    uint64_t used_bytes;
    uint32_t n_spans;
    uint32_t n_parts;
    uint32_t n_items;
    uint32_t n_page_ids;
    uint32_t n_ends;
    uint32_t tokens_max;
    struct kvf_gpu_item *first_item; /* the one that page ids were added for first */
    struct kvf_gpu_item *last_item;  /* the same, last */
    uint32_t last_first_page;
    struct kvf_gpu_span spans[KVF_GPU_GROUP_SPANS];
    struct kvf_gpu_item *ends[KVF_GPU_GROUP_ITEMS]; /* blocks of which nothing follows */
};

/* The block that is being cut. */
struct kvf_gpu_cut {
    struct kvf_gpu_item *item; /* NULL: none */
    struct kvf_block_reader reader;
    bool has_unit;
    bool is_section;
    struct kvf_block_part part;
    struct kvf_block_section section;
};

struct kvf_gpu {
    struct kvf_client *client;
    struct kvf_gpu_device *device;
    bool is_device_lent;          /* the device is another's, and stays */
    struct kvf_gpu_remote *agent; /* path AGENT; NULL: all of it is done here */
    struct kvf_gpu_options options;
    struct kvf_codec_plan
        plan; /* as of the last idle moment: the client's changes at a reconnect */
    struct kvf_gpu_kinds kinds;
    struct kvf_gpu_kinds raw_kinds;
    uint64_t given_address; /* what a profile has measured: means of K, V, lists of K, V; 0: nothing
                             */
    uint64_t given_offsets[4];
    uint64_t given_layer_bytes[4]; /* 0: there is none */
    bool is_fixed;
    bool is_awake;
    bool is_broken;
    bool is_break_unreported;
    bool is_pin_failure_said;
    bool is_timed;
    uint64_t time_ns[2]; /* of kernels that encode and decode, not reported so far */
    void *put_stream;
    void *up_stream;  /* lists for kernels: waits for nothing, so that who waits for it does not */
    void *out_stream; /* copies out */
    void *in_stream;  /* copies in */
    void *get_stream;
    struct kvf_gpu_region *regions;
    struct kvf_gpu_pin *pins;

    /* put */
    uint64_t ring_address;
    struct kvf_gpu_ring ring;
    uint32_t burst_blocks_max;
    uint64_t block_bytes; /* of KV of a full chunk */
    uint8_t *burst_memory;
    uint64_t burst_memory_address;
    size_t burst_memory_bytes; /* of one burst */
    struct kvf_gpu_burst *bursts;
    uint32_t burst_first;
    uint32_t n_bursts;
    uint64_t redo_address; /* one block as raw parts */
    uint8_t *redo_memory;
    uint64_t redo_bytes;
    struct kvf_gpu_burst *redo_burst; /* that uses it */

    /* get */
    uint64_t group_memory;
    uint8_t *group_window;       /* pinned */
    uint8_t *group_lists;        /* pinned */
    uint64_t group_bytes;        /* room in each */
    uint64_t group_target_bytes; /* a block is cut there if its end does not fit */
    struct kvf_gpu_group *groups;
    uint32_t n_groups;
    uint32_t group_first;
    uint32_t groups_in_flight;
    struct kvf_gpu_item *hits;
    struct kvf_gpu_item **hits_tail;
    bool has_canceled_hits; /* among hits */
    void *peek_stream;
    uint8_t *peek_memory; /* pinned; NULL: not needed so far */
    struct kvf_gpu_peek peeks[KVF_GPU_PEEKS_MAX];
    struct kvf_gpu_cut cut;
    struct kvf_gpu_part *cut_parts;
    struct kvf_gpu_list *cut_lists; /* of each of these parts */
    uint32_t *cut_page_ids;
    uint64_t loop_memory; /* sums of blocks that are cut; 0: no layers are differences */
    bool loop_used[KVF_GPU_GROUPS_MAX + 1];

    /* requests and events */
    struct kvf_gpu_request *requests;
    uint64_t serial;
    struct kvf_gpu_event *events;
    uint32_t events_size;
    uint32_t events_first;
    uint32_t n_events;
    uint32_t events_owed; /* to come, with room in the queue */
};

static inline uint64_t kvf_gpu_align(uint64_t bytes)
{
    return (bytes + KVF_GPU_ALIGN_BYTES - 1) / KVF_GPU_ALIGN_BYTES * KVF_GPU_ALIGN_BYTES;
}

static inline uint32_t kvf_gpu_parts_a_block(const struct kvf_gpu *gpu)
{
    return gpu->plan.geometry.n_layers * (kvf_plan_has_v(&gpu->plan) ? 2u : 1u);
}

/* Payload bytes of an encoded block. */
static inline uint64_t kvf_gpu_payload_bytes(const struct kvf_gpu_result *result)
{
    return (uint64_t)result->raw_area_offset * KVF_BLOCK_ALIGN_BYTES + result->raw_area_bytes;
}

/* Burst i, from the oldest. */
static inline struct kvf_gpu_burst *kvf_gpu_burst_at(struct kvf_gpu *gpu, uint32_t i)
{
    return &gpu->bursts[(gpu->burst_first + i) % KVF_GPU_BURSTS_MAX];
}

static inline struct kvf_gpu_item *kvf_gpu_burst_item(struct kvf_gpu_burst *burst, uint32_t i)
{
    return &burst->request->items[burst->first + i];
}

/* --- gpu_client.c ----------------------------------------------------------------------------- */

/* kvf_gpu_open on a device of the caller's, kernels loaded, which outlives the handle. */
int kvf_gpu_open_on(struct kvf_client *client, const struct kvf_gpu_options *options,
                    struct kvf_gpu_device *device, struct kvf_gpu **gpu_out);

/* Is there work on the GPU whose end nobody tells of? */
bool kvf_gpu_is_busy(const struct kvf_gpu *gpu);

/* Wait for all that is queued, on whatever stream, in the device's context: pages are neither read
 * nor written any more until the next call. */
void kvf_gpu_drain(struct kvf_gpu *gpu);

/* The GPU has failed: say so once. Returns status. */
int kvf_gpu_break(struct kvf_gpu *gpu, int status);

/* Queue an event for the caller. */
void kvf_gpu_say(struct kvf_gpu *gpu, const struct kvf_gpu_request *request, uint8_t kind,
                 uint32_t index, int32_t status, uint8_t tier);

/* A block has ended. */
void kvf_gpu_item_done(struct kvf_gpu *gpu, struct kvf_gpu_item *item, int32_t status,
                       uint8_t tier);

/* A request with room for n items and n_pages ids, and for all of its events. NULL: no memory. */
struct kvf_gpu_request *kvf_gpu_request_new(struct kvf_gpu *gpu, struct kvf_gpu_region *region,
                                            uint32_t n, uint32_t n_pages, uint64_t user);

/* Forget a request that was not begun. */
void kvf_gpu_request_drop(struct kvf_gpu *gpu, struct kvf_gpu_request *request);

/* Say the last event of requests of which nothing is left, and free them. */
void kvf_gpu_requests_end(struct kvf_gpu *gpu);

/* Are ids inside the region, and none twice? Marks them; unmark before the next call. */
bool kvf_gpu_pages_mark(struct kvf_gpu_region *region, const uint32_t *pages, uint32_t n);
void kvf_gpu_pages_unmark(struct kvf_gpu_region *region, const uint32_t *pages, uint32_t n);

bool kvf_gpu_key_ok(const struct kvf_key *key);

/* Queue kernels in order; kinds: of an encode, else NULL. */
int kvf_gpu_launch_all(struct kvf_gpu *gpu, const struct kvf_gpu_work *work,
                       const struct kvf_gpu_kinds *kinds, const struct kvf_gpu_launch *launches,
                       uint32_t n, void *stream);

/* Before a call that begins something: awake, whole, of the profile in force; resources of what has
 * ended are free. KVF_OK; KVF_ERR_BUSY, _IO, _DISCONNECTED, _NO_DAEMON, _NO_MEMORY. */
int kvf_gpu_begin(struct kvf_gpu *gpu);

/* What the profile has for K or V of a layer. */
void kvf_gpu_part_given(const struct kvf_gpu *gpu, struct kvf_gpu_part *part);

/* --- gpu_pin.c -------------------------------------------------------------------------------- */

/* The pin of the live session's staging, or NULL if there is no session or no memory. */
struct kvf_gpu_pin *kvf_gpu_pin_staging(struct kvf_gpu *gpu);

/* The pin of the piece that a hit lies in; NULL: mode WINDOW, or no memory. */
struct kvf_gpu_pin *kvf_gpu_pin_hit(struct kvf_gpu *gpu, uint64_t lease);

/* Map a piece of the GPU's own memory. KVF_OK, or the driver refuses. */
int kvf_gpu_pin_device(struct kvf_gpu *gpu, struct kvf_session *session,
                       struct kvf_client_piece *piece);

/* Pin new pieces (mode EAGER), unpin what nobody needs any longer. */
void kvf_gpu_pins_tend(struct kvf_gpu *gpu);

/* Unpin everything; no copy is in flight. all: and unmap the daemon's share of the GPU's memory,
 * which is not the engine's to get back. */
void kvf_gpu_pins_drop(struct kvf_gpu *gpu, bool all);

/* --- gpu_device.c ----------------------------------------------------------------------------- */

/* Tell the daemon of the GPU, and map what it gives of that GPU's memory. */
void kvf_gpu_device_tend(struct kvf_gpu *gpu);

/* Queue copies of heads and pages of hits in the GPU's memory. KVF_OK, or the GPU has failed. */
int kvf_gpu_peeks_advance(struct kvf_gpu *gpu);
void kvf_gpu_peeks_sleep(struct kvf_gpu *gpu);

/* Are they there? KVF_OK; KVF_EMPTY; KVF_ERR_IO. */
int kvf_gpu_peek_query(struct kvf_gpu *gpu, const struct kvf_gpu_item *item);

/* As kvf_block_open. What was peeked at stays as it is until give. */
int kvf_gpu_peek_open(struct kvf_gpu *gpu, const struct kvf_gpu_item *item,
                      const struct kvf_block_ranges *ranges, struct kvf_block_reader *reader);
void kvf_gpu_peek_give(struct kvf_gpu *gpu, struct kvf_gpu_item *item);

/* Where the payload of a hit in the GPU's memory lies. */
uint64_t kvf_gpu_item_payload(const struct kvf_gpu_item *item);

/* --- gpu_put.c -------------------------------------------------------------------------------- */
int kvf_gpu_put_wake(struct kvf_gpu *gpu);
void kvf_gpu_put_sleep(struct kvf_gpu *gpu);

/* The most that kernels write for a block; what would take more they leave to the processor. */
uint64_t kvf_gpu_payload_bound(const struct kvf_codec_plan *plan, uint32_t n_tokens);

/* Give a burst's slots back. */
void kvf_gpu_burst_release(struct kvf_gpu *gpu, struct kvf_gpu_burst *burst);

/* The burst's range of the ring is free for others. */
void kvf_gpu_burst_ring_return(struct kvf_gpu *gpu, struct kvf_gpu_burst *burst);

/* Bytes of parts, numbers and page ids. */
uint64_t kvf_gpu_burst_lists_bytes(const struct kvf_gpu_burst *burst);

/* Queue the copy of a payload's first bytes, as far as it is not queued, from ring to slot. */
int kvf_gpu_burst_copy(struct kvf_gpu *gpu, struct kvf_gpu_out *block, uint64_t bytes);

int kvf_gpu_wait(struct kvf_gpu *gpu, void *stream, void *event);
int kvf_gpu_record(struct kvf_gpu *gpu, void *event, void *stream);
void kvf_gpu_event_drop(struct kvf_gpu *gpu, void *event); /* NULL: nothing */

/* --- gpu_time.c ------------------------------------------------------------------------------- */

/* Events, if time is measured; their failure only ends that. */
void kvf_gpu_times_make(struct kvf_gpu *gpu, struct kvf_gpu_times *times);
void kvf_gpu_times_drop(struct kvf_gpu *gpu, struct kvf_gpu_times *times);

/* Before the first and behind the last kernel, on their stream. */
void kvf_gpu_times_begin(struct kvf_gpu *gpu, struct kvf_gpu_times *times, void *stream);
void kvf_gpu_times_end(struct kvf_gpu *gpu, struct kvf_gpu_times *times, void *stream);

/* Something that was queued behind the end is known to be over: report what the kernels took. */
void kvf_gpu_times_take(struct kvf_gpu *gpu, struct kvf_gpu_times *times, bool is_decode);

/* --- gpu_burst.c ------------------------------------------------------------------------------ */

/* Move bursts along. KVF_OK; KVF_ERR_IO and so on: the GPU has failed. */
int kvf_gpu_put_advance(struct kvf_gpu *gpu);

/* End all bursts that the daemon does not have. */
void kvf_gpu_put_fail(struct kvf_gpu *gpu, int status);

/* End the request's bursts as early as what is queued for them allows. */
void kvf_gpu_put_cancel(struct kvf_gpu *gpu, struct kvf_gpu_request *request);

/* --- gpu_loop.c ------------------------------------------------------------------------------- */

/* Are layers stored as differences? */
bool kvf_gpu_is_looped(const struct kvf_gpu *gpu);

/* Take and give back memory for sums; n_groups is known. */
int kvf_gpu_loop_wake(struct kvf_gpu *gpu);
void kvf_gpu_loop_sleep(struct kvf_gpu *gpu);

/* A block has ended: nothing more of it is decoded. */
void kvf_gpu_loop_give(struct kvf_gpu *gpu, struct kvf_gpu_item *item);

/* Queue the decode of the parts that work is of, which begin at `first` in the group's list. */
int kvf_gpu_loop_decode(struct kvf_gpu *gpu, const struct kvf_gpu_group *group,
                        const struct kvf_gpu_work *work, uint32_t first, void *stream);

/* --- gpu_get.c -------------------------------------------------------------------------------- */
int kvf_gpu_get_wake(struct kvf_gpu *gpu);
void kvf_gpu_get_sleep(struct kvf_gpu *gpu);
int kvf_gpu_get_advance(struct kvf_gpu *gpu);
void kvf_gpu_get_fail(struct kvf_gpu *gpu, int status);

/* End the request's blocks as early as what is queued for them allows. */
void kvf_gpu_get_cancel(struct kvf_gpu *gpu, struct kvf_gpu_request *request);

/* --- gpu_agent.c: path AGENT ------------------------------------------------------------------ */

/* Link up; blocks as long as a client's attach may. text says why not. */
int kvf_gpu_remote_open(struct kvf_gpu *gpu, char *text, size_t text_bytes);
void kvf_gpu_remote_close(struct kvf_gpu *gpu);

/* Move the link along: ask, greet, take messages, notice its end. */
void kvf_gpu_remote_advance(struct kvf_gpu *gpu);
bool kvf_gpu_remote_is_up(const struct kvf_gpu *gpu);

/* Sleep until something may have happened or deadline_ns. */
void kvf_gpu_remote_sleep(struct kvf_gpu *gpu, uint64_t deadline_ns);

/* Share pages, and take them back: the worker has unmapped them then. While the link is down there
 * is nothing to do; it shares what there is when it comes up. */
int kvf_gpu_remote_register(struct kvf_gpu *gpu, struct kvf_gpu_region *region);
int kvf_gpu_remote_unregister(struct kvf_gpu *gpu, struct kvf_gpu_region *region);
void kvf_gpu_remote_sleep_memory(struct kvf_gpu *gpu);
int kvf_gpu_remote_wake_memory(struct kvf_gpu *gpu);

/* Hand a request to the worker. KVF_OK; KVF_ERR_BUSY; KVF_ERR_IO: the GPU has failed. */
int kvf_gpu_remote_put(struct kvf_gpu *gpu, struct kvf_gpu_request *request, void *wait_event,
                       void *stream, uint32_t *taken_out);
int kvf_gpu_remote_get(struct kvf_gpu *gpu, struct kvf_gpu_request *request,
                       const struct kvf_gpu_get_item *items, uint32_t budget_ms, void *wait_event,
                       void *stream);
void kvf_gpu_remote_cancel(struct kvf_gpu *gpu, const struct kvf_gpu_request *request);

#endif /* KVF_CLIENT_GPU_INTERNAL_H */
