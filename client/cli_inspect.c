/* SPDX-License-Identifier: Apache-2.0
 *
 * cli_inspect.c: kvferry inspect: what is hard about captured K and V, and what a profile does to
 * them, head by head.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/calib_internal.h"
#include "client/cli.h"
#include "client/cli_inspect.h"

#define PROFILE_DEFAULT "balanced"

/* V is suggested the least width whose error, root mean square, is below this share of it.
 * Errors of V average out over the tokens that a query attends to; 4 bits have 0.096 or less. */
#define V_ERROR_MAX 0.10

struct inspect {
    const struct cli *cli;
    const char *profile;
    struct kvf_capture_set captures;
    struct kvf_calibration calibration; /* for forms of several widths */
    struct kvf_codec_plan plan;
    struct kvf_roundtrip *trips; /* of each capture, all layers, by the profile */
    struct inspect_head *heads;  /* [layer][head] */
    uint32_t n_heads;
    double sigma_median;
    double sigma_p99;
};

/* --- one layer -------------------------------------------------------------------------------- */

/* Kurtosis of one tensor of one head before and after rotation, and the median norm. */
static int describe(const struct inspect *inspect, enum kvf_capture_kind kind, uint32_t layer,
                    uint32_t head, double *kurtosis_out, double *rotated_out, double *norm_out)
{
    const struct kvf_capture_set *set = &inspect->captures;
    uint32_t dim = set->items[0]->tensors[kind].dim;
    size_t n = 0;
    size_t at = 0;
    float *values;
    float *norms;

    for (uint32_t i = 0; i < set->n; i++) {
        n += set->items[i]->n_tokens;
    }
    values = calloc(n * dim, sizeof(*values));
    norms = calloc(n, sizeof(*norms));
    if (values == NULL || norms == NULL) {
        free(values);
        free(norms);
        return KVF_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < set->n; i++) {
        kvf_capture_head(set->items[i], kind, layer, head, values + at * dim);
        at += set->items[i]->n_tokens;
    }
    *kurtosis_out = kvf_kurtosis(values, n * dim);
    kvf_norms(values, n, dim, norms);
    *norm_out = kvf_quantile(norms, n, 0.5);
    kvf_rotate_vectors(values, n, dim);
    *rotated_out = kvf_kurtosis(values, n * dim);
    free(values);
    free(norms);
    return KVF_OK;
}

/* What the profile does to the heads of a layer. */
static int judge(const struct inspect *inspect, struct kvf_layer_data *const *data,
                 struct inspect_head *heads)
{
    int status = KVF_OK;

    for (uint32_t i = 0; i < inspect->captures.n; i++) {
        kvf_layer_data_take(data[i], &inspect->trips[i], KVF_CAPTURE_K_POST, data[i]->layer);
    }
    for (uint32_t head = 0; status == KVF_OK && head < inspect->n_heads; head++) {
        for (uint32_t i = 0; i < inspect->captures.n; i++) {
            const struct kvf_attention *a = &data[i]->attention;
            size_t k_at = (size_t)head * a->n_tokens * a->dim_k;
            size_t v_at = (size_t)head * a->n_tokens * a->dim_v;

            kvf_error_sums_add(&heads[head].k, a->k + k_at, data[i]->k + k_at, a->n_tokens,
                               a->dim_k);
            kvf_error_sums_add(&heads[head].v, a->v + v_at, data[i]->v + v_at, a->n_tokens,
                               a->dim_v);
        }
        status = kvf_layer_noise(data, inspect->captures.n, head, 0, &heads[head].noise);
    }
    return status;
}

static uint32_t find_form(const struct kvf_form *forms, uint32_t n, uint32_t rung, uint8_t center)
{
    uint32_t i = 0;

    while (i < n && (forms[i].rung != rung ||
                     (forms[i].settings.flags & (KVF_TENSOR_CENTER | KVF_TENSOR_CENTER_PROFILE)) !=
                         center)) {
        i++;
    }
    return i < n ? i : 0; /* form 0 is lossless */
}

