/* SPDX-License-Identifier: Apache-2.0
 *
 * transport_ucx_internal.h: what the files of the network's thread share; not for others.
 *
 *   transport_ucx.c        the thread, its queues, opening and closing
 *   transport_ucx_link.c   links: connect, accept, handshake, liveness, close
 *   transport_ucx_doors.c  connections that say nothing
 *   transport_ucx_lane.c   more endpoints of a link
 *   transport_ucx_flow.c   messages of links that are up: records and their credit, the stream
 *   transport_ucx_relay.c  clients of other nodes: what speaks for them to the daemon
 *   transport_ucx_tunnel.c a client's own end, as far as it is the network's
 *
 * Everything here is the thread's but for what is marked otherwise.
 */
#ifndef KVF_TRANSPORT_TRANSPORT_UCX_INTERNAL_H
#define KVF_TRANSPORT_TRANSPORT_UCX_INTERNAL_H

#include <dirent.h>
#include <pthread.h>
#include <stdatomic.h>
#include <ucp/api/ucp.h>

#include "base/env.h"
#include "base/log.h"
#include "base/pool.h"
#include "base/ring.h"
#include "transport/net_proto.h"
#include "transport/transport_ucx.h"
#include "transport/ucx_api.h"

enum kvf_net_inner_limits {
    KVF_NET_LINK_SENDS_MAX = 64, /* PIECEs and STAGEs of one link that UCX has not taken yet */
    KVF_NET_PEER_SENDS_MAX = (KVF_NET_LINKS_MAX + KVF_NET_LANES_MAX) * KVF_NET_LINK_SENDS_MAX,
    KVF_NET_CLIENT_SENDS_MAX = 512, /* messages of any kind to one client, which ends with more */
    KVF_NET_SENDS_MAX = KVF_NET_PEER_SENDS_MAX + KVF_NET_CLIENTS_MAX * KVF_NET_CLIENT_SENDS_MAX,
    KVF_NET_RELAY_SENDS_MAX = 128, /* of them of a client's link, before it waits */
    KVF_NET_STREAM_SENDS_MAX = 16, /* of them of one link's stream */
    KVF_NET_REQUESTS_MAX = 8,      /* connections that have come and are not links yet */
    KVF_NET_LINK_EVENTS_MAX = 4 * KVF_NET_LINKS_MAX,
    KVF_NET_DOORS_MAX = 64,
};

#define KVF_NET_AM_ID 7

enum kvf_link_state {
    KVF_LINK_FREE = 0,
    KVF_LINK_CONNECTING = 1, /* initiator: HELLO is on its way, WELCOME awaited */
    KVF_LINK_ACCEPTED = 2,   /* acceptor: HELLO awaited */
    KVF_LINK_WELCOMED = 3,   /* acceptor: CONFIRM awaited */
    KVF_LINK_UP = 4,
    KVF_LINK_CLOSING = 5,
};

/* An address to connect to. */
struct kvf_link_peer {
    struct kvf_net_address address;
    uint32_t link; /* 1 + index; 0: none now */
    uint32_t failures;
    uint64_t next_try_ns;
    int32_t said; /* status of the last failure that was logged */
    bool is_wanted;
    char text[64]; /* the address */
};

struct kvf_link_held {
    struct kvf_link_held *next;
    struct kvf_net_head head;
    uint8_t body[];
};

struct kvf_link {
    struct kvf_net *net;
    uint8_t state; /* enum kvf_link_state */
    uint8_t version;
    bool is_initiator;
    bool is_broken;  /* to be closed at the next safe place: never inside of a callback */
    bool is_refused; /* WELCOME says no; closed a moment later */
    bool is_client;  /* a client of another node, or of this process */
    bool owes_up, owes_down;
    int32_t status; /* why it is broken */
    uint32_t generation;
    uint32_t peer;          /* initiator */
    kvf_net_link of;        /* a lane: the link that it is of; else 0 */
    uint64_t lane_try_ns;   /* initiator: when the next lane is made */
    uint32_t lane_failures; /* the same: one after the other */
    uint32_t sends;
    uint32_t piece_sends;
    ucp_ep_h ep;
    ucs_status_ptr_t closing;
    uint64_t incarnation; /* the other side's */
    uint64_t sequence;
    uint64_t sequence_come;     /* client: of the last message that was taken */
    struct kvf_link_held *held; /* client: came early, by sequence */
    uint32_t n_held, held_bytes;
    uint64_t begun_ns, came_ns, sent_ns;
    uint64_t end_ns; /* refused: when it is closed */
    struct kvf_net_replay replay;
    uint8_t nonce[KVF_NET_NONCE_BYTES];
    uint8_t greet_key[32]; /* of HELLO, CLIENT and WELCOME */
    uint8_t key[32];
    struct kvf_relay *relay; /* acceptor of a client */
    uint32_t credit_bytes;   /* acceptor: of PIECEs that may go out */
    uint64_t moved_ns;       /* acceptor: when the last one did, or there was first one to go */
    uint32_t owed_bytes;     /* initiator: of PIECEs that came and no CREDIT has gone out for */
    struct kvf_net_serve *serves, *serves_tail;
    char name[KVF_NET_NAME_BYTES];
    char tenant[KVF_NET_NAME_BYTES];  /* of a client */
    uint8_t from[KVF_NET_FROM_BYTES]; /* acceptor */
    struct kvf_net_address at;        /* acceptor: where the other side is; bytes 0: not known */
    char why[160];
};

