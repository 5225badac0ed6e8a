/* SPDX-License-Identifier: Apache-2.0
 *
 * room.c: puts with options, many blocks at once, and where they went.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/clock.h"
#include "tests/conformance/room.h"
#include "tests/support/blocks.h"

#define REQUEST_BYTES (1u << 20)

int room_put(struct kvf_client *client, uint64_t number, uint64_t content, size_t bytes,
             const struct kvf_put_options *options)
{
    struct kvf_test_key key;
    struct kvf_put_item item = {.struct_bytes = sizeof(item),
                                .source = KVF_SOURCE_BYTES,
                                .key = kvf_test_key(number, &key),
                                .data_bytes = bytes};
    void *payload = malloc(bytes);
    int32_t status = KVF_ERR_INTERNAL;
    int overall;

    assert_non_null(payload);
    kvf_test_payload_fill(content, payload, bytes);
    item.data = payload;
    overall = kvf_put(client, &item, 1, options, &status);
    free(payload);
    return overall < 0 ? overall : status;
}

static void put_some(struct kvf_client *client, uint64_t first, uint32_t n, size_t bytes,
                     const struct kvf_put_options *options, uint8_t *payloads)
{
    static struct kvf_put_item items[ROOM_KEYS_MAX];
    static int32_t statuses[ROOM_KEYS_MAX];
    const struct kvf_key *keys = room_keys(first, n);

    for (uint32_t i = 0; i < n; i++) {
        kvf_test_payload_fill(first + i, payloads + i * bytes, bytes);
        items[i] = (struct kvf_put_item){.struct_bytes = sizeof(items[i]),
                                         .source = KVF_SOURCE_BYTES,
                                         .key = keys[i],
                                         .data = payloads + i * bytes,
                                         .data_bytes = bytes};
    }
    assert_int_equal(kvf_put(client, items, n, options, statuses), KVF_OK);
    for (uint32_t i = 0; i < n; i++) {
        assert_int_equal(statuses[i], KVF_OK);
    }
}

void room_put_all(struct kvf_client *client, uint64_t first, uint32_t n, size_t bytes,
                  uint32_t flags)
{
    struct kvf_put_options options = {.struct_bytes = sizeof(options), .flags = flags};
    size_t record_bytes = (bytes + 2 * KVF_RECORD_PAGE_BYTES - 1) / KVF_RECORD_PAGE_BYTES *
                          KVF_RECORD_PAGE_BYTES;
    uint32_t most = record_bytes > REQUEST_BYTES ? 1 : (uint32_t)(REQUEST_BYTES / record_bytes);
    uint8_t *payloads = malloc(most * bytes);

    assert_non_null(payloads);
    for (uint32_t done = 0; done < n; done += most) {
        put_some(client, first + done, n - done < most ? n - done : most, bytes, &options,
                 payloads);
    }
    free(payloads);
}

const struct kvf_key *room_keys(uint64_t first, uint32_t n)
{
    static struct kvf_test_key bytes[ROOM_KEYS_MAX];
    static struct kvf_key keys[ROOM_KEYS_MAX];

    assert_true(n <= ROOM_KEYS_MAX);
    for (uint32_t i = 0; i < n; i++) {
        keys[i] = kvf_test_key(first + i, &bytes[i]);
    }
    return keys;
}

uint32_t room_count(struct kvf_client *client, uint64_t first, uint32_t n, size_t bytes)
{
    uint32_t n_here = 0;

    for (uint32_t i = 0; i < n; i++) {
        int status = kvf_test_block_get(client, first + i, bytes, NULL);

        assert_true(status == KVF_OK || status == KVF_MISS);
        n_here += status == KVF_OK;
    }
    return n_here;
}

struct kvf_stat room_stat(struct kvf_client *client)
{
    struct kvf_stat stat = {.struct_bytes = sizeof(stat)};

    assert_int_equal(kvf_stat(client, &stat), KVF_OK);
    return stat;
}

struct kvf_client *room_open(const struct kvf_test_daemon *daemon, const char *socket_path,
                             const char *label, uint16_t shard, uint16_t shard_count,
                             uint64_t staging_bytes)
{
    struct kvf_options options;
    struct kvf_client *client;

    kvf_test_client_options(daemon, &options);
    if (socket_path != NULL) {
        options.socket_path = socket_path;
    }
    options.namespace_label = label;
    options.shard = shard;
    options.shard_count = shard_count;
    options.staging_bytes = staging_bytes;
    assert_int_equal(kvf_open(&options, &client), KVF_OK);
    return client;
}

uint64_t room_command(const struct kvf_test_daemon *daemon, struct kvf_client *client,
                      const char *path)
{
    struct kvf_info info = {.struct_bytes = sizeof(info)};
    char question[128];

    assert_int_equal(kvf_client_info(client, &info), KVF_OK);
    snprintf(question, sizeof(question), "%s?namespace=%016" PRIx64, path, info.namespace_id);
    return kvf_test_daemon_command(daemon, question, "evicted");
}

void room_sleep_ms(uint32_t ms)
{
    const struct timespec pause = {.tv_sec = ms / 1000,
                                   .tv_nsec = (long)(ms % 1000 * KVF_NS_PER_MS)};

    nanosleep(&pause, NULL);
}
