/* SPDX-License-Identifier: Apache-2.0
 *
 * fake_blas.c: cuBLASLt without a GPU, for KVFERRY_CUBLASLT: the same library as the driver's, so
 * that products wait in its streams. It knows what gpu/blas.c asks for and asserts the rest. And
 * the kernel behind a product, kvf_rebuild.
 */
#include "tests/support/fake_cuda.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codec/codec_fp.h"
#include "codec/codec_rebuild.h"

#include "kvferry.h"

enum {
    F16 = 2,
    BF16 = 14,
};

struct layout {
    int type;
    uint64_t rows;
    uint64_t columns;
    int64_t stride;
};

static float element(int type, const uint16_t *from, size_t i)
{
    return type == BF16 ? kvf_f32_from_bf16(from[i]) : kvf_f32_from_f16(from[i]);
}

static float *widened(int type, uint64_t from, size_t n)
{
    float *to = malloc(n * sizeof(*to));

    assert(to != NULL);
    for (size_t i = 0; i < n; i++) {
        to[i] = element(type, (const uint16_t *)(uintptr_t)from, i);
    }
    return to;
}

void fake_product_run(const struct fake_product *p)
{
    float *a = widened(p->type, p->a, (size_t)p->m * p->k);
    float *b = widened(p->type, p->b, (size_t)p->n * p->k);
    float *c = (float *)(uintptr_t)p->c;

    for (uint32_t row = 0; row < p->m; row++) {
        for (uint32_t column = 0; column < p->n; column++) {
            const float *x = a + (size_t)row * p->k;
            const float *y = b + (p->is_by_columns ? column : (size_t)column * p->k);
            size_t step = p->is_by_columns ? p->n : 1;
            float sums[8] = {0};

            for (uint32_t i = 0; i < p->k; i += 8) { /* k is a multiple of 8 */
                for (uint32_t lane = 0; lane < 8; lane++) {
                    sums[lane] += x[i + lane] * y[(i + lane) * step];
                }
            }
            float *sum = &c[(size_t)row * p->c_stride + column];

            *sum = (p->adds ? *sum : 0.0f) + (((sums[0] + sums[4]) + (sums[2] + sums[6])) +
                                              ((sums[1] + sums[5]) + (sums[3] + sums[7])));
        }
    }
    free(a);
    free(b);
}

/* --- kvf_rebuild ------------------------------------------------------------------------------ */

static float load(uint8_t dtype, uint64_t address, size_t i)
{
    if (dtype == KVF_DTYPE_F32) {
        return ((const float *)(uintptr_t)address)[i];
    }
    return element(dtype == KVF_DTYPE_BF16 ? BF16 : F16, (const uint16_t *)(uintptr_t)address, i);
}

static void store(uint8_t dtype, uint8_t *to, uint32_t i, float value)
{
    if (dtype == KVF_DTYPE_F32) {
        ((float *)(void *)to)[i] = value;
    } else {
        ((uint16_t *)(void *)to)[i] = dtype == KVF_DTYPE_BF16 ? kvf_bf16_from_f32(value)
                                                              : kvf_f16_from_f32(value);
    }
}

/* Norm and rotation of a K vector, in place. */
static void finish_k(const struct kvf_gpu_rebuild *work, uint32_t position, float *x)
{
    const float *cosines = (const float *)(uintptr_t)work->cosines;
    const float *sines = (const float *)(uintptr_t)work->sines;
    uint32_t half = work->rope_dims / 2;
    float sum = 0;

    for (uint32_t i = 0; work->gain != 0 && i < work->dim_k; i++) {
        sum += x[i] * x[i];
    }
    for (uint32_t i = 0; work->gain != 0 && i < work->dim_k; i++) {
        x[i] = x[i] / sqrtf(sum / (float)work->dim_k + work->eps) *
               load(work->dtype, work->gain, i);
    }
    for (uint32_t i = 0; i < half; i++) {
        bool is_half = work->rope_style == KVF_ROPE_STYLE_HALF;
        float *a = &x[is_half ? i : 2 * i];
        float *b = &x[is_half ? i + half : 2 * i + 1];
        float first = *a;
        float cosine = cosines[(size_t)position * half + i];
        float sine = sines[(size_t)position * half + i];

        *a = first * cosine - *b * sine;
        *b = *b * cosine + first * sine;
    }
}

