/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_gpu.cuh: what all kernels of the codecs need: where vectors lie in pages, sizes of parts,
 * copies of any alignment.
 */
#ifndef KVF_CODEC_CODEC_GPU_CUH
#define KVF_CODEC_CODEC_GPU_CUH

#ifndef __cplusplus
#error "for CUDA only"
#endif

#ifndef _Static_assert
#define _Static_assert static_assert /* the headers below are C */
#endif
#include "codec/block_format.h"
#include "codec/codec_gpu.h"
#include "codec/codec_gpu_scratch.h"

namespace kvf
{

constexpr uint32_t warp_lanes = 32;
constexpr uint32_t all_lanes = 0xffffffffu;
constexpr uint32_t center_tokens_min = 128; /* KVF_CODEC_CENTER_TOKENS_MIN */

static __device__ __forceinline__ uint32_t align_up(uint32_t n, uint32_t align)
{
    return (n + align - 1) / align * align;
}

static __device__ __forceinline__ uint32_t ceil_div(uint32_t n, uint32_t by)
{
    return (n + by - 1) / by;
}

static __device__ __forceinline__ uint32_t part_bytes(uint32_t bytes)
{
    return align_up(bytes, KVF_BLOCK_ALIGN_BYTES);
}

/* What lies at an address of the device, or of the host as the device sees it. */
template <typename T> static __device__ __forceinline__ T *at_address(uint64_t address)
{
    return reinterpret_cast<T *>(address);
}

static __device__ __forceinline__ struct kvf_gpu_part *parts_of(const struct kvf_gpu_work &work)
{
    return at_address<struct kvf_gpu_part>(work.parts);
}

/* The number in the list of the i-th part that a launch of an encode is of. */
static __device__ __forceinline__ uint32_t part_number(const struct kvf_gpu_work &work, uint32_t i)
{
    return work.numbers != 0 ? at_address<const uint32_t>(work.numbers)[i] : i;
}

static __device__ __forceinline__ struct kvf_gpu_part part_of(const struct kvf_gpu_work &work,
                                                              uint32_t i)
{
    return parts_of(work)[part_number(work, i)];
}

static __device__ __forceinline__ struct kvf_gpu_result *results_of(const struct kvf_gpu_work &work)
{
    return at_address<struct kvf_gpu_result>(work.results);
}

/* Division by a number that stays, without a division each time: exact where n * by is below 2^32,
 * and for n up to 2^8 whatever by is. */
struct divider {
    uint32_t by;
    uint32_t factor; /* 2^32 / by, rounded up */

    __device__ __forceinline__ explicit divider(uint32_t by_)
        : by(by_), factor(0xffffffffu / by_ + 1)
    {
    }

    __device__ __forceinline__ uint32_t quotient(uint32_t n) const
    {
        return by == 1 ? n : __umulhi(n, factor);
    }
};

/* Where the vectors of one part lie in the engine's pages; the formula is kvferry.h's. */
struct pages {
    uint8_t *base;
    const uint32_t *page_ids; /* of view token 0 */
    uint64_t page_stride_bytes;
    uint64_t token_stride_bytes;
    uint64_t head_stride_bytes;
    uint32_t tokens_a_page;
    divider by_page;

    __device__ __forceinline__ pages(const struct kvf_gpu_work &work,
                                     const struct kvf_gpu_part &part)
        : base(at_address<uint8_t>(part.base)),
          page_ids(at_address<const uint32_t>(work.page_ids) + part.first_page),
          page_stride_bytes(work.pages[part.is_v].page_stride_bytes),
          token_stride_bytes(work.pages[part.is_v].token_stride_bytes),
          head_stride_bytes(work.pages[part.is_v].head_stride_bytes),
          tokens_a_page(work.tokens_a_page), by_page(work.tokens_a_page)
    {
    }

    __device__ __forceinline__ uint8_t *vector(uint32_t head, uint32_t token) const
    {
        uint32_t page = by_page.quotient(token);
        uint32_t slot = token - page * tokens_a_page;
        return base + page_ids[page] * page_stride_bytes + slot * token_stride_bytes +
               head * head_stride_bytes;
    }

