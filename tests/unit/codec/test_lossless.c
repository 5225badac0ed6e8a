/* SPDX-License-Identifier: Apache-2.0
 *
 * test_lossless.c: profiles raw and exact give back every bit, and exact is never larger than raw.
 */
#include "codec/codec_exact.h"
#include "tests/support/support.h"
#include "tests/unit/codec/codec_fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct kvf_random_seeded random_bits;

static void assert_round_trip(const struct fixture_kv *kv, const char *profile)
{
    struct fixture_codec codec;
    struct fixture_kv back;
    fixture_codec_init(&codec, &kv->geometry, profile);
    assert_true(codec.plan.lossless);
    fixture_encode(&codec, kv, 0);
    fixture_kv_init(&back, &kv->geometry, kv->n_tokens);
    fixture_decode(&codec, &back);
    for (uint32_t layer = 0; layer < kv->geometry.n_layers; layer++) {
        /* pages have room for more tokens than the block: compare vector by vector */
        for (uint32_t head = 0; head < kv->geometry.n_heads; head++) {
            for (uint32_t token = 0; token < kv->n_tokens; token++) {
                size_t element = kvf_dtype_bytes(kv->geometry.dtype);
                assert_memory_equal(fixture_kv_vector(&back, 0, layer, head, token),
                                    fixture_kv_vector(kv, 0, layer, head, token),
                                    kv->geometry.dim_k * element);
                assert_memory_equal(fixture_kv_vector(&back, 1, layer, head, token),
                                    fixture_kv_vector(kv, 1, layer, head, token),
                                    kv->geometry.dim_v * element);
            }
        }
    }
    struct kvf_codec_plan raw;
    assert_int_equal(kvf_codec_plan_init(&raw, &kv->geometry, "raw"), KVF_OK);
    assert_true(codec.record_bytes - KVF_BLOCK_PAGE_BYTES <=
                kvf_codec_plan_payload_bytes(&raw, kv->n_tokens));
    fixture_kv_fini(&back);
    fixture_codec_fini(&codec);
}

static void every_bit_pattern_comes_back(void **state)
{
    (void)state;
    static const struct {
        uint32_t layers, heads, dim_k, dim_v, tokens;
    } shapes[] = {
        {1, 1, 1, 0, 1},    {2, 3, 64, 64, 17},  {1, 2, 128, 64, 130}, {1, 1, 1024, 7, 3},
        {3, 1, 80, 96, 50}, {1, 1024, 1, 1, 20}, {2, 1, 512, 64, 33},  {1, 1, 999, 1, 40},
    };
    static const char *const profiles[] = {"raw", "exact"};
    for (int dtype = KVF_DTYPE_BF16; dtype <= KVF_DTYPE_U8; dtype++) {
        for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
            struct kvf_geometry geometry = fixture_geometry(dtype, shapes[i].layers,
                                                            shapes[i].heads, shapes[i].dim_k,
                                                            shapes[i].dim_v, shapes[i].tokens);
            struct fixture_kv kv;
            fixture_kv_init(&kv, &geometry, shapes[i].tokens);
            for (int p = 0; p < 2; p++) {
                fixture_fill_bits(&kv, &random_bits);
                assert_round_trip(&kv, profiles[p]);
                if (dtype != KVF_DTYPE_U8) {
                    fixture_fill_normal(&kv, &random_bits);
                    assert_round_trip(&kv, profiles[p]);
                    fixture_fill_hard(&kv, &random_bits);
                    assert_round_trip(&kv, profiles[p]);
                }
            }
            fixture_kv_fini(&kv);
        }
    }
}

/* Each of the 65,536 bf16 values once. */
static void all_bf16_values_come_back(void **state)
{
    (void)state;
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 1, 2, 128, 0, 256);
    struct fixture_kv kv;
    fixture_kv_init(&kv, &geometry, 256);
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        uint16_t half = (uint16_t)bits;
        memcpy(kv.memory + 2 * bits, &half, sizeof(half));
    }
    assert_round_trip(&kv, "exact");
    fixture_kv_fini(&kv);
}

/* The layer's nibble says how each tensor is stored: recoded where it pays, raw where it does
 * not. */
static void what_does_not_pay_is_stored_raw(void **state)
{
    (void)state;
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 3, 2, 64, 64, 64);
    struct fixture_kv kv;
    fixture_kv_init(&kv, &geometry, 64);
    fixture_fill_normal(&kv, &random_bits);
    kvf_random_seeded_ops.fill(&random_bits, kv.k_layers[1], kv.k_bytes);
    kvf_random_seeded_ops.fill(&random_bits, kv.v_layers[2], kv.v_bytes);
    struct fixture_codec codec;
    fixture_codec_init(&codec, &geometry, "exact");
    fixture_encode(&codec, &kv, 0);
    assert_int_equal(codec.page->layer_bits[0], 0xcc);
    assert_int_equal(codec.page->layer_bits[1], 0xc0);
    assert_int_equal(codec.page->layer_bits[2], 0x0c);
    fixture_codec_fini(&codec);
    assert_round_trip(&kv, "exact");
    fixture_kv_fini(&kv);
}

