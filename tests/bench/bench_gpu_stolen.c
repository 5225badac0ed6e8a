/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_gpu_stolen.c: what offloading and loading KV costs the work that the GPU is there for.
 *
 *   bench_gpu_stolen [--seconds N] [--pairs N] [--only NAME]
 *
 * A pair is one window of an engine-like loop alone and the same window with KV moving at some
 * rate beside it, in alternating order; encode and decode run on the loop's own stream, between its
 * steps, the copies on another one. Lines:
 *
 *   pair stolen_LOOP_DIRECTION_RATE MS GIB      extra milliseconds, and GiB of bf16 KV moved
 *   pair slowdown_LOOP_DIRECTION_RATE MS MS     with and without
 *   pair control_LOOP MS GIB                    the loop alone twice, GiB as in the middle rate
 *
 * so that their ratios are milliseconds a GiB, and with over without. cuBLAS is opened at run time.
 */
#include "tests/bench/bench.h"
#include "tests/bench/gpu_load.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RING       4
#define CHUNKS     8
#define LOOP_BYTES (4ull << 30) /* what the memory-bound loop reads */
#define GIB        (double)(1 << 30)

enum loop {
    LOOP_GEMM_4096,
    LOOP_GEMM_8192,
    LOOP_MEMBOUND,
    LOOP_PREFILL, /* products as of a layer's prefill, with passes over memory between them */
    LOOPS,
};

static const char *const loop_names[LOOPS] = {"gemm4096", "gemm8192", "membound", "prefill"};

struct blas {
    void *handle;
    int (*create)(void **handle);
    int (*set_stream)(void *handle, void *stream);
    int (*gemm)(void *handle, int transa, int transb, int m, int n, int k, const void *alpha,
                const void *a, int a_type, int lda, const void *b, int b_type, int ldb,
                const void *beta, void *c, int c_type, int ldc, int compute, int algorithm);
};

struct stolen {
    struct kvf_gpu_device *gpu;
    struct blas blas;
    struct gpu_load loads[RING];
    uint8_t *host;
    uint64_t memory; /* of the loops */
    void *pass;      /* the kernel of memory-bound work */
    void *engine;
    void *copy;
    void *ready[RING];
    void *done[RING];
    void *begun;
    void *ended;
    uint32_t steps[LOOPS]; /* of a window */
    enum loop loop;
    bool is_onload;
};

/* ----------------------------------------------------------------------------------------------
 * The engine's work
 */
static void *symbol(void *library, const char *name)
{
    void *found = dlsym(library, name);

    if (found == NULL) {
        bench_die("cuBLAS has no %s", name);
    }
    return found;
}

/* False: there is none. */
static bool blas_open(struct blas *blas, void *stream)
{
    static const char *const names[] = {"libcublas.so.13", "libcublas.so.12", "libcublas.so"};
    void *library = NULL;

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]) && library == NULL; i++) {
        library = dlopen(names[i], RTLD_NOW);
    }
    if (library == NULL) {
        return false;
    }
    *(void **)&blas->create = symbol(library, "cublasCreate_v2");
    *(void **)&blas->set_stream = symbol(library, "cublasSetStream_v2");
    *(void **)&blas->gemm = symbol(library, "cublasGemmEx");
    if (blas->create(&blas->handle) != 0 || blas->set_stream(blas->handle, stream) != 0) {
        bench_die("cuBLAS does not start");
    }
    return true;
}

/* c = a b in bf16 with fp32 sums. */
static void gemm(struct stolen *stolen, int m, int n, int k)
{
    enum {
        OP_N = 0,
        BF16 = 14,      /* CUDA_R_16BF */
        COMPUTE32 = 68, /* CUBLAS_COMPUTE_32F */
        ALGORITHM = -1, /* CUBLAS_GEMM_DEFAULT */
    };
    const float one = 1.0f;
    const float zero = 0.0f;
    uint64_t third = LOOP_BYTES / 4;
    int status = stolen->blas.gemm(
        stolen->blas.handle, OP_N, OP_N, m, n, k, &one, (const void *)stolen->memory, BF16, m,
        (const void *)(stolen->memory + third), BF16, k, &zero,
        (void *)(stolen->memory + 2 * third), BF16, m, COMPUTE32, ALGORITHM);

    if (status != 0) {
        bench_die("a product failed: cuBLAS status %d", status);
    }
}

/* Read so many bytes, a multiple of PASS_BYTES, in PTX: nothing but loads of 16 bytes. */
#define PASS_BLOCKS  1024
#define PASS_THREADS 256
#define PASS_BYTES   (4ull * PASS_BLOCKS * PASS_THREADS * 16)

