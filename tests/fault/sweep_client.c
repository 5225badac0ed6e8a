/* SPDX-License-Identifier: Apache-2.0
 *
 * sweep_client.c: calls of the client library fail, beside an unharmed daemon. Whatever fails, the
 * caller gets a status that says so, a handle that goes on or can be closed, and keeps no memory,
 * descriptor or mapping.
 */
#include "tests/fault/sweep.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "tests/support/blocks.h"
#include "tests/support/daemon.h"

#define BLOCK_BYTES 5000u
#define OURS                                                                                       \
    (SWEEP_BIT(SWEEP_ALLOC) | SWEEP_BIT(SWEEP_MAP) | SWEEP_BIT(SWEEP_FD) |                         \
     SWEEP_BIT(SWEEP_SOCKET) | SWEEP_BIT(SWEEP_BUSY) | SWEEP_BIT(SWEEP_INTERRUPT))
#define RECOVER_NS (10 * KVF_NS_PER_S)

static struct kvf_test_daemon the_daemon;
static uint64_t the_number; /* of the next new block */

/* --- one chunk of a small model --------------------------------------------------------------- */

enum {
    LAYERS = 2,
    HEADS = 2,
    DIM = 64,
    TOKENS = 16,
    LAYER_BYTES = TOKENS * HEADS * DIM * 2,
};

struct pages {
    uint16_t k[LAYERS][LAYER_BYTES / 2];
    uint16_t v[LAYERS][LAYER_BYTES / 2];
    void *layers_k[LAYERS];
    void *layers_v[LAYERS];
    struct kvf_kv_view view;
};

static struct pages written, loaded;

static const struct kvf_geometry geometry = {.struct_bytes = sizeof(geometry),
                                             .kind = KVF_KIND_KV,
                                             .dtype = KVF_DTYPE_BF16,
                                             .rope_state = KVF_ROPE_POST,
                                             .n_layers = LAYERS,
                                             .n_heads = HEADS,
                                             .dim_k = DIM,
                                             .dim_v = DIM,
                                             .chunk_tokens = TOKENS};

static struct kvf_tensor_view tensor_view(void *const *layers)
{
    return (struct kvf_tensor_view){.layers = layers,
                                    .page_stride_bytes = LAYER_BYTES,
                                    .token_stride_bytes = HEADS * DIM * 2,
                                    .head_stride_bytes = DIM * 2};
}

static void pages_init(struct pages *pages, uint64_t number)
{
    for (uint32_t i = 0; i < LAYERS; i++) {
        pages->layers_k[i] = pages->k[i];
        pages->layers_v[i] = pages->v[i];
        for (uint32_t e = 0; e < LAYER_BYTES / 2; e++) {
            pages->k[i][e] = (uint16_t)(0x3f80 + (number * 7 + i * 31 + e * 3) % 61);
            pages->v[i][e] = (uint16_t)(0xbf80 + (number * 5 + i * 17 + e) % 53);
        }
    }
    pages->view = (struct kvf_kv_view){.struct_bytes = sizeof(pages->view),
                                       .tokens_a_page = TOKENS,
                                       .k = tensor_view(pages->layers_k),
                                       .v = tensor_view(pages->layers_v)};
}

/* --- what a caller does ----------------------------------------------------------------------- */

static int open_client(bool has_geometry, struct kvf_client **client_out)
{
    struct kvf_options options;

    kvf_options_init(&options);
    options.socket_path = the_daemon.socket_path;
    options.client_name = "sweep";
    options.staging_bytes = 1 << 20;
    options.ring_entries = 64;
    options.connect_timeout_ms = 3000;
    options.geometry = has_geometry ? &geometry : NULL;
    *client_out = NULL;
    return kvf_open(&options, client_out);
}

static void judge(struct sweep_case *run, bool is_armed, const char *call, int status)
{
    if (is_armed) {
        sweep_judge(run, call, status);
    } else if (status < 0 || status == KVF_MISS) {
        sweep_wrong(run, "%s answers \"%s\" although nothing fails", call, kvf_status_name(status));
    }
}

