/* SPDX-License-Identifier: Apache-2.0
 *
 * pool.c: objects in one array, free ones on a stack of indexes.
 */
#include "base/pool.h"

#include <assert.h>
#include <stdalign.h>
#include <stdlib.h>
#include <string.h>

int kvf_pool_init(struct kvf_pool *pool, const char *name, size_t object_bytes, uint32_t count)
{
    size_t align_bytes = alignof(max_align_t);

    memset(pool, 0, sizeof(*pool));
    if (object_bytes == 0 || object_bytes > SIZE_MAX / 2 || count == 0) {
        return KVF_ERR_INVALID;
    }
    pool->name = name;
    pool->object_bytes = (object_bytes + align_bytes - 1) / align_bytes * align_bytes;
    pool->count = count;
    pool->free_count = count;
    pool->objects = calloc(count, pool->object_bytes);
    if (pool->objects == NULL) {
        goto fail;
    }
    pool->free_list = calloc(count, sizeof(*pool->free_list));
    pool->taken = calloc(count, sizeof(*pool->taken));
    if (pool->free_list == NULL || pool->taken == NULL) {
        goto fail;
    }
    for (uint32_t i = 0; i < count; i++) {
        pool->free_list[i] = count - 1 - i; /* the lowest index is taken first */
    }
    return KVF_OK;

fail:
    kvf_pool_fini(pool, NULL);
    return KVF_ERR_NO_MEMORY;
}

uint32_t kvf_pool_fini(struct kvf_pool *pool, const struct kvf_logger *logger)
{
    uint32_t leaked_count = pool->count - pool->free_count;

    if (leaked_count > 0) {
        kvf_logger_log(logger, KVF_LOG_WARNING, "pool %s: %u of %u objects were not returned",
                       pool->name, leaked_count, pool->count);
    }
    free(pool->objects);
    free(pool->free_list);
    free(pool->taken);
    memset(pool, 0, sizeof(*pool));
    return leaked_count;
}

void *kvf_pool_get(struct kvf_pool *pool)
{
    uint32_t index;
    void *object;

    if (pool->free_count == 0) {
        return NULL;
    }
    index = pool->free_list[--pool->free_count];
    pool->taken[index] = 1;
    object = pool->objects + index * pool->object_bytes;
    memset(object, 0, pool->object_bytes);
    return object;
}

void kvf_pool_put(struct kvf_pool *pool, void *object)
{
    uint32_t index = kvf_pool_index(pool, object);

    assert(pool->taken[index]);
    pool->taken[index] = 0;
    pool->free_list[pool->free_count++] = index;
}

uint32_t kvf_pool_index(const struct kvf_pool *pool, const void *object)
{
    size_t offset = (size_t)((const unsigned char *)object - pool->objects);

    assert(offset % pool->object_bytes == 0 && offset / pool->object_bytes < pool->count);
    return (uint32_t)(offset / pool->object_bytes);
}

void *kvf_pool_at(const struct kvf_pool *pool, uint32_t index)
{
    if (index >= pool->count || !pool->taken[index]) {
        return NULL;
    }
    return pool->objects + index * pool->object_bytes;
}
