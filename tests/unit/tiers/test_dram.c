/* SPDX-License-Identifier: Apache-2.0
 *
 * test_dram.c: the memory tier apart from eviction: plan, classes, places, states, seals,
 * population.
 *
 * fallocate, madvise and memfd_create are wrapped by the linker, so that they can fail on demand.
 */
#include "tests/support/support.h"
#include "tests/unit/tiers/dram_bed.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MADV_POPULATE_WRITE_NUMBER 23

static unsigned fail_fallocates, fail_memfds;
static bool is_old_kernel, has_no_huge_pages;
static unsigned n_populates;

int __real_fallocate(int fd, int mode, off_t offset, off_t bytes);
int __wrap_fallocate(int fd, int mode, off_t offset, off_t bytes);
int __wrap_fallocate(int fd, int mode, off_t offset, off_t bytes)
{
    if (fail_fallocates > 0) {
        fail_fallocates--;
        errno = ENOMEM;
        return -1;
    }
    return __real_fallocate(fd, mode, offset, bytes);
}

int __real_madvise(void *memory, size_t bytes, int advice);
int __wrap_madvise(void *memory, size_t bytes, int advice);
int __wrap_madvise(void *memory, size_t bytes, int advice)
{
    if (advice == MADV_POPULATE_WRITE_NUMBER) {
        n_populates++;
        if (is_old_kernel) {
            errno = EINVAL;
            return -1;
        }
    }
    return __real_madvise(memory, bytes, advice);
}

int __real_memfd_create(const char *name, unsigned int flags);
int __wrap_memfd_create(const char *name, unsigned int flags);
int __wrap_memfd_create(const char *name, unsigned int flags)
{
    if (fail_memfds > 0) {
        fail_memfds--;
        errno = EMFILE;
        return -1;
    }
    if (has_no_huge_pages && (flags & MFD_HUGETLB) != 0) {
        errno = ENOSYS;
        return -1;
    }
    return __real_memfd_create(name, flags);
}

static int reset(void **state)
{
    (void)state;
    fail_fallocates = 0;
    fail_memfds = 0;
    is_old_kernel = false;
    has_no_huge_pages = false;
    n_populates = 0;
    return 0;
}

/* ---- plan ------------------------------------------------------------------------------------ */

static void test_plan(void **state)
{
    struct kvf_dram_config config;
    struct bed *bed = bed_new(40, 128);
    struct kvf_dram_info info;

    (void)state;
    /* a small arena gets areas small enough that there are 32, and none is lost */
    bed_open(bed);
    info = bed_info(bed);
    assert_int_equal(info.area_bytes, BED_MIB);
    assert_int_equal(info.arena_bytes, 40 * BED_MIB);
    assert_int_equal(info.pieces, 1);
    assert_int_equal(info.metadata_bytes, kvf_dram_metadata_bytes(&bed->config));
    bed_free(bed);

    /* metadata is 32 bytes for 8 KiB and little else */
    kvf_dram_config_init(&config);
    config.arena_bytes = 100ull << 30;
    assert_true(kvf_dram_metadata_bytes(&config) > (100ull << 30) / 8192 * 32);
    assert_true(kvf_dram_metadata_bytes(&config) < (100ull << 30) / 8192 * 32 + BED_MIB);

    /* 2.5 GiB in pieces of at most 1 GiB: three of nearly the same size */
    bed = bed_new(2560, 128);
    bed->memory_allows = false;
    bed_open(bed);
    info = bed_info(bed);
    assert_int_equal(info.pieces, 3);
    assert_true(info.piece_bytes >= 832 * BED_MIB && info.piece_bytes <= 896 * BED_MIB);
    bed_free(bed);
}

static void refused(struct kvf_dram_config *config, const char *word)
{
    struct kvf_tier *tier = NULL;
    char why[KVF_ERROR_TEXT_BYTES] = "";

    assert_int_equal(kvf_dram_open(config, &tier, why, sizeof(why)), KVF_ERR_INVALID);
    assert_null(tier);
    assert_non_null(strstr(why, word));
    assert_int_equal(kvf_dram_metadata_bytes(config), 0);
}

