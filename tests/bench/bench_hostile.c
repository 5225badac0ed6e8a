/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_hostile.c: what an honest client feels of a neighbour that breaks the protocol, beside one
 * that keeps it and takes the same CPU.
 *
 *   bench_hostile --socket PATH [--seconds N] [--pairs N]
 *
 * The honest client puts and gets blocks of 64 KiB in turn, each at its time, and compares every
 * byte. A request is timed from when it was due: one that waits for those before it, because the
 * daemon stood still, is late as well. One that fails, that is answered after its deadline or that
 * has a wrong byte ends the measurement.
 */
#include "tests/bench/bench.h"
#include "tests/bench/hostile_load.h"

#include "base/clock.h"
#include "base/random.h"
#include "kvferry.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define BLOCK_BYTES (64u << 10)
#define N_SOURCES   32
#define N_RECENT    100 /* puts back, at most, that a get asks for: they fit in memory */
#define PERIOD_NS   (400 * KVF_NS_PER_US)
#define BUDGET_MS   2000
#define SAMPLES_MAX (1u << 20)
#define SIDE_S_MIN  0.3 /* below that a busy machine may not let the neighbour run at all */

struct honest {
    struct kvf_client *client;
    uint8_t *sources; /* block i has the bytes of source i modulo N_SOURCES, and its number */
    uint8_t *block;
    uint64_t n_put;
    uint64_t due_ns; /* of the next request */
    uint64_t *samples_ns;
    uint64_t n_samples;
    struct kvf_random_seeded random;
    struct hostile_control *control;
    clockid_t neighbour_clock; /* its CPU time */
};

/* What one side of a pair comes to. */
struct side {
    double p50_us, p99_us;
    double cpu; /* of the neighbour, in CPUs */
};

static void fill(struct honest *honest, uint64_t number)
{
    memcpy(honest->block, honest->sources + number % N_SOURCES * BLOCK_BYTES, BLOCK_BYTES);
    memcpy(honest->block, &number, sizeof(number));
}

static struct kvf_key key_of(uint64_t number, uint64_t words[4])
{
    words[0] = number;
    words[1] = words[2] = words[3] = 7;
    return (struct kvf_key){words, 4 * sizeof(words[0])};
}

/* Wait for the next request's time. */
static uint64_t wait_due(struct honest *honest)
{
    uint64_t due_ns = honest->due_ns;
    struct timespec due = {.tv_sec = (time_t)(due_ns / KVF_NS_PER_S),
                           .tv_nsec = (long)(due_ns % KVF_NS_PER_S)};

    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL) == EINTR) {
    }
    honest->due_ns += PERIOD_NS;
    return due_ns;
}

static void note(struct honest *honest, uint64_t due_ns, uint64_t begin_ns)
{
    uint64_t end_ns = kvf_now_ns();

    if (end_ns - begin_ns > BUDGET_MS * KVF_NS_PER_MS) {
        bench_die("an honest request was answered after its deadline");
    }
    if (honest->n_samples < SAMPLES_MAX) {
        honest->samples_ns[honest->n_samples++] = end_ns - due_ns;
    }
}

static void put_one(struct honest *honest)
{
    struct kvf_put_options options = {.struct_bytes = sizeof(options), .budget_ms = BUDGET_MS};
    struct kvf_put_item item = {.struct_bytes = sizeof(item), .source = KVF_SOURCE_BYTES};
    uint64_t words[4];
    uint64_t due_ns, begin_ns;
    int status;

    fill(honest, honest->n_put);
    item.key = key_of(honest->n_put, words);
    item.data = honest->block;
    item.data_bytes = BLOCK_BYTES;
    due_ns = wait_due(honest);
    begin_ns = kvf_now_ns();
    status = kvf_put(honest->client, &item, 1, &options, NULL);
    note(honest, due_ns, begin_ns);
    if (status != KVF_OK) {
        bench_die("an honest put fails: %s", kvf_status_text(status));
    }
    honest->n_put++;
}

static void get_one(struct honest *honest)
{
    struct kvf_get_options options = {.struct_bytes = sizeof(options), .budget_ms = BUDGET_MS};
    uint64_t back = 1 + kvf_random_seeded_next(&honest->random) % N_RECENT;
    uint64_t number = back > honest->n_put ? 0 : honest->n_put - back;
    struct kvf_hit hit;
    uint64_t words[4];
    struct kvf_key key = key_of(number, words);
    uint64_t due_ns = wait_due(honest);
    uint64_t begin_ns = kvf_now_ns();
    int status = kvf_get(honest->client, &key, 1, &options, &hit);

    note(honest, due_ns, begin_ns);
    if (status != KVF_OK) {
        bench_die("an honest get fails: %s", kvf_status_text(status));
    }
    fill(honest, number);
    if (hit.payload_bytes != BLOCK_BYTES || memcmp(hit.payload, honest->block, BLOCK_BYTES) != 0) {
        bench_die("an honest get has wrong bytes");
    }
    if (kvf_lease_release(honest->client, hit.lease) != KVF_OK) {
        bench_die("a lease was lost");
    }
}

