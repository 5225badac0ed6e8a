/* SPDX-License-Identifier: Apache-2.0
 *
 * test_nvme_kill.c: a process that writes to a store on a real file is killed at every failpoint of
 * the drive tier and of its I/O, again and again over the same store. What it had been told is
 * durable, and was not given up since, is there afterwards.
 *
 * The process that is killed is this program with the argument "child"; what it learns goes to a
 * journal file by plain writes, which a kill does not lose.
 */
#include "tests/support/support.h"
#include "tests/unit/tiers/test_nvme_rig.h"

#include "base/failpoint.h"

#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define SEGMENT_BYTES (64u << 10)
#define SEGMENTS      6
#define STORES        40
#define CHILD_MS      120000

static struct rig rig;
static const char *program;

/* --- the child -------------------------------------------------------------------------------- */

static int child(const char *path, const char *journal, const char *round_text)
{
    uint32_t round = (uint32_t)strtoul(round_text, NULL, 10);
    char why[256];

    if (kvf_failpoint_arm_env(why, sizeof(why)) != KVF_OK) {
        fprintf(stderr, "%s\n", why);
        return 2;
    }
    rig_init_file(&rig, path, SEGMENT_BYTES, SEGMENTS,
                  round % 2 == 0 ? KVF_IO_THREADS : KVF_IO_AUTO);
    rig.journal_fd = open(journal, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (rig_open(&rig) != KVF_OK) {
        fprintf(stderr, "%s\n", rig.why);
        return 2;
    }
    for (uint32_t i = 0; i < STORES; i++) {
        uint32_t key = (round * STORES + i) % RIG_KEYS;

        rig.keys[key].hot = key % 9 == 0;
        if (rig.keys[key].state == RIG_ABSENT) {
            rig_store(&rig, key, i % 2 == 0);
        }
        rig_run(&rig);
        if (i % 8 == 7) {
            rig_load(&rig, key);
        }
        if (i == STORES / 2) {
            rig_purge(&rig, 1000 + round % 40);
        }
    }
    rig_fini(&rig);
    return 0;
}

/* --- the parent ------------------------------------------------------------------------------- */

static void read_journal(const char *journal)
{
    size_t bytes = 0;
    char *text = kvf_test_file_read(journal, &bytes);
    const struct rig_journal_entry *entries = (const struct rig_journal_entry *)text;

    for (size_t i = 0; i < bytes / sizeof(entries[0]); i++) {
        assert_true(entries[i].key < RIG_KEYS);
        rig.keys[entries[i].key].durable = entries[i].what == '+';
    }
    free(text);
}

static bool run_child(const char *path, const char *journal, const char *failpoints, uint32_t round)
{
    struct kvf_test_process process = {0};
    char round_text[16], environment[256];
    char *const argv[] = {(char *)program, "child",    (char *)path,
                          (char *)journal, round_text, NULL};
    char *const extra[] = {environment, NULL};
    int status = 0;

    snprintf(round_text, sizeof(round_text), "%u", round);
    snprintf(environment, sizeof(environment), "KVFERRY_FAILPOINTS=%s", failpoints);
    kvf_test_process_start(&process, argv, extra, NULL);
    assert_true(kvf_test_process_wait(&process, CHILD_MS, &status));
    if (WIFSIGNALED(status)) {
        assert_int_equal(WTERMSIG(status), SIGKILL);
        return true;
    }
    assert_int_equal(WEXITSTATUS(status), 0);
    return false;
}

static void check_store(const char *path, const char *journal)
{
    rig_init_file(&rig, path, SEGMENT_BYTES, SEGMENTS, KVF_IO_AUTO);
    read_journal(journal);
    rig.journal_fd = open(journal, O_WRONLY | O_APPEND | O_CLOEXEC);
    assert_int_equal(rig_open(&rig), KVF_OK);
    rig_check_all(&rig);
    close(rig.journal_fd);
    rig_fini(&rig);
}

static void test_kill_everywhere(void **state)
{
    static const char *const points[] = {
        "nvme.segment_header",
        "nvme.record_write",
        "nvme.record_read",
        "nvme.footer",
        "nvme.epoch_write",
        "nvme.record_done",
        "nvme.seal",
        "nvme.reuse_before",
        "nvme.reuse_after",
        "nvme.recover_read",
        "nvme.recover_scan",
        "nvme.recover_seal",
        "io.read",
        "io.write",
        "io.sync",
    };
    static const uint32_t hits[] = {1, 2, 5, 12};
    struct kvf_test_dir dir;
    char path[KVF_TEST_PATH_BYTES], journal[KVF_TEST_PATH_BYTES];
    uint32_t kills = 0, round = 0;

    (void)state;
    kvf_test_dir_create(&dir);
    kvf_test_dir_path(&dir, "store", path);
    kvf_test_dir_path(&dir, "journal", journal);
    assert_false(run_child(path, journal, "", round++)); /* makes the store */
    for (uint32_t hit = 0; hit < 4; hit++) {
        for (uint32_t i = 0; i < sizeof(points) / sizeof(points[0]); i++) {
            char failpoints[64];

            snprintf(failpoints, sizeof(failpoints), "%s=kill@%u", points[i], hits[hit]);
            kills += run_child(path, journal, failpoints, round++);
            check_store(path, journal);
        }
    }
    print_message("%u kills in %u runs\n", kills, round);
    assert_true(kills > 40);
    kvf_test_dir_remove(&dir);
}

/* Killed while the store is being made: the next start makes it, and no question is asked. */
static void test_kill_during_format(void **state)
{
    struct kvf_test_dir dir;
    char path[KVF_TEST_PATH_BYTES], journal[KVF_TEST_PATH_BYTES];

    (void)state;
    for (uint32_t hit = 1; hit <= 3; hit++) {
        char failpoints[64];

        kvf_test_dir_create(&dir);
        kvf_test_dir_path(&dir, "store", path);
        kvf_test_dir_path(&dir, "journal", journal);
        snprintf(failpoints, sizeof(failpoints), "nvme.superblock_write=kill@%u", hit);
        assert_true(run_child(path, journal, failpoints, 0));
        assert_false(run_child(path, journal, "", 0));
        check_store(path, journal);
        kvf_test_dir_remove(&dir);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kill_everywhere),
        cmocka_unit_test(test_kill_during_format),
    };
    struct stat st;

    if (argc == 5 && strcmp(argv[1], "child") == 0) {
        return child(argv[2], argv[3], argv[4]);
    }
    program = argv[0];
    if (stat("/dev/shm", &st) == 0) {
        setenv("TMPDIR", "/dev/shm", 0); /* a kill does not need a slow sync */
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
