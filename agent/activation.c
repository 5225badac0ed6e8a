/* SPDX-License-Identifier: Apache-2.0
 *
 * activation.c: descriptors from 3 on, as $LISTEN_FDS counts and $LISTEN_FDNAMES names them. Which
 * tenant a socket is for follows from its path, as for sockets that the daemon makes: a name is
 * what messages call it by.
 */
#include "agent/activation.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/parse.h"
#include "base/status.h"

#define FIRST_FD   3
#define PASSED_MAX (KVF_CONFIG_SOCKETS_MAX + 1) /* and the admin socket */

struct passed {
    int fd; /* -1: has been taken */
    char path[sizeof(((struct sockaddr_un *)0)->sun_path) + 1];
};

/* Written by init and take only, before there are threads. */
static struct passed passed[PASSED_MAX];
static unsigned n_passed;

/* A descriptor that is being judged, and where to say what is wrong with it. */
struct suspect {
    int fd;
    const char *name;
    int name_length;
    char *text_out;
    size_t text_bytes;
};

__attribute__((format(printf, 2, 3))) static int wrong(const struct suspect *suspect,
                                                       const char *fmt, ...)
{
    char what[256];
    va_list args;

    va_start(args, fmt);
    vsnprintf(what, sizeof(what), fmt, args);
    va_end(args);
    snprintf(suspect->text_out, suspect->text_bytes, "passed descriptor %d (%.*s) %s", suspect->fd,
             suspect->name_length, suspect->name, what);
    return KVF_ERR_CONFIG;
}

/* The type of socket that the configuration has at a path; 0: none. */
static int type_at(const struct kvf_config *config, const char *path)
{
    for (uint32_t i = 0; i < config->n_sockets; i++) {
        if (strcmp(config->sockets[i].path, path) == 0) {
            return SOCK_SEQPACKET;
        }
    }
    return strcmp(config->admin_socket, path) == 0 ? SOCK_STREAM : 0;
}

static int option_of(int fd, int option)
{
    int value = 0;
    socklen_t bytes = sizeof(value);

    return getsockopt(fd, SOL_SOCKET, option, &value, &bytes) == 0 ? value : -1;
}

/* Where it is bound. KVF_OK; else *suspect's text says what it is instead. */
static int path_of(const struct suspect *suspect, char path_out[sizeof(passed[0].path)])
{
    struct sockaddr_un address = {0};
    socklen_t bytes = sizeof(address);

    if (getsockname(suspect->fd, (struct sockaddr *)&address, &bytes) != 0) {
        return wrong(suspect, "is not a socket: %s; pass the sockets of the configuration only",
                     strerror(errno));
    }
    if (address.sun_family != AF_UNIX || address.sun_path[0] == '\0') {
        return wrong(suspect, "is not a Unix socket with a path; pass the sockets of the "
                              "configuration only");
    }
    memcpy(path_out, address.sun_path, sizeof(address.sun_path));
    path_out[sizeof(address.sun_path)] = '\0';
    return KVF_OK;
}

static int judge(const struct kvf_config *config, const struct suspect *suspect)
{
    struct passed *slot = &passed[n_passed];
    struct stat st;
    int type;

    if (path_of(suspect, slot->path) != KVF_OK) {
        return KVF_ERR_CONFIG;
    }
    type = type_at(config, slot->path);
    if (type == 0) {
        return wrong(suspect,
                     "listens at %s, which is no socket of the configuration; name it in sockets, "
                     "or take it out of the socket unit",
                     slot->path);
    }
    if (option_of(suspect->fd, SO_TYPE) != type) {
        return wrong(suspect, "at %s is of the wrong type; the socket unit needs %s=", slot->path,
                     type == SOCK_STREAM ? "ListenStream" : "ListenSequentialPacket");
    }
    if (option_of(suspect->fd, SO_ACCEPTCONN) != 1) {
        return wrong(suspect, "at %s does not listen; the socket unit needs Accept=no", slot->path);
    }
    for (unsigned i = 0; i < n_passed; i++) {
        if (strcmp(passed[i].path, slot->path) == 0) {
            return wrong(suspect, "is a second one at %s; pass each socket once", slot->path);
        }
    }
    if (lstat(slot->path, &st) != 0 || !S_ISSOCK(st.st_mode)) {
        return wrong(suspect,
                     "is bound to %s, where no socket is any more: nobody could connect; restart "
                     "the socket unit",
                     slot->path);
    }
    if (fcntl(suspect->fd, F_SETFD, FD_CLOEXEC) != 0 ||
        fcntl(suspect->fd, F_SETFL, O_NONBLOCK) != 0) {
        return wrong(suspect, "cannot be made non-blocking: %s", strerror(errno));
    }
    slot->fd = suspect->fd;
    n_passed++;
    return KVF_OK;
}

/* The next of "a:b:c", and the rest. Fewer names than descriptors: the last ones have none. */
static int next_name(const char **names_inout, const char **name_out)
{
    int length = (int)strcspn(*names_inout, ":");

    *name_out = length > 0 ? *names_inout : "unnamed";
    *names_inout += length + ((*names_inout)[length] == ':');
    return length > 0 ? length : (int)strlen(*name_out);
}

static int take_all(const struct kvf_config *config, const char *count_text, const char *names,
                    char *text_out, size_t text_bytes)
{
    char detail[256];
    uint64_t count;

    if (kvf_parse_u64(count_text, &count, detail, sizeof(detail)) != KVF_OK || count > PASSED_MAX) {
        snprintf(text_out, text_bytes,
                 "LISTEN_FDS=%.64s is not a number up to %d; pass the sockets of the "
                 "configuration only",
                 count_text, PASSED_MAX);
        return KVF_ERR_CONFIG;
    }
    for (int i = 0; i < (int)count; i++) {
        struct suspect suspect = {
            .fd = FIRST_FD + i, .text_out = text_out, .text_bytes = text_bytes};

        suspect.name_length = next_name(&names, &suspect.name);
        if (judge(config, &suspect) != KVF_OK) {
            return KVF_ERR_CONFIG;
        }
    }
    return KVF_OK;
}

int kvf_activation_init(const struct kvf_config *config, char *text_out, size_t text_bytes)
{
    const char *pid_text = getenv("LISTEN_PID");
    const char *count_text = getenv("LISTEN_FDS");
    const char *names = getenv("LISTEN_FDNAMES");
    char detail[256];
    uint64_t pid;
    int status = KVF_OK;

    assert(n_passed == 0);
    /* for another process, which has left us its environment: none of these descriptors is ours */
    if (pid_text != NULL && count_text != NULL &&
        kvf_parse_u64(pid_text, &pid, detail, sizeof(detail)) == KVF_OK &&
        pid == (uint64_t)getpid()) {
        status = take_all(config, count_text, names != NULL ? names : "", text_out, text_bytes);
    }
    (void)unsetenv("LISTEN_PID");
    (void)unsetenv("LISTEN_FDS");
    (void)unsetenv("LISTEN_FDNAMES");
    return status;
}

int kvf_activation_take(const char *path)
{
    for (unsigned i = 0; i < n_passed; i++) {
        if (passed[i].fd >= 0 && strcmp(passed[i].path, path) == 0) {
            int fd = passed[i].fd;

            passed[i].fd = -1;
            return fd;
        }
    }
    return -1;
}
