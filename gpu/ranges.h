/* SPDX-License-Identifier: Apache-2.0
 *
 * ranges.h: ranges of a buffer, taken in order and given back in the same order.
 *
 *   [ free |  taken ... taken | free ]        a range never wraps: what is left at the end of the
 *           ^ oldest           ^ next         buffer is taken together with the range behind it
 */
#ifndef KVF_GPU_RANGES_H
#define KVF_GPU_RANGES_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

struct kvf_gpu_ring {
    uint64_t bytes;
    uint64_t next;
    uint64_t used;
};

/* Take a range. *taken_out is what to give back for it. KVF_OK; KVF_ERR_BUSY: not now;
 * KVF_ERR_TOO_LARGE: never. */
static inline int kvf_gpu_ring_take(struct kvf_gpu_ring *ring, uint64_t bytes, uint64_t *offset_out,
                                    uint64_t *taken_out)
{
    uint64_t skipped = 0;

    if (bytes > ring->bytes) {
        return KVF_ERR_TOO_LARGE;
    }
    if (ring->used == 0) {
        ring->next = 0;
    }
    if (bytes > ring->bytes - ring->next) {
        skipped = ring->bytes - ring->next;
    }
    if (skipped + bytes > ring->bytes - ring->used) {
        return KVF_ERR_BUSY;
    }
    *offset_out = skipped != 0 ? 0 : ring->next;
    *taken_out = skipped + bytes;
    ring->next = *offset_out + bytes;
    ring->used += *taken_out;
    return KVF_OK;
}

/* Give the oldest range back. */
static inline void kvf_gpu_ring_give(struct kvf_gpu_ring *ring, uint64_t taken)
{
    ring->used -= taken;
}

/* Undo the last take. */
static inline void kvf_gpu_ring_undo(struct kvf_gpu_ring *ring, uint64_t bytes, uint64_t taken)
{
    ring->used -= taken;
    ring->next = taken != bytes ? ring->bytes - (taken - bytes) : ring->next - bytes;
}

#endif /* KVF_GPU_RANGES_H */
