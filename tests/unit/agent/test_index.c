/* SPDX-License-Identifier: Apache-2.0
 *
 * test_index.c: the index against a plain list, with names that collide.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "agent/index.h"
#include "tests/support/support.h"

#define CAPACITY 256
#define NAMES    1024

/* Few first bytes, so that most names share a bucket with others. */
static void name_of(uint32_t number, uint8_t key_id[32])
{
    memset(key_id, 0, 32);
    key_id[0] = (uint8_t)(number % 8);
    memcpy(key_id + 28, &number, sizeof(number));
}

static uint32_t shard_of(uint32_t number)
{
    return number % 5 == 0 ? KVF_INDEX_SHARD_SET : number % 5;
}

static void test_sizes(void **state)
{
    struct kvf_index index;

    (void)state;
    assert_int_equal(kvf_index_bytes(1 << 20), 64u << 20);
    assert_int_equal(kvf_index_bytes((1 << 20) + 1), 128u << 20);
    assert_int_equal(kvf_index_open(&index, 0), KVF_ERR_INVALID);
    assert_int_equal(kvf_index_open(&index, UINT32_MAX), KVF_ERR_INVALID);
    assert_int_equal(kvf_index_open(&index, 100), KVF_OK);
    assert_int_equal(index.capacity, 128);
    kvf_index_close(&index);
}

static void test_insert_find_remove(void **state)
{
    struct kvf_entry *entry, *other;
    struct kvf_index index;
    uint8_t key_id[32];

    (void)state;
    assert_int_equal(kvf_index_open(&index, 4), KVF_OK);
    name_of(1, key_id);
    assert_null(kvf_index_find(&index, key_id, 1));
    entry = kvf_index_insert(&index, key_id, 1, 1023);
    assert_non_null(entry);
    assert_int_equal(entry->state, KVF_ENTRY_FILLING);
    assert_int_equal(entry->namespace_index, 1023);
    assert_int_equal(entry->dram_slot, KVF_INDEX_NONE);
    assert_true(kvf_entry_nvme_location(entry) == KVF_LOCATION_NONE);
    assert_false(kvf_entry_in_dram(entry));
    /* the same key of another shard is another block */
    assert_null(kvf_index_find(&index, key_id, 2));
    other = kvf_index_insert(&index, key_id, KVF_INDEX_SHARD_SET, 0);
    assert_ptr_equal(kvf_index_find(&index, key_id, 1), entry);
    assert_ptr_equal(kvf_index_find(&index, key_id, KVF_INDEX_SHARD_SET), other);
    kvf_entry_set_nvme(entry, UINT64_C(0x123456789abcdef0));
    assert_true(kvf_entry_nvme_location(entry) == UINT64_C(0x123456789abcdef0));
    kvf_index_remove(&index, entry);
    assert_null(kvf_index_find(&index, key_id, 1));
    assert_ptr_equal(kvf_index_find(&index, key_id, KVF_INDEX_SHARD_SET), other);
    assert_int_equal(index.count, 1);
    kvf_index_close(&index);
}

/* Unlinked, an entry keeps its number until it is freed: a tier may still name it. */
static void test_number_is_kept(void **state)
{
    struct kvf_index index;
    struct kvf_entry *entry;
    kvf_cookie cookie;
    uint8_t key_id[32];

    (void)state;
    assert_int_equal(kvf_index_open(&index, 4), KVF_OK);
    name_of(1, key_id);
    entry = kvf_index_insert(&index, key_id, 0, 0);
    cookie = kvf_index_cookie(&index, entry);
    assert_ptr_equal(kvf_index_at(&index, cookie), entry);
    kvf_index_unlink(&index, entry);
    assert_null(kvf_index_find(&index, key_id, 0));
    for (uint32_t i = 0; i < 3; i++) {
        name_of(10 + i, key_id);
        assert_true(kvf_index_cookie(&index, kvf_index_insert(&index, key_id, 0, 0)) != cookie);
    }
    name_of(20, key_id);
    assert_null(kvf_index_insert(&index, key_id, 0, 0)); /* full, with one that is not free */
    kvf_index_free(&index, entry);
    assert_int_equal(kvf_index_cookie(&index, kvf_index_insert(&index, key_id, 0, 0)), cookie);
    kvf_index_close(&index);
}

/* Random steps; the model is whether each name is there, and under which number. */
static void test_against_list(void **state)
{
    static kvf_cookie cookies[NAMES];
    static bool is_here[NAMES];
    struct kvf_random_seeded random;
    struct kvf_index index;
    uint32_t n_here = 0;

    (void)state;
    memset(is_here, 0, sizeof(is_here));
    kvf_random_seeded_init(&random, kvf_test_seed());
    assert_int_equal(kvf_index_open(&index, CAPACITY), KVF_OK);
    for (uint32_t step = 0; step < 200000; step++) {
        uint32_t number = (uint32_t)(kvf_random_seeded_next(&random) % NAMES);
        struct kvf_entry *entry;
        uint8_t key_id[32];

        name_of(number, key_id);
        entry = kvf_index_find(&index, key_id, shard_of(number));
        assert_int_equal(entry != NULL, is_here[number]);
        if (entry != NULL) {
            assert_int_equal(kvf_index_cookie(&index, entry), cookies[number]);
            assert_memory_equal(entry->key_id, key_id, 32);
        }
        if (entry != NULL && step % 3 != 0) {
            kvf_index_remove(&index, entry);
            is_here[number] = false;
            n_here--;
        } else if (entry == NULL) {
            entry = kvf_index_insert(&index, key_id, shard_of(number), number % 1024);
            assert_int_equal(entry == NULL, n_here == CAPACITY);
            if (entry != NULL) {
                is_here[number] = true;
                cookies[number] = kvf_index_cookie(&index, entry);
                n_here++;
            }
        }
        assert_int_equal(index.count, n_here);
    }
    kvf_index_close(&index);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_insert_find_remove),
        cmocka_unit_test(test_number_is_kept),
        cmocka_unit_test(test_against_list),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