static const char pass_ptx[] =
    ".version 7.0\n.target sm_80\n.address_size 64\n"
    ".visible .entry kvf_bench_pass(.param .u64 from, .param .u64 bytes, .param .u64 to)\n{\n"
    ".reg .pred %p<3>; .reg .b32 %r<32>; .reg .b64 %d<16>;\n"
    "ld.param.u64 %d1, [from]; ld.param.u64 %d2, [bytes]; ld.param.u64 %d3, [to];\n"
    "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;\n"
    "mad.lo.u32 %r4, %r1, %r2, %r3; mul.wide.u32 %d4, %r4, 16;\n"
    "mov.u32 %r5, %nctaid.x; mul.lo.u32 %r6, %r5, %r2; mul.wide.u32 %d5, %r6, 16;\n"
    "mov.u32 %r7, 0;\n"
    "next:\n"
    "add.u64 %d6, %d1, %d4; add.u64 %d7, %d6, %d5; add.u64 %d8, %d7, %d5; add.u64 %d9, %d8, %d5;\n"
    "ld.global.v4.u32 {%r8, %r9, %r10, %r11}, [%d6];\n"
    "ld.global.v4.u32 {%r12, %r13, %r14, %r15}, [%d7];\n"
    "ld.global.v4.u32 {%r16, %r17, %r18, %r19}, [%d8];\n"
    "ld.global.v4.u32 {%r20, %r21, %r22, %r23}, [%d9];\n"
    "xor.b32 %r8, %r8, %r9; xor.b32 %r10, %r10, %r11; xor.b32 %r12, %r12, %r13;\n"
    "xor.b32 %r14, %r14, %r15; xor.b32 %r16, %r16, %r17; xor.b32 %r18, %r18, %r19;\n"
    "xor.b32 %r20, %r20, %r21; xor.b32 %r22, %r22, %r23; xor.b32 %r8, %r8, %r10;\n"
    "xor.b32 %r12, %r12, %r14; xor.b32 %r16, %r16, %r18; xor.b32 %r20, %r20, %r22;\n"
    "xor.b32 %r8, %r8, %r12; xor.b32 %r16, %r16, %r20; xor.b32 %r8, %r8, %r16;\n"
    "xor.b32 %r7, %r7, %r8;\n"
    "shl.b64 %d10, %d5, 2; add.u64 %d4, %d4, %d10; setp.lt.u64 %p1, %d4, %d2; @%p1 bra next;\n"
    "setp.eq.u32 %p2, %r7, 305419896; @%p2 st.global.u32 [%d3], %r7;\n"
    "ret;\n}\n";

static void memory_pass(struct stolen *stolen, uint64_t bytes)
{
    uint64_t to = stolen->memory + LOOP_BYTES;
    void *parameters[3] = {&stolen->memory, &bytes, &to};

    gpu_must(stolen->gpu,
             stolen->gpu->driver.cuLaunchKernel(stolen->pass, PASS_BLOCKS, 1, 1, PASS_THREADS, 1, 1,
                                                0, stolen->engine, parameters, NULL),
             "memory pass");
}

static void step(struct stolen *stolen)
{
    switch (stolen->loop) {
    case LOOP_GEMM_4096:
        gemm(stolen, 4096, 4096, 4096);
        break;
    case LOOP_GEMM_8192:
        gemm(stolen, 8192, 8192, 8192);
        break;
    case LOOP_MEMBOUND:
        memory_pass(stolen, LOOP_BYTES);
        break;
    default:
        /* 4,096 tokens through Llama-3.1-8B's q, k, v and o, then up, gate and down; norms and
         * activations as passes over what they read and write */
        gemm(stolen, 6144, 4096, 4096);
        memory_pass(stolen, 128u << 20);
        gemm(stolen, 4096, 4096, 4096);
        memory_pass(stolen, 128u << 20);
        gemm(stolen, 28672, 4096, 4096);
        memory_pass(stolen, 384u << 20);
        gemm(stolen, 4096, 4096, 14336);
        break;
    }
}

/* ----------------------------------------------------------------------------------------------
 * KV beside it
 */
