/* SPDX-License-Identifier: Apache-2.0
 *
 * shared_bytes.c: descriptors and mappings of memfds, from /proc (shared_bytes.h).
 */
#include "tests/fault/shared_bytes.h"

#include <dirent.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MEMFD "/memfd:"

/* One object, seen again or for the first time. is_exact: by what it has allocated. */
static void see(struct shared_objects *objects, uint64_t inode, uint64_t bytes, bool is_exact)
{
    uint32_t i = 0;

    while (i < objects->n && objects->list[i].inode != inode) {
        i++;
    }
    if (i == SHARED_OBJECTS_MAX) {
        fprintf(stderr, "more than %d memory objects\n", SHARED_OBJECTS_MAX);
        abort();
    }
    if (i == objects->n) {
        objects->n++;
        objects->list[i].inode = inode;
        objects->list[i].bytes = bytes;
        objects->list[i].round = 0;
    }
    if (is_exact) {
        objects->list[i].bytes = bytes;
    }
    if (objects->list[i].round != objects->round) {
        objects->list[i].round = objects->round;
        objects->bytes += objects->list[i].bytes;
    }
}

static void see_descriptors(struct shared_objects *objects, pid_t pid)
{
    const struct dirent *entry;
    char path[320];
    DIR *folder;

    snprintf(path, sizeof(path), "/proc/%d/fd", pid);
    folder = opendir(path);
    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        char target[64] = "";
        struct stat st;

        snprintf(path, sizeof(path), "/proc/%d/fd/%s", pid, entry->d_name);
        if (readlink(path, target, sizeof(target) - 1) > 0 &&
            strncmp(target, MEMFD, strlen(MEMFD)) == 0 && stat(path, &st) == 0) {
            see(objects, st.st_ino, (uint64_t)st.st_blocks * 512, true);
        }
    }
    if (folder != NULL) {
        closedir(folder);
    }
}

/* An object that nobody has open and that is new here: a ring or staging that its maker has closed.
 * All of it counts. */
static void see_mappings(struct shared_objects *objects, pid_t pid)
{
    char path[32];
    char line[512];
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/maps", pid);
    file = fopen(path, "r");
    while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
        uint64_t begin, end, inode;

        if (strstr(line, MEMFD) != NULL &&
            sscanf(line, "%" SCNx64 "-%" SCNx64 " %*s %*s %*s %" SCNu64, &begin, &end, &inode) ==
                3) {
            see(objects, inode, end - begin, false);
        }
    }
    if (file != NULL) {
        fclose(file);
    }
}

uint64_t shared_bytes_look(struct shared_objects *objects, const pid_t *pids, uint32_t n_pids)
{
    objects->round++;
    objects->bytes = 0;
    for (uint32_t i = 0; i < n_pids; i++) {
        see_descriptors(objects, pids[i]);
        see_mappings(objects, pids[i]);
    }
    if (objects->bytes > objects->most_bytes) {
        objects->most_bytes = objects->bytes;
    }
    return objects->bytes;
}
