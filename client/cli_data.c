/* SPDX-License-Identifier: Apache-2.0
 *
 * cli_data.c: subcommands that speak to the daemon as an engine does: ping, put, get, evict by key.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/crc32c.h"
#include "client/cli.h"
#include "client/tunnel.h"
#include "codec/block_format.h"

#define PING_TIMEOUT_MS 2000

/* Beside the payload a put needs room for its record page and for rounding. */
#define STAGING_EXTRA_BYTES (1u << 20)

/* The library says what is wrong in more words than a status has. arg: set if it said something. */
static void on_log(void *arg, int severity, const char *text)
{
    bool *has_said = arg;

    if (severity <= 1) {
        fprintf(stderr, "kvferry: %s\n", text);
        *has_said = true;
    }
}

int cli_open(const struct cli *cli, const char *label, uint64_t staging_bytes,
             struct kvf_client **client_out)
{
    static bool has_said; /* the handle may log as long as it lives */
    struct kvf_options options;
    int status;

    kvf_options_init(&options);
    options.socket_path = cli->socket;
    options.client_name = "kvferry";
    options.profile = "bytes";
    options.namespace_label = label;
    options.staging_bytes = staging_bytes;
    options.flags = KVF_ATTACH_NO_RECONNECT;
    options.log = on_log;
    options.log_arg = &has_said;
    status = kvf_open(&options, client_out);
    if (status == KVF_OK) {
        return CLI_OK;
    }
    if (has_said) {
        if (kvf_tunnel_is_address(cli->socket) &&
            (status == KVF_ERR_INVALID || status == KVF_ERR_CONFIG)) {
            return CLI_USAGE; /* nobody has been asked */
        }
        return status == KVF_ERR_NO_DAEMON ? CLI_NO_DAEMON : CLI_FAILED;
    }
    return cli_fail_status(cli, "attach", status);
}

/* --- ping ------------------------------------------------------------------------------------- */

static int compare_u64(const void *a, const void *b)
{
    const uint64_t *x = a;
    const uint64_t *y = b;

    return (*x > *y) - (*x < *y);
}

int cli_ping(const struct cli *cli)
{
    struct kvf_client *client;
    uint64_t count = cli->count != 0 ? cli->count : 1000;
    uint64_t *times;
    uint64_t done = 0;
    int status = KVF_OK;
    int code = cli_open(cli, "", 0, &client);

    if (code != CLI_OK) {
        return code;
    }
    times = calloc(count, sizeof(*times));
    if (times == NULL) {
        kvf_close(client);
        return cli_fail(CLI_FAILED, "out of memory");
    }
    while (done < count && status == KVF_OK) {
        status = kvf_ping(client, PING_TIMEOUT_MS, &times[done]);
        done += status == KVF_OK;
    }
    if (status != KVF_OK) {
        code = cli_fail_status(cli, "ping", status);
        goto out;
    }
    qsort(times, count, sizeof(*times), compare_u64);
    if (cli->is_json) {
        cli_print_json(json_pack(
            "{s:I, s:I, s:I, s:I, s:I}", "round_trips", (json_int_t)count, "min_ns",
            (json_int_t)times[0], "p50_ns", (json_int_t)times[count / 2], "p99_ns",
            (json_int_t)times[count - 1 - count / 100], "max_ns", (json_int_t)times[count - 1]));
    } else {
        printf("%" PRIu64 " round trips: min %.1f us, p50 %.1f us, p99 %.1f us, max %.1f us\n",
               count, (double)times[0] / 1e3, (double)times[count / 2] / 1e3,
               (double)times[count - 1 - count / 100] / 1e3, (double)times[count - 1] / 1e3);
    }
out:
    free(times);
    kvf_close(client);
    return code;
}

/* --- put -------------------------------------------------------------------------------------- */

