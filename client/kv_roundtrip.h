/* SPDX-License-Identifier: Apache-2.0
 *
 * kv_roundtrip.h: K and V of some layers of a capture through the library's codecs and back, block
 * by block, as an engine's chunks go.
 */
#ifndef KVF_CLIENT_KV_ROUNDTRIP_H
#define KVF_CLIENT_KV_ROUNDTRIP_H

#include "client/capture.h"
#include "codec/codec.h"

/* Buffers of one plan; for one thread at a time. */
struct kvf_roundtrip {
    const struct kvf_codec_plan *plan;
    const struct kvf_capture *capture; /* whose shape k and v have */
    uint8_t *record;                   /* record page and room for the largest payload */
    uint8_t *workspace;
    size_t payload_room;
    uint8_t *k; /* what came back: [plan layer][head][token][dim], dtype of the capture */
    uint8_t *v;
    uint64_t payload_bytes; /* of all full chunks */
    uint64_t escapes;       /* of all full chunks, sinks included */
};

/* The geometry of n_layers layers of a capture. kind says what K is. */
struct kvf_geometry kvf_roundtrip_geometry(const struct kvf_capture *capture, uint32_t n_layers,
                                           enum kvf_capture_kind kind, uint32_t chunk_tokens);

/* A plan for all layers of a capture: by table, or by the name of a built-in profile if table is
 * NULL; in chunks of as many tokens as a payload takes, 256 at most. Status as
 * kvf_codec_plan_init. */
int kvf_roundtrip_plan(const struct kvf_capture *capture, enum kvf_capture_kind kind,
                       const struct kvf_profile_table *table, const char *name,
                       uint16_t sink_tokens, struct kvf_codec_plan *plan_out);

/* plan and capture stay. KVF_OK; KVF_ERR_NO_MEMORY. */
int kvf_roundtrip_init(struct kvf_roundtrip *trip, const struct kvf_codec_plan *plan,
                       const struct kvf_capture *capture);
void kvf_roundtrip_fini(struct kvf_roundtrip *trip);

/* Encode and decode layers [layer_first, + the plan's number) with K of that kind, all full chunks;
 * tokens behind the last one come back as they are, since engines keep them. KVF_OK; else as the
 * codec says. */
int kvf_roundtrip_run(struct kvf_roundtrip *trip, enum kvf_capture_kind kind, uint32_t layer_first);

/* The same, but all is raw except the last n_tokens (fewer than a chunk), as one short block:
 * blocks that are too short for their means are stored without. */
int kvf_roundtrip_run_tail(struct kvf_roundtrip *trip, enum kvf_capture_kind kind,
                           uint32_t layer_first, uint32_t n_tokens);

/* One head of what came back, as fp32. layer counts from layer_first. */
void kvf_roundtrip_head(const struct kvf_roundtrip *trip, bool is_v, uint32_t layer, uint32_t head,
                        float *out);

#endif /* KVF_CLIENT_KV_ROUNDTRIP_H */
