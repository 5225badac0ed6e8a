/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_x_load.c: see gpu_x_load.h.
 */
#include "tests/bench/gpu_x_load.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "tests/bench/bench.h"

enum {
    MADE_BYTES = 32 << 20,
};

void gpu_x_must(int status, const char *what)
{
    if (status != KVF_OK) {
        bench_die("%s: %s", what, kvf_status_text(status));
    }
}

static void copy(struct kvf_gpu_device *gpu, void *stream, uint64_t to, const void *from,
                 uint64_t bytes)
{
    gpu_must(gpu, gpu->driver.cuMemcpyHtoDAsync(to, from, bytes, stream), "copy");
}

void gpu_x_fill(struct kvf_gpu_device *gpu, void *stream, uint64_t to, uint64_t bytes, float scale)
{
    struct kvf_random_seeded random;
    uint16_t *made = malloc(MADE_BYTES);

    if (made == NULL) {
        bench_die("no memory");
    }
    kvf_random_seeded_init(&random, to);
    for (size_t i = 0; i < MADE_BYTES / sizeof(*made); i++) {
        float value = (float)(int32_t)(uint32_t)kvf_random_seeded_next(&random) * 0x1p-31f * scale;
        uint32_t bits;

        memcpy(&bits, &value, sizeof(bits));
        made[i] = (uint16_t)(bits >> 16);
    }
    for (uint64_t at = 0; at < bytes; at += MADE_BYTES) {
        copy(gpu, stream, to + at, made, bytes - at < MADE_BYTES ? bytes - at : MADE_BYTES);
    }
    gpu_must(gpu, gpu->driver.cuStreamSynchronize(stream), "a stream");
    free(made);
}

static uint64_t table_bytes(const struct gpu_x_model *model)
{
    return (uint64_t)model->n_positions * (model->dim / 2) * sizeof(float);
}

static void tables_fill(struct gpu_x_model *model, struct kvf_gpu_device *gpu, void *stream)
{
    uint32_t half = model->dim / 2;
    float *made = malloc(2 * table_bytes(model));

    if (made == NULL) {
        bench_die("no memory");
    }
    for (size_t i = 0; i < (size_t)model->n_positions * half; i++) {
        double position = (double)(i / half);
        double angle = position * pow(model->theta, -2.0 * (double)(i % half) / model->dim);

        made[i] = (float)cos(angle);
        made[(size_t)model->n_positions * half + i] = (float)sin(angle);
    }
    model->tables = gpu_memory(gpu, 2 * table_bytes(model));
    copy(gpu, stream, model->tables, made, 2 * table_bytes(model));
    gpu_must(gpu, gpu->driver.cuStreamSynchronize(stream), "a stream");
    free(made);
}

uint64_t gpu_x_model_layer_bytes(const struct gpu_x_model *model)
{
    return (uint64_t)2 * model->n_heads * model->dim * model->d_model * sizeof(uint16_t);
}

void gpu_x_model_init(struct gpu_x_model *model, struct kvf_gpu_device *gpu, void *stream)
{
    uint64_t bytes = gpu_x_model_layer_bytes(model);

    if (model->n_layers > GPU_X_LAYERS_MAX) {
        bench_die("a model of %u layers", model->n_layers);
    }
    model->matrices = gpu_memory(gpu, model->n_layers * bytes);
    gpu_x_fill(gpu, stream, model->matrices, model->n_layers * bytes, 0.03f);
    for (uint32_t l = 0; l < model->n_layers; l++) {
        model->w_k[l] = (const uint8_t *)(uintptr_t)model->matrices + l * bytes;
        model->w_v[l] = (const uint8_t *)model->w_k[l] + bytes / 2;
    }
    tables_fill(model, gpu, stream);
}

struct kvf_x_weights gpu_x_model_weights(const struct gpu_x_model *model)
{
    const uint8_t *tables = (const uint8_t *)(uintptr_t)model->tables;
    struct kvf_x_weights weights = {
        .struct_bytes = sizeof(weights),
        .d_model = model->d_model,
        .n_layers = (uint16_t)model->n_layers,
        .n_heads = (uint16_t)model->n_heads,
        .dim_k = (uint16_t)model->dim,
        .dim_v = (uint16_t)model->dim,
        .dtype = KVF_DTYPE_BF16,
        .kv_dtype = KVF_DTYPE_BF16,
        .rope_style = KVF_ROPE_STYLE_HALF,
        .rope_positions = model->n_positions,
        .w_k = model->w_k,
        .w_v = model->w_v,
        .rope_cos = (const float *)(const void *)tables,
        .rope_sin = (const float *)(const void *)(tables + table_bytes(model)),
    };

    memset(weights.weights_digest, GPU_X_DIGEST, sizeof(weights.weights_digest));
    return weights;
}

struct kvf_gpu_rebuild gpu_x_model_rebuild(const struct gpu_x_model *model, uint64_t product,
                                           uint32_t token_first, uint32_t n_tokens)
{
    struct kvf_gpu_rebuild work = {
        .product = product,
        .cosines = model->tables,
        .sines = model->tables + table_bytes(model),
        .n_heads = model->n_heads,
        .dim_k = model->dim,
        .dim_v = model->dim,
        .width = 2 * model->n_heads * model->dim,
        .rope_dims = model->dim,
        .tokens_a_page = GPU_PAGE_TOKENS,
        .dtype = KVF_DTYPE_BF16,
        .kv_dtype = KVF_DTYPE_BF16,
        .rope_style = KVF_ROPE_STYLE_HALF,
        .n_pieces = n_tokens / model->chunk_tokens,
        .piece_tokens = model->chunk_tokens,
    };

    for (uint32_t i = 0; i < work.n_pieces; i++) {
        uint32_t at = i * model->chunk_tokens;

        work.pieces[i] = (struct kvf_gpu_rebuild_piece){at, model->chunk_tokens, token_first + at,
                                                        at / GPU_PAGE_TOKENS};
    }
    return work;
}
