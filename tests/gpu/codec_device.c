/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_device.c: see codec_device.h.
 */
#include "tests/gpu/codec_device.h"

#include "codec/codec_gpu_image.h"
#include "gpu/device.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct kvf_gpu_device *device;
static void *stream;
static void *marks[2];
static const char *replaced;  /* NULL: nothing is */
static uint32_t n_blocks_max; /* see codec_device_limit */
static const char *replacement;

static void check(int result, const char *what)
{
    if (kvf_gpu_device_result(device, result, what) != KVF_OK) {
        fail_msg("%s", device->text);
    }
}

bool codec_device_open(void)
{
    static const struct kvf_gpu_choice any = {.ordinal = -1};
    char text[KVF_GPU_TEXT_BYTES];
    if (kvf_gpu_images[0].name == NULL) {
        printf("skipped: built without nvcc\n");
        return false;
    }
    if (kvf_gpu_device_open(&any, &device, text, sizeof(text)) != KVF_OK) {
        printf("skipped: %s\n", text);
        return false;
    }
    for (const struct kvf_gpu_image *image = kvf_gpu_images; image->name != NULL; image++) {
        if (kvf_gpu_device_load(device, image->fatbin) != KVF_OK) {
            printf("%s: %s\n", image->name, device->text);
            abort();
        }
    }
    if (kvf_gpu_device_enter(device) != KVF_OK ||
        kvf_gpu_stream_create(device, KVF_GPU_PRIORITY_HIGH, &stream) != KVF_OK ||
        device->driver.cuEventCreate(&marks[0], 0) != KVF_CUDA_SUCCESS ||
        device->driver.cuEventCreate(&marks[1], 0) != KVF_CUDA_SUCCESS) {
        printf("%s\n", device->text);
        abort();
    }
    printf("device: %s, driver %d\n", device->name, device->driver.version);
    return true;
}

void codec_device_close(void)
{
    (void)device->driver.cuEventDestroy(marks[0]);
    (void)device->driver.cuEventDestroy(marks[1]);
    (void)device->driver.cuStreamDestroy(stream);
    kvf_gpu_device_leave(device);
    device = kvf_gpu_device_close(device);
}

void codec_device_replace(const void *fatbin, const char *kernel, const char *by)
{
    if (kvf_gpu_device_load(device, fatbin) != KVF_OK) {
        fail_msg("%s", device->text);
    }
    replaced = kernel;
    replacement = by;
}

void codec_device_limit(uint32_t n_blocks)
{
    n_blocks_max = n_blocks;
}

void codec_device_restore(void)
{
    replaced = NULL;
}

uint32_t codec_device_shared_bytes(void)
{
    return device->shared_bytes_max;
}

uint64_t codec_device_alloc(size_t bytes)
{
    uint64_t address = 0;
    check(device->driver.cuMemAlloc(&address, bytes), "cuMemAlloc");
    return address;
}

void codec_device_free(uint64_t address)
{
    check(device->driver.cuMemFree(address), "cuMemFree");
}

void codec_device_write(uint64_t to, const void *from, size_t bytes)
{
    check(device->driver.cuMemcpyHtoDAsync(to, from, bytes, stream), "cuMemcpyHtoDAsync");
    codec_device_wait();
}

void codec_device_read(void *to, uint64_t from, size_t bytes)
{
    check(device->driver.cuMemcpyDtoHAsync(to, from, bytes, stream), "cuMemcpyDtoHAsync");
    codec_device_wait();
}

void codec_device_copy(uint64_t to, uint64_t from, size_t bytes)
{
    check(device->driver.cuMemcpyDtoDAsync(to, from, bytes, stream), "cuMemcpyDtoDAsync");
}

void codec_device_launch(const struct kvf_gpu_work *work, const struct kvf_gpu_launch *launches,
                         uint32_t n_launches)
{
    struct kvf_gpu_work copy = *work;
    for (uint32_t i = 0; i < n_launches; i++) {
        struct kvf_gpu_shape shape = {
            .kernel = replaced != NULL && strcmp(launches[i].kernel, replaced) == 0
                          ? replacement
                          : launches[i].kernel,
            .n_blocks = launches[i].n_blocks,
            .blocks_a_processor = launches[i].blocks_a_processor,
            .n_threads = launches[i].n_threads,
            .shared_bytes = launches[i].shared_bytes,
        };
        if (n_blocks_max != 0 && shape.blocks_a_processor != 0 && shape.n_blocks > n_blocks_max) {
            shape.n_blocks = n_blocks_max;
        }
        uint32_t tensors = launches[i].tensors;
        void *parameters[] = {&copy, &tensors};
        if (kvf_gpu_device_launch(device, &shape, parameters, stream) != KVF_OK) {
            fail_msg("%s: %s", shape.kernel, device->text);
        }
    }
}

static void launch_other(void *work, const char *kernel, uint32_t n_blocks, uint32_t n_threads)
{
    const struct kvf_gpu_shape shape = {
        .kernel = kernel, .n_blocks = n_blocks, .n_threads = n_threads};
    void *parameters[] = {work};
    if (kvf_gpu_device_launch(device, &shape, parameters, stream) != KVF_OK) {
        fail_msg("%s: %s", kernel, device->text);
    }
}

void codec_device_rebuild(const struct kvf_gpu_rebuild *work, const char *kernel)
{
    struct kvf_gpu_rebuild copy = *work;
    launch_other(&copy, kernel, work->n_pieces * work->piece_tokens, KVF_GPU_REBUILD_THREADS);
}

void codec_device_latent(const struct kvf_gpu_latent_work *work, const char *kernel)
{
    struct kvf_gpu_latent_work copy = *work;
    launch_other(&copy, kernel, kvf_gpu_latent_blocks(work->n), KVF_GPU_LATENT_THREADS);
}

void codec_device_wait(void)
{
    check(device->driver.cuStreamSynchronize(stream), "cuStreamSynchronize");
}

void codec_device_mark(int which)
{
    check(device->driver.cuEventRecord(marks[which], stream), "cuEventRecord");
}

float codec_device_elapsed_ms(void)
{
    float ms = 0;
    check(device->driver.cuEventSynchronize(marks[1]), "cuEventSynchronize");
    check(device->driver.cuEventElapsedTime(&ms, marks[0], marks[1]), "cuEventElapsedTime");
    return ms;
}
