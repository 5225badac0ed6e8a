/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_remote.c: how fast one daemon gets blocks of another. Both run already.
 *
 *   bench_remote --from SOCKET --from-pid PID --to SOCKET --to-pid PID --block BYTES --blocks N
 *
 * For each line on standard input: put N blocks on the first one, wait until the second one hears
 * of them, get them all there, many at a time, and print "BYTES SECONDS CPU CPU" of the gets: the
 * seconds of CPU are those of the first daemon and of the second one. First and last word of each
 * block are looked at; what is between has been summed by the daemon.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "kvferry.h"
#include "tests/bench/bench.h"

#define BATCH   64
#define WAIT_MS 60000

struct remote {
    struct kvf_client *from, *to;
    clockid_t from_clock, to_clock; /* CPU of the daemons */
    uint64_t block_bytes;
    uint64_t n_blocks;
    uint64_t *payload;
    uint64_t (*names)[4]; /* n_blocks keys of 32 bytes */
    struct kvf_key *keys;
    uint64_t round;
};

static struct kvf_client *open_client(const char *path)
{
    struct kvf_options options;
    struct kvf_client *client;
    int status;

    kvf_options_init(&options);
    options.socket_path = path;
    options.client_name = "bench_remote";
    status = kvf_open(&options, &client);
    if (status != KVF_OK) {
        bench_die("%s: %s", path, kvf_status_text(status));
    }
    return client;
}

static clockid_t clock_of(const struct bench_run *run, const char *option)
{
    pid_t pid = (pid_t)bench_number(run, option, 0);
    clockid_t clock;

    if (pid == 0 || clock_getcpuclockid(pid, &clock) != 0) {
        bench_die("%s: no process %d", option, (int)pid);
    }
    return clock;
}

