/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda_builtins.cuh: what a CUDA compiler knows without any header, as far as the emulated kernels
 * use it. Included before them.
 */
#ifndef KVF_TESTS_GPU_EMULATE_CUDA_BUILTINS_CUH
#define KVF_TESTS_GPU_EMULATE_CUDA_BUILTINS_CUH

#include "tests/gpu/emulate/thread_block.cuh"

#include <algorithm>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define __CUDACC__ 1 /* the headers that C and CUDA share go by it */
#define __host__
#define __device__
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __constant__
#define __shared__      static /* thread blocks run one after the other */
#define __forceinline__ inline
#define __noinline__    __attribute__((noinline))
#define __align__(n)    __attribute__((aligned(n)))

using std::max;
using std::min;

struct uint2 {
    uint32_t x, y;
};

struct __align__(16) uint4
{
    uint32_t x, y, z, w;
};

struct float2 {
    float x, y;
};

struct __align__(16) float4
{
    float x, y, z, w;
};

static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    return {x, y, z, w};
}

static inline uint2 make_uint2(uint32_t x, uint32_t y)
{
    return {x, y};
}

static inline float4 make_float4(float x, float y, float z, float w)
{
    return {x, y, z, w};
}

static inline float2 make_float2(float x, float y)
{
    return {x, y};
}

/* --- bits and numbers --- */

template <typename To, typename From> static inline To emulate_same_bits(From from)
{
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}

static inline uint32_t __float_as_uint(float x)
{
    return emulate_same_bits<uint32_t>(x);
}

static inline int32_t __float_as_int(float x)
{
    return emulate_same_bits<int32_t>(x);
}

static inline float __uint_as_float(uint32_t x)
{
    return emulate_same_bits<float>(x);
}

static inline float __int_as_float(int32_t x)
{
    return emulate_same_bits<float>(x);
}

static inline int __popc(uint32_t x)
{
    return __builtin_popcount(x);
}

static inline int __ffs(uint32_t x)
{
    return __builtin_ffs((int)x);
}

static inline uint32_t __umulhi(uint32_t a, uint32_t b)
{
    return (uint32_t)((uint64_t)a * b >> 32);
}

/* The selector has four bits for each byte of the result, of which kernels use three. */
static inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector)
{
    uint64_t both = (uint64_t)b << 32 | a;
    uint32_t result = 0;
    for (uint32_t i = 0; i < 4; i++) {
        result |= (uint32_t)(both >> (selector >> (4 * i) & 7) * 8 & 0xff) << (8 * i);
    }
    return result;
}

/* Products of unsigned bytes, added. */
static inline uint32_t __dp4a(uint32_t a, uint32_t b, uint32_t sum)
{
    for (uint32_t shift = 0; shift < 32; shift += 8) {
        sum += (a >> shift & 0xff) * (b >> shift & 0xff);
    }
    return sum;
}

static inline uint32_t __vmaxu2(uint32_t a, uint32_t b)
{
    return max(a & 0xffff, b & 0xffff) | max(a >> 16, b >> 16) << 16;
}

static inline int32_t __vimax3_s32(int32_t a, int32_t b, int32_t c)
{
    return max(a, max(b, c));
}

static inline uint32_t __vimax3_u32(uint32_t a, uint32_t b, uint32_t c)
{
    return max(a, max(b, c));
}

static inline int32_t __vimin_s32_relu(int32_t a, int32_t b)
{
    return max(min(a, b), 0);
}

static inline float __fmaf_rn(float a, float b, float c)
{
    return fmaf(a, b, c);
}

static inline float __fmul_rn(float a, float b)
{
    return a * b;
}

static inline float __fdiv_rn(float a, float b)
{
    return a / b;
}

static inline float __frcp_rn(float a)
{
    return 1.0f / a;
}

static inline float __fsqrt_rn(float a)
{
    return sqrtf(a);
}

/* --- between lanes --- */

/* All lanes take part: the kernels have no other masks. */
template <typename T> static inline T __shfl_sync(uint32_t, T value, uint32_t lane)
{
    return emulate_same_bits<T>(
        emulate::exchange({{emulate_same_bits<uint32_t>(value)}})[lane % 32].word[0]);
}

template <typename T> static inline T __shfl_xor_sync(uint32_t mask, T value, uint32_t by)
{
    return __shfl_sync(mask, value, threadIdx.x ^ by);
}

template <typename T> static inline T __shfl_up_sync(uint32_t mask, T value, uint32_t by)
{
    uint32_t lane = threadIdx.x % 32;
    return __shfl_sync(mask, value, lane < by ? lane : lane - by);
}

template <typename T> static inline T __shfl_down_sync(uint32_t mask, T value, uint32_t by)
{
    uint32_t lane = threadIdx.x % 32;
    return __shfl_sync(mask, value, lane + by > 31 ? lane : lane + by);
}

static inline uint32_t __ballot_sync(uint32_t, bool vote)
{
    const emulate::lane_words *all = emulate::exchange({{vote}});
    uint32_t votes = 0;
    for (uint32_t lane = 0; lane < 32; lane++) {
        votes |= all[lane].word[0] << lane;
    }
    return votes;
}

static inline uint32_t __reduce_max_sync(uint32_t, uint32_t value)
{
    const emulate::lane_words *all = emulate::exchange({{value}});
    uint32_t largest = 0;
    for (uint32_t lane = 0; lane < 32; lane++) {
        largest = max(largest, all[lane].word[0]);
    }
    return largest;
}

static inline uint32_t __reduce_add_sync(uint32_t, uint32_t value)
{
    const emulate::lane_words *all = emulate::exchange({{value}});
    uint32_t sum = 0;
    for (uint32_t lane = 0; lane < 32; lane++) {
        sum += all[lane].word[0];
    }
    return sum;
}

static inline bool __any_sync(uint32_t mask, bool vote)
{
    return __ballot_sync(mask, vote) != 0;
}

static inline void __syncwarp()
{
    (void)emulate::exchange({});
}

static inline void __syncthreads()
{
    emulate::await_all();
}

static inline uint32_t atomicAdd(uint32_t *to, uint32_t n)
{
    uint32_t before = *to;
    *to += n;
    return before;
}

static inline uint32_t atomicOr(uint32_t *to, uint32_t bits)
{
    uint32_t before = *to;
    *to |= bits;
    return before;
}

template <typename T> static inline T __ldg(const T *from)
{
    return *from;
}

/* A store that the caches need not keep. */
static inline void __stcs(uint4 *to, uint4 value)
{
    emulate::check_alignment(to, sizeof(*to));
    *to = value;
}

static inline uint64_t __cvta_generic_to_shared(const void *at)
{
    return emulate::shared_address(at);
}

#endif /* KVF_TESTS_GPU_EMULATE_CUDA_BUILTINS_CUH */
