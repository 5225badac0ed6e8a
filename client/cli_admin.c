/* SPDX-License-Identifier: Apache-2.0
 *
 * cli_admin.c: subcommands that ask the admin server: stat, ls, clients, verify, evict and purge by
 * namespace, reload, log-level and drain. With -o json what the server says is passed on; text is
 * for people and may change.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/log.h"
#include "client/cli.h"

#define VERIFY_STEP 64 /* blocks a request, so that none takes long */
#define LS_STEP     500

/* Looks at a draining daemon, half a second apart, that may fail one after the other: its last act
 * is to answer nobody. */
#define DRAIN_FAILURES 20

/* --- stat ------------------------------------------------------------------------------------- */

static void print_tier(const char *name, const json_t *tier)
{
    char stored[32];
    char capacity[32];
    const char *state = cli_flag(tier, "off")          ? ", OFF"
                        : cli_flag(tier, "writes_off") ? ", WRITES OFF"
                                                       : "";

    printf("%-14s %s of %s in %" PRIu64 " blocks%s\n", name,
           cli_bytes_text(cli_number(tier, "stored_bytes"), stored, sizeof(stored)),
           cli_bytes_text(cli_number(tier, "capacity_bytes"), capacity, sizeof(capacity)),
           cli_number(tier, "stored_blocks"), state);
    printf("%-14s stores %" PRIu64 ", loads %" PRIu64 ", evictions %" PRIu64 ", busy %" PRIu64
           ", errors: i/o %" PRIu64 ", checksum %" PRIu64 ", MAC %" PRIu64 "\n",
           "", cli_number(tier, "stores"), cli_number(tier, "loads"), cli_number(tier, "evictions"),
           cli_number(tier, "busy"), cli_number(tier, "errors_io"),
           cli_number(tier, "errors_corrupt"), cli_number(tier, "errors_mac"));
}

static void print_latency(const char *name, const json_t *metrics, const char *field)
{
    const json_t *histogram = json_object_get(metrics, field);

    if (cli_number(histogram, "count") == 0) {
        return;
    }
    printf("%-14s %" PRIu64 ", p50 up to %.0f us, p99 up to %.0f us\n", name,
           cli_number(histogram, "count"), (double)cli_number(histogram, "p50_ns") / 1e3,
           (double)cli_number(histogram, "p99_ns") / 1e3);
}

/* What is not as usual, in words; "" if nothing is. */
const char *cli_service_text(const json_t *stat, char *out, size_t bytes)
{
    uint64_t n_off = cli_number(json_object_get(stat, "metrics"), "disabled_namespaces");

    out[0] = '\0';
    if (cli_flag(stat, "disabled")) {
        snprintf(out, bytes, ", ALL NAMESPACES DISABLED (kvferry enable)");
    } else if (n_off > 0) {
        snprintf(out, bytes, ", %" PRIu64 " NAMESPACE%s DISABLED (kvferry ls)", n_off,
                 n_off > 1 ? "S" : "");
    } else if (strcmp(cli_string(stat, "mode"), "observe") == 0) {
        snprintf(out, bytes, ", OBSERVES: stores nothing (mode)");
    }
    return out;
}

/* Mode observe: what stores would have hit. */
static void print_observed(const json_t *metrics)
{
    static const struct {
        const char *name, *field;
    } sizes[] = {
        {"a quarter", "observe_hit_tokens_quarter"}, {"half", "observe_hit_tokens_half"},
        {"all", "observe_hit_tokens_full"},          {"2 times", "observe_hit_tokens_double"},
        {"4 times", "observe_hit_tokens_fourfold"},  {"8 times", "observe_hit_tokens_eightfold"},
    };
    uint64_t tokens = cli_number(metrics, "observe_lookup_tokens");

    printf("%-14s %" PRIu64 " tokens looked up, %" PRIu64 " prompts left out\n", "observed", tokens,
           cli_number(metrics, "observe_lost_prompts"));
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]) && tokens > 0; i++) {
        printf("%-14s by %s of the configured size: %.1f %% of the tokens\n",
               i == 0 ? "would be hit" : "", sizes[i].name,
               100.0 * (double)cli_number(metrics, sizes[i].field) / (double)tokens);
    }
}

