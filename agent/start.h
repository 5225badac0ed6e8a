/* SPDX-License-Identifier: Apache-2.0
 *
 * start.h: a daemon that does not serve yet, because it recovers what large drives hold: how far it
 * is, told to the service manager, to the admin thread and to clients, who are to come later.
 */
#ifndef KVF_AGENT_START_H
#define KVF_AGENT_START_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum kvf_start_phase {
    KVF_START_OPENING = 0, /* tables and stores */
    KVF_START_RECOVERING = 1,
    KVF_START_MEMORY = 2,
    KVF_START_OVER = 3,
};

/* Part of the agent. Written by the thread that opens it; any thread reads, each number by itself:
 * they are for people. */
struct kvf_start {
    _Atomic uint8_t phase;
    _Atomic uint32_t drive;                     /* that is recovered now */
    _Atomic uint64_t looked_bytes, total_bytes; /* of this drive */
    _Atomic uint64_t blocks;                    /* of all drives so far */

    /* The thread that refuses clients meanwhile. */
    pthread_t thread;
    bool has_thread;
    int stop_fd;
    uint64_t refused; /* owner: the thread, after its end the opener */
};

struct kvf_agent;

/* What the opener is at from now on; MEMORY and OPENING. The service manager is told. */
void kvf_start_phase(struct kvf_agent *agent, enum kvf_start_phase phase);

/* The opener begins to recover a drive; so much of it has been looked at, and so many blocks found.
 */
void kvf_start_drive(struct kvf_agent *agent, uint32_t drive);
void kvf_start_looked(struct kvf_agent *agent, uint64_t looked_bytes, uint64_t total_bytes);
void kvf_start_found(struct kvf_agent *agent, uint64_t blocks);

/* Between these two, clients that have waited on the listening sockets for a while are told that
 * the daemon is busy, and with what; sooner ones go on waiting, as most starts are short. Without a
 * thread to be had they all wait. */
void kvf_start_begin_refusing(struct kvf_agent *agent);
void kvf_start_end_refusing(struct kvf_agent *agent);

#endif /* KVF_AGENT_START_H */
