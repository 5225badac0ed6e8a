/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_tq_scalar.c: reference of the tq codec's arithmetic. The format, step by step, is
 * codec_tq.h; numbers in comments here are its steps.
 *
 * As in codec_saw_scalar.c, 32 vectors lie side by side in the lanes of a tile.
 */
#include "codec/codec_fp.h"
#include "codec/codec_saw_scalar.h"
#include "codec/codec_tq_row.h"

enum {
    LANES = KVF_ROTATE_LANES,
    GROUP_MAX = KVF_CODEC_GROUP_MAX,
    SUMS = KVF_TQ_PARTIAL_SUMS,
    WORDS_A_ROW = GROUP_MAX / 64, /* of B */
};

struct tq_work {
    struct kvf_saw_tile_work saw; /* first: the functions of codec_saw_scalar.h find it */
    float y[GROUP_MAX][LANES];    /* rotation after rotation */
    float levels[GROUP_MAX][LANES];
    float mean[GROUP_MAX][LANES]; /* rotated, in lane 0 */
    int32_t sums[GROUP_MAX][LANES];
    float energy[KVF_SAW_PARTIAL_SUMS][GROUP_MAX];
    uint64_t matrix[GROUP_MAX][WORDS_A_ROW]; /* B */
};

/* A row, and one of its rotations. */
struct tq_row {
    struct kvf_saw_tile_row tiles;
    const struct kvf_codec_tensor *tensor;
    struct tq_work *work;
    const uint8_t *channels;
    const struct kvf_codec_rotation *rotation;
    const struct kvf_tq_codebook *codebook;
    const uint8_t *order;
    uint32_t first; /* element of y where the rotation begins */
};

/* What a rotation's part of a tile is coded with, by lane. */
struct tq_lanes {
    bool escaped[LANES];
    uint16_t scales[LANES][2];
};

static void use_rotation(struct tq_row *row, uint32_t r)
{
    row->rotation = &row->tensor->rotations[r];
    row->codebook = kvf_tq_codebook(row->rotation->bits);
    row->first = r == 0 ? 0 : row->tensor->rotations[0].n;
    row->order = row->tensor->order + row->first;
}

static struct tq_row row_of(const struct kvf_saw_row *at, const uint8_t *mean,
                            const uint8_t *channels)
{
    return (struct tq_row){
        .tiles = kvf_saw_row_of(at, mean),
        .tensor = at->tensor,
        .work = at->work,
        .channels = channels,
    };
}

static bool has_residual(const struct tq_row *row)
{
    return (row->tensor->descriptor.flags & KVF_TENSOR_RESIDUAL) != 0;
}

static void fill_matrix(const struct tq_row *row)
{
    uint64_t state = row->tensor->descriptor.rot_seed;
    for (uint32_t j = 0; j < row->tensor->group; j++) {
        for (uint32_t w = 0; w < WORDS_A_ROW; w++) {
            uint64_t z = state += 0x9e3779b97f4a7c15U;
            z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
            z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
            row->work->matrix[j][w] = z ^ (z >> 31);
        }
    }
}

static bool is_minus(const struct tq_row *row, uint32_t j, uint32_t i)
{
    return (row->work->matrix[j][i / 64] >> (i % 64) & 1) != 0;
}

/* -------------------------------------------------------------------------------------------------
 * Encode
 */

/* Sums of magnitudes of each channel about the mean, sampled as the mean is. */
static void find_energy(const struct tq_row *row)
{
    float(*energy)[GROUP_MAX] = row->work->energy;
    const struct kvf_saw_tile_work *saw = &row->work->saw;
    uint32_t n_tokens = row->tiles.job->n_tokens;
    uint32_t n = row->tensor->group;
    memset(energy, 0, sizeof(row->work->energy));
    for (uint32_t at = 0; at < KVF_SAW_PARTIAL_SUMS * KVF_SAW_TILE_TOKENS; at++) {
        uint32_t s = at / KVF_SAW_TILE_TOKENS;
        uint32_t token = kvf_saw_sampled_token(n_tokens, s, at % KVF_SAW_TILE_TOKENS);
        uint32_t peak;
        if (token < n_tokens && kvf_saw_load_vector(&row->tiles, token, &peak)) {
            for (uint32_t i = 0; i < n; i++) {
                float x = saw->vector[i] - (row->tiles.centred ? saw->mean[i] : 0.0f);
                energy[s][i] += x < 0.0f ? -x : x;
            }
        }
    }
    for (uint32_t half = KVF_SAW_PARTIAL_SUMS / 2; half > 0; half /= 2) {
        for (uint32_t s = 0; s < half; s++) {
            for (uint32_t i = 0; i < n; i++) {
                energy[s][i] += energy[s + half][i];
            }
        }
    }
}

