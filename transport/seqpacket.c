/* SPDX-License-Identifier: Apache-2.0
 *
 * seqpacket.c: claim a socket path, connect to one, carry messages and descriptors (seqpacket.h).
 */
#include "transport/seqpacket.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "kvferry.h"

#define SCM_FDS_MAX  253 /* the kernel's limit for one message */
#define GIVEN_UP_MAX 16  /* clients that accept passes over in one call */

/* A bounded wait for another starting daemon, and between tries on a full backlog. */
#define LOCK_TRIES    50
#define RETRY_WAIT_MS 20

static void sleep_ms(uint32_t ms)
{
    struct timespec wait = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000};

    nanosleep(&wait, NULL);
}

static int address_of(const char *path, struct sockaddr_un *address_out, char *text_out,
                      size_t text_bytes)
{
    size_t bytes = strlen(path);

    if (bytes == 0 || bytes >= sizeof(address_out->sun_path)) {
        snprintf(
            text_out, text_bytes,
            "a socket path has 1 to %zu bytes, this one has %zu: use a shorter one than \"%s\"",
            sizeof(address_out->sun_path) - 1, bytes, path);
        return KVF_ERR_INVALID;
    }
    memset(address_out, 0, sizeof(*address_out));
    address_out->sun_family = AF_UNIX;
    memcpy(address_out->sun_path, path, bytes);
    return KVF_OK;
}

static int socket_open(void)
{
    return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

/* ----------------------------------------------------------------------------------------------
 * Listen
 */

/* Lock the folder that holds the path. Without it two daemons that both find a stale socket could
 * both remove it, the second one the first one's new socket. */
static int folder_lock(const char *path, int *fd_out, char *text_out, size_t text_bytes)
{
    char folder[sizeof(((struct sockaddr_un *)NULL)->sun_path)];
    const char *slash = strrchr(path, '/');
    int fd;

    snprintf(folder, sizeof(folder), "%.*s", slash == NULL ? 1 : (int)(slash - path + 1),
             slash == NULL ? "." : path);
    fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) {
        snprintf(text_out, text_bytes, "folder \"%s\" of socket \"%s\": %s: create it first",
                 folder, path, strerror(errno));
        return KVF_ERR_CONFIG;
    }
    for (int i = 0; flock(fd, LOCK_EX | LOCK_NB) != 0; i++) {
        if (errno != EWOULDBLOCK && errno != EINTR) {
            break; /* a file system without locks: the connect test below still holds */
        }
        if (i == LOCK_TRIES) {
            snprintf(text_out, text_bytes,
                     "folder \"%s\" is locked: another daemon is starting there", folder);
            close(fd);
            return KVF_ERR_BUSY;
        }
        sleep_ms(RETRY_WAIT_MS);
    }
    *fd_out = fd;
    return KVF_OK;
}

/* Does anybody accept on this address? Every answer but "refused" means that somebody does. */
static bool is_stale(const struct sockaddr_un *address)
{
    int fd = socket_open();
    bool stale = false;

    if (fd >= 0) {
        stale = connect(fd, (const struct sockaddr *)address, sizeof(*address)) != 0 &&
                errno == ECONNREFUSED;
        close(fd);
    }
    return stale;
}

/* Make the path free: nothing there, or a stale socket that is removed. */
static int path_claim(const struct sockaddr_un *address, char *text_out, size_t text_bytes)
{
    const char *path = address->sun_path;
    struct stat st;

    if (lstat(path, &st) != 0) {
        if (errno == ENOENT) {
            return KVF_OK;
        }
        snprintf(text_out, text_bytes, "socket \"%s\": %s", path, strerror(errno));
        return KVF_ERR_CONFIG;
    }
    if (!S_ISSOCK(st.st_mode)) {
        snprintf(text_out, text_bytes,
                 "\"%s\" is a %s, not a socket: it is left alone; move it or choose another path",
                 path,
                 S_ISDIR(st.st_mode)   ? "folder"
                 : S_ISREG(st.st_mode) ? "file"
                 : S_ISLNK(st.st_mode) ? "symbolic link"
                                       : "special file");
        return KVF_ERR_CONFIG;
    }
    if (!is_stale(address)) {
        snprintf(text_out, text_bytes,
                 "socket \"%s\" is in use by a running daemon: stop it or choose another path",
                 path);
        return KVF_ERR_BUSY;
    }
    if (unlink(path) != 0 && errno != ENOENT) {
        snprintf(text_out, text_bytes, "stale socket \"%s\" cannot be removed: %s", path,
                 strerror(errno));
        return KVF_ERR_CONFIG;
    }
    return KVF_OK;
}

/* Between bind and listen nobody can connect, so the mode is right from the first connection on,
 * without touching the umask, which belongs to the whole process. */
