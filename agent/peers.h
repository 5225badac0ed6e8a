/* SPDX-License-Identifier: Apache-2.0
 *
 * peers.h: daemons of other nodes: which blocks they have, getting them, and giving ours.
 *
 *   peers.c         links, events of the network, where to fetch from, addresses
 *   peer_stream.c   the numbered stream of blocks: what we tell, what we are told
 *   peer_serve.c    records for others, and clients of other nodes
 *   peer_events.c   what has changed here, for routers
 *   peer_hints.c    who is said to have what
 *   peer_far.c      nodes that a directory tells of
 *
 * Everything belongs to the reactor. A link that this node has made is asked and listened to; one
 * that another has made is told and served (transport/net_wire.h).
 */
#ifndef KVF_AGENT_PEERS_H
#define KVF_AGENT_PEERS_H

#include "agent/core.h"
#include "agent/directory.h"
#include "agent/peer_hints.h"
#include "tiers/tier_remote.h"
#include "transport/transport_ucx.h"

enum kvf_peers_limits {
    KVF_PEER_LOG_EVENTS = 1 << 16, /* that a slow listener may be behind before it starts anew */
    KVF_PEER_REFUSALS = 4096,      /* fetches beyond KVF_NET_SERVES_MAX that are told so at once */
    KVF_PEER_NODES_MAX = KVF_NET_PEERS_MAX,
    KVF_PEER_ADDRESSES_MAX = KVF_NET_PEERS_MAX,
};

enum kvf_peer_learn {
    KVF_LEARN_WAITS = 0, /* for the first part of a snapshot */
    KVF_LEARN_SNAPSHOT = 1,
    KVF_LEARN_LIVE = 2,
};

enum kvf_peer_tell {
    KVF_TELL_FIRST = 0, /* a snapshot begins with the next message */
    KVF_TELL_SNAPSHOT = 1,
    KVF_TELL_EVENTS = 2,
};

struct kvf_peer_far;

/* A link, or what stands for one: to the directory, which is told, or a node that it tells of. */
struct kvf_peer_link {
    kvf_net_link link; /* 0: none */
    bool is_initiator; /* this node has made it */
    bool is_directory; /* the stream goes by way of the directory */
    char name[KVF_NET_NAME_BYTES];
    char address[64];
    uint64_t incarnation;
    uint64_t since_ns;

    /* made by this node */
    uint8_t learn;      /* enum kvf_peer_learn */
    uint32_t source;    /* of its hints; KVF_HINT_NONE: none */
    uint64_t number;    /* of the next event */
    uint16_t part;      /* SNAPSHOT: index of the next part */
    uint64_t resync_ns; /* when a snapshot was last asked for */
    uint64_t blocks;    /* it is said to have */
    uint32_t failures;  /* one after the other */
    uint64_t rests_until_ns;
    uint32_t inflight;
    struct kvf_peer_far *far; /* the same node as the directory tells of it, or NULL */
    uint64_t fetched_blocks, fetched_bytes, failed_blocks;

    /* made by the other one */
    uint8_t tell;    /* enum kvf_peer_tell */
    uint32_t cursor; /* of the snapshot, in the index */
    uint16_t parts;  /* of it that have been told */
    uint64_t told;   /* number of the next event to tell */
    uint64_t told_ns;
    uint64_t served_blocks, served_bytes;
};

/* A node that the directory tells of. */
struct kvf_peer_far {
    struct kvf_peer_link said; /* link 0: no node */
    struct kvf_net_address address;
    kvf_net_link link; /* 0: not linked */
    bool is_followed;  /* the directory is asked what it has: its own stream is not there */
    uint64_t wanted_ns;
};

/* A record that another node wants. */
struct kvf_peer_serve {
    struct kvf_net_serve call;
    uint8_t key_id[32];
    uint32_t record_bytes;
    uint16_t shard;
    uint64_t deadline_ns;
    bool is_refused;   /* all places but a few are taken: it is told so, and nothing else */
    kvf_location slot; /* pinned; KVF_LOCATION_NONE */
    struct kvf_peer_serve *next;
};

/* One name of peers.nodes. */
struct kvf_peer_node {
    char host[256];
    char port[8];
    int error; /* of the last look-up, as getaddrinfo gives it */
    int said;  /* the last that was logged */
    uint32_t n;
    struct kvf_net_address addresses[KVF_PEER_ADDRESSES_MAX];
};

struct kvf_peers {
    struct kvf_agent *agent;
    struct kvf_net *net;
    struct kvf_drive source; /* what loads know: the remote tier and its queue */
    struct kvf_hints hints;
    struct kvf_peer_link links[KVF_NET_LINKS_MAX];
    struct kvf_net_block *log;                        /* ring of KVF_PEER_LOG_EVENTS */
    uint64_t log_next;                                /* number of the next event; the first is 1 */
    bool owes;                                        /* a listener could not be told all */
    uint64_t confirm_ns;                              /* when one is to be told the number */
    _Alignas(8) uint8_t body[KVF_NET_BODY_BYTES_MAX]; /* scratch */
    struct kvf_pool serves;
    struct kvf_peer_serve *waiting, **waiting_end;
    struct kvf_work resolve;
    bool is_resolving;
    uint64_t resolve_ns; /* when to look names up again */
    uint32_t n_nodes;
    struct kvf_peer_node nodes[KVF_PEER_NODES_MAX];
    uint32_t n_named; /* addresses of peers.nodes */
    struct kvf_net_address named[KVF_NET_PEERS_MAX];

