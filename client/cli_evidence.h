/* SPDX-License-Identifier: Apache-2.0
 *
 * cli_evidence.h: what a calibration found, as JSON, for the profile's file and for -o json.
 */
#ifndef KVF_CLIENT_CLI_EVIDENCE_H
#define KVF_CLIENT_CLI_EVIDENCE_H

#include <jansson.h>

#include "client/calibrate.h"

/* What was decided, and how it does. */
struct cli_verdict {
    const struct kvf_calibration *calibration;
    const char *profile; /* a built-in one was checked; NULL: one was made */
    const char *workload;
    const struct kvf_codec_plan *plan;
    const struct kvf_layer_verdict *layers;
    double bits; /* a value, metadata, sinks and escapes counted, record pages not */
    uint32_t n_failing;
};

/* A new object; NULL: out of memory. */
json_t *cli_evidence(const struct cli_verdict *verdict);

/* "logit noise, top-1" of enum kvf_failing. */
const char *cli_failing_text(uint32_t failing, char out[64]);

#endif /* KVF_CLIENT_CLI_EVIDENCE_H */
