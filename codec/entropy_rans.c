/* SPDX-License-Identifier: Apache-2.0
 *
 * entropy_rans.c: tables and the scalar form of entropy_rans.h; the wide forms of the decoder are
 * entropy_rans_avx2.c and entropy_rans_avx512.c.
 */
#include "codec/entropy_rans.h"

#include "codec/simd.h"

#include <assert.h>
#include <string.h>

#define RECIPROCAL_BITS 44
#define PLAIN_MAX       191 /* frequency that is stored as one byte */
#define GROUP_BYTES_MAX 64  /* words that a group of 32 lanes can take */

/* -------------------------------------------------------------------------------------------------
 * Tables
 */

/* Every value that occurs gets at least 1; what rounding has left goes to the most frequent one, or
 * is taken from the most frequent ones. */
void kvf_rans_frequencies(const uint32_t counts[256], uint16_t frequencies_out[256])
{
    uint64_t total = 0;
    int left = KVF_RANS_ONE;
    int most = 0;

    for (int s = 0; s < 256; s++) {
        total += counts[s];
        most = counts[s] > counts[most] ? s : most;
    }
    assert(total > counts[most]);
    for (int s = 0; s < 256; s++) {
        uint64_t share = (uint64_t)counts[s] * KVF_RANS_ONE / total;

        frequencies_out[s] = (uint16_t)(counts[s] != 0 && share == 0 ? 1 : share);
        left -= frequencies_out[s];
    }
    if (left > 0) {
        frequencies_out[most] = (uint16_t)(frequencies_out[most] + left);
    }
    while (left < 0) {
        for (int s = 0; s < 256; s++) {
            most = frequencies_out[s] > frequencies_out[most] ? s : most;
        }
        /* the largest is 16 or more: 256 of them would add up to 4096 */
        frequencies_out[most]--;
        left++;
    }
}

/* log2 of 1..4096, times 256, by squaring. */
static uint32_t log2_q8(uint32_t x)
{
    uint32_t log = 0;
    uint64_t y = (uint64_t)x << 16;

    while (y >= 2u << 16) {
        y >>= 1;
        log += 256;
    }
    for (uint32_t bit = 128; bit != 0; bit >>= 1) {
        y = y * y >> 16;
        if (y >= 2u << 16) {
            y >>= 1;
            log += bit;
        }
    }
    return log;
}

uint64_t kvf_rans_cost(uint32_t count, uint16_t frequency)
{
    return frequency == 0 ? 0 : (uint64_t)count * (KVF_RANS_BITS * 256 - log2_q8(frequency));
}

size_t kvf_rans_table_write(const uint16_t frequencies[256], uint8_t *to)
{
    size_t at = 0;

    for (int s = 0; s < 256; s++) {
        uint16_t frequency = frequencies[s];

        if (frequency > PLAIN_MAX) {
            to[at++] = (uint8_t)(PLAIN_MAX + 1 + (frequency >> 8));
            to[at++] = (uint8_t)frequency;
        } else if (frequency > 0) {
            to[at++] = (uint8_t)frequency;
        } else {
            int first = s;

            while (s < 255 && frequencies[s + 1] == 0) {
                s++;
            }
            to[at++] = 0;
            to[at++] = (uint8_t)(s - first);
        }
    }
    return at;
}

size_t kvf_rans_table_read(const uint8_t *from, size_t bytes, uint16_t frequencies_out[256])
{
    uint32_t total = 0;
    size_t at = 0;
    uint32_t s = 0;

    memset(frequencies_out, 0, 256 * sizeof(frequencies_out[0]));
    while (s < 256) {
        bool is_pair;

        if (at == bytes) {
            return 0;
        }
        is_pair = from[at] == 0 || from[at] > PLAIN_MAX;
        if (is_pair && bytes - at < 2) {
            return 0;
        }
        if (from[at] == 0) {
            s += from[at + 1] + 1u;
            if (s > 256) {
                return 0;
            }
        } else {
            frequencies_out[s] = is_pair
                                     ? (uint16_t)((from[at] - PLAIN_MAX - 1) << 8 | from[at + 1])
                                     : from[at];
            total += frequencies_out[s++];
        }
        at += is_pair ? 2 : 1;
    }
    for (s = 0; s < 256 && frequencies_out[s] < KVF_RANS_ONE; s++) {
    }
    return total == KVF_RANS_ONE && s == 256 ? at : 0;
}

