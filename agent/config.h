/* SPDX-License-Identifier: Apache-2.0
 *
 * config.h: the configuration of kvferryd. One struct, made from config.def; filled with defaults,
 * then from a YAML file, then by --set, then finished (values that follow from others, rules that
 * span several options). Whatever is wrong is refused with one line: where, what, cure.
 */
#ifndef KVF_AGENT_CONFIG_H
#define KVF_AGENT_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/socket.h>

#include "base/status.h"

#define KVF_CONFIG_SOCKETS_MAX      16
#define KVF_CONFIG_NVME_MAX         8
#define KVF_CONFIG_FILE_BYTES_MAX   (1u << 20) /* of a configuration file */
#define KVF_CONFIG_ERROR_TEXT_BYTES 1024

#define KVF_CONFIG_FIELD_SIZE(field, max)    uint64_t field;
#define KVF_CONFIG_FIELD_RATE(field, max)    uint64_t field;
#define KVF_CONFIG_FIELD_SECONDS(field, max) uint64_t field;
#define KVF_CONFIG_FIELD_COUNT(field, max)   uint64_t field;
#define KVF_CONFIG_FIELD_PERCENT(field, max) uint64_t field;
#define KVF_CONFIG_FIELD_OCTAL(field, max)   uint64_t field;
#define KVF_CONFIG_FIELD_ENUM(field, max)    uint64_t field;
#define KVF_CONFIG_FIELD_BOOL(field, max)    bool field;
#define KVF_CONFIG_FIELD_STRING(field, max)  char field[(max) + 1];

/* Numbers of the options, in the order of config.def without the members of lists. */
enum kvf_config_option_id {
#define KVF_OPTION(section, key, type, default_, min, max, text) KVF_CONFIG_ID_##section##_##key,
#define KVF_TOP_OPTION(key, type, default_, min, max, text)      KVF_CONFIG_ID_##key,
#include "agent/config.def"
    KVF_CONFIG_OPTIONS
};

/* Where a value came from: a line of the file, or one of these. */
#define KVF_CONFIG_LINE_DEFAULT 0u
#define KVF_CONFIG_LINE_COMMAND UINT32_MAX /* --set or --dir */

#define KVF_CONFIG_SOCKET_KEYS 4
#define KVF_CONFIG_NVME_KEYS   8

/* sockets[].path, mode, group, tenant */
struct kvf_config_socket {
#define KVF_CONFIG_MEMBER_sockets(type, key, max) KVF_CONFIG_FIELD_##type(key, max)
#define KVF_CONFIG_MEMBER_nvme(type, key, max)
#define KVF_LIST_OPTION(list, key, type, default_, min, max, text)                                 \
    KVF_CONFIG_MEMBER_##list(type, key, max)
#include "agent/config.def"
#undef KVF_CONFIG_MEMBER_sockets
#undef KVF_CONFIG_MEMBER_nvme
    uint32_t line;                          /* where this member begins */
    uint32_t lines[KVF_CONFIG_SOCKET_KEYS]; /* of its values */
};

enum kvf_config_recompress {
    KVF_RECOMPRESS_OFF = 0,
    KVF_RECOMPRESS_ENTROPY = 1,
};

/* mode */
enum kvf_config_mode {
    KVF_MODE_SERVE = 0,
    KVF_MODE_OBSERVE = 1,
};

/* nvme[].admission */
enum kvf_config_admission {
    KVF_ADMISSION_AUTO = 0,
    KVF_ADMISSION_ALL = 1,
    KVF_ADMISSION_SECOND_SIGHT = 2,
};

/* nvme[].path, bytes, segment_bytes, engine (enum kvf_io_engine), depth, write_budget, admission
 * (enum kvf_config_admission), recompress (enum kvf_config_recompress) */
struct kvf_config_nvme {
#define KVF_CONFIG_MEMBER_sockets(type, key, max)
#define KVF_CONFIG_MEMBER_nvme(type, key, max) KVF_CONFIG_FIELD_##type(key, max)
#define KVF_LIST_OPTION(list, key, type, default_, min, max, text)                                 \
    KVF_CONFIG_MEMBER_##list(type, key, max)
#include "agent/config.def"
#undef KVF_CONFIG_MEMBER_sockets
#undef KVF_CONFIG_MEMBER_nvme
    uint32_t line;
    uint32_t lines[KVF_CONFIG_NVME_KEYS];
};

/* Fixed after start; any thread may read it. The field of an option is section_key. */
struct kvf_config {
#define KVF_OPTION(section, key, type, default_, min, max, text)                                   \
    KVF_CONFIG_FIELD_##type(section##_##key, max)
#define KVF_TOP_OPTION(key, type, default_, min, max, text) KVF_CONFIG_FIELD_##type(key, max)
#include "agent/config.def"
    uint32_t n_sockets; /* at least 1 once finished */
    uint32_t n_nvme;
    struct kvf_config_socket sockets[KVF_CONFIG_SOCKETS_MAX];
    struct kvf_config_nvme nvme[KVF_CONFIG_NVME_MAX];

    char file[4096]; /* for messages; empty: no file was read */
    uint32_t lines[KVF_CONFIG_OPTIONS];
};

