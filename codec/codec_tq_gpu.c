/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_tq_gpu.c: which kernels of codec_tq.cu, and in what shape.
 */
#include "codec/codec_tq_gpu.h"

#include "codec/codec_saw_shape.h"

static uint32_t tq_tensors(const struct kvf_gpu_work *work)
{
    uint32_t tensors = work->tensors[0].codec == KVF_CODEC_TQ ? 1 : 0;
    return tensors | (work->has_v != 0 && work->tensors[1].codec == KVF_CODEC_TQ ? 2 : 0);
}

static struct kvf_gpu_launch generic_launch(const struct kvf_gpu_work *work, const char *kernel)
{
    uint32_t tensors = tq_tensors(work);
    return (struct kvf_gpu_launch){
        .kernel = kernel,
        .n_blocks = work->n_parts * saw_rows_max(work, tensors),
        .n_threads = SAW_GENERIC_THREADS,
        .tensors = tensors,
    };
}

uint32_t kvf_tq_gpu_encode(const struct kvf_gpu_work *work,
                           struct kvf_gpu_launch launches_out[KVF_TQ_GPU_LAUNCHES_MAX])
{
    launches_out[0] = generic_launch(work, "kvf_tq_encode");
    return 1;
}

uint32_t kvf_tq_gpu_decode(const struct kvf_gpu_work *work,
                           struct kvf_gpu_launch launches_out[KVF_TQ_GPU_LAUNCHES_MAX])
{
    launches_out[0] = generic_launch(work, "kvf_tq_decode");
    return 1;
}
