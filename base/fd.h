/* SPDX-License-Identifier: Apache-2.0
 *
 * fd.h: descriptors, memory objects behind descriptors, and reads and writes that finish.
 *
 * Failures come back as a status with errno left as the system set it, for the caller's log line.
 */
#ifndef KVF_BASE_FD_H
#define KVF_BASE_FD_H

#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Close *fd unless it is -1, and make it -1. Keeps errno. */
void kvf_fd_close(int *fd);

/* Huge pages of 2 MiB for a memory object, as configured: "off", "try", "require". */
enum kvf_hugepage_mode {
    KVF_HUGEPAGES_OFF = 0,
    KVF_HUGEPAGES_TRY = 1,
    KVF_HUGEPAGES_REQUIRE = 2,
};

struct kvf_memfd {
    int fd;       /* close-on-exec, sealable; owned by the caller */
    bool is_huge; /* backed by pages of 2 MiB */
    size_t bytes; /* as asked, rounded up to whole pages of its kind */
};

/* A memory object of at least bytes, every page present (so that its memory is charged to this
 * process and no later access can fail for want of it). Blocks while the kernel zeroes pages.
 * KVF_OK; KVF_ERR_INVALID, _NO_MEMORY, _NO_SPACE, _BUSY (no descriptor left), _UNSUPPORTED. */
int kvf_memfd_create(const char *name, size_t bytes, enum kvf_hugepage_mode mode,
                     struct kvf_memfd *memfd_out);

/* Add seals (F_SEAL_*) to a memory object. Adding one twice is fine. KVF_OK, or a failure. */
int kvf_memfd_seal(int fd, int seals);

/* The seals of a memory object; a failure if fd is none. */
int kvf_memfd_seals(int fd, int *seals_out);

/* Reserve [offset, offset + bytes) of a file or memory object. KVF_OK, or a failure. Blocks. */
int kvf_fd_reserve(int fd, uint64_t offset, uint64_t bytes);

/* How many bytes of a file or memory object are there and not a hole, by the kernel's count; 0 if
 * that cannot be asked. */
uint64_t kvf_fd_present_bytes(int fd);

/* Read or write the whole range, whatever the kernel does in one call. Blocks.
 * KVF_OK; KVF_ERR_CORRUPT: the file ends inside the range; other failures as
 * kvf_status_from_errno. */
int kvf_fd_pread_all(int fd, void *out, size_t bytes, uint64_t offset);
int kvf_fd_pwrite_all(int fd, const void *data, size_t bytes, uint64_t offset);

#endif /* KVF_BASE_FD_H */
