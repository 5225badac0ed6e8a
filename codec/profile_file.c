/* SPDX-License-Identifier: Apache-2.0
 *
 * profile_file.c: profiles read from JSON; profile_print.c writes them. Every key is known or
 * refused, so that a setting with a wrong name does not go unnoticed.
 */
#include "codec/profile_file.h"

#include "base/fd.h"
#include "codec/profile_names.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct parser {
    const char *file_name;
    char *why; /* KVF_PROFILE_FILE_WHY_BYTES of it */
    struct kvf_profile_table *table;
};

/* An object of the file, and how messages call it: "kinds[3].k". */
struct node {
    const struct parser *parser;
    const json_t *json;
    char where[64];
};

static int __attribute__((format(printf, 3, 4)))
fail(const struct node *node, const char *key, const char *format, ...)
{
    const struct parser *parser = node->parser;
    bool dot = node->where[0] != '\0' && key[0] != '\0' && key[0] != '[';
    int n = snprintf(parser->why, KVF_PROFILE_FILE_WHY_BYTES, "%.512s: %s%s%s: ", parser->file_name,
                     node->where, dot ? "." : "", key);
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(parser->why + n, KVF_PROFILE_FILE_WHY_BYTES - (size_t)n, format, arguments);
    va_end(arguments);
    /* names come from the file: whatever they are, the message is one line */
    for (char *at = parser->why; *at != '\0'; at++) {
        *at = (unsigned char)*at < ' ' || *at == 0x7f ? '?' : *at;
    }
    return KVF_ERR_INVALID;
}

/* -------------------------------------------------------------------------------------------------
 * Values
 */

/* Is it an object with no other keys than these? */
static int check_keys(const struct node *node, const char *const *keys)
{
    const char *key;
    json_t *value;
    if (!json_is_object(node->json)) {
        return fail(node, "", "is not an object");
    }
    json_object_foreach((json_t *)node->json, key, value)
    {
        bool known = false;
        for (size_t i = 0; keys[i] != NULL; i++) {
            known = known || strcmp(keys[i], key) == 0;
        }
        if (!known) {
            return fail(node, "", "there is no key \"%.64s\"; remove it", key);
        }
    }
    return KVF_OK;
}

/* A number that must be there, min to max. */
static int read_number(const struct node *node, const char *key, uint32_t min, uint32_t max,
                       uint32_t *value_out)
{
    const json_t *value = json_object_get(node->json, key);
    if (!json_is_integer(value)) {
        return fail(node, key, "%s; it is a whole number from %u to %u",
                    value == NULL ? "is missing" : "is not a number", min, max);
    }
    json_int_t number = json_integer_value(value);
    if (number < (json_int_t)min || number > (json_int_t)max) {
        return fail(node, key, "%lld is out of range; it may be %u to %u", (long long)number, min,
                    max);
    }
    *value_out = (uint32_t)number;
    return KVF_OK;
}

/* "a, b or c" of the names of a choice. */
static void names_text(const char *const *names, char *text, size_t bytes)
{
    size_t at = 0;
    for (uint32_t i = 0; names[i] != NULL && at < bytes; i++) {
        at += (size_t)snprintf(text + at, bytes - at, "%s\"%s\"", i != 0 ? ", " : "", names[i]);
    }
}

/* The number of a name. */
static int read_name(const struct node *node, const char *key, const json_t *value,
                     const char *const *names, uint32_t *index_out)
{
    const char *text = json_string_value(value);
    char choices[128];
    for (uint32_t i = 0; text != NULL && names[i] != NULL; i++) {
        if (strcmp(names[i], text) == 0) {
            *index_out = i;
            return KVF_OK;
        }
    }
    names_text(names, choices, sizeof(choices));
    if (text == NULL) {
        return fail(node, key, "%s; it is one of %s",
                    value == NULL ? "is missing" : "is not a string", choices);
    }
    return fail(node, key, "\"%.64s\" is unknown; it is one of %s", text, choices);
}

/* A name that need not be there; *index_out is its default. */
static int read_choice(const struct node *node, const char *key, const char *const *names,
                       uint32_t *index_out)
{
    const json_t *value = json_object_get(node->json, key);
    return value == NULL ? KVF_OK : read_name(node, key, value, names, index_out);
}

/* true or false; *value_out is the default. */
static int read_bool(const struct node *node, const char *key, bool *value_out)
{
    const json_t *value = json_object_get(node->json, key);
    if (value != NULL && !json_is_boolean(value)) {
        return fail(node, key, "is neither true nor false");
    }
    *value_out = value != NULL ? json_is_true(value) : *value_out;
    return KVF_OK;
}

