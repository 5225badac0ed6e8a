/* SPDX-License-Identifier: Apache-2.0
 *
 * closed_loop.c: see closed_loop.h.
 */
#include "codec/closed_loop.h"

#include "codec/codec_fp.h"
#include "codec/convert.h"

enum {
    LIMIT_BITS = (127 + 64) << 23, /* of fp32: 2^64 */
};

/* Elements of a token. */
static size_t width_of(const struct kvf_codec_plan *plan)
{
    return (size_t)plan->geometry.n_heads * plan->geometry.dim_k;
}

static size_t array_bytes(const struct kvf_codec_plan *plan)
{
    size_t bytes = width_of(plan) * plan->geometry.chunk_tokens * sizeof(float);
    return kvf_align_up(bytes, KVF_CODEC_WORKSPACE_ALIGN);
}

size_t kvf_loop_bytes(const struct kvf_codec_plan *plan)
{
    return (plan->block_flags & KVF_BLOCK_DELTAS) != 0 ? 2 * array_bytes(plan) : 0;
}

void kvf_loop_init(struct kvf_loop *loop, const struct kvf_codec_plan *plan, void *arrays)
{
    size_t width = width_of(plan);
    *loop = (struct kvf_loop){.plan = plan, .state = arrays};
    loop->delta = (float *)(void *)((uint8_t *)arrays + array_bytes(plan));
    loop->layers[0] = loop->delta;
    loop->view = (struct kvf_kv_view){
        .struct_bytes = sizeof(loop->view),
        .tokens_a_page = KVF_CHUNK_TOKENS_MAX,
        .k = {.layers = loop->layers,
              .token_stride_bytes = width * sizeof(float),
              .head_stride_bytes = plan->geometry.dim_k * sizeof(float)},
    };
}

uint32_t kvf_loop_start(const struct kvf_codec_plan *plan, uint32_t layer)
{
    while (kvf_plan_is_delta(plan, layer)) {
        layer--;
    }
    return layer;
}

struct kvf_codec_tensor kvf_loop_tensor(const struct kvf_codec_tensor *tensor)
{
    struct kvf_codec_tensor wide = *tensor;
    wide.dtype = KVF_DTYPE_F32;
    wide.element_bytes = sizeof(float);
    return wide;
}

struct kvf_codec_job kvf_loop_job(const struct kvf_loop *loop, const struct kvf_codec_job *job)
{
    struct kvf_codec_job wide = *job;
    wide.view = &loop->view;
    wide.tensor = &loop->view.k;
    wide.base = loop->layers[0];
    wide.next_base = NULL;
    return wide;
}

/* Where the vector of a row begins in an array. */
static size_t index_of(const struct kvf_loop *loop, const struct kvf_codec_tensor *tensor,
                       uint32_t row, uint32_t token)
{
    /* rows of a head follow each other, as its channels do */
    return width_of(loop->plan) * token + (size_t)row * tensor->group;
}

void kvf_loop_load(struct kvf_loop *loop, const struct kvf_codec_tensor *tensor,
                   const struct kvf_codec_job *job, uint32_t n_tokens, bool is_delta)
{
    for (uint32_t token = 0; token < n_tokens; token++) {
        for (uint32_t row = 0; row < tensor->n_rows; row++) {
            size_t at = index_of(loop, tensor, row, token);
            float *delta = loop->delta + at;
            const float *state = loop->state + at;
            kvf_convert_widen(tensor->dtype, kvf_pages_vector(tensor, job, row, token),
                              tensor->group, delta);
            for (uint32_t i = 0; is_delta && i < tensor->group; i++) {
                delta[i] -= state[i];
            }
        }
    }
}

void kvf_loop_take(struct kvf_loop *loop, uint32_t n_tokens, bool is_delta)
{
    size_t n = width_of(loop->plan) * n_tokens;
    float *state = loop->state;
    const float *delta = loop->delta;
    if (!is_delta) {
        memset(state, 0, n * sizeof(*state));
    }
    for (size_t i = 0; i < n; i++) {
        /* as integers, of which compilers make vectors; a NaN is more than the limit */
        int32_t bits = (int32_t)kvf_f32_bits(delta[i]);
        bits = (bits & 0x7fffffff) < LIMIT_BITS ? bits : 0;
        state[i] += kvf_f32_from_bits((uint32_t)bits);
    }
}

void kvf_loop_store(const struct kvf_loop *loop, const struct kvf_codec_tensor *tensor,
                    const struct kvf_codec_job *job, uint32_t n_tokens)
{
    for (uint32_t token = 0; token < n_tokens; token++) {
        for (uint32_t row = 0; row < tensor->n_rows; row++) {
            kvf_convert_narrow(tensor->dtype, loop->state + index_of(loop, tensor, row, token),
                               tensor->group, kvf_pages_vector(tensor, job, row, token));
        }
    }
}
