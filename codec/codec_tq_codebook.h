/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_tq_codebook.h: levels and thresholds of tq. Printed by codebooks.py, which says how they
 * come about; a test compares. Read by C and by CUDA.
 *
 * Levels by code, plus 128, in units; thresholds above 0, in steps; the other half mirrors them.
 * Units and steps are shares of the standard deviation. CRC: CRC-32C over the levels, a byte each,
 * and the unit, fp32.
 */
#ifndef KVF_CODEC_CODEC_TQ_CODEBOOK_H
#define KVF_CODEC_CODEC_TQ_CODEBOOK_H

#define KVF_TQ_LEVELS_1 127, 129

#define KVF_TQ_UNIT_1 0xcc422ap-24f
#define KVF_TQ_STEP_1 0x800000p-29f
#define KVF_TQ_CRC_1  0xf85fc85dU

#define KVF_TQ_LEVELS_2 38, 101, 155, 218

#define KVF_TQ_THRESHOLDS_2 122
#define KVF_TQ_UNIT_2       0x89776bp-29f
#define KVF_TQ_STEP_2       0x83d2ebp-30f
#define KVF_TQ_CRC_2        0x912b78e1U

#define KVF_TQ_LEVELS_3 14, 57, 88, 115, 141, 168, 199, 242

#define KVF_TQ_THRESHOLDS_3 20, 42, 70
#define KVF_TQ_UNIT_3       0x9ac8a7p-29f
#define KVF_TQ_STEP_3       0xcc9cc7p-29f
#define KVF_TQ_CRC_3        0x24b5ad41U

#define KVF_TQ_LEVELS_4 24, 49, 66, 80, 92, 103, 113, 123, 133, 143, 153, 164, 176, 190, 207, 232

#define KVF_TQ_THRESHOLDS_4 13, 26, 40, 55, 72, 92, 120
#define KVF_TQ_UNIT_4       0xd66b3ap-29f
#define KVF_TQ_STEP_4       0xa3e176p-29f
#define KVF_TQ_CRC_4        0xab30c032U

#endif /* KVF_CODEC_CODEC_TQ_CODEBOOK_H */
