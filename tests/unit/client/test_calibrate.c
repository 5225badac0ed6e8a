/* SPDX-License-Identifier: Apache-2.0
 *
 * test_calibrate.c: captures from folders, attention beside a plain double loop, and a calibration
 * of a made-up model whose second layer has what is hard about Qwen2.5: one channel of K with a
 * bias far above what varies.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "client/calibrate.h"
#include "codec/codec_fp.h"
#include "tests/support/support.h"

enum {
    LAYERS = 2,
    HEADS = 2,
    Q_HEADS = 4,
    TOKENS = 320, /* a chunk, and what is behind it */
    DIM = 64,
    Q_ROWS = 16,
    SEED = 7,
    BIASED_CHANNEL = 5,
};

#define BIAS 200.0F /* bf16 is coarse there: steps of 1 */

static uint64_t state;

static float gauss(void)
{
    double u[2];

    for (int i = 0; i < 2; i++) {
        state = state * 6364136223846793005ULL + 1442695040888963407ULL;
        u[i] = ((double)(state >> 11) + 0.5) * 0x1p-53;
    }
    return (float)(sqrt(-2 * log(u[0])) * cos(6.283185307179586 * u[1]));
}

/* --- folders ---------------------------------------------------------------------------------- */

static void write_in(const char *folder, const char *name, const void *data, size_t bytes)
{
    char path[2 * KVF_TEST_PATH_BYTES];

    snprintf(path, sizeof(path), "%s/%s", folder, name);
    kvf_test_file_write(path, data, bytes);
}

/* [LAYERS][n_heads][n_tokens][DIM] of bf16. */
static void write_array(const char *folder, const char *name, uint32_t n_heads, uint32_t n_tokens,
                        float bias)
{
    size_t n = (size_t)LAYERS * n_heads * n_tokens * DIM;
    uint16_t *values = test_malloc(n * sizeof(*values));

    for (size_t i = 0; i < n; i++) {
        bool is_biased = i >= n / 2 && i % DIM == BIASED_CHANNEL;

        values[i] = kvf_bf16_from_f32(gauss() + (is_biased ? bias : 0));
    }
    write_in(folder, name, values, n * sizeof(*values));
    test_free(values);
}

/* The last line is a tensor of other tools, which nobody reads. */
static const char index_text[] = "# tensor layer_first n_layers n_heads n_tokens dim dtype\n"
                                 "k_post 0 2 2 320 64 bf16 163840 k_post.bf16\n"
                                 "v 0 2 2 320 64 bf16 163840 v.bf16\n"
                                 "q 0 2 4 16 64 bf16 16384 q.bf16\n"
                                 "x 0 2 1 320 64 bf16 81920 not-there.bf16\n";

static void write_capture(const char *folder, uint64_t seed)
{
    char manifest[512];
    int n = snprintf(manifest, sizeof(manifest),
                     "{\"model\": \"made up\", \"workload\": \"other\", \"q_tokens\": [");

    state = seed;
    mkdir(folder, 0700);
    write_in(folder, "index.txt", index_text, strlen(index_text));
    write_array(folder, "k_post.bf16", HEADS, TOKENS, BIAS);
    write_array(folder, "v.bf16", HEADS, TOKENS, 0);
    write_array(folder, "q.bf16", Q_HEADS, Q_ROWS, 0);
    for (int i = 0; i < Q_ROWS; i++) {
        n += snprintf(manifest + n, sizeof(manifest) - (size_t)n, "%s%d", i != 0 ? ", " : "",
                      (i + 1) * TOKENS / Q_ROWS - 1);
    }
    n += snprintf(manifest + n, sizeof(manifest) - (size_t)n, "]}\n");
    write_in(folder, "manifest.json", manifest, (size_t)n);
}

struct fixture {
    struct kvf_test_dir dir;
    struct kvf_capture_set captures;
    struct kvf_capture_set heldout;
};

static int setup(void **fixture_out)
{
    struct fixture *fixture = calloc(1, sizeof(*fixture));
    char path[KVF_TEST_PATH_BYTES];
    char error[KVF_CAPTURE_ERROR_BYTES];

    kvf_test_dir_create(&fixture->dir);
    kvf_test_dir_path(&fixture->dir, "set", path);
    mkdir(path, 0700);
    kvf_test_dir_path(&fixture->dir, "set/a", path);
    write_capture(path, SEED);
    kvf_test_dir_path(&fixture->dir, "set/b", path);
    write_capture(path, SEED + 1);
    kvf_test_dir_path(&fixture->dir, "heldout", path);
    write_capture(path, SEED + 2);
    assert_int_equal(kvf_capture_set_add(&fixture->heldout, path, error), KVF_OK);
    kvf_test_dir_path(&fixture->dir, "set", path);
    assert_int_equal(kvf_capture_set_add(&fixture->captures, path, error), KVF_OK);
    *fixture_out = fixture;
    return 0;
}

