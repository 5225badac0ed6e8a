/* SPDX-License-Identifier: Apache-2.0
 *
 * blas.c: see blas.h. cuBLASLt counts by columns: it is asked for C^T = B A^T, whose operands are
 * B [n][k] and A [m][k] as they lie in memory, the first one transposed, unless B is [k][n].
 */
#include "gpu/blas.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"

#include "kvferry.h"

/* Numbers of cuBLASLt's interface (cublasLt.h, library_types.h). */
enum {
    LT_SUCCESS = 0,
    LT_REAL_F32 = 0,
    LT_REAL_F16 = 2,
    LT_REAL_BF16 = 14,
    LT_COMPUTE_F32 = 68,
    LT_OP_N = 0,
    LT_OP_T = 1,
    LT_DESC_TRANSA = 3,
    LT_PREF_WORKSPACE_BYTES = 1,
};

/* What the library chose for a shape (cublasLtMatmulHeuristicResult_t). */
struct lt_choice {
    uint64_t algorithm[8];
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
};

#define LT_FUNCTIONS(X)                                                                            \
    X(cublasLtCreate, (void **handle))                                                             \
    X(cublasLtDestroy, (void *handle))                                                             \
    X(cublasLtMatmulDescCreate, (void **desc, int compute, int scale))                             \
    X(cublasLtMatmulDescDestroy, (void *desc))                                                     \
    X(cublasLtMatmulDescSetAttribute, (void *desc, int which, const void *value, size_t bytes))    \
    X(cublasLtMatrixLayoutCreate,                                                                  \
      (void **layout, int type, uint64_t rows, uint64_t columns, int64_t stride))                  \
    X(cublasLtMatrixLayoutDestroy, (void *layout))                                                 \
    X(cublasLtMatmulPreferenceCreate, (void **preference))                                         \
    X(cublasLtMatmulPreferenceDestroy, (void *preference))                                         \
    X(cublasLtMatmulPreferenceSetAttribute,                                                        \
      (void *preference, int which, const void *value, size_t bytes))                              \
    X(cublasLtMatmulAlgoGetHeuristic,                                                              \
      (void *handle, void *desc, void *a, void *b, void *c, void *d, void *preference, int wanted, \
       struct lt_choice *choices_out, int *n_out))                                                 \
    X(cublasLtMatmul,                                                                              \
      (void *handle, void *desc, const void *alpha, const void *a, void *a_layout, const void *b,  \
       void *b_layout, const void *beta, const void *c, void *c_layout, void *d, void *d_layout,   \
       const void *algorithm, void *workspace, size_t workspace_bytes, void *stream))

struct lt_functions {
#define LT_MEMBER(function, parameters) int(*function) parameters;
    LT_FUNCTIONS(LT_MEMBER)
#undef LT_MEMBER
};

static const struct {
    const char *symbol;
    size_t offset;
} functions[] = {
#define LT_ENTRY(function, parameters) {#function, offsetof(struct lt_functions, function)},
    LT_FUNCTIONS(LT_ENTRY)
#undef LT_ENTRY
};

/* A shape that has been asked for. */
struct shape {
    struct kvf_gpu_product product;
    void *layouts[3]; /* of B, A and C */
    struct lt_choice choice;
};

struct kvf_gpu_blas {
    struct kvf_gpu_device *device;
    struct lt_functions lt;
    void *handle;
    void *descs[2]; /* of B [n][k], of B [k][n] */
    void *preference;
    uint64_t workspace;
    struct shape shapes[KVF_GPU_BLAS_SHAPES_MAX];
    uint32_t n_shapes;
    uint32_t next; /* to be given up for another one */
};

/* --- the library ------------------------------------------------------------------------------ */

