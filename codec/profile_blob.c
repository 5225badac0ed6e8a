/* SPDX-License-Identifier: Apache-2.0
 *
 * profile_blob.c: a profile to bytes and back.
 */
#include "codec/profile_blob.h"

#include "base/crc32c.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

/* All but the arrays. */
static size_t fixed_bytes(uint32_t n_kinds, uint32_t n_layers)
{
    return sizeof(struct kvf_profile_blob) +
           2 * (size_t)n_kinds * sizeof(struct kvf_profile_blob_tensor) + n_layers;
}

size_t kvf_profile_blob_bytes(const struct kvf_profile_table *table)
{
    size_t bytes = fixed_bytes(table->n_kinds, table->n_layers);
    for (uint32_t i = 0; i < KVF_PROFILE_ARRAYS; i++) {
        bytes += table->arrays[i] != NULL ? kvf_profile_array_bytes(table, i) : 0;
    }
    return bytes;
}

static struct kvf_profile_blob_tensor tensor_pack(const struct kvf_profile_tensor *from)
{
    return (struct kvf_profile_blob_tensor){
        .codec = from->codec,
        .bits = from->bits,
        .flags = from->flags,
        .rotate = from->rotate,
        .clip = from->clip,
        .group_axis = from->group_axis,
        .group_size = from->group_size,
        .rot_seed = from->rot_seed,
    };
}

static struct kvf_profile_tensor tensor_unpack(const struct kvf_profile_blob_tensor *from)
{
    return (struct kvf_profile_tensor){
        .codec = from->codec,
        .bits = from->bits,
        .flags = from->flags,
        .rotate = from->rotate,
        .clip = from->clip,
        .group_axis = from->group_axis,
        .group_size = from->group_size,
        .rot_seed = from->rot_seed,
    };
}

static uint32_t blob_crc32c(const uint8_t *bytes, const struct kvf_profile_blob *header)
{
    struct kvf_profile_blob zeroed = *header;
    zeroed.crc32c = 0;
    uint32_t crc = kvf_crc32c(0, &zeroed, sizeof(zeroed));
    return kvf_crc32c(crc, bytes + sizeof(zeroed), header->total_bytes - sizeof(zeroed));
}

void kvf_profile_blob_write(const struct kvf_profile_table *table, void *blob)
{
    struct kvf_profile_blob header = {
        .magic = KVF_PROFILE_BLOB_MAGIC,
        .version = KVF_PROFILE_BLOB_VERSION,
        .header_bytes = sizeof(header),
        .total_bytes = (uint32_t)kvf_profile_blob_bytes(table),
        .workloads = table->workloads,
        .n_layers = table->n_layers,
        .n_heads = table->n_heads,
        .dim_k = table->dim_k,
        .dim_v = table->dim_v,
        .rope_state = table->rope_state,
        .sink_tokens = table->sink_tokens,
        .n_kinds = table->n_kinds,
    };
    assert(table->builtin == NULL);
    memcpy(header.name, table->name, sizeof(header.name));
    memcpy(header.weights_digest, table->weights_digest, sizeof(header.weights_digest));
    memcpy(header.adapter_digest, table->adapter_digest, sizeof(header.adapter_digest));
    uint8_t *at = (uint8_t *)blob + sizeof(header);
    for (uint32_t i = 0; i < table->n_kinds; i++) {
        const struct kvf_profile_blob_tensor pair[2] = {tensor_pack(&table->kinds[i].k),
                                                        tensor_pack(&table->kinds[i].v)};
        memcpy(at, pair, sizeof(pair));
        at += sizeof(pair);
    }
    memcpy(at, table->layer_kinds, table->n_layers);
    at += table->n_layers;
    for (uint32_t i = 0; i < KVF_PROFILE_ARRAYS; i++) {
        if (table->arrays[i] != NULL) {
            size_t bytes = kvf_profile_array_bytes(table, i);
            memcpy(at, table->arrays[i], bytes);
            at += bytes;
            header.arrays = (uint8_t)(header.arrays | 1u << i);
        }
    }
    header.crc32c = blob_crc32c(blob, &header);
    memcpy(blob, &header, sizeof(header));
}

static int fail(const char *text, char why_out[KVF_PROFILE_WHY_BYTES])
{
    (void)snprintf(why_out, KVF_PROFILE_WHY_BYTES, "%s", text);
    return KVF_ERR_INVALID;
}

