/* SPDX-License-Identifier: Apache-2.0
 *
 * llama_model.h: a model and a context of llama.cpp whose state is known to be of the form of
 * llama_state.h: tried out when it is opened, refused in words where it is not.
 */
#ifndef KVF_CONNECTORS_LLAMA_MODEL_H
#define KVF_CONNECTORS_LLAMA_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "connectors/llama.cpp/llama_state.h"

/* What llama_version() says of the version that this has been tested with. */
#define KVF_LLAMA_TESTED_VERSION "0.5.0-dev"

/* llama.h's */
struct llama_model;
struct llama_context;
struct llama_vocab;

struct kvf_llama_model_options {
    const char *path;
    int32_t kv_type; /* ggml's number */
    uint32_t n_slots;
    uint32_t context_tokens; /* of each slot */
    uint32_t chunk_tokens;   /* what is computed at once, and stored as one block */
    uint32_t n_threads;
    bool allow_untested;
};

struct kvf_llama_model {
    struct llama_model *model;
    struct llama_context *context;
    const struct llama_vocab *vocab; /* the model's */
    uint32_t n_vocab;
    uint32_t n_heads;        /* of K and V */
    uint32_t context_tokens; /* of each slot */
    int rope_state;          /* enum kvf_rope_state */
    struct kvf_llama_shape shape;
    char name[128];
};

/* KVF_OK; KVF_ERR_UNSUPPORTED: a model or version that is not served; KVF_ERR_IO: no model there;
 * KVF_ERR_NO_MEMORY. why is written unless KVF_OK. Blocks while the model is read. */
int kvf_llama_model_open(const struct kvf_llama_model_options *options,
                         struct kvf_llama_model *model_out, char why[KVF_LLAMA_WHY_BYTES]);

/* Accepts a zeroed one. */
void kvf_llama_model_close(struct kvf_llama_model *model);

/* Compute n_tokens from position first on; the logits of the last one if wanted. KVF_OK;
 * KVF_ERR_IO: llama.cpp's code is in *code_out. */
int kvf_llama_model_decode(struct kvf_llama_model *model, int32_t sequence, const int32_t *tokens,
                           uint32_t first, uint32_t n_tokens, bool wants_logits, int *code_out);

#endif /* KVF_CONNECTORS_LLAMA_MODEL_H */