/* (4) The mean through each rotation. */
static void rotate_mean(struct tq_row *row)
{
    struct tq_work *work = row->work;
    memset(work->mean, 0, sizeof(work->mean));
    for (uint32_t i = 0; i < row->tensor->group; i++) {
        uint32_t channel = row->channels[i];
        work->mean[i][0] = work->saw.mean[channel] * work->saw.signs[channel];
    }
    for (uint32_t r = 0; r < row->tensor->n_rotations; r++) {
        use_rotation(row, r);
        kvf_rotate_forward(work->mean + row->first, row->rotation->n, row->rotation->order);
    }
}

/* (4) */
static void rotate_tile(const struct tq_row *row)
{
    float(*y)[LANES] = row->work->y + row->first;
    for (uint32_t i = 0; i < row->rotation->n; i++) {
        memcpy(y[i], row->work->saw.tile[row->channels[row->first + i]], sizeof(y[i]));
    }
    kvf_rotate_forward(y, row->rotation->n, row->rotation->order);
    for (uint32_t i = 0; i < row->rotation->n && row->tiles.centred; i++) {
        float mean = row->work->mean[row->first + i][0];
        for (uint32_t lane = 0; lane < LANES; lane++) {
            y[i][lane] -= mean;
        }
    }
}

/* (5) The tree, to sums[0]. */
static void add_sums(float sums[SUMS][LANES])
{
    for (uint32_t half = SUMS / 2; half > 0; half /= 2) {
        for (uint32_t s = 0; s < half; s++) {
            for (uint32_t lane = 0; lane < LANES; lane++) {
                sums[s][lane] += sums[s + half][lane];
            }
        }
    }
}

/* (5) Sums of products of two tiles of the rotation. */
static void sum_products(const struct tq_row *row, float (*a)[LANES], float (*b)[LANES],
                         float sum_out[LANES])
{
    uint32_t n = row->rotation->n;
    uint32_t run = (n + SUMS - 1) / SUMS;
    float sums[SUMS][LANES] = {{0.0f}};
    for (uint32_t position = 0; position < n; position++) {
        uint32_t i = row->order[position];
        float *sum = sums[position / run];
        for (uint32_t lane = 0; lane < LANES; lane++) {
            sum[lane] = kvf_fma_f32(a[i][lane], b[i][lane], sum[lane]);
        }
    }
    add_sums(sums);
    memcpy(sum_out, sums[0], sizeof(sums[0]));
}

/* (6) The code of one element. In double both the product and adding 1.5 2^52, which rounds to an
 * integer in the low bits with ties to even, are what is asked for. */
static uint8_t quantize(const struct kvf_tq_codebook *codebook, uint32_t bits, float y, float f)
{
    uint32_t half = 1u << (bits - 1);
    double m = (double)kvf_fma_f32(y, f, 0.5f) * KVF_TQ_GRID;
    m = m > 0.0 ? m : 0.0;
    m = m < KVF_TQ_GRID ? m : KVF_TQ_GRID;
    m += 0x1.8p52;
    uint64_t rounded;
    memcpy(&rounded, &m, sizeof(rounded));
    uint32_t value = (uint32_t)rounded & KVF_TQ_GRID;
    uint32_t a = value >= 128 ? value - 128 : 127 - value;
    uint32_t above = 0;
    for (uint32_t t = 0; t + 1 < half; t++) {
        above += codebook->thresholds[t] <= a;
    }
    return (uint8_t)(value >= 128 ? half + above : half - 1 - above);
}

