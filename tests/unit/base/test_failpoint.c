/* SPDX-License-Identifier: Apache-2.0
 *
 * test_failpoint.c: arming, counting, each action, and what a wrong specification says.
 */
#include "base/failpoint.h"

#include "base/clock.h"
#include "base/limits.h"
#include "tests/support/support.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include <cmocka.h>

/* Given as the only argument, this program hits one point three times, for the test of kill. */
#define CHILD_ARGUMENT "hit-three-times"

static char *self_path;

static void arm(const char *spec)
{
    char error[KVF_ERROR_TEXT_BYTES] = "";

    assert_int_equal(kvf_failpoint_arm(spec, error, sizeof(error)), KVF_OK);
    assert_string_equal(error, "");
}

static void nothing_is_armed_at_first(void **state)
{
    (void)state;
    assert_int_equal(KVF_FAILPOINT(nvme_record_write), KVF_OK);
    assert_int_equal(kvf_failpoint_hit_count(KVF_FAILPOINT_nvme_record_write), 0);
}

static void errors_at_one_hit(void **state)
{
    (void)state;
    arm("nvme.footer=error@2");
    assert_int_equal(KVF_FAILPOINT(nvme_footer), KVF_OK);
    assert_int_equal(KVF_FAILPOINT(nvme_footer), KVF_ERR_IO);
    assert_int_equal(KVF_FAILPOINT(nvme_footer), KVF_OK);
    assert_int_equal(KVF_FAILPOINT(nvme_record_write), KVF_OK);
    assert_int_equal(kvf_failpoint_hit_count(KVF_FAILPOINT_nvme_footer), 3);
    assert_int_equal(kvf_failpoint_hit_count(KVF_FAILPOINT_nvme_record_write), 0);
}

static void errors_from_a_hit_on_and_always(void **state)
{
    (void)state;
    arm("nvme.footer=error@3+;nvme.record_read=error;");
    for (int hit = 1; hit <= 5; hit++) {
        assert_int_equal(KVF_FAILPOINT(nvme_footer), hit >= 3 ? KVF_ERR_IO : KVF_OK);
        assert_int_equal(KVF_FAILPOINT(nvme_record_read), KVF_ERR_IO);
    }
    arm("");
    assert_int_equal(KVF_FAILPOINT(nvme_record_read), KVF_OK);
    assert_int_equal(kvf_failpoint_hit_count(KVF_FAILPOINT_nvme_record_read), 0);
}

static void delays(void **state)
{
    uint64_t start_ns;

    (void)state;
    arm("nvme.record_write=delay:20ms@1");
    start_ns = kvf_now_ns();
    assert_int_equal(KVF_FAILPOINT(nvme_record_write), KVF_OK);
    assert_true(kvf_now_ns() - start_ns >= 20 * KVF_NS_PER_MS);
    arm(NULL);
}

static int run_child(const char *spec)
{
    struct kvf_test_process child;
    char environment[128];
    char *argv[] = {self_path, (char[]){CHILD_ARGUMENT}, NULL};
    char *env[] = {environment, NULL};
    int wait_status = 0;

    snprintf(environment, sizeof(environment), "KVFERRY_FAILPOINTS=%s", spec);
    kvf_test_process_start(&child, argv, env, "/dev/null");
    assert_true(kvf_test_process_wait(&child, 30000, &wait_status));
    return wait_status;
}

static void kills_the_process(void **state)
{
    int wait_status;

    (void)state;
    wait_status = run_child("nvme.record_write=kill@3");
    assert_true(WIFSIGNALED(wait_status));
    assert_int_equal(WTERMSIG(wait_status), SIGKILL);
    wait_status = run_child("nvme.record_write=kill@4");
    assert_true(WIFEXITED(wait_status));
    assert_int_equal(WEXITSTATUS(wait_status), 0);
}

static void refuses(const char *spec, const char *expected_error)
{
    char error[KVF_ERROR_TEXT_BYTES] = "";

    assert_int_equal(kvf_failpoint_arm(spec, error, sizeof(error)), KVF_ERR_INVALID);
    assert_string_equal(error, expected_error);
}

static void wrong_specifications_change_nothing(void **state)
{
    char longer[300];

    (void)state;
    arm("nvme.footer=error");
    refuses("nvme.foter=error", "no failpoint is named 'nvme.foter'");
    refuses("nvme.footer", "'nvme.footer' is not name=action");
    refuses("nvme.footer=explode", "unknown action 'explode': use error, kill or delay:<duration>");
    refuses("nvme.footer=error@0", "hits count from 1");
    refuses("nvme.footer=error@", "'' does not begin with a digit");
    refuses("nvme.footer=error@2x", "'2x' is not a whole number: 'x' follows it");
    refuses("nvme.footer=delay:5", "'5' has no unit: use us, ms, s, min or h");
    refuses("nvme.record_read=error;nvme.footer=nothing",
            "unknown action 'nothing': use error, kill or delay:<duration>");
    memset(longer, 'n', sizeof(longer) - 1);
    longer[sizeof(longer) - 1] = '\0';
    refuses(longer, "an entry is longer than 127 bytes");
    assert_int_equal(KVF_FAILPOINT(nvme_footer), KVF_ERR_IO);
    assert_int_equal(KVF_FAILPOINT(nvme_record_read), KVF_OK);
    arm("");
}

static int child_main(void)
{
    char error[KVF_ERROR_TEXT_BYTES];

    if (kvf_failpoint_arm_env(error, sizeof(error)) != KVF_OK) {
        return 1;
    }
    for (int i = 0; i < 3; i++) {
        if (KVF_FAILPOINT(nvme_record_write) != KVF_OK) {
            return 2;
        }
    }
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_is_armed_at_first),
        cmocka_unit_test(errors_at_one_hit),
        cmocka_unit_test(errors_from_a_hit_on_and_always),
        cmocka_unit_test(delays),
        cmocka_unit_test(kills_the_process),
        cmocka_unit_test(wrong_specifications_change_nothing),
    };

    if (argc == 2 && strcmp(argv[1], CHILD_ARGUMENT) == 0) {
        return child_main();
    }
    self_path = argv[0];
    return cmocka_run_group_tests(tests, NULL, NULL);
}
