/* SPDX-License-Identifier: Apache-2.0
 *
 * capture.h: K, V and Q of a model over a text, as `kvferry inspect` and `kvferry calibrate` read
 * them. docs/calibration.md describes the folder: index.txt, manifest.json, and arrays.
 *
 * What a folder says is checked before it is used: shapes, sizes, and that tensors agree. Nothing
 * in it is executed or followed out of the folder.
 */
#ifndef KVF_CLIENT_CAPTURE_H
#define KVF_CLIENT_CAPTURE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvferry.h"

enum kvf_capture_limits {
    KVF_CAPTURE_TOKENS_MAX = 1 << 20,
    KVF_CAPTURE_NAME_BYTES = 64,
    KVF_CAPTURE_ERROR_BYTES = 512,
};

enum kvf_capture_kind {
    KVF_CAPTURE_K_POST = 0, /* after RoPE */
    KVF_CAPTURE_K_PRE = 1,  /* before RoPE; may be there for some layers only */
    KVF_CAPTURE_V = 2,
    KVF_CAPTURE_Q = 3,      /* after RoPE, not scaled */
    KVF_CAPTURE_Q_NORM = 4, /* L2 norms of Q, dim 1 */
    KVF_CAPTURE_KINDS = 5,
};

/* One tensor: for each layer an array [n_heads][n_tokens][dim]; of Q and its norms there may be
 * fewer tokens. */
struct kvf_capture_tensor {
    uint32_t n_heads; /* 0: the folder has no such tensor */
    uint32_t dim;
    uint8_t dtype;                         /* enum kvf_dtype: BF16, F16 or F32 */
    const uint8_t *layers[KVF_LAYERS_MAX]; /* NULL where the folder lacks a layer */
};

struct kvf_capture {
    char *folder;
    char name[KVF_CAPTURE_NAME_BYTES];     /* last part of the folder's path */
    char model[KVF_CAPTURE_NAME_BYTES];    /* "": not said */
    char workload[KVF_CAPTURE_NAME_BYTES]; /* "": not said */
    bool has_digest;
    uint8_t weights_digest[KVF_DIGEST_BYTES];
    uint8_t digest[KVF_DIGEST_BYTES]; /* SHA-256 of index.txt and of the files read */
    uint32_t n_layers;
    uint32_t n_tokens;
    uint32_t first_position;
    double rope_theta; /* 0: not said */
    uint32_t n_q_rows; /* tokens that Q and its norms are there for */
    uint32_t *q_rows;  /* their numbers, ascending, counted from the capture's first token */
    struct kvf_capture_tensor tensors[KVF_CAPTURE_KINDS];
    void **buffers;
    uint32_t n_buffers;
};

/* Read a folder. K after or before RoPE and V of all layers must be there. KVF_OK; KVF_ERR_IO,
 * _CORRUPT, _NO_MEMORY, _TOO_LARGE: error_out says what. Any thread. */
int kvf_capture_open(const char *folder, struct kvf_capture **capture_out,
                     char error_out[KVF_CAPTURE_ERROR_BYTES]);

/* Accepts NULL. */
void kvf_capture_close(struct kvf_capture *capture);

/* Several captures of one model. */
struct kvf_capture_set {
    struct kvf_capture **items;
    uint32_t n;
};

/* Add a folder, or every folder with an index.txt in it, by name; shapes must agree with those that
 * are there. Returns as kvf_capture_open, and KVF_ERR_MISMATCH. */
int kvf_capture_set_add(struct kvf_capture_set *set, const char *folder,
                        char error_out[KVF_CAPTURE_ERROR_BYTES]);

/* Accepts a zeroed set. */
void kvf_capture_set_close(struct kvf_capture_set *set);

/* Do two captures have layers, heads, dims and dtypes in common? */
bool kvf_capture_is_alike(const struct kvf_capture *a, const struct kvf_capture *b);

/* Is the tensor there for every layer? */
bool kvf_capture_has(const struct kvf_capture *capture, enum kvf_capture_kind kind);

/* n values of any of the dtypes above as fp32. */
void kvf_floats_from(uint8_t dtype, const void *values, size_t n, float *out);

/* The vectors of one head as fp32: tokens (n_q_rows for Q and its norms) * dim. The layer must be
 * there. */
void kvf_capture_head(const struct kvf_capture *capture, enum kvf_capture_kind kind, uint32_t layer,
                      uint32_t head, float *out);

/* Lower-case hexadecimal of a digest, with its end. */
#define KVF_DIGEST_TEXT_BYTES (2 * KVF_DIGEST_BYTES + 1)
void kvf_digest_text(const uint8_t digest[KVF_DIGEST_BYTES], char out[KVF_DIGEST_TEXT_BYTES]);

/* The reverse; false unless text is 64 hexadecimal digits. */
bool kvf_digest_parse(const char *text, uint8_t digest_out[KVF_DIGEST_BYTES]);

#endif /* KVF_CLIENT_CAPTURE_H */
