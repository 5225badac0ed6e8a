/* SPDX-License-Identifier: Apache-2.0
 *
 * kv_stats.c: see kv_stats.h.
 */
#include "client/kv_stats.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codec/codec.h"
#include "codec/rotate.h"

double kvf_kurtosis(const float *values, size_t n)
{
    double second = 0;
    double fourth = 0;

    for (size_t i = 0; i < n; i++) {
        double square = (double)values[i] * values[i];

        second += square;
        fourth += square * square;
    }
    return second > 0 ? fourth * (double)n / (second * second) : 0;
}

/* One group of up to KVF_ROTATE_LANES vectors; stride is that between vectors. */
static void rotate_group(float *first, size_t stride, uint32_t n_vectors, uint32_t dim,
                         uint32_t order)
{
    float tile[KVF_CODEC_GROUP_MAX][KVF_ROTATE_LANES];
    float scale = kvf_rotate_rsqrt(order);

    memset(tile, 0, sizeof(tile));
    for (uint32_t lane = 0; lane < n_vectors; lane++) {
        for (uint32_t i = 0; i < dim; i++) {
            tile[i][lane] = first[lane * stride + i];
        }
    }
    kvf_rotate_forward(tile, dim, order);
    for (uint32_t lane = 0; lane < n_vectors; lane++) {
        for (uint32_t i = 0; i < dim; i++) {
            first[lane * stride + i] = tile[i][lane] * scale;
        }
    }
}

void kvf_rotate_vectors(float *vectors, size_t n_vectors, uint32_t dim)
{
    uint32_t group = dim;

    for (uint32_t parts = 1; group > KVF_CODEC_GROUP_MAX || dim % parts != 0; parts++) {
        group = dim / (parts + 1);
    }
    for (size_t at = 0; at < n_vectors; at += KVF_ROTATE_LANES) {
        uint32_t n = n_vectors - at < KVF_ROTATE_LANES ? (uint32_t)(n_vectors - at)
                                                       : (uint32_t)KVF_ROTATE_LANES;

        for (uint32_t i = 0; i < dim; i += group) {
            rotate_group(vectors + at * dim + i, dim, n, group, kvf_rotate_order(group));
        }
    }
}

void kvf_rope_apply(float *vectors, size_t n_vectors, uint32_t dim, uint32_t first_position,
                    double theta)
{
    uint32_t half = dim / 2;

    for (uint32_t i = 0; i < half; i++) {
        double frequency = pow(theta, -2.0 * i / dim);

        for (size_t t = 0; t < n_vectors; t++) {
            double angle = ((double)first_position + (double)t) * frequency;
            float cosine = (float)cos(angle);
            float sine = (float)sin(angle);
            float low = vectors[t * dim + i];
            float high = vectors[t * dim + i + half];

            vectors[t * dim + i] = low * cosine - high * sine;
            vectors[t * dim + i + half] = high * cosine + low * sine;
        }
    }
}

void kvf_norms(const float *vectors, size_t n_vectors, uint32_t dim, float *norms_out)
{
    for (size_t t = 0; t < n_vectors; t++) {
        double sum = 0;

        for (uint32_t i = 0; i < dim; i++) {
            double x = vectors[t * dim + i];

            sum += x * x;
        }
        norms_out[t] = (float)sqrt(sum);
    }
}

void kvf_error_norms(const float *vectors, const float *others, size_t n_vectors, uint32_t dim,
                     float *norms_out)
{
    for (size_t t = 0; t < n_vectors; t++) {
        double sum = 0;

        for (uint32_t i = 0; i < dim; i++) {
            double x = (double)vectors[t * dim + i] - others[t * dim + i];

            sum += x * x;
        }
        norms_out[t] = (float)sqrt(sum);
    }
}

static int compare_floats(const void *a, const void *b)
{
    float x = *(const float *)a;
    float y = *(const float *)b;

    return (x > y) - (x < y);
}

double kvf_quantile(float *values, size_t n, double share)
{
    size_t rank;

    if (n == 0) {
        return 0;
    }
    qsort(values, n, sizeof(*values), compare_floats);
    rank = (size_t)ceil(share * (double)n);
    rank = rank < 1 ? 1 : rank > n ? n : rank;
    return values[rank - 1];
}

void kvf_error_sums_add(struct kvf_error_sums *sums, const float *vectors, const float *others,
                        size_t n_vectors, uint32_t dim)
{
    for (size_t i = 0; i < n_vectors * dim; i++) {
        double x = vectors[i];
        double y = others[i];

        sums->dot += x * y;
        sums->power2 += x * x;
        sums->decoded2 += y * y;
        sums->error2 += (x - y) * (x - y);
    }
    for (uint32_t i = 0; i < dim; i++) {
        double sum = 0;
        double square = 0;

        for (size_t t = 0; t < n_vectors; t++) {
            double x = vectors[t * dim + i];

            sum += x;
            square += x * x;
        }
        sums->centred2 += fmax(square - sum * sum / (double)n_vectors, 0);
    }
    sums->n += n_vectors * dim;
}

void kvf_error_sums_join(struct kvf_error_sums *sums, const struct kvf_error_sums *more)
{
    sums->dot += more->dot;
    sums->power2 += more->power2;
    sums->decoded2 += more->decoded2;
    sums->error2 += more->error2;
    sums->centred2 += more->centred2;
    sums->n += more->n;
}

static double ratio(double error, double power)
{
    return power > 0 ? error / power : 0;
}

double kvf_error_absolute(const struct kvf_error_sums *sums)
{
    return ratio(sums->error2, (double)sums->n);
}

double kvf_error_relative(const struct kvf_error_sums *sums)
{
    return ratio(sums->error2, sums->power2);
}

double kvf_error_centred(const struct kvf_error_sums *sums)
{
    return ratio(sums->error2, sums->centred2);
}

double kvf_error_cosine(const struct kvf_error_sums *sums)
{
    double norms = sqrt(sums->power2) * sqrt(sums->decoded2);

    return norms > 0 ? sums->dot / norms : 1;
}

double kvf_logit_sigma(double q_norm, double error_norm, uint32_t dim)
{
    return q_norm * error_norm / dim;
}

enum kvf_ratio_class kvf_ratio_class(double k_norm, double v_norm)
{
    return k_norm < 10 * v_norm    ? KVF_RATIO_UNIFORM
           : k_norm <= 60 * v_norm ? KVF_RATIO_K4V2
                                   : KVF_RATIO_MIXED;
}

void kvf_ratio_bits(enum kvf_ratio_class ratio_class, uint32_t *k_bits_out, uint32_t *v_bits_out)
{
    /* the articles' "uniform 3 bits" and 2-bit V are raised: never 3-bit K by a ratio alone */
    static const uint32_t bits[][2] = {
        [KVF_RATIO_UNIFORM] = {4, 4},
        [KVF_RATIO_K4V2] = {6, 4},
        [KVF_RATIO_MIXED] = {8, 4},
    };

    *k_bits_out = bits[ratio_class][0];
    *v_bits_out = bits[ratio_class][1];
}
