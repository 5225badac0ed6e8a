/* SPDX-License-Identifier: Apache-2.0
 *
 * proto_shm.h: layout of the memory that one client and the daemon share. Layout only: no
 * functions.
 *
 * Three kinds of memfd reach a client, all made and sealed by the daemon:
 *   ring segment   one a connection, writable by both sides: this file
 *   staging        one a connection, writable by both sides: records on their way in
 *   arena pieces   one or more a tenant, read-only for clients: records by (piece, offset)
 *
 *   ring segment
 *   +--------------------------+ 0
 *   | kvf_shm_header, 4 KiB    |   written once by the daemon before the client sees it
 *   +--------------------------+ 4096
 *   | kvf_shm_indices, 512 B   |   one cache line per writer and purpose
 *   +--------------------------+ sq_offset
 *   | kvf_shm_sqe [sq_entries] |   written by the client
 *   +--------------------------+ cq_offset
 *   | kvf_shm_cqe [cq_entries] |   written by the daemon
 *   +--------------------------+ keys_offset
 *   | kvf_shm_key [key_entries]|   written by the client
 *   +--------------------------+ leases_offset
 *   | u64 [lease_entries]      |   written by the daemon
 *   +--------------------------+
 *
 * Rules. All integers are little-endian. Each ring has one producer and one consumer; an index
 * counts entries since attach and wraps at 2^32, the slot is index modulo the (power of two) entry
 * count. A producer fills the entry, then stores the index with release order; a consumer loads the
 * index with acquire order. The daemon copies an entry and its keys once into private memory and
 * validates the copy; it never reads back what it wrote here. A client that breaks a rule is
 * disconnected.
 *
 * Sleeping. Before a side sleeps it stores 1 to its sleeping word (sequentially consistent) and
 * looks at the ring once more; a producer that has stored its index issues a sequentially
 * consistent fence, reads the word and, if it is 1, wakes the other side. A client wakes the daemon
 * by writing 8 bytes to the eventfd; the daemon wakes a client by one byte on the socket.
 */
#ifndef KVF_TRANSPORT_PROTO_SHM_H
#define KVF_TRANSPORT_PROTO_SHM_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#define KVF_SHM_MAGIC             0x31474e495246564bULL /* "KVFRING1" */
#define KVF_SHM_VERSION           1
#define KVF_SHM_DEVICE_HEAD_BYTES 8192 /* before each record in a GPU's memory: its outline */
#define KVF_SHM_LOOK_MS           100 /* a daemon that nobody wakes looks at its rings this often */

struct kvf_shm_header {
    uint64_t magic;
    uint16_t version;
    uint16_t header_bytes; /* sizeof(struct kvf_shm_header) */
    uint32_t reserved0;
    uint64_t segment_bytes;
    uint32_t indices_offset;
    uint32_t sq_offset;
    uint32_t sq_entries; /* power of two */
    uint32_t cq_offset;
    uint32_t cq_entries; /* power of two; equals the credits granted */
    uint32_t keys_offset;
    uint32_t key_entries; /* power of two */
    uint32_t leases_offset;
    uint32_t lease_entries; /* power of two */
    uint32_t reserved1;
    uint64_t connection_id;
    uint64_t incarnation;
    uint8_t reserved[4016];
};
static_assert(sizeof(struct kvf_shm_header) == 4096, "header is one page");
static_assert(offsetof(struct kvf_shm_header, connection_id) == 64, "no hidden padding");

struct kvf_shm_line {
    _Alignas(64) uint32_t value;
    uint8_t pad[60];
};

struct kvf_shm_indices {
    struct kvf_shm_line sq_tail;  /* client: entries produced */
    struct kvf_shm_line sq_head;  /* daemon: entries consumed; their slots may be rewritten */
    struct kvf_shm_line cq_tail;  /* daemon: entries produced */
    struct kvf_shm_line cq_head;  /* client: entries consumed; gives credits back */
    struct kvf_shm_line key_head; /* daemon: key entries copied; their slots may be rewritten */
    struct kvf_shm_line daemon_sleeping; /* daemon: 1 before it sleeps */
    struct kvf_shm_line client_sleeping; /* client: 1 before it sleeps */
    struct kvf_shm_line heartbeat;       /* daemon: changes at least once a second while it lives */
};
static_assert(sizeof(struct kvf_shm_indices) == 512, "eight cache lines");

enum kvf_shm_opcode {
    KVF_OP_NOP = 1,      /* completes at once: ping */
    KVF_OP_LOOKUP = 2,   /* keys [0, n_keys - n_tails) a chain, then n_tails tails, longest first */
    KVF_OP_GET = 3,      /* keys in chain order */
    KVF_OP_PUT = 4,      /* keys in chain order, with staging ranges */
    KVF_OP_PREFETCH = 5, /* keys in chain order */
    KVF_OP_EVICT = 6,
    KVF_OP_STAT = 7, /* one block completion a counter: index = enum kvf_shm_stat, offset = value */
    KVF_OP_CANCEL = 8,  /* arg = request; completes nothing of its own and costs no credit */
    KVF_OP_RELEASE = 9, /* arg = lease id; completes nothing and costs no credit */
    KVF_OP_REPORT = 10, /* arg = amount << 8 | enum kvf_report_kind; the same; from version 5 on */
};
#define KVF_REPORT_KIND_BITS 8
#define KVF_REPORT_KIND_MAX  12 /* 11 before KVF_WIRE_VERSION_DECODE */
#define KVF_REPORT_MAX       (UINT64_C(1) << 40)

