/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_load.c: see gpu_load.h.
 */
#include "tests/bench/gpu_load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "codec/codec_layout.h"
#include "tests/bench/bench.h"

#define FILL_BYTES (32u << 20) /* made on the host, then repeated */

/* ----------------------------------------------------------------------------------------------
 * Device
 */
struct kvf_gpu_device *gpu_open(void)
{
    struct kvf_gpu_choice choice = {.ordinal = 0};
    struct kvf_gpu_device *gpu;
    char text[KVF_GPU_TEXT_BYTES];

    if (kvf_gpu_images[0].name == NULL) {
        fprintf(stderr, "this build has no kernels: no nvcc was found\n");
        exit(77);
    }
    if (kvf_gpu_device_open(&choice, &gpu, text, sizeof(text)) != KVF_OK) {
        fprintf(stderr, "no GPU: %s\n", text);
        exit(77);
    }
    for (const struct kvf_gpu_image *image = kvf_gpu_images; image->name != NULL; image++) {
        if (kvf_gpu_device_load(gpu, image->fatbin) != KVF_OK) {
            bench_die("%s: %s", image->name, gpu->text);
        }
    }
    if (kvf_gpu_device_enter(gpu) != KVF_OK) {
        bench_die("no context: %s", gpu->text);
    }
    return gpu;
}

void gpu_must(const struct kvf_gpu_device *gpu, int result, const char *what)
{
    if (result != KVF_CUDA_SUCCESS) {
        bench_die("%s: %s", what, kvf_gpu_driver_text(&gpu->driver, result));
    }
}

uint64_t gpu_memory(struct kvf_gpu_device *gpu, size_t bytes)
{
    uint64_t address;

    gpu_must(gpu, gpu->driver.cuMemAlloc(&address, bytes), "device memory");
    return address;
}

uint8_t *gpu_host_memory(struct kvf_gpu_device *gpu, size_t bytes)
{
    uint64_t address;
    void *memory;

    if (kvf_gpu_host_alloc(gpu, bytes, &memory, &address) != KVF_OK) {
        bench_die("pinned memory: %s", gpu->text);
    }
    if (address != (uintptr_t)memory) {
        bench_die("the device sees pinned memory at another address than the host");
    }
    memset(memory, 1, bytes);
    return memory;
}

void *gpu_stream(struct kvf_gpu_device *gpu, enum kvf_gpu_priority priority)
{
    void *stream;

    if (kvf_gpu_stream_create(gpu, priority, &stream) != KVF_OK) {
        bench_die("stream: %s", gpu->text);
    }
    return stream;
}

void *gpu_timer(struct kvf_gpu_device *gpu)
{
    void *event;

    gpu_must(gpu, gpu->driver.cuEventCreate(&event, 0), "event");
    return event;
}

double gpu_timer_s(struct kvf_gpu_device *gpu, void *from, void *to)
{
    float ms;

    gpu_must(gpu, gpu->driver.cuEventSynchronize(to), "wait");
    gpu_must(gpu, gpu->driver.cuEventElapsedTime(&ms, from, to), "time");
    return (double)ms / 1e3;
}

/* ----------------------------------------------------------------------------------------------
 * Pages
 */
static void geometry_of(enum gpu_model model, struct kvf_geometry *geometry)
{
    static const struct {
        uint8_t kind;
        uint16_t n_layers;
        uint16_t n_heads;
        uint16_t dim_k;
        uint16_t dim_v;
    } models[] = {
        [GPU_LLAMA_8B] = {KVF_KIND_KV, 32, 8, 128, 128},
        [GPU_MLA] = {KVF_KIND_MLA, 61, 1, 512, 64},
        [GPU_X_2048] = {KVF_KIND_X, 32, 16, 128, 0},
    };

    *geometry = (struct kvf_geometry){
        .struct_bytes = sizeof(*geometry),
        .kind = models[model].kind,
        .dtype = KVF_DTYPE_BF16,
        .rope_state = models[model].kind < KVF_KIND_X ? KVF_ROPE_POST : KVF_ROPE_NONE,
        .n_layers = models[model].n_layers,
        .n_heads = models[model].n_heads,
        .dim_k = models[model].dim_k,
        .dim_v = models[model].dim_v,
        .chunk_tokens = GPU_CHUNK_TOKENS,
    };
}

/* Values as KV has them: normal, with a channel that stands out. */
static void fill_pages(const struct gpu_load *load, struct kvf_gpu_device *gpu)
{
    uint64_t bytes = load->kv_bytes;
    uint16_t *values = bench_memory(FILL_BYTES, 7);
    uint64_t done;

    for (size_t i = 0; i < FILL_BYTES / sizeof(*values); i++) {
        /* the exponents of 1/8 to 16, more of the middle ones */
        uint32_t exponent = 124u + (values[i] >> 13 & 3u) + (values[i] >> 11 & 3u);

        values[i] = (uint16_t)((values[i] & 0x807fu) | exponent << 7);
    }
    gpu_must(gpu,
             gpu->driver.cuMemcpyHtoDAsync(load->pages, values,
                                           bytes < FILL_BYTES ? bytes : FILL_BYTES, NULL),
             "values");
    for (done = FILL_BYTES; done < bytes; done += FILL_BYTES) {
        uint64_t n = bytes - done < FILL_BYTES ? bytes - done : FILL_BYTES;

        gpu_must(gpu, gpu->driver.cuMemcpyDtoDAsync(load->pages + done, load->pages, n, NULL),
                 "values");
    }
    gpu_must(gpu, gpu->driver.cuCtxSynchronize(), "values");
    bench_memory_free(values, FILL_BYTES);
}

