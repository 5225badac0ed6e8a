/* SPDX-License-Identifier: Apache-2.0
 *
 * cli_http.c: HTTP over the daemon's admin socket, by libcurl.
 */
#include <curl/curl.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/cli.h"

/* Longer than the daemon takes for a question, and for one that waits for drives. */
#define TIMEOUT_S      10
#define TIMEOUT_SLOW_S 40

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

/* Write why and return code. */
__attribute__((format(printf, 3, 4))) static int failed(char why[CLI_WHY_BYTES], enum cli_exit code,
                                                        const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    vsnprintf(why, CLI_WHY_BYTES, fmt, args);
    va_end(args);
    return code;
}

static int transfer_failed(const struct cli *cli, CURL *curl, CURLcode code,
                           char why[CLI_WHY_BYTES])
{
    long error_number = 0;

    curl_easy_getinfo(curl, CURLINFO_OS_ERRNO, &error_number);
    if (code == CURLE_COULDNT_CONNECT && error_number == EACCES) {
        return failed(why, CLI_FAILED, "admin socket %s: no permission; run as the daemon's user",
                      cli->admin_socket);
    }
    if (code == CURLE_COULDNT_CONNECT) {
        return failed(why, CLI_NO_DAEMON,
                      "no daemon listens at the admin socket %s; start kvferryd, or give "
                      "--socket or --admin-socket",
                      cli->admin_socket);
    }
    if (code == CURLE_OPERATION_TIMEDOUT) {
        return failed(why, CLI_FAILED,
                      "admin socket %s: the daemon does not answer: its loop hangs or gets no CPU; "
                      "kvferry doctor and the daemon's log say more",
                      cli->admin_socket);
    }
    return failed(why, CLI_FAILED, "admin socket %s: %s", cli->admin_socket,
                  curl_easy_strerror(code));
}

int cli_http_try(const struct cli *cli, const char *method, const char *path, json_t **json_out,
                 char why[CLI_WHY_BYTES])
{
    struct answer answer = {0};
    CURL *curl = curl_easy_init();
    char url[512];
    long http_status = 0;
    json_t *json;
    CURLcode code;
    int result;

    if (curl == NULL) {
        return failed(why, CLI_FAILED, "libcurl does not start");
    }
    if (cli->admin_socket[0] == '\0') {
        curl_easy_cleanup(curl);
        return failed(why, CLI_USAGE,
                      "this asks the daemon's admin socket, which is on its own node: run it there "
                      "(%s is for put, get, evict --key, ping and bench)",
                      cli->socket);
    }
    snprintf(url, sizeof(url), "http://kvferryd%s", path);
    curl_easy_setopt(curl, CURLOPT_URL, url);
    curl_easy_setopt(curl, CURLOPT_UNIX_SOCKET_PATH, cli->admin_socket);
    curl_easy_setopt(curl, CURLOPT_NOPROXY, "*");
    curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(curl, CURLOPT_TIMEOUT,
                     (long)(strcmp(method, "GET") == 0 ? TIMEOUT_S : TIMEOUT_SLOW_S));
    curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, on_data);
    curl_easy_setopt(curl, CURLOPT_WRITEDATA, &answer);
    if (strcmp(method, "POST") == 0) {
        curl_easy_setopt(curl, CURLOPT_POSTFIELDS, "");
    }
    code = curl_easy_perform(curl);
    if (code != CURLE_OK) {
        result = transfer_failed(cli, curl, code, why);
        goto out;
    }
    curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &http_status);
    json = json_loads(answer.text != NULL ? answer.text : "", 0, NULL);
    if (json == NULL) {
        result = failed(why, CLI_FAILED, "%s: the answer is no JSON (HTTP %ld)", path, http_status);
    } else if (http_status != 200) { /* {"status": ..., "text": ...} */
        const char *text = cli_string(json, "text");

        result = failed(why, CLI_FAILED, "%s: %s (HTTP %ld)", path,
                        text[0] != '\0' ? text : "no reason given", http_status);
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

int cli_http(const struct cli *cli, const char *method, const char *path, json_t **json_out)
{
    char why[CLI_WHY_BYTES];
    int code = cli_http_try(cli, method, path, json_out, why);

    return code == CLI_OK ? CLI_OK : cli_fail((enum cli_exit)code, "%s", why);
}

uint64_t cli_number(const json_t *object, const char *name)
{
    json_int_t value = json_integer_value(json_object_get(object, name));

    return value < 0 ? 0 : (uint64_t)value;
}

const char *cli_string(const json_t *object, const char *name)
{
    const char *text = json_string_value(json_object_get(object, name));

    return text != NULL ? text : "";
}

bool cli_flag(const json_t *object, const char *name)
{
    return json_is_true(json_object_get(object, name));
}
