/* SPDX-License-Identifier: Apache-2.0
 *
 * clip_ratios.c: what share of a vector's range saw should keep, measured on KV of real models.
 *
 *   clip_ratios FOLDER...
 *
 * A folder is one of tests/data/kv, or another that tests/data/capture wrote. All of one run have
 * vectors of one length. For each width of codes the program prints the squared error, over the
 * power (of K about its channel means), of a mean head: for each ratio if all vectors have it, if
 * each vector has the best of the ratios that codec_saw.h names, and if it has the best of the best
 * three and of all.
 */
#include "codec/codec.h"
#include "tests/support/kv_data.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    PERCENT_FIRST = 40,
    PERCENT_STEP = 2,
    RATIOS = 31, /* .40 .. 1.00 */
    TOKENS_MAX = KVF_CHUNK_TOKENS_MAX,
    SETS_MAX = 3,
};

/* Errors of all vectors so far, each over the power of its head. */
struct errors {
    uint32_t n;
    float (*of)[RATIOS];
    float (*sets)[SETS_MAX];
};

struct tensor_pair {
    struct kvf_test_kv tensors[2]; /* K, V */
    uint8_t *decoded[2];
    struct kvf_codec_plan plan;
    void *layers[2][2][KVF_LAYERS_MAX]; /* [original, decoded][K, V] */
    struct kvf_kv_view views[2];
    uint8_t *record;
    void *workspace;
};

static void die(const char *what)
{
    (void)fprintf(stderr, "clip_ratios: %s\n", what);
    exit(EXIT_FAILURE);
}

static void *take(size_t bytes)
{
    void *memory = aligned_alloc(KVF_CODEC_WORKSPACE_ALIGN,
                                 (bytes / KVF_CODEC_WORKSPACE_ALIGN + 1) *
                                     KVF_CODEC_WORKSPACE_ALIGN);
    if (memory == NULL) {
        die("no memory");
    }
    return memory;
}

static void pair_load(struct tensor_pair *pair, const char *folder)
{
    static const char *const names[2] = {"k_post", "v"};
    memset(pair, 0, sizeof(*pair));
    for (int kind = 0; kind < 2; kind++) {
        if (kvf_test_kv_find(folder, names[kind], 0, &pair->tensors[kind]) != KVF_OK ||
            kvf_test_kv_load(folder, &pair->tensors[kind]) != KVF_OK ||
            pair->tensors[kind].n_tokens > TOKENS_MAX) {
            die(folder);
        }
        pair->decoded[kind] = take(pair->tensors[kind].bytes);
    }
    for (int side = 0; side < 2; side++) {
        struct kvf_kv_view *view = &pair->views[side];
        struct kvf_tensor_view *views[2] = {&view->k, &view->v};
        view->struct_bytes = sizeof(*view);
        view->tokens_a_page = pair->tensors[0].n_tokens;
        for (int kind = 0; kind < 2; kind++) {
            const struct kvf_test_kv *kv = &pair->tensors[kind];
            uint8_t *base = side == 0 ? kv->data : pair->decoded[kind];
            for (uint32_t layer = 0; layer < kv->n_layers; layer++) {
                pair->layers[side][kind][layer] = base + layer * kvf_test_kv_layer_bytes(kv);
            }
            *views[kind] = (struct kvf_tensor_view){
                .layers = pair->layers[side][kind],
                .page_stride_bytes = kvf_test_kv_head_bytes(kv),
                .token_stride_bytes = kvf_test_kv_head_bytes(kv) / kv->n_tokens,
                .head_stride_bytes = kvf_test_kv_head_bytes(kv),
            };
        }
    }
}

static void pair_free(struct tensor_pair *pair)
{
    for (int kind = 0; kind < 2; kind++) {
        kvf_test_kv_free(&pair->tensors[kind]);
        free(pair->decoded[kind]);
    }
}

