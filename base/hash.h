/* SPDX-License-Identifier: Apache-2.0
 *
 * hash.h: keyed BLAKE2b-256: block names, message authentication, derived keys.
 *
 * Whatever is hashed goes in as fields, each preceded by its length as u64 little-endian, so that
 * no two lists of fields give the same input. Any thread; a hasher belongs to one. Nothing blocks.
 */
#ifndef KVF_BASE_HASH_H
#define KVF_BASE_HASH_H

#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVF_HASH_BYTES     32
#define KVF_HASH_KEY_BYTES 32

/* State of one computation, in place; nothing to free. */
struct kvf_hasher {
    _Alignas(64) unsigned char state[384];
};

/* Once at start, before anything else here; calling it again is harmless. KVF_OK;
   KVF_ERR_INTERNAL. */
int kvf_hash_init_library(void);

/* Begin. key may be NULL (an unkeyed hash). */
void kvf_hasher_init(struct kvf_hasher *hasher, const uint8_t key[KVF_HASH_KEY_BYTES]);

/* Add one field: its length, then its bytes (data may be NULL if bytes is 0). */
void kvf_hash_field(struct kvf_hasher *hasher, const void *data, size_t bytes);

/* Add a number as a field of 8 bytes, little-endian. */
void kvf_hash_field_u64(struct kvf_hasher *hasher, uint64_t value);

/* End. The hasher can be begun again. */
void kvf_hasher_final(struct kvf_hasher *hasher, uint8_t hash_out[KVF_HASH_BYTES]);

/* The name of a block in index, wire and disk: over a tag, tenant, namespace and the engine's
 * key. */
void kvf_key_id_compute(const uint8_t id_key[KVF_HASH_KEY_BYTES], uint64_t tenant_id,
                        uint64_t namespace_id, struct kvf_key key,
                        uint8_t key_id_out[KVF_HASH_BYTES]);

/* A key for another purpose, from a key, the purpose's name and what it is bound to. */
void kvf_key_derive(const uint8_t key[KVF_HASH_KEY_BYTES], const char *purpose, const void *context,
                    size_t context_bytes, uint8_t key_out[KVF_HASH_KEY_BYTES]);

/* Authenticate data. For data in several parts use a keyed hasher and kvf_mac_equal. */
void kvf_mac_compute(const uint8_t key[KVF_HASH_KEY_BYTES], const void *data, size_t bytes,
                     uint8_t mac_out[KVF_HASH_BYTES]);

/* Is mac what kvf_mac_compute gives? In constant time. */
bool kvf_mac_verify(const uint8_t key[KVF_HASH_KEY_BYTES], const void *data, size_t bytes,
                    const uint8_t mac[KVF_HASH_BYTES]);

/* Are two MACs equal? In constant time. */
bool kvf_mac_equal(const uint8_t a[KVF_HASH_BYTES], const uint8_t b[KVF_HASH_BYTES]);

#endif /* KVF_BASE_HASH_H */
