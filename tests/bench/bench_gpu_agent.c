/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_gpu_agent.c: what puts by kvf_gpu_put cost an engine's loop, when this process encodes
 * (path ENGINE) and when a worker of the daemon does (path AGENT), with and without MPS.
 *
 *   bench_gpu_agent [--seconds N] [--pairs N] [--only NAME] [--suffix mps]
 *
 * The whole way is taken: daemon, staging, arena. A pair is one window of the loop alone and the
 * same window with puts at some rate, in alternating order; all steps of a window are queued at its
 * begin, so it has to be short (0.15 s), and puts are issued on time by this thread. Lines, whose
 * suffix says how the GPU was shared (with the control daemon of MPS started before, both this
 * program and the worker use it):
 *
 *   pair puts_LOOP_PATH_RATE[_SUFFIX] MS GIB     extra milliseconds, and GiB of bf16 KV encoded
 *
 * and for each its rate in truth, where the GPU could not follow:
 *
 *   value rate_LOOP_PATH_RATE[_SUFFIX] GB_S
 */
#include "tests/bench/bench.h"
#include "tests/bench/gpu_load.h"
#include "tests/bench/gpu_loops.h"
#include "tests/support/daemon.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"

#define CHUNKS 8 /* of a burst: 256 MiB of KV */
#define GIB    (double)(1 << 30)

static const uint32_t rates[] = {5, 20, 100}; /* GB of bf16 KV a second */

struct agent {
    struct kvf_test_daemon daemon;
    struct gpu_load load;
    struct gpu_loops loops;
    struct kvf_client *client;
    struct kvf_gpu *gpu;
    struct kvf_gpu_region *region;
    void *engine;
    void *begun;
    void *ended;
    uint32_t steps[LOOPS];
    enum gpu_loop loop;
    uint64_t serial;      /* of names */
    uint32_t n_in_flight; /* requests */
    uint64_t done_bytes;  /* of KV whose pages are free again */
};

static void must(int status, const char *what)
{
    if (status != KVF_OK) {
        bench_die("%s: %s", what, kvf_status_name(status));
    }
}

static void path_open(struct agent *agent, enum kvf_gpu_path path)
{
    const struct kvf_geometry *geometry = &agent->load.plan.geometry;
    struct kvf_gpu_options gpu_options = {
        .struct_bytes = sizeof(gpu_options), .burst_bytes = 256u << 20, .path = path};
    struct kvf_gpu_region_options region = {.struct_bytes = sizeof(region),
                                            .n_pages = agent->load.n_pages,
                                            .tokens_a_page = GPU_PAGE_TOKENS};
    void *layers[2][KVF_LAYERS_MAX];
    struct kvf_options options;

    kvf_test_client_options(&agent->daemon, &options);
    options.geometry = geometry;
    options.profile = agent->load.plan.profile->name;
    options.flags = KVF_ATTACH_ALLOW_UNCALIBRATED;
    options.staging_bytes = UINT64_C(512) << 20;
    must(kvf_open(&options, &agent->client), "client");
    must(kvf_gpu_open(agent->client, &gpu_options, &agent->gpu), "GPU");
    for (uint32_t layer = 0; layer < geometry->n_layers; layer++) {
        uint64_t at = agent->load.pages + layer * agent->load.layer_bytes;

        layers[0][layer] = (void *)(uintptr_t)at;
        layers[1][layer] = (void *)(uintptr_t)(at + geometry->dim_k * sizeof(uint16_t));
    }
    region.k = (struct kvf_tensor_view){layers[0], agent->load.work.pages[0].page_stride_bytes,
                                        agent->load.work.pages[0].token_stride_bytes,
                                        agent->load.work.pages[0].head_stride_bytes};
    region.v = region.k;
    region.v.layers = layers[1];
    must(kvf_gpu_register(agent->gpu, &region, &agent->region), "pages");
}

static void path_close(struct agent *agent)
{
    agent->gpu = kvf_gpu_close(agent->gpu);
    agent->client = kvf_close(agent->client);
}

/* Take what has happened. */
static void look(struct agent *agent)
{
    struct kvf_gpu_event events[64];
    uint32_t n = 0;

    (void)kvf_gpu_poll(agent->gpu, events, 64, 0, &n);
    for (uint32_t i = 0; i < n; i++) {
        if (events[i].kind == KVF_GPU_EVENT_PAGES_FREE && events[i].status == KVF_OK) {
            agent->done_bytes += agent->load.kv_bytes;
        }
        agent->n_in_flight -= events[i].kind == KVF_GPU_EVENT_REQUEST;
    }
}

/* Put one burst under new names. False: there is no room now. */
static bool put_burst(struct agent *agent)
{
    struct kvf_gpu_put_item items[CHUNKS];
    char names[CHUNKS][24];
    uint32_t pages_a_chunk = GPU_CHUNK_TOKENS / GPU_PAGE_TOKENS;
    uint64_t request;
    int status;

    for (uint32_t i = 0; i < CHUNKS; i++) {
        (void)snprintf(names[i], sizeof(names[i]), "gpu-agent-%013llu",
                       (unsigned long long)(agent->serial + i));
        items[i] = (struct kvf_gpu_put_item){
            .struct_bytes = sizeof(items[i]),
            .n_pages = pages_a_chunk,
            .key = {names[i], sizeof(names[i]) - 1},
            .token_start = (1 + i) * GPU_CHUNK_TOKENS, /* no sinks: all blocks of one size */
            .pages = agent->load.page_ids + i * pages_a_chunk,
        };
    }
    status = kvf_gpu_put(agent->gpu, agent->region, items, CHUNKS, NULL, NULL, NULL, 0, NULL,
                         &request);
    if (status != KVF_OK && status != KVF_ERR_BUSY) {
        bench_die("put: %s", kvf_status_name(status));
    }
    agent->serial += CHUNKS;
    agent->n_in_flight += status == KVF_OK;
    return status == KVF_OK;
}

