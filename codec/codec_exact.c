/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_exact.c: the lossless codec; the layout is in codec_exact.h.
 */
#include "codec/codec_exact.h"

#include "codec/codec_exact_kernels.h"
#include "codec/codec_pages.h"
#include "codec/simd.h"

_Static_assert((int)KVF_DIM_MAX <= (int)KVF_EXACT_CHUNK_ELEMENTS,
               "a chunk holds at least one vector");

static struct kvf_exact_shape exact_shape(const struct kvf_codec_tensor *tensor, uint32_t n_tokens)
{
    return kvf_exact_shape(tensor->n_rows, tensor->dim, tensor->element_bytes, n_tokens);
}

/* -------------------------------------------------------------------------------------------------
 * Elements
 */
static uint32_t split_bf16(const struct kvf_exact_table *table, const uint8_t *from, uint32_t n,
                           uint8_t *rest, uint8_t *indices, uint64_t masks[KVF_EXACT_MASKS])
{
    memset(masks, 0, KVF_EXACT_MASKS * sizeof(masks[0]));
    return kvf_exact_split_from(table, from, 0, n, rest, indices, masks);
}

static void join_bf16(const uint8_t exponent[KVF_EXACT_EXPONENTS], const uint8_t *rest,
                      const uint8_t *indices, uint32_t n, uint8_t *to)
{
    kvf_exact_join_from(exponent, rest, indices, 0, n, to);
}

/* fp32 is rare: plain C at all levels. */
static uint32_t split_f32(const struct kvf_exact_table *table, const uint8_t *from, uint32_t n,
                          uint8_t *rest, uint8_t *indices, uint64_t masks[KVF_EXACT_MASKS])
{
    uint32_t escapes = 0;
    memset(masks, 0, KVF_EXACT_MASKS * sizeof(masks[0]));
    for (uint32_t i = 0; i < n; i++) {
        uint32_t bits = kvf_load_u32(from + 4 * i);
        uint32_t kept = (bits >> 8 & 0x800000) | (bits & 0x7fffff);
        rest[3 * i] = (uint8_t)kept;
        rest[3 * i + 1] = (uint8_t)(kept >> 8);
        rest[3 * i + 2] = (uint8_t)(kept >> 16);
        uint32_t index = table->index[bits >> 23 & 0xff];
        uint64_t escape = index / KVF_EXACT_EXPONENTS;
        index %= KVF_EXACT_EXPONENTS;
        indices[i / 2] = (uint8_t)(i % 2 != 0 ? indices[i / 2] | index << 4 : index);
        masks[i / KVF_EXACT_MASK_BITS] |= escape << i % KVF_EXACT_MASK_BITS;
        escapes += (uint32_t)escape;
    }
    return escapes;
}

static void join_f32(const uint8_t exponent[KVF_EXACT_EXPONENTS], const uint8_t *rest,
                     const uint8_t *indices, uint32_t n, uint8_t *to)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t kept = rest[3 * i] | (uint32_t)rest[3 * i + 1] << 8 |
                        (uint32_t)rest[3 * i + 2] << 16;
        uint32_t index = indices[i / 2] >> (i % 2 * 4) & 15;
        kvf_store_u32(to + 4 * i,
                      (kept & 0x800000) << 8 | (uint32_t)exponent[index] << 23 | (kept & 0x7fffff));
    }
}

static const struct kvf_exact_kernels kernels_f32 = {.split = split_f32, .join = join_f32};
static const struct kvf_exact_kernels kernels_bf16 = {.split = split_bf16, .join = join_bf16};

static const struct kvf_exact_kernels *const kernels[KVF_SIMD_LEVELS] = {
    [KVF_SIMD_SCALAR] = &kernels_bf16,
#if defined(__x86_64__)
    [KVF_SIMD_AVX2] = &kvf_exact_kernels_avx2,
    [KVF_SIMD_AVX512] = &kvf_exact_kernels_avx512,
#endif
};

static const struct kvf_exact_kernels *kernels_for(const struct kvf_codec_tensor *tensor)
{
    return tensor->element_bytes == sizeof(uint32_t) ? &kernels_f32
                                                     : kernels[kvf_codec_simd_level()];
}

