/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_ptx.cuh: instructions of the device that CUDA has no function for, one function each; the
 * only place with PTX. Beside them CUDA's functions for fp16 and bf16. A build without a device
 * names a header with all of these in plain C++ as KVF_PTX_HEADER (tests/gpu/emulate does).
 */
#ifndef KVF_CODEC_CODEC_PTX_CUH
#define KVF_CODEC_CODEC_PTX_CUH

#include <stdint.h>

#ifdef KVF_PTX_HEADER
#include KVF_PTX_HEADER
#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>

/* The shared memory whose size the launch says, as an array of this name. */
#define KVF_SHARED_BYTES(name) extern __shared__ __align__(128) uint8_t name[]

namespace kvf
{

/* Keep a value in its register: what the compiler cannot make again it does not make again in every
 * tile. */
template <typename T> static __device__ __forceinline__ void pin(T &value)
{
    asm volatile("" : "+r"(value));
}

/* The larger magnitude of each half, as fp16; 0x7fff if one is NaN. */
static __device__ __forceinline__ uint32_t max_half_magnitudes(uint32_t a, uint32_t b)
{
    uint32_t larger;
    asm("{\n\t"
        ".reg .b32 x, y;\n\t"
        "abs.f16x2 x, %1;\n\t"
        "abs.f16x2 y, %2;\n\t"
        "max.NaN.f16x2 %0, x, y;\n\t"
        "}"
        : "=r"(larger)
        : "r"(a), "r"(b));
    return larger;
}

/* The larger magnitude, NaN if one is NaN. */
static __device__ __forceinline__ float max_magnitude(float a, float b)
{
    float larger;
    asm("{\n\t"
        ".reg .f32 x, y;\n\t"
        "abs.f32 x, %1;\n\t"
        "abs.f32 y, %2;\n\t"
        "max.NaN.f32 %0, x, y;\n\t"
        "}"
        : "=f"(larger)
        : "f"(a), "f"(b));
    return larger;
}

/* Bits of a where the mask is set, else of b: one operation, which the compiler does not take
 * apart to join several in other ways. */
static __device__ __forceinline__ uint32_t choose_bits(uint32_t a, uint32_t b, uint32_t mask)
{
    uint32_t bits;
    asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(bits) : "r"(a), "r"(b), "r"(mask));
    return bits;
}

/* A word of shared memory that does not change any more, by the short form of its address. */
static __device__ __forceinline__ uint32_t load_shared(uint32_t at)
{
    uint32_t word;
    asm("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(at));
    return word;
}

/* 1 / x, off by a unit in the last place or so. */
static __device__ __forceinline__ float estimate_reciprocal(float x)
{
    float estimate;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(x));
    return estimate;
}

/* 1 / sqrt(x), the same. */
static __device__ __forceinline__ float estimate_reciprocal_root(float x)
{
    float estimate;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(x));
    return estimate;
}

/* a b + c, rounded, no less than 0 and no more than 1. */
static __device__ __forceinline__ float fma_saturated(float a, float b, float c)
{
    float d;
    asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
    return d;
}

/* a b + c of each half, as bf16. */
static __device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

/* d = A B, in one product of 16 x 16 by 16 x 8. */
static __device__ __forceinline__ void mma_bf16(float d[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                                uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
}

/* d += A B, in one product of 16 x 8 by 8 x 8. */
static __device__ __forceinline__ void add_mma_bf16(float d[4], uint32_t a0, uint32_t a1,
                                                    uint32_t b)
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b));
}

static __device__ __forceinline__ void mma_f16(float d[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                               uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
}

/* d += A B of signed bytes, in one product of 16 x 32 by 32 x 8. */
static __device__ __forceinline__ void mma_s8(int32_t d[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                              uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* (c, a, b) with a and b clamped to 0 .. 15, 255 or 3. */
static __device__ __forceinline__ uint32_t pack_nibbles(int32_t a, int32_t b, uint32_t c)
{
    uint32_t d;
    asm("cvt.pack.sat.u4.s32.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

static __device__ __forceinline__ uint32_t pack_bytes(int32_t a, int32_t b, uint32_t c)
{
    uint32_t d;
    asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

static __device__ __forceinline__ uint32_t pack_twos(int32_t a, int32_t b, uint32_t c)
{
    uint32_t d;
    asm("cvt.pack.sat.u2.s32.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

/* The same with a and b clamped to -8 .. 7. */
static __device__ __forceinline__ uint32_t pack_signed_nibbles(int32_t a, int32_t b, uint32_t c)
{
    uint32_t d;
    asm("cvt.pack.sat.s4.s32.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

/* Stores to global memory: what the compiler is not told costs an instruction that asks. */
static __device__ __forceinline__ void store_global(uint8_t *to, uint32_t a)
{
    asm volatile("st.global.b32 [%0], %1;" ::"l"(to), "r"(a) : "memory");
}

static __device__ __forceinline__ void store_global(uint8_t *to, uint32_t a, uint32_t b)
{
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(a), "r"(b) : "memory");
}

static __device__ __forceinline__ void store_global(uint8_t *to, uint32_t a, uint32_t b, uint32_t c,
                                                    uint32_t d)
{
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

/* Ask for 128 bytes to come to the last cache. */
static __device__ __forceinline__ void prefetch(const uint8_t *from)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

/* Copies to shared memory that run on their own, 4, 8 or 16 bytes each; those of 16 pass by the
 * first cache. */
template <uint32_t bytes>
static __device__ __forceinline__ void start_copy(uint32_t to, const uint8_t *from)
{
    if constexpr (bytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(bytes)
                     : "memory");
    }
}

/* What the thread has started since the last time is a group. */
static __device__ __forceinline__ void commit_copies()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Wait until all the thread's copies are there but for the last `behind` groups. */
template <int behind> static __device__ __forceinline__ void await_copies()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(behind) : "memory");
}

/* Barriers of the thread block by number, 0 .. 15: each is passed when n_threads have come, those
 * that wait and those that do not. */
static __device__ __forceinline__ void arrive_at(uint32_t barrier, uint32_t n_threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(n_threads) : "memory");
}

static __device__ __forceinline__ void await_at(uint32_t barrier, uint32_t n_threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(n_threads) : "memory");
}

} /* namespace kvf */

#endif /* KVF_PTX_HEADER */

#endif /* KVF_CODEC_CODEC_PTX_CUH */
