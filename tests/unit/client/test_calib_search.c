/* SPDX-License-Identifier: Apache-2.0
 *
 * test_calib_search.c: the decisions of a calibration on figures that are made up: down the ladder
 * and back, bits by a mean budget, kinds of layers.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "client/calib_forms.h"
#include "client/calib_search.h"
#include "tests/support/support.h"

static void ladder_stops_at_the_first_failure(void **unused)
{
    (void)unused;
    assert_int_equal(kvf_ladder_descend((bool[]){false, true, true, true, true, true}), 0);
    assert_int_equal(kvf_ladder_descend((bool[]){true, true, true, false, false, false}), 3);
    /* 4 bits pass below 5 bits that do not: luck, and not taken */
    assert_int_equal(kvf_ladder_descend((bool[]){true, true, true, false, true, false}), 3);
    assert_int_equal(kvf_ladder_descend((bool[]){true, true, true, true, true, true}), KVF_RUNGS);
}

/* What passes at a threshold passes at a looser one: more errors never take a layer further
 * down. */
static void ladder_is_monotone(void **unused)
{
    const double errors[KVF_RUNGS] = {0, 0.01, 0.04, 0.08, 0.15, 0.31};
    uint32_t before = 0;

    (void)unused;
    for (double limit = 0; limit < 0.5; limit += 0.01) {
        bool passes[KVF_RUNGS];
        uint32_t n;

        for (int rung = 0; rung < KVF_RUNGS; rung++) {
            passes[rung] = errors[rung] <= limit;
        }
        n = kvf_ladder_descend(passes);
        assert_true(n >= before);
        before = n;
    }
    assert_int_equal(before, KVF_RUNGS);
}

static void steps_back_where_the_failure_is_due(void **unused)
{
    struct kvf_rungs rungs = {.k = 4, .v = 5};

    (void)unused;
    assert_true(kvf_ladder_step_back(&rungs, KVF_FAILS_SIGMA, 0.1, 0.9));
    assert_int_equal(rungs.k, 3);
    assert_true(kvf_ladder_step_back(&rungs, KVF_FAILS_TOP1, 0.1, 0.9));
    assert_int_equal(rungs.k, 2);
    assert_true(kvf_ladder_step_back(&rungs, KVF_FAILS_OUTPUT, 0.1, 0.9));
    assert_int_equal(rungs.v, 4);
    assert_true(kvf_ladder_step_back(&rungs, KVF_FAILS_OUTPUT, 0.9, 0.1));
    assert_int_equal(rungs.k, 1);
    assert_true(kvf_ladder_step_back(&rungs, KVF_FAILS_OUTPUT | KVF_FAILS_TOP1, 0.1, 0.9));
    assert_int_equal(rungs.k, 0);
    /* K is at the top: only V is left */
    assert_true(kvf_ladder_step_back(&rungs, KVF_FAILS_SIGMA, 0.9, 0.1));
    assert_int_equal(rungs.v, 3);
    rungs.v = 0;
    assert_false(kvf_ladder_step_back(&rungs, KVF_FAILS_OUTPUT, 0.1, 0.9));
    /* V is at the top: only K is left */
    rungs = (struct kvf_rungs){.k = 2, .v = 0};
    assert_true(kvf_ladder_step_back(&rungs, KVF_FAILS_OUTPUT, 0.1, 0.9));
    assert_int_equal(rungs.k, 1);
}

/* However it fails, back at the top it ends: at most one step a rung. */
static void stepping_back_ends(void **unused)
{
    (void)unused;
    for (uint32_t failing = 1; failing < 8; failing++) {
        struct kvf_rungs rungs = {.k = KVF_RUNGS - 1, .v = KVF_RUNGS - 1};
        uint32_t steps = 0;

        while (kvf_ladder_step_back(&rungs, failing, steps % 2, (steps + 1) % 2)) {
            steps++;
        }
        assert_int_equal(steps, 2 * (KVF_RUNGS - 1));
        assert_int_equal(rungs.k, 0);
        assert_int_equal(rungs.v, 0);
    }
}

