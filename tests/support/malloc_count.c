/* SPDX-License-Identifier: Apache-2.0
 *
 * malloc_count.c: preloaded into a process, counts its allocations in a file that a test has mapped
 * as well: a u64 at the start of the file that KVF_MALLOC_COUNT names.
 */
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* glibc's own, under the names that it exports for such purposes */
extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t n, size_t bytes);
extern void *__libc_realloc(void *old, size_t bytes);
extern void *__libc_memalign(size_t alignment, size_t bytes);

#define EXPORT __attribute__((visibility("default")))

static uint64_t *counter;

__attribute__((constructor)) static void count_begin(void)
{
    const char *path = getenv("KVF_MALLOC_COUNT");
    int fd = path != NULL ? open(path, O_RDWR | O_CLOEXEC) : -1;
    void *base;

    if (fd < 0) {
        return;
    }
    base = mmap(NULL, sizeof(*counter), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base != MAP_FAILED) {
        counter = base;
    }
    close(fd);
}

static void count(void)
{
    if (counter != NULL) {
        __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
    }
}

EXPORT void *malloc(size_t bytes)
{
    count();
    return __libc_malloc(bytes);
}

EXPORT void *calloc(size_t n, size_t bytes)
{
    count();
    return __libc_calloc(n, bytes);
}

EXPORT void *realloc(void *old, size_t bytes)
{
    count();
    return __libc_realloc(old, bytes);
}

EXPORT void *aligned_alloc(size_t alignment, size_t bytes)
{
    count();
    return __libc_memalign(alignment, bytes);
}

EXPORT void *memalign(size_t alignment, size_t bytes)
{
    count();
    return __libc_memalign(alignment, bytes);
}

EXPORT int posix_memalign(void **out, size_t alignment, size_t bytes)
{
    void *memory;

    count();
    memory = __libc_memalign(alignment, bytes);
    if (memory == NULL) {
        return ENOMEM;
    }
    *out = memory;
    return 0;
}
