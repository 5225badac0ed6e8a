/* SPDX-License-Identifier: Apache-2.0
 *
 * cli_trace.c: kvferry trace record: prompts that clients of a running daemon look up, into a file
 * that kvferry replay reads. The daemon keeps them in a bounded buffer until they are asked for; it
 * ends the recording when nobody does for half a minute.
 */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "client/cli.h"
#include "client/trace_file.h"

#define POLL_MS            500
#define FILE_BYTES_DEFAULT (1ull << 30)

static volatile sig_atomic_t is_ended;

struct recording {
    const struct cli *cli;
    FILE *file;
    char namespace_id[17]; /* "": all */
    int64_t block_tokens;  /* of the first prompt; 0: none has come */
    double first_ms;
    uint64_t reader; /* which recording this is, for the daemon, that has one at a time */
    uint64_t bytes, bytes_max;
    uint64_t prompts, left_out, lost;
};

static void on_signal(int number)
{
    (void)number;
    is_ended = 1;
}

static int write_text(struct recording *recording, json_t *json)
{
    char *text = json != NULL ? json_dumps(json, JSON_COMPACT) : NULL;
    bool is_written = text != NULL && fprintf(recording->file, "%s\n", text) > 0;

    recording->bytes += text != NULL ? strlen(text) + 1 : 0;
    free(text);
    json_decref(json);
    return is_written
               ? CLI_OK
               : cli_fail(CLI_FAILED, "%s: %s", recording->cli->captures.items[1], strerror(errno));
}

static int write_prompt(struct recording *recording, const json_t *prompt)
{
    json_int_t tokens = json_integer_value(json_object_get(prompt, "block_tokens"));
    double ms = json_number_value(json_object_get(prompt, "timestamp"));
    json_t *ids = json_object_get(prompt, "hash_ids");
    int code = CLI_OK;

    if (recording->namespace_id[0] != '\0' &&
        strcmp(recording->namespace_id, cli_string(prompt, "namespace")) != 0) {
        return CLI_OK;
    }
    if (recording->block_tokens == 0) {
        recording->block_tokens = tokens;
        recording->first_ms = ms;
        code = write_text(recording,
                          json_pack("{s:s, s:i, s:I}", "format", KVF_TRACE_FORMAT, "version",
                                    KVF_TRACE_VERSION, "block_tokens", tokens));
    }
    if (tokens != recording->block_tokens) {
        recording->left_out++; /* a trace has blocks of one size */
        return code;
    }
    if (code == CLI_OK) {
        recording->prompts++;
        code = write_text(recording,
                          json_pack("{s:f, s:I, s:i, s:O}", "timestamp", ms - recording->first_ms,
                                    "input_length", (json_int_t)json_array_size(ids) * tokens,
                                    "output_length", 0, "hash_ids", ids));
    }
    return code;
}

/* What has come since the last time. */
static int take(struct recording *recording)
{
    json_t *answer = NULL;
    const json_t *prompt;
    char path[64];
    size_t i, n = 1;
    int code = CLI_OK;

    while (code == CLI_OK && n > 0 && recording->bytes < recording->bytes_max) {
        snprintf(path, sizeof(path), "/v1/trace?reader=%" PRIx64, recording->reader);
        code = cli_http(recording->cli, "GET", path, &answer);
        if (code != CLI_OK) {
            break;
        }
        n = json_array_size(json_object_get(answer, "prompts"));
        recording->lost = cli_number(answer, "lost");
        json_array_foreach(json_object_get(answer, "prompts"), i, prompt)
        {
            if (code == CLI_OK && recording->bytes < recording->bytes_max) {
                code = write_prompt(recording, prompt);
            }
        }
        json_decref(answer);
    }
    if (code == CLI_OK && fflush(recording->file) != 0) {
        code = cli_fail(CLI_FAILED, "%s: %s", recording->cli->captures.items[1], strerror(errno));
    }
    return code;
}

/* Others may record now. */
static void let_go(const struct recording *recording)
{
    char why[CLI_WHY_BYTES];
    json_t *answer = NULL;
    char path[64];

    snprintf(path, sizeof(path), "/v1/trace?reader=%" PRIx64 "&last=1", recording->reader);
    if (cli_http_try(recording->cli, "GET", path, &answer, why) == CLI_OK) {
        json_decref(answer);
    }
}

static int record(struct recording *recording)
{
    uint64_t end_ns = recording->cli->duration_s != 0
                          ? kvf_now_ns() + recording->cli->duration_s * KVF_NS_PER_S
                          : UINT64_MAX;
    struct sigaction action = {.sa_handler = on_signal};
    int code = take(recording);

    (void)sigaction(SIGINT, &action, NULL);
    (void)sigaction(SIGTERM, &action, NULL);
    if (code == CLI_OK) {
        fprintf(stderr, "kvferry: recording\n");
    }
    while (code == CLI_OK && !is_ended && kvf_now_ns() < end_ns &&
           recording->bytes < recording->bytes_max) {
        (void)poll(NULL, 0, POLL_MS);
        code = take(recording);
    }
    if (code != CLI_OK && recording->prompts == 0) {
        return code;
    }
    let_go(recording);
    fprintf(stderr, "kvferry: %" PRIu64 " prompts recorded\n", recording->prompts);
    if (recording->left_out + recording->lost != 0) {
        fprintf(stderr,
                "kvferry: left out: %" PRIu64 " with chunks of another size than %" PRId64
                " tokens, %" PRIu64 " that came too fast\n",
                recording->left_out, recording->block_tokens, recording->lost);
    }
    return code;
}

int cli_trace(const struct cli *cli)
{
    struct recording recording = {
        .cli = cli,
        .reader = kvf_now_ns() ^ (uint64_t)getpid() << 48,
        .bytes_max = cli->size_bytes != 0 ? cli->size_bytes : FILE_BYTES_DEFAULT,
    };
    json_t *stat = NULL;
    int code = CLI_OK;

    if (cli->captures.n == 0 || strcmp(cli->captures.items[0], "record") != 0 ||
        cli->captures.n != 2) {
        return cli_fail(CLI_USAGE, "trace: say record and a file, as in trace record trace.jsonl");
    }
    if (cli->namespace_name != NULL) {
        code = cli_find_namespace(cli, recording.namespace_id);
    }
    if (code != CLI_OK) {
        return code;
    }
    code = cli_http(cli, "GET", "/v1/stat", &stat); /* before a file is written over */
    json_decref(stat);
    if (code != CLI_OK) {
        return code;
    }
    recording.file = fopen(cli->captures.items[1], "we");
    if (recording.file == NULL) {
        return cli_fail(CLI_FAILED, "%s: %s", cli->captures.items[1], strerror(errno));
    }
    code = record(&recording);
    if (fclose(recording.file) != 0 && code == CLI_OK) {
        code = cli_fail(CLI_FAILED, "%s: %s", cli->captures.items[1], strerror(errno));
    }
    return code;
}
