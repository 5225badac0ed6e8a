/* SPDX-License-Identifier: Apache-2.0
 *
 * transport_ucx.h: links between daemons of a cluster, over active messages of UCX.
 *
 * One thread of its own does everything with the network; its owner (the reactor) gives it calls
 * and takes events, both by bounded queues, and never waits. Who fetches, has learnt where from the
 * link's stream of blocks (net_wire.h), which this file carries and does not read.
 *
 *   owner                                  the network's thread
 *   kvf_net_connect  addresses       ->    a link to each, again and again
 *                                    <-    LINK_UP, LINK_DOWN
 *   kvf_net_fetch    one record      ->    FETCH ... pieces into the memory given
 *                                    <-    FETCH_DONE: all there, or why not
 *                                    <-    SERVE: somebody wants a record
 *   kvf_net_serve    its memory      ->    pieces out
 *                                    <-    SERVE_DONE: the memory is not read any more
 *   kvf_net_send     of the stream   ->    <-    MESSAGE
 *
 *                                    <-    CLIENT: a client of another node; the descriptor is
 *                                          the other end of what speaks for it
 *
 * Memory given to a fetch or serve is not touched any more once its DONE has been taken. A fetch
 * ends within its deadline whatever the peer does. Bytes that came are not judged here.
 */
#ifndef KVF_TRANSPORT_TRANSPORT_UCX_H
#define KVF_TRANSPORT_TRANSPORT_UCX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#include "base/status.h"
#include "transport/net_wire.h"

enum kvf_net_limits {
    KVF_NET_PEERS_MAX = 32,     /* addresses to connect to */
    KVF_NET_LINKS_MAX = 64,     /* in both directions */
    KVF_NET_ENDPOINTS_MAX = 8,  /* of one link between nodes */
    KVF_NET_LANES_MAX = 64,     /* more endpoints than one a link, of all links */
    KVF_NET_CLIENTS_MAX = 32,   /* of them clients' of other nodes */
    KVF_NET_STRANGERS_MAX = 16, /* of them that have said nothing under a session's key */
    KVF_NET_FETCHES_MAX = 512,  /* on their way */
    KVF_NET_SERVES_MAX = 512,
    KVF_NET_UPCALLS_MAX = 1024, /* SERVE and MESSAGE that nobody has taken */
};

#define KVF_NET_FROM_BYTES 8

struct kvf_net;

/* What a link is known by: never the same again. 0: none. */
typedef uint64_t kvf_net_link;

struct kvf_net_address {
    struct sockaddr_storage address;
    socklen_t bytes;
};

/* The client's end of a link of its own: what it does on the network's thread. */
struct kvf_net_tunnel_ops {
    void (*begin)(void *ctx, struct kvf_net *net); /* once, first: kvf_net_connect and watches */
    void (*up)(void *ctx);
    void (*message)(void *ctx, const struct kvf_net_head *head, const void *body); /* judged */
    void (*down)(void *ctx, int status, const char *why);                          /* for good */
    unsigned (*turn)(void *ctx, uint64_t now_ns, bool has_slept);
    bool (*sleep)(void *ctx); /* false: there is something to do */
    void (*awake)(void *ctx);
};

struct kvf_net_config {
    uint8_t cluster_key[32];                 /* of a client: its tenant's */
    char tenant[KVF_NET_NAME_BYTES];         /* "": this is a daemon */
    const struct kvf_net_tunnel_ops *tunnel; /* a client's */
    void *tunnel_ctx;
    uint64_t incarnation; /* of this daemon, not 0 */
    char name[KVF_NET_NAME_BYTES];
    struct kvf_net_address listen; /* bytes 0: nobody can connect */
    uint32_t endpoints; /* of a link that this side makes, 1 to KVF_NET_ENDPOINTS_MAX; 0: 1 */
    uint64_t heartbeat_ns;
    uint64_t silence_ns;         /* a link on which nothing comes for so long is down */
    uint32_t tenant_clients_max; /* clients of other nodes of one tenant; 0: KVF_NET_CLIENTS_MAX */
    uint64_t retry_ns; /* first pause before an address is tried again; doubles up to 16 times */
    void (*wake)(void *ctx); /* any thread: there is an event; NULL: a client */
    void *wake_ctx;
};

/* One record from a peer. Owned by the caller, untouched by it from fetch to FETCH_DONE. */
struct kvf_net_fetch {
    kvf_net_link link;
    uint8_t key_id[32];
    uint16_t shard;
    void *record;
    uint32_t record_bytes; /* the peer's record has exactly so many, or it is a miss */
    uint64_t deadline_ns;  /* kvf_now_ns() */
    int32_t status;        /* in FETCH_DONE: KVF_OK; KVF_MISS: it has none; KVF_ERR_BUSY: it cannot
                              now; KVF_ERR_TIMEOUT; KVF_ERR_DISCONNECTED */
    bool is_summed;        /* the same: all has come in order, and was summed as it was copied */
    uint32_t payload_crc32c; /* if so: of all behind the record's page */
    void *owner;
    uint64_t request;    /* for the network's thread */
    kvf_net_link lane;   /* the same */
    uint32_t come_bytes; /* the same */
};

/* The answer to a SERVE. The same rules. */
struct kvf_net_serve {
    kvf_net_link link;
    kvf_net_link lane; /* of the SERVE */
    uint64_t request;  /* the same */
    int32_t status;    /* KVF_OK: the record goes out; else only this does */
    const void *record;
    uint32_t record_bytes;
    void *owner;
    uint32_t sent_bytes;        /* for the network's thread */
    uint32_t sends;             /* the same */
    bool is_over;               /* the same */
    bool is_relayed;            /* the same: for a client of another node */
    struct kvf_net_serve *next; /* the same */
};

