/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_rotate.cuh: the Hadamard step of rotate.h, of any order, on a vector in shared memory by
 * one warp.
 */
#ifndef KVF_CODEC_CODEC_ROTATE_CUH
#define KVF_CODEC_CODEC_ROTATE_CUH

#include "codec/codec_elements.cuh"
#include "codec/rotate.h"

namespace kvf
{

constexpr uint32_t group_max = KVF_CODEC_GROUP_MAX;

static __constant__ uint32_t rotate_rows_12[12] = KVF_HADAMARD_12;
static __constant__ uint32_t rotate_rows_20[20] = KVF_HADAMARD_20;
static __constant__ uint32_t rotate_rows_28[28] = KVF_HADAMARD_28;
static __constant__ uint8_t rotate_stages[8] = KVF_ROTATE_STAGES;

/* A vector at work, and a second one for what cannot be done in place. */
template <typename T> struct vector_pair {
    T now[group_max];
    T before[group_max];
};

template <typename T> static __device__ void rotate_bit_of(T *now, uint32_t n, uint32_t bit)
{
    uint32_t stride = 1u << bit;
    for (uint32_t pair = lane_id(); pair < n / 2; pair += warp_lanes) {
        uint32_t upper = (pair >> bit) * 2 * stride + (pair & (stride - 1));
        T u = now[upper];
        T v = now[upper + stride];
        now[upper] = u + v;
        now[upper + stride] = u - v;
    }
    __syncwarp();
}

/* y_r = x_0 +- x_1 +- ... in ascending order. */
template <typename T>
static __device__ void rotate_factor(vector_pair<T> &vector, uint32_t n, uint32_t factor,
                                     uint32_t power, bool transposed)
{
    const uint32_t *rows = factor == 12   ? rotate_rows_12
                           : factor == 20 ? rotate_rows_20
                                          : rotate_rows_28;
    for (uint32_t i = lane_id(); i < n; i += warp_lanes) {
        vector.before[i] = vector.now[i];
    }
    __syncwarp();
    for (uint32_t i = lane_id(); i < n; i += warp_lanes) {
        uint32_t r = i / power % factor;
        uint32_t first = i - r * power;
        T y = 0;
        for (uint32_t a = 0; a < factor; a++) {
            T x = vector.before[first + a * power];
            bool minus = (transposed ? rows[a] >> r : rows[r] >> a) & 1;
            y = minus ? y - x : y + x;
        }
        vector.now[i] = y;
    }
    __syncwarp();
}

template <typename T>
static __device__ void rotate(vector_pair<T> &vector, uint32_t n, uint32_t order, bool transposed)
{
    uint32_t power = order & (0u - order);
    uint32_t odd = order / power;
    uint32_t factor = odd == 1 ? 1 : 4 * odd;
    power = order / factor;
    for (uint32_t i = 0; i < sizeof(rotate_stages); i++) {
        if (1u << rotate_stages[i] < power) {
            rotate_bit_of(vector.now, n, rotate_stages[i]);
        }
    }
    if (factor > 1) {
        rotate_factor(vector, n, factor, power, transposed);
    }
}

} /* namespace kvf */

#endif /* KVF_CODEC_CODEC_ROTATE_CUH */
