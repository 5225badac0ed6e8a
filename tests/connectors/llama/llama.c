/* SPDX-License-Identifier: Apache-2.0
 *
 * llama.c: a stand-in for llama.cpp, with tokens for bytes and K and V that follow from all tokens
 * before. Rows of a token follow from those of the token before it, and the next token from all
 * rows: a state that is not what it was shows in the answer. States have llama.cpp's form.
 *
 * A model is a file of lines "name number"; the defaults are below, and what is not 0 of the last
 * ones makes a model or its states such as are not served.
 */
#include <llama.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    SEQUENCES_MAX = 64,
    VOCAB = 300,
    FIRST = 256,
    MAGIC_BYTES = 12
};

struct facts {
    int32_t layers, heads, dim, salt;
    int32_t sleep_ms; /* of each batch */
    int32_t fail_at;  /* position that cannot be computed */
    int32_t swa, recurrent, hybrid, encoder, diffusion, rope, parts, no_memory;
    int32_t type, transposed, no_v, behind, ubatch, odd_row, forgets;
};

struct llama_model {
    struct facts facts;
};

struct sequence {
    uint8_t *rows; /* [n_ctx][row] */
    uint32_t n;
};

struct llama_context {
    const struct llama_model *model;
    uint32_t n_ctx, n_ubatch, n_sequences;
    int32_t type;
    uint32_t side_bytes; /* of K, or of V, of a layer and token */
    uint32_t row_bytes;  /* of all of a token: K of each layer, then V */
    struct sequence sequences[SEQUENCES_MAX];
    float logits[VOCAB];
};

static ggml_log_callback log_fn;

static void say(const char *text)
{
    if (log_fn != NULL) {
        log_fn(GGML_LOG_LEVEL_ERROR, text, NULL);
    }
}

static uint64_t mix(uint64_t hash, const void *data, size_t bytes)
{
    const uint8_t *at = data;

    for (size_t i = 0; i < bytes; i++) {
        hash = (hash ^ at[i]) * 0x100000001b3ull;
    }
    return hash ^ (hash >> 29);
}

const char *llama_version(void)
{
    const char *version = getenv("KVF_STANDIN_VERSION");

    return version != NULL ? version : "0.5.0-dev";
}

void llama_log_set(ggml_log_callback callback, void *arg)
{
    (void)arg;
    log_fn = callback;
}

void llama_backend_init(void)
{
}

/* --- a model ---------------------------------------------------------------------------------- */

struct llama_model_params llama_model_default_params(void)
{
    return (struct llama_model_params){.n_gpu_layers = -1};
}

static bool fact_read(struct facts *f, const char *name, int32_t value)
{
    const struct {
        const char *name;
        int32_t *value;
    } known[] = {
        {"layers", &f->layers},
        {"heads", &f->heads},
        {"dim", &f->dim},
        {"salt", &f->salt},
        {"sleep_ms", &f->sleep_ms},
        {"fail_at", &f->fail_at},
        {"swa", &f->swa},
        {"recurrent", &f->recurrent},
        {"hybrid", &f->hybrid},
        {"encoder", &f->encoder},
        {"diffusion", &f->diffusion},
        {"rope", &f->rope},
        {"parts", &f->parts},
        {"type", &f->type},
        {"no_memory", &f->no_memory},
        {"transposed", &f->transposed},
        {"no_v", &f->no_v},
        {"behind", &f->behind},
        {"ubatch", &f->ubatch},
        {"odd_row", &f->odd_row},
        {"forgets", &f->forgets},
    };

    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        if (strcmp(known[i].name, name) == 0) {
            *known[i].value = value;
            return true;
        }
    }
    return false;
}

struct llama_model *llama_model_load_from_file(const char *path, struct llama_model_params params)
{
    struct llama_model *model = calloc(1, sizeof(*model));
    FILE *file = fopen(path, "r");
    char name[32];
    int value;
    bool good = model != NULL && file != NULL && params.n_gpu_layers == 0;

    if (good) {
        model->facts = (struct facts){.layers = 2, .heads = 2, .dim = 16, .fail_at = -1};
        while (good && fscanf(file, "%31s %d", name, &value) == 2) {
            good = fact_read(&model->facts, name, value);
        }
    }
    if (file != NULL) {
        fclose(file);
    }
    if (!good) {
        say("no such model\n");
        free(model);
        return NULL;
    }
    return model;
}

