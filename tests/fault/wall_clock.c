/* SPDX-License-Identifier: Apache-2.0
 *
 * wall_clock.c: a wall clock that jumps, to be preloaded into a daemon: the file that
 * KVF_TEST_CLOCK names holds an offset in seconds (little-endian, 8 bytes), which may be written at
 * any time.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now);
int gettimeofday(struct timeval *restrict now, void *restrict zone);
time_t time(time_t *now);

static const volatile int64_t *offset_s;

__attribute__((constructor)) static void open_offset(void)
{
    const char *path = getenv("KVF_TEST_CLOCK");
    int fd = path != NULL ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *map = fd >= 0 ? mmap(NULL, sizeof(*offset_s), PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;

    if (map != MAP_FAILED) {
        offset_s = map;
    }
    if (fd >= 0) {
        close(fd);
    }
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int rc = (int)syscall(SYS_clock_gettime, clock, now);

    if (rc == 0 && offset_s != NULL &&
        (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        now->tv_sec += (time_t)*offset_s;
    }
    return rc;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec exact;
    int rc = clock_gettime(CLOCK_REALTIME, &exact);

    (void)zone;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return rc;
}

time_t time(time_t *now)
{
    struct timespec exact;

    (void)clock_gettime(CLOCK_REALTIME, &exact);
    if (now != NULL) {
        *now = exact.tv_sec;
    }
    return exact.tv_sec;
}
