/* SPDX-License-Identifier: Apache-2.0
 *
 * test_dram_tenants.c: a piece belongs to one tenant, and changes its tenant only with its memfd.
 */
#include "tests/unit/tiers/dram_bed.h"

#include <sys/mman.h>
#include <sys/stat.h>

/* The tenant whose memory an entry lies in, and the id of the piece. */
static uint16_t tenant_of(struct bed *bed, uint32_t cookie, uint32_t *piece_id_out)
{
    struct kvf_dram_piece piece;
    uint64_t offset;

    kvf_dram_locate(bed->tier, bed->entries[cookie].location, piece_id_out, &offset);
    assert_int_equal(kvf_dram_piece_get(bed->tier, *piece_id_out, &piece), KVF_OK);
    return piece.tenant;
}

static uint32_t count_pieces(struct bed *bed, uint16_t tenant)
{
    uint32_t n_pieces = 0;

    for (uint32_t id = kvf_dram_piece_next(bed->tier, tenant, 0); id != 0;
         id = kvf_dram_piece_next(bed->tier, tenant, id)) {
        struct kvf_dram_piece piece;

        assert_int_equal(kvf_dram_piece_get(bed->tier, id, &piece), KVF_OK);
        assert_int_equal(piece.tenant, tenant);
        n_pieces++;
    }
    return n_pieces;
}

static struct bed *open_tenants(uint64_t arena_mib, uint16_t n_tenants)
{
    struct bed *bed = bed_new(arena_mib, 1);

    bed->config.n_tenants = n_tenants;
    bed_open(bed);
    return bed;
}

static void test_pieces_are_given_on_demand(void **state)
{
    struct bed *bed = open_tenants(16, 2);
    struct kvf_dram_piece piece;
    uint32_t cookie, id;

    (void)state;
    assert_int_equal(bed_info(bed).pieces, 4);
    assert_int_equal(bed->n_added, 0);
    assert_int_equal(kvf_dram_piece_next(bed->tier, 0, 0), 0);
    cookie = bed_put(bed, 1, 9000);
    assert_int_equal(tenant_of(bed, cookie, &id), 1);
    assert_int_equal(bed->n_added, 1);
    assert_int_equal(bed->added[0], id);
    assert_int_equal(kvf_dram_piece_next(bed->tier, 1, 0), id);
    assert_int_equal(kvf_dram_piece_next(bed->tier, 1, id), 0);
    assert_int_equal(kvf_dram_piece_get(bed->tier, id, &piece), KVF_OK);
    assert_int_equal(piece.bytes, 4 * BED_MIB);
    assert_int_equal(kvf_dram_piece_get(bed->tier, 0, &piece), KVF_MISS);
    assert_int_equal(kvf_dram_piece_get(bed->tier, UINT32_MAX, &piece), KVF_MISS);
    /* a piece without a tenant is nobody's to look at */
    assert_int_equal(kvf_dram_piece_get(bed->tier, id + 1, &piece), KVF_MISS);
    assert_int_equal(kvf_dram_piece_next(bed->tier, 2, 0), 0);
    bed_put(bed, 1, 3 * BED_MIB); /* what is left of the piece */
    assert_int_equal(bed->n_added, 1);
    bed_put(bed, 1, 2 * BED_MIB);
    assert_int_equal(bed->n_added, 2);
    bed_free(bed);
}

static void test_tenants_never_share(void **state)
{
    struct bed *bed = open_tenants(32, 4);
    struct kvf_random_seeded random;
    uint64_t seed = 17;

    (void)state;
    print_message("seed %llu\n", (unsigned long long)seed);
    kvf_random_seeded_init(&random, seed);
    for (int i = 0; i < 5000; i++) {
        uint16_t tenant = (uint16_t)(kvf_random_seeded_next(&random) % 4);
        uint64_t bytes = 1 + kvf_random_seeded_next(&random) % 300000;
        uint32_t cookie, piece_id;

        if (bed_reserve(bed, tenant, bytes, &cookie) == KVF_OK) {
            kvf_dram_publish(bed->tier, bed->entries[cookie].location, 0);
            assert_int_equal(tenant_of(bed, cookie, &piece_id), tenant);
        }
        bed_settle(bed, 0);
    }
    for (uint16_t tenant = 0; tenant < 4; tenant++) {
        /* nobody has been left without, whoever came first */
        assert_true(count_pieces(bed, tenant) >= 2);
    }
    bed_free(bed);
}

