/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_closed_loop_tile.cuh: layers of differences of bf16 groups of 128, rotated as a whole, with
 * zeros in place of lo, layers by themselves of 4 bits: X as it is stored. A warp has a tile of
 * eight tokens of a row, all layers of it one after the other; who has which element is in
 * codec_saw_device.cuh, numbers in comments are steps of codec_saw.h.
 *
 * A lane has 32 elements of one vector: so what is done once a vector costs an eighth, stages of
 * the rotation are additions of registers but for bits 3 and 4, and codes are turned back by
 * products on tensor cores. X of a layer by itself is bf16, whose first four stages are products,
 * too; those of differences are not, since fp32 numbers are rounded by each.
 *
 * What is carried from layer to layer is flipped, as what is coded is: the sign of an element is
 * that of all layers. Zeroes may have other signs than those of the C codec have: no sum is -0 in
 * either, and no code depends on it.
 */
#ifndef KVF_CODEC_CODEC_CLOSED_LOOP_TILE_CUH
#define KVF_CODEC_CODEC_CLOSED_LOOP_TILE_CUH

#include "codec/codec_closed_loop_decode.cuh"
#include "codec/codec_saw_encode_zeros.cuh"

namespace kvf
{

constexpr uint32_t loop_tile_warps = LOOP_TILE_THREADS / warp_lanes;
constexpr int loop_own_bits = LOOP_TILE_OWN_BITS;

/* A lane's elements: y[bits 6 5][bit 1][2 bit 2 + bit 0]. */
using tile_values = float[4][2][4];

struct loop_tile_shared {
    __align__(16) uint32_t signs[zeros_dim / 2];      /* masks of pairs of channels */
    __align__(16) uint32_t bf16_signs[zeros_dim / 2]; /* 1 or -1, twice */
    float2 costs[2][KVF_GPU_CLIPS_MAX];               /* of layers by themselves, of differences */
    uint8_t zeros[loop_tile_warps][LOOP_TILE_TOKENS];
};

/* The state of an encoder's lanes between its uses: its search wants the registers. */
struct loop_tile_kept {
    float values[32][LOOP_TILE_THREADS];

    __device__ __forceinline__ float &of(uint32_t i)
    {
        return values[i][threadIdx.x];
    }

    __device__ __forceinline__ void get(tile_values state)
    {
#pragma unroll
        for (uint32_t i = 0; i < 32; i++) {
            state[i / 8][i / 4 % 2][i % 4] = of(i);
        }
    }

    __device__ __forceinline__ void put(const tile_values state)
    {
#pragma unroll
        for (uint32_t i = 0; i < 32; i++) {
            of(i) = state[i / 8][i / 4 % 2][i % 4];
        }
    }
};

/* What a lane works on, of all layers. */
struct loop_tile_place {
    uint32_t block;
    uint32_t n_layers; /* of each block */
    uint32_t row;
    uint32_t tile; /* of eight tokens, the warp's */
    uint32_t t;    /* the lane's of its vector */
    uint32_t token;