static int teardown(void **fixture_in)
{
    struct fixture *fixture = *fixture_in;

    kvf_capture_set_close(&fixture->captures);
    kvf_capture_set_close(&fixture->heldout);
    kvf_test_dir_remove(&fixture->dir);
    free(fixture);
    return 0;
}

/* --- reading ---------------------------------------------------------------------------------- */

static void folders_are_read_by_name(void **fixture_in)
{
    const struct fixture *fixture = *fixture_in;
    const struct kvf_capture *a = fixture->captures.items[0];
    float values[TOKENS * DIM];

    assert_int_equal(fixture->captures.n, 2);
    assert_string_equal(a->name, "a");
    assert_string_equal(fixture->captures.items[1]->name, "b");
    assert_string_equal(a->model, "made up");
    assert_int_equal(a->n_layers, LAYERS);
    assert_int_equal(a->n_tokens, TOKENS);
    assert_int_equal(a->n_q_rows, Q_ROWS);
    assert_int_equal(a->q_rows[0], TOKENS / Q_ROWS - 1);
    assert_memory_not_equal(a->digest, fixture->captures.items[1]->digest, KVF_DIGEST_BYTES);
    kvf_capture_head(a, KVF_CAPTURE_K_POST, 1, 1, values);
    assert_true(fabsf(values[7 * DIM + BIASED_CHANNEL] - BIAS) < 8);
    assert_false(kvf_capture_has(a, KVF_CAPTURE_K_PRE));
    assert_true(kvf_capture_is_alike(a, fixture->heldout.items[0]));
}

/* One thing wrong at a time. */
static void wrong_folders_are_refused(void **fixture_in)
{
    static const struct {
        const char *file;
        const char *content;
        int status;
    } cases[] = {
        {"index.txt", "k_post 0 2 2 320 64 bf16 163840 k_post.bf16\n", KVF_ERR_CORRUPT}, /* no V */
        {"index.txt", "k_post 0 2 2 320 64 bf16 163840\n", KVF_ERR_CORRUPT},
        {"index.txt", "k_post 0 2 2 320 64 bf16 163842 k_post.bf16\n", KVF_ERR_CORRUPT},
        {"index.txt", "k_post 0 2 2 320 64 i8 81920 k_post.bf16\n", KVF_ERR_CORRUPT},
        {"index.txt", "k_post 511 2 2 320 64 bf16 163840 k_post.bf16\n", KVF_ERR_CORRUPT},
        {"index.txt", "k_post 0 2 2 320 64 bf16 163840 ../k_post.bf16\n", KVF_ERR_CORRUPT},
        {"index.txt", "k_post 0 1 2 320 64 bf16 81920 k_post.bf16\n", KVF_ERR_CORRUPT}, /* size */
        {"index.txt", "k_post 0 2 2 320 64 bf16 163840 none.bf16\n", KVF_ERR_IO},
        {"index.txt",
         "k_post 0 2 2 320 64 bf16 163840 k_post.bf16\nv 0 2 2 160 128 bf16 163840 "
         "v.bf16\n",
         KVF_ERR_CORRUPT}, /* other tokens */
        {"index.txt", "k_post 0 2 2 320 64 bf16 163840 k.zst\n", KVF_ERR_CORRUPT}, /* no frame */
        {"manifest.json", "[]\n", KVF_ERR_CORRUPT},
        {"manifest.json", "{\n", KVF_ERR_CORRUPT},
        {"manifest.json", "{}\n", KVF_ERR_CORRUPT}, /* which tokens has Q? */
        {"manifest.json", "{\"weights_digest\": \"12\"}\n", KVF_ERR_CORRUPT},
        {"manifest.json", "{\"first_position\": -1}\n", KVF_ERR_CORRUPT},
        {"manifest.json", "{\"q_tokens\": [0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,14]}\n",
         KVF_ERR_CORRUPT},
        {"manifest.json", "{\"q_tokens\": [0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,320]}\n",
         KVF_ERR_CORRUPT},
    };
    const struct fixture *fixture = *fixture_in;
    char path[KVF_TEST_PATH_BYTES];

    kvf_test_dir_path(&fixture->dir, "wrong", path);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct kvf_capture *capture;
        char error[KVF_CAPTURE_ERROR_BYTES] = "";

        write_capture(path, SEED);
        write_in(path, "k.zst", "not a frame", 11);
        write_in(path, cases[i].file, cases[i].content, strlen(cases[i].content));
        assert_int_equal(kvf_capture_open(path, &capture, error), cases[i].status);
        assert_non_null(strstr(error, "wrong"));
    }
}

