/* SPDX-License-Identifier: Apache-2.0
 *
 * entropy_cut.c: from the page of a record to pieces of like bytes. The page says which codec has
 * written a strip, and the codec how large its parts are; where that does not explain a strip, it
 * is bytes of unknown content. So a wrong guess costs size, and nothing else.
 */
#include "codec/entropy_cut.h"

#include "codec/codec.h"
#include "codec/codec_exact.h"
#include "codec/codec_fp.h"
#include "codec/codec_pages.h"
#include "codec/codec_saw.h"
#include "codec/entropy_rans.h"

#include <assert.h>

#define OPAQUE_SAMPLE_BYTES (64u << 10)
#define STREAM_ROOM_MIN     (KVF_ENTROPY_STREAM_BYTES / 16) /* less is left empty */
#define GUESSES_MAX         10

/* The rows that bytes are cut into. */
struct shape {
    uint32_t row_bytes;
    uint32_t n_columns;
    uint32_t widths[KVF_ENTROPY_COLUMNS];
    struct kvf_entropy_role role; /* of column 0; the others have the next numbers */
    uint8_t transform;            /* enum kvf_entropy_transform */
    bool is_sorted;
    size_t meta_at; /* is_sorted: of the first row's scales, in the payload */
};

/* -------------------------------------------------------------------------------------------------
 * Pieces and streams
 */
static uint8_t role_find(struct kvf_entropy_cut *cut, struct kvf_entropy_role role)
{
    for (uint32_t i = 0; i < cut->n_roles; i++) {
        if (memcmp(&cut->roles[i], &role, sizeof(role)) == 0) {
            return (uint8_t)i;
        }
    }
    if (cut->n_roles == KVF_ENTROPY_ROLES) {
        cut->is_full = true;
        return 0;
    }
    cut->roles[cut->n_roles] = role;
    return (uint8_t)cut->n_roles++;
}

static struct kvf_entropy_run *stream_new(struct kvf_entropy_cut *cut)
{
    if (cut->n_streams == KVF_ENTROPY_STREAMS) {
        cut->is_full = true;
        return NULL;
    }
    cut->streams[cut->n_streams] = (struct kvf_entropy_run){.first_piece = cut->n_pieces};
    return &cut->streams[cut->n_streams++];
}

static void piece_add(struct kvf_entropy_cut *cut, struct kvf_entropy_run *stream,
                      const struct shape *shape, size_t at, size_t done, uint32_t bytes)
{
    struct kvf_entropy_piece *piece;

    if (cut->n_pieces == KVF_ENTROPY_PIECES) {
        cut->is_full = true;
        return;
    }
    piece = &cut->pieces[cut->n_pieces++];
    *piece = (struct kvf_entropy_piece){.bytes = bytes,
                                        .row_bytes = (uint16_t)shape->row_bytes,
                                        .n_columns = (uint8_t)shape->n_columns,
                                        .transform = shape->transform,
                                        .is_sorted = shape->is_sorted};
    if (shape->is_sorted) {
        size_t meta_at = shape->meta_at + done / shape->row_bytes * KVF_SAW_META_BYTES;

        piece->distance = (uint32_t)(at + done - meta_at);
    }
    for (uint32_t i = 0; i < shape->n_columns; i++) {
        struct kvf_entropy_role role = shape->role;

        role.column = (uint8_t)(role.column + i);
        piece->columns[i].bytes = (uint16_t)shape->widths[i];
        piece->columns[i].role = role_find(cut, role);
    }
    stream->plain_bytes += bytes;
    stream->n_pieces++;
}

/* The bytes of the payload at at: in as many pieces as streams make of them. */
static void add(struct kvf_entropy_cut *cut, const struct shape *shape, size_t at, size_t bytes)
{
    size_t done = 0;

    while (done < bytes && !cut->is_full) {
        struct kvf_entropy_run *stream = cut->n_streams == 0 ? stream_new(cut)
                                                             : &cut->streams[cut->n_streams - 1];
        size_t room = KVF_ENTROPY_STREAM_BYTES - stream->plain_bytes;
        size_t take = bytes - done;

        if (take > room) {
            take = room < STREAM_ROOM_MIN ? 0 : room / shape->row_bytes * shape->row_bytes;
        }
        if (take == 0) {
            (void)stream_new(cut);
            continue;
        }
        piece_add(cut, stream, shape, at, done, (uint32_t)take);
        done += take;
    }
}