static void plan_open(struct tensor_pair *pair, const char *profile)
{
    const struct kvf_test_kv *k = &pair->tensors[0];
    struct kvf_geometry geometry = {
        .struct_bytes = sizeof(geometry),
        .kind = KVF_KIND_KV,
        .dtype = KVF_DTYPE_BF16,
        .rope_state = KVF_ROPE_POST,
        .n_layers = (uint16_t)k->n_layers,
        .n_heads = (uint16_t)k->n_heads,
        .dim_k = (uint16_t)k->dim,
        .dim_v = (uint16_t)pair->tensors[1].dim,
        .chunk_tokens = (uint16_t)k->n_tokens,
    };
    if (kvf_codec_plan_init(&pair->plan, &geometry, profile) != KVF_OK) {
        die(profile);
    }
    pair->record = take(pair->plan.record_bytes_max);
    pair->workspace = take(pair->plan.workspace_bytes);
}

static void plan_close(struct tensor_pair *pair)
{
    free(pair->record);
    free(pair->workspace);
}

static void round_trip(struct tensor_pair *pair)
{
    size_t bytes = 0;
    struct kvf_record_page *page = (struct kvf_record_page *)(void *)pair->record;
    int status = kvf_block_encode(&pair->plan, &pair->views[0], 0, pair->tensors[0].n_tokens, page,
                                  pair->record + KVF_BLOCK_PAGE_BYTES,
                                  pair->plan.record_bytes_max - KVF_BLOCK_PAGE_BYTES,
                                  pair->workspace, &bytes);
    if (status == KVF_OK) {
        status = kvf_block_decode(&pair->plan, pair->record, KVF_BLOCK_PAGE_BYTES + bytes, 0, 0, 0,
                                  0, &pair->views[1], pair->workspace);
    }
    if (status != KVF_OK) {
        die(kvf_status_text(status));
    }
}

