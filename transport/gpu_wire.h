/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_wire.h: messages around a GPU worker (kvferryd-gpu, one a device), over SOCK_SEQPACKET pairs
 * that the daemon makes. Layout only: no functions. One message a datagram, little-endian.
 *
 *   daemon                                   worker
 *                                        <-  READY    which GPU, or a status and a text
 *   ATTACH + 1 fd: a channel             ->           an engine is at its other end
 *                                        <-  ENGINE   serves it from here on, or no longer
 *                                        <-  COUNTS   each second
 *   DETACH  end an engine's channel      ->
 *   QUIT    end                          ->
 *
 *   engine (libkvferry_gpu)                  worker
 *   HELLO   its HELLO to the daemon      ->
 *                                        <-  WELCOME + 1 fd: flags, or a status and a text
 *   MAPPED                               ->           seals the flags
 *   MEMORY  what lies where [+ 1 fd]     ->
 *   REGISTER  pages in that memory       ->
 *                                        <-  ANSWER   to each of these, FORGET, UNREGISTER, SLEEP
 *                                                     and WAKE, in their order
 *   PUT, GET, then ITEMS of it           ->
 *   CANCEL                               ->
 *                                        <-  EVENTS
 *                                        <-  GONE     before it hangs up in order: nothing of the
 *                                                     engine is in flight or mapped any more
 *
 * Flags: words of shared memory that the engine's streams write, each a count that only grows. A
 * request begins when its flag has reached its flag_value: all that the engine's stream had to do
 * before has been done then, and is visible on the whole device. Nothing is queued on the device
 * before, so no work of one engine ever stands behind an event of another's.
 *
 * Both sides are of one version; there is no other on a node. Types 64 and up are those of the tier
 * in device memory.
 */
#ifndef KVF_TRANSPORT_GPU_WIRE_H
#define KVF_TRANSPORT_GPU_WIRE_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#include "transport/proto_wire.h"

#define KVF_GPUD_MAGIC 0x3147564bU /* "KVG1" */

#define KVF_GPUD_MESSAGE_BYTES_MAX 32768
#define KVF_GPUD_UUID_BYTES        48 /* "GPU-8-4-4-4-12", zero-terminated, rest zero */
#define KVF_GPUD_PATH_BYTES        108
#define KVF_GPUD_WINDOW_MAX        (UINT64_C(1) << 30) /* of what the tier's copies go through */
#define KVF_GPUD_FLAG_BYTES        4096                /* of the memory that holds flags */
#define KVF_GPUD_FLAG_STRIDE       64                  /* each in a line of its own */

enum kvf_gpud_bounds {
    KVF_GPUD_ENGINES_MAX = 64,    /* of one worker */
    KVF_GPUD_REQUESTS_MAX = 64,   /* of one engine, in flight */
    KVF_GPUD_MEMORIES_MAX = 1024, /* of one engine */
    KVF_GPUD_PIECES_MAX = 1024,   /* of one memory */
    KVF_GPUD_REGIONS_MAX = 16,    /* of one engine */
    KVF_GPUD_EVENTS_MAX = 512,    /* of one message */
    KVF_GPUD_TENSORS_MAX = 1024   /* K and V of all layers */
};

enum kvf_gpud_type {
    /* worker and daemon */
    KVF_GPUD_READY = 1,
    KVF_GPUD_QUIT = 2,
    KVF_GPUD_ATTACH = 3,
    KVF_GPUD_DETACH = 4,
    KVF_GPUD_ENGINE = 5,
    KVF_GPUD_COUNTS = 6,

    /* engine and worker */
    KVF_GPUD_HELLO = 16,
    KVF_GPUD_WELCOME = 17,
    KVF_GPUD_MAPPED = 18,
    KVF_GPUD_MEMORY = 19,
    KVF_GPUD_FORGET = 20,
    KVF_GPUD_REGISTER = 21,
    KVF_GPUD_UNREGISTER = 22,
    KVF_GPUD_SLEEP = 23,
    KVF_GPUD_WAKE = 24,
    KVF_GPUD_ANSWER = 25,
    KVF_GPUD_PUT = 26,
    KVF_GPUD_GET = 27,
    KVF_GPUD_ITEMS = 28,
    KVF_GPUD_CANCEL = 29,
    KVF_GPUD_EVENTS = 30,
    KVF_GPUD_GONE = 31,

    KVF_GPUD_TIER_FIRST = 64, /* worker and daemon, about the tier */
    KVF_GPUD_ARENA_START = 64,
    KVF_GPUD_ARENA_MAKE = 65,
    KVF_GPUD_ARENA_MADE = 66,
    KVF_GPUD_ARENA_DROP = 67,
    KVF_GPUD_COPY = 68,
    KVF_GPUD_COPIED = 69,
};

struct kvf_gpud_head {
    uint32_t magic;
    uint16_t type;     /* enum kvf_gpud_type */
    uint16_t reserved; /* 0 */
    uint32_t bytes;    /* of the whole message */
    uint32_t number;   /* of what the message is about: see each one */
};
static_assert(sizeof(struct kvf_gpud_head) == 16, "no hidden padding");

