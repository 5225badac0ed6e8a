/* SPDX-License-Identifier: Apache-2.0
 *
 * calibrate.h: from captures of a model to a profile of its own, and the check that it or a
 * built-in one passes: what `kvferry calibrate` does between its arguments and its files.
 *
 *   measure   every form of K and V on every layer of the captures
 *   choose    per layer: down the ladder by thresholds, or bits by a mean budget
 *   settle    on held-out captures: what does not pass steps back
 *   verify    the whole profile, as blocks of all layers, on the held-out captures
 *
 * Captures and what is made of them stay with the caller's sets. One call at a time; each uses
 * n_threads threads.
 */
#ifndef KVF_CLIENT_CALIBRATE_H
#define KVF_CLIENT_CALIBRATE_H

#include "client/calib_forms.h"
#include "client/calib_search.h"

struct kvf_calibrate_options {
    struct kvf_thresholds thresholds;
    enum kvf_capture_kind k_kind; /* K_POST, or K_PRE where captures have it and theta */
    uint32_t codecs;              /* enum kvf_form_codecs */
    uint32_t n_threads;
    uint32_t n_rows;     /* queries a head and capture, at most */
    uint8_t sink_tokens; /* kept raw */
    double target_bits;  /* mean bits a value; 0: go down the ladder instead */
};

/* What one form of K and one of V do to a layer of the captures. */
struct kvf_grid_entry {
    struct kvf_measure measure;
    struct kvf_noise tail; /* of K in a block too short for its means */
};

/* A layer's way. */
struct kvf_layer_choice {
    struct kvf_rungs rungs;
    uint8_t k_of[KVF_RUNGS]; /* form of each rung */
    uint8_t v_of[KVF_RUNGS];
    uint8_t k; /* the form chosen */
    uint8_t v;
    uint32_t steps_back;
    uint32_t first_failing; /* enum kvf_failing: why it stepped back first; 0: it did not */
};

/* A layer of the held-out captures with the whole profile. */
struct kvf_layer_verdict {
    struct kvf_measure measure;
    struct kvf_noise tail;
    uint32_t failing; /* enum kvf_failing */
};

struct kvf_calibration {
    struct kvf_calibrate_options options;
    const struct kvf_capture_set *captures;
    const struct kvf_capture_set *heldout;
    uint32_t n_layers;
    struct kvf_form forms_k[KVF_FORMS_MAX];
    struct kvf_form forms_v[KVF_FORMS_MAX];
    uint32_t n_forms_k;
    uint32_t n_forms_v;
    double bits_k[KVF_FORMS_MAX]; /* a value, in full chunks */
    double bits_v[KVF_FORMS_MAX];
    double score_k[KVF_FORMS_MAX]; /* mean of kvf_form_score over layers */
    double score_v[KVF_FORMS_MAX];
    struct kvf_grid_entry *grid; /* [layer][pair]: K form and V form of that number, or the last */
    struct kvf_layer_choice choices[KVF_LAYERS_MAX];
};

enum {
    KVF_CALIB_CHUNK_TOKENS = 256,
    KVF_CALIB_TAIL_TOKENS = 64, /* of the short block that is tried */
};

/* The sets stay; heldout may be empty until settle and verify. KVF_OK; KVF_ERR_NO_MEMORY; _INVALID:
 * K before RoPE is wanted and the captures lack it or theta. */
int kvf_calibration_init(struct kvf_calibration *calibration,
                         const struct kvf_calibrate_options *options,
                         const struct kvf_capture_set *captures,
                         const struct kvf_capture_set *heldout);
void kvf_calibration_fini(struct kvf_calibration *calibration);

/* KVF_OK; KVF_ERR_NO_MEMORY; or what a codec says. Takes minutes for large captures. */
int kvf_calibration_measure(struct kvf_calibration *calibration);

/* KVF_OK; KVF_ERR_NO_SPACE: target_bits is below what the narrowest forms take. */
int kvf_calibration_choose(struct kvf_calibration *calibration);

/* With a mean budget: only looks, nothing steps back. KVF_OK; KVF_ERR_NO_MEMORY; a codec's. */
int kvf_calibration_settle(struct kvf_calibration *calibration);

/* The profile chosen: kinds, layers, means. Name, digests and workloads are the caller's to set
 * before kvf_profile_table_validate. KVF_OK; KVF_ERR_NO_MEMORY. */
int kvf_calibration_table(struct kvf_calibration *calibration,
                          struct kvf_profile_table **table_out);

/* Does the plan of a whole profile pass on the held-out captures? verdicts has n_layers entries.
 * *bits_out: what a value took in full chunks, sinks and escapes counted, record pages not; 0 if no
 * capture has a full chunk. KVF_OK: verdicts say; KVF_ERR_NO_MEMORY; a codec's. */
int kvf_calibration_verify(const struct kvf_calibration *calibration,
                           const struct kvf_codec_plan *plan, struct kvf_layer_verdict *verdicts,
                           double *bits_out);

#endif /* KVF_CLIENT_CALIBRATE_H */
