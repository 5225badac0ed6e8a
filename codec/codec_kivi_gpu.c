/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_kivi_gpu.c: which kernels of codec_kivi.cu, and in what shape.
 */
#include "codec/codec_kivi_gpu.h"

#include "codec/codec_kivi_shape.h"

#include "kvferry.h"

#include <string.h>

/* What is done, by bits. */
struct kivi_kernels {
    const char *generic;
    const char *fast[5];
};

/* For bf16 heads of 128. */
static const char *kernel_of(const struct kivi_kernels *kernels,
                             const struct kvf_gpu_tensor *tensor)
{
    bool is_fast = tensor->dtype == KVF_DTYPE_BF16 && tensor->dim == 128;
    return is_fast ? kernels->fast[tensor->bits] : kernels->generic;
}

static struct kvf_gpu_launch launch_of(const struct kvf_gpu_work *work,
                                       const struct kivi_kernels *kernels, uint32_t tensors)
{
    return (struct kvf_gpu_launch){
        .kernel = kernel_of(kernels, &work->tensors[tensors == 2 ? 1 : 0]),
        .n_blocks = work->n_parts * kivi_rows_max(work, tensors) * kivi_tiles(work),
        .n_threads = KIVI_THREADS,
        .tensors = tensors,
    };
}

static uint32_t plan_launches(const struct kvf_gpu_work *work, const struct kivi_kernels *kernels,
                              struct kvf_gpu_launch *launches_out)
{
    bool has_k = work->tensors[0].codec == KVF_CODEC_KIVI;
    bool has_v = work->has_v != 0 && work->tensors[1].codec == KVF_CODEC_KIVI;
    if (has_k && has_v &&
        strcmp(kernel_of(kernels, &work->tensors[0]), kernel_of(kernels, &work->tensors[1])) == 0) {
        launches_out[0] = launch_of(work, kernels, 3);
        return 1;
    }
    uint32_t n = 0;
    if (has_k) {
        launches_out[n++] = launch_of(work, kernels, 1);
    }
    if (has_v) {
        launches_out[n++] = launch_of(work, kernels, 2);
    }
    return n;
}

uint32_t kvf_kivi_gpu_encode(const struct kvf_gpu_work *work,
                             struct kvf_gpu_launch launches_out[KVF_KIVI_GPU_LAUNCHES_MAX])
{
    static const struct kivi_kernels kernels = {
        "kvf_kivi_encode",
        {[2] = "kvf_kivi_encode_128_2", [4] = "kvf_kivi_encode_128_4"},
    };
    return plan_launches(work, &kernels, launches_out);
}

uint32_t kvf_kivi_gpu_decode(const struct kvf_gpu_work *work,
                             struct kvf_gpu_launch launches_out[KVF_KIVI_GPU_LAUNCHES_MAX])
{
    static const struct kivi_kernels kernels = {
        "kvf_kivi_decode",
        {[2] = "kvf_kivi_decode_128_2", [4] = "kvf_kivi_decode_128_4"},
    };
    return plan_launches(work, &kernels, launches_out);
}