void kvf_rans_encode_table_init(struct kvf_rans_encode_table *table,
                                const uint16_t frequencies[256])
{
    uint32_t start = 0;

    for (int s = 0; s < 256; s++) {
        uint32_t frequency = frequencies[s];

        table->symbols[s] = (struct kvf_rans_symbol){
            .reciprocal = frequency == 0 ? 0 : (1ull << RECIPROCAL_BITS) / frequency + 1,
            .limit = frequency << 20,
            .start = (uint16_t)start,
            .rest = (uint16_t)(KVF_RANS_ONE - frequency),
        };
        start += frequency;
    }
}

void kvf_rans_decode_table_init(struct kvf_rans_decode_table *table,
                                const uint16_t frequencies[256])
{
    uint32_t *entry = table->entries;

    for (uint32_t s = 0; s < 256; s++) {
        for (uint32_t i = 0; i < frequencies[s]; i++) {
            *entry++ = s | (uint32_t)frequencies[s] << 8 | i << 20;
        }
    }
    assert(entry == table->entries + KVF_RANS_ONE);
}

/* -------------------------------------------------------------------------------------------------
 * Encode
 */
void kvf_rans_encoder_init(struct kvf_rans_encoder *encoder, uint8_t *end)
{
    for (int lane = 0; lane < KVF_RANS_LANES; lane++) {
        encoder->states[lane] = KVF_RANS_LOW;
    }
    encoder->at = end;
}

/* x / frequency = x reciprocal >> 44 for all x < frequency << 20: the reciprocal is too large by at
 * most 1, which makes the quotient too large by less than frequency / 2^24 < 1 / frequency; and the
 * product is below 2^64. A word is written in any case, and kept if it counts: a branch would be a
 * coin toss. */
static inline uint8_t *encode_byte(uint32_t *state, const struct kvf_rans_symbol *symbol,
                                   uint8_t *at)
{
    uint32_t x = *state;
    uint32_t full = x >= symbol->limit;
    uint16_t word = (uint16_t)x;

    memcpy(at - sizeof(word), &word, sizeof(word));
    x >>= full * 16;
    *state = x + symbol->start +
             (uint32_t)(x * symbol->reciprocal >> RECIPROCAL_BITS) * symbol->rest;
    return at - full * sizeof(word);
}

void kvf_rans_encode(struct kvf_rans_encoder *encoder, const struct kvf_rans_encode_table *table,
                     const uint8_t *bytes, size_t n)
{
    uint32_t states[KVF_RANS_LANES]; /* nothing else points there, and stores cannot hit it */
    uint8_t *at = encoder->at;
    size_t i = n;

    memcpy(states, encoder->states, sizeof(states));
    for (; i % KVF_RANS_LANES != 0; i--) {
        at = encode_byte(&states[(i - 1) % KVF_RANS_LANES], &table->symbols[bytes[i - 1]], at);
    }
    for (; i != 0; i -= KVF_RANS_LANES) {
        const uint8_t *group = bytes + i - KVF_RANS_LANES;

        for (int lane = KVF_RANS_LANES - 1; lane >= 0; lane--) {
            at = encode_byte(&states[lane], &table->symbols[group[lane]], at);
        }
    }
    memcpy(encoder->states, states, sizeof(states));
    encoder->at = at;
}