/* One message that UCX may still read. */
struct kvf_link_send {
    struct kvf_net_head head;
    uint8_t body[sizeof(struct kvf_net_welcome)];
    void *owned; /* body, to be freed */
    bool is_stream;
    struct kvf_link *link;
    uint32_t generation; /* of the link */
    struct kvf_net_serve *serve;
};

enum kvf_net_command_kind {
    KVF_NET_COMMAND_CONNECT = 1,
    KVF_NET_COMMAND_FETCH = 2,
    KVF_NET_COMMAND_SERVE = 3,
    KVF_NET_COMMAND_SEND = 4,
    KVF_NET_COMMAND_HANG_UP = 5,
};

struct kvf_net_command {
    uint8_t kind; /* enum kvf_net_command_kind */
    uint8_t type; /* SEND */
    uint32_t n;   /* CONNECT: addresses; SEND: bytes */
    kvf_net_link link;
    void *data; /* CONNECT, SEND: to be freed; FETCH, SERVE: the call */
};

/* Ports on which UCX takes connections. */
struct kvf_doors {
    DIR *folder; /* the descriptors of this process; NULL: nothing is looked for */
    int spare_fd;
    uint32_t n;
    uint16_t ports[KVF_NET_DOORS_MAX];
    uint64_t look_ns;
};

struct kvf_net {
    struct kvf_net_config config;
    struct kvf_ucx_api ucx;
    uint8_t peer_key[32];
    uint64_t layout_fp;
    struct kvf_env env;
    char about[64];
    uint16_t port;

    ucp_context_h context;
    ucp_worker_h worker;
    ucp_listener_h listener;
    int worker_fd;
    int waker_fd;
    int epoll_fd;
    pthread_t thread;
    bool has_thread;
    pthread_mutex_t handover;  /* the closer holds it as long as it still knows net */
    void (*closed)(void *ctx); /* the closer sets, before stop; NULL: it waits for the thread */
    void *closed_ctx;
    _Atomic bool stop;        /* the owner sets */
    _Atomic bool is_sleeping; /* the owner skips the system call while the thread is awake */

    struct kvf_ring commands; /* from the owner */
    struct kvf_ring events;   /* to the owner */
    bool has_slept;           /* since the last turn */
    bool has_waiting;         /* a relay has submissions for which the daemon makes room unasked */
    bool has_news;            /* events since the owner was woken */
    uint32_t fetches_count, serves_count;             /* the owner's: not yet DONE */
    _Atomic uint32_t upcalls, link_events;            /* in events, not yet taken */
    _Atomic uint32_t stream_sends[KVF_NET_LINKS_MAX]; /* given and not yet gone */
    _Atomic uint64_t protocol_errors, refused, strangers, sent_bytes, received_bytes;
    _Atomic uint32_t endpoints;

    uint64_t now_ns;
    uint32_t generations;
    uint64_t requests_serial;
    struct kvf_link links[KVF_NET_LINKS_MAX + KVF_NET_LANES_MAX]; /* lanes behind the others */
    uint32_t links_end; /* behind the last that is in use */
    uint64_t lane_look_ns;
    struct kvf_link *last_link; /* of the last message; or NULL */
    struct kvf_link_peer peers[KVF_NET_PEERS_MAX];
    uint32_t n_peers;
    struct kvf_net_fetch *fetches[KVF_NET_FETCHES_MAX]; /* by request, modulo */
    uint32_t n_fetches;
    uint64_t expire_ns; /* when deadlines are looked at next */
    struct kvf_pool sends;
    ucp_conn_request_h arrivals[KVF_NET_REQUESTS_MAX];
    uint32_t n_arrivals;
    struct kvf_log_limit stranger_log;
    struct kvf_doors doors;
};

static inline kvf_net_link kvf_link_id(const struct kvf_link *link)
{
    return (uint64_t)link->generation << 8 | (uint64_t)(link - link->net->links);
}

/* transport_ucx.c */
/* Tell the owner. Room for it is reserved by whoever calls. */
void kvf_net_emit(struct kvf_net *net, const struct kvf_net_event *event);
/* Tell the owner of a SERVE or MESSAGE. False: it has too many already. */
bool kvf_net_emit_upcall(struct kvf_net *net, const struct kvf_net_event *event);