/* Lengths and checksum; counts are in range then. */
static int header_check(const uint8_t *blob, size_t bytes, const struct kvf_profile_blob *header,
                        char why_out[KVF_PROFILE_WHY_BYTES])
{
    if (header->magic != KVF_PROFILE_BLOB_MAGIC || header->version != KVF_PROFILE_BLOB_VERSION ||
        header->header_bytes != sizeof(*header)) {
        return fail("is not one of this version", why_out);
    }
    if (header->total_bytes != bytes || header->n_kinds > KVF_CODEC_KINDS_MAX ||
        header->n_layers > KVF_LAYERS_MAX || header->n_heads > KVF_HEADS_MAX ||
        header->dim_k > KVF_DIM_MAX || header->dim_v > KVF_DIM_MAX ||
        header->arrays >= 1u << KVF_PROFILE_ARRAYS ||
        fixed_bytes(header->n_kinds, header->n_layers) > bytes) {
        return fail("has counts that do not fit its bytes", why_out);
    }
    if (blob_crc32c(blob, header) != header->crc32c) {
        return fail("has a wrong checksum", why_out);
    }
    return KVF_OK;
}

static void table_fill(struct kvf_profile_table *table, const struct kvf_profile_blob *header,
                       const uint8_t *at)
{
    /* what stands behind the name's end is nothing */
    memcpy(table->name, header->name, strnlen(header->name, sizeof(header->name)));
    memcpy(table->weights_digest, header->weights_digest, sizeof(table->weights_digest));
    memcpy(table->adapter_digest, header->adapter_digest, sizeof(table->adapter_digest));
    table->workloads = header->workloads;
    table->n_layers = header->n_layers;
    table->n_heads = header->n_heads;
    table->dim_k = header->dim_k;
    table->dim_v = header->dim_v;
    table->rope_state = header->rope_state;
    table->sink_tokens = header->sink_tokens;
    table->n_kinds = header->n_kinds;
    for (uint32_t i = 0; i < table->n_kinds; i++) {
        struct kvf_profile_blob_tensor pair[2];
        memcpy(pair, at, sizeof(pair));
        table->kinds[i].k = tensor_unpack(&pair[0]);
        table->kinds[i].v = tensor_unpack(&pair[1]);
        at += sizeof(pair);
    }
    memcpy(table->layer_kinds, at, table->n_layers);
}

static int arrays_fill(struct kvf_profile_table *table, uint32_t arrays, const uint8_t *at,
                       size_t left)
{
    for (uint32_t i = 0; i < KVF_PROFILE_ARRAYS; i++) {
        size_t bytes = kvf_profile_array_bytes(table, i);
        if ((arrays >> i & 1) == 0) {
            continue;
        }
        if (bytes > left) {
            return KVF_ERR_INVALID;
        }
        int status = kvf_profile_table_add_array(table, i);
        if (status != KVF_OK) {
            return status;
        }
        memcpy(table->arrays[i], at, bytes);
        at += bytes;
        left -= bytes;
    }
    return left == 0 ? KVF_OK : KVF_ERR_INVALID;
}

int kvf_profile_blob_read(const void *blob, size_t bytes, struct kvf_profile_table **table_out,
                          char why_out[KVF_PROFILE_WHY_BYTES])
{
    struct kvf_profile_blob header;
    if (bytes < sizeof(header) || bytes > KVF_PROFILE_BLOB_BYTES_MAX) {
        return fail("has an impossible length", why_out);
    }
    memcpy(&header, blob, sizeof(header));
    int status = header_check(blob, bytes, &header, why_out);
    if (status != KVF_OK) {
        return status;
    }
    struct kvf_profile_table *table = kvf_profile_table_create();
    if (table == NULL) {
        (void)fail("finds no memory", why_out);
        return KVF_ERR_NO_MEMORY;
    }
    size_t fixed = fixed_bytes(header.n_kinds, header.n_layers);
    table_fill(table, &header, (const uint8_t *)blob + sizeof(header));
    status = arrays_fill(table, header.arrays, (const uint8_t *)blob + fixed, bytes - fixed);
    if (status != KVF_OK) {
        (void)fail(status == KVF_ERR_NO_MEMORY ? "finds no memory"
                                               : "has arrays that do not fit its bytes",
                   why_out);
    } else {
        status = kvf_profile_table_validate(table, why_out);
    }
    if (status == KVF_OK && table->builtin != NULL) {
        status = fail("has the name of a profile of the build", why_out);
    }
    if (status != KVF_OK) {
        kvf_profile_table_destroy(table);
        return status == KVF_ERR_NO_MEMORY ? status : KVF_ERR_INVALID;
    }
    *table_out = table;
    return KVF_OK;
}
