/* SPDX-License-Identifier: Apache-2.0
 *
 * calib_search.c: see calib_search.h.
 */
#include "client/calib_search.h"

#include <assert.h>
#include <math.h>

uint32_t kvf_thresholds_check(const struct kvf_thresholds *thresholds,
                              const struct kvf_noise *noise,
                              const struct kvf_attention_error *error)
{
    uint32_t failing = 0;

    /* written so that a NaN fails */
    if (!(noise->median <= thresholds->sigma_median && noise->p99 <= thresholds->sigma_p99)) {
        failing |= KVF_FAILS_SIGMA;
    }
    if (!(kvf_attention_top1(error) >= thresholds->top1)) {
        failing |= KVF_FAILS_TOP1;
    }
    if (!(kvf_attention_output_error(error) <= thresholds->output_error)) {
        failing |= KVF_FAILS_OUTPUT;
    }
    return failing;
}

uint32_t kvf_ladder_descend(const bool passes[KVF_RUNGS])
{
    uint32_t n = 0;

    while (n < KVF_RUNGS && passes[n]) {
        n++;
    }
    return n;
}

bool kvf_ladder_step_back(struct kvf_rungs *rungs, uint32_t failing, double k_error2,
                          double v_error2)
{
    bool is_k = (failing & (KVF_FAILS_SIGMA | KVF_FAILS_TOP1)) != 0 || k_error2 >= v_error2;

    if ((is_k && rungs->k > 0) || rungs->v == 0) {
        if (rungs->k == 0) {
            return false;
        }
        rungs->k--;
    } else {
        rungs->v--;
    }
    return true;
}

double kvf_form_score(double error2, double bits)
{
    return 0.5 * log2(error2) + bits;
}

bool kvf_rate_fit(const double *bits, const double *errors, uint32_t n, double *alpha_out,
                  double *beta_out)
{
    double mean_x = 0;
    double mean_y = 0;
    double xx = 0;
    double xy = 0;

    for (uint32_t i = 0; i < n; i++) {
        if (!(errors[i] > 0)) {
            return false;
        }
        mean_x += bits[i] / n;
        mean_y += log(errors[i]) / n;
    }
    for (uint32_t i = 0; i < n; i++) {
        xx += (bits[i] - mean_x) * (bits[i] - mean_x);
        xy += (bits[i] - mean_x) * (log(errors[i]) - mean_y);
    }
    if (!(xx > 0) || !(xy < 0)) {
        return false;
    }
    *beta_out = exp(-xy / xx);
    *alpha_out = exp(mean_y - mean_x * xy / xx);
    return true;
}

static double model_error(const struct kvf_rate_item *item, uint32_t rung)
{
    return item->weight * item->alpha * pow(item->beta, -item->bits[rung]);
}

bool kvf_rate_allocate(struct kvf_rate_item *items, uint32_t n, double target_bits)
{
    double bits = 0;

    for (uint32_t i = 0; i < n; i++) {
        items[i].rung = KVF_RUNGS - 1;
        bits += items[i].values * items[i].bits[KVF_RUNGS - 1];
    }
    if (bits > target_bits) {
        return false;
    }
    for (;;) {
        struct kvf_rate_item *best = NULL;
        double best_slope = 0;
        double best_cost = 0;

        for (uint32_t i = 0; i < n; i++) {
            struct kvf_rate_item *item = &items[i];
            double cost;
            double slope;

            if (item->rung == 1) {
                continue; /* above is the lossless codec, which no curve describes */
            }
            cost = item->values * (item->bits[item->rung - 1] - item->bits[item->rung]);
            slope = (model_error(item, item->rung) - model_error(item, item->rung - 1U)) / cost;
            if (bits + cost <= target_bits + 1e-9 && slope > best_slope) {
                best = item;
                best_slope = slope;
                best_cost = cost;
            }
        }
        if (best == NULL) {
            return true;
        }
        best->rung--;
        bits += best_cost;
    }
}

/* --- kinds ------------------------------------------------------------------------------------ */

/* The distinct kinds of the layers, and how many layers each has. */
static uint32_t count_kinds(const struct kvf_kind_choice *layers, uint32_t n,
                            struct kvf_kind_choice kinds_out[KVF_LAYERS_MAX],
                            uint32_t counts_out[KVF_LAYERS_MAX])
{
    uint32_t n_kinds = 0;

    assert(n <= KVF_LAYERS_MAX);
    for (uint32_t layer = 0; layer < n; layer++) {
        uint32_t i = 0;

        while (i < n_kinds &&
               (kinds_out[i].k != layers[layer].k || kinds_out[i].v != layers[layer].v)) {
            i++;
        }
        if (i == n_kinds) {
            kinds_out[n_kinds] = layers[layer];
            counts_out[n_kinds++] = 0;
        }
        counts_out[i]++;
    }
    return n_kinds;
}

static struct kvf_kind_choice joined(struct kvf_kind_choice a, struct kvf_kind_choice b,
                                     const double *bits_k, const double *bits_v)
{
    return (struct kvf_kind_choice){
        .k = bits_k[a.k] >= bits_k[b.k] ? a.k : b.k,
        .v = bits_v[a.v] >= bits_v[b.v] ? a.v : b.v,
    };
}

void kvf_kinds_join(struct kvf_kind_choice *layers, uint32_t n, uint32_t most, const double *bits_k,
                    const double *bits_v)
{
    struct kvf_kind_choice kinds[KVF_LAYERS_MAX];
    uint32_t counts[KVF_LAYERS_MAX];
    uint32_t n_kinds;

    while ((n_kinds = count_kinds(layers, n, kinds, counts)) > most) {
        struct kvf_kind_choice to = {0};
        double least = INFINITY;
        uint32_t first = 0;
        uint32_t second = 0;

        for (uint32_t a = 0; a < n_kinds; a++) {
            for (uint32_t b = a + 1; b < n_kinds; b++) {
                struct kvf_kind_choice both = joined(kinds[a], kinds[b], bits_k, bits_v);
                double bits = bits_k[both.k] + bits_v[both.v];
                double cost = counts[a] * (bits - bits_k[kinds[a].k] - bits_v[kinds[a].v]) +
                              counts[b] * (bits - bits_k[kinds[b].k] - bits_v[kinds[b].v]);

                if (cost < least) {
                    least = cost;
                    first = a;
                    second = b;
                    to = both;
                }
            }
        }
        for (uint32_t layer = 0; layer < n; layer++) {
            if ((layers[layer].k == kinds[first].k && layers[layer].v == kinds[first].v) ||
                (layers[layer].k == kinds[second].k && layers[layer].v == kinds[second].v)) {
                layers[layer] = to;
            }
        }
    }
}
