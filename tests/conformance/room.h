/* SPDX-License-Identifier: Apache-2.0
 *
 * room.h: puts with options, many blocks at once, and the numbers that tell where they went, for
 * the tests of limits, budgets and tenants.
 */
#ifndef KVF_TESTS_CONFORMANCE_ROOM_H
#define KVF_TESTS_CONFORMANCE_ROOM_H

#include <stddef.h>
#include <stdint.h>

#include "kvferry.h"
#include "tests/support/daemon.h"

#define ROOM_KEYS_MAX 1024

/* Put one block whose name is `number` and whose bytes are those of `content`. options may be NULL.
 * Returns the block's status. */
int room_put(struct kvf_client *client, uint64_t number, uint64_t content, size_t bytes,
             const struct kvf_put_options *options);

/* Blocks first .. first + n - 1, as chains of a MiB each; all must be stored anew. */
void room_put_all(struct kvf_client *client, uint64_t first, uint32_t n, size_t bytes,
                  uint32_t flags);

/* Keys of blocks first .. first + n - 1, at most ROOM_KEYS_MAX. They hold until the next call. */
const struct kvf_key *room_keys(uint64_t first, uint32_t n);

/* How many of these blocks are there and right? Any that is not must be a miss. */
uint32_t room_count(struct kvf_client *client, uint64_t first, uint32_t n, size_t bytes);

struct kvf_stat room_stat(struct kvf_client *client);

/* Opaque bytes with `staging_bytes`, as one of shard_count shards or none, by the daemon's
 * socket or another one (NULL: the daemon's). */
struct kvf_client *room_open(const struct kvf_test_daemon *daemon, const char *socket_path,
                             const char *label, uint16_t shard, uint16_t shard_count,
                             uint64_t staging_bytes);

/* POST "/v1/evict" or "/v1/purge" for the client's namespace; returns how many blocks went. */
uint64_t room_command(const struct kvf_test_daemon *daemon, struct kvf_client *client,
                      const char *path);

void room_sleep_ms(uint32_t ms);

#endif /* KVF_TESTS_CONFORMANCE_ROOM_H */