static void sets_hold_one_shape(void **fixture_in)
{
    struct fixture *fixture = *fixture_in;
    char path[KVF_TEST_PATH_BYTES];
    char error[KVF_CAPTURE_ERROR_BYTES];
    static const char other[] = "k_post 0 1 4 320 64 bf16 163840 k_post.bf16\n"
                                "v 0 1 4 320 64 bf16 163840 v.bf16\n";

    kvf_test_dir_path(&fixture->dir, "other", path);
    write_capture(path, SEED);
    write_in(path, "index.txt", other, strlen(other));
    assert_int_equal(kvf_capture_set_add(&fixture->heldout, path, error), KVF_ERR_MISMATCH);
    assert_int_equal(fixture->heldout.n, 1);
    kvf_test_dir_path(&fixture->dir, "nothing", path);
    assert_int_equal(kvf_capture_set_add(&fixture->heldout, path, error), KVF_ERR_IO);
}

/* --- attention -------------------------------------------------------------------------------- */

/* One output by the formula, in double precision. Returns the token with the largest weight. */
static uint32_t plain_attention(const struct kvf_capture *capture, uint32_t q_head, uint32_t row,
                                const float *k, const float *v, double out[DIM])
{
    float *q = test_malloc(sizeof(*q) * Q_ROWS * DIM);
    double scores[TOKENS];
    uint32_t n = capture->q_rows[row] + 1;
    uint32_t top = 0;
    double sum = 0;

    kvf_capture_head(capture, KVF_CAPTURE_Q, 0, q_head, q);
    for (uint32_t t = 0; t < n; t++) {
        scores[t] = 0;
        for (int i = 0; i < DIM; i++) {
            scores[t] += (double)q[row * DIM + i] * k[t * DIM + i] / sqrt(DIM);
        }
        top = scores[t] > scores[top] ? t : top;
    }
    memset(out, 0, DIM * sizeof(*out));
    for (uint32_t t = 0; t < n; t++) {
        double weight = exp(scores[t]);

        sum += weight;
        for (int i = 0; i < DIM; i++) {
            out[i] += weight * v[t * DIM + i];
        }
    }
    for (int i = 0; i < DIM; i++) {
        out[i] /= sum;
    }
    test_free(q);
    return top;
}

/* Other K and V of all heads: noise on the original ones. */
static float *disturbed(const float *values, float noise)
{
    float *out = test_malloc(sizeof(*out) * HEADS * TOKENS * DIM);

    for (size_t i = 0; i < (size_t)HEADS * TOKENS * DIM; i++) {
        out[i] = values[i] + noise * gauss();
    }
    return out;
}

static void attention_is_that_of_the_formula(void **fixture_in)
{
    const struct fixture *fixture = *fixture_in;
    const struct kvf_capture *capture = fixture->heldout.items[0];
    struct kvf_attention attention;
    struct kvf_attention_error error = {0};
    double error2 = 0;
    double power2 = 0;
    uint64_t same = 0;
    float *k;
    float *v;

    state = SEED + 10;
    assert_int_equal(kvf_attention_init(&attention, capture, 0, Q_ROWS), KVF_OK);
    k = disturbed(attention.k, 0.3F);
    v = disturbed(attention.v, 0.2F);
    for (uint32_t head = 0; head < Q_HEADS; head++) {
        size_t at = (size_t)head / (Q_HEADS / HEADS) * TOKENS * DIM;

        for (uint32_t row = 0; row < Q_ROWS; row++) {
            double x[DIM];
            double y[DIM];
            uint32_t top = plain_attention(capture, head, row, attention.k + at, attention.v + at,
                                           x);

            assert_int_equal(attention.tops[head * Q_ROWS + row], top);
            same += plain_attention(capture, head, row, k + at, v + at, y) == top;
            for (int i = 0; i < DIM; i++) {
                power2 += x[i] * x[i];
                error2 += (x[i] - y[i]) * (x[i] - y[i]);
            }
        }
    }
    kvf_attention_compare(&attention, k, v, &error);
    assert_int_equal(error.n_rows, Q_HEADS * Q_ROWS);
    assert_int_equal(error.n_same_top, same);
    assert_true(fabs(error.power2 / power2 - 1) < 1e-4);
    assert_true(fabs(error.error2 / error2 - 1) < 1e-3);
    assert_true(error.kl > 0);
    error = (struct kvf_attention_error){0};
    kvf_attention_compare(&attention, NULL, NULL, &error);
    assert_true(error.error2 == 0 && error.n_same_top == error.n_rows);
    kvf_attention_fini(&attention);
    test_free(k);
    test_free(v);
}

