/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_exact_device.cuh: elements, units and chunks of codec exact, between pages, registers and
 * parts. A lane works on units of 8 elements: unit u of a chunk is elements 8 u to 8 u + 7.
 */
#ifndef KVF_CODEC_CODEC_EXACT_DEVICE_CUH
#define KVF_CODEC_CODEC_EXACT_DEVICE_CUH

#include "codec/codec_gpu.cuh"
#include "codec/codec_gpu_scratch.h"

namespace kvf
{

constexpr uint32_t unit_elements = 8;
constexpr uint32_t units_a_lane = KVF_EXACT_CHUNK_ELEMENTS / unit_elements / warp_lanes;
constexpr uint32_t no_index = 1u << 31; /* in a table of indices */

/* 8 elements as they lie in memory. */
template <int element_bytes> struct unit {
    uint32_t word[2 * element_bytes];

    __device__ __forceinline__ uint32_t exponent(int i) const
    {
        return element_bytes == 2 ? word[i / 2] >> (i % 2 * 16 + 7) & 0xff : word[i] >> 23 & 0xff;
    }

    __device__ __forceinline__ uint32_t exponent_times_32(int i) const
    {
        if (element_bytes == 2) {
            return i % 2 != 0 ? (word[i / 2] & 0x7f807f80) >> 18 : (word[i / 2] & 0x7f80) >> 2;
        }
        return (word[i] & 0x7f800000) >> 18;
    }
};

/* One part at work. */
struct work_part {
    const struct kvf_gpu_tensor &tensor;
    const struct kvf_gpu_part &part;
    struct kvf_exact_shape shape;
    pages where;
    divider dim;
    divider chunks_a_row;
    bool is_wide; /* units can be read, or written, 16 bytes at a time */
    bool is_even; /* elements begin on 2 bytes at least */

    __device__ __forceinline__ work_part(const struct kvf_gpu_work &work,
                                         const struct kvf_gpu_part &of)
        : tensor(work.tensors[of.is_v]), part(of),
          shape(kvf_exact_gpu_shape(&work.tensors[of.is_v], of.n_tokens)), where(work, of),
          dim(work.tensors[of.is_v].dim), chunks_a_row(shape.chunks_a_row),
          is_wide(where.align() == 16 && tensor.dim % unit_elements == 0),
          is_even(where.align() % 2 == 0)
    {
    }
};

struct exact_chunk {
    uint32_t number; /* in the part */
    uint32_t row;
    uint32_t token;    /* of the block */
    uint32_t n;        /* elements */
    uint32_t element;  /* its first one in the part */
    uint32_t index_at; /* its indices in codes, from index_offset */

    __device__ __forceinline__ exact_chunk(const work_part &work, uint32_t row_, uint32_t in_row)
        : number(row_ * work.shape.chunks_a_row + in_row), row(row_),
          token(in_row * work.shape.tokens_a_chunk),
          n(kvf_exact_chunk_tokens(&work.shape, work.part.n_tokens, in_row) * work.tensor.dim),
          element((row_ * work.part.n_tokens + token) * work.tensor.dim),
          index_at(row_ * work.shape.row_index_bytes + in_row * work.shape.chunk_bytes)
    {
    }

