/* SPDX-License-Identifier: Apache-2.0
 *
 * calibrate.c: see calibrate.h. The grid of all forms, and the whole profile at the end, are
 * measured here; calib_choose.c decides.
 */
#include "client/calibrate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "client/calib_internal.h"
#include "codec/codec_fp.h"

/* --- init ------------------------------------------------------------------------------------- */

uint32_t kvf_calib_pairs(const struct kvf_calibration *c)
{
    return c->n_forms_k > c->n_forms_v ? c->n_forms_k : c->n_forms_v;
}

static uint32_t form_of(uint32_t pair, uint32_t n_forms)
{
    return pair < n_forms ? pair : n_forms - 1;
}

const struct kvf_grid_entry *kvf_calib_grid(const struct kvf_calibration *c, uint32_t layer,
                                            uint32_t pair)
{
    return &c->grid[(size_t)layer * kvf_calib_pairs(c) + pair];
}

static bool set_has_pre(const struct kvf_capture_set *set)
{
    for (uint32_t i = 0; i < set->n; i++) {
        if (!kvf_capture_has(set->items[i], KVF_CAPTURE_K_PRE) ||
            !(set->items[i]->rope_theta > 1)) {
            return false;
        }
    }
    return true;
}

int kvf_calibration_init(struct kvf_calibration *calibration,
                         const struct kvf_calibrate_options *options,
                         const struct kvf_capture_set *captures,
                         const struct kvf_capture_set *heldout)
{
    struct kvf_calibration *c = calibration;
    const struct kvf_capture *first = captures->items[0];

    *c = (struct kvf_calibration){
        .options = *options,
        .captures = captures,
        .heldout = heldout,
        .n_layers = first->n_layers,
    };
    if (options->k_kind == KVF_CAPTURE_K_PRE && !(set_has_pre(captures) && set_has_pre(heldout))) {
        return KVF_ERR_INVALID;
    }
    c->n_forms_k = kvf_forms_list(false, first->tensors[KVF_CAPTURE_K_POST].dim, options->codecs,
                                  c->forms_k);
    c->n_forms_v = kvf_forms_list(true, first->tensors[KVF_CAPTURE_V].dim, options->codecs,
                                  c->forms_v);
    c->grid = calloc((size_t)c->n_layers * kvf_calib_pairs(c), sizeof(*c->grid));
    return c->grid != NULL ? KVF_OK : KVF_ERR_NO_MEMORY;
}

void kvf_calibration_fini(struct kvf_calibration *calibration)
{
    free(calibration->grid);
    *calibration = (struct kvf_calibration){0};
}

/* --- layers of a set -------------------------------------------------------------------------- */

void kvf_set_layer_free(struct kvf_layer_data **data, uint32_t n)
{
    for (uint32_t i = 0; data != NULL && i < n; i++) {
        if (data[i] != NULL) {
            kvf_layer_data_fini(data[i]);
            free(data[i]);
        }
    }
    free(data);
}

int kvf_set_layer_load(const struct kvf_capture_set *set, uint32_t layer, uint32_t n_rows,
                       struct kvf_layer_data ***data_out)
{
    struct kvf_layer_data **data = calloc(set->n + 1, sizeof(*data));
    int status = data != NULL ? KVF_OK : KVF_ERR_NO_MEMORY;

    for (uint32_t i = 0; status == KVF_OK && i < set->n; i++) {
        data[i] = calloc(1, sizeof(*data[i]));
        status = data[i] != NULL ? kvf_layer_data_init(data[i], set->items[i], layer, n_rows)
                                 : KVF_ERR_NO_MEMORY;
    }
    if (status != KVF_OK) {
        kvf_set_layer_free(data, set->n);
        return status;
    }
    *data_out = data;
    return KVF_OK;
}

/* --- one layer with one form of each ---------------------------------------------------------- */

