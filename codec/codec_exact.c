/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_exact.c: the lossless codec; the layout is in codec_exact.h.
 */
#include "codec/codec_exact.h"

#include "codec/codec_pages.h"

_Static_assert((int)KVF_DIM_MAX <= (int)KVF_EXACT_CHUNK_ELEMENTS,
               "a chunk holds at least one vector");

/* Where things are in the parts of one tensor of one strip. */
struct exact_shape {
    uint32_t tokens_a_chunk;
    uint32_t chunks_a_row;
    uint32_t n_chunks;
    uint32_t rest_bytes;    /* of one element */
    size_t chunk_bytes;     /* indices of a full chunk */
    size_t row_index_bytes; /* indices of a row */
    size_t meta_bytes;      /* padded */
    size_t index_offset;    /* in codes */
    size_t escape_offset;   /* in codes */
    size_t raw_bytes;       /* padded: what codec raw would take */
};

static struct exact_shape exact_shape(const struct kvf_codec_tensor *tensor, uint32_t n_tokens)
{
    struct exact_shape shape;
    shape.tokens_a_chunk = KVF_EXACT_CHUNK_ELEMENTS / tensor->dim;
    shape.chunks_a_row = (n_tokens + shape.tokens_a_chunk - 1) / shape.tokens_a_chunk;
    shape.n_chunks = shape.chunks_a_row * tensor->n_rows;
    shape.rest_bytes = tensor->element_bytes - 1u;
    shape.chunk_bytes = (shape.tokens_a_chunk * tensor->dim + 1) / 2;
    uint32_t last_tokens = n_tokens - (shape.chunks_a_row - 1) * shape.tokens_a_chunk;
    shape.row_index_bytes = (shape.chunks_a_row - 1) * shape.chunk_bytes +
                            (last_tokens * tensor->dim + 1) / 2;
    shape.meta_bytes = kvf_part_bytes(KVF_EXACT_EXPONENTS +
                                      ((size_t)shape.n_chunks + 1) * sizeof(uint32_t));
    size_t n_elements = (size_t)tensor->n_rows * n_tokens * tensor->dim;
    shape.index_offset = n_elements * shape.rest_bytes;
    shape.escape_offset = shape.index_offset + tensor->n_rows * shape.row_index_bytes;
    shape.raw_bytes = kvf_part_bytes(n_elements * tensor->element_bytes);
    return shape;
}

static uint32_t chunk_tokens(const struct exact_shape *shape, uint32_t n_tokens, uint32_t chunk)
{
    uint32_t left = n_tokens - chunk * shape->tokens_a_chunk;
    return left < shape->tokens_a_chunk ? left : shape->tokens_a_chunk;
}

/* bf16 and fp32 share the place of sign and exponent once a bf16 is moved to the upper half. */
static inline uint8_t exponent_of(uint32_t bits)
{
    return (uint8_t)(bits >> 23);
}

/* The elements of one vector as fp32 bits. */
static void load_vector(const struct kvf_codec_tensor *tensor, const uint8_t *from, uint32_t *to)
{
    if (tensor->element_bytes == sizeof(uint32_t)) {
        memcpy(to, from, tensor->dim * sizeof(uint32_t));
        return;
    }
    for (uint32_t i = 0; i < tensor->dim; i++) {
        uint16_t half;
        memcpy(&half, from + 2 * i, sizeof(half));
        to[i] = (uint32_t)half << 16;
    }
}

static void store_vector(const struct kvf_codec_tensor *tensor, const uint32_t *from, uint8_t *to)
{
    if (tensor->element_bytes == sizeof(uint32_t)) {
        memcpy(to, from, tensor->dim * sizeof(uint32_t));
        return;
    }
    for (uint32_t i = 0; i < tensor->dim; i++) {
        uint16_t half = (uint16_t)(from[i] >> 16);
        memcpy(to + 2 * i, &half, sizeof(half));
    }
}

