/* SPDX-License-Identifier: Apache-2.0
 *
 * weights_safetensors.c: config.json and the JSON at the head of a safetensors file.
 */
#include "client/weights_file.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

static const char *const parts[5] = {"self_attn.k_proj.weight", "self_attn.v_proj.weight",
                                     "self_attn.k_proj.bias", "self_attn.v_proj.bias",
                                     "self_attn.k_norm.weight"};

/* --- config.json ------------------------------------------------------------------------------ */

/* A whole number of the object; absent or null: otherwise. */
static int take(const json_t *root, const char *name, uint32_t otherwise, uint32_t *value_out,
                char *why)
{
    const json_t *value = json_object_get(root, name);
    json_int_t number = json_integer_value(value);

    if (value == NULL || json_is_null(value)) {
        *value_out = otherwise;
        return KVF_OK;
    }
    if (!json_is_integer(value) || number < 0 || number > UINT32_MAX) {
        return kvf_weights_fault(why, KVF_ERR_CORRUPT, "config: %s is no whole number", name);
    }
    *value_out = (uint32_t)number;
    return KVF_OK;
}

/* What one token goes through: of a mixture, the experts that it is sent to. */
static int take_ffn(const json_t *root, uint32_t *width_out, char *why)
{
    uint32_t each = 0;
    uint32_t n_used = 0;
    uint32_t dense = 0;
    int status = take(root, "intermediate_size", 0, &dense, why);

    if (status == KVF_OK) {
        status = take(root, "num_experts_per_tok", 0, &n_used, why);
    }
    if (status == KVF_OK) {
        status = take(root, "moe_intermediate_size", dense, &each, why);
    }
    if (status == KVF_OK &&
        (n_used > KVF_WEIGHTS_FFN_MAX || (n_used != 0 && each > KVF_WEIGHTS_FFN_MAX / n_used))) {
        status = kvf_weights_fault(why, KVF_ERR_CORRUPT, "config: %u experts of %u", n_used, each);
    }
    if (status == KVF_OK) {
        *width_out = n_used != 0 ? n_used * each : dense;
    }
    return status;
}

int kvf_weights_parse_config(const char *text, size_t bytes, struct kvf_weights_model *model_out,
                             char why[KVF_WEIGHTS_WHY_BYTES])
{
    struct kvf_weights_model m = {.family = "unknown"};
    json_error_t error;
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    const char *family = json_string_value(json_object_get(root, "model_type"));
    int status = KVF_OK;

    if (!json_is_object(root)) {
        status = kvf_weights_fault(why, KVF_ERR_CORRUPT, "config: %s",
                                   root == NULL ? error.text : "not an object");
    }
    if (family != NULL) {
        snprintf(m.family, sizeof(m.family), "%s", family);
    }
    if (status == KVF_OK && json_object_get(root, "kv_lora_rank") != NULL) {
        status = kvf_weights_fault(why, KVF_ERR_UNSUPPORTED,
                                   "config: %s keeps a latent, not K and V", m.family);
    }
    if (status == KVF_OK) {
        status = take(root, "num_hidden_layers", 0, &m.n_layers, why);
    }
    if (status == KVF_OK) {
        status = take(root, "hidden_size", 0, &m.d_model, why);
    }
    if (status == KVF_OK) {
        status = take(root, "num_attention_heads", 0, &m.n_query_heads, why);
    }
    if (status == KVF_OK) {
        status = take(root, "num_key_value_heads", m.n_query_heads, &m.n_heads, why);
    }
    if (status == KVF_OK) {
        uint32_t dim = m.n_query_heads != 0 ? m.d_model / m.n_query_heads : 0;

        status = take(root, "head_dim", dim, &m.dim_k, why);
        m.dim_v = m.dim_k;
    }
    if (status == KVF_OK) {
        status = take_ffn(root, &m.ffn_width, why);
    }
    json_decref(root);
    if (status == KVF_OK) {
        status = kvf_weights_check_model(&m, why);
    }
    if (status == KVF_OK) {
        *model_out = m;
    }
    return status;
}

/* --- tensors ---------------------------------------------------------------------------------- */

static uint32_t type_of(const char *name)
{
    return name == NULL                ? 0
           : strcmp(name, "F32") == 0  ? KVF_WEIGHTS_F32
           : strcmp(name, "F16") == 0  ? KVF_WEIGHTS_F16
           : strcmp(name, "BF16") == 0 ? KVF_WEIGHTS_BF16
                                       : 0;
}

