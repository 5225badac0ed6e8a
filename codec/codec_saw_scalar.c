/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw_scalar.c: reference of the saw codec's arithmetic. The format, step by step, is
 * codec_saw.h; numbers in comments here are its steps.
 *
 * Vectors are worked on 32 at a time, side by side in the lanes of a tile: element i of lane l is
 * tile[i][l]. All arithmetic then runs along the lanes, so that compilers vectorize it on every
 * machine.
 */
#include "codec/codec_saw_scalar.h"

#include "codec/codec_fp.h"
#include "codec/convert.h"

#include <assert.h>
#include <math.h>

enum {
    LANES = KVF_ROTATE_LANES
};

/* What a tile's vectors are coded with, by lane. Escapes have offset and factor 0. */
struct saw_lanes {
    float offset[LANES]; /* lo d */
    float factor[LANES]; /* c (1 / scale) */
    float zero[LANES];   /* w, where there are zeros */
    uint32_t meta[LANES];
    bool escaped[LANES];
};

/* g of each channel of the row. */
static void fill_row_signs(const struct kvf_saw_tile_row *row)
{
    for (uint32_t i = 0; i < row->tensor->group; i++) {
        row->work->signs[i] = kvf_saw_is_flipped(&row->at, i) ? -1.0f : 1.0f;
    }
}

struct kvf_saw_tile_row kvf_saw_row_of(const struct kvf_saw_row *at, const uint8_t *mean)
{
    struct kvf_saw_tile_row row = {
        .at = *at,
        .tensor = at->tensor,
        .job = at->job,
        .work = at->work,
        .centred = mean != NULL,
    };
    fill_row_signs(&row);
    return row;
}

/* -------------------------------------------------------------------------------------------------
 * Encode
 */

bool kvf_saw_load_vector(const struct kvf_saw_tile_row *row, uint32_t token, uint32_t *peak_out)
{
    const struct kvf_codec_tensor *tensor = row->tensor;
    float *vector = row->work->vector;
    if (token < row->job->n_sinks) {
        return false;
    }
    kvf_convert_widen(tensor->dtype, kvf_pages_vector(tensor, row->job, row->at.row, token),
                      tensor->group, vector);
    uint32_t peak = 0;
    for (uint32_t i = 0; i < tensor->group; i++) {
        uint32_t magnitude = kvf_f32_bits(vector[i]) & 0x7fffffff;
        peak = magnitude > peak ? magnitude : peak;
    }
    *peak_out = peak;
    return peak < (uint32_t)KVF_SAW_ESCAPE_EXPONENT << 23;
}