/* --- calibration ------------------------------------------------------------------------------ */

static struct kvf_calibrate_options options(void)
{
    return (struct kvf_calibrate_options){
        .thresholds = {.sigma_median = 0.5, .sigma_p99 = 1, .output_error = 0.15, .top1 = 0.75},
        .k_kind = KVF_CAPTURE_K_POST,
        .codecs = KVF_FORMS_ALL,
        .n_threads = 2,
        .n_rows = Q_ROWS,
        .sink_tokens = 4,
    };
}

static uint32_t bits_of_k(const struct kvf_calibration *c, uint32_t layer)
{
    return kvf_rung_bits[c->forms_k[c->choices[layer].k].rung];
}

/* Is there a form of this name, and what did it do to the layer? */
static const struct kvf_grid_entry *entry_of(const struct kvf_calibration *c, uint32_t layer,
                                             const char *name)
{
    uint32_t n_pairs = c->n_forms_k > c->n_forms_v ? c->n_forms_k : c->n_forms_v;

    for (uint32_t i = 0; i < c->n_forms_k; i++) {
        if (strcmp(c->forms_k[i].name, name) == 0) {
            return &c->grid[(size_t)layer * n_pairs + i];
        }
    }
    fail_msg("no form %s", name);
    return NULL;
}

static void check_chosen(const struct fixture *fixture, struct kvf_calibration *c)
{
    struct kvf_layer_verdict verdicts[LAYERS];
    struct kvf_profile_table *table;
    struct kvf_codec_plan plan;
    char why[KVF_PROFILE_WHY_BYTES];
    double bits;

    assert_int_equal(kvf_calibration_table(c, &table), KVF_OK);
    assert_int_equal(kvf_profile_table_validate(table, why), KVF_OK);
    assert_int_equal(
        kvf_roundtrip_plan(fixture->heldout.items[0], KVF_CAPTURE_K_POST, table, NULL, 0, &plan),
        KVF_OK);
    assert_int_equal(kvf_calibration_verify(c, &plan, verdicts, &bits), KVF_OK);
    assert_true(bits > 3 && bits <= 16.5);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        assert_int_equal(verdicts[layer].failing, 0);
        assert_true(verdicts[layer].measure.both.n_rows == Q_HEADS * Q_ROWS);
    }
    kvf_profile_table_destroy(table);
}

static void hard_layers_get_what_they_need(void **fixture_in)
{
    struct fixture *fixture = *fixture_in;
    struct kvf_calibrate_options opts = options();
    struct kvf_calibration c;

    assert_int_equal(kvf_calibration_init(&c, &opts, &fixture->captures, &fixture->heldout),
                     KVF_OK);
    assert_int_equal(kvf_calibration_measure(&c), KVF_OK);
    /* means kept, four bits are more noise than the thresholds allow; taken out they are few */
    assert_true(entry_of(&c, 1, "saw4")->measure.noise.median > 0.5);
    assert_true(entry_of(&c, 1, "saw4+c")->measure.noise.median < 0.3);
    /* a short block has no means of its own: those of the profile are still there */
    assert_true(entry_of(&c, 1, "saw4+c")->tail.median > 0.5);
    assert_true(entry_of(&c, 1, "saw4+p")->tail.median < 0.3);
    assert_true(entry_of(&c, 0, "saw4+c")->tail.median < 0.3);
    assert_int_equal(kvf_calibration_choose(&c), KVF_OK);
    assert_int_equal(kvf_calibration_settle(&c), KVF_OK);
    assert_true(bits_of_k(&c, 0) <= 6);
    check_chosen(fixture, &c);
    kvf_calibration_fini(&c);
}

/* Thresholds that nothing lossy meets end at the lossless form, and looser ones never take more
 * bits. */
