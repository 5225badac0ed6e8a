/* SPDX-License-Identifier: Apache-2.0
 *
 * cost.h: what it costs to fetch K and V, or X and rebuild them, beside computing a prompt again.
 *
 * With L layers, d = d_model, w = n_heads (dim_k + dim_v) elements of K and V, r the rank of
 * latents, q = n_query_heads, f = ffn_width, and t tokens:
 *
 *   stored      payload bytes of the codec's plan for chunks and tail       (kvf_codec_plan_*)
 *   fetch       stored / link
 *   rebuild     of X          2 t d w      a layer: one product with [W_K | W_V]
 *               of sums of X  2 t d (1 + w): decoded differences are added up first
 *               of latents    2 t r w      a layer: one product with M, where U M = [W_K | W_V]
 *               of sums of latents  2 t d (r + w): each layer's difference goes through U^T
 *   recompute   2 t (d (q dim_k + w) + q dim_v d + 3 d f) a layer, and attention, causal:
 *               t^2 q (dim_k + dim_v)
 *   total       fixed + (fetch + rebuild + (L - 1) max(fetch, rebuild)) / L: a layer is rebuilt
 *               while the next one is fetched
 *
 * Source: XQuant (arXiv:2508.10395), section on cost: 4 t d^2 a layer for X where w = 2 d, and
 * 8 t d (d / g) for sums of latents where r = w = 2 d / g; one product of all of K and V for
 * latents instead of the article's two. Rates are the caller's, as measured; nothing of the
 * arithmetic of decoding is counted: it is hidden behind the link.
 */
#ifndef KVF_CLIENT_COST_H
#define KVF_CLIENT_COST_H

#include "client/weights_file.h"
#include "codec/codec.h"

struct kvf_cost_rates {
    double link_bytes_per_s;
    double flop_per_s;
    double fixed_s; /* of a fetch, whatever its size */
};

struct kvf_cost {
    double bytes_a_token; /* of a full chunk; where is_bound, at most */
    double bytes;
    double fetch_s;
    double rebuild_s; /* 0 for K and V */
    double total_s;
    uint32_t chunk_tokens;
    uint32_t break_even_tokens; /* the fewest for which total is less than recompute; 0: none up to
                                   KVF_COST_TOKENS_MAX */
    bool is_bound;              /* the size depends on the data */
};

enum {
    KVF_COST_TOKENS_MAX = 1 << 24
};

/* The kind of state that a profile stores for a model: K and V, or X, or latents of X where X is
 * larger than K and V. KVF_KIND_BYTES: none. lossless profiles store K and V. */
uint8_t kvf_cost_kind(const struct kvf_weights_model *model, const struct kvf_profile *profile);

/* The plan of the largest chunk that fits a record. KVF_OK; KVF_ERR_UNSUPPORTED: the profile has no
 * form for the model. */
int kvf_cost_plan(const struct kvf_weights_model *model, const struct kvf_profile *profile,
                  struct kvf_codec_plan *plan);

/* bytes, fetch_s, rebuild_s and total_s of n_tokens, by the plan of model and profile. */
void kvf_cost_times(const struct kvf_weights_model *model, const struct kvf_profile *profile,
                    const struct kvf_codec_plan *plan, const struct kvf_cost_rates *rates,
                    uint32_t n_tokens, struct kvf_cost *cost);

/* Everything. KVF_OK; KVF_ERR_UNSUPPORTED: as of kvf_cost_plan. */
int kvf_cost_of(const struct kvf_weights_model *model, const struct kvf_profile *profile,
                const struct kvf_cost_rates *rates, uint32_t n_tokens, struct kvf_cost *cost_out);

/* Seconds to compute K and V of n_tokens again, with all that comes before them. */
double kvf_cost_recompute_s(const struct kvf_weights_model *model,
                            const struct kvf_cost_rates *rates, uint32_t n_tokens);

#endif /* KVF_CLIENT_COST_H */
