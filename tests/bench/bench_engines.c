/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_engines.c: put blocks into a store, or get them, as tests/bench/engines.py asks.
 *
 *   bench_engines --store kvferry|resp|copy --role put|get --block BYTES --blocks N
 *                 [--socket PATH]
 *
 * It prints "ready", and then a line for each line on standard input:
 *   move SERIAL N DEPTH  put or get the next N blocks, DEPTH of them in flight: "BYTES NS", and
 *                        with DEPTH 1 the nanoseconds of each block behind it
 *   drop SERIAL          remove what the last move has put: "ok"
 * A role for each process: what a getter reads was another process's.
 */
#include "tests/bench/engines.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "kvferry.h"
#include "tests/bench/bench.h"

#define LINE_BYTES 256

static const struct engines_store *const stores[] = {&engines_kvferry, &engines_resp,
                                                     &engines_copy};

struct engines_key engines_key(const struct engines *engines, uint64_t serial, uint32_t block)
{
    return (struct engines_key){.words = {serial, block, engines->block_bytes, 0x6b7665}};
}

uint8_t *engines_source(const struct engines *engines, uint32_t block)
{
    return engines->source + block * engines->block_bytes;
}

uint8_t *engines_target(const struct engines *engines, uint32_t block)
{
    return engines->target + block * engines->block_bytes;
}

void engines_read(const struct engines *engines, uint32_t block)
{
    if (bench_sum(engines_target(engines, block), engines->block_bytes) != engines->sums[block]) {
        bench_die("block %" PRIu32 " has wrong bytes", block);
    }
}

/* ----------------------------------------------------------------------------------------------
 * memcpy
 */
static void copy_open(struct engines *engines)
{
    size_t bytes = engines->n_blocks * engines->block_bytes;

    engines->store = bench_memory(bytes, engines->is_getter ? 1 : 0);
}

static void copy_put(struct engines *engines, uint64_t serial, const uint32_t *blocks, uint32_t n,
                     uint32_t depth)
{
    (void)serial;
    (void)depth;
    for (uint32_t i = 0; i < n; i++) {
        uint8_t *place = (uint8_t *)engines->store + blocks[i] * engines->block_bytes;

        memcpy(place, engines_source(engines, blocks[i]), engines->block_bytes);
        bench_keep(place);
    }
}

static void copy_get(struct engines *engines, uint64_t serial, const uint32_t *blocks, uint32_t n,
                     uint32_t depth)
{
    (void)serial;
    (void)depth;
    for (uint32_t i = 0; i < n; i++) {
        const uint8_t *place = (uint8_t *)engines->store + blocks[i] * engines->block_bytes;

        memcpy(engines_target(engines, blocks[i]), place, engines->block_bytes);
        engines_read(engines, blocks[i]);
    }
}

static void copy_drop(struct engines *engines, uint64_t serial, const uint32_t *blocks, uint32_t n)
{
    (void)engines;
    (void)serial;
    (void)blocks;
    (void)n;
}

static void copy_close(struct engines *engines)
{
    bench_memory_free(engines->store, engines->n_blocks * engines->block_bytes);
}

const struct engines_store engines_copy = {"copy",   copy_open, copy_put,
                                           copy_get, copy_drop, copy_close};

/* ----------------------------------------------------------------------------------------------
 * kvferry
 */
#define POLL_MS   60000
#define DEPTH_MAX 8

static void kvferry_open(struct engines *engines)
{
    struct kvf_options options;
    struct kvf_client *client;
    int status;

    kvf_options_init(&options);
    options.socket_path = engines->socket_path;
    options.client_name = "bench_engines";
    options.flags = KVF_ATTACH_NO_RECONNECT;
    options.staging_bytes = DEPTH_MAX * (engines->block_bytes + KVF_RECORD_PAGE_BYTES);
    status = kvf_open(&options, &client);
    if (status != KVF_OK) {
        bench_die("%s: %s", engines->socket_path, kvf_status_text(status));
    }
    engines->store = client;
}