/* ----------------------------------------------------------------------------------------------
 * Worker and daemon
 */
struct kvf_gpud_ready {
    struct kvf_gpud_head head;
    int32_t status;       /* below 0: text says why, and the worker ends */
    uint32_t n_devices;   /* that the worker's process can see */
    uint64_t total_bytes; /* of device memory */
    uint64_t free_bytes;
    char uuid[KVF_GPUD_UUID_BYTES];
    char name[KVF_WIRE_NAME_BYTES];
    char text[KVF_WIRE_TEXT_BYTES];
};
static_assert(sizeof(struct kvf_gpud_ready) == 408, "no hidden padding");

/* A handle is a number that anybody may name, and says nothing about whose memory it opens; a
 * descriptor is had from who has the memory. */
#define KVF_GPUD_ATTACH_NO_HANDLES 1u

struct kvf_gpud_attach { /* with one fd */
    struct kvf_gpud_head head;
    uint64_t connection_id; /* of the engine with the daemon */
    char socket_path[KVF_GPUD_PATH_BYTES];
    uint32_t flags;    /* KVF_GPUD_ATTACH_... */
    uint32_t greet_ms; /* within which the engine has to say HELLO, and MAPPED; not 0 */
    uint32_t reserved;
    uint64_t scratch_bytes; /* that rings and windows of all engines may take, with this one's */
};
static_assert(sizeof(struct kvf_gpud_attach) == 152, "no hidden padding");

struct kvf_gpud_note { /* QUIT, DETACH, ENGINE */
    struct kvf_gpud_head head;
    uint64_t connection_id;
    int32_t status; /* ENGINE: KVF_OK: served; else why it is not, or no longer */
    uint32_t reserved;
};
static_assert(sizeof(struct kvf_gpud_note) == 32, "no hidden padding");

struct kvf_gpud_counts { /* since the worker's start, but for engines and free_bytes */
    struct kvf_gpud_head head;
    uint64_t engines;
    uint64_t free_bytes; /* of device memory */
    uint64_t put_blocks;
    uint64_t put_bytes; /* of KV */
    uint64_t get_blocks;
    uint64_t get_bytes;  /* of KV */
    uint64_t refused;    /* engines, memories, regions */
    uint64_t cut_off;    /* engines that broke the protocol, or did not greet in time */
    uint64_t delayed_ns; /* puts that waited for gpu.rate */
};
static_assert(sizeof(struct kvf_gpud_counts) == 88, "no hidden padding");

/* ----------------------------------------------------------------------------------------------
 * Engine and worker
 */
struct kvf_gpud_hello {
    struct kvf_gpud_head head;
    struct kvf_wire_hello hello; /* what the engine has said to the daemon */
    char uuid[KVF_GPUD_UUID_BYTES];
    uint64_t ring_bytes; /* as in struct kvf_gpu_options */
    uint64_t burst_bytes;
    uint64_t load_window_bytes;
    uint64_t load_group_bytes;
    uint32_t pinning;
    uint32_t reserved;
};
static_assert(sizeof(struct kvf_gpud_hello) == 416, "no hidden padding");

struct kvf_gpud_welcome { /* with one fd if status is KVF_OK */
    struct kvf_gpud_head head;
    int32_t status;
    uint32_t reserved;
    uint64_t flag_bytes; /* of the memory behind the descriptor */
    uint64_t burst_bytes;
    uint64_t profile_fp; /* of what the worker encodes by */
    char text[KVF_WIRE_TEXT_BYTES];
};
static_assert(sizeof(struct kvf_gpud_welcome) == 304, "no hidden padding");

enum kvf_gpud_memory_kind {
    KVF_GPUD_MEMORY_HANDLE = 1, /* of cuMemAlloc: one piece, handle holds */
    KVF_GPUD_MEMORY_FD = 2,     /* of cuMemCreate: pieces side by side, a descriptor with each */
};

/* A run of device addresses of the engine's. With kind FD one message a piece, in their order. */
struct kvf_gpud_memory {
    struct kvf_gpud_head head; /* number: the engine's own for the memory */
    uint32_t kind;             /* enum kvf_gpud_memory_kind */
    uint32_t n_pieces;
    uint32_t piece_index;
    uint32_t reserved;
    uint64_t bytes; /* of the memory */
    uint64_t piece_bytes;
    uint8_t handle[64];
};
static_assert(sizeof(struct kvf_gpud_memory) == 112, "no hidden padding");

struct kvf_gpud_place { /* of one tensor of one layer */
    uint32_t memory;    /* number */
    uint32_t reserved;
    uint64_t offset; /* in it */
};
static_assert(sizeof(struct kvf_gpud_place) == 16, "no hidden padding");

