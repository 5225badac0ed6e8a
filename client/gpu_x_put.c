/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_x_put.c: X of a request, put layer by layer from device memory (end of part 9 of kvferry.h).
 *
 * An engine's X of a layer is gone when the next layer is computed, and a block has all layers. So
 * each layer is copied to a place of ours and encoded from there, into payloads of all blocks that
 * stay until the end; vectors that are not coded go to their raw areas at once. All of it is queued
 * on the engine's stream, and nobody waits for anything before the end.
 *
 * Of kind XG what is encoded are latents of X (gpu_latent.h), which are made in that place, of X
 * where the engine has it. Where the next layer is a difference they are decoded again, as a reader
 * will, and added up:
 *
 *   D = X - S, latents = D U, encode, decode, S += decoded U^T
 *
 * Who waits for whom, besides (named as in gpu_x.c; tests/gpu/test_x_order.c):
 *
 *   all layers -> copies to staging   x_put_encode_wait
 */
#include "client/gpu_internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "client/gpu_latent.h"
#include "client/x_internal.h"
#include "gpu/blas.h"
#include "kvferry_gpu_x.h"

enum {
    LATENT_X_ALIGN_BYTES = 16, /* that products take */
};

struct kvf_gpu_x_put {
    struct kvf_gpu *gpu;
    struct kvf_codec_plan plan; /* the GPU handle's may change meanwhile */
    struct kvf_gpu_kinds kinds;
    uint32_t n_tokens;
    uint32_t token_start;
    uint32_t n_chunks;
    uint32_t layer;         /* the next one */
    uint64_t layer_bytes;   /* of what is encoded: X, or latents */
    uint64_t payload_bytes; /* room for one */
    uint64_t memory;        /* all that follows, on the device */
    uint64_t x;             /* of one layer, or its latents */
    uint64_t payloads;
    uint64_t sums; /* of deltas: fp32 [chunk][chunk_tokens][width] */
    uint64_t scratch;
    uint64_t scratch_bytes;
    uint64_t lists; /* parts, of latents those that are decoded, layer by layer; numbers by layer,
                       page ids: a page is a chunk */
    uint64_t memory_bytes;

    /* kind XG */
    const struct kvf_gpu_latent *latent; /* NULL: X is stored */
    struct kvf_gpu_blas *blas;           /* of its own: its workspace is for one stream at a time */
    struct kvf_gpu_latent_room room;
    uint64_t decoded; /* [n_tokens][rank] */

    struct kvf_gpu_result *results; /* pinned */
    uint64_t results_address;
    struct kvf_gpu_work work;
    void *encoded; /* event, behind the last layer */
    void *stream;  /* of the last layer */
};

static uint32_t chunk_tokens(const struct kvf_gpu_x_put *put, uint32_t i)
{
    uint32_t full = put->plan.geometry.chunk_tokens;
    uint32_t left = put->n_tokens - i * full;

    return left < full ? left : full;
}

/* --- begin ------------------------------------------------------------------------------------ */

static uint64_t width_of(const struct kvf_gpu_x_put *put)
{
    return (uint64_t)put->plan.geometry.n_heads * put->plan.geometry.dim_k;
}

static uint64_t sums_bytes(const struct kvf_gpu_x_put *put)
{
    bool is_looped = (put->plan.block_flags & KVF_BLOCK_DELTAS) != 0;

    return is_looped ? width_of(put) * put->plan.geometry.chunk_tokens * sizeof(float) : 0;
}

static uint32_t n_parts(const struct kvf_gpu_x_put *put)
{
    return put->n_chunks * put->plan.geometry.n_layers;
}

/* Lists of parts: those that are encoded, and those that are decoded. */
static uint32_t n_part_lists(const struct kvf_gpu_x_put *put)
{
    return put->latent != NULL ? 2 : 1;
}

static uint64_t lists_bytes(const struct kvf_gpu_x_put *put)
{
    return n_parts(put) * (n_part_lists(put) * sizeof(struct kvf_gpu_part) + sizeof(uint32_t)) +
           put->n_chunks * sizeof(uint32_t);
}

