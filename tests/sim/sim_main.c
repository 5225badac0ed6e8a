/* SPDX-License-Identifier: Apache-2.0
 *
 * sim_main.c: kvferry-sim: one seed in this process, or a range of seeds in a process each.
 *
 *   kvferry-sim --seed N [--nodes N] [--requests N] [--trace] [--mutation NAME]
 *   kvferry-sim --seeds A..B [--nodes N] [--requests N] [--jobs N] [--json FILE] [--no-gate]
 *   kvferry-sim --list-mutations
 */
#include "tests/sim/sim.h"

#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/sim/sim_mutants.h"

#define JOBS_MAX       64
#define TEXT_BYTES     600
#define GATE_ONE_IN    20 /* seeds */
#define GATE_SEEDS_MIN 60 /* a smaller range proves nothing about rare states */

const char *const sim_cover_names[SIM_COVERS] = {
#define SIM_COVER(name, text) #name,
#include "tests/sim/sim_cover.def"
};

static const char *const cover_texts[SIM_COVERS] = {
#define SIM_COVER(name, text) text,
#include "tests/sim/sim_cover.def"
};

/* What one seed has to say; goes through a pipe. */
struct result {
    uint64_t seed;
    uint64_t hash, requests, turns, lives, virtual_ns, real_ns;
    int32_t failed;
    char text[TEXT_BYTES];
    uint64_t cover[SIM_COVERS];
};

struct options {
    uint64_t first_seed, last_seed, requests;
    uint32_t jobs;
    uint32_t nodes;
    bool is_range, trace, gate;
    const char *json, *mutation;
};

/* Where sim_fail and signals find what to say. Owner: the one thread of a seed's process. */
static struct sim *running;
static int result_fd = -1;
static struct result result;

static void result_fill(const struct sim *sim)
{
    result.seed = sim->seed;
    result.hash = sim->hash;
    result.requests = sim->requests;
    result.turns = sim->turn;
    result.lives = sim->lives;
    result.virtual_ns = sim->now_ns;
    memcpy(result.cover, sim->cover, sizeof(result.cover));
    for (uint32_t i = 0; sim->world != NULL && i < sim->world->n; i++) {
        const struct sim *other = sim->world->nodes[i];

        if (other == sim) {
            continue;
        }
        result.hash = (result.hash ^ other->hash) * 0x9e3779b97f4a7c15ull;
        result.requests += other->requests;
        result.turns += other->turn;
        result.lives += other->lives;
        for (uint32_t k = 0; k < SIM_COVERS; k++) {
            result.cover[k] += other->cover[k];
        }
    }
}

static void result_send(void)
{
    ssize_t written = result_fd < 0 ? 0 : write(result_fd, &result, sizeof(result));

    (void)written; /* a lost result is a failed seed to whoever waits */
}

void sim_fail(struct sim *sim, const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    (void)vsnprintf(result.text, sizeof(result.text), fmt, args);
    va_end(args);
    result_fill(sim);
    result.failed = 1;
    printf("seed %llu node %u step %llu turn %llu time %llu us life %u: %s\n",
           (unsigned long long)sim->seed, sim->node, (unsigned long long)sim->step,
           (unsigned long long)sim->turn, (unsigned long long)(sim->now_ns / 1000), sim->lives,
           result.text);
    (void)fflush(stdout);
    result_send();
    _exit(1);
}

void sim_trace(struct sim *sim, const char *fmt, ...)
{
    va_list args;

    if (!sim->trace) {
        return;
    }
    printf("node %u %llu %llu us: ", sim->node, (unsigned long long)sim->turn,
           (unsigned long long)(sim->now_ns / 1000));
    va_start(args, fmt);
    (void)vprintf(fmt, args);
    va_end(args);
    (void)putchar('\n');
}

/* An assertion of the daemon's own, or worse. */
static void died(int number)
{
    struct sim *sim = running;
    char line[120];
    int n = snprintf(line, sizeof(line), "seed %llu step %llu turn %llu: signal %d\n",
                     (unsigned long long)sim->seed, (unsigned long long)sim->step,
                     (unsigned long long)sim->turn, number);
    ssize_t written = write(STDOUT_FILENO, line, (size_t)n);

    (void)written;
    result_fill(sim);
    result.failed = 1;
    (void)snprintf(result.text, sizeof(result.text), "signal %d", number);
    result_send();
    (void)signal(number, SIG_DFL);
    (void)raise(number);
}

