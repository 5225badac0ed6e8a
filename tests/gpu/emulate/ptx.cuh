/* SPDX-License-Identifier: Apache-2.0
 *
 * ptx.cuh: codec_ptx.cuh in plain C++, as far as the emulated kernels use it (KVF_PTX_HEADER).
 */
#ifndef KVF_TESTS_GPU_EMULATE_PTX_CUH
#define KVF_TESTS_GPU_EMULATE_PTX_CUH

#include "tests/gpu/emulate/cuda_builtins.cuh"
#include "tests/gpu/emulate/cuda_halves.cuh"

#define KVF_SHARED_BYTES(name) uint8_t *name = emulate::shared_memory()

namespace kvf
{

template <typename T> static inline void pin(T &value)
{
    (void)value; /* it is for speed alone */
}

static inline uint32_t max_half_magnitudes(uint32_t a, uint32_t b)
{
    uint32_t larger = 0;
    for (uint32_t shift = 0; shift < 32; shift += 16) {
        uint32_t x = a >> shift & 0x7fff;
        uint32_t y = b >> shift & 0x7fff;
        larger |= (max(x, y) > 0x7c00 ? 0x7fff : max(x, y)) << shift;
    }
    return larger;
}

static inline float max_magnitude(float a, float b)
{
    uint32_t x = __float_as_uint(a) & 0x7fffffff;
    uint32_t y = __float_as_uint(b) & 0x7fffffff;
    uint32_t larger = max(x, y);
    return __uint_as_float(larger > 0x7f800000 ? 0x7fffffff : larger);
}

static inline uint32_t choose_bits(uint32_t a, uint32_t b, uint32_t mask)
{
    return (a & mask) | (b & ~mask);
}

static inline uint32_t load_shared(uint32_t at)
{
    return emulate::load_shared(at);
}

/* Better than the machine's: that a worse one is good enough is a test of its own (test_saw_gpu.c).
 */
static inline float estimate_reciprocal(float x)
{
    return 1.0f / x;
}

static inline float estimate_reciprocal_root(float x)
{
    return 1.0f / sqrtf(x);
}

static inline float fma_saturated(float a, float b, float c)
{
    float d = fmaf(a, b, c);
    return d > 0.0f ? min(d, 1.0f) : 0.0f; /* NaN becomes 0 */
}

/* a b + c of each half is rounded to fp32 on the way: the same where b is 1 or -1 and c is 0 or -0,
 * as in the kernels. */
static inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t d = 0;
    for (uint32_t shift = 0; shift < 32; shift += 16) {
        float x = __uint_as_float(a >> shift << 16);
        float y = __uint_as_float(b >> shift << 16);
        d |= emulate_bf16_bits(fmaf(x, y, __uint_as_float(c >> shift << 16))) << shift;
    }
    return d;
}

static inline float emulate_bf16(uint32_t bits)
{
    return __uint_as_float(bits << 16);
}

static inline float emulate_fp16(uint32_t bits)
{
    return __half2float({(uint16_t)bits});
}

/* Element k (of 16) of a row of A, or of a column of B: which word of which lane has it, and in
 * which half, is as PTX's manual has it for m16n8k16. */
static inline uint32_t emulate_fragment(const emulate::lane_words *all, uint32_t line, uint32_t k,
                                        uint32_t word)
{
    return all[line % 8 * 4 + k % 8 / 2].word[word] >> k % 2 * 16 & 0xffff;
}

/* d += A B of numbers of either kind. */
template <float (*value)(uint32_t bits)>
static inline void emulate_mma(float d[4], const emulate::lane_words &mine)
{
    const emulate::lane_words *all = emulate::exchange(mine);
    uint32_t lane = threadIdx.x % 32;
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t row = lane / 4 + i / 2 * 8;
        uint32_t column = lane % 4 * 2 + i % 2;
        double sum = (double)d[i];
        for (uint32_t k = 0; k < 16; k++) {
            sum += (double)value(emulate_fragment(all, row, k, row / 8 + k / 8 * 2)) *
                   (double)value(emulate_fragment(all, column, k, 4 + k / 8));
        }
        d[i] = (float)sum;
    }
}

