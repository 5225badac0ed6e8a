/* SPDX-License-Identifier: Apache-2.0
 *
 * test_x_latent.c: X of a model with few K/V heads, put as latents and rebuilt from them, beside
 * the same computed in fp64; and what is refused.
 */
#include <math.h>

#include "base/random.h"
#include "client/x_svd.h"
#include "codec/codec.h"
#include "codec/codec_fp.h"
#include "tests/unit/client/fixture.h"

enum {
    LAYERS = 12,
    BASE_LAYER = 2, /* of xgcl3 */
    D_MODEL = 256,
    HEADS = 2,
    DIM = 32,
    WIDTH = HEADS * 2 * DIM, /* of K and V, and the rank */
    CHUNK = 16,
    TOKENS = 40,
    CHUNKS = 3,
    SKIPPED = 77,
};

/* Everything of one test. By rows; [layer] first. */
struct world {
    float w[LAYERS][WIDTH][D_MODEL]; /* rows of K by head, then of V */
    float u[LAYERS][D_MODEL][WIDTH];
    float m[LAYERS][WIDTH][WIDTH];
    float x[LAYERS][TOKENS][D_MODEL];
    float encoded[LAYERS][TOKENS][D_MODEL];     /* what the put hands back */
    float latents[LAYERS][TOKENS][WIDTH];       /* what a reader decodes */
    uint16_t x_halves[LAYERS][TOKENS][D_MODEL]; /* of a geometry of bf16 */
    uint16_t latent_halves[LAYERS][TOKENS][WIDTH];
    float sums[TOKENS][D_MODEL];   /* of who rebuilds */
    double exact[TOKENS][D_MODEL]; /* the sums in fp64 */
    double slack[TOKENS][D_MODEL]; /* x_internal.h: how far fp32 sums may be from them */
    float k[LAYERS][TOKENS][HEADS][DIM];
    float v[LAYERS][TOKENS][HEADS][DIM];
    const void *w_k[LAYERS];
    const void *w_v[LAYERS];
    void *k_layers[LAYERS];
    void *v_layers[LAYERS];
    char svd_file[KVF_TEST_PATH_BYTES];
    struct kvf_blas blas;
    struct kvf_geometry geometry;
    struct kvf_x_weights weights;
    struct kvf_x *handle;
    struct key_set keys;
};

/* About normal: the sum of four uniform numbers. */
static float draw(struct kvf_random_seeded *random)
{
    float sum = 0.0f;

    for (int i = 0; i < 4; i++) {
        sum += (float)(kvf_random_seeded_next(random) >> 40) * 0x1p-24f - 0.5f;
    }
    return sum * 1.7320508f;
}

static void write_factors(struct world *world, const char *path, uint8_t digest)
{
    const struct kvf_weights_model model = {.n_layers = LAYERS,
                                            .d_model = D_MODEL,
                                            .n_query_heads = 4 * HEADS,
                                            .n_heads = HEADS,
                                            .dim_k = DIM,
                                            .dim_v = DIM};
    const uint8_t weights_digest[KVF_DIGEST_BYTES] = {digest};
    struct kvf_svd_writer *writer;
    char why[KVF_SVD_WHY_BYTES];

    assert_int_equal(kvf_svd_writer_open(path, &model, WIDTH, weights_digest, &writer, why),
                     KVF_OK);
    for (int layer = 0; layer < LAYERS; layer++) {
        assert_int_equal(kvf_svd_writer_add(writer, world->u[layer][0], world->m[layer][0], why),
                         KVF_OK);
    }
    assert_int_equal(kvf_svd_writer_commit(writer, why), KVF_OK);
}