    __device__ __forceinline__ exact_chunk(const work_part &work, uint32_t number_)
        : exact_chunk(work, work.chunks_a_row.quotient(number_),
                      number_ - work.chunks_a_row.quotient(number_) * work.chunks_a_row.by)
    {
    }
};

static __device__ __forceinline__ uint32_t load_u16(const uint8_t *from, bool is_even)
{
    return is_even ? *reinterpret_cast<const uint16_t *>(from) : from[0] | from[1] << 8;
}

static __device__ __forceinline__ void store_u16(uint8_t *to, uint32_t value, bool is_even)
{
    if (is_even) {
        *reinterpret_cast<uint16_t *>(to) = (uint16_t)value;
    } else {
        to[0] = (uint8_t)value;
        to[1] = (uint8_t)(value >> 8);
    }
}

/* A unit from pages; elements past the chunk's end are 0. */
template <int element_bytes, bool is_wide>
static __device__ __forceinline__ void load_unit(const work_part &work, const exact_chunk &chunk,
                                                 uint32_t number, unit<element_bytes> *to)
{
    uint32_t first = number * unit_elements;
    uint32_t token = work.dim.quotient(first);
    uint32_t within = first - token * work.dim.by;
    if constexpr (is_wide) {
        const uint4 *from = reinterpret_cast<const uint4 *>(
            work.where.vector(chunk.row, chunk.token + token) + within * element_bytes);
#pragma unroll
        for (int i = 0; i < element_bytes / 2; i++) {
            uint4 value = __ldg(from + i);
            to->word[4 * i] = value.x;
            to->word[4 * i + 1] = value.y;
            to->word[4 * i + 2] = value.z;
            to->word[4 * i + 3] = value.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2 * element_bytes; i++) {
            to->word[i] = 0;
        }
#pragma unroll
        for (int i = 0; i < (int)unit_elements; i++) {
            if (first + i < chunk.n) {
                const uint8_t *from = work.where.vector(chunk.row, chunk.token + token) +
                                      within * element_bytes;
#pragma unroll
                for (int half = 0; half < element_bytes / 2; half++) {
                    int at = i * (element_bytes / 2) + half;
                    to->word[at / 2] |= load_u16(from + 2 * half, work.is_even) << at % 2 * 16;
                }
            }
            if (++within == work.dim.by) {
                within = 0;
                token++;
            }
        }
    }
}

/* How many of a unit's elements belong to the chunk, if any does: all, if units are wide. */
template <bool is_wide>
static __device__ __forceinline__ int unit_count(const exact_chunk &chunk, uint32_t number)
{
    return is_wide ? (int)unit_elements : (int)min(chunk.n - number * unit_elements, unit_elements);
}

static __device__ __forceinline__ bool has_unit(const exact_chunk &chunk, uint32_t number)
{
    return number * unit_elements < chunk.n;
}

/* All units of a lane. Wide ones past the end are others' again, so that no load waits for a
 * branch: those of the page table are on their way together, then those of the elements. */
template <int element_bytes, bool is_wide>
static __device__ __forceinline__ void load_chunk(const work_part &work, const exact_chunk &chunk,
                                                  uint32_t lane,
                                                  unit<element_bytes> to[units_a_lane])
{
#pragma unroll
    for (uint32_t k = 0; k < units_a_lane; k++) {
        uint32_t number = k * warp_lanes + lane;
        if constexpr (is_wide) {
            load_unit<element_bytes, true>(work, chunk, min(number, chunk.n / unit_elements - 1),
                                           &to[k]);
        } else if (has_unit(chunk, number)) {
            load_unit<element_bytes, false>(work, chunk, number, &to[k]);
        }
    }
}

/* Words that begin on 4 bytes, pairs of them on 8, or bytes of which only so many are written. */
template <int n_words, bool is_wide>
static __device__ __forceinline__ void store_words(uint8_t *to, const uint32_t *words,
                                                   uint32_t n_bytes)
{
    if constexpr (is_wide) {
        if (n_words == 1) {
            *reinterpret_cast<uint32_t *>(to) = words[0];
        }
#pragma unroll
        for (int i = 0; i + 1 < n_words; i += 2) {
            reinterpret_cast<uint2 *>(to)[i / 2] = make_uint2(words[i], words[i + 1]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4 * n_words; i++) {
            if (i < (int)n_bytes) {
                to[i] = (uint8_t)(words[i / 4] >> i % 4 * 8);
            }
        }
    }
}

template <int n_words, bool is_wide>
static __device__ __forceinline__ void load_words(const uint8_t *from, uint32_t *words,
                                                  uint32_t n_bytes)
{
    if constexpr (is_wide) {
        if (n_words == 1) {
            words[0] = *reinterpret_cast<const uint32_t *>(from);
        }
#pragma unroll
        for (int i = 0; i + 1 < n_words; i += 2) {
            uint2 two = reinterpret_cast<const uint2 *>(from)[i / 2];
            words[i] = two.x;
            words[i + 1] = two.y;
        }
    } else {
#pragma unroll
        for (int i = 0; i < n_words; i++) {
            words[i] = 0;
        }
#pragma unroll
        for (int i = 0; i < 4 * n_words; i++) {
            if (i < (int)n_bytes) {
                words[i / 4] |= (uint32_t)from[i] << i % 4 * 8;
            }
        }
    }
}

} /* namespace kvf */

#endif /* KVF_CODEC_CODEC_EXACT_DEVICE_CUH */
