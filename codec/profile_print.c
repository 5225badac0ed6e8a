/* SPDX-License-Identifier: Apache-2.0
 *
 * profile_print.c: profiles written as JSON: a line for each kind of layers and each layer's
 * arrays.
 */
#include "codec/profile_file.h"
#include "codec/profile_names.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const kvf_profile_codec_names[] = {"raw", "exact", "saw", "tq", "kivi", NULL};
const char *const kvf_profile_center_names[] = {"none", "block", "profile", NULL};
const char *const kvf_profile_clip_names[] = {"none", "fixed", "search", "wide", NULL};
const char *const kvf_profile_scale_names[] = {"norm", "matched", "least-squares", "unbiased",
                                               NULL};
const char *const kvf_profile_rope_names[] = {"none", "pre", "post", "pre-unbiased", NULL};

static void print_hex(FILE *out, const uint8_t *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        fprintf(out, "%02x", bytes[i]);
    }
}

static const char *bool_text(bool value)
{
    return value ? "true" : "false";
}

static void print_tensor(FILE *out, const struct kvf_profile_tensor *tensor)
{
    uint32_t center = (tensor->flags & KVF_TENSOR_CENTER_PROFILE) != 0 ? 2
                      : (tensor->flags & KVF_TENSOR_CENTER) != 0       ? 1
                                                                       : 0;
    fprintf(out, "{\"codec\": \"%s\"", kvf_profile_codec_names[tensor->codec - KVF_CODEC_RAW]);
    if (tensor->codec != KVF_CODEC_RAW && tensor->codec != KVF_CODEC_EXACT) {
        fprintf(out, ", \"bits\": %u", tensor->bits);
    }
    if (tensor->codec == KVF_CODEC_KIVI) {
        fprintf(out, ", \"group\": %u", tensor->group_size);
    }
    if (tensor->codec == KVF_CODEC_SAW || tensor->codec == KVF_CODEC_TQ) {
        fprintf(out, ", \"center\": \"%s\", \"rotate\": %s, \"signs\": %s",
                kvf_profile_center_names[center], bool_text(tensor->rotate != 0),
                bool_text((tensor->flags & KVF_TENSOR_SIGNS) != 0));
    }
    if (tensor->codec == KVF_CODEC_SAW) {
        fprintf(out, ", \"clip\": \"%s\"", kvf_profile_clip_names[tensor->clip]);
    }
    if (tensor->codec == KVF_CODEC_TQ) {
        uint32_t scale = (tensor->flags & KVF_TENSOR_SCALE_MASK) / KVF_TENSOR_SCALE_MATCHED;
        fprintf(out, ", \"scale\": \"%s\", \"split\": %s, \"residual\": %s",
                kvf_profile_scale_names[scale], bool_text((tensor->flags & KVF_TENSOR_SPLIT) != 0),
                bool_text((tensor->flags & KVF_TENSOR_RESIDUAL) != 0));
    }
    fputs("}", out);
}

static void print_kinds(FILE *out, const struct kvf_profile_table *table)
{
    fputs(",\n  \"kinds\": [", out);
    for (uint32_t i = 0; i < table->n_kinds; i++) {
        fputs(i != 0 ? ",\n    {\"k\": " : "\n    {\"k\": ", out);
        print_tensor(out, &table->kinds[i].k);
        if (table->dim_v != 0) {
            fputs(",\n     \"v\": ", out);
            print_tensor(out, &table->kinds[i].v);
        }
        fputs("}", out);
    }
    fputs("\n  ],\n  \"layers\": [", out);
    for (uint32_t layer = 0; layer < table->n_layers; layer++) {
        fprintf(out, "%s%u", layer != 0 ? ", " : "", table->layer_kinds[layer]);
    }
    fputs("]", out);
}