/* The whole of a file or of standard input, at most what a block can hold. */
static int read_input(const char *file, uint8_t **data_out, size_t *bytes_out)
{
    bool is_stdin = file == NULL || strcmp(file, "-") == 0;
    int fd = is_stdin ? STDIN_FILENO : open(file, O_RDONLY | O_CLOEXEC);
    uint8_t *data = malloc((size_t)KVF_PAYLOAD_BYTES_MAX + 1);
    size_t used = 0;
    ssize_t got = 1;
    int code = CLI_OK;

    if (fd < 0 || data == NULL) {
        code = cli_fail(CLI_FAILED, "%s: %s", is_stdin ? "standard input" : file, strerror(errno));
        goto out;
    }
    while (got != 0 && used <= KVF_PAYLOAD_BYTES_MAX) {
        got = read(fd, data + used, (size_t)KVF_PAYLOAD_BYTES_MAX + 1 - used);
        if (got < 0 && errno != EINTR) {
            code = cli_fail(CLI_FAILED, "%s: %s", is_stdin ? "standard input" : file,
                            strerror(errno));
            goto out;
        }
        used += got > 0 ? (size_t)got : 0;
    }
    if (used > KVF_PAYLOAD_BYTES_MAX) {
        code = cli_fail(CLI_FAILED, "more than 64 MiB do not fit into a block; cut them up");
    } else if (used == 0) {
        code = cli_fail(CLI_FAILED, "nothing to put: the input is empty");
    }
out:
    if (!is_stdin && fd >= 0) {
        close(fd);
    }
    if (code != CLI_OK) {
        free(data);
        return code;
    }
    *data_out = data;
    *bytes_out = used;
    return CLI_OK;
}

static int report_put(const struct cli *cli, int32_t status, size_t bytes)
{
    const char *word = status == KVF_OK ? (cli->is_durable ? "durable" : "stored") : "exists";

    if (status != KVF_OK && status != KVF_EXISTS) {
        return cli_fail_status(cli, "put", status);
    }
    if (cli->is_json) {
        cli_print_json(json_pack("{s:s, s:I}", "status", word, "payload_bytes", (json_int_t)bytes));
    } else {
        printf("%s: %zu bytes\n", word, bytes);
    }
    return CLI_OK;
}

int cli_put(const struct cli *cli)
{
    struct kvf_put_item item = {.struct_bytes = sizeof(item), .source = KVF_SOURCE_BYTES};
    struct kvf_put_options options = {.struct_bytes = sizeof(options)};
    struct kvf_client *client = NULL;
    uint8_t *data = NULL;
    int32_t item_status = KVF_ERR_INTERNAL;
    int status;
    int code;

    if (cli->key.data == NULL) {
        return cli_fail(CLI_USAGE, "put: give --key or --key-text");
    }
    code = read_input(cli->file, &data, &item.data_bytes);
    if (code != CLI_OK) {
        return code;
    }
    code = cli_open(cli, cli->label, item.data_bytes + STAGING_EXTRA_BYTES, &client);
    if (code == CLI_OK) {
        item.key = cli->key;
        item.data = data;
        options.flags = (cli->is_durable ? KVF_PUT_DURABLE : 0u) |
                        (cli->is_no_write ? KVF_PUT_NO_WRITE : 0u);
        options.ttl_s = cli->ttl_s;
        options.budget_ms = cli->budget_ms;
        status = kvf_put(client, &item, 1, &options, &item_status);
        code = report_put(cli, status < 0 && item_status >= 0 ? status : item_status,
                          item.data_bytes);
    }
    kvf_close(client);
    free(data);
    return code;
}

/* --- get -------------------------------------------------------------------------------------- */

