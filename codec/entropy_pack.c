/* SPDX-License-Identifier: Apache-2.0
 *
 * entropy_pack.c: records to packed records. Two passes: count what every role's bytes are and
 * choose how it is stored; then code stream by stream. Only integers decide, so that the bytes are
 * the same everywhere, but for what zstd's version makes of columns that it is better at.
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

#define ZSTD_LEVEL            1
#define ZSTD_COLUMN_BYTES_MIN 1024
#define COUNTERS              (KVF_ENTROPY_ROLES + 4 * KVF_ENTROPY_CLASSES)

/* How the columns of a role are stored. */
struct role_state {
    uint32_t counter; /* its first one */
    uint32_t n_counters;
    uint8_t mode;         /* enum kvf_entropy_mode */
    uint8_t table;        /* as of a column */
    uint64_t saved_bytes; /* by a table */
};

struct kvf_entropy_packer {
    struct kvf_entropy_cut cut;
    struct role_state roles[KVF_ENTROPY_ROLES];
    uint32_t n_counters;
    uint32_t n_tables;
    uint32_t tables_bytes;
    uint32_t counts[COUNTERS][256];
    uint16_t frequencies[COUNTERS][256]; /* of a counter; 0 in all if it needs no table */
    struct kvf_rans_encode_table tables[KVF_ENTROPY_TABLES];
    struct kvf_entropy_stream streams[KVF_ENTROPY_STREAMS];
    uint8_t stored_tables[KVF_ENTROPY_TABLES * KVF_RANS_TABLE_BYTES_MAX];
    uint8_t transformed[KVF_ENTROPY_STREAM_BYTES];
    uint8_t column[KVF_ENTROPY_STREAM_BYTES];
    uint8_t words[2 * KVF_ENTROPY_STREAM_BYTES];
    uint8_t side[2 * KVF_ENTROPY_STREAM_BYTES];
    ZSTD_CCtx *zstd;
};

size_t kvf_entropy_packer_bytes(void)
{
    return sizeof(struct kvf_entropy_packer);
}

struct kvf_entropy_packer *kvf_entropy_packer_create(void)
{
    struct kvf_entropy_packer *packer = calloc(1, sizeof(*packer));

    if (packer == NULL) {
        return NULL;
    }
    packer->zstd = ZSTD_createCCtx();
    if (packer->zstd == NULL) {
        kvf_entropy_packer_destroy(packer);
        return NULL;
    }
    return packer;
}

void kvf_entropy_packer_destroy(struct kvf_entropy_packer *packer)
{
    if (packer != NULL) {
        (void)ZSTD_freeCCtx(packer->zstd);
        free(packer);
    }
}

/* -------------------------------------------------------------------------------------------------
 * Columns
 */

/* The bytes of a piece that its columns are cut out of: where they are, or in a buffer. */
static const uint8_t *piece_bytes(struct kvf_entropy_packer *packer,
                                  const struct kvf_entropy_piece *piece, const uint8_t *from)
{
    if (piece->transform == KVF_TRANSFORM_NONE) {
        return from;
    }
    kvf_entropy_transform(piece->transform, from, packer->transformed, piece->bytes);
    return packer->transformed;
}

/* The bytes of a column, one after the other: where they are, or in the packer's buffer. */
static const uint8_t *column_take(struct kvf_entropy_packer *packer,
                                  const struct kvf_entropy_piece *piece, uint32_t first,
                                  uint32_t width, const uint8_t *from, uint32_t *bytes_out)
{
    uint8_t *to = packer->column;
    uint32_t row = piece->row_bytes;
    uint32_t n = kvf_entropy_column_bytes(piece->bytes, row, first, width);

    *bytes_out = n;
    if (width == row) {
        return from;
    }
    if (width == 1) {
        for (uint32_t i = 0; i < n; i++) {
            to[i] = from[(size_t)i * row + first];
        }
        return to;
    }
    for (uint32_t i = 0; i < n / width; i++) {
        memcpy(to + (size_t)i * width, from + (size_t)i * row + first, width);
    }
    memcpy(to + n / width * width, from + (size_t)(n / width) * row + first, n % width);
    return to;
}

