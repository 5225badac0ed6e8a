/* SPDX-License-Identifier: Apache-2.0
 *
 * test_config.c: each way to be wrong gives one line with the right place and a cure; every option
 * can be set by file and by command line; what is printed reads back; memory is added up.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "agent/check.h"
#include "agent/config.h"
#include "agent/config_internal.h"
#include "base/limits.h"
#include "tests/support/support.h"
#include "tiers/tier_dram.h"
#include "tiers/work_inline.h"

static struct kvf_config *new_config(void)
{
    struct kvf_config *config = malloc(sizeof(*config));

    assert_non_null(config);
    kvf_config_init(config);
    return config;
}

static int parse_text(struct kvf_config *config, const char *yaml, struct kvf_config_error *error)
{
    return kvf_config_parse(config, "test.yaml", yaml, strlen(yaml), error);
}

static void assert_contains(const char *text, const char *part)
{
    if (strstr(text, part) == NULL) {
        fail_msg("'%s' is not in '%s'", part, text);
    }
}

/* --- what is wrong ---------------------------------------------------------------------------- */

struct wrong {
    const char *yaml;
    const char *place; /* how the line begins */
    const char *what;
    const char *cure;
};

static const struct wrong wrong_documents[] = {
    {"drm:\n  bytes: 1GiB\n", "test.yaml:1: drm: ", "no such option", "did you mean 'dram'?"},
    {"dram:\n  byts: 1GiB\n", "test.yaml:2: dram.byts: ", "no such option",
     "did you mean 'bytes'?"},
    {"dram:\n  qqqqqqqqqqqqq: 1\n", "test.yaml:2: ", "no such option", "see kvferryd.yaml(5)"},
    {"workerz: 2\n", "test.yaml:1: workerz: ", "no such option", "did you mean 'workers'?"},
    {"nvm:\n  - path: /x\n", "test.yaml:1: nvm: ", "no such option", "did you mean 'nvme'?"},
    {"nvme:\n  - path: /x\n    dept: 3\n", "test.yaml:3: nvme.dept: ", "no such option",
     "did you mean 'depth'?"},
    {"dram:\n  bytes: 1GiB\n  bytes: 2GiB\n", "test.yaml:3: bytes: ", "given before, in line 2",
     "remove one"},
    {"dram:\n  bytes: 1GiB\nlog:\n  level: info\ndram:\n  bytes: 2GiB\n",
     "test.yaml:5: dram: ", "given before, in line 1", "remove one"},
    {"dram:\n  bytes: 1G\n", "test.yaml:2: dram.bytes: ", "unknown unit 'G'", "as 512MiB"},
    {"dram:\n  bytes: -1\n", "test.yaml:2: dram.bytes: ", "does not begin with a digit",
     "as 512MiB"},
    {"dram:\n  bytes: 99999999999999999999\n", "test.yaml:2: dram.bytes: ", "too large", ""},
    {"dram:\n  bytes: 1MiB\n", "test.yaml:2: dram.bytes: ", "too small", "the least is 16MiB"},
    {"dram:\n  piece_bytes: 2GiB\n", "test.yaml:2: dram.piece_bytes: ", "too large",
     "the most is 1GiB"},
    {"dram:\n  bytes:\n", "test.yaml:2: dram.bytes: ", "no value", "for the default '1GiB'"},
    {"dram:\n  bytes: [1, 2]\n", "test.yaml:2: dram.bytes: ", "it is a list", "(size)"},
    {"dram:\n  bytes: {a: 1}\n", "test.yaml:2: dram.bytes: ", "it is a map", "(size)"},
    {"dram: 1GiB\n", "test.yaml:1: dram: ", "a single value", "write its options below it"},
    {"dram:\n", "test.yaml:1: dram: ", "it is empty", "write its options below it"},
    {"dram:\n  hugepages: maybe\n", "test.yaml:2: dram.hugepages: ", "none of its words",
     "off|try|require"},
    {"allow_uncalibrated: yes\n", "test.yaml:1: allow_uncalibrated: ", "no truth value",
     "true or false"},
    {"lease:\n  max_age: 60\n", "test.yaml:2: lease.max_age: ", "no unit", "30s or 5min"},
    {"lease:\n  max_age: 1500ms\n", "test.yaml:2: lease.max_age: ", "no whole number of seconds",
     "30s or 5min"},
    {"lease:\n  client_share: 101\n", "test.yaml:2: lease.client_share: ", "too large",
     "the most is 100"},
    {"workers: two\n", "test.yaml:1: workers: ", "does not begin with a digit", "a whole number"},
    {"sockets: /run/x\n", "test.yaml:1: sockets: ", "a single value", "'- path: ...'"},
    {"sockets:\n  - /run/x\n", "test.yaml:2: sockets: ", "a member is a single value",
     "'- path: ...'"},
    {"sockets:\n  - path: /run/x\n    mode: 888\n",
     "test.yaml:3: sockets.mode: ", "no octal number", "0660"},
    {"sockets:\n  - path: /run/x\n    mode: 7777\n", "test.yaml:3: sockets.mode: ", "too large",
     "the most is 0777"},
    {"admin:\n  socket: \"a\\tb\"\n", "test.yaml:2: admin.socket: ", "control character",
     "remove it"},
    {"cluster_key: \"a\\0b\"\n", "test.yaml:1: cluster_key: ", "", "write one value"},
    {"- a\n- b\n", "test.yaml:1: document: ", "it is a list", "'key: value'"},
    {"dram:\n  bytes: 1GiB\n---\nworkers: 1\n", "test.yaml:4: document: ", "second one",
     "remove the '---'"},
    {"? [a, b]\n: 1\n", "test.yaml:1: key: ", "it is a list", "write a name"},
    {"dram:\n\tbytes: 1GiB\n", "test.yaml:2: YAML: ", "", "check indentation"},
    {"dram: [\n", "test.yaml:2: YAML: ", "", "check indentation"},
    {"a: \xff\n", "test.yaml:1: YAML: ", "", "check indentation"},
};

