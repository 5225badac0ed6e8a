/* SPDX-License-Identifier: Apache-2.0
 *
 * random.h: random bytes, behind a table, so that a run can be repeated from a seed.
 */
#ifndef KVF_BASE_RANDOM_H
#define KVF_BASE_RANDOM_H

#include <stddef.h>
#include <stdint.h>

struct kvf_random_ops {
    void (*fill)(void *arg, void *out, size_t bytes);
};

/* getrandom: fit for keys; arg is ignored. Any thread. Blocks only before the kernel's pool is
 * ready, early in a boot; a kernel without random bytes ends the process. */
extern const struct kvf_random_ops kvf_random_system;

/* A generator that repeats from its seed (xoshiro256**). Not for keys. Owner: one thread. */
struct kvf_random_seeded {
    uint64_t state[4];
};

void kvf_random_seeded_init(struct kvf_random_seeded *random, uint64_t seed);

/* The next 64 bits. */
uint64_t kvf_random_seeded_next(struct kvf_random_seeded *random);

/* arg is a struct kvf_random_seeded. */
extern const struct kvf_random_ops kvf_random_seeded_ops;

#endif /* KVF_BASE_RANDOM_H */
