/* SPDX-License-Identifier: Apache-2.0
 *
 * pool.h: a fixed number of objects of one size, all reserved at init.
 *
 * Request tables, sessions and messages come from pools, so that nothing allocates after start and
 * each table has a bound: get answers NULL when it is used up. Objects have stable addresses and
 * small indexes, which serve as names on wires. Owner: one thread.
 */
#ifndef KVF_BASE_POOL_H
#define KVF_BASE_POOL_H

#include "base/log.h"
#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

struct kvf_pool {
    const char *name;
    unsigned char *objects;
    uint32_t *free_list; /* a stack of indexes, the most recently returned on top */
    uint8_t *taken;      /* a flag for each object */
    size_t object_bytes; /* rounded up to the alignment of any object */
    uint32_t count;
    uint32_t free_count;
};

/* Reserve count objects of object_bytes. name is borrowed until fini. KVF_OK; KVF_ERR_INVALID,
 * _NO_MEMORY (the pool is then as fini leaves it). */
int kvf_pool_init(struct kvf_pool *pool, const char *name, size_t object_bytes, uint32_t count);

/* Free the memory. Objects not returned are a bug: they are counted in one warning to logger (may
 * be NULL), with the pool's name, and the return value. Accepts a zeroed pool. */
uint32_t kvf_pool_fini(struct kvf_pool *pool, const struct kvf_logger *logger);

/* Take an object, zeroed. NULL: all are taken. */
void *kvf_pool_get(struct kvf_pool *pool);

/* Give an object back. Asserts that it is one of this pool's and taken. */
void kvf_pool_put(struct kvf_pool *pool, void *object);

/* The index of an object of this pool, 0..count-1. */
uint32_t kvf_pool_index(const struct kvf_pool *pool, const void *object);

/* The object with an index; NULL if there is none or it is not taken, so that an index from outside
 * needs no other check. */
void *kvf_pool_at(const struct kvf_pool *pool, uint32_t index);

/* Objects taken now. */
static inline uint32_t kvf_pool_taken_count(const struct kvf_pool *pool)
{
    return pool->count - pool->free_count;
}

#endif /* KVF_BASE_POOL_H */