static void test_wrong_documents(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(wrong_documents) / sizeof(wrong_documents[0]); i++) {
        const struct wrong *wrong = &wrong_documents[i];
        struct kvf_config *config = new_config();
        struct kvf_config_error error = {{0}};

        if (parse_text(config, wrong->yaml, &error) != KVF_ERR_CONFIG) {
            fail_msg("was taken: %s", wrong->yaml);
        }
        if (strncmp(error.text, wrong->place, strlen(wrong->place)) != 0) {
            fail_msg("'%s' does not begin with '%s'", error.text, wrong->place);
        }
        assert_contains(error.text, wrong->what);
        assert_contains(error.text, wrong->cure);
        assert_contains(error.text, ";");
        assert_null(strchr(error.text, '\n'));
        free(config);
    }
}

/* Rules over several options: lines point at the value that is wrong. */
static const struct wrong wrong_rules[] = {
    {"sockets:\n  - path: run/x\n", "test.yaml:2: sockets.path: ", "no absolute path", "'/'"},
    {"sockets:\n  - path: /x\n  - path: /x\n", "test.yaml:3: sockets.path: ", "another socket",
     "give each its own"},
    {"sockets:\n  - path: /x\n    tenant: a b\n", "test.yaml:3: sockets.tenant: ", "no name",
     "letters"},
    {"nvme:\n  - bytes: 1GiB\n", "test.yaml:2: nvme.path: ", "missing", "a file or a device"},
    {"nvme:\n  - path: x\n", "test.yaml:2: nvme.path: ", "no absolute path", "'/'"},
    {"nvme:\n  - path: /x\n  - path: /x\n", "test.yaml:3: nvme.path: ", "another drive",
     "give each its own"},
    {"nvme:\n  - path: /x\n    bytes: 100MiB\n", "test.yaml:3: nvme.bytes: ", "too small for 4",
     "at least 513MiB"},
    {"nvme:\n  - path: /x\n    bytes: 16MiB\n    segment_bytes: 4MiB\n",
     "test.yaml:3: nvme.bytes: ", "too small for 4", "at least 17MiB"},
    {"nvme:\n  - path: /x\n    segment_bytes: 5000\n",
     "test.yaml:3: nvme.segment_bytes: ", "multiple of 4KiB", "0 for the default"},
    {"nvme:\n  - path: /x\n    bytes: 65GiB\n", "test.yaml:2: nvme.write_budget: ", "must be set",
     "as 50MiB"},
    {"dram:\n  area_bytes: 256MiB\n  piece_bytes: 128MiB\n",
     "test.yaml:2: dram.area_bytes: ", "larger than dram.piece_bytes", "lower it"},
    {"dram:\n  bytes: 64MiB\n  area_bytes: 128MiB\n",
     "test.yaml:3: dram.area_bytes: ", "larger than dram.bytes", "lower it"},
    {"dram:\n  area_bytes: 1048577\n", "test.yaml:2: dram.area_bytes: ", "pages",
     "multiples of 4096"},
    {"staging:\n  client: 512MiB\n", "test.yaml:2: staging.client: ", "larger than staging.total",
     "lower it"},
    {"clients:\n  ring_entries: 1000\n", "test.yaml:2: clients.ring_entries: ", "no power of two",
     "1024"},
    {"lease:\n  client_share: 80\n",
     "test.yaml:2: lease.client_share: ", "larger than lease.tenant_share", "lower it"},
    {"quota:\n  tenant_share: 50\n",
     "built-in default: quota.namespace_share: ", "larger than quota.tenant_share", "lower it"},
    {"admin:\n  listen: localhost:80\n", "test.yaml:2: admin.listen: ", "no numeric address",
     "127.0.0.1:9394"},
    {"admin:\n  listen: 127.0.0.1\n", "test.yaml:2: admin.listen: ", "no numeric address",
     "127.0.0.1:9394"},
    {"admin:\n  socket: /run/kvferry/kvferryd.sock\n",
     "test.yaml:2: admin.socket: ", "a client socket too", "its own"},
    {"directory:\n  user: u\n", "test.yaml:2: directory.user: ", "directory.address is not",
     "set that too"},
    {"directory:\n  password_file: /p\n",
     "test.yaml:2: directory.password_file: ", "directory.address is not", "set that too"},
    {"directory:\n  address: 10.0.0.9:6379\n  user: u\n",
     "test.yaml:3: directory.user: ", "directory.password_file is not set", "set it too"},
    {"peers:\n  nodes: \",\"\n", "test.yaml:2: peers.nodes: ", "no node in it", "leave it empty"},
    {"cluster_key: key\n", "test.yaml:1: cluster_key: ", "no absolute path", "'/'"},
};

static void test_wrong_rules(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(wrong_rules) / sizeof(wrong_rules[0]); i++) {
        const struct wrong *wrong = &wrong_rules[i];
        struct kvf_config *config = new_config();
        struct kvf_config_error error = {{0}};

        if (parse_text(config, wrong->yaml, &error) != KVF_OK) {
            fail_msg("refused too early: %s", error.text);
        }
        if (kvf_config_finish(config, &error) != KVF_ERR_CONFIG) {
            fail_msg("was taken: %s", wrong->yaml);
        }
        if (strncmp(error.text, wrong->place, strlen(wrong->place)) != 0) {
            fail_msg("'%s' does not begin with '%s'", error.text, wrong->place);
        }
        assert_contains(error.text, wrong->what);
        assert_contains(error.text, wrong->cure);
        free(config);
    }
}