static int functions_find(struct kvf_gpu_blas *blas, char *text, size_t text_bytes)
{
    static const char *const names[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
    const char *path = getenv("KVFERRY_CUBLASLT");
    void *library = NULL;

    if (path != NULL && path[0] != 0) {
        library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    } else {
        for (size_t i = 0; i < sizeof(names) / sizeof(names[0]) && library == NULL; i++) {
            library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
        }
    }
    if (library == NULL) {
        snprintf(text, text_bytes,
                 "no cuBLASLt: %.120s; put CUDA's libraries into the loader's path, or name the "
                 "file in KVFERRY_CUBLASLT",
                 dlerror());
        return KVF_ERR_UNSUPPORTED;
    }
    for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++) {
        void *address = dlsym(library, functions[i].symbol);

        if (address == NULL) {
            snprintf(text, text_bytes, "cuBLASLt has no %s; take that of CUDA 12 or 13",
                     functions[i].symbol);
            (void)dlclose(library);
            return KVF_ERR_UNSUPPORTED;
        }
        memcpy((char *)&blas->lt + functions[i].offset, &address, sizeof(address));
    }
    (void)dlclose(library); /* it stays, by RTLD_NODELETE */
    return KVF_OK;
}

static int desc_create(const struct lt_functions *lt, int operation, void **desc_out)
{
    int result = lt->cublasLtMatmulDescCreate(desc_out, LT_COMPUTE_F32, LT_REAL_F32);

    return result == LT_SUCCESS ? lt->cublasLtMatmulDescSetAttribute(*desc_out, LT_DESC_TRANSA,
                                                                     &operation, sizeof(operation))
                                : result;
}

/* cuBLAS takes the context that is current. */
static int library_start(struct kvf_gpu_blas *blas)
{
    const uint64_t workspace_bytes = KVF_GPU_BLAS_WORKSPACE_BYTES;
    const struct lt_functions *lt = &blas->lt;

    if (lt->cublasLtCreate(&blas->handle) != LT_SUCCESS ||
        desc_create(lt, LT_OP_T, &blas->descs[0]) != LT_SUCCESS ||
        desc_create(lt, LT_OP_N, &blas->descs[1]) != LT_SUCCESS ||
        lt->cublasLtMatmulPreferenceCreate(&blas->preference) != LT_SUCCESS ||
        lt->cublasLtMatmulPreferenceSetAttribute(blas->preference, LT_PREF_WORKSPACE_BYTES,
                                                 &workspace_bytes,
                                                 sizeof(workspace_bytes)) != LT_SUCCESS) {
        return KVF_ERR_IO;
    }
    return kvf_gpu_device_result(blas->device,
                                 blas->device->driver.cuMemAlloc(&blas->workspace, workspace_bytes),
                                 "cuMemAlloc of a workspace for cuBLASLt");
}

int kvf_gpu_blas_open(struct kvf_gpu_device *device, struct kvf_gpu_blas **blas_out, char *text,
                      size_t text_bytes)
{
    struct kvf_gpu_blas *blas = calloc(1, sizeof(*blas));
    int status = blas != NULL ? KVF_OK : KVF_ERR_NO_MEMORY;

    if (status == KVF_OK) {
        blas->device = device;
        status = functions_find(blas, text, text_bytes);
    } else {
        snprintf(text, text_bytes, "no memory");
    }
    if (status == KVF_OK) {
        status = library_start(blas);
        if (status != KVF_OK) {
            snprintf(text, text_bytes, "cuBLASLt does not start on %s", device->name);
        }
    }
    if (status != KVF_OK) {
        blas = kvf_gpu_blas_close(blas);
    }
    *blas_out = blas;
    return status;
}

static void shape_drop(struct kvf_gpu_blas *blas, struct shape *shape)
{
    for (uint32_t i = 0; i < 3; i++) {
        if (shape->layouts[i] != NULL) {
            (void)blas->lt.cublasLtMatrixLayoutDestroy(shape->layouts[i]);
        }
    }
    *shape = (struct shape){0};
}

struct kvf_gpu_blas *kvf_gpu_blas_close(struct kvf_gpu_blas *blas)
{
    if (blas == NULL) {
        return NULL;
    }
    for (uint32_t i = 0; i < blas->n_shapes; i++) {
        shape_drop(blas, &blas->shapes[i]);
    }
    if (blas->workspace != 0) {
        (void)blas->device->driver.cuMemFree(blas->workspace);
    }
    if (blas->preference != NULL) {
        (void)blas->lt.cublasLtMatmulPreferenceDestroy(blas->preference);
    }
    for (uint32_t i = 0; i < 2; i++) {
        if (blas->descs[i] != NULL) {
            (void)blas->lt.cublasLtMatmulDescDestroy(blas->descs[i]);
        }
    }
    if (blas->handle != NULL) {
        (void)blas->lt.cublasLtDestroy(blas->handle);
    }
    free(blas);
    return NULL;
}

