/* SPDX-License-Identifier: Apache-2.0
 *
 * fake_cuda.c: streams, events and memory of a driver without a GPU.
 *
 * Every stream is a queue. A turn runs the first operation of one stream whose first operation can
 * run (a wait can once its event has been recorded as often as when the wait was queued). Which
 * stream: any of those that are awake. Half of them sleep for a while, others after that, so that
 * some streams fall far behind others, and sometimes all behind the host.
 */
#include "tests/support/fake_memory.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/random.h"

enum {
    STREAMS_MAX = 64,
    RANGES_MAX = 256,
    SLEEP_CALLS = 40,        /* at most */
    TURNS_A_CALL = 4,        /* at most */
    SHARED_BYTES = 48 << 10, /* dynamic ones of a kernel that nobody has asked more for */
    ERROR_INVALID_HANDLE = 400,
    ERROR_ILLEGAL_ADDRESS = 700,
    ERROR_SYSTEM_NOT_READY = 802,
    LOOK_CALLS = 16, /* between two looks at the file that breaks the device */
};

enum op_kind {
    OP_COPY,
    OP_SET,
    OP_KERNEL,
    OP_PRODUCT,
    OP_RECORD,
    OP_WAIT,
    OP_WRITE,
};

struct fake_event {
    uint64_t recorded; /* records queued */
    uint64_t done;     /* of the latest that has run */
    bool is_timed;
    uint64_t kernels; /* that had run then */
};

struct op {
    struct op *next;
    enum op_kind kind;
    void *to;
    const void *from;
    size_t bytes;
    unsigned char value;
    struct fake_event *event;
    uint64_t number; /* of the record; the value to write */
    const char *kernel;
    struct kvf_gpu_work work;
    uint32_t tensors;
    struct kvf_gpu_rebuild rebuild;    /* of kvf_rebuild, in place of the two */
    struct kvf_gpu_latent_work latent; /* of kvf_latent_*, likewise */
    uint32_t n_blocks;
    struct fake_product product;
};

struct fake_stream {
    struct op *head;
    struct op **tail;
};

/* Memory that copies may use. */
struct range {
    const uint8_t *base;
    size_t bytes;
    bool is_registered;
    bool is_device;
};

struct fake_kernel {
    char name[64];
    uint32_t shared_bytes; /* dynamic ones, that it may use so far */
};

static struct fake_stream legacy = {.tail = &legacy.head};
static struct fake_stream *streams[STREAMS_MAX] = {&legacy};
static uint32_t n_streams = 1;
static struct range ranges[RANGES_MAX];
static uint32_t n_ranges;
static struct fake_kernel kernels[64];
static uint32_t n_kernels;
static struct kvf_random_seeded random_state;
static uint64_t asleep; /* a bit a stream */
static uint64_t sleep_calls;
struct fake_cuda_counts fake_counts;
static uint64_t fail_at = UINT64_MAX;
static const char *fail_path; /* while there is a file, the device fails */
static uint64_t n_looks;
static bool are_pins_refused;
static bool are_times_refused;
static uint32_t shared_bytes_max = 227 << 10;
static bool is_held;
static void *current_context;

static bool has_failed(void)
{
    return fake_counts.operations >= fail_at;
}

/* ----------------------------------------------------------------------------------------------
 * Running
 */
static bool is_rebuild(const char *kernel)
{
    return strncmp(kernel, "kvf_rebuild", sizeof("kvf_rebuild") - 1) == 0;
}

static bool is_latent(const char *kernel)
{
    return strncmp(kernel, "kvf_latent_", sizeof("kvf_latent_") - 1) == 0;
}

static void op_run(struct op *op)
{
    switch (op->kind) {
    case OP_COPY:
        memcpy(op->to, op->from, op->bytes);
        break;
    case OP_SET:
        if (op->bytes > 0) { /* else of an event that is gone */
            memset(op->to, op->value, op->bytes);
        }
        break;
    case OP_KERNEL:
        fake_counts.kernels++;
        if (is_rebuild(op->kernel)) {
            fake_rebuild_run(&op->rebuild);
        } else if (is_latent(op->kernel)) {
            fake_latent_run(op->kernel, &op->latent);
        } else {
            fake_kernel_run(op->kernel, &op->work, op->tensors);
        }
        break;
    case OP_PRODUCT:
        fake_product_run(&op->product);
        break;
    case OP_RECORD:
        if (op->event->done < op->number) {
            op->event->done = op->number;
            op->event->kernels = fake_counts.kernels;
        }
        break;
    case OP_WAIT:
        break;
    case OP_WRITE:
        __atomic_store_n((uint64_t *)op->to, op->number, __ATOMIC_RELEASE);
        break;
    }
    fake_counts.operations++;
}

