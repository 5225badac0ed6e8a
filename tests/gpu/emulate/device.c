/* SPDX-License-Identifier: Apache-2.0
 *
 * device.c: codec_device.h without a GPU: its memory is this machine's, its kernels are those of
 * kernels.h. Without the functions that nobody but the benches calls.
 */
#include "base/random.h"
#include "tests/gpu/codec_device.h"
#include "tests/gpu/emulate/kernels.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum {
    ALIGN_BYTES = 256,
    SHARED_BYTES = 227 << 10, /* of a thread block of an H100 */
};

static struct kvf_random_seeded seeds;
static const char *replaced; /* NULL: nothing is */
static const char *replacement;
static const char *preceded; /* NULL: see emulate_before */
static const char *preceding;
static uint32_t n_preceding;
static uint32_t n_preceding_stuck;
static uint32_t n_preceding_all;
static uint32_t n_blocks_max;

bool codec_device_open(void)
{
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
        printf("skipped: kernels are emulated with FMA and F16C, which this processor lacks\n");
        return false;
    }
    emulate_seed(1);
    return true;
}

void emulate_seed(uint64_t seed)
{
    kvf_random_seeded_init(&seeds, seed);
}

void codec_device_close(void)
{
}

void codec_device_replace(const void *fatbin, const char *kernel, const char *by)
{
    assert_null(fatbin);
    replaced = kernel;
    replacement = by;
}

void codec_device_restore(void)
{
    replaced = NULL;
}

void codec_device_limit(uint32_t n_blocks)
{
    n_blocks_max = n_blocks;
}

uint32_t codec_device_shared_bytes(void)
{
    return SHARED_BYTES;
}

uint64_t codec_device_alloc(size_t bytes)
{
    void *memory = aligned_alloc(ALIGN_BYTES, (bytes / ALIGN_BYTES + 1) * ALIGN_BYTES);
    assert_non_null(memory);
    return (uint64_t)(uintptr_t)memory;
}

void codec_device_free(uint64_t address)
{
    free((void *)(uintptr_t)address);
}

void codec_device_write(uint64_t to, const void *from, size_t bytes)
{
    memcpy((void *)(uintptr_t)to, from, bytes);
}

void codec_device_read(void *to, uint64_t from, size_t bytes)
{
    memcpy(to, (const void *)(uintptr_t)from, bytes);
}

void emulate_before(const char *kernel, const char *other, uint32_t n_times)
{
    preceded = kernel;
    preceding = other;
    n_preceding = n_times;
    n_preceding_stuck = 0;
    n_preceding_all = 0;
}

void emulate_before_counts(uint32_t *n_stuck_out, uint32_t *n_out)
{
    *n_stuck_out = n_preceding_stuck;
    *n_out = n_preceding_all;
}

static enum emulate_outcome launch(const char *kernel, const struct kvf_gpu_work *work,
                                   const struct kvf_gpu_launch *shape,
                                   char text_out[EMULATE_TEXT_BYTES])
{
    uint32_t n_blocks = shape->n_blocks;
    if (n_blocks_max != 0 && shape->blocks_a_processor != 0 && n_blocks > n_blocks_max) {
        n_blocks = n_blocks_max;
    }
    return emulate_launch(kernel, work, shape, n_blocks, (uint32_t)kvf_random_seeded_next(&seeds),
                          text_out);
}

static void launch_preceding(const struct kvf_gpu_work *work, const struct kvf_gpu_launch *shape)
{
    char text[EMULATE_TEXT_BYTES];
    for (uint32_t i = 0; i < n_preceding; i++) {
        enum emulate_outcome outcome = launch(preceding, work, shape, text);
        assert_int_not_equal(outcome, EMULATE_MISSING);
        n_preceding_stuck += outcome == EMULATE_STUCK ? 1 : 0;
        n_preceding_all++;
    }
}

void codec_device_launch(const struct kvf_gpu_work *work, const struct kvf_gpu_launch *launches,
                         uint32_t n_launches)
{
    char text[EMULATE_TEXT_BYTES];
    for (uint32_t i = 0; i < n_launches; i++) {
        const char *kernel = launches[i].kernel;
        if (preceded != NULL && strcmp(kernel, preceded) == 0) {
            launch_preceding(work, &launches[i]);
        }
        if (replaced != NULL && strcmp(kernel, replaced) == 0) {
            kernel = replacement;
        }
        switch (launch(kernel, work, &launches[i], text)) {
        case EMULATE_STUCK:
            fail_msg("%s is stuck: %s", kernel, text);
            break;
        case EMULATE_MISSING:
            fail_msg("%s is not emulated", kernel);
            break;
        default:
            break;
        }
    }
}

void codec_device_wait(void)
{
}

/* Where its work lies is what the kernel is given as its parts. */
static void launch_other(const void *work, const char *kernel, uint32_t n_blocks,
                         uint32_t n_threads)
{
    const struct kvf_gpu_work there = {.parts = (uint64_t)(uintptr_t)work};
    const struct kvf_gpu_launch shape = {
        .kernel = kernel, .n_blocks = n_blocks, .n_threads = n_threads};
    codec_device_launch(&there, &shape, 1);
}

void codec_device_rebuild(const struct kvf_gpu_rebuild *work, const char *kernel)
{
    launch_other(work, kernel, work->n_pieces * work->piece_tokens, KVF_GPU_REBUILD_THREADS);
}

void codec_device_latent(const struct kvf_gpu_latent_work *work, const char *kernel)
{
    launch_other(work, kernel, kvf_gpu_latent_blocks(work->n), KVF_GPU_LATENT_THREADS);
}
