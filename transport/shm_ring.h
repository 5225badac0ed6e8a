/* SPDX-License-Identifier: Apache-2.0
 *
 * shm_ring.h: the two ends of the rings in a mapped ring segment (layout: proto_shm.h).
 *
 *              submissions, keys                  completions
 *   client  ----- sq_tail (release) ----->     <---- cq_tail (release) -----  daemon
 *           <---- sq_head, key_head ------     ----- cq_head (release) ---->
 *
 * Each end keeps its own indices in private memory and only publishes them; what it loads from the
 * other end it checks for being possible at all. Shared fields are plain integers because the
 * header is a layout; they are touched only through the compiler's C11 atomic builtins here.
 *
 * Orders. Entries are written and read with relaxed 8-byte accesses, so that a peer that rewrites
 * an entry under our hands can change what we copy but not let us see two values of one word. The
 * index store with release order pairs with the other side's load with acquire order, both ways: it
 * hands entries over, and it hands slots back.
 *
 * Sleeping. A store and a load of different words are not ordered by release and acquire. All four
 * accesses of the protocol (store the index, look at the sleeping word; store the sleeping word,
 * look at the index) are therefore sequentially consistent: there is one order of them all, and in
 * it one side sees the other. The waker takes the word from 1 to 0, so that a burst of entries
 * costs one wake-up.
 *
 * One thread a side. Nothing blocks.
 */
#ifndef KVF_TRANSPORT_SHM_RING_H
#define KVF_TRANSPORT_SHM_RING_H

#include <stdbool.h>
#include <stdint.h>

#include "transport/proto.h"

/* ----------------------------------------------------------------------------------------------
 * The client's end
 */
struct kvf_ring_client {
    struct kvf_shm_indices *indices; /* shared */
    struct kvf_shm_sqe *sq;          /* shared */
    const struct kvf_shm_cqe *cq;    /* shared */
    struct kvf_shm_key *keys;        /* shared */
    const uint64_t *leases;          /* shared */
    uint32_t sq_entries;
    uint32_t cq_entries;
    uint32_t key_entries;
    uint32_t lease_entries;
    uint32_t sq_tail;       /* ours, published by kvf_ring_client_publish */
    uint32_t key_tail;      /* ours; the daemon learns it from the submissions */
    uint32_t cq_head;       /* ours, published by kvf_ring_client_take */
    uint32_t cq_tail_seen;  /* daemon's, as last loaded */
    uint32_t sq_head_seen;  /* daemon's, as last loaded */
    uint32_t key_head_seen; /* daemon's, as last loaded */
};

/* `header` is a private copy that has passed kvf_shm_header_check; base: the mapped segment. */
void kvf_ring_client_init(struct kvf_ring_client *ring, void *base,
                          const struct kvf_shm_header *header);

/* Is there room for one submission with n_keys key entries? KVF_OK; KVF_ERR_BUSY;
 * KVF_ERR_PROTOCOL: the daemon's indices are impossible. */
int kvf_ring_client_room(struct kvf_ring_client *ring, uint32_t n_keys);

/* The key entry of the submission in preparation at position i (below the n_keys asked room for).
 * Write all of it by kvf_ring_client_key_put. */
void kvf_ring_client_key_put(struct kvf_ring_client *ring, uint32_t i,
                             const struct kvf_shm_key *key);

/* Queue a submission for which there is room; sets sqe->key_first to the keys put before. */
void kvf_ring_client_push(struct kvf_ring_client *ring, struct kvf_shm_sqe *sqe);

/* Let the daemon see all that was pushed. True: the daemon sleeps, wake it through the eventfd. */
bool kvf_ring_client_publish(struct kvf_ring_client *ring);

/* The same for what nobody waits for: without the fence between the index and the look at the
 * sleeping word, which costs a cache line's way to the daemon and back. A daemon that falls asleep
 * at this very moment may overlook it until it wakes up, after KVF_SHM_LOOK_MS at the latest. */
bool kvf_ring_client_publish_calmly(struct kvf_ring_client *ring);

