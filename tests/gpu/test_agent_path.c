/* SPDX-License-Identifier: Apache-2.0
 *
 * test_agent_path.c: puts and gets by a worker of the daemon, in another process, over pages that
 * it opens by a handle or by descriptors: the bytes are those of the C codecs. And the ends: of the
 * worker, of the daemon, of the engine.
 */
#include "tests/gpu/calls.h"

#include <dirent.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static struct calls calls;
static uint64_t seed;

static void engine_open(const char *profile)
{
    calls.options = (struct kvf_gpu_options){.path = KVF_GPU_PATH_AGENT};
    calls_open(&calls, profile, seed);
}

static void test_bytes_are_the_same(void **state)
{
    static const char *const profiles[] = {"exact", "balanced"};
    struct calls_chain chain;

    (void)state;
    for (size_t i = 0; i < 2; i++) {
        engine_open(profiles[i]);
        calls_chain_init(&chain, 8, 19);
        calls_chain_put_and_check(&calls, &chain);
        calls_chain_get_and_check(&calls, &chain);
        calls_close(&calls);
    }
}

static void test_mapped_pieces(void **state)
{
    calls_maps = true;
    test_bytes_are_the_same(state);
    calls_maps = false;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes_are_the_same),
        cmocka_unit_test(test_mapped_pieces),
    };
    static const char *const sets[] = {"gpu.devices=all", "gpu.worker=" KVF_TEST_WORKER, NULL};
    int failed;

    if (!calls_begin(&seed)) {
        return 77;
    }
    calls_daemon_start(&calls, sets);
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    calls_daemon_stop(&calls);
    return failed;
}
