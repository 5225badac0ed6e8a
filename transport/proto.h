/* SPDX-License-Identifier: Apache-2.0
 *
 * proto.h: what may stand in a control message, a ring entry and a segment header.
 *
 * The layouts are proto_wire.h and proto_shm.h; this is their judge, the same one on both sides.
 * Nothing here trusts a length, a terminator, an enum value or a reserved field. Each check takes a
 * private copy: what still lies in shared memory can change after it was checked.
 *
 * Every check returns KVF_OK or a failure and then sets *why_out to one static line that names the
 * field. All functions: any thread, never block, no allocation.
 */
#ifndef KVF_TRANSPORT_PROTO_H
#define KVF_TRANSPORT_PROTO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvferry.h"
#include "transport/proto_shm.h"
#include "transport/proto_wire.h"

#define KVF_PROTO_PAGE_BYTES   4096
#define KVF_PROTO_RECORD_MAX   ((uint64_t)KVF_RECORD_PAGE_BYTES + KVF_PAYLOAD_BYTES_MAX)
#define KVF_PROTO_PIECE_MAX    (UINT64_C(1) << 30) /* bytes of one arena piece */
#define KVF_PROTO_PIECES_MAX   16384               /* arena pieces of one tenant; a power of two */
#define KVF_PROTO_PIECE_ID_MAX 0x7fffffffu /* numbers of pieces: each names one memfd for good */
#define KVF_PROTO_PROFILE_MAX  (UINT64_C(32) << 20) /* bytes of a profile's memory */
#define KVF_PROTO_STAGING_MAX  (UINT64_C(1) << 36)  /* bytes of one connection's staging */

#define KVF_SHM_RING_ENTRIES_MAX  32768 /* of the submission ring; completions twice as many */
#define KVF_SHM_KEY_ENTRIES_MIN   4096  /* the largest request (below) always fits */
#define KVF_SHM_KEY_ENTRIES_MAX   (1u << 20)
#define KVF_SHM_LEASE_ENTRIES_MAX (1u << KVF_LEASE_INDEX_BITS)

/* Key entries of one request at most: its keys, one parent, one superseded key for each. */
#define KVF_SHM_REQUEST_ENTRIES_MAX (2 * KVF_REQUEST_KEYS_MAX + 1)

enum kvf_proto_side {
    KVF_PROTO_CLIENT = 1,
    KVF_PROTO_DAEMON = 2,
};

/* A received message of any type; head.type says which member holds. */
union kvf_proto_message {
    struct kvf_wire_head head;
    struct kvf_wire_hello hello;
    struct kvf_wire_welcome welcome;
    struct kvf_wire_profile profile;
    struct kvf_wire_piece piece; /* PIECE, PIECE_DROP, the same of a device, DEVICE_MAPPED */
    struct kvf_wire_device device;
    struct kvf_wire_gpu gpu;
    struct kvf_wire_gpu_channel gpu_channel;
    struct kvf_wire_note note; /* MAPPED, READY, BYE */
};

/* Bytes of a message of this type, 0 for an unknown one. */
size_t kvf_proto_type_bytes(unsigned type);

/* Fill the head of a message about to be sent. */
void kvf_proto_head_init(struct kvf_wire_head *head, enum kvf_wire_type type);

/* Copy and check a datagram that came from `sender` with n_fds descriptors. The message is written
 * to *message_out only if it is right, and for KVF_ERR_VERSION, where only the head holds.
 * KVF_OK; KVF_ERR_VERSION: a HELLO or WELCOME in a layout this build does not know; a daemon
 * answers with a WELCOME of that status; KVF_ERR_PROTOCOL: end the connection. */
int kvf_proto_decode(enum kvf_proto_side sender, const void *data, size_t data_bytes,
                     uint32_t n_fds, union kvf_proto_message *message_out, const char **why_out);

/* The highest version both sides speak. KVF_OK; KVF_ERR_VERSION. */
int kvf_proto_version_choose(uint16_t version_min, uint16_t version_max, uint16_t *version_out);