enum kvf_config_type {
    KVF_CONFIG_SIZE,
    KVF_CONFIG_RATE,
    KVF_CONFIG_SECONDS,
    KVF_CONFIG_COUNT,
    KVF_CONFIG_PERCENT,
    KVF_CONFIG_OCTAL,
    KVF_CONFIG_ENUM,
    KVF_CONFIG_BOOL,
    KVF_CONFIG_STRING,
};

/* One row of config.def. */
struct kvf_config_option {
    const char *section; /* "" for the top level; for members of lists the list */
    const char *key;
    const char *default_text;
    const char *text;
    enum kvf_config_type type;
    uint64_t min, max;
    size_t offset; /* in struct kvf_config, or in the struct of a list's member */
};

/* The tables. Static storage. */
extern const struct kvf_config_option kvf_config_options[KVF_CONFIG_OPTIONS];
extern const struct kvf_config_option kvf_config_socket_options[KVF_CONFIG_SOCKET_KEYS];
extern const struct kvf_config_option kvf_config_nvme_options[KVF_CONFIG_NVME_KEYS];

/* One line, "FILE:LINE: what; cure". Written when a function below fails. */
struct kvf_config_error {
    char text[KVF_CONFIG_ERROR_TEXT_BYTES];
};

/* Every option at its default, no sockets and no drives. */
void kvf_config_init(struct kvf_config *config);

/* The socket and the store of a daemon without a file: in dir, or (dir NULL) under /run/kvferry and
 * /var/lib/kvferry where those can be written, else under $XDG_RUNTIME_DIR or $TMPDIR. Makes dir
 * and the folders that it chooses itself. KVF_OK; KVF_ERR_CONFIG. */
int kvf_config_use_dir(struct kvf_config *config, const char *dir, struct kvf_config_error *error);

/* Take values from YAML text; name is for messages. KVF_OK; KVF_ERR_CONFIG. */
int kvf_config_parse(struct kvf_config *config, const char *name, const char *yaml, size_t bytes,
                     struct kvf_config_error *error);

/* The same from a file. KVF_OK; KVF_ERR_CONFIG. */
int kvf_config_read(struct kvf_config *config, const char *path, struct kvf_config_error *error);

/* One value, "section.key=value", "key=value" or "nvme.0.path=value". A list member may be the next
 * one after the last. KVF_OK; KVF_ERR_CONFIG. */
int kvf_config_set(struct kvf_config *config, const char *assignment,
                   struct kvf_config_error *error);

/* Fill what follows from other options (the default socket, admin.socket) and check what spans
 * several. Looks at no file. KVF_OK; KVF_ERR_CONFIG. */
int kvf_config_finish(struct kvf_config *config, struct kvf_config_error *error);

/* The group of a socket by name or number, -1 for the empty name. KVF_OK; KVF_ERR_CONFIG: no such
 * group. */
int kvf_config_group(const char *name, int64_t *gid_out);

/* The address of admin.listen. KVF_OK; KVF_ERR_INVALID. */
int kvf_config_listen_parse(const char *text, struct sockaddr_storage *address_out,
                            socklen_t *bytes_out);

/* One of peers.nodes. */
struct kvf_config_node {
    char host[256];
    char port[8];
};

/* The next one in a text, which *at is moved over. KVF_OK; KVF_EMPTY: no more; KVF_ERR_INVALID. */
int kvf_config_node_next(const char **at, struct kvf_config_node *node_out);

/* Read the 32 bytes of a cluster_key file. KVF_OK; KVF_ERR_CONFIG: text_out says what is wrong and
 * the cure. */
int kvf_config_cluster_key_read(const char *path, uint8_t key_out[32], char *text_out,
                                size_t text_bytes);

/* Look at the machine: folders, permissions, groups, key files, sizes of devices, room on the file
 * systems. Changes nothing. A device's size replaces nvme[].bytes 0. KVF_OK; KVF_ERR_CONFIG. */
int kvf_config_check_paths(struct kvf_config *config, struct kvf_config_error *error);

/* What of a finished configuration is for the memory tier. */
struct kvf_dram_config;
void kvf_config_dram(const struct kvf_config *config, struct kvf_dram_config *dram_out);

/* What of it is for packing on a drive: half the workers may pack, all may unpack. */
struct kvf_nvme_config;
void kvf_config_nvme_pack(const struct kvf_config *config, uint32_t index,
                          struct kvf_nvme_config *nvme);

/* The effective values as YAML that kvf_config_parse reads back. */
void kvf_config_print(const struct kvf_config *config, FILE *out);

/* The value of one option as a user would write it. base: the config, or the list's member. */
void kvf_config_value_text(const struct kvf_config_option *option, const void *base, char *out,
                           size_t bytes);

/* The word of an ENUM option's value, "" if it has no such value. */
void kvf_config_enum_word(const struct kvf_config_option *option, uint64_t value, char *out,
                          size_t bytes);

/* The type as documentation names it: "size", "duration", "count", ... Static storage. */
const char *kvf_config_type_name(enum kvf_config_type type);

/* Write "FILE:LINE: " (or where else the value came from) and the formatted what and cure. */
void kvf_config_fail_at(const struct kvf_config *config, uint32_t line, const char *what,
                        struct kvf_config_error *error, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));

#endif /* KVF_AGENT_CONFIG_H */
