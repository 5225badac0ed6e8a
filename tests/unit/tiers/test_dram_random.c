/* SPDX-License-Identifier: Apache-2.0
 *
 * test_dram_random.c: random operations on the memory tier beside a table that says what must be
 * true, with a mark in each record's memory that nobody else may write over; and the promise that
 * nothing allocates after open.
 *
 * The allocator is wrapped by the linker: it counts what the tier's objects ask for.
 */
#include "tests/unit/tiers/dram_bed.h"

enum {
    N_STEPS = 60000,
    N_LIVE_MAX = 4096,
    N_TENANTS = 3,
};

static bool is_counting;
static unsigned n_allocations;

void *__real_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes)
{
    n_allocations += is_counting;
    return __real_malloc(bytes);
}

void *__real_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes)
{
    n_allocations += is_counting;
    return __real_calloc(count, bytes);
}

void *__real_realloc(void *memory, size_t bytes);
void *__wrap_realloc(void *memory, size_t bytes);
void *__wrap_realloc(void *memory, size_t bytes)
{
    n_allocations += is_counting;
    return __real_realloc(memory, bytes);
}

/* What is known of an entry of the bed, by its number modulo the table. */
struct shadow {
    uint32_t cookie;
    bool is_used;   /* the tier holds a slot for it, doomed ones included */
    bool is_doomed; /* the bed has forgotten it, we still pin it */
    bool is_ready;
    uint16_t tenant;
    uint32_t pins;
    uint64_t bytes;
    kvf_location location;
};

static struct shadow shadows[N_LIVE_MAX];
static struct kvf_random_seeded rng;
static uint32_t n_used;

static uint32_t below(uint32_t bound)
{
    return (uint32_t)(kvf_random_seeded_next(&rng) % bound);
}

static uint64_t mark_of(const struct shadow *shadow, uint64_t offset)
{
    return ((uint64_t)shadow->cookie << 32 | shadow->bytes) * 0x9e3779b97f4a7c15u + offset;
}

static uint64_t *mark_at(struct bed *bed, const struct shadow *shadow, int which)
{
    unsigned char *memory = bed->tier->ops->address(bed->tier, shadow->location);

    return (uint64_t *)(memory + (which == 0 ? 0 : (shadow->bytes - 8) / 8 * 8));
}

static void check_marks(struct bed *bed, const struct shadow *shadow)
{
    assert_int_equal(*mark_at(bed, shadow, 0), mark_of(shadow, 0));
    assert_int_equal(*mark_at(bed, shadow, 1), mark_of(shadow, 1));
}

static struct shadow *random_used(void)
{
    for (int i = 0; i < 64; i++) {
        struct shadow *shadow = &shadows[below(N_LIVE_MAX)];

        if (shadow->is_used) {
            return shadow;
        }
    }
    return NULL;
}

static void release(struct shadow *shadow)
{
    shadow->is_used = false;
    n_used--;
}

/* The host of this test: what the tier evicts must be intact, and is then forgotten. */
static void checking_evict(void *ctx, kvf_location location, kvf_cookie cookie)
{
    struct bed *bed = ctx;
    uint32_t set = bed->entries[cookie].set;

    assert_int_equal(bed->entries[cookie].location, location);
    for (uint32_t i = 0; i < N_LIVE_MAX; i++) {
        struct shadow *shadow = &shadows[i];

        if (!shadow->is_used || shadow->is_doomed ||
            (shadow->cookie != cookie && (set == 0 || bed->entries[shadow->cookie].set != set))) {
            continue;
        }
        check_marks(bed, shadow);
        bed_forget(bed, shadow->cookie);
        if (shadow->pins > 0) {
            shadow->is_doomed = true; /* another one of the set, which somebody reads */
        } else {
            release(shadow);
        }
    }
}

static void step_reserve(struct bed *bed)
{
    struct shadow *shadow = NULL;
    uint32_t cookie, piece_id;
    struct kvf_dram_piece piece;
    uint64_t offset;
    struct shadow made = {
        .is_used = true,
    };

    made.tenant = (uint16_t)below(N_TENANTS);
    made.bytes = 63 + bed_draw_bytes(&rng, 9);
    for (uint32_t i = 0; i < N_LIVE_MAX && shadow == NULL; i++) {
        shadow = shadows[i].is_used ? NULL : &shadows[i];
    }
    if (shadow == NULL || bed->n_entries == BED_ENTRIES_MAX ||
        bed_reserve(bed, made.tenant, made.bytes, &cookie) != KVF_OK) {
        return;
    }
    made.cookie = cookie;
    made.location = bed->entries[cookie].location;
    bed->entries[cookie].set = below(3) == 0 ? 1 + below(200) : 0;
    bed->entries[cookie].is_busy = below(10) == 0;
    kvf_dram_locate(bed->tier, made.location, &piece_id, &offset);
    assert_int_equal(kvf_dram_piece_get(bed->tier, piece_id, &piece), KVF_OK);
    assert_int_equal(piece.tenant, made.tenant);
    assert_true(offset + made.bytes <= piece.bytes);
    *shadow = made;
    n_used++;
    *mark_at(bed, shadow, 1) = mark_of(shadow, 1);
    *mark_at(bed, shadow, 0) = mark_of(shadow, 0);
}

