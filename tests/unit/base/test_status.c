/* SPDX-License-Identifier: Apache-2.0
 *
 * test_status.c: names and texts of status values; sizes of element types.
 */
#include "base/status.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

/* Wider than all groups, so that a value added to the header later is looked at too. */
#define STATUS_MIN (-128)
#define STATUS_MAX 128

static void names_are_distinct(void **state)
{
    int named_count = 0;

    (void)state;
    for (int a = STATUS_MIN; a <= STATUS_MAX; a++) {
        if (strcmp(kvf_status_name(a), "unknown") == 0) {
            continue;
        }
        named_count++;
        for (int b = a + 1; b <= STATUS_MAX; b++) {
            assert_string_not_equal(kvf_status_name(a), kvf_status_name(b));
            assert_string_not_equal(kvf_status_text(a), kvf_status_text(b));
        }
    }
    assert_int_equal(named_count, 29);
}

static void names_are_stable(void **state)
{
    (void)state;
    assert_string_equal(kvf_status_name(KVF_OK), "ok");
    assert_string_equal(kvf_status_name(KVF_MISS), "miss");
    assert_string_equal(kvf_status_name(KVF_ERR_BUSY), "busy");
    assert_string_equal(kvf_status_name(KVF_ERR_INTERNAL), "internal");
}

static void unknown_values_have_words(void **state)
{
    static const int unknown[] = {8, -13, -31, -127, INT32_MAX, INT32_MIN};

    (void)state;
    for (size_t i = 0; i < sizeof(unknown) / sizeof(unknown[0]); i++) {
        assert_string_equal(kvf_status_name(unknown[i]), "unknown");
        assert_string_equal(kvf_status_text(unknown[i]), "a status this version does not know");
    }
}

static void errno_becomes_status(void **state)
{
    (void)state;
    assert_int_equal(kvf_status_from_errno(0), KVF_OK);
    assert_int_equal(kvf_status_from_errno(ENOSPC), KVF_ERR_NO_SPACE);
    assert_int_equal(kvf_status_from_errno(ENOMEM), KVF_ERR_NO_MEMORY);
    assert_int_equal(kvf_status_from_errno(EAGAIN), KVF_ERR_BUSY);
    assert_int_equal(kvf_status_from_errno(EPERM), KVF_ERR_REFUSED);
    assert_int_equal(kvf_status_from_errno(ENOSYS), KVF_ERR_UNSUPPORTED);
    assert_int_equal(kvf_status_from_errno(EINVAL), KVF_ERR_INVALID);
    assert_int_equal(kvf_status_from_errno(EIO), KVF_ERR_IO);
    assert_int_equal(kvf_status_from_errno(ENODEV), KVF_ERR_IO);
}

static void element_sizes(void **state)
{
    (void)state;
    assert_int_equal(kvf_dtype_bytes(KVF_DTYPE_NONE), 0);
    assert_int_equal(kvf_dtype_bytes(KVF_DTYPE_BF16), 2);
    assert_int_equal(kvf_dtype_bytes(KVF_DTYPE_F16), 2);
    assert_int_equal(kvf_dtype_bytes(KVF_DTYPE_F32), 4);
    assert_int_equal(kvf_dtype_bytes(KVF_DTYPE_F8E4M3), 1);
    assert_int_equal(kvf_dtype_bytes(KVF_DTYPE_F8E5M2), 1);
    assert_int_equal(kvf_dtype_bytes(KVF_DTYPE_U8), 1);
    assert_int_equal(kvf_dtype_bytes(-1), 0);
    assert_int_equal(kvf_dtype_bytes(7), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_are_distinct),
        cmocka_unit_test(names_are_stable),
        cmocka_unit_test(unknown_values_have_words),
        cmocka_unit_test(errno_becomes_status),
        cmocka_unit_test(element_sizes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