/* Give arrays of latents their places from an address on. Returns where they end. */
static uint64_t room_place(struct kvf_gpu_x_put *put, uint64_t at)
{
    uint64_t rank = put->n_tokens * width_of(put);
    uint64_t d_model;

    if (put->latent == NULL) {
        return at;
    }
    d_model = (uint64_t)put->n_tokens * kvf_gpu_latent_width(put->latent);
    put->room.latents = put->x;
    put->room.differences = at;
    put->room.product = put->room.differences + kvf_gpu_align(d_model * sizeof(uint16_t));
    put->room.sums = put->room.product + kvf_gpu_align(rank * sizeof(float));
    put->decoded = put->room.sums + kvf_gpu_align(d_model * sizeof(float));
    return put->decoded + kvf_gpu_align(rank * sizeof(uint16_t));
}

/* The same of all memory. */
static uint64_t memory_place(struct kvf_gpu_x_put *put)
{
    put->x = put->memory;
    put->payloads = put->x + kvf_gpu_align(put->layer_bytes);
    put->sums = put->payloads + put->n_chunks * put->payload_bytes;
    put->scratch = put->sums + kvf_gpu_align(put->n_chunks * sums_bytes(put));
    put->lists = put->scratch + put->scratch_bytes;
    return room_place(put, put->lists + kvf_gpu_align(lists_bytes(put)));
}

/* What kernels are told, but for addresses. */
static void work_fill(struct kvf_gpu_x_put *put)
{
    uint64_t element_bytes = kvf_dtype_bytes(put->plan.geometry.dtype);

    put->layer_bytes = put->n_tokens * width_of(put) * element_bytes;
    put->work = (struct kvf_gpu_work){
        .pages = {{.page_stride_bytes = width_of(put) * put->plan.geometry.chunk_tokens *
                                        element_bytes,
                   .token_stride_bytes = width_of(put) * element_bytes,
                   .head_stride_bytes = put->plan.geometry.dim_k * element_bytes}},
        .n_parts = n_parts(put),
        .n_blocks = put->n_chunks,
        .n_layers = put->plan.geometry.n_layers,
        .tokens_a_page = put->plan.geometry.chunk_tokens,
        .tokens_max = chunk_tokens(put, 0),
        .shared_bytes_max = put->gpu->device->shared_bytes_max,
    };
    put->payload_bytes = kvf_gpu_align(kvf_gpu_payload_bound(&put->plan, chunk_tokens(put, 0)));
    put->scratch_bytes = kvf_gpu_align(kvf_gpu_encode_scratch_bytes(&put->work, &put->kinds));
    put->memory_bytes = memory_place(put) - put->memory;
}

static int memory_take(struct kvf_gpu_x_put *put, uint64_t memory_bytes)
{
    struct kvf_gpu_device *device = put->gpu->device;
    uint64_t taken = put->memory_bytes + (put->latent != NULL ? KVF_GPU_BLAS_WORKSPACE_BYTES : 0);
    uint64_t mib = (taken >> 20) + 1;
    void *memory = NULL;
    int status;

    if (memory_bytes != 0 && taken > memory_bytes) {
        kvf_client_log(put->gpu->client, 1,
                       "%u chunks of X on their way take %llu MiB of the GPU, and memory_bytes "
                       "allows %llu: put fewer tokens at a time, or allow more",
                       put->n_chunks, (unsigned long long)mib,
                       (unsigned long long)(memory_bytes >> 20));
        return KVF_ERR_TOO_LARGE;
    }
    if (device->driver.cuMemAlloc(&put->memory, put->memory_bytes) != KVF_CUDA_SUCCESS) {
        put->memory = 0;
        kvf_client_log(put->gpu->client, 1,
                       "%u chunks of X on their way take %llu MiB of the GPU, which it has no room "
                       "for: put fewer tokens at a time, or leave it more",
                       put->n_chunks, (unsigned long long)mib);
        return KVF_ERR_NO_MEMORY;
    }
    (void)memory_place(put);
    status = kvf_gpu_host_alloc(device, put->n_chunks * sizeof(*put->results), &memory,
                                &put->results_address);
    put->results = memory;
    return status == KVF_OK ? kvf_gpu_event_create(device, &put->encoded) : status;
}

/* A part that has been encoded, as it is decoded. */
static struct kvf_gpu_part decoded_part(const struct kvf_gpu_x_put *put,
                                        const struct kvf_gpu_part *encoded)
{
    struct kvf_gpu_part part = *encoded;

    part.base = put->decoded;
    part.source = encoded->base;
    return part;
}

