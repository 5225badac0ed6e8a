/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_gpu_link.c: KV between a GPU's pages and pinned host memory, beside the link and beside
 * other ways to move pages.
 *
 *   bench_gpu_link [--seconds N] [--pairs N] [--only NAME] [--group MIB]
 *
 * --group: of layers on the way in.
 *
 * "Ideal" is the link's speed for plain copies of the same encoded bytes, times what a byte of them
 * stands for. Figures are GB of bf16 KV a second.
 */
#include "tests/bench/bench.h"
#include "tests/bench/gpu_load.h"

#include "base/clock.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RING   3
#define CHUNKS 8 /* of a burst: 256 MiB of Llama-3.1-8B's KV */

#define FIRST_BYTES (1u << 20) /* the first group after a pause: its layer is wanted soonest */

enum way {
    OUT, /* of the GPU */
    IN,
};

/* cuMemcpyBatchAsync of CUDA 13, and of 12.8, which says also which copy was wrong. */
typedef int (*batch_copy)(uint64_t *to, uint64_t *from, size_t *bytes, size_t n, void *attributes,
                          size_t *first, size_t n_attributes, void *stream);
typedef int (*batch_copy_12)(uint64_t *to, uint64_t *from, size_t *bytes, size_t n,
                             void *attributes, size_t *first, size_t n_attributes, size_t *failed,
                             void *stream);

/* One copy a page and layer, for a call that takes all of them. */
struct batch {
    batch_copy copy; /* NULL: the driver has none */
    batch_copy_12 copy_12;
    uint64_t *device;
    uint64_t *host;
    size_t *bytes;
    size_t n;
};