static void test_too_many_members(void **state)
{
    struct kvf_config *config = new_config();
    struct kvf_config_error error;
    char yaml[4096] = "nvme:\n";

    (void)state;
    for (unsigned i = 0; i <= KVF_CONFIG_NVME_MAX; i++) {
        snprintf(yaml + strlen(yaml), sizeof(yaml) - strlen(yaml), "  - path: /x%u\n", i);
    }
    assert_int_equal(parse_text(config, yaml, &error), KVF_ERR_CONFIG);
    assert_contains(error.text, "test.yaml:10: nvme: more than 8 members; remove some");
    free(config);
}

/* A document whose alias points at its own parent is a loop for whoever follows it. */
static void test_alias_loop(void **state)
{
    struct kvf_config *config = new_config();
    struct kvf_config_error error;

    (void)state;
    assert_int_equal(parse_text(config, "dram: &a\n  bytes: *a\n", &error), KVF_ERR_CONFIG);
    free(config);
}

/* --- --set ------------------------------------------------------------------------------------ */

static void test_set_errors(void **state)
{
    static const struct {
        const char *assignment;
        const char *what;
    } cases[] = {
        {"dram.bytes", "no assignment; write section.key=value"},
        {"=3", "no assignment"},
        {"dram.byte=1GiB", "command line: dram.byte: no such option; did you mean 'dram.bytes'?"},
        {"worker=1", "did you mean 'workers'?"},
        {"dram.bytes=1", "command line: dram.bytes: '1' is too small; the least is 16MiB"},
        {"nvme.path=/x", "it is a list; name a member as nvme.0.path"},
        {"nvme.x.path=/x", "it is a list"},
        {"nvme.1.path=/x", "has 0 members of at most 8; the next one is nvme.0"},
        {"nvme.99999999999999999999.path=/x", "the next one is nvme.0"},
        {"nvme.0.pat=/x", "nvme.0.pat: no such option; did you mean 'path'?"},
        {"sockets.0.mode=9", "no octal number"},
        {"admin.socket=/\xc3", "a byte that is no UTF-8; remove it"},
        {"admin.socket=/\xed\xa0\x80", "a byte that is no UTF-8; remove it"},
        {"admin.socket=/\xc0\xaf", "a byte that is no UTF-8; remove it"},
        {"admin.socket=/\xf4\x90\x80\x80", "a byte that is no UTF-8; remove it"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct kvf_config *config = new_config();
        struct kvf_config_error error;

        if (kvf_config_set(config, cases[i].assignment, &error) != KVF_ERR_CONFIG) {
            fail_msg("was taken: %s", cases[i].assignment);
        }
        assert_contains(error.text, cases[i].what);
        free(config);
    }
}

/* A value that differs from the default and is in range. */
static void other_value(const struct kvf_config_option *option, char *out, size_t bytes)
{
    char word[32];

    switch (option->type) {
    case KVF_CONFIG_SIZE:
    case KVF_CONFIG_RATE:
        snprintf(out, bytes, "%" PRIu64, option->min + 8192);
        break;
    case KVF_CONFIG_SECONDS:
        snprintf(out, bytes, "%" PRIu64 "s", option->min + 2);
        break;
    case KVF_CONFIG_COUNT:
    case KVF_CONFIG_PERCENT:
        snprintf(out, bytes, "%" PRIu64, option->min + 7);
        break;
    case KVF_CONFIG_OCTAL:
        snprintf(out, bytes, "0640");
        break;
    case KVF_CONFIG_ENUM:
        kvf_config_enum_word(option, option->max, word, sizeof(word));
        assert_string_not_equal(word, "");
        snprintf(out, bytes, "%s", word);
        break;
    case KVF_CONFIG_BOOL:
        snprintf(out, bytes, "%s", strcmp(option->default_text, "true") == 0 ? "false" : "true");
        break;
    case KVF_CONFIG_STRING:
        snprintf(out, bytes, "/other");
        break;
    }
}

/* Set one option both ways and see it change. prefix: "dram." or "nvme.0." for --set. */
static void check_settable(const struct kvf_config_option *option, const char *yaml_format,
                           const char *set_name, size_t base)
{
    struct kvf_config *by_file = new_config();
    struct kvf_config *by_set = new_config();
    struct kvf_config_error error = {{0}};
    char value[64];
    char text[4096];
    char yaml[256];
    char set[256];

    other_value(option, value, sizeof(value));
    snprintf(yaml, sizeof(yaml), yaml_format, option->key, value);
    snprintf(set, sizeof(set), "%s=%s", set_name, value);
    if (parse_text(by_file, yaml, &error) != KVF_OK ||
        kvf_config_set(by_set, set, &error) != KVF_OK) {
        fail_msg("%s: %s", set_name, error.text);
    }
    kvf_config_value_text(option, (char *)by_file + base, text, sizeof(text));
    assert_string_not_equal(text, option->default_text);
    if (option->type != KVF_CONFIG_SIZE && option->type != KVF_CONFIG_RATE) {
        assert_string_equal(text, value);
    }
    kvf_config_value_text(option, (char *)by_set + base, yaml, sizeof(yaml));
    assert_string_equal(yaml, text);
    free(by_file);
    free(by_set);
}

static void test_every_option_is_settable(void **state)
{
    char name[64];
    char format[96];

    (void)state;
    for (unsigned i = 0; i < KVF_CONFIG_OPTIONS; i++) {
        const struct kvf_config_option *option = &kvf_config_options[i];

        kvf_config_option_name(option, name, sizeof(name));
        snprintf(format, sizeof(format), option->section[0] != '\0' ? "%s:\n  %%s: %%s\n" : "%s",
                 option->section[0] != '\0' ? option->section : "%s: %s\n");
        check_settable(option, format, name, 0);
    }
    for (unsigned i = 0; i < KVF_CONFIG_LISTS; i++) {
        const struct kvf_config_list *list = &kvf_config_lists[i];

        for (unsigned k = 0; k < list->n_options; k++) {
            snprintf(name, sizeof(name), "%s.0.%s", list->name, list->options[k].key);
            snprintf(format, sizeof(format), "%s:\n  - %%s: %%s\n", list->name);
            check_settable(&list->options[k], format, name, list->offset);
        }
    }
}

/* --- defaults, printing ----------------------------------------------------------------------- */

static void test_defaults(void **state)
{
    struct kvf_config *config = new_config();
    struct kvf_config_error error;

    (void)state;
    assert_int_equal(parse_text(config, "# nothing\n", &error), KVF_OK);
    assert_int_equal(kvf_config_finish(config, &error), KVF_OK);
    assert_int_equal(config->n_sockets, 1);
    assert_int_equal(config->n_nvme, 0);
    assert_string_equal(config->sockets[0].path, "/run/kvferry/kvferryd.sock");
    assert_int_equal(config->sockets[0].mode, 0660);
    assert_string_equal(config->sockets[0].tenant, "default");
    assert_string_equal(config->admin_socket, "/run/kvferry/kvferryd.sock.admin");
    assert_int_equal(config->admin_mode, 0600);
    assert_int_equal(config->dram_bytes, 1ull << 30);
    assert_int_equal(config->lease_max_age, 60);
    assert_int_equal(config->workers, 2);
    assert_false(config->allow_uncalibrated);
    free(config);
}

static void test_printed_config_reads_back(void **state)
{
    static const char yaml[] =
        "sockets:\n"
        "  - {path: /a, tenant: red, mode: 0600}\n"
        "  - {path: /b, tenant: blue, group: '42'}\n"
        "nvme:\n"
        "  - {path: \"/x \\\"y\\\\z\u00e9\\L\", bytes: 2GiB, engine: threads}\n"
        "dram: {bytes: 512MiB, hugepages: try}\n"
        "allow_uncalibrated: true\n"
        "log: {level: debug}\n";
    struct kvf_config *first = new_config();
    struct kvf_config *second = new_config();
    struct kvf_config_error error = {{0}};
    char *texts[2] = {NULL, NULL};
    size_t bytes;
    FILE *out;

    (void)state;
    assert_int_equal(parse_text(first, yaml, &error), KVF_OK);
    assert_int_equal(kvf_config_finish(first, &error), KVF_OK);
    out = open_memstream(&texts[0], &bytes);
    kvf_config_print(first, out);
    fclose(out);
    if (parse_text(second, texts[0], &error) != KVF_OK) {
        fail_msg("%s in\n%s", error.text, texts[0]);
    }
    assert_int_equal(kvf_config_finish(second, &error), KVF_OK);
    out = open_memstream(&texts[1], &bytes);
    kvf_config_print(second, out);
    fclose(out);
    assert_string_equal(texts[0], texts[1]);
    assert_string_equal(second->nvme[0].path, "/x \"y\\z\u00e9\u2028");
    assert_int_equal(second->sockets[1].mode, 0660);
    assert_string_equal(second->sockets[1].group, "42");
    assert_int_equal(second->dram_hugepages, 1);
    free(texts[0]);
    free(texts[1]);
    free(first);
    free(second);
}

static bool memory_allows(void *ctx, uint64_t bytes)
{
    (void)ctx;
    (void)bytes;
    return true;
}

static bool may_evict(void *ctx, kvf_location location, kvf_cookie cookie)
{
    (void)ctx;
    (void)location;
    (void)cookie;
    return false;
}

static void evict(void *ctx, kvf_location location, kvf_cookie cookie)
{
    (void)may_evict(ctx, location, cookie);
    fail_msg("nothing may be evicted");
}

/* The size that the memory tier gives to the areas of a configuration. */
static uint64_t area_bytes_in_use(const struct kvf_config *config)
{
    struct kvf_dram_config dram;
    struct kvf_dram_info info;
    struct kvf_tier *tier;
    char why[KVF_ERROR_TEXT_BYTES];

    kvf_config_dram(config, &dram);
    assert_int_equal(kvf_work_inline_open(KVF_WORK_AT_SUBMIT, 64, &dram.work), KVF_OK);
    dram.memory_allows = memory_allows;
    dram.host.may_evict = may_evict;
    dram.host.evict = evict;
    if (kvf_dram_open(&dram, &tier, why, sizeof(why)) != KVF_OK) {
        fail_msg("%s", why);
    }
    kvf_dram_info(tier, &info);
    dram.work->ops->close(dram.work);
    tier->ops->close(tier);
    return info.area_bytes;
}

/* What is printed as in force is in force, and can be given back. */
static void test_areas_of_small_arenas(void **state)
{
    static const char *const documents[] = {
        "dram: {bytes: 16MiB}\n",
        "dram: {bytes: 41582255B}\n",
        "dram: {bytes: 100MiB, piece_bytes: 8MiB}\n",
        "dram: {bytes: 100MiB, area_bytes: 64MiB}\n",
        "dram: {bytes: 100MiB, area_bytes: 2MiB}\n",
        "dram: {bytes: 64MiB}\nsockets: [{path: /a, tenant: red}, {path: /b, tenant: blue}]\n",
    };

    (void)state;
    for (size_t i = 0; i < sizeof(documents) / sizeof(documents[0]); i++) {
        struct kvf_config *config = new_config();
        struct kvf_config *again = new_config();
        struct kvf_config_error error = {{0}};
        uint64_t bytes;
        char set[64];

        assert_int_equal(parse_text(config, documents[i], &error), KVF_OK);
        assert_int_equal(kvf_config_finish(config, &error), KVF_OK);
        bytes = area_bytes_in_use(config);
        assert_int_equal(bytes, config->dram_area_bytes);
        assert_int_equal(parse_text(again, documents[i], &error), KVF_OK);
        snprintf(set, sizeof(set), "dram.area_bytes=%" PRIu64 "B", config->dram_area_bytes);
        assert_int_equal(kvf_config_set(again, set, &error), KVF_OK);
        assert_int_equal(kvf_config_finish(again, &error), KVF_OK);
        assert_int_equal(again->dram_area_bytes, bytes);
        free(config);
        free(again);
    }
}

static void test_listen_addresses(void **state)
{
    static const char *const right[] = {"127.0.0.1:1", "0.0.0.0:65535", "[::1]:9394", "[::]:80"};
    static const char *const wrong[] = {"",      "127.0.0.1:0", "127.0.0.1:65536", "::1:80",
                                        "[::1]", "[::1:80",     "1.2.3:80",        ":80",
                                        "[]:80", "[1.2.3.4]:1", "127.0.0.1:8o",    "host:80"};
    struct sockaddr_storage address;
    socklen_t bytes;

    (void)state;
    for (size_t i = 0; i < sizeof(right) / sizeof(right[0]); i++) {
        assert_int_equal(kvf_config_listen_parse(right[i], &address, &bytes), KVF_OK);
    }
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        assert_int_equal(kvf_config_listen_parse(wrong[i], &address, &bytes), KVF_ERR_INVALID);
    }
}

