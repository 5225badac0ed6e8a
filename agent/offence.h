/* SPDX-License-Identifier: Apache-2.0
 *
 * offence.h: processes that broke the protocol lately. Each attach costs the daemon memory that is
 * made and given back, and a client that is disconnected can be back in a moment; so one that has
 * offended attaches once in its delay at most, which doubles with each offence and halves with each
 * second without one. Others are not touched: a process that cannot be told from others (peer 0)
 * is never remembered.
 *
 * A remote client says by itself which process it is, and would be another one each time. Those of
 * a tenant, which share its key, that have connected from one address are one peer.
 *
 * The table is small. In a full one the process that has been clean for longest is forgotten. Each
 * tenant has places of its own for its remote ones, so that they push nobody else out; when these
 * are all taken by addresses that are still delayed, all remote clients of the tenant are one peer.
 */
#ifndef KVF_AGENT_OFFENCE_H
#define KVF_AGENT_OFFENCE_H

#include <stdint.h>

#define KVF_OFFENCE_REMOTE     (UINT64_C(1) << 63) /* no number of a process of this node has it */
#define KVF_OFFENCE_FROM_SHIFT 16                  /* the tenant's number is below it */

enum {
    KVF_OFFENDERS_LOCAL_MAX = 16,
    KVF_OFFENDERS_TENANTS_MAX = 16,
    KVF_OFFENDERS_ADDRESSES_MAX = 4, /* of one tenant's remote clients */
    KVF_OFFENDERS_MAX = KVF_OFFENDERS_LOCAL_MAX +
                        KVF_OFFENDERS_TENANTS_MAX * (1 + KVF_OFFENDERS_ADDRESSES_MAX),
    KVF_OFFENCE_DELAY_MS = 50, /* after the first */
};

struct kvf_offender {
    uint64_t peer;     /* a process, or as kvf_offence_remote says; 0: unused */
    uint64_t delay_ns; /* as of until_ns */
    uint64_t until_ns; /* it attaches no sooner */
};

struct kvf_offenders {
    uint64_t delay_max_ns; /* 0: nobody is delayed */
    struct kvf_offender offenders[KVF_OFFENDERS_MAX];
};

/* Remote clients of a tenant. address: a number of where they have connected from, of which the
 * lowest 47 bits count; 0: all of them. */
uint64_t kvf_offence_remote(uint32_t tenant, uint64_t address);

/* For an offender that is refused. Static. */
const char *kvf_offence_text(uint64_t peer);

/* A client of this process was disconnected for what it did. */
void kvf_offence_note(struct kvf_offenders *offenders, uint64_t peer, uint64_t now_ns);

/* When a client of this process may attach, 0: now. */
uint64_t kvf_offence_until_ns(const struct kvf_offenders *offenders, uint64_t peer,
                              uint64_t now_ns);

/* One attaches: the next one of an offender has to wait again. */
void kvf_offence_attach(struct kvf_offenders *offenders, uint64_t peer, uint64_t now_ns);

#endif /* KVF_AGENT_OFFENCE_H */