    __device__ __forceinline__ explicit loop_tile_place(const struct kvf_gpu_work &work)
    {
        uint32_t n_tiles = ceil_div(work.tokens_max, loop_tile_warps * LOOP_TILE_TOKENS);
        uint32_t n_rows = work.tensors[0].n_rows;
        tile = blockIdx.x % n_tiles * loop_tile_warps + uniform_warp();
        row = blockIdx.x / n_tiles % n_rows;
        block = blockIdx.x / n_tiles / n_rows;
        n_layers = work.n_parts / work.n_blocks;
        t = lane_id() % vector_lanes;
        token = tile * LOOP_TILE_TOKENS + lane_id() / vector_lanes;
    }
};

static __device__ void loop_tile_fill(const struct kvf_gpu_work &work, uint32_t row,
                                      loop_tile_shared &shared)
{
    const struct kvf_gpu_tensor &tensor = work.tensors[0];
    for (uint32_t i = threadIdx.x; i < zeros_dim / 2; i += LOOP_TILE_THREADS) {
        uint32_t flipped = (is_flipped(tensor, row, 2 * i) ? 0x8000u : 0) |
                           (is_flipped(tensor, row, 2 * i + 1) ? 0x80000000u : 0);
        shared.signs[i] = flipped;
        shared.bf16_signs[i] = 0x3f803f80u | flipped;
    }
    for (uint32_t i = threadIdx.x; i < 2 * KVF_GPU_CLIPS_MAX; i += LOOP_TILE_THREADS) {
        const struct kvf_gpu_tensor &of = work.tensors[i / KVF_GPU_CLIPS_MAX];
        uint32_t k = i % KVF_GPU_CLIPS_MAX;
        if (k < of.n_clips) {
            shared.costs[i / KVF_GPU_CLIPS_MAX][k] = ratio_costs(of, k);
        }
    }
    __syncthreads();
}

/* The lane's elements of a word: those of bit 0 clear and set. */
static __device__ __forceinline__ void tile_widen(uint32_t word, float &clear, float &set)
{
    clear = __uint_as_float(word << 16);
    set = __uint_as_float(word & 0xffff0000);
}

/* -------------------------------------------------------------------------------------------------
 * The state
 */

/* Where the lane's first elements of a vector are in fp32[tokens][n_heads * dim]. */
static __device__ __forceinline__ float *tile_kept(const struct kvf_gpu_tensor &tensor,
                                                   const loop_tile_place &place, uint64_t sums,
                                                   uint32_t token)
{
    return at_address<float>(sums) + ((uint64_t)token * tensor.n_rows + place.row) * zeros_dim +
           8 * place.t;
}

/* Flipped on its way: signs are those of the lane's channels. */
static __device__ void tile_get(const float *kept, const uint32_t *signs, tile_values state)
{
#pragma unroll
    for (uint32_t e = 0; e < 32; e++) {
        uint32_t sign = signs[e / 8 * 16 + e % 8 / 2] << (e % 2 != 0 ? 0 : 16) & 0x80000000;
        float value = kept[e / 8 * 32 + e % 8];
        state[e / 8][e / 2 % 2][e / 4 % 2 * 2 + e % 2] = __uint_as_float(__float_as_uint(value) ^
                                                                         sign);
    }
}

static __device__ void tile_keep(float *kept, const uint32_t *signs, const tile_values state)
{
#pragma unroll
    for (uint32_t e = 0; e < 32; e++) {
        uint32_t sign = signs[e / 8 * 16 + e % 8 / 2] << (e % 2 != 0 ? 0 : 16) & 0x80000000;
        float value = state[e / 8][e / 2 % 2][e / 4 % 2 * 2 + e % 2];
        /* + 0: no sum is -0 */
        kept[e / 8 * 32 + e % 8] = __uint_as_float(__float_as_uint(value) ^ sign) + 0.0f;
    }
}

/* The state after a layer; z: its codes, turned back, in their unit. */
static __device__ __forceinline__ void tile_take(const struct kvf_gpu_tensor &tensor,
                                                 const generic_stored &stored, bool is_escape,
                                                 bool is_delta, uint32_t t, const tile_values z,
                                                 tile_values state)
{
    float factor = stored.scale * (tensor.rsqrt_order * (1.0f / code_unit));
    float offset = stored.lo * tensor.sqrt_order;
    factor = is_escape ? 0.0f : factor;
    offset = is_escape || t != 0 ? 0.0f : offset;
#pragma unroll
    for (uint32_t i = 0; i < 32; i++) {
        float &to = state[i / 8][i / 4 % 2][i % 4];
        float d = __fmaf_rn(factor, z[i / 8][i / 4 % 2][i % 4], i == 0 ? offset : 0.0f);
        to = (is_delta ? to : 0.0f) + d;
    }
}

/* -------------------------------------------------------------------------------------------------
 * Encode
 */

/* (4) One stage along a bit of the lane's number; sign: -1 where it is set. */
static __device__ __forceinline__ void tile_turn(tile_values y, uint32_t lane_bit, float sign)
{
#pragma unroll
    for (uint32_t i = 0; i < 32; i++) {
        float &value = y[i / 8][i / 4 % 2][i % 4];
        value = __fmaf_rn(sign, value, __shfl_xor_sync(all_lanes, value, lane_bit));
    }
}

/* (4) H y of numbers of fp32, stages in the order of rotate.h: bits 0, 1, 3, 4, 2, 5, 6. */
static __device__ __forceinline__ void tile_rotate(tile_values y, uint32_t t)
{
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            butterfly(y[i][k % 2][k / 2 * 2], y[i][k % 2][k / 2 * 2 + 1]);
        }
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            butterfly(y[i][0][k], y[i][1][k]);
        }
    }
    tile_turn(y, 1, (t & 1) != 0 ? -1.0f : 1.0f);
    tile_turn(y, 2, (t & 2) != 0 ? -1.0f : 1.0f);
    rotate_bit_2<zeros_dim>(y);
    rotate_high_bit<zeros_dim, 1>(y);
    rotate_high_bit<zeros_dim, 2>(y);
}