static bool can_run(const struct fake_stream *stream)
{
    const struct op *op = stream->head;

    return op != NULL && (op->kind != OP_WAIT || op->event->done >= op->number || has_failed());
}

static void run_first(struct fake_stream *stream)
{
    struct op *op = stream->head;

    stream->head = op->next;
    if (stream->head == NULL) {
        stream->tail = &stream->head;
    }
    if (!has_failed()) {
        op_run(op);
    }
    free(op);
}

/* One operation of any stream but those that sleep. False: none can run. */
static bool turn(uint64_t sleeping)
{
    uint32_t first = (uint32_t)(kvf_random_seeded_next(&random_state) % n_streams);

    for (uint32_t i = 0; i < n_streams && !is_held; i++) {
        uint32_t at = (first + i) % n_streams;

        if ((sleeping >> at & 1) == 0 && can_run(streams[at])) {
            run_first(streams[at]);
            return true;
        }
    }
    return false;
}

/* What goes on while the host is in the driver. */
int fake_turns(void)
{
    if (fail_path != NULL && ++n_looks % LOOK_CALLS == 0 && access(fail_path, F_OK) == 0) {
        fail_at = 0; /* for good: only another process has a device that works */
    }
    if (sleep_calls == 0) {
        asleep = kvf_random_seeded_next(&random_state);
        sleep_calls = 1 + kvf_random_seeded_next(&random_state) % SLEEP_CALLS;
    }
    sleep_calls--;
    for (uint64_t n = kvf_random_seeded_next(&random_state) % (TURNS_A_CALL + 1); n > 0; n--) {
        (void)turn(asleep);
    }
    return has_failed() ? ERROR_ILLEGAL_ADDRESS : KVF_CUDA_SUCCESS;
}

static void run_until_stream(const struct fake_stream *stream)
{
    while (stream->head != NULL && turn(0)) {
    }
    assert(stream->head == NULL && "a stream waits for what nobody records");
}

static struct fake_stream *stream_of(void *stream)
{
    return stream != NULL ? stream : &legacy;
}

static int queue(void *stream, const struct op *what)
{
    struct op *op = malloc(sizeof(*op));
    struct fake_stream *to = stream_of(stream);

    assert(op != NULL);
    *op = *what;
    op->next = NULL;
    *to->tail = op;
    to->tail = &op->next;
    return fake_turns();
}

/* ----------------------------------------------------------------------------------------------
 * Memory
 */
void fake_range_add(const void *base, size_t bytes, bool is_registered, bool is_device)
{
    assert(n_ranges < RANGES_MAX);
    ranges[n_ranges++] = (struct range){base, bytes, is_registered, is_device};
}

static void pinned_add(const void *base, size_t bytes, bool is_registered)
{
    fake_range_add(base, bytes, is_registered, false);
    fake_counts.pinned_bytes += bytes;
}

/* Does any queued copy touch this memory? */
static bool is_pending(const uint8_t *memory, size_t bytes)
{
    for (uint32_t i = 0; i < n_streams; i++) {
        for (const struct op *op = streams[i]->head; op != NULL; op = op->next) {
            const uint8_t *to = op->to;
            const uint8_t *from = op->from;

            if ((op->kind == OP_COPY || op->kind == OP_SET) &&
                ((to < memory + bytes && memory < to + op->bytes) ||
                 (op->kind == OP_COPY && from < memory + bytes && memory < from + op->bytes))) {
                return true;
            }
        }
    }
    return false;
}

int fake_range_remove(const void *base, bool is_registered, bool is_device, size_t *bytes_out)
{
    for (uint32_t i = 0; i < n_ranges; i++) {
        if (ranges[i].base == base && ranges[i].is_registered == is_registered &&
            ranges[i].is_device == is_device) {
            /* memory that goes while a copy is on its way is what must never happen */
            assert(has_failed() || !is_pending(ranges[i].base, ranges[i].bytes));
            *bytes_out = ranges[i].bytes;
            ranges[i] = ranges[--n_ranges];
            return KVF_CUDA_SUCCESS;
        }
    }
    return KVF_CUDA_ERROR_INVALID_VALUE;
}

