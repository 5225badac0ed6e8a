/* SPDX-License-Identifier: Apache-2.0
 *
 * kill_model.h: what the kill loop knows about the daemon's store from outside: the blocks that it
 * put, in order, whose durable completion it has seen, and what may be missing after a kill.
 *
 * The store is a log of segments, first in, first out. Its legal losses:
 *
 *   rule 1  A logged block is there as long as fewer segments have been opened since it was written
 *           than the store has, less SPARE. From outside the number is bounded from above: in each
 *           life of the daemon the bytes put, a third more for records kept at reuse (a quarter of
 *           a segment at most), and two segments that the kill left open.
 *   rule 2  Whatever is missing was reclaimed from the old end. So if a block is missing, every
 *           block that is older by more than two segments is missing, too, but for those that were
 *           read in a life in which they could have been reclaimed: these may have been kept.
 *
 * Rule 1 cannot excuse a young block, rule 2 cannot excuse a hole.
 */
#ifndef KVF_TESTS_FAULT_KILL_MODEL_H
#define KVF_TESTS_FAULT_KILL_MODEL_H

#include <stdbool.h>
#include <stdint.h>

struct kill_block {
    uint64_t number;
    uint32_t payload_bytes;
    bool is_logged; /* its durable completion has been seen */
    bool is_here;   /* by the last check */
    bool may_have_moved;
    uint32_t hit_life;  /* life of the daemon in which it was read last, 0: none */
    double opened;      /* upper bound of segments opened when it was put */
    uint64_t end_bytes; /* record bytes put up to it */
};

struct kill_model {
    uint64_t store_bytes;
    uint64_t segment_bytes;
    uint32_t n_segments;
    struct kill_block *blocks; /* a ring would forget: all of them, oldest first */
    uint32_t n_blocks;
    uint32_t blocks_size;
    uint32_t life;
    double opened;       /* upper bound */
    uint64_t put_bytes;  /* records, padded */
    uint64_t life_bytes; /* of these in this life */
    uint64_t n_logged;
};

void kill_model_init(struct kill_model *model, uint64_t store_bytes, uint64_t segment_bytes);
void kill_model_fini(struct kill_model *model);

/* A block is about to be put; returns its index. */
uint32_t kill_model_put(struct kill_model *model, uint32_t payload_bytes);

/* Its durable completion has come. */
void kill_model_log(struct kill_model *model, uint32_t index);

/* The daemon has died. */
void kill_model_life_ends(struct kill_model *model);

/* Must this block be there (rule 1)? */
bool kill_model_is_due(const struct kill_model *model, const struct kill_block *block);

/* The oldest block that can be there at all; what is before it needs no look. */
uint32_t kill_model_first(const struct kill_model *model);

/* After is_here of all blocks from kill_model_first on is known: how many break rule 1, and how
 * many rule 2. Each is printed. */
uint32_t kill_model_lost(const struct kill_model *model);
uint32_t kill_model_holes(const struct kill_model *model);

#endif /* KVF_TESTS_FAULT_KILL_MODEL_H */
