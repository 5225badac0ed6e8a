/* SPDX-License-Identifier: Apache-2.0
 *
 * simd_lanes.h: vectors of LANES lanes of 32 bits, for code that is written once and compiled for
 * AVX2 (8 lanes) and for AVX-512 (16). Empty in files that are compiled for neither.
 *
 * lanes_f: floats; lanes_i: integers; lanes_m: one truth a lane. + - * / on lanes_f and & | ^ on
 * lanes_i are the compiler's own.
 */
#ifndef KVF_CODEC_SIMD_LANES_H
#define KVF_CODEC_SIMD_LANES_H

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define KVF_LANES        1
#define KVF_LANES_INLINE static inline __attribute__((always_inline))

/* Ahead of a loop over registers: they stay registers only if nothing is left of the loop. */
#if defined(__clang__)
#define KVF_UNROLL _Pragma("GCC unroll 16") /* more, and it does none of those loops */
#else
#define KVF_UNROLL _Pragma("GCC unroll 32")
#endif

#if defined(__AVX512F__)

/* A constant that the compiler must take for any number. */
#define LANES_HIDE(a) __asm__("" : "+v"(a))

enum {
    LANES = 16
};
typedef __m512 lanes_f;
typedef __m512i lanes_i;
typedef __mmask16 lanes_m;

#define LANES_OP(type, name, parameters, ...)                                                      \
    KVF_LANES_INLINE type name parameters                                                          \
    {                                                                                              \
        return __VA_ARGS__;                                                                        \
    }

LANES_OP(lanes_f, f_load, (const void *from), _mm512_load_ps(from))
LANES_OP(void, f_store, (void *to, lanes_f a), _mm512_store_ps(to, a))
LANES_OP(lanes_f, f_set1, (float a), _mm512_set1_ps(a))
LANES_OP(lanes_f, f_bits, (lanes_i a), _mm512_castsi512_ps(a))
LANES_OP(lanes_f, f_fma, (lanes_f a, lanes_f b, lanes_f c), _mm512_fmadd_ps(a, b, c))
/* a < b ? a : b, and a > b ? a : b */
LANES_OP(lanes_f, f_min, (lanes_f a, lanes_f b), _mm512_min_ps(a, b))
LANES_OP(lanes_f, f_max, (lanes_f a, lanes_f b), _mm512_max_ps(a, b))
LANES_OP(lanes_f, f_sqrt, (lanes_f a), _mm512_sqrt_ps(a))
LANES_OP(lanes_f, f_from_i, (lanes_i a), _mm512_cvtepi32_ps(a))
/* from fp16 in the low word */
LANES_OP(lanes_f, f_from_half, (lanes_i a), _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)))

LANES_OP(lanes_i, i_load, (const void *from), _mm512_load_si512(from))
LANES_OP(lanes_i, i_loadu, (const void *from), _mm512_loadu_si512(from))
LANES_OP(void, i_store, (void *to, lanes_i a), _mm512_store_si512(to, a))
LANES_OP(void, i_storeu, (void *to, lanes_i a), _mm512_storeu_si512(to, a))
LANES_OP(lanes_i, i_set1, (uint32_t a), _mm512_set1_epi32((int)a))
LANES_OP(lanes_i, i_bits, (lanes_f a), _mm512_castps_si512(a))
LANES_OP(lanes_i, i_add, (lanes_i a, lanes_i b), _mm512_add_epi32(a, b))
LANES_OP(lanes_i, i_sub, (lanes_i a, lanes_i b), _mm512_sub_epi32(a, b))
LANES_OP(lanes_i, i_left, (lanes_i a, unsigned int n), _mm512_slli_epi32(a, n))
LANES_OP(lanes_i, i_right, (lanes_i a, unsigned int n), _mm512_srli_epi32(a, n))
LANES_OP(void, i_stream, (void *to, lanes_i a), _mm512_stream_si512(to, a))
LANES_OP(lanes_i, i_min_u8, (lanes_i a, lanes_i b), _mm512_min_epu8(a, b))
/* words as bytes, 0 .. 255 and saturated, in each 16 bytes: those of a, then those of b */
LANES_OP(lanes_i, i_pack_words, (lanes_i a, lanes_i b), _mm512_packus_epi16(a, b))
/* in each 16 bytes, word i and word i + 4 together in dword i */
LANES_OP(lanes_i, i_interleave_words, (lanes_i a),
         _mm512_shuffle_epi8(a, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5,
                                                                     12, 13, 6, 7, 14, 15))))
