/* SPDX-License-Identifier: Apache-2.0
 *
 * cli_top.c: subcommand top: what the daemon does now. It asks the admin server for counters again
 * and again and shows by how much they grow. On a terminal each look replaces the one before; into
 * a file or pipe they follow one another, with -o json as one object a line.
 */
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <termios.h>
#include <unistd.h>

#include "base/clock.h"
#include "client/cli.h"

#define INTERVAL_MS 2000
#define BAR_CELLS   20
#define CLIENTS_MAX 16 /* rows; the busiest ones */

/* One look. */
struct sample {
    json_t *stat;
    json_t *clients;
    uint64_t at_ns;
};

/* A client and what it did between two looks. */
struct client_row {
    const json_t *now;
    uint64_t gets;
    uint64_t hits;
    uint64_t puts;
};

static void sample_drop(struct sample *sample)
{
    json_decref(sample->stat);
    json_decref(sample->clients);
    *sample = (struct sample){0};
}

static int sample_take(const struct cli *cli, struct sample *sample)
{
    int code = cli_http(cli, "GET", "/v1/stat", &sample->stat);

    if (code == CLI_OK && json_object_get(sample->stat, "starting") == NULL) {
        code = cli_http(cli, "GET", "/v1/clients", &sample->clients);
    }
    sample->at_ns = kvf_now_ns();
    return code;
}

/* How much a counter has grown. Another daemon's counters began at 0. */
static uint64_t grown(const json_t *then, const json_t *now, const char *field)
{
    uint64_t before = then != NULL ? cli_number(then, field) : 0;
    uint64_t after = cli_number(now, field);

    return after >= before ? after - before : after;
}

/* --- what is computed ------------------------------------------------------------------------- */

struct rates {
    double seconds;
    const json_t *then; /* metrics of the look before; NULL: of another daemon */
    const json_t *now;
};

static double rate(const struct rates *rates, const char *field)
{
    return (double)grown(rates->then, rates->now, field) / rates->seconds;
}

/* Mean over what was counted between the looks, in microseconds; below 0: nothing was. */
static double mean_us(const struct rates *rates, const char *histogram)
{
    const json_t *then = rates->then != NULL ? json_object_get(rates->then, histogram) : NULL;
    const json_t *now = json_object_get(rates->now, histogram);
    uint64_t count = grown(then, now, "count");

    return count != 0 ? (double)grown(then, now, "sum_ns") / (double)count / 1e3 : -1;
}

static double hits_of(const struct rates *rates)
{
    return rate(rates, "get_hits_dram") + rate(rates, "get_hits_hbm") +
           rate(rates, "get_hits_hbm_copied") + rate(rates, "get_hits_nvme");
}

static double busy_of(const struct rates *rates)
{
    double busy = rate(rates, "loop_busy_ns");
    double all = busy + rate(rates, "loop_idle_ns");

    return all > 0 ? busy / all : 0;
}

static struct rates rates_of(const struct sample *then, const struct sample *now)
{
    bool is_same = strcmp(cli_string(then->stat, "incarnation"),
                          cli_string(now->stat, "incarnation")) == 0;
    double seconds = (double)(now->at_ns - then->at_ns) / 1e9;
    double uptime = (double)cli_number(now->stat, "uptime_s");

    if (!is_same && uptime > 0 && uptime < seconds) {
        seconds = uptime;
    }
    return (struct rates){
        .seconds = seconds,
        .then = is_same ? json_object_get(then->stat, "metrics") : NULL,
        .now = json_object_get(now->stat, "metrics"),
    };
}

static const json_t *client_before(const struct sample *then, const char *connection)
{
    const json_t *row;
    size_t i;

    json_array_foreach(json_object_get(then->clients, "clients"), i, row)
    {
        if (strcmp(cli_string(row, "connection_id"), connection) == 0) {
            return row;
        }
    }
    return NULL;
}

/* Busiest first. */
static int compare_clients(const void *a, const void *b)
{
    const struct client_row *x = a;
    const struct client_row *y = b;
    uint64_t of_x = x->gets + x->puts;
    uint64_t of_y = y->gets + y->puts;

    return (of_x < of_y) - (of_x > of_y);
}

/* *rows_out: to be freed by the caller. */
static size_t clients_of(const struct sample *then, const struct sample *now,
                         struct client_row **rows_out)
{
    const json_t *list = json_object_get(now->clients, "clients");
    size_t n = json_array_size(list);
    struct client_row *rows = calloc(n + 1, sizeof(*rows));
    const json_t *row;
    size_t i;

