/* SPDX-License-Identifier: Apache-2.0
 *
 * config_paths.c: does the configuration fit this machine's folders, groups, devices and file
 * systems? Nothing is changed here; what is found wrong is told before anything is started.
 */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <inttypes.h>
#include <linux/fs.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "agent/config.h"
#include "agent/config_internal.h"
#include "agent/directory.h"
#include "base/fd.h"
#include "base/parse.h"

int kvf_config_group(const char *name, int64_t *gid_out)
{
    char detail[256];
    char buffer[4096];
    struct group group;
    struct group *found = NULL;
    uint64_t number;

    if (name[0] == '\0') {
        *gid_out = -1;
        return KVF_OK;
    }
    if (kvf_parse_u64(name, &number, detail, sizeof(detail)) == KVF_OK && number < UINT32_MAX) {
        *gid_out = (int64_t)number;
        return KVF_OK;
    }
    if (getgrnam_r(name, &group, buffer, sizeof(buffer), &found) != 0 || found == NULL) {
        return KVF_ERR_CONFIG;
    }
    *gid_out = group.gr_gid;
    return KVF_OK;
}

int kvf_config_cluster_key_read(const char *path, uint8_t key_out[32], char *text_out,
                                size_t text_bytes)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat st;
    int status = KVF_ERR_CONFIG;

    if (fd < 0 || fstat(fd, &st) != 0) {
        snprintf(text_out, text_bytes,
                 "file %.200s cannot be read: %s; check the path and its permissions", path,
                 strerror(errno));
    } else if (!S_ISREG(st.st_mode) || st.st_size != 32) {
        snprintf(text_out, text_bytes,
                 "%.200s does not hold exactly 32 bytes; make it with: head -c 32 /dev/urandom",
                 path);
    } else if (kvf_fd_pread_all(fd, key_out, 32, 0) != KVF_OK) {
        snprintf(text_out, text_bytes, "%.200s: reading failed: %s; try again", path,
                 strerror(errno));
    } else {
        status = KVF_OK;
    }
    kvf_fd_close(&fd);
    return status;
}

/* The folder of a path, "/" for files below the root. */
static void parent_of(const char *path, char *out, size_t bytes)
{
    const char *slash = strrchr(path, '/');
    int length = slash == NULL || slash == path ? 1 : (int)(slash - path);

    snprintf(out, bytes, "%.*s", length, slash == NULL ? "." : path);
}

/* Can files be made in the folder of path? */
static int check_parent(const struct kvf_config *config, uint32_t line, const char *name,
                        const char *path, struct kvf_config_error *error)
{
    char parent[4096];
    struct stat st;

    parent_of(path, parent, sizeof(parent));
    if (stat(parent, &st) != 0) {
        kvf_config_fail_at(config, line, name, error,
                           "folder %.200s: %s; make it, or change the path", parent,
                           strerror(errno));
        return KVF_ERR_CONFIG;
    }
    if (!S_ISDIR(st.st_mode)) {
        kvf_config_fail_at(config, line, name, error, "%.200s is no folder; change the path",
                           parent);
        return KVF_ERR_CONFIG;
    }
    if (access(parent, W_OK | X_OK) != 0) {
        kvf_config_fail_at(config, line, name, error,
                           "folder %.200s cannot be written: %s; change its permissions, or the "
                           "path",
                           parent, strerror(errno));
        return KVF_ERR_CONFIG;
    }
    return KVF_OK;
}

/* A path at which a socket shall be: free, or a socket (which listening takes over if it is stale).
 */
static int check_socket_path(const struct kvf_config *config, uint32_t line, const char *name,
                             const char *path, struct kvf_config_error *error)
{
    struct stat st;

    if (check_parent(config, line, name, path, error) != KVF_OK) {
        return KVF_ERR_CONFIG;
    }
    if (lstat(path, &st) == 0 && !S_ISSOCK(st.st_mode)) {
        /* A container runtime that mounts a socket which is not there makes a folder. */
        kvf_config_fail_at(config, line, name, error,
                           "%.108s is a %s; remove it (and mount the folder, never the socket)",
                           path, S_ISDIR(st.st_mode) ? "folder" : "file of another kind");
        return KVF_ERR_CONFIG;
    }
    return KVF_OK;
}

