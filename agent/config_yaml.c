/* SPDX-License-Identifier: Apache-2.0
 *
 * config_yaml.c: a YAML document to configuration. libyaml makes a tree whose nodes know their
 * lines; the walk over it is three levels deep at most, whatever the document holds.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <yaml.h>

#include "agent/config.h"
#include "agent/config_internal.h"
#include "base/fd.h"

struct reader {
    struct kvf_config *config;
    struct kvf_config_error *error;
    yaml_document_t *document;
};

static uint32_t node_line(const yaml_node_t *node)
{
    return (uint32_t)node->start_mark.line + 1;
}

/* The text of a scalar node. NULL: it is a list or a map, or holds a zero byte. */
static const char *scalar_text(const yaml_node_t *node)
{
    const char *text = (const char *)node->data.scalar.value;

    if (node->type != YAML_SCALAR_NODE || strlen(text) != node->data.scalar.length) {
        return NULL;
    }
    return text;
}

/* "key:" without a value. */
static bool is_absent(const yaml_node_t *node)
{
    return node->type == YAML_SCALAR_NODE && node->data.scalar.style == YAML_PLAIN_SCALAR_STYLE &&
           (node->data.scalar.length == 0 || strcmp((char *)node->data.scalar.value, "~") == 0 ||
            strcmp((char *)node->data.scalar.value, "null") == 0);
}

static const char *node_kind(const yaml_node_t *node)
{
    switch (node->type) {
    case YAML_SEQUENCE_NODE:
        return "a list";
    case YAML_MAPPING_NODE:
        return "a map";
    default:
        return "a single value";
    }
}

static yaml_node_t *node_at(const struct reader *reader, int id)
{
    return yaml_document_get_node(reader->document, id);
}

/* The key of a pair, refused if it is no plain text or occurs before in the same map. */
static int take_key(const struct reader *reader, const yaml_node_t *map,
                    const yaml_node_pair_t *pair, const char **key_out)
{
    const yaml_node_t *node = node_at(reader, pair->key);
    const char *key = scalar_text(node);

    if (key == NULL) {
        kvf_config_fail_at(reader->config, node_line(node), "key", reader->error,
                           "it is %s; write a name and a colon", node_kind(node));
        return KVF_ERR_CONFIG;
    }
    for (const yaml_node_pair_t *p = map->data.mapping.pairs.start; p < pair; p++) {
        const yaml_node_t *other = node_at(reader, p->key);
        const char *text = scalar_text(other);

        if (text != NULL && strcmp(text, key) == 0) {
            kvf_config_fail_at(reader->config, node_line(node), key, reader->error,
                               "it was given before, in line %" PRIu32 "; remove one of them",
                               node_line(other));
            return KVF_ERR_CONFIG;
        }
    }
    *key_out = key;
    return KVF_OK;
}

static int take_value(const struct reader *reader, const struct kvf_config_option *option,
                      const yaml_node_t *node, void *base, uint32_t *line, const char *name)
{
    char why[KVF_CONFIG_ERROR_TEXT_BYTES / 2];
    const char *text = scalar_text(node);

    *line = node_line(node);
    if (is_absent(node)) {
        kvf_config_fail_at(reader->config, *line, name, reader->error,
                           "it has no value; give it one, or remove the line for the default '%s'",
                           option->default_text);
        return KVF_ERR_CONFIG;
    }
    if (text == NULL) {
        kvf_config_fail_at(reader->config, *line, name, reader->error,
                           "it is %s; write one value (%s)", node_kind(node),
                           kvf_config_type_name(option->type));
        return KVF_ERR_CONFIG;
    }
    if (kvf_config_option_parse(option, text, base, why, sizeof(why)) != KVF_OK) {
        kvf_config_fail_at(reader->config, *line, name, reader->error, "%s", why);
        return KVF_ERR_CONFIG;
    }
    return KVF_OK;
}

static int fail_unknown(const struct reader *reader, const yaml_node_pair_t *pair, const char *name,
                        const struct kvf_config_nearest *nearest)
{
    char cure[128];

    kvf_config_nearest_cure(nearest, cure, sizeof(cure));
    kvf_config_fail_at(reader->config, node_line(node_at(reader, pair->key)), name, reader->error,
                       "no such option; %s", cure);
    return KVF_ERR_CONFIG;
}

