/* SPDX-License-Identifier: Apache-2.0
 *
 * calib_search.h: the decisions of `kvferry calibrate`, on figures alone: no captures, no codecs.
 */
#ifndef KVF_CLIENT_CALIB_SEARCH_H
#define KVF_CLIENT_CALIB_SEARCH_H

#include "client/calib_measure.h"

/* What a layer may lose at most. docs/calibration.md says where the defaults are from. */
struct kvf_thresholds {
    double sigma_median; /* logit noise of the worst head */
    double sigma_p99;
    double output_error; /* of attention, root mean square, relative */
    double top1;         /* share of queries whose largest weight stays, at least */
};

#define KVF_DEFAULT_SIGMA_MEDIAN 0.5
#define KVF_DEFAULT_SIGMA_P99    1.0
#define KVF_DEFAULT_OUTPUT_ERROR 0.06
#define KVF_DEFAULT_TOP1         0.90

/* What a layer failed by: bits. */
enum kvf_failing {
    KVF_FAILS_SIGMA = 1 << 0,  /* K */
    KVF_FAILS_TOP1 = 1 << 1,   /* K */
    KVF_FAILS_OUTPUT = 1 << 2, /* K or V */
};

uint32_t kvf_thresholds_check(const struct kvf_thresholds *thresholds,
                              const struct kvf_noise *noise,
                              const struct kvf_attention_error *error);

/* Down the ladder until a rung does not pass: how many passed. A rung below one that fails is not
 * looked at: error grows as bits go, and a lucky narrow width is luck. */
uint32_t kvf_ladder_descend(const bool passes[KVF_RUNGS]);

/* A layer's place on both ladders. */
struct kvf_rungs {
    uint8_t k;
    uint8_t v;
};

/* One step back, of the tensor to which the failure is due: K for noise and top-1, the one with the
 * larger error of the output else; the other one if that is at the top. false: both are. */
bool kvf_ladder_step_back(struct kvf_rungs *rungs, uint32_t failing, double k_error2,
                          double v_error2);

/* Which of two forms is better at other sizes: log2 of the error's norm and bits, by the slope that
 * all quantizers have, 2 to the norm a bit. The smaller score wins. */
double kvf_form_score(double error2, double bits);

/* RateQuant: error = alpha beta^-bits. Fit of ln error over bits by least squares; n >= 2, errors
 * above 0. false: nothing to fit. */
bool kvf_rate_fit(const double *bits, const double *errors, uint32_t n, double *alpha_out,
                  double *beta_out);

/* One tensor of one layer. */
struct kvf_rate_item {
    double weight;          /* of its error in the loss */
    double alpha;           /* of its quantizer */
    double beta;            /* > 1 */
    double bits[KVF_RUNGS]; /* that each rung but the first takes, metadata counted: falling */
    double values;          /* share of all values */
    uint8_t rung;           /* out */
};

/* The rungs, 8 bits and below, with the least sum of weight alpha beta^-bits whose mean bits do
 * not exceed the target: from the narrowest up, each time the step that takes most off the sum
 * for its bits, which is what Lagrange's condition (all slopes alike) comes to with a few
 * widths. false: the narrowest rungs are above the target already. */
bool kvf_rate_allocate(struct kvf_rate_item *items, uint32_t n, double target_bits);

/* A kind of layers: forms of K and V. */
struct kvf_kind_choice {
    uint8_t k;
    uint8_t v;
};

/* Bring the kinds of n layers down to at most most, by joining the two whose join costs least bits:
 * what is joined takes the wider form of each. bits_k and bits_v are those of each form; a form of
 * more bits is taken to be no worse. */
void kvf_kinds_join(struct kvf_kind_choice *layers, uint32_t n, uint32_t most, const double *bits_k,
                    const double *bits_v);

#endif /* KVF_CLIENT_CALIB_SEARCH_H */
