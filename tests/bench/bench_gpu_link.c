/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_gpu_link.c: KV between a GPU's pages and pinned host memory, beside the link and beside
 * other ways to move pages.
 *
 *   bench_gpu_link [--seconds N] [--pairs N] [--only NAME]
 *
 * "Ideal" is the link's speed for plain copies of the same encoded bytes, times what a byte of them
 * stands for. Figures are GB of bf16 KV a second.
 */
#include "tests/bench/bench.h"
#include "tests/bench/gpu_load.h"

#include "base/clock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RING        3
#define CHUNKS      8            /* of a burst: 256 MiB of Llama-3.1-8B's KV */
#define GROUP_BYTES (4u << 20)   /* of layers on the way in */
#define FIRST_BYTES (512u << 10) /* the first group: its layer is wanted soonest */

struct link {
    struct kvf_gpu_device *gpu;
    struct gpu_load loads[RING]; /* the same pages, payloads in the ring */
    struct gpu_load raw;         /* the same pages, "raw" straight to host memory */
    uint8_t *host;               /* payloads of a ring */
    void *compute;
    void *copy;
    void *encoded[RING];
    void *copied[RING];
    void *begun;
};

static void wait_for(struct kvf_gpu_device *gpu, void *stream, void *event)
{
    gpu_must(gpu, gpu->driver.cuStreamWaitEvent(stream, event, 0), "wait");
}

static void record(struct kvf_gpu_device *gpu, void *event, void *stream)
{
    gpu_must(gpu, gpu->driver.cuEventRecord(event, stream), "record");
}

static void settle(struct kvf_gpu_device *gpu)
{
    gpu_must(gpu, gpu->driver.cuCtxSynchronize(), "synchronize");
}

/* Repeat whole rings until the time is over. GB of KV a second. */
static double repeat(struct link *link, double seconds, void (*burst)(struct link *, uint32_t))
{
    uint64_t begun_ns;
    uint64_t bytes = 0;

    settle(link->gpu);
    begun_ns = kvf_now_ns();
    do {
        for (uint32_t i = 0; i < RING; i++) {
            burst(link, i);
            bytes += link->loads[i].kv_bytes;
        }
        /* the queues stay short, and the next ring is there before this one has ended */
        gpu_must(link->gpu, link->gpu->driver.cuEventSynchronize(link->copied[0]), "wait");
    } while ((double)(kvf_now_ns() - begun_ns) < seconds * 1e9);
    settle(link->gpu);
    return bench_gb_s(bytes, kvf_now_ns() - begun_ns);
}

/* ----------------------------------------------------------------------------------------------
 * Out of the GPU
 */
static void offload_burst(struct link *link, uint32_t i)
{
    struct kvf_gpu_device *gpu = link->gpu;
    const struct gpu_load *load = &link->loads[i];
    uint64_t bytes = load->payload_bytes;

    wait_for(gpu, link->compute, link->copied[i]); /* the last round has left this part */
    gpu_load_encode(load, gpu, link->compute);
    record(gpu, link->encoded[i], link->compute);
    wait_for(gpu, link->copy, link->encoded[i]);
    for (uint32_t chunk = 0; chunk < load->n_chunks; chunk++) {
        uint64_t at = chunk * bytes;

        gpu_must(gpu,
                 gpu->driver.cuMemcpyDtoHAsync(link->host + i * gpu_load_payloads_bytes(load) + at,
                                               load->parts[0].stored + at, bytes, link->copy),
                 "copy");
    }
    record(gpu, link->copied[i], link->copy);
}

static void offload_plain(struct link *link, uint32_t i)
{
    struct kvf_gpu_device *gpu = link->gpu;
    const struct gpu_load *load = &link->loads[i];
    uint64_t bytes = gpu_load_payloads_bytes(load);

    gpu_must(gpu,
             gpu->driver.cuMemcpyDtoHAsync(link->host + i * bytes, load->parts[0].stored, bytes,
                                           link->copy),
             "copy");
    record(gpu, link->copied[i], link->copy);
}