/* Copy the next completion. KVF_OK; KVF_EMPTY; KVF_ERR_PROTOCOL: impossible index. */
int kvf_ring_client_take(struct kvf_ring_client *ring, struct kvf_shm_cqe *cqe_out);

/* Is there a completion to take? A look without taking, for spinning. */
bool kvf_ring_client_ready(const struct kvf_ring_client *ring);

/* About to sleep: true if the ring is still empty, so sleeping is right; false: take first. */
bool kvf_ring_client_sleep(struct kvf_ring_client *ring);

/* Awake again. */
void kvf_ring_client_awake(struct kvf_ring_client *ring);

uint32_t kvf_ring_client_heartbeat(const struct kvf_ring_client *ring);

/* ----------------------------------------------------------------------------------------------
 * The daemon's end
 */
struct kvf_ring_daemon {
    struct kvf_shm_indices *indices; /* shared */
    const struct kvf_shm_sqe *sq;    /* shared */
    struct kvf_shm_cqe *cq;          /* shared */
    const struct kvf_shm_key *keys;  /* shared */
    uint64_t *leases;                /* shared, written only; the truth about leases is elsewhere */
    uint32_t sq_entries;
    uint32_t cq_entries;
    uint32_t key_entries;
    uint32_t lease_entries;
    uint32_t sq_head;      /* ours, published by kvf_ring_daemon_release */
    uint32_t key_head;     /* ours, published by kvf_ring_daemon_release */
    uint32_t cq_tail;      /* ours, published by kvf_ring_daemon_complete */
    uint32_t sq_tail_seen; /* client's, as last loaded and found possible */
    uint32_t cq_head_seen; /* client's, as last loaded */
    uint32_t reserved;     /* credits of requests in work */
};

/* `header` is the daemon's private copy (kvf_shm_layout_init), never the one in the segment. */
void kvf_ring_daemon_init(struct kvf_ring_daemon *ring, void *base,
                          const struct kvf_shm_header *header);

/* Copy the next submission, without handing its slot back. KVF_OK; KVF_EMPTY; KVF_ERR_PROTOCOL:
 * the client's index is impossible. */
int kvf_ring_daemon_peek(struct kvf_ring_daemon *ring, struct kvf_shm_sqe *sqe_out);

/* Copy the n key entries that start at key_head (a checked submission's n_entries). */
void kvf_ring_daemon_keys_copy(const struct kvf_ring_daemon *ring, uint32_t n,
                               struct kvf_shm_key *keys_out);

/* Peek, judge (kvf_shm_sqe_check, kvf_shm_keys_check), reserve the credits, hand the slots back:
 * what a daemon does with each submission. keys_out holds KVF_SHM_REQUEST_ENTRIES_MAX entries.
 * limits->key_entries and key_head are filled here. KVF_OK; KVF_EMPTY; KVF_ERR_PROTOCOL with
 * *why_out. */
int kvf_ring_daemon_take(struct kvf_ring_daemon *ring, struct kvf_shm_limits *limits,
                         struct kvf_shm_sqe *sqe_out, struct kvf_shm_key *keys_out,
                         const char **why_out);

/* Write one completion of a request whose credits are reserved; not visible before
 * kvf_ring_daemon_publish. Uses up one credit. */
void kvf_ring_daemon_complete(struct kvf_ring_daemon *ring, const struct kvf_shm_cqe *cqe);

/* Let the client see all completions. True: the client sleeps, wake it by one byte. */
bool kvf_ring_daemon_publish(struct kvf_ring_daemon *ring);

/* About to sleep: true if no submission waits, so sleeping is right; false: take first. */
bool kvf_ring_daemon_sleep(struct kvf_ring_daemon *ring);

/* Awake again. */
void kvf_ring_daemon_awake(struct kvf_ring_daemon *ring);

/* To be called at least once a second. */
void kvf_ring_daemon_beat(struct kvf_ring_daemon *ring);

#endif /* KVF_TRANSPORT_SHM_RING_H */