struct kvf_gpud_register {
    struct kvf_gpud_head head; /* number: the engine's own for the region */
    uint32_t n_pages;
    uint32_t tokens_a_page;
    uint32_t n_places; /* K of all layers, then V of all if there is V */
    uint32_t reserved;
    uint64_t page_stride_bytes[2];
    uint64_t token_stride_bytes[2];
    uint64_t head_stride_bytes[2];
    struct kvf_gpud_place places[];
};
static_assert(sizeof(struct kvf_gpud_register) == 80, "no hidden padding");

struct kvf_gpud_plain { /* MAPPED, GONE; FORGET, UNREGISTER: number; SLEEP, WAKE; CANCEL: request */
    struct kvf_gpud_head head;
    uint64_t request;
};
static_assert(sizeof(struct kvf_gpud_plain) == 24, "no hidden padding");

struct kvf_gpud_answer {
    struct kvf_gpud_head head; /* number: that of the message that is answered */
    uint32_t type;             /* of it */
    int32_t status;
    char text[KVF_WIRE_TEXT_BYTES];
};
static_assert(sizeof(struct kvf_gpud_answer) == 280, "no hidden padding");

struct kvf_gpud_request {      /* PUT, GET */
    struct kvf_gpud_head head; /* number: of the region */
    uint64_t request;          /* the engine's own, not 0 */
    uint64_t flag_value;       /* 0: begin at once */
    uint32_t flag;             /* index */
    uint32_t n_items;
    uint32_t n_pages; /* of all items together */
    uint32_t flags;   /* these and the rest: struct kvf_put_options, kvf_get_options */
    uint32_t depth;
    uint32_t ttl_s;
    uint32_t budget_ms;
    uint8_t priority;
    uint8_t parent_bytes; /* 0: none */
    uint8_t reserved[2];
    uint8_t parent[64];
};
static_assert(sizeof(struct kvf_gpud_request) == 128, "no hidden padding");

struct kvf_gpud_item {
    uint8_t key[64];
    uint8_t supersedes[64];
    uint8_t key_bytes;
    uint8_t supersedes_bytes; /* 0: none */
    uint16_t n_pages;
    uint32_t token; /* put: token_start, get: token_first */
    uint32_t n_tokens;
    uint32_t reserved;
    uint32_t pages[]; /* n_pages ids */
};
static_assert(sizeof(struct kvf_gpud_item) == 144, "no hidden padding");

struct kvf_gpud_items { /* the next ones of the request that was announced last */
    struct kvf_gpud_head head;
    uint64_t request;
    uint32_t n_items;
    uint32_t reserved;
    uint8_t items[]; /* struct kvf_gpud_item, one behind the other */
};
static_assert(sizeof(struct kvf_gpud_items) == 32, "no hidden padding");

struct kvf_gpud_event { /* as struct kvf_gpu_event */
    uint64_t request;
    uint8_t kind;
    uint8_t tier;
    uint16_t reserved;
    int32_t status;
    uint32_t index;
    uint32_t reserved2;
};
static_assert(sizeof(struct kvf_gpud_event) == 24, "no hidden padding");

struct kvf_gpud_events {
    struct kvf_gpud_head head; /* number: how many */
    struct kvf_gpud_event events[];
};
static_assert(sizeof(struct kvf_gpud_events) == 16, "no hidden padding");

/* ----------------------------------------------------------------------------------------------
 * Worker and daemon, about the tier in device memory
 *
 *   daemon                                   worker
 *   ARENA_START + 1 fd: the window       ->           maps and pins it
 *   ARENA_MAKE  a piece                  ->
 *                                        <-  ARENA_MADE + 1 fd, or a status
 *   ARENA_DROP                           ->
 *   COPY  between piece and window       ->
 *                                        <-  COPIED, when it is done
 */
struct kvf_gpud_arena_message { /* ARENA_START: number 0; ARENA_MAKE; ARENA_DROP: bytes 0 */
    struct kvf_gpud_head head;  /* number: of the piece */
    uint64_t bytes;
};
static_assert(sizeof(struct kvf_gpud_arena_message) == 24, "no hidden padding");

struct kvf_gpud_made { /* with one fd if status is KVF_OK */
    struct kvf_gpud_head head;
    int32_t status;
    uint32_t reserved;
};
static_assert(sizeof(struct kvf_gpud_made) == 24, "no hidden padding");

struct kvf_gpud_copy {
    struct kvf_gpud_head head; /* number: of the piece */
    uint64_t copy;             /* comes back with COPIED */
    uint64_t piece_offset;
    uint64_t window_offset;
    uint64_t bytes;
    uint32_t is_in; /* 1: into the device */
    uint32_t reserved;
};
static_assert(sizeof(struct kvf_gpud_copy) == 56, "no hidden padding");

struct kvf_gpud_copied {
    struct kvf_gpud_head head;
    uint64_t copy;
    int32_t status;
    uint32_t reserved;
};
static_assert(sizeof(struct kvf_gpud_copied) == 32, "no hidden padding");

#endif /* KVF_TRANSPORT_GPU_WIRE_H */