/* X of a layer is that of the one before and a little more, with a channel that stands out. */
static void world_fill(struct world *world, struct kvf_random_seeded *random)
{
    char why[KVF_SVD_WHY_BYTES];

    for (int layer = 0; layer < LAYERS; layer++) {
        float *w = (float *)world->w[layer];
        float *x = (float *)world->x[layer];
        const float *before = layer != 0 ? (const float *)world->x[layer - 1] : NULL;

        for (int i = 0; i < WIDTH * D_MODEL; i++) {
            w[i] = draw(random) / 16;
        }
        assert_int_equal(kvf_svd_layer(&world->blas, world->w[layer][0], D_MODEL, WIDTH, WIDTH,
                                       world->u[layer][0], world->m[layer][0], why),
                         KVF_OK);
        for (int i = 0; i < TOKENS * D_MODEL; i++) {
            x[i] = layer != 0 ? before[i] + 0.3f * draw(random)
                              : draw(random) * (i % D_MODEL == 9 ? 20.0f : 1.0f);
        }
        world->w_k[layer] = world->w[layer][0];
        world->w_v[layer] = world->w[layer][HEADS * DIM];
        world->k_layers[layer] = world->k[layer];
        world->v_layers[layer] = world->v[layer];
    }
}

/* Attach as one who has this file. */
static void factors_take(struct fixture *f, const char *path)
{
    struct kvf_x_factors factors = {.struct_bytes = sizeof(factors)};

    assert_int_equal(kvf_x_factors_read(path, &factors, NULL, NULL), KVF_OK);
    assert_int_equal(factors.rank, WIDTH);
    assert_int_equal(factors.d_model, D_MODEL);
    memcpy(f->options.factors_digest, factors.digest, sizeof(factors.digest));
}

static struct world *world_create(struct fixture *f)
{
    struct world *world = calloc(1, sizeof(*world));
    struct kvf_random_seeded random;
    char text[KVF_BLAS_TEXT_BYTES];

    assert_non_null(world);
    kvf_random_seeded_init(&random, kvf_test_seed());
    assert_int_equal(kvf_blas_open(&world->blas, text), KVF_OK);
    world_fill(world, &random);
    kvf_test_dir_path(&f->dir, "model.svd", world->svd_file);
    write_factors(world, world->svd_file, 1);
    world->weights = (struct kvf_x_weights){
        .struct_bytes = sizeof(world->weights),
        .d_model = D_MODEL,
        .stored_width = WIDTH,
        .n_layers = LAYERS,
        .n_heads = HEADS,
        .dim_k = DIM,
        .dim_v = DIM,
        .dtype = KVF_DTYPE_F32,
        .kv_dtype = KVF_DTYPE_F32,
        .w_k = world->w_k,
        .w_v = world->w_v,
        .weights_digest = {1},
        .svd_file = world->svd_file,
    };
    world->geometry = (struct kvf_geometry){.struct_bytes = sizeof(world->geometry),
                                            .dtype = KVF_DTYPE_F32,
                                            .n_layers = LAYERS,
                                            .chunk_tokens = CHUNK};
    assert_int_equal(kvf_x_geometry(KVF_KIND_XG, WIDTH, &world->geometry), KVF_OK);
    keys_fill(&world->keys, "latent", CHUNKS);
    f->options.geometry = &world->geometry;
    f->options.weights_digest[0] = 1;
    factors_take(f, world->svd_file);
    f->options.flags = KVF_ATTACH_ALLOW_UNCALIBRATED;
    return world;
}

static void world_destroy(struct world *world)
{
    world->handle = kvf_x_close(world->handle);
    free(world);
}

static struct kvf_x_put_options put_options(const struct world *world)
{
    return (struct kvf_x_put_options){
        .struct_bytes = sizeof(struct kvf_x_put_options), .n_tokens = TOKENS, .x = world->handle};
}

static bool is_bf16(const struct world *world)
{
    return world->geometry.dtype == KVF_DTYPE_BF16;
}

/* X as a model of that type has it. */
static void round_x(struct world *world)
{
    const size_t n = sizeof(world->x) / sizeof(float);
    uint16_t *halves = (uint16_t *)world->x_halves;
    float *x = (float *)world->x;

    for (size_t i = 0; is_bf16(world) && i < n; i++) {
        halves[i] = kvf_bf16_from_f32(x[i]);
        x[i] = kvf_f32_from_bf16(halves[i]);
    }
}