/* Every page of every layer by a call of its own, uncoded. */
static void offload_pages(struct link *link, uint32_t i)
{
    struct kvf_gpu_device *gpu = link->gpu;
    const struct gpu_load *load = &link->loads[i];
    uint32_t n_layers = load->plan.geometry.n_layers;

    for (uint32_t n = 0; n < load->n_pages; n++) {
        for (uint32_t layer = 0; layer < n_layers; layer++) {
            uint64_t at = layer * load->layer_bytes + load->page_ids[n] * load->page_bytes;

            gpu_must(gpu,
                     gpu->driver.cuMemcpyDtoHAsync(link->host + at, load->pages + at,
                                                   load->page_bytes, link->copy),
                     "copy");
        }
    }
    record(gpu, link->copied[i], link->copy);
}

/* A kernel that gathers the pages and writes to host memory itself. */
static void offload_gather(struct link *link, uint32_t i)
{
    gpu_load_encode(&link->raw, link->gpu, link->copy);
    record(link->gpu, link->copied[i], link->copy);
}

/* ----------------------------------------------------------------------------------------------
 * Into the GPU
 */

/* The layers of one group from `first` on. */
static uint32_t group_layers(const struct gpu_load *load, uint32_t first)
{
    uint64_t strip = gpu_load_layer_offset(load, 1);
    uint64_t want = first == 0 ? FIRST_BYTES : GROUP_BYTES;
    uint32_t n = (uint32_t)((want + strip - 1) / strip);
    uint32_t left = load->plan.geometry.n_layers - first;

    return left < n + n / 2 ? left : n; /* no small group at the end */
}

static void onload_chunk(struct link *link, uint32_t i, uint32_t chunk, void *first_done)
{
    struct kvf_gpu_device *gpu = link->gpu;
    const struct gpu_load *load = &link->loads[i];
    uint64_t at = chunk * load->payload_bytes;
    uint8_t *host = link->host + i * gpu_load_payloads_bytes(load) + at;
    uint32_t n;

    for (uint32_t layer = 0; layer < load->plan.geometry.n_layers; layer += n) {
        uint64_t begin = gpu_load_layer_offset(load, layer);
        uint64_t end;

        n = group_layers(load, layer);
        end = layer + n == load->plan.geometry.n_layers ? load->payload_bytes
                                                        : gpu_load_layer_offset(load, layer + n);
        gpu_must(gpu,
                 gpu->driver.cuMemcpyHtoDAsync(load->parts[0].stored + at + begin, host + begin,
                                               end - begin, link->copy),
                 "copy");
        record(gpu, link->encoded[i], link->copy);
        wait_for(gpu, link->compute, link->encoded[i]);
        gpu_load_decode(load, gpu, chunk, layer, n, link->compute);
        if (layer == 0 && first_done != NULL) {
            record(gpu, first_done, link->compute);
        }
    }
}

static void onload_burst(struct link *link, uint32_t i)
{
    wait_for(link->gpu, link->copy, link->copied[i]);
    for (uint32_t chunk = 0; chunk < link->loads[i].n_chunks; chunk++) {
        onload_chunk(link, i, chunk, NULL);
    }
    record(link->gpu, link->copied[i], link->compute);
}

static void onload_plain(struct link *link, uint32_t i)
{
    struct kvf_gpu_device *gpu = link->gpu;
    const struct gpu_load *load = &link->loads[i];
    uint64_t bytes = gpu_load_payloads_bytes(load);

    gpu_must(gpu,
             gpu->driver.cuMemcpyHtoDAsync(load->parts[0].stored, link->host + i * bytes, bytes,
                                           link->copy),
             "copy");
    record(gpu, link->copied[i], link->copy);
}

static void onload_pages(struct link *link, uint32_t i)
{
    struct kvf_gpu_device *gpu = link->gpu;
    const struct gpu_load *load = &link->loads[i];

    for (uint32_t n = 0; n < load->n_pages; n++) {
        for (uint32_t layer = 0; layer < load->plan.geometry.n_layers; layer++) {
            uint64_t at = layer * load->layer_bytes + load->page_ids[n] * load->page_bytes;

            gpu_must(gpu,
                     gpu->driver.cuMemcpyHtoDAsync(load->pages + at, link->host + at,
                                                   load->page_bytes, link->copy),
                     "copy");
        }
    }
    record(gpu, link->copied[i], link->copy);
}

