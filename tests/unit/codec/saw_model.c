/* SPDX-License-Identifier: Apache-2.0
 *
 * saw_model.c: see saw_model.h. Slow and plain on purpose.
 */
#include "tests/unit/codec/saw_model.h"

#include "codec/rotate.h"

#include <math.h>
#include <string.h>

static double f16_values[0x7c00]; /* of the finite fp16 without sign, ascending */

static void f16_values_init(void)
{
    if (f16_values[1] == 0.0) {
        for (int bits = 0; bits < 0x7c00; bits++) {
            int exponent = bits >> 10;
            int mantissa = bits & 0x3ff;
            f16_values[bits] = exponent == 0 ? ldexp(mantissa, -24)
                                             : ldexp(mantissa + 1024, exponent - 25);
        }
    }
}

double saw_model_f16_value(uint16_t half)
{
    f16_values_init();
    double value = f16_values[half & 0x7fff];
    return half & 0x8000 ? -value : value;
}

/* The smallest magnitude >= value, or 0x7c00. */
static uint16_t f16_magnitude_up(double value)
{
    f16_values_init();
    int low = 0;
    int high = 0x7c00;
    while (low < high) {
        int middle = (low + high) / 2;
        if (f16_values[middle] >= value) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return (uint16_t)low;
}

uint16_t saw_model_f16_up(double value)
{
    if (value >= 0) {
        return f16_magnitude_up(value);
    }
    uint16_t magnitude = f16_magnitude_up(-value);
    if (magnitude == 0x7c00 || f16_values[magnitude] > -value) {
        magnitude--; /* towards zero */
    }
    return (uint16_t)(0x8000 | magnitude);
}

uint16_t saw_model_f16_down(double value)
{
    uint16_t up = saw_model_f16_up(-value);
    return value == 0 ? 0 : up ^ 0x8000;
}

static float sign_of(const struct saw_model *model, uint32_t i)
{
    return model->sign_bits[i / 8] >> (i % 8) & 1 ? -1.0f : 1.0f;
}

static uint32_t factor_signs(uint32_t m, uint32_t r)
{
    static const uint32_t h12[12] = KVF_HADAMARD_12;
    static const uint32_t h20[20] = KVF_HADAMARD_20;
    static const uint32_t h28[28] = KVF_HADAMARD_28;
    return m == 12 ? h12[r] : m == 20 ? h20[r] : h28[r];
}

static uint32_t factor_of(uint32_t order)
{
    return order % 28 == 0 ? 28 : order % 20 == 0 ? 20 : order % 12 == 0 ? 12 : 1;
}

void saw_model_rotate(const struct saw_model *model, float *vector)
{
    static const uint8_t documented[8] = {0, 1, 3, 4, 2, 5, 6, 7};
    const uint8_t *stages = model->stages != NULL ? model->stages : documented;
    uint32_t m = factor_of(model->order);
    uint32_t power = model->order / m;
    for (uint32_t s = 0; s < 8; s++) {
        uint32_t stride = 1u << stages[s];
        for (uint32_t i = 0; i < model->n && stride < power; i++) {
            if ((i & stride) == 0) {
                float u = vector[i];
                float v = vector[i + stride];
                vector[i] = u + v;
                vector[i + stride] = u - v;
            }
        }
    }
    for (uint32_t base = 0; base < model->n && m > 1; base += model->order) {
        for (uint32_t b = 0; b < power; b++) {
            float result[28];
            for (uint32_t r = 0; r < m; r++) {
                float sum = vector[base + b];
                for (uint32_t a = 1; a < m; a++) {
                    float term = vector[base + a * power + b];
                    sum = factor_signs(m, r) >> a & 1 ? sum - term : sum + term;
                }
                result[r] = factor_signs(m, r) & 1 ? -sum : sum; /* column 0 is all ones */
            }
            for (uint32_t r = 0; r < m; r++) {
                vector[base + r * power + b] = result[r];
            }
        }
    }
}

static bool has_zeros(const struct saw_model *model)
{
    return model->zero_kind == KVF_ZERO_INT || model->zero_kind == KVF_ZERO_HALF;
}

/* w of step 6, and what code 0 stands for. */
static float zero_of(const struct saw_model *model, const struct saw_model_vector *vector)
{
    return (float)vector->zero + (model->zero_kind == KVF_ZERO_HALF ? 0.5f : 0.0f);
}

static float lo_of(const struct saw_model *model, const struct saw_model_vector *vector)
{
    return has_zeros(model) ? -((float)saw_model_f16_value(vector->scale) * zero_of(model, vector))
                            : (float)saw_model_f16_value(vector->lo);
}

/* u in the place of lo. */
static void model_zero(const struct saw_model *model, struct saw_model_vector *out)
{
    float lo = (float)saw_model_f16_value(out->lo);
    float scale = (float)saw_model_f16_value(out->scale);
    float top = (float)((1u << model->bits) - 1);
    out->lo = 0;
    if (out->scale != 0) {
        float zero = -lo / scale;
        zero = model->zero_kind == KVF_ZERO_HALF ? zero - 0.5f : zero;
        out->zero = (uint8_t)nearbyintf(fminf(fmaxf(zero, 0.0f), top));
    }
}

/* Least and greatest of y, and of 0 where there are zeros. */
static void model_span(const struct saw_model *model, const float *y, float *min_out,
                       float *max_out)
{
    float min = has_zeros(model) ? 0.0f : y[0];
    float max = min;
    for (uint32_t i = 0; i < model->n; i++) {
        min = fminf(min, y[i]);
        max = fmaxf(max, y[i]);
    }
    *min_out = min;
    *max_out = max;
}

/* Steps 5 and 6: false is an escape. */
static bool model_range(const struct saw_model *model, const float *y, float c, uint32_t clip_q15,
                        struct saw_model_vector *out)
{
    float min;
    float max;
    model_span(model, y, &min, &max);
    if (clip_q15 != KVF_BLOCK_CLIP_ONE) {
        float ratio = (float)clip_q15 / 32768.0f;
        float middle = 0.5f * (min + max);
        float half = 0.5f * (max - min);
        half *= ratio;
        min = middle - half;
        max = middle + half;
    }
    min *= c;
    max *= c;
    out->lo = saw_model_f16_down((double)min);
    uint16_t hi = saw_model_f16_up((double)max);
    if ((out->lo & 0x7fff) == 0x7c00 || (hi & 0x7fff) == 0x7c00) {
        return false;
    }
    float range = (float)(saw_model_f16_value(hi) - saw_model_f16_value(out->lo));
    double levels = (double)((1u << model->bits) - 1);
    out->scale = f16_magnitude_up((double)range / levels);
    /* the quotient was rounded: let exact products decide */
    while (out->scale > 0 &&
           levels * saw_model_f16_value((uint16_t)(out->scale - 1)) >= (double)range) {
        out->scale--;
    }
    while (levels * saw_model_f16_value(out->scale) < (double)range) {
        out->scale++;
    }
    if (has_zeros(model)) {
        model_zero(model, out);
    }
    return out->scale == 0 || saw_model_f16_value(out->scale) >= 0x1p-20;
}

/* Step 7. */
static void model_codes(const struct saw_model *model, const float *y, float c, float d,
                        struct saw_model_vector *out)
{
    float scale = (float)saw_model_f16_value(out->scale);
    float offset = lo_of(model, out) * d;
    float factor = out->scale != 0 ? c * (1.0f / scale) : 0.0f;
    double top = (double)((1u << model->bits) - 1);
    for (uint32_t i = 0; i < model->n; i++) {
        float difference = y[i] - offset;
        double q = nearbyint((double)difference * (double)factor);
        out->codes[i] = (uint8_t)fmin(fmax(q, 0.0), top);
    }
}

/* Of a coefficient that is i sixteenths of the first ratio's step from the middle, if it is coded
 * with another ratio. */
static uint32_t model_cost(const struct saw_model *model, float i, uint32_t clip)
{
    float first = (float)model->clips_q15[0] / 32768.0f;
    float ratio = (float)model->clips_q15[clip] / 32768.0f;
    float q = nearbyintf(fmaf(i, first / (16.0f * ratio), -0.5f));
    q = fminf(q, (float)((1u << (model->bits - 1)) - 1));
    float e = fmaf(-(q + 0.5f), 16.0f * ratio / first, i);
    return (uint32_t)nearbyint((double)e * (double)e);
}

/* The same where there are zeros, of a coefficient that is i sixteenths from 0. */
static uint32_t model_zero_cost(const struct saw_model *model, float i, uint32_t clip,
                                const struct saw_model_vector *tried)
{
    float first = (float)model->clips_q15[0] / 32768.0f;
    float ratio = (float)model->clips_q15[clip] / 32768.0f;
    float q = nearbyintf(fmaf(i, first / (16.0f * ratio), zero_of(model, tried)));
    q = fminf(fmaxf(q, 0.0f), (float)((1u << model->bits) - 1));
    float e = fmaf(zero_of(model, tried) - q, 16.0f * ratio / first, i);
    return (uint32_t)nearbyint((double)e * (double)e);
}

/* The cost of a vector with a ratio; factor: of the first one. */
static uint32_t model_costs(const struct saw_model *model, const float *y, float factor,
                            uint32_t clip, const struct saw_model_vector *tried)
{
    uint32_t cost = 0;
    float min;
    float max;
    model_span(model, y, &min, &max);
    for (uint32_t i = 0; i < model->n; i++) {
        double distance = (double)fabsf(y[i] - 0.5f * (min + max));
        cost += has_zeros(model)
                    ? model_zero_cost(model, (float)nearbyint((double)y[i] * 16.0 * (double)factor),
                                      clip, tried)
                    : model_cost(model, (float)nearbyint(distance * 16.0 * (double)factor), clip);
    }
    return cost;
}

/* The search: the ratio with the least cost, the larger one of two. */
static void model_search(const struct saw_model *model, const float *y, float c, float d,
                         struct saw_model_vector *out)
{
    struct saw_model_vector first = {.escape = false};
    float factor = 0.0f;
    uint32_t least = UINT32_MAX;
    if (model_range(model, y, c, model->clips_q15[0], &first) && first.scale != 0) {
        factor = c * (1.0f / (float)saw_model_f16_value(first.scale));
    }
    for (uint32_t k = 0; k < model->n_clips; k++) {
        struct saw_model_vector tried = {.escape = false};
        bool is_coded = model_range(model, y, c, model->clips_q15[k], &tried);
        uint32_t cost = model_costs(model, y, factor, k, &tried);
        if (is_coded && (cost < least || (cost == least && model->takes_last))) {
            least = cost;
            *out = tried;
        }
    }
    if (!out->escape) {
        model_codes(model, y, c, d, out);
    }
}

void saw_model_encode(const struct saw_model *model, const float *input, const float *mean,
                      struct saw_model_vector *out)
{
    float y[MODEL_DIM_MAX];
    float rotated_mean[MODEL_DIM_MAX];
    float peak = 0.0f;
    *out = (struct saw_model_vector){.scale = 0x7e00, .escape = true};
    for (uint32_t i = 0; i < model->n; i++) {
        if (!(fabsf(input[i]) < 0x1p64f)) {
            return;
        }
        peak = fmaxf(peak, fabsf(input[i]));
    }
    int exponent = peak >= 0x1p-126f ? ilogbf(peak) : -127;
    for (uint32_t i = 0; i < model->n; i++) {
        bool drop = model->dtype == KVF_DTYPE_BF16 && exponent > -115 &&
                    fabsf(input[i]) < ldexpf(1.0f, exponent - 12);
        y[i] = drop ? 0.0f : sign_of(model, i) * input[i];
        rotated_mean[i] = mean != NULL ? sign_of(model, i) * mean[i] : 0.0f;
    }
    saw_model_rotate(model, y);
    saw_model_rotate(model, rotated_mean);
    for (uint32_t i = 0; i < model->n && mean != NULL; i++) {
        y[i] = y[i] - rotated_mean[i];
    }
    float c = (float)(1.0 / sqrt((double)model->order));
    float d = (float)sqrt((double)model->order);
    if (model->n_clips != 0) {
        model_search(model, y, c, d, out);
        return;
    }
    struct saw_model_vector coded = {.escape = false};
    if (model_range(model, y, c, model->clip_q15, &coded)) {
        model_codes(model, y, c, d, &coded);
        *out = coded;
    }
}

void saw_model_decode(const struct saw_model *model, const struct saw_model_vector *vector,
                      const float *mean, float *out)
{
    uint32_t m = factor_of(model->order);
    uint32_t power = model->order / m;
    float c = (float)(1.0 / sqrt((double)model->order));
    float d = (float)sqrt((double)model->order);
    float factor = (float)saw_model_f16_value(vector->scale) * c;
    float offset = lo_of(model, vector) * d;
    for (uint32_t i = 0; i < model->n; i++) {
        /* row i of H^T: a product of signs */
        uint32_t base = i / model->order * model->order;
        uint32_t a = i % model->order / power;
        uint32_t b = i % power;
        int sum = 0;
        for (uint32_t j = 0; j < model->order; j++) {
            int minus = __builtin_popcount(b & j % power) & 1;
            if (m > 1) {
                minus ^= factor_signs(m, j / power) >> a & 1;
            }
            sum += minus ? -vector->codes[base + j] : vector->codes[base + j];
        }
        float g = sign_of(model, i);
        float add = mean != NULL ? mean[i] : 0.0f;
        if (i == base) {
            add = add + g * offset;
        }
        out[i] = fmaf(g * factor, (float)sum, add);
    }
}

uint32_t saw_model_position(uint32_t n, uint32_t coefficient)
{
    uint32_t e[8];
    for (int bit = 0; bit < 8; bit++) {
        e[bit] = coefficient >> bit & 1;
    }
    /* row of the 16 x 16 product: k = (e1 e4 e3 e0); lane group g owns rows g and g + 8 */
    uint32_t row = e[1] << 3 | e[4] << 2 | e[3] << 1 | e[0];
    uint32_t g = row % 8;
    uint32_t h = row / 8;
    /* number of the product: the high bits and e2 */
    uint32_t j = coefficient >> 5 << 1 | e[2];
    uint32_t products = n / 16;
    return g * 2 * products + h * products + j;
}
