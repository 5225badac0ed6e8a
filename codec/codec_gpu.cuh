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

/* Parts of one tensor of saw. Its escapes have this in the upper half of their meta word. */
constexpr uint32_t saw_escape_scale = 0x7e00; /* KVF_SAW_ESCAPE_SCALE */

static __device__ __forceinline__ uint32_t saw_mean_bytes(const struct kvf_gpu_tensor &tensor,
                                                          uint32_t n_tokens)
{
    bool has_mean = (tensor.flags & KVF_TENSOR_CENTER) != 0 && n_tokens >= center_tokens_min;
    return has_mean ? part_bytes(2u * tensor.n_heads * tensor.dim) : 0;
}

/* What one tensor of one layer takes in a strip, if its codec is of fixed rate. */
static __device__ __forceinline__ uint32_t fixed_part_bytes(const struct kvf_gpu_tensor &tensor,
                                                            uint32_t n_tokens)
{
    if (tensor.codec == KVF_CODEC_SAW) {
        uint32_t n_vectors = tensor.n_rows * n_tokens;
        return saw_mean_bytes(tensor, n_tokens) + part_bytes(4 * n_vectors) +
               part_bytes(n_vectors * tensor.code_bytes);
    }
    return part_bytes(n_tokens * tensor.n_heads * tensor.dim * tensor.element_bytes);
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