/* Sign and mantissa of n elements, rest_bytes each. */
static void write_rest(const uint32_t *bits, uint32_t n, uint32_t rest_bytes, uint8_t *to)
{
    if (rest_bytes == 1) {
        for (uint32_t i = 0; i < n; i++) {
            to[i] = (uint8_t)((bits[i] >> 24 & 0x80) | (bits[i] >> 16 & 0x7f));
        }
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t rest = (bits[i] >> 8 & 0x800000) | (bits[i] & 0x7fffff);
        to[3 * i] = (uint8_t)rest;
        to[3 * i + 1] = (uint8_t)(rest >> 8);
        to[3 * i + 2] = (uint8_t)(rest >> 16);
    }
}

static void read_rest(const uint8_t *from, uint32_t n, uint32_t rest_bytes, uint32_t *bits)
{
    if (rest_bytes == 1) {
        for (uint32_t i = 0; i < n; i++) {
            bits[i] = (from[i] & 0x80u) << 24 | (from[i] & 0x7fu) << 16;
        }
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t rest = from[3 * i] | (uint32_t)from[3 * i + 1] << 8 |
                        (uint32_t)from[3 * i + 2] << 16;
        bits[i] = (rest & 0x800000) << 8 | (rest & 0x7fffff);
    }
}

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
    struct exact_shape shape = exact_shape(tensor, n_tokens);
    if (shape.meta_bytes > strip_bytes) {
        return KVF_ERR_CORRUPT;
    }
    size_t escape_bytes = kvf_load_u32(strip + KVF_EXACT_EXPONENTS +
                                       (size_t)shape.n_chunks * sizeof(uint32_t));
    *sizes_out = (struct kvf_codec_sizes){
        .meta_bytes = shape.meta_bytes,
        .codes_bytes = kvf_part_bytes(shape.escape_offset + escape_bytes),
    };
    return KVF_OK;
}

static size_t exact_workspace_bytes(const struct kvf_codec_tensor *tensor)
{
    (void)tensor;
    return KVF_EXACT_CHUNK_ELEMENTS * sizeof(uint32_t);
}

/* How often each exponent occurs. Four counts side by side: neighbours tend to have the same
 * exponent, and adding to one place again and again waits for the last addition. */
static void count_exponents(const struct kvf_codec_tensor *tensor, const struct kvf_codec_job *job,
                            uint32_t *vector, uint32_t counts_out[256])
{
    uint32_t counts[4][256] = {{0}};
    for (uint32_t row = 0; row < tensor->n_rows; row++) {
        for (uint32_t token = 0; token < job->n_tokens; token++) {
            load_vector(tensor, kvf_pages_vector(tensor, job, row, token), vector);
            for (uint32_t i = 0; i < tensor->dim; i++) {
                counts[i % 4][exponent_of(vector[i])]++;
            }
        }
    }
    for (int i = 0; i < 256; i++) {
        counts_out[i] = counts[0][i] + counts[1][i] + counts[2][i] + counts[3][i];
    }
}

/* The most frequent exponents, the smaller one first among equals, and the index of each. An index
 * of KVF_EXACT_EXPONENTS is an escape. */
static void choose_exponents(uint32_t counts[256], uint8_t table_out[KVF_EXACT_EXPONENTS],
                             uint8_t index_out[256])
{
    memset(table_out, 0, KVF_EXACT_EXPONENTS);
    memset(index_out, KVF_EXACT_EXPONENTS, 256);
    for (uint8_t code = 0; code < KVF_EXACT_EXPONENTS; code++) {
        int best = 0;
        for (int i = 1; i < 256; i++) {
            best = counts[i] > counts[best] ? i : best;
        }
        if (counts[best] == 0) {
            break;
        }
        table_out[code] = (uint8_t)best;
        index_out[best] = code;
        counts[best] = 0;
    }
}

