/* SPDX-License-Identifier: Apache-2.0
 *
 * weights_gguf.c: the head of a GGUF file, versions 2 and 3, little-endian:
 *
 *   "GGUF", u32 version, u64 tensors, u64 pairs
 *   pairs    key, u32 type, value: what the model is
 *   tensors  name, u32 dims, u64[dims] (elements of a row first), u32 type, u64 offset
 *   data     at the next multiple of general.alignment (32); offsets count from there
 *
 * A string is a u64 length and so many bytes.
 */
#include "client/weights_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum value_type {
    VALUE_U8 = 0,
    VALUE_I8 = 1,
    VALUE_U16 = 2,
    VALUE_I16 = 3,
    VALUE_U32 = 4,
    VALUE_I32 = 5,
    VALUE_F32 = 6,
    VALUE_BOOL = 7,
    VALUE_STRING = 8,
    VALUE_ARRAY = 9,
    VALUE_U64 = 10,
    VALUE_I64 = 11,
    VALUE_F64 = 12,
    VALUE_TYPES = 13,
};

enum {
    TEXT_BYTES = 128, /* of names that we compare; longer ones are none of ours */
    DIMS_MAX = 4,
    ALIGNMENT_DEFAULT = 32,
    ALIGNMENT_MAX = 1 << 20,
};

static const char *const parts[5] = {"attn_k.weight", "attn_v.weight", "attn_k.bias", "attn_v.bias",
                                     "attn_k_norm.weight"};

struct reader {
    const uint8_t *data;
    size_t bytes;
    size_t at;
    bool is_short; /* something lay beyond the end */
};

static uint64_t read_number(struct reader *r, size_t n)
{
    uint64_t value = 0;

    if (r->bytes - r->at < n) {
        r->is_short = true;
        r->at = r->bytes;
        return 0;
    }
    for (size_t i = 0; i < n; i++) {
        value |= (uint64_t)r->data[r->at + i] << (8 * i);
    }
    r->at += n;
    return value;
}

static void skip(struct reader *r, uint64_t n)
{
    if (n > r->bytes - r->at) {
        r->is_short = true;
        n = r->bytes - r->at;
    }
    r->at += (size_t)n;
}

/* A string, as text; what is too long for text, or holds a zero, becomes "". */
static void read_text(struct reader *r, char text[TEXT_BYTES])
{
    uint64_t n = read_number(r, 8);
    size_t at = r->at;

    text[0] = '\0';
    skip(r, n);
    if (!r->is_short && n < TEXT_BYTES && memchr(r->data + at, 0, (size_t)n) == NULL) {
        memcpy(text, r->data + at, (size_t)n);
        text[n] = '\0';
    }
}

/* Bytes of a value of fixed size, else 0. */
static size_t value_bytes(uint32_t type)
{
    static const uint8_t bytes[VALUE_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

    return type < VALUE_TYPES ? bytes[type] : 0;
}

static bool is_whole(uint32_t type)
{
    return value_bytes(type) != 0 && type != VALUE_F32 && type != VALUE_F64 && type != VALUE_BOOL;
}

/* One value, as far as we have a use for it. */
struct value {
    char text[TEXT_BYTES]; /* of a string */
    bool is_number;        /* whole and not negative; of an array: all of its members the same */
    uint64_t number;
};

static uint64_t read_whole(struct reader *r, uint32_t type)
{
    size_t n = value_bytes(type);
    uint64_t value = read_number(r, n);
    bool is_signed = type == VALUE_I8 || type == VALUE_I16 || type == VALUE_I32 ||
                     type == VALUE_I64;

    return is_signed && (value >> (8 * n - 1)) != 0 ? UINT64_MAX : value; /* too large for all */
}

static int read_array(struct reader *r, struct value *value, char *why)
{
    uint32_t type = (uint32_t)read_number(r, 4);
    uint64_t n = read_number(r, 8);
    char text[TEXT_BYTES];

    if (type == VALUE_STRING) {
        for (uint64_t i = 0; i < n && !r->is_short; i++) {
            read_text(r, text);
        }
        return KVF_OK;
    }
    if (value_bytes(type) == 0) {
        return kvf_weights_fault(why, KVF_ERR_CORRUPT, "GGUF: an array of type %u", type);
    }
    if (n > (r->bytes - r->at) / value_bytes(type)) {
        r->is_short = true;
        return KVF_OK;
    }
    value->is_number = is_whole(type) && n > 0;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t number = is_whole(type) ? read_whole(r, type) : read_number(r, value_bytes(type));

        value->is_number = value->is_number && (i == 0 || number == value->number);
        value->number = number;
    }
    return KVF_OK;
}

