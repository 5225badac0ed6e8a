/* SPDX-License-Identifier: Apache-2.0
 *
 * cli_plan.c: kvferry plan: bytes and times of a prompt by profile, beside computing it again.
 */
#include <stdio.h>
#include <string.h>

#include "client/cli_plan.h"

#define PROFILES_DEFAULT                                                                           \
    "raw,exact,safe,balanced,dense,saw3-search9,tq3,x8,x4,x3,x2,xcl4,xcl3,xcl2,xgcl4,xgcl3,xgcl2"

#define PROFILES_OF_STORES "raw,exact,balanced,dense"

enum {
    TOKENS_DEFAULT = 4096,
};

/* One profile of the list. Those of the default list that have no form for the model are left out,
 * those that were named say so. */
static int add_row(struct cli_plan *plan, const char *name, bool is_named)
{
    struct cli_plan_row row = {.profile = kvf_profile_find(name)};

    if (row.profile == NULL || row.profile->opaque) {
        return cli_fail(CLI_USAGE, "--profiles: '%s' is no profile of K and V or X of this release",
                        name);
    }
    row.status = kvf_cost_of(&plan->model, row.profile, &plan->rates, plan->n_tokens, &row.cost);
    if (row.status != KVF_OK && is_named) {
        return cli_fail(CLI_FAILED,
                        "profile %s has no form for this model: X has %u elements a token and "
                        "layer, K and V have %u",
                        name, plan->model.d_model,
                        plan->model.n_heads * (plan->model.dim_k + plan->model.dim_v));
    }
    if (row.status == KVF_OK) {
        plan->rows[plan->n_rows++] = row;
    }
    return CLI_OK;
}

static int add_rows(struct cli_plan *plan)
{
    const char *usual = plan->cli->trace != NULL ? PROFILES_OF_STORES : PROFILES_DEFAULT;
    const char *list = plan->cli->profiles != NULL ? plan->cli->profiles : usual;
    int code = CLI_OK;

    while (code == CLI_OK && *list != '\0') {
        size_t bytes = strcspn(list, ",");
        char name[KVF_PROFILE_NAME_BYTES];

        if (plan->n_rows == CLI_PLAN_ROWS_MAX) {
            return cli_fail(CLI_USAGE, "--profiles: more than %d", CLI_PLAN_ROWS_MAX);
        }
        snprintf(name, sizeof(name), "%.*s", (int)bytes, list);
        code = add_row(plan, name, plan->cli->profiles != NULL);
        list += bytes + (list[bytes] == ',' ? 1 : 0);
    }
    return code;
}

/* The fastest row; NULL: computing again is faster than all. */
static const struct cli_plan_row *choose(const struct cli_plan *plan, bool is_lossless)
{
    const struct cli_plan_row *best = NULL;
    double least_s = plan->recompute_s;

    for (uint32_t i = 0; i < plan->n_rows; i++) {
        const struct cli_plan_row *row = &plan->rows[i];

        if ((!is_lossless || row->profile->lossless) && row->cost.total_s < least_s) {
            best = row;
            least_s = row->cost.total_s;
        }
    }
    return best;
}

static const char *name_of(const struct cli_plan_row *row)
{
    return row != NULL ? row->profile->name : "recompute";
}

static const char *kind_text(const struct cli_plan *plan, const struct cli_plan_row *row)
{
    switch (kvf_cost_kind(&plan->model, row->profile)) {
    case KVF_KIND_X:
        return "X";
    case KVF_KIND_XG:
        return "latent";
    default:
        return "KV";
    }
}

static void print_text(const struct cli_plan *plan)
{
    const struct kvf_weights_model *m = &plan->model;

    printf("%u layers, %u elements of X, %u of K and V (%u heads of %u + %u), %u tokens, "
           "%.1f GB/s, %.0f TFLOP/s\n\n",
           m->n_layers, m->d_model, m->n_heads * (m->dim_k + m->dim_v), m->n_heads, m->dim_k,
           m->dim_v, plan->n_tokens, plan->rates.link_bytes_per_s * 1e-9,
           plan->rates.flop_per_s * 1e-12);
    printf("%-14s %-7s %-8s %14s %7s %10s %10s %10s %10s\n", "profile", "stores", "", "bytes/token",
           "ratio", "fetch ms", "rebuild ms", "total ms", "break-even");
    for (uint32_t i = 0; i < plan->n_rows; i++) {
        const struct cli_plan_row *row = &plan->rows[i];
        double kv_bytes = 2.0 * m->n_layers * m->n_heads * (m->dim_k + m->dim_v);
        char tokens[16] = "never";

        if (row->cost.break_even_tokens != 0) {
            snprintf(tokens, sizeof(tokens), "%u", row->cost.break_even_tokens);
        }
        printf("%-14s %-7s %-8s %s%12.1f %7.2f %10.2f %10.2f %10.2f %10s\n", row->profile->name,
               kind_text(plan, row), row->profile->lossless ? "lossless" : "lossy",
               row->cost.is_bound ? "<=" : "  ", row->cost.bytes_a_token,
               kv_bytes / row->cost.bytes_a_token, row->cost.fetch_s * 1e3,
               row->cost.rebuild_s * 1e3, row->cost.total_s * 1e3, tokens);
    }
    printf("%-14s %-7s %-8s %14s %7s %10s %10s %10.2f\n\n", "recompute", "", "", "", "", "", "",
           plan->recompute_s * 1e3);
    printf("least time: %s; without loss: %s\n", name_of(choose(plan, false)),
           name_of(choose(plan, true)));
}

