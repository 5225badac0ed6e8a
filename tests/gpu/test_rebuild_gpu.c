/* SPDX-License-Identifier: Apache-2.0
 *
 * K and V of a layer's product on a GPU: bias, norm and rotation into pages of any layout, beside a
 * reference in double. A value is off by no more than its rounding to the pages' type and what some
 * fp32 operations leave; bytes between vectors, and pages and rows that nothing is said of, stay as
 * they are. And the passes between latents and X, to the bit. The same without a GPU, where
 * KVF_EMULATED says so.
 */
#include "base/random.h"
#include "codec/codec_fp.h"
#include "codec/codec_rebuild.h"
#include "kvferry.h"
#include "tests/gpu/codec_device.h"
#include "tests/support/support.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    POSITIONS = 512,
    PAGES = 40,
    ROWS = 160,
    HEADS_MAX = 9,
    DIM_MAX = 264,
    KEPT = 0x5a, /* bytes that nothing is written to */
    SKIPPED = 77,
};

enum layout {
    LAYOUT_TOKENS, /* (B, N, H, K and V) */
    LAYOUT_HEADS,  /* (B, H, N, K and V) */
    LAYOUT_APART,  /* (K and V, B, N, H) */
    LAYOUT_PADDED, /* the first, with gaps on which only words of 2 bytes lie */
    LAYOUT_ODD,    /* the first, beside what 16 bytes lie on */
};

struct shape {
    uint32_t n_heads;
    uint32_t dim_k;
    uint32_t dim_v;
    uint32_t rope_dims;
    uint8_t style;
    bool has_bias;
    bool has_norm;
    uint8_t dtype;
    uint8_t kv_dtype;
    enum layout layout;
    uint32_t tokens_a_page;
    uint32_t piece_tokens;
    bool is_fast; /* the kernel that is chosen */
};

/* All that a launch is of, here and on the device. */
struct bed {
    struct shape shape;
    struct kvf_gpu_rebuild work;
    float *product;
    uint16_t *weights; /* biases of K and V, gain */
    float *tables;     /* cosines, sines */
    uint8_t *pages;
    uint32_t element_bytes;
    size_t product_bytes;
    size_t weights_bytes;
    size_t tables_bytes;
    size_t pages_bytes;
    uint64_t addresses[4];
};

static struct kvf_random_seeded random_bits;

static uint32_t below(uint32_t n)
{
    return (uint32_t)(kvf_random_seeded_next(&random_bits) % n);
}

static float uniform(float scale)
{
    return (float)(int32_t)(uint32_t)kvf_random_seeded_next(&random_bits) * 0x1p-31f * scale;
}

static uint16_t narrowed(uint8_t dtype, float value)
{
    return dtype == KVF_DTYPE_BF16 ? kvf_bf16_from_f32(value) : kvf_f16_from_f32(value);
}

static double widened(uint8_t dtype, const uint8_t *from)
{
    uint16_t bits;
    float value;

    if (dtype == KVF_DTYPE_F32) {
        memcpy(&value, from, sizeof(value));
        return (double)value;
    }
    memcpy(&bits, from, sizeof(bits));
    return (double)(dtype == KVF_DTYPE_BF16 ? kvf_f32_from_bf16(bits) : kvf_f32_from_f16(bits));
}

/* --- what there is ---------------------------------------------------------------------------- */

static void layout_set(struct bed *bed)
{
    const struct shape *shape = &bed->shape;
    uint64_t bytes = bed->element_bytes;
    uint64_t vector = (shape->dim_k + shape->dim_v) * bytes;
    uint64_t gap = shape->layout == LAYOUT_PADDED ? bytes : 0;
    uint64_t offsets[2] = {shape->layout == LAYOUT_ODD ? bytes : 0, 0};
    struct kvf_gpu_pages strides = {0};

    strides.head_stride_bytes = vector + gap;
    strides.token_stride_bytes = shape->n_heads * strides.head_stride_bytes + gap;
    if (shape->layout == LAYOUT_HEADS) {
        strides.token_stride_bytes = vector;
        strides.head_stride_bytes = vector * shape->tokens_a_page;
    }
    strides.page_stride_bytes = shape->n_heads * shape->tokens_a_page * (vector + gap) +
                                shape->tokens_a_page * gap;
    offsets[1] = offsets[0] + shape->dim_k * bytes;
    bed->pages_bytes = PAGES * strides.page_stride_bytes + offsets[0];
    bed->work.pages[0] = bed->work.pages[1] = strides;
    if (shape->layout == LAYOUT_APART) {
        for (uint32_t i = 0; i < 2; i++) {
            uint64_t own = (i != 0 ? shape->dim_v : shape->dim_k) * bytes;

            bed->work.pages[i] = (struct kvf_gpu_pages){shape->n_heads * shape->tokens_a_page * own,
                                                        shape->n_heads * own, own};
        }
        offsets[1] = PAGES * bed->work.pages[0].page_stride_bytes;
        bed->pages_bytes = offsets[1] + PAGES * bed->work.pages[1].page_stride_bytes;
    }
    bed->addresses[3] = codec_device_alloc(bed->pages_bytes);
    bed->work.bases[0] = bed->addresses[3] + offsets[0];
    bed->work.bases[1] = bed->addresses[3] + offsets[1];
}

