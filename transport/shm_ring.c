/* SPDX-License-Identifier: Apache-2.0
 *
 * shm_ring.c: both ends of the rings; orders and rules are explained in shm_ring.h.
 */
#include "transport/shm_ring.h"

#include <assert.h>
#include <string.h>

/* Copies between shared and private memory touch each shared word exactly once. Entries are
 * multiples of 8 bytes on 8-byte boundaries. */
static void copy_from_shared(void *private_out, const void *shared, size_t bytes)
{
    const uint64_t *from = shared;
    uint8_t *to = private_out;

    for (size_t i = 0; i < bytes / 8; i++) {
        uint64_t word = __atomic_load_n(&from[i], __ATOMIC_RELAXED);

        memcpy(to + i * 8, &word, 8);
    }
}

static void copy_to_shared(void *shared_out, const void *private_from, size_t bytes)
{
    uint64_t *to = shared_out;
    const uint8_t *from = private_from;

    for (size_t i = 0; i < bytes / 8; i++) {
        uint64_t word;

        memcpy(&word, from + i * 8, 8);
        __atomic_store_n(&to[i], word, __ATOMIC_RELAXED);
    }
}

static uint32_t load_acquire(const struct kvf_shm_line *line)
{
    return __atomic_load_n(&line->value, __ATOMIC_ACQUIRE);
}

static void store_release(struct kvf_shm_line *line, uint32_t value)
{
    __atomic_store_n(&line->value, value, __ATOMIC_RELEASE);
}

/* Cache lines move between two cores while the one that needs them computes. Reads are fetched only
 * below the index that the producer has published, and writes only at slots that it will fill next:
 * anything else would take a line from the side that is using it. */
#define READ_AHEAD  4
#define WRITE_AHEAD 4

static void fetch_to_read(const void *shared)
{
    __builtin_prefetch(shared, 0);
}

static void fetch_to_write(void *shared)
{
#if defined(__x86_64__)
    /* the builtin asks for a copy only where the target's baseline does not know the instruction;
     * every x86-64 decodes it, as a hint */
    __asm__ volatile("prefetchw %0" : : "m"(*(const char *)shared));
#else
    __builtin_prefetch(shared, 1);
#endif
}

/* The producer's half of the sleeping protocol: store the index; does the other side sleep? */
static bool publish(struct kvf_shm_line *index, uint32_t value, struct kvf_shm_line *sleeping)
{
    __atomic_store_n(&index->value, value, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&sleeping->value, __ATOMIC_SEQ_CST) != 1) {
        return false;
    }
    return __atomic_exchange_n(&sleeping->value, 0, __ATOMIC_SEQ_CST) == 1;
}

/* The sleeper's half: say so, then look at the producer's index once more. */
static bool say_sleeping(struct kvf_shm_line *sleeping, const struct kvf_shm_line *tail,
                         uint32_t head)
{
    __atomic_store_n(&sleeping->value, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&tail->value, __ATOMIC_SEQ_CST) == head) {
        return true;
    }
    __atomic_store_n(&sleeping->value, 0, __ATOMIC_RELAXED);
    return false;
}

/* ----------------------------------------------------------------------------------------------
 * The client's end
 */
void kvf_ring_client_init(struct kvf_ring_client *ring, void *base,
                          const struct kvf_shm_header *header)
{
    uint8_t *bytes = base;

    *ring = (struct kvf_ring_client){
        .indices = (void *)(bytes + header->indices_offset),
        .sq = (void *)(bytes + header->sq_offset),
        .cq = (const void *)(bytes + header->cq_offset),
        .keys = (void *)(bytes + header->keys_offset),
        .leases = (const void *)(bytes + header->leases_offset),
        .sq_entries = header->sq_entries,
        .cq_entries = header->cq_entries,
        .key_entries = header->key_entries,
        .lease_entries = header->lease_entries,
    };
}

int kvf_ring_client_room(struct kvf_ring_client *ring, uint32_t n_keys)
{
    assert(n_keys <= ring->key_entries);
    if (ring->sq_tail - ring->sq_head_seen == ring->sq_entries) {
        ring->sq_head_seen = load_acquire(&ring->indices->sq_head);
    }
    if (ring->key_entries - (ring->key_tail - ring->key_head_seen) < n_keys) {
        ring->key_head_seen = load_acquire(&ring->indices->key_head);
    }
    if (ring->sq_tail - ring->sq_head_seen > ring->sq_entries ||
        ring->key_tail - ring->key_head_seen > ring->key_entries) {
        return KVF_ERR_PROTOCOL;
    }
    if (ring->sq_tail - ring->sq_head_seen == ring->sq_entries ||
        ring->key_entries - (ring->key_tail - ring->key_head_seen) < n_keys) {
        return KVF_ERR_BUSY;
    }
    return KVF_OK;
}

void kvf_ring_client_key_put(struct kvf_ring_client *ring, uint32_t i,
                             const struct kvf_shm_key *key)
{
    uint32_t slot = (ring->key_tail + i) & (ring->key_entries - 1);

    copy_to_shared(&ring->keys[slot], key, sizeof(*key));
    slot = (slot + WRITE_AHEAD) & (ring->key_entries - 1);
    fetch_to_write(&ring->keys[slot]);
    fetch_to_write((uint8_t *)&ring->keys[slot] + sizeof(struct kvf_shm_line));
}

