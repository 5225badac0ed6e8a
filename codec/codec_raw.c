/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_raw.c: the codec of profile "raw", of MLA's rotary part, and of every strip that no other
 * codec makes smaller.
 */
#include "codec/codec_raw.h"

#include "codec/codec_pages.h"

static int raw_resolve(struct kvf_codec_tensor *tensor, const struct kvf_profile_tensor *settings)
{
    (void)settings;
    tensor->group = tensor->dim;
    tensor->n_rows = tensor->n_heads;
    tensor->descriptor.codec = KVF_CODEC_RAW;
    tensor->descriptor.bits = KVF_BITS_RAW;
    return KVF_OK;
}

static void raw_sizes(const struct kvf_codec_tensor *tensor, uint32_t n_tokens,
                      struct kvf_codec_sizes *sizes_out)
{
    size_t bytes = (size_t)tensor->n_rows * n_tokens * tensor->dim * tensor->element_bytes;
    *sizes_out = (struct kvf_codec_sizes){.codes_bytes = kvf_part_bytes(bytes)};
}

static size_t raw_workspace_bytes(const struct kvf_codec_tensor *tensor)
{
    (void)tensor;
    return 0;
}

static int raw_encode(const struct kvf_codec_tensor *tensor, const struct kvf_codec_job *job,
                      uint8_t *strip, struct kvf_codec_escapes *escapes, void *workspace,
                      struct kvf_codec_sizes *sizes_out)
{
    (void)escapes;
    (void)workspace;
    raw_sizes(tensor, job->n_tokens, sizes_out);
    size_t vector_bytes = (size_t)tensor->dim * tensor->element_bytes;
    uint8_t *to = strip;
    for (uint32_t row = 0; row < tensor->n_rows; row++) {
        for (uint32_t token = 0; token < job->n_tokens; token++) {
            memcpy(to, kvf_pages_vector(tensor, job, row, token), vector_bytes);
            to += vector_bytes;
        }
    }
    memset(to, 0, sizes_out->codes_bytes - (size_t)(to - strip));
    return KVF_OK;
}

static int raw_decode(const struct kvf_codec_tensor *tensor, const struct kvf_codec_job *job,
                      const uint8_t *strip, const struct kvf_codec_sizes *sizes, void *workspace)
{
    (void)sizes;
    (void)workspace;
    size_t vector_bytes = (size_t)tensor->dim * tensor->element_bytes;
    for (uint32_t row = 0; row < tensor->n_rows; row++) {
        const uint8_t *from = strip +
                              ((size_t)row * job->n_tokens + job->token_first) * vector_bytes;
        for (uint32_t token = 0; token < job->n_wanted; token++) {
            memcpy(kvf_pages_vector(tensor, job, row, token), from, vector_bytes);
            from += vector_bytes;
        }
    }
    return KVF_OK;
}

const struct kvf_codec_ops kvf_codec_raw = {
    .name = "raw",
    .id = KVF_CODEC_RAW,
    .abi_version = KVF_CODEC_ABI,
    .capabilities = KVF_CODEC_LOSSLESS | KVF_CODEC_FIXED_RATE,
    .resolve = raw_resolve,
    .sizes = raw_sizes,
    .workspace_bytes = raw_workspace_bytes,
    .encode = raw_encode,
    .decode = raw_decode,
};
