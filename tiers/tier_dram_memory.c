/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_dram_memory.c: how much memory the node and our cgroups have left.
 *
 * The arena grows an area at a time, and each asks here first, because the engine beside us and a
 * predecessor's arena, which clients still map, compete for the same memory. Page cache of ours
 * that the kernel can drop (inactive_file) does not count as used.
 */
#include "tiers/tier_dram.h"

#include "base/limits.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What must be left to others: a 32nd of the memory, within these bounds. */
#define RESERVE_BYTES_MIN (64ull << 20)
#define RESERVE_BYTES_MAX (2048ull << 20)

enum {
    PATH_BYTES = 4096,
    FILE_BYTES = 8192, /* enough for the lines that we look for */
};

#define CGROUP_MOUNT "/sys/fs/cgroup"

/* The beginning of a kernel file, folder and name joined, as text. */
static bool read_text(const char *folder, const char *name, char text[FILE_BYTES])
{
    char path[PATH_BYTES];
    size_t used = 0;
    int fd;

    if (snprintf(path, sizeof(path), "%s%s", folder, name) >= (int)sizeof(path)) {
        return false;
    }
    fd = open(path, O_RDONLY | O_CLOEXEC);

    if (fd < 0) {
        return false;
    }
    while (used < FILE_BYTES - 1) {
        ssize_t got = read(fd, text + used, FILE_BYTES - 1 - used);

        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            break;
        }
        used += (size_t)got;
    }
    close(fd);
    text[used] = '\0';
    return used > 0;
}

/* The number after name at the start of a line. */
static bool find_number(const char *text, const char *name, uint64_t *number_out)
{
    size_t name_bytes = strlen(name);

    for (const char *line = text; line != NULL; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, name, name_bytes) == 0) {
            char *end;

            errno = 0;
            *number_out = strtoull(line + name_bytes, &end, 10);
            return errno == 0 && end != line + name_bytes;
        }
        if (*line == '\0') {
            break;
        }
    }
    return false;
}

static bool read_number(const char *folder, const char *name, uint64_t *number_out)
{
    char text[FILE_BYTES];

    /* "max" is no number and means no limit */
    return read_text(folder, name, text) && find_number(text, "", number_out);
}

static uint64_t reserve_of(uint64_t total_bytes)
{
    uint64_t bytes = total_bytes / 32;

    bytes = bytes < RESERVE_BYTES_MIN ? RESERVE_BYTES_MIN : bytes;
    return bytes < RESERVE_BYTES_MAX ? bytes : RESERVE_BYTES_MAX;
}

static bool node_allows(const char *root, uint64_t bytes)
{
    char text[FILE_BYTES];
    uint64_t available_kib, total_kib;

    if (!read_text(root, "/proc/meminfo", text) ||
        !find_number(text, "MemAvailable:", &available_kib) ||
        !find_number(text, "MemTotal:", &total_kib)) {
        return true;
    }
    return available_kib * 1024 >= bytes + reserve_of(total_kib * 1024);
}

/* One cgroup's own limit; those above it are asked apart. */
static bool cgroup_allows(const char *folder, uint64_t bytes)
{
    char text[FILE_BYTES];
    uint64_t max_bytes, used_bytes, droppable_bytes = 0;

    if (!read_number(folder, "/memory.max", &max_bytes) ||
        !read_number(folder, "/memory.current", &used_bytes)) {
        return true;
    }
    if (read_text(folder, "/memory.stat", text) &&
        find_number(text, "inactive_file ", &droppable_bytes)) {
        used_bytes -= droppable_bytes < used_bytes ? droppable_bytes : used_bytes;
    }
    return max_bytes >= used_bytes && max_bytes - used_bytes >= bytes + reserve_of(max_bytes);
}

bool kvf_dram_memory_allows(void *ctx, uint64_t bytes)
{
    const char *root = ctx != NULL ? ctx : "";
    size_t mount_bytes = strlen(root) + strlen(CGROUP_MOUNT);
    char text[FILE_BYTES], folder[PATH_BYTES];
    char *name, *end;

    if (!node_allows(root, bytes)) {
        return false;
    }
    if (!read_text(root, "/proc/self/cgroup", text)) {
        return true;
    }
    /* version 2 has one line, "0::/path"; in a container the path begins at its own root */
    name = strncmp(text, "0::", 3) == 0 ? text : strstr(text, "\n0::");
    if (name == NULL) {
        return true;
    }
    name += *name == '\n' ? 4 : 3;
    end = strchr(name, '\n');
    if (end != NULL) {
        *end = '\0';
    }
    if (snprintf(folder, sizeof(folder), "%s" CGROUP_MOUNT "%s", root, name) >=
        (int)sizeof(folder)) {
        return true;
    }
    /* from our own group up to the mount point: each has its limit */
    while (cgroup_allows(folder, bytes)) {
        end = strrchr(folder, '/');
        if (strlen(folder) <= mount_bytes || end == NULL) {
            return true;
        }
        *end = '\0';
    }
    return false;
}
