/* SPDX-License-Identifier: Apache-2.0
 *
 * test_format.c: record pages from those who cannot be trusted.
 */
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
static struct kvf_geometry geometry;
static struct fixture_kv kv;
static struct fixture_codec codec;

static int setup(void **state)
{
    (void)state;
    geometry = fixture_geometry(KVF_DTYPE_BF16, 3, 2, 64, 64, 32);
    geometry.sink_tokens = 2;
    fixture_kv_init(&kv, &geometry, 32);
    fixture_fill_normal(&kv, &random_bits);
    fixture_codec_init(&codec, &geometry, "balanced");
    fixture_encode(&codec, &kv, 0);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    fixture_codec_fini(&codec);
    fixture_kv_fini(&kv);
    return 0;
}

static void every_flipped_bit_of_the_header_is_refused(void **state)
{
    (void)state;
    struct kvf_record_page page = *codec.page;
    uint8_t *bytes = (uint8_t *)&page;
    for (size_t i = 0; i < sizeof(page); i++) {
        bool store_part = i >= 256 && i < 384;
        for (int bit = 0; bit < 8; bit++) {
            bytes[i] ^= (uint8_t)(1 << bit);
            int status = kvf_block_check(&page, codec.record_bytes);
            assert_true(store_part ? status == KVF_OK : status < 0);
            bytes[i] ^= (uint8_t)(1 << bit);
        }
    }
    assert_int_equal(kvf_block_check(&page, codec.record_bytes), KVF_OK);
}