static void test_plans_that_cannot_be(void **state)
{
    struct bed *bed = bed_new(16, 1);

    (void)state;
    bed->config.n_tenants = 0;
    refused(&bed->config, "tenants");
    bed->config.n_tenants = KVF_DRAM_TENANTS_MAX + 1;
    refused(&bed->config, "tenants");
    bed->config.n_tenants = 9; /* less than two areas a tenant */
    refused(&bed->config, "each tenant needs two areas");
    bed->config.n_tenants = 1;
    bed->config.arena_bytes = BED_MIB - 1;
    refused(&bed->config, "at least 1 MiB");
    bed->config.arena_bytes = 16 * BED_MIB;
    bed->config.area_bytes = BED_MIB / 2;
    refused(&bed->config, "at least 1 MiB");
    bed->config.area_bytes = BED_MIB;
    bed->config.piece_bytes = BED_MIB / 2;
    refused(&bed->config, "at least 1 MiB");
    bed->config.arena_bytes = 64ull << 40;
    bed->config.area_bytes = bed->config.piece_bytes = 1ull << 30;
    refused(&bed->config, "too large");
    bed_free(bed);
}

/* ---- classes and places ---------------------------------------------------------------------- */

static uint64_t slot_bytes_of(struct bed *bed, uint64_t record_bytes, bool *is_exact_out)
{
    struct kvf_dram_class class = {0};
    uint32_t cookie = bed_put(bed, 0, record_bytes);

    assert_int_equal(kvf_dram_classes(bed->tier, &class, 1), 1);
    assert_int_equal(class.used, 1);
    assert_int_equal(class.stored_bytes, record_bytes);
    *is_exact_out = class.is_exact;
    bed_forget(bed, cookie);
    return class.slot_bytes;
}

static void test_octave_classes(void **state)
{
    struct bed *bed = bed_new(128, 2);
    uint64_t seed = 11;
    struct kvf_random_seeded random;
    bool is_exact;

    (void)state;
    bed_open(bed);
    assert_int_equal(slot_bytes_of(bed, 1, &is_exact), 8192);
    assert_int_equal(slot_bytes_of(bed, 8192, &is_exact), 8192);
    assert_int_equal(slot_bytes_of(bed, 8193, &is_exact), 12288);
    assert_int_equal(slot_bytes_of(bed, 65536, &is_exact), 65536);
    assert_int_equal(slot_bytes_of(bed, 65537, &is_exact), 65536 / 8 * 9);
    assert_int_equal(slot_bytes_of(bed, 64 * BED_MIB, &is_exact), 64 * BED_MIB);
    assert_int_equal(slot_bytes_of(bed, 64 * BED_MIB + 1, &is_exact), 64 * BED_MIB + 4096);
    print_message("seed %llu\n", (unsigned long long)seed);
    kvf_random_seeded_init(&random, seed);
    for (int i = 0; i < 2000; i++) {
        uint64_t bytes = bed_draw_bytes(&random, 14);
        uint64_t slot_bytes = slot_bytes_of(bed, bytes, &is_exact);

        assert_false(is_exact);
        assert_true(slot_bytes >= bytes && slot_bytes % 4096 == 0);
        /* an eighth of an octave, or what whole pages make of it */
        assert_true(slot_bytes - bytes < slot_bytes / 9 + 4096 || slot_bytes == 8192);
    }
    bed_free(bed);
}

