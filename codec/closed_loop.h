/* SPDX-License-Identifier: Apache-2.0
 *
 * closed_loop.h: layers that are stored as differences to those before (KVF_BLOCK_DELTAS).
 *
 * This header is the format. s is the state, an fp32 number a token and channel, which an encoder
 * and a decoder carry from layer to layer; every operation is one of fp32, rounded to nearest even.
 *
 *   a layer by itself   layers up to base_layer and, with rebase_layers G, each G-th after it: its
 *                       input x is coded as in any block; s = d
 *   a delta             all others: x - s is coded, as fp32 whatever the type of x; s = s + d
 *
 * d is what the codec decodes to in fp32, before the rounding to a type (the x_i of codec_saw.h).
 * A d that is NaN, or 2^64 or more, counts as 0: so escapes, which decode to NaN, leave the state
 * of a delta as it is, and make that of a layer by itself 0. A strip that is stored raw has x, also
 * where the layer were a delta: s = x, with the same exception.
 *
 * A layer decodes to s, rounded once to its type; then vectors that are in the raw area, which has
 * x whatever the layer, are put in their places. The state does not see them.
 *
 * Since the encoder's s is what a decoder has, a layer's error is what the codec has left of its
 * own difference: errors do not add up. A layer is decoded from the last one by itself on; tokens
 * do not depend on each other.
 */
#ifndef KVF_CODEC_CLOSED_LOOP_H
#define KVF_CODEC_CLOSED_LOOP_H

#include "codec/codec_layout.h"

/* The layers of a block at work: state and what is added to it, fp32[tokens][heads * dim]. */
struct kvf_loop {
    const struct kvf_codec_plan *plan;
    float *state;
    float *delta;
    void *layers[1];
    struct kvf_kv_view view; /* of delta */
};

/* Bytes of both arrays for a full chunk; 0: the plan has no deltas. */
size_t kvf_loop_bytes(const struct kvf_codec_plan *plan);

/* arrays: kvf_loop_bytes. loop stays where it is. */
void kvf_loop_init(struct kvf_loop *loop, const struct kvf_codec_plan *plan, void *arrays);

/* The layer from which on layers are decoded for this one's sake: the last one by itself. */
uint32_t kvf_loop_start(const struct kvf_codec_plan *plan, uint32_t layer);

/* The tensor that a plan's is where its elements are fp32. */
struct kvf_codec_tensor kvf_loop_tensor(const struct kvf_codec_tensor *tensor);

/* The work on delta that job is on pages. */
struct kvf_codec_job kvf_loop_job(const struct kvf_loop *loop, const struct kvf_codec_job *job);

/* delta = x of n tokens of the pages; then, of a delta, minus the state. */
void kvf_loop_load(struct kvf_loop *loop, const struct kvf_codec_tensor *tensor,
                   const struct kvf_codec_job *job, uint32_t n_tokens, bool is_delta);

/* The state after delta has been decoded to, or loaded with x. */
void kvf_loop_take(struct kvf_loop *loop, uint32_t n_tokens, bool is_delta);

/* What a layer decodes to, to pages. */
void kvf_loop_store(const struct kvf_loop *loop, const struct kvf_codec_tensor *tensor,
                    const struct kvf_codec_job *job, uint32_t n_tokens);

#endif /* KVF_CODEC_CLOSED_LOOP_H */