/* Submit, and take every event. */
static int get_async(struct kvf_client *client, uint64_t number)
{
    struct kvf_test_key key_bytes;
    struct kvf_key key = kvf_test_key(number, &key_bytes);
    uint64_t deadline_ns = kvf_now_ns() + RECOVER_NS;
    uint64_t request;
    bool is_over = false;
    int result = KVF_MISS;
    int status = kvf_submit_get(client, &key, 1, NULL, 0, &request);

    if (status != KVF_OK) {
        return status;
    }
    while (!is_over && kvf_now_ns() < deadline_ns) {
        struct kvf_event events[4];
        uint32_t n = 0;

        (void)kvf_poll(client, events, 4, 100, &n);
        for (uint32_t i = 0; i < n; i++) {
            if (events[i].kind == KVF_EVENT_BLOCK) {
                result = kvf_test_hit_check(client, &events[i].hit, number, BLOCK_BYTES);
            } else {
                is_over = events[i].request == request;
            }
        }
    }
    return is_over ? result : KVF_ERR_INTERNAL; /* an event was lost */
}

static int put_staged(struct kvf_client *client, uint64_t number)
{
    struct kvf_put_item item = {.struct_bytes = sizeof(item), .source = KVF_SOURCE_STAGED};
    struct kvf_test_key key;
    struct kvf_stage stage;
    int32_t block_status = KVF_ERR_INTERNAL;
    int status = kvf_stage_acquire(client, BLOCK_BYTES, &stage);

    if (status != KVF_OK) {
        return status;
    }
    kvf_test_payload_fill(number, stage.payload, BLOCK_BYTES);
    status = kvf_stage_seal(client, &stage, BLOCK_BYTES);
    if (status == KVF_OK) {
        item.key = kvf_test_key(number, &key);
        item.stage = stage.stage;
        status = kvf_put(client, &item, 1, NULL, &block_status);
        status = status < 0 ? status : block_status;
    }
    if (status < 0) {
        (void)kvf_stage_release(client, stage.stage); /* it may have been given up already */
    }
    return status;
}

static void use_bytes(struct sweep_case *run, bool is_armed, struct kvf_client *client)
{
    struct kvf_lookup_options options = {.struct_bytes = sizeof(options),
                                         .flags = KVF_LOOKUP_LEASE};
    struct kvf_lookup_result result = {0};
    struct kvf_stat stat = {.struct_bytes = sizeof(stat)};
    struct kvf_test_key key_bytes;
    uint64_t first = the_number;
    struct kvf_key key = kvf_test_key(first, &key_bytes);
    uint64_t round_trip_ns;
    int status;

    the_number += 2;
    judge(run, is_armed, "ping", kvf_ping(client, 3000, &round_trip_ns));
    judge(run, is_armed, "put", sweep_put(client, first, BLOCK_BYTES, KVF_PUT_DURABLE));
    judge(run, is_armed, "staged put", put_staged(client, first + 1));
    (void)kvf_fd(client);
    status = kvf_lookup(client, &key, 1, &options, &result);
    judge(run, is_armed, "lookup", status);
    if (status >= 0 && result.lease != 0) {
        judge(run, is_armed, "release", kvf_lease_release(client, result.lease));
    }
    judge(run, is_armed, "get", sweep_get(client, first, BLOCK_BYTES, NULL));
    judge(run, is_armed, "submitted get", get_async(client, first + 1));
    judge(run, is_armed, "prefetch", kvf_prefetch(client, &key, 1, NULL));
    judge(run, is_armed, "stat", kvf_stat(client, &stat));
    judge(run, is_armed, "evict", kvf_evict(client, &key, 1, NULL));
}

static void use_geometry(struct sweep_case *run, bool is_armed, struct kvf_client *client)
{
    struct kvf_put_item item = {.struct_bytes = sizeof(item), .source = KVF_SOURCE_VIEW};
    uint64_t number = the_number++;
    struct kvf_test_key key_bytes;
    struct kvf_key key = kvf_test_key(number, &key_bytes);
    struct kvf_hit hit = {.status = KVF_ERR_INTERNAL};
    int status;

    pages_init(&written, number);
    pages_init(&loaded, number + 1);
    item.key = key;
    item.kv = &written.view;
    judge(run, is_armed, "encoded put", kvf_put(client, &item, 1, NULL, NULL));
    (void)kvf_get(client, &key, 1, NULL, &hit);
    status = hit.status;
    if (status == KVF_OK) {
        status = kvf_decode(client, hit.record, hit.record_bytes, 0, 0, 0, 0, &loaded.view);
        if (kvf_lease_release(client, hit.lease) == KVF_OK && status == KVF_OK &&
            (memcmp(written.k, loaded.k, sizeof(loaded.k)) != 0 ||
             memcmp(written.v, loaded.v, sizeof(loaded.v)) != 0)) {
            status = KVF_ERR_INTERNAL;
        }
    }
    judge(run, is_armed, "decoded get", status);
}

