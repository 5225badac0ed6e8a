/* SPDX-License-Identifier: Apache-2.0
 *
 * test_owner.c: who counts as a struct's owner.
 */
#include "base/owner.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static void *bind_thread(void *arg)
{
    kvf_owner_bind(arg);
    return NULL;
}

static void *ask_thread(void *arg)
{
    return (void *)(uintptr_t)(kvf_owner_is_self(arg) ? 1 : 0);
}

static void *run(void *(*body)(void *), struct kvf_owner *owner)
{
    pthread_t thread;
    void *answer;

    assert_int_equal(pthread_create(&thread, NULL, body, owner), 0);
    assert_int_equal(pthread_join(thread, &answer), 0);
    return answer;
}

static void nobody_owns_a_zeroed_one(void **state)
{
    struct kvf_owner owner = {0};

    (void)state;
    assert_true(kvf_owner_is_self(&owner));
    assert_non_null(run(ask_thread, &owner));
}

static void only_the_owner_passes(void **state)
{
    struct kvf_owner owner = {0};

    (void)state;
    kvf_owner_bind(&owner);
    assert_true(kvf_owner_is_self(&owner));
    assert_null(run(ask_thread, &owner));
    kvf_owner_check(&owner);
    kvf_owner_release(&owner);
    assert_non_null(run(ask_thread, &owner));
}

static void ownership_moves(void **state)
{
    struct kvf_owner owner = {0};
    pthread_t other;

    (void)state;
    kvf_owner_bind(&owner);
    kvf_owner_release(&owner);
    assert_int_equal(pthread_create(&other, NULL, bind_thread, &owner), 0);
    assert_int_equal(pthread_join(other, NULL), 0);
    assert_false(kvf_owner_is_self(&owner));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nobody_owns_a_zeroed_one),
        cmocka_unit_test(only_the_owner_passes),
        cmocka_unit_test(ownership_moves),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
