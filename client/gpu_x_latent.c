/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_x_latent.c: see gpu_latent.h.
 */
#include "client/gpu_latent.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/x_internal.h"
#include "codec/codec_fp.h"
#include "codec/codec_latent.h"

enum {
    PARTS = 2, /* of U: rounded, and what is left of it, rounded */
};

struct kvf_gpu_latent {
    struct kvf_gpu_device *device;
    uint32_t n_layers;
    uint32_t d_model;
    uint32_t rank;
    uint32_t base_layer; /* layers after it are differences; n_layers: none is */
    uint8_t dtype;
    uint64_t profile_fp; /* of the plan that base_layer is of */
    uint64_t factors;    /* [layers][PARTS][d_model][rank] */
    uint64_t sums;       /* fp32 [tokens][d_model] */
    uint64_t x;          /* [tokens][d_model] */
};

static uint16_t narrowed(uint8_t dtype, float value)
{
    return dtype == KVF_DTYPE_BF16 ? kvf_bf16_from_f32(value) : kvf_f16_from_f32(value);
}

static float widened(uint8_t dtype, uint16_t bits)
{
    return dtype == KVF_DTYPE_BF16 ? kvf_f32_from_bf16(bits) : kvf_f32_from_f16(bits);
}

/* U of a layer, in parts, to the device. */
static int factors_copy(struct kvf_gpu_latent *latent, const float *u, uint16_t *parts,
                        uint32_t layer)
{
    const struct kvf_gpu_driver *driver = &latent->device->driver;
    size_t n = (size_t)latent->d_model * latent->rank;
    size_t bytes = PARTS * n * sizeof(*parts);
    int status;

    for (size_t i = 0; i < n; i++) {
        parts[i] = narrowed(latent->dtype, u[i]);
        parts[n + i] = narrowed(latent->dtype, u[i] - widened(latent->dtype, parts[i]));
    }
    status = kvf_gpu_device_result(
        latent->device,
        driver->cuMemcpyHtoDAsync(latent->factors + layer * bytes, parts, bytes, NULL),
        "cuMemcpyHtoDAsync of factors of X");
    return status == KVF_OK ? kvf_gpu_device_result(latent->device, driver->cuCtxSynchronize(),
                                                    "cuCtxSynchronize")
                            : status;
}

/* All layers' factors from their file. */
static int factors_take(struct kvf_gpu_latent *latent, struct kvf_gpu *gpu,
                        const struct kvf_x_weights *weights)
{
    struct kvf_x host = {.weights = *weights,
                         .log = gpu->client->log,
                         .log_arg = gpu->client->log_arg}; /* of which files are read */
    uint16_t *parts = NULL;
    int status = kvf_latent_open(&host, gpu->client->factors_digest);

    if (status == KVF_OK) {
        parts = calloc((size_t)PARTS * latent->d_model * latent->rank, sizeof(*parts));
        status = parts != NULL ? KVF_OK : KVF_ERR_NO_MEMORY;
    }
    for (uint32_t layer = 0; layer < latent->n_layers && status == KVF_OK; layer++) {
        status = kvf_latent_load(&host, layer);
        if (status == KVF_OK) {
            status = factors_copy(latent, host.latent.u, parts, layer);
        }
    }
    free(parts);
    kvf_latent_close(&host.latent);
    return status;
}

static int memory_take(struct kvf_gpu_latent *latent, uint32_t tokens_max, char *text,
                       size_t text_bytes)
{
    const struct kvf_gpu_driver *driver = &latent->device->driver;
    uint64_t factors = (uint64_t)latent->n_layers * PARTS * latent->d_model * latent->rank *
                       sizeof(uint16_t);
    uint64_t elements = (uint64_t)tokens_max * latent->d_model;

    if (driver->cuMemAlloc(&latent->factors, factors) != KVF_CUDA_SUCCESS ||
        driver->cuMemAlloc(&latent->sums, elements * sizeof(float)) != KVF_CUDA_SUCCESS ||
        driver->cuMemAlloc(&latent->x, elements * sizeof(uint16_t)) != KVF_CUDA_SUCCESS) {
        snprintf(text, text_bytes,
                 "the GPU has no room for factors of X (%llu MiB) and for sums of %u tokens (%llu "
                 "MiB): free some, or ask for smaller windows",
                 (unsigned long long)(factors >> 20), tokens_max,
                 (unsigned long long)(elements * (sizeof(float) + sizeof(uint16_t)) >> 20));
        return KVF_ERR_NO_MEMORY;
    }
    return KVF_OK;
}