static int check_sockets(const struct kvf_config *config, struct kvf_config_error *error)
{
    for (uint32_t i = 0; i < config->n_sockets; i++) {
        const struct kvf_config_socket *s = &config->sockets[i];
        int64_t gid;

        if (check_socket_path(config, s->lines[0] != 0 ? s->lines[0] : s->line, "sockets.path",
                              s->path, error) != KVF_OK) {
            kvf_config_name_member(error, "sockets", i);
            return KVF_ERR_CONFIG;
        }
        if (kvf_config_group(s->group, &gid) != KVF_OK) {
            kvf_config_fail_at(config, s->lines[2] != 0 ? s->lines[2] : s->line, "sockets.group",
                               error, "group '%.63s' does not exist; make it, or name another",
                               s->group);
            kvf_config_name_member(error, "sockets", i);
            return KVF_ERR_CONFIG;
        }
    }
    return check_socket_path(config, config->lines[KVF_CONFIG_ID_admin_socket], "admin.socket",
                             config->admin_socket, error);
}

/* What a store's path is, and what it would need. */
struct store {
    dev_t file_system; /* of a file, or of its folder if it is missing */
    uint64_t need_bytes;
    uint64_t free_bytes;
};

static int check_device(struct kvf_config *config, uint32_t index, struct kvf_config_error *error)
{
    struct kvf_config_nvme *d = &config->nvme[index];
    uint32_t line = d->lines[0] != 0 ? d->lines[0] : d->line;
    int fd = open(d->path, O_RDWR | O_CLOEXEC);
    uint64_t bytes = 0;

    if (fd < 0 || ioctl(fd, BLKGETSIZE64, &bytes) != 0) {
        kvf_config_fail_at(config, line, "nvme.path", error,
                           "device %.200s: %s; give this user access to it", d->path,
                           strerror(errno));
        kvf_fd_close(&fd);
        return KVF_ERR_CONFIG;
    }
    kvf_fd_close(&fd);
    if (d->bytes > bytes) {
        kvf_config_fail_at(config, d->lines[1] != 0 ? d->lines[1] : d->line, "nvme.bytes", error,
                           "device %.200s has only %" PRIu64 "; lower it, or 0 for all of it",
                           d->path, bytes);
        return KVF_ERR_CONFIG;
    }
    if (d->bytes == 0) {
        d->bytes = bytes;
    }
    return kvf_config_check_write_budget(config, index, error);
}

/* A store in a file that exists (st) or not (st NULL). */
static int check_file(struct kvf_config *config, uint32_t index, const struct stat *st,
                      struct store *store, struct kvf_config_error *error)
{
    struct kvf_config_nvme *d = &config->nvme[index];
    uint32_t line = d->lines[0] != 0 ? d->lines[0] : d->line;
    char folder[4096];
    struct statvfs fs;
    struct stat parent;
    uint64_t have = st != NULL ? (uint64_t)st->st_blocks * 512 : 0;

    if (st == NULL && check_parent(config, line, "nvme.path", d->path, error) != KVF_OK) {
        return KVF_ERR_CONFIG;
    }
    if (st != NULL && access(d->path, R_OK | W_OK) != 0) {
        kvf_config_fail_at(config, line, "nvme.path", error,
                           "%.200s cannot be read and written: %s; change its permissions, or the "
                           "path",
                           d->path, strerror(errno));
        return KVF_ERR_CONFIG;
    }
    if (d->bytes == 0 && (st == NULL || st->st_size == 0)) {
        kvf_config_fail_at(config, d->lines[1] != 0 ? d->lines[1] : d->line, "nvme.bytes", error,
                           "a new store in a file needs a size; give it one, as 100GiB");
        return KVF_ERR_CONFIG;
    }
    if (d->bytes == 0) {
        d->bytes = (uint64_t)st->st_size;
        if (kvf_config_check_write_budget(config, index, error) != KVF_OK) {
            return KVF_ERR_CONFIG;
        }
    }
    parent_of(d->path, folder, sizeof(folder));
    if (statvfs(folder, &fs) != 0 || stat(folder, &parent) != 0) {
        kvf_config_fail_at(config, line, "nvme.path", error, "folder %.200s: %s; change the path",
                           folder, strerror(errno));
        return KVF_ERR_CONFIG;
    }
    store->file_system = st != NULL ? st->st_dev : parent.st_dev;
    store->need_bytes = d->bytes > have ? d->bytes - have : 0;
    store->free_bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
    return KVF_OK;
}

/* Do all stores up to this one fit together into its file system? */
static int check_room(const struct kvf_config *config, uint32_t index, const struct store *stores,
                      struct kvf_config_error *error)
{
    const struct kvf_config_nvme *d = &config->nvme[index];
    uint64_t need = 0;