/* Is this one of enum kvf_status? */
bool kvf_proto_status_known(int32_t status);

/* A text field: zero-terminated, only zeroes behind, no control characters (it goes into logs). */
bool kvf_proto_text_ok(const char *text, size_t field_bytes);

/* What record headers carry of the digests, so that client and daemon write and expect the same. 0:
 * none was given. */
uint64_t kvf_proto_model_fp(const struct kvf_wire_hello *hello);

/* The same of what X and latents are rebuilt with; 0: for another kind, or no digest was given. */
uint64_t kvf_proto_weights_fp(const struct kvf_wire_hello *hello);

/* KVF_OK; KVF_ERR_PROTOCOL: a value outside of kvf_limits and the enums of kvferry.h. */
int kvf_proto_geometry_check(const struct kvf_wire_geometry *geometry, const char **why_out);

/* What a daemon knows about a connection when it judges its submissions. */
struct kvf_shm_limits {
    uint64_t staging_bytes;
    uint32_t key_entries; /* of the segment */
    uint32_t key_head; /* key entries consumed so far: where the next request's keys must start */
    bool scheduler;    /* attached with KVF_SHARD_NONE: no put, no get */
    uint16_t version;  /* chosen in WELCOME; 0 counts as the lowest */
};

/* Judge the private copy of a submission. KVF_OK; KVF_ERR_PROTOCOL: disconnect the client. */
int kvf_shm_sqe_check(const struct kvf_shm_sqe *sqe, const struct kvf_shm_limits *limits,
                      const char **why_out);

/* Judge the private copies of the sqe->n_entries keys of a submission that has passed. */
int kvf_shm_keys_check(const struct kvf_shm_sqe *sqe, const struct kvf_shm_key *keys,
                       const struct kvf_shm_limits *limits, const char **why_out);

/* Judge one key entry. with_record: it is one of the n_keys of a put; else it only names a key. */
int kvf_shm_key_check(const struct kvf_shm_sqe *sqe, const struct kvf_shm_key *key,
                      bool with_record, const struct kvf_shm_limits *limits, const char **why_out);

/* A HELLO's geometry as the library and the codecs take it. Copied as it is:
 * kvf_proto_geometry_check has judged it. */
struct kvf_geometry kvf_proto_geometry_get(const struct kvf_wire_geometry *wire);

/* How many block completions a submission has: get, put, prefetch and evict one a key, stat one a
 * counter, others none. */
uint32_t kvf_shm_sqe_blocks(const struct kvf_shm_sqe *sqe);

/* Completion credits a submission costs: its blocks and one; 0 for cancel and release. */
uint32_t kvf_shm_sqe_credits(const struct kvf_shm_sqe *sqe);

/* The last kind of report that there is in a version; 0: it has none. */
uint64_t kvf_shm_report_kind_max(uint16_t version);

/* Lay out a segment: entry counts are powers of two, see the limits above. Everything but
 * connection_id and incarnation is written. Twice as many completions as submissions let the
 * largest request (KVF_REQUEST_KEYS_MAX keys) pass through rings of the default size.
 * KVF_OK; KVF_ERR_INVALID. */
int kvf_shm_layout_init(struct kvf_shm_header *header, uint32_t sq_entries, uint32_t cq_entries,
                        uint32_t key_entries, uint32_t lease_entries);

/* Judge a client's private copy of the header of a segment of segment_bytes (as announced and
 * mapped). KVF_OK; KVF_ERR_PROTOCOL. */
int kvf_shm_header_check(const struct kvf_shm_header *header, uint64_t segment_bytes,
                         const char **why_out);

/* Judge the private copy of a completion by itself. Whether the request, its block, the piece and
 * the range exist is for the client's tables to say. KVF_OK; KVF_ERR_PROTOCOL. */
int kvf_shm_cqe_check(const struct kvf_shm_cqe *cqe, const char **why_out);

#endif /* KVF_TRANSPORT_PROTO_H */