static uint8_t get_exponent(const uint8_t *elements, uint32_t i, uint32_t element_bytes)
{
    const uint8_t *top = elements + (i + 1) * element_bytes - 2;
    return (uint8_t)(top[1] << 1 | top[0] >> 7);
}

static void set_exponent(uint8_t *elements, uint32_t i, uint32_t element_bytes, uint8_t exponent)
{
    uint8_t *top = elements + (i + 1) * element_bytes - 2;
    top[0] = (uint8_t)((top[0] & 0x7f) | exponent << 7);
    top[1] = (uint8_t)((top[1] & 0x80) | exponent >> 1);
}

/* -------------------------------------------------------------------------------------------------
 * Shape
 */
static int exact_resolve(struct kvf_codec_tensor *tensor, const struct kvf_profile_tensor *settings)
{
    (void)settings;
    if (tensor->dtype != KVF_DTYPE_BF16 && tensor->dtype != KVF_DTYPE_F32) {
        return KVF_ERR_UNSUPPORTED;
    }
    tensor->group = tensor->dim;
    tensor->n_rows = tensor->n_heads;
    tensor->descriptor.codec = KVF_CODEC_EXACT;
    tensor->descriptor.bits = KVF_BITS_EXACT;
    tensor->descriptor.layout = KVF_LAYOUT_SPLIT;
    return KVF_OK;
}

/* Encode gives up before it would need more than raw. */
static void exact_sizes(const struct kvf_codec_tensor *tensor, uint32_t n_tokens,
                        struct kvf_codec_sizes *sizes_out)
{
    *sizes_out = (struct kvf_codec_sizes){.codes_bytes = exact_shape(tensor, n_tokens).raw_bytes};
}

static int exact_stored_sizes(const struct kvf_codec_tensor *tensor, uint32_t n_tokens,
                              const uint8_t *strip, size_t strip_bytes,
                              struct kvf_codec_sizes *sizes_out)
{
    struct kvf_exact_shape shape = exact_shape(tensor, n_tokens);
    if (shape.meta_bytes > strip_bytes) {
        return KVF_ERR_CORRUPT;
    }
    size_t escape_bytes = kvf_load_u32(strip + KVF_EXACT_EXPONENTS +
                                       (size_t)shape.n_chunks * sizeof(uint32_t));
    *sizes_out = (struct kvf_codec_sizes){
        .meta_bytes = shape.meta_bytes,
        .codes_bytes = kvf_part_bytes((size_t)shape.escape_offset + escape_bytes),
    };
    return KVF_OK;
}

static size_t exact_workspace_bytes(const struct kvf_codec_tensor *tensor)
{
    (void)tensor;
    return KVF_EXACT_CHUNK_ELEMENTS * sizeof(uint32_t);
}

/* -------------------------------------------------------------------------------------------------
 * Encode
 */

/* Count the exponents of a vector. Eight counts side by side: neighbours tend to have the same
 * exponent, and adding to one place again and again waits for the last addition. */
static void count_vector(const uint8_t *vector, uint32_t n, uint32_t element_bytes,
                         uint32_t counts[8][256])
{
    uint32_t i = 0;
    for (; element_bytes == 2 && i + 8 <= n; i += 8) {
        uint64_t four[2];
        memcpy(four, vector + 2 * i, sizeof(four));
        for (int j = 0; j < 4; j++) {
            counts[j][four[0] >> (7 + 16 * j) & 0xff]++;
            counts[4 + j][four[1] >> (7 + 16 * j) & 0xff]++;
        }
    }
    for (; i < n; i++) {
        counts[i % 8][get_exponent(vector, i, element_bytes)]++;
    }
}

/* How often each exponent occurs. Vectors that lie side by side are read one after the other, which
 * is what processors expect. */
