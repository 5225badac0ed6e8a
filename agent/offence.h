/* SPDX-License-Identifier: Apache-2.0
 *
 * offence.h: processes that broke the protocol lately. Each attach costs the daemon memory that is
 * made and given back, and a client that is disconnected can be back in a moment; so one that has
 * offended attaches once in its delay at most, which doubles with each offence and halves with each
 * second without one. Others are not touched: a process that cannot be told from others (peer 0)
 * is never remembered.
 *
 * A remote client says by itself which process it is, and would be another one each time. All of a
 * tenant, which share its key, are one peer.
 *
 * The table is small. In a full one the offender that has been clean for longest is forgotten;
 * remote ones have places of their own, so that they push no process of this node out.
 */
#ifndef KVF_AGENT_OFFENCE_H
#define KVF_AGENT_OFFENCE_H

#include <stdint.h>

#define KVF_OFFENCE_REMOTE (UINT64_C(1) << 63) /* no number of a process of this node has it */

enum {
    KVF_OFFENDERS_LOCAL_MAX = 16,
    KVF_OFFENDERS_REMOTE_MAX = 16, /* as many as tenants */
    KVF_OFFENDERS_MAX = KVF_OFFENDERS_LOCAL_MAX + KVF_OFFENDERS_REMOTE_MAX,
    KVF_OFFENCE_DELAY_MS = 50, /* after the first */
};

struct kvf_offender {
    uint64_t peer;     /* a process, or KVF_OFFENCE_REMOTE | a number of its tenant; 0: unused */
    uint64_t delay_ns; /* as of until_ns */
    uint64_t until_ns; /* it attaches no sooner */
};

struct kvf_offenders {
    uint64_t delay_max_ns; /* 0: nobody is delayed */
    struct kvf_offender offenders[KVF_OFFENDERS_MAX];
};

/* A client of this process was disconnected for what it did. */
void kvf_offence_note(struct kvf_offenders *offenders, uint64_t peer, uint64_t now_ns);

/* When a client of this process may attach, 0: now. */
uint64_t kvf_offence_until_ns(const struct kvf_offenders *offenders, uint64_t peer,
                              uint64_t now_ns);

/* One attaches: the next one of an offender has to wait again. */
void kvf_offence_attach(struct kvf_offenders *offenders, uint64_t peer, uint64_t now_ns);

#endif /* KVF_AGENT_OFFENCE_H */