    for (uint32_t i = 0; i <= index; i++) {
        if (stores[i].file_system == stores[index].file_system) {
            need += stores[i].need_bytes;
        }
    }
    if (stores[index].need_bytes != 0 && need > stores[index].free_bytes) {
        kvf_config_fail_at(config, d->lines[1] != 0 ? d->lines[1] : d->line, "nvme.bytes", error,
                           "%.200s needs %" PRIu64 " MiB more and its file system has %" PRIu64
                           " MiB free; lower it, or free some space",
                           d->path, need >> 20, stores[index].free_bytes >> 20);
        return KVF_ERR_CONFIG;
    }
    return KVF_OK;
}

/* Has this machine the address? At a port of the kernel's choice: the configured one may be a
 * running daemon's, whose configuration is checked. */
static int check_listen(const struct kvf_config *config, struct kvf_config_error *error)
{
    struct sockaddr_storage address;
    socklen_t bytes;
    int fd;
    bool is_strange;

    if (config->peers_listen[0] == '\0' ||
        kvf_config_listen_parse(config->peers_listen, &address, &bytes) != KVF_OK) {
        return KVF_OK;
    }
    ((struct sockaddr_in *)&address)->sin_port = 0; /* where sin6_port is too */
    fd = socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    is_strange = fd >= 0 && bind(fd, (struct sockaddr *)&address, bytes) != 0 &&
                 errno == EADDRNOTAVAIL;
    kvf_fd_close(&fd);
    if (is_strange) {
        kvf_config_fail_at(config, config->lines[KVF_CONFIG_ID_peers_listen], "peers.listen", error,
                           "%.64s is an address of no device of this machine; give it one that "
                           "`ip address` shows",
                           config->peers_listen);
        return KVF_ERR_CONFIG;
    }
    return KVF_OK;
}

/* Without hiredis, config_peers.c has refused the directory. */
static int check_password(const struct kvf_config *config, struct kvf_config_error *error)
{
#if KVF_HAVE_HIREDIS
    char secret[KVF_DIRECTORY_SECRET_BYTES];
    char why[512];
    int status;

    if (config->directory_password_file[0] == '\0') {
        return KVF_OK;
    }
    status = kvf_directory_password_read(config->directory_password_file, secret, why, sizeof(why));
    explicit_bzero(secret, sizeof(secret));
    if (status != KVF_OK) {
        kvf_config_fail_at(config, config->lines[KVF_CONFIG_ID_directory_password_file],
                           "directory.password_file", error, "%s", why);
        return KVF_ERR_CONFIG;
    }
#else
    (void)config;
    (void)error;
#endif
    return KVF_OK;
}

int kvf_config_check_paths(struct kvf_config *config, struct kvf_config_error *error)
{
    struct store stores[KVF_CONFIG_NVME_MAX] = {{0}};
    char why[512];
    uint8_t key[32];

    if (check_sockets(config, error) != KVF_OK) {
        return KVF_ERR_CONFIG;
    }
    for (uint32_t i = 0; i < config->n_nvme; i++) {
        struct stat st;
        bool exists = stat(config->nvme[i].path, &st) == 0;
        int status;

        if (exists && S_ISBLK(st.st_mode)) {
            status = check_device(config, i, error);
        } else if (exists && !S_ISREG(st.st_mode)) {
            kvf_config_fail_at(config, config->nvme[i].line, "nvme.path", error,
                               "%.200s is neither a file nor a block device; change the path",
                               config->nvme[i].path);
            status = KVF_ERR_CONFIG;
        } else {
            status = check_file(config, i, exists ? &st : NULL, &stores[i], error);
        }
        if (status == KVF_OK) {
            status = check_room(config, i, stores, error);
        }
        if (status != KVF_OK) {
            kvf_config_name_member(error, "nvme", i);
            return status;
        }
    }
    if (config->cluster_key[0] != '\0' &&
        kvf_config_cluster_key_read(config->cluster_key, key, why, sizeof(why)) != KVF_OK) {
        kvf_config_fail_at(config, config->lines[KVF_CONFIG_ID_cluster_key], "cluster_key", error,
                           "%s", why);
        return KVF_ERR_CONFIG;
    }
    explicit_bzero(key, sizeof(key));
    return check_password(config, error) != KVF_OK ? KVF_ERR_CONFIG : check_listen(config, error);
}