static void looser_thresholds_take_fewer_bits(void **fixture_in)
{
    static const double limits[] = {1e-6, 0.03, 0.1, 0.3, 2};
    struct fixture *fixture = *fixture_in;
    struct kvf_calibrate_options opts = options();
    struct kvf_calibration c;
    double before = 64;

    opts.codecs = KVF_FORMS_SAW;
    assert_int_equal(kvf_calibration_init(&c, &opts, &fixture->captures, &fixture->heldout),
                     KVF_OK);
    assert_int_equal(kvf_calibration_measure(&c), KVF_OK);
    for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++) {
        double bits = 0;

        c.options.thresholds = (struct kvf_thresholds){limits[i], 2 * limits[i], limits[i],
                                                       fmax(1 - limits[i], 0)};
        assert_int_equal(kvf_calibration_choose(&c), KVF_OK);
        assert_int_equal(kvf_calibration_settle(&c), KVF_OK);
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            bits += bits_of_k(&c, layer) + kvf_rung_bits[c.forms_v[c.choices[layer].v].rung];
            assert_true(i != 0 || bits_of_k(&c, layer) == 16);
        }
        assert_true(bits <= before);
        before = bits;
        check_chosen(fixture, &c);
    }
    assert_true(before == LAYERS * 2 * 3);
    kvf_calibration_fini(&c);
}

static void a_budget_is_kept(void **fixture_in)
{
    struct fixture *fixture = *fixture_in;
    struct kvf_calibrate_options opts = options();
    struct kvf_calibration c;
    double bits = 0;

    opts.target_bits = 5.5;
    opts.codecs = KVF_FORMS_SAW;
    assert_int_equal(kvf_calibration_init(&c, &opts, &fixture->captures, &fixture->heldout),
                     KVF_OK);
    assert_int_equal(kvf_calibration_measure(&c), KVF_OK);
    assert_int_equal(kvf_calibration_choose(&c), KVF_OK);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        bits += (c.bits_k[c.choices[layer].k] + c.bits_v[c.choices[layer].v]) / (2 * LAYERS);
    }
    assert_true(bits <= 5.5 && bits > 4.4);
    c.options.target_bits = 1;
    assert_int_equal(kvf_calibration_choose(&c), KVF_ERR_NO_SPACE);
    kvf_calibration_fini(&c);
}

/* A profile of the release, as --profile checks it. */
static void builtin_profiles_are_judged(void **fixture_in)
{
    struct fixture *fixture = *fixture_in;
    struct kvf_calibrate_options opts = options();
    struct kvf_layer_verdict verdicts[LAYERS];
    struct kvf_calibration c;
    struct kvf_codec_plan plan;
    double bits;

    assert_int_equal(kvf_calibration_init(&c, &opts, &fixture->heldout, &fixture->heldout), KVF_OK);
    assert_int_equal(kvf_roundtrip_plan(fixture->heldout.items[0], KVF_CAPTURE_K_POST, NULL,
                                        "saw4-paper", 0, &plan),
                     KVF_OK);
    assert_int_equal(kvf_calibration_verify(&c, &plan, verdicts, &bits), KVF_OK);
    assert_true((verdicts[1].failing & KVF_FAILS_SIGMA) != 0);
    assert_true((verdicts[0].failing & KVF_FAILS_SIGMA) == 0);
    assert_true(fabs(bits - 4.5) < 1e-9); /* 4 bits, and a word for each vector of 64 */
    assert_int_equal(
        kvf_roundtrip_plan(fixture->heldout.items[0], KVF_CAPTURE_K_POST, NULL, "exact", 0, &plan),
        KVF_OK);
    assert_int_equal(kvf_calibration_verify(&c, &plan, verdicts, &bits), KVF_OK);
    assert_int_equal(verdicts[0].failing | verdicts[1].failing, 0);
    assert_true(verdicts[1].measure.both.error2 == 0);
    kvf_calibration_fini(&c);
}

/* K before RoPE is coded only where it was captured. */
static void k_before_rope_has_to_be_there(void **fixture_in)
{
    struct fixture *fixture = *fixture_in;
    struct kvf_calibrate_options opts = options();
    struct kvf_calibration c;

    opts.k_kind = KVF_CAPTURE_K_PRE;
    assert_int_equal(kvf_calibration_init(&c, &opts, &fixture->captures, &fixture->heldout),
                     KVF_ERR_INVALID);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(folders_are_read_by_name),
        cmocka_unit_test(wrong_folders_are_refused),
        cmocka_unit_test(sets_hold_one_shape),
        cmocka_unit_test(attention_is_that_of_the_formula),
        cmocka_unit_test(hard_layers_get_what_they_need),
        cmocka_unit_test(looser_thresholds_take_fewer_bits),
        cmocka_unit_test(a_budget_is_kept),
        cmocka_unit_test(builtin_profiles_are_judged),
        cmocka_unit_test(k_before_rope_has_to_be_there),
    };

    printf("seed %d\n", SEED);
    return cmocka_run_group_tests(tests, setup, teardown);
}
