/* SPDX-License-Identifier: Apache-2.0
 *
 * test_session.c: a client whose socket is full when READY is due is told when there is room.
 *
 * The test has both ends of the socket and fills the daemon's with wake-ups, which clients read
 * over. The client runs on a thread of its own, the reactor is turned by the test.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "agent/core.h"
#include "tests/fault/raw_client.h"
#include "tests/support/support.h"

struct slow_client {
    struct raw_client raw;
    int daemon_fd; /* the daemon's end, once more */
    _Atomic bool may_read;
    _Atomic bool is_over;
    uint32_t n_read; /* datagrams before READY */
    bool is_ready;
};

static void fill_socket(int fd)
{
    while (send(fd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL) == 1) {
    }
}

static void *client_main(void *arg)
{
    const struct timespec nap = {.tv_nsec = 1000000};
    struct slow_client *client = arg;
    struct kvf_wire_note note = {0};
    struct kvf_wire_hello hello;
    uint8_t data[KVF_WIRE_MESSAGE_BYTES_MAX];

    raw_hello(&hello);
    if (raw_begin(&client->raw, &hello)) {
        fill_socket(client->daemon_fd);
        kvf_proto_head_init(&note.head, KVF_WIRE_MAPPED);
        note.connection_id = client->raw.welcome.connection_id;
        raw_send(&client->raw, &note, sizeof(note), NULL, 0);
        while (!atomic_load(&client->may_read)) {
            nanosleep(&nap, NULL);
        }
        while (!client->is_ready && recv(client->raw.fd, data, sizeof(data), 0) > 0) {
            client->is_ready = ((struct kvf_wire_head *)(void *)data)->type == KVF_WIRE_READY;
            client->n_read++;
        }
    }
    atomic_store(&client->is_over, true);
    return NULL;
}

static struct kvf_agent *agent_create(struct kvf_config *config, const struct kvf_test_dir *dir)
{
    struct kvf_config_error error = {{0}};
    struct kvf_agent *agent;
    char yaml[KVF_TEST_PATH_BYTES + 100];

    snprintf(yaml, sizeof(yaml), "sockets: [{path: %s/socket}]\ndram: {bytes: 16MiB}\n", dir->path);
    kvf_config_init(config);
    if (kvf_config_parse(config, "test", yaml, strlen(yaml), &error) != KVF_OK ||
        kvf_config_finish(config, &error) != KVF_OK) {
        fail_msg("%s", error.text);
    }
    assert_int_equal(kvf_agent_create(config, &agent), KVF_OK);
    assert_int_equal(kvf_agent_open(agent), KVF_OK);
    return agent;
}

static void test_ready_waits_for_room(void **state)
{
    static struct kvf_config config;
    static struct slow_client client;
    struct kvf_test_dir dir;
    struct kvf_agent *agent;
    const struct kvf_session *session;
    pthread_t thread;
    int fds[2];
    int status;

    (void)state;
    kvf_test_dir_create(&dir);
    agent = agent_create(&config, &dir);
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds), 0);
    client.raw = (struct raw_client){.fd = fds[1],
                                     .ring_fd = -1,
                                     .staging_fd = -1,
                                     .wake_fd = -1,
                                     .piece_fd = -1,
                                     .next_request = 1};
    client.daemon_fd = dup(fds[0]);
    assert_true(client.daemon_fd >= 0);
    assert_int_equal(kvf_agent_adopt(agent, 0, fds[0], 0), KVF_OK);
    session = &agent->sessions[0];
    assert_int_equal(pthread_create(&thread, NULL, client_main, &client), 0);
    while (session->state != KVF_SESSION_READY && !atomic_load(&client.is_over)) {
        assert_true(kvf_agent_turn(agent, &status));
        assert_int_not_equal(session->state, KVF_SESSION_FREE); /* it was not hung up on */
    }
    assert_true(session->owes_ready);
    atomic_store(&client.may_read, true);
    while (!atomic_load(&client.is_over)) {
        assert_true(kvf_agent_turn(agent, &status));
    }
    pthread_join(thread, NULL);
    assert_true(client.is_ready);
    assert_true(client.n_read > 1);
    assert_false(session->owes_ready);
    assert_int_equal(session->state, KVF_SESSION_READY);
    assert_int_equal(agent->metrics.protocol_errors, 0);
    raw_close(&client.raw);
    close(client.daemon_fd);
    kvf_agent_destroy(agent);
    kvf_test_dir_remove(&dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_ready_waits_for_room)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
