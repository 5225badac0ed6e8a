/* SPDX-License-Identifier: Apache-2.0
 *
 * local.h: the parts of bench_local, which measures one client beside one daemon of this machine.
 *
 * Block i is block i of the source, 1 MiB of random words; it is stored under key i. The working
 * set is all of them, several times as large as the last-level cache.
 */
#ifndef KVF_TESTS_BENCH_LOCAL_H
#define KVF_TESTS_BENCH_LOCAL_H

#include "kvferry.h"
#include "tests/bench/bench.h"

#include <stdbool.h>
#include <sys/types.h>
#include <time.h>

#define LOCAL_BLOCK_BYTES (1u << 20)
#define LOCAL_DEPTH       8 /* requests in flight where more than one is */

struct local {
    struct bench_run run;
    const char *socket_path;
    pid_t daemon_pid;
    clockid_t daemon_clock; /* its CPU time */
    const char *redis_path; /* NULL: no server */

    struct kvf_client *client; /* sleeps while it waits */
    uint64_t n_blocks;
    uint8_t *source; /* n_blocks, private memory */
    uint8_t *target; /* as large; where memcpy copies to */
    uint64_t *sums;  /* bench_sum of each block */
    uint32_t *order;
    uint64_t order_serial; /* orders so far in this measurement */
    uint64_t next_key;     /* a key that was never used */
};

struct local_key {
    uint64_t words[4];
};

/* The key of a number. */
struct kvf_key local_key(uint64_t number, struct local_key *key_out);

/* A handle for opaque bytes. staging_bytes 0: the daemon's default. */
struct kvf_client *local_open(const struct local *local, uint32_t flags, uint64_t staging_bytes);

/* The next order of the working set; after local_order_restart the same ones come again, so that
 * both sides of a pair go the same way. */
void local_order_restart(struct local *local);
void local_order_next(struct local *local);

/* Sum a block and compare; ends the process if the bytes are wrong. */
void local_check(const struct local *local, uint64_t block, const void *data);

/* Keep ourselves and the daemon on a CPU each, or let both go everywhere. False: there is only one
 * CPU. */
bool local_place(const struct local *local, bool apart);

/* local_latency.c: get_p50_spin_vs_ring, get_p50_vs_wake. */
void local_latency(struct local *local);

/* local_redis.c: redis_get. ours: get and read at the same depth, in GB/s. */
void local_redis(struct local *local, double (*ours)(void *ctx, double seconds));

/* local_put.c: puts beside memcpy. */
void local_puts(struct local *local);

/* Requests, LOCAL_DEPTH of them in flight, until `seconds` are over (at least one round of the
 * working set). */
struct local_pipe {
    struct kvf_client *client;
    /* Queue the request for a block. A status of submit. */
    int (*submit)(struct local *local, uint64_t block, uint64_t *request_out);
    /* Its block has completed with KVF_OK. May be NULL. */
    void (*on_block)(struct local *local, const struct kvf_event *event);
    uint32_t blocks_a_request;
};

/* Blocks that went through, and how long it took. */
uint64_t local_pipe_run(struct local *local, const struct local_pipe *pipe, double seconds,
                        uint64_t *elapsed_ns_out);

#endif /* KVF_TESTS_BENCH_LOCAL_H */