static inline void mma_bf16(float d[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                            uint32_t b0, uint32_t b1)
{
    d[0] = d[1] = d[2] = d[3] = 0.0f;
    emulate_mma<emulate_bf16>(d, {{a0, a1, a2, a3, b0, b1}});
}

static inline void add_mma_bf16(float d[4], uint32_t a0, uint32_t a1, uint32_t b)
{
    emulate_mma<emulate_bf16>(d, {{a0, a1, 0, 0, b, 0}});
}

static inline void mma_f16(float d[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                           uint32_t b0, uint32_t b1)
{
    d[0] = d[1] = d[2] = d[3] = 0.0f;
    emulate_mma<emulate_fp16>(d, {{a0, a1, a2, a3, b0, b1}});
}

/* Element k (of 32) as above, for m16n8k32. */
static inline int32_t emulate_byte(const emulate::lane_words *all, uint32_t line, uint32_t k,
                                   uint32_t word)
{
    return (int8_t)(all[line % 8 * 4 + k % 16 / 4].word[word] >> k % 4 * 8);
}

static inline void mma_s8(int32_t d[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                          uint32_t b0, uint32_t b1)
{
    const emulate::lane_words *all = emulate::exchange({{a0, a1, a2, a3, b0, b1}});
    uint32_t lane = threadIdx.x % 32;
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t row = lane / 4 + i / 2 * 8;
        uint32_t column = lane % 4 * 2 + i % 2;
        for (uint32_t k = 0; k < 32; k++) {
            d[i] += emulate_byte(all, row, k, row / 8 + k / 16 * 2) *
                    emulate_byte(all, column, k, 4 + k / 16);
        }
    }
}

template <int bits> static inline uint32_t emulate_pack(int32_t a, int32_t b, uint32_t c)
{
    constexpr int32_t top = (1 << bits) - 1;
    return c << (2 * bits) | (uint32_t)min(max(a, 0), top) << bits | (uint32_t)min(max(b, 0), top);
}

static inline uint32_t pack_signed_nibbles(int32_t a, int32_t b, uint32_t c)
{
    uint32_t low = (uint32_t)min(max(b, -8), 7) & 15;
    return c << 8 | ((uint32_t)min(max(a, -8), 7) & 15) << 4 | low;
}

static inline uint32_t pack_nibbles(int32_t a, int32_t b, uint32_t c)
{
    return emulate_pack<4>(a, b, c);
}

static inline uint32_t pack_bytes(int32_t a, int32_t b, uint32_t c)
{
    return emulate_pack<8>(a, b, c);
}

static inline uint32_t pack_twos(int32_t a, int32_t b, uint32_t c)
{
    return emulate_pack<2>(a, b, c);
}

template <typename... Words> static inline void store_global(uint8_t *to, Words... words)
{
    const uint32_t all[] = {words...};
    emulate::check_alignment(to, sizeof(all));
    memcpy(to, all, sizeof(all));
}

static inline void prefetch(const uint8_t *from)
{
    (void)from; /* it is for speed alone */
}

template <uint32_t bytes> static inline void start_copy(uint32_t to, const uint8_t *from)
{
    emulate::start_copy(to, from, bytes);
}

static inline void commit_copies()
{
    emulate::commit_copies();
}

template <int behind> static inline void await_copies()
{
    emulate::await_copies(behind);
}

static inline void arrive_at(uint32_t barrier, uint32_t n_threads)
{
    emulate::arrive(barrier, n_threads);
}

static inline void await_at(uint32_t barrier, uint32_t n_threads)
{
    emulate::await(barrier, n_threads);
}

} /* namespace kvf */

#endif /* KVF_TESTS_GPU_EMULATE_PTX_CUH */