static void test_exact_classes(void **state)
{
    struct bed *bed = bed_new(32, 1);
    uint32_t n_formats = 0;
    bool is_exact;
    int status;

    (void)state;
    bed_open(bed);
    assert_int_equal(slot_bytes_of(bed, 1100000, &is_exact), 1179648);
    assert_false(is_exact);
    assert_int_equal(kvf_dram_register_format(bed->tier, 1100000), KVF_OK);
    assert_int_equal(kvf_dram_register_format(bed->tier, 1100000), KVF_OK);
    assert_int_equal(slot_bytes_of(bed, 1100000, &is_exact), 1101824);
    assert_true(is_exact);
    /* others that fit are welcome, larger ones go on */
    assert_int_equal(slot_bytes_of(bed, 1090000, &is_exact), 1101824);
    assert_int_equal(slot_bytes_of(bed, 1101825, &is_exact), 1179648);
    assert_false(is_exact);
    assert_int_equal(kvf_dram_register_format(bed->tier, 32 * BED_MIB + 1), KVF_ERR_TOO_LARGE);
    assert_int_equal(kvf_dram_register_format(bed->tier, 65 * BED_MIB), KVF_ERR_TOO_LARGE);
    /* the table is bounded; what has a class already stays fine */
    do {
        status = kvf_dram_register_format(bed->tier, 2100000 + n_formats * 4096);
        n_formats++;
    } while (status == KVF_OK && n_formats < 1000);
    assert_int_equal(status, KVF_ERR_BUSY);
    assert_true(n_formats >= KVF_DRAM_FORMATS_MAX);
    assert_int_equal(kvf_dram_register_format(bed->tier, 1100000), KVF_OK);
    bed_free(bed);
}

static void test_too_large(void **state)
{
    struct bed *bed = bed_new(16, 1);
    uint64_t max_bytes;
    uint32_t cookie;

    (void)state;
    bed_open(bed);
    max_bytes = kvf_dram_record_bytes_max(bed->tier);
    assert_int_equal(max_bytes, 16 * BED_MIB);
    assert_true(kvf_dram_fits(bed->tier, max_bytes));
    assert_false(kvf_dram_fits(bed->tier, max_bytes + 1));
    assert_false(kvf_dram_fits(bed->tier, 0));
    assert_int_equal(bed_reserve(bed, 0, max_bytes + 1, &cookie), KVF_ERR_TOO_LARGE);
    assert_int_equal(bed_reserve(bed, 0, max_bytes, &cookie), KVF_OK);
    bed_free(bed);
}

struct place {
    uint64_t begin, end;
};

