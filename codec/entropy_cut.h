/* SPDX-License-Identifier: Apache-2.0
 *
 * entropy_cut.h: what the files of the entropy stage share: how a record is cut into streams and
 * pieces, and how columns are taken out of rows. Nothing outside of them includes it.
 *
 * A role is what the bytes of a column are: high bytes of scales, 4-bit codes, exponents. All
 * columns of a role have one table, over all layers, because tables of a layer cost more than they
 * save (tests/bench: the codes of all layers of a model gather alike once they are rotated and
 * scaled).
 */
#ifndef KVF_CODEC_ENTROPY_CUT_H
#define KVF_CODEC_ENTROPY_CUT_H

#include "codec/block_format.h"
#include "codec/entropy_format.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum kvf_entropy_cut_limits {
    KVF_ENTROPY_ROLES = 192, /* of as many kinds of layers as a block can have, and more */
    KVF_ENTROPY_PIECES = 8192,
    KVF_ENTROPY_STREAMS = 2048,
    KVF_ENTROPY_CLASSES_MIN = 256 << 10, /* payload bytes from which on classes are worth tables */
};

/* What bytes are. Roles with the same numbers are the same. */
enum kvf_entropy_part {
    KVF_PART_MEAN = 1,
    KVF_PART_META,
    KVF_PART_META_V, /* of V, whose ranges are others */
    KVF_PART_CODES,
    KVF_PART_CLASSES,  /* codes, sorted; the role has KVF_ENTROPY_CLASSES tables */
    KVF_PART_MANTISSA, /* of exact: what is kept as it is */
    KVF_PART_INDICES,  /* of exact: of exponents */
    KVF_PART_RAW,      /* as the engine has it */
    KVF_PART_AREA,     /* the raw area */
    KVF_PART_OTHER,    /* of unknown content */
};

struct kvf_entropy_role {
    uint8_t part; /* enum kvf_entropy_part */
    uint8_t codec;
    uint8_t bits;
    uint8_t column;
};

/* An extent on its way to be one. */
struct kvf_entropy_piece {
    uint32_t bytes;
    uint16_t row_bytes;
    uint8_t n_columns;
    uint8_t transform; /* enum kvf_entropy_transform */
    bool is_sorted;    /* KVF_COLUMN_CLASSES */
    uint32_t distance; /* is_sorted: from the scales of its rows to its start */
    struct {
        uint16_t bytes;
        uint8_t role;
        uint8_t mode;  /* enum kvf_entropy_mode, once it is decided */
        uint8_t table; /* of the extent's column */
    } columns[KVF_ENTROPY_COLUMNS];
};

struct kvf_entropy_run {
    uint32_t plain_bytes;
    uint32_t first_piece;
    uint32_t n_pieces;
};

struct kvf_entropy_cut {
    uint32_t n_roles, n_pieces, n_streams;
    bool is_full; /* of a table above there was too little: no packing */
    struct kvf_entropy_role roles[KVF_ENTROPY_ROLES];
    struct kvf_entropy_piece pieces[KVF_ENTROPY_PIECES];
    struct kvf_entropy_run streams[KVF_ENTROPY_STREAMS];
};

/* Cut the record of a checked page. False: it cannot be packed. */
bool kvf_entropy_cut(struct kvf_entropy_cut *cut, const struct kvf_record_page *record);

/* Bytes of a column that begins at byte first of a row and has width bytes of it. */
static inline uint32_t kvf_entropy_column_bytes(uint32_t bytes, uint32_t row_bytes, uint32_t first,
                                                uint32_t width)
{
    uint32_t rest = bytes % row_bytes;
    uint32_t more = rest <= first ? 0 : rest - first < width ? rest - first : width;

    return bytes / row_bytes * width + more;
}

/* The bytes of an extent as its columns are cut out of them, to to; and the way back, in place. */
void kvf_entropy_transform(uint8_t transform, const uint8_t *from, uint8_t *to, uint32_t bytes);
void kvf_entropy_restore(uint8_t transform, uint8_t *at, uint32_t bytes);

/* The class of the row whose scales are this word. */
uint32_t kvf_entropy_class(const uint8_t *meta);

#endif /* KVF_CODEC_ENTROPY_CUT_H */