/* One field changed and the page sealed again: its checksum is right, its content is a lie. */
#define LIE(field, value)                                                                          \
    do {                                                                                           \
        struct kvf_record_page page = *codec.page;                                                 \
        page.field = (value);                                                                      \
        kvf_block_seal_header(&page);                                                              \
        int status = kvf_block_check(&page, codec.record_bytes);                                   \
        if (status == KVF_OK) {                                                                    \
            status = kvf_block_matches_plan(&page, &codec.plan);                                   \
        }                                                                                          \
        if (status >= 0) {                                                                         \
            fail_msg("%s = %s was accepted", #field, #value);                                      \
        }                                                                                          \
    } while (0)

static void lies_about_the_block_are_refused(void **state)
{
    (void)state;
    LIE(header.magic, 0);
    LIE(header.version, 2);
    LIE(header.header_bytes, 128);
    LIE(header.total_bytes, codec.record_bytes + 128);
    LIE(header.total_bytes, codec.record_bytes - 128);
    LIE(header.total_bytes, 4095);
    LIE(header.total_bytes, UINT64_MAX);
    LIE(header.raw_bytes, 1);
    LIE(header.decoded_hash, 1);
    LIE(header.model_fp, 1);
    LIE(header.weights_fp, 1);
    LIE(header.shard, 1);
    LIE(header.shard_count, KVF_SHARDS_MAX + 1);
    LIE(header.tensor_kind, KVF_KIND_BYTES);
    LIE(header.tensor_kind, KVF_KIND_MLA);
    LIE(header.tensor_kind, 200);
    LIE(header.src_dtype, KVF_DTYPE_F16);
    LIE(header.dst_dtype, KVF_DTYPE_F16);
    LIE(header.rope_state, KVF_ROPE_PRE);
    LIE(header.rope_state, KVF_ROPE_PRE_UNBIASED);
    LIE(header.rope_fp, 1);
    LIE(header.token_start, UINT32_MAX);
    LIE(header.token_start, 32); /* sinks elsewhere than at the start */
    LIE(header.n_tokens, 0);
    LIE(header.n_tokens, 31);
    LIE(header.n_tokens, 33);
    LIE(header.n_sink_raw, 1);
    LIE(header.n_tail_raw, 1);
    LIE(header.layer_first, 1);
    LIE(header.n_layers, 0);
    LIE(header.n_layers, 2);
    LIE(header.n_layers, 513);
    LIE(header.base_layer, 1);
    LIE(header.rebase_layers, 1);
    LIE(header.n_heads, 1);
    LIE(header.head_first, 1);
    LIE(header.d_k, 128);
    LIE(header.d_v, 0);
    LIE(header.d_v, 32);
    LIE(header.n_streams, 1);
    LIE(header.entropy_id, 1);
    LIE(header.block_flags, 1);
    LIE(header.chunk_tokens, 64);
    LIE(header.n_escapes, 0);
    LIE(header.raw_area_offset, 0);
    LIE(header.raw_area_offset, UINT32_MAX);
    LIE(header.raw_area_bytes, 0);
    LIE(header.raw_area_bytes, UINT32_MAX);
    LIE(header.plain_bytes, 1);
    LIE(header.plain_crc32c, 1);
    LIE(header.profile_fp, 0);
    LIE(header.reserved[47], 1);
}

static void lies_about_tensors_and_layers_are_refused(void **state)
{
    (void)state;
    LIE(header.k.codec, KVF_CODEC_NONE);
    LIE(header.k.codec, KVF_CODEC_EXACT);
    LIE(header.k.codec, 99);
    LIE(header.v.codec, KVF_CODEC_NONE);
    LIE(header.k.bits, 8);
    LIE(header.k.flags, 0);
    LIE(header.k.rot_kind, KVF_ROT_NONE);
    LIE(header.k.rot_order, 32);
    LIE(header.k.clip_q15, KVF_BLOCK_CLIP_ONE);
    LIE(header.k.rot_seed, 1);
    LIE(header.k.codebook_crc32c, 1);
    LIE(header.k.codebook_id, 1);
    LIE(header.k.scale_dtype, 1);
    LIE(header.k.zero_kind, 0);
    LIE(header.k.group_axis, 0);
    LIE(header.k.group_size, 32);
    LIE(header.k.layout, KVF_LAYOUT_NATURAL);
    LIE(header.k.reserved, 1);
    LIE(header.v.reserved, 1);
    LIE(layer_bits[0], 0x48);
    LIE(layer_bits[0], 0x84);
    LIE(layer_bits[3], 0x44);
    LIE(layer_offsets[0], 1);
    LIE(layer_offsets[1], 0);
    LIE(layer_offsets[2], codec.page->layer_offsets[1]);
    LIE(layer_offsets[2], UINT32_MAX);
    LIE(layer_offsets[3], 1);
    LIE(reserved[1151], 1);
}

/* What the daemon and the drive write does not change whether a block is accepted. */
static void names_and_store_part_are_free(void **state)
{
    (void)state;
    struct kvf_record_page page = *codec.page;
    memset(page.header.key_id, 0xab, sizeof(page.header.key_id));
    page.header.shard = 3;
    page.header.shard_count = 8;
    kvf_block_seal_header(&page);
    memset(&page.store, 0xcd, sizeof(page.store));
    assert_int_equal(kvf_block_check(&page, codec.record_bytes), KVF_OK);
    assert_int_equal(kvf_block_matches_plan(&page, &codec.plan), KVF_OK);
}

static void every_flipped_byte_of_the_payload_is_refused(void **state)
{
    (void)state;
    size_t payload_bytes = codec.record_bytes - KVF_BLOCK_PAGE_BYTES;
    for (size_t i = 0; i < payload_bytes; i += 1 + i % 7) {
        codec.payload[i] ^= 0x10;
        assert_int_equal(kvf_block_check_payload(codec.page, codec.payload), KVF_ERR_CORRUPT);
        codec.payload[i] ^= 0x10;
    }
    assert_int_equal(kvf_block_check_payload(codec.page, codec.payload), KVF_OK);
}

static void truncated_records_are_refused(void **state)
{
    (void)state;
    assert_int_equal(kvf_block_check(codec.page, codec.record_bytes - 1), KVF_ERR_CORRUPT);
    assert_int_equal(kvf_block_check(codec.page, 4095), KVF_ERR_CORRUPT);
    assert_int_equal(kvf_block_check(codec.page, codec.record_bytes + 4096), KVF_OK);
    for (size_t bytes = 0; bytes < codec.record_bytes; bytes += 997) {
        int status = kvf_block_decode(&codec.plan, codec.page, bytes, 0, 0, 0, 0, &kv.view,
                                      codec.workspace);
        assert_int_equal(status, KVF_ERR_CORRUPT);
    }
}

static void opaque_bytes_have_a_page(void **state)
{
    (void)state;
    uint8_t payload[1000];
    kvf_random_seeded_ops.fill(&random_bits, payload, sizeof(payload));
    struct kvf_record_page page;
    struct kvf_codec_plan plan;
    assert_int_equal(kvf_codec_plan_init(&plan, NULL, "bytes"), KVF_OK);
    assert_int_equal(kvf_block_describe_bytes(&page, payload, sizeof(payload)), KVF_OK);
    assert_int_equal(page.header.total_bytes, 5096);
    assert_int_equal(kvf_block_check(&page, 5096), KVF_OK);
    assert_int_equal(kvf_block_check(&page, 5095), KVF_ERR_CORRUPT);
    assert_int_equal(kvf_block_check_payload(&page, payload), KVF_OK);
    assert_int_equal(kvf_block_matches_plan(&page, &plan), KVF_OK);
    assert_int_equal(kvf_block_matches_plan(&page, &codec.plan), KVF_ERR_MISMATCH);
    assert_int_equal(kvf_block_matches_plan(codec.page, &plan), KVF_ERR_MISMATCH);
    payload[500] ^= 1;
    assert_int_equal(kvf_block_check_payload(&page, payload), KVF_ERR_CORRUPT);
    page.header.n_layers = 1;
    kvf_block_seal_header(&page);
    assert_int_equal(kvf_block_check(&page, 5096), KVF_ERR_CORRUPT);
    assert_int_equal(kvf_block_describe_bytes(&page, NULL, 0), KVF_OK);
    assert_int_equal(kvf_block_check(&page, 4096), KVF_OK);
    assert_int_equal(kvf_block_describe_bytes(&page, payload, KVF_PAYLOAD_BYTES_MAX + 1),
                     KVF_ERR_TOO_LARGE);
}

static void other_plans_do_not_match(void **state)
{
    (void)state;
    struct kvf_codec_plan plan;
    static const char *const others[] = {"raw", "exact", "safe", "saw8", "saw4-paper"};
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        assert_int_equal(kvf_codec_plan_init(&plan, &geometry, others[i]), KVF_OK);
        assert_int_equal(kvf_block_matches_plan(codec.page, &plan), KVF_ERR_MISMATCH);
    }
    plan = codec.plan;
    plan.model_fp = 5;
    assert_int_equal(kvf_block_matches_plan(codec.page, &plan), KVF_ERR_MISMATCH);
}

