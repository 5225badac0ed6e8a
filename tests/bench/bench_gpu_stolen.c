/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_gpu_stolen.c: what offloading and loading KV costs the work that the GPU is there for.
 *
 *   bench_gpu_stolen [--seconds N] [--pairs N] [--only NAME]
 *
 * A pair is one window of an engine-like loop alone and the same window with KV moving at some
 * rate beside it, in alternating order; encode and decode run on the loop's own stream, between its
 * steps, the copies on another one. Lines:
 *
 *   pair stolen_LOOP_DIRECTION_RATE MS GIB      extra milliseconds, and GiB of bf16 KV moved
 *   pair slowdown_LOOP_DIRECTION_RATE MS MS     with and without
 *   pair control_LOOP MS GIB                    the loop alone twice, GiB as in the middle rate
 *
 * so that their ratios are milliseconds a GiB, and with over without. cuBLAS is opened at run time.
 */
#include "tests/bench/bench.h"
#include "tests/bench/gpu_load.h"
#include "tests/bench/gpu_loops.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RING   4
#define CHUNKS 8
#define GIB    (double)(1 << 30)

struct stolen {
    struct kvf_gpu_device *gpu;
    struct gpu_loops loops;
    struct gpu_load loads[RING];
    uint8_t *host;
    void *engine;
    void *copy;
    void *ready[RING];
    void *done[RING];
    void *begun;
    void *ended;
    uint32_t steps[LOOPS]; /* of a window */
    enum gpu_loop loop;
    bool is_onload;
};

/* ----------------------------------------------------------------------------------------------
 * KV beside it
 */
static void move_burst(struct stolen *stolen, uint32_t n)
{
    struct kvf_gpu_device *gpu = stolen->gpu;
    uint32_t i = n % RING;
    const struct gpu_load *load = &stolen->loads[i];
    uint64_t bytes = gpu_load_payloads_bytes(load);
    uint64_t device = load->parts[0].stored;

    if (stolen->is_onload) {
        gpu_must(gpu, gpu->driver.cuStreamWaitEvent(stolen->copy, stolen->done[i], 0), "wait");
        gpu_must(
            gpu,
            gpu->driver.cuMemcpyHtoDAsync(device, stolen->host + i * bytes, bytes, stolen->copy),
            "copy");
        gpu_must(gpu, gpu->driver.cuEventRecord(stolen->ready[i], stolen->copy), "record");
        return;
    }
    gpu_must(gpu, gpu->driver.cuStreamWaitEvent(stolen->engine, stolen->done[i], 0), "wait");
    gpu_load_encode(load, gpu, stolen->engine);
    gpu_must(gpu, gpu->driver.cuEventRecord(stolen->ready[i], stolen->engine), "record");
    gpu_must(gpu, gpu->driver.cuStreamWaitEvent(stolen->copy, stolen->ready[i], 0), "wait");
    gpu_must(gpu,
             gpu->driver.cuMemcpyDtoHAsync(stolen->host + i * bytes, device, bytes, stolen->copy),
             "copy");
    gpu_must(gpu, gpu->driver.cuEventRecord(stolen->done[i], stolen->copy), "record");
}

/* What has come in goes to its pages between two steps, as soon as it is there: the loop's stream
 * waits only if the link is behind. */
static void decode_burst(struct stolen *stolen, uint32_t n)
{
    struct kvf_gpu_device *gpu = stolen->gpu;
    uint32_t i = n % RING;

    gpu_must(gpu, gpu->driver.cuStreamWaitEvent(stolen->engine, stolen->ready[i], 0), "wait");
    gpu_load_decode(&stolen->loads[i], gpu, UINT32_MAX, 0, 0, stolen->engine);
    gpu_must(gpu, gpu->driver.cuEventRecord(stolen->done[i], stolen->engine), "record");
}

/* One window: its milliseconds. Bursts are spread evenly over its steps. On the way in a burst is
 * copied one burst's time before it is decoded. */
static double window_ms(struct stolen *stolen, uint32_t n_bursts)
{
    struct kvf_gpu_device *gpu = stolen->gpu;
    uint32_t steps = stolen->steps[stolen->loop];
    uint32_t moved = 0;
    uint32_t decoded = 0;

    gpu_must(gpu, gpu->driver.cuCtxSynchronize(), "synchronize");
    gpu_must(gpu, gpu->driver.cuEventRecord(stolen->begun, stolen->engine), "record");
    gpu_must(gpu, gpu->driver.cuStreamWaitEvent(stolen->copy, stolen->begun, 0), "wait");
    for (uint32_t i = 0; i < steps; i++) {
        gpu_loops_step(&stolen->loops, stolen->loop);
        while (moved < n_bursts && (uint64_t)moved * steps <= (uint64_t)i * n_bursts) {
            move_burst(stolen, moved++);
        }
        while (stolen->is_onload && decoded < n_bursts &&
               (uint64_t)(decoded + 1) * steps <= (uint64_t)(i + 1) * n_bursts) {
            decode_burst(stolen, decoded++);
        }
    }
    gpu_must(gpu, gpu->driver.cuEventRecord(stolen->ended, stolen->engine), "record");
    return gpu_timer_s(gpu, stolen->begun, stolen->ended) * 1e3;
}

/* ----------------------------------------------------------------------------------------------
 * Pairs
 */
static const uint32_t rates[] = {5, 20, 100}; /* GB of bf16 KV a second */

