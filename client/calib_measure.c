/* SPDX-License-Identifier: Apache-2.0
 *
 * calib_measure.c: see calib_measure.h.
 */
#include "client/calib_measure.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    PAIRS = 4, /* keys that each query is paired with */
    THREADS_MAX = 64,
};

const uint8_t kvf_rung_bits[KVF_RUNGS] = {16, 8, 6, 5, 4, 3};

struct kvf_profile_table *kvf_calib_table_create(const struct kvf_capture *capture,
                                                 enum kvf_capture_kind k_kind, uint32_t n_layers,
                                                 uint8_t sink_tokens)
{
    struct kvf_profile_table *table = kvf_profile_table_create();

    if (table == NULL) {
        return NULL;
    }
    snprintf(table->name, sizeof(table->name), "trial");
    memset(table->weights_digest, 1, sizeof(table->weights_digest));
    table->workloads = KVF_WORKLOAD_OTHER;
    table->n_layers = (uint16_t)n_layers;
    table->n_heads = (uint16_t)capture->tensors[KVF_CAPTURE_K_POST].n_heads;
    table->dim_k = (uint16_t)capture->tensors[KVF_CAPTURE_K_POST].dim;
    table->dim_v = (uint16_t)capture->tensors[KVF_CAPTURE_V].dim;
    table->rope_state = k_kind == KVF_CAPTURE_K_PRE ? KVF_ROPE_PRE : KVF_ROPE_POST;
    table->sink_tokens = sink_tokens;
    table->n_kinds = 1;
    return table;
}

double kvf_tensor_bits(const struct kvf_codec_tensor *tensor, uint32_t chunk_tokens)
{
    struct kvf_codec_sizes sizes;
    double values = (double)tensor->n_heads * tensor->dim * chunk_tokens;

    tensor->ops->sizes(tensor, chunk_tokens, &sizes);
    return 8.0 * (double)(sizes.mean_bytes + sizes.meta_bytes + sizes.codes_bytes) / values;
}

/* --- one layer -------------------------------------------------------------------------------- */

static int take_q_norms(struct kvf_layer_data *data)
{
    const struct kvf_capture *capture = data->capture;
    const struct kvf_capture_tensor *q = &capture->tensors[KVF_CAPTURE_Q];
    const struct kvf_capture_tensor *norms = &capture->tensors[KVF_CAPTURE_Q_NORM];
    bool has_q = q->n_heads != 0 && q->layers[data->layer] != NULL;
    bool has_norms = norms->n_heads != 0 && norms->layers[data->layer] != NULL;
    size_t n_rows = capture->n_q_rows;
    float *vectors;

    if (!has_q && !has_norms) {
        return KVF_OK;
    }
    data->n_q_heads = has_q ? q->n_heads : norms->n_heads;
    data->q_norms = calloc(data->n_q_heads * n_rows + 1, sizeof(float));
    vectors = calloc(n_rows * (has_q ? q->dim : 1) + 1, sizeof(float));
    if (data->q_norms == NULL || vectors == NULL) {
        free(vectors);
        return KVF_ERR_NO_MEMORY;
    }
    for (uint32_t head = 0; head < data->n_q_heads; head++) {
        kvf_capture_head(capture, has_q ? KVF_CAPTURE_Q : KVF_CAPTURE_Q_NORM, data->layer, head,
                         vectors);
        kvf_norms(vectors, n_rows, has_q ? q->dim : 1, data->q_norms + head * n_rows);
    }
    free(vectors);
    return KVF_OK;
}

int kvf_layer_data_init(struct kvf_layer_data *data, const struct kvf_capture *capture,
                        uint32_t layer, uint32_t n_rows_max)
{
    const struct kvf_capture_tensor *k = &capture->tensors[KVF_CAPTURE_K_POST];
    size_t k_values = (size_t)k->n_heads * capture->n_tokens * k->dim;
    size_t v_values = (size_t)k->n_heads * capture->n_tokens * capture->tensors[KVF_CAPTURE_V].dim;
    int status = KVF_ERR_NO_MEMORY;

    *data = (struct kvf_layer_data){.capture = capture, .layer = layer};
    data->k = calloc(k_values, sizeof(float));
    data->v = calloc(v_values, sizeof(float));
    if (data->k != NULL && data->v != NULL) {
        status = take_q_norms(data);
    }
    if (status == KVF_OK) {
        data->has_attention = n_rows_max != 0 && capture->tensors[KVF_CAPTURE_Q].n_heads != 0;
        /* without queries its K and V are still what errors are measured against */
        status = kvf_attention_init(&data->attention, capture, layer,
                                    data->has_attention ? n_rows_max : 0);
    }
    if (status != KVF_OK) {
        kvf_layer_data_fini(data);
    }
    return status;
}

