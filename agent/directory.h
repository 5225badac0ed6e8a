/* SPDX-License-Identifier: Apache-2.0
 *
 * directory.h: a Valkey or Redis server where nodes of a cluster say that they are there, and what
 * they have.
 *
 * What the server says is a hint: which node may have a block, and where it is reached. A node
 * proves itself when it is linked with, and confirms when it is asked. Leases carry a MAC under the
 * cluster's key, so that nobody without it sends this node to an address; blocks carry none: a
 * server that lies costs misses.
 *
 *   owner (the reactor)                         the directory's thread
 *                                         <-    UP: tell everything from the beginning; DOWN
 *   kvf_directory_tell  of the stream     ->    written in pipelines
 *                                         <-    NODE, GONE: whose leases there are
 *   kvf_directory_follow  a node          ->
 *                                         <-    MESSAGE: what the node has told, as net_wire.h says
 *
 * Both sides never wait for each other: queues are bounded, and who finds one full comes again. The
 * thread ends a connection that says nothing for a second, needs two for one answer or sends more
 * than 4 MiB of one, and tries again after a pause that doubles from half a second to half a
 * minute.
 *
 * Keys, with P = "kvferry:" 16 hex digits of the cluster ":" and I = 16 hex digits of a node's
 * incarnation; all but P nodes end with the lease:
 *
 *   P nodes       set of I
 *   P lease:I     struct kvf_directory_lease
 *   P head:I      number of the snapshot that counts
 *   P blocks:I:n  hash, snapshot n and changes since: key id, shard -> bytes of the record
 *   P events:I    stream, entry "first number-count", field b: struct kvf_net_blocks and blocks
 */
#ifndef KVF_AGENT_DIRECTORY_H
#define KVF_AGENT_DIRECTORY_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "transport/transport_ucx.h"

enum kvf_directory_limits {
    KVF_DIRECTORY_NODES_MAX = 64, /* others that are known of */
    KVF_DIRECTORY_QUEUE = 256,    /* calls, and events, that nobody has taken */
    KVF_DIRECTORY_SECRET_BYTES = 256,
};

struct kvf_directory;

struct kvf_directory_config {
    char address[256];       /* host:port, or the path of a Unix socket */
    char user[64];           /* "": the server's default one */
    char password_file[256]; /* "": none; read before each connection */
    uint8_t cluster_key[32];
    uint64_t incarnation;
    char name[KVF_NET_NAME_BYTES];
    struct kvf_net_address listen; /* where others reach this node; bytes 0: it is not listed */
    uint32_t lease_s;
    void (*wake)(void *ctx); /* any thread: there is an event */
    void *wake_ctx;
};

#define KVF_DIRECTORY_MAGIC 0x314c564bU /* "KVL1" */

/* A node that is there. Little-endian but for port and ip, which are as sockets have them. */
struct kvf_directory_lease {
    uint32_t magic;
    uint16_t family; /* 4 or 6 */
    uint16_t port;
    uint8_t ip[16]; /* rest 0 */
    uint64_t incarnation;
    char name[KVF_NET_NAME_BYTES];
    uint8_t mac[32]; /* of all before it */
};
static_assert(sizeof(struct kvf_directory_lease) == 128 &&
                  offsetof(struct kvf_directory_lease, mac) == 96,
              "layout of version 1");

enum kvf_directory_event_kind {
    KVF_DIRECTORY_UP = 1,
    KVF_DIRECTORY_DOWN = 2,
    KVF_DIRECTORY_NODE = 3,
    KVF_DIRECTORY_GONE = 4,
    KVF_DIRECTORY_MESSAGE = 5,
};

struct kvf_directory_event {
    uint8_t kind; /* enum kvf_directory_event_kind */
    uint8_t type; /* MESSAGE: KVF_NET_SNAPSHOT or KVF_NET_EVENTS */
    uint32_t body_bytes;
    uint64_t incarnation;           /* whose */
    struct kvf_net_address address; /* NODE */
    char name[KVF_NET_NAME_BYTES];  /* NODE */
    void *body;                     /* MESSAGE: judged; the taker gives it back to free() */
};

/* What has happened so far. Any thread. */
struct kvf_directory_stat {
    bool is_up;
    uint64_t failures; /* connections that could not be made, or broke */
    uint64_t refused;  /* leases and messages that were none */
};

/* Start the thread. A server that is not there is no failure. KVF_OK; KVF_ERR_CONFIG: the address
 * or the password's file cannot be used; KVF_ERR_UNSUPPORTED: built without hiredis;
 * KVF_ERR_NO_MEMORY. why: one line. */
int kvf_directory_open(const struct kvf_directory_config *config,
                       struct kvf_directory **directory_out, char *why, size_t why_bytes);
/* Gives the lease back. Takes three seconds at most, whatever the server does, beside what the
 * resolver takes. NULL is fine. */
void kvf_directory_close(struct kvf_directory *directory);
void kvf_directory_stat(const struct kvf_directory *directory, struct kvf_directory_stat *stat_out);

/* The owner only. KVF_OK; KVF_ERR_BUSY: the queue is full, nothing has happened. */

/* A SNAPSHOT or EVENTS of this node. Copies the body. Lost if the server is down. */
int kvf_directory_tell(struct kvf_directory *directory, enum kvf_net_type type, const void *body,
                       uint32_t body_bytes);
/* Say what a node has, from the beginning. false: no more of it. */
int kvf_directory_follow(struct kvf_directory *directory, uint64_t incarnation, bool is_followed);
/* The next event. False: none. */
bool kvf_directory_poll(struct kvf_directory *directory, struct kvf_directory_event *event_out);

/* Made known to tests: write a lease of this node, and judge one. */
void kvf_directory_lease_write(const struct kvf_directory_config *config,
                               struct kvf_directory_lease *lease_out);
bool kvf_directory_lease_read(const uint8_t cluster_key[32], const void *data, size_t bytes,
                              struct kvf_directory_lease *lease_out,
                              struct kvf_net_address *address_out);
/* Read the first line of a password's file. KVF_OK; KVF_ERR_CONFIG: why. */
int kvf_directory_password_read(const char *path, char secret_out[KVF_DIRECTORY_SECRET_BYTES],
                                char *why, size_t why_bytes);

#endif /* KVF_AGENT_DIRECTORY_H */
