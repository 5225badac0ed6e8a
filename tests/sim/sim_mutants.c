/* SPDX-License-Identifier: Apache-2.0
 *
 * sim_mutants.c: the table of planted faults.
 */
#include "tests/sim/sim_mutants.h"

#include "base/mutant.h"

#ifdef KVF_MUTATIONS
const char *kvf_mutant_chosen;

static const struct {
    const char *name, *invariant;
} mutants[] = {
#define SIM_MUTANT(name, invariant) {#name, invariant},
#include "tests/sim/sim_mutants.def"
};

bool sim_mutant_choose(const char *name)
{
    for (unsigned i = 0; i < sizeof(mutants) / sizeof(mutants[0]); i++) {
        if (strcmp(name, mutants[i].name) == 0) {
            kvf_mutant_chosen = mutants[i].name;
        }
    }
    return kvf_mutant_chosen != NULL;
}

void sim_mutants_print(FILE *out)
{
    for (unsigned i = 0; i < sizeof(mutants) / sizeof(mutants[0]); i++) {
        fprintf(out, "%-24s %s\n", mutants[i].name, mutants[i].invariant);
    }
}
#else
bool sim_mutant_choose(const char *name)
{
    (void)name;
    return false;
}

void sim_mutants_print(FILE *out)
{
    (void)out;
}
#endif
