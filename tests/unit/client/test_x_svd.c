/* SPDX-License-Identifier: Apache-2.0
 *
 * test_x_svd.c: the factors of [W_K | W_V] beside their definition, in fp64, and their file.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/random.h"
#include "client/x_svd.h"
#include "tests/support/support.h"

enum {
    WIDTH_MAX = 80,
    LAYERS = 3,
    SKIPPED = 77,
};

struct factors {
    uint32_t d_model;
    uint32_t kv_width;
    uint32_t rank;
    float w[WIDTH_MAX * WIDTH_MAX]; /* [kv_width][d_model] */
    float u[WIDTH_MAX * WIDTH_MAX];
    float m[WIDTH_MAX * WIDTH_MAX];
};

static void draw(struct factors *f, struct kvf_random_seeded *random)
{
    for (size_t i = 0; i < (size_t)f->d_model * f->kv_width; i++) {
        f->w[i] = (float)(kvf_random_seeded_next(random) >> 40) * 0x1p-24f - 0.5f;
    }
}

/* Largest |U^T U - I|. */
static double orthogonality(const struct factors *f)
{
    double worst = 0;

    for (uint32_t a = 0; a < f->rank; a++) {
        for (uint32_t b = 0; b < f->rank; b++) {
            double sum = a == b ? -1 : 0;

            for (uint32_t i = 0; i < f->d_model; i++) {
                sum += (double)f->u[i * f->rank + a] * f->u[i * f->rank + b];
            }
            worst = fmax(worst, fabs(sum));
        }
    }
    return worst;
}

/* ||U M - W|| / ||W||. */
static double residual(const struct factors *f)
{
    double error2 = 0;
    double power2 = 0;

    for (uint32_t i = 0; i < f->d_model; i++) {
        for (uint32_t k = 0; k < f->kv_width; k++) {
            double w = f->w[k * f->d_model + i];
            double sum = -w;

            for (uint32_t r = 0; r < f->rank; r++) {
                sum += (double)f->u[i * f->rank + r] * f->m[r * f->kv_width + k];
            }
            error2 += sum * sum;
            power2 += w * w;
        }
    }
    return sqrt(error2 / power2);
}

/* Share of W that the first `rank` rows of a full m do not hold, by their norms: the singular
 * values. */
static double share_beyond(const struct factors *full, uint32_t rank)
{
    double beyond2 = 0;
    double all2 = 0;

    for (uint32_t r = 0; r < full->rank; r++) {
        double power2 = 0;

        for (uint32_t k = 0; k < full->kv_width; k++) {
            power2 += (double)full->m[r * full->kv_width + k] * full->m[r * full->kv_width + k];
        }
        beyond2 += r >= rank ? power2 : 0;
        all2 += power2;
    }
    return sqrt(beyond2 / all2);
}

static void factors_are_a_decomposition(void **state)
{
    static const uint32_t shapes[][2] = {{80, 48}, {48, 80}, {64, 64}, {1, 8}, {40, 1}};
    static struct factors full;
    static struct factors part;
    const struct kvf_blas *blas = *state;
    struct kvf_random_seeded random;
    char why[KVF_SVD_WHY_BYTES];

    kvf_random_seeded_init(&random, kvf_test_seed());
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        struct kvf_svd_error error;

        full.d_model = shapes[i][0];
        full.kv_width = shapes[i][1];
        full.rank = full.d_model < full.kv_width ? full.d_model : full.kv_width;
        draw(&full, &random);
        assert_int_equal(kvf_svd_layer(blas, full.w, full.d_model, full.kv_width, full.rank, full.u,
                                       full.m, why),
                         KVF_OK);
        assert_true(orthogonality(&full) < 1e-6);
        assert_true(residual(&full) < 1e-6);
        assert_int_equal(kvf_svd_check(blas, full.w, full.d_model, full.kv_width, full.rank, full.u,
                                       full.m, &error),
                         KVF_OK);
        assert_true(error.orthogonality < 2e-6 && error.residual < 2e-6);

        part = full;
        part.rank = (full.rank + 1) / 2;
        assert_int_equal(kvf_svd_layer(blas, part.w, part.d_model, part.kv_width, part.rank, part.u,
                                       part.m, why),
                         KVF_OK);
        assert_true(orthogonality(&part) < 1e-6);
        assert_true(fabs(residual(&part) - share_beyond(&full, part.rank)) < 1e-6);
        assert_int_equal(kvf_svd_check(blas, part.w, part.d_model, part.kv_width, part.rank, part.u,
                                       part.m, &error),
                         KVF_OK);
        assert_true(fabs(error.residual - residual(&part)) < 1e-6);
        part.u[0] += 0.25f;
        assert_int_equal(kvf_svd_check(blas, part.w, part.d_model, part.kv_width, part.rank, part.u,
                                       part.m, &error),
                         KVF_OK);
        assert_true(error.orthogonality > 1e-3);
    }
    full.w[7] = NAN;
    assert_int_equal(
        kvf_svd_layer(blas, full.w, full.d_model, full.kv_width, full.rank, full.u, full.m, why),
        KVF_ERR_INVALID);
    assert_non_null(strstr(why, "no finite number"));
}

/* --- the file --------------------------------------------------------------------------------- */

static const struct kvf_weights_model model = {
    .n_layers = LAYERS,
    .d_model = 7,
    .n_heads = 2,
    .dim_k = 3,
    .dim_v = 2,
};

enum {
    RANK = 5,
    U_VALUES = 7 * RANK,
    M_VALUES = RANK * 10,
};

