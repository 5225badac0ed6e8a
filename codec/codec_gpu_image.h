/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_gpu_image.h: the compiled kernels, as bytes for the CUDA driver (cuModuleLoadData). The
 * build makes them, see gpu.cmake.
 */
#ifndef KVF_CODEC_CODEC_GPU_IMAGE_H
#define KVF_CODEC_CODEC_GPU_IMAGE_H

#include <stdint.h>

/* All kernels of one .cu. Names of kernels are unique over all images. */
struct kvf_gpu_image {
    const char *name; /* of the source, without .cu */
    const uint8_t *fatbin;
    const uint8_t *end; /* one past the last byte */
};

/* NULL-terminated by name; empty in a build without nvcc. */
extern const struct kvf_gpu_image kvf_gpu_images[];

#endif /* KVF_CODEC_CODEC_GPU_IMAGE_H */
