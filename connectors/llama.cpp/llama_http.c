/* SPDX-License-Identifier: Apache-2.0
 *
 * llama_http.c: see llama_http.h.
 */
#include "connectors/llama.cpp/llama_http.h"

#include <errno.h>
#include <jansson.h>
#include <microhttpd.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "connectors/llama.cpp/llama_say.h"

enum {
    BODY_BYTES_MAX = 16 << 20,
    CONNECTIONS_MAX = 512,
    IDLE_S = 120,
    END_S = 30,
    N_PREDICT = 16, /* where a request names no number */
    BUDGET_MS_MAX = 600000,
};

struct kvf_llama_http {
    struct kvf_llama_engine *engine;
    uint32_t budget_ms;
    int listen_fd;
    struct MHD_Daemon *mhd;
    pthread_mutex_t lock;
    pthread_cond_t none; /* no exchange is left */
    uint32_t n_exchanges;
};

/* A request's body, as it comes. */
struct exchange {
    char *body;
    size_t bytes;
    size_t room;
    bool is_too_large;
};

/* --- answers ---------------------------------------------------------------------------------- */

static enum MHD_Result reply(struct MHD_Connection *connection, unsigned http_status, json_t *body)
{
    char *text = body != NULL ? json_dumps(body, JSON_COMPACT | JSON_REAL_PRECISION(9)) : NULL;
    struct MHD_Response *response = NULL;
    enum MHD_Result result = MHD_NO; /* no memory: the connection is closed */

    json_decref(body);
    if (text != NULL) {
        response = MHD_create_response_from_buffer(strlen(text), text, MHD_RESPMEM_MUST_FREE);
    }
    if (response == NULL) {
        free(text);
        return result;
    }
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, "application/json");
    result = MHD_queue_response(connection, http_status, response);
    MHD_destroy_response(response);
    return result;
}

static enum MHD_Result reply_error(struct MHD_Connection *connection, unsigned http_status,
                                   const char *text)
{
    return reply(connection, http_status, json_pack("{s:s}", "error", text));
}

static unsigned http_status_of(int status)
{
    switch (status) {
    case KVF_ERR_INVALID:
        return MHD_HTTP_BAD_REQUEST;
    case KVF_ERR_BUSY:
    case KVF_ERR_CANCELED:
        return MHD_HTTP_SERVICE_UNAVAILABLE;
    default:
        return MHD_HTTP_INTERNAL_SERVER_ERROR;
    }
}

/* Bytes of the character that begins here; 0: none does. */
static size_t character_bytes(const unsigned char *at, size_t left)
{
    size_t n = at[0] < 0x80 ? 1 : at[0] >= 0xf0 ? 4 : at[0] >= 0xe0 ? 3 : at[0] >= 0xc2 ? 2 : 0;
    char copy[5] = "";
    json_t *probe;

    if (n <= 1 || n > left) {
        return n <= left ? n : 0;
    }
    memcpy(copy, at, n);
    probe = json_stringn(copy, n); /* refuses what is not UTF-8 */
    json_decref(probe);
    return probe != NULL ? n : 0;
}

/* Text that may end within a character, as a JSON string: what is no character becomes '?'. */
static json_t *text_of(char *text, size_t bytes)
{
    size_t i = 0;

    while (i < bytes) {
        size_t n = character_bytes((unsigned char *)text + i, bytes - i);

        if (n == 0) {
            text[i] = '?';
            n = 1;
        }
        i += n;
    }
    return json_stringn(text, bytes);
}

static json_t *answer_of(const struct kvf_llama_http *http, const struct kvf_llama_request *request,
                         const struct kvf_llama_answer *answer, bool wants_logprobs)
{
    size_t bytes;
    char *text = kvf_llama_engine_text(http->engine, answer->tokens, answer->n_tokens, &bytes);
    json_t *tokens = json_array();
    json_t *logprobs = wants_logprobs ? json_array() : NULL;
    json_t *body;

    for (uint32_t i = 0; i < answer->n_tokens; i++) {
        json_array_append_new(tokens, json_integer(answer->tokens[i]));
        if (logprobs != NULL) {
            json_array_append_new(logprobs, json_real((double)answer->logprobs[i]));
        }
    }
    body = json_pack(
        "{s:o, s:o*, s:s, s:i, s:i, s:i, s:s, s:s, s:f, s:f}", "tokens", tokens, "text",
        text != NULL ? text_of(text, bytes) : NULL, "stop", answer->is_ended ? "end" : "limit",
        "prompt_tokens", (int)request->n_prompt, "hit_tokens", (int)answer->hit_tokens,
        "local_tokens", (int)answer->local_tokens, "tier", answer->tier, "profile", answer->profile,
        "first_token_ms", answer->first_token_s * 1e3, "total_ms", answer->total_s * 1e3);
    if (logprobs != NULL && body != NULL) {
        json_object_set(body, "logprobs", logprobs);
    }
    json_decref(logprobs);
    free(text);
    return body;
}