static void thresholds_name_what_fails(void **unused)
{
    const struct kvf_thresholds thresholds = {
        .sigma_median = 0.5, .sigma_p99 = 1, .output_error = 0.1, .top1 = 0.9};
    struct kvf_noise noise = {.median = 0.5, .p99 = 1};
    struct kvf_attention_error error = {
        .error2 = 0.0099, .power2 = 1, .n_same_top = 9, .n_rows = 10};

    (void)unused;
    assert_int_equal(kvf_thresholds_check(&thresholds, &noise, &error), 0);
    noise.p99 = 1.01;
    assert_int_equal(kvf_thresholds_check(&thresholds, &noise, &error), KVF_FAILS_SIGMA);
    noise = (struct kvf_noise){.median = 0.51, .p99 = 0.6};
    assert_int_equal(kvf_thresholds_check(&thresholds, &noise, &error), KVF_FAILS_SIGMA);
    noise.median = NAN;
    assert_int_equal(kvf_thresholds_check(&thresholds, &noise, &error), KVF_FAILS_SIGMA);
    noise.median = 0;
    error.error2 = 0.0101;
    error.n_same_top = 8;
    assert_int_equal(kvf_thresholds_check(&thresholds, &noise, &error),
                     KVF_FAILS_OUTPUT | KVF_FAILS_TOP1);
    error = (struct kvf_attention_error){.error2 = NAN, .power2 = 1};
    assert_int_equal(kvf_thresholds_check(&thresholds, &noise, &error), KVF_FAILS_OUTPUT);
}

/* A bit halves the norm of the error: a form of one bit more ties with half the norm. */
static void scores_compare_forms_of_other_sizes(void **unused)
{
    (void)unused;
    assert_true(fabs(kvf_form_score(0.04, 4) - kvf_form_score(0.01, 5)) < 1e-12);
    assert_true(kvf_form_score(0.01, 4) < kvf_form_score(0.02, 4));
    assert_true(kvf_form_score(0, 12) < kvf_form_score(1e-9, 8));
}

static void curves_are_found_again(void **unused)
{
    const double bits[] = {8.25, 6.25, 5.25, 4.25, 3.25};
    double errors[5];
    double alpha;
    double beta;

    (void)unused;
    for (int i = 0; i < 5; i++) {
        errors[i] = 1.7 * pow(3.9, -bits[i]);
    }
    assert_true(kvf_rate_fit(bits, errors, 5, &alpha, &beta));
    assert_true(fabs(alpha / 1.7 - 1) < 1e-9);
    assert_true(fabs(beta / 3.9 - 1) < 1e-9);
    errors[2] = 0;
    assert_false(kvf_rate_fit(bits, errors, 5, &alpha, &beta));
    for (int i = 0; i < 5; i++) {
        errors[i] = 1 + bits[i]; /* an error that grows with bits is no quantizer's */
    }
    assert_false(kvf_rate_fit(bits, errors, 5, &alpha, &beta));
}

/* Items of one curve, whose weights differ. */
static void fill_items(struct kvf_rate_item *items, uint32_t n, const double *weights)
{
    for (uint32_t i = 0; i < n; i++) {
        items[i] = (struct kvf_rate_item){
            .weight = weights[i], .alpha = 1, .beta = 4, .values = 1.0 / n};
        for (uint32_t rung = 1; rung < KVF_RUNGS; rung++) {
            items[i].bits[rung] = kvf_rung_bits[rung] + 0.25;
        }
    }
}

static double mean_bits(const struct kvf_rate_item *items, uint32_t n)
{
    double bits = 0;

    for (uint32_t i = 0; i < n; i++) {
        bits += items[i].values * items[i].bits[items[i].rung];
    }
    return bits;
}

/* RateQuant's closed form: b_i = mean + (ln w_i - mean of ln w) / ln beta. Weights in steps of beta
 * make its bits whole, so that the widths that there are can meet them. */
static void allocation_follows_the_closed_form(void **unused)
{
    const double weights[] = {4, 1, 0.25};
    const uint8_t wanted[] = {5, 4, 3};
    struct kvf_rate_item items[3];

    (void)unused;
    fill_items(items, 3, weights);
    assert_true(kvf_rate_allocate(items, 3, 4.25));
    for (int i = 0; i < 3; i++) {
        assert_int_equal(kvf_rung_bits[items[i].rung], wanted[i]);
    }
}

