/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_gpu_kernels.c: the codecs' kernels beside device-to-device copies of as many bytes, and
 * those of saw beside kernels with the same traffic and no maths. Llama-3.1-8B: 32 layers, 8 heads
 * of 128, chunks of 256 tokens, bursts of 256 MiB unless --chunks says otherwise (32 MiB each); of
 * X, 32 layers of 2,048 elements, as many bytes.
 * --layers leaves all but the first ones of each burst's first chunk alone, and --thread-blocks has
 * no more of them take turns than it says: for tools that watch every access, which take a minute
 * for what a GPU does in a microsecond, and are to see thread blocks go from row to row all the
 * same.
 *
 * GB/s count bytes read and written. A side is a number of bursts, one after the other, so that the
 * end of each burst, when thread blocks run out, is in the figure.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/bench/bench.h"
#include "tests/bench/gpu_load.h"

extern const struct kvf_gpu_image kvf_bench_images[];

struct kernels_bench {
    struct kvf_gpu_device *gpu;
    void *stream;
    void *timers[2];
    struct gpu_load load; /* of the profile that is being measured */
    struct kvf_gpu_work work;
    struct kvf_gpu_launch launches[KVF_GPU_LAUNCHES_MAX];
    uint32_t n_launches;
    uint64_t bytes;        /* read and written by one burst */
    uint32_t n_layers;     /* of the first chunk; 0: of all chunks, all */
    uint32_t n_blocks_max; /* of thread blocks that take turns; 0: what there is room for */
    uint64_t copy_from;
    uint64_t copy_to;
};

/* ----------------------------------------------------------------------------------------------
 * One side of a pair
 */
static void launch_all(struct kernels_bench *bench)
{
    for (uint32_t i = 0; i < bench->n_launches; i++) {
        uint32_t tensors = bench->launches[i].tensors;
        void *parameters[2] = {&bench->work, &tensors};
        struct kvf_gpu_shape shape = {
            .kernel = bench->launches[i].kernel,
            .n_blocks = bench->launches[i].n_blocks,
            .blocks_a_processor = bench->launches[i].blocks_a_processor,
            .n_threads = bench->launches[i].n_threads,
            .shared_bytes = bench->launches[i].shared_bytes,
        };

        if (shape.blocks_a_processor != 0 && bench->n_blocks_max != 0 &&
            shape.n_blocks > bench->n_blocks_max) {
            shape.n_blocks = bench->n_blocks_max;
        }
        if (kvf_gpu_device_launch(bench->gpu, &shape, parameters, bench->stream) != KVF_OK) {
            bench_die("%s: %s", shape.kernel, bench->gpu->text);
        }
    }
}

static void copy_all(struct kernels_bench *bench)
{
    gpu_must(bench->gpu,
             bench->gpu->driver.cuMemcpyDtoDAsync(bench->copy_to, bench->copy_from,
                                                  bench->bytes / 2, bench->stream),
             "copy");
}

/* Seconds of one burst, over about so many seconds of bursts. */
static double burst_s(struct kernels_bench *bench, double seconds,
                      void (*burst)(struct kernels_bench *bench))
{
    struct kvf_gpu_device *gpu = bench->gpu;
    double expected_s = (double)bench->bytes / 3e12;
    uint32_t n = (uint32_t)(seconds / expected_s) + 2;

    burst(bench);
    gpu_must(gpu, gpu->driver.cuEventRecord(bench->timers[0], bench->stream), "event");
    for (uint32_t i = 0; i < n; i++) {
        burst(bench);
    }
    gpu_must(gpu, gpu->driver.cuEventRecord(bench->timers[1], bench->stream), "event");
    return gpu_timer_s(gpu, bench->timers[0], bench->timers[1]) / n;
}

static double kernel_gb_s(void *ctx, double seconds)
{
    struct kernels_bench *bench = ctx;

    return (double)bench->bytes / burst_s(bench, seconds, launch_all) / 1e9;
}

static double copy_gb_s(void *ctx, double seconds)
{
    struct kernels_bench *bench = ctx;

    return (double)bench->bytes / burst_s(bench, seconds, copy_all) / 1e9;
}

static void fill_all(struct kernels_bench *bench)
{
    gpu_must(bench->gpu,
             bench->gpu->driver.cuMemsetD8Async(bench->copy_to, 0, bench->bytes / 2, bench->stream),
             "fill");
}

/* What writing alone reaches. */
static double fill_gb_s(void *ctx, double seconds)
{
    struct kernels_bench *bench = ctx;

    return (double)(bench->bytes / 2) / burst_s(bench, seconds, fill_all) / 1e9;
}

