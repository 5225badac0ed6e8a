/* SPDX-License-Identifier: Apache-2.0
 *
 * 01_put_get.c: store a block of KV and get it back, with blocking calls.
 *
 *   cc 01_put_get.c $(pkg-config --cflags --libs libkvferry) && ./a.out [SOCKET]
 */
#include <kvferry.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LAYERS 4
#define HEADS  2
#define DIM    64
#define TOKENS 16

/* The pages of a small engine: [layer][token][head][element], K and V apart, as bf16. */
static uint16_t k_pages[LAYERS][TOKENS][HEADS][DIM];
static uint16_t v_pages[LAYERS][TOKENS][HEADS][DIM];
static uint16_t k_loaded[LAYERS][TOKENS][HEADS][DIM];
static uint16_t v_loaded[LAYERS][TOKENS][HEADS][DIM];

static void print_log(void *arg, int severity, const char *text)
{
    (void)arg;
    (void)severity;
    fprintf(stderr, "libkvferry: %s\n", text);
}

/* Strides say where a vector is; a view holds for K and V of one chunk. */
static struct kvf_tensor_view tensor_view(void *const *layers)
{
    struct kvf_tensor_view view = {
        .layers = layers,
        .page_stride_bytes = sizeof(k_pages[0]),
        .token_stride_bytes = sizeof(k_pages[0][0]),
        .head_stride_bytes = sizeof(k_pages[0][0][0]),
    };

    return view;
}

/* "exact" gives back every bit; the weights' digest keeps models apart. */
static int attach(const char *socket_path, struct kvf_client **client_out)
{
    struct kvf_geometry geometry = {
        .struct_bytes = sizeof(geometry),
        .kind = KVF_KIND_KV,
        .dtype = KVF_DTYPE_BF16,
        .rope_state = KVF_ROPE_POST,
        .n_layers = LAYERS,
        .n_heads = HEADS,
        .dim_k = DIM,
        .dim_v = DIM,
        .chunk_tokens = TOKENS,
    };
    struct kvf_options options;

    kvf_options_init(&options);
    options.socket_path = socket_path;
    options.profile = "exact";
    options.geometry = &geometry;
    options.namespace_label = "example 01";
    memset(options.weights_digest, 0x11, sizeof(options.weights_digest));
    options.log = print_log;
    return kvf_open(&options, client_out);
}

/* A hit points into the daemon's memory. It may be read until the lease is given back, and the
 * bytes count only if the release, after the last read, says KVF_OK. */
static int load(struct kvf_client *client, struct kvf_key key, const struct kvf_kv_view *target)
{
    struct kvf_hit hit;
    int status = kvf_get(client, &key, 1, NULL, &hit);

    printf("get: %s\n", kvf_status_name(status));
    if (status != KVF_OK) {
        return status;
    }
    status = kvf_decode(client, hit.record, hit.record_bytes, 0, 0, 0, 0, target);
    if (kvf_lease_release(client, hit.lease) != KVF_OK) {
        status = KVF_ERR_LOST;
    }
    printf("decoded %zu bytes out of a record of %llu: %s\n", sizeof(k_loaded) + sizeof(v_loaded),
           (unsigned long long)hit.record_bytes, kvf_status_name(status));
    return status;
}

int main(int argc, char **argv)
{
    void *k_layers[LAYERS], *v_layers[LAYERS], *k_targets[LAYERS], *v_targets[LAYERS];
    struct kvf_kv_view source = {.struct_bytes = sizeof(source), .tokens_a_page = TOKENS};
    struct kvf_kv_view target = {.struct_bytes = sizeof(target), .tokens_a_page = TOKENS};
    struct kvf_put_item item = {.struct_bytes = sizeof(item), .source = KVF_SOURCE_VIEW};
    const char key[] = "0123456789abcdef"; /* an engine takes the hash of the chunk's last block */
    struct kvf_client *client;
    int status;

    for (int layer = 0; layer < LAYERS; layer++) {
        k_layers[layer] = k_pages[layer];
        v_layers[layer] = v_pages[layer];
        k_targets[layer] = k_loaded[layer];
        v_targets[layer] = v_loaded[layer];
    }
    for (size_t i = 0; i < sizeof(k_pages) / sizeof(uint16_t); i++) {
        ((uint16_t *)k_pages)[i] = (uint16_t)(0x3f80 + i % 251);
        ((uint16_t *)v_pages)[i] = (uint16_t)(0xbf80 + i % 241);
    }
    source.k = tensor_view(k_layers);
    source.v = tensor_view(v_layers);
    target.k = tensor_view(k_targets);
    target.v = tensor_view(v_targets);

    status = attach(argc > 1 ? argv[1] : NULL, &client);
    if (status != KVF_OK) {
        fprintf(stderr, "open: %s\n", kvf_status_text(status));
        return 1;
    }
    item.key = (struct kvf_key){key, sizeof(key) - 1};
    item.kv = &source;
    status = kvf_put(client, &item, 1, NULL, NULL);
    printf("put: %s\n", kvf_status_name(status));
    if (status == KVF_OK) {
        status = load(client, item.key, &target);
    }
    kvf_close(client);
    if (status != KVF_OK || memcmp(k_pages, k_loaded, sizeof(k_pages)) != 0 ||
        memcmp(v_pages, v_loaded, sizeof(v_pages)) != 0) {
        fprintf(stderr, "the KV did not come back\n");
        return 1;
    }
    printf("every bit came back\n");
    return 0;
}
