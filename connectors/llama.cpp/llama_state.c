/* SPDX-License-Identifier: Apache-2.0
 *
 * llama_state.c: see llama_state.h. Everything is an offset that follows from the shape and the
 * number of tokens, so a state is written, cut and looked into without a table.
 */
#include "connectors/llama.cpp/llama_state.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define MAGIC 0xaf143cd8u

enum {
    HEAD_BYTES = 12,    /* magic, sequence, streams */
    COUNT_BYTES = 4,    /* cells of a stream */
    CELL_BYTES = 12,    /* position, sequences, sequence */
    LAYERS_BYTES = 8,   /* transposed, layers */
    SECTION_BYTES = 12, /* type, bytes of a row */
};

static const uint64_t row_bytes_max = (uint64_t)KVF_HEADS_MAX * KVF_DIM_MAX * 4;

/* ggml's numbers; they are written to files, and stay. */
static const struct {
    int32_t type;
    int dtype;
    const char *name;
} types[] = {
    {0, KVF_DTYPE_F32, "f32"},
    {1, KVF_DTYPE_F16, "f16"},
    {30, KVF_DTYPE_BF16, "bf16"},
};
#define N_TYPES (sizeof(types) / sizeof(types[0]))

const char *kvf_llama_type_name(int32_t type)
{
    for (size_t i = 0; i < N_TYPES; i++) {
        if (types[i].type == type) {
            return types[i].name;
        }
    }
    return NULL;
}

int32_t kvf_llama_type_find(const char *name)
{
    for (size_t i = 0; i < N_TYPES; i++) {
        if (strcmp(types[i].name, name) == 0) {
            return types[i].type;
        }
    }
    return -1;
}

int kvf_llama_type_dtype(int32_t type)
{
    for (size_t i = 0; i < N_TYPES; i++) {
        if (types[i].type == type) {
            return types[i].dtype;
        }
    }
    return KVF_DTYPE_NONE;
}

/* --- parse -------------------------------------------------------------------------------------*/

/* What is left to read. */
struct reader {
    const uint8_t *data;
    size_t left;
    char *why;
};