void llama_model_free(struct llama_model *model)
{
    free(model);
}

const struct llama_vocab *llama_model_get_vocab(const struct llama_model *model)
{
    return (const struct llama_vocab *)model;
}

enum llama_rope_type llama_model_rope_type(const struct llama_model *model)
{
    return (enum llama_rope_type)model->facts.rope;
}

int32_t llama_model_n_layer(const struct llama_model *model)
{
    return model->facts.layers;
}

int32_t llama_model_n_head_kv(const struct llama_model *model)
{
    return model->facts.heads;
}

int32_t llama_model_n_swa(const struct llama_model *model)
{
    return model->facts.swa;
}

bool llama_model_is_recurrent(const struct llama_model *model)
{
    return model->facts.recurrent != 0;
}

bool llama_model_is_hybrid(const struct llama_model *model)
{
    return model->facts.hybrid != 0;
}

bool llama_model_is_diffusion(const struct llama_model *model)
{
    return model->facts.diffusion != 0;
}

bool llama_model_has_encoder(const struct llama_model *model)
{
    return model->facts.encoder != 0;
}

int32_t llama_model_meta_val_str(const struct llama_model *model, const char *key, char *out,
                                 size_t bytes)
{
    if (strcmp(key, "split.count") != 0 || model->facts.parts == 0) {
        return -1;
    }
    return snprintf(out, bytes, "%d", model->facts.parts);
}

int32_t llama_model_desc(const struct llama_model *model, char *out, size_t bytes)
{
    return snprintf(out, bytes, "stand-in of %d layers", model->facts.layers);
}

/* --- tokens ----------------------------------------------------------------------------------- */

int32_t llama_vocab_n_tokens(const struct llama_vocab *vocab)
{
    (void)vocab;
    return VOCAB;
}

bool llama_vocab_is_eog(const struct llama_vocab *vocab, llama_token token)
{
    (void)vocab;
    return token == VOCAB - 1;
}

int32_t llama_tokenize(const struct llama_vocab *vocab, const char *text, int32_t bytes,
                       llama_token *tokens, int32_t room, bool add_special, bool parse_special)
{
    int32_t n = 0;

    (void)vocab;
    (void)parse_special;
    if (bytes + 1 > room) {
        return -(bytes + 1);
    }
    if (add_special) {
        tokens[n++] = FIRST;
    }
    for (int32_t i = 0; i < bytes; i++) {
        tokens[n++] = (uint8_t)text[i];
    }
    return n;
}

int32_t llama_detokenize(const struct llama_vocab *vocab, const llama_token *tokens, int32_t n,
                         char *text, int32_t room, bool remove_special, bool unparse_special)
{
    (void)vocab;
    (void)remove_special;
    (void)unparse_special;
    if (n > room) {
        return -n;
    }
    for (int32_t i = 0; i < n; i++) {
        text[i] = (char)(tokens[i] < FIRST ? tokens[i] : '#');
    }
    return n;
}

/* --- a context -------------------------------------------------------------------------------- */

struct llama_context_params llama_context_default_params(void)
{
    return (struct llama_context_params){
        .n_ctx = 512, .n_batch = 2048, .n_ubatch = 512, .n_seq_max = 1, .kv_unified = true};
}

struct llama_context *llama_init_from_model(struct llama_model *model,
                                            struct llama_context_params params)
{
    struct llama_context *context = calloc(1, sizeof(*context));
    const struct facts *f = &model->facts;

    /* the server relies on these */
    if (context == NULL || params.kv_unified || params.offload_kqv ||
        params.flash_attn_type != LLAMA_FLASH_ATTN_TYPE_ENABLED || params.n_threads < 1 ||
        params.n_seq_max > SEQUENCES_MAX || params.type_k != params.type_v) {
        say("no such context\n");
        free(context);
        return NULL;
    }
    context->model = model;
    context->n_sequences = params.n_seq_max;
    context->n_ctx = params.n_ctx / params.n_seq_max;
    context->n_ubatch = f->ubatch != 0 ? (uint32_t)f->ubatch : params.n_ubatch;
    context->type = f->type != 0 ? f->type : (int32_t)params.type_k;
    context->side_bytes = (uint32_t)(f->heads * f->dim + f->odd_row) *
                          (params.type_k == GGML_TYPE_F32 ? 4 : 2);
    context->row_bytes = context->side_bytes * 2 * (uint32_t)f->layers;
    for (uint32_t i = 0; i < context->n_sequences; i++) {
        context->sequences[i].rows = calloc(context->n_ctx, context->row_bytes);
        if (context->sequences[i].rows == NULL) {
            abort();
        }
    }
    return context;
}

