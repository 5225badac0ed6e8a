/* SPDX-License-Identifier: Apache-2.0
 *
 * 02_async.c: many blocks in flight from one thread: submit, poll, and what to do when the daemon
 * says "busy".
 *
 *   cc 02_async.c $(pkg-config --cflags --libs libkvferry) && ./a.out [SOCKET]
 */
#include <kvferry.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BLOCKS      64
#define BLOCK_BYTES (256 * 1024)
#define IN_FLIGHT   8
#define POLL_MS     5000

static uint8_t block[BLOCK_BYTES];
static uint8_t loaded[BLOCK_BYTES];
static int wrong_count, miss_count;

static void fill(uint8_t *out, unsigned number)
{
    for (size_t i = 0; i < BLOCK_BYTES; i++) {
        out[i] = (uint8_t)(number * 31 + i * 7 + (i >> 8));
    }
}

static void make_key(unsigned number, uint8_t key_out[32])
{
    memset(key_out, 0, 32);
    memcpy(key_out, "example 02", 10);
    memcpy(key_out + 28, &number, sizeof(number));
}

static int submit_put(struct kvf_client *client, unsigned number)
{
    uint8_t key[32];
    struct kvf_put_item item = {.struct_bytes = sizeof(item), .source = KVF_SOURCE_BYTES};
    uint64_t request;

    make_key(number, key);
    fill(block, number);
    item.key = (struct kvf_key){key, sizeof(key)};
    item.data = block; /* copied into staging before the call returns */
    item.data_bytes = BLOCK_BYTES;
    return kvf_submit_put(client, &item, 1, NULL, number, &request);
}

static int submit_get(struct kvf_client *client, unsigned number)
{
    uint8_t bytes[32];
    struct kvf_key key = {bytes, sizeof(bytes)};
    uint64_t request;

    make_key(number, bytes);
    return kvf_submit_get(client, &key, 1, NULL, number, &request);
}

/* One block of a get: copy, give the lease back, compare. A miss is no error. */
static void take_block(struct kvf_client *client, const struct kvf_event *event)
{
    if (event->hit.status != KVF_OK) {
        miss_count++;
        return;
    }
    if (event->hit.payload_bytes == BLOCK_BYTES) {
        memcpy(loaded, event->hit.payload, BLOCK_BYTES);
    }
    if (kvf_lease_release(client, event->hit.lease) != KVF_OK) {
        miss_count++; /* the bytes may have changed while they were copied */
        return;
    }
    fill(block, (unsigned)event->user);
    wrong_count += event->hit.payload_bytes != BLOCK_BYTES ||
                   memcmp(block, loaded, BLOCK_BYTES) != 0;
}

/* Keep IN_FLIGHT requests going until all blocks are done. */
static int run(struct kvf_client *client, int (*submit)(struct kvf_client *, unsigned), int is_get)
{
    unsigned next = 0;
    unsigned in_flight = 0;

    while (next < BLOCKS || in_flight > 0) {
        struct kvf_event events[16];
        uint32_t n = 0;
        int status = KVF_OK;

        while (next < BLOCKS && in_flight < IN_FLIGHT) {
            status = submit(client, next);
            if (status != KVF_OK) {
                break;
            }
            next++;
            in_flight++;
        }
        /* Busy means that staging or credits are in use by what is in flight: poll gives them
         * back. Everything else is a failure. */
        if (status != KVF_OK && (status != KVF_ERR_BUSY || in_flight == 0)) {
            return status;
        }
        status = kvf_poll(client, events, 16, POLL_MS, &n);
        if (status != KVF_OK) {
            return status;
        }
        for (uint32_t i = 0; i < n; i++) {
            if (events[i].kind == KVF_EVENT_REQUEST) {
                in_flight--;
            } else if (is_get) {
                take_block(client, &events[i]);
            } else if (events[i].hit.status < 0) {
                return events[i].hit.status;
            }
        }
    }
    return KVF_OK;
}

int main(int argc, char **argv)
{
    struct kvf_options options;
    struct kvf_client *client;
    int status;

    kvf_options_init(&options);
    options.socket_path = argc > 1 ? argv[1] : NULL;
    options.namespace_label = "example 02"; /* no geometry: blocks are opaque bytes */
    status = kvf_open(&options, &client);
    if (status == KVF_OK) {
        status = run(client, submit_put, 0);
        if (status == KVF_OK) {
            status = run(client, submit_get, 1);
        }
        kvf_close(client);
    }
    if (status != KVF_OK) {
        fprintf(stderr, "%s: %s\n", kvf_status_name(status), kvf_status_text(status));
        return 1;
    }
    printf("%d blocks of %d KiB: %d misses, %d wrong\n", BLOCKS, BLOCK_BYTES / 1024, miss_count,
           wrong_count);
    return wrong_count == 0 && miss_count == 0 ? 0 : 1;
}