static int read_value(struct reader *r, struct value *value, char *why)
{
    uint32_t type = (uint32_t)read_number(r, 4);

    *value = (struct value){0};
    if (type == VALUE_STRING) {
        read_text(r, value->text);
    } else if (type == VALUE_ARRAY) {
        return read_array(r, value, why);
    } else if (is_whole(type)) {
        value->is_number = true;
        value->number = read_whole(r, type);
    } else if (value_bytes(type) != 0) {
        skip(r, value_bytes(type));
    } else {
        return kvf_weights_fault(why, KVF_ERR_CORRUPT, "GGUF: a value of type %u", type);
    }
    return KVF_OK;
}

/* What the pairs say. */
struct pairs {
    char family[TEXT_BYTES];
    uint32_t alignment;
    uint32_t n_layers;
    uint32_t d_model;
    uint32_t n_query_heads;
    uint32_t n_heads;
    uint32_t dim_k;
    uint32_t dim_v;
    uint32_t ffn_width;
    uint32_t n_experts_used;
    uint32_t expert_width;
};

static int take_pair(struct pairs *p, const char *key, const struct value *value, char *why)
{
    const struct {
        const char *name; /* behind the family */
        uint32_t *to;
    } fields[] = {
        {"block_count", &p->n_layers},
        {"embedding_length", &p->d_model},
        {"attention.head_count", &p->n_query_heads},
        {"attention.head_count_kv", &p->n_heads},
        {"attention.key_length", &p->dim_k},
        {"attention.value_length", &p->dim_v},
        {"feed_forward_length", &p->ffn_width},
        {"expert_used_count", &p->n_experts_used},
        {"expert_feed_forward_length", &p->expert_width},
    };
    const char *dot = strchr(key, '.');

    if (strcmp(key, "general.architecture") == 0) {
        memcpy(p->family, value->text, sizeof(p->family));
        return KVF_OK;
    }
    if (strcmp(key, "general.alignment") == 0) {
        if (!value->is_number || value->number == 0 || value->number > ALIGNMENT_MAX) {
            return kvf_weights_fault(why, KVF_ERR_CORRUPT, "GGUF: general.alignment");
        }
        p->alignment = (uint32_t)value->number;
        return KVF_OK;
    }
    for (size_t i = 0; dot != NULL && i < sizeof(fields) / sizeof(fields[0]); i++) {
        if (strcmp(dot + 1, fields[i].name) == 0) {
            if (!value->is_number || value->number > UINT32_MAX) {
                return kvf_weights_fault(why, KVF_ERR_UNSUPPORTED,
                                         "GGUF: %.80s is not one whole number for all layers", key);
            }
            *fields[i].to = (uint32_t)value->number;
        }
    }
    return KVF_OK;
}