static int pinned_remove(const void *base, bool is_registered)
{
    size_t bytes = 0;
    int result = fake_range_remove(base, is_registered, false, &bytes);

    fake_counts.pinned_bytes -= bytes;
    return result;
}

/* How a copy may use host memory: 1 within one range, 0 outside of all, -1 neither. */
static int range_holds(const uint8_t *base, size_t bytes)
{
    int touches = 0;

    for (uint32_t i = 0; i < n_ranges; i++) {
        const struct range *r = &ranges[i];

        if (r->is_device || base >= r->base + r->bytes || r->base >= base + bytes) {
            continue;
        }
        if (base >= r->base && base + bytes <= r->base + r->bytes) {
            return 1;
        }
        touches = -1;
    }
    return touches;
}

/* Is all of it device memory? Mapped pieces that lie side by side count as one. */
static bool device_holds(const uint8_t *base, size_t bytes)
{
    const uint8_t *at = base;
    uint32_t i = 0;

    while (i < n_ranges && at < base + bytes) {
        const struct range *r = &ranges[i++];

        if (r->is_device && at >= r->base && at < r->base + r->bytes) {
            at = r->base + r->bytes;
            i = 0;
        }
    }
    return at >= base + bytes;
}

/* Between the host and the device. */
static int copy(void *to, const void *from, size_t bytes, const void *host, const void *device,
                void *stream)
{
    const struct op op = {.kind = OP_COPY, .to = to, .from = from, .bytes = bytes};
    int held = range_holds(host, bytes);
    int result;

    if (bytes == 0 || held < 0 || !device_holds(device, bytes)) {
        return KVF_CUDA_ERROR_INVALID_VALUE;
    }
    result = queue(stream, &op);
    if (held == 0) {
        fake_counts.unpinned_copies++;
        run_until_stream(stream_of(stream)); /* through memory of the driver's, one by one */
    }
    return result;
}

static bool is_writable(const void *memory)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    unsigned long begin;
    unsigned long end;
    char mode[8];
    bool writable = false;
    char line[512];

    while (maps != NULL && fgets(line, sizeof(line), maps) != NULL) {
        if (sscanf(line, "%lx-%lx %7s", &begin, &end, mode) == 3 && (uintptr_t)memory >= begin &&
            (uintptr_t)memory < end) {
            writable = mode[1] == 'w';
        }
    }
    if (maps != NULL) {
        (void)fclose(maps);
    }
    return writable;
}

/* ----------------------------------------------------------------------------------------------
 * The driver's functions
 */
int fake_cuInit(unsigned flags)
{
    static bool is_seeded;

    if (!is_seeded) {
        is_seeded = true;
        kvf_random_seeded_init(&random_state, 1);
        fail_path = getenv("FAKE_CUDA_FAIL_FILE");
    }
    if (fail_path != NULL && access(fail_path, F_OK) == 0) {
        return ERROR_SYSTEM_NOT_READY;
    }
    return flags == 0 ? KVF_CUDA_SUCCESS : KVF_CUDA_ERROR_INVALID_VALUE;
}

int fake_cuDriverGetVersion(int *version)
{
    *version = 13000;
    return KVF_CUDA_SUCCESS;
}

int fake_cuGetErrorName(int result, const char **text)
{
    *text = result == KVF_CUDA_SUCCESS ? "CUDA_SUCCESS" : "CUDA_ERROR";
    return KVF_CUDA_SUCCESS;
}

int fake_cuGetErrorString(int result, const char **text)
{
    *text = result == ERROR_ILLEGAL_ADDRESS ? "an illegal memory access was encountered"
                                            : "an error of the driver that is none";
    return KVF_CUDA_SUCCESS;
}

int fake_cuDeviceGetCount(int *count)
{
    *count = 1;
    return KVF_CUDA_SUCCESS;
}

int fake_cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return ordinal == 0 ? KVF_CUDA_SUCCESS : KVF_CUDA_ERROR_INVALID_DEVICE;
}

int fake_cuDeviceGetName(char *name, int bytes, int device)
{
    (void)device;
    (void)snprintf(name, (size_t)bytes, "Fake GPU");
    return KVF_CUDA_SUCCESS;
}

int fake_cuDeviceGetUuid(struct kvf_cuda_uuid *uuid, int device)
{
    (void)device;
    for (int i = 0; i < 16; i++) {
        uuid->bytes[i] = (uint8_t)(0xfa + i);
    }
    return KVF_CUDA_SUCCESS;
}

