/* SPDX-License-Identifier: Apache-2.0
 *
 * trace_file.c: JSON lines into tables. Every line is judged; the first that is wrong ends it.
 */
#include "client/trace_file.h"

#include <errno.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

#define TIMESTAMP_MS_MAX 1e15   /* of which a double has every millisecond */
#define LENGTH_MS_MAX    3.2e12 /* a hundred years */

struct reader {
    const char *path;
    uint64_t line;
    struct kvf_trace *trace;
    uint64_t requests_room, blocks_room;
    double first_ms, last_ms;
    bool is_told; /* block_tokens was given */
    char *why;
};

static int refuse(struct reader *reader, int status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

static int refuse(struct reader *reader, int status, const char *fmt, ...)
{
    int n = snprintf(reader->why, KVF_TRACE_WHY_BYTES, "%.200s:%llu: ", reader->path,
                     (unsigned long long)reader->line);
    va_list args;

    va_start(args, fmt);
    (void)vsnprintf(reader->why + n, KVF_TRACE_WHY_BYTES - (size_t)n, fmt, args);
    va_end(args);
    return status;
}

/* Room for n more of what is `bytes` large each. False: out of memory. */
static bool grow(void **table, uint64_t count, uint64_t n, uint64_t bytes, uint64_t *room)
{
    uint64_t wanted = *room == 0 ? 1024 : *room;
    void *larger;

    while (wanted < count + n) {
        wanted *= 2;
    }
    if (wanted == *room) {
        return true;
    }
    larger = realloc(*table, wanted * bytes);
    if (larger == NULL) {
        return false;
    }
    *table = larger;
    *room = wanted;
    return true;
}

/* The line before all others, if there is one. *is_header_out: it was. */
static int take_header(struct reader *reader, const json_t *json, bool *is_header_out)
{
    const char *format = json_string_value(json_object_get(json, "format"));
    json_int_t version = json_integer_value(json_object_get(json, "version"));
    json_int_t tokens = json_integer_value(json_object_get(json, "block_tokens"));

    *is_header_out = format != NULL;
    if (format == NULL) {
        return KVF_OK;
    }
    if (strcmp(format, KVF_TRACE_FORMAT) != 0 || version != KVF_TRACE_VERSION) {
        return refuse(reader, KVF_ERR_INVALID,
                      "format '%s' version %lld: this release reads %s version %d", format,
                      (long long)version, KVF_TRACE_FORMAT, KVF_TRACE_VERSION);
    }
    if (tokens < 1 || tokens > KVF_TRACE_TOKENS_MAX) {
        return refuse(reader, KVF_ERR_INVALID, "block_tokens is no number from 1 to %d",
                      KVF_TRACE_TOKENS_MAX);
    }
    if (!reader->is_told) {
        reader->trace->block_tokens = (uint32_t)tokens;
    }
    return KVF_OK;
}

static int take_tokens(struct reader *reader, const json_t *json, const char *name, bool is_needed,
                       uint32_t *tokens_out)
{
    const json_t *value = json_object_get(json, name);

    *tokens_out = 0;
    if (value == NULL && !is_needed) {
        return KVF_OK;
    }
    if (!json_is_integer(value) || json_integer_value(value) < (is_needed ? 1 : 0) ||
        json_integer_value(value) > KVF_TRACE_TOKENS_MAX) {
        return refuse(reader, KVF_ERR_INVALID, "%s is missing or no whole number from %d to %d",
                      name, is_needed, KVF_TRACE_TOKENS_MAX);
    }
    *tokens_out = (uint32_t)json_integer_value(value);
    return KVF_OK;
}

static int take_time(struct reader *reader, const json_t *json, struct kvf_trace_request *request)
{
    const json_t *value = json_object_get(json, "timestamp");
    double ms = json_number_value(value);

    if (!json_is_number(value) || !(ms >= 0) || ms > TIMESTAMP_MS_MAX) {
        return refuse(reader, KVF_ERR_INVALID, "timestamp is missing or no number of milliseconds");
    }
    if (reader->trace->n_requests == 0) {
        reader->first_ms = ms;
    } else if (ms < reader->last_ms) {
        return refuse(reader, KVF_ERR_INVALID,
                      "timestamp goes back from %.15g to %.15g: sort the "
                      "lines by it",
                      reader->last_ms, ms);
    }
    if (ms - reader->first_ms > LENGTH_MS_MAX) {
        return refuse(reader, KVF_ERR_INVALID,
                      "timestamp is more than a hundred years behind the first one: are these "
                      "milliseconds?");
    }
    reader->last_ms = ms;
    request->at_ns = (uint64_t)((ms - reader->first_ms) * (double)KVF_NS_PER_MS);
    return KVF_OK;
}

static int take_blocks(struct reader *reader, const json_t *json, struct kvf_trace_request *request)
{
    struct kvf_trace *trace = reader->trace;
    const json_t *ids = json_object_get(json, "hash_ids");
    uint64_t expected = ((uint64_t)request->input_tokens + trace->block_tokens - 1) /
                        trace->block_tokens;

    if (!json_is_array(ids)) {
        return refuse(reader, KVF_ERR_INVALID, "hash_ids is missing or no list");
    }
    if (json_array_size(ids) != expected) {
        return refuse(reader, KVF_ERR_INVALID,
                      "%zu hash_ids for %u tokens, where blocks of %u tokens are %llu: say by "
                      "--block-tokens how many a block has",
                      json_array_size(ids), request->input_tokens, trace->block_tokens,
                      (unsigned long long)expected);
    }
    if (!grow((void **)&trace->blocks, trace->n_blocks, expected, sizeof(*trace->blocks),
              &reader->blocks_room)) {
        return refuse(reader, KVF_ERR_NO_MEMORY, "out of memory: cut the trace here");
    }
    request->first = trace->n_blocks;
    request->n_blocks = (uint32_t)expected;
    for (size_t i = 0; i < expected; i++) {
        const json_t *id = json_array_get(ids, i);

        if (!json_is_integer(id) || json_integer_value(id) < 0) {
            return refuse(reader, KVF_ERR_INVALID, "hash_ids[%zu] is no whole number from 0 on", i);
        }
        trace->blocks[trace->n_blocks++] = (uint64_t)json_integer_value(id);
    }
    return KVF_OK;
}

static int take_request(struct reader *reader, const json_t *json)
{
    struct kvf_trace *trace = reader->trace;
    struct kvf_trace_request request;
    int status = take_time(reader, json, &request);

    if (status == KVF_OK) {
        status = take_tokens(reader, json, "input_length", true, &request.input_tokens);
    }
    if (status == KVF_OK) {
        status = take_tokens(reader, json, "output_length", false, &request.output_tokens);
    }
    if (status == KVF_OK) {
        status = take_blocks(reader, json, &request);
    }
    if (status != KVF_OK) {
        return status;
    }
    if (trace->n_requests == KVF_TRACE_REQUESTS_MAX ||
        !grow((void **)&trace->requests, trace->n_requests, 1, sizeof(*trace->requests),
              &reader->requests_room)) {
        return refuse(reader, KVF_ERR_NO_MEMORY, "too many requests: cut the trace here");
    }
    trace->requests[trace->n_requests++] = request;
    trace->input_tokens += request.input_tokens;
    trace->span_ns = request.at_ns;
    return KVF_OK;
}

static int take_line(struct reader *reader, const char *text, size_t bytes)
{
    json_error_t error;
    json_t *json;
    bool is_header = false;
    int status = KVF_OK;

    if (bytes > KVF_TRACE_LINE_BYTES) {
        return refuse(reader, KVF_ERR_INVALID, "a line of %zu bytes is longer than %d", bytes,
                      KVF_TRACE_LINE_BYTES);
    }
    if (strspn(text, " \t\r\n") == bytes) {
        return KVF_OK;
    }
    json = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    if (json == NULL) {
        return refuse(reader, KVF_ERR_INVALID,
                      "%.120s; a trace has one JSON object a line (unpack a .gz before)",
                      error.text);
    }
    if (!json_is_object(json)) {
        status = refuse(reader, KVF_ERR_INVALID, "no JSON object: a trace has one a line");
    }
    if (status == KVF_OK && reader->trace->n_requests == 0) {
        status = take_header(reader, json, &is_header);
    }
    if (status == KVF_OK && !is_header) {
        status = take_request(reader, json);
    }
    json_decref(json);
    return status;
}

int kvf_trace_read(const char *path, uint32_t block_tokens, struct kvf_trace *trace_out,
                   char why_out[KVF_TRACE_WHY_BYTES])
{
    bool is_stdin = strcmp(path, "-") == 0;
    struct reader reader = {
        .path = path, .trace = trace_out, .is_told = block_tokens != 0, .why = why_out};
    FILE *file = is_stdin ? stdin : fopen(path, "re");
    char *text = NULL;
    size_t room = 0;
    ssize_t bytes;
    int status = KVF_OK;

    *trace_out = (struct kvf_trace){.block_tokens = block_tokens != 0 ? block_tokens
                                                                      : KVF_TRACE_BLOCK_TOKENS};
    if (file == NULL) {
        (void)snprintf(why_out, KVF_TRACE_WHY_BYTES, "%.300s: %s", path, strerror(errno));
        return KVF_ERR_IO;
    }
    while (status == KVF_OK && (bytes = getline(&text, &room, file)) >= 0) {
        reader.line++;
        status = take_line(&reader, text, (size_t)bytes);
    }
    if (status == KVF_OK && ferror(file)) {
        (void)snprintf(why_out, KVF_TRACE_WHY_BYTES, "%.300s: cannot be read", path);
        status = KVF_ERR_IO;
    } else if (status == KVF_OK && trace_out->n_requests == 0) {
        (void)snprintf(why_out, KVF_TRACE_WHY_BYTES, "%.300s: no request in it", path);
        status = KVF_ERR_INVALID;
    }
    free(text);
    if (!is_stdin) {
        (void)fclose(file);
    }
    return status;
}

void kvf_trace_free(struct kvf_trace *trace)
{
    free(trace->requests);
    free(trace->blocks);
    *trace = (struct kvf_trace){0};
}
