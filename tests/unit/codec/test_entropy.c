/* SPDX-License-Identifier: Apache-2.0
 *
 * test_entropy.c: packed records: the same bytes come back, nothing grows, and bytes of any content
 * end in a status. The golden file is a packed record as it was when the format was fixed:
 *   test_codec_entropy --write
 */
#include "base/crc32c.h"
#include "codec/codec_fp.h"
#include "codec/entropy.h"
#include "codec/entropy_cut.h"
#include "codec/entropy_rans.h"
#include "codec/simd.h"
#include "tests/support/support.h"
#include "tests/unit/codec/codec_fixture.h"
#include "tests/unit/codec/profile_fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum {
    RUN_BYTES = 5000,
    HOSTILE_ROUNDS = 60, /* of each record; fuzz_entropy has more */
};

static struct kvf_random_seeded random_bits;
static bool write_files;

static uint32_t draw(uint32_t n)
{
    return (uint32_t)(kvf_random_seeded_next(&random_bits) % n);
}

/* -------------------------------------------------------------------------------------------------
 * rANS
 */

/* Values whose shares fall by half from one to the next: from two of them to nearly all. */
static void fill_skewed(uint8_t *bytes, size_t n, uint32_t n_values)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t value = 0;

        while (value < n_values - 1 && draw(2) == 0) {
            value++;
        }
        bytes[i] = (uint8_t)(draw(4) == 0 ? draw(n_values) : value);
    }
    bytes[0] = 0;
    bytes[1] = (uint8_t)(n_values - 1);
}

static void count(const uint8_t *bytes, size_t n, uint32_t counts[256])
{
    memset(counts, 0, 256 * sizeof(counts[0]));
    for (size_t i = 0; i < n; i++) {
        counts[bytes[i]]++;
    }
}

static void runs_come_back(void **state)
{
    static const size_t lengths[] = {2, 31, 32, 33, 64, 100, 1000, RUN_BYTES};
    static struct kvf_rans_encode_table encode[2];
    static struct kvf_rans_decode_table decode[2];
    static uint8_t bytes[2][RUN_BYTES], back[RUN_BYTES];
    static uint8_t words[4 * RUN_BYTES + KVF_RANS_SLACK_BYTES];
    uint8_t *end = words + 4 * RUN_BYTES;
    uint8_t states[KVF_RANS_STATE_BYTES];

    (void)state;
    for (uint32_t round = 0; round < 8 * 16; round++) {
        size_t n = lengths[round % 8];
        struct kvf_rans_encoder encoder;
        struct kvf_rans_decoder decoder;

        for (int run = 0; run < 2; run++) {
            uint16_t frequencies[256], read[256];
            uint8_t stored[KVF_RANS_TABLE_BYTES_MAX];
            uint32_t counts[256];
            size_t stored_bytes;

            fill_skewed(bytes[run], n, 2 + draw(255));
            count(bytes[run], n, counts);
            kvf_rans_frequencies(counts, frequencies);
            stored_bytes = kvf_rans_table_write(frequencies, stored);
            assert_int_equal(kvf_rans_table_read(stored, stored_bytes, read), stored_bytes);
            assert_memory_equal(read, frequencies, sizeof(read));
            assert_int_equal(kvf_rans_table_read(stored, stored_bytes - 1, read), 0);
            kvf_rans_encode_table_init(&encode[run], frequencies);
            kvf_rans_decode_table_init(&decode[run], frequencies);
        }
        kvf_rans_encoder_init(&encoder, end);
        kvf_rans_encode(&encoder, &encode[1], bytes[1], n);
        kvf_rans_encode(&encoder, &encode[0], bytes[0], n);
        kvf_rans_encoder_states(&encoder, states);
        kvf_rans_decoder_init(&decoder, states, encoder.at, (size_t)(end - encoder.at));
        for (int run = 0; run < 2; run++) {
            assert_false(kvf_rans_decoder_is_done(&decoder));
            assert_true(kvf_rans_decode(&decoder, &decode[run], back, n));
            assert_memory_equal(back, bytes[run], n);
        }
        assert_true(kvf_rans_decoder_is_done(&decoder));
        if (end > encoder.at) { /* a word is missing */
            kvf_rans_decoder_init(&decoder, states, encoder.at, (size_t)(end - encoder.at) - 2);
            assert_false(kvf_rans_decode(&decoder, &decode[0], back, n) &&
                         kvf_rans_decode(&decoder, &decode[1], back, n) &&
                         kvf_rans_decoder_is_done(&decoder));
        }
    }
}

