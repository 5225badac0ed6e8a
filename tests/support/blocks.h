/* SPDX-License-Identifier: Apache-2.0
 *
 * blocks.h: blocks whose name and bytes follow from one number, so that any process can tell
 * whether what it got is right, and from which block it came if it is not.
 */
#ifndef KVF_TESTS_BLOCKS_H
#define KVF_TESTS_BLOCKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvferry.h"

#define KVF_TEST_KEY_BYTES 32

struct kvf_test_key {
    uint8_t bytes[KVF_TEST_KEY_BYTES];
};

/* The key of block `number`, in *key_out, which must live as long as the result is used. */
struct kvf_key kvf_test_key(uint64_t number, struct kvf_test_key *key_out);

/* The payload of block `number`. */
void kvf_test_payload_fill(uint64_t number, void *payload_out, size_t bytes);

/* Is this it? The first wrong word is printed. */
bool kvf_test_payload_ok(uint64_t number, const void *payload, size_t bytes);

/* Put block `number` with so many payload bytes (opaque) as a chain of its own. Returns the block's
 * status. */
int kvf_test_block_put(struct kvf_client *client, uint64_t number, size_t bytes, uint32_t flags);

/* Get it, check every byte, give the lease back. KVF_OK: right; KVF_MISS, KVF_ERR_BUSY,
 * KVF_ERR_LOST and so on: not loaded; KVF_ERR_INTERNAL: wrong bytes, which no test may accept.
 * *tier_out (may be NULL) says where it was. */
int kvf_test_block_get(struct kvf_client *client, uint64_t number, size_t bytes, uint8_t *tier_out);

/* Check a hit's bytes and release it, as kvf_test_block_get. */
int kvf_test_hit_check(struct kvf_client *client, const struct kvf_hit *hit, uint64_t number,
                       size_t bytes);

#endif /* KVF_TESTS_BLOCKS_H */
