/* SPDX-License-Identifier: Apache-2.0
 *
 * agent.h: the daemon as main.c sees it: make it, run it, stop it. What is inside is core.h.
 */
#ifndef KVF_AGENT_AGENT_H
#define KVF_AGENT_AGENT_H

#include <stdbool.h>
#include <stdint.h>

#include "agent/calibration.h"
#include "agent/config.h"
#include "agent/control.h"
#include "base/env.h"
#include "tiers/io.h"
#include "tiers/tier_hbm.h"
#include "tiers/work.h"

struct kvf_agent;

/* An agent that listens on its sockets, and has nothing to serve yet. Logs its own failures. config
 * is borrowed until destroy. KVF_OK; KVF_ERR_CONFIG: something in it cannot be used; KVF_ERR_BUSY:
 * a socket is in use; KVF_ERR_NO_MEMORY. */
int kvf_agent_create(const struct kvf_config *config, struct kvf_agent **agent_out);

/* Open tiers and recover what the drives hold. Logs its own failures. Blocks, for long where drives
 * are large; clients are refused as busy after the first second. Once, by the thread that runs the
 * reactor. KVF_OK; KVF_ERR_CONFIG: a store is foreign or cannot be used; KVF_ERR_BUSY: it is in
 * use; KVF_ERR_IO, _NO_MEMORY, _NO_SPACE, _UNSUPPORTED. */
int kvf_agent_open(struct kvf_agent *agent);

/* How far kvf_agent_open is. */
struct kvf_agent_start {
    uint64_t incarnation;
    uint64_t uptime_s;
    uint64_t looked_bytes, total_bytes; /* of the drive that is recovered; 0, 0: none is now */
    uint64_t blocks;                    /* found so far, on all drives */
    char text[512];                     /* the same for people, and what else takes long */
};

/* True: the agent is not open yet, and answers no question; *start_out says how far it is. Any
 * thread, between create and destroy. */
bool kvf_agent_starting(const struct kvf_agent *agent, struct kvf_agent_start *start_out);

/* What an agent takes from the world, for simulations; the daemon gives none and gets the
 * system's. */
struct kvf_agent_ports {
    struct kvf_env env;
    struct kvf_work_queue *work; /* taken over by the agent, for jobs of all kinds */
    /* The queue of drive `index`, taken over by its tier. */
    struct kvf_io_queue *(*open_drive)(void *ctx, uint32_t index);
    /* GPU `index` of n_hbm, taken over by its tier. NULL: none. */
    struct kvf_hbm_port *(*open_hbm)(void *ctx, uint32_t index);
    uint32_t n_hbm;
    bool has_network; /* what is behind transport_ucx.h is simulated as well */
    /* Called while a tier waits for its drive at start and end: let simulated time pass. */
    void (*wait)(void *ctx);
    /* May bytes more of the arena be populated now? NULL: as the machine's memory allows. */
    bool (*memory_allows)(void *ctx, uint64_t bytes);
    /* The least that a write budget saves up. 0: as the daemon. */
    uint64_t burst_bytes;
    void *ctx;
};

/* Create and open with ports, without listening: clients come by kvf_agent_adopt. */
int kvf_agent_create_ported(const struct kvf_config *config, const struct kvf_agent_ports *ports,
                            struct kvf_agent **agent_out);

/* Serve a connected socket (SOCK_SEQPACKET) as a client of the configuration's socket
 * `socket_index`. peer: the process at its other end, any number that is its own; 0: cannot be
 * told. The descriptor belongs to the agent from then on. KVF_OK; KVF_ERR_BUSY. */
int kvf_agent_adopt(struct kvf_agent *agent, uint32_t socket_index, int fd, uint64_t peer);

/* One turn of the reactor without sleeping, for simulations: the caller moves the clock between
 * turns. True: there is a next turn; false: run would return *status_out. */
bool kvf_agent_turn(struct kvf_agent *agent, int *status_out);

/* The reactor: serves until it is stopped and drained. The calling thread becomes the owner of all
 * state. KVF_OK after a drain; KVF_ERR_TIMEOUT: drain.timeout ended it; KVF_ERR_INTERNAL. */
int kvf_agent_run(struct kvf_agent *agent);

/* Begin to drain: no new clients or puts, write what is queued, then run returns. Any thread,
 * signal handlers included. */
void kvf_agent_stop(struct kvf_agent *agent);

/* Read calibration.dir again. Any thread, signal handlers included. */
void kvf_agent_reload(struct kvf_agent *agent);

/* True while requests are served. Any thread. */
bool kvf_agent_is_ready(const struct kvf_agent *agent);

/* Accepts NULL and half-built agents. */
void kvf_agent_destroy(struct kvf_agent *agent);

/* Bytes that create reserves beside arena and staging, for --check: index, request tables, session
 * tables, ghost list. *index_entries_out: the entries that index.entries 0 stands for here. */
struct kvf_agent_memory {
    uint64_t index_bytes;
    uint64_t index_entries;
    uint64_t request_bytes;
    uint64_t session_bytes;
    uint64_t slot_bytes;
    uint64_t ghost_bytes;
    uint64_t hbm_bytes; /* beside windows and slots */
    uint64_t peers_bytes;
};
void kvf_agent_memory(const struct kvf_config *config, struct kvf_agent_memory *memory_out);

#endif /* KVF_AGENT_AGENT_H */
