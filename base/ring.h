/* SPDX-License-Identifier: Apache-2.0
 *
 * ring.h: bounded queue between exactly two threads of one process.
 *
 *      head (consumer)            tail (producer)
 *         v                          v
 *   [ . ][ x ][ x ][ x ][ x ][ x ][ . ][ . ]     positions count up for ever, masked on use
 *
 * One thread pushes, one pops; neither locks or waits. Entries have one size, fixed at init. Head
 * and tail sit on cache lines of their own, each beside its owner's last look at the other one, so
 * that a line travels between cores only when a side runs out of what it knew.
 *
 * Rings shared with another process are another thing: transport/proto_shm.h.
 */
#ifndef KVF_BASE_RING_H
#define KVF_BASE_RING_H

#include "base/limits.h"
#include "base/owner.h"
#include "base/status.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct kvf_ring {
    unsigned char *entries;
    size_t entry_bytes;
    uint32_t mask;

    /* Owner: the producer; tail is read by the consumer. */
    _Alignas(KVF_CACHE_LINE_BYTES) _Atomic uint32_t tail;
    uint32_t head_seen;
    struct kvf_owner producer;

    /* Owner: the consumer; head is read by the producer. */
    _Alignas(KVF_CACHE_LINE_BYTES) _Atomic uint32_t head;
    uint32_t tail_seen;
    struct kvf_owner consumer;
};

/* Room for at least entry_count entries (rounded up to a power of two, at most 2^30) of
 * entry_bytes. Before either thread uses it. KVF_OK; KVF_ERR_INVALID, _NO_MEMORY. */
static inline int kvf_ring_init(struct kvf_ring *ring, size_t entry_bytes, uint32_t entry_count)
{
    uint32_t capacity = 1;

    memset(ring, 0, sizeof(*ring));
    if (entry_bytes == 0 || entry_count == 0 || entry_count > 1u << 30) {
        return KVF_ERR_INVALID;
    }
    while (capacity < entry_count) {
        capacity *= 2;
    }
    ring->entries = calloc(capacity, entry_bytes);
    if (ring->entries == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    ring->entry_bytes = entry_bytes;
    ring->mask = capacity - 1;
    return KVF_OK;
}

/* After both threads are done with it. Accepts a zeroed ring; entries left inside are dropped. */
static inline void kvf_ring_fini(struct kvf_ring *ring)
{
    free(ring->entries);
    memset(ring, 0, sizeof(*ring));
}

static inline uint32_t kvf_ring_capacity(const struct kvf_ring *ring)
{
    return ring->mask + 1;
}

/* Copy count entries at position (which may wrap) between the ring and a flat array. */
static inline void kvf_ring_write_at(struct kvf_ring *ring, uint32_t position, const void *from,
                                     uint32_t count)
{
    uint32_t index = position & ring->mask;
    uint32_t until_wrap = ring->mask + 1 - index;
    uint32_t first = count < until_wrap ? count : until_wrap;

    memcpy(ring->entries + index * ring->entry_bytes, from, first * ring->entry_bytes);
    if (first < count) {
        memcpy(ring->entries, (const unsigned char *)from + first * ring->entry_bytes,
               (count - first) * ring->entry_bytes);
    }
}

static inline void kvf_ring_read_at(const struct kvf_ring *ring, uint32_t position, void *to,
                                    uint32_t count)
{
    uint32_t index = position & ring->mask;
    uint32_t until_wrap = ring->mask + 1 - index;
    uint32_t first = count < until_wrap ? count : until_wrap;

    memcpy(to, ring->entries + index * ring->entry_bytes, first * ring->entry_bytes);
    if (first < count) {
        memcpy((unsigned char *)to + first * ring->entry_bytes, ring->entries,
               (count - first) * ring->entry_bytes);
    }
}

/* Producer: copy up to count entries in. Returns how many fitted. */
static inline uint32_t kvf_ring_push_batch(struct kvf_ring *ring, const void *entries,
                                           uint32_t count)
{
    /* relaxed: only this thread writes tail */
    uint32_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    uint32_t room = ring->mask + 1 - (tail - ring->head_seen);

    kvf_owner_check(&ring->producer);
    if (room < count) {
        /* acquire, with the consumer's release of head: its reads of the entries that we are about
         * to overwrite have happened */
        ring->head_seen = atomic_load_explicit(&ring->head, memory_order_acquire);
        room = ring->mask + 1 - (tail - ring->head_seen);
    }
    if (count > room) {
        count = room;
    }
    if (count > 0) {
        kvf_ring_write_at(ring, tail, entries, count);
        /* release, with the consumer's acquire of tail: the entries are written before they
           count */
        atomic_store_explicit(&ring->tail, tail + count, memory_order_release);
    }
    return count;
}

/* Producer: copy one entry in. False: the ring is full. */
static inline bool kvf_ring_push(struct kvf_ring *ring, const void *entry)
{
    return kvf_ring_push_batch(ring, entry, 1) == 1;
}

/* Consumer: copy up to count entries out. Returns how many there were. */
static inline uint32_t kvf_ring_pop_batch(struct kvf_ring *ring, void *entries_out, uint32_t count)
{
    /* relaxed: only this thread writes head */
    uint32_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    uint32_t ready = ring->tail_seen - head;

    kvf_owner_check(&ring->consumer);
    if (ready < count) {
        /* acquire, with the producer's release of tail: see the entries it counted */
        ring->tail_seen = atomic_load_explicit(&ring->tail, memory_order_acquire);
        ready = ring->tail_seen - head;
    }
    if (count > ready) {
        count = ready;
    }
    if (count > 0) {
        kvf_ring_read_at(ring, head, entries_out, count);
        /* release, with the producer's acquire of head: the reads are done before the room is
           given */
        atomic_store_explicit(&ring->head, head + count, memory_order_release);
    }
    return count;
}

/* Consumer: copy one entry out. False: the ring is empty. */
static inline bool kvf_ring_pop(struct kvf_ring *ring, void *entry_out)
{
    return kvf_ring_pop_batch(ring, entry_out, 1) == 1;
}

/* Consumer: is there nothing to pop? For deciding to sleep this is not enough on its own: see the
 * producer's wake-up first, then ask. */
static inline bool kvf_ring_is_empty(const struct kvf_ring *ring)
{
    return atomic_load_explicit(&ring->tail, memory_order_acquire) ==
           atomic_load_explicit(&ring->head, memory_order_relaxed);
}

/* Entries inside at some moment of the call. Either thread, or a third one for statistics. */
static inline uint32_t kvf_ring_count(const struct kvf_ring *ring)
{
    /* head first: it can then only be behind, and the difference never wraps */
    uint32_t head = atomic_load_explicit(&ring->head, memory_order_acquire);
    uint32_t count = atomic_load_explicit(&ring->tail, memory_order_acquire) - head;

    return count <= ring->mask + 1 ? count : ring->mask + 1;
}

/* The calling thread becomes the producer or consumer; Debug builds check it from then on. */
static inline void kvf_ring_bind_producer(struct kvf_ring *ring)
{
    kvf_owner_bind(&ring->producer);
}

static inline void kvf_ring_bind_consumer(struct kvf_ring *ring)
{
    kvf_owner_bind(&ring->consumer);
}

#endif /* KVF_BASE_RING_H */
