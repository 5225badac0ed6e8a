/* SPDX-License-Identifier: Apache-2.0
 *
 * engine.c: an engine in a container of its own, for test_container.py: puts blocks out of one
 * buffer, fetches the last one, and says by how much its memory cgroup has grown meanwhile.
 *
 *   container_engine SOCKET USAGE_FILE GIB
 *
 * USAGE_FILE is memory.current, or memory.usage_in_bytes under cgroup v1. Prints
 * "start BYTES grown BYTES".
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvferry.h"

#define BLOCK_BYTES  (1ull << 20)
#define BLOCKS_A_GIB 1024

static uint8_t block[BLOCK_BYTES];

static uint64_t usage_bytes(const char *path)
{
    FILE *file = fopen(path, "r");
    uint64_t bytes = 0;

    if (file == NULL || fscanf(file, "%" SCNu64, &bytes) != 1) {
        fprintf(stderr, "%s cannot be read\n", path);
        exit(2);
    }
    fclose(file);
    return bytes;
}

/* Every block has its own first and last bytes, by which the daemon and we tell them apart. */
static void mark(uint64_t number)
{
    memcpy(block, &number, sizeof(number));
    memcpy(block + sizeof(block) - sizeof(number), &number, sizeof(number));
}

static int put(struct kvf_client *client, uint64_t number)
{
    char name[32] = "container engine";
    struct kvf_put_item item = {
        .struct_bytes = sizeof(item),
        .source = KVF_SOURCE_BYTES,
        .key = {name, sizeof(name)},
        .data = block,
        .data_bytes = sizeof(block),
    };

    memcpy(name + 24, &number, sizeof(number));
    mark(number);
    return kvf_put(client, &item, 1, NULL, NULL);
}

static int check_last(struct kvf_client *client, uint64_t number)
{
    char name[32] = "container engine";
    struct kvf_key key = {name, sizeof(name)};
    struct kvf_hit hit;
    int status;
    int differs;

    memcpy(name + 24, &number, sizeof(number));
    status = kvf_get(client, &key, 1, NULL, &hit);
    if (status != KVF_OK) {
        return status;
    }
    differs = hit.payload_bytes != sizeof(block) || memcmp(hit.payload, block, sizeof(block)) != 0;
    status = kvf_lease_release(client, hit.lease);
    return differs ? KVF_ERR_CORRUPT : status;
}

int main(int argc, char **argv)
{
    struct kvf_options options;
    struct kvf_client *client;
    uint64_t blocks, start_bytes, end_bytes;
    int status;

    if (argc != 4) {
        fprintf(stderr, "usage: container_engine SOCKET USAGE_FILE GIB\n");
        return 2;
    }
    blocks = strtoull(argv[3], NULL, 10) * BLOCKS_A_GIB;
    kvf_options_init(&options);
    options.socket_path = argv[1];
    options.profile = "bytes";
    status = kvf_open(&options, &client);
    memset(block, 0x5a, sizeof(block)); /* its pages are there before the count begins */
    start_bytes = usage_bytes(argv[2]);
    for (uint64_t i = 0; i < blocks && status == KVF_OK; i++) {
        status = put(client, i);
    }
    end_bytes = usage_bytes(argv[2]);
    if (status == KVF_OK) {
        status = check_last(client, blocks - 1);
    }
    if (status != KVF_OK) {
        fprintf(stderr, "engine: %s\n", kvf_status_text(status));
        return 1;
    }
    kvf_close(client);
    printf("start %" PRIu64 " grown %" PRId64 "\n", start_bytes,
           (int64_t)(end_bytes - start_bytes));
    return 0;
}
