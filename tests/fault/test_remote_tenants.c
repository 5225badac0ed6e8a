/* SPDX-License-Identifier: Apache-2.0
 *
 * test_remote_tenants.c: clients on other nodes of several tenants and addresses: none of them
 * takes the places of all, and who breaks the protocol at one address delays nobody at another. The
 * addresses are those of network namespaces; without any that test is left out.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <sched.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/hash.h"
#include "tests/fault/breaker.h"
#include "tests/support/blocks.h"
#include "tests/support/daemon.h"
#include "transport/net_proto.h"

#define WAIT_MS   60000u
#define TENANTS   2
#define SHARE     3
#define SPACES    3
#define WORDS_MAX 24

static const char *const names[TENANTS] = {"one", "two"};

static struct kvf_test_daemon the_daemon;
static char sockets[2 * TENANTS][KVF_TEST_PATH_BYTES + 32];
static char listen_set[64], key_set[KVF_TEST_PATH_BYTES + 32];
static char addresses[TENANTS][2 * KVF_TEST_PATH_BYTES];
static char said[4096];

static void keep_log(void *arg, int severity, const char *text)
{
    (void)arg;
    if (severity <= 1) {
        (void)snprintf(said, sizeof(said), "%s", text);
    }
}

/* A daemon of two tenants, and where the clients of each find it. */
static void daemon_create(const char *host)
{
    static const uint8_t cluster_key[32] = {4, 5, 6};
    char path[KVF_TEST_PATH_BYTES];
    uint16_t port = kvf_test_free_port();

    kvf_test_daemon_create(&the_daemon, NULL);
    kvf_test_dir_path(&the_daemon.dir, "cluster.key", path);
    kvf_test_file_write(path, cluster_key, sizeof(cluster_key));
    (void)snprintf(key_set, sizeof(key_set), "cluster_key=%s", path);
    (void)snprintf(listen_set, sizeof(listen_set), "peers.listen=%s:%u", host, port);
    kvf_test_daemon_set(&the_daemon, key_set);
    kvf_test_daemon_set(&the_daemon, listen_set);
    for (uint32_t i = 0; i < TENANTS; i++) {
        uint8_t key[32];
        char line[128];
        char name[16];
        int length = snprintf(line, sizeof(line), "%s ", names[i]);

        kvf_net_client_key(cluster_key, names[i], key);
        for (size_t k = 0; k < sizeof(key); k++) {
            length += snprintf(line + length, sizeof(line) - (size_t)length, "%02x", key[k]);
        }
        (void)snprintf(name, sizeof(name), "%s.key", names[i]);
        kvf_test_dir_path(&the_daemon.dir, name, path);
        kvf_test_file_write(path, line, strlen(line));
        (void)snprintf(addresses[i], sizeof(addresses[i]), "tcp://%s:%u?key=%s", host, port, path);
        kvf_test_dir_path(&the_daemon.dir, names[i], path);
        (void)snprintf(sockets[2 * i], sizeof(sockets[0]), "sockets.%u.path=%s", i,
                       i == 0 ? the_daemon.socket_path : path);
        (void)snprintf(sockets[2 * i + 1], sizeof(sockets[0]), "sockets.%u.tenant=%s", i, names[i]);
        kvf_test_daemon_set(&the_daemon, sockets[2 * i]);
        kvf_test_daemon_set(&the_daemon, sockets[2 * i + 1]);
    }
}

static int open_at(uint32_t tenant, uint32_t timeout_ms, struct kvf_client **client_out)
{
    struct kvf_options options;

    kvf_test_client_options(&the_daemon, &options);
    options.socket_path = addresses[tenant];
    options.staging_bytes = 1 << 20;
    options.connect_timeout_ms = timeout_ms;
    options.log = keep_log;
    said[0] = '\0';
    return kvf_open(&options, client_out);
}

static int teardown(void **state)
{
    (void)state;
    kvf_test_daemon_destroy(&the_daemon);
    return 0;
}

/* ----------------------------------------------------------------------------------------------
 * Places
 */
static bool has_place(void *arg)
{
    return open_at(0, WAIT_MS, arg) == KVF_OK;
}

static void test_share(void **state)
{
    struct kvf_client *clients[SHARE] = {NULL};
    struct kvf_client *other = NULL;
    struct kvf_client *late = NULL;

    (void)state;
    daemon_create("127.0.0.1");
    kvf_test_daemon_set(&the_daemon, "peers.tenant_clients=3");
    kvf_test_daemon_start(&the_daemon);
    for (uint32_t i = 0; i < SHARE; i++) {
        assert_int_equal(open_at(0, WAIT_MS, &clients[i]), KVF_OK);
    }
    assert_int_equal(open_at(0, 1000, &late), KVF_ERR_BUSY);
    if (strstr(said, "as peers.tenant_clients allows; use another node") == NULL) {
        fail_msg("said: %s", said);
    }
    /* the other tenant has its own, and whoever goes makes room */
    assert_int_equal(open_at(1, WAIT_MS, &other), KVF_OK);
    assert_int_equal(kvf_test_block_put(other, 1, 5000, 0), KVF_OK);
    kvf_close(clients[0]);
    assert_true(kvf_test_wait_until(has_place, &late, WAIT_MS));
    assert_int_equal(kvf_test_block_put(late, 1, 5000, 0), KVF_OK);
    kvf_close(late);
    kvf_close(other);
    for (uint32_t i = 1; i < SHARE; i++) {
        kvf_close(clients[i]);
    }
}

/* ----------------------------------------------------------------------------------------------
 * Addresses
 */

static char spaces[SPACES][32]; /* network namespaces: the daemon's, and of two other nodes */

