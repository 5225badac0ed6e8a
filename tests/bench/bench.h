/* SPDX-License-Identifier: Apache-2.0
 *
 * bench.h: what the measuring programs share: pairs, options, memory, orders, the reader.
 *
 * The programs measure and print numbers; tests/bench/run starts them, makes statistics of what
 * they print and says what it means. Their standard output is lines of words:
 *   pair NAME OURS LIMIT    one pair of measurements, made one right after the other
 *   value NAME NUMBER       one measurement that has no partner
 *   skip NAME WHY...        this one cannot be made here
 */
#ifndef KVF_TESTS_BENCH_H
#define KVF_TESTS_BENCH_H

#include <stddef.h>
#include <stdint.h>

#define BENCH_ALIGN_BYTES 4096

struct bench_run {
    int argc;
    char **argv;
    double seconds;     /* of one side of a pair */
    uint32_t n_pairs;   /* of each figure */
    const char *only;   /* measure this figure and no other; NULL: all */
    uint32_t n_flipped; /* pairs so far, of all figures: who goes first alternates */
};

/* Print what is wrong and end the process. */
void bench_die(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));

/* Read --seconds, --pairs and --only. The arguments are borrowed. */
void bench_init(struct bench_run *run, int argc, char **argv);

/* The word behind an option, or NULL. */
const char *bench_text(const struct bench_run *run, const char *option);

/* The number behind an option, or what is given for the case that it is not there. */
uint64_t bench_number(const struct bench_run *run, const char *option, uint64_t otherwise);

/* n_pairs times: both sides for about run->seconds, one after the other, and a line. A side returns
 * its figure. */
void bench_pairs(struct bench_run *run, const char *name, double (*ours)(void *ctx, double seconds),
                 double (*limit)(void *ctx, double seconds), void *ctx);

/* n_pairs measurements without a partner. */
void bench_values(const struct bench_run *run, const char *name,
                  double (*measure)(void *ctx, double seconds), void *ctx);

void bench_print_pair(const char *name, double ours, double limit);
void bench_print_value(const char *name, double value);
void bench_print_skip(const char *name, const char *why);

/* Memory of this process on pages of the ordinary size, all of it touched. Random bytes from seed,
 * or zeroes if that is 0. Ends the process if there is none. */
void *bench_memory(size_t bytes, uint64_t seed);
void bench_memory_free(void *memory, size_t bytes);

/* The numbers below n in an order that follows from seed. */
void bench_shuffle(uint32_t *order, uint64_t n, uint64_t seed);

/* Read every byte: the sum of the 64-bit words, by the widest vectors of this CPU. bytes is a
 * multiple of 8. */
uint64_t bench_sum(const void *data, size_t bytes);

/* Keep the compiler from dropping or moving a copy. */
static inline void bench_keep(const void *data)
{
    __asm__ volatile("" : : "r"(data) : "memory");
}

/* CPU seconds that this process has used. */
double bench_cpu_s(void);

double bench_gb_s(uint64_t bytes, uint64_t ns);

/* The median; sorts the values. */
uint64_t bench_median(uint64_t *values, uint64_t n);

/* The n-th CPU that this process may run on; -1: there are not so many. */
int bench_cpu(uint32_t n);

/* Keep a thread (0: the calling one) on one CPU, or, with -1, give it back all that this process
 * had when bench_init was called. */
void bench_pin(int thread_id, int cpu);

#endif /* KVF_TESTS_BENCH_H */