    *rows_out = rows;
    if (rows == NULL) {
        return 0;
    }
    json_array_foreach(list, i, row)
    {
        const json_t *before = client_before(then, cli_string(row, "connection_id"));

        rows[i] = (struct client_row){
            .now = row,
            .gets = grown(before, row, "hits") + grown(before, row, "misses"),
            .hits = grown(before, row, "hits"),
            .puts = grown(before, row, "puts"),
        };
    }
    qsort(rows, n, sizeof(*rows), compare_clients);
    return n;
}

/* --- JSON ------------------------------------------------------------------------------------- */

static json_t *clients_json(const struct client_row *rows, size_t n, double seconds)
{
    json_t *list = json_array();

    for (size_t i = 0; i < n; i++) {
        json_array_append_new(list, json_pack("{s:s, s:s, s:s, s:f, s:f, s:f}", "connection_id",
                                              cli_string(rows[i].now, "connection_id"), "name",
                                              cli_string(rows[i].now, "name"), "profile",
                                              cli_string(rows[i].now, "profile"), "gets_per_s",
                                              (double)rows[i].gets / seconds, "hits_per_s",
                                              (double)rows[i].hits / seconds, "puts_per_s",
                                              (double)rows[i].puts / seconds));
    }
    return list;
}

static const char *const counters[] = {
    "lookup_chunks",       "lookup_hit_chunks",   "get_hits_dram",        "get_hits_hbm",
    "get_hits_hbm_copied", "get_hits_nvme",       "get_misses",           "get_too_slow",
    "get_bytes",           "put_blocks",          "put_exists",           "put_bytes",
    "requests_busy",       "evicted_blocks",      "nvme_admitted_blocks", "nvme_rejected_blocks",
    "nvme_dropped_blocks", "nvme_corrupt_blocks", "nvme_io_errors",
};

static const struct {
    const char *field;
    const char *name; /* for people */
} histograms[] = {
    {"get_hbm_ns", "get from hbm"},
    {"get_dram_ns", "get from dram"},
    {"get_nvme_ns", "get from nvme"},
    {"put_ns", "put"},
};

static void print_json(const struct rates *rates, const struct sample *now,
                       const struct client_row *rows, size_t n)
{
    json_t *per_second = json_object();
    json_t *means = json_object();

    for (size_t i = 0; i < sizeof(counters) / sizeof(counters[0]); i++) {
        json_object_set_new(per_second, counters[i], json_real(rate(rates, counters[i])));
    }
    for (size_t i = 0; i < sizeof(histograms) / sizeof(histograms[0]); i++) {
        double us = mean_us(rates, histograms[i].field);

        json_object_set_new(means, histograms[i].field,
                            us >= 0 ? json_real(us * 1e3) : json_null());
    }
    cli_print_json(json_pack("{s:s, s:f, s:f, s:o, s:o, s:o}", "incarnation",
                             cli_string(now->stat, "incarnation"), "seconds", rates->seconds,
                             "reactor_busy", busy_of(rates), "per_second", per_second, "mean",
                             means, "clients", clients_json(rows, n, rates->seconds)));
    fflush(stdout);
}

/* --- text ------------------------------------------------------------------------------------- */

/* A rate for people: 1234567 as "1.23M". */
static const char *short_number(double value, char out[16])
{
    static const char units[] = " kMGT";
    size_t unit = 0;

    while (value >= 1000 && unit + 2 < sizeof(units)) {
        value /= 1000;
        unit++;
    }
    if (unit == 0) {
        snprintf(out, 16, value == 0 || value >= 100 ? "%.0f" : "%.3g", value);
    } else {
        snprintf(out, 16, "%.3g%c", value, units[unit]);
    }
    return out;
}