static double kernel_ms(void *ctx, double seconds)
{
    return burst_s(ctx, seconds, launch_all) * 1e3;
}

static double unrotated_ms(void *ctx, double seconds)
{
    struct kernels_bench *bench = ctx;
    struct kvf_gpu_launch with = bench->launches[0];
    double ms;

    bench->launches[0].kernel = "kvf_bench_encode_unrotated";
    ms = burst_s(bench, seconds, launch_all) * 1e3;
    bench->launches[0] = with;
    return ms;
}

/* ----------------------------------------------------------------------------------------------
 * Work
 */

/* Pages of one chunk each, K and V apart, instead of 16 tokens with K beside V. */
static void make_contiguous(struct kernels_bench *bench)
{
    struct gpu_load *load = &bench->load;
    const struct kvf_geometry *geometry = &load->plan.geometry;
    uint64_t token_bytes = (uint64_t)geometry->dim_k * sizeof(uint16_t);
    uint64_t tensor_bytes = GPU_CHUNK_TOKENS * geometry->n_heads * token_bytes;
    uint32_t *ids = calloc(load->n_chunks, sizeof(*ids));
    struct kvf_gpu_device *gpu = bench->gpu;
    uint64_t device_ids;

    if (ids == NULL) {
        bench_die("no memory");
    }
    for (uint32_t i = 0; i < load->n_chunks; i++) {
        ids[i] = i;
    }
    for (uint32_t i = 0; i < load->work.n_parts; i++) {
        struct kvf_gpu_part *part = &load->parts[i];

        part->base = load->pages + part->layer * load->layer_bytes + part->is_v * tensor_bytes;
        part->first_page = part->block;
    }
    device_ids = gpu_memory(gpu, load->n_chunks * sizeof(*ids));
    gpu_must(gpu,
             gpu->driver.cuMemcpyHtoDAsync(device_ids, ids, load->n_chunks * sizeof(*ids), NULL),
             "page ids");
    gpu_must(gpu,
             gpu->driver.cuMemcpyHtoDAsync(load->device_parts, load->parts,
                                           load->work.n_parts * sizeof(*load->parts), NULL),
             "parts");
    gpu_must(gpu, gpu->driver.cuCtxSynchronize(), "work");
    free(ids);
    load->work.page_ids = device_ids;
    load->work.tokens_a_page = GPU_CHUNK_TOKENS;
    for (int i = 0; i < 2; i++) {
        load->work.pages[i] = (struct kvf_gpu_pages){
            .page_stride_bytes = 2 * tensor_bytes,
            .token_stride_bytes = token_bytes,
            .head_stride_bytes = GPU_CHUNK_TOKENS * token_bytes,
        };
    }
}

/* Parts are in the order of chunks, then layers. */
static void leave_layers(struct kernels_bench *bench)
{
    struct gpu_load *load = &bench->load;
    uint32_t n_all = load->work.n_parts;
    uint32_t n_parts = bench->n_layers * (load->parts_a_chunk / load->work.n_layers);

    if (n_parts == 0 || n_parts >= n_all) {
        return;
    }
    load->work.n_parts = n_parts;
    load->work.n_blocks = 1;
    load->n_encode = kvf_gpu_encode(&load->work, &load->kinds, load->encode);
    bench->bytes = bench->bytes / n_all * n_parts;
}

static void set_up(struct kernels_bench *bench, enum gpu_model model, const char *profile,
                   uint32_t n_chunks)
{
    uint64_t payloads = gpu_memory(bench->gpu, (uint64_t)n_chunks << 25);

    gpu_load_init(&bench->load, bench->gpu, model, profile, n_chunks, payloads);
    bench->bytes = bench->load.kv_bytes + gpu_load_payloads_bytes(&bench->load);
    leave_layers(bench);
    bench->work = bench->load.work;
}

/* Without what looks for escapes and finishes the results: little, and the same for all codecs. */
static void choose_encode(struct kernels_bench *bench)
{
    const struct gpu_load *load = &bench->load;

    bench->work = load->work;
    bench->n_launches = 0;
    for (uint32_t i = 0; i < load->n_encode; i++) {
        if (strncmp(load->encode[i].kernel, "kvf_escapes_", strlen("kvf_escapes_")) != 0) {
            bench->launches[bench->n_launches++] = load->encode[i];
        }
    }
}

/* K and V are of one codec in all profiles that are measured. */
static void choose_decode(struct kernels_bench *bench)
{
    bench->work = bench->load.work;
    bench->n_launches = kvf_gpu_decode(&bench->work, bench->work.tensors[0].codec, bench->launches);
}

