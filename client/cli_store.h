/* SPDX-License-Identifier: Apache-2.0
 *
 * cli_store.h: what replay and plan share: the model, the sizes of a store, and a trace replayed
 * against one of them.
 */
#ifndef KVF_CLIENT_CLI_STORE_H
#define KVF_CLIENT_CLI_STORE_H

#include "agent/replay.h"
#include "client/cli.h"
#include "client/cost.h"
#include "client/trace_file.h"

enum {
    CLI_SIZES_MAX = 16
};

struct cli_sizes {
    uint64_t bytes[CLI_SIZES_MAX];
    uint32_t n;
};

/* One store and what a trace makes of it. */
struct cli_store_case {
    const char *profile;
    double bytes_a_token;
    struct kvf_replay_config config;
    struct kvf_replay_counts counts;
    uint64_t tokens_dram, tokens_nvme; /* of prompts, hit */
    double hit_bytes, put_bytes, written_bytes;
};

/* The model's shape: of path (NULL: none), with what the command line says in its place. CLI_OK, or
 * an exit code after saying what is missing. */
int cli_find_model(const struct cli *cli, const char *command, const char *path,
                   struct kvf_weights_model *model_out);

/* "16GiB,64GiB". CLI_OK, or an exit code after saying why. */
int cli_parse_sizes(const char *name, const char *text, struct cli_sizes *sizes_out);

/* The rest of a case from profile, bytes_a_token and sizes: chunk_tokens 0: one record a block. */
void cli_case_init(const struct cli *cli, const struct kvf_trace *trace, uint32_t chunk_tokens,
                   uint64_t dram_bytes, uint64_t nvme_bytes, struct cli_store_case *store_out);

/* Replay the trace. see, or NULL: told of every prompt. CLI_OK, or an exit code after saying
 * why. */
typedef void (*cli_case_fn)(void *arg, const struct kvf_trace_request *request,
                            uint32_t tokens_dram, uint32_t tokens_nvme);
int cli_case_run(const struct kvf_trace *trace, struct cli_store_case *store, cli_case_fn see,
                 void *arg);

/* The trace of --trace or of the command's file. CLI_OK, or an exit code after saying why; the
 * trace is the caller's to free in any case. */
int cli_read_trace(const struct cli *cli, const char *path, struct kvf_trace *trace_out);

#endif /* KVF_CLIENT_CLI_STORE_H */
