/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw_gpu.c: which kernels of codec_saw.cu, and in what shape. Kernels on tensor cores exist
 * for bf16 heads of 64, 128 and 256 that are rotated as a whole, with three clip ratios to try for
 * heads of 128, and with zeros in place of lo for these; the generic ones do all else.
 */
#include "codec/codec_saw_gpu.h"

#include "codec/codec_saw.h"
#include "codec/codec_saw_shape.h"

#include "kvferry.h"

#include <stddef.h>
#include <string.h>

/* Kernels of one dim, by what is done and by bits. */
struct fast_kernels {
    uint32_t dim;
    const char *encode[9];
    const char *decode[9];
    const char *search[9];       /* encode with SAW_SEARCH_RATIOS clip ratios */
    const char *encode_zeros[9]; /* with zeros in place of lo, and any number of clip ratios */
    const char *zeros[9];        /* decode with zeros */
};

#define KERNELS_OF(what, dim)                                                                      \
    {                                                                                              \
        [2] = "kvf_saw_" what "_" dim "_2", [3] = "kvf_saw_" what "_" dim "_3",                    \
        [4] = "kvf_saw_" what "_" dim "_4", [5] = "kvf_saw_" what "_" dim "_5",                    \
        [6] = "kvf_saw_" what "_" dim "_6", [8] = "kvf_saw_" what "_" dim "_8"                     \
    }

static const struct fast_kernels fast_kernels[] = {
    {64, KERNELS_OF("encode", "64"), KERNELS_OF("decode", "64"), {NULL}, {NULL}, {NULL}},
    {128,
     KERNELS_OF("encode", "128"),
     KERNELS_OF("decode", "128"),
     {[2] = "kvf_saw_search_128_2", [3] = "kvf_saw_search_128_3"},
     {[2] = "kvf_saw_encode_zeros_128_2",
      [3] = "kvf_saw_encode_zeros_128_3",
      [4] = "kvf_saw_encode_zeros_128_4"},
     {[2] = "kvf_saw_decode_zeros_128_2",
      [3] = "kvf_saw_decode_zeros_128_3",
      [4] = "kvf_saw_decode_zeros_128_4"}},
    {256, KERNELS_OF("encode", "256"), KERNELS_OF("decode", "256"), {NULL}, {NULL}, {NULL}},
};

/* A smaller share of the range could give codes, before they are clamped, of more than 15 bits. */
#define CLIP_RATIO_MIN 0.125f

/* NULL: the generic kernels. */
static const struct fast_kernels *fast_kernels_of(const struct kvf_gpu_tensor *tensor)
{
    if (tensor->dtype != KVF_DTYPE_BF16 || tensor->bits > 8 || tensor->rot_order != tensor->group ||
        tensor->clip_ratio < CLIP_RATIO_MIN) {
        return NULL;
    }
    for (size_t i = 0; i < sizeof(fast_kernels) / sizeof(fast_kernels[0]); i++) {
        if (fast_kernels[i].dim == tensor->group && fast_kernels[i].encode[tensor->bits] != NULL) {
            return &fast_kernels[i];
        }
    }
    return NULL;
}

/* Does a thread block of a device have so much shared memory? */
static bool has_room(const struct kvf_gpu_work *work, uint32_t bytes)
{
    return work->shared_bytes_max == 0 || bytes <= work->shared_bytes_max;
}

/* NULL: the generic kernel. */
static const char *fast_encode_of(const struct kvf_gpu_tensor *tensor)
{
    const struct fast_kernels *fast = fast_kernels_of(tensor);
    if (tensor->zero_kind > KVF_ZERO_F16_LO) {
        return NULL;
    }
    if (fast == NULL || tensor->n_clips == 0) {
        return fast != NULL ? fast->encode[tensor->bits] : NULL;
    }
    /* (S) i is at most this, rounded, and one more */
    float steps = 8.0f * (float)((1u << tensor->bits) - 1) / tensor->clip_ratios[0];
    bool is_known = tensor->n_clips == SAW_SEARCH_RATIOS && steps < SAW_SEARCH_STEPS - 2 &&
                    tensor->clip_ratios[tensor->n_clips - 1] >= CLIP_RATIO_MIN;
    return is_known ? fast->search[tensor->bits] : NULL;
}

/* NULL: the generic kernel. */
static const char *fast_decode_of(const struct kvf_gpu_tensor *tensor)
{
    const struct fast_kernels *fast = fast_kernels_of(tensor);
    if (fast == NULL) {
        return NULL;
    }
    return tensor->zero_kind > KVF_ZERO_F16_LO ? fast->zeros[tensor->bits]
                                               : fast->decode[tensor->bits];
}

static uint32_t fast_encode_bytes(const struct kvf_gpu_work *work,
                                  const struct kvf_gpu_tensor *tensor)
{
    return tensor->n_clips != 0 ? saw_search_shared_bytes(work, tensor->group)
                                : saw_encode_shared_bytes(work, tensor->group);
}