static void count_exponents(const struct kvf_codec_tensor *tensor, const struct kvf_codec_job *job,
                            uint32_t counts_out[256])
{
    uint32_t counts[8][256] = {{0}};
    bool by_token = job->tensor->head_stride_bytes < job->tensor->token_stride_bytes;
    uint32_t n_outer = by_token ? job->n_tokens : tensor->n_rows;
    uint32_t n_inner = by_token ? tensor->n_rows : job->n_tokens;
    for (uint32_t outer = 0; outer < n_outer; outer++) {
        for (uint32_t inner = 0; inner < n_inner; inner++) {
            uint32_t row = by_token ? inner : outer;
            uint32_t token = by_token ? outer : inner;
            count_vector(kvf_pages_vector(tensor, job, row, token), tensor->dim,
                         tensor->element_bytes, counts);
        }
    }
    for (int i = 0; i < 256; i++) {
        counts_out[i] = 0;
        for (int j = 0; j < 8; j++) {
            counts_out[i] += counts[j][i];
        }
    }
}

/* The table in the form for vectors. */
static void fill_lookup(struct kvf_exact_table *table)
{
    memset(table->lookup, 0, sizeof(table->lookup));
    table->n_uppers = 0;
    for (uint32_t exponent = 0; exponent < 256; exponent++) {
        uint8_t index = table->index[exponent];
        if (index == KVF_EXACT_EXPONENTS) {
            continue;
        }
        uint8_t upper = (uint8_t)(exponent >> 4);
        if (table->n_uppers == 0 || table->upper[table->n_uppers - 1] != upper) {
            table->upper[table->n_uppers++] = upper;
        }
        table->lookup[table->n_uppers - 1][exponent & 15] = index | KVF_EXACT_EXPONENTS;
    }
}

/* The most frequent exponents, the smaller one first among equals, and the index of each. */
static void choose_exponents(uint32_t counts[256], struct kvf_exact_table *table)
{
    memset(table->exponent, 0, sizeof(table->exponent));
    memset(table->index, KVF_EXACT_EXPONENTS, sizeof(table->index));
    for (uint8_t code = 0; code < KVF_EXACT_EXPONENTS; code++) {
        int best = 0;
        for (int i = 1; i < 256; i++) {
            best = counts[i] > counts[best] ? i : best;
        }
        if (counts[best] == 0) {
            break;
        }
        table->exponent[code] = (uint8_t)best;
        table->index[best] = code;
        counts[best] = 0;
    }
    fill_lookup(table);
}

static void write_escapes(const uint8_t *elements, uint32_t element_bytes,
                          const uint64_t masks[KVF_EXACT_MASKS], uint8_t *to)
{
    for (uint32_t m = 0; m < KVF_EXACT_MASKS; m++) {
        for (uint64_t mask = masks[m]; mask != 0; mask &= mask - 1) {
            uint32_t i = m * KVF_EXACT_MASK_BITS + (uint32_t)__builtin_ctzll(mask);
            to[0] = (uint8_t)i;
            to[1] = (uint8_t)(i >> 8);
            to[2] = get_exponent(elements, i, element_bytes);
            to += KVF_EXACT_ESCAPE_BYTES;
        }
    }
}

/* Writing position of an encode. */
struct exact_writer {
    uint8_t *directory;
    uint8_t *rest;
    uint8_t *indices;
    uint8_t *escapes;
    size_t escape_bytes;
    size_t escape_bytes_max; /* with so many the strip is still smaller than raw */
};

static bool write_chunk(const struct kvf_codec_tensor *tensor, const struct kvf_exact_table *table,
                        const uint8_t *elements, uint32_t n, struct exact_writer *writer)
{
    uint64_t masks[KVF_EXACT_MASKS];
    uint32_t n_escapes = kernels_for(tensor)->split(table, elements, n, writer->rest,
                                                    writer->indices, masks);
    bool uncoded = n_escapes * KVF_EXACT_ESCAPE_BYTES > n;
    size_t bytes = uncoded ? n : n_escapes * KVF_EXACT_ESCAPE_BYTES;
    if (bytes > writer->escape_bytes_max - writer->escape_bytes) {
        return false;
    }
    uint8_t *escapes = writer->escapes + writer->escape_bytes;
    if (uncoded) {
        memset(writer->indices, 0, (n + 1) / 2);
        for (uint32_t i = 0; i < n; i++) {
            escapes[i] = get_exponent(elements, i, tensor->element_bytes);
        }
    } else if (n_escapes != 0) {
        write_escapes(elements, tensor->element_bytes, masks, escapes);
    }
    kvf_store_u32(writer->directory,
                  (uint32_t)writer->escape_bytes | (uncoded ? KVF_EXACT_CHUNK_UNCODED : 0));
    writer->directory += sizeof(uint32_t);
    writer->rest += (size_t)n * (tensor->element_bytes - 1u);
    writer->indices += (n + 1) / 2;
    writer->escape_bytes += bytes;
    return true;
}

