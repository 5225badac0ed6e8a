/* SPDX-License-Identifier: Apache-2.0
 *
 * net_wire.h: messages between the daemons of two nodes. Layout only: no functions.
 *
 * A link has two sides: the initiator has connected, asks and learns; the acceptor listens, answers
 * and tells what it has. Two nodes that both want blocks of each other have two links.
 *
 *   initiator                               acceptor
 *   HELLO   versions, layout, nonce     ->
 *                                       <-  WELCOME  status, layout, nonce
 *   CONFIRM under the session's key     ->  the link is up
 *   (ENDPOINT, WELCOME, CONFIRM over connections of their own: one endpoint more each)
 *   FETCH   one block                   ->
 *                                       <-  PIECE    its record in pieces, or
 *                                       <-  ANSWER   why there are none
 *   CREDIT  for more pieces             ->
 *   CANCEL  of a fetch                  ->
 *                                       <-  SNAPSHOT what is here, in parts
 *                                       <-  EVENTS   numbered changes since
 *   RESYNC  send a new snapshot         ->
 *   HEARTBEAT, BYE                      <->
 *
 * A client of another node has a link of its own, over which it speaks the protocol of clients of
 * the node itself (proto_wire.h, proto_shm.h), with messages in the place of shared memory:
 *
 *   client                                  daemon
 *   CLIENT  HELLO and a tenant          ->
 *                                       <-  WELCOME
 *   CONFIRM                             ->  the link is up
 *   CONTROL one message of proto_wire.h <->
 *   STAGE   bytes of staging memory     ->
 *   SUBMIT  a submission and its keys   ->
 *                                       <-  COMPLETE completions; a hit's record follows:
 *                                       <-  PIECE    request is the lease of its completion
 *                                       <-  LANDED   it was whole, or is not to be used
 *   CREDIT  for more pieces             ->
 *
 * On such a link messages are taken in the order in which they were sent, by their numbers.
 *
 * A message is an active message of UCX: struct kvf_net_head is its header, the body its data.
 * Little-endian; sizes are exact. The MAC covers the head (with the MAC itself taken as zero) and,
 * but for PIECE and STAGE, the body: a record has checksums of its own. HELLO and WELCOME are under
 * a key made from the cluster's (of a client: from the cluster's and its tenant's name), all others
 * under the session's.
 */
#ifndef KVF_TRANSPORT_NET_WIRE_H
#define KVF_TRANSPORT_NET_WIRE_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#define KVF_NET_MAGIC       0x314e564bU /* "KVN1" */
#define KVF_NET_VERSION_MIN 1
#define KVF_NET_VERSION_MAX 1

#define KVF_NET_MAC_BYTES    24
#define KVF_NET_NONCE_BYTES  32
#define KVF_NET_NAME_BYTES   64                  /* zero-terminated, rest zero */
#define KVF_NET_TEXT_BYTES   128                 /* zero-terminated, rest zero */
#define KVF_NET_PIECE_BYTES  (256u << 10)        /* of a record, at most, in one PIECE */
#define KVF_NET_WINDOW_BYTES (8u << 20)          /* of PIECEs that no CREDIT has been given for */
#define KVF_NET_EVENTS_MAX   128                 /* in one EVENTS or SNAPSHOT */
#define KVF_NET_CQES_MAX     64                  /* in one COMPLETE */
#define KVF_NET_STAGING_MAX  (UINT64_C(1) << 32) /* of staging memory: what offset reaches */

/* request of the PIECEs of a profile's memory, which follow its CONTROL message; no lease has this
 * number. */
#define KVF_NET_PROFILE_REQUEST 1

/* Above the types of the protocol between clients and daemon. */
enum kvf_net_type {
    KVF_NET_HELLO = 64,
    KVF_NET_WELCOME = 65,
    KVF_NET_CONFIRM = 66,
    KVF_NET_HEARTBEAT = 67,
    KVF_NET_BYE = 68,
    KVF_NET_FETCH = 69,
    KVF_NET_ANSWER = 70,
    KVF_NET_PIECE = 71,
    KVF_NET_CREDIT = 72,
    KVF_NET_CANCEL = 73,
    KVF_NET_SNAPSHOT = 74,
    KVF_NET_EVENTS = 75,
    KVF_NET_RESYNC = 76,
    KVF_NET_CLIENT = 77,
    KVF_NET_CONTROL = 78,
    KVF_NET_SUBMIT = 79,
    KVF_NET_COMPLETE = 80,
    KVF_NET_STAGE = 81,
    KVF_NET_LANDED = 82,
    KVF_NET_ENDPOINT = 83, /* HELLO of one more endpoint of the sender's link */
};

