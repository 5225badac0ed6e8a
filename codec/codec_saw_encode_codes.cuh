/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw_encode_codes.cuh: from rotated vectors to the codes of codec_saw_encode.cuh, and the
 * search for a clip ratio. Numbers in comments are steps of codec_saw.h.
 */
#ifndef KVF_CODEC_CODEC_SAW_ENCODE_CODES_CUH
#define KVF_CODEC_CODEC_SAW_ENCODE_CODES_CUH

#include "codec/codec_saw_device.cuh"
#include "codec/codec_saw_shape.h"

namespace kvf
{

/* A test and a bench have encoders that are wrong on purpose: all but the first two. */
enum class encode_variant {
    normal,
    search,      /* of three clip ratios the best is taken */
    search_last, /* the same, but of two that are alike the smaller one */
    swapped,     /* two stages of the rotation change places */
    unrotated,
    one_mean_barrier, /* not two by turns */
};

static constexpr __device__ bool has_search(encode_variant variant)
{
    return variant == encode_variant::search || variant == encode_variant::search_last;
}

/* -------------------------------------------------------------------------------------------------
 * (7) Codes
 */

/* The lane's element at an index of the stored order. */
template <int dim>
static __device__ __forceinline__ float &element_at(float y[dim / 32][2][4], uint32_t index)
{
    constexpr uint32_t products = dim / 16;
    uint32_t product = index % products;
    return y[product / 2][index / products % 2][product % 2 * 2 + index / (2 * products)];
}

/* A code, not yet clamped: sign and magnitude if it is negative. The product is a subnormal number,
 * whose bits are an integer; so the machine rounds the exact product to one, once. */
struct quantizer {
    float offset;
    float factor;

    __device__ __forceinline__ quantizer(const saw_scale &scale)
        : offset(scale.offset * -0x1p-43f), factor(scale.factor * 0x1p-106f)
    {
    }

    __device__ __forceinline__ int32_t code(float y) const
    {
        return __float_as_int(of(y));
    }

    /* So many times the code, a power of two: what clamps it to more bits then clamps the code to
     * fewer. */
    __device__ __forceinline__ int32_t code_times(float y, float times) const
    {
        return __float_as_int(of(y) * times);
    }

  private:
    __device__ __forceinline__ float of(float y) const
    {
        return __fmul_rn(__fmaf_rn(y, 0x1p-43f, offset), factor);
    }
};

/* n words to addresses that are a multiple of their size, if they are at most 16 bytes. */
template <uint32_t n>
static __device__ __forceinline__ void store_words(uint8_t *to, const uint32_t *words)
{
    if constexpr (n % 4 == 0) {
#pragma unroll
        for (uint32_t w = 0; w < n; w += 4) {
            store_global(to + w * 4, words[w], words[w + 1], words[w + 2], words[w + 3]);
        }
    } else if constexpr (n == 2) {
        store_global(to, words[0], words[1]);
    } else {
        static_assert(n == 1, "of a power of two");
        store_global(to, words[0]);
    }
}

/* The lane's n / 4 codes, in stored order, where there is one plane, of 2 or 4 bits. */
template <int dim, uint32_t bits>
static __device__ __forceinline__ void store_plane(uint8_t *to, float y[dim / 32][2][4],
                                                   const quantizer &by, uint32_t t, bool is_there)
{
    constexpr uint32_t a_word = 32 / bits;
    constexpr uint32_t n_words = dim / 4 / a_word;
    uint32_t words[n_words];
#pragma unroll
    for (uint32_t w = 0; w < n_words; w++) {
        words[w] = 0;
#pragma unroll
        for (uint32_t k = a_word; k > 0; k -= 2) {
            int32_t second = by.code(element_at<dim>(y, w * a_word + k - 1));
            int32_t first = by.code(element_at<dim>(y, w * a_word + k - 2));
            words[w] = bits == 2 ? pack_twos(second, first, words[w])
                                 : pack_nibbles(second, first, words[w]);
        }
    }
    if (is_there) {
        store_words<n_words>(to + t * (dim / 32 * bits), words);
    }
}

template <int dim>
static __device__ __forceinline__ void store_bytes(uint8_t *to, float y[dim / 32][2][4],
                                                   const quantizer &by, uint32_t t)
{
    to += t * (dim / 4);
#pragma unroll
    for (uint32_t w = 0; w < dim / 16; w += 4) {
        uint32_t word[4];
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            uint32_t first = (w + k) * 4;
            word[k] = pack_bytes(by.code(element_at<dim>(y, first + 3)),
                                 by.code(element_at<dim>(y, first + 2)), 0);
            word[k] = pack_bytes(by.code(element_at<dim>(y, first + 1)),
                                 by.code(element_at<dim>(y, first)), word[k]);
        }
        store_global(to + w * 4, word[0], word[1], word[2], word[3]);
    }
}

