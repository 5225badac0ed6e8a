/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_remote.h: what gpu_agent.c (the link to a worker) and gpu_share.c (what the worker has of
 * ours) share with each other only.
 */
#ifndef KVF_CLIENT_GPU_REMOTE_H
#define KVF_CLIENT_GPU_REMOTE_H

#include "client/gpu_internal.h"
#include "gpu/import.h"
#include "transport/gpu_proto.h"

#define CALL_NS (10 * KVF_NS_PER_S) /* a worker's answer to memory and regions */

enum link_state {
    LINK_DOWN,
    LINK_ASKED,
    LINK_GREETING,
    LINK_SHARING,
    LINK_UP,
    LINK_ENDING,
};

/* An allocation that the worker has opened. */
struct shared_memory {
    uint32_t number;
    uint32_t n_uses; /* by tensors of regions */
    uint64_t base;
    uint64_t bytes;
};

/* A message that the socket had no room for. */
struct unsent {
    struct unsent *next;
    size_t bytes;
    uint8_t data[];
};

/* A region on its way to the worker, with the memory that it lies in. */
struct sharing {
    struct kvf_gpu_region *region; /* NULL: none */
    bool is_giving;                /* memory, which is described by: */
    bool is_named;                 /* the region itself has been sent */
    struct kvf_gpu_export export;
    uint32_t number; /* of the memory */
    uint32_t n_sent; /* pieces of it */
};

struct kvf_gpu_remote {
    enum link_state state;
    int fd;
    int pid_fd;
    bool is_gone; /* GONE has come */
    bool was_up;
    uint32_t n_awaited;             /* answers */
    struct kvf_gpud_head awaited;   /* to messages like this one */
    int32_t answer_status;          /* the first that is not KVF_OK */
    char text[KVF_WIRE_TEXT_BYTES]; /* of the last refusal */
    int32_t status;                 /* why the link is down */
    uint64_t deadline_ns;           /* ASKED, GREETING, SHARING, and of calls */
    uint64_t next_ns;               /* DOWN: when to ask again */
    uint64_t pause_ns;
    uint8_t *flags; /* NULL: none */
    uint64_t flags_address;
    bool are_flags_pinned;
    uint64_t flag_values[2];
    void *event;
    uint32_t n_requests;
    uint32_t next_number;
    struct shared_memory *memories;
    uint32_t n_memories;
    struct sharing sharing;
    struct unsent *unsent;
    struct unsent **unsent_tail;
    union kvf_gpud_message message; /* that is being built */
};

/* Send the message being built, with a descriptor (-1: none), if there is room: its answer is
 * awaited then, as all are that come before the next other one. False: build it again later. */
bool kvf_gpu_remote_ask(struct kvf_gpu *gpu, int fd);

/* Let the worker's messages come, for a moment. False: the link is lost, or it is now, because the
 * answer has not come in time. */
bool kvf_gpu_remote_listen(struct kvf_gpu *gpu);

/* Send the message being built and wait for its answer; the link is up. Its status;
 * KVF_ERR_DISCONNECTED: the link is lost. */
int kvf_gpu_remote_call(struct kvf_gpu *gpu, int fd);
int kvf_gpu_remote_call_plain(struct kvf_gpu *gpu, enum kvf_gpud_type type, uint32_t number);

/* Go on with sharing all regions, which does not wait. KVF_OK: all are; KVF_EMPTY: answers are to
 * come; or why one cannot be: remote->text says it. */
int kvf_gpu_remote_share_on(struct kvf_gpu *gpu);

/* What is on its way is not any longer. */
void kvf_gpu_remote_share_stop(struct kvf_gpu *gpu);

/* Wait until all regions are shared, or the link is lost. */
void kvf_gpu_remote_share_wait(struct kvf_gpu *gpu);

#endif /* KVF_CLIENT_GPU_REMOTE_H */