int fake_cuDeviceGetAttribute(int *value, int attribute, int device)
{
    (void)device;
    switch (attribute) {
    case KVF_CUDA_ATTRIBUTE_COMPUTE_MAJOR:
        *value = 9;
        break;
    case KVF_CUDA_ATTRIBUTE_COMPUTE_MINOR:
        *value = 0;
        break;
    case KVF_CUDA_ATTRIBUTE_SHARED_OPTIN_BYTES:
        *value = (int)shared_bytes_max;
        break;
    case KVF_CUDA_ATTRIBUTE_MPS:
        *value = getenv("FAKE_CUDA_MPS") != NULL;
        break;
    default:
        *value = 1;
        break;
    }
    return KVF_CUDA_SUCCESS;
}

int fake_cuDevicePrimaryCtxRetain(void **context, int device)
{
    (void)device;
    *context = &legacy;
    return KVF_CUDA_SUCCESS;
}

int fake_cuDevicePrimaryCtxRelease(int device)
{
    (void)device;
    return KVF_CUDA_SUCCESS;
}

int fake_cuCtxGetCurrent(void **context)
{
    *context = current_context;
    return KVF_CUDA_SUCCESS;
}

int fake_cuCtxPushCurrent(void *context)
{
    current_context = context;
    return KVF_CUDA_SUCCESS;
}

int fake_cuCtxPopCurrent(void **context)
{
    *context = current_context;
    current_context = NULL;
    return KVF_CUDA_SUCCESS;
}

int fake_cuCtxGetDevice(int *device)
{
    *device = 0;
    return current_context != NULL ? KVF_CUDA_SUCCESS : KVF_CUDA_ERROR_INVALID_CONTEXT;
}

int fake_cuCtxSynchronize(void)
{
    fake_counts.synchronizes++;
    while (turn(0)) {
    }
    return fake_turns();
}

int fake_cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return KVF_CUDA_SUCCESS;
}

int fake_cuModuleLoadData(void **module, const void *image)
{
    *module = kernels;
    return image != NULL ? KVF_CUDA_SUCCESS : KVF_CUDA_ERROR_INVALID_VALUE;
}

int fake_cuModuleUnload(void *module)
{
    return module == kernels ? KVF_CUDA_SUCCESS : ERROR_INVALID_HANDLE;
}

int fake_cuModuleGetFunction(void **function, void *module, const char *name)
{
    (void)module;
    if (!fake_kernel_exists(name)) {
        return KVF_CUDA_ERROR_NOT_FOUND;
    }
    for (uint32_t i = 0; i < n_kernels; i++) {
        if (strcmp(kernels[i].name, name) == 0) {
            *function = &kernels[i];
            return KVF_CUDA_SUCCESS;
        }
    }
    assert(n_kernels < sizeof(kernels) / sizeof(kernels[0]));
    (void)snprintf(kernels[n_kernels].name, sizeof(kernels[0].name), "%s", name);
    kernels[n_kernels].shared_bytes = SHARED_BYTES;
    *function = &kernels[n_kernels++];
    return KVF_CUDA_SUCCESS;
}

int fake_cuFuncGetAttribute(int *value, int attribute, void *function)
{
    (void)attribute;
    (void)function;
    *value = 0;
    return KVF_CUDA_SUCCESS;
}

int fake_cuFuncSetAttribute(void *function, int attribute, int value)
{
    if (attribute != KVF_CUDA_FUNCTION_SHARED_BYTES_MAX || value < 0 ||
        (uint32_t)value > shared_bytes_max) {
        return KVF_CUDA_ERROR_INVALID_VALUE;
    }
    ((struct fake_kernel *)function)->shared_bytes = (uint32_t)value;
    return KVF_CUDA_SUCCESS;
}

int fake_cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                        void *stream, void **parameters, void **extra)
{
    const struct fake_kernel *kernel = function;
    struct op op = {.kind = OP_KERNEL, .kernel = kernel->name};

    if (shared_bytes > kernel->shared_bytes || shared_bytes > shared_bytes_max || grid_x == 0 ||
        grid_y != 1 || grid_z != 1 || block_x == 0 || block_x > 1024 || block_y != 1 ||
        block_z != 1 || extra != NULL) {
        return KVF_CUDA_ERROR_INVALID_VALUE;
    }
    op.n_blocks = grid_x;
    if (is_rebuild(kernel->name)) {
        op.rebuild = *(const struct kvf_gpu_rebuild *)parameters[0];
    } else if (is_latent(kernel->name)) {
        op.latent = *(const struct kvf_gpu_latent_work *)parameters[0];
    } else {
        op.work = *(const struct kvf_gpu_work *)parameters[0];
        op.tensors = *(const uint32_t *)parameters[1];
    }
    return queue(stream, &op);
}