enum kvf_net_head_flags {
    KVF_NET_FROM_ACCEPTOR = 1 << 0, /* so that no message can be sent back to its sender */
};

struct kvf_net_head {
    uint32_t magic;
    uint8_t version;      /* of the link; HELLO and WELCOME: KVF_NET_VERSION_MIN of the sender */
    uint8_t type;         /* enum kvf_net_type */
    uint16_t flags;       /* enum kvf_net_head_flags */
    uint64_t incarnation; /* of the sender: another one after each start */
    uint64_t sequence;    /* of the sender on this link, from 1; none comes twice */
    uint64_t request;     /* FETCH, ANSWER, PIECE, CANCEL: the initiator's number; PIECE, LANDED of
                             a client's hit: the lease; else 0 */
    uint32_t body_bytes;
    uint32_t offset; /* PIECE: in the record; STAGE: in staging; CREDIT: bytes; else 0 */
    uint8_t mac[KVF_NET_MAC_BYTES];
};

struct kvf_net_hello {
    uint16_t version_min, version_max;
    uint32_t ucx_version; /* major << 16 | minor << 8 | release, for people */
    uint64_t layout_fp;   /* of records and messages, net_proto.c */
    uint8_t nonce[KVF_NET_NONCE_BYTES];
    char name[KVF_NET_NAME_BYTES];
};

struct kvf_net_client {
    struct kvf_net_hello hello;
    char tenant[KVF_NET_NAME_BYTES]; /* whose key the client has */
};

struct kvf_net_welcome {
    int32_t status;   /* KVF_OK, or why not */
    uint16_t version; /* chosen; 0 if refused */
    uint16_t reserved;
    uint32_t ucx_version;
    uint32_t reserved2;
    uint64_t layout_fp;
    uint8_t nonce[KVF_NET_NONCE_BYTES];
    uint8_t hello_nonce[KVF_NET_NONCE_BYTES]; /* of the HELLO that this answers */
    char name[KVF_NET_NAME_BYTES];
    char text[KVF_NET_TEXT_BYTES]; /* "" or why not */
};

struct kvf_net_fetch_body {
    uint8_t key_id[32];
    uint32_t record_bytes;
    uint16_t shard;
    uint16_t reserved;
};

/* ANSWER, BYE, LANDED */
struct kvf_net_status_body {
    int32_t status;
    uint32_t reserved;
};

enum kvf_net_change {
    KVF_NET_ADDED = 1,
    KVF_NET_REMOVED = 2,
};

/* One block that came or went. */
struct kvf_net_block {
    uint8_t key_id[32];
    uint32_t record_bytes; /* REMOVED: 0 */
    uint16_t shard;
    uint8_t change; /* enum kvf_net_change; in a SNAPSHOT all are ADDED */
    uint8_t reserved;
};

enum kvf_net_part {
    KVF_NET_SNAPSHOT_FIRST = 1 << 0, /* whatever was known before is forgotten */
    KVF_NET_SNAPSHOT_LAST = 1 << 1,
};

/* Head of SNAPSHOT and EVENTS; the blocks follow. */
struct kvf_net_blocks {
    uint64_t number; /* EVENTS: of the first; SNAPSHOT: of the event that follows it */
    uint32_t count;  /* 0 to KVF_NET_EVENTS_MAX */
    uint16_t part;   /* SNAPSHOT: enum kvf_net_part; EVENTS: 0 */
    uint16_t index;  /* SNAPSHOT: of the part, from 0 and modulo 65536; EVENTS: 0 */
};

#define KVF_NET_BODY_BYTES_MAX                                                                     \
    (sizeof(struct kvf_net_blocks) + KVF_NET_EVENTS_MAX * sizeof(struct kvf_net_block))

static_assert(sizeof(struct kvf_net_head) == 64 && offsetof(struct kvf_net_head, mac) == 40,
              "layout of version 1");
static_assert(sizeof(struct kvf_net_hello) == 112, "layout of version 1");
static_assert(sizeof(struct kvf_net_client) == 176, "layout of version 1");
static_assert(sizeof(struct kvf_net_welcome) == 280, "layout of version 1");
static_assert(sizeof(struct kvf_net_fetch_body) == 40, "layout of version 1");
static_assert(sizeof(struct kvf_net_status_body) == 8, "layout of version 1");
static_assert(sizeof(struct kvf_net_block) == 40, "layout of version 1");
static_assert(sizeof(struct kvf_net_blocks) == 16, "layout of version 1");

#endif /* KVF_TRANSPORT_NET_WIRE_H */
