/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_gpu_calls.c: kvf_gpu_put and kvf_gpu_get of 8,192 tokens of Llama-3.1-8B, one client and
 * one daemon, from pages of 16 tokens to where a get finds them and back.
 *
 *   bench_gpu_calls [--seconds N] [--pairs N] [--only NAME] [--group MIB] [--window MIB]
 *                   [--depth N]
 *
 * --group, --window: of copies on the way in, and of all that are in flight; else the library's.
 *
 * hbm_hit: the blocks lie in the daemon's share of the GPU's memory, six requests (or as many as
 * --depth says; leases bound them) are in flight;
 * "copy" is a copy inside the GPU that reads and writes as many bytes in all as the hits read and
 * write.
 *
 * "Ideal" is the link's speed for one plain copy of the same encoded bytes, times what a byte of
 * them stands for. Figures are GB of bf16 KV a second, and processors that client and daemon keep
 * busy meanwhile.
 */
#include "tests/bench/bench.h"
#include "tests/bench/gpu_load.h"
#include "tests/support/daemon.h"

#include "base/clock.h"
#include "kvferry.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CHUNKS 32 /* 1 GiB of KV */

struct calls {
    struct kvf_gpu_device *gpu;
    struct gpu_load load; /* pages of the engine */
    uint64_t payloads;
    uint8_t *host; /* pinned, as large as all payloads */
    void *stream;

    struct kvf_test_daemon daemon;
    clockid_t daemon_clock; /* its CPU time */
    struct kvf_client *client;
    struct kvf_gpu *handle;
    struct kvf_gpu_region *region;
    uint64_t group_bytes; /* 0: the library's choice */
    uint64_t window_bytes;
    uint64_t spare; /* device memory, what copies write */
    uint32_t depth; /* requests for hits on the GPU */
    uint32_t in_flight;
    uint64_t next_key;
    double cpus; /* of the last puts */
};

static void must(int status, const char *what)
{
    if (status != KVF_OK) {
        bench_die("%s: %s", what, kvf_status_text(status));
    }
}

/* ----------------------------------------------------------------------------------------------
 * The engine
 */
static void open_region(struct calls *calls)
{
    const struct gpu_load *load = &calls->load;
    const struct kvf_geometry *geometry = &load->plan.geometry;
    void *layers[2][KVF_LAYERS_MAX];
    struct kvf_gpu_region_options options = {.struct_bytes = sizeof(options),
                                             .n_pages = load->n_pages,
                                             .tokens_a_page = GPU_PAGE_TOKENS};

    for (uint32_t layer = 0; layer < geometry->n_layers; layer++) {
        uint64_t at = load->pages + layer * load->layer_bytes;

        layers[0][layer] = (void *)(uintptr_t)at;
        layers[1][layer] = (void *)(uintptr_t)(at + geometry->dim_k * sizeof(uint16_t));
    }
    options.k = (struct kvf_tensor_view){layers[0], load->work.pages[0].page_stride_bytes,
                                         load->work.pages[0].token_stride_bytes,
                                         load->work.pages[0].head_stride_bytes};
    options.v = options.k;
    options.v.layers = layers[1];
    must(kvf_gpu_register(calls->handle, &options, &calls->region), "pages");
}

static void open_handle(struct calls *calls, enum kvf_gpu_pinning pinning)
{
    struct kvf_gpu_options gpu_options = {.struct_bytes = sizeof(gpu_options),
                                          .load_window_bytes = calls->window_bytes,
                                          .load_group_bytes = calls->group_bytes,
                                          .pinning = pinning};
    struct kvf_options options;

    kvf_test_client_options(&calls->daemon, &options);
    options.geometry = &calls->load.plan.geometry;
    options.profile = calls->load.plan.profile->name;
    options.flags = KVF_ATTACH_ALLOW_UNCALIBRATED;
    options.staging_bytes = UINT64_C(512) << 20;
    must(kvf_open(&options, &calls->client), "client");
    must(kvf_gpu_open(calls->client, &gpu_options, &calls->handle), "GPU");
    open_region(calls);
}