int kvf_calib_means(const struct kvf_calibration *c, uint32_t layer, uint8_t *means_out)
{
    const struct kvf_capture_tensor *k = &c->captures->items[0]->tensors[c->options.k_kind];
    size_t n_tokens_max = 0;
    double *sums;
    float *values;
    double n = 0;

    for (uint32_t i = 0; i < c->captures->n; i++) {
        size_t n_tokens = c->captures->items[i]->n_tokens;

        n_tokens_max = n_tokens > n_tokens_max ? n_tokens : n_tokens_max;
        n += (double)n_tokens - (double)c->options.sink_tokens;
    }
    sums = calloc((size_t)k->n_heads * k->dim, sizeof(*sums));
    values = calloc(n_tokens_max * k->dim, sizeof(*values));
    if (sums == NULL || values == NULL) {
        free(sums);
        free(values);
        return KVF_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < c->captures->n; i++) {
        for (uint32_t head = 0; head < k->n_heads; head++) {
            kvf_capture_head(c->captures->items[i], c->options.k_kind, layer, head, values);
            for (size_t t = c->options.sink_tokens; t < c->captures->items[i]->n_tokens; t++) {
                for (uint32_t d = 0; d < k->dim; d++) {
                    sums[head * k->dim + d] += values[t * k->dim + d];
                }
            }
        }
    }
    for (size_t i = 0; i < (size_t)k->n_heads * k->dim; i++) {
        uint16_t half = kvf_f16_from_f32((float)(n > 0 ? sums[i] / n : 0));

        memcpy(means_out + 2 * i, &half, sizeof(half));
    }
    free(sums);
    free(values);
    return KVF_OK;
}

/* A plan of one layer. *table_out is the caller's, and has to outlive the plan. */
static int layer_plan(const struct kvf_calibration *c, uint32_t layer, uint32_t k, uint32_t v,
                      struct kvf_profile_table **table_out, struct kvf_codec_plan *plan_out)
{
    const struct kvf_capture *capture = c->captures->items[0];
    struct kvf_profile_table *table = kvf_calib_table_create(capture, c->options.k_kind, 1,
                                                             c->options.sink_tokens);
    struct kvf_geometry geometry = kvf_roundtrip_geometry(capture, 1, c->options.k_kind,
                                                          KVF_CALIB_CHUNK_TOKENS);
    char why[KVF_PROFILE_WHY_BYTES];
    int status = KVF_OK;

    if (table == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    table->kinds[0] = (struct kvf_profile_kind){.k = c->forms_k[k].settings,
                                                .v = c->forms_v[v].settings};
    if ((c->forms_k[k].settings.flags & KVF_TENSOR_CENTER_PROFILE) != 0) {
        status = kvf_profile_table_add_array(table, KVF_PROFILE_MEANS_K);
        if (status == KVF_OK) {
            status = kvf_calib_means(c, layer, table->arrays[KVF_PROFILE_MEANS_K]);
        }
    }
    if (status == KVF_OK) {
        status = kvf_profile_table_validate(table, why);
    }
    if (status == KVF_OK) {
        status = kvf_codec_plan_init_table(plan_out, &geometry, table, 0);
    }
    if (status != KVF_OK) {
        kvf_profile_table_destroy(table);
        return status;
    }
    *table_out = table;
    return KVF_OK;
}

/* Run one capture through a plan of one layer and take what comes back. tail_tokens 0: all full
 * chunks. */
static int pass_layer(const struct kvf_calibration *c, const struct kvf_codec_plan *plan,
                      struct kvf_layer_data *data, uint32_t tail_tokens)
{
    struct kvf_roundtrip trip;
    int status = kvf_roundtrip_init(&trip, plan, data->capture);

    if (status != KVF_OK) {
        return status;
    }
    status = tail_tokens != 0
                 ? kvf_roundtrip_run_tail(&trip, c->options.k_kind, data->layer, tail_tokens)
                 : kvf_roundtrip_run(&trip, c->options.k_kind, data->layer);
    if (status == KVF_OK) {
        kvf_layer_data_take(data, &trip, c->options.k_kind, 0);
    }
    kvf_roundtrip_fini(&trip);
    return status;
}

/* Noise of the keys of short blocks: of the worst head. */
int kvf_calib_tail_noise(struct kvf_layer_data *const *data, uint32_t n,
                         struct kvf_noise *noise_out)
{
    struct kvf_noise worst = {0};
    int status = KVF_OK;

