/* SPDX-License-Identifier: Apache-2.0
 *
 * blocks.c: blocks that can be told by their bytes.
 */
#include "tests/support/blocks.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* splitmix64's finish: any two inputs give unrelated words */
static uint64_t mix(uint64_t word)
{
    word = (word ^ word >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    word = (word ^ word >> 27) * UINT64_C(0x94d049bb133111eb);
    return word ^ word >> 31;
}

static uint64_t payload_word(uint64_t seed, size_t index)
{
    return mix(seed + index * UINT64_C(0x9e3779b97f4a7c15));
}

struct kvf_key kvf_test_key(uint64_t number, struct kvf_test_key *key_out)
{
    for (size_t i = 0; i < KVF_TEST_KEY_BYTES / sizeof(number); i++) {
        uint64_t word = i == 0 ? number : mix(number + i);

        memcpy(key_out->bytes + i * sizeof(word), &word, sizeof(word));
    }
    return (struct kvf_key){.data = key_out->bytes, .bytes = KVF_TEST_KEY_BYTES};
}

void kvf_test_payload_fill(uint64_t number, void *payload_out, size_t bytes)
{
    uint64_t seed = mix(number ^ UINT64_C(0x6b76666572727931));
    uint8_t *out = payload_out;

    for (size_t i = 0; i * sizeof(uint64_t) < bytes; i++) {
        uint64_t word = payload_word(seed, i);
        size_t left = bytes - i * sizeof(word);

        memcpy(out + i * sizeof(word), &word, left < sizeof(word) ? left : sizeof(word));
    }
}

bool kvf_test_payload_ok(uint64_t number, const void *payload, size_t bytes)
{
    uint64_t seed = mix(number ^ UINT64_C(0x6b76666572727931));
    const uint8_t *in = payload;

    for (size_t i = 0; i * sizeof(uint64_t) < bytes; i++) {
        uint64_t word = payload_word(seed, i);
        size_t left = bytes - i * sizeof(word);

        if (memcmp(in + i * sizeof(word), &word, left < sizeof(word) ? left : sizeof(word)) != 0) {
            fprintf(stderr, "block %" PRIu64 ": wrong bytes at %zu of %zu\n", number,
                    i * sizeof(word), bytes);
            return false;
        }
    }
    return true;
}

#define PATIENCE_MS 120000 /* a slow machine is not what these tests look for */

int kvf_test_block_put(struct kvf_client *client, uint64_t number, size_t bytes, uint32_t flags)
{
    struct kvf_put_options options = {
        .struct_bytes = sizeof(options), .flags = flags, .budget_ms = PATIENCE_MS};
    struct kvf_put_item item = {.struct_bytes = sizeof(item), .source = KVF_SOURCE_BYTES};
    struct kvf_test_key key;
    void *payload = malloc(bytes);
    int32_t block_status = KVF_ERR_INTERNAL;
    int status;

    if (payload == NULL) {
        abort();
    }
    kvf_test_payload_fill(number, payload, bytes);
    item.key = kvf_test_key(number, &key);
    item.data = payload;
    item.data_bytes = bytes;
    status = kvf_put(client, &item, 1, &options, &block_status);
    free(payload);
    return status < 0 ? status : block_status;
}

int kvf_test_hit_check(struct kvf_client *client, const struct kvf_hit *hit, uint64_t number,
                       size_t bytes)
{
    bool ok;
    int status;

    if (hit->status != KVF_OK) {
        return hit->status;
    }
    ok = hit->payload_bytes == bytes && kvf_test_payload_ok(number, hit->payload, bytes);
    status = kvf_lease_release(client, hit->lease);
    if (status == KVF_OK && !ok) {
        fprintf(stderr, "block %" PRIu64 ": %" PRIu64 " bytes, %zu expected\n", number,
                hit->payload_bytes, bytes);
        return KVF_ERR_INTERNAL;
    }
    return status;
}

int kvf_test_block_get(struct kvf_client *client, uint64_t number, size_t bytes, uint8_t *tier_out)
{
    struct kvf_test_key bytes_of_key;
    struct kvf_key key = kvf_test_key(number, &bytes_of_key);
    struct kvf_get_options options = {.struct_bytes = sizeof(options), .budget_ms = PATIENCE_MS};
    struct kvf_hit hit = {.status = KVF_ERR_INTERNAL};

    (void)kvf_get(client, &key, 1, &options, &hit); /* the hit's status says it all */
    if (tier_out != NULL) {
        *tier_out = hit.tier;
    }
    return kvf_test_hit_check(client, &hit, number, bytes);
}