static int refuse(const struct reader *reader, int status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

static int refuse(const struct reader *reader, int status, const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    vsnprintf(reader->why, KVF_LLAMA_WHY_BYTES, fmt, args);
    va_end(args);
    return status;
}

static int skip(struct reader *reader, uint64_t bytes, const char *what)
{
    if (bytes > reader->left) {
        return refuse(reader, KVF_ERR_CORRUPT, "the state ends within %s", what);
    }
    reader->data += bytes;
    reader->left -= (size_t)bytes;
    return KVF_OK;
}

static int take(struct reader *reader, void *out, size_t bytes, const char *what)
{
    const uint8_t *from = reader->data;
    int status = skip(reader, bytes, what);

    if (status == KVF_OK) {
        memcpy(out, from, bytes);
    }
    return status;
}

static int take_u32(struct reader *reader, uint32_t *out, const char *what)
{
    return take(reader, out, sizeof(*out), what);
}

static int take_head(struct reader *reader, struct kvf_llama_shape *shape)
{
    uint32_t words[3] = {0};
    int status = take(reader, words, sizeof(words), "its head");

    if (status != KVF_OK) {
        return status;
    }
    if (words[0] != MAGIC) {
        return refuse(reader, KVF_ERR_UNSUPPORTED,
                      "the state begins with %08x, not %08x: another form of llama.cpp's", words[0],
                      MAGIC);
    }
    if (words[2] == 0 || words[2] > KVF_LLAMA_STREAMS_MAX) {
        return refuse(reader, KVF_ERR_CORRUPT, "the state has %u streams (1 to %d)", words[2],
                      KVF_LLAMA_STREAMS_MAX);
    }
    shape->n_streams = words[2];
    return KVF_OK;
}

static int take_cells(struct reader *reader, uint32_t n_cells)
{
    for (uint32_t i = 0; i < n_cells; i++) {
        int32_t cell[3] = {0};
        int status = take(reader, cell, sizeof(cell), "its cells");

        if (status != KVF_OK) {
            return status;
        }
        if (cell[1] != 1) {
            return refuse(reader, KVF_ERR_UNSUPPORTED,
                          "cell %u belongs to %d sequences: only whole sequences of their own are "
                          "served",
                          i, cell[1]);
        }
        if (cell[0] < 0 || (uint32_t)cell[0] != i) {
            return refuse(reader, KVF_ERR_UNSUPPORTED,
                          "cell %u has position %d: only sequences whose tokens lie in order from "
                          "0 on are served",
                          i, cell[0]);
        }
    }
    return KVF_OK;
}

/* The head of a layer's K or V, and its rows. row_bytes: 0, or what all have to have. */
static int take_section(struct reader *reader, uint32_t n_cells, uint32_t layer, char tensor,
                        int32_t *type, uint32_t *row_bytes)
{
    int32_t own_type;
    uint64_t own_bytes;
    int status = take(reader, &own_type, sizeof(own_type), "a layer's head");

    status = status != KVF_OK ? status : take(reader, &own_bytes, sizeof(own_bytes), "a layer");
    if (status != KVF_OK) {
        return status;
    }
    if (kvf_llama_type_dtype(own_type) == KVF_DTYPE_NONE) {
        return refuse(reader, KVF_ERR_UNSUPPORTED,
                      "%c of layer %u is of ggml's type %d: only f32, f16 and bf16 are served",
                      tensor, layer, own_type);
    }
    if (own_bytes == 0 || own_bytes > row_bytes_max) {
        return refuse(reader, KVF_ERR_CORRUPT, "%c of layer %u has rows of %llu bytes", tensor,
                      layer, (unsigned long long)own_bytes);
    }
    if (*type != own_type && *type != -1) {
        return refuse(reader, KVF_ERR_UNSUPPORTED,
                      "%c of layer %u is %s, others are %s: only one type is served", tensor, layer,
                      kvf_llama_type_name(own_type), kvf_llama_type_name(*type));
    }
    if (*row_bytes != own_bytes && *row_bytes != 0) {
        return refuse(reader, KVF_ERR_UNSUPPORTED,
                      "%c of layer %u has rows of %llu bytes, others of %u: only layers of one "
                      "width are served",
                      tensor, layer, (unsigned long long)own_bytes, *row_bytes);
    }
    *type = own_type;
    *row_bytes = (uint32_t)own_bytes;
    return skip(reader, (uint64_t)n_cells * own_bytes, "rows");
}

static int take_layers(struct reader *reader, uint32_t n_cells, struct kvf_llama_shape *shape)
{
    uint32_t words[2] = {0};
    int status = take(reader, words, sizeof(words), "its number of layers");

    if (status != KVF_OK) {
        return status;
    }
    if (words[0] != 0) {
        return refuse(reader, KVF_ERR_UNSUPPORTED,
                      "V is transposed: turn flash attention on, tokens lie side by side then");
    }
    if (words[1] == 0 || words[1] > KVF_LAYERS_MAX) {
        return refuse(reader, KVF_ERR_CORRUPT, "the state has %u layers (1 to %d)", words[1],
                      KVF_LAYERS_MAX);
    }
    shape->n_layers = words[1];
    shape->type = -1;
    for (uint32_t layer = 0; status == KVF_OK && layer < shape->n_layers; layer++) {
        status = take_section(reader, n_cells, layer, 'K', &shape->type, &shape->k_row_bytes);
    }
    if (status == KVF_OK && reader->left == 0) {
        return refuse(reader, KVF_ERR_UNSUPPORTED, "the state has no V: MLA is not served");
    }
    for (uint32_t layer = 0; status == KVF_OK && layer < shape->n_layers; layer++) {
        status = take_section(reader, n_cells, layer, 'V', &shape->type, &shape->v_row_bytes);
    }
    return status;
}

int kvf_llama_state_parse(const uint8_t *data, size_t bytes, struct kvf_llama_found *found_out,
                          char why[KVF_LLAMA_WHY_BYTES])
{
    struct reader reader = {.data = data, .left = bytes, .why = why};
    struct kvf_llama_found found = {0};
    int status = take_head(&reader, &found.shape);

    for (uint32_t stream = 0; status == KVF_OK && stream < found.shape.n_streams; stream++) {
        uint32_t n_cells = 0;

        status = take_u32(&reader, &n_cells, "a stream's head");
        if (status != KVF_OK || n_cells == 0) {
            continue;
        }
        if (found.n_tokens != 0 || n_cells > KVF_LLAMA_TOKENS_MAX) {
            return refuse(&reader, KVF_ERR_CORRUPT, "stream %u has %u cells%s", stream, n_cells,
                          found.n_tokens != 0 ? ", and another one has some, too" : "");
        }
        found.n_tokens = n_cells;
        found.shift_bytes = stream * (size_t)COUNT_BYTES;
        status = take_cells(&reader, n_cells);
        status = status != KVF_OK ? status : take_layers(&reader, n_cells, &found.shape);
    }
    if (status != KVF_OK) {
        return status;
    }
    if (found.n_tokens == 0) {
        return refuse(&reader, KVF_ERR_CORRUPT, "the state has no tokens");
    }
    if (reader.left != 0) {
        return refuse(
            &reader, KVF_ERR_UNSUPPORTED,
            "%zu bytes follow K and V: sliding windows, recurrent and other layers beside "
            "full attention are not served",
            reader.left);
    }
    *found_out = found;
    return KVF_OK;
}

/* --- write -------------------------------------------------------------------------------------*/

/* Where the sections of K begin: the cells are in the first stream. */
static size_t sections_at(uint32_t n_tokens)
{
    return HEAD_BYTES + COUNT_BYTES + (size_t)n_tokens * CELL_BYTES + LAYERS_BYTES;
}

static size_t section_bytes(uint32_t n_tokens, uint32_t row_bytes)
{
    return SECTION_BYTES + (size_t)n_tokens * row_bytes;
}

size_t kvf_llama_state_k(const struct kvf_llama_shape *shape, uint32_t n_tokens, uint32_t layer,
                         uint32_t token)
{
    return sections_at(n_tokens) + layer * section_bytes(n_tokens, shape->k_row_bytes) +
           SECTION_BYTES + (size_t)token * shape->k_row_bytes;
}

size_t kvf_llama_state_v(const struct kvf_llama_shape *shape, uint32_t n_tokens, uint32_t layer,
                         uint32_t token)
{
    return sections_at(n_tokens) + shape->n_layers * section_bytes(n_tokens, shape->k_row_bytes) +
           layer * section_bytes(n_tokens, shape->v_row_bytes) + SECTION_BYTES +
           (size_t)token * shape->v_row_bytes;
}

size_t kvf_llama_state_bytes(const struct kvf_llama_shape *shape, uint32_t n_tokens)
{
    return kvf_llama_state_v(shape, n_tokens, shape->n_layers, 0) - SECTION_BYTES +
           (shape->n_streams - 1) * (size_t)COUNT_BYTES;
}

static void put_section(uint8_t *at, int32_t type, uint64_t row_bytes)
{
    memcpy(at, &type, sizeof(type));
    memcpy(at + sizeof(type), &row_bytes, sizeof(row_bytes));
}

void kvf_llama_state_frame(const struct kvf_llama_shape *shape, uint32_t n_tokens, uint8_t *data)
{
    const uint32_t head[4] = {MAGIC, 0, shape->n_streams, n_tokens};
    const uint32_t layers[2] = {0, shape->n_layers};
    size_t end = kvf_llama_state_bytes(shape, n_tokens);
    size_t rest = (shape->n_streams - 1) * (size_t)COUNT_BYTES;

    memcpy(data, head, sizeof(head));
    for (uint32_t i = 0; i < n_tokens; i++) {
        const uint32_t cell[3] = {i, 1, 0};

        memcpy(data + HEAD_BYTES + COUNT_BYTES + (size_t)i * CELL_BYTES, cell, sizeof(cell));
    }
    memcpy(data + sections_at(n_tokens) - LAYERS_BYTES, layers, sizeof(layers));
    for (uint32_t layer = 0; layer < shape->n_layers; layer++) {
        put_section(data + kvf_llama_state_k(shape, n_tokens, layer, 0) - SECTION_BYTES,
                    shape->type, shape->k_row_bytes);
        put_section(data + kvf_llama_state_v(shape, n_tokens, layer, 0) - SECTION_BYTES,
                    shape->type, shape->v_row_bytes);
    }
    memset(data + end - rest, 0, rest);
}

void kvf_llama_state_cut(const struct kvf_llama_shape *shape, uint32_t n_tokens, uint32_t n_left,
                         uint8_t *data)
{
    /* all moves are towards the beginning, so that none hits what is still to be moved */
    for (uint32_t layer = 0; layer < shape->n_layers; layer++) {
        memmove(data + kvf_llama_state_k(shape, n_left, layer, 0),
                data + kvf_llama_state_k(shape, n_tokens, layer, 0),
                (size_t)n_left * shape->k_row_bytes);
    }
    for (uint32_t layer = 0; layer < shape->n_layers; layer++) {
        memmove(data + kvf_llama_state_v(shape, n_left, layer, 0),
                data + kvf_llama_state_v(shape, n_tokens, layer, 0),
                (size_t)n_left * shape->v_row_bytes);
    }
    kvf_llama_state_frame(shape, n_left, data);
}
