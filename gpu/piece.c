/* SPDX-License-Identifier: Apache-2.0
 *
 * piece.c: make, map and unmap device memory that several processes see.
 */
#include "gpu/piece.h"

#include <fcntl.h>
#include <stdio.h>

#include "base/fd.h"
#include "base/status.h"

/* Map a handle, which is given up in any case: the mapping keeps the memory. */
static int map(struct kvf_gpu_device *device, uint64_t handle, uint64_t bytes, int access_flags,
               struct kvf_gpu_piece *piece_out)
{
    const struct kvf_gpu_driver *driver = &device->driver;
    const struct kvf_cuda_access access = {.location = {KVF_CUDA_LOCATION_DEVICE, device->ordinal},
                                           .flags = access_flags};
    struct kvf_gpu_piece piece = {.bytes = bytes};
    int result = driver->cuMemAddressReserve(&piece.address, bytes, 0, 0, 0);

    if (result == KVF_CUDA_SUCCESS) {
        result = driver->cuMemMap(piece.address, bytes, 0, handle, 0);
        if (result == KVF_CUDA_SUCCESS) {
            result = driver->cuMemSetAccess(piece.address, bytes, &access, 1);
            if (result != KVF_CUDA_SUCCESS) {
                (void)driver->cuMemUnmap(piece.address, bytes);
            }
        }
        if (result != KVF_CUDA_SUCCESS) {
            (void)driver->cuMemAddressFree(piece.address, bytes);
        }
    }
    (void)driver->cuMemRelease(handle);
    if (result == KVF_CUDA_SUCCESS) {
        *piece_out = piece;
    }
    return kvf_gpu_device_result(device, result, "mapping a piece of device memory");
}

/* What the driver gives may hold what another tenant had in it. */
static int clear(struct kvf_gpu_device *device, const struct kvf_gpu_piece *piece)
{
    int result = device->driver.cuMemsetD8Async(piece->address, 0, piece->bytes, NULL);

    if (result == KVF_CUDA_SUCCESS) {
        result = device->driver.cuStreamSynchronize(NULL);
    }
    return kvf_gpu_device_result(device, result, "clearing a piece of device memory");
}

int kvf_gpu_piece_make(struct kvf_gpu_device *device, uint64_t bytes,
                       struct kvf_gpu_piece *piece_out, int *fd_out)
{
    const struct kvf_cuda_allocation allocation = {
        .type = KVF_CUDA_ALLOCATION_PINNED,
        .handle_types = KVF_CUDA_HANDLE_POSIX_FD,
        .location = {KVF_CUDA_LOCATION_DEVICE, device->ordinal},
    };
    uint64_t handle = 0;
    int fd = -1;
    int status = kvf_gpu_device_result(
        device, device->driver.cuMemCreate(&handle, bytes, &allocation, 0), "cuMemCreate");

    if (status != KVF_OK) {
        return status;
    }
    status = kvf_gpu_device_result(
        device,
        device->driver.cuMemExportToShareableHandle(&fd, handle, KVF_CUDA_HANDLE_POSIX_FD, 0),
        "cuMemExportToShareableHandle");
    if (status != KVF_OK) {
        (void)device->driver.cuMemRelease(handle);
        return status;
    }
    (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
    status = map(device, handle, bytes, KVF_CUDA_ACCESS_READ_WRITE, piece_out);
    if (status == KVF_OK) {
        status = clear(device, piece_out);
        if (status != KVF_OK) {
            kvf_gpu_piece_close(device, piece_out);
        }
    }
    if (status != KVF_OK) {
        kvf_fd_close(&fd);
        return status;
    }
    *fd_out = fd;
    return KVF_OK;
}

int kvf_gpu_piece_open(struct kvf_gpu_device *device, int fd, uint64_t bytes,
                       struct kvf_gpu_piece *piece_out)
{
    uint64_t handle = 0;
    int status = kvf_gpu_device_result(
        device,
        device->driver.cuMemImportFromShareableHandle(&handle, (void *)(uintptr_t)(unsigned)fd,
                                                      KVF_CUDA_HANDLE_POSIX_FD),
        "cuMemImportFromShareableHandle");

    return status == KVF_OK ? map(device, handle, bytes, KVF_CUDA_ACCESS_READ, piece_out) : status;
}

void kvf_gpu_piece_close(struct kvf_gpu_device *device, struct kvf_gpu_piece *piece)
{
    if (piece->address != 0) {
        (void)device->driver.cuMemUnmap(piece->address, piece->bytes);
        (void)device->driver.cuMemAddressFree(piece->address, piece->bytes);
        *piece = (struct kvf_gpu_piece){0};
    }
}
