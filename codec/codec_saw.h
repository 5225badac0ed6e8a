/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw.h: rotated, optionally centred, uniform codes with a scale a vector ("saw"; after
 * SAW-INT4).
 *
 * This header is the format: codec_saw_scalar.c is its reference, and every other implementation
 * gives the same bytes. Heads of up to 256 elements are one row; wider ones are cut into sub-heads
 * of 128 (if dim is a multiple of 128) or 64 elements, each a row of its own (codec.h). n = group,
 * the elements of a row's vector; T = tokens of the block; k = rot_order.
 *
 *   mean    fp16[heads][dim]       only if centred: the mean of each channel, not rotated
 *   meta    u32[rows][T]           fp16 lo in bits 0-15, fp16 scale in bits 16-31
 *   codes   [rows][T][code_bytes]  a vector's planes, one after the other
 *
 * With zero_kind INT or HALF there is no lo, but a zero u of b bits:
 *
 *   meta    u16[rows][T]           fp16 scale
 *           [rows][zero_bytes]     u of a row's vectors, by token, in planes of n = T positions
 *
 * Planes. A code of b bits is cut into one or two planes, and the upper bits come first:
 *
 *     b        8    6    5    4    3    2
 *     planes   8   4+2  4+1   4   2+1   2
 *
 * A plane of w bits has (n w + 7) / 8 bytes; position p lies in the w bits from bit w (p mod (8 /
 * w)) on of byte p / (8 / w), and bits that no position has are 0. A code is the sum of its planes,
 * the first one shifted left by the width of the second. So 6 bits at n = 128 are 64 bytes with
 * code >> 2 and 32 bytes with code & 3, and no code crosses a byte.
 *
 * Position and coefficient. A vector's n coefficients are cut into powers of two, largest first,
 * and stored piece by piece (80 = 64 + 16, 96 = 64 + 32, 112 = 64 + 32 + 16, 192 = 128 + 64).
 * Within a piece of 2^w, the bits of the position are, most significant first, these bits of the
 * coefficient's index, as far as w has them:
 *
 *     4, 3, 0, 1, w-1 .. 5, 2
 *
 * With one mma.m16n8k16 a (bits above 4, bit 2) the lane of group g then owns bytes 8 g .. 8 g + 7
 * of a 128-vector after the product, and the 16 bytes at 16 t are fragments of the inverse as they
 * are.
 *
 * Encode of a row (x: input as fp32; every operation below is one fp32 operation rounded to nearest
 * even, unless stated; c = 1 / sqrt(k), d = sqrt(k), correctly rounded; g_i = -1 if channel i is
 * flipped):
 *   1. A vector with a NaN or an element of 2^64 or more, and every vector of a sink token, is an
 *      escape.
 *   2. mu_i, if centred: tokens are cut into tiles of 8, and with m = ceil(ceil(T / 8) / 8) every
 *      m-th tile from the first on is a sample: at most 8 tiles, 64 tokens of 256. A partial sum
 *      over each tile's vectors that are no escapes by rule 1, from 0, in ascending order; 8 sums,
 *      0 for tiles that do not exist, added as (0+4, 1+5, 2+6, 3+7), (0+2, 1+3), (0+1), divided by
 *      the number of vectors, rounded to fp16; 0 if there is none or if it overflows. (All tokens
 *      instead would lower the squared error by about 1 % on real K and make an encoder read a row
 *      before it can begin.) A tensor that is centred by its profile's mean
 *      (KVF_TENSOR_CENTER_PROFILE) takes that as mu, also here below, however few tokens there
 *      are, and has no mean part.
 *   3. bf16 input: elements below 2^(E-12) become +0, E the exponent of the largest |x| of the
 *      vector (no element is dropped if E <= -115, where 2^(E-12) is not normal).
 *   4. y = H (g x), by rotate.h; if centred, y = y - H (g mu).
 *   5. min and max over y, and over 0 with zero_kind INT or HALF; with a clip ratio r < 1, mid = .5
 *      (min + max), half = (.5 (max - min)) r, and they become mid - half and mid + half.
 *   6. lo = (min c + 0), hi = (max c + 0), rounded down and up to fp16. scale = the smallest fp16
 *      with (2^b - 1) scale >= hi - lo. If lo or hi is not finite, or 0 < scale < 2^-20: escape.
 *      With zero_kind INT u = -lo / scale, with HALF u = -lo / scale - .5 (two operations), at
 *      least 0 and at most 2^b - 1 (0 if scale is 0), rounded to an integer, ties to even. Then
 *      lo = -(scale w), which is exact, with w = u or, with HALF, u + .5.
 *   7. q_i = (y_i - lo d) * (c * (1 / scale)), the last product exact and rounded to an integer,
 *      ties to even, clamped to 0 .. 2^b - 1; 0 if scale is 0.
 *   S. With a list of ratios r_0 > r_1 > ... instead of one, steps 5 and 6 are done for each; of
 *      those that make no escape the one with the least cost is taken, the larger one of two that
 *      are alike; if all make one, the vector is an escape. With mid of step 5, and f = 16 (c (1 /
 *      scale)) of r_0, or 0 if its scale is 0 or it makes an escape: i = |y - mid| f, the product
 *      exact and rounded to an integer, ties to even. The cost of r_j is the sum of integers, each
 *      of an i alone: q = fma(i, a, -.5) with a = r_0 / (16 r_j), rounded to an integer, ties to
 *      even, no more than 2^(b-1) - 1; e = fma(-(q + .5), s, i) with s = 16 r_j / r_0; e e, exact
 *      and rounded to an integer, ties to even. So i counts sixteenths of r_0's step from the
 *      middle, and e those from the level that r_j would take, were lo and scale not rounded.
 *      With zero_kind INT and HALF i counts from 0 and e from the level that u gives: i = y f, with
 *      its sign; q = fma(i, a, w), rounded, at least 0 and at most 2^b - 1; e = fma(-(q - w), s,
 *      i).
 * An escape has scale NaN (0x7e00), lo or u 0 and codes 0, and its input is in the raw area; what
 * is decoded of it without that area is NaN. If more than 1/16 of the vectors, sinks apart, are
 * escapes, the tensor of this layer is stored by codec raw.
 *
 * Decode: z = H^T q over integers, exact;
 *      x_i = fma(g_i (scale c), z_i, mu_i + [i mod k = 0] g_i (lo d))
 * then one rounding to the target type, to nearest even; fp16 and fp8 saturate at their largest
 * finite value.
 */
