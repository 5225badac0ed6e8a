/* SPDX-License-Identifier: Apache-2.0
 *
 * entropy_unpack.c: packed records to records. Everything that a packed record says is checked
 * before it is used; the order of reading and writing is entropy_format.h's, so that a record can
 * be unpacked where it is.
 */
#include "codec/entropy.h"

#include "base/crc32c.h"
#include "codec/codec.h"
#include "codec/codec_pages.h"
#include "codec/entropy_cut.h"
#include "codec/entropy_rans.h"

#include <assert.h>
#include <stdlib.h>
#include <zstd.h>

struct kvf_entropy_unpacker {
    struct kvf_rans_decode_table tables[KVF_ENTROPY_TABLES];
    uint8_t directory[KVF_ENTROPY_DIRECTORY_BYTES];
    uint8_t coded[KVF_ENTROPY_STREAM_BYTES + KVF_RANS_SLACK_BYTES];
    uint8_t columns[KVF_ENTROPY_STREAM_BYTES];
    ZSTD_DCtx *zstd;

    /* of the record */
    struct kvf_entropy_head head;
    uint8_t *payload; /* plain */
    /* of the stream */
    struct kvf_rans_decoder decoder;
    bool is_coded;
    const uint8_t *side;
    const uint8_t *side_end;
};

size_t kvf_entropy_unpacker_bytes(void)
{
    return sizeof(struct kvf_entropy_unpacker);
}

struct kvf_entropy_unpacker *kvf_entropy_unpacker_create(void)
{
    struct kvf_entropy_unpacker *unpacker = calloc(1, sizeof(*unpacker));

    if (unpacker == NULL) {
        return NULL;
    }
    unpacker->zstd = ZSTD_createDCtx();
    if (unpacker->zstd == NULL) {
        kvf_entropy_unpacker_destroy(unpacker);
        return NULL;
    }
    return unpacker;
}

void kvf_entropy_unpacker_destroy(struct kvf_entropy_unpacker *unpacker)
{
    if (unpacker != NULL) {
        (void)ZSTD_freeDCtx(unpacker->zstd);
        free(unpacker);
    }
}

uint64_t kvf_entropy_plain_bytes(const struct kvf_record_page *page, uint64_t record_bytes)
{
    const struct kvf_block_header *header = &page->header;
    uint64_t plain_bytes = header->plain_bytes;
    bool is_valid = header->entropy_id == KVF_ENTROPY_RANS && header->n_streams != 0 &&
                    header->total_bytes == record_bytes &&
                    record_bytes % KVF_ENTROPY_ALIGN_BYTES == 0 && record_bytes < plain_bytes &&
                    record_bytes > KVF_BLOCK_PAGE_BYTES &&
                    plain_bytes <= KVF_BLOCK_PAGE_BYTES + (uint64_t)KVF_PAYLOAD_BYTES_MAX;

    return is_valid ? plain_bytes : 0;
}

/* -------------------------------------------------------------------------------------------------
 * Columns
 */
static bool decode_column(struct kvf_entropy_unpacker *unpacker,
                          const struct kvf_entropy_column *column, uint8_t *to, uint32_t n)
{
    size_t left = (size_t)(unpacker->side_end - unpacker->side);
    uint32_t frame;

    switch (column->mode) {
    case KVF_COLUMN_RAW:
        if (left < n) {
            return false;
        }
        memcpy(to, unpacker->side, n);
        unpacker->side += n;
        return true;
    case KVF_COLUMN_FILL:
        memset(to, column->table, n);
        return true;
    case KVF_COLUMN_RANS:
        return unpacker->is_coded && column->table < unpacker->head.n_tables &&
               kvf_rans_decode(&unpacker->decoder, &unpacker->tables[column->table], to, n);
    case KVF_COLUMN_ZSTD:
        if (left < sizeof(frame)) {
            return false;
        }
        frame = kvf_load_u32(unpacker->side);
        if (left - sizeof(frame) < frame ||
            ZSTD_decompressDCtx(unpacker->zstd, to, n, unpacker->side + sizeof(frame), frame) !=
                n) {
            return false;
        }
        unpacker->side += sizeof(frame) + frame;
        return true;
    default:
        return false;
    }
}