/* One head after one width: is it as good as asked? */
static int try_width(const struct inspect *inspect, struct kvf_layer_data *const *data,
                     uint32_t head, bool *k_passes_out, bool *v_passes_out)
{
    struct kvf_error_sums v = {0};
    struct kvf_noise noise;
    int status = kvf_layer_noise(data, inspect->captures.n, head, 0, &noise);

    for (uint32_t i = 0; i < inspect->captures.n; i++) {
        const struct kvf_attention *a = &data[i]->attention;
        size_t at = (size_t)head * a->n_tokens * a->dim_v;

        kvf_error_sums_add(&v, a->v + at, data[i]->v + at, a->n_tokens, a->dim_v);
    }
    *k_passes_out = noise.median <= inspect->sigma_median && noise.p99 <= inspect->sigma_p99;
    *v_passes_out = sqrt(kvf_error_relative(&v)) <= V_ERROR_MAX;
    return status;
}

/* Bits for K and V of each head: saw, K centred, down from 8 bits as long as it is good enough. */
static int suggest(const struct inspect *inspect, struct kvf_layer_data *const *data,
                   struct inspect_head *heads)
{
    const struct kvf_calibration *c = &inspect->calibration;
    bool(*passes)[2][KVF_RUNGS] = calloc(inspect->n_heads, sizeof(*passes));
    int status = passes != NULL ? KVF_OK : KVF_ERR_NO_MEMORY;

    for (uint32_t rung = 1; status == KVF_OK && rung < KVF_RUNGS; rung++) {
        status = kvf_calib_pass_forms(c, data, inspect->captures.n,
                                      find_form(c->forms_k, c->n_forms_k, rung, KVF_TENSOR_CENTER),
                                      find_form(c->forms_v, c->n_forms_v, rung, 0), 0);
        for (uint32_t head = 0; status == KVF_OK && head < inspect->n_heads; head++) {
            status = try_width(inspect, data, head, &passes[head][0][rung], &passes[head][1][rung]);
        }
    }
    for (uint32_t head = 0; status == KVF_OK && head < inspect->n_heads; head++) {
        passes[head][0][0] = true;
        passes[head][1][0] = true;
        heads[head].k_bits = kvf_rung_bits[kvf_ladder_descend(passes[head][0]) - 1];
        heads[head].v_bits = kvf_rung_bits[kvf_ladder_descend(passes[head][1]) - 1];
    }
    free(passes);
    return status;
}

static int inspect_layer(void *arg, uint32_t layer)
{
    struct inspect *inspect = arg;
    struct inspect_head *heads = inspect->heads + (size_t)layer * inspect->n_heads;
    struct kvf_layer_data **data;
    int status = kvf_set_layer_load(&inspect->captures, layer, 0, &data);

    if (status != KVF_OK) {
        return status;
    }
    for (uint32_t head = 0; status == KVF_OK && head < inspect->n_heads; head++) {
        struct inspect_head *h = &heads[head];

        status = describe(inspect, KVF_CAPTURE_K_POST, layer, head, &h->k_kurtosis,
                          &h->k_kurtosis_rotated, &h->k_norm);
        if (status == KVF_OK) {
            status = describe(inspect, KVF_CAPTURE_V, layer, head, &h->v_kurtosis,
                              &h->v_kurtosis_rotated, &h->v_norm);
        }
    }
    if (status == KVF_OK) {
        status = judge(inspect, data, heads);
    }
    if (status == KVF_OK) {
        status = suggest(inspect, data, heads);
    }
    kvf_set_layer_free(data, inspect->captures.n);
    return status;
}

/* --- what is said ----------------------------------------------------------------------------- */

static const char *queries_text(const struct inspect *inspect)
{
    const struct kvf_capture *capture = inspect->captures.items[0];

    return capture->tensors[KVF_CAPTURE_Q].n_heads != 0 ||
                   capture->tensors[KVF_CAPTURE_Q_NORM].n_heads != 0
               ? "captured"
               : "assumed to have the norms of K";
}