static void log_sink(void *arg, int severity, const char *text)
{
    (void)severity;
    sim_trace(arg, "log: %s", text);
}

static struct sim *sim_new(const struct options *options, uint64_t seed)
{
    struct sim *sim = calloc(1, sizeof(*sim));

    if (sim == NULL) {
        abort();
    }
    sim->seed = seed;
    sim->requests_wanted = options->requests;
    sim->trace = options->trace;
    return sim;
}

/* Until each node has had about as many requests as wanted. */
static void run_nodes(const struct options *options, struct sim *first)
{
    struct sim_world world = {.n = options->nodes, .nodes = {first}};

    for (uint32_t i = 1; i < world.n; i++) {
        world.nodes[i] = sim_new(options, first->seed);
    }
    sim_nodes_open(&world);
    while (first->requests < first->requests_wanted) {
        sim_nodes_step(&world);
    }
    sim_nodes_close(&world);
    result_fill(first);
    for (uint32_t i = 1; i < world.n; i++) {
        free(world.nodes[i]);
    }
    first->world = NULL;
}

static void run_seed(const struct options *options, uint64_t seed)
{
    struct sim *sim = sim_new(options, seed);
    uint64_t begin_ns = kvf_now_ns();

    running = sim;
    (void)signal(SIGABRT, died);
    (void)signal(SIGSEGV, died);
    (void)signal(SIGBUS, died);
    if (sim->trace) {
        kvf_log_init(log_sink, sim, KVF_LOG_INFO);
    }
    if (options->nodes > 1) {
        run_nodes(options, sim);
    } else {
        sim_open(sim);
        while (sim->requests < sim->requests_wanted) {
            sim_step(sim);
        }
        sim_close(sim);
        result_fill(sim);
    }
    result.real_ns = kvf_now_ns() - begin_ns;
    free(sim);
}

/* ---- ranges ---------------------------------------------------------------------------------- */

struct job {
    pid_t pid; /* 0: none */
    int fd;
    uint64_t seed;
};

struct summary {
    bool has_nodes;
    uint64_t seeds, failed, requests, real_ns;
    uint64_t reached[SIM_COVERS]; /* seeds in which */
    uint64_t hash;                /* over all, in the order of seeds */
    FILE *json;
    uint64_t failed_seeds[32];
};

static void job_start(const struct options *options, struct job *job, uint64_t seed)
{
    int fds[2];

    (void)fflush(stdout);
    if (pipe(fds) != 0 || (job->pid = fork()) < 0) {
        perror("kvferry-sim");
        exit(2);
    }
    if (job->pid == 0) {
        (void)close(fds[0]);
        result_fd = fds[1];
        run_seed(options, seed);
        result_send();
        (void)fflush(stdout);
        _exit(0);
    }
    (void)close(fds[1]);
    job->fd = fds[0];
    job->seed = seed;
}

/* Wait for the job; *result_out says what it said, or that it said nothing. */
static void job_finish(struct job *job, struct result *result_out)
{
    size_t got = 0;
    int status;

    while (got < sizeof(*result_out)) {
        ssize_t n = read(job->fd, (char *)result_out + got, sizeof(*result_out) - got);

        if (n <= 0) {
            if (n < 0 && errno == EINTR) {
                continue;
            }
            break;
        }
        got += (size_t)n;
    }
    (void)close(job->fd);
    (void)waitpid(job->pid, &status, 0);
    job->pid = 0;
    if (got < sizeof(*result_out) || status != 0) {
        if (got < sizeof(*result_out)) {
            memset(result_out, 0, sizeof(*result_out));
            (void)snprintf(result_out->text, sizeof(result_out->text), "died without a word");
        }
        result_out->seed = job->seed;
        result_out->failed = 1;
    }
}

static void json_text(FILE *out, const char *text)
{
    (void)putc('"', out);
    for (; *text != '\0'; text++) {
        if (*text == '"' || *text == '\\') {
            (void)putc('\\', out);
        }
        (void)putc((unsigned char)*text < ' ' ? ' ' : *text, out);
    }
    (void)putc('"', out);
}

/* One node reaches nothing of a network's, and a range of several is there for that. */
static bool is_looked_for(bool has_nodes, uint32_t cover)
{
    return has_nodes == (cover >= SIM_COVER_hit_remote);
}