/* Tenant 0 has filled all four pieces of this arena, and not used one of them for long. */
static struct bed *open_filled(uint32_t *idle_piece_out, uint32_t *idle_entry_out)
{
    struct bed *bed = open_tenants(16, 2);
    uint32_t id, first_piece;

    for (int i = 0; i < 16; i++) {
        uint32_t cookie = bed_put(bed, 0, BED_MIB);

        assert_int_equal(tenant_of(bed, cookie, &id), 0);
        memset(bed->tier->ops->address(bed->tier, bed->entries[cookie].location), 0xaa, BED_MIB);
    }
    assert_int_equal(count_pieces(bed, 0), 4);
    bed->now_ns += 100 * KVF_NS_PER_S;
    tenant_of(bed, 0, &first_piece);
    *idle_piece_out = first_piece;
    for (uint32_t i = 0; i < 16; i++) {
        tenant_of(bed, i, &id);
        if (id != first_piece && *idle_piece_out == first_piece) {
            *idle_piece_out = id;
        }
        if (id == *idle_piece_out && id != first_piece) {
            *idle_entry_out = i;
        } else {
            kvf_dram_touch(bed->tier, bed->entries[i].location);
        }
    }
    return bed;
}

/* Not at once: what is there is evicted by poll, and only where nobody pins it. */
static void test_handover_waits_for_pins(void **state)
{
    uint32_t cookie, id, idle_piece, idle_entry;
    struct bed *bed = open_filled(&idle_piece, &idle_entry);
    struct kvf_dram_piece piece;

    (void)state;
    kvf_dram_pin(bed->tier, bed->entries[idle_entry].location);
    assert_int_equal(bed_reserve(bed, 1, 9000, &cookie), KVF_ERR_BUSY);
    bed_settle(bed, 5);
    assert_int_equal(bed->n_evicted, 3);
    assert_int_equal(bed->n_dropped, 0);
    assert_int_equal(bed_reserve(bed, 1, 9000, &cookie), KVF_ERR_BUSY);
    /* meanwhile its old tenant gets nothing in it */
    assert_int_equal(bed_reserve(bed, 0, BED_MIB, &cookie), KVF_OK);
    tenant_of(bed, cookie, &id);
    assert_true(id != idle_piece);
    kvf_dram_publish(bed->tier, bed->entries[cookie].location, 0);

    kvf_dram_unpin(bed->tier, bed->entries[idle_entry].location);
    bed_settle(bed, 1);
    assert_int_equal(bed->n_dropped, 1);
    assert_int_equal(bed->dropped[0], idle_piece);
    assert_int_equal(kvf_dram_piece_get(bed->tier, idle_piece, &piece), KVF_MISS);
    assert_int_equal(count_pieces(bed, 0), 3);
    assert_int_equal(count_pieces(bed, 1), 1);
    assert_int_equal(bed_info(bed).pieces_reassigned, 1);
    bed_free(bed);
}

static uint64_t count_bytes(const unsigned char *memory, uint64_t bytes, unsigned char value)
{
    uint64_t count = 0;

    for (uint64_t i = 0; i < bytes; i++) {
        count += memory[i] == value;
    }
    return count;
}

/* The new tenant gets another object, empty, under another name; a client of the old one that has
 * not unmapped it yet sees its own old bytes, and nothing else. */