static void close_handle(struct calls *calls)
{
    calls->handle = kvf_gpu_close(calls->handle);
    calls->client = kvf_close(calls->client);
}

/* more: settings beside those of all, NULL-terminated, or NULL. */
static void start(struct calls *calls, const char *const *more, enum kvf_gpu_pinning pinning)
{
    const char *const sets[] = {"dram.bytes=4GiB",         "dram.area_bytes=128MiB",
                                "staging.total=2GiB",      "staging.client=1GiB",
                                "allow_uncalibrated=true", NULL};

    kvf_test_daemon_create(&calls->daemon, sets);
    while (more != NULL && *more != NULL) {
        kvf_test_daemon_set(&calls->daemon, *more++);
    }
    kvf_test_daemon_start(&calls->daemon);
    if (clock_getcpuclockid(calls->daemon.process.pid, &calls->daemon_clock) != 0) {
        bench_die("the daemon's CPU time cannot be read");
    }
    open_handle(calls, pinning);
}

static void stop(struct calls *calls)
{
    close_handle(calls);
    kvf_test_daemon_destroy(&calls->daemon);
}

/* ----------------------------------------------------------------------------------------------
 * Requests
 */
struct name {
    char text[24];
};

static struct kvf_key name_of(uint64_t number, struct name *name)
{
    (void)snprintf(name->text, sizeof(name->text), "gpu-bench-%013llu", (unsigned long long)number);
    return (struct kvf_key){name->text, sizeof(name->text) - 1};
}

/* Take one event. True: it ended a request. */
static bool take_event(struct calls *calls, uint8_t *tier_out)
{
    struct kvf_gpu_event event;
    uint32_t n;

    must(kvf_gpu_poll(calls->handle, &event, 1, 20000, &n), "poll");
    must(event.status, "a request");
    if (tier_out != NULL && event.kind == KVF_GPU_EVENT_BLOCK) {
        *tier_out = event.tier;
    }
    return event.kind == KVF_GPU_EVENT_REQUEST;
}

/* All chunks under keys from `first` on, as fast as ring and staging take them. */
static void put_all(struct calls *calls, uint64_t first)
{
    struct kvf_gpu_put_item items[CHUNKS];
    struct name names[CHUNKS];
    uint32_t in_flight = 0;
    uint32_t at = 0;

    for (uint32_t i = 0; i < CHUNKS; i++) {
        items[i] = (struct kvf_gpu_put_item){
            .struct_bytes = sizeof(items[i]),
            .n_pages = GPU_CHUNK_TOKENS / GPU_PAGE_TOKENS,
            .key = name_of(first + i, &names[i]),
            .token_start = i * GPU_CHUNK_TOKENS,
            .pages = calls->load.page_ids + i * (GPU_CHUNK_TOKENS / GPU_PAGE_TOKENS),
        };
    }
    while (at < CHUNKS || in_flight > 0) {
        struct kvf_put_options options = {
            .struct_bytes = sizeof(options), .depth = at, .flags = KVF_PUT_NO_WRITE};
        uint32_t taken = 0;
        uint64_t request;
        int status = KVF_ERR_BUSY;

        if (at > 0) {
            options.parent = items[at - 1].key;
        }
        if (at < CHUNKS) {
            status = kvf_gpu_put(calls->handle, calls->region, items + at, CHUNKS - at, &options,
                                 NULL, NULL, 0, &taken, &request);
        }
        if (status == KVF_OK) {
            at += taken;
            in_flight++;
        } else if (status == KVF_ERR_BUSY && in_flight > 0) {
            in_flight -= take_event(calls, NULL);
        } else {
            must(status, "put");
        }
    }
}