/* Eight pairs of bits, one a nibble, of either word: those of the first in the lower half. */
static __device__ __forceinline__ uint32_t squeeze_pairs(uint32_t first, uint32_t second)
{
    uint32_t pairs = first | second << 2;
    uint32_t moved = (pairs ^ pairs >> 2) & 0x0c0c0c0c;
    pairs ^= moved ^ moved << 2;
    moved = (pairs ^ pairs >> 4) & 0x00f000f0;
    pairs ^= moved ^ moved << 4;
    return permute_bytes(pairs, 0, 0x3120);
}

/* Codes of 3 bits, as signed nibbles: what is too large becomes 7 and what is negative -8, whose
 * lower three bits are 0. Bits 1 and 2 are those of the first plane, bit 0 that of the second.
 * Nibbles of even and of odd positions are words of their own, so that one operation puts two of
 * them together. */
template <int dim>
static __device__ __forceinline__ void store_threes(uint8_t *to, float y[dim / 32][2][4],
                                                    const quantizer &by, uint32_t t, bool is_there)
{
    constexpr uint32_t n_words = dim / 64; /* of the first plane */
    uint32_t words[n_words];
    uint32_t pairs[n_words];
#pragma unroll
    for (uint32_t w = 0; w < n_words; w++) {
        uint32_t even = 0;
        uint32_t odd = 0;
#pragma unroll
        for (uint32_t k = 16; k > 0; k -= 4) {
            uint32_t index = w * 16 + k;
            even = pack_signed_nibbles(by.code(element_at<dim>(y, index - 2)),
                                       by.code(element_at<dim>(y, index - 4)), even);
            odd = pack_signed_nibbles(by.code(element_at<dim>(y, index - 1)),
                                      by.code(element_at<dim>(y, index - 3)), odd);
        }
        words[w] = (even >> 1 & 0x33333333) | (odd << 1 & 0xcccccccc);
        pairs[w] = (even & 0x11111111) | (odd << 1 & 0x22222222);
    }
    if (!is_there) {
        return;
    }
    uint8_t *high = to + t * (dim / 16);
    uint8_t *low = to + dim / 4 + t * (dim / 32);
    store_words<n_words>(high, words);
    if constexpr (n_words == 1) {
        *reinterpret_cast<uint16_t *>(low) = (uint16_t)squeeze_pairs(pairs[0], 0);
    } else if constexpr (n_words == 2) {
        store_global(low, squeeze_pairs(pairs[0], pairs[1]));
    } else {
        store_global(low, squeeze_pairs(pairs[0], pairs[1]), squeeze_pairs(pairs[2], pairs[3]));
    }
}

/* The lowest bits of 32 codes as a word. Byte k of even[p] and odd[p] has codes 8 p + 2 k and
 * 8 p + 2 k + 1, their lowest bit as bit 3. */
