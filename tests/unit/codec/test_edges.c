/* SPDX-License-Identifier: Apache-2.0
 *
 * test_edges.c: plans whose first and last layers are stored otherwise than the others, and what
 * the profiles made of tq take.
 */
#include "codec/codec_layout.h"
#include "tests/support/support.h"
#include "tests/unit/codec/codec_fixture.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

enum {
    LAYERS = 7,
    EDGES = 2, /* at each end */
    HEADS = 2,
    DIM = 128,
    TOKENS = 256
};

static struct kvf_random_seeded random_bits;

static void trip_init(struct fixture_trip *trip, const char *profile, uint32_t n_layers,
                      uint32_t token_start)
{
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_F32, n_layers, HEADS, DIM, DIM,
                                                    TOKENS);
    fixture_trip_init(trip, &geometry, profile, TOKENS);
    fixture_fill_normal(&trip->kv, &random_bits);
    fixture_encode(&trip->codec, &trip->kv, token_start);
    fixture_decode(&trip->codec, &trip->back);
}

/* Squared error of K or V of a layer. */
static double error_of(const struct fixture_trip *trip, int is_v, uint32_t layer)
{
    double error = 0.0;
    double signal = 0.0;
    for (uint32_t v = 0; v < HEADS * TOKENS; v++) {
        const uint8_t *a = fixture_kv_vector(&trip->kv, is_v, layer, v / TOKENS, v % TOKENS);
        const uint8_t *b = fixture_kv_vector(&trip->back, is_v, layer, v / TOKENS, v % TOKENS);
        for (uint32_t i = 0; i < DIM; i++) {
            double x = (double)fixture_load(KVF_DTYPE_F32, a, i);
            double y = (double)fixture_load(KVF_DTYPE_F32, b, i);
            error += (x - y) * (x - y);
            signal += x * x;
        }
    }
    return error / signal;
}

static void edges_have_8_bits(void **state)
{
    (void)state;
    static const struct {
        const char *profile;
        uint8_t inner; /* both nibbles */
        double error_min[2];
    } cases[] = {{"dense", 0x34, {.008, .030}}, {"max-edges", 0x23, {.024, .10}}};
    for (int c = 0; c < 2; c++) {
        struct fixture_trip trip;
        trip_init(&trip, cases[c].profile, LAYERS, TOKENS);
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            bool is_edge = layer < EDGES || layer >= LAYERS - EDGES;
            assert_int_equal(trip.codec.page->layer_bits[layer], is_edge ? 0x88 : cases[c].inner);
            for (int is_v = 0; is_v < 2; is_v++) {
                double error = error_of(&trip, is_v, layer);
                assert_true(is_edge ? error < 1e-4 : error > cases[c].error_min[is_v]);
            }
        }
        fixture_trip_fini(&trip);
    }
}

/* In a model of four layers or fewer each layer is near an end. */
static void short_models_are_all_edges(void **state)
{
    (void)state;
    for (uint32_t n_layers = 1; n_layers <= 5; n_layers++) {
        struct fixture_trip trip;
        trip_init(&trip, "max-edges", n_layers, TOKENS);
        for (uint32_t layer = 0; layer < n_layers; layer++) {
            assert_true((trip.codec.page->layer_bits[layer] == 0x88) ==
                        (n_layers < 5 || layer != 2));
        }
        fixture_trip_fini(&trip);
    }
}

/* Bits a value at dim 128 and 256 tokens: codes, a scale of 16 bits for each vector of a rotation,
 * 16 for 256 tokens where centred, and the list of channels, which is padded to 128 bytes for two
 * heads. */
