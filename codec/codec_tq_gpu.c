/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_tq_gpu.c: which kernels of codec_tq.cu, and in what shape. Kernels on tensor cores exist
 * for bf16 heads of 128 that are rotated as a whole, without residual; the generic ones do all
 * else.
 */
#include "codec/codec_tq_gpu.h"

#include "codec/codec_tq_shape.h"

#include "kvferry.h"

#include <string.h>

enum {
    FAST_DIM = 128,
};

/* By bits. */
static const char *const fast_encode[] = {
    [2] = "kvf_tq_encode_128_2", [3] = "kvf_tq_encode_128_3", [4] = "kvf_tq_encode_128_4"};
static const char *const fast_decode[] = {
    [2] = "kvf_tq_decode_128_2", [3] = "kvf_tq_decode_128_3", [4] = "kvf_tq_decode_128_4"};

/* The width that a fast kernel has; 0: the generic ones. */
static uint32_t fast_bits(const struct kvf_gpu_tensor *tensor)
{
    bool is_fast = tensor->dtype == KVF_DTYPE_BF16 && tensor->group == FAST_DIM &&
                   tensor->rot_order == tensor->group && tensor->n_rotations == 1 &&
                   (tensor->flags & KVF_TENSOR_RESIDUAL) == 0;
    return is_fast ? tensor->bits : 0;
}

static struct kvf_gpu_launch generic_launch(const struct kvf_gpu_work *work, const char *kernel,
                                            uint32_t tensors)
{
    return (struct kvf_gpu_launch){
        .kernel = kernel,
        .n_blocks = work->n_parts * saw_rows_max(work, tensors),
        .n_threads = SAW_GENERIC_THREADS,
        .tensors = tensors,
    };
}

static struct kvf_gpu_launch encode_launch(const struct kvf_gpu_work *work, uint32_t tensors)
{
    const struct kvf_gpu_tensor *tensor = &work->tensors[tensors == 2 ? 1 : 0];
    uint32_t bits = fast_bits(tensor);
    uint32_t shared_bytes = tq_encode_shared_bytes(work, FAST_DIM);
    bool has_room = work->shared_bytes_max == 0 || shared_bytes <= work->shared_bytes_max;
    if (bits == 0 || !has_room || !saw_encode_takes_mean(work, tensor)) {
        return generic_launch(work, "kvf_tq_encode", tensors);
    }
    return (struct kvf_gpu_launch){
        .kernel = fast_encode[bits],
        .n_blocks = saw_encode_units(work, tensors),
        .blocks_a_processor = saw_encode_blocks_a_processor(FAST_DIM),
        .n_threads = SAW_ENCODE_THREADS,
        .shared_bytes = shared_bytes,
        .tensors = tensors,
    };
}

static struct kvf_gpu_launch decode_launch(const struct kvf_gpu_work *work, uint32_t tensors)
{
    uint32_t bits = fast_bits(&work->tensors[tensors == 2 ? 1 : 0]);
    struct kvf_gpu_launch launch = generic_launch(work, "kvf_tq_decode", tensors);
    if (bits != 0) {
        launch.kernel = fast_decode[bits];
        launch.n_threads = saw_decode_threads(bits);
    }
    return launch;
}

/* K and V by one launch if they take the same kernel. */
static uint32_t plan_launches(const struct kvf_gpu_work *work,
                              struct kvf_gpu_launch (*launch)(const struct kvf_gpu_work *work,
                                                              uint32_t tensors),
                              struct kvf_gpu_launch *launches_out)
{
    bool has_k = work->tensors[0].codec == KVF_CODEC_TQ;
    bool has_v = work->has_v != 0 && work->tensors[1].codec == KVF_CODEC_TQ;
    uint32_t n = 0;
    if (has_k) {
        launches_out[n++] = launch(work, 1);
    }
    if (has_v) {
        launches_out[n++] = launch(work, 2);
    }
    if (n == 2 && strcmp(launches_out[0].kernel, launches_out[1].kernel) == 0) {
        launches_out[0] = launch(work, 3);
        n = 1;
    }
    return n;
}

uint32_t kvf_tq_gpu_encode(const struct kvf_gpu_work *work,
                           struct kvf_gpu_launch launches_out[KVF_TQ_GPU_LAUNCHES_MAX])
{
    return plan_launches(work, encode_launch, launches_out);
}

uint32_t kvf_tq_gpu_decode(const struct kvf_gpu_work *work,
                           struct kvf_gpu_launch launches_out[KVF_TQ_GPU_LAUNCHES_MAX])
{
    return plan_launches(work, decode_launch, launches_out);
}
