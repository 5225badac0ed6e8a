/* SPDX-License-Identifier: Apache-2.0
 *
 * cli_plan_store.c: what a store is worth for a trace of prompts: how long it holds what comes,
 * what is hit, what prefill that saves, and what it writes to the drive.
 *
 * A hit is fetched where that is faster than computing its tokens again; memory is read at the
 * link's rate, the drive at its own where that is lower. A prompt's hit is computed again as if
 * nothing came before it, which is what a prefix is.
 */
#include "client/cli_plan.h"

#include <math.h>
#include <stdio.h>

#include "base/clock.h"

#define WORTH_SHARE 0.01 /* of all prefill, below which a store is not worth it */
#define DAY_S       86400.0
#define HOUR_S      3600.0

/* One profile's. */
struct worth {
    const struct cli_plan *plan;
    const struct kvf_profile *profile;
    struct kvf_codec_plan codec;
    struct kvf_cost_rates drive; /* as the plan's, at the drive's rate */
    struct cli_store_case store;
    double prefill_s, saved_s;
    uint32_t break_even_dram, break_even_nvme; /* tokens, 0: never */
    double seconds;
};

static void see(void *arg, const struct kvf_trace_request *request, uint32_t dram, uint32_t nvme)
{
    struct worth *worth = arg;
    const struct cli_plan *plan = worth->plan;
    struct kvf_cost cost = {0};
    double computed_s, nvme_s;

    worth->prefill_s += kvf_cost_recompute_s(&plan->model, &plan->rates, request->input_tokens);
    if (dram + nvme == 0) {
        return;
    }
    computed_s = kvf_cost_recompute_s(&plan->model, &plan->rates, dram + nvme);
    kvf_cost_times(&plan->model, worth->profile, &worth->codec, &plan->rates, dram + nvme, &cost);
    nvme_s = nvme * worth->store.bytes_a_token *
             (1 / worth->drive.link_bytes_per_s - 1 / plan->rates.link_bytes_per_s);
    worth->saved_s += fmax(0, computed_s - cost.total_s - nvme_s);
}

static double dwpd_of(const struct worth *worth)
{
    double nvme = (double)worth->store.config.nvme_bytes;

    return nvme > 0 && worth->seconds > 0
               ? worth->store.written_bytes / worth->seconds * DAY_S / nvme
               : 0;
}

/* Hours in which as much comes as the tier holds. */
static double hours(double tier_bytes, double bytes, double seconds)
{
    return bytes > 0 ? tier_bytes / (bytes / seconds) / HOUR_S : INFINITY;
}

static bool is_worth(const struct worth *worth)
{
    return worth->saved_s > WORTH_SHARE * worth->prefill_s;
}

static int find_worth(const struct cli_plan *plan, const struct cli_plan_row *row,
                      const struct kvf_trace *trace, struct worth *worth)
{
    struct kvf_cost cost;

    *worth = (struct worth){
        .plan = plan,
        .profile = row->profile,
        .drive = plan->rates,
        .store = {.profile = row->profile->name, .bytes_a_token = row->cost.bytes_a_token},
        .seconds = (double)trace->span_ns / (double)KVF_NS_PER_S,
    };
    if (plan->cli->drive_gbs > 0 && plan->cli->drive_gbs * 1e9 < plan->rates.link_bytes_per_s) {
        worth->drive.link_bytes_per_s = plan->cli->drive_gbs * 1e9;
    }
    (void)kvf_cost_plan(&plan->model, row->profile, &worth->codec);
    worth->break_even_dram = row->cost.break_even_tokens;
    (void)kvf_cost_of(&plan->model, row->profile, &worth->drive, 1, &cost);
    worth->break_even_nvme = cost.break_even_tokens;
    cli_case_init(plan->cli, trace, row->cost.chunk_tokens, plan->dram_bytes, plan->nvme_bytes,
                  &worth->store);
    return cli_case_run(trace, &worth->store, see, worth);
}

static const char *tokens_text(uint32_t tokens, char out[16])
{
    (void)snprintf(out, 16, "%u", tokens);
    return tokens != 0 ? out : "never";
}

static void print_worth(const struct worth *worth, const struct kvf_trace *trace)
{
    const struct cli_store_case *store = &worth->store;
    double tokens = (double)trace->input_tokens;
    double limit = worth->plan->cli->dwpd > 0 ? worth->plan->cli->dwpd : 1;
    char even[2][16];

    printf("%-12s %9.3g %9.3g %8.2f%% %8.2f%% %10.1f %7.2f%% %9.2f %6.2f %10s %10s  %s\n",
           store->profile,
           hours((double)store->config.dram_bytes, store->put_bytes, worth->seconds),
           hours((double)store->config.nvme_bytes, store->written_bytes, worth->seconds),
           100 * (double)store->tokens_dram / tokens, 100 * (double)store->tokens_nvme / tokens,
           worth->saved_s, worth->prefill_s > 0 ? 100 * worth->saved_s / worth->prefill_s : 0,
           store->written_bytes / worth->seconds * DAY_S * 1e-12, dwpd_of(worth),
           tokens_text(worth->break_even_dram, even[0]),
           store->config.nvme_bytes != 0 ? tokens_text(worth->break_even_nvme, even[1]) : "-",
           !is_worth(worth)         ? "not worth it"
           : dwpd_of(worth) > limit ? "wears the drive out"
                                    : "worth it");
}

