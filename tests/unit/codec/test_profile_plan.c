/* SPDX-License-Identifier: Apache-2.0
 *
 * test_profile_plan.c: blocks by profiles of a model's own. What a codec writes for a layer is what
 * it writes for a profile of the build with the same settings; means and lists that a block would
 * have found by itself give the block that it would have written.
 */
#include "codec/codec_layout.h"
#include "codec/profile_table.h"
#include "codec/simd.h"
#include "tests/support/support.h"
#include "tests/unit/codec/codec_fixture.h"
#include "tests/unit/codec/profile_fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum {
    LAYERS = 6,
    HEADS = 2,
    TOKENS = 128, /* the fewest that have a mean of their own */
};

static struct kvf_random_seeded random_bits;

static struct kvf_geometry geometry_of(const struct kvf_profile_table *table, uint32_t n_heads)
{
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, table->n_layers, n_heads,
                                                    table->dim_k, table->dim_v, TOKENS);
    geometry.rope_state = table->rope_state;
    return geometry;
}

/* The codec of a valid table. */
static void codec_init(struct fixture_codec *codec, struct kvf_profile_table *table,
                       uint32_t n_heads, uint32_t head_first)
{
    struct kvf_geometry geometry = geometry_of(table, n_heads);
    char why[KVF_PROFILE_WHY_BYTES] = "";
    assert_int_equal(kvf_profile_table_validate(table, why), KVF_OK);
    fixture_codec_init_table(codec, &geometry, table, head_first);
}

/* Pages with a bias a channel, so that centring matters. */
static void pages_init(struct fixture_kv *kv, const struct kvf_profile_table *table,
                       uint32_t n_tokens)
{
    struct kvf_geometry geometry = geometry_of(table, table->n_heads);
    fixture_kv_init(kv, &geometry, n_tokens);
    for (uint32_t i = 0; i < 2 * table->n_layers * table->n_heads; i++) {
        uint32_t is_v = i % 2;
        uint32_t dim = is_v ? table->dim_v : table->dim_k;
        float bias[256];
        for (uint32_t e = 0; e < dim; e++) {
            bias[e] = 4.0f * fixture_normal_like(&random_bits);
        }
        for (uint32_t token = 0; token < n_tokens; token++) {
            uint8_t *vector = fixture_kv_vector(kv, (int)is_v, i / 2 / table->n_heads,
                                                i / 2 % table->n_heads, token);
            for (uint32_t e = 0; e < dim; e++) {
                fixture_store(KVF_DTYPE_BF16, vector, e,
                              bias[e] + 3.4641f * (fixture_uniform(&random_bits) - 0.5f));
            }
        }
    }
}

/* The part of one tensor of one layer of the last record. */
static struct kvf_block_part part_of(const struct fixture_codec *codec, uint32_t layer, bool is_v)
{
    const struct kvf_block_ranges all = {0};
    struct kvf_block_reader reader;
    struct kvf_block_part part = {0};
    assert_int_equal(kvf_block_open(&codec->plan, codec->page, codec->record_bytes, &all, &reader),
                     KVF_OK);
    do {
        assert_int_equal(kvf_block_next_part(&reader, &part), KVF_OK);
    } while (part.layer != layer || part.is_v != is_v);
    return part;
}