/* The rows of a sorted piece, class by class, in the packer's buffer; and how many each has. */
static void rows_sort(struct kvf_entropy_packer *packer, const struct kvf_entropy_piece *piece,
                      const uint8_t *from, uint32_t rows_out[KVF_ENTROPY_CLASSES])
{
    const uint8_t *meta = from - piece->distance;
    uint32_t row = piece->row_bytes;
    uint32_t n = piece->bytes / row;
    uint8_t *to[KVF_ENTROPY_CLASSES];
    uint8_t *at = packer->column;

    memset(rows_out, 0, KVF_ENTROPY_CLASSES * sizeof(rows_out[0]));
    for (uint32_t i = 0; i < n; i++) {
        rows_out[kvf_entropy_class(meta + (size_t)i * 4)]++;
    }
    for (uint32_t class = 0; class < KVF_ENTROPY_CLASSES; class ++) {
        to[class] = at;
        at += (size_t)rows_out[class] * row;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t class = kvf_entropy_class(meta + (size_t)i * 4);

        memcpy(to[class], from + (size_t)i * row, row);
        to[class] += row;
    }
}

/* -------------------------------------------------------------------------------------------------
 * Counts and tables
 */

/* Four at a time: equal bytes in a row would wait for each other. */
static void count(uint32_t counts[256], const uint8_t *bytes, size_t n)
{
    uint32_t more[3][256] = {0};
    size_t i;

    for (i = 0; n - i >= 4; i += 4) {
        counts[bytes[i]]++;
        more[0][bytes[i + 1]]++;
        more[1][bytes[i + 2]]++;
        more[2][bytes[i + 3]]++;
    }
    for (; i < n; i++) {
        counts[bytes[i]]++;
    }
    for (int s = 0; s < 256; s++) {
        counts[s] += more[0][s] + more[1][s] + more[2][s];
    }
}

static bool counters_give(struct kvf_entropy_packer *packer)
{
    packer->n_counters = 0;
    for (uint32_t i = 0; i < packer->cut.n_roles; i++) {
        bool sorted = packer->cut.roles[i].part == KVF_PART_CLASSES;
        struct role_state *role = &packer->roles[i];

        *role = (struct role_state){.counter = packer->n_counters,
                                    .n_counters = sorted ? KVF_ENTROPY_CLASSES : 1};
        packer->n_counters += role->n_counters;
        if (packer->n_counters > COUNTERS) {
            return false;
        }
    }
    memset(packer->counts, 0, packer->n_counters * sizeof(packer->counts[0]));
    memset(packer->frequencies, 0, packer->n_counters * sizeof(packer->frequencies[0]));
    return true;
}

static void count_all(struct kvf_entropy_packer *packer, const uint8_t *payload)
{
    for (uint32_t i = 0; i < packer->cut.n_pieces; i++) {
        const struct kvf_entropy_piece *piece = &packer->cut.pieces[i];
        const uint8_t *from = piece_bytes(packer, piece, payload);
        uint32_t first = 0;

        if (piece->is_sorted) {
            uint32_t counter = packer->roles[piece->columns[0].role].counter;
            uint32_t rows[KVF_ENTROPY_CLASSES];
            const uint8_t *at = packer->column;

            rows_sort(packer, piece, payload, rows);
            for (uint32_t class = 0; class < KVF_ENTROPY_CLASSES; class ++) {
                count(packer->counts[counter + class], at, (size_t)rows[class] * piece->row_bytes);
                at += (size_t)rows[class] * piece->row_bytes;
            }
        }
        for (uint32_t j = 0; j < piece->n_columns && !piece->is_sorted; j++) {
            uint32_t width = piece->columns[j].bytes;
            uint32_t n;
            const uint8_t *bytes = column_take(packer, piece, first, width, from, &n);

            count(packer->counts[packer->roles[piece->columns[j].role].counter], bytes, n);
            first += width;
        }
        payload += piece->bytes;
    }
}

