/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_loops.c: work that an engine has for a GPU.
 */
#include "tests/bench/gpu_loops.h"

#include <dlfcn.h>

#include "tests/bench/bench.h"

const char *const gpu_loop_names[LOOPS] = {"gemm4096", "gemm8192", "membound", "prefill"};

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
static void gemm(struct gpu_loops *loops, int m, int n, int k)
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
    int status = loops->blas.gemm(
        loops->blas.handle, OP_N, OP_N, m, n, k, &one, (const void *)loops->memory, BF16, m,
        (const void *)(loops->memory + third), BF16, k, &zero, (void *)(loops->memory + 2 * third),
        BF16, m, COMPUTE32, ALGORITHM);

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

static void memory_pass(struct gpu_loops *loops, uint64_t bytes)
{
    uint64_t to = loops->memory + LOOP_BYTES;
    void *parameters[3] = {&loops->memory, &bytes, &to};

    gpu_must(loops->gpu,
             loops->gpu->driver.cuLaunchKernel(loops->pass, PASS_BLOCKS, 1, 1, PASS_THREADS, 1, 1,
                                               0, loops->stream, parameters, NULL),
             "memory pass");
}

void gpu_loops_step(struct gpu_loops *loops, enum gpu_loop loop)
{
    switch (loop) {
    case LOOP_GEMM_4096:
        gemm(loops, 4096, 4096, 4096);
        break;
    case LOOP_GEMM_8192:
        gemm(loops, 8192, 8192, 8192);
        break;
    case LOOP_MEMBOUND:
        memory_pass(loops, LOOP_BYTES);
        break;
    default:
        /* 4,096 tokens through Llama-3.1-8B's q, k, v and o, then up, gate and down; norms and
         * activations as passes over what they read and write */
        gemm(loops, 6144, 4096, 4096);
        memory_pass(loops, 128u << 20);
        gemm(loops, 4096, 4096, 4096);
        memory_pass(loops, 128u << 20);
        gemm(loops, 28672, 4096, 4096);
        memory_pass(loops, 384u << 20);
        gemm(loops, 4096, 4096, 14336);
        break;
    }
}

void gpu_loops_init(struct gpu_loops *loops, struct kvf_gpu_device *gpu, void *stream)
{
    void *module;

    loops->gpu = gpu;
    loops->stream = stream;
    loops->memory = gpu_memory(gpu, LOOP_BYTES + PASS_BYTES);
    gpu_must(gpu, gpu->driver.cuMemsetD8Async(loops->memory, 0x3c, LOOP_BYTES, NULL), "fill");
    gpu_must(gpu, gpu->driver.cuModuleLoadData(&module, pass_ptx), "the memory-bound kernel");
    gpu_must(gpu, gpu->driver.cuModuleGetFunction(&loops->pass, module, "kvf_bench_pass"),
             "the memory-bound kernel");
    loops->has_blas = blas_open(&loops->blas, stream);
}
