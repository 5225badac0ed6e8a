/* SPDX-License-Identifier: Apache-2.0
 *
 * llama_engine.h: requests one after the other on one thread: the longest prefix that a slot still
 * has or the daemon has stored, the rest computed, tokens by the largest logit.
 *
 *   create -> submit from any thread, which blocks until the answer ... -> stop -> destroy
 */
#ifndef KVF_CONNECTORS_LLAMA_ENGINE_H
#define KVF_CONNECTORS_LLAMA_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "connectors/llama.cpp/llama_model.h"

enum {
    KVF_LLAMA_SLOTS_MAX = 64,
    KVF_LLAMA_QUEUE_MAX = 256, /* requests that wait */
};

/* Which chunks are stored. */
enum kvf_llama_store {
    KVF_LLAMA_STORE_NONE = 0,
    KVF_LLAMA_STORE_PROMPT = 1,
    KVF_LLAMA_STORE_ALL = 2, /* of answers too */
};

struct kvf_llama_engine_options {
    struct kvf_llama_model_options model;
    const char *socket_path; /* NULL: the library's default */
    const char *profile;
    const char *label;
    bool allow_uncalibrated;
    enum kvf_llama_store store;
    uint32_t load_budget_ms;
};

struct kvf_llama_request {
    const int32_t *prompt; /* the caller's until the answer */
    uint32_t n_prompt;
    uint32_t n_predict; /* 0: only compute the prompt */
    bool load;          /* ask the daemon */
    bool store;         /* give it chunks, where the engine stores any */
    uint32_t budget_ms; /* of the load */
};

struct kvf_llama_answer {
    int32_t *tokens; /* [n_tokens], to be freed */
    float *logprobs; /* [n_tokens], to be freed */
    uint32_t n_tokens;
    bool is_ended;         /* by the model, not by n_predict */
    uint32_t hit_tokens;   /* of the prompt, from the daemon */
    uint32_t local_tokens; /* of the prompt, from the slot; one of the two is 0 */
    const char *tier;      /* "dram", "nvme", "remote", "hbm"; "": no hit. Static storage */
    char profile[KVF_PROFILE_NAME_BYTES];
    double first_token_s; /* from submit; 0: none */
    double total_s;
};

struct kvf_llama_engine_facts {
    char model[128];
    uint32_t n_vocab;
    uint32_t context_tokens;
    uint32_t chunk_tokens;
    uint32_t waiting; /* requests that have not begun */
    uint64_t requests;
    uint64_t prompt_tokens;
    uint64_t hit_tokens;
    uint64_t local_tokens;
    uint64_t stored_chunks;
    uint64_t present_chunks;
    uint64_t refused_chunks;
};

struct kvf_llama_engine;

/* Opens the model and starts the thread; the daemon need not be there. KVF_OK; else as
 * kvf_llama_model_open. Blocks. */
int kvf_llama_engine_create(const struct kvf_llama_engine_options *options,
                            struct kvf_llama_engine **engine_out, char why[KVF_LLAMA_WHY_BYTES]);

/* Do a request. Any thread; blocks until it is done. KVF_OK; KVF_ERR_INVALID: too long for a slot,
 * or a token that there is not; KVF_ERR_BUSY: too many wait; KVF_ERR_CANCELED: the engine stops;
 * KVF_ERR_IO: llama.cpp failed; KVF_ERR_NO_MEMORY. why is written unless KVF_OK, and then there is
 * nothing to free in the answer. */
int kvf_llama_engine_submit(struct kvf_llama_engine *engine,
                            const struct kvf_llama_request *request,
                            struct kvf_llama_answer *answer_out, char why[KVF_LLAMA_WHY_BYTES]);

void kvf_llama_answer_free(struct kvf_llama_answer *answer);

/* Text to tokens, to be freed, with what the model begins a text with. KVF_OK;
 * KVF_ERR_INVALID, _NO_MEMORY. Any thread. */
int kvf_llama_engine_tokens(const struct kvf_llama_engine *engine, const char *text, size_t bytes,
                            int32_t **tokens_out, uint32_t *n_tokens_out);

/* Tokens to text of *bytes_out bytes, which may be cut within a character; to be freed. NULL: no
 * memory. Any thread. */
char *kvf_llama_engine_text(const struct kvf_llama_engine *engine, const int32_t *tokens,
                            uint32_t n_tokens, size_t *bytes_out);

/* Any thread. */
void kvf_llama_engine_facts(struct kvf_llama_engine *engine,
                            struct kvf_llama_engine_facts *facts_out);

/* End all requests with KVF_ERR_CANCELED, that which runs at its next batch or token, and refuse
 * new ones. Does not wait. Any thread. */
void kvf_llama_engine_stop(struct kvf_llama_engine *engine);

/* After stop, and after all submits have returned. Accepts NULL. */
void kvf_llama_engine_destroy(struct kvf_llama_engine *engine);

#endif /* KVF_CONNECTORS_LLAMA_ENGINE_H */
