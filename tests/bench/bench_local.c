/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_local.c: one client and one daemon on one machine, blocks of 1 MiB in memory.
 *
 *   bench_local --socket PATH --daemon-pid PID --working-set BYTES [--redis PATH]
 *               [--seconds N] [--pairs N]
 */
#include "tests/bench/local.h"

#include "base/clock.h"

#include <dirent.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EVENTS    16
#define POLL_MS   10000
#define CHAIN_MAX 16

/* ----------------------------------------------------------------------------------------------
 * Blocks and handles
 */
struct kvf_key local_key(uint64_t number, struct local_key *key_out)
{
    *key_out = (struct local_key){.words = {number, ~number, number << 32, 0x6b766672}};
    return (struct kvf_key){.data = key_out, .bytes = sizeof(*key_out)};
}

static void print_log(void *arg, int severity, const char *text)
{
    (void)arg;
    if (severity <= 1) {
        fprintf(stderr, "libkvferry: %s\n", text);
    }
}

struct kvf_client *local_open(const struct local *local, uint32_t flags, uint64_t staging_bytes)
{
    struct kvf_options options;
    struct kvf_client *client;
    int status;

    kvf_options_init(&options);
    options.socket_path = local->socket_path;
    options.client_name = "bench";
    options.flags = flags | KVF_ATTACH_NO_RECONNECT;
    options.staging_bytes = staging_bytes;
    options.log = print_log;
    status = kvf_open(&options, &client);
    if (status != KVF_OK) {
        bench_die("cannot attach to %s: %s", local->socket_path, kvf_status_text(status));
    }
    return client;
}

void local_order_restart(struct local *local)
{
    local->order_serial = 0;
    local_order_next(local);
}

void local_order_next(struct local *local)
{
    bench_shuffle(local->order, local->n_blocks, local->order_serial++);
}

void local_check(const struct local *local, uint64_t block, const void *data)
{
    if (bench_sum(data, LOCAL_BLOCK_BYTES) != local->sums[block]) {
        bench_die("block %" PRIu64 " has wrong bytes", block);
    }
}

static void place_daemon(const struct local *local, int cpu)
{
    char path[64];
    struct dirent *entry;
    DIR *tasks;

    snprintf(path, sizeof(path), "/proc/%d/task", (int)local->daemon_pid);
    tasks = opendir(path);
    if (tasks == NULL) {
        bench_die("%s: the daemon is gone", path);
    }
    while ((entry = readdir(tasks)) != NULL) {
        if (entry->d_name[0] != '.') {
            bench_pin((int)strtol(entry->d_name, NULL, 10), cpu);
        }
    }
    closedir(tasks);
}

bool local_place(const struct local *local, bool apart)
{
    int theirs = bench_cpu(1);

    if (theirs < 0) {
        return false;
    }
    bench_pin(0, apart ? bench_cpu(0) : -1);
    place_daemon(local, apart ? theirs : -1);
    return true;
}

/* ----------------------------------------------------------------------------------------------
 * Requests in flight
 */
struct pipe_state {
    struct local *local;
    const struct local_pipe *pipe;
    uint64_t deadline_ns;
    uint64_t next; /* position in the order */
    uint64_t n_blocks;
    uint32_t in_flight;
    bool is_over;
};

static void pipe_fill(struct pipe_state *state)
{
    struct local *local = state->local;
    uint64_t request;
    int status;

    while (!state->is_over && state->in_flight < LOCAL_DEPTH) {
        if (state->next + state->pipe->blocks_a_request > local->n_blocks) {
            state->is_over = kvf_now_ns() >= state->deadline_ns;
            state->next = 0;
            if (!state->is_over) {
                local_order_next(local);
            }
            continue;
        }
        status = state->pipe->submit(local, state->next, &request);
        if (status == KVF_ERR_BUSY && state->in_flight > 0) {
            return;
        }
        if (status != KVF_OK) {
            bench_die("submit: %s", kvf_status_text(status));
        }
        state->next += state->pipe->blocks_a_request;
        state->in_flight++;
    }
}

uint64_t local_pipe_run(struct local *local, const struct local_pipe *pipe, double seconds,
                        uint64_t *elapsed_ns_out)
{
    uint64_t start_ns = kvf_now_ns();
    struct pipe_state state = {
        .local = local,
        .pipe = pipe,
        .deadline_ns = start_ns + (uint64_t)(seconds * 1e9),
    };

    pipe_fill(&state);
    while (state.in_flight > 0) {
        struct kvf_event events[EVENTS];
        uint32_t n;
        int status = kvf_poll(pipe->client, events, EVENTS, POLL_MS, &n);

        if (status != KVF_OK) {
            bench_die("poll: %s", kvf_status_text(status));
        }
        for (uint32_t i = 0; i < n; i++) {
            if (events[i].hit.status != KVF_OK) {
                bench_die("a block or request failed: %s", kvf_status_text(events[i].hit.status));
            }
            if (events[i].kind == KVF_EVENT_REQUEST) {
                state.in_flight--;
                pipe_fill(&state);
                continue;
            }
            state.n_blocks++;
            if (pipe->on_block != NULL) {
                pipe->on_block(local, &events[i]);
            }
        }
    }
    *elapsed_ns_out = kvf_now_ns() - start_ns;
    return state.n_blocks;
}

