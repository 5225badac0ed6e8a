/* SPDX-License-Identifier: Apache-2.0
 *
 * test_x_rebuild.c: K and V from X beside the same computed in fp64, and what is refused.
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

#include "base/random.h"
#include "client/x_blas.h"
#include "codec/codec_fp.h"
#include "kvferry.h"
#include "tests/support/support.h"
#include "tests/unit/client/fixture.h"

enum {
    LAYERS = 2,
    POSITIONS = 4096,
    PAGE_TOKENS = 16,
    SKIPPED = 77,
};

/* One model and one request. */
struct shape {
    const char *name;
    uint32_t d_model;
    uint16_t n_heads;
    uint16_t dim_k;
    uint16_t dim_v;
    uint16_t rope_dims;
    uint8_t rope_style;
    uint8_t dtype;
    uint8_t x_dtype;
    uint8_t kv_dtype;
    bool has_bias;
    bool has_norm;
    bool is_scattered; /* pages in any order, X with a stride, positions of its own */
    uint32_t n_tokens;
};

static const struct shape shapes[] = {
    {"mha, half", 96, 3, 32, 32, 0, KVF_ROPE_STYLE_HALF, KVF_DTYPE_BF16, KVF_DTYPE_BF16,
     KVF_DTYPE_BF16, false, false, false, 530},
    {"gqa, bias, half", 384, 1, 128, 128, 0, KVF_ROPE_STYLE_HALF, KVF_DTYPE_BF16, KVF_DTYPE_BF16,
     KVF_DTYPE_BF16, true, false, true, 70},
    {"norm, interleaved", 256, 2, 128, 64, 0, KVF_ROPE_STYLE_INTERLEAVED, KVF_DTYPE_BF16,
     KVF_DTYPE_F32, KVF_DTYPE_BF16, false, true, true, 40},
    {"bias, norm, part of a vector turns", 80, 2, 80, 80, 32, KVF_ROPE_STYLE_HALF, KVF_DTYPE_F16,
     KVF_DTYPE_F16, KVF_DTYPE_F16, true, true, false, 33},
    {"interleaved part", 64, 2, 48, 40, 20, KVF_ROPE_STYLE_INTERLEAVED, KVF_DTYPE_F32,
     KVF_DTYPE_F32, KVF_DTYPE_F32, true, false, true, 21},
    {"before rotation", 64, 2, 48, 40, 0, KVF_ROPE_STYLE_NONE, KVF_DTYPE_F32, KVF_DTYPE_BF16,
     KVF_DTYPE_BF16, true, true, false, 5},
    {"no V", 64, 2, 64, 0, 0, KVF_ROPE_STYLE_HALF, KVF_DTYPE_BF16, KVF_DTYPE_BF16, KVF_DTYPE_BF16,
     true, false, false, 5},
};

struct model {
    const struct shape *shape;
    struct kvf_x_weights weights;
    void *w_k[LAYERS];
    void *w_v[LAYERS];
    void *b_k[LAYERS];
    void *b_v[LAYERS];
    void *k_norm[LAYERS];
    float *cosines;
    float *sines;
    char log[512];
};

/* --- elements --- */

static double element_get(const void *base, uint8_t dtype, size_t index)
{
    const uint16_t *halves = base;
    const float *floats = base;

    return dtype == KVF_DTYPE_F32    ? (double)floats[index]
           : dtype == KVF_DTYPE_BF16 ? (double)kvf_f32_from_bf16(halves[index])
                                     : (double)kvf_f32_from_f16(halves[index]);
}

static void element_set(void *base, uint8_t dtype, size_t index, float value)
{
    uint16_t *halves = base;
    float *floats = base;

    if (dtype == KVF_DTYPE_F32) {
        floats[index] = value;
    } else {
        halves[index] = dtype == KVF_DTYPE_BF16 ? kvf_bf16_from_f32(value)
                                                : kvf_f16_from_f32(value);
    }
}

/* About normal: the sum of four uniform numbers. */
static float draw(struct kvf_random_seeded *random)
{
    float sum = 0.0f;

    for (int i = 0; i < 4; i++) {
        sum += (float)(kvf_random_seeded_next(random) >> 40) * 0x1p-24f - 0.5f;
    }
    return sum * 1.7320508f;
}