static void widen_latents(struct world *world)
{
    const size_t n = sizeof(world->latents) / sizeof(float);
    const uint16_t *halves = (const uint16_t *)world->latent_halves;
    float *latents = (float *)world->latents;

    for (size_t i = 0; is_bf16(world) && i < n; i++) {
        latents[i] = kvf_f32_from_bf16(halves[i]);
    }
}

/* Through the cache: world->encoded and world->latents. */
static void go_through(struct fixture *f, struct world *world)
{
    struct kvf_x_put_options options = put_options(world);
    size_t element_bytes = kvf_dtype_bytes(world->geometry.dtype);
    struct kvf_x_put *put;
    struct kvf_hit hits[CHUNKS];

    round_x(world);
    assert_int_equal(kvf_x_open(f->client, &world->weights, &world->handle), KVF_OK);
    options.x = world->handle;
    assert_int_equal(kvf_x_put_begin(f->client, &options, &put), KVF_OK);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        const void *x = is_bf16(world) ? (const void *)world->x_halves[layer] : world->x[layer];

        assert_int_equal(kvf_x_put_layer(put, layer, x, 0, world->encoded[layer][0]), KVF_OK);
    }
    assert_int_equal(kvf_x_put_end(put, world->keys.keys, CHUNKS, NULL, NULL), KVF_OK);
    assert_int_equal(kvf_get(f->client, world->keys.keys, CHUNKS, NULL, hits), KVF_OK);
    for (int i = 0; i < CHUNKS; i++) {
        void *layers[LAYERS];
        struct kvf_kv_view view = {
            .struct_bytes = sizeof(view),
            .tokens_a_page = CHUNK,
            .k = {.layers = layers,
                  .token_stride_bytes = WIDTH * element_bytes,
                  .head_stride_bytes = world->geometry.dim_k * element_bytes}};

        for (int layer = 0; layer < LAYERS; layer++) {
            layers[layer] = is_bf16(world) ? (void *)world->latent_halves[layer][i * CHUNK]
                                           : (void *)world->latents[layer][i * CHUNK];
        }
        assert_int_equal(
            kvf_decode(f->client, hits[i].record, hits[i].record_bytes, 0, 0, 0, 0, &view), KVF_OK);
        assert_int_equal(kvf_lease_release(f->client, hits[i].lease), KVF_OK);
    }
    widen_latents(world);
}

static int rebuild(struct world *world, uint32_t layer, float *sums)
{
    const struct kvf_x_input input = {
        .struct_bytes = sizeof(input),
        .n_tokens = TOKENS,
        .dtype = world->geometry.dtype,
        .data = is_bf16(world) ? (const void *)world->latent_halves[layer] : world->latents[layer],
        .sums = sums};
    const struct kvf_kv_view view = {.struct_bytes = sizeof(view),
                                     .tokens_a_page = TOKENS,
                                     .k = {.layers = world->k_layers,
                                           .token_stride_bytes = sizeof(world->k[0][0]),
                                           .head_stride_bytes = sizeof(world->k[0][0][0])},
                                     .v = {.layers = world->v_layers,
                                           .token_stride_bytes = sizeof(world->v[0][0]),
                                           .head_stride_bytes = sizeof(world->v[0][0][0])}};

    return kvf_x_rebuild(world->handle, layer, &input, &view);
}

/* The sums of one more layer in fp64, and how far others may be from them. */
static void add_exactly(struct world *world, uint32_t layer, bool is_difference)
{
    const double g = (WIDTH + 2) * 0x1p-24 / (1 - (WIDTH + 2) * 0x1p-24);

    for (int t = 0; t < TOKENS; t++) {
        for (int i = 0; i < D_MODEL; i++) {
            double sum = is_difference ? world->exact[t][i] : 0;
            double size = fabs(sum);

            for (int r = 0; r < WIDTH; r++) {
                double term = (double)world->latents[layer][t][r] * (double)world->u[layer][i][r];

                sum += term;
                size += fabs(term);
            }
            world->slack[t][i] = (is_difference ? world->slack[t][i] : 0) + g * size;
            world->exact[t][i] = sum;
        }
    }
}