int fake_product_queue(const struct fake_product *product, void *stream)
{
    struct op op = {.kind = OP_PRODUCT, .product = *product};

    return queue(stream, &op);
}

int fake_cuMemHostAlloc(void **memory, size_t bytes, unsigned flags)
{
    (void)flags;
    *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (*memory == NULL) {
        return KVF_CUDA_ERROR_OUT_OF_MEMORY;
    }
    pinned_add(*memory, bytes, false);
    return fake_turns();
}

int fake_cuMemFreeHost(void *memory)
{
    int result = pinned_remove(memory, false);

    if (result == KVF_CUDA_SUCCESS) {
        free(memory);
    }
    return result;
}

int fake_cuMemHostRegister(void *memory, size_t bytes, unsigned flags)
{
    bool is_read_only = (flags & KVF_CUDA_REGISTER_READ_ONLY) != 0;

    if (are_pins_refused) {
        return KVF_CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (range_holds(memory, bytes) != 0) {
        return KVF_CUDA_ERROR_ALREADY_REGISTERED;
    }
    if (!is_read_only && !is_writable(memory)) {
        return KVF_CUDA_ERROR_INVALID_VALUE;
    }
    pinned_add(memory, bytes, true);
    return fake_turns();
}

int fake_cuMemHostUnregister(void *memory)
{
    return pinned_remove(memory, true);
}

int fake_cuMemHostGetDevicePointer(uint64_t *address, void *memory, unsigned flags)
{
    (void)flags;
    *address = (uint64_t)(uintptr_t)memory;
    return KVF_CUDA_SUCCESS;
}

int fake_cuMemcpyHtoDAsync(uint64_t to, const void *from, size_t bytes, void *stream)
{
    return copy((void *)(uintptr_t)to, from, bytes, from, (void *)(uintptr_t)to, stream);
}

int fake_cuMemcpyDtoHAsync(void *to, uint64_t from, size_t bytes, void *stream)
{
    return copy(to, (void *)(uintptr_t)from, bytes, to, (void *)(uintptr_t)from, stream);
}

int fake_cuMemcpyDtoDAsync(uint64_t to, uint64_t from, size_t bytes, void *stream)
{
    const struct op op = {.kind = OP_COPY,
                          .to = (void *)(uintptr_t)to,
                          .from = (void *)(uintptr_t)from,
                          .bytes = bytes};

    return queue(stream, &op);
}

int fake_cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, void *stream)
{
    const struct op op = {
        .kind = OP_SET, .to = (void *)(uintptr_t)to, .value = value, .bytes = bytes};

    return queue(stream, &op);
}

int fake_cuStreamCreateWithPriority(void **stream, unsigned flags, int priority)
{
    struct fake_stream *new_stream = calloc(1, sizeof(*new_stream));

    (void)priority;
    if (flags != KVF_CUDA_STREAM_NON_BLOCKING || new_stream == NULL || n_streams == STREAMS_MAX) {
        free(new_stream);
        return KVF_CUDA_ERROR_INVALID_VALUE;
    }
    new_stream->tail = &new_stream->head;
    streams[n_streams++] = new_stream;
    fake_counts.streams++;
    *stream = new_stream;
    return KVF_CUDA_SUCCESS;
}

int fake_cuStreamDestroy(void *stream)
{
    run_until_stream(stream);
    for (uint32_t i = 1; i < n_streams; i++) {
        if (streams[i] == stream) {
            streams[i] = streams[--n_streams];
            fake_counts.streams--;
            free(stream);
            return KVF_CUDA_SUCCESS;
        }
    }
    return ERROR_INVALID_HANDLE;
}

int fake_cuStreamQuery(void *stream)
{
    int result = fake_turns();

    if (result != KVF_CUDA_SUCCESS) {
        return result;
    }
    return stream_of(stream)->head == NULL ? KVF_CUDA_SUCCESS : KVF_CUDA_ERROR_NOT_READY;
}

int fake_cuStreamSynchronize(void *stream)
{
    fake_counts.synchronizes++;
    run_until_stream(stream_of(stream));
    return fake_turns();
}

int fake_cuStreamWaitEvent(void *stream, void *event, unsigned flags)
{
    struct fake_event *e = event;
    const struct op op = {.kind = OP_WAIT, .event = e, .number = e->recorded};

    (void)flags;
    return queue(stream, &op);
}