static uint64_t neighbour_cpu_ns(const struct honest *honest)
{
    struct timespec cpu;

    if (clock_gettime(honest->neighbour_clock, &cpu) != 0) {
        bench_die("the neighbour is gone");
    }
    return (uint64_t)cpu.tv_sec * KVF_NS_PER_S + (uint64_t)cpu.tv_nsec;
}

static struct side measure(struct honest *honest, enum hostile_mode mode, double seconds)
{
    struct side side;
    uint64_t begin_ns, begin_cpu_ns;

    seconds = seconds < SIDE_S_MIN ? SIDE_S_MIN : seconds;
    hostile_load_set(honest->control, mode);
    honest->n_samples = 0;
    begin_ns = kvf_now_ns();
    honest->due_ns = begin_ns;
    begin_cpu_ns = neighbour_cpu_ns(honest);
    while ((double)(kvf_now_ns() - begin_ns) < seconds * 1e9) {
        put_one(honest);
        get_one(honest);
    }
    side.cpu = (double)(neighbour_cpu_ns(honest) - begin_cpu_ns) /
               (double)(kvf_now_ns() - begin_ns);
    hostile_load_set(honest->control, HOSTILE_IDLE);
    side.p50_us = (double)bench_median(honest->samples_ns, honest->n_samples) / 1e3;
    /* sorted by that */
    side.p99_us = (double)honest->samples_ns[honest->n_samples * 99 / 100] / 1e3;
    return side;
}

static void measure_pairs(struct honest *honest, const struct bench_run *run)
{
    for (uint32_t i = 0; i < run->n_pairs; i++) {
        struct side bad, good;

        if (i % 2 == 0) {
            bad = measure(honest, HOSTILE_BAD, run->seconds);
        }
        good = measure(honest, HOSTILE_GOOD, run->seconds);
        if (i % 2 != 0) {
            bad = measure(honest, HOSTILE_BAD, run->seconds);
        }
        bench_print_pair("hostile_p99_vs_honest", bad.p99_us, good.p99_us);
        bench_print_pair("hostile_p50_vs_honest", bad.p50_us, good.p50_us);
        bench_print_pair("hostile_cpu_vs_honest", bad.cpu, good.cpu);
    }
}

static void attach(struct honest *honest, const char *socket_path)
{
    struct kvf_options options;
    int status;

    kvf_options_init(&options);
    options.socket_path = socket_path;
    options.client_name = "honest";
    options.namespace_label = "honest";
    options.staging_bytes = 4 << 20;
    options.flags = KVF_ATTACH_NO_RECONNECT;
    status = kvf_open(&options, &honest->client);
    if (status != KVF_OK) {
        bench_die("cannot attach to %s: %s", socket_path, kvf_status_text(status));
    }
}

int main(int argc, char **argv)
{
    struct bench_run run;
    struct honest honest = {0};
    const char *socket_path;

    bench_init(&run, argc, argv);
    socket_path = bench_text(&run, "--socket");
    if (socket_path == NULL) {
        bench_die("--socket is missing");
    }
    honest.control = mmap(NULL, sizeof(*honest.control), PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (honest.control == MAP_FAILED) {
        bench_die("no shared memory: %s", strerror(errno));
    }
    /* before there is a handle to inherit */
    if (clock_getcpuclockid(hostile_load_start(socket_path, honest.control),
                            &honest.neighbour_clock) != 0) {
        bench_die("no CPU clock of the neighbour");
    }
    honest.sources = bench_memory((size_t)N_SOURCES * BLOCK_BYTES, 1);
    honest.block = bench_memory(BLOCK_BYTES, 0);
    honest.samples_ns = bench_memory(SAMPLES_MAX * sizeof(*honest.samples_ns), 0);
    kvf_random_seeded_init(&honest.random, 2);
    attach(&honest, socket_path);
    honest.due_ns = kvf_now_ns();
    for (uint32_t i = 0; i < N_RECENT; i++) {
        put_one(&honest);
    }
    measure_pairs(&honest, &run);
    kvf_close(honest.client);
    return 0;
}