static float value_of(uint32_t layer, uint32_t i)
{
    return (float)(layer * 1000 + i);
}

static void write_blob(const char *path)
{
    const uint8_t digest[KVF_DIGEST_BYTES] = {1, 2, 3};
    char why[KVF_SVD_WHY_BYTES];
    struct kvf_svd_writer *writer;
    float u[U_VALUES];
    float m[M_VALUES];

    assert_int_equal(kvf_svd_writer_open(path, &model, RANK, digest, &writer, why), KVF_OK);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (uint32_t i = 0; i < U_VALUES; i++) {
            u[i] = value_of(layer, i);
        }
        for (uint32_t i = 0; i < M_VALUES; i++) {
            m[i] = value_of(layer, 500 + i);
        }
        assert_int_equal(kvf_svd_writer_add(writer, u, m, why), KVF_OK);
    }
    assert_int_equal(kvf_svd_writer_commit(writer, why), KVF_OK);
}

/* The first status that is not KVF_OK, of opening and all layers. */
static int read_blob(const char *path, bool is_compared)
{
    char why[KVF_SVD_WHY_BYTES] = "";
    struct kvf_svd_file file;
    float u[U_VALUES];
    float m[M_VALUES];
    int status = kvf_svd_file_open(path, &file, why);

    if (status != KVF_OK) {
        assert_true(why[0] != '\0' && strchr(why, '\n') == NULL);
        return status;
    }
    assert_int_equal(file.header.rank, RANK);
    assert_int_equal(file.header.weights_digest[2], 3);
    for (uint32_t layer = 0; status == KVF_OK && layer < LAYERS; layer++) {
        status = kvf_svd_file_layer(&file, layer, u, m, why);
        for (uint32_t i = 0; is_compared && i < M_VALUES; i++) {
            assert_true(m[i] == value_of(layer, 500 + i));
            assert_true(i >= U_VALUES || u[i] == value_of(layer, i));
        }
    }
    kvf_svd_file_close(&file);
    return status;
}

static void files_come_back_or_are_refused(void **state)
{
    char path[KVF_TEST_PATH_BYTES];
    char part[KVF_TEST_PATH_BYTES];
    struct kvf_test_dir dir;
    size_t bytes;
    char *data;

    (void)state;
    kvf_test_dir_create(&dir);
    kvf_test_dir_path(&dir, "blob", path);
    kvf_test_dir_path(&dir, "blob.part", part);
    write_blob(path);
    assert_int_equal(read_blob(path, true), KVF_OK);
    assert_int_not_equal(access(part, F_OK), 0);
    data = kvf_test_file_read(path, &bytes);
    assert_non_null(data);
    for (size_t i = 0; i < bytes; i++) {
        /* what is between the table and the first layer is nobody's */
        bool is_gap = i >= sizeof(struct kvf_svd_header) + 4 * LAYERS && i < 192;
        int status;

        data[i] ^= 0x10;
        kvf_test_file_write(path, data, bytes);
        status = read_blob(path, false);
        if (is_gap ? status != KVF_OK : status != (i < 10 ? KVF_ERR_FOREIGN : KVF_ERR_CORRUPT)) {
            fail_msg("byte %zu of %zu changed: status %d", i, bytes, status);
        }
        data[i] ^= 0x10;
    }
    for (size_t n = 0; n < bytes; n += 13) {
        kvf_test_file_write(path, data, n);
        assert_int_equal(read_blob(path, false), KVF_ERR_CORRUPT);
    }
    kvf_test_file_write(path, data, bytes);
    assert_int_equal(read_blob(path, true), KVF_OK);
    free(data);
    kvf_test_dir_remove(&dir);
}

/* A writer that is given up leaves what was there. */
static void a_writer_given_up_leaves_nothing(void **state)
{
    const uint8_t digest[KVF_DIGEST_BYTES] = {1};
    char why[KVF_SVD_WHY_BYTES];
    char path[KVF_TEST_PATH_BYTES];
    char part[KVF_TEST_PATH_BYTES];
    struct kvf_svd_writer *writer = NULL;
    struct kvf_test_dir dir;

    (void)state;
    kvf_test_dir_create(&dir);
    kvf_test_dir_path(&dir, "blob", path);
    kvf_test_dir_path(&dir, "blob.part", part);
    write_blob(path);
    assert_int_equal(kvf_svd_writer_open(path, &model, RANK, digest, &writer, why), KVF_OK);
    kvf_svd_writer_destroy(writer);
    assert_int_equal(read_blob(path, true), KVF_OK);
    assert_int_not_equal(access(part, F_OK), 0);
    kvf_test_dir_path(&dir, "no/folder", path);
    assert_int_equal(kvf_svd_writer_open(path, &model, RANK, digest, &writer, why), KVF_ERR_IO);
    assert_non_null(strstr(why, "No such file"));
    kvf_test_dir_remove(&dir);
}

int main(void)
{
    char text[KVF_BLAS_TEXT_BYTES];
    struct kvf_blas blas;
    const struct CMUnitTest files[] = {
        cmocka_unit_test(files_come_back_or_are_refused),
        cmocka_unit_test(a_writer_given_up_leaves_nothing),
    };
    const struct CMUnitTest products[] = {
        cmocka_unit_test_prestate(factors_are_a_decomposition, &blas),
    };
    int n_failed = cmocka_run_group_tests(files, NULL, NULL);

    if (n_failed == 0 && kvf_blas_open(&blas, text) != KVF_OK) {
        printf("skipped: %s\n", text);
        return SKIPPED;
    }
    return n_failed + cmocka_run_group_tests(products, NULL, NULL);
}
