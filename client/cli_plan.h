/* SPDX-License-Identifier: Apache-2.0
 *
 * cli_plan.h: the two halves of kvferry plan: one prompt by profile (cli_plan.c), and a store for a
 * trace of prompts (cli_plan_store.c).
 */
#ifndef KVF_CLIENT_CLI_PLAN_H
#define KVF_CLIENT_CLI_PLAN_H

#include "client/cli_store.h"

enum {
    CLI_PLAN_ROWS_MAX = 64
};

struct cli_plan_row {
    const struct kvf_profile *profile;
    struct kvf_cost cost;
    int status;
};

struct cli_plan {
    const struct cli *cli;
    struct kvf_weights_model model;
    struct kvf_cost_rates rates;
    uint32_t n_tokens;
    double recompute_s;
    struct cli_plan_row rows[CLI_PLAN_ROWS_MAX];
    uint32_t n_rows;
    uint64_t dram_bytes, nvme_bytes; /* with --trace */
};

/* What a store is worth for --trace, by the plan's rows: printed, or (rows_out not NULL) as JSON,
 * which is the caller's in any case. CLI_OK, or an exit code after saying why. */
int cli_plan_store(struct cli_plan *plan, json_t **rows_out);

#endif /* KVF_CLIENT_CLI_PLAN_H */