static int digit_of(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/* So many bytes in hexadecimal, two digits each. */
static int read_hex(const struct node *node, const char *key, const json_t *value, uint8_t *to,
                    size_t bytes)
{
    const char *text = json_string_value(value);
    if (text == NULL || json_string_length(value) != 2 * bytes) {
        return fail(node, key, "is not a string of %zu hexadecimal digits", 2 * bytes);
    }
    for (size_t i = 0; i < bytes; i++) {
        int high = digit_of(text[2 * i]);
        int low = digit_of(text[2 * i + 1]);
        if (high < 0 || low < 0) {
            return fail(node, key, "digit %zu is not a hexadecimal one", 2 * i + (high >= 0));
        }
        to[i] = (uint8_t)(high << 4 | low);
    }
    return KVF_OK;
}

/* -------------------------------------------------------------------------------------------------
 * Kinds
 */
static int read_saw(const struct node *node, struct kvf_profile_tensor *out)
{
    static const char *const keys[] = {"codec", "bits", "center", "signs", "rotate", "clip", NULL};
    uint32_t clip = KVF_CLIP_FIXED;
    int status = check_keys(node, keys);
    if (status == KVF_OK) {
        status = read_choice(node, "clip", kvf_profile_clip_names, &clip);
    }
    out->clip = (uint8_t)clip;
    return status;
}

static int read_tq(const struct node *node, struct kvf_profile_tensor *out)
{
    static const char *const keys[] = {"codec", "bits",  "center",   "signs", "rotate",
                                       "scale", "split", "residual", NULL};
    uint32_t scale = 0;
    bool split = false;
    bool residual = false;
    int status = check_keys(node, keys);
    if (status == KVF_OK) {
        status = read_choice(node, "scale", kvf_profile_scale_names, &scale);
    }
    if (status == KVF_OK) {
        status = read_bool(node, "split", &split);
    }
    if (status == KVF_OK) {
        status = read_bool(node, "residual", &residual);
    }
    out->flags = (uint8_t)(scale * KVF_TENSOR_SCALE_MATCHED | (split ? KVF_TENSOR_SPLIT : 0) |
                           (residual ? KVF_TENSOR_RESIDUAL : 0));
    return status;
}

/* What saw and tq have in common. */
static int read_rotated(const struct node *node, struct kvf_profile_tensor *out)
{
    uint32_t center = 0;
    bool rotate = true;
    bool signs = true;
    int status = read_choice(node, "center", kvf_profile_center_names, &center);
    if (status == KVF_OK) {
        status = read_bool(node, "rotate", &rotate);
    }
    if (status == KVF_OK) {
        status = read_bool(node, "signs", &signs);
    }
    const uint8_t flags[] = {0, KVF_TENSOR_CENTER, KVF_TENSOR_CENTER_PROFILE};
    out->flags = (uint8_t)(out->flags | flags[center] | (signs ? KVF_TENSOR_SIGNS : 0));
    out->rotate = rotate;
    out->rot_seed = KVF_PROFILE_ROTATION_SEED;
    return status;
}

/* K is coded by channel, V by token. */
static int read_kivi(const struct node *node, bool is_v, struct kvf_profile_tensor *out)
{
    static const char *const keys[] = {"codec", "bits", "group", NULL};
    uint32_t group = 0;
    int status = check_keys(node, keys);
    if (status == KVF_OK) {
        status = read_number(node, "group", 1, UINT16_MAX, &group);
    }
    out->group_size = (uint16_t)group;
    out->group_axis = is_v ? KVF_AXIS_TOKEN : KVF_AXIS_CHANNEL;
    return status;
}

static int read_tensor(const struct node *node, bool is_v, struct kvf_profile_tensor *out)
{
    static const char *const only_codec[] = {"codec", NULL};
    uint32_t codec = 0;
    uint32_t bits = 0;
    int status = read_name(node, "codec", json_object_get(node->json, "codec"),
                           kvf_profile_codec_names, &codec);
    if (status != KVF_OK) {
        return status;
    }
    *out = (struct kvf_profile_tensor){.codec = (uint8_t)(codec + KVF_CODEC_RAW)};
    bool is_lossless = out->codec == KVF_CODEC_RAW || out->codec == KVF_CODEC_EXACT;
    if (is_lossless) {
        out->bits = out->codec == KVF_CODEC_EXACT ? KVF_BITS_EXACT : 0;
        return check_keys(node, only_codec);
    }
    status = read_number(node, "bits", 1, 8, &bits);
    out->bits = (uint8_t)bits;
    if (status == KVF_OK && out->codec == KVF_CODEC_KIVI) {
        return read_kivi(node, is_v, out);
    }
    if (status == KVF_OK) {
        status = out->codec == KVF_CODEC_SAW ? read_saw(node, out) : read_tq(node, out);
    }
    return status == KVF_OK ? read_rotated(node, out) : status;
}

static int read_kind(const struct node *node, struct kvf_profile_kind *kind)
{
    static const char *const keys[] = {"k", "v", NULL};
    struct node tensor = {.parser = node->parser, .json = json_object_get(node->json, "k")};
    int status = check_keys(node, keys);
    if (status != KVF_OK) {
        return status;
    }
    (void)snprintf(tensor.where, sizeof(tensor.where), "%.32s.k", node->where);
    status = read_tensor(&tensor, false, &kind->k);
    tensor.json = json_object_get(node->json, "v");
    if (status == KVF_OK && (tensor.json != NULL || node->parser->table->dim_v != 0)) {
        (void)snprintf(tensor.where, sizeof(tensor.where), "%.32s.v", node->where);
        status = read_tensor(&tensor, true, &kind->v);
    }
    return status;
}

static int read_kinds(const struct node *root)
{
    struct kvf_profile_table *table = root->parser->table;
    const json_t *kinds = json_object_get(root->json, "kinds");
    const json_t *layers = json_object_get(root->json, "layers");
    size_t n = json_array_size(kinds);
    int status = KVF_OK;
    if (n < 1 || n > KVF_CODEC_KINDS_MAX) {
        return fail(root, "kinds", "is not a list of 1 to %d kinds of layers", KVF_CODEC_KINDS_MAX);
    }
    table->n_kinds = (uint8_t)n;
    for (size_t i = 0; status == KVF_OK && i < n; i++) {
        struct node node = {.parser = root->parser, .json = json_array_get(kinds, i)};
        (void)snprintf(node.where, sizeof(node.where), "kinds[%zu]", i);
        status = read_kind(&node, &table->kinds[i]);
    }
    if (status == KVF_OK && json_array_size(layers) != table->n_layers) {
        status = fail(root, "layers", "is not a list of the kinds of %u layers", table->n_layers);
    }
    for (size_t i = 0; status == KVF_OK && i < table->n_layers; i++) {
        const json_t *kind = json_array_get(layers, i);
        if (!json_is_integer(kind) || json_integer_value(kind) < 0 ||
            json_integer_value(kind) >= (json_int_t)n) {
            return fail(root, "layers", "entry %zu is not the number of a kind: 0 to %zu", i,
                        n - 1);
        }
        table->layer_kinds[i] = (uint8_t)json_integer_value(kind);
    }
    return status;
}

/* -------------------------------------------------------------------------------------------------
 * The rest of the file
 */

/* The lists of K and of V, "means" say: of each layer the bytes, or nothing. */
static int read_arrays(const struct node *root, const char *key, enum kvf_profile_array first)
{
    static const char *const keys[] = {"k", "v", NULL};
    struct kvf_profile_table *table = root->parser->table;
    struct node node = {.parser = root->parser, .json = json_object_get(root->json, key)};
    if (node.json == NULL) {
        return KVF_OK;
    }
    (void)snprintf(node.where, sizeof(node.where), "%s", key);
    int status = check_keys(&node, keys);
    for (uint32_t is_v = 0; status == KVF_OK && is_v < 2; is_v++) {
        enum kvf_profile_array array = first + is_v;
        const json_t *layers = json_object_get(node.json, keys[is_v]);
        size_t layer_bytes = kvf_profile_array_layer_bytes(table, array);
        if (layers == NULL) {
            continue;
        }
        if (layer_bytes == 0) {
            return fail(&node, keys[is_v], "is given although geometry.dim_v is 0");
        }
        if (json_array_size(layers) != table->n_layers) {
            return fail(&node, keys[is_v], "is not a list of %u strings, one a layer",
                        table->n_layers);
        }
        if (kvf_profile_table_add_array(table, array) != KVF_OK) {
            return fail(&node, keys[is_v], "is too large: %d MiB in all",
                        KVF_PROFILE_ARRAYS_BYTES_MAX >> 20);
        }
        for (size_t i = 0; status == KVF_OK && i < table->n_layers; i++) {
            const json_t *text = json_array_get(layers, i);
            char place[32];
            (void)snprintf(place, sizeof(place), "%s[%zu]", keys[is_v], i);
            if (!json_is_string(text) || json_string_length(text) != 0) {
                status = read_hex(&node, place, text, table->arrays[array] + i * layer_bytes,
                                  layer_bytes);
            }
        }
    }
    return status;
}

static int read_geometry(const struct node *root)
{
    static const char *const keys[] = {"n_layers", "n_heads", "dim_k", "dim_v", "rope_state", NULL};
    struct kvf_profile_table *table = root->parser->table;
    struct node node = {.parser = root->parser,
                        .json = json_object_get(root->json, "geometry"),
                        .where = "geometry"};
    uint32_t values[4];
    uint32_t rope_state = 0;
    static const uint32_t limits[4][2] = {
        {1, KVF_LAYERS_MAX}, {1, KVF_HEADS_MAX}, {1, KVF_DIM_MAX}, {0, KVF_DIM_MAX}};
    int status = check_keys(&node, keys);
    for (uint32_t i = 0; status == KVF_OK && i < 4; i++) {
        status = read_number(&node, keys[i], limits[i][0], limits[i][1], &values[i]);
    }
    if (status == KVF_OK) {
        status = read_name(&node, "rope_state", json_object_get(node.json, "rope_state"),
                           kvf_profile_rope_names, &rope_state);
    }
    if (status == KVF_OK) {
        table->n_layers = (uint16_t)values[0];
        table->n_heads = (uint16_t)values[1];
        table->dim_k = (uint16_t)values[2];
        table->dim_v = (uint16_t)values[3];
        table->rope_state = (uint8_t)rope_state;
    }
    return status;
}

static int read_workloads(const struct node *root)
{
    const json_t *list = json_object_get(root->json, "workload");
    int status = KVF_OK;
    if (json_array_size(list) == 0) {
        return fail(root, "workload", "is not a list of what the samples were");
    }
    for (size_t i = 0; status == KVF_OK && i < json_array_size(list); i++) {
        uint32_t index = 0;
        char place[32];
        (void)snprintf(place, sizeof(place), "workload[%zu]", i);
        status = read_name(root, place, json_array_get(list, i), kvf_profile_workloads, &index);
        root->parser->table->workloads |= 1u << index;
    }
    return status;
}

static int read_binding(const struct node *root)
{
    struct kvf_profile_table *table = root->parser->table;
    const char *name = json_string_value(json_object_get(root->json, "name"));
    const json_t *adapter = json_object_get(root->json, "adapter_digest");
    if (name == NULL || strlen(name) >= sizeof(table->name)) {
        return fail(root, "name", "is not a string of 1 to %zu characters",
                    sizeof(table->name) - 1);
    }
    memcpy(table->name, name, strlen(name));
    int status = read_hex(root, "weights_digest", json_object_get(root->json, "weights_digest"),
                          table->weights_digest, sizeof(table->weights_digest));
    if (status == KVF_OK && adapter != NULL) {
        status = read_hex(root, "adapter_digest", adapter, table->adapter_digest,
                          sizeof(table->adapter_digest));
    }
    return status == KVF_OK ? read_workloads(root) : status;
}

static int read_root(const struct node *root)
{
    static const char *const keys[] = {"kvferry_profile",
                                       "name",
                                       "weights_digest",
                                       "adapter_digest",
                                       "workload",
                                       "geometry",
                                       "sink_tokens",
                                       "kinds",
                                       "layers",
                                       "splits",
                                       "means",
                                       "evidence",
                                       NULL};
    const json_t *evidence = json_object_get(root->json, "evidence");
    uint32_t value;
    int status = check_keys(root, keys);
    if (status == KVF_OK) {
        status = read_number(root, "kvferry_profile", KVF_PROFILE_FILE_VERSION,
                             KVF_PROFILE_FILE_VERSION, &value);
    }
    if (status == KVF_OK) {
        status = read_binding(root);
    }
    if (status == KVF_OK) {
        status = read_geometry(root);
    }
    if (status == KVF_OK && json_object_get(root->json, "sink_tokens") != NULL) {
        status = read_number(root, "sink_tokens", 0, UINT8_MAX, &value);
        root->parser->table->sink_tokens = (uint8_t)value;
    }
    if (status == KVF_OK && evidence != NULL && !json_is_object(evidence)) {
        status = fail(root, "evidence", "is not an object");
    }
    bool has_kinds = json_object_get(root->json, "kinds") != NULL ||
                     json_object_get(root->json, "layers") != NULL;
    if (status == KVF_OK && (has_kinds || kvf_profile_find(root->parser->table->name) == NULL)) {
        status = read_kinds(root);
    }
    if (status == KVF_OK) {
        status = read_arrays(root, "means", KVF_PROFILE_MEANS_K);
    }
    return status == KVF_OK ? read_arrays(root, "splits", KVF_PROFILE_SPLITS_K) : status;
}

int kvf_profile_file_parse(const char *file_name, const char *text, size_t bytes,
                           struct kvf_profile_table **table_out,
                           char why_out[KVF_PROFILE_FILE_WHY_BYTES])
{
    struct parser parser = {.file_name = file_name, .why = why_out};
    struct node root = {.parser = &parser};
    json_error_t error;
    char why[KVF_PROFILE_WHY_BYTES];
    json_t *json = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    if (json == NULL) {
        (void)snprintf(root.where, sizeof(root.where), "line %d", error.line);
        return fail(&root, "", "is not JSON: %s", error.text);
    }
    root.json = json;
    parser.table = kvf_profile_table_create();
    int status = parser.table != NULL ? read_root(&root) : KVF_ERR_NO_MEMORY;
    json_decref(json);
    if (status == KVF_OK) {
        status = kvf_profile_table_validate(parser.table, why);
        if (status != KVF_OK) {
            (void)snprintf(why_out, KVF_PROFILE_FILE_WHY_BYTES, "%.512s: %s", file_name, why);
        }
    } else if (status == KVF_ERR_NO_MEMORY) {
        (void)snprintf(why_out, KVF_PROFILE_FILE_WHY_BYTES, "%.512s: no memory", file_name);
    }
    if (status != KVF_OK) {
        kvf_profile_table_destroy(parser.table);
        return status;
    }
    *table_out = parser.table;
    return KVF_OK;
}

/* -------------------------------------------------------------------------------------------------
 * Files
 */
static int file_fail(const char *path, const char *what, char *why_out)
{
    (void)snprintf(why_out, KVF_PROFILE_FILE_WHY_BYTES, "%.512s: %s", path, what);
    return KVF_ERR_IO;
}

int kvf_profile_file_read(const char *path, struct kvf_profile_table **table_out,
                          char why_out[KVF_PROFILE_FILE_WHY_BYTES])
{
    struct stat stat;
    /* not blocking: a pipe in the directory must not hold up the daemon */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        return file_fail(path, strerror(errno), why_out);
    }
    if (fstat(fd, &stat) != 0 || !S_ISREG(stat.st_mode) ||
        stat.st_size > KVF_PROFILE_FILE_BYTES_MAX) {
        kvf_fd_close(&fd);
        return file_fail(path, "is not a regular file of at most 64 MiB", why_out);
    }
    char *text = malloc((size_t)stat.st_size + 1);
    int status = KVF_ERR_NO_MEMORY;
    if (text == NULL) {
        (void)file_fail(path, "no memory", why_out);
    } else if (kvf_fd_pread_all(fd, text, (size_t)stat.st_size, 0) != KVF_OK) {
        status = file_fail(path, "cannot be read to its end", why_out);
    } else {
        status = kvf_profile_file_parse(path, text, (size_t)stat.st_size, table_out, why_out);
    }
    free(text);
    kvf_fd_close(&fd);
    return status;
}

int kvf_profile_file_write(const char *path, const struct kvf_profile_table *table,
                           const struct json_t *evidence, char why_out[KVF_PROFILE_FILE_WHY_BYTES])
{
    char *text = kvf_profile_file_print(table, evidence);
    size_t path_bytes = strlen(path) + sizeof(".tmp");
    char *temporary = malloc(path_bytes);
    int status = KVF_ERR_NO_MEMORY;
    if (text == NULL || temporary == NULL) {
        (void)file_fail(path, "no memory", why_out);
        free(text);
        free(temporary);
        return status;
    }
    (void)snprintf(temporary, path_bytes, "%s.tmp", path);
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0) {
        status = file_fail(temporary, strerror(errno), why_out);
    } else {
        status = kvf_fd_pwrite_all(fd, text, strlen(text), 0);
        if (status == KVF_OK && (fsync(fd) != 0 || rename(temporary, path) != 0)) {
            status = KVF_ERR_IO;
        }
        if (status != KVF_OK) {
            (void)file_fail(path, strerror(errno), why_out);
            (void)unlink(temporary);
        }
    }
    kvf_fd_close(&fd);
    free(text);
    free(temporary);
    return status;
}
