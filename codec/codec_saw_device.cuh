/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw_device.cuh: what the kernels of saw share: where the parts of a row lie, the product
 * with H16 on tensor cores, conversions.
 *
 * Work of a lane, fast kernels. A warp has 8 vectors, a vector 4 lanes: lane 4 g + t has the 16
 * bytes at 64 i + 16 t of vector g, for each i. So element e of the vector has its bits above 4 in
 * i, bits 4 and 3 in t, and bits 2, 1, 0 in its place within the 16 bytes. These four words are a
 * fragment A of mma.m16n8k16 as they are: rows 0-7 are the vectors with bit 2 clear, rows 8-15 the
 * vectors with bit 2 set, k is (bit 1, bits 4 3, bit 0). B is H16, 8 columns at a time: columns are
 * (bits 4 3, bit 0) of the result, bit 1 is the number of the product. Results come back to where
 * the elements were, so that a lane has the same elements of a vector before and after.
 *
 * A lane's n / 4 elements are y[i][bit 1][2 bit 2 + bit 0]. In the stored order of codec_saw.h they
 * are consecutive: position t n / 4 + index, index = (bit 0, bit 1, bits above 4, bit 2).
 */
#ifndef KVF_CODEC_CODEC_SAW_DEVICE_CUH
#define KVF_CODEC_CODEC_SAW_DEVICE_CUH

#include "codec/codec_gpu.cuh"
#include "codec/codec_ptx.cuh"
#include "codec/codec_saw.h"

namespace kvf
{

/* kvf_saw_low_bits of codec_saw.h: bits of the second plane. */
static constexpr __device__ uint32_t saw_low_bits(uint32_t bits)
{
    return bits == 6 ? 2 : bits == 5 || bits == 3 ? 1 : 0;
}

/* (2) of codec_saw.h: of each how many tiles the first one is a sample. */
static __device__ __forceinline__ uint32_t saw_tile_step(uint32_t n_tokens)
{
    uint32_t n_tiles = ceil_div(n_tokens, KVF_SAW_TILE_TOKENS);
    return ceil_div(n_tiles, KVF_SAW_PARTIAL_SUMS);
}

/* Is the mean the profile's? Then strips have none. */
static __device__ __forceinline__ bool has_profile_mean(const struct kvf_gpu_tensor &tensor)
{
    return (tensor.flags & KVF_TENSOR_CENTER_PROFILE) != 0;
}

/* Is there a zero of the codes' width in place of lo? Then scales and zeros lie apart. */
static __device__ __forceinline__ bool has_zeros(const struct kvf_gpu_tensor &tensor)
{
    return tensor.zero_kind >= KVF_ZERO_INT;
}

/* Bytes of a vector in the meta part, zeros apart. */
static __device__ __forceinline__ uint32_t saw_meta_bytes(const struct kvf_gpu_tensor &tensor)
{
    return tensor.codec == KVF_CODEC_TQ ? 2u * tensor.n_scales
           : has_zeros(tensor)          ? (uint32_t)KVF_SAW_SCALE_BYTES
                                        : (uint32_t)KVF_SAW_META_BYTES;
}

/* Bytes of the zeros of a row of n tokens. */
static __device__ __forceinline__ uint32_t saw_zero_bytes(const struct kvf_gpu_tensor &tensor,
                                                          uint32_t n)
{
    uint32_t low_bits = saw_low_bits(tensor.bits);
    return has_zeros(tensor) ? (n * (tensor.bits - low_bits) + 7) / 8 + (n * low_bits + 7) / 8 : 0;
}

/* What the meta part uses of its bytes. */
static __device__ __forceinline__ uint32_t saw_meta_used(const struct kvf_gpu_tensor &tensor,
                                                         uint32_t n_tokens)
{
    return tensor.n_rows * (n_tokens * saw_meta_bytes(tensor) + saw_zero_bytes(tensor, n_tokens));
}

/* Parts of one tensor of one layer; those of tq that is not split are alike. */
struct saw_parts {
    uint8_t *mean;       /* stored or the profile's; NULL: not centred */
    uint32_t mean_bytes; /* stored */
    uint32_t *meta;      /* of saw a word a vector, unless there are zeros */
    uint8_t *codes;
    uint32_t n_vectors;

    __device__ __forceinline__ saw_parts(const struct kvf_gpu_tensor &tensor,
                                         const struct kvf_gpu_part &part)
        : saw_parts(tensor, part.stored, part.n_tokens)
    {
        if (has_profile_mean(tensor)) {
            mean = at_address<uint8_t>(part.mean);
        }
    }

