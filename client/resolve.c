/* SPDX-License-Identifier: Apache-2.0
 *
 * resolve.c: look-ups of names, a thread each.
 */
#include "client/resolve.h"

#include <netdb.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/fd.h"

/* Of whoever has begun it and of its thread; the last one to leave frees it. */
struct kvf_resolve {
    char host[256];
    char port[8];
    int fd;
    _Atomic uint32_t users;
    _Atomic bool is_answered; /* release by the thread; what follows does not change behind it */
    int error;                /* of getaddrinfo */
    uint32_t n;
    struct kvf_net_address addresses[KVF_RESOLVE_ADDRESSES_MAX];
};

static _Atomic uint32_t running;

static void leave(struct kvf_resolve *resolve)
{
    if (atomic_fetch_sub(&resolve->users, 1) == 1) {
        kvf_fd_close(&resolve->fd);
        free(resolve);
    }
}

static void keep(struct kvf_resolve *resolve, const struct addrinfo *all)
{
    for (const struct addrinfo *i = all; i != NULL; i = i->ai_next) {
        struct kvf_net_address *address = &resolve->addresses[resolve->n];

        if (resolve->n < KVF_RESOLVE_ADDRESSES_MAX && i->ai_addrlen <= sizeof(address->address)) {
            memcpy(&address->address, i->ai_addr, i->ai_addrlen);
            address->bytes = i->ai_addrlen;
            resolve->n++;
        }
    }
}

static void *run(void *arg)
{
    struct kvf_resolve *resolve = arg;
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct addrinfo *all = NULL;
    uint64_t one = 1;

    resolve->error = getaddrinfo(resolve->host, resolve->port, &hints, &all);
    if (resolve->error == 0) {
        keep(resolve, all);
        freeaddrinfo(all);
    }
    atomic_store_explicit(&resolve->is_answered, true, memory_order_release);
    (void)!write(resolve->fd, &one, sizeof(one));
    leave(resolve);
    atomic_fetch_sub(&running, 1);
    return NULL;
}

int kvf_resolve_numeric(const char *host, const char *port, struct kvf_net_address *address_out)
{
    struct addrinfo hints = {.ai_family = AF_UNSPEC,
                             .ai_socktype = SOCK_STREAM,
                             .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV};
    struct addrinfo *one = NULL;
    struct kvf_net_address address = {0};

    if (getaddrinfo(host, port, &hints, &one) != 0) {
        return KVF_MISS;
    }
    memcpy(&address.address, one->ai_addr, one->ai_addrlen);
    address.bytes = one->ai_addrlen;
    freeaddrinfo(one);
    *address_out = address;
    return KVF_OK;
}

/* A thread that nobody waits for, and that takes no signals of the application's. */
static int start(struct kvf_resolve *resolve)
{
    pthread_attr_t attr;
    pthread_t thread;
    sigset_t all, before;
    int error;

    if (pthread_attr_init(&attr) != 0) {
        return KVF_ERR_NO_MEMORY;
    }
    (void)pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(&thread, &attr, run, resolve);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    (void)pthread_attr_destroy(&attr);
    return error == 0 ? KVF_OK : KVF_ERR_NO_MEMORY;
}

/* A child has none of its parent's threads. */
static void forked(void)
{
    atomic_store(&running, 0);
}

static void watch_forks(void)
{
    (void)pthread_atfork(NULL, NULL, forked);
}

int kvf_resolve_begin(const char *host, const char *port, struct kvf_resolve **resolve_out)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct kvf_resolve *resolve;
    int status = KVF_ERR_BUSY;

    (void)pthread_once(&once, watch_forks);
    if (atomic_fetch_add(&running, 1) >= KVF_RESOLVES_MAX) {
        goto fail;
    }
    status = KVF_ERR_NO_MEMORY;
    resolve = calloc(1, sizeof(*resolve));
    if (resolve == NULL) {
        goto fail;
    }
    (void)snprintf(resolve->host, sizeof(resolve->host), "%s", host);
    (void)snprintf(resolve->port, sizeof(resolve->port), "%s", port);
    atomic_init(&resolve->users, 2);
    resolve->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (resolve->fd < 0 || start(resolve) != KVF_OK) {
        kvf_fd_close(&resolve->fd);
        free(resolve);
        goto fail;
    }
    *resolve_out = resolve;
    return KVF_OK;
fail:
    atomic_fetch_sub(&running, 1);
    return status;
}

int kvf_resolve_fd(const struct kvf_resolve *resolve)
{
    return resolve->fd;
}

int kvf_resolve_take(const struct kvf_resolve *resolve, uint32_t number,
                     struct kvf_net_address *address_out, const char **why_out)
{
    if (!atomic_load_explicit(&resolve->is_answered, memory_order_acquire)) {
        return KVF_EMPTY;
    }
    if (resolve->n == 0) {
        *why_out = resolve->error != 0 ? gai_strerror(resolve->error) : "no address to use";
        return KVF_ERR_NO_DAEMON;
    }
    *address_out = resolve->addresses[number % resolve->n];
    return KVF_OK;
}

void kvf_resolve_end(struct kvf_resolve *resolve)
{
    if (resolve != NULL) {
        leave(resolve);
    }
}
