/* SPDX-License-Identifier: Apache-2.0
 *
 * test_block_gpu.c: the two ends that kernels need from block.c: the page of a block that they
 * encoded, and the list of parts and sections of a record that they are to decode.
 */
#include "codec/codec_gpu.h"
#include "codec/codec_layout.h"
#include "tests/support/support.h"
#include "tests/unit/codec/codec_fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char *const profiles[] = {"raw", "exact", "safe", "balanced"};
enum {
    N_PROFILES = sizeof(profiles) / sizeof(profiles[0]),
    LAYERS = 3,
    HEADS = 2,
    CHUNK = 160,
};

static uint64_t seed;

struct block {
    struct kvf_geometry geometry;
    struct fixture_kv kv;
    struct fixture_codec codec;
};

/* A record of n_tokens at token_start, with escapes here and there. */
static void block_init(struct block *block, const char *profile, uint32_t n_tokens,
                       uint32_t token_start, struct kvf_random_seeded *random)
{
    block->geometry = fixture_geometry(KVF_DTYPE_BF16, LAYERS, HEADS, 128, 64, CHUNK);
    block->geometry.sink_tokens = 4;
    fixture_kv_init(&block->kv, &block->geometry, n_tokens);
    fixture_fill_normal(&block->kv, random);
    for (uint32_t i = 0; i < 3; i++) {
        fixture_store(
            KVF_DTYPE_BF16,
            fixture_kv_vector(&block->kv, (int)(i % 2), i % LAYERS, i % HEADS, n_tokens - 1 - i), i,
            __builtin_inff());
    }
    fixture_codec_init(&block->codec, &block->geometry, profile);
    fixture_encode(&block->codec, &block->kv, token_start);
}

static void block_fini(struct block *block)
{
    fixture_codec_fini(&block->codec);
    fixture_kv_fini(&block->kv);
}

/* What kernels would say of the record that block_init made. */
static struct kvf_gpu_result result_of(const struct kvf_record_page *page, bool with_layers)
{
    struct kvf_gpu_result result = {
        .n_escapes = page->header.n_escapes,
        .raw_area_offset = page->header.raw_area_offset,
        .raw_area_bytes = page->header.raw_area_bytes,
        .flags = KVF_GPU_DONE,
    };
    if (with_layers) {
        memcpy(result.layer_offsets, page->layer_offsets, sizeof(result.layer_offsets));
        memcpy(result.layer_bits, page->layer_bits, sizeof(result.layer_bits));
    }
    return result;
}

static void test_page_equals_that_of_the_c_encoder(void **state)
{
    struct kvf_random_seeded random;
    (void)state;
    kvf_random_seeded_init(&random, seed);
    for (uint32_t i = 0; i < 2 * N_PROFILES; i++) {
        const uint32_t lengths[] = {1, 16, 127, 128, CHUNK};
        for (uint32_t l = 0; l < 5; l++) {
            struct block block;
            struct kvf_record_page page;
            uint32_t token_start = i < N_PROFILES ? 0 : 3 * CHUNK;
            /* three vectors are given a value that no codec takes, so 16 tokens at least */
            uint32_t n_tokens = lengths[l] < 3 ? 3 : lengths[l];
            block_init(&block, profiles[i % N_PROFILES], n_tokens, token_start, &random);
            const struct kvf_record_page *want = block.codec.page;
            bool is_fixed = kvf_codec_plan_is_fixed(&block.codec.plan) &&
                            want->header.raw_area_offset * 128u ==
                                kvf_codec_plan_payload_bytes(&block.codec.plan, n_tokens);
            if (!is_fixed && kvf_codec_plan_is_fixed(&block.codec.plan)) {
                block_fini(&block); /* a strip became raw: kernels ask for a redo then */
                continue;
            }
            struct kvf_gpu_result result = result_of(want, !is_fixed);
            assert_int_equal(kvf_block_describe_gpu(&block.codec.plan, token_start, n_tokens,
                                                    &result, want->header.payload_crc32c, &page),
                             KVF_OK);
            assert_memory_equal(&page, want, sizeof(page));
            assert_int_equal(
                kvf_block_describe_gpu(&block.codec.plan, token_start, n_tokens, &result, 0, &page),
                KVF_OK);
            assert_int_equal(page.header.payload_crc32c, 0);
            block_fini(&block);
        }
    }
}

