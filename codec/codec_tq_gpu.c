/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_tq_gpu.c: which kernels of codec_tq.cu, and in what shape. Kernels on tensor cores exist
 * for bf16 heads of 128 that are rotated as a whole, others for those that are split; the generic
 * ones do all else.
 */
#include "codec/codec_tq_gpu.h"

#include "codec/codec_tq_shape.h"

#include "kvferry.h"

#include <string.h>

enum {
    FAST_DIM = 128,
    SPLIT_FIRST = 32, /* channels of the first rotation */
};

/* Kernels that are not the generic ones, by bits. */
struct fast_kernels {
    const char *encode[5];
    const char *decode[5];
};

static const struct fast_kernels whole = {
    {[2] = "kvf_tq_encode_128_2", [3] = "kvf_tq_encode_128_3", [4] = "kvf_tq_encode_128_4"},
    {[2] = "kvf_tq_decode_128_2", [3] = "kvf_tq_decode_128_3", [4] = "kvf_tq_decode_128_4"},
};
static const struct fast_kernels split = {
    {[2] = "kvf_tq_encode_split_2", [3] = "kvf_tq_encode_split_3"},
    {[2] = "kvf_tq_decode_split_2", [3] = "kvf_tq_decode_split_3"},
};

/* NULL: the generic kernels. */
static const struct fast_kernels *fast_kernels_of(const struct kvf_gpu_tensor *tensor)
{
    const struct kvf_gpu_rotation *rotations = tensor->rotations;
    if (tensor->dtype != KVF_DTYPE_BF16 || tensor->group != FAST_DIM ||
        (tensor->flags & KVF_TENSOR_RESIDUAL) != 0) {
        return NULL;
    }
    if (tensor->n_rotations == 1) {
        return rotations[0].order == FAST_DIM ? &whole : NULL;
    }
    bool is_rotated = rotations[0].order == SPLIT_FIRST &&
                      rotations[1].order == FAST_DIM - SPLIT_FIRST;
    return is_rotated ? &split : NULL;
}

static bool has_room(const struct kvf_gpu_work *work, uint32_t bytes)
{
    return work->shared_bytes_max == 0 || bytes <= work->shared_bytes_max;
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
    const struct fast_kernels *fast = fast_kernels_of(tensor);
    uint32_t shared_bytes = tq_encode_shared_bytes(work, FAST_DIM);
    if (fast == &split && has_room(work, KVF_TQ_SPLIT_SHARED_BYTES)) {
        struct kvf_gpu_launch launch = generic_launch(work, fast->encode[tensor->bits], tensors);
        launch.shared_bytes = KVF_TQ_SPLIT_SHARED_BYTES;
        return launch;
    }
    if (fast != &whole || !has_room(work, shared_bytes) || !saw_encode_takes_mean(work, tensor)) {
        return generic_launch(work, "kvf_tq_encode", tensors);
    }
    return (struct kvf_gpu_launch){
        .kernel = fast->encode[tensor->bits],
        .n_blocks = saw_encode_units(work, tensors),
        .blocks_a_processor = saw_encode_blocks_a_processor(FAST_DIM),
        .n_threads = SAW_ENCODE_THREADS,
        .shared_bytes = shared_bytes,
        .tensors = tensors,
    };
}

static struct kvf_gpu_launch decode_launch(const struct kvf_gpu_work *work, uint32_t tensors)
{
    const struct kvf_gpu_tensor *tensor = &work->tensors[tensors == 2 ? 1 : 0];
    const struct fast_kernels *fast = fast_kernels_of(tensor);
    struct kvf_gpu_launch launch = generic_launch(work, "kvf_tq_decode", tensors);
    if (fast == &split) {
        launch.kernel = fast->decode[tensor->bits];
    }
    if (fast == &whole) {
        launch.kernel = fast->decode[tensor->bits];
        launch.n_threads = saw_decode_threads(tensor->bits);
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
