/* SPDX-License-Identifier: Apache-2.0
 *
 * test_resolver.c: a client whose daemon is given by name, and a name server that takes questions
 * and answers none: nobody waits for it longer than for the attach, and what is left behind has a
 * bound. Runs in namespaces of its own (network and mounts); exit code 77: this user has none.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <net/if.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "client/resolve.h"
#include "kvferry.h"
#include "tests/support/support.h"

/* What one look-up takes: 30 s a question, asked 5 times. Half of that would be too long. */
#define RESOLV_CONF "nameserver 127.0.0.1\noptions timeout:30 attempts:5\n"
#define TOO_LONG_NS (75 * KVF_NS_PER_S)

static struct kvf_test_dir folder;
static char key_path[KVF_TEST_PATH_BYTES];
static int server_fd;
static _Atomic uint32_t n_questions;
static char said[4096]; /* warnings */

static void *never_answer(void *arg)
{
    char question[512];

    (void)arg;
    while (recv(server_fd, question, sizeof(question), 0) > 0) {
        atomic_fetch_add(&n_questions, 1);
    }
    return NULL;
}

static void keep_log(void *arg, int severity, const char *text)
{
    size_t used = strlen(said);

    (void)arg;
    if (severity <= 1) {
        (void)snprintf(said + used, sizeof(said) - used, "%s\n", text);
    }
}

/* Open, in vain, and say how long that took. */
static uint64_t open_in_vain(const char *host, uint32_t timeout_ms)
{
    struct kvf_options options;
    struct kvf_client *client = NULL;
    char address[2 * KVF_TEST_PATH_BYTES];
    uint64_t begin_ns = kvf_now_ns();

    (void)snprintf(address, sizeof(address), "tcp://%s:7171?key=%s", host, key_path);
    kvf_options_init(&options);
    options.socket_path = address;
    options.connect_timeout_ms = timeout_ms;
    options.log = keep_log;
    said[0] = '\0';
    assert_true(kvf_open(&options, &client) < 0);
    assert_null(client);
    return kvf_now_ns() - begin_ns;
}

static bool has_asked(void *arg)
{
    (void)arg;
    return atomic_load(&n_questions) > 0;
}

static void test_silent_server(void **state)
{
    (void)state;
    assert_true(open_in_vain("daemon.kvferry.test", 1000) < TOO_LONG_NS);
    assert_true(kvf_test_wait_until(has_asked, NULL, 60000));
    if (strstr(said, "no name server has told the address of its host in time") == NULL) {
        fail_msg("said: %s", said);
    }
}

/* Each try leaves a look-up behind; with as many as may be, the next one says so at once. */
static void test_bound(void **state)
{
    uint32_t n = 0;
    uint64_t took_ns = 0;

    (void)state;
    do {
        assert_true(n++ <= KVF_RESOLVES_MAX);
        took_ns += open_in_vain("daemon.kvferry.test", 100);
    } while (strstr(said, "no name server has answered as many look-ups") == NULL);
    assert_true(took_ns < TOO_LONG_NS);
    /* an address needs no name server */
    (void)open_in_vain("127.0.0.1", 1000);
    if (strstr(said, "is kvferryd there") == NULL) {
        fail_msg("said: %s", said);
    }
}

/* Give this process, and what it starts, another file in the place of this one. */
static bool cover(const char *path, const char *name, const char *text)
{
    char own[KVF_TEST_PATH_BYTES];

    if (access(path, F_OK) != 0) {
        return true; /* the defaults are the same */
    }
    kvf_test_dir_path(&folder, name, own);
    kvf_test_file_write(own, text, strlen(text));
    return mount(own, path, NULL, MS_BIND, NULL) == 0;
}

/* Namespaces of our own, with loopback and the server. False: not for this user. */
static bool enter(void)
{
    struct sockaddr_in at = {
        .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(53)};
    struct ifreq lo = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    pthread_t thread;

    if (unshare(CLONE_NEWNET | CLONE_NEWNS) != 0 ||
        mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        !cover("/etc/resolv.conf", "resolv.conf", RESOLV_CONF) ||
        !cover("/etc/nsswitch.conf", "nsswitch.conf", "hosts: files dns\n")) {
        return false;
    }
    server_fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    return server_fd >= 0 && ioctl(server_fd, SIOCSIFFLAGS, &lo) == 0 &&
           bind(server_fd, (const struct sockaddr *)&at, sizeof(at)) == 0 &&
           pthread_create(&thread, NULL, never_answer, NULL) == 0 && pthread_detach(thread) == 0;
}

int main(void)
{
    static const char key[] = "default 000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c"
                              "1d1e1f\n";
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_silent_server),
        cmocka_unit_test(test_bound),
    };
    int failed;

    (void)setenv("UCX_TLS", "tcp", 1);
    (void)unsetenv("LOCALDOMAIN");
    (void)setenv("RES_OPTIONS", "timeout:30 attempts:5", 1);
    kvf_test_dir_create(&folder);
    if (!enter()) {
        kvf_test_dir_remove(&folder);
        printf("no namespaces here: skipped\n");
        return 77;
    }
    kvf_test_dir_path(&folder, "client.key", key_path);
    kvf_test_file_write(key_path, key, strlen(key));
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    kvf_test_dir_remove(&folder);
    return failed;
}