struct link {
    struct kvf_gpu_device *gpu;
    struct gpu_load loads[RING]; /* the same pages, payloads in the ring */
    struct gpu_load raw;         /* the same pages, "raw" straight to host memory */
    struct batch batch;
    uint8_t *host; /* payloads of a ring, or the pages */
    uint64_t group_bytes;
    uint32_t n_groups; /* since the last pause */
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
static double repeat(struct link *link, double seconds,
                     void (*burst)(struct link *, uint32_t, enum way), enum way way)
{
    uint64_t begun_ns;
    uint64_t bytes = 0;

    settle(link->gpu);
    begun_ns = kvf_now_ns();
    do {
        for (uint32_t i = 0; i < RING; i++) {
            burst(link, i, way);
            bytes += link->loads[i].kv_bytes;
        }
        /* the queues stay short, and the next ring is there before this one has ended */
        gpu_must(link->gpu, link->gpu->driver.cuEventSynchronize(link->copied[0]), "wait");
    } while ((double)(kvf_now_ns() - begun_ns) < seconds * 1e9);
    settle(link->gpu);
    return bench_gb_s(bytes, kvf_now_ns() - begun_ns);
}

static void copy(struct link *link, enum way way, uint64_t device, uint8_t *host, uint64_t bytes)
{
    const struct kvf_gpu_driver *driver = &link->gpu->driver;
    int result = way == OUT ? driver->cuMemcpyDtoHAsync(host, device, bytes, link->copy)
                            : driver->cuMemcpyHtoDAsync(device, host, bytes, link->copy);

    gpu_must(link->gpu, result, "copy");
}

/* ----------------------------------------------------------------------------------------------
 * Other ways to move a burst
 */

/* The same encoded bytes in one piece. */
static void move_plain(struct link *link, uint32_t i, enum way way)
{
    const struct gpu_load *load = &link->loads[i];
    uint64_t bytes = gpu_load_payloads_bytes(load);

    copy(link, way, load->parts[0].stored, link->host + i * bytes, bytes);
    record(link->gpu, link->copied[i], link->copy);
}

/* Where a page of a layer lies, from the first one. */
static uint64_t page_at(const struct gpu_load *load, uint32_t page, uint32_t layer)
{
    return layer * load->layer_bytes + load->page_ids[page] * load->page_bytes;
}

/* Every page of every layer by a call of its own, uncoded. */
static void move_pages(struct link *link, uint32_t i, enum way way)
{
    const struct gpu_load *load = &link->loads[i];

    for (uint32_t page = 0; page < load->n_pages; page++) {
        for (uint32_t layer = 0; layer < load->plan.geometry.n_layers; layer++) {
            uint64_t at = page_at(load, page, layer);

            copy(link, way, load->pages + at, link->host + at, load->page_bytes);
        }
    }
    record(link->gpu, link->copied[i], link->copy);
}

/* The same copies by one call. */
static void move_batch(struct link *link, uint32_t i, enum way way)
{
    /* of each copy: read in the stream's order; no hints where memory is */
    struct {
        int order;
        int from[2];
        int to[2];
        unsigned flags;
    } attributes = {.order = 1};
    struct batch *batch = &link->batch;
    uint64_t *to = way == OUT ? batch->host : batch->device;
    uint64_t *from = way == OUT ? batch->device : batch->host;
    size_t first = 0;
    size_t failed;
    int result;

    if (batch->copy != NULL) {
        result = batch->copy(to, from, batch->bytes, batch->n, &attributes, &first, 1, link->copy);
    } else {
        result = batch->copy_12(to, from, batch->bytes, batch->n, &attributes, &first, 1, &failed,
                                link->copy);
    }
    gpu_must(link->gpu, result, "copies of a batch");
    record(link->gpu, link->copied[i], link->copy);
}

/* A kernel that reads the pages and writes host memory itself, or the other way round. */
static void move_gather(struct link *link, uint32_t i, enum way way)
{
    if (way == OUT) {
        gpu_load_encode(&link->raw, link->gpu, link->copy);
    } else {
        gpu_load_decode(&link->raw, link->gpu, UINT32_MAX, 0, 0, link->copy);
    }
    record(link->gpu, link->copied[i], link->copy);
}

static void batch_init(struct link *link)
{
    const char *path = getenv("KVFERRY_CUDA_DRIVER");
    const struct gpu_load *load = &link->loads[0];
    struct batch *batch = &link->batch;
    void *library = dlopen(path != NULL && path[0] != 0 ? path : "libcuda.so.1", RTLD_NOW);
    uint32_t n_layers = load->plan.geometry.n_layers;

    if (library == NULL) {
        bench_die("%s", dlerror());
    }
    *(void **)&batch->copy = dlsym(library, "cuMemcpyBatchAsync_v2");
    *(void **)&batch->copy_12 = dlsym(library, "cuMemcpyBatchAsync");
    batch->n = (size_t)load->n_pages * n_layers;
    batch->device = calloc(batch->n, sizeof(*batch->device));
    batch->host = calloc(batch->n, sizeof(*batch->host));
    batch->bytes = calloc(batch->n, sizeof(*batch->bytes));
    if (batch->device == NULL || batch->host == NULL || batch->bytes == NULL) {
        bench_die("no memory");
    }
    for (size_t i = 0; i < batch->n; i++) {
        uint64_t at = page_at(load, (uint32_t)(i / n_layers), (uint32_t)(i % n_layers));

        batch->device[i] = load->pages + at;
        batch->host[i] = (uintptr_t)link->host + at;
        batch->bytes[i] = load->page_bytes;
    }
}

/* ----------------------------------------------------------------------------------------------
 * Out of the GPU
 */
static void offload_burst(struct link *link, uint32_t i, enum way way)
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

        copy(link, way, load->parts[0].stored + at,
             link->host + i * gpu_load_payloads_bytes(load) + at, bytes);
    }
    record(gpu, link->copied[i], link->copy);
}

/* ----------------------------------------------------------------------------------------------
 * Into the GPU
 */