/* Rows of pairs and of words of single bytes are the usual ones. */
static void columns_put(const struct kvf_entropy_extent *extent,
                        const struct kvf_entropy_column *columns, const uint8_t *from, uint8_t *to)
{
    uint32_t row = extent->row_bytes;
    uint32_t first = 0;

    for (uint32_t j = 0; j < extent->n_columns; j++) {
        uint32_t width = columns[j].bytes;
        uint32_t n = kvf_entropy_column_bytes(extent->bytes, row, first, width);

        if (width == 1) {
            for (uint32_t i = 0; i < n; i++) {
                to[(size_t)i * row + first] = from[i];
            }
        } else {
            for (uint32_t i = 0; i < n / width; i++) {
                memcpy(to + (size_t)i * row + first, from + (size_t)i * width, width);
            }
            memcpy(to + (size_t)(n / width) * row + first, from + n / width * width, n % width);
        }
        from += n;
        first += width;
    }
}

/* The rows of an extent that was sorted. */
static bool decode_classes(struct kvf_entropy_unpacker *unpacker,
                           const struct kvf_entropy_extent *extent,
                           const struct kvf_entropy_column *column, uint8_t *to)
{
    const uint8_t *meta = to - extent->distance;
    uint32_t row = extent->row_bytes;
    uint32_t n = extent->bytes / row;
    uint32_t rows[KVF_ENTROPY_CLASSES] = {0};
    const uint8_t *from[KVF_ENTROPY_CLASSES];
    uint8_t *at = unpacker->columns;

    if (!unpacker->is_coded || column->table + KVF_ENTROPY_CLASSES > unpacker->head.n_tables ||
        extent->bytes % row != 0 || extent->distance / 4 < n ||
        extent->distance > (size_t)(to - unpacker->payload)) {
        return false;
    }
    for (uint32_t i = 0; i < n; i++) {
        rows[kvf_entropy_class(meta + (size_t)i * 4)]++;
    }
    for (uint32_t class = 0; class < KVF_ENTROPY_CLASSES; class ++) {
        size_t bytes = (size_t)rows[class] * row;

        if (!kvf_rans_decode(&unpacker->decoder, &unpacker->tables[column->table + class], at,
                             bytes)) {
            return false;
        }
        from[class] = at;
        at += bytes;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t class = kvf_entropy_class(meta + (size_t)i * 4);

        memcpy(to + (size_t)i * row, from[class], row);
        from[class] += row;
    }
    return true;
}

/* -------------------------------------------------------------------------------------------------
 * Extents
 */

/* The extent at *at, and its columns. False: there is none. */
static bool extent_read(const uint8_t **at, const uint8_t *end, struct kvf_entropy_extent *extent,
                        struct kvf_entropy_column columns[KVF_ENTROPY_COLUMNS])
{
    uint32_t row = 0;
    bool classes = false;

    if ((size_t)(end - *at) < sizeof(*extent)) {
        return false;
    }
    memcpy(extent, *at, sizeof(*extent));
    *at += sizeof(*extent);
    if (extent->n_columns < 1 || extent->n_columns > KVF_ENTROPY_COLUMNS ||
        (size_t)(end - *at) < extent->n_columns * sizeof(*columns)) {
        return false;
    }
    memcpy(columns, *at, extent->n_columns * sizeof(*columns));
    *at += extent->n_columns * sizeof(*columns);
    for (uint32_t j = 0; j < extent->n_columns; j++) {
        classes |= columns[j].mode == KVF_COLUMN_CLASSES;
        row += columns[j].bytes;
        if (columns[j].bytes == 0) {
            return false;
        }
    }
    return extent->bytes != 0 && row == extent->row_bytes && row <= KVF_ENTROPY_STREAM_BYTES &&
           extent->transform <= KVF_TRANSFORM_SCALES &&
           (!classes || (extent->n_columns == 1 && extent->transform == KVF_TRANSFORM_NONE)) &&
           classes == (extent->distance != 0);
}

static bool decode_extent(struct kvf_entropy_unpacker *unpacker,
                          const struct kvf_entropy_extent *extent,
                          const struct kvf_entropy_column *columns, uint8_t *to)
{
    uint8_t *at = unpacker->columns;
    uint32_t first = 0;

    if (columns[0].mode == KVF_COLUMN_CLASSES) {
        return decode_classes(unpacker, extent, &columns[0], to);
    }
    if (extent->n_columns == 1) {
        if (!decode_column(unpacker, &columns[0], to, extent->bytes)) {
            return false;
        }
        kvf_entropy_restore(extent->transform, to, extent->bytes);
        return true;
    }
    for (uint32_t j = 0; j < extent->n_columns; j++) {
        uint32_t n = kvf_entropy_column_bytes(extent->bytes, extent->row_bytes, first,
                                              columns[j].bytes);

        if (!decode_column(unpacker, &columns[j], at, n)) {
            return false;
        }
        at += n;
        first += columns[j].bytes;
    }
    columns_put(extent, columns, unpacker->columns, to);
    kvf_entropy_restore(extent->transform, to, extent->bytes);
    return true;
}