/* --- requests --------------------------------------------------------------------------------- */

/* What a body asks for. */
struct wish {
    struct kvf_llama_request request;
    int32_t *prompt;
    bool logprobs;
    char why[KVF_LLAMA_WHY_BYTES];
};

static bool wish_fault(struct wish *wish, const char *text)
{
    snprintf(wish->why, sizeof(wish->why), "%s", text);
    return false;
}

/* A whole number in [0, most]. */
static bool number_of(struct wish *wish, const char *name, const json_t *value, uint32_t most,
                      uint32_t *out)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0 ||
        json_integer_value(value) > (json_int_t)most) {
        snprintf(wish->why, sizeof(wish->why), "%s: a whole number from 0 to %u is wanted", name,
                 most);
        return false;
    }
    *out = (uint32_t)json_integer_value(value);
    return true;
}

static bool flag_of(struct wish *wish, const char *name, const json_t *value, bool *out)
{
    if (!json_is_boolean(value)) {
        snprintf(wish->why, sizeof(wish->why), "%s: true or false is wanted", name);
        return false;
    }
    *out = json_is_true(value);
    return true;
}

static bool prompt_of(struct wish *wish, const struct kvf_llama_http *http, const json_t *value)
{
    size_t n = json_array_size(value);

    if (json_is_string(value)) {
        return kvf_llama_engine_tokens(http->engine, json_string_value(value),
                                       json_string_length(value), &wish->prompt,
                                       &wish->request.n_prompt) == KVF_OK ||
               wish_fault(wish, "prompt: the text cannot be made tokens");
    }
    if (!json_is_array(value) || n > KVF_LLAMA_TOKENS_MAX) {
        return wish_fault(wish, "prompt: a text or a list of tokens is wanted");
    }
    wish->prompt = calloc(n + 1, sizeof(*wish->prompt));
    if (wish->prompt == NULL) {
        return wish_fault(wish, "no memory");
    }
    for (size_t i = 0; i < n; i++) {
        uint32_t token;

        if (!number_of(wish, "prompt", json_array_get(value, i), INT32_MAX, &token)) {
            return false;
        }
        wish->prompt[i] = (int32_t)token;
    }
    wish->request.n_prompt = (uint32_t)n;
    return true;
}

static bool member_of(struct wish *wish, const struct kvf_llama_http *http, const char *name,
                      const json_t *value)
{
    struct kvf_llama_request *request = &wish->request;

    if (strcmp(name, "prompt") == 0) {
        return wish->prompt == NULL && prompt_of(wish, http, value);
    }
    if (strcmp(name, "n_predict") == 0) {
        return number_of(wish, name, value, KVF_LLAMA_TOKENS_MAX, &request->n_predict);
    }
    if (strcmp(name, "budget_ms") == 0) {
        return number_of(wish, name, value, BUDGET_MS_MAX, &request->budget_ms);
    }
    if (strcmp(name, "logprobs") == 0) {
        return flag_of(wish, name, value, &wish->logprobs);
    }
    if (strcmp(name, "load") == 0) {
        return flag_of(wish, name, value, &request->load);
    }
    if (strcmp(name, "store") == 0) {
        return flag_of(wish, name, value, &request->store);
    }
    if (strcmp(name, "temperature") == 0) {
        return (json_is_number(value) && json_number_value(value) == 0) ||
               wish_fault(wish, "temperature: only 0, the token of the largest logit");
    }
    snprintf(wish->why, sizeof(wish->why),
             "%.40s: not known; prompt, n_predict, logprobs, temperature, load, store and "
             "budget_ms are",
             name);
    return false;
}

static bool wish_read(struct wish *wish, const struct kvf_llama_http *http, const char *body,
                      size_t bytes)
{
    json_error_t error;
    json_t *root = json_loadb(body != NULL ? body : "", bytes, JSON_REJECT_DUPLICATES, &error);
    const char *name;
    json_t *value;
    bool good = true;

    if (!json_is_object(root)) {
        snprintf(wish->why, sizeof(wish->why), "the body is no JSON object%s%s",
                 root == NULL ? ": " : "", root == NULL ? error.text : "");
        json_decref(root);
        return false;
    }
    json_object_foreach(root, name, value)
    {
        good = good && member_of(wish, http, name, value);
    }
    if (good && wish->prompt == NULL) {
        good = wish_fault(wish, "prompt is missing: a text or a list of tokens");
    }
    json_decref(root);
    return good;
}

static enum MHD_Result complete(const struct kvf_llama_http *http,
                                struct MHD_Connection *connection, const struct exchange *exchange)
{
    struct wish wish = {
        .request = {
            .n_predict = N_PREDICT, .load = true, .store = true, .budget_ms = http->budget_ms}};
    struct kvf_llama_answer answer;
    enum MHD_Result result;
    int status;