static int take_member(const struct reader *reader, const struct kvf_config_list *list,
                       const yaml_node_t *map)
{
    char *member;

    if (map->type != YAML_MAPPING_NODE) {
        kvf_config_fail_at(reader->config, node_line(map), list->name, reader->error,
                           "a member is %s; write '- %s: ...'", node_kind(map),
                           list->options[0].key);
        return KVF_ERR_CONFIG;
    }
    member = kvf_config_list_append(reader->config, list, node_line(map));
    if (member == NULL) {
        kvf_config_fail_at(reader->config, node_line(map), list->name, reader->error,
                           "more than %" PRIu32 " members; remove some", list->max);
        return KVF_ERR_CONFIG;
    }
    for (yaml_node_pair_t *p = map->data.mapping.pairs.start; p < map->data.mapping.pairs.top;
         p++) {
        struct kvf_config_nearest nearest = {.distance = UINT32_MAX};
        uint32_t *lines = (uint32_t *)(member + list->lines_offset);
        char name[96];
        unsigned i;

        if (take_key(reader, map, p, &nearest.name) != KVF_OK) {
            return KVF_ERR_CONFIG;
        }
        snprintf(name, sizeof(name), "%s.%.40s", list->name, nearest.name);
        for (i = 0; i < list->n_options && strcmp(list->options[i].key, nearest.name) != 0; i++) {
            kvf_config_nearest_offer(&nearest, list->options[i].key);
        }
        if (i == list->n_options) {
            return fail_unknown(reader, p, name, &nearest);
        }
        if (take_value(reader, &list->options[i], node_at(reader, p->value), member, &lines[i],
                       name) != KVF_OK) {
            return KVF_ERR_CONFIG;
        }
    }
    return KVF_OK;
}

static int take_list(const struct reader *reader, const struct kvf_config_list *list,
                     const yaml_node_t *node)
{
    if (node->type != YAML_SEQUENCE_NODE) {
        kvf_config_fail_at(reader->config, node_line(node), list->name, reader->error,
                           "it is %s; write a list of maps, each beginning with '- %s: ...'",
                           is_absent(node) ? "empty" : node_kind(node), list->options[0].key);
        return KVF_ERR_CONFIG;
    }
    for (yaml_node_item_t *item = node->data.sequence.items.start;
         item < node->data.sequence.items.top; item++) {
        if (take_member(reader, list, node_at(reader, *item)) != KVF_OK) {
            return KVF_ERR_CONFIG;
        }
    }
    return KVF_OK;
}

static int take_section(const struct reader *reader, const char *section, const yaml_node_t *map)
{
    if (map->type != YAML_MAPPING_NODE) {
        kvf_config_fail_at(reader->config, node_line(map), section, reader->error,
                           "it is %s; write its options below it, indented",
                           is_absent(map) ? "empty" : node_kind(map));
        return KVF_ERR_CONFIG;
    }
    for (yaml_node_pair_t *p = map->data.mapping.pairs.start; p < map->data.mapping.pairs.top;
         p++) {
        struct kvf_config_nearest nearest = {.distance = UINT32_MAX};
        char name[96];
        unsigned i;

        if (take_key(reader, map, p, &nearest.name) != KVF_OK) {
            return KVF_ERR_CONFIG;
        }
        snprintf(name, sizeof(name), "%s.%.40s", section, nearest.name);
        for (i = 0; i < KVF_CONFIG_OPTIONS; i++) {
            if (strcmp(kvf_config_options[i].section, section) != 0) {
                continue;
            }
            if (strcmp(kvf_config_options[i].key, nearest.name) == 0) {
                break;
            }
            kvf_config_nearest_offer(&nearest, kvf_config_options[i].key);
        }
        if (i == KVF_CONFIG_OPTIONS) {
            return fail_unknown(reader, p, name, &nearest);
        }
        if (take_value(reader, &kvf_config_options[i], node_at(reader, p->value), reader->config,
                       &reader->config->lines[i], name) != KVF_OK) {
            return KVF_ERR_CONFIG;
        }
    }
    return KVF_OK;
}

/* One pair of the top level: a list, an option without section, or a section. */
static int take_top(const struct reader *reader, const yaml_node_pair_t *pair, const char *key)
{
    const struct kvf_config_list *list = kvf_config_list_find(key);
    const yaml_node_t *value = node_at(reader, pair->value);
    struct kvf_config_nearest nearest = {.name = key, .distance = UINT32_MAX};

    if (list != NULL) {
        return take_list(reader, list, value);
    }
    for (unsigned i = 0; i < KVF_CONFIG_OPTIONS; i++) {
        const struct kvf_config_option *option = &kvf_config_options[i];

        if (option->section[0] == '\0' && strcmp(option->key, key) == 0) {
            return take_value(reader, option, value, reader->config, &reader->config->lines[i],
                              key);
        }
        if (option->section[0] != '\0' && strcmp(option->section, key) == 0) {
            return take_section(reader, key, value);
        }
        kvf_config_nearest_offer(&nearest,
                                 option->section[0] != '\0' ? option->section : option->key);
    }
    for (unsigned i = 0; i < KVF_CONFIG_LISTS; i++) {
        kvf_config_nearest_offer(&nearest, kvf_config_lists[i].name);
    }
    return fail_unknown(reader, pair, key, &nearest);
}

