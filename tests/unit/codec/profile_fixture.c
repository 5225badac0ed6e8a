/* SPDX-License-Identifier: Apache-2.0
 *
 * profile_fixture.c: see profile_fixture.h.
 */
#include "tests/unit/codec/profile_fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

struct kvf_profile_tensor profile_fixture_saw(uint8_t bits, uint8_t flags)
{
    return (struct kvf_profile_tensor){.codec = KVF_CODEC_SAW,
                                       .bits = bits,
                                       .flags = KVF_TENSOR_SIGNS | flags,
                                       .rotate = 1,
                                       .clip = KVF_CLIP_FIXED,
                                       .rot_seed = KVF_PROFILE_ROTATION_SEED};
}

struct kvf_profile_tensor profile_fixture_tq(uint8_t bits, uint8_t flags)
{
    return (struct kvf_profile_tensor){.codec = KVF_CODEC_TQ,
                                       .bits = bits,
                                       .flags = KVF_TENSOR_SIGNS | flags,
                                       .rotate = 1,
                                       .rot_seed = KVF_PROFILE_ROTATION_SEED};
}

struct kvf_profile_tensor profile_fixture_kivi(uint8_t bits, bool is_v)
{
    return (struct kvf_profile_tensor){.codec = KVF_CODEC_KIVI,
                                       .bits = bits,
                                       .group_size = 32,
                                       .group_axis = is_v ? KVF_AXIS_TOKEN : KVF_AXIS_CHANNEL};
}

struct kvf_profile_table *profile_fixture_create(uint32_t n_layers, uint32_t n_heads,
                                                 uint32_t dim_k, uint32_t dim_v)
{
    struct kvf_profile_table *table = kvf_profile_table_create();
    assert_non_null(table);
    memcpy(table->name, "own", 4);
    memset(table->weights_digest, 0x11, sizeof(table->weights_digest));
    table->workloads = KVF_WORKLOAD_CHAT;
    table->n_layers = (uint16_t)n_layers;
    table->n_heads = (uint16_t)n_heads;
    table->dim_k = (uint16_t)dim_k;
    table->dim_v = (uint16_t)dim_v;
    table->rope_state = KVF_ROPE_POST;
    return table;
}

uint8_t profile_fixture_add(struct kvf_profile_table *table, struct kvf_profile_tensor k,
                            struct kvf_profile_tensor v)
{
    assert_true(table->n_kinds < KVF_CODEC_KINDS_MAX);
    table->kinds[table->n_kinds] = (struct kvf_profile_kind){.k = k, .v = v};
    return table->n_kinds++;
}

/* dim / 4 of the channels of each head: what a head of 64 or 128 takes. */
static void fill_lists(uint8_t *lists, uint32_t n_heads, uint32_t dim,
                       struct kvf_random_seeded *random)
{
    for (uint32_t head = 0; head < n_heads; head++) {
        uint8_t *list = lists + head * dim / 8;
        for (uint32_t n = 0; n < dim / 4;) {
            uint32_t channel = (uint32_t)(kvf_random_seeded_next(random) % dim);
            bool is_new = (list[channel / 8] >> channel % 8 & 1) == 0;
            list[channel / 8] = (uint8_t)(list[channel / 8] | 1u << channel % 8);
            n += is_new;
        }
    }
}

/* Halves from -2 to 2. */
static void fill_means(uint8_t *means, size_t bytes, struct kvf_random_seeded *random)
{
    for (size_t i = 0; i < bytes; i += 2) {
        uint64_t bits = kvf_random_seeded_next(random);
        means[i] = (uint8_t)bits;
        means[i + 1] = (uint8_t)((bits >> 8 & 0x80) | (0x30 + (bits >> 16) % 16));
    }
}

void profile_fixture_fill(struct kvf_profile_table *table, struct kvf_random_seeded *random)
{
    for (uint32_t array = 0; array < KVF_PROFILE_ARRAYS; array++) {
        bool is_v = array % 2 != 0;
        bool is_means = array < KVF_PROFILE_SPLITS_K;
        uint8_t flag = is_means ? KVF_TENSOR_CENTER_PROFILE : KVF_TENSOR_SPLIT;
        size_t layer_bytes = kvf_profile_array_layer_bytes(table, array);
        for (uint32_t layer = 0; layer < table->n_layers; layer++) {
            const struct kvf_profile_kind *kind = &table->kinds[table->layer_kinds[layer]];
            if (((is_v ? &kind->v : &kind->k)->flags & flag) == 0) {
                continue;
            }
            if (table->arrays[array] == NULL) {
                assert_int_equal(kvf_profile_table_add_array(table, array), KVF_OK);
            }
            uint8_t *at = table->arrays[array] + layer * layer_bytes;
            if (is_means) {
                fill_means(at, layer_bytes, random);
            } else {
                fill_lists(at, table->n_heads, is_v ? table->dim_v : table->dim_k, random);
            }
        }
    }
}

struct kvf_profile_table *profile_fixture_rich(struct kvf_random_seeded *random)
{
    static const uint8_t layers[6] = {4, 0, 1, 2, 3, 4};
    struct kvf_profile_table *table = profile_fixture_create(6, 2, 128, 64);
    char why[KVF_PROFILE_WHY_BYTES] = "";
    memset(table->adapter_digest, 0x22, sizeof(table->adapter_digest));
    table->workloads |= KVF_WORKLOAD_CODE;
    table->sink_tokens = 4;
    profile_fixture_add(table, profile_fixture_saw(4, KVF_TENSOR_CENTER),
                        profile_fixture_saw(3, 0));
    table->kinds[0].v.clip = KVF_CLIP_SEARCH;
    profile_fixture_add(table, profile_fixture_saw(5, KVF_TENSOR_CENTER_PROFILE),
                        profile_fixture_tq(2, KVF_TENSOR_SPLIT | KVF_TENSOR_SCALE_LEAST_SQUARES));
    profile_fixture_add(table,
                        profile_fixture_tq(3, KVF_TENSOR_SPLIT | KVF_TENSOR_SCALE_MATCHED |
                                                  KVF_TENSOR_CENTER_PROFILE),
                        profile_fixture_tq(4, KVF_TENSOR_CENTER_PROFILE));
    profile_fixture_add(table, profile_fixture_kivi(4, false), profile_fixture_kivi(2, true));
    profile_fixture_add(
        table, (struct kvf_profile_tensor){.codec = KVF_CODEC_EXACT, .bits = KVF_BITS_EXACT},
        (struct kvf_profile_tensor){.codec = KVF_CODEC_RAW});
    memcpy(table->layer_kinds, layers, sizeof(layers));
    profile_fixture_fill(table, random);
    assert_int_equal(kvf_profile_table_validate(table, why), KVF_OK);
    assert_string_equal(why, "");
    return table;
}