static int place_compare(const void *a, const void *b)
{
    const struct place *x = a, *y = b;

    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

/* Fill an arena of several pieces with records of all sizes: nobody overlaps, nobody crosses. */
static void test_places(void **state)
{
    struct bed *bed = bed_new(96, 1);
    static struct place places[BED_ENTRIES_MAX];
    struct kvf_random_seeded random;
    uint32_t n_places = 0;
    unsigned n_busy = 0;

    (void)state;
    bed->config.piece_bytes = 12 * BED_MIB;
    bed_open(bed);
    assert_int_equal(bed_info(bed).pieces, 8);
    kvf_random_seeded_init(&random, 5);
    while (n_busy < 100) {
        uint64_t bytes = bed_draw_bytes(&random, 11);
        uint32_t cookie, piece_id;
        struct kvf_dram_piece piece;
        kvf_location location;
        unsigned char *memory;
        uint64_t offset;

        if (bed_reserve(bed, 0, bytes, &cookie) != KVF_OK) {
            n_busy++;
            continue;
        }
        location = bed->entries[cookie].location;
        memory = bed->tier->ops->address(bed->tier, location);
        assert_int_equal((uintptr_t)memory % 4096, 0);
        kvf_dram_locate(bed->tier, location, &piece_id, &offset);
        assert_int_equal(kvf_dram_piece_get(bed->tier, piece_id, &piece), KVF_OK);
        assert_true(offset % 4096 == 0 && offset + bytes <= piece.bytes);
        memory[0] = (unsigned char)cookie;
        memory[bytes - 1] = (unsigned char)(cookie >> 8);
        places[n_places].begin = (uintptr_t)memory;
        places[n_places++].end = (uintptr_t)memory + bytes;
    }
    assert_true(n_places > 100);
    qsort(places, n_places, sizeof(places[0]), place_compare);
    for (uint32_t i = 1; i < n_places; i++) {
        assert_true(places[i - 1].end <= places[i].begin);
    }
    bed_free(bed);
}

/* ---- states ---------------------------------------------------------------------------------- */

static void test_states(void **state)
{
    struct bed *bed = bed_new(1, 1);
    kvf_location location, again;
    uint32_t cookie;
    struct kvf_tier_stat stat;

    (void)state;
    bed_open(bed);
    assert_int_equal(bed_reserve(bed, 0, 500000, &cookie), KVF_OK);
    location = bed->entries[cookie].location;
    assert_int_equal(kvf_dram_pins(bed->tier, location), 0);
    kvf_dram_publish(bed->tier, location, 0);
    assert_int_equal(kvf_dram_state(bed->tier, location), KVF_SLOT_READY);
    stat = bed_stat(bed);
    assert_int_equal(stat.stored_bytes, 500000);
    assert_int_equal(stat.stored_blocks, 1);
    assert_int_equal(stat.area_bytes, 0); /* the area has room for one more */
    bed_forget(bed, cookie);
    assert_int_equal(kvf_dram_state(bed->tier, location), KVF_SLOT_FREE);
    assert_int_equal(bed_stat(bed).stored_bytes, 0);
    assert_int_equal(bed_info(bed).free_area_bytes, BED_MIB);

    /* the same memory under another name */
    assert_int_equal(bed_reserve(bed, 0, 500000, &cookie), KVF_OK);
    again = bed->entries[cookie].location;
    assert_true(again != location);
    assert_int_equal((uint32_t)again, (uint32_t)location);
    assert_int_equal(kvf_dram_state(bed->tier, location), KVF_SLOT_FREE);
    assert_int_equal(kvf_dram_state(bed->tier, again), KVF_SLOT_FILLING);
    bed_forget(bed, cookie); /* a put that failed */
    assert_int_equal(kvf_dram_state(bed->tier, again), KVF_SLOT_FREE);
    assert_int_equal(kvf_dram_state(bed->tier, KVF_LOCATION_NONE), KVF_SLOT_FREE);
    bed_free(bed);
}

static void test_doomed_until_unpinned(void **state)
{
    struct bed *bed = bed_new(1, 1);
    kvf_location location;
    uint32_t cookie, other;
    unsigned char *memory;

    (void)state;
    bed_open(bed);
    cookie = bed_put(bed, 0, 900000); /* the arena holds one of these */
    location = bed->entries[cookie].location;
    memory = bed->tier->ops->address(bed->tier, location);
    memset(memory, 0x5a, 900000);
    kvf_dram_pin(bed->tier, location);
    kvf_dram_pin(bed->tier, location);
    assert_int_equal(bed_reserve(bed, 0, 900000, &other), KVF_ERR_BUSY);
    bed_forget(bed, cookie);
    assert_int_equal(kvf_dram_state(bed->tier, location), KVF_SLOT_DOOMED);
    assert_int_equal(bed_info(bed).doomed_slots, 1);
    assert_int_equal(bed_reserve(bed, 0, 900000, &other), KVF_ERR_BUSY);
    assert_int_equal(bed_reserve(bed, 0, 9000, &other), KVF_ERR_BUSY);
    kvf_dram_unpin(bed->tier, location);
    assert_int_equal(bed_reserve(bed, 0, 900000, &other), KVF_ERR_BUSY);
    assert_int_equal(memory[899999], 0x5a);
    kvf_dram_unpin(bed->tier, location);
    assert_int_equal(kvf_dram_state(bed->tier, location), KVF_SLOT_FREE);
    assert_int_equal(bed_info(bed).pinned_slots, 0);
    assert_int_equal(bed_info(bed).doomed_slots, 0);
    assert_int_equal(bed_reserve(bed, 0, 900000, &other), KVF_OK);

    /* a slot that is being filled by somebody is kept for him, too */
    location = bed->entries[other].location;
    kvf_dram_pin(bed->tier, location);
    bed_forget(bed, other);
    assert_int_equal(kvf_dram_state(bed->tier, location), KVF_SLOT_DOOMED);
    kvf_dram_unpin(bed->tier, location);
    assert_int_equal(kvf_dram_state(bed->tier, location), KVF_SLOT_FREE);
    bed_free(bed);
}

static void test_fill_figures(void **state)
{
    struct bed *bed = bed_new(2, 1);
    struct kvf_dram_class classes[2];
    struct kvf_tier_stat stat;

    (void)state;
    bed_open(bed);
    bed_put(bed, 0, 500000);
    bed_put(bed, 0, 510000); /* both in slots of 512 KiB: this area is full */
    bed_put(bed, 0, 9000);
    stat = bed_stat(bed);
    assert_int_equal(stat.area_bytes, BED_MIB);
    assert_int_equal(stat.area_stored_bytes, 1010000);
    assert_int_equal(stat.capacity_bytes, 2 * BED_MIB);
    assert_int_equal(stat.stored_blocks, 3);
    assert_int_equal(kvf_dram_classes(bed->tier, classes, 2), 2);
    assert_int_equal(classes[0].slot_bytes, 12288);
    assert_int_equal(classes[0].slots, BED_MIB / 12288);
    assert_int_equal(classes[0].used, 1);
    assert_int_equal(classes[1].slot_bytes, 524288);
    assert_int_equal(classes[1].used, 2);
    assert_int_equal(kvf_dram_classes(bed->tier, NULL, 0), 2);
    bed_free(bed);
}

/* ---- seals ----------------------------------------------------------------------------------- */

static void assert_no_writable_map(int fd, uint64_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    assert_ptr_equal(memory, MAP_FAILED);
    assert_int_equal(errno, EPERM);
}

static void test_seals(void **state)
{
    struct bed *bed = bed_new(4, 1);
    struct kvf_dram_piece piece;
    uint32_t piece_id, cookie;
    uint64_t offset;
    unsigned char *memory, *seen;
    char path[64];
    int seals, fd;

    (void)state;
    bed_open(bed);
    cookie = bed_put(bed, 0, 20000);
    memory = bed->tier->ops->address(bed->tier, bed->entries[cookie].location);
    kvf_dram_locate(bed->tier, bed->entries[cookie].location, &piece_id, &offset);
    assert_int_equal(kvf_dram_piece_get(bed->tier, piece_id, &piece), KVF_OK);
    assert_int_equal(kvf_memfd_seals(piece.fd, &seals), KVF_OK);
    assert_int_equal(seals, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL);
    assert_true((fcntl(piece.fd, F_GETFD) & FD_CLOEXEC) != 0);

    /* what a hostile client tries, with the descriptor and with one that it opens again */
    snprintf(path, sizeof(path), "/proc/self/fd/%d", piece.fd);
    fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_no_writable_map(piece.fd, piece.bytes);
    assert_no_writable_map(fd, piece.bytes);
    assert_int_equal(pwrite(fd, "x", 1, (off_t)offset), -1);
    assert_int_equal(ftruncate(fd, 0), -1);
    assert_int_equal(ftruncate(fd, (off_t)piece.bytes * 2), -1);
    assert_int_equal(__real_fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), -1);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
    close(fd);

    /* our own mapping writes, a client's mapping sees it and stays read-only */
    seen = mmap(NULL, piece.bytes, PROT_READ, MAP_SHARED, piece.fd, 0);
    assert_ptr_not_equal(seen, MAP_FAILED);
    memcpy(memory, "record", 6);
    assert_memory_equal(seen + offset, "record", 6);
    assert_int_equal(mprotect(seen, piece.bytes, PROT_READ | PROT_WRITE), -1);
    munmap(seen, piece.bytes);
    bed_free(bed);
}