static void print_text(const struct inspect *inspect)
{
    printf("queries %s; profile %s\n\n", queries_text(inspect), inspect->profile);
    printf("%5s %4s %8s %7s %7s %7s %8s %8s %7s %9s %8s %7s %9s %8s %7s %7s %7s  %-5s %s\n",
           "layer", "head", "kurt K", "rotated", "kurt V", "rotated", "norm K", "norm V", "K/V",
           "MSE K", "of power", "cosine", "MSE V", "of power", "cosine", "sigma", "p99", "bits",
           "by ratio");
    for (uint32_t i = 0; i < inspect->calibration.n_layers * inspect->n_heads; i++) {
        const struct inspect_head *h = &inspect->heads[i];
        uint32_t k_bits;
        uint32_t v_bits;

        kvf_ratio_bits(kvf_ratio_class(h->k_norm, h->v_norm), &k_bits, &v_bits);
        printf("%5u %4u %8.2f %7.2f %7.2f %7.2f %8.2f %8.2f %7.1f %9.2e %8.5f %7.5f %9.2e %8.5f "
               "%7.5f %7.3f %7.3f  K%uV%-2u K%uV%u\n",
               i / inspect->n_heads, i % inspect->n_heads, h->k_kurtosis, h->k_kurtosis_rotated,
               h->v_kurtosis, h->v_kurtosis_rotated, h->k_norm, h->v_norm,
               h->k_norm / fmax(h->v_norm, 1e-12), kvf_error_absolute(&h->k),
               kvf_error_centred(&h->k), kvf_error_cosine(&h->k), kvf_error_absolute(&h->v),
               kvf_error_relative(&h->v), kvf_error_cosine(&h->v), h->noise.median, h->noise.p99,
               h->k_bits, h->v_bits, k_bits, v_bits);
    }
    printf("\nThe error of K is set beside its power about the means of its channels: what is the "
           "same for all keys\ndoes not reach attention. \"by ratio\" is what the norms of K and V "
           "alone would suggest.\n");
}

static json_t *tensor_json(double kurtosis, double rotated, double norm,
                           const struct kvf_error_sums *sums)
{
    return json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "kurtosis", kurtosis,
                     "kurtosis_rotated", rotated, "norm", norm, "mse", kvf_error_absolute(sums),
                     "relative_error", kvf_error_relative(sums), "relative_error_centred",
                     kvf_error_centred(sums), "cosine", kvf_error_cosine(sums));
}

static json_t *head_json(const struct inspect_head *h, uint32_t layer, uint32_t head)
{
    uint32_t k_bits;
    uint32_t v_bits;

    kvf_ratio_bits(kvf_ratio_class(h->k_norm, h->v_norm), &k_bits, &v_bits);
    return json_pack(
        "{s:i, s:i, s:o, s:o, s:f, s:f, s:f, s:i, s:i, s:i, s:i}", "layer", (int)layer, "head",
        (int)head, "k", tensor_json(h->k_kurtosis, h->k_kurtosis_rotated, h->k_norm, &h->k), "v",
        tensor_json(h->v_kurtosis, h->v_kurtosis_rotated, h->v_norm, &h->v), "norm_ratio",
        h->k_norm / fmax(h->v_norm, 1e-12), "sigma_median", h->noise.median, "sigma_p99",
        h->noise.p99, "k_bits", (int)h->k_bits, "v_bits", (int)h->v_bits, "k_bits_by_ratio",
        (int)k_bits, "v_bits_by_ratio", (int)v_bits);
}

static void print_json(const struct inspect *inspect)
{
    json_t *heads = json_array();

    for (uint32_t i = 0; i < inspect->calibration.n_layers * inspect->n_heads; i++) {
        json_array_append_new(
            heads, head_json(&inspect->heads[i], i / inspect->n_heads, i % inspect->n_heads));
    }
    cli_print_json(json_pack("{s:s, s:s, s:o}", "profile", inspect->profile, "queries",
                             queries_text(inspect), "heads", heads));
}

/* --- the command ------------------------------------------------------------------------------ */