static void rebuild_token(const struct kvf_gpu_rebuild *work,
                          const struct kvf_gpu_rebuild_piece *piece, uint32_t token)
{
    const uint32_t *ids = work->page_ids + piece->first_page;
    uint32_t row = piece->row + token;
    const float *product = (const float *)(uintptr_t)work->product + (size_t)row * work->width;

    for (uint32_t v = 0; v < work->n_heads * (work->dim_v != 0 ? 2 : 1); v++) {
        uint32_t is_v = v >= work->n_heads;
        uint32_t head = v - is_v * work->n_heads;
        uint32_t dim = is_v ? work->dim_v : work->dim_k;
        uint64_t bias = is_v ? work->bias_v : work->bias_k;
        uint8_t *to = (uint8_t *)(uintptr_t)work->bases[is_v] +
                      ids[token / work->tokens_a_page] * work->pages[is_v].page_stride_bytes +
                      token % work->tokens_a_page * work->pages[is_v].token_stride_bytes +
                      head * work->pages[is_v].head_stride_bytes;
        float x[1024];

        assert(dim <= sizeof(x) / sizeof(x[0]));
        for (uint32_t i = 0; i < dim; i++) {
            x[i] = product[is_v * work->n_heads * work->dim_k + head * dim + i];
            x[i] += bias != 0 ? load(work->dtype, bias, (size_t)head * dim + i) : 0;
        }
        if (!is_v) {
            finish_k(work, piece->position_first + token, x);
        }
        for (uint32_t i = 0; i < dim; i++) {
            store(work->kv_dtype, to, i, x[i]);
        }
    }
}

void fake_rebuild_run(const struct kvf_gpu_rebuild *work)
{
    for (uint32_t i = 0; i < work->n_pieces; i++) {
        assert(work->pieces[i].n_tokens <= work->piece_tokens);
        for (uint32_t token = 0; token < work->pieces[i].n_tokens; token++) {
            rebuild_token(work, &work->pieces[i], token);
        }
    }
}

/* --- latents ---------------------------------------------------------------------------------- */

void fake_latent_run(const char *kernel, const struct kvf_gpu_latent_work *work)
{
    bool cleans = strcmp(kernel, "kvf_latent_clean") == 0;
    bool subtracts = strcmp(kernel, "kvf_latent_subtract") == 0;
    uint8_t dtype = (uint8_t)work->dtype;
    uint16_t *to = (uint16_t *)(uintptr_t)(cleans ? work->from : work->to);

    assert(cleans || subtracts || strcmp(kernel, "kvf_latent_narrow") == 0);
    assert(work->n % KVF_GPU_LATENT_UNIT == 0);
    for (size_t i = 0; i < work->n; i++) {
        float value = cleans || subtracts ? load(dtype, work->from, i)
                                          : ((const float *)(uintptr_t)work->from)[i];

        value -= subtracts ? ((const float *)(uintptr_t)work->less)[i] : 0;
        if (!cleans && isnan(value)) {
            to[i] = dtype == KVF_DTYPE_BF16 ? 0x7fc0 : 0x7e00;
        } else if (!cleans) {
            store(dtype, (uint8_t *)to, (uint32_t)i, value);
        } else if (!(fabsf(value) < 0x1p64f)) {
            to[i] = 0;
        }
    }
}

/* --- the library ------------------------------------------------------------------------------ */

#define EXPORT __attribute__((visibility("default")))

/* Their declarations are gpu/blas.c's own. */
#pragma GCC diagnostic ignored "-Wmissing-prototypes"

static char the_handle;

EXPORT int cublasLtCreate(void **handle)
{
    *handle = &the_handle;
    return 0;
}

