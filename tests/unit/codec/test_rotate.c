/* SPDX-License-Identifier: Apache-2.0
 *
 * test_rotate.c: the Hadamard step: its matrices, its inverse, and the order of its additions.
 */
#include "codec/rotate.h"

#include "base/random.h"
#include "codec/codec_fp.h"
#include "tests/support/support.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

enum {
    DIM_MAX = 256,
    LANES = KVF_ROTATE_LANES
};

static struct kvf_random_seeded random_bits;
static float tile[DIM_MAX][LANES];
static int32_t sums[DIM_MAX][LANES];

static const uint32_t dims[] = {1,  2,  12,  16,  20,  28,  48,  64, 72,
                                80, 96, 112, 128, 144, 192, 224, 256};
enum {
    N_DIMS = sizeof(dims) / sizeof(dims[0])
};

static void orders_are_whole_heads_where_possible(void **state)
{
    (void)state;
    static const uint16_t expected[][2] = {
        {64, 64},   {80, 80}, {96, 96},   {112, 112}, {128, 128}, {192, 192},
        {256, 256}, {72, 8},  {144, 16},  {100, 4},   {7, 1},     {6, 2},
        {12, 12},   {24, 24}, {160, 160}, {224, 224}, {176, 16},
    };
    for (size_t i = 0; i < sizeof(expected) / sizeof(expected[0]); i++) {
        assert_int_equal(kvf_rotate_order(expected[i][0]), expected[i][1]);
    }
    assert_true(kvf_rotate_is_kronecker(80));
    assert_false(kvf_rotate_is_kronecker(128));
}

static void roots_are_correctly_rounded(void **state)
{
    (void)state;
    for (uint32_t dim = 1; dim <= DIM_MAX; dim++) {
        uint32_t order = kvf_rotate_order(dim);
        assert_true(kvf_rotate_sqrt(order) == (float)sqrt((double)order));
        assert_true(kvf_rotate_rsqrt(order) == (float)(1.0 / sqrt((double)order)));
    }
}

/* Column a of H is what the step makes of a unit vector. All products of two columns: k on the
 * diagonal of a block, else 0; column 0 of each block is all ones, so every other column sums to
 * 0. */
static void columns_are_orthogonal(void **state)
{
    (void)state;
    static float columns[DIM_MAX][DIM_MAX];
    for (int n = 0; n < N_DIMS; n++) {
        uint32_t dim = dims[n];
        uint32_t order = kvf_rotate_order(dim);
        for (uint32_t a = 0; a < dim; a++) {
            memset(tile, 0, sizeof(tile));
            tile[a][a % LANES] = 1.0f;
            kvf_rotate_forward(tile, dim, order);
            for (uint32_t i = 0; i < dim; i++) {
                columns[a][i] = tile[i][a % LANES];
            }
        }
        for (uint32_t a = 0; a < dim; a++) {
            for (uint32_t b = 0; b < dim; b++) {
                float product = 0.0f;
                for (uint32_t i = 0; i < dim; i++) {
                    product += columns[a][i] * columns[b][i];
                }
                assert_true(product == (a == b ? (float)order : 0.0f));
            }
            for (uint32_t i = 0; i < order && a % order == 0; i++) {
                assert_true(columns[a][a + i] == 1.0f);
            }
        }
    }
}

/* H^T (H x) = k x over integers; the float step is exact on small integers. */
static void inverse_undoes_forward(void **state)
{
    (void)state;
    static int32_t original[DIM_MAX][LANES];
    for (int n = 0; n < N_DIMS; n++) {
        uint32_t order = kvf_rotate_order(dims[n]);
        for (uint32_t i = 0; i < dims[n]; i++) {
            for (int lane = 0; lane < LANES; lane++) {
                original[i][lane] = (int32_t)(kvf_random_seeded_next(&random_bits) >> 56) - 128;
                tile[i][lane] = (float)original[i][lane];
            }
        }
        kvf_rotate_forward(tile, dims[n], order);
        for (uint32_t i = 0; i < dims[n]; i++) {
            for (int lane = 0; lane < LANES; lane++) {
                sums[i][lane] = (int32_t)tile[i][lane];
            }
        }
        kvf_rotate_inverse(sums, dims[n], order);
        for (uint32_t i = 0; i < dims[n]; i++) {
            for (int lane = 0; lane < LANES; lane++) {
                assert_int_equal(sums[i][lane], original[i][lane] * (int32_t)order);
            }
        }
    }
}