    for (uint32_t head = 0; status == KVF_OK && head < data[0]->attention.n_heads; head++) {
        struct kvf_noise noise = {0};

        for (uint32_t i = 0; status == KVF_OK && i < n; i++) {
            uint32_t n_tokens = data[i]->attention.n_tokens;

            if (n_tokens >= KVF_CALIB_TAIL_TOKENS) {
                status = kvf_layer_noise(&data[i], 1, head, n_tokens - KVF_CALIB_TAIL_TOKENS,
                                         &noise);
            }
            worst.median = fmax(worst.median, noise.median);
            worst.p99 = fmax(worst.p99, noise.p99);
        }
    }
    *noise_out = worst;
    return status;
}

int kvf_calib_pass_forms(const struct kvf_calibration *c, struct kvf_layer_data *const *data,
                         uint32_t n, uint32_t k, uint32_t v, uint32_t tail_tokens)
{
    struct kvf_profile_table *table = NULL;
    struct kvf_codec_plan plan;
    int status = layer_plan(c, data[0]->layer, k, v, &table, &plan);

    for (uint32_t i = 0; status == KVF_OK && i < n; i++) {
        if (data[i]->attention.n_tokens >= tail_tokens) {
            status = pass_layer(c, &plan, data[i], tail_tokens);
        }
    }
    kvf_profile_table_destroy(table);
    return status;
}

int kvf_calib_measure_forms(const struct kvf_calibration *c, struct kvf_layer_data *const *data,
                            uint32_t n, uint32_t k, uint32_t v, uint32_t parts,
                            struct kvf_grid_entry *entry_out)
{
    int status = kvf_calib_pass_forms(c, data, n, k, v, 0);