static double worst_sum(const struct world *world, float sums[TOKENS][D_MODEL])
{
    double worst = 0;

    for (int t = 0; t < TOKENS; t++) {
        for (int i = 0; i < D_MODEL; i++) {
            double error = fabs((double)sums[t][i] - world->exact[t][i]);

            worst = fmax(worst, error / world->slack[t][i]);
        }
    }
    return worst;
}

/* The worst error of K and V of a layer beside the product of `of`, in 2 units in the last place of
 * bf16 at max(|value|, 2^-6 of the vector's root mean square). first: of the model's heads, the one
 * that is rebuilt first. */
static double worst_kv(const struct world *world, uint32_t layer, double of[TOKENS][D_MODEL],
                       int first, int n_heads)
{
    double worst = 0;

    for (int t = 0; t < TOKENS; t++) {
        for (int row = 0; row < 2 * n_heads; row++) {
            bool is_v = row >= n_heads;
            int head = row - (is_v ? n_heads : 0);
            const float *got = is_v ? world->v[layer][t][head] : world->k[layer][t][head];
            double want[DIM];
            double power = 0;

            for (int e = 0; e < DIM; e++) {
                const float *w = world->w[layer][((is_v ? HEADS : 0) + first + head) * DIM + e];

                want[e] = 0;
                for (int i = 0; i < D_MODEL; i++) {
                    want[e] += of[t][i] * (double)w[i];
                }
                power += want[e] * want[e];
            }
            for (int e = 0; e < DIM; e++) {
                double at = fmax(fabs(want[e]), sqrt(power / DIM) / 64);

                worst = fmax(worst,
                             fabs((double)got[e] - want[e]) / (2 * ldexp(1.0, ilogb(at) - 7)));
            }
        }
    }
    return worst;
}

/* Root mean square of (X - S) U of a layer. */
static double latent_size(const struct world *world, uint32_t layer, float sums[TOKENS][D_MODEL])
{
    double power = 0;

    for (int t = 0; t < TOKENS; t++) {
        for (int r = 0; r < WIDTH; r++) {
            double value = 0;

            for (int i = 0; i < D_MODEL; i++) {
                value += ((double)world->x[layer][t][i] - (double)sums[t][i]) *
                         (double)world->u[layer][i][r];
            }
            power += value * value;
        }
    }
    return sqrt(power / (TOKENS * WIDTH));
}

/* Who puts and who reads have the same sums but for roundings, K and V are those of the sums, and
 * a layer's error is what the codec has left of its own latent, however many were before it. */
static void check_differences(struct fixture *f, uint8_t dtype)
{
    struct world *world = world_create(f);
    double sum_error = 0;
    double kv_error = 0;
    double left = 0;

    world->geometry.dtype = dtype;
    f->options.profile = "xgcl3";
    fixture_open(f);
    go_through(f, world);
    memset(world->sums, 0xff, sizeof(world->sums)); /* NaN: what was there does not matter */
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        bool is_difference = layer > BASE_LAYER;

        assert_int_equal(rebuild(world, layer, world->sums[0]), KVF_OK);
        add_exactly(world, layer, is_difference);
        sum_error = fmax(sum_error, worst_sum(world, world->sums));
        sum_error = fmax(sum_error, worst_sum(world, world->encoded[layer]));
        kv_error = fmax(kv_error, worst_kv(world, layer, world->exact, 0, HEADS));
        if (is_difference) {
            left = fmax(left, latent_size(world, layer, world->encoded[layer]) /
                                  latent_size(world, layer, world->encoded[layer - 1]));
        }
    }
    printf("sums: largest error %.3f of the bound; K and V: %.3f; left of latents: %.3f\n",
           sum_error, kv_error, left);
    assert_true(sum_error <= 1.0);
    assert_true(kv_error <= 1.0);
    assert_true(left > 0.02 && left < 0.25);
    world_destroy(world);
}

static void differences_are_added_up_by_both_sides(void **state)
{
    check_differences(*state, KVF_DTYPE_F32);
}