/* (6) */
static void quantize_tile(const struct tq_row *row, const float square[LANES])
{
    uint8_t(*codes)[LANES] = row->work->saw.codes + row->first;
    float f[LANES];
    for (uint32_t lane = 0; lane < LANES; lane++) {
        f[lane] = square[lane] != 0.0f
                      ? row->rotation->quantize * (1.0f / kvf_sqrt_f32(square[lane]))
                      : 0.0f;
    }
    for (uint32_t i = 0; i < row->rotation->n; i++) {
        const float *y = row->work->y[row->first + i];
        float *levels = row->work->levels[row->first + i];
        for (uint32_t lane = 0; lane < LANES; lane++) {
            uint8_t code = quantize(row->codebook, row->rotation->bits, y[lane], f[lane]);
            codes[i][lane] = code;
            levels[lane] = (float)(row->codebook->levels[code] - KVF_TQ_LEVEL_BIAS);
        }
    }
}

static uint16_t scale_bits(float scale)
{
    return kvf_f16_from_f32(scale < KVF_TQ_SCALE_MAX ? scale : KVF_TQ_SCALE_MAX);
}

/* (7) */
static uint16_t choose_scale(const struct tq_row *row, float square, float product, float levels)
{
    const struct kvf_codec_rotation *rotation = row->rotation;
    if (square == 0.0f) {
        return 0;
    }
    switch (kvf_tq_policy(row->tensor)) {
    case KVF_TENSOR_SCALE_MATCHED:
        return scale_bits(kvf_sqrt_f32(square / levels) * rotation->scale);
    case KVF_TENSOR_SCALE_LEAST_SQUARES:
        return scale_bits(product / levels * rotation->scale);
    case KVF_TENSOR_SCALE_UNBIASED:
        return scale_bits(square / product * rotation->scale);
    default:
        return scale_bits(kvf_sqrt_f32(square) * rotation->root_mean_square);
    }
}

/* (8) t of each lane, and the signs as a plane of codes, behind those of the only rotation. */
static void project_residual(const struct tq_row *row, struct tq_lanes *lanes)
{
    struct tq_work *work = row->work;
    uint32_t n = row->rotation->n;
    uint32_t run = (n + SUMS - 1) / SUMS;
    float square[LANES];
    for (uint32_t i = 0; i < n; i++) {
        for (uint32_t lane = 0; lane < LANES; lane++) {
            float a = kvf_f32_from_f16(lanes->scales[lane][0]) * row->rotation->residual;
            work->y[i][lane] = kvf_fma_f32(-a, work->levels[i][lane], work->y[i][lane]);
        }
    }
    sum_products(row, work->y, work->y, square);
    for (uint32_t lane = 0; lane < LANES; lane++) {
        lanes->scales[lane][1] = scale_bits(kvf_sqrt_f32(square[lane]) *
                                            row->rotation->root_mean_square);
    }
    for (uint32_t j = 0; j < n; j++) {
        float sums[SUMS][LANES] = {{0.0f}};
        for (uint32_t position = 0; position < n; position++) {
            uint32_t i = row->order[position];
            float sign = is_minus(row, j, i) ? -1.0f : 1.0f;
            for (uint32_t lane = 0; lane < LANES; lane++) {
                sums[position / run][lane] += sign * work->y[i][lane];
            }
        }
        add_sums(sums);
        for (uint32_t lane = 0; lane < LANES; lane++) {
            work->saw.codes[j][lane] = sums[0][lane] < 0.0f;
        }
    }
}

/* Codes of escapes are 0, and so is their second scale. */
static void clear_escapes(const struct tq_row *row, struct tq_lanes *lanes)
{
    uint8_t(*packed)[LANES] = row->work->saw.packed;
    for (uint32_t lane = 0; lane < LANES; lane++) {
        if (lanes->escaped[lane]) {
            lanes->scales[lane][0] = KVF_SAW_ESCAPE_SCALE;
            lanes->scales[lane][1] = 0;
            for (uint32_t byte = 0; byte < row->tensor->code_bytes; byte++) {
                packed[byte][lane] = 0;
            }
        }
    }
}

