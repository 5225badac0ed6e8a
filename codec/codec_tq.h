/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_tq.h: rotated codes of Lloyd-Max levels with one scale a vector ("tq"; after TurboQuant).
 *
 * This header is the format: codec_tq_scalar.c is its reference, and every other implementation
 * gives the same bytes. Rows, groups, planes, the stored order, rotation, signs, means and escapes
 * are those of codec_saw.h, whose letters are used here.
 *
 * A rotation is n elements with their order k of the Hadamard step, width b of codes and codebook.
 * A tensor has one rotation of the whole group, or, if it is split (KVF_TENSOR_SPLIT), two: of n1
 * channels, chosen before the rotation and listed, with codes one bit wider than the descriptor
 * says, and of the other channels. Each takes its channels in ascending order. n1 is the number
 * nearest to group / 4, the lower if two are, for which n1 and group - n1 have rotations of their
 * own length: 32 of 128, 16 of 64, 64 of 256, 16 of 80, 16 of 96. A group for which there is none
 * is not split.
 *
 *   mean    fp16[heads][dim]            only if centred: the mean of each channel, not rotated
 *           u8[rows][(group + 7) / 8]   only if split: bit i % 8 of byte i / 8: channel i of the
 *                                       row is in the first rotation; n1 bits are set
 *   meta    fp16[rows][T][scales]       the scale of each rotation; with a residual
 *                                       (KVF_TENSOR_RESIDUAL, not split) a second one, t
 *   codes   [rows][T][code_bytes]       planes of the first rotation, then of the second one; with
 *                                       a residual its width is one less, and a plane of n signs
 *                                       follows
 *
 * Levels. Of the 2^b levels of a codebook (codec_tq_codebook.h) code c stands for the c-th one in
 * ascending order: an integer L(c) of at most 127, in units of the codebook.
 *
 * Encode (as in codec_saw.h every operation is one fp32 operation, rounded to nearest even). Steps
 * 1 to 3 are those of codec_saw.h, step 2 for means and for e, below. Then for each rotation:
 *   4. y = H (g x) over its channels; if centred, y = y - H (g mu).
 *   5. Sums of n products over the stored order: 16 partial sums, each over ceil(n / 16)
 *      consecutive positions, by fma from 0 in ascending order; then s + 8, s + 4, s + 2 and s + 1
 *      are added to s. S = sum of y y. r = sqrt(S) R, R = 1 / sqrt(n k). An escape, if S is not 0
 *      and r not in 2^-20 .. 2^13.
 *   6. f = F (1 / sqrt(S)), F = sqrt(n) / (255 step); 0 if S is 0. m_i = fma(y_i, f, .5) times 255,
 *      the product exact, rounded to an integer, ties to even, clamped to 0 .. 255. Two halves: a =
 *      m - 128 and code 2^(b-1) + #{thresholds <= a} if m >= 128, else a = 127 - m and code 2^(b-1)
 *      - 1 - #{thresholds <= a}.
 *   7. P = sum of y L by (5); Q = sum of L L, exact. The scale, by what the descriptor's flags ask
 *      for:
 *          norm (as published)     sqrt(S) R
 *          matched norm            sqrt(S / Q) C      C = (1 / sqrt(k)) / unit
 *          least squares           (P / Q) C
 *          unbiased                (S / P) C
 *      0 if S is 0; at most 65504; rounded to fp16, to nearest even: s. A decoder need not know.
 *   8. Residual: a = s (sqrt(k) unit), r_i = fma(-a, L_i, y_i), t = sqrt(sum of r r by (5)) R, at
 *      most 65504, to fp16. Sign j is set if the sum of +-r_i, signs from row j of the matrix B, is
 *      below 0: over stored positions by (5), with sums and differences instead of fma.
 * Constants: R, F and C as they stand, operation by operation, with correctly rounded square roots
 * and 1 / sqrt(k) as in codec_saw.h. An escape has NaN (0x7e00) as its first scale, 0 as the second
 * one, and codes 0.
 *
 * Which channels are split off: those with the largest e_i, the lower channel if equal. e_i = sum
 * of |x_i - mu_i| (mu 0 if not centred) over the vectors and partial sums of a mean. The list is
 * part of the strip, so a profile that has a better one stores it instead.
 *
 * B: n x n signs. Minus where bit i % 64 of word(4 j + i / 64) is set; word(w) = number w of
 * splitmix64 from rot_seed (w = 0: the first).
 *
 * Decode: z = H^T L over integers, exact;
 *      x_i = fma(g_i (s U), z_i, mu_i)     U = unit (1 / sqrt(k))
 *   residual: v_i = sum of +-1 over j, minus where exactly one of sign j and B's bit (j, i) is set;
 *      w = H^T v;  V = sqrt(pi / 2) R
 *      x_i = fma(g_i (t V), w_i, fma(g_i (s U), z_i, mu_i))
 * then one rounding to the target type as in codec_saw.h. A list of channels that has not n1 bits
 * is KVF_ERR_CORRUPT.
 */
#ifndef KVF_CODEC_CODEC_TQ_H
#define KVF_CODEC_CODEC_TQ_H

#include "codec/codec.h"
#include "codec/codec_tq_codebook.h"

enum kvf_tq_layout {
    KVF_TQ_SCALE_BYTES = 2,
    KVF_TQ_PARTIAL_SUMS = 16,
    KVF_TQ_SPLIT_SHARE = 4, /* a fourth of the channels, about */
    KVF_TQ_GRID = 255,      /* the largest m */
    KVF_TQ_THRESHOLDS_MAX = 7,
    KVF_TQ_LEVELS_MAX = 16,
    KVF_TQ_LEVEL_BIAS = 128, /* makes levels unsigned bytes */
};

#define KVF_TQ_RMS_MIN      0x1p-20f
#define KVF_TQ_RMS_MAX      0x1p13f
#define KVF_TQ_SCALE_MAX    65504.0f
#define KVF_TQ_SQRT_HALF_PI 0xa06c99p-23f

/* The codes of one width. */
struct kvf_tq_codebook {
    uint8_t thresholds[KVF_TQ_THRESHOLDS_MAX]; /* 2^(bits-1) - 1 of them */
    uint8_t levels[KVF_TQ_LEVELS_MAX];         /* by code, plus KVF_TQ_LEVEL_BIAS */
    float unit;
    float step;
    uint32_t crc32c;
};

/* bits: 1..4. */
const struct kvf_tq_codebook *kvf_tq_codebook(uint32_t bits);

extern const struct kvf_codec_ops kvf_codec_tq;

#endif /* KVF_CODEC_CODEC_TQ_H */