/* Rows of width columns of one byte each. */
static struct shape planes(uint32_t width, struct kvf_entropy_role role)
{
    struct shape shape = {.row_bytes = width, .n_columns = width, .role = role};

    for (uint32_t i = 0; i < width; i++) {
        shape.widths[i] = 1;
    }
    return shape;
}

static struct shape whole(struct kvf_entropy_role role)
{
    return planes(1, role);
}

/* -------------------------------------------------------------------------------------------------
 * Strips
 */

struct guess {
    struct kvf_codec_tensor tensor;
    struct kvf_codec_sizes sizes;
};

struct guesses {
    struct guess at[GUESSES_MAX];
    uint32_t n;
};

/* One more, if the codec has such a form. */
static void guess_add(struct guesses *guesses, const struct kvf_block_header *header, uint16_t dim,
                      const struct kvf_profile_tensor *settings)
{
    struct kvf_codec_tensor *tensor = &guesses->at[guesses->n].tensor;

    assert(guesses->n < GUESSES_MAX);
    *tensor = (struct kvf_codec_tensor){
        .ops = kvf_codec_find(settings->codec),
        .n_heads = header->n_heads,
        .dim = dim,
        .dtype = header->src_dtype,
        .element_bytes = (uint8_t)kvf_dtype_bytes(header->src_dtype),
    };
    guesses->n += tensor->ops != NULL && tensor->ops->resolve(tensor, settings) == KVF_OK;
}

/* What a layer of a block of several kinds may have, whose page says a width and no more. */
static void guess_kinds(struct guesses *guesses, const struct kvf_block_header *header,
                        uint16_t dim, uint8_t bits, bool is_v)
{
    static const uint8_t tq_flags[] = {0, KVF_TENSOR_CENTER, KVF_TENSOR_SPLIT,
                                       KVF_TENSOR_CENTER | KVF_TENSOR_SPLIT};
    struct kvf_profile_tensor settings = {.codec = KVF_CODEC_EXACT, .bits = bits};

    if (bits == KVF_BITS_EXACT) {
        guess_add(guesses, header, dim, &settings);
        return;
    }
    for (uint32_t i = 0; i < sizeof(tq_flags); i++) {
        settings.codec = KVF_CODEC_TQ;
        settings.flags = tq_flags[i];
        guess_add(guesses, header, dim, &settings);
    }
    for (uint16_t group = 32; group <= 128; group *= 2) {
        settings = (struct kvf_profile_tensor){.codec = KVF_CODEC_KIVI,
                                               .bits = bits,
                                               .group_size = group,
                                               .group_axis = is_v ? KVF_AXIS_TOKEN
                                                                  : KVF_AXIS_CHANNEL};
        guess_add(guesses, header, dim, &settings);
    }
}

/* How K or V of a layer may be stored: as the descriptor says, or, where layers differ, by saw with
 * or without means, or in any way. */
static void guesses_make(struct guesses *guesses, const struct kvf_block_header *header,
                         uint32_t bits, bool is_v)
{
    const struct kvf_block_tensor *descriptor = is_v ? &header->v : &header->k;
    uint16_t dim = is_v ? header->d_v : header->d_k;
    struct kvf_profile_tensor settings = {
        .codec = bits == KVF_BITS_RAW ? (uint8_t)KVF_CODEC_RAW : descriptor->codec,
        .bits = (uint8_t)bits,
        .flags = descriptor->flags,
        .rotate = descriptor->rot_kind != KVF_ROT_NONE,
        .zero_kind = descriptor->zero_kind,
        .group_size = descriptor->group_size,
        .group_axis = descriptor->group_axis,
    };

    guesses->n = 0;
    if (dim == 0) {
        guesses->at[guesses->n++] = (struct guess){0};
        return;
    }
    guess_add(guesses, header, dim, &settings);
    if (bits == KVF_BITS_RAW) {
        return;
    }
    settings.codec = KVF_CODEC_SAW;
    settings.flags = KVF_TENSOR_CENTER;
    guess_add(guesses, header, dim, &settings);
    settings.flags = 0;
    guess_add(guesses, header, dim, &settings);
    if ((header->block_flags & KVF_BLOCK_KINDS) != 0) {
        guess_kinds(guesses, header, dim, (uint8_t)bits, is_v);
    }
}