int fake_cuStreamWriteValue64(void *stream, uint64_t address, uint64_t value, unsigned flags)
{
    const struct op op = {.kind = OP_WRITE, .to = (void *)(uintptr_t)address, .number = value};

    return flags == 0 && address % sizeof(value) == 0 ? queue(stream, &op)
                                                      : KVF_CUDA_ERROR_INVALID_VALUE;
}

int fake_cuEventCreate(void **event, unsigned flags)
{
    bool is_timed = (flags & KVF_CUDA_EVENT_DISABLE_TIMING) == 0;

    if (is_timed && are_times_refused) {
        return KVF_CUDA_ERROR_NOT_SUPPORTED;
    }
    *event = calloc(1, sizeof(struct fake_event));
    if (*event == NULL) {
        return KVF_CUDA_ERROR_OUT_OF_MEMORY;
    }
    ((struct fake_event *)*event)->is_timed = is_timed;
    fake_counts.events++;
    return KVF_CUDA_SUCCESS;
}

int fake_cuEventDestroy(void *event)
{
    /* the real one goes when its last use has ended */
    while (((struct fake_event *)event)->done < ((struct fake_event *)event)->recorded && turn(0)) {
    }
    for (uint32_t i = 0; i < n_streams; i++) {
        for (struct op *op = streams[i]->head; op != NULL; op = op->next) {
            if (op->event == event) {
                op->kind = OP_SET;
                op->bytes = 0;
                op->event = NULL;
            }
        }
    }
    fake_counts.events--;
    free(event);
    return KVF_CUDA_SUCCESS;
}

int fake_cuEventRecord(void *event, void *stream)
{
    struct fake_event *e = event;
    const struct op op = {.kind = OP_RECORD, .event = e, .number = ++e->recorded};

    return queue(stream, &op);
}

int fake_cuEventQuery(void *event)
{
    const struct fake_event *e = event;
    int result = fake_turns();

    if (result != KVF_CUDA_SUCCESS) {
        return result;
    }
    return e->done >= e->recorded ? KVF_CUDA_SUCCESS : KVF_CUDA_ERROR_NOT_READY;
}

int fake_cuEventSynchronize(void *event)
{
    const struct fake_event *e = event;

    fake_counts.synchronizes++;
    while (e->done < e->recorded && turn(0)) {
    }
    return fake_turns();
}

/* A kernel takes a millisecond of everybody's time, and nothing else takes any. */
int fake_cuEventElapsedTime(float *ms, void *start, void *end)
{
    const struct fake_event *from = start;
    const struct fake_event *to = end;

    if (!from->is_timed || !to->is_timed || from->recorded == 0 || to->recorded == 0) {
        return ERROR_INVALID_HANDLE;
    }
    if (from->done < from->recorded || to->done < to->recorded) {
        return KVF_CUDA_ERROR_NOT_READY;
    }
    *ms = (float)(to->kernels - from->kernels);
    fake_counts.times++;
    fake_counts.times_ms += to->kernels - from->kernels;
    return KVF_CUDA_SUCCESS;
}

/* ----------------------------------------------------------------------------------------------
 * For the test
 */
#define DECLARE(name, result, parameters) FAKE_API result name##_control parameters __asm__(#name);
FAKE_CUDA_CONTROLS(DECLARE)
#undef DECLARE

void fake_cuda_seed_control(uint64_t seed)
{
    kvf_random_seeded_init(&random_state, seed);
    sleep_calls = 0;
}

void fake_cuda_counts_control(struct fake_cuda_counts *counts_out)
{
    *counts_out = fake_counts;
}

bool fake_cuda_is_pending_control(const void *memory, size_t bytes)
{
    return is_pending(memory, bytes);
}

void fake_cuda_fail_after_control(uint64_t operations)
{
    while (has_failed() && turn(0)) { /* what a failed device had queued never runs */
    }
    fail_at = fake_counts.operations + operations;
}

void fake_cuda_hold_control(bool hold)
{
    is_held = hold;
}

void fake_cuda_refuse_times_control(bool is_refused)
{
    are_times_refused = is_refused;
}

void fake_cuda_refuse_pins_control(bool is_refused)
{
    are_pins_refused = is_refused;
}

void fake_cuda_shared_bytes_control(uint32_t bytes)
{
    shared_bytes_max = bytes;
}

void fake_cuda_redo_every_control(uint32_t n)
{
    fake_kernel_redo_every = n;
}
