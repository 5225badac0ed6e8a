/* SPDX-License-Identifier: Apache-2.0
 *
 * sweep.c: the Nth call fails, N rising until a run is clean: over starts, recovery, serving, the
 * admin socket and the end of the real daemon, and over attach, calls and reconnects of the client
 * library.
 *
 *   sweep [--coarse] [--scenario NAME] [--class NAME] [--one N]
 *
 * --coarse takes N = 1, 3, 9, 27, ..., for ctest; `ninja run_sweeps` takes all. --scenario takes
 * all whose name begins so.
 */
#include "tests/fault/sweep.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/clock.h"
#include "tests/support/blocks.h"
#include "tests/support/support.h"

#define WRONG_MAX     3 /* in one sweep, then it is given up */
#define BLOCK_MAX     (1u << 20)
#define BUDGET_MS     2000
#define SLOW_NS       (120 * KVF_NS_PER_S) /* a run takes longer only if something waits for ever */
#define CALLS_MAX     64
#define COARSE_FACTOR 3

static const char *const class_names[SWEEP_CLASSES] = {
    [SWEEP_ALLOC] = "alloc",   [SWEEP_MAP] = "map",     [SWEEP_FD] = "fd",
    [SWEEP_SOCKET] = "socket", [SWEEP_BUSY] = "busy",   [SWEEP_INTERRUPT] = "interrupt",
    [SWEEP_THREAD] = "thread", [SWEEP_DRIVE] = "drive",
};

struct sweep_page sweep_own_page;
struct sweep_page *sweep_daemon_page;

static struct kvf_test_dir the_dir;
static char page_env[KVF_TEST_PATH_BYTES + 32];
static uint8_t the_payload[BLOCK_MAX];

/* --- one run ---------------------------------------------------------------------------------- */

void sweep_arm(struct sweep_case *run, struct sweep_page *page)
{
    run->page = page;
    atomic_store(&page->calls, 0);
    atomic_store(&page->is_hit, 0);
    atomic_store(&page->target, run->n);
    atomic_store(&page->armed, run->class);
}

void sweep_disarm(struct sweep_case *run)
{
    atomic_store(&run->page->armed, SWEEP_NONE);
    run->is_hit = atomic_load(&run->page->is_hit) != 0;
}

/* Which call it was that failed. */
static const char *call_name(const struct sweep_case *run)
{
    return run->page != NULL && atomic_load(&run->page->is_hit) != 0 ? run->page->name : "none";
}

void sweep_wrong(struct sweep_case *run, const char *format, ...)
{
    char text[512];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    run->is_wrong = true;
    fprintf(stderr, "WRONG: %s, %s %" PRIu64 " (%s): %s\n", run->scenario,
            run->class == SWEEP_NONE ? "before" : class_names[run->class], run->n, call_name(run),
            text);
}

void sweep_judge(struct sweep_case *run, const char *call, int status)
{
    switch (status) {
    case KVF_OK:
    case KVF_EXISTS:
        return;
    case KVF_MISS:
    case KVF_COMING:
    case KVF_PARTIAL:
    case KVF_EMPTY:
    case KVF_ERR_BUSY:
    case KVF_ERR_NO_MEMORY:
    case KVF_ERR_TIMEOUT:
    case KVF_ERR_LOST:
    case KVF_ERR_DISCONNECTED:
    case KVF_ERR_NO_DAEMON:
    case KVF_ERR_IO:
    case KVF_ERR_TIER_OFF:
    case KVF_ERR_NO_SPACE:
        run->n_failed++;
        return;
    default:
        sweep_wrong(run, "%s answers \"%s\"", call, kvf_status_name(status));
    }
}

/* --- blocks ----------------------------------------------------------------------------------- */

int sweep_put(struct kvf_client *client, uint64_t number, size_t bytes, uint32_t flags)
{
    struct kvf_put_options options = {
        .struct_bytes = sizeof(options), .flags = flags, .budget_ms = BUDGET_MS};
    struct kvf_put_item item = {.struct_bytes = sizeof(item), .source = KVF_SOURCE_BYTES};
    struct kvf_test_key key;
    int32_t block_status = KVF_ERR_INTERNAL;
    int status;

    kvf_test_payload_fill(number, the_payload, bytes);
    item.key = kvf_test_key(number, &key);
    item.data = the_payload;
    item.data_bytes = bytes;
    status = kvf_put(client, &item, 1, &options, &block_status);
    return status < 0 ? status : block_status;
}