/* The product with the reciprocal is the quotient wherever an encoder can be. */
static void reciprocals_divide(void **state)
{
    static struct kvf_rans_encode_table table;
    uint16_t frequencies[256] = {0};

    (void)state;
    for (uint32_t frequency = 1; frequency < KVF_RANS_ONE; frequency++) {
        const struct kvf_rans_symbol *symbol = &table.symbols[0];

        frequencies[0] = (uint16_t)frequency;
        frequencies[1] = (uint16_t)(KVF_RANS_ONE - frequency);
        kvf_rans_encode_table_init(&table, frequencies);
        for (uint32_t i = 0; i < 64; i++) {
            uint32_t quotient = i < 32 ? symbol->limit / frequency - 1 - i : draw(1 << 20);
            uint32_t low = quotient * frequency;

            assert_int_equal(low * symbol->reciprocal >> 44, quotient);
            assert_int_equal((low + frequency - 1) * symbol->reciprocal >> 44, quotient);
        }
    }
}

/* A run takes what its table says, and hardly more than its entropy. */
static void runs_take_what_they_cost(void **state)
{
    static struct kvf_rans_encode_table table;
    static uint8_t bytes[RUN_BYTES];
    static uint8_t words[2 * RUN_BYTES];
    uint16_t frequencies[256];
    uint32_t counts[256];
    struct kvf_rans_encoder encoder;
    uint64_t cost = 0;
    double taken;

    (void)state;
    fill_skewed(bytes, RUN_BYTES, 16);
    count(bytes, RUN_BYTES, counts);
    kvf_rans_frequencies(counts, frequencies);
    kvf_rans_encode_table_init(&table, frequencies);
    for (int s = 0; s < 256; s++) {
        cost += kvf_rans_cost(counts[s], frequencies[s]);
    }
    kvf_rans_encoder_init(&encoder, words + sizeof(words));
    kvf_rans_encode(&encoder, &table, bytes, RUN_BYTES);
    /* a lane begins and ends anywhere within a word */
    taken = (double)(words + sizeof(words) - encoder.at);
    assert_true(taken < (double)cost / 8 / 256 * 1.01 + KVF_RANS_LANES * 2);
    assert_true(taken > (double)cost / 8 / 256 * 0.99 - KVF_RANS_LANES * 2);
}

static void broken_tables_are_none(void **state)
{
    uint8_t stored[KVF_RANS_TABLE_BYTES_MAX] = {191, 0, 254};
    uint16_t frequencies[256];

    (void)state;
    assert_int_equal(kvf_rans_table_read(stored, 3, frequencies), 0); /* adds up to 191 */
    stored[0] = 192 + 16;                                             /* all on one value */
    stored[1] = 0;
    stored[2] = 0;
    stored[3] = 254;
    assert_int_equal(kvf_rans_table_read(stored, 4, frequencies), 0);
    stored[0] = 192 + 8; /* 2048 twice, then one value too many */
    stored[1] = 0;
    stored[2] = 192 + 8;
    stored[3] = 0;
    stored[4] = 0;
    stored[5] = 253;
    assert_int_equal(kvf_rans_table_read(stored, 6, frequencies), 6);
    stored[5] = 254;
    assert_int_equal(kvf_rans_table_read(stored, 6, frequencies), 0);
}

/* -------------------------------------------------------------------------------------------------
 * Records
 */
struct bed {
    struct kvf_entropy_packer *packer;
    struct kvf_entropy_unpacker *unpacker;
    uint8_t *record; /* plain */
    uint64_t record_bytes;
    uint8_t *packed;
    uint64_t packed_bytes;
};

static uint64_t padded(uint64_t bytes)
{
    return (bytes + 4095) / 4096 * 4096;
}

static void bed_init(struct bed *bed)
{
    memset(bed, 0, sizeof(*bed));
    bed->packer = kvf_entropy_packer_create();
    bed->unpacker = kvf_entropy_unpacker_create();
    assert_non_null(bed->packer);
    assert_non_null(bed->unpacker);
}