enum kvf_net_event_kind {
    KVF_NET_EVENT_LINK_UP = 1,
    KVF_NET_EVENT_LINK_DOWN = 2,
    KVF_NET_EVENT_FETCH_DONE = 3,
    KVF_NET_EVENT_SERVE = 4,
    KVF_NET_EVENT_SERVE_DONE = 5,
    KVF_NET_EVENT_MESSAGE = 6,
    KVF_NET_EVENT_CLIENT = 7,
    KVF_NET_EVENT_OFFENCE = 8, /* a client has broken the protocol; its link ends */
};

struct kvf_net_event {
    uint8_t kind;          /* enum kvf_net_event_kind */
    bool is_initiator;     /* LINK_UP: this side has connected */
    uint8_t type;          /* MESSAGE: SNAPSHOT, EVENTS or RESYNC */
    uint16_t shard;        /* SERVE */
    uint32_t body_bytes;   /* MESSAGE */
    uint32_t record_bytes; /* SERVE */
    int fd;                /* CLIENT: the taker's to close */
    kvf_net_link link;
    kvf_net_link lane;    /* SERVE: where the answer goes */
    uint64_t request;     /* SERVE */
    uint64_t incarnation; /* LINK_UP: the peer's; CLIENT: a number of its process */
    struct kvf_net_fetch *fetch;
    struct kvf_net_serve *serve;
    uint8_t key_id[32];            /* SERVE */
    void *body;                    /* MESSAGE: judged; the taker gives it back to free() */
    char name[KVF_NET_NAME_BYTES]; /* LINK_UP: the peer's; CLIENT, OFFENCE: its tenant's */
    /* CLIENT, OFFENCE: where it has connected from, as far as one node is told from another: an
     * address of IPv4, the first half of one of IPv6, of which it has all. Zeroes: not known. */
    uint8_t from[KVF_NET_FROM_BYTES];
    char address[64]; /* LINK_UP of an initiator: where it is */
};

/* What has happened so far. Any thread. */
struct kvf_net_stat {
    uint64_t protocol_errors;            /* links ended because the peer broke the protocol */
    uint64_t refused;                    /* links refused by one side: key, version, layout, room */
    uint64_t strangers;                  /* messages from nobody */
    uint64_t sent_bytes, received_bytes; /* of records */
    uint32_t endpoints;                  /* between nodes, up now: one a link, or more */
};

/* Start the thread, and listen. KVF_OK; KVF_ERR_CONFIG: the address cannot be used;
 * KVF_ERR_UNSUPPORTED: no UCX; KVF_ERR_NO_MEMORY, _IO. why: one line. */
int kvf_net_open(const struct kvf_net_config *config, struct kvf_net **net_out, char *why,
                 size_t why_bytes);
/* Ends all links; takes a second at most. Calls that are not over are forgotten: their memory is
 * not touched any more. NULL is fine. */
void kvf_net_close(struct kvf_net *net);
/* The same without waiting: the thread closes by itself, once the tunnel's call that it may be in
 * has come back, and calls closed at its very end. Nothing is to be called for net any more. */
void kvf_net_close_later(struct kvf_net *net, void (*closed)(void *ctx), void *closed_ctx);

/* The port that is listened on, 0: none. */
uint16_t kvf_net_port(const struct kvf_net *net);
/* "UCX 1.13.1, tcp" and the like. */
const char *kvf_net_about(const struct kvf_net *net);
void kvf_net_stat(const struct kvf_net *net, struct kvf_net_stat *stat_out);

/* The next three: a tunnel's, inside of its calls. */

/* Send a message on the client's link. is_kept: the body lives until the link is down or the daemon
 * has answered; else it is copied. False: the link is broken. */
bool kvf_net_tunnel_send(struct kvf_net *net, enum kvf_net_type type, uint64_t request,
                         uint32_t offset, const void *body, uint32_t body_bytes, bool is_kept);
/* Is there room for one more message now? */
bool kvf_net_tunnel_room(const struct kvf_net *net);
/* End it. */
void kvf_net_tunnel_break(struct kvf_net *net, int status, const char *why);
/* Wake the thread when a descriptor becomes readable, and not any more. */
int kvf_net_watch(struct kvf_net *net, int fd, bool is_edge_triggered);
void kvf_net_unwatch(struct kvf_net *net, int fd);

/* All below: the owner only. KVF_OK; KVF_ERR_BUSY: a queue is full, nothing has happened. */

/* Keep links to these addresses and no others. */
int kvf_net_connect(struct kvf_net *net, const struct kvf_net_address *addresses, uint32_t n);
int kvf_net_fetch(struct kvf_net *net, struct kvf_net_fetch *fetch);
int kvf_net_serve(struct kvf_net *net, struct kvf_net_serve *serve);
/* Copies the body. Lost if the link is not up any more. */
int kvf_net_send(struct kvf_net *net, kvf_net_link link, enum kvf_net_type type, const void *body,
                 uint32_t body_bytes);
/* End a link; it is tried again like one that broke. */
int kvf_net_hang_up(struct kvf_net *net, kvf_net_link link);
/* The next event. False: none. */
bool kvf_net_poll(struct kvf_net *net, struct kvf_net_event *event_out);

#endif /* KVF_TRANSPORT_TRANSPORT_UCX_H */