int sweep_get(struct kvf_client *client, uint64_t number, size_t bytes, uint8_t *tier_out)
{
    struct kvf_get_options options = {.struct_bytes = sizeof(options), .budget_ms = BUDGET_MS};
    struct kvf_test_key bytes_of_key;
    struct kvf_key key = kvf_test_key(number, &bytes_of_key);
    struct kvf_hit hit = {.status = KVF_ERR_INTERNAL};

    (void)kvf_get(client, &key, 1, &options, &hit);
    if (tier_out != NULL) {
        *tier_out = hit.tier;
    }
    return kvf_test_hit_check(client, &hit, number, bytes);
}

/* --- holdings --------------------------------------------------------------------------------- */

static uint32_t entries_count(const char *path)
{
    uint32_t n = 0;
    DIR *folder = opendir(path);

    while (folder != NULL && readdir(folder) != NULL) {
        n++;
    }
    if (folder != NULL) {
        closedir(folder);
    }
    return n;
}

static uint32_t maps_count(const char *path)
{
    char *line = NULL;
    size_t capacity = 0;
    uint32_t n = 0;
    FILE *file = fopen(path, "r");

    while (file != NULL && getline(&line, &capacity, file) > 0) {
        n += strstr(line, "memfd:kvferry-ring") != NULL ||
             strstr(line, "memfd:kvferry-staging") != NULL ||
             strstr(line, "memfd:kvferry-arena") != NULL;
    }
    free(line);
    if (file != NULL) {
        fclose(file);
    }
    return n;
}

void sweep_holdings_read(int pid, const struct sweep_page *page,
                         struct sweep_holdings *holdings_out)
{
    char path[64];

    snprintf(path, sizeof(path), "/proc/%d/fd", pid);
    holdings_out->n_fds = entries_count(path);
    snprintf(path, sizeof(path), "/proc/%d/maps", pid);
    holdings_out->n_maps = maps_count(path);
    holdings_out->n_live = atomic_load(&page->live);
}

/* --- a sweep ---------------------------------------------------------------------------------- */

struct options {
    bool is_coarse;
    bool is_one; /* this N, and no other */
    uint64_t first;
    const char *scenario;
    const char *class;
};

/* What a sweep came to. */
struct tally {
    uint64_t n_runs, n_clean_at, n_worked, n_said, n_ended, n_missed, n_wrong;
    struct {
        char name[SWEEP_NAME_BYTES];
        uint64_t n;
    } calls[CALLS_MAX];
};

static void tally_call(struct tally *tally, const char *name)
{
    for (uint32_t i = 0; i < CALLS_MAX; i++) {
        if (tally->calls[i].n == 0) {
            memcpy(tally->calls[i].name, name, SWEEP_NAME_BYTES);
        }
        if (strcmp(tally->calls[i].name, name) == 0) {
            tally->calls[i].n++;
            return;
        }
    }
}

static uint64_t next_n(const struct options *options, uint64_t n)
{
    return options->is_coarse ? n * COARSE_FACTOR : n + 1;
}

static void sweep(const struct sweep_scenario *scenario, enum sweep_class class,
                  const struct options *options, struct tally *tally)
{
    struct sweep_case run = {.is_hit = true};

    memset(tally, 0, sizeof(*tally));
    scenario->begin();
    for (uint64_t n = options->first; run.is_hit && tally->n_wrong < WRONG_MAX;
         n = next_n(options, n)) {
        uint64_t began_ns = kvf_now_ns();

        run = (struct sweep_case){.scenario = scenario->name, .class = class, .n = n};
        scenario->run(&run);
        if (kvf_now_ns() - began_ns > SLOW_NS) {
            sweep_wrong(&run, "it took more than %d s", (int)(SLOW_NS / KVF_NS_PER_S));
        }
        if (class == SWEEP_INTERRUPT && (run.is_ended || run.n_failed > 0)) {
            sweep_wrong(&run, "a call that was interrupted is not made again");
        }
        tally->n_clean_at = n;
        tally->n_missed += run.n_missed;
        tally->n_wrong += run.is_wrong;
        if (run.is_hit) {
            tally->n_runs++;
            tally_call(tally, call_name(&run));
            tally->n_ended += run.is_ended;
            tally->n_said += !run.is_ended && run.n_failed > 0;
            tally->n_worked += !run.is_ended && run.n_failed == 0;
        } else if (run.n_failed > 0 || run.is_ended || run.n_missed > 0) {
            sweep_wrong(&run, "a call failed although nothing was made to fail");
            tally->n_wrong++;
        }
        if (run.is_wrong) {
            scenario->end();
            scenario->begin();
        }
        if (options->is_one) {
            break;
        }
    }
    scenario->end();
}