/* Attach, put, get and all the rest, twice. */
static void use_library(struct sweep_case *run, bool is_armed)
{
    for (int has_geometry = 0; has_geometry < 2; has_geometry++) {
        struct kvf_client *client;
        int status = open_client(has_geometry, &client);

        judge(run, is_armed, "open", status);
        if (status != KVF_OK && client != NULL) {
            sweep_wrong(run, "open fails and gives a handle");
        }
        if (status == KVF_OK && has_geometry) {
            use_geometry(run, is_armed, client);
        } else if (status == KVF_OK) {
            use_bytes(run, is_armed, client);
        }
        kvf_close(client);
    }
}

static void check_left(struct sweep_case *run, const struct sweep_holdings *before)
{
    struct sweep_holdings after;

    sweep_holdings_read(getpid(), &sweep_own_page, &after);
    if (after.n_fds != before->n_fds || after.n_maps != before->n_maps ||
        after.n_live != before->n_live) {
        sweep_wrong(run, "left over: %d descriptors, %d mappings, %d allocations",
                    (int)(after.n_fds - before->n_fds), (int)(after.n_maps - before->n_maps),
                    (int)(after.n_live - before->n_live));
    }
}

static void check_daemon(struct sweep_case *run)
{
    if (!kvf_test_daemon_is_alive(&the_daemon)) {
        sweep_wrong(run, "the daemon has ended");
    } else if (!kvf_test_daemon_wait_number(&the_daemon, "clients", 0, 10000) ||
               kvf_test_daemon_number(&the_daemon, "staging_used_bytes") != 0 ||
               kvf_test_daemon_number(&the_daemon, "metrics.leased_bytes") != 0) {
        sweep_wrong(run, "the daemon has not all back");
    }
}

/* --- the scenarios ---------------------------------------------------------------------------- */

static void client_begin(void)
{
    kvf_test_daemon_create(&the_daemon, NULL);
    kvf_test_daemon_start(&the_daemon);
}

static void client_end(void)
{
    kvf_test_daemon_destroy(&the_daemon);
}

static void client_run(struct sweep_case *run)
{
    struct sweep_holdings before;

    sweep_holdings_read(getpid(), &sweep_own_page, &before);
    sweep_arm(run, &sweep_own_page);
    use_library(run, true);
    sweep_disarm(run);
    check_left(run, &before);
    use_library(run, false);
    check_left(run, &before);
    check_daemon(run);
}

/* Put and get until both work: the handle must get there by itself. */
static void check_handle(struct sweep_case *run, struct kvf_client *client, uint64_t number)
{
    const struct timespec pause = {.tv_nsec = 2 * KVF_NS_PER_MS};
    uint64_t deadline_ns = kvf_now_ns() + RECOVER_NS;

    for (;;) {
        int status = sweep_put(client, number, BLOCK_BYTES, 0);

        if (status == KVF_OK || status == KVF_EXISTS) {
            status = sweep_get(client, number, BLOCK_BYTES, NULL);
        }
        if (status == KVF_OK) {
            return;
        }
        if (status == KVF_ERR_INTERNAL || kvf_now_ns() > deadline_ns) {
            sweep_wrong(run, "the handle does not come back: \"%s\"", kvf_status_name(status));
            return;
        }
        (void)nanosleep(&pause, NULL);
    }
}

/* The daemon has been killed and is back; calls fail while the handle attaches again. */
static void reconnect_run(struct sweep_case *run)
{
    uint64_t first = the_number;
    struct sweep_holdings before;
    struct kvf_client *client;

    the_number += 3;
    sweep_holdings_read(getpid(), &sweep_own_page, &before);
    if (open_client(false, &client) != KVF_OK ||
        sweep_put(client, first, BLOCK_BYTES, KVF_PUT_DURABLE) != KVF_OK) {
        sweep_wrong(run, "no first attach");
        return;
    }
    kvf_test_daemon_kill(&the_daemon);
    kvf_test_daemon_start(&the_daemon);
    sweep_arm(run, &sweep_own_page);
    check_handle(run, client, first + 1);
    sweep_disarm(run);
    check_handle(run, client, first + 2);
    if (sweep_get(client, first, BLOCK_BYTES, NULL) != KVF_OK) {
        sweep_wrong(run, "what was durable is not there");
    }
    kvf_close(client);
    check_left(run, &before);
    check_daemon(run);
}

const struct sweep_scenario sweep_client_scenarios[] = {
    {"client", OURS, client_begin, client_run, client_end},
    {"client_reconnect", OURS, client_begin, reconnect_run, client_end},
};
const size_t sweep_client_scenarios_count = sizeof(sweep_client_scenarios) /
                                            sizeof(sweep_client_scenarios[0]);
