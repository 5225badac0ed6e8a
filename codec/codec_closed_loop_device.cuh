/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_closed_loop_device.cuh: a vector of a layer in a warp: its elements in registers, its way
 * from and to codes. Numbers in comments are steps of codec_saw.h.
 *
 * A lane has loop_lanes<fast>::n elements. Fast, in groups of 128: elements 4 lane .. 4 lane + 3,
 * and rotations are additions of registers and of those of other lanes. Else: every 32nd element
 * from that of its number on, and rotations take place in shared memory.
 */
#ifndef KVF_CODEC_CODEC_CLOSED_LOOP_DEVICE_CUH
#define KVF_CODEC_CODEC_CLOSED_LOOP_DEVICE_CUH

#include "codec/codec_closed_loop_shape.h"
#include "codec/codec_saw_decode.cuh"
#include "codec/codec_saw_generic.cuh"

namespace kvf
{

constexpr uint32_t loop_warps = LOOP_THREADS / warp_lanes;
constexpr uint32_t loop_limit_bits = (127 + 64) << 23; /* of fp32: 2^64 */

template <bool fast> struct loop_lanes {
    static constexpr uint32_t n = (fast ? (uint32_t)LOOP_FAST_GROUP : group_max) / warp_lanes;

    static __device__ __forceinline__ uint32_t index(uint32_t j)
    {
        return fast ? n * lane_id() + j : lane_id() + j * warp_lanes;
    }

    static __device__ __forceinline__ bool has(const struct kvf_gpu_tensor &tensor, uint32_t j)
    {
        return fast || index(j) < tensor.group;
    }
};

/* Where a warp turns vectors and orders codes. */
template <bool fast> struct loop_room {
    union {
        vector_pair<float> floats;
        vector_pair<int32_t> integers;
    };
    uint8_t codes[group_max];
};

template <> struct loop_room<true> {
    uint32_t codes[LOOP_FAST_GROUP / 4]; /* four of a byte each, in stored order */
};

/* Bit j: the lane's element j is flipped. */
template <bool fast>
static __device__ uint32_t loop_flips(const struct kvf_gpu_tensor &tensor, uint32_t row)
{
    uint32_t flips = 0;
    for (uint32_t j = 0; j < loop_lanes<fast>::n; j++) {
        if (loop_lanes<fast>::has(tensor, j) &&
            is_flipped(tensor, row, loop_lanes<fast>::index(j))) {
            flips |= 1u << j;
        }
    }
    return flips;
}

/* -------------------------------------------------------------------------------------------------
 * Elements
 */

/* Can a lane load and store its elements in one piece? */
template <bool fast>
static __device__ __forceinline__ bool loop_is_wide(const struct kvf_gpu_tensor &tensor,
                                                    const uint8_t *vector)
{
    return fast && tensor.element_bytes == 2 && (reinterpret_cast<uint64_t>(vector) & 7) == 0;
}

template <bool fast>
static __device__ __forceinline__ void
loop_load(const struct kvf_gpu_tensor &tensor, const uint8_t *vector, float x[loop_lanes<fast>::n])
{
    if (loop_is_wide<fast>(tensor, vector)) {
        const uint2 words = reinterpret_cast<const uint2 *>(vector)[lane_id()];
        bool is_bf16 = tensor.dtype == KVF_DTYPE_BF16;
        x[0] = is_bf16 ? __uint_as_float(words.x << 16) : f32_of_half_bits(words.x & 0xffff);
        x[1] = is_bf16 ? __uint_as_float(words.x & 0xffff0000) : f32_of_half_bits(words.x >> 16);
        x[2] = is_bf16 ? __uint_as_float(words.y << 16) : f32_of_half_bits(words.y & 0xffff);
        x[3] = is_bf16 ? __uint_as_float(words.y & 0xffff0000) : f32_of_half_bits(words.y >> 16);
        return;
    }
#pragma unroll
    for (uint32_t j = 0; j < loop_lanes<fast>::n; j++) {
        x[j] = loop_lanes<fast>::has(tensor, j)
                   ? load_element(tensor.dtype, vector, loop_lanes<fast>::index(j))
                   : 0.0f;
    }
}

template <bool fast>
static __device__ __forceinline__ void
loop_store(const struct kvf_gpu_tensor &tensor, uint8_t *vector, const float x[loop_lanes<fast>::n])
{
    if (loop_is_wide<fast>(tensor, vector) && tensor.dtype == KVF_DTYPE_BF16) {
        reinterpret_cast<uint2 *>(vector)[lane_id()] = make_uint2(pack_bf16(x[0], x[1]),
                                                                  pack_bf16(x[2], x[3]));
        return;
    }
#pragma unroll
    for (uint32_t j = 0; j < loop_lanes<fast>::n; j++) {
        if (loop_lanes<fast>::has(tensor, j)) {
            store_element(tensor.dtype, vector, loop_lanes<fast>::index(j), x[j]);
        }
    }
}

/* -------------------------------------------------------------------------------------------------
 * Rotation
 */

/* The stage of a bit that is one of the lane's number. */
template <typename T> static __device__ __forceinline__ T loop_turn(T value, uint32_t lane_bit)
{
    T other = __shfl_xor_sync(all_lanes, value, lane_bit);
    return (lane_id() & lane_bit) != 0 ? other - value : value + other;
}

template <typename T> static __device__ __forceinline__ void loop_butterfly(T &u, T &v)
{
    T sum = u + v;
    v = u - v;
    u = sum;
}

/* (4) H v, stages in the order of rotate.h: bits 0, 1, 3, 4, 2, 5, 6. */
static __device__ __forceinline__ void loop_forward_fast(float v[4])
{
    loop_butterfly(v[0], v[1]);
    loop_butterfly(v[2], v[3]);
    loop_butterfly(v[0], v[2]);
    loop_butterfly(v[1], v[3]);
#pragma unroll
    for (uint32_t j = 0; j < 4; j++) {
        v[j] = loop_turn(v[j], 2);
        v[j] = loop_turn(v[j], 4);
        v[j] = loop_turn(v[j], 1);
        v[j] = loop_turn(v[j], 8);
        v[j] = loop_turn(v[j], 16);
    }
}

/* H^T z of integers below 256, exact: two a register, whose sums of 128 do not reach 2^15. */
static __device__ __forceinline__ void loop_inverse_fast(int32_t z[4])
{
    uint32_t low = (uint32_t)z[0] + ((uint32_t)z[1] << 16);
    uint32_t high = (uint32_t)z[2] + ((uint32_t)z[3] << 16);
    loop_butterfly(low, high);
#pragma unroll
    for (uint32_t bit = 1; bit < warp_lanes; bit *= 2) {
        low = loop_turn(low, bit);
        high = loop_turn(high, bit);
    }
    z[0] = (int16_t)(low & 0xffff);
    z[1] = (int32_t)(low - (uint32_t)z[0]) >> 16;
    z[2] = (int16_t)(high & 0xffff);
    z[3] = (int32_t)(high - (uint32_t)z[2]) >> 16;
    loop_butterfly(z[0], z[1]);
    loop_butterfly(z[2], z[3]);
}

/* A vector to shared memory, turned there, and back. */
template <bool transposed, typename T>
static __device__ void loop_rotate(const struct kvf_gpu_tensor &tensor, vector_pair<T> &room,
                                   T v[loop_lanes<false>::n])
{
    for (uint32_t j = 0; j < loop_lanes<false>::n; j++) {
        if (loop_lanes<false>::has(tensor, j)) {
            room.now[loop_lanes<false>::index(j)] = v[j];
        }
    }
    __syncwarp();
    rotate(room, tensor.group, tensor.rot_order, transposed);
    for (uint32_t j = 0; j < loop_lanes<false>::n; j++) {
        if (loop_lanes<false>::has(tensor, j)) {
            v[j] = room.now[loop_lanes<false>::index(j)];
        }
    }
    __syncwarp();
}

template <bool fast>
static __device__ __forceinline__ void loop_forward(const struct kvf_gpu_tensor &tensor,
                                                    loop_room<fast> &room,
                                                    float v[loop_lanes<fast>::n])
{
    if (tensor.rot_order == 1) {
        return;
    }
    if constexpr (fast) {
        loop_forward_fast(v);
    } else {
        loop_rotate<false>(tensor, room.floats, v);
    }
}

template <bool fast>
static __device__ __forceinline__ void loop_inverse(const struct kvf_gpu_tensor &tensor,
                                                    loop_room<fast> &room,
                                                    int32_t z[loop_lanes<fast>::n])
{
    if (tensor.rot_order == 1) {
        return;
    }
    if constexpr (fast) {
        loop_inverse_fast(z);
    } else {
        loop_rotate<true>(tensor, room.integers, z);
    }
}

/* -------------------------------------------------------------------------------------------------
 * Codes, fast: a byte each in shared memory, where lanes change places
 */

/* The stored position of the lane's element j, of 4 g + t as codec_saw_device.cuh has it. */
static __device__ __forceinline__ uint32_t loop_position(uint32_t j)
{
    uint32_t lane = lane_id();
    return (lane >> 1 & 3) << 5 | (j & 1) << 4 | (j >> 1) << 3 | (lane >> 3) << 1 | (lane & 1);
}

/* Fields of plane_bits bits, one in each byte, side by side. */
static __device__ __forceinline__ uint32_t loop_join(uint32_t bytes, uint32_t plane_bits)
{
    return (bytes & 0xff) | (bytes >> 8 & 0xff) << plane_bits |
           (bytes >> 16 & 0xff) << 2 * plane_bits | bytes >> 24 << 3 * plane_bits;
}

/* One in each byte again. */
static __device__ __forceinline__ uint32_t loop_spread(uint32_t fields, uint32_t plane_bits)
{
    uint32_t mask = (1u << plane_bits) - 1;
    return (fields & mask) | (fields >> plane_bits & mask) << 8 |
           (fields >> 2 * plane_bits & mask) << 16 | (fields >> 3 * plane_bits & mask) << 24;
}

/* The lane's four fields of a plane. */
static __device__ __forceinline__ void loop_store_plane(uint32_t fields, uint32_t plane_bits,
                                                        uint8_t *to)
{
    uint32_t lane = lane_id();
    switch (plane_bits) {
    case 8:
        reinterpret_cast<uint32_t *>(to)[lane] = fields;
        break;
    case 4:
        reinterpret_cast<uint16_t *>(to)[lane] = (uint16_t)fields;
        break;
    case 2:
        to[lane] = (uint8_t)fields;
        break;
    default: {
        uint32_t next = __shfl_down_sync(all_lanes, fields, 1);
        if (lane % 2 == 0) {
            to[lane / 2] = (uint8_t)(fields | next << 4);
        }
        break;
    }
    }
}

static __device__ __forceinline__ uint32_t loop_load_plane(const uint8_t *from, uint32_t plane_bits)
{
    uint32_t lane = lane_id();
    switch (plane_bits) {
    case 8:
        return reinterpret_cast<const uint32_t *>(from)[lane];
    case 4:
        return reinterpret_cast<const uint16_t *>(from)[lane];
    case 2:
        return from[lane];
    default:
        return from[lane / 2]; /* of two lanes: loop_codes_of chooses */
    }
}

static __device__ __forceinline__ void loop_store_codes_fast(uint32_t bits, loop_room<true> &room,
                                                             const int32_t codes[4], uint8_t *to)
{
    uint32_t low_bits = saw_low_bits(bits);
    uint32_t plane_bits = bits - low_bits;
    uint8_t *bytes = reinterpret_cast<uint8_t *>(room.codes);
#pragma unroll
    for (uint32_t j = 0; j < 4; j++) {
        bytes[loop_position(j)] = (uint8_t)codes[j];
    }
    __syncwarp();
    uint32_t four = room.codes[lane_id()];
    __syncwarp();
    uint32_t upper = four >> low_bits & ((1u << plane_bits) - 1) * 0x01010101u;
    loop_store_plane(loop_join(upper, plane_bits), plane_bits, to);
    if (low_bits != 0) {
        uint32_t lower = four & ((1u << low_bits) - 1) * 0x01010101u;
        loop_store_plane(loop_join(lower, low_bits), low_bits,
                         to + LOOP_FAST_GROUP * plane_bits / 8);
    }
}

/* The lane's words of both planes, as stored. */
struct loop_words {
    uint32_t upper;
    uint32_t lower;
};

static __device__ __forceinline__ loop_words loop_load_words(uint32_t bits, const uint8_t *from)
{
    uint32_t low_bits = saw_low_bits(bits);
    uint32_t plane_bits = bits - low_bits;
    loop_words words = {loop_load_plane(from, plane_bits), 0};
    if (low_bits != 0) {
        words.lower = loop_load_plane(from + LOOP_FAST_GROUP * plane_bits / 8, low_bits);
    }
    return words;
}

static __device__ __forceinline__ void loop_codes_of(uint32_t bits, const loop_words &words,
                                                     loop_room<true> &room, int32_t codes[4])
{
    uint32_t low_bits = saw_low_bits(bits);
    const uint8_t *bytes = reinterpret_cast<const uint8_t *>(room.codes);
    uint32_t four = loop_spread(words.upper, bits - low_bits) << low_bits;
    if (low_bits == 1) {
        four |= loop_spread(words.lower >> lane_id() % 2 * 4, low_bits);
    } else if (low_bits == 2) {
        four |= loop_spread(words.lower, low_bits);
    }
    room.codes[lane_id()] = four;
    __syncwarp();
#pragma unroll
    for (uint32_t j = 0; j < 4; j++) {
        codes[j] = bytes[loop_position(j)];
    }
    __syncwarp();
}

/* -------------------------------------------------------------------------------------------------
 * The state
 */

/* What a vector begins with and its scale, from what is stored: (6). zero: or the bits of lo. */
static __device__ __forceinline__ generic_stored loop_stored(const struct kvf_gpu_tensor &tensor,
                                                             uint32_t scale_bits, uint32_t zero)
{
    float scale = f32_of_half_bits(scale_bits);
    float lo = has_zeros(tensor) ? lo_of_zero(scale, (float)zero + saw_zero_shift(tensor))
                                 : f32_of_half_bits(zero);
    return {lo, scale};
}

/* The state after a layer; z: its codes, turned back. */
template <bool fast>
static __device__ __forceinline__ void
loop_take(const struct kvf_gpu_tensor &tensor, const generic_stored &stored, uint32_t flips,
          bool is_delta, const int32_t z[loop_lanes<fast>::n], float state[loop_lanes<fast>::n])
{
    float offset = stored.lo * tensor.sqrt_order;
    float factor = stored.scale * tensor.rsqrt_order;
#pragma unroll
    for (uint32_t j = 0; j < loop_lanes<fast>::n; j++) {
        float sign = (flips >> j & 1) != 0 ? -1.0f : 1.0f;
        uint32_t i = loop_lanes<fast>::index(j);
        bool is_first = fast ? i == 0 || tensor.rot_order == 1 : i % tensor.rot_order == 0;
        float add = is_first ? 0.0f + offset * sign : 0.0f;
        float d = __fmaf_rn(factor * sign, (float)z[j], add);
        bool counts = (__float_as_uint(d) & 0x7fffffff) < loop_limit_bits;
        state[j] = (is_delta ? state[j] : 0.0f) + (counts ? d : 0.0f);
    }
}

/* Where the lane's elements of a vector are in fp32[tokens][n_heads * dim]. */
template <bool fast>
static __device__ __forceinline__ float *loop_kept(const struct kvf_gpu_tensor &tensor,
                                                   uint64_t sums, uint32_t row, uint32_t token)
{
    return at_address<float>(sums) + ((uint64_t)token * tensor.n_rows + row) * tensor.group +
           loop_lanes<fast>::index(0);
}

template <bool fast>
static __device__ __forceinline__ void loop_get(const struct kvf_gpu_tensor &tensor, uint64_t sums,
                                                uint32_t row, uint32_t token,
                                                float state[loop_lanes<fast>::n])
{
    const float *kept = loop_kept<fast>(tensor, sums, row, token);
#pragma unroll
    for (uint32_t j = 0; j < loop_lanes<fast>::n; j++) {
        state[j] = loop_lanes<fast>::has(tensor, j) ? kept[j * (fast ? 1 : warp_lanes)] : 0.0f;
    }
}

template <bool fast>
static __device__ __forceinline__ void loop_keep(const struct kvf_gpu_tensor &tensor, uint64_t sums,
                                                 uint32_t row, uint32_t token,
                                                 const float state[loop_lanes<fast>::n])
{
    float *kept = loop_kept<fast>(tensor, sums, row, token);
#pragma unroll
    for (uint32_t j = 0; j < loop_lanes<fast>::n; j++) {
        if (loop_lanes<fast>::has(tensor, j)) {
            kept[j * (fast ? 1 : warp_lanes)] = state[j];
        }
    }
}

} /* namespace kvf */

#endif /* KVF_CODEC_CODEC_CLOSED_LOOP_DEVICE_CUH */
