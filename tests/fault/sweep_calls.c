/* SPDX-License-Identifier: Apache-2.0
 *
 * sweep_calls.c: stands in front of the C library and of liburing, counts, and fails the call that
 * the page names.
 */
#include "tests/fault/sweep_calls.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <malloc.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

/* glibc's own, under the names that it exports for such purposes: dlsym would allocate */
extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t n, size_t bytes);
extern void *__libc_realloc(void *old, size_t bytes);
extern void *__libc_memalign(size_t alignment, size_t bytes);
extern void __libc_free(void *memory);

#define EXPORT __attribute__((visibility("default")))

struct sweep_page *sweep_page;

__attribute__((constructor)) static void find_page(void)
{
    const char *path = getenv("KVF_SWEEP_PAGE");
    int fd = path != NULL ? open(path, O_RDWR | O_CLOEXEC) : -1;
    void *base;

    if (fd < 0) {
        return;
    }
    base = mmap(NULL, sizeof(*sweep_page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base != MAP_FAILED) {
        sweep_page = base;
    }
    close(fd);
}

/* Is this the call that fails? */
static bool is_next(enum sweep_class class, const char *name)
{
    struct sweep_page *page = sweep_page;
    int32_t thread_id;

    if (page == NULL || atomic_load_explicit(&page->armed, memory_order_relaxed) != class) {
        return false;
    }
    thread_id = atomic_load_explicit(&page->thread_id, memory_order_relaxed);
    if ((thread_id != 0 && thread_id != gettid()) ||
        atomic_fetch_add(&page->calls, 1) + 1 != atomic_load(&page->target)) {
        return false;
    }
    strncpy(page->name, name, SWEEP_NAME_BYTES - 1);
    atomic_store(&page->is_hit, 1);
    return true;
}

/* For functions that set errno and return `result`. */
#define FAIL_AS(class, name, error, result)                                                        \
    do {                                                                                           \
        if (is_next(class, name)) {                                                                \
            errno = (error);                                                                       \
            return (result);                                                                       \
        }                                                                                          \
    } while (0)

/* The function behind this one. */
#define NEXT(name) ((__typeof__(&name))next_of(#name))

static void *next_of(const char *name)
{
    void *next = dlsym(RTLD_NEXT, name);

    if (next == NULL) {
        abort();
    }
    return next;
}

/* --- memory ----------------------------------------------------------------------------------- */

static void *counted(void *memory)
{
    if (memory != NULL && sweep_page != NULL) {
        atomic_fetch_add_explicit(&sweep_page->live, 1, memory_order_relaxed);
    }
    return memory;
}

EXPORT void *malloc(size_t bytes)
{
    FAIL_AS(SWEEP_ALLOC, "malloc", ENOMEM, NULL);
    return counted(__libc_malloc(bytes));
}

EXPORT void *calloc(size_t n, size_t bytes)
{
    FAIL_AS(SWEEP_ALLOC, "calloc", ENOMEM, NULL);
    return counted(__libc_calloc(n, bytes));
}

EXPORT void *realloc(void *old, size_t bytes)
{
    FAIL_AS(SWEEP_ALLOC, "realloc", ENOMEM, NULL);
    return old == NULL ? counted(__libc_realloc(NULL, bytes)) : __libc_realloc(old, bytes);
}

EXPORT void *aligned_alloc(size_t alignment, size_t bytes)
{
    FAIL_AS(SWEEP_ALLOC, "aligned_alloc", ENOMEM, NULL);
    return counted(__libc_memalign(alignment, bytes));
}

EXPORT void *memalign(size_t alignment, size_t bytes)
{
    FAIL_AS(SWEEP_ALLOC, "memalign", ENOMEM, NULL);
    return counted(__libc_memalign(alignment, bytes));
}

EXPORT int posix_memalign(void **out, size_t alignment, size_t bytes)
{
    void *memory;

    if (is_next(SWEEP_ALLOC, "posix_memalign")) {
        return ENOMEM;
    }
    memory = counted(__libc_memalign(alignment, bytes));
    if (memory == NULL) {
        return ENOMEM;
    }
    *out = memory;
    return 0;
}

EXPORT void free(void *memory)
{
    if (memory != NULL && sweep_page != NULL) {
        atomic_fetch_sub_explicit(&sweep_page->live, 1, memory_order_relaxed);
    }
    __libc_free(memory);
}

EXPORT void *mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset)
{
    FAIL_AS(SWEEP_MAP, "mmap", ENOMEM, MAP_FAILED);
    return NEXT(mmap)(address, bytes, protection, flags, fd, offset);
}

