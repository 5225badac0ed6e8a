/* SPDX-License-Identifier: Apache-2.0
 *
 * test_x_gate.c: which way is chosen at which rates, that it does not flap, and what is refused.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "client/cost.h"
#include "client/x_blas.h"
#include "kvferry.h"

enum {
    LAYERS = 8,
    D_MODEL = 256,
    HEADS = 4,
    DIM = 32,
    FFN = 704,
    TOKENS = 2000,
    SKIPPED = 77,
};

static float matrix[HEADS * DIM][D_MODEL];
static const void *matrices[LAYERS];
static char last_log[512];
static int n_logs;

static void keep_log(void *arg, int severity, const char *text)
{
    (void)arg;
    (void)severity;
    n_logs++;
    snprintf(last_log, sizeof(last_log), "%s", text);
}

static struct kvf_x *open_x(uint16_t n_heads)
{
    struct kvf_x_weights weights = {
        .struct_bytes = sizeof(weights),
        .d_model = D_MODEL,
        .n_layers = LAYERS,
        .n_heads = n_heads,
        .model_heads = HEADS,
        .dim_k = DIM,
        .dim_v = DIM,
        .dtype = KVF_DTYPE_F32,
        .kv_dtype = KVF_DTYPE_BF16,
        .w_k = matrices,
        .w_v = matrices,
        .weights_digest = {1},
        .log = keep_log,
    };
    struct kvf_x *x;

    for (int i = 0; i < LAYERS; i++) {
        matrices[i] = matrix;
    }
    assert_int_equal(kvf_x_open(NULL, &weights, &x), KVF_OK);
    return x;
}

static struct kvf_x_gate_options options_of(double link_bytes_per_s, double flop_per_s,
                                            double recompute_flop_per_s)
{
    return (struct kvf_x_gate_options){
        .struct_bytes = sizeof(struct kvf_x_gate_options),
        .query_heads = HEADS,
        .ffn_width = FFN,
        .x_profile = "x4",
        .link_bytes_per_s = link_bytes_per_s,
        .flop_per_s = flop_per_s,
        .recompute_flop_per_s = recompute_flop_per_s,
    };
}

static struct kvf_x_choice choose(struct kvf_x_gate *gate)
{
    struct kvf_x_choice choice = {.struct_bytes = sizeof(choice)};

    assert_int_equal(kvf_x_gate_choose(gate, TOKENS, &choice), KVF_OK);
    return choice;
}

static void the_fastest_way_is_chosen(void **state)
{
    static const struct {
        double link, flop, recompute;
        uint8_t way;
        const char *words;
    } cases[] = {
        {1e7, 1e11, 1e9, KVF_X_WAY_X, "2000 tokens: X: X as x4"},
        {1e10, 1e10, 1e10, KVF_X_WAY_KV, "2000 tokens: K and V: X as x4"},
        {1e7, 1e11, 1e12, KVF_X_WAY_RECOMPUTE, "2000 tokens: compute again: X as x4"},
    };
    const struct kvf_weights_model model = {.n_layers = LAYERS,
                                            .d_model = D_MODEL,
                                            .n_query_heads = HEADS,
                                            .n_heads = HEADS,
                                            .dim_k = DIM,
                                            .dim_v = DIM,
                                            .ffn_width = FFN};
    struct kvf_x *x = open_x(HEADS);

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct kvf_x_gate_options options = options_of(cases[i].link, cases[i].flop,
                                                       cases[i].recompute);
        const struct kvf_cost_rates rates = {.link_bytes_per_s = cases[i].link,
                                             .flop_per_s = cases[i].flop};
        const struct kvf_cost_rates again = {.flop_per_s = cases[i].recompute};
        struct kvf_x_gate *gate;
        struct kvf_x_choice choice;
        struct kvf_cost cost;

        assert_int_equal(kvf_x_gate_open(x, &options, &gate), KVF_OK);
        choice = choose(gate);
        assert_int_equal(choice.way, cases[i].way);
        assert_int_equal(choice.choices[cases[i].way], 1);
        assert_non_null(strstr(choice.why, cases[i].words));
        assert_string_equal(choice.why, last_log);
        assert_int_equal(kvf_cost_of(&model, kvf_profile_find("x4"), &rates, TOKENS, &cost),
                         KVF_OK);
        assert_true(choice.seconds[KVF_X_WAY_X] == cost.total_s);
        assert_int_equal(kvf_cost_of(&model, kvf_profile_find("exact"), &rates, TOKENS, &cost),
                         KVF_OK);
        assert_true(choice.seconds[KVF_X_WAY_KV] == cost.total_s);
        assert_true(choice.seconds[KVF_X_WAY_RECOMPUTE] ==
                    kvf_cost_recompute_s(&model, &again, TOKENS));
        assert_null(kvf_x_gate_close(gate));
    }
    kvf_x_close(x);
}

/* The link becomes faster, then slower: the way changes once in each direction, later than the
 * times cross, and is said each time. */
