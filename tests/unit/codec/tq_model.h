/* SPDX-License-Identifier: Apache-2.0
 *
 * tq_model.h: the tq codec once more, a vector at a time, straight from the text of codec_tq.h.
 *
 * It shares tables with the reference but no code: rotation is saw_model's, square roots and fused
 * operations are the C library's, fp16 is found by search.
 */
#ifndef KVF_TESTS_TQ_MODEL_H
#define KVF_TESTS_TQ_MODEL_H

#include "tests/unit/codec/saw_model.h"

struct tq_model {
    const struct kvf_codec_tensor *tensor; /* shapes, orders, signs */
    uint8_t channels[MODEL_DIM_MAX];       /* of the first rotation, then of the second one */
    bool by_coefficient;                   /* a wrong one: sums in the order of coefficients */
};

struct tq_model_vector {
    bool escape;
    uint16_t scales[2];
    uint8_t codes[MODEL_DIM_MAX]; /* by coefficient, rotation after rotation */
    uint8_t signs[MODEL_DIM_MAX]; /* of the residual */
};

/* Encode one vector; mean (fp32 of the stored fp16) may be NULL. */
void tq_model_encode(const struct tq_model *model, const float *input, const float *mean,
                     struct tq_model_vector *out);

/* Decode to fp32, before the rounding to the target type. */
void tq_model_decode(const struct tq_model *model, const struct tq_model_vector *vector,
                     const float *mean, float *out);

/* Is B minus at (j, i)? */
bool tq_model_is_minus(const struct tq_model *model, uint32_t j, uint32_t i);

#endif /* KVF_TESTS_TQ_MODEL_H */