void kvf_layer_data_fini(struct kvf_layer_data *data)
{
    kvf_attention_fini(&data->attention);
    free(data->q_norms);
    free(data->k);
    free(data->v);
    *data = (struct kvf_layer_data){0};
}

void kvf_layer_data_take(struct kvf_layer_data *data, const struct kvf_roundtrip *trip,
                         enum kvf_capture_kind k_kind, uint32_t trip_layer)
{
    const struct kvf_attention *a = &data->attention;
    size_t n_tokens = a->n_tokens;

    for (uint32_t head = 0; head < a->n_heads; head++) {
        float *k = data->k + head * n_tokens * a->dim_k;

        kvf_roundtrip_head(trip, false, trip_layer, head, k);
        kvf_roundtrip_head(trip, true, trip_layer, head, data->v + head * n_tokens * a->dim_v);
        if (k_kind == KVF_CAPTURE_K_PRE) {
            kvf_rope_apply(k, n_tokens, a->dim_k, data->capture->first_position,
                           data->capture->rope_theta);
        }
    }
}

/* --- logit noise ------------------------------------------------------------------------------ */

/* Pairs of one head of one capture: at most so many. */
static size_t pairs_max(const struct kvf_layer_data *data)
{
    uint32_t share = data->n_q_heads / data->attention.n_heads;

    return data->n_q_heads != 0 ? (size_t)share * data->capture->n_q_rows * PAIRS
                                : (size_t)data->attention.n_tokens * PAIRS;
}

/* sigma of one head's queries with keys, some of each, wherever they stand: that a query sees only
 * keys before it does not make their errors differ. */
static size_t add_pairs(const struct kvf_layer_data *data, uint32_t head, uint32_t tokens_from,
                        const float *error_norms, const float *k_norms, float *out)
{
    const struct kvf_attention *a = &data->attention;
    uint32_t share = data->n_q_heads / a->n_heads;
    bool has_q = data->n_q_heads != 0;
    uint32_t n_rows = has_q ? data->capture->n_q_rows : a->n_tokens;
    uint32_t n_keys = a->n_tokens - tokens_from;
    size_t n = 0;

    for (uint32_t s = 0; s < (has_q ? share : 1); s++) {
        const float *norms = has_q ? data->q_norms + ((size_t)head * share + s) * n_rows : k_norms;

        for (uint32_t row = 0; row < n_rows; row++) {
            uint32_t token = has_q ? data->capture->q_rows[row] : row;

            for (uint32_t pair = 0; pair < PAIRS; pair++) {
                size_t key = (token + (size_t)pair * n_keys / PAIRS) % n_keys;

                out[n++] = (float)kvf_logit_sigma(norms[row], error_norms[tokens_from + key],
                                                  a->dim_k);
            }
        }
    }
    return n;
}

int kvf_layer_noise(struct kvf_layer_data *const *data, uint32_t n, uint32_t head,
                    uint32_t tokens_from, struct kvf_noise *noise_out)
{
    size_t room = 0;
    size_t n_tokens_max = 0;
    size_t n_sigmas = 0;
    float *sigmas;
    float *norms;

    for (uint32_t i = 0; i < n; i++) {
        size_t n_tokens = data[i]->attention.n_tokens;

        room += pairs_max(data[i]);
        n_tokens_max = n_tokens > n_tokens_max ? n_tokens : n_tokens_max;
    }
    sigmas = calloc(room + 1, sizeof(*sigmas));
    norms = calloc(2 * n_tokens_max, sizeof(*norms));
    if (sigmas == NULL || norms == NULL) {
        free(sigmas);
        free(norms);
        return KVF_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < n; i++) {
        const struct kvf_attention *a = &data[i]->attention;
        size_t at = (size_t)head * a->n_tokens * a->dim_k;

        kvf_error_norms(a->k + at, data[i]->k + at, a->n_tokens, a->dim_k, norms);
        kvf_norms(a->k + at, a->n_tokens, a->dim_k, norms + n_tokens_max);
        n_sigmas += add_pairs(data[i], head, tokens_from, norms, norms + n_tokens_max,
                              sigmas + n_sigmas);
    }
    noise_out->median = kvf_quantile(sigmas, n_sigmas, 0.5);
    noise_out->p99 = kvf_quantile(sigmas, n_sigmas, 0.99);
    free(sigmas);
    free(norms);
    return KVF_OK;
}