static void *draw_elements(struct kvf_random_seeded *random, uint8_t dtype, size_t n, float mean,
                           float deviation)
{
    void *base = calloc(n, kvf_dtype_bytes(dtype));

    assert_non_null(base);
    for (size_t i = 0; i < n; i++) {
        element_set(base, dtype, i, mean + deviation * draw(random));
    }
    return base;
}

static void keep_log(void *arg, int severity, const char *text)
{
    struct model *model = arg;

    assert_int_equal(severity, 0);
    snprintf(model->log, sizeof(model->log), "%s", text);
}

static void model_init(struct model *model, const struct shape *s, struct kvf_random_seeded *random)
{
    uint32_t dims = s->rope_dims != 0 ? s->rope_dims : s->dim_k;
    float deviation = 1.0f / sqrtf((float)s->d_model);

    *model = (struct model){.shape = s};
    for (uint32_t i = 0; i < LAYERS; i++) {
        size_t k_width = (size_t)s->n_heads * s->dim_k;
        size_t v_width = (size_t)s->n_heads * s->dim_v;

        model->w_k[i] = draw_elements(random, s->dtype, k_width * s->d_model, 0, deviation);
        model->w_v[i] = draw_elements(random, s->dtype, v_width * s->d_model + 1, 0, deviation);
        model->b_k[i] = draw_elements(random, s->dtype, k_width, 1, 2);
        model->b_v[i] = draw_elements(random, s->dtype, v_width + 1, 0, 0.1f);
        model->k_norm[i] = draw_elements(random, s->dtype, s->dim_k, 1, 0.3f);
    }
    model->cosines = calloc((size_t)POSITIONS * dims, sizeof(float));
    model->sines = calloc((size_t)POSITIONS * dims, sizeof(float));
    assert_true(model->cosines != NULL && model->sines != NULL);
    for (uint32_t p = 0; p < POSITIONS; p++) {
        for (uint32_t i = 0; i < dims / 2; i++) {
            double angle = p * pow(10000.0, -2.0 * i / dims);

            model->cosines[p * (dims / 2) + i] = (float)cos(angle);
            model->sines[p * (dims / 2) + i] = (float)sin(angle);
        }
    }
    model->weights = (struct kvf_x_weights){
        .struct_bytes = sizeof(model->weights),
        .d_model = s->d_model,
        .stored_width = s->d_model > (uint32_t)s->n_heads * (s->dim_k + s->dim_v) ? 8 : 0,
        .n_layers = LAYERS,
        .n_heads = s->n_heads,
        .dim_k = s->dim_k,
        .dim_v = s->dim_v,
        .rope_dims = s->rope_dims,
        .dtype = s->dtype,
        .kv_dtype = s->kv_dtype,
        .rope_style = s->rope_style,
        .rope_positions = POSITIONS,
        .k_norm_eps = 1e-6f,
        .w_k = (const void *const *)model->w_k,
        .w_v = s->dim_v != 0 ? (const void *const *)model->w_v : NULL,
        .b_k = s->has_bias ? (const void *const *)model->b_k : NULL,
        .b_v = s->has_bias ? (const void *const *)model->b_v : NULL,
        .k_norm = s->has_norm ? (const void *const *)model->k_norm : NULL,
        .rope_cos = model->cosines,
        .rope_sin = model->sines,
        .weights_digest = {1},
        .log = keep_log,
        .log_arg = model,
    };
}

static void model_fini(struct model *model)
{
    for (uint32_t i = 0; i < LAYERS; i++) {
        free(model->w_k[i]);
        free(model->w_v[i]);
        free(model->b_k[i]);
        free(model->b_v[i]);
        free(model->k_norm[i]);
    }
    free(model->cosines);
    free(model->sines);
}

/* --- the reference --- */