static __device__ __forceinline__ uint32_t squeeze_ones(const uint32_t even[4],
                                                        const uint32_t odd[4])
{
    /* pair p of byte k, to become pair k of byte p */
    uint32_t pairs = (even[0] >> 3 & 0x01010101) | (odd[0] >> 2 & 0x02020202) |
                     (even[1] >> 1 & 0x04040404) | (odd[1] & 0x08080808) |
                     (even[2] << 1 & 0x10101010) | (odd[2] << 2 & 0x20202020) |
                     (even[3] << 3 & 0x40404040) | (odd[3] << 4 & 0x80808080);
    uint32_t moved = (pairs ^ pairs >> 6) & 0x00cc00cc;
    pairs ^= moved ^ moved << 6;
    moved = (pairs ^ pairs >> 12) & 0x0000f0f0;
    return pairs ^ moved ^ moved << 12;
}

/* The lower two bits of 16 codes as a word; bits 2 and 3 have them. */
static __device__ __forceinline__ uint32_t squeeze_twos(const uint32_t even[2],
                                                        const uint32_t odd[2])
{
    /* nibble p of byte k, to become nibble k of half p */
    uint32_t nibbles = (even[0] >> 2 & 0x03030303) | (odd[0] & 0x0c0c0c0c) |
                       (even[1] << 2 & 0x30303030) | (odd[1] << 4 & 0xc0c0c0c0);
    uint32_t moved = (nibbles ^ nibbles >> 4) & 0x00f000f0;
    nibbles ^= moved ^ moved << 4;
    return permute_bytes(nibbles, 0, 0x3120);
}

/* Codes of 5 or 6 bits: a plane of 4 bits and one of what is left. Codes are the upper bits of
 * bytes, where what is clamped is all ones; even and odd positions have words of their own. */
template <int dim, int bits>
static __device__ __forceinline__ void store_wide(uint8_t *to, float y[dim / 32][2][4],
                                                  const quantizer &by, uint32_t t, bool is_there)
{
    constexpr uint32_t n_words = dim / 32; /* of the first plane */
    constexpr float times = (float)(1 << (8 - bits));
    uint32_t even[n_words < 4 ? 4 : n_words] = {0};
    uint32_t odd[n_words < 4 ? 4 : n_words] = {0};
    uint32_t words[n_words];
#pragma unroll
    for (uint32_t w = 0; w < n_words; w++) {
#pragma unroll
        for (uint32_t k = 8; k > 0; k -= 4) {
            uint32_t index = w * 8 + k;
            even[w] = pack_bytes(by.code_times(element_at<dim>(y, index - 2), times),
                                 by.code_times(element_at<dim>(y, index - 4), times), even[w]);
            odd[w] = pack_bytes(by.code_times(element_at<dim>(y, index - 1), times),
                                by.code_times(element_at<dim>(y, index - 3), times), odd[w]);
        }
        words[w] = (even[w] >> 4 & 0x0f0f0f0f) | (odd[w] & 0xf0f0f0f0);
    }
    if (!is_there) {
        return;
    }
    store_words<n_words>(to + t * (dim / 8), words);
    uint8_t *low = to + dim / 2 + t * (dim / 32 * (bits - 4));
    uint32_t low_words[n_words / 2];
    if constexpr (bits == 6) {
#pragma unroll
        for (uint32_t w = 0; w < n_words / 2; w++) {
            low_words[w] = squeeze_twos(&even[2 * w], &odd[2 * w]);
        }
        store_words<n_words / 2>(low, low_words);
    } else if constexpr (dim == 64) {
        *reinterpret_cast<uint16_t *>(low) = (uint16_t)squeeze_ones(even, odd);
    } else {
#pragma unroll
        for (uint32_t w = 0; w < n_words / 4; w++) {
            low_words[w] = squeeze_ones(&even[4 * w], &odd[4 * w]);
        }
        store_words<n_words / 4>(low, low_words);
    }
}

