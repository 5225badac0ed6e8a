/* SPDX-License-Identifier: Apache-2.0
 *
 * bench.c: what the measuring programs share.
 */
#include "tests/bench/bench.h"

#include "base/clock.h"
#include "base/parse.h"
#include "base/random.h"

#include <errno.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

static cpu_set_t allowed; /* when the program began */

void bench_die(const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    exit(1);
}

/* ----------------------------------------------------------------------------------------------
 * Options
 */
const char *bench_text(const struct bench_run *run, const char *option)
{
    for (int i = 1; i + 1 < run->argc; i++) {
        if (strcmp(run->argv[i], option) == 0) {
            return run->argv[i + 1];
        }
    }
    return NULL;
}

uint64_t bench_number(const struct bench_run *run, const char *option, uint64_t otherwise)
{
    const char *text = bench_text(run, option);
    char error[128];
    uint64_t value;

    if (text == NULL) {
        return otherwise;
    }
    if (kvf_parse_u64(text, &value, error, sizeof(error)) != KVF_OK) {
        bench_die("%s: %s", option, error);
    }
    return value;
}

void bench_init(struct bench_run *run, int argc, char **argv)
{
    const char *text;
    char *end;

    *run = (struct bench_run){.argc = argc, .argv = argv, .seconds = 1};
    run->n_pairs = (uint32_t)bench_number(run, "--pairs", 9);
    run->only = bench_text(run, "--only");
    text = bench_text(run, "--seconds");
    if (text != NULL) {
        run->seconds = strtod(text, &end);
        if (*end != '\0' || !(run->seconds > 0)) {
            bench_die("--seconds %s: not a number above 0", text);
        }
    }
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) {
        bench_die("sched_getaffinity: %s", strerror(errno));
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
}

/* ----------------------------------------------------------------------------------------------
 * Pairs
 */
static bool is_wanted(const struct bench_run *run, const char *name)
{
    return run->only == NULL || strcmp(run->only, name) == 0;
}

void bench_print_pair(const char *name, double ours, double limit)
{
    printf("pair %s %.9g %.9g\n", name, ours, limit);
}

void bench_print_value(const char *name, double value)
{
    printf("value %s %.9g\n", name, value);
}

void bench_print_skip(const char *name, const char *why)
{
    printf("skip %s %s\n", name, why);
}

void bench_pairs(struct bench_run *run, const char *name, double (*ours)(void *ctx, double seconds),
                 double (*limit)(void *ctx, double seconds), void *ctx)
{
    for (uint32_t i = 0; i < run->n_pairs && is_wanted(run, name); i++) {
        double our_figure = 0;
        double limit_figure;

        if (run->n_flipped % 2 == 0) {
            our_figure = ours(ctx, run->seconds);
        }
        limit_figure = limit(ctx, run->seconds);
        if (run->n_flipped % 2 != 0) {
            our_figure = ours(ctx, run->seconds);
        }
        run->n_flipped++;
        bench_print_pair(name, our_figure, limit_figure);
    }
}

void bench_values(const struct bench_run *run, const char *name,
                  double (*measure)(void *ctx, double seconds), void *ctx)
{
    for (uint32_t i = 0; i < run->n_pairs && is_wanted(run, name); i++) {
        bench_print_value(name, measure(ctx, run->seconds));
    }
}

/* ----------------------------------------------------------------------------------------------
 * Memory
 */
void *bench_memory(size_t bytes, uint64_t seed)
{
    struct kvf_random_seeded random;
    uint64_t *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

    if (memory == MAP_FAILED) {
        bench_die("no memory for %zu MiB: %s", bytes >> 20, strerror(errno));
    }
    if (seed != 0) {
        kvf_random_seeded_init(&random, seed);
        for (size_t i = 0; i < bytes / sizeof(*memory); i++) {
            memory[i] = kvf_random_seeded_next(&random);
        }
    }
    return memory;
}

void bench_memory_free(void *memory, size_t bytes)
{
    munmap(memory, bytes);
}

void bench_shuffle(uint32_t *order, uint64_t n, uint64_t seed)
{
    struct kvf_random_seeded random;

    kvf_random_seeded_init(&random, seed + 1);
    for (uint64_t i = 0; i < n; i++) {
        order[i] = (uint32_t)i;
    }
    for (uint64_t i = n; i > 1; i--) {
        uint64_t j = kvf_random_seeded_next(&random) % i;
        uint32_t other = order[j];

        order[j] = order[i - 1];
        order[i - 1] = other;
    }
}

/* One loop, compiled for several CPUs; many sums, so that no addition waits for the last one. */
#define SUM_BODY(name, attribute)                                                                  \
    attribute static uint64_t name(const uint64_t *words, size_t n)                                \
    {                                                                                              \
        uint64_t sums[32] = {0};                                                                   \
        uint64_t sum = 0;                                                                          \
        size_t i = 0;                                                                              \
                                                                                                   \
        for (; i + 32 <= n; i += 32) {                                                             \
            for (size_t k = 0; k < 32; k++) {                                                      \
                sums[k] += words[i + k];                                                           \
            }                                                                                      \
        }                                                                                          \
        for (; i < n; i++) {                                                                       \
            sum += words[i];                                                                       \
        }                                                                                          \
        for (size_t k = 0; k < 32; k++) {                                                          \
            sum += sums[k];                                                                        \
        }                                                                                          \
        return sum;                                                                                \
    }

SUM_BODY(sum_plain, )
#if defined(__x86_64__)
SUM_BODY(sum_avx2, __attribute__((target("avx2"))))
SUM_BODY(sum_avx512, __attribute__((target("avx512f"))))
#endif

uint64_t bench_sum(const void *data, size_t bytes)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) {
        return sum_avx512(data, bytes / sizeof(uint64_t));
    }
    if (__builtin_cpu_supports("avx2")) {
        return sum_avx2(data, bytes / sizeof(uint64_t));
    }
#endif
    return sum_plain(data, bytes / sizeof(uint64_t));
}

/* ----------------------------------------------------------------------------------------------
 * Numbers
 */
double bench_cpu_s(void)
{
    struct timespec time;

    if (clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time) != 0) {
        bench_die("clock_gettime: %s", strerror(errno));
    }
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

double bench_gb_s(uint64_t bytes, uint64_t ns)
{
    return (double)bytes / (double)ns;
}

static int compare_u64(const void *a, const void *b)
{
    const uint64_t *x = a;
    const uint64_t *y = b;

    return (*x > *y) - (*x < *y);
}

uint64_t bench_median(uint64_t *values, uint64_t n)
{
    if (n == 0) {
        bench_die("nothing was measured: give more --seconds");
    }
    qsort(values, n, sizeof(*values), compare_u64);
    return values[n / 2];
}

/* ----------------------------------------------------------------------------------------------
 * Placement
 */
int bench_cpu(uint32_t n)
{
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &allowed) && n-- == 0) {
            return cpu;
        }
    }
    return -1;
}

void bench_pin(int thread_id, int cpu)
{
    cpu_set_t set = allowed;

    if (cpu >= 0) {
        CPU_ZERO(&set);
        CPU_SET(cpu, &set);
    }
    /* A thread that has ended meanwhile needs no place. */
    if (sched_setaffinity(thread_id, sizeof(set), &set) != 0 && errno != ESRCH) {
        bench_die("sched_setaffinity: %s", strerror(errno));
    }
}
