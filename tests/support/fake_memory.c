/* SPDX-License-Identifier: Apache-2.0
 *
 * fake_memory.c: device memory of a driver without a GPU. All of it is memory files, so that other
 * processes can open what an address stands for, by a handle or by a descriptor.
 *
 *   cuMemAlloc    | file, whole pages        | guard page     an address ends where it begins
 *                      ^ slack ^ address
 *   cuMemCreate   a file without an address; cuMemMap puts it at one
 */
#include "tests/support/fake_memory.h"

#include <assert.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    PLACES_MAX = 512,
    PAGE_BYTES = 4096,
    ALIGN_BYTES = 256,
    HANDLE_MAGIC = 0x46414b45,
};

#define DEVICE_BYTES     ((size_t)1 << 34)
#define GRANULARITY_BITS 21

/* Physical memory, of this process or of another one. */
struct physical {
    int fd;
    size_t bytes;
    uint32_t n_refs; /* handles and mappings */
    int handle_types;
};

/* Where memory is. */
struct place {
    uint8_t *base;
    size_t bytes;
    uint8_t *map; /* of cuMemAlloc: with slack and guard */
    size_t map_bytes;
    struct physical *physical;
    bool is_opened; /* by a handle of another process */
};

/* In a struct kvf_cuda_ipc_handle. */
struct handle {
    uint32_t magic;
    int32_t pid;
    int32_t fd;
    uint32_t slack;
    uint64_t bytes;
};

static struct place places[PLACES_MAX];
static uint32_t n_places;

/* ----------------------------------------------------------------------------------------------
 * Files and places
 */
static struct physical *physical_new(int fd, size_t bytes, int handle_types)
{
    struct physical *physical = fd >= 0 ? calloc(1, sizeof(*physical)) : NULL;

    if (physical == NULL) {
        return NULL;
    }
    *physical = (struct physical){fd, bytes, 1, handle_types};
    fake_counts.device_bytes += bytes;
    return physical;
}

static void physical_drop(struct physical *physical)
{
    if (--physical->n_refs > 0) {
        return;
    }
    fake_counts.device_bytes -= physical->bytes;
    (void)close(physical->fd);
    free(physical);
}

