/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_fixture.h: KV pages, records and inputs for codec tests.
 */
#ifndef KVF_TESTS_CODEC_FIXTURE_H
#define KVF_TESTS_CODEC_FIXTURE_H

#include "base/random.h"
#include "codec/codec.h"

/* KV of one chunk in pages of page_tokens: [layer][K or V] apart, each [token][head][dim]. */
struct fixture_kv {
    struct kvf_geometry geometry;
    uint32_t n_tokens;
    size_t k_bytes; /* of one layer */
    size_t v_bytes;
    uint8_t *memory;
    size_t memory_bytes;
    void *k_layers[KVF_LAYERS_MAX];
    void *v_layers[KVF_LAYERS_MAX];
    struct kvf_kv_view view;
};

/* A geometry with these fields; the rest is set to something ordinary. */
struct kvf_geometry fixture_geometry(int dtype, uint32_t n_layers, uint32_t n_heads, uint32_t dim_k,
                                     uint32_t dim_v, uint32_t chunk_tokens);

/* What a profile is for: kind X without V and rotation if it is one for X. */
void fixture_geometry_suit(struct kvf_geometry *geometry, const char *profile);

/* Zeroed pages for n_tokens. */
void fixture_kv_init(struct fixture_kv *kv, const struct kvf_geometry *geometry, uint32_t n_tokens);
void fixture_kv_fini(struct fixture_kv *kv);

/* The address of one vector of K (is_v 0) or V. */
uint8_t *fixture_kv_vector(const struct fixture_kv *kv, int is_v, uint32_t layer, uint32_t head,
                           uint32_t token);

/* A plan with the memory that its calls need. */
struct fixture_codec {
    struct kvf_codec_plan plan;
    struct kvf_record_page *page; /* the payload follows */
    uint8_t *payload;
    size_t payload_capacity;
    size_t record_bytes; /* of the last encode */
    void *workspace;
};

/* Asserts that the plan can be made. */
void fixture_codec_init(struct fixture_codec *codec, const struct kvf_geometry *geometry,
                        const char *profile);
/* The same by a profile of a model's own. */
void fixture_codec_init_table(struct fixture_codec *codec, const struct kvf_geometry *geometry,
                              const struct kvf_profile_table *table, uint32_t head_first);
void fixture_codec_fini(struct fixture_codec *codec);

/* Encode; asserts KVF_OK and that the record passes every check. */
void fixture_encode(struct fixture_codec *codec, const struct fixture_kv *kv, uint32_t token_start);

/* Decode the whole record; asserts KVF_OK. */
void fixture_decode(struct fixture_codec *codec, struct fixture_kv *kv);

/* There and back: pages, the pages that they come back into, and a codec between them. */
struct fixture_trip {
    struct fixture_kv kv;
    struct fixture_kv back;
    struct fixture_codec codec;
};

/* Zeroed pages for n_tokens. */
void fixture_trip_init(struct fixture_trip *trip, const struct kvf_geometry *geometry,
                       const char *profile, uint32_t n_tokens);
/* Encode from the first token of a chunk on, and decode. */
void fixture_trip_run(struct fixture_trip *trip);
void fixture_trip_fini(struct fixture_trip *trip);

/* Use a level of instructions (codec/simd.h) from now on and say so; false if this machine has no
 * such level. For programs that run all their tests at each level. */
bool fixture_use_level(int level);

/* An element to and from fp32, by the conversions of codec_fp.h. */
float fixture_load(int dtype, const uint8_t *vector, uint32_t i);
void fixture_store(int dtype, uint8_t *vector, uint32_t i, float value);
void fixture_load_vector(int dtype, const uint8_t *vector, uint32_t n, float *out);

/* Asserts that a vector has these values, as bits of its type. */
void fixture_assert_vector(int dtype, const uint8_t *vector, uint32_t n, const float *want);

/* n numbers of fp16, as means are stored. */
void fixture_load_means(const uint8_t *stored, uint32_t n, float *out);

/* The code at a position of n codes in planes, bit by bit; sets *at to what follows the planes.
 * Widths of the planes by the width of the codes: the tables of codec_saw.h and codec_tq.h. */
uint8_t fixture_stored_code(const uint8_t **at, uint32_t n, uint32_t bits, uint32_t position);

/* Uniform in [0, 1), and standard normal as the sum of 12 uniform values (variance 1, tails at 6):
 * no library function, the same on every machine. */
float fixture_uniform(struct kvf_random_seeded *random);
float fixture_normal_like(struct kvf_random_seeded *random);

/* Standard normal by Box and Muller, for tests of distortion. */
float fixture_normal(struct kvf_random_seeded *random);

/* Random bits in every byte. */
void fixture_fill_bits(struct fixture_kv *kv, struct kvf_random_seeded *random);

/* Standard normal in every element. */
void fixture_fill_normal(struct fixture_kv *kv, struct kvf_random_seeded *random);

/* What breaks codecs, kind by kind over the vectors: exponents over 24 binades, zeros of both
 * signs, constants, subnormals, one channel 300 times the others, values on the midpoints of a
 * 4-bit and an 8-bit grid, and, 1 in 32, a NaN or an infinity. */
void fixture_fill_hard(struct fixture_kv *kv, struct kvf_random_seeded *random);

/* A large bias a channel and head, and a small signal (fp32: narrower types cannot hold the sum).
 * What additions of centred vectors round away is not small beside what is left after centring, so
 * every change of their order shows. */
void fixture_fill_biased(struct fixture_kv *kv, struct kvf_random_seeded *random);

/* Normal vectors of so much power that its root is as good as in the middle between two fp16
 * numbers (fp32): what the order of additions changes in the last place of a sum of squares then
 * changes the number that is stored. */
void fixture_fill_halfway(struct fixture_kv *kv, struct kvf_random_seeded *random);

/* Squared error and signal of decoded against original, for K or V. */
double fixture_distortion(const struct fixture_kv *original, const struct fixture_kv *decoded,
                          int is_v, uint32_t token_first);

#endif /* KVF_TESTS_CODEC_FIXTURE_H */
