/* SPDX-License-Identifier: Apache-2.0
 *
 * calib_internal.h: what calibrate.c (measures) and calib_choose.c (decides) share.
 */
#ifndef KVF_CLIENT_CALIB_INTERNAL_H
#define KVF_CLIENT_CALIB_INTERNAL_H

#include "client/calibrate.h"

/* Pairs of a K form and a V form in the grid, and one of a layer. */
uint32_t kvf_calib_pairs(const struct kvf_calibration *c);
const struct kvf_grid_entry *kvf_calib_grid(const struct kvf_calibration *c, uint32_t layer,
                                            uint32_t pair);

/* One layer of every capture of a set; *data_out is the caller's. KVF_OK; KVF_ERR_NO_MEMORY. */
int kvf_set_layer_load(const struct kvf_capture_set *set, uint32_t layer, uint32_t n_rows,
                       struct kvf_layer_data ***data_out);
void kvf_set_layer_free(struct kvf_layer_data **data, uint32_t n);

/* Means of K over the captures without their sinks, fp16[head][dim]. KVF_OK; KVF_ERR_NO_MEMORY. */
int kvf_calib_means(const struct kvf_calibration *c, uint32_t layer, uint8_t *means_out);

/* Pass a layer that is loaded through one form of each; tail_tokens 0: all full chunks, else the
 * last tokens as a short block. Captures that are shorter stay as they were. KVF_OK;
 * KVF_ERR_NO_MEMORY; a codec's. */
int kvf_calib_pass_forms(const struct kvf_calibration *c, struct kvf_layer_data *const *data,
                         uint32_t n, uint32_t k, uint32_t v, uint32_t tail_tokens);

/* One form of each on a layer that is loaded. KVF_OK; KVF_ERR_NO_MEMORY; a codec's. */
int kvf_calib_measure_forms(const struct kvf_calibration *c, struct kvf_layer_data *const *data,
                            uint32_t n, uint32_t k, uint32_t v, uint32_t parts,
                            struct kvf_grid_entry *entry_out);

/* Noise of the worst head's keys in short blocks, after they have been taken. */
int kvf_calib_tail_noise(struct kvf_layer_data *const *data, uint32_t n,
                         struct kvf_noise *noise_out);

/* enum kvf_failing of a layer by all its figures. */
uint32_t kvf_calib_failing(const struct kvf_calibration *c, const struct kvf_measure *measure,
                           const struct kvf_noise *tail);

#endif /* KVF_CLIENT_CALIB_INTERNAL_H */
