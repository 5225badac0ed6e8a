/* SPDX-License-Identifier: Apache-2.0
 *
 * kv_stats.h: figures of K, V and their errors, on which `kvferry inspect` and `kvferry calibrate`
 * decide. Double precision, no state, any thread.
 */
#ifndef KVF_CLIENT_KV_STATS_H
#define KVF_CLIENT_KV_STATS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Fourth moment over the squared second one, both about zero: 3 for Gaussian data. 0 for zeroes. */
double kvf_kurtosis(const float *values, size_t n);

/* Rotate vectors of dim (1..KVF_CODEC_GROUP_MAX elements a group, wider ones group by group) by the
 * Hadamard step of the codecs, scaled so that norms stay. In place. */
void kvf_rotate_vectors(float *vectors, size_t n_vectors, uint32_t dim);

/* RoPE over the pairs (i, i + dim / 2): vector t is turned by (first_position + t) theta^(-2i/dim).
 * In place. */
void kvf_rope_apply(float *vectors, size_t n_vectors, uint32_t dim, uint32_t first_position,
                    double theta);

/* ||vector|| of each vector; and of the differences of two lists of them. */
void kvf_norms(const float *vectors, size_t n_vectors, uint32_t dim, float *norms_out);
void kvf_error_norms(const float *vectors, const float *others, size_t n_vectors, uint32_t dim,
                     float *norms_out);

/* The value below which the share (0..1) of values lies, by nearest rank. Sorts values. 0 for
 * none. */
double kvf_quantile(float *values, size_t n, double share);

/* How far decoded vectors are from the originals. Begin with zeroes; several heads may be added. */
struct kvf_error_sums {
    double dot;      /* x y */
    double power2;   /* x^2 */
    double decoded2; /* y^2 */
    double error2;   /* (x - y)^2 */
    double centred2; /* (x - mean of its channel)^2: what softmax sees of K */
    uint64_t n;      /* values */
};

void kvf_error_sums_add(struct kvf_error_sums *sums, const float *vectors, const float *others,
                        size_t n_vectors, uint32_t dim);
void kvf_error_sums_join(struct kvf_error_sums *sums, const struct kvf_error_sums *more);

/* Mean squared error of a value; that error over the power of the original, over its power about
 * the channels' means; and the cosine. 0, and 1 for the cosine, where there is no power. */
double kvf_error_absolute(const struct kvf_error_sums *sums);
double kvf_error_relative(const struct kvf_error_sums *sums);
double kvf_error_centred(const struct kvf_error_sums *sums);
double kvf_error_cosine(const struct kvf_error_sums *sums);

/* By how much an error of norm error_norm in a key moves the score of a query, if the error has no
 * preferred direction: one standard deviation, after the scale 1 / sqrt(dim). */
double kvf_logit_sigma(double q_norm, double error_norm, uint32_t dim);

/* What to do with a layer by the ratio of the norms of K and V alone: for captures without Q. */
enum kvf_ratio_class {
    KVF_RATIO_UNIFORM = 0, /* below 10: K and V alike */
    KVF_RATIO_K4V2 = 1,    /* 10 to 60: K needs more than V; K 4 bits at least */
    KVF_RATIO_MIXED = 2,   /* above: K needs 8 bits, or its outliers apart */
};

enum kvf_ratio_class kvf_ratio_class(double k_norm, double v_norm);

/* Bits that the class suggests for K and V. */
void kvf_ratio_bits(enum kvf_ratio_class ratio_class, uint32_t *k_bits_out, uint32_t *v_bits_out);

#endif /* KVF_CLIENT_KV_STATS_H */
