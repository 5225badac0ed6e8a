/* SPDX-License-Identifier: Apache-2.0
 *
 * device.c: find a GPU, take its context, load kernels, queue them.
 */
#include "gpu/device.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/status.h"

#define SHARED_BYTES_DEFAULT (48u << 10) /* what a kernel may use without being told */

int kvf_gpu_device_result(struct kvf_gpu_device *device, int result, const char *what)
{
    if (result != KVF_CUDA_SUCCESS && result != KVF_CUDA_ERROR_NOT_READY) {
        snprintf(device->text, sizeof(device->text), "%s: %s (%d)", what,
                 kvf_gpu_driver_text(&device->driver, result), result);
    }
    return kvf_gpu_driver_status(result);
}

/* ----------------------------------------------------------------------------------------------
 * Open and close
 */
static void uuid_print(const struct kvf_cuda_uuid *uuid, char *text, size_t text_bytes)
{
    size_t at = (size_t)snprintf(text, text_bytes, "GPU-");

    for (int i = 0; i < 16; i++) {
        bool dash = i == 4 || i == 6 || i == 8 || i == 10;

        at += (size_t)snprintf(text + at, text_bytes - at, "%s%02x", dash ? "-" : "",
                               uuid->bytes[i]);
    }
}

/* Fill in ordinal, device and uuid of the GPU at this place. */
static int device_at(struct kvf_gpu_device *device, int ordinal)
{
    struct kvf_cuda_uuid uuid;
    int result = device->driver.cuDeviceGet(&device->device, ordinal);

    if (result == KVF_CUDA_SUCCESS) {
        result = device->driver.cuDeviceGetUuid(&uuid, device->device);
    }
    if (result == KVF_CUDA_SUCCESS) {
        device->ordinal = ordinal;
        uuid_print(&uuid, device->uuid, sizeof(device->uuid));
    }
    return kvf_gpu_device_result(device, result, "cuDeviceGet");
}

/* By UUID: ordinals depend on CUDA_VISIBLE_DEVICES, which differs between processes. */
static int device_by_uuid(struct kvf_gpu_device *device, const char *uuid)
{
    int count = 0;
    int result = device->driver.cuDeviceGetCount(&count);

    for (int i = 0; result == KVF_CUDA_SUCCESS && i < count; i++) {
        int status = device_at(device, i);

        if (status != KVF_OK || strcasecmp(device->uuid, uuid) == 0) {
            return status;
        }
    }
    snprintf(device->text, sizeof(device->text), "no GPU %.48s among the %d that are visible", uuid,
             count);
    return KVF_ERR_UNSUPPORTED;
}

static int device_find(struct kvf_gpu_device *device, const struct kvf_gpu_choice *choice)
{
    void *current = NULL;
    int number = 0;
    int count = 0;

    if (choice->uuid != NULL) {
        return device_by_uuid(device, choice->uuid);
    }
    if (choice->ordinal >= 0) {
        return device_at(device, choice->ordinal);
    }
    if (device->driver.cuCtxGetCurrent(&current) != KVF_CUDA_SUCCESS || current == NULL ||
        device->driver.cuCtxGetDevice(&number) != KVF_CUDA_SUCCESS ||
        device->driver.cuDeviceGetCount(&count) != KVF_CUDA_SUCCESS) {
        return device_at(device, 0);
    }
    for (int i = 0; i < count; i++) {
        int status = device_at(device, i);

        if (status != KVF_OK || device->device == number) {
            return status;
        }
    }
    return device_at(device, 0);
}

static int facts_fill(struct kvf_gpu_device *device)
{
    int is_mps = 0;
    const struct {
        int attribute;
        int value;
    } wanted[] = {{KVF_CUDA_ATTRIBUTE_PROCESSORS, 0},
                  {KVF_CUDA_ATTRIBUTE_COMPUTE_MAJOR, 0},
                  {KVF_CUDA_ATTRIBUTE_COMPUTE_MINOR, 0},
                  {KVF_CUDA_ATTRIBUTE_SHARED_OPTIN_BYTES, 0},
                  {KVF_CUDA_ATTRIBUTE_READ_ONLY_REGISTER, 0}};
    int values[sizeof(wanted) / sizeof(wanted[0])];
    int result = device->driver.cuDeviceGetName(device->name, sizeof(device->name), device->device);

    for (size_t i = 0; result == KVF_CUDA_SUCCESS && i < sizeof(wanted) / sizeof(wanted[0]); i++) {
        result = device->driver.cuDeviceGetAttribute(&values[i], wanted[i].attribute,
                                                     device->device);
    }
    if (result == KVF_CUDA_SUCCESS) {
        device->processors = values[0];
        device->compute = 10 * values[1] + values[2];
        device->shared_bytes_max = (uint32_t)values[3];
        device->can_pin_read_only = values[4] != 0;
        device->is_mps = device->driver.cuDeviceGetAttribute(&is_mps, KVF_CUDA_ATTRIBUTE_MPS,
                                                             device->device) == KVF_CUDA_SUCCESS &&
                         is_mps != 0;
    }
    return kvf_gpu_device_result(device, result, "cuDeviceGetAttribute");
}