/* --- the machine's files ---------------------------------------------------------------------- */

/* A finished configuration with everything below dir. */
static struct kvf_config *config_in(const struct kvf_test_dir *dir)
{
    struct kvf_config *config = new_config();
    struct kvf_config_error error = {{0}};

    assert_int_equal(kvf_config_use_dir(config, dir->path, &error), KVF_OK);
    assert_int_equal(kvf_config_set(config, "nvme.0.bytes=32MiB", &error), KVF_OK);
    assert_int_equal(kvf_config_set(config, "nvme.0.segment_bytes=4MiB", &error), KVF_OK);
    return config;
}

static void check_paths_fail(struct kvf_config *config, const char *set, const char *what,
                             const char *cure)
{
    struct kvf_config_error error = {{0}};

    if (set != NULL) {
        assert_int_equal(kvf_config_set(config, set, &error), KVF_OK);
    }
    if (kvf_config_finish(config, &error) != KVF_OK) {
        fail_msg("%s", error.text);
    }
    assert_int_equal(kvf_config_check_paths(config, &error), KVF_ERR_CONFIG);
    assert_contains(error.text, what);
    assert_contains(error.text, cure);
    free(config);
}

static void test_paths(void **state)
{
    struct kvf_test_dir dir;
    struct kvf_config *config;
    struct kvf_config_error error;
    char path[KVF_TEST_PATH_BYTES];

    (void)state;
    kvf_test_dir_create(&dir);
    config = new_config();
    assert_int_equal(kvf_config_use_dir(config, dir.path, &error), KVF_OK);
    assert_int_equal(kvf_config_finish(config, &error), KVF_OK);
    assert_int_equal(config->n_nvme, 1);
    assert_int_equal(config->nvme[0].bytes, 2ull << 30);
    free(config);

    config = config_in(&dir);
    assert_int_equal(kvf_config_finish(config, &error), KVF_OK);
    assert_int_equal(kvf_config_check_paths(config, &error), KVF_OK);
    free(config);

    check_paths_fail(config_in(&dir), "sockets.0.path=/nowhere/x.sock", "/nowhere: No such file",
                     "make it");
    check_paths_fail(config_in(&dir), "nvme.0.path=/nowhere/store", "/nowhere: No such file",
                     "make it");
    check_paths_fail(config_in(&dir), "sockets.0.group=no-such-group", "does not exist",
                     "name another");
    check_paths_fail(config_in(&dir), "sockets.0.group=no-such-group",
                     "command line: sockets.0.group: ", "name another");
    check_paths_fail(config_in(&dir), "nvme.0.bytes=0",
                     "command line: nvme.0.bytes: ", "give it one");
    check_paths_fail(config_in(&dir), "nvme.0.bytes=0", "a new store in a file needs a size",
                     "give it one");
    config = config_in(&dir);
    assert_int_equal(kvf_config_set(config, "nvme.1.path=/x", &error), KVF_OK);
    assert_int_equal(kvf_config_set(config, "nvme.1.bytes=64MiB", &error), KVF_OK);
    assert_int_equal(kvf_config_finish(config, &error), KVF_ERR_CONFIG);
    assert_contains(error.text, "command line: nvme.1.bytes: too small");
    free(config);
    check_paths_fail(config_in(&dir), "nvme.0.path=/dev/null", "neither a file nor a block device",
                     "change the path");
    check_paths_fail(config_in(&dir), "cluster_key=/nowhere/key", "cannot be read",
                     "check the path");

    /* A container runtime that mounts a missing socket leaves a folder in its place. */
    kvf_test_dir_path(&dir, "kvferryd.sock", path);
    assert_int_equal(mkdir(path, 0700), 0);
    check_paths_fail(config_in(&dir), NULL, "kvferryd.sock is a folder", "never the socket");
    assert_int_equal(rmdir(path), 0);

    kvf_test_dir_remove(&dir);
}

