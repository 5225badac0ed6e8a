/* SPDX-License-Identifier: Apache-2.0
 *
 * offence.h: processes that broke the protocol lately. Each attach costs the daemon memory that is
 * made and given back, and a client that is disconnected can be back in a moment; so one that has
 * offended attaches once in its delay at most, which doubles with each offence and halves with each
 * second without one. Others are not touched: a process that cannot be told from others (peer 0)
 * is never remembered.
 *
 * The table is small. In a full one the offender that has been clean for longest is forgotten.
 */
#ifndef KVF_AGENT_OFFENCE_H
#define KVF_AGENT_OFFENCE_H

#include <stdint.h>

enum {
    KVF_OFFENDERS_MAX = 16,
    KVF_OFFENCE_DELAY_MS = 50, /* after the first */
};

struct kvf_offender {
    uint64_t peer;     /* 0: unused */
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
