/* SPDX-License-Identifier: Apache-2.0
 *
 * transport_ucx_doors.c: connections that come to UCX and say nothing. UCX listens on a port of its
 * own beside ours (a door each), takes whatever connects there, and waits for ever; so a stranger
 * could have all descriptors of the daemon. Here such connections are looked for once in a while,
 * and hung up on, which UCX sees as their end.
 *
 * What is UCX's is known by its port: at start those are noted on which this process has begun to
 * listen while UCX was being opened. A connection of ours there is one of these:
 *
 *   on the listener's port   the other side of a link, which knows its address
 *   on a port for data       of a link, on which something comes with each heartbeat at least
 */
#include "transport/transport_ucx_internal.h"

#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/fd.h"

#define LOOK_NS  (2 * KVF_NS_PER_S)
#define GRACE_MS 5000u /* a handshake has as long */

/* The local port of a TCP socket, 0: it is none. */
static uint16_t port_of(int fd)
{
    struct sockaddr_storage at;
    socklen_t bytes = sizeof(at);

    if (getsockname(fd, (struct sockaddr *)&at, &bytes) != 0 ||
        (at.ss_family != AF_INET && at.ss_family != AF_INET6)) {
        return 0;
    }
    return ntohs(((const struct sockaddr_in *)(const void *)&at)->sin_port); /* IPv6: the same */
}

static bool is_listening(int fd)
{
    int is = 0;

    return getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &is, &(socklen_t){sizeof(is)}) == 0 && is != 0;
}

/* The next descriptor of this process, -1: that was all. */
static int next_fd(DIR *folder)
{
    const struct dirent *entry;

    while ((entry = readdir(folder)) != NULL) {
        char *end;
        long fd = strtol(entry->d_name, &end, 10);

        if (end != entry->d_name && *end == '\0' && fd != dirfd(folder)) {
            return (int)fd;
        }
    }
    return -1;
}

static bool is_door(const struct kvf_doors *doors, uint16_t port)
{
    for (uint32_t i = 0; i < doors->n; i++) {
        if (doors->ports[i] == port) {
            return true;
        }
    }
    return false;
}

/* Add the ports that are listened on, and are not in but. */
static void note_ports(struct kvf_doors *doors, const struct kvf_doors *but)
{
    int fd;

    rewinddir(doors->folder);
    while (doors->n < KVF_NET_DOORS_MAX && (fd = next_fd(doors->folder)) >= 0) {
        uint16_t port = port_of(fd);

        if (port != 0 && is_listening(fd) && !is_door(doors, port) &&
            (but == NULL || !is_door(but, port))) {
            doors->ports[doors->n++] = port;
        }
    }
}

int kvf_doors_open(struct kvf_doors *doors)
{
    /* both are kept: when strangers have taken all descriptors, none can be had */
    doors->spare_fd = eventfd(0, EFD_CLOEXEC);
    doors->folder = opendir("/proc/self/fd");
    if (doors->spare_fd < 0 || doors->folder == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    note_ports(doors, NULL);
    return KVF_OK;
}

void kvf_doors_note(struct kvf_doors *doors)
{
    struct kvf_doors before = *doors;

    doors->n = 0;
    note_ports(doors, &before);
}

void kvf_doors_close(struct kvf_doors *doors)
{
    if (doors->folder != NULL) {
        (void)closedir(doors->folder);
        doors->folder = NULL;
    }
    kvf_fd_close(&doors->spare_fd);
}

static bool is_same(const struct kvf_net_address *a, const struct sockaddr_storage *b)
{
    if (a->address.ss_family != b->ss_family) {
        return false;
    }
    if (b->ss_family == AF_INET) {
        const struct sockaddr_in *x = (const void *)&a->address;
        const struct sockaddr_in *y = (const void *)b;

        return x->sin_port == y->sin_port && x->sin_addr.s_addr == y->sin_addr.s_addr;
    } else {
        const struct sockaddr_in6 *x = (const void *)&a->address;
        const struct sockaddr_in6 *y = (const void *)b;

        return x->sin6_port == y->sin6_port &&
               memcmp(&x->sin6_addr, &y->sin6_addr, sizeof(x->sin6_addr)) == 0;
    }
}

/* Has a link come from there? Also if one of them does not know where it has come from. */
static bool is_of_link(const struct kvf_net *net, const struct sockaddr_storage *peer)
{
    for (uint32_t i = 0; i < net->links_end; i++) {
        const struct kvf_link *link = &net->links[i];

        if (link->state != KVF_LINK_FREE && !link->is_initiator &&
            (link->at.bytes == 0 || is_same(&link->at, peer))) {
            return true;
        }
    }
    return false;
}

/* Is this a connection to a door that nothing comes from? */
static bool is_silent(const struct kvf_net *net, int fd)
{
    struct sockaddr_storage peer;
    socklen_t bytes = sizeof(peer);
    struct tcp_info info;
    uint16_t port = port_of(fd);
    uint64_t silence_ms = net->config.silence_ns / KVF_NS_PER_MS + GRACE_MS;

    if (port == 0 || !is_door(&net->doors, port) || is_listening(fd) ||
        getpeername(fd, (struct sockaddr *)&peer, &bytes) != 0 ||
        getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &(socklen_t){sizeof(info)}) != 0 ||
        info.tcpi_state != TCP_ESTABLISHED) { /* else it is over, and UCX has not seen to it yet */
        return false;
    }
    if (port == net->port) {
        return info.tcpi_last_data_recv > GRACE_MS && !is_of_link(net, &peer);
    }
    return info.tcpi_last_data_recv > silence_ms;
}

/* Make a descriptor stand for what another one does. By the system call itself: in dup3 a sanitizer
 * of threads sees UCX's opening of that file and this use of it, and takes them for a race. */
static bool replace(int fd, int by_fd)
{
    return by_fd >= 0 && syscall(SYS_dup3, by_fd, fd, O_CLOEXEC) >= 0;
}

void kvf_doors_turn(struct kvf_net *net)
{
    struct kvf_doors *doors = &net->doors;
    uint64_t suppressed;
    uint32_t n = 0;
    bool is_replaced = false;
    int fd;

    if (doors->n == 0 || net->now_ns < doors->look_ns) {
        return;
    }
    doors->look_ns = net->now_ns + LOOK_NS;
    rewinddir(doors->folder);
    while ((fd = next_fd(doors->folder)) >= 0) {
        /* looked at once more as a descriptor of our own: UCX may have closed it, and another
         * thread may have another file by that number */
        if (fd != doors->spare_fd && is_silent(net, fd) && replace(doors->spare_fd, fd)) {
            is_replaced = true;
            if (is_silent(net, doors->spare_fd)) {
                (void)shutdown(doors->spare_fd, SHUT_RDWR);
                n++;
            }
        }
    }
    if (is_replaced) {
        fd = eventfd(0, EFD_CLOEXEC); /* nothing of others' is kept open here */
        (void)replace(doors->spare_fd, fd);
        kvf_fd_close(&fd);
    }
    if (n > 0 && kvf_log_limit_allow(&net->stranger_log, net->now_ns, &suppressed)) {
        kvf_log(KVF_LOG_WARNING, "peers: %u connections that say nothing were hung up on", n);
    }
}
