/* SPDX-License-Identifier: Apache-2.0
 *
 * import.c: device memory of one process, opened in another.
 */
#include "gpu/import.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fd.h"
#include "base/status.h"

/* What can be done about memory that cannot be shared. */
#define CURE_EXPORT                                                                                \
    "allocate pages with cuMemAlloc, or with cuMemCreate and a POSIX descriptor as handle type; "  \
    "or use path ENGINE"
#define CURE_IMPORT                                                                                \
    "give both containers the same device nodes (with DRA: one claim), and processes of "          \
    "different numbers (run the daemon with an init)"

/* Keep a line that says what to do. Returns status. */
static int refuse(struct kvf_gpu_device *device, int status, const char *what, const char *cure)
{
    (void)snprintf(device->text, sizeof(device->text), "%.110s: %s", what, cure);
    return status;
}

static int refuse_result(struct kvf_gpu_device *device, int result, const char *what,
                         const char *cure)
{
    char line[KVF_GPU_TEXT_BYTES];

    (void)snprintf(line, sizeof(line), "%s (%s, %d)", what,
                   kvf_gpu_driver_text(&device->driver, result), result);
    return refuse(device, KVF_ERR_UNSUPPORTED, line, cure);
}

/* ----------------------------------------------------------------------------------------------
 * Out
 */

/* Append the piece that lies at an address. */
static int piece_export(struct kvf_gpu_device *device, uint64_t handle, uint64_t bytes,
                        struct kvf_gpu_export *export)
{
    struct kvf_cuda_allocation allocation = {0};
    struct kvf_gpu_export_piece *pieces;
    int fd = -1;
    int result = device->driver.cuMemGetAllocationPropertiesFromHandle(&allocation, handle);

    if (result == KVF_CUDA_SUCCESS && (allocation.handle_types & KVF_CUDA_HANDLE_POSIX_FD) == 0) {
        return refuse(device, KVF_ERR_UNSUPPORTED, "mapped memory without a descriptor",
                      CURE_EXPORT);
    }
    if (result == KVF_CUDA_SUCCESS) {
        result = device->driver.cuMemExportToShareableHandle(&fd, handle, KVF_CUDA_HANDLE_POSIX_FD,
                                                             0);
    }
    if (result != KVF_CUDA_SUCCESS) {
        return refuse_result(device, result, "no descriptor for mapped memory", CURE_EXPORT);
    }
    (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
    pieces = realloc(export->pieces, (export->n_pieces + 1) * sizeof(*pieces));
    if (pieces == NULL) {
        kvf_fd_close(&fd);
        return KVF_ERR_NO_MEMORY;
    }
    export->pieces = pieces;
    pieces[export->n_pieces++] = (struct kvf_gpu_export_piece){bytes, fd};
    return KVF_OK;
}

/* Pieces from the one that holds address on, until `end`. */
static int pieces_export(struct kvf_gpu_device *device, uint64_t address, uint64_t end,
                         struct kvf_gpu_export *export)
{
    uint64_t next = address;
    int status = KVF_OK;

    while (status == KVF_OK && (export->n_pieces == 0 || next < end)) {
        uint64_t base = 0;
        uint64_t handle = 0;
        size_t bytes = 0;

        if (export->n_pieces == KVF_GPU_EXPORT_PIECES_MAX) {
            return refuse(device, KVF_ERR_TOO_LARGE, "pages lie in more pieces than can be shared",
                          "switch expandable segments off, or use path ENGINE");
        }
        if (device->driver.cuMemGetAddressRange(&base, &bytes, next) != KVF_CUDA_SUCCESS ||
            device->driver.cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)base) !=
                KVF_CUDA_SUCCESS) {
            return refuse(device, KVF_ERR_INVALID, "an address in the pages has no memory",
                          "register what is mapped");
        }
        status = piece_export(device, handle, bytes, export);
        (void)device->driver.cuMemRelease(handle);
        if (export->n_pieces == 1) {
            export->base = base;
        }
        next = base + bytes;
    }
    export->bytes = next - export->base;
    return status;
}

int kvf_gpu_export_open(struct kvf_gpu_device *device, uint64_t address, uint64_t bytes,
                        struct kvf_gpu_export *export_out)
{
    struct kvf_gpu_export export = {0};
    uint64_t handle = 0;
    size_t allocation_bytes = 0;
    int status = KVF_OK;
    int result = device->driver.cuMemGetAddressRange(&export.base, &allocation_bytes, address);

    if (result != KVF_CUDA_SUCCESS) {
        return refuse(device, KVF_ERR_INVALID, "an address in the pages is none of the device's",
                      "register what cuMemAlloc or cuMemMap gave");
    }
    export.is_fd = device->driver.cuMemRetainAllocationHandle(
                       &handle, (void *)(uintptr_t) export.base) == KVF_CUDA_SUCCESS;
    if (export.is_fd) {
        (void)device->driver.cuMemRelease(handle);
        status = pieces_export(device, address, address + bytes, &export);
    } else {
        export.bytes = allocation_bytes;
        export.n_pieces = 1;
        result = device->driver.cuIpcGetMemHandle(&export.handle, export.base);
        if (result != KVF_CUDA_SUCCESS) {
            status = refuse_result(device, result, "no handle for this memory", CURE_EXPORT);
        } else if (address + bytes > export.base + export.bytes) {
            status = refuse(device, KVF_ERR_INVALID, "a layer reaches beyond its allocation",
                            "register what was allocated");
        }
    }
    if (status != KVF_OK) {
        kvf_gpu_export_close(&export);
        return status;
    }
    *export_out = export;
    return KVF_OK;
}

