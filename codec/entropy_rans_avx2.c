/* SPDX-License-Identifier: Apache-2.0
 *
 * entropy_rans_avx2.c: entropy_rans.h's decoder, 8 lanes a register.
 */
#include "codec/entropy_rans.h"

#include <immintrin.h>

/* For each set of lanes that take a word: which of the next words is whose. */
#define NTH(set, lane) (uint8_t) __builtin_popcount((set) & ((1 << (lane)) - 1))
#define SET(set)                                                                                   \
    {                                                                                              \
        NTH(set, 0), NTH(set, 1), NTH(set, 2), NTH(set, 3), NTH(set, 4), NTH(set, 5), NTH(set, 6), \
            NTH(set, 7)                                                                            \
    }
#define SETS_4(set)  SET(set), SET((set) + 1), SET((set) + 2), SET((set) + 3)
#define SETS_16(set) SETS_4(set), SETS_4((set) + 4), SETS_4((set) + 8), SETS_4((set) + 12)
#define SETS_64(set) SETS_16(set), SETS_16((set) + 16), SETS_16((set) + 32), SETS_16((set) + 48)

static const uint8_t sets[256][8] = {SETS_64(0), SETS_64(64), SETS_64(128), SETS_64(192)};

/* One byte of 8 lanes, in the low byte of each; *at moves by the words taken. */
static inline __m256i step(__m256i x, const struct kvf_rans_decode_table *table, const uint8_t **at,
                           __m256i *entries_out)
{
    const __m256i slots = _mm256_set1_epi32(KVF_RANS_ONE - 1);
    __m256i entry = _mm256_i32gather_epi32((const int *)(const void *)table->entries,
                                           _mm256_and_si256(x, slots), 4);
    __m256i frequency = _mm256_and_si256(_mm256_srli_epi32(entry, 8), slots);
    __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)*at));
    __m256i low;
    __m256i turn;
    unsigned set;

    *entries_out = entry;
    x = _mm256_add_epi32(_mm256_mullo_epi32(frequency, _mm256_srli_epi32(x, KVF_RANS_BITS)),
                         _mm256_srli_epi32(entry, 20));
    low = _mm256_cmpeq_epi32(_mm256_srli_epi32(x, 16), _mm256_setzero_si256());
    set = (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(low));
    turn = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)sets[set]));
    words = _mm256_permutevar8x32_epi32(words, turn);
    *at += 2 * (unsigned)__builtin_popcount(set);
    return _mm256_blendv_epi8(x, _mm256_or_si256(_mm256_slli_epi32(x, 16), words), low);
}

/* The low bytes of four times 8 lanes, in order. */
static inline __m256i low_bytes(const __m256i entries[4])
{
    const __m256i byte = _mm256_set1_epi32(255);
    __m256i ab = _mm256_packus_epi32(_mm256_and_si256(entries[0], byte),
                                     _mm256_and_si256(entries[1], byte));
    __m256i cd = _mm256_packus_epi32(_mm256_and_si256(entries[2], byte),
                                     _mm256_and_si256(entries[3], byte));

    /* the packs work in halves: four bytes each of a, b, c, d, twice */
    return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(ab, cd),
                                       _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

size_t kvf_rans_decode_avx2(struct kvf_rans_decoder *decoder,
                            const struct kvf_rans_decode_table *table, uint8_t *bytes_out, size_t n)
{
    __m256i *states = (__m256i *)(void *)decoder->states;
    __m256i x[4] = {_mm256_loadu_si256(states), _mm256_loadu_si256(states + 1),
                    _mm256_loadu_si256(states + 2), _mm256_loadu_si256(states + 3)};
    const uint8_t *at = decoder->at;
    size_t done = 0;

    while (n - done >= KVF_RANS_LANES && decoder->end - at >= 64) {
        __m256i entries[4];

        for (int i = 0; i < 4; i++) {
            x[i] = step(x[i], table, &at, &entries[i]);
        }
        _mm256_storeu_si256((__m256i *)(void *)(bytes_out + done), low_bytes(entries));
        done += KVF_RANS_LANES;
    }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_si256(states + i, x[i]);
    }
    decoder->at = at;
    return done;
}