static int bind_and_listen(const struct kvf_seqpacket_listen_options *options,
                           const struct sockaddr_un *address,
                           struct kvf_seqpacket_listener *listener, char *text_out,
                           size_t text_bytes)
{
    const char *path = address->sun_path;
    const char *what = "bind";
    struct stat st;

    listener->fd = socket_open();
    if (listener->fd < 0) {
        what = "make a socket for";
        goto fail;
    }
    if (bind(listener->fd, (const struct sockaddr *)address, sizeof(*address)) != 0) {
        goto fail;
    }
    memcpy(listener->path, path, sizeof(listener->path));
    if (lstat(path, &st) != 0) {
        what = "look at";
        goto fail;
    }
    listener->device = st.st_dev;
    listener->inode = st.st_ino;
    if (options->set_gid && chown(path, (uid_t)-1, options->gid) != 0) {
        what = "change the group of";
        goto fail;
    }
    if (chmod(path, options->mode != 0 ? options->mode & 0777 : 0660) != 0) {
        what = "change the mode of";
        goto fail;
    }
    if (listen(listener->fd, options->backlog > 0 ? options->backlog : 16) != 0) {
        what = "listen on";
        goto fail;
    }
    return KVF_OK;

fail:
    snprintf(text_out, text_bytes, "cannot %s socket \"%s\": %s", what, path, strerror(errno));
    kvf_seqpacket_listener_close(listener);
    return KVF_ERR_CONFIG;
}

int kvf_seqpacket_listen(const struct kvf_seqpacket_listen_options *options,
                         struct kvf_seqpacket_listener *listener_out, char *text_out,
                         size_t text_bytes)
{
    struct kvf_seqpacket_listener listener = {.fd = -1};
    struct sockaddr_un address;
    int folder_fd;
    int status;

    static_assert(sizeof(listener.path) >= sizeof(address.sun_path), "a path fits");
    if (address_of(options->path, &address, text_out, text_bytes) != KVF_OK) {
        return KVF_ERR_CONFIG;
    }
    status = folder_lock(options->path, &folder_fd, text_out, text_bytes);
    if (status != KVF_OK) {
        return status;
    }
    status = path_claim(&address, text_out, text_bytes);
    if (status == KVF_OK) {
        status = bind_and_listen(options, &address, &listener, text_out, text_bytes);
    }
    close(folder_fd);
    if (status == KVF_OK) {
        *listener_out = listener;
    }
    return status;
}

void kvf_seqpacket_listener_close(struct kvf_seqpacket_listener *listener)
{
    struct stat st;

    if (listener->fd < 0) {
        return;
    }
    if (listener->path[0] != 0 && lstat(listener->path, &st) == 0 &&
        st.st_dev == listener->device && st.st_ino == listener->inode) {
        unlink(listener->path);
    }
    close(listener->fd);
    listener->fd = -1;
}

int kvf_seqpacket_accept(const struct kvf_seqpacket_listener *listener, int *fd_out)
{
    for (uint32_t i = 0; i < GIVEN_UP_MAX; i++) {
        int fd = accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        struct pollfd peer = {.fd = fd, .events = POLLRDHUP};

        if (fd < 0) {
            return errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM
                       ? KVF_ERR_BUSY
                       : KVF_EMPTY; /* nobody waits, or who waited has left */
        }

        if (poll(&peer, 1, 0) != 1 || (peer.revents & (POLLRDHUP | POLLHUP | POLLERR)) == 0) {
            *fd_out = fd;
            return KVF_OK;
        }
        close(fd); /* has waited for a daemon in vain, and is not to get memory now */
    }
    return KVF_EMPTY; /* who still waits keeps the listener readable: others have their turn */
}

/* ----------------------------------------------------------------------------------------------
 * Connect
 */
static int connect_failed(const char *path, int error, char *text_out, size_t text_bytes)
{
    switch (error) {
    case ENOENT:
    case ENOTDIR:
        snprintf(text_out, text_bytes,
                 "socket \"%s\" does not exist: is kvferryd running, and is this its path?", path);
        return KVF_ERR_NO_DAEMON;
    case ECONNREFUSED:
        snprintf(text_out, text_bytes, "nobody listens on socket \"%s\": is kvferryd running?",
                 path);
        return KVF_ERR_NO_DAEMON;
    case EACCES:
    case EPERM:
        snprintf(text_out, text_bytes,
                 "no permission for socket \"%s\": join its group, or change its mode or group in "
                 "the daemon's configuration",
                 path);
        return KVF_ERR_REFUSED;
    case EPROTOTYPE:
        snprintf(text_out, text_bytes, "socket \"%s\" is of another kind than kvferryd's", path);
        return KVF_ERR_PROTOCOL;
    case EAGAIN:
        snprintf(text_out, text_bytes,
                 "socket \"%s\" has its queue of new connections full: retry later", path);
        return KVF_ERR_BUSY;
    default:
        snprintf(text_out, text_bytes, "cannot connect to socket \"%s\": %s", path,
                 strerror(error));
        return KVF_ERR_NO_MEMORY;
    }
}

