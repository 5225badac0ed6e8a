/* SPDX-License-Identifier: Apache-2.0
 *
 * segment.c: check, map and give up memory files that a daemon has sent (rules: segment.h).
 */
#include "transport/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "kvferry.h"

int kvf_segment_check(int fd, uint64_t bytes, bool sealed, char *text_out, size_t text_bytes)
{
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);

    if (seals < 0 || fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        snprintf(text_out, text_bytes, "a received descriptor is no memory file");
        return KVF_ERR_PROTOCOL;
    }
    if (st.st_size < 0 || (uint64_t)st.st_size != bytes) {
        snprintf(text_out, text_bytes,
                 "a received memory file has %jd bytes instead of the announced %" PRIu64,
                 (intmax_t)st.st_size, bytes);
        return KVF_ERR_PROTOCOL;
    }
    if (sealed && (seals & KVF_SEGMENT_SEALS) != KVF_SEGMENT_SEALS) {
        snprintf(text_out, text_bytes,
                 "a received memory file lacks seals (has 0x%x, needs 0x%x): it could be truncated "
                 "under our reads",
                 (unsigned)seals, (unsigned)KVF_SEGMENT_SEALS);
        return KVF_ERR_PROTOCOL;
    }
    return KVF_OK;
}

int kvf_segment_map(int fd, uint64_t bytes, bool writable, void **base_out, char *text_out,
                    size_t text_bytes)
{
    int prot = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    void *base = mmap(NULL, bytes, prot, MAP_SHARED, fd, 0);

    if (base == MAP_FAILED) {
        snprintf(text_out, text_bytes, "%" PRIu64 " bytes of shared memory cannot be mapped: %s",
                 bytes, strerror(errno));
        return KVF_ERR_NO_MEMORY;
    }
    /* The first keeps other tenants' text out of core files, the second keeps a forked child from
     * holding the memory. Both are advice: an old kernel that refuses them changes nothing else. */
    (void)madvise(base, bytes, MADV_DONTDUMP);
    (void)madvise(base, bytes, MADV_DONTFORK);
    *base_out = base;
    return KVF_OK;
}

void kvf_segment_unmap(void *base, uint64_t bytes)
{
    if (base != NULL) {
        munmap(base, bytes);
    }
}

int kvf_segment_blank(void *base, uint64_t bytes, bool writable)
{
    int prot = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    void *blank = mmap(base, bytes, prot, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
                       -1, 0);

    if (blank == MAP_FAILED) {
        return KVF_ERR_NO_MEMORY;
    }
    (void)madvise(base, bytes, MADV_DONTDUMP);
    return KVF_OK;
}
