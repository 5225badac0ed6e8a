/* SPDX-License-Identifier: Apache-2.0
 *
 * calib_choose.c: the decisions of a calibration, layer by layer; see calibrate.h.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "client/calib_internal.h"

uint32_t kvf_calib_failing(const struct kvf_calibration *c, const struct kvf_measure *measure,
                           const struct kvf_noise *tail)
{
    const struct kvf_thresholds *thresholds = &c->options.thresholds;
    const struct kvf_noise worst = {
        .median = fmax(measure->noise.median, tail->median),
        .p99 = fmax(measure->noise.p99, tail->p99),
    };

    return kvf_thresholds_check(thresholds, &worst, &measure->both);
}

/* --- down the ladder -------------------------------------------------------------------------- */

static bool is_k_passing(const struct kvf_calibration *c, const struct kvf_grid_entry *entry)
{
    const struct kvf_measure *measure = &entry->measure;
    struct kvf_measure alone = {.noise = measure->noise, .both = measure->k_only};

    return kvf_calib_failing(c, &alone, &entry->tail) == 0;
}

/* V alone; what both do together is settled later. Without Q: as if each query saw one value. */
static bool is_v_passing(const struct kvf_calibration *c, const struct kvf_grid_entry *entry)
{
    const struct kvf_measure *measure = &entry->measure;
    double error = measure->v_only.n_rows != 0 ? kvf_attention_output_error(&measure->v_only)
                                               : sqrt(kvf_error_relative(&measure->v));

    return error <= c->options.thresholds.output_error;
}

/* The passing form of a rung with the best score over all layers; where none passes, the best.
 * Means of the profile come last, whatever their score: they hold for the positions of the
 * captures, those of a block wherever it stands. */
static bool best_form(const struct kvf_calibration *c, uint32_t layer, bool is_v, uint32_t rung,
                      uint8_t *form_out)
{
    const struct kvf_form *forms = is_v ? c->forms_v : c->forms_k;
    const double *scores = is_v ? c->score_v : c->score_k;
    uint32_t n = is_v ? c->n_forms_v : c->n_forms_k;
    double best = INFINITY;
    bool has_passing = false;

    *form_out = 0;
    for (uint32_t i = 0; i < n; i++) {
        const struct kvf_grid_entry *entry = kvf_calib_grid(c, layer, i);
        bool is_last = (forms[i].settings.flags & KVF_TENSOR_CENTER_PROFILE) != 0;
        double score = scores[i] + (is_last ? 1000 : 0);
        bool passes;

        if (forms[i].rung != rung) {
            continue;
        }
        passes = is_v ? is_v_passing(c, entry) : is_k_passing(c, entry);
        if (passes > has_passing || (passes == has_passing && score < best)) {
            has_passing = passes;
            best = score;
            *form_out = (uint8_t)i;
        }
    }
    return has_passing;
}

/* Forms of every rung, and how far down the layer goes. */
static void descend(struct kvf_calibration *c, uint32_t layer)
{
    struct kvf_layer_choice *choice = &c->choices[layer];
    bool passes[2][KVF_RUNGS];
    uint32_t n;

    for (uint32_t rung = 0; rung < KVF_RUNGS; rung++) {
        passes[0][rung] = best_form(c, layer, false, rung, &choice->k_of[rung]);
        passes[1][rung] = best_form(c, layer, true, rung, &choice->v_of[rung]);
    }
    n = kvf_ladder_descend(passes[0]);
    choice->rungs.k = (uint8_t)(n > 0 ? n - 1 : 0);
    n = kvf_ladder_descend(passes[1]);
    choice->rungs.v = (uint8_t)(n > 0 ? n - 1 : 0);
}

/* --- a mean budget ---------------------------------------------------------------------------- */

enum {
    RUNG_OF_WEIGHTS = 4 /* 4 bits: where the weight of a layer's error is measured */
};

/* Error of a tensor of a layer at a rung, of its power. */
static double tensor_error(const struct kvf_calibration *c, uint32_t layer, bool is_v,
                           uint32_t rung)
{
    const struct kvf_layer_choice *choice = &c->choices[layer];
    uint32_t form = is_v ? choice->v_of[rung] : choice->k_of[rung];
    const struct kvf_measure *measure = &kvf_calib_grid(c, layer, form)->measure;

    return is_v ? kvf_error_centred(&measure->v) : kvf_error_centred(&measure->k);
}

