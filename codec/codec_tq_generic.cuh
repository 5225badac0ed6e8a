/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_tq_generic.cuh: encode and decode of rows of any dtype, dim, width and rotation, split or
 * with a residual, at any alignment of the element. As in codec_saw_generic.cuh a thread block has
 * a row, and a warp one vector at a time, in shared memory. Numbers in comments are steps of
 * codec_tq.h.
 */
#ifndef KVF_CODEC_CODEC_TQ_GENERIC_CUH
#define KVF_CODEC_CODEC_TQ_GENERIC_CUH

#include "codec/codec_saw_generic.cuh"
#include "codec/codec_tq_device.cuh"

namespace kvf
{

constexpr uint32_t matrix_words = KVF_CODEC_GROUP_MAX / 32; /* of a row of B */

struct tq_shared {
    generic_shared saw;
    float x[generic_warps][group_max]; /* of channels */
    uint8_t channels[group_max];       /* rotation after rotation */
    float energy[group_max];
    uint32_t matrix[group_max][matrix_words]; /* B */
};

struct tq_row {
    generic_row saw;
    tq_parts parts;
    tq_shared *shared;

    __device__ __forceinline__ const struct kvf_gpu_tensor &tensor() const
    {
        return saw.tensor;
    }

    __device__ __forceinline__ uint32_t first_of(uint32_t r) const
    {
        return r == 0 ? 0 : saw.tensor.rotations[0].n;
    }

    __device__ __forceinline__ bool is_split() const
    {
        return parts.lists != nullptr;
    }