/* The lane's codes of a vector whose codes begin at `to`. */
template <int dim, int bits>
static __device__ __forceinline__ void store_codes(uint8_t *to, float y[dim / 32][2][4],
                                                   const quantizer &by, uint32_t t, bool is_there)
{
    if constexpr (bits == 8) {
        if (is_there) {
            store_bytes<dim>(to, y, by, t);
        }
    } else if constexpr (bits == 6 || bits == 5) {
        store_wide<dim, bits>(to, y, by, t, is_there);
    } else if constexpr (bits == 3) {
        store_threes<dim>(to, y, by, t, is_there);
    } else {
        store_plane<dim, bits>(to, y, by, t, is_there);
    }
}

/* -------------------------------------------------------------------------------------------------
 * (S) Search
 */

/* By all threads: what the second and the third ratio cost at each i, less what the first one does,
 * in the lower and the upper half of a word, as signed numbers that are added. With the ratios of
 * codec_saw.h sums over a vector of 128 have room in 16 bits. */
static __device__ __forceinline__ void fill_cost_table(const struct kvf_gpu_tensor &tensor,
                                                       uint32_t *table)
{
    const float *ratios = tensor.clip_ratios;
    const saw_costs with[SAW_SEARCH_RATIOS] = {{ratios[0], ratios[0], tensor.bits},
                                               {ratios[0], ratios[1], tensor.bits},
                                               {ratios[0], ratios[2], tensor.bits}};
    for (uint32_t i = threadIdx.x; i < SAW_SEARCH_STEPS; i += SAW_ENCODE_THREADS) {
        uint32_t first = with[0].of((float)i);
        table[i] = with[1].of((float)i) - first + ((with[2].of((float)i) - first) << 16);
    }
}

/* The best of the scales that the first three of a vector's lanes have. An i is found as codes are,
 * see above. */
template <int dim, encode_variant variant>
static __device__ __forceinline__ saw_scale choose_best(float y[dim / 32][2][4],
                                                        const saw_scale &scale, float min,
                                                        float max, const uint32_t *table)
{
    constexpr uint32_t escape_meta = (uint32_t)KVF_SAW_ESCAPE_SCALE << 16;
    uint32_t lane = threadIdx.x % warp_lanes / 4 * 4;
    float factor = __shfl_sync(all_lanes, scale.factor, lane) * 0x1p-102f; /* 16 2^-106 */
    float middle = 0.5f * (min + max) * -0x1p-43f;
    uint32_t sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < dim / 4; i++) {
        float distance = fabsf(__fmaf_rn(element_at<dim>(y, i), 0x1p-43f, middle));
        sum += table[__float_as_uint(__fmul_rn(distance, factor))];
    }
    sum += __shfl_xor_sync(all_lanes, sum, 1);
    sum += __shfl_xor_sync(all_lanes, sum, 2);
    int32_t costs[SAW_SEARCH_RATIOS];
    costs[0] = 0;
    costs[1] = (int16_t)sum;
    costs[2] = (int32_t)(sum - (uint32_t)costs[1]) >> 16;
    uint32_t coded = __ballot_sync(all_lanes, scale.meta != escape_meta) >> lane;
    int32_t least = 0x7fffffff;
    uint32_t best = 0;
#pragma unroll
    for (uint32_t k = 0; k < SAW_SEARCH_RATIOS; k++) {
        bool is_less = costs[k] < least ||
                       (variant == encode_variant::search_last && costs[k] == least);
        bool is_better = (coded >> k & 1) != 0 && is_less;
        least = is_better ? costs[k] : least;
        best = is_better ? k : best;
    }
    lane += best;
    return {__shfl_sync(all_lanes, scale.meta, lane), __shfl_sync(all_lanes, scale.offset, lane),
            __shfl_sync(all_lanes, scale.factor, lane)};
}

} /* namespace kvf */

#endif /* KVF_CODEC_CODEC_SAW_ENCODE_CODES_CUH */
