/* SPDX-License-Identifier: Apache-2.0
 *
 * support.h: what several test programs need: seeds, temporary directories, files, waiting, a clock
 * that only moves when told, and other processes.
 *
 * A helper that cannot do its work prints why and aborts: the test could not mean anything after
 * that.
 */
#ifndef KVF_TESTS_SUPPORT_H
#define KVF_TESTS_SUPPORT_H

#include "base/env.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* --- seeds --- */

/* KVF_TEST_SEED if it is set, else a new seed; printed, so that a failure can be repeated. */
uint64_t kvf_test_seed(void);

/* --- files --- */

#define KVF_TEST_PATH_BYTES 256

struct kvf_test_dir {
    char path[KVF_TEST_PATH_BYTES];
};

/* A new empty directory under $TMPDIR or /tmp. */
void kvf_test_dir_create(struct kvf_test_dir *dir);

/* Remove it and all that is in it. Accepts a zeroed struct. */
void kvf_test_dir_remove(struct kvf_test_dir *dir);

/* "<dir>/<name>" into path_out. */
void kvf_test_dir_path(const struct kvf_test_dir *dir, const char *name,
                       char path_out[KVF_TEST_PATH_BYTES]);

/* The whole file with a zero byte after it; *bytes_out (may be NULL) does not count that one. NULL
 * if it cannot be opened. The caller frees. */
char *kvf_test_file_read(const char *path, size_t *bytes_out);

/* Create or replace a file. */
void kvf_test_file_write(const char *path, const void *data, size_t bytes);

/* --- time --- */

/* Ask again and again, sleeping in between, until condition(arg) or timeout_ms. Returns its last
 * answer. */
bool kvf_test_wait_until(bool (*condition)(void *arg), void *arg, uint32_t timeout_ms);

/* A clock that stands still until the test moves it. */
struct kvf_test_clock {
    uint64_t now_ns;
    uint64_t wall_s;
};

/* The environment of a component under test: this clock, and random numbers from this generator. */
struct kvf_env kvf_test_env(struct kvf_test_clock *clock, struct kvf_random_seeded *random);

/* --- processes --- */

struct kvf_test_process {
    pid_t pid; /* 0: none */
};

/* Start argv[0] (a path) with the environment of this process plus the "NAME=value" strings of
 * extra_env (NULL-terminated; may be NULL). Output goes to output_path, or where ours goes if that
 * is NULL. It dies with SIGKILL when kvf_test_process_stop is called, and is not waited for
 * elsewhere. */
void kvf_test_process_start(struct kvf_test_process *process, char *const argv[],
                            char *const extra_env[], const char *output_path);

/* Send a signal. */
void kvf_test_process_signal(const struct kvf_test_process *process, int signal_number);

/* Wait for its end. True: *wait_status_out is as waitpid gives it, and the process is gone. False:
 * it still runs after timeout_ms. */
bool kvf_test_process_wait(struct kvf_test_process *process, uint32_t timeout_ms,
                           int *wait_status_out);

/* Kill it if it still runs, and wait. Accepts a zeroed struct. */
void kvf_test_process_stop(struct kvf_test_process *process);

#endif /* KVF_TESTS_SUPPORT_H */
