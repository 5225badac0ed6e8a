/* SPDX-License-Identifier: Apache-2.0
 *
 * format_store.c: tell, ask, format.
 */
#include "agent/format_store.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/limits.h"
#include "tiers/nvme_format.h"
#include "tiers/tier_nvme.h"

/* So much from the start decides whether a path is called empty. */
#define LOOK_BYTES 4096

struct target {
    const char *path;
    const char *kind;     /* for the message */
    uint64_t now_bytes;   /* size of the file or device, 0: missing */
    uint64_t store_bytes; /* that it shall have */
    uint64_t segment_bytes;
};

/* One sentence on what is there now. */
static void describe_content(const struct target *target, char *out, size_t bytes)
{
    uint8_t page[LOOK_BYTES] = {0};
    int fd = open(target->path, O_RDONLY | O_CLOEXEC);
    uint64_t magic;
    size_t zeroes = 0;

    if (fd < 0) {
        snprintf(out, bytes, "It does not exist.");
        return;
    }
    if (target->now_bytes < LOOK_BYTES) {
        snprintf(out, bytes, target->now_bytes == 0 ? "It is empty." : "It holds a small file.");
    } else if (kvf_fd_pread_all(fd, page, sizeof(page), 0) != KVF_OK) {
        snprintf(out, bytes, "It cannot be read: %s.", strerror(errno));
    } else {
        memcpy(&magic, page, sizeof(magic));
        while (zeroes < sizeof(page) && page[zeroes] == 0) {
            zeroes++;
        }
        snprintf(out, bytes, "%s",
                 magic == KVF_NVME_SUPER_MAGIC
                     ? "It holds a kvferry store: all its blocks are lost."
                 : zeroes == sizeof(page) ? "It begins with zeroes."
                                          : "It holds data that is not kvferry's: all is lost.");
    }
    kvf_fd_close(&fd);
}

static int look_at(struct target *target)
{
    struct stat st;
    int fd;

    target->kind = "new file";
    if (stat(target->path, &st) != 0) {
        return 0;
    }
    if (S_ISREG(st.st_mode)) {
        target->kind = "file";
        target->now_bytes = (uint64_t)st.st_size;
        return 0;
    }
    if (!S_ISBLK(st.st_mode)) {
        fprintf(stderr, "kvferryd: --format %s: neither a file nor a block device; name one\n",
                target->path);
        return 2;
    }
    target->kind = "block device";
    fd = open(target->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || ioctl(fd, BLKGETSIZE64, &target->now_bytes) != 0) {
        fprintf(stderr, "kvferryd: --format %s: %s; run as a user that may write to it\n",
                target->path, strerror(errno));
        kvf_fd_close(&fd);
        return 1;
    }
    kvf_fd_close(&fd);
    return 0;
}

static bool confirm(void)
{
    char line[16] = "";

    if (!isatty(STDIN_FILENO)) {
        fprintf(stderr, "kvferryd: --format needs a yes: add --yes, or run it on a terminal\n");
        return false;
    }
    printf("Type yes to go on: ");
    fflush(stdout);
    if (fgets(line, sizeof(line), stdin) == NULL || strcmp(line, "yes\n") != 0) {
        printf("Nothing was changed.\n");
        return false;
    }
    return true;
}

static int format(const struct kvf_config *config, const struct target *target)
{
    struct kvf_nvme_config nvme;
    char why[KVF_ERROR_TEXT_BYTES] = "";
    uint8_t key[32];
    int status;

    kvf_nvme_config_init(&nvme);
    nvme.path = target->path;
    nvme.bytes = target->store_bytes;
    nvme.segment_bytes = target->segment_bytes;
    if (config->cluster_key[0] != '\0') {
        if (kvf_config_cluster_key_read(config->cluster_key, key, why, sizeof(why)) != KVF_OK) {
            fprintf(stderr, "kvferryd: cluster_key: %s\n", why);
            return 2;
        }
        nvme.id_key = key;
    }
    status = kvf_nvme_format(&nvme, why, sizeof(why));
    explicit_bzero(key, sizeof(key));
    if (status != KVF_OK) {
        fprintf(stderr, "kvferryd: --format %s: %s\n", target->path,
                why[0] != '\0' ? why : kvf_status_text(status));
        return status == KVF_ERR_CONFIG ? 2 : 1;
    }
    printf("%s is an empty kvferry store now.\n", target->path);
    return 0;
}

int kvf_format_store(const struct kvf_config *config, const char *path, uint64_t bytes,
                     bool is_confirmed)
{
    struct target target = {.path = path, .store_bytes = bytes};
    char content[128];
    int code;

    for (uint32_t i = 0; i < config->n_nvme; i++) {
        if (strcmp(config->nvme[i].path, path) == 0) {
            target.store_bytes = bytes != 0 ? bytes : config->nvme[i].bytes;
            target.segment_bytes = config->nvme[i].segment_bytes;
        }
    }
    code = look_at(&target);
    if (code != 0) {
        return code;
    }
    if (target.store_bytes == 0) {
        target.store_bytes = target.now_bytes;
    }
    if (target.store_bytes == 0) {
        fprintf(stderr, "kvferryd: --format %s: a new file needs a size; add --bytes SIZE\n", path);
        return 2;
    }
    describe_content(&target, content, sizeof(content));
    printf("%s (%s) becomes an empty kvferry store of %" PRIu64 " MiB. %s\n", path, target.kind,
           target.store_bytes >> 20, content);
    fflush(stdout);
    if (!is_confirmed && !confirm()) {
        return 1;
    }
    return format(config, &target);
}