static int take_document(const struct reader *reader)
{
    const yaml_node_t *root = yaml_document_get_root_node(reader->document);

    if (root == NULL || is_absent(root)) {
        return KVF_OK; /* an empty file, or comments only: all defaults */
    }
    if (root->type != YAML_MAPPING_NODE) {
        kvf_config_fail_at(reader->config, node_line(root), "document", reader->error,
                           "it is %s; write options as 'section:' and indented 'key: value'",
                           node_kind(root));
        return KVF_ERR_CONFIG;
    }
    for (yaml_node_pair_t *p = root->data.mapping.pairs.start; p < root->data.mapping.pairs.top;
         p++) {
        const char *key;

        if (take_key(reader, root, p, &key) != KVF_OK || take_top(reader, p, key) != KVF_OK) {
            return KVF_ERR_CONFIG;
        }
    }
    return KVF_OK;
}

static int fail_syntax(const struct reader *reader, const yaml_parser_t *parser)
{
    /* Errors of the byte reader have no mark. */
    uint32_t line = (uint32_t)parser->problem_mark.line + 1;

    kvf_config_fail_at(
        reader->config, line, "YAML", reader->error, "%s%s%s; check indentation and quotes there",
        parser->problem != NULL ? parser->problem : "out of memory",
        parser->context != NULL ? " " : "", parser->context != NULL ? parser->context : "");
    return KVF_ERR_CONFIG;
}

/* Is there nothing but the end after the first document? */
static int check_single(const struct reader *reader, yaml_parser_t *parser)
{
    yaml_document_t next;
    const yaml_node_t *root;
    int status = KVF_OK;

    if (!yaml_parser_load(parser, &next)) {
        return fail_syntax(reader, parser);
    }
    root = yaml_document_get_root_node(&next);
    if (root != NULL) {
        kvf_config_fail_at(reader->config, node_line(root), "document", reader->error,
                           "a second one begins here; remove the '---' before it");
        status = KVF_ERR_CONFIG;
    }
    yaml_document_delete(&next);
    return status;
}

int kvf_config_parse(struct kvf_config *config, const char *name, const char *yaml, size_t bytes,
                     struct kvf_config_error *error)
{
    yaml_document_t document;
    struct reader reader = {.config = config, .error = error, .document = &document};
    yaml_parser_t parser;
    int status;

    snprintf(config->file, sizeof(config->file), "%s", name);
    if (!yaml_parser_initialize(&parser)) {
        kvf_config_fail_at(config, 1, "YAML", error, "out of memory; free some");
        return KVF_ERR_CONFIG;
    }
    yaml_parser_set_input_string(&parser, (const unsigned char *)yaml, bytes);
    if (!yaml_parser_load(&parser, &document)) {
        status = fail_syntax(&reader, &parser);
        yaml_parser_delete(&parser);
        return status;
    }
    status = take_document(&reader);
    if (status == KVF_OK && yaml_document_get_root_node(&document) != NULL) {
        status = check_single(&reader, &parser);
    }
    yaml_document_delete(&document);
    yaml_parser_delete(&parser);
    return status;
}

int kvf_config_read(struct kvf_config *config, const char *path, struct kvf_config_error *error)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat st;
    char *text = NULL;
    int status = KVF_ERR_CONFIG;

    if (fd < 0 || fstat(fd, &st) != 0) {
        snprintf(error->text, sizeof(error->text),
                 "%.255s: cannot be read: %s; check the path and its permissions", path,
                 strerror(errno));
        goto out;
    }
    if (!S_ISREG(st.st_mode) || st.st_size > KVF_CONFIG_FILE_BYTES_MAX) {
        snprintf(error->text, sizeof(error->text),
                 "%.255s: no regular file of at most 1 MiB; name the configuration file", path);
        goto out;
    }
    text = malloc((size_t)st.st_size + 1);
    if (text == NULL || kvf_fd_pread_all(fd, text, (size_t)st.st_size, 0) != KVF_OK) {
        snprintf(error->text, sizeof(error->text), "%.255s: reading failed: %s; try again", path,
                 strerror(errno));
        goto out;
    }
    status = kvf_config_parse(config, path, text, (size_t)st.st_size, error);
out:
    free(text);
    kvf_fd_close(&fd);
    return status;
}