/* What a counter's bytes would take with a table, the table included, in 1/256 bits; its
 * frequencies are filled in. A single value costs nothing. */
static uint64_t counter_cost(struct kvf_entropy_packer *packer, uint32_t counter,
                             uint64_t *total_out, int *only_out)
{
    const uint32_t *counts = packer->counts[counter];
    uint8_t stored[KVF_RANS_TABLE_BYTES_MAX];
    uint64_t cost = 0;
    uint64_t total = 0;
    int n_values = 0;

    for (int s = 0; s < 256; s++) {
        total += counts[s];
        n_values += counts[s] != 0;
        *only_out = counts[s] != 0 ? s : *only_out;
    }
    *total_out = total;
    if (n_values < 2) {
        return 0;
    }
    *only_out = -1;
    kvf_rans_frequencies(counts, packer->frequencies[counter]);
    for (int s = 0; s < 256; s++) {
        cost += kvf_rans_cost(counts[s], packer->frequencies[counter][s]);
    }
    return cost + kvf_rans_table_write(packer->frequencies[counter], stored) * 8 * 256;
}

/* The classes of a role get tables that follow each other. One that has no two values gets one all
 * the same: what it codes is nothing, or made up for by the others. */
static void tables_give(struct kvf_entropy_packer *packer, struct role_state *role)
{
    role->table = (uint8_t)packer->n_tables;
    for (uint32_t i = 0; i < role->n_counters; i++) {
        uint16_t *frequencies = packer->frequencies[role->counter + i];
        uint32_t *counts = packer->counts[role->counter + i];
        int only = -1;
        uint64_t total;

        (void)counter_cost(packer, role->counter + i, &total, &only);
        if (total == 0 || only >= 0) {
            counts[only < 0 ? 0 : only] += KVF_RANS_ONE;
            counts[only == 1 ? 0 : 1] += 1;
            kvf_rans_frequencies(counts, frequencies);
        }
        packer->tables_bytes += (uint32_t)kvf_rans_table_write(
            frequencies, packer->stored_tables + packer->tables_bytes);
        kvf_rans_encode_table_init(&packer->tables[packer->n_tables++], frequencies);
    }
}

/* What a table would save of a role, if it is worth one; a single value needs none. */
static void role_measure(struct kvf_entropy_packer *packer, struct role_state *role)
{
    uint64_t cost = 0;
    uint64_t total = 0;
    int only = -1;

    for (uint32_t j = 0; j < role->n_counters; j++) {
        uint64_t bytes;

        cost += counter_cost(packer, role->counter + j, &bytes, &only);
        total += bytes;
    }
    cost = cost / 8 / 256;
    role->mode = KVF_COLUMN_RAW;
    role->saved_bytes = cost + total / 64 < total ? total - cost : 0;
    if (role->n_counters == 1 && only >= 0) {
        role->mode = KVF_COLUMN_FILL;
        role->table = (uint8_t)only;
    }
}

/* The role that has most to gain from tables, of which so many are left, and has none. */
static struct role_state *role_next(struct kvf_entropy_packer *packer)
{
    uint32_t tables_left = KVF_ENTROPY_TABLES - packer->n_tables;
    struct role_state *best = NULL;

    for (uint32_t i = 0; i < packer->cut.n_roles; i++) {
        struct role_state *role = &packer->roles[i];

        if (role->mode == KVF_COLUMN_RAW && role->saved_bytes != 0 &&
            role->n_counters <= tables_left &&
            (best == NULL || role->saved_bytes > best->saved_bytes)) {
            best = role;
        }
    }
    return best;
}

