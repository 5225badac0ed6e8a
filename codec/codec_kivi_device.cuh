/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_kivi_device.cuh: what the kernels of kivi share: where a tile lies, what a group is coded
 * with, marks of escapes. Numbers in comments are steps of codec_kivi.h.
 */
#ifndef KVF_CODEC_CODEC_KIVI_DEVICE_CUH
#define KVF_CODEC_CODEC_KIVI_DEVICE_CUH

#include "codec/codec_elements.cuh"
#include "codec/codec_kivi.h"
#include "codec/codec_kivi_shape.h"

namespace kvf::kivi
{

constexpr float round_magic = 12582912.0f; /* 1.5 2^23: adding it rounds to an integer */
constexpr uint32_t n_warps = KIVI_THREADS / warp_lanes;
constexpr uint32_t empty_meta = (uint32_t)KVF_KIVI_EMPTY_SCALE << 16;

static __device__ __forceinline__ bool is_by_channel(const struct kvf_gpu_tensor &tensor)
{
    return tensor.group_axis == KVF_AXIS_CHANNEL;
}

/* Words of meta of one row. */
static __device__ __forceinline__ uint32_t row_words(const struct kvf_gpu_tensor &tensor,
                                                     uint32_t n_tokens)
{
    uint32_t group_size = tensor.group_size;
    return is_by_channel(tensor) ? ceil_div(n_tokens, group_size) * tensor.dim
                                 : n_tokens * ceil_div(tensor.dim, group_size);
}

/* A thread block's row, and the part that it is of. */
struct tile_row {
    uint32_t number; /* of the part in the list */
    uint32_t row;
    uint32_t tile;    /* the thread block's first one */
    uint32_t n_tiles; /* thread blocks of the row */
    struct kvf_gpu_part part;

    __device__ __forceinline__ tile_row(const struct kvf_gpu_work &work, uint32_t tensors)
    {
        uint32_t n_rows = kivi_rows_max(&work, tensors);
        n_tiles = kivi_tiles(&work);
        uint32_t index = blockIdx.x / n_tiles;
        tile = blockIdx.x - index * n_tiles;
        number = part_number(work, index / n_rows);
        row = index % n_rows;
        part = parts_of(work)[number];
    }

    __device__ __forceinline__ bool is_there(const struct kvf_gpu_work &work,
                                             uint32_t tensors) const
    {
        return (tensors >> part.is_v & 1) != 0 && row < work.tensors[part.is_v].n_rows;
    }
};

/* Where the row lies, in its part and in the pages. */
struct row_place {
    uint32_t *meta;
    uint8_t *codes;
    row_pages pages;

    __device__ __forceinline__ row_place(const struct kvf_gpu_work &work, const tile_row &at)
        : pages(work, at.part, work.tensors[at.part.is_v], at.row)
    {
        const struct kvf_gpu_tensor &tensor = work.tensors[at.part.is_v];
        uint32_t words = row_words(tensor, at.part.n_tokens);
        uint8_t *stored = at_address<uint8_t>(at.part.stored);
        meta = reinterpret_cast<uint32_t *>(stored) + at.row * words;
        codes = stored + part_bytes(tensor.n_rows * words * KVF_KIVI_META_BYTES) +
                at.row * at.part.n_tokens * tensor.code_bytes;
    }
};

/* By the thread block that has a part's first tokens: what its parts do not fill; and is it worth
 * it? */
static __device__ __forceinline__ void finish_part(const struct kvf_gpu_work &work,
                                                   const tile_row &at)
{
    const struct kvf_gpu_tensor &tensor = work.tensors[at.part.is_v];
    uint32_t n_vectors = tensor.n_rows * at.part.n_tokens;
    uint32_t meta_bytes = tensor.n_rows * row_words(tensor, at.part.n_tokens) * KVF_KIVI_META_BYTES;
    uint32_t code_bytes = n_vectors * tensor.code_bytes;
    uint8_t *stored = at_address<uint8_t>(at.part.stored);
    uint8_t *codes = stored + part_bytes(meta_bytes);
    zero_bytes(stored + meta_bytes, part_bytes(meta_bytes) - meta_bytes, threadIdx.x, KIVI_THREADS);
    zero_bytes(codes + code_bytes, part_bytes(code_bytes) - code_bytes, threadIdx.x, KIVI_THREADS);
    uint32_t raw_bytes = part_bytes(n_vectors * tensor.dim * tensor.element_bytes);
    if (threadIdx.x == 0 && part_bytes(meta_bytes) + part_bytes(code_bytes) >= raw_bytes) {
        atomicOr(&results_of(work)[at.part.block].flags, (uint32_t)KVF_GPU_REDO);
    }
}

/* Which of a row's tokens from `first` on are escapes: n_bits of them, 16 or 32, to the row's marks
 * (codec_gpu_scratch.h), by one lane. Words are written whole; is there anything to mark in this
 * one? */
static __device__ __forceinline__ void
mark_escapes(const struct kvf_gpu_work &work, const tile_row &at, uint32_t first, uint32_t escapes)
{
    uint32_t n_tokens = at.part.n_tokens;
    if (first / 32 * 32 >= n_tokens) {
        return;
    }
    uint16_t *halves = reinterpret_cast<uint16_t *>(escape_words_of(work, at.number) +
                                                    at.row * ceil_div(n_tokens, 32));
    halves[first / 16] = (uint16_t)escapes;
    if (escapes != 0) {
        atomicAdd(&results_of(work)[at.part.block].n_escapes, (unsigned)__popc(escapes));
    }
}

/* (1) Of a vector that is no sink, by the bits of its largest magnitude as fp32. */
static __device__ __forceinline__ bool is_escape_peak(uint32_t peak)
{
    return peak != 0 && (peak < __float_as_uint(KVF_KIVI_PEAK_MIN) ||
                         peak > __float_as_uint(KVF_KIVI_MAGNITUDE_MAX));
}

/* What a group is coded with. */
struct group_scale {
    uint32_t meta;
    float lo;
    float factor; /* 1 / scale, or 0 */
};

/* (3) A group without elements has min above max. */
static __device__ __forceinline__ group_scale choose_scale(float min, float max, float levels,
                                                           float levels_inverse)
{
    bool is_empty = min > max;
    uint32_t lo = half_bits_down(min + 0.0f);
    uint32_t hi = half_bits_up(max + 0.0f);
    float lo_value = f32_of_half_bits(lo);
    uint32_t scale = smallest_scale_bits(f32_of_half_bits(hi) - lo_value, levels, levels_inverse);
    float factor = reciprocal_of_half(f32_of_half_bits(scale));
    group_scale chosen;
    chosen.meta = is_empty ? empty_meta : lo | scale << 16;
    chosen.lo = is_empty ? 0.0f : lo_value;
    chosen.factor = is_empty || scale == 0 ? 0.0f : factor;
    return chosen;
}

/* (4) The code of x, as bits of round_magic and it. lo and scale hold all of a group, so that
 * there is nothing to clamp. */
static __device__ __forceinline__ uint32_t code_bits(float x, float lo, float factor)
{
    return __float_as_uint(__fmaf_rn(x - lo, factor, round_magic));
}

} /* namespace kvf::kivi */

#endif /* KVF_CODEC_CODEC_KIVI_DEVICE_CUH */
