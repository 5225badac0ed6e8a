/* SPDX-License-Identifier: Apache-2.0
 *
 * fake_image.c: an image for the fake driver, which looks at kernels' names only; in the place of
 * those that nvcc makes, if it is there.
 */
#include "codec/codec_gpu_image.h"

static const uint8_t bytes[16];

const struct kvf_gpu_image kvf_gpu_images[] = {
    {"fake", bytes, bytes + sizeof(bytes)},
    {0},
};
