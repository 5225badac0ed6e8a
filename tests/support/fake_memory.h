/* SPDX-License-Identifier: Apache-2.0
 *
 * fake_memory.h: what the two halves of the fake driver share: fake_cuda.c knows which memory
 * copies may use, fake_memory.c where device memory comes from.
 */
#ifndef KVF_TESTS_FAKE_MEMORY_H
#define KVF_TESTS_FAKE_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gpu/driver.h"
#include "tests/support/fake_cuda.h"

#define FAKE_API __attribute__((visibility("default")))

#define FAKE_DECLARE(function, symbol, parameters)                                                 \
    FAKE_API int fake_##function parameters __asm__(symbol);
KVF_GPU_DRIVER_FUNCTIONS(FAKE_DECLARE)
#undef FAKE_DECLARE

extern struct fake_cuda_counts fake_counts;

/* What goes on while the host is in the driver. */
int fake_turns(void);

/* Copies may use this memory from here on, or no longer. bytes are not counted. */
void fake_range_add(const void *base, size_t bytes, bool is_registered, bool is_device);
int fake_range_remove(const void *base, bool is_registered, bool is_device, size_t *bytes_out);

#endif /* KVF_TESTS_FAKE_MEMORY_H */