/* Run ip(8) with these words, and say nothing. False: it cannot. */
static bool __attribute__((format(printf, 1, 2))) ip(const char *fmt, ...)
{
    posix_spawn_file_actions_t actions;
    char words[256];
    char *argv[WORDS_MAX] = {(char *)"ip", NULL};
    char *rest = words;
    int wait_status = -1;
    va_list args;
    size_t n = 1;
    pid_t pid;

    va_start(args, fmt);
    (void)vsnprintf(words, sizeof(words), fmt, args);
    va_end(args);
    while (n + 1 < WORDS_MAX && (argv[n] = strtok_r(rest, " ", &rest)) != NULL) {
        n++;
    }
    assert_int_equal(posix_spawn_file_actions_init(&actions), 0);
    (void)posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    if (posix_spawnp(&pid, "ip", &actions, NULL, argv, environ) == 0) {
        (void)waitpid(pid, &wait_status, 0);
    }
    (void)posix_spawn_file_actions_destroy(&actions);
    return wait_status == 0;
}

/* This process, and what it starts, is in that one from now on; /sys is, too: UCX looks there. */
static bool go_to(uint32_t i)
{
    char path[64];
    bool is_there;
    int fd;

    (void)snprintf(path, sizeof(path), "/run/netns/%s", spaces[i]);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    is_there = fd >= 0 && setns(fd, CLONE_NEWNET) == 0 && umount2("/sys", MNT_DETACH) == 0 &&
               mount("sysfs", "/sys", "sysfs", 0, NULL) == 0;
    close(fd);
    return is_there;
}

static void offend(void)
{
    struct breaker breaker;

    breaker_init(&breaker);
    breaker.submit.sqe.opcode = 200;
    assert_false(breaker_is_taken(&breaker, addresses[0], WAIT_MS));
    if (!breaker.has_submitted) {
        fail_msg("down before it could offend: %s", breaker.why);
    }
}

static void come_and_go(uint32_t tenant)
{
    struct kvf_client *client = NULL;

    if (open_at(tenant, WAIT_MS, &client) != KVF_OK) {
        fail_msg("said: %s", said);
    }
    kvf_close(client);
}

static uint64_t delayed(void)
{
    return kvf_test_daemon_number(&the_daemon, "metrics.attach_delayed");
}

static void test_offender(void **state)
{
    uint64_t before;

    (void)state;
    daemon_create("10.77.0.1");
    assert_true(go_to(0));
    kvf_test_daemon_start(&the_daemon);
    assert_true(go_to(1));
    /* on a machine that stands still between two attaches, the delay can be over already */
    for (uint32_t i = 0; i < 50 && delayed() < 3; i++) {
        offend();
    }
    before = delayed();
    assert_true(before >= 3);
    /* of the same tenant at another address, and of the other tenant */
    assert_true(go_to(2));
    come_and_go(0);
    assert_int_equal(delayed(), before);
    assert_true(go_to(1));
    come_and_go(1);
    assert_int_equal(delayed(), before);
    come_and_go(0); /* whoever offended gets in in the end */
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.protocol_errors"), 0);
    assert_true(kvf_test_daemon_number(&the_daemon, "metrics.peer_protocol_errors") >= 3);
}

static bool is_up(uint32_t space, const char *path)
{
    size_t bytes = 0;
    char *state = go_to(space) ? kvf_test_file_read(path, &bytes) : NULL;
    bool up = state != NULL && bytes >= 2 && memcmp(state, "up", 2) == 0;

    free(state);
    return up;
}

/* All ends of the wires are up. */
static bool is_wired(void *arg)
{
    (void)arg;
    return is_up(0, "/sys/class/net/near1/operstate") &&
           is_up(0, "/sys/class/net/near2/operstate") && is_up(1, "/sys/class/net/far/operstate") &&
           is_up(2, "/sys/class/net/far/operstate");
}

/* The daemon's network, and two others with a wire to it each. False: not for this user. */
static bool make_spaces(void)
{
    bool made = unshare(CLONE_NEWNS) == 0 &&
                mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0;

    for (int i = 0; i < SPACES && made; i++) {
        (void)snprintf(spaces[i], sizeof(spaces[i]), "kvfrt%d%c", getpid(), 'a' + i);
        made = ip("netns add %s", spaces[i]) && ip("-n %s link set lo up", spaces[i]);
    }
    for (int i = 1; i < SPACES && made; i++) {
        made = ip("link add near%d netns %s type veth peer name far netns %s", i, spaces[0],
                  spaces[i]) &&
               ip("-n %s addr add 10.77.%d.1/24 dev near%d", spaces[0], i - 1, i) &&
               ip("-n %s addr add 10.77.%d.2/24 dev far", spaces[i], i - 1) &&
               ip("-n %s link set near%d up", spaces[0], i) &&
               ip("-n %s link set far up", spaces[i]) &&
               ip("-n %s route add default via 10.77.%d.1", spaces[i], i - 1);
    }
    return made && kvf_test_wait_until(is_wired, NULL, WAIT_MS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_share, teardown),
        cmocka_unit_test_teardown(test_offender, teardown),
    };
    const struct CMUnitTest places[] = {tests[0]};
    int failed;

    if (kvf_hash_init_library() != KVF_OK) {
        return 1;
    }
    (void)setenv("UCX_TLS", "tcp", 1);
    (void)unsetenv("KVFERRY_KEY");
    if (make_spaces()) {
        failed = cmocka_run_group_tests(tests, NULL, NULL);
    } else {
        printf("no network namespaces here: addresses are left out\n");
        failed = cmocka_run_group_tests(places, NULL, NULL);
    }
    for (uint32_t i = 0; i < SPACES; i++) {
        (void)ip("netns del %s", spaces[i]);
    }
    return failed;
}