static void print_tier(const char *name, const struct rates *rates, const json_t *then,
                       const json_t *now)
{
    char bar[BAR_CELLS + 1];
    char texts[5][32];
    double capacity = (double)cli_number(now, "capacity_bytes");
    double share = capacity > 0 ? (double)cli_number(now, "stored_bytes") / capacity : 0;
    size_t full = (size_t)(share * BAR_CELLS + 0.5);

    full = full < BAR_CELLS ? full : BAR_CELLS;
    memset(bar, '.', BAR_CELLS);
    memset(bar, '#', full);
    bar[BAR_CELLS] = '\0';
    printf("%-7s [%s] %10s of %-10s %6s stores/s %6s loads/s %6s evictions/s%s\n", name, bar,
           cli_bytes_text(cli_number(now, "stored_bytes"), texts[0], sizeof(texts[0])),
           cli_bytes_text(cli_number(now, "capacity_bytes"), texts[1], sizeof(texts[1])),
           short_number((double)grown(then, now, "stores") / rates->seconds, texts[2]),
           short_number((double)grown(then, now, "loads") / rates->seconds, texts[3]),
           short_number((double)grown(then, now, "evictions") / rates->seconds, texts[4]),
           cli_flag(now, "off")          ? "  OFF"
           : cli_flag(now, "writes_off") ? "  WRITES OFF"
                                         : "");
}

static void print_tiers(const struct rates *rates, const struct sample *then,
                        const struct sample *now)
{
    static const char *const lists[] = {"hbm", "nvme"};
    bool is_same = rates->then != NULL;

    print_tier("dram", rates, is_same ? json_object_get(then->stat, "dram") : NULL,
               json_object_get(now->stat, "dram"));
    for (size_t l = 0; l < sizeof(lists) / sizeof(lists[0]); l++) {
        const json_t *before = is_same ? json_object_get(then->stat, lists[l]) : NULL;
        const json_t *tier;
        size_t i;

        json_array_foreach(json_object_get(now->stat, lists[l]), i, tier)
        {
            char name[32];

            snprintf(name, sizeof(name), "%s %zu", lists[l], i);
            print_tier(name, rates, json_array_get(before, i), tier);
        }
    }
}

static void print_latency(const struct rates *rates, const char *name, const char *histogram)
{
    double us = mean_us(rates, histogram);
    double p99_us = (double)cli_number(json_object_get(rates->now, histogram), "p99_ns") / 1e3;

    if (us >= 0) {
        printf("%-15s mean %8.0f us, p99 since start up to %8.0f us\n", name, us, p99_us);
    }
}

static void print_head(const struct rates *rates, const json_t *stat)
{
    char texts[8][16];
    char service[64];
    double hits = hits_of(rates);
    double misses = rate(rates, "get_misses");
    double asked = rate(rates, "lookup_chunks");

    printf("kvferryd %s, up %" PRIu64 " s, %s%s, %" PRIu64 " of %" PRIu64
           " clients, reactor %.0f %% busy\n",
           cli_string(stat, "version"), cli_number(stat, "uptime_s"),
           cli_flag(stat, "draining") ? "draining"
           : cli_flag(stat, "ready")  ? "ready"
                                      : "not ready",
           cli_service_text(stat, service, sizeof(service)), cli_number(stat, "clients"),
           cli_number(stat, "clients_max"), 100 * busy_of(rates));
    printf("lookups %6s chunks/s, %.0f %% in the run\n", short_number(asked, texts[0]),
           asked > 0 ? 100 * rate(rates, "lookup_hit_chunks") / asked : 0.0);
    printf("gets    %6s hits/s (dram %s, hbm %s, nvme %s), %s misses/s, %sB/s\n",
           short_number(hits, texts[1]), short_number(rate(rates, "get_hits_dram"), texts[2]),
           short_number(rate(rates, "get_hits_hbm") + rate(rates, "get_hits_hbm_copied"), texts[3]),
           short_number(rate(rates, "get_hits_nvme"), texts[4]), short_number(misses, texts[5]),
           short_number(rate(rates, "get_bytes"), texts[6]));
    printf("puts    %6s stored/s", short_number(rate(rates, "put_blocks"), texts[0]));
    printf(" (%s present), %sB/s, %s busy/s\n", short_number(rate(rates, "put_exists"), texts[1]),
           short_number(rate(rates, "put_bytes"), texts[2]),
           short_number(rate(rates, "requests_busy"), texts[3]));
}

