/* SPDX-License-Identifier: Apache-2.0
 *
 * entropy_rans_avx512.c: entropy_rans.h's decoder, 16 lanes a register.
 */
#include "codec/entropy_rans.h"

#include <immintrin.h>

/* One byte of 16 lanes; *at moves by the words taken. */
static inline __m512i step(__m512i x, const struct kvf_rans_decode_table *table, const uint8_t **at,
                           __m128i *bytes_out)
{
    const __m512i slots = _mm512_set1_epi32(KVF_RANS_ONE - 1);
    __m512i entry = _mm512_i32gather_epi32(_mm512_and_si512(x, slots), table->entries, 4);
    __m512i frequency = _mm512_and_si512(_mm512_srli_epi32(entry, 8), slots);
    __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)*at));
    __mmask16 low;

    *bytes_out = _mm512_cvtepi32_epi8(entry);
    x = _mm512_add_epi32(_mm512_mullo_epi32(frequency, _mm512_srli_epi32(x, KVF_RANS_BITS)),
                         _mm512_srli_epi32(entry, 20));
    low = _mm512_cmplt_epu32_mask(x, _mm512_set1_epi32(KVF_RANS_LOW));
    words = _mm512_maskz_expand_epi32(low, words);
    x = _mm512_mask_or_epi32(x, low, _mm512_slli_epi32(x, 16), words);
    *at += 2 * (unsigned)__builtin_popcount(low);
    return x;
}

size_t kvf_rans_decode_avx512(struct kvf_rans_decoder *decoder,
                              const struct kvf_rans_decode_table *table, uint8_t *bytes_out,
                              size_t n)
{
    __m512i first = _mm512_loadu_si512(decoder->states);
    __m512i second = _mm512_loadu_si512(decoder->states + 16);
    const uint8_t *at = decoder->at;
    size_t done = 0;

    while (n - done >= KVF_RANS_LANES && decoder->end - at >= 64) {
        __m128i low;
        __m128i high;

        first = step(first, table, &at, &low);
        second = step(second, table, &at, &high);
        _mm_storeu_si128((__m128i *)(void *)(bytes_out + done), low);
        _mm_storeu_si128((__m128i *)(void *)(bytes_out + done + 16), high);
        done += KVF_RANS_LANES;
    }
    _mm512_storeu_si512(decoder->states, first);
    _mm512_storeu_si512(decoder->states + 16, second);
    decoder->at = at;
    return done;
}