static void sizes_are_exact(void **state)
{
    (void)state;
    static const double list = 128.0 / (HEADS * TOKENS * DIM) * 8.0;
    const double mean = 0.0625;
    const double saw8 = (8.25 + mean + 8.25) / 2;
    const struct {
        const char *profile;
        double bits;
    } cases[] = {
        {"tq4", (4.125 + mean + 4.125) / 2},
        {"tq3", (3.125 + mean + 3.125) / 2},
        {"tq2", (2.125 + mean + 2.125) / 2},
        {"tq2-centred", 2.125 + mean},
        {"tq3.5", (3.5 + mean + 3.5) / 2 + list},
        {"tq2.5", (2.5 + mean + 2.5) / 2 + list},
        {"tq4-paper", 4.125},
        {"tq4-qjl", 4.25},
        {"dense", ((4.25 + mean + 3.125) / 2 * 3 + saw8 * 4) / LAYERS},
        {"max", (3.125 + 2.125) / 2 + mean},
        {"max-edges", ((3.5 + mean + list + 2.125) / 2 * 3 + saw8 * 4) / LAYERS},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct fixture_trip trip;
        trip_init(&trip, cases[i].profile, LAYERS, TOKENS);
        double bits = (double)kvf_codec_plan_payload_bytes(&trip.codec.plan, TOKENS) * 8.0 /
                      (LAYERS * HEADS * TOKENS * 2.0 * DIM);
        /* with both in one part, mean and list of K are padded once */
        assert_true(fabs(bits - cases[i].bits) < 0.01);
        uint64_t sizes[KVF_CODEC_FIXED_SIZES_MAX];
        assert_true(kvf_codec_plan_is_fixed(&trip.codec.plan));
        assert_true(kvf_codec_plan_fixed_sizes(&trip.codec.plan, sizes) >= 1);
        assert_int_equal(trip.codec.record_bytes, sizes[0]);
        fixture_trip_fini(&trip);
    }
}

/* Profile max-edges keeps four sinks whatever the geometry says, more if it says more. */
static void sinks_are_kept(void **state)
{
    (void)state;
    static const uint16_t asked[] = {0, 4, 9};
    for (int i = 0; i < 3; i++) {
        uint16_t kept = asked[i] > 4 ? asked[i] : 4;
        struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 5, 1, 64, 64, 64);
        geometry.sink_tokens = asked[i];
        struct fixture_trip trip;
        fixture_trip_init(&trip, &geometry, "max-edges", 64);
        fixture_fill_normal(&trip.kv, &random_bits);
        fixture_trip_run(&trip);
        assert_int_equal(trip.codec.page->header.n_sink_raw, kept);
        assert_int_equal(trip.codec.page->header.n_escapes, kept * 5 * 2);
        for (uint32_t token = 0; token <= kept; token++) {
            int differs = memcmp(fixture_kv_vector(&trip.kv, 1, 2, 0, token),
                                 fixture_kv_vector(&trip.back, 1, 2, 0, token), 64 * 2);
            assert_true((differs == 0) == (token < kept));
        }
        uint64_t sizes[KVF_CODEC_FIXED_SIZES_MAX];
        assert_int_equal(kvf_codec_plan_fixed_sizes(&trip.codec.plan, sizes), 2);
        assert_int_equal(trip.codec.record_bytes, sizes[1]);
        fixture_trip_fini(&trip);
    }
}

/* Layers from the middle of one kind to the middle of the other come back as with all. */
static void ranges_cross_the_border(void **state)
{
    (void)state;
    struct fixture_trip trip;
    struct fixture_kv part;
    trip_init(&trip, "max-edges", LAYERS, 0);
    fixture_kv_init(&part, &trip.kv.geometry, TOKENS);
    assert_int_equal(kvf_block_decode(&trip.codec.plan, trip.codec.page, trip.codec.record_bytes, 1,
                                      5, 0, 0, &part.view, trip.codec.workspace),
                     KVF_OK);
    for (uint32_t layer = 1; layer < 6; layer++) {
        assert_memory_equal(part.k_layers[layer], trip.back.k_layers[layer], part.k_bytes);
        assert_memory_equal(part.v_layers[layer], trip.back.v_layers[layer], part.v_bytes);
    }
    fixture_kv_fini(&part);
    fixture_trip_fini(&trip);
}

static int decode_with_bits(struct fixture_trip *trip, uint32_t layer, uint8_t bits,
                            int *checked_out)
{
    struct kvf_record_page *page = trip->codec.page;
    uint8_t before = page->layer_bits[layer];
    page->layer_bits[layer] = bits;
    kvf_block_seal_header(page);
    *checked_out = kvf_block_check(page, trip->codec.record_bytes);
    int status = kvf_block_decode(&trip->codec.plan, page, trip->codec.record_bytes, 0, 0, 0, 0,
                                  &trip->back.view, trip->codec.workspace);
    page->layer_bits[layer] = before;
    kvf_block_seal_header(page);
    return status;
}

/* A page may say 8 bits for a layer of a tensor that has edges, and is then decoded only by a plan
 * that has them in the same place. */
