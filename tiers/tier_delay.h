/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_delay.h: a tier around another one whose completions come later.
 *
 * A specification is a list, separated by commas:
 *
 *   load:2ms           each completed load is held back for 2 ms
 *   store:500us+1ms    500 us and up to 1 ms more, by chance, so that completions also change order
 *   seed=7             of the chances; 1 if it is not given
 *
 * A reserve has no completion and cannot be delayed.
 */
#ifndef KVF_TIERS_TIER_DELAY_H
#define KVF_TIERS_TIER_DELAY_H

#include "base/env.h"
#include "tiers/tier.h"

/* Put the delays of spec around inner, which then belongs to *tier_out; time is env's. An empty
 * spec gives inner back. A wrong one leaves inner alone and is explained in error_out in one line.
 * KVF_OK; KVF_ERR_INVALID, _NO_MEMORY. */
int kvf_delay_open(struct kvf_tier *inner, const char *spec, const struct kvf_env *env,
                   struct kvf_tier **tier_out, char *error_out, size_t error_bytes);

#endif /* KVF_TIERS_TIER_DELAY_H */