    /* All vectors begin on a multiple of this power of two, at most 16. */
    __device__ __forceinline__ uint32_t align() const
    {
        uint32_t bits = (uint32_t)(reinterpret_cast<uint64_t>(base) | page_stride_bytes |
                                   token_stride_bytes | head_stride_bytes | 16);
        return bits & (0u - bits);
    }
};

/* Escapes of saw have this in the upper half of their meta word, those of tq as their first scale.
 */
constexpr uint32_t escape_scale = 0x7e00; /* KVF_SAW_ESCAPE_SCALE */

/* Encode: where kivi's encoder marks escapes of a part; see codec_gpu_scratch.h. */
static __device__ __forceinline__ uint32_t *escape_words_of(const struct kvf_gpu_work &work,
                                                            uint32_t number)
{
    uint64_t first = kvf_gpu_scratch(work.n_parts_all, work.escape_words, 0).words_offset;
    return at_address<uint32_t>(work.scratch + first) + (uint64_t)number * work.escape_words;
}

/* The mean parts of one tensor of saw, and of tq. */

static __device__ __forceinline__ uint32_t saw_mean_bytes(const struct kvf_gpu_tensor &tensor,
                                                          uint32_t n_tokens)
{
    bool has_mean = (tensor.flags & KVF_TENSOR_CENTER) != 0 && n_tokens >= center_tokens_min;
    return has_mean ? part_bytes(2u * tensor.n_heads * tensor.dim) : 0;
}

/* Bytes of a row's list of channels. */
static __device__ __forceinline__ uint32_t tq_list_bytes(const struct kvf_gpu_tensor &tensor)
{
    return (tensor.flags & KVF_TENSOR_SPLIT) != 0 ? (tensor.group + 7u) / 8 : 0;
}

static __device__ __forceinline__ uint32_t tq_mean_bytes(const struct kvf_gpu_tensor &tensor,
                                                         uint32_t n_tokens)
{
    bool has_mean = (tensor.flags & KVF_TENSOR_CENTER) != 0 && n_tokens >= center_tokens_min;
    uint32_t means = has_mean ? 2u * tensor.n_heads * tensor.dim : 0;
    return part_bytes(means + tensor.n_rows * tq_list_bytes(tensor));
}

template <typename T>
static __device__ __forceinline__ void copy_units(uint8_t *to, const uint8_t *from, uint32_t bytes,
                                                  uint32_t thread, uint32_t n_threads)
{
    for (uint32_t at = thread * sizeof(T); at < bytes; at += n_threads * sizeof(T)) {
        *reinterpret_cast<T *>(to + at) = *reinterpret_cast<const T *>(from + at);
    }
}

/* Copy by n_threads threads, of which the caller is the given one; accesses are as wide as both
 * addresses and the length allow. */
static __device__ __forceinline__ void copy_any(uint8_t *to, const uint8_t *from, uint32_t bytes,
                                                uint32_t thread, uint32_t n_threads)
{
    uint32_t bits = (uint32_t)(reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) |
                               bytes);
    if (bits % 16 == 0) {
        copy_units<uint4>(to, from, bytes, thread, n_threads);
    } else if (bits % 4 == 0) {
        copy_units<uint32_t>(to, from, bytes, thread, n_threads);
    } else if (bits % 2 == 0) {
        copy_units<uint16_t>(to, from, bytes, thread, n_threads);
    } else {
        copy_units<uint8_t>(to, from, bytes, thread, n_threads);
    }
}

static __device__ __forceinline__ void zero_bytes(uint8_t *to, uint32_t bytes, uint32_t thread,
                                                  uint32_t n_threads)
{
    for (uint32_t at = thread; at < bytes; at += n_threads) {
        to[at] = 0;
    }
}

} /* namespace kvf */

#endif /* KVF_CODEC_CODEC_GPU_CUH */
