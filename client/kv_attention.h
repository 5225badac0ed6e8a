/* SPDX-License-Identifier: Apache-2.0
 *
 * kv_attention.h: what attention makes of decoded K and V, beside the originals: one layer of a
 * capture, causal softmax in fp32 over its tokens, for the queries that it has. Query head h reads
 * K/V head h / (query heads / K/V heads); scores are divided by sqrt(dim).
 */
#ifndef KVF_CLIENT_KV_ATTENTION_H
#define KVF_CLIENT_KV_ATTENTION_H

#include "client/capture.h"

/* One layer with the originals, and what attention makes of them. For one thread at a time. */
struct kvf_attention {
    uint32_t n_heads; /* of K and V */
    uint32_t n_q_heads;
    uint32_t n_tokens;
    uint32_t dim_k;
    uint32_t dim_v;
    uint32_t n_rows; /* queries of a head */
    uint32_t *rows;  /* their tokens */
    float *q;        /* [q head][row][dim_k], scaled */
    float *k;        /* [head][token][dim_k], after RoPE */
    float *v;        /* [head][token][dim_v] */
    float *weights;  /* [q head][row][token] */
    float *outputs;  /* [q head][row][dim_v] */
    uint32_t *tops;  /* [q head][row]: the token with the largest weight */
    float *scratch;
};

/* Up to n_rows_max queries a head, evenly chosen from those that the capture has. KVF_OK;
 * KVF_ERR_NO_MEMORY. The capture must have Q. */
int kvf_attention_init(struct kvf_attention *attention, const struct kvf_capture *capture,
                       uint32_t layer, uint32_t n_rows_max);
void kvf_attention_fini(struct kvf_attention *attention);

/* Sums over query heads and rows; begin with zeroes. */
struct kvf_attention_error {
    double error2;      /* ||output - its original||^2 */
    double power2;      /* ||original output||^2 */
    double kl;          /* of the weights from the original ones, nats; sum over rows */
    double worst_share; /* largest error2 / power2 of one query head of one call */
    uint64_t n_same_top;
    uint64_t n_rows;
};

/* Compare with other K ([head][token][dim_k], after RoPE) and V; NULL: the original. */
void kvf_attention_compare(struct kvf_attention *attention, const float *k, const float *v,
                           struct kvf_attention_error *error);

/* sqrt(error2 / power2): root mean square error of the output, relative. */
double kvf_attention_output_error(const struct kvf_attention_error *error);

/* Share of rows whose largest weight stays where it was; 1 of none. */
double kvf_attention_top1(const struct kvf_attention_error *error);

#endif /* KVF_CLIENT_KV_ATTENTION_H */
