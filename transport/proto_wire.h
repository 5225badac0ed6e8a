/* SPDX-License-Identifier: Apache-2.0
 *
 * proto_wire.h: control messages between a client and the daemon over a Unix SOCK_SEQPACKET socket.
 * Layout only: no functions. One message a datagram, little-endian, fixed size a type; trailing or
 * missing bytes, unknown types and unexpected descriptors end the connection.
 *
 *   client                                  daemon
 *   HELLO  versions, geometry, profile  ->
 *                                       <-  PROFILE  + 1 fd, if the profile is one of a file
 *                                       <-  WELCOME  + 3 fds: ring segment, staging, eventfd
 *                                           (or a status and a text, and the end)
 *                                       <-  PIECE    + 1 fd, for each arena piece of the tenant
 *   MAPPED (has mapped all of them)     ->
 *                                           seals ring segment and staging
 *                                       <-  READY    requests are accepted from here on
 *                                       <-  PIECE / PIECE_DROP as the arena changes
 *   DEVICE  reads blocks in its GPU's   ->
 *           memory from here on
 *                                       <-  DEVICE_PIECE + 1 fd, DEVICE_PIECE_DROP: the same for
 *                                           pieces of that memory
 *   DEVICE_MAPPED (has mapped one)      ->  blocks in it may be answered where they are
 *                                       <-  one byte of any value: look at the completion ring
 *   GPU (which one, by which path)      ->
 *                                       <-  GPU_CHANNEL + 2 fds: to the worker, and its end
 *                                           (or a status and a text), if the path is AGENT
 *   BYE                                 <-> the sender stops; the daemon gives a status (drain)
 *
 * A datagram of one byte is a wake-up; every other one starts with struct kvf_wire_head.
 * Message types 64 and up belong to the node-to-node protocol.
 */
#ifndef KVF_TRANSPORT_PROTO_WIRE_H
#define KVF_TRANSPORT_PROTO_WIRE_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#define KVF_WIRE_MAGIC       0x3157564bU /* "KVW1" */
#define KVF_WIRE_VERSION_MIN 1
#define KVF_WIRE_VERSION_MAX 6

#define KVF_WIRE_VERSION_UNSUMMED 2 /* the first with KVF_SQE_UNSUMMED; layouts are those of 1 */
#define KVF_WIRE_VERSION_PROFILES 3 /* the first with PROFILE; the other layouts are those of 1 */
#define KVF_WIRE_VERSION_GPU      4 /* the first with GPU, DEVICE and what belongs to them */
#define KVF_WIRE_VERSION_REPORT   5 /* the first with KVF_OP_REPORT; layouts are those of 4 */
#define KVF_WIRE_VERSION_DECODE   6 /* the first with the twelfth kind of report; as 5 otherwise */

#define KVF_WIRE_UUID_BYTES        48  /* "GPU-8-4-4-4-12", zero-terminated, rest zero */
#define KVF_WIRE_NAME_BYTES        64  /* zero-terminated, rest zero */
#define KVF_WIRE_TEXT_BYTES        256 /* zero-terminated, rest zero */
#define KVF_WIRE_FORMATS_MAX       4   /* fixed record sizes a client announces */
#define KVF_WIRE_MESSAGE_BYTES_MAX 1024

enum kvf_wire_type {
    KVF_WIRE_HELLO = 1,
    KVF_WIRE_WELCOME = 2,
    KVF_WIRE_PIECE = 3,
    KVF_WIRE_PIECE_DROP = 4,
    KVF_WIRE_MAPPED = 5,
    KVF_WIRE_READY = 6,
    KVF_WIRE_BYE = 7,
    KVF_WIRE_PROFILE = 8,
    KVF_WIRE_DEVICE = 11,
    KVF_WIRE_DEVICE_PIECE = 12,
    KVF_WIRE_DEVICE_PIECE_DROP = 13,
    KVF_WIRE_DEVICE_MAPPED = 14,
    KVF_WIRE_GPU = 9,
    KVF_WIRE_GPU_CHANNEL = 10,
};

struct kvf_wire_head {
    uint32_t magic;
    uint16_t type;    /* enum kvf_wire_type */
    uint16_t version; /* of the layout that follows; in HELLO the lowest the client speaks */
    uint32_t bytes;   /* of the whole message */
    uint32_t reserved;
};
static_assert(sizeof(struct kvf_wire_head) == 16, "no hidden padding");