/* Files of secrets, and the address that is for other nodes. */
static void test_secrets_and_addresses(void **state)
{
    struct kvf_test_dir dir;
    struct kvf_config *config;
    struct kvf_config_error error;
    char path[KVF_TEST_PATH_BYTES];
    char set[KVF_TEST_PATH_BYTES + 64];

    (void)state;
    kvf_test_dir_create(&dir);
    kvf_test_dir_path(&dir, "short.key", path);
    kvf_test_file_write(path, "31 bytes are not enough here...", 31);
    snprintf(set, sizeof(set), "cluster_key=%s", path);
    check_paths_fail(config_in(&dir), set, "does not hold exactly 32 bytes", "head -c 32");

    kvf_test_file_write(path, "32 bytes are just enough for it.", 32);
    config = config_in(&dir);
    assert_int_equal(kvf_config_set(config, set, &error), KVF_OK);
    check_paths_fail(config, "peers.listen=10.255.254.253:7171", "peers.listen: 10.255.254.253",
                     "`ip address`");
    config = config_in(&dir);
    assert_int_equal(kvf_config_set(config, set, &error), KVF_OK);
    assert_int_equal(kvf_config_set(config, "peers.listen=127.0.0.1:7171", &error), KVF_OK);
    assert_int_equal(kvf_config_finish(config, &error), KVF_OK);
    assert_int_equal(kvf_config_check_paths(config, &error), KVF_OK);
    free(config);
#if KVF_HAVE_HIREDIS
    config = config_in(&dir);
    assert_int_equal(kvf_config_set(config, set, &error), KVF_OK);
    assert_int_equal(kvf_config_set(config, "directory.address=127.0.0.1:6379", &error), KVF_OK);
    check_paths_fail(config, "directory.password_file=/nowhere/password",
                     "directory.password_file: password file /nowhere", "check the path");
#endif
    kvf_test_dir_remove(&dir);
}

