/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_fill.h: what is in the pages of codec_case.h.
 */
#ifndef KVF_TESTS_GPU_CODEC_FILL_H
#define KVF_TESTS_GPU_CODEC_FILL_H

#include "tests/gpu/codec_case.h"

/* Values of a block for this plan. */
void codec_case_fill(struct fixture_kv *kv, enum case_fill fill, const struct kvf_codec_plan *plan,
                     struct kvf_random_seeded *random);

#endif /* KVF_TESTS_GPU_CODEC_FILL_H */
