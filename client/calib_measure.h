/* SPDX-License-Identifier: Apache-2.0
 *
 * calib_measure.h: what a way of coding does to one layer: errors of K and V, logit noise, and what
 * attention makes of it.
 *
 * A form is one way to code K or V: a codec, a width and its options. Each figure is that of
 * decoded values, which have gone through blocks of the library; nothing is a model of a codec.
 */
#ifndef KVF_CLIENT_CALIB_MEASURE_H
#define KVF_CLIENT_CALIB_MEASURE_H

#include "client/capture.h"
#include "client/kv_attention.h"
#include "client/kv_roundtrip.h"
#include "client/kv_stats.h"
#include "codec/profile_table.h"

enum kvf_calib_limits {
    KVF_FORMS_MAX = 32,
    KVF_RUNGS = 6, /* widths that a search goes down */
    KVF_FORM_NAME_BYTES = 24,
};

/* 16 (codec exact), 8, 6, 5, 4, 3. */
extern const uint8_t kvf_rung_bits[KVF_RUNGS];

/* One way to code a tensor. */
struct kvf_form {
    char name[KVF_FORM_NAME_BYTES]; /* "saw4+c" */
    uint8_t rung;                   /* index of its width in kvf_rung_bits */
    struct kvf_profile_tensor settings;
};

/* A table for n_layers layers of a capture, of one kind that is still empty: neither it nor arrays
 * nor digests are set. NULL: out of memory. */
struct kvf_profile_table *kvf_calib_table_create(const struct kvf_capture *capture,
                                                 enum kvf_capture_kind k_kind, uint32_t n_layers,
                                                 uint8_t sink_tokens);

/* Bits a value that a tensor takes in full chunks of a plan, metadata counted. */
double kvf_tensor_bits(const struct kvf_codec_tensor *tensor, uint32_t chunk_tokens);

/* One layer of one capture, as fp32. For one thread at a time. */
struct kvf_layer_data {
    const struct kvf_capture *capture;
    uint32_t layer;
    bool has_attention;
    struct kvf_attention attention;
    float *q_norms;     /* [q head][n_q_rows] */
    uint32_t n_q_heads; /* 0: the capture has neither Q nor norms: those of K are taken */
    float *k;           /* what came back: [head][token][dim], after RoPE */
    float *v;
};

/* n_rows_max 0: without attention. KVF_OK; KVF_ERR_NO_MEMORY. */
int kvf_layer_data_init(struct kvf_layer_data *data, const struct kvf_capture *capture,
                        uint32_t layer, uint32_t n_rows_max);
void kvf_layer_data_fini(struct kvf_layer_data *data);

/* Fill data->k and data->v from a round trip, of which it is layer trip_layer; K that was coded
 * before RoPE is turned. */
void kvf_layer_data_take(struct kvf_layer_data *data, const struct kvf_roundtrip *trip,
                         enum kvf_capture_kind k_kind, uint32_t trip_layer);

/* Logit noise over many pairs of a query and a key. */
struct kvf_noise {
    double median;
    double p99;
};

/* The noise of one head of K, over captures of one layer whose data have been taken. tokens_from:
 * keys from this token on. KVF_OK; KVF_ERR_NO_MEMORY. */
int kvf_layer_noise(struct kvf_layer_data *const *data, uint32_t n, uint32_t head,
                    uint32_t tokens_from, struct kvf_noise *noise_out);

/* What one K form and one V form do to one layer, over all captures of a set. */
struct kvf_measure {
    struct kvf_error_sums k; /* all heads */
    struct kvf_error_sums v;
    struct kvf_noise noise;            /* of the worst head */
    struct kvf_attention_error k_only; /* V original */
    struct kvf_attention_error v_only; /* K original */
    struct kvf_attention_error both;
};

enum kvf_measure_parts {
    KVF_MEASURE_ERRORS = 1 << 0, /* k, v, noise */
    KVF_MEASURE_APART = 1 << 1,  /* k_only, v_only */
    KVF_MEASURE_BOTH = 1 << 2,   /* both */
};

/* Measure what data holds after kvf_layer_data_take. KVF_OK; KVF_ERR_NO_MEMORY. */
int kvf_measure_layer(struct kvf_layer_data *const *data, uint32_t n, uint32_t parts,
                      struct kvf_measure *measure_out);

/* Run fn(arg, i) for i in 0..n-1 on threads. The first status that is not KVF_OK; the others still
 * run. */
int kvf_run_parallel(uint32_t n, uint32_t n_threads, int (*fn)(void *arg, uint32_t i), void *arg);

#endif /* KVF_CLIENT_CALIB_MEASURE_H */
