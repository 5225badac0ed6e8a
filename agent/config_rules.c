/* SPDX-License-Identifier: Apache-2.0
 *
 * config_rules.c: values that follow from others, and rules that one option alone cannot break.
 */
#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agent/config.h"
#include "agent/config_internal.h"
#include "base/parse.h"
#include "tiers/nvme_format.h"
#include "tiers/tier_dram.h"
#include "tiers/tier_nvme.h"

/* Stores over this need a write budget: a drive's endurance must be somebody's decision. */
#define FREE_WRITE_BYTES_MAX (64ull << 30)

/* Of stores that are small enough for the question. */
#define STORE_SEGMENT_BYTES_DEFAULT (128ull << 20)

#define DEFAULT_STORE_BYTES "2GiB"

/* Positions in the tables, which the order in config.def gives. */
enum socket_position {
    SOCKET_PATH = 0,
    SOCKET_TENANT = 3,
};
enum nvme_position {
    NVME_PATH = 0,
    NVME_BYTES = 1,
    NVME_SEGMENT = 2,
    NVME_BUDGET = 5,
};

/* Where to point for a member: its value's line, else where the member begins. */
static uint32_t value_line(uint32_t value, uint32_t member)
{
    return value != KVF_CONFIG_LINE_DEFAULT ? value : member;
}

/* Fail for an option with a number. */
#define FAIL(config, error, id, ...) fail_option(config, error, KVF_CONFIG_ID_##id, __VA_ARGS__)

static int fail_option(const struct kvf_config *config, struct kvf_config_error *error,
                       enum kvf_config_option_id id, const char *text)
{
    char name[64];

    kvf_config_option_name(&kvf_config_options[id], name, sizeof(name));
    kvf_config_fail_at(config, config->lines[id], name, error, "%s", text);
    return KVF_ERR_CONFIG;
}

/* --- a daemon without a file ------------------------------------------------------------------ */

/* Make one folder if it is missing. False: it is not there afterwards, or not writable. */
static bool make_folder(const char *path, mode_t mode)
{
    struct stat st;

    if (mkdir(path, mode) != 0 && errno != EEXIST) {
        return false;
    }
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode) && access(path, W_OK | X_OK) == 0;
}

static int set_own(struct kvf_config *config, const char *name, const char *folder,
                   const char *file, struct kvf_config_error *error)
{
    char assignment[4352];

    snprintf(assignment, sizeof(assignment), "%s=%s%s", name, folder, file);
    return kvf_config_set(config, assignment, error);
}

static int use_folders(struct kvf_config *config, const char *socket_folder,
                       const char *store_folder, struct kvf_config_error *error)
{
    int status = set_own(config, "sockets.0.path", socket_folder, "/kvferryd.sock", error);

    if (status == KVF_OK) {
        status = set_own(config, "nvme.0.path", store_folder, "/nvme.store", error);
    }
    if (status == KVF_OK) {
        status = set_own(config, "nvme.0.bytes", DEFAULT_STORE_BYTES, "", error);
    }
    return status;
}

int kvf_config_use_dir(struct kvf_config *config, const char *dir, struct kvf_config_error *error)
{
    const char *base;
    char *real;
    char chosen[4096];
    int status;

    if (dir == NULL && make_folder("/run/kvferry", 0755) && make_folder("/var/lib/kvferry", 0700)) {
        return use_folders(config, "/run/kvferry", "/var/lib/kvferry", error);
    }
    if (dir == NULL) {
        base = getenv("XDG_RUNTIME_DIR");
        if (base == NULL || access(base, W_OK | X_OK) != 0) {
            base = getenv("TMPDIR");
        }
        if (base == NULL || access(base, W_OK | X_OK) != 0) {
            base = "/tmp";
        }
        /* The name carries the user, so that two of them do not meet under /tmp. */
        snprintf(chosen, sizeof(chosen), "%.4000s/kvferry-%u", base, (unsigned)geteuid());
        dir = chosen;
    }
    if (!make_folder(dir, 0700)) {
        snprintf(error->text, sizeof(error->text),
                 "command line: --dir: folder %.255s cannot be made or written: %s; name one in a "
                 "folder that this user can write",
                 dir, strerror(errno != 0 ? errno : EACCES));
        return KVF_ERR_CONFIG;
    }
    real = realpath(dir, NULL);
    if (real == NULL) {
        snprintf(error->text, sizeof(error->text), "command line: --dir: %.255s: %s; name another",
                 dir, strerror(errno));
        return KVF_ERR_CONFIG;
    }
    status = use_folders(config, real, real, error);
    free(real);
    return status;
}

