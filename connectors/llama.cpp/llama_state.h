/* SPDX-License-Identifier: Apache-2.0
 *
 * llama_state.h: one sequence's K and V as llama_state_seq_get_data gives them, and back.
 *
 * The form, of llama.cpp 0.5, numbers little-endian:
 *
 *   u32 magic, i32 sequence, u32 streams
 *   each stream   u32 cells; nothing else if 0
 *     each cell   i32 position, u32 sequences (1), i32 sequence
 *     u32 V is transposed, u32 layers
 *     each layer  i32 type, u64 bytes of a row, a row of K a cell
 *     each layer  i32 type, u64 bytes of a row, a row of V a cell
 *
 * A row is all heads of one token, one behind the other: tokens [a, b) of a layer are bytes side by
 * side, which a block's view points at. Caches of other kinds write other things, or more than one
 * of these: whatever is not exactly the above is refused in words. The file has no pointers and
 * needs nothing of llama.cpp. Any thread; nothing blocks or allocates.
 */
#ifndef KVF_CONNECTORS_LLAMA_STATE_H
#define KVF_CONNECTORS_LLAMA_STATE_H

#include <stddef.h>
#include <stdint.h>

#include "kvferry.h"

enum kvf_llama_limits {
    KVF_LLAMA_WHY_BYTES = 224,
    KVF_LLAMA_TOKENS_MAX = 1 << 24, /* of one sequence */
    KVF_LLAMA_STREAMS_MAX = 256,    /* llama.cpp's own bound of sequences */
};

/* What all states of one context have in common. */
struct kvf_llama_shape {
    uint32_t n_streams;
    uint32_t n_layers;
    int32_t type; /* ggml's number, of K and V */
    uint32_t k_row_bytes;
    uint32_t v_row_bytes;
};

/* The name of a type that is served, "f16"; NULL for others. Static storage. */
const char *kvf_llama_type_name(int32_t type);

/* The type of such a name; -1: no such. */
int32_t kvf_llama_type_find(const char *name);

/* enum kvf_dtype of a type that is served; KVF_DTYPE_NONE for others. */
int kvf_llama_type_dtype(int32_t type);

/* What a state has. */
struct kvf_llama_found {
    struct kvf_llama_shape shape;
    uint32_t n_tokens;
    size_t shift_bytes; /* by which rows lie further behind than kvf_llama_state_k and _v say: those
                           are of a state that has its cells in its first stream */
};

/* Look at a state. Its tokens have to have the positions 0, 1, 2 ... in this order. KVF_OK;
 * KVF_ERR_CORRUPT: it ends too early, or contradicts itself; KVF_ERR_UNSUPPORTED: of a kind that is
 * not served. why is written unless KVF_OK. */
int kvf_llama_state_parse(const uint8_t *data, size_t bytes, struct kvf_llama_found *found_out,
                          char why[KVF_LLAMA_WHY_BYTES]);

/* Bytes of a state of n_tokens >= 1. */
size_t kvf_llama_state_bytes(const struct kvf_llama_shape *shape, uint32_t n_tokens);

/* Write all of such a state but its rows; the cells are in the first stream. */
void kvf_llama_state_frame(const struct kvf_llama_shape *shape, uint32_t n_tokens, uint8_t *data);

/* Make such a state of n_tokens one of its first n_left >= 1, in place. */
void kvf_llama_state_cut(const struct kvf_llama_shape *shape, uint32_t n_tokens, uint32_t n_left,
                         uint8_t *data);

/* Where the row of a token lies in a state of n_tokens. */
size_t kvf_llama_state_k(const struct kvf_llama_shape *shape, uint32_t n_tokens, uint32_t layer,
                         uint32_t token);
size_t kvf_llama_state_v(const struct kvf_llama_shape *shape, uint32_t n_tokens, uint32_t layer,
                         uint32_t token);

#endif /* KVF_CONNECTORS_LLAMA_STATE_H */
