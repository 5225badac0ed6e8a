/* SPDX-License-Identifier: Apache-2.0
 *
 * cost.c: the formulas of cost.h.
 */
#include "client/cost.h"

static double kv_width(const struct kvf_weights_model *m)
{
    return (double)m->n_heads * (m->dim_k + m->dim_v);
}

uint8_t kvf_cost_kind(const struct kvf_weights_model *model, const struct kvf_profile *profile)
{
    uint8_t x_kind = model->d_model > kv_width(model) ? KVF_KIND_XG : KVF_KIND_X;

    if (profile->opaque) {
        return KVF_KIND_BYTES;
    }
    if (kvf_profile_takes(profile, KVF_KIND_KV)) {
        return KVF_KIND_KV;
    }
    return kvf_profile_takes(profile, x_kind) ? x_kind : KVF_KIND_BYTES;
}

int kvf_cost_plan(const struct kvf_weights_model *model, const struct kvf_profile *profile,
                  struct kvf_codec_plan *plan)
{
    uint8_t kind = kvf_cost_kind(model, profile);
    struct kvf_geometry geometry = {
        .struct_bytes = sizeof(geometry),
        .kind = kind,
        .dtype = KVF_DTYPE_BF16,
        .rope_state = KVF_ROPE_POST,
        .n_layers = (uint16_t)model->n_layers,
        .n_heads = (uint16_t)model->n_heads,
        .dim_k = (uint16_t)model->dim_k,
        .dim_v = (uint16_t)model->dim_v,
        .chunk_tokens = KVF_CHUNK_TOKENS_MAX,
    };
    int status = KVF_OK;

    if (kind == KVF_KIND_BYTES) {
        return KVF_ERR_UNSUPPORTED;
    }
    if (kind != KVF_KIND_KV) {
        uint32_t width = kind == KVF_KIND_X ? model->d_model : (uint32_t)kv_width(model);

        status = kvf_x_geometry(kind, width, &geometry);
    }
    if (status == KVF_OK) {
        uint32_t fits = kvf_codec_fitting_tokens(&geometry, profile->name);

        geometry.chunk_tokens = (uint16_t)(fits < KVF_CHUNK_TOKENS_MAX ? fits
                                                                       : KVF_CHUNK_TOKENS_MAX);
        status = kvf_codec_plan_init(plan, &geometry, profile->name);
    }
    return status == KVF_OK ? KVF_OK : KVF_ERR_UNSUPPORTED;
}

static double stored_bytes(const struct kvf_codec_plan *plan, uint32_t n_tokens)
{
    uint32_t chunk = plan->geometry.chunk_tokens;

    return (double)(n_tokens / chunk) * (double)kvf_codec_plan_payload_bytes(plan, chunk) +
           (double)kvf_codec_plan_payload_bytes(plan, n_tokens % chunk);
}

/* Of one token, all layers. */
static double rebuild_flop(const struct kvf_weights_model *m, const struct kvf_profile *profile)
{
    double width = kv_width(m);
    bool is_sum = profile->first_layers != 0;
    double layer;

    switch (kvf_cost_kind(m, profile)) {
    case KVF_KIND_X:
        layer = 2.0 * m->d_model * (width + (is_sum ? 1 : 0));
        break;
    case KVF_KIND_XG: /* of full rank: as many elements as K and V have */
        layer = is_sum ? 2.0 * m->d_model * (width + width) : 2.0 * width * width;
        break;
    default:
        layer = 0;
    }
    return layer * m->n_layers;
}

double kvf_cost_recompute_s(const struct kvf_weights_model *m, const struct kvf_cost_rates *rates,
                            uint32_t n_tokens)
{
    double q_width = (double)m->n_query_heads * m->dim_k;
    double o_width = (double)m->n_query_heads * m->dim_v;
    double linear = 2.0 * ((double)m->d_model * (q_width + kv_width(m)) + o_width * m->d_model +
                           3.0 * m->d_model * m->ffn_width);
    double attention = (double)n_tokens * (q_width + o_width);

    return m->n_layers * n_tokens * (linear + attention) / rates->flop_per_s;
}

void kvf_cost_times(const struct kvf_weights_model *m, const struct kvf_profile *profile,
                    const struct kvf_codec_plan *plan, const struct kvf_cost_rates *rates,
                    uint32_t n_tokens, struct kvf_cost *cost)
{
    double layers = m->n_layers;
    double slower_s;

    cost->bytes = stored_bytes(plan, n_tokens);
    cost->fetch_s = cost->bytes / rates->link_bytes_per_s;
    cost->rebuild_s = n_tokens * rebuild_flop(m, profile) / rates->flop_per_s;
    slower_s = cost->fetch_s > cost->rebuild_s ? cost->fetch_s : cost->rebuild_s;
    cost->total_s = rates->fixed_s +
                    (cost->fetch_s + cost->rebuild_s + (layers - 1) * slower_s) / layers;
}

int kvf_cost_of(const struct kvf_weights_model *model, const struct kvf_profile *profile,
                const struct kvf_cost_rates *rates, uint32_t n_tokens, struct kvf_cost *cost_out)
{
    struct kvf_codec_plan plan;
    struct kvf_cost cost = {0};
    struct kvf_cost at;
    uint32_t loses = 0; /* tokens for which computing again is as fast, or faster */
    uint32_t wins = 1;
    int status = kvf_cost_plan(model, profile, &plan);

    if (status != KVF_OK) {
        return status;
    }
    kvf_cost_times(model, profile, &plan, rates, n_tokens, &cost);
    cost.chunk_tokens = plan.geometry.chunk_tokens;
    cost.is_bound = !kvf_codec_plan_is_fixed(&plan);
    cost.bytes_a_token = stored_bytes(&plan, cost.chunk_tokens) / cost.chunk_tokens;
    for (; wins <= KVF_COST_TOKENS_MAX; wins *= 2) {
        kvf_cost_times(model, profile, &plan, rates, wins, &at);
        if (at.total_s < kvf_cost_recompute_s(model, rates, wins)) {
            break;
        }
        loses = wins;
    }
    while (wins <= KVF_COST_TOKENS_MAX && wins - loses > 1) {
        uint32_t middle = loses + (wins - loses) / 2;

        kvf_cost_times(model, profile, &plan, rates, middle, &at);
        if (at.total_s < kvf_cost_recompute_s(model, rates, middle)) {
            wins = middle;
        } else {
            loses = middle;
        }
    }
    cost.break_even_tokens = wins <= KVF_COST_TOKENS_MAX ? wins : 0;
    *cost_out = cost;
    return KVF_OK;
}