/* Two stores that fit alone and not together. */
static void test_room_is_added_up(void **state)
{
    struct kvf_test_dir dir;
    struct kvf_config *config;
    struct kvf_config_error error = {{0}};
    struct statvfs fs;
    char set[KVF_TEST_PATH_BYTES + 64];

    (void)state;
    kvf_test_dir_create(&dir);
    assert_int_equal(statvfs(dir.path, &fs), 0);
    config = config_in(&dir);
    for (unsigned i = 0; i < 2; i++) {
        snprintf(set, sizeof(set), "nvme.%u.path=%s/store%u", i, dir.path, i);
        assert_int_equal(kvf_config_set(config, set, &error), KVF_OK);
        snprintf(set, sizeof(set), "nvme.%u.bytes=%" PRIu64, i,
                 (uint64_t)fs.f_bavail * fs.f_frsize / 10 * 6);
        assert_int_equal(kvf_config_set(config, set, &error), KVF_OK);
        snprintf(set, sizeof(set), "nvme.%u.segment_bytes=4MiB", i);
        assert_int_equal(kvf_config_set(config, set, &error), KVF_OK);
        snprintf(set, sizeof(set), "nvme.%u.write_budget=1MiB", i);
        assert_int_equal(kvf_config_set(config, set, &error), KVF_OK);
        if (i == 0) {
            assert_int_equal(kvf_config_finish(config, &error), KVF_OK);
            assert_int_equal(kvf_config_check_paths(config, &error), KVF_OK);
        }
    }
    check_paths_fail(config, NULL, "MiB more and its file system has", "free some space");
    kvf_test_dir_remove(&dir);
}

/* --- memory ----------------------------------------------------------------------------------- */

static uint64_t part_bytes(const struct kvf_check *check, const char *name)
{
    for (unsigned i = 0; i < check->n_parts; i++) {
        if (strcmp(check->parts[i].name, name) == 0) {
            return check->parts[i].bytes;
        }
    }
    fail_msg("no part %s", name);
    return 0;
}

static void test_sum(void **state)
{
    struct kvf_config *config = new_config();
    struct kvf_config_error error;
    struct kvf_check check;
    struct kvf_check larger;
    uint64_t sum = 0;

    (void)state;
    assert_int_equal(kvf_config_finish(config, &error), KVF_OK);
    kvf_check_sum(config, 0, &check);
    for (unsigned i = 0; i < check.n_parts; i++) {
        sum += check.parts[i].bytes;
        assert_int_not_equal(check.parts[i].bytes, 0);
    }
    assert_int_equal(sum, check.total_bytes);
    assert_int_equal(part_bytes(&check, "arena"), 1ull << 30);
    assert_int_equal(part_bytes(&check, "staging and rings"), 256ull << 20);

    /* What depends on an option follows it. */
    config->dram_bytes *= 4;
    config->clients_max *= 4;
    kvf_check_sum(config, 0, &larger);
    assert_int_equal(part_bytes(&larger, "arena"), 4ull << 30);
    assert_true(part_bytes(&larger, "requests") > 2 * part_bytes(&check, "requests"));
    assert_true(part_bytes(&larger, "index") > part_bytes(&check, "index"));
    assert_true(part_bytes(&larger, "slots of the arena") >
                part_bytes(&check, "slots of the arena"));

    /* Mode observe takes no arena, also not one that the machine could not hold. */
    config->mode = KVF_MODE_OBSERVE;
    kvf_check_sum(config, 0, &check);
    assert_int_equal(part_bytes(&check, "arena"), 0);
    assert_int_equal(check.total_bytes, larger.total_bytes - part_bytes(&larger, "arena") +
                                            part_bytes(&check, "replays"));
    /* It opens no drives, but replays some of the same size. */
    config->n_nvme = 1;
    config->nvme[0].bytes = 64 * config->dram_bytes;
    kvf_check_sum(config, 0, &larger);
    assert_true(part_bytes(&larger, "replays") > part_bytes(&check, "replays"));
    for (unsigned i = 0; i < larger.n_parts; i++) {
        assert_null(strstr(larger.parts[i].name, "drive"));
    }
    assert_int_equal(part_bytes(&larger, "threads"), part_bytes(&check, "threads"));
    config->n_nvme = 0;
    config->mode = KVF_MODE_SERVE;

    /* Sizes that no machine has must not wrap around to something that fits. */
    config->dram_bytes = UINT64_MAX - 4096;
    kvf_check_sum(config, 0, &larger);
    assert_int_equal(larger.total_bytes, UINT64_MAX);
    free(config);
}

static void write_file(const struct kvf_test_dir *dir, const char *name, const char *text)
{
    char path[KVF_TEST_PATH_BYTES];

    kvf_test_dir_path(dir, name, path);
    kvf_test_file_write(path, text, strlen(text));
}