/* --- products --------------------------------------------------------------------------------- */

static bool is_alike(const struct kvf_gpu_product *a, const struct kvf_gpu_product *b)
{
    return a->m == b->m && a->n == b->n && a->k == b->k && a->c_stride == b->c_stride &&
           a->dtype == b->dtype && a->is_by_columns == b->is_by_columns;
}

static int shape_make(struct kvf_gpu_blas *blas, const struct kvf_gpu_product *product,
                      struct shape *shape)
{
    const int type = product->dtype == KVF_DTYPE_BF16 ? LT_REAL_BF16 : LT_REAL_F16;
    const struct lt_functions *lt = &blas->lt;
    bool is_by_columns = product->is_by_columns;
    uint32_t b_rows = is_by_columns ? product->n : product->k;
    uint32_t b_columns = is_by_columns ? product->k : product->n;
    int n = 0;

    shape->product = *product;
    if (lt->cublasLtMatrixLayoutCreate(&shape->layouts[0], type, b_rows, b_columns, b_rows) !=
            LT_SUCCESS ||
        lt->cublasLtMatrixLayoutCreate(&shape->layouts[1], type, product->k, product->m,
                                       product->k) != LT_SUCCESS ||
        lt->cublasLtMatrixLayoutCreate(&shape->layouts[2], LT_REAL_F32, product->n, product->m,
                                       product->c_stride) != LT_SUCCESS) {
        return KVF_ERR_IO;
    }
    if (lt->cublasLtMatmulAlgoGetHeuristic(blas->handle, blas->descs[is_by_columns],
                                           shape->layouts[0], shape->layouts[1], shape->layouts[2],
                                           shape->layouts[2], blas->preference, 1, &shape->choice,
                                           &n) != LT_SUCCESS ||
        n != 1) {
        return KVF_ERR_UNSUPPORTED;
    }
    return KVF_OK;
}

/* What was found for a shape, or is now. NULL: status_out says why not. */
static const struct shape *shape_find(struct kvf_gpu_blas *blas,
                                      const struct kvf_gpu_product *product, int *status_out)
{
    struct shape made = {0};
    struct shape *to;

    for (uint32_t i = 0; i < blas->n_shapes; i++) {
        if (is_alike(&blas->shapes[i].product, product)) {
            return &blas->shapes[i];
        }
    }
    *status_out = shape_make(blas, product, &made);
    if (*status_out != KVF_OK) {
        shape_drop(blas, &made);
        return NULL;
    }
    if (blas->n_shapes < KVF_GPU_BLAS_SHAPES_MAX) {
        to = &blas->shapes[blas->n_shapes++];
    } else {
        to = &blas->shapes[blas->next];
        blas->next = (blas->next + 1) % KVF_GPU_BLAS_SHAPES_MAX;
        shape_drop(blas, to);
    }
    *to = made;
    return to;
}

/* An address as cuBLAS has them. */
static void *pointer_of(uint64_t address)
{
    void *pointer = NULL;

    memcpy(&pointer, &address, sizeof(pointer));
    return pointer;
}

int kvf_gpu_blas_multiply(struct kvf_gpu_blas *blas, const struct kvf_gpu_product *product,
                          uint64_t a, uint64_t b, uint64_t c, void *stream)
{
    const float one = 1.0f;
    const float before = product->adds ? 1.0f : 0.0f;
    int status = KVF_OK;
    const struct shape *shape = shape_find(blas, product, &status);

    if (shape == NULL) {
        return status;
    }
    return blas->lt.cublasLtMatmul(
               blas->handle, blas->descs[product->is_by_columns], &one, pointer_of(b),
               shape->layouts[0], pointer_of(a), shape->layouts[1], &before, pointer_of(c),
               shape->layouts[2], pointer_of(c), shape->layouts[2], shape->choice.algorithm,
               pointer_of(blas->workspace), KVF_GPU_BLAS_WORKSPACE_BYTES, stream) == LT_SUCCESS
               ? KVF_OK
               : KVF_ERR_IO;
}