static void check(int status, const char *what)
{
    if (status != KVF_OK) {
        bench_die("%s: %s", what, kvf_status_text(status));
    }
}

static void kvferry_submit(struct engines *engines, uint64_t serial, uint32_t block)
{
    struct kvf_client *client = engines->store;
    struct engines_key bytes = engines_key(engines, serial, block);
    struct kvf_key key = {.data = &bytes, .bytes = sizeof(bytes)};
    uint64_t request;

    if (engines->is_getter) {
        check(kvf_submit_get(client, &key, 1, NULL, block, &request), "get");
    } else {
        struct kvf_put_item item = {.struct_bytes = sizeof(item),
                                    .source = KVF_SOURCE_BYTES,
                                    .key = key,
                                    .data = engines_source(engines, block),
                                    .data_bytes = engines->block_bytes};

        check(kvf_submit_put(client, &item, 1, NULL, block, &request), "put");
    }
}

/* The caller's buffer has the bytes once the lease has been given back with KVF_OK. */
static void kvferry_take(struct engines *engines, const struct kvf_event *event)
{
    uint32_t block = (uint32_t)event->user;

    if (event->hit.payload_bytes != engines->block_bytes) {
        bench_die("block %" PRIu32 " has another size", block);
    }
    memcpy(engines_target(engines, block), event->hit.payload, engines->block_bytes);
    check(kvf_lease_release(engines->store, event->hit.lease), "release");
    engines_read(engines, block);
}

static void kvferry_move(struct engines *engines, uint64_t serial, const uint32_t *blocks,
                         uint32_t n, uint32_t depth)
{
    uint32_t n_sent = 0;
    uint32_t n_done = 0;

    while (n_done < n) {
        struct kvf_event events[2 * DEPTH_MAX];
        uint32_t n_events;

        while (n_sent < n && n_sent - n_done < depth) {
            kvferry_submit(engines, serial, blocks[n_sent++]);
        }
        check(kvf_poll(engines->store, events, 2 * DEPTH_MAX, POLL_MS, &n_events), "poll");
        for (uint32_t i = 0; i < n_events; i++) {
            check(events[i].hit.status, engines->is_getter ? "get" : "put");
            if (events[i].kind == KVF_EVENT_REQUEST) {
                n_done++;
            } else if (engines->is_getter) {
                kvferry_take(engines, &events[i]);
            }
        }
    }
}

static void kvferry_drop(struct engines *engines, uint64_t serial, const uint32_t *blocks,
                         uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        struct engines_key bytes = engines_key(engines, serial, blocks[i]);
        struct kvf_key key = {.data = &bytes, .bytes = sizeof(bytes)};

        check(kvf_evict(engines->store, &key, 1, NULL), "evict");
    }
}

static void kvferry_close(struct engines *engines)
{
    kvf_close(engines->store);
}

const struct engines_store engines_kvferry = {"kvferry",    kvferry_open, kvferry_move,
                                              kvferry_move, kvferry_drop, kvferry_close};

/* ----------------------------------------------------------------------------------------------
 * The command
 */
struct loop {
    struct engines engines;
    const struct engines_store *store;
    uint32_t *order;
    uint32_t next; /* position in the order */
    uint64_t n_orders;
    uint32_t first, n_moved; /* of the last move, positions in the order */
};

/* N blocks of the order that come next; a new order begins where too few are left. */
static void take_blocks(struct loop *loop, uint32_t n)
{
    if (n == 0 || n > loop->engines.n_blocks) {
        bench_die("%" PRIu32 " blocks of %" PRIu32, n, loop->engines.n_blocks);
    }
    if (loop->next + n > loop->engines.n_blocks) {
        bench_shuffle(loop->order, loop->engines.n_blocks, loop->n_orders++);
        loop->next = 0;
    }
    loop->first = loop->next;
    loop->n_moved = n;
    loop->next += n;
}

