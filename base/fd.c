/* SPDX-License-Identifier: Apache-2.0
 *
 * fd.c: descriptors, memory objects, whole reads and writes.
 */
#include "base/fd.h"

#include "base/limits.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* Reserving in slices keeps each call short enough that a signal can end the process between
 * two. */
#define RESERVE_SLICE_BYTES (256ull << 20)

/* Making memory takes a CPU, a quarter of a millisecond a MiB. On a kernel that preempts at ticks
 * only, whoever waits for that CPU would wait for the next tick; so it is offered between two. */
#define POPULATE_SLICE_BYTES (2ull << 20)

void kvf_fd_close(int *fd)
{
    int saved_errno = errno;

    if (*fd >= 0) {
        close(*fd); /* not retried: on Linux the descriptor is gone even after EINTR */
    }
    *fd = -1;
    errno = saved_errno;
}

static int populate(int fd, size_t bytes)
{
    int status = KVF_OK;

    for (size_t at = 0; status == KVF_OK && at < bytes; at += POPULATE_SLICE_BYTES) {
        size_t left = bytes - at;

        status = kvf_fd_reserve(fd, at, left < POPULATE_SLICE_BYTES ? left : POPULATE_SLICE_BYTES);
        (void)sched_yield();
    }
    return status;
}

static int memfd_create_kind(const char *name, size_t bytes, bool is_huge,
                             struct kvf_memfd *memfd_out)
{
    size_t page_bytes = is_huge ? KVF_HUGE_PAGE_BYTES : KVF_PAGE_BYTES;
    unsigned int flags = MFD_CLOEXEC | MFD_ALLOW_SEALING |
                         (is_huge ? MFD_HUGETLB | MFD_HUGE_2MB : 0);
    size_t rounded_bytes = (bytes + page_bytes - 1) / page_bytes * page_bytes;
    int status;
    int fd;

    fd = memfd_create(name, flags);
    if (fd < 0) {
        return kvf_status_from_errno(errno);
    }
    if (ftruncate(fd, (off_t)rounded_bytes) != 0) {
        status = kvf_status_from_errno(errno);
        goto close_fd;
    }
    status = populate(fd, rounded_bytes);
    if (status != KVF_OK) {
        goto close_fd;
    }
    *memfd_out = (struct kvf_memfd){.fd = fd, .is_huge = is_huge, .bytes = rounded_bytes};
    return KVF_OK;

close_fd:
    kvf_fd_close(&fd);
    return status;
}

int kvf_memfd_create(const char *name, size_t bytes, enum kvf_hugepage_mode mode,
                     struct kvf_memfd *memfd_out)
{
    if (bytes == 0 || bytes > (size_t)INT64_MAX - KVF_HUGE_PAGE_BYTES) {
        errno = EINVAL;
        return KVF_ERR_INVALID;
    }
    if (mode != KVF_HUGEPAGES_OFF) {
        int status = memfd_create_kind(name, bytes, true, memfd_out);

        if (status == KVF_OK || mode == KVF_HUGEPAGES_REQUIRE) {
            return status;
        }
    }
    return memfd_create_kind(name, bytes, false, memfd_out);
}

int kvf_memfd_seal(int fd, int seals)
{
    return fcntl(fd, F_ADD_SEALS, seals) == 0 ? KVF_OK : kvf_status_from_errno(errno);
}

int kvf_memfd_seals(int fd, int *seals_out)
{
    int seals = fcntl(fd, F_GET_SEALS);

    if (seals < 0) {
        return kvf_status_from_errno(errno);
    }
    *seals_out = seals;
    return KVF_OK;
}

int kvf_fd_reserve(int fd, uint64_t offset, uint64_t bytes)
{
    while (bytes > 0) {
        uint64_t slice_bytes = bytes < RESERVE_SLICE_BYTES ? bytes : RESERVE_SLICE_BYTES;

        if (fallocate(fd, 0, (off_t)offset, (off_t)slice_bytes) != 0) {
            if (errno == EINTR) {
                continue;
            }
            return kvf_status_from_errno(errno);
        }
        offset += slice_bytes;
        bytes -= slice_bytes;
    }
    return KVF_OK;
}

uint64_t kvf_fd_present_bytes(int fd)
{
    struct stat st;

    return fstat(fd, &st) == 0 ? (uint64_t)st.st_blocks * 512 : 0;
}

int kvf_fd_pread_all(int fd, void *out, size_t bytes, uint64_t offset)
{
    unsigned char *to = out;

    while (bytes > 0) {
        ssize_t got = pread(fd, to, bytes, (off_t)offset);

        if (got < 0) {
            if (errno == EINTR) {
                continue;
            }
            return kvf_status_from_errno(errno);
        }
        if (got == 0) {
            return KVF_ERR_CORRUPT;
        }
        to += got;
        offset += (uint64_t)got;
        bytes -= (size_t)got;
    }
    return KVF_OK;
}

int kvf_fd_pwrite_all(int fd, const void *data, size_t bytes, uint64_t offset)
{
    const unsigned char *from = data;

    while (bytes > 0) {
        ssize_t put = pwrite(fd, from, bytes, (off_t)offset);

        if (put < 0) {
            if (errno == EINTR) {
                continue;
            }
            return kvf_status_from_errno(errno);
        }
        from += put;
        offset += (uint64_t)put;
        bytes -= (size_t)put;
    }
    return KVF_OK;
}