EXPORT int memfd_create(const char *name, unsigned flags)
{
    FAIL_AS(SWEEP_MAP, "memfd_create", EMFILE, -1);
    return NEXT(memfd_create)(name, flags);
}

EXPORT int ftruncate(int fd, off_t bytes)
{
    FAIL_AS(SWEEP_MAP, "ftruncate", ENOSPC, -1);
    return NEXT(ftruncate)(fd, bytes);
}

EXPORT int fallocate(int fd, int mode, off_t offset, off_t bytes)
{
    FAIL_AS(SWEEP_MAP, "fallocate", ENOSPC, -1);
    FAIL_AS(SWEEP_INTERRUPT, "fallocate", EINTR, -1);
    return NEXT(fallocate)(fd, mode, offset, bytes);
}

/* --- descriptors ------------------------------------------------------------------------------ */

EXPORT int open(const char *path, int flags, ...)
{
    mode_t mode = 0;
    va_list arguments;

    FAIL_AS(SWEEP_FD, "open", EMFILE, -1);
    if ((flags & (O_CREAT | O_TMPFILE)) != 0) {
        va_start(arguments, flags);
        mode = va_arg(arguments, mode_t);
        va_end(arguments);
    }
    return NEXT(open)(path, flags, mode);
}

EXPORT int eventfd(unsigned count, int flags)
{
    FAIL_AS(SWEEP_FD, "eventfd", EMFILE, -1);
    return NEXT(eventfd)(count, flags);
}

EXPORT int epoll_create1(int flags)
{
    FAIL_AS(SWEEP_FD, "epoll_create1", EMFILE, -1);
    return NEXT(epoll_create1)(flags);
}

EXPORT int epoll_ctl(int epoll_fd, int operation, int fd, struct epoll_event *event)
{
    if (operation == EPOLL_CTL_ADD) {
        FAIL_AS(SWEEP_FD, "epoll_ctl", ENOMEM, -1);
    }
    return NEXT(epoll_ctl)(epoll_fd, operation, fd, event);
}

EXPORT int flock(int fd, int operation)
{
    FAIL_AS(SWEEP_INTERRUPT, "flock", EINTR, -1);
    return NEXT(flock)(fd, operation);
}

EXPORT int epoll_wait(int epoll_fd, struct epoll_event *events, int n, int timeout_ms)
{
    FAIL_AS(SWEEP_INTERRUPT, "epoll_wait", EINTR, -1);
    return NEXT(epoll_wait)(epoll_fd, events, n, timeout_ms);
}

EXPORT int poll(struct pollfd *fds, nfds_t n, int timeout_ms)
{
    FAIL_AS(SWEEP_INTERRUPT, "poll", EINTR, -1);
    return NEXT(poll)(fds, n, timeout_ms);
}

EXPORT int ppoll(struct pollfd *fds, nfds_t n, const struct timespec *timeout, const sigset_t *mask)
{
    FAIL_AS(SWEEP_INTERRUPT, "ppoll", EINTR, -1);
    return NEXT(ppoll)(fds, n, timeout, mask);
}

/* --- threads ---------------------------------------------------------------------------------- */

EXPORT int pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*run)(void *arg), void *arg)
{
    if (is_next(SWEEP_THREAD, "pthread_create")) {
        return EAGAIN;
    }
    return NEXT(pthread_create)(thread, attributes, run, arg);
}

/* --- sockets ---------------------------------------------------------------------------------- */

