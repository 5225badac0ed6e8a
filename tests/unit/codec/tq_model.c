/* SPDX-License-Identifier: Apache-2.0
 *
 * tq_model.c: see tq_model.h. Slow and plain on purpose.
 */
#include "tests/unit/codec/tq_model.h"

#include "codec/codec_tq_codebook.h"

#include <math.h>
#include <string.h>

/* The positive half of each codebook, by the committed tables, and their units. */
static const struct {
    uint8_t levels[16];
    uint8_t thresholds[7];
    float unit;
    float step;
} books[5] = {
    [1] = {{KVF_TQ_LEVELS_1}, {0}, KVF_TQ_UNIT_1, KVF_TQ_STEP_1},
    [2] = {{KVF_TQ_LEVELS_2}, {KVF_TQ_THRESHOLDS_2}, KVF_TQ_UNIT_2, KVF_TQ_STEP_2},
    [3] = {{KVF_TQ_LEVELS_3}, {KVF_TQ_THRESHOLDS_3}, KVF_TQ_UNIT_3, KVF_TQ_STEP_3},
    [4] = {{KVF_TQ_LEVELS_4}, {KVF_TQ_THRESHOLDS_4}, KVF_TQ_UNIT_4, KVF_TQ_STEP_4},
};

static double f16_value(uint32_t bits)
{
    return bits < 0x400 ? ldexp(bits, -24) : ldexp((bits & 0x3ff) + 1024, (int)(bits >> 10) - 25);
}