static void measure_rate(struct bench_run *run, struct stolen *stolen, uint32_t rate)
{
    const char *direction = stolen->is_onload ? "onload" : "offload";
    double burst_bytes = (double)stolen->loads[0].kv_bytes;
    uint32_t n_bursts = (uint32_t)((double)rate * 1e9 * run->seconds / burst_bytes + 0.5);
    char name[64];
    char slow[64];

    n_bursts = n_bursts == 0 ? 1 : n_bursts;
    snprintf(name, sizeof(name), "stolen_%s_%s_%u", gpu_loop_names[stolen->loop], direction, rate);
    snprintf(slow, sizeof(slow), "slowdown_%s_%s_%u", gpu_loop_names[stolen->loop], direction,
             rate);
    if (run->only != NULL && strcmp(run->only, name) != 0 && strcmp(run->only, slow) != 0) {
        return;
    }
    (void)window_ms(stolen, n_bursts);
    for (uint32_t i = 0; i < run->n_pairs; i++) {
        double with = 0;
        double without;

        if (i % 2 == 0) {
            with = window_ms(stolen, n_bursts);
        }
        without = window_ms(stolen, 0);
        if (i % 2 != 0) {
            with = window_ms(stolen, n_bursts);
        }
        bench_print_pair(name, with - without, n_bursts * burst_bytes / GIB);
        bench_print_pair(slow, with, without);
    }
}

/* The same window twice: what the method finds where nothing is stolen. */
static void measure_control(struct bench_run *run, struct stolen *stolen)
{
    char name[64];

    snprintf(name, sizeof(name), "control_%s", gpu_loop_names[stolen->loop]);
    for (uint32_t i = 0; i < run->n_pairs && (run->only == NULL || strcmp(run->only, name) == 0);
         i++) {
        double first = window_ms(stolen, 0);
        double second = window_ms(stolen, 0);

        bench_print_pair(name, i % 2 == 0 ? first - second : second - first,
                         rates[1] * 1e9 * run->seconds / GIB);
    }
}

/* Steps that fill a window. */
static void calibrate(struct bench_run *run, struct stolen *stolen)
{
    double ms;

    stolen->steps[stolen->loop] = 8;
    (void)window_ms(stolen, 0);
    ms = window_ms(stolen, 0);
    stolen->steps[stolen->loop] = (uint32_t)(run->seconds * 1e3 / (ms / 8) + 1);
}

static void init(struct stolen *stolen)
{
    struct kvf_gpu_device *gpu = gpu_open();
    uint64_t payloads;

    stolen->gpu = gpu;
    stolen->engine = gpu_stream(gpu, KVF_GPU_PRIORITY_HIGH);
    stolen->copy = gpu_stream(gpu, KVF_GPU_PRIORITY_LOW);
    stolen->begun = gpu_timer(gpu);
    stolen->ended = gpu_timer(gpu);
    for (uint32_t i = 0; i < RING; i++) {
        stolen->ready[i] = gpu_timer(gpu);
        stolen->done[i] = gpu_timer(gpu);
    }
    gpu_loops_init(&stolen->loops, gpu, stolen->engine);
    payloads = gpu_memory(gpu, RING * (uint64_t)CHUNKS * (32u << 20));
    gpu_load_init(&stolen->loads[0], gpu, GPU_LLAMA_8B, "balanced", CHUNKS, payloads);
    for (uint32_t i = 1; i < RING; i++) {
        gpu_load_clone(&stolen->loads[i], gpu, &stolen->loads[0],
                       payloads + i * gpu_load_payloads_bytes(&stolen->loads[0]));
    }
    stolen->host = gpu_host_memory(gpu, RING * gpu_load_payloads_bytes(&stolen->loads[0]));
    for (uint32_t i = 0; i < RING; i++) { /* records to load */
        stolen->loop = LOOP_MEMBOUND;
        stolen->is_onload = false;
        move_burst(stolen, i);
    }
    gpu_must(gpu, gpu->driver.cuCtxSynchronize(), "records");
}

static void skip_loop(const char *loop)
{
    static const char *const kinds[] = {"stolen", "slowdown"};
    static const char *const directions[] = {"offload", "onload"};
    char name[64];

    snprintf(name, sizeof(name), "control_%s", loop);
    bench_print_skip(name, "no libcublas on this machine");
    for (uint32_t i = 0; i < 12; i++) {
        snprintf(name, sizeof(name), "%s_%s_%s_%u", kinds[i % 2], loop, directions[i / 2 % 2],
                 rates[i / 4]);
        bench_print_skip(name, "no libcublas on this machine");
    }
}

int main(int argc, char **argv)
{
    static struct stolen stolen;
    struct bench_run run;

    bench_init(&run, argc, argv);
    init(&stolen);
    for (int loop = 0; loop < LOOPS; loop++) {
        stolen.loop = (enum gpu_loop)loop;
        if (!stolen.loops.has_blas && loop != LOOP_MEMBOUND) {
            skip_loop(gpu_loop_names[loop]);
            continue;
        }
        calibrate(&run, &stolen);
        measure_control(&run, &stolen);
        for (int direction = 0; direction < 2; direction++) {
            stolen.is_onload = direction == 1;
            for (size_t i = 0; i < sizeof(rates) / sizeof(rates[0]); i++) {
                measure_rate(&run, &stolen, rates[i]);
            }
        }
    }
    return 0;
}