/* What a layer's attention makes of an error of its K or V: square of the output's error, relative;
 * without Q the tensor's own. */
static double output_error2(const struct kvf_calibration *c, uint32_t layer, bool is_v)
{
    const struct kvf_layer_choice *choice = &c->choices[layer];
    uint32_t form = is_v ? choice->v_of[RUNG_OF_WEIGHTS] : choice->k_of[RUNG_OF_WEIGHTS];
    const struct kvf_measure *measure = &kvf_calib_grid(c, layer, form)->measure;
    const struct kvf_attention_error *error = is_v ? &measure->v_only : &measure->k_only;

    return error->n_rows != 0 ? error->error2 / fmax(error->power2, 1e-300)
                              : tensor_error(c, layer, is_v, RUNG_OF_WEIGHTS);
}

/* The curve of one tensor over all layers: geometric means. */
static bool fit_curve(const struct kvf_calibration *c, bool is_v, double *alpha_out,
                      double *beta_out)
{
    double bits[KVF_RUNGS];
    double errors[KVF_RUNGS];
    const double *form_bits = is_v ? c->bits_v : c->bits_k;

    for (uint32_t rung = 1; rung < KVF_RUNGS; rung++) {
        const struct kvf_layer_choice *first = &c->choices[0];
        double sum = 0;

        for (uint32_t layer = 0; layer < c->n_layers; layer++) {
            sum += log(tensor_error(c, layer, is_v, rung)) / c->n_layers;
        }
        bits[rung - 1] = form_bits[is_v ? first->v_of[rung] : first->k_of[rung]];
        errors[rung - 1] = exp(sum);
    }
    return kvf_rate_fit(bits, errors, KVF_RUNGS - 1, alpha_out, beta_out);
}

