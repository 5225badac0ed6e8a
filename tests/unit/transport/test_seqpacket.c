/* SPDX-License-Identifier: Apache-2.0
 *
 * test_seqpacket.c: taking over, refusing and removing socket paths; messages with descriptors;
 * memory files.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fd.h"
#include "kvferry.h"
#include "tests/support/support.h"
#include "transport/segment.h"
#include "transport/seqpacket.h"

static char text[256];

static int setup(void **state)
{
    struct kvf_test_dir *dir = calloc(1, sizeof(*dir));

    if (dir == NULL) {
        return -1;
    }
    kvf_test_dir_create(dir);
    *state = dir;
    return 0;
}

static int teardown(void **state)
{
    kvf_test_dir_remove(*state);
    free(*state);
    return 0;
}

static int listen_at(const char *path, struct kvf_seqpacket_listener *listener)
{
    struct kvf_seqpacket_listen_options options = {.path = path, .mode = 0600};

    text[0] = 0;
    return kvf_seqpacket_listen(&options, listener, text, sizeof(text));
}

static void stale_sockets_are_taken_over(void **state)
{
    struct kvf_seqpacket_listener listener;
    char path[KVF_TEST_PATH_BYTES];
    struct stat st;
    int fd;

    kvf_test_dir_path(*state, "s", path);
    assert_int_equal(listen_at(path, &listener), KVF_OK);
    close(listener.fd); /* as a killed daemon leaves it */
    assert_int_equal(kvf_seqpacket_connect(path, 0, &fd, text, sizeof(text)), KVF_ERR_NO_DAEMON);
    assert_int_equal(listen_at(path, &listener), KVF_OK);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(kvf_seqpacket_connect(path, 0, &fd, text, sizeof(text)), KVF_OK);
    close(fd);
    kvf_seqpacket_listener_close(&listener);
    assert_int_equal(access(path, F_OK), -1);
    assert_int_equal(kvf_seqpacket_connect(path, 0, &fd, text, sizeof(text)), KVF_ERR_NO_DAEMON);
}

static void live_sockets_are_refused(void **state)
{
    struct kvf_seqpacket_listener first;
    struct kvf_seqpacket_listener second = {.fd = -1};
    char path[KVF_TEST_PATH_BYTES];
    int fd;

    kvf_test_dir_path(*state, "s", path);
    assert_int_equal(listen_at(path, &first), KVF_OK);
    assert_int_equal(listen_at(path, &second), KVF_ERR_BUSY);
    assert_non_null(strstr(text, path));
    assert_int_equal(kvf_seqpacket_connect(path, 0, &fd, text, sizeof(text)), KVF_OK);
    close(fd);
    kvf_seqpacket_listener_close(&first);
}

/* A later daemon's socket at the same path is not ours to remove. */
static void only_our_own_path_is_removed(void **state)
{
    struct kvf_seqpacket_listener old;
    struct kvf_seqpacket_listener new;
    char path[KVF_TEST_PATH_BYTES];

    kvf_test_dir_path(*state, "s", path);
    assert_int_equal(listen_at(path, &old), KVF_OK);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(listen_at(path, &new), KVF_OK);
    kvf_seqpacket_listener_close(&old);
    assert_int_equal(access(path, F_OK), 0);
    kvf_seqpacket_listener_close(&new);
}

static void other_things_at_the_path_are_left_alone(void **state)
{
    struct kvf_seqpacket_listener listener = {.fd = -1};
    char path[KVF_TEST_PATH_BYTES];
    char longer[300];
    char *content;

    kvf_test_dir_path(*state, "folder", path);
    assert_int_equal(mkdir(path, 0700), 0);
    assert_int_equal(listen_at(path, &listener), KVF_ERR_CONFIG);
    assert_non_null(strstr(text, "folder"));
    kvf_test_dir_path(*state, "file", path);
    kvf_test_file_write(path, "precious", 8);
    assert_int_equal(listen_at(path, &listener), KVF_ERR_CONFIG);
    assert_non_null(strstr(text, "is a file"));
    content = kvf_test_file_read(path, NULL);
    assert_string_equal(content, "precious");
    free(content);
    kvf_test_dir_path(*state, "link", path);
    assert_int_equal(symlink("file", path), 0);
    assert_int_equal(listen_at(path, &listener), KVF_ERR_CONFIG);
    kvf_test_dir_path(*state, "missing/s", path);
    assert_int_equal(listen_at(path, &listener), KVF_ERR_CONFIG);
    assert_non_null(strstr(text, "create it first"));
    memset(longer, 'x', sizeof(longer) - 1);
    longer[sizeof(longer) - 1] = 0;
    assert_int_equal(listen_at(longer, &listener), KVF_ERR_CONFIG);
    assert_non_null(strstr(text, "1 to 107 bytes"));
    assert_int_equal(listener.fd, -1);
}

