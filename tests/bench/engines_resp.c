/* SPDX-License-Identifier: Apache-2.0
 *
 * engines_resp.c: a store that speaks RESP (Valkey, Redis), over a Unix socket.
 *
 * As fast a client as the protocol allows: a block is sent from where it lies, with the words
 * before it in one call, and received where it is to be; requests are sent ahead of the answers.
 */
#include "tests/bench/engines.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include "tests/bench/bench.h"

#define BUFFER_BYTES 4096
#define KEY_BYTES    sizeof(struct engines_key)
#define WORDS_BYTES  128

struct resp {
    int fd;
    uint8_t buffer[BUFFER_BYTES]; /* received and not used yet: begin..end */
    size_t begin, end;
};

static void resp_open(struct engines *engines)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct resp *resp = calloc(1, sizeof(*resp));

    if (resp == NULL || strlen(engines->socket_path) >= sizeof(address.sun_path)) {
        bench_die("%s: no memory, or too long a path", engines->socket_path);
    }
    memcpy(address.sun_path, engines->socket_path, strlen(engines->socket_path) + 1);
    resp->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (resp->fd < 0 || connect(resp->fd, (struct sockaddr *)&address, sizeof(address)) != 0) {
        bench_die("%s: %s", engines->socket_path, strerror(errno));
    }
    engines->store = resp;
}

static void send_all(const struct resp *resp, struct iovec *parts, int n)
{
    while (n > 0) {
        ssize_t sent = writev(resp->fd, parts, n);

        if (sent < 0) {
            bench_die("the store: %s", strerror(errno));
        }
        while (n > 0 && (size_t)sent >= parts->iov_len) {
            sent -= (ssize_t)parts->iov_len;
            parts++;
            n--;
        }
        if (n > 0) {
            parts->iov_base = (uint8_t *)parts->iov_base + sent;
            parts->iov_len -= (size_t)sent;
        }
    }
}

static void send_put(const struct engines *engines, uint64_t serial, uint32_t block)
{
    struct engines_key key = engines_key(engines, serial, block);
    char before[WORDS_BYTES];
    char between[WORDS_BYTES];
    int n_before = snprintf(before, sizeof(before), "*3\r\n$3\r\nSET\r\n$%zu\r\n", KEY_BYTES);
    int n_between = snprintf(between, sizeof(between), "\r\n$%" PRIu64 "\r\n",
                             engines->block_bytes);
    struct iovec parts[] = {{before, (size_t)n_before},
                            {&key, KEY_BYTES},
                            {between, (size_t)n_between},
                            {engines_source(engines, block), engines->block_bytes},
                            {"\r\n", 2}};

    send_all(engines->store, parts, 5);
}

/* A command of one key. */
static void send_short(const struct engines *engines, const char *command, uint64_t serial,
                       uint32_t block)
{
    struct engines_key key = engines_key(engines, serial, block);
    char before[WORDS_BYTES];
    int n = snprintf(before, sizeof(before), "*2\r\n$3\r\n%s\r\n$%zu\r\n", command, KEY_BYTES);
    struct iovec parts[] = {{before, (size_t)n}, {&key, KEY_BYTES}, {"\r\n", 2}};

    send_all(engines->store, parts, 3);
}

static size_t receive(const struct resp *resp, void *out, size_t bytes)
{
    ssize_t n = read(resp->fd, out, bytes);

    if (n <= 0) {
        bench_die("the store: %s", n == 0 ? "it has hung up" : strerror(errno));
    }
    return (size_t)n;
}

/* The next line, without its end. */
static void receive_line(struct resp *resp, char *line, size_t line_bytes)
{
    size_t n = 0;

    for (;;) {
        if (resp->begin == resp->end) {
            resp->begin = 0;
            resp->end = receive(resp, resp->buffer, sizeof(resp->buffer));
        }
        line[n] = (char)resp->buffer[resp->begin++];
        if (line[n] == '\n' && n > 0 && line[n - 1] == '\r') {
            line[n - 1] = '\0';
            return;
        }
        if (++n == line_bytes) {
            bench_die("the store: too long a line");
        }
    }
}

static void receive_bytes(struct resp *resp, uint8_t *out, size_t bytes)
{
    size_t n = resp->end - resp->begin < bytes ? resp->end - resp->begin : bytes;

    memcpy(out, resp->buffer + resp->begin, n);
    resp->begin += n;
    while (n < bytes) {
        n += receive(resp, out + n, bytes - n);
    }
}

static void take_word(struct engines *engines, char kind)
{
    char line[WORDS_BYTES];

    receive_line(engines->store, line, sizeof(line));
    if (line[0] != kind) {
        bench_die("the store: %s", line);
    }
}

static void take_block(struct engines *engines, uint32_t block)
{
    char line[WORDS_BYTES];
    uint64_t bytes;

    receive_line(engines->store, line, sizeof(line));
    if (sscanf(line, "$%" SCNu64, &bytes) != 1 || bytes != engines->block_bytes) {
        bench_die("the store: %s", line);
    }
    receive_bytes(engines->store, engines_target(engines, block), bytes);
    receive_line(engines->store, line, sizeof(line));
    engines_read(engines, block);
}

static void resp_put(struct engines *engines, uint64_t serial, const uint32_t *blocks, uint32_t n,
                     uint32_t depth)
{
    for (uint32_t i = 0; i < n + depth; i++) {
        if (i >= depth && i - depth < n) {
            take_word(engines, '+');
        }
        if (i < n) {
            send_put(engines, serial, blocks[i]);
        }
    }
}

static void resp_get(struct engines *engines, uint64_t serial, const uint32_t *blocks, uint32_t n,
                     uint32_t depth)
{
    for (uint32_t i = 0; i < n + depth; i++) {
        if (i >= depth && i - depth < n) {
            take_block(engines, blocks[i - depth]);
        }
        if (i < n) {
            send_short(engines, "GET", serial, blocks[i]);
        }
    }
}

static void resp_drop(struct engines *engines, uint64_t serial, const uint32_t *blocks, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        send_short(engines, "DEL", serial, blocks[i]);
        take_word(engines, ':');
    }
}

static void resp_close(struct engines *engines)
{
    struct resp *resp = engines->store;

    close(resp->fd);
    free(resp);
}

const struct engines_store engines_resp = {"resp",   resp_open, resp_put,
                                           resp_get, resp_drop, resp_close};
