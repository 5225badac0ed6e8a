/* SPDX-License-Identifier: Apache-2.0
 *
 * cli_admin.c: subcommands that ask the admin server: stat, ls, clients, verify, evict and purge by
 * namespace. With -o json what the server says is passed on; text is for people and may change.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/cli.h"

#define VERIFY_STEP 64 /* blocks a request, so that none takes long */
#define LS_STEP     500

static uint64_t number(const json_t *object, const char *name)
{
    json_int_t value = json_integer_value(json_object_get(object, name));

    return value < 0 ? 0 : (uint64_t)value;
}

static const char *string(const json_t *object, const char *name)
{
    const char *text = json_string_value(json_object_get(object, name));

    return text != NULL ? text : "";
}

static bool flag(const json_t *object, const char *name)
{
    return json_is_true(json_object_get(object, name));
}

/* --- stat ------------------------------------------------------------------------------------- */

static void print_tier(const char *name, const json_t *tier)
{
    char stored[32];
    char capacity[32];
    const char *state = flag(tier, "off")          ? ", OFF"
                        : flag(tier, "writes_off") ? ", WRITES OFF"
                                                   : "";

    printf("%-14s %s of %s in %" PRIu64 " blocks%s\n", name,
           cli_bytes_text(number(tier, "stored_bytes"), stored, sizeof(stored)),
           cli_bytes_text(number(tier, "capacity_bytes"), capacity, sizeof(capacity)),
           number(tier, "stored_blocks"), state);
    printf("%-14s stores %" PRIu64 ", loads %" PRIu64 ", evictions %" PRIu64 ", busy %" PRIu64
           ", errors: i/o %" PRIu64 ", checksum %" PRIu64 ", MAC %" PRIu64 "\n",
           "", number(tier, "stores"), number(tier, "loads"), number(tier, "evictions"),
           number(tier, "busy"), number(tier, "errors_io"), number(tier, "errors_corrupt"),
           number(tier, "errors_mac"));
}

static void print_latency(const char *name, const json_t *metrics, const char *field)
{
    const json_t *histogram = json_object_get(metrics, field);

    if (number(histogram, "count") == 0) {
        return;
    }
    printf("%-14s %" PRIu64 ", p50 up to %.0f us, p99 up to %.0f us\n", name,
           number(histogram, "count"), (double)number(histogram, "p50_ns") / 1e3,
           (double)number(histogram, "p99_ns") / 1e3);
}

static void print_stat(const json_t *stat)
{
    const json_t *metrics = json_object_get(stat, "metrics");
    const json_t *gpus = json_object_get(stat, "hbm");
    const json_t *drive;
    const json_t *gpu;
    size_t i;
    char used[32];
    char total[32];

    printf("%-14s %s, up %" PRIu64 " s, %s\n", "kvferryd", string(stat, "version"),
           number(stat, "uptime_s"),
           flag(stat, "draining") ? "draining" : (flag(stat, "ready") ? "ready" : "not ready"));
    printf("%-14s %" PRIu64 " of %" PRIu64 "\n", "clients", number(stat, "clients"),
           number(stat, "clients_max"));
    printf("%-14s %" PRIu64 " of %" PRIu64 " entries\n", "index", number(stat, "index_entries"),
           number(stat, "index_capacity"));
    printf("%-14s %s of %s\n", "staging",
           cli_bytes_text(number(stat, "staging_used_bytes"), used, sizeof(used)),
           cli_bytes_text(number(stat, "staging_total_bytes"), total, sizeof(total)));
    json_array_foreach(gpus, i, gpu)
    {
        char name[32];

        snprintf(name, sizeof(name), "hbm %zu", i);
        print_tier(name, gpu);
        printf("%-14s %s\n", "", string(gpu, "uuid"));
    }
    print_tier("dram", json_object_get(stat, "dram"));
    printf("%-14s fill of full areas %.3f\n", "",
           json_real_value(json_object_get(json_object_get(stat, "dram"), "fill")));
    json_array_foreach(json_object_get(stat, "nvme"), i, drive)
    {
        char name[32];

        snprintf(name, sizeof(name), "nvme %zu", i);
        print_tier(name, drive);
        printf("%-14s %s by %s: %s\n", "", string(drive, "path"), string(drive, "engine"),
               string(drive, "why"));
    }
    printf("%-14s dram %" PRIu64 ", nvme %" PRIu64 ", misses %" PRIu64 "\n", "gets",
           number(metrics, "get_hits_dram"), number(metrics, "get_hits_nvme"),
           number(metrics, "get_misses"));
    printf("%-14s stored %" PRIu64 ", present %" PRIu64 ", conflicts %" PRIu64 "\n", "puts",
           number(metrics, "put_blocks"), number(metrics, "put_exists"),
           number(metrics, "put_conflict"));
    if (json_array_size(gpus) > 0) {
        printf("%-14s in place %" PRIu64 ", copied down first %" PRIu64 "\n", "gets from hbm",
               number(metrics, "get_hits_hbm"), number(metrics, "get_hits_hbm_copied"));
    }
    print_latency("get from hbm", metrics, "get_hbm_ns");
    print_latency("get from dram", metrics, "get_dram_ns");
    print_latency("get from nvme", metrics, "get_nvme_ns");
    print_latency("put", metrics, "put_ns");
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
    } else {
        print_stat(stat);
        json_decref(stat);
    }
    return CLI_OK;
}

