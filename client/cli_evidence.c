/* SPDX-License-Identifier: Apache-2.0
 *
 * cli_evidence.c: see cli_evidence.h. Numbers are rounded to six digits: what is behind them
 * depends on the machine's libm.
 */
#include "client/cli_evidence.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Six digits; JSON has neither NaN nor infinity. */
static json_t *number(double value)
{
    char text[32];

    snprintf(text, sizeof(text), "%.6g", isfinite(value) ? value : 1e300);
    return json_real(strtod(text, NULL));
}

const char *cli_failing_text(uint32_t failing, char out[64])
{
    static const struct {
        uint32_t bit;
        const char *text;
    } names[] = {
        {KVF_FAILS_SIGMA, "logit noise"},
        {KVF_FAILS_TOP1, "top-1"},
        {KVF_FAILS_OUTPUT, "output error"},
    };

    out[0] = '\0';
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if ((failing & names[i].bit) != 0) {
            size_t n = strlen(out);

            snprintf(out + n, 64 - n, "%s%s", n != 0 ? ", " : "", names[i].text);
        }
    }
    return out;
}

static json_t *captures_json(const struct kvf_capture_set *set)
{
    json_t *list = json_array();

    for (uint32_t i = 0; i < set->n; i++) {
        const struct kvf_capture *capture = set->items[i];
        char digest[KVF_DIGEST_TEXT_BYTES];

        kvf_digest_text(capture->digest, digest);
        json_array_append_new(list, json_pack("{s:s, s:s, s:i, s:i, s:i}", "name", capture->name,
                                              "sha256", digest, "tokens", (int)capture->n_tokens,
                                              "first_position", (int)capture->first_position,
                                              "query_tokens", (int)capture->n_q_rows));
    }
    return list;
}

static const char *queries_text(const struct kvf_capture_set *set)
{
    const struct kvf_capture *capture = set->items[0];

    return capture->tensors[KVF_CAPTURE_Q].n_heads != 0        ? "captured"
           : capture->tensors[KVF_CAPTURE_Q_NORM].n_heads != 0 ? "norms captured"
                                                               : "norms assumed to be those of K";
}

static json_t *layer_json(const struct cli_verdict *verdict, uint32_t layer)
{
    const struct kvf_calibration *c = verdict->calibration;
    const struct kvf_layer_choice *choice = &c->choices[layer];
    const struct kvf_layer_verdict *v = &verdict->layers[layer];
    const struct kvf_measure *measure = &v->measure;
    char failing[64];
    json_t *json = json_pack("{s:i, s:b}", "layer", (int)layer, "passed", v->failing == 0);

    if (verdict->profile == NULL) {
        json_object_set_new(json, "k", json_string(c->forms_k[choice->k].name));
        json_object_set_new(json, "v", json_string(c->forms_v[choice->v].name));
        json_object_set_new(json, "steps_back", json_integer(choice->steps_back));
    }
    if (choice->first_failing != 0) {
        cli_failing_text(choice->first_failing, failing);
        json_object_set_new(json, "stepped_back_for", json_string(failing));
    }
    if (v->failing != 0) {
        json_object_set_new(json, "fails_by", json_string(cli_failing_text(v->failing, failing)));
    }
    json_object_set_new(json, "sigma_median", number(measure->noise.median));
    json_object_set_new(json, "sigma_p99", number(measure->noise.p99));
    json_object_set_new(json, "short_block_sigma_median", number(v->tail.median));
    json_object_set_new(json, "short_block_sigma_p99", number(v->tail.p99));
    json_object_set_new(json, "output_error", number(kvf_attention_output_error(&measure->both)));
    json_object_set_new(json, "top1", number(kvf_attention_top1(&measure->both)));
    json_object_set_new(json, "kl",
                        number(measure->both.kl / fmax((double)measure->both.n_rows, 1)));
    json_object_set_new(json, "k_relative_error", number(kvf_error_relative(&measure->k)));
    json_object_set_new(json, "v_relative_error", number(kvf_error_relative(&measure->v)));
    return json;
}