/* Pieces of any length, whose rows and pages are anywhere; each page is used once at most. */
static void pieces_set(struct bed *bed)
{
    struct kvf_gpu_rebuild *work = &bed->work;
    uint32_t a_page = bed->shape.tokens_a_page;
    uint32_t n_ids = 0;
    uint32_t row = below(3);

    work->piece_tokens = bed->shape.piece_tokens;
    for (;;) {
        uint32_t n = 1 + below(work->piece_tokens);
        uint32_t n_pages = (n + a_page - 1) / a_page;

        if (row + n > ROWS || n_ids + n_pages > PAGES - 1 ||
            work->n_pieces == KVF_GPU_REBUILD_PIECES_MAX) {
            break;
        }
        work->pieces[work->n_pieces++] = (struct kvf_gpu_rebuild_piece){
            row, n, below(POSITIONS - n), n_ids};
        row += n + below(3);
        n_ids += n_pages;
    }
    for (uint32_t i = 0; i < n_ids; i++) {
        work->page_ids[i] = (i * 7 + 3) % PAGES; /* PAGES has no factor 7 */
    }
    assert_true(work->n_pieces > 0);
}

static uint64_t upload(const void *from, size_t bytes)
{
    uint64_t address = codec_device_alloc(bytes);

    codec_device_write(address, from, bytes);
    return address;
}

static void *some(size_t bytes)
{
    void *memory = calloc(1, bytes);

    assert_non_null(memory);
    return memory;
}

static void numbers_set(struct bed *bed)
{
    const struct shape *shape = &bed->shape;
    struct kvf_gpu_rebuild *work = &bed->work;
    size_t n_bias = (size_t)shape->n_heads * (shape->dim_k + shape->dim_v);
    size_t n_weights = n_bias + shape->dim_k;
    size_t n_table = (size_t)POSITIONS * (shape->rope_dims / 2);

    bed->product_bytes = (size_t)ROWS * n_bias * sizeof(float);
    bed->weights_bytes = n_weights * sizeof(uint16_t);
    bed->tables_bytes = 2 * n_table * sizeof(float) + sizeof(float);
    bed->product = some(bed->product_bytes);
    bed->weights = some(bed->weights_bytes);
    bed->tables = some(bed->tables_bytes);
    for (size_t i = 0; i < ROWS * n_bias; i++) {
        bed->product[i] = uniform(i % 50 == 0 ? 300.0f : 3.0f);
    }
    for (size_t i = 0; i < n_weights; i++) {
        bed->weights[i] = narrowed(shape->dtype, uniform(2.0f));
    }
    for (size_t i = 0; i < n_table; i++) {
        double angle = (double)uniform(4.0f);

        bed->tables[i] = (float)cos(angle);
        bed->tables[n_table + i] = (float)sin(angle);
    }
    bed->addresses[0] = upload(bed->product, bed->product_bytes);
    bed->addresses[1] = upload(bed->weights, bed->weights_bytes);
    bed->addresses[2] = upload(bed->tables, bed->tables_bytes);
    work->product = bed->addresses[0];
    work->cosines = bed->addresses[2];
    work->sines = bed->addresses[2] + n_table * sizeof(float);
    if (shape->has_bias) {
        work->bias_k = bed->addresses[1];
        work->bias_v = bed->addresses[1] + 2u * shape->n_heads * shape->dim_k;
    }
    work->gain = shape->has_norm ? bed->addresses[1] + 2 * n_bias : 0;
}