/* How every role is stored. Returns the bytes that this saves, by what the tables say. */
static uint64_t roles_decide(struct kvf_entropy_packer *packer)
{
    struct role_state *role;
    uint64_t saved = 0;

    packer->n_tables = 0;
    packer->tables_bytes = 0;
    for (uint32_t i = 0; i < packer->cut.n_roles; i++) {
        role_measure(packer, &packer->roles[i]);
        saved += packer->roles[i].mode == KVF_COLUMN_FILL ? packer->roles[i].saved_bytes : 0;
    }
    for (role = role_next(packer); role != NULL; role = role_next(packer)) {
        role->mode = role->n_counters > 1 ? KVF_COLUMN_CLASSES : KVF_COLUMN_RANS;
        tables_give(packer, role);
        saved += role->saved_bytes;
    }
    return saved;
}

/* -------------------------------------------------------------------------------------------------
 * Streams
 */

/* A piece in the order of the words, which is backwards. */
static void piece_encode(struct kvf_entropy_packer *packer, struct kvf_rans_encoder *encoder,
                         struct kvf_entropy_piece *piece, const uint8_t *from)
{
    uint32_t first = piece->row_bytes;

    from = piece_bytes(packer, piece, from);
    if (piece->columns[0].mode == KVF_COLUMN_CLASSES) {
        const uint8_t *at = packer->column + piece->bytes;
        uint32_t rows[KVF_ENTROPY_CLASSES];

        rows_sort(packer, piece, from, rows);
        for (uint32_t class = KVF_ENTROPY_CLASSES; class -- > 0;) {
            size_t bytes = (size_t)rows[class] * piece->row_bytes;

            at -= bytes;
            kvf_rans_encode(encoder, &packer->tables[piece->columns[0].table + class], at, bytes);
        }
        return;
    }
    for (uint32_t j = piece->n_columns; j-- > 0;) {
        uint32_t width = piece->columns[j].bytes;
        uint32_t n;

        first -= width;
        if (piece->columns[j].mode == KVF_COLUMN_RANS) {
            const uint8_t *bytes = column_take(packer, piece, first, width, from, &n);

            kvf_rans_encode(encoder, &packer->tables[piece->columns[j].table], bytes, n);
        }
    }
}

/* What n bytes take by a counter's table, in bytes. */
static uint64_t column_cost(const struct kvf_entropy_packer *packer, uint32_t counter,
                            const uint8_t *bytes, uint32_t n)
{
    uint32_t counts[256] = {0};
    uint64_t cost = 0;

    count(counts, bytes, n);
    for (int s = 0; s < 256; s++) {
        cost += kvf_rans_cost(counts[s], packer->frequencies[counter][s]);
    }
    return cost / 8 / 256;
}

/* The frame of a column that zstd makes smaller than its role's way would, at to; 0: it does not.
 * Only bytes of engines and of unknown content are tried: codes and scales repeat nothing. */
static size_t column_zstd(struct kvf_entropy_packer *packer, const struct kvf_entropy_piece *piece,
                          uint32_t j, const uint8_t *bytes, uint32_t n, uint8_t *to)
{
    uint32_t number = piece->columns[j].role;
    uint8_t part = packer->cut.roles[number].part;
    uint64_t cost = n;
    size_t frame;

    if ((part != KVF_PART_RAW && part != KVF_PART_OTHER) || n < ZSTD_COLUMN_BYTES_MIN) {
        return 0;
    }
    if (piece->columns[j].mode == KVF_COLUMN_RANS) {
        cost = column_cost(packer, packer->roles[number].counter, bytes, n);
    }
    cost -= cost / 64;
    frame = ZSTD_compressCCtx(packer->zstd, to, cost, bytes, n, ZSTD_LEVEL);
    return ZSTD_isError(frame) ? 0 : frame;
}

