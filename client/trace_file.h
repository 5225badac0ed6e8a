/* SPDX-License-Identifier: Apache-2.0
 *
 * trace_file.h: traces of prompts, as JSON lines:
 *
 *   {"timestamp": MS, "input_length": TOKENS, "output_length": TOKENS, "hash_ids": [N, ...]}
 *
 * This is what Mooncake publishes (blocks of 512 tokens) and what kvferry trace record writes; the
 * latter has a line before the others that says so:
 *
 *   {"format": "kvferry-trace", "version": 1, "block_tokens": TOKENS}
 *
 * A number of hash_ids stands for a block and all blocks before it. Other members of a line are
 * left alone.
 */
#ifndef KVF_CLIENT_TRACE_FILE_H
#define KVF_CLIENT_TRACE_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "kvferry.h"

#define KVF_TRACE_FORMAT "kvferry-trace"

enum kvf_trace_limits {
    KVF_TRACE_VERSION = 1,
    KVF_TRACE_BLOCK_TOKENS = 512, /* of a trace that does not say */
    KVF_TRACE_LINE_BYTES = 16 << 20,
    KVF_TRACE_TOKENS_MAX = 1 << 26, /* of a prompt */
    KVF_TRACE_REQUESTS_MAX = 1 << 26,
    KVF_TRACE_WHY_BYTES = 512,
};

struct kvf_trace_request {
    uint64_t at_ns; /* since the first */
    uint64_t first; /* of its blocks, in blocks */
    uint32_t n_blocks;
    uint32_t input_tokens;
    uint32_t output_tokens;
};

struct kvf_trace {
    uint32_t block_tokens;
    struct kvf_trace_request *requests;
    uint64_t n_requests;
    uint64_t *blocks;
    uint64_t n_blocks;
    uint64_t input_tokens;
    uint64_t span_ns;
};

/* Read path ("-": standard input). block_tokens 0: what the file says, or 512. why_out
 * (KVF_TRACE_WHY_BYTES): "PATH:LINE: what; cure". The trace is the caller's to free in any case.
 * KVF_OK; KVF_ERR_IO; KVF_ERR_INVALID: a line; KVF_ERR_NO_MEMORY. */
int kvf_trace_read(const char *path, uint32_t block_tokens, struct kvf_trace *trace_out,
                   char why_out[KVF_TRACE_WHY_BYTES]);

void kvf_trace_free(struct kvf_trace *trace);

#endif /* KVF_CLIENT_TRACE_FILE_H */