/* The sizes of what would be at strip. */
static bool guess_measure(struct guess *guess, uint32_t n_tokens, const uint8_t *strip,
                          size_t strip_bytes)
{
    const struct kvf_codec_ops *ops = guess->tensor.ops;

    if (ops == NULL) {
        guess->sizes = (struct kvf_codec_sizes){0};
        return true;
    }
    if (ops->stored_sizes != NULL) {
        return ops->stored_sizes(&guess->tensor, n_tokens, strip, strip_bytes, &guess->sizes) ==
               KVF_OK;
    }
    ops->sizes(&guess->tensor, n_tokens, &guess->sizes);
    return kvf_sizes_total(&guess->sizes) <= strip_bytes;
}

/* Has saw zeros in planes behind the scales? */
static bool has_zeros(const struct kvf_codec_tensor *tensor)
{
    return tensor->descriptor.codec == KVF_CODEC_SAW && kvf_saw_has_zeros(tensor);
}

/* Codes in rows of a vector: planes, if there are several, and sorted by class if that is worth its
 * tables. */
static struct shape codes_shape(const struct guess *guess, struct kvf_entropy_role role,
                                size_t payload_bytes, size_t meta_at)
{
    const struct kvf_codec_tensor *tensor = &guess->tensor;
    uint32_t low = kvf_saw_low_bits(role.bits);
    struct shape shape = whole(role);

    if (role.codec != KVF_CODEC_SAW) {
        return shape;
    }
    if (low != 0) {
        shape.row_bytes = tensor->code_bytes;
        shape.n_columns = 2;
        shape.widths[0] = kvf_saw_plane_bytes(tensor->group, role.bits - low);
        shape.widths[1] = tensor->code_bytes - shape.widths[0];
    } else if (role.bits == 4 && !has_zeros(tensor) && tensor->code_bytes % 32 == 0 &&
               payload_bytes >= KVF_ENTROPY_CLASSES_MIN) {
        shape.row_bytes = tensor->code_bytes;
        shape.widths[0] = tensor->code_bytes;
        shape.role.part = KVF_PART_CLASSES;
        shape.is_sorted = true;
        shape.meta_at = meta_at;
    }
    return shape;
}

/* exact: signs and mantissas, indices, escapes. */
static void add_exact(struct kvf_entropy_cut *cut, const struct guess *guess, uint32_t n_tokens,
                      size_t at)
{
    const struct kvf_codec_tensor *tensor = &guess->tensor;
    struct kvf_exact_shape exact = kvf_exact_shape(tensor->n_rows, tensor->dim,
                                                   tensor->element_bytes, n_tokens);
    struct kvf_entropy_role role = {.codec = KVF_CODEC_EXACT, .bits = KVF_BITS_EXACT};
    size_t codes = at + guess->sizes.meta_bytes;
    struct shape shape;

    role.part = KVF_PART_META;
    shape = planes(4, role);
    add(cut, &shape, at, guess->sizes.meta_bytes);
    role.part = KVF_PART_MANTISSA;
    shape = planes(exact.rest_bytes, role);
    add(cut, &shape, codes, exact.index_offset);
    role.part = KVF_PART_INDICES;
    shape = whole(role);
    add(cut, &shape, codes + exact.index_offset, exact.escape_offset - exact.index_offset);
    role.part = KVF_PART_OTHER;
    shape = whole(role);
    add(cut, &shape, codes + exact.escape_offset, guess->sizes.codes_bytes - exact.escape_offset);
}

/* The meta part of a tensor, at at in the payload. */
static void add_meta(struct kvf_entropy_cut *cut, const struct kvf_codec_tensor *tensor,
                     struct kvf_entropy_role role, uint32_t n_tokens,
                     const struct kvf_codec_sizes *sizes, size_t at)
{
    bool scales_alone = role.codec == KVF_CODEC_TQ || has_zeros(tensor);
    size_t bytes = sizes->meta_bytes;
    struct shape shape = planes(scales_alone ? 2 : 4, role);

    /* by kivi neighbours are other channels or groups, and have ranges of their own */
    shape.transform = scales_alone                  ? KVF_TRANSFORM_DELTA
                      : role.codec == KVF_CODEC_SAW ? KVF_TRANSFORM_SCALES
                                                    : KVF_TRANSFORM_NONE;
    if (has_zeros(tensor)) {
        bytes = (size_t)tensor->n_rows * n_tokens * KVF_SAW_SCALE_BYTES;
    }
    add(cut, &shape, at, bytes);
    role.part = KVF_PART_OTHER;
    shape = whole(role);
    add(cut, &shape, at + bytes, sizes->meta_bytes - bytes);
}