void kvf_saw_make_mean(const struct kvf_saw_tile_row *row, uint8_t *mean_out)
{
    struct kvf_saw_tile_work *work = row->work;
    uint32_t n = row->tensor->group;
    uint32_t count = 0;
    memset(work->partial, 0, sizeof(work->partial));
    for (uint32_t at = 0; at < KVF_SAW_PARTIAL_SUMS * KVF_SAW_TILE_TOKENS; at++) {
        uint32_t s = at / KVF_SAW_TILE_TOKENS;
        uint32_t token = kvf_saw_sampled_token(row->job->n_tokens, s, at % KVF_SAW_TILE_TOKENS);
        uint32_t peak;
        if (token < row->job->n_tokens && kvf_saw_load_vector(row, token, &peak)) {
            float *restrict sum = work->partial[s];
            for (uint32_t i = 0; i < n; i++) {
                sum[i] += work->vector[i];
            }
            count++;
        }
    }
    for (uint32_t half = KVF_SAW_PARTIAL_SUMS / 2; half > 0; half /= 2) {
        for (uint32_t s = 0; s < half; s++) {
            for (uint32_t i = 0; i < n; i++) {
                work->partial[s][i] += work->partial[s + half][i];
            }
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        float mean = count != 0 ? work->partial[0][i] / (float)count : 0.0f;
        bool fits = mean > -65520.0f && mean < 65520.0f; /* what rounds to a finite fp16 */
        uint16_t half = fits ? kvf_f16_from_f32(mean) : 0;
        memcpy(mean_out + i * sizeof(half), &half, sizeof(half));
        work->mean[i] = kvf_f32_from_f16(half);
    }
}

void kvf_saw_load_mean(const struct kvf_saw_tile_row *row, const uint8_t *mean)
{
    for (uint32_t i = 0; i < row->tensor->group; i++) {
        uint16_t half;
        memcpy(&half, mean + i * sizeof(half), sizeof(half));
        row->work->mean[i] = kvf_f32_from_f16(half);
    }
}

void kvf_saw_take_mean(const struct kvf_saw_tile_row *row, uint8_t *mean)
{
    if (row->at.has_mean) {
        kvf_saw_load_mean(row, mean);
    } else {
        kvf_saw_make_mean(row, mean);
    }
}

/* The mean, rotated, to lane 0 of work->mean_tile. */
static void rotate_mean(const struct kvf_saw_tile_row *row)
{
    struct kvf_saw_tile_work *work = row->work;
    memset(work->mean_tile, 0, sizeof(work->mean_tile));
    for (uint32_t i = 0; i < row->tensor->group; i++) {
        work->mean_tile[i][0] = work->mean[i] * work->signs[i];
    }
    kvf_rotate_forward(work->mean_tile, row->tensor->group, row->tensor->rot_order);
}

void kvf_saw_load_tile(const struct kvf_saw_tile_row *row, uint32_t token_first, uint32_t n_lanes,
                       bool escaped_out[LANES])
{
    struct kvf_saw_tile_work *work = row->work;
    uint32_t n = row->tensor->group;
    for (uint32_t lane = 0; lane < LANES; lane++) {
        uint32_t peak = 0;
        escaped_out[lane] = lane >= n_lanes || !kvf_saw_load_vector(row, token_first + lane, &peak);
        if (escaped_out[lane]) {
            for (uint32_t i = 0; i < n; i++) {
                work->tile[i][lane] = 0.0f;
            }
            continue;
        }
        uint32_t exponent = peak >> 23;
        uint32_t smallest = 0; /* magnitude bits that are kept */
        if (row->tensor->dtype == KVF_DTYPE_BF16 && exponent > KVF_SAW_DROP_BINADES) {
            smallest = (exponent - KVF_SAW_DROP_BINADES) << 23;
        }
        for (uint32_t i = 0; i < n; i++) {
            uint32_t bits = kvf_f32_bits(work->vector[i]);
            bits = (bits & 0x7fffffff) >= smallest ? bits : 0;
            work->vector[i] = kvf_f32_from_bits(bits) * work->signs[i];
        }
        for (uint32_t i = 0; i < n; i++) {
            work->tile[i][lane] = work->vector[i];
        }
    }
}

/* (4) */
static void transform_tile(const struct kvf_saw_tile_row *row)
{
    struct kvf_saw_tile_work *work = row->work;
    uint32_t n = row->tensor->group;
    kvf_rotate_forward(work->tile, n, row->tensor->rot_order);
    if (!row->centred) {
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        float mean = work->mean_tile[i][0];
        for (uint32_t lane = 0; lane < LANES; lane++) {
            work->tile[i][lane] -= mean;
        }
    }
}

/* (6) u, as a number; lo becomes what it gives. */
static float choose_zero(const struct kvf_codec_tensor *tensor, float scale, float *lo)
{
    float top = (float)((1 << tensor->descriptor.bits) - 1);
    float shift = kvf_saw_zero_shift(tensor);
    float zero = -*lo / scale - shift;
    zero = zero > 0.0f ? zero : 0.0f; /* also for 0 / 0 */
    zero = zero < top ? zero : top;
    zero = zero + 0x1.8p23f - 0x1.8p23f;
    *lo = -(scale * (zero + shift));
    return zero;
}

/* (6) */
static void choose_scale(const struct kvf_codec_tensor *tensor, float min, float max, uint32_t lane,
                         struct saw_lanes *lanes)
{
    float levels = (float)((1 << tensor->descriptor.bits) - 1);
    uint16_t lo = kvf_f16_from_f32_directed(min * tensor->rsqrt_order + 0.0f, 0);
    uint16_t hi = kvf_f16_from_f32_directed(max * tensor->rsqrt_order + 0.0f, 1);
    float lo_value = kvf_f32_from_f16(lo);
    uint16_t scale = kvf_f16_smallest_scale(kvf_f32_from_f16(hi) - lo_value, levels);
    float scale_value = kvf_f32_from_f16(scale);
    bool finite = (lo & 0x7c00) != 0x7c00 && (hi & 0x7c00) != 0x7c00;
    if (lanes->escaped[lane] || !finite || (scale != 0 && scale_value < KVF_SAW_SCALE_MIN)) {
        lanes->escaped[lane] = true;
        lanes->offset[lane] = 0.0f;
        lanes->factor[lane] = 0.0f;
        lanes->meta[lane] = (uint32_t)KVF_SAW_ESCAPE_SCALE << 16;
        return;
    }
    uint32_t first = lo;
    if (kvf_saw_has_zeros(tensor)) {
        float zero = choose_zero(tensor, scale_value, &lo_value);
        lanes->zero[lane] = zero + kvf_saw_zero_shift(tensor);
        first = (uint32_t)zero;
    }
    lanes->offset[lane] = lo_value * tensor->sqrt_order;
    lanes->factor[lane] = scale != 0 ? tensor->rsqrt_order * (1.0f / scale_value) : 0.0f;
    lanes->meta[lane] = first | (uint32_t)scale << 16;
}

/* (5, 6) What a tile is coded with if it keeps this share of its ranges. */
static void choose_scales(const struct kvf_codec_tensor *tensor, const float *min, const float *max,
                          uint16_t clip_q15, struct saw_lanes *lanes)
{
    float ratio = (float)clip_q15 * 0x1p-15f;
    for (uint32_t lane = 0; lane < LANES; lane++) {
        float least = min[lane];
        float greatest = max[lane];
        if (clip_q15 != KVF_BLOCK_CLIP_ONE) {
            float middle = 0.5f * (min[lane] + max[lane]);
            float half = 0.5f * (max[lane] - min[lane]) * ratio;
            least = middle - half;
            greatest = middle + half;
        }
        choose_scale(tensor, least, greatest, lane, lanes);
    }
}

/* (7) In double the product of two floats is exact, and adding 1.5 2^52 rounds it to an integer in
 * the low bits, ties to even. That sum is returned. */
static inline double quantize(float difference, float factor, double top)
{
    double q = (double)difference * (double)factor;
    q = q > 0.0 ? q : 0.0;
    q = q < top ? q : top;
    return q + 0x1.8p52;
}

/* (S) What each i costs with each of the tensor's ratios. */
static void fill_costs(const struct kvf_saw_tile_row *row)
{
    const struct kvf_codec_tensor *tensor = row->tensor;
    float last = (float)((1 << (tensor->descriptor.bits - 1)) - 1);
    for (uint32_t k = 0; k < tensor->n_clips; k++) {
        float first_ratio = (float)tensor->clips_q15[0];
        float ratio = (float)tensor->clips_q15[k];
        float a = first_ratio / (16.0f * ratio);
        float step = 16.0f * ratio / first_ratio;
        for (uint32_t i = 0; i < KVF_SAW_COST_STEPS; i++) {
            float level = kvf_fma_f32((float)i, a, -0.5f) + 0x1.8p23f - 0x1.8p23f;
            level = level < last ? level : last;
            float error = kvf_fma_f32(-(level + 0.5f), step, (float)i);
            row->work->costs[k][i] = (uint16_t)(kvf_fma_f32(error, error, 0x1.8p23f) - 0x1.8p23f);
        }
    }
}

/* (S) The cost of each vector with a ratio where there are zeros. */
static void find_zero_costs(const struct kvf_saw_tile_row *row, const struct saw_lanes *first,
                            const struct saw_lanes *tried, uint32_t k, uint32_t costs_out[LANES])
{
    const struct kvf_codec_tensor *tensor = row->tensor;
    float first_ratio = (float)tensor->clips_q15[0];
    float ratio = (float)tensor->clips_q15[k];
    float a = first_ratio / (16.0f * ratio);
    float step = 16.0f * ratio / first_ratio;
    float top = (float)((1 << tensor->descriptor.bits) - 1);
    memset(costs_out, 0, LANES * sizeof(costs_out[0]));
    for (uint32_t i = 0; i < tensor->group; i++) {
        const float *y = row->work->tile[i];
        for (uint32_t lane = 0; lane < LANES; lane++) {
            float at = kvf_fma_f32(y[lane], 16.0f * first->factor[lane], 0x1.8p23f) - 0x1.8p23f;
            float level = kvf_fma_f32(at, a, tried->zero[lane]) + 0x1.8p23f - 0x1.8p23f;
            level = level > 0.0f ? level : 0.0f;
            level = level < top ? level : top;
            float error = kvf_fma_f32(-(level - tried->zero[lane]), step, at);
            costs_out[lane] += (uint32_t)(kvf_fma_f32(error, error, 0x1.8p23f) - 0x1.8p23f);
        }
    }
}

/* (S) The cost of each vector with each ratio; first: of the first one. */
static void find_costs(const struct kvf_saw_tile_row *row, const float *min, const float *max,
                       const struct saw_lanes *first,
                       uint32_t costs_out[KVF_CODEC_CLIPS_MAX][LANES])
{
    uint32_t n_clips = row->tensor->n_clips;
    memset(costs_out, 0, n_clips * sizeof(costs_out[0]));
    for (uint32_t i = 0; i < row->tensor->group; i++) {
        const float *y = row->work->tile[i];
        for (uint32_t lane = 0; lane < LANES; lane++) {
            float distance = fabsf(y[lane] - 0.5f * (min[lane] + max[lane]));
            double steps = (double)distance * (double)(16.0f * first->factor[lane]) + 0x1p52;
            uint64_t bits;
            memcpy(&bits, &steps, sizeof(bits));
            uint32_t at = (uint32_t)bits;
            assert(at < KVF_SAW_COST_STEPS);
            for (uint32_t k = 0; k < n_clips; k++) {
                costs_out[k][lane] += row->work->costs[k][at];
            }
        }
    }
}

/* (S) */
static void search_scales(const struct kvf_saw_tile_row *row, const float *min, const float *max,
                          struct saw_lanes *lanes)
{
    const struct kvf_codec_tensor *tensor = row->tensor;
    uint32_t costs[KVF_CODEC_CLIPS_MAX][LANES];
    uint32_t best[LANES];
    struct saw_lanes found = *lanes;
    struct saw_lanes first = *lanes;
    choose_scales(tensor, min, max, tensor->clips_q15[0], &first);
    if (!kvf_saw_has_zeros(tensor)) {
        find_costs(row, min, max, &first, costs);
    }
    for (uint32_t lane = 0; lane < LANES; lane++) {
        best[lane] = UINT32_MAX;
        found.escaped[lane] = true;
        choose_scale(tensor, 0.0f, 0.0f, lane, &found);
    }
    for (uint32_t i = 0; i < tensor->n_clips; i++) {
        struct saw_lanes tried = *lanes;
        choose_scales(tensor, min, max, tensor->clips_q15[i], &tried);
        if (kvf_saw_has_zeros(tensor)) {
            find_zero_costs(row, &first, &tried, i, costs[i]);
        }
        for (uint32_t lane = 0; lane < LANES; lane++) {
            if (!tried.escaped[lane] && costs[i][lane] < best[lane]) {
                best[lane] = costs[i][lane];
                found.offset[lane] = tried.offset[lane];
                found.factor[lane] = tried.factor[lane];
                found.meta[lane] = tried.meta[lane];
                found.escaped[lane] = false;
            }
        }
    }
    *lanes = found;
}

static void measure_tile(const struct kvf_saw_tile_row *row, struct saw_lanes *lanes)
{
    const struct kvf_codec_tensor *tensor = row->tensor;
    float min[LANES];
    float max[LANES];
    memcpy(min, row->work->tile[0], sizeof(min));
    memcpy(max, row->work->tile[0], sizeof(max));
    for (uint32_t i = 1; i < tensor->group; i++) {
        const float *y = row->work->tile[i];
        for (uint32_t lane = 0; lane < LANES; lane++) {
            min[lane] = y[lane] < min[lane] ? y[lane] : min[lane];
            max[lane] = y[lane] > max[lane] ? y[lane] : max[lane];
        }
    }
    for (uint32_t lane = 0; kvf_saw_has_zeros(tensor) && lane < LANES; lane++) {
        min[lane] = min[lane] < 0.0f ? min[lane] : 0.0f;
        max[lane] = max[lane] > 0.0f ? max[lane] : 0.0f;
    }
    if (tensor->n_clips != 0) {
        search_scales(row, min, max, lanes);
    } else {
        choose_scales(tensor, min, max, tensor->descriptor.clip_q15, lanes);
    }
}

static void quantize_tile(const struct kvf_saw_tile_row *row, const struct saw_lanes *lanes)
{
    struct kvf_saw_tile_work *work = row->work;
    double top = (double)((1 << row->tensor->descriptor.bits) - 1);
    for (uint32_t i = 0; i < row->tensor->group; i++) {
        const float *y = work->tile[i];
        uint8_t *codes = work->codes[i];
        for (uint32_t lane = 0; lane < LANES; lane++) {
            double q = quantize(y[lane] - lanes->offset[lane], lanes->factor[lane], top);
            uint64_t bits;
            memcpy(&bits, &q, sizeof(bits));
            codes[lane] = (uint8_t)bits;
        }
    }
}

void kvf_saw_pack_plane(uint8_t (*codes)[LANES], const uint8_t *order, uint32_t n,
                        uint32_t plane_bits, uint32_t shift, uint8_t (*packed)[LANES])
{
    uint32_t a_byte = 8 / plane_bits;
    uint32_t mask = (1u << plane_bits) - 1;
    for (uint32_t first = 0; first < n; first += a_byte, packed++) {
        memset(*packed, 0, LANES);
        for (uint32_t i = 0; i < a_byte && first + i < n; i++) {
            const uint8_t *from = codes[order[first + i]];
            for (uint32_t lane = 0; lane < LANES; lane++) {
                uint32_t part = from[lane] >> shift & mask;
                (*packed)[lane] = (uint8_t)((*packed)[lane] | part << i * plane_bits);
            }
        }
    }
}

void kvf_saw_pack_codes(uint8_t (*codes)[LANES], const uint8_t *order, uint32_t n, uint32_t bits,
                        uint8_t (*packed)[LANES])
{
    uint32_t low_bits = kvf_saw_low_bits(bits);
    kvf_saw_pack_plane(codes, order, n, bits - low_bits, low_bits, packed);
    if (low_bits != 0) {
        packed += kvf_saw_plane_bytes(n, bits - low_bits);
        kvf_saw_pack_plane(codes, order, n, low_bits, 0, packed);
    }
}

void kvf_saw_write_packed(const struct kvf_saw_tile_row *row, uint32_t n_lanes, uint8_t *to)
{
    uint32_t code_bytes = row->tensor->code_bytes;
    for (uint32_t lane = 0; lane < n_lanes; lane++) {
        for (uint32_t byte = 0; byte < code_bytes; byte++) {
            to[byte] = row->work->packed[byte][lane];
        }
        to += code_bytes;
    }
}

/* Codes of n_lanes vectors to the strip, code_bytes each. */
static void pack_tile(const struct kvf_saw_tile_row *row, uint32_t n_lanes, uint8_t *to)
{
    const struct kvf_codec_tensor *tensor = row->tensor;
    kvf_saw_pack_codes(row->work->codes, tensor->order, tensor->group, tensor->descriptor.bits,
                       row->work->packed);
    kvf_saw_write_packed(row, n_lanes, to);
}

/* One row; meta and codes are those of the row. */
static int encode_tiles(const struct kvf_saw_tile_row *row, uint8_t *meta, uint8_t *codes,
                        struct kvf_codec_escapes *escapes)
{
    uint32_t n_tokens = row->job->n_tokens;
    for (uint32_t token = 0; token < n_tokens; token += LANES) {
        uint32_t n_lanes = n_tokens - token < LANES ? n_tokens - token : LANES;
        struct saw_lanes lanes;
        kvf_saw_load_tile(row, token, n_lanes, lanes.escaped);
        transform_tile(row);
        measure_tile(row, &lanes);
        quantize_tile(row, &lanes);
        pack_tile(row, n_lanes, codes + (size_t)token * row->tensor->code_bytes);
        memcpy(meta + (size_t)token * KVF_SAW_META_BYTES, lanes.meta, n_lanes * KVF_SAW_META_BYTES);
        for (uint32_t lane = 0; lane < n_lanes; lane++) {
            if (lanes.escaped[lane] && !kvf_saw_escape(&row->at, token + lane, escapes)) {
                return KVF_ERR_NO_SPACE;
            }
        }
    }
    return KVF_OK;
}

static int scalar_encode_row(const struct kvf_saw_row *at, uint8_t *mean, uint8_t *meta,
                             uint8_t *codes, struct kvf_codec_escapes *escapes)
{
    struct kvf_saw_tile_row row = kvf_saw_row_of(at, mean);
    if (mean != NULL) {
        kvf_saw_take_mean(&row, mean);
        rotate_mean(&row);
    }
    if (!kvf_saw_has_zeros(row.tensor)) {
        fill_costs(&row);
    }
    return encode_tiles(&row, meta, codes, escapes);
}

/* -------------------------------------------------------------------------------------------------
 * Decode
 */

/* One plane, times 2^shift, to the codes in coefficient order. */
static void add_plane(uint8_t (*packed)[LANES], const uint8_t *order, uint32_t n,
                      uint32_t plane_bits, uint32_t shift, int32_t (*sums)[LANES])
{
    uint32_t a_byte = 8 / plane_bits;
    int32_t mask = (1 << plane_bits) - 1;
    for (uint32_t position = 0; position < n; position++) {
        int32_t *to = sums[order[position]];
        const uint8_t *bytes = packed[position / a_byte];
        uint32_t at = position % a_byte * plane_bits;
        for (uint32_t lane = 0; lane < LANES; lane++) {
            to[lane] += (bytes[lane] >> at & mask) << shift;
        }
    }
}

void kvf_saw_read_packed(const struct kvf_saw_tile_row *row, uint32_t n_lanes, const uint8_t *from)
{
    uint32_t code_bytes = row->tensor->code_bytes;
    for (uint32_t lane = 0; lane < n_lanes; lane++) {
        for (uint32_t byte = 0; byte < code_bytes; byte++) {
            row->work->packed[byte][lane] = from[byte];
        }
        from += code_bytes;
    }
}

void kvf_saw_unpack_codes(uint8_t (*packed)[LANES], const uint8_t *order, uint32_t n, uint32_t bits,
                          int32_t (*sums)[LANES])
{
    uint32_t low_bits = kvf_saw_low_bits(bits);
    memset(sums, 0, n * sizeof(sums[0]));
    add_plane(packed, order, n, bits - low_bits, low_bits, sums);
    if (low_bits != 0) {
        add_plane(packed + kvf_saw_plane_bytes(n, bits - low_bits), order, n, low_bits, 0, sums);
    }
}

/* Codes of n_lanes vectors, as integers in coefficient order. */
static void unpack_tile(const struct kvf_saw_tile_row *row, uint32_t n_lanes, const uint8_t *from)
{
    const struct kvf_codec_tensor *tensor = row->tensor;
    kvf_saw_read_packed(row, n_lanes, from);
    kvf_saw_unpack_codes(row->work->packed, tensor->order, tensor->group, tensor->descriptor.bits,
                         row->work->sums);
}

/* The values of a tile, not yet rounded. Where nothing is added the product alone is the fused
 * result: it cannot underflow, and adding 0 turns -0 into +0 as the fused operation does. */
static void value_tile(const struct kvf_saw_tile_row *row, const struct saw_lanes *lanes)
{
    struct kvf_saw_tile_work *work = row->work;
    const struct kvf_codec_tensor *tensor = row->tensor;
    for (uint32_t i = 0; i < tensor->group; i++) {
        const int32_t *sums = work->sums[i];
        float *x = work->tile[i];
        float sign = work->signs[i];
        float mean = row->centred ? work->mean[i] : 0.0f;
        if (i % tensor->rot_order == 0) {
            for (uint32_t lane = 0; lane < LANES; lane++) {
                x[lane] = kvf_fma_f32(lanes->factor[lane] * sign, (float)sums[lane],
                                      mean + lanes->offset[lane] * sign);
            }
        } else if (row->centred) {
            for (uint32_t lane = 0; lane < LANES; lane++) {
                x[lane] = kvf_fma_f32(lanes->factor[lane] * sign, (float)sums[lane], mean);
            }
        } else {
            for (uint32_t lane = 0; lane < LANES; lane++) {
                x[lane] = lanes->factor[lane] * sign * (float)sums[lane] + 0.0f;
            }
        }
    }
}

void kvf_saw_store_tile(const struct kvf_saw_tile_row *row, uint32_t token_first, uint32_t n_lanes)
{
    const struct kvf_codec_tensor *tensor = row->tensor;
    struct kvf_saw_tile_work *work = row->work;
    for (uint32_t lane = 0; lane < n_lanes; lane++) {
        for (uint32_t i = 0; i < tensor->group; i++) {
            work->vector[i] = work->tile[i][lane];
        }
        kvf_convert_narrow(tensor->dtype, work->vector, tensor->group,
                           kvf_pages_vector(tensor, row->job, row->at.row, token_first + lane));
    }
}

/* The wanted tokens of one row; meta and codes are those of the first of them. */
static void decode_tiles(const struct kvf_saw_tile_row *row, const uint8_t *meta,
                         const uint8_t *codes)
{
    const struct kvf_codec_tensor *tensor = row->tensor;
    uint32_t n_tokens = row->job->n_wanted;
    for (uint32_t token = 0; token < n_tokens; token += LANES) {
        uint32_t n_lanes = n_tokens - token < LANES ? n_tokens - token : LANES;
        struct saw_lanes lanes = {.meta = {0}};
        for (uint32_t lane = 0; lane < n_lanes; lane++) {
            uint32_t word = kvf_load_u32(meta + (size_t)(token + lane) * KVF_SAW_META_BYTES);
            float scale = kvf_f32_from_f16((uint16_t)(word >> 16));
            float lo = kvf_f32_from_f16((uint16_t)word);
            if (kvf_saw_has_zeros(tensor)) {
                lo = -(scale * ((float)(word & 0xff) + kvf_saw_zero_shift(tensor)));
            }
            lanes.offset[lane] = lo * tensor->sqrt_order;
            lanes.factor[lane] = scale * tensor->rsqrt_order;
        }
        unpack_tile(row, n_lanes, codes + (size_t)token * tensor->code_bytes);
        kvf_rotate_inverse(row->work->sums, tensor->group, tensor->rot_order);
        value_tile(row, &lanes);
        kvf_saw_store_tile(row, token, n_lanes);
    }
}

static void scalar_decode_row(const struct kvf_saw_row *at, const uint8_t *mean,
                              const uint8_t *meta, const uint8_t *codes)
{
    struct kvf_saw_tile_row row = kvf_saw_row_of(at, mean);
    if (mean != NULL) {
        kvf_saw_load_mean(&row, mean);
    }
    memset(row.work->packed, 0, sizeof(row.work->packed)); /* lanes without a vector */
    decode_tiles(&row, meta, codes);
}

const struct kvf_saw_kernels kvf_saw_kernels_scalar = {
    .workspace_bytes = sizeof(struct kvf_saw_tile_work),
    .encode_row = scalar_encode_row,
    .decode_row = scalar_decode_row,
};