static void a_stream_socket_is_told_apart(void **state)
{
    struct kvf_seqpacket_listener listener = {.fd = -1};
    char path[KVF_TEST_PATH_BYTES];
    struct {
        sa_family_t family;
        char path[108];
    } address = {.family = AF_UNIX};
    int stream = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int fd;

    kvf_test_dir_path(*state, "s", path);
    memcpy(address.path, path, strlen(path) + 1);
    assert_int_equal(bind(stream, (const struct sockaddr *)&address, sizeof(address)), 0);
    assert_int_equal(listen(stream, 1), 0);
    assert_int_equal(kvf_seqpacket_connect(path, 0, &fd, text, sizeof(text)), KVF_ERR_PROTOCOL);
    assert_int_equal(listen_at(path, &listener), KVF_ERR_BUSY);
    close(stream);
}

static void a_full_backlog_is_waited_for(void **state)
{
    struct kvf_seqpacket_listen_options options = {.backlog = 1};
    struct kvf_seqpacket_listener listener;
    char path[KVF_TEST_PATH_BYTES];
    int fds[16];
    int n = 0;
    int status = KVF_OK;

    kvf_test_dir_path(*state, "s", path);
    options.path = path;
    assert_int_equal(kvf_seqpacket_listen(&options, &listener, text, sizeof(text)), KVF_OK);
    while (n < 16 && status == KVF_OK) {
        status = kvf_seqpacket_connect(path, 0, &fds[n], text, sizeof(text));
        n += status == KVF_OK;
    }
    assert_int_equal(status, KVF_ERR_BUSY);
    assert_int_equal(kvf_seqpacket_connect(path, 30, &fds[n], text, sizeof(text)), KVF_ERR_BUSY);
    close(fds[0]); /* gives up, and is passed over */
    for (int i = 1; i < n; i++) {
        int accepted;

        assert_int_equal(kvf_seqpacket_accept(&listener, &accepted), KVF_OK);
        assert_int_equal(fcntl(accepted, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
        assert_int_equal(fcntl(accepted, F_GETFL) & O_NONBLOCK, O_NONBLOCK);
        close(accepted);
        close(fds[i]);
    }
    assert_int_equal(kvf_seqpacket_accept(&listener, &n), KVF_EMPTY);
    kvf_seqpacket_listener_close(&listener);
}

static void socket_pair(int fds[2])
{
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds), 0);
}

/* A descriptor number that is free now, to see later whether anything leaked. */
static int lowest_free(void)
{
    int fd = dup(0);

    close(fd);
    return fd;
}

static void messages_keep_their_bounds_and_descriptors(void **state)
{
    struct kvf_seqpacket_message message;
    char buffer[16];
    int fds[2];
    int send[4];
    int lowest = lowest_free();

    (void)state;
    socket_pair(fds);
    send[0] = send[1] = send[2] = send[3] = fds[0];
    assert_int_equal(kvf_seqpacket_recv(fds[1], buffer, 16, &message), KVF_EMPTY);
    assert_int_equal(kvf_seqpacket_send(fds[0], "hello", 5, send, 2), KVF_OK);
    kvf_seqpacket_wake(fds[0]);
    assert_int_equal(kvf_seqpacket_recv(fds[1], buffer, 16, &message), KVF_OK);
    assert_int_equal(message.bytes, 5);
    assert_int_equal(message.n_fds, 2);
    assert_memory_equal(buffer, "hello", 5);
    assert_int_equal(fcntl(message.fds[1], F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    kvf_seqpacket_message_close(&message);
    assert_int_equal(kvf_seqpacket_recv(fds[1], buffer, 16, &message), KVF_OK);
    assert_int_equal(message.bytes, 1);
    assert_int_equal(message.n_fds, 0);

    assert_int_equal(kvf_seqpacket_send(fds[0], "longer than the buffer", 22, send, 4), KVF_OK);
    assert_int_equal(kvf_seqpacket_recv(fds[1], buffer, 16, &message), KVF_ERR_PROTOCOL);
    assert_int_equal(message.n_fds, 0);
    close(fds[0]);
    assert_int_equal(kvf_seqpacket_recv(fds[1], buffer, 16, &message), KVF_ERR_DISCONNECTED);
    assert_int_equal(kvf_seqpacket_send(fds[1], "x", 1, NULL, 0), KVF_ERR_DISCONNECTED);
    kvf_seqpacket_wake(fds[1]); /* raises no signal */
    close(fds[1]);
    assert_int_equal(lowest_free(), lowest);
}

static void surplus_descriptors_are_closed(void **state)
{
    struct kvf_seqpacket_message message;
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(100 * sizeof(int))];
    } control;
    struct iovec part = {.iov_base = (char[]){"x"}, .iov_len = 1};
    struct msghdr header = {.msg_iov = &part,
                            .msg_iovlen = 1,
                            .msg_control = control.bytes,
                            .msg_controllen = sizeof(control.bytes)};
    int lowest = lowest_free();
    char buffer[16];
    int many[100];
    int fds[2];

    (void)state;
    socket_pair(fds);
    for (int i = 0; i < 100; i++) {
        many[i] = fds[0];
    }
    memset(&control, 0, sizeof(control));
    CMSG_FIRSTHDR(&header)->cmsg_level = SOL_SOCKET;
    CMSG_FIRSTHDR(&header)->cmsg_type = SCM_RIGHTS;
    CMSG_FIRSTHDR(&header)->cmsg_len = CMSG_LEN(sizeof(many));
    memcpy(CMSG_DATA(CMSG_FIRSTHDR(&header)), many, sizeof(many));
    assert_int_equal(sendmsg(fds[0], &header, 0), 1);
    assert_int_equal(kvf_seqpacket_recv(fds[1], buffer, 16, &message), KVF_ERR_PROTOCOL);
    assert_int_equal(message.n_fds, 0);
    close(fds[0]);
    close(fds[1]);
    assert_int_equal(lowest_free(), lowest);
}