static int write_output(const char *file, const uint8_t *data, size_t bytes)
{
    bool is_stdout = file == NULL || strcmp(file, "-") == 0;
    int fd = is_stdout ? STDOUT_FILENO : open(file, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    size_t used = 0;
    int code = CLI_OK;

    while (fd >= 0 && used < bytes) {
        ssize_t put = write(fd, data + used, bytes - used);

        if (put < 0 && errno != EINTR) {
            break;
        }
        used += put > 0 ? (size_t)put : 0;
    }
    if (used < bytes) {
        code = cli_fail(CLI_FAILED, "%s: %s", is_stdout ? "standard output" : file,
                        strerror(errno));
    }
    if (!is_stdout && fd >= 0 && close(fd) != 0 && code == CLI_OK) {
        code = cli_fail(CLI_FAILED, "%s: %s", file, strerror(errno));
    }
    return code;
}

/* Copy a hit out of the daemon's memory and give the lease back: only then are the bytes known to
 * be the block's. The checksum is compared too, so that what is written was checked end to end. */
static int take_hit(const struct cli *cli, struct kvf_client *client, const struct kvf_hit *hit,
                    uint8_t **data_out)
{
    struct kvf_record_page page;
    uint8_t *data = malloc(hit->payload_bytes != 0 ? hit->payload_bytes : 1);
    uint32_t crc = 0;
    int status;

    if (data != NULL) {
        memcpy(&page, hit->record, sizeof(page));
        crc = kvf_crc32c_copy(data, hit->payload, hit->payload_bytes, 0);
    }
    status = kvf_lease_release(client, hit->lease);
    if (data == NULL) {
        return cli_fail(CLI_FAILED, "out of memory");
    }
    if (status == KVF_OK && crc != page.header.payload_crc32c) {
        status = KVF_ERR_CORRUPT;
    }
    if (status != KVF_OK) {
        free(data);
        return cli_fail_status(cli, "get", status);
    }
    *data_out = data;
    return CLI_OK;
}

static const char *tier_name(uint8_t tier)
{
    switch (tier) {
    case KVF_TIER_DRAM:
        return "dram";
    case KVF_TIER_NVME:
        return "nvme";
    case KVF_TIER_REMOTE:
        return "remote";
    case KVF_TIER_HBM:
        return "hbm";
    default:
        return "none";
    }
}

/* The word "miss" is what scripts look for. */
static int report_miss(const struct cli *cli, int status)
{
    const char *word = status == KVF_TOO_SLOW ? "miss: too slow" : "miss";

    if (cli->is_json) {
        char *text = json_dumps(json_pack("{s:s}", "status", word), JSON_COMPACT);

        fprintf(stderr, "%s\n", text != NULL ? text : word);
        free(text);
    } else {
        fprintf(stderr, "%s\n", word);
    }
    return CLI_FAILED;
}

int cli_get(const struct cli *cli)
{
    struct kvf_get_options options = {.struct_bytes = sizeof(options), .budget_ms = cli->budget_ms};
    struct kvf_client *client;
    struct kvf_hit hit = {0};
    uint8_t *data = NULL;
    int status;
    int code;

    if (cli->key.data == NULL) {
        return cli_fail(CLI_USAGE, "get: give --key or --key-text");
    }
    code = cli_open(cli, cli->label, 0, &client);
    if (code != CLI_OK) {
        return code;
    }
    status = kvf_get(client, &cli->key, 1, &options, &hit);
    if (status < 0 || hit.status < 0) {
        code = cli_fail_status(cli, "get", status < 0 ? status : hit.status);
    } else if (hit.status != KVF_OK) {
        code = report_miss(cli, hit.status);
    } else {
        code = take_hit(cli, client, &hit, &data);
    }
    kvf_close(client);
    if (code == CLI_OK) {
        code = write_output(cli->file, data, hit.payload_bytes);
    }
    if (code == CLI_OK && cli->file != NULL && strcmp(cli->file, "-") != 0) {
        if (cli->is_json) {
            cli_print_json(json_pack("{s:s, s:I, s:s}", "status", "hit", "payload_bytes",
                                     (json_int_t)hit.payload_bytes, "tier", tier_name(hit.tier)));
        } else {
            printf("hit: %" PRIu64 " bytes from %s\n", hit.payload_bytes, tier_name(hit.tier));
        }
    }
    free(data);
    return code;
}

/* --- evict ------------------------------------------------------------------------------------ */

int cli_evict_key(const struct cli *cli)
{
    struct kvf_client *client;
    uint32_t evicted = 0;
    int status;
    int code = cli_open(cli, cli->label, 0, &client);

    if (code != CLI_OK) {
        return code;
    }
    status = kvf_evict(client, &cli->key, 1, &evicted);
    kvf_close(client);
    if (status < 0) {
        return cli_fail_status(cli, "evict", status);
    }
    if (evicted == 0) {
        return report_miss(cli, KVF_MISS);
    }
    if (cli->is_json) {
        cli_print_json(json_pack("{s:s, s:i}", "status", "ok", "evicted", (int)evicted));
    } else {
        printf("evicted\n");
    }
    return CLI_OK;
}
