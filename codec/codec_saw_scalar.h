/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw_scalar.h: what the references of the rotating codecs share: rows of vectors in tiles,
 * and codes in planes. Numbers in comments are steps of codec_saw.h.
 */
#ifndef KVF_CODEC_CODEC_SAW_SCALAR_H
#define KVF_CODEC_CODEC_SAW_SCALAR_H

#include "codec/codec_saw_row.h"
#include "codec/rotate.h"

struct kvf_saw_tile_work {
    _Alignas(64) float tile[KVF_CODEC_GROUP_MAX][KVF_ROTATE_LANES];
    int32_t sums[KVF_CODEC_GROUP_MAX][KVF_ROTATE_LANES];
    uint8_t codes[KVF_CODEC_GROUP_MAX][KVF_ROTATE_LANES];
    uint8_t packed[KVF_CODEC_GROUP_MAX][KVF_ROTATE_LANES];
    float mean_tile[KVF_CODEC_GROUP_MAX][KVF_ROTATE_LANES]; /* lane 0 only */
    float partial[KVF_SAW_PARTIAL_SUMS][KVF_CODEC_GROUP_MAX];
    float vector[KVF_CODEC_GROUP_MAX];
    float mean[KVF_CODEC_GROUP_MAX];  /* of the row, as stored */
    float signs[KVF_CODEC_GROUP_MAX]; /* of the row: g, -1 where a channel is flipped */
    uint16_t costs[KVF_CODEC_CLIPS_MAX][KVF_SAW_COST_STEPS]; /* (S), of ratios that are tried */
};

/* A row, as kvf_saw_row has it, and what is known about it here. */
struct kvf_saw_tile_row {
    struct kvf_saw_row at;
    const struct kvf_codec_tensor *tensor;
    const struct kvf_codec_job *job;
    struct kvf_saw_tile_work *work;
    bool centred;
};

/* at->work begins with a struct kvf_saw_tile_work; mean NULL: not centred. */
struct kvf_saw_tile_row kvf_saw_row_of(const struct kvf_saw_row *at, const uint8_t *mean);

/* (1) Load one vector as fp32 into work->vector. False if it is an escape. peak_out: bits of the
 * largest magnitude. */
bool kvf_saw_load_vector(const struct kvf_saw_tile_row *row, uint32_t token, uint32_t *peak_out);

/* (2) The mean of each channel: fp16 to mean_out, the same as fp32 to work->mean. */
void kvf_saw_make_mean(const struct kvf_saw_tile_row *row, uint8_t *mean_out);

/* One of both: a mean that is given to work->mean, or one that is found to mean as well. */
void kvf_saw_take_mean(const struct kvf_saw_tile_row *row, uint8_t *mean);

/* A stored mean to work->mean. */
void kvf_saw_load_mean(const struct kvf_saw_tile_row *row, const uint8_t *mean);

/* (1, 3) Flipped input of up to 32 vectors to work->tile, side by side; zero where there is none to
 * code. */
void kvf_saw_load_tile(const struct kvf_saw_tile_row *row, uint32_t token_first, uint32_t n_lanes,
                       bool escaped_out[KVF_ROTATE_LANES]);

/* One plane of the codes of n coefficients: their plane_bits bits from bit shift on. */
void kvf_saw_pack_plane(uint8_t (*codes)[KVF_ROTATE_LANES], const uint8_t *order, uint32_t n,
                        uint32_t plane_bits, uint32_t shift, uint8_t (*packed)[KVF_ROTATE_LANES]);

/* All planes, and back to integers by coefficient. */
void kvf_saw_pack_codes(uint8_t (*codes)[KVF_ROTATE_LANES], const uint8_t *order, uint32_t n,
                        uint32_t bits, uint8_t (*packed)[KVF_ROTATE_LANES]);
void kvf_saw_unpack_codes(uint8_t (*packed)[KVF_ROTATE_LANES], const uint8_t *order, uint32_t n,
                          uint32_t bits, int32_t (*sums)[KVF_ROTATE_LANES]);

/* work->packed, code_bytes of each of n_lanes vectors, to the strip and from it. */
void kvf_saw_write_packed(const struct kvf_saw_tile_row *row, uint32_t n_lanes, uint8_t *to);
void kvf_saw_read_packed(const struct kvf_saw_tile_row *row, uint32_t n_lanes, const uint8_t *from);

/* work->tile, narrowed, to the pages of the view. */
void kvf_saw_store_tile(const struct kvf_saw_tile_row *row, uint32_t token_first, uint32_t n_lanes);

#endif /* KVF_CODEC_CODEC_SAW_SCALAR_H */