/* One tensor of one layer, at at in the payload. */
static void add_tensor(struct kvf_entropy_cut *cut, const struct guess *guess, bool is_v,
                       uint32_t n_tokens, size_t payload_bytes, size_t at)
{
    const struct kvf_codec_tensor *tensor = &guess->tensor;
    const struct kvf_codec_sizes *sizes = &guess->sizes;
    struct kvf_entropy_role role = {0};
    size_t codes = at + sizes->mean_bytes + sizes->meta_bytes;
    size_t rows_bytes = sizes->codes_bytes;
    struct shape shape;

    if (tensor->ops == NULL) {
        return;
    }
    role.codec = tensor->descriptor.codec;
    role.bits = tensor->descriptor.bits;
    if (role.codec == KVF_CODEC_EXACT) {
        add_exact(cut, guess, n_tokens, at);
        return;
    }
    role.part = KVF_PART_MEAN;
    shape = planes(2, role);
    add(cut, &shape, at, sizes->mean_bytes);
    role.part = is_v ? KVF_PART_META_V : KVF_PART_META;
    add_meta(cut, tensor, role, n_tokens, sizes, at + sizes->mean_bytes);
    if (role.codec == KVF_CODEC_RAW) {
        role.part = KVF_PART_RAW;
        shape = planes(tensor->element_bytes, role);
        add(cut, &shape, codes, sizes->codes_bytes);
        return;
    }
    role.part = KVF_PART_CODES;
    shape = codes_shape(guess, role, payload_bytes, at + sizes->mean_bytes);
    if (shape.is_sorted) {
        rows_bytes = (size_t)tensor->n_rows * n_tokens * tensor->code_bytes;
    }
    add(cut, &shape, codes, rows_bytes);
    shape = whole(role);
    add(cut, &shape, codes + rows_bytes, sizes->codes_bytes - rows_bytes);
}

/* The strip of a layer, by the first pair of guesses that makes up its length. */
static void add_strip(struct kvf_entropy_cut *cut, const struct kvf_record_page *page,
                      uint32_t layer, size_t at, size_t bytes)
{
    const struct kvf_block_header *header = &page->header;
    const uint8_t *strip = (const uint8_t *)(page + 1) + at;
    size_t payload_bytes = header->total_bytes - KVF_BLOCK_PAGE_BYTES;
    struct shape unknown = whole((struct kvf_entropy_role){.part = KVF_PART_OTHER});
    struct guesses k, v;

    guesses_make(&k, header, page->layer_bits[layer] & 15, false);
    guesses_make(&v, header, page->layer_bits[layer] >> 4, true);
    for (uint32_t i = 0; i < k.n * v.n; i++) {
        struct guess *a = &k.at[i / v.n];
        struct guess *b = &v.at[i % v.n];
        size_t k_bytes;

        if (!guess_measure(a, header->n_tokens, strip, bytes)) {
            continue;
        }
        k_bytes = kvf_sizes_total(&a->sizes);
        if (guess_measure(b, header->n_tokens, strip + k_bytes, bytes - k_bytes) &&
            kvf_sizes_total(&b->sizes) == bytes - k_bytes) {
            add_tensor(cut, a, false, header->n_tokens, payload_bytes, at);
            add_tensor(cut, b, true, header->n_tokens, payload_bytes, at + k_bytes);
            return;
        }
    }
    add(cut, &unknown, at, bytes);
}

/* 1/256 bits of the bytes at every step-th place. */
static uint64_t bytes_cost(const uint8_t *from, size_t bytes, size_t step)
{
    uint32_t counts[256] = {0};
    uint16_t frequencies[256];
    uint64_t cost = 0;
    uint32_t n_values = 0;

    for (size_t i = 0; i < bytes; i += step) {
        n_values += counts[from[i]]++ == 0;
    }
    if (n_values < 2) {
        return 0;
    }
    kvf_rans_frequencies(counts, frequencies);
    for (int s = 0; s < 256; s++) {
        cost += kvf_rans_cost(counts[s], frequencies[s]);
    }
    return cost;
}

