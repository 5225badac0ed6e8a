/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_fp.h: the floating-point environment of codecs.
 *
 * Codecs promise the same bytes everywhere, so they compute with ties to even and with subnormals. The
 * calling process may have set anything (engines often flush subnormals): enter saves and sets, leave
 * restores. Between the two only calls through the ops table compute, which keeps the compiler from
 * moving arithmetic across.
 */
#ifndef KVF_CODEC_CODEC_FP_H
#define KVF_CODEC_CODEC_FP_H

#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

struct kvf_fp_state {
    uint64_t control;
};

static inline struct kvf_fp_state kvf_fp_enter(void)
{
    struct kvf_fp_state state;
#if defined(__x86_64__)
    state.control = _mm_getcsr();
    _mm_setcsr(0x1f80); /* all exceptions masked, nearest even, neither FTZ nor DAZ */
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(state.control)::"memory");
    __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)0) : "memory");
#else
#error "say how to save and set the floating-point environment on this machine"
#endif
    return state;
}

static inline void kvf_fp_leave(struct kvf_fp_state state)
{
#if defined(__x86_64__)
    _mm_setcsr((unsigned int)state.control);
#else
    __asm__ volatile("msr fpcr, %0" ::"r"(state.control) : "memory");
#endif
}

#endif /* KVF_CODEC_CODEC_FP_H */