/* Layers of a table's kinds are stored as by a profile of the build that has such tensors. */
static void layers_are_stored_as_their_kinds_say(void **state)
{
    (void)state;
    static const struct {
        const char *k;
        const char *v;
        uint8_t bits;
    } same[4] = {{"balanced", "tq3", 0x34},
                 {"saw8", "saw8", 0x88},
                 {"kivi4-g32", "kivi2-g32", 0x24},
                 {"exact", "raw", 0x0c}};
    static const uint8_t layers[LAYERS] = {1, 0, 2, 2, 3, 1};
    struct kvf_profile_table *table = profile_fixture_create(LAYERS, HEADS, 128, 128);
    profile_fixture_add(table, profile_fixture_saw(4, KVF_TENSOR_CENTER),
                        profile_fixture_tq(3, KVF_TENSOR_SCALE_LEAST_SQUARES));
    profile_fixture_add(table, profile_fixture_saw(8, 0), profile_fixture_saw(8, 0));
    profile_fixture_add(table, profile_fixture_kivi(4, false), profile_fixture_kivi(2, true));
    profile_fixture_add(
        table, (struct kvf_profile_tensor){.codec = KVF_CODEC_EXACT, .bits = KVF_BITS_EXACT},
        (struct kvf_profile_tensor){.codec = KVF_CODEC_RAW});
    memcpy(table->layer_kinds, layers, sizeof(layers));
    struct fixture_codec codec;
    struct fixture_kv kv;
    struct fixture_kv back;
    codec_init(&codec, table, HEADS, 0);
    pages_init(&kv, table, TOKENS);
    fixture_kv_init(&back, &kv.geometry, TOKENS);
    fixture_encode(&codec, &kv, 0);
    assert_int_equal(codec.page->header.block_flags, KVF_BLOCK_KINDS);
    fixture_decode(&codec, &back);
    for (uint32_t i = 0; i < 2 * LAYERS; i++) {
        uint32_t kind = layers[i / 2];
        bool is_v = i % 2 != 0;
        assert_int_equal(codec.page->layer_bits[i / 2], same[kind].bits);
        struct fixture_codec want;
        struct fixture_kv want_back;
        fixture_codec_init(&want, &kv.geometry, is_v ? same[kind].v : same[kind].k);
        fixture_kv_init(&want_back, &kv.geometry, TOKENS);
        fixture_encode(&want, &kv, 0);
        fixture_decode(&want, &want_back);
        struct kvf_block_part a = part_of(&codec, i / 2, is_v);
        struct kvf_block_part b = part_of(&want, i / 2, is_v);
        assert_int_equal(a.bytes, b.bytes);
        assert_memory_equal(codec.payload + a.offset, want.payload + b.offset, a.bytes);
        assert_memory_equal(fixture_kv_vector(&back, is_v, i / 2, 0, 0),
                            fixture_kv_vector(&want_back, is_v, i / 2, 0, 0), back.k_bytes);
        /* nor is it a block of that profile, nor the other way round */
        assert_int_equal(kvf_block_matches_plan(codec.page, &want.plan), KVF_ERR_MISMATCH);
        assert_int_equal(kvf_block_matches_plan(want.page, &codec.plan), KVF_ERR_MISMATCH);
        fixture_kv_fini(&want_back);
        fixture_codec_fini(&want);
    }
    fixture_kv_fini(&kv);
    fixture_kv_fini(&back);
    fixture_codec_fini(&codec);
    kvf_profile_table_destroy(table);
}

/* Bits that no kind of a layer has pass a check without the plan and not one with it. */
static void other_bits_are_refused(void **state)
{
    (void)state;
    struct kvf_profile_table *table = profile_fixture_rich(&random_bits);
    struct fixture_codec codec;
    struct fixture_kv kv;
    codec_init(&codec, table, HEADS, 0);
    pages_init(&kv, table, TOKENS);
    fixture_encode(&codec, &kv, 0);
    for (uint32_t nibble = 0; nibble < 16; nibble++) {
        bool known = nibble <= 8 || nibble == KVF_BITS_EXACT;
        codec.page->layer_bits[1] = (uint8_t)((codec.page->layer_bits[1] & 0xf0) | nibble);
        kvf_block_seal_header(codec.page);
        assert_int_equal(kvf_block_check(codec.page, codec.record_bytes),
                         known ? KVF_OK : KVF_ERR_CORRUPT);
        int status = kvf_block_decode(&codec.plan, codec.page, codec.record_bytes, 1, 1, 0, 0,
                                      &kv.view, codec.workspace);
        assert_int_equal(status, nibble == 4 ? KVF_OK : KVF_ERR_CORRUPT);
    }
    codec.page->layer_bits[1] = 0x34;
    codec.page->header.block_flags = 2;
    kvf_block_seal_header(codec.page);
    assert_int_equal(kvf_block_check(codec.page, codec.record_bytes), KVF_ERR_CORRUPT);
    fixture_kv_fini(&kv);
    fixture_codec_fini(&codec);
    kvf_profile_table_destroy(table);
}

/* One kind of all layers: tensors of one codec for K and V. */
static struct kvf_profile_table *one_kind(struct kvf_profile_tensor k, struct kvf_profile_tensor v)
{
    struct kvf_profile_table *table = profile_fixture_create(2, HEADS, 128, 128);
    profile_fixture_add(table, k, v);
    return table;
}

