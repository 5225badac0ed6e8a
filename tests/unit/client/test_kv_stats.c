/* SPDX-License-Identifier: Apache-2.0
 *
 * test_kv_stats.c: the figures on which inspect and calibrate decide, on data whose figures are
 * known: Gaussian data, data with outliers, a table of norms that somebody published.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/kv_stats.h"
#include "tests/support/support.h"

enum {
    DIM = 128,
    VECTORS = 2048,
    SEED = 20261130,
};

static uint64_t state;

static double uniform(void)
{
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    return ((double)(state >> 11) + 0.5) * 0x1p-53;
}

static float gauss(void)
{
    return (float)(sqrt(-2 * log(uniform())) * cos(6.283185307179586 * uniform()));
}

static float *gaussian(size_t n)
{
    float *values = test_malloc(n * sizeof(*values));

    for (size_t i = 0; i < n; i++) {
        values[i] = gauss();
    }
    return values;
}

static int setup(void **unused)
{
    (void)unused;
    state = SEED;
    printf("seed %d\n", SEED);
    return 0;
}

/* The fourth moment of n Gaussian values varies by sqrt(96 / n): 0.02 here. */
static void gaussian_data_have_kurtosis_3(void **unused)
{
    float *values = gaussian((size_t)VECTORS * DIM);
    double kurtosis = kvf_kurtosis(values, (size_t)VECTORS * DIM);

    (void)unused;
    assert_true(kurtosis > 2.9 && kurtosis < 3.1);
    test_free(values);
}

/* One channel far above the others: what the articles measure as 900 and more. A rotation spreads
 * it, and what is left looks Gaussian. */
static void rotation_takes_outliers_away(void **unused)
{
    float *values = gaussian((size_t)VECTORS * DIM);
    double before;
    double after;

    (void)unused;
    for (size_t t = 0; t < VECTORS; t++) {
        values[t * DIM + 17] *= 200;
    }
    before = kvf_kurtosis(values, (size_t)VECTORS * DIM);
    kvf_rotate_vectors(values, VECTORS, DIM);
    after = kvf_kurtosis(values, (size_t)VECTORS * DIM);
    printf("kurtosis %.1f before, %.2f after\n", before, after);
    assert_true(before > 100);
    assert_true(after > 2.5 && after < 3.5);
    test_free(values);
}

/* Also of vectors that have no power of two, and of those wider than a group. */
static void rotation_keeps_norms(void **unused)
{
    static const uint32_t dims[] = {64, 80, 96, 128, 192, 256, 320, 512, 576};

    (void)unused;
    for (size_t i = 0; i < sizeof(dims) / sizeof(dims[0]); i++) {
        float *values = gaussian((size_t)40 * dims[i]);
        float before[40];
        float after[40];

        kvf_norms(values, 40, dims[i], before);
        kvf_rotate_vectors(values, 40, dims[i]);
        kvf_norms(values, 40, dims[i], after);
        for (int t = 0; t < 40; t++) {
            assert_true(fabs(after[t] / before[t] - 1) < 1e-5);
        }
        test_free(values);
    }
}

/* Turning by a position twice is turning by the double one; position 0 changes nothing. */
static void rope_turns_pairs(void **unused)
{
    float *once = gaussian(DIM);
    float twice[DIM];
    float still[DIM];

    (void)unused;
    memcpy(still, once, sizeof(still));
    kvf_rope_apply(still, 1, DIM, 0, 10000);
    assert_memory_equal(still, once, sizeof(still));
    memcpy(twice, once, sizeof(twice));
    kvf_rope_apply(twice, 1, DIM, 21, 10000);
    kvf_rope_apply(twice, 1, DIM, 21, 10000);
    kvf_rope_apply(once, 1, DIM, 42, 10000);
    for (int i = 0; i < DIM; i++) {
        assert_true(fabsf(once[i] - twice[i]) < 1e-4F);
    }
    /* the first pair turns by one radian a position */
    still[0] = 1;
    still[DIM / 2] = 0;
    kvf_rope_apply(still, 1, DIM, 1, 10000);
    assert_true(fabs(still[0] - cos(1)) < 1e-6 && fabs(still[DIM / 2] - sin(1)) < 1e-6);
    test_free(once);
}

static void quantiles_are_of_nearest_rank(void **unused)
{
    float values[] = {5, 1, 4, 2, 3};

    (void)unused;
    assert_true(kvf_quantile(values, 5, 0.5) == 3);
    assert_true(kvf_quantile(values, 5, 0.99) == 5);
    assert_true(kvf_quantile(values, 5, 0) == 1);
    assert_true(kvf_quantile(values, 0, 0.5) == 0);
}

/* An error of relative power D moves a score by ||q|| ||k|| sqrt(D) / d: measured here on random
 * errors and queries. */
