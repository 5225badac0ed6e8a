/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_fault.h: a tier around another one that fails on demand.
 *
 * A specification is a list of rules, separated by commas, first match first:
 *
 *   reserve:error      the call answers KVF_ERR_BUSY
 *   store:busy         the call answers KVF_ERR_BUSY (load too)
 *   store:error        the io completes with KVF_ERR_IO, the inner tier never sees it (load too)
 *   load:corrupt       a byte of what was loaded is changed after the inner tier has checked it
 *   ...@3              only the third call of its kind; @3+ the third and all later ones
 *   ...%5              each call with a chance of 5 in 100
 *   seed=7             of the chances and of the byte that is changed; 1 if it is not given
 *
 * "load:error@3"    "store:error%5,load:corrupt%1,seed=7"
 */
#ifndef KVF_TIERS_TIER_FAULT_H
#define KVF_TIERS_TIER_FAULT_H

#include "tiers/tier.h"

enum {
    KVF_FAULT_RULES_MAX = 16,
};

/* Put the faults of spec around inner, which then belongs to *tier_out. An empty spec gives inner
 * back. A wrong one leaves inner alone and is explained in error_out in one line. The functions of
 * tier_dram.h still want the inner tier. KVF_OK; KVF_ERR_INVALID, _NO_MEMORY. */
int kvf_fault_open(struct kvf_tier *inner, const char *spec, struct kvf_tier **tier_out,
                   char *error_out, size_t error_bytes);

#endif /* KVF_TIERS_TIER_FAULT_H */