/* Give table the means and lists that a block found: they stand first in its strips. */
static void take_findings(struct kvf_profile_table *table, const struct fixture_codec *codec,
                          bool has_lists)
{
    for (uint32_t i = 0; i < 4; i++) {
        bool is_v = i % 2 != 0;
        struct kvf_block_part part = part_of(codec, i / 2, is_v);
        size_t mean_bytes = HEADS * 128 * sizeof(uint16_t);
        for (uint32_t what = 0; what < 2; what++) {
            uint32_t array = 2 * what + is_v;
            size_t bytes = kvf_profile_array_layer_bytes(table, array);
            if (what == 1 && !has_lists) {
                continue;
            }
            if (table->arrays[array] == NULL) {
                assert_int_equal(kvf_profile_table_add_array(table, array), KVF_OK);
            }
            memcpy(table->arrays[array] + i / 2 * bytes,
                   codec->payload + part.offset + what * mean_bytes, bytes);
        }
    }
}

/* Codes and scales with the profile's means are those with the block's own, if they are the same
 * numbers; so are decoded pages. Lists as well. */
static void given_findings_make_the_same_codes(void **state)
{
    (void)state;
    const uint8_t split = KVF_TENSOR_SPLIT | KVF_TENSOR_SCALE_MATCHED;
    const struct kvf_profile_tensor tensors[3] = {
        profile_fixture_saw(4, 0),
        profile_fixture_tq(4, KVF_TENSOR_SCALE_MATCHED),
        profile_fixture_tq(3, split),
    };
    for (uint32_t c = 0; c < 3; c++) {
        struct kvf_profile_tensor own = tensors[c];
        struct kvf_profile_tensor given = tensors[c];
        own.flags |= KVF_TENSOR_CENTER;
        given.flags |= KVF_TENSOR_CENTER_PROFILE;
        struct kvf_profile_table *tables[2] = {one_kind(own, own), one_kind(given, given)};
        struct fixture_codec codecs[2];
        struct fixture_kv kv;
        struct fixture_kv back[2];
        pages_init(&kv, tables[0], TOKENS);
        codec_init(&codecs[0], tables[0], HEADS, 0);
        fixture_encode(&codecs[0], &kv, 0);
        take_findings(tables[1], &codecs[0], c == 2);
        codec_init(&codecs[1], tables[1], HEADS, 0);
        fixture_encode(&codecs[1], &kv, 0);
        for (uint32_t i = 0; i < 4; i++) {
            struct kvf_block_part a = part_of(&codecs[0], i / 2, i % 2 != 0);
            struct kvf_block_part b = part_of(&codecs[1], i / 2, i % 2 != 0);
            size_t lists = c == 2 ? kvf_part_bytes(HEADS * 128 / 8) : 0;
            assert_int_equal(b.sizes.mean_bytes, lists);
            assert_memory_equal(codecs[0].payload + a.offset + a.sizes.mean_bytes,
                                codecs[1].payload + b.offset + b.sizes.mean_bytes,
                                a.bytes - a.sizes.mean_bytes);
        }
        for (uint32_t i = 0; i < 2; i++) {
            fixture_kv_init(&back[i], &kv.geometry, TOKENS);
            fixture_decode(&codecs[i], &back[i]);
        }
        assert_memory_equal(back[0].memory, back[1].memory, back[0].memory_bytes);
        for (uint32_t i = 0; i < 2; i++) {
            fixture_kv_fini(&back[i]);
            fixture_codec_fini(&codecs[i]);
            kvf_profile_table_destroy(tables[i]);
        }
        fixture_kv_fini(&kv);
    }
}

/* Squared error of K over all layers by its variance about the bias, which is 1. */
static double error_of(struct fixture_codec *codec, const struct fixture_kv *kv)
{
    struct fixture_kv back;
    double error = 0.0;
    fixture_kv_init(&back, &kv->geometry, kv->n_tokens);
    fixture_encode(codec, kv, 0);
    fixture_decode(codec, &back);
    for (uint32_t v = 0; v < 2 * HEADS * kv->n_tokens; v++) {
        const uint8_t *a = fixture_kv_vector(kv, 0, v % 2, v / 2 % HEADS, v / 2 / HEADS);
        const uint8_t *b = fixture_kv_vector(&back, 0, v % 2, v / 2 % HEADS, v / 2 / HEADS);
        for (uint32_t e = 0; e < 128; e++) {
            double x = (double)fixture_load(KVF_DTYPE_BF16, a, e);
            double y = (double)fixture_load(KVF_DTYPE_BF16, b, e);
            error += (x - y) * (x - y);
        }
    }
    fixture_kv_fini(&back);
    return error / (2 * HEADS * kv->n_tokens * 128);
}

