/* SPDX-License-Identifier: Apache-2.0
 *
 * profile_blob.h: a profile of its own (profile_table.h) as bytes, from the daemon to a client.
 *
 *   struct kvf_profile_blob
 *   struct kvf_profile_blob_tensor[n_kinds][2]    K, V; V zero if dim_v is 0
 *   u8 layer_kinds[n_layers]
 *   arrays, in the order of enum kvf_profile_array, of those whose bit is set in arrays
 *
 * Little endian, without gaps. crc32c is over all bytes with the field itself zero.
 */
#ifndef KVF_CODEC_PROFILE_BLOB_H
#define KVF_CODEC_PROFILE_BLOB_H

#include "codec/profile_table.h"

#define KVF_PROFILE_BLOB_MAGIC     0x4246504bU /* "KPFB" */
#define KVF_PROFILE_BLOB_VERSION   1
#define KVF_PROFILE_BLOB_BYTES_MAX (KVF_PROFILE_ARRAYS_BYTES_MAX + 4096)

struct kvf_profile_blob_tensor {
    uint8_t codec;
    uint8_t bits;
    uint8_t flags;
    uint8_t rotate;
    uint8_t clip;
    uint8_t group_axis;
    uint16_t group_size;
    uint32_t rot_seed;
};
_Static_assert(sizeof(struct kvf_profile_blob_tensor) == 12, "no hidden padding");

struct kvf_profile_blob {
    uint32_t magic;
    uint16_t version;
    uint16_t header_bytes;
    uint32_t total_bytes;
    uint32_t crc32c;
    char name[KVF_PROFILE_NAME_BYTES]; /* zero-terminated, rest zero */
    uint8_t weights_digest[KVF_DIGEST_BYTES];
    uint8_t adapter_digest[KVF_DIGEST_BYTES];
    uint32_t workloads;
    uint16_t n_layers;
    uint16_t n_heads;
    uint16_t dim_k;
    uint16_t dim_v;
    uint8_t rope_state;
    uint8_t sink_tokens;
    uint8_t n_kinds;
    uint8_t arrays;
};
_Static_assert(sizeof(struct kvf_profile_blob) == 112, "no hidden padding");

/* Bytes of the blob of a valid table. */
size_t kvf_profile_blob_bytes(const struct kvf_profile_table *table);

/* Write kvf_profile_blob_bytes() to blob. */
void kvf_profile_blob_write(const struct kvf_profile_table *table, void *blob);

/* Read bytes that nobody vouches for. *table_out is the caller's, and valid. KVF_OK;
 * KVF_ERR_INVALID: why_out says what is wrong; KVF_ERR_NO_MEMORY. */
int kvf_profile_blob_read(const void *blob, size_t bytes, struct kvf_profile_table **table_out,
                          char why_out[KVF_PROFILE_WHY_BYTES]);

#endif /* KVF_CODEC_PROFILE_BLOB_H */