/* The flags of the mapping that begins at memory, from /proc/self/smaps. */
static void mapping_flags(const void *memory, char *flags_out, size_t flags_bytes)
{
    FILE *smaps = fopen("/proc/self/smaps", "re");
    char line[512];
    bool is_ours = false;

    assert_non_null(smaps);
    flags_out[0] = '\0';
    while (fgets(line, sizeof(line), smaps) != NULL) {
        unsigned long begin, end;

        if (sscanf(line, "%lx-%lx ", &begin, &end) == 2) {
            is_ours = (uintptr_t)memory >= begin && (uintptr_t)memory < end;
        } else if (is_ours && strncmp(line, "VmFlags:", 8) == 0) {
            snprintf(flags_out, flags_bytes, "%s", line + 8);
            break;
        }
    }
    fclose(smaps);
}

static void test_not_in_dumps_or_children(void **state)
{
    struct bed *bed = bed_new(4, 1);
    uint32_t cookie;
    char flags[512];

    (void)state;
    bed_open(bed);
    cookie = bed_put(bed, 0, 20000);
    mapping_flags(bed->tier->ops->address(bed->tier, bed->entries[cookie].location), flags,
                  sizeof(flags));
    assert_non_null(strstr(flags, " dd"));
    assert_non_null(strstr(flags, " dc"));
    bed_free(bed);
}