static void bad_arguments_are_refused(void **state)
{
    (void)state;
    size_t bytes = 0;
    struct kvf_kv_view bad = kv.view;
    bad.tokens_a_page = 0;
    void *workspace = codec.workspace;
    struct kvf_codec_plan *plan = &codec.plan;
    struct kvf_record_page page;
    size_t capacity = codec.payload_capacity;
    uint8_t *payload = malloc(capacity);
    assert_non_null(payload);
    assert_int_equal(
        kvf_block_encode(plan, &bad, 0, 32, &page, payload, capacity, workspace, &bytes),
        KVF_ERR_INVALID);
    assert_int_equal(
        kvf_block_encode(plan, &kv.view, 0, 0, &page, payload, capacity, workspace, &bytes),
        KVF_ERR_INVALID);
    assert_int_equal(
        kvf_block_encode(plan, &kv.view, 0, 33, &page, payload, capacity, workspace, &bytes),
        KVF_ERR_INVALID);
    assert_int_equal(kvf_block_encode(plan, &kv.view, UINT32_MAX, 1, &page, payload, capacity,
                                      workspace, &bytes),
                     KVF_ERR_INVALID);
    /* room for the codes but not for the sinks behind them */
    capacity = kvf_codec_plan_payload_bytes(plan, 32);
    assert_int_equal(
        kvf_block_encode(plan, &kv.view, 0, 32, &page, payload, capacity, workspace, &bytes),
        KVF_ERR_TOO_LARGE);
    assert_int_equal(
        kvf_block_encode(plan, &kv.view, 32, 32, &page, payload, capacity, workspace, &bytes),
        KVF_OK);
    assert_int_equal(
        kvf_block_encode(plan, &kv.view, 32, 32, &page, payload, capacity - 1, workspace, &bytes),
        KVF_ERR_TOO_LARGE);
    static const uint32_t ranges[][4] = {{3, 0, 0, 0}, {0, 4, 0, 0}, {0, 0, 32, 0}, {0, 0, 1, 32}};
    for (int i = 0; i < 4; i++) {
        assert_int_equal(kvf_block_decode(plan, codec.page, codec.record_bytes, ranges[i][0],
                                          ranges[i][1], ranges[i][2], ranges[i][3], &kv.view,
                                          workspace),
                         KVF_ERR_INVALID);
    }
    free(payload);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_flipped_bit_of_the_header_is_refused),
        cmocka_unit_test(lies_about_the_block_are_refused),
        cmocka_unit_test(lies_about_tensors_and_layers_are_refused),
        cmocka_unit_test(names_and_store_part_are_free),
        cmocka_unit_test(every_flipped_byte_of_the_payload_is_refused),
        cmocka_unit_test(truncated_records_are_refused),
        cmocka_unit_test(opaque_bytes_have_a_page),
        cmocka_unit_test(other_plans_do_not_match),
        cmocka_unit_test(bad_arguments_are_refused),
    };
    kvf_random_seeded_init(&random_bits, kvf_test_seed());
    return cmocka_run_group_tests(tests, setup, teardown);
}