/* --- rules ------------------------------------------------------------------------------------ */

/* Names that people and labels of metrics see. */
static bool is_plain_name(const char *name)
{
    for (; *name != '\0'; name++) {
        if (!isalnum((unsigned char)*name) && strchr("._-", *name) == NULL) {
            return false;
        }
    }
    return true;
}

static int check_absolute(const struct kvf_config *config, uint32_t line, const char *name,
                          const char *path, struct kvf_config_error *error)
{
    if (path[0] != '/') {
        kvf_config_fail_at(config, line, name, error,
                           "'%.200s' is no absolute path; begin it with '/'", path);
        return KVF_ERR_CONFIG;
    }
    return KVF_OK;
}

static int check_socket(const struct kvf_config *config, uint32_t index,
                        struct kvf_config_error *error)
{
    const struct kvf_config_socket *s = &config->sockets[index];
    uint32_t line = value_line(s->lines[SOCKET_PATH], s->line);

    if (check_absolute(config, line, "sockets.path", s->path, error) != KVF_OK) {
        return KVF_ERR_CONFIG;
    }
    for (uint32_t i = 0; i < index; i++) {
        if (strcmp(config->sockets[i].path, s->path) == 0) {
            kvf_config_fail_at(config, line, "sockets.path", error,
                               "%.108s is the path of another socket too; give each its own",
                               s->path);
            return KVF_ERR_CONFIG;
        }
    }
    if (s->tenant[0] == '\0' || !is_plain_name(s->tenant)) {
        kvf_config_fail_at(config, value_line(s->lines[SOCKET_TENANT], s->line), "sockets.tenant",
                           error, "'%.63s' is no name; use letters, digits, '.', '_' and '-'",
                           s->tenant);
        return KVF_ERR_CONFIG;
    }
    return KVF_OK;
}

/* A store needs its head and four segments: two may be open, and one is being reused. */
static int check_segments(const struct kvf_config *config, const struct kvf_config_nvme *d,
                          struct kvf_config_error *error)
{
    uint64_t segment = d->segment_bytes;

    if (segment != 0 && (segment < KVF_NVME_SEGMENT_BYTES_MIN || segment % KVF_NVME_PAGE_BYTES)) {
        kvf_config_fail_at(config, value_line(d->lines[NVME_SEGMENT], d->line),
                           "nvme.segment_bytes", error,
                           "it must be a multiple of 4KiB and at least 64KiB; give it 0 for the "
                           "default");
        return KVF_ERR_CONFIG;
    }
    if (segment == 0) {
        segment = STORE_SEGMENT_BYTES_DEFAULT;
    }
    if (d->bytes != 0 && d->bytes < KVF_NVME_SEGMENT_OFFSET + KVF_NVME_SEGMENTS_MIN * segment) {
        kvf_config_fail_at(config, value_line(d->lines[NVME_BYTES], d->line), "nvme.bytes", error,
                           "too small for %d segments of %" PRIu64 "MiB; give it at least %" PRIu64
                           "MiB",
                           KVF_NVME_SEGMENTS_MIN, segment >> 20,
                           (KVF_NVME_SEGMENT_OFFSET + KVF_NVME_SEGMENTS_MIN * segment) >> 20);
        return KVF_ERR_CONFIG;
    }
    return KVF_OK;
}

static int check_drive(const struct kvf_config *config, uint32_t index,
                       struct kvf_config_error *error)
{
    const struct kvf_config_nvme *d = &config->nvme[index];
    uint32_t line = value_line(d->lines[NVME_PATH], d->line);

    if (d->path[0] == '\0') {
        kvf_config_fail_at(config, d->line, "nvme.path", error,
                           "it is missing; name a file or a device");
        return KVF_ERR_CONFIG;
    }
    if (check_absolute(config, line, "nvme.path", d->path, error) != KVF_OK) {
        return KVF_ERR_CONFIG;
    }
    for (uint32_t i = 0; i < index; i++) {
        if (strcmp(config->nvme[i].path, d->path) == 0) {
            kvf_config_fail_at(config, line, "nvme.path", error,
                               "%.200s is the path of another drive too; give each its own",
                               d->path);
            return KVF_ERR_CONFIG;
        }
    }
    if (check_segments(config, d, error) != KVF_OK) {
        return KVF_ERR_CONFIG;
    }
    return kvf_config_check_write_budget(config, index, error);
}