static void bed_fini(struct bed *bed)
{
    kvf_entropy_packer_destroy(bed->packer);
    kvf_entropy_unpacker_destroy(bed->unpacker);
    free(bed->record);
    free(bed->packed);
}

/* Takes a copy, in memory of just its size. */
static void bed_take(struct bed *bed, const void *record, uint64_t record_bytes)
{
    free(bed->record);
    free(bed->packed);
    bed->record = malloc(record_bytes);
    bed->packed = malloc(record_bytes);
    bed->record_bytes = record_bytes;
    bed->packed_bytes = 0;
    assert_non_null(bed->record);
    assert_non_null(bed->packed);
    memcpy(bed->record, record, record_bytes);
}

static int pack(struct bed *bed)
{
    return kvf_entropy_pack(bed->packer, bed->record, bed->packed, &bed->packed_bytes);
}

/* The packed record says what it is and gives the plain one back: elsewhere, and where a drive
 * reads it to. */
static void assert_comes_back(struct bed *bed)
{
    const struct kvf_record_page *page = (const struct kvf_record_page *)(void *)bed->packed;
    uint64_t payload_bytes = bed->packed_bytes - KVF_BLOCK_PAGE_BYTES;
    uint64_t room = padded(bed->record_bytes);
    uint8_t *out = malloc(room);

    assert_non_null(out);
    assert_true(kvf_entropy_is_packed(page));
    assert_int_equal(page->header.total_bytes, bed->packed_bytes);
    assert_int_equal(page->header.payload_crc32c,
                     kvf_crc32c(0, bed->packed + KVF_BLOCK_PAGE_BYTES, payload_bytes));
    assert_int_equal(kvf_entropy_plain_bytes(page, bed->packed_bytes), bed->record_bytes);
    assert_int_equal(kvf_block_check(page, bed->packed_bytes),
                     KVF_ERR_CORRUPT); /* not for clients */
    assert_int_equal(
        kvf_entropy_unpack(bed->unpacker, bed->packed, bed->packed_bytes, out, bed->record_bytes),
        KVF_OK);
    assert_memory_equal(out, bed->record, bed->record_bytes);
    memset(out, 0x5a, room);
    memcpy(out + room - bed->packed_bytes, bed->packed, bed->packed_bytes);
    assert_int_equal(kvf_entropy_unpack(bed->unpacker, out + room - bed->packed_bytes,
                                        bed->packed_bytes, out, bed->record_bytes),
                     KVF_OK);
    assert_memory_equal(out, bed->record, bed->record_bytes);
    free(out);
}

enum fill {
    FILL_NORMAL, /* nearly, and the same on every machine */
    FILL_HARD,
    FILL_BITS,
    FILL_FEW, /* values that are few: all tables are lopsided */
};

static void fill_few(struct fixture_kv *kv)
{
    for (size_t i = 0; i < kv->memory_bytes; i += 2) {
        kv->memory[i] = 0;
        kv->memory[i + 1] = (uint8_t)(draw(16) == 0 ? 0x3f : 0x40);
    }
}

static void fill_normal(struct fixture_kv *kv)
{
    const struct kvf_geometry *geometry = &kv->geometry;
    uint32_t n_vectors = 2u * geometry->n_layers * geometry->n_heads * kv->n_tokens;

    for (uint32_t i = 0; i < n_vectors; i++) {
        uint8_t *vector = fixture_kv_vector(kv, i % 2, i / 2 % geometry->n_layers,
                                            i / 2 / geometry->n_layers % geometry->n_heads,
                                            i / 2 / geometry->n_layers / geometry->n_heads);

        for (uint32_t j = 0; j < (i % 2 == 0 ? geometry->dim_k : geometry->dim_v); j++) {
            fixture_store(geometry->dtype, vector, j, fixture_normal_like(&random_bits));
        }
    }
}

