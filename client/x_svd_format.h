/* SPDX-License-Identifier: Apache-2.0
 *
 * x_svd_format.h: the file of `kvferry svd`: singular vectors of [W_K | W_V] of each layer.
 *
 *   struct kvf_svd_header
 *   u32 crc32c[n_layers]          of each layer's bytes
 *   zeroes up to a multiple of KVF_SVD_ALIGN_BYTES
 *   layers, one after the other   f32 u[d_model][rank], f32 m[rank][kv_width], zeroes up to a
 *                                 multiple of KVF_SVD_ALIGN_BYTES (in the checksum)
 *
 * Little endian. With [W_K | W_V] a matrix of d_model rows and kv_width columns, those of K by head
 * and element first, then those of V: u has orthonormal columns, in order of falling singular
 * value, and u m is the best approximation of that rank. header_crc32c is over header and table
 * with the field itself zero. factors_digest is SHA-256 over the header, with the digest itself and
 * header_crc32c zero, and u and m of all layers, without gaps. The document is docs/x-cache.md.
 */
#ifndef KVF_CLIENT_X_SVD_FORMAT_H
#define KVF_CLIENT_X_SVD_FORMAT_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#include "kvferry.h"

#define KVF_SVD_MAGIC       0x565346564bU /* "KVFSV" */
#define KVF_SVD_VERSION     2
#define KVF_SVD_ALIGN_BYTES 64

struct kvf_svd_header {
    uint64_t magic;
    uint16_t version;
    uint16_t header_bytes;
    uint32_t header_crc32c;
    uint64_t total_bytes;
    uint64_t layer_bytes; /* from layer to layer */
    uint32_t n_layers;
    uint32_t d_model;
    uint32_t rank;
    uint32_t kv_width; /* n_heads * (dim_k + dim_v) */
    uint16_t n_heads;
    uint16_t dim_k;
    uint16_t dim_v;
    uint16_t dtype; /* enum kvf_dtype, F32 */
    uint8_t weights_digest[KVF_DIGEST_BYTES];
    uint8_t factors_digest[KVF_DIGEST_BYTES];
    uint8_t reserved[8]; /* zeroes */
};
static_assert(sizeof(struct kvf_svd_header) == 128, "no hidden padding");
static_assert(offsetof(struct kvf_svd_header, weights_digest) == 56, "part of the format");

#endif /* KVF_CLIENT_X_SVD_FORMAT_H */