/* One window, with n_bursts spread over it: its milliseconds. *bytes_out: of KV encoded in it. */
static double window_ms(struct agent *agent, uint32_t n_bursts, double seconds, double *bytes_out)
{
    struct kvf_gpu_device *gpu = agent->loops.gpu;
    uint64_t begun_ns;
    uint32_t put = 0;

    while (agent->n_in_flight > 0) {
        look(agent);
    }
    gpu_must(gpu, gpu->driver.cuCtxSynchronize(), "synchronize");
    agent->done_bytes = 0;
    gpu_must(gpu, gpu->driver.cuEventRecord(agent->begun, agent->engine), "record");
    for (uint32_t i = 0; i < agent->steps[agent->loop]; i++) {
        gpu_loops_step(&agent->loops, agent->loop);
    }
    gpu_must(gpu, gpu->driver.cuEventRecord(agent->ended, agent->engine), "record");
    begun_ns = kvf_now_ns();
    while (gpu->driver.cuEventQuery(agent->ended) == KVF_CUDA_ERROR_NOT_READY) {
        double at = (double)(kvf_now_ns() - begun_ns) / 1e9;

        look(agent);
        if (put < n_bursts && at >= seconds * put / n_bursts) {
            put += put_burst(agent);
        }
    }
    *bytes_out = (double)agent->done_bytes;
    return gpu_timer_s(gpu, agent->begun, agent->ended) * 1e3;
}

static void measure_rate(struct bench_run *run, struct agent *agent, const char *path,
                         uint32_t rate)
{
    double burst_bytes = (double)agent->load.kv_bytes;
    uint32_t n_bursts = (uint32_t)((double)rate * 1e9 * run->seconds / burst_bytes + 0.5);
    const char *suffix = bench_text(run, "--suffix");
    char tail[64];
    char name[96];
    char truth[96];

    n_bursts = n_bursts == 0 ? 1 : n_bursts;
    (void)snprintf(tail, sizeof(tail), "%s_%s_%u%s%s", gpu_loop_names[agent->loop], path, rate,
                   suffix != NULL ? "_" : "", suffix != NULL ? suffix : "");
    (void)snprintf(name, sizeof(name), "puts_%s", tail);
    (void)snprintf(truth, sizeof(truth), "rate_%s", tail);
    if (run->only != NULL && strcmp(run->only, name) != 0) {
        return;
    }
    for (uint32_t i = 0; i < run->n_pairs + 1; i++) {
        double bytes[2] = {0, 0};
        double with = 0;
        double without;

        if (i % 2 == 0) {
            with = window_ms(agent, n_bursts, run->seconds, &bytes[0]);
        }
        without = window_ms(agent, 0, run->seconds, &bytes[1]);
        if (i % 2 != 0) {
            with = window_ms(agent, n_bursts, run->seconds, &bytes[0]);
        }
        if (i > 0 && bytes[0] > 0) { /* the first one warms up */
            bench_print_pair(name, with - without, bytes[0] / GIB);
            bench_print_value(truth, bytes[0] / (with / 1e3) / 1e9);
        }
    }
}

static void calibrate(const struct bench_run *run, struct agent *agent)
{
    double bytes;
    double ms;

    agent->steps[agent->loop] = 8;
    (void)window_ms(agent, 0, run->seconds, &bytes);
    ms = window_ms(agent, 0, run->seconds, &bytes);
    agent->steps[agent->loop] = (uint32_t)(run->seconds * 1e3 / (ms / 8) + 1);
}

int main(int argc, char **argv)
{
    static const char *const sets[] = {"dram.bytes=4GiB",
                                       "dram.area_bytes=128MiB",
                                       "staging.total=3GiB",
                                       "staging.client=1GiB",
                                       "allow_uncalibrated=true",
                                       "gpu.devices=all",
                                       "workers=8",
                                       NULL};
    static const char *const paths[] = {"auto", "engine", "agent"};
    static struct agent agent;
    struct bench_run run;
    struct kvf_gpu_device *gpu;

    bench_init(&run, argc, argv);
    gpu = gpu_open();
    agent.engine = gpu_stream(gpu, KVF_GPU_PRIORITY_HIGH);
    agent.begun = gpu_timer(gpu);
    agent.ended = gpu_timer(gpu);
    gpu_loops_init(&agent.loops, gpu, agent.engine);
    gpu_load_init(&agent.load, gpu, GPU_LLAMA_8B, "balanced", CHUNKS,
                  gpu_memory(gpu, (uint64_t)CHUNKS * (32u << 20)));
    kvf_test_daemon_create(&agent.daemon, sets);
    kvf_test_daemon_start(&agent.daemon);
    for (enum kvf_gpu_path path = KVF_GPU_PATH_ENGINE; path <= KVF_GPU_PATH_AGENT; path++) {
        path_open(&agent, path);
        for (int loop = 0; loop < LOOPS; loop++) {
            agent.loop = (enum gpu_loop)loop;
            if (!agent.loops.has_blas && loop != LOOP_MEMBOUND) {
                continue; /* no libcublas on this machine */
            }
            calibrate(&run, &agent);
            for (size_t i = 0; i < sizeof(rates) / sizeof(rates[0]); i++) {
                measure_rate(&run, &agent, paths[path], rates[i]);
            }
        }
        path_close(&agent);
    }
    kvf_test_daemon_destroy(&agent.daemon);
    return 0;
}
