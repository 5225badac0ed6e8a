/* SPDX-License-Identifier: Apache-2.0
 *
 * rotate.h: the Hadamard step, shared by all codecs that rotate.
 *
 * forward computes y = H x, inverse computes H^T q, neither scaled, so H^T H is the order k times
 * the identity. H is made of m times 2^n rows and columns, k = m 2^n, as the Kronecker product of a
 * Hadamard matrix of order m (1, 12, 20 or 28) and Sylvester's of order 2^n; element e of a vector
 * is e = a 2^n + b with b the index of the Sylvester part. Along a vector longer than k the step
 * repeats.
 *
 * The order of additions is part of the format, because forward rounds: first the index bits of b,
 * one butterfly stage each, in the order
 *
 *     0, 1, 3, 4, 2, 5, 6, 7        (those that b has)
 *
 * with (u, v) -> (u + v, u - v); then, if m > 1, y_r = x_0 +- x_1 +- ... in ascending a by the
 * signs of row r. Bits 0, 1, 3 and 4 come first because a tensor core does these four in one
 * product: for bf16 vectors whose small elements have been dropped (codec_saw.h) the first four
 * stages are exact in fp32, in any order. The inverse is over integers, exact in every order.
 *
 * Column 0 of each H is all ones, so H^T 1 = k e_0: an offset common to all coefficients decodes
 * into element 0 alone.
 */
#ifndef KVF_CODEC_ROTATE_H
#define KVF_CODEC_ROTATE_H

#include <stdbool.h>
#include <stdint.h>

/* Vectors are rotated side by side: element i of lane l is tile[i][l]. 32 of them, because loops of
 * up to 16 are unrolled by gcc before it would vectorize them. */
enum {
    KVF_ROTATE_LANES = 32,
    KVF_ROTATE_FACTOR_MAX = 28, /* the largest m */
};

/* Row r, bit a set: minus. Row 0 of order 28 is not all ones; only the columns are normalized. */
#define KVF_HADAMARD_12                                                                            \
    {                                                                                              \
        0x000, 0x476, 0x8ec, 0x1da, 0x3b4, 0x768, 0xed0, 0xda2, 0xb46, 0x68e, 0xd1c, 0xa3a         \
    }
#define KVF_HADAMARD_20                                                                            \
    {                                                                                              \
        0x00000, 0x615e6, 0xc2bcc, 0x8579a, 0x0af36, 0x15e6c, 0x2bcd8, 0x579b0, 0xaf360, 0x5e6c2,  \
            0xbcd84, 0x79b0a, 0xf3614, 0xe6c2a, 0xcd856, 0x9b0ae, 0x3615e, 0x6c2bc, 0xd8578,       \
            0xb0af2                                                                                \
    }
#define KVF_HADAMARD_28                                                                            \
    {                                                                                              \
        0x0000002, 0x5555554, 0x30ff0c8, 0x9a55a6e, 0xc3fc320, 0x69569ba, 0x0ff0c8c, 0xa55a6e6,    \
            0x3fc3230, 0x9569b9a, 0xff0c8c0, 0x55a6e6a, 0xfc3230c, 0x569b9a6, 0xf0c8c3c,           \
            0x5a6e696, 0xc3230fc, 0x69b9a56, 0x0c8c3fc, 0xa6e6956, 0x3230ff0, 0x9b9a55a,           \
            0xc8c3fc0, 0x6e6956a, 0x230ff0c, 0xb9a55a6, 0x8c3fc30, 0xe69569a                       \
    }

#define KVF_ROTATE_STAGES                                                                          \
    {                                                                                              \
        0, 1, 3, 4, 2, 5, 6, 7                                                                     \
    }

/* The largest order that this module has for vectors of dim elements (1..256): dim itself where it
 * is m 2^n, else the largest 2^n that divides it; 1 if dim is odd. */
uint16_t kvf_rotate_order(uint32_t dim);

/* Is order m 2^n with m > 1? */
bool kvf_rotate_is_kronecker(uint32_t order);

/* m; 1 if there is none. */
uint32_t kvf_rotate_factor_order(uint32_t order);

/* sqrt(order) and 1 / sqrt(order), correctly rounded; order from kvf_rotate_order. */
float kvf_rotate_sqrt(uint32_t order);
float kvf_rotate_rsqrt(uint32_t order);

/* In place, on dim rows of the tile; order divides dim. */
void kvf_rotate_forward(float tile[][KVF_ROTATE_LANES], uint32_t dim, uint32_t order);
void kvf_rotate_inverse(int32_t tile[][KVF_ROTATE_LANES], uint32_t dim, uint32_t order);

#endif /* KVF_CODEC_ROTATE_H */