/* ---- population ------------------------------------------------------------------------------ */

static void test_areas_come_one_by_one(void **state)
{
    struct bed *bed = bed_new(8, 1);
    char why[KVF_ERROR_TEXT_BYTES];
    uint32_t cookie;

    (void)state;
    assert_int_equal(kvf_dram_open(&bed->config, &bed->tier, why, sizeof(why)), KVF_OK);
    assert_int_equal(bed->n_areas_ready, 1); /* it can serve at once */
    assert_int_equal(bed_reserve(bed, 0, 900000, &cookie), KVF_OK);
    assert_int_equal(bed_reserve(bed, 0, 900000, &cookie), KVF_ERR_BUSY);
    bed->config.work->ops->poll(bed->config.work);
    assert_int_equal(bed->n_areas_ready, 2);
    assert_int_equal(bed_reserve(bed, 0, 900000, &cookie), KVF_OK);

    bed->memory_allows = false;
    bed->config.work->ops->poll(bed->config.work); /* was under way already */
    assert_int_equal(bed->n_areas_ready, 3);
    assert_int_equal(bed->config.work->ops->poll(bed->config.work), 0);
    assert_true(bed->tier->ops->deadline_ns(bed->tier) > bed->now_ns);
    bed_settle(bed, 2);
    assert_int_equal(bed->n_areas_ready, 3);
    assert_true(bed_info(bed).memory_refusals >= 2);
    bed->memory_allows = true;
    bed_settle(bed, 2);
    assert_int_equal(bed->n_areas_ready, 8);
    assert_int_equal(bed_info(bed).populated_bytes, 8 * BED_MIB);
    assert_true(bed->tier->ops->deadline_ns(bed->tier) == UINT64_MAX);
    bed_free(bed);
}

static void test_no_memory_yet(void **state)
{
    struct bed *bed = bed_new(4, 1);
    uint32_t cookie;

    (void)state;
    bed->memory_allows = false;
    bed_open(bed);
    assert_int_equal(bed->n_areas_ready, 0);
    assert_int_equal(bed_reserve(bed, 0, 9000, &cookie), KVF_ERR_BUSY);
    bed->memory_allows = true;
    bed_settle(bed, 1);
    assert_int_equal(bed->n_areas_ready, 4);
    assert_int_equal(bed_reserve(bed, 0, 9000, &cookie), KVF_OK);
    bed_free(bed);
}

static void test_population_fails(void **state)
{
    struct bed *bed = bed_new(4, 1);

    (void)state;
    fail_fallocates = 1; /* inside open: not a reason to stay away */
    bed_open(bed);
    assert_int_equal(bed->n_areas_ready, 0);
    fail_fallocates = 1;
    bed_settle(bed, 5);
    assert_int_equal(bed->n_areas_ready, 4);
    assert_int_equal(bed_info(bed).population_failures, 2);
    bed_free(bed);
}

static void test_population_on_old_kernels(void **state)
{
    struct bed *bed = bed_new(4, 1);
    unsigned char resident[256];
    uint32_t cookie;
    void *memory;

    (void)state;
    is_old_kernel = true;
    bed_open(bed);
    assert_int_equal(n_populates, 4);
    assert_int_equal(bed->n_areas_ready, 4);
    cookie = bed_put(bed, 0, BED_MIB);
    memory = bed->tier->ops->address(bed->tier, bed->entries[cookie].location);
    assert_int_equal(mincore(memory, BED_MIB, resident), 0);
    for (unsigned i = 0; i < sizeof(resident); i++) {
        assert_int_equal(resident[i] & 1, 1);
    }
    bed_free(bed);
}

