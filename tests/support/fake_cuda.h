/* SPDX-License-Identifier: Apache-2.0
 *
 * fake_cuda.h: a CUDA driver without a GPU, for KVFERRY_CUDA_DRIVER.
 *
 * Device memory is host memory, which other processes with this driver can open. Nothing that is
 * queued happens at once: whenever the driver is called, some operations run, of streams chosen at
 * random, in any order that streams and events allow. So a wait that is missing shows, sooner or
 * later, as wrong bytes; which order it was follows from the seed. Kernels are known by name and
 * done by the C codecs. It is cuBLASLt as well, for KVFERRY_CUBLASLT.
 *
 * While the file that FAKE_CUDA_FAIL_FILE names is there, the device of every process fails, as one
 * does that has left the bus: those that were at work fail for good, and no other begins.
 *
 * With FAKE_CUDA_MPS in the environment it says that MPS runs.
 *
 * Besides the driver's functions the library exports those below, found by dlsym; they are for the
 * test that loaded it.
 */
#ifndef KVF_TESTS_FAKE_CUDA_H
#define KVF_TESTS_FAKE_CUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "codec/codec_gpu.h"
#include "codec/codec_latent.h"
#include "codec/codec_rebuild.h"

struct fake_cuda_counts {
    uint64_t operations; /* run so far */
    uint64_t kernels;
    uint64_t device_bytes; /* allocated, and those of other processes that are open here */
    uint64_t pinned_bytes; /* allocated and registered */
    uint64_t streams;
    uint64_t events;
    uint64_t unpinned_copies; /* through memory that is not pinned */
    uint64_t synchronizes;    /* calls that wait */
    uint64_t times;           /* read between two events */
    uint64_t times_ms;        /* of these, a millisecond a kernel */
};

/* X(name, result, parameters) */
#define FAKE_CUDA_CONTROLS(X)                                                                      \
    /* The order of everything from here on. */                                                    \
    X(fake_cuda_seed, void, (uint64_t seed))                                                       \
    X(fake_cuda_counts, void, (struct fake_cuda_counts * counts_out))                              \
    /* Is a copy from or to this host memory queued? */                                            \
    X(fake_cuda_is_pending, bool, (const void *memory, size_t bytes))                              \
    /* Fail for good when so many more operations have run. */                                     \
    X(fake_cuda_fail_after, void, (uint64_t operations))                                           \
    /* Let nothing that is queued run, until it is let again. */                                   \
    X(fake_cuda_hold, void, (bool is_held))                                                        \
    /* Refuse to register memory from here on. */                                                  \
    X(fake_cuda_refuse_pins, void, (bool is_refused))                                              \
    /* Refuse to make events with times from here on. */                                           \
    X(fake_cuda_refuse_times, void, (bool is_refused))                                             \
    /* Shared memory that a thread block may have from here on. */                                 \
    X(fake_cuda_shared_bytes, void, (uint32_t bytes))                                              \
    /* Let kernels that encode leave every n-th block to the processor; 0: none. */                \
    X(fake_cuda_redo_every, void, (uint32_t n))

struct fake_cuda {
#define FAKE_CUDA_MEMBER(name, result, parameters) result(*name) parameters;
    FAKE_CUDA_CONTROLS(FAKE_CUDA_MEMBER)
#undef FAKE_CUDA_MEMBER
};

/* C = A B^T, or A B, as gpu/blas.h has it. */
struct fake_product {
    uint64_t a;
    uint64_t b;
    uint64_t c;
    uint32_t m;
    uint32_t n;
    uint32_t k;
    uint32_t c_stride;
    int type; /* as cuBLAS numbers them */
    bool adds;
    bool is_by_columns; /* B is [k][n] */
};

/* Queue a product; a result as of the driver. */
int fake_product_queue(const struct fake_product *product, void *stream);
void fake_product_run(const struct fake_product *product);

/* K and V of a product. */
void fake_rebuild_run(const struct kvf_gpu_rebuild *work);

/* kvf_latent_clean, _narrow and _subtract. */
void fake_latent_run(const char *kernel, const struct kvf_gpu_latent_work *work);

/* Is there a kernel of this name? */
bool fake_kernel_exists(const char *name);

/* Do what it does. */
void fake_kernel_run(const char *name, const struct kvf_gpu_work *work, uint32_t tensors);

extern uint32_t fake_kernel_redo_every;

#endif /* KVF_TESTS_FAKE_CUDA_H */
