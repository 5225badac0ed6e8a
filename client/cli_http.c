/* SPDX-License-Identifier: Apache-2.0
 *
 * cli_http.c: HTTP over the daemon's admin socket, by libcurl.
 */
#include <curl/curl.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/cli.h"

/* Longer than the daemon takes for its slowest question. */
#define TIMEOUT_S 40

/* An answer of the daemon is far below this. */
#define ANSWER_BYTES_MAX (64u << 20)

struct answer {
    char *text;
    size_t bytes;
};

static size_t on_data(char *data, size_t one, size_t bytes, void *ctx)
{
    struct answer *answer = ctx;
    char *larger;

    (void)one;
    if (bytes > ANSWER_BYTES_MAX - answer->bytes) {
        return 0;
    }
    larger = realloc(answer->text, answer->bytes + bytes + 1);
    if (larger == NULL) {
        return 0;
    }
    memcpy(larger + answer->bytes, data, bytes);
    answer->text = larger;
    answer->bytes += bytes;
    answer->text[answer->bytes] = '\0';
    return bytes;
}

static int fail_transfer(const struct cli *cli, CURL *curl, CURLcode code)
{
    long error_number = 0;

    curl_easy_getinfo(curl, CURLINFO_OS_ERRNO, &error_number);
    if (code == CURLE_COULDNT_CONNECT && error_number == EACCES) {
        return cli_fail(CLI_FAILED, "admin socket %s: no permission; run as the daemon's user",
                        cli->admin_socket);
    }
    if (code == CURLE_COULDNT_CONNECT) {
        return cli_fail(CLI_NO_DAEMON,
                        "no daemon listens at the admin socket %s; start kvferryd, or give "
                        "--socket or --admin-socket",
                        cli->admin_socket);
    }
    return cli_fail(CLI_FAILED, "admin socket %s: %s", cli->admin_socket, curl_easy_strerror(code));
}

/* A refusal carries {"status": ..., "text": ...}. */
static int fail_answer(const char *path, long http_status, const json_t *json)
{
    const char *text = json_string_value(json_object_get(json, "text"));

    return cli_fail(CLI_FAILED, "%s: %s (HTTP %ld)", path, text != NULL ? text : "no reason given",
                    http_status);
}

int cli_http(const struct cli *cli, const char *method, const char *path, json_t **json_out)
{
    struct answer answer = {0};
    CURL *curl = curl_easy_init();
    char url[512];
    long http_status = 0;
    json_t *json;
    CURLcode code;
    int result;

    if (curl == NULL) {
        return cli_fail(CLI_FAILED, "libcurl does not start");
    }
    snprintf(url, sizeof(url), "http://kvferryd%s", path);
    curl_easy_setopt(curl, CURLOPT_URL, url);
    curl_easy_setopt(curl, CURLOPT_UNIX_SOCKET_PATH, cli->admin_socket);
    curl_easy_setopt(curl, CURLOPT_NOPROXY, "*");
    curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(curl, CURLOPT_TIMEOUT, (long)TIMEOUT_S);
    curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, on_data);
    curl_easy_setopt(curl, CURLOPT_WRITEDATA, &answer);
    if (strcmp(method, "POST") == 0) {
        curl_easy_setopt(curl, CURLOPT_POSTFIELDS, "");
    }
    code = curl_easy_perform(curl);
    if (code != CURLE_OK) {
        result = fail_transfer(cli, curl, code);
        goto out;
    }
    curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &http_status);
    json = json_loads(answer.text != NULL ? answer.text : "", 0, NULL);
    if (json == NULL) {
        result = cli_fail(CLI_FAILED, "%s: the answer is no JSON (HTTP %ld)", path, http_status);
    } else if (http_status != 200) {
        result = fail_answer(path, http_status, json);
        json_decref(json);
    } else {
        *json_out = json;
        result = CLI_OK;
    }
out:
    free(answer.text);
    curl_easy_cleanup(curl);
    return result;
}
