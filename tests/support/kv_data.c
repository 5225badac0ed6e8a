/* SPDX-License-Identifier: Apache-2.0
 *
 * kv_data.c: index.txt, zstd frames, and figures of error in double precision.
 */
#include "tests/support/kv_data.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <zstd.h>

#include "kvferry.h"

#define PATH_BYTES     4096
#define LINE_BYTES     512
#define TENSOR_BYTES   16
#define DIMENSION_MAX  65536
#define FILE_BYTES_MAX (64U << 20)

static FILE *open_in(const char *folder, const char *name)
{
    char path[PATH_BYTES];
    FILE *file;

    snprintf(path, sizeof(path), "%s/%s", folder, name);
    file = fopen(path, "rbe");
    if (file == NULL) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
    }
    return file;
}

static size_t dtype_bytes(int dtype)
{
    return dtype == KVF_DTYPE_BF16 ? 2 : 4;
}

/* KVF_OK: a line of the index in *kv_out and tensor. KVF_ERR_CORRUPT: not as the README says. */
static int parse_line(const char *line, char tensor[TENSOR_BYTES], struct kvf_test_kv *kv_out)
{
    struct kvf_test_kv kv = {0};
    char dtype[8];
    char more;
    uint64_t elements;

    if (sscanf(line, "%15s %u %u %u %u %u %7s %zu %63s %c", tensor, &kv.layer_first, &kv.n_layers,
               &kv.n_heads, &kv.n_tokens, &kv.dim, dtype, &kv.bytes, kv.file, &more) != 9) {
        return KVF_ERR_CORRUPT;
    }
    if (strcmp(dtype, "bf16") != 0 && strcmp(dtype, "f32") != 0) {
        return KVF_ERR_CORRUPT;
    }
    kv.dtype = dtype[0] == 'b' ? KVF_DTYPE_BF16 : KVF_DTYPE_F32;
    if (kv.n_layers > KVF_LAYERS_MAX || kv.n_heads > KVF_HEADS_MAX || kv.n_tokens > DIMENSION_MAX ||
        kv.dim > KVF_DIM_MAX || kv.bytes > FILE_BYTES_MAX) {
        return KVF_ERR_CORRUPT;
    }
    /* at most 2^9 2^10 2^16 2^10 */
    elements = (uint64_t)kv.n_layers * kv.n_heads * kv.n_tokens * kv.dim;
    if (elements == 0 || elements * dtype_bytes(kv.dtype) != kv.bytes) {
        return KVF_ERR_CORRUPT;
    }
    *kv_out = kv;
    return KVF_OK;
}

int kvf_test_kv_find(const char *folder, const char *tensor, uint32_t layer,
                     struct kvf_test_kv *kv_out)
{
    FILE *file = open_in(folder, "index.txt");
    char line[LINE_BYTES];
    char name[TENSOR_BYTES];
    struct kvf_test_kv kv;
    int status = KVF_MISS;

    if (file == NULL) {
        return KVF_ERR_IO;
    }
    while (status == KVF_MISS && fgets(line, sizeof(line), file) != NULL) {
        if (line[0] == '#') {
            continue;
        }
        if (parse_line(line, name, &kv) != KVF_OK) {
            fprintf(stderr, "%s/index.txt: no line of an index: %s\n", folder, line);
            status = KVF_ERR_CORRUPT;
        } else if (strcmp(name, tensor) == 0 && layer - kv.layer_first < kv.n_layers) {
            *kv_out = kv;
            status = KVF_OK;
        }
    }
    fclose(file);
    if (status == KVF_MISS) {
        fprintf(stderr, "%s/index.txt: no layer %u of %s\n", folder, layer, tensor);
    }
    return status;
}

/* The whole file into packed, of which bytes can be used. 0: it cannot be read, or is larger. */
static size_t read_packed(const char *folder, const char *name, uint8_t *packed, size_t bytes)
{
    FILE *file = open_in(folder, name);
    size_t n;

    if (file == NULL) {
        return 0;
    }
    n = fread(packed, 1, bytes, file);
    if (ferror(file) != 0 || fgetc(file) != EOF) {
        fprintf(stderr, "%s/%s: unreadable, or too large\n", folder, name);
        n = 0;
    }
    fclose(file);
    return n;
}