/* A record of n_layers layers of 2 heads. */
static void encode(struct bed *bed, const char *profile, int dtype, uint32_t n_layers, uint32_t dim,
                   uint32_t n_tokens, enum fill fill)
{
    struct kvf_geometry geometry = fixture_geometry(dtype, n_layers, 2, dim, dim, n_tokens);
    struct fixture_codec codec;
    struct fixture_kv kv;

    fixture_geometry_suit(&geometry, profile);
    geometry.sink_tokens = 1;
    fixture_kv_init(&kv, &geometry, n_tokens);
    fixture_codec_init(&codec, &geometry, profile);
    switch (fill) {
    case FILL_NORMAL:
        fill_normal(&kv);
        break;
    case FILL_HARD:
        fixture_fill_hard(&kv, &random_bits);
        break;
    case FILL_BITS:
        fixture_fill_bits(&kv, &random_bits);
        break;
    case FILL_FEW:
        fill_few(&kv);
        break;
    }
    fixture_encode(&codec, &kv, 0);
    bed_take(bed, codec.page, codec.record_bytes);
    fixture_codec_fini(&codec);
    fixture_kv_fini(&kv);
}

/* Normal data: a share that each codec's codes, scales or exponents must give. */
static void every_codec_is_packed(void **state)
{
    static const struct {
        const char *profile;
        int dtype;
        uint32_t layers, dim, tokens;
        double saved_min;
    } cases[] = {
        {"balanced", KVF_DTYPE_BF16, 2, 64, 256, .05}, /* too small for classes */
        {"balanced", KVF_DTYPE_BF16, 6, 128, 256, .07},
        {"balanced", KVF_DTYPE_F16, 3, 80, 250, .05},
        {"saw8", KVF_DTYPE_BF16, 2, 128, 256, .032},
        {"saw6", KVF_DTYPE_BF16, 2, 128, 256, .032},
        {"saw5", KVF_DTYPE_BF16, 3, 64, 256, .032},
        {"saw3", KVF_DTYPE_BF16, 3, 64, 256, .05},
        {"saw2", KVF_DTYPE_BF16, 3, 128, 256, .05},
        {"tq4", KVF_DTYPE_BF16, 2, 128, 256, .05},
        {"tq3.5", KVF_DTYPE_BF16, 4, 128, 256, .032},
        {"kivi4-g32", KVF_DTYPE_BF16, 3, 64, 256, .05},
        {"kivi2-g32", KVF_DTYPE_BF16, 3, 64, 256, .1},
        {"dense", KVF_DTYPE_BF16, 6, 64, 256, .032},
        {"exact", KVF_DTYPE_BF16, 2, 128, 256, .09},
        {"exact", KVF_DTYPE_F32, 1, 64, 256, .034},
        {"x4", KVF_DTYPE_BF16, 6, 128, 256, .05},
        {"x3", KVF_DTYPE_BF16, 6, 128, 256, .04},
        {"xcl3", KVF_DTYPE_BF16, 8, 128, 256, .04},
        {"xgcl2", KVF_DTYPE_BF16, 8, 128, 256, .04},
        {"raw", KVF_DTYPE_BF16, 2, 64, 256, .25},
        {"raw", KVF_DTYPE_F16, 2, 64, 256, .1},
        {"raw", KVF_DTYPE_F32, 2, 64, 256, .1},
    };
    struct bed bed;

    (void)state;
    bed_init(&bed);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        double saved;

        encode(&bed, cases[i].profile, cases[i].dtype, cases[i].layers, cases[i].dim,
               cases[i].tokens, FILL_NORMAL);
        if (pack(&bed) != KVF_OK) {
            fail_msg("%s is not packed", cases[i].profile);
        }
        assert_comes_back(&bed);
        saved = 1 - (double)bed.packed_bytes / (double)bed.record_bytes;
        if (saved < cases[i].saved_min) {
            fail_msg("%s: %.4f is saved", cases[i].profile, saved);
        }
    }
    bed_fini(&bed);
}

