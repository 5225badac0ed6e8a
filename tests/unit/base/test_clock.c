/* SPDX-License-Identifier: Apache-2.0
 *
 * test_clock.c: the system's clocks through the environment, and the clock of tests.
 */
#include "base/env.h"
#include "tests/support/support.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include <cmocka.h>

static void system_clock_never_goes_back(void **state)
{
    struct kvf_env env = kvf_env_system();
    uint64_t last_ns = kvf_env_now_ns(&env);

    (void)state;
    for (int i = 0; i < 10000; i++) {
        uint64_t now_ns = kvf_env_now_ns(&env);

        assert_true(now_ns >= last_ns);
        last_ns = now_ns;
    }
    assert_true(kvf_now_ns() >= last_ns);
}

static void system_clock_counts_nanoseconds(void **state)
{
    const struct timespec pause = {.tv_nsec = 3 * KVF_NS_PER_MS};
    uint64_t start_ns = kvf_now_ns();

    (void)state;
    nanosleep(&pause, NULL);
    assert_true(kvf_now_ns() - start_ns >= 3 * KVF_NS_PER_MS);
}

static void wall_clock_is_of_this_century(void **state)
{
    struct kvf_env env = kvf_env_system();
    uint64_t wall_s = kvf_env_wall_s(&env);

    (void)state;
    assert_in_range(wall_s, 1700000000ull, 4102444800ull);
}

static void test_environment_repeats(void **state)
{
    struct kvf_test_clock clock = {.now_ns = 7, .wall_s = 1000};
    struct kvf_random_seeded first;
    struct kvf_random_seeded second;
    struct kvf_env env = kvf_test_env(&clock, &first);

    (void)state;
    kvf_random_seeded_init(&first, 5);
    kvf_random_seeded_init(&second, 5);
    assert_int_equal(kvf_env_now_ns(&env), 7);
    clock.now_ns += KVF_NS_PER_S;
    assert_int_equal(kvf_env_now_ns(&env), 7 + KVF_NS_PER_S);
    assert_int_equal(kvf_env_wall_s(&env), 1000);
    assert_int_equal(kvf_env_random_u64(&env), kvf_random_seeded_next(&second));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(system_clock_never_goes_back),
        cmocka_unit_test(system_clock_counts_nanoseconds),
        cmocka_unit_test(wall_clock_is_of_this_century),
        cmocka_unit_test(test_environment_repeats),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