int kvf_gpu_latent_open(struct kvf_gpu *gpu, const struct kvf_x_weights *weights,
                        uint32_t tokens_max, struct kvf_gpu_latent **latent_out, char *text,
                        size_t text_bytes)
{
    const struct kvf_codec_plan *plan = &gpu->plan;
    struct kvf_gpu_latent *latent;
    int status;

    *latent_out = NULL;
    if (weights->stored_width % 8 != 0 || weights->d_model % 8 != 0) {
        snprintf(text, text_bytes,
                 "a product takes X and latents of multiples of 8 elements, not of %u and %u",
                 weights->d_model, weights->stored_width);
        return KVF_ERR_UNSUPPORTED;
    }
    latent = calloc(1, sizeof(*latent));
    if (latent == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    *latent = (struct kvf_gpu_latent){
        .device = gpu->device,
        .n_layers = weights->n_layers,
        .d_model = weights->d_model,
        .rank = weights->stored_width,
        .base_layer = plan->profile->first_layers != 0 ? plan->base_layer : weights->n_layers,
        .dtype = weights->dtype,
        .profile_fp = plan->profile_fp,
    };
    status = memory_take(latent, tokens_max, text, text_bytes);
    if (status == KVF_OK) {
        status = factors_take(latent, gpu, weights);
    }
    if (status != KVF_OK) {
        latent = kvf_gpu_latent_close(latent);
    }
    *latent_out = latent;
    return status;
}

struct kvf_gpu_latent *kvf_gpu_latent_close(struct kvf_gpu_latent *latent)
{
    if (latent != NULL) {
        (void)latent->device->driver.cuMemFree(latent->factors);
        (void)latent->device->driver.cuMemFree(latent->sums);
        (void)latent->device->driver.cuMemFree(latent->x);
        free(latent);
    }
    return NULL;
}

uint32_t kvf_gpu_latent_width(const struct kvf_gpu_latent *latent)
{
    return latent->d_model;
}

bool kvf_gpu_latent_is_difference(const struct kvf_gpu_latent *latent, uint32_t layer)
{
    return layer > latent->base_layer;
}

bool kvf_gpu_latent_is_of(const struct kvf_gpu_latent *latent, const struct kvf_codec_plan *plan)
{
    return latent->profile_fp == plan->profile_fp;
}

static int pass(const struct kvf_gpu_latent *latent, const char *kernel,
                struct kvf_gpu_latent_work work, void *stream)
{
    const struct kvf_gpu_shape shape = {.kernel = kernel,
                                        .n_blocks = kvf_gpu_latent_blocks(work.n),
                                        .n_threads = KVF_GPU_LATENT_THREADS};
    void *parameters[] = {&work};

    work.dtype = latent->dtype;
    return kvf_gpu_device_launch(latent->device, &shape, parameters, stream);
}

/* A product with both parts of a layer's U, one added to the other. */
static int multiply(const struct kvf_gpu_latent *latent, struct kvf_gpu_blas *blas, uint32_t layer,
                    struct kvf_gpu_product product, uint64_t from, uint64_t to, void *stream)
{
    uint64_t u_bytes = (uint64_t)latent->d_model * latent->rank * sizeof(uint16_t);
    int status = KVF_OK;

    product.c_stride = product.n;
    product.dtype = latent->dtype;
    for (uint32_t part = 0; part < PARTS && status == KVF_OK; part++) {
        status = kvf_gpu_blas_multiply(
            blas, &product, from, latent->factors + (layer * PARTS + part) * u_bytes, to, stream);
        product.adds = true;
    }
    return status;
}

int kvf_gpu_latent_add(const struct kvf_gpu_latent *latent, struct kvf_gpu_blas *blas,
                       uint32_t layer, uint64_t latents, uint32_t n_tokens, uint64_t sums,
                       void *stream)
{
    const struct kvf_gpu_product product = {.m = n_tokens,
                                            .n = latent->d_model,
                                            .k = latent->rank,
                                            .adds = kvf_gpu_latent_is_difference(latent, layer)};
    const struct kvf_gpu_latent_work work = {.from = latents,
                                             .n = (uint64_t)n_tokens * latent->rank};
    int status = pass(latent, "kvf_latent_clean", work, stream);

    return status == KVF_OK ? multiply(latent, blas, layer, product, latents, sums, stream)
                            : status;
}

int kvf_gpu_latent_queue(struct kvf_gpu_latent *latent, struct kvf_gpu_blas *blas, uint32_t layer,
                         uint64_t latents, uint32_t n_tokens, void *stream, uint64_t *x_out)
{
    const struct kvf_gpu_latent_work work = {
        .from = latent->sums, .to = latent->x, .n = (uint64_t)n_tokens * latent->d_model};
    int status = kvf_gpu_latent_add(latent, blas, layer, latents, n_tokens, latent->sums, stream);

    *x_out = latent->x;
    return status == KVF_OK ? pass(latent, "kvf_latent_narrow", work, stream) : status;
}

int kvf_gpu_latent_make(const struct kvf_gpu_latent *latent, struct kvf_gpu_blas *blas,
                        uint32_t layer, uint64_t x, uint32_t n_tokens,
                        const struct kvf_gpu_latent_room *room, void *stream)
{
    const struct kvf_gpu_product product = {
        .m = n_tokens, .n = latent->rank, .k = latent->d_model, .is_by_columns = true};
    const struct kvf_gpu_latent_work difference = {.from = x,
                                                   .less = room->sums,
                                                   .to = room->differences,
                                                   .n = (uint64_t)n_tokens * latent->d_model};
    const struct kvf_gpu_latent_work rounding = {
        .from = room->product, .to = room->latents, .n = (uint64_t)n_tokens * latent->rank};
    int status = KVF_OK;

    if (kvf_gpu_latent_is_difference(latent, layer)) {
        status = pass(latent, "kvf_latent_subtract", difference, stream);
        x = room->differences;
    }
    if (status == KVF_OK) {
        status = multiply(latent, blas, layer, product, x, room->product, stream);
    }
    return status == KVF_OK ? pass(latent, "kvf_latent_narrow", rounding, stream) : status;
}
