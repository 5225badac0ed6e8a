/* SPDX-License-Identifier: Apache-2.0
 *
 * simd.c: what the processor and the system can do, asked once.
 */
#include "codec/simd.h"

#include "base/status.h"

#include <assert.h>
#include <stdatomic.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

/* The level in force, plus one; 0: not asked yet. Two threads that ask at once find the same. */
static atomic_int chosen;

#if defined(__x86_64__)
static enum kvf_simd_level best_level(void)
{
    /* FMA and F16C have no name that every compiler knows; their registers are AVX's, for which the
     * checks below ask the system too. */
    unsigned int eax;
    unsigned int ebx;
    unsigned int ecx = 0;
    unsigned int edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & bit_FMA) == 0 || (ecx & bit_F16C) == 0 ||
        !__builtin_cpu_supports("avx2")) {
        return KVF_SIMD_SCALAR;
    }
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        return KVF_SIMD_AVX512;
    }
    return KVF_SIMD_AVX2;
}
#else
static enum kvf_simd_level best_level(void)
{
    return KVF_SIMD_SCALAR;
}
#endif

const char *kvf_codec_simd_name(enum kvf_simd_level level)
{
    static const char *const names[KVF_SIMD_LEVELS] = {"scalar", "avx2", "avx512"};
    assert(level >= 0 && level < KVF_SIMD_LEVELS);
    return names[level];
}

enum kvf_simd_level kvf_codec_simd_level(void)
{
    int level = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (level == 0) {
        int best = (int)best_level() + 1;
        /* keep what a kvf_codec_simd_set has put there meanwhile */
        if (atomic_compare_exchange_strong_explicit(&chosen, &level, best, memory_order_relaxed,
                                                    memory_order_relaxed)) {
            level = best;
        }
    }
    return (enum kvf_simd_level)(level - 1);
}

int kvf_codec_simd_set(enum kvf_simd_level level)
{
    if ((int)level < 0 || level > best_level()) {
        return KVF_ERR_UNSUPPORTED;
    }
    atomic_store_explicit(&chosen, (int)level + 1, memory_order_relaxed);
    return KVF_OK;
}
