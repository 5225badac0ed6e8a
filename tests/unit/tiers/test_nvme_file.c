/* SPDX-License-Identifier: Apache-2.0
 *
 * test_nvme_file.c: stores on real files: made, refused, claimed, locked, resized; and how fast
 * they come back.
 */
#include "tests/support/support.h"
#include "tests/unit/tiers/test_nvme_rig.h"

#include "tiers/nvme_format.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#define SEGMENT_BYTES (64u << 10)

static struct rig rig;
static struct kvf_test_dir dir;
static char path[KVF_TEST_PATH_BYTES];

static int setup(void **state)
{
    (void)state;
    kvf_test_dir_create(&dir);
    kvf_test_dir_path(&dir, "store", path);
    rig_init_file(&rig, path, SEGMENT_BYTES, 8, KVF_IO_AUTO);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    rig_fini(&rig);
    kvf_test_dir_remove(&dir);
    return 0;
}

static struct kvf_nvme_info info(void)
{
    struct kvf_nvme_info value;

    kvf_nvme_info(rig.tier, &value);
    return value;
}

static void store_some(uint32_t first, uint32_t end)
{
    for (uint32_t key = first; key < end; key++) {
        assert_int_equal(rig_store(&rig, key, key % 4 == 0), KVF_OK);
        rig_run(&rig);
    }
}

static uint64_t file_bytes(void)
{
    struct stat st;

    assert_int_equal(stat(path, &st), 0);
    return (uint64_t)st.st_size;
}

static void test_a_missing_file_becomes_a_store(void **state)
{
    uint8_t uuid[16], id_key[32], zero[32] = {0};

    (void)state;
    assert_int_equal(rig_open(&rig), KVF_OK);
    assert_non_null(strstr(rig.why, info().engine));
    assert_int_equal(file_bytes(), (1u << 20) + 8 * SEGMENT_BYTES);
    memcpy(uuid, info().uuid, 16);
    memcpy(id_key, info().id_key, 32);
    assert_memory_not_equal(id_key, zero, 32);
    store_some(0, 12);
    rig_check_all(&rig);
    rig_close(&rig);
    assert_int_equal(rig_open(&rig), KVF_OK);
    assert_memory_equal(info().uuid, uuid, 16);
    assert_memory_equal(info().id_key, id_key, 32);
    rig_check_all(&rig);
}

static void test_an_empty_file_becomes_a_store(void **state)
{
    (void)state;
    kvf_test_file_write(path, "", 0);
    assert_int_equal(rig_open(&rig), KVF_OK);
    store_some(0, 4);
    rig_check_all(&rig);
}

static void test_a_new_store_needs_a_size(void **state)
{
    (void)state;
    rig.config.bytes = 0;
    assert_int_equal(rig_open(&rig), KVF_ERR_CONFIG);
    assert_non_null(strstr(rig.why, path));
    rig.config.bytes = (1u << 20) + 3 * SEGMENT_BYTES;
    assert_int_equal(rig_open(&rig), KVF_ERR_CONFIG);
}

static void test_a_foreign_file_is_left_alone(void **state)
{
    static const char text[] = "this is somebody's file\n";
    char *back;
    size_t bytes;

    (void)state;
    kvf_test_file_write(path, text, sizeof(text) - 1);
    assert_int_equal(rig_open(&rig), KVF_ERR_FOREIGN);
    assert_non_null(strstr(rig.why, path));
    assert_non_null(strstr(rig.why, "--format"));
    back = kvf_test_file_read(path, &bytes);
    assert_int_equal(bytes, sizeof(text) - 1);
    assert_memory_equal(back, text, bytes);
    free(back);

    /* until it is claimed */
    assert_int_equal(kvf_nvme_format(&rig.config, rig.why, sizeof(rig.why)), KVF_OK);
    assert_non_null(strstr(rig.why, "8 segments"));
    assert_int_equal(rig_open(&rig), KVF_OK);
    store_some(0, 4);
    rig_check_all(&rig);
}

static void test_format_empties_a_store(void **state)
{
    (void)state;
    assert_int_equal(rig_open(&rig), KVF_OK);
    store_some(0, 12);
    rig_close(&rig);
    assert_int_equal(kvf_nvme_format(&rig.config, rig.why, sizeof(rig.why)), KVF_OK);
    for (uint32_t key = 0; key < RIG_KEYS; key++) {
        rig.keys[key].durable = false;
    }
    rig.n_recovered = 0;
    assert_int_equal(rig_open(&rig), KVF_OK);
    assert_int_equal(rig.n_recovered, 0);
    assert_int_equal(info().segments_free, 8);
}