static void test_results_of_no_finished_encode_are_refused(void **state)
{
    struct kvf_random_seeded random;
    struct block block;
    struct kvf_record_page page;
    (void)state;
    kvf_random_seeded_init(&random, seed);
    block_init(&block, "exact", CHUNK, 0, &random);
    const struct kvf_codec_plan *plan = &block.codec.plan;
    struct kvf_gpu_result good = result_of(block.codec.page, true);
    struct kvf_gpu_result bad = good;
    bad.flags = 0;
    assert_int_equal(kvf_block_describe_gpu(plan, 0, CHUNK, &bad, 0, &page), KVF_ERR_CORRUPT);
    bad.flags = KVF_GPU_DONE | KVF_GPU_REDO;
    assert_int_equal(kvf_block_describe_gpu(plan, 0, CHUNK, &bad, 0, &page), KVF_ERR_CORRUPT);
    bad = good;
    bad.layer_offsets[1] = bad.layer_offsets[2] + 1;
    assert_int_equal(kvf_block_describe_gpu(plan, 0, CHUNK, &bad, 0, &page), KVF_ERR_CORRUPT);
    bad = good;
    bad.raw_area_offset = UINT32_MAX;
    assert_int_equal(kvf_block_describe_gpu(plan, 0, CHUNK, &bad, 0, &page), KVF_ERR_CORRUPT);
    bad = good;
    bad.raw_area_bytes = UINT32_MAX;
    assert_int_equal(kvf_block_describe_gpu(plan, 0, CHUNK, &bad, 0, &page), KVF_ERR_CORRUPT);
    assert_int_equal(kvf_block_describe_gpu(plan, 0, 0, &good, 0, &page), KVF_ERR_INVALID);
    assert_int_equal(kvf_block_describe_gpu(plan, 0, CHUNK + 1, &good, 0, &page), KVF_ERR_INVALID);
    block_fini(&block);
}

/* Parts tile the strips of the wanted layers, sections the raw area behind its table. */
static void test_parts_and_sections_tile_the_payload(void **state)
{
    struct kvf_random_seeded random;
    (void)state;
    kvf_random_seeded_init(&random, seed);
    for (uint32_t i = 0; i < N_PROFILES; i++) {
        struct kvf_block_ranges all = {0};
        struct kvf_block_reader reader;
        struct kvf_block_part part;
        struct kvf_block_section section;
        struct block block;
        uint32_t n = 0;
        uint32_t escapes = 0;
        size_t at = 0;
        int status;
        block_init(&block, profiles[i], CHUNK - 3, 0, &random);
        const struct kvf_block_header *header = &block.codec.page->header;
        assert_int_equal(kvf_block_open(&block.codec.plan, block.codec.page,
                                        block.codec.record_bytes, &all, &reader),
                         KVF_OK);
        assert_int_equal(reader.ranges.n_tokens, CHUNK - 3);
        while ((status = kvf_block_next_part(&reader, &part)) == KVF_OK) {
            assert_int_equal(part.layer, n / 2);
            assert_int_equal(part.is_v, n % 2);
            assert_int_equal(part.offset, at);
            at += part.bytes;
            n++;
        }
        assert_int_equal(status, KVF_EMPTY);
        assert_int_equal(n, 2 * LAYERS);
        assert_int_equal(at, header->raw_area_offset * 128u);
        at += header->n_escapes != 0 ? kvf_raw_table_bytes(LAYERS) : 0;
        while ((status = kvf_block_next_section(&reader, &section)) == KVF_OK) {
            assert_int_equal(section.offset, at);
            at += section.bytes;
            escapes += section.count;
        }
        assert_int_equal(status, KVF_EMPTY);
        assert_int_equal(escapes, header->n_escapes);
        assert_int_equal(kvf_part_bytes(at), block.codec.record_bytes - KVF_BLOCK_PAGE_BYTES);
        block_fini(&block);
    }
}

static void test_ranges_choose_layers(void **state)
{
    struct kvf_random_seeded random;
    struct kvf_block_ranges one = {.layer_first = 1, .n_layers = 1, .token_first = 40};
    struct kvf_block_reader reader;
    struct kvf_block_part part;
    struct kvf_block_section section;
    struct block block;
    (void)state;
    kvf_random_seeded_init(&random, seed);
    block_init(&block, "balanced", CHUNK, 0, &random);
    const struct kvf_codec_plan *plan = &block.codec.plan;
    assert_int_equal(
        kvf_block_open(plan, block.codec.page, block.codec.record_bytes, &one, &reader), KVF_OK);
    assert_int_equal(reader.ranges.n_tokens, CHUNK - 40);
    assert_int_equal(kvf_block_next_part(&reader, &part), KVF_OK);
    assert_int_equal(part.offset, block.codec.page->layer_offsets[1] * 128u);
    assert_int_equal(kvf_block_next_part(&reader, &part), KVF_OK);
    assert_int_equal(part.layer, 1);
    assert_true(part.is_v);
    assert_int_equal(kvf_block_next_part(&reader, &part), KVF_EMPTY);
    while (kvf_block_next_section(&reader, &section) == KVF_OK) {
        assert_int_equal(section.layer, 1);
    }
    one.n_layers = LAYERS;
    assert_int_equal(
        kvf_block_open(plan, block.codec.page, block.codec.record_bytes, &one, &reader),
        KVF_ERR_INVALID);
    one = (struct kvf_block_ranges){.token_first = CHUNK};
    assert_int_equal(
        kvf_block_open(plan, block.codec.page, block.codec.record_bytes, &one, &reader),
        KVF_ERR_INVALID);
    block_fini(&block);
}