void kvf_ring_client_push(struct kvf_ring_client *ring, struct kvf_shm_sqe *sqe)
{
    assert(ring->sq_tail - ring->sq_head_seen < ring->sq_entries);
    sqe->key_first = sqe->n_entries != 0 ? ring->key_tail : 0;
    copy_to_shared(&ring->sq[ring->sq_tail & (ring->sq_entries - 1)], sqe, sizeof(*sqe));
    ring->key_tail += sqe->n_entries;
    ring->sq_tail++;
    fetch_to_write(&ring->sq[(ring->sq_tail + WRITE_AHEAD) & (ring->sq_entries - 1)]);
}

bool kvf_ring_client_publish(struct kvf_ring_client *ring)
{
    return publish(&ring->indices->sq_tail, ring->sq_tail, &ring->indices->daemon_sleeping);
}

bool kvf_ring_client_publish_calmly(struct kvf_ring_client *ring)
{
    store_release(&ring->indices->sq_tail, ring->sq_tail);
    if (__atomic_load_n(&ring->indices->daemon_sleeping.value, __ATOMIC_RELAXED) != 1) {
        return false;
    }
    return __atomic_exchange_n(&ring->indices->daemon_sleeping.value, 0, __ATOMIC_SEQ_CST) == 1;
}

int kvf_ring_client_take(struct kvf_ring_client *ring, struct kvf_shm_cqe *cqe_out)
{
    if (ring->cq_head == ring->cq_tail_seen) {
        uint32_t tail = load_acquire(&ring->indices->cq_tail);

        if (tail == ring->cq_head) {
            return KVF_EMPTY;
        }
        if (tail - ring->cq_head > ring->cq_entries) {
            return KVF_ERR_PROTOCOL;
        }
        ring->cq_tail_seen = tail;
        for (uint32_t i = 1; i < READ_AHEAD && ring->cq_head + i != tail; i++) {
            fetch_to_read(&ring->cq[(ring->cq_head + i) & (ring->cq_entries - 1)]);
        }
    } else if (ring->cq_tail_seen - ring->cq_head > READ_AHEAD) {
        fetch_to_read(&ring->cq[(ring->cq_head + READ_AHEAD) & (ring->cq_entries - 1)]);
    }
    copy_from_shared(cqe_out, &ring->cq[ring->cq_head & (ring->cq_entries - 1)], sizeof(*cqe_out));
    ring->cq_head++;
    store_release(&ring->indices->cq_head, ring->cq_head);
    return KVF_OK;
}

bool kvf_ring_client_ready(const struct kvf_ring_client *ring)
{
    return load_acquire(&ring->indices->cq_tail) != ring->cq_head;
}

bool kvf_ring_client_sleep(struct kvf_ring_client *ring)
{
    return say_sleeping(&ring->indices->client_sleeping, &ring->indices->cq_tail, ring->cq_head);
}

void kvf_ring_client_awake(struct kvf_ring_client *ring)
{
    __atomic_store_n(&ring->indices->client_sleeping.value, 0, __ATOMIC_RELAXED);
}

uint32_t kvf_ring_client_heartbeat(const struct kvf_ring_client *ring)
{
    return __atomic_load_n(&ring->indices->heartbeat.value, __ATOMIC_RELAXED);
}

/* ----------------------------------------------------------------------------------------------
 * The daemon's end
 */
void kvf_ring_daemon_init(struct kvf_ring_daemon *ring, void *base,
                          const struct kvf_shm_header *header)
{
    uint8_t *bytes = base;

    *ring = (struct kvf_ring_daemon){
        .indices = (void *)(bytes + header->indices_offset),
        .sq = (const void *)(bytes + header->sq_offset),
        .cq = (void *)(bytes + header->cq_offset),
        .keys = (const void *)(bytes + header->keys_offset),
        .leases = (void *)(bytes + header->leases_offset),
        .sq_entries = header->sq_entries,
        .cq_entries = header->cq_entries,
        .key_entries = header->key_entries,
        .lease_entries = header->lease_entries,
    };
}

/* Submissions that are known to wait, the keys that the first of them may have, and the word of the
 * lease that the next one may give up. What is read here says where to look and nothing else. */
static void fetch_submissions(const struct kvf_ring_daemon *ring)
{
    uint32_t waiting = ring->sq_tail_seen - ring->sq_head;
    uint32_t n = waiting < READ_AHEAD ? waiting : READ_AHEAD;

    for (uint32_t i = 1; i < n; i++) {
        fetch_to_read(&ring->sq[(ring->sq_head + i) & (ring->sq_entries - 1)]);
    }
    for (uint32_t i = 0; i + 1 < n; i++) {
        const uint8_t *key =
            (const uint8_t *)&ring->keys[(ring->key_head + i) & (ring->key_entries - 1)];

        fetch_to_read(key);
        fetch_to_read(key + sizeof(struct kvf_shm_line));
    }
    if (n > 1) {
        const struct kvf_shm_sqe *next = &ring->sq[(ring->sq_head + 1) & (ring->sq_entries - 1)];

        if (__atomic_load_n(&next->opcode, __ATOMIC_RELAXED) == KVF_OP_RELEASE) {
            uint64_t lease = __atomic_load_n(&next->arg, __ATOMIC_RELAXED);

            fetch_to_write(&ring->leases[lease & (ring->lease_entries - 1)]);
        }
    }
}

