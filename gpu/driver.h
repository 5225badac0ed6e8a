/* SPDX-License-Identifier: Apache-2.0
 *
 * driver.h: the CUDA driver, opened at run time, so that one binary runs with and without a GPU.
 *
 * A table of the driver's functions under their own names, with types of ours: CUDA's headers are
 * not needed to build. Handles (contexts, modules, functions, streams, events) are void pointers,
 * device addresses uint64_t, results int. Parameters are those of the driver's manual.
 *
 * A table is filled once and read-only afterwards; any thread may use it. The driver is never
 * unloaded, since its threads and exit handlers outlive every table.
 */
#ifndef KVF_GPU_DRIVER_H
#define KVF_GPU_DRIVER_H

#include <stddef.h>
#include <stdint.h>

/* Results that are told apart; all others are failures of a kind that only the text says. */
enum kvf_cuda_result {
    KVF_CUDA_SUCCESS = 0,
    KVF_CUDA_ERROR_INVALID_VALUE = 1,
    KVF_CUDA_ERROR_OUT_OF_MEMORY = 2,
    KVF_CUDA_ERROR_NO_DEVICE = 100,
    KVF_CUDA_ERROR_INVALID_DEVICE = 101,
    KVF_CUDA_ERROR_INVALID_CONTEXT = 201,
    KVF_CUDA_ERROR_MAP_FAILED = 205,
    KVF_CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
    KVF_CUDA_ERROR_NOT_FOUND = 500,
    KVF_CUDA_ERROR_NOT_READY = 600,
    KVF_CUDA_ERROR_ALREADY_REGISTERED = 712,
    KVF_CUDA_ERROR_NOT_SUPPORTED = 801,
};

enum kvf_cuda_device_attribute {
    KVF_CUDA_ATTRIBUTE_PROCESSORS = 16,
    KVF_CUDA_ATTRIBUTE_COMPUTE_MAJOR = 75,
    KVF_CUDA_ATTRIBUTE_COMPUTE_MINOR = 76,
    KVF_CUDA_ATTRIBUTE_SHARED_OPTIN_BYTES = 97,
    KVF_CUDA_ATTRIBUTE_READ_ONLY_REGISTER = 113,
    KVF_CUDA_ATTRIBUTE_MPS = 133, /* not known to drivers before CUDA 12.3 */
};

enum kvf_cuda_flags {
    KVF_CUDA_STREAM_NON_BLOCKING = 1,
    KVF_CUDA_EVENT_BLOCKING_SYNC = 1,
    KVF_CUDA_EVENT_DISABLE_TIMING = 2,
    KVF_CUDA_HOST_PORTABLE = 1,
    KVF_CUDA_REGISTER_PORTABLE = 1,
    KVF_CUDA_REGISTER_READ_ONLY = 8,
    KVF_CUDA_FUNCTION_SHARED_BYTES_MAX = 8, /* of cuFuncSetAttribute */
    KVF_CUDA_FUNCTION_REGISTERS = 4,        /* of cuFuncGetAttribute */
    KVF_CUDA_IPC_LAZY_PEER = 1,
    KVF_CUDA_ALLOCATION_PINNED = 1,
    KVF_CUDA_LOCATION_DEVICE = 1,
    KVF_CUDA_HANDLE_POSIX_FD = 1,
    KVF_CUDA_ACCESS_READ = 1,
    KVF_CUDA_ACCESS_READ_WRITE = 3,
    KVF_CUDA_GRANULARITY_MINIMUM = 0,
};

/* A name of one allocation of cuMemAlloc for other processes. */
struct kvf_cuda_ipc_handle {
    uint8_t bytes[64];
};

struct kvf_cuda_location {
    int type; /* KVF_CUDA_LOCATION_DEVICE */
    int id;   /* ordinal */
};

/* What physical memory is to be like (CUmemAllocationProp). */
struct kvf_cuda_allocation {
    int type;         /* KVF_CUDA_ALLOCATION_PINNED */
    int handle_types; /* by which other processes can get it */
    struct kvf_cuda_location location;
    void *reserved;
    uint8_t flags[8];
};

/* Who may do what with mapped memory (CUmemAccessDesc). */
struct kvf_cuda_access {
    struct kvf_cuda_location location;
    int flags; /* KVF_CUDA_ACCESS_* */
};

struct kvf_cuda_uuid {
    uint8_t bytes[16];
};

