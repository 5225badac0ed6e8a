/* SPDX-License-Identifier: Apache-2.0
 *
 * test_own_profile.c: kvf_gpu_* by a profile of a model's own, which the daemon sends: a kind for
 * each layer, means and lists of channels that kernels are to find in device memory.
 */
#include "codec/profile_file.h"
#include "tests/gpu/calls.h"
#include "tests/unit/codec/profile_fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

enum {
    MODEL = 0x11, /* of profile_fixture.c */
};

static struct calls calls;
static struct kvf_random_seeded random_bits;

static struct kvf_profile_table *table_create(void)
{
    struct kvf_profile_table *table = profile_fixture_create(CALLS_LAYERS, CALLS_HEADS, CALLS_DIM_K,
                                                             CALLS_DIM_V);
    char why[KVF_PROFILE_WHY_BYTES];

    table->sink_tokens = 2;
    profile_fixture_add(table, profile_fixture_saw(8, KVF_TENSOR_CENTER_PROFILE),
                        profile_fixture_tq(2, KVF_TENSOR_SPLIT | KVF_TENSOR_CENTER_PROFILE));
    profile_fixture_add(table,
                        profile_fixture_tq(3, KVF_TENSOR_SPLIT | KVF_TENSOR_SCALE_LEAST_SQUARES),
                        profile_fixture_saw(4, KVF_TENSOR_CENTER_PROFILE));
    profile_fixture_add(table, profile_fixture_tq(4, KVF_TENSOR_CENTER_PROFILE),
                        profile_fixture_kivi(4, true));
    for (uint32_t layer = 0; layer < CALLS_LAYERS; layer++) {
        table->layer_kinds[layer] = (uint8_t)((layer + 1) % 3);
    }
    profile_fixture_fill(table, &random_bits);
    assert_int_equal(kvf_profile_table_validate(table, why), KVF_OK);
    return table;
}

/* Blocks there and back, again after the memory of the GPU has been given up for a while. */
static void there_and_back(void **state)
{
    struct calls_chain chain;

    (void)state;
    for (uint32_t i = 0; i < 3; i++) {
        calls.options.pinning = i;
        calls_open(&calls, "own", 1 + i);
        assert_int_equal(calls.client->plan.n_kinds, 3);
        calls_chain_init(&chain, 5, i);
        calls_chain_put_and_check(&calls, &chain);
        calls_chain_get_and_check(&calls, &chain);
        assert_int_equal(kvf_gpu_sleep(calls.gpu), KVF_OK);
        assert_int_equal(kvf_gpu_wake(calls.gpu), KVF_OK);
        calls_chain_get_and_check(&calls, &chain);
        calls_close(&calls);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(there_and_back),
    };
    const char *sets[] = {NULL, NULL};
    struct kvf_test_dir files;
    char setting[KVF_TEST_PATH_BYTES + 32];
    char path[KVF_TEST_PATH_BYTES];
    char why[KVF_PROFILE_FILE_WHY_BYTES];
    uint64_t seed;
    int failed;

    if (!calls_begin(&seed)) {
        return 77;
    }
    kvf_random_seeded_init(&random_bits, seed);
    kvf_test_dir_create(&files);
    kvf_test_dir_path(&files, "own.json", path);
    struct kvf_profile_table *table = table_create();
    assert_int_equal(kvf_profile_file_write(path, table, NULL, why), KVF_OK);
    kvf_profile_table_destroy(table);
    (void)snprintf(setting, sizeof(setting), "calibration.dir=%s", files.path);
    sets[0] = setting;
    calls.model = MODEL;
    calls_daemon_start(&calls, sets);
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    calls_daemon_stop(&calls);
    kvf_test_dir_remove(&files);
    return failed;
}