static void move_burst(struct stolen *stolen, uint32_t n)
{
    struct kvf_gpu_device *gpu = stolen->gpu;
    uint32_t i = n % RING;
    const struct gpu_load *load = &stolen->loads[i];
    uint64_t bytes = gpu_load_payloads_bytes(load);
    uint64_t device = load->parts[0].stored;

    if (stolen->is_onload) {
        gpu_must(gpu, gpu->driver.cuStreamWaitEvent(stolen->copy, stolen->done[i], 0), "wait");
        gpu_must(
            gpu,
            gpu->driver.cuMemcpyHtoDAsync(device, stolen->host + i * bytes, bytes, stolen->copy),
            "copy");
        gpu_must(gpu, gpu->driver.cuEventRecord(stolen->ready[i], stolen->copy), "record");
        return;
    }
    gpu_must(gpu, gpu->driver.cuStreamWaitEvent(stolen->engine, stolen->done[i], 0), "wait");
    gpu_load_encode(load, gpu, stolen->engine);
    gpu_must(gpu, gpu->driver.cuEventRecord(stolen->ready[i], stolen->engine), "record");
    gpu_must(gpu, gpu->driver.cuStreamWaitEvent(stolen->copy, stolen->ready[i], 0), "wait");
    gpu_must(gpu,
             gpu->driver.cuMemcpyDtoHAsync(stolen->host + i * bytes, device, bytes, stolen->copy),
             "copy");
    gpu_must(gpu, gpu->driver.cuEventRecord(stolen->done[i], stolen->copy), "record");
}

/* What has come in goes to its pages between two steps, as soon as it is there: the loop's stream
 * waits only if the link is behind. */
static void decode_burst(struct stolen *stolen, uint32_t n)
{
    struct kvf_gpu_device *gpu = stolen->gpu;
    uint32_t i = n % RING;

    gpu_must(gpu, gpu->driver.cuStreamWaitEvent(stolen->engine, stolen->ready[i], 0), "wait");
    gpu_load_decode(&stolen->loads[i], gpu, UINT32_MAX, 0, 0, stolen->engine);
    gpu_must(gpu, gpu->driver.cuEventRecord(stolen->done[i], stolen->engine), "record");
}

/* One window: its milliseconds. Bursts are spread evenly over its steps. On the way in a burst is
 * copied one burst's time before it is decoded. */
static double window_ms(struct stolen *stolen, uint32_t n_bursts)
{
    struct kvf_gpu_device *gpu = stolen->gpu;
    uint32_t steps = stolen->steps[stolen->loop];
    uint32_t moved = 0;
    uint32_t decoded = 0;

    gpu_must(gpu, gpu->driver.cuCtxSynchronize(), "synchronize");
    gpu_must(gpu, gpu->driver.cuEventRecord(stolen->begun, stolen->engine), "record");
    gpu_must(gpu, gpu->driver.cuStreamWaitEvent(stolen->copy, stolen->begun, 0), "wait");
    for (uint32_t i = 0; i < steps; i++) {
        step(stolen);
        while (moved < n_bursts && (uint64_t)moved * steps <= (uint64_t)i * n_bursts) {
            move_burst(stolen, moved++);
        }
        while (stolen->is_onload && decoded < n_bursts &&
               (uint64_t)(decoded + 1) * steps <= (uint64_t)(i + 1) * n_bursts) {
            decode_burst(stolen, decoded++);
        }
    }
    gpu_must(gpu, gpu->driver.cuEventRecord(stolen->ended, stolen->engine), "record");
    return gpu_timer_s(gpu, stolen->begun, stolen->ended) * 1e3;
}

/* ----------------------------------------------------------------------------------------------
 * Pairs
 */
static const uint32_t rates[] = {5, 20, 100}; /* GB of bf16 KV a second */

static void measure_rate(struct bench_run *run, struct stolen *stolen, uint32_t rate)
{
    const char *direction = stolen->is_onload ? "onload" : "offload";
    double burst_bytes = (double)stolen->loads[0].kv_bytes;
    uint32_t n_bursts = (uint32_t)((double)rate * 1e9 * run->seconds / burst_bytes + 0.5);
    char name[64];
    char slow[64];

    n_bursts = n_bursts == 0 ? 1 : n_bursts;
    snprintf(name, sizeof(name), "stolen_%s_%s_%u", loop_names[stolen->loop], direction, rate);
    snprintf(slow, sizeof(slow), "slowdown_%s_%s_%u", loop_names[stolen->loop], direction, rate);
    if (run->only != NULL && strcmp(run->only, name) != 0 && strcmp(run->only, slow) != 0) {
        return;
    }
    (void)window_ms(stolen, n_bursts);
    for (uint32_t i = 0; i < run->n_pairs; i++) {
        double with = 0;
        double without;

        if (i % 2 == 0) {
            with = window_ms(stolen, n_bursts);
        }
        without = window_ms(stolen, 0);
        if (i % 2 != 0) {
            with = window_ms(stolen, n_bursts);
        }
        bench_print_pair(name, with - without, n_bursts * burst_bytes / GIB);
        bench_print_pair(slow, with, without);
    }
}

