/* SPDX-License-Identifier: Apache-2.0
 *
 * process.c: starting, killing and waiting for the processes of a test.
 *
 * posix_spawn and not fork: a test program has threads, and with a sanitizer a large address space.
 */
#include "tests/support/support.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static void die(const char *what, const char *which, int error_number)
{
    fprintf(stderr, "test support: %s %s: %s\n", what, which, strerror(error_number));
    abort();
}

/* The environment of this process with the strings of extra_env in front, where getenv finds them
 * first. The strings are borrowed; the caller frees the array. */
static char **environment_with(char *const extra_env[])
{
    size_t extra_count = 0;
    size_t own_count = 0;
    char **joined;

    while (extra_env != NULL && extra_env[extra_count] != NULL) {
        extra_count++;
    }
    while (environ[own_count] != NULL) {
        own_count++;
    }
    joined = calloc(extra_count + own_count + 1, sizeof(*joined));
    if (joined == NULL) {
        die("cannot allocate the environment of", "a process", ENOMEM);
    }
    for (size_t i = 0; i < extra_count; i++) {
        joined[i] = extra_env[i];
    }
    memcpy(joined + extra_count, environ, own_count * sizeof(*joined));
    return joined;
}

void kvf_test_process_start(struct kvf_test_process *process, char *const argv[],
                            char *const extra_env[], const char *output_path)
{
    char **environment = environment_with(extra_env);
    posix_spawn_file_actions_t actions;
    int rc;

    posix_spawn_file_actions_init(&actions);
    if (output_path != NULL) {
        posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, output_path,
                                         O_WRONLY | O_CREAT | O_APPEND, 0600);
        posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
    }
    rc = posix_spawn(&process->pid, argv[0], &actions, NULL, argv, environment);
    posix_spawn_file_actions_destroy(&actions);
    free(environment);
    if (rc != 0) {
        die("cannot start", argv[0], rc);
    }
}

void kvf_test_process_signal(const struct kvf_test_process *process, int signal_number)
{
    if (process->pid <= 0 || kill(process->pid, signal_number) != 0) {
        die("cannot send a signal to", "a process", errno);
    }
}

struct ended {
    pid_t pid;
    int wait_status;
};

static bool has_ended(void *arg)
{
    struct ended *ended = arg;
    pid_t pid = waitpid(ended->pid, &ended->wait_status, WNOHANG);

    if (pid < 0 && errno != EINTR) {
        die("cannot wait for", "a process", errno);
    }
    return pid == ended->pid;
}

bool kvf_test_process_wait(struct kvf_test_process *process, uint32_t timeout_ms,
                           int *wait_status_out)
{
    struct ended ended = {.pid = process->pid};

    if (!kvf_test_wait_until(has_ended, &ended, timeout_ms)) {
        return false;
    }
    process->pid = 0;
    *wait_status_out = ended.wait_status;
    return true;
}

void kvf_test_process_stop(struct kvf_test_process *process)
{
    if (process->pid <= 0) {
        return;
    }
    kill(process->pid, SIGKILL);
    while (waitpid(process->pid, NULL, 0) < 0 && errno == EINTR) {
    }
    process->pid = 0;
}