/* Is a column among the stream's extents coded by rANS? They begin at at and are not trusted. */
static bool has_states(const uint8_t *at, const uint8_t *end, uint32_t n_extents)
{
    bool any = false;

    for (uint32_t i = 0; i < n_extents; i++) {
        struct kvf_entropy_column columns[KVF_ENTROPY_COLUMNS];
        struct kvf_entropy_extent extent;

        if (!extent_read(&at, end, &extent, columns)) {
            return false;
        }
        for (uint32_t j = 0; j < extent.n_columns; j++) {
            any |= columns[j].mode == KVF_COLUMN_RANS || columns[j].mode == KVF_COLUMN_CLASSES;
        }
    }
    return any;
}

/* -------------------------------------------------------------------------------------------------
 * Streams
 */

/* States, words and side bytes of a stream that is in unpacker->coded. */
static bool stream_begin(struct kvf_entropy_unpacker *unpacker,
                         const struct kvf_entropy_stream *stream, bool is_coded)
{
    size_t states_bytes = is_coded ? KVF_RANS_STATE_BYTES : 0;
    size_t words_bytes;

    if (stream->side_bytes > stream->coded_bytes ||
        stream->coded_bytes - stream->side_bytes < states_bytes) {
        return false;
    }
    words_bytes = stream->coded_bytes - stream->side_bytes - states_bytes;
    if (words_bytes % 2 != 0 || (!is_coded && words_bytes != 0)) {
        return false;
    }
    unpacker->is_coded = is_coded;
    unpacker->side = unpacker->coded + states_bytes + words_bytes;
    unpacker->side_end = unpacker->side + stream->side_bytes;
    if (is_coded) {
        kvf_rans_decoder_init(&unpacker->decoder, unpacker->coded, unpacker->coded + states_bytes,
                              words_bytes);
    }
    return true;
}

/* One stream at from to to; *extents moves on. */
static bool stream_decode(struct kvf_entropy_unpacker *unpacker,
                          const struct kvf_entropy_stream *stream, const uint8_t *from, uint8_t *to,
                          const uint8_t **extents, const uint8_t *extents_end)
{
    uint8_t *end = to + stream->plain_bytes;

    if (stream->coded_bytes == stream->plain_bytes) {
        memmove(to, from, stream->plain_bytes);
        return stream->n_extents == 0 && stream->side_bytes == 0;
    }
    memcpy(unpacker->coded, from, stream->coded_bytes);
    memset(unpacker->coded + stream->coded_bytes, 0, KVF_RANS_SLACK_BYTES);
    if (!stream_begin(unpacker, stream, has_states(*extents, extents_end, stream->n_extents))) {
        return false;
    }
    for (uint32_t i = 0; i < stream->n_extents; i++) {
        struct kvf_entropy_column columns[KVF_ENTROPY_COLUMNS];
        struct kvf_entropy_extent extent;

        if (!extent_read(extents, extents_end, &extent, columns) ||
            extent.bytes > (size_t)(end - to) || !decode_extent(unpacker, &extent, columns, to)) {
            return false;
        }
        to += extent.bytes;
    }
    return to == end && unpacker->side == unpacker->side_end &&
           (!unpacker->is_coded || kvf_rans_decoder_is_done(&unpacker->decoder));
}

static bool tables_read(struct kvf_entropy_unpacker *unpacker, const uint8_t *from)
{
    size_t left = unpacker->head.tables_bytes;

    if (unpacker->head.n_tables > KVF_ENTROPY_TABLES) {
        return false;
    }
    for (uint32_t i = 0; i < unpacker->head.n_tables; i++) {
        uint16_t frequencies[256];
        size_t bytes = kvf_rans_table_read(from, left, frequencies);

        if (bytes == 0) {
            return false;
        }
        kvf_rans_decode_table_init(&unpacker->tables[i], frequencies);
        from += bytes;
        left -= bytes;
    }
    return left == 0;
}