    __device__ __forceinline__ saw_parts(const struct kvf_gpu_tensor &tensor, uint64_t stored,
                                         uint32_t n_tokens)
    {
        uint8_t *at = reinterpret_cast<uint8_t *>(stored);
        mean_bytes = saw_mean_bytes(tensor, n_tokens);
        n_vectors = tensor.n_rows * n_tokens;
        mean = mean_bytes != 0 ? at : nullptr;
        meta = reinterpret_cast<uint32_t *>(at + mean_bytes);
        codes = at + mean_bytes + part_bytes(saw_meta_used(tensor, n_tokens));
    }

    /* Where there are zeros. */
    __device__ __forceinline__ uint16_t *scales() const
    {
        return reinterpret_cast<uint16_t *>(meta);
    }

    __device__ __forceinline__ uint8_t *zeros(const struct kvf_gpu_tensor &tensor, uint32_t row,
                                              uint32_t n_tokens) const
    {
        return reinterpret_cast<uint8_t *>(scales() + n_vectors) +
               row * saw_zero_bytes(tensor, n_tokens);
    }
};

/* What the parts do not fill, by n_threads threads, of which the caller is the given one. */
static __device__ __forceinline__ void zero_gaps(const struct kvf_gpu_tensor &tensor,
                                                 const saw_parts &parts, uint32_t thread,
                                                 uint32_t n_threads)
{
    uint32_t mean_bytes = 2u * tensor.n_heads * tensor.dim;
    if (parts.mean_bytes != 0) {
        zero_bytes(parts.mean + mean_bytes, parts.mean_bytes - mean_bytes, thread, n_threads);
    }
    uint32_t meta_bytes = saw_meta_used(tensor, parts.n_vectors / tensor.n_rows);
    uint8_t *meta = reinterpret_cast<uint8_t *>(parts.meta);
    zero_bytes(meta + meta_bytes, part_bytes(meta_bytes) - meta_bytes, thread, n_threads);
    uint32_t code_bytes = parts.n_vectors * tensor.code_bytes;
    zero_bytes(parts.codes + code_bytes, part_bytes(code_bytes) - code_bytes, thread, n_threads);
}

/* The vectors of one row in the engine's pages. */
struct row_pages {
    uint8_t *base;
    const uint32_t *page_ids;
    uint64_t page_stride_bytes;
    uint64_t token_stride_bytes;
    uint32_t tokens_a_page;
    uint32_t page_shift; /* 32: not a power of two */

    row_pages() = default; /* in shared memory */

    __device__ __forceinline__ row_pages(const struct kvf_gpu_work &work,
                                         const struct kvf_gpu_part &part,
                                         const struct kvf_gpu_tensor &tensor, uint32_t row)
    {
        const pages all(work, part);
        uint32_t rows_a_head = tensor.dim / tensor.group;
        uint32_t head = row / rows_a_head;
        base = all.base + head * all.head_stride_bytes +
               (row - head * rows_a_head) * tensor.group * tensor.element_bytes;
        page_ids = all.page_ids;
        page_stride_bytes = all.page_stride_bytes;
        token_stride_bytes = all.token_stride_bytes;
        tokens_a_page = work.tokens_a_page;
        page_shift = __popc(tokens_a_page) == 1 ? __ffs(tokens_a_page) - 1 : 32;
    }

    __device__ __forceinline__ uint32_t page_of(uint32_t token) const
    {
        return page_shift < 32 ? token >> page_shift : token / tokens_a_page;
    }

    __device__ __forceinline__ uint8_t *vector(uint32_t token, uint32_t page_id) const
    {
        uint32_t slot = token - page_of(token) * tokens_a_page;
        return base + page_id * page_stride_bytes + slot * token_stride_bytes;
    }

    __device__ __forceinline__ uint8_t *vector(uint32_t token) const
    {
        return vector(token, page_ids[page_of(token)]);
    }

    /* Do the 8 tokens of a tile lie in one page? */
    __device__ __forceinline__ bool has_whole_tiles() const
    {
        return tokens_a_page % KVF_SAW_TILE_TOKENS == 0;
    }

    /* Are all vectors on 16 bytes? */
    __device__ __forceinline__ bool is_aligned() const
    {
        return ((reinterpret_cast<uint64_t>(base) | page_stride_bytes | token_stride_bytes) & 15) ==
               0;
    }
};

/* The number of the warp, in a way that tells the compiler that it is the same in all lanes. */
static __device__ __forceinline__ uint32_t uniform_warp()
{
    return __shfl_sync(all_lanes, threadIdx.x / warp_lanes, 0);
}

static __device__ __forceinline__ bool is_flipped(const struct kvf_gpu_tensor &tensor, uint32_t row,
                                                  uint32_t element)
{
    uint32_t channel = row % (tensor.dim / tensor.group) * tensor.group + element;
    return (tensor.sign_bits[channel / 8] >> (channel % 8) & 1) != 0;
}

/* -------------------------------------------------------------------------------------------------
 * Instructions
 */
static __device__ __forceinline__ uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector)
{
    return __byte_perm(a, b, selector);
}

