/* SPDX-License-Identifier: Apache-2.0
 *
 * x_gate.c: fetch K and V, fetch X and rebuild them, or compute again (part 9 of kvferry.h).
 *
 * The formulas are those of cost.h, of which this adds rates: given, timed at open, and of the link
 * followed. A rank of a tensor-parallel group fetches X of the whole model, and makes and computes
 * its own share of K and V.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "client/cost.h"
#include "client/x_internal.h"

enum {
    COPY_BYTES = 16 << 20,
    MARGIN_PERCENT = 10,
    MARGIN_PERCENT_MAX = 1000,
    NOTES_WEIGHT = 8, /* of what was before, beside one fetch that is told */
    NO_WAY = KVF_X_WAYS,
};

#define RATE_MAX 1e18

struct kvf_x_gate {
    struct kvf_weights_model model;                 /* the whole */
    struct kvf_weights_model share;                 /* with the heads of this rank */
    const struct kvf_profile *profiles[KVF_X_WAYS]; /* of KV and X */
    struct kvf_codec_plan plans[KVF_X_WAYS];        /* likewise */
    double ranks;
    double margin; /* 0.1: a way has to be a tenth faster */
    double link_bytes_per_s;
    double flop_per_s;
    double recompute_flop_per_s;
    double fixed_s;
    uint64_t choices[KVF_X_WAYS];
    uint8_t way; /* of the call before */
    kvf_log_fn log;
    void *log_arg;
};

/* --- open ------------------------------------------------------------------------------------- */

static bool rate_ok(double rate)
{
    return rate >= 0 && rate <= RATE_MAX; /* no NaN */
}

/* What is wrong with the options, or NULL. */
static const char *fault_of(const struct kvf_x *x, const struct kvf_x_gate_options *o)
{
    uint32_t heads = x->weights.model_heads != 0 ? x->weights.model_heads : x->weights.n_heads;

    if (o->query_heads < heads || o->query_heads > KVF_HEADS_MAX) {
        return "query_heads is less than the heads of K and V, or more than 1024";
    }
    if (o->ffn_width < 1 || o->ffn_width > KVF_WEIGHTS_FFN_MAX) {
        return "ffn_width is not in 1..1048576";
    }
    if (o->margin_percent > MARGIN_PERCENT_MAX) {
        return "margin_percent is more than 1000";
    }
    if (!rate_ok(o->link_bytes_per_s) || !rate_ok(o->flop_per_s) ||
        !rate_ok(o->recompute_flop_per_s) || !(o->fixed_s >= 0 && o->fixed_s <= 1e6)) {
        return "a rate, or fixed_s, is negative or no number";
    }
    if (o->x_profile == NULL && x->profile[0] == '\0') {
        return "x_profile is missing, and x was opened without a client";
    }
    return NULL;
}

static void models_init(struct kvf_x_gate *gate, const struct kvf_x *x,
                        const struct kvf_x_gate_options *o)
{
    const struct kvf_x_weights *w = &x->weights;
    uint32_t heads = w->model_heads != 0 ? w->model_heads : w->n_heads;

    gate->model = (struct kvf_weights_model){
        .n_layers = w->n_layers,
        .d_model = w->d_model,
        .n_query_heads = o->query_heads,
        .n_heads = heads,
        .dim_k = w->dim_k,
        .dim_v = w->dim_v,
        .ffn_width = o->ffn_width,
    };
    gate->share = gate->model;
    gate->share.n_heads = w->n_heads;
    gate->ranks = (double)heads / w->n_heads;
}

/* The rates of a way: what is computed is divided among the ranks. */
static struct kvf_cost_rates rates_of(const struct kvf_x_gate *gate, uint8_t way)
{
    return (struct kvf_cost_rates){
        .link_bytes_per_s = gate->link_bytes_per_s,
        .flop_per_s = gate->ranks *
                      (way == KVF_X_WAY_RECOMPUTE ? gate->recompute_flop_per_s : gate->flop_per_s),
        .fixed_s = gate->fixed_s,
    };
}

