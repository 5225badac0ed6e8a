/* SPDX-License-Identifier: Apache-2.0
 *
 * test_dram_fill.c: how much of full areas is records: at least 90 % on real geometries.
 *
 * Sizes come from the codecs' own plans; those of "exact" vary, by what its exponents cost, and are
 * drawn around 12.1 bits a value. The arena is never populated: nothing is written to it.
 */
#include "tests/unit/tiers/dram_bed.h"

#include "codec/codec.h"

enum {
    CHUNK_TOKENS = 256,
    FILL_PERCENT_MIN = 90,
    GIB = 1 << 10, /* in MiB */
};

struct shape {
    const char *name;
    uint8_t kind;
    uint16_t n_layers, n_heads, dim_k, dim_v;
};

static const struct shape shapes[] = {
    {"Llama-3.1-8B", KVF_KIND_KV, 32, 8, 128, 128},
    {"Llama-3.1-70B, 8 ranks", KVF_KIND_KV, 80, 1, 128, 128},
    {"Qwen3-32B, 2 ranks", KVF_KIND_KV, 64, 4, 128, 128},
    {"SmolLM2-135M", KVF_KIND_KV, 30, 3, 64, 64},
    {"DeepSeek MLA", KVF_KIND_MLA, 61, 1, 512, 64},
};

enum {
    N_SHAPES = sizeof(shapes) / sizeof(shapes[0]),
    N_PROFILES = 3,
};

static const char *const profiles[N_PROFILES] = {"raw", "exact", "balanced"};

/* A queue that says that areas are populated and leaves them alone. */
struct lazy_queue {
    struct kvf_work_queue base;
    struct kvf_work *work;
};

static int lazy_submit(struct kvf_work_queue *queue, struct kvf_work *work)
{
    ((struct lazy_queue *)queue)->work = work;
    return KVF_OK;
}

static unsigned lazy_poll(struct kvf_work_queue *queue)
{
    struct lazy_queue *self = (struct lazy_queue *)queue;
    struct kvf_work *work = self->work;

    self->work = NULL;
    if (work != NULL) {
        work->done(work);
    }
    return work != NULL;
}

static void lazy_close(struct kvf_work_queue *queue)
{
    (void)queue;
}

static const struct kvf_work_ops lazy_ops = {lazy_submit, lazy_poll, lazy_close};

static struct bed *open_sparse(struct lazy_queue *queue, uint64_t arena_mib)
{
    struct bed *bed = bed_new(arena_mib, 128);

    bed->config.work->ops->close(bed->config.work);
    queue->base.ops = &lazy_ops;
    bed->config.work = &queue->base;
    bed->memory_allows = false; /* so that open itself populates nothing */
    bed_open(bed);
    bed->memory_allows = true;
    bed_settle(bed, 1);
    assert_int_equal(bed_info(bed).populated_bytes, arena_mib * BED_MIB);
    return bed;
}

struct format {
    struct kvf_codec_plan plan;
    bool is_fixed;
    uint64_t record_bytes; /* the size, or the middle of the sizes */
};

/* Sizes of one shape and profile, registered with the tier as attach does it. */
static void format_init(struct format *format, struct kvf_tier *tier, const struct shape *shape,
                        const char *profile)
{
    uint64_t sizes[KVF_CODEC_FIXED_SIZES_MAX];
    struct kvf_geometry geometry = {
        .struct_bytes = sizeof(geometry),
        .kind = shape->kind,
        .dtype = KVF_DTYPE_BF16,
        .rope_state = KVF_ROPE_POST,
        .n_layers = shape->n_layers,
        .n_heads = shape->n_heads,
        .dim_k = shape->dim_k,
        .dim_v = shape->dim_v,
        .chunk_tokens = CHUNK_TOKENS,
    };
    uint32_t n_sizes;

    assert_int_equal(kvf_codec_plan_init(&format->plan, &geometry, profile), KVF_OK);
    n_sizes = kvf_codec_plan_fixed_sizes(&format->plan, sizes);
    format->is_fixed = n_sizes > 0;
    for (uint32_t i = 0; i < n_sizes; i++) {
        assert_int_equal(kvf_dram_register_format(tier, sizes[i]), KVF_OK);
    }
    if (format->is_fixed) {
        format->record_bytes = sizes[0];
    } else {
        uint64_t values = (uint64_t)shape->n_layers * shape->n_heads *
                          (shape->dim_k + shape->dim_v);

        format->record_bytes = KVF_RECORD_PAGE_BYTES + values * CHUNK_TOKENS * 121 / (10 * 8);
    }
}