static void print_stat(const json_t *stat)
{
    char service[64];
    const json_t *metrics = json_object_get(stat, "metrics");
    const json_t *gpus = json_object_get(stat, "hbm");
    const json_t *drive;
    const json_t *gpu;
    size_t i;
    char used[32];
    char total[32];

    printf("%-14s %s, up %" PRIu64 " s, %s%s\n", "kvferryd", cli_string(stat, "version"),
           cli_number(stat, "uptime_s"),
           cli_flag(stat, "draining") ? "draining"
           : cli_flag(stat, "ready")  ? "ready"
                                      : "not ready",
           cli_service_text(stat, service, sizeof(service)));
    printf("%-14s %" PRIu64 " of %" PRIu64 "\n", "clients", cli_number(stat, "clients"),
           cli_number(stat, "clients_max"));
    printf("%-14s %" PRIu64 " of %" PRIu64 " entries\n", "index", cli_number(stat, "index_entries"),
           cli_number(stat, "index_capacity"));
    printf("%-14s %s of %s\n", "staging",
           cli_bytes_text(cli_number(stat, "staging_used_bytes"), used, sizeof(used)),
           cli_bytes_text(cli_number(stat, "staging_total_bytes"), total, sizeof(total)));
    json_array_foreach(gpus, i, gpu)
    {
        char name[32];

        snprintf(name, sizeof(name), "hbm %zu", i);
        print_tier(name, gpu);
        printf("%-14s %s\n", "", cli_string(gpu, "uuid"));
    }
    print_tier("dram", json_object_get(stat, "dram"));
    printf("%-14s fill of full areas %.3f\n", "",
           json_real_value(json_object_get(json_object_get(stat, "dram"), "fill")));
    json_array_foreach(json_object_get(stat, "nvme"), i, drive)
    {
        char name[32];

        snprintf(name, sizeof(name), "nvme %zu", i);
        print_tier(name, drive);
        printf("%-14s %s by %s: %s\n", "", cli_string(drive, "path"), cli_string(drive, "engine"),
               cli_string(drive, "why"));
    }
    printf("%-14s dram %" PRIu64 ", nvme %" PRIu64 ", other nodes %" PRIu64 ", misses %" PRIu64
           "\n",
           "gets", cli_number(metrics, "get_hits_dram"), cli_number(metrics, "get_hits_nvme"),
           cli_number(metrics, "get_hits_remote"), cli_number(metrics, "get_misses"));
    printf("%-14s stored %" PRIu64 ", present %" PRIu64 ", conflicts %" PRIu64 "\n", "puts",
           cli_number(metrics, "put_blocks"), cli_number(metrics, "put_exists"),
           cli_number(metrics, "put_conflict"));
    if (strcmp(cli_string(stat, "mode"), "observe") == 0) {
        print_observed(metrics);
    }
    if (json_array_size(gpus) > 0) {
        printf("%-14s in place %" PRIu64 ", copied down first %" PRIu64 "\n", "gets from hbm",
               cli_number(metrics, "get_hits_hbm"), cli_number(metrics, "get_hits_hbm_copied"));
    }
    print_latency("get from hbm", metrics, "get_hbm_ns");
    print_latency("get from dram", metrics, "get_dram_ns");
    print_latency("get from nvme", metrics, "get_nvme_ns");
    print_latency("get from peers", metrics, "get_remote_ns");
    print_latency("put", metrics, "put_ns");
}

bool cli_print_start(const json_t *stat)
{
    const json_t *start = json_object_get(stat, "starting");

    if (start == NULL) {
        return false;
    }
    printf("%-14s %s, up %" PRIu64 " s, not ready: %s\n", "kvferryd", cli_string(stat, "version"),
           cli_number(stat, "uptime_s"), cli_string(start, "text"));
    return true;
}

int cli_stat(const struct cli *cli)
{
    json_t *stat;
    int code = cli_http(cli, "GET", "/v1/stat", &stat);

    if (code != CLI_OK) {
        return code;
    }
    if (cli->is_json) {
        cli_print_json(stat);
        return CLI_OK;
    }
    if (!cli_print_start(stat)) {
        print_stat(stat);
    }
    json_decref(stat);
    return CLI_OK;
}

/* --- namespaces ------------------------------------------------------------------------------- */

/* The id of the namespace that was named: 16 hexadecimal digits, or a label that only one has. */
int cli_find_namespace(const struct cli *cli, char id_out[17])
{
    const char *name = cli->namespace_name;
    const json_t *row;
    json_t *answer;
    unsigned found = 0;
    size_t i;
    int code;

    if (strlen(name) == 16 && strspn(name, "0123456789abcdefABCDEF") == 16) {
        memcpy(id_out, name, 17);
        return CLI_OK;
    }
    code = cli_http(cli, "GET", "/v1/namespaces", &answer);
    if (code != CLI_OK) {
        return code;
    }
    json_array_foreach(json_object_get(answer, "namespaces"), i, row)
    {
        if (strcmp(cli_string(row, "label"), name) == 0) {
            snprintf(id_out, 17, "%s", cli_string(row, "namespace_id"));
            found++;
        }
    }
    json_decref(answer);
    if (found == 0) {
        return cli_fail(CLI_FAILED, "no namespace has the label '%s'; see kvferry ls", name);
    }
    if (found > 1) {
        return cli_fail(CLI_FAILED,
                        "%u namespaces have the label '%s'; give the id that kvferry ls shows",
                        found, name);
    }
    return CLI_OK;
}

