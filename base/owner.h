/* SPDX-License-Identifier: Apache-2.0
 *
 * owner.h: says which thread owns a struct, and checks it in Debug builds.
 *
 * Mutable state belongs to one thread. A struct that states its owner in a comment also carries a
 * kvf_owner: the owner binds it when it takes over (which may be after another thread has built the
 * struct), and functions that need the owner begin with a check.
 */
#ifndef KVF_BASE_OWNER_H
#define KVF_BASE_OWNER_H

#include "base/debug.h"

#include <pthread.h>
#include <stdbool.h>

struct kvf_owner {
    pthread_t thread;
    bool bound;
};

/* The calling thread becomes the owner. */
static inline void kvf_owner_bind(struct kvf_owner *owner)
{
    owner->thread = pthread_self();
    owner->bound = true;
}

/* The next thread that binds becomes the owner; until then any thread passes the check. */
static inline void kvf_owner_release(struct kvf_owner *owner)
{
    owner->bound = false;
}

/* Is the calling thread the owner? True while nobody is. */
static inline bool kvf_owner_is_self(const struct kvf_owner *owner)
{
    return !owner->bound || pthread_equal(owner->thread, pthread_self());
}

static inline void kvf_owner_check(const struct kvf_owner *owner)
{
    kvf_debug_assert(kvf_owner_is_self(owner));
    (void)owner;
}

#endif /* KVF_BASE_OWNER_H */