/* One array of K or V; layers that do not use it have an empty string. */
static void print_array(FILE *out, const struct kvf_profile_table *table,
                        enum kvf_profile_array array)
{
    size_t layer_bytes = kvf_profile_array_layer_bytes(table, array);
    bool is_v = array == KVF_PROFILE_MEANS_V || array == KVF_PROFILE_SPLITS_V;
    uint8_t flag = array <= KVF_PROFILE_MEANS_V ? KVF_TENSOR_CENTER_PROFILE : KVF_TENSOR_SPLIT;
    fprintf(out, "\"%s\": [", is_v ? "v" : "k");
    for (uint32_t layer = 0; layer < table->n_layers; layer++) {
        const struct kvf_profile_kind *kind = &table->kinds[table->layer_kinds[layer]];
        const struct kvf_profile_tensor *tensor = is_v ? &kind->v : &kind->k;
        fputs(layer != 0 ? ",\n    \"" : "\n    \"", out);
        if ((tensor->flags & flag) != 0) {
            print_hex(out, table->arrays[array] + layer * layer_bytes, layer_bytes);
        }
        fputs("\"", out);
    }
    fputs("]", out);
}

static void print_arrays(FILE *out, const struct kvf_profile_table *table, const char *name,
                         enum kvf_profile_array first)
{
    bool has_k = table->arrays[first] != NULL;
    bool has_v = table->arrays[first + 1] != NULL;
    if (!has_k && !has_v) {
        return;
    }
    fprintf(out, ",\n  \"%s\": {", name);
    if (has_k) {
        print_array(out, table, first);
    }
    if (has_v) {
        fputs(has_k ? ", " : "", out);
        print_array(out, table, first + 1);
    }
    fputs("}", out);
}

static void print_binding(FILE *out, const struct kvf_profile_table *table)
{
    bool is_first = true;
    fprintf(out, "{\n  \"kvferry_profile\": %d,\n  \"name\": \"%s\",\n  \"weights_digest\": \"",
            KVF_PROFILE_FILE_VERSION, table->name);
    print_hex(out, table->weights_digest, sizeof(table->weights_digest));
    fputs("\",\n  \"adapter_digest\": \"", out);
    print_hex(out, table->adapter_digest, sizeof(table->adapter_digest));
    fputs("\",\n  \"workload\": [", out);
    for (uint32_t i = 0; kvf_profile_workloads[i] != NULL; i++) {
        if ((table->workloads >> i & 1) != 0) {
            fprintf(out, "%s\"%s\"", is_first ? "" : ", ", kvf_profile_workloads[i]);
            is_first = false;
        }
    }
    fprintf(out,
            "],\n  \"geometry\": {\"n_layers\": %u, \"n_heads\": %u, \"dim_k\": %u, \"dim_v\": %u, "
            "\"rope_state\": \"%s\"},\n  \"sink_tokens\": %u",
            table->n_layers, table->n_heads, table->dim_k, table->dim_v,
            kvf_profile_rope_names[table->rope_state], table->sink_tokens);
}

char *kvf_profile_file_print(const struct kvf_profile_table *table, const struct json_t *evidence)
{
    char *text = NULL;
    size_t bytes;
    FILE *out = open_memstream(&text, &bytes);
    if (out == NULL) {
        return NULL;
    }
    print_binding(out, table);
    if (table->builtin == NULL) {
        print_kinds(out, table);
        print_arrays(out, table, "means", KVF_PROFILE_MEANS_K);
        print_arrays(out, table, "splits", KVF_PROFILE_SPLITS_K);
    }
    bool is_whole = true;
    if (evidence != NULL) {
        char *found = json_dumps(evidence, JSON_INDENT(2) | JSON_SORT_KEYS);
        is_whole = found != NULL;
        fprintf(out, ",\n  \"evidence\": %s", is_whole ? found : "{}");
        free(found);
    }
    fputs("\n}\n", out);
    if (fclose(out) != 0 || !is_whole) {
        free(text);
        return NULL;
    }
    return text;
}