static void summarize(struct summary *summary, const struct result *one)
{
    summary->seeds++;
    summary->requests += one->requests;
    summary->real_ns += one->real_ns;
    summary->hash = (summary->hash ^ one->hash) * 0x9e3779b97f4a7c15ull;
    if (one->failed) {
        if (summary->failed < sizeof(summary->failed_seeds) / sizeof(summary->failed_seeds[0])) {
            summary->failed_seeds[summary->failed] = one->seed;
        }
        summary->failed++;
    }
    for (uint32_t i = 0; i < SIM_COVERS; i++) {
        summary->reached[i] += one->cover[i] > 0;
    }
    if (summary->json != NULL) {
        fprintf(
            summary->json,
            "{\"seed\":%llu,\"failed\":%d,\"hash\":\"%016llx\",\"requests\":%llu,\"turns\":%llu,"
            "\"lives\":%llu,\"virtual_ms\":%llu,\"real_ms\":%llu,\"text\":",
            (unsigned long long)one->seed, one->failed, (unsigned long long)one->hash,
            (unsigned long long)one->requests, (unsigned long long)one->turns,
            (unsigned long long)one->lives, (unsigned long long)(one->virtual_ns / 1000000),
            (unsigned long long)(one->real_ns / 1000000));
        json_text(summary->json, one->text);
        fputs(",\"cover\":{", summary->json);
        for (uint32_t i = 0, n = 0; i < SIM_COVERS; i++) {
            if (is_looked_for(summary->has_nodes, i)) {
                fprintf(summary->json, "%s\"%s\":%llu", n++ == 0 ? "" : ",", sim_cover_names[i],
                        (unsigned long long)one->cover[i]);
            }
        }
        fputs("}}\n", summary->json);
        (void)fflush(summary->json);
    }
}

/* Every state in one seed of twenty. Returns how many states were not. */
static uint32_t print_summary(const struct options *options, const struct summary *summary)
{
    uint32_t missed = 0;

    printf("\n%-24s %6s  %s\n", "state", "seeds", "what");
    for (uint32_t i = 0; i < SIM_COVERS; i++) {
        bool is_missed = summary->reached[i] * GATE_ONE_IN < summary->seeds;

        if (!is_looked_for(summary->has_nodes, i)) {
            continue;
        }
        missed += is_missed;
        printf("%-24s %5llu%%  %s%s\n", sim_cover_names[i],
               (unsigned long long)(summary->reached[i] * 100 / summary->seeds), cover_texts[i],
               is_missed ? "   TOO RARE" : "");
    }
    printf("\n%llu seeds, %llu failed, %llu requests, %.2f s a seed, hash %016llx\n",
           (unsigned long long)summary->seeds, (unsigned long long)summary->failed,
           (unsigned long long)summary->requests,
           (double)summary->real_ns / 1e9 / (double)summary->seeds,
           (unsigned long long)summary->hash);
    for (uint64_t i = 0; i < summary->failed && i < 32; i++) {
        printf("failed: seed %llu\n", (unsigned long long)summary->failed_seeds[i]);
    }
    if (!options->gate || summary->seeds < GATE_SEEDS_MIN) {
        return 0;
    }
    return missed;
}

static int run_range(const struct options *options)
{
    static struct result one; /* large for a stack */
    struct job jobs[JOBS_MAX] = {{0}};
    struct summary summary = {.has_nodes = options->nodes > 1};
    uint64_t next = options->first_seed;
    uint64_t told = options->first_seed;

    if (options->json != NULL && (summary.json = fopen(options->json, "w")) == NULL) {
        perror(options->json);
        return 2;
    }
    while (told <= options->last_seed) {
        struct job *job;

        while (next <= options->last_seed && next - told < options->jobs) {
            job_start(options, &jobs[next % options->jobs], next);
            next++;
        }
        job = &jobs[told % options->jobs];
        job_finish(job, &one);
        summarize(&summary, &one);
        told++;
        if (options->mutation != NULL && one.failed) {
            break; /* found */
        }
    }
    if (options->mutation != NULL) {
        printf("mutation %s: %s after %llu seeds%s%s\n", options->mutation,
               summary.failed > 0 ? "found" : "NOT FOUND", (unsigned long long)summary.seeds,
               summary.failed > 0 ? ": " : "", summary.failed > 0 ? one.text : "");
    }
    for (uint32_t i = 0; i < options->jobs; i++) {
        if (jobs[i].pid != 0) {
            job_finish(&jobs[i], &one);
        }
    }
    if (summary.json != NULL) {
        (void)fclose(summary.json);
    }
    if (options->mutation != NULL) {
        return summary.failed > 0 ? 0 : 1;
    }
    return print_summary(options, &summary) > 0 || summary.failed > 0;
}