/* (1, 3, 4) What a difference is coded of; is it an escape? */
static __device__ __forceinline__ bool tile_prepare_delta(const uint32_t *signs, bool is_sink,
                                                          uint32_t t, const uint32_t x[4][4],
                                                          loop_tile_kept &kept, tile_values y)
{
    float peak = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        const uint4 sign = *reinterpret_cast<const uint4 *>(&signs[i * 16]);
        const uint32_t words[4] = {x[i][0] ^ sign.x, x[i][1] ^ sign.y, x[i][2] ^ sign.z,
                                   x[i][3] ^ sign.w};
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            float *to = &y[i][k % 2][k / 2 * 2];
            tile_widen(words[k], to[0], to[1]);
            to[0] -= kept.of(i * 8 + k % 2 * 4 + k / 2 * 2);
            to[1] -= kept.of(i * 8 + k % 2 * 4 + k / 2 * 2 + 1);
            peak = max_magnitude(peak, to[0]);
            peak = max_magnitude(peak, to[1]);
        }
    }
    peak = max_magnitude(peak, __shfl_xor_sync(all_lanes, peak, 1));
    peak = max_magnitude(peak, __shfl_xor_sync(all_lanes, peak, 2));
    bool is_escape = is_sink || __float_as_uint(peak) >= (uint32_t)KVF_SAW_ESCAPE_EXPONENT << 23;
    if (__any_sync(all_lanes, is_escape)) {
#pragma unroll
        for (uint32_t i = 0; i < 32; i++) {
            float &value = y[i / 8][i / 4 % 2][i % 4];
            value = is_escape ? 0.0f : value;
        }
    }
    tile_rotate(y, t);
    return is_escape;
}

/* A code, clamped. */
template <int bits>
static __device__ __forceinline__ uint32_t tile_code(const quantizer &by, float y)
{
    int32_t code = by.code(y);
    return (uint32_t)min(max(code, 0), (1 << bits) - 1);
}

/* H^T of codes, in the unit of decoders. */
template <int bits>
static __device__ __forceinline__ void tile_turn_back(const quantizer &by, const hadamard_pair &h16,
                                                      const tile_values y, tile_values z)
{
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t a[4];
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) { /* bit 2, then bit 1 of k */
            const float *of = &y[i][k / 2][k % 2 * 2];
            a[k] = tile_code<bits>(by, of[0]) | tile_code<bits>(by, of[1]) << 16;
        }
        mma_f16(z[i][0], a[0], a[1], a[2], a[3], h16.b[0], h16.b[1]);
        mma_f16(z[i][1], a[0], a[1], a[2], a[3], h16.b[2], h16.b[3]);
    }
    rotate_sums<zeros_dim>(z, 1.0f);
}

/* Both halves of a product's constant side, for inputs and for codes. */
struct loop_tile_h16 {
    hadamard_pair bf16;
    hadamard_pair f16;
};

/* X of the lane in a layer. */
static __device__ __forceinline__ void tile_load(uint64_t vector, uint32_t t, uint32_t x[4][4])
{
    load_lane((vector & 15) == 0, at_address<const uint8_t>(vector), t, x);
}