EXPORT int cublasLtDestroy(void *handle)
{
    assert(handle == &the_handle);
    return 0;
}

EXPORT int cublasLtMatmulDescCreate(void **desc, int compute, int scale)
{
    assert(compute == 68 && scale == 0);
    *desc = calloc(1, sizeof(int));
    return *desc == NULL;
}

EXPORT int cublasLtMatmulDescDestroy(void *desc)
{
    free(desc);
    return 0;
}

EXPORT int cublasLtMatmulDescSetAttribute(void *desc, int which, const void *value, size_t bytes)
{
    assert(which == 3 && bytes == sizeof(int));
    *(int *)desc = *(const int *)value;
    return 0;
}

EXPORT int cublasLtMatrixLayoutCreate(void **layout, int type, uint64_t rows, uint64_t columns,
                                      int64_t stride)
{
    struct layout *made = malloc(sizeof(*made));

    *layout = made;
    if (made != NULL) {
        *made = (struct layout){type, rows, columns, stride};
    }
    return made == NULL;
}

EXPORT int cublasLtMatrixLayoutDestroy(void *layout)
{
    free(layout);
    return 0;
}

EXPORT int cublasLtMatmulPreferenceCreate(void **preference)
{
    *preference = calloc(1, sizeof(uint64_t));
    return *preference == NULL;
}

EXPORT int cublasLtMatmulPreferenceDestroy(void *preference)
{
    free(preference);
    return 0;
}

EXPORT int cublasLtMatmulPreferenceSetAttribute(void *preference, int which, const void *value,
                                                size_t bytes)
{
    assert(which == 1 && bytes == sizeof(uint64_t));
    *(uint64_t *)preference = *(const uint64_t *)value;
    return 0;
}

EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle, void *desc, void *a, void *b, void *c,
                                          void *d, void *preference, int wanted, void *choices,
                                          int *n_out)
{
    (void)handle, (void)desc, (void)a, (void)b, (void)c, (void)d, (void)preference;
    assert(wanted == 1 && choices != NULL);
    *n_out = 1;
    return 0;
}

EXPORT int cublasLtMatmul(void *handle, void *desc, const void *alpha, const void *a,
                          void *a_layout, const void *b, void *b_layout, const void *beta,
                          const void *c, void *c_layout, void *d, void *d_layout,
                          const void *algorithm, void *workspace, size_t workspace_bytes,
                          void *stream)
{
    const struct layout *la = a_layout;
    const struct layout *lb = b_layout;
    const struct layout *lc = c_layout;
    bool is_by_columns = *(const int *)desc == 0;
    const struct fake_product product = {
        .a = (uint64_t)(uintptr_t)b,
        .b = (uint64_t)(uintptr_t)a,
        .c = (uint64_t)(uintptr_t)d,
        .m = (uint32_t)lb->columns,
        .n = (uint32_t)(is_by_columns ? la->rows : la->columns),
        .k = (uint32_t)lb->rows,
        .c_stride = (uint32_t)lc->stride,
        .type = la->type,
        .adds = *(const float *)beta == 1.0f,
        .is_by_columns = is_by_columns,
    };

    assert(handle == &the_handle && (*(const int *)desc == 1 || is_by_columns) &&
           *(const float *)alpha == 1.0f && (*(const float *)beta == 0.0f || product.adds) &&
           c == d && c_layout == d_layout && algorithm != NULL);
    assert((is_by_columns ? la->columns : la->rows) == lb->rows &&
           la->stride == (int64_t)la->rows && lb->stride == (int64_t)lb->rows &&
           la->type == lb->type && (la->type == F16 || la->type == BF16));
    assert(lc->type == 0 && lc->rows == product.n && lc->columns == lb->columns &&
           lc->stride >= (int64_t)lc->rows);
    assert(workspace != NULL && workspace_bytes != 0 &&
           (product.a | product.b | product.c) % 16 == 0);
    return fake_product_queue(&product, stream);
}
