/* SPDX-License-Identifier: Apache-2.0
 *
 * test_views.c: every page layout gives the same record, and a record decodes into every layout,
 * whole or in part.
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

enum {
    LAYERS = 3,
    HEADS = 2,
    DIM_K = 64,
    DIM_V = 96,
    TOKENS = 140,
    PAGES_MAX = 256
};

static struct kvf_random_seeded random_bits;
static struct kvf_geometry geometry;
static struct fixture_kv kv;
static const char *const profiles[] = {"raw",       "exact",     "balanced", "saw8", "saw5",
                                       "kivi4-g32", "kivi2-g64", "tq4",      "tq2.5"};
enum {
    N_PROFILES = sizeof(profiles) / sizeof(profiles[0])
};

static int setup(void **state)
{
    (void)state;
    geometry = fixture_geometry(KVF_DTYPE_BF16, LAYERS, HEADS, DIM_K, DIM_V, 160);
    geometry.sink_tokens = 3;
    fixture_kv_init(&kv, &geometry, TOKENS);
    fixture_fill_hard(&kv, &random_bits);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    fixture_kv_fini(&kv);
    return 0;
}

/* K and V in memory of a test, by some strides. */
struct layout {
    const char *name;
    uint32_t tokens_a_page;
    bool page_table;
    size_t misalign;
    size_t page_stride;
    size_t token_stride;
    size_t head_stride;
    size_t v_offset; /* of V's vectors from K's */
};

enum {
    K_BYTES = DIM_K * 2,
    V_BYTES = DIM_V * 2
};

static const struct layout layouts[] = {
    /* (B, N, H, 2D): V beside K */
    {"interleaved", 16, false, 0, 16 * HEADS *(K_BYTES + V_BYTES), HEADS *(K_BYTES + V_BYTES),
     K_BYTES + V_BYTES, K_BYTES},
    /* (B, H, N, 2D), pages in any order, odd addresses */
    {"head-major, scattered, odd", 8, true, 1, 8 * HEADS *(K_BYTES + V_BYTES) + 5,
     K_BYTES + V_BYTES, 8 * (K_BYTES + V_BYTES), K_BYTES},
    /* one token a page, as in slot layouts */
    {"slots", 1, true, 0, HEADS *(K_BYTES + V_BYTES) + 64, 0, K_BYTES + V_BYTES, K_BYTES},
    /* padded heads and tokens, pages longer than the chunk */
    {"padded", 200, false, 2, 0, HEADS * 512 + 96, 512, 256},
};
enum {
    N_LAYOUTS = sizeof(layouts) / sizeof(layouts[0])
};

struct laid_out {
    uint8_t *memory;
    size_t layer_bytes;
    void *k_layers[LAYERS];
    void *v_layers[LAYERS];
    uint32_t page_table[PAGES_MAX];
    struct kvf_kv_view view;
};

static void laid_out_init(struct laid_out *out, const struct layout *layout)
{
    uint32_t pages = (TOKENS + layout->tokens_a_page - 1) / layout->tokens_a_page;
    size_t page_bytes = layout->page_stride != 0 ? layout->page_stride
                                                 : layout->tokens_a_page * layout->token_stride;
    out->layer_bytes = 4 * pages * page_bytes + 4096;
    out->memory = malloc(LAYERS * out->layer_bytes);
    assert_non_null(out->memory);
    memset(out->memory, 0x77, LAYERS * out->layer_bytes);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        out->k_layers[layer] = out->memory + layer * out->layer_bytes + layout->misalign;
        out->v_layers[layer] = (uint8_t *)out->k_layers[layer] + layout->v_offset;
    }
    for (uint32_t page = 0; page < pages; page++) {
        out->page_table[page] = (page * 13 + 3) % (pages * 4); /* 13 is prime to both */
    }
    struct kvf_tensor_view tensor = {out->k_layers, layout->page_stride, layout->token_stride,
                                     layout->head_stride};
    out->view = (struct kvf_kv_view){
        .struct_bytes = sizeof(out->view),
        .tokens_a_page = layout->tokens_a_page,
        .page_table = layout->page_table ? out->page_table : NULL,
        .k = tensor,
        .v = tensor,
    };
    out->view.v.layers = out->v_layers;
}

/* The address by the formula of kvferry.h. */
static uint8_t *address(const struct kvf_kv_view *view, int is_v, uint32_t layer, uint32_t head,
                        uint32_t token)
{
    const struct kvf_tensor_view *tensor = is_v ? &view->v : &view->k;
    uint32_t page = token / view->tokens_a_page;
    page = view->page_table != NULL ? view->page_table[page] : page;
    return (uint8_t *)tensor->layers[layer] + page * tensor->page_stride_bytes +
           token % view->tokens_a_page * tensor->token_stride_bytes +
           head * tensor->head_stride_bytes;
}

/* Copy from kv, or compare with it: token t of the view is token_first + t of kv. */
static void copy_or_compare(const struct kvf_kv_view *view, const struct fixture_kv *other,
                            uint32_t layer_first, uint32_t n_layers, uint32_t token_first,
                            uint32_t n_tokens, bool compare)
{
    for (uint32_t layer = layer_first; layer < layer_first + n_layers; layer++) {
        for (uint32_t head = 0; head < HEADS; head++) {
            for (uint32_t token = 0; token < n_tokens; token++) {
                for (int is_v = 0; is_v < 2; is_v++) {
                    uint8_t *here = address(view, is_v, layer, head, token);
                    uint8_t *there = fixture_kv_vector(other, is_v, layer, head,
                                                       token_first + token);
                    size_t bytes = is_v ? V_BYTES : K_BYTES;
                    if (compare) {
                        assert_memory_equal(here, there, bytes);
                    } else {
                        memcpy(here, there, bytes);
                    }
                }
            }
        }
    }
}

