/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_hostile.c: what an honest client feels of a neighbour that breaks the protocol, beside one
 * that keeps it and takes the same CPU.
 *
 *   bench_hostile --socket PATH --daemon-pid PID [--seconds N] [--pairs N]
 *
 * A pair is made of slices, both neighbours in turn, so that what else the machine does falls on
 * both; the slices of one are counted together. One pair before the first is not counted: the
 * daemon makes its memory meanwhile, and the well-behaved neighbour learns how much the hostile one
 * takes.
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
#define SIDES       2
#define SLICE_S     0.5
#define SLICE_S_MIN 0.3
#define WAIT_NS_MAX (60 * KVF_NS_PER_S) /* for the neighbour, on a busy machine */

/* The honest client beside one neighbour, over the slices of a pair. */
struct side {
    enum hostile_mode mode;
    uint64_t *samples_ns;
    uint64_t n_samples;
    uint64_t elapsed_ns;
    uint64_t neighbour_ns, daemon_ns; /* their CPU time */
    uint64_t n_attacks;
    double p50_us, p99_us;
    double neighbour_cpus, daemon_cpus, attacks; /* a second */
};

struct honest {
    struct kvf_client *client;
    uint8_t *sources; /* block i has the bytes of source i modulo N_SOURCES, and its number */
    uint8_t *block;
    uint64_t n_put;
    uint64_t due_ns;   /* of the next request */
    struct side *side; /* NULL: not measured */
    uint32_t n_rounds; /* of slices, so far */
    struct kvf_random_seeded random;
    struct hostile_control *control;
    pid_t neighbour_pids[HOSTILE_GONE];
    clockid_t neighbour_clocks[HOSTILE_GONE], daemon_clock; /* their CPU time */
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
    if (honest->side != NULL && honest->side->n_samples < SAMPLES_MAX) {
        honest->side->samples_ns[honest->side->n_samples++] = end_ns - due_ns;
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

static uint64_t cpu_ns(clockid_t clock)
{
    struct timespec cpu;

    if (clock_gettime(clock, &cpu) != 0) {
        bench_die("the neighbour or the daemon is gone");
    }
    return (uint64_t)cpu.tv_sec * KVF_NS_PER_S + (uint64_t)cpu.tv_nsec;
}

static void measure_slice(struct honest *honest, struct side *side, double seconds)
{
    uint64_t begin_ns, neighbour_ns, daemon_ns, n_attacks, elapsed_ns;
    clockid_t neighbour_clock = honest->neighbour_clocks[side->mode];

    hostile_load_set(honest->control, side->mode);
    honest->side = side;
    begin_ns = kvf_now_ns();
    honest->due_ns = begin_ns;
    neighbour_ns = cpu_ns(neighbour_clock);
    daemon_ns = cpu_ns(honest->daemon_clock);
    n_attacks = atomic_load(&honest->control->n_attacks);
    do {
        put_one(honest);
        get_one(honest);
        elapsed_ns = kvf_now_ns() - begin_ns;
        if (elapsed_ns > WAIT_NS_MAX) {
            bench_die("the neighbour does nothing");
        }
    } while ((double)elapsed_ns < seconds * 1e9 || cpu_ns(neighbour_clock) == neighbour_ns ||
             (side->mode == HOSTILE_BAD && atomic_load(&honest->control->n_attacks) == n_attacks));
    side->neighbour_ns += cpu_ns(neighbour_clock) - neighbour_ns;
    side->daemon_ns += cpu_ns(honest->daemon_clock) - daemon_ns;
    side->n_attacks += atomic_load(&honest->control->n_attacks) - n_attacks;
    side->elapsed_ns += elapsed_ns;
    honest->side = NULL;
    hostile_load_set(honest->control, HOSTILE_IDLE);
}

/* Every side for `seconds`. Forth and back: nobody is always the first. */
static void measure_sides(struct honest *honest, struct side sides[SIDES], double seconds)
{
    uint32_t n_slices = seconds > SLICE_S ? (uint32_t)(seconds / SLICE_S) : 1;
    double slice_s = seconds / n_slices > SLICE_S_MIN ? seconds / n_slices : SLICE_S_MIN;

    for (uint32_t k = 0; k < SIDES; k++) {
        sides[k].n_samples = sides[k].n_attacks = 0;
        sides[k].elapsed_ns = sides[k].neighbour_ns = sides[k].daemon_ns = 0;
    }
    for (uint32_t i = 0; i < n_slices; i++) {
        for (uint32_t k = 0; k < SIDES; k++) {
            uint32_t back = honest->n_rounds % 2;

            measure_slice(honest, &sides[back != 0 ? SIDES - 1 - k : k], slice_s);
        }
        honest->n_rounds++;
    }
    for (uint32_t k = 0; k < SIDES; k++) {
        struct side *side = &sides[k];

        side->p50_us = (double)bench_median(side->samples_ns, side->n_samples) / 1e3;
        /* sorted by that */
        side->p99_us = (double)side->samples_ns[side->n_samples * 99 / 100] / 1e3;
        side->neighbour_cpus = (double)side->neighbour_ns / (double)side->elapsed_ns;
        side->daemon_cpus = (double)side->daemon_ns / (double)side->elapsed_ns;
        side->attacks = (double)side->n_attacks / (double)side->elapsed_ns * 1e9;
    }
}

static void measure_pairs(struct honest *honest, const struct bench_run *run)
{
    struct side sides[SIDES] = {{.mode = HOSTILE_BAD}, {.mode = HOSTILE_GOOD}};
    const struct side *bad = &sides[0], *good = &sides[1];

    for (uint32_t k = 0; k < SIDES; k++) {
        sides[k].samples_ns = bench_memory(SAMPLES_MAX * sizeof(*sides[k].samples_ns), 0);
    }
    for (uint32_t i = 0; i <= run->n_pairs; i++) {
        measure_sides(honest, sides, run->seconds);
        if (i == 0) {
            continue;
        }
        bench_print_pair("hostile_p99_vs_honest", bad->p99_us, good->p99_us);
        bench_print_pair("hostile_p50_vs_honest", bad->p50_us, good->p50_us);
        bench_print_pair("hostile_cpu_vs_honest", bad->neighbour_cpus, good->neighbour_cpus);
        bench_print_pair("hostile_daemon_cpu_vs_honest", bad->daemon_cpus, good->daemon_cpus);
        bench_print_value("hostile_attacks", bad->attacks);
    }
    for (uint32_t k = 0; k < SIDES; k++) {
        bench_memory_free(sides[k].samples_ns, SAMPLES_MAX * sizeof(*sides[k].samples_ns));
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
    options.connect_timeout_ms = 60000; /* not part of what is measured */
    options.flags = KVF_ATTACH_NO_RECONNECT;
    status = kvf_open(&options, &honest->client);
    if (status != KVF_OK) {
        bench_die("cannot attach to %s: %s", socket_path, kvf_status_text(status));
    }
}

static void start_neighbours(struct honest *honest, const char *socket_path)
{
    honest->control = mmap(NULL, sizeof(*honest->control), PROT_READ | PROT_WRITE,
                           MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (honest->control == MAP_FAILED) {
        bench_die("no shared memory: %s", strerror(errno));
    }
    for (enum hostile_mode mode = HOSTILE_GOOD; mode <= HOSTILE_BAD; mode++) {
        honest->neighbour_pids[mode] = hostile_load_start(socket_path, honest->control, mode);
        if (clock_getcpuclockid(honest->neighbour_pids[mode], &honest->neighbour_clocks[mode]) !=
            0) {
            bench_die("no CPU clock of a neighbour");
        }
    }
}

int main(int argc, char **argv)
{
    struct bench_run run;
    struct honest honest = {0};
    const char *socket_path;
    pid_t daemon_pid;

    bench_init(&run, argc, argv);
    socket_path = bench_text(&run, "--socket");
    daemon_pid = (pid_t)bench_number(&run, "--daemon-pid", 0);
    if (socket_path == NULL || daemon_pid == 0) {
        bench_die("usage: bench_hostile --socket PATH --daemon-pid PID");
    }
    if (clock_getcpuclockid(daemon_pid, &honest.daemon_clock) != 0) {
        bench_die("no process %d", (int)daemon_pid);
    }
    start_neighbours(&honest, socket_path); /* before there is a handle to inherit */
    honest.sources = bench_memory((size_t)N_SOURCES * BLOCK_BYTES, 1);
    honest.block = bench_memory(BLOCK_BYTES, 0);
    kvf_random_seeded_init(&honest.random, 2);
    attach(&honest, socket_path);
    honest.due_ns = kvf_now_ns();
    for (uint32_t i = 0; i < N_RECENT; i++) {
        put_one(&honest);
    }
    measure_pairs(&honest, &run);
    hostile_load_end(honest.neighbour_pids[HOSTILE_GOOD], honest.control);
    hostile_load_end(honest.neighbour_pids[HOSTILE_BAD], honest.control);
    kvf_close(honest.client);
    return 0;
}
