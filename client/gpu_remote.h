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

enum link_state {
    LINK_DOWN,
    LINK_ASKED,
    LINK_GREETING,
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

struct kvf_gpu_remote {
    enum link_state state;
    int fd;
    int pid_fd;
    bool is_gone;    /* GONE has come */
    bool is_awaited; /* an answer is */
    bool was_up;
    struct kvf_gpud_head awaited;
    int32_t answer_status;
    char text[KVF_WIRE_TEXT_BYTES]; /* of the last refusal */
    int32_t status;                 /* why the link is down */
    uint64_t deadline_ns;           /* GREETING */
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
    struct unsent *unsent;
    struct unsent **unsent_tail;
    union kvf_gpud_message message; /* that is being built */
};

/* Send the message being built, with a descriptor (-1: none), and wait for its answer; the link is
 * up. Its status; KVF_ERR_DISCONNECTED: the link is lost. */
int kvf_gpu_remote_call(struct kvf_gpu *gpu, int fd);
int kvf_gpu_remote_call_plain(struct kvf_gpu *gpu, enum kvf_gpud_type type, uint32_t number);

/* Share all regions. KVF_OK, or why one of them cannot be: remote->text says it. */
int kvf_gpu_remote_share_all(struct kvf_gpu *gpu);

#endif /* KVF_CLIENT_GPU_REMOTE_H */