static int list_namespaces(const struct cli *cli)
{
    json_t *answer;
    const json_t *row;
    size_t i;
    int code = cli_http(cli, "GET", "/v1/namespaces", &answer);

    if (code != CLI_OK) {
        return code;
    }
    if (cli->is_json) {
        cli_print_json(answer);
        return CLI_OK;
    }
    printf("%-16s  %-10s %-10s %8s %10s %12s %12s  %s\n", "namespace", "tenant", "profile",
           "clients", "blocks", "dram", "nvme", "label");
    json_array_foreach(json_object_get(answer, "namespaces"), i, row)
    {
        char dram[32];
        char nvme[32];

        printf("%-16s  %-10s %-10s %8" PRIu64 " %10" PRIu64 " %12s %12s  %s%s\n",
               cli_string(row, "namespace_id"), cli_string(row, "tenant"),
               cli_string(row, "profile"), cli_number(row, "clients"), cli_number(row, "blocks"),
               cli_bytes_text(cli_number(row, "dram_bytes"), dram, sizeof(dram)),
               cli_bytes_text(cli_number(row, "nvme_bytes"), nvme, sizeof(nvme)),
               cli_flag(row, "disabled") ? "DISABLED " : "", cli_string(row, "label"));
    }
    json_decref(answer);
    return CLI_OK;
}

/* --- ls --------------------------------------------------------------------------------------- */

static void print_blocks(const struct cli *cli, const json_t *blocks)
{
    const json_t *row;
    size_t i;

    json_array_foreach(blocks, i, row)
    {
        char bytes[32];

        if (cli->is_json) {
            char *text = json_dumps(row, JSON_COMPACT);

            printf("%s\n", text != NULL ? text : "");
            free(text);
            continue;
        }
        printf("%-64s %2" PRIu64 "/%-2" PRIu64 " %12s  %-3s %-4s %-6s %s%s\n",
               cli_string(row, "key_id"), cli_number(row, "shard"), cli_number(row, "shard_count"),
               cli_bytes_text(cli_number(row, "record_bytes"), bytes, sizeof(bytes)),
               cli_flag(row, "in_hbm") ? "hbm" : "-", cli_flag(row, "in_dram") ? "dram" : "-",
               cli_string(row, "nvme"), cli_string(row, "state"),
               cli_number(row, "pinned") != 0 ? " leased" : "");
    }
}

/* Blocks of one namespace, page by page, at most cli->count (0: all) of them. */
static int list_blocks(const struct cli *cli, const char *id)
{
    char cursor[17] = "0";
    uint64_t left = cli->count != 0 ? cli->count : UINT64_MAX;

    while (left > 0) {
        const char *next;
        char path[128];
        json_t *answer;
        const json_t *blocks;
        uint64_t step = left < LS_STEP ? left : LS_STEP;
        int code;

        snprintf(path, sizeof(path), "/v1/blocks?namespace=%s&cursor=%s&max=%" PRIu64, id, cursor,
                 step);
        code = cli_http(cli, "GET", path, &answer);
        if (code != CLI_OK) {
            return code;
        }
        blocks = json_object_get(answer, "blocks");
        print_blocks(cli, blocks);
        left -= json_array_size(blocks) < left ? json_array_size(blocks) : left;
        next = json_string_value(json_object_get(answer, "next_cursor"));
        snprintf(cursor, sizeof(cursor), "%s", next != NULL ? next : "");
        json_decref(answer);
        if (cursor[0] == '\0') {
            break;
        }
    }
    return CLI_OK;
}

int cli_ls(const struct cli *cli)
{
    char id[17];
    int code;

    if (cli->namespace_name == NULL) {
        return list_namespaces(cli);
    }
    code = cli_find_namespace(cli, id);
    return code == CLI_OK ? list_blocks(cli, id) : code;
}

/* --- clients ---------------------------------------------------------------------------------- */