static void every_layout_gives_the_same_record(void **state)
{
    (void)state;
    for (int p = 0; p < N_PROFILES; p++) {
        struct fixture_codec codec;
        struct fixture_codec other;
        struct fixture_kv whole;
        fixture_codec_init(&codec, &geometry, profiles[p]);
        fixture_codec_init(&other, &geometry, profiles[p]);
        fixture_encode(&codec, &kv, 0);
        fixture_kv_init(&whole, &geometry, TOKENS);
        fixture_decode(&codec, &whole);
        for (int i = 0; i < N_LAYOUTS; i++) {
            struct laid_out pages;
            laid_out_init(&pages, &layouts[i]);
            copy_or_compare(&pages.view, &kv, 0, LAYERS, 0, TOKENS, false);
            size_t payload_bytes = 0;
            assert_int_equal(kvf_block_encode(&other.plan, &pages.view, 0, TOKENS, other.page,
                                              other.payload, other.payload_capacity,
                                              other.workspace, &payload_bytes),
                             KVF_OK);
            assert_int_equal(KVF_BLOCK_PAGE_BYTES + payload_bytes, codec.record_bytes);
            assert_memory_equal(other.page, codec.page, codec.record_bytes);
            memset(pages.memory, 0x77, LAYERS * pages.layer_bytes);
            assert_int_equal(kvf_block_decode(&codec.plan, codec.page, codec.record_bytes, 0, 0, 0,
                                              0, &pages.view, codec.workspace),
                             KVF_OK);
            copy_or_compare(&pages.view, &whole, 0, LAYERS, 0, TOKENS, true);
            free(pages.memory);
        }
        fixture_kv_fini(&whole);
        fixture_codec_fini(&codec);
        fixture_codec_fini(&other);
    }
}

static uint32_t below(uint32_t n)
{
    return (uint32_t)(kvf_random_seeded_next(&random_bits) >> 33) % n;
}

/* Any layers and tokens decode to what the whole block has there, and nothing else is written. */
static void parts_equal_slices_of_the_whole(void **state)
{
    (void)state;
    for (int p = 0; p < N_PROFILES; p++) {
        struct fixture_codec codec;
        struct fixture_kv whole;
        fixture_codec_init(&codec, &geometry, profiles[p]);
        fixture_encode(&codec, &kv, 0);
        fixture_kv_init(&whole, &geometry, TOKENS);
        fixture_decode(&codec, &whole);
        for (int round = 0; round < 60; round++) {
            uint32_t layer_first = below(LAYERS);
            uint32_t n_layers = below(LAYERS - layer_first) + 1;
            uint32_t token_first = below(TOKENS);
            uint32_t n_tokens = below(TOKENS - token_first) + 1;
            const struct layout *layout = &layouts[below(N_LAYOUTS)];
            struct laid_out pages;
            struct laid_out untouched;
            laid_out_init(&pages, layout);
            laid_out_init(&untouched, layout);
            assert_int_equal(kvf_block_decode(&codec.plan, codec.page, codec.record_bytes,
                                              layer_first, n_layers, token_first, n_tokens,
                                              &pages.view, codec.workspace),
                             KVF_OK);
            copy_or_compare(&pages.view, &whole, layer_first, n_layers, token_first, n_tokens,
                            true);
            /* put back what was there: then nothing may differ */
            for (uint32_t layer = layer_first; layer < layer_first + n_layers; layer++) {
                for (uint32_t head = 0; head < HEADS; head++) {
                    for (uint32_t token = 0; token < n_tokens; token++) {
                        memset(address(&pages.view, 0, layer, head, token), 0x77, K_BYTES);
                        memset(address(&pages.view, 1, layer, head, token), 0x77, V_BYTES);
                    }
                }
            }
            assert_memory_equal(pages.memory, untouched.memory, LAYERS * pages.layer_bytes);
            free(pages.memory);
            free(untouched.memory);
        }
        fixture_kv_fini(&whole);
        fixture_codec_fini(&codec);
    }
}

/* Records lie where they lie: any address will do. */
static void records_decode_from_odd_addresses(void **state)
{
    (void)state;
    for (int p = 0; p < N_PROFILES; p++) {
        struct fixture_codec codec;
        struct fixture_kv whole;
        struct fixture_kv again;
        fixture_codec_init(&codec, &geometry, profiles[p]);
        fixture_encode(&codec, &kv, 0);
        fixture_kv_init(&whole, &geometry, TOKENS);
        fixture_kv_init(&again, &geometry, TOKENS);
        fixture_decode(&codec, &whole);
        uint8_t *moved = malloc(codec.record_bytes + 3);
        assert_non_null(moved);
        memcpy(moved + 3, codec.page, codec.record_bytes);
        assert_int_equal(kvf_block_decode(&codec.plan, moved + 3, codec.record_bytes, 0, 0, 0, 0,
                                          &again.view, codec.workspace),
                         KVF_OK);
        assert_memory_equal(again.memory, whole.memory, whole.memory_bytes);
        free(moved);
        fixture_kv_fini(&whole);
        fixture_kv_fini(&again);
        fixture_codec_fini(&codec);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_layout_gives_the_same_record),
        cmocka_unit_test(parts_equal_slices_of_the_whole),
        cmocka_unit_test(records_decode_from_odd_addresses),
    };
    kvf_random_seeded_init(&random_bits, kvf_test_seed());
    int failures = 0;
    for (int level = 0; fixture_use_level(level); level++) {
        failures += cmocka_run_group_tests(tests, setup, teardown);
    }
    return failures;
}