/* Everything between page and streams, out of the way of what is written. */
static bool directory_read(struct kvf_entropy_unpacker *unpacker, const uint8_t *packed,
                           uint64_t packed_bytes, uint32_t n_streams)
{
    struct kvf_entropy_head *head = &unpacker->head;
    uint64_t bytes = n_streams * sizeof(struct kvf_entropy_stream) + sizeof(*head);

    if (packed_bytes - KVF_BLOCK_PAGE_BYTES < sizeof(*head)) {
        return false;
    }
    memcpy(head, packed + KVF_BLOCK_PAGE_BYTES, sizeof(*head));
    bytes += (uint64_t)head->extents_bytes + head->tables_bytes;
    if (head->reserved != 0 || head->streams_offset > packed_bytes ||
        head->streams_offset < KVF_BLOCK_PAGE_BYTES + bytes ||
        head->streams_offset - KVF_BLOCK_PAGE_BYTES > KVF_ENTROPY_DIRECTORY_BYTES) {
        return false;
    }
    memcpy(unpacker->directory, packed + KVF_BLOCK_PAGE_BYTES,
           head->streams_offset - KVF_BLOCK_PAGE_BYTES);
    return tables_read(unpacker, unpacker->directory + bytes - head->tables_bytes);
}

/* Do the streams make up both forms of the payload, none longer than what it stands for? */
static bool streams_fit(const struct kvf_entropy_stream *streams, uint32_t n_streams,
                        uint64_t plain_bytes, uint64_t coded_bytes)
{
    for (uint32_t i = 0; i < n_streams; i++) {
        if (streams[i].plain_bytes > KVF_ENTROPY_STREAM_BYTES || streams[i].plain_bytes == 0 ||
            streams[i].coded_bytes > streams[i].plain_bytes ||
            streams[i].plain_bytes > plain_bytes || streams[i].coded_bytes > coded_bytes) {
            return false;
        }
        plain_bytes -= streams[i].plain_bytes;
        coded_bytes -= streams[i].coded_bytes;
    }
    return plain_bytes == 0 && coded_bytes == 0;
}

static bool streams_decode(struct kvf_entropy_unpacker *unpacker, const uint8_t *packed,
                           uint64_t packed_bytes, uint64_t record_bytes, uint32_t n_streams)
{
    const struct kvf_entropy_head *head = &unpacker->head;
    const uint8_t *at = unpacker->directory + sizeof(*head);
    const struct kvf_entropy_stream *streams = (const struct kvf_entropy_stream *)(const void *)at;
    const uint8_t *extents = at + n_streams * sizeof(*streams);
    const uint8_t *extents_end = extents + head->extents_bytes;
    uint8_t *to = unpacker->payload;

    if (!streams_fit(streams, n_streams, record_bytes - KVF_BLOCK_PAGE_BYTES,
                     packed_bytes - head->streams_offset)) {
        return false;
    }
    packed += head->streams_offset;
    for (uint32_t i = 0; i < n_streams; i++) {
        if (!stream_decode(unpacker, &streams[i], packed, to, &extents, extents_end)) {
            return false;
        }
        packed += streams[i].coded_bytes;
        to += streams[i].plain_bytes;
    }
    return extents == extents_end;
}

int kvf_entropy_unpack(struct kvf_entropy_unpacker *unpacker, const void *packed,
                       uint64_t packed_bytes, void *record_out, uint64_t record_bytes)
{
    struct kvf_record_page page;
    uint32_t n_streams;

    if (packed_bytes < KVF_BLOCK_PAGE_BYTES) {
        return KVF_ERR_CORRUPT;
    }
    memcpy(&page, packed, sizeof(page));
    n_streams = page.header.n_streams;
    unpacker->payload = (uint8_t *)record_out + KVF_BLOCK_PAGE_BYTES;
    if (kvf_entropy_plain_bytes(&page, packed_bytes) != record_bytes || record_bytes == 0 ||
        !directory_read(unpacker, packed, packed_bytes, n_streams) ||
        !streams_decode(unpacker, packed, packed_bytes, record_bytes, n_streams) ||
        kvf_crc32c(0, unpacker->payload, record_bytes - KVF_BLOCK_PAGE_BYTES) !=
            page.header.plain_crc32c) {
        return KVF_ERR_CORRUPT;
    }
    page.header.total_bytes = record_bytes;
    page.header.payload_crc32c = page.header.plain_crc32c;
    page.header.entropy_id = KVF_ENTROPY_NONE;
    page.header.n_streams = 0;
    page.header.plain_bytes = 0;
    page.header.plain_crc32c = 0;
    kvf_block_seal_header(&page);
    memcpy(record_out, &page, sizeof(page));
    return KVF_OK;
}