static int allocate(struct kvf_calibration *c)
{
    const struct kvf_capture *capture = c->captures->items[0];
    double dims[2] = {capture->tensors[KVF_CAPTURE_K_POST].dim,
                      capture->tensors[KVF_CAPTURE_V].dim};
    struct kvf_rate_item *items = calloc(2 * (size_t)c->n_layers, sizeof(*items));
    int status = KVF_OK;

    if (items == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    for (uint32_t is_v = 0; is_v < 2; is_v++) {
        const double *form_bits = is_v != 0 ? c->bits_v : c->bits_k;
        double alpha = 1;
        double beta = 4;

        if (!fit_curve(c, is_v != 0, &alpha, &beta)) {
            status = KVF_ERR_INVALID;
        }
        for (uint32_t layer = 0; layer < c->n_layers; layer++) {
            struct kvf_rate_item *item = &items[2 * layer + is_v];
            const struct kvf_layer_choice *choice = &c->choices[layer];
            const uint8_t *forms = is_v != 0 ? choice->v_of : choice->k_of;

            item->alpha = alpha;
            item->beta = beta;
            item->values = dims[is_v] / (dims[0] + dims[1]) / c->n_layers;
            for (uint32_t rung = 1; rung < KVF_RUNGS; rung++) {
                item->bits[rung] = form_bits[forms[rung]];
            }
            item->weight = output_error2(c, layer, is_v != 0) /
                           (alpha * pow(beta, -item->bits[RUNG_OF_WEIGHTS]));
        }
    }
    if (status == KVF_OK && !kvf_rate_allocate(items, 2 * c->n_layers, c->options.target_bits)) {
        status = KVF_ERR_NO_SPACE;
    }
    for (uint32_t layer = 0; layer < c->n_layers; layer++) {
        c->choices[layer].rungs = (struct kvf_rungs){.k = items[2 * layer].rung,
                                                     .v = items[2 * layer + 1].rung};
    }
    free(items);
    return status;
}

/* --- choose and settle ------------------------------------------------------------------------ */

static void take_rungs(struct kvf_layer_choice *choice)
{
    choice->k = choice->k_of[choice->rungs.k];
    choice->v = choice->v_of[choice->rungs.v];
}

int kvf_calibration_choose(struct kvf_calibration *calibration)
{
    struct kvf_calibration *c = calibration;
    int status = KVF_OK;

    for (uint32_t layer = 0; layer < c->n_layers; layer++) {
        c->choices[layer] = (struct kvf_layer_choice){0};
        descend(c, layer);
    }
    if (c->options.target_bits > 0) {
        status = allocate(c);
    }
    for (uint32_t layer = 0; layer < c->n_layers; layer++) {
        take_rungs(&c->choices[layer]);
    }
    return status;
}

static int settle_layer(void *arg, uint32_t layer)
{
    struct kvf_calibration *c = arg;
    struct kvf_layer_choice *choice = &c->choices[layer];
    struct kvf_layer_data **data;
    bool is_settled = false;
    int status = kvf_set_layer_load(c->heldout, layer, c->options.n_rows, &data);

    if (status != KVF_OK) {
        return status;
    }
    while (status == KVF_OK && !is_settled) {
        struct kvf_grid_entry entry = {0};
        const struct kvf_measure *measure = &entry.measure;
        uint32_t failing;

        take_rungs(choice);
        status = kvf_calib_measure_forms(c, data, c->heldout->n, choice->k, choice->v,
                                         KVF_MEASURE_ERRORS | KVF_MEASURE_APART | KVF_MEASURE_BOTH,
                                         &entry);
        failing = kvf_calib_failing(c, measure, &entry.tail);
        is_settled = failing == 0 ||
                     !kvf_ladder_step_back(&choice->rungs, failing, measure->k_only.error2,
                                           measure->v_only.error2);
        if (!is_settled) {
            choice->first_failing = choice->steps_back == 0 ? failing : choice->first_failing;
            choice->steps_back++;
        }
    }
    kvf_set_layer_free(data, c->heldout->n);
    return status;
}

int kvf_calibration_settle(struct kvf_calibration *calibration)
{
    struct kvf_calibration *c = calibration;
    struct kvf_kind_choice kinds[KVF_LAYERS_MAX];
    int status = KVF_OK;

    if (!(c->options.target_bits > 0)) {
        status = kvf_run_parallel(c->n_layers, c->options.n_threads, settle_layer, c);
    }
    for (uint32_t layer = 0; layer < c->n_layers; layer++) {
        kinds[layer] = (struct kvf_kind_choice){c->choices[layer].k, c->choices[layer].v};
    }
    kvf_kinds_join(kinds, c->n_layers, KVF_CODEC_KINDS_MAX, c->bits_k, c->bits_v);
    for (uint32_t layer = 0; layer < c->n_layers; layer++) {
        c->choices[layer].k = kinds[layer].k;
        c->choices[layer].v = kinds[layer].v;
    }
    return status;
}

/* --- the table -------------------------------------------------------------------------------- */

/* The number of the layer's kind; a new one if no layer before it has both its forms. */
static uint8_t kind_of(struct kvf_calibration *c, uint32_t layer, struct kvf_profile_table *table)
{
    const struct kvf_layer_choice *choice = &c->choices[layer];

    for (uint32_t i = 0; i < layer; i++) {
        if (c->choices[i].k == choice->k && c->choices[i].v == choice->v) {
            return table->layer_kinds[i];
        }
    }
    table->kinds[table->n_kinds] = (struct kvf_profile_kind){
        .k = c->forms_k[choice->k].settings,
        .v = c->forms_v[choice->v].settings,
    };
    return table->n_kinds++;
}

int kvf_calibration_table(struct kvf_calibration *calibration, struct kvf_profile_table **table_out)
{
    struct kvf_calibration *c = calibration;
    struct kvf_profile_table *table = kvf_calib_table_create(
        c->captures->items[0], c->options.k_kind, c->n_layers, c->options.sink_tokens);
    int status = table != NULL ? KVF_OK : KVF_ERR_NO_MEMORY;

    if (status != KVF_OK) {
        return status;
    }
    table->n_kinds = 0;
    for (uint32_t layer = 0; status == KVF_OK && layer < c->n_layers; layer++) {
        table->layer_kinds[layer] = kind_of(c, layer, table);
        if ((c->forms_k[c->choices[layer].k].settings.flags & KVF_TENSOR_CENTER_PROFILE) == 0) {
            continue;
        }
        if (table->arrays[KVF_PROFILE_MEANS_K] == NULL) {
            status = kvf_profile_table_add_array(table, KVF_PROFILE_MEANS_K);
        }
        if (status == KVF_OK) {
            size_t bytes = kvf_profile_array_layer_bytes(table, KVF_PROFILE_MEANS_K);

            status = kvf_calib_means(c, layer, table->arrays[KVF_PROFILE_MEANS_K] + layer * bytes);
        }
    }
    if (status != KVF_OK) {
        kvf_profile_table_destroy(table);
        return status;
    }
    *table_out = table;
    return KVF_OK;
}
