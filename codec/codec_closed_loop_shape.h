/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_closed_loop_shape.h: what the host side and the kernels of layers that are deltas must
 * agree on. Read by C and by CUDA.
 *
 * A launch is of the same number of consecutive layers of each of its blocks: parts are in the
 * order of blocks, and of their layers. A warp has one vector of a row, all layers of it one after
 * the other; a thread block has eight tokens, whose zeros share bytes. Of X as it is as a rule a
 * warp has eight tokens (codec_closed_loop_tile.cuh).
 */
#ifndef KVF_CODEC_CODEC_CLOSED_LOOP_SHAPE_H
#define KVF_CODEC_CODEC_CLOSED_LOOP_SHAPE_H

#include <stdint.h>

enum kvf_loop_shape {
    LOOP_TILE_TOKENS = 8,
    LOOP_THREADS = 32 * LOOP_TILE_TOKENS,
    LOOP_FAST_GROUP = 128,   /* elements of a vector that stays in registers */
    LOOP_FAST_BLOCKS = 4,    /* of these threads that a multiprocessor is to have room for */
    LOOP_TILE_THREADS = 128, /* of kernels whose warps have a tile */
    LOOP_TILE_BLOCKS = 4,
    LOOP_TILE_OWN_BITS = 4, /* that layers by themselves have there */
};

#endif /* KVF_CODEC_CODEC_CLOSED_LOOP_SHAPE_H */