int kvf_ring_daemon_peek(struct kvf_ring_daemon *ring, struct kvf_shm_sqe *sqe_out)
{
    if (ring->sq_head == ring->sq_tail_seen) {
        uint32_t tail = load_acquire(&ring->indices->sq_tail);

        if (tail == ring->sq_head) {
            return KVF_EMPTY;
        }
        if (tail - ring->sq_head > ring->sq_entries) {
            return KVF_ERR_PROTOCOL;
        }
        ring->sq_tail_seen = tail;
    }
    fetch_submissions(ring);
    copy_from_shared(sqe_out, &ring->sq[ring->sq_head & (ring->sq_entries - 1)], sizeof(*sqe_out));
    return KVF_OK;
}

void kvf_ring_daemon_keys_copy(const struct kvf_ring_daemon *ring, uint32_t n,
                               struct kvf_shm_key *keys_out)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t slot = (ring->key_head + i) & (ring->key_entries - 1);

        copy_from_shared(&keys_out[i], &ring->keys[slot], sizeof(*keys_out));
    }
}

/* Reserve credits: completions not yet consumed, those of requests in work, and these must fit the
 * ring. A client that submits without credit, or claims to have consumed what was never written,
 * breaks the protocol. */
static int reserve(struct kvf_ring_daemon *ring, uint32_t credits, const char **why_out)
{
    uint32_t waiting = ring->cq_tail - ring->cq_head_seen;

    if (waiting + ring->reserved + credits > ring->cq_entries) {
        ring->cq_head_seen = load_acquire(&ring->indices->cq_head);
        waiting = ring->cq_tail - ring->cq_head_seen;
        if (waiting > ring->cq_entries) {
            *why_out = "completion ring: cq_head is impossible";
            return KVF_ERR_PROTOCOL;
        }
        if (waiting + ring->reserved + credits > ring->cq_entries) {
            *why_out = "submission: without enough credits";
            return KVF_ERR_PROTOCOL;
        }
    }
    ring->reserved += credits;
    return KVF_OK;
}

int kvf_ring_daemon_take(struct kvf_ring_daemon *ring, struct kvf_shm_limits *limits,
                         struct kvf_shm_sqe *sqe_out, struct kvf_shm_key *keys_out,
                         const char **why_out)
{
    int status = kvf_ring_daemon_peek(ring, sqe_out);

    if (status != KVF_OK) {
        *why_out = "submission ring: sq_tail is impossible";
        return status;
    }
    limits->key_entries = ring->key_entries;
    limits->key_head = ring->key_head;
    status = kvf_shm_sqe_check(sqe_out, limits, why_out);
    if (status != KVF_OK) {
        return status;
    }
    kvf_ring_daemon_keys_copy(ring, sqe_out->n_entries, keys_out);
    status = kvf_shm_keys_check(sqe_out, keys_out, limits, why_out);
    if (status != KVF_OK) {
        return status;
    }
    status = reserve(ring, kvf_shm_sqe_credits(sqe_out), why_out);
    if (status != KVF_OK) {
        return status;
    }
    ring->key_head += sqe_out->n_entries;
    ring->sq_head++;
    /* release: the copies above are finished before the client may rewrite the slots */
    store_release(&ring->indices->key_head, ring->key_head);
    store_release(&ring->indices->sq_head, ring->sq_head);
    return KVF_OK;
}

void kvf_ring_daemon_complete(struct kvf_ring_daemon *ring, const struct kvf_shm_cqe *cqe)
{
    assert(ring->reserved > 0);
    copy_to_shared(&ring->cq[ring->cq_tail & (ring->cq_entries - 1)], cqe, sizeof(*cqe));
    ring->cq_tail++;
    fetch_to_write(&ring->cq[(ring->cq_tail + WRITE_AHEAD) & (ring->cq_entries - 1)]);
    ring->reserved--;
}

bool kvf_ring_daemon_publish(struct kvf_ring_daemon *ring)
{
    return publish(&ring->indices->cq_tail, ring->cq_tail, &ring->indices->client_sleeping);
}

bool kvf_ring_daemon_sleep(struct kvf_ring_daemon *ring)
{
    return say_sleeping(&ring->indices->daemon_sleeping, &ring->indices->sq_tail, ring->sq_head);
}

void kvf_ring_daemon_awake(struct kvf_ring_daemon *ring)
{
    __atomic_store_n(&ring->indices->daemon_sleeping.value, 0, __ATOMIC_RELAXED);
}

void kvf_ring_daemon_beat(struct kvf_ring_daemon *ring)
{
    __atomic_fetch_add(&ring->indices->heartbeat.value, 1, __ATOMIC_RELAXED);
}
