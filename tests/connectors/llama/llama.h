/* SPDX-License-Identifier: Apache-2.0
 *
 * llama.h: what kvferry-llama calls of llama.cpp 0.5, for a stand-in (llama.c) that it is built
 * with where tests run: the names, and of structs the members that it sets. tests/connectors has
 * the reason in llama.cmake.
 */
#ifndef KVF_TESTS_STANDIN_LLAMA_H
#define KVF_TESTS_STANDIN_LLAMA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum ggml_type {
    GGML_TYPE_F32 = 0,
    GGML_TYPE_F16 = 1,
    GGML_TYPE_BF16 = 30
};
enum ggml_log_level {
    GGML_LOG_LEVEL_ERROR = 4
};

enum llama_rope_type {
    LLAMA_ROPE_TYPE_NONE = -1,
    LLAMA_ROPE_TYPE_NORM = 0,
    LLAMA_ROPE_TYPE_MROPE = 8,
    LLAMA_ROPE_TYPE_VISION = 24,
    LLAMA_ROPE_TYPE_IMROPE = 40,
};
enum llama_flash_attn_type {
    LLAMA_FLASH_ATTN_TYPE_ENABLED = 1
};

struct llama_model;
struct llama_context;
struct llama_vocab;
struct llama_memory;

typedef int32_t llama_pos;
typedef int32_t llama_token;
typedef int32_t llama_seq_id;
typedef struct llama_memory *llama_memory_t;
typedef void (*ggml_log_callback)(enum ggml_log_level level, const char *text, void *arg);

struct llama_model_params {
    int32_t n_gpu_layers;
};

struct llama_context_params {
    uint32_t n_ctx, n_batch, n_ubatch, n_seq_max;
    int32_t n_threads, n_threads_batch;
    enum llama_flash_attn_type flash_attn_type;
    enum ggml_type type_k, type_v;
    bool offload_kqv, kv_unified;
};

struct llama_batch {
    int32_t n_tokens;
    llama_token *token;
    llama_pos *pos;
    int32_t *n_seq_id;
    llama_seq_id **seq_id;
    int8_t *logits;
};

const char *llama_version(void);
void llama_log_set(ggml_log_callback callback, void *arg);
void llama_backend_init(void);

struct llama_model_params llama_model_default_params(void);
struct llama_model *llama_model_load_from_file(const char *path, struct llama_model_params params);
void llama_model_free(struct llama_model *model);
const struct llama_vocab *llama_model_get_vocab(const struct llama_model *model);
enum llama_rope_type llama_model_rope_type(const struct llama_model *model);
int32_t llama_model_n_layer(const struct llama_model *model);
int32_t llama_model_n_head_kv(const struct llama_model *model);
int32_t llama_model_n_swa(const struct llama_model *model);
bool llama_model_is_recurrent(const struct llama_model *model);
bool llama_model_is_hybrid(const struct llama_model *model);
bool llama_model_is_diffusion(const struct llama_model *model);
bool llama_model_has_encoder(const struct llama_model *model);
int32_t llama_model_meta_val_str(const struct llama_model *model, const char *key, char *out,
                                 size_t bytes);
int32_t llama_model_desc(const struct llama_model *model, char *out, size_t bytes);

int32_t llama_vocab_n_tokens(const struct llama_vocab *vocab);
bool llama_vocab_is_eog(const struct llama_vocab *vocab, llama_token token);
int32_t llama_tokenize(const struct llama_vocab *vocab, const char *text, int32_t bytes,
                       llama_token *tokens, int32_t room, bool add_special, bool parse_special);
int32_t llama_detokenize(const struct llama_vocab *vocab, const llama_token *tokens, int32_t n,
                         char *text, int32_t room, bool remove_special, bool unparse_special);

struct llama_context_params llama_context_default_params(void);
struct llama_context *llama_init_from_model(struct llama_model *model,
                                            struct llama_context_params params);
void llama_free(struct llama_context *context);
uint32_t llama_n_ctx_seq(const struct llama_context *context);
uint32_t llama_n_ubatch(const struct llama_context *context);
llama_memory_t llama_get_memory(const struct llama_context *context);
bool llama_memory_seq_rm(llama_memory_t memory, llama_seq_id sequence, llama_pos first,
                         llama_pos end);

struct llama_batch llama_batch_init(int32_t n_tokens, int32_t embd, int32_t n_seq_max);
void llama_batch_free(struct llama_batch batch);
int32_t llama_decode(struct llama_context *context, struct llama_batch batch);
float *llama_get_logits_ith(struct llama_context *context, int32_t index);

size_t llama_state_seq_get_size(struct llama_context *context, llama_seq_id sequence);
size_t llama_state_seq_get_data(struct llama_context *context, uint8_t *data, size_t bytes,
                                llama_seq_id sequence);
size_t llama_state_seq_set_data(struct llama_context *context, const uint8_t *data, size_t bytes,
                                llama_seq_id sequence);

#endif /* KVF_TESTS_STANDIN_LLAMA_H */
