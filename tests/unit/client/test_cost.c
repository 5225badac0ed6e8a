/* SPDX-License-Identifier: Apache-2.0
 *
 * test_cost.c: what kvferry plan computes, beside figures computed by hand.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>

#include "client/cost.h"

/* Llama-2-7B and Llama-3.1-8B. */
static const struct kvf_weights_model mha = {
    .n_layers = 32,
    .d_model = 4096,
    .n_query_heads = 32,
    .n_heads = 32,
    .dim_k = 128,
    .dim_v = 128,
    .ffn_width = 11008,
};
static const struct kvf_weights_model gqa = {
    .n_layers = 32,
    .d_model = 4096,
    .n_query_heads = 32,
    .n_heads = 8,
    .dim_k = 128,
    .dim_v = 128,
    .ffn_width = 14336,
};
static const struct kvf_cost_rates rates = {
    .link_bytes_per_s = 50e9,
    .flop_per_s = 600e12,
    .fixed_s = 1e-3,
};

#define TOKENS 4096

static struct kvf_cost cost_of(const struct kvf_weights_model *model, const char *name)
{
    const struct kvf_profile *profile = kvf_profile_find(name);
    struct kvf_cost cost;

    assert_non_null(profile);
    assert_int_equal(kvf_cost_of(model, profile, &rates, TOKENS, &cost), KVF_OK);
    return cost;
}

static void assert_near(double value, double wanted)
{
    if (!(fabs(value - wanted) <= 1e-9 * fabs(wanted))) {
        fail_msg("%.12g instead of %.12g", value, wanted);
    }
}

/* bf16 K and V beside what is stored. */
static double ratio_of(const struct kvf_weights_model *model, const char *name)
{
    return 2.0 * model->n_layers * model->n_heads * 256 / cost_of(model, name).bytes_a_token;
}

static void sizes_are_those_of_the_article(void **state)
{
    (void)state;
    assert_near(ratio_of(&mha, "raw"), 1.0);
    assert_true(ratio_of(&mha, "x4") >= 7.69 && ratio_of(&mha, "x4") <= 7.70);
    assert_true(ratio_of(&mha, "x3") >= 10.15 && ratio_of(&mha, "x3") <= 10.17);
    assert_true(ratio_of(&mha, "x2") >= 14.93 && ratio_of(&mha, "x2") <= 14.96);
    assert_true(ratio_of(&mha, "xcl3") >= 9.6);
    assert_true(ratio_of(&mha, "xcl2") >= 13.1);
    assert_true(ratio_of(&gqa, "x4") >= 3.7);
    assert_true(ratio_of(&gqa, "x3") >= 5.0);
    assert_true(ratio_of(&gqa, "x2") >= 7.1);
    assert_true(cost_of(&mha, "exact").is_bound);
    assert_false(cost_of(&mha, "x4").is_bound);
}

static void times_follow_the_formulas(void **state)
{
    struct kvf_cost cost = cost_of(&mha, "raw");
    double flop;

    (void)state;
    assert_near(cost.fetch_s, 524288.0 * TOKENS / 50e9);
    assert_true(cost.rebuild_s == 0);
    assert_near(cost.total_s, 1e-3 + cost.fetch_s);

    /* 4 t d^2 a layer */
    cost = cost_of(&mha, "x4");
    assert_near(cost.rebuild_s, 4.0 * TOKENS * 4096 * 4096 * 32 / 600e12);
    assert_true(cost.rebuild_s > cost.fetch_s);
    assert_near(cost.total_s, 1e-3 + cost.rebuild_s + cost.fetch_s / 32);
    cost = cost_of(&mha, "xcl4");
    assert_near(cost.rebuild_s, 2.0 * TOKENS * 4096 * 8193 * 32 / 600e12);

    /* latents: rank 2,048 */
    cost = cost_of(&gqa, "x4");
    assert_near(cost.rebuild_s, 2.0 * TOKENS * 2048 * 2048 * 32 / 600e12);
    assert_true(cost.rebuild_s < cost.fetch_s);
    assert_near(cost.total_s, 1e-3 + cost.fetch_s + cost.rebuild_s / 32);
    cost = cost_of(&gqa, "xgcl4");
    assert_near(cost.rebuild_s, 8.0 * TOKENS * 4096 * 1024 * 32 / 600e12);

    flop = 2.0 * (4096.0 * (4096 + 2048) + 4096.0 * 4096 + 3.0 * 4096 * 14336) + 4096.0 * 8192;
    assert_near(kvf_cost_recompute_s(&gqa, &rates, TOKENS), 32 * TOKENS * flop / 600e12);
}

/* Fewer tokens are computed faster, these and more are not. */
static void break_even_is_where_times_meet(void **state)
{
    static const char *const names[] = {"raw", "balanced", "xgcl3"};
    struct kvf_cost_rates slow = rates;
    struct kvf_cost cost;

    (void)state;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        const struct kvf_profile *profile = kvf_profile_find(names[i]);
        uint32_t n = cost_of(&gqa, names[i]).break_even_tokens;

        assert_true(n > 1 && n < 256);
        assert_int_equal(kvf_cost_of(&gqa, profile, &rates, n, &cost), KVF_OK);
        assert_true(cost.total_s < kvf_cost_recompute_s(&gqa, &rates, n));
        assert_int_equal(kvf_cost_of(&gqa, profile, &rates, n - 1, &cost), KVF_OK);
        assert_true(cost.total_s >= kvf_cost_recompute_s(&gqa, &rates, n - 1));
    }
    slow.link_bytes_per_s = 1e3;
    assert_int_equal(kvf_cost_of(&gqa, kvf_profile_find("raw"), &slow, TOKENS, &cost), KVF_OK);
    assert_int_equal(cost.break_even_tokens, 0);
}

static void profiles_without_a_form_are_refused(void **state)
{
    struct kvf_cost cost;

    (void)state;
    assert_int_equal(kvf_cost_kind(&mha, kvf_profile_find("x4")), KVF_KIND_X);
    assert_int_equal(kvf_cost_kind(&gqa, kvf_profile_find("x4")), KVF_KIND_XG);
    assert_int_equal(kvf_cost_kind(&gqa, kvf_profile_find("exact")), KVF_KIND_KV);
    assert_int_equal(kvf_cost_of(&gqa, kvf_profile_find("xcl3"), &rates, TOKENS, &cost),
                     KVF_ERR_UNSUPPORTED);
    assert_int_equal(kvf_cost_of(&mha, kvf_profile_find("xgcl3"), &rates, TOKENS, &cost),
                     KVF_ERR_UNSUPPORTED);
    assert_int_equal(kvf_cost_of(&mha, kvf_profile_find("bytes"), &rates, TOKENS, &cost),
                     KVF_ERR_UNSUPPORTED);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes_are_those_of_the_article),
        cmocka_unit_test(times_follow_the_formulas),
        cmocka_unit_test(break_even_is_where_times_meet),
        cmocka_unit_test(profiles_without_a_form_are_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