/* A member of an array that is a whole number from 0 on. */
static bool number_at(const json_t *array, size_t i, uint64_t *value_out)
{
    const json_t *value = json_array_get(array, i);

    if (!json_is_integer(value) || json_integer_value(value) < 0) {
        return false;
    }
    *value_out = (uint64_t)json_integer_value(value);
    return true;
}

/* Where a tensor lies, ours or not: within the data. */
static int take_range(const char *name, const json_t *entry, uint64_t data_bytes,
                      uint64_t *begin_out, uint64_t *end_out, char *why)
{
    const json_t *offsets = json_object_get(entry, "data_offsets");

    if (json_array_size(offsets) != 2 || !number_at(offsets, 0, begin_out) ||
        !number_at(offsets, 1, end_out) || *begin_out > *end_out || *end_out > data_bytes) {
        return kvf_weights_fault(why, KVF_ERR_CORRUPT,
                                 "%.80s: it does not lie within the %llu bytes of data", name,
                                 (unsigned long long)data_bytes);
    }
    return KVF_OK;
}

/* One of ours, which has so many bytes. */
static int take_tensor(const char *name, const json_t *entry, uint64_t bytes,
                       struct kvf_weights_tensor *tensor, char *why)
{
    const json_t *shape = json_object_get(entry, "shape");
    const char *type = json_string_value(json_object_get(entry, "dtype"));
    size_t n_dims = json_array_size(shape);

    tensor->type = type_of(type);
    tensor->columns = 1;
    if (tensor->type == 0) {
        return kvf_weights_fault(why, KVF_ERR_UNSUPPORTED,
                                 "%.80s is of type %.20s; F32, F16 and BF16 are read", name,
                                 type != NULL ? type : "(none)");
    }
    if (n_dims < 1 || n_dims > 2 || !number_at(shape, 0, &tensor->rows) || tensor->rows == 0 ||
        (n_dims == 2 && !number_at(shape, 1, &tensor->columns))) {
        return kvf_weights_fault(why, KVF_ERR_CORRUPT, "%.80s: no shape of a matrix or vector",
                                 name);
    }
    if (bytes == 0 ||
        kvf_weights_type_bytes(tensor->type, tensor->rows, tensor->columns) != bytes) {
        return kvf_weights_fault(why, KVF_ERR_CORRUPT, "%.80s: %llu bytes do not fit its shape",
                                 name, (unsigned long long)bytes);
    }
    return KVF_OK;
}

int kvf_weights_parse_safetensors(const char *text, size_t bytes, uint64_t data_offset_bytes,
                                  uint64_t data_bytes, uint32_t file, struct kvf_weights *weights,
                                  char why[KVF_WEIGHTS_WHY_BYTES])
{
    json_error_t error;
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    const char *name;
    json_t *entry;
    int status = KVF_OK;

    if (!json_is_object(root)) {
        status = kvf_weights_fault(why, KVF_ERR_CORRUPT, "header: %s",
                                   root == NULL ? error.text : "not an object");
        json_decref(root);
        return status;
    }
    json_object_foreach(root, name, entry)
    {
        struct kvf_weights_tensor *slot = kvf_weights_slot(weights, name, "model.layers.", parts);
        struct kvf_weights_tensor tensor = {.file = file};
        uint64_t begin = 0;
        uint64_t end = 0;

        if (strcmp(name, "__metadata__") == 0) {
            continue;
        }
        status = take_range(name, entry, data_bytes, &begin, &end, why);
        if (slot == NULL) {
            slot = kvf_weights_slot(weights, name, "layers.", parts); /* without its head */
        }
        if (status == KVF_OK && slot != NULL && slot->rows != 0) {
            status = kvf_weights_fault(why, KVF_ERR_CORRUPT, "%.80s: there are two", name);
        }
        if (status == KVF_OK && slot != NULL) {
            status = take_tensor(name, entry, end - begin, &tensor, why);
        }
        if (status != KVF_OK) {
            break;
        }
        if (slot != NULL) {
            tensor.offset_bytes = data_offset_bytes + begin;
            *slot = tensor;
        }
    }
    json_decref(root);
    return status;
}