static void wake_nobody(void *ctx)
{
    (void)ctx;
}

/* As in the daemon: the job runs on a worker while the reactor already uses the first areas. */
static void test_population_on_a_worker(void **state)
{
    struct bed *bed = bed_new(32, 1);
    struct kvf_waker waker = {.wake = wake_nobody};
    char why[KVF_ERROR_TEXT_BYTES];

    (void)state;
    bed->config.work->ops->close(bed->config.work);
    assert_int_equal(kvf_work_open(2, 8, waker, &bed->config.work), KVF_OK);
    assert_int_equal(kvf_dram_open(&bed->config, &bed->tier, why, sizeof(why)), KVF_OK);
    while (bed->n_areas_ready < 32) {
        uint32_t cookie;

        if (bed_reserve(bed, 0, 100000, &cookie) == KVF_OK) {
            memset(bed->tier->ops->address(bed->tier, bed->entries[cookie].location), 1, 100000);
            kvf_dram_publish(bed->tier, bed->entries[cookie].location, 0);
        }
        bed->config.work->ops->poll(bed->config.work);
        bed->tier->ops->poll(bed->tier, bed->now_ns);
        if (bed->n_entries == BED_ENTRIES_MAX) {
            bed->n_entries--; /* it has been evicted long ago */
        }
    }
    bed_free(bed);
}

static void test_open_fails(void **state)
{
    struct bed *bed = bed_new(16, 1);
    char why[KVF_ERROR_TEXT_BYTES] = "";

    (void)state;
    bed->config.piece_bytes = 4 * BED_MIB;
    fail_memfds = 1;
    assert_int_equal(kvf_dram_open(&bed->config, &bed->tier, why, sizeof(why)), KVF_ERR_BUSY);
    assert_null(bed->tier);
    assert_non_null(strstr(why, "piece 1 of 4: memfd_create: Too many open files"));
    bed_free(bed);
}

static void test_huge_pages(void **state)
{
    struct bed *bed = bed_new(8, 2);
    char why[KVF_ERROR_TEXT_BYTES] = "";
    int status;

    (void)state;
    has_no_huge_pages = true;
    bed->config.hugepages = KVF_HUGEPAGES_TRY;
    assert_int_equal(kvf_dram_open(&bed->config, &bed->tier, why, sizeof(why)), KVF_OK);
    assert_non_null(strstr(why, "only 0 of 1 arena pieces on 2 MiB pages: memfd_create"));
    bed_work(bed);
    assert_int_equal(bed_info(bed).huge_bytes, 0);
    assert_int_equal(bed_info(bed).area_bytes, 2 * BED_MIB);
    bed->config.work->ops->poll(bed->config.work);
    bed->tier->ops->close(bed->tier);
    bed->tier = NULL;

    bed->config.hugepages = KVF_HUGEPAGES_REQUIRE;
    assert_int_equal(kvf_dram_open(&bed->config, &bed->tier, why, sizeof(why)),
                     KVF_ERR_UNSUPPORTED);
    assert_non_null(strstr(why, "vm.nr_hugepages"));

    /* and what this machine really has */
    has_no_huge_pages = false;
    status = kvf_dram_open(&bed->config, &bed->tier, why, sizeof(why));
    if (status == KVF_OK) {
        bed_work(bed);
        assert_int_equal(bed_info(bed).huge_bytes, 8 * BED_MIB);
        bed_put(bed, 0, 5 * BED_MIB);
    } else {
        assert_int_equal(status, KVF_ERR_UNSUPPORTED);
        print_message("no huge pages here: %s\n", why);
    }
    bed_free(bed);
}

/* ---- memory of the node ---------------------------------------------------------------------- */

static void write_file(const struct kvf_test_dir *root, const char *name, const char *text)
{
    char path[KVF_TEST_PATH_BYTES], *slash;

    kvf_test_dir_path(root, name, path);
    for (slash = path + strlen(root->path) + 1; (slash = strchr(slash, '/')) != NULL; slash++) {
        *slash = '\0';
        mkdir(path, 0700);
        *slash = '/';
    }
    kvf_test_file_write(path, text, strlen(text));
}