/* ----------------------------------------------------------------------------------------------
 * Gets
 */
static int submit_get(struct local *local, uint64_t position, uint64_t *request_out)
{
    struct local_key bytes;
    uint64_t block = local->order[position];
    struct kvf_key key = local_key(block, &bytes);

    return kvf_submit_get(local->client, &key, 1, NULL, block, request_out);
}

static int submit_chain(struct local *local, uint64_t position, uint64_t *request_out)
{
    struct local_key bytes[CHAIN_MAX];
    struct kvf_key keys[CHAIN_MAX];

    for (uint32_t i = 0; i < CHAIN_MAX; i++) {
        keys[i] = local_key(local->order[position + i], &bytes[i]);
    }
    return kvf_submit_get(local->client, keys, CHAIN_MAX, NULL, 0, request_out);
}

static void release(struct local *local, const struct kvf_event *event)
{
    if (kvf_lease_release(local->client, event->hit.lease) != KVF_OK) {
        bench_die("a lease was lost");
    }
}

static void read_and_release(struct local *local, const struct kvf_event *event)
{
    if (event->hit.payload_bytes != LOCAL_BLOCK_BYTES) {
        bench_die("a block has another size");
    }
    local_check(local, event->user, event->hit.payload);
    release(local, event);
}

static double get_touch(void *ctx, double seconds)
{
    struct local *local = ctx;
    struct local_pipe pipe = {local->client, submit_get, read_and_release, 1};
    uint64_t elapsed_ns;
    uint64_t n;

    local_order_restart(local);
    n = local_pipe_run(local, &pipe, seconds, &elapsed_ns);
    return bench_gb_s(n * LOCAL_BLOCK_BYTES, elapsed_ns);
}

/* The same with one request at a time and no waiting for it asleep. */
static double get_touch_one(void *ctx, double seconds)
{
    struct local *local = ctx;
    uint64_t start_ns = kvf_now_ns();
    uint64_t n = 0;

    local_order_restart(local);
    do {
        for (uint64_t i = 0; i < local->n_blocks; i++) {
            struct local_key bytes;
            struct kvf_key key = local_key(local->order[i], &bytes);
            struct kvf_hit hit;

            if (kvf_get(local->client, &key, 1, NULL, &hit) != KVF_OK) {
                bench_die("a block is missing");
            }
            local_check(local, local->order[i], hit.payload);
            if (kvf_lease_release(local->client, hit.lease) != KVF_OK) {
                bench_die("a lease was lost");
            }
        }
        n += local->n_blocks;
        local_order_next(local);
    } while ((double)(kvf_now_ns() - start_ns) < seconds * 1e9);
    return bench_gb_s(n * LOCAL_BLOCK_BYTES, kvf_now_ns() - start_ns);
}

static double read_private(void *ctx, double seconds)
{
    struct local *local = ctx;
    uint64_t start_ns = kvf_now_ns();
    uint64_t n = 0;

    local_order_restart(local);
    do {
        for (uint64_t i = 0; i < local->n_blocks; i++) {
            uint64_t block = local->order[i];

            local_check(local, block, local->source + block * LOCAL_BLOCK_BYTES);
        }
        n += local->n_blocks;
        local_order_next(local);
    } while ((double)(kvf_now_ns() - start_ns) < seconds * 1e9);
    return bench_gb_s(n * LOCAL_BLOCK_BYTES, kvf_now_ns() - start_ns);
}

