/* SPDX-License-Identifier: Apache-2.0
 *
 * sim_mutants.h: choosing one of the faults that are planted by base/mutant.h.
 */
#ifndef KVF_TESTS_SIM_MUTANTS_H
#define KVF_TESTS_SIM_MUTANTS_H

#include <stdbool.h>
#include <stdio.h>

/* False: no fault of this name is in this build. */
bool sim_mutant_choose(const char *name);

/* Names and invariants, a line each; nothing in a build without them. */
void sim_mutants_print(FILE *out);

#endif /* KVF_TESTS_SIM_MUTANTS_H */