/* The model, with what files leave to be concluded. */
static int model_of(const struct pairs *p, struct kvf_weights_model *m, char *why)
{
    uint32_t dim = p->n_query_heads != 0 ? p->d_model / p->n_query_heads : 0;

    *m = (struct kvf_weights_model){
        .n_layers = p->n_layers,
        .d_model = p->d_model,
        .n_query_heads = p->n_query_heads,
        .n_heads = p->n_heads != 0 ? p->n_heads : p->n_query_heads,
        .dim_k = p->dim_k != 0 ? p->dim_k : dim,
        .dim_v = p->dim_v != 0 ? p->dim_v : dim,
        .ffn_width = p->ffn_width,
    };
    snprintf(m->family, sizeof(m->family), "%.63s", p->family[0] != '\0' ? p->family : "unknown");
    if (p->n_experts_used != 0) {
        uint32_t each = p->expert_width != 0 ? p->expert_width : p->ffn_width;

        if (p->n_experts_used > KVF_WEIGHTS_FFN_MAX ||
            each > KVF_WEIGHTS_FFN_MAX / p->n_experts_used) {
            return kvf_weights_fault(why, KVF_ERR_CORRUPT, "GGUF: %u experts of %u",
                                     p->n_experts_used, each);
        }
        m->ffn_width = p->n_experts_used * each;
    }
    return kvf_weights_check_model(m, why);
}

/* GGUF's number of a type to ours; 0: not read here. */
static uint32_t type_of(uint32_t gguf_type)
{
    static const uint8_t types[31] = {
        [0] = KVF_WEIGHTS_F32,  [1] = KVF_WEIGHTS_F16,   [2] = KVF_WEIGHTS_Q4_0,
        [3] = KVF_WEIGHTS_Q4_1, [6] = KVF_WEIGHTS_Q5_0,  [7] = KVF_WEIGHTS_Q5_1,
        [8] = KVF_WEIGHTS_Q8_0, [30] = KVF_WEIGHTS_BF16,
    };

    return gguf_type < sizeof(types) ? types[gguf_type] : 0;
}

/* One tensor; offsets stay as they are stored. */
static int read_tensor(struct reader *r, struct kvf_weights *weights, char *why)
{
    char name[TEXT_BYTES];
    uint64_t dims[DIMS_MAX] = {1, 1, 1, 1};
    struct kvf_weights_tensor *slot;
    uint32_t n_dims;
    uint32_t type;
    uint64_t offset;

    read_text(r, name);
    n_dims = (uint32_t)read_number(r, 4);
    if (n_dims > DIMS_MAX) {
        return kvf_weights_fault(why, KVF_ERR_CORRUPT, "GGUF: %.80s has %u dimensions", name,
                                 n_dims);
    }
    for (uint32_t i = 0; i < n_dims; i++) {
        dims[i] = read_number(r, 8);
    }
    type = (uint32_t)read_number(r, 4);
    offset = read_number(r, 8);
    slot = r->is_short ? NULL : kvf_weights_slot(weights, name, "blk.", parts);
    if (slot == NULL) {
        return KVF_OK;
    }
    if (slot->rows != 0) {
        return kvf_weights_fault(why, KVF_ERR_CORRUPT, "%.80s: there are two", name);
    }
    if (type_of(type) == 0) {
        return kvf_weights_fault(why, KVF_ERR_UNSUPPORTED,
                                 "%.80s is of GGUF type %u; F32, F16, BF16, Q8_0, Q5_1, Q5_0, "
                                 "Q4_1 and Q4_0 are read: convert the model to one of them",
                                 name, type);
    }
    if (n_dims < 1 || n_dims > 2 || dims[0] == 0 || dims[1] == 0) {
        return kvf_weights_fault(why, KVF_ERR_CORRUPT, "%.80s: no shape of a matrix or vector",
                                 name);
    }
    *slot = (struct kvf_weights_tensor){
        .rows = n_dims == 2 ? dims[1] : dims[0],
        .columns = n_dims == 2 ? dims[0] : 1,
        .offset_bytes = offset,
        .type = type_of(type),
    };
    return KVF_OK;
}