/* One vector of one head in fp64. */
static void reference(const struct model *model, uint32_t layer, const double *x, bool is_k,
                      uint32_t head, uint32_t position, double *out)
{
    const struct shape *s = model->shape;
    uint32_t dim = is_k ? s->dim_k : s->dim_v;
    const void *matrix = is_k ? model->w_k[layer] : model->w_v[layer];
    const void *bias = is_k ? model->b_k[layer] : model->b_v[layer];
    uint32_t half = (s->rope_dims != 0 ? s->rope_dims : s->dim_k) / 2u;
    double power = 0;

    for (uint32_t e = 0; e < dim; e++) {
        size_t row = (size_t)head * dim + e;

        out[e] = s->has_bias ? element_get(bias, s->dtype, row) : 0;
        for (uint32_t i = 0; i < s->d_model; i++) {
            out[e] += x[i] * element_get(matrix, s->dtype, row * s->d_model + i);
        }
        power += out[e] * out[e];
    }
    for (uint32_t e = 0; is_k && s->has_norm && e < dim; e++) {
        out[e] *= element_get(model->k_norm[layer], s->dtype, e) / sqrt(power / dim + 1e-6);
    }
    for (uint32_t i = 0; is_k && s->rope_style != KVF_ROPE_STYLE_NONE && i < half; i++) {
        bool is_half = s->rope_style == KVF_ROPE_STYLE_HALF;
        uint32_t first = is_half ? i : 2 * i;
        uint32_t second = is_half ? i + half : 2 * i + 1;
        double c = model->cosines[(size_t)position * half + i];
        double d = model->sines[(size_t)position * half + i];
        double a = out[first];
        double b = out[second];

        out[first] = a * c - b * d;
        out[second] = a * d + b * c;
    }
}

/* Two units in the last place of bf16 (of fp16 and fp32 where the pages have those: 8 and 2^11 of
 * them, since the product has fp32's, whose sums pass by an outlier channel of 40 times the others)
 * at max(|ref|, rms / 64). */
static double bound_of(double ref, double rms, uint8_t dtype)
{
    double at = fmax(fabs(ref), rms / 64);
    double unit = ldexp(1.0, ilogb(at) - 7);

    return dtype == KVF_DTYPE_BF16 ? 2 * unit : dtype == KVF_DTYPE_F16 ? unit : unit * 0x1p-5;
}

static void compare(const struct model *model, const double *ref, const void *got, uint32_t dim,
                    double *worst)
{
    double power = 0;

    for (uint32_t e = 0; e < dim; e++) {
        power += ref[e] * ref[e];
    }
    for (uint32_t e = 0; e < dim; e++) {
        double error = fabs(element_get(got, model->shape->kv_dtype, e) - ref[e]);

        *worst = fmax(*worst, error / bound_of(ref[e], sqrt(power / dim), model->shape->kv_dtype));
    }
}

/* --- requests --- */

struct request {
    uint32_t table[64];
    uint32_t positions[1024];
    uint8_t *x;
    size_t stride_bytes;
    uint8_t *k[LAYERS];
    uint8_t *v[LAYERS];
    void *k_layers[LAYERS];
    void *v_layers[LAYERS];
    size_t k_bytes; /* a layer */
    size_t v_bytes;
    struct kvf_x_input input;
    struct kvf_kv_view view;
};

static void request_init(struct request *r, const struct model *model,
                         struct kvf_random_seeded *random)
{
    const struct shape *s = model->shape;
    uint32_t n_pages = (s->n_tokens + PAGE_TOKENS - 1) / PAGE_TOKENS;
    size_t element = kvf_dtype_bytes(s->kv_dtype);