/* Over all layers. */
static void add_totals(json_t *json, const struct cli_verdict *verdict)
{
    double error = 0;
    double worst = 0;
    double top1 = 0;
    uint64_t rows = 0;

    for (uint32_t layer = 0; layer < verdict->calibration->n_layers; layer++) {
        const struct kvf_attention_error *both = &verdict->layers[layer].measure.both;
        double output_error = kvf_attention_output_error(both);

        error += output_error * output_error;
        worst = fmax(worst, output_error);
        top1 += kvf_attention_top1(both) / verdict->calibration->n_layers;
        rows += both->n_rows;
    }
    json_object_set_new(json, "output_error", number(sqrt(error / verdict->calibration->n_layers)));
    json_object_set_new(json, "output_error_worst_layer", number(worst));
    json_object_set_new(json, "top1", number(top1));
    json_object_set_new(json, "queries_compared", json_integer((json_int_t)rows));
}

/* The forms that were tried, and how they did: lower scores won. */
static json_t *forms_json(const struct kvf_form *forms, uint32_t n, const double *bits,
                          const double *scores)
{
    json_t *list = json_array();

    for (uint32_t i = 1; i < n; i++) {
        json_array_append_new(list, json_pack("{s:s, s:o, s:o}", "form", forms[i].name, "bits",
                                              number(bits[i]), "score", number(scores[i])));
    }
    return list;
}

static const char *rope_text(const struct kvf_calibration *c)
{
    return c->options.k_kind == KVF_CAPTURE_K_PRE ? "pre" : "post";
}

static void add_thresholds(json_t *json, const struct kvf_thresholds *thresholds)
{
    json_object_set_new(
        json, "thresholds",
        json_pack("{s:o, s:o, s:o, s:o}", "sigma_median", number(thresholds->sigma_median),
                  "sigma_p99", number(thresholds->sigma_p99), "output_error",
                  number(thresholds->output_error), "top1", number(thresholds->top1)));
}

json_t *cli_evidence(const struct cli_verdict *verdict)
{
    const struct kvf_calibration *c = verdict->calibration;
    bool is_made = verdict->profile == NULL;
    json_t *layers = json_array();
    json_t *json = json_object();
    char tool[64];

    snprintf(tool, sizeof(tool), "kvferry %s", kvf_version());
    json_object_set_new(json, "tool", json_string(tool));
    json_object_set_new(json, "mode",
                        json_string(!is_made                     ? "check"
                                    : c->options.target_bits > 0 ? "target-bits"
                                                                 : "ladder"));
    json_object_set_new(json, "passed", json_boolean(verdict->n_failing == 0));
    json_object_set_new(json, "workload", json_string(verdict->workload));
    json_object_set_new(json, "model", json_string(c->captures->items[0]->model));
    json_object_set_new(json, "rope_state", json_string(rope_text(c)));
    json_object_set_new(json, "chunk_tokens", json_integer(verdict->plan->geometry.chunk_tokens));
    json_object_set_new(json, "bits_a_value", number(verdict->bits));
    json_object_set_new(json, "ratio_to_16_bits", number(16 / verdict->bits));
    if (c->options.target_bits > 0 && is_made) {
        json_object_set_new(json, "target_bits", number(c->options.target_bits));
    }
    add_thresholds(json, &c->options.thresholds);
    if (is_made) {
        json_object_set_new(json, "captures", captures_json(c->captures));
    }
    json_object_set_new(json, "heldout", captures_json(c->heldout));
    json_object_set_new(json, "queries", json_string(queries_text(c->heldout)));
    add_totals(json, verdict);
    for (uint32_t layer = 0; layer < c->n_layers; layer++) {
        json_array_append_new(layers, layer_json(verdict, layer));
    }
    json_object_set_new(json, "layers", layers);
    if (is_made) {
        json_object_set_new(json, "forms_k",
                            forms_json(c->forms_k, c->n_forms_k, c->bits_k, c->score_k));
        json_object_set_new(json, "forms_v",
                            forms_json(c->forms_v, c->n_forms_v, c->bits_v, c->score_v));
    }
    json_object_set_new(json, "does_not_show",
                        json_string("errors that grow from layer to layer, task scores, other "
                                    "workloads, longer texts than the captures"));
    return json;
}