/* One vector by Sylvester stages in the order given. */
static void stages_in_order(float *vector, uint32_t dim, const uint8_t *order, uint32_t n)
{
    for (uint32_t s = 0; s < n; s++) {
        uint32_t stride = 1u << order[s];
        for (uint32_t i = 0; i < dim; i++) {
            if ((i & stride) == 0) {
                float u = vector[i];
                float v = vector[i + stride];
                vector[i] = u + v;
                vector[i + stride] = u - v;
            }
        }
    }
}

/* Exponents over 24 binades: sums that round. */
static void fill_wide(float *vector, uint32_t dim)
{
    for (uint32_t i = 0; i < dim; i++) {
        uint64_t bits = kvf_random_seeded_next(&random_bits);
        uint32_t exponent = 127 - 12 + (uint32_t)(bits >> 32) % 24;
        vector[i] = kvf_f32_from_bits((uint32_t)(bits & 0x807fffff) | exponent << 23);
    }
}

/* The documented order is what is computed, and the vectors can tell: with any two stages swapped
 * they differ. */
static void additions_are_in_the_documented_order(void **state)
{
    (void)state;
    enum {
        DIM = 128,
        STAGES = 7,
        VECTORS = 200
    };
    static const uint8_t documented[STAGES] = {0, 1, 3, 4, 2, 5, 6};
    int differences[STAGES][STAGES] = {{0}};
    for (int v = 0; v < VECTORS; v++) {
        float input[DIM];
        float want[DIM];
        fill_wide(input, DIM);
        memcpy(want, input, sizeof(want));
        stages_in_order(want, DIM, documented, STAGES);
        for (uint32_t i = 0; i < DIM; i++) {
            tile[i][v % LANES] = input[i];
        }
        kvf_rotate_forward(tile, DIM, DIM);
        for (uint32_t i = 0; i < DIM; i++) {
            assert_int_equal(kvf_f32_bits(tile[i][v % LANES]), kvf_f32_bits(want[i]));
        }
        for (int a = 0; a < STAGES; a++) {
            for (int b = a + 1; b < STAGES; b++) {
                uint8_t swapped[STAGES];
                memcpy(swapped, documented, sizeof(swapped));
                swapped[a] = documented[b];
                swapped[b] = documented[a];
                float other[DIM];
                memcpy(other, input, sizeof(other));
                stages_in_order(other, DIM, swapped, STAGES);
                differences[a][b] += memcmp(other, want, sizeof(want)) != 0;
            }
        }
    }
    for (int a = 0; a < STAGES; a++) {
        for (int b = a + 1; b < STAGES; b++) {
            assert_true(differences[a][b] > VECTORS / 2);
        }
    }
}

/* What lets a tensor core do bits 0, 1, 3 and 4 in one product: on bf16 values within 12 binades
 * these stages are exact. Adding them in double, which cannot round here, gives the same. */
static void first_four_stages_are_exact_on_bf16(void **state)
{
    (void)state;
    enum {
        DIM = 32,
        VECTORS = 2000
    };
    static const uint8_t first[4] = {0, 1, 3, 4};
    for (int v = 0; v < VECTORS; v++) {
        float vector[DIM];
        double exact[DIM];
        for (uint32_t i = 0; i < DIM; i++) {
            uint64_t bits = kvf_random_seeded_next(&random_bits);
            uint32_t exponent = 127 - 12 + (uint32_t)(bits >> 32) % 13;
            vector[i] = kvf_f32_from_bits((uint32_t)(bits & 0x807f0000) | exponent << 23);
            exact[i] = vector[i];
        }
        stages_in_order(vector, DIM, first, 4);
        for (int s = 0; s < 4; s++) {
            uint32_t stride = 1u << first[s];
            for (uint32_t i = 0; i < DIM; i++) {
                if ((i & stride) == 0) {
                    double u = exact[i];
                    exact[i] = u + exact[i + stride];
                    exact[i + stride] = u - exact[i + stride];
                }
            }
        }
        for (uint32_t i = 0; i < DIM; i++) {
            assert_true((double)vector[i] == exact[i]);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(orders_are_whole_heads_where_possible),
        cmocka_unit_test(roots_are_correctly_rounded),
        cmocka_unit_test(columns_are_orthogonal),
        cmocka_unit_test(inverse_undoes_forward),
        cmocka_unit_test(additions_are_in_the_documented_order),
        cmocka_unit_test(first_four_stages_are_exact_on_bf16),
    };
    kvf_random_seeded_init(&random_bits, kvf_test_seed());
    return cmocka_run_group_tests(tests, NULL, NULL);
}