static json_t *row_json(const struct cli_plan *plan, const struct cli_plan_row *row)
{
    const struct kvf_cost *cost = &row->cost;
    json_t *json = json_pack(
        "{s:s, s:s, s:b, s:b, s:i, s:f, s:f, s:f, s:f, s:f}", "profile", row->profile->name,
        "stores", kind_text(plan, row), "lossless", (int)row->profile->lossless, "is_bound",
        (int)cost->is_bound, "chunk_tokens", (int)cost->chunk_tokens, "bytes_a_token",
        cost->bytes_a_token, "bytes", cost->bytes, "fetch_ms", cost->fetch_s * 1e3, "rebuild_ms",
        cost->rebuild_s * 1e3, "total_ms", cost->total_s * 1e3);

    if (json != NULL) {
        json_object_set_new(json, "break_even_tokens",
                            cost->break_even_tokens != 0
                                ? json_integer((json_int_t)cost->break_even_tokens)
                                : json_null());
    }
    return json;
}

/* stores: of --trace, or NULL; taken over. */
static void print_json(const struct cli_plan *plan, json_t *stores)
{
    const struct kvf_weights_model *m = &plan->model;
    json_t *rows = json_array();

    for (uint32_t i = 0; i < plan->n_rows; i++) {
        json_array_append_new(rows, row_json(plan, &plan->rows[i]));
    }
    json_t *json = json_pack(
        "{s:{s:i, s:i, s:i, s:i, s:i, s:i, s:i}, s:i, s:f, s:f, s:f, s:f, s:o, s:s, s:s}", "model",
        "layers", (int)m->n_layers, "d_model", (int)m->d_model, "query_heads",
        (int)m->n_query_heads, "heads", (int)m->n_heads, "dim_k", (int)m->dim_k, "dim_v",
        (int)m->dim_v, "ffn_width", (int)m->ffn_width, "tokens", (int)plan->n_tokens, "link_gbs",
        plan->rates.link_bytes_per_s * 1e-9, "tflops", plan->rates.flop_per_s * 1e-12, "fixed_ms",
        plan->rates.fixed_s * 1e3, "recompute_ms", plan->recompute_s * 1e3, "rows", rows, "choice",
        name_of(choose(plan, false)), "choice_lossless", name_of(choose(plan, true)));

    if (json != NULL && stores != NULL) {
        json_object_set(json, "stores", stores);
    }
    json_decref(stores);
    cli_print_json(json);
}

int cli_plan(const struct cli *cli)
{
    struct cli_plan plan = {
        .cli = cli,
        .rates = {.link_bytes_per_s = cli->link_gbs * 1e9,
                  .flop_per_s = cli->tflops * 1e12,
                  .fixed_s = cli->fixed_ms * 1e-3},
        .n_tokens = cli->tokens != 0 ? (uint32_t)cli->tokens : TOKENS_DEFAULT,
    };
    int code;

    if (cli->link_gbs <= 0 || cli->tflops <= 0) {
        return cli_fail(CLI_USAGE, "plan: --link and --tflops are needed, as measured");
    }
    if (cli->trace == NULL && (cli->dram != NULL || cli->nvme != NULL || cli->drive_gbs > 0 ||
                               cli->dwpd > 0 || cli->write_budget != 0)) {
        return cli_fail(CLI_USAGE, "plan: --dram, --nvme, --drive, --dwpd and --write-budget say "
                                   "what a store is worth for a trace: name one by --trace");
    }
    code = cli_find_model(cli, "plan", cli->file, &plan.model);
    if (code == CLI_OK) {
        plan.recompute_s = kvf_cost_recompute_s(&plan.model, &plan.rates, plan.n_tokens);
        code = add_rows(&plan);
    }
    if (code == CLI_OK && cli->is_json) {
        json_t *stores = NULL;

        code = cli->trace != NULL ? cli_plan_store(&plan, &stores) : CLI_OK;
        if (code == CLI_OK) {
            print_json(&plan, stores);
        } else {
            json_decref(stores);
        }
    } else if (code == CLI_OK) {
        print_text(&plan);
        code = cli->trace != NULL ? cli_plan_store(&plan, NULL) : CLI_OK;
    }
    return code;
}