int kvf_test_kv_load(const char *folder, struct kvf_test_kv *kv)
{
    size_t packed_max = ZSTD_compressBound(kv->bytes);
    uint8_t *packed = malloc(packed_max);
    size_t packed_bytes;
    int status = KVF_ERR_NO_MEMORY;

    kv->data = malloc(kv->bytes);
    if (packed == NULL || kv->data == NULL) {
        fprintf(stderr, "%s/%s: out of memory\n", folder, kv->file);
        goto fail;
    }
    packed_bytes = read_packed(folder, kv->file, packed, packed_max);
    if (packed_bytes == 0) {
        status = KVF_ERR_IO;
        goto fail;
    }
    if (ZSTD_decompress(kv->data, kv->bytes, packed, packed_bytes) != kv->bytes) {
        fprintf(stderr, "%s/%s: no zstd frame of %zu bytes\n", folder, kv->file, kv->bytes);
        status = KVF_ERR_CORRUPT;
        goto fail;
    }
    free(packed);
    return KVF_OK;
fail:
    free(packed);
    kvf_test_kv_free(kv);
    return status;
}

void kvf_test_kv_free(struct kvf_test_kv *kv)
{
    free(kv->data);
    kv->data = NULL;
}

size_t kvf_test_kv_head_bytes(const struct kvf_test_kv *kv)
{
    return (size_t)kv->n_tokens * kv->dim * dtype_bytes(kv->dtype);
}

size_t kvf_test_kv_layer_bytes(const struct kvf_test_kv *kv)
{
    return kv->n_heads * kvf_test_kv_head_bytes(kv);
}

static double bf16_at(const uint8_t *elements, size_t i)
{
    uint16_t half;
    uint32_t bits;
    float value;

    memcpy(&half, elements + 2 * i, sizeof(half));
    bits = (uint32_t)half << 16;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static double centred_power(const struct kvf_test_kv *kv, const uint8_t *head)
{
    double power = 0;

    for (uint32_t i = 0; i < kv->dim; i++) {
        double mean = 0;

        for (uint32_t token = 0; token < kv->n_tokens; token++) {
            mean += bf16_at(head, (size_t)token * kv->dim + i) / kv->n_tokens;
        }
        for (uint32_t token = 0; token < kv->n_tokens; token++) {
            double x = bf16_at(head, (size_t)token * kv->dim + i) - mean;

            power += x * x;
        }
    }
    return power;
}

/* The larger one; a NaN stays. */
static double larger(double a, double b)
{
    return a >= b || isnan(a) ? a : b;
}

void kvf_test_kv_compare(const struct kvf_test_kv *original, const uint8_t *decoded, uint32_t layer,
                         uint32_t head, struct kvf_test_kv_sums *sums)
{
    size_t offset = layer * kvf_test_kv_layer_bytes(original) +
                    head * kvf_test_kv_head_bytes(original);
    const uint8_t *x_head = original->data + offset;
    const uint8_t *y_head = decoded + offset;

    for (uint32_t token = 0; token < original->n_tokens; token++) {
        double error2 = 0;
        double x2 = 0;

        for (uint32_t i = 0; i < original->dim; i++) {
            double x = bf16_at(x_head, (size_t)token * original->dim + i);
            double y = bf16_at(y_head, (size_t)token * original->dim + i);

            sums->dot += x * y;
            sums->decoded2 += y * y;
            x2 += x * x;
            error2 += (x - y) * (x - y);
        }
        sums->original2 += x2;
        sums->error2 += error2;
        sums->vector_error_max = larger(error2 == 0 ? 0 : sqrt(error2 / x2),
                                        sums->vector_error_max);
    }
    sums->centred2 += centred_power(original, x_head);
}

void kvf_test_kv_sums_add(struct kvf_test_kv_sums *sums, const struct kvf_test_kv_sums *more)
{
    sums->dot += more->dot;
    sums->original2 += more->original2;
    sums->decoded2 += more->decoded2;
    sums->error2 += more->error2;
    sums->centred2 += more->centred2;
    sums->vector_error_max = larger(more->vector_error_max, sums->vector_error_max);
}

double kvf_test_kv_cosine(const struct kvf_test_kv_sums *sums)
{
    return sums->dot / sqrt(sums->original2 * sums->decoded2);
}

double kvf_test_kv_noise(const struct kvf_test_kv_sums *sums)
{
    return sums->error2 / sums->centred2;
}