int cli_clients(const struct cli *cli)
{
    json_t *answer;
    const json_t *row;
    size_t i;
    int code = cli_http(cli, "GET", "/v1/clients", &answer);

    if (code != CLI_OK) {
        return code;
    }
    if (cli->is_json) {
        cli_print_json(answer);
        return CLI_OK;
    }
    printf("%-16s %-16s %-15s %-9s %8s %11s %-6s %10s %10s %10s %10s %8s  %s\n", "connection",
           "name", "profile", "state", "pid", "shard", "gpu", "leased", "puts", "hits", "misses",
           "age s", "notes");
    json_array_foreach(json_object_get(answer, "clients"), i, row)
    {
        char shard[48];
        char leased[32];

        snprintf(shard, sizeof(shard), "%" PRIu64 "/%" PRIu64, cli_number(row, "shard"),
                 cli_number(row, "shard_count"));
        printf("%-16s %-16.16s %-15s %-9s %8" PRIu64 " %11s %-6s %10s %10" PRIu64 " %10" PRIu64
               " %10" PRIu64 " %8" PRIu64 "  %s\n",
               cli_string(row, "connection_id"), cli_string(row, "name"),
               cli_string(row, "profile"), cli_string(row, "state"), cli_number(row, "pid"),
               cli_number(row, "shard") == KVF_SHARD_NONE ? "scheduler" : shard,
               cli_string(row, "gpu_path"),
               cli_bytes_text(cli_number(row, "leased_bytes"), leased, sizeof(leased)),
               cli_number(row, "puts"), cli_number(row, "hits"), cli_number(row, "misses"),
               cli_number(row, "attached_s"), cli_string(row, "profile_text"));
    }
    json_decref(answer);
    return CLI_OK;
}

/* --- verify, evict, purge --------------------------------------------------------------------- */

/* How far it is, to standard error and for people only, once a second. */
static void show_verify(const struct cli *cli, uint64_t at, uint64_t of, uint64_t verified,
                        uint64_t *next_ns)
{
    if (cli->is_json || of == 0 || kvf_now_ns() < *next_ns) {
        return;
    }
    *next_ns = kvf_now_ns() + KVF_NS_PER_S;
    fprintf(stderr, "verifying: %.0f %%, %" PRIu64 " records\n", 100.0 * (double)at / (double)of,
            verified);
}

int cli_verify(const struct cli *cli)
{
    char cursor[17] = "0";
    uint64_t next_ns = kvf_now_ns() + KVF_NS_PER_S;
    uint64_t verified = 0;
    uint64_t bad = 0;

    while (cursor[0] != '\0') {
        const char *next;
        char path[128];
        json_t *answer;
        int code;

        snprintf(path, sizeof(path), "/v1/verify?cursor=%s&max=%d", cursor, VERIFY_STEP);
        code = cli_http(cli, "POST", path, &answer);
        if (code != CLI_OK) {
            return code;
        }
        verified += cli_number(answer, "verified");
        bad += cli_number(answer, "bad");
        next = json_string_value(json_object_get(answer, "next_cursor"));
        snprintf(cursor, sizeof(cursor), "%s", next != NULL ? next : "");
        show_verify(cli, next != NULL ? strtoull(next, NULL, 16) : 0,
                    next != NULL ? cli_number(answer, "places") : 0, verified, &next_ns);
        json_decref(answer);
    }
    if (cli->is_json) {
        cli_print_json(
            json_pack("{s:I, s:I}", "verified", (json_int_t)verified, "bad", (json_int_t)bad));
    } else {
        printf("%" PRIu64 " records verified, %" PRIu64 " bad%s\n", verified, bad,
               bad != 0 ? ": dropped, they are misses now" : "");
    }
    return bad == 0 ? CLI_OK : CLI_FAILED;
}

/* POST /v1/evict or /v1/purge for the namespace. */
static int drop_namespace(const struct cli *cli, const char *verb, const char *done)
{
    char id[17];
    char path[64];
    json_t *answer;
    int code = cli_find_namespace(cli, id);

    if (code != CLI_OK) {
        return code;
    }
    snprintf(path, sizeof(path), "/v1/%s?namespace=%s", verb, id);
    code = cli_http(cli, "POST", path, &answer);
    if (code != CLI_OK) {
        return code;
    }
    if (cli->is_json) {
        cli_print_json(answer);
    } else {
        printf("%" PRIu64 " blocks of namespace %s %s\n", cli_number(answer, "evicted"), id, done);
        json_decref(answer);
    }
    return CLI_OK;
}

int cli_evict(const struct cli *cli)
{
    if (cli->key.data != NULL && cli->namespace_name != NULL) {
        return cli_fail(CLI_USAGE, "evict: give a key or --namespace, not both");
    }
    if (cli->key.data != NULL) {
        return cli_evict_key(cli);
    }
    if (cli->namespace_name == NULL) {
        return cli_fail(CLI_USAGE, "evict: give --key, --key-text or --namespace");
    }
    return drop_namespace(cli, "evict", "evicted");
}