static void lay_out_pages(struct gpu_load *load, struct kvf_gpu_device *gpu)
{
    const struct kvf_geometry *geometry = &load->plan.geometry;
    uint64_t head_bytes = (uint64_t)(geometry->dim_k + geometry->dim_v) * sizeof(uint16_t);
    uint64_t device_ids;

    load->n_pages = load->n_chunks * (GPU_CHUNK_TOKENS / GPU_PAGE_TOKENS);
    load->page_bytes = geometry->n_heads * GPU_PAGE_TOKENS * head_bytes;
    load->layer_bytes = load->n_pages * load->page_bytes;
    load->kv_bytes = geometry->n_layers * load->layer_bytes;
    load->pages = gpu_memory(gpu, load->kv_bytes);
    load->page_ids = calloc(load->n_pages, sizeof(*load->page_ids));
    if (load->page_ids == NULL) {
        bench_die("no memory");
    }
    bench_shuffle(load->page_ids, load->n_pages, 3);
    device_ids = gpu_memory(gpu, load->n_pages * sizeof(*load->page_ids));
    gpu_must(gpu,
             gpu->driver.cuMemcpyHtoDAsync(device_ids, load->page_ids,
                                           load->n_pages * sizeof(*load->page_ids), NULL),
             "page ids");
    load->work.page_ids = device_ids;
    for (int i = 0; i < 2; i++) {
        load->work.pages[i] = (struct kvf_gpu_pages){
            .page_stride_bytes = load->page_bytes,
            .token_stride_bytes = head_bytes,
            .head_stride_bytes = GPU_PAGE_TOKENS * head_bytes,
        };
    }
    fill_pages(load, gpu);
}

/* ----------------------------------------------------------------------------------------------
 * Work
 */
static uint64_t part_bytes(const struct kvf_codec_tensor *tensor)
{
    struct kvf_codec_sizes sizes;

    if (tensor->dim == 0) {
        return 0;
    }
    tensor->ops->sizes(tensor, GPU_CHUNK_TOKENS, &sizes);
    return kvf_sizes_total(&sizes);
}

uint64_t gpu_load_layer_offset(const struct gpu_load *load, uint32_t layer)
{
    uint64_t offset = 0;

    for (uint32_t i = 0; i < layer; i++) {
        offset += part_bytes(kvf_plan_tensor(&load->plan, i, false)) +
                  part_bytes(kvf_plan_tensor(&load->plan, i, true));
    }
    return offset;
}

uint64_t gpu_load_payloads_bytes(const struct gpu_load *load)
{
    return load->n_chunks * load->payload_bytes;
}

static void fill_parts(struct gpu_load *load, uint64_t payloads)
{
    const struct kvf_codec_plan *plan = &load->plan;
    uint64_t dim_k_bytes = (uint64_t)plan->geometry.dim_k * sizeof(uint16_t);
    uint32_t n_tensors = kvf_plan_has_v(plan) ? 2 : 1;

    for (uint32_t i = 0; i < load->n_chunks * load->parts_a_chunk; i++) {
        uint32_t chunk = i / load->parts_a_chunk;
        uint32_t layer = i % load->parts_a_chunk / n_tensors;
        uint32_t is_v = i % n_tensors;

        load->parts[i] = (struct kvf_gpu_part){
            .base = load->pages + layer * load->layer_bytes + is_v * dim_k_bytes,
            .stored = payloads + chunk * load->payload_bytes + gpu_load_layer_offset(load, layer) +
                      is_v * part_bytes(&plan->kinds[0].k),
            .first_page = chunk * (GPU_CHUNK_TOKENS / GPU_PAGE_TOKENS),
            .block = chunk,
            .n_tokens = GPU_CHUNK_TOKENS,
            .n_wanted = GPU_CHUNK_TOKENS,
            .layer = (uint16_t)layer,
            .is_v = (uint8_t)is_v,
            .loop = kvf_gpu_part_loop(plan, layer, kvf_plan_tensor(plan, layer, is_v != 0)),
        };
        kvf_gpu_part_fill(kvf_plan_tensor(plan, layer, is_v != 0), &load->parts[i]);
    }
}

static void choose_launches(struct gpu_load *load)
{
    const struct kvf_codec_plan *plan = &load->plan;
    bool is_one = load->kinds.n == 1 || load->work.tensors[0].is_looped != 0;

    load->n_encode = kvf_gpu_encode(&load->work, &load->kinds, load->encode);
    if (load->n_encode == 0 || !is_one || !kvf_codec_plan_is_fixed(plan)) {
        bench_die("no kernels for profile %s", plan->profile->name);
    }
}