LANES_OP(lanes_i, i_add_16, (lanes_i a, lanes_i b), _mm512_add_epi16(a, b))
LANES_OP(lanes_i, i_sub_16, (lanes_i a, lanes_i b), _mm512_sub_epi16(a, b))
/* the products of the low words and of the high words, added */
LANES_OP(lanes_i, i_multiply_add_16, (lanes_i a, lanes_i b), _mm512_madd_epi16(a, b))
LANES_OP(lanes_i, i_max_i32, (lanes_i a, lanes_i b), _mm512_max_epi32(a, b))
LANES_OP(lanes_i, i_max_u32, (lanes_i a, lanes_i b), _mm512_max_epu32(a, b))
LANES_OP(lanes_i, i_min_u32, (lanes_i a, lanes_i b), _mm512_min_epu32(a, b))
LANES_OP(lanes_i, i_max_16, (lanes_i a, lanes_i b), _mm512_max_epi16(a, b))
LANES_OP(lanes_i, i_min_16, (lanes_i a, lanes_i b), _mm512_min_epi16(a, b))
/* the low words of both: a's below b's */
LANES_OP(lanes_i, i_low_words, (lanes_i a, lanes_i b),
         _mm512_mask_blend_epi16(0xaaaaaaaa, a, _mm512_slli_epi32(b, 16)))
/* the high words of both */
LANES_OP(lanes_i, i_high_words, (lanes_i a, lanes_i b),
         _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(a, 16), b))
/* words that are at least as large as limit but for their sign bit, with that bit flipped where
 * flip has it; 0 for the others, of either sign */
LANES_OP(lanes_i, i_keep_words, (lanes_i a, lanes_i limit, lanes_i flip),
         _mm512_maskz_add_epi16(
             _mm512_cmpge_epu16_mask(_mm512_and_si512(a, _mm512_set1_epi16(0x7fff)), limit), a,
             flip))
/* to fp16 in the low word */
LANES_OP(lanes_i, i_half_nearest, (lanes_f a),
         _mm512_cvtepu16_epi32(_mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)))
LANES_OP(lanes_i, i_half_down, (lanes_f a),
         _mm512_cvtepu16_epi32(_mm512_cvtps_ph(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)))
LANES_OP(lanes_i, i_half_up, (lanes_f a),
         _mm512_cvtepu16_epi32(_mm512_cvtps_ph(a, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC)))
/* fp32 so rounded that the high word is the nearest bf16, ties to even */
LANES_OP(lanes_i, i_round_bf16, (lanes_f a),
         _mm512_mask_add_epi32(_mm512_add_epi32(i_bits(a), i_set1(0x7fff)),
                               _mm512_test_epi32_mask(i_bits(a), i_set1(0x10000)),
                               _mm512_add_epi32(i_bits(a), i_set1(0x7fff)), i_set1(1)))

/* bytes and words, in each 16 bytes or, where that does not matter, in all of them */
LANES_OP(lanes_i, i_set1_8, (uint8_t a), _mm512_set1_epi8((char)a))
LANES_OP(lanes_i, i_load_16_bytes, (const void *from),
         _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)from)))
LANES_OP(lanes_i, i_look_up_8, (lanes_i table, lanes_i a), _mm512_shuffle_epi8(table, a))
LANES_OP(lanes_i, i_add_saturated_u8, (lanes_i a, lanes_i b), _mm512_adds_epu8(a, b))
LANES_OP(lanes_i, i_left_16, (lanes_i a, unsigned int n), _mm512_slli_epi16(a, n))
LANES_OP(lanes_i, i_right_16, (lanes_i a, unsigned int n), _mm512_srli_epi16(a, n))
/* products of the bytes of a, unsigned, and of b, each pair added to a word */
LANES_OP(lanes_i, i_multiply_add_8, (lanes_i a, lanes_i b), _mm512_maddubs_epi16(a, b))
LANES_OP(lanes_i, i_unpack_low_8, (lanes_i a, lanes_i b), _mm512_unpacklo_epi8(a, b))
LANES_OP(lanes_i, i_unpack_high_8, (lanes_i a, lanes_i b), _mm512_unpackhi_epi8(a, b))
/* what i_pack_words gave, all of a before all of b */
LANES_OP(lanes_i, i_order_packed, (lanes_i a),
         _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), a))
/* so that the unpacked halves are the first and the second half of a */
LANES_OP(lanes_i, i_order_unpacked, (lanes_i a),
         _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), a))