/* The nearest fp16 of a number that is not negative, ties to even, saturated. */
static uint16_t f16_nearest(double value)
{
    uint32_t low = 0;
    uint32_t high = 0x7bff;
    while (low < high) { /* the last one that is not above value */
        uint32_t middle = (low + high + 1) / 2;
        if (f16_value(middle) <= value) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    if (low == 0x7bff) {
        return (uint16_t)low;
    }
    double below = value - f16_value(low);
    double above = f16_value(low + 1) - value;
    return (uint16_t)(above < below || (above == below && low % 2 != 0) ? low + 1 : low);
}

static int level_of(uint32_t bits, uint32_t code)
{
    return books[bits].levels[code] - 128;
}

static float sign_of(const struct tq_model *model, uint32_t channel)
{
    return model->tensor->sign_bits[channel / 8] >> (channel % 8) & 1 ? -1.0f : 1.0f;
}

static struct saw_model rotation_model(const struct kvf_codec_rotation *rotation)
{
    return (struct saw_model){.n = rotation->n, .order = rotation->order};
}

/* (5) terms by coefficient, in the stored order. */
static float sum_of(const struct tq_model *model, const float *a, const float *b,
                    const uint8_t *order, uint32_t n)
{
    float sums[16] = {0};
    uint32_t run = (n + 15) / 16;
    for (uint32_t p = 0; p < n; p++) {
        uint32_t i = model->by_coefficient ? p : order[p];
        sums[p / run] = fmaf(a[i], b[i], sums[p / run]);
    }
    for (int half = 8; half > 0; half /= 2) {
        for (int s = 0; s < half; s++) {
            sums[s] = sums[s] + sums[s + half];
        }
    }
    return sums[0];
}

/* (6) */
static uint8_t code_of(uint32_t bits, float y, float f)
{
    double m = nearbyint((double)fmaf(y, f, 0.5f) * 255.0);
    m = fmin(fmax(m, 0.0), 255.0);
    int a = m >= 128.0 ? (int)m - 128 : 127 - (int)m;
    int half = 1 << (bits - 1);
    int above = 0;
    while (above < half - 1 && books[bits].thresholds[above] <= a) {
        above++;
    }
    return (uint8_t)(m >= 128.0 ? half + above : half - 1 - above);
}

/* (7) */
static uint16_t scale_of(const struct tq_model *model, const struct kvf_codec_rotation *rotation,
                         float square, float product, float power)
{
    float c = (float)(1.0 / sqrt((double)rotation->order)) / books[rotation->bits].unit;
    float r = 1.0f / sqrtf((float)rotation->n * (float)rotation->order);
    float scale;
    if (square == 0.0f) {
        return 0;
    }
    switch (model->tensor->descriptor.flags >> 4 & 3) {
    case 0:
        scale = sqrtf(square) * r;
        break;
    case 1:
        scale = sqrtf(square / power) * c;
        break;
    case 2:
        scale = product / power;
        scale = scale * c;
        break;
    default:
        scale = square / product;
        scale = scale * c;
        break;
    }
    return f16_nearest((double)scale);
}

bool tq_model_is_minus(const struct tq_model *model, uint32_t j, uint32_t i)
{
    uint64_t z = model->tensor->descriptor.rot_seed +
                 0x9e3779b97f4a7c15U * (uint64_t)(4 * j + i / 64 + 1);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9U;
    z = (z ^ z >> 27) * 0x94d049bb133111ebU;
    z ^= z >> 31;
    return (z >> i % 64 & 1) != 0;
}

/* (8) */
static void encode_residual(const struct tq_model *model, const float *y, const float *levels,
                            struct tq_model_vector *out)
{
    const struct kvf_codec_rotation *rotation = &model->tensor->rotations[0];
    const uint8_t *order = model->tensor->order;
    uint32_t n = rotation->n;
    float residual[MODEL_DIM_MAX];
    float signs[MODEL_DIM_MAX];
    float a = (float)sqrt((double)rotation->order) * books[rotation->bits].unit;
    a = (float)f16_value(out->scales[0]) * a;
    for (uint32_t i = 0; i < n; i++) {
        residual[i] = fmaf(-a, levels[i], y[i]);
    }
    float square = sum_of(model, residual, residual, order, n);
    float r = 1.0f / sqrtf((float)n * (float)rotation->order);
    out->scales[1] = f16_nearest((double)(sqrtf(square) * r));
    for (uint32_t j = 0; j < n; j++) {
        for (uint32_t i = 0; i < n; i++) {
            signs[i] = tq_model_is_minus(model, j, i) ? -1.0f : 1.0f;
        }
        out->signs[j] = sum_of(model, residual, signs, order, n) < 0.0f;
    }
}

/* (4 to 8) One rotation of a vector that is flipped and without its small elements. */
static void encode_rotation(const struct tq_model *model, uint32_t r, const float *flipped,
                            const float *mean, struct tq_model_vector *out)
{
    const struct kvf_codec_tensor *tensor = model->tensor;
    const struct kvf_codec_rotation *rotation = &tensor->rotations[r];
    uint32_t first = r == 0 ? 0 : tensor->rotations[0].n;
    uint32_t n = rotation->n;
    const uint8_t *order = tensor->order + first;
    struct saw_model rotate = rotation_model(rotation);
    float y[MODEL_DIM_MAX];
    float rotated_mean[MODEL_DIM_MAX];
    float levels[MODEL_DIM_MAX];
    for (uint32_t i = 0; i < n; i++) {
        uint32_t channel = model->channels[first + i];
        y[i] = flipped[channel];
        rotated_mean[i] = mean != NULL ? sign_of(model, channel) * mean[channel] : 0.0f;
    }
    saw_model_rotate(&rotate, y);
    saw_model_rotate(&rotate, rotated_mean);
    for (uint32_t i = 0; i < n && mean != NULL; i++) {
        y[i] = y[i] - rotated_mean[i];
    }
    float square = sum_of(model, y, y, order, n);
    float root_mean_square = sqrtf(square) * (1.0f / sqrtf((float)n * (float)rotation->order));
    out->escape |= square != 0.0f && !(root_mean_square >= 0x1p-20f && root_mean_square < 0x1p13f);
    float f = sqrtf((float)n) / (255.0f * books[rotation->bits].step);
    f = square != 0.0f ? f * (1.0f / sqrtf(square)) : 0.0f;
    float power = 0.0f;
    for (uint32_t i = 0; i < n; i++) {
        out->codes[first + i] = code_of(rotation->bits, y[i], f);
        levels[i] = (float)level_of(rotation->bits, out->codes[first + i]);
        power += levels[i] * levels[i];
    }
    out->scales[r] = scale_of(model, rotation, square, sum_of(model, y, levels, order, n), power);
    if ((tensor->descriptor.flags & KVF_TENSOR_RESIDUAL) != 0) {
        encode_residual(model, y, levels, out);
    }
}

void tq_model_encode(const struct tq_model *model, const float *input, const float *mean,
                     struct tq_model_vector *out)
{
    static const struct tq_model_vector escaped = {.escape = true, .scales = {0x7e00, 0}};
    uint32_t group = model->tensor->group;
    float flipped[MODEL_DIM_MAX];
    float peak = 0.0f;
    *out = escaped;
    for (uint32_t i = 0; i < group; i++) {
        if (!(fabsf(input[i]) < 0x1p64f)) {
            return;
        }
        peak = fmaxf(peak, fabsf(input[i]));
    }
    int exponent = peak >= 0x1p-126f ? ilogbf(peak) : -127;
    for (uint32_t i = 0; i < group; i++) {
        bool drop = model->tensor->dtype == KVF_DTYPE_BF16 && exponent > -115 &&
                    fabsf(input[i]) < ldexpf(1.0f, exponent - 12);
        flipped[i] = drop ? 0.0f : sign_of(model, i) * input[i];
    }
    *out = (struct tq_model_vector){.escape = false};
    for (uint32_t r = 0; r < model->tensor->n_rotations; r++) {
        encode_rotation(model, r, flipped, mean, out);
    }
    if (out->escape) {
        *out = escaped;
    }
}

/* Row i of H^T for each i, by rotating unit vectors: e_i has at j what H has at (j, i). Kept for
 * the next vector. */
static const int8_t (*transposed_of(const struct kvf_codec_rotation *rotation,
                                    uint32_t r))[MODEL_DIM_MAX]
{
    static int8_t transposed[2][MODEL_DIM_MAX][MODEL_DIM_MAX];
    static uint32_t n_of[2];
    static uint32_t order_of[2];
    struct saw_model rotate = rotation_model(rotation);
    if (n_of[r] == rotation->n && order_of[r] == rotation->order) {
        return (const int8_t(*)[MODEL_DIM_MAX])transposed[r];
    }
    n_of[r] = rotation->n;
    order_of[r] = rotation->order;
    for (uint32_t i = 0; i < rotation->n; i++) {
        float column[MODEL_DIM_MAX] = {0};
        column[i] = 1.0f;
        saw_model_rotate(&rotate, column);
        for (uint32_t j = 0; j < rotation->n; j++) {
            transposed[r][i][j] = (int8_t)column[j];
        }
    }
    return (const int8_t(*)[MODEL_DIM_MAX])transposed[r];
}

/* H^T of integers. */
static void rotate_back(const struct kvf_codec_rotation *rotation, uint32_t r, const int *from,
                        int *to)
{
    const int8_t(*transposed)[MODEL_DIM_MAX] = transposed_of(rotation, r);
    for (uint32_t i = 0; i < rotation->n; i++) {
        to[i] = 0;
        for (uint32_t j = 0; j < rotation->n; j++) {
            to[i] += transposed[i][j] * from[j];
        }
    }
}

void tq_model_decode(const struct tq_model *model, const struct tq_model_vector *vector,
                     const float *mean, float *out)
{
    const struct kvf_codec_tensor *tensor = model->tensor;
    int from[MODEL_DIM_MAX];
    int sums[MODEL_DIM_MAX];
    uint32_t first = 0;
    for (uint32_t r = 0; r < tensor->n_rotations; r++) {
        const struct kvf_codec_rotation *rotation = &tensor->rotations[r];
        float unit = books[rotation->bits].unit * (float)(1.0 / sqrt((double)rotation->order));
        float scale = (float)f16_value(vector->scales[r]) * unit;
        for (uint32_t i = 0; i < rotation->n; i++) {
            from[i] = level_of(rotation->bits, vector->codes[first + i]);
        }
        rotate_back(rotation, r, from, sums);
        for (uint32_t i = 0; i < rotation->n; i++) {
            uint32_t channel = model->channels[first + i];
            out[channel] = fmaf(sign_of(model, channel) * scale, (float)sums[i],
                                mean != NULL ? mean[channel] : 0.0f);
        }
        first += rotation->n;
    }
    if ((tensor->descriptor.flags & KVF_TENSOR_RESIDUAL) == 0) {
        return;
    }
    uint32_t n = tensor->group;
    float v = (float)sqrt(acos(-1.0) / 2.0) *
              (1.0f / sqrtf((float)n * (float)tensor->rotations[0].order));
    for (uint32_t i = 0; i < n; i++) {
        from[i] = 0;
        for (uint32_t j = 0; j < n; j++) {
            from[i] += tq_model_is_minus(model, j, i) != (vector->signs[j] != 0) ? -1 : 1;
        }
    }
    rotate_back(&tensor->rotations[0], 0, from, sums);
    for (uint32_t i = 0; i < n; i++) {
        float scale = sign_of(model, i) * ((float)f16_value(vector->scales[1]) * v);
        out[i] = fmaf(scale, (float)sums[i], out[i]);
    }
}