int kvf_seqpacket_connect(const char *path, uint32_t timeout_ms, int *fd_out, char *text_out,
                          size_t text_bytes)
{
    struct sockaddr_un address;
    uint32_t waited_ms = 0;
    int fd;

    if (address_of(path, &address, text_out, text_bytes) != KVF_OK) {
        return KVF_ERR_INVALID;
    }
    fd = socket_open();
    if (fd < 0) {
        return connect_failed(path, errno, text_out, text_bytes);
    }
    /* a Unix connect succeeds or fails at once; only a full backlog is worth waiting for */
    while (connect(fd, (const struct sockaddr *)&address, sizeof(address)) != 0) {
        int error = errno;

        if (error == EINTR) {
            continue;
        }
        if (error != EAGAIN || waited_ms >= timeout_ms) {
            close(fd);
            return connect_failed(path, error, text_out, text_bytes);
        }
        sleep_ms(RETRY_WAIT_MS);
        waited_ms += RETRY_WAIT_MS;
    }
    *fd_out = fd;
    return KVF_OK;
}

/* ----------------------------------------------------------------------------------------------
 * Messages
 */
union fd_control {
    struct cmsghdr align;
    uint8_t bytes[CMSG_SPACE(SCM_FDS_MAX * sizeof(int))];
};

int kvf_seqpacket_send(int fd, const void *data, size_t bytes, const int *fds, uint32_t n_fds)
{
    struct iovec part = {.iov_base = (void *)(uintptr_t)data, .iov_len = bytes};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    union fd_control control;
    ssize_t sent;

    assert(n_fds <= KVF_SEQPACKET_FDS_MAX && bytes > 0);
    if (n_fds > 0) {
        struct cmsghdr *c;

        memset(&control, 0, CMSG_SPACE(KVF_SEQPACKET_FDS_MAX * sizeof(int)));
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
        c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
        memcpy(CMSG_DATA(c), fds, n_fds * sizeof(int));
    }
    do {
        sent = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (sent < 0 && errno == EINTR);
    if (sent >= 0) {
        return KVF_OK;
    }
    if (errno == EAGAIN || errno == ENOBUFS || errno == ENOMEM || errno == ETOOMANYREFS) {
        return KVF_ERR_BUSY;
    }
    return KVF_ERR_DISCONNECTED;
}

void kvf_seqpacket_wake(int fd)
{
    const uint8_t byte = 1;

    (void)send(fd, &byte, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void kvf_seqpacket_message_close(struct kvf_seqpacket_message *message)
{
    for (uint32_t i = 0; i < message->n_fds; i++) {
        close(message->fds[i]);
    }
    message->n_fds = 0;
}

/* Collect descriptors; those that do not fit are closed. False: there were too many. */
static bool fds_collect(struct msghdr *header, struct kvf_seqpacket_message *message)
{
    bool fit = true;

    for (struct cmsghdr *c = CMSG_FIRSTHDR(header); c != NULL; c = CMSG_NXTHDR(header, c)) {
        size_t n;

        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) {
            continue;
        }
        n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;

            memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(fd));
            if (message->n_fds < KVF_SEQPACKET_FDS_MAX) {
                message->fds[message->n_fds++] = fd;
            } else {
                close(fd);
                fit = false;
            }
        }
    }
    return fit;
}

int kvf_seqpacket_recv(int fd, void *data_out, size_t data_bytes,
                       struct kvf_seqpacket_message *message_out)
{
    union fd_control control;
    struct iovec part = {.iov_base = data_out, .iov_len = data_bytes};
    struct msghdr header = {
        .msg_iov = &part,
        .msg_iovlen = 1,
        .msg_control = control.bytes,
        .msg_controllen = sizeof(control.bytes),
    };
    bool fit;
    ssize_t got;

    message_out->n_fds = 0;
    message_out->bytes = 0;
    do {
        got = recvmsg(fd, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    } while (got < 0 && errno == EINTR);
    if (got < 0) {
        return errno == EAGAIN ? KVF_EMPTY : KVF_ERR_DISCONNECTED;
    }
    fit = fds_collect(&header, message_out);
    if (got == 0) {
        /* the end of the stream; an empty message, which nobody sends, looks the same */
        kvf_seqpacket_message_close(message_out);
        return KVF_ERR_DISCONNECTED;
    }
    if (!fit || (header.msg_flags & (MSG_CTRUNC | MSG_TRUNC)) != 0) {
        kvf_seqpacket_message_close(message_out);
        return KVF_ERR_PROTOCOL;
    }
    message_out->bytes = (size_t)got;
    return KVF_OK;
}