static double seconds_of(const struct kvf_x_gate *gate, uint8_t way, uint32_t n_tokens)
{
    const struct kvf_weights_model *model = way == KVF_X_WAY_KV ? &gate->share : &gate->model;
    const struct kvf_cost_rates rates = rates_of(gate, way);
    struct kvf_cost cost;

    if (way == KVF_X_WAY_RECOMPUTE) {
        return kvf_cost_recompute_s(model, &rates, n_tokens);
    }
    kvf_cost_times(model, gate->profiles[way], &gate->plans[way], &rates, n_tokens, &cost);
    return cost.total_s;
}

/* The profile of a way, which has to have a form for the model. */
static int profile_take(struct kvf_x_gate *gate, uint8_t way, const char *name)
{
    const struct kvf_weights_model *model = way == KVF_X_WAY_KV ? &gate->share : &gate->model;
    const struct kvf_profile *profile = kvf_profile_find(name);
    uint8_t kind = profile != NULL ? kvf_cost_kind(&gate->model, profile) : KVF_KIND_BYTES;

    if (kind == KVF_KIND_BYTES || (kind >= KVF_KIND_X) != (way == KVF_X_WAY_X) ||
        kvf_cost_plan(model, profile, &gate->plans[way]) != KVF_OK) {
        kvf_x_say(
            gate->log, gate->log_arg,
            "what pays: profile \"%.32s\" has no form for %s of this model: X has %u elements "
            "a token and layer, K and V have %u",
            name, way == KVF_X_WAY_X ? "X" : "K and V", gate->model.d_model,
            gate->model.n_heads * (gate->model.dim_k + gate->model.dim_v));
        return KVF_ERR_INVALID;
    }
    gate->profiles[way] = profile;
    return KVF_OK;
}

/* Bytes a second of a copy in memory, the best of some; 0: no memory. */
static double copy_rate(void)
{
    uint8_t *from = malloc(2 * (size_t)COPY_BYTES);
    uint64_t best_ns = UINT64_MAX;

    if (from == NULL) {
        return 0;
    }
    memset(from, 1, 2 * (size_t)COPY_BYTES);
    for (int i = 0; i < 4; i++) {
        uint64_t begun_ns = kvf_now_ns();
        uint64_t took_ns;

        memcpy(from + COPY_BYTES, from, COPY_BYTES);
        __asm__ volatile("" : : "r"(from) : "memory"); /* the copy is made */
        took_ns = kvf_now_ns() - begun_ns;
        best_ns = took_ns < best_ns ? took_ns : best_ns;
    }
    free(from);
    return COPY_BYTES * 1e9 / (double)(best_ns != 0 ? best_ns : 1);
}

static int gate_init(struct kvf_x_gate *gate, struct kvf_x *x, const struct kvf_x_gate_options *o)
{
    int status;

    models_init(gate, x, o);
    gate->way = NO_WAY;
    gate->margin = (o->margin_percent != 0 ? o->margin_percent : MARGIN_PERCENT) / 100.0;
    gate->fixed_s = o->fixed_s;
    status = profile_take(gate, KVF_X_WAY_X, o->x_profile != NULL ? o->x_profile : x->profile);
    if (status == KVF_OK) {
        status = profile_take(gate, KVF_X_WAY_KV, o->kv_profile != NULL ? o->kv_profile : "exact");
    }
    if (status != KVF_OK) {
        return status;
    }
    gate->link_bytes_per_s = o->link_bytes_per_s > 0 ? o->link_bytes_per_s : copy_rate();
    gate->flop_per_s = o->flop_per_s > 0 ? o->flop_per_s : kvf_x_product_rate(x);
    gate->recompute_flop_per_s = o->recompute_flop_per_s > 0 ? o->recompute_flop_per_s
                                                             : gate->flop_per_s;
    return gate->link_bytes_per_s > 0 ? KVF_OK : KVF_ERR_NO_MEMORY;
}

int kvf_x_gate_open(struct kvf_x *x, const struct kvf_x_gate_options *options,
                    struct kvf_x_gate **gate_out)
{
    struct kvf_x_gate *gate;
    kvf_log_fn log;
    void *arg;
    const char *fault;
    int status;