static void step_on(struct bed *bed, struct shadow *shadow)
{
    switch (below(6)) {
    case 0:
        if (!shadow->is_doomed && !shadow->is_ready) {
            kvf_dram_publish(bed->tier, shadow->location, (uint8_t)below(5));
            shadow->is_ready = true;
        }
        break;
    case 1:
        if (shadow->is_ready && !shadow->is_doomed) {
            kvf_dram_touch(bed->tier, shadow->location);
        }
        break;
    case 2:
        if (!shadow->is_doomed && shadow->pins < 3 && below(4) == 0) {
            kvf_dram_pin(bed->tier, shadow->location);
            shadow->pins++;
        }
        break;
    case 3:
    case 4:
        if (shadow->pins > 0) {
            check_marks(bed, shadow);
            kvf_dram_unpin(bed->tier, shadow->location);
            shadow->pins--;
            if (shadow->pins == 0 && shadow->is_doomed) {
                release(shadow);
            }
        }
        break;
    default:
        if (!shadow->is_doomed && below(4) == 0) {
            check_marks(bed, shadow);
            bed_forget(bed, shadow->cookie);
            if (shadow->pins > 0) {
                shadow->is_doomed = true;
            } else {
                release(shadow);
            }
        }
        break;
    }
}

/* Everything that can be said of the whole. */
static void check_all(struct bed *bed)
{
    static struct kvf_dram_class classes[256];
    struct kvf_dram_info info = bed_info(bed);
    struct kvf_tier_stat stat = bed_stat(bed);
    uint64_t n_pinned = 0, n_doomed = 0, stored_bytes = 0, class_bytes = 0;
    uint32_t n_class_slots = 0, n_class_areas = 0;
    unsigned n_classes = kvf_dram_classes(bed->tier, classes, 256);

    for (uint32_t i = 0; i < N_LIVE_MAX; i++) {
        const struct shadow *shadow = &shadows[i];
        enum kvf_slot_state expected = shadow->is_doomed  ? KVF_SLOT_DOOMED
                                       : shadow->is_ready ? KVF_SLOT_READY
                                                          : KVF_SLOT_FILLING;

        if (!shadow->is_used) {
            continue;
        }
        assert_int_equal(kvf_dram_state(bed->tier, shadow->location), expected);
        assert_int_equal(kvf_dram_pins(bed->tier, shadow->location), shadow->pins);
        check_marks(bed, shadow);
        n_pinned += shadow->pins > 0;
        n_doomed += shadow->is_doomed;
        stored_bytes += shadow->bytes;
    }
    for (unsigned i = 0; i < n_classes; i++) {
        n_class_slots += classes[i].used;
        n_class_areas += classes[i].areas;
        class_bytes += classes[i].stored_bytes;
        assert_true(classes[i].used <= classes[i].slots && classes[i].used > 0);
        assert_true(i == 0 || classes[i - 1].slot_bytes < classes[i].slot_bytes);
    }
    assert_int_equal(info.pinned_slots, n_pinned);
    assert_int_equal(info.doomed_slots, n_doomed);
    assert_int_equal(stat.stored_blocks, n_used);
    assert_int_equal(stat.stored_bytes, stored_bytes);
    assert_int_equal(class_bytes, stored_bytes);
    assert_int_equal(n_class_slots, n_used);
    assert_int_equal(info.free_area_bytes + n_class_areas * info.area_bytes, info.populated_bytes);
    assert_true(stat.area_stored_bytes <= stat.area_bytes);
}

static void run_seed(uint64_t seed)
{
    struct bed *bed = bed_new(48, 1);

    print_message("seed %llu\n", (unsigned long long)seed);
    kvf_random_seeded_init(&rng, seed);
    memset(shadows, 0, sizeof(shadows));
    n_used = 0;
    bed->config.n_tenants = N_TENANTS;
    bed->config.host.evict = checking_evict;
    bed_open(bed);
    n_allocations = 0;
    is_counting = true;
    for (int i = 0; i < 5; i++) {
        kvf_dram_register_format(bed->tier, 4096 + kvf_random_seeded_next(&rng) % 500000);
    }
    for (int step = 0; step < N_STEPS; step++) {
        struct shadow *shadow = random_used();

        if (below(3) == 0 || shadow == NULL) {
            step_reserve(bed);
        } else {
            step_on(bed, shadow);
        }
        if (below(20) == 0) {
            bed->now_ns += below(100) * KVF_NS_PER_MS;
            bed->memory_allows = below(5) > 0;
            bed->tier->ops->poll(bed->tier, bed->now_ns);
            bed->config.work->ops->poll(bed->config.work);
        }
        if (step % 500 == 0) {
            check_all(bed);
        }
    }
    check_all(bed);
    is_counting = false;
    assert_int_equal(n_allocations, 0);
    print_message("  %llu evictions, %llu areas taken, %llu pieces reassigned, %llu busy\n",
                  (unsigned long long)bed_stat(bed).evictions,
                  (unsigned long long)bed_info(bed).areas_taken,
                  (unsigned long long)bed_info(bed).pieces_reassigned,
                  (unsigned long long)bed_stat(bed).busy);
    /* the run must have been where it is interesting */
    assert_true(bed_stat(bed).evictions > 500 && bed_info(bed).areas_taken > 10);
    bed_free(bed);
}

static void test_random_operations(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 4; seed++) {
        run_seed(seed);
    }
}

/* The counter counts, or the test above could not fail. */
static void test_the_counter(void **state)
{
    struct bed *bed;

    (void)state;
    n_allocations = 0;
    is_counting = true;
    bed = bed_new(4, 1);
    bed_open(bed);
    is_counting = false;
    assert_true(n_allocations >= 5);
    bed_free(bed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_operations),
        cmocka_unit_test(test_the_counter),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
