/* SPDX-License-Identifier: Apache-2.0
 *
 * mutant_env.c: a GPU worker's mutant, by its environment, which it gets from the test through the
 * daemon.
 */
#include <stdlib.h>

#include "base/mutant.h"

const char *kvf_mutant_chosen;

__attribute__((constructor)) static void choose(void)
{
    kvf_mutant_chosen = getenv("KVF_TEST_MUTANT");
}