/* The context that the host program uses on this GPU. */
static int context_take(struct kvf_gpu_device *device)
{
    void *current = NULL;
    int number = -1;
    int result;

    if (device->driver.cuCtxGetCurrent(&current) == KVF_CUDA_SUCCESS && current != NULL &&
        device->driver.cuCtxGetDevice(&number) == KVF_CUDA_SUCCESS && number == device->device) {
        device->context = current;
        return KVF_OK;
    }
    result = device->driver.cuDevicePrimaryCtxRetain(&device->context, device->device);
    device->is_primary = result == KVF_CUDA_SUCCESS;
    return kvf_gpu_device_result(device, result, "cuDevicePrimaryCtxRetain");
}

int kvf_gpu_device_open(const struct kvf_gpu_choice *choice, struct kvf_gpu_device **device_out,
                        char *text, size_t text_bytes)
{
    struct kvf_gpu_device *device = calloc(1, sizeof(*device));
    int status;

    if (device == NULL) {
        snprintf(text, text_bytes, "no memory");
        return KVF_ERR_NO_MEMORY;
    }
    status = kvf_gpu_driver_open(&device->driver, device->text, sizeof(device->text));
    if (status == KVF_OK) {
        status = device_find(device, choice);
    }
    if (status == KVF_OK) {
        status = facts_fill(device);
    }
    if (status == KVF_OK) {
        status = context_take(device);
    }
    if (status != KVF_OK) {
        snprintf(text, text_bytes, "%s", device->text);
        kvf_gpu_device_close(device);
        return status;
    }
    *device_out = device;
    return KVF_OK;
}

int kvf_gpu_device_load(struct kvf_gpu_device *device, const void *image)
{
    int status = kvf_gpu_device_enter(device);

    assert(device->n_modules < KVF_GPU_MODULES_MAX);
    if (status == KVF_OK) {
        void **module = &device->modules[device->n_modules];

        status = kvf_gpu_device_result(device, device->driver.cuModuleLoadData(module, image),
                                       "loading the kernels");
        device->n_modules += status == KVF_OK;
        kvf_gpu_device_leave(device);
    }
    return status;
}

struct kvf_gpu_device *kvf_gpu_device_close(struct kvf_gpu_device *device)
{
    if (device == NULL) {
        return NULL;
    }
    if (device->n_modules > 0 && kvf_gpu_device_enter(device) == KVF_OK) {
        for (uint32_t i = 0; i < device->n_modules; i++) {
            (void)device->driver.cuModuleUnload(device->modules[i]);
        }
        kvf_gpu_device_leave(device);
    }
    if (device->is_primary) {
        (void)device->driver.cuDevicePrimaryCtxRelease(device->device);
    }
    free(device);
    return NULL;
}

int kvf_gpu_device_enter(struct kvf_gpu_device *device)
{
    return kvf_gpu_device_result(device, device->driver.cuCtxPushCurrent(device->context),
                                 "cuCtxPushCurrent");
}

void kvf_gpu_device_leave(struct kvf_gpu_device *device)
{
    void *context;

    (void)device->driver.cuCtxPopCurrent(&context);
}

/* ----------------------------------------------------------------------------------------------
 * Kernels
 */
static int kernel_find(struct kvf_gpu_device *device, const char *name,
                       struct kvf_gpu_kernel **kernel_out)
{
    struct kvf_gpu_kernel *kernel;
    int result = KVF_CUDA_ERROR_NOT_FOUND;
    int status;

    for (uint32_t i = 0; i < device->n_kernels; i++) {
        if (strcmp(device->kernels[i].name, name) == 0) {
            *kernel_out = &device->kernels[i];
            return KVF_OK;
        }
    }
    assert(device->n_kernels < KVF_GPU_KERNELS_MAX);
    kernel = &device->kernels[device->n_kernels];
    *kernel = (struct kvf_gpu_kernel){.name = name, .shared_bytes = SHARED_BYTES_DEFAULT};
    for (uint32_t i = 0; i < device->n_modules && result == KVF_CUDA_ERROR_NOT_FOUND; i++) {
        result = device->driver.cuModuleGetFunction(&kernel->function, device->modules[i], name);
    }
    status = kvf_gpu_device_result(device, result, name);
    if (status == KVF_OK) {
        device->n_kernels++;
        *kernel_out = kernel;
    }
    return status;
}