static void bed_open(struct bed *bed, const struct shape *shape)
{
    *bed = (struct bed){.shape = *shape,
                        .work = {.n_heads = shape->n_heads,
                                 .dim_k = shape->dim_k,
                                 .dim_v = shape->dim_v,
                                 .width = shape->n_heads * (shape->dim_k + shape->dim_v),
                                 .rope_dims = shape->rope_dims,
                                 .tokens_a_page = shape->tokens_a_page,
                                 .eps = 1e-6f,
                                 .dtype = shape->dtype,
                                 .kv_dtype = shape->kv_dtype,
                                 .rope_style = shape->style}};
    bed->element_bytes = shape->kv_dtype == KVF_DTYPE_F32 ? 4 : 2;
    layout_set(bed);
    numbers_set(bed);
    pieces_set(bed);
    bed->pages = some(bed->pages_bytes);
    memset(bed->pages, KEPT, bed->pages_bytes);
    codec_device_write(bed->addresses[3], bed->pages, bed->pages_bytes);
}

static void bed_close(struct bed *bed)
{
    for (uint32_t i = 0; i < 4; i++) {
        codec_device_free(bed->addresses[i]);
    }
    free(bed->product);
    free(bed->weights);
    free(bed->tables);
    free(bed->pages);
}

/* --- what there should be --------------------------------------------------------------------- */

static void reference_k(const struct bed *bed, uint32_t position, double *x)
{
    const struct shape *shape = &bed->shape;
    size_t n_bias = (size_t)shape->n_heads * (shape->dim_k + shape->dim_v);
    const float *cosines = bed->tables + (size_t)position * (shape->rope_dims / 2);
    const float *sines = cosines + (size_t)POSITIONS * (shape->rope_dims / 2);
    double sum = 0;

    for (uint32_t i = 0; i < shape->dim_k; i++) {
        sum += x[i] * x[i];
    }
    for (uint32_t i = 0; shape->has_norm && i < shape->dim_k; i++) {
        x[i] = x[i] / sqrt(sum / shape->dim_k + (double)bed->work.eps) *
               widened(shape->dtype, (const uint8_t *)&bed->weights[n_bias + i]);
    }
    for (uint32_t i = 0; i < shape->rope_dims / 2; i++) {
        bool is_half = shape->style == KVF_ROPE_STYLE_HALF;
        double *a = &x[is_half ? i : 2 * i];
        double *b = &x[is_half ? i + shape->rope_dims / 2 : 2 * i + 1];
        double first = *a;

        *a = first * (double)cosines[i] - *b * (double)sines[i];
        *b = *b * (double)cosines[i] + first * (double)sines[i];
    }
}

/* Check a vector, and put back what was there before. */
static void assert_vector(struct bed *bed, const double *want, uint32_t dim, uint8_t *have)
{
    static const double halves[] = {[KVF_DTYPE_BF16] = 0x1p-8, [KVF_DTYPE_F16] = 0x1p-11};
    uint8_t dtype = bed->shape.kv_dtype;
    double half = dtype == KVF_DTYPE_F32 ? 0 : halves[dtype]; /* of a place, relative */
    double most = 0;

    for (uint32_t i = 0; i < dim; i++) {
        most = fmax(most, fabs(want[i]));
    }
    for (uint32_t i = 0; i < dim; i++) {
        double value = widened(dtype, have + (size_t)i * bed->element_bytes);
        double bound = fabs(want[i]) * half + most * 0x1p-20 + 0x1p-24;

        if (!(fabs(value - want[i]) <= bound)) {
            print_error("element %u of %u is %.9g, not %.9g\n", i, dim, value, want[i]);
        }
        assert_true(fabs(value - want[i]) <= bound);
    }
    memset(have, KEPT, (size_t)dim * bed->element_bytes);
}

