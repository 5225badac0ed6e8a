/* SPDX-License-Identifier: Apache-2.0
 *
 * driver.c: fill the table, put results into words.
 */
#include "gpu/driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"

static const struct {
    const char *symbol;
    size_t offset;
} functions[] = {
#define FUNCTION_ENTRY(function, symbol, parameters)                                               \
    {symbol, offsetof(struct kvf_gpu_driver, function)},
    KVF_GPU_DRIVER_FUNCTIONS(FUNCTION_ENTRY)
#undef FUNCTION_ENTRY
};

int kvf_gpu_driver_open(struct kvf_gpu_driver *driver, char *text, size_t text_bytes)
{
    const char *path = getenv("KVFERRY_CUDA_DRIVER");
    void *library;
    int count = 0;
    int result;

    *driver = (struct kvf_gpu_driver){0};
    if (path == NULL || path[0] == 0) {
        path = "libcuda.so.1";
    }
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library == NULL) {
        snprintf(text, text_bytes, "no CUDA driver: %s", dlerror());
        return KVF_ERR_UNSUPPORTED;
    }
    for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++) {
        void *address = dlsym(library, functions[i].symbol);

        if (address == NULL) {
            snprintf(text, text_bytes, "the CUDA driver is too old: %s has no %s", path,
                     functions[i].symbol);
            (void)dlclose(library);
            return KVF_ERR_UNSUPPORTED;
        }
        memcpy((char *)driver + functions[i].offset, &address, sizeof(address));
    }
    (void)dlclose(library); /* it stays, by RTLD_NODELETE */
    result = driver->cuInit(0);
    if (result == KVF_CUDA_SUCCESS) {
        result = driver->cuDriverGetVersion(&driver->version);
    }
    if (result == KVF_CUDA_SUCCESS) {
        result = driver->cuDeviceGetCount(&count);
    }
    if (result == KVF_CUDA_SUCCESS && count == 0) {
        result = KVF_CUDA_ERROR_NO_DEVICE;
    }
    if (result != KVF_CUDA_SUCCESS) {
        snprintf(text, text_bytes, "the CUDA driver does not start: %s",
                 kvf_gpu_driver_text(driver, result));
        return KVF_ERR_UNSUPPORTED;
    }
    return KVF_OK;
}

const char *kvf_gpu_driver_text(const struct kvf_gpu_driver *driver, int result)
{
    const char *text = NULL;

    if (driver->cuGetErrorString(result, &text) != KVF_CUDA_SUCCESS || text == NULL) {
        return "a failure that the driver has no words for";
    }
    return text;
}

int kvf_gpu_driver_status(int result)
{
    switch (result) {
    case KVF_CUDA_SUCCESS:
        return KVF_OK;
    case KVF_CUDA_ERROR_NOT_READY:
        return KVF_EMPTY;
    case KVF_CUDA_ERROR_OUT_OF_MEMORY:
        return KVF_ERR_NO_MEMORY;
    case KVF_CUDA_ERROR_INVALID_VALUE:
        return KVF_ERR_INVALID;
    case KVF_CUDA_ERROR_NO_DEVICE:
    case KVF_CUDA_ERROR_INVALID_DEVICE:
    case KVF_CUDA_ERROR_NO_BINARY_FOR_GPU:
    case KVF_CUDA_ERROR_NOT_FOUND:
    case KVF_CUDA_ERROR_NOT_SUPPORTED:
        return KVF_ERR_UNSUPPORTED;
    default:
        return KVF_ERR_IO;
    }
}