/* Parts block by block, then those to be decoded, then numbers layer by layer, then page ids. */
static void lists_fill(const struct kvf_gpu_x_put *put, struct kvf_gpu_part *parts)
{
    uint32_t n_layers = put->plan.geometry.n_layers;
    uint32_t *numbers = (uint32_t *)(parts + n_part_lists(put) * n_parts(put));
    uint32_t *ids = numbers + n_parts(put);

    for (uint32_t chunk = 0; chunk < put->n_chunks; chunk++) {
        uint32_t n_tokens = chunk_tokens(put, chunk);
        uint32_t start = put->token_start + chunk * put->plan.geometry.chunk_tokens;
        uint64_t stored = put->payloads + chunk * put->payload_bytes;

        for (uint32_t layer = 0; layer < n_layers; layer++) {
            const struct kvf_codec_tensor *tensor = kvf_plan_tensor(&put->plan, layer, false);
            struct kvf_gpu_part *part = &parts[chunk * n_layers + layer];

            *part = (struct kvf_gpu_part){
                .base = put->x,
                .stored = stored,
                .first_page = chunk,
                .block = chunk,
                .n_sinks = kvf_plan_sinks(&put->plan, start, n_tokens),
                .n_tokens = (uint16_t)n_tokens,
                .n_wanted = (uint16_t)n_tokens,
                .layer = (uint16_t)layer,
                .loop = kvf_gpu_part_loop(&put->plan, layer, tensor),
            };
            part->sums = sums_bytes(put) != 0 ? put->sums + chunk * sums_bytes(put) : 0;
            kvf_gpu_part_fill(tensor, part);
            stored += part->fixed_bytes;
            numbers[layer * put->n_chunks + chunk] = chunk * n_layers + layer;
            if (put->latent != NULL) {
                parts[n_parts(put) + layer * put->n_chunks + chunk] = decoded_part(put, part);
            }
        }
        ids[chunk] = chunk;
    }
}