static void make_dir(const struct kvf_test_dir *dir, const char *name)
{
    char path[KVF_TEST_PATH_BYTES];

    kvf_test_dir_path(dir, name, path);
    assert_int_equal(mkdir(path, 0700), 0);
}

static void test_machine_memory(void **state)
{
    struct kvf_machine_memory memory;
    struct kvf_test_dir root;

    (void)state;
    kvf_test_dir_create(&root);
    assert_int_equal(kvf_machine_memory_read(root.path, &memory), KVF_ERR_UNSUPPORTED);
    make_dir(&root, "proc");
    make_dir(&root, "proc/self");
    make_dir(&root, "sys");
    make_dir(&root, "sys/fs");
    make_dir(&root, "sys/fs/cgroup");
    make_dir(&root, "sys/fs/cgroup/pod");
    make_dir(&root, "sys/fs/cgroup/pod/box");
    write_file(&root, "proc/meminfo",
               "MemTotal:       8388608 kB\nMemFree: 1 kB\nMemAvailable:   6291456 kB\n");
    write_file(&root, "proc/self/cgroup", "0::/pod/box\n");
    assert_int_equal(kvf_machine_memory_read(root.path, &memory), KVF_OK);
    assert_int_equal(memory.total_bytes, 8ull << 30);
    assert_int_equal(memory.available_bytes, 6ull << 30);

    /* The tightest folder on the way up counts; page cache that can be dropped is not used up. */
    write_file(&root, "sys/fs/cgroup/pod/box/memory.max", "max\n");
    write_file(&root, "sys/fs/cgroup/pod/memory.max", "2147483648\n");
    write_file(&root, "sys/fs/cgroup/pod/memory.current", "1610612736\n");
    write_file(&root, "sys/fs/cgroup/pod/memory.stat", "anon 5\ninactive_file 1073741824\n");
    assert_int_equal(kvf_machine_memory_read(root.path, &memory), KVF_OK);
    assert_int_equal(memory.total_bytes, 2ull << 30);
    assert_int_equal(memory.available_bytes, (2ull << 30) - (512ull << 20));
    assert_contains(memory.limit, "/sys/fs/cgroup/pod/memory.max");
    assert_int_equal(memory.huge_total_bytes, 0);

    /* Huge pages are set aside: they are none of the machine's other memory. */
    write_file(&root, "proc/meminfo",
               "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\nHugetlb: 2097152 kB\n");
    write_file(&root, "sys/fs/cgroup/pod/memory.max", "max\n");
    make_dir(&root, "sys/kernel");
    make_dir(&root, "sys/kernel/mm");
    make_dir(&root, "sys/kernel/mm/hugepages");
    make_dir(&root, "sys/kernel/mm/hugepages/hugepages-2048kB");
    write_file(&root, "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "1024\n");
    write_file(&root, "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "900\n");
    write_file(&root, "sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages", "100\n");
    assert_int_equal(kvf_machine_memory_read(root.path, &memory), KVF_OK);
    assert_int_equal(memory.total_bytes, 6ull << 30);
    assert_int_equal(memory.huge_total_bytes, 2ull << 30);
    assert_int_equal(memory.huge_free_bytes, 1600ull << 20);
    assert_string_equal(memory.huge_limit, "vm.nr_hugepages");
    write_file(&root, "sys/fs/cgroup/pod/hugetlb.2MB.max", "1073741824\n");
    write_file(&root, "sys/fs/cgroup/pod/hugetlb.2MB.current", "268435456\n");
    assert_int_equal(kvf_machine_memory_read(root.path, &memory), KVF_OK);
    assert_int_equal(memory.huge_total_bytes, 1ull << 30);
    assert_int_equal(memory.huge_free_bytes, 768ull << 20);
    assert_contains(memory.huge_limit, "/sys/fs/cgroup/pod/hugetlb.2MB.max");
    kvf_test_dir_remove(&root);
}

/* Windows in host memory, one for each GPU. */
static void test_memory_of_gpus(void **state)
{
    struct kvf_config *config = new_config();
    struct kvf_config_error error = {{0}};
    struct kvf_check checks[2];
    struct kvf_test_dir root;

    (void)state;
    assert_int_equal(
        parse_text(config, "gpu: {devices: 'GPU-1, GPU-2,GPU-3', hbm_bytes: 1GiB}\n", &error),
        KVF_OK);
    assert_int_equal(kvf_config_finish(config, &error), KVF_OK);
    kvf_test_dir_create(&root);
    assert_int_equal(kvf_check_gpus(config, root.path), 3);
    kvf_check_sum(config, 1, &checks[0]);
    kvf_check_sum(config, 3, &checks[1]);
    assert_true(part_bytes(&checks[0], "windows, slots of GPUs") >= 64ull << 20);
    assert_int_equal(part_bytes(&checks[1], "windows, slots of GPUs"),
                     3 * part_bytes(&checks[0], "windows, slots of GPUs"));
    assert_int_equal(part_bytes(&checks[1], "blocks on GPUs"),
                     part_bytes(&checks[0], "blocks on GPUs"));

    snprintf(config->gpu_devices, sizeof(config->gpu_devices), "all");
    assert_int_equal(kvf_check_gpus(config, root.path), 1);
    make_dir(&root, "proc");
    make_dir(&root, "proc/driver");
    make_dir(&root, "proc/driver/nvidia");
    make_dir(&root, "proc/driver/nvidia/gpus");
    make_dir(&root, "proc/driver/nvidia/gpus/0000:01:00.0");
    make_dir(&root, "proc/driver/nvidia/gpus/0000:02:00.0");
    assert_int_equal(kvf_check_gpus(config, root.path), 2);
    config->gpu_devices[0] = '\0';
    assert_int_equal(kvf_check_gpus(config, root.path), 0);
    kvf_test_dir_remove(&root);
    free(config);
}

/* An arena of huge pages is none of the memory that a cgroup limits. */
static void test_huge_pages(void **state)
{
    struct kvf_machine_memory memory = {.total_bytes = 1ull << 30,
                                        .available_bytes = 1ull << 30,
                                        .huge_total_bytes = 4ull << 30,
                                        .huge_free_bytes = 3ull << 30,
                                        .limit = "test",
                                        .huge_limit = "pool"};
    struct kvf_config *config = new_config();
    struct kvf_config_error error = {{0}};
    struct kvf_check check;

    (void)state;
    assert_int_equal(parse_text(config, "dram:\n  bytes: 4GiB\n  hugepages: require\n", &error),
                     KVF_OK);
    assert_int_equal(kvf_config_finish(config, &error), KVF_OK);
    kvf_check_sum(config, 0, &check);
    assert_int_equal(kvf_check_memory(config, &check, &memory, false, &error), KVF_OK);
    assert_int_equal(kvf_check_memory(config, &check, &memory, true, &error), KVF_ERR_CONFIG);
    assert_contains(error.text, "test.yaml:3: dram.hugepages: ");
    assert_contains(error.text, "4096 MiB of huge pages, and 3072 MiB are free (pool)");

    /* What the pool has not is of ordinary memory: 1 GiB, beside all the rest, is too much. */
    config->dram_hugepages = 1;
    assert_int_equal(kvf_check_memory(config, &check, &memory, false, &error), KVF_OK);
    assert_int_equal(kvf_check_memory(config, &check, &memory, true, &error), KVF_ERR_CONFIG);
    assert_contains(error.text, "dram.bytes: ");
    assert_contains(error.text, "1024 MiB are available (test)");
    config->dram_bytes = strtoull(strstr(error.text, "at most ") + strlen("at most "), NULL, 10)
                         << 20;
    assert_true(config->dram_bytes > 3ull << 30);
    kvf_check_sum(config, 0, &check);
    assert_int_equal(kvf_check_memory(config, &check, &memory, true, &error), KVF_OK);
    config->dram_hugepages = 0;
    assert_int_equal(kvf_check_memory(config, &check, &memory, false, &error), KVF_ERR_CONFIG);
    free(config);
}

static void test_memory_that_does_not_fit(void **state)
{
    struct kvf_machine_memory memory = {
        .total_bytes = 4ull << 30, .available_bytes = 2ull << 30, .limit = "test"};
    struct kvf_config *config = new_config();
    struct kvf_config_error error = {{0}};
    struct kvf_check check;
    const char *cure;

    (void)state;
    assert_int_equal(parse_text(config, "dram:\n  bytes: 3GiB\n", &error), KVF_OK);
    assert_int_equal(kvf_config_finish(config, &error), KVF_OK);
    kvf_check_sum(config, 0, &check);
    assert_int_equal(kvf_check_memory(config, &check, &memory, false, &error), KVF_OK);
    assert_int_equal(kvf_check_memory(config, &check, &memory, true, &error), KVF_ERR_CONFIG);
    assert_contains(error.text, "test.yaml:2: dram.bytes: ");
    assert_contains(error.text, "2048 MiB are available (test)");

    /* The cure is one: what it names fits. */
    cure = strstr(error.text, "at most ");
    assert_non_null(cure);
    config->dram_bytes = strtoull(cure + strlen("at most "), NULL, 10) << 20;
    kvf_check_sum(config, 0, &check);
    assert_int_equal(kvf_check_memory(config, &check, &memory, true, &error), KVF_OK);

    /* And no less than what would fit: tables are those of the smaller arena. */
    memory.available_bytes = 22144ull << 20;
    config->dram_bytes = 1ull << 40;
    kvf_check_sum(config, 0, &check);
    assert_int_equal(kvf_check_memory(config, &check, &memory, true, &error), KVF_ERR_CONFIG);
    cure = strstr(error.text, "at most ");
    assert_non_null(cure);
    config->dram_bytes = strtoull(cure + strlen("at most "), NULL, 10) << 20;
    kvf_check_sum(config, 0, &check);
    assert_int_equal(kvf_check_memory(config, &check, &memory, true, &error), KVF_OK);
    config->dram_bytes += 1ull << 30;
    kvf_check_sum(config, 0, &check);
    assert_int_equal(kvf_check_memory(config, &check, &memory, true, &error), KVF_ERR_CONFIG);

    /* The largest part is the one to lower. */
    config->dram_bytes = 1ull << 30;
    config->staging_total = 8ull << 30;
    kvf_check_sum(config, 0, &check);
    assert_int_equal(kvf_check_memory(config, &check, &memory, false, &error), KVF_ERR_CONFIG);
    assert_contains(error.text, "staging.total: ");
    assert_contains(error.text, "all there is");
    free(config);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_wrong_documents),
        cmocka_unit_test(test_wrong_rules),
        cmocka_unit_test(test_too_many_members),
        cmocka_unit_test(test_alias_loop),
        cmocka_unit_test(test_set_errors),
        cmocka_unit_test(test_every_option_is_settable),
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_printed_config_reads_back),
        cmocka_unit_test(test_listen_addresses),
        cmocka_unit_test(test_paths),
        cmocka_unit_test(test_secrets_and_addresses),
        cmocka_unit_test(test_room_is_added_up),
        cmocka_unit_test(test_sum),
        cmocka_unit_test(test_machine_memory),
        cmocka_unit_test(test_memory_of_gpus),
        cmocka_unit_test(test_huge_pages),
        cmocka_unit_test(test_memory_that_does_not_fit),
        cmocka_unit_test(test_areas_of_small_arenas),
    };

    return cmocka_run_group_tests_name("config", tests, NULL, NULL);
}