    *r = (struct request){0};
    r->stride_bytes = s->d_model * kvf_dtype_bytes(s->x_dtype) + (s->is_scattered ? 8u : 0u);
    r->x = calloc(s->n_tokens, r->stride_bytes);
    assert_non_null(r->x);
    for (uint32_t t = 0; t < s->n_tokens; t++) {
        for (uint32_t i = 0; i < s->d_model; i++) {
            element_set(r->x + t * r->stride_bytes, s->x_dtype, i,
                        draw(random) * (i == 5 ? 40.0f : 1.0f)); /* X has outlier channels */
        }
        r->positions[t] = s->is_scattered ? (t * 977u + 3u) % POSITIONS : 100u + t;
    }
    for (uint32_t i = 0; i < n_pages; i++) {
        r->table[i] = n_pages - 1 - i;
    }
    r->k_bytes = n_pages * PAGE_TOKENS * s->n_heads * s->dim_k * element;
    r->v_bytes = n_pages * PAGE_TOKENS * s->n_heads * s->dim_v * element;
    for (uint32_t i = 0; i < LAYERS; i++) {
        r->k[i] = malloc(r->k_bytes);
        r->v[i] = malloc(r->v_bytes + 1);
        assert_true(r->k[i] != NULL && r->v[i] != NULL);
        memset(r->k[i], 0xa5, r->k_bytes);
        memset(r->v[i], 0xa5, r->v_bytes + 1);
        r->k_layers[i] = r->k[i];
        r->v_layers[i] = r->v[i];
    }
    r->input = (struct kvf_x_input){
        .struct_bytes = sizeof(r->input),
        .n_tokens = s->n_tokens,
        .position_first = 100,
        .dtype = s->x_dtype,
        .positions = s->is_scattered ? r->positions : NULL,
        .data = r->x,
        .token_stride_bytes = s->is_scattered ? r->stride_bytes : 0,
    };
    /* K: page, head, token; V: page, token, head */
    r->view = (struct kvf_kv_view){
        .struct_bytes = sizeof(r->view),
        .tokens_a_page = PAGE_TOKENS,
        .page_table = s->is_scattered ? r->table : NULL,
        .k = {.layers = r->k_layers,
              .page_stride_bytes = PAGE_TOKENS * s->n_heads * s->dim_k * element,
              .token_stride_bytes = s->dim_k * element,
              .head_stride_bytes = PAGE_TOKENS * s->dim_k * element},
        .v = {.layers = r->v_layers,
              .page_stride_bytes = PAGE_TOKENS * s->n_heads * s->dim_v * element,
              .token_stride_bytes = s->n_heads * s->dim_v * element,
              .head_stride_bytes = s->dim_v * element},
    };
}

static void request_fini(struct request *r)
{
    for (uint32_t i = 0; i < LAYERS; i++) {
        free(r->k[i]);
        free(r->v[i]);
    }
    free(r->x);
}

/* The worst error of a layer, in bounds. */
static double worst_of(const struct model *model, const struct request *r, uint32_t layer)
{
    const struct shape *s = model->shape;
    size_t element = kvf_dtype_bytes(s->kv_dtype);
    double worst = 0;
    double x[384];
    double ref[128];

    for (uint32_t t = 0; t < s->n_tokens; t++) {
        uint32_t page = s->is_scattered ? r->table[t / PAGE_TOKENS] : t / PAGE_TOKENS;
        size_t slot = t % PAGE_TOKENS;

        for (uint32_t i = 0; i < s->d_model; i++) {
            x[i] = element_get(r->x + t * r->stride_bytes, s->x_dtype, i);
        }
        for (uint32_t head = 0; head < s->n_heads; head++) {
            size_t row = page * s->n_heads + head;

            reference(model, layer, x, true, head, r->positions[t], ref);
            compare(model, ref, r->k[layer] + (row * PAGE_TOKENS + slot) * s->dim_k * element,
                    s->dim_k, &worst);
            if (s->dim_v != 0) {
                row = (page * PAGE_TOKENS + slot) * s->n_heads + head;
                reference(model, layer, x, false, head, r->positions[t], ref);
                compare(model, ref, r->v[layer] + row * s->dim_v * element, s->dim_v, &worst);
            }
        }
    }
    return worst;
}

static bool is_untouched(const uint8_t *bytes, size_t n)
{
    size_t i = 0;

    while (i < n && bytes[i] == 0xa5) {
        i++;
    }
    return i == n;
}

static void k_and_v_are_those_of_fp64(void **state)
{
    struct kvf_random_seeded random;

    (void)state;
    kvf_random_seeded_init(&random, kvf_test_seed());
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        struct model model;
        struct request request;
        struct kvf_x *x;
        double worst;

        model_init(&model, &shapes[i], &random);
        request_init(&request, &model, &random);
        assert_int_equal(kvf_x_open(NULL, &model.weights, &x), KVF_OK);
        assert_int_equal(kvf_x_rebuild(x, 1, &request.input, &request.view), KVF_OK);
        assert_true(is_untouched(request.k[0], request.k_bytes));
        assert_true(is_untouched(request.v[0], request.v_bytes));
        assert_true(is_untouched(request.v[1] + request.v_bytes, 1));
        assert_int_equal(kvf_x_rebuild(x, 0, &request.input, &request.view), KVF_OK);
        worst = fmax(worst_of(&model, &request, 0), worst_of(&model, &request, 1));
        printf("%s: largest error %.3f of the bound\n", shapes[i].name, worst);
        assert_true(worst <= 1.0);
        x = kvf_x_close(x);
        request_fini(&request);
        model_fini(&model);
    }
}

