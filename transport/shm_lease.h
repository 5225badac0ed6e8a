/* SPDX-License-Identifier: Apache-2.0
 *
 * shm_lease.h: packing of lease ids and lease words (layout and meaning: proto_shm.h).
 *
 *   id    63             16 15        0        word  55            8 7       0
 *        +-----------------+-----------+             +---------------+---------+
 *        |   generation    |   index   |             |  generation   |  state  |
 *        +-----------------+-----------+             +---------------+---------+
 */
#ifndef KVF_TRANSPORT_SHM_LEASE_H
#define KVF_TRANSPORT_SHM_LEASE_H

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>

#include "transport/proto_shm.h"

#define KVF_LEASE_GENERATION_MAX ((UINT64_C(1) << 48) - 1)
#define KVF_LEASE_INDEX_MAX      ((UINT32_C(1) << KVF_LEASE_INDEX_BITS) - 1)

static inline uint64_t kvf_lease_id_pack(uint64_t generation, uint32_t index)
{
    assert(generation >= 1 && generation <= KVF_LEASE_GENERATION_MAX);
    assert(index <= KVF_LEASE_INDEX_MAX);
    return generation << KVF_LEASE_INDEX_BITS | index;
}

static inline uint32_t kvf_lease_id_index(uint64_t id)
{
    return (uint32_t)(id & KVF_LEASE_INDEX_MAX);
}

static inline uint64_t kvf_lease_id_generation(uint64_t id)
{
    return id >> KVF_LEASE_INDEX_BITS;
}

static inline uint64_t kvf_lease_word_pack(uint64_t generation, enum kvf_shm_lease_state state)
{
    assert(generation <= KVF_LEASE_GENERATION_MAX);
    return generation << 8 | (uint64_t)state;
}

static inline uint64_t kvf_lease_word_generation(uint64_t word)
{
    return word >> 8;
}

static inline uint32_t kvf_lease_word_state(uint64_t word)
{
    return (uint32_t)(word & 0xff);
}

/* ThreadSanitizer does not know fences, and compilers refuse them under it; the instruction itself
 * does the same without being looked at. */
#if defined(__has_feature)
#define KVF_LEASE_TSAN __has_feature(thread_sanitizer)
#elif defined(__SANITIZE_THREAD__)
#define KVF_LEASE_TSAN 1
#else
#define KVF_LEASE_TSAN 0
#endif

static inline void kvf_lease_fence(int order)
{
#if !KVF_LEASE_TSAN
    __atomic_thread_fence(order);
#elif defined(__x86_64__)
    (void)order;
    __asm__ volatile("mfence" ::: "memory");
#else
    (void)order;
    __asm__ volatile("dmb ish" ::: "memory");
#endif
}

/* Daemon: publish a word. Release order: who reads it sees what the daemon did before. After LOST
 * the daemon may do anything to the block's memory, and none of that may be seen by a client that
 * still reads (generation, LIVE). A store alone does not keep later stores behind it, the full
 * fence does. Nothing of the kind follows LIVE and FREE: a client learns of a lease from its
 * completion, and has given up one that becomes FREE. */
static inline void kvf_lease_word_store(uint64_t *word, uint64_t generation,
                                        enum kvf_shm_lease_state state)
{
    __atomic_store_n(word, kvf_lease_word_pack(generation, state), __ATOMIC_RELEASE);
    if (state == KVF_LEASE_LOST) {
        kvf_lease_fence(__ATOMIC_SEQ_CST);
    }
}

/* Client: are all bytes that this thread has read so far under the lease the block's? The acquire
 * fence keeps the word's load behind the loads of those bytes. */
static inline bool kvf_lease_word_live(const uint64_t *word, uint64_t generation)
{
    kvf_lease_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(word, __ATOMIC_RELAXED) ==
           kvf_lease_word_pack(generation, KVF_LEASE_LIVE);
}

#endif /* KVF_TRANSPORT_SHM_LEASE_H */