static void test_memory_allows(void **state)
{
    struct kvf_test_dir dir;
    char *root = dir.path;
    const uint64_t mib = BED_MIB;

    (void)state;
    kvf_test_dir_create(&dir);
    /* nothing readable: nothing to obey */
    assert_true(kvf_dram_memory_allows(root, 1000 * mib));

    /* 32 GiB of which 2 GiB are free; 1 GiB stays for others */
    write_file(&dir, "proc/meminfo",
               "MemTotal:       33554432 kB\nMemFree:  1 kB\nMemAvailable:    2097152 kB\n");
    assert_true(kvf_dram_memory_allows(root, 1024 * mib));
    assert_false(kvf_dram_memory_allows(root, 1025 * mib));

    /* our own cgroup allows everything, the one above it 1 GiB (64 MiB of it for others) */
    write_file(&dir, "proc/self/cgroup", "1:name=systemd:/old\n0::/pod/daemon\n");
    write_file(&dir, "sys/fs/cgroup/pod/daemon/memory.max", "max\n");
    write_file(&dir, "sys/fs/cgroup/pod/daemon/memory.current", "1\n");
    write_file(&dir, "sys/fs/cgroup/pod/memory.max", "1073741824\n");
    write_file(&dir, "sys/fs/cgroup/pod/memory.current", "536870912\n");
    assert_true(kvf_dram_memory_allows(root, 448 * mib));
    assert_false(kvf_dram_memory_allows(root, 449 * mib));
    write_file(&dir, "sys/fs/cgroup/pod/memory.stat",
               "anon 1\nfile 2\ninactive_anon 3\ninactive_file 104857600\n");
    assert_true(kvf_dram_memory_allows(root, 548 * mib));
    assert_false(kvf_dram_memory_allows(root, 549 * mib));
    write_file(&dir, "sys/fs/cgroup/pod/memory.current", "1073741824\n");
    write_file(&dir, "sys/fs/cgroup/pod/memory.stat", "inactive_file 0\n");
    assert_false(kvf_dram_memory_allows(root, mib));

    /* in a container the path is its own root */
    write_file(&dir, "proc/self/cgroup", "0::/\n");
    assert_true(kvf_dram_memory_allows(root, 1024 * mib));
    write_file(&dir, "sys/fs/cgroup/memory.max", "268435456\n");
    write_file(&dir, "sys/fs/cgroup/memory.current", "0\n");
    assert_true(kvf_dram_memory_allows(root, 192 * mib));
    assert_false(kvf_dram_memory_allows(root, 193 * mib));

    /* and the real files can be read here */
    assert_false(kvf_dram_memory_allows(NULL, UINT64_MAX / 2));
    assert_true(kvf_dram_memory_allows(NULL, 0));
    kvf_test_dir_remove(&dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_plan, reset),
        cmocka_unit_test_setup(test_plans_that_cannot_be, reset),
        cmocka_unit_test_setup(test_octave_classes, reset),
        cmocka_unit_test_setup(test_exact_classes, reset),
        cmocka_unit_test_setup(test_too_large, reset),
        cmocka_unit_test_setup(test_places, reset),
        cmocka_unit_test_setup(test_states, reset),
        cmocka_unit_test_setup(test_doomed_until_unpinned, reset),
        cmocka_unit_test_setup(test_fill_figures, reset),
        cmocka_unit_test_setup(test_seals, reset),
        cmocka_unit_test_setup(test_not_in_dumps_or_children, reset),
        cmocka_unit_test_setup(test_areas_come_one_by_one, reset),
        cmocka_unit_test_setup(test_no_memory_yet, reset),
        cmocka_unit_test_setup(test_population_fails, reset),
        cmocka_unit_test_setup(test_population_on_old_kernels, reset),
        cmocka_unit_test_setup(test_population_on_a_worker, reset),
        cmocka_unit_test_setup(test_open_fails, reset),
        cmocka_unit_test_setup(test_huge_pages, reset),
        cmocka_unit_test_setup(test_memory_allows, reset),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