static void assert_token(struct bed *bed, uint32_t row, uint32_t position, uint32_t page,
                         uint32_t slot)
{
    const struct shape *shape = &bed->shape;
    double want[DIM_MAX];

    for (uint32_t v = 0; v < 2 * shape->n_heads; v++) {
        bool is_v = v >= shape->n_heads;
        uint32_t head = is_v ? v - shape->n_heads : v;
        uint32_t dim = is_v ? shape->dim_v : shape->dim_k;
        uint32_t column = is_v ? shape->n_heads * shape->dim_k + head * dim : head * dim;
        const struct kvf_gpu_pages *pages = &bed->work.pages[is_v];
        uint64_t offset = bed->work.bases[is_v] - bed->addresses[3] +
                          page * pages->page_stride_bytes + slot * pages->token_stride_bytes +
                          head * pages->head_stride_bytes;

        for (uint32_t i = 0; i < dim; i++) {
            want[i] = (double)bed->product[(size_t)row * bed->work.width + column + i];
            want[i] += shape->has_bias
                           ? widened(shape->dtype, (const uint8_t *)&bed->weights[column + i])
                           : 0;
        }
        if (!is_v) {
            reference_k(bed, position, want);
        }
        assert_vector(bed, want, dim, bed->pages + offset);
    }
}

static void run(const struct shape *shape)
{
    static const char *const kernels[] = {"kvf_rebuild", "kvf_rebuild_fast"};
    struct bed bed;

    for (uint32_t k = 0; k < (shape->is_fast ? 2u : 1u); k++) {
        bed_open(&bed, shape);
        assert_string_equal(kvf_gpu_rebuild_kernel(&bed.work), kernels[shape->is_fast]);
        codec_device_rebuild(&bed.work, kernels[k]);
        codec_device_read(bed.pages, bed.addresses[3], bed.pages_bytes);
        for (uint32_t i = 0; i < bed.work.n_pieces; i++) {
            const struct kvf_gpu_rebuild_piece *piece = &bed.work.pieces[i];

            for (uint32_t t = 0; t < piece->n_tokens; t++) {
                assert_token(&bed, piece->row + t, piece->position_first + t,
                             bed.work.page_ids[piece->first_page + t / shape->tokens_a_page],
                             t % shape->tokens_a_page);
            }
        }
        for (size_t i = 0; i < bed.pages_bytes; i++) {
            assert_int_equal(bed.pages[i], KEPT);
        }
        bed_close(&bed);
    }
}

/* --- tests ------------------------------------------------------------------------------------ */

enum {
    BF16 = KVF_DTYPE_BF16,
    F16 = KVF_DTYPE_F16,
    F32 = KVF_DTYPE_F32,
    NONE = KVF_ROPE_STYLE_NONE,
    HALF = KVF_ROPE_STYLE_HALF,
    PAIRS = KVF_ROPE_STYLE_INTERLEAVED,
};

static void sixteen_bytes_at_a_time(void **state)
{
    static const struct shape shapes[] = {
        {8, 128, 128, 128, HALF, false, false, BF16, BF16, LAYOUT_TOKENS, 16, 32, true},
        {9, 128, 128, 128, HALF, true, true, BF16, BF16, LAYOUT_HEADS, 16, 32, true},
        {3, 128, 64, 64, HALF, true, false, BF16, BF16, LAYOUT_APART, 8, 24, true},
        {5, 64, 64, 64, PAIRS, true, true, F16, F16, LAYOUT_TOKENS, 4, 16, true},
        {1, 256, 128, 128, PAIRS, false, true, BF16, F16, LAYOUT_HEADS, 1, 8, true},
        {2, 96, 96, 32, HALF, true, true, F16, BF16, LAYOUT_APART, 3, 9, true},
        {4, 80, 40, 80, HALF, false, false, BF16, BF16, LAYOUT_TOKENS, 16, 16, true},
        {6, 8, 256, 8, PAIRS, true, false, BF16, BF16, LAYOUT_HEADS, 5, 10, true},
        {7, 192, 128, 0, NONE, true, true, BF16, BF16, LAYOUT_APART, 16, 32, true},
        {4, 128, 0, 128, HALF, true, true, BF16, BF16, LAYOUT_TOKENS, 16, 32, true},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        run(&shapes[i]);
    }
}

/* What the fast kernel cannot do. */
static void anything_else(void **state)
{
    static const struct shape shapes[] = {
        {3, 128, 128, 128, HALF, true, true, BF16, BF16, LAYOUT_PADDED, 16, 32, false},
        {4, 128, 64, 128, PAIRS, true, true, F16, F16, LAYOUT_ODD, 8, 24, false},
        {2, 100, 36, 24, HALF, true, true, BF16, BF16, LAYOUT_TOKENS, 4, 16, false},
        {2, 128, 128, 24, HALF, false, false, BF16, BF16, LAYOUT_HEADS, 4, 16, false},
        {2, 64, 64, 12, PAIRS, false, false, BF16, BF16, LAYOUT_APART, 4, 16, false},
        {1, 264, 8, 64, HALF, true, false, BF16, BF16, LAYOUT_APART, 16, 32, false},
        {3, 128, 128, 128, HALF, true, true, BF16, F32, LAYOUT_TOKENS, 16, 32, false},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        run(&shapes[i]);
    }
}