static void so_are_those_of_bf16(void **state)
{
    check_differences(*state, KVF_DTYPE_BF16);
}

/* Each layer by itself and without loss: K and V of X itself, with the sums and without. */
static void latents_of_full_rank_are_x(void **state)
{
    struct fixture *f = *state;
    struct world *world = world_create(f);
    double worst = 0;

    f->options.profile = "exact";
    fixture_open(f);
    go_through(f, world);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (int t = 0; t < TOKENS; t++) {
            for (int i = 0; i < D_MODEL; i++) {
                world->exact[t][i] = (double)world->x[layer][t][i];
            }
        }
        assert_int_equal(rebuild(world, layer, NULL), KVF_OK);
        worst = fmax(worst, worst_kv(world, layer, world->exact, 0, HEADS));
        memset(world->k[layer], 0, sizeof(world->k[layer]));
        memset(world->v[layer], 0, sizeof(world->v[layer]));
        assert_int_equal(rebuild(world, layer, world->sums[0]), KVF_OK);
        worst = fmax(worst, worst_kv(world, layer, world->exact, 0, HEADS));
    }
    printf("K and V: largest error %.3f of the bound\n", worst);
    assert_true(worst <= 1.0);
    world_destroy(world);
}

/* A rank of a tensor-parallel group has some of the heads, and the factors of all. */
static void ranks_rebuild_their_heads(void **state)
{
    struct fixture *f = *state;
    struct world *world = world_create(f);

    f->options.profile = "xgcl3";
    fixture_open(f);
    world->weights.n_heads = 1;
    world->weights.model_heads = HEADS;
    for (int layer = 0; layer < LAYERS; layer++) {
        world->w_k[layer] = world->w[layer][DIM];
        world->w_v[layer] = world->w[layer][3 * DIM];
    }
    go_through(f, world);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        assert_int_equal(rebuild(world, layer, world->sums[0]), KVF_OK);
        add_exactly(world, layer, layer > BASE_LAYER);
        assert_true(worst_kv(world, layer, world->exact, 1, 1) <= 1.0);
    }
    world_destroy(world);
}

/* A vector that is no number is kept as it is, and is gone with the next layer by itself at the
 * latest: sums stay numbers. */
static void what_is_no_number_does_not_stay(void **state)
{
    struct fixture *f = *state;
    struct world *world = world_create(f);

    f->options.profile = "xgcl3";
    fixture_open(f);
    world->x[5][7][100] = NAN;
    world->x[6][20][3] = INFINITY;
    go_through(f, world);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        assert_int_equal(rebuild(world, layer, world->sums[0]), KVF_OK);
        for (int t = 0; t < TOKENS; t++) {
            for (int i = 0; i < D_MODEL; i++) {
                double apart = (double)world->sums[t][i] - (double)world->encoded[layer][t][i];

                assert_true(fabs(apart) <= 1e-3);
            }
        }
    }
    /* the next layers have made up for it */
    assert_true(latent_size(world, LAYERS - 1, world->sums) < 0.25);
    world_destroy(world);
}

/* What the handle has counted. */
static uint64_t refused(struct fixture *f)
{
    struct kvf_stat stat = {.struct_bytes = sizeof(stat)};

    assert_int_equal(kvf_stat(f->client, &stat), KVF_OK);
    return stat.x_refused;
}

static void refuse_open(struct fixture *f, struct world *world, int status, const char *words)
{
    struct kvf_x *x = NULL;

    f->log[0] = '\0';
    assert_int_equal(kvf_x_open(f->client, &world->weights, &x), status);
    assert_null(x);
    if (strstr(f->log, words) == NULL) {
        fail_msg("'%s' is not in '%s'", words, f->log);
    }
}