static double clock_s(clockid_t clock)
{
    struct timespec time;

    if (clock_gettime(clock, &time) != 0) {
        bench_die("a daemon has ended");
    }
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void put_once(struct remote *remote)
{
    remote->round++;
    for (uint64_t i = 0; i < remote->n_blocks; i++) {
        struct kvf_put_item item = {.struct_bytes = sizeof(item), .source = KVF_SOURCE_BYTES};
        int status;

        remote->names[i][0] = remote->round;
        remote->names[i][1] = i;
        remote->keys[i] = (struct kvf_key){.data = remote->names[i], .bytes = 32};
        remote->payload[0] = remote->round * remote->n_blocks + i;
        remote->payload[remote->block_bytes / 8 - 1] = remote->payload[0];
        item.key = remote->keys[i];
        item.data = remote->payload;
        item.data_bytes = remote->block_bytes;
        status = kvf_put(remote->from, &item, 1, NULL, NULL);
        if (status != KVF_OK) {
            bench_die("put: %s", kvf_status_text(status));
        }
    }
}

/* Until the first daemon has all of them: an arena that is still being made ready is small. */
static void put_all(struct remote *remote)
{
    struct kvf_lookup_options options = {.struct_bytes = sizeof(options)};
    struct kvf_lookup_result result = {0};
    uint64_t end_ns = kvf_now_ns() + WAIT_MS * KVF_NS_PER_MS;

    put_once(remote);
    while (kvf_lookup(remote->from, remote->keys, (uint32_t)remote->n_blocks, &options, &result) !=
               KVF_OK ||
           result.run_chunks < remote->n_blocks) {
        if (kvf_now_ns() > end_ns) {
            bench_die("the first daemon does not keep %u blocks; give it a larger arena",
                      (unsigned)remote->n_blocks);
        }
        (void)kvf_evict(remote->from, remote->keys, (uint32_t)remote->n_blocks, NULL);
        put_once(remote);
    }
}

/* Until the second daemon has been told of all of them. */
static void wait_known(struct remote *remote)
{
    const struct timespec pause = {.tv_nsec = KVF_NS_PER_MS};
    struct kvf_lookup_options options = {.struct_bytes = sizeof(options)};
    struct kvf_lookup_result result = {0};
    uint64_t end_ns = kvf_now_ns() + WAIT_MS * KVF_NS_PER_MS;
    int status;

    while ((status = kvf_lookup(remote->to, remote->keys, (uint32_t)remote->n_blocks, &options,
                                &result)) != KVF_OK ||
           result.run_chunks < remote->n_blocks) {
        if (kvf_now_ns() > end_ns) {
            bench_die("the second daemon knows the first %u of %u blocks of the first one: %s",
                      (unsigned)result.run_chunks, (unsigned)remote->n_blocks,
                      kvf_status_text(status));
        }
        nanosleep(&pause, NULL);
    }
}

static double get_all(struct remote *remote)
{
    struct kvf_get_options options = {.struct_bytes = sizeof(options), .budget_ms = WAIT_MS};
    static struct kvf_hit hits[BATCH];
    uint64_t begin_ns = kvf_now_ns();

    for (uint64_t at = 0; at < remote->n_blocks; at += BATCH) {
        uint64_t n = remote->n_blocks - at < BATCH ? remote->n_blocks - at : BATCH;

        (void)kvf_get(remote->to, remote->keys + at, (uint32_t)n, &options, hits);
        for (uint64_t i = 0; i < n; i++) {
            const uint64_t *words = hits[i].payload;

            if (hits[i].status != KVF_OK || hits[i].tier != KVF_TIER_REMOTE) {
                bench_die("a get: %s from tier %u", kvf_status_text(hits[i].status), hits[i].tier);
            }
            if (words[0] != remote->round * remote->n_blocks + at + i ||
                words[remote->block_bytes / 8 - 1] != words[0] ||
                kvf_lease_release(remote->to, hits[i].lease) != KVF_OK) {
                bench_die("a block has other bytes");
            }
        }
    }
    return (double)(kvf_now_ns() - begin_ns) / 1e9;
}

int main(int argc, char **argv)
{
    struct bench_run run;
    struct remote remote = {0};
    char line[16];

    bench_init(&run, argc, argv);
    if (bench_text(&run, "--from") == NULL || bench_text(&run, "--to") == NULL) {
        bench_die("give --from, --from-pid, --to and --to-pid");
    }
    remote.from = open_client(bench_text(&run, "--from"));
    remote.to = open_client(bench_text(&run, "--to"));
    remote.from_clock = clock_of(&run, "--from-pid");
    remote.to_clock = clock_of(&run, "--to-pid");
    remote.block_bytes = bench_number(&run, "--block", 1 << 20) & ~UINT64_C(7);
    remote.n_blocks = bench_number(&run, "--blocks", 64);
    if (remote.block_bytes < 8 || remote.n_blocks < 1 || remote.n_blocks > 1024) {
        bench_die("--block is 8 bytes or more, --blocks 1 to 1024");
    }
    remote.payload = bench_memory(remote.block_bytes, 1);
    remote.names = calloc(remote.n_blocks, sizeof(*remote.names));
    remote.keys = calloc(remote.n_blocks, sizeof(*remote.keys));
    if (remote.names == NULL || remote.keys == NULL) {
        bench_die("no memory");
    }
    while (fgets(line, sizeof(line), stdin) != NULL) {
        double seconds, from_s, to_s;

        put_all(&remote);
        wait_known(&remote);
        from_s = clock_s(remote.from_clock);
        to_s = clock_s(remote.to_clock);
        seconds = get_all(&remote);
        from_s = clock_s(remote.from_clock) - from_s;
        to_s = clock_s(remote.to_clock) - to_s;
        (void)kvf_evict(remote.from, remote.keys, (uint32_t)remote.n_blocks, NULL);
        (void)kvf_evict(remote.to, remote.keys, (uint32_t)remote.n_blocks, NULL);
        printf("%" PRIu64 " %.9f %.9f %.9f\n", remote.n_blocks * remote.block_bytes, seconds,
               from_s, to_s);
        fflush(stdout);
    }
    kvf_close(remote.from);
    kvf_close(remote.to);
    return 0;
}