/* --- a layer with one form of each ------------------------------------------------------------ */

static int measure_errors(struct kvf_layer_data *const *data, uint32_t n,
                          struct kvf_measure *measure)
{
    int status = KVF_OK;

    for (uint32_t head = 0; status == KVF_OK && head < data[0]->attention.n_heads; head++) {
        struct kvf_noise noise;

        for (uint32_t i = 0; i < n; i++) {
            const struct kvf_attention *a = &data[i]->attention;
            size_t k_at = (size_t)head * a->n_tokens * a->dim_k;
            size_t v_at = (size_t)head * a->n_tokens * a->dim_v;

            kvf_error_sums_add(&measure->k, a->k + k_at, data[i]->k + k_at, a->n_tokens, a->dim_k);
            kvf_error_sums_add(&measure->v, a->v + v_at, data[i]->v + v_at, a->n_tokens, a->dim_v);
        }
        status = kvf_layer_noise(data, n, head, 0, &noise);
        if (status == KVF_OK) {
            measure->noise.median = fmax(measure->noise.median, noise.median);
            measure->noise.p99 = fmax(measure->noise.p99, noise.p99);
        }
    }
    return status;
}

int kvf_measure_layer(struct kvf_layer_data *const *data, uint32_t n, uint32_t parts,
                      struct kvf_measure *measure_out)
{
    int status = KVF_OK;

    *measure_out = (struct kvf_measure){0};
    if ((parts & KVF_MEASURE_ERRORS) != 0) {
        status = measure_errors(data, n, measure_out);
    }
    for (uint32_t i = 0; status == KVF_OK && i < n; i++) {
        struct kvf_attention *a = &data[i]->attention;

        if (!data[i]->has_attention) {
            continue;
        }
        if ((parts & KVF_MEASURE_APART) != 0) {
            kvf_attention_compare(a, data[i]->k, NULL, &measure_out->k_only);
            kvf_attention_compare(a, NULL, data[i]->v, &measure_out->v_only);
        }
        if ((parts & KVF_MEASURE_BOTH) != 0) {
            kvf_attention_compare(a, data[i]->k, data[i]->v, &measure_out->both);
        }
    }
    return status;
}

/* --- threads ---------------------------------------------------------------------------------- */

struct parallel {
    uint32_t n;
    int (*fn)(void *arg, uint32_t i);
    void *arg;
    atomic_uint next;
    atomic_int status; /* the first that is not KVF_OK */
};

static void *run_items(void *arg)
{
    struct parallel *parallel = arg;

    for (;;) {
        uint32_t i = atomic_fetch_add(&parallel->next, 1);
        int expected = KVF_OK;
        int status;

        if (i >= parallel->n) {
            return NULL;
        }
        status = parallel->fn(parallel->arg, i);
        if (status != KVF_OK) {
            atomic_compare_exchange_strong(&parallel->status, &expected, status);
        }
    }
}

int kvf_run_parallel(uint32_t n, uint32_t n_threads, int (*fn)(void *arg, uint32_t i), void *arg)
{
    struct parallel parallel = {.n = n, .fn = fn, .arg = arg};
    pthread_t threads[THREADS_MAX];
    uint32_t n_started = 0;

    /* the caller's thread is one of them: all is done if none can be started */
    while (n_started + 1 < n_threads && n_started < THREADS_MAX && n_started + 1 < n &&
           pthread_create(&threads[n_started], NULL, run_items, &parallel) == 0) {
        n_started++;
    }
    run_items(&parallel);
    for (uint32_t i = 0; i < n_started; i++) {
        pthread_join(threads[i], NULL);
    }
    return atomic_load(&parallel.status);
}