void kvf_rans_encoder_states(const struct kvf_rans_encoder *encoder, uint8_t *to)
{
    memcpy(to, encoder->states, KVF_RANS_STATE_BYTES);
}

/* -------------------------------------------------------------------------------------------------
 * Decode
 */
void kvf_rans_decoder_init(struct kvf_rans_decoder *decoder, const uint8_t *states,
                           const uint8_t *words, size_t words_bytes)
{
    memcpy(decoder->states, states, KVF_RANS_STATE_BYTES);
    decoder->at = words;
    decoder->end = words + words_bytes;
}

/* States may be any 32 bits here: what comes of them stays inside the tables. */
static bool decode_scalar(struct kvf_rans_decoder *decoder,
                          const struct kvf_rans_decode_table *table, uint8_t *bytes_out, size_t n)
{
    const uint8_t *at = decoder->at;

    for (size_t i = 0; i < n; i++) {
        uint32_t x = decoder->states[i % KVF_RANS_LANES];
        uint32_t entry = table->entries[x & (KVF_RANS_ONE - 1)];
        uint16_t word;

        bytes_out[i] = (uint8_t)entry;
        x = (entry >> 8 & (KVF_RANS_ONE - 1)) * (x >> KVF_RANS_BITS) + (entry >> 20);
        memcpy(&word, at, sizeof(word));
        if (x < KVF_RANS_LOW) {
            if (at == decoder->end) {
                return false;
            }
            x = x << 16 | word;
            at += sizeof(word);
        }
        decoder->states[i % KVF_RANS_LANES] = x;
    }
    decoder->at = at;
    return true;
}

/* The same for whole groups with enough words for any of them, so without a look at the end. */
static size_t decode_groups(struct kvf_rans_decoder *decoder,
                            const struct kvf_rans_decode_table *table, uint8_t *bytes_out, size_t n)
{
    const uint8_t *at = decoder->at;
    size_t done = 0;

    while (n - done >= KVF_RANS_LANES && decoder->end - at >= GROUP_BYTES_MAX) {
        for (int lane = 0; lane < KVF_RANS_LANES; lane++) {
            uint32_t x = decoder->states[lane];
            uint32_t entry = table->entries[x & (KVF_RANS_ONE - 1)];
            uint16_t word;
            uint32_t low;

            bytes_out[done + (size_t)lane] = (uint8_t)entry;
            x = (entry >> 8 & (KVF_RANS_ONE - 1)) * (x >> KVF_RANS_BITS) + (entry >> 20);
            memcpy(&word, at, sizeof(word));
            low = x < KVF_RANS_LOW;
            x = x << low * 16 | (word & (0 - low));
            at += low * sizeof(word);
            decoder->states[lane] = x;
        }
        done += KVF_RANS_LANES;
    }
    decoder->at = at;
    return done;
}

bool kvf_rans_decode(struct kvf_rans_decoder *decoder, const struct kvf_rans_decode_table *table,
                     uint8_t *bytes_out, size_t n)
{
    size_t done = 0;

    switch (kvf_codec_simd_level()) {
#if defined(__x86_64__)
    case KVF_SIMD_AVX512:
        done = kvf_rans_decode_avx512(decoder, table, bytes_out, n);
        break;
    case KVF_SIMD_AVX2:
        done = kvf_rans_decode_avx2(decoder, table, bytes_out, n);
        break;
#endif
    default:
        done = decode_groups(decoder, table, bytes_out, n);
        break;
    }
    /* whole groups are done: the next byte is lane 0's */
    return decode_scalar(decoder, table, bytes_out + done, n - done);
}

bool kvf_rans_decoder_is_done(const struct kvf_rans_decoder *decoder)
{
    uint32_t wrong = 0;

    for (int lane = 0; lane < KVF_RANS_LANES; lane++) {
        wrong |= decoder->states[lane] ^ KVF_RANS_LOW;
    }
    return wrong == 0 && decoder->at == decoder->end;
}