int kvf_config_check_write_budget(const struct kvf_config *config, uint32_t index,
                                  struct kvf_config_error *error)
{
    const struct kvf_config_nvme *d = &config->nvme[index];

    if (d->bytes > FREE_WRITE_BYTES_MAX && d->write_budget == 0) {
        kvf_config_fail_at(config, value_line(d->lines[NVME_BUDGET], d->line), "nvme.write_budget",
                           error,
                           "it must be set for a store over 64 GiB; give bytes a second that the "
                           "drive can take for years, as 50MiB");
        return KVF_ERR_CONFIG;
    }
    return KVF_OK;
}

/* "127.0.0.1:9394" or "[::1]:9394". */
int kvf_config_listen_parse(const char *text, struct sockaddr_storage *address_out,
                            socklen_t *bytes_out)
{
    struct sockaddr_in *v4 = (struct sockaddr_in *)address_out;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)address_out;
    const char *colon = strrchr(text, ':');
    char detail[256];
    char host[64];
    uint64_t port;
    size_t length;

    if (colon == NULL || (size_t)(colon - text) >= sizeof(host) ||
        kvf_parse_u64(colon + 1, &port, detail, sizeof(detail)) != KVF_OK || port == 0 ||
        port > UINT16_MAX) {
        return KVF_ERR_INVALID;
    }
    length = (size_t)(colon - text);
    memcpy(host, text, length);
    host[length] = '\0';
    memset(address_out, 0, sizeof(*address_out));
    if (inet_pton(AF_INET, host, &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        v4->sin_port = htons((uint16_t)port);
        *bytes_out = sizeof(*v4);
        return KVF_OK;
    }
    if (length < 2 || host[0] != '[' || host[length - 1] != ']') {
        return KVF_ERR_INVALID;
    }
    host[length - 1] = '\0';
    if (inet_pton(AF_INET6, host + 1, &v6->sin6_addr) != 1) {
        return KVF_ERR_INVALID;
    }
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons((uint16_t)port);
    *bytes_out = sizeof(*v6);
    return KVF_OK;
}

/* The admin socket has a default that follows from the first client socket. */
static int finish_admin(struct kvf_config *config, struct kvf_config_error *error)
{
    struct sockaddr_storage address;
    socklen_t address_bytes;
    uint32_t line = config->lines[KVF_CONFIG_ID_admin_socket];

    if (config->admin_socket[0] == '\0') {
        int length = snprintf(config->admin_socket, sizeof(config->admin_socket), "%s.admin",
                              config->sockets[0].path);

        if (length < 0 || (size_t)length >= sizeof(config->admin_socket)) {
            return FAIL(config, error, admin_socket,
                        "the first client socket with .admin appended is longer than 107 "
                        "characters; set admin.socket to a shorter path");
        }
    }
    if (check_absolute(config, line, "admin.socket", config->admin_socket, error) != KVF_OK) {
        return KVF_ERR_CONFIG;
    }
    for (uint32_t i = 0; i < config->n_sockets; i++) {
        if (strcmp(config->sockets[i].path, config->admin_socket) == 0) {
            return FAIL(config, error, admin_socket,
                        "it is the path of a client socket too; give it its own");
        }
    }
    if (config->admin_listen[0] != '\0' &&
        kvf_config_listen_parse(config->admin_listen, &address, &address_bytes) != KVF_OK) {
        return FAIL(config, error, admin_listen,
                    "it is no numeric address and port; write it as 127.0.0.1:9394 or [::1]:9394");
    }
    return KVF_OK;
}

