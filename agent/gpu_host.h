/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_host.h: GPU workers as the daemon sees them: processes (kvferryd-gpu), one a device, started,
 * restarted, and told which engines to serve. No CUDA is ever loaded into this process: a context
 * that a bad address has broken stays broken, and a worker can be had again.
 *
 *   OFF -> STARTING -> UP -> ENDING -> OFF ...        a pause of 1 to 30 s before each next start
 *
 * Owner: the reactor.
 */
#ifndef KVF_AGENT_GPU_HOST_H
#define KVF_AGENT_GPU_HOST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "transport/gpu_wire.h"

struct kvf_agent;
struct kvf_gpu_host;
struct kvf_gpu_worker;
struct kvf_session;
struct kvf_wire_gpu;

#define KVF_GPU_DEVICES_MAX 16

/* Who is told about workers: the tier in device memory. Devices are numbers below
 * KVF_GPU_DEVICES_MAX that stay the same for a UUID as long as the daemon lives. */
struct kvf_gpu_host_listener {
    void *ctx;
    /* A worker serves: all that its predecessor had is gone. */
    void (*up)(void *ctx, uint32_t device, const struct kvf_gpud_ready *ready);
    void (*down)(void *ctx, uint32_t device);
    /* A message of type 64 and up. Descriptors are closed by the caller unless set to -1. */
    void (*message)(void *ctx, uint32_t device, const void *data, size_t bytes, int *fds,
                    uint32_t n_fds);
};

/* Start what gpu.devices names; *host_out is NULL if that is nothing. Logs its own failures. A
 * worker that does not start is tried again and no reason not to serve. KVF_OK; KVF_ERR_CONFIG,
 * _NO_MEMORY. */
int kvf_gpu_host_open(struct kvf_agent *agent, struct kvf_gpu_host **host_out);

/* End all workers and wait for them, at most some seconds. Accepts NULL. Returns NULL. */
struct kvf_gpu_host *kvf_gpu_host_close(struct kvf_gpu_host *host);

/* At most one. It is told at once about workers that are up. */
void kvf_gpu_host_listen(struct kvf_gpu_host *host, const struct kvf_gpu_host_listener *listener);

/* Send to a worker. KVF_OK; KVF_ERR_BUSY: its socket is full; KVF_ERR_TIER_OFF: it is down. */
int kvf_gpu_host_send(struct kvf_gpu_host *host, uint32_t device, const void *data, size_t bytes,
                      const int *fds, uint32_t n_fds);

/* End a worker that cannot be used any more; it is started again. */
void kvf_gpu_host_restart(struct kvf_gpu_host *host, uint32_t device);

/* The device of a UUID. False: no worker has said so, so far. */
bool kvf_gpu_host_find(const struct kvf_gpu_host *host, const char *uuid, uint32_t *device_out);

/* From the loop: a worker's socket or its end is ready. */
void kvf_gpu_host_socket_ready(struct kvf_gpu_worker *worker);
void kvf_gpu_host_exit_ready(struct kvf_gpu_worker *worker);

/* Twice a second: starts what is due. host may be NULL. */
void kvf_gpu_host_tick(struct kvf_gpu_host *host);

/* A client asks for the worker of its GPU: give both of them an end of a channel, or say why not.
 * KVF_OK: answered, or noted; else the client is to be disconnected. */
int kvf_gpu_host_asked(struct kvf_session *session, const struct kvf_wire_gpu *message);

/* A client has gone: its channel is cut. host may be NULL. */
void kvf_gpu_host_session_ended(struct kvf_gpu_host *host, const struct kvf_session *session);

/* Sums over all workers that are up. */
struct kvf_gpu_host_counts {
    uint64_t workers, engines, put_blocks, put_bytes, get_blocks, get_bytes, refused, cut_off;
    uint64_t delayed_ns, starts, hangs, free_bytes;
};
void kvf_gpu_host_counts(const struct kvf_gpu_host *host, struct kvf_gpu_host_counts *counts_out);

#endif /* KVF_AGENT_GPU_HOST_H */
