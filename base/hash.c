/* SPDX-License-Identifier: Apache-2.0
 *
 * hash.c: keyed BLAKE2b-256 by libsodium.
 */
#include "base/hash.h"

#include <assert.h>
#include <sodium.h>
#include <string.h>

/* Tags keep the uses of one key apart. They are part of the disk and wire formats. */
static const char key_id_tag[] = "kvferry key id 1";
static const char derive_tag[] = "kvferry derive 1";
static const char mac_tag[] = "kvferry mac 1";

_Static_assert(sizeof(struct kvf_hasher) >= sizeof(crypto_generichash_state), "hasher holds state");
_Static_assert(KVF_HASH_BYTES >= crypto_generichash_BYTES_MIN &&
                   KVF_HASH_BYTES <= crypto_generichash_BYTES_MAX,
               "BLAKE2b offers this size");

int kvf_hash_init_library(void)
{
    return sodium_init() < 0 ? KVF_ERR_INTERNAL : KVF_OK;
}

static crypto_generichash_state *state_of(struct kvf_hasher *hasher)
{
    return (crypto_generichash_state *)(void *)hasher->state;
}

void kvf_hasher_init(struct kvf_hasher *hasher, const uint8_t key[KVF_HASH_KEY_BYTES])
{
    int rc = crypto_generichash_init(state_of(hasher), key, key != NULL ? KVF_HASH_KEY_BYTES : 0,
                                     KVF_HASH_BYTES);

    assert(rc == 0);
    (void)rc;
}

void kvf_hash_field(struct kvf_hasher *hasher, const void *data, size_t bytes)
{
    uint8_t length[8];

    for (size_t i = 0; i < sizeof(length); i++) {
        length[i] = (uint8_t)((uint64_t)bytes >> (8 * i));
    }
    crypto_generichash_update(state_of(hasher), length, sizeof(length));
    if (bytes > 0) {
        crypto_generichash_update(state_of(hasher), data, bytes);
    }
}

void kvf_hash_field_u64(struct kvf_hasher *hasher, uint64_t value)
{
    uint8_t bytes[8];

    for (size_t i = 0; i < sizeof(bytes); i++) {
        bytes[i] = (uint8_t)(value >> (8 * i));
    }
    kvf_hash_field(hasher, bytes, sizeof(bytes));
}

void kvf_hasher_final(struct kvf_hasher *hasher, uint8_t hash_out[KVF_HASH_BYTES])
{
    crypto_generichash_final(state_of(hasher), hash_out, KVF_HASH_BYTES);
}

void kvf_key_id_compute(const uint8_t id_key[KVF_HASH_KEY_BYTES], uint64_t tenant_id,
                        uint64_t namespace_id, struct kvf_key key,
                        uint8_t key_id_out[KVF_HASH_BYTES])
{
    struct kvf_hasher hasher;

    kvf_hasher_init(&hasher, id_key);
    kvf_hash_field(&hasher, key_id_tag, sizeof(key_id_tag) - 1);
    kvf_hash_field_u64(&hasher, tenant_id);
    kvf_hash_field_u64(&hasher, namespace_id);
    kvf_hash_field(&hasher, key.data, key.bytes);
    kvf_hasher_final(&hasher, key_id_out);
}

void kvf_key_derive(const uint8_t key[KVF_HASH_KEY_BYTES], const char *purpose, const void *context,
                    size_t context_bytes, uint8_t key_out[KVF_HASH_KEY_BYTES])
{
    struct kvf_hasher hasher;

    kvf_hasher_init(&hasher, key);
    kvf_hash_field(&hasher, derive_tag, sizeof(derive_tag) - 1);
    kvf_hash_field(&hasher, purpose, strlen(purpose));
    kvf_hash_field(&hasher, context, context_bytes);
    kvf_hasher_final(&hasher, key_out);
}

void kvf_mac_compute(const uint8_t key[KVF_HASH_KEY_BYTES], const void *data, size_t bytes,
                     uint8_t mac_out[KVF_HASH_BYTES])
{
    struct kvf_hasher hasher;

    kvf_hasher_init(&hasher, key);
    kvf_hash_field(&hasher, mac_tag, sizeof(mac_tag) - 1);
    kvf_hash_field(&hasher, data, bytes);
    kvf_hasher_final(&hasher, mac_out);
}

bool kvf_mac_verify(const uint8_t key[KVF_HASH_KEY_BYTES], const void *data, size_t bytes,
                    const uint8_t mac[KVF_HASH_BYTES])
{
    uint8_t expected[KVF_HASH_BYTES];

    kvf_mac_compute(key, data, bytes, expected);
    return kvf_mac_equal(expected, mac);
}

bool kvf_mac_equal(const uint8_t a[KVF_HASH_BYTES], const uint8_t b[KVF_HASH_BYTES])
{
    return sodium_memcmp(a, b, KVF_HASH_BYTES) == 0;
}