static void move(struct loop *loop, uint64_t serial, uint32_t depth)
{
    const uint32_t *blocks = &loop->order[loop->first];
    void (*all)(struct engines *, uint64_t, const uint32_t *, uint32_t,
                uint32_t) = loop->engines.is_getter ? loop->store->get_all : loop->store->put_all;
    uint64_t *ends_ns = bench_memory((loop->n_moved + 1) * sizeof(*ends_ns), 0);

    ends_ns[0] = kvf_now_ns();
    if (depth > 1) {
        all(&loop->engines, serial, blocks, loop->n_moved, depth);
        ends_ns[loop->n_moved] = kvf_now_ns();
    } else {
        for (uint32_t i = 0; i < loop->n_moved; i++) {
            all(&loop->engines, serial, &blocks[i], 1, 1);
            ends_ns[i + 1] = kvf_now_ns();
        }
    }
    printf("%" PRIu64 " %" PRIu64, loop->n_moved * loop->engines.block_bytes,
           ends_ns[loop->n_moved] - ends_ns[0]);
    for (uint32_t i = 0; i < loop->n_moved && depth == 1; i++) {
        printf(" %" PRIu64, ends_ns[i + 1] - ends_ns[i]);
    }
    printf("\n");
    bench_memory_free(ends_ns, (loop->n_moved + 1) * sizeof(*ends_ns));
}

static void answer(struct loop *loop, const char *line)
{
    uint64_t serial;
    uint32_t n, depth;

    if (sscanf(line, "move %" SCNu64 " %" SCNu32 " %" SCNu32, &serial, &n, &depth) == 3 &&
        depth > 0 && depth <= DEPTH_MAX) {
        take_blocks(loop, n);
        move(loop, serial, depth);
    } else if (sscanf(line, "drop %" SCNu64, &serial) == 1 && !loop->engines.is_getter) {
        loop->store->drop_all(&loop->engines, serial, &loop->order[loop->first], loop->n_moved);
        printf("ok\n");
    } else {
        bench_die("not a request: %s", line);
    }
}

static void open_loop(struct loop *loop, const struct bench_run *run)
{
    struct engines *engines = &loop->engines;
    const char *name = bench_text(run, "--store");
    const char *role = bench_text(run, "--role");
    size_t bytes;

    for (size_t i = 0; name != NULL && i < sizeof(stores) / sizeof(stores[0]); i++) {
        if (strcmp(name, stores[i]->name) == 0) {
            loop->store = stores[i];
        }
    }
    engines->socket_path = bench_text(run, "--socket");
    engines->block_bytes = bench_number(run, "--block", 0);
    engines->n_blocks = (uint32_t)bench_number(run, "--blocks", 0);
    engines->is_getter = role != NULL && strcmp(role, "get") == 0;
    if (loop->store == NULL || role == NULL || engines->block_bytes == 0 ||
        engines->block_bytes % sizeof(uint64_t) != 0 || engines->n_blocks == 0 ||
        (engines->socket_path == NULL && loop->store != &engines_copy)) {
        bench_die("usage: bench_engines --store kvferry|resp|copy --role put|get --block BYTES "
                  "--blocks N [--socket PATH]");
    }
    bytes = engines->n_blocks * engines->block_bytes;
    engines->source = bench_memory(bytes, 1);
    engines->sums = bench_memory(engines->n_blocks * sizeof(*engines->sums), 0);
    for (uint32_t i = 0; i < engines->n_blocks; i++) {
        engines->sums[i] = bench_sum(engines_source(engines, i), engines->block_bytes);
    }
    if (engines->is_getter) {
        bench_memory_free(engines->source, bytes);
        engines->source = NULL;
        engines->target = bench_memory(bytes, 0);
    }
    loop->order = bench_memory(engines->n_blocks * sizeof(*loop->order), 0);
    bench_shuffle(loop->order, engines->n_blocks, loop->n_orders++);
    loop->store->open(engines);
}

int main(int argc, char **argv)
{
    struct loop loop = {0};
    struct bench_run run;
    char line[LINE_BYTES];

    bench_init(&run, argc, argv);
    open_loop(&loop, &run);
    printf("ready\n");
    while (fgets(line, sizeof(line), stdin) != NULL) {
        answer(&loop, line);
    }
    loop.store->close(&loop.engines);
    return 0;
}