static void a_full_queue_is_busy(void **state)
{
    char data[1000] = {0};
    int fds[2];
    int status = KVF_OK;

    (void)state;
    socket_pair(fds);
    for (int i = 0; i < 100000 && status == KVF_OK; i++) {
        status = kvf_seqpacket_send(fds[0], data, sizeof(data), NULL, 0);
    }
    assert_int_equal(status, KVF_ERR_BUSY);
    kvf_seqpacket_wake(fds[0]); /* returns */
    close(fds[0]);
    close(fds[1]);
}

static void segments_are_checked_and_mapped(void **state)
{
    struct kvf_memfd memfd;
    void *base;
    char *bytes;
    int pipe_fds[2];

    (void)state;
    assert_int_equal(kvf_memfd_create("test", 8192, KVF_HUGEPAGES_OFF, &memfd), KVF_OK);
    assert_int_equal(kvf_segment_check(memfd.fd, 8192, false, text, sizeof(text)), KVF_OK);
    assert_int_equal(kvf_segment_check(memfd.fd, 4096, false, text, sizeof(text)),
                     KVF_ERR_PROTOCOL);
    assert_int_equal(kvf_segment_check(memfd.fd, 8192, true, text, sizeof(text)), KVF_ERR_PROTOCOL);
    assert_non_null(strstr(text, "lacks seals"));
    assert_int_equal(kvf_segment_map(memfd.fd, 8192, true, &base, text, sizeof(text)), KVF_OK);
    assert_int_equal(kvf_memfd_seal(memfd.fd, KVF_SEGMENT_SEALS), KVF_OK);
    assert_int_equal(kvf_segment_check(memfd.fd, 8192, true, text, sizeof(text)), KVF_OK);
    bytes = base;
    bytes[8191] = 'x'; /* mapped before the seal, so still writable */
    assert_int_equal(kvf_segment_blank(base, 8192, false), KVF_OK);
    assert_int_equal(bytes[8191], 0);
    kvf_segment_unmap(base, 8192);
    kvf_segment_unmap(NULL, 8192);
    assert_int_equal(kvf_segment_map(memfd.fd, 8192, false, &base, text, sizeof(text)), KVF_OK);
    assert_int_equal(((const char *)base)[8191], 'x');
    kvf_segment_unmap(base, 8192);
    close(memfd.fd);
    assert_int_equal(pipe(pipe_fds), 0);
    assert_int_equal(kvf_segment_check(pipe_fds[0], 8192, false, text, sizeof(text)),
                     KVF_ERR_PROTOCOL);
    close(pipe_fds[0]);
    close(pipe_fds[1]);
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(stale_sockets_are_taken_over),
        TEST(live_sockets_are_refused),
        TEST(only_our_own_path_is_removed),
        TEST(other_things_at_the_path_are_left_alone),
        TEST(a_stream_socket_is_told_apart),
        TEST(a_full_backlog_is_waited_for),
        cmocka_unit_test(messages_keep_their_bounds_and_descriptors),
        cmocka_unit_test(surplus_descriptors_are_closed),
        cmocka_unit_test(a_full_queue_is_busy),
        cmocka_unit_test(segments_are_checked_and_mapped),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