static void positions_beyond_the_tables_are_refused(void **state)
{
    struct kvf_random_seeded random;
    struct model model;
    struct request request;
    struct kvf_x *x;

    (void)state;
    kvf_random_seeded_init(&random, kvf_test_seed());
    model_init(&model, &shapes[0], &random);
    request_init(&request, &model, &random);
    assert_int_equal(kvf_x_open(NULL, &model.weights, &x), KVF_OK);
    request.input.position_first = POSITIONS - 100;
    assert_int_equal(kvf_x_rebuild(x, 0, &request.input, &request.view), KVF_ERR_MISMATCH);
    assert_non_null(strstr(model.log, "token 100 is at position 4096 of its sequence"));
    request.input.position_first = UINT32_MAX;
    assert_int_equal(kvf_x_rebuild(x, 0, &request.input, &request.view), KVF_ERR_MISMATCH);
    request.positions[529] = POSITIONS;
    request.input.positions = request.positions;
    assert_int_equal(kvf_x_rebuild(x, 0, &request.input, &request.view), KVF_ERR_MISMATCH);
    assert_int_equal(kvf_x_rebuild(x, LAYERS, &request.input, &request.view), KVF_ERR_INVALID);
    assert_true(is_untouched(request.k[0], request.k_bytes));
    x = kvf_x_close(x);
    request_fini(&request);
    model_fini(&model);
}

/* --- refusals --- */

static void refuse(struct model *model, const struct kvf_x_weights *weights, int status,
                   const char *words)
{
    struct kvf_x *x = NULL;

    model->log[0] = '\0';
    assert_int_equal(kvf_x_open(NULL, weights, &x), status);
    assert_null(x);
    if (strstr(model->log, words) == NULL) {
        fail_msg("'%s' is not in '%s'", words, model->log);
    }
}

static void what_does_not_fit_is_refused(void **state)
{
    struct kvf_random_seeded random;
    struct kvf_x_weights w;
    struct model model;

    (void)state;
    kvf_random_seeded_init(&random, kvf_test_seed());
    model_init(&model, &shapes[1], &random);
    w = model.weights;
    w.stored_width = 0;
    refuse(&model, &w, KVF_ERR_REFUSED,
           "384 elements a token and layer would be stored in place of K and V, which are 256 (1 "
           "heads of 128 + 128)");
    w.model_heads = 2; /* of which this shard has one: X is stored once for both */
    w.weights_digest[0] = 0;
    refuse(&model, &w, KVF_ERR_REFUSED, "no digest");
    w = model.weights;
    w.rope_sin = NULL;
    refuse(&model, &w, KVF_ERR_INVALID, "tables of the rotary embedding are missing");
    w = model.weights;
    w.rope_dims = 33;
    refuse(&model, &w, KVF_ERR_INVALID, "rope_dims is odd");
    w.rope_dims = 130;
    refuse(&model, &w, KVF_ERR_INVALID, "rope_dims is odd or more than dim_k");
    w = model.weights;
    w.kv_dtype = KVF_DTYPE_F8E4M3;
    refuse(&model, &w, KVF_ERR_INVALID, "bf16, f16, f32");
    w = model.weights;
    w.d_model = 70000;
    refuse(&model, &w, KVF_ERR_INVALID, "d_model");
    w = model.weights;
    w.model_heads = 1;
    w.n_heads = 2;
    refuse(&model, &w, KVF_ERR_INVALID, "n_heads");
    free(model.w_v[1]);
    model.w_v[1] = NULL;
    refuse(&model, &model.weights, KVF_ERR_INVALID, "W_V is missing");
    model_fini(&model);
}