int cli_purge(const struct cli *cli)
{
    if (cli->namespace_name == NULL) {
        return cli_fail(CLI_USAGE, "purge: --namespace is missing");
    }
    return drop_namespace(cli, "purge", "purged for good");
}

/* --- reload, log-level, drain ----------------------------------------------------------------- */

/* Ask, and print what the daemon says: all of it, or the field for people. */
static int ask(const struct cli *cli, const char *method, const char *path, const char *field)
{
    json_t *answer;
    int code = cli_http(cli, method, path, &answer);

    if (code != CLI_OK) {
        return code;
    }
    if (cli->is_json) {
        cli_print_json(answer);
    } else {
        printf("%s\n", cli_string(answer, field));
        json_decref(answer);
    }
    return CLI_OK;
}

static int command(const struct cli *cli, const char *path)
{
    return ask(cli, "POST", path, "text");
}

int cli_reload(const struct cli *cli)
{
    return command(cli, "/v1/reload");
}

/* /v1/disable or /v1/enable of the namespace, or of all. */
static int set_service(const struct cli *cli, const char *path)
{
    char of_one[64];
    char id[17];
    int code;

    if (cli->namespace_name == NULL) {
        return command(cli, path);
    }
    code = cli_find_namespace(cli, id);
    if (code != CLI_OK) {
        return code;
    }
    snprintf(of_one, sizeof(of_one), "%s?namespace=%s", path, id);
    return command(cli, of_one);
}

int cli_disable(const struct cli *cli)
{
    return set_service(cli, "/v1/disable");
}

int cli_enable(const struct cli *cli)
{
    return set_service(cli, "/v1/enable");
}

int cli_log_level(const struct cli *cli)
{
    char path[64];
    int level;

    if (cli->file == NULL) {
        return ask(cli, "GET", "/v1/log-level", "log_level");
    }
    if (kvf_log_level_parse(cli->file, &level) != KVF_OK) {
        return cli_fail(CLI_USAGE, "log-level: '%s' is not error, warning, info or debug",
                        cli->file);
    }
    snprintf(path, sizeof(path), "/v1/log-level?level=%s", cli->file);
    return ask(cli, "POST", path, "log_level");
}

/* One look at a daemon that drains. CLI_OK: it goes on; *incarnation is filled by the first look,
 * and emptied when the daemon has ended: nobody listens, or its successor does. */
static int drain_look(const struct cli *cli, char incarnation[17], char why[CLI_WHY_BYTES])
{
    json_t *stat;
    char bytes[32];
    int code = cli_http_try(cli, "GET", "/v1/stat", &stat, why);

    if (code != CLI_OK) {
        if (code == CLI_NO_DAEMON) {
            incarnation[0] = '\0';
            return CLI_OK;
        }
        return code;
    }
    if (strcmp(incarnation, cli_string(stat, "incarnation")) != 0) {
        incarnation[0] = '\0';
    } else if (!cli->is_json) {
        const json_t *metrics = json_object_get(stat, "metrics");

        printf("draining: %" PRIu64 " clients, %s to write\n", cli_number(stat, "clients"),
               cli_bytes_text(cli_number(metrics, "writeback_bytes"), bytes, sizeof(bytes)));
        fflush(stdout);
    }
    json_decref(stat);
    return CLI_OK;
}

int cli_drain(const struct cli *cli)
{
    const struct timespec pause = {.tv_nsec = 500000000};
    char incarnation[17];
    char why[CLI_WHY_BYTES];
    unsigned failures = 0;
    json_t *answer;
    int code = cli_http(cli, "GET", "/v1/stat", &answer);

    if (code != CLI_OK) {
        return code;
    }
    snprintf(incarnation, sizeof(incarnation), "%s", cli_string(answer, "incarnation"));
    json_decref(answer);
    code = cli_http(cli, "POST", "/v1/drain", &answer);
    if (code != CLI_OK) {
        return code;
    }
    json_decref(answer);
    while (incarnation[0] != '\0') {
        code = drain_look(cli, incarnation, why);
        failures = code == CLI_OK ? 0 : failures + 1;
        if (failures == DRAIN_FAILURES) {
            return cli_fail((enum cli_exit)code, "%s; the daemon drains, but does not answer", why);
        }
        if (incarnation[0] != '\0') {
            nanosleep(&pause, NULL);
        }
    }
    if (cli->is_json) {
        cli_print_json(json_pack("{s:s}", "status", "ended"));
    } else {
        printf("the daemon has ended\n");
    }
    return CLI_OK;
}