void llama_free(struct llama_context *context)
{
    for (uint32_t i = 0; i < context->n_sequences; i++) {
        free(context->sequences[i].rows);
    }
    free(context);
}

uint32_t llama_n_ctx_seq(const struct llama_context *context)
{
    return context->n_ctx;
}

uint32_t llama_n_ubatch(const struct llama_context *context)
{
    return context->n_ubatch;
}

llama_memory_t llama_get_memory(const struct llama_context *context)
{
    return context->model->facts.no_memory != 0 ? NULL : (llama_memory_t)context;
}

bool llama_memory_seq_rm(llama_memory_t memory, llama_seq_id sequence, llama_pos first,
                         llama_pos end)
{
    struct llama_context *context = (struct llama_context *)memory;
    struct sequence *s = &context->sequences[sequence];

    if (end != -1 || first < 0) {
        abort(); /* the server cuts ends only */
    }
    s->n = (uint32_t)first < s->n ? (uint32_t)first : s->n;
    return true;
}

struct llama_batch llama_batch_init(int32_t n_tokens, int32_t embd, int32_t n_seq_max)
{
    size_t n = (size_t)n_tokens;
    struct llama_batch batch = {.token = calloc(n, sizeof(llama_token)),
                                .pos = calloc(n, sizeof(llama_pos)),
                                .n_seq_id = calloc(n, sizeof(int32_t)),
                                .seq_id = calloc(n + 1, sizeof(llama_seq_id *)),
                                .logits = calloc(n, 1)};

    if (embd != 0 || n_seq_max != 1) {
        abort();
    }
    for (size_t i = 0; i < n; i++) {
        batch.seq_id[i] = calloc(1, sizeof(llama_seq_id));
    }
    return batch;
}

void llama_batch_free(struct llama_batch batch)
{
    for (size_t i = 0; batch.seq_id[i] != NULL; i++) {
        free(batch.seq_id[i]);
    }
    free(batch.token);
    free(batch.pos);
    free(batch.n_seq_id);
    free(batch.seq_id);
    free(batch.logits);
}

static void row_compute(const struct llama_context *context, struct sequence *s, llama_token token)
{
    uint8_t *row = s->rows + (size_t)s->n * context->row_bytes;
    uint64_t hash = mix((uint64_t)context->model->facts.salt, &token, sizeof(token));

    if (s->n > 0) {
        hash = mix(hash, row - context->row_bytes, context->row_bytes);
    }
    for (uint32_t i = 0; i < context->row_bytes; i += 2) {
        uint16_t value;

        hash = mix(hash, &i, sizeof(i));
        value = (uint16_t)(0x2c00 + hash % 0x0800); /* a small number of any of the types */
        memcpy(row + i, &value, sizeof(value));
    }
    s->n++;
}

static void logits_compute(struct llama_context *context, const struct sequence *s)
{
    uint64_t hash = mix(1, s->rows, (size_t)s->n * context->row_bytes);

    for (uint32_t i = 0; i < VOCAB; i++) {
        context->logits[i] = (float)(mix(hash, &i, sizeof(i)) % 100000) * 1e-4f;
    }
}

int32_t llama_decode(struct llama_context *context, struct llama_batch batch)
{
    const struct facts *f = &context->model->facts;
    struct sequence *s = &context->sequences[batch.seq_id[0][0]];
    struct timespec pause = {.tv_sec = f->sleep_ms / 1000, .tv_nsec = f->sleep_ms % 1000 * 1000000};

    if ((uint32_t)batch.n_tokens > context->n_ubatch ||
        s->n + (uint32_t)batch.n_tokens > context->n_ctx) {
        return 1;
    }
    nanosleep(&pause, NULL);
    for (int32_t i = 0; i < batch.n_tokens; i++) {
        if (batch.pos[i] != (llama_pos)s->n || batch.n_seq_id[i] != 1 || batch.token[i] < 0 ||
            batch.token[i] >= VOCAB) {
            return -1;
        }
        if (batch.pos[i] == f->fail_at) {
            return -3;
        }
        row_compute(context, s, batch.token[i]);
    }
    if (batch.logits[batch.n_tokens - 1] != 0) {
        logits_compute(context, s);
    }
    return 0;
}