/* One layer of a warp's tile, bits: of its codes. */
template <int bits, bool is_delta>
static __device__ __forceinline__ void
tile_encode_layer(const struct kvf_gpu_work &work, const struct kvf_gpu_part &part,
                  const loop_tile_place &place, loop_tile_shared &shared, loop_tile_kept &kept,
                  const loop_tile_h16 &h16, uint64_t next, uint32_t x[4][4])
{
    constexpr uint32_t escape_meta = (uint32_t)KVF_SAW_ESCAPE_SCALE << 16;
    const struct kvf_gpu_tensor &tensor = work.tensors[is_delta];
    const saw_parts parts(tensor, part);
    bool is_there = place.token < part.n_tokens;
    bool is_sink = !is_there || place.token < part.n_sinks;
    const uint32_t *signs = shared.signs + 4 * place.t;
    tile_values y;
    generic_range range = {0.0f, 0.0f, (float)((1 << bits) - 1),
                           __fdiv_rn(1.0f, (float)((1 << bits) - 1)), false};
    if constexpr (is_delta) {
        range.is_escape = tile_prepare_delta(signs, is_sink, place.t, x, kept, y);
    } else {
        encode_target target = {};
        target.signs = signs;
        uint32_t threshold = keep_threshold(find_peak(find_lane_peak<zeros_dim>(x)), !is_sink);
        rotate_words<zeros_dim, encode_variant::normal>(target, h16.bf16, threshold, x, y);
        range.is_escape = threshold == escape_threshold;
    }
    find_range(y, &range);
    const saw_scale scale = tensor.n_clips != 0
                                ? search_zeros(tensor, shared.costs[is_delta], range, y)
                                : scale_of(tensor, range, tensor.clip_ratio).scale;
    if (next != 0) { /* on its way while this one's codes are stored and turned back */
        tile_load(next, place.t, x);
    }
    const quantizer by(scale);
    uint32_t vector = place.row * part.n_tokens + (is_there ? place.token : 0);
    store_codes<zeros_dim, bits>(parts.codes + vector * (uint32_t)(zeros_dim / 8 * bits), y, by,
                                 place.t, is_there);
    bool is_escape = scale.meta == escape_meta;
    uint8_t *zeros = shared.zeros[uniform_warp()];
    if (place.t == 0) {
        if (is_there) {
            parts.scales()[vector] = (uint16_t)(scale.meta >> 16);
        }
        zeros[lane_id() / vector_lanes] = (uint8_t)(scale.meta & 0xff);
    }
    count_escapes(work, part, is_escape && place.t == 0 && is_there);
    tile_values z;
    tile_turn_back<bits>(by, h16.f16, y, z);
    tile_values state;
    kept.get(state);
    tile_take(tensor, loop_stored(tensor, scale.meta >> 16, scale.meta & 0xff), is_escape, is_delta,
              place.t, z, state);
    kept.put(state);
    __syncwarp();
    loop_zeros_of(work, part, zeros, place.row, place.tile);
    __syncwarp();
}

template <int bits> static __device__ void loop_encode_tile(const struct kvf_gpu_work &work)
{
    __shared__ loop_tile_shared shared;
    __shared__ loop_tile_kept kept;
    const loop_tile_place place(work);
    struct kvf_gpu_part part = part_of(work, place.block * place.n_layers);
    loop_tile_fill(work, place.row, shared);
    bool has_gaps = place.row == 0 && place.tile < loop_tile_warps;
    if (place.tile * LOOP_TILE_TOKENS >= part.n_tokens && !has_gaps) {
        return;
    }
    uint32_t token = place.token < part.n_tokens ? place.token : part.n_tokens - 1u;
    uint64_t offset = loop_offset(work, part, place.row, token);
    uint64_t sums = part.sums;
    const loop_tile_h16 h16 = {hadamard_pair(0x3f80, place.n_layers >> 16),
                               hadamard_pair(0x3c00, place.n_layers >> 16)};
    tile_values state = {};
    uint32_t x[4][4];
    if (sums != 0 && (part.loop & KVF_GPU_LOOP_DELTA) != 0) {
        tile_get(tile_kept(work.tensors[0], place, sums, token), shared.signs + 4 * place.t, state);
    }
    kept.put(state);
    tile_load(part.base + offset, place.t, x);
#pragma unroll 1
    for (uint32_t layer = 0; layer < place.n_layers; layer++) {
        const struct kvf_gpu_part now = part;
        uint64_t next = 0;
        if (layer + 1 < place.n_layers) {
            part = part_of(work, place.block * place.n_layers + layer + 1);
            next = part.base + offset;
        }
        bool is_delta = (now.loop & KVF_GPU_LOOP_DELTA) != 0;
        if (place.tile * LOOP_TILE_TOKENS >= now.n_tokens) {
            /* here for the gaps */
        } else if (is_delta) {
            tile_encode_layer<bits, true>(work, now, place, shared, kept, h16, next, x);
        } else {
            tile_encode_layer<loop_own_bits, false>(work, now, place, shared, kept, h16, next, x);
        }
        if (has_gaps) {
            const struct kvf_gpu_tensor &tensor = work.tensors[is_delta];
            zero_gaps(tensor, saw_parts(tensor, now), threadIdx.x, LOOP_TILE_THREADS);
        }
    }
    if (sums != 0 && place.token < part.n_tokens) {
        kept.get(state);
        tile_keep(tile_kept(work.tensors[0], place, sums, token), shared.signs + 4 * place.t,
                  state);
    }
}

/* -------------------------------------------------------------------------------------------------
 * Decode
 */

/* Of a vector of a layer, what the lane reads of its strip, as it is stored: whoever waits for it
 * waits where it is used, a layer later. */