/* Choose for the columns of a piece, and append those that are not for rANS to the side bytes. */
static size_t piece_side(struct kvf_entropy_packer *packer, struct kvf_entropy_piece *piece,
                         const uint8_t *from, size_t side_bytes)
{
    uint32_t first = 0;

    from = piece_bytes(packer, piece, from);
    for (uint32_t j = 0; j < piece->n_columns; j++) {
        const struct role_state *role = &packer->roles[piece->columns[j].role];
        uint8_t *to = packer->side + side_bytes;
        const uint8_t *bytes;
        size_t frame;
        uint32_t n;

        piece->columns[j].mode = role->mode;
        piece->columns[j].table = role->table;
        if (role->mode == KVF_COLUMN_FILL || role->mode == KVF_COLUMN_CLASSES) {
            first += piece->columns[j].bytes;
            continue;
        }
        bytes = column_take(packer, piece, first, piece->columns[j].bytes, from, &n);
        frame = column_zstd(packer, piece, j, bytes, n, to + sizeof(uint32_t));
        if (frame != 0) {
            piece->columns[j].mode = KVF_COLUMN_ZSTD;
            piece->columns[j].table = 0;
            kvf_store_u32(to, (uint32_t)frame);
            side_bytes += sizeof(uint32_t) + frame;
        } else if (role->mode == KVF_COLUMN_RAW) {
            memcpy(to, bytes, n);
            side_bytes += n;
        }
        first += piece->columns[j].bytes;
    }
    return side_bytes;
}

static bool is_coded(const struct kvf_entropy_piece *piece)
{
    bool any = false;

    for (uint32_t j = 0; j < piece->n_columns; j++) {
        any |= piece->columns[j].mode == KVF_COLUMN_RANS ||
               piece->columns[j].mode == KVF_COLUMN_CLASSES;
    }
    return any;
}

/* One stream, of the bytes at from, to to. False: room_bytes are not enough. */
static bool stream_encode(struct kvf_entropy_packer *packer, uint32_t number, const uint8_t *from,
                          uint8_t *to, size_t room_bytes)
{
    const struct kvf_entropy_run *run = &packer->cut.streams[number];
    struct kvf_entropy_piece *pieces = &packer->cut.pieces[run->first_piece];
    struct kvf_entropy_stream *stream = &packer->streams[number];
    uint8_t *words_end = packer->words + sizeof(packer->words);
    const uint8_t *at = from;
    struct kvf_rans_encoder encoder;
    size_t states_bytes = 0;
    size_t side_bytes = 0;
    size_t words_bytes;

    for (uint32_t i = 0; i < run->n_pieces; i++) {
        side_bytes = piece_side(packer, &pieces[i], at, side_bytes);
        states_bytes = is_coded(&pieces[i]) ? KVF_RANS_STATE_BYTES : states_bytes;
        at += pieces[i].bytes;
    }
    kvf_rans_encoder_init(&encoder, words_end);
    for (uint32_t i = run->n_pieces; i-- > 0;) {
        at -= pieces[i].bytes;
        piece_encode(packer, &encoder, &pieces[i], at);
    }
    words_bytes = (size_t)(words_end - encoder.at);
    *stream = (struct kvf_entropy_stream){
        .plain_bytes = run->plain_bytes,
        .coded_bytes = (uint32_t)(states_bytes + words_bytes + side_bytes),
        .side_bytes = (uint32_t)side_bytes,
        .n_extents = run->n_pieces,
    };
    if (stream->coded_bytes >= run->plain_bytes) {
        *stream = (struct kvf_entropy_stream){.plain_bytes = run->plain_bytes,
                                              .coded_bytes = run->plain_bytes};
        states_bytes = 0;
    }
    if (stream->coded_bytes > room_bytes) {
        return false;
    }
    if (stream->n_extents == 0) {
        memcpy(to, from, run->plain_bytes);
        return true;
    }
    if (states_bytes != 0) {
        kvf_rans_encoder_states(&encoder, to);
    }
    memcpy(to + states_bytes, encoder.at, words_bytes);
    memcpy(to + states_bytes + words_bytes, packer->side, side_bytes);
    return true;
}

