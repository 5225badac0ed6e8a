/* SPDX-License-Identifier: Apache-2.0
 *
 * mutant.h: faults planted into the product to see whether the simulator finds them. In every build
 * but the simulator's second one KVF_MUTANT is the constant false, and nothing of it is left.
 */
#ifndef KVF_BASE_MUTANT_H
#define KVF_BASE_MUTANT_H

#include <stdbool.h>

#ifdef KVF_MUTATIONS
#include <string.h>

extern const char *kvf_mutant_chosen; /* NULL: none; set before anything else runs */

#define KVF_MUTANT(name) (kvf_mutant_chosen != NULL && strcmp(kvf_mutant_chosen, #name) == 0)
#else
#define KVF_MUTANT(name) false
#endif

#endif /* KVF_BASE_MUTANT_H */