struct tile_stored {
    uint32_t words[4]; /* of the planes */
    uint32_t scale;
    uint32_t zero;
    uint32_t low_zero;
};

template <int bits>
static __device__ __forceinline__ tile_stored tile_read(const loop_strip &strip, uint64_t stored,
                                                        uint32_t t)
{
    constexpr uint32_t low_bits = saw_low_bits(bits);
    const uint8_t *from = at_address<const uint8_t>(stored);
    const uint8_t *codes = from + strip.codes;
    tile_stored read = {};
    load_codes<bits == 4 ? 4 : 2>(codes + t * (4 * (bits - low_bits)), read.words);
    if constexpr (low_bits != 0) {
        read.words[2] = reinterpret_cast<const uint32_t *>(codes + zeros_dim / 4)[t];
        read.low_zero = from[strip.low_zero.byte];
    }
    read.scale = *reinterpret_cast<const uint16_t *>(from + strip.scale);
    read.zero = from[strip.zero.byte];
    return read;
}

template <int bits>
static __device__ __forceinline__ lane_codes<zeros_dim, bits> tile_codes(const tile_stored &read)
{
    lane_codes<zeros_dim, bits> codes;
#pragma unroll
    for (uint32_t w = 0; w < codes.n_words; w++) {
        codes.words[w] = bits == 4 ? read.words[w]
                                   : nibbles_of<2>(read.words[w / 2] >> w % 2 * 16 & 0xffff);
        if constexpr (codes.low_bits != 0) {
            codes.low[w] = nibbles_of<1>(read.words[2] >> w * 8 & 0xff);
        }
    }
    return codes;
}

/* The state after a layer. */
template <int bits, bool is_delta>
static __device__ __forceinline__ void
tile_decode_layer(const struct kvf_gpu_tensor &tensor, const loop_strip &strip,
                  const tile_stored &read, const hadamard_pair &h16, uint32_t t, tile_values state)
{
    uint32_t zero = strip.zero.of(read.zero) << saw_low_bits(bits);
    if constexpr (saw_low_bits(bits) != 0) {
        zero |= strip.low_zero.of(read.low_zero);
    }
    tile_values z;
    rotate_codes<zeros_dim, bits>(tile_codes<bits>(read), h16, z);
    tile_take(tensor, loop_stored(tensor, read.scale, zero), (read.scale & 0x7fff) > 0x7c00,
              is_delta, t, z, state);
}

static __device__ __forceinline__ void tile_store(const tile_values state, const uint32_t *signs,
                                                  uint64_t vector, uint32_t t)
{
    uint32_t words[4][4];
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        const uint4 sign = *reinterpret_cast<const uint4 *>(&signs[i * 16]);
        words[i][0] = fma_bf16x2(pack_bf16(state[i][0][0], state[i][0][1]), sign.x, 0);
        words[i][1] = fma_bf16x2(pack_bf16(state[i][1][0], state[i][1][1]), sign.y, 0);
        words[i][2] = fma_bf16x2(pack_bf16(state[i][0][2], state[i][0][3]), sign.z, 0);
        words[i][3] = fma_bf16x2(pack_bf16(state[i][1][2], state[i][1][3]), sign.w, 0);
    }
    store_pieces<zeros_dim>(at_address<uint8_t>(vector + 16 * t), words, (vector & 15) == 0);
}

/* A strip that is stored raw: the vector as it is, and the state after it. */
static __device__ void tile_take_raw(uint64_t from, uint64_t vector, const uint32_t *signs,
                                     uint32_t t, bool is_there, tile_values state)
{
    uint32_t x[4][4];
    tile_load(from, t, x);
#pragma unroll
    for (uint32_t i = 0; i < 16; i++) {
        float *to = &state[i / 4][i % 2][i % 4 / 2 * 2];
        tile_widen(x[i / 4][i % 4] ^ signs[i / 4 * 16 + i % 4], to[0], to[1]);
        for (uint32_t h = 0; h < 2; h++) {
            bool counts = (__float_as_uint(to[h]) & 0x7fffffff) < loop_limit_bits;
            to[h] = 0.0f + (counts ? to[h] : 0.0f);
        }
    }
    if (is_there) {
        store_pieces<zeros_dim>(at_address<uint8_t>(vector + 16 * t), x, (vector & 15) == 0);
    }
}