/* (4 to 8) A tile that is loaded, to scales and packed codes. */
static void encode_tile(struct tq_row *row, struct tq_lanes *lanes)
{
    struct tq_work *work = row->work;
    uint8_t(*packed)[LANES] = work->saw.packed;
    for (uint32_t r = 0; r < row->tensor->n_rotations; r++) {
        use_rotation(row, r);
        float(*y)[LANES] = work->y + row->first;
        float(*levels)[LANES] = work->levels + row->first;
        const struct kvf_codec_rotation *rotation = row->rotation;
        float square[LANES];
        float product[LANES];
        float power[LANES];
        rotate_tile(row);
        sum_products(row, y, y, square);
        quantize_tile(row, square);
        sum_products(row, y, levels, product);
        sum_products(row, levels, levels, power);
        for (uint32_t lane = 0; lane < LANES; lane++) {
            float mean = kvf_sqrt_f32(square[lane]) * rotation->root_mean_square;
            bool fits = mean >= KVF_TQ_RMS_MIN && mean < KVF_TQ_RMS_MAX;
            lanes->escaped[lane] |= square[lane] != 0.0f && !fits;
            lanes->scales[lane][r] = choose_scale(row, square[lane], product[lane], power[lane]);
        }
        kvf_saw_pack_codes(work->saw.codes + row->first, row->order, rotation->n, rotation->bits,
                           packed);
        packed += rotation->code_bytes;
    }
    if (has_residual(row)) {
        uint8_t natural[GROUP_MAX];
        kvf_tq_all_channels(row->tensor, natural);
        project_residual(row, lanes);
        kvf_saw_pack_plane(work->saw.codes, natural, row->tensor->group, 1, 0, packed);
    }
    clear_escapes(row, lanes);
}

static int scalar_encode_row(const struct kvf_saw_row *at, const struct kvf_tq_strip *strip,
                             struct kvf_codec_escapes *escapes)
{
    uint8_t channels[GROUP_MAX];
    kvf_tq_all_channels(at->tensor, channels);
    struct tq_row row = row_of(at, strip->mean, channels);
    size_t meta_bytes = (size_t)row.tensor->n_scales * KVF_TQ_SCALE_BYTES;
    if (strip->mean != NULL) {
        kvf_saw_take_mean(&row.tiles, strip->mean);
    }
    if (at->has_split) {
        kvf_tq_read_channels(row.tensor, strip->split, channels);
    } else if (strip->split != NULL) {
        find_energy(&row);
        kvf_tq_split_channels(row.tensor, row.work->energy[0], strip->split, channels);
    }
    if (strip->mean != NULL) {
        rotate_mean(&row);
    }
    if (has_residual(&row)) {
        fill_matrix(&row);
    }
    for (uint32_t token = 0; token < at->job->n_tokens; token += LANES) {
        uint32_t left = at->job->n_tokens - token;
        uint32_t n_lanes = left < LANES ? left : LANES;
        struct tq_lanes lanes;
        kvf_saw_load_tile(&row.tiles, token, n_lanes, lanes.escaped);
        encode_tile(&row, &lanes);
        kvf_saw_write_packed(&row.tiles, n_lanes,
                             strip->codes + (size_t)token * row.tensor->code_bytes);
        for (uint32_t lane = 0; lane < n_lanes; lane++) {
            memcpy(strip->meta + (token + lane) * meta_bytes, lanes.scales[lane], meta_bytes);
            if (lanes.escaped[lane] && !kvf_saw_escape(at, token + lane, escapes)) {
                return KVF_ERR_NO_SPACE;
            }
        }
    }
    return KVF_OK;
}

/* -------------------------------------------------------------------------------------------------
 * Decode
 */

/* x = fma(g (scale factor), sum, x) over the channels of a rotation. */
static void add_values(const struct tq_row *row, float factor, const uint16_t (*scales)[2],
                       uint32_t which)
{
    for (uint32_t i = 0; i < row->rotation->n; i++) {
        uint32_t channel = row->channels[row->first + i];
        const int32_t *sums = row->work->sums[row->first + i];
        float *x = row->work->saw.tile[channel];
        float sign = row->work->saw.signs[channel];
        for (uint32_t lane = 0; lane < LANES; lane++) {
            float scale = kvf_f32_from_f16(scales[lane][which]) * factor;
            x[lane] = kvf_fma_f32(sign * scale, (float)sums[lane], x[lane]);
        }
    }
}

