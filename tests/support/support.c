/* SPDX-License-Identifier: Apache-2.0
 *
 * support.c: seeds, directories, files, waiting, and the clock for tests.
 */
#include "tests/support/support.h"

#include "base/clock.h"
#include "base/parse.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static void die(const char *what, const char *which)
{
    fprintf(stderr, "test support: %s %s: %s\n", what, which, strerror(errno));
    abort();
}

uint64_t kvf_test_seed(void)
{
    const char *text = getenv("KVF_TEST_SEED");
    char error[128];
    uint64_t seed;

    if (text == NULL) {
        kvf_random_system.fill(NULL, &seed, sizeof(seed));
    } else if (kvf_parse_u64(text, &seed, error, sizeof(error)) != KVF_OK) {
        fprintf(stderr, "KVF_TEST_SEED: %s\n", error);
        abort();
    }
    printf("seed: KVF_TEST_SEED=%" PRIu64 " repeats this run\n", seed);
    fflush(stdout);
    return seed;
}

void kvf_test_dir_create(struct kvf_test_dir *dir)
{
    const char *parent = getenv("TMPDIR");

    if (parent == NULL || parent[0] == '\0') {
        parent = "/tmp";
    }
    if ((size_t)snprintf(dir->path, sizeof(dir->path), "%s/kvferry-test-XXXXXX", parent) >=
            sizeof(dir->path) ||
        mkdtemp(dir->path) == NULL) {
        die("cannot create a directory in", parent);
    }
}

static int remove_entry(const char *path, const struct stat *st, int type, struct FTW *where)
{
    (void)st;
    (void)type;
    (void)where;
    return remove(path);
}

void kvf_test_dir_remove(struct kvf_test_dir *dir)
{
    if (dir->path[0] == '\0') {
        return;
    }
    if (nftw(dir->path, remove_entry, 16, FTW_DEPTH | FTW_PHYS) != 0) {
        die("cannot remove", dir->path);
    }
    dir->path[0] = '\0';
}

void kvf_test_dir_path(const struct kvf_test_dir *dir, const char *name,
                       char path_out[KVF_TEST_PATH_BYTES])
{
    if ((size_t)snprintf(path_out, KVF_TEST_PATH_BYTES, "%s/%s", dir->path, name) >=
        KVF_TEST_PATH_BYTES) {
        errno = ENAMETOOLONG;
        die("no path for", name);
    }
}

char *kvf_test_file_read(const char *path, size_t *bytes_out)
{
    FILE *file = fopen(path, "rb");
    size_t bytes = 0;
    size_t capacity = 4096;
    char *data;

    if (file == NULL) {
        return NULL;
    }
    data = malloc(capacity);
    while (data != NULL) {
        bytes += fread(data + bytes, 1, capacity - 1 - bytes, file);
        if (bytes < capacity - 1) {
            break;
        }
        capacity *= 2;
        data = realloc(data, capacity);
    }
    if (data == NULL || ferror(file)) {
        die("cannot read", path);
    }
    fclose(file);
    data[bytes] = '\0';
    if (bytes_out != NULL) {
        *bytes_out = bytes;
    }
    return data;
}

void kvf_test_file_write(const char *path, const void *data, size_t bytes)
{
    FILE *file = fopen(path, "wb");

    if (file == NULL || fwrite(data, 1, bytes, file) != bytes || fclose(file) != 0) {
        die("cannot write", path);
    }
}

bool kvf_test_wait_until(bool (*condition)(void *arg), void *arg, uint32_t timeout_ms)
{
    const struct timespec pause = {.tv_nsec = 2 * KVF_NS_PER_MS};
    uint64_t deadline_ns = kvf_now_ns() + timeout_ms * KVF_NS_PER_MS;

    while (!condition(arg)) {
        if (kvf_now_ns() >= deadline_ns) {
            return condition(arg);
        }
        nanosleep(&pause, NULL);
    }
    return true;
}

static uint64_t clock_now_ns(void *arg)
{
    return ((struct kvf_test_clock *)arg)->now_ns;
}

static uint64_t clock_wall_s(void *arg)
{
    return ((struct kvf_test_clock *)arg)->wall_s;
}

static const struct kvf_clock_ops clock_ops = {.now_ns = clock_now_ns, .wall_s = clock_wall_s};

struct kvf_env kvf_test_env(struct kvf_test_clock *clock, struct kvf_random_seeded *random)
{
    return (struct kvf_env){.clock = &clock_ops,
                            .clock_arg = clock,
                            .random = &kvf_random_seeded_ops,
                            .random_arg = random};
}