/* 12 bits, a directory entry of 4 bytes and the rare escapes of Gaussian data a 1,024 elements. */
static void gaussian_values_take_12_bits(void **state)
{
    (void)state;
    static const struct {
        int dtype;
        double bits;
    } expected[] = {{KVF_DTYPE_BF16, 12.1}, {KVF_DTYPE_F32, 28.1}};
    for (int i = 0; i < 2; i++) {
        struct kvf_geometry geometry = fixture_geometry(expected[i].dtype, 2, 4, 128, 128, 256);
        struct fixture_kv kv;
        fixture_kv_init(&kv, &geometry, 256);
        fixture_fill_normal(&kv, &random_bits);
        struct fixture_codec codec;
        fixture_codec_init(&codec, &geometry, "exact");
        fixture_encode(&codec, &kv, 0);
        double values = 2.0 * 2.0 * 4.0 * 256.0 * 128.0;
        double bits = (double)(codec.record_bytes - KVF_BLOCK_PAGE_BYTES) * 8.0 / values;
        assert_true(bits > expected[i].bits - 0.1 && bits <= expected[i].bits);
        fixture_codec_fini(&codec);
        fixture_kv_fini(&kv);
    }
}

/* A few chunks full of rare exponents cost one byte an element more, not three bytes an escape. */
static void chunks_of_escapes_are_stored_uncoded(void **state)
{
    (void)state;
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 1, 1, 128, 0, 256);
    struct fixture_kv kv;
    fixture_kv_init(&kv, &geometry, 256);
    fixture_fill_normal(&kv, &random_bits);
    for (uint32_t token = 64; token < 72; token++) {
        kvf_random_seeded_ops.fill(&random_bits, fixture_kv_vector(&kv, 0, 0, 0, token), 256);
    }
    struct fixture_codec codec;
    fixture_codec_init(&codec, &geometry, "exact");
    fixture_encode(&codec, &kv, 0);
    uint32_t directory[33];
    memcpy(directory, codec.payload + KVF_EXACT_EXPONENTS, sizeof(directory));
    for (int chunk = 0; chunk < 32; chunk++) {
        bool uncoded = (directory[chunk] & KVF_EXACT_CHUNK_UNCODED) != 0;
        assert_int_equal(uncoded, chunk == 8);
    }
    assert_int_equal(directory[9] - (directory[8] & ~KVF_EXACT_CHUNK_UNCODED), 1024);
    fixture_codec_fini(&codec);
    assert_round_trip(&kv, "exact");
    fixture_kv_fini(&kv);
}

/* Any bytes in the parts: an answer, and with a sanitizer no access outside. */
static void damaged_strips_are_survived(void **state)
{
    (void)state;
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 2, 2, 80, 64, 50);
    struct fixture_kv kv;
    fixture_kv_init(&kv, &geometry, 50);
    fixture_fill_hard(&kv, &random_bits);
    struct fixture_codec codec;
    fixture_codec_init(&codec, &geometry, "exact");
    fixture_encode(&codec, &kv, 0);
    uint8_t *exact_size = malloc(codec.record_bytes);
    assert_non_null(exact_size);
    int refused = 0;
    for (int round = 0; round < 1500; round++) {
        memcpy(exact_size, codec.page, codec.record_bytes);
        uint64_t bits = kvf_random_seeded_next(&random_bits);
        /* mostly in the directories, where the lengths are */
        uint32_t strip = codec.page->layer_offsets[bits % 2] * KVF_BLOCK_ALIGN_BYTES;
        size_t at = bits % 8 < 6 ? strip + (bits >> 8) % 128
                                 : (bits >> 8) % (codec.record_bytes - KVF_BLOCK_PAGE_BYTES);
        exact_size[KVF_BLOCK_PAGE_BYTES + at] ^= (uint8_t)(bits >> 48 | 1);
        int status = kvf_block_decode(&codec.plan, exact_size, codec.record_bytes, 0, 0, 0, 0,
                                      &kv.view, codec.workspace);
        assert_true(status == KVF_OK || status == KVF_ERR_CORRUPT);
        refused += status != KVF_OK;
    }
    assert_true(refused > 0);
    free(exact_size);
    fixture_codec_fini(&codec);
    fixture_kv_fini(&kv);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_bit_pattern_comes_back),
        cmocka_unit_test(all_bf16_values_come_back),
        cmocka_unit_test(what_does_not_pay_is_stored_raw),
        cmocka_unit_test(gaussian_values_take_12_bits),
        cmocka_unit_test(chunks_of_escapes_are_stored_uncoded),
        cmocka_unit_test(damaged_strips_are_survived),
    };
    kvf_random_seeded_init(&random_bits, kvf_test_seed());
    int failures = 0;
    for (int level = 0; fixture_use_level(level); level++) {
        failures += cmocka_run_group_tests(tests, NULL, NULL);
    }
    return failures;
}