static int lists_upload(struct kvf_gpu_x_put *put)
{
    struct kvf_gpu_device *device = put->gpu->device;
    void *stream = put->gpu->up_stream;
    struct kvf_gpu_part *parts = calloc(1, lists_bytes(put));
    int status;

    if (parts == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    lists_fill(put, parts);
    memset(put->results, 0, put->n_chunks * sizeof(*put->results));
    put->work.parts = put->lists;
    put->work.numbers = put->work.parts + n_part_lists(put) * n_parts(put) * sizeof(*parts);
    put->work.page_ids = put->work.numbers + n_parts(put) * sizeof(uint32_t);
    put->work.results = put->results_address;
    put->work.scratch = put->scratch;
    status = kvf_gpu_device_result(
        device, device->driver.cuMemcpyHtoDAsync(put->lists, parts, lists_bytes(put), stream),
        "cuMemcpyHtoDAsync");
    if (status == KVF_OK) {
        status = kvf_gpu_device_result(
            device, device->driver.cuMemsetD8Async(put->scratch, 0, put->scratch_bytes, stream),
            "cuMemsetD8Async");
    }
    if (status == KVF_OK) {
        status = kvf_gpu_device_result(device, device->driver.cuStreamSynchronize(stream),
                                       "cuStreamSynchronize");
    }
    free(parts);
    return status;
}

static bool options_ok(const struct kvf_gpu *gpu, const struct kvf_gpu_x_put_options *options)
{
    uint32_t full = gpu->plan.geometry.chunk_tokens;

    return options != NULL && options->struct_bytes == sizeof(*options) && options->reserved == 0 &&
           options->n_tokens != 0 && options->token_start % full == 0 &&
           options->n_tokens <= UINT32_MAX - options->token_start &&
           options->n_tokens <= (uint32_t)KVF_REQUEST_KEYS_MAX * full;
}

/* The work of decoding a layer that has just been encoded. */
static struct kvf_gpu_work decode_work(const struct kvf_gpu_x_put *put, uint32_t layer)
{
    struct kvf_gpu_work work = put->work;

    memcpy(work.tensors, put->kinds.tensors[put->kinds.layer_kinds[layer]], sizeof(work.tensors));
    work.parts += (n_parts(put) + layer * put->n_chunks) * sizeof(struct kvf_gpu_part);
    work.n_parts = put->n_chunks;
    work.numbers = 0;
    return work;
}

/* The launches of it. 0: there is no kernel. */
static uint32_t decode_launches(const struct kvf_gpu_work *work,
                                struct kvf_gpu_launch launches_out[KVF_GPU_LAUNCHES_MAX])
{
    uint32_t n = kvf_gpu_decode(work, work->tensors[0].codec, launches_out);

    return n != 0 ? n + kvf_gpu_restore(work, launches_out + n) : 0;
}

/* Are there kernels for all of it, one layer at a time? */
static int check_kernels(const struct kvf_gpu_x_put *put)
{
    struct kvf_gpu_launch launches[KVF_GPU_LAUNCHES_MAX];
    bool has_kernels = put->plan.geometry.kind >= KVF_KIND_X && put->gpu->agent == NULL &&
                       kvf_codec_plan_is_fixed(&put->plan) && n_parts(put) <= KVF_GPU_PARTS_MAX;

    for (uint32_t layer = 0; has_kernels && layer < put->plan.geometry.n_layers; layer++) {
        struct kvf_gpu_work decode = decode_work(put, layer);

        has_kernels = kvf_gpu_encode_layer(&put->work, &put->kinds, layer, launches) != 0 &&
                      (put->latent == NULL || decode_launches(&decode, launches) != 0);
    }
    if (!has_kernels) {
        kvf_client_log(put->gpu->client, 0,
                       "X cannot be put layer by layer on the GPU: it takes kind X or latents of "
                       "it, path ENGINE, a profile that codes (not \"%s\"), and at most %u parts",
                       put->plan.profile->name, KVF_GPU_PARTS_MAX);
    }
    return has_kernels ? KVF_OK : KVF_ERR_UNSUPPORTED;
}

/* What latents are made by. */
static int latent_take(struct kvf_gpu_x_put *put, const struct kvf_gpu_x *x)
{
    struct kvf_client *client = put->gpu->client;

    if (put->plan.geometry.kind != KVF_KIND_XG) {
        return x == NULL ? KVF_OK : KVF_ERR_INVALID;
    }
    put->latent = kvf_gpu_x_latent(x, put->gpu);
    if (put->latent == NULL) {
        kvf_client_log(
            client, 0,
            "latents are made of X by the factors that kvf_gpu_x_open has registered for "
            "this GPU handle: give it in x");
        return KVF_ERR_REFUSED;
    }
    if (!kvf_gpu_latent_is_of(put->latent, &put->plan)) {
        kvf_client_log(client, 0,
                       "what is registered for X is of a profile that the client had before: "
                       "kvf_gpu_x_open again");
        return KVF_ERR_MISMATCH;
    }
    return KVF_OK;
}

static int blas_take(struct kvf_gpu_x_put *put)
{
    char text[KVF_GPU_TEXT_BYTES] = "";
    int status = KVF_OK;

    if (put->latent != NULL) {
        status = kvf_gpu_blas_open(put->gpu->device, &put->blas, text, sizeof(text));
    }
    if (status != KVF_OK) {
        kvf_client_log(put->gpu->client, 0, "latents of X cannot be made on the GPU: %s", text);
    }
    return status;
}

static int put_start(struct kvf_gpu_x_put *put, const struct kvf_gpu_x_put_options *options)
{
    int status = latent_take(put, options->x);

    if (status == KVF_OK) {
        work_fill(put);
        status = check_kernels(put);
    }
    if (status == KVF_OK) {
        status = memory_take(put, options->memory_bytes);
    }
    if (status == KVF_OK) {
        status = blas_take(put);
    }
    return status == KVF_OK ? lists_upload(put) : status;
}

int kvf_gpu_x_put_begin(struct kvf_gpu *gpu, const struct kvf_gpu_x_put_options *options,
                        struct kvf_gpu_x_put **put_out)
{
    struct kvf_gpu_x_put *put = NULL;
    int status;

    if (gpu == NULL) {
        return KVF_ERR_UNSUPPORTED;
    }
    if (put_out == NULL || kvf_gpu_device_enter(gpu->device) != KVF_OK) {
        return put_out == NULL ? KVF_ERR_INVALID : KVF_ERR_IO;
    }
    status = kvf_gpu_begin(gpu);
    if (status == KVF_OK && !options_ok(gpu, options)) {
        status = KVF_ERR_INVALID;
    }
    if (status == KVF_OK) {
        put = calloc(1, sizeof(*put));
        status = put != NULL ? KVF_OK : KVF_ERR_NO_MEMORY;
    }
    if (put != NULL) {
        uint32_t full = gpu->plan.geometry.chunk_tokens;

        put->gpu = gpu;
        put->plan = gpu->plan;
        put->kinds = gpu->kinds;
        put->n_tokens = options->n_tokens;
        put->token_start = options->token_start;
        put->n_chunks = (options->n_tokens + full - 1) / full;
        status = put_start(put, options);
    }
    kvf_gpu_device_leave(gpu->device);
    if (status != KVF_OK) {
        put = kvf_gpu_x_put_cancel(put);
    }
    *put_out = put;
    return status;
}

struct kvf_gpu_x_put *kvf_gpu_x_put_cancel(struct kvf_gpu_x_put *put)
{
    if (put != NULL && kvf_gpu_device_enter(put->gpu->device) == KVF_OK) {
        const struct kvf_gpu_driver *driver = &put->gpu->device->driver;

        if (put->layer != 0) {
            (void)driver->cuStreamSynchronize(put->stream);
        }
        kvf_gpu_event_drop(put->gpu, put->encoded);
        kvf_gpu_host_free(put->gpu->device, put->results);
        (void)kvf_gpu_blas_close(put->blas);
        (void)driver->cuMemFree(put->memory);
        kvf_gpu_device_leave(put->gpu->device);
    }
    free(put);
    return NULL;
}

/* --- layers ----------------------------------------------------------------------------------- */

static int launch_layer(struct kvf_gpu_x_put *put, uint32_t layer, void *stream)
{
    struct kvf_gpu_launch launches[KVF_GPU_LAUNCHES_MAX];
    uint32_t n = kvf_gpu_encode_layer(&put->work, &put->kinds, layer, launches);
    int status = KVF_OK;

    for (uint32_t i = 0; i < n && status == KVF_OK; i++) {
        struct kvf_gpu_work work = kvf_gpu_layer_work(&put->work, &put->kinds, layer,
                                                      launches[i].kind);

        status = kvf_gpu_launch_all(put->gpu, &work, NULL, &launches[i], 1, stream);
    }
    return status;
}

/* What is to be encoded of a layer, to put->x. */
static int layer_take(struct kvf_gpu_x_put *put, uint32_t layer, uint64_t from, void *stream)
{
    struct kvf_gpu_device *device = put->gpu->device;

    if (put->latent != NULL) {
        return kvf_gpu_latent_make(put->latent, put->blas, layer, from, put->n_tokens, &put->room,
                                   stream);
    }
    return kvf_gpu_device_result(
        device, device->driver.cuMemcpyDtoDAsync(put->x, from, put->layer_bytes, stream),
        "cuMemcpyDtoDAsync");
}

/* S of a layer that has been encoded. */
static int layer_add(struct kvf_gpu_x_put *put, uint32_t layer, void *stream)
{
    struct kvf_gpu_launch launches[KVF_GPU_LAUNCHES_MAX];
    struct kvf_gpu_work work = decode_work(put, layer);
    uint32_t n = decode_launches(&work, launches);
    int status = kvf_gpu_launch_all(put->gpu, &work, NULL, launches, n, stream);

    return status == KVF_OK ? kvf_gpu_latent_add(put->latent, put->blas, layer, put->decoded,
                                                 put->n_tokens, put->room.sums, stream)
                            : status;
}

/* Does the layer after this one take S? */
static bool is_added(const struct kvf_gpu_x_put *put, uint32_t layer)
{
    return put->latent != NULL && layer + 1 < put->plan.geometry.n_layers &&
           kvf_gpu_latent_is_difference(put->latent, layer + 1);
}

int kvf_gpu_x_put_layer(struct kvf_gpu_x_put *put, uint32_t layer, const void *data, void *stream)
{
    struct kvf_gpu_device *device;
    int status;

    if (put == NULL || data == NULL || layer != put->layer ||
        layer == put->plan.geometry.n_layers ||
        (put->latent != NULL && (uintptr_t)data % LATENT_X_ALIGN_BYTES != 0)) {
        return KVF_ERR_INVALID;
    }
    device = put->gpu->device;
    if (kvf_gpu_device_enter(device) != KVF_OK) {
        return KVF_ERR_IO;
    }
    put->stream = stream;
    put->layer++;
    status = layer_take(put, layer, (uint64_t)(uintptr_t)data, stream);
    if (status == KVF_OK) {
        status = launch_layer(put, layer, stream);
    }
    if (status == KVF_OK && is_added(put, layer)) {
        status = layer_add(put, layer, stream);
    }
    kvf_gpu_device_leave(device);
    return status;
}

/* --- the end ---------------------------------------------------------------------------------- */

/* Tables and results, and the wait for them. */
static int finish(struct kvf_gpu_x_put *put)
{
    const struct kvf_gpu_launch launch = kvf_gpu_encode_finish(&put->work);
    int status = kvf_gpu_launch_all(put->gpu, &put->work, &put->kinds, &launch, 1, put->stream);

    if (status == KVF_OK) {
        status = kvf_gpu_record(put->gpu, put->encoded, put->stream);
    }
    return status == KVF_OK && !KVF_MUTANT(x_put_encode_wait)
               ? kvf_gpu_device_result(put->gpu->device,
                                       put->gpu->device->driver.cuEventSynchronize(put->encoded),
                                       "cuEventSynchronize")
               : status;
}

/* A payload into its slot, and its page. */
static int block_fill(struct kvf_gpu_x_put *put, uint32_t i, const struct kvf_stage *stage)
{
    struct kvf_gpu *gpu = put->gpu;
    const struct kvf_gpu_result *result = &put->results[i];
    uint64_t bytes = kvf_gpu_payload_bytes(result);
    struct kvf_record_page page;
    int status = kvf_gpu_device_result(
        gpu->device,
        gpu->device->driver.cuMemcpyDtoHAsync(
            stage->payload, put->payloads + i * put->payload_bytes, bytes, gpu->out_stream),
        "cuMemcpyDtoHAsync");

    if (status == KVF_OK) {
        status = kvf_gpu_device_result(gpu->device,
                                       gpu->device->driver.cuStreamSynchronize(gpu->out_stream),
                                       "cuStreamSynchronize");
    }
    if (status == KVF_OK) {
        status = kvf_block_describe_gpu(
            &put->plan, put->token_start + i * put->plan.geometry.chunk_tokens,
            chunk_tokens(put, i), result, kvf_crc32c(0, stage->payload, bytes), &page);
    }
    if (status == KVF_OK) {
        status = kvf_stage_settle(gpu->client, stage->stage, (uint32_t)page.header.total_bytes);
    }
    if (status == KVF_OK) {
        memcpy(stage->record, &page, sizeof(page));
    }
    return status;
}

static int put_block(void *arg, uint32_t i, const struct kvf_key *key,
                     const struct kvf_put_options *options)
{
    struct kvf_gpu_x_put *put = arg;
    struct kvf_client *client = put->gpu->client;
    const struct kvf_gpu_result *result = &put->results[i];
    struct kvf_stage stage;
    int status;

    if ((result->flags & KVF_GPU_REDO) != 0) {
        kvf_client_log(client, 1,
                       "block %u of X is not stored: of one of its layers more than 1/16 of the "
                       "groups are not numbers, or too large",
                       i);
        return KVF_ERR_UNSUPPORTED;
    }
    if (client->plan.profile_fp != put->plan.profile_fp ||
        client->plan.model_fp != put->plan.model_fp) {
        return KVF_ERR_MISMATCH; /* a record of another plan would be refused by every reader */
    }
    status = kvf_stage_acquire(client, kvf_gpu_payload_bytes(result), &stage);
    return status == KVF_OK
               ? kvf_x_put_staged(client, &stage, block_fill(put, i, &stage), key, options)
               : status;
}

static int put_blocks(struct kvf_gpu_x_put *put, const struct kvf_key *keys,
                      const struct kvf_put_options *options, int32_t *statuses_out)
{
    struct kvf_gpu_pin *pin = kvf_gpu_pin_staging(put->gpu);
    int status;

    if (pin != NULL) {
        pin->n_uses++;
    }
    status = kvf_x_put_chain(put_block, put, keys, put->n_chunks, options, statuses_out);
    if (pin != NULL) {
        pin->n_uses--;
    }
    return status;
}

int kvf_gpu_x_put_end(struct kvf_gpu_x_put *put, const struct kvf_key *keys, uint32_t n,
                      const struct kvf_put_options *options, int32_t *statuses_out)
{
    int status = KVF_ERR_IO;

    if (put == NULL || keys == NULL || n != put->n_chunks ||
        put->layer != put->plan.geometry.n_layers ||
        (options != NULL && options->struct_bytes != sizeof(*options))) {
        return KVF_ERR_INVALID;
    }
    for (uint32_t i = 0; statuses_out != NULL && i < n; i++) {
        statuses_out[i] = status;
    }
    if (kvf_gpu_device_enter(put->gpu->device) == KVF_OK) {
        status = finish(put);
        if (status == KVF_OK) {
            status = put_blocks(put, keys, options, statuses_out);
        } else {
            (void)kvf_gpu_break(put->gpu, status);
        }
        kvf_gpu_device_leave(put->gpu->device);
    }
    (void)kvf_gpu_x_put_cancel(put);
    return status;
}