/* Opaque bytes: pairs of unlike bytes, such as 16-bit floats, if the first ones look like it. */
static uint32_t opaque_planes(const uint8_t *payload, size_t bytes)
{
    size_t sample = bytes < OPAQUE_SAMPLE_BYTES ? bytes : OPAQUE_SAMPLE_BYTES;
    uint64_t one = bytes_cost(payload, sample, 1);
    uint64_t two = sample < 2
                       ? one
                       : bytes_cost(payload, sample, 2) + bytes_cost(payload + 1, sample - 1, 2);

    return two < one / 32 * 31 ? 2 : 1;
}

bool kvf_entropy_cut(struct kvf_entropy_cut *cut, const struct kvf_record_page *record)
{
    const struct kvf_block_header *header = &record->header;
    size_t strips_bytes = (size_t)header->raw_area_offset * KVF_BLOCK_ALIGN_BYTES;
    struct shape shape;

    cut->n_roles = 0;
    cut->n_pieces = 0;
    cut->n_streams = 0;
    cut->is_full = false;
    if (header->tensor_kind == KVF_KIND_BYTES) {
        size_t bytes = header->total_bytes - KVF_BLOCK_PAGE_BYTES;

        shape = planes(opaque_planes((const uint8_t *)(record + 1), bytes),
                       (struct kvf_entropy_role){.part = KVF_PART_OTHER});
        add(cut, &shape, 0, bytes);
        return !cut->is_full && cut->n_streams != 0;
    }
    if (strips_bytes + header->raw_area_bytes != header->total_bytes - KVF_BLOCK_PAGE_BYTES) {
        return false;
    }
    for (uint32_t layer = 0; layer < header->n_layers; layer++) {
        size_t at = (size_t)record->layer_offsets[layer] * KVF_BLOCK_ALIGN_BYTES;
        size_t end = layer + 1u < header->n_layers
                         ? (size_t)record->layer_offsets[layer + 1] * KVF_BLOCK_ALIGN_BYTES
                         : strips_bytes;

        add_strip(cut, record, layer, at, end - at);
    }
    shape = planes(2, (struct kvf_entropy_role){.part = KVF_PART_AREA});
    add(cut, &shape, strips_bytes, header->raw_area_bytes);
    return !cut->is_full && cut->n_streams != 0;
}

static uint32_t load_u16(const uint8_t *from)
{
    uint16_t value;

    memcpy(&value, from, sizeof(value));
    return value;
}

static void store_u16(uint8_t *to, uint32_t value)
{
    uint16_t half = (uint16_t)value;

    memcpy(to, &half, sizeof(half));
}

void kvf_entropy_transform(uint8_t transform, const uint8_t *from, uint8_t *to, uint32_t bytes)
{
    uint32_t row = transform == KVF_TRANSFORM_SCALES ? 4 : 2;
    uint32_t before = 0;
    uint32_t i;

    for (i = 0; transform != KVF_TRANSFORM_NONE && bytes - i >= row; i += row) {
        uint32_t scale = load_u16(from + i + row - 2);

        if (transform == KVF_TRANSFORM_SCALES) {
            store_u16(to + i, load_u16(from + i) - scale);
        }
        store_u16(to + i + row - 2, scale - before);
        before = scale;
    }
    memcpy(to + i, from + i, bytes - i);
}

void kvf_entropy_restore(uint8_t transform, uint8_t *at, uint32_t bytes)
{
    uint32_t row = transform == KVF_TRANSFORM_SCALES ? 4 : 2;
    uint32_t scale = 0;

    for (uint32_t i = 0; transform != KVF_TRANSFORM_NONE && bytes - i >= row; i += row) {
        scale += load_u16(at + i + row - 2);
        if (transform == KVF_TRANSFORM_SCALES) {
            store_u16(at + i, load_u16(at + i) + scale);
        }
        store_u16(at + i + row - 2, scale);
    }
}

/* Both sides are exact in fp32: 11 bits by 5. */
uint32_t kvf_entropy_class(const uint8_t *meta)
{
    uint32_t word = kvf_load_u32(meta);
    float zero = -2 * kvf_f32_from_f16((uint16_t)word);
    float scale = kvf_f32_from_f16((uint16_t)(word >> 16));
    uint32_t class = 0;

    for (int k = 0; k < KVF_ENTROPY_CLASSES - 1; k++) {
        class += (float)(2 * k + 11) * scale <= zero;
    }
    return class;
}