/* a bit for each byte that is 0 */
LANES_OP(uint64_t, i_zero_bytes, (lanes_i a), _mm512_testn_epi8_mask(a, a))
/* all bits of bytes below 128, none of the others */
LANES_OP(lanes_i, i_lower_half_8, (lanes_i a),
         _mm512_movm_epi8(_mm512_testn_epi8_mask(a, _mm512_set1_epi8((char)0x80))))
/* of signed bytes */
LANES_OP(lanes_i, i_magnitude_8, (lanes_i a), _mm512_abs_epi8(a))
/* count, plus 1 in each byte where a, up to 127, is above limit */
LANES_OP(lanes_i, i_count_above_8, (lanes_i count, lanes_i a, lanes_i limit),
         _mm512_mask_sub_epi8(count, _mm512_cmpgt_epi8_mask(a, limit), count, _mm512_set1_epi8(-1)))

/* LANES words or bytes as integers, and the low words or bytes of integers to memory */
LANES_OP(lanes_i, i_load_words, (const void *from),
         _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)))
LANES_OP(lanes_i, i_load_bytes, (const void *from),
         _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from)))
LANES_OP(void, i_store_words, (void *to, lanes_i a),
         _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(a)))
LANES_OP(void, i_store_bytes, (void *to, lanes_i a),
         _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(a)))
/* integers 0 .. 255 as bytes: those of a, then of b, c and d */
LANES_OP(lanes_i, i_pack_bytes, (lanes_i a, lanes_i b, lanes_i c, lanes_i d),
         _mm512_permutexvar_epi32(
             _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
             _mm512_packus_epi16(_mm512_packus_epi32(a, b), _mm512_packus_epi32(c, d))))
/* over all lanes */
LANES_OP(uint32_t, i_reduce_max_u32, (lanes_i a), _mm512_reduce_max_epu32(a))
LANES_OP(float, f_reduce_min, (lanes_f a), _mm512_reduce_min_ps(a))
LANES_OP(float, f_reduce_max, (lanes_f a), _mm512_reduce_max_ps(a))

/* the first n bytes, zero behind them; and to memory */
LANES_OP(lanes_i, i_load_part, (const void *from, uint32_t n),
         _mm512_maskz_loadu_epi8(((uint64_t)1 << n) - 1, from))
LANES_OP(void, i_store_part, (void *to, lanes_i a, uint32_t n),
         _mm512_mask_storeu_epi8(to, ((uint64_t)1 << n) - 1, a))
LANES_OP(lanes_m, m_lanes, (uint32_t bits), (lanes_m)bits)
LANES_OP(uint32_t, m_bits, (lanes_m a), (uint32_t)a)
LANES_OP(lanes_m, m_not, (lanes_m a), (lanes_m)~a)
LANES_OP(lanes_m, m_and, (lanes_m a, lanes_m b), (lanes_m)(a &b))
LANES_OP(lanes_m, m_or, (lanes_m a, lanes_m b), (lanes_m)(a | b))
LANES_OP(lanes_m, m_less, (lanes_f a, lanes_f b), _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ))
LANES_OP(lanes_m, m_at_least, (lanes_f a, lanes_f b), _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ))
LANES_OP(lanes_m, m_greater_i, (lanes_i a, lanes_i b), _mm512_cmpgt_epi32_mask(a, b))
LANES_OP(lanes_m, m_equal_i, (lanes_i a, lanes_i b), _mm512_cmpeq_epi32_mask(a, b))
/* m ? a : b, and m ? a : 0 */
LANES_OP(lanes_i, i_select, (lanes_m m, lanes_i a, lanes_i b), _mm512_mask_blend_epi32(m, b, a))
LANES_OP(lanes_i, i_keep, (lanes_m m, lanes_i a), _mm512_maskz_mov_epi32(m, a))

/* Eight floats, plus lanes 0 to 7, plus lanes 8 to 15. */
KVF_LANES_INLINE void f_add_eights(float *sum, lanes_f a)
{
    __m256 eight = _mm256_add_ps(_mm256_load_ps(sum), _mm512_castps512_ps256(a));
    _mm256_store_ps(sum, _mm256_add_ps(eight, _mm512_extractf32x8_ps(a, 1)));
}