static void make_work(struct gpu_load *load, struct kvf_gpu_device *gpu, uint64_t payloads)
{
    uint32_t n_parts = load->n_chunks * load->parts_a_chunk;

    load->parts = calloc(n_parts, sizeof(*load->parts));
    if (load->parts == NULL) {
        bench_die("no memory");
    }
    fill_parts(load, payloads);
    load->device_parts = gpu_memory(gpu, n_parts * sizeof(*load->parts));
    gpu_must(gpu,
             gpu->driver.cuMemcpyHtoDAsync(load->device_parts, load->parts,
                                           n_parts * sizeof(*load->parts), NULL),
             "parts");
    load->results = (void *)gpu_host_memory(gpu, load->n_chunks * sizeof(*load->results));
    load->work.parts = load->device_parts;
    load->work.results = (uintptr_t)load->results;
    load->work.n_parts = n_parts;
    load->work.n_blocks = load->n_chunks;
    load->work.n_layers = load->plan.geometry.n_layers;
    load->work.tokens_a_page = GPU_PAGE_TOKENS;
    load->work.has_v = kvf_plan_has_v(&load->plan);
    load->work.tokens_max = GPU_CHUNK_TOKENS;
    load->work.shared_bytes_max = gpu->shared_bytes_max;
    kvf_gpu_kinds_fill(&load->plan, &load->kinds);
    load->work.scratch = gpu_memory(gpu, kvf_gpu_encode_scratch_bytes(&load->work, &load->kinds));
    load->work = kvf_gpu_launch_work(&load->work, &load->kinds, KVF_GPU_WHOLE);
    choose_launches(load);
    gpu_must(gpu, gpu->driver.cuCtxSynchronize(), "work");
}

void gpu_load_init(struct gpu_load *load, struct kvf_gpu_device *gpu, enum gpu_model model,
                   const char *profile, uint32_t n_chunks, uint64_t payloads)
{
    struct kvf_geometry geometry;

    memset(load, 0, sizeof(*load));
    geometry_of(model, &geometry);
    if (kvf_codec_plan_init(&load->plan, &geometry, profile) != KVF_OK) {
        bench_die("no plan for profile %s", profile);
    }
    load->n_chunks = n_chunks;
    load->payload_bytes = kvf_codec_plan_payload_bytes(&load->plan, GPU_CHUNK_TOKENS);
    load->parts_a_chunk = geometry.n_layers * (kvf_plan_has_v(&load->plan) ? 2u : 1u);
    lay_out_pages(load, gpu);
    make_work(load, gpu, payloads);
}

void gpu_load_clone(struct gpu_load *load, struct kvf_gpu_device *gpu, const struct gpu_load *of,
                    uint64_t payloads)
{
    *load = *of;
    make_work(load, gpu, payloads);
}

static void launch(struct kvf_gpu_device *gpu, const struct kvf_gpu_launch *launches, uint32_t n,
                   const struct kvf_gpu_work *work, void *stream)
{
    for (uint32_t i = 0; i < n; i++) {
        struct kvf_gpu_work copy = *work;
        uint32_t tensors = launches[i].tensors;
        void *parameters[2] = {&copy, &tensors};
        struct kvf_gpu_shape shape = {
            .kernel = launches[i].kernel,
            .n_blocks = launches[i].n_blocks,
            .blocks_a_processor = launches[i].blocks_a_processor,
            .n_threads = launches[i].n_threads,
            .shared_bytes = launches[i].shared_bytes,
        };

        if (kvf_gpu_device_launch(gpu, &shape, parameters, stream) != KVF_OK) {
            bench_die("%s: %s", shape.kernel, gpu->text);
        }
    }
}

void gpu_load_encode(const struct gpu_load *load, struct kvf_gpu_device *gpu, void *stream)
{
    launch(gpu, load->encode, load->n_encode, &load->work, stream);
}

void gpu_load_decode(const struct gpu_load *load, struct kvf_gpu_device *gpu, uint32_t chunk,
                     uint32_t layer_first, uint32_t n_layers, void *stream)
{
    struct kvf_gpu_launch launches[KVF_GPU_LAUNCHES_MAX];
    uint32_t n_tensors = kvf_plan_has_v(&load->plan) ? 2 : 1;
    struct kvf_gpu_work work = load->work;
    uint8_t codecs[2] = {load->plan.kinds[0].k.ops->id,
                         n_tensors == 2 ? load->plan.kinds[0].v.ops->id : 0};

    if (chunk != UINT32_MAX) {
        work.parts += (uint64_t)(chunk * load->parts_a_chunk + layer_first * n_tensors) *
                      sizeof(struct kvf_gpu_part);
        work.n_parts = n_layers * n_tensors;
        work.n_blocks = 1;
    }
    for (uint32_t i = 0; i < n_tensors; i++) {
        uint32_t n = kvf_gpu_decode(&work, codecs[i], launches);

        for (uint32_t j = 0; j < n; j++) {
            launches[j].tensors &= 1u << i;
            launch(gpu, &launches[j], launches[j].tensors != 0, &work, stream);
        }
    }
}
