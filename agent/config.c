/* SPDX-License-Identifier: Apache-2.0
 *
 * config.c: the tables of options, values as text, defaults, --set and the rules that span several
 * options. Reading YAML is in config_yaml.c, looking at the machine in config_paths.c.
 */
#include "agent/config.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agent/config_internal.h"
#include "base/clock.h"
#include "base/limits.h"
#include "base/parse.h"

/* --- tables ----------------------------------------------------------------------------------- */

#define ROW(section_, key_, type_, default__, min_, max_, text_, offset_)                          \
    {                                                                                              \
        .section = section_, .key = key_, .default_text = default__, .text = text_,                \
        .type = KVF_CONFIG_##type_, .min = min_, .max = max_, .offset = offset_                    \
    }

const struct kvf_config_option kvf_config_options[KVF_CONFIG_OPTIONS] = {
#define KVF_OPTION(section, key, type, default_, min, max, text)                                   \
    ROW(#section, #key, type, default_, min, max, text,                                            \
        offsetof(struct kvf_config, section##_##key)),
#define KVF_TOP_OPTION(key, type, default_, min, max, text)                                        \
    ROW("", #key, type, default_, min, max, text, offsetof(struct kvf_config, key)),
#include "agent/config.def"
};

const struct kvf_config_option kvf_config_socket_options[KVF_CONFIG_SOCKET_KEYS] = {
#define ROW_OF_sockets(key, type, default_, min, max, text)                                        \
    ROW("sockets", #key, type, default_, min, max, text, offsetof(struct kvf_config_socket, key)),
#define ROW_OF_nvme(key, type, default_, min, max, text)
#define KVF_LIST_OPTION(list, key, type, default_, min, max, text)                                 \
    ROW_OF_##list(key, type, default_, min, max, text)
#include "agent/config.def"
#undef ROW_OF_sockets
#undef ROW_OF_nvme
};

const struct kvf_config_option kvf_config_nvme_options[KVF_CONFIG_NVME_KEYS] = {
#define ROW_OF_sockets(key, type, default_, min, max, text)
#define ROW_OF_nvme(key, type, default_, min, max, text)                                           \
    ROW("nvme", #key, type, default_, min, max, text, offsetof(struct kvf_config_nvme, key)),
#define KVF_LIST_OPTION(list, key, type, default_, min, max, text)                                 \
    ROW_OF_##list(key, type, default_, min, max, text)
#include "agent/config.def"
#undef ROW_OF_sockets
#undef ROW_OF_nvme
};

/* --- lists ------------------------------------------------------------------------------------ */

static void *list_member(struct kvf_config *config, const struct kvf_config_list *list,
                         uint32_t index)
{
    return (char *)config + list->offset + index * list->member_bytes;
}

static uint32_t *list_count(struct kvf_config *config, const struct kvf_config_list *list)
{
    return (uint32_t *)((char *)config + list->count_offset);
}

const struct kvf_config_list kvf_config_lists[KVF_CONFIG_LISTS] = {
    {
        .name = "sockets",
        .options = kvf_config_socket_options,
        .n_options = KVF_CONFIG_SOCKET_KEYS,
        .max = KVF_CONFIG_SOCKETS_MAX,
        .offset = offsetof(struct kvf_config, sockets),
        .member_bytes = sizeof(struct kvf_config_socket),
        .count_offset = offsetof(struct kvf_config, n_sockets),
        .line_offset = offsetof(struct kvf_config_socket, line),
        .lines_offset = offsetof(struct kvf_config_socket, lines),
    },
    {
        .name = "nvme",
        .options = kvf_config_nvme_options,
        .n_options = KVF_CONFIG_NVME_KEYS,
        .max = KVF_CONFIG_NVME_MAX,
        .offset = offsetof(struct kvf_config, nvme),
        .member_bytes = sizeof(struct kvf_config_nvme),
        .count_offset = offsetof(struct kvf_config, n_nvme),
        .line_offset = offsetof(struct kvf_config_nvme, line),
        .lines_offset = offsetof(struct kvf_config_nvme, lines),
    },
};

const struct kvf_config_list *kvf_config_list_find(const char *name)
{
    for (unsigned i = 0; i < KVF_CONFIG_LISTS; i++) {
        if (strcmp(kvf_config_lists[i].name, name) == 0) {
            return &kvf_config_lists[i];
        }
    }
    return NULL;
}

/* --- values as text --------------------------------------------------------------------------- */

const char *kvf_config_type_name(enum kvf_config_type type)
{
    static const char *const names[] = {
        [KVF_CONFIG_SIZE] = "size",        [KVF_CONFIG_RATE] = "rate",
        [KVF_CONFIG_SECONDS] = "duration", [KVF_CONFIG_COUNT] = "count",
        [KVF_CONFIG_PERCENT] = "percent",  [KVF_CONFIG_OCTAL] = "octal",
        [KVF_CONFIG_ENUM] = "word",        [KVF_CONFIG_BOOL] = "bool",
        [KVF_CONFIG_STRING] = "string",
    };

    return names[type];
}

static void size_text(uint64_t bytes, char *out, size_t out_bytes)
{
    static const char *const units[] = {"TiB", "GiB", "MiB", "KiB"};

    for (unsigned i = 0; i < 4; i++) {
        uint64_t factor = 1ull << (40 - 10 * i);

        if (bytes != 0 && bytes % factor == 0) {
            snprintf(out, out_bytes, "%" PRIu64 "%s", bytes / factor, units[i]);
            return;
        }
    }
    snprintf(out, out_bytes, "%" PRIu64, bytes);
}

/* A number of a type as a user would write it. */
static void number_text(enum kvf_config_type type, uint64_t value, char *out, size_t out_bytes)
{
    switch (type) {
    case KVF_CONFIG_SIZE:
    case KVF_CONFIG_RATE:
        size_text(value, out, out_bytes);
        break;
    case KVF_CONFIG_SECONDS:
        snprintf(out, out_bytes, "%" PRIu64 "s", value);
        break;
    case KVF_CONFIG_OCTAL:
        snprintf(out, out_bytes, "0%" PRIo64, value);
        break;
    default:
        snprintf(out, out_bytes, "%" PRIu64, value);
        break;
    }
}

/* The word at a position of "a|b|c: text". False: there are fewer. */
static bool enum_word(const char *text, uint64_t position, char *out, size_t out_bytes)
{
    size_t length;

    for (uint64_t i = 0; i < position; i++) {
        text += strcspn(text, "|:");
        if (*text != '|') {
            return false;
        }
        text++;
    }
    length = strcspn(text, "|:");
    snprintf(out, out_bytes, "%.*s", (int)length, text);
    return true;
}

void kvf_config_enum_word(const struct kvf_config_option *option, uint64_t value, char *out,
                          size_t bytes)
{
    if (!enum_word(option->text, value, out, bytes)) {
        out[0] = '\0';
    }
}

void kvf_config_value_text(const struct kvf_config_option *option, const void *base, char *out,
                           size_t bytes)
{
    const char *field = (const char *)base + option->offset;
    uint64_t number;
    bool flag;

    if (option->type == KVF_CONFIG_STRING) {
        snprintf(out, bytes, "%s", field);
        return;
    }
    if (option->type == KVF_CONFIG_BOOL) {
        memcpy(&flag, field, sizeof(flag));
        snprintf(out, bytes, "%s", flag ? "true" : "false");
        return;
    }
    memcpy(&number, field, sizeof(number));
    if (option->type == KVF_CONFIG_ENUM) {
        kvf_config_enum_word(option, number, out, bytes);
    } else {
        number_text(option->type, number, out, bytes);
    }
}

/* --- text to values --------------------------------------------------------------------------- */

/* Is value inside the option's range? why_out says what and cure if not. */
static int range_check(const struct kvf_config_option *option, uint64_t value, const char *text,
                       char *why_out, size_t why_bytes)
{
    char edge[32];

    if (value < option->min) {
        number_text(option->type, option->min, edge, sizeof(edge));
        snprintf(why_out, why_bytes, "'%s' is too small; the least is %s", text, edge);
        return KVF_ERR_CONFIG;
    }
    if (value > option->max) {
        number_text(option->type, option->max, edge, sizeof(edge));
        snprintf(why_out, why_bytes, "'%s' is too large; the most is %s", text, edge);
        return KVF_ERR_CONFIG;
    }
    return KVF_OK;
}

static int octal_parse(const char *text, uint64_t *value_out, char *why_out, size_t why_bytes)
{
    size_t length = strlen(text);

    if (length == 0 || length > 6 || strspn(text, "01234567") != length) {
        snprintf(why_out, why_bytes, "'%s' is no octal number; write permissions as 0660", text);
        return KVF_ERR_CONFIG;
    }
    *value_out = strtoull(text, NULL, 8);
    return KVF_OK;
}

static int enum_parse(const struct kvf_config_option *option, const char *text, uint64_t *value_out,
                      char *why_out, size_t why_bytes)
{
    char word[32];

    for (uint64_t i = 0; enum_word(option->text, i, word, sizeof(word)); i++) {
        if (strcmp(word, text) == 0) {
            *value_out = i;
            return KVF_OK;
        }
    }
    snprintf(why_out, why_bytes, "'%s' is none of its words; use one of %.*s", text,
             (int)strcspn(option->text, ":"), option->text);
    return KVF_ERR_CONFIG;
}

/* Any type but BOOL and STRING, without the range. */
static int number_parse(const struct kvf_config_option *option, const char *text,
                        uint64_t *value_out, char *why_out, size_t why_bytes)
{
    char detail[KVF_ERROR_TEXT_BYTES];
    const char *example = "a whole number";
    int status;

    switch (option->type) {
    case KVF_CONFIG_OCTAL:
        return octal_parse(text, value_out, why_out, why_bytes);
    case KVF_CONFIG_ENUM:
        return enum_parse(option, text, value_out, why_out, why_bytes);
    case KVF_CONFIG_SIZE:
    case KVF_CONFIG_RATE:
        example = "a size as 512MiB";
        status = kvf_parse_size(text, value_out, detail, sizeof(detail));
        break;
    case KVF_CONFIG_SECONDS:
        example = "whole seconds as 30s or 5min";
        status = kvf_parse_duration(text, value_out, detail, sizeof(detail));
        if (status == KVF_OK && *value_out % KVF_NS_PER_S != 0) {
            snprintf(detail, sizeof(detail), "'%s' is no whole number of seconds", text);
            status = KVF_ERR_INVALID;
        } else if (status == KVF_OK) {
            *value_out /= KVF_NS_PER_S;
        }
        break;
    default:
        status = kvf_parse_u64(text, value_out, detail, sizeof(detail));
        break;
    }
    if (status != KVF_OK) {
        snprintf(why_out, why_bytes, "%s; write %s", detail, example);
        return KVF_ERR_CONFIG;
    }
    return KVF_OK;
}

/* One character of UTF-8: its number, and how many bytes it took; 0: it is none. */
static unsigned utf8_take(const char *text, uint32_t *number_out)
{
    const uint8_t *t = (const uint8_t *)text;
    unsigned length = t[0] < 0x80 ? 1 : t[0] < 0xc2 ? 0 : t[0] < 0xe0 ? 2 : t[0] < 0xf0 ? 3 : 4;
    uint32_t number = length <= 1 ? t[0] : t[0] & (0x7fu >> length);

    for (unsigned i = 1; i < length; i++) {
        if ((t[i] & 0xc0) != 0x80) {
            return 0;
        }
        number = number << 6 | (t[i] & 0x3f);
    }
    if ((length == 3 && number < 0x800) || (length == 4 && number < 0x10000) || number > 0x10ffff ||
        (number >= 0xd800 && number < 0xe000)) {
        return 0;
    }
    *number_out = number;
    return length;
}

static int string_parse(const struct kvf_config_option *option, const char *text, char *field,
                        char *why_out, size_t why_bytes)
{
    size_t length = strlen(text);
    unsigned taken;

    if (length < option->min) {
        snprintf(why_out, why_bytes, "it is empty; give it a value");
        return KVF_ERR_CONFIG;
    }
    if (length > option->max) {
        snprintf(why_out, why_bytes, "it has %zu characters; use at most %" PRIu64, length,
                 option->max);
        return KVF_ERR_CONFIG;
    }
    for (const char *c = text; *c != '\0'; c += taken) {
        uint32_t number;

        taken = utf8_take(c, &number);
        if (taken == 0 || number < 0x20 || number == 0x7f) {
            snprintf(why_out, why_bytes, "it holds %s; remove it",
                     taken == 0 ? "a byte that is no UTF-8" : "a control character");
            return KVF_ERR_CONFIG;
        }
    }
    memcpy(field, text, length + 1);
    return KVF_OK;
}

int kvf_config_option_parse(const struct kvf_config_option *option, const char *text, void *base,
                            char *why_out, size_t why_bytes)
{
    char *field = (char *)base + option->offset;
    uint64_t number;
    int status;

    if (option->type == KVF_CONFIG_STRING) {
        return string_parse(option, text, field, why_out, why_bytes);
    }
    if (option->type == KVF_CONFIG_BOOL) {
        bool flag = strcmp(text, "true") == 0;

        if (!flag && strcmp(text, "false") != 0) {
            snprintf(why_out, why_bytes, "'%s' is no truth value; write true or false", text);
            return KVF_ERR_CONFIG;
        }
        memcpy(field, &flag, sizeof(flag));
        return KVF_OK;
    }
    status = number_parse(option, text, &number, why_out, why_bytes);
    if (status == KVF_OK) {
        status = range_check(option, number, text, why_out, why_bytes);
    }
    if (status == KVF_OK) {
        memcpy(field, &number, sizeof(number));
    }
    return status;
}

/* --- defaults --------------------------------------------------------------------------------- */

/* The defaults in config.def are ours, so one that does not parse is our mistake. An empty default
 * of a value that must be given stays empty: kvf_config_finish asks for it. */
static void set_default(const struct kvf_config_option *option, void *base)
{
    char why[KVF_ERROR_TEXT_BYTES];
    int status;

    if (option->type == KVF_CONFIG_STRING && option->default_text[0] == '\0') {
        *((char *)base + option->offset) = '\0';
        return;
    }
    status = kvf_config_option_parse(option, option->default_text, base, why, sizeof(why));
    assert(status == KVF_OK);
    (void)status;
}

void kvf_config_init(struct kvf_config *config)
{
    memset(config, 0, sizeof(*config));
    for (unsigned i = 0; i < KVF_CONFIG_OPTIONS; i++) {
        set_default(&kvf_config_options[i], config);
    }
}

void *kvf_config_list_at(struct kvf_config *config, const struct kvf_config_list *list,
                         uint32_t index)
{
    return list_member(config, list, index);
}

void *kvf_config_list_append(struct kvf_config *config, const struct kvf_config_list *list,
                             uint32_t line)
{
    uint32_t *count = list_count(config, list);
    char *member;

    if (*count == list->max) {
        return NULL;
    }
    member = list_member(config, list, *count);
    memset(member, 0, list->member_bytes);
    for (unsigned i = 0; i < list->n_options; i++) {
        set_default(&list->options[i], member);
    }
    memcpy(member + list->line_offset, &line, sizeof(line));
    (*count)++;
    return member;
}

/* --- messages --------------------------------------------------------------------------------- */

void kvf_config_fail_at(const struct kvf_config *config, uint32_t line, const char *what,
                        struct kvf_config_error *error, const char *fmt, ...)
{
    size_t used;
    va_list args;

    if (line == KVF_CONFIG_LINE_COMMAND) {
        snprintf(error->text, sizeof(error->text), "command line: %s: ", what);
    } else if (line == KVF_CONFIG_LINE_DEFAULT) {
        snprintf(error->text, sizeof(error->text), "built-in default: %s: ", what);
    } else {
        snprintf(error->text, sizeof(error->text), "%.255s:%" PRIu32 ": %s: ", config->file, line,
                 what);
    }
    used = strlen(error->text);
    va_start(args, fmt);
    vsnprintf(error->text + used, sizeof(error->text) - used, fmt, args);
    va_end(args);
    /* The text may quote the file: keep it one line. */
    for (char *c = error->text; *c != '\0'; c++) {
        if ((unsigned char)*c < 0x20 || *c == 0x7f) {
            *c = '?';
        }
    }
}

void kvf_config_name_member(struct kvf_config_error *error, const char *list, uint32_t index)
{
    char head[64];
    char number[16];
    size_t used = strlen(error->text);
    size_t at;
    size_t more;

    snprintf(head, sizeof(head), "command line: %s.", list);
    snprintf(number, sizeof(number), "%" PRIu32 ".", index);
    at = strlen(head);
    more = strlen(number);
    if (strncmp(error->text, head, at) == 0 && used + more < sizeof(error->text)) {
        memmove(error->text + at + more, error->text + at, used - at + 1);
        memcpy(error->text + at, number, more);
    }
}

/* Changes (insert, remove, replace) that make b of a; lengths over the table count as far away. */
static unsigned edit_distance(const char *a, const char *b)
{
    enum {
        LENGTH_MAX = 40
    };
    unsigned row[LENGTH_MAX + 1];
    size_t a_length = strlen(a);
    size_t b_length = strlen(b);

    if (a_length > LENGTH_MAX || b_length > LENGTH_MAX) {
        return UINT32_MAX;
    }
    for (size_t j = 0; j <= b_length; j++) {
        row[j] = (unsigned)j;
    }
    for (size_t i = 1; i <= a_length; i++) {
        unsigned diagonal = row[0];

        row[0] = (unsigned)i;
        for (size_t j = 1; j <= b_length; j++) {
            unsigned best = diagonal + (a[i - 1] != b[j - 1]);

            diagonal = row[j];
            best = row[j] + 1 < best ? row[j] + 1 : best;
            best = row[j - 1] + 1 < best ? row[j - 1] + 1 : best;
            row[j] = best;
        }
    }
    return row[b_length];
}

void kvf_config_nearest_offer(struct kvf_config_nearest *nearest, const char *candidate)
{
    unsigned distance = edit_distance(nearest->name, candidate);

    if (distance < nearest->distance) {
        nearest->distance = distance;
        nearest->best = candidate;
    }
}

void kvf_config_nearest_cure(const struct kvf_config_nearest *nearest, char *out, size_t bytes)
{
    /* A third of the letters wrong is a slip, more is another word. */
    if (nearest->best != NULL && nearest->distance <= 1 + strlen(nearest->name) / 3) {
        snprintf(out, bytes, "did you mean '%s'?", nearest->best);
    } else {
        snprintf(out, bytes, "remove it, or see kvferryd.yaml(5) for the names");
    }
}

/* --- --set ------------------------------------------------------------------------------------ */

/* Set one option of an array of them by name; line becomes the source of the value. */
static int set_by_key(struct kvf_config *config, const struct kvf_config_option *options,
                      unsigned n_options, const char *key, const char *value, void *base,
                      uint32_t *lines, const char *name, struct kvf_config_error *error)
{
    struct kvf_config_nearest nearest = {.name = key, .distance = UINT32_MAX};
    char why[KVF_CONFIG_ERROR_TEXT_BYTES / 2];

    for (unsigned i = 0; i < n_options; i++) {
        if (strcmp(options[i].key, key) == 0) {
            if (kvf_config_option_parse(&options[i], value, base, why, sizeof(why)) != KVF_OK) {
                kvf_config_fail_at(config, KVF_CONFIG_LINE_COMMAND, name, error, "%s", why);
                return KVF_ERR_CONFIG;
            }
            lines[i] = KVF_CONFIG_LINE_COMMAND;
            return KVF_OK;
        }
        kvf_config_nearest_offer(&nearest, options[i].key);
    }
    kvf_config_nearest_cure(&nearest, why, sizeof(why));
    kvf_config_fail_at(config, KVF_CONFIG_LINE_COMMAND, name, error, "no such option; %s", why);
    return KVF_ERR_CONFIG;
}

/* "nvme.0.path" with rest "0.path". */
static int set_list_member(struct kvf_config *config, const struct kvf_config_list *list,
                           const char *rest, const char *value, const char *name,
                           struct kvf_config_error *error)
{
    uint32_t count = *list_count(config, list);
    char *end;
    unsigned long index = strtoul(rest, &end, 10);
    char *member;

    if (end == rest || *end != '.' || rest[0] < '0' || rest[0] > '9') {
        kvf_config_fail_at(config, KVF_CONFIG_LINE_COMMAND, name, error,
                           "it is a list; name a member as %s.0.%s", list->name,
                           list->options[0].key);
        return KVF_ERR_CONFIG;
    }
    if (index > count || index >= list->max) {
        kvf_config_fail_at(config, KVF_CONFIG_LINE_COMMAND, name, error,
                           "the list has %" PRIu32 " members of at most %" PRIu32
                           "; the next one is %s.%" PRIu32,
                           count, list->max, list->name, count);
        return KVF_ERR_CONFIG;
    }
    member = index == count ? kvf_config_list_append(config, list, KVF_CONFIG_LINE_COMMAND)
                            : list_member(config, list, (uint32_t)index);
    return set_by_key(config, list->options, list->n_options, end + 1, value, member,
                      (uint32_t *)(member + list->lines_offset), name, error);
}

static int set_scalar(struct kvf_config *config, const char *name, const char *value,
                      struct kvf_config_error *error)
{
    struct kvf_config_nearest nearest = {.name = name, .distance = UINT32_MAX};
    char names[KVF_CONFIG_OPTIONS][64];
    char why[KVF_CONFIG_ERROR_TEXT_BYTES / 2];

    for (unsigned i = 0; i < KVF_CONFIG_OPTIONS; i++) {
        kvf_config_option_name(&kvf_config_options[i], names[i], sizeof(names[i]));
        if (strcmp(names[i], name) == 0) {
            if (kvf_config_option_parse(&kvf_config_options[i], value, config, why, sizeof(why)) !=
                KVF_OK) {
                kvf_config_fail_at(config, KVF_CONFIG_LINE_COMMAND, name, error, "%s", why);
                return KVF_ERR_CONFIG;
            }
            config->lines[i] = KVF_CONFIG_LINE_COMMAND;
            return KVF_OK;
        }
        kvf_config_nearest_offer(&nearest, names[i]);
    }
    kvf_config_nearest_cure(&nearest, why, sizeof(why));
    kvf_config_fail_at(config, KVF_CONFIG_LINE_COMMAND, name, error, "no such option; %s", why);
    return KVF_ERR_CONFIG;
}

int kvf_config_set(struct kvf_config *config, const char *assignment,
                   struct kvf_config_error *error)
{
    const char *equals = strchr(assignment, '=');
    const struct kvf_config_list *list = NULL;
    char name[96];
    char first[32];
    size_t first_length;

    if (equals == NULL || equals == assignment || (size_t)(equals - assignment) >= sizeof(name)) {
        snprintf(error->text, sizeof(error->text),
                 "command line: --set '%.80s' is no assignment; write section.key=value",
                 assignment);
        return KVF_ERR_CONFIG;
    }
    snprintf(name, sizeof(name), "%.*s", (int)(equals - assignment), assignment);
    first_length = strcspn(name, ".");
    if (name[first_length] == '.' && first_length < sizeof(first)) {
        snprintf(first, sizeof(first), "%.*s", (int)first_length, name);
        list = kvf_config_list_find(first);
    }
    if (list != NULL) {
        return set_list_member(config, list, name + first_length + 1, equals + 1, name, error);
    }
    return set_scalar(config, name, equals + 1, error);
}

void kvf_config_option_name(const struct kvf_config_option *option, char *out, size_t bytes)
{
    snprintf(out, bytes, "%s%s%s", option->section, option->section[0] != '\0' ? "." : "",
             option->key);
}

/* --- printing --------------------------------------------------------------------------------- */

/* A value as a YAML scalar: strings in double quotes. */
static void print_value(const struct kvf_config_option *option, const void *base, FILE *out)
{
    char text[4096];
    unsigned taken;

    kvf_config_value_text(option, base, text, sizeof(text));
    if (option->type != KVF_CONFIG_STRING) {
        fprintf(out, "%s\n", text);
        return;
    }
    fputc('"', out);
    for (const char *c = text; *c != '\0'; c += taken) {
        uint32_t number;

        taken = utf8_take(c, &number);
        assert(taken != 0); /* string_parse has seen it */
        if (taken > 1) {
            fprintf(out, "\\U%08" PRIX32, number); /* YAML folds some of them as line breaks */
            continue;
        }
        if (*c == '"' || *c == '\\') {
            fputc('\\', out);
        }
        fputc(*c, out);
    }
    fputs("\"\n", out);
}

void kvf_config_print(const struct kvf_config *config, FILE *out)
{
    const char *section = "";

    for (unsigned i = 0; i < KVF_CONFIG_LISTS; i++) {
        const struct kvf_config_list *list = &kvf_config_lists[i];
        uint32_t count;

        memcpy(&count, (const char *)config + list->count_offset, sizeof(count));
        fprintf(out, "%s:%s\n", list->name, count == 0 ? " []" : "");
        for (uint32_t j = 0; j < count; j++) {
            const char *member = (const char *)config + list->offset + j * list->member_bytes;

            for (unsigned k = 0; k < list->n_options; k++) {
                fprintf(out, "  %c %s: ", k == 0 ? '-' : ' ', list->options[k].key);
                print_value(&list->options[k], member, out);
            }
        }
    }
    for (unsigned i = 0; i < KVF_CONFIG_OPTIONS; i++) {
        const struct kvf_config_option *option = &kvf_config_options[i];

        if (option->section[0] != '\0' && strcmp(section, option->section) != 0) {
            fprintf(out, "%s:\n", option->section);
        }
        section = option->section;
        fprintf(out, "%s%s: ", section[0] != '\0' ? "  " : "", option->key);
        print_value(option, config, out);
    }
}