    if (status == KVF_OK) {
        status = kvf_measure_layer(data, n, parts, &entry_out->measure);
    }
    if (status == KVF_OK) {
        status = kvf_calib_pass_forms(c, data, n, k, v, KVF_CALIB_TAIL_TOKENS);
    }
    return status == KVF_OK ? kvf_calib_tail_noise(data, n, &entry_out->tail) : status;
}

/* --- the grid --------------------------------------------------------------------------------- */

static int measure_grid_layer(void *arg, uint32_t layer)
{
    struct kvf_calibration *c = arg;
    struct kvf_layer_data **data;
    int status = kvf_set_layer_load(c->captures, layer, c->options.n_rows, &data);

    if (status != KVF_OK) {
        return status;
    }
    for (uint32_t pair = 0; status == KVF_OK && pair < kvf_calib_pairs(c); pair++) {
        status = kvf_calib_measure_forms(c, data, c->captures->n, form_of(pair, c->n_forms_k),
                                         form_of(pair, c->n_forms_v),
                                         KVF_MEASURE_ERRORS | KVF_MEASURE_APART,
                                         &c->grid[(size_t)layer * kvf_calib_pairs(c) + pair]);
    }
    kvf_set_layer_free(data, c->captures->n);
    return status;
}

/* Bits of each form, from the plan that it has. */
static int find_bits(struct kvf_calibration *c)
{
    int status = KVF_OK;

    for (uint32_t pair = 0; status == KVF_OK && pair < kvf_calib_pairs(c); pair++) {
        struct kvf_profile_table *table = NULL;
        struct kvf_codec_plan plan;
        uint32_t k = form_of(pair, c->n_forms_k);
        uint32_t v = form_of(pair, c->n_forms_v);

        status = layer_plan(c, 0, k, v, &table, &plan);
        if (status == KVF_OK) {
            c->bits_k[k] = kvf_tensor_bits(&plan.kinds[0].k, KVF_CALIB_CHUNK_TOKENS);
            c->bits_v[v] = kvf_tensor_bits(&plan.kinds[0].v, KVF_CALIB_CHUNK_TOKENS);
        }
        kvf_profile_table_destroy(table);
    }
    return status;
}

int kvf_calibration_measure(struct kvf_calibration *calibration)
{
    struct kvf_calibration *c = calibration;
    int status = find_bits(c);

    if (status == KVF_OK) {
        status = kvf_run_parallel(c->n_layers, c->options.n_threads, measure_grid_layer, c);
    }
    for (uint32_t layer = 0; status == KVF_OK && layer < c->n_layers; layer++) {
        for (uint32_t pair = 0; pair < kvf_calib_pairs(c); pair++) {
            const struct kvf_measure *measure = &kvf_calib_grid(c, layer, pair)->measure;

            if (pair < c->n_forms_k) {
                c->score_k[pair] +=
                    kvf_form_score(kvf_error_centred(&measure->k), c->bits_k[pair]) / c->n_layers;
            }
            if (pair < c->n_forms_v) {
                c->score_v[pair] +=
                    kvf_form_score(kvf_error_centred(&measure->v), c->bits_v[pair]) / c->n_layers;
            }
        }
    }
    return status;
}

/* --- the whole profile ------------------------------------------------------------------------ */

/* The held-out captures after all chunks, and after one short block. */
struct verify {
    const struct kvf_calibration *calibration;
    struct kvf_roundtrip *trips; /* [capture][2] */
    struct kvf_layer_verdict *verdicts;
};

static int verify_layer(void *arg, uint32_t layer)
{
    struct verify *verify = arg;
    const struct kvf_calibration *c = verify->calibration;
    struct kvf_layer_verdict *verdict = &verify->verdicts[layer];
    struct kvf_layer_data **data;
    int status = kvf_set_layer_load(c->heldout, layer, c->options.n_rows, &data);

    if (status != KVF_OK) {
        return status;
    }
    for (uint32_t i = 0; i < c->heldout->n; i++) {
        kvf_layer_data_take(data[i], &verify->trips[2 * i], c->options.k_kind, layer);
    }
    status = kvf_measure_layer(data, c->heldout->n,
                               KVF_MEASURE_ERRORS | KVF_MEASURE_APART | KVF_MEASURE_BOTH,
                               &verdict->measure);
    for (uint32_t i = 0; i < c->heldout->n; i++) {
        kvf_layer_data_take(data[i], &verify->trips[2 * i + 1], c->options.k_kind, layer);
    }
    if (status == KVF_OK) {
        status = kvf_calib_tail_noise(data, c->heldout->n, &verdict->tail);
    }
    verdict->failing = kvf_calib_failing(c, &verdict->measure, &verdict->tail);
    kvf_set_layer_free(data, c->heldout->n);
    return status;
}

/* Bits a value of all full chunks that were coded. */
static double trips_bits(const struct verify *verify, const struct kvf_codec_plan *plan)
{
    const struct kvf_capture_set *set = verify->calibration->heldout;
    const struct kvf_geometry *geometry = &plan->geometry;
    double values = 0;
    double bytes = 0;

    for (uint32_t i = 0; i < set->n; i++) {
        uint32_t chunks = set->items[i]->n_tokens / geometry->chunk_tokens;

        values += (double)chunks * geometry->chunk_tokens * geometry->n_layers * geometry->n_heads *
                  (geometry->dim_k + geometry->dim_v);
        bytes += (double)verify->trips[2 * i].payload_bytes;
    }
    return values > 0 ? 8 * bytes / values : 0;
}

int kvf_calibration_verify(const struct kvf_calibration *calibration,
                           const struct kvf_codec_plan *plan, struct kvf_layer_verdict *verdicts,
                           double *bits_out)
{
    const struct kvf_calibration *c = calibration;
    uint32_t n = c->heldout->n;
    struct kvf_roundtrip *trips = calloc(2 * (size_t)n + 1, sizeof(*trips));
    struct verify verify = {.calibration = c, .trips = trips, .verdicts = verdicts};
    int status = trips != NULL ? KVF_OK : KVF_ERR_NO_MEMORY;

    for (uint32_t i = 0; status == KVF_OK && i < 2 * n; i++) {
        const struct kvf_capture *capture = c->heldout->items[i / 2];

        status = kvf_roundtrip_init(&trips[i], plan, capture);
        if (status == KVF_OK && i % 2 == 0) {
            status = kvf_roundtrip_run(&trips[i], c->options.k_kind, 0);
        } else if (status == KVF_OK && capture->n_tokens >= KVF_CALIB_TAIL_TOKENS &&
                   plan->geometry.chunk_tokens >= KVF_CALIB_TAIL_TOKENS) {
            status = kvf_roundtrip_run_tail(&trips[i], c->options.k_kind, 0, KVF_CALIB_TAIL_TOKENS);
        } else if (status == KVF_OK) {
            status = kvf_roundtrip_run(&trips[i], c->options.k_kind, 0);
        }
    }
    if (status == KVF_OK) {
        status = kvf_run_parallel(c->n_layers, c->options.n_threads, verify_layer, &verify);
        *bits_out = trips_bits(&verify, plan);
    }
    for (uint32_t i = 0; trips != NULL && i < 2 * n; i++) {
        kvf_roundtrip_fini(&trips[i]);
    }
    free(trips);
    return status;
}