bool kvf_saw_gpu_knows_ratios(const struct kvf_gpu_tensor *tensor)
{
    static const uint16_t lists[][KVF_GPU_CLIPS_MAX] = {KVF_SAW_WIDE_4, KVF_SAW_WIDE_2};
    bool knows = tensor->n_clips == 0;
    for (size_t l = 0; l < sizeof(lists) / sizeof(lists[0]) && !knows; l++) {
        knows = tensor->n_clips == KVF_GPU_CLIPS_MAX && tensor->bits >= 2 && tensor->bits <= 4;
        for (uint32_t i = 0; i < KVF_GPU_CLIPS_MAX; i++) {
            float ratio = (float)lists[l][i] * (1.0f / KVF_BLOCK_CLIP_ONE);
            knows = knows && tensor->clip_ratios[i] == ratio;
        }
    }
    return knows;
}

/* With zeros; kernel NULL: not by the fast one. */
static struct kvf_gpu_launch zeros_launch(const struct kvf_gpu_work *work, uint32_t tensors)
{
    const struct kvf_gpu_tensor *tensor = &work->tensors[tensors == 2 ? 1 : 0];
    const struct fast_kernels *fast = fast_kernels_of(tensor);
    bool is_known = fast != NULL && tensor->zero_kind > KVF_ZERO_F16_LO &&
                    (tensor->flags & (KVF_TENSOR_CENTER | KVF_TENSOR_CENTER_PROFILE)) == 0 &&
                    kvf_saw_gpu_knows_ratios(tensor);
    return (struct kvf_gpu_launch){
        .kernel = is_known ? fast->encode_zeros[tensor->bits] : NULL,
        .n_blocks = work->n_parts * saw_rows_max(work, tensors),
        .n_threads = SAW_ZEROS_THREADS,
        .tensors = tensors,
    };
}

static struct kvf_gpu_launch encode_launch(const struct kvf_gpu_work *work, uint32_t tensors)
{
    const struct kvf_gpu_tensor *tensor = &work->tensors[tensors == 2 ? 1 : 0];
    const char *fast = fast_encode_of(tensor);
    const struct kvf_gpu_launch zeros = zeros_launch(work, tensors);
    if (zeros.kernel != NULL) {
        return zeros;
    }
    if (fast == NULL || !has_room(work, fast_encode_bytes(work, tensor)) ||
        !saw_encode_takes_mean(work, tensor)) {
        return (struct kvf_gpu_launch){
            .kernel = "kvf_saw_encode",
            .n_blocks = work->n_parts * saw_rows_max(work, tensors),
            .n_threads = SAW_GENERIC_THREADS,
            .tensors = tensors,
        };
    }
    return (struct kvf_gpu_launch){
        .kernel = fast,
        .n_blocks = saw_encode_units(work, tensors),
        .blocks_a_processor = saw_encode_blocks_a_processor(tensor->group),
        .n_threads = SAW_ENCODE_THREADS,
        .shared_bytes = fast_encode_bytes(work, tensor),
        .tensors = tensors,
    };
}

static struct kvf_gpu_launch decode_launch(const struct kvf_gpu_work *work, uint32_t tensors)
{
    const struct kvf_gpu_tensor *tensor = &work->tensors[tensors == 2 ? 1 : 0];
    const char *fast = fast_decode_of(tensor);
    uint32_t n_rows = work->n_parts * saw_rows_max(work, tensors);
    if (fast == NULL) {
        return (struct kvf_gpu_launch){
            .kernel = "kvf_saw_decode",
            .n_blocks = n_rows,
            .n_threads = SAW_GENERIC_THREADS,
            .tensors = tensors,
        };
    }
    return (struct kvf_gpu_launch){
        .kernel = fast,
        .n_blocks = n_rows,
        .n_threads = saw_decode_threads(tensor->bits),
        .tensors = tensors,
    };
}

static uint32_t saw_tensors(const struct kvf_gpu_work *work)
{
    uint32_t tensors = work->tensors[0].codec == KVF_CODEC_SAW ? 1 : 0;
    return tensors | (work->has_v != 0 && work->tensors[1].codec == KVF_CODEC_SAW ? 2 : 0);
}

static uint32_t plan_launches(const struct kvf_gpu_work *work,
                              struct kvf_gpu_launch (*launch)(const struct kvf_gpu_work *work,
                                                              uint32_t tensors),
                              struct kvf_gpu_launch *launches_out)
{
    uint32_t tensors = saw_tensors(work);
    const struct kvf_gpu_tensor *both = work->tensors;
    if (tensors == 3 && strcmp(launch(work, 1).kernel, launch(work, 2).kernel) == 0 &&
        memcmp(both[0].clip_ratios, both[1].clip_ratios, sizeof(both[0].clip_ratios)) == 0) {
        launches_out[0] = launch(work, 3);
        return 1;
    }
    uint32_t n = 0;
    for (uint32_t bit = 1; bit <= 2; bit *= 2) {
        if ((tensors & bit) != 0) {
            launches_out[n++] = launch(work, bit);
        }
    }
    return n;
}

uint32_t kvf_saw_gpu_encode(const struct kvf_gpu_work *work,
                            struct kvf_gpu_launch launches_out[KVF_SAW_GPU_LAUNCHES_MAX])
{
    return plan_launches(work, encode_launch, launches_out);
}

uint32_t kvf_saw_gpu_decode(const struct kvf_gpu_work *work,
                            struct kvf_gpu_launch launches_out[KVF_SAW_GPU_LAUNCHES_MAX])
{
    return plan_launches(work, decode_launch, launches_out);
}