static json_t *worth_json(const struct worth *worth, const struct kvf_trace *trace)
{
    const struct cli_store_case *store = &worth->store;
    double hours_dram = hours((double)store->config.dram_bytes, store->put_bytes, worth->seconds);
    double hours_nvme = hours((double)store->config.nvme_bytes, store->written_bytes,
                              worth->seconds);

    return json_pack(
        "{s:s, s:f, s:o, s:o, s:I, s:I, s:I, s:f, s:f, s:f, s:f, s:i, s:i, s:b}", "profile",
        store->profile, "bytes_a_token", store->bytes_a_token, "hours_dram",
        isfinite(hours_dram) ? json_real(hours_dram) : json_null(), "hours_nvme",
        isfinite(hours_nvme) ? json_real(hours_nvme) : json_null(), "tokens",
        (json_int_t)trace->input_tokens, "tokens_dram", (json_int_t)store->tokens_dram,
        "tokens_nvme", (json_int_t)store->tokens_nvme, "prefill_s", worth->prefill_s, "saved_s",
        worth->saved_s, "written_tb_a_day", store->written_bytes / worth->seconds * DAY_S * 1e-12,
        "dwpd", dwpd_of(worth), "break_even_dram_tokens", (int)worth->break_even_dram,
        "break_even_nvme_tokens", (int)worth->break_even_nvme, "is_worth_it", (int)is_worth(worth));
}

static void print_head(const struct cli_plan *plan, const struct kvf_trace *trace)
{
    char sizes[2][32];

    printf("\n%llu prompts, %llu tokens in %.2f hours; %s of memory, %s of a drive\n\n",
           (unsigned long long)trace->n_requests, (unsigned long long)trace->input_tokens,
           (double)trace->span_ns / (double)KVF_NS_PER_S / HOUR_S,
           cli_bytes_text(plan->dram_bytes, sizes[0], sizeof(sizes[0])),
           cli_bytes_text(plan->nvme_bytes, sizes[1], sizeof(sizes[1])));
    printf("%-12s %9s %9s %9s %9s %10s %8s %9s %6s %10s %10s\n", "", "dram", "nvme", "hit", "hit",
           "prefill", "of", "TB to", "", "pays from", "tokens");
    printf("%-12s %9s %9s %9s %9s %10s %8s %9s %6s %10s %10s\n", "profile", "hours", "hours",
           "dram", "nvme", "saved s", "prefill", "nvme/day", "DWPD", "dram", "nvme");
}

static void print_foot(const struct cli_plan *plan)
{
    double limit = plan->cli->dwpd > 0 ? plan->cli->dwpd : 1;
    double rate = limit * (double)plan->nvme_bytes / DAY_S;

    if (plan->nvme_bytes != 0) {
        printf("\n%.3g drive writes a day are %.0f MiB/s: --write-budget, and nvme.write_budget\n",
               limit, rate / (1 << 20));
    }
}

static int open_store(struct cli_plan *plan)
{
    const struct cli *cli = plan->cli;
    struct cli_sizes dram, nvme;
    int code;

    if (cli->dram == NULL) {
        return cli_fail(CLI_USAGE, "plan: --trace needs --dram, as 64GiB");
    }
    code = cli_parse_sizes("dram", cli->dram, &dram);
    if (code == CLI_OK) {
        code = cli_parse_sizes("nvme", cli->nvme != NULL ? cli->nvme : "0", &nvme);
    }
    if (code != CLI_OK) {
        return code;
    }
    if (dram.n != 1 || nvme.n != 1) {
        return cli_fail(CLI_USAGE, "plan: one size of --dram and --nvme; replay takes lists");
    }
    if (nvme.bytes[0] != 0 && cli->drive_gbs <= 0) {
        return cli_fail(CLI_USAGE, "plan: --nvme needs --drive, the rate of its reads as measured");
    }
    plan->dram_bytes = dram.bytes[0];
    plan->nvme_bytes = nvme.bytes[0];
    return CLI_OK;
}

int cli_plan_store(struct cli_plan *plan, json_t **rows_out)
{
    struct kvf_trace trace = {0};
    json_t *rows = NULL;
    int code = open_store(plan);

    if (code == CLI_OK) {
        code = cli_read_trace(plan->cli, plan->cli->trace, &trace);
    }
    if (code == CLI_OK && trace.span_ns == 0) {
        code = cli_fail(CLI_FAILED, "%s: all prompts come at one time: a plan needs a rate",
                        plan->cli->trace);
    }
    if (code == CLI_OK && rows_out != NULL) {
        rows = json_array();
    } else if (code == CLI_OK) {
        print_head(plan, &trace);
    }
    for (uint32_t i = 0; i < plan->n_rows && code == CLI_OK; i++) {
        struct worth worth;

        code = find_worth(plan, &plan->rows[i], &trace, &worth);
        if (code == CLI_OK && rows_out != NULL) {
            json_array_append_new(rows, worth_json(&worth, &trace));
        } else if (code == CLI_OK) {
            print_worth(&worth, &trace);
        }
    }
    if (code == CLI_OK && rows_out == NULL) {
        print_foot(plan);
    }
    if (rows_out != NULL) {
        *rows_out = rows;
    }
    kvf_trace_free(&trace);
    return code;
}
