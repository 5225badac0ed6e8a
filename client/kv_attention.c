/* SPDX-License-Identifier: Apache-2.0
 *
 * kv_attention.c: see kv_attention.h. Loops run over tokens or channels in the inside, so that a
 * compiler may vectorize them without reordering sums; a few rows share each pass over K and V.
 */
#include "client/kv_attention.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    ROWS_AT_ONCE = 4
};

/* Query rows [row, row + n) of one head. */
struct batch {
    uint32_t head;
    uint32_t row;
    uint32_t n;
    uint32_t n_keys; /* of the row that sees most */
};

int kvf_attention_init(struct kvf_attention *attention, const struct kvf_capture *capture,
                       uint32_t layer, uint32_t n_rows_max)
{
    const struct kvf_capture_tensor *k = &capture->tensors[KVF_CAPTURE_K_POST];
    uint32_t n_rows = capture->n_q_rows < n_rows_max ? capture->n_q_rows : n_rows_max;
    uint32_t n_q_heads = capture->tensors[KVF_CAPTURE_Q].n_heads;
    uint32_t dim_v = capture->tensors[KVF_CAPTURE_V].dim;
    size_t n_tokens = capture->n_tokens;
    struct kvf_attention *a = attention;
    float *all;

    *a = (struct kvf_attention){
        .n_heads = k->n_heads,
        .n_q_heads = n_q_heads,
        .n_tokens = capture->n_tokens,
        .dim_k = k->dim,
        .dim_v = dim_v,
        .n_rows = n_rows,
    };
    a->rows = calloc(n_rows + 1, sizeof(*a->rows));
    a->q = calloc((size_t)n_q_heads * n_rows * k->dim + 1, sizeof(float));
    a->k = calloc(k->n_heads * n_tokens * k->dim, sizeof(float));
    a->v = calloc(k->n_heads * n_tokens * dim_v, sizeof(float));
    a->weights = calloc(n_q_heads * n_rows * n_tokens + 1, sizeof(float));
    a->outputs = calloc((size_t)n_q_heads * n_rows * dim_v + 1, sizeof(float));
    a->tops = calloc((size_t)n_q_heads * n_rows + 1, sizeof(*a->tops));
    a->scratch = calloc(n_tokens * k->dim + ROWS_AT_ONCE * (n_tokens + dim_v), sizeof(float));
    all = calloc((size_t)capture->n_q_rows * k->dim + 1, sizeof(float));
    if (a->rows == NULL || a->q == NULL || a->k == NULL || a->v == NULL || a->weights == NULL ||
        a->outputs == NULL || a->tops == NULL || a->scratch == NULL || all == NULL) {
        free(all);
        kvf_attention_fini(a);
        return KVF_ERR_NO_MEMORY;
    }
    for (uint32_t head = 0; head < k->n_heads; head++) {
        kvf_capture_head(capture, KVF_CAPTURE_K_POST, layer, head, a->k + head * n_tokens * k->dim);
        kvf_capture_head(capture, KVF_CAPTURE_V, layer, head, a->v + head * n_tokens * dim_v);
    }
    for (uint32_t head = 0; head < n_q_heads; head++) {
        kvf_capture_head(capture, KVF_CAPTURE_Q, layer, head, all);
        for (uint32_t row = 0; row < n_rows; row++) {
            /* the last of each share: late queries see most */
            uint32_t from = (uint32_t)((row + 1ULL) * capture->n_q_rows / n_rows) - 1;
            float *to = a->q + ((size_t)head * n_rows + row) * k->dim;

            a->rows[row] = capture->q_rows[from];
            for (uint32_t i = 0; i < k->dim; i++) {
                to[i] = all[(size_t)from * k->dim + i] / sqrtf((float)k->dim);
            }
        }
    }
    free(all);
    kvf_attention_compare(a, NULL, NULL, NULL);
    return KVF_OK;
}

void kvf_attention_fini(struct kvf_attention *attention)
{
    free(attention->rows);
    free(attention->q);
    free(attention->k);
    free(attention->v);
    free(attention->weights);
    free(attention->outputs);
    free(attention->tops);
    free(attention->scratch);
    *attention = (struct kvf_attention){0};
}

/* scores[row][token] = q k. turned is K of the head as [dim][token]. */
static void score(const struct kvf_attention *a, const struct batch *batch, const float *turned,
                  float *scores)
{
    size_t n_tokens = a->n_tokens;

    memset(scores, 0, batch->n * n_tokens * sizeof(*scores));
    for (uint32_t i = 0; i < a->dim_k; i++) {
        const float *key = turned + i * n_tokens;

        for (uint32_t r = 0; r < batch->n; r++) {
            const float *q = a->q + ((size_t)batch->head * a->n_rows + batch->row + r) * a->dim_k;
            float *to = scores + r * n_tokens;
            float factor = q[i];

            for (uint32_t t = 0; t < batch->n_keys; t++) {
                to[t] += factor * key[t];
            }
        }
    }
}

/* Scores of the tokens that a row sees become weights, the others 0. Returns the token with the
 * largest one. */
static uint32_t softmax(float *scores, uint32_t n_seen, uint32_t n_keys)
{
    uint32_t top = 0;
    double sum = 0;
    float largest;
    float factor;

    for (uint32_t t = 1; t < n_seen; t++) {
        top = scores[t] > scores[top] ? t : top;
    }
    largest = scores[top];
    for (uint32_t t = 0; t < n_seen; t++) {
        scores[t] = expf(scores[t] - largest);
        sum += scores[t];
    }
    factor = (float)(1 / sum);
    for (uint32_t t = 0; t < n_seen; t++) {
        scores[t] *= factor;
    }
    memset(scores + n_seen, 0, (n_keys - n_seen) * sizeof(*scores));
    return top;
}