static int check_numbers(const struct kvf_config *config, struct kvf_config_error *error)
{
    if (config->dram_area_bytes % 4096 != 0 || config->dram_piece_bytes % 4096 != 0) {
        return FAIL(config, error, dram_area_bytes,
                    "areas and pieces are made of pages; use multiples of 4096");
    }
    if (config->lines[KVF_CONFIG_ID_dram_area_bytes] != KVF_CONFIG_LINE_DEFAULT &&
        config->dram_area_bytes > config->dram_piece_bytes) {
        return FAIL(config, error, dram_area_bytes,
                    "it is larger than dram.piece_bytes; lower it or raise the piece");
    }
    if (config->lines[KVF_CONFIG_ID_dram_area_bytes] != KVF_CONFIG_LINE_DEFAULT &&
        config->dram_area_bytes > config->dram_bytes) {
        return FAIL(config, error, dram_area_bytes,
                    "it is larger than dram.bytes; lower it or raise the arena");
    }
    if (config->staging_client > config->staging_total) {
        return FAIL(config, error, staging_client,
                    "it is larger than staging.total; lower it or raise the total");
    }
    if ((config->clients_ring_entries & (config->clients_ring_entries - 1)) != 0) {
        return FAIL(config, error, clients_ring_entries,
                    "it is no power of two; use one, as 1024 or 4096");
    }
    if (config->lease_client_share > config->lease_tenant_share) {
        return FAIL(config, error, lease_client_share,
                    "it is larger than lease.tenant_share; lower it or raise the other");
    }
    if (config->quota_namespace_share > config->quota_tenant_share) {
        return FAIL(config, error, quota_namespace_share,
                    "it is larger than quota.tenant_share; lower it or raise the other");
    }
    return KVF_OK;
}

/* Sockets of one tenant share it. */
static uint16_t count_tenants(const struct kvf_config *config)
{
    uint16_t count = 0;

    for (uint32_t i = 0; i < config->n_sockets; i++) {
        uint32_t j = 0;

        while (j < i && strcmp(config->sockets[i].tenant, config->sockets[j].tenant) != 0) {
            j++;
        }
        count += j == i;
    }
    return count;
}

void kvf_config_dram(const struct kvf_config *config, struct kvf_dram_config *dram_out)
{
    kvf_dram_config_init(dram_out);
    dram_out->arena_bytes = config->dram_bytes;
    dram_out->piece_bytes = config->dram_piece_bytes;
    dram_out->area_bytes = config->dram_area_bytes;
    dram_out->hugepages = (enum kvf_hugepage_mode)config->dram_hugepages;
    dram_out->n_tenants = count_tenants(config);
}

void kvf_config_nvme_pack(const struct kvf_config *config, uint32_t index,
                          struct kvf_nvme_config *nvme)
{
    nvme->packs = config->nvme[index].recompress == KVF_RECOMPRESS_ENTROPY;
    nvme->pack_count = (uint32_t)(config->workers + 1) / 2;
    nvme->unpack_count = (uint32_t)config->workers;
}

/* What is printed as in force is what the tier makes of it. Where it can make nothing of it, it
 * says so when it opens. */
static void fit_areas(struct kvf_config *config)
{
    struct kvf_dram_config dram;
    uint64_t area_bytes;

    kvf_config_dram(config, &dram);
    area_bytes = kvf_dram_area_bytes(&dram);
    config->dram_area_bytes = area_bytes != 0 ? area_bytes : config->dram_area_bytes;
}

int kvf_config_finish(struct kvf_config *config, struct kvf_config_error *error)
{
    if (config->n_sockets == 0) {
        kvf_config_list_append(config, kvf_config_list_find("sockets"), KVF_CONFIG_LINE_DEFAULT);
    }
    for (uint32_t i = 0; i < config->n_sockets; i++) {
        if (check_socket(config, i, error) != KVF_OK) {
            kvf_config_name_member(error, "sockets", i);
            return KVF_ERR_CONFIG;
        }
    }
    for (uint32_t i = 0; i < config->n_nvme; i++) {
        if (check_drive(config, i, error) != KVF_OK) {
            kvf_config_name_member(error, "nvme", i);
            return KVF_ERR_CONFIG;
        }
    }
    if (config->cluster_key[0] != '\0' &&
        check_absolute(config, config->lines[KVF_CONFIG_ID_cluster_key], "cluster_key",
                       config->cluster_key, error) != KVF_OK) {
        return KVF_ERR_CONFIG;
    }
    if (check_numbers(config, error) != KVF_OK || kvf_config_check_peers(config, error) != KVF_OK) {
        return KVF_ERR_CONFIG;
    }
    fit_areas(config);
    return finish_admin(config, error);
}
