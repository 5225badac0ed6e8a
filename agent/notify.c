/* SPDX-License-Identifier: Apache-2.0
 *
 * notify.c: one datagram a message to the service manager's socket.
 */
#include "agent/notify.h"

#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "base/clock.h"
#include "base/log.h"

/* Written by init only, before there are threads and handlers. */
static int notify_fd = -1;
static struct sockaddr_un notify_address;
static socklen_t notify_address_bytes;

void kvf_notify_init(void)
{
    const char *path = getenv("NOTIFY_SOCKET");
    size_t length;

    if (path == NULL || path[0] == '\0') {
        return;
    }
    length = strlen(path);
    if ((path[0] != '/' && path[0] != '@') || length >= sizeof(notify_address.sun_path)) {
        kvf_log(KVF_LOG_WARNING, "NOTIFY_SOCKET is neither a path nor an abstract name; ignored");
        return;
    }
    notify_address.sun_family = AF_UNIX;
    memcpy(notify_address.sun_path, path, length);
    if (path[0] == '@') {
        notify_address.sun_path[0] = '\0';
    }
    /* The length says where an abstract name ends; a path carries its terminator. */
    notify_address_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length +
                                       (path[0] == '/' ? 1 : 0));
    notify_fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (notify_fd < 0) {
        kvf_log(KVF_LOG_WARNING, "no socket for NOTIFY_SOCKET: %s", strerror(errno));
    }
}

void kvf_notify(const char *state)
{
    int saved_errno = errno;

    if (notify_fd >= 0) {
        (void)sendto(notify_fd, state, strlen(state), MSG_NOSIGNAL | MSG_DONTWAIT,
                     (const struct sockaddr *)&notify_address, notify_address_bytes);
    }
    errno = saved_errno;
}

void kvf_notify_progress(const char *fmt, ...)
{
    static uint64_t next_ns; /* of whichever thread is in the daemon's only long phase */
    char state[256];
    va_list args;
    int head;

    if (notify_fd < 0 || kvf_now_ns() < next_ns) {
        return;
    }
    next_ns = kvf_now_ns() + KVF_NS_PER_S;
    head = snprintf(state, sizeof(state), "EXTEND_TIMEOUT_USEC=30000000\nSTATUS=");
    va_start(args, fmt);
    vsnprintf(state + head, sizeof(state) - (size_t)head, fmt, args);
    va_end(args);
    kvf_notify(state);
}
