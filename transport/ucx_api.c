/* SPDX-License-Identifier: Apache-2.0
 *
 * ucx_api.c: UCX, opened at run time.
 */
#include "transport/ucx_api.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"

#define SOCKET_BUFFER_BYTES (2ul << 20)
#define SOCKET_BUFFER_TEXT  "2m"

static const struct {
    const char *symbol;
    size_t offset;
} functions[] = {
#define FUNCTION_ENTRY(name) {#name, offsetof(struct kvf_ucx_api, name)},
    KVF_UCP_FUNCTIONS(FUNCTION_ENTRY)
#undef FUNCTION_ENTRY
        {"ucs_status_string", offsetof(struct kvf_ucx_api, ucs_status_string)},
};

/* What the kernel allows for a buffer of a socket, by the file that says so. 0: it does not say. */
static unsigned long socket_buffer_max(const char *path)
{
    FILE *file = fopen(path, "re");
    unsigned long bytes = 0;

    if (file != NULL) {
        if (fscanf(file, "%lu", &bytes) != 1) {
            bytes = 0;
        }
        (void)fclose(file);
    }
    return bytes;
}

/* Before the library is there: it reads them when it is loaded. */
static void set_defaults(void)
{
    static const char *const values[][2] = {
        {"UCX_HANDLE_ERRORS", "none"}, /* signals are the daemon's */
        {"UCX_DEBUG_SIGNO", "0"},      /* SIGHUP is, too: it means "read calibration.dir again" */
        {"UCX_MEM_EVENTS", "n"},       /* no hooks in malloc and mmap */
        {"UCX_LOG_LEVEL", "fatal"},    /* a peer that dies is one line, and ours */
        {"UCX_WARN_UNUSED_ENV_VARS", "n"},
        {"UCX_TCP_CM_REUSEADDR", "y"}, /* a daemon that starts again has its port at once */
        /* A piece (KVF_NET_PIECE_BYTES and heads) comes by few calls of the system, and is not put
         * together from parts of 64 KiB before it is ours: a third of the CPU of receiving. */
        {"UCX_TCP_RX_SEG_SIZE", "272k"},
    };

    for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++) {
        (void)setenv(values[i][0], values[i][1], 0);
    }
    /* The kernel begins with 128 KiB and lets it grow too late for transfers of some milliseconds:
     * the sender sleeps and is woken for each of them. Where it may grow to more than this, what is
     * on its way has left the caches when it is received. Where less is allowed (before Linux 6.16)
     * what grows is better. */
    if (socket_buffer_max("/proc/sys/net/core/rmem_max") >= SOCKET_BUFFER_BYTES) {
        (void)setenv("UCX_TCP_RCVBUF", SOCKET_BUFFER_TEXT, 0);
    }
    if (socket_buffer_max("/proc/sys/net/core/wmem_max") >= SOCKET_BUFFER_BYTES) {
        (void)setenv("UCX_TCP_SNDBUF", SOCKET_BUFFER_TEXT, 0);
    }
}

int kvf_ucx_api_open(struct kvf_ucx_api *api, char *text, size_t text_bytes)
{
    const char *path = getenv("KVFERRY_UCX");
    void *library;

    *api = (struct kvf_ucx_api){0};
    if (path == NULL || path[0] == '\0') {
        path = "libucp.so.0";
    }
    set_defaults();
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library == NULL) {
        (void)snprintf(text, text_bytes, "UCX cannot be loaded: %s; install libucx0", dlerror());
        return KVF_ERR_UNSUPPORTED;
    }
    for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++) {
        void *address = dlsym(library, functions[i].symbol);

        if (address == NULL) {
            (void)snprintf(text, text_bytes,
                           "UCX is too old: %s has no %s; 1.13 or newer is needed", path,
                           functions[i].symbol);
            (void)dlclose(library);
            return KVF_ERR_UNSUPPORTED;
        }
        memcpy((char *)api + functions[i].offset, &address, sizeof(address));
    }
    (void)dlclose(library); /* it stays, by RTLD_NODELETE */
    api->ucp_get_version(&api->major, &api->minor, &api->release);
    if (api->major == 1 && api->minor < 13) {
        (void)snprintf(text, text_bytes, "UCX is %u.%u: 1.13 or newer is needed", api->major,
                       api->minor);
        return KVF_ERR_UNSUPPORTED;
    }
    return KVF_OK;
}