    if (x == NULL || options == NULL || options->struct_bytes != sizeof(*options) ||
        gate_out == NULL) {
        return KVF_ERR_INVALID;
    }
    log = options->log != NULL ? options->log : x->log;
    arg = options->log != NULL ? options->log_arg : x->log_arg;
    fault = fault_of(x, options);
    if (fault != NULL) {
        kvf_x_say(log, arg, "what pays: %s", fault);
        return KVF_ERR_INVALID;
    }
    gate = calloc(1, sizeof(*gate));
    if (gate == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    gate->log = log;
    gate->log_arg = arg;
    status = gate_init(gate, x, options);
    if (status != KVF_OK) {
        free(gate);
        return status;
    }
    *gate_out = gate;
    return KVF_OK;
}

struct kvf_x_gate *kvf_x_gate_close(struct kvf_x_gate *gate)
{
    free(gate);
    return NULL;
}

/* --- choose ----------------------------------------------------------------------------------- */

static void explain(const struct kvf_x_gate *gate, uint32_t n_tokens, bool is_kept,
                    struct kvf_x_choice *choice)
{
    static const char *const names[KVF_X_WAYS] = {"compute again", "K and V", "X"};

    snprintf(choice->why, sizeof(choice->why),
             "%u tokens: %s%s: X as %s %.4g ms, K and V as %s %.4g ms, computing %.4g ms, at %.3g "
             "GB/s and %.3g TFLOP/s",
             n_tokens, names[choice->way], is_kept ? " still (margin)" : "",
             gate->profiles[KVF_X_WAY_X]->name, choice->seconds[KVF_X_WAY_X] * 1e3,
             gate->profiles[KVF_X_WAY_KV]->name, choice->seconds[KVF_X_WAY_KV] * 1e3,
             choice->seconds[KVF_X_WAY_RECOMPUTE] * 1e3, gate->link_bytes_per_s * 1e-9,
             gate->flop_per_s * 1e-12);
}

int kvf_x_gate_choose(struct kvf_x_gate *gate, uint32_t n_tokens, struct kvf_x_choice *choice_out)
{
    uint8_t best = KVF_X_WAY_RECOMPUTE;
    uint8_t before;
    bool is_kept;

    if (gate == NULL || n_tokens == 0 || n_tokens > KVF_COST_TOKENS_MAX || choice_out == NULL ||
        choice_out->struct_bytes != sizeof(*choice_out)) {
        return KVF_ERR_INVALID;
    }
    *choice_out = (struct kvf_x_choice){.struct_bytes = sizeof(*choice_out),
                                        .link_bytes_per_s = gate->link_bytes_per_s,
                                        .flop_per_s = gate->flop_per_s};
    for (uint8_t way = 0; way < KVF_X_WAYS; way++) {
        choice_out->seconds[way] = seconds_of(gate, way, n_tokens);
        best = choice_out->seconds[way] < choice_out->seconds[best] ? way : best;
    }
    before = gate->way;
    is_kept = before != NO_WAY && before != best &&
              choice_out->seconds[before] <= choice_out->seconds[best] * (1 + gate->margin);
    choice_out->way = is_kept ? before : best;
    gate->way = choice_out->way;
    gate->choices[gate->way]++;
    memcpy(choice_out->choices, gate->choices, sizeof(choice_out->choices));
    explain(gate, n_tokens, is_kept, choice_out);
    if (gate->way != before && gate->log != NULL) {
        gate->log(gate->log_arg, 2, choice_out->why);
    }
    return KVF_OK;
}

int kvf_x_gate_note(struct kvf_x_gate *gate, uint64_t bytes, double seconds)
{
    double rate;

    if (gate == NULL || bytes == 0 || !(seconds > 0)) {
        return KVF_ERR_INVALID;
    }
    rate = (double)bytes / seconds;
    if (!(rate <= RATE_MAX)) {
        return KVF_ERR_INVALID;
    }
    gate->link_bytes_per_s += (rate - gate->link_bytes_per_s) / NOTES_WEIGHT;
    return KVF_OK;
}