/* -------------------------------------------------------------------------------------------------
 * Records
 */

/* Bytes of everything before the streams and behind the page, if all streams had extents. */
static size_t directory_bytes_max(const struct kvf_entropy_packer *packer)
{
    const struct kvf_entropy_cut *cut = &packer->cut;
    size_t bytes = sizeof(struct kvf_entropy_head) + packer->tables_bytes +
                   cut->n_streams * sizeof(struct kvf_entropy_stream);

    for (uint32_t i = 0; i < cut->n_pieces; i++) {
        bytes += sizeof(struct kvf_entropy_extent) +
                 cut->pieces[i].n_columns * sizeof(struct kvf_entropy_column);
    }
    return bytes;
}

static uint8_t *extent_write(const struct kvf_entropy_piece *piece, uint8_t *to)
{
    struct kvf_entropy_extent extent = {.bytes = piece->bytes,
                                        .row_bytes = piece->row_bytes,
                                        .n_columns = piece->n_columns,
                                        .transform = piece->transform};

    if (piece->columns[0].mode == KVF_COLUMN_CLASSES) {
        extent.distance = piece->distance;
    }
    memcpy(to, &extent, sizeof(extent));
    to += sizeof(extent);
    for (uint32_t j = 0; j < piece->n_columns; j++) {
        struct kvf_entropy_column column = {.bytes = piece->columns[j].bytes,
                                            .mode = piece->columns[j].mode,
                                            .table = piece->columns[j].table};

        memcpy(to, &column, sizeof(column));
        to += sizeof(column);
    }
    return to;
}

/* Head, streams, extents and tables to behind the page. Returns where they end. */
static uint8_t *directory_write(const struct kvf_entropy_packer *packer, uint8_t *directory,
                                struct kvf_entropy_head *head)
{
    const struct kvf_entropy_cut *cut = &packer->cut;
    size_t streams_bytes = cut->n_streams * sizeof(struct kvf_entropy_stream);
    uint8_t *extents = directory + sizeof(*head) + streams_bytes;
    uint8_t *to = extents;

    memcpy(directory + sizeof(*head), packer->streams, streams_bytes);
    for (uint32_t i = 0; i < cut->n_streams; i++) {
        const struct kvf_entropy_run *run = &cut->streams[i];

        for (uint32_t j = 0; j < packer->streams[i].n_extents; j++) {
            to = extent_write(&cut->pieces[run->first_piece + j], to);
        }
    }
    *head = (struct kvf_entropy_head){.extents_bytes = (uint32_t)(to - extents),
                                      .tables_bytes = packer->tables_bytes,
                                      .n_tables = (uint16_t)packer->n_tables};
    memcpy(to, packer->stored_tables, packer->tables_bytes);
    return to + packer->tables_bytes;
}

/* The page of the packed record, when all behind it is there. */
static void page_write(const struct kvf_record_page *plain, uint8_t *packed, uint64_t packed_bytes,
                       uint32_t n_streams)
{
    struct kvf_record_page *page = (struct kvf_record_page *)(void *)packed;

    memcpy(page, plain, sizeof(*page));
    page->header.entropy_id = KVF_ENTROPY_RANS;
    page->header.n_streams = (uint16_t)n_streams;
    page->header.plain_bytes = (uint32_t)plain->header.total_bytes;
    page->header.plain_crc32c = plain->header.payload_crc32c;
    page->header.total_bytes = packed_bytes;
    page->header.payload_crc32c = kvf_crc32c(0, packed + KVF_BLOCK_PAGE_BYTES,
                                             packed_bytes - KVF_BLOCK_PAGE_BYTES);
    kvf_block_seal_header(page);
}