static void a_missing_blas_says_what_to_install(void **state)
{
    struct kvf_random_seeded random;
    struct model model;

    (void)state;
    kvf_random_seeded_init(&random, kvf_test_seed());
    model_init(&model, &shapes[0], &random);
    assert_int_equal(setenv("KVFERRY_BLAS", "/nonexistent/libblas.so", 1), 0);
    refuse(&model, &model.weights, KVF_ERR_UNSUPPORTED, "install OpenBLAS (apt-get install");
    assert_int_equal(setenv("KVFERRY_BLAS", "libc.so.6", 1), 0);
    refuse(&model, &model.weights, KVF_ERR_UNSUPPORTED, "libc.so.6 has no sgemm_");
    assert_int_equal(unsetenv("KVFERRY_BLAS"), 0);
    model_fini(&model);
}

/* What a client has attached with has to fit, digest and geometry. */
static void a_client_that_stores_something_else_is_refused(void **state)
{
    static const struct {
        int kind;
        uint32_t width;
        uint16_t n_layers;
        uint8_t digest;
        uint32_t stored_width;
        const char *words;
    } clients[] = {
        {KVF_KIND_X, 96, LAYERS, 2, 0, "digests are not those that the client attached with"},
        {KVF_KIND_X, 64, LAYERS, 1, 0, "2 layers of 96 elements would be read"},
        {KVF_KIND_X, 96, LAYERS + 1, 1, 0, "the client stores 3 of 96, kind 4"},
        {KVF_KIND_X, 64, LAYERS, 1, 64, "2 layers of 64 elements would be read"},
        {KVF_KIND_XG, 64, LAYERS, 1, 0, "name the file of kvferry svd in svd_file"},
        {KVF_KIND_XG, 64, LAYERS, 1, 64, "name the file of kvferry svd in svd_file"},
        {KVF_KIND_X, 96, LAYERS, 1, 0, NULL},
    };
    struct fixture *f = *state;
    struct kvf_random_seeded random;
    char text[KVF_BLAS_TEXT_BYTES];
    struct kvf_blas blas;
    struct model model;
    bool has_blas = kvf_blas_open(&blas, text) == KVF_OK;

    kvf_random_seeded_init(&random, kvf_test_seed());
    model_init(&model, &shapes[0], &random);
    model.weights.log = NULL;
    for (size_t i = 0; i < sizeof(clients) / sizeof(clients[0]); i++) {
        struct kvf_geometry geometry = {
            .struct_bytes = sizeof(geometry),
            .dtype = KVF_DTYPE_BF16,
            .n_layers = clients[i].n_layers,
            .chunk_tokens = 16,
        };
        struct kvf_x *x = NULL;

        assert_int_equal(kvf_x_geometry(clients[i].kind, clients[i].width, &geometry), KVF_OK);
        f->options.geometry = &geometry;
        f->options.profile = "exact";
        f->options.weights_digest[0] = clients[i].digest;
        fixture_open(f);
        model.weights.stored_width = clients[i].stored_width;
        if (clients[i].words != NULL) {
            assert_int_equal(kvf_x_open(f->client, &model.weights, &x),
                             clients[i].kind == KVF_KIND_XG ? KVF_ERR_REFUSED : KVF_ERR_MISMATCH);
            assert_non_null(strstr(f->log, clients[i].words));
            assert_null(x);
        } else {
            assert_int_equal(kvf_x_open(f->client, &model.weights, &x),
                             has_blas ? KVF_OK : KVF_ERR_UNSUPPORTED);
        }
        x = kvf_x_close(x);
        f->client = kvf_close(f->client);
        kvf_fake_daemon_stop(f->daemon);
        f->daemon = NULL;
    }
    model_fini(&model);
}

int main(void)
{
    const struct CMUnitTest refusals[] = {
        cmocka_unit_test(what_does_not_fit_is_refused),
        cmocka_unit_test(a_missing_blas_says_what_to_install),
        FIXTURE_TEST(a_client_that_stores_something_else_is_refused),
    };
    const struct CMUnitTest products[] = {
        cmocka_unit_test(k_and_v_are_those_of_fp64),
        cmocka_unit_test(positions_beyond_the_tables_are_refused),
    };
    char text[KVF_BLAS_TEXT_BYTES];
    struct kvf_blas blas;
    int n_failed = cmocka_run_group_tests(refusals, NULL, NULL);

    if (n_failed == 0 && kvf_blas_open(&blas, text) != KVF_OK) {
        printf("skipped: %s\n", text);
        return SKIPPED;
    }
    return n_failed + cmocka_run_group_tests(products, NULL, NULL);
}