    struct kvf_directory *directory; /* NULL: none */
    struct kvf_peer_link written;    /* what it is told */
    struct kvf_peer_far far[KVF_DIRECTORY_NODES_MAX];
    bool is_far_due;     /* something has changed about them */
    bool is_connect_due; /* others are to be linked with */
    uint64_t connect_ns; /* not before that */
};

/* peers.c */
/* Start, if the configuration has peers. Logs its own failures. */
int kvf_peers_open(struct kvf_agent *agent);
/* End the network's thread: nothing of this node is read or written by it any more. */
void kvf_peers_stop(struct kvf_agent *agent);
void kvf_peers_close(struct kvf_agent *agent);
/* Tables, for --check. 0 without peers. */
uint64_t kvf_peers_table_bytes(const struct kvf_config *config, uint64_t index_entries);
/* Take what the network says and give it work. Returns how much was done. */
unsigned kvf_peers_poll(struct kvf_agent *agent);
uint64_t kvf_peers_deadline_ns(const struct kvf_agent *agent);
/* For people. */
uint32_t kvf_peers_rows(const struct kvf_agent *agent, struct kvf_control_peer *rows,
                        uint32_t max_rows);
/* Metrics that are kept elsewhere. */
void kvf_peers_metrics(struct kvf_agent *agent);
/* The link of this id, NULL: it is down. */
struct kvf_peer_link *kvf_peer_link_find(struct kvf_peers *peers, kvf_net_link id);
/* Is some peer that answers said to have the block? */
bool kvf_peers_have(struct kvf_agent *agent, const uint8_t key_id[32], uint32_t shard);
/* Begin to get a block that is not here from a peer that is said to have it: its entry is LOADING
 * then. KVF_OK: *flight_out is on its way; KVF_MISS. */
int kvf_peers_load(struct kvf_session *session, const uint8_t key_id[32], uint32_t shard,
                   struct kvf_flight **flight_out);
/* Would that take longer than until deadline_ns? */
bool kvf_peers_too_slow(struct kvf_agent *agent, const uint8_t key_id[32], uint32_t shard,
                        uint64_t deadline_ns);
/* Say in flight->io until when the peer that was chosen may take: all of peers.timeout, from when
 * the first fetch has started, or half of what is left of it while another one has the block, too.
 * KVF_OK; KVF_MISS: no time is left, nobody is asked. */
int kvf_peers_fetch_begin(struct kvf_agent *agent, struct kvf_flight *flight);
/* Its fetch has failed: choose another peer that is said to have it. False: there is none, or no
 * time left. */
bool kvf_peers_other(struct kvf_agent *agent, struct kvf_flight *flight);
/* How its fetch has ended. */
void kvf_peers_loaded(struct kvf_agent *agent, const struct kvf_tier_io *io);
/* The load is over, fetched or not. */
void kvf_peers_left(struct kvf_agent *agent, kvf_net_link link);

/* peer_far.c */
/* Start with the directory, if the configuration has one. Logs its own failures. */
int kvf_far_open(struct kvf_peers *peers, const struct kvf_net_config *net);
void kvf_far_close(struct kvf_peers *peers);
/* Take what the directory says. Returns how much was done. */
unsigned kvf_far_poll(struct kvf_peers *peers);
void kvf_far_metrics(const struct kvf_peers *peers);
/* A link is up, or goes down. */
void kvf_far_link_up(struct kvf_peers *peers, struct kvf_peer_link *link);
void kvf_far_link_down(struct kvf_peers *peers, struct kvf_peer_link *link);
/* Does the directory say that the node of this link is one of these sources? */
bool kvf_far_says(const struct kvf_peer_link *link, uint64_t sources);
/* A block is wanted of nodes that are not linked with. */
void kvf_far_want(struct kvf_peers *peers, uint64_t sources);
/* The addresses of peers.nodes, and of those that the directory tells of. */
void kvf_far_connect(struct kvf_peers *peers);

/* peer_stream.c */
/* A block is here, or is not any more. Does nothing without peers. */
void kvf_peers_added(struct kvf_agent *agent, const struct kvf_entry *entry);
void kvf_peers_removed(struct kvf_agent *agent, const struct kvf_entry *entry);
/* Take a message of the stream. */
void kvf_peers_told(struct kvf_peers *peers, struct kvf_peer_link *link, uint8_t type,
                    const void *body);
/* Is it here, and not only on its way? */
bool kvf_peers_is_here(const struct kvf_agent *agent, const struct kvf_entry *entry);
/* Tell all listeners what is new. Returns how many messages went out. */
unsigned kvf_peers_tell(struct kvf_peers *peers);
/* Ask those that have said nothing so far for a snapshot: the first one may have been lost. */
void kvf_peers_ask_again(struct kvf_peers *peers);
/* Forget all that a link has said. */
void kvf_peers_unlearn(struct kvf_peers *peers, struct kvf_peer_link *link);

/* peer_events.c */
/* For routers: what has changed, or what is here. */
void kvf_peers_events(struct kvf_agent *agent, struct kvf_control *control);

/* peer_serve.c */
/* Somebody wants a record. */
void kvf_peers_serve(struct kvf_peers *peers, const struct kvf_net_event *event);
void kvf_peers_served(struct kvf_peers *peers, struct kvf_net_serve *call);
/* A client of another node has come: event->fd is its socket. */
void kvf_peers_client(struct kvf_peers *peers, const struct kvf_net_event *event);
/* One has broken the protocol in what does not reach its session. */
void kvf_peers_offence(struct kvf_peers *peers, const struct kvf_net_event *event);
/* Give what has become ready. Returns how many were given. */
unsigned kvf_peers_serve_waiting(struct kvf_peers *peers);

#endif /* KVF_AGENT_PEERS_H */