/* Microseconds from the call until layer 0 of one chunk is in its pages. */
static double first_layer_us(void *ctx, double seconds)
{
    struct link *link = ctx;
    void *first = gpu_timer(link->gpu);
    double us;

    (void)seconds;
    settle(link->gpu);
    record(link->gpu, link->begun, link->copy);
    onload_chunk(link, 0, 0, first);
    us = gpu_timer_s(link->gpu, link->begun, first) * 1e6;
    settle(link->gpu);
    gpu_must(link->gpu, link->gpu->driver.cuEventDestroy(first), "event");
    return us;
}

/* ----------------------------------------------------------------------------------------------
 * Figures
 */
#define SIDE(name)                                                                                 \
    static double name##_side(void *ctx, double seconds)                                           \
    {                                                                                              \
        return repeat(ctx, seconds, name);                                                         \
    }
SIDE(offload_burst)
SIDE(offload_plain)
SIDE(offload_pages)
SIDE(offload_gather)
SIDE(onload_burst)
SIDE(onload_plain)
SIDE(onload_pages)

static void init(struct link *link, struct kvf_gpu_device *gpu, enum gpu_model model,
                 uint32_t n_chunks)
{
    struct gpu_load *first = &link->loads[0];
    uint64_t payloads;
    uint64_t bytes;

    link->gpu = gpu;
    link->compute = gpu_stream(gpu, KVF_GPU_PRIORITY_LOW);
    link->copy = gpu_stream(gpu, KVF_GPU_PRIORITY_LOW);
    link->begun = gpu_timer(gpu);
    for (uint32_t i = 0; i < RING; i++) {
        link->encoded[i] = gpu_timer(gpu);
        link->copied[i] = gpu_timer(gpu);
    }
    /* of both models, a ring's payloads of a chunk take less */
    bytes = n_chunks * (uint64_t)(32 << 20);
    payloads = gpu_memory(gpu, bytes);
    gpu_load_init(first, gpu, model, "balanced", n_chunks, payloads);
    for (uint32_t i = 1; i < RING; i++) {
        gpu_load_clone(&link->loads[i], gpu, first, payloads + i * gpu_load_payloads_bytes(first));
    }
    link->host = gpu_host_memory(gpu, first->kv_bytes + RING * (uint64_t)KVF_PAYLOAD_BYTES_MAX);
    gpu_load_init(&link->raw, gpu, model, "raw", n_chunks, (uintptr_t)link->host);
}

static const struct {
    const char *name;
    double (*ours)(void *, double);
    double (*limit)(void *, double); /* NULL: a value by itself */
} figures[] = {
    {"offload_vs_ideal", offload_burst_side, offload_plain_side},
    {"offload_vs_page_copies", offload_burst_side, offload_pages_side},
    {"offload_vs_gather", offload_burst_side, offload_gather_side},
    {"onload_vs_ideal", onload_burst_side, onload_plain_side},
    {"onload_vs_page_copies", onload_burst_side, onload_pages_side},
    {"onload_first_layer_us", first_layer_us, NULL},
};

static void measure(struct bench_run *run, struct link *link, const char *model)
{
    for (size_t i = 0; i < sizeof(figures) / sizeof(figures[0]); i++) {
        char name[64];

        snprintf(name, sizeof(name), "%s%s", figures[i].name, model);
        if (figures[i].limit == NULL) {
            bench_values(run, name, figures[i].ours, link);
        } else {
            bench_pairs(run, name, figures[i].ours, figures[i].limit, link);
        }
    }
}

int main(int argc, char **argv)
{
    static struct link llama, mla;
    struct kvf_gpu_device *gpu;
    struct bench_run run;

    bench_init(&run, argc, argv);
    gpu = gpu_open();
    init(&llama, gpu, GPU_LLAMA_8B, CHUNKS);
    measure(&run, &llama, "");
    init(&mla, gpu, GPU_MLA, 4 * CHUNKS);
    measure(&run, &mla, "_mla");
    return 0;
}