/* Indices of one chunk; returns how many of its elements are escapes. */
static uint32_t write_indices(const uint32_t *bits, uint32_t n, const uint8_t index[256],
                              uint8_t *to)
{
    uint32_t escapes = 0;
    for (uint32_t i = 0; i < n; i += 2) {
        uint8_t low = index[exponent_of(bits[i])];
        uint8_t high = i + 1 < n ? index[exponent_of(bits[i + 1])] : 0;
        escapes += (low >> 4) + (high >> 4);
        to[i / 2] = (uint8_t)((low & 15) | (high & 15) << 4);
    }
    return escapes;
}

_Static_assert(KVF_EXACT_EXPONENTS == 16, "write_indices tests bit 4");

static void write_escapes(const uint32_t *bits, uint32_t n, const uint8_t index[256], uint8_t *to)
{
    for (uint32_t i = 0; i < n; i++) {
        uint8_t exponent = exponent_of(bits[i]);
        if (index[exponent] == KVF_EXACT_EXPONENTS) {
            to[0] = (uint8_t)i;
            to[1] = (uint8_t)(i >> 8);
            to[2] = exponent;
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

static bool write_chunk(const uint32_t *bits, uint32_t n, uint32_t rest_bytes,
                        const uint8_t index[256], struct exact_writer *writer)
{
    write_rest(bits, n, rest_bytes, writer->rest);
    uint32_t n_escapes = write_indices(bits, n, index, writer->indices);
    bool uncoded = n_escapes * KVF_EXACT_ESCAPE_BYTES > n;
    size_t bytes = uncoded ? n : n_escapes * KVF_EXACT_ESCAPE_BYTES;
    if (bytes > writer->escape_bytes_max - writer->escape_bytes) {
        return false;
    }
    uint8_t *escapes = writer->escapes + writer->escape_bytes;
    if (uncoded) {
        memset(writer->indices, 0, (n + 1) / 2);
        for (uint32_t i = 0; i < n; i++) {
            escapes[i] = exponent_of(bits[i]);
        }
    } else if (n_escapes != 0) {
        write_escapes(bits, n, index, escapes);
    }
    kvf_store_u32(writer->directory,
                  (uint32_t)writer->escape_bytes | (uncoded ? KVF_EXACT_CHUNK_UNCODED : 0));
    writer->directory += sizeof(uint32_t);
    writer->rest += (size_t)n * rest_bytes;
    writer->indices += (n + 1) / 2;
    writer->escape_bytes += bytes;
    return true;
}

static int exact_encode(const struct kvf_codec_tensor *tensor, const struct kvf_codec_job *job,
                        uint8_t *strip, struct kvf_codec_escapes *escapes, void *workspace,
                        struct kvf_codec_sizes *sizes_out)
{
    (void)escapes;
    struct exact_shape shape = exact_shape(tensor, job->n_tokens);
    size_t fixed_bytes = shape.meta_bytes + shape.escape_offset;
    if (fixed_bytes + KVF_BLOCK_ALIGN_BYTES > shape.raw_bytes) {
        return KVF_ERR_NO_SPACE;
    }
    uint32_t *bits = workspace;
    uint32_t counts[256];
    uint8_t index[256];
    count_exponents(tensor, job, bits, counts);
    choose_exponents(counts, strip, index);

    uint8_t *codes = strip + shape.meta_bytes;
    struct exact_writer writer = {
        .directory = strip + KVF_EXACT_EXPONENTS,
        .rest = codes,
        .indices = codes + shape.index_offset,
        .escapes = codes + shape.escape_offset,
        .escape_bytes_max = shape.raw_bytes - KVF_BLOCK_ALIGN_BYTES - fixed_bytes,
    };
    for (uint32_t i = 0; i < shape.n_chunks; i++) {
        uint32_t row = i / shape.chunks_a_row;
        uint32_t chunk = i % shape.chunks_a_row;
        uint32_t n_tokens = chunk_tokens(&shape, job->n_tokens, chunk);
        for (uint32_t t = 0; t < n_tokens; t++) {
            uint32_t token = chunk * shape.tokens_a_chunk + t;
            load_vector(tensor, kvf_pages_vector(tensor, job, row, token), bits + t * tensor->dim);
        }
        if (!write_chunk(bits, n_tokens * tensor->dim, shape.rest_bytes, index, &writer)) {
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

/* Put the exponents of one chunk into bits, which have sign and mantissa already. escapes has bytes
 * bytes. False if they cannot be those of n elements. */
static bool read_exponents(const uint8_t *table, const uint8_t *indices, const uint8_t *escapes,
                           size_t bytes, bool uncoded, uint32_t n, uint32_t *bits)
{
    if (uncoded) {
        if (bytes != n) {
            return false;
        }
        for (uint32_t i = 0; i < n; i++) {
            bits[i] |= (uint32_t)escapes[i] << 23;
        }
        return true;
    }
    if (bytes % KVF_EXACT_ESCAPE_BYTES != 0) {
        return false;
    }
    for (uint32_t i = 0; i + 1 < n; i += 2) {
        bits[i] |= (uint32_t)table[indices[i / 2] & 15] << 23;
        bits[i + 1] |= (uint32_t)table[indices[i / 2] >> 4] << 23;
    }
    if (n % 2 != 0) {
        bits[n - 1] |= (uint32_t)table[indices[n / 2] & 15] << 23;
    }
    for (size_t at = 0; at < bytes; at += KVF_EXACT_ESCAPE_BYTES) {
        uint32_t position = escapes[at] | (uint32_t)escapes[at + 1] << 8;
        if (position >= n) {
            return false;
        }
        bits[position] = (bits[position] & 0x807fffff) | (uint32_t)escapes[at + 2] << 23;
    }
    return true;
}

/* One chunk into bits. */
static bool read_chunk(const struct kvf_codec_tensor *tensor, const struct exact_shape *shape,
                       uint32_t n_tokens, uint32_t row, uint32_t chunk, const uint8_t *strip,
                       size_t escape_bytes_max, uint32_t *bits)
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
    uint32_t n = chunk_tokens(shape, n_tokens, chunk) * tensor->dim;
    read_rest(codes + element * shape->rest_bytes, n, shape->rest_bytes, bits);
    const uint8_t *indices = codes + shape->index_offset + row * shape->row_index_bytes +
                             chunk * shape->chunk_bytes;
    return read_exponents(strip, indices, codes + shape->escape_offset + first, end - first,
                          uncoded, n, bits);
}

static int exact_decode(const struct kvf_codec_tensor *tensor, const struct kvf_codec_job *job,
                        const uint8_t *strip, const struct kvf_codec_sizes *sizes, void *workspace)
{
    struct exact_shape shape = exact_shape(tensor, job->n_tokens);
    /* stored_sizes made codes_bytes from a directory that may have changed since: hold on to
     * sizes. */
    size_t escape_bytes_max = sizes->codes_bytes - shape.escape_offset;
    uint32_t *bits = workspace;
    uint32_t token_end = job->token_first + job->n_wanted;
    uint32_t chunk_first = job->token_first / shape.tokens_a_chunk;
    uint32_t chunk_end = (token_end + shape.tokens_a_chunk - 1) / shape.tokens_a_chunk;
    for (uint32_t row = 0; row < tensor->n_rows; row++) {
        for (uint32_t chunk = chunk_first; chunk < chunk_end; chunk++) {
            if (!read_chunk(tensor, &shape, job->n_tokens, row, chunk, strip, escape_bytes_max,
                            bits)) {
                return KVF_ERR_CORRUPT;
            }
            uint32_t n_tokens = chunk_tokens(&shape, job->n_tokens, chunk);
            for (uint32_t t = 0; t < n_tokens; t++) {
                uint32_t token = chunk * shape.tokens_a_chunk + t;
                if (token >= job->token_first && token < token_end) {
                    uint8_t *to = kvf_pages_vector(tensor, job, row, token - job->token_first);
                    store_vector(tensor, bits + t * tensor->dim, to);
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
