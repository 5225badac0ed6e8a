/* SPDX-License-Identifier: Apache-2.0
 *
 * weights_file.h: what K and V are projected with, out of a model's files: a folder of Hugging Face
 * (config.json and safetensors), one safetensors file beside its config.json, or a GGUF file.
 *
 * Names and shapes of the families Llama, Mistral, Qwen2, Qwen3 and what is called like them.
 * Nothing of a file is trusted: every length is compared with what is there before it is used, and
 * what does not fit ends in one line that says what and where. Tensors are read when asked for.
 * One thread at a time.
 */
#ifndef KVF_CLIENT_WEIGHTS_FILE_H
#define KVF_CLIENT_WEIGHTS_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvferry.h"

enum kvf_weights_limits {
    KVF_WEIGHTS_WHY_BYTES = 320,
    KVF_WEIGHTS_NAME_BYTES = 64,
    KVF_WEIGHTS_FILES_MAX = 256,             /* parts of one model */
    KVF_WEIGHTS_HEADER_BYTES_MAX = 64 << 20, /* of one file: names, shapes, a vocabulary */
    KVF_WEIGHTS_WIDTH_MAX = 1 << 16,         /* d_model */
    KVF_WEIGHTS_FFN_MAX = 1 << 20,
};

enum kvf_weights_type {
    KVF_WEIGHTS_F32 = 1,
    KVF_WEIGHTS_F16 = 2,
    KVF_WEIGHTS_BF16 = 3,
    /* GGUF: blocks of 32 codes of 8, 4 or 5 bits with an fp16 scale, those that end in 1 also with
     * an fp16 least value */
    KVF_WEIGHTS_Q8_0 = 4,
    KVF_WEIGHTS_Q4_0 = 5,
    KVF_WEIGHTS_Q4_1 = 6,
    KVF_WEIGHTS_Q5_0 = 7,
    KVF_WEIGHTS_Q5_1 = 8,
};

/* The shape of a model. */
struct kvf_weights_model {
    char family[KVF_WEIGHTS_NAME_BYTES]; /* "llama", "qwen2": as the file says */
    uint32_t n_layers;
    uint32_t d_model;
    uint32_t n_query_heads;
    uint32_t n_heads; /* of K and V */
    uint32_t dim_k;
    uint32_t dim_v;
    uint32_t ffn_width; /* of what one token goes through; 0: not said */
};

/* Where one tensor lies; rows 0: the model has none. */
struct kvf_weights_tensor {
    uint64_t rows;         /* outputs; of vectors: elements */
    uint64_t columns;      /* inputs; of vectors: 1 */
    uint64_t offset_bytes; /* in its file */
    uint32_t file;
    uint32_t type; /* enum kvf_weights_type */
};

struct kvf_weights_layer {
    struct kvf_weights_tensor k; /* [n_heads * dim_k][d_model] */
    struct kvf_weights_tensor v; /* [n_heads * dim_v][d_model] */
    struct kvf_weights_tensor k_bias;
    struct kvf_weights_tensor v_bias;
    struct kvf_weights_tensor k_norm; /* [dim_k] */
};

struct kvf_weights {
    struct kvf_weights_model model;
    struct kvf_weights_layer *layers; /* [model.n_layers] */
    uint32_t n_files;
    int fds[KVF_WEIGHTS_FILES_MAX];
};

/* Open a folder or a file, read its header, find the tensors. KVF_OK; KVF_ERR_IO, _NO_MEMORY;
 * KVF_ERR_CORRUPT: the file contradicts itself; KVF_ERR_UNSUPPORTED: a kind of file, of model or of
 * number that is not known here. why is written unless KVF_OK. */
int kvf_weights_open(const char *path, struct kvf_weights **weights_out,
                     char why[KVF_WEIGHTS_WHY_BYTES]);

/* Accepts NULL. */
void kvf_weights_close(struct kvf_weights *weights);

/* Read a tensor: rows * columns values, by rows. KVF_OK; KVF_ERR_IO. */
int kvf_weights_load(const struct kvf_weights *weights, const struct kvf_weights_tensor *tensor,
                     float *values_out, char why[KVF_WEIGHTS_WHY_BYTES]);

/* What names these weights: of one file its SHA-256 (as kvferry calibrate --weights has it), of
 * several the SHA-256 of those of each, in order of their names. Reads all of them. KVF_OK;
 * KVF_ERR_IO. */
int kvf_weights_digest(const struct kvf_weights *weights, uint8_t digest_out[KVF_DIGEST_BYTES],
                       char why[KVF_WEIGHTS_WHY_BYTES]);

/* Only the shape: of a config.json, or of a folder with one. As kvf_weights_open. */
int kvf_weights_model_read(const char *path, struct kvf_weights_model *model_out,
                           char why[KVF_WEIGHTS_WHY_BYTES]);

/* --- the parsers, of bytes in memory ---------------------------------------------------------- */

/* config.json. KVF_OK; KVF_ERR_CORRUPT, _UNSUPPORTED. */
int kvf_weights_parse_config(const char *text, size_t bytes, struct kvf_weights_model *model_out,
                             char why[KVF_WEIGHTS_WHY_BYTES]);

/* The tensors of one safetensors file into weights->layers, which model and layers are set of:
 * text is its JSON, which data_bytes follow at data_offset_bytes. KVF_OK; KVF_ERR_CORRUPT,
 * _UNSUPPORTED. */
int kvf_weights_parse_safetensors(const char *text, size_t bytes, uint64_t data_offset_bytes,
                                  uint64_t data_bytes, uint32_t file, struct kvf_weights *weights,
                                  char why[KVF_WEIGHTS_WHY_BYTES]);

/* A GGUF file of file_bytes, of which the first `bytes` are there: model and layers (which the
 * caller frees, also after a failure). KVF_OK; KVF_ERR_CORRUPT, _UNSUPPORTED, _NO_MEMORY. */
int kvf_weights_parse_gguf(const uint8_t *data, size_t bytes, uint64_t file_bytes,
                           struct kvf_weights *weights, char why[KVF_WEIGHTS_WHY_BYTES]);

/* Does the model have sense, and does each layer have K and V of its shape? KVF_OK;
 * KVF_ERR_CORRUPT, _UNSUPPORTED. */
int kvf_weights_check_model(const struct kvf_weights_model *model, char why[KVF_WEIGHTS_WHY_BYTES]);
int kvf_weights_check_layers(const struct kvf_weights *weights, char why[KVF_WEIGHTS_WHY_BYTES]);

/* --- what the parsers share ------------------------------------------------------------------- */

/* Write why, return status. */
int kvf_weights_fault(char why[KVF_WEIGHTS_WHY_BYTES], int status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The place of a tensor in layers, by names as "<prefix>12.<part>"; NULL: none of ours.
 * *layer_out: its number. */
struct kvf_weights_tensor *kvf_weights_slot(struct kvf_weights *weights, const char *name,
                                            const char *prefix, const char *const parts[5]);

/* Bytes of rows * columns numbers of a type; 0: columns do not fit its blocks, or too many. */
uint64_t kvf_weights_type_bytes(uint32_t type, uint64_t rows, uint64_t columns);

#endif /* KVF_CLIENT_WEIGHTS_FILE_H */