#ifndef KVF_CODEC_CODEC_SAW_H
#define KVF_CODEC_CODEC_SAW_H

#include "codec/codec.h"

enum kvf_saw_layout {
    KVF_SAW_META_BYTES = 4,  /* of a vector, between codec_saw.c and the kernels; of lo and scale */
    KVF_SAW_SCALE_BYTES = 2, /* in the meta part where zeros have planes */
    KVF_SAW_PARTIAL_SUMS = 8, /* sampled tiles, at most */
    KVF_SAW_TILE_TOKENS = 8,
    KVF_SAW_DROP_BINADES = 12,
    KVF_SAW_COST_STEPS = 128, /* (S) i is less, by the ratios below */
    KVF_SAW_ESCAPE_SCALE = 0x7e00,
    KVF_SAW_ESCAPE_EXPONENT = 127 + 64, /* of fp32: 2^64 */
};

#define KVF_SAW_SCALE_MIN 0x1p-20f

/* Bits of the coefficient's index, most significant bit of the position first. */
#define KVF_SAW_POSITION_BITS                                                                      \
    {                                                                                              \
        4, 3, 0, 1, 7, 6, 5, 2                                                                     \
    }

/* Share of the range that is kept, times 32768; all of it at 5 bits and more. Measured on Gaussian
 * data; see docs/block-format.md. NARROW: up to 64 elements. */