static double daemon_cpu_s(const struct local *local)
{
    struct timespec time;

    if (clock_gettime(local->daemon_clock, &time) != 0) {
        bench_die("the daemon's CPU time cannot be read");
    }
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* CPU microseconds a block, of both processes. */
static double get_cpu_us(struct local *local, const struct local_pipe *pipe, double seconds)
{
    double begin_s;
    uint64_t elapsed_ns;
    uint64_t n;

    local_order_restart(local);
    begin_s = daemon_cpu_s(local) + bench_cpu_s();
    n = local_pipe_run(local, pipe, seconds, &elapsed_ns);
    return (daemon_cpu_s(local) + bench_cpu_s() - begin_s) * 1e6 / (double)n;
}

static double get_single_cpu_us(void *ctx, double seconds)
{
    struct local *local = ctx;
    struct local_pipe pipe = {local->client, submit_get, release, 1};

    return get_cpu_us(local, &pipe, seconds);
}

static double get_chain_cpu_us(void *ctx, double seconds)
{
    struct local *local = ctx;
    struct local_pipe pipe = {local->client, submit_chain, release, CHAIN_MAX};

    return get_cpu_us(local, &pipe, seconds);
}

/* Blocks as small as can be, four times as many as the daemon remembers the names of: between two
 * gets of one it has forgotten the name. */
#define SMALL_BLOCKS 16384
#define SMALL_FIRST  (UINT64_MAX / 2)
#define SMALL_BYTES  64
#define SMALL_BATCH  64

static struct kvf_key small_key(uint64_t number, struct local_key *key_out)
{
    return local_key(SMALL_FIRST + number, key_out);
}

static int submit_small(struct local *local, uint64_t position, uint64_t *request_out)
{
    struct local_key bytes;
    struct kvf_key key = small_key(local->order[position], &bytes);

    return kvf_submit_get(local->client, &key, 1, NULL, 0, request_out);
}

static void store_small(struct local *local)
{
    struct local_key bytes[SMALL_BATCH];
    struct kvf_put_item items[SMALL_BATCH];

    for (uint64_t first = 0; first < SMALL_BLOCKS; first += SMALL_BATCH) {
        int status;

        for (uint64_t i = 0; i < SMALL_BATCH; i++) {
            items[i] = (struct kvf_put_item){.struct_bytes = sizeof(items[i]),
                                             .source = KVF_SOURCE_BYTES,
                                             .key = small_key(first + i, &bytes[i]),
                                             .data = local->source,
                                             .data_bytes = SMALL_BYTES};
        }
        status = kvf_put(local->client, items, SMALL_BATCH, NULL, NULL);
        if (status != KVF_OK) {
            bench_die("put: %s", kvf_status_text(status));
        }
    }
}

/* The same as get_single_cpu_us for keys that come for the first time. */
static double get_new_cpu_us(void *ctx, double seconds)
{
    struct local *small = ctx;
    struct local_pipe pipe = {small->client, submit_small, release, 1};

    return get_cpu_us(small, &pipe, seconds);
}

static void measure_new(struct local *local)
{
    struct local small = *local;

    small.n_blocks = SMALL_BLOCKS;
    small.order = bench_memory(SMALL_BLOCKS * sizeof(*small.order), 0);
    store_small(&small);
    bench_values(&local->run, "get_new_cpu_us", get_new_cpu_us, &small);
    bench_memory_free(small.order, SMALL_BLOCKS * sizeof(*small.order));
}

/* ----------------------------------------------------------------------------------------------
 * All of it
 */
static void store_working_set(struct local *local)
{
    for (uint64_t i = 0; i < local->n_blocks; i++) {
        struct local_key bytes;
        struct kvf_put_item item = {
            .struct_bytes = sizeof(item),
            .source = KVF_SOURCE_BYTES,
            .key = local_key(i, &bytes),
            .data = local->source + i * LOCAL_BLOCK_BYTES,
            .data_bytes = LOCAL_BLOCK_BYTES,
        };
        int status = kvf_put(local->client, &item, 1, NULL, NULL);

        if (status != KVF_OK) {
            bench_die("put: %s", kvf_status_text(status));
        }
    }
    local->next_key = local->n_blocks;
}

int main(int argc, char **argv)
{
    struct local local = {0};
    size_t bytes;

    bench_init(&local.run, argc, argv);
    local.socket_path = bench_text(&local.run, "--socket");
    local.redis_path = bench_text(&local.run, "--redis");
    local.daemon_pid = (pid_t)bench_number(&local.run, "--daemon-pid", 0);
    local.n_blocks = bench_number(&local.run, "--working-set", 0) / LOCAL_BLOCK_BYTES;
    if (local.socket_path == NULL || local.daemon_pid == 0 || local.n_blocks < CHAIN_MAX ||
        local.n_blocks > UINT32_MAX) {
        bench_die("usage: bench_local --socket PATH --daemon-pid PID --working-set BYTES (at least "
                  "32 MiB)");
    }
    if (clock_getcpuclockid(local.daemon_pid, &local.daemon_clock) != 0) {
        bench_die("no process %d", (int)local.daemon_pid);
    }
    bytes = local.n_blocks * LOCAL_BLOCK_BYTES;
    local.source = bench_memory(bytes, 1);
    local.target = bench_memory(bytes, 0);
    local.sums = bench_memory(local.n_blocks * sizeof(*local.sums), 0);
    local.order = bench_memory(local.n_blocks * sizeof(*local.order), 0);
    for (uint64_t i = 0; i < local.n_blocks; i++) {
        local.sums[i] = bench_sum(local.source + i * LOCAL_BLOCK_BYTES, LOCAL_BLOCK_BYTES);
    }
    local.client = local_open(&local, 0, 0);
    store_working_set(&local);

    bench_pairs(&local.run, "get_touch_vs_read", get_touch, read_private, &local);
    bench_pairs(&local.run, "get_touch_one_vs_read", get_touch_one, read_private, &local);
    bench_values(&local.run, "get_cpu_us", get_single_cpu_us, &local);
    measure_new(&local);
    bench_values(&local.run, "get_chain_cpu_us", get_chain_cpu_us, &local);
    local_latency(&local);
    local_redis(&local, get_touch);
    /* last: its blocks push out those that were stored above */
    local_puts(&local);

    kvf_close(local.client);
    bench_memory_free(local.source, bytes);
    bench_memory_free(local.target, bytes);
    bench_memory_free(local.sums, local.n_blocks * sizeof(*local.sums));
    bench_memory_free(local.order, local.n_blocks * sizeof(*local.order));
    return 0;
}
