/* SPDX-License-Identifier: Apache-2.0
 *
 * saw_model.h: the saw codec once more, a vector at a time, straight from the text of codec_saw.h.
 *
 * It shares tables with the reference but no code: fp16 by searching a table of its values, fused
 * operations by the C library, the stored order by the bookkeeping of tensor-core fragments.
 */
#ifndef KVF_TESTS_SAW_MODEL_H
#define KVF_TESTS_SAW_MODEL_H

#include "codec/codec.h"

enum {
    MODEL_DIM_MAX = 256
};

struct saw_model {
    int dtype;
    uint32_t n; /* elements; a power of two, or m times one with m of 12, 20, 28 */
    uint32_t order;
    uint32_t bits;
    uint32_t clip_q15;
    uint32_t n_clips; /* ratios to try; 0: clip_q15 */
    const uint16_t *clips_q15;
    const uint8_t *sign_bits;
    const uint8_t *stages; /* of the Sylvester part; NULL: the documented order */
    uint8_t zero_kind;     /* enum kvf_block_zero */
    bool takes_last;       /* of ratios that cost alike; not what is documented */
};

struct saw_model_vector {
    bool escape;
    uint16_t lo; /* 0 where there are zeros */
    uint16_t scale;
    uint8_t zero;                 /* u */
    uint8_t codes[MODEL_DIM_MAX]; /* by coefficient */
};

/* fp16 as a number, and the fp16 that is next above or below one (or equal); 0x7c00 or 0xfc00
 * beyond the largest. By searching a table of all values. */
double saw_model_f16_value(uint16_t half);
uint16_t saw_model_f16_up(double value);
uint16_t saw_model_f16_down(double value);

/* y = H x, unscaled, in the model's order of additions. */
void saw_model_rotate(const struct saw_model *model, float *vector);

/* Encode one vector; mean (fp32 of the stored fp16) may be NULL. */
void saw_model_encode(const struct saw_model *model, const float *input, const float *mean,
                      struct saw_model_vector *out);

/* Decode to fp32, before the rounding to the target type. */
void saw_model_decode(const struct saw_model *model, const struct saw_model_vector *vector,
                      const float *mean, float *out);

/* Where the code of a coefficient is stored, for 64, 128 and 256 elements: byte and nibble from the
 * owner of the result of one mma.m16n8k16 a (i, e2), by which the format was chosen. */
uint32_t saw_model_position(uint32_t n, uint32_t coefficient);

#endif /* KVF_TESTS_SAW_MODEL_H */
