/* SPDX-License-Identifier: Apache-2.0
 *
 * env.h: what a component takes from the world beside memory and files: time and randomness.
 *
 * Components that a simulation runs get a struct kvf_env and ask nothing else for time.
 */
#ifndef KVF_BASE_ENV_H
#define KVF_BASE_ENV_H

#include "base/clock.h"
#include "base/random.h"

struct kvf_env {
    const struct kvf_clock_ops *clock;
    void *clock_arg;
    const struct kvf_random_ops *random;
    void *random_arg;
};

/* The system's clock and random bytes. */
static inline struct kvf_env kvf_env_system(void)
{
    return (struct kvf_env){.clock = &kvf_clock_system, .random = &kvf_random_system};
}

static inline uint64_t kvf_env_now_ns(const struct kvf_env *env)
{
    return env->clock->now_ns(env->clock_arg);
}

static inline uint64_t kvf_env_wall_s(const struct kvf_env *env)
{
    return env->clock->wall_s(env->clock_arg);
}

static inline void kvf_env_random_fill(const struct kvf_env *env, void *out, size_t bytes)
{
    env->random->fill(env->random_arg, out, bytes);
}

static inline uint64_t kvf_env_random_u64(const struct kvf_env *env)
{
    uint64_t value;

    kvf_env_random_fill(env, &value, sizeof(value));
    return value;
}

#endif /* KVF_BASE_ENV_H */