/* out[row][channel] = weights v. */
static void mix(const struct kvf_attention *a, const struct batch *batch, const float *weights,
                const float *v, float *out)
{
    memset(out, 0, (size_t)batch->n * a->dim_v * sizeof(*out));
    for (uint32_t t = 0; t < batch->n_keys; t++) {
        const float *value = v + (size_t)t * a->dim_v;

        for (uint32_t r = 0; r < batch->n; r++) {
            float *to = out + (size_t)r * a->dim_v;
            float weight = weights[r * (size_t)a->n_tokens + t];

            for (uint32_t i = 0; i < a->dim_v; i++) {
                to[i] += weight * value[i];
            }
        }
    }
}

/* Divergence of weights from the original ones over the tokens that a row sees. */
static double divergence(const float *original, const float *weights, uint32_t n_seen)
{
    double sum = 0;

    for (uint32_t t = 0; t < n_seen; t++) {
        if (original[t] > 0) {
            sum += original[t] * (log(original[t]) - log(fmaxf(weights[t], 1e-38f)));
        }
    }
    return sum > 0 ? sum : 0;
}

static void take_batch(struct kvf_attention *a, const struct batch *batch, const float *weights,
                       const float *outputs, const uint32_t *tops, bool has_own_weights,
                       struct kvf_attention_error *error)
{
    for (uint32_t r = 0; r < batch->n; r++) {
        size_t at = (size_t)batch->head * a->n_rows + batch->row + r;

        for (uint32_t i = 0; i < a->dim_v; i++) {
            double x = a->outputs[at * a->dim_v + i];
            double y = outputs[(size_t)r * a->dim_v + i];

            error->power2 += x * x;
            error->error2 += (x - y) * (x - y);
        }
        error->n_same_top += tops[r] == a->tops[at];
        error->n_rows++;
        if (has_own_weights) {
            error->kl += divergence(a->weights + at * a->n_tokens,
                                    weights + r * (size_t)a->n_tokens, a->rows[batch->row + r] + 1);
        }
    }
}

/* One batch: weights by turned, or the original ones, and what they make of v. error NULL: these
 * are the originals. */
static void run_batch(struct kvf_attention *a, const struct batch *batch, const float *turned,
                      const float *v, struct kvf_attention_error *error)
{
    float *scratch = a->scratch + (size_t)a->n_tokens * a->dim_k;
    size_t at = (size_t)batch->head * a->n_rows + batch->row;
    float *weights = error == NULL ? a->weights + at * a->n_tokens : scratch;
    float *outputs = error == NULL ? a->outputs + at * a->dim_v
                                   : scratch + (size_t)ROWS_AT_ONCE * a->n_tokens;
    uint32_t tops[ROWS_AT_ONCE];

    memcpy(tops, a->tops + at, batch->n * sizeof(*tops));
    if (turned != NULL) {
        score(a, batch, turned, weights);
        for (uint32_t r = 0; r < batch->n; r++) {
            tops[r] = softmax(weights + r * (size_t)a->n_tokens, a->rows[batch->row + r] + 1,
                              batch->n_keys);
        }
    } else {
        weights = a->weights + at * a->n_tokens;
    }
    mix(a, batch, weights, v, outputs);
    if (error == NULL) {
        memcpy(a->tops + at, tops, batch->n * sizeof(*tops));
    } else {
        take_batch(a, batch, weights, outputs, tops, turned != NULL, error);
    }
}

/* [token][dim] to [dim][token]. */
static void turn(const float *k, uint32_t n_tokens, uint32_t dim, float *out)
{
    for (uint32_t t = 0; t < n_tokens; t++) {
        for (uint32_t i = 0; i < dim; i++) {
            out[(size_t)i * n_tokens + t] = k[(size_t)t * dim + i];
        }
    }
}

void kvf_attention_compare(struct kvf_attention *attention, const float *k, const float *v,
                           struct kvf_attention_error *error)
{
    struct kvf_attention *a = attention;
    uint32_t share = a->n_q_heads / a->n_heads;
    bool has_own_k = k != NULL || error == NULL;

    k = k != NULL ? k : a->k;
    v = v != NULL ? v : a->v;
    for (uint32_t head = 0; head < a->n_q_heads; head++) {
        struct kvf_attention_error one = {0};
        size_t kv_tokens = (size_t)(head / share) * a->n_tokens;

        if (has_own_k && head % share == 0) {
            turn(k + kv_tokens * a->dim_k, a->n_tokens, a->dim_k, a->scratch);
        }
        for (uint32_t row = 0; row < a->n_rows; row += ROWS_AT_ONCE) {
            struct batch batch = {.head = head, .row = row};

            batch.n = a->n_rows - row < ROWS_AT_ONCE ? a->n_rows - row : ROWS_AT_ONCE;
            batch.n_keys = a->rows[row + batch.n - 1] + 1;
            run_batch(a, &batch, has_own_k ? a->scratch : NULL, v + kv_tokens * a->dim_v,
                      error != NULL ? &one : NULL);
        }
        if (error != NULL) {
            error->error2 += one.error2;
            error->power2 += one.power2;
            error->kl += one.kl;
            error->n_same_top += one.n_same_top;
            error->n_rows += one.n_rows;
            error->worst_share = one.power2 > 0 ? fmax(error->worst_share, one.error2 / one.power2)
                                                : error->worst_share;
        }
    }
}

double kvf_attention_output_error(const struct kvf_attention_error *error)
{
    return error->power2 > 0 ? sqrt(error->error2 / error->power2) : 0;
}

double kvf_attention_top1(const struct kvf_attention_error *error)
{
    return error->n_rows > 0 ? (double)error->n_same_top / (double)error->n_rows : 1;
}
