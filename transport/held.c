/* SPDX-License-Identifier: Apache-2.0
 *
 * held.c: locks of open file descriptions on single bytes (held.h). They belong to the descriptor
 * and not to the process, which may have several handles.
 */
#include "transport/held.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kvferry.h"

#define PATH_BYTES 128 /* a socket's path has 107 characters at most */

static int held_open(const char *socket_path, int flags, mode_t mode)
{
    char path[PATH_BYTES];
    struct stat st;
    int fd;

    if (snprintf(path, sizeof(path), "%s.held", socket_path) >= (int)sizeof(path)) {
        errno = ENAMETOOLONG;
        return -1;
    }
    fd = open(path, flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, mode);
    if (fd >= 0 && (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode))) {
        (void)close(fd);
        errno = EINVAL;
        return -1;
    }
    return fd;
}

static off_t byte_of(uint64_t incarnation)
{
    return (off_t)(incarnation >> 2);
}

int kvf_held_make(const char *socket_path, mode_t mode, bool set_gid, gid_t gid)
{
    int fd = held_open(socket_path, O_RDONLY | O_CREAT, 0600);
    int status = KVF_OK;

    if (fd < 0) {
        return KVF_ERR_IO;
    }
    /* to connect is to write to a socket; to lock is to read a file */
    mode = 0600 | (mode & 0060 ? 0040 : 0) | (mode & 0006 ? 0004 : 0);
    if ((set_gid && fchown(fd, (uid_t)-1, gid) != 0) || fchmod(fd, mode) != 0) {
        status = KVF_ERR_IO;
    }
    (void)close(fd);
    return status;
}

int kvf_held_lock(const char *socket_path, uint64_t incarnation)
{
    struct flock lock = {
        .l_type = F_RDLCK,
        .l_whence = SEEK_SET,
        .l_start = byte_of(incarnation),
        .l_len = 1,
    };
    int fd = held_open(socket_path, O_RDONLY, 0);

    if (fd >= 0 && fcntl(fd, F_OFD_SETLK, &lock) != 0) {
        (void)close(fd);
        fd = -1;
    }
    return fd;
}

/* Could a lock on these bytes not be had? bytes 0: to the end of all files. */
static bool is_locked(int fd, off_t start, off_t bytes)
{
    struct flock lock = {
        .l_type = F_WRLCK,
        .l_whence = SEEK_SET,
        .l_start = start,
        .l_len = bytes,
    };

    return fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

bool kvf_held_by_others(const char *socket_path, uint64_t incarnation)
{
    int fd = held_open(socket_path, O_RDONLY, 0);
    off_t ours = byte_of(incarnation);
    bool is_held;

    if (fd < 0) {
        return false;
    }
    is_held = (ours > 0 && is_locked(fd, 0, ours)) || is_locked(fd, ours + 1, 0);
    (void)close(fd);
    return is_held;
}