static int file_new(size_t bytes)
{
    int fd = memfd_create("fake-cuda", MFD_CLOEXEC);

    assert(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
    return fd;
}

static struct place *place_find(uint64_t address)
{
    for (uint32_t i = 0; i < n_places; i++) {
        if (address >= (uint64_t)(uintptr_t)places[i].base &&
            address - (uint64_t)(uintptr_t)places[i].base < places[i].bytes) {
            return &places[i];
        }
    }
    return NULL;
}

static void place_add(const struct place *place)
{
    assert(n_places < PLACES_MAX);
    places[n_places++] = *place;
    fake_range_add(place->base, place->bytes, false, true);
}

static void place_remove(struct place *place)
{
    physical_drop(place->physical);
    *place = places[--n_places];
}

/* Map a file of cuMemAlloc with a guard behind it. */
static bool guarded_map(struct place *place, int fd, size_t bytes, size_t slack)
{
    size_t file_bytes = slack + (bytes + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;

    place->map_bytes = file_bytes + PAGE_BYTES;
    place->map = mmap(NULL, place->map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (place->map == MAP_FAILED || mmap(place->map, file_bytes, PROT_READ | PROT_WRITE,
                                         MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        return false;
    }
    place->base = place->map + slack;
    place->bytes = bytes;
    return true;
}

/* ----------------------------------------------------------------------------------------------
 * cuMemAlloc
 */
int fake_cuMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    *total_bytes = DEVICE_BYTES;
    *free_bytes = DEVICE_BYTES - fake_counts.device_bytes;
    return KVF_CUDA_SUCCESS;
}

int fake_cuMemAlloc(uint64_t *address, size_t bytes)
{
    size_t whole = (bytes + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
    size_t slack = (PAGE_BYTES - whole % PAGE_BYTES) % PAGE_BYTES;
    struct place place = {0};

    if (bytes == 0 || bytes > DEVICE_BYTES) {
        return bytes == 0 ? KVF_CUDA_ERROR_INVALID_VALUE : KVF_CUDA_ERROR_OUT_OF_MEMORY;
    }
    place.physical = physical_new(file_new(slack + whole), bytes, 0);
    if (place.physical == NULL || !guarded_map(&place, place.physical->fd, bytes, slack)) {
        return KVF_CUDA_ERROR_OUT_OF_MEMORY;
    }
    memset(place.base, 0xa5, bytes); /* whatever it held before */
    place_add(&place);
    *address = (uint64_t)(uintptr_t)place.base;
    return fake_turns();
}

/* Of cuMemAlloc or cuIpcOpenMemHandle. */
static int unmap_place(uint64_t address, bool is_opened)
{
    struct place *place = place_find(address);
    size_t bytes;

    if (place == NULL || place->map == NULL || place->is_opened != is_opened ||
        address != (uint64_t)(uintptr_t)place->base ||
        fake_range_remove(place->base, false, true, &bytes) != KVF_CUDA_SUCCESS) {
        return KVF_CUDA_ERROR_INVALID_VALUE;
    }
    (void)munmap(place->map, place->map_bytes);
    place_remove(place);
    return KVF_CUDA_SUCCESS;
}

int fake_cuMemFree(uint64_t address)
{
    return address != 0 ? unmap_place(address, false) : KVF_CUDA_SUCCESS;
}

int fake_cuMemGetAddressRange(uint64_t *base, size_t *bytes, uint64_t address)
{
    const struct place *place = place_find(address);

    if (place == NULL) {
        return KVF_CUDA_ERROR_INVALID_VALUE;
    }
    *base = (uint64_t)(uintptr_t)place->base;
    *bytes = place->bytes;
    return KVF_CUDA_SUCCESS;
}

/* ----------------------------------------------------------------------------------------------
 * Handles of cuMemAlloc's memory
 */
int fake_cuIpcGetMemHandle(struct kvf_cuda_ipc_handle *handle, uint64_t address)
{
    const struct place *place = place_find(address);
    struct handle inner = {.magic = HANDLE_MAGIC, .pid = getpid()};

    if (place == NULL || place->map == NULL || place->is_opened) {
        return KVF_CUDA_ERROR_INVALID_VALUE; /* mapped memory has no handle of this kind */
    }
    inner.fd = place->physical->fd;
    inner.slack = (uint32_t)(place->base - place->map);
    inner.bytes = place->bytes;
    memset(handle, 0, sizeof(*handle));
    memcpy(handle->bytes, &inner, sizeof(inner));
    return KVF_CUDA_SUCCESS;
}

int fake_cuIpcOpenMemHandle(uint64_t *address, struct kvf_cuda_ipc_handle handle, unsigned flags)
{
    struct place place = {.is_opened = true};
    struct handle inner;
    char path[64];
    int fd;

    memcpy(&inner, handle.bytes, sizeof(inner));
    if (inner.magic != HANDLE_MAGIC || flags != KVF_CUDA_IPC_LAZY_PEER) {
        return KVF_CUDA_ERROR_INVALID_VALUE;
    }
    if (inner.pid == getpid()) {
        return KVF_CUDA_ERROR_INVALID_CONTEXT; /* as the real one: not in the same process */
    }
    (void)snprintf(path, sizeof(path), "/proc/%d/fd/%d", inner.pid, inner.fd);
    fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        return KVF_CUDA_ERROR_MAP_FAILED;
    }
    place.physical = physical_new(fd, inner.bytes, 0);
    if (place.physical == NULL || !guarded_map(&place, fd, inner.bytes, inner.slack)) {
        return KVF_CUDA_ERROR_MAP_FAILED;
    }
    place_add(&place);
    *address = (uint64_t)(uintptr_t)place.base;
    return fake_turns();
}

int fake_cuIpcCloseMemHandle(uint64_t address)
{
    return unmap_place(address, true);
}

/* ----------------------------------------------------------------------------------------------
 * Virtual memory
 */
int fake_cuMemGetAllocationGranularity(size_t *bytes, const struct kvf_cuda_allocation *allocation,
                                       int option)
{
    (void)option;
    *bytes = (size_t)1 << GRANULARITY_BITS;
    return allocation->type == KVF_CUDA_ALLOCATION_PINNED ? KVF_CUDA_SUCCESS
                                                          : KVF_CUDA_ERROR_INVALID_VALUE;
}

static bool is_granular(uint64_t bytes)
{
    return (bytes & (((uint64_t)1 << GRANULARITY_BITS) - 1)) == 0;
}

static int handle_of(struct physical *physical, uint64_t *handle)
{
    if (physical == NULL) {
        return KVF_CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle = (uint64_t)(uintptr_t)physical;
    return KVF_CUDA_SUCCESS;
}

/* Whatever it held before. */
static int file_used(size_t bytes)
{
    int fd = file_new(bytes);
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    assert(memory != MAP_FAILED);
    memset(memory, 0xa5, bytes);
    (void)munmap(memory, bytes);
    return fd;
}

int fake_cuMemCreate(uint64_t *handle, size_t bytes, const struct kvf_cuda_allocation *allocation,
                     uint64_t flags)
{
    if (bytes == 0 || !is_granular(bytes) || flags != 0 ||
        allocation->type != KVF_CUDA_ALLOCATION_PINNED ||
        allocation->location.type != KVF_CUDA_LOCATION_DEVICE) {
        return KVF_CUDA_ERROR_INVALID_VALUE;
    }
    if (bytes > DEVICE_BYTES - fake_counts.device_bytes) {
        return KVF_CUDA_ERROR_OUT_OF_MEMORY;
    }
    return handle_of(physical_new(file_used(bytes), bytes, allocation->handle_types), handle);
}

int fake_cuMemRelease(uint64_t handle)
{
    physical_drop((struct physical *)(uintptr_t)handle);
    return KVF_CUDA_SUCCESS;
}

int fake_cuMemAddressReserve(uint64_t *address, size_t bytes, size_t align_bytes, uint64_t wish,
                             uint64_t flags)
{
    size_t align = (size_t)1 << GRANULARITY_BITS;
    uint8_t *base;
    uint8_t *aligned;

    (void)wish;
    if (bytes == 0 || !is_granular(bytes) || align_bytes > align || flags != 0) {
        return KVF_CUDA_ERROR_INVALID_VALUE;
    }
    base = mmap(NULL, bytes + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) {
        return KVF_CUDA_ERROR_OUT_OF_MEMORY;
    }
    aligned = (uint8_t *)(((uintptr_t)base + align - 1) / align * align);
    if (aligned != base) {
        (void)munmap(base, (size_t)(aligned - base));
    }
    (void)munmap(aligned + bytes, (size_t)(base + align - aligned));
    *address = (uint64_t)(uintptr_t)aligned;
    return KVF_CUDA_SUCCESS;
}

int fake_cuMemAddressFree(uint64_t address, size_t bytes)
{
    for (uint32_t i = 0; i < n_places; i++) {
        uint64_t base = (uint64_t)(uintptr_t)places[i].base;

        if (base < address + bytes && address < base + places[i].bytes) {
            return KVF_CUDA_ERROR_INVALID_VALUE; /* something is mapped there */
        }
    }
    return munmap((void *)(uintptr_t)address, bytes) == 0 ? KVF_CUDA_SUCCESS
                                                          : KVF_CUDA_ERROR_INVALID_VALUE;
}

int fake_cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle, uint64_t flags)
{
    struct place place = {.base = (uint8_t *)(uintptr_t)address,
                          .bytes = bytes,
                          .physical = (struct physical *)(uintptr_t)handle};

    if (offset != 0 || flags != 0 || !is_granular(address) || bytes > place.physical->bytes ||
        !is_granular(bytes) || place_find(address) != NULL ||
        mmap(place.base, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, place.physical->fd, 0) ==
            MAP_FAILED) {
        return KVF_CUDA_ERROR_INVALID_VALUE;
    }
    place.physical->n_refs++;
    place_add(&place);
    return KVF_CUDA_SUCCESS;
}

int fake_cuMemUnmap(uint64_t address, size_t bytes)
{
    struct place *place = place_find(address);
    uint64_t end = address + bytes;

    while (address < end) {
        size_t removed;

        place = place_find(address);
        if (place == NULL || place->map != NULL || (uint64_t)(uintptr_t)place->base != address ||
            fake_range_remove(place->base, false, true, &removed) != KVF_CUDA_SUCCESS) {
            return KVF_CUDA_ERROR_INVALID_VALUE;
        }
        assert(mmap(place->base, removed, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
                    0) != MAP_FAILED);
        place_remove(place);
        address += removed;
    }
    return KVF_CUDA_SUCCESS;
}

int fake_cuMemSetAccess(uint64_t address, size_t bytes, const struct kvf_cuda_access *access,
                        size_t n)
{
    int mode = access[0].flags == KVF_CUDA_ACCESS_READ_WRITE ? PROT_READ | PROT_WRITE
               : access[0].flags == KVF_CUDA_ACCESS_READ     ? PROT_READ
                                                             : PROT_NONE;

    if (n != 1 || place_find(address) == NULL) {
        return KVF_CUDA_ERROR_INVALID_VALUE;
    }
    return mprotect((void *)(uintptr_t)address, bytes, mode) == 0 ? KVF_CUDA_SUCCESS
                                                                  : KVF_CUDA_ERROR_INVALID_VALUE;
}

int fake_cuMemExportToShareableHandle(void *handle_out, uint64_t handle, int type, uint64_t flags)
{
    const struct physical *physical = (const struct physical *)(uintptr_t)handle;
    int fd;

    if (flags != 0 || (physical->handle_types & type) != KVF_CUDA_HANDLE_POSIX_FD) {
        return KVF_CUDA_ERROR_INVALID_VALUE;
    }
    fd = fcntl(physical->fd, F_DUPFD_CLOEXEC, 0);
    memcpy(handle_out, &fd, sizeof(fd));
    return fd >= 0 ? KVF_CUDA_SUCCESS : KVF_CUDA_ERROR_OUT_OF_MEMORY;
}

int fake_cuMemImportFromShareableHandle(uint64_t *handle, void *os_handle, int type)
{
    int fd = fcntl((int)(intptr_t)os_handle, F_DUPFD_CLOEXEC, 0);
    off_t bytes = fd >= 0 ? lseek(fd, 0, SEEK_END) : -1;

    if (type != KVF_CUDA_HANDLE_POSIX_FD || bytes <= 0 || !is_granular((uint64_t)bytes)) {
        if (fd >= 0) {
            (void)close(fd);
        }
        return KVF_CUDA_ERROR_INVALID_VALUE; /* a descriptor of something else */
    }
    return handle_of(physical_new(fd, (size_t)bytes, KVF_CUDA_HANDLE_POSIX_FD), handle);
}

int fake_cuMemRetainAllocationHandle(uint64_t *handle, void *address)
{
    struct place *place = place_find((uint64_t)(uintptr_t)address);

    if (place == NULL || place->map != NULL) {
        return KVF_CUDA_ERROR_INVALID_VALUE;
    }
    place->physical->n_refs++;
    return handle_of(place->physical, handle);
}

int fake_cuMemGetAllocationPropertiesFromHandle(struct kvf_cuda_allocation *allocation,
                                                uint64_t handle)
{
    const struct physical *physical = (const struct physical *)(uintptr_t)handle;

    *allocation = (struct kvf_cuda_allocation){
        .type = KVF_CUDA_ALLOCATION_PINNED,
        .handle_types = physical->handle_types,
        .location = {.type = KVF_CUDA_LOCATION_DEVICE},
    };
    return KVF_CUDA_SUCCESS;
}
