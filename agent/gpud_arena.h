/* SPDX-License-Identifier: Apache-2.0
 *
 * gpud_arena.h: a GPU worker's share in the tier in device memory: pieces, and copies between them
 * and the daemon's window, on command. What is in them, and whose it is, only the daemon knows.
 *
 * Owner: the worker's thread, between enter and leave of the device.
 */
#ifndef KVF_AGENT_GPUD_ARENA_H
#define KVF_AGENT_GPUD_ARENA_H

#include "gpu/device.h"

struct kvf_gpud_arena;

/* Sends to the daemon. KVF_OK; KVF_ERR_BUSY: its socket is full, to be tried again. */
typedef int (*kvf_gpud_arena_send_fn)(void *ctx, const void *data, size_t bytes, const int *fds,
                                      uint32_t n_fds);

/* device stays the caller's. NULL: no memory. */
struct kvf_gpud_arena *kvf_gpud_arena_open(struct kvf_gpu_device *device,
                                           kvf_gpud_arena_send_fn send, void *send_ctx);

/* Copies in flight are waited for. Accepts NULL. Returns NULL. */
struct kvf_gpud_arena *kvf_gpud_arena_close(struct kvf_gpud_arena *arena);

/* A message of the tier's types from the daemon. Descriptors stay the caller's. KVF_OK;
 * KVF_ERR_PROTOCOL: not one that a daemon of this build sends; other failures: of the GPU. */
int kvf_gpud_arena_message(struct kvf_gpud_arena *arena, const void *data, size_t bytes,
                           const int *fds, uint32_t n_fds);

/* Report copies that have ended. KVF_OK: nothing is under way; KVF_EMPTY: something is, to be asked
 * again soon; else the GPU has failed. */
int kvf_gpud_arena_poll(struct kvf_gpud_arena *arena);

#endif /* KVF_AGENT_GPUD_ARENA_H */