static int pass_profile(struct inspect *inspect)
{
    const struct cli *cli = inspect->cli;
    int status = kvf_roundtrip_plan(inspect->captures.items[0], KVF_CAPTURE_K_POST, NULL,
                                    inspect->profile, (uint16_t)cli->sinks, &inspect->plan);

    if (status != KVF_OK) {
        return status;
    }
    inspect->trips = calloc(inspect->captures.n, sizeof(*inspect->trips));
    if (inspect->trips == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; status == KVF_OK && i < inspect->captures.n; i++) {
        status = kvf_roundtrip_init(&inspect->trips[i], &inspect->plan, inspect->captures.items[i]);
        if (status == KVF_OK) {
            status = kvf_roundtrip_run(&inspect->trips[i], KVF_CAPTURE_K_POST, 0);
        }
    }
    return status;
}

static int run(struct inspect *inspect)
{
    const struct cli *cli = inspect->cli;
    const struct kvf_calibrate_options options = {
        .k_kind = KVF_CAPTURE_K_POST,
        .codecs = KVF_FORMS_SAW,
        .sink_tokens = (uint8_t)cli->sinks,
    };
    int status = kvf_calibration_init(&inspect->calibration, &options, &inspect->captures,
                                      &inspect->captures);

    inspect->n_heads = inspect->captures.items[0]->tensors[KVF_CAPTURE_K_POST].n_heads;
    if (status == KVF_OK) {
        inspect->heads = calloc((size_t)inspect->calibration.n_layers * inspect->n_heads,
                                sizeof(*inspect->heads));
        status = inspect->heads != NULL ? pass_profile(inspect) : KVF_ERR_NO_MEMORY;
    }
    if (status == KVF_OK) {
        status = kvf_run_parallel(inspect->calibration.n_layers, cli_threads(cli), inspect_layer,
                                  inspect);
    }
    return status == KVF_OK
               ? CLI_OK
               : cli_fail(CLI_FAILED, "profile %s: %s", inspect->profile, kvf_status_text(status));
}

static int say(const struct inspect *inspect)
{
    const struct cli *cli = inspect->cli;
    const struct kvf_capture *first = inspect->captures.items[0];
    char title[KVF_CAPTURE_NAME_BYTES + 64];

    if (cli->is_json) {
        print_json(inspect);
    } else {
        print_text(inspect);
    }
    snprintf(title, sizeof(title), "%s, profile %s",
             first->model[0] != '\0' ? first->model : first->name, inspect->profile);
    if (cli->svg_file != NULL && cli_inspect_draw(cli->svg_file, inspect->heads, first->n_layers,
                                                  inspect->n_heads, title) != 0) {
        return cli_fail(CLI_FAILED, "%s: %s", cli->svg_file, strerror(errno));
    }
    return CLI_OK;
}

int cli_inspect(const struct cli *cli)
{
    struct inspect inspect = {
        .cli = cli,
        .profile = cli->profile != NULL ? cli->profile : PROFILE_DEFAULT,
        .sigma_median = cli->sigma_median > 0 ? cli->sigma_median : KVF_DEFAULT_SIGMA_MEDIAN,
        .sigma_p99 = cli->sigma_p99 > 0 ? cli->sigma_p99 : KVF_DEFAULT_SIGMA_P99,
    };
    const struct kvf_profile *profile = kvf_profile_find(inspect.profile);
    int code = CLI_OK;

    if (profile == NULL || profile->opaque) {
        return cli_fail(CLI_USAGE, "--profile: '%s' is no profile of K and V of this release",
                        inspect.profile);
    }
    code = cli_check_profile(inspect.profile);
    if (code == CLI_OK) {
        code = cli_open_captures(&cli->captures, "a folder of captures", &inspect.captures);
    }
    if (code == CLI_OK) {
        code = run(&inspect);
    }
    if (code == CLI_OK) {
        code = say(&inspect);
    }
    for (uint32_t i = 0; inspect.trips != NULL && i < inspect.captures.n; i++) {
        kvf_roundtrip_fini(&inspect.trips[i]);
    }
    free(inspect.trips);
    free(inspect.heads);
    kvf_calibration_fini(&inspect.calibration);
    kvf_capture_set_close(&inspect.captures);
    return code;
}
