/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_wire.c: what TCP itself gives where blocks go from the memory of one process into that of
 * another: sockets, and nothing else.
 *
 *   bench_wire --bytes N [--memory BYTES] [--only cached|memory]
 *
 * Two processes, one connection through loopback, pieces of 256 KiB with a head each. `memory`:
 * each piece is sent from another place of a memory of --memory bytes, received into a buffer, and
 * copied from there into another place of such a memory while it is summed. `cached`: one piece is
 * sent again and again, and nobody copies or sums it, as with ucx_perftest. Prints "NAME GB/s" for
 * each.
 */
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/crc32c.h"
#include "tests/bench/bench.h"
#include "transport/net_wire.h"

#define PIECE_BYTES  ((size_t)KVF_NET_PIECE_BYTES)
#define HEAD_BYTES   sizeof(struct kvf_net_head)
#define RECORD_BYTES ((size_t)1 << 20) /* of which a piece is a part */

struct wire {
    struct sockaddr_in address;
    size_t memory_bytes; /* PIECE_BYTES: cached */
    uint64_t n_pieces;
    int buffer_bytes; /* of the sockets, as a daemon sets them */
};

static int new_socket(const struct wire *wire)
{
    int one = 1;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (fd < 0 || setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)) != 0) {
        bench_die("socket: %s", strerror(errno));
    }
    /* the kernel makes it less where it has to */
    (void)setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &wire->buffer_bytes, sizeof(wire->buffer_bytes));
    (void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &wire->buffer_bytes, sizeof(wire->buffer_bytes));
    return fd;
}

static void send_piece(int fd, void *head, unsigned char *piece)
{
    struct iovec parts[2] = {{head, HEAD_BYTES}, {piece, PIECE_BYTES}};
    struct iovec *part = parts;

    while (part < parts + 2) {
        ssize_t sent = writev(fd, part, (int)(parts + 2 - part));

        if (sent < 0) {
            bench_die("send: %s", strerror(errno));
        }
        while (part < parts + 2 && (size_t)sent >= part->iov_len) {
            sent -= (ssize_t)part->iov_len;
            part++;
        }
        if (part < parts + 2) {
            part->iov_base = (char *)part->iov_base + sent;
            part->iov_len -= (size_t)sent;
        }
    }
}

static void send_all(const struct wire *wire)
{
    unsigned char *memory = bench_memory(wire->memory_bytes, 1);
    struct kvf_net_head head = {.magic = KVF_NET_MAGIC};
    int fd = new_socket(wire);

    if (connect(fd, (const struct sockaddr *)&wire->address, sizeof(wire->address)) != 0) {
        bench_die("connect: %s", strerror(errno));
    }
    for (uint64_t i = 0; i < wire->n_pieces; i++) {
        send_piece(fd, &head, memory + i * PIECE_BYTES % wire->memory_bytes);
    }
    (void)close(fd);
    bench_memory_free(memory, wire->memory_bytes);
}

static void receive(int fd, void *to, size_t bytes)
{
    size_t come = 0;

    while (come < bytes) {
        ssize_t n = recv(fd, (char *)to + come, bytes - come, 0);

        if (n <= 0) {
            bench_die("receive: %s", n == 0 ? "the sender has ended" : strerror(errno));
        }
        come += (size_t)n;
    }
}

static double receive_all(const struct wire *wire, int listener)
{
    unsigned char *memory = bench_memory(wire->memory_bytes, 2);
    unsigned char *buffer = bench_memory(HEAD_BYTES + PIECE_BYTES, 3);
    int fd = accept(listener, NULL, NULL);
    uint64_t begin_ns = kvf_now_ns();
    uint32_t crc = 0;
    double rate;

    if (fd < 0) {
        bench_die("accept: %s", strerror(errno));
    }
    for (uint64_t i = 0; i < wire->n_pieces; i++) {
        receive(fd, buffer, HEAD_BYTES + PIECE_BYTES);
        if (wire->memory_bytes > PIECE_BYTES) {
            crc = kvf_crc32c_copy_part(memory + i * PIECE_BYTES % wire->memory_bytes,
                                       buffer + HEAD_BYTES, PIECE_BYTES, RECORD_BYTES, crc);
        }
    }
    bench_keep(&crc);
    rate = bench_gb_s(wire->n_pieces * PIECE_BYTES, kvf_now_ns() - begin_ns);
    (void)close(fd);
    bench_memory_free(memory, wire->memory_bytes);
    bench_memory_free(buffer, HEAD_BYTES + PIECE_BYTES);
    return rate;
}

static double measure(struct wire *wire)
{
    int listener = new_socket(wire);
    socklen_t bytes = sizeof(wire->address);
    double rate;
    pid_t sender;
    int status;

    wire->address = (struct sockaddr_in){.sin_family = AF_INET,
                                         .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (bind(listener, (const struct sockaddr *)&wire->address, bytes) != 0 ||
        getsockname(listener, (struct sockaddr *)&wire->address, &bytes) != 0 ||
        listen(listener, 1) != 0) {
        bench_die("listen: %s", strerror(errno));
    }
    sender = fork();
    if (sender < 0) {
        bench_die("fork: %s", strerror(errno));
    }
    if (sender == 0) {
        send_all(wire);
        _exit(0);
    }
    rate = receive_all(wire, listener);
    if (waitpid(sender, &status, 0) != sender || status != 0) {
        bench_die("the sender has failed");
    }
    (void)close(listener);
    return rate;
}

int main(int argc, char **argv)
{
    struct wire wire = {.buffer_bytes = 2 << 20};
    struct bench_run run;
    size_t memory_bytes;

    bench_init(&run, argc, argv);
    wire.n_pieces = bench_number(&run, "--bytes", (uint64_t)1 << 30) / PIECE_BYTES + 1;
    memory_bytes = bench_number(&run, "--memory", (uint64_t)256 << 20) / PIECE_BYTES * PIECE_BYTES;
    if (memory_bytes <= PIECE_BYTES) {
        bench_die("--memory is more than %zu bytes", PIECE_BYTES);
    }
    if (run.only == NULL || strcmp(run.only, "memory") == 0) {
        wire.memory_bytes = memory_bytes;
        printf("memory %.6f\n", measure(&wire));
    }
    if (run.only == NULL || strcmp(run.only, "cached") == 0) {
        wire.memory_bytes = PIECE_BYTES;
        printf("cached %.6f\n", measure(&wire));
    }
    return 0;
}