/* A profile of a file has many kinds of layers, and the page names the first one only. */
static void blocks_of_many_kinds_are_packed(void **state)
{
    static const uint8_t bits[] = {8, 6, 5, 4, 3, 2};
    struct kvf_profile_table *table = profile_fixture_create(16, 2, 64, 64);
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 16, 2, 64, 64, 256);
    struct fixture_codec codec;
    struct fixture_kv kv;
    struct bed bed;

    (void)state;
    for (uint32_t i = 0; i < 15; i++) {
        uint8_t flags = i % 2 == 0 ? KVF_TENSOR_CENTER : 0;
        uint8_t number = i < 12
                             ? profile_fixture_add(table, profile_fixture_saw(bits[i % 6], flags),
                                                   profile_fixture_saw(bits[i / 2], 0))
                             : profile_fixture_add(table, profile_fixture_tq(4, flags),
                                                   profile_fixture_tq((uint8_t)(2 + i % 3), 0));

        table->layer_kinds[i] = number;
    }
    table->layer_kinds[15] = 0;
    profile_fixture_fill(table, &random_bits);
    bed_init(&bed);
    fixture_kv_init(&kv, &geometry, 256);
    fixture_codec_init_table(&codec, &geometry, table, 0);
    fill_normal(&kv);
    fixture_encode(&codec, &kv, 0);
    bed_take(&bed, codec.page, codec.record_bytes);
    assert_int_equal(pack(&bed), KVF_OK);
    assert_comes_back(&bed);
    assert_true((double)bed.packed_bytes < 0.96 * (double)bed.record_bytes);
    fixture_codec_fini(&codec);
    fixture_kv_fini(&kv);
    kvf_profile_table_destroy(table);
    bed_fini(&bed);
}

/* Whatever the content: smaller by a page and 1/32, or left alone. */
static void nothing_grows(void **state)
{
    static const char *const profiles[] = {"balanced", "saw8", "tq2",       "max",
                                           "exact",    "raw",  "kivi2-g128"};
    struct bed bed;
    uint32_t packed = 0;

    (void)state;
    bed_init(&bed);
    for (uint32_t i = 0; i < 7 * 8; i++) {
        int status;

        encode(&bed, profiles[i % 7], KVF_DTYPE_BF16, 1 + i % 3, 64, 64 + draw(193),
               (enum fill)(i / 7 % 4));
        status = pack(&bed);
        assert_true(status == KVF_OK || status == KVF_ERR_NO_SPACE);
        if (status == KVF_OK) {
            assert_true(bed.packed_bytes + KVF_ENTROPY_ALIGN_BYTES <= padded(bed.record_bytes));
            assert_true(bed.packed_bytes + bed.record_bytes / 32 <= padded(bed.record_bytes));
            assert_comes_back(&bed);
            packed++;
        }
    }
    assert_true(packed > 14);
    encode(&bed, "raw", KVF_DTYPE_BF16, 2, 64, 256, FILL_BITS);
    assert_int_equal(pack(&bed), KVF_ERR_NO_SPACE);
    bed_fini(&bed);
}

/* Opaque bytes: pairs of unlike bytes, text, one value, noise. */
static void opaque_bytes_are_packed_if_they_can(void **state)
{
    enum {
        BYTES = 200001
    };
    uint8_t *record = calloc(1, KVF_BLOCK_PAGE_BYTES + BYTES);
    uint8_t *payload = record + KVF_BLOCK_PAGE_BYTES;
    struct bed bed;

    (void)state;
    assert_non_null(record);
    bed_init(&bed);
    for (int kind = 0; kind < 4; kind++) {
        for (size_t i = 0; i < BYTES; i++) {
            static const char text[] = "what an engine knows about a prompt, line ";

            payload[i] = kind == 0 ? (uint8_t)(i % 2 == 0 ? draw(256) : 60 + draw(8))
                         : kind == 1
                             ? (uint8_t)(i % 50 < 42 ? (uint8_t)text[i % 50] : '0' + draw(10))
                         : kind == 2 ? 7
                                     : (uint8_t)draw(256);
        }
        assert_int_equal(
            kvf_block_describe_bytes((struct kvf_record_page *)(void *)record, payload, BYTES),
            KVF_OK);
        bed_take(&bed, record, KVF_BLOCK_PAGE_BYTES + BYTES);
        assert_int_equal(pack(&bed), kind < 3 ? KVF_OK : KVF_ERR_NO_SPACE);
        if (kind < 3) {
            assert_true(bed.packed_bytes < (kind == 0 ? 145000 : kind == 1 ? 60000 : 8193));
            assert_comes_back(&bed);
            assert_int_equal(
                kvf_entropy_pack(bed.packer, bed.packed, bed.record, &bed.record_bytes),
                KVF_ERR_INVALID); /* once is enough */
        }
    }
    free(record);
    bed_fini(&bed);
}