static void test_handover_replaces_the_memory(void **state)
{
    uint32_t cookie, id, idle_piece, idle_entry;
    struct bed *bed = open_filled(&idle_piece, &idle_entry);
    struct kvf_dram_piece before, after;
    struct stat stat_before, stat_after;
    unsigned char *seen, *memory;

    (void)state;
    assert_int_equal(kvf_dram_piece_get(bed->tier, idle_piece, &before), KVF_OK);
    assert_int_equal(fstat(before.fd, &stat_before), 0);
    seen = mmap(NULL, before.bytes, PROT_READ, MAP_SHARED, before.fd, 0);
    assert_ptr_not_equal(seen, MAP_FAILED);

    assert_int_equal(bed_reserve(bed, 1, BED_MIB, &cookie), KVF_ERR_BUSY);
    bed_settle(bed, 1);
    assert_int_equal(bed_reserve(bed, 1, BED_MIB, &cookie), KVF_OK);
    assert_int_equal(tenant_of(bed, cookie, &id), 1);
    assert_true(id != idle_piece);
    assert_int_equal(bed->added[bed->n_added - 1], id);
    assert_int_equal(kvf_dram_piece_get(bed->tier, id, &after), KVF_OK);
    assert_int_equal(fstat(after.fd, &stat_after), 0);
    assert_true(stat_before.st_ino != stat_after.st_ino);
    memory = bed->tier->ops->address(bed->tier, bed->entries[cookie].location);
    assert_int_equal(count_bytes(memory, BED_MIB, 0), BED_MIB);
    memset(memory, 0x55, BED_MIB);
    assert_int_equal(count_bytes(seen, before.bytes, 0xaa), before.bytes);
    munmap(seen, before.bytes);
    bed_free(bed);
}

static void test_handover_ends_at_the_share(void **state)
{
    uint32_t cookie, idle_piece, idle_entry;
    struct bed *bed = open_filled(&idle_piece, &idle_entry);

    (void)state;
    for (int i = 0; i < 200; i++) {
        if (bed_reserve(bed, 1, 500000, &cookie) == KVF_OK) {
            kvf_dram_publish(bed->tier, bed->entries[cookie].location, 0);
        }
        bed_settle(bed, 0);
    }
    assert_int_equal(count_pieces(bed, 0), 2);
    assert_int_equal(count_pieces(bed, 1), 2);
    assert_int_equal(bed_info(bed).pieces_reassigned, 2);
    assert_int_equal(kvf_dram_piece_reassign(bed->tier, 1), KVF_ERR_BUSY);
    assert_int_equal(kvf_dram_piece_reassign(bed->tier, 2), KVF_ERR_INVALID);
    bed_free(bed);
}

static void test_handover_stops_a_claim(void **state)
{
    struct bed *bed = open_tenants(16, 2);
    uint32_t cookie, piece_id;

    (void)state;
    while (bed_stat(bed).evictions == 0) {
        bed_put(bed, 0, 8192);
    }
    /* one piece is colder than the others: a run of four areas begins to be emptied in it, and then
     * it goes as a whole */
    bed->now_ns += 100 * KVF_NS_PER_S;
    for (uint32_t i = 0; i < bed->n_entries; i++) {
        if (bed_has(bed, i)) {
            tenant_of(bed, i, &piece_id);
            if (piece_id != kvf_dram_piece_next(bed->tier, 0, 0)) {
                kvf_dram_touch(bed->tier, bed->entries[i].location);
            }
        }
    }
    assert_int_equal(bed_reserve(bed, 0, 4 * BED_MIB, &cookie), KVF_ERR_BUSY);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(kvf_dram_piece_reassign(bed->tier, 1), i < 2 ? KVF_OK : KVF_ERR_BUSY);
        bed_settle(bed, 5);
    }
    assert_int_equal(count_pieces(bed, 1), 2);
    assert_int_equal(bed_info(bed).pieces_reassigned, 2);
    for (int i = 0; i < 20; i++) {
        bed_reserve(bed, 0, 4 * BED_MIB, &cookie);
        bed_settle(bed, 1);
    }
    for (int i = 0; i < 2000; i++) {
        bed_reserve(bed, 1, 8192, &cookie);
    }
    assert_int_equal(bed_info(bed).free_area_bytes, 0);
    bed_free(bed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pieces_are_given_on_demand),
        cmocka_unit_test(test_tenants_never_share),
        cmocka_unit_test(test_handover_waits_for_pins),
        cmocka_unit_test(test_handover_replaces_the_memory),
        cmocka_unit_test(test_handover_ends_at_the_share),
        cmocka_unit_test(test_handover_stops_a_claim),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