struct loop_tile_decode_shared {
    loop_tile_shared common;
    loop_strip strips[loop_tile_warps * LOOP_TILE_TOKENS][2]; /* by themselves, differences */
    uint64_t stored[KVF_BLOCK_LAYERS];
    uint64_t base[KVF_BLOCK_LAYERS];
    uint8_t loop[KVF_BLOCK_LAYERS];
};

/* What comes of a layer before it is needed. */
template <int bits>
static __device__ __forceinline__ tile_stored tile_ask(const loop_tile_decode_shared &shared,
                                                       const loop_strip *strips, uint32_t layer,
                                                       uint32_t t)
{
    uint32_t loop = shared.loop[layer];
    if ((loop & KVF_GPU_LOOP_RAW) != 0) {
        return {};
    }
    return (loop & KVF_GPU_LOOP_DELTA) != 0
               ? tile_read<bits>(strips[1], shared.stored[layer], t)
               : tile_read<loop_own_bits>(strips[0], shared.stored[layer], t);
}

template <int bits>
static __device__ __forceinline__ void
loop_decode_tile_layers(const struct kvf_gpu_work &work, const loop_tile_decode_shared &shared,
                        const loop_tile_place &place, const loop_vector_place &at, bool is_there,
                        tile_values state)
{
    const hadamard_pair h16(0x3c00, place.n_layers >> 16);
    const uint32_t *signs = shared.common.bf16_signs + 4 * place.t;
    tile_stored next = tile_ask<bits>(shared, at.strips, 0, place.t);
#pragma unroll 1
    for (uint32_t layer = 0; layer < place.n_layers; layer++) {
        const tile_stored read = next;
        uint32_t loop = shared.loop[layer];
        uint64_t vector = shared.base[layer] + at.offset;
        if (layer + 1 < place.n_layers) {
            next = tile_ask<bits>(shared, at.strips, layer + 1, place.t);
        }
        if ((loop & KVF_GPU_LOOP_RAW) != 0) {
            tile_take_raw(shared.stored[layer] + loop_raw_offset(work.tensors[0], at), vector,
                          shared.common.signs + 4 * place.t, place.t, is_there, state);
            continue;
        }
        if ((loop & KVF_GPU_LOOP_DELTA) != 0) {
            tile_decode_layer<bits, true>(work.tensors[1], at.strips[1], read, h16, place.t, state);
        } else {
            tile_decode_layer<loop_own_bits, false>(work.tensors[0], at.strips[0], read, h16,
                                                    place.t, state);
        }
        if (is_there) {
            tile_store(state, signs, vector, place.t);
        }
    }
}

template <int bits> static __device__ void loop_decode_tile(const struct kvf_gpu_work &work)
{
    __shared__ loop_tile_decode_shared shared;
    const loop_tile_place place(work);
    const struct kvf_gpu_part *parts = parts_of(work) + place.block * place.n_layers;
    const struct kvf_gpu_part first = parts[0];
    for (uint32_t i = threadIdx.x; i < place.n_layers; i += LOOP_TILE_THREADS) {
        shared.stored[i] = parts[i].stored;
        shared.base[i] = parts[i].base;
        shared.loop[i] = parts[i].loop;
    }
    loop_tile_fill(work, place.row, shared.common);
    if (place.tile * LOOP_TILE_TOKENS >= first.n_wanted) {
        return;
    }
    bool is_there = place.token < first.n_wanted;
    uint32_t token = is_there ? place.token : first.n_wanted - 1u;
    uint32_t stored_token = first.token_first + token;
    loop_strip *strips =
        shared.strips[uniform_warp() * LOOP_TILE_TOKENS + lane_id() / vector_lanes];
    if (place.t < 2) {
        strips[place.t] = loop_strip(work.tensors[place.t], place.row, stored_token,
                                     first.n_tokens);
    }
    __syncwarp();
    const loop_vector_place at = {place.row, stored_token, first.n_tokens,
                                  loop_offset(work, first, place.row, token), strips};
    const uint32_t *signs = shared.common.signs + 4 * place.t;
    tile_values state = {};
    if ((shared.loop[0] & KVF_GPU_LOOP_DELTA) != 0) {
        tile_get(tile_kept(work.tensors[0], place, work.scratch, token), signs, state);
    }
    loop_decode_tile_layers<bits>(work, shared, place, at, is_there, state);
    if (work.scratch != 0 && is_there && first.layer + place.n_layers < work.n_layers) {
        tile_keep(tile_kept(work.tensors[0], place, work.scratch, token), signs, state);
    }
}

} /* namespace kvf */

#endif /* KVF_CODEC_CODEC_CLOSED_LOOP_TILE_CUH */