/* All streams to at. Returns where they end, or NULL if they come to lie behind end. */
static uint8_t *streams_encode(struct kvf_entropy_packer *packer, const uint8_t *payload,
                               uint8_t *at, const uint8_t *end)
{
    for (uint32_t i = 0; i < packer->cut.n_streams; i++) {
        if (!stream_encode(packer, i, payload, at, (size_t)(end - at))) {
            return NULL;
        }
        payload += packer->cut.streams[i].plain_bytes;
        at += packer->streams[i].coded_bytes;
    }
    return at;
}

/* Can bytes be saved at all? What zstd would save is not known before. */
static bool may_pay(struct kvf_entropy_packer *packer, uint64_t wanted)
{
    uint64_t saved = roles_decide(packer);
    bool any = saved >= wanted;

    for (uint32_t i = 0; i < packer->cut.n_roles; i++) {
        any |= packer->cut.roles[i].part == KVF_PART_RAW ||
               packer->cut.roles[i].part == KVF_PART_OTHER;
    }
    return any;
}

int kvf_entropy_pack(struct kvf_entropy_packer *packer, const void *record, void *packed_out,
                     uint64_t *packed_bytes_out)
{
    const struct kvf_record_page *page = record;
    const uint8_t *payload = (const uint8_t *)(page + 1);
    uint64_t plain_bytes = page->header.total_bytes;
    uint64_t most = kvf_align_up(plain_bytes, KVF_ENTROPY_ALIGN_BYTES);
    uint64_t wanted = plain_bytes / KVF_ENTROPY_SAVED_SHARE;
    uint8_t *packed = packed_out;
    uint8_t *directory = packed + KVF_BLOCK_PAGE_BYTES;
    struct kvf_entropy_head head;
    size_t directory_max;
    uint64_t packed_bytes;
    uint8_t *streams;
    uint8_t *end;

    if (kvf_entropy_is_packed(page)) {
        return KVF_ERR_INVALID;
    }
    wanted = wanted < KVF_ENTROPY_ALIGN_BYTES ? KVF_ENTROPY_ALIGN_BYTES : wanted;
    most -= wanted; /* a drive has pages: that of the plain record's end is taken as full */
    if (!kvf_entropy_cut(&packer->cut, page) || !counters_give(packer)) {
        return KVF_ERR_NO_SPACE;
    }
    count_all(packer, payload);
    if (!may_pay(packer, wanted)) {
        return KVF_ERR_NO_SPACE;
    }
    directory_max = directory_bytes_max(packer);
    if (directory_max + KVF_ENTROPY_ALIGN_BYTES > KVF_ENTROPY_DIRECTORY_BYTES ||
        KVF_BLOCK_PAGE_BYTES + directory_max > most) {
        return KVF_ERR_NO_SPACE;
    }
    streams = directory + directory_max;
    end = streams_encode(packer, payload, streams, packed + most);
    if (end == NULL) {
        return KVF_ERR_NO_SPACE;
    }
    /* the streams move to the end of the last page */
    directory = directory_write(packer, directory, &head);
    packed_bytes = kvf_align_up((size_t)(directory - packed) + (size_t)(end - streams),
                                KVF_ENTROPY_ALIGN_BYTES);
    if (packed_bytes > most) {
        return KVF_ERR_NO_SPACE;
    }
    head.streams_offset = (uint32_t)(packed_bytes - (uint64_t)(end - streams));
    memmove(packed + head.streams_offset, streams, (size_t)(end - streams));
    memset(directory, 0, (size_t)(packed + head.streams_offset - directory));
    memcpy(packed + KVF_BLOCK_PAGE_BYTES, &head, sizeof(head));
    page_write(page, packed, packed_bytes, packer->cut.n_streams);
    *packed_bytes_out = packed_bytes;
    return KVF_OK;
}