    if (exchange->is_too_large) {
        return reply_error(connection, MHD_HTTP_CONTENT_TOO_LARGE, "a body has at most 16 MiB");
    }
    if (!wish_read(&wish, http, exchange->body, exchange->bytes)) {
        free(wish.prompt);
        return reply_error(connection, MHD_HTTP_BAD_REQUEST, wish.why);
    }
    wish.request.prompt = wish.prompt;
    status = kvf_llama_engine_submit(http->engine, &wish.request, &answer, wish.why);
    if (status != KVF_OK) {
        result = reply_error(connection, http_status_of(status), wish.why);
    } else {
        result = reply(connection, MHD_HTTP_OK,
                       answer_of(http, &wish.request, &answer, wish.logprobs));
        kvf_llama_answer_free(&answer);
    }
    free(wish.prompt);
    return result;
}

/* {"text": "..."} to {"tokens": [...]}, as a prompt of that text would be. */
static enum MHD_Result tokenize(const struct kvf_llama_http *http,
                                struct MHD_Connection *connection, const struct exchange *exchange)
{
    json_t *root = json_loadb(exchange->body != NULL ? exchange->body : "", exchange->bytes, 0,
                              NULL);
    const json_t *text = json_object_get(root, "text");
    json_t *tokens = json_array();
    int32_t *numbers = NULL;
    uint32_t n = 0;
    int status = KVF_ERR_INVALID;

    if (!exchange->is_too_large && json_is_string(text)) {
        status = kvf_llama_engine_tokens(http->engine, json_string_value(text),
                                         json_string_length(text), &numbers, &n);
    }
    json_decref(root);
    for (uint32_t i = 0; i < n; i++) {
        json_array_append_new(tokens, json_integer(numbers[i]));
    }
    free(numbers);
    if (status != KVF_OK) {
        json_decref(tokens);
        return reply_error(connection, http_status_of(status), "text: a text is wanted");
    }
    return reply(connection, MHD_HTTP_OK, json_pack("{s:o}", "tokens", tokens));
}

static enum MHD_Result health(const struct kvf_llama_http *http, struct MHD_Connection *connection)
{
    struct kvf_llama_engine_facts facts;

    kvf_llama_engine_facts(http->engine, &facts);
    return reply(
        connection, MHD_HTTP_OK,
        json_pack("{s:s, s:s, s:i, s:i, s:i, s:i, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "status",
                  "ok", "model", facts.model, "vocab", (int)facts.n_vocab, "context_tokens",
                  (int)facts.context_tokens, "chunk_tokens", (int)facts.chunk_tokens, "waiting",
                  (int)facts.waiting, "requests", (json_int_t)facts.requests, "prompt_tokens",
                  (json_int_t)facts.prompt_tokens, "hit_tokens", (json_int_t)facts.hit_tokens,
                  "local_tokens", (json_int_t)facts.local_tokens, "stored_chunks",
                  (json_int_t)facts.stored_chunks, "present_chunks",
                  (json_int_t)facts.present_chunks, "refused_chunks",
                  (json_int_t)facts.refused_chunks));
}

/* --- libmicrohttpd ---------------------------------------------------------------------------- */

static struct exchange *exchange_begin(struct kvf_llama_http *http)
{
    struct exchange *exchange = calloc(1, sizeof(*exchange));

    if (exchange != NULL) {
        pthread_mutex_lock(&http->lock);
        http->n_exchanges++;
        pthread_mutex_unlock(&http->lock);
    }
    return exchange;
}

static bool exchange_add(struct exchange *exchange, const char *data, size_t bytes)
{
    if (exchange->bytes + bytes > BODY_BYTES_MAX) {
        exchange->is_too_large = true;
        return true;
    }
    if (exchange->bytes + bytes > exchange->room) {
        size_t room = 2 * (exchange->bytes + bytes);
        char *grown = realloc(exchange->body, room);

        if (grown == NULL) {
            return false;
        }
        exchange->body = grown;
        exchange->room = room;
    }
    memcpy(exchange->body + exchange->bytes, data, bytes);
    exchange->bytes += bytes;
    return true;
}

static enum MHD_Result route(const struct kvf_llama_http *http, struct MHD_Connection *connection,
                             const char *method, const char *url, const struct exchange *exchange)
{
    bool is_health = strcmp(url, "/health") == 0;
    bool is_tokenize = strcmp(url, "/tokenize") == 0;

    if (!is_health && !is_tokenize && strcmp(url, "/completion") != 0) {
        return reply_error(connection, MHD_HTTP_NOT_FOUND,
                           "no such path: POST /completion, POST /tokenize and GET /health are "
                           "served");
    }
    if (strcmp(method, is_health ? MHD_HTTP_METHOD_GET : MHD_HTTP_METHOD_POST) != 0) {
        return reply_error(connection, MHD_HTTP_METHOD_NOT_ALLOWED,
                           is_health ? "this path takes GET" : "this path takes POST");
    }
    if (is_health) {
        return health(http, connection);
    }
    return is_tokenize ? tokenize(http, connection, exchange)
                       : complete(http, connection, exchange);
}