/* Vectors whose codes gather at different levels are sorted, whatever lo and scale are. */
static void classes_tell_where_codes_gather(void **state)
{
    static const struct {
        float lo, scale;
        uint32_t class;
    } cases[] = {
        {-5.25f, 1, 0}, {-5.5f, 1, 1}, {-6.75f, 1, 2}, {-7.5f, 1, 3}, {-8.75f, 1, 4}, {-9.5f, 1, 5},
        {-99, 1, 5},    {1, 1, 0},     {0, 0, 5},      {-1, 0, 5},    {1, 0, 0},      {0, 1, 0},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        uint16_t meta[2] = {kvf_f16_from_f32(cases[i].lo), kvf_f16_from_f32(cases[i].scale)};

        assert_int_equal(kvf_entropy_class((const uint8_t *)meta), cases[i].class);
    }
    assert_int_equal(kvf_entropy_class((const uint8_t[]){0, 0xff, 0, 0x7e}), 0); /* an escape */
}

/* -------------------------------------------------------------------------------------------------
 * Hostile bytes
 */
static void assert_ends_in_a_status(struct bed *bed, const uint8_t *packed, uint64_t packed_bytes,
                                    bool is_same)
{
    uint8_t *out = malloc(bed->record_bytes);
    int status;

    assert_non_null(out);
    status = kvf_entropy_unpack(bed->unpacker, packed, packed_bytes, out, bed->record_bytes);
    if (status == KVF_OK) {
        /* what is changed may be what nobody reads; what comes out is never anything else */
        assert_memory_equal(out + KVF_BLOCK_PAGE_BYTES, bed->record + KVF_BLOCK_PAGE_BYTES,
                            bed->record_bytes - KVF_BLOCK_PAGE_BYTES);
    } else {
        assert_int_equal(status, KVF_ERR_CORRUPT);
        assert_false(is_same);
    }
    free(out);
}

static void hostile_bytes_end_in_a_status(void **state)
{
    static const char *const profiles[] = {"balanced", "exact", "raw", "saw3"};
    struct bed bed;

    (void)state;
    bed_init(&bed);
    for (int i = 0; i < 4; i++) {
        uint8_t *copy;

        encode(&bed, profiles[i], KVF_DTYPE_BF16, i == 0 ? 8 : 4, 64, 256, FILL_NORMAL);
        assert_int_equal(pack(&bed), KVF_OK);
        assert_ends_in_a_status(&bed, bed.packed, bed.packed_bytes, true);
        copy = malloc(bed.packed_bytes);
        assert_non_null(copy);
        for (int round = 0; round < HOSTILE_ROUNDS; round++) {
            /* the directory is where it hurts */
            uint64_t span = draw(4) == 0 ? bed.packed_bytes - KVF_BLOCK_PAGE_BYTES : 600;
            uint64_t at = KVF_BLOCK_PAGE_BYTES + draw((uint32_t)span);

            memcpy(copy, bed.packed, bed.packed_bytes);
            copy[at] = draw(3) == 0 ? (uint8_t)draw(256) : (uint8_t)(copy[at] ^ 1u << draw(8));
            assert_ends_in_a_status(&bed, copy, bed.packed_bytes, false);
        }
        for (uint64_t bytes = 0; bytes < bed.packed_bytes; bytes += 4096) {
            uint8_t *part = malloc(bytes + 1);

            assert_non_null(part);
            memcpy(part, bed.packed, bytes);
            if (bytes >= KVF_BLOCK_PAGE_BYTES) {
                ((struct kvf_record_page *)(void *)part)->header.total_bytes = bytes;
            }
            assert_ends_in_a_status(&bed, part, bytes, false);
            free(part);
        }
        free(copy);
    }
    bed_fini(&bed);
}

