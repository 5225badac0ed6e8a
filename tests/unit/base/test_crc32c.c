/* SPDX-License-Identifier: Apache-2.0
 *
 * test_crc32c.c: published vectors, an independent bitwise reference, chaining, joining, copying.
 */
#include "base/crc32c.h"

#include "tests/support/support.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

static uint64_t seed;

static uint32_t reference(uint32_t crc, const unsigned char *data, size_t bytes)
{
    crc = ~crc;
    for (size_t i = 0; i < bytes; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) {
            crc = (crc >> 1) ^ (crc & 1 ? 0x82f63b78u : 0);
        }
    }
    return ~crc;
}

/* From RFC 3720, B.4, and the usual check string. */
static void published_vectors(void **state)
{
    unsigned char data[32];

    (void)state;
    assert_int_equal(kvf_crc32c(0, "123456789", 9), 0xe3069283u);
    assert_int_equal(kvf_crc32c(0, NULL, 0), 0);
    memset(data, 0, sizeof(data));
    assert_int_equal(kvf_crc32c(0, data, sizeof(data)), 0x8a9136aau);
    memset(data, 0xff, sizeof(data));
    assert_int_equal(kvf_crc32c(0, data, sizeof(data)), 0x62a8ab43u);
    for (size_t i = 0; i < sizeof(data); i++) {
        data[i] = (unsigned char)i;
    }
    assert_int_equal(kvf_crc32c(0, data, sizeof(data)), 0x46dd794eu);
}

static void agrees_with_reference_at_any_alignment(void **state)
{
    unsigned char data[600];
    struct kvf_random_seeded random;

    (void)state;
    kvf_random_seeded_init(&random, seed);
    kvf_random_seeded_ops.fill(&random, data, sizeof(data));
    for (size_t offset = 0; offset < 16; offset++) {
        for (size_t bytes = 0; bytes <= sizeof(data) - 16; bytes += 1 + bytes / 8) {
            assert_int_equal(kvf_crc32c(7, data + offset, bytes),
                             reference(7, data + offset, bytes));
        }
    }
}

static void chains_and_joins_at_every_split(void **state)
{
    unsigned char data[300];
    struct kvf_random_seeded random;
    uint32_t whole;

    (void)state;
    kvf_random_seeded_init(&random, seed);
    kvf_random_seeded_ops.fill(&random, data, sizeof(data));
    whole = kvf_crc32c(0, data, sizeof(data));
    for (size_t split = 0; split <= sizeof(data); split++) {
        uint32_t a = kvf_crc32c(0, data, split);
        uint32_t b = kvf_crc32c(0, data + split, sizeof(data) - split);

        assert_int_equal(kvf_crc32c(a, data + split, sizeof(data) - split), whole);
        assert_int_equal(kvf_crc32c_combine(a, b, sizeof(data) - split), whole);
    }
}

/* More than one call to ISA-L. Untouched private pages are all the kernel's zero page, so this
 * costs address space only. Joining checksums of zeroes gives the answer by another way. */
static void lengths_beyond_one_call(void **state)
{
    size_t bytes = ((size_t)1 << 30) + 4097;
    void *zeroes = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    unsigned char byte = 0;
    uint32_t expected = kvf_crc32c(0, NULL, 0);
    uint32_t doubled = kvf_crc32c(0, &byte, 1);
    uint64_t doubled_bytes = 1;

    (void)state;
    assert_ptr_not_equal(zeroes, MAP_FAILED);
    for (uint64_t left = bytes; left != 0; left >>= 1) {
        if (left & 1) {
            expected = kvf_crc32c_combine(expected, doubled, doubled_bytes);
        }
        doubled = kvf_crc32c_combine(doubled, doubled, doubled_bytes);
        doubled_bytes *= 2;
    }
    assert_int_equal(kvf_crc32c(0, zeroes, bytes), expected);
    munmap(zeroes, bytes);
}

static void copies_and_sums(void **state)
{
    static const size_t sizes[] = {0, 1, 4095, 16384, 16385, 100000, 262144, 262145, 1048601};
    struct kvf_random_seeded random;

    (void)state;
    kvf_random_seeded_init(&random, seed);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        size_t bytes = sizes[i];
        unsigned char *source = malloc(bytes + 64);
        unsigned char *target = malloc(bytes + 130);

        assert_non_null(source);
        assert_non_null(target);
        kvf_random_seeded_ops.fill(&random, source, bytes + 64);
        for (size_t shift = 0; shift < 128; shift += 21) {
            unsigned char *from = source + shift % 64;
            unsigned char *to = target + 1 + shift;

            memset(target, 0xa5, bytes + 130);
            assert_int_equal(kvf_crc32c_copy(to, from, bytes, 99), kvf_crc32c(99, from, bytes));
            assert_memory_equal(to, from, bytes);
            assert_int_equal(to[-1], 0xa5);
            assert_int_equal(to[bytes], 0xa5);
            memset(target, 0xa5, bytes + 130); /* and as a part of something larger */
            assert_int_equal(kvf_crc32c_copy_part(to, from, bytes, (size_t)1 << 30, 99),
                             kvf_crc32c(99, from, bytes));
            assert_memory_equal(to, from, bytes);
            assert_int_equal(to[-1], 0xa5);
            assert_int_equal(to[bytes], 0xa5);
        }
        free(source);
        free(target);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_vectors),
        cmocka_unit_test(agrees_with_reference_at_any_alignment),
        cmocka_unit_test(chains_and_joins_at_every_split),
        cmocka_unit_test(lengths_beyond_one_call),
        cmocka_unit_test(copies_and_sums),
    };

    seed = kvf_test_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