int kvf_gpu_device_launch(struct kvf_gpu_device *device, const struct kvf_gpu_shape *shape,
                          void **parameters, void *stream)
{
    struct kvf_gpu_kernel *kernel = NULL;
    uint32_t n_blocks = shape->n_blocks;
    int status = kernel_find(device, shape->kernel, &kernel);

    if (status == KVF_OK && shape->shared_bytes > kernel->shared_bytes) {
        status = kvf_gpu_device_result(
            device,
            device->driver.cuFuncSetAttribute(kernel->function, KVF_CUDA_FUNCTION_SHARED_BYTES_MAX,
                                              (int)shape->shared_bytes),
            shape->kernel);
        if (status == KVF_OK) {
            kernel->shared_bytes = shape->shared_bytes;
        }
    }
    if (status != KVF_OK) {
        return status;
    }
    if (shape->blocks_a_processor != 0) {
        uint32_t n_blocks_max = shape->blocks_a_processor * (uint32_t)device->processors;

        n_blocks = n_blocks < n_blocks_max ? n_blocks : n_blocks_max;
    }
    return kvf_gpu_device_result(
        device,
        device->driver.cuLaunchKernel(kernel->function, n_blocks, 1, 1, shape->n_threads, 1, 1,
                                      shape->shared_bytes, stream, parameters, NULL),
        shape->kernel);
}

/* ----------------------------------------------------------------------------------------------
 * Streams, events, memory
 */
int kvf_gpu_stream_create(struct kvf_gpu_device *device, enum kvf_gpu_priority priority,
                          void **stream_out)
{
    int least = 0;
    int greatest = 0;
    int result = device->driver.cuCtxGetStreamPriorityRange(&least, &greatest);

    if (result == KVF_CUDA_SUCCESS) {
        result = device->driver.cuStreamCreateWithPriority(
            stream_out, KVF_CUDA_STREAM_NON_BLOCKING,
            priority == KVF_GPU_PRIORITY_LOW ? least : greatest);
    }
    return kvf_gpu_device_result(device, result, "cuStreamCreateWithPriority");
}

int kvf_gpu_event_create(struct kvf_gpu_device *device, void **event_out)
{
    return kvf_gpu_device_result(
        device, device->driver.cuEventCreate(event_out, KVF_CUDA_EVENT_DISABLE_TIMING),
        "cuEventCreate");
}

int kvf_gpu_timed_event_create(struct kvf_gpu_device *device, void **event_out)
{
    return kvf_gpu_device_result(device, device->driver.cuEventCreate(event_out, 0),
                                 "cuEventCreate");
}

int kvf_gpu_event_query(struct kvf_gpu_device *device, void *event)
{
    return kvf_gpu_device_result(device, device->driver.cuEventQuery(event), "work on the GPU");
}

int kvf_gpu_pin(struct kvf_gpu_device *device, void *memory, size_t bytes, bool is_read_only)
{
    unsigned flags = KVF_CUDA_REGISTER_PORTABLE;

    if (is_read_only && !device->can_pin_read_only) {
        snprintf(device->text, sizeof(device->text),
                 "the driver cannot pin memory that is read-only");
        return KVF_ERR_UNSUPPORTED;
    }
    if (is_read_only) {
        flags |= KVF_CUDA_REGISTER_READ_ONLY;
    }
    return kvf_gpu_device_result(device, device->driver.cuMemHostRegister(memory, bytes, flags),
                                 "cuMemHostRegister");
}

void kvf_gpu_unpin(struct kvf_gpu_device *device, void *memory)
{
    (void)kvf_gpu_device_result(device, device->driver.cuMemHostUnregister(memory),
                                "cuMemHostUnregister");
}

int kvf_gpu_host_alloc(struct kvf_gpu_device *device, size_t bytes, void **memory_out,
                       uint64_t *address_out)
{
    void *memory = NULL;
    int result = device->driver.cuMemHostAlloc(&memory, bytes, KVF_CUDA_HOST_PORTABLE);

    if (result == KVF_CUDA_SUCCESS) {
        result = device->driver.cuMemHostGetDevicePointer(address_out, memory, 0);
        if (result == KVF_CUDA_SUCCESS) {
            *memory_out = memory;
        } else {
            (void)device->driver.cuMemFreeHost(memory);
        }
    }
    return kvf_gpu_device_result(device, result, "cuMemHostAlloc");
}

void kvf_gpu_host_free(struct kvf_gpu_device *device, void *memory)
{
    if (memory != NULL) {
        (void)device->driver.cuMemFreeHost(memory);
    }
}