static void print_tally(const struct sweep_scenario *scenario, enum sweep_class class,
                        const struct tally *tally, bool is_first)
{
    printf("%s\n  {\"scenario\": \"%s\", \"class\": \"%s\", \"clean_at\": %" PRIu64
           ", \"runs\": %" PRIu64 ", \"worked\": %" PRIu64 ", \"said_so\": %" PRIu64
           ", \"not_started\": %" PRIu64 ", \"blocks_missed\": %" PRIu64 ", \"wrong\": %" PRIu64
           ", \"failed_calls\": {",
           is_first ? "" : ",", scenario->name, class_names[class], tally->n_clean_at,
           tally->n_runs, tally->n_worked, tally->n_said, tally->n_ended, tally->n_missed,
           tally->n_wrong);
    for (uint32_t i = 0; i < CALLS_MAX && tally->calls[i].n > 0; i++) {
        printf("%s\"%s\": %" PRIu64, i == 0 ? "" : ", ", tally->calls[i].name, tally->calls[i].n);
    }
    printf("}}");
    fflush(stdout);
}

/* All classes of some scenarios. Returns how many runs were wrong. */
static uint64_t sweep_all(const struct sweep_scenario *scenarios, size_t n_scenarios,
                          const struct options *options, uint64_t *n_sweeps)
{
    static struct tally tally;
    uint64_t n_wrong = 0;

    for (size_t s = 0; s < n_scenarios; s++) {
        const struct sweep_scenario *scenario = &scenarios[s];

        for (int class = SWEEP_ALLOC; class < SWEEP_CLASSES; class ++) {
            if ((scenario->classes & SWEEP_BIT(class)) == 0 ||
                (options->scenario != NULL &&
                 strncmp(options->scenario, scenario->name, strlen(options->scenario)) != 0) ||
                (options->class != NULL && strcmp(options->class, class_names[class]) != 0)) {
                continue;
            }
            sweep(scenario, (enum sweep_class) class, options, &tally);
            print_tally(scenario, (enum sweep_class) class, &tally, *n_sweeps == 0);
            n_wrong += tally.n_wrong;
            ++*n_sweeps;
        }
    }
    return n_wrong;
}

/* --- the program ------------------------------------------------------------------------------ */

const char *sweep_page_env(void)
{
    return page_env;
}

static void make_page(void)
{
    static const struct sweep_page zero;
    char path[KVF_TEST_PATH_BYTES];
    void *base;
    int fd;

    kvf_test_dir_create(&the_dir);
    kvf_test_dir_path(&the_dir, "page", path);
    kvf_test_file_write(path, &zero, sizeof(zero));
    fd = open(path, O_RDWR | O_CLOEXEC);
    base = mmap(NULL, sizeof(zero), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd < 0 || base == MAP_FAILED) {
        fprintf(stderr, "sweep: no page: %s\n", strerror(errno));
        exit(2);
    }
    close(fd);
    sweep_daemon_page = base;
    atomic_store(&sweep_own_page.thread_id, gettid());
    sweep_page = &sweep_own_page;
    snprintf(page_env, sizeof(page_env), "KVF_SWEEP_PAGE=%s", path);
}

static void parse(int argc, char **argv, struct options *options)
{
    static const struct option known[] = {
        {"coarse", no_argument, NULL, 'c'},
        {"scenario", required_argument, NULL, 's'},
        {"class", required_argument, NULL, 'k'},
        {"one", required_argument, NULL, 'o'},
        {NULL, 0, NULL, 0},
    };
    int option;

    while ((option = getopt_long(argc, argv, "", known, NULL)) != -1) {
        switch (option) {
        case 'c':
            options->is_coarse = true;
            break;
        case 's':
            options->scenario = optarg;
            break;
        case 'k':
            options->class = optarg;
            break;
        case 'o':
            options->is_one = true;
            options->first = strtoull(optarg, NULL, 10);
            break;
        default:
            fprintf(stderr, "sweep [--coarse] [--scenario NAME] [--class NAME] [--one N]\n");
            exit(2);
        }
    }
}

int main(int argc, char **argv)
{
    struct options options = {.first = 1};
    uint64_t n_sweeps = 0;
    uint64_t n_wrong;

    parse(argc, argv, &options);
    /* what was freed or never filled is no good value, here and in the daemon */
    setenv("MALLOC_PERTURB_", "165", 1);
    make_page();
    printf("{\"test\": \"sweep\", \"every_n\": %s, \"sweeps\": [",
           options.is_coarse ? "false" : "true");
    n_wrong = sweep_all(sweep_client_scenarios, sweep_client_scenarios_count, &options, &n_sweeps);
    n_wrong += sweep_all(sweep_daemon_scenarios, sweep_daemon_scenarios_count, &options, &n_sweeps);
    printf("], \"wrong\": %" PRIu64 ", \"ok\": %s}\n", n_wrong,
           n_wrong == 0 && n_sweeps > 0 ? "true" : "false");
    kvf_test_dir_remove(&the_dir);
    return n_wrong == 0 && n_sweeps > 0 ? 0 : 1;
}
