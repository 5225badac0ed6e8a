/* SPDX-License-Identifier: Apache-2.0
 *
 * directory_internal.h: what the parts of the directory share with each other only.
 *
 *   directory.c        queues, thread, connection
 *   directory_write.c  this node: its lease, its blocks
 *   directory_read.c   the others
 *   directory_lease.c  what a lease is; no server needed
 */
#ifndef KVF_AGENT_DIRECTORY_INTERNAL_H
#define KVF_AGENT_DIRECTORY_INTERNAL_H

#include <hiredis/hiredis.h>
#include <pthread.h>
#include <stdatomic.h>

#include "agent/directory.h"
#include "base/clock.h"
#include "base/ring.h"

#define KVF_DIRECTORY_KEY_BYTES 96

enum directory_follow_state {
    FOLLOW_NOT = 0,
    FOLLOW_START = 1, /* look for the snapshot that counts */
    FOLLOW_SCAN = 2,  /* read it */
    FOLLOW_LIVE = 3,  /* read what has come since */
};

/* Another node. Owner: the directory's thread. */
struct directory_node {
    uint64_t incarnation; /* 0: none */
    bool is_listed;       /* in this round */
    bool is_told;         /* to the owner */
    uint8_t follow;       /* enum directory_follow_state */
    struct kvf_net_address address;
    char name[KVF_NET_NAME_BYTES];
    uint64_t head;   /* number of the snapshot */
    uint64_t number; /* of the next event */
    uint16_t parts;  /* of the snapshot that have been passed on */
    char cursor[24]; /* of the scan */
};

struct directory_call {
    uint8_t type;     /* of net_wire.h; 0: follow */
    bool is_followed; /* follow */
    uint32_t body_bytes;
    uint64_t incarnation; /* follow */
    void *body;
};

struct kvf_directory {
    struct kvf_directory_config config;
    char prefix[32];
    struct kvf_ring calls;  /* of struct directory_call, from the owner */
    struct kvf_ring events; /* of struct kvf_directory_event, to it */
    pthread_t thread;
    bool has_thread;
    pthread_mutex_t lock; /* of the two below */
    pthread_cond_t changed;
    bool is_ending, has_calls;
    _Atomic uint64_t end_ns; /* the thread waits for no answer after that; 0: it is to go on */
    _Atomic bool is_up;
    _Atomic uint64_t failures, refused;

    /* Owner: the thread. */
    redisContext *redis;                     /* NULL: down */
    char why[256];                           /* it went down */
    redisReplyObjectFunctions makers;        /* of replies: hiredis' own, but for arrays */
    const redisReplyObjectFunctions *theirs; /* hiredis' own */
    uint64_t retry_ns, pause_ns;
    bool owes_down; /* DOWN found no room */
    uint64_t renew_ns, list_ns;
    uint64_t settled_ns;    /* from when on all that are there have had time to say so */
    bool is_listed;         /* the lease is there */
    bool is_telling;        /* a snapshot has begun on this connection */
    uint64_t telling, told; /* numbers of the snapshot that is being made, and that counts */
    uint32_t pipelined;     /* commands without a reply so far */
    struct directory_node nodes[KVF_DIRECTORY_NODES_MAX];
};

/* directory.c */
/* The connection is of no use any more. */
void directory_fail(struct kvf_directory *directory, const char *why);
/* The next reply of a pipeline; NULL: the connection has failed. The caller frees it. */
redisReply *directory_reply(struct kvf_directory *directory);
/* Drop the replies that are due. False: the connection has failed. */
bool directory_drain(struct kvf_directory *directory);
/* Into the owner's queue. False: there is no room. */
bool directory_push(struct kvf_directory *directory, const struct kvf_directory_event *event);
/* Room for so many events? */
bool directory_has_room(const struct kvf_directory *directory, uint32_t events);
void directory_key(const struct kvf_directory *directory, const char *kind, uint64_t incarnation,
                   uint64_t number, char key_out[KVF_DIRECTORY_KEY_BYTES]);

/* directory_write.c */
/* A SNAPSHOT or EVENTS of this node goes to the server. */
void directory_tell(struct kvf_directory *directory, const struct directory_call *call);
/* Keep what is there from ending. */
void directory_renew(struct kvf_directory *directory);
/* Be gone. */
void directory_leave(struct kvf_directory *directory);

/* directory_read.c */
/* Who is there? */
void directory_list(struct kvf_directory *directory);
/* Whoever can be told of now. */
void directory_tell_nodes(struct kvf_directory *directory);
/* What do those that are followed say? */
void directory_read(struct kvf_directory *directory);
void directory_follow(struct kvf_directory *directory, uint64_t incarnation, bool is_followed);

#endif /* KVF_AGENT_DIRECTORY_INTERNAL_H */
