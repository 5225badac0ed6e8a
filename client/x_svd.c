/* SPDX-License-Identifier: Apache-2.0
 *
 * x_svd.c: decompose, and check what came of it. In fp64; what is kept is rounded to fp32.
 */
#include "client/x_svd.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* What dgesdd works on. */
struct scratch {
    double *a;  /* [kv_width][d_model]: by columns a matrix of d_model rows */
    double *s;  /* [lesser] */
    double *u;  /* by columns: d_model rows, lesser columns */
    double *vt; /* by columns: lesser rows, kv_width columns */
    double *work;
    int *iwork;
    int lwork;
};

static void scratch_free(struct scratch *x)
{
    free(x->a);
    free(x->s);
    free(x->u);
    free(x->vt);
    free(x->work);
    free(x->iwork);
}

static int decompose(const struct kvf_blas *blas, struct scratch *x, int d_model, int kv_width,
                     int lesser)
{
    int info = 0;

    blas->dgesdd("S", &d_model, &kv_width, x->a, &d_model, x->s, x->u, &d_model, x->vt, &lesser,
                 x->work, &x->lwork, x->iwork, &info, 1);
    return info;
}

/* All but the work array, whose size is asked for. */
static int scratch_init(const struct kvf_blas *blas, struct scratch *x, uint32_t d_model,
                        uint32_t kv_width, uint32_t lesser)
{
    double best = 0;

    *x = (struct scratch){.lwork = -1};
    x->a = calloc((size_t)d_model * kv_width, sizeof(*x->a));
    x->s = calloc(lesser, sizeof(*x->s));
    x->u = calloc((size_t)d_model * lesser, sizeof(*x->u));
    x->vt = calloc((size_t)lesser * kv_width, sizeof(*x->vt));
    x->iwork = calloc(8 * (size_t)lesser, sizeof(*x->iwork));
    if (x->a == NULL || x->s == NULL || x->u == NULL || x->vt == NULL || x->iwork == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    x->work = &best;
    (void)decompose(blas, x, (int)d_model, (int)kv_width, (int)lesser);
    x->work = NULL;
    if (!(best >= 1 && best < INT32_MAX)) {
        return KVF_ERR_NO_MEMORY;
    }
    x->lwork = (int)best;
    x->work = calloc((size_t)x->lwork, sizeof(*x->work));
    return x->work != NULL ? KVF_OK : KVF_ERR_NO_MEMORY;
}

int kvf_svd_layer(const struct kvf_blas *blas, const float *w, uint32_t d_model, uint32_t kv_width,
                  uint32_t rank, float *u_out, float *m_out, char why[KVF_SVD_WHY_BYTES])
{
    uint32_t lesser = d_model < kv_width ? d_model : kv_width;
    struct scratch x;
    int status = scratch_init(blas, &x, d_model, kv_width, lesser);
    bool is_finite = true;
    int info = 0;

    if (status != KVF_OK) {
        scratch_free(&x);
        return kvf_weights_fault(why, status, "no memory for a matrix of %u x %u", d_model,
                                 kv_width);
    }
    for (size_t i = 0; i < (size_t)d_model * kv_width; i++) {
        x.a[i] = w[i];
        is_finite = is_finite && isfinite(w[i]);
    }
    if (is_finite) {
        info = decompose(blas, &x, (int)d_model, (int)kv_width, (int)lesser);
    }
    for (uint32_t k = 0; is_finite && info == 0 && k < rank; k++) {
        for (uint32_t i = 0; i < d_model; i++) {
            u_out[(size_t)i * rank + k] = (float)x.u[(size_t)k * d_model + i];
        }
        for (uint32_t i = 0; i < kv_width; i++) {
            m_out[(size_t)k * kv_width + i] = (float)(x.s[k] * x.vt[(size_t)i * lesser + k]);
        }
    }
    scratch_free(&x);
    if (!is_finite || info != 0) {
        return kvf_weights_fault(why, KVF_ERR_INVALID,
                                 is_finite ? "LAPACK does not converge (%d)"
                                           : "a matrix holds what is no finite number (%d)",
                                 info);
    }
    return KVF_OK;
}

int kvf_svd_check(const struct kvf_blas *blas, const float *w, uint32_t d_model, uint32_t kv_width,
                  uint32_t rank, const float *u, const float *m, struct kvf_svd_error *error_out)
{
    const int d = (int)d_model;
    const int kv = (int)kv_width;
    const int r = (int)rank;
    const float one = 1.0f;
    const float zero = 0.0f;
    float *gram = calloc((size_t)rank * rank, sizeof(*gram));
    float *product = calloc((size_t)d_model * kv_width, sizeof(*product));
    struct kvf_svd_error error = {0};
    double error2 = 0;
    double power2 = 0;

    if (gram == NULL || product == NULL) {
        free(gram);
        free(product);
        return KVF_ERR_NO_MEMORY;
    }
    /* by columns, u is U^T and m is M^T: U^T U, then (U M)^T, of d_model columns */
    blas->sgemm("N", "T", &r, &r, &d, &one, u, &r, u, &r, &zero, gram, &r, 1, 1);
    blas->sgemm("N", "N", &kv, &d, &r, &one, m, &kv, u, &r, &zero, product, &kv, 1, 1);
    for (uint32_t i = 0; i < rank; i++) {
        for (uint32_t k = 0; k < rank; k++) {
            error.orthogonality = fmax(
                error.orthogonality,
                fabs((double)gram[(size_t)i * rank + k] - (i == k ? 1.0 : 0.0)));
        }
    }
    for (uint32_t i = 0; i < d_model; i++) {
        for (uint32_t k = 0; k < kv_width; k++) {
            double original = w[(size_t)k * d_model + i];
            double difference = product[(size_t)i * kv_width + k] - original;

            error2 += difference * difference;
            power2 += original * original;
        }
    }
    error.residual = power2 > 0 ? sqrt(error2 / power2) : 0;
    free(gram);
    free(product);
    *error_out = error;
    return KVF_OK;
}