/* A block too short for a mean of its own is centred by the profile's, and is smaller than a
 * centred one could be. */
static void short_blocks_profit(void **state)
{
    (void)state;
    const struct kvf_profile_tensor v = profile_fixture_saw(4, 0);
    struct kvf_profile_table *tables[2] = {
        one_kind(profile_fixture_saw(4, KVF_TENSOR_CENTER), v),
        one_kind(profile_fixture_saw(4, KVF_TENSOR_CENTER_PROFILE), v)};
    struct fixture_codec codecs[2];
    struct fixture_kv kv;
    struct fixture_kv head;
    pages_init(&kv, tables[0], TOKENS);
    codec_init(&codecs[0], tables[0], HEADS, 0);
    fixture_encode(&codecs[0], &kv, 0);
    assert_int_equal(kvf_profile_table_add_array(tables[1], KVF_PROFILE_MEANS_K), KVF_OK);
    for (uint32_t layer = 0; layer < 2; layer++) {
        size_t bytes = HEADS * 128 * sizeof(uint16_t);
        memcpy(tables[1]->arrays[KVF_PROFILE_MEANS_K] + layer * bytes,
               codecs[0].payload + part_of(&codecs[0], layer, false).offset, bytes);
    }
    codec_init(&codecs[1], tables[1], HEADS, 0);
    /* the first tokens of the same pages */
    head = kv;
    head.n_tokens = 60;
    double without = error_of(&codecs[0], &head);
    double with = error_of(&codecs[1], &head);
    assert_int_equal(codecs[0].record_bytes, codecs[1].record_bytes);
    assert_true(with < .02 && without > 4.0 * with);
    for (uint32_t i = 0; i < 2; i++) {
        fixture_codec_fini(&codecs[i]);
        kvf_profile_table_destroy(tables[i]);
    }
    fixture_kv_fini(&kv);
}

/* Lists of a profile are stored as they are, and read by whoever has the record. */
static void given_lists_are_stored(void **state)
{
    (void)state;
    const struct kvf_profile_tensor tensor = profile_fixture_tq(3, KVF_TENSOR_SPLIT);
    struct kvf_profile_table *table = one_kind(tensor, tensor);
    struct fixture_codec codec;
    struct fixture_kv kv;
    profile_fixture_fill(table, &random_bits);
    codec_init(&codec, table, HEADS, 0);
    pages_init(&kv, table, TOKENS);
    fixture_encode(&codec, &kv, 0);
    for (uint32_t i = 0; i < 4; i++) {
        struct kvf_block_part part = part_of(&codec, i / 2, i % 2 != 0);
        uint32_t array = KVF_PROFILE_SPLITS_K + i % 2;
        assert_memory_equal(codec.payload + part.offset,
                            table->arrays[array] + i / 2 * HEADS * 128 / 8, HEADS * 128 / 8);
    }
    /* the bias is not taken off: what is left of an error is that of all channels */
    assert_true(error_of(&codec, &kv) < 1.0);
    fixture_kv_fini(&kv);
    fixture_codec_fini(&codec);
    kvf_profile_table_destroy(table);
}