/* r[i] lane l becomes r[l] lane i. */
KVF_LANES_INLINE void i_transpose(lanes_i r[LANES])
{
    lanes_i t[LANES];
    KVF_UNROLL
    for (int i = 0; i < LANES; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    KVF_UNROLL
    for (int i = 0; i < LANES; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    /* quarters q of rows 4 j .. 4 j + 3 are columns 4 q + i % 4 */
    KVF_UNROLL
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    KVF_UNROLL
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

#else /* AVX2 */

#define LANES_HIDE(a) __asm__("" : "+x"(a))

enum {
    LANES = 8
};
typedef __m256 lanes_f;
typedef __m256i lanes_i;
typedef __m256i lanes_m;

#define LANES_OP(type, name, parameters, ...)                                                      \
    KVF_LANES_INLINE type name parameters                                                          \
    {                                                                                              \
        return __VA_ARGS__;                                                                        \
    }

LANES_OP(lanes_f, f_load, (const void *from), _mm256_load_ps(from))
LANES_OP(void, f_store, (void *to, lanes_f a), _mm256_store_ps(to, a))
LANES_OP(lanes_f, f_set1, (float a), _mm256_set1_ps(a))
LANES_OP(lanes_f, f_bits, (lanes_i a), _mm256_castsi256_ps(a))
LANES_OP(lanes_f, f_fma, (lanes_f a, lanes_f b, lanes_f c), _mm256_fmadd_ps(a, b, c))
LANES_OP(lanes_f, f_min, (lanes_f a, lanes_f b), _mm256_min_ps(a, b))
LANES_OP(lanes_f, f_max, (lanes_f a, lanes_f b), _mm256_max_ps(a, b))
LANES_OP(lanes_f, f_sqrt, (lanes_f a), _mm256_sqrt_ps(a))
LANES_OP(lanes_f, f_from_i, (lanes_i a), _mm256_cvtepi32_ps(a))

LANES_OP(lanes_i, i_load, (const void *from), _mm256_load_si256(from))
LANES_OP(lanes_i, i_loadu, (const void *from), _mm256_loadu_si256(from))
LANES_OP(void, i_store, (void *to, lanes_i a), _mm256_store_si256(to, a))
LANES_OP(void, i_storeu, (void *to, lanes_i a), _mm256_storeu_si256(to, a))
LANES_OP(lanes_i, i_set1, (uint32_t a), _mm256_set1_epi32((int)a))
LANES_OP(lanes_i, i_bits, (lanes_f a), _mm256_castps_si256(a))
LANES_OP(lanes_i, i_add, (lanes_i a, lanes_i b), _mm256_add_epi32(a, b))
LANES_OP(lanes_i, i_sub, (lanes_i a, lanes_i b), _mm256_sub_epi32(a, b))
LANES_OP(lanes_i, i_left, (lanes_i a, unsigned int n), _mm256_slli_epi32(a, (int)n))
LANES_OP(lanes_i, i_right, (lanes_i a, unsigned int n), _mm256_srli_epi32(a, (int)n))
LANES_OP(void, i_stream, (void *to, lanes_i a), _mm256_stream_si256(to, a))
LANES_OP(lanes_i, i_min_u8, (lanes_i a, lanes_i b), _mm256_min_epu8(a, b))
/* words as bytes, 0 .. 255 and saturated, in each 16 bytes: those of a, then those of b */
LANES_OP(lanes_i, i_pack_words, (lanes_i a, lanes_i b), _mm256_packus_epi16(a, b))
/* in each 16 bytes, word i and word i + 4 together in dword i */
LANES_OP(lanes_i, i_interleave_words, (lanes_i a),
         _mm256_shuffle_epi8(a,
                             _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4,
                                                                       5, 12, 13, 6, 7, 14, 15))))
LANES_OP(lanes_i, i_add_16, (lanes_i a, lanes_i b), _mm256_add_epi16(a, b))
LANES_OP(lanes_i, i_sub_16, (lanes_i a, lanes_i b), _mm256_sub_epi16(a, b))
/* the products of the low words and of the high words, added */
LANES_OP(lanes_i, i_multiply_add_16, (lanes_i a, lanes_i b), _mm256_madd_epi16(a, b))
LANES_OP(lanes_i, i_max_i32, (lanes_i a, lanes_i b), _mm256_max_epi32(a, b))
LANES_OP(lanes_i, i_max_u32, (lanes_i a, lanes_i b), _mm256_max_epu32(a, b))
LANES_OP(lanes_i, i_min_u32, (lanes_i a, lanes_i b), _mm256_min_epu32(a, b))
LANES_OP(lanes_i, i_max_16, (lanes_i a, lanes_i b), _mm256_max_epi16(a, b))
LANES_OP(lanes_i, i_min_16, (lanes_i a, lanes_i b), _mm256_min_epi16(a, b))
LANES_OP(lanes_i, i_low_words, (lanes_i a, lanes_i b),
         _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa))
