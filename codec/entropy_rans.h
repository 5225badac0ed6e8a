/* SPDX-License-Identifier: Apache-2.0
 *
 * entropy_rans.h: bytes to about as many bits as they carry: range coding with asymmetric numeral
 * systems ("rANS"), 32 lanes, probabilities of 12 bits.
 *
 * A lane is a number x in [2^16, 2^32). Byte number i of a run belongs to lane i % 32, and a run
 * begins with lane 0. A table gives each byte value s a frequency f(s) out of 4096 and a start
 * c(s), the sum of the frequencies of lower values. Decoding, byte by byte:
 *
 *     slot = x & 4095;  s = the value with c(s) <= slot < c(s) + f(s)
 *     x = f(s) (x >> 12) + slot - c(s);  if x < 2^16: x = x << 16 | the next word (u16)
 *
 * All lanes take their words from one sequence, and several runs with tables of their own may
 * follow each other in it. The encoder goes backwards, and ends with the states that the decoder
 * begins with; the decoder ends with 2^16 in every lane. A value with all 4096 has no need of any
 * of this, so no table has one.
 *
 * Stored form of a table: for each value in ascending order a byte 1..191: that frequency; 192 + h,
 * l: 256 h + l; 0, n: n + 1 values with frequency 0.
 */
#ifndef KVF_CODEC_ENTROPY_RANS_H
#define KVF_CODEC_ENTROPY_RANS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum kvf_rans_limits {
    KVF_RANS_LANES = 32,
    KVF_RANS_BITS = 12,
    KVF_RANS_ONE = 1 << KVF_RANS_BITS,
    KVF_RANS_LOW = 1 << 16,
    KVF_RANS_STATE_BYTES = KVF_RANS_LANES * 4,
    KVF_RANS_TABLE_BYTES_MAX = 512, /* stored */
    KVF_RANS_SLACK_BYTES = 64,      /* that may be read behind the words */
};

/* A value as the encoder needs it. */
struct kvf_rans_symbol {
    uint64_t reciprocal; /* floor(2^44 / frequency) + 1 */
    uint32_t limit;      /* frequency << 20: from here on a word has to go */
    uint16_t start;
    uint16_t rest; /* 4096 - frequency */
};

struct kvf_rans_encode_table {
    struct kvf_rans_symbol symbols[256];
};

/* By slot: value in bits 0-7, its frequency in bits 8-19, slot - start in bits 20-31. */
struct kvf_rans_decode_table {
    uint32_t entries[KVF_RANS_ONE];
};

struct kvf_rans_encoder {
    uint32_t states[KVF_RANS_LANES];
    uint8_t *at; /* the words so far begin here */
};

struct kvf_rans_decoder {
    uint32_t states[KVF_RANS_LANES];
    const uint8_t *at;  /* the next word */
    const uint8_t *end; /* of the words; KVF_RANS_SLACK_BYTES more can be read */
};

/* Frequencies out of counts, of which two or more are not 0. */
void kvf_rans_frequencies(const uint32_t counts[256], uint16_t frequencies_out[256]);

/* 1/256 bits that so many occurrences of a value of this frequency take, to within 1 %. */
uint64_t kvf_rans_cost(uint32_t count, uint16_t frequency);

/* Stored form. Returns the bytes written, KVF_RANS_TABLE_BYTES_MAX at most. */
size_t kvf_rans_table_write(const uint16_t frequencies[256], uint8_t *to);
/* Returns the bytes read of at most bytes; 0: there is no table there. */
size_t kvf_rans_table_read(const uint8_t *from, size_t bytes, uint16_t frequencies_out[256]);

void kvf_rans_encode_table_init(struct kvf_rans_encode_table *table,
                                const uint16_t frequencies[256]);
void kvf_rans_decode_table_init(struct kvf_rans_decode_table *table,
                                const uint16_t frequencies[256]);

/* Words are written downwards from end; n bytes take at most 2 n bytes of them. */
void kvf_rans_encoder_init(struct kvf_rans_encoder *encoder, uint8_t *end);
/* The run that comes before those already encoded. Every value must have a frequency. */
void kvf_rans_encode(struct kvf_rans_encoder *encoder, const struct kvf_rans_encode_table *table,
                     const uint8_t *bytes, size_t n);
/* What the decoder begins with. */
void kvf_rans_encoder_states(const struct kvf_rans_encoder *encoder, uint8_t *to);

/* states of KVF_RANS_STATE_BYTES. The words are not trusted; they must not change meanwhile. */
void kvf_rans_decoder_init(struct kvf_rans_decoder *decoder, const uint8_t *states,
                           const uint8_t *words, size_t words_bytes);
/* The next run of n bytes. False: the words have come to an end. */
bool kvf_rans_decode(struct kvf_rans_decoder *decoder, const struct kvf_rans_decode_table *table,
                     uint8_t *bytes_out, size_t n);
/* Are all words used up, and all states what an encoder began with? */
bool kvf_rans_decoder_is_done(const struct kvf_rans_decoder *decoder);

/* Whole groups of 32 bytes, as long as 64 bytes of words are left; returns how many bytes came out.
 * One for each kind of processor; the rest is left to scalar code. */
size_t kvf_rans_decode_avx2(struct kvf_rans_decoder *decoder,
                            const struct kvf_rans_decode_table *table, uint8_t *bytes_out,
                            size_t n);
size_t kvf_rans_decode_avx512(struct kvf_rans_decoder *decoder,
                              const struct kvf_rans_decode_table *table, uint8_t *bytes_out,
                              size_t n);

#endif /* KVF_CODEC_ENTROPY_RANS_H */
