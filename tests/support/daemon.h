/* SPDX-License-Identifier: Apache-2.0
 *
 * daemon.h: a real kvferryd in a directory of its own: start, kill, restart, ask.
 *
 *   create -> start -> kill or stop -> start ... -> destroy
 *
 * What cannot be done prints why, with the daemon's log, and aborts.
 *
 * With KVF_TEST_REMOTE in the environment the daemon listens for clients of other nodes, and the
 * handles that are opened here are such clients: tests of what a client sees hold for both.
 */
#ifndef KVF_TESTS_DAEMON_H
#define KVF_TESTS_DAEMON_H

#include <stdbool.h>
#include <stdint.h>

#include "kvferry.h"
#include "tests/support/support.h"

#define KVF_TEST_SETS_MAX 28

struct kvf_test_daemon {
    struct kvf_test_dir dir;
    struct kvf_test_process process;
    char socket_path[KVF_TEST_PATH_BYTES];
    char admin_path[KVF_TEST_PATH_BYTES];
    char store_path[KVF_TEST_PATH_BYTES];
    char log_path[KVF_TEST_PATH_BYTES];    /* of all starts, appended */
    char address[2 * KVF_TEST_PATH_BYTES]; /* for clients of other nodes; "": for none */
    char remote_sets[2][KVF_TEST_PATH_BYTES + 32];

    /* may be changed before each start; the strings are borrowed */
    const char *sets[KVF_TEST_SETS_MAX]; /* "section.key=value" */
    uint32_t n_sets, n_created_sets;
    const char *failpoints; /* KVFERRY_FAILPOINTS, NULL: none */
    const char *preload;    /* LD_PRELOAD, NULL: none */
    const char *extra_env;  /* one more "NAME=value", NULL: none */
};

/* A new directory; nothing runs. sets: NULL-terminated, may be NULL. Without others the arena has
 * 64 MiB in areas of 1 MiB and the store 64 MiB in segments of 4 MiB. */
void kvf_test_daemon_create(struct kvf_test_daemon *daemon, const char *const *sets);

/* Before its first start: it is for clients of other nodes, too; daemon->address is where. */
void kvf_test_daemon_make_remote(struct kvf_test_daemon *daemon);

/* Are clients those of other nodes? */
bool kvf_test_is_remote(void);

/* A port of loopback that nobody has now. None of those that the system gives to who asks for any:
 * UCX of another daemon could have it by the time it is listened on. */
uint16_t kvf_test_free_port(void);

/* One more setting for the next start. */
void kvf_test_daemon_set(struct kvf_test_daemon *daemon, const char *set);

/* The settings of its creation and this one for the next start; those added since are gone. */
void kvf_test_daemon_set_only(struct kvf_test_daemon *daemon, const char *set);

/* Start the process and return at once. */
void kvf_test_daemon_spawn(struct kvf_test_daemon *daemon);

/* Wait until a client's ping is answered. False: the process has ended before that;
 * *wait_status_out (may be NULL) is as waitpid gives it. */
bool kvf_test_daemon_wait_ready(struct kvf_test_daemon *daemon, int *wait_status_out);

/* Spawn and wait until it is ready and has all memory of its arena; aborts if it ends instead. */
void kvf_test_daemon_start(struct kvf_test_daemon *daemon);

/* Spawn one that must end by itself, wait, return its exit code (128 + signal if killed). */
int kvf_test_daemon_run_to_end(struct kvf_test_daemon *daemon);

/* SIGKILL, and wait. */
void kvf_test_daemon_kill(struct kvf_test_daemon *daemon);

/* SIGTERM, wait, return the exit code (128 + signal if killed). */
int kvf_test_daemon_stop(struct kvf_test_daemon *daemon);

/* Has it ended by itself within timeout_ms? */
bool kvf_test_daemon_has_ended(struct kvf_test_daemon *daemon, uint32_t timeout_ms,
                               int *wait_status_out);

/* Does it still run? */
bool kvf_test_daemon_is_alive(struct kvf_test_daemon *daemon);

/* Kill it if it runs, remove the directory. */
void kvf_test_daemon_destroy(struct kvf_test_daemon *daemon);

/* Is this text in the log of any start so far? */
bool kvf_test_daemon_log_has(const struct kvf_test_daemon *daemon, const char *text);

/* A number of GET /v1/stat by its path in the JSON, "metrics.protocol_errors" or "clients". */
uint64_t kvf_test_daemon_number(const struct kvf_test_daemon *daemon, const char *path);

/* A number of another GET, as "/v1/namespaces", by its path in the JSON. */
uint64_t kvf_test_daemon_ask(const struct kvf_test_daemon *daemon, const char *path,
                             const char *member);

/* POST a command, "/v1/evict?namespace=12ab", and return a number of its answer. */
uint64_t kvf_test_daemon_command(const struct kvf_test_daemon *daemon, const char *path,
                                 const char *member);

/* Wait until that number is `wanted`. False: it still is not after timeout_ms. */
bool kvf_test_daemon_wait_number(const struct kvf_test_daemon *daemon, const char *path,
                                 uint64_t wanted, uint32_t timeout_ms);

/* Client options for this daemon: its socket, warnings to stderr. */
void kvf_test_client_options(const struct kvf_test_daemon *daemon, struct kvf_options *options);

/* A handle of opaque bytes under a label (may be NULL), with 4 MiB of staging. */
struct kvf_client *kvf_test_client_open(const struct kvf_test_daemon *daemon, const char *label);

/* How much of a long test to do: `full`, or less under a sanitizer or with KVF_TEST_SCALE=percent.
 * At least 1. */
uint32_t kvf_test_scaled(uint32_t full);

/* Compiled with a sanitizer? The daemon is, too, then. */
bool kvf_test_is_sanitized(void);

#endif /* KVF_TESTS_DAEMON_H */
