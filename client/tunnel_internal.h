/* SPDX-License-Identifier: Apache-2.0
 *
 * tunnel_internal.h: what the files of a tunnel share; not for others.
 *
 *   tunnel.c        the session's socket, memory, submissions, the thread's calls
 *   tunnel_land.c   completions, and the records of hits
 */
#ifndef KVF_CLIENT_TUNNEL_INTERNAL_H
#define KVF_CLIENT_TUNNEL_INTERNAL_H

#include "base/clock.h"
#include "client/resolve.h"
#include "client/stage_area.h"
#include "client/tunnel.h"
#include "transport/net_proto.h"
#include "transport/proto.h"
#include "transport/segment.h"
#include "transport/seqpacket.h"
#include "transport/shm_lease.h"
#include "transport/shm_ring.h"
#include "transport/transport_ucx.h"

#define KVF_TUNNEL_PIECE 1 /* number of the only arena piece */

enum kvf_tunnel_state {
    KVF_TUNNEL_CONNECTS = 0,
    KVF_TUNNEL_GREETS = 1, /* the link is up; WELCOME of the daemon is awaited */
    KVF_TUNNEL_MAPS = 2,   /* WELCOME has been passed on */
    KVF_TUNNEL_LIVES = 3,
    KVF_TUNNEL_OVER = 4,
};

enum kvf_tunnel_lease_state {
    KVF_TUNNEL_LEASE_FREE = 0,
    KVF_TUNNEL_LEASE_LANDS = 1, /* its record is on its way */
    KVF_TUNNEL_LEASE_HIT = 2,   /* the session has it */
    KVF_TUNNEL_LEASE_FAR = 3,   /* of a lookup: the daemon's */
};

/* A lease as the session knows it; its index is that of its word. */
struct kvf_tunnel_lease {
    uint64_t generation; /* of the word, also while it is free */
    uint64_t far_lease;  /* LANDS, FAR: the daemon's */
    uint64_t record_bytes, come_bytes;
    uint32_t page; /* in the landing memory */
    uint8_t state; /* enum kvf_tunnel_lease_state */
};

/* A completion that the session has not been given. */
struct kvf_tunnel_waiting {
    struct kvf_shm_cqe cqe;
    bool is_landing; /* until LANDED has come */
    bool has_room;   /* landing: lease says where */
    uint32_t lease;  /* index */
};

/* A submission that has not gone out; a put's records go first. */
struct kvf_tunnel_submit {
    struct kvf_tunnel_submit *next;
    uint32_t key;    /* of a put: whose record is being sent */
    uint64_t offset; /* in its record */
    struct kvf_shm_sqe sqe;
    struct kvf_shm_key keys[];
};

/* A request some of whose hits did not land. */
struct kvf_tunnel_failed {
    struct kvf_tunnel_failed *next;
    uint64_t request;
    uint32_t n_blocks;
};

struct kvf_tunnel {
    struct kvf_net *opened; /* the handle's thread */
    struct kvf_net *net;    /* the same, the tunnel's thread */
    struct kvf_tunnel_address address;
    uint32_t try_number;
    bool is_scheduler;
    struct kvf_resolve *resolve; /* CONNECTS: its host's name is being looked up */
    _Atomic bool is_resolving;   /* the same, for any thread */
    enum kvf_tunnel_state state;
    int fd;                        /* the other end of the session's socket */
    char why[KVF_WIRE_TEXT_BYTES]; /* once it has hung up ... */
    _Atomic bool has_hung_up;      /* ... which is said with release; acquire in kvf_tunnel_why */
    bool is_mapped, is_daemon_ready;
    uint64_t look_ns, beat_ns;
    struct kvf_wire_welcome welcome; /* the daemon's */
    struct kvf_shm_header layout;
    int ring_fd, staging_fd, landing_fd, event_fd, profile_fd;
    void *ring_base;
    uint8_t *staging, *landing, *profile;
    uint64_t landing_bytes;
    struct kvf_wire_profile profile_message;
    uint64_t profile_come_bytes;
    struct kvf_ring_daemon ring;
    struct kvf_shm_key *keys; /* of the submission at hand */
    uint8_t *scratch;         /* a whole SUBMIT */
    struct kvf_tunnel_submit *submits, **submits_end;

    struct kvf_stage_area area; /* of the landing memory */
    struct kvf_tunnel_lease *leases;
    uint32_t *lease_of; /* by the index of a daemon's lease: 1 + index of ours; 0: none */
    uint32_t lease_next;
    struct kvf_tunnel_waiting *waiting; /* a ring of as many as there are credits */
    uint32_t waiting_first, n_waiting;
    struct kvf_tunnel_failed *failed;
};

/* COMPLETE, PIECE, LANDED. KVF_OK; KVF_ERR_PROTOCOL, _NO_MEMORY. */
int kvf_tunnel_land(struct kvf_tunnel *tunnel, const struct kvf_net_head *head, const void *body);

/* Give the session what is ready, in order. Returns how many. */
unsigned kvf_tunnel_deliver(struct kvf_tunnel *tunnel);

/* The session gives up a lease. True: it is one of the daemon's, *lease is its number there. */
bool kvf_tunnel_release(struct kvf_tunnel *tunnel, uint64_t *lease);

#endif /* KVF_CLIENT_TUNNEL_INTERNAL_H */