void kvf_gpu_export_close(struct kvf_gpu_export *export)
{
    for (uint32_t i = 0; export->pieces != NULL && i < export->n_pieces; i++) {
        kvf_fd_close(&export->pieces[i].fd);
    }
    free(export->pieces);
    *export = (struct kvf_gpu_export){0};
}

/* ----------------------------------------------------------------------------------------------
 * In
 */
int kvf_gpu_import_handle(struct kvf_gpu_device *device, const struct kvf_cuda_ipc_handle *handle,
                          uint64_t bytes, struct kvf_gpu_import *import_out)
{
    struct kvf_gpu_import import = {.bytes = bytes, .is_open = true};
    uint64_t base = 0;
    size_t found_bytes = 0;
    int result = device->driver.cuIpcOpenMemHandle(&import.address, *handle,
                                                   KVF_CUDA_IPC_LAZY_PEER);

    if (result != KVF_CUDA_SUCCESS) {
        return refuse_result(device, result, "the handle does not open", CURE_IMPORT);
    }
    result = device->driver.cuMemGetAddressRange(&base, &found_bytes, import.address);
    if (result != KVF_CUDA_SUCCESS || base != import.address || found_bytes < bytes) {
        (void)device->driver.cuIpcCloseMemHandle(import.address);
        return refuse(device, KVF_ERR_MISMATCH, "the allocation is smaller than was said",
                      "register what was allocated");
    }
    *import_out = import;
    return KVF_OK;
}

static struct kvf_cuda_location here(const struct kvf_gpu_device *device)
{
    return (struct kvf_cuda_location){KVF_CUDA_LOCATION_DEVICE, device->device};
}

int kvf_gpu_import_begin(struct kvf_gpu_device *device, uint64_t bytes,
                         struct kvf_gpu_import *import_out)
{
    const struct kvf_cuda_allocation allocation = {.type = KVF_CUDA_ALLOCATION_PINNED,
                                                   .handle_types = KVF_CUDA_HANDLE_POSIX_FD,
                                                   .location = here(device)};
    struct kvf_gpu_import import = {.bytes = bytes, .is_fd = true};
    size_t unit_bytes = 0;
    int result = device->driver.cuMemGetAllocationGranularity(&unit_bytes, &allocation,
                                                              KVF_CUDA_GRANULARITY_MINIMUM);

    if (result != KVF_CUDA_SUCCESS || unit_bytes == 0 || bytes % unit_bytes != 0) {
        return refuse(device, KVF_ERR_INVALID, "mapped memory of a size that is none",
                      "register what cuMemMap gave");
    }
    result = device->driver.cuMemAddressReserve(&import.address, bytes, 0, 0, 0);
    if (result != KVF_CUDA_SUCCESS) {
        (void)refuse_result(device, result, "no addresses for the engine's memory",
                            "register less, or use path ENGINE");
        return KVF_ERR_NO_MEMORY;
    }
    *import_out = import;
    return KVF_OK;
}

/* Everything is mapped: let kernels and copies use it. */
static int import_open(struct kvf_gpu_device *device, struct kvf_gpu_import *import)
{
    const struct kvf_cuda_access access = {here(device), KVF_CUDA_ACCESS_READ_WRITE};
    int result = device->driver.cuMemSetAccess(import->address, import->bytes, &access, 1);

    if (result != KVF_CUDA_SUCCESS) {
        return refuse_result(device, result, "no access to the engine's memory", CURE_IMPORT);
    }
    import->is_open = true;
    return KVF_OK;
}

int kvf_gpu_import_piece(struct kvf_gpu_device *device, struct kvf_gpu_import *import, int fd,
                         uint64_t bytes)
{
    struct kvf_cuda_allocation allocation = {0};
    uint64_t handle = 0;
    int status = KVF_OK;
    int result;

    if (!import->is_fd || bytes == 0 || bytes > import->bytes - import->mapped_bytes) {
        return refuse(device, KVF_ERR_INVALID, "more memory than was said", "register it again");
    }
    result = device->driver.cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd,
                                                           KVF_CUDA_HANDLE_POSIX_FD);
    if (result != KVF_CUDA_SUCCESS) {
        return refuse_result(device, result, "the descriptor does not open", CURE_IMPORT);
    }
    result = device->driver.cuMemGetAllocationPropertiesFromHandle(&allocation, handle);
    if (result == KVF_CUDA_SUCCESS && (allocation.location.type != KVF_CUDA_LOCATION_DEVICE ||
                                       allocation.location.id != device->device)) {
        status = refuse(device, KVF_ERR_MISMATCH, "the pages are not on this GPU",
                        "open the handle for the GPU that they are on");
    } else if (result == KVF_CUDA_SUCCESS) {
        result = device->driver.cuMemMap(import->address + import->mapped_bytes, bytes, 0, handle,
                                         0);
    }
    (void)device->driver.cuMemRelease(handle); /* a mapping keeps the memory */
    if (result != KVF_CUDA_SUCCESS) {
        status = refuse_result(device, result, "the memory cannot be mapped", CURE_IMPORT);
    }
    if (status == KVF_OK) {
        import->mapped_bytes += bytes;
        status = import->mapped_bytes == import->bytes ? import_open(device, import) : KVF_OK;
    }
    return status;
}

void kvf_gpu_import_close(struct kvf_gpu_device *device, struct kvf_gpu_import *import)
{
    if (import->address == 0) {
        return;
    }
    if (!import->is_fd) {
        (void)device->driver.cuIpcCloseMemHandle(import->address);
    } else {
        if (import->mapped_bytes != 0) {
            (void)device->driver.cuMemUnmap(import->address, import->mapped_bytes);
        }
        (void)device->driver.cuMemAddressFree(import->address, import->bytes);
    }
    *import = (struct kvf_gpu_import){0};
}