/* Called for the head, for each piece of the body, and once more at the end: only then a reply. */
static enum MHD_Result on_request(void *ctx, struct MHD_Connection *connection, const char *url,
                                  const char *method, const char *version, const char *data,
                                  size_t *bytes_inout, void **exchange_inout)
{
    struct exchange *exchange = *exchange_inout;

    (void)version;
    if (exchange == NULL) {
        *exchange_inout = exchange_begin(ctx);
        return *exchange_inout != NULL ? MHD_YES : MHD_NO;
    }
    if (*bytes_inout != 0) {
        size_t bytes = *bytes_inout;

        *bytes_inout = 0;
        return exchange_add(exchange, data, bytes) ? MHD_YES : MHD_NO;
    }
    return route(ctx, connection, method, url, exchange);
}

static void on_completed(void *ctx, struct MHD_Connection *connection, void **exchange_inout,
                         enum MHD_RequestTerminationCode code)
{
    struct kvf_llama_http *http = ctx;
    struct exchange *exchange = *exchange_inout;

    (void)connection;
    (void)code;
    if (exchange == NULL) {
        return;
    }
    free(exchange->body);
    free(exchange);
    *exchange_inout = NULL;
    pthread_mutex_lock(&http->lock);
    if (--http->n_exchanges == 0) {
        pthread_cond_broadcast(&http->none);
    }
    pthread_mutex_unlock(&http->lock);
}

static int listen_on(const struct sockaddr_in *address, int *fd_out, uint16_t *port_out)
{
    const int on = 1;
    struct sockaddr_in taken;
    socklen_t bytes = sizeof(taken);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (fd < 0) {
        return KVF_ERR_IO;
    }
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(fd, (const struct sockaddr *)address, sizeof(*address)) != 0 ||
        listen(fd, SOMAXCONN) != 0 || getsockname(fd, (struct sockaddr *)&taken, &bytes) != 0) {
        int saved = errno;

        close(fd);
        errno = saved;
        return KVF_ERR_IO;
    }
    *fd_out = fd;
    *port_out = ntohs(taken.sin_port);
    return KVF_OK;
}

int kvf_llama_http_start(struct kvf_llama_engine *engine, const struct sockaddr_in *address,
                         uint32_t budget_ms, struct kvf_llama_http **http_out, uint16_t *port_out)
{
    struct kvf_llama_http *http = calloc(1, sizeof(*http));
    int status;

    if (http == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    http->engine = engine;
    http->budget_ms = budget_ms;
    http->listen_fd = -1;
    pthread_mutex_init(&http->lock, NULL);
    pthread_cond_init(&http->none, NULL);
    status = listen_on(address, &http->listen_fd, port_out);
    if (status != KVF_OK) {
        goto fail;
    }
    http->mhd = MHD_start_daemon(
        MHD_USE_THREAD_PER_CONNECTION | MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_POLL, 0, NULL,
        NULL, on_request, http, MHD_OPTION_LISTEN_SOCKET, http->listen_fd,
        MHD_OPTION_CONNECTION_LIMIT, (unsigned)CONNECTIONS_MAX, MHD_OPTION_CONNECTION_TIMEOUT,
        (unsigned)IDLE_S, MHD_OPTION_NOTIFY_COMPLETED, on_completed, http, MHD_OPTION_END);
    if (http->mhd == NULL) {
        status = KVF_ERR_NO_MEMORY;
        goto fail;
    }
    *http_out = http;
    return KVF_OK;
fail:
    kvf_llama_http_stop(http);
    return status;
}

void kvf_llama_http_stop(struct kvf_llama_http *http)
{
    struct timespec end;

    if (http == NULL) {
        return;
    }
    if (http->mhd != NULL) {
        /* the socket is its own unless it gives it back */
        http->listen_fd = MHD_quiesce_daemon(http->mhd);
        clock_gettime(CLOCK_REALTIME, &end);
        end.tv_sec += END_S;
        pthread_mutex_lock(&http->lock);
        while (http->n_exchanges > 0 &&
               pthread_cond_timedwait(&http->none, &http->lock, &end) == 0) {
        }
        pthread_mutex_unlock(&http->lock);
        MHD_stop_daemon(http->mhd);
    }
    if (http->listen_fd >= 0) {
        close(http->listen_fd);
    }
    pthread_cond_destroy(&http->none);
    pthread_mutex_destroy(&http->lock);
    free(http);
}