static void get_begin(struct calls *calls, uint64_t first)
{
    struct kvf_gpu_get_item items[CHUNKS];
    struct name names[CHUNKS];
    uint64_t request;

    for (uint32_t i = 0; i < CHUNKS; i++) {
        items[i] = (struct kvf_gpu_get_item){
            .struct_bytes = sizeof(items[i]),
            .n_pages = GPU_CHUNK_TOKENS / GPU_PAGE_TOKENS,
            .key = name_of(first + i, &names[i]),
            .pages = calls->load.page_ids + i * (GPU_CHUNK_TOKENS / GPU_PAGE_TOKENS),
        };
    }
    must(kvf_gpu_get(calls->handle, calls->region, items, CHUNKS, NULL, NULL, NULL, 0, &request),
         "get");
}

/* Wait for one request. True: the GPU's own memory had all of it. */
static bool get_end(struct calls *calls)
{
    uint8_t tier = KVF_TIER_HBM;
    bool is_over = false;
    bool was_there = true;

    while (!is_over) {
        is_over = take_event(calls, &tier);
        was_there = was_there && tier == KVF_TIER_HBM;
    }
    return was_there;
}

static void get_all(struct calls *calls, uint64_t first)
{
    get_begin(calls, first);
    (void)get_end(calls);
}

/* ----------------------------------------------------------------------------------------------
 * Sides
 */
static double cpu_s(const struct calls *calls)
{
    struct timespec time;

    if (clock_gettime(calls->daemon_clock, &time) != 0) {
        bench_die("the daemon is gone");
    }
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9 + bench_cpu_s();
}

/* Repeat until the time is over. GB of KV a second. */
static double repeat(struct calls *calls, double seconds, void (*once)(struct calls *))
{
    uint64_t begun_ns = kvf_now_ns();
    double begun_s = cpu_s(calls);
    uint64_t bytes = 0;
    uint64_t ns;

    do {
        once(calls);
        bytes += calls->load.kv_bytes;
        ns = kvf_now_ns() - begun_ns;
    } while ((double)ns < seconds * 1e9);
    calls->cpus = (cpu_s(calls) - begun_s) / ((double)ns / 1e9);
    return bench_gb_s(bytes, ns);
}

static void put_new(struct calls *calls)
{
    put_all(calls, calls->next_key);
    calls->next_key += CHUNKS;
}

/* What was put last. */
static void get_newest(struct calls *calls)
{
    get_all(calls, calls->next_key - CHUNKS);
}

static void copy(struct calls *calls, bool is_out)
{
    const struct kvf_gpu_driver *driver = &calls->gpu->driver;
    uint64_t bytes = gpu_load_payloads_bytes(&calls->load);

    gpu_must(calls->gpu,
             is_out ? driver->cuMemcpyDtoHAsync(calls->host, calls->payloads, bytes, calls->stream)
                    : driver->cuMemcpyHtoDAsync(calls->payloads, calls->host, bytes, calls->stream),
             "copy");
    gpu_must(calls->gpu, driver->cuStreamSynchronize(calls->stream), "copy");
}

static void copy_out(struct calls *calls)
{
    copy(calls, true);
}

static void copy_in(struct calls *calls)
{
    copy(calls, false);
}

/* A request more, and one less of those in flight. */
static void get_in_step(struct calls *calls)
{
    while (calls->in_flight < calls->depth) {
        get_begin(calls, calls->next_key - CHUNKS);
        calls->in_flight++;
    }
    if (!get_end(calls)) {
        bench_die("a block is not where it was in the GPU's memory");
    }
    calls->in_flight--;
}

static double hbm_hit(void *ctx, double seconds)
{
    struct calls *calls = ctx;
    double gb_s;

    /* from one end of a request to another, with others under way at both */
    for (uint32_t i = 0; i < calls->depth; i++) {
        get_in_step(calls);
    }
    gb_s = repeat(calls, seconds, get_in_step);
    while (calls->in_flight > 0) { /* neither side has them */
        (void)get_end(calls);
        calls->in_flight--;
    }
    return gb_s;
}

static uint64_t half_of_traffic(const struct calls *calls)
{
    return (calls->load.kv_bytes + gpu_load_payloads_bytes(&calls->load)) / 2;
}

