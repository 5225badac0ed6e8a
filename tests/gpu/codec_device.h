/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_device.h: a GPU on which tests run the codecs' kernels: memory, launches, times. One device
 * at a time; whatever fails ends the test.
 */
#ifndef KVF_TESTS_GPU_CODEC_DEVICE_H
#define KVF_TESTS_GPU_CODEC_DEVICE_H

#include "codec/codec_gpu_host.h"
#include "codec/codec_latent.h"
#include "codec/codec_rebuild.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Find a GPU and load the kernels. False, and the reason on stdout, where there is none. */
bool codec_device_open(void);
void codec_device_close(void);

/* Load more kernels; from now on launch the second one where the first is asked for. */
void codec_device_replace(const void *fatbin, const char *kernel, const char *by);
/* As it was. */
void codec_device_restore(void);

/* Launch kernels whose thread blocks stay with no more than these, each of which then has much to
 * do; 0: as many as the device has room for. */
void codec_device_limit(uint32_t n_blocks);

/* Shared memory that a thread block may have. */
uint32_t codec_device_shared_bytes(void);

/* Memory of the device. Addresses lie on 256 bytes. */
uint64_t codec_device_alloc(size_t bytes);
void codec_device_free(uint64_t address);
void codec_device_write(uint64_t to, const void *from, size_t bytes);
void codec_device_read(void *to, uint64_t from, size_t bytes);
void codec_device_copy(uint64_t to, uint64_t from, size_t bytes); /* returns before it is done */

/* Queue launches, in order. */
void codec_device_launch(const struct kvf_gpu_work *work, const struct kvf_gpu_launch *launches,
                         uint32_t n_launches);
void codec_device_wait(void);

/* Queue one of the kernels that make K and V of a product. */
void codec_device_rebuild(const struct kvf_gpu_rebuild *work, const char *kernel);

/* Queue one of the kernels between latents and X. */
void codec_device_latent(const struct kvf_gpu_latent_work *work, const char *kernel);

/* Between two marks, in ms, of what was queued between them. */
void codec_device_mark(int which); /* 0 or 1 */
float codec_device_elapsed_ms(void);

#endif /* KVF_TESTS_GPU_CODEC_DEVICE_H */