float *llama_get_logits_ith(struct llama_context *context, int32_t index)
{
    return index == -1 ? context->logits : NULL;
}

/* --- states ----------------------------------------------------------------------------------- */

/* Writes, or only counts where there is no room for it. */
struct writer {
    uint8_t *data;
    size_t room, n;
};

static void put(struct writer *w, const void *data, size_t bytes)
{
    if (w->data != NULL && w->n + bytes <= w->room) {
        memcpy(w->data + w->n, data, bytes);
    }
    w->n += bytes;
}

static void put_number(struct writer *w, uint32_t value)
{
    put(w, &value, sizeof(value));
}

static void put_side(struct writer *w, const struct llama_context *context,
                     const struct sequence *s, uint32_t at)
{
    uint64_t bytes = context->side_bytes;

    put_number(w, (uint32_t)context->type);
    put(w, &bytes, sizeof(bytes));
    for (uint32_t i = 0; i < s->n; i++) {
        put(w, s->rows + (size_t)i * context->row_bytes + at, context->side_bytes);
    }
}

static size_t state_write(const struct llama_context *context, llama_seq_id sequence, uint8_t *data,
                          size_t room)
{
    const struct facts *f = &context->model->facts;
    struct writer w = {.data = data, .room = room};

    put_number(&w, 0xaf143cd8u);
    put_number(&w, (uint32_t)sequence);
    put_number(&w, context->n_sequences);
    for (uint32_t i = 0; i < context->n_sequences; i++) {
        const struct sequence *s = &context->sequences[i];

        put_number(&w, (llama_seq_id)i == sequence ? s->n : 0);
        if ((llama_seq_id)i != sequence || s->n == 0) {
            continue;
        }
        for (uint32_t token = 0; token < s->n; token++) {
            put_number(&w, token);
            put_number(&w, 1);
            put_number(&w, (uint32_t)sequence);
        }
        put_number(&w, f->transposed != 0);
        put_number(&w, (uint32_t)f->layers);
        for (uint32_t side = 0; side < (f->no_v != 0 ? 1u : 2u) * (uint32_t)f->layers; side++) {
            put_side(&w, context, s, side * context->side_bytes);
        }
    }
    for (int32_t i = 0; i < f->behind; i++) {
        put(&w, "", 1);
    }
    return w.n;
}

size_t llama_state_seq_get_size(struct llama_context *context, llama_seq_id sequence)
{
    return state_write(context, sequence, NULL, 0);
}

size_t llama_state_seq_get_data(struct llama_context *context, uint8_t *data, size_t bytes,
                                llama_seq_id sequence)
{
    size_t n = state_write(context, sequence, data, bytes);

    return n <= bytes ? n : 0;
}

/* Take the rows of what it would write itself of as many tokens; compare all else. */
size_t llama_state_seq_set_data(struct llama_context *context, const uint8_t *data, size_t bytes,
                                llama_seq_id sequence)
{
    const struct facts *f = &context->model->facts;
    struct sequence *s = &context->sequences[sequence];
    uint8_t *own = malloc(bytes + 1);
    uint32_t n = 0;
    size_t at;

    if (own == NULL) {
        abort();
    }
    /* the stream that has the cells need not be the sequence's */
    for (at = MAGIC_BYTES; n == 0 && at + sizeof(n) <= bytes; at += sizeof(n)) {
        memcpy(&n, data + at, sizeof(n));
    }
    at += (size_t)n * 12 + 8;
    s->n = 0;
    if (n > 0 && n <= context->n_ctx && f->forgets == 0) {
        s->n = n;
        for (uint32_t side = 0; side < 2 * (uint32_t)f->layers; side++) {
            for (uint32_t i = 0; i < n; i++) {
                size_t from = at + 12 + (size_t)side * (12 + (size_t)n * context->side_bytes) +
                              (size_t)i * context->side_bytes;

                if (from + context->side_bytes <= bytes) {
                    memcpy(s->rows + (size_t)i * context->row_bytes +
                               (size_t)side * context->side_bytes,
                           data + from, context->side_bytes);
                }
            }
        }
    }
    if (s->n == 0 || state_write(context, sequence, own, bytes) != bytes) {
        say("a state that is none\n");
        s->n = 0;
        bytes = 0;
    }
    free(own);
    return bytes;
}