static void copy_inside(struct calls *calls)
{
    gpu_must(calls->gpu,
             calls->gpu->driver.cuMemcpyDtoDAsync(calls->spare, calls->load.pages,
                                                  half_of_traffic(calls), calls->stream),
             "copy");
    gpu_must(calls->gpu, calls->gpu->driver.cuStreamSynchronize(calls->stream), "copy");
}

#define SIDE(name, once)                                                                           \
    static double name(void *ctx, double seconds)                                                  \
    {                                                                                              \
        return repeat(ctx, seconds, once);                                                         \
    }
SIDE(put, put_new)
SIDE(get, get_newest)
SIDE(plain_out, copy_out)
SIDE(plain_in, copy_in)
SIDE(plain_inside, copy_inside)

static double put_cpus(void *ctx, double seconds)
{
    struct calls *calls = ctx;

    (void)put(calls, seconds);
    return calls->cpus;
}

/* ----------------------------------------------------------------------------------------------
 * Figures
 */
static void init(struct calls *calls)
{
    calls->gpu = gpu_open();
    calls->payloads = gpu_memory(calls->gpu, CHUNKS * (uint64_t)(16 << 20));
    gpu_load_init(&calls->load, calls->gpu, GPU_LLAMA_8B, "balanced", CHUNKS, calls->payloads);
    calls->host = gpu_host_memory(calls->gpu, gpu_load_payloads_bytes(&calls->load));
    calls->stream = gpu_stream(calls->gpu, KVF_GPU_PRIORITY_LOW);
    calls->next_key = 1;
}

/* Hits where they lie. */
static void measure_hbm(struct bench_run *run, struct calls *calls)
{
    static const char *const more[] = {"gpu.devices=all", "gpu.hbm_bytes=8GiB",
                                       "gpu.promote_hits=1", NULL};
    uint64_t deadline_ns = kvf_now_ns() + 60 * KVF_NS_PER_S;
    bool is_there;

    start(calls, more, KVF_GPU_PIN_LAZY);
    calls->spare = gpu_memory(calls->gpu, half_of_traffic(calls));
    put_new(calls);
    do {
        get_begin(calls, calls->next_key - CHUNKS);
        is_there = get_end(calls);
        if (kvf_now_ns() > deadline_ns) {
            bench_die("blocks do not get into the GPU's memory: see the daemon's log");
        }
    } while (!is_there);
    bench_pairs(run, "hbm_hit_vs_copy", hbm_hit, plain_inside, calls);
    gpu_must(calls->gpu, calls->gpu->driver.cuMemFree(calls->spare), "cuMemFree");
    stop(calls);
}

int main(int argc, char **argv)
{
    static const char *const eight[] = {"workers=8", NULL};
    static struct calls calls;
    struct bench_run run;

    bench_init(&run, argc, argv);
    calls.group_bytes = bench_number(&run, "--group", 0) << 20;
    calls.window_bytes = bench_number(&run, "--window", 0) << 20;
    calls.depth = (uint32_t)bench_number(&run, "--depth", 6);
    init(&calls);
    start(&calls, NULL, KVF_GPU_PIN_LAZY);
    put_new(&calls); /* pins, and loads kernels */
    bench_pairs(&run, "put_stored_vs_ideal", put, plain_out, &calls);
    bench_values(&run, "put_stored_cpus", put_cpus, &calls);
    get_newest(&calls);
    bench_pairs(&run, "get_pages_vs_ideal", get, plain_in, &calls);
    close_handle(&calls);
    open_handle(&calls, KVF_GPU_PIN_WINDOW);
    get_newest(&calls);
    bench_pairs(&run, "get_window_vs_ideal", get, plain_in, &calls);
    stop(&calls);

    start(&calls, eight, KVF_GPU_PIN_WINDOW);
    put_new(&calls);
    bench_pairs(&run, "put_stored_8_vs_ideal", put, plain_out, &calls);
    bench_values(&run, "put_stored_8_cpus", put_cpus, &calls);
    stop(&calls);
    measure_hbm(&run, &calls);
    return 0;
}