/* --- namespaces ------------------------------------------------------------------------------- */

/* The id of the namespace that was named: 16 hexadecimal digits, or a label that only one has. */
static int find_namespace(const struct cli *cli, char id_out[17])
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
        if (strcmp(string(row, "label"), name) == 0) {
            snprintf(id_out, 17, "%s", string(row, "namespace_id"));
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

        printf("%-16s  %-10s %-10s %8" PRIu64 " %10" PRIu64 " %12s %12s  %s\n",
               string(row, "namespace_id"), string(row, "tenant"), string(row, "profile"),
               number(row, "clients"), number(row, "blocks"),
               cli_bytes_text(number(row, "dram_bytes"), dram, sizeof(dram)),
               cli_bytes_text(number(row, "nvme_bytes"), nvme, sizeof(nvme)), string(row, "label"));
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
               string(row, "key_id"), number(row, "shard"), number(row, "shard_count"),
               cli_bytes_text(number(row, "record_bytes"), bytes, sizeof(bytes)),
               flag(row, "in_hbm") ? "hbm" : "-", flag(row, "in_dram") ? "dram" : "-",
               string(row, "nvme"), string(row, "state"),
               number(row, "pinned") != 0 ? " leased" : "");
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
    code = find_namespace(cli, id);
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

        snprintf(shard, sizeof(shard), "%" PRIu64 "/%" PRIu64, number(row, "shard"),
                 number(row, "shard_count"));
        printf("%-16s %-16.16s %-15s %-9s %8" PRIu64 " %11s %-6s %10s %10" PRIu64 " %10" PRIu64
               " %10" PRIu64 " %8" PRIu64 "  %s\n",
               string(row, "connection_id"), string(row, "name"), string(row, "profile"),
               string(row, "state"), number(row, "pid"),
               number(row, "shard") == KVF_SHARD_NONE ? "scheduler" : shard,
               string(row, "gpu_path"),
               cli_bytes_text(number(row, "leased_bytes"), leased, sizeof(leased)),
               number(row, "puts"), number(row, "hits"), number(row, "misses"),
               number(row, "attached_s"), string(row, "profile_text"));
    }
    json_decref(answer);
    return CLI_OK;
}

/* --- verify, evict, purge --------------------------------------------------------------------- */

int cli_verify(const struct cli *cli)
{
    char cursor[17] = "0";
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
        verified += number(answer, "verified");
        bad += number(answer, "bad");
        next = json_string_value(json_object_get(answer, "next_cursor"));
        snprintf(cursor, sizeof(cursor), "%s", next != NULL ? next : "");
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
    int code = find_namespace(cli, id);

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
        printf("%" PRIu64 " blocks of namespace %s %s\n", number(answer, "evicted"), id, done);
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