/* With the page and the outline alone a reader finds what it finds with the payload. */
static void test_outlines_stand_for_payloads(void **state)
{
    struct kvf_random_seeded random;
    (void)state;
    kvf_random_seeded_init(&random, seed);
    for (uint32_t i = 0; i < N_PROFILES; i++) {
        struct kvf_block_ranges some = {.layer_first = 1, .token_first = 9};
        uint32_t outline[KVF_BLOCK_OUTLINE_WORDS];
        struct kvf_block_reader whole;
        struct kvf_block_reader outlined;
        struct kvf_record_page page;
        struct kvf_block_part parts[2];
        struct kvf_block_section sections[2];
        struct block block;
        block_init(&block, profiles[i], CHUNK - 3, 0, &random);
        const struct kvf_codec_plan *plan = &block.codec.plan;
        size_t bytes = block.codec.record_bytes;
        memcpy(&page, block.codec.page, sizeof(page));
        assert_int_equal(kvf_block_outline(plan, block.codec.page, bytes, outline), KVF_OK);
        assert_int_equal(kvf_block_open(plan, block.codec.page, bytes, &some, &whole), KVF_OK);
        assert_int_equal(kvf_block_open_outlined(plan, &page, bytes, outline, &some, &outlined),
                         KVF_OK);
        int status = KVF_OK;
        while (status == KVF_OK) {
            status = kvf_block_next_part(&whole, &parts[0]);
            assert_int_equal(kvf_block_next_part(&outlined, &parts[1]), status);
            assert_true(status != KVF_OK ||
                        (parts[0].tensor == parts[1].tensor && parts[0].offset == parts[1].offset &&
                         parts[0].bytes == parts[1].bytes));
        }
        assert_int_equal(status, KVF_EMPTY);
        for (status = KVF_OK; status == KVF_OK;) {
            status = kvf_block_next_section(&whole, &sections[0]);
            assert_int_equal(kvf_block_next_section(&outlined, &sections[1]), status);
            assert_true(status != KVF_OK || (sections[0].count == sections[1].count &&
                                             sections[0].offset == sections[1].offset &&
                                             sections[0].bytes == sections[1].bytes));
        }
        assert_int_equal(status, KVF_EMPTY);
        outline[kvf_random_seeded_next(&random) % (1 + 3 * LAYERS)] ^= 1;
        assert_int_equal(kvf_block_open_outlined(plan, &page, bytes, outline, &some, &outlined),
                         KVF_ERR_CORRUPT);
        block_fini(&block);
    }
}

/* Whatever the payload says, parts and sections lie inside the record. */
static void test_damaged_payloads_stay_inside_the_record(void **state)
{
    struct kvf_random_seeded random;
    uint32_t refused = 0;
    (void)state;
    kvf_random_seeded_init(&random, seed);
    for (uint32_t i = 0; i < N_PROFILES; i++) {
        struct block block;
        block_init(&block, profiles[i], CHUNK, 0, &random);
        size_t payload_bytes = block.codec.record_bytes - KVF_BLOCK_PAGE_BYTES;
        for (uint32_t round = 0; round < 400; round++) {
            struct kvf_block_ranges all = {0};
            struct kvf_block_reader reader;
            struct kvf_block_part part;
            struct kvf_block_section section;
            size_t area = block.codec.page->header.raw_area_offset * 128u;
            size_t at = round % 2 != 0 && area < payload_bytes
                            ? area + kvf_random_seeded_next(&random) % 24
                            : kvf_random_seeded_next(&random) % payload_bytes;
            uint8_t was = block.codec.payload[at];
            int status;
            block.codec.payload[at] = (uint8_t)kvf_random_seeded_next(&random);
            assert_int_equal(kvf_block_open(&block.codec.plan, block.codec.page,
                                            block.codec.record_bytes, &all, &reader),
                             KVF_OK);
            while ((status = kvf_block_next_part(&reader, &part)) == KVF_OK) {
                assert_true(part.offset <= payload_bytes);
                assert_true(part.bytes <= payload_bytes - part.offset);
            }
            while (status == KVF_EMPTY && kvf_block_next_section(&reader, &section) == KVF_OK) {
                assert_true(section.offset <= payload_bytes);
                assert_true(section.bytes <= payload_bytes - section.offset);
                assert_true(section.count * 4u < section.bytes);
            }
            refused += status == KVF_ERR_CORRUPT;
            block.codec.payload[at] = was;
        }
        block_fini(&block);
    }
    print_message("%u damaged records refused by their parts\n", refused);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_page_equals_that_of_the_c_encoder),
        cmocka_unit_test(test_results_of_no_finished_encode_are_refused),
        cmocka_unit_test(test_parts_and_sections_tile_the_payload),
        cmocka_unit_test(test_ranges_choose_layers),
        cmocka_unit_test(test_outlines_stand_for_payloads),
        cmocka_unit_test(test_damaged_payloads_stay_inside_the_record),
    };
    seed = kvf_test_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
