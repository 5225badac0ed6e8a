/* SPDX-License-Identifier: Apache-2.0
 *
 * test_hash.c: golden values (made by another BLAKE2b), and that no two lists of fields collide.
 */
#include "base/hash.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static uint8_t key[KVF_HASH_KEY_BYTES];

static void assert_hash(const uint8_t hash[KVF_HASH_BYTES], const char *expected_hex)
{
    char hex[2 * KVF_HASH_BYTES + 1];

    for (size_t i = 0; i < KVF_HASH_BYTES; i++) {
        snprintf(hex + 2 * i, 3, "%02x", hash[i]);
    }
    assert_string_equal(hex, expected_hex);
}

static void golden_values(void **state)
{
    const struct kvf_key engine_key = {.data = "0123456789abcdef", .bytes = 16};
    struct kvf_hasher hasher;
    uint8_t hash[KVF_HASH_BYTES];

    (void)state;
    kvf_key_id_compute(key, 3, 0x1122334455667788ull, engine_key, hash);
    assert_hash(hash, "195ba87593c406babf803d6e07176da94c45b35186d2e5446ffd46d7f4be865b");
    kvf_key_derive(key, "mac", "uuid", 4, hash);
    assert_hash(hash, "af0ddd2dc394281a076b297e073e11fd2b3d956889d015b10f3daafb717acf13");
    kvf_mac_compute(key, "abc", 3, hash);
    assert_hash(hash, "da0ea3206b616d03169d78d739b853a5534d464d077bc14a031aaa29ac47bc30");
    kvf_hasher_init(&hasher, NULL);
    kvf_hash_field(&hasher, "abc", 3);
    kvf_hasher_final(&hasher, hash);
    assert_hash(hash, "3bdc62cfd65e3b78e3d90e32e0a91ebfbc229c30abe54e6abd16c5d4def0db7b");
}

/* Every input of a block's name takes part in it. */
static void names_separate(void **state)
{
    uint8_t other_key[KVF_HASH_KEY_BYTES];
    uint8_t ids[6][KVF_HASH_BYTES];
    const struct kvf_key a = {.data = "0123456789abcdef0", .bytes = 16};
    const struct kvf_key longer = {.data = "0123456789abcdef0", .bytes = 17};
    const struct kvf_key b = {.data = "0123456789abcdeg", .bytes = 16};

    (void)state;
    memcpy(other_key, key, sizeof(other_key));
    other_key[31] ^= 1;
    kvf_key_id_compute(key, 1, 2, a, ids[0]);
    kvf_key_id_compute(key, 2, 1, a, ids[1]);
    kvf_key_id_compute(key, 1, 3, a, ids[2]);
    kvf_key_id_compute(key, 1, 2, longer, ids[3]);
    kvf_key_id_compute(key, 1, 2, b, ids[4]);
    kvf_key_id_compute(other_key, 1, 2, a, ids[5]);
    for (size_t i = 0; i < 6; i++) {
        for (size_t j = i + 1; j < 6; j++) {
            assert_memory_not_equal(ids[i], ids[j], KVF_HASH_BYTES);
        }
    }
}

static void hash_two_fields(const char *first, const char *second, uint8_t hash_out[KVF_HASH_BYTES])
{
    struct kvf_hasher hasher;

    kvf_hasher_init(&hasher, key);
    kvf_hash_field(&hasher, first, strlen(first));
    kvf_hash_field(&hasher, second, strlen(second));
    kvf_hasher_final(&hasher, hash_out);
}

static void field_borders_count(void **state)
{
    uint8_t a[KVF_HASH_BYTES];
    uint8_t b[KVF_HASH_BYTES];

    (void)state;
    hash_two_fields("ab", "c", a);
    hash_two_fields("a", "bc", b);
    assert_memory_not_equal(a, b, KVF_HASH_BYTES);
    hash_two_fields("", "abc", a);
    hash_two_fields("abc", "", b);
    assert_memory_not_equal(a, b, KVF_HASH_BYTES);
}

static void mac_refuses_any_flipped_bit(void **state)
{
    uint8_t data[40];
    uint8_t mac[KVF_HASH_BYTES];

    (void)state;
    memset(data, 0x3c, sizeof(data));
    kvf_mac_compute(key, data, sizeof(data), mac);
    assert_true(kvf_mac_verify(key, data, sizeof(data), mac));
    assert_false(kvf_mac_verify(key, data, sizeof(data) - 1, mac));
    for (size_t bit = 0; bit < 8 * sizeof(data); bit++) {
        data[bit / 8] ^= (uint8_t)(1u << bit % 8);
        assert_false(kvf_mac_verify(key, data, sizeof(data), mac));
        data[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    for (size_t bit = 0; bit < 8 * sizeof(mac); bit++) {
        mac[bit / 8] ^= (uint8_t)(1u << bit % 8);
        assert_false(kvf_mac_verify(key, data, sizeof(data), mac));
        mac[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
}

static void uses_of_one_key_stay_apart(void **state)
{
    uint8_t derived[3][KVF_HASH_BYTES];

    (void)state;
    kvf_key_derive(key, "mac", "uuid", 4, derived[0]);
    kvf_key_derive(key, "session", "uuid", 4, derived[1]);
    kvf_key_derive(key, "mac", "uuie", 4, derived[2]);
    assert_memory_not_equal(derived[0], derived[1], KVF_HASH_BYTES);
    assert_memory_not_equal(derived[0], derived[2], KVF_HASH_BYTES);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_values),
        cmocka_unit_test(names_separate),
        cmocka_unit_test(field_borders_count),
        cmocka_unit_test(mac_refuses_any_flipped_bit),
        cmocka_unit_test(uses_of_one_key_stay_apart),
    };

    if (kvf_hash_init_library() != KVF_OK) {
        return 1;
    }
    for (size_t i = 0; i < sizeof(key); i++) {
        key[i] = (uint8_t)i;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
