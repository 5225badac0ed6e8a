/* SPDX-License-Identifier: Apache-2.0
 *
 * entropy_format.h: the bytes of a packed record, and nothing else. docs/block-format.md has it in
 * prose; golden bytes are in tests/data/codec.
 *
 * A record can be packed, without loss, where bytes are dear and readers rare: on a drive. Its page
 * stays as it is, but for six fields of the header: entropy_id says how it is packed, n_streams
 * into how many streams; total_bytes and payload_crc32c are those of what is stored, plain_bytes
 * and plain_crc32c those of the plain record; and header_crc32c follows. Clients and the wire see
 * plain records only.
 *
 *   0               record page
 *   4096            struct kvf_entropy_head
 *                   struct kvf_entropy_stream [n_streams]
 *                   extents of the first stream, of the second one, ...
 *                   tables, as entropy_rans.h stores them
 *                   zeroes
 *   streams_offset  streams, one after the other, to the end of the record
 *
 * total_bytes is a multiple of 4096, and no stream is longer than what it stands for. So a record
 * that is read to the end of the memory of its plain form can be unpacked where it is, stream
 * by stream: what is written never reaches what is still to be read.
 *
 * Streams stand for pieces of the plain payload, from its start to its end. A stream with
 * coded_bytes = plain_bytes is that piece. Any other one is described by extents, which cut it
 * again, from its start to its end:
 *
 *   struct kvf_entropy_extent         bytes of it are rows of row_bytes; the last may be shorter
 *   struct kvf_entropy_column [n]     which cut a row from its first byte to its last
 *
 * A column is the bytes of all rows of the extent that lie in it, row by row. It is a run of lanes
 * with a table (KVF_COLUMN_RANS), one byte that is the same everywhere (KVF_COLUMN_FILL), or lies
 * in the side bytes as it is (KVF_COLUMN_RAW) or as u32 length and a zstd frame (KVF_COLUMN_ZSTD).
 * KVF_COLUMN_CLASSES is for codes of saw: the rows are taken class by class, those of one class in
 * their order, as a run with table + class each. The class of row i comes out of number i of as
 * many u32, fp16 lo and fp16 scale, that begin distance bytes before the extent in the plain
 * payload:
 *
 *     class = how many of 2 k + 11, k = 0..4, are at most -2 lo / scale; 0 if scale is a NaN
 *
 * (which level stands for 0 tells where the codes of a vector gather).
 *
 * An extent may have been transformed before it was cut into columns, and is restored when they
 * have been put together; a row that is not whole is left as it is. KVF_TRANSFORM_DELTA: in rows
 * that are an u16, the difference to the row before (0 before the first one), modulo 2^16.
 * KVF_TRANSFORM_SCALES: in rows that are two u16, lo and scale, lo minus scale and then the
 * difference of scale to the row before: the range of a vector is about as long as its neighbour's
 * and lies about 0.
 *
 *   stream:  u32 states[32]    only if a column is coded by rANS
 *            u16 words[]       of all its runs, in the order of extents, columns, classes
 *            u8 side[]         side_bytes: of all its other columns
 *
 * All numbers are little endian.
 */
#ifndef KVF_CODEC_ENTROPY_FORMAT_H
#define KVF_CODEC_ENTROPY_FORMAT_H

#include <stddef.h>
#include <stdint.h>

enum kvf_entropy_limits {
    KVF_ENTROPY_STREAM_BYTES = 64 << 10, /* plain, at most */
    KVF_ENTROPY_TABLES = 32,
    KVF_ENTROPY_CLASSES = 6,
    KVF_ENTROPY_COLUMNS = 4,                 /* of an extent */
    KVF_ENTROPY_DIRECTORY_BYTES = 256 << 10, /* streams_offset - 4096, at most */
    KVF_ENTROPY_ALIGN_BYTES = 4096,
};

/* kvf_block_header.entropy_id */
enum kvf_entropy_id {
    KVF_ENTROPY_NONE = 0,
    KVF_ENTROPY_RANS = 1,
};

enum kvf_entropy_mode {
    KVF_COLUMN_RAW = 0,
    KVF_COLUMN_FILL = 1, /* table: the byte */
    KVF_COLUMN_RANS = 2, /* table: its number */
    KVF_COLUMN_CLASSES = 3,
    KVF_COLUMN_ZSTD = 4,
};

enum kvf_entropy_transform {
    KVF_TRANSFORM_NONE = 0,
    KVF_TRANSFORM_DELTA = 1,
    KVF_TRANSFORM_SCALES = 2,
};

struct kvf_entropy_head {
    uint32_t streams_offset; /* from the start of the record */
    uint32_t extents_bytes;
    uint32_t tables_bytes;
    uint16_t n_tables;
    uint16_t reserved;
};

struct kvf_entropy_stream {
    uint32_t plain_bytes;
    uint32_t coded_bytes;
    uint32_t side_bytes;
    uint32_t n_extents; /* 0 if coded_bytes is plain_bytes */
};

struct kvf_entropy_extent {
    uint32_t bytes;
    uint16_t row_bytes;
    uint8_t n_columns;
    uint8_t transform; /* enum kvf_entropy_transform */
    uint32_t distance; /* 0 without KVF_COLUMN_CLASSES */
};

struct kvf_entropy_column {
    uint16_t bytes; /* of a row */
    uint8_t mode;   /* enum kvf_entropy_mode; KVF_COLUMN_CLASSES: it is the extent's only one */
    uint8_t table;
};

_Static_assert(sizeof(struct kvf_entropy_head) == 16, "the head has 16 bytes");
_Static_assert(sizeof(struct kvf_entropy_stream) == 16, "a stream is described by 16 bytes");
_Static_assert(sizeof(struct kvf_entropy_extent) == 12, "an extent is described by 12 bytes");
_Static_assert(sizeof(struct kvf_entropy_column) == 4, "a column is described by 4 bytes");
_Static_assert(offsetof(struct kvf_entropy_head, n_tables) == 12, "moved");
_Static_assert(offsetof(struct kvf_entropy_extent, row_bytes) == 4, "moved");
_Static_assert(offsetof(struct kvf_entropy_extent, distance) == 8, "moved");
_Static_assert(offsetof(struct kvf_entropy_column, mode) == 2, "moved");

#endif /* KVF_CODEC_ENTROPY_FORMAT_H */
