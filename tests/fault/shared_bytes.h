/* SPDX-License-Identifier: Apache-2.0
 *
 * shared_bytes.h: how much shared memory (memfds: arena, staging, rings) some processes keep alive,
 * each memory object counted once, whoever maps it.
 */
#ifndef KVF_TESTS_SHARED_BYTES_H
#define KVF_TESTS_SHARED_BYTES_H

#include <stdint.h>
#include <sys/types.h>

#define SHARED_OBJECTS_MAX 512

/* What has been seen so far: an object that only a mapping keeps alive has no size that others can
 * ask for, but it had one while its maker had it open. */
struct shared_objects {
    uint32_t n;
    struct {
        uint64_t inode, bytes;
        uint32_t round; /* that has seen it last */
    } list[SHARED_OBJECTS_MAX];
    uint32_t round;
    uint64_t bytes, most_bytes;
};

/* Look at them again, their makers first: what is let go meanwhile then counts, and what is made
 * meanwhile does not, so that the sum is one that there was. Processes that are gone count as none.
 * Returns the sum, and keeps the largest. */
uint64_t shared_bytes_look(struct shared_objects *objects, const pid_t *pids, uint32_t n_pids);

#endif /* KVF_TESTS_SHARED_BYTES_H */