static int exact_encode(const struct kvf_codec_tensor *tensor, const struct kvf_codec_job *job,
                        uint8_t *strip, struct kvf_codec_escapes *escapes, void *workspace,
                        struct kvf_codec_sizes *sizes_out)
{
    (void)escapes;
    struct kvf_exact_shape shape = exact_shape(tensor, job->n_tokens);
    int64_t escape_bytes_max = kvf_exact_escape_bytes_max(&shape);
    if (escape_bytes_max < 0) {
        return KVF_ERR_NO_SPACE;
    }
    uint8_t *elements = workspace;
    size_t vector_bytes = (size_t)tensor->dim * tensor->element_bytes;
    uint32_t counts[256];
    struct kvf_exact_table table;
    count_exponents(tensor, job, counts);
    choose_exponents(counts, &table);
    memcpy(strip, table.exponent, sizeof(table.exponent));

    uint8_t *codes = strip + shape.meta_bytes;
    struct exact_writer writer = {
        .directory = strip + KVF_EXACT_EXPONENTS,
        .rest = codes,
        .indices = codes + shape.index_offset,
        .escapes = codes + shape.escape_offset,
        .escape_bytes_max = (size_t)escape_bytes_max,
    };
    for (uint32_t i = 0; i < shape.n_chunks; i++) {
        uint32_t row = i / shape.chunks_a_row;
        uint32_t chunk = i % shape.chunks_a_row;
        uint32_t n_tokens = kvf_exact_chunk_tokens(&shape, job->n_tokens, chunk);
        for (uint32_t t = 0; t < n_tokens; t++) {
            uint32_t token = chunk * shape.tokens_a_chunk + t;
            memcpy(elements + t * vector_bytes, kvf_pages_vector(tensor, job, row, token),
                   vector_bytes);
        }
        if (!write_chunk(tensor, &table, elements, n_tokens * tensor->dim, &writer)) {
            return KVF_ERR_NO_SPACE;
        }
    }
    kvf_store_u32(writer.directory, (uint32_t)writer.escape_bytes);
    writer.directory += sizeof(uint32_t);
    memset(writer.directory, 0, (size_t)(codes - writer.directory));
    size_t codes_bytes = shape.escape_offset + writer.escape_bytes;
    *sizes_out = (struct kvf_codec_sizes){
        .meta_bytes = shape.meta_bytes,
        .codes_bytes = kvf_part_bytes(codes_bytes),
    };
    memset(codes + codes_bytes, 0, sizes_out->codes_bytes - codes_bytes);
    return KVF_OK;
}

/* -------------------------------------------------------------------------------------------------
 * Decode
 */

/* Correct the exponents of a chunk by its escapes, of which there are bytes bytes. False if they
 * cannot be those of n elements. */
static bool read_escapes(const uint8_t *escapes, size_t bytes, bool uncoded, uint32_t n,
                         uint32_t element_bytes, uint8_t *elements)
{
    if (uncoded) {
        for (uint32_t i = 0; i < n && bytes == n; i++) {
            set_exponent(elements, i, element_bytes, escapes[i]);
        }
        return bytes == n;
    }
    if (bytes % KVF_EXACT_ESCAPE_BYTES != 0) {
        return false;
    }
    for (size_t at = 0; at < bytes; at += KVF_EXACT_ESCAPE_BYTES) {
        uint32_t position = escapes[at] | (uint32_t)escapes[at + 1] << 8;
        if (position >= n) {
            return false;
        }
        set_exponent(elements, position, element_bytes, escapes[at + 2]);
    }
    return true;
}