/* The same window twice: what the method finds where nothing is stolen. */
static void measure_control(struct bench_run *run, struct stolen *stolen)
{
    char name[64];

    snprintf(name, sizeof(name), "control_%s", loop_names[stolen->loop]);
    for (uint32_t i = 0; i < run->n_pairs && (run->only == NULL || strcmp(run->only, name) == 0);
         i++) {
        double first = window_ms(stolen, 0);
        double second = window_ms(stolen, 0);

        bench_print_pair(name, i % 2 == 0 ? first - second : second - first,
                         rates[1] * 1e9 * run->seconds / GIB);
    }
}

/* Steps that fill a window. */
static void calibrate(struct bench_run *run, struct stolen *stolen)
{
    double ms;

    stolen->steps[stolen->loop] = 8;
    (void)window_ms(stolen, 0);
    ms = window_ms(stolen, 0);
    stolen->steps[stolen->loop] = (uint32_t)(run->seconds * 1e3 / (ms / 8) + 1);
}

static void init(struct stolen *stolen)
{
    struct kvf_gpu_device *gpu = gpu_open();
    void *module;
    uint64_t payloads;

    stolen->gpu = gpu;
    stolen->engine = gpu_stream(gpu, KVF_GPU_PRIORITY_HIGH);
    stolen->copy = gpu_stream(gpu, KVF_GPU_PRIORITY_LOW);
    stolen->begun = gpu_timer(gpu);
    stolen->ended = gpu_timer(gpu);
    for (uint32_t i = 0; i < RING; i++) {
        stolen->ready[i] = gpu_timer(gpu);
        stolen->done[i] = gpu_timer(gpu);
    }
    stolen->memory = gpu_memory(gpu, LOOP_BYTES + PASS_BYTES);
    gpu_must(gpu, gpu->driver.cuMemsetD8Async(stolen->memory, 0x3c, LOOP_BYTES, NULL), "fill");
    gpu_must(gpu, gpu->driver.cuModuleLoadData(&module, pass_ptx), "the memory-bound kernel");
    gpu_must(gpu, gpu->driver.cuModuleGetFunction(&stolen->pass, module, "kvf_bench_pass"),
             "the memory-bound kernel");
    payloads = gpu_memory(gpu, RING * (uint64_t)CHUNKS * (32u << 20));
    gpu_load_init(&stolen->loads[0], gpu, GPU_LLAMA_8B, "balanced", CHUNKS, payloads);
    for (uint32_t i = 1; i < RING; i++) {
        gpu_load_clone(&stolen->loads[i], gpu, &stolen->loads[0],
                       payloads + i * gpu_load_payloads_bytes(&stolen->loads[0]));
    }
    stolen->host = gpu_host_memory(gpu, RING * gpu_load_payloads_bytes(&stolen->loads[0]));
    for (uint32_t i = 0; i < RING; i++) { /* records to load */
        stolen->loop = LOOP_MEMBOUND;
        stolen->is_onload = false;
        move_burst(stolen, i);
    }
    gpu_must(gpu, gpu->driver.cuCtxSynchronize(), "records");
}

static void skip_loop(const char *loop)
{
    static const char *const kinds[] = {"stolen", "slowdown"};
    static const char *const directions[] = {"offload", "onload"};
    char name[64];

    snprintf(name, sizeof(name), "control_%s", loop);
    bench_print_skip(name, "no libcublas on this machine");
    for (uint32_t i = 0; i < 12; i++) {
        snprintf(name, sizeof(name), "%s_%s_%s_%u", kinds[i % 2], loop, directions[i / 2 % 2],
                 rates[i / 4]);
        bench_print_skip(name, "no libcublas on this machine");
    }
}

int main(int argc, char **argv)
{
    static struct stolen stolen;
    struct bench_run run;
    bool has_blas;

    bench_init(&run, argc, argv);
    init(&stolen);
    has_blas = blas_open(&stolen.blas, stolen.engine);
    for (int loop = 0; loop < LOOPS; loop++) {
        stolen.loop = (enum loop)loop;
        if (!has_blas && loop != LOOP_MEMBOUND) {
            skip_loop(loop_names[loop]);
            continue;
        }
        calibrate(&run, &stolen);
        measure_control(&run, &stolen);
        for (int direction = 0; direction < 2; direction++) {
            stolen.is_onload = direction == 1;
            for (size_t i = 0; i < sizeof(rates) / sizeof(rates[0]); i++) {
                measure_rate(&run, &stolen, rates[i]);
            }
        }
    }
    return 0;
}