static void choose_traffic(struct kernels_bench *bench, const char *kernel)
{
    bench->work = bench->load.work;
    bench->n_launches = 1;
    bench->launches[0] = (struct kvf_gpu_launch){
        .kernel = kernel,
        .n_blocks = bench->work.n_parts * bench->work.tensors[0].n_rows * (GPU_CHUNK_TOKENS / 128),
        .n_threads = 256,
        .tensors = 3,
    };
}

/* Encode, decode, and the traffic of both, in the layout that load has. */
static void measure_layout(struct bench_run *run, struct kernels_bench *bench, const char *layout)
{
    char name[64];

    choose_encode(bench);
    snprintf(name, sizeof(name), "saw4_encode_%s_vs_copy", layout);
    bench_pairs(run, name, kernel_gb_s, copy_gb_s, bench);
    choose_decode(bench);
    snprintf(name, sizeof(name), "saw4_decode_%s_vs_copy", layout);
    bench_pairs(run, name, kernel_gb_s, copy_gb_s, bench);
}

static void measure_profile(struct bench_run *run, struct kernels_bench *bench,
                            enum gpu_model model, const char *profile, const char *label,
                            uint32_t n_chunks)
{
    char name[64];

    set_up(bench, model, profile, n_chunks);
    choose_encode(bench);
    snprintf(name, sizeof(name), "%s_encode_vs_copy", label);
    bench_pairs(run, name, kernel_gb_s, copy_gb_s, bench);
    choose_decode(bench);
    snprintf(name, sizeof(name), "%s_decode_vs_copy", label);
    bench_pairs(run, name, kernel_gb_s, copy_gb_s, bench);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *profile;
        const char *label; /* of results */
    } others[] = {
        {"saw8", "saw8"},
        {"safe", "safe"},
        {"saw6", "saw6"},
        {"saw5", "saw5"},
        {"saw3", "saw3"},
        {"saw2", "saw2"},
        {"saw3-search", "saw3_search"},
        {"saw2-search", "saw2_search"},
        {"tq4", "tq4"},
        {"tq3", "tq3"},
        {"tq2", "tq2"},
        {"tq3.5", "tq3_split"},
        {"tq2.5", "tq2_split"},
        {"kivi4-g32", "kivi4"},
        {"kivi4-g128", "kivi4_g128"},
        {"kivi2-g32", "kivi2"},
    };
    static const char *const inputs[] = {"x3", "xcl3", "xcl2"};
    struct bench_run run;
    struct kernels_bench bench;
    uint32_t n_chunks;

    bench_init(&run, argc, argv);
    memset(&bench, 0, sizeof(bench));
    bench.gpu = gpu_open();
    if (kvf_gpu_device_load(bench.gpu, kvf_bench_images[0].fatbin) != KVF_OK) {
        bench_die("kernels: %s", bench.gpu->text);
    }
    n_chunks = (uint32_t)bench_number(&run, "--chunks", 8);
    bench.n_layers = (uint32_t)bench_number(&run, "--layers", 0);
    bench.n_blocks_max = (uint32_t)bench_number(&run, "--thread-blocks", 0);
    bench.stream = gpu_stream(bench.gpu, KVF_GPU_PRIORITY_HIGH);
    bench.timers[0] = gpu_timer(bench.gpu);
    bench.timers[1] = gpu_timer(bench.gpu);
    bench.copy_from = gpu_memory(bench.gpu, (uint64_t)n_chunks << 25);
    bench.copy_to = gpu_memory(bench.gpu, (uint64_t)n_chunks << 25);
    set_up(&bench, GPU_LLAMA_8B, "balanced", n_chunks);
    measure_layout(&run, &bench, "paged");
    choose_traffic(&bench, "kvf_bench_encode_traffic");
    bench_pairs(&run, "encode_traffic_vs_copy", kernel_gb_s, copy_gb_s, &bench);
    bench_pairs(&run, "fill_vs_copy", fill_gb_s, copy_gb_s, &bench);
    choose_encode(&bench);
    bench_pairs(&run, "rotation_cost", kernel_ms, unrotated_ms, &bench);
    make_contiguous(&bench);
    measure_layout(&run, &bench, "contig");
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        measure_profile(&run, &bench, GPU_LLAMA_8B, others[i].profile, others[i].label, n_chunks);
    }
    for (size_t i = 0; i < sizeof(inputs) / sizeof(inputs[0]); i++) {
        measure_profile(&run, &bench, GPU_X_2048, inputs[i], inputs[i], n_chunks);
    }
    /* last: it leaves no numbers in the pages */
    choose_traffic(&bench, "kvf_bench_decode_traffic");
    bench_pairs(&run, "decode_traffic_vs_copy", kernel_gb_s, copy_gb_s, &bench);
    return 0;
}