enum kvf_saw_clip {
    KVF_SAW_CLIP_4_NARROW = 31457, /* .96 */
    KVF_SAW_CLIP_4 = 30802,        /* .94 */
    KVF_SAW_CLIP_3_NARROW = 28180, /* .86 */
    KVF_SAW_CLIP_3 = 26214,        /* .80 */
    KVF_SAW_CLIP_2_NARROW = 21627, /* .66 */
    KVF_SAW_CLIP_2 = 19661,        /* .60 */
};

/* (S) The ratios that are tried, times 32768: three for 3 and 2 bits, and for who has the time nine
 * for 4, 3 and 2. */
#define KVF_SAW_SEARCH_3                                                                           \
    {                                                                                              \
        30147, 27525, 24904 /* .92 .84 .76 */                                                      \
    }
#define KVF_SAW_SEARCH_3_NARROW                                                                    \
    {                                                                                              \
        31457, 28836, 26214 /* .96 .88 .80 */                                                      \
    }
#define KVF_SAW_SEARCH_2                                                                           \
    {                                                                                              \
        23593, 20972, 18350 /* .72 .64 .56 */                                                      \
    }
#define KVF_SAW_SEARCH_2_NARROW                                                                    \
    {                                                                                              \
        25559, 22938, 20316 /* .78 .70 .62 */                                                      \
    }
#define KVF_SAW_WIDE_4                                                                             \
    {                                                                                              \
        32768, 31785, 30802, 29491, 28180, 26870, 25559, 23593, 21627 /* 1 .97 .94 .90 .. .66 */   \
    }
#define KVF_SAW_WIDE_3 KVF_SAW_WIDE_4
#define KVF_SAW_WIDE_2                                                                             \
    {                                                                                              \
        29491, 27525, 26214, 24904, 23593, 22282, 20972, 19661, 18350 /* .90 .84 .80 .76 .. .56 */ \
    }

/* Bits of the second plane of codes of so many bits; 0: there is one plane. */
static inline uint32_t kvf_saw_low_bits(uint32_t bits)
{
    return bits == 6 ? 2 : bits == 5 || bits == 3 ? 1 : 0;
}

/* Have vectors a zero u instead of lo? */
static inline bool kvf_saw_has_zeros(const struct kvf_codec_tensor *tensor)
{
    return tensor->descriptor.zero_kind == KVF_ZERO_INT ||
           tensor->descriptor.zero_kind == KVF_ZERO_HALF;
}

/* (6) w - u. */
static inline float kvf_saw_zero_shift(const struct kvf_codec_tensor *tensor)
{
    return tensor->descriptor.zero_kind == KVF_ZERO_HALF ? 0.5f : 0.0f;
}

/* Bytes of a plane of a vector of n elements. */
static inline uint32_t kvf_saw_plane_bytes(uint32_t n, uint32_t plane_bits)
{
    return (n * plane_bits + 7) / 8;
}

/* Bytes of all planes: the code_bytes of codec.h. */
static inline uint32_t kvf_saw_code_bytes(uint32_t n, uint32_t bits)
{
    uint32_t low = kvf_saw_low_bits(bits);
    return kvf_saw_plane_bytes(n, bits - low) + kvf_saw_plane_bytes(n, low);
}

/* What tq does alike. The group of heads of dim elements, 0 if there is none; how a rotation of n
 * elements by order is called; stored position -> coefficient, piece by piece; sign_bits: the
 * seeded generator's output, bit i for channel i; is there a mean part? */
uint16_t kvf_saw_group(uint16_t dim);
uint8_t kvf_saw_rot_kind(uint32_t order, uint32_t n);
void kvf_saw_fill_order(uint8_t *order, uint32_t n);
void kvf_saw_fill_signs(struct kvf_codec_tensor *tensor, uint32_t seed);
bool kvf_saw_has_mean(const struct kvf_codec_tensor *tensor, uint32_t n_tokens);

extern const struct kvf_codec_ops kvf_codec_saw;

#endif /* KVF_CODEC_CODEC_SAW_H */