static void factors_of_something_else_are_refused(void **state)
{
    struct fixture *f = *state;
    struct world *world = world_create(f);
    char other[KVF_TEST_PATH_BYTES];
    FILE *file;
    int byte;

    f->options.profile = "xgcl3";
    fixture_open(f);
    kvf_test_dir_path(&f->dir, "other.svd", other);
    world->weights.svd_file = NULL;
    refuse_open(f, world, KVF_ERR_REFUSED, "latents mean nothing without the factors");
    world->weights.svd_file = other;
    refuse_open(f, world, KVF_ERR_IO, "No such file");
    write_factors(world, other, 2);
    refuse_open(f, world, KVF_ERR_MISMATCH, "made of weights with another digest");
    world->m[0][3][3] = -world->m[0][3][3]; /* another run of the decomposition */
    write_factors(world, other, 1);
    refuse_open(f, world, KVF_ERR_MISMATCH, "whose factors_digest the client attached with");
    world->m[0][3][3] = -world->m[0][3][3];
    write_factors(world, other, 1);
    world->weights.dim_v = DIM / 2;
    world->weights.dim_k = DIM + DIM / 2;
    refuse_open(f, world, KVF_ERR_MISMATCH, "other heads of K and V");
    world->weights.dim_k = world->weights.dim_v = DIM;
    file = fopen(other, "r+b");
    assert_non_null(file);
    assert_int_equal(fseek(file, 4096, SEEK_SET), 0);
    byte = fgetc(file);
    assert_true(byte >= 0);
    assert_int_equal(fseek(file, 4096, SEEK_SET), 0);
    assert_int_equal(fputc(byte ^ 0x5a, file), byte ^ 0x5a);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(kvf_x_open(f->client, &world->weights, &world->handle), KVF_OK);
    assert_int_equal(rebuild(world, 0, world->sums[0]), KVF_ERR_CORRUPT);
    assert_non_null(strstr(f->log, "layer 0: its checksum is wrong"));
    assert_int_equal(rebuild(world, 1, world->sums[0]), KVF_OK);
    assert_int_equal(refused(f), 5);
    world_destroy(world);
}

static void what_is_missing_is_said(void **state)
{
    struct fixture *f = *state;
    struct world *world = world_create(f);
    struct kvf_x_put_options options = put_options(world);
    struct kvf_x_put *put = NULL;

    f->options.profile = "xgcl3";
    fixture_open(f);
    assert_int_equal(kvf_x_put_begin(f->client, &options, &put), KVF_ERR_REFUSED);
    assert_non_null(strstr(f->log, "give it in x"));
    assert_int_equal(refused(f), 1);
    assert_int_equal(kvf_x_open(f->client, &world->weights, &world->handle), KVF_OK);
    assert_int_equal(rebuild(world, 0, NULL), KVF_ERR_INVALID);
    assert_non_null(strstr(f->log, "give 256 fp32 numbers a token in sums"));
    options.x = world->handle;
    options.memory_bytes = TOKENS * D_MODEL * sizeof(float);
    assert_int_equal(kvf_x_put_begin(f->client, &options, &put), KVF_ERR_TOO_LARGE);
    assert_non_null(strstr(f->log, "allow more in memory_bytes"));
    assert_null(put);
    f->client = kvf_close(f->client);
    kvf_fake_daemon_stop(f->daemon);
    f->options.profile = "xgcl2";
    fixture_open(f);
    options.memory_bytes = 0;
    assert_int_equal(kvf_x_put_begin(f->client, &options, &put), KVF_ERR_MISMATCH);
    assert_non_null(strstr(f->log, "of another client, or of a profile"));
    assert_null(put);
    world_destroy(world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FIXTURE_TEST(differences_are_added_up_by_both_sides),
        FIXTURE_TEST(so_are_those_of_bf16),
        FIXTURE_TEST(latents_of_full_rank_are_x),
        FIXTURE_TEST(ranks_rebuild_their_heads),
        FIXTURE_TEST(what_is_no_number_does_not_stay),
        FIXTURE_TEST(factors_of_something_else_are_refused),
        FIXTURE_TEST(what_is_missing_is_said),
    };
    char text[KVF_BLAS_TEXT_BYTES];
    struct kvf_blas blas;

    if (kvf_blas_open(&blas, text) != KVF_OK) {
        printf("skipped: %s\n", text);
        return SKIPPED;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
