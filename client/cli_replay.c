/* SPDX-License-Identifier: Apache-2.0
 *
 * cli_replay.c: kvferry replay: what a trace of prompts hits in stores of some sizes, by profile.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "client/cli_store.h"

#define PROFILES_DEFAULT "raw,exact,balanced,dense"

enum {
    PROFILES_MAX = 32,
    CASES_MAX = 512,
};

struct form {
    char name[KVF_PROFILE_NAME_BYTES];
    double bytes_a_token;
    uint32_t chunk_tokens;
};

struct replay {
    const struct cli *cli;
    struct kvf_trace trace;
    struct cli_sizes dram, nvme;
    struct form forms[PROFILES_MAX];
    uint32_t n_forms;
    struct cli_store_case *cases;
    uint32_t n_cases;
};

static int add_form(struct replay *replay, const struct kvf_weights_model *model, const char *name)
{
    const struct kvf_profile *profile = kvf_profile_find(name);
    const struct kvf_cost_rates rates = {.link_bytes_per_s = 1, .flop_per_s = 1};
    struct form *form = &replay->forms[replay->n_forms];
    struct kvf_cost cost;

    if (profile == NULL || profile->opaque) {
        return cli_fail(CLI_USAGE, "--profiles: '%s' is no profile of K and V or X of this release",
                        name);
    }
    if (kvf_cost_of(model, profile, &rates, 1, &cost) != KVF_OK) {
        return cli_fail(CLI_FAILED, "profile %s has no form for this model", name);
    }
    (void)snprintf(form->name, sizeof(form->name), "%s", name);
    form->bytes_a_token = cost.bytes_a_token;
    form->chunk_tokens = cost.chunk_tokens;
    replay->n_forms++;
    return CLI_OK;
}

static int add_forms(struct replay *replay)
{
    const struct cli *cli = replay->cli;
    const char *list = cli->profiles != NULL ? cli->profiles : PROFILES_DEFAULT;
    struct kvf_weights_model model = {0};
    int code;

    if (cli->bytes_a_token > 0) {
        if (cli->profiles != NULL || cli->model != NULL) {
            return cli_fail(CLI_USAGE, "replay: --bytes-a-token stands for --model and --profiles: "
                                       "leave one of them out");
        }
        replay->forms[0] = (struct form){.name = "given", .bytes_a_token = cli->bytes_a_token};
        replay->n_forms = 1;
        return CLI_OK;
    }
    code = cli_find_model(cli, "replay", cli->model, &model);
    while (code == CLI_OK && *list != '\0') {
        size_t bytes = strcspn(list, ",");
        char name[KVF_PROFILE_NAME_BYTES];

        if (replay->n_forms == PROFILES_MAX) {
            return cli_fail(CLI_USAGE, "--profiles: more than %d", PROFILES_MAX);
        }
        (void)snprintf(name, sizeof(name), "%.*s", (int)bytes, list);
        code = add_form(replay, &model, name);
        list += bytes + (list[bytes] == ',' ? 1 : 0);
    }
    return code;
}

static int run_cases(struct replay *replay)
{
    uint32_t n = replay->n_forms * replay->dram.n * replay->nvme.n;
    int code = CLI_OK;

    if (n > CASES_MAX) {
        return cli_fail(CLI_USAGE, "replay: %u profiles and sizes, at most %d", n, CASES_MAX);
    }
    replay->cases = calloc(n, sizeof(*replay->cases));
    if (replay->cases == NULL) {
        return cli_fail(CLI_FAILED, "out of memory");
    }
    for (uint32_t i = 0; i < n && code == CLI_OK; i++) {
        const struct form *form = &replay->forms[i / (replay->dram.n * replay->nvme.n)];
        struct cli_store_case *store = &replay->cases[i];

        store->profile = form->name;
        store->bytes_a_token = form->bytes_a_token;
        cli_case_init(replay->cli, &replay->trace, form->chunk_tokens,
                      replay->dram.bytes[i / replay->nvme.n % replay->dram.n],
                      replay->nvme.bytes[i % replay->nvme.n], store);
        code = cli_case_run(&replay->trace, store, NULL, NULL);
        replay->n_cases += code == CLI_OK;
    }
    return code;
}

static double percent(double part, double whole)
{
    return whole > 0 ? 100 * part / whole : 0;
}

static void print_text(const struct replay *replay)
{
    const struct kvf_trace *trace = &replay->trace;
    double tokens = (double)trace->input_tokens;

    printf("%llu prompts, %llu tokens in blocks of %u, %.0f s\n\n",
           (unsigned long long)trace->n_requests, (unsigned long long)trace->input_tokens,
           trace->block_tokens, (double)trace->span_ns / (double)KVF_NS_PER_S);
    printf("%-12s %11s %10s %10s %9s %9s %9s %11s %11s %11s\n", "profile", "bytes/token", "dram",
           "nvme", "hit dram", "hit nvme", "miss", "fetched", "stored", "to nvme");
    for (uint32_t i = 0; i < replay->n_cases; i++) {
        const struct cli_store_case *store = &replay->cases[i];
        double dram = percent((double)store->tokens_dram, tokens);
        double nvme = percent((double)store->tokens_nvme, tokens);
        char sizes[5][32];

        printf("%-12s %11.0f %10s %10s %8.2f%% %8.2f%% %8.2f%% %11s %11s %11s\n", store->profile,
               store->bytes_a_token,
               cli_bytes_text(store->config.dram_bytes, sizes[0], sizeof(sizes[0])),
               cli_bytes_text(store->config.nvme_bytes, sizes[1], sizeof(sizes[1])), dram, nvme,
               100 - dram - nvme,
               cli_bytes_text((uint64_t)store->hit_bytes, sizes[2], sizeof(sizes[2])),
               cli_bytes_text((uint64_t)store->put_bytes, sizes[3], sizeof(sizes[3])),
               cli_bytes_text((uint64_t)store->written_bytes, sizes[4], sizeof(sizes[4])));
    }
}

static json_t *case_json(const struct cli_store_case *store)
{
    const struct kvf_replay_counts *counts = &store->counts;

    return json_pack(
        "{s:s, s:f, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I,"
        " s:I, s:f, s:f, s:f}",
        "profile", store->profile, "bytes_a_token", store->bytes_a_token, "record_bytes",
        (json_int_t)store->config.record_bytes, "dram_bytes", (json_int_t)store->config.dram_bytes,
        "nvme_bytes", (json_int_t)store->config.nvme_bytes, "write_budget",
        (json_int_t)store->config.write_budget, "dram_blocks",
        (json_int_t)kvf_replay_dram_blocks(&store->config), "nvme_blocks",
        (json_int_t)kvf_replay_nvme_blocks(&store->config), "tokens_dram",
        (json_int_t)store->tokens_dram, "tokens_nvme", (json_int_t)store->tokens_nvme, "blocks",
        (json_int_t)counts->blocks, "hits_dram", (json_int_t)counts->hits_dram, "hits_nvme",
        (json_int_t)counts->hits_nvme, "puts", (json_int_t)counts->puts, "writes",
        (json_int_t)counts->writes, "reinserted", (json_int_t)counts->reinserted, "rejected",
        (json_int_t)counts->rejected, "evicted", (json_int_t)counts->evicted, "reclaimed",
        (json_int_t)counts->reclaimed, "fetched_bytes", store->hit_bytes, "stored_bytes",
        store->put_bytes, "written_bytes", store->written_bytes);
}

static void print_json(const struct replay *replay)
{
    static const char *const admissions[] = {"auto", "all", "second-sight"};
    json_t *rows = json_array();

    for (uint32_t i = 0; i < replay->n_cases; i++) {
        json_array_append_new(rows, case_json(&replay->cases[i]));
    }
    cli_print_json(json_pack(
        "{s:I, s:I, s:I, s:I, s:f, s:s, s:o}", "requests", (json_int_t)replay->trace.n_requests,
        "tokens", (json_int_t)replay->trace.input_tokens, "blocks",
        (json_int_t)replay->trace.n_blocks, "block_tokens", (json_int_t)replay->trace.block_tokens,
        "seconds", (double)replay->trace.span_ns / (double)KVF_NS_PER_S, "admission",
        admissions[replay->cli->admission], "rows", rows));
}

int cli_replay(const struct cli *cli)
{
    struct replay replay = {.cli = cli};
    int code;

    if (cli->file == NULL) {
        return cli_fail(CLI_USAGE, "replay: name a trace, or - for standard input");
    }
    if (cli->dram == NULL) {
        return cli_fail(CLI_USAGE, "replay: --dram is needed, as 64GiB or 16GiB,64GiB");
    }
    code = cli_parse_sizes("dram", cli->dram, &replay.dram);
    if (code == CLI_OK) {
        code = cli_parse_sizes("nvme", cli->nvme != NULL ? cli->nvme : "0", &replay.nvme);
    }
    if (code == CLI_OK) {
        code = add_forms(&replay);
    }
    if (code == CLI_OK) {
        code = cli_read_trace(cli, cli->file, &replay.trace);
    }
    if (code == CLI_OK) {
        code = run_cases(&replay);
    }
    if (code == CLI_OK && cli->is_json) {
        print_json(&replay);
    } else if (code == CLI_OK) {
        print_text(&replay);
    }
    free(replay.cases);
    kvf_trace_free(&replay.trace);
    return code;
}
