/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels.h: kernels, compiled for the processor. Read by C and by C++.
 */
#ifndef KVF_TESTS_GPU_EMULATE_KERNELS_H
#define KVF_TESTS_GPU_EMULATE_KERNELS_H

#include "codec/codec_gpu.h"
#include "codec/codec_gpu_host.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum emulate_outcome {
    EMULATE_DONE,
    EMULATE_STUCK,   /* lanes wait for ever; the text says which */
    EMULATE_MISSING, /* there is no such kernel */
};

enum {
    EMULATE_TEXT_BYTES = 1024,
};

/* All thread blocks, one after the other. Seeds that are not the same choose other orders of what
 * may run in any order. */
enum emulate_outcome emulate_launch(const char *kernel, const struct kvf_gpu_work *work,
                                    const struct kvf_gpu_launch *shape, uint32_t n_blocks,
                                    uint32_t seed, char text_out[EMULATE_TEXT_BYTES]);

/* What the seeds of the launches to come follow from; 1 at first. */
void emulate_seed(uint64_t seed);

/* From now on copies come so many groups later than they may: a machine that is wrong. */
void emulate_late_copies(uint32_t n_groups);

/* Before each launch of a kernel from now on launch another one on the same work so many times,
 * each with a seed of its own. NULL: no more. */
void emulate_before(const char *kernel, const char *other, uint32_t n_times);

/* How many of those launches have been stuck, and how many there were. */
void emulate_before_counts(uint32_t *n_stuck_out, uint32_t *n_out);

#ifdef __cplusplus
}
#endif

#endif /* KVF_TESTS_GPU_EMULATE_KERNELS_H */