/* Shards have their heads of a model's means, and one fingerprint. */
static void shards_share_a_profile(void **state)
{
    (void)state;
    struct kvf_profile_table *table = profile_fixture_create(2, 4, 128, 128);
    char why[KVF_PROFILE_WHY_BYTES] = "";
    uint32_t head_first = 9;
    profile_fixture_add(table, profile_fixture_saw(4, KVF_TENSOR_CENTER_PROFILE),
                        profile_fixture_saw(4, 0));
    profile_fixture_fill(table, &random_bits);
    struct fixture_codec whole;
    struct fixture_kv kv;
    codec_init(&whole, table, 4, 0);
    pages_init(&kv, table, TOKENS);
    fixture_encode(&whole, &kv, 0);
    for (uint16_t shard = 0; shard < 4; shard++) {
        struct kvf_geometry geometry = geometry_of(table, 2);
        /* two shards, and four where two and two have the same heads */
        for (uint16_t copies = 1; copies <= 2; copies++) {
            int status = kvf_profile_table_fits(table, &geometry, shard, (uint16_t)(2 * copies),
                                                &head_first, why);
            assert_int_equal(status, shard < 2 * copies ? KVF_OK : KVF_ERR_MISMATCH);
            if (status == KVF_OK) {
                assert_int_equal(head_first, shard / copies * 2);
            }
        }
        struct fixture_codec codec;
        struct fixture_kv part = kv;
        codec_init(&codec, table, 2, head_first);
        assert_int_equal(codec.plan.profile_fp, whole.plan.profile_fp);
        for (uint32_t layer = 0; layer < 2; layer++) {
            part.k_layers[layer] = fixture_kv_vector(&kv, 0, layer, head_first, 0);
            part.v_layers[layer] = fixture_kv_vector(&kv, 1, layer, head_first, 0);
        }
        part.view.k.layers = part.k_layers;
        part.view.v.layers = part.v_layers;
        fixture_encode(&codec, &part, 0);
        struct kvf_block_part a = part_of(&whole, 1, false);
        struct kvf_block_part b = part_of(&codec, 1, false);
        size_t codes = b.sizes.codes_bytes;
        assert_memory_equal(whole.payload + a.offset + a.sizes.meta_bytes + head_first / 2 * codes,
                            codec.payload + b.offset + b.sizes.meta_bytes, codes);
        fixture_codec_fini(&codec);
    }
    fixture_kv_fini(&kv);
    fixture_codec_fini(&whole);
    kvf_profile_table_destroy(table);
}

static void other_models_do_not_fit(void **state)
{
    (void)state;
    struct kvf_profile_table *table = profile_fixture_rich(&random_bits);
    struct kvf_geometry right = geometry_of(table, HEADS);
    struct kvf_geometry wrong[5];
    static const char *const whys[5] = {"6 layers, the client has 7",
                                        "128 elements of a K vector, the client has 64",
                                        "64 elements of a V vector, the client has 128",
                                        "as rope_state, the client has 1", "2 KV heads"};
    char why[KVF_PROFILE_WHY_BYTES];
    uint32_t head_first = 9;
    struct kvf_codec_plan plan;
    assert_int_equal(kvf_profile_table_fits(table, &right, 0, 1, &head_first, why), KVF_OK);
    assert_int_equal(head_first, 0);
    assert_int_equal(kvf_profile_table_fits(table, &right, KVF_SHARD_NONE, 1, &head_first, why),
                     KVF_OK);
    assert_int_equal(head_first, 0);
    for (uint32_t i = 0; i < 5; i++) {
        wrong[i] = right;
    }
    wrong[0].n_layers = 7;
    wrong[1].dim_k = 64;
    wrong[2].dim_v = 128;
    wrong[3].rope_state = KVF_ROPE_PRE;
    wrong[4].n_heads = 3;
    for (uint32_t i = 0; i < 5; i++) {
        assert_int_equal(kvf_profile_table_fits(table, &wrong[i], 0, 1, &head_first, why),
                         KVF_ERR_MISMATCH);
        assert_non_null(strstr(why, whys[i]));
        if (i != 3) {
            assert_int_equal(kvf_codec_plan_init_table(&plan, &wrong[i], table, 0),
                             KVF_ERR_INVALID);
        }
    }
    assert_int_equal(kvf_codec_plan_init_table(&plan, &right, table, 1), KVF_ERR_INVALID);
    right.kind = KVF_KIND_STATE;
    assert_int_equal(kvf_codec_plan_init_table(&plan, &right, table, 0), KVF_ERR_REFUSED);
    kvf_profile_table_destroy(table);
}

/* Whatever a profile says that can change a block is in its fingerprint; what it says of itself is
 * not. */