static void sigma_is_the_spread_of_scores(void **unused)
{
    enum {
        N = 4000
    };
    float *q = gaussian(DIM);
    double q_norm = 0;
    double sum2 = 0;
    double error_norm = 0;

    (void)unused;
    for (int i = 0; i < DIM; i++) {
        q_norm += (double)q[i] * q[i];
    }
    q_norm = sqrt(q_norm);
    for (int n = 0; n < N; n++) {
        double score = 0;

        for (int i = 0; i < DIM; i++) {
            double error = 0.3 * gauss();

            score += q[i] * error / sqrt(DIM);
            error_norm += error * error / N;
        }
        sum2 += score * score / N;
    }
    assert_true(fabs(sqrt(sum2) / kvf_logit_sigma(q_norm, sqrt(error_norm), DIM) - 1) < 0.05);
    test_free(q);
}

static void errors_are_told_apart(void **unused)
{
    float x[] = {3, 4, 5, 4};
    float y[] = {3, 3, 5, 3};
    struct kvf_error_sums sums = {0};
    struct kvf_error_sums joined = {0};

    (void)unused;
    kvf_error_sums_add(&sums, x, y, 2, 2); /* two vectors of two */
    assert_true(kvf_error_absolute(&sums) == 0.5);
    assert_true(fabs(kvf_error_relative(&sums) - 2.0 / 66) < 1e-12);
    /* about the means 4 and 4, what is left is 1 + 1 */
    assert_true(fabs(kvf_error_centred(&sums) - 1) < 1e-12);
    assert_true(fabs(kvf_error_cosine(&sums) - 58 / sqrt(66.0 * 52)) < 1e-12);
    kvf_error_sums_join(&joined, &sums);
    kvf_error_sums_join(&joined, &sums);
    assert_true(fabs(kvf_error_relative(&joined) - 2.0 / 66) < 1e-12);
    assert_true(joined.n == 8);
}

/* Norms of Llama-3.1-8B by layer, as an article prints them; the ratios that it prints are of norms
 * with more digits. */
static const char llama_rows[] = "0\t15.23\t0.35\t43.8x\n"
                                 "7\t28.07\t2.45\t11.5x\n"
                                 "15\t26.51\t2.68\t9.9x\n"
                                 "23\t24.72\t3.48\t7.1x\n"
                                 "31\t25.63\t5.75\t4.5x\n";

static void ratio_classes_follow_the_articles_table(void **unused)
{
    static const enum kvf_ratio_class wanted[] = {KVF_RATIO_K4V2, KVF_RATIO_K4V2, KVF_RATIO_UNIFORM,
                                                  KVF_RATIO_UNIFORM, KVF_RATIO_UNIFORM};
    const char *at = llama_rows;
    int layer;
    double k_norm;
    double v_norm;
    double printed;
    int rows = 0;

    (void)unused;
    while (sscanf(at, "%d %lf %lf %lfx", &layer, &k_norm, &v_norm, &printed) == 4) {
        uint32_t k_bits;
        uint32_t v_bits;

        assert_true(fabs(k_norm / v_norm / printed - 1) < 0.01);
        assert_int_equal(kvf_ratio_class(k_norm, v_norm), wanted[rows]);
        kvf_ratio_bits(kvf_ratio_class(k_norm, v_norm), &k_bits, &v_bits);
        assert_true(k_bits >= 4); /* never 3-bit K by a ratio alone */
        assert_true(k_bits >= v_bits);
        rows++;
        at = strchr(at, '\n') + 1;
    }
    assert_int_equal(rows, 5);
}

static void ratio_classes_have_no_gap(void **unused)
{
    (void)unused;
    assert_int_equal(kvf_ratio_class(9.99, 1), KVF_RATIO_UNIFORM);
    assert_int_equal(kvf_ratio_class(10, 1), KVF_RATIO_K4V2);
    assert_int_equal(kvf_ratio_class(60, 1), KVF_RATIO_K4V2);
    /* between 60 and 100 the article says nothing; Qwen2.5-7B has 106 */
    assert_int_equal(kvf_ratio_class(61, 1), KVF_RATIO_MIXED);
    assert_int_equal(kvf_ratio_class(274, 2.6), KVF_RATIO_MIXED);
    assert_int_equal(kvf_ratio_class(1, 0), KVF_RATIO_MIXED);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(gaussian_data_have_kurtosis_3, setup),
        cmocka_unit_test_setup(rotation_takes_outliers_away, setup),
        cmocka_unit_test_setup(rotation_keeps_norms, setup),
        cmocka_unit_test_setup(rope_turns_pairs, setup),
        cmocka_unit_test(quantiles_are_of_nearest_rank),
        cmocka_unit_test_setup(sigma_is_the_spread_of_scores, setup),
        cmocka_unit_test(errors_are_told_apart),
        cmocka_unit_test(ratio_classes_follow_the_articles_table),
        cmocka_unit_test(ratio_classes_have_no_gap),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