/* Offsets from the file's start, after a look whether all of it is there. */
static int settle(struct kvf_weights_tensor *t, uint64_t data_offset_bytes, uint64_t file_bytes,
                  uint32_t layer, char *why)
{
    uint64_t room = file_bytes > data_offset_bytes ? file_bytes - data_offset_bytes : 0;
    uint64_t bytes;

    if (t->rows == 0) {
        return KVF_OK;
    }
    bytes = kvf_weights_type_bytes(t->type, t->rows, t->columns);
    if (bytes == 0 || t->offset_bytes > room || bytes > room - t->offset_bytes) {
        return kvf_weights_fault(why, KVF_ERR_CORRUPT,
                                 "layer %u: a tensor does not lie within the file's %llu bytes",
                                 layer, (unsigned long long)file_bytes);
    }
    t->offset_bytes += data_offset_bytes;
    return KVF_OK;
}

static int settle_all(struct kvf_weights *weights, uint64_t data_offset_bytes, uint64_t file_bytes,
                      char *why)
{
    int status = KVF_OK;

    for (uint32_t i = 0; status == KVF_OK && i < weights->model.n_layers; i++) {
        struct kvf_weights_layer *l = &weights->layers[i];
        struct kvf_weights_tensor *const all[5] = {&l->k, &l->v, &l->k_bias, &l->v_bias,
                                                   &l->k_norm};

        for (uint32_t k = 0; status == KVF_OK && k < 5; k++) {
            status = settle(all[k], data_offset_bytes, file_bytes, i, why);
        }
    }
    return status;
}

static int read_pairs(struct reader *r, uint64_t n, struct pairs *pairs, char *why)
{
    int status = KVF_OK;

    for (uint64_t i = 0; status == KVF_OK && i < n && !r->is_short; i++) {
        struct value value;
        char key[TEXT_BYTES];

        read_text(r, key);
        status = read_value(r, &value, why);
        if (status == KVF_OK && !r->is_short) {
            status = take_pair(pairs, key, &value, why);
        }
    }
    return status;
}

int kvf_weights_parse_gguf(const uint8_t *data, size_t bytes, uint64_t file_bytes,
                           struct kvf_weights *weights, char why[KVF_WEIGHTS_WHY_BYTES])
{
    struct reader r = {.data = data, .bytes = bytes};
    struct pairs pairs = {.alignment = ALIGNMENT_DEFAULT};
    bool is_ours = bytes >= 4 && memcmp(data, "GGUF", 4) == 0;
    uint64_t version;
    uint64_t n_tensors;
    uint64_t n_pairs;
    int status;

    skip(&r, 4);
    version = read_number(&r, 4);
    n_tensors = read_number(&r, 8);
    n_pairs = read_number(&r, 8);
    if (!is_ours || version < 2 || version > 3) {
        return kvf_weights_fault(why, KVF_ERR_UNSUPPORTED, "no GGUF of version 2 or 3");
    }
    status = read_pairs(&r, n_pairs, &pairs, why);
    if (status == KVF_OK && !r.is_short) {
        status = model_of(&pairs, &weights->model, why);
    }
    if (status == KVF_OK && !r.is_short) {
        weights->layers = calloc(weights->model.n_layers, sizeof(*weights->layers));
        status = weights->layers != NULL ? KVF_OK
                                         : kvf_weights_fault(why, KVF_ERR_NO_MEMORY, "no memory");
    }
    for (uint64_t i = 0; status == KVF_OK && !r.is_short && i < n_tensors; i++) {
        status = read_tensor(&r, weights, why);
    }
    if (status == KVF_OK && r.is_short) {
        return kvf_weights_fault(why, KVF_ERR_CORRUPT, "GGUF: the header ends beyond %zu bytes",
                                 bytes);
    }
    if (status == KVF_OK) {
        uint64_t data_offset = (r.at + pairs.alignment - 1) / pairs.alignment * pairs.alignment;

        status = settle_all(weights, data_offset, file_bytes, why);
    }
    return status;
}