/* v: the signs, behind the codes in packed, times B. */
static void project_back(const struct tq_row *row)
{
    struct tq_work *work = row->work;
    const uint8_t(*signs)[LANES] = (const uint8_t(*)[LANES])work->saw.packed +
                                   row->rotation->code_bytes;
    uint32_t n = row->rotation->n;
    memset(work->sums, 0, sizeof(work->sums));
    for (uint32_t j = 0; j < n; j++) {
        for (uint32_t i = 0; i < n; i++) {
            int32_t minus = is_minus(row, j, i);
            int32_t *sums = work->sums[i];
            for (uint32_t lane = 0; lane < LANES; lane++) {
                sums[lane] += 1 - 2 * (minus ^ (signs[j / 8][lane] >> (j % 8) & 1));
            }
        }
    }
}

/* A tile of packed codes to values. */
static void decode_tile(struct tq_row *row, const uint16_t (*scales)[2])
{
    struct tq_work *work = row->work;
    uint8_t(*packed)[LANES] = work->saw.packed;
    for (uint32_t i = 0; i < row->tensor->group; i++) {
        float mean = row->tiles.centred ? work->saw.mean[i] : 0.0f;
        for (uint32_t lane = 0; lane < LANES; lane++) {
            work->saw.tile[i][lane] = mean;
        }
    }
    for (uint32_t r = 0; r < row->tensor->n_rotations; r++) {
        use_rotation(row, r);
        const struct kvf_codec_rotation *rotation = row->rotation;
        int32_t(*sums)[LANES] = work->sums + row->first;
        kvf_saw_unpack_codes(packed, row->order, rotation->n, rotation->bits, sums);
        for (uint32_t i = 0; i < rotation->n; i++) {
            for (uint32_t lane = 0; lane < LANES; lane++) {
                sums[i][lane] = row->codebook->levels[sums[i][lane]] - KVF_TQ_LEVEL_BIAS;
            }
        }
        kvf_rotate_inverse(sums, rotation->n, rotation->order);
        add_values(row, rotation->factor, scales, r);
        packed += rotation->code_bytes;
    }
    if (has_residual(row)) {
        project_back(row);
        kvf_rotate_inverse(work->sums, row->rotation->n, row->rotation->order);
        add_values(row, row->rotation->residual_factor, scales, 1);
    }
}

static void scalar_decode_row(const struct kvf_saw_row *at, const struct kvf_tq_stored *stored,
                              const uint8_t channels[KVF_CODEC_GROUP_MAX])
{
    struct tq_row row = row_of(at, stored->mean, channels);
    size_t meta_bytes = (size_t)row.tensor->n_scales * KVF_TQ_SCALE_BYTES;
    if (stored->mean != NULL) {
        kvf_saw_load_mean(&row.tiles, stored->mean);
    }
    if (has_residual(&row)) {
        fill_matrix(&row);
    }
    memset(row.work->saw.packed, 0, sizeof(row.work->saw.packed)); /* lanes without a vector */
    for (uint32_t token = 0; token < at->job->n_wanted; token += LANES) {
        uint32_t left = at->job->n_wanted - token;
        uint32_t n_lanes = left < LANES ? left : LANES;
        uint16_t scales[LANES][2] = {{0}};
        for (uint32_t lane = 0; lane < n_lanes; lane++) {
            memcpy(scales[lane], stored->meta + (token + lane) * meta_bytes, meta_bytes);
        }
        kvf_saw_read_packed(&row.tiles, n_lanes,
                            stored->codes + (size_t)token * row.tensor->code_bytes);
        decode_tile(&row, (const uint16_t(*)[2])scales);
        kvf_saw_store_tile(&row.tiles, token, n_lanes);
    }
}

const struct kvf_tq_kernels kvf_tq_kernels_scalar = {
    .workspace_bytes = sizeof(struct tq_work),
    .encode_row = scalar_encode_row,
    .decode_row = scalar_decode_row,
};