static void edges_in_other_places_are_refused(void **state)
{
    (void)state;
    struct fixture_trip trip;
    int checked;
    trip_init(&trip, "max-edges", LAYERS, TOKENS);
    assert_int_equal(decode_with_bits(&trip, 3, 0x23, &checked), KVF_OK);
    assert_int_equal(decode_with_bits(&trip, 3, 0x83, &checked), KVF_ERR_CORRUPT);
    assert_int_equal(checked, KVF_OK);
    assert_int_equal(decode_with_bits(&trip, 3, 0x28, &checked), KVF_ERR_CORRUPT);
    assert_int_equal(checked, KVF_OK);
    assert_int_equal(decode_with_bits(&trip, 0, 0x23, &checked), KVF_ERR_CORRUPT);
    assert_int_equal(checked, KVF_OK);
    assert_int_equal(decode_with_bits(&trip, 3, 0x24, &checked), KVF_ERR_CORRUPT);
    assert_int_equal(checked, KVF_ERR_CORRUPT);
    fixture_trip_fini(&trip);
    trip_init(&trip, "tq3", LAYERS, TOKENS);
    assert_int_equal(decode_with_bits(&trip, 0, 0x38, &checked), KVF_ERR_CORRUPT);
    assert_int_equal(checked, KVF_ERR_CORRUPT);
    fixture_trip_fini(&trip);
}

/* Too many escapes in an edge and in an inner layer: both are stored raw, the others are not. */
static void both_kinds_fall_back_to_raw(void **state)
{
    (void)state;
    struct fixture_trip trip;
    trip_init(&trip, "dense", LAYERS, TOKENS);
    for (uint32_t layer = 1; layer <= 3; layer += 2) {
        for (uint32_t token = 0; token < TOKENS; token += 4) {
            fixture_store(KVF_DTYPE_F32, fixture_kv_vector(&trip.kv, 1, layer, 1, token), 5, NAN);
            fixture_store(KVF_DTYPE_F32, fixture_kv_vector(&trip.kv, 1, layer, 0, token), 5, 1e30f);
        }
    }
    fixture_store(KVF_DTYPE_F32, fixture_kv_vector(&trip.kv, 0, 0, 1, 9), 5, NAN);
    fixture_store(KVF_DTYPE_F32, fixture_kv_vector(&trip.kv, 1, 4, 1, 9), 5, NAN);
    fixture_encode(&trip.codec, &trip.kv, TOKENS);
    fixture_decode(&trip.codec, &trip.back);
    assert_int_equal(trip.codec.page->layer_bits[1], 0x08);
    assert_int_equal(trip.codec.page->layer_bits[3], 0x04);
    assert_int_equal(trip.codec.page->layer_bits[4], 0x34);
    assert_int_equal(trip.codec.page->header.n_escapes, 2);
    assert_memory_equal(trip.back.v_layers[1], trip.kv.v_layers[1], trip.kv.v_bytes);
    assert_memory_equal(trip.back.v_layers[3], trip.kv.v_layers[3], trip.kv.v_bytes);
    assert_memory_equal(fixture_kv_vector(&trip.back, 0, 0, 1, 9),
                        fixture_kv_vector(&trip.kv, 0, 0, 1, 9), DIM * 4);
    assert_memory_equal(fixture_kv_vector(&trip.back, 1, 4, 1, 9),
                        fixture_kv_vector(&trip.kv, 1, 4, 1, 9), DIM * 4);
    fixture_trip_fini(&trip);
}

/* The rotary part of MLA is raw in every layer. */
static void mla_has_edges_in_the_latent(void **state)
{
    (void)state;
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 5, 1, 512, 64, 32);
    geometry.kind = KVF_KIND_MLA;
    struct fixture_kv kv;
    struct fixture_codec codec;
    fixture_kv_init(&kv, &geometry, 32);
    fixture_codec_init(&codec, &geometry, "max-edges");
    fixture_fill_normal(&kv, &random_bits);
    fixture_encode(&codec, &kv, 0);
    assert_int_equal(codec.page->layer_bits[1], 0x08);
    assert_int_equal(codec.page->layer_bits[2], 0x03);
    fixture_decode(&codec, &kv);
    fixture_codec_fini(&codec);
    fixture_kv_fini(&kv);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(edges_have_8_bits),
        cmocka_unit_test(short_models_are_all_edges),
        cmocka_unit_test(sizes_are_exact),
        cmocka_unit_test(sinks_are_kept),
        cmocka_unit_test(ranges_cross_the_border),
        cmocka_unit_test(edges_in_other_places_are_refused),
        cmocka_unit_test(both_kinds_fall_back_to_raw),
        cmocka_unit_test(mla_has_edges_in_the_latent),
    };
    kvf_random_seeded_init(&random_bits, kvf_test_seed());
    return cmocka_run_group_tests(tests, NULL, NULL);
}