LANES_OP(lanes_i, i_high_words, (lanes_i a, lanes_i b),
         _mm256_blend_epi16(_mm256_srli_epi32(a, 16), b, 0xaa))
LANES_OP(lanes_i, i_keep_words, (lanes_i a, lanes_i limit, lanes_i flip),
         _mm256_xor_si256(
             flip,
             _mm256_andnot_si256(
                 _mm256_cmpgt_epi16(limit, _mm256_and_si256(a, _mm256_set1_epi16(0x7fff))), a)))
/* the eight low words */
LANES_OP(__m128i, words, (lanes_i a),
         _mm_packus_epi32(_mm256_castsi256_si128(_mm256_and_si256(a, _mm256_set1_epi32(0xffff))),
                          _mm256_extracti128_si256(_mm256_and_si256(a, _mm256_set1_epi32(0xffff)),
                                                   1)))
LANES_OP(lanes_f, f_from_half, (lanes_i a), _mm256_cvtph_ps(words(a)))
LANES_OP(lanes_i, i_half_nearest, (lanes_f a),
         _mm256_cvtepu16_epi32(_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)))
LANES_OP(lanes_i, i_half_down, (lanes_f a),
         _mm256_cvtepu16_epi32(_mm256_cvtps_ph(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)))
LANES_OP(lanes_i, i_half_up, (lanes_f a),
         _mm256_cvtepu16_epi32(_mm256_cvtps_ph(a, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC)))
LANES_OP(lanes_i, i_round_bf16, (lanes_f a),
         _mm256_add_epi32(_mm256_add_epi32(i_bits(a), i_set1(0x7fff)),
                          _mm256_and_si256(_mm256_srli_epi32(i_bits(a), 16), i_set1(1))))

/* bytes and words, in each 16 bytes or, where that does not matter, in all of them */
LANES_OP(lanes_i, i_set1_8, (uint8_t a), _mm256_set1_epi8((char)a))
LANES_OP(lanes_i, i_load_16_bytes, (const void *from),
         _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)from)))
LANES_OP(lanes_i, i_look_up_8, (lanes_i table, lanes_i a), _mm256_shuffle_epi8(table, a))
LANES_OP(lanes_i, i_add_saturated_u8, (lanes_i a, lanes_i b), _mm256_adds_epu8(a, b))
LANES_OP(lanes_i, i_left_16, (lanes_i a, unsigned int n), _mm256_slli_epi16(a, (int)n))
LANES_OP(lanes_i, i_right_16, (lanes_i a, unsigned int n), _mm256_srli_epi16(a, (int)n))
/* products of the bytes of a, unsigned, and of b, each pair added to a word */
LANES_OP(lanes_i, i_multiply_add_8, (lanes_i a, lanes_i b), _mm256_maddubs_epi16(a, b))
LANES_OP(lanes_i, i_unpack_low_8, (lanes_i a, lanes_i b), _mm256_unpacklo_epi8(a, b))
LANES_OP(lanes_i, i_unpack_high_8, (lanes_i a, lanes_i b), _mm256_unpackhi_epi8(a, b))
/* what i_pack_words gave, all of a before all of b */
LANES_OP(lanes_i, i_order_packed, (lanes_i a), _mm256_permute4x64_epi64(a, 0xd8))
/* so that the unpacked halves are the first and the second half of a */
LANES_OP(lanes_i, i_order_unpacked, (lanes_i a), _mm256_permute4x64_epi64(a, 0xd8))
/* a bit for each byte that is 0 */
LANES_OP(uint64_t, i_zero_bytes, (lanes_i a),
         (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(a, _mm256_setzero_si256())))
LANES_OP(lanes_i, i_lower_half_8, (lanes_i a), _mm256_cmpgt_epi8(a, _mm256_set1_epi8(-1)))
LANES_OP(lanes_i, i_magnitude_8, (lanes_i a), _mm256_abs_epi8(a))
LANES_OP(lanes_i, i_count_above_8, (lanes_i count, lanes_i a, lanes_i limit),
         _mm256_sub_epi8(count, _mm256_cmpgt_epi8(a, limit)))

LANES_OP(lanes_i, i_load_words, (const void *from),
         _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)))
LANES_OP(lanes_i, i_load_bytes, (const void *from),
         _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from)))