static void a_margin_keeps_the_way(void **state)
{
    struct kvf_x_gate_options options = options_of(1e7, 1e10, 1e9);
    const double links[2] = {1e11, 1e7};
    struct kvf_x *x = open_x(HEADS);
    struct kvf_x_gate *gate;
    uint8_t way;

    (void)state;
    options.margin_percent = 25;
    assert_int_equal(kvf_x_gate_open(x, &options, &gate), KVF_OK);
    n_logs = 0;
    way = choose(gate).way;
    assert_int_equal(way, KVF_X_WAY_X);
    for (int turn = 0; turn < 2; turn++) {
        uint8_t other = way == KVF_X_WAY_X ? KVF_X_WAY_KV : KVF_X_WAY_X;
        uint32_t n_kept = 0;
        struct kvf_x_choice choice = choose(gate);

        for (int i = 0; i < 3000 && choice.way == way; i++) {
            n_kept += choice.seconds[other] < choice.seconds[way];
            assert_true((strstr(choice.why, "still (margin)") != NULL) ==
                        (choice.seconds[other] < choice.seconds[way]));
            /* slowly, so that it comes between the times' crossing and the margin's */
            assert_int_equal(kvf_x_gate_note(gate, 1000000,
                                             1e6 / (choice.link_bytes_per_s *
                                                    (links[turn] > 1e9 ? 1.08 : 0.92))),
                             KVF_OK);
            choice = choose(gate);
        }
        assert_int_equal(choice.way, other);
        assert_true(n_kept > 3);
        assert_true(choice.seconds[other] * 1.25 < choice.seconds[way]);
        way = other;
        assert_int_equal(n_logs, 2 + turn);
    }
    kvf_x_gate_close(gate);
    kvf_x_close(x);
}

/* A rank fetches its K and V, but X of all, and computes its share. */
static void a_rank_has_its_share(void **state)
{
    struct kvf_x_gate_options options = options_of(1e7, 1e15, 1e9);
    struct kvf_x *whole = open_x(HEADS);
    struct kvf_x *rank = open_x(1);
    struct kvf_x_gate *gates[2];
    struct kvf_x_choice choices[2];

    (void)state;
    options.kv_profile = "raw";
    assert_int_equal(kvf_x_gate_open(whole, &options, &gates[0]), KVF_OK);
    assert_int_equal(kvf_x_gate_open(rank, &options, &gates[1]), KVF_OK);
    for (int i = 0; i < 2; i++) {
        choices[i] = choose(gates[i]);
        kvf_x_gate_close(gates[i]);
    }
    for (uint8_t way = 0; way < KVF_X_WAYS; way++) {
        double share = choices[1].seconds[way] / choices[0].seconds[way];

        assert_true(fabs(share - (way == KVF_X_WAY_X ? 1.0 : 0.25)) < 0.01);
    }
    kvf_x_close(rank);
    kvf_x_close(whole);
}

static void rates_are_timed(void **state)
{
    struct kvf_x_gate_options options = options_of(0, 0, 0);
    struct kvf_x *x = open_x(HEADS);
    struct kvf_x_gate *gate;
    struct kvf_x_choice choice;

    (void)state;
    assert_int_equal(kvf_x_gate_open(x, &options, &gate), KVF_OK);
    choice = choose(gate);
    printf("%s\n", choice.why);
    /* an order of magnitude: a byte a second and a light-second a byte are neither */
    assert_true(choice.link_bytes_per_s > 1e5 && choice.link_bytes_per_s < 1e14);
    assert_true(choice.flop_per_s > 1e5 && choice.flop_per_s < 1e16);
    kvf_x_gate_close(gate);
    kvf_x_close(x);
}

static void what_cannot_be_is_refused(void **state)
{
    const struct kvf_x_gate_options good = options_of(1e9, 1e9, 1e9);
    struct kvf_x_gate_options bad[9] = {good, good, good, good, good, good, good, good, good};
    static const char *const words[9] = {"query_heads",
                                         "ffn_width",
                                         "margin_percent",
                                         "negative or no number",
                                         "negative or",
                                         "x_profile is missing",
                                         "\"xgcl3\" has no form for X",
                                         "\"x4\" has no form for K and V",
                                         "\"nobody\" has no form for X"};
    struct kvf_x_choice choice = {.struct_bytes = sizeof(choice)};
    struct kvf_x *x = open_x(HEADS);
    struct kvf_x_gate *gate = NULL;

    (void)state;
    bad[0].query_heads = HEADS - 1;
    bad[1].ffn_width = 0;
    bad[2].margin_percent = 1001;
    bad[3].link_bytes_per_s = -1;
    bad[4].fixed_s = NAN;
    bad[5].x_profile = NULL;
    bad[6].x_profile = "xgcl3";
    bad[7].kv_profile = "x4";
    bad[8].x_profile = "nobody";
    for (int i = 0; i < 9; i++) {
        assert_int_equal(kvf_x_gate_open(x, &bad[i], &gate), KVF_ERR_INVALID);
        assert_null(gate);
        assert_non_null(strstr(last_log, words[i]));
    }
    assert_int_equal(kvf_x_gate_open(x, &good, &gate), KVF_OK);
    assert_int_equal(kvf_x_gate_choose(gate, 0, &choice), KVF_ERR_INVALID);
    assert_int_equal(kvf_x_gate_note(gate, 0, 1), KVF_ERR_INVALID);
    assert_int_equal(kvf_x_gate_note(gate, 1, 0), KVF_ERR_INVALID);
    assert_int_equal(kvf_x_gate_note(gate, UINT64_MAX, 1e-9), KVF_ERR_INVALID);
    assert_true(choose(gate).link_bytes_per_s == 1e9);
    kvf_x_gate_close(gate);
    kvf_x_close(x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_fastest_way_is_chosen), cmocka_unit_test(a_margin_keeps_the_way),
        cmocka_unit_test(a_rank_has_its_share),      cmocka_unit_test(rates_are_timed),
        cmocka_unit_test(what_cannot_be_is_refused),
    };
    char text[KVF_BLAS_TEXT_BYTES];
    struct kvf_blas blas;

    if (kvf_blas_open(&blas, text) != KVF_OK) {
        printf("skipped: %s\n", text);
        return SKIPPED;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
