/* SPDX-License-Identifier: Apache-2.0
 *
 * test_pool.c: bounds, reuse, names of objects, and the report of what was not returned.
 */
#include "base/pool.h"

#include <setjmp.h>
#include <stdalign.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define OBJECTS 5

static void takes_each_once(void **state)
{
    struct kvf_pool pool;
    void *objects[OBJECTS];

    (void)state;
    assert_int_equal(kvf_pool_init(&pool, "test", 24, OBJECTS), KVF_OK);
    for (uint32_t i = 0; i < OBJECTS; i++) {
        objects[i] = kvf_pool_get(&pool);
        assert_non_null(objects[i]);
        assert_int_equal((uintptr_t)objects[i] % alignof(max_align_t), 0);
        assert_int_equal(kvf_pool_index(&pool, objects[i]), i);
        assert_ptr_equal(kvf_pool_at(&pool, i), objects[i]);
        memset(objects[i], (int)(0x10 + i), 24);
    }
    assert_null(kvf_pool_get(&pool));
    assert_int_equal(kvf_pool_taken_count(&pool), OBJECTS);
    for (uint32_t i = 0; i < OBJECTS; i++) {
        for (size_t b = 0; b < 24; b++) {
            assert_int_equal(((unsigned char *)objects[i])[b], 0x10 + i);
        }
        kvf_pool_put(&pool, objects[i]);
    }
    assert_int_equal(kvf_pool_fini(&pool, NULL), 0);
}

static void returned_objects_come_back_zeroed(void **state)
{
    struct kvf_pool pool;
    unsigned char *object;
    void *again;

    (void)state;
    assert_int_equal(kvf_pool_init(&pool, "test", 10, OBJECTS), KVF_OK);
    object = kvf_pool_get(&pool);
    memset(object, 0xff, 10);
    kvf_pool_put(&pool, object);
    again = kvf_pool_get(&pool);
    assert_ptr_equal(again, object);
    for (size_t i = 0; i < 10; i++) {
        assert_int_equal(object[i], 0);
    }
    kvf_pool_put(&pool, again);
    assert_int_equal(kvf_pool_fini(&pool, NULL), 0);
}

static void foreign_indexes_find_nothing(void **state)
{
    struct kvf_pool pool;
    void *object;

    (void)state;
    assert_int_equal(kvf_pool_init(&pool, "test", 8, OBJECTS), KVF_OK);
    assert_null(kvf_pool_at(&pool, 0));
    object = kvf_pool_get(&pool);
    assert_ptr_equal(kvf_pool_at(&pool, 0), object);
    assert_null(kvf_pool_at(&pool, 1));
    assert_null(kvf_pool_at(&pool, OBJECTS));
    assert_null(kvf_pool_at(&pool, UINT32_MAX));
    kvf_pool_put(&pool, object);
    assert_null(kvf_pool_at(&pool, 0));
    assert_int_equal(kvf_pool_fini(&pool, NULL), 0);
}

static void keep_line(void *arg, int severity, const char *text)
{
    assert_int_equal(severity, KVF_LOG_WARNING);
    snprintf(arg, 128, "%s", text);
}

static void leaks_are_named(void **state)
{
    char line[128] = "";
    const struct kvf_logger logger = {.fn = keep_line, .arg = line, .level = KVF_LOG_DEBUG};
    struct kvf_pool pool;

    (void)state;
    assert_int_equal(kvf_pool_init(&pool, "requests", 8, OBJECTS), KVF_OK);
    assert_non_null(kvf_pool_get(&pool));
    assert_non_null(kvf_pool_get(&pool));
    assert_int_equal(kvf_pool_fini(&pool, &logger), 2);
    assert_string_equal(line, "pool requests: 2 of 5 objects were not returned");
}

static void refusals(void **state)
{
    struct kvf_pool pool;

    (void)state;
    assert_int_equal(kvf_pool_init(&pool, "test", 0, 1), KVF_ERR_INVALID);
    assert_int_equal(kvf_pool_init(&pool, "test", 1, 0), KVF_ERR_INVALID);
    assert_int_equal(kvf_pool_init(&pool, "test", SIZE_MAX, 1), KVF_ERR_INVALID);
    assert_int_equal(kvf_pool_init(&pool, "test", (size_t)1 << 40, UINT32_MAX), KVF_ERR_NO_MEMORY);
    assert_int_equal(kvf_pool_fini(&pool, NULL), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(takes_each_once),
        cmocka_unit_test(returned_objects_come_back_zeroed),
        cmocka_unit_test(foreign_indexes_find_nothing),
        cmocka_unit_test(leaks_are_named),
        cmocka_unit_test(refusals),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