    __device__ __forceinline__ bool has_residual() const
    {
        return (saw.tensor.flags & KVF_TENSOR_RESIDUAL) != 0;
    }
};

/* -------------------------------------------------------------------------------------------------
 * Channels and B, by all threads
 */

/* From the row's list. One that is wrong gives channels that are some, perhaps twice. */
static __device__ void read_channels(const tq_row &at)
{
    uint32_t n = at.tensor().group;
    uint32_t n_first = at.tensor().rotations[0].n;
    const uint8_t *list = at.is_split() ? at.parts.lists + at.saw.row * tq_list_bytes(at.tensor())
                                        : nullptr;
    for (uint32_t i = threadIdx.x; i < n; i += SAW_GENERIC_THREADS) {
        at.shared->channels[i] = (uint8_t)i;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; at.is_split() && i < n; i += SAW_GENERIC_THREADS) {
        uint32_t listed = 0; /* before i */
        for (uint32_t j = 0; j < i; j++) {
            listed += list[j / 8] >> j % 8 & 1;
        }
        bool is_listed = (list[i / 8] >> i % 8 & 1) != 0;
        uint32_t to = is_listed ? listed : n_first + i - listed;
        if (to < n && is_listed == (to < n_first)) {
            at.shared->channels[to] = (uint8_t)i;
        }
    }
    __syncthreads();
}

/* The profile's to the row's list. */
static __device__ void copy_channels(const tq_row &at)
{
    uint32_t first = at.saw.row * tq_list_bytes(at.tensor());
    const uint8_t *given = at_address<const uint8_t>(at.saw.part.split) + first;
    for (uint32_t i = threadIdx.x; i < tq_list_bytes(at.tensor()); i += SAW_GENERIC_THREADS) {
        at.parts.lists[first + i] = given[i];
    }
    __syncthreads();
}

/* Those with the largest magnitudes to the row's list. */
static __device__ void write_channels(const tq_row &at)
{
    float *energy = at.shared->energy;
    uint32_t n = at.tensor().group;
    uint32_t n_first = at.tensor().rotations[0].n;
    const uint16_t *mean = reinterpret_cast<const uint16_t *>(at.saw.parts.mean) + at.saw.row * n;
    for (uint32_t i = threadIdx.x; i < n; i += SAW_GENERIC_THREADS) {
        float offset = at.saw.parts.mean != nullptr ? f32_of_half_bits(mean[i]) : 0.0f;
        uint32_t count;
        energy[i] = sum_samples(at.saw, i, &count, [&](float x) { return fabsf(x - offset); });
    }
    __syncthreads();
    uint8_t *list = at.parts.lists + at.saw.row * tq_list_bytes(at.tensor());
    for (uint32_t byte = threadIdx.x; byte < tq_list_bytes(at.tensor());
         byte += SAW_GENERIC_THREADS) {
        uint32_t bits = 0;
        for (uint32_t i = 8 * byte; i < min(8 * byte + 8, n); i++) {
            uint32_t larger = 0;
            for (uint32_t j = 0; j < n; j++) {
                larger += energy[j] > energy[i] || (energy[j] == energy[i] && j < i);
            }
            bits |= (uint32_t)(larger < n_first) << i % 8;
        }
        list[byte] = (uint8_t)bits;
    }
    __syncthreads();
}

static __device__ void fill_matrix(const tq_row &at)
{
    for (uint32_t w = threadIdx.x; w < at.tensor().group * (matrix_words / 2);
         w += SAW_GENERIC_THREADS) {
        uint64_t z = at.tensor().rot_seed + (w + 1) * 0x9e3779b97f4a7c15ull;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        z ^= z >> 31;
        uint32_t *row = at.shared->matrix[w / (matrix_words / 2)] + w % (matrix_words / 2) * 2;
        row[0] = (uint32_t)z;
        row[1] = (uint32_t)(z >> 32);
    }
    __syncthreads();
}

static __device__ __forceinline__ bool is_minus(const tq_row &at, uint32_t j, uint32_t i)
{
    return (at.shared->matrix[j][i / 32] >> i % 32 & 1) != 0;
}

/* -------------------------------------------------------------------------------------------------
 * Encode
 */

/* (4) The mean through each rotation. */
static __device__ void rotate_means(const tq_row &at)
{
    uint32_t n = at.tensor().group;
    const uint16_t *mean = reinterpret_cast<const uint16_t *>(at.saw.parts.mean) + at.saw.row * n;
    vector_pair<float> &work = at.shared->saw.floats[0];
    for (uint32_t r = 0; warp_id() == 0 && r < at.tensor().n_rotations; r++) {
        const struct kvf_gpu_rotation &rotation = at.tensor().rotations[r];
        for (uint32_t i = lane_id(); i < rotation.n; i += warp_lanes) {
            uint32_t channel = at.shared->channels[at.first_of(r) + i];
            float value = f32_of_half_bits(mean[channel]);
            work.now[i] = is_flipped(at.tensor(), at.saw.row, channel) ? -value : value;
        }
        __syncwarp();
        rotate(work, rotation.n, rotation.order, false);
        for (uint32_t i = lane_id(); i < rotation.n; i += warp_lanes) {
            at.shared->saw.mean[at.first_of(r) + i] = work.now[i];
        }
        __syncwarp();
    }
    __syncthreads();
}

/* (5) By a warp, over n stored positions: f(coefficient, sum) adds one to a partial sum. */
template <typename F> static __device__ float sum_positions(const uint8_t *order, uint32_t n, F f)
{
    uint32_t run = ceil_div(n, KVF_TQ_PARTIAL_SUMS);
    uint32_t first = lane_id() % KVF_TQ_PARTIAL_SUMS * run;
    float sum = 0.0f;
    for (uint32_t position = first; position < min(first + run, n); position++) {
        sum = f(order[position], sum);
    }
    for (uint32_t mask = KVF_TQ_PARTIAL_SUMS / 2; mask > 0; mask /= 2) {
        sum += __shfl_xor_sync(all_lanes, sum, mask);
    }
    return sum;
}

/* (8) The residual to `now`; t. Its sign plane is code after code. */
static __device__ uint32_t project_residual(const tq_row &at, uint32_t scale)
{
    const struct kvf_gpu_rotation &rotation = at.tensor().rotations[0];
    float *now = at.shared->saw.floats[warp_id()].now;
    uint8_t *codes = at.shared->saw.codes[warp_id()];
    const uint8_t *order = at.tensor().order;
    float a = f32_of_half_bits(scale) * rotation.residual;
    for (uint32_t i = lane_id(); i < rotation.n; i += warp_lanes) {
        now[i] = __fmaf_rn(-a, (float)tq_level(rotation.bits, codes[i]), now[i]);
    }
    __syncwarp();
    float square = sum_positions(
        order, rotation.n, [&](uint32_t i, float sum) { return __fmaf_rn(now[i], now[i], sum); });
    for (uint32_t j = 0; j < rotation.n; j++) {
        float sum = sum_positions(order, rotation.n, [&](uint32_t i, float partial) {
            return is_minus(at, j, i) ? partial - now[i] : partial + now[i];
        });
        if (lane_id() == 0) {
            codes[j] = sum < 0.0f;
        }
    }
    __syncwarp();
    return tq_scale_bits(__fsqrt_rn(square) * rotation.root_mean_square);
}

/* A byte of eight codes of one bit, in ascending order. */
static __device__ void pack_signs(const uint8_t *codes, uint32_t n, uint8_t *to)
{
    for (uint32_t byte = lane_id(); 8 * byte < n; byte += warp_lanes) {
        uint32_t packed = 0;
        for (uint32_t i = 8 * byte; i < min(8 * byte + 8, n); i++) {
            packed |= (uint32_t)codes[i] << i % 8;
        }
        to[byte] = (uint8_t)packed;
    }
}

/* (4 to 7) One rotation of the warp's vector. Returns the scale; false in *fits_out: the vector is
 * an escape. */
static __device__ uint32_t encode_rotation(const tq_row &at, uint32_t r, uint8_t *to,
                                           bool *fits_out)
{
    const struct kvf_gpu_rotation &rotation = at.tensor().rotations[r];
    const uint8_t *order = at.tensor().order + at.first_of(r);
    const uint8_t *channels = at.shared->channels + at.first_of(r);
    vector_pair<float> &work = at.shared->saw.floats[warp_id()];
    uint8_t *codes = at.shared->saw.codes[warp_id()];
    float *y = work.now;
    for (uint32_t i = lane_id(); i < rotation.n; i += warp_lanes) {
        y[i] = at.shared->x[warp_id()][channels[i]];
    }
    __syncwarp();
    rotate(work, rotation.n, rotation.order, false);
    for (uint32_t i = lane_id(); at.saw.parts.mean != nullptr && i < rotation.n; i += warp_lanes) {
        y[i] -= at.shared->saw.mean[at.first_of(r) + i];
    }
    __syncwarp();
    float square = sum_positions(order, rotation.n,
                                 [&](uint32_t i, float sum) { return __fmaf_rn(y[i], y[i], sum); });
    float root = tq_root(square);
    float f = tq_quantizer(rotation, root);
    for (uint32_t i = lane_id(); i < rotation.n; i += warp_lanes) {
        codes[i] = (uint8_t)tq_code(rotation.bits, tq_step(y[i], f, 0.5f));
    }
    __syncwarp();
    float product = sum_positions(order, rotation.n, [&](uint32_t i, float sum) {
        return __fmaf_rn(y[i], (float)tq_level(rotation.bits, codes[i]), sum);
    });
    float power = sum_positions(order, rotation.n, [&](uint32_t i, float sum) {
        float level = (float)tq_level(rotation.bits, codes[i]);
        return __fmaf_rn(level, level, sum);
    });
    pack_codes(codes, order, rotation.n, rotation.bits, to);
    __syncwarp();
    *fits_out = tq_fits(rotation, root);
    return tq_choose_scale(at.tensor(), rotation, square, product, power);
}

/* (4 to 8) By a warp. */
static __device__ void encode_vector(const struct kvf_gpu_work &work, const tq_row &at,
                                     uint32_t token)
{
    uint32_t vector = at.saw.row * at.saw.part.n_tokens + token;
    uint8_t *codes = at.parts.saw.codes + vector * (uint32_t)at.tensor().code_bytes;
    uint16_t *meta = reinterpret_cast<uint16_t *>(at.parts.meta + vector * at.parts.meta_bytes);
    bool escape = load_flipped(at.saw, token, at.shared->x[warp_id()]);
    uint32_t scales[2] = {0, 0};
    uint8_t *to = codes;
    for (uint32_t r = 0; r < at.tensor().n_rotations; r++) {
        bool fits;
        scales[r] = encode_rotation(at, r, to, &fits);
        escape = escape || !fits;
        to += at.tensor().rotations[r].code_bytes;
    }
    if (at.has_residual() && !escape) {
        scales[1] = project_residual(at, scales[0]);
        pack_signs(at.shared->saw.codes[warp_id()], at.tensor().group, to);
    }
    __syncwarp();
    if (escape) {
        zero_bytes(codes, at.tensor().code_bytes, lane_id(), warp_lanes);
        scales[0] = KVF_SAW_ESCAPE_SCALE;
        scales[1] = 0;
    }
    if (lane_id() < at.tensor().n_scales) {
        meta[lane_id()] = (uint16_t)scales[lane_id()];
    }
    __syncwarp();
    count_escapes(work, at.saw.part, escape && lane_id() == 0);
}

/* The row of a thread block, if there is one: rows, then parts. */
static __device__ __forceinline__ bool tq_has_row(const struct kvf_gpu_work &work, uint32_t tensors,
                                                  const struct kvf_gpu_part &part, uint32_t row)
{
    return (tensors >> part.is_v & 1) != 0 && row < work.tensors[part.is_v].n_rows;
}

static __device__ __forceinline__ tq_row tq_row_of(const struct kvf_gpu_work &work,
                                                   const struct kvf_gpu_part &part, uint32_t row,
                                                   tq_shared *shared)
{
    const struct kvf_gpu_tensor &tensor = work.tensors[part.is_v];
    const tq_parts parts(tensor, part);
    return {{tensor, part, parts.saw, row_pages(work, part, tensor, row), row, &shared->saw},
            parts,
            shared};
}

/* By all threads: gaps, mean and list of the row, and what encoders of vectors need of these. */
static __device__ void tq_prepare_row(const tq_row &at)
{
    bool is_given = at.saw.part.split != 0;
    if (at.saw.row == 0) {
        tq_zero_gaps(at.tensor(), at.parts, at.saw.part.stored, threadIdx.x, blockDim.x);
    }
    if (at.saw.parts.mean_bytes != 0 || (at.is_split() && !is_given)) {
        find_samples(at.saw);
    }
    if (at.saw.parts.mean_bytes != 0) {
        make_mean(at.saw);
    }
    if (at.is_split() && is_given) {
        copy_channels(at);
    } else if (at.is_split()) {
        write_channels(at);
    }
    read_channels(at);
    if (at.saw.parts.mean != nullptr) {
        rotate_means(at);
    }
    if (at.has_residual()) {
        fill_matrix(at);
    }
}

static __device__ void tq_encode_row_generic(const struct kvf_gpu_work &work, uint32_t tensors)
{
    __shared__ tq_shared shared;
    uint32_t n_rows = saw_rows_max(&work, tensors);
    uint32_t row = blockIdx.x % n_rows;
    const struct kvf_gpu_part part = part_of(work, blockIdx.x / n_rows);
    if (!tq_has_row(work, tensors, part, row)) {
        return;
    }
    const tq_row at = tq_row_of(work, part, row, &shared);
    tq_prepare_row(at);
    for (uint32_t token = warp_id(); token < part.n_tokens; token += generic_warps) {
        encode_vector(work, at, token);
    }
}

/* -------------------------------------------------------------------------------------------------
 * Decode
 */

/* x = fma(g (scale factor), z, x) over the channels of a rotation, whose sums are z. */
static __device__ void add_values(const tq_row &at, uint32_t r, uint32_t scale, float factor)
{
    const uint8_t *channels = at.shared->channels + at.first_of(r);
    const int32_t *z = at.shared->saw.integers[warp_id()].now;
    float *x = at.shared->x[warp_id()];
    float value = f32_of_half_bits(scale) * factor;
    for (uint32_t i = lane_id(); i < at.tensor().rotations[r].n; i += warp_lanes) {
        uint32_t channel = channels[i];
        bool flipped = is_flipped(at.tensor(), at.saw.row, channel);
        x[channel] = __fmaf_rn(flipped ? -value : value, (float)z[i], x[channel]);
    }
    __syncwarp();
}

/* v: the signs times B. */
static __device__ void project_back(const tq_row &at, const uint8_t *signs)
{
    uint32_t n = at.tensor().group;
    int32_t *now = at.shared->saw.integers[warp_id()].now;
    for (uint32_t i = lane_id(); i < n; i += warp_lanes) {
        int32_t sum = 0;
        for (uint32_t j = 0; j < n; j++) {
            bool minus = is_minus(at, j, i) != ((signs[j / 8] >> j % 8 & 1) != 0);
            sum += minus ? -1 : 1;
        }
        now[i] = sum;
    }
    __syncwarp();
}

/* By a warp: the vector of a wanted token. */
static __device__ void decode_vector(const tq_row &at, uint32_t token)
{
    uint32_t n = at.tensor().group;
    uint32_t vector = at.saw.row * at.saw.part.n_tokens + at.saw.part.token_first + token;
    const uint8_t *codes = at.parts.saw.codes + vector * (uint32_t)at.tensor().code_bytes;
    const uint16_t *meta = reinterpret_cast<const uint16_t *>(at.parts.meta +
                                                              vector * at.parts.meta_bytes);
    vector_pair<int32_t> &work = at.shared->saw.integers[warp_id()];
    float *x = at.shared->x[warp_id()];
    for (uint32_t i = lane_id(); i < n; i += warp_lanes) {
        x[i] = at.shared->saw.mean[i];
    }
    __syncwarp();
    for (uint32_t r = 0; r < at.tensor().n_rotations; r++) {
        const struct kvf_gpu_rotation &rotation = at.tensor().rotations[r];
        unpack_codes(codes, at.tensor().order + at.first_of(r), rotation.n, rotation.bits,
                     work.now);
        for (uint32_t i = lane_id(); i < rotation.n; i += warp_lanes) {
            work.now[i] = tq_level(rotation.bits, (uint32_t)work.now[i]);
        }
        __syncwarp();
        rotate(work, rotation.n, rotation.order, true);
        add_values(at, r, meta[r], rotation.factor);
        codes += rotation.code_bytes;
    }
    if (at.has_residual()) {
        const struct kvf_gpu_rotation &rotation = at.tensor().rotations[0];
        project_back(at, codes);
        rotate(work, rotation.n, rotation.order, true);
        add_values(at, 0, meta[1], rotation.residual_factor);
    }
    uint8_t *to = at.saw.pages.vector(token);
    for (uint32_t i = lane_id(); i < n; i += warp_lanes) {
        store_element(at.tensor().dtype, to, i, x[i]);
    }
    __syncwarp();
}

static __device__ void tq_decode_row_generic(const struct kvf_gpu_work &work, uint32_t tensors)
{
    __shared__ tq_shared shared;
    uint32_t n_rows = saw_rows_max(&work, tensors);
    uint32_t row = blockIdx.x % n_rows;
    const struct kvf_gpu_part part = parts_of(work)[blockIdx.x / n_rows];
    if (!tq_has_row(work, tensors, part, row)) {
        return;
    }
    const tq_row at = tq_row_of(work, part, row, &shared);
    uint32_t n = at.tensor().group;
    const uint16_t *mean = reinterpret_cast<const uint16_t *>(at.saw.parts.mean) + row * n;
    for (uint32_t i = threadIdx.x; i < n; i += SAW_GENERIC_THREADS) {
        shared.saw.mean[i] = at.saw.parts.mean != nullptr ? f32_of_half_bits(mean[i]) : 0.0f;
    }
    read_channels(at);
    if (at.has_residual()) {
        fill_matrix(at);
    }
    for (uint32_t token = warp_id(); token < part.n_wanted; token += generic_warps) {
        decode_vector(at, token);
    }
}

} /* namespace kvf */

#endif /* KVF_CODEC_CODEC_TQ_GENERIC_CUH */