LANES_OP(void, i_store_words, (void *to, lanes_i a), _mm_storeu_si128((__m128i *)to, words(a)))
LANES_OP(__m128i, bytes, (lanes_i a), _mm_and_si128(words(a), _mm_set1_epi16(0xff)))
LANES_OP(void, i_store_bytes, (void *to, lanes_i a),
         _mm_storel_epi64((__m128i *)to, _mm_packus_epi16(bytes(a), bytes(a))))

LANES_OP(lanes_i, i_pack_bytes, (lanes_i a, lanes_i b, lanes_i c, lanes_i d),
         _mm256_permutevar8x32_epi32(_mm256_packus_epi16(_mm256_packus_epi32(a, b),
                                                         _mm256_packus_epi32(c, d)),
                                     _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)))

KVF_LANES_INLINE uint32_t i_reduce_max_u32(lanes_i a)
{
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    __m128i two = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(two, _mm_shuffle_epi32(two, 0xb1)));
}

KVF_LANES_INLINE float f_reduce_min(lanes_f a)
{
    __m128 four = _mm_min_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 two = _mm_min_ps(four, _mm_shuffle_ps(four, four, 0x4e));
    return _mm_cvtss_f32(_mm_min_ps(two, _mm_shuffle_ps(two, two, 0xb1)));
}

KVF_LANES_INLINE float f_reduce_max(lanes_f a)
{
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 two = _mm_max_ps(four, _mm_shuffle_ps(four, four, 0x4e));
    return _mm_cvtss_f32(_mm_max_ps(two, _mm_shuffle_ps(two, two, 0xb1)));
}

KVF_LANES_INLINE lanes_i i_load_part(const void *from, uint32_t n)
{
    _Alignas(32) uint8_t part[32] = {0};
    memcpy(part, from, n);
    return i_load(part);
}

KVF_LANES_INLINE void i_store_part(void *to, lanes_i a, uint32_t n)
{
    _Alignas(32) uint8_t part[32];
    i_store(part, a);
    memcpy(to, part, n);
}

LANES_OP(lanes_m, m_equal_i, (lanes_i a, lanes_i b), _mm256_cmpeq_epi32(a, b))
LANES_OP(lanes_m, m_lanes, (uint32_t bits),
         m_equal_i(_mm256_and_si256(i_set1(bits), _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128)),
                   _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128)))
LANES_OP(uint32_t, m_bits, (lanes_m a), (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(a)))
LANES_OP(lanes_m, m_not, (lanes_m a), _mm256_xor_si256(a, _mm256_set1_epi32(-1)))
LANES_OP(lanes_m, m_and, (lanes_m a, lanes_m b), _mm256_and_si256(a, b))
LANES_OP(lanes_m, m_or, (lanes_m a, lanes_m b), _mm256_or_si256(a, b))
LANES_OP(lanes_m, m_less, (lanes_f a, lanes_f b), i_bits(_mm256_cmp_ps(a, b, _CMP_LT_OQ)))
LANES_OP(lanes_m, m_at_least, (lanes_f a, lanes_f b), i_bits(_mm256_cmp_ps(a, b, _CMP_GE_OQ)))
LANES_OP(lanes_m, m_greater_i, (lanes_i a, lanes_i b), _mm256_cmpgt_epi32(a, b))
LANES_OP(lanes_i, i_select, (lanes_m m, lanes_i a, lanes_i b), _mm256_blendv_epi8(b, a, m))
LANES_OP(lanes_i, i_keep, (lanes_m m, lanes_i a), _mm256_and_si256(m, a))

KVF_LANES_INLINE void f_add_eights(float *sum, lanes_f a)
{
    _mm256_store_ps(sum, _mm256_add_ps(_mm256_load_ps(sum), a));
}

KVF_LANES_INLINE void i_transpose(lanes_i r[LANES])
{
    lanes_i t[LANES];
    KVF_UNROLL
    for (int i = 0; i < LANES; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    KVF_UNROLL
    for (int i = 0; i < LANES; i += 4) {
        r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    KVF_UNROLL
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
    }
    KVF_UNROLL
    for (int i = 0; i < LANES; i++) {
        r[i] = t[i];
    }
}

#endif /* AVX-512 or AVX2 */

KVF_LANES_INLINE lanes_f f_hidden(float a)
{
    lanes_f hidden = f_set1(a);
    LANES_HIDE(hidden);
    return hidden;
}

#endif /* __AVX2__ && __FMA__ && __F16C__ */

#endif /* KVF_CODEC_SIMD_LANES_H */
