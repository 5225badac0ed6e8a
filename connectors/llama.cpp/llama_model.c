/* SPDX-License-Identifier: Apache-2.0
 *
 * llama_model.c: see llama_model.h.
 */
#include "connectors/llama.cpp/llama_model.h"

#include <llama.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "connectors/llama.cpp/llama_say.h"

enum {
    TRIAL_TOKENS = 3, /* one token's state could be of another form by chance */
};

static int refuse(char *why, int status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

static int refuse(char *why, int status, const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    vsnprintf(why, KVF_LLAMA_WHY_BYTES, fmt, args);
    va_end(args);
    return status;
}

/* llama.cpp tells what it does at length; of that, what went wrong. */
static void on_log(enum ggml_log_level level, const char *text, void *arg)
{
    size_t length = strcspn(text, "\n");

    (void)arg;
    if (level == GGML_LOG_LEVEL_ERROR && length > 0) {
        kvf_llama_say(1, "llama.cpp: %.*s", (int)length, text);
    }
}

static int version_check(bool allow_untested, char *why)
{
    const char *version = llama_version();

    if (strcmp(version, KVF_LLAMA_TESTED_VERSION) == 0) {
        return KVF_OK;
    }
    if (!allow_untested) {
        return refuse(why, KVF_ERR_UNSUPPORTED,
                      "llama.cpp %s has not been tested, %s has: take that, or start with "
                      "--allow-untested",
                      version, KVF_LLAMA_TESTED_VERSION);
    }
    kvf_llama_say(1, "llama.cpp %s has not been tested, %s has", version, KVF_LLAMA_TESTED_VERSION);
    return KVF_OK;
}

/* What of a model can be told without a context. */
static int model_check(const struct llama_model *model, char *why)
{
    enum llama_rope_type rope = llama_model_rope_type(model);
    char parts[32];

    if (llama_model_is_recurrent(model) || llama_model_is_hybrid(model)) {
        return refuse(why, KVF_ERR_UNSUPPORTED,
                      "the model has recurrent layers: their state is not K and V of tokens");
    }
    if (llama_model_n_swa(model) > 0) {
        return refuse(why, KVF_ERR_UNSUPPORTED,
                      "the model has sliding windows of %d tokens: what lies before them is not "
                      "kept, so that a prefix cannot be cut",
                      llama_model_n_swa(model));
    }
    if (llama_model_has_encoder(model) || llama_model_is_diffusion(model)) {
        return refuse(why, KVF_ERR_UNSUPPORTED,
                      "the model is no decoder that goes from token to token");
    }
    if (rope == LLAMA_ROPE_TYPE_MROPE || rope == LLAMA_ROPE_TYPE_IMROPE ||
        rope == LLAMA_ROPE_TYPE_VISION) {
        return refuse(why, KVF_ERR_UNSUPPORTED,
                      "the model has positions of several parts (M-RoPE): its cells are not known "
                      "here");
    }
    if (llama_model_meta_val_str(model, "split.count", parts, sizeof(parts)) > 0 &&
        strcmp(parts, "1") != 0) {
        return refuse(why, KVF_ERR_UNSUPPORTED,
                      "the model is in %s files: merge them (llama-gguf-split --merge), its name "
                      "is the digest of one",
                      parts);
    }
    return KVF_OK;
}

static int context_open(const struct kvf_llama_model_options *options,
                        struct kvf_llama_model *model, char *why)
{
    struct llama_context_params params = llama_context_default_params();

    params.n_ctx = options->n_slots * options->context_tokens;
    params.n_seq_max = options->n_slots;
    /* Room for a whole chunk in one batch that llama.cpp does not split: the last bits of K and V
     * depend on how many tokens are computed at once. llama_engine.c ends batches where chunks
     * end, so a chunk that begins as its batch does has the same bytes in every prompt. */
    params.n_batch = options->chunk_tokens;
    params.n_ubatch = options->chunk_tokens;
    params.n_threads = (int32_t)options->n_threads;
    params.n_threads_batch = (int32_t)options->n_threads;
    /* rows of V are those of tokens only so */
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.type_k = (enum ggml_type)options->kv_type;
    params.type_v = (enum ggml_type)options->kv_type;
    /* Each slot has cells of its own, in the order of its tokens: in a common pool they would lie
     * elsewhere each time, and sums be taken in another order. */
    params.kv_unified = false;
    params.offload_kqv = false;
    model->context = llama_init_from_model(model->model, params);
    if (model->context == NULL) {
        return refuse(why, KVF_ERR_UNSUPPORTED,
                      "llama.cpp makes no context of %u slots of %u tokens with flash attention: "
                      "what it says is above",
                      options->n_slots, options->context_tokens);
    }
    if (llama_get_memory(model->context) == NULL) {
        return refuse(why, KVF_ERR_UNSUPPORTED, "the model keeps no K and V");
    }
    model->context_tokens = llama_n_ctx_seq(model->context);
    if (llama_n_ubatch(model->context) != options->chunk_tokens) {
        return refuse(why, KVF_ERR_UNSUPPORTED,
                      "llama.cpp computes %u tokens at once, not the %u of a chunk: set "
                      "--chunk-tokens to that",
                      llama_n_ubatch(model->context), options->chunk_tokens);
    }
    return KVF_OK;
}

int kvf_llama_model_decode(struct kvf_llama_model *model, int32_t sequence, const int32_t *tokens,
                           uint32_t first, uint32_t n_tokens, bool wants_logits, int *code_out)
{
    struct llama_batch batch = llama_batch_init((int32_t)n_tokens, 0, 1);

    for (uint32_t i = 0; i < n_tokens; i++) {
        batch.token[i] = tokens[i];
        batch.pos[i] = (llama_pos)(first + i);
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = sequence;
        batch.logits[i] = wants_logits && i + 1 == n_tokens;
    }
    batch.n_tokens = (int32_t)n_tokens;
    *code_out = llama_decode(model->context, batch);
    llama_batch_free(batch);
    return *code_out == 0 ? KVF_OK : KVF_ERR_IO;
}

/* Write a state of a few tokens, read it, cut it, set it, and compare what llama.cpp makes of it:
 * all that is done with states later on. */
static int trial(struct kvf_llama_model *model, char *why)
{
    const int32_t tokens[TRIAL_TOKENS] = {0, 1 % (int32_t)model->n_vocab,
                                          2 % (int32_t)model->n_vocab};
    llama_memory_t memory = llama_get_memory(model->context);
    uint8_t *data = NULL;
    uint8_t *again = NULL;
    size_t bytes;
    size_t left;
    struct kvf_llama_found found = {0};
    int status;
    int code;

    status = kvf_llama_model_decode(model, 0, tokens, 0, TRIAL_TOKENS, false, &code);
    if (status != KVF_OK) {
        return refuse(why, KVF_ERR_UNSUPPORTED, "llama_decode answers %d to three tokens", code);
    }
    bytes = llama_state_seq_get_size(model->context, 0);
    data = malloc(bytes + 1);
    again = malloc(bytes + 1);
    if (data == NULL || again == NULL) {
        status = refuse(why, KVF_ERR_NO_MEMORY, "no memory");
        goto done;
    }
    bytes = llama_state_seq_get_data(model->context, data, bytes, 0);
    status = kvf_llama_state_parse(data, bytes, &found, why);
    if (status != KVF_OK) {
        status = KVF_ERR_UNSUPPORTED;
        goto done;
    }
    model->shape = found.shape;
    if (found.n_tokens != TRIAL_TOKENS ||
        bytes != kvf_llama_state_bytes(&model->shape, TRIAL_TOKENS) ||
        (int32_t)model->shape.n_layers != llama_model_n_layer(model->model)) {
        status = refuse(why, KVF_ERR_UNSUPPORTED,
                        "a state of %d tokens and %d layers says it has %u and %u", TRIAL_TOKENS,
                        llama_model_n_layer(model->model), found.n_tokens, model->shape.n_layers);
        goto done;
    }
    /* sequence 0 is the first stream, as in states that are written here */
    kvf_llama_state_cut(&model->shape, TRIAL_TOKENS, TRIAL_TOKENS - 1, data);
    left = kvf_llama_state_bytes(&model->shape, TRIAL_TOKENS - 1);
    if (llama_state_seq_set_data(model->context, data, left, 0) != left ||
        llama_state_seq_get_data(model->context, again, bytes, 0) != left ||
        memcmp(data, again, left) != 0) {
        status = refuse(why, KVF_ERR_UNSUPPORTED,
                        "a state that is set does not read as it was written");
    }
done:
    free(data);
    free(again);
    llama_memory_seq_rm(memory, 0, 0, -1);
    return status;
}

int kvf_llama_model_open(const struct kvf_llama_model_options *options,
                         struct kvf_llama_model *model_out, char why[KVF_LLAMA_WHY_BYTES])
{
    struct llama_model_params params;
    struct kvf_llama_model model = {0};
    int status;

    llama_log_set(on_log, NULL);
    status = version_check(options->allow_untested, why);
    if (status != KVF_OK) {
        return status;
    }
    llama_backend_init();
    params = llama_model_default_params();
    params.n_gpu_layers = 0;
    model.model = llama_model_load_from_file(options->path, params);
    if (model.model == NULL) {
        return refuse(why, KVF_ERR_IO, "%s: llama.cpp cannot load it as a model", options->path);
    }
    model.vocab = llama_model_get_vocab(model.model);
    model.n_vocab = (uint32_t)llama_vocab_n_tokens(model.vocab);
    model.n_heads = (uint32_t)llama_model_n_head_kv(model.model);
    model.rope_state = llama_model_rope_type(model.model) == LLAMA_ROPE_TYPE_NONE ? KVF_ROPE_NONE
                                                                                  : KVF_ROPE_POST;
    llama_model_desc(model.model, model.name, sizeof(model.name));
    status = model_check(model.model, why);
    status = status != KVF_OK ? status : context_open(options, &model, why);
    status = status != KVF_OK ? status : trial(&model, why);
    if (status != KVF_OK) {
        kvf_llama_model_close(&model);
        return status;
    }
    *model_out = model;
    return KVF_OK;
}

void kvf_llama_model_close(struct kvf_llama_model *model)
{
    if (model->context != NULL) {
        llama_free(model->context);
    }
    if (model->model != NULL) {
        llama_model_free(model->model);
    }
    *model = (struct kvf_llama_model){0};
}