/* A page that says what cannot be is none. */
static void pages_that_lie_are_refused(void **state)
{
    struct kvf_record_page *page;
    struct bed bed;

    (void)state;
    bed_init(&bed);
    encode(&bed, "exact", KVF_DTYPE_BF16, 2, 64, 256, FILL_NORMAL);
    assert_int_equal(kvf_entropy_plain_bytes((const struct kvf_record_page *)(void *)bed.record,
                                             bed.record_bytes),
                     0);
    assert_int_equal(pack(&bed), KVF_OK);
    page = (struct kvf_record_page *)(void *)bed.packed;
    assert_int_equal(kvf_entropy_plain_bytes(page, bed.packed_bytes - 4096), 0);
    page->header.n_streams = 0;
    assert_int_equal(kvf_entropy_plain_bytes(page, bed.packed_bytes), 0);
    page->header.n_streams = 1;
    page->header.entropy_id = KVF_ENTROPY_RANS + 1;
    assert_int_equal(kvf_entropy_plain_bytes(page, bed.packed_bytes), 0);
    page->header.entropy_id = KVF_ENTROPY_RANS;
    page->header.plain_bytes = (uint32_t)bed.packed_bytes;
    assert_int_equal(kvf_entropy_plain_bytes(page, bed.packed_bytes), 0);
    page->header.plain_bytes = UINT32_MAX;
    assert_int_equal(kvf_entropy_plain_bytes(page, bed.packed_bytes), 0);
    bed_fini(&bed);
}

/* -------------------------------------------------------------------------------------------------
 * Golden bytes
 */
static const struct {
    const char *profile;
    uint32_t layers, dim;
    enum fill fill;
    uint32_t packed_crc32c;
} goldens[] = {
    {"balanced", 2, 64, FILL_NORMAL, 0xc274c0c2}, {"balanced", 8, 64, FILL_NORMAL, 0xd1d81cb8},
    {"saw3", 3, 64, FILL_NORMAL, 0x439ffa84},     {"tq2.5", 4, 128, FILL_NORMAL, 0x051c56ae},
    {"kivi2-g64", 2, 64, FILL_HARD, 0x3ffbeb00},  {"exact", 2, 64, FILL_FEW, 0xbf4e76a3},
};

static void packed_records_are_the_golden_ones(void **state)
{
    static const char path[] = KVF_GOLDEN_DIR "/packed-exact-bf16-64.bin";
    struct bed bed;
    uint8_t *want;
    size_t want_bytes;

    (void)state;
    bed_init(&bed);
    for (size_t i = 0; i < sizeof(goldens) / sizeof(goldens[0]); i++) {
        uint32_t crc;

        kvf_random_seeded_init(&random_bits, 20240229);
        encode(&bed, goldens[i].profile, KVF_DTYPE_BF16, goldens[i].layers, goldens[i].dim, 256,
               goldens[i].fill);
        assert_int_equal(pack(&bed), KVF_OK);
        crc = kvf_crc32c(0, bed.packed, bed.packed_bytes);
        if (write_files) {
            print_message("%s: packed_crc32c 0x%08x\n", goldens[i].profile, (unsigned int)crc);
        } else if (crc != goldens[i].packed_crc32c) {
            fail_msg("%s: packed to 0x%08x", goldens[i].profile, (unsigned int)crc);
        }
    }
    if (write_files) {
        kvf_test_file_write(path, bed.packed, bed.packed_bytes);
    }
    want = (uint8_t *)kvf_test_file_read(path, &want_bytes);
    assert_non_null(want);
    assert_int_equal(want_bytes, bed.packed_bytes);
    assert_memory_equal(want, bed.packed, want_bytes);
    assert_ends_in_a_status(&bed, want, want_bytes, true);
    free(want);
    bed_fini(&bed);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest at_each_level[] = {
        cmocka_unit_test(runs_come_back),
        cmocka_unit_test(runs_take_what_they_cost),
        cmocka_unit_test(opaque_bytes_are_packed_if_they_can),
        cmocka_unit_test(packed_records_are_the_golden_ones),
    };
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reciprocals_divide),
        cmocka_unit_test(broken_tables_are_none),
        cmocka_unit_test(every_codec_is_packed),
        cmocka_unit_test(blocks_of_many_kinds_are_packed),
        cmocka_unit_test(nothing_grows),
        cmocka_unit_test(classes_tell_where_codes_gather),
        cmocka_unit_test(hostile_bytes_end_in_a_status),
        cmocka_unit_test(pages_that_lie_are_refused),
    };
    uint64_t seed = kvf_test_seed();
    int failures = 0;

    write_files = argc == 2 && strcmp(argv[1], "--write") == 0;
    for (int level = 0; fixture_use_level(level); level++) {
        kvf_random_seeded_init(&random_bits, seed);
        failures += cmocka_run_group_tests(at_each_level, NULL, NULL);
    }
    return failures + cmocka_run_group_tests(tests, NULL, NULL);
}