/* As many pieces and pages as one launch can be told of. */
static void full_lists(void **state)
{
    static const struct shape shapes[] = {
        {1, 64, 64, 64, HALF, false, false, BF16, BF16, LAYOUT_TOKENS, 1, 1, true},
        {1, 64, 64, 64, PAIRS, false, false, BF16, BF16, LAYOUT_TOKENS, 4, 3, true},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        run(&shapes[i]);
    }
}

/* --- between latents and X -------------------------------------------------------------------- */

static uint16_t rounded(uint8_t dtype, float value)
{
    if (isnan(value)) {
        return dtype == BF16 ? 0x7fc0 : 0x7e00;
    }
    return dtype == BF16 ? kvf_bf16_from_f32(value) : kvf_f16_from_f32(value);
}

static float number(uint8_t dtype, uint16_t bits)
{
    return dtype == BF16 ? kvf_f32_from_bf16(bits) : kvf_f32_from_f16(bits);
}

/* Any bits, infinities and what is no number among them; what is behind the arrays stays. */
static void latents(void **state)
{
    enum {
        N = 3 * KVF_GPU_LATENT_THREADS * KVF_GPU_LATENT_UNIT / 2, /* the second block half empty */
        KEPT_ELEMENTS = 64,
    };
    static uint16_t x[N];
    static float sums[N];
    static uint16_t have[N + KEPT_ELEMENTS];
    uint64_t x_address = codec_device_alloc(sizeof(have));
    uint64_t sums_address = codec_device_alloc(sizeof(sums));
    uint64_t to_address = codec_device_alloc(sizeof(have));

    (void)state;
    for (uint32_t pass = 0; pass < 6; pass++) {
        static const char *const kernels[] = {"kvf_latent_clean", "kvf_latent_narrow",
                                              "kvf_latent_subtract"};
        uint8_t dtype = pass % 2 != 0 ? BF16 : KVF_DTYPE_F16;
        struct kvf_gpu_latent_work work = {x_address, sums_address, to_address, N, dtype, 0};

        for (uint32_t i = 0; i < N; i++) {
            uint32_t bits = (uint32_t)kvf_random_seeded_next(&random_bits);

            x[i] = (uint16_t)kvf_random_seeded_next(&random_bits);
            bits = i % 8 == 0 ? bits : (bits & 0x83ffffff) | 0x3c000000;
            memcpy(&sums[i], &bits, sizeof(bits));
        }
        memset(have, KEPT, sizeof(have));
        codec_device_write(x_address, have, sizeof(have));
        codec_device_write(to_address, have, sizeof(have));
        codec_device_write(x_address, x, sizeof(x));
        codec_device_write(sums_address, sums, sizeof(sums));
        work.from = pass / 2 == 1 ? sums_address : x_address;
        codec_device_latent(&work, kernels[pass / 2]);
        codec_device_read(have, pass / 2 == 0 ? x_address : to_address, sizeof(have));
        for (uint32_t i = 0; i < N; i++) {
            float value = number(dtype, x[i]);
            uint16_t want = pass / 2 == 0   ? (fabsf(value) < 0x1p64f ? x[i] : 0)
                            : pass / 2 == 1 ? rounded(dtype, sums[i])
                                            : rounded(dtype, value - sums[i]);

            assert_int_equal(have[i], want);
        }
        for (uint32_t i = 0; i < 2 * KEPT_ELEMENTS; i++) {
            assert_int_equal(((const uint8_t *)&have[N])[i], KEPT);
        }
    }
    codec_device_free(x_address);
    codec_device_free(sums_address);
    codec_device_free(to_address);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sixteen_bytes_at_a_time),
        cmocka_unit_test(anything_else),
        cmocka_unit_test(full_lists),
        cmocka_unit_test(latents),
    };
    uint64_t seed = kvf_test_seed();
    int failures;

    if (!codec_device_open()) {
        return SKIPPED;
    }
    kvf_random_seeded_init(&random_bits, seed);
    failures = cmocka_run_group_tests(tests, NULL, NULL);
    codec_device_close();
    return failures;
}