static float value_of(const uint8_t *data, size_t i)
{
    uint32_t bits = (uint32_t)data[2 * i + 1] << 24 | (uint32_t)data[2 * i] << 16;
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* Power of a head; of K about its channel means. */
static double power_of(const uint8_t *data, uint32_t n_tokens, uint32_t dim, bool centred)
{
    double power = 0.0;
    for (uint32_t i = 0; i < dim; i++) {
        double sum = 0.0;
        double squares = 0.0;
        for (uint32_t t = 0; t < n_tokens; t++) {
            double x = (double)value_of(data, (size_t)t * dim + i);
            sum += x;
            squares += x * x;
        }
        power += squares - (centred ? sum * sum / n_tokens : 0.0);
    }
    return power;
}

/* Errors of the vectors as they are decoded now, to column at, as shares of their head's power. */
static void collect(const struct tensor_pair *pair, float *first, size_t step)
{
    for (int kind = 0; kind < 2; kind++) {
        const struct kvf_test_kv *kv = &pair->tensors[kind];
        size_t head_bytes = kvf_test_kv_head_bytes(kv);
        for (uint32_t h = 0; h < kv->n_layers * kv->n_heads; h++) {
            const uint8_t *a = kv->data + h * head_bytes;
            const uint8_t *b = pair->decoded[kind] + h * head_bytes;
            double power = power_of(a, kv->n_tokens, kv->dim, kind == 0);
            for (uint32_t t = 0; t < kv->n_tokens; t++) {
                double error = 0.0;
                for (uint32_t i = 0; i < kv->dim; i++) {
                    double e = (double)value_of(a, (size_t)t * kv->dim + i) -
                               (double)value_of(b, (size_t)t * kv->dim + i);
                    error += e * e;
                }
                *first = (float)(error * kv->n_tokens / power);
                first += step;
            }
        }
    }
}

static uint32_t n_vectors_of(const struct tensor_pair *pair)
{
    uint32_t n = 0;
    for (int kind = 0; kind < 2; kind++) {
        const struct kvf_test_kv *kv = &pair->tensors[kind];
        n += kv->n_layers * kv->n_heads * kv->n_tokens;
    }
    return n;
}

static double mean_of_best(const struct errors *errors, const int *ratios, int n)
{
    double sum = 0.0;
    for (uint32_t v = 0; v < errors->n; v++) {
        float best = errors->of[v][ratios[0]];
        for (int i = 1; i < n; i++) {
            best = fminf(best, errors->of[v][ratios[i]]);
        }
        sum += (double)best;
    }
    return sum / errors->n;
}

static void print_best_three(const struct errors *errors)
{
    double least = INFINITY;
    int best[3] = {0};
    for (int a = 0; a < RATIOS; a++) {
        for (int b = 0; b < a; b++) {
            for (int c = 0; c < b; c++) {
                double mean = mean_of_best(errors, (const int[]){a, b, c}, 3);
                if (mean < least) {
                    least = mean;
                    memcpy(best, (const int[]){a, b, c}, sizeof(best));
                }
            }
        }
    }
    printf("  best three: .%02d .%02d .%02d (.100 is 1): %.5f\n",
           PERCENT_FIRST + best[0] * PERCENT_STEP, PERCENT_FIRST + best[1] * PERCENT_STEP,
           PERCENT_FIRST + best[2] * PERCENT_STEP, least);
}

static void print_errors(const struct errors *errors, const char *const *sets)
{
    int all[RATIOS];
    for (int r = 0; r < RATIOS; r++) {
        all[r] = r;
        printf("%s .%02d %.5f", r % 6 == 0 ? "\n  ratio" : ",", PERCENT_FIRST + r * PERCENT_STEP,
               mean_of_best(errors, &r, 1));
    }
    printf("\n");
    for (int set = 0; set < SETS_MAX && sets[set] != NULL; set++) {
        double sum = 0.0;
        for (uint32_t v = 0; v < errors->n; v++) {
            sum += (double)errors->sets[v][set];
        }
        printf("  profile %s: %.5f\n", sets[set], sum / errors->n);
    }
    print_best_three(errors);
    printf("  best of all: %.5f\n", mean_of_best(errors, all, RATIOS));
}

/* Profiles of one width: the first one takes all the ratios in turn. */
static void measure(char **folders, int n_folders, const char *const profiles[SETS_MAX])
{
    struct errors errors = {.n = 0};
    uint32_t dim = 0;
    for (int f = 0; f < n_folders; f++) {
        struct tensor_pair pair;
        pair_load(&pair, folders[f]);
        dim = pair.tensors[0].dim;
        uint32_t n = n_vectors_of(&pair);
        errors.of = realloc(errors.of, (errors.n + n) * sizeof(*errors.of));
        errors.sets = realloc(errors.sets, (errors.n + n) * sizeof(*errors.sets));
        if (errors.of == NULL || errors.sets == NULL) {
            die("no memory");
        }
        for (int p = 0; p < SETS_MAX && profiles[p] != NULL; p++) {
            plan_open(&pair, profiles[p]);
            round_trip(&pair);
            collect(&pair, &errors.sets[errors.n][p], SETS_MAX);
            plan_close(&pair);
        }
        plan_open(&pair, profiles[0]);
        for (int r = 0; r < RATIOS; r++) {
            uint16_t ratio = (uint16_t)((PERCENT_FIRST + r * PERCENT_STEP) * KVF_BLOCK_CLIP_ONE /
                                        100);
            pair.plan.kinds[0].k.descriptor.clip_q15 = ratio;
            pair.plan.kinds[0].v.descriptor.clip_q15 = ratio;
            round_trip(&pair);
            collect(&pair, &errors.of[errors.n][r], RATIOS);
        }
        plan_close(&pair);
        errors.n += n;
        pair_free(&pair);
    }
    printf("%s, %u elements, %u vectors:", profiles[0], dim, errors.n);
    print_errors(&errors, profiles);
    free(errors.of);
    free(errors.sets);
}

int main(int argc, char **argv)
{
    static const char *const profiles[][SETS_MAX] = {
        {"balanced", "saw4-search9", NULL},
        {"saw3", "saw3-search", "saw3-search9"},
        {"saw2", "saw2-search", "saw2-search9"},
    };
    if (argc < 2) {
        die("usage: clip_ratios FOLDER...");
    }
    for (size_t i = 0; i < sizeof(profiles) / sizeof(profiles[0]); i++) {
        measure(argv + 1, argc - 1, profiles[i]);
    }
    return EXIT_SUCCESS;
}