/* The layers of one group from `first` on. */
static uint32_t group_layers(const struct link *link, const struct gpu_load *load, uint32_t first)
{
    uint64_t strip = gpu_load_layer_offset(load, 1);
    uint64_t want = link->n_groups == 0 ? FIRST_BYTES : link->group_bytes;
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

        n = group_layers(link, load, layer);
        link->n_groups++;
        end = layer + n == load->plan.geometry.n_layers ? load->payload_bytes
                                                        : gpu_load_layer_offset(load, layer + n);
        copy(link, IN, load->parts[0].stored + at + begin, host + begin, end - begin);
        record(gpu, link->encoded[i], link->copy);
        wait_for(gpu, link->compute, link->encoded[i]);
        gpu_load_decode(load, gpu, chunk, layer, n, link->compute);
        if (layer == 0 && first_done != NULL) {
            record(gpu, first_done, link->compute);
        }
    }
}

static void onload_burst(struct link *link, uint32_t i, enum way way)
{
    (void)way;
    wait_for(link->gpu, link->copy, link->copied[i]);
    for (uint32_t chunk = 0; chunk < link->loads[i].n_chunks; chunk++) {
        onload_chunk(link, i, chunk, NULL);
    }
    record(link->gpu, link->copied[i], link->compute);
}

/* Microseconds from the call until layer 0 of one chunk is in its pages. */
static double first_layer_us(void *ctx, double seconds)
{
    struct link *link = ctx;
    void *first = gpu_timer(link->gpu);
    double us;

    (void)seconds;
    settle(link->gpu);
    link->n_groups = 0;
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
#define SIDE(name, burst, way)                                                                     \
    static double name(void *ctx, double seconds)                                                  \
    {                                                                                              \
        return repeat(ctx, seconds, burst, way);                                                   \
    }
SIDE(offload, offload_burst, OUT)
SIDE(plain_out, move_plain, OUT)
SIDE(pages_out, move_pages, OUT)
SIDE(batch_out, move_batch, OUT)
SIDE(gather_out, move_gather, OUT)
SIDE(onload, onload_burst, IN)
SIDE(plain_in, move_plain, IN)
SIDE(pages_in, move_pages, IN)
SIDE(batch_in, move_batch, IN)
SIDE(gather_in, move_gather, IN)

static void init(struct link *link, const struct bench_run *run, struct kvf_gpu_device *gpu,
                 enum gpu_model model, uint32_t n_chunks)
{
    struct gpu_load *first = &link->loads[0];
    uint64_t payloads;
    uint64_t bytes;

    link->gpu = gpu;
    link->compute = gpu_stream(gpu, KVF_GPU_PRIORITY_LOW);
    link->copy = gpu_stream(gpu, KVF_GPU_PRIORITY_LOW);
    link->group_bytes = bench_number(run, "--group", 8) << 20;
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
    batch_init(link);
}

static const struct {
    const char *name;
    double (*ours)(void *, double);
    double (*limit)(void *, double); /* NULL: a value by itself */
} figures[] = {
    {"offload_vs_ideal", offload, plain_out},        {"offload_vs_page_copies", offload, pages_out},
    {"offload_vs_batch", offload, batch_out},        {"offload_vs_gather", offload, gather_out},
    {"onload_vs_ideal", onload, plain_in},           {"onload_vs_page_copies", onload, pages_in},
    {"onload_vs_batch", onload, batch_in},           {"onload_vs_gather", onload, gather_in},
    {"onload_first_layer_us", first_layer_us, NULL},
};

static void measure(struct bench_run *run, struct link *link, const char *model)
{
    bool has_batch = link->batch.copy != NULL || link->batch.copy_12 != NULL;

    for (size_t i = 0; i < sizeof(figures) / sizeof(figures[0]); i++) {
        char name[64];

        snprintf(name, sizeof(name), "%s%s", figures[i].name, model);
        if (!has_batch && (figures[i].limit == batch_out || figures[i].limit == batch_in)) {
            bench_print_skip(name, "the driver has no cuMemcpyBatchAsync, which is of CUDA 12.8");
        } else if (figures[i].limit == NULL) {
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
    init(&llama, &run, gpu, GPU_LLAMA_8B, CHUNKS);
    measure(&run, &llama, "");
    init(&mla, &run, gpu, GPU_MLA, 4 * CHUNKS);
    measure(&run, &mla, "_mla");
    return 0;
}