/* transport_ucx_link.c */
/* A place for a link or a lane. NULL: there is none. */
struct kvf_link *kvf_link_new(struct kvf_net *net, bool is_lane);
/* Connect to the address of link->peer, and greet. */
void kvf_link_begin(struct kvf_link *link);
void kvf_link_connect(struct kvf_net *net, struct kvf_net_address *addresses, uint32_t n);
/* The link of this id, NULL: gone. */
struct kvf_link *kvf_link_find(struct kvf_net *net, kvf_net_link id);
/* It is to be closed; the first reason counts. */
void kvf_link_break(struct kvf_link *link, int status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* The same because the peer has broken the protocol. */
void kvf_link_offend(struct kvf_link *link, const char *why);
/* Say something about a link, if this is a daemon. */
void kvf_link_log(const struct kvf_link *link, int level, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* Room for one more message of a link: each client has its own. NULL: there is none. */
struct kvf_link_send *kvf_link_send_new(struct kvf_link *link);
/* Send a copy of a body of any length. False: the link is broken. */
bool kvf_link_send_copy(struct kvf_link *link, enum kvf_net_type type, uint64_t request,
                        uint32_t offset, const void *body, uint32_t body_bytes);
/* Send a message of body_bytes, at most what a send has room for. False: the link is broken. */
bool kvf_link_send(struct kvf_link *link, enum kvf_net_type type, uint64_t request, uint32_t offset,
                   const void *body, uint32_t body_bytes);
/* The same with a body that lives until the send is over. */
bool kvf_link_send_body(struct kvf_link *link, struct kvf_link_send *send, enum kvf_net_type type,
                        uint64_t request, uint32_t offset, const void *body, uint32_t body_bytes);
/* The callbacks of UCX. */
ucs_status_t kvf_link_message(void *arg, const void *header, size_t header_bytes, void *data,
                              size_t bytes, const ucp_am_recv_param_t *param);
void kvf_link_arrive(ucp_conn_request_h request, void *arg);
/* Timers and whatever could not be done in a callback. Returns how much was done. */
unsigned kvf_link_turn(struct kvf_net *net);
/* Close all. True: none is left. */
bool kvf_link_close_all(struct kvf_net *net);

/* transport_ucx_doors.c */
/* Before UCX is opened: what is listened on already. KVF_OK; KVF_ERR_NO_MEMORY. */
int kvf_doors_open(struct kvf_doors *doors);
/* After that: what has been added. */
void kvf_doors_note(struct kvf_doors *doors);
void kvf_doors_close(struct kvf_doors *doors);
/* Once in a while: hang up on those that say nothing. */
void kvf_doors_turn(struct kvf_net *net);

/* transport_ucx_lane.c */
/* A connection that has come is one more endpoint of that daemon's link: its new place. NULL: there
 * is no such link, or no room. */
struct kvf_link *kvf_lane_take(struct kvf_link *link, uint64_t incarnation);
void kvf_lane_up(struct kvf_link *lane);
void kvf_lane_closed(const struct kvf_link *lane);
/* A link ends: so do its lanes. */
void kvf_lane_end(const struct kvf_link *link);
/* Which of a link's endpoints takes a request. */
struct kvf_link *kvf_lane_choose(struct kvf_link *link, uint64_t request);
/* Make what is missing. Returns how much was done. */
unsigned kvf_lane_turn(struct kvf_net *net);

/* transport_ucx_flow.c */
/* A message of a link that is up, sealed and judged. */
void kvf_flow_message(struct kvf_link *link, const struct kvf_net_head *head, const void *body);
void kvf_flow_fetch(struct kvf_net *net, struct kvf_net_fetch *fetch);
void kvf_flow_serve(struct kvf_net *net, struct kvf_net_serve *serve);
void kvf_flow_stream(struct kvf_net *net, const struct kvf_net_command *command);
/* A send is over. */
void kvf_flow_sent(struct kvf_link_send *send);
/* The link is down: whatever it carried ends. */
void kvf_flow_end(struct kvf_link *link);
/* Pieces out, deadlines. Returns how much was done. */
unsigned kvf_flow_turn(struct kvf_net *net);
/* Are records on their way, in or out? */
bool kvf_flow_is_busy(const struct kvf_net *net);
/* A record goes out on a link that is up. */
void kvf_flow_serve_begin(struct kvf_link *link, struct kvf_net_serve *serve);
/* Piece received: give credit for it, sooner or later. False: it came without credit. */
bool kvf_flow_owe(struct kvf_link *link, uint32_t bytes);

/* transport_ucx_relay.c */
/* A client's link is up: KVF_OK, or why it cannot be. */
int kvf_relay_open(struct kvf_link *link, const char *tenant);
void kvf_relay_message(struct kvf_link *link, const struct kvf_net_head *head, const void *body);
/* A serve of a client's is over. */
void kvf_relay_served(struct kvf_net_serve *serve);
unsigned kvf_relay_turn(struct kvf_link *link, bool has_slept);
bool kvf_relay_sleep(struct kvf_link *link);
void kvf_relay_awake(struct kvf_link *link);
/* The link is down. */
void kvf_relay_end(struct kvf_link *link);
/* Nothing of it is being sent any more. */
void kvf_relay_free(struct kvf_link *link);

#endif /* KVF_TRANSPORT_TRANSPORT_UCX_INTERNAL_H */
