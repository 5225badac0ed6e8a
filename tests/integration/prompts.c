/* SPDX-License-Identifier: Apache-2.0
 *
 * prompts.c: a client that treats prompts as an engine does: look up, fetch what is there, put the
 * rest. A line of standard input is a prompt: how many blocks, and their numbers.
 *
 * usage: prompts SOCKET LABEL BLOCK_BYTES; for each prompt a line: blocks found, fetched, put
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/blocks.h"

enum {
    BLOCKS_MAX = 1024
};

static struct kvf_test_key names[BLOCKS_MAX];
static struct kvf_key keys[BLOCKS_MAX];

static uint32_t fetch(struct kvf_client *client, uint32_t n)
{
    static struct kvf_hit hits[BLOCKS_MAX];
    uint32_t fetched = 0;

    if (n != 0) {
        (void)kvf_get(client, keys, n, NULL, hits);
    }
    for (uint32_t i = 0; i < n; i++) {
        if (hits[i].status == KVF_OK) {
            fetched++;
            (void)kvf_lease_release(client, hits[i].lease);
        }
    }
    return fetched;
}

static uint32_t put(struct kvf_client *client, uint32_t first, uint32_t n, void *payload,
                    size_t bytes)
{
    uint32_t done = 0;

    for (uint32_t i = first; i < n; i++) {
        struct kvf_put_item item = {.struct_bytes = sizeof(item),
                                    .source = KVF_SOURCE_BYTES,
                                    .key = keys[i],
                                    .data = payload,
                                    .data_bytes = bytes};
        struct kvf_put_options options = {.struct_bytes = sizeof(options), .depth = i};
        int32_t status = KVF_ERR_INTERNAL;

        if (i > 0) {
            options.parent = keys[i - 1];
        }
        (void)kvf_put(client, &item, 1, &options, &status);
        done += status == KVF_OK || status == KVF_EXISTS;
    }
    return done;
}

int main(int argc, char **argv)
{
    struct kvf_options options = {.struct_bytes = sizeof(options), .profile = "bytes"};
    struct kvf_client *client = NULL;
    size_t bytes = argc == 4 ? strtoul(argv[3], NULL, 10) : 0;
    void *payload = calloc(1, bytes + 1);
    uint32_t n;

    if (bytes == 0 || payload == NULL) {
        return 2;
    }
    options.socket_path = argv[1];
    options.namespace_label = argv[2];
    if (kvf_open(&options, &client) != KVF_OK) {
        fprintf(stderr, "cannot attach\n");
        return 1;
    }
    while (scanf("%u", &n) == 1 && n <= BLOCKS_MAX) {
        struct kvf_lookup_result result = {0};
        uint32_t fetched;

        for (uint32_t i = 0; i < n; i++) {
            unsigned long long number;

            if (scanf("%llu", &number) != 1) {
                return 2;
            }
            keys[i] = kvf_test_key(number, &names[i]);
        }
        if (kvf_lookup(client, keys, n, NULL, &result) < 0) {
            fprintf(stderr, "lookup fails\n");
            return 1;
        }
        fetched = fetch(client, result.run_chunks);
        printf("%u %u %u\n", result.run_chunks, fetched,
               put(client, result.run_chunks, n, payload, bytes));
    }
    kvf_close(client);
    free(payload);
    return 0;
}
