/* SPDX-License-Identifier: Apache-2.0
 *
 * profile_table.h: a profile that a calibration made for one model: kinds of layers, which layer is
 * of which kind, and channels and means that it measured.
 *
 *   profile_file.h   as text, in the daemon's calibration.dir
 *   profile_blob.h   as bytes, from the daemon to a client
 *
 * Both readers give tables that kvf_profile_table_validate has passed; codec.h's
 * kvf_codec_plan_init_table makes a plan of one. A table is read-only from then on and may be
 * shared. Nothing here locks, blocks or logs; any thread.
 */
#ifndef KVF_CODEC_PROFILE_TABLE_H
#define KVF_CODEC_PROFILE_TABLE_H

#include "codec/codec.h"

enum kvf_profile_limits {
    KVF_PROFILE_WHY_BYTES = 256,             /* of a message: one line */
    KVF_PROFILE_ARRAYS_BYTES_MAX = 16 << 20, /* of the arrays of a table together */
};

/* What the samples of a calibration were: bits of kvf_profile_table.workloads. */
enum kvf_profile_workload {
    KVF_WORKLOAD_CHAT = 1 << 0,
    KVF_WORKLOAD_LONG_RETRIEVAL = 1 << 1,
    KVF_WORKLOAD_REASONING = 1 << 2,
    KVF_WORKLOAD_TOOL_CALLS = 1 << 3,
    KVF_WORKLOAD_CODE = 1 << 4,
    KVF_WORKLOAD_OTHER = 1 << 5,
};

/* "chat", ..., in the order of the bits; NULL-terminated. */
extern const char *const kvf_profile_workloads[];

/* Which array: of K or of V. */
enum kvf_profile_array {
    KVF_PROFILE_MEANS_K = 0, /* fp16[layers][heads][dim], finite: for KVF_TENSOR_CENTER_PROFILE */
    KVF_PROFILE_MEANS_V = 1,
    KVF_PROFILE_SPLITS_K = 2, /* u8[layers][heads][(dim + 7) / 8]: for KVF_TENSOR_SPLIT */
    KVF_PROFILE_SPLITS_V = 3,
    KVF_PROFILE_ARRAYS = 4,
};

struct kvf_profile_kind {
    struct kvf_profile_tensor k;
    struct kvf_profile_tensor v; /* all zero if dim_v is 0 */
};

/* Stays at one address: profile.name is its own name. */
struct kvf_profile_table {
    char name[KVF_PROFILE_NAME_BYTES];
    const struct kvf_profile *builtin; /* this profile of the build has passed for the model: there
                                          are no kinds and arrays; NULL: a profile of its own */
    uint8_t weights_digest[KVF_DIGEST_BYTES]; /* the model's; not all zero */
    uint8_t adapter_digest[KVF_DIGEST_BYTES];
    uint32_t workloads; /* enum kvf_profile_workload; not 0 */
    uint16_t n_layers;  /* the whole model's */
    uint16_t n_heads;   /* of all shards */
    uint16_t dim_k;
    uint16_t dim_v;
    uint8_t rope_state;  /* enum kvf_rope_state */
    uint8_t sink_tokens; /* kept raw at least */
    uint8_t n_kinds;     /* 1..KVF_CODEC_KINDS_MAX */
    struct kvf_profile_kind kinds[KVF_CODEC_KINDS_MAX];
    uint8_t layer_kinds[KVF_LAYERS_MAX];
    uint8_t *arrays[KVF_PROFILE_ARRAYS]; /* NULL: none */
    struct kvf_profile profile;          /* what a plan refers to; set by validate */
};

/* An empty one, or NULL. */
struct kvf_profile_table *kvf_profile_table_create(void);

/* Accepts NULL. */
void kvf_profile_table_destroy(struct kvf_profile_table *table);

/* Bytes that an array of this geometry has; 0: dim is 0. */
size_t kvf_profile_array_bytes(const struct kvf_profile_table *table, enum kvf_profile_array array);

/* The same of one layer. */
size_t kvf_profile_array_layer_bytes(const struct kvf_profile_table *table,
                                     enum kvf_profile_array array);

/* Make an array, zeroed; geometry is set and in range. KVF_OK; KVF_ERR_NO_MEMORY;
 * KVF_ERR_TOO_LARGE: the table would have more than KVF_PROFILE_ARRAYS_BYTES_MAX. */
int kvf_profile_table_add_array(struct kvf_profile_table *table, enum kvf_profile_array array);

/* Is everything in a table right, and can its codecs code its geometry? KVF_OK; KVF_ERR_INVALID:
 * why_out says where, what, and what would do. */
int kvf_profile_table_validate(struct kvf_profile_table *table,
                               char why_out[KVF_PROFILE_WHY_BYTES]);

/* Is a table for this model's KV, of which geometry is one shard's share? KVF_OK: head_first_out is
 * for kvf_codec_plan_init_table; KVF_ERR_MISMATCH: why_out says what differs. */
int kvf_profile_table_fits(const struct kvf_profile_table *table,
                           const struct kvf_geometry *geometry, uint16_t shard,
                           uint16_t shard_count, uint32_t *head_first_out,
                           char why_out[KVF_PROFILE_WHY_BYTES]);

/* Can a file have a profile of this name: 1 to 15 of a-z, 0-9, '.' and '-' that begin with a letter
 * or a digit, and a zero? */
bool kvf_profile_name_is_valid(const char name[KVF_PROFILE_NAME_BYTES]);

/* Is a table for the model of these digests? */
bool kvf_profile_table_is_for(const struct kvf_profile_table *table,
                              const uint8_t weights_digest[KVF_DIGEST_BYTES],
                              const uint8_t adapter_digest[KVF_DIGEST_BYTES]);

/* "chat, code" to text_out, cut if it does not fit. */
void kvf_profile_workloads_text(uint32_t workloads, char *text_out, size_t text_bytes);

/* For plan.c: means, lists of channels, from a head on. */
struct kvf_plan_array kvf_profile_table_means(const struct kvf_profile_table *table, bool is_v,
                                              uint32_t head_first);
struct kvf_plan_array kvf_profile_table_splits(const struct kvf_profile_table *table, bool is_v,
                                               uint32_t head_first);

#endif /* KVF_CODEC_PROFILE_TABLE_H */