static void print_clients(const struct client_row *rows, size_t n, double seconds)
{
    printf("%-16s %-20s %-15s %10s %6s %10s %12s\n", "connection", "name", "profile", "gets/s",
           "hit %", "puts/s", "leased");
    for (size_t i = 0; i < n && i < CLIENTS_MAX; i++) {
        const struct client_row *row = &rows[i];
        char texts[3][32];

        printf("%-16s %-20.20s %-15s %10s %6.0f %10s %12s\n", cli_string(row->now, "connection_id"),
               cli_string(row->now, "name"), cli_string(row->now, "profile"),
               short_number((double)row->gets / seconds, texts[0]),
               row->gets != 0 ? 100 * (double)row->hits / (double)row->gets : 0.0,
               short_number((double)row->puts / seconds, texts[1]),
               cli_bytes_text(cli_number(row->now, "leased_bytes"), texts[2], sizeof(texts[2])));
    }
    if (n > CLIENTS_MAX) {
        printf("and %zu more\n", n - CLIENTS_MAX);
    }
}

static void print_text(const struct rates *rates, const struct sample *then,
                       const struct sample *now, const struct client_row *rows, size_t n)
{
    print_head(rates, now->stat);
    print_tiers(rates, then, now);
    for (size_t i = 0; i < sizeof(histograms) / sizeof(histograms[0]); i++) {
        print_latency(rates, histograms[i].name, histograms[i].field);
    }
    print_clients(rows, n, rates->seconds);
    putchar('\n');
    fflush(stdout);
}

/* --- looks ------------------------------------------------------------------------------------ */

#define CONTROL_C 3

/* Wait; true: somebody has typed q or ^C. */
static bool pause_ms(uint32_t ms, bool is_watched)
{
    struct pollfd key = {.fd = is_watched ? STDIN_FILENO : -1, .events = POLLIN};
    uint64_t end_ns = kvf_now_ns() + (uint64_t)ms * KVF_NS_PER_MS;

    for (;;) {
        uint64_t now_ns = kvf_now_ns();
        char typed;

        if (now_ns >= end_ns) {
            return false;
        }
        if (poll(&key, 1, (int)((end_ns - now_ns + KVF_NS_PER_MS - 1) / KVF_NS_PER_MS)) > 0) {
            if (read(STDIN_FILENO, &typed, 1) != 1) {
                key.fd = -1;
            } else if (typed == 'q' || typed == CONTROL_C) {
                return true;
            }
        }
    }
}

static void print_look(const struct cli *cli, bool is_screen, const struct sample *then,
                       const struct sample *now)
{
    struct rates rates = rates_of(then, now);
    struct client_row *rows;
    size_t n = clients_of(then, now, &rows);

    if (is_screen) {
        fputs("\033[H\033[2J", stdout); /* the screen's corner, and empty */
    }
    if (cli->is_json && json_object_get(now->stat, "starting") != NULL) {
        cli_print_json(json_incref(now->stat));
        fflush(stdout);
    } else if (cli->is_json) {
        print_json(&rates, now, rows, n);
    } else if (cli_print_start(now->stat)) {
        fflush(stdout);
    } else {
        print_text(&rates, then, now, rows, n);
    }
    free(rows);
}

static int look_again_and_again(const struct cli *cli, uint64_t looks, bool is_screen)
{
    uint32_t interval_ms = cli->interval_ms != 0 ? cli->interval_ms : INTERVAL_MS;
    struct sample then = {0};
    int code = sample_take(cli, &then);

    for (uint64_t i = 0; code == CLI_OK && i < looks; i++) {
        struct sample now = {0};

        if (pause_ms(interval_ms, is_screen)) {
            break;
        }
        code = sample_take(cli, &now);
        if (code == CLI_OK) {
            print_look(cli, is_screen, &then, &now);
        }
        sample_drop(&then);
        then = now;
    }
    sample_drop(&then);
    return code;
}

int cli_top(const struct cli *cli)
{
    bool is_screen = !cli->is_json && isatty(STDOUT_FILENO) && isatty(STDIN_FILENO);
    uint64_t looks = cli->count != 0 ? cli->count : is_screen ? UINT64_MAX : 1;
    struct termios before;
    struct termios typing;
    int code;

    if (!is_screen || tcgetattr(STDIN_FILENO, &before) != 0) {
        return look_again_and_again(cli, looks, false);
    }
    typing = before;
    typing.c_lflag &= ~(tcflag_t)(ICANON | ECHO | ISIG); /* keys count at once, none is shown */
    (void)tcsetattr(STDIN_FILENO, TCSANOW, &typing);
    code = look_again_and_again(cli, looks, true);
    (void)tcsetattr(STDIN_FILENO, TCSANOW, &before);
    return code;
}