static void allocation_keeps_its_budget(void **unused)
{
    const double weights[] = {100, 3, 1, 0.7, 0.1, 0.001};
    double before = 0;

    (void)unused;
    for (double target = 3.25; target < 9; target += 0.125) {
        struct kvf_rate_item items[6];
        double loss = 0;

        fill_items(items, 6, weights);
        assert_true(kvf_rate_allocate(items, 6, target));
        assert_true(mean_bits(items, 6) <= target + 1e-6);
        for (int i = 0; i < 6; i++) {
            loss += weights[i] * pow(4, -items[i].bits[items[i].rung]);
            assert_true(items[i].rung >= 1);
            /* who weighs less never has more bits */
            assert_true(i == 0 || items[i].rung >= items[i - 1].rung);
        }
        assert_true(before == 0 || loss <= before);
        before = loss;
    }
    {
        struct kvf_rate_item items[6];

        fill_items(items, 6, weights);
        assert_false(kvf_rate_allocate(items, 6, 3.2));
        assert_true(kvf_rate_allocate(items, 6, 16));
        for (int i = 0; i < 6; i++) {
            assert_int_equal(kvf_rung_bits[items[i].rung], 8);
        }
    }
}

/* Joined kinds take the wider form of each, and few layers pay rather than many. */
static void kinds_are_joined_upwards(void **unused)
{
    const double bits[] = {16, 8, 6, 5, 4, 3};
    struct kvf_kind_choice layers[] = {{4, 4}, {4, 4}, {4, 4}, {5, 4}, {2, 5}};
    struct kvf_kind_choice kept[5];

    (void)unused;
    memcpy(kept, layers, sizeof(kept));
    kvf_kinds_join(kept, 5, 3, bits, bits);
    assert_memory_equal(kept, layers, sizeof(kept));
    kvf_kinds_join(layers, 5, 2, bits, bits);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(layers[i].k, 4);
        assert_int_equal(layers[i].v, 4);
    }
    assert_int_equal(layers[4].k, 2);
    assert_int_equal(layers[4].v, 5);
    kvf_kinds_join(layers, 5, 1, bits, bits);
    for (int i = 0; i < 5; i++) {
        assert_int_equal(layers[i].k, 2);
        assert_int_equal(layers[i].v, 4);
    }
}

static void forms_cover_the_ladder(void **unused)
{
    static const uint32_t dims[] = {64, 80, 96, 128, 192};

    (void)unused;
    for (size_t d = 0; d < sizeof(dims) / sizeof(dims[0]); d++) {
        for (int is_v = 0; is_v < 2; is_v++) {
            struct kvf_form forms[KVF_FORMS_MAX];
            uint32_t n = kvf_forms_list(is_v != 0, dims[d], KVF_FORMS_ALL, forms);
            uint32_t seen[KVF_RUNGS] = {0};

            assert_true(n < KVF_FORMS_MAX);
            assert_string_equal(forms[0].name, "exact");
            for (uint32_t i = 0; i < n; i++) {
                seen[forms[i].rung]++;
                assert_true(i == 0 || forms[i].rung >= forms[i - 1].rung);
            }
            for (int rung = 0; rung < KVF_RUNGS; rung++) {
                assert_true(seen[rung] > 0);
            }
        }
    }
}

static void codecs_are_read_from_a_list(void **unused)
{
    uint32_t codecs = 0;

    (void)unused;
    assert_true(kvf_form_codecs_parse("saw", &codecs));
    assert_int_equal(codecs, KVF_FORMS_SAW);
    assert_true(kvf_form_codecs_parse("kivi,tq", &codecs));
    assert_int_equal(codecs, KVF_FORMS_KIVI | KVF_FORMS_TQ);
    assert_false(kvf_form_codecs_parse("", &codecs));
    assert_false(kvf_form_codecs_parse("saw,", &codecs));
    assert_false(kvf_form_codecs_parse("sawtq", &codecs));
    assert_int_equal(codecs, KVF_FORMS_KIVI | KVF_FORMS_TQ);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ladder_stops_at_the_first_failure),
        cmocka_unit_test(ladder_is_monotone),
        cmocka_unit_test(steps_back_where_the_failure_is_due),
        cmocka_unit_test(stepping_back_ends),
        cmocka_unit_test(thresholds_name_what_fails),
        cmocka_unit_test(scores_compare_forms_of_other_sizes),
        cmocka_unit_test(curves_are_found_again),
        cmocka_unit_test(allocation_follows_the_closed_form),
        cmocka_unit_test(allocation_keeps_its_budget),
        cmocka_unit_test(kinds_are_joined_upwards),
        cmocka_unit_test(forms_cover_the_ladder),
        cmocka_unit_test(codecs_are_read_from_a_list),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
