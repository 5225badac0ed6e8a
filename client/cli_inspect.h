/* SPDX-License-Identifier: Apache-2.0
 *
 * cli_inspect.h: the figures of kvferry inspect, and their drawing.
 */
#ifndef KVF_CLIENT_CLI_INSPECT_H
#define KVF_CLIENT_CLI_INSPECT_H

#include <stdint.h>

#include "client/calib_measure.h"

/* One K/V head of one layer, over all captures. */
struct inspect_head {
    double k_kurtosis;
    double k_kurtosis_rotated;
    double v_kurtosis;
    double v_kurtosis_rotated;
    double k_norm; /* of the median token */
    double v_norm;
    struct kvf_error_sums k; /* of the profile */
    struct kvf_error_sums v;
    struct kvf_noise noise;
    uint32_t k_bits; /* suggested */
    uint32_t v_bits;
};

/* Heat maps by layer and head. 0; -1: errno says why. */
int cli_inspect_draw(const char *path, const struct inspect_head *heads, uint32_t n_layers,
                     uint32_t n_heads, const char *title);

#endif /* KVF_CLIENT_CLI_INSPECT_H */