/* enum kvf_dtype and its neighbours in kvferry.h give the values. */
struct kvf_wire_geometry {
    uint8_t kind;
    uint8_t dtype;
    uint8_t rope_state;
    uint8_t layout_tag;
    uint16_t n_layers;
    uint16_t n_heads;
    uint16_t dim_k;
    uint16_t dim_v;
    uint16_t chunk_tokens;
    uint16_t sink_tokens;
};
static_assert(sizeof(struct kvf_wire_geometry) == 16, "no hidden padding");

struct kvf_wire_hello {
    struct kvf_wire_head head;
    uint16_t version_min;
    uint16_t version_max;
    uint32_t flags; /* enum kvf_attach_flags of kvferry.h */
    uint16_t shard; /* KVF_SHARD_NONE: scheduler */
    uint16_t shard_count;
    uint32_t ring_entries;
    uint64_t staging_bytes; /* 0: the daemon's default */
    uint64_t profile_fp;    /* fingerprint of the profile as this client's codecs compute it */
    uint64_t record_bytes_max;
    struct kvf_wire_geometry geometry; /* kind BYTES: the rest 0 */
    uint8_t weights_digest[32];
    uint8_t adapter_digest[32];
    char profile[16];
    char label[KVF_WIRE_NAME_BYTES];
    char client_name[KVF_WIRE_NAME_BYTES];
    uint64_t format_record_bytes[KVF_WIRE_FORMATS_MAX]; /* of fixed-size formats, 0: unused */
};
static_assert(sizeof(struct kvf_wire_hello) == 312, "no hidden padding");
static_assert(offsetof(struct kvf_wire_hello, geometry) == 56, "no hidden padding");

struct kvf_wire_welcome {
    struct kvf_wire_head head;
    int32_t status;   /* enum kvf_status; below 0: text says why, no fds, the connection ends */
    uint16_t version; /* chosen */
    uint8_t lossless;
    uint8_t reserved0;
    uint64_t incarnation;
    uint64_t connection_id;
    uint64_t namespace_id;
    uint64_t ring_bytes;
    uint64_t staging_bytes;
    uint64_t arena_bytes;
    uint64_t profile_fp;
    uint32_t credits;
    uint32_t n_pieces;              /* PIECE messages that follow before MAPPED is expected */
    char profile[16];               /* in force */
    char text[KVF_WIRE_TEXT_BYTES]; /* of a refusal: why; else where the profile comes from */
};
static_assert(sizeof(struct kvf_wire_welcome) == 360, "no hidden padding");

/* PIECE and DEVICE_PIECE (with one fd), PIECE_DROP, DEVICE_PIECE_DROP, DEVICE_MAPPED */
struct kvf_wire_piece {
    struct kvf_wire_head head;
    uint32_t piece; /* number used by completions: names one memfd, is never used again */
    uint32_t reserved;
    uint64_t bytes;
};
static_assert(sizeof(struct kvf_wire_piece) == 32, "no hidden padding");

struct kvf_wire_device {
    struct kvf_wire_head head;
    char uuid[KVF_WIRE_UUID_BYTES];
};
static_assert(sizeof(struct kvf_wire_device) == 64, "no hidden padding");

struct kvf_wire_profile { /* with one fd: sealed memory of codec/profile_blob.h */
    struct kvf_wire_head head;
    uint64_t bytes; /* of the memory: whole pages */
    uint64_t profile_fp;
};
static_assert(sizeof(struct kvf_wire_profile) == 32, "no hidden padding");

struct kvf_wire_gpu {
    struct kvf_wire_head head;
    uint32_t path; /* enum kvf_gpu_path: ENGINE is only to be known, AGENT asks for the worker */
    uint32_t reserved;
    char uuid[48]; /* "GPU-8-4-4-4-12" */
};
static_assert(sizeof(struct kvf_wire_gpu) == 72, "no hidden padding");

struct kvf_wire_gpu_channel { /* with two fds if status is KVF_OK: gpu_wire.h, and a pidfd */
    struct kvf_wire_head head;
    int32_t status;
    uint32_t reserved;
    char text[KVF_WIRE_TEXT_BYTES];
};
static_assert(sizeof(struct kvf_wire_gpu_channel) == 280, "no hidden padding");

struct kvf_wire_note { /* MAPPED, READY, BYE */
    struct kvf_wire_head head;
    int32_t status;
    uint32_t reserved;
    uint64_t connection_id;
};
static_assert(sizeof(struct kvf_wire_note) == 32, "no hidden padding");

#endif /* KVF_TRANSPORT_PROTO_WIRE_H */