/* A size of this format, within spread_percent of the middle if it varies. */
static uint64_t draw_bytes(const struct format *format, uint32_t spread_percent,
                           struct kvf_random_seeded *random)
{
    uint64_t spread_bytes = format->record_bytes * spread_percent / 100;

    if (format->is_fixed || spread_bytes == 0) {
        return format->record_bytes;
    }
    return format->record_bytes - spread_bytes +
           kvf_random_seeded_next(random) % (2 * spread_bytes);
}

/* Put until there is no room. Returns the fill in 1/1000. */
static uint32_t fill_arena(struct bed *bed, const struct format *formats, uint32_t n_formats,
                           uint32_t spread_percent, uint32_t *full_mib_out)
{
    struct kvf_random_seeded random;
    struct kvf_tier_stat stat;
    uint32_t cookie, n_busy = 0;

    kvf_random_seeded_init(&random, 1);
    while (n_busy < 200) {
        const struct format *format = &formats[kvf_random_seeded_next(&random) % n_formats];

        if (bed_reserve(bed, 0, draw_bytes(format, spread_percent, &random), &cookie) == KVF_OK) {
            kvf_dram_publish(bed->tier, bed->entries[cookie].location, 0);
            bed->entries[cookie].is_busy = true;
        } else {
            n_busy++;
        }
    }
    stat = bed_stat(bed);
    assert_true(stat.area_bytes > 0);
    *full_mib_out = (uint32_t)(stat.area_bytes >> 20);
    return (uint32_t)(stat.area_stored_bytes * 1000 / stat.area_bytes);
}

static void fill_table(uint64_t arena_mib, uint32_t spread_percent)
{
    struct lazy_queue queue = {0};

    print_message("arena %u GiB, sizes of exact within %u %%\n", (unsigned)(arena_mib / GIB),
                  spread_percent);
    print_message("  %-24s %-10s %10s %8s %10s\n", "", "profile", "KiB", "fill", "full MiB");
    for (unsigned s = 0; s < N_SHAPES; s++) {
        for (unsigned p = 0; p < N_PROFILES; p++) {
            struct bed *bed = open_sparse(&queue, arena_mib);
            struct format format;
            uint32_t fill, full_mib;

            format_init(&format, bed->tier, &shapes[s], profiles[p]);
            fill = fill_arena(bed, &format, 1, spread_percent, &full_mib);
            print_message("  %-24s %-10s %10u %7u.%u%% %8u\n", shapes[s].name, profiles[p],
                          (unsigned)(format.record_bytes >> 10), fill / 10, fill % 10, full_mib);
            assert_int_equal(format.is_fixed, strcmp(profiles[p], "exact") != 0);
            assert_true(fill >= FILL_PERCENT_MIN * 10);
            /* and most of the arena is full areas: nothing is kept apart unused */
            assert_true(full_mib * 100 >= arena_mib * 80);
            bed_free(bed);
        }
    }
}

static void test_fill_large_arena(void **state)
{
    (void)state;
    fill_table(8 * GIB, 3);
}

static void test_fill_default_arena(void **state)
{
    (void)state;
    fill_table(1 * GIB, 3);
}

/* Sizes that do not vary sit where they sit between two classes: the hardest case of exact. */
static void test_fill_without_spread(void **state)
{
    (void)state;
    fill_table(8 * GIB, 0);
}

static void test_fill_mixed(void **state)
{
    struct lazy_queue queue = {0};
    struct bed *bed = open_sparse(&queue, 32 * GIB);
    static struct format formats[N_SHAPES * N_PROFILES];
    uint32_t fill, full_mib;

    (void)state;
    for (unsigned i = 0; i < N_SHAPES * N_PROFILES; i++) {
        format_init(&formats[i], bed->tier, &shapes[i / N_PROFILES], profiles[i % N_PROFILES]);
    }
    fill = fill_arena(bed, formats, N_SHAPES * N_PROFILES, 3, &full_mib);
    print_message("all of them together in 32 GiB: %u.%u%% of %u MiB\n", fill / 10, fill % 10,
                  full_mib);
    assert_true(fill >= FILL_PERCENT_MIN * 10);
    bed_free(bed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fill_large_arena),
        cmocka_unit_test(test_fill_default_arena),
        cmocka_unit_test(test_fill_without_spread),
        cmocka_unit_test(test_fill_mixed),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