EXPORT int socket(int domain, int type, int protocol)
{
    FAIL_AS(SWEEP_SOCKET, "socket", EMFILE, -1);
    FAIL_AS(SWEEP_BUSY, "socket", ENOBUFS, -1);
    return NEXT(socket)(domain, type, protocol);
}

EXPORT int bind(int fd, const struct sockaddr *address, socklen_t bytes)
{
    FAIL_AS(SWEEP_SOCKET, "bind", ENOMEM, -1);
    return NEXT(bind)(fd, address, bytes);
}

EXPORT int listen(int fd, int backlog)
{
    FAIL_AS(SWEEP_SOCKET, "listen", EADDRINUSE, -1);
    return NEXT(listen)(fd, backlog);
}

EXPORT int accept4(int fd, struct sockaddr *address, socklen_t *bytes, int flags)
{
    FAIL_AS(SWEEP_SOCKET, "accept4", EMFILE, -1);
    FAIL_AS(SWEEP_BUSY, "accept4", ECONNABORTED, -1);
    FAIL_AS(SWEEP_INTERRUPT, "accept4", EINTR, -1);
    return NEXT(accept4)(fd, address, bytes, flags);
}

EXPORT int connect(int fd, const struct sockaddr *address, socklen_t bytes)
{
    FAIL_AS(SWEEP_SOCKET, "connect", ECONNREFUSED, -1);
    FAIL_AS(SWEEP_BUSY, "connect", EAGAIN, -1);
    FAIL_AS(SWEEP_INTERRUPT, "connect", EINTR, -1);
    return NEXT(connect)(fd, address, bytes);
}

EXPORT int getsockopt(int fd, int level, int name, void *value, socklen_t *bytes)
{
    FAIL_AS(SWEEP_SOCKET, "getsockopt", ENOBUFS, -1);
    return NEXT(getsockopt)(fd, level, name, value, bytes);
}

EXPORT int setsockopt(int fd, int level, int name, const void *value, socklen_t bytes)
{
    FAIL_AS(SWEEP_SOCKET, "setsockopt", ENOMEM, -1);
    return NEXT(setsockopt)(fd, level, name, value, bytes);
}

EXPORT ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
    FAIL_AS(SWEEP_SOCKET, "sendmsg", EPIPE, -1);
    FAIL_AS(SWEEP_BUSY, "sendmsg", ENOBUFS, -1);
    FAIL_AS(SWEEP_INTERRUPT, "sendmsg", EINTR, -1);
    return NEXT(sendmsg)(fd, message, flags);
}

EXPORT ssize_t recvmsg(int fd, struct msghdr *message, int flags)
{
    FAIL_AS(SWEEP_SOCKET, "recvmsg", ECONNRESET, -1);
    FAIL_AS(SWEEP_BUSY, "recvmsg", EAGAIN, -1);
    FAIL_AS(SWEEP_INTERRUPT, "recvmsg", EINTR, -1);
    return NEXT(recvmsg)(fd, message, flags);
}

EXPORT ssize_t send(int fd, const void *data, size_t bytes, int flags)
{
    FAIL_AS(SWEEP_SOCKET, "send", EPIPE, -1);
    FAIL_AS(SWEEP_BUSY, "send", EAGAIN, -1);
    FAIL_AS(SWEEP_INTERRUPT, "send", EINTR, -1);
    return NEXT(send)(fd, data, bytes, flags);
}

EXPORT ssize_t recv(int fd, void *data, size_t bytes, int flags)
{
    FAIL_AS(SWEEP_SOCKET, "recv", ECONNRESET, -1);
    /* not as "again": only the admin's HTTP library calls it, after an edge of its poll set */
    FAIL_AS(SWEEP_INTERRUPT, "recv", EINTR, -1);
    return NEXT(recv)(fd, data, bytes, flags);
}

/* --- drives ----------------------------------------------------------------------------------- */

EXPORT ssize_t pread(int fd, void *data, size_t bytes, off_t offset)
{
    FAIL_AS(SWEEP_DRIVE, "pread", EIO, -1);
    FAIL_AS(SWEEP_INTERRUPT, "pread", EINTR, -1);
    return NEXT(pread)(fd, data, bytes, offset);
}