static void fingerprints_differ(void **state)
{
    (void)state;
    static const uint8_t list[8] = {0x0f, 0xff, 0, 0, 0, 0, 0, 0xf0};
    uint64_t seen[8];
    uint32_t n = 0;
    for (uint32_t change = 0; change < 8; change++) {
        struct kvf_random_seeded random;
        kvf_random_seeded_init(&random, 1);
        struct kvf_profile_table *table = profile_fixture_rich(&random);
        struct kvf_geometry geometry = geometry_of(table, HEADS);
        size_t means_bytes = kvf_profile_array_layer_bytes(table, KVF_PROFILE_MEANS_K);
        size_t lists_bytes = kvf_profile_array_layer_bytes(table, KVF_PROFILE_SPLITS_V);
        struct kvf_codec_plan plan;
        char why[KVF_PROFILE_WHY_BYTES] = "";
        switch (change) {
        case 1:
            table->kinds[3].v.bits = 4;
            break;
        case 2:
            table->layer_kinds[1] = 4;
            break;
        case 3:
            table->sink_tokens = 5;
            break;
        case 4:
            table->arrays[KVF_PROFILE_MEANS_K][2 * means_bytes] ^= 1;
            break;
        case 5:
            memcpy(table->arrays[KVF_PROFILE_SPLITS_V] + 2 * lists_bytes, list, sizeof(list));
            break;
        case 6:
            memcpy(table->name, "other", 6);
            table->workloads = KVF_WORKLOAD_OTHER;
            break;
        case 7:
            table->weights_digest[0]++;
            break;
        default:
            break;
        }
        assert_int_equal(kvf_profile_table_validate(table, why), KVF_OK);
        assert_int_equal(kvf_codec_plan_init_table(&plan, &geometry, table, 0), KVF_OK);
        if (change >= 6) {
            assert_int_equal(plan.profile_fp, seen[0]);
        } else {
            for (uint32_t i = 0; i < n; i++) {
                assert_int_not_equal(plan.profile_fp, seen[i]);
            }
            seen[n++] = plan.profile_fp;
        }
        kvf_profile_table_destroy(table);
    }
}

/* All that a profile can say, in blocks of every length, sinks and ranges. */
static void rich_profiles_go_both_ways(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {1, 16, 60, 127, 128};
    struct kvf_profile_table *table = profile_fixture_rich(&random_bits);
    struct fixture_codec codec;
    codec_init(&codec, table, HEADS, 0);
    assert_false(kvf_codec_plan_is_fixed(&codec.plan));
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        struct fixture_kv kv;
        struct fixture_kv back;
        pages_init(&kv, table, lengths[i]);
        fixture_kv_init(&back, &kv.geometry, lengths[i]);
        fixture_encode(&codec, &kv, 0);
        assert_int_equal(codec.page->header.n_sink_raw, lengths[i] < 4 ? lengths[i] : 4);
        fixture_decode(&codec, &back);
        /* layers 0 and 5 are exact, as sinks are everywhere */
        assert_memory_equal(fixture_kv_vector(&back, 0, 0, 0, 0),
                            fixture_kv_vector(&kv, 0, 0, 0, 0), kv.k_bytes + kv.v_bytes);
        assert_memory_equal(fixture_kv_vector(&back, 0, 3, 1, 0),
                            fixture_kv_vector(&kv, 0, 3, 1, 0), 128 * 2);
        for (int is_v = 0; is_v < 2; is_v++) {
            assert_true(fixture_distortion(&kv, &back, is_v, 0) < .2);
        }
        fixture_kv_fini(&kv);
        fixture_kv_fini(&back);
    }
    fixture_codec_fini(&codec);
    kvf_profile_table_destroy(table);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layers_are_stored_as_their_kinds_say),
        cmocka_unit_test(other_bits_are_refused),
        cmocka_unit_test(given_findings_make_the_same_codes),
        cmocka_unit_test(short_blocks_profit),
        cmocka_unit_test(given_lists_are_stored),
        cmocka_unit_test(shards_share_a_profile),
        cmocka_unit_test(other_models_do_not_fit),
        cmocka_unit_test(fingerprints_differ),
        cmocka_unit_test(rich_profiles_go_both_ways),
    };
    int failures = 0;
    kvf_random_seeded_init(&random_bits, kvf_test_seed());
    for (int level = 0; fixture_use_level(level); level++) {
        failures += cmocka_run_group_tests(tests, NULL, NULL);
    }
    return failures;
}