static int run_one(const struct options *options)
{
    run_seed(options, options->first_seed);
    printf(
        "seed %llu: hash %016llx, %llu requests, %llu turns, %llu lives, %llu ms virtual, %llu ms "
        "real\n",
        (unsigned long long)result.seed, (unsigned long long)result.hash,
        (unsigned long long)result.requests, (unsigned long long)result.turns,
        (unsigned long long)result.lives, (unsigned long long)(result.virtual_ns / 1000000),
        (unsigned long long)(result.real_ns / 1000000));
    for (uint32_t i = 0; i < SIM_COVERS; i++) {
        printf("  %-24s %8llu  %s\n", sim_cover_names[i], (unsigned long long)result.cover[i],
               cover_texts[i]);
    }
    return 0;
}

/* ---- command line ---------------------------------------------------------------------------- */

static int usage(void)
{
    fputs("kvferry-sim --seed N | --seeds A..B  [--nodes N] [--requests N] [--jobs N]\n"
          "            [--json FILE] [--no-gate] [--trace] [--mutation NAME] | --list-mutations\n",
          stderr);
    return 2;
}

static bool parse_number(const char *text, uint64_t *out)
{
    char *end;

    errno = 0;
    *out = strtoull(text, &end, 10);
    return errno == 0 && end != text && *end == '\0';
}

static bool parse_range(char *text, struct options *options)
{
    char *dots = strstr(text, "..");

    if (dots == NULL) {
        return false;
    }
    *dots = '\0';
    options->is_range = true;
    return parse_number(text, &options->first_seed) &&
           parse_number(dots + 2, &options->last_seed) && options->first_seed <= options->last_seed;
}

static bool parse_option(int option, struct options *options)
{
    uint64_t number = 0;

    switch (option) {
    case 's':
        return parse_number(optarg, &options->first_seed);
    case 'S':
        return parse_range(optarg, options);
    case 'r':
        return parse_number(optarg, &options->requests) && options->requests > 0;
    case 'j':
        options->jobs = parse_number(optarg, &number) ? (uint32_t)number : 0;
        return options->jobs >= 1 && options->jobs <= JOBS_MAX;
    case 'n':
        options->nodes = parse_number(optarg, &number) ? (uint32_t)number : 0;
        return options->nodes >= 1 && options->nodes <= SIM_NET_NODES;
    case 'J':
        options->json = optarg;
        return true;
    case 'g':
        options->gate = false;
        return true;
    case 't':
        options->trace = true;
        return true;
    case 'm':
        options->mutation = optarg;
        return true;
    default:
        return false;
    }
}

int main(int argc, char **argv)
{
    static const struct option names[] = {
        {"seed", required_argument, NULL, 's'},
        {"seeds", required_argument, NULL, 'S'},
        {"requests", required_argument, NULL, 'r'},
        {"jobs", required_argument, NULL, 'j'},
        {"nodes", required_argument, NULL, 'n'},
        {"json", required_argument, NULL, 'J'},
        {"no-gate", no_argument, NULL, 'g'},
        {"trace", no_argument, NULL, 't'},
        {"mutation", required_argument, NULL, 'm'},
        {"list-mutations", no_argument, NULL, 'l'},
        {NULL, 0, NULL, 0},
    };
    struct options options = {.requests = 20000, .jobs = 1, .nodes = 1, .gate = true};
    int option;

    while ((option = getopt_long(argc, argv, "", names, NULL)) != -1) {
        if (option == 'l') {
            sim_mutants_print(stdout);
            return 0;
        }
        if (!parse_option(option, &options)) {
            return usage();
        }
    }
    if (optind != argc) {
        return usage();
    }
    if (options.mutation != NULL && !sim_mutant_choose(options.mutation)) {
        fprintf(stderr, "kvferry-sim: no mutation %s in this build\n", options.mutation);
        return 2;
    }
    return options.is_range ? run_range(&options) : run_one(&options);
}
