/* SPDX-License-Identifier: Apache-2.0
 *
 * test_parse.c: what is accepted as number, size and duration, and what a refusal says.
 */
#include "base/parse.h"

#include "base/clock.h"
#include "base/limits.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

typedef int (*parse_fn)(const char *text, uint64_t *value_out, char *error_out, size_t error_bytes);

static void accepts(parse_fn parse, const char *text, uint64_t expected)
{
    char error[KVF_ERROR_TEXT_BYTES] = "";
    uint64_t value = ~expected;

    assert_int_equal(parse(text, &value, error, sizeof(error)), KVF_OK);
    assert_int_equal(value, expected);
    assert_string_equal(error, "");
}

static void refuses(parse_fn parse, const char *text, const char *expected_error)
{
    char error[KVF_ERROR_TEXT_BYTES] = "";
    uint64_t value = 1234;

    assert_int_equal(parse(text, &value, error, sizeof(error)), KVF_ERR_INVALID);
    assert_string_equal(error, expected_error);
    assert_int_equal(value, 1234);
}

static void numbers(void **state)
{
    (void)state;
    accepts(kvf_parse_u64, "0", 0);
    accepts(kvf_parse_u64, "00042", 42);
    accepts(kvf_parse_u64, "18446744073709551615", UINT64_MAX);
    refuses(kvf_parse_u64, "18446744073709551616", "'18446744073709551616' is too large");
    refuses(kvf_parse_u64, "", "'' does not begin with a digit");
    refuses(kvf_parse_u64, "-1", "'-1' does not begin with a digit");
    refuses(kvf_parse_u64, " 1", "' 1' does not begin with a digit");
    refuses(kvf_parse_u64, "1.5", "'1.5' is not a whole number: '.5' follows it");
    refuses(kvf_parse_u64, "0x10", "'0x10' is not a whole number: 'x10' follows it");
}

static void sizes(void **state)
{
    (void)state;
    accepts(kvf_parse_size, "0", 0);
    accepts(kvf_parse_size, "4096", 4096);
    accepts(kvf_parse_size, "4096B", 4096);
    accepts(kvf_parse_size, "4KiB", 4096);
    accepts(kvf_parse_size, "512MiB", 512ull << 20);
    accepts(kvf_parse_size, "1 GiB", 1ull << 30);
    accepts(kvf_parse_size, "3TiB", 3ull << 40);
    accepts(kvf_parse_size, "16777215TiB", 16777215ull << 40);
    refuses(kvf_parse_size, "16777216TiB", "'16777216TiB' is too large");
    refuses(kvf_parse_size, "4k", "'4k' has the unknown unit 'k': use B, KiB, MiB, GiB or TiB");
    refuses(kvf_parse_size, "1GB", "'1GB' has the unknown unit 'GB': use B, KiB, MiB, GiB or TiB");
    refuses(kvf_parse_size, "1gib",
            "'1gib' has the unknown unit 'gib': use B, KiB, MiB, GiB or TiB");
    refuses(kvf_parse_size, "1 ", "'1 ' has the unknown unit ' ': use B, KiB, MiB, GiB or TiB");
    refuses(kvf_parse_size, "GiB", "'GiB' does not begin with a digit");
}

static void durations(void **state)
{
    (void)state;
    accepts(kvf_parse_duration, "0", 0);
    accepts(kvf_parse_duration, "0s", 0);
    accepts(kvf_parse_duration, "250us", 250 * KVF_NS_PER_US);
    accepts(kvf_parse_duration, "500ms", 500 * KVF_NS_PER_MS);
    accepts(kvf_parse_duration, "10s", 10 * KVF_NS_PER_S);
    accepts(kvf_parse_duration, "5 min", 300 * KVF_NS_PER_S);
    accepts(kvf_parse_duration, "2h", 7200 * KVF_NS_PER_S);
    refuses(kvf_parse_duration, "10", "'10' has no unit: use us, ms, s, min or h");
    refuses(kvf_parse_duration, "10m", "'10m' has the unknown unit 'm': use us, ms, s, min or h");
    refuses(kvf_parse_duration, "6000000h", "'6000000h' is too large");
}

static void short_error_buffers_hold(void **state)
{
    char error[4] = "...";
    uint64_t value = 0;

    (void)state;
    assert_int_equal(kvf_parse_u64("x", &value, error, sizeof(error)), KVF_ERR_INVALID);
    assert_string_equal(error, "'x'");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(numbers),
        cmocka_unit_test(sizes),
        cmocka_unit_test(durations),
        cmocka_unit_test(short_error_buffers_hold),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
