/* SPDX-License-Identifier: Apache-2.0
 *
 * admin_internal.h: between the server (admin.c), its sockets (admin_listen.c) and what it answers
 * (admin_api.c). All of it belongs to the admin thread once that runs.
 */
#ifndef KVF_AGENT_ADMIN_INTERNAL_H
#define KVF_AGENT_ADMIN_INTERNAL_H

#include <jansson.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/stat.h>

#include "agent/admin.h"

/* --- sockets ---------------------------------------------------------------------------------- */

struct kvf_admin_socket {
    int fd; /* -1: closed */
    char path[108];
    dev_t device; /* of the path's inode, so that close removes only our own */
    ino_t inode;
};

/* A Unix stream socket, taken over if nobody accepts on it. Logs its own failures. KVF_OK;
 * KVF_ERR_BUSY; KVF_ERR_CONFIG. */
int kvf_admin_listen_unix(const char *path, mode_t mode, int64_t gid,
                          struct kvf_admin_socket *socket_out);
int kvf_admin_listen_tcp(const char *address, struct kvf_admin_socket *socket_out);
void kvf_admin_socket_close(struct kvf_admin_socket *socket);

/* --- answers ---------------------------------------------------------------------------------- */

struct kvf_admin_api {
    const struct kvf_config *config;
    struct kvf_agent *agent;
    _Atomic bool is_stopping; /* set by kvf_admin_stop: wait for no more answers */
    uint64_t trace_reader;    /* who was given a part of the recording last, and when */
    uint64_t trace_ns;        /* 0: nobody yet */
};

/* Query arguments by name, NULL if absent. */
struct kvf_admin_request {
    const char *(*argument)(const struct kvf_admin_request *request, const char *name);
    void *ctx;
};

/* What goes back. text is owned by the reply and freed by the server. */
struct kvf_admin_reply {
    unsigned http_status;
    const char *content_type;
    char *text;
    size_t text_bytes;
};

struct kvf_admin_route {
    const char *method;
    const char *path;
    bool is_public; /* also on admin.listen */
    void (*answer)(struct kvf_admin_api *api, const struct kvf_admin_request *request,
                   struct kvf_admin_reply *reply);
};

/* Ends with a NULL path. */
extern const struct kvf_admin_route kvf_admin_routes[];

struct json_t; /* of jansson */

/* admin_events.c: rows of struct kvf_control_event as one batch of vLLM's KV events. is_first: they
 * begin what is here. NULL: no memory. */
struct json_t *kvf_admin_events_json(const struct kvf_control *control, bool is_first);

/* admin_start.c: true: the daemon does not answer questions yet, and the reply says with what it is
 * busy. */
bool kvf_admin_is_starting(const struct kvf_admin_api *api, struct kvf_admin_reply *reply);
/* The same as GET /v1/stat has it. Takes text, which is start's. NULL: no memory. */
struct json_t *kvf_admin_start_json(const struct kvf_agent_start *start, struct json_t *text);

/* A reply {"status": ..., "text": ...}. A reply without text means that memory ran out. */
void kvf_admin_reply_status(struct kvf_admin_reply *reply, unsigned http_status, const char *status,
                            const char *text);

#endif /* KVF_AGENT_ADMIN_INTERNAL_H */
