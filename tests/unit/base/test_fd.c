/* SPDX-License-Identifier: Apache-2.0
 *
 * test_fd.c: descriptors, sealed memory objects, whole reads and writes.
 */
#include "base/fd.h"

#include "base/limits.h"
#include "tests/support/support.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static void close_forgets_and_keeps_errno(void **state)
{
    int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    int closed = fd;

    (void)state;
    assert_true(fd >= 0);
    errno = ENOSPC;
    kvf_fd_close(&fd);
    assert_int_equal(fd, -1);
    assert_int_equal(errno, ENOSPC);
    assert_int_equal(fcntl(closed, F_GETFD), -1);
    kvf_fd_close(&fd);
    assert_int_equal(fd, -1);
}

static void memory_is_present_and_not_inherited(void **state)
{
    struct kvf_memfd memfd;
    struct stat st;

    (void)state;
    assert_int_equal(kvf_memfd_create("test", 10000, KVF_HUGEPAGES_OFF, &memfd), KVF_OK);
    assert_int_equal(memfd.bytes, 12288);
    assert_false(memfd.is_huge);
    assert_int_equal(fstat(memfd.fd, &st), 0);
    assert_int_equal(st.st_size, 12288);
    assert_int_equal(st.st_blocks * 512, 12288);
    assert_int_equal(kvf_fd_present_bytes(memfd.fd), 12288);
    assert_int_equal(fallocate(memfd.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 4096, 4096),
                     0);
    assert_int_equal(kvf_fd_present_bytes(memfd.fd), 8192);
    assert_int_equal(fcntl(memfd.fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    kvf_fd_close(&memfd.fd);
    assert_int_equal(kvf_fd_present_bytes(-1), 0);

    /* more than is made in one go, and no whole number of it */
    assert_int_equal(kvf_memfd_create("test", 5000000, KVF_HUGEPAGES_OFF, &memfd), KVF_OK);
    assert_int_equal(kvf_fd_present_bytes(memfd.fd), memfd.bytes);
    kvf_fd_close(&memfd.fd);
}

static void sealed_memory_keeps_its_size_and_content(void **state)
{
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;
    struct kvf_memfd memfd;
    int found_seals = 0;
    char *map;

    (void)state;
    assert_int_equal(kvf_memfd_create("test", 4096, KVF_HUGEPAGES_OFF, &memfd), KVF_OK);
    map = mmap(NULL, memfd.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd.fd, 0);
    assert_ptr_not_equal(map, MAP_FAILED);
    assert_int_equal(kvf_memfd_seal(memfd.fd, seals), KVF_OK);
    assert_int_equal(kvf_memfd_seals(memfd.fd, &found_seals), KVF_OK);
    assert_int_equal(found_seals, seals);

    /* the mapping made before can write; nothing made after can */
    map[0] = 'x';
    assert_int_equal(pwrite(memfd.fd, "y", 1, 0), -1);
    assert_int_equal(ftruncate(memfd.fd, 0), -1);
    assert_int_equal(fallocate(memfd.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), -1);
    assert_ptr_equal(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, memfd.fd, 0), MAP_FAILED);
    assert_int_equal(kvf_memfd_seal(memfd.fd, F_SEAL_WRITE), KVF_ERR_REFUSED);
    assert_int_equal(map[0], 'x');
    munmap(map, 4096);
    kvf_fd_close(&memfd.fd);
}

static void huge_pages_are_tried(void **state)
{
    struct kvf_memfd tried;
    struct kvf_memfd required;
    int status = kvf_memfd_create("test", 1, KVF_HUGEPAGES_REQUIRE, &required);

    (void)state;
    assert_int_equal(kvf_memfd_create("test", 1, KVF_HUGEPAGES_TRY, &tried), KVF_OK);
    assert_int_equal(tried.bytes, tried.is_huge ? KVF_HUGE_PAGE_BYTES : KVF_PAGE_BYTES);
    kvf_fd_close(&tried.fd);
    if (status == KVF_OK) {
        assert_true(required.is_huge);
        assert_int_equal(required.bytes, KVF_HUGE_PAGE_BYTES);
        kvf_fd_close(&required.fd);
    } else {
        assert_true(status < 0);
    }
}

static void impossible_sizes_are_refused(void **state)
{
    struct kvf_memfd memfd = {.fd = 77};

    (void)state;
    assert_int_equal(kvf_memfd_create("test", 0, KVF_HUGEPAGES_OFF, &memfd), KVF_ERR_INVALID);
    assert_int_equal(kvf_memfd_create("test", SIZE_MAX, KVF_HUGEPAGES_OFF, &memfd),
                     KVF_ERR_INVALID);
    assert_int_equal(memfd.fd, 77);
}

static void whole_ranges_or_a_reason(void **state)
{
    char data[5000];
    char back[5000];
    struct kvf_memfd memfd;
    int null_fd = open("/dev/full", O_WRONLY | O_CLOEXEC);

    (void)state;
    memset(data, 'q', sizeof(data));
    memset(back, 0, sizeof(back));
    assert_int_equal(kvf_memfd_create("test", 8192, KVF_HUGEPAGES_OFF, &memfd), KVF_OK);
    assert_int_equal(kvf_fd_pwrite_all(memfd.fd, data, sizeof(data), 100), KVF_OK);
    assert_int_equal(kvf_fd_pread_all(memfd.fd, back, sizeof(back), 100), KVF_OK);
    assert_memory_equal(data, back, sizeof(data));
    assert_int_equal(kvf_fd_pread_all(memfd.fd, back, 10, 8185), KVF_ERR_CORRUPT);
    kvf_fd_close(&memfd.fd);
    assert_int_equal(kvf_fd_pread_all(memfd.fd, back, 10, 0), KVF_ERR_IO);
    assert_int_equal(errno, EBADF);
    assert_true(null_fd >= 0);
    assert_int_equal(kvf_fd_pwrite_all(null_fd, data, 1, 0), KVF_ERR_NO_SPACE);
    kvf_fd_close(&null_fd);
}

static void reserve_extends(void **state)
{
    struct kvf_test_dir dir;
    char path[KVF_TEST_PATH_BYTES];
    struct stat st;
    int fd;

    (void)state;
    kvf_test_dir_create(&dir);
    kvf_test_dir_path(&dir, "store", path);
    fd = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(kvf_fd_reserve(fd, 4096, 65536), KVF_OK);
    assert_int_equal(fstat(fd, &st), 0);
    assert_int_equal(st.st_size, 4096 + 65536);
    kvf_fd_close(&fd);
    kvf_test_dir_remove(&dir);
    assert_int_equal(access(path, F_OK), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(close_forgets_and_keeps_errno),
        cmocka_unit_test(memory_is_present_and_not_inherited),
        cmocka_unit_test(sealed_memory_keeps_its_size_and_content),
        cmocka_unit_test(huge_pages_are_tried),
        cmocka_unit_test(impossible_sizes_are_refused),
        cmocka_unit_test(whole_ranges_or_a_reason),
        cmocka_unit_test(reserve_extends),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