enum kvf_shm_sqe_flags {
    KVF_SQE_DURABLE = 1 << 0,  /* put: complete after the NVMe write */
    KVF_SQE_NO_WRITE = 1 << 1, /* put: never write to NVMe */
    KVF_SQE_LEASE = 1 << 2,    /* lookup: lease the ready part */
    KVF_SQE_PREFETCH = 1 << 3, /* lookup: fetch the rest */
    KVF_SQE_HAS_PARENT =
        1 << 4, /* put: the entry after the n_keys keys names the chunk before the first */
    KVF_SQE_UNSUMMED = 1 << 5, /* put: the pages do not know payload_crc32c, the daemon sums; from
                                  version 2 on */
    KVF_SQE_DEVICE = 1 << 6,   /* get: reads what is in its GPU's memory there; from version 4 on */
};

/* A submission. Keys are key entries key_first .. key_first + n_entries - 1 (modulo key_entries):
 * n_keys keys, then the parent if flagged, then entries that keys refer to by `supersedes`. */
struct kvf_shm_sqe {
    uint64_t request; /* chosen by the client, unique among its requests in flight, not 0 */
    uint8_t opcode;   /* enum kvf_shm_opcode */
    uint8_t flags;    /* enum kvf_shm_sqe_flags; others 0 */
    uint16_t n_keys;
    uint16_t n_entries;
    uint16_t n_tails;
    uint32_t key_first;
    uint32_t budget_ms;
    uint32_t depth;
    uint32_t ttl_s;
    uint8_t priority;
    uint8_t reserved0[7];
    uint64_t arg;
    uint8_t reserved1[16];
};
static_assert(sizeof(struct kvf_shm_sqe) == 64, "one cache line");
static_assert(offsetof(struct kvf_shm_sqe, arg) == 40, "no hidden padding");

struct kvf_shm_key {
    uint8_t key[64];
    uint16_t key_bytes;    /* 16..64; the rest of key is 0 */
    uint16_t supersedes;   /* put: 0 none, else 1 + position of another entry of this request */
    uint32_t token_start;  /* put: for lists only; the record page is what counts */
    uint64_t stage_offset; /* put: of the record page in staging, 4 KiB-aligned */
    uint64_t record_bytes; /* put: record page and payload */
    uint8_t reserved[40];
};
static_assert(sizeof(struct kvf_shm_key) == 128, "two cache lines");
static_assert(offsetof(struct kvf_shm_key, stage_offset) == 72, "no hidden padding");

enum kvf_shm_cqe_kind {
    KVF_CQE_BLOCK = 1,
    KVF_CQE_REQUEST = 2, /* the last entry of its request */
};

struct kvf_shm_cqe {
    uint64_t request;
    uint8_t kind; /* enum kvf_shm_cqe_kind */
    uint8_t tier; /* enum kvf_tier_kind */
    uint16_t reserved0;
    int32_t status;  /* enum kvf_status */
    uint32_t index;  /* block: key position; request: blocks that succeeded */
    uint32_t piece;  /* get: arena piece of the record; with tier HBM one of the GPU's, and a
                        head of KVF_SHM_DEVICE_HEAD_BYTES stands before the record */
    uint64_t offset; /* get: of the record page in the piece; stat: the value */
    uint64_t record_bytes;
    uint64_t lease;     /* get: of this block; lookup (request entry): of the ready part; 0 none */
    uint32_t values[4]; /* lookup (request entry): run, ready, coming chunks, 1 + tail index or 0 */
};
static_assert(sizeof(struct kvf_shm_cqe) == 64, "one cache line");
static_assert(offsetof(struct kvf_shm_cqe, lease) == 40, "no hidden padding");

enum kvf_shm_stat {
    KVF_STAT_NAMESPACE_BLOCKS = 0,
    KVF_STAT_NAMESPACE_DRAM_BYTES = 1,
    KVF_STAT_NAMESPACE_NVME_BYTES = 2,
    KVF_STAT_ARENA_BYTES = 3,
    KVF_STAT_ARENA_STORED_BYTES = 4,
    KVF_STAT_HITS = 5,
    KVF_STAT_MISSES = 6,
    KVF_STAT_PUTS = 7,
    KVF_STAT_LEASED_BYTES = 8,
    KVF_STAT_LOST_LEASES = 9,
    KVF_STAT_COUNT = 10,
};

/* A lease id is (generation << 16 | index); index is that of its word in the lease table. The word
 * is (generation << 8 | state). Generation starts at 1, grows with each use of the index and stays
 * under 2^48. The daemon stores LOST with release order, and reuses the memory of the block only
 * afterwards. A client that has read the block issues an acquire fence and reads the word: (its
 * generation, LIVE) means that every byte it read was the block's. */
enum kvf_shm_lease_state {
    KVF_LEASE_FREE = 0,
    KVF_LEASE_LIVE = 1,
    KVF_LEASE_LOST = 2,
};
#define KVF_LEASE_INDEX_BITS 16

#endif /* KVF_TRANSPORT_PROTO_SHM_H */