EXPORT ssize_t pwrite(int fd, const void *data, size_t bytes, off_t offset)
{
    FAIL_AS(SWEEP_DRIVE, "pwrite", ENOSPC, -1);
    FAIL_AS(SWEEP_INTERRUPT, "pwrite", EINTR, -1);
    return NEXT(pwrite)(fd, data, bytes, offset);
}

EXPORT ssize_t preadv2(int fd, const struct iovec *parts, int n, off_t offset, int flags)
{
    FAIL_AS(SWEEP_DRIVE, "preadv2", EIO, -1);
    FAIL_AS(SWEEP_INTERRUPT, "preadv2", EINTR, -1);
    return NEXT(preadv2)(fd, parts, n, offset, flags);
}

EXPORT ssize_t pwritev2(int fd, const struct iovec *parts, int n, off_t offset, int flags)
{
    FAIL_AS(SWEEP_DRIVE, "pwritev2", ENOSPC, -1);
    FAIL_AS(SWEEP_INTERRUPT, "pwritev2", EINTR, -1);
    return NEXT(pwritev2)(fd, parts, n, offset, flags);
}

EXPORT int fdatasync(int fd)
{
    FAIL_AS(SWEEP_DRIVE, "fdatasync", EIO, -1);
    return NEXT(fdatasync)(fd);
}

EXPORT int io_uring_queue_init(unsigned entries, struct io_uring *ring, unsigned flags)
{
    if (is_next(SWEEP_MAP, "io_uring_queue_init")) {
        return -ENOMEM;
    }
    return NEXT(io_uring_queue_init)(entries, ring, flags);
}

EXPORT int io_uring_register_buffers_sparse(struct io_uring *ring, unsigned n)
{
    if (is_next(SWEEP_MAP, "io_uring_register_buffers_sparse")) {
        return -ENOMEM;
    }
    return NEXT(io_uring_register_buffers_sparse)(ring, n);
}

EXPORT int io_uring_register_buffers_update_tag(struct io_uring *ring, unsigned offset,
                                                const struct iovec *vectors, const __u64 *tags,
                                                unsigned n)
{
    if (is_next(SWEEP_MAP, "io_uring_register_buffers_update_tag")) {
        return -ENOMEM;
    }
    return NEXT(io_uring_register_buffers_update_tag)(ring, offset, vectors, tags, n);
}

/* Completions that nobody has seen yet; those without data are wake-ups and no I/O. */
static void fail_completions(struct io_uring *ring)
{
    static _Thread_local unsigned seen;
    unsigned tail = io_uring_smp_load_acquire(ring->cq.ktail);

    if ((int)(seen - *ring->cq.khead) < 0) {
        seen = *ring->cq.khead;
    }
    for (; seen != tail; seen++) {
        struct io_uring_cqe *cqe = &ring->cq.cqes[seen & ring->cq.ring_mask];

        if (cqe->user_data != 0 && is_next(SWEEP_DRIVE, "completion")) {
            cqe->res = -EIO;
        }
    }
}

EXPORT int io_uring_submit(struct io_uring *ring)
{
    if (is_next(SWEEP_BUSY, "io_uring_submit")) {
        return -EAGAIN;
    }
    return NEXT(io_uring_submit)(ring);
}

EXPORT int io_uring_submit_and_wait(struct io_uring *ring, unsigned n)
{
    int result;

    if (is_next(SWEEP_BUSY, "io_uring_submit_and_wait")) {
        return -EAGAIN;
    }
    if (is_next(SWEEP_INTERRUPT, "io_uring_submit_and_wait")) {
        return -EINTR;
    }
    result = NEXT(io_uring_submit_and_wait)(ring, n);
    fail_completions(ring);
    return result;
}

EXPORT int io_uring_get_events(struct io_uring *ring)
{
    int result = NEXT(io_uring_get_events)(ring);

    fail_completions(ring);
    return result;
}