static void test_one_daemon_a_store(void **state)
{
    static struct rig second;

    (void)state;
    assert_int_equal(rig_open(&rig), KVF_OK);
    rig_init_file(&second, path, SEGMENT_BYTES, 8, KVF_IO_THREADS);
    second.config.lock_wait_ms = 3;
    assert_int_equal(rig_open(&second), KVF_ERR_BUSY);
    assert_non_null(strstr(second.why, "another kvferryd"));
    assert_int_equal(kvf_nvme_format(&second.config, second.why, sizeof(second.why)), KVF_ERR_BUSY);
    rig_close(&rig);
    second.config.lock_wait_ms = 2000;
    assert_int_equal(rig_open(&second), KVF_OK);
    rig_fini(&second);
}

static void test_resize(void **state)
{
    (void)state;
    assert_int_equal(rig_open(&rig), KVF_OK);
    store_some(0, 12);
    rig_close(&rig);
    rig.config.bytes = (1u << 20) + 20 * SEGMENT_BYTES;
    assert_int_equal(rig_open(&rig), KVF_OK);
    assert_int_equal(info().segments, 20);
    assert_int_equal(file_bytes(), rig.config.bytes);
    rig_check_all(&rig);
    rig_close(&rig);
    rig.config.bytes = 0; /* as it is */
    assert_int_equal(rig_open(&rig), KVF_OK);
    assert_int_equal(info().segments, 20);
    rig_close(&rig);
    rig.config.bytes = (1u << 20) + 6 * SEGMENT_BYTES;
    assert_int_equal(rig_open(&rig), KVF_OK);
    assert_int_equal(info().segments, 6);
    assert_int_equal(file_bytes(), rig.config.bytes);
    rig_check_all(&rig); /* the first six segments hold all of it */
    rig_close(&rig);
    /* truncated by somebody else: made whole again, what was cut off is gone */
    assert_int_equal(truncate(path, (1u << 20) + SEGMENT_BYTES), 0);
    for (uint32_t key = 0; key < RIG_KEYS; key++) {
        rig.keys[key].durable = false;
    }
    assert_int_equal(rig_open(&rig), KVF_OK);
    assert_int_equal(info().segments, 6);
    store_some(100, 104);
    rig_check_all(&rig);
}

static void test_what_cannot_be_opened_is_told(void **state)
{
    (void)state;
    rig.config.path = dir.path;
    assert_true(rig_open(&rig) < 0);
    assert_non_null(strstr(rig.why, dir.path));
    rig.config.path = "/nonexistent/store";
    assert_true(rig_open(&rig) < 0);
    assert_non_null(strstr(rig.why, "No such file"));
}

static void store_at_once(uint32_t first, uint32_t end)
{
    for (uint32_t key = first; key < end; key++) {
        assert_int_equal(rig_store(&rig, key, false), KVF_OK);
        if (key % 32 == 31) {
            rig_run(&rig);
        }
    }
    rig_run(&rig);
}

/* Small segments in a small store, unless asked for; an open segment is scanned once and then has a
 * footer. */
static void test_recovery_time(void **state)
{
    (void)state;
    rig.config.segment_bytes = 8u << 20;
    rig.config.bytes = (1u << 20) + (16ull << 23);
    assert_int_equal(rig_open(&rig), KVF_OK);
    assert_int_equal(info().segments, 16);
    store_at_once(0, 200);
    rig_close(&rig);
    assert_int_equal(rig_open(&rig), KVF_OK);
    assert_int_equal(info().recovered_scanned, 200);
    print_message("recovery of 128 MiB with an open segment of 8 MiB: %.1f ms\n",
                  (double)info().recovery_ns / 1e6);
    assert_true(info().recovery_ns < 5000000000ull); /* loose: tests do not depend on speed */
    rig_close(&rig);
    assert_int_equal(rig_open(&rig), KVF_OK);
    assert_int_equal(info().recovered_scanned, 0);
    assert_int_equal(info().recovered_records, 200);
    print_message("the same, sealed: %.1f ms\n", (double)info().recovery_ns / 1e6);
    rig_check_all(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
        T(test_a_missing_file_becomes_a_store),
        T(test_an_empty_file_becomes_a_store),
        T(test_a_new_store_needs_a_size),
        T(test_a_foreign_file_is_left_alone),
        T(test_format_empties_a_store),
        T(test_one_daemon_a_store),
        T(test_resize),
        T(test_what_cannot_be_opened_is_told),
        T(test_recovery_time),
#undef T
    };
    struct stat st;

    if (stat("/dev/shm", &st) == 0) {
        setenv("TMPDIR", "/dev/shm", 0); /* hundreds of syncs take seconds on a real drive */
    }

    return cmocka_run_group_tests(tests, NULL, NULL);
}