/* The elements of one chunk. */
static bool read_chunk(const struct kvf_codec_tensor *tensor, const struct kvf_exact_shape *shape,
                       uint32_t n_tokens, uint32_t row, uint32_t chunk, const uint8_t *strip,
                       size_t escape_bytes_max, uint8_t *elements)
{
    const uint8_t *codes = strip + shape->meta_bytes;
    const uint8_t *directory = strip + KVF_EXACT_EXPONENTS +
                               ((size_t)row * shape->chunks_a_row + chunk) * sizeof(uint32_t);
    uint32_t first = kvf_load_u32(directory);
    uint32_t end = kvf_load_u32(directory + sizeof(uint32_t)) & ~KVF_EXACT_CHUNK_UNCODED;
    bool uncoded = (first & KVF_EXACT_CHUNK_UNCODED) != 0;
    first &= ~KVF_EXACT_CHUNK_UNCODED;
    if (first > end || end > escape_bytes_max) {
        return false;
    }
    size_t element = ((size_t)row * n_tokens + (size_t)chunk * shape->tokens_a_chunk) * tensor->dim;
    uint32_t n = kvf_exact_chunk_tokens(shape, n_tokens, chunk) * tensor->dim;
    const uint8_t *indices = codes + shape->index_offset + (size_t)row * shape->row_index_bytes +
                             (size_t)chunk * shape->chunk_bytes;
    kernels_for(tensor)->join(strip, codes + element * shape->rest_bytes, indices, n, elements);
    return read_escapes(codes + shape->escape_offset + first, end - first, uncoded, n,
                        tensor->element_bytes, elements);
}

static int exact_decode(const struct kvf_codec_tensor *tensor, const struct kvf_codec_job *job,
                        const uint8_t *strip, const struct kvf_codec_sizes *sizes, void *workspace)
{
    struct kvf_exact_shape shape = exact_shape(tensor, job->n_tokens);
    /* stored_sizes made codes_bytes from a directory that may have changed since: hold on to
     * sizes. */
    size_t escape_bytes_max = sizes->codes_bytes - shape.escape_offset;
    uint8_t *elements = workspace;
    size_t vector_bytes = (size_t)tensor->dim * tensor->element_bytes;
    uint32_t token_end = job->token_first + job->n_wanted;
    uint32_t chunk_first = job->token_first / shape.tokens_a_chunk;
    uint32_t chunk_end = (token_end + shape.tokens_a_chunk - 1) / shape.tokens_a_chunk;
    for (uint32_t row = 0; row < tensor->n_rows; row++) {
        for (uint32_t chunk = chunk_first; chunk < chunk_end; chunk++) {
            if (!read_chunk(tensor, &shape, job->n_tokens, row, chunk, strip, escape_bytes_max,
                            elements)) {
                return KVF_ERR_CORRUPT;
            }
            uint32_t n_tokens = kvf_exact_chunk_tokens(&shape, job->n_tokens, chunk);
            for (uint32_t t = 0; t < n_tokens; t++) {
                uint32_t token = chunk * shape.tokens_a_chunk + t;
                if (token >= job->token_first && token < token_end) {
                    memcpy(kvf_pages_vector(tensor, job, row, token - job->token_first),
                           elements + t * vector_bytes, vector_bytes);
                }
            }
        }
    }
    return KVF_OK;
}

const struct kvf_codec_ops kvf_codec_exact = {
    .name = "exact",
    .id = KVF_CODEC_EXACT,
    .abi_version = KVF_CODEC_ABI,
    .capabilities = KVF_CODEC_LOSSLESS,
    .resolve = exact_resolve,
    .sizes = exact_sizes,
    .stored_sizes = exact_stored_sizes,
    .workspace_bytes = exact_workspace_bytes,
    .encode = exact_encode,
    .decode = exact_decode,
};
