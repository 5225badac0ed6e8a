/* SPDX-License-Identifier: Apache-2.0
 *
 * rotate.c: the Hadamard step on tiles of vectors. The order of additions is rotate.h's.
 */
#include "codec/rotate.h"

#include <assert.h>
#include <stddef.h>
#include <string.h>

enum {
    FACTOR_MAX = KVF_ROTATE_FACTOR_MAX,
    STAGES_MAX = 8
};

static const uint32_t hadamard_12[12] = KVF_HADAMARD_12;
static const uint32_t hadamard_20[20] = KVF_HADAMARD_20;
static const uint32_t hadamard_28[28] = KVF_HADAMARD_28;
static const uint8_t stages[STAGES_MAX] = KVF_ROTATE_STAGES;

/* The odd-order factor m of k = m 2^n, and its signs; NULL for 1. */
static uint32_t factor_of(uint32_t order, const uint32_t **signs_out)
{
    uint32_t power = order & (~order + 1);
    switch (order / power) {
    case 3:
        *signs_out = hadamard_12;
        return 12;
    case 5:
        *signs_out = hadamard_20;
        return 20;
    case 7:
        *signs_out = hadamard_28;
        return 28;
    default:
        *signs_out = NULL;
        return 1;
    }
}

bool kvf_rotate_is_kronecker(uint32_t order)
{
    const uint32_t *signs;
    return factor_of(order, &signs) > 1;
}

uint32_t kvf_rotate_factor_order(uint32_t order)
{
    const uint32_t *signs;
    return factor_of(order, &signs);
}

uint16_t kvf_rotate_order(uint32_t dim)
{
    uint32_t power = dim & (~dim + 1);
    uint32_t odd = dim / power;
    /* 12, 20 and 28 are 3, 5 and 7 times 4 */
    if (odd == 1 || ((odd == 3 || odd == 5 || odd == 7) && power >= 4)) {
        return (uint16_t)dim;
    }
    return (uint16_t)power;
}

/* Constants instead of sqrtf, so that no library decides about bytes. All orders are one of these
 * times a power of 4, which scales a float exactly. */
struct root {
    uint32_t order;
    float sqrt;
    float rsqrt;
};

static const struct root roots[] = {
    {1, 1.0f, 1.0f},
    {2, 1.4142135623730951f, 0.70710678118654757f},
    {3, 1.7320508075688772f, 0.57735026918962573f},
    {5, 2.2360679774997898f, 0.44721359549995793f},
    {6, 2.4494897427831779f, 0.40824829046386302f},
    {7, 2.6457513110645907f, 0.37796447300922725f},
    {10, 3.1622776601683795f, 0.31622776601683794f},
    {14, 3.7416573867739413f, 0.2672612419124244f},
};

static const struct root *root_of(uint32_t order, float *scale_out)
{
    *scale_out = 1.0f;
    for (uint32_t rest = order; rest > 0; rest /= 4) {
        for (size_t i = 0; i < sizeof(roots) / sizeof(roots[0]); i++) {
            if (roots[i].order == rest) {
                return &roots[i];
            }
        }
        assert(rest % 4 == 0);
        *scale_out *= 2.0f;
    }
    assert(!"an order that kvf_rotate_order does not give");
    return &roots[0];
}

float kvf_rotate_sqrt(uint32_t order)
{
    float scale;
    const struct root *root = root_of(order, &scale);
    return root->sqrt * scale;
}

float kvf_rotate_rsqrt(uint32_t order)
{
    float scale;
    const struct root *root = root_of(order, &scale);
    return root->rsqrt / scale;
}

/* Float and integer differ in the type only, so both are made from these. */
#define DEFINE_STAGE(name, type)                                                                   \
    static void name(type tile[][KVF_ROTATE_LANES], uint32_t n, uint32_t stride)                   \
    {                                                                                              \
        for (uint32_t base = 0; base < n; base += 2 * stride) {                                    \
            for (uint32_t i = base; i < base + stride; i++) {                                      \
                type *restrict upper = tile[i];                                                    \
                type *restrict lower = tile[i + stride];                                           \
                for (int lane = 0; lane < KVF_ROTATE_LANES; lane++) {                              \
                    type u = upper[lane];                                                          \
                    type v = lower[lane];                                                          \
                    upper[lane] = u + v;                                                           \
                    lower[lane] = u - v;                                                           \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
    }

DEFINE_STAGE(stage_float, float)
DEFINE_STAGE(stage_int, int32_t)

/* y_r = x_0 +- x_1 +- ..., rows of the tile stride apart. transposed swaps the roles of r and a. */
#define DEFINE_FACTOR(name, type)                                                                  \
    static void name(type tile[][KVF_ROTATE_LANES], uint32_t m, uint32_t stride,                   \
                     const uint32_t *signs, bool transposed)                                       \
    {                                                                                              \
        type x[FACTOR_MAX][KVF_ROTATE_LANES];                                                      \
        for (uint32_t a = 0; a < m; a++) {                                                         \
            memcpy(x[a], tile[a * stride], sizeof(x[a]));                                          \
        }                                                                                          \
        for (uint32_t r = 0; r < m; r++) {                                                         \
            type *restrict y = tile[r * stride];                                                   \
            memset(y, 0, sizeof(x[0]));                                                            \
            for (uint32_t a = 0; a < m; a++) {                                                     \
                bool minus = (transposed ? signs[a] >> r : signs[r] >> a) & 1;                     \
                const type *restrict from = x[a];                                                  \
                for (int lane = 0; lane < KVF_ROTATE_LANES; lane++) {                              \
                    y[lane] = minus ? y[lane] - from[lane] : y[lane] + from[lane];                 \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
    }

DEFINE_FACTOR(factor_float, float)
DEFINE_FACTOR(factor_int, int32_t)

void kvf_rotate_forward(float tile[][KVF_ROTATE_LANES], uint32_t dim, uint32_t order)
{
    const uint32_t *signs;
    uint32_t m = factor_of(order, &signs);
    uint32_t power = order / m;
    for (uint32_t i = 0; i < STAGES_MAX; i++) {
        uint32_t stride = 1u << stages[i];
        if (stride < power) {
            stage_float(tile, dim, stride);
        }
    }
    if (m > 1) {
        for (uint32_t base = 0; base < dim; base += order) {
            for (uint32_t b = 0; b < power; b++) {
                factor_float(tile + base + b, m, power, signs, false);
            }
        }
    }
}

void kvf_rotate_inverse(int32_t tile[][KVF_ROTATE_LANES], uint32_t dim, uint32_t order)
{
    const uint32_t *signs;
    uint32_t m = factor_of(order, &signs);
    uint32_t power = order / m;
    for (uint32_t stride = 1; stride < power; stride *= 2) {
        stage_int(tile, dim, stride);
    }
    if (m > 1) {
        for (uint32_t base = 0; base < dim; base += order) {
            for (uint32_t b = 0; b < power; b++) {
                factor_int(tile + base + b, m, power, signs, true);
            }
        }
    }
}
