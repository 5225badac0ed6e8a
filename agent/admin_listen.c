/* SPDX-License-Identifier: Apache-2.0
 *
 * admin_listen.c: listening sockets of the admin thread. The Unix one follows the rules of the
 * client sockets: the folder is locked while a stale socket is taken over, permissions are right
 * before the first connection is possible, and only our own socket is removed at the end.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "agent/admin_internal.h"
#include "base/fd.h"
#include "base/log.h"

#define BACKLOG 16

/* Open and lock the folder of a path, so that two daemons cannot both find its socket stale. */
static int lock_folder(const char *path)
{
    char folder[sizeof(((struct sockaddr_un *)0)->sun_path)];
    const char *slash = strrchr(path, '/');
    int fd;

    snprintf(folder, sizeof(folder), "%.*s", slash == path ? 1 : (int)(slash - path), path);
    fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    while (fd >= 0 && flock(fd, LOCK_EX) != 0) {
        if (errno != EINTR) {
            kvf_fd_close(&fd);
        }
    }
    return fd;
}

/* Make the path free: nothing there, or a socket at which nobody accepts. */
static int clear_path(const struct sockaddr_un *address)
{
    const char *path = address->sun_path;
    struct stat st;
    int fd;
    int error;

    if (lstat(path, &st) != 0) {
        return KVF_OK;
    }
    if (!S_ISSOCK(st.st_mode)) {
        kvf_log(KVF_LOG_ERROR, "admin socket: %s is no socket; remove it, or change admin.socket",
                path);
        return KVF_ERR_CONFIG;
    }
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    error = fd < 0 || connect(fd, (const struct sockaddr *)address, sizeof(*address)) == 0 ? 0
                                                                                           : errno;
    kvf_fd_close(&fd);
    if (error != ECONNREFUSED) {
        kvf_log(KVF_LOG_ERROR,
                "admin socket: somebody listens on %s (%s); stop that daemon, or change "
                "admin.socket",
                path, error != 0 ? strerror(error) : "it accepts");
        return KVF_ERR_BUSY;
    }
    if (unlink(path) != 0 && errno != ENOENT) {
        kvf_log(KVF_LOG_ERROR, "admin socket: stale %s cannot be removed: %s; remove it", path,
                strerror(errno));
        return KVF_ERR_CONFIG;
    }
    return KVF_OK;
}

/* Bind, and give the socket its permissions before anybody can connect. */
static int bind_unix(const struct sockaddr_un *address, mode_t mode, int64_t gid,
                     struct kvf_admin_socket *socket_out)
{
    struct stat st;

    socket_out->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (socket_out->fd < 0 ||
        bind(socket_out->fd, (const struct sockaddr *)address, sizeof(*address)) != 0) {
        kvf_log(KVF_LOG_ERROR, "admin socket: %s: %s; check the folder and its permissions",
                address->sun_path, strerror(errno));
        return KVF_ERR_CONFIG;
    }
    snprintf(socket_out->path, sizeof(socket_out->path), "%s", address->sun_path);
    if (lstat(address->sun_path, &st) == 0) {
        socket_out->device = st.st_dev;
        socket_out->inode = st.st_ino;
    }
    if ((gid >= 0 && lchown(address->sun_path, (uid_t)-1, (gid_t)gid) != 0) ||
        chmod(address->sun_path, mode) != 0 || listen(socket_out->fd, BACKLOG) != 0) {
        kvf_log(KVF_LOG_ERROR,
                "admin socket: group %" PRId64 " and mode 0%o for %s: %s; let the daemon's user "
                "be in that group",
                gid, (unsigned)mode, address->sun_path, strerror(errno));
        return KVF_ERR_CONFIG;
    }
    return KVF_OK;
}

int kvf_admin_listen_unix(const char *path, mode_t mode, int64_t gid,
                          struct kvf_admin_socket *socket_out)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int folder_fd;
    int status;

    *socket_out = (struct kvf_admin_socket){.fd = -1};
    snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
    folder_fd = lock_folder(path);
    if (folder_fd < 0) {
        kvf_log(KVF_LOG_ERROR, "admin socket: folder of %s: %s; make it, or change admin.socket",
                path, strerror(errno));
        return KVF_ERR_CONFIG;
    }
    status = clear_path(&address);
    if (status == KVF_OK) {
        status = bind_unix(&address, mode, gid, socket_out);
    }
    kvf_fd_close(&folder_fd);
    if (status != KVF_OK) {
        kvf_admin_socket_close(socket_out);
    }
    return status;
}

int kvf_admin_listen_tcp(const char *address, struct kvf_admin_socket *socket_out)
{
    struct sockaddr_storage storage;
    socklen_t bytes;
    int one = 1;

    *socket_out = (struct kvf_admin_socket){.fd = -1};
    if (kvf_config_listen_parse(address, &storage, &bytes) != KVF_OK) {
        kvf_log(KVF_LOG_ERROR, "admin.listen: '%s' is no address and port", address);
        return KVF_ERR_CONFIG;
    }
    socket_out->fd = socket(storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK,
                            IPPROTO_TCP);
    if (socket_out->fd < 0 ||
        setsockopt(socket_out->fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)) != 0 ||
        bind(socket_out->fd, (struct sockaddr *)&storage, bytes) != 0 ||
        listen(socket_out->fd, BACKLOG) != 0) {
        kvf_log(KVF_LOG_ERROR, "admin.listen: %s: %s; free the port, or choose another", address,
                strerror(errno));
        kvf_admin_socket_close(socket_out);
        return KVF_ERR_CONFIG;
    }
    return KVF_OK;
}

void kvf_admin_socket_close(struct kvf_admin_socket *socket)
{
    struct stat st;

    if (socket->fd >= 0 && socket->path[0] != '\0' && lstat(socket->path, &st) == 0 &&
        st.st_dev == socket->device && st.st_ino == socket->inode) {
        unlink(socket->path);
    }
    kvf_fd_close(&socket->fd);
}