/* X(function, symbol in the library, parameters). Symbols carry the version whose parameters these
 * are: the name without it is an older call. */
#define KVF_GPU_DRIVER_FUNCTIONS(X)                                                                \
    X(cuInit, "cuInit", (unsigned flags))                                                          \
    X(cuDriverGetVersion, "cuDriverGetVersion", (int *version))                                    \
    X(cuGetErrorName, "cuGetErrorName", (int result, const char **text))                           \
    X(cuGetErrorString, "cuGetErrorString", (int result, const char **text))                       \
    X(cuDeviceGetCount, "cuDeviceGetCount", (int *count))                                          \
    X(cuDeviceGet, "cuDeviceGet", (int *device, int ordinal))                                      \
    X(cuDeviceGetName, "cuDeviceGetName", (char *name, int bytes, int device))                     \
    X(cuDeviceGetUuid, "cuDeviceGetUuid_v2", (struct kvf_cuda_uuid * uuid, int device))            \
    X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int *value, int attribute, int device))       \
    X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (void **context, int device))          \
    X(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (int device))                     \
    X(cuCtxGetCurrent, "cuCtxGetCurrent", (void **context))                                        \
    X(cuCtxPushCurrent, "cuCtxPushCurrent_v2", (void *context))                                    \
    X(cuCtxPopCurrent, "cuCtxPopCurrent_v2", (void **context))                                     \
    X(cuCtxGetDevice, "cuCtxGetDevice", (int *device))                                             \
    X(cuCtxSynchronize, "cuCtxSynchronize", (void))                                                \
    X(cuCtxGetStreamPriorityRange, "cuCtxGetStreamPriorityRange", (int *least, int *greatest))     \
    X(cuModuleLoadData, "cuModuleLoadData", (void **module, const void *image))                    \
    X(cuModuleUnload, "cuModuleUnload", (void *module))                                            \
    X(cuModuleGetFunction, "cuModuleGetFunction",                                                  \
      (void **function, void *module, const char *name))                                           \
    X(cuFuncGetAttribute, "cuFuncGetAttribute", (int *value, int attribute, void *function))       \
    X(cuFuncSetAttribute, "cuFuncSetAttribute", (void *function, int attribute, int value))        \
    X(cuLaunchKernel, "cuLaunchKernel",                                                            \
      (void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,        \
       unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **parameters, \
       void **extra))                                                                              \
    X(cuMemGetInfo, "cuMemGetInfo_v2", (size_t * free_bytes, size_t * total_bytes))                \
    X(cuMemAlloc, "cuMemAlloc_v2", (uint64_t * address, size_t bytes))                             \
    X(cuMemFree, "cuMemFree_v2", (uint64_t address))                                               \
    X(cuMemGetAddressRange, "cuMemGetAddressRange_v2",                                             \
      (uint64_t * base, size_t * bytes, uint64_t address))                                         \
    X(cuIpcGetMemHandle, "cuIpcGetMemHandle",                                                      \
      (struct kvf_cuda_ipc_handle * handle, uint64_t address))                                     \
    X(cuIpcOpenMemHandle, "cuIpcOpenMemHandle_v2",                                                 \
      (uint64_t * address, struct kvf_cuda_ipc_handle handle, unsigned flags))                     \
    X(cuIpcCloseMemHandle, "cuIpcCloseMemHandle", (uint64_t address))                              \
    X(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity",                              \
      (size_t * bytes, const struct kvf_cuda_allocation *allocation, int option))                  \
    X(cuMemCreate, "cuMemCreate",                                                                  \
      (uint64_t * handle, size_t bytes, const struct kvf_cuda_allocation *allocation,              \
       uint64_t flags))                                                                            \
    X(cuMemRelease, "cuMemRelease", (uint64_t handle))                                             \
    X(cuMemAddressReserve, "cuMemAddressReserve",                                                  \
      (uint64_t * address, size_t bytes, size_t align_bytes, uint64_t wish, uint64_t flags))       \
    X(cuMemAddressFree, "cuMemAddressFree", (uint64_t address, size_t bytes))                      \
    X(cuMemMap, "cuMemMap",                                                                        \
      (uint64_t address, size_t bytes, size_t offset, uint64_t handle, uint64_t flags))            \
    X(cuMemUnmap, "cuMemUnmap", (uint64_t address, size_t bytes))                                  \
    X(cuMemSetAccess, "cuMemSetAccess",                                                            \
      (uint64_t address, size_t bytes, const struct kvf_cuda_access *access, size_t n))            \
    X(cuMemExportToShareableHandle, "cuMemExportToShareableHandle",                                \
      (void *handle_out, uint64_t handle, int type, uint64_t flags))                               \
    X(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle",                            \
      (uint64_t * handle, void *os_handle, int type))                                              \
    X(cuMemRetainAllocationHandle, "cuMemRetainAllocationHandle",                                  \
      (uint64_t * handle, void *address))                                                          \
    X(cuMemGetAllocationPropertiesFromHandle, "cuMemGetAllocationPropertiesFromHandle",            \
      (struct kvf_cuda_allocation * allocation, uint64_t handle))                                  \
    X(cuMemHostAlloc, "cuMemHostAlloc", (void **memory, size_t bytes, unsigned flags))             \
    X(cuMemFreeHost, "cuMemFreeHost", (void *memory))                                              \
    X(cuMemHostRegister, "cuMemHostRegister_v2", (void *memory, size_t bytes, unsigned flags))     \
    X(cuMemHostUnregister, "cuMemHostUnregister", (void *memory))                                  \
    X(cuMemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2",                                   \
      (uint64_t * address, void *memory, unsigned flags))                                          \
    X(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2",                                                   \
      (uint64_t to, const void *from, size_t bytes, void *stream))                                 \
    X(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2",                                                   \
      (void *to, uint64_t from, size_t bytes, void *stream))                                       \
    X(cuMemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2",                                                   \
      (uint64_t to, uint64_t from, size_t bytes, void *stream))                                    \
    X(cuMemsetD8Async, "cuMemsetD8Async",                                                          \
      (uint64_t to, unsigned char value, size_t bytes, void *stream))                              \
    X(cuStreamCreateWithPriority, "cuStreamCreateWithPriority",                                    \
      (void **stream, unsigned flags, int priority))                                               \
    X(cuStreamDestroy, "cuStreamDestroy_v2", (void *stream))                                       \
    X(cuStreamQuery, "cuStreamQuery", (void *stream))                                              \
    X(cuStreamSynchronize, "cuStreamSynchronize", (void *stream))                                  \
    X(cuStreamWaitEvent, "cuStreamWaitEvent", (void *stream, void *event, unsigned flags))         \
    X(cuStreamWriteValue64, "cuStreamWriteValue64_v2",                                             \
      (void *stream, uint64_t address, uint64_t value, unsigned flags))                            \
    X(cuEventCreate, "cuEventCreate", (void **event, unsigned flags))                              \
    X(cuEventDestroy, "cuEventDestroy_v2", (void *event))                                          \
    X(cuEventRecord, "cuEventRecord", (void *event, void *stream))                                 \
    X(cuEventQuery, "cuEventQuery", (void *event))                                                 \
    X(cuEventSynchronize, "cuEventSynchronize", (void *event))                                     \
    X(cuEventElapsedTime, "cuEventElapsedTime", (float *ms, void *start, void *end))

struct kvf_gpu_driver {
    int version; /* 1000 * major + 10 * minor, of CUDA */
#define KVF_GPU_DRIVER_MEMBER(function, symbol, parameters) int(*function) parameters;
    KVF_GPU_DRIVER_FUNCTIONS(KVF_GPU_DRIVER_MEMBER)
#undef KVF_GPU_DRIVER_MEMBER
};

/* Open libcuda.so.1, or the library that $KVFERRY_CUDA_DRIVER names, and start it. text gets one
 * line on failure. KVF_OK; KVF_ERR_UNSUPPORTED: no driver, one that is too old, or no device. */
int kvf_gpu_driver_open(struct kvf_gpu_driver *driver, char *text, size_t text_bytes);

/* The driver's sentence on a result. Never NULL. */
const char *kvf_gpu_driver_text(const struct kvf_gpu_driver *driver, int result);

/* Our status for a result: KVF_OK; KVF_EMPTY: not ready; KVF_ERR_NO_MEMORY; KVF_ERR_INVALID;
 * KVF_ERR_UNSUPPORTED: no such device, no code for it, or not supported there; else KVF_ERR_IO. */
int kvf_gpu_driver_status(int result);

#endif /* KVF_GPU_DRIVER_H */
