/* SPDX-License-Identifier: Apache-2.0
 *
 * cli_store.c: a trace against the daemon's own index, admission and eviction (agent/replay.h).
 */
#include "client/cli_store.h"

#include <stdio.h>
#include <string.h>

#include "base/limits.h"
#include "base/log.h"
#include "base/parse.h"
#include "codec/block_format.h"

static bool ends_with(const char *text, const char *end)
{
    size_t text_bytes = strlen(text);
    size_t end_bytes = strlen(end);

    return text_bytes >= end_bytes && strcmp(text + text_bytes - end_bytes, end) == 0;
}

int cli_find_model(const struct cli *cli, const char *command, const char *path,
                   struct kvf_weights_model *m)
{
    char why[KVF_WEIGHTS_WHY_BYTES];
    const struct {
        uint64_t value;
        uint32_t *to;
    } fields[] = {
        {cli->shape.layers, &m->n_layers},     {cli->shape.d_model, &m->d_model},
        {cli->shape.heads, &m->n_heads},       {cli->shape.query_heads, &m->n_query_heads},
        {cli->shape.dim, &m->dim_k},           {cli->shape.dim, &m->dim_v},
        {cli->shape.ffn_width, &m->ffn_width},
    };
    int status = KVF_OK;

    if (path != NULL && (ends_with(path, ".gguf") || ends_with(path, ".safetensors"))) {
        struct kvf_weights *weights = NULL;

        status = kvf_weights_open(path, &weights, why);
        if (status == KVF_OK) {
            *m = weights->model;
        }
        kvf_weights_close(weights);
    } else if (path != NULL) {
        status = kvf_weights_model_read(path, m, why);
    }
    if (status != KVF_OK) {
        return cli_fail(CLI_FAILED, "%s: %s", path, why);
    }
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        if (fields[i].value != 0) {
            *fields[i].to = (uint32_t)fields[i].value;
        }
    }
    if (m->n_query_heads == 0) {
        m->n_query_heads = m->n_heads;
    }
    if (kvf_weights_check_model(m, why) != KVF_OK) {
        return cli_fail(CLI_USAGE,
                        "%s: name a model, or give --layers, --d-model, --heads and --dim (%s)",
                        command, why);
    }
    return CLI_OK;
}

int cli_parse_sizes(const char *name, const char *text, struct cli_sizes *sizes_out)
{
    char detail[256];

    sizes_out->n = 0;
    while (*text != '\0') {
        size_t bytes = strcspn(text, ",");
        char word[64];

        if (sizes_out->n == CLI_SIZES_MAX) {
            return cli_fail(CLI_USAGE, "--%s: more than %d sizes", name, CLI_SIZES_MAX);
        }
        (void)snprintf(word, sizeof(word), "%.*s", (int)(bytes < 63 ? bytes : 63), text);
        if (kvf_parse_size(word, &sizes_out->bytes[sizes_out->n++], detail, sizeof(detail)) !=
            KVF_OK) {
            return cli_fail(CLI_USAGE, "--%s: %s", name, detail);
        }
        text += bytes + (text[bytes] == ',' ? 1 : 0);
    }
    return sizes_out->n != 0 ? CLI_OK : cli_fail(CLI_USAGE, "--%s: no size", name);
}

void cli_case_init(const struct cli *cli, const struct kvf_trace *trace, uint32_t chunk_tokens,
                   uint64_t dram_bytes, uint64_t nvme_bytes, struct cli_store_case *store_out)
{
    uint32_t records = chunk_tokens == 0 ? 1
                                         : (trace->block_tokens + chunk_tokens - 1) / chunk_tokens;

    store_out->config = (struct kvf_replay_config){
        .record_bytes = (uint64_t)(store_out->bytes_a_token * trace->block_tokens + 0.5) +
                        (uint64_t)records * KVF_RECORD_PAGE_BYTES,
        .dram_bytes = dram_bytes,
        .nvme_bytes = nvme_bytes,
        .write_budget = nvme_bytes != 0 ? cli->write_budget : 0,
        .admission = cli->admission,
    };
}

/* Leading tokens of a prompt in its leading blocks. */
static uint32_t tokens_of(const struct kvf_trace *trace, const struct kvf_trace_request *request,
                          uint32_t blocks)
{
    uint64_t tokens = (uint64_t)blocks * trace->block_tokens;

    return tokens < request->input_tokens ? (uint32_t)tokens : request->input_tokens;
}

static int replay_all(const struct kvf_trace *trace, struct cli_store_case *store,
                      struct kvf_replay *replay, cli_case_fn see, void *arg)
{
    int status = KVF_OK;

    for (uint64_t i = 0; i < trace->n_requests && status == KVF_OK; i++) {
        const struct kvf_trace_request *request = &trace->requests[i];
        struct kvf_replay_hits hits = {0};
        uint32_t all, dram;

        status = kvf_replay_request(replay, request->at_ns, trace->blocks + request->first,
                                    request->n_blocks, &hits);
        /* which of a run's blocks were where does not matter: all but the last are of one size */
        all = tokens_of(trace, request, hits.dram + hits.nvme);
        dram = hits.nvme == 0 ? all : tokens_of(trace, request, hits.dram);
        store->tokens_dram += dram;
        store->tokens_nvme += all - dram;
        if (see != NULL) {
            see(arg, request, dram, all - dram);
        }
    }
    return status;
}

int cli_case_run(const struct kvf_trace *trace, struct cli_store_case *store, cli_case_fn see,
                 void *arg)
{
    char why[KVF_ERROR_TEXT_BYTES] = "";
    struct kvf_replay *replay;
    double record = (double)store->config.record_bytes;
    int status;

    kvf_log_init(kvf_log_stderr_sink, NULL, KVF_LOG_WARNING);
    status = kvf_replay_open(&store->config, &replay, why, sizeof(why));
    if (status == KVF_ERR_CONFIG) {
        return cli_fail(CLI_USAGE, "%s: %s", store->profile, why);
    }
    if (status != KVF_OK) {
        return cli_fail(CLI_FAILED, "replay: %s: %s", kvf_status_name(status), why);
    }
    status = replay_all(trace, store, replay, see, arg);
    kvf_replay_counts(replay, &store->counts);
    kvf_replay_close(replay);
    store->hit_bytes = record * (double)(store->counts.hits_dram + store->counts.hits_nvme);
    store->put_bytes = record * (double)store->counts.puts;
    store->written_bytes = record * (double)store->counts.writes;
    return status == KVF_OK ? CLI_OK
                            : cli_fail(CLI_FAILED, "replay: the agent does not answer any more");
}

int cli_read_trace(const struct cli *cli, const char *path, struct kvf_trace *trace_out)
{
    char why[KVF_TRACE_WHY_BYTES];

    return kvf_trace_read(path, (uint32_t)cli->block_tokens, trace_out, why) == KVF_OK
               ? CLI_OK
               : cli_fail(CLI_FAILED, "%s", why);
}