/* Magnitudes of pairs of bf16 numbers are compared as those of fp16 are, for which the machine has
 * instructions: the order of their bits is the same up to 0x7c00. What is larger, at least 2^121 as
 * bf16, counts as NaN. */

/* The larger magnitude of each half, 0x7fff if one is NaN. */
static __device__ __forceinline__ uint32_t max_magnitudes(uint32_t a, uint32_t b)
{
    return max_half_magnitudes(a, b);
}

/* Each half all ones where its magnitude is not below the threshold's; zero if either is NaN. */
static __device__ __forceinline__ uint32_t not_below(uint32_t value, uint32_t threshold)
{
    __half2 x = __habs2(*reinterpret_cast<__half2 *>(&value));
    return __hge2_mask(x, *reinterpret_cast<__half2 *>(&threshold));
}

/* A lane's half of H16 without bit 1: two numbers of magnitude one; minus where the index bits of
 * row and column have an odd number in common. For the other column of bit 1 the lower half of the
 * rows is negated. */
static __device__ __forceinline__ uint32_t hadamard_fragment(uint32_t one)
{
    uint32_t lane = threadIdx.x % warp_lanes;
    uint32_t column = lane / 4;
    uint32_t odd = __popc((lane % 4) & (column >> 1)) & 1;
    uint32_t odd_high = odd ^ (column & 1);
    return one | one << 16 | odd << 15 | odd_high << 31;
}

/* Fragments B of both halves of H16's columns. zero is 0, which the compiler must not know: it
 * would make the words from each other again for each product, which wants them side by side. */
struct hadamard_pair {
    uint32_t b[4];

    __device__ __forceinline__ hadamard_pair(uint32_t one, uint32_t zero)
    {
        b[0] = hadamard_fragment(one);
        b[1] = b[0] ^ zero;
        b[2] = b[0] ^ zero << 1;
        b[3] = b[0] ^ (zero << 2 ^ 0x80008000);
    }
};

/* The butterfly of registers u and v. */
static __device__ __forceinline__ void butterfly(float &u, float &v)
{
    float sum = u + v;
    v = u - v;
    u = sum;
}

/* 1 / x, correctly rounded, for the 11-bit significands of fp16; x is normal and 1 / x too. One
 * step from the machine's estimate; see test_saw_gpu.c. */
static __device__ __forceinline__ float reciprocal_of_half(float x)
{
    float estimate = estimate_reciprocal(x);
    return __fmaf_rn(estimate, __fmaf_rn(-x, estimate, 1.0f), estimate);
}

static __device__ __forceinline__ float f32_of_half_bits(uint32_t bits)
{
    return __half2float(__ushort_as_half((unsigned short)bits));
}

/* Rounded down and up; beyond the largest finite number to infinity on that side only. */
static __device__ __forceinline__ uint32_t half_bits_down(float x)
{
    return __half_as_ushort(__float2half_rd(x));
}

static __device__ __forceinline__ uint32_t half_bits_up(float x)
{
    return __half_as_ushort(__float2half_ru(x));
}

/* The means of n channels as stored: nearest fp16, 0 if that is not finite. */
template <int n>
static __device__ __forceinline__ void mean_half_bits(const float sums[n], uint32_t count,
                                                      uint32_t halves[n])
{
    float means[n];
    if ((count & (count - 1)) == 0) { /* then the product is the quotient, rounded as it is */
        float inverse = count != 0 ? __uint_as_float((127 - (__ffs(count) - 1)) << 23) : 0.0f;
#pragma unroll
        for (int i = 0; i < n; i++) {
            means[i] = sums[i] * inverse;
        }
    } else {
#pragma unroll
        for (int i = 0; i < n; i++) {
            means[i] = __fdiv_rn(sums[i], (float)count);
        }
    }
#pragma unroll
    for (int i = 0; i < n; i++) {
        bool fits = means[i] > -65520.0f && means[i] < 65520.0f;
        halves[i] = fits ? __half_as_ushort(__float2half_rn(means[i])) : 0;
    }
}

static __device__ __forceinline__ uint32_t mean_half_bits(float sum, uint32_t count)
{
    uint32_t half;
    mean_half_bits<1>(&sum, count, &half);
    return half;
}

/* The smallest fp16 scale with levels * scale >= range. The estimate may be one step off on either
 * side; the products that decide are exact. Below 0 is NaN, which is not at least the range. */
static __device__ __forceinline__ uint32_t smallest_scale_bits(float range, float levels,
                                                               float levels_inverse)
{
    uint32_t scale = half_bits_up(range * levels_inverse);
    bool is_above = levels * f32_of_half_bits(scale - 1) >= range;
    bool is_below = levels * f32_of_half_bits(scale) < range;
    return is_above ? scale - 1 : is_below ? scale + 1 : scale;
}

/* What a vector is coded with. */
struct saw_scale {
    uint32_t meta;
    float offset; /* lo d, finite; early known, so that all but one product can be made */
    float factor; /* c (1 / scale); 0 for escapes and scale 0 */
};

/* (5, 6) of codec_saw.h. */
static __device__ __forceinline__ saw_scale choose_scale(float clip_ratio, float sqrt_order,
                                                         float rsqrt_order, float min, float max,
                                                         float levels, float levels_inverse,
                                                         bool is_escape)
{
    float middle = 0.5f * (min + max);
    float half = 0.5f * (max - min) * clip_ratio;
    bool is_clipped = clip_ratio != 1.0f;
    min = is_clipped ? middle - half : min;
    max = is_clipped ? middle + half : max;
    uint32_t lo = half_bits_down(min * rsqrt_order + 0.0f);
    uint32_t hi = half_bits_up(max * rsqrt_order + 0.0f);
    float lo_value = f32_of_half_bits(lo);
    uint32_t scale = smallest_scale_bits(f32_of_half_bits(hi) - lo_value, levels, levels_inverse);
    float value = f32_of_half_bits(scale);
    bool is_lo_finite = (lo & 0x7c00) != 0x7c00;
    bool is_finite = is_lo_finite && (hi & 0x7c00) != 0x7c00;
    bool is_coded = !is_escape && is_finite && (scale == 0 || value >= KVF_SAW_SCALE_MIN);
    /* without branches: what is beside this in the program can then run in between */
    float factor = rsqrt_order * reciprocal_of_half(value);
    saw_scale chosen;
    chosen.meta = is_coded ? lo | scale << 16 : (uint32_t)KVF_SAW_ESCAPE_SCALE << 16;
    chosen.offset = is_lo_finite ? lo_value * sqrt_order : 0.0f;
    chosen.factor = is_coded && scale != 0 ? factor : 0.0f;
    return chosen;
}

/* (6) w - z of codec_saw.h. */
static __device__ __forceinline__ float saw_zero_shift(const struct kvf_gpu_tensor &tensor)
{
    return tensor.zero_kind == KVF_ZERO_HALF ? 0.5f : 0.0f;
}

/* (6) lo of a scale and a zero. */
static __device__ __forceinline__ float lo_of_zero(float scale, float w)
{
    return -(scale * w);
}

/* A field of a plane. */
static __device__ __forceinline__ uint32_t field_of(const uint8_t *plane, uint32_t plane_bits,
                                                    uint32_t position)
{
    uint32_t a_byte = 8 / plane_bits;
    return plane[position / a_byte] >> position % a_byte * plane_bits & ((1u << plane_bits) - 1);
}

/* z of a token, from a row's zeros. */
static __device__ __forceinline__ uint32_t zero_at(const uint8_t *zeros, uint32_t n_tokens,
                                                   uint32_t bits, uint32_t token)
{
    uint32_t low_bits = saw_low_bits(bits);
    uint32_t high_bits = bits - low_bits;
    uint32_t zero = field_of(zeros, high_bits, token);
    if (low_bits != 0) {
        const uint8_t *low = zeros + (n_tokens * high_bits + 7) / 8;
        zero = zero << low_bits | field_of(low, low_bits, token);
    }
    return zero;
}

/* (S) of codec_saw.h: what it takes to find the costs of a ratio. */
struct saw_costs {
    float a;
    float step;
    float last;

    __device__ __forceinline__ saw_costs(float first_ratio, float ratio, uint32_t bits)
        : a(__fdiv_rn(first_ratio, 16.0f * ratio)), step(__fdiv_rn(16.0f * ratio, first_ratio)),
          last((float)((1 << (bits - 1)) - 1))
    {
    }

    /* The cost of i. */
    __device__ __forceinline__ uint32_t of(float i) const
    {
        constexpr float zero = 12582912.0f; /* 1.5 2^23: adding it rounds to an integer */
        float level = fminf(__fmaf_rn(i, a, -0.5f), last) + zero - zero;
        float error = __fmaf_rn(-(level + 0.5f), step, i);
        return __float_as_uint(__fmaf_rn(error, error, zero)) - __float_as_uint(zero);
    }
};

/* Count escapes of a warp's lanes in the block's result. */
static __device__ __forceinline__ void count_escapes(const struct kvf_gpu_work &work,
                                                     const struct kvf_gpu_part &part, bool is_one)
{
    uint32_t lanes = __ballot_sync(all_lanes, is_one);
    if (lanes != 0 && threadIdx.x % warp_lanes == 0) {
        atomicAdd(&results_of(work)[part.block].n_escapes, (unsigned)__popc(lanes));
    }
}

} /* namespace kvf */

#endif /* KVF_CODEC_CODEC_SAW_DEVICE_CUH */
